//! How Kubernetes' own kubelet and kube-controller-manager call a FlexVolume driver: the calls that `berth up` is compared
//! with, too.

mod adapter;
mod nfs;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::flex::{self, Driver, RECORDING};
use serde_json::{Value, json};

use super::deployment::{HERE, kubelet_root};
use super::ready;
use crate::cluster::Cluster;
use crate::kinds::{CLAIM, POD, text};

const IMAGE: &str = "docker.io/library/busybox:latest";
/// How long kube-controller-manager may take to detach a volume.
const DETACH: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_flex_driver_is_called_with_the_arguments_that_berth_uses() -> Result<()> {
    let cluster = Cluster::start("flex", json!({})).await?;
    let plugins = plugins()?;
    let plain = Driver::install(&plugins, &cluster.driver, "plain", RECORDING)?;
    let disk = Driver::install(&plugins, &cluster.driver, "disk", RECORDING)?;
    let called = calls(&cluster, &plain, &disk).await;
    for driver in [&plain, &disk] {
        driver.remove()?;
    }
    called?;
    cluster.finish(Vec::new()).await
}

/// The plugin directory of the testbed's kubelet and kube-controller-manager.
fn plugins() -> Result<PathBuf> {
    let kubeconfig = std::env::var_os("KUBECONFIG_REAL").context("KUBECONFIG_REAL names no cluster")?;
    let state = PathBuf::from(kubeconfig);
    Ok(state.parent().context("the kubeconfig lies in a directory")?.join("flexvolume"))
}

async fn calls(cluster: &Cluster, plain: &Driver, disk: &Driver) -> Result<()> {
    apply(cluster, &flex::pod_with_volume(&plain.name, IMAGE))?;
    ready(cluster, "inline").await?;
    cluster.step("the pod with a volume of its own runs");
    let inline = cluster.get(POD, "inline").await?;
    cluster.delete(POD, "inline").await?;
    cluster.gone(POD, "inline").await?;
    let volume = format!("{}-pv", cluster.name);
    apply(cluster, &flex::pod_with_claim(&disk.name, &volume, IMAGE))?;
    ready(cluster, "claimed").await?;
    cluster.step("the pod with a claim runs");
    let claimed = cluster.get(POD, "claimed").await?;
    cluster.patch(CLAIM, "flex", json!({"spec": {"resources": {"requests": {"storage": "2Mi"}}}})).await?;
    let pending =
        |claim: &Value| claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizePending";
    cluster.until(CLAIM, "flex", "waits for the kubelet to grow it", pending).await?;
    // A kubelet looks at a pod that does not change about once a minute.
    cluster.patch(POD, "claimed", json!({"metadata": {"annotations": {"look": "again"}}})).await?;
    let grown = |claim: &Value| text(claim, "/status/capacity/storage") == "2Mi";
    cluster.until(CLAIM, "flex", "has its new size", grown).await?;
    cluster.step("the volume has grown");
    cluster.delete(POD, "claimed").await?;
    cluster.gone(POD, "claimed").await?;
    let begun = Instant::now();
    while !disk.attached()?.is_empty() {
        ensure!(begun.elapsed() < DETACH, "still attached: {:#?}", disk.calls(&[])?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.step("the volume is detached");
    cluster.kubectl(&["delete", "pvc/flex", &format!("pv/{volume}"), &format!("storageclass/{volume}")])?;

    let kubelet = kubelet_root().display().to_string();
    let pods = format!("{kubelet}/pods");
    let vendor = cluster.driver.as_str();
    let escaped = |name: &str| format!("{vendor}~{name}");
    let calls = plain.work(&[
        (&pods, "PODS"),
        (text(&inline, "/metadata/uid"), "UID"),
        (&escaped("plain"), "VENDOR~NAME"),
        (&cluster.name, "NAMESPACE"),
    ])?;
    flex::compare(&calls, &flex::calls_without_attachment())?;
    let calls = disk.work(&[
        (&pods, "PODS"),
        (&kubelet, "ROOT"),
        (text(&claimed, "/metadata/uid"), "UID"),
        (&escaped("disk"), "VENDOR~NAME"),
        (&format!("{vendor}/disk"), "VENDOR/NAME"),
        (&volume, "VOLUME"),
        (&cluster.name, "NAMESPACE"),
        (HERE, "NODE"),
    ])?;
    flex::compare(&calls, &flex::calls_with_attachment())
}

fn apply(cluster: &Cluster, objects: &[Value]) -> Result<()> {
    let path = cluster.path("objects.json");
    fs::write(&path, flex::manifest(objects))?;
    cluster.kubectl(&["apply", "-f", path.to_str().context("a path of tests is text")?]).map(drop)
}
