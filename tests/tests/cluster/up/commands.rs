//! The commands themselves: up, down, status, demo, explain.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::Path,
    process::Stdio,
};

use anyhow::{Context as _, Result, bail, ensure};
use berth_e2e::up::{Leftovers, Machine, NODE, texts, wait};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::up::{claim, pod, says, together};

/// How many demos may be over before they could be interrupted.
const DEMOS: usize = 5;

#[test]
fn the_demo_ends_well_and_leaves_nothing() -> Result<()> {
    let machine = Machine::new()?;
    let before = berth_e2e::machine::listing(machine.dir())?;
    let mut demo = machine.command(&["demo", "--no-pause"]);
    let output = demo.env("TMPDIR", machine.dir()).env_remove("BERTH_DATA_DIR").output()?;
    let (printed, complaint) = texts(&output);
    ensure!(output.status.success(), "{}: {complaint}{printed}", output.status);
    ensure!(complaint.is_empty(), "{complaint}");
    for step in [
        "Provision",
        "create PersistentVolumeClaim demo (64Mi)",
        "CreateVolume",
        "NodeStageVolume",
        "NodePublishVolume",
        "hello from",
        "128Mi",
        "Delete",
    ] {
        says(&printed, step)?;
    }
    machine.nothing_left()?;
    let now = berth_e2e::machine::listing(machine.dir())?;
    ensure!(now == before, "{now:?}, but it was {before:?}");
    Ok(())
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing() -> Result<()> {
    let machine = Machine::new()?;
    let before = berth_e2e::machine::listing(machine.dir())?;
    for _ in 0..DEMOS {
        let was_interrupted = interrupt_demo(&machine)?;
        machine.nothing_left()?;
        let now = berth_e2e::machine::listing(machine.dir())?;
        ensure!(now == before, "{now:?}, but it was {before:?}");
        if was_interrupted {
            return Ok(());
        }
    }
    bail!("{DEMOS} demos were over before they could be interrupted")
}

/// Starts a demo and interrupts it while its volume is mounted; whether it was not over before.
fn interrupt_demo(machine: &Machine) -> Result<bool> {
    let mut demo = machine.command(&["demo", "--no-pause", "--data-dir"]);
    let mut child = demo.arg(machine.data()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let is_mounted = || anyhow::Ok(!Leftovers::of(machine.data())?.mounts.is_empty());
    let ended = machine.until("something is mounted", || {
        let ended = child.try_wait()?;
        Ok((ended.is_some() || is_mounted()?).then_some(ended))
    })?;
    if let Some(status) = ended {
        ensure!(status.success(), "it ended by itself with {status}");
        return Ok(false);
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a child has an id")?;
    // It goes no further while it is looked at.
    kill_process(pid, Signal::STOP)?;
    let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(pid), stopped)?;
    let in_time = is_mounted()?;
    if in_time {
        kill_process(pid, Signal::INT)?;
    }
    kill_process(pid, Signal::CONT)?;
    let status = wait(&mut child)?;
    ensure!(status.success() != in_time, "interrupted: {in_time}, and it ended with {status}");
    Ok(in_time)
}

#[test]
fn up_goes_on_in_the_background_until_it_is_told_to_stop() -> Result<()> {
    let machine = Machine::new()?;
    says(&machine.refuses(&["status"])?, "berth up")?;
    says(&machine.refuses(&["explain", "pvc/data"])?, "berth up")?;
    says(&machine.says(&["down"])?, "Nothing is in")?;

    let up = ["up", "--detach", "--listen", "127.0.0.1:0", "--node-name", NODE];
    says(&machine.says(&up)?, "kubectl apply")?;
    machine.apply(&together(&[
        claim("data"),
        pod("one", "data", "echo $$ >> /data/lives; exec sleep 1000000"),
    ]))?;
    machine.ready("one")?;
    machine.exec_until("one", "cat /data/lives", |lives| lives.lines().count() == 1)?;
    let status = machine.says(&["status"])?;
    for line in ["node-1: ready; drivers: local.berth.dev", "claims      1 Bound", "pods        1 Running"] {
        says(&status, line)?;
    }
    // Again is no mistake.
    says(&machine.says(&up)?, "already runs")?;

    machine.says(&["down"])?;
    machine.nothing_left()?;
    says(&machine.refuses(&["status"])?, "berth up")?;

    // Objects and data stay, and the pod runs again.
    machine.says(&up)?;
    // That it is ready may still be said of its first life.
    machine.ready("one")?;
    machine.exec_until("one", "cat /data/lives", |lives| lives.lines().count() == 2)?;
    machine.says(&["down", "--purge"])?;
    machine.nothing_left()?;
    let outside: Vec<String> = berth_e2e::machine::listing(machine.dir())?
        .into_iter()
        .filter(|line| !line.starts_with(".kube/") && !line.starts_with("berth "))
        .collect();
    ensure!(outside.is_empty(), "besides kubectl's cache and the program there is {outside:?}");
    Ok(())
}

#[test]
fn explain_reads_the_cluster_that_kubeconfig_names() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
    machine.ready("one")?;
    let kubeconfig = machine.data().join("apiserver/kubeconfig");
    let explain = || {
        let mut command = machine.command(&["explain", "pvc/data"]);
        command.env_remove("BERTH_DATA_DIR");
        command
    };
    // Without the data directory there is no timeline, and everything else is there.
    let explained = machine.explain_with("pvc/data", explain().env("KUBECONFIG", &kubeconfig))?;
    says(&explained, "No problems found")?;
    ensure!(!explained.contains("NodePublishVolume"), "{explained}");
    let absent = machine.dir().join("absent");
    let complaint = texts(&explain().env("KUBECONFIG", &absent).output()?).1;
    says(&complaint, "KUBECONFIG")?;
    // What the command line names counts for more.
    for flag in [["--kubeconfig", path(&kubeconfig)?], ["--data-dir", path(machine.data())?]] {
        let explained = machine.explain_with("pvc/data", explain().args(flag).env("KUBECONFIG", &absent))?;
        says(&explained, "No problems found")?;
        ensure!(explained.contains("NodePublishVolume") == (flag[0] == "--data-dir"), "{explained}");
    }
    machine.finish()
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("the path is UTF-8")
}

#[test]
fn a_data_directory_that_may_not_be_read_is_not_called_empty() -> Result<()> {
    const NOBODY: u32 = 65534;
    let machine = Machine::start()?;
    // The program can be reached; the data directory is root's.
    fs::set_permissions(machine.dir(), fs::Permissions::from_mode(0o755))?;
    for (args, advice) in
        [(&["explain", "pvc/data"][..], "Use sudo, or --kubeconfig"), (&["status"], "Use sudo")]
    {
        let output = machine.command(args).uid(NOBODY).gid(NOBODY).output()?;
        let complaint = texts(&output).1;
        ensure!(!output.status.success(), "{args:?} succeeded");
        says(&complaint, &format!("cannot read {}: ", machine.data().display()))?;
        says(&complaint.to_lowercase(), "permission denied")?;
        says(&complaint, advice)?;
    }
    machine.finish()
}

#[test]
fn looking_at_a_directory_does_not_make_it_a_data_directory() -> Result<()> {
    let machine = Machine::new()?;
    let other = machine.dir().join("other");
    fs::create_dir(&other)?;
    fs::write(other.join("mine"), "kept")?;
    for args in [&["status"][..], &["explain", "pvc/data"]] {
        let output = machine.command(args).env("BERTH_DATA_DIR", &other).output()?;
        says(&texts(&output).1, "no berth runs in")?;
    }
    let output = machine.command(&["down", "--purge"]).env("BERTH_DATA_DIR", &other).output()?;
    says(&texts(&output).1, "is no data directory of Berth")?;
    ensure!(fs::read_to_string(other.join("mine"))? == "kept");
    Ok(())
}

#[test]
fn up_names_the_classes_that_exist() -> Result<()> {
    let machine = Machine::start()?;
    says(&machine.log(), "class       berth-local (default)\n")?;
    machine.finish()?;
    let machine = Machine::start_with(&["--driver", "nfs"])?;
    says(&machine.log(), "class       none yet")?;
    ensure!(!machine.log().contains("berth-local"), "{}", machine.log());
    machine.finish()
}

#[test]
fn status_names_objects_whose_records_are_damaged() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.kubectl(&["create", "configmap", "precious", "--from-literal=key=before"])?;
    machine.kubectl(&["create", "configmap", "other", "--from-literal=key=kept"])?;
    ensure!(!machine.says(&["status"])?.contains("NOT WELL"), "nothing is damaged yet");
    machine.kill()?;
    let journal = machine.data().join("apiserver/store/objects");
    let mut bytes = fs::read(&journal)?;
    let text = b"before";
    let at = bytes.windows(text.len()).rposition(|window| window == text).context("the record is there")?;
    bytes[at] ^= 1;
    fs::write(&journal, bytes)?;
    machine.restart()?;
    let status = machine.says(&["status"])?;
    says(&status, "NOT WELL")?;
    says(&status, "default/precious")?;
    says(&status, "berth restore")?;
    says(&machine.kubectl(&["get", "configmap", "other", "-o", "jsonpath={.data.key}"])?, "kept")?;
    machine.finish()
}

