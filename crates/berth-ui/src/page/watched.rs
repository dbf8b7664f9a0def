//! A cluster as the page sees it: one cache per kind that may be read, and what changed lately.

use std::sync::Arc;

use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};
use berth_kube::{Cache, Cluster, Kind};
use futures_util::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::changes::{self, Changes};
use crate::state::{ClusterState, Objects, PATIENCE, Unreadable};

macro_rules! caches {
    ($($field:ident: $kind:ty,)*) => {
        /// The caches of the kinds that may be read.
        pub(crate) struct Caches {
            $($field: Option<Cache<$kind>>,)*
            unreadable: Vec<Unreadable>,
        }

        impl Caches {
            /// Starts to watch every kind but those that may not be read.
            pub(crate) fn of(cluster: &Cluster, unreadable: Vec<Unreadable>) -> Self {
                Self {
                    $($field: may_read::<$kind>(&unreadable).then(|| cluster.cache()),)*
                    unreadable,
                }
            }

            /// Calls `changed` for every change from now on; what is there already counts as one.
            pub(crate) fn on_change(&self, changed: &Arc<Notify>) {
                $(if let Some(cache) = &self.$field {
                    let changed = changed.clone();
                    cache.subscribe(move |_, _| changed.notify_one());
                })*
            }

            /// Each kind, whether its first list is complete, and how many objects have come.
            pub(crate) fn progress(&self) -> Vec<(String, bool, usize)> {
                vec![$((
                    <$kind as kube::Resource>::plural(&()).into_owned(),
                    // Who has no snapshots waits for them for ever.
                    self.$field.as_ref().is_none_or(|cache| is_optional::<$kind>() || cache.synced().now_or_never().is_some()),
                    self.$field.as_ref().map_or(0, Cache::len),
                ),)*]
            }

            /// What all caches hold now.
            pub(crate) fn state(&self) -> ClusterState {
                ClusterState {
                    $($field: objects(self.$field.as_ref()),)*
                    unreadable: self.unreadable.clone(),
                    now: Timestamp::now(),
                    patience: PATIENCE,
                    ..ClusterState::default()
                }
            }
        }
    };
}

caches! {
    classes: StorageClass,
    attributes_classes: VolumeAttributesClass,
    claims: PersistentVolumeClaim,
    volumes: PersistentVolume,
    pods: Pod,
    attachments: VolumeAttachment,
    nodes: Node,
    csi_nodes: CSINode,
    drivers: CSIDriver,
    capacities: CSIStorageCapacity,
    snapshots: VolumeSnapshot,
    contents: VolumeSnapshotContent,
    snapshot_classes: VolumeSnapshotClass,
}

fn may_read<K: Kind>(unreadable: &[Unreadable]) -> bool {
    !unreadable.iter().any(|known| known.kind == K::kind(&()))
}

/// Kinds that a cluster may not have.
fn is_optional<K: Kind>() -> bool {
    K::group(&()) == "snapshot.storage.k8s.io" || K::kind(&()) == "VolumeAttributesClass"
}

fn objects<K: Kind>(cache: Option<&Cache<K>>) -> Objects<K> {
    cache.map_or_else(Objects::unknown, |cache| cache.list().into_iter().collect())
}

impl Caches {
    /// Whether every list is complete.
    pub(crate) fn are_synced(&self) -> bool {
        self.progress().iter().all(|(_, synced, _)| *synced)
    }
}

/// Notes what happens to claims, volumes, attachments and pods from now on, as far as these may be read.
pub(crate) fn note_changes(cluster: &Cluster, unreadable: &[Unreadable], noted: &Arc<Mutex<Changes>>) {
    note(cluster, unreadable, noted, changes::of_claim);
    note(cluster, unreadable, noted, changes::of_volume);
    note(cluster, unreadable, noted, changes::of_attachment);
    note(cluster, unreadable, noted, changes::of_pod);
}

fn note<K: Kind>(
    cluster: &Cluster,
    unreadable: &[Unreadable],
    noted: &Arc<Mutex<Changes>>,
    of: fn(Timestamp, Option<&K>, Option<&K>) -> Vec<changes::Change>,
) {
    if !may_read::<K>(unreadable) {
        return;
    }
    let cache = cluster.cache::<K>();
    let noted = noted.clone();
    cache.subscribe(move |before, after| {
        let now = Timestamp::now();
        if changes::is_news(now, before, after) {
            noted.lock().note(of(now, before.map(|object| &**object), after.map(|object| &**object)));
        }
    });
}

/// Events, which are watched only while somebody looks: there are many, and nobody else keeps them.
pub(crate) struct WatchedEvents {
    cache: Cache<Event>,
    until: CancellationToken,
}

impl WatchedEvents {
    pub(crate) fn begin(cluster: &Cluster, changed: &Arc<Notify>) -> Self {
        let until = cluster.shutdown().child_token();
        let cache = cluster.watch("", "", until.clone());
        let changed = changed.clone();
        cache.subscribe(move |_, _| changed.notify_one());
        Self { cache, until }
    }

    pub(crate) fn list(&self) -> Vec<Arc<Event>> {
        self.cache.list()
    }
}

impl Drop for WatchedEvents {
    fn drop(&mut self) {
        self.until.cancel();
    }
}
