//! What the caches say of one volume: where pods want it, where it is attached, and what the nodes say.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Cache, Cluster, Index, Key};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::ResourceExt as _;

use super::flex::FlexAttachments;
use super::names;
use super::plan::{Attachment, NodeFacts, ObservedVolume, OnNode, PodName};
use berth_core::names::{CONTROLLER_ATTACHES, KEEP_TERMINATED_POD_VOLUMES, OUT_OF_SERVICE};
use berth_kube::storage;

/// The caches, and who points at what.
#[derive(Clone)]
pub(super) struct World {
    pub(super) pods: Cache<Pod>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) nodes: Cache<Node>,
    pub(super) drivers: Cache<CSIDriver>,
    pub(super) attachments: Cache<VolumeAttachment>,
    /// Pods by the claims they use.
    pub(super) pods_by_claim: Index<Pod, Key>,
    pub(super) pods_by_node: Index<Pod, String>,
    /// Pods by the FlexVolumes that they describe themselves, as nodes' statuses name them.
    pods_by_flex: Index<Pod, String>,
    /// The FlexVolume drivers, and what they have attached.
    pub(super) flex: Option<Arc<FlexAttachments>>,
    /// Volumes by their name in a node's status; several may be the same storage.
    pub(super) volumes_by_unique: Index<PersistentVolume, String>,
    pub(super) volumes_by_driver: Index<PersistentVolume, String>,
    /// Nodes by the volumes their statuses speak of.
    nodes_by_volume: Index<Node, String>,
    /// Attachments by the volume they name.
    pub(super) attachments_by_volume: Index<VolumeAttachment, String>,
    /// Attachments by the name of their volume that stands on them.
    attachments_by_unique: Index<VolumeAttachment, String>,
    pub(super) attachments_by_node: Index<VolumeAttachment, String>,
    /// How long to wait for a node that is not ready to unmount a volume.
    unmount_wait: Duration,
}

impl World {
    pub(super) fn new(cluster: &Cluster, flex: Option<Arc<FlexAttachments>>, unmount_wait: Duration) -> Self {
        let pods: Cache<Pod> = cluster.cache();
        let volumes: Cache<PersistentVolume> = cluster.cache();
        let attachments: Cache<VolumeAttachment> = cluster.cache();
        let nodes: Cache<Node> = cluster.cache();
        Self {
            claims: cluster.cache(),
            nodes_by_volume: nodes
                .index(|node| attached(node).chain(in_use(node)).map(str::to_owned).collect()),
            nodes,
            drivers: cluster.cache(),
            pods_by_claim: pods
                .index(|pod| storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect()),
            pods_by_node: pods.index(|pod| vec![storage::node_of_pod(pod).to_owned()]),
            pods_by_flex: pods.index(|pod| flex_of_pod(pod).collect()),
            flex,
            volumes_by_unique: volumes.index(|volume| storage::unique_name(volume).into_iter().collect()),
            volumes_by_driver: volumes.index(|volume| driver_of(volume).into_iter().collect()),
            attachments_by_volume: attachments
                .index(|attachment| volume_of(attachment).into_iter().collect()),
            attachments_by_unique: attachments
                .index(|attachment| names::noted(attachment).into_iter().collect()),
            attachments_by_node: attachments.index(|attachment| vec![attachment.spec.node_name.clone()]),
            pods,
            volumes,
            attachments,
            unmount_wait,
        }
    }

    /// The names, in nodes' statuses, of the volumes a claim is bound to.
    pub(super) fn unique_of_claim(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        storage::unique_name(self.volumes.named(storage::volume_name(claim))?.as_ref())
    }

    /// The names of all volumes of a pod.
    pub(super) fn unique_of_pod(&self, pod: &Pod) -> Vec<String> {
        let claims = storage::claims_of_pod(pod);
        let claims =
            claims.iter().filter_map(|claim| self.unique_of_claim(self.claims.get(&claim.key)?.as_ref()));
        claims.chain(flex_of_pod(pod)).collect()
    }

    /// The name of the volume of an attachment. Its object may be gone, and the attachment may be somebody else's; then
    /// the node that still speaks of the volume gives its name away, or a pod there.
    pub(super) fn unique_of_attachment(&self, attachment: &VolumeAttachment) -> Option<String> {
        if let Some(unique) = names::noted(attachment) {
            return Some(unique);
        }
        if let Some(volume) = self.volumes.named(&volume_of(attachment)?) {
            return storage::unique_name(&volume);
        }
        let node_name = attachment.spec.node_name.as_str();
        let node = self.nodes.named(node_name);
        let spoken = node.iter().flat_map(|node| attached(node).chain(in_use(node)).map(str::to_owned));
        let pods = self.pods_by_node.get(node_name);
        let wanted = pods.iter().flat_map(|pod| self.unique_of_pod(pod));
        spoken.chain(wanted).find(|unique| names::is_of(attachment, unique))
    }

