//! What a content needs, whether of one snapshot or of a group: decided from the object alone.

use berth_kube::finalizers;
use kube::ResourceExt;

use crate::snapshots::names;
use crate::snapshots::{VolumeGroupSnapshotContent, VolumeSnapshotContent};

/// What is to be done about a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// Ask the driver for the snapshot, perhaps again.
    Create,
    /// Ask the driver how a snapshot that exists is.
    Check,
    /// All is saved: remove the annotation.
    RemoveAnnotation,
    /// Delete the snapshot, then let the content go.
    Delete,
    /// Let the content go.
    Release,
}

/// Where a content's snapshot comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// It is taken of a volume, or of volumes.
    Volume,
    /// It exists already, and the content names its handle.
    Handle,
    /// It was taken with a group.
    Member,
    /// Nothing that can be acted on.
    Invalid,
}

/// What matters of a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "the columns of a table")]
pub(super) struct ObservedContent {
    pub(super) ours: bool,
    pub(super) source: Source,
    /// An object refers to it and it to that object.
    pub(super) bound: bool,
    /// Its policy is `Delete`.
    pub(super) delete: bool,
    pub(super) deleting: bool,
    pub(super) being_created: bool,
    pub(super) being_deleted: bool,
    pub(super) protected: bool,
    pub(super) has_handle: bool,
    /// The snapshot goes with its group.
    pub(super) grouped: bool,
    pub(super) ready: bool,
}

impl ObservedContent {
    pub(super) fn content(content: &VolumeSnapshotContent, driver: &str) -> Self {
        let status = content.status.clone().unwrap_or_default();
        let source = &content.spec.source;
        Self {
            ours: content.spec.driver == driver,
            source: match (&source.volume_handle, &source.snapshot_handle) {
                (Some(_), None) if content.annotations().contains_key(names::GROUP_HANDLE) => Source::Member,
                (Some(_), None) => Source::Volume,
                (None, Some(_)) => Source::Handle,
                _ => Source::Invalid,
            },
            bound: is_set(content.spec.volume_snapshot_ref.uid.as_deref()),
            delete: content.spec.deletion_policy == names::DELETE,
            deleting: content.metadata.deletion_timestamp.is_some(),
            being_created: content.annotations().contains_key(names::BEING_CREATED),
            being_deleted: content.annotations().contains_key(names::BEING_DELETED),
            protected: finalizers::has(content, names::CONTENT),
            has_handle: is_set(status.snapshot_handle.as_deref()),
            grouped: is_set(status.volume_group_snapshot_handle.as_deref()),
            ready: status.ready_to_use == Some(true),
        }
    }

    pub(super) fn group(content: &VolumeGroupSnapshotContent, driver: &str) -> Self {
        let status = content.status.clone().unwrap_or_default();
        let source = &content.spec.source;
        let volumes = source.volume_handles.as_ref().is_some_and(|handles| !handles.is_empty());
        Self {
            ours: content.spec.driver == driver,
            source: match (volumes, source.group_snapshot_handles.is_some()) {
                (true, false) => Source::Volume,
                (false, true) => Source::Handle,
                _ => Source::Invalid,
            },
            bound: is_set(content.spec.volume_group_snapshot_ref.uid.as_deref()),
            delete: content.spec.deletion_policy == names::DELETE,
            deleting: content.metadata.deletion_timestamp.is_some(),
            being_created: content.annotations().contains_key(names::GROUP_BEING_CREATED),
            being_deleted: content.annotations().contains_key(names::GROUP_BEING_DELETED),
            protected: finalizers::has(content, names::GROUP_CONTENT),
            has_handle: is_set(status.volume_group_snapshot_handle.as_deref()),
            grouped: false,
            ready: status.ready_to_use == Some(true),
        }
    }
}

fn is_set(text: Option<&str>) -> bool {
    text.is_some_and(|text| !text.is_empty())
}

/// What to do about a content.
pub(super) fn plan(observed: ObservedContent) -> Plan {
    if !observed.ours {
        return Plan::Nothing;
    }
    let unbound = observed.source == Source::Handle && !observed.bound;
    if observed.deleting && (unbound || (observed.being_deleted && !observed.being_created)) {
        return match (observed.delete && observed.has_handle && !observed.grouped, observed.protected) {
            (true, _) => Plan::Delete,
            (false, true) => Plan::Release,
            (false, false) => Plan::Nothing,
        };
    }
    // Not begun, and nobody wants it any more: it would be taken only to be deleted.
    if observed.being_deleted && observed.delete && !observed.being_created && !observed.has_handle {
        return Plan::Nothing;
    }
    if observed.ready {
        return if observed.being_created { Plan::RemoveAnnotation } else { Plan::Nothing };
    }
    match observed.source {
        Source::Volume => Plan::Create,
        Source::Handle => Plan::Check,
        Source::Member if observed.has_handle => Plan::Check,
        Source::Member | Source::Invalid => Plan::Nothing,
    }
}

/// Whether a change of a content needs a reconciliation. Our own writes do not: the status (but a member of a group gets its
/// handle from elsewhere), the finalizer, the annotation.
pub(super) fn matters<K: ResourceExt>(
    before: (&K, ObservedContent),
    after: (&K, ObservedContent),
    own_annotation: &str,
) -> bool {
    let annotations = |object: &K| {
        let mut annotations = object.annotations().clone();
        annotations.remove(own_annotation);
        annotations
    };
    let ((old, old_seen), (new, new_seen)) = (before, after);
    (old_seen.ours, old_seen.source, old_seen.bound, old_seen.delete)
        != (new_seen.ours, new_seen.source, new_seen.bound, new_seen.delete)
        || old_seen.deleting != new_seen.deleting
        || annotations(old) != annotations(new)
        || (!old_seen.ready && new_seen.ready)
        || (new_seen.source == Source::Member && !old_seen.has_handle && new_seen.has_handle)
}

#[cfg(test)]
mod tests;
