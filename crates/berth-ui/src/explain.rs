//! One object, those that it is used with, what they record, and what is wrong with them.

use std::collections::BTreeSet;

use berth_core::names;
use berth_kube::storage::{claim_of_volume, claims_of_pod, volume_name};
use berth_kube::{Cluster, Key};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use crate::diagnose;
use crate::finding::{Finding, ObjectName};
use crate::state::ClusterState;

/// The kinds that can be explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The object is a PersistentVolumeClaim.
    Claim,
    /// The object is a PersistentVolume.
    Volume,
    /// The object is a Pod.
    Pod,
    /// The object is a VolumeSnapshot.
    Snapshot,
    /// The object is a VolumeSnapshotContent.
    Content,
    /// The object is a VolumeAttachment.
    Attachment,
    /// The object is a StorageClass.
    Class,
    /// The object is a Node.
    Node,
    /// The object is a CSIDriver.
    Driver,
}

impl Kind {
    /// The kind by one of the words that kubectl takes for it.
    pub fn from_word(word: &str) -> Option<Self> {
        Some(match word.to_lowercase().as_str() {
            "pvc" | "persistentvolumeclaim" | "persistentvolumeclaims" => Self::Claim,
            "pv" | "persistentvolume" | "persistentvolumes" => Self::Volume,
            "pod" | "po" | "pods" => Self::Pod,
            "vs" | "volumesnapshot" | "volumesnapshots" => Self::Snapshot,
            "vsc" | "volumesnapshotcontent" | "volumesnapshotcontents" => Self::Content,
            "va" | "volumeattachment" | "volumeattachments" => Self::Attachment,
            "sc" | "storageclass" | "storageclasses" => Self::Class,
            "node" | "no" | "nodes" => Self::Node,
            "csidriver" | "csidrivers" => Self::Driver,
            _ => return None,
        })
    }

    /// The kind's name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Claim => "PersistentVolumeClaim",
            Self::Volume => "PersistentVolume",
            Self::Pod => "Pod",
            Self::Snapshot => "VolumeSnapshot",
            Self::Content => "VolumeSnapshotContent",
            Self::Attachment => "VolumeAttachment",
            Self::Class => "StorageClass",
            Self::Node => "Node",
            Self::Driver => "CSIDriver",
        }
    }

    /// What people call it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Volume => "volume",
            Self::Pod => "pod",
            Self::Snapshot => "snapshot",
            Self::Content => "snapshot content",
            Self::Attachment => "attachment",
            Self::Class => "class",
            Self::Node => "node",
            Self::Driver => "driver",
        }
    }

    /// Whether the times of its objects tell one story.
    fn has_a_life(self) -> bool {
        matches!(self, Self::Claim | Self::Volume | Self::Pod | Self::Attachment | Self::Snapshot)
    }

    fn is_namespaced(self) -> bool {
        matches!(self, Self::Claim | Self::Pod | Self::Snapshot)
    }
}

/// An object that is being explained.
#[derive(Debug, Clone)]
pub struct Subject {
    /// What kind of object it is.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
}

/// Something that an object records: its time is known to the second.
#[derive(Debug)]
pub struct Moment {
    /// When it happened, to the second.
    pub time: Timestamp,
    /// Who did it; empty if that is not known.
    pub component: &'static str,
    /// What happened, in a few words.
    pub what: String,
    /// The calls that it must have followed if they happened in the same second.
    pub follows: &'static [&'static str],
}

/// All that is known of an object.
#[derive(Debug)]
pub struct Explanation {
    /// The object and its state, in one line.
    pub headline: String,
    /// The times that the objects themselves record.
    pub moments: Vec<Moment>,
    /// What is wrong with it and with those that it is used with, the worst first.
    pub findings: Vec<Finding>,
    /// What it waits for, without being stuck.
    pub waits_for: Option<String>,
    /// The volumes, claims and pods that belong to it, by name: steps of these are steps of the object.
    pub volumes: BTreeSet<String>,
    /// Its claims, each as `namespace/name`.
    pub claims: BTreeSet<String>,
    /// Its pods, each as `namespace/name`.
    pub pods: BTreeSet<String>,
}

