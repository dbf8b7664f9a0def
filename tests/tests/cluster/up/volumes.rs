//! Volumes that pods name themselves or find behind PersistentVolumes made by hand, read and written from inside the pods.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::machine::run;
use berth_e2e::nfs::Server;
use berth_e2e::up::{Leftovers, Machine, NODE};

use super::{says, text, together, until_empty};

/// A loop device, detached when it is dropped.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path, mib: u64) -> Result<Self> {
        fs::File::create(file)?.set_len(mib << 20)?;
        let name = run("losetup", &["--find", "--show", &file.display().to_string()])?;
        Ok(Self(name.trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = run("losetup", &["--detach", &self.0]);
    }
}

/// A PersistentVolume of this source on this node, and the claim that is bound to it.
fn persistent(name: &str, source: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: manual\n  \
         capacity: {{storage: 16Mi}}\n  accessModes: [ReadWriteOnce]\n  claimRef: {{namespace: default, name: {name}}}\n  \
         {source}\n{more}---\n\
         apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: manual\n  \
         volumeName: {name}\n  accessModes: [ReadWriteOnce]\n  resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

/// The node affinity of a volume on one node.
fn only_on(node: &str) -> String {
    format!(
        "  nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{key: kubernetes.io/hostname, \
         operator: In, values: [{node}]}}]}}]}}}}\n"
    )
}

/// A pod that sleeps, with these mounts and volumes.
fn sleeper(name: &str, more: &str, volumes: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  \
         containers:\n  - name: main\n    image: busybox\n    command: [sleep, '1000000']\n    {more}\n  \
         volumes: {volumes}\n"
    )
}

fn claimed(pod: &str, claim: &str) -> String {
    sleeper(
        pod,
        "volumeMounts: [{name: v, mountPath: /data}]",
        &format!("[{{name: v, persistentVolumeClaim: {{claimName: {claim}}}}}]"),
    )
}

#[test]
fn local_volumes_are_directories_filesystems_on_devices_and_devices() -> Result<()> {
    let mut machine = Machine::start()?;
    let directory = machine.dir().join("disk");
    fs::create_dir(&directory)?;
    fs::write(directory.join("before"), "of the machine\n")?;
    let formatted = LoopDevice::new(&machine.dir().join("formatted.img"), 16)?;
    let raw = LoopDevice::new(&machine.dir().join("raw.img"), 16)?;
    let at = |path: &str, more: &str| format!("local: {{path: {path}{more}}}");
    let here = only_on(NODE);
    let block = sleeper(
        "block",
        "volumeDevices: [{name: v, devicePath: /dev/mine}]",
        "[{name: v, persistentVolumeClaim: {claimName: raw}}]",
    );
    let raw_claim = persistent("raw", &at(&raw.0, ""), &format!("{here}  volumeMode: Block\n"));
    machine.apply(&together(&[
        persistent("dir", &at(&directory.display().to_string(), ""), &here),
        persistent("fs", &at(&formatted.0, ", fsType: ext4"), &here),
        raw_claim.replace("volumeName: raw", "volumeName: raw\n  volumeMode: Block"),
        claimed("dir", "dir"),
        claimed("fs", "fs"),
        block,
    ]))?;
    for pod in ["dir", "fs", "block"] {
        machine.ready(pod)?;
    }
    ensure!(machine.exec("dir", "cat /data/before; echo pod > /data/after")? == "of the machine\n");
    ensure!(fs::read_to_string(directory.join("after"))? == "pod\n");
    ensure!(machine.exec("fs", "echo kept > /data/file; sync; stat -fc %T /data")? == "ext2/ext3\n");
    machine.exec("block", "echo raw bytes | dd of=/dev/mine conv=notrunc,fsync 2>/dev/null")?;
    ensure!(fs::read(machine.dir().join("raw.img"))?.starts_with(b"raw bytes\n"));

    // What an earlier life has mounted is found again, and taken away with the pods.
    machine.kill()?;
    machine.restart()?;
    ensure!(machine.exec("fs", "cat /data/file")? == "kept\n");
    machine.kubectl(&["delete", "pod", "dir", "fs", "block"])?;
    machine
        .until("nothing is mounted", || Ok(Leftovers::of(machine.data())?.mounts.is_empty().then_some(())))?;
    machine.apply(&claimed("again", "fs"))?;
    machine.ready("again")?;
    ensure!(machine.exec("again", "cat /data/file")? == "kept\n");
    machine.kubectl(&["delete", "pod/again"])?;
    machine.kubectl(&["delete", "pvc", "--all"])?;
    machine.kubectl(&["delete", "pv", "--all"])?;
    until_empty(&machine)?;
    ensure!(
        fs::read_to_string(directory.join("after"))? == "pod\n",
        "the data belongs to whoever made the volume"
    );
    drop((formatted, raw));
    machine.finish()
}

