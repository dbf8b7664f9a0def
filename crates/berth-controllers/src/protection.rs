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

use kube::ResourceExt as _;

use berth_kube::{Cluster, Failure, Kind, Result};

/// How many objects are looked at at a time.
const WORKERS: usize = 32;

/// Runs the three protections until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    tokio::join!(
        claims::run(cluster.named("pvc-protection-controller")),
        volumes::run(cluster.named("pv-protection-controller")),
        attribute_classes::run(cluster.named("vac-protection-controller")),
    );
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kube(#[from] berth_kube::Error),
    #[error("list the {what} that may use what was deleted")]
    List { what: &'static str, source: kube::Error },
}

impl Failure for Error {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Kube(error) if error.is_conflict())
    }

    fn describe(&self) -> String {
        match self {
            Self::Kube(error) => error.chain(),
            Self::List { source, .. } => format!("{self}: {source}"),
        }
    }
}

/// What an object's finalizer calls for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// It is not there and the object lives.
    Add,
    /// The object is deleted and waits for it: remove it once nothing uses the object.
    RemoveIfUnused,
    Nothing,
}

fn wanted(object: &impl kube::ResourceExt, finalizer: &str) -> Wanted {
    let has = object.finalizers().iter().any(|known| known == finalizer);
    match (object.meta().deletion_timestamp.is_some(), has) {
        (false, false) => Wanted::Add,
        (true, true) => Wanted::RemoveIfUnused,
        _ => Wanted::Nothing,
    }
}

async fn add<K: Kind>(cluster: &Cluster, object: &Arc<K>, finalizer: &str) -> Result<()> {
    let added =
        cluster.update(object.as_ref(), |object| object.finalizers_mut().push(finalizer.to_owned())).await;
    unless_gone(added)
}

async fn remove<K: Kind>(cluster: &Cluster, object: &Arc<K>, finalizer: &str) -> Result<()> {
    let removed = cluster
        .update(object.as_ref(), |object| object.finalizers_mut().retain(|known| known != finalizer))
        .await;
    unless_gone(removed)
}

fn unless_gone<T>(outcome: Result<T>) -> Result<()> {
    match outcome {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}