impl Subject {
    /// An object; the namespace counts for kinds that have one.
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, key: Key::new(if kind.is_namespaced() { namespace } else { "" }, name) }
    }

    /// Reads what has to do with the object. Objects of other namespaces are read only where the object has none.
    pub async fn read(&self, cluster: &Cluster) -> berth_kube::Result<ClusterState> {
        let mut namespace = Some(self.key.namespace.clone()).filter(|namespace| !namespace.is_empty());
        if self.kind == Kind::Volume
            && let Some(volume) = cluster.fetch::<PersistentVolume>(&self.key).await?
        {
            namespace = claim_of_volume(&volume).map(|claim| claim.namespace);
        }
        ClusterState::read(cluster, namespace.as_deref()).await
    }

    fn object_name(&self) -> ObjectName {
        let (namespace, name) = (self.key.namespace.clone(), self.key.name.clone());
        ObjectName { kind: self.kind.name().to_owned(), namespace, name }
    }

    /// What is known of the object; `None` if it does not exist.
    pub fn explain(&self, state: &ClusterState) -> Option<Explanation> {
        let related = Related::of(self, state)?;
        let findings: Vec<Finding> =
            diagnose(state).into_iter().filter(|finding| related.names.contains(&finding.object)).collect();
        let full = |object: &Key| object.to_string();
        Some(Explanation {
            headline: self.headline(state, &related),
            moments: if self.kind.has_a_life() { related.moments() } else { Vec::new() },
            waits_for: if findings.is_empty() { self.waits_for(state) } else { None },
            findings,
            volumes: related.volumes.iter().map(|volume| volume.name_any()).collect(),
            claims: related.claims.iter().map(|claim| full(&Key::of(*claim))).collect(),
            pods: related.pods.iter().map(|pod| full(&Key::of(*pod))).collect(),
        })
    }

    /// A claim that waits as its class asks for.
    fn waits_for(&self, state: &ClusterState) -> Option<String> {
        if self.kind != Kind::Claim {
            return None;
        }
        let claim = state.claims.get(&self.key)?;
        let class = state.classes.named(berth_kube::storage::class_of_claim(claim))?;
        let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        (waits && volume_name(claim).is_empty()).then(|| {
            format!(
                "The class {} waits for the first pod that uses the claim: that decides where the volume is made.",
                class.name_any()
            )
        })
    }

    fn headline(&self, state: &ClusterState, related: &Related<'_>) -> String {
        let mut parts = vec![format!("{} {}", self.kind.word(), self.key)];
        match self.kind {
            Kind::Claim | Kind::Volume | Kind::Pod | Kind::Attachment => {
                related.describe_volumes(self.kind, &mut parts);
            }
            Kind::Snapshot => {
                let status = state.snapshots.get(&self.key).and_then(|snapshot| snapshot.status.as_ref());
                let ready = status.and_then(|status| status.ready_to_use) == Some(true);
                parts.push(if ready { "ready" } else { "not ready" }.to_owned());
                parts.extend(status.and_then(|status| {
                    Some(format!("content {}", status.bound_volume_snapshot_content_name.as_ref()?))
                }));
                parts.extend(related.claims.iter().map(|claim| format!("of the claim {}", claim.name_any())));
            }
            Kind::Content => {
                if let Some(content) = state.contents.get(&self.key) {
                    let of = &content.spec.volume_snapshot_ref;
                    parts.push(format!(
                        "driver {}, policy {}",
                        content.spec.driver, content.spec.deletion_policy
                    ));
                    parts.push(format!(
                        "of the snapshot {}/{}",
                        of.namespace.as_deref().unwrap_or_default(),
                        of.name.as_deref().unwrap_or_default()
                    ));
                }
            }
            Kind::Class => {
                if let Some(class) = state.classes.get(&self.key) {
                    parts.push(format!("driver {}", class.provisioner));
                    parts.push(class.volume_binding_mode.clone().unwrap_or_else(|| "Immediate".to_owned()));
                    parts.push(format!("{} claims", related.claims.len()));
                }
            }
            Kind::Node => {
                let node = state.nodes.get(&self.key);
                parts.push(
                    if node.is_some_and(|node| diagnose::is_ready(node)) { "ready" } else { "not ready" }
                        .to_owned(),
                );
                let drivers =
                    state.csi_nodes.get(&self.key).map(|node| node.spec.drivers.clone()).unwrap_or_default();
                parts.extend(drivers.into_iter().map(|driver| {
                    let limit = driver.allocatable.and_then(|allocatable| allocatable.count);
                    format!(
                        "driver {}{}",
                        driver.name,
                        limit.map_or_else(String::new, |limit| format!(" (at most {limit} volumes)"))
                    )
                }));
                parts.push(format!("{} volumes attached", related.attachments.len()));
            }
            Kind::Driver => {
                let nodes = state.nodes_with(&self.key.name);
                parts.push(format!(
                    "registered on {}",
                    if nodes.is_empty() { "no node".to_owned() } else { nodes.join(", ") }
                ));
                parts.push(format!("{} volumes", related.volumes.len()));
            }
        }
        parts.join("   ")
    }
}

