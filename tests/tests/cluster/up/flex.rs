//! FlexVolume drivers on a machine: how they are called, bad ones, and kills between any two calls.

mod adapter;
mod nfs;

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::flex::{self, Driver, RECORDING};
use berth_e2e::up::{Leftovers, Machine, NODE};
use serde_json::{Value, json};

use crate::up::{claim, pod, says, text, together, until_empty};

const IMAGE: &str = "busybox";
const PATCH: &str = r#"{"spec":{"resources":{"requests":{"storage":"2Mi"}}}}"#;

/// Where drivers are installed unless a flag says otherwise.
fn plugins(machine: &Machine) -> PathBuf {
    machine.data().join("node/volumeplugins")
}

fn root(machine: &Machine) -> Result<String> {
    let root = machine.data().canonicalize()?.join("node");
    Ok(root.to_str().context("a path of tests is text")?.to_owned())
}

#[test]
fn a_driver_without_attachment_is_called_as_by_the_kubelet() -> Result<()> {
    let machine = Machine::start()?;
    let driver = Driver::install(&plugins(&machine), "berth.test", "plain", RECORDING)?;
    machine.apply(&flex::manifest(&flex::pod_with_volume(&driver.name, IMAGE)))?;
    machine.ready("inline")?;
    let uid = text(&machine.get("pod/inline")?, "/metadata/uid").to_owned();
    let pods = root(&machine)? + "/pods";
    let directory = PathBuf::from(format!("{pods}/{uid}/volumes/berth.test~plain/vol"));
    ensure!(machine.exec("inline", "echo kept > /data/file; stat -c %g /data")? == "4321\n");
    ensure!(std::fs::read_to_string(directory.join("file"))? == "kept\n");
    machine.delete("pod/inline secret/flex")?;
    let replacements = [
        (pods.as_str(), "PODS"),
        (uid.as_str(), "UID"),
        ("\"default\",\"kubernetes.io/pod.uid", "\"NAMESPACE\",\"kubernetes.io/pod.uid"),
        ("berth.test~plain", "VENDOR~NAME"),
    ];
    flex::compare(&driver.work(&replacements)?, &flex::calls_without_attachment())?;
    ensure!(!machine.log().contains("sesame") && !machine.log().contains("b3BlbiBzZXNhbWU"));
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_driver_with_attachment_is_called_as_by_kubernetes() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let plugins = directory.path().join("plugins");
    let machine = Machine::start_with(&["--volume-plugin-dir", plugins.to_str().context("a path is text")?])?;
    let driver = Driver::install(&plugins, "berth.test", "disk", RECORDING)?;
    machine.apply(&flex::manifest(&flex::pod_with_claim(&driver.name, "flex-pv", IMAGE)))?;
    machine.ready("claimed")?;
    let uid = text(&machine.get("pod/claimed")?, "/metadata/uid").to_owned();
    let attached = machine.get(&format!("node/{NODE}"))?["status"]["volumesAttached"].clone();
    let expected = json!([{ "name": "berth.test/disk/flex-pv", "devicePath": "/dev/flex-flex-pv" }]);
    ensure!(attached == expected, "{attached}");
    says(&machine.event("Pod", "claimed", "SuccessfulAttachVolume")?, "flex-pv")?;
    machine.exec("claimed", "echo kept > /data/file")?;
    machine.kubectl(&["patch", "pvc", "flex", "-p", PATCH])?;
    machine.wait("pvc/flex", "jsonpath={.status.capacity.storage}=2Mi")?;
    machine.delete("pod/claimed")?;
    machine.until("the volume is detached", || Ok(driver.attached()?.is_empty().then_some(())))?;
    let root = root(&machine)?;
    let replacements = [
        (&*format!("{root}/pods"), "PODS"),
        (&root, "ROOT"),
        (&uid, "UID"),
        ("\"default\",\"kubernetes.io/pod.uid", "\"NAMESPACE\",\"kubernetes.io/pod.uid"),
        ("berth.test~disk", "VENDOR~NAME"),
        ("berth.test/disk", "VENDOR/NAME"),
        ("flex-pv", "VOLUME"),
        (NODE, "NODE"),
    ];
    flex::compare(&driver.work(&replacements)?, &flex::calls_with_attachment())?;
    machine.delete("pvc/flex pv/flex-pv")?;
    until_empty(&machine)?;
    machine.finish()
}

