//! What a new volume starts with: a snapshot, another claim's volume, or something that a populator brings.

use berth_kube::Key;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;

use super::{claim, request};
use crate::failure::Failure;
use crate::finalizers;
use crate::names::{CLONING_PROTECTION, SNAPSHOT_SOURCE_PROTECTION};
use crate::size;
use crate::snapshots::names::GROUP as SNAPSHOT_GROUP;
use crate::snapshots::{VolumeSnapshot, VolumeSnapshotContent};

/// On a content: its volume mode may be changed by a restore.
const ALLOW_MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";

/// Where a claim's data comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// A VolumeSnapshot.
    Snapshot(Key),
    /// Another claim.
    Claim(Key),
    /// Something that an external populator knows.
    Foreign,
}

impl Source {
    /// The source that a claim may be made from; `elsewhere` tells whether it may be in another namespace.
    pub(super) fn of(claim: &PersistentVolumeClaim, elsewhere: bool) -> Result<Option<Self>, Failure> {
        let Some(Reference { key, .. }) = Reference::of(claim) else { return Ok(None) };
        if !elsewhere && Some(&key.namespace) != claim.namespace().as_ref() {
            return Err(Failure::refused(
                "dataSourceRef names another namespace, which needs the feature gate CrossNamespaceVolumeDataSource",
            ));
        }
        if key.name.is_empty() {
            return Err(Failure::refused("the claim's data source has no name"));
        }
        Ok(Self::named(claim))
    }

    /// The source that a claim names, be it one that we would refuse.
    pub(super) fn named(claim: &PersistentVolumeClaim) -> Option<Self> {
        let Reference { group, kind, key } = Reference::of(claim)?;
        Some(match (group, kind) {
            (SNAPSHOT_GROUP, "VolumeSnapshot") => Self::Snapshot(key),
            ("", "PersistentVolumeClaim") => Self::Claim(key),
            _ => Self::Foreign,
        })
    }

    /// The source that a claim still needs: a volume may be, or may be about to be, copied from it for the claim.
    pub(super) fn needed(by: &PersistentVolumeClaim) -> Option<Self> {
        let phase = by.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        let waits = matches!(phase, "" | "Pending") && by.metadata.deletion_timestamp.is_none();
        if waits || claim::is_begun(by) { Self::named(by) } else { None }
    }
}

/// What stands in a claim's `dataSourceRef`, or else in its `dataSource`.
pub(super) struct Reference<'a> {
    pub(super) group: &'a str,
    pub(super) kind: &'a str,
    pub(super) key: Key,
}

impl<'a> Reference<'a> {
    pub(super) fn of(claim: &'a PersistentVolumeClaim) -> Option<Self> {
        let spec = claim.spec.as_ref()?;
        let (group, kind, name, namespace) = match (&spec.data_source_ref, &spec.data_source) {
            (Some(from), _) => (&from.api_group, &from.kind, &from.name, from.namespace.as_ref()),
            (None, Some(from)) => (&from.api_group, &from.kind, &from.name, None),
            (None, None) => return None,
        };
        let namespace = namespace.filter(|namespace| !namespace.is_empty()).cloned();
        let key = Key::new(namespace.or_else(|| claim.namespace()).unwrap_or_default(), name.clone());
        Some(Self { group: group.as_deref().unwrap_or_default(), kind, key })
    }
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
    if snapshot.metadata.deletion_timestamp.is_some()
        && !finalizers::has(snapshot, SNAPSHOT_SOURCE_PROTECTION)
    {
        return no("snapshot is currently being deleted");
    }
    let status = snapshot.status.clone().unwrap_or_default();
    if status.bound_volume_snapshot_content_name.as_deref().unwrap_or_default().is_empty() {
        return no("snapshot is not bound; wait until it is ready");
    }
    let Some(content) = content else { return no("its VolumeSnapshotContent does not exist") };
    let back = &content.spec.volume_snapshot_ref;
    if back.uid != snapshot.uid()
        || back.namespace != snapshot.namespace()
        || back.name.as_ref() != Some(&name)
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
    // A call that was made before must be made again to learn what became of it; until then the source stays.
    let begun = claim::is_begun(claim) && finalizers::has(source, CLONING_PROTECTION);
    if source.metadata.deletion_timestamp.is_some() && !begun {
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
