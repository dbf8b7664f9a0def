//! What was observed of a cluster: its objects by kind and name, the events about each, and when.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};
use berth_kube::{Cluster, Key, Kind};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use kube::ResourceExt;
use serde::Serialize;

/// How long something may be without a sign of progress before that is a finding.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The objects of one kind.
#[derive(Debug, Clone)]
pub struct Objects<K> {
    by_key: BTreeMap<Key, Arc<K>>,
    known: bool,
}

impl<K> Default for Objects<K> {
    fn default() -> Self {
        Self { by_key: BTreeMap::new(), known: true }
    }
}

impl<K: ResourceExt> Objects<K> {
    /// Nothing is known of the kind: it may not be read.
    pub fn unknown() -> Self {
        Self { by_key: BTreeMap::new(), known: false }
    }

    /// Whether the kind could be read. If not, nothing follows from an object's absence.
    pub fn are_known(&self) -> bool {
        self.known
    }

    /// An object by its namespace and name.
    pub fn get(&self, key: &Key) -> Option<&Arc<K>> {
        self.by_key.get(key)
    }

    /// An object of a kind without namespaces.
    pub fn named(&self, name: &str) -> Option<&Arc<K>> {
        self.by_key.get(&Key::cluster(name))
    }

    /// Whether it is certain that there is no such object.
    pub fn lack(&self, key: &Key) -> bool {
        self.known && !self.by_key.contains_key(key)
    }

    /// All of them, by namespace and name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<K>> {
        self.by_key.values()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }
}

impl<K: ResourceExt> FromIterator<Arc<K>> for Objects<K> {
    fn from_iter<I: IntoIterator<Item = Arc<K>>>(objects: I) -> Self {
        let by_key = objects.into_iter().map(|object| (Key::of(object.as_ref()), object)).collect();
        Self { by_key, known: true }
    }
}

/// Events by the UID of the object that they are about, oldest first.
#[derive(Debug, Clone, Default)]
pub struct Events {
    by_object: HashMap<String, Vec<Arc<Event>>>,
}

impl Events {
    /// The events about an object, oldest first.
    pub fn about(&self, object: &impl ResourceExt) -> &[Arc<Event>] {
        self.by_object.get(object.meta().uid.as_deref().unwrap_or_default()).map_or(&[], Vec::as_slice)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_object.values().map(Vec::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_object.is_empty()
    }
}

impl FromIterator<Arc<Event>> for Events {
    fn from_iter<I: IntoIterator<Item = Arc<Event>>>(events: I) -> Self {
        let mut by_object: HashMap<String, Vec<Arc<Event>>> = HashMap::new();
        for event in events {
            let uid = event.involved_object.uid.clone().unwrap_or_default();
            by_object.entry(uid).or_default().push(event);
        }
        for events in by_object.values_mut() {
            events.sort_by_key(|event| time_of(event));
        }
        Self { by_object }
    }
}

/// When an event happened last.
pub fn time_of(event: &Event) -> Timestamp {
    let series =
        event.series.as_ref().and_then(|series| series.last_observed_time.as_ref().map(|time| time.0));
    let time = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref()).map(|time| time.0);
    series.or(time).or(event.event_time.as_ref().map(|time| time.0)).unwrap_or_default()
}

/// How much of a mounted volume is used, as its node reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// How many bytes are in use.
    pub used: u64,
    /// How many bytes there are in all.
    pub capacity: u64,
    /// Inodes in use; 0 if the filesystem counts none.
    pub inodes_used: u64,
    /// Inodes in all; 0 if the filesystem counts none.
    pub inodes: u64,
}

/// A kind that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unreadable {
    /// The kind, such as `Node`.
    pub kind: String,
    /// What the API server said.
    pub why: String,
}