#[test]
fn adopt_brings_back_the_volumes_of_a_running_driver_that_no_object_knows() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&together(&[
        claim("data"),
        pod("one", "data", "echo kept > /data/file; exec sleep 1000000"),
    ]))?;
    machine.ready("one")?;
    machine.exec_until("one", "cat /data/file", |text| text == "kept\n")?;
    says(&machine.says(&["adopt"])?, "Every volume is known")?;
    machine.delete("pod/one")?;
    // As after the loss of both objects: the driver keeps the volume.
    let volume = machine.get("pvc/data")?;
    let volume = crate::up::text(&volume, "/spec/volumeName").to_owned();
    let retain = r#"{"spec": {"persistentVolumeReclaimPolicy": "Retain"}}"#;
    machine.kubectl(&["patch", "pv", &volume, "--type=merge", "-p", retain])?;
    machine.delete("pvc/data")?;
    machine.delete(&format!("pv/{volume}"))?;

    says(
        &machine.says(&["adopt", "--storage-class", "berth-local", "--dry-run"])?,
        "1 volumes would be adopted",
    )?;
    ensure!(machine.all("pv")?.is_empty(), "a dry run creates nothing");
    says(&machine.says(&["adopt", "--storage-class", "berth-local"])?, "Adopted 1 volumes")?;
    says(&machine.says(&["adopt"])?, "Every volume is known")?;
    machine.apply(&together(&[claim("data"), pod("two", "data", "exec sleep 1000000")]))?;
    machine.ready("two")?;
    says(&machine.exec("two", "cat /data/file")?, "kept")?;
    machine.finish()
}

