//! Snapshots of claims, and claims from snapshots.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::hollow::{Hollow, read, write};
use crate::kinds::{SNAPSHOT, SNAPSHOT_CONTENT, text};

/// Whether a snapshot, or a group of them, can be restored.
pub(crate) fn is_ready(snapshot: &Value) -> bool {
    snapshot["status"]["readyToUse"] == true
}

#[tokio::test]
async fn a_restored_claim_holds_what_the_snapshot_holds() -> Result<()> {
    let cluster = Cluster::start("snapshot", json!({})).await?;
    cluster.with_snapshots().await?;
    let controller = cluster.controller(&cluster.name, &["--kind=image"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    cluster.claim("data", "16Mi", json!({})).await?;
    cluster.pod("writer", "data", json!({})).await?;
    let used = node.run("writer").await?;
    write(&used.target, "file", "then")?;

    let source = json!({"persistentVolumeClaimName": "data"});
    let spec = json!({"volumeSnapshotClassName": cluster.name, "source": source});
    cluster.create(SNAPSHOT, json!({"metadata": {"name": "then"}, "spec": spec})).await?;
    let taken = cluster.until(SNAPSHOT, "then", "gets ready", is_ready).await?;
    ensure!(text(&taken, "/status/restoreSize") == "16Mi", "{taken:#}");
    let content = text(&taken, "/status/boundVolumeSnapshotContentName");
    ensure!(content == format!("snapcontent-{}", text(&taken, "/metadata/uid")), "{taken:#}");
    write(&used.target, "file", "now")?;

    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    cluster.claim("restored", "16Mi", json!({"dataSource": source})).await?;
    cluster.pod("reader", "restored", json!({})).await?;
    let restored = node.run("reader").await?;
    ensure!(read(&restored.target, "file")? == "then");
    ensure!(read(&used.target, "file")? == "now");

    // The snapshot outlives the claim that it is of.
    node.stop(used).await?;
    node.stop(restored).await?;
    cluster.delete_claim("data").await?;
    cluster.delete_claim("restored").await?;
    ensure!(cluster.csi(&cluster.name)?.snapshots().await?.len() == 1);
    cluster.delete(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT_CONTENT, content).await?;
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}
