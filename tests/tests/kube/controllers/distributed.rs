//! `berth node local` with components of its own on every node: each looks after the volumes that are there.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::snapshots::is_ready;
use crate::cluster::Cluster;
use crate::hollow::{Hollow, read, write};
use crate::kinds::{CLAIM, SNAPSHOT, text};

/// Only on this node.
fn on(node: &str) -> Value {
    json!({"nodeSelector": {"kubernetes.io/hostname": node}})
}

#[tokio::test]
async fn each_node_makes_grows_and_snapshots_its_own_volumes() -> Result<()> {
    let class = json!({"volumeBindingMode": "WaitForFirstConsumer"});
    let cluster = Cluster::start_per_node("each", class).await?;
    cluster.with_snapshots().await?;
    let binder = cluster.snapshot_controller()?;
    let names = [format!("{}-a", cluster.name), format!("{}-b", cluster.name)];
    let first = cluster.node(&names[0], &cluster.path("a"), &["--kind=dir"]).await?;
    let second = cluster.node(&names[1], &cluster.path("b"), &["--kind=dir"]).await?;
    let (a, b) = (Hollow::start(&cluster, &names[0]).await?, Hollow::start(&cluster, &names[1]).await?);
    let counts = async || -> Result<[usize; 2]> {
        let (a, b) = (cluster.csi(&names[0])?, cluster.csi(&names[1])?);
        Ok([a.volumes().await?.len(), b.volumes().await?.len()])
    };

    cluster.claim("here", "16Mi", json!({})).await?;
    cluster.pod("here", "here", on(&a.name)).await?;
    let here = a.run("here").await?;
    ensure!(counts().await? == [1, 0]);
    cluster.claim("there", "16Mi", json!({})).await?;
    cluster.pod("there", "there", on(&b.name)).await?;
    let there = b.run("there").await?;
    ensure!(counts().await? == [1, 1]);
    write(&there.target, "file", "over there")?;

    cluster.patch(CLAIM, "there", json!({"spec": {"resources": {"requests": {"storage": "64Mi"}}}})).await?;
    let grown = |claim: &Value| text(claim, "/status/capacity/storage") == "64Mi";
    cluster.until(CLAIM, "there", "has its new size", grown).await?;

    let spec = json!({
        "volumeSnapshotClassName": cluster.name, "source": {"persistentVolumeClaimName": "there"},
    });
    cluster.create(SNAPSHOT, json!({"metadata": {"name": "then"}, "spec": spec})).await?;
    cluster.until(SNAPSHOT, "then", "gets ready", is_ready).await?;
    ensure!(cluster.csi(&names[0])?.snapshots().await?.is_empty());
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    cluster.claim("restored", "64Mi", json!({"dataSource": source})).await?;
    // Nothing is said of the node that has the snapshot.
    cluster.pod("restored", "restored", json!({})).await?;
    let restored = b.run("restored").await?;
    ensure!(read(&restored.target, "file")? == "over there");

    a.stop(here).await?;
    b.stop(there).await?;
    b.stop(restored).await?;
    for name in ["here", "there", "restored"] {
        cluster.delete_claim(name).await?;
    }
    cluster.delete(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT, "then").await?;
    binder.stop().await?;
    a.leave().await?;
    b.leave().await?;
    cluster.finish(vec![(&names[0], first), (&names[1], second)]).await
}

#[tokio::test]
async fn a_claim_that_waits_for_no_pod_is_taken_by_one_node() -> Result<()> {
    const MANY: usize = 6;
    let cluster = Cluster::start_per_node("taken", json!({})).await?;
    let names = [format!("{}-a", cluster.name), format!("{}-b", cluster.name)];
    let mut programs = Vec::new();
    let mut nodes = Vec::new();
    for name in &names {
        programs.push((name.as_str(), cluster.node(name, &cluster.path(name), &["--kind=dir"]).await?));
        nodes.push(Hollow::start(&cluster, name).await?);
    }
    for number in 0..MANY {
        cluster.claim(&format!("data-{number}"), "1Mi", json!({})).await?;
    }
    for number in 0..MANY {
        cluster.volume_of(&format!("data-{number}")).await?;
    }
    let (a, b) =
        (cluster.csi(&names[0])?.volumes().await?.len(), cluster.csi(&names[1])?.volumes().await?.len());
    ensure!(a + b == MANY, "{a} and {b} volumes for {MANY} claims");
    for number in 0..MANY {
        cluster.delete_claim(&format!("data-{number}")).await?;
    }
    for node in nodes {
        node.leave().await?;
    }
    cluster.finish(programs).await
}
