//! What containers may take of the machine, which must have control groups.

use std::{fs, path::PathBuf, time::Duration};

use berth_runtime::{ContainerId, ExecCall, Limits, Processes, Reason, Runtime as _, groups_of};

use crate::scratch::{Scratch, exit, processes, texts, until};

/// The value of a control group's file, of which version 1 and 2 have different ones.
fn setting(scratch: &Scratch, id: &ContainerId, files: [&str; 2]) -> String {
    let own = format!("pod{}/{}_{}", id.pod_uid, id.name, id.attempt);
    let groups = groups_of(&scratch.state()).into_iter().filter(|group| group.ends_with(&own));
    let mut found = groups.flat_map(|group| files.map(|file| group.join(file))).filter(|path| path.exists());
    let path: PathBuf = found.next().unwrap_or_else(|| panic!("no group of {own} has {files:?}"));
    fs::read_to_string(path).unwrap().trim().to_owned()
}

async fn exec(runtime: &Processes, id: &ContainerId, script: &str) -> (String, i32) {
    use tokio::io::AsyncReadExt as _;
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let call = ExecCall { command, ..ExecCall::default() };
    let mut exec = runtime.exec(id, call).await.unwrap();
    let mut printed = String::new();
    exec.stdout.take().unwrap().read_to_string(&mut printed).await.unwrap();
    (printed, exec.wait().await.unwrap())
}

#[tokio::test]
async fn a_container_is_in_a_group_with_its_limits_and_so_is_what_is_run_in_it() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    assert_eq!(runtime.limits_containers(), Ok(()));
    let mut spec = scratch.sh("exec sleep 1000");
    spec.limits =
        Limits { cpu_shares: Some(512), cpu_millis: Some(250), memory: Some(64 << 20), pids: Some(50) };
    spec.pod_limits = Limits { pids: Some(60), ..Limits::default() };
    spec.oom_score_adj = Some(321);
    let id = runtime.start(spec).await.unwrap();
    assert_eq!(setting(&scratch, &id, ["memory.limit_in_bytes", "memory.max"]), (64 << 20).to_string());
    assert_eq!(setting(&scratch, &id, ["pids.max", "pids.max"]), "50");
    let quota = setting(&scratch, &id, ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(quota == "25000" || quota == "25000 100000", "{quota}");
    assert_eq!(setting(&scratch, &id, ["tasks", "cgroup.procs"]).lines().count(), 1, "the shim is outside");

    let group = format!("pod{}/main_0", id.pod_uid);
    let (printed, code) = exec(&runtime, &id, "cat /proc/self/cgroup /proc/self/oom_score_adj").await;
    assert!(printed.lines().filter(|line| line.ends_with(&group)).count() >= 1 && code == 0, "{printed}");
    assert!(printed.ends_with("\n321\n"), "{printed}");
    let usage = runtime.usages().await.into_iter().find(|(known, _)| *known == id).unwrap().1;
    assert!(usage.memory > 0 && usage.pids == 1 && usage.cpu > 0, "{usage:?}");

    runtime.stop(&id, Duration::ZERO).await;
    assert!(!groups_of(&scratch.state()).iter().any(|group| group.to_string_lossy().contains("/pod")));
    runtime.remove(&id).await.unwrap();
    drop(runtime);
    until("the group of all pods is gone", || groups_of(&scratch.state()).is_empty()).await;
}

#[tokio::test]
async fn a_container_that_takes_too_much_memory_is_killed_for_that() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = scratch.sh("echo begun; exec tail /dev/zero");
    spec.limits.memory = Some(16 << 20);
    let (id, log) = (runtime.start(spec.clone()).await.unwrap(), spec.log.clone());
    let ended = exit(&runtime, &id).await;
    assert_eq!((ended.code, ended.signal, ended.reason), (137, Some(9), Reason::OutOfMemory), "{ended:?}");
    assert_eq!(ended.reason.as_str(), "OOMKilled");
    assert_eq!(texts(&log), ["begun"]);
    // Another runtime learns the same, though the control group is gone.
    drop(runtime);
    let runtime = scratch.open();
    assert_eq!(exit(&runtime, &id).await.reason, Reason::OutOfMemory);
    // What is killed by somebody else was not out of memory.
    let mut spec = scratch.sh("kill -9 $$");
    spec.limits.memory = Some(16 << 20);
    let (_, ended) = scratch.run(&runtime, spec).await;
    assert_eq!((ended.code, ended.reason), (137, Reason::Error));
}

#[tokio::test]
async fn a_pod_has_no_more_processes_than_it_may() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = scratch
        .sh("i=0; while test $i -lt 40; do sleep 1000 & i=$((i+1)); done; echo all were started; wait");
    spec.pod_limits.pids = Some(20);
    let (printed, ended) = scratch.run(&runtime, spec).await;
    assert!(printed.contains("fork") && ended.code != 0, "{printed}");
}

#[tokio::test]
async fn what_a_killed_runtime_left_is_gone_after_the_next_start() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = scratch.sh("exec sleep 4242001");
    spec.limits.memory = Some(64 << 20);
    let id = runtime.start(spec).await.unwrap();
    let ended = runtime.start(scratch.sh("true")).await.unwrap();
    exit(&runtime, &ended).await;
    drop(runtime);
    // As after a kill between making the groups and starting the container, and after one whose container is gone.
    let groups = groups_of(&scratch.state());
    let own = groups.iter().filter(|group| group.ends_with(format!("pod{}/main_0", id.pod_uid)));
    for group in own {
        fs::create_dir(group.with_file_name("main_7")).unwrap();
        fs::create_dir_all(group.parent().unwrap().with_file_name("podgone").join("c_0")).unwrap();
    }
    let runtime = scratch.open();
    let left = groups_of(&scratch.state());
    assert!(!left.iter().any(|group| group.ends_with("main_7") || group.ends_with("podgone")), "{left:?}");
    assert!(left.iter().any(|group| group.ends_with("main_0")), "the container that runs keeps its group");
    assert_eq!(setting(&scratch, &id, ["memory.limit_in_bytes", "memory.max"]), (64 << 20).to_string());
    runtime.stop(&id, Duration::ZERO).await;
    assert!(processes("sleep 4242001").is_empty());
    drop(runtime);
    until("no group is left", || groups_of(&scratch.state()).is_empty()).await;
}
