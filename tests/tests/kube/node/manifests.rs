//! The manifests of `deploy/` as they are, applied to real Kubernetes and run by its kubelet.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use berth_e2e::machine;
use serde_json::{Value, json};

use super::deployment::kubelet_root;
use super::{exec, image, ready, running, size};
use crate::cluster::Cluster;
use crate::kinds::{CLAIM, CLASS, POD, SNAPSHOT, SNAPSHOT_CONTENT, text};
use crate::objects::merged;

/// What the image of the drivers has beside the program.
pub(super) const TOOLS: [&str; 5] = ["mkfs.ext4", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs"];
const DRIVERS: &str = "app.kubernetes.io/name=berth-local";

/// A directory of `deploy/` in the cluster; it is taken away when this is dropped.
pub(super) struct Applied {
    kubeconfig: String,
    file: PathBuf,
    workloads: &'static [&'static str],
}

impl Applied {
    /// Applies it, but for the kubelet's place and what `edit` changes, and waits until these workloads' pods are ready.
    pub(super) fn apply(
        cluster: &Cluster,
        name: &str,
        workloads: &'static [&'static str],
        edit: impl FnOnce(String) -> String,
    ) -> Result<Self> {
        let dir = format!("{}/../deploy/{name}", env!("CARGO_MANIFEST_DIR"));
        let built = machine::run("kubectl", &["kustomize", &dir])?;
        let file = cluster.path(&format!("{name}.yaml"));
        fs::write(&file, edit(built.replace("/var/lib/kubelet", &kubelet_root().display().to_string())))?;
        let applied = Self { kubeconfig: cluster.kubeconfig(), file, workloads };
        applied.kubectl(&["apply", "-f", &applied.file.display().to_string()])?;
        applied.ready()?;
        Ok(applied)
    }

    pub(super) fn ready(&self) -> Result<()> {
        for workload in self.workloads {
            let waited = self.kubectl(&["rollout", "status", "--timeout=120s", workload]);
            if let Err(error) = waited {
                let pods = self.kubectl(&["describe", "pods"])?;
                return Err(error.context(pods));
            }
        }
        Ok(())
    }

    /// Makes sure that nobody was refused anything.
    pub(super) fn allowed(&self) -> Result<()> {
        for workload in self.workloads {
            let logs = self.kubectl(&["logs", workload, "--all-pods=true", "--tail=-1"])?;
            ensure!(!logs.to_lowercase().contains("forbidden"), "{logs}");
        }
        Ok(())
    }

    /// Kills the pods with a label, whose workload makes others.
    pub(super) fn kill(&self, label: &str) -> Result<()> {
        self.kubectl(&["delete", "pods", "-l", label, "--force", "--grace-period=0"]).map(drop)
    }

    pub(super) fn kubectl(&self, args: &[&str]) -> Result<String> {
        let args = [&[self.kubeconfig.as_str(), "-n", "berth-system"], args].concat();
        machine::run("kubectl", &args)
    }
}

impl Drop for Applied {
    fn drop(&mut self) {
        let file = self.file.display().to_string();
        if let Err(error) = self.kubectl(&["delete", "--ignore-not-found", "--timeout=120s", "-f", &file]) {
            eprintln!("could not take the manifests away: {error:#}");
        }
    }
}

/// Manifests with further lines, each behind the lines that contain a text, and with their indentation.
pub(super) fn with_lines(manifests: &str, behind: &[(&str, String)]) -> String {
    let mut edited = String::new();
    for line in manifests.lines() {
        edited.extend([line, "\n"]);
        for (there, new) in behind {
            if let Some((indentation, _)) = line.split_once(there) {
                edited.extend([indentation, new, "\n"]);
            }
        }
    }
    edited
}

