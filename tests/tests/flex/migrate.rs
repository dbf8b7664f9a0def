//! `berth flex migrate`, on `berth up` with a real NFS server.

use std::fs;
use std::process::Stdio;

use anyhow::{Result, ensure};
use berth_e2e::{
    nfs::Server,
    up::{Leftovers, Machine},
};
use serde_json::Value;

/// A volume of the FlexVolume driver k8s/nfs, one of another driver, their claims, and a pod's own volume.
const OBJECTS: &str = r#"
apiVersion: v1
kind: PersistentVolume
metadata: {name: old, labels: {tier: files}, annotations: {note: kept}}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  persistentVolumeReclaimPolicy: Retain
  flexVolume:
    driver: k8s/nfs
    fsType: nfs
    options: {server: 127.0.0.1, share: export, mountOptions: "OPTIONS"}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: old}
spec:
  storageClassName: ""
  volumeName: old
  accessModes: [ReadWriteMany]
  resources: {requests: {storage: 1Gi}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: other}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: none
  flexVolume: {driver: acme.com/disk, options: {lun: "7"}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: strange}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: none
  flexVolume: {driver: k8s/nfs, options: {server: 127.0.0.1, share: export, cluster: "yes"}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: inline}
spec:
  replicas: 0
  selector: {matchLabels: {app: inline}}
  template:
    metadata: {labels: {app: inline}}
    spec:
      containers: [{name: c, image: busybox, command: [sleep, "1000000"]}]
      volumes: [{name: v, flexVolume: {driver: k8s/nfs, options: {server: 127.0.0.1, share: export}}}]
"#;

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: user}
spec:
  containers:
  - name: c
    image: busybox
    command: [sleep, "1000000"]
    volumeMounts: [{name: v, mountPath: /data}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: old}}]
"#;

