//! Volumes are attached to the nodes of their pods, and only as long as they are in use there.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::hollow::{Hollow, read, write};
use crate::kinds::{ATTACHMENT, POD, VOLUME, text};

async fn attachment(cluster: &Cluster, volume: &Value) -> Result<Option<Value>> {
    let of_it = |attachment: &Value| {
        attachment["spec"]["source"]["persistentVolumeName"] == volume["metadata"]["name"]
    };
    Ok(cluster.list(ATTACHMENT).await?.into_iter().find(of_it))
}

#[tokio::test]
async fn a_volume_is_attached_for_a_pod_and_detached_after_it() -> Result<()> {
    let cluster = Cluster::start("attach", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--kind=image"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    cluster.claim("data", "16Mi", json!({})).await?;
    cluster.pod("one", "data", json!({})).await?;
    let used = node.run("one").await?;
    write(&used.target, "file", "kept")?;
    cluster.event("one", "SuccessfulAttachVolume").await?;

    let volume = cluster.volume_of("data").await?;
    let attached = attachment(&cluster, &volume).await?.context("there is no VolumeAttachment")?;
    let suffix = cluster.driver.replace('.', "-");
    let finalizer = json!(format!("external-attacher/{suffix}"));
    ensure!(attached["spec"]["attacher"] == json!(cluster.driver), "{attached:#}");
    ensure!(attached["metadata"]["finalizers"] == json!([finalizer]), "{attached:#}");
    let held = volume["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    ensure!(held.contains(&finalizer), "{held:?}");

    // A pod that is to end keeps its volume until it has ended.
    cluster.delete(POD, "one").await?;
    let still = attachment(&cluster, &volume).await?.context("it is detached while it is mounted")?;
    ensure!(still["metadata"]["deletionTimestamp"].is_null(), "{still:#}");
    node.stop(used).await?;
    cluster.gone(ATTACHMENT, text(&attached, "/metadata/name")).await?;

    // The volume comes back with what it held.
    cluster.pod("two", "data", json!({})).await?;
    let used = node.run("two").await?;
    ensure!(read(&used.target, "file")? == "kept");
    node.stop(used).await?;
    cluster.delete_claim("data").await?;
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}

#[tokio::test]
async fn a_claim_deleted_in_use_goes_after_its_pod() -> Result<()> {
    let cluster = Cluster::start("in-use", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--kind=dir"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    cluster.claim("data", "16Mi", json!({})).await?;
    cluster.pod("one", "data", json!({})).await?;
    let used = node.run("one").await?;
    let volume = cluster.volume_of("data").await?;
    cluster.delete(crate::kinds::CLAIM, "data").await?;
    write(&used.target, "file", "still mine")?;
    node.stop(used).await?;
    cluster.gone(VOLUME, text(&volume, "/metadata/name")).await?;
    ensure!(attachment(&cluster, &volume).await?.is_none());
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}
