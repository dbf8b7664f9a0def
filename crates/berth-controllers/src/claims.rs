//! How pods, claims, volumes and classes point at each other.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use kube::ResourceExt as _;

use berth_kube::Key;

/// On a claim: the binding is finished.
pub(crate) const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// On a volume or a claim: a controller made the binding, not a person.
pub(crate) const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// On a claim: the node the scheduler chose for it.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// The class of a claim or a volume in the old days; still stronger than the field.
pub(crate) const CLASS: &str = "volume.beta.kubernetes.io/storage-class";

/// One volume of a pod that is a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimOfPod {
    pub(crate) key: Key,
    /// Made for this pod alone, from a template in it.
    pub(crate) ephemeral: bool,
}

/// The claims a pod's volumes name, in order.
pub(crate) fn of_pod(pod: &Pod) -> Vec<ClaimOfPod> {
    let namespace = pod.namespace().unwrap_or_default();
    volumes(pod)
        .iter()
        .filter_map(|volume| {
            let (name, ephemeral) = if let Some(claim) = &volume.persistent_volume_claim {
                (claim.claim_name.clone(), false)
            } else if volume.ephemeral.is_some() {
                (format!("{}-{}", pod.name_any(), volume.name), true)
            } else {
                return None;
            };
            Some(ClaimOfPod { key: Key::new(namespace.clone(), name), ephemeral })
        })
        .collect()
}

/// A pod's volumes.
pub(crate) fn volumes(pod: &Pod) -> &[Volume] {
    pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default()
}

/// Whether a claim for an ephemeral volume is really the pod's.
pub(crate) fn owned_by(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    claim
        .owner_references()
        .iter()
        .any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// The class a claim asks for; empty for none.
pub(crate) fn class(claim: &PersistentVolumeClaim) -> &str {
    let field = || claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    claim.annotations().get(CLASS).map(String::as_str).or_else(field).unwrap_or_default()
}

/// The class a volume belongs to; empty for none.
pub(crate) fn volume_class(volume: &PersistentVolume) -> &str {
    let field = || volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    volume.annotations().get(CLASS).map(String::as_str).or_else(field).unwrap_or_default()
}

/// The volume a claim names; empty for none.
pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

/// Whether a claim is bound, and the binding finished.
pub(crate) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    !volume_name(claim).is_empty() && claim.annotations().contains_key(BIND_COMPLETED)
}

/// The bytes a claim asks for.
pub(crate) fn requested(claim: &PersistentVolumeClaim) -> i128 {
    let requests = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    crate::amount::storage(requests).unwrap_or(0)
}

/// The bytes a volume has.
pub(crate) fn capacity(volume: &PersistentVolume) -> i128 {
    crate::amount::storage(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref())).unwrap_or(0)
}

/// Whether a volume is reserved for this claim: by name, and by uid if it says one.
pub(crate) fn refers_to(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()).is_some_and(|reference| {
        reference.name == claim.metadata.name
            && reference.namespace == claim.metadata.namespace
            && reference
                .uid
                .as_ref()
                .is_none_or(|uid| uid.is_empty() || Some(uid) == claim.metadata.uid.as_ref())
    })
}

/// What a pod's node is: empty before it is scheduled.
pub(crate) fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

/// A pod's phase.
pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Whether a pod ran to its end, well or not.
pub(crate) fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}