#[tokio::test]
async fn a_volume_lives_by_the_manifests_alone() -> Result<()> {
    let cluster = Cluster::start("manifests", json!({})).await?;
    cluster.with_snapshots().await?;
    image::import(&cluster.path("images"), "berth", &[])?;
    image::import(&cluster.path("images"), "berth-node", &TOOLS)?;
    let data = cluster.path("data").display().to_string();
    let workloads = &["daemonset/berth-local", "deployment/berth-snapshot-controller"];
    let applied =
        Applied::apply(&cluster, "local", workloads, |all| all.replace("/var/lib/berth/local", &data))?;
    cluster.step("the manifests' pods are ready");
    let rooms = applied.kubectl(&["get", "csistoragecapacities", "-o", "name"])?;
    ensure!(!rooms.is_empty(), "nobody tells how much room there is");

    let class = json!({
        "metadata": {"name": "manifests"}, "provisioner": "local.berth.dev", "allowVolumeExpansion": true,
        "volumeBindingMode": "WaitForFirstConsumer", "parameters": {"csi.storage.k8s.io/fstype": "xfs"},
    });
    cluster.create(CLASS, class).await?;
    let own = json!({"storageClassName": "manifests"});
    cluster.claim("data", "320Mi", own.clone()).await?;
    let script = "set -e; echo kept > /data/file; while :; do date >> /data/log; sync; sleep 1; done";
    cluster.pod("writer", "data", merged(running(script), json!({"nodeSelector": {}}))).await?;
    ready(&cluster, "writer").await?;
    cluster.step("the pod runs");
    let before = size(&cluster, "writer")?;

    applied.kill(DRIVERS)?;
    cluster.patch(CLAIM, "data", json!({"spec": {"resources": {"requests": {"storage": "400Mi"}}}})).await?;
    ensure!(exec(&cluster, "writer", "cat /data/file")? == "kept\n", "a pod needs no driver to read");
    let pending =
        |claim: &Value| claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizePending";
    cluster.until(CLAIM, "data", "waits for the kubelet to grow it", pending).await?;
    // A kubelet looks at a pod that does not change about once a minute.
    cluster.patch(POD, "writer", json!({"metadata": {"annotations": {"look": "again"}}})).await?;
    let grown = |claim: &Value| text(claim, "/status/capacity/storage") == "400Mi";
    cluster.until(CLAIM, "data", "has its new size", grown).await?;
    let after = size(&cluster, "writer")?;
    ensure!(after > before + (60 << 20), "the filesystem had {before} bytes and has {after}");
    cluster.step("the volume has grown");

    restore(&cluster, own).await?;
    cluster.delete_claim("data").await?;
    cluster.step("the volumes are gone");
    let left = fs::read_dir(cluster.path("data/volumes"))?.count();
    ensure!(left == 0, "{left} volumes are left on the disk");
    applied.ready()?;
    applied.allowed()?;
    drop(applied);
    cluster.delete(CLASS, "manifests").await?;
    cluster.finish(Vec::new()).await
}

/// Takes a snapshot, restores it into another pod, and takes all but the first claim away.
async fn restore(cluster: &Cluster, own: Value) -> Result<()> {
    let spec = json!({
        "volumeSnapshotClassName": "berth-local", "source": {"persistentVolumeClaimName": "data"},
    });
    cluster.create(SNAPSHOT, json!({"metadata": {"name": "then"}, "spec": spec})).await?;
    let taken =
        cluster.until(SNAPSHOT, "then", "gets ready", |it| it["status"]["readyToUse"] == true).await?;
    let content = text(&taken, "/status/boundVolumeSnapshotContentName").to_owned();
    exec(cluster, "writer", "echo changed > /data/file")?;
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    cluster.claim("restored", "400Mi", merged(own, json!({"dataSource": source}))).await?;
    let reader = merged(running("exec sleep 1000000"), json!({"nodeSelector": {}}));
    cluster.pod("reader", "restored", reader).await?;
    ready(cluster, "reader").await?;
    ensure!(exec(cluster, "reader", "cat /data/file")? == "kept\n");
    cluster.step("the restored pod runs");
    for pod in ["writer", "reader"] {
        cluster.delete(POD, pod).await?;
        cluster.gone(POD, pod).await?;
    }
    cluster.delete(SNAPSHOT, "then").await?;
    cluster.gone(SNAPSHOT_CONTENT, &content).await?;
    cluster.delete_claim("restored").await
}