fn is_bound(machine: &Machine, source: &str) -> Result<()> {
    machine.wait("pvc/old", "jsonpath={.status.phase}=Bound")?;
    machine.wait("pv/old", "jsonpath={.status.phase}=Bound")?;
    let (volume, claim) = (machine.get("pv/old")?, machine.get("pvc/old")?);
    ensure!(volume["spec"][source].is_object(), "{volume}");
    ensure!(volume["spec"]["claimRef"]["uid"] == claim["metadata"]["uid"], "{volume}");
    ensure!(
        volume["metadata"]["labels"]["tier"] == "files"
            && volume["metadata"]["annotations"]["note"] == "kept"
    );
    ensure!(volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain");
    ensure!(
        machine.all("configmaps")?.iter().all(|map| !text(map, "/metadata/name").starts_with("berth-flex-"))
    );
    Ok(())
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Installs Berth's FlexVolume driver k8s/nfs on a machine.
fn install(machine: &Machine, server: &Server) -> Result<()> {
    let plugins = machine.data().join("node/volumeplugins").display().to_string();
    let state = machine.dir().join("flex").display().to_string();
    let words = ["flex", "install", "--plugin-dir", &plugins, "--state-dir", &state, "--mount-mode=fuse"];
    machine.says(&[&words[..], &["--default-mount-options", &server.options]].concat()).map(drop)
}

/// Starts the pod, anew where it runs, and checks by which kind of volume it has the data.
fn start_pod(machine: &Machine, kind: &str) -> Result<()> {
    machine.delete("pod/user")?;
    machine.apply(POD)?;
    machine.ready("user")?;
    let mounts = mounts_of_pod(machine)?;
    ensure!(mounts.len() == 1 && mounts[0].contains(kind), "{kind} is not what is mounted: {mounts:?}");
    ensure!(machine.exec("user", "cat /data/data")? == "as before");
    Ok(())
}

/// What is mounted for the pod's volume.
fn mounts_of_pod(machine: &Machine) -> Result<Vec<String>> {
    let uid = text(&machine.get("pod/user")?, "/metadata/uid").to_owned();
    let mounts = Leftovers::of(&machine.data().canonicalize()?)?.mounts;
    let of_pod = format!("node/pods/{uid}/volumes/");
    let all = mounts.iter().map(|mount| mount.display().to_string());
    Ok(all.filter(|mount| mount.contains(&of_pod) && mount.contains("/old")).collect())
}

/// The pod that runs is served as it was, and its container was not started again.
fn still_writes(machine: &Machine, server: &Server, file: &str) -> Result<()> {
    machine.exec("user", &format!("echo {file} > /data/{file}"))?;
    ensure!(fs::read_to_string(server.export().join(file))? == format!("{file}\n"));
    let pod = machine.get("pod/user")?;
    ensure!(pod["status"]["containerStatuses"][0]["restartCount"] == 0, "{pod}");
    Ok(())
}

#[test]
fn a_volume_changes_over_under_a_running_pod_with_its_data_and_goes_back() -> Result<()> {
    let server = Server::start(&[])?;
    let mut machine = Machine::start_with(&["--driver=nfs", "--mount-mode=fuse"])?;
    install(&machine, &server)?;
    machine.apply(&OBJECTS.replace("OPTIONS", &server.options))?;
    is_bound(&machine, "flexVolume")?;
    let before = machine.get("pv/old")?;
    fs::write(server.export().join("data"), "as before")?;
    start_pod(&machine, "k8s~nfs")?;

    let said = machine.says(&["flex", "migrate", "--dry-run"])?;
    for expected in [
        "PersistentVolume old: from FlexVolume driver k8s/nfs to CSI driver nfs.csi.k8s.io; pod default/user changes over \
         at its next start",
        "PersistentVolume other: left as it is: no node has the CSI driver disk.acme.com.flex.berth.dev",
        "PersistentVolume strange: left as it is: its option \"cluster\" means nothing to nfs.csi.k8s.io",
        "Deployment default/inline: volume v is of the FlexVolume driver k8s/nfs",
        "1 volumes would be changed, 2 left as they are.",
    ] {
        ensure!(said.contains(expected), "{expected:?} is not in:\n{said}");
    }
    ensure!(
        machine.get("pv/old")?["metadata"]["uid"] == before["metadata"]["uid"],
        "a dry run changed something"
    );

    for (words, kind, source) in [
        (["flex", "migrate"].as_slice(), "kubernetes.io~csi", "csi"),
        (&["flex", "migrate", "--undo"], "k8s~nfs", "flexVolume"),
    ] {
        let said = machine.says(words)?;
        ensure!(said.contains("pod default/user changes over at its next start"), "{said}");
        is_bound(&machine, source)?;
        still_writes(&machine, &server, &format!("during-{source}"))?;
        // A node that starts anew finds the new kind of volume, and leaves the pod what its container has.
        machine.kill()?;
        machine.restart()?;
        machine.ready("user")?;
        machine.until("the node knows the volume", || {
            Ok(mounts_of_pod(&machine)?.iter().any(|mount| mount.contains(kind)).then_some(()))
        })?;
        let mounts = mounts_of_pod(&machine)?;
        ensure!(mounts.len() == 2, "the mount that the container was started with is gone: {mounts:?}");
        still_writes(&machine, &server, &format!("later-{source}"))?;
        start_pod(&machine, kind)?;
        still_writes(&machine, &server, &format!("after-{source}"))?;
    }
    let after = machine.get("pv/old")?;
    ensure!(after["spec"]["flexVolume"] == before["spec"]["flexVolume"], "{after}");
    ensure!(after["spec"].get("mountOptions").is_none(), "{after}");
    machine.delete("pod/user")?;
    ensure!(fs::read_to_string(server.export().join("data"))? == "as before");
    let mut files = berth_e2e::machine::listing(&server.export())?;
    files.retain(|file| !file.starts_with(".berth"));
    ensure!(files.len() == 7, "{files:?}");

    // Killed at any moment, the next run finishes.
    for (round, words) in
        (0_u64..).zip([["flex", "migrate"].as_slice(), &["flex", "migrate", "--undo"]].repeat(3))
    {
        let mut child = machine.command(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        std::thread::sleep(std::time::Duration::from_millis(40 * round));
        child.kill()?;
        child.wait()?;
        machine.says(words)?;
        is_bound(&machine, if words.len() == 2 { "csi" } else { "flexVolume" })?;
    }
    machine.kubectl(&["delete", "deployment/inline", "pvc/old", "pv/old", "pv/other", "pv/strange"])?;
    machine.finish()
}
