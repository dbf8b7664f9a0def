//! The content of a group of claims, and the objects of its members; decided without a write.

use std::collections::BTreeMap;
use std::sync::Arc;

use berth_kube::{Key, reference};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;

use crate::secrets::{self, SnapshotPurpose};
use crate::snapshot_controller::creation::{Class, Refusal, default_class, secret_marks, volume_of};
use crate::snapshot_controller::snapshots::owner;
use crate::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent,
    VolumeGroupSnapshotContentSource, VolumeGroupSnapshotContentSpec, VolumeSnapshot, VolumeSnapshotContent,
    VolumeSnapshotContentSource, VolumeSnapshotContentSpec, VolumeSnapshotContentStatus, VolumeSnapshotInfo,
    VolumeSnapshotSource, VolumeSnapshotSpec, names,
};

impl Class for VolumeGroupSnapshotClass {
    fn name(&self) -> String {
        self.name_any()
    }

    fn driver(&self) -> &str {
        &self.driver
    }

    fn is_default(&self) -> bool {
        self.annotations().get(names::DEFAULT_GROUP_CLASS).is_some_and(|value| value == "true")
    }
}

/// A claim and its volume.
pub(super) type Chosen = (Arc<PersistentVolumeClaim>, Option<Arc<PersistentVolume>>);

/// The content to make for the claims that a group's selector chose.
pub(super) fn content(
    group: &VolumeGroupSnapshot,
    claims: &[Chosen],
    classes: &[Arc<VolumeGroupSnapshotClass>],
) -> Result<VolumeGroupSnapshotContent, Refusal> {
    let failed = |message: String| Refusal {
        reason: "GroupSnapshotContentCreationFailed",
        message: format!("failed to create group snapshot content with error {message}"),
    };
    let mut handles = Vec::new();
    let mut driver = None;
    for (claim, volume) in claims {
        let (_, its, handle) = volume_of(claim, volume.as_deref()).map_err(failed)?;
        if *driver.get_or_insert(its) != its {
            return Err(failed(format!(
                "the selector chooses volumes of different drivers ({} and {its}), which no driver can take together",
                driver.unwrap_or_default()
            )));
        }
        handles.push(handle.to_owned());
    }
    let driver = driver.ok_or_else(|| {
        failed(
            "label selector for group snapshot not applied to any PVC: label the claims, or correct it"
                .to_owned(),
        )
    })?;
    let class = class(group, driver, classes)?;
    if class.driver != driver {
        return Err(failed(format!(
            "Volume CSI driver ({driver}) mismatch with VolumeGroupSnapshotClass ({}) {}",
            class.driver,
            class.name_any()
        )));
    }
    let name = names::group_content(&group.uid().unwrap_or_default());
    let parameters = class.parameters.clone().unwrap_or_default();
    let key = Key::of(group);
    let secret = secrets::snapshot_reference(&parameters, SnapshotPurpose::TakeGroup, &name, Some(&key))
        .map_err(|failure| failed(failure.sentence()))?;
    let mut content = VolumeGroupSnapshotContent::new(
        &name,
        VolumeGroupSnapshotContentSpec {
            deletion_policy: class.deletion_policy.clone(),
            driver: driver.to_owned(),
            source: VolumeGroupSnapshotContentSource {
                volume_handles: Some(handles),
                group_snapshot_handles: None,
            },
            volume_group_snapshot_class_name: Some(class.name_any()),
            volume_group_snapshot_ref: ObjectReference { field_path: None, ..reference(group) },
        },
    );
    content.metadata.annotations =
        secret.map(|secret| secret_marks(&secret, names::GROUP_SECRET_NAME, names::GROUP_SECRET_NAMESPACE));
    Ok(content)
}

fn class(
    group: &VolumeGroupSnapshot,
    driver: &str,
    classes: &[Arc<VolumeGroupSnapshotClass>],
) -> Result<Arc<VolumeGroupSnapshotClass>, Refusal> {
    match group.spec.volume_group_snapshot_class_name.as_deref() {
        Some(name) => {
            let found = classes.iter().find(|class| class.name_any() == name);
            found.cloned().ok_or_else(|| Refusal {
                reason: "GetGroupSnapshotClassFailed",
                message: format!(
                    "failed to get group snapshot class with error VolumeGroupSnapshotClass {name:?} does not exist"
                ),
            })
        }
        None => default_class(classes, driver, "group snapshot").map_err(|message| Refusal {
            reason: "SetDefaultGroupSnapshotClassFailed",
            message: format!("Failed to set default group snapshot class with error {message}"),
        }),
    }
}

/// The objects of a member, as they are made, before they know each other's UIDs.
pub(super) fn member(
    group: &VolumeGroupSnapshot,
    content: &VolumeGroupSnapshotContent,
    volume_handle: &str,
    volume: Option<&PersistentVolume>,
) -> (VolumeSnapshotContent, VolumeSnapshot) {
    let (snapshot_name, content_name) = names::member(&group.uid().unwrap_or_default(), volume_handle);
    let namespace = group.namespace();
    let spec = volume.and_then(|volume| volume.spec.as_ref());
    let handle = content.status.as_ref().and_then(|status| status.volume_group_snapshot_handle.clone());
    let mut marks = BTreeMap::from([(names::GROUP_HANDLE.to_owned(), handle.unwrap_or_default())]);
    // The group's secret is its members' too; it was named with the group's names, which a member has not.
    for (from, to) in [
        (names::GROUP_SECRET_NAME, names::SECRET_NAME),
        (names::GROUP_SECRET_NAMESPACE, names::SECRET_NAMESPACE),
    ] {
        if let Some(value) = content.annotations().get(from) {
            marks.insert(to.to_owned(), value.clone());
        }
    }
    let mut member = VolumeSnapshotContent::new(
        &content_name,
        VolumeSnapshotContentSpec {
            deletion_policy: content.spec.deletion_policy.clone(),
            driver: content.spec.driver.clone(),
            source: VolumeSnapshotContentSource {
                volume_handle: Some(volume_handle.to_owned()),
                snapshot_handle: None,
            },
            source_volume_mode: spec.and_then(|spec| spec.volume_mode.clone()),
            volume_snapshot_class_name: None,
            volume_snapshot_ref: ObjectReference {
                kind: Some("VolumeSnapshot".to_owned()),
                name: Some(snapshot_name.clone()),
                namespace: namespace.clone(),
                ..ObjectReference::default()
            },
        },
    );
    member.metadata.annotations = Some(marks);
    let claim = spec.and_then(|spec| spec.claim_ref.as_ref()?.name.clone()).unwrap_or_default();
    let source = VolumeSnapshotSource {
        persistent_volume_claim_name: Some(claim),
        volume_snapshot_content_name: None,
    };
    let mut snapshot =
        VolumeSnapshot::new(&snapshot_name, VolumeSnapshotSpec { source, volume_snapshot_class_name: None });
    snapshot.metadata.namespace = namespace;
    snapshot.metadata.owner_references = Some(vec![owner(group)]);
    snapshot.metadata.finalizers = Some(vec![names::IN_GROUP.to_owned()]);
    (member, snapshot)
}

/// What the group's content says of a member.
pub(super) fn member_status(info: &VolumeSnapshotInfo, group_handle: &str) -> VolumeSnapshotContentStatus {
    VolumeSnapshotContentStatus {
        snapshot_handle: Some(info.snapshot_handle.clone()),
        creation_time: info.creation_time,
        restore_size: info.restore_size,
        ready_to_use: info.ready_to_use,
        error: None,
        volume_group_snapshot_handle: Some(group_handle.to_owned()),
    }
}

#[cfg(test)]
mod tests;
