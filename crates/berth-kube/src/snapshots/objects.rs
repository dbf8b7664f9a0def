//! Snapshots of single claims: `snapshot.storage.k8s.io`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::TypeMeta;
use kube::{CustomResource, Resource};
use serde::{Deserialize, Serialize};

/// What a person asks for: a snapshot of a claim, or one that exists on the storage system.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "snapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeSnapshot",
    namespaced,
    status = "VolumeSnapshotStatus",
    derive = "Default",
    derive = "PartialEq",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotSpec {
    /// Where the snapshot comes from.
    pub source: VolumeSnapshotSource,
    /// How it is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
}

/// Exactly one of the two.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotSource {
    /// The claim to take a snapshot of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim_name: Option<String>,
    /// A content that exists already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_content_name: Option<String>,
}

/// What has become of a VolumeSnapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotStatus {
    /// The content that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_volume_snapshot_content_name: Option<String>,
    /// When it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether a claim can be restored from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// The least size of such a claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<Quantity>,
    /// What last went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// The group that it was taken with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_group_snapshot_name: Option<String>,
}

/// What went wrong, and when.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct SnapshotError {
    /// When it last went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// What went wrong, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A snapshot on the storage system.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "snapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeSnapshotContent",
    status = "VolumeSnapshotContentStatus",
    derive = "Default",
    derive = "PartialEq",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentSpec {
    /// `Delete` or `Retain`: what becomes of the snapshot when its VolumeSnapshot is deleted.
    pub deletion_policy: String,
    /// The driver that it belongs to.
    pub driver: String,
    /// The volume it is of, or the snapshot that it is.
    pub source: VolumeSnapshotContentSource,
    /// `Filesystem` or `Block`: how the volume is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_volume_mode: Option<String>,
    /// How it is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
    /// The VolumeSnapshot that it belongs to.
    pub volume_snapshot_ref: ObjectReference,
}

/// Exactly one of the two.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentSource {
    /// The driver's id of a snapshot that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_handle: Option<String>,
    /// The driver's id of the volume to take a snapshot of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_handle: Option<String>,
}

/// What the driver says of a snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentStatus {
    /// The driver's id of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_handle: Option<String>,
    /// When it was taken, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<i64>,
    /// The least size of a volume restored from it, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<i64>,
    /// Whether a volume can be made from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// What last went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// The driver's id of the group that it was taken with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_group_snapshot_handle: Option<String>,
}

/// A class: a kind without a spec, which cannot be derived.
macro_rules! class {
    ($(#[$doc:meta])* $kind:ident, $group:literal, $plural:literal) => {
        $(#[$doc])*
        #[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
        #[serde(rename_all = "camelCase")]
        pub struct $kind {
            /// The `apiVersion` and `kind` of the object.
            #[serde(flatten, default)]
            pub types: Option<TypeMeta>,
            /// Its name, and whether it is the default.
            pub metadata: ObjectMeta,
            /// The driver that takes them.
            pub driver: String,
            /// What becomes of the storage when the content is deleted: `Delete` or `Retain`.
            pub deletion_policy: String,
            /// The parameters that the driver gets, and which secrets.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub parameters: Option<BTreeMap<String, String>>,
        }

        impl Resource for $kind {
            type DynamicType = ();
            type Scope = ClusterResourceScope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

pub(super) use class;

class!(
    /// How snapshots are taken.
    VolumeSnapshotClass,
    "snapshot.storage.k8s.io",
    "volumesnapshotclasses"
);
crate::kinds!(VolumeSnapshot, VolumeSnapshotContent, VolumeSnapshotClass);
