//! Protection of what is in use: claims that pods use, volumes that are bound, attribute classes that something names.
//!
//! Reads: PersistentVolumeClaim, PersistentVolume, VolumeAttributesClass, Pod. Writes: the finalizers
//! `kubernetes.io/pvc-protection`, `kubernetes.io/pv-protection` and `kubernetes.io/vac-protection`. No events.
//!
//! Each object gets its finalizer when it is seen without, and loses it when it is deleted and nothing uses it.

mod attribute_classes;
mod claims;
#[cfg(test)]
mod tests;
mod volumes;

use std::sync::Arc;

use berth_kube::{Cluster, Kind, Result, finalizers};

/// How many objects are reconciled at a time.
const WORKERS: usize = 32;

/// Runs the three protections until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    tokio::join!(
        claims::run(cluster.named("pvc-protection-controller")),
        volumes::run(cluster.named("pv-protection-controller")),
        attribute_classes::run(cluster.named("vac-protection-controller")),
    );
}

/// What an object's finalizer calls for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FinalizerChange {
    /// It is not there and the object lives.
    Add,
    /// The object is deleted and waits for it: remove it once nothing uses the object.
    RemoveIfUnused,
    Nothing,
}

fn finalizer_change(object: &impl kube::ResourceExt, finalizer: &str) -> FinalizerChange {
    match (object.meta().deletion_timestamp.is_some(), finalizers::has(object, finalizer)) {
        (false, false) => FinalizerChange::Add,
        (true, true) => FinalizerChange::RemoveIfUnused,
        _ => FinalizerChange::Nothing,
    }
}

/// Makes the change that was decided on if the object is as it was, and still is at all.
async fn write<K: Kind>(cluster: &Cluster, object: &Arc<K>, change: impl FnOnce(&mut K)) -> Result<()> {
    match cluster.update(object.as_ref(), change).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}
