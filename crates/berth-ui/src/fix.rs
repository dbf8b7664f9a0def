//! Does what a finding says is safe, after it has looked again.

use berth_kube::{Cluster, Key, Kind};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, VolumeAttachment};
use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};

use crate::diagnose;
use crate::finding::{Finding, Fix};
use crate::state::ClusterState;

/// What became of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was done, as this sentence says.
    Done(String),
    /// The object has changed since, and the finding does not hold any more.
    NotNeeded,
}

/// Repairs what a finding is about, if the finding has a [`Fix`]: reads the cluster anew, and acts only if the same finding comes
/// out again, on exactly the version of the object that was judged.
pub async fn apply(
    cluster: &Cluster,
    finding: &Finding,
    patience: std::time::Duration,
) -> berth_kube::Result<Option<Outcome>> {
    let Some(fix) = &finding.fix else { return Ok(None) };
    let state = ClusterState { patience, ..ClusterState::read(cluster, None).await? };
    let again = |known: &Finding| {
        known.object == finding.object && known.trouble == finding.trouble && known.fix.as_ref() == Some(fix)
    };
    if !diagnose(&state).iter().any(again) {
        return Ok(Some(Outcome::NotNeeded));
    }
    let key = Key::new(finding.object.namespace.clone(), finding.object.name.clone());
    let done = match finding.object.kind.as_str() {
        "PersistentVolumeClaim" => {
            let claim = state.claims.get(&key).map(|claim| &**claim);
            act::<PersistentVolumeClaim>(cluster, claim, fix).await
        }
        "PersistentVolume" => {
            let volume = state.volumes.get(&key).map(|volume| &**volume);
            act::<PersistentVolume>(cluster, volume, fix).await
        }
        "VolumeAttachment" => {
            let attachment = state.attachments.get(&key).map(|attachment| &**attachment);
            act::<VolumeAttachment>(cluster, attachment, fix).await
        }
        "CSIStorageCapacity" => {
            let capacity = state.capacities.get(&key).map(|capacity| &**capacity);
            act::<CSIStorageCapacity>(cluster, capacity, fix).await
        }
        _ => return Ok(None),
    };
    match done {
        // Somebody else was quicker: what was judged is not what is there.
        Err(error) if error.is_conflict() || error.is_not_found() => Ok(Some(Outcome::NotNeeded)),
        Err(error) => Err(error),
        Ok(None) => Ok(Some(Outcome::NotNeeded)),
        Ok(Some(what)) => Ok(Some(Outcome::Done(format!("{what} {}", finding.object)))),
    }
}

/// Changes exactly the version of the object that was read; says what it did.
async fn act<K: Kind>(
    cluster: &Cluster,
    object: Option<&K>,
    fix: &Fix,
) -> berth_kube::Result<Option<String>> {
    let Some(object) = object else { return Ok(None) };
    match fix {
        Fix::RemoveFinalizer { finalizer } => {
            cluster
                .update(object, |object| object.finalizers_mut().retain(|known| known != finalizer))
                .await?;
            Ok(Some(format!("removed the finalizer {finalizer} of")))
        }
        Fix::Delete => {
            let preconditions =
                Preconditions { uid: object.uid(), resource_version: object.resource_version() };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            cluster.delete_with(object, &parameters).await?;
            Ok(Some("deleted".to_owned()))
        }
    }
}