#[test]
fn a_volume_is_not_mounted_on_a_node_that_its_affinity_excludes() -> Result<()> {
    let machine = Machine::start()?;
    let directory = machine.dir().join("elsewhere");
    fs::create_dir(&directory)?;
    let source = format!("local: {{path: {}}}", directory.display());
    // The pod is bound by hand, past the scheduler, which would refuse.
    let pod = claimed("one", "far").replace("spec:\n", &format!("spec:\n  nodeName: {NODE}\n"));
    machine.apply(&persistent("far", &source, &only_on("another-node")))?;
    machine.wait("pvc/far", "jsonpath={.status.phase}=Bound")?;
    machine.apply(&pod)?;
    let message = machine.event("Pod", "one", "FailedMount")?;
    says(
        &message,
        "MountVolume.NodeAffinity check failed for volume \"far\" : no matching NodeSelectorTerms",
    )?;
    machine.finish()
}

#[test]
fn a_missing_path_and_a_kind_that_berth_lacks_are_named_in_events() -> Result<()> {
    let machine = Machine::start()?;
    let missing = machine.dir().join("missing");
    let source = format!("local: {{path: {}}}", missing.display());
    let iscsi = "[{name: v, iscsi: {targetPortal: 10.0.2.15, iqn: 'iqn.2001-04.com.example:disk', lun: 0}}]";
    let fc = "[{name: v, fc: {targetWWNs: ['500a0982991b8dc5'], lun: 2}}]";
    let mounts = "volumeMounts: [{name: v, mountPath: /data}]";
    machine.apply(&persistent("gone", &source, &only_on(NODE)))?;
    machine.wait("pvc/gone", "jsonpath={.status.phase}=Bound")?;
    machine.apply(&together(&[
        claimed("gone", "gone"),
        sleeper("iscsi", mounts, iscsi),
        sleeper("fc", mounts, fc),
    ]))?;
    says(
        &machine.event("Pod", "gone", "FailedMount")?,
        &format!("path {} does not exist", missing.display()),
    )?;
    says(&machine.event("Pod", "iscsi", "FailedMount")?, "volume v: iscsi is not supported")?;
    says(&machine.event("Pod", "fc", "FailedMount")?, "volume v: fc is not supported")?;
    // It goes on by itself when the directory is there.
    fs::create_dir(&missing)?;
    machine.ready("gone")?;
    machine.finish()
}

