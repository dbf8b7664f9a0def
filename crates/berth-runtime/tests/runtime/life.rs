//! How containers start, end, are stopped, and survive those who started them.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use berth_runtime::{ContainerId, ContainerSpec, Error, Processes, Reason, Runtime as _, State};
use berth_runtime::{Found, find};

use crate::scratch::{Scratch, exit, mount, processes, program, texts, until, until_within};

#[tokio::test]
async fn an_exit_is_reported_with_code_signal_message_and_times() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let ends = [
        ("exit 0", 0, None, Reason::Completed),
        ("exit 7", 7, None, Reason::Error),
        ("kill -SEGV $$", 139, Some(11), Reason::Error),
    ];
    for (script, code, signal, reason) in ends {
        let (_, exited) =
            scratch.run(&runtime, scratch.sh(&format!("echo why > /dev/termination-log; {script}"))).await;
        assert_eq!((exited.code, exited.signal, exited.reason), (code, signal, reason), "{script}");
        assert_eq!(exited.message, "why\n");
        assert!(exited.started.unwrap() <= exited.finished);
    }
    let long = scratch.sh("yes 0123456789 | head -c 10000 > /dev/termination-log");
    assert_eq!(scratch.run(&runtime, long).await.1.message.len(), 4096);
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let reasons: [(&[&str], &str); 3] = [
        (&["no-such-command"], r#"exec: "no-such-command": executable file not found in $PATH"#),
        (&["/no/such"], r#"exec: "/no/such": stat /no/such: no such file or directory"#),
        (&["/etc/passwd"], r#"exec: "/etc/passwd": permission denied"#),
    ];
    for (command, why) in reasons {
        let mut spec = scratch.spec(command);
        spec.user = Some(1000);
        let (_, exited) = scratch.run(&runtime, spec).await;
        assert_eq!((exited.code, exited.reason), (128, Reason::StartError));
        assert!(exited.message.ends_with(why), "{}", exited.message);
        assert_eq!(exited.started, None);
    }
    let mut spec = scratch.sh("true");
    spec.mounts = vec![crate::scratch::mount(&scratch.path("missing"), "/data", false)];
    let (_, exited) = scratch.run(&runtime, spec).await;
    assert!(exited.message.contains("missing: No such file"), "{}", exited.message);

    let Err(error) = runtime.start(scratch.spec(&[])).await else { panic!("there is nothing to run") };
    assert_eq!(error.sentence(), "container main names no command, and images are not pulled");
    let mut spec = scratch.sh("true");
    spec.pod_uid = "../escape".into();
    assert!(matches!(runtime.start(spec).await, Err(Error::Invalid { .. })));
    let mut spec = scratch.sh("true");
    spec.log = scratch.path("no/such/directory/0.log");
    let id = ContainerId { pod_uid: spec.pod_uid.clone(), name: spec.name.clone(), attempt: 0 };
    assert!(runtime.start(spec).await.is_err());
    assert_eq!(runtime.state(&id), None);
}

#[tokio::test]
async fn a_process_that_listens_ends_at_once_and_a_stubborn_one_after_the_grace() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let long = Duration::from_secs(100);
    let sleep = runtime.start(scratch.spec(&["sleep", "1000"])).await.unwrap();
    let begun = Instant::now();
    let exited = runtime.stop(&sleep, long).await;
    assert_eq!((exited.code, exited.signal, exited.reason), (143, Some(15), Reason::Error));
    assert!(begun.elapsed() < Duration::from_secs(10));

    let spec = scratch.sh("trap 'echo bye; exit 3' TERM; echo ready; while true; do sleep 0.01; done");
    let log = spec.log.clone();
    let polite = runtime.start(spec).await.unwrap();
    until("it is ready", || texts(&log) == ["ready"]).await;
    assert_eq!(runtime.stop(&polite, long).await.code, 3);
    assert_eq!(texts(&log), ["ready", "bye"]);

    let spec = scratch.sh("trap '' TERM; echo ready; (trap '' TERM; sleep 98765) & wait; sleep 98765");
    let log = spec.log.clone();
    let stubborn = runtime.start(spec).await.unwrap();
    until("it is ready", || texts(&log) == ["ready"]).await;
    let begun = Instant::now();
    let exited = runtime.stop(&stubborn, Duration::from_millis(300)).await;
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!((exited.code, exited.signal), (137, Some(9)));
    assert_eq!(processes("sleep 98765"), [""; 0]);
    assert_eq!(runtime.stop(&stubborn, long).await, exited, "already stopped");
}

#[tokio::test]
async fn orphans_are_collected_and_end_with_the_command() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    // One that has ended and is not collected stays in /proc. In the end there are process 1, the shell and the orphan
    // that goes on.
    let script = "for i in 1 2 3; do (sh -c 'sleep 0.01' &) ; done; (sleep 87654 &); \
                  until set -- /proc/[0-9]*; test $# -eq 3; do sleep 0.01; done; echo collected";
    let (printed, _) = scratch.run(&runtime, scratch.sh(script)).await;
    assert_eq!(printed, "collected");
    assert_eq!(processes("sleep 87654"), [""; 0]);
}