/// The objects that an object is used with.
struct Related<'a> {
    claims: Vec<&'a PersistentVolumeClaim>,
    volumes: Vec<&'a PersistentVolume>,
    pods: Vec<&'a Pod>,
    attachments: Vec<&'a VolumeAttachment>,
    names: BTreeSet<ObjectName>,
}

impl<'a> Related<'a> {
    fn of(subject: &Subject, state: &'a ClusterState) -> Option<Self> {
        let mut related = Self {
            claims: Vec::new(),
            volumes: Vec::new(),
            pods: Vec::new(),
            attachments: Vec::new(),
            names: BTreeSet::new(),
        };
        related.names.insert(subject.object_name());
        related.add_direct(subject, state)?;
        if subject.kind.has_a_life() {
            related.complete(state);
        }
        related.names.extend(related.claims.iter().map(|object| ObjectName::of(*object)));
        related.names.extend(related.volumes.iter().map(|object| ObjectName::of(*object)));
        related.names.extend(related.pods.iter().map(|object| ObjectName::of(*object)));
        related.names.extend(related.attachments.iter().map(|object| ObjectName::of(*object)));
        Some(related)
    }

    /// Adds the subject itself and what it names, or says by `None` that there is no such object.
    fn add_direct(&mut self, subject: &Subject, state: &'a ClusterState) -> Option<()> {
        let key = &subject.key;
        match subject.kind {
            Kind::Claim => self.claims.push(state.claims.get(key)?),
            Kind::Volume => self.volumes.push(state.volumes.get(key)?),
            Kind::Pod => self.pods.push(state.pods.get(key)?),
            Kind::Attachment => {
                let attachment = state.attachments.get(key)?;
                self.attachments.push(attachment);
                let volume = attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default();
                self.volumes.extend(state.volumes.named(volume).map(|volume| &**volume));
            }
            Kind::Snapshot => {
                let snapshot = state.snapshots.get(key)?;
                let source = snapshot.spec.source.persistent_volume_claim_name.clone().unwrap_or_default();
                self.claims
                    .extend(state.claims.get(&Key::new(key.namespace.clone(), source)).map(|claim| &**claim));
                let content = snapshot
                    .status
                    .as_ref()
                    .and_then(|status| status.bound_volume_snapshot_content_name.clone());
                self.names.extend(content.map(|name| ObjectName {
                    kind: Kind::Content.name().to_owned(),
                    namespace: String::new(),
                    name,
                }));
            }
            Kind::Content => {
                let reference = &state.contents.get(key)?.spec.volume_snapshot_ref;
                let (namespace, name) = (
                    reference.namespace.clone().unwrap_or_default(),
                    reference.name.clone().unwrap_or_default(),
                );
                self.names.insert(ObjectName { kind: Kind::Snapshot.name().to_owned(), namespace, name });
            }
            Kind::Class => {
                let class = state.classes.get(key)?;
                self.names.insert(ObjectName {
                    kind: Kind::Driver.name().to_owned(),
                    namespace: String::new(),
                    name: class.provisioner.clone(),
                });
                let is_of = |claim: &&std::sync::Arc<PersistentVolumeClaim>| {
                    berth_kube::storage::class_of_claim(claim) == key.name
                };
                self.claims.extend(state.claims.iter().filter(is_of).map(|claim| &**claim));
            }
            Kind::Node => {
                state.nodes.get(key)?;
                let on =
                    |attachment: &&std::sync::Arc<VolumeAttachment>| attachment.spec.node_name == key.name;
                self.attachments.extend(state.attachments.iter().filter(on).map(|attachment| &**attachment));
                let runs = |pod: &&std::sync::Arc<Pod>| berth_kube::storage::node_of_pod(pod) == key.name;
                self.pods.extend(state.pods.iter().filter(runs).map(|pod| &**pod));
            }
            Kind::Driver => {
                if state.drivers.get(key).is_none() && state.nodes_with(&key.name).is_empty() {
                    return None;
                }
                let is_of = |volume: &&std::sync::Arc<PersistentVolume>| {
                    berth_kube::storage::csi_source(volume).is_some_and(|csi| csi.driver == key.name)
                };
                self.volumes.extend(state.volumes.iter().filter(is_of).map(|volume| &**volume));
                let classes = state.classes.iter().filter(|class| class.provisioner == key.name);
                self.names.extend(classes.map(|class| ObjectName::of(class.as_ref())));
            }
        }
        Some(())
    }

