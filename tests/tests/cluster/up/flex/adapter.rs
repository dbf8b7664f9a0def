//! FlexVolume drivers through the adapter (`berth up --driver flex`): a pod gets their volumes by CSI, and a kill after any call
//! leaves nothing and mounts nothing twice.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::flex::{self, Driver, RECORDING};
use berth_e2e::nfs::Server;
use berth_e2e::up::Machine;
use serde_json::{Value, json};

use super::{IMAGE, PATCH, kill_after};
use crate::up::until_empty;

/// A machine that serves a driver by CSI, and the objects of a pod with a volume of it.
fn start(driver: &Driver, csi: &str, attributes: &Value) -> Result<(Machine, String)> {
    let plugin = driver.executable()?;
    let plugin = plugin.to_str().context("a path of tests is text")?;
    let machine = Machine::start_with(&["--driver=flex", "--flex-plugin", plugin])?;
    let objects = flex::pod_with_csi_claim(csi, "flex-pv", attributes, IMAGE);
    Ok((machine, flex::manifest(&objects)))
}

/// Deletes what is there, with a kill after each of these calls.
fn end(machine: &mut Machine, driver: &Driver, calls: &[&str]) -> Result<()> {
    driver.stop_after(calls.first().copied())?;
    machine.kubectl(&["delete", "pod", "claimed", "--wait=false"])?;
    kill_after_each(machine, driver, calls)?;
    machine.wait("pod/claimed", "delete")?;
    machine.delete("pvc/flex pv/flex-pv")?;
    until_empty(machine)?;
    let twice: Vec<_> = driver.calls(&[])?.into_iter().filter(|call| call.starts_with("TWICE")).collect();
    ensure!(twice.is_empty(), "{twice:?}");
    Ok(())
}

fn kill_after_each(machine: &mut Machine, driver: &Driver, calls: &[&str]) -> Result<()> {
    for (number, call) in calls.iter().enumerate() {
        kill_after(machine, driver, call, calls.get(number + 1).copied())?;
    }
    Ok(())
}

#[test]
fn a_driver_without_attachment_survives_a_kill_after_any_call() -> Result<()> {
    let plugins = tempfile::tempdir()?;
    let driver = Driver::install(plugins.path(), "berth.test", "plain", RECORDING)?;
    let (mut machine, objects) =
        start(&driver, "plain.berth.test.flex.berth.dev", &json!({ "disk": "one" }))?;
    driver.stop_after(Some("mount"))?;
    machine.apply(&objects)?;
    kill_after_each(&mut machine, &driver, &["mount"])?;
    machine.ready("claimed")?;
    machine.exec("claimed", "echo kept > /data/file && cat /data/file")?;
    end(&mut machine, &driver, &["unmount"])?;
    machine.finish()
}

#[test]
fn a_driver_with_attachment_survives_a_kill_after_any_call() -> Result<()> {
    let plugins = tempfile::tempdir()?;
    let driver = Driver::install(plugins.path(), "berth.test", "disk", RECORDING)?;
    let (mut machine, objects) = start(&driver, "disk.berth.test.flex.berth.dev", &json!({ "disk": "one" }))?;
    driver.stop_after(Some("attach"))?;
    machine.apply(&objects)?;
    kill_after_each(&mut machine, &driver, &["attach", "waitforattach", "mountdevice", "mount"])?;
    machine.ready("claimed")?;
    machine.exec("claimed", "echo kept > /data/file")?;
    driver.stop_after(Some("expandfs"))?;
    machine.kubectl(&["patch", "pvc", "flex", "-p", PATCH])?;
    kill_after_each(&mut machine, &driver, &["expandfs"])?;
    machine.wait("pvc/flex", "jsonpath={.status.capacity.storage}=2Mi")?;
    ensure!(machine.exec("claimed", "cat /data/file")? == "kept\n");
    end(&mut machine, &driver, &["unmount", "unmountdevice", "detach"])?;
    let attached = driver.attached()?;
    ensure!(attached.is_empty(), "still attached: {attached:?}");
    machine.finish()
}

#[test]
fn the_tutorials_script_survives_a_kill_after_any_call() -> Result<()> {
    let (server, plugins) = (Server::start(&[])?, tempfile::tempdir()?);
    let driver = Driver::install_script(plugins.path(), "k8s", Some(&server))?;
    let share = json!({ "server": "127.0.0.1", "share": "export" });
    let (mut machine, objects) = start(&driver, "nfs.k8s.flex.berth.dev", &share)?;
    driver.stop_after(Some("mount"))?;
    machine.apply(&objects)?;
    kill_after_each(&mut machine, &driver, &["mount"])?;
    machine.ready("claimed")?;
    machine.exec("claimed", "echo from the pod > /data/file")?;
    ensure!(fs::read_to_string(server.export().join("file"))? == "from the pod\n");
    end(&mut machine, &driver, &["unmount"])?;
    machine.finish()
}
