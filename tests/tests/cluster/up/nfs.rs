//! `berth up --driver nfs`, with a real NFS server.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{
    nfs::Server,
    slow::SlowLine,
    up::{Machine, NODE},
};
use serde_json::{Value, json};

use crate::up::{says, text, until_empty};

const MYCSI: &str = "mycsi.jtthink.com";

fn the_only_pod(machine: &Machine) -> Result<String> {
    let pods = machine.all("pods")?;
    ensure!(pods.len() == 1, "{} pods", pods.len());
    Ok(text(&pods[0], "/metadata/name").to_owned())
}

#[test]
fn a_driver_of_another_name_serves_the_tutorials_manifest_as_written() -> Result<()> {
    let server = Server::start(&["pseudo=/home/nfsdata"])?;
    let options = &server.options;
    let machine = Machine::start_with(&[
        "--driver=nfs",
        "--driver-name",
        MYCSI,
        "--mount-mode=fuse",
        "--default-mount-options",
        options,
    ])?;
    machine.apply_example("nfs-deployment.yaml")?;
    machine.wait("deployment/mycsi-nginx", "condition=Available")?;

    let (claim, attachments) = (machine.get("pvc/mycsi-pvc")?, machine.all("volumeattachments")?);
    let name = format!("pvc-{}", text(&claim, "/metadata/uid"));
    let volume = machine.get(&format!("pv/{name}"))?;
    for annotation in
        ["volume.beta.kubernetes.io/storage-provisioner", "volume.kubernetes.io/storage-provisioner"]
    {
        ensure!(claim["metadata"]["annotations"][annotation] == MYCSI, "{claim}");
    }
    ensure!(claim["spec"]["volumeName"] == name.as_str() && claim["status"]["capacity"]["storage"] == "2Gi");
    ensure!(volume["metadata"]["annotations"]["pv.kubernetes.io/provisioned-by"] == MYCSI, "{volume}");
    let csi = &volume["spec"]["csi"];
    ensure!(csi["driver"] == MYCSI, "{csi}");
    let identity = text(csi, "/volumeAttributes/storage.kubernetes.io~1csiProvisionerIdentity");
    ensure!(identity.ends_with(MYCSI), "{csi}");
    ensure!(volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete", "{volume}");
    // Nobody has said that nothing need be attached.
    ensure!(attachments.len() == 1 && attachments[0]["status"]["attached"] == true, "{attachments:?}");
    ensure!(attachments[0]["spec"]["source"]["persistentVolumeName"] == name.as_str());
    let node = machine.get(&format!("csinode/{NODE}"))?;
    let drivers = node["spec"]["drivers"].as_array().cloned().unwrap_or_default();
    let of_us: Vec<&Value> = drivers.iter().filter(|driver| driver["name"] == MYCSI).collect();
    ensure!(of_us.len() == 1 && of_us[0]["nodeID"] == NODE, "{node}");

    // The pod wrote to the server, and what the server has is what the pod sees.
    let directory = server.export().join(&name);
    machine.until(&format!("the pod's file is in {}", directory.display()), || {
        Ok(directory.join("podfile").exists().then_some(()))
    })?;
    std::fs::write(directory.join("from-the-server"), "hello\n")?;
    let pod = the_only_pod(&machine)?;
    ensure!(machine.exec(&pod, "cat /tmp/data/from-the-server")? == "hello\n");

    machine.kubectl(&["delete", "deployment/mycsi-nginx", "pvc/mycsi-pvc"])?;
    until_empty(&machine)?;
    ensure!(!directory.exists(), "the volume's directory is still there");
    machine.finish()
}

/// A machine with the NFS driver, for volumes on the server behind a port.
fn machine_at(port: u16) -> Result<Machine> {
    let options = format!("port={port}");
    Machine::start_with(&["--driver=nfs", "--mount-mode=fuse", "--default-mount-options", &options])
}

/// Applies an example of `examples/nfs`, as if the server were at a port.
fn apply(machine: &Machine, example: &str, port: u16) -> Result<()> {
    let path = format!("{}/../examples/nfs/{example}.yaml", env!("CARGO_MANIFEST_DIR"));
    let written = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    machine.apply(&written.replace("nfsvers=4.1", &format!("nfsvers=4.1,port={port}")))
}

/// What is on the share, besides the driver's own empty directories.
fn on_share(server: &Server) -> Result<Vec<String>> {
    fn list(dir: &Path, below: &str, own: bool, found: &mut Vec<String>) -> Result<()> {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let name = format!("{below}{}", entry.file_name().display());
            let (is_dir, own) = (entry.file_type()?.is_dir(), own || name == ".berth");
            if !own || !is_dir {
                found.push(name.clone());
            }
            if is_dir {
                list(&entry.path(), &format!("{name}/"), own, found)?;
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    list(&server.export(), "", false, &mut found)?;
    found.sort();
    Ok(found)
}

/// Waits until nothing is on the share but this; what is deleted goes in the background.
fn until_left(machine: &Machine, server: &Server, expected: &[&str]) -> Result<()> {
    let left = machine.until("nothing else is on the share", || {
        let left = on_share(server)?;
        Ok((left == expected).then_some(()))
    });
    left.with_context(|| format!("{:?}", on_share(server)))
}

/// Where the directory of a claim's volume is, as the server sees it.
fn directory_of(machine: &Machine, server: &Server, claim: &str) -> Result<PathBuf> {
    machine.wait(&format!("pvc/{claim}"), "jsonpath={.status.phase}=Bound")?;
    let claim = machine.get(&format!("pvc/{claim}"))?;
    Ok(server.export().join(text(&claim, "/spec/volumeName")))
}

/// The shapes that csi-driver-nfs's users have, as they are in `examples/nfs`, from class to nothing left.
#[test]
fn what_users_of_csi_driver_nfs_have_works_as_written() -> Result<()> {
    let server = Server::start(&[])?;
    let port = server.port();
    let machine = machine_at(port)?;
    std::fs::create_dir(server.export().join("made-before"))?;
    std::fs::write(server.export().join("made-before/file"), "from before\n")?;
    apply(&machine, "class", port)?;
    apply(&machine, "deployment", port)?;
    machine.wait("deployment/deployment-nfs", "condition=Available")?;
    let both = |hosts: &str| hosts.lines().count() == 2;
    let hosts = machine.exec_until("deploy/deployment-nfs", "cat /mnt/nfs/hosts", both)?;
    for pod in machine.all("pods")? {
        says(&hosts, text(&pod, "/metadata/name"))?;
        ensure!(machine.exec(text(&pod, "/metadata/name"), "cat /mnt/nfs/hosts")? == hosts);
    }
    ensure!(machine.all("volumeattachments")?.is_empty(), "nothing of NFS is attached");

    // Copies are as their source was, whatever becomes of that.
    apply(&machine, "clone", port)?;
    machine.ready("nfs-cloning")?;
    apply(&machine, "snapshot", port)?;
    machine.wait("volumesnapshot/test-nfs-snapshot", "jsonpath={.status.readyToUse}=true")?;
    machine.exec("deploy/deployment-nfs", "echo later >> /mnt/nfs/hosts")?;
    machine.ready("nfs-restored-snapshot")?;
    for pod in ["nfs-cloning", "nfs-restored-snapshot"] {
        ensure!(machine.exec(pod, "cat /mnt/nfs/hosts")? == hosts, "{pod}");
        machine.exec(pod, "echo own > /mnt/nfs/own")?;
    }
    let source = machine.exec("deploy/deployment-nfs", "cd /mnt/nfs && cat hosts && ls")?;
    ensure!(source == format!("{hosts}later\nhosts\n"), "{source}");
    let content = machine.all("volumesnapshotcontents")?.remove(0);
    let source = directory_of(&machine, &server, "pvc-deployment-nfs")?;
    let source = source.file_name().context("no name")?.display();
    let snapshot = format!("snapshot-{}", text(&content, "/spec/volumeSnapshotRef/uid"));
    let handle = text(&content, "/status/snapshotHandle");
    ensure!(handle == format!("127.0.0.1#export#{snapshot}#{snapshot}#{source}"), "{handle}");
    ensure!(server.export().join(format!("{snapshot}/{source}.tar.gz")).is_file(), "{:?}", on_share(&server));

    check_growth(&machine)?;
    apply(&machine, "static", port)?;
    apply(&machine, "inline", port)?;
    for pod in ["nfs-static", "nfs-inline"] {
        machine.ready(pod)?;
        ensure!(machine.exec(pod, "cat /mnt/nfs/file")? == "from before\n", "{pod}");
    }

    machine.kubectl(&["delete", "deployment", "--all"])?;
    machine.kubectl(&["delete", "pod,pvc,volumesnapshot", "--all", "--timeout=45s"])?;
    machine.kubectl(&["delete", "pv", "pv-nfs-static"])?;
    until_empty(&machine)?;
    ensure!(machine.all("volumesnapshotcontents")?.is_empty());
    // What nobody made, nobody deletes.
    until_left(&machine, &server, &["made-before", "made-before/file"])?;
    machine.finish()
}

fn check_growth(machine: &Machine) -> Result<()> {
    let more = r#"{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}"#;
    machine.kubectl(&["patch", "pvc/pvc-deployment-nfs", "-p", more])?;
    machine.wait("pvc/pvc-deployment-nfs", "jsonpath={.status.capacity.storage}=2Gi")?;
    let claim = machine.get("pvc/pvc-deployment-nfs")?;
    let volume = machine.get(&format!("pv/{}", text(&claim, "/spec/volumeName")))?;
    ensure!(volume["spec"]["capacity"]["storage"] == "2Gi", "{volume}");
    Ok(())
}

#[test]
fn a_directory_is_named_after_the_claims_labels_and_annotations() -> Result<()> {
    let server = Server::start(&[])?;
    let machine = machine_at(server.port())?;
    apply(&machine, "templates", server.port())?;
    machine.ready("nfs-by-label")?;
    let dir = "default/shop/uploads-pvc-nfs-by-label";
    let file = server.export().join(dir).join("file");
    machine.until("the pod has written", || {
        Ok(std::fs::read_to_string(&file).ok().filter(|written| written == "here\n").map(drop))
    })?;
    let volume = machine.all("pv")?.remove(0);
    let csi = &volume["spec"]["csi"];
    let handle = format!("127.0.0.1#export#{dir}#{}#", text(&volume, "/metadata/name"));
    ensure!(text(csi, "/volumeHandle") == handle, "{csi}");
    let attributes = csi["volumeAttributes"].as_object().context("no attributes")?;
    ensure!(attributes["subDir"] == dir && attributes["csi.storage.k8s.io/pvc/name"] == "pvc-nfs-by-label");
    ensure!(!attributes.keys().any(|key| key.contains("/labels/") || key.contains("/annotations/")), "{csi}");

    // A claim that has not what its class asks for is told so, and gets its volume when it has.
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "bare", "annotations": {"example.com/kind": "uploads"}},
        "spec": {"storageClassName": "nfs-by-label", "accessModes": ["ReadWriteMany"],
                 "resources": {"requests": {"storage": "1Gi"}}}});
    machine.apply(&claim.to_string())?;
    let why = machine.event("PersistentVolumeClaim", "bare", "ProvisioningFailed")?;
    says(&why, "${pvc.metadata.labels['app']}")?;
    ensure!(!server.export().join("default/uploads-bare").exists());
    machine.kubectl(&["label", "pvc/bare", "app=late"])?;
    machine.wait("pvc/bare", "jsonpath={.status.phase}=Bound")?;
    ensure!(server.export().join("default/late/uploads-bare").is_dir(), "{:?}", on_share(&server)?);

    machine.kubectl(&["delete", "pod,pvc", "--all"])?;
    until_empty(&machine)?;
    until_left(&machine, &server, &[])?;
    machine.finish()
}

