//! `deploy/digitalocean` on real Kubernetes: the walk of csi-digitalocean, with a twin of the API beside the cluster.
//!
//! The twin listens on loopback alone, so that the controller runs in the node's network here, and once: two would want the same
//! port.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use berth_e2e::cloud::Account;
use berth_e2e::driver;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use super::manifests::{Applied, TOOLS, with_lines};
use super::nfs::anywhere;
use super::{exec, image, ready, size};
use crate::cluster::Cluster;
use crate::kinds::{CLAIM, POD, SNAPSHOT, SNAPSHOT_CONTENT, VOLUME, text};

const WORKLOADS: &[&str] = &[
    "daemonset/berth-digitalocean-node",
    "deployment/berth-digitalocean-controller",
    "deployment/berth-snapshot-controller",
];
const NODES: &str = "app.kubernetes.io/name=berth-digitalocean-node";
/// The Secret that a person makes, with the token that the twin takes.
const SECRET: &str = "---
apiVersion: v1
kind: Secret
metadata: {name: digitalocean, namespace: berth-system}
stringData: {access-token: berth}
";

/// Where the links to devices are, which the pods of the driver see because they have the node's `/dev`.
struct Devices(PathBuf);

impl Drop for Devices {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn edited(manifests: &str, url: &str, devices: &Path) -> String {
    let behind = [
        ("--controllers=", format!("--url={url}/")),
        ("--controllers=", "--region=nyc3".to_owned()),
        ("serviceAccountName: berth-digitalocean-controller", "hostNetwork: true".to_owned()),
        ("--state-dir=", format!("--metadata-url={url}/_node/1")),
        ("--state-dir=", format!("--device-dir={}", devices.join("1").display())),
    ];
    with_lines(manifests, &behind).replace("replicas: 2", "replicas: 1") + SECRET
}

/// The seed's claim and pod, but for the image that the testbed has.
async fn walk(cluster: &Cluster, twin: &Account) -> Result<()> {
    let class = json!({"storageClassName": "do-block-storage"});
    cluster.claim("csi-pvc", "5Gi", class).await?;
    cluster.pod("my-csi-app", "csi-pvc", anywhere("exec sleep 1000000")).await?;
    ready(cluster, "my-csi-app").await?;
    cluster.step("the pod runs");
    let claim = cluster.get(CLAIM, "csi-pvc").await?;
    let volume = cluster.get(VOLUME, text(&claim, "/spec/volumeName")).await?;
    let disk = text(&volume, "/spec/csi/volumeHandle").to_owned();
    ensure!(twin.disks()?[&disk]["size_gib"] == 5, "{:?}", twin.disks()?);
    ensure!(twin.servers_of(&disk)? == ["1"]);
    exec(cluster, "my-csi-app", "echo kept > /data/file; sync")?;
    Ok(())
}

/// A disk grows under its pod. Its filesystem is xfs, because a mounted ext4 grows only with CAP_SYS_RESOURCE, which
/// not every machine of tests gives.
async fn grow(cluster: &Cluster, twin: &Account) -> Result<()> {
    cluster.claim("grown", "5Gi", json!({"storageClassName": "do-block-storage-xfs"})).await?;
    cluster.pod("grown", "grown", anywhere("exec sleep 1000000")).await?;
    ready(cluster, "grown").await?;
    exec(cluster, "grown", "echo kept > /data/file; sync")?;
    let before = size(cluster, "grown")?;
    cluster.patch(CLAIM, "grown", json!({"spec": {"resources": {"requests": {"storage": "6Gi"}}}})).await?;
    let has_grown = |claim: &Value| claim["status"]["capacity"]["storage"] == "6Gi";
    let claim = cluster.until(CLAIM, "grown", "has its new size", has_grown).await?;
    let volume = cluster.get(VOLUME, text(&claim, "/spec/volumeName")).await?;
    let disk = text(&volume, "/spec/csi/volumeHandle");
    ensure!(twin.disks()?[disk]["size_gib"] == 6, "{:?}", twin.disks()?);
    let after = size(cluster, "grown")?;
    ensure!(after > before + (600 << 20), "the filesystem had {before} bytes and has {after}");
    cluster.step("the disk and its filesystem have grown");
    Ok(())
}

/// Takes a snapshot and restores it into a larger disk of another pod; gives its content's name.
async fn restore(cluster: &Cluster) -> Result<String> {
    let spec = json!({
        "volumeSnapshotClassName": "do-block-storage", "source": {"persistentVolumeClaimName": "grown"},
    });
    cluster.create(SNAPSHOT, json!({"metadata": {"name": "then"}, "spec": spec})).await?;
    let taken =
        cluster.until(SNAPSHOT, "then", "gets ready", |it| it["status"]["readyToUse"] == true).await?;
    let content = text(&taken, "/status/boundVolumeSnapshotContentName").to_owned();
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    let class = json!({"storageClassName": "do-block-storage-xfs", "dataSource": source});
    cluster.claim("restored", "7Gi", class).await?;
    cluster.pod("reader", "restored", anywhere("exec sleep 1000000")).await?;
    ready(cluster, "reader").await?;
    ensure!(exec(cluster, "reader", "cat /data/file")? == "kept\n");
    let (source, restored) = (size(cluster, "grown")?, size(cluster, "reader")?);
    ensure!(
        restored > source + (600 << 20),
        "the source has {source} bytes, the larger restored one {restored}"
    );
    cluster.step("a snapshot is restored");
    Ok(content)
}

#[tokio::test]
async fn disks_of_a_cloud_live_by_the_manifests_alone() -> Result<()> {
    let cluster = Cluster::start("cloud", json!({})).await?;
    cluster.with_snapshots().await?;
    image::import(&cluster.path("images"), "berth", &[])?;
    image::import(&cluster.path("images"), "berth-node", &TOOLS)?;
    let devices = Devices(format!("/dev/{}", cluster.name).into());
    let (data, links) = (cluster.path("cloud").display().to_string(), devices.0.display().to_string());
    let words = ["cloud", "digitalocean", "--data-dir", &data, "--devices", &links, "--rate-limit", "none"];
    let mut cloud = Program::start(&driver::binary()?, &words, &[], cluster.path("cloud.log"))?;
    let line = cloud.says("http://127.0.0.1:").await?;
    let url = line.split_whitespace().next_back().unwrap_or_default().to_owned();
    let twin = Account::at(&url)?;
    let applied = Applied::apply(&cluster, "digitalocean", WORKLOADS, |all| edited(&all, &url, &devices.0))?;
    cluster.step("the manifests' pods are ready");

    walk(&cluster, &twin).await?;
    applied.kill(NODES)?;
    ensure!(exec(&cluster, "my-csi-app", "cat /data/file")? == "kept\n", "a pod needs no driver to read");
    grow(&cluster, &twin).await?;
    let content = restore(&cluster).await?;

    for pod in ["my-csi-app", "grown", "reader"] {
        cluster.delete(POD, pod).await?;
        cluster.gone(POD, pod).await?;
    }
    cluster.delete(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT_CONTENT, &content).await?;
    for claim in ["csi-pvc", "grown", "restored"] {
        let volume = cluster.get(CLAIM, claim).await?;
        let volume = text(&volume, "/spec/volumeName").to_owned();
        cluster.delete_claim(claim).await?;
        cluster.gone(VOLUME, &volume).await?;
    }
    let (disks, snapshots) = twin.ids()?;
    ensure!(disks.is_empty() && snapshots.is_empty(), "{disks:?} and {snapshots:?} are left in the account");
    cluster.step("the account is empty");
    applied.ready()?;
    applied.allowed()?;
    drop(applied);
    cloud.stop().await?;
    drop(devices);
    cluster.finish(Vec::new()).await
}
