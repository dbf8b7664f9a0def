//! A node without a kubelet: the test does for Kubernetes' controllers, and for the driver, what a kubelet does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use berth_csi::v1::{self, volume_capability};
use berth_e2e::{Csi, csi};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::cluster::Cluster;
use crate::kinds::{ATTACHMENT, CLAIM, CSI_DRIVER, CSI_NODE, NODE, POD, text};

/// How often a kubelet says that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// A node, for as long as it is not dropped.
pub(crate) struct Hollow<'a> {
    cluster: &'a Cluster,
    csi: Csi,
    pub(crate) name: String,
    heart: JoinHandle<()>,
}

/// A volume in a pod on this node.
pub(crate) struct InUse {
    pod: String,
    claim: String,
    /// As nodes' statuses name it.
    unique: String,
    handle: String,
    capability: v1::VolumeCapability,
    staging: PathBuf,
    /// Where the pod finds it.
    pub(crate) target: PathBuf,
}

impl<'a> Hollow<'a> {
    /// Makes a node known on which the driver of the same name runs.
    pub(crate) async fn start(cluster: &'a Cluster, name: &str) -> Result<Self> {
        let csi = cluster.csi(name)?;
        let info = csi.node.clone().node_get_info(v1::NodeGetInfoRequest {}).await?.into_inner();
        let segments = info.accessible_topology.map(|topology| topology.segments).unwrap_or_default();
        let keys: Vec<&String> = segments.keys().collect();
        let mut labels = json!({"kubernetes.io/hostname": name, "test": cluster.name});
        for (key, value) in &segments {
            labels[key] = json!(value);
        }
        let ids = json!({(&cluster.driver): info.node_id}).to_string();
        let node = cluster
            .create(
                NODE,
                json!({
                    "metadata": {
                        "name": name, "labels": labels,
                        "annotations": {
                            "csi.volume.kubernetes.io/nodeid": ids,
                            "volumes.kubernetes.io/controller-managed-attach-detach": "true",
                        },
                    },
                    "status": {
                        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"},
                        "capacity": {"cpu": "4", "memory": "8Gi", "pods": "110"},
                        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
                    },
                }),
            )
            .await?;
        let owner = json!({
            "apiVersion": "v1", "kind": "Node", "name": name, "uid": text(&node, "/metadata/uid"),
        });
        let driver = json!({"name": cluster.driver, "nodeID": info.node_id, "topologyKeys": keys});
        let csi_node = json!({
            "metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"drivers": [driver]},
        });
        cluster.create(CSI_NODE, csi_node).await?;
        let heart = tokio::spawn(beat(Api::namespaced(cluster.client(), "kube-node-lease"), name.to_owned()));
        Ok(Self { cluster, csi, name: name.to_owned(), heart })
    }

    /// Waits for a pod that uses a claim to be scheduled here, and brings it its volume.
    pub(crate) async fn run(&self, pod: &str) -> Result<InUse> {
        let here = |pod: &Value| text(pod, "/spec/nodeName") == self.name;
        let object = self.cluster.until(POD, pod, &format!("is scheduled to {}", self.name), here).await?;
        let claim = text(&object, "/spec/volumes/0/persistentVolumeClaim/claimName").to_owned();
        let volume = self.cluster.volume_of(&claim).await?;
        let handle = text(&volume, "/spec/csi/volumeHandle").to_owned();
        let unique = format!("kubernetes.io/csi/{}^{handle}", self.cluster.driver);
        self.in_use(|all| all.push(unique.clone())).await?;
        let driver = self.cluster.get(CSI_DRIVER, &self.cluster.driver).await?;
        let publish_context = if driver["spec"]["attachRequired"] == true {
            self.attached(&volume, &unique).await?
        } else {
            BTreeMap::new()
        };

        let paths = csi::Mounted::paths(&handle, &self.cluster.path(&self.name))?;
        let context = serde_json::from_value(volume["spec"]["csi"]["volumeAttributes"].clone())?;
        let capability = capability(text(&volume, "/spec/csi/fsType"));
        let request = v1::NodeStageVolumeRequest {
            volume_id: handle.clone(),
            publish_context,
            staging_target_path: csi::text(&paths.staging),
            volume_capability: Some(capability.clone()),
            volume_context: context,
            ..Default::default()
        };
        self.csi.node.clone().node_stage_volume(request.clone()).await?;
        let publish = v1::NodePublishVolumeRequest {
            volume_id: request.volume_id,
            publish_context: request.publish_context,
            staging_target_path: request.staging_target_path,
            target_path: csi::text(&paths.target),
            volume_capability: request.volume_capability,
            volume_context: request.volume_context,
            ..Default::default()
        };
        self.csi.node.clone().node_publish_volume(publish).await?;
        self.cluster.patch_status(POD, pod, json!({"phase": "Running"})).await?;
        let (staging, target) = (paths.staging, paths.target);
        Ok(InUse { pod: pod.to_owned(), claim, unique, handle, capability, staging, target })
    }