#[test]
fn a_snapshot_tells_in_events_how_far_it_is_or_why_it_failed() -> Result<()> {
    let server = Server::start(&[])?;
    let line = SlowLine::to(server.port())?;
    line.slow_down(2 << 20);
    let machine = machine_at(line.port)?;
    apply(&machine, "class", line.port)?;
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
        "spec": {"storageClassName": "nfs-csi", "accessModes": ["ReadWriteMany"],
                 "resources": {"requests": {"storage": "1Gi"}}}});
    machine.apply(&claim.to_string())?;
    let dir = directory_of(&machine, &server, "data")?;
    let mut noise = std::fs::File::open("/dev/urandom")?.take(16 << 20);
    std::io::copy(&mut noise, &mut std::fs::File::create(dir.join("noise"))?)?;

    machine.apply(&snapshot("slow", "csi-nfs-snapclass"))?;
    machine.until("an event tells of all that there is", || {
        let described = machine.describe("volumesnapshot/slow")?;
        Ok(described.contains(" of 16 MiB (").then_some(()))
    })?;
    let words = machine.event("VolumeSnapshot", "slow", "SnapshotProgress")?;
    ensure!(words.starts_with("copied "), "{words}");
    line.hurry();
    machine.wait("volumesnapshot/slow", "jsonpath={.status.readyToUse}=true")?;

    machine.apply(
        "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotClass\nmetadata: {name: odd}\n\
         driver: nfs.csi.k8s.io\nparameters: {colour: red}\ndeletionPolicy: Delete\n",
    )?;
    machine.apply(&snapshot("failed", "odd"))?;
    let why = machine.event("VolumeSnapshot", "failed", "SnapshotCreationFailed")?;
    says(&why, "\"colour\"")?;
    says(&machine.describe("volumesnapshot/failed")?, "SnapshotCreationFailed")?;

    machine.kubectl(&["delete", "volumesnapshot,pvc", "--all", "--timeout=45s"])?;
    until_empty(&machine)?;
    until_left(&machine, &server, &[])?;
    machine.finish()
}

fn snapshot(name: &str, class: &str) -> String {
    json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": name},
           "spec": {"volumeSnapshotClassName": class, "source": {"persistentVolumeClaimName": "data"}}})
    .to_string()
}
