//! What a claim needs: decided from the claim, its class and whether its volume is there.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use tonic::Code;

use crate::failure::is_final_for_provisioning;
use crate::names::{
    ALPHA_SELECTED_NODE, BETA_STORAGE_CLASS, BETA_STORAGE_PROVISIONER, MIGRATED_TO, SELECTED_NODE,
    STORAGE_PROVISIONER, creating,
};

/// What is to be done about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// Its volume is saved: take the mark away.
    Unmark,
    /// Make its volume.
    Provision,
    /// A volume may have been made that nobody wants any more: find it, delete it, take the mark away.
    Undo,
}

/// What a failed CreateVolume means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing was made and nothing is being made.
    Finished,
    /// As finished, and trying again soon is useless.
    Infeasible,
    /// The driver may still be at it: the same call must be repeated until there is a final answer.
    InBackground,
    /// There is no room at the selected node: the scheduler must choose another.
    Reschedule,
}

/// The name of a claim's class.
pub(super) fn class_of(claim: &PersistentVolumeClaim) -> Option<String> {
    let old = claim.annotations().get(BETA_STORAGE_CLASS).cloned();
    old.or_else(|| claim.spec.as_ref()?.storage_class_name.clone()).filter(|class| !class.is_empty())
}

/// The node that was selected for a claim's first consumer.
pub(super) fn selected_node(claim: &PersistentVolumeClaim) -> Option<&str> {
    let annotations = claim.annotations();
    let node = annotations.get(SELECTED_NODE).or_else(|| annotations.get(ALPHA_SELECTED_NODE));
    node.map(String::as_str).filter(|node| !node.is_empty())
}

/// Whether the class waits for a claim's first consumer.
pub(super) fn waits(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// Whether a claim says that a volume may be coming into being for it.
pub(super) fn is_marked(claim: &PersistentVolumeClaim, driver: &str) -> bool {
    let mark = creating(driver);
    claim.finalizers().contains(&mark)
}

/// What to do about a claim whose volume is, or would be, called `volume`; `saved` tells whether it exists.
pub(super) fn plan(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    driver: &str,
    volume: &str,
    saved: bool,
) -> Plan {
    let marked = is_marked(claim, driver);
    let bound_to = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if saved || bound_to == volume {
        return if marked { Plan::Unmark } else { Plan::Nothing };
    }
    let wanted = bound_to.is_empty()
        && claim.metadata.deletion_timestamp.is_none()
        && is_handed_to(claim, driver)
        && class.is_none_or(|class| {
            class.provisioner == driver && (!waits(class) || selected_node(claim).is_some())
        });
    match (wanted, marked) {
        (true, _) if class.is_some() => Plan::Provision,
        // The class is gone, so the question whether a volume was made cannot even be asked yet.
        (true, _) | (false, false) => Plan::Nothing,
        (false, true) => Plan::Undo,
    }
}

fn is_handed_to(claim: &PersistentVolumeClaim, driver: &str) -> bool {
    let annotations = claim.annotations();
    let provisioner =
        annotations.get(STORAGE_PROVISIONER).or_else(|| annotations.get(BETA_STORAGE_PROVISIONER));
    [provisioner, annotations.get(MIGRATED_TO)].into_iter().flatten().any(|named| named == driver)
}

/// What a code that CreateVolume was answered with means.
pub(super) fn verdict(code: Code, topology: bool, selected: bool) -> Verdict {
    match code {
        Code::ResourceExhausted if topology && selected => Verdict::Reschedule,
        Code::InvalidArgument => Verdict::Infeasible,
        code if is_final_for_provisioning(code) => Verdict::Finished,
        _ => Verdict::InBackground,
    }
}

#[cfg(test)]
mod tests;
