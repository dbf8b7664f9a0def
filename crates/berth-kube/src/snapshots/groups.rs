//! Snapshots of several claims at one instant: `groupsnapshot.storage.k8s.io`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, Time};
use kube::core::TypeMeta;
use kube::{CustomResource, Resource};
use serde::{Deserialize, Serialize};

use super::objects::{SnapshotError, class};

/// What a person asks for: snapshots of all claims with these labels, or a group that exists on the storage system.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "groupsnapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeGroupSnapshot",
    namespaced,
    status = "VolumeGroupSnapshotStatus",
    derive = "Default",
    derive = "PartialEq",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeGroupSnapshotSpec {
    /// Where the group comes from.
    pub source: VolumeGroupSnapshotSource,
    /// How it is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_group_snapshot_class_name: Option<String>,
}

/// Exactly one of the two.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeGroupSnapshotSource {
    /// The claims that are taken together, by their labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// A content that exists already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_group_snapshot_content_name: Option<String>,
}

/// What has become of a VolumeGroupSnapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeGroupSnapshotStatus {
    /// The content that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_volume_group_snapshot_content_name: Option<String>,
    /// When it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether claims can be restored from its members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// What last went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
}

/// A group of snapshots on the storage system.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "groupsnapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeGroupSnapshotContent",
    status = "VolumeGroupSnapshotContentStatus",
    derive = "Default",
    derive = "PartialEq",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeGroupSnapshotContentSpec {
    /// `Delete` or `Retain`: what becomes of the group when its VolumeGroupSnapshot is deleted.
    pub deletion_policy: String,
    /// The driver that it belongs to.
    pub driver: String,
    /// The volumes it is of, or the snapshots that it is.
    pub source: VolumeGroupSnapshotContentSource,
    /// How it is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_group_snapshot_class_name: Option<String>,
    /// The VolumeGroupSnapshot that it belongs to.
    pub volume_group_snapshot_ref: ObjectReference,
}

/// Exactly one of the two.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeGroupSnapshotContentSource {
    /// The driver's ids of a group that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_snapshot_handles: Option<GroupSnapshotHandles>,
    /// The driver's ids of the volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_handles: Option<Vec<String>>,
}

/// A group that exists.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct GroupSnapshotHandles {
    /// The driver's id of the group.
    pub volume_group_snapshot_handle: String,
    /// The driver's ids of its members.
    #[serde(default)]
    pub volume_snapshot_handles: Vec<String>,
}

/// What the driver says of a group.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeGroupSnapshotContentStatus {
    /// The driver's id of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_group_snapshot_handle: Option<String>,
    /// When it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether volumes can be made from its members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// What last went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// The snapshots that belong to the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_info_list: Option<Vec<VolumeSnapshotInfo>>,
}

/// A member of a group.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotInfo {
    /// The driver's id of the volume.
    #[serde(default)]
    pub volume_handle: String,
    /// The driver's id of the snapshot.
    #[serde(default)]
    pub snapshot_handle: String,
    /// When it was taken, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<i64>,
    /// Whether a volume can be made from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// The least size of a volume restored from it, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<i64>,
}

class!(
    /// How groups of snapshots are taken.
    VolumeGroupSnapshotClass,
    "groupsnapshot.storage.k8s.io",
    "volumegroupsnapshotclasses"
);
crate::kinds!(VolumeGroupSnapshot, VolumeGroupSnapshotContent, VolumeGroupSnapshotClass);
