//! Finalizers, annotations and names of the snapshot kinds, as upstream has them.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// The group of snapshots.
pub(crate) const GROUP: &str = "snapshot.storage.k8s.io";
/// The group of groups of snapshots.
pub(crate) const GROUPS_GROUP: &str = "groupsnapshot.storage.k8s.io";
/// The policy under which a snapshot goes with its object.
pub(crate) const DELETE: &str = "Delete";

/// Keeps a snapshot while a claim may be restored from it.
pub(crate) const AS_SOURCE: &str = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection";
/// Keeps a snapshot until its content is gone.
pub(crate) const BOUND: &str = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection";
/// Keeps a snapshot while its group is there.
pub(crate) const IN_GROUP: &str = "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection";
/// Keeps a content until the snapshot on the storage system is gone, or let go.
pub(crate) const CONTENT: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";
/// Keeps a claim while a snapshot of it is being taken.
pub(crate) const CLAIM: &str = "snapshot.storage.kubernetes.io/pvc-as-source-protection";
/// Keeps a group until its content is gone.
pub(crate) const GROUP_BOUND: &str =
    "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-bound-protection";
/// Keeps a group's content until the group on the storage system is gone, or let go.
pub(crate) const GROUP_CONTENT: &str =
    "groupsnapshot.storage.kubernetes.io/volumegroupsnapshotcontent-bound-protection";

/// On a content: the driver was asked for the snapshot and has not finally answered.
pub(crate) const BEING_CREATED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-created";
/// On a content: its VolumeSnapshot is being deleted.
pub(crate) const BEING_DELETED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";
/// On a content: the secret for every call about it.
pub(crate) const SECRET_NAME: &str = "snapshot.storage.kubernetes.io/deletion-secret-name";
/// On a content: that secret's namespace.
pub(crate) const SECRET_NAMESPACE: &str = "snapshot.storage.kubernetes.io/deletion-secret-namespace";
/// On a content: the driver's id of the group that it was taken with.
pub(crate) const GROUP_HANDLE: &str = "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle";
/// On a group's content: the driver was asked for the group and has not finally answered.
pub(crate) const GROUP_BEING_CREATED: &str =
    "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-created";
/// On a group's content: its VolumeGroupSnapshot is being deleted.
pub(crate) const GROUP_BEING_DELETED: &str =
    "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted";
/// On a group's content: the secret for every call about it.
pub(crate) const GROUP_SECRET_NAME: &str = "groupsnapshot.storage.kubernetes.io/deletion-secret-name";
/// On a group's content: that secret's namespace.
pub(crate) const GROUP_SECRET_NAMESPACE: &str =
    "groupsnapshot.storage.kubernetes.io/deletion-secret-namespace";
/// A content's label: the node whose snapshotter acts on it, where there is one on every node.
pub(crate) const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";
/// On a class: it is used by snapshots that name none.
pub(crate) const DEFAULT_CLASS: &str = "snapshot.storage.kubernetes.io/is-default-class";
/// The same for groups.
pub(crate) const DEFAULT_GROUP_CLASS: &str = "groupsnapshot.storage.kubernetes.io/is-default-class";

/// The content of a VolumeSnapshot of a claim.
pub(crate) fn content(snapshot_uid: &str) -> String {
    format!("snapcontent-{snapshot_uid}")
}

/// The content of a VolumeGroupSnapshot of claims.
pub(crate) fn group_content(group_uid: &str) -> String {
    format!("groupsnapcontent-{group_uid}")
}

/// The VolumeSnapshot of a group's member, and its content.
pub(crate) fn member(group_uid: &str, volume_handle: &str) -> (String, String) {
    let digest = Sha256::digest(format!("{group_uid}{volume_handle}"));
    let mut hex = String::with_capacity(64);
    for byte in digest {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    (format!("snapshot-{hex}"), format!("snapcontent-{hex}"))
}

/// The content of a group's member, by the name of its VolumeSnapshot.
pub(crate) fn member_content(snapshot: &str) -> Option<String> {
    snapshot.strip_prefix("snapshot-").map(|hex| format!("snapcontent-{hex}"))
}
