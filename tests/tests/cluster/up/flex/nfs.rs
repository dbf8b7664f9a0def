//! The tutorial's volume and pod, with a real NFS server: by Berth's FlexVolume driver, and by the tutorial's script.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::flex::{self, Driver};
use berth_e2e::nfs::Server;
use berth_e2e::up::{Leftovers, Machine};
use serde_json::json;

use super::{IMAGE, plugins, root};
use crate::up::{text, until_empty};

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Installs Berth's driver as k8s/nfs, for a server on a port of its own.
fn install(machine: &Machine, server: &Server) -> Result<()> {
    let (plugins, state) = (shown(&plugins(machine)), shown(&machine.dir().join("flex")));
    let words = ["flex", "install", "--plugin-dir", &plugins, "--state-dir", &state, "--mount-mode=fuse"];
    machine.says(&[&words[..], &["--default-mount-options", &server.options]].concat()).map(drop)
}

/// Checks that a pod's volume is mounted where the kubelet has it, and that what the pod writes is on the share.
fn is_on_share(machine: &Machine, server: &Server, pod: &str, volume: &str) -> Result<PathBuf> {
    let uid = text(&machine.get(&format!("pod/{pod}"))?, "/metadata/uid").to_owned();
    let directory = PathBuf::from(format!("{}/pods/{uid}/volumes/k8s~nfs/{volume}", root(machine)?));
    let mounts = Leftovers::of(&machine.data().canonicalize()?)?.mounts;
    let here = mounts.iter().filter(|mount| **mount == directory).count();
    ensure!(here == 1, "{} is mounted {here} times: {mounts:?}", directory.display());
    machine.exec(pod, &format!("echo by {pod} > /data/file"))?;
    for place in [&directory, &server.export()] {
        let found = fs::read_to_string(place.join("file")).with_context(|| shown(place))?;
        ensure!(found == format!("by {pod}\n"), "{found:?} in {}", place.display());
    }
    Ok(directory)
}

#[test]
fn the_example_is_served_by_the_installed_driver() -> Result<()> {
    let (server, machine) = (Server::start(&[])?, Machine::start()?);
    install(&machine, &server)?;
    machine.apply_example("flexvolume.yaml")?;
    machine.ready("test")?;
    let written = server.export().join("from-pod");
    machine.until("the pod's file is on the share", || {
        Ok(fs::read_to_string(&written).is_ok_and(|file| file == "hello\n").then_some(()))
    })?;
    is_on_share(&machine, &server, "test", "test")?;

    // The same in the pod itself, with a slash, for reading too.
    let source = |read_only: bool| {
        json!({ "name": "vol", "flexVolume": {
            "driver": "k8s/nfs", "readOnly": read_only, "options": { "server": "127.0.0.1", "share": "/export" },
        } })
    };
    let (inline, reader) =
        (flex::pod("inline", source(false), IMAGE), flex::pod("reader", source(true), IMAGE));
    machine.apply(&flex::manifest(&[inline, reader]))?;
    machine.ready("inline")?;
    machine.ready("reader")?;
    let directory = is_on_share(&machine, &server, "inline", "vol")?;
    ensure!(machine.exec("reader", "cat /data/file")? == "by inline\n");
    ensure!(machine.exec("reader", "touch /data/other").is_err(), "a volume for reading can be written");

    machine.kubectl(&["delete", "pods", "--all", "--timeout=45s"])?;
    machine.delete("pvc/test pv/test")?;
    until_empty(&machine)?;
    ensure!(!directory.exists(), "{} is still there", directory.display());
    let records = berth_e2e::machine::listing(&machine.dir().join("flex/nfs"))?;
    ensure!(records.iter().all(|record| record == "mounts/"), "{records:?}");
    let plugins = shown(&plugins(&machine));
    machine.says(&["flex", "uninstall", "--plugin-dir", &plugins])?;
    machine.finish()
}

#[test]
fn the_tutorials_script_serves_the_example_as_a_driver_of_somebody_else() -> Result<()> {
    let (server, machine) = (Server::start(&[])?, Machine::start()?);
    let driver = Driver::install_script(&plugins(&machine), "k8s", Some(&server))?;
    ensure!(driver.name == "k8s/nfs");
    machine.apply_example("flexvolume.yaml")?;
    machine.ready("test")?;
    is_on_share(&machine, &server, "test", "test")?;
    machine.delete("pod/test pvc/test pv/test")?;
    until_empty(&machine)?;
    let mut calls = driver.calls(&[])?;
    calls.dedup();
    ensure!(calls == ["init", "mount", "unmount"], "{calls:?}");
    machine.finish()
}
