//! `berth flex migrate`, on `berth up` with a real NFS server.

use std::fs;
use std::process::Stdio;

use anyhow::{Result, ensure};
use berth_e2e::{nfs::Server, up::Machine};
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

#[test]
fn a_volume_changes_over_with_its_claim_and_data_and_goes_back() -> Result<()> {
    let server = Server::start(&[])?;
    let machine = Machine::start_with(&["--driver=nfs", "--mount-mode=fuse"])?;
    machine.apply(&OBJECTS.replace("OPTIONS", &server.options))?;
    is_bound(&machine, "flexVolume")?;
    let before = machine.get("pv/old")?;
    fs::write(server.export().join("data"), "as before")?;

    let said = machine.says(&["flex", "migrate", "--dry-run"])?;
    for expected in [
        "PersistentVolume old: from FlexVolume driver k8s/nfs to CSI driver nfs.csi.k8s.io",
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

    machine.says(&["flex", "migrate"])?;
    is_bound(&machine, "csi")?;
    machine.apply(POD)?;
    machine.ready("user")?;
    ensure!(machine.exec("user", "cat /data/data")? == "as before");
    machine.exec("user", "echo after > /data/after")?;
    // A volume in use stays as it is.
    let said = machine.says(&["flex", "migrate", "--undo"])?;
    ensure!(said.contains("pod default/user uses its claim"), "{said}");
    is_bound(&machine, "csi")?;
    machine.delete("pod/user")?;
    machine.until("the volume is not in use", || {
        let said = machine.says(&["flex", "migrate", "--undo", "--dry-run"])?;
        Ok(said.contains("1 volumes would be changed").then_some(()))
    })?;
    machine.says(&["flex", "migrate", "--undo"])?;
    is_bound(&machine, "flexVolume")?;
    let after = machine.get("pv/old")?;
    ensure!(after["spec"]["flexVolume"] == before["spec"]["flexVolume"], "{after}");
    ensure!(after["spec"].get("mountOptions").is_none(), "{after}");
    ensure!(fs::read_to_string(server.export().join("after"))? == "after\n");
    ensure!(fs::read_to_string(server.export().join("data"))? == "as before");

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