    /// Whether a volume is attached at all: those of an unknown CSI driver are, those of an unknown FlexVolume driver
    /// wait for it.
    fn attachable(&self, unique: &str) -> bool {
        if let Some((driver, _)) = names::split(unique) {
            return self
                .drivers
                .named(driver)
                .is_none_or(|driver| driver.spec.attach_required != Some(false));
        }
        self.flex.as_ref().is_some_and(|flex| flex.is_attachable(unique))
    }

    /// The pods that want the volume on a node, with the volume object each means.
    pub(super) fn users(&self, unique: &str) -> Vec<User> {
        if !self.attachable(unique) {
            return Vec::new();
        }
        let mut users = Vec::new();
        for pod in self.pods_by_flex.get(unique) {
            if self.keeps_volumes(&pod) {
                users.push(User { pod, volume: None });
            }
        }
        for volume in self.volumes_by_unique.get(unique) {
            let Some(claim) = self.claim_of(&volume) else { continue };
            for pod in self.pods_by_claim.get(&Key::of(claim.as_ref())) {
                if self.wants(&pod, &claim) {
                    users.push(User { pod, volume: Some(volume.clone()) });
                }
            }
        }
        users
    }

    /// The claim a volume is bound to, if both say so.
    fn claim_of(&self, volume: &PersistentVolume) -> Option<Arc<PersistentVolumeClaim>> {
        let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
        let key = Key::new(reference.namespace.clone()?, reference.name.clone()?);
        let claim = self.claims.get(&key)?;
        let bound = claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
        let mutual = storage::volume_name(&claim) == volume.name_any() && reference.uid == claim.metadata.uid;
        (bound && mutual).then_some(claim)
    }

    fn wants(&self, pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
        let key = Key::of(claim);
        let foreign = storage::claims_of_pod(pod)
            .iter()
            .any(|of| of.key == key && of.ephemeral && !storage::owned_by(claim, pod));
        !foreign && self.keeps_volumes(pod)
    }

    /// Whether a pod is on a node and still has its volumes there.
    fn keeps_volumes(&self, pod: &Pod) -> bool {
        let node = storage::node_of_pod(pod);
        if node.is_empty() {
            return false;
        }
        let keep = || {
            self.nodes.named(node).is_some_and(|node| {
                node.annotations().get(KEEP_TERMINATED_POD_VOLUMES).is_some_and(|keep| keep == "true")
            })
        };
        !terminated(pod) || keep()
    }

    /// The names of all volumes of FlexVolume drivers that an object speaks of.
    pub(super) fn flex_volumes(&self) -> Vec<String> {
        let named =
            [self.volumes_by_unique.values(), self.pods_by_flex.values(), self.nodes_by_volume.values()];
        let flex = |name: &String| storage::split_flex_unique_name(name).is_some();
        named.into_iter().flatten().filter(flex).collect()
    }

    /// Everything about one volume.
    pub(super) fn observe(
        &self,
        unique: &str,
        known: &HashMap<String, VolumeMemory>,
        settled: impl Fn(&str) -> bool,
    ) -> ObservedVolume {
        let users = self.users(unique);
        let mut observed = ObservedVolume {
            shareable: self.shareable(unique),
            unmount_wait: self.unmount_wait,
            nodes: BTreeMap::new(),
        };
        for User { pod, .. } in &users {
            let here = self.node(&mut observed, storage::node_of_pod(pod));
            let pod = PodName { namespace: pod.namespace().unwrap_or_default(), name: pod.name_any() };
            if !here.pods.contains(&pod) {
                here.pods.push(pod);
            }
        }
        let speaking = self.nodes_by_volume.get(unique).into_iter().map(|node| node.name_any());
        for node in speaking.chain(known.keys().cloned()) {
            self.node(&mut observed, &node);
        }
        for attachment in self.attachments_of(unique, observed.nodes.keys()) {
            let status = attachment.status.as_ref();
            let error = status.and_then(|status| status.attach_error.as_ref());
            self.node(&mut observed, &attachment.spec.node_name).attachment = Some(Attachment {
                attached: status.is_some_and(|status| status.attached),
                deleting: attachment.metadata.deletion_timestamp.is_some(),
                error: error.map(|error| error.message.clone().unwrap_or_default()),
            });
        }
        for (name, here) in &mut observed.nodes {
            if let Some(node) = self.nodes.named(name) {
                here.reported = attached(&node).any(|volume| volume == unique);
                here.in_use = in_use(&node).any(|volume| volume == unique);
            }
            if let Some(flex) = &self.flex
                && names::split(unique).is_none()
            {
                here.attachment = flex.attachment(unique, name, here.reported, !here.pods.is_empty());
            }
            here.settled = settled(name);
            if let Some(known) = known.get(name) {
                here.attaching_for = known.attaching.map(|since| since.elapsed());
                here.unwanted_for = known.unwanted.map(|since| since.elapsed());
                here.conflict_reported = known.conflict_reported;
            }
        }
        observed
    }

