//! `deploy/nfs` on real Kubernetes: volumes of a server beside the cluster, in pods that its kubelet runs.
//!
//! The kernel here need not know NFS, so the nodes mount by FUSE, as the manifests' README says.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::nfs::Server;
use serde_json::{Value, json};

use super::deployment::HERE;
use super::manifests::{Applied, TOOLS, with_lines};
use super::{exec, image, ready, running};
use crate::cluster::Cluster;
use crate::kinds::{CLAIM, CLASS, NODE, POD, SNAPSHOT, SNAPSHOT_CONTENT, VOLUME, text};
use crate::objects::merged;

const WORKLOADS: &[&str] =
    &["daemonset/berth-nfs-node", "deployment/berth-nfs-controller", "deployment/berth-snapshot-controller"];
const CONTROLLERS: &str = "app.kubernetes.io/name=berth-nfs-controller";

/// The manifests with the arguments for FUSE, and for a server on a port of its own. Pods may name a share themselves, if it is
/// on that server, as the comment in `csidriver.yaml` says.
fn edited(manifests: &str, options: &str, address: &str) -> String {
    let beside = [
        ("--state-dir=", "--mount-mode=fuse".to_owned()),
        ("--state-dir=", format!("--allowed-servers={address}")),
        ("--extra-create-metadata", format!("--default-mount-options={options}")),
        ("--extra-create-metadata", format!("--allowed-servers={address}")),
        ("Persistent", "Ephemeral".to_owned()),
    ];
    with_lines(manifests, &beside)
}

/// The container of a pod, on whichever node there is.
pub(super) fn anywhere(script: &str) -> Value {
    merged(running(script), json!({"nodeSelector": {}}))
}

#[tokio::test]
async fn volumes_on_a_server_live_by_the_manifests_alone() -> Result<()> {
    let cluster = Cluster::start("nfs", json!({})).await?;
    cluster.with_snapshots().await?;
    image::import(&cluster.path("images"), "berth", &[])?;
    image::import(&cluster.path("images"), "berth-node", &TOOLS)?;
    let server = Server::start(&[])?;
    let node = cluster.get(NODE, HERE).await?;
    let address = text(&node, "/status/addresses/0/address").to_owned();
    let options = format!("vers=4.1,{}", server.options);
    let applied = Applied::apply(&cluster, "nfs", WORKLOADS, |all| edited(&all, &options, &address))?;
    cluster.step("the manifests' pods are ready");

    let place = json!({"server": address, "share": server.share("4.1")});
    let class = json!({
        "metadata": {"name": "nfs"}, "provisioner": "nfs.csi.k8s.io", "allowVolumeExpansion": true,
        "parameters": merged(place.clone(), json!({"subDir": "${pvc.metadata.namespace}/${pvc.metadata.name}"})),
        "mountOptions": options.split(',').collect::<Vec<_>>(),
    });
    cluster.create(CLASS, class.clone()).await?;
    let shared = json!({"storageClassName": "nfs", "accessModes": ["ReadWriteMany"]});
    cluster.claim("data", "1Gi", shared.clone()).await?;
    let script = "set -e; echo kept > /data/file; while :; do date >> /data/log; sync; sleep 1; done";
    cluster.pod("writer", "data", anywhere(script)).await?;
    ready(&cluster, "writer").await?;
    cluster.pod("reader", "data", anywhere("exec sleep 1000000")).await?;
    ready(&cluster, "reader").await?;
    cluster.step("two pods share a volume");
    ensure!(exec(&cluster, "reader", "cat /data/file")? == "kept\n");
    let dir = server.export().join(&cluster.name).join("data");
    ensure!(fs::read_to_string(dir.join("file"))? == "kept\n", "it is a directory of its claim's name");

    applied.kill(CONTROLLERS)?;
    cluster.patch(CLAIM, "data", json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}})).await?;
    let grown = |claim: &Value| text(claim, "/status/capacity/storage") == "2Gi";
    cluster.until(CLAIM, "data", "has its new size", grown).await?;
    cluster.step("the volume has grown, by other controllers");

    of_an_image(&cluster, &class, &place).await?;
    let content = restored(&cluster, &shared).await?;
    inline(&cluster, merged(place, json!({"mountOptions": options}))).await?;
    for pod in ["writer", "reader", "later", "inline"] {
        cluster.delete(POD, pod).await?;
    }
    for pod in ["writer", "reader", "later", "inline"] {
        cluster.gone(POD, pod).await?;
    }
    cluster.step("the pods are gone");
    cluster.delete(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT_CONTENT, &content).await?;
    for claim in ["data", "restored"] {
        let volume = cluster.get(CLAIM, claim).await?;
        let volume = text(&volume, "/spec/volumeName").to_owned();
        cluster.delete_claim(claim).await?;
        cluster.gone(VOLUME, &volume).await?;
    }
    cluster.step("the volumes are gone");
    let names = fs::read_dir(server.export())?.map(|entry| entry.map(|entry| entry.file_name()));
    let left = names.collect::<Result<Vec<_>, _>>()?;
    ensure!(left == [".berth"], "{left:?} are left on the share");
    applied.ready()?;
    applied.allowed()?;
    drop(applied);
    cluster.delete(CLASS, "nfs").await?;
    cluster.finish(Vec::new()).await
}