#[tokio::test]
async fn starting_twice_starts_once() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let count = scratch.dir("count");
    let mut spec = scratch.sh("mktemp -p /count; sleep 1000");
    spec.mounts = vec![crate::scratch::mount(&count, "/count", false)];
    let started = futures_util::future::join_all((0..5).map(|_| runtime.start(spec.clone()))).await;
    let id = started.into_iter().map(Result::unwrap).reduce(|a, b| {
        assert_eq!(a, b);
        a
    });
    let id = id.unwrap();
    until("it has run", || fs::read_dir(&count).unwrap().count() > 0).await;
    assert!(matches!(runtime.remove(&id).await, Err(Error::StillRunning(_))));
    runtime.stop(&id, Duration::from_secs(5)).await;
    runtime.start(spec.clone()).await.unwrap();
    assert!(matches!(runtime.state(&id), Some(State::Exited(_))), "it stays exited");
    assert_eq!(fs::read_dir(&count).unwrap().count(), 1);
    runtime.remove(&id).await.unwrap();
    runtime.remove(&id).await.unwrap();
    assert_eq!(runtime.state(&id), None);
    assert!(fs::read_dir(scratch.state()).unwrap().next().is_none());
    assert!(spec.log.exists());
}

#[tokio::test]
async fn a_container_that_was_forgotten_is_taken_up_and_not_started_twice() {
    let scratch = Scratch::new();
    let (forgetful, late, runtime) = (scratch.open(), scratch.open(), scratch.open());
    let count = scratch.dir("count");
    let script = "echo x >> /count/starts; while [ ! -e /count/end ]; do sleep 0.01; done; exit 3";
    let mut spec = scratch.sh(script);
    spec.mounts = vec![mount(&count, "/count", false)];
    let starts = || fs::read_to_string(count.join("starts")).unwrap_or_default();
    let id = runtime.start(spec.clone()).await.unwrap();
    until("it starts", || !starts().is_empty()).await;
    assert_eq!(forgetful.start(spec.clone()).await.unwrap(), id);
    assert!(matches!(forgetful.state(&id), Some(State::Running { .. })));
    fs::write(count.join("end"), "").unwrap();
    assert_eq!(exit(&forgetful, &id).await.code, 3);
    // One that has ended meanwhile, too.
    late.start(spec).await.unwrap();
    assert_eq!(exit(&late, &id).await.code, 3);
    assert_eq!(starts(), "x\n");
}

#[tokio::test]
async fn an_entry_that_is_no_container_disturbs_no_other() {
    let scratch = Scratch::new();
    let spec = scratch.spec(&["sleep", "1000"]);
    let id = scratch.open().start(spec).await.unwrap();
    let other = scratch.sh("true");
    let odd = scratch.state().join(format!("{}_main_0", other.pod_uid));
    fs::write(&odd, "not a directory").unwrap();
    let runtime = scratch.open();
    assert!(matches!(runtime.state(&id), Some(State::Running { .. })));
    let error = runtime.start(other).await.unwrap_err().sentence();
    assert!(error.contains("Not a directory"), "{error}");
    assert_eq!(fs::read_to_string(&odd).unwrap(), "not a directory");
    runtime.stop(&id, Duration::ZERO).await;
}