#[test]
fn nfs_volumes_are_mounted_and_recycled() -> Result<()> {
    let server = Server::start(&["pseudo=/export"])?;
    let mut machine = Machine::start_with(&["--nfs-mount-options", &server.options])?;
    fs::write(server.export().join("before"), "of the server\n")?;
    let inline = |more: &str| format!("[{{name: v, nfs: {{server: 127.0.0.1, path: /export{more}}}}}]");
    let mounts = "volumeMounts: [{name: v, mountPath: /data}]";
    let options: Vec<String> = server.options.split(',').map(|option| format!("'{option}'")).collect();
    let volume = persistent(
        "share",
        "nfs: {server: 127.0.0.1, path: /export}",
        &format!("  mountOptions: [{}]\n  persistentVolumeReclaimPolicy: Recycle\n", options.join(", ")),
    );
    machine.apply(&together(&[
        sleeper("inline", mounts, &inline("")),
        sleeper("reader", mounts, &inline(", readOnly: true")),
        volume,
        claimed("claimed", "share"),
    ]))?;
    for pod in ["inline", "reader", "claimed"] {
        machine.ready(pod)?;
    }
    ensure!(machine.exec("inline", "cat /data/before; echo pod > /data/after")? == "of the server\n");
    ensure!(fs::read_to_string(server.export().join("after"))? == "pod\n");
    machine.exec_until("claimed", "cat /data/after", |seen| seen == "pod\n")?;
    let refused = machine.exec("reader", "cat /data/before; touch /data/no 2>&1 || true")?;
    says(&refused, "of the server")?;
    says(&refused, "Read-only file system")?;

    // The mounts are the pods', whatever becomes of `berth up`.
    machine.kill()?;
    machine.restart()?;
    ensure!(machine.exec("claimed", "cat /data/after")? == "pod\n");
    machine.kubectl(&["delete", "pod", "inline", "reader", "claimed"])?;
    machine
        .until("nothing is mounted", || Ok(Leftovers::of(machine.data())?.mounts.is_empty().then_some(())))?;

    machine.kubectl(&["delete", "pvc/share"])?;
    says(&machine.event("PersistentVolume", "share", "VolumeRecycled")?, "Volume recycled")?;
    machine.wait("pv/share", "jsonpath={.status.phase}=Available")?;
    let left: Vec<PathBuf> =
        fs::read_dir(server.export())?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    ensure!(left.is_empty(), "left of a recycled volume: {left:?}");
    machine.kubectl(&["delete", "pv/share"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_server_that_does_not_answer_is_named_and_holds_up_nothing_else() -> Result<()> {
    let mut server = Server::start(&["pseudo=/export"])?;
    let machine = Machine::start_with(&["--nfs-mount-options", &server.options])?;
    server.control("kill")?;
    let mounts = "volumeMounts: [{name: v, mountPath: /data}]";
    machine.apply(&together(&[
        sleeper("stuck", mounts, "[{name: v, nfs: {server: 127.0.0.1, path: /export}}]"),
        sleeper("other", mounts, "[{name: v, emptyDir: {}}]"),
    ]))?;
    machine.ready("other")?;
    says(&machine.event("Pod", "stuck", "FailedMount")?, "127.0.0.1")?;
    server.control("start")?;
    machine.ready("stuck")?;
    machine.kubectl(&["delete", "pod", "stuck", "other"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_pod_that_fills_its_empty_dir_is_evicted() -> Result<()> {
    let machine = Machine::start()?;
    let mounts = "volumeMounts: [{name: v, mountPath: /data}]";
    machine.apply(&together(&[
        sleeper("full", mounts, "[{name: v, emptyDir: {sizeLimit: 1Mi}}]"),
        sleeper("good", mounts, "[{name: v, emptyDir: {sizeLimit: 64Mi}}]"),
        sleeper("memory", mounts, "[{name: v, emptyDir: {medium: Memory, sizeLimit: 1Mi}}]"),
    ]))?;
    for pod in ["full", "good", "memory"] {
        machine.ready(pod)?;
    }
    for pod in ["full", "good", "memory"] {
        machine.exec(pod, "head -c 4194304 /dev/zero > /data/zeros 2>/dev/null; stat -fc %T /data")?;
    }
    machine.wait("pod/full", "jsonpath={.status.reason}=Evicted")?;
    let full = machine.get("pod/full")?;
    ensure!(full["status"]["phase"] == "Failed", "{full}");
    let why = "Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". ";
    ensure!(full["status"]["message"] == why, "{full}");
    says(&machine.event("Pod", "full", "Evicted")?, why.trim_end())?;
    let conditions = full["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let target = conditions.iter().find(|condition| condition["type"] == "DisruptionTarget");
    ensure!(target.is_some_and(|target| target["reason"] == "TerminationByKubelet"), "{full}");
    // What is not too much stays, and in memory the kernel refused what did not fit.
    ensure!(machine.exec("good", "stat -c %s /data/zeros")? == "4194304\n");
    ensure!(machine.exec("memory", "stat -c %s /data/zeros; stat -fc %T /data")? == "1048576\ntmpfs\n");
    machine.kubectl(&["delete", "pod", "full", "good", "memory"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn read_only_mounts_are_as_deep_as_asked() -> Result<()> {
    let machine = Machine::start()?;
    let top = machine.dir().join("top");
    let inner = top.join("inner");
    fs::create_dir_all(&inner)?;
    run("mount", &["-t", "tmpfs", "none", &inner.display().to_string()])?;
    let mounts = "volumeMounts:\n    - {name: v, mountPath: /flat, readOnly: true}\n    \
                  - {name: v, mountPath: /deep, readOnly: true, recursiveReadOnly: Enabled, mountPropagation: None}";
    let volumes = format!("[{{name: v, hostPath: {{path: {}, type: Directory}}}}]", top.display());
    machine.apply(&sleeper("one", mounts, &volumes))?;
    machine.ready("one")?;
    let writable =
        "for d in /flat /flat/inner /deep /deep/inner; do touch $d/f 2>/dev/null && echo $d; done; true";
    let written = machine.exec("one", writable)?;
    let pod = machine.get("pod/one")?;
    let deleted = machine.delete("pod/one");
    run("umount", &[&inner.display().to_string()])?;
    deleted?;
    ensure!(written == "/flat/inner\n", "{written}");
    let status = &pod["status"]["containerStatuses"][0]["volumeMounts"];
    let of = |path: &str| {
        let all = status.as_array().cloned().unwrap_or_default();
        let found = all.iter().find(|mount| mount["mountPath"] == path).cloned().unwrap_or_default();
        text(&found, "/recursiveReadOnly").to_owned()
    };
    ensure!(of("/flat") == "Disabled" && of("/deep") == "Enabled", "{status}");
    machine.finish()
}

#[test]
fn ephemeral_inline_and_block_volumes_of_the_local_driver_are_used_from_inside() -> Result<()> {
    let machine = Machine::start()?;
    let mounts = "volumeMounts: [{name: v, mountPath: /data}]";
    let template = "{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}}";
    let raw = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: raw}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
               volumeMode: Block\n  resources: {requests: {storage: 16Mi}}\n";
    machine.apply(&together(&[
        sleeper("generic", mounts, &format!("[{{name: v, ephemeral: {{volumeClaimTemplate: {template}}}}}]")),
        sleeper("inline", mounts, "[{name: v, csi: {driver: local.berth.dev}}]"),
        raw.to_owned(),
        sleeper(
            "block",
            "volumeDevices: [{name: v, devicePath: /dev/mine}]",
            "[{name: v, persistentVolumeClaim: {claimName: raw}}]",
        ),
    ]))?;
    for pod in ["generic", "inline"] {
        machine.ready(pod)?;
        ensure!(machine.exec(pod, "echo kept > /data/file && cat /data/file")? == "kept\n");
    }
    machine.ready("block")?;
    let script =
        "echo raw | dd of=/dev/mine conv=notrunc,fsync 2>/dev/null; head -c 4 /dev/mine; test -b /dev/mine";
    ensure!(machine.exec("block", script)? == "raw\n");
    ensure!(machine.get("pvc/generic-v")?["status"]["phase"] == "Bound");
    machine.kubectl(&["delete", "pod", "generic", "inline", "block"])?;
    machine.until("the claim of the ephemeral volume goes with its pod", || {
        Ok(machine.all("pvc")?.iter().all(|claim| text(claim, "/metadata/name") == "raw").then_some(()))
    })?;
    machine.kubectl(&["delete", "pvc/raw"])?;
    until_empty(&machine)?;
    machine.finish().context("stop")
}