#[test]
fn an_interrupt_stops_pods_and_takes_their_volumes_away() -> Result<()> {
    for signal in [Signal::INT, Signal::TERM] {
        let mut machine = Machine::start()?;
        machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
        machine.ready("one")?;
        let status = machine.signal(signal)?;
        ensure!(status.success(), "{signal:?}: {status}");
        machine.nothing_left().with_context(|| format!("{signal:?}"))?;
    }
    Ok(())
}

#[test]
fn what_a_kill_left_is_cleaned_up_by_down() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
    machine.ready("one")?;
    machine.kill()?;
    ensure!(!Leftovers::of(machine.dir())?.processes.is_empty(), "the pod ended with berth up");
    says(&machine.says(&["down"])?, "Cleaned up after a kill")?;
    machine.finish()
}

#[test]
fn explain_tells_each_stage() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&claim("data"))?;
    machine.event("PersistentVolumeClaim", "data", "WaitForFirstConsumer")?;
    says(&machine.explain("pvc/data")?, "waits for the first pod")?;
    machine.apply(&pod("one", "data", "exec sleep 1000000"))?;
    machine.ready("one")?;
    for what in ["pvc/data", "pod/one"] {
        let explained = machine.explain(what)?;
        for said in ["CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", " ms"]
        {
            says(&explained, said)?;
        }
    }
    let explained = machine.explain("pvc/data")?;
    let line = |what: &str| explained.lines().position(|line| line.contains(what));
    let order = ["claim created", "CreateVolume", "volume object created", "NodePublishVolume"].map(line);
    ensure!(order.is_sorted() && order[0].is_some(), "{order:?}:\n{explained}");

    machine.kubectl(&["delete", "pvc", "data", "--wait=false"])?;
    says(&machine.explain("pvc/data")?, "still used by one")?;
    says(&machine.refuses(&["explain", "pvc/nothing"])?, "there is no claim nothing")?;
    says(&machine.refuses(&["explain", "data"])?, "pvc/data")?;
    machine.finish()
}