/// A volume of `kind: image` has a filesystem of its size, which the node makes.
async fn of_an_image(cluster: &Cluster, class: &Value, place: &Value) -> Result<()> {
    let parameters = merged(place.clone(), json!({"kind": "image"}));
    let change = json!({"metadata": {"name": "image"}, "parameters": parameters});
    cluster.create(CLASS, merged(class.clone(), change)).await?;
    cluster.claim("image", "300Mi", json!({"storageClassName": "image"})).await?;
    let script = "echo kept > /data/file && exec sleep 1000000";
    cluster.pod("image", "image", anywhere(script)).await?;
    ready(cluster, "image").await.context("the pod with an image")?;
    let mounted = exec(cluster, "image", "grep ' /data ' /proc/mounts")?;
    ensure!(mounted.starts_with("/dev/loop") && mounted.contains(" ext4 "), "{mounted}");
    cluster.delete(POD, "image").await?;
    cluster.gone(POD, "image").await?;
    let claim = cluster.get(CLAIM, "image").await?;
    let volume = text(&claim, "/spec/volumeName").to_owned();
    cluster.delete_claim("image").await?;
    cluster.gone(VOLUME, &volume).await?;
    cluster.delete(CLASS, "image").await?;
    cluster.step("a pod had an image on the share");
    Ok(())
}

/// Takes a snapshot and restores it into another pod; gives its content's name.
async fn restored(cluster: &Cluster, shared: &Value) -> Result<String> {
    let spec = json!({
        "volumeSnapshotClassName": "berth-nfs", "source": {"persistentVolumeClaimName": "data"},
    });
    cluster.create(SNAPSHOT, json!({"metadata": {"name": "then"}, "spec": spec})).await?;
    let taken =
        cluster.until(SNAPSHOT, "then", "gets ready", |it| it["status"]["readyToUse"] == true).await?;
    exec(cluster, "writer", "echo changed > /data/file")?;
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    cluster.claim("restored", "2Gi", merged(shared.clone(), json!({"dataSource": source}))).await?;
    cluster.pod("later", "restored", anywhere("exec sleep 1000000")).await?;
    ready(cluster, "later").await?;
    ensure!(exec(cluster, "later", "cat /data/file")? == "kept\n");
    cluster.step("a snapshot is restored");
    Ok(text(&taken, "/status/boundVolumeSnapshotContentName").to_owned())
}

/// A pod that names the share itself sees all of it.
async fn inline(cluster: &Cluster, attributes: Value) -> Result<()> {
    let volume = json!({"name": "data", "csi": {"driver": "nfs.csi.k8s.io", "volumeAttributes": attributes}});
    cluster.pod("inline", "", merged(anywhere("exec sleep 1000000"), json!({"volumes": [volume]}))).await?;
    ready(cluster, "inline").await.context("the pod with a volume of its own")?;
    let seen = exec(cluster, "inline", &format!("cat /data/{}/data/file", cluster.name))?;
    ensure!(seen == "changed\n", "{seen:?}");
    cluster.step("a pod has the share itself");
    Ok(())
}