/// Attaches a file as a loop device, and leaves everything else to the node.
const LOOP: &str = r#"#!/bin/sh
image=$(cd "$(dirname "$0")" && pwd)/.image
device() { losetup -n -O NAME -j "$image"; }
case $1 in
    init) echo '{"status":"Success","capabilities":{"attach":true,"supportsMetrics":true}}' ;;
    attach)
        [ -e "$image" ] || truncate -s 32M "$image"
        [ -n "$(device)" ] || losetup -f "$image"
        echo "{\"status\":\"Success\",\"device\":\"$(device)\"}" ;;
    detach)
        [ -z "$(device)" ] || losetup -d "$(device)"
        echo '{"status":"Success"}' ;;
    waitforattach) echo "{\"status\":\"Success\",\"device\":\"$2\"}" ;;
    *) echo '{"status":"Not supported"}' ;;
esac
"#;

#[test]
fn the_node_formats_and_mounts_a_device_that_its_driver_only_attaches() -> Result<()> {
    let machine = Machine::start()?;
    let driver = Driver::install(&plugins(&machine), "berth.test", "loop", LOOP)?;
    let objects = flex::pod_with_claim(&driver.name, "flex-pv", IMAGE);
    for (seen, script) in [("", "echo kept > /data/file"), ("kept\n", "true")] {
        // A device that has a filesystem is not formatted again.
        machine.apply(&flex::manifest(&objects))?;
        machine.ready("claimed")?;
        ensure!(machine.exec("claimed", "cat /data/file 2>/dev/null || true")? == seen);
        machine.exec("claimed", script)?;
        let types = machine.exec("claimed", "grep ' /data ' /proc/mounts | cut -d' ' -f3")?;
        ensure!(types == "ext4\n", "{types:?}");
        machine.until("the metrics say how large the volume is", || {
            let metrics = machine.kubectl(&["get", "--raw", "/metrics"])?;
            let capacity = |line: &&str| {
                line.starts_with("kubelet_volume_stats_capacity_bytes")
                    && line.contains("persistentvolumeclaim=\"flex\"")
            };
            let bytes = metrics.lines().find(capacity).and_then(|line| line.rsplit(' ').next());
            let bytes = bytes.and_then(|bytes| bytes.parse::<f64>().ok());
            Ok(bytes.filter(|bytes| (16e6..34e6).contains(bytes)))
        })?;
        machine.delete("pod/claimed")?;
        machine.until("the device is detached", || {
            Ok(Leftovers::of(machine.dir())?.loops.is_empty().then_some(()))
        })?;
    }
    machine.delete("pvc/flex pv/flex-pv")?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_bad_driver_is_named_on_its_pod_and_harms_no_other() -> Result<()> {
    let machine = Machine::start_with(&["--volume-plugin-timeout", "8s"])?;
    let init = r#"[ "$1" = init ] && echo '{"status":"Success","capabilities":{"attach":false}}' && exit"#;
    let drivers = [
        (
            "empty",
            "exit 0",
            "mount command failed: the driver ended with exit code 0, and it printed nothing",
        ),
        ("much", "head -c 3000000 /dev/zero | tr '\\0' x", "printed more than 1024 KiB"),
        ("bytes", "printf '\\377'", "it printed what is not UTF-8"),
        ("two", r#"echo '{"status":"Success"}{"status":"Success"}'"#, "something behind its JSON object"),
        ("types", r#"echo '{"status":{}}'"#, "field \\\"status\\\" of its reply is not a text"),
        ("hangs", "sleep 1000", "the driver did not answer within 8s and was killed"),
        ("crashes", "kill -9 $$", "the driver ended with signal 9"),
        ("lies", r#"echo '{"status":"Success"}'; exit 3"#, "exit code 3 although its reply says Success"),
        ("unable", r#"echo '{"status":"Failure","message":"no disk"}'"#, "status: Failure, reason: no disk"),
        ("absent", "", "has no executable"),
    ];
    for (name, body, _) in drivers.iter().filter(|(_, body, _)| !body.is_empty()) {
        let script = format!("#!/bin/sh\n{init}\n{body}\n");
        Driver::install(&plugins(&machine), "bad", name, &script)?;
    }
    let volume = |driver: &str| json!({ "name": "vol", "flexVolume": { "driver": driver } });
    let pods: Vec<Value> =
        drivers.iter().map(|(name, ..)| flex::pod(name, volume(&format!("bad/{name}")), IMAGE)).collect();
    machine.apply(&flex::manifest(&pods))?;
    machine.apply(&together(&[claim("data"), pod("good", "data", "exec sleep 1000000")]))?;
    machine.ready("good")?;
    for (name, _, expected) in drivers {
        let expected = expected.replace('\\', "");
        machine
            .until(&format!("pod {name} is told {expected:?}"), || {
                Ok(machine.describe(&format!("pod/{name}"))?.contains(&expected).then_some(()))
            })
            .with_context(|| machine.describe(&format!("pod/{name}")).unwrap_or_default())?;
    }
    let reserved = flex::pod(
        "reserved",
        json!({ "name": "vol", "flexVolume": { "driver": "bad/empty",
        "options": { "kubernetes.io/fsType": "x" } } }),
        IMAGE,
    );
    let refused = machine.apply(&flex::manifest(&[reserved])).unwrap_err();
    says(&format!("{refused:#}"), "kubernetes.io/fsType")?;
    // What the driver that hung may have mounted is left to it to unmount.
    Driver::install(&plugins(&machine), "bad", "hangs", RECORDING)?;
    machine.kubectl(&["delete", "pods", "--all", "--timeout=45s"])?;
    machine.kubectl(&["delete", "pvc", "--all", "--timeout=45s"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_pod_waits_for_a_driver_that_is_removed_while_it_is_used() -> Result<()> {
    let machine = Machine::start()?;
    let driver = Driver::install(&plugins(&machine), "berth.test", "plain", RECORDING)?;
    let volume = json!({ "name": "vol", "flexVolume": { "driver": driver.name } });
    machine.apply(&flex::manifest(&[flex::pod("one", volume, IMAGE)]))?;
    machine.ready("one")?;
    driver.remove()?;
    machine.kubectl(&["delete", "pod", "one", "--wait=false"])?;
    says(&machine.event("Pod", "one", "FailedUnmount")?, "no volume plugin matched")?;
    Driver::install(&plugins(&machine), "berth.test", "plain", RECORDING)?;
    machine.wait("pod/one", "delete")?;
    until_empty(&machine)?;
    machine.finish()
}

/// The driver is stopped after the work of each call, when `berth up` does not know yet that it is done, and killed with it.
#[test]
fn a_kill_after_any_call_leaves_nothing_and_mounts_nothing_twice() -> Result<()> {
    let mut machine = Machine::start()?;
    let driver = Driver::install(&plugins(&machine), "berth.test", "disk", RECORDING)?;
    driver.stop_after(Some("attach"))?;
    machine.apply(&flex::manifest(&flex::pod_with_claim(&driver.name, "flex-pv", IMAGE)))?;
    for (call, next) in
        [("attach", Some("waitforattach")), ("waitforattach", Some("mountdevice")), ("mountdevice", None)]
    {
        kill_after(&mut machine, &driver, call, next)?;
    }
    machine.ready("claimed")?;
    machine.exec("claimed", "echo kept > /data/file")?;
    driver.stop_after(Some("expandfs"))?;
    machine.kubectl(&["patch", "pvc", "flex", "-p", PATCH])?;
    kill_after(&mut machine, &driver, "expandfs", None)?;
    machine.wait("pvc/flex", "jsonpath={.status.capacity.storage}=2Mi")?;
    ensure!(machine.exec("claimed", "cat /data/file")? == "kept\n");
    driver.stop_after(Some("unmount"))?;
    machine.kubectl(&["delete", "pod", "claimed", "--wait=false"])?;
    for (call, next) in
        [("unmount", Some("unmountdevice")), ("unmountdevice", Some("detach")), ("detach", None)]
    {
        kill_after(&mut machine, &driver, call, next)?;
    }
    machine.wait("pod/claimed", "delete")?;
    machine.until("the volume is detached", || Ok(driver.attached()?.is_empty().then_some(())))?;
    let node = format!("node/{NODE}");
    machine.until("the node has no volume", || {
        let status = &machine.get(&node)?["status"];
        Ok((status["volumesAttached"].is_null() && status["volumesInUse"].is_null()).then_some(()))
    })?;
    machine.delete("pvc/flex pv/flex-pv")?;
    until_empty(&machine)?;
    let twice: Vec<_> = driver.calls(&[])?.into_iter().filter(|call| call.starts_with("TWICE")).collect();
    ensure!(twice.is_empty(), "{twice:?}");
    let devices = machine.data().join("node/plugins/kubernetes.io/flexvolume/berth.test/disk/mounts");
    ensure!(berth_e2e::machine::listing(&devices)?.is_empty());
    machine.finish()
}

/// Kills `berth up` when the driver has done the work of a call, and starts it again; the driver then stops at the next.
fn kill_after(machine: &mut Machine, driver: &Driver, call: &str, next: Option<&str>) -> Result<()> {
    machine
        .until(&format!("the driver has done {call}"), || Ok(driver.has_stopped().then_some(())))
        .with_context(|| format!("{:#?}", driver.calls(&[])))?;
    machine.kill()?;
    let mounts = Leftovers::of(machine.dir())?.mounts;
    let mut once = mounts.clone();
    once.dedup();
    ensure!(mounts == once, "mounted twice after {call}: {mounts:?}");
    driver.stop_after(next)?;
    machine.restart().with_context(|| format!("after the kill in {call}"))
}
