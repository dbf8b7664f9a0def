//! Which size a volume is to grow to, and how that stands in the claim's status: pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimCondition, PersistentVolumeClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tonic::Code;

use super::Abilities;
use crate::size;

pub(super) const CONTROLLER_IN_PROGRESS: &str = "ControllerResizeInProgress";
pub(super) const CONTROLLER_INFEASIBLE: &str = "ControllerResizeInfeasible";
pub(super) const NODE_PENDING: &str = "NodeResizePending";
pub(super) const NODE_IN_PROGRESS: &str = "NodeResizeInProgress";
pub(super) const NODE_INFEASIBLE: &str = "NodeResizeInfeasible";
pub(super) const RESIZING: &str = "Resizing";
pub(super) const FS_RESIZE_PENDING: &str = "FileSystemResizePending";
pub(super) const CONTROLLER_ERROR: &str = "ControllerResizeError";
pub(super) const NODE_ERROR: &str = "NodeResizeError";
const STORAGE: &str = "storage";

/// How large a claim is, was, and wants to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sizes<'a> {
    /// What the claim asks for.
    pub(super) spec: i64,
    /// What the claim has, as its status says.
    pub(super) actual: i64,
    /// What its volume has.
    pub(super) volume: i64,
    /// What is being worked towards.
    pub(super) allocated: Option<i64>,
    /// How far that is.
    pub(super) status: &'a str,
    /// The filesystem has yet to grow.
    pub(super) pending: bool,
}

/// What a failed ControllerExpandVolume means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Trying the same again soon is useless.
    Infeasible,
    /// Refused; another size may be tried.
    Refused,
    /// Refused because the volume is in use.
    InUse,
    /// The driver may still be at it.
    Uncertain,
}

impl<'a> Sizes<'a> {
    pub(super) fn of(claim: &'a PersistentVolumeClaim, volume: &PersistentVolume) -> Option<Self> {
        let requests = claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?;
        let status = claim.status.as_ref()?;
        let capacity = volume.spec.as_ref()?.capacity.as_ref()?;
        Some(Self {
            spec: size::bytes(requests.get(STORAGE)?)?,
            actual: size::bytes(status.capacity.as_ref()?.get(STORAGE)?)?,
            volume: size::bytes(capacity.get(STORAGE)?)?,
            allocated: status.allocated_resources.as_ref().and_then(|sizes| size::bytes(sizes.get(STORAGE)?)),
            status: resize_status(claim),
            pending: has_condition(status, FS_RESIZE_PENDING),
        })
    }
}

/// The size to grow to; `None` if there is nothing to do for the controller.
pub(super) fn target(sizes: &Sizes<'_>, expand_refused: bool, abilities: Abilities) -> Option<i64> {
    if !(abilities.controller_expand || abilities.node_expand) || sizes.spec <= sizes.actual {
        return None;
    }
    let node_only = !abilities.controller_expand;
    let allocated = sizes.allocated.unwrap_or(sizes.spec);
    if sizes.volume < sizes.spec {
        return match sizes.status {
            NODE_PENDING | NODE_IN_PROGRESS | NODE_INFEASIBLE => {
                (sizes.volume < allocated).then_some(allocated)
            }
            CONTROLLER_IN_PROGRESS if !expand_refused => Some(allocated),
            _ => Some(sizes.spec),
        };
    }
    match sizes.status {
        NODE_PENDING | NODE_IN_PROGRESS => None,
        NODE_INFEASIBLE if node_only => Some(sizes.spec),
        NODE_INFEASIBLE | CONTROLLER_IN_PROGRESS | CONTROLLER_INFEASIBLE => Some(allocated),
        _ if sizes.pending => None,
        _ => Some(allocated),
    }
}

/// Whether a change of a claim may call for growth.
pub(super) fn matters(before: &PersistentVolumeClaim, after: &PersistentVolumeClaim) -> bool {
    let resources =
        |claim: &PersistentVolumeClaim| claim.spec.as_ref().and_then(|spec| spec.resources.clone());
    let of_status = |claim: &PersistentVolumeClaim| {
        let status = claim.status.as_ref();
        status.map(|status| (status.phase.clone(), status.capacity.clone()))
    };
    let resizer = |claim: &PersistentVolumeClaim| {
        claim
            .metadata
            .annotations
            .as_ref()
            .and_then(|all| all.get(berth_core::names::STORAGE_RESIZER).cloned())
    };
    // Of the steps only the node's are news: the controller's are our own writes.
    let by_node = |claim: &PersistentVolumeClaim| matches!(resize_status(claim), NODE_INFEASIBLE | "");
    resources(before) != resources(after)
        || of_status(before) != of_status(after)
        || resizer(before) != resizer(after)
        || (resize_status(before) != resize_status(after) && by_node(after))
}

