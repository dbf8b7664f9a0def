//! FlexVolume drivers with the kernel's NFS client and server, on `berth up`: the tutorial's script as a driver of somebody
//! else's, the same through the adapter, and Berth's own; and the kernel's client with Berth's own server. Runs in the virtual machine
//! of `testbed/vm`.

mod own_server;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::flex::{self, Driver};
use berth_e2e::machine;
use berth_e2e::up::Machine;
use serde_json::{Value, json};

/// The root of what the kernel's server exports by NFS version 4.
const ROOT: &str = "/srv/berth-flex";

/// Starts the kernel's server, once; gives the directory that is the share `export`.
fn serve() -> Result<PathBuf> {
    static STARTED: std::sync::OnceLock<std::result::Result<(), String>> = std::sync::OnceLock::new();
    let start = || -> Result<()> {
        let script = std::env::var("NFS_UP").context("NFS_UP names the script that starts the server")?;
        fs::create_dir_all(ROOT)?;
        machine::run("mount", &["-t", "tmpfs", "none", ROOT])?;
        fs::create_dir(Path::new(ROOT).join("export"))?;
        machine::run(&script, &[ROOT]).map(drop)
    };
    let started = STARTED.get_or_init(|| start().map_err(|error| format!("{error:#}")));
    started.clone().map_err(anyhow::Error::msg)?;
    Ok(Path::new(ROOT).join("export"))
}

/// What the kernel has mounted below a directory as NFS.
fn nfs_mounts(dir: &Path) -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mounts")?;
    let below = dir.display().to_string();
    let lines = table.lines().filter(|line| line.contains(&below) && line.contains(" nfs"));
    Ok(lines.map(str::to_owned).collect())
}

/// Has a pod of this name write to the share through a mount of the kernel's.
fn writes(machine: &Machine, export: &Path, pod: &str, directory: &str) -> Result<()> {
    machine.ready(pod)?;
    machine.exec(pod, &format!("echo by {pod} > /data/file"))?;
    let written = fs::read_to_string(export.join("file"))?;
    ensure!(written == format!("by {pod}\n"), "{written:?}");
    let mounts = nfs_mounts(machine.dir())?;
    ensure!(mounts.iter().filter(|line| line.contains(directory)).count() == 1, "{mounts:?}");
    Ok(())
}

/// Takes away the pod of the example, its claim and its volume, and stops the machine.
fn finish(machine: Machine, objects: &str) -> Result<()> {
    machine.delete(objects)?;
    machine.until("nothing is mounted", || Ok(nfs_mounts(machine.dir())?.is_empty().then_some(())))?;
    machine.finish()
}

#[test]
fn the_tutorials_script_serves_the_example() -> Result<()> {
    let export = serve()?;
    let machine = Machine::start()?;
    Driver::install_script(&machine.data().join("node/volumeplugins"), "k8s", None)?;
    machine.apply_example("flexvolume.yaml")?;
    writes(&machine, &export, "test", "/volumes/k8s~nfs/test")?;
    finish(machine, "pod/test pvc/test pv/test")
}

#[test]
fn the_tutorials_script_serves_a_pod_through_the_adapter() -> Result<()> {
    let (export, plugins) = (serve()?, tempfile::tempdir()?);
    let driver = Driver::install_script(plugins.path(), "k8s", None)?;
    let plugin = driver.executable()?.display().to_string();
    let machine = Machine::start_with(&["--driver=flex", "--flex-plugin", &plugin])?;
    let share: Value = json!({ "server": "127.0.0.1", "share": "export" });
    let objects = flex::pod_with_csi_claim("nfs.k8s.flex.berth.dev", "test", &share, "busybox");
    machine.apply(&flex::manifest(&objects))?;
    writes(&machine, &export, "claimed", "/volumes/kubernetes.io~csi/test/mount")?;
    finish(machine, "pod/claimed pvc/flex pv/test")
}

#[test]
fn berths_driver_serves_the_example_by_the_kernel() -> Result<()> {
    let export = serve()?;
    let machine = Machine::start()?;
    let plugins = machine.data().join("node/volumeplugins").display().to_string();
    let state = machine.dir().join("flex").display().to_string();
    machine.says(&["flex", "install", "--plugin-dir", &plugins, "--state-dir", &state])?;
    machine.apply_example("flexvolume.yaml")?;
    writes(&machine, &export, "test", "/volumes/k8s~nfs/test")?;
    finish(machine, "pod/test pvc/test pv/test")
}