    /// Follows the references between pods, claims, volumes and attachments.
    fn complete(&mut self, state: &'a ClusterState) {
        for pod in &self.pods {
            self.claims.extend(
                claims_of_pod(pod)
                    .iter()
                    .filter_map(|used| state.claims.get(&used.key))
                    .map(|claim| &**claim),
            );
        }
        for volume in &self.volumes {
            self.claims.extend(
                claim_of_volume(volume).and_then(|claim| state.claims.get(&claim)).map(|claim| &**claim),
            );
        }
        if self.volumes.is_empty() {
            self.volumes.extend(
                self.claims
                    .iter()
                    .filter_map(|claim| state.volumes.named(volume_name(claim)))
                    .map(|volume| &**volume),
            );
        }
        if self.pods.is_empty() {
            let keys: BTreeSet<Key> = self.claims.iter().map(|claim| Key::of(*claim)).collect();
            let uses =
                |pod: &&std::sync::Arc<Pod>| claims_of_pod(pod).iter().any(|used| keys.contains(&used.key));
            self.pods.extend(state.pods.iter().filter(uses).map(|pod| &**pod));
        }
        if self.attachments.is_empty() {
            let names: BTreeSet<String> = self.volumes.iter().map(|volume| volume.name_any()).collect();
            let is_of = |attachment: &&std::sync::Arc<VolumeAttachment>| {
                attachment
                    .spec
                    .source
                    .persistent_volume_name
                    .as_ref()
                    .is_some_and(|name| names.contains(name))
            };
            self.attachments.extend(state.attachments.iter().filter(is_of).map(|attachment| &**attachment));
        }
    }

    fn describe_volumes(&self, kind: Kind, parts: &mut Vec<String>) {
        if kind == Kind::Pod {
            let phase = self.pods.first().map_or("", |pod| berth_kube::storage::phase_of_pod(pod));
            parts.push(if phase.is_empty() { "Pending" } else { phase }.to_owned());
        }
        if kind == Kind::Attachment {
            for attachment in &self.attachments {
                let attached = attachment.status.as_ref().is_some_and(|status| status.attached);
                parts.push(format!(
                    "to the node {}   {}",
                    attachment.spec.node_name,
                    if attached { "attached" } else { "not attached" }
                ));
            }
        }
        for claim in &self.claims {
            let status = claim.status.as_ref();
            let phase = status.and_then(|status| status.phase.clone()).unwrap_or_default();
            parts.push(format!("claim {} {phase}", claim.name_any()));
            let capacity = status.and_then(|status| status.capacity.as_ref()?.get("storage"));
            parts.extend(capacity.map(|capacity| capacity.0.clone()));
            parts.extend(claim.spec.as_ref().and_then(|spec| spec.storage_class_name.clone()));
        }
        for volume in &self.volumes {
            let phase = volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            parts.push(format!("volume {} {phase}", volume.name_any()));
        }
    }

    /// The times that the objects themselves record.
    fn moments(&self) -> Vec<Moment> {
        let mut moments = Vec::new();
        let mut add = |time: Option<&Time>, component, what: String, follows| {
            moments.extend(time.map(|time| Moment { time: time.0, component, what, follows }));
        };
        for claim in &self.claims {
            let created = claim.metadata.creation_timestamp.as_ref();
            let what = if self.claims.len() > 1 {
                format!("claim {} created", claim.name_any())
            } else {
                "claim created".to_owned()
            };
            add(created, "user", what, &[][..]);
        }
        for volume in &self.volumes {
            let created = volume.metadata.creation_timestamp.as_ref();
            let provisioned = volume.annotations().contains_key(names::PROVISIONED_BY);
            let component = if provisioned { "provisioner" } else { "user" };
            add(created, component, "volume object created".to_owned(), &["CreateVolume"][..]);
        }
        for pod in &self.pods {
            let name = pod.name_any();
            let created = pod.metadata.creation_timestamp.as_ref();
            add(created, "user", format!("pod {name} created"), &[][..]);
            let accepted = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
            // A pod is given to a node when its claims are bound.
            add(
                accepted,
                "node",
                format!("pod {name} accepted"),
                &["CreateVolume", "bind", "schedule", "bind pod"][..],
            );
        }
        moments
    }
}
