//! What a VolumeGroupSnapshot needs: decided from it, its content and its members.

use berth_core::names::events;
use berth_kube::finalizers;
use kube::ResourceExt as _;

use crate::snapshot_controller::binding::{self, GroupStep};
use crate::snapshot_controller::status;
use crate::snapshots::{VolumeGroupSnapshot, VolumeGroupSnapshotContent, VolumeGroupSnapshotStatus, names};

/// What is done about a group.
pub(super) type Step = binding::Step<VolumeGroupSnapshotStatus>;

/// What is known of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservedGroup<'a> {
    pub(super) group: &'a VolumeGroupSnapshot,
    pub(super) content: Option<&'a VolumeGroupSnapshotContent>,
    /// A member that a claim waits to be restored from.
    pub(super) restoring: Option<&'a str>,
    /// Some members are not being deleted yet.
    pub(super) has_members: bool,
}

/// The content that a group is bound to, or would be.
pub(super) fn content_name(group: &VolumeGroupSnapshot) -> String {
    let bound = group.status.as_ref();
    let bound = bound.and_then(|status| status.bound_volume_group_snapshot_content_name.clone());
    bound
        .or_else(|| group.spec.source.volume_group_snapshot_content_name.clone())
        .unwrap_or_else(|| names::group_content(&group.uid().unwrap_or_default()))
}

/// What to do about a group.
pub(super) fn plan(observed: &ObservedGroup<'_>) -> Vec<Step> {
    let group = observed.group;
    if group.metadata.deletion_timestamp.is_some() {
        return deleting(observed);
    }
    let source = &group.spec.source;
    if source.selector.is_some() == source.volume_group_snapshot_content_name.is_some() {
        let text = "Exactly one of Selector and VolumeGroupSnapshotContentName should be specified";
        return vec![Step::Fail(events::GROUP_SNAPSHOT_VALIDATION_ERROR, text.to_owned())];
    }
    let bound = group.status.as_ref().is_some_and(|status| {
        status.bound_volume_group_snapshot_content_name.is_some() && status.ready_to_use == Some(true)
    });
    let Some(content) = observed.content else {
        let given = source.volume_group_snapshot_content_name.is_some();
        if bound || given {
            let text = "VolumeGroupSnapshotContent is missing";
            return vec![Step::Fail(events::GROUP_SNAPSHOT_CONTENT_MISSING, text.to_owned())];
        }
        // Kept before there is a content: a group that went in between would leave the content behind for ever.
        let protect =
            (!finalizers::has(group, names::GROUP_BOUND)).then(|| Step::Protect(vec![names::GROUP_BOUND]));
        return protect.into_iter().chain([Step::Create]).collect();
    };
    if bound && !belongs(content, group) {
        let text = "VolumeGroupSnapshotContent is not bound to the VolumeGroupSnapshot correctly";
        return vec![Step::Fail(events::GROUP_SNAPSHOT_MISBOUND, text.to_owned())];
    }
    if let Some((reason, message)) = mismatch(group, content) {
        return vec![Step::Fail(reason, message)];
    }
    let mut steps = Vec::new();
    if !finalizers::has(group, names::GROUP_BOUND) {
        steps.push(Step::Protect(vec![names::GROUP_BOUND]));
    }
    if !bound {
        steps.extend(unready(group, content));
    }
    steps
}

fn unready(group: &VolumeGroupSnapshot, content: &VolumeGroupSnapshotContent) -> Vec<Step> {
    let given = group.spec.source.volume_group_snapshot_content_name.is_some();
    let mut steps = Vec::new();
    let back = &content.spec.volume_group_snapshot_ref;
    let classless = content.spec.volume_group_snapshot_class_name.is_none()
        && group.spec.volume_group_snapshot_class_name.is_some();
    if given && (back.uid.as_deref().unwrap_or_default().is_empty() || classless) {
        steps.push(Step::Bind);
    }
    let said = content.status.as_ref().filter(|status| status.volume_group_snapshot_handle.is_some());
    let listed = said.and_then(|status| status.volume_snapshot_info_list.as_ref());
    if !given && listed.is_some_and(|members| !members.is_empty()) {
        steps.push(Step::Group(GroupStep::Members));
    }
    let before = group.status.as_ref();
    let after = status::of_group(before, &content.name_any(), content);
    if before != Some(&after) {
        steps.push(Step::Status(after));
    }
    steps
}

fn deleting(observed: &ObservedGroup<'_>) -> Vec<Step> {
    let group = observed.group;
    if !finalizers::has(group, names::GROUP_BOUND) {
        return Vec::new();
    }
    if let Some(member) = observed.restoring {
        let namespace = group.namespace().unwrap_or_default();
        return vec![Step::Pending(format!(
            "Snapshot {namespace}/{member} belonging to VolumeGroupSnapshot {namespace}/{} is being used to restore a PVC",
            group.name_any()
        ))];
    }
    let content = observed.content.filter(|content| belongs(content, group));
    let mut steps = Vec::new();
    let mut kept = false;
    if let Some(content) = content {
        if !content.annotations().contains_key(names::GROUP_BEING_DELETED) {
            steps.push(Step::MarkContent);
        }
        kept = content.spec.deletion_policy == names::DELETE;
        if kept && content.metadata.deletion_timestamp.is_none() {
            steps.push(Step::DeleteContent);
        }
    }
    if observed.has_members {
        steps.push(Step::Group(GroupStep::DeleteMembers));
    }
    if !kept {
        steps.push(Step::Release(vec![names::GROUP_BOUND]));
    }
    steps
}

/// Whether a content belongs to this very group.
fn belongs(content: &VolumeGroupSnapshotContent, group: &VolumeGroupSnapshot) -> bool {
    let back = &content.spec.volume_group_snapshot_ref;
    back.name == group.metadata.name
        && back.namespace == group.metadata.namespace
        && back.uid == group.metadata.uid
}

/// Why a content is not the one that a group needs.
fn mismatch(
    group: &VolumeGroupSnapshot,
    content: &VolumeGroupSnapshotContent,
) -> Option<(&'static str, String)> {
    let name = content.name_any();
    let given = group.spec.source.volume_group_snapshot_content_name.is_some();
    let exists = content.spec.source.group_snapshot_handles.is_some();
    if given && !exists {
        let text =
            "VolumeGroupSnapshotContent is dynamically provisioned while expecting a pre-provisioned one";
        return Some(("GroupSnapshotContentMismatch", text.to_owned()));
    }
    if !given && exists {
        return Some((
            "GroupSnapshotContentMismatch",
            format!(
                "VolumeGroupSnapshotContent {name} is pre-provisioned while expecting a dynamically provisioned one"
            ),
        ));
    }
    let back = &content.spec.volume_group_snapshot_ref;
    let free = given && back.uid.as_deref().unwrap_or_default().is_empty();
    let same = back.name == group.metadata.name && back.namespace == group.metadata.namespace;
    if belongs(content, group) || (free && same) {
        return None;
    }
    Some((
        "GroupSnapshotContentMisbound",
        format!("VolumeGroupSnapshotContent [{name}] is bound to a different group snapshot"),
    ))
}

#[cfg(test)]
mod tests;