    /// Waits until the controllers say that a volume is attached here, and gives what the driver said then.
    async fn attached(&self, volume: &Value, unique: &str) -> Result<BTreeMap<String, String>> {
        let listed = |node: &Value| {
            let all = node["status"]["volumesAttached"].as_array();
            all.is_some_and(|all| all.iter().any(|attached| attached["name"] == unique))
        };
        self.cluster.until(NODE, &self.name, &format!("has {unique} attached"), listed).await?;
        let of_it = |attachment: &Value| {
            attachment["spec"]["nodeName"] == json!(self.name)
                && attachment["spec"]["source"]["persistentVolumeName"] == volume["metadata"]["name"]
        };
        let attachments = self.cluster.list(ATTACHMENT).await?;
        let attachment = attachments.into_iter().find(of_it).context("there is no VolumeAttachment")?;
        ensure!(attachment["status"]["attached"] == true, "{attachment:#}");
        let metadata = attachment["status"]["attachmentMetadata"].clone();
        Ok(serde_json::from_value::<Option<_>>(metadata)?.unwrap_or_default())
    }

    /// Lets the filesystem of a volume grow that the driver has grown, and says so in its claim.
    pub(crate) async fn expand(&self, volume: &InUse) -> Result<()> {
        let pending =
            |claim: &Value| claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizePending";
        let claim =
            self.cluster.until(CLAIM, &volume.claim, "waits for the node to grow it", pending).await?;
        let size = text(&claim, "/status/allocatedResources/storage");
        let request = v1::NodeExpandVolumeRequest {
            volume_id: volume.handle.clone(),
            volume_path: csi::text(&volume.target),
            staging_target_path: csi::text(&volume.staging),
            volume_capability: Some(volume.capability.clone()),
            ..Default::default()
        };
        self.csi.node.clone().node_expand_volume(request).await?;
        let status = json!({
            "capacity": {"storage": size}, "allocatedResourceStatuses": null, "conditions": [],
        });
        self.cluster.patch_status(CLAIM, &volume.claim, status).await
    }

    /// Ends a pod and takes its volume away.
    pub(crate) async fn stop(&self, volume: InUse) -> Result<()> {
        self.cluster.delete(POD, &volume.pod).await?;
        self.csi.unpublish(&volume.handle, &volume.target).await?;
        self.csi.unstage(&volume.handle, &volume.staging).await?;
        self.in_use(|all| all.retain(|name| *name != volume.unique)).await?;
        self.cluster.remove_pod(&volume.pod).await
    }

    /// Changes the list of volumes that may be mounted here, and so must not be detached.
    async fn in_use(&self, change: impl FnOnce(&mut Vec<String>)) -> Result<()> {
        let node = self.cluster.get(NODE, &self.name).await?;
        let listed = node["status"]["volumesInUse"].clone();
        let mut all = serde_json::from_value::<Option<Vec<String>>>(listed)?.unwrap_or_default();
        change(&mut all);
        self.cluster.patch_status(NODE, &self.name, json!({"volumesInUse": all})).await
    }

    /// Takes the node away, with all that belongs to it.
    pub(crate) async fn leave(self) -> Result<()> {
        self.cluster.delete(NODE, &self.name).await?;
        self.cluster.delete(CSI_NODE, &self.name).await
    }
}

impl Drop for Hollow<'_> {
    fn drop(&mut self) {
        self.heart.abort();
    }
}

/// A claim's volume, for a pod that reads and writes files.
fn capability(fs_type: &str) -> v1::VolumeCapability {
    let mount = volume_capability::MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
    let mode = volume_capability::access_mode::Mode::SingleNodeWriter;
    v1::VolumeCapability {
        access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
        access_type: Some(volume_capability::AccessType::Mount(mount)),
    }
}

/// Says again and again that a node is alive; one that falls silent is drained.
async fn beat(leases: Api<Lease>, node: String) {
    loop {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
            "spec": {
                "holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": MicroTime(Timestamp::now()),
            },
        });
        // The next one comes soon.
        let _ = leases.patch(&node, &PatchParams::apply("kubelet").force(), &Patch::Apply(lease)).await;
        tokio::time::sleep(HEARTBEAT).await;
    }
}

/// Files on a volume.
pub(crate) fn read(target: &Path, name: &str) -> Result<String> {
    std::fs::read_to_string(target.join(name)).with_context(|| format!("read {name} in {}", target.display()))
}

/// Writes a file on a volume.
pub(crate) fn write(target: &Path, name: &str, content: &str) -> Result<()> {
    berth_e2e::content::write(&target.join(name), content.as_bytes())
        .with_context(|| format!("write {name} in {}", target.display()))
}