#[tokio::test]
async fn a_shim_that_is_killed_takes_its_container_along() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let id = runtime.start(scratch.spec(&["sleep", "76543"])).await.unwrap();
    kill_shim(&scratch, &id);
    let exited = exit(&runtime, &id).await;
    assert_eq!(exited.reason, Reason::ContainerStatusUnknown);
    assert_eq!(processes("sleep 76543"), [""; 0]);
}

fn kill_shim(scratch: &Scratch, id: &ContainerId) {
    let directory = scratch.state().join(format!("{}_{}_{}", id.pod_uid, id.name, id.attempt));
    let Found::Running(shim) = find(&directory).unwrap() else { panic!("it runs") };
    shim.kill().unwrap();
}

#[tokio::test]
async fn a_signal_that_comes_before_the_command_runs_reaches_it() {
    let scratch = Scratch::new();
    let spec = scratch.spec(&["sleep", "1000"]);
    // A container opens its log before it listens for signals, and a fifo is not open before somebody reads it.
    assert!(Command::new("mkfifo").arg(&spec.log).status().unwrap().success());
    let (log, id) =
        (spec.log.clone(), ContainerId { pod_uid: spec.pod_uid.clone(), name: "main".into(), attempt: 0 });
    let directory = scratch.state().join(format!("{}_main_0", spec.pod_uid));
    let starter = scratch.open();
    let starting = tokio::spawn(async move { starter.start(spec).await });
    until("it has told its pid", || matches!(find(&directory), Ok(Found::Running(_)))).await;
    let adopter = scratch.open();
    adopter.signal(&id, 15).unwrap();
    let reader = tokio::task::spawn_blocking(move || fs::read(log));
    assert_eq!(exit(&adopter, &id).await.signal, Some(15), "it was not lost");
    starting.await.unwrap().unwrap();
    reader.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_launcher_that_is_killed_is_replaced() {
    let scratch = Scratch::new();
    let own = scratch.path("own-launcher");
    // By a process of its own: what is open for writing here, other tests' children hold open for a moment, too, and a
    // program that is open for writing cannot be started.
    assert!(Command::new("cp").arg(program()).arg(&own).status().unwrap().success());
    let runtime = Processes::open(&scratch.state(), &own).unwrap();
    // Before there is any container, only the launcher runs this program.
    let launchers = processes(own.to_str().unwrap());
    assert_eq!(launchers.len(), 1);
    let pid = launchers[0].split_whitespace().next().unwrap();
    let running = runtime.start(scratch.spec(&["sleep", "1000"])).await.unwrap();
    assert!(Command::new("kill").args(["-9", pid]).status().unwrap().success());
    until("it is dead", || {
        processes(own.to_str().unwrap()).iter().any(|line| line.contains("defunct"))
            || !processes(own.to_str().unwrap()).iter().any(|line| line.trim_start().starts_with(pid))
    })
    .await;
    assert_eq!(scratch.run(&runtime, scratch.sh("exit 4")).await.1.code, 4);
    assert!(matches!(runtime.state(&running), Some(State::Running { .. })));
}

/// A program that starts containers and is killed.
struct Parent(Child);

impl Parent {
    fn start(scratch: &Scratch, specs: &[&ContainerSpec]) -> Self {
        let files = specs.iter().map(|spec| {
            let file = scratch.path(&format!("{}.json", spec.pod_uid));
            fs::write(&file, serde_json::to_vec(spec).unwrap()).unwrap();
            file
        });
        let mut parent =
            Command::new(program()).arg(scratch.state()).args(files).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "started\n");
        Self(parent)
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn containers_survive_their_parent_and_the_next_one_learns_everything() {
    let scratch = Scratch::new();
    let gate = scratch.dir("gate");
    let wait = |script: &str| {
        let mut spec = scratch.sh(&format!("until test -e /gate/open; do sleep 0.01; done; {script}"));
        spec.mounts = vec![crate::scratch::mount(&gate, "/gate", false)];
        spec
    };
    let (stays, ends, dies) =
        (scratch.sh("sleep 1000; exit 9"), wait("echo over; exit 5"), wait("sleep 1000"));
    drop(Parent::start(&scratch, &[&stays, &ends, &dies]));
    let id =
        |spec: &ContainerSpec| ContainerId { pod_uid: spec.pod_uid.clone(), name: "main".into(), attempt: 0 };
    kill_shim(&scratch, &id(&dies));
    fs::write(gate.join("open"), "").unwrap();
    until("one ends while nobody looks", || texts(&ends.log) == ["over"]).await;
    let directory = scratch.state().join(format!("{}_main_0", ends.pod_uid));
    until("it is gone", || matches!(find(&directory), Ok(Found::Ended))).await;
    let leftover = scratch.state().join("uid-x_never_0");
    fs::create_dir(&leftover).unwrap();

    let runtime = scratch.open();
    assert!(!leftover.exists());
    assert_eq!(runtime.containers().len(), 3);
    assert!(runtime.containers().iter().any(|known| known.pod_name == stays.pod_name));
    assert!(matches!(runtime.state(&id(&stays)), Some(State::Running { .. })));
    let exited = exit(&runtime, &id(&ends)).await;
    assert_eq!((exited.code, exited.reason), (5, Reason::Error));
    assert!(exited.started.is_some());
    assert_eq!(exit(&runtime, &id(&dies)).await.reason, Reason::ContainerStatusUnknown);
    let exited = runtime.stop(&id(&stays), Duration::from_secs(20)).await;
    assert_eq!(exited.code, 143);
    for spec in [&stays, &ends, &dies] {
        runtime.remove(&id(spec)).await.unwrap();
    }
    assert!(fs::read_dir(scratch.state()).unwrap().next().is_none());
}

#[tokio::test]
async fn a_parent_killed_at_any_moment_leaves_nothing_that_cannot_be_found() {
    let scratch = Scratch::new();
    let count = scratch.dir("count");
    let mut spec = scratch.sh("mktemp -p /count; exec sleep 65432");
    spec.mounts = vec![crate::scratch::mount(&count, "/count", false)];
    let file = scratch.path("spec.json");
    for delay in 0..12 {
        spec.attempt = delay;
        fs::write(&file, serde_json::to_vec(&spec).unwrap()).unwrap();
        let mut parent =
            Command::new(program()).arg(scratch.state()).arg(&file).stdout(Stdio::null()).spawn().unwrap();
        tokio::time::sleep(Duration::from_millis(2 * u64::from(delay))).await;
        parent.kill().unwrap();
        parent.wait().unwrap();
        let runtime = scratch.open();
        let running: Vec<_> = runtime.containers().into_iter().map(|known| known.id).collect();
        for id in running {
            runtime.stop(&id, Duration::ZERO).await;
            runtime.remove(&id).await.unwrap();
        }
        assert_eq!(processes("sleep 65432"), [""; 0], "after {delay} steps");
        assert!(fs::read_dir(scratch.state()).unwrap().next().is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_containers_leave_nothing_behind() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mounts = || {
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .filter(|line| line.contains("overlay"))
            .count()
    };
    let before = mounts();
    let fds = || fs::read_dir("/proc/self/fd").unwrap().count();
    let volume = scratch.dir("volume");
    let one = |number: usize| {
        let mut spec = scratch.sh(&format!("touch /data/{number}; exec sleep 54321"));
        spec.mounts = vec![crate::scratch::mount(&volume, "/data", false)];
        start_and_stop(runtime.clone(), spec)
    };
    futures_util::future::join_all((0..200).map(one)).await;
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 200);
    assert_eq!(processes("sleep 54321"), [""; 0]);
    assert_eq!(mounts(), before);
    assert!(fs::read_dir(scratch.state()).unwrap().next().is_none());
    until("descriptors are closed", || fds() < 150).await;
}

async fn start_and_stop(runtime: Processes, spec: ContainerSpec) {
    let volume = spec.mounts[0].source.join(spec.command[2].split(['/', ';']).nth(2).unwrap());
    let id = runtime.start(spec).await.unwrap();
    // It starts beside many others.
    until_within(Duration::from_mins(3), "it has written", || volume.exists()).await;
    assert_eq!(runtime.stop(&id, Duration::from_secs(60)).await.code, 143);
    runtime.remove(&id).await.unwrap();
}
