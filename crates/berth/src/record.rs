//! `berth up --record DIR`: keeps what happens, so that a bug report can carry it: CSI calls, steps, and every revision of the objects of storage.
//!
//! Secrets are in none of it: calls are kept without them, and Secrets and ConfigMaps are not among the kinds.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};
use berth_kube::{Cluster, Key, Kind};
use berth_ui::records::OBJECTS;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use parking_lot::Mutex;
use serde::Serialize;

use crate::timeline::LineFile;

/// One revision of an object.
#[derive(Serialize)]
struct Revision<'a, K> {
    time: Timestamp,
    /// `ADDED`, `MODIFIED` or `DELETED`, as watches say it.
    #[serde(rename = "type")]
    change: &'static str,
    kind: &'a str,
    key: String,
    object: &'a K,
}

/// Keeps every revision of the objects of storage in a directory, until the cluster's shutdown.
pub(crate) fn keep_objects(cluster: &Cluster, directory: &Path) -> anyhow::Result<()> {
    let path = directory.join(OBJECTS);
    let file = LineFile::endless(path.clone()).with_context(|| format!("open {}", path.display()))?;
    let file = Arc::new(Mutex::new(file));
    keep::<StorageClass>(cluster, &file);
    keep::<VolumeAttributesClass>(cluster, &file);
    keep::<PersistentVolumeClaim>(cluster, &file);
    keep::<PersistentVolume>(cluster, &file);
    keep::<Pod>(cluster, &file);
    keep::<VolumeAttachment>(cluster, &file);
    keep::<Node>(cluster, &file);
    keep::<CSINode>(cluster, &file);
    keep::<CSIDriver>(cluster, &file);
    keep::<CSIStorageCapacity>(cluster, &file);
    keep::<VolumeSnapshot>(cluster, &file);
    keep::<VolumeSnapshotContent>(cluster, &file);
    keep::<VolumeSnapshotClass>(cluster, &file);
    keep::<Event>(cluster, &file);
    Ok(())
}

fn keep<K: Kind>(cluster: &Cluster, file: &Arc<Mutex<LineFile>>) {
    let file = file.clone();
    cluster.cache::<K>().subscribe(move |before, after| {
        let (change, object) = match (before, after) {
            (None, Some(object)) => ("ADDED", object),
            (Some(_), Some(object)) => ("MODIFIED", object),
            (Some(object), None) => ("DELETED", object),
            (None, None) => return,
        };
        let kind = K::kind(&());
        let key = Key::of(object.as_ref()).to_string();
        let revision = Revision { time: Timestamp::now(), change, kind: &kind, key, object: object.as_ref() };
        if let Err(error) = file.lock().write(&revision) {
            tracing::warn!(%error, "a revision is missing in the recording");
        }
    });
}
