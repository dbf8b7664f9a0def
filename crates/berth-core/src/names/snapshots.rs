//! Finalizers, annotations and names of the snapshot kinds, as upstream has them.

/// The group of snapshots.
pub const GROUP: &str = "snapshot.storage.k8s.io";
/// The group of groups of snapshots.
pub const GROUPS_GROUP: &str = "groupsnapshot.storage.k8s.io";
/// The policy under which a snapshot goes with its object.
pub const DELETE: &str = "Delete";

/// Keeps a snapshot while a claim may be restored from it.
pub const AS_SOURCE: &str = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection";
/// Keeps a snapshot until its content is gone.
pub const BOUND: &str = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection";
/// Keeps a snapshot while its group is there.
pub const IN_GROUP: &str = "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection";
/// Keeps a content until the snapshot on the storage system is gone, or let go.
pub const CONTENT: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";
/// Keeps a claim while a snapshot of it is being taken.
pub const CLAIM: &str = "snapshot.storage.kubernetes.io/pvc-as-source-protection";
/// Keeps a group until its content is gone.
pub const GROUP_BOUND: &str = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-bound-protection";
/// Keeps a group's content until the group on the storage system is gone, or let go.
pub const GROUP_CONTENT: &str =
    "groupsnapshot.storage.kubernetes.io/volumegroupsnapshotcontent-bound-protection";

/// On a content: the driver was asked for the snapshot and has not finally answered.
pub const BEING_CREATED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-created";
/// On a content: its VolumeSnapshot is being deleted.
pub const BEING_DELETED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";
/// On a content: the secret for every call about it.
pub const SECRET_NAME: &str = "snapshot.storage.kubernetes.io/deletion-secret-name";
/// On a content: that secret's namespace.
pub const SECRET_NAMESPACE: &str = "snapshot.storage.kubernetes.io/deletion-secret-namespace";
/// On a content: the driver's id of the group that it was taken with.
pub const GROUP_HANDLE: &str = "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle";
/// On a group's content: the driver was asked for the group and has not finally answered.
pub const GROUP_BEING_CREATED: &str = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-created";
/// On a group's content: its VolumeGroupSnapshot is being deleted.
pub const GROUP_BEING_DELETED: &str = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted";
/// On a group's content: the secret for every call about it.
pub const GROUP_SECRET_NAME: &str = "groupsnapshot.storage.kubernetes.io/deletion-secret-name";
/// On a group's content: that secret's namespace.
pub const GROUP_SECRET_NAMESPACE: &str = "groupsnapshot.storage.kubernetes.io/deletion-secret-namespace";
/// A content's label: the node whose snapshotter acts on it, where there is one on every node.
pub const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";
/// On a class: it is used by snapshots that name none.
pub const DEFAULT_CLASS: &str = "snapshot.storage.kubernetes.io/is-default-class";
/// The same for groups.
pub const DEFAULT_GROUP_CLASS: &str = "groupsnapshot.storage.kubernetes.io/is-default-class";

/// On a content: its volume mode may be changed by a restore.
pub const ALLOW_MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";

/// The content of a VolumeSnapshot of a claim.
pub fn content(snapshot_uid: &str) -> String {
    format!("snapcontent-{snapshot_uid}")
}

/// The content of a VolumeGroupSnapshot of claims.
pub fn group_content(group_uid: &str) -> String {
    format!("groupsnapcontent-{group_uid}")
}

/// The content of a group's member, by the name of its VolumeSnapshot.
pub fn member_content(snapshot: &str) -> Option<String> {
    snapshot.strip_prefix("snapshot-").map(|hex| format!("snapcontent-{hex}"))
}
