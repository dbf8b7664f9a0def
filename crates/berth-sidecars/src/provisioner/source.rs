//! What a new volume starts with: a snapshot, another claim's volume, or something that a populator brings.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::{CustomResource, ResourceExt as _};
use serde::{Deserialize, Serialize};

use super::request;
use crate::failure::Failure;
use crate::names::SNAPSHOT_SOURCE_PROTECTION;
use crate::size;

/// The API group of snapshots.
const SNAPSHOT_GROUP: &str = "snapshot.storage.k8s.io";
/// On a content: its volume mode may be changed by a restore.
const ALLOW_MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";

/// Where a claim's data comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// A VolumeSnapshot of the claim's namespace.
    Snapshot(String),
    /// Another claim of the same namespace.
    Claim(String),
    /// Something that an external populator knows.
    Foreign,
}

impl Source {
    /// The source that a claim names.
    pub(super) fn of(claim: &PersistentVolumeClaim) -> Result<Option<Self>, Failure> {
        let Some(spec) = &claim.spec else { return Ok(None) };
        let (group, kind, name, namespace) = match (&spec.data_source_ref, &spec.data_source) {
            (Some(from), _) => (&from.api_group, &from.kind, &from.name, from.namespace.as_deref()),
            (None, Some(from)) => (&from.api_group, &from.kind, &from.name, None),
            (None, None) => return Ok(None),
        };
        if namespace
            .is_some_and(|namespace| !namespace.is_empty() && Some(namespace) != claim.namespace().as_deref())
        {
            return Err(Failure::refused(
                "dataSourceRef names another namespace, which needs the feature gate CrossNamespaceVolumeDataSource",
            ));
        }
        if name.is_empty() {
            return Err(Failure::refused("the claim's data source has no name"));
        }
        Ok(Some(match (group.as_deref().unwrap_or_default(), kind.as_str()) {
            (SNAPSHOT_GROUP, "VolumeSnapshot") => Self::Snapshot(name.clone()),
            ("", "PersistentVolumeClaim") => Self::Claim(name.clone()),
            _ => Self::Foreign,
        }))
    }
}

/// As much of a VolumeSnapshot as a restore reads.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "snapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeSnapshot",
    namespaced,
    status = "SnapshotStatus",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub(super) struct SnapshotSpec {
    volume_snapshot_class_name: Option<String>,
}

/// As much of its status.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct SnapshotStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bound_volume_snapshot_content_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ready_to_use: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) restore_size: Option<k8s_openapi::apimachinery::pkg::api::resource::Quantity>,
}

/// As much of a VolumeSnapshotContent as a restore reads.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "snapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeSnapshotContent",
    status = "ContentStatus",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub(super) struct ContentSpec {
    pub(super) driver: String,
    pub(super) volume_snapshot_ref: SnapshotRef,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) source_volume_mode: Option<String>,
}

/// The snapshot that a content belongs to.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub(super) struct SnapshotRef {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) uid: String,
}

/// As much of its status.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct ContentStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) snapshot_handle: Option<String>,
}

/// The handle of a snapshot that a claim may be restored from.
pub(super) fn restorable(
    claim: &PersistentVolumeClaim,
    snapshot: &VolumeSnapshot,
    content: Option<&VolumeSnapshotContent>,
    driver: &str,
    prevent_mode_change: bool,
) -> Result<String, Failure> {
    let name = snapshot.name_any();
    let no = |why: &str| {
        Err(Failure::refused(format!(
            "error getting handle for DataSource Type VolumeSnapshot by Name {name}: {why}"
        )))
    };
    let ours = snapshot.finalizers().iter().any(|finalizer| finalizer == SNAPSHOT_SOURCE_PROTECTION);
    if snapshot.metadata.deletion_timestamp.is_some() && !ours {
        return no("snapshot is currently being deleted");
    }
    let status = snapshot.status.clone().unwrap_or_default();
    if status.bound_volume_snapshot_content_name.as_deref().unwrap_or_default().is_empty() {
        return no("snapshot is not bound; wait until it is ready");
    }
    let Some(content) = content else { return no("its VolumeSnapshotContent does not exist") };
    let back = &content.spec.volume_snapshot_ref;
    if back.uid != snapshot.uid().unwrap_or_default()
        || Some(&back.namespace) != snapshot.namespace().as_ref()
        || back.name != name
    {
        return no("its VolumeSnapshotContent is bound to a different snapshot");
    }
    if content.spec.driver != driver {
        return no(&format!(
            "it was taken by driver {:?}, and the claim's class uses {driver:?}",
            content.spec.driver
        ));
    }
    if status.ready_to_use != Some(true) {
        return no("snapshot is not Ready");
    }
    let handle = content.status.clone().unwrap_or_default().snapshot_handle.unwrap_or_default();
    if handle.is_empty() {
        return no("its VolumeSnapshotContent has no snapshot handle");
    }
    if let Some(least) = status.restore_size.as_ref().and_then(size::bytes)
        && request::requested(claim)? < least
    {
        return no(&format!("requested volume size is less than the size {least} for the source snapshot"));
    }
    let allowed = content.annotations().get(ALLOW_MODE_CHANGE).is_some_and(|value| value == "true");
    if let Some(mode) = &content.spec.source_volume_mode
        && prevent_mode_change
        && !allowed
        && *mode != mode_of(claim)
    {
        return no(&format!(
            "requested volume {} modifies the mode of the source volume but does not have permission to do so. {ALLOW_MODE_CHANGE} annotation is not present on snapshotcontent {}",
            claim.name_any(),
            content.name_any()
        ));
    }
    Ok(handle)
}

/// The handle of a volume that a claim may be cloned from.
pub(super) fn cloneable(
    claim: &PersistentVolumeClaim,
    source: &PersistentVolumeClaim,
    volume: Option<&PersistentVolume>,
    driver: &str,
) -> Result<String, Failure> {
    let name = source.name_any();
    let no = |why: &str| {
        Err(Failure::refused(format!(
            "error getting handle for DataSource Type PersistentVolumeClaim by Name {name}: {why}"
        )))
    };
    let spec = source.spec.clone().unwrap_or_default();
    let phase = source.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return no("the claim to clone is not in Bound phase");
    }
    if source.metadata.deletion_timestamp.is_some() {
        return no("the claim to clone is being deleted");
    }
    if spec.storage_class_name.as_deref().unwrap_or_default().is_empty() {
        return no("the claim to clone has no StorageClass");
    }
    let Some(volume) = volume else { return no("the volume of the claim to clone does not exist") };
    let volume_spec = volume.spec.clone().unwrap_or_default();
    let Some(csi) = volume_spec.csi else { return no("its volume is no CSI volume") };
    if csi.driver != driver {
        return no(&format!(
            "its volume belongs to driver {:?}, and the claim's class uses {driver:?}",
            csi.driver
        ));
    }
    if volume.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
        return no("its volume is not Bound");
    }
    let back = volume_spec.claim_ref.unwrap_or_default();
    if back.uid != source.uid() || back.namespace != source.namespace() || back.name.as_ref() != Some(&name) {
        return no("its volume is bound to a different claim");
    }
    let least =
        volume_spec.capacity.as_ref().and_then(|capacity| size::bytes(capacity.get("storage")?)).unwrap_or(0);
    if request::requested(claim)? < least {
        return no(&format!("new claim requests less than the size {least} of the volume to clone"));
    }
    if mode_of(claim) != mode_of(source) {
        return no("the claim to clone has another volume mode (Filesystem or Block)");
    }
    Ok(csi.volume_handle)
}

fn mode_of(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("Filesystem")
}

#[cfg(test)]
mod tests;
