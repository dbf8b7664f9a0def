//! Which attributes a volume is to have, and how that stands in the claim's status: pure.

use k8s_openapi::api::core::v1::{ModifyVolumeStatus, PersistentVolumeClaim, PersistentVolumeClaimStatus};
use tonic::Code;

use super::expand::{clear_conditions, set_condition, set_condition_with};

pub(super) const PENDING: &str = "Pending";
pub(super) const IN_PROGRESS: &str = "InProgress";
pub(super) const INFEASIBLE: &str = "Infeasible";
const MODIFYING: &str = "ModifyingVolume";
const ERROR: &str = "ModifyVolumeError";

/// What is to be done about a claim's attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// Give the volume the attributes of this class.
    Apply(String),
    /// The claim no longer asks for a change that has not begun: forget it.
    Cancel,
}

/// What a failed ControllerModifyVolume means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Trying the same again soon is useless.
    Infeasible,
    /// Refused; another class may be tried.
    Refused,
    /// The driver may still be at it: the target must stay.
    Uncertain,
}

/// What to do about a claim; `refused` if the last call was finally refused.
pub(super) fn plan(claim: &PersistentVolumeClaim, refused: bool) -> Plan {
    let Some(status) = claim.status.as_ref().filter(|status| status.phase.as_deref() == Some("Bound")) else {
        return Plan::Nothing;
    };
    let wanted =
        claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref()).unwrap_or_default();
    let current = status.current_volume_attributes_class_name.as_deref().unwrap_or_default();
    let under_way = status.modify_volume_status.as_ref();
    match under_way.map(|status| status.status.as_str()) {
        // The driver may be at it: nothing else may be asked for before it has answered.
        Some(IN_PROGRESS) if !refused => {
            let target = under_way.and_then(|status| status.target_volume_attributes_class_name.clone());
            target.filter(|target| !target.is_empty()).map_or(Plan::Nothing, Plan::Apply)
        }
        Some(_) if wanted.is_empty() || wanted == current => Plan::Cancel,
        None if wanted.is_empty() || wanted == current => Plan::Nothing,
        _ => Plan::Apply(wanted.to_owned()),
    }
}

/// The classes that a claim waits for.
pub(super) fn classes_of(claim: &PersistentVolumeClaim) -> Vec<String> {
    let wanted = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.clone());
    let target = claim
        .status
        .as_ref()
        .and_then(|status| status.modify_volume_status.as_ref()?.target_volume_attributes_class_name.clone());
    let mut classes: Vec<String> =
        [wanted, target].into_iter().flatten().filter(|class| !class.is_empty()).collect();
    classes.dedup();
    classes
}

/// Whether a change of a claim may call for other attributes.
pub(super) fn matters(before: &PersistentVolumeClaim, after: &PersistentVolumeClaim) -> bool {
    let wanted = |claim: &PersistentVolumeClaim| {
        claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.clone())
    };
    let current = |claim: &PersistentVolumeClaim| {
        claim.status.as_ref().and_then(|status| status.current_volume_attributes_class_name.clone())
    };
    wanted(before) != wanted(after) || current(before) != current(after)
}

/// What a code that ControllerModifyVolume was answered with means.
pub(super) fn verdict(code: Code) -> Verdict {
    match code {
        Code::InvalidArgument => Verdict::Infeasible,
        code if berth_csi::code::is_final(code) => Verdict::Refused,
        _ => Verdict::Uncertain,
    }
}

/// Says how far a change is.
pub(super) fn set(status: &mut PersistentVolumeClaimStatus, step: &str, target: &str) {
    status.modify_volume_status = Some(ModifyVolumeStatus {
        status: step.to_owned(),
        target_volume_attributes_class_name: Some(target.to_owned()),
    });
    if step == IN_PROGRESS {
        let text = "ModifyVolume operation in progress.";
        set_condition(status, MODIFYING, Some(text));
    }
}

/// The driver has refused.
pub(super) fn failed(status: &mut PersistentVolumeClaimStatus, infeasible: bool, code: &str, message: &str) {
    if infeasible && let Some(known) = &mut status.modify_volume_status {
        INFEASIBLE.clone_into(&mut known.status);
    }
    clear_conditions(status, &[MODIFYING]);
    set_condition_with(status, ERROR, Some(code), Some(message));
}

/// The volume has the attributes.
pub(super) fn finished(status: &mut PersistentVolumeClaimStatus, class: &str) {
    status.current_volume_attributes_class_name = Some(class.to_owned());
    cancelled(status);
}

/// No change is under way.
pub(super) fn cancelled(status: &mut PersistentVolumeClaimStatus) {
    status.modify_volume_status = None;
    clear_conditions(status, &[MODIFYING, ERROR]);
}

#[cfg(test)]
mod tests;