/// Everything that a diagnosis looks at.
#[derive(Debug, Clone, Default)]
pub struct ClusterState {
    /// All StorageClasses that were read.
    pub classes: Objects<StorageClass>,
    /// All VolumeAttributesClasses that were read.
    pub attributes_classes: Objects<VolumeAttributesClass>,
    /// All PersistentVolumeClaims that were read.
    pub claims: Objects<PersistentVolumeClaim>,
    /// All PersistentVolumes that were read.
    pub volumes: Objects<PersistentVolume>,
    /// All Pods that were read.
    pub pods: Objects<Pod>,
    /// All VolumeAttachments that were read.
    pub attachments: Objects<VolumeAttachment>,
    /// All Nodes that were read.
    pub nodes: Objects<Node>,
    /// Which drivers each node knows.
    pub csi_nodes: Objects<CSINode>,
    /// How drivers are to be used.
    pub drivers: Objects<CSIDriver>,
    /// How much room drivers say they have.
    pub capacities: Objects<CSIStorageCapacity>,
    /// VolumeSnapshots; none in a cluster without their CustomResourceDefinitions.
    pub snapshots: Objects<VolumeSnapshot>,
    /// All VolumeSnapshotContents that were read.
    pub contents: Objects<VolumeSnapshotContent>,
    /// All VolumeSnapshotClasses that were read.
    pub snapshot_classes: Objects<VolumeSnapshotClass>,
    /// All Events that were read.
    pub events: Events,
    /// How full volumes are, by claim, as far as nodes were asked.
    pub usage: BTreeMap<Key, Usage>,
    /// What could not be read, and why.
    pub unreadable: Vec<Unreadable>,
    /// Whether pods, claims and snapshots of one namespace only were read.
    pub partial: bool,
    /// When all this was so.
    pub now: Timestamp,
    /// How long something may be without a sign of progress.
    pub patience: Duration,
}

impl ClusterState {
    /// Reads everything by requests; of kinds with namespaces only one namespace if one is given. What may not be read is
    /// noted. An error means that the API server does not answer at all.
    pub async fn read(cluster: &Cluster, namespace: Option<&str>) -> berth_kube::Result<Self> {
        let within = namespace.unwrap_or_default();
        let (classes, attributes_classes, claims, volumes, pods, attachments, nodes) = futures_util::join!(
            list(cluster, ""),
            list(cluster, ""),
            list(cluster, within),
            list(cluster, ""),
            list(cluster, within),
            list(cluster, ""),
            list(cluster, ""),
        );
        let (csi_nodes, drivers, capacities, snapshots, contents, snapshot_classes, events) = futures_util::join!(
            list(cluster, ""),
            list(cluster, ""),
            list(cluster, ""),
            list(cluster, within),
            list(cluster, ""),
            list(cluster, ""),
            list::<Event>(cluster, ""),
        );
        let mut unreadable = Vec::new();
        let mut state = Self {
            classes: known(classes, &mut unreadable)?,
            attributes_classes: known(attributes_classes, &mut unreadable)?,
            claims: known(claims, &mut unreadable)?,
            volumes: known(volumes, &mut unreadable)?,
            pods: known(pods, &mut unreadable)?,
            attachments: known(attachments, &mut unreadable)?,
            nodes: known(nodes, &mut unreadable)?,
            csi_nodes: known(csi_nodes, &mut unreadable)?,
            drivers: known(drivers, &mut unreadable)?,
            capacities: known(capacities, &mut unreadable)?,
            snapshots: known(snapshots, &mut unreadable)?,
            contents: known(contents, &mut unreadable)?,
            snapshot_classes: known(snapshot_classes, &mut unreadable)?,
            events: known(events, &mut unreadable)?.by_key.into_values().collect(),
            partial: namespace.is_some(),
            now: Timestamp::now(),
            patience: PATIENCE,
            ..Self::default()
        };
        state.unreadable = unreadable;
        Ok(state)
    }

    /// Asks the nodes that are ready how full their volumes are; what keeps one from saying so is noted.
    pub async fn measure(&mut self, cluster: &Cluster) {
        let ready =
            self.nodes.iter().filter(|node| crate::diagnose::is_ready(node)).map(|node| node.name_any());
        let (usage, unreadable) = crate::usage::read(cluster, ready.collect::<Vec<_>>()).await;
        self.usage = usage;
        self.unreadable.extend(unreadable);
    }