/// What a code that ControllerExpandVolume was answered with means.
pub(super) fn verdict(code: Code) -> Verdict {
    match code {
        Code::InvalidArgument | Code::OutOfRange | Code::NotFound => Verdict::Infeasible,
        Code::FailedPrecondition => Verdict::InUse,
        code if berth_csi::code::is_final(code) => Verdict::Refused,
        _ => Verdict::Uncertain,
    }
}

/// How far the growth of a claim is; empty if none is under way.
pub(super) fn resize_status(claim: &PersistentVolumeClaim) -> &str {
    let statuses = claim.status.as_ref().and_then(|status| status.allocated_resource_statuses.as_ref());
    statuses.and_then(|statuses| statuses.get(STORAGE)).map_or("", String::as_str)
}

/// The driver is about to be asked for this size. What failed with another size is past.
pub(super) fn begun(status: &mut PersistentVolumeClaimStatus, bytes: i64) {
    let sizes = status.allocated_resources.get_or_insert_default();
    if sizes.get(STORAGE).and_then(size::bytes) != Some(bytes) {
        sizes.insert(STORAGE.to_owned(), size::quantity(bytes));
        clear_conditions(status, &[CONTROLLER_ERROR, NODE_ERROR]);
    }
    set_status(status, CONTROLLER_IN_PROGRESS);
    set_condition(status, RESIZING, None);
}

/// The driver has grown the volume; the node has yet to grow what is on it. Why that failed before stays until it has: otherwise
/// nobody would see it, as the node tries again at once.
pub(super) fn pending_on_node(status: &mut PersistentVolumeClaimStatus) {
    set_status(status, NODE_PENDING);
    clear_conditions(status, &[RESIZING, CONTROLLER_ERROR]);
    let text = "Waiting for user to (re-)start a pod to finish file system resize of volume on node.";
    set_condition(status, FS_RESIZE_PENDING, Some(text));
}

/// The volume has grown and nothing is left to do.
pub(super) fn finished(status: &mut PersistentVolumeClaimStatus, bytes: i64) {
    status.capacity.get_or_insert_default().insert(STORAGE.to_owned(), size::quantity(bytes));
    if let Some(statuses) = &mut status.allocated_resource_statuses {
        statuses.remove(STORAGE);
    }
    if status.allocated_resource_statuses.as_ref().is_some_and(BTreeMap::is_empty) {
        status.allocated_resource_statuses = None;
    }
    clear_conditions(status, &[RESIZING, CONTROLLER_ERROR, NODE_ERROR, FS_RESIZE_PENDING]);
}

/// The driver has refused.
pub(super) fn failed(status: &mut PersistentVolumeClaimStatus, infeasible: bool, message: &str) {
    if infeasible {
        set_status(status, CONTROLLER_INFEASIBLE);
    }
    set_condition(status, CONTROLLER_ERROR, Some(message));
}

fn set_status(status: &mut PersistentVolumeClaimStatus, value: &str) {
    status.allocated_resource_statuses.get_or_insert_default().insert(STORAGE.to_owned(), value.to_owned());
}

fn has_condition(status: &PersistentVolumeClaimStatus, kind: &str) -> bool {
    status.conditions.iter().flatten().any(|condition| condition.type_ == kind && condition.status == "True")
}

/// Sets a condition that is true; one that says the same already keeps its time.
pub(super) fn set_condition(status: &mut PersistentVolumeClaimStatus, kind: &str, message: Option<&str>) {
    set_condition_with(status, kind, None, message);
}

pub(super) fn set_condition_with(
    status: &mut PersistentVolumeClaimStatus,
    kind: &str,
    reason: Option<&str>,
    message: Option<&str>,
) {
    let conditions = status.conditions.get_or_insert_default();
    let known = conditions.iter_mut().find(|condition| condition.type_ == kind);
    let now = Some(Time(Timestamp::now()));
    let (reason, message) = (reason.map(ToOwned::to_owned), message.map(ToOwned::to_owned));
    match known {
        Some(known) if known.status == "True" && known.message == message && known.reason == reason => {}
        Some(known) => {
            if known.status != "True" {
                known.last_transition_time = now;
            }
            "True".clone_into(&mut known.status);
            (known.reason, known.message) = (reason, message);
        }
        None => conditions.push(PersistentVolumeClaimCondition {
            type_: kind.to_owned(),
            status: "True".to_owned(),
            last_transition_time: now,
            last_probe_time: None,
            reason,
            message,
        }),
    }
}

/// Removes conditions; others are left alone.
pub(super) fn clear_conditions(status: &mut PersistentVolumeClaimStatus, kinds: &[&str]) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| !kinds.contains(&condition.type_.as_str()));
        if conditions.is_empty() {
            status.conditions = None;
        }
    }
}

#[cfg(test)]
mod tests;
