//! `berth up --driver nfs`, with a real NFS server.

use anyhow::{Result, ensure};
use berth_e2e::{
    nfs::Server,
    up::{Machine, NODE},
};
use serde_json::{Value, json};

use crate::{says, text, until_empty};

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
    ensure!(directory.join("podfile").exists(), "the pod's file is not in {}", directory.display());
    std::fs::write(directory.join("from-the-server"), "hello\n")?;
    let pod = the_only_pod(&machine)?;
    ensure!(machine.exec(&pod, "cat /tmp/data/from-the-server")? == "hello\n");

    machine.kubectl(&["delete", "deployment/mycsi-nginx", "pvc/mycsi-pvc"])?;
    until_empty(&machine)?;
    ensure!(!directory.exists(), "the volume's directory is still there");
    machine.finish()
}

/// The shapes that csi-driver-nfs's users have: a volume many pods write, one made beforehand, one inline.
#[test]
fn volumes_are_shared_static_and_inline_as_csi_driver_nfs_has_them() -> Result<()> {
    let server = Server::start(&[])?;
    let machine = Machine::start_with(&[
        "--driver=nfs",
        "--mount-mode=fuse",
        "--default-mount-options",
        &server.options,
    ])?;
    std::fs::create_dir(server.export().join("made-before"))?;
    std::fs::write(server.export().join("made-before/file"), "from before\n")?;
    let attributes = json!({"server": "127.0.0.1", "share": "/export", "subDir": "made-before",
                            "mountOptions": server.options});
    let inline = json!({"driver": "nfs.csi.k8s.io", "volumeAttributes": attributes});
    let objects = [
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "nfs"},
               "provisioner": "nfs.csi.k8s.io", "parameters": {"server": "127.0.0.1", "share": "/export"},
               "mountOptions": server.options.split(',').collect::<Vec<_>>()}),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"},
               "spec": {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"],
                        "resources": {"requests": {"storage": "1Gi"}}}}),
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "static"},
               "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
                        "storageClassName": "", "persistentVolumeReclaimPolicy": "Retain",
                        "csi": {"driver": "nfs.csi.k8s.io", "volumeHandle": "127.0.0.1#export#made-before##",
                                "volumeAttributes": attributes}}}),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "static"},
               "spec": {"storageClassName": "", "volumeName": "static", "accessModes": ["ReadWriteMany"],
                        "resources": {"requests": {"storage": "1Gi"}}}}),
        pod("one", "echo one >> /shared/file"),
        pod("two", "echo two >> /shared/file"),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "inline"},
               "spec": {"containers": [{"name": "main", "image": "busybox", "command": ["sleep", "1000000"],
                                        "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
                        "terminationGracePeriodSeconds": 1,
                        "volumes": [{"name": "data", "csi": inline}]}}),
    ];
    for object in &objects {
        machine.apply(&object.to_string())?;
    }
    for pod in ["one", "two", "inline"] {
        machine.ready(pod)?;
    }
    let both = machine.until("both pods have written", || {
        let text = machine.exec("one", "cat /shared/file")?;
        Ok((text.lines().count() == 2).then_some(text))
    })?;
    says(&both, "one")?;
    says(&both, "two")?;
    ensure!(machine.exec("two", "cat /static/file")? == "from before\n");
    ensure!(machine.exec("inline", "cat /data/file")? == "from before\n");
    ensure!(machine.all("volumeattachments")?.is_empty(), "nothing of NFS is attached");

    machine.kubectl(&["delete", "pod", "one", "two", "inline"])?;
    machine.kubectl(&["delete", "pvc", "shared", "static"])?;
    machine.kubectl(&["delete", "pv", "static"])?;
    until_empty(&machine)?;
    ensure!(server.export().join("made-before/file").exists(), "what was kept is gone");
    machine.finish()
}

fn pod(name: &str, script: &str) -> Value {
    let script = format!("{script} && exec sleep 1000000");
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
           "spec": {"terminationGracePeriodSeconds": 1,
                    "containers": [{"name": "main", "image": "busybox", "command": ["sh", "-c", script],
                                    "volumeMounts": [{"name": "shared", "mountPath": "/shared"},
                                                     {"name": "static", "mountPath": "/static"}]}],
                    "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
                                {"name": "static", "persistentVolumeClaim": {"claimName": "static"}}]}})
}
