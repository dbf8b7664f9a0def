//! Volumes come with their claims and go with them.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::cluster::Cluster;
use crate::hollow::{Hollow, read, write};
use crate::kinds::{CLAIM, VOLUME, text};

#[tokio::test]
async fn a_claim_gets_a_volume_and_takes_it_along() -> Result<()> {
    let cluster = Cluster::start("provision", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--enable-topology=false", "--kind=dir"]).await?;
    let claim = cluster.claim("data", "16Mi", json!({})).await?;
    let volume = cluster.volume_of("data").await?;
    let uid = text(&claim, "/metadata/uid");
    ensure!(text(&volume, "/metadata/name") == format!("pvc-{uid}"), "{volume:#}");
    ensure!(text(&volume, "/spec/claimRef/uid") == uid, "{volume:#}");
    let annotations = &volume["metadata"]["annotations"];
    ensure!(annotations["pv.kubernetes.io/provisioned-by"] == json!(cluster.driver), "{annotations:#}");
    ensure!(text(&volume, "/spec/capacity/storage") == "16Mi", "{volume:#}");
    ensure!(cluster.csi(&cluster.name)?.volumes().await?.len() == 1);
    let reported = cluster.event("data", "ProvisioningSucceeded").await?;
    ensure!(reported.contains(&format!("pvc-{uid}")), "{reported}");
    // The mark of a volume that comes into being is gone when it is there.
    let finalizers = cluster.get(CLAIM, "data").await?["metadata"]["finalizers"].clone();
    ensure!(finalizers == json!(["kubernetes.io/pvc-protection"]), "{finalizers}");

    cluster.delete_claim("data").await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}

#[tokio::test]
async fn many_claims_at_once_each_get_one_volume() -> Result<()> {
    const MANY: usize = 50;
    let cluster = Cluster::start("many", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--enable-topology=false", "--kind=dir"]).await?;
    for number in 0..MANY {
        cluster.claim(&format!("data-{number}"), "1Mi", json!({})).await?;
    }
    let bound = cluster.until_all("all claims are bound", CLAIM, |claims| {
        claims.iter().all(|claim| text(claim, "/status/phase") == "Bound")
    });
    ensure!(bound.await?.len() == MANY);
    ensure!(cluster.csi(&cluster.name)?.volumes().await?.len() == MANY);
    for number in 0..MANY {
        cluster.delete(CLAIM, &format!("data-{number}")).await?;
    }
    let ours = |volume: &serde_json::Value| text(volume, "/spec/csi/driver") == cluster.driver;
    cluster.until_all("no volume is left", VOLUME, |volumes| !volumes.iter().any(ours)).await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}

#[tokio::test]
async fn a_volume_that_is_retained_outlives_its_claim() -> Result<()> {
    let cluster = Cluster::start("retain", json!({"reclaimPolicy": "Retain"})).await?;
    let controller = cluster.controller(&cluster.name, &["--enable-topology=false", "--kind=dir"]).await?;
    cluster.claim("data", "16Mi", json!({})).await?;
    let volume = cluster.volume_of("data").await?;
    let name = text(&volume, "/metadata/name");
    cluster.delete(CLAIM, "data").await?;
    cluster.gone(CLAIM, "data").await?;
    let released = |volume: &serde_json::Value| text(volume, "/status/phase") == "Released";
    cluster.until(VOLUME, name, "is released", released).await?;
    ensure!(cluster.csi(&cluster.name)?.volumes().await?.len() == 1);

    // A person who changes their mind.
    cluster.patch(VOLUME, name, json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}})).await?;
    cluster.gone(VOLUME, name).await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}

#[tokio::test]
async fn a_clone_holds_what_its_source_held() -> Result<()> {
    let cluster = Cluster::start("clone", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--kind=image"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    cluster.claim("source", "16Mi", json!({})).await?;
    cluster.pod("writer", "source", json!({})).await?;
    let used = node.run("writer").await?;
    write(&used.target, "file", "from the source")?;

    let source = json!({"kind": "PersistentVolumeClaim", "name": "source"});
    cluster.claim("copy", "32Mi", json!({"dataSource": source})).await?;
    cluster.pod("reader", "copy", json!({})).await?;
    let copy = node.run("reader").await?;
    ensure!(read(&copy.target, "file")? == "from the source");
    write(&copy.target, "file", "from the copy")?;
    ensure!(read(&used.target, "file")? == "from the source");

    node.stop(used).await?;
    node.stop(copy).await?;
    cluster.delete_claim("source").await?;
    cluster.delete_claim("copy").await?;
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}
