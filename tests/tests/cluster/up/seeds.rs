//! The manifests of the course that Berth follows, as written there: their files are read from inside the pods.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{nfs::Server, up::Machine};

use super::{text, until_empty};

const FLEX: &str = include_str!("../../../manifests/seed-000-flexvolume.yaml");
const MYCSI: &str = include_str!("../../../manifests/seed-001-mycsi.yaml");
const PROJECTED: &str = include_str!("../../../manifests/seed-004-projected.yaml");
const STATIC: &str = include_str!("../../../manifests/seed-004-static.yaml");

#[test]
fn the_flexvolume_of_lesson_000_is_mounted_from_an_nfs_server() -> Result<()> {
    let server = Server::start(&["pseudo=/export"])?;
    let machine = Machine::start()?;
    // The manifest knows no port: the driver is told where the server listens.
    let plugins = machine.data().join("node/volumeplugins");
    let plugins = plugins.to_str().context("a path of tests is text")?;
    let state = machine.dir().join("flex");
    let state = state.to_str().context("a path of tests is text")?;
    let options = &server.options;
    machine.says(&[
        "flex",
        "install",
        "--plugin-dir",
        plugins,
        "--state-dir",
        state,
        "--default-mount-options",
        options,
    ])?;
    machine.apply(FLEX)?;
    machine.ready("test")?;
    machine.exec_until("test", "cat /data/from-pod", |seen| seen == "hello\n")?;
    ensure!(fs::read_to_string(server.export().join("from-pod"))? == "hello\n");
    machine.kubectl(&["delete", "pod/test", "pvc/test", "pv/test"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_deployment_of_lesson_001_writes_to_its_claim() -> Result<()> {
    let server = Server::start(&["pseudo=/home/nfsdata"])?;
    let machine = Machine::start_with(&[
        "--driver=nfs",
        "--driver-name=mycsi.jtthink.com",
        "--mount-mode=fuse",
        "--default-mount-options",
        &server.options,
    ])?;
    machine.apply(MYCSI)?;
    machine.wait("deployment/mycsi-nginx", "condition=Available")?;
    machine.exec_until("deployment/mycsi-nginx", "ls /tmp/data", |seen| seen == "podfile\n")?;
    let volume = text(&machine.get("pvc/mycsi-pvc")?, "/spec/volumeName").to_owned();
    ensure!(server.export().join(volume).join("podfile").exists());
    machine.kubectl(&["delete", "deployment/mycsi-nginx", "pvc/mycsi-pvc"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_projected_and_the_static_volume_of_lesson_004_hold_what_they_say() -> Result<()> {
    let machine = Machine::start()?;
    let directory = std::path::Path::new("/tmp/foo-pv");
    let was_there = directory.exists();
    machine.apply(PROJECTED)?;
    machine.apply(STATIC)?;
    machine.ready("volume-test")?;
    let script = "cd /projected-volume; cat my-group/my-username my-group/my-config labels cpu_limit";
    let read = machine.exec("volume-test", script)?;
    ensure!(read == "adminlevel=debugapp=\"volume-test\"1", "{read}");
    let refused = machine.exec("volume-test", "touch /projected-volume/no 2>&1 || true")?;
    ensure!(refused.contains("Read-only file system"), "{refused}");

    machine.wait("-n foo pod/volume-test", "condition=Ready")?;
    let own = format!("written-{}", std::process::id());
    let script = format!("echo kept > /mnt/foo/{own}; cat /mnt/foo/{own}");
    let read = machine.kubectl(&["exec", "-n", "foo", "volume-test", "--", "sh", "-c", &script]);
    let on_host = fs::read_to_string(directory.join(&own));
    machine.kubectl(&["delete", "pod/volume-test", "secret/mysecret", "configmap/myconfigmap"])?;
    machine.kubectl(&["delete", "-n", "foo", "pod/volume-test", "pvc/foo-pvc"])?;
    machine.kubectl(&["delete", "pv/foo-pv", "namespace/foo"])?;
    fs::remove_file(directory.join(&own))?;
    if !was_there {
        // Somebody else may be at the same lesson.
        let _ = fs::remove_dir(directory);
    }
    ensure!(read? == "kept\n" && on_host? == "kept\n");
    until_empty(&machine)?;
    machine.finish()
}
