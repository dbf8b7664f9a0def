//! Claims are kept while snapshots of them are being taken.

use berth_kube::finalizers;
use berth_kube::{Key, Next};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt as _;

use super::{Controller, status};
use crate::failure::Failure;
use crate::snapshots::names;

/// The snapshots that a claim is being restored from: those it names, until it has a volume.
pub(super) fn restored_from(claim: &PersistentVolumeClaim) -> Vec<Key> {
    let pending = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let Some(spec) = claim.spec.as_ref().filter(|_| pending == "Pending") else { return Vec::new() };
    let own = claim.namespace().unwrap_or_default();
    let mut sources = Vec::new();
    if let Some(from) = &spec.data_source {
        sources.push((from.api_group.clone(), from.kind.clone(), Key::new(own.clone(), from.name.clone())));
    }
    if let Some(from) = &spec.data_source_ref {
        let namespace = from.namespace.clone().filter(|namespace| !namespace.is_empty()).unwrap_or(own);
        sources.push((from.api_group.clone(), from.kind.clone(), Key::new(namespace, from.name.clone())));
    }
    let mut keys: Vec<Key> = sources
        .into_iter()
        .filter(|(group, kind, _)| group.as_deref() == Some(names::GROUP) && kind == "VolumeSnapshot")
        .map(|(_, _, key)| key)
        .collect();
    keys.dedup();
    keys
}

impl Controller {
    /// Lets a claim go that no snapshot is being taken of any more.
    pub(super) async fn sync_claim(&self, key: &Key) -> Result<Next, Failure> {
        let Some(claim) = self.claims.get(key) else { return Ok(Next::Done) };
        let needed = self.by_claim.get(key).iter().any(|snapshot| !status::is_ready(snapshot));
        if needed || !finalizers::has(claim.as_ref(), names::CLAIM) {
            return Ok(Next::Done);
        }
        self.cluster.edit(claim.as_ref(), |claim| finalizers::remove(claim, names::CLAIM)).await?;
        Ok(Next::Done)
    }
}

#[cfg(test)]
mod tests;
