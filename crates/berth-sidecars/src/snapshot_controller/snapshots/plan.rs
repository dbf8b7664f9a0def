//! What a VolumeSnapshot needs: decided from it, its content, its group and who is being restored from it.

use berth_core::names::events;
use berth_kube::finalizers;
use kube::ResourceExt as _;

use crate::snapshot_controller::binding::{self, GroupStep};
use crate::snapshot_controller::{group_of, status};
use crate::snapshots::{VolumeSnapshot, VolumeSnapshotContent, VolumeSnapshotStatus, names};

/// What is done about a snapshot.
pub(super) type Step = binding::Step<VolumeSnapshotStatus>;

/// A group as far as it matters to a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Group<'a> {
    /// It belongs to none.
    None,
    /// Whether its group exists is not known yet.
    Unknown,
    /// Its group exists and has this name.
    Live(&'a str),
    /// Its group is being deleted, and its members with it.
    Leaving,
    /// Its group is gone.
    Gone,
}

/// What is known of a snapshot.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservedSnapshot<'a> {
    pub(super) snapshot: &'a VolumeSnapshot,
    pub(super) content: Option<&'a VolumeSnapshotContent>,
    /// The group that the snapshot names.
    pub(super) group: Group<'a>,
    /// The group that its content was taken with.
    pub(super) content_group: Group<'a>,
    /// A claim waits to be restored from it.
    pub(super) restoring: bool,
}

/// The content that a snapshot is bound to, or would be.
pub(super) fn content_name(snapshot: &VolumeSnapshot) -> Option<String> {
    let bound = snapshot.status.as_ref().and_then(|status| status.bound_volume_snapshot_content_name.clone());
    let source = &snapshot.spec.source;
    bound.or_else(|| source.volume_snapshot_content_name.clone()).or_else(|| match group_of(snapshot) {
        None => Some(names::content(&snapshot.uid().unwrap_or_default())),
        Some(_) => names::member_content(&snapshot.name_any()),
    })
}

/// What to do about a snapshot.
pub(super) fn plan(observed: &ObservedSnapshot<'_>) -> Vec<Step> {
    if observed.snapshot.metadata.deletion_timestamp.is_some() {
        return deleting(observed);
    }
    let source = &observed.snapshot.spec.source;
    match (&source.persistent_volume_claim_name, &source.volume_snapshot_content_name) {
        (Some(_), None) | (None, Some(_)) => {}
        _ => {
            let text =
                "Exactly one of PersistentVolumeClaimName and VolumeSnapshotContentName should be specified";
            return vec![Step::Fail(events::SNAPSHOT_VALIDATION_ERROR, text.to_owned())];
        }
    }
    let bound = observed.snapshot.status.as_ref().is_some_and(|status| {
        status.bound_volume_snapshot_content_name.is_some() && status.ready_to_use == Some(true)
    });
    let mut steps = Vec::new();
    let wrong = observed.content.and_then(|content| mismatch(observed.snapshot, content));
    if let (Some((reason, message)), false) = (&wrong, bound) {
        return vec![Step::Fail(reason, message.clone())];
    }
    let mut protect = vec![names::AS_SOURCE];
    let delete = |content: &VolumeSnapshotContent| content.spec.deletion_policy == names::DELETE;
    if wrong.is_none() && observed.content.is_some_and(delete) {
        protect.push(names::BOUND);
    }
    protect.retain(|finalizer| !finalizers::has(observed.snapshot, finalizer));
    if !protect.is_empty() {
        steps.push(Step::Protect(protect));
    }
    steps.extend(if bound { ready(observed).into_iter().collect() } else { unready(observed) });
    steps
}

fn ready(observed: &ObservedSnapshot<'_>) -> Option<Step> {
    let Some(content) = observed.content else {
        return Some(Step::Fail(events::SNAPSHOT_CONTENT_MISSING, MISSING.to_owned()));
    };
    if !belongs(content, observed.snapshot) {
        let text = "VolumeSnapshotContent is not bound to the VolumeSnapshot correctly";
        return Some(Step::Fail(events::SNAPSHOT_MISBOUND, text.to_owned()));
    }
    let owned = observed.snapshot.owner_references().iter().any(|owner| owner.kind == "VolumeGroupSnapshot");
    (matches!(observed.group, Group::Live(_)) && !owned).then_some(Step::Group(GroupStep::Own))
}

