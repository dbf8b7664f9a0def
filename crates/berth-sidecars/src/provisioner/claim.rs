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
    /// No node is selected for it: try to have this one selected.
    Select,
    /// A volume may have been made that nobody wants any more: find it, delete it, take the mark away.
    Undo,
}

/// Who decides: a driver's provisioner for all nodes, or that of one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Who<'a> {
    /// The driver.
    pub(super) driver: &'a str,
    /// Its finalizer on claims.
    pub(super) mark: &'a str,
    /// The one node, and whether it takes claims that no node is selected for.
    pub(super) node: Option<(&'a str, bool)>,
}

/// Whose turn it is to make a claim's volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Ours,
    /// Whose node is selected first.
    Anybodys,
    NotOurs,
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

/// Whether a claim says that a volume may be coming into being for it, by anybody's mark.
pub(super) fn is_begun(claim: &PersistentVolumeClaim) -> bool {
    let prefix = creating("");
    claim.finalizers().iter().any(|finalizer| finalizer.starts_with(&prefix))
}

/// What to do about a claim whose volume is, or would be, called `volume`; `saved` tells whether it exists.
pub(super) fn plan(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    who: Who<'_>,
    volume: &str,
    saved: bool,
) -> Plan {
    let marked = claim.finalizers().iter().any(|finalizer| finalizer == who.mark);
    let bound_to = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if saved || bound_to == volume {
        return if marked { Plan::Unmark } else { Plan::Nothing };
    }
    let wanted = bound_to.is_empty()
        && claim.metadata.deletion_timestamp.is_none()
        && is_handed_to(claim, who.driver)
        && class.is_none_or(|class| class.provisioner == who.driver);
    let turn = if wanted { turn(claim, class, who) } else { Turn::NotOurs };
    match (turn, marked) {
        (Turn::Ours, _) if class.is_some() => Plan::Provision,
        // The class is gone, so the question whether a volume was made cannot even be asked yet.
        (Turn::Ours, _) | (Turn::NotOurs, false) => Plan::Nothing,
        (Turn::Anybodys, false) => Plan::Select,
        (Turn::Anybodys | Turn::NotOurs, true) => Plan::Undo,
    }
}

fn turn(claim: &PersistentVolumeClaim, class: Option<&StorageClass>, who: Who<'_>) -> Turn {
    match (who.node, selected_node(claim), class.map(waits)) {
        (Some((node, _)), Some(selected), _) if node != selected => Turn::NotOurs,
        (_, Some(_), _) | (_, None, None) | (None, None, Some(false)) => Turn::Ours,
        (Some((_, true)), None, Some(false)) => Turn::Anybodys,
        (Some((_, false)), None, Some(false)) | (_, None, Some(true)) => Turn::NotOurs,
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
