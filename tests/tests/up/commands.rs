//! The commands themselves: up, down, status, demo, explain.

use std::process::Stdio;

use anyhow::{Result, ensure};
use berth_e2e::up::{Leftovers, Machine, NODE, texts, wait};
use rustix::process::Signal;

use crate::{claim, pod, says, together};

#[test]
fn the_demo_ends_well_and_leaves_nothing() -> Result<()> {
    let machine = Machine::new()?;
    let before = berth_e2e::machine::listing(machine.dir())?;
    let mut demo = machine.command(&["demo", "--no-pause"]);
    let output = demo.env("TMPDIR", machine.dir()).env_remove("BERTH_DATA_DIR").output()?;
    let (printed, complaint) = texts(&output);
    ensure!(output.status.success(), "{}: {complaint}{printed}", output.status);
    ensure!(complaint.is_empty(), "{complaint}");
    for step in
        ["Provision", "CreateVolume", "NodeStageVolume", "NodePublishVolume", "hello from", "128Mi", "Delete"]
    {
        says(&printed, step)?;
    }
    let left = Leftovers::of(machine.dir())?;
    ensure!(left.is_nothing(), "{left:#?}");
    let now = berth_e2e::machine::listing(machine.dir())?;
    ensure!(now == before, "{now:?}, but it was {before:?}");
    Ok(())
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing() -> Result<()> {
    let machine = Machine::new()?;
    let before = berth_e2e::machine::listing(machine.dir())?;
    let mut demo = machine.command(&["demo", "--no-pause", "--data-dir"]);
    let mut child = demo.arg(machine.data()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    machine.until("something is mounted", || {
        Ok((!Leftovers::of(machine.data())?.mounts.is_empty()).then_some(()))
    })?;
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.expect("a child has an id"), Signal::INT)?;
    ensure!(!wait(&mut child)?.success());
    let left = Leftovers::of(machine.dir())?;
    ensure!(left.is_nothing(), "{left:#?}");
    let now = berth_e2e::machine::listing(machine.dir())?;
    ensure!(now == before, "{now:?}, but it was {before:?}");
    Ok(())
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
    let status = machine.says(&["status"])?;
    for line in ["node-1: ready; drivers: local.berth.dev", "claims      1 Bound", "pods        1 Running"] {
        says(&status, line)?;
    }
    // Again is no mistake.
    says(&machine.says(&up)?, "already runs")?;

    machine.says(&["down"])?;
    let left = Leftovers::of(machine.dir())?;
    ensure!(left.is_nothing(), "{left:#?}");
    says(&machine.refuses(&["status"])?, "berth up")?;

    // Objects and data stay, and the pod runs again.
    machine.says(&up)?;
    machine.ready("one")?;
    ensure!(machine.exec("one", "cat /data/lives")?.lines().count() == 2);
    machine.says(&["down", "--purge"])?;
    let left = Leftovers::of(machine.dir())?;
    ensure!(left.is_nothing(), "{left:#?}");
    let outside: Vec<String> = berth_e2e::machine::listing(machine.dir())?
        .into_iter()
        .filter(|line| !line.starts_with(".kube/") && !line.starts_with("berth "))
        .collect();
    ensure!(outside.is_empty(), "besides kubectl's cache and the program there is {outside:?}");
    Ok(())
}

#[test]
fn an_interrupt_stops_pods_and_takes_their_volumes_away() -> Result<()> {
    for signal in [Signal::INT, Signal::TERM] {
        let mut machine = Machine::start()?;
        machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
        machine.ready("one")?;
        let status = machine.signal(signal)?;
        ensure!(status.success(), "{signal:?}: {status}");
        let left = Leftovers::of(machine.dir())?;
        ensure!(left.is_nothing(), "{signal:?}: {left:#?}");
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
    machine.kubectl(&["delete", "pvc", "data", "--wait=false"])?;
    says(&machine.explain("pvc/data")?, "still used by one")?;
    says(&machine.refuses(&["explain", "pvc/nothing"])?, "there is no claim nothing")?;
    says(&machine.refuses(&["explain", "data"])?, "pvc/data")?;
    machine.finish()
}
