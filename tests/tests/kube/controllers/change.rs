//! Volumes grow and change under their pods.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::machine;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::hollow::{Hollow, read, write};
use crate::kinds::{ATTRIBUTES_CLASS, CLAIM, VOLUME, text};

fn size(target: &Path) -> Result<u64> {
    let filesystem = rustix::fs::statvfs(target)?;
    Ok(filesystem.f_blocks * filesystem.f_frsize)
}

#[tokio::test]
async fn a_volume_grows_while_a_pod_uses_it() -> Result<()> {
    let parameters = json!({"parameters": {"csi.storage.k8s.io/fstype": "xfs"}});
    let cluster = Cluster::start("grow", parameters).await?;
    let controller = cluster.controller(&cluster.name, &["--kind=image"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    cluster.claim("data", "320Mi", json!({})).await?;
    cluster.pod("one", "data", json!({})).await?;
    let used = node.run("one").await?;
    write(&used.target, "file", "kept")?;
    let before = size(&used.target)?;

    cluster.patch(CLAIM, "data", json!({"spec": {"resources": {"requests": {"storage": "400Mi"}}}})).await?;
    node.expand(&used).await?;
    let grown = |object: &Value| text(object, "/status/capacity/storage") == "400Mi";
    cluster.until(CLAIM, "data", "has its new size", grown).await?;
    let volume = cluster.volume_of("data").await?;
    ensure!(text(&volume, "/spec/capacity/storage") == "400Mi", "{volume:#}");
    let after = size(&used.target)?;
    ensure!(after > before + (60 << 20), "the filesystem had {before} bytes and has {after}");
    ensure!(read(&used.target, "file")? == "kept");

    node.stop(used).await?;
    cluster.delete_claim("data").await?;
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}

#[tokio::test]
async fn a_volume_that_needs_no_node_grows_at_once() -> Result<()> {
    let cluster = Cluster::start("grow-dir", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--enable-topology=false", "--kind=dir"]).await?;
    cluster.claim("data", "16Mi", json!({})).await?;
    let volume = cluster.volume_of("data").await?;
    cluster.patch(CLAIM, "data", json!({"spec": {"resources": {"requests": {"storage": "1Gi"}}}})).await?;
    let grown = |object: &Value| text(object, "/status/capacity/storage") == "1Gi";
    let claim = cluster.until(CLAIM, "data", "has its new size", grown).await?;
    ensure!(claim["status"].get("allocatedResourceStatuses").is_none(), "{claim:#}");
    let volume = cluster.get(VOLUME, text(&volume, "/metadata/name")).await?;
    ensure!(text(&volume, "/spec/capacity/storage") == "1Gi", "{volume:#}");
    cluster.delete_claim("data").await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}

async fn attributes(cluster: &Cluster, name: &str, parameters: Value) -> Result<String> {
    let name = format!("{}-{name}", cluster.name);
    let class = json!({"metadata": {"name": name}, "driverName": cluster.driver, "parameters": parameters});
    cluster.create(ATTRIBUTES_CLASS, class).await?;
    Ok(name)
}

async fn choose(cluster: &Cluster, class: &str) -> Result<()> {
    cluster.patch(CLAIM, "data", json!({"spec": {"volumeAttributesClassName": class}})).await.map(drop)
}

/// How far the kernel reads ahead on the only device of this test.
fn read_ahead(cluster: &Cluster) -> Result<String> {
    let devices = machine::loops_below(cluster.dir())?;
    let device = devices.first().context("there is no device")?;
    let name = device.device.file_name().context("a device has a name")?.to_string_lossy().into_owned();
    Ok(std::fs::read_to_string(format!("/sys/block/{name}/queue/read_ahead_kb"))?.trim().to_owned())
}

#[tokio::test]
async fn a_volume_follows_its_attributes_class() -> Result<()> {
    let cluster = Cluster::start("modify", json!({})).await?;
    let controller = cluster.controller(&cluster.name, &["--kind=image"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    let silver = attributes(&cluster, "silver", json!({"readAheadKb": "64"})).await?;
    let gold = attributes(&cluster, "gold", json!({"readAheadKb": "512"})).await?;
    let wrong = attributes(&cluster, "wrong", json!({"readAheadKb": "much"})).await?;
    cluster.claim("data", "16Mi", json!({"volumeAttributesClassName": silver})).await?;
    cluster.pod("one", "data", json!({})).await?;
    let used = node.run("one").await?;
    ensure!(read_ahead(&cluster)? == "64");

    let current = |class: &str| {
        let class = json!(class);
        move |claim: &Value| {
            claim["status"]["currentVolumeAttributesClassName"] == class
                && claim["status"]["modifyVolumeStatus"].is_null()
        }
    };
    choose(&cluster, &gold).await?;
    cluster.until(CLAIM, "data", "is of the gold class", current(&gold)).await?;
    ensure!(read_ahead(&cluster)? == "512");
    let volume = cluster.volume_of("data").await?;
    ensure!(volume["spec"]["volumeAttributesClassName"] == json!(gold), "{volume:#}");

    // What cannot be is said, and changes nothing.
    choose(&cluster, &wrong).await?;
    let infeasible = |claim: &Value| claim["status"]["modifyVolumeStatus"]["status"] == "Infeasible";
    let claim = cluster.until(CLAIM, "data", "cannot be of the wrong class", infeasible).await?;
    ensure!(claim["status"]["currentVolumeAttributesClassName"] == json!(gold), "{claim:#}");
    let reported = cluster.event("data", "VolumeModifyFailed").await?;
    ensure!(reported.contains("readAheadKb must be a number of KiB"), "{reported}");
    choose(&cluster, &silver).await?;
    cluster.until(CLAIM, "data", "is of the silver class", current(&silver)).await?;
    ensure!(read_ahead(&cluster)? == "64");

    node.stop(used).await?;
    cluster.delete_claim("data").await?;
    for class in [silver, gold, wrong] {
        cluster.delete(ATTRIBUTES_CLASS, &class).await?;
        cluster.gone(ATTRIBUTES_CLASS, &class).await?;
    }
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}