    /// What the process's caches hold, and the events by a request: for a process that watches everything anyway.
    pub async fn cached(cluster: &Cluster) -> Self {
        // Whoever may not read events still sees what objects say.
        let events = list::<Event>(cluster, "").await.unwrap_or_default();
        Self {
            classes: cluster.cache().list().into_iter().collect(),
            attributes_classes: cluster.cache().list().into_iter().collect(),
            claims: cluster.cache().list().into_iter().collect(),
            volumes: cluster.cache().list().into_iter().collect(),
            pods: cluster.cache().list().into_iter().collect(),
            attachments: cluster.cache().list().into_iter().collect(),
            nodes: cluster.cache().list().into_iter().collect(),
            csi_nodes: cluster.cache().list().into_iter().collect(),
            drivers: cluster.cache().list().into_iter().collect(),
            capacities: cluster.cache().list().into_iter().collect(),
            snapshots: cluster.cache().list().into_iter().collect(),
            contents: cluster.cache().list().into_iter().collect(),
            snapshot_classes: cluster.cache().list().into_iter().collect(),
            events: events.into_iter().map(Arc::new).collect(),
            now: Timestamp::now(),
            patience: PATIENCE,
            ..Self::default()
        }
    }

    /// How long ago a time is.
    pub(crate) fn age(&self, time: Option<Timestamp>) -> Duration {
        let since = time.map_or(0, |time| self.now.as_millisecond() - time.as_millisecond());
        Duration::from_millis(u64::try_from(since).unwrap_or(0))
    }

    /// Whether an object has been there for so long that it should have got further.
    pub(crate) fn is_late(&self, object: &impl ResourceExt) -> bool {
        self.age(object.meta().creation_timestamp.as_ref().map(|time| time.0)) >= self.patience
    }

    /// Whether an object has been in deletion for so long that it should be gone.
    pub(crate) fn is_late_to_go(&self, object: &impl ResourceExt) -> bool {
        self.age(object.meta().deletion_timestamp.as_ref().map(|time| time.0)) >= self.patience
    }

    /// Whether a driver is registered on a node; `None` if that is not known.
    pub(crate) fn registered(&self, driver: &str, node: &str) -> Option<bool> {
        let found = self.csi_nodes.named(node);
        if found.is_none() && !self.csi_nodes.are_known() {
            return None;
        }
        Some(found.is_some_and(|node| node.spec.drivers.iter().any(|known| known.name == driver)))
    }

    /// Whether any driver is registered on a node.
    pub(crate) fn registered_any(&self, node: &str) -> bool {
        self.csi_nodes.named(node).is_some_and(|node| !node.spec.drivers.is_empty())
    }

    /// The nodes where a driver is registered.
    pub(crate) fn nodes_with(&self, driver: &str) -> Vec<&str> {
        let has = |node: &&Arc<CSINode>| node.spec.drivers.iter().any(|known| known.name == driver);
        self.csi_nodes.iter().filter(has).filter_map(|node| node.metadata.name.as_deref()).collect()
    }
}

async fn list<K: Kind>(cluster: &Cluster, namespace: &str) -> berth_kube::Result<Vec<K>> {
    cluster.fetch_all(namespace).await
}

/// What a list says: nothing of a kind that may not be read, and none of a kind that the cluster does not have.
fn known<K: Kind>(
    listed: berth_kube::Result<Vec<K>>,
    unreadable: &mut Vec<Unreadable>,
) -> berth_kube::Result<Objects<K>> {
    match listed {
        Ok(objects) => Ok(objects.into_iter().map(Arc::new).collect()),
        Err(error) if error.is_not_found() => Ok(Objects::default()),
        Err(error) if matches!(error.status(), Some(400..=499)) => {
            unreadable.push(Unreadable { kind: K::kind(&()).into_owned(), why: error.chain() });
            Ok(Objects::unknown())
        }
        Err(error) => Err(error),
    }
}
