//! What a volume needs whose claim is gone: decided from the volume and its attachments.

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt as _;

use crate::names::{PROVISIONED_BY, PROVISIONER_FINALIZER};

/// What is to be done about a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// It must not go before its storage is deleted.
    Protect,
    /// Its storage outlives it.
    Unprotect,
    /// Delete its storage, then itself.
    Delete,
    /// It would be deleted, but is still attached, or being detached.
    Attached,
}

/// What to do about a volume that is attached or not; `reached` tells whether it is for this provisioner to delete.
pub(super) fn plan(volume: &PersistentVolume, driver: &str, reached: bool, attached: bool) -> Plan {
    let Some(spec) = &volume.spec else { return Plan::Nothing };
    // Whoever made it says whose it is; of one that a person made, its driver.
    let whose = volume.annotations().get(PROVISIONED_BY).or_else(|| spec.csi.as_ref().map(|csi| &csi.driver));
    if whose.is_none_or(|whose| whose != driver) {
        return Plan::Nothing;
    }
    let protected = volume.finalizers().iter().any(|finalizer| finalizer == PROVISIONER_FINALIZER);
    let deleting = volume.metadata.deletion_timestamp.is_some();
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    if spec.persistent_volume_reclaim_policy.as_deref() != Some("Delete") {
        return if protected { Plan::Unprotect } else { Plan::Nothing };
    }
    match phase {
        _ if !reached => Plan::Nothing,
        "Bound" if !deleting && !protected => Plan::Protect,
        "Released" if protected || !deleting => {
            if attached {
                Plan::Attached
            } else {
                Plan::Delete
            }
        }
        _ => Plan::Nothing,
    }
}

#[cfg(test)]
mod tests;
