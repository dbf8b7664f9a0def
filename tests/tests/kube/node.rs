//! Berth's volumes in pods that a real kubelet runs.

mod deployment;
mod digitalocean;
mod flex;
mod image;
mod manifests;
mod nfs;
mod uses;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use self::deployment::{Deployment, Shape};
use crate::cluster::Cluster;
use crate::kinds::{ATTACHMENT, CLAIM, POD, SNAPSHOT, SNAPSHOT_CONTENT, text};

#[tokio::test]
async fn a_volume_lives_by_a_node_and_sidecars_beside_it() -> Result<()> {
    life("life-node", Shape::NodeAndSidecars).await
}

#[tokio::test]
async fn a_volume_lives_by_a_controller_that_introduces_itself() -> Result<()> {
    life("life-one", Shape::OneProcess).await
}

#[tokio::test]
async fn a_volume_lives_by_programs_arranged_as_upstreams_are() -> Result<()> {
    life("life-many", Shape::AsUpstream).await
}

#[tokio::test]
async fn a_volume_lives_by_a_node_that_does_all_itself() -> Result<()> {
    life("life-own", Shape::PerNode).await
}

/// A pod writes, its driver is killed, its volume grows under it, and a snapshot is restored into another pod; at the end
/// everything is gone.
async fn life(test: &str, shape: Shape) -> Result<()> {
    // ext4 grows in use only by those who have CAP_SYS_RESOURCE.
    let class = json!({
        "volumeBindingMode": "WaitForFirstConsumer",
        "parameters": {"csi.storage.k8s.io/fstype": "xfs"},
    });
    let cluster = match shape {
        Shape::PerNode => Cluster::start_per_node(test, class).await?,
        _ => Cluster::start(test, class).await?,
    };
    cluster.with_snapshots().await?;
    let mut deployment = Deployment::start(&cluster, shape).await?;
    cluster.step("the kubelet knows the driver");
    cluster.claim("data", "320Mi", json!({})).await?;
    // A write that fails ends it.
    let script = "set -e; echo kept > /data/file; while :; do date >> /data/log; sync; sleep 1; done";
    cluster.pod("writer", "data", running(script)).await?;
    ready(&cluster, "writer").await?;
    cluster.step("the pod runs");
    ensure!(exec(&cluster, "writer", "cat /data/file")? == "kept\n");
    let before = size(&cluster, "writer")?;

    deployment.kill_driver()?;
    cluster.patch(CLAIM, "data", json!({"spec": {"resources": {"requests": {"storage": "400Mi"}}}})).await?;
    ensure!(exec(&cluster, "writer", "cat /data/file")? == "kept\n", "a pod needs no driver to read");
    deployment.start_driver().await?;
    let pending =
        |claim: &Value| claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizePending";
    cluster.until(CLAIM, "data", "waits for the kubelet to grow it", pending).await?;
    // A kubelet looks at a pod that does not change about once a minute.
    cluster.patch(POD, "writer", json!({"metadata": {"annotations": {"look": "again"}}})).await?;
    let grown = |claim: &Value| text(claim, "/status/capacity/storage") == "400Mi";
    cluster.until(CLAIM, "data", "has its new size", grown).await?;
    let after = size(&cluster, "writer")?;
    cluster.step("the volume has grown");
    ensure!(after > before + (60 << 20), "the filesystem had {before} bytes and has {after}");

    let content = snapshot(&cluster).await?;
    cluster.step("the snapshot is ready");
    exec(&cluster, "writer", "echo changed > /data/file")?;
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    cluster.claim("restored", "400Mi", json!({"dataSource": source})).await?;
    cluster.pod("reader", "restored", running("exec sleep 1000000")).await?;
    ready(&cluster, "reader").await?;
    cluster.step("the restored pod runs");
    ensure!(exec(&cluster, "reader", "cat /data/file")? == "kept\n");
    ensure!(exec(&cluster, "writer", "cat /data/file")? == "changed\n");
    let writer = cluster.get(POD, "writer").await?;
    ensure!(writer["status"]["containerStatuses"][0]["restartCount"] == 0, "{writer:#}");

    deployment.kill_driver()?;
    for pod in ["writer", "reader"] {
        cluster.delete(POD, pod).await?;
    }
    deployment.start_driver().await?;
    for pod in ["writer", "reader"] {
        cluster.gone(POD, pod).await?;
    }
    cluster.step("the pods are gone");
    cluster.delete(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT_CONTENT, &content).await?;
    cluster.delete_claim("data").await?;
    cluster.delete_claim("restored").await?;
    let ours = |attachment: &Value| text(attachment, "/spec/attacher") == cluster.driver;
    cluster.until_all("everything is detached", ATTACHMENT, |all| !all.iter().any(ours)).await?;
    cluster.step("the volumes are gone");
    deployment.finish().await?;
    cluster.finish(Vec::new()).await
}

/// Takes a snapshot of the claim while it is written to; gives its content's name.
async fn snapshot(cluster: &Cluster) -> Result<String> {
    let source = json!({"persistentVolumeClaimName": "data"});
    let spec = json!({"volumeSnapshotClassName": cluster.name, "source": source});
    cluster.create(SNAPSHOT, json!({"metadata": {"name": "then"}, "spec": spec})).await?;
    let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
    let taken = cluster.until(SNAPSHOT, "then", "gets ready", is_ready).await?;
    Ok(text(&taken, "/status/boundVolumeSnapshotContentName").to_owned())
}

/// The container of a pod that runs a script with its volume at /data.
fn running(script: &str) -> Value {
    json!({"containers": [{
        "name": "main", "image": "docker.io/library/busybox:latest", "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script], "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }]})
}

async fn ready(cluster: &Cluster, pod: &str) -> Result<()> {
    let is_ready = |pod: &Value| {
        let conditions = pod["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
    };
    cluster.until(POD, pod, "gets ready", is_ready).await.map(drop)
}

fn exec(cluster: &Cluster, pod: &str, script: &str) -> Result<String> {
    cluster.kubectl(&["exec", pod, "-c", "main", "--", "sh", "-c", script])
}

/// The size in bytes of the filesystem at /data.
fn size(cluster: &Cluster, pod: &str) -> Result<u64> {
    let blocks = exec(cluster, pod, "df -Pk /data | tail -1 | awk '{print $2}'")?;
    Ok(blocks.trim().parse::<u64>().with_context(|| format!("read {blocks:?}"))? << 10)
}