fn unready(observed: &ObservedSnapshot<'_>) -> Vec<Step> {
    let snapshot = observed.snapshot;
    let given = snapshot.spec.source.volume_snapshot_content_name.is_some();
    let member = !given && group_of(snapshot).is_some();
    let Some(content) = observed.content else {
        return match (given, member) {
            (true, _) => vec![Step::Fail(events::SNAPSHOT_CONTENT_MISSING, MISSING.to_owned())],
            // Its group makes the content and binds it.
            (false, true) => Vec::new(),
            (false, false) => vec![Step::Create],
        };
    };
    let mut steps = Vec::new();
    let back = &content.spec.volume_snapshot_ref;
    let classless = content.spec.volume_snapshot_class_name.is_none()
        && snapshot.spec.volume_snapshot_class_name.is_some();
    if given && (back.uid.as_deref().unwrap_or_default().is_empty() || classless) {
        steps.push(Step::Bind);
    }
    let group = match observed.content_group {
        // The name of its group must not be missing in a status that is ready.
        Group::Unknown | Group::Leaving | Group::Gone => return steps,
        Group::Live(name) => Some(name),
        Group::None => None,
    };
    let before = snapshot.status.as_ref();
    let after = status::of_snapshot(before, &content.name_any(), content, group);
    if before != Some(&after) {
        steps.push(Step::Status(after));
    }
    steps
}

fn deleting(observed: &ObservedSnapshot<'_>) -> Vec<Step> {
    let snapshot = observed.snapshot;
    let ours = [names::AS_SOURCE, names::BOUND, names::IN_GROUP];
    let mut release: Vec<&str> =
        ours.into_iter().filter(|finalizer| finalizers::has(snapshot, finalizer)).collect();
    if release.is_empty() {
        return Vec::new();
    }
    let content = observed.content.filter(|content| belongs(content, snapshot));
    if content.is_some() && observed.restoring {
        return vec![Step::Pending("Snapshot is being used to restore a PVC".to_owned())];
    }
    match observed.group {
        Group::None | Group::Gone => {}
        // The group's end brings the next reconciliation.
        Group::Unknown | Group::Leaving => return Vec::new(),
        Group::Live(group) => {
            let namespace = snapshot.namespace().unwrap_or_default();
            return vec![Step::Pending(format!(
                "deletion of the individual volume snapshot {namespace}/{} is not allowed as it belongs to group snapshot \
                 {namespace}/{group}. Deleting the group snapshot will trigger the deletion of all the individual volume \
                 snapshots that are part of the group.",
                snapshot.name_any()
            ))];
        }
    }
    let mut steps = Vec::new();
    if let Some(content) = content {
        if !content.annotations().contains_key(names::BEING_DELETED) {
            steps.push(Step::MarkContent);
        }
        if content.spec.deletion_policy == names::DELETE {
            if content.metadata.deletion_timestamp.is_none() {
                steps.push(Step::DeleteContent);
            }
            // The snapshot stays until its content is gone, so that a person sees what is still going on; one that was
            // deleted before it got the finalizer for that is kept by another.
            let last = if release.contains(&names::BOUND) { names::BOUND } else { release[0] };
            release.retain(|finalizer| *finalizer != last);
        }
    }
    if !release.is_empty() {
        steps.push(Step::Release(release));
    }
    steps
}

const MISSING: &str = "VolumeSnapshotContent is missing";

/// Whether a content belongs to this very snapshot.
fn belongs(content: &VolumeSnapshotContent, snapshot: &VolumeSnapshot) -> bool {
    let back = &content.spec.volume_snapshot_ref;
    back.name == snapshot.metadata.name
        && back.namespace == snapshot.metadata.namespace
        && back.uid == snapshot.metadata.uid
}

/// Why a content is not the one that a snapshot needs.
fn mismatch(snapshot: &VolumeSnapshot, content: &VolumeSnapshotContent) -> Option<(&'static str, String)> {
    let name = content.name_any();
    let given = snapshot.spec.source.volume_snapshot_content_name.is_some();
    let source = &content.spec.source;
    if given && source.snapshot_handle.is_none() {
        let text = "VolumeSnapshotContent is dynamically provisioned while expecting a pre-provisioned one";
        return Some(("SnapshotContentMismatch", text.to_owned()));
    }
    if !given && source.volume_handle.is_none() {
        return Some((
            "SnapshotContentMismatch",
            format!(
                "VolumeSnapshotContent {name} is pre-provisioned while expecting a dynamically provisioned one"
            ),
        ));
    }
    let back = &content.spec.volume_snapshot_ref;
    let free = given && back.uid.as_deref().unwrap_or_default().is_empty();
    let same = back.name == snapshot.metadata.name && back.namespace == snapshot.metadata.namespace;
    if belongs(content, snapshot) || (free && same) {
        return None;
    }
    Some((
        "SnapshotContentMisbound",
        format!("VolumeSnapshotContent [{name}] is bound to a different snapshot"),
    ))
}

#[cfg(test)]
mod tests;
