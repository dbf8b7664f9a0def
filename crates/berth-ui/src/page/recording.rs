//! What `berth up --record DIR` kept, read back: the objects as they were at the end, and everything that changed before.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use berth_kube::Kind;
use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::changes::{self, Change, Changes};
use crate::records::{CALLS, CallRecord, OBJECTS, STEPS, Step, read_lines};
use crate::state::{ClusterState, Objects, PATIENCE};

/// What a recording holds, read into memory.
#[derive(Debug)]
pub struct Recording {
    pub(super) state: ClusterState,
    pub(super) changes: Changes,
    /// How many revisions of objects it holds.
    pub revisions: usize,
    /// How many steps it holds.
    pub steps: usize,
    /// How many calls it holds.
    pub calls: usize,
}

/// One revision of an object, as `berth up --record` writes it.
#[derive(Deserialize)]
struct Revision {
    time: Timestamp,
    #[serde(rename = "type")]
    change: String,
    kind: String,
    key: String,
    object: Box<RawValue>,
}

/// What the newest revisions of a kind's objects are.
type Latest<K> = BTreeMap<String, Arc<K>>;

macro_rules! known {
    ($($field:ident: $kind:ident,)*) => {
        #[derive(Default)]
        struct Newest {
            $($field: Latest<$kind>,)*
        }

        impl Newest {
            /// Takes in a revision; gives what it changed.
            fn take(&mut self, revision: &Revision) -> Vec<Change> {
                match revision.kind.as_str() {
                    $(stringify!($kind) => replace(&mut self.$field, revision, Changed::of),)*
                    _ => Vec::new(),
                }
            }
        }
    };
}

known! {
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
    events: Event,
}

/// Kinds whose changes are part of a flow tell what changed; the others nothing.
trait Changed: Sized {
    fn of(_: Timestamp, _: Option<&Self>, _: Option<&Self>) -> Vec<Change> {
        Vec::new()
    }
}

macro_rules! silent {
    ($($kind:ident),*) => { $(impl Changed for $kind {})* };
}

silent!(
    StorageClass,
    VolumeAttributesClass,
    Node,
    CSINode,
    CSIDriver,
    CSIStorageCapacity,
    VolumeSnapshot,
    VolumeSnapshotContent,
    VolumeSnapshotClass,
    Event
);

macro_rules! telling {
    ($($kind:ident: $describe:path),*) => {
        $(impl Changed for $kind {
            fn of(now: Timestamp, before: Option<&Self>, after: Option<&Self>) -> Vec<Change> {
                $describe(now, before, after)
            }
        })*
    };
}

telling!(
    PersistentVolumeClaim: changes::of_claim,
    PersistentVolume: changes::of_volume,
    VolumeAttachment: changes::of_attachment,
    Pod: changes::of_pod
);

fn replace<K: Kind>(
    known: &mut Latest<K>,
    revision: &Revision,
    describe: fn(Timestamp, Option<&K>, Option<&K>) -> Vec<Change>,
) -> Vec<Change> {
    let Ok(object) = K::decode(revision.object.get().as_bytes()) else { return Vec::new() };
    let before = known.get(&revision.key).cloned();
    if revision.change == "DELETED" {
        known.remove(&revision.key);
        return describe(revision.time, before.as_deref(), None);
    }
    let changes = describe(revision.time, before.as_deref(), Some(&object));
    // What was there when the recording began is no news.
    let made = object.meta().creation_timestamp.as_ref();
    let is_news =
        before.is_some() || made.is_none_or(|made| revision.time.as_second() - made.0.as_second() < 10);
    known.insert(revision.key.clone(), Arc::new(object));
    if is_news { changes } else { Vec::new() }
}

impl Recording {
    /// Reads the recording in a directory. An error means that there is none.
    pub fn read(directory: &Path) -> std::io::Result<Self> {
        // Whoever names the wrong directory is to know which file is missing.
        std::fs::metadata(directory.join(OBJECTS))?;
        let mut newest = Newest::default();
        let mut noted = Changes::default();
        let (mut revisions, mut last) = (0, Timestamp::default());
        for revision in read_lines::<Revision>(directory.join(OBJECTS)) {
            revisions += 1;
            last = last.max(revision.time);
            noted.note(newest.take(&revision));
        }
        let steps =
            read_lines::<Step>(directory.join(STEPS)).inspect(|step| last = last.max(step.time)).count();
        let calls = read_lines::<CallRecord>(directory.join(CALLS)).count();
        let state = ClusterState {
            classes: objects(newest.classes),
            attributes_classes: objects(newest.attributes_classes),
            claims: objects(newest.claims),
            volumes: objects(newest.volumes),
            pods: objects(newest.pods),
            attachments: objects(newest.attachments),
            nodes: objects(newest.nodes),
            csi_nodes: objects(newest.csi_nodes),
            drivers: objects(newest.drivers),
            capacities: objects(newest.capacities),
            snapshots: objects(newest.snapshots),
            contents: objects(newest.contents),
            snapshot_classes: objects(newest.snapshot_classes),
            events: newest.events.into_values().collect(),
            now: last,
            patience: PATIENCE,
            ..ClusterState::default()
        };
        Ok(Self { state, changes: noted, revisions, steps, calls })
    }
}

fn objects<K: Kind>(known: Latest<K>) -> Objects<K> {
    known.into_values().collect()
}