    fn node<'a>(&self, observed: &'a mut ObservedVolume, name: &str) -> &'a mut OnNode {
        observed.nodes.entry(name.to_owned()).or_insert_with(|| OnNode {
            node: self.nodes.named(name).map_or(GONE, |node| facts(&node)),
            pods: Vec::new(),
            attachment: None,
            reported: false,
            settled: true,
            in_use: false,
            attaching_for: None,
            unwanted_for: None,
            conflict_reported: false,
        })
    }

    /// Attachments are found by the volume that stands on them, by the volume object they name, and on these nodes by
    /// the name they must have: the object may be gone, or be another one of the same storage.
    fn attachments_of<'a>(
        &self,
        unique: &str,
        nodes: impl Iterator<Item = &'a String>,
    ) -> Vec<Arc<VolumeAttachment>> {
        let Some((driver, handle)) = names::split(unique) else { return Vec::new() };
        let volumes = self.volumes_by_unique.get(unique);
        let naming =
            volumes.iter().flat_map(|volume| self.attachments_by_volume.get(volume.name_any().as_str()));
        let naming = naming.filter(|attachment| {
            attachment.spec.attacher == driver && names::noted(attachment).is_none_or(|noted| noted == unique)
        });
        let named =
            nodes.filter_map(|node| self.attachments.named(&storage::attachment_name(driver, handle, node)));
        naming.chain(self.attachments_by_unique.get(unique)).chain(named).collect()
    }

    fn shareable(&self, unique: &str) -> bool {
        let volumes = self.volumes_by_unique.get(unique);
        // A volume that a pod describes itself says nothing about who else may have it.
        volumes.is_empty() && names::split(unique).is_none()
            || volumes.iter().any(|volume| {
                let modes =
                    volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
                modes.is_empty() || modes.iter().any(|mode| mode == "ReadWriteMany" || mode == "ReadOnlyMany")
            })
    }
}

/// A pod that wants a volume on its node.
pub(super) struct User {
    pub(super) pod: Arc<Pod>,
    /// The volume object that the pod's claim means; none if the pod describes the volume itself.
    pub(super) volume: Option<Arc<PersistentVolume>>,
}

impl User {
    /// The name by which events call the volume.
    pub(super) fn volume_name(&self, unique: &str) -> String {
        match &self.volume {
            Some(volume) => volume.name_any(),
            None => storage::split_flex_unique_name(unique).map_or(unique, |(_, name)| name).to_owned(),
        }
    }
}

/// The FlexVolumes that a pod describes itself, as nodes' statuses name them.
fn flex_of_pod(pod: &Pod) -> impl Iterator<Item = String> {
    storage::volumes_of_pod(pod).iter().filter_map(|volume| {
        Some(storage::flex_unique_name(&volume.flex_volume.as_ref()?.driver, &volume.name))
    })
}

/// What is remembered of a volume on a node, and is nowhere in the cluster.
#[derive(Debug, Clone, Default)]
pub(super) struct VolumeMemory {
    pub(super) attaching: Option<tokio::time::Instant>,
    pub(super) unwanted: Option<tokio::time::Instant>,
    pub(super) conflict_reported: bool,
    pub(super) error_reported: Option<String>,
}

impl VolumeMemory {
    pub(super) fn is_nothing(&self) -> bool {
        self.attaching.is_none()
            && self.unwanted.is_none()
            && !self.conflict_reported
            && self.error_reported.is_none()
    }
}

const GONE: NodeFacts = NodeFacts { exists: false, managed: false, ready: false, out_of_service: false };

/// What matters of a node, besides its lists of volumes.
pub(super) fn facts(node: &Node) -> NodeFacts {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    NodeFacts {
        exists: true,
        managed: node.annotations().contains_key(CONTROLLER_ATTACHES),
        ready: conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        out_of_service: taints.iter().any(|taint| taint.key == OUT_OF_SERVICE),
    }
}

/// The volumes a node's status says are attached.
pub(super) fn attached(node: &Node) -> impl Iterator<Item = &str> {
    let list = node.status.as_ref().and_then(|status| status.volumes_attached.as_deref()).unwrap_or_default();
    list.iter().map(|volume| volume.name.as_str())
}

/// The volumes a node says may be mounted on it.
pub(super) fn in_use(node: &Node) -> impl Iterator<Item = &str> {
    let list = node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref()).unwrap_or_default();
    list.iter().map(String::as_str)
}

/// Whether a pod needs its volumes no more: it ran to its end, or it is being deleted and nothing of it runs.
pub(super) fn terminated(pod: &Pod) -> bool {
    let statuses =
        pod.status.as_ref().and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
    let running = statuses.iter().any(|status| {
        status.state.as_ref().is_none_or(|state| state.terminated.is_none() && state.waiting.is_none())
    });
    storage::is_over(pod) || (pod.metadata.deletion_timestamp.is_some() && !running)
}

fn driver_of(volume: &PersistentVolume) -> Option<String> {
    Some(volume.spec.as_ref()?.csi.as_ref()?.driver.clone())
}

/// The volume object an attachment names.
fn volume_of(attachment: &VolumeAttachment) -> Option<String> {
    attachment.spec.source.persistent_volume_name.clone()
}
