//! The content of a snapshot of a claim: which class, which volume, which secret; decided without a write.

use std::collections::BTreeMap;
use std::sync::Arc;

use berth_kube::{Key, reference, selectors};
use k8s_openapi::api::core::v1::{
    Node, ObjectReference, PersistentVolume, PersistentVolumeClaim, SecretReference,
};
use kube::ResourceExt as _;

use crate::secrets::{self, SnapshotPurpose};
use crate::snapshots::{
    VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, VolumeSnapshotContentSource,
    VolumeSnapshotContentSpec, names,
};

/// Why a content cannot be made: the event's reason, and what a person should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// A class among those of one kind.
pub(super) trait Class {
    fn name(&self) -> String;
    fn driver(&self) -> &str;
    fn is_default(&self) -> bool;
}

impl Class for VolumeSnapshotClass {
    fn name(&self) -> String {
        self.name_any()
    }

    fn driver(&self) -> &str {
        &self.driver
    }

    fn is_default(&self) -> bool {
        self.annotations().get(names::DEFAULT_CLASS).is_some_and(|value| value == "true")
    }
}

/// The one default class of a driver.
pub(super) fn default_class<C: Class>(
    classes: &[Arc<C>],
    driver: &str,
    what: &str,
) -> Result<Arc<C>, String> {
    let mut chosen: Vec<&Arc<C>> =
        classes.iter().filter(|class| class.is_default() && class.driver() == driver).collect();
    match (chosen.pop(), chosen.len()) {
        (Some(class), 0) => Ok(class.clone()),
        (None, _) => Err(format!(
            "cannot find default {what} class for driver {driver}: name one in the spec, or mark one as default"
        )),
        (Some(last), more) => {
            let mut all: Vec<String> = chosen.iter().map(|class| class.name()).collect();
            all.push(last.name());
            all.sort();
            Err(format!(
                "{} default snapshot classes were found: {}; leave only one",
                more + 1,
                all.join(", ")
            ))
        }
    }
}

/// The volume of a claim, if a snapshot can be taken of it: bound both ways, and of a CSI driver.
pub(super) fn volume_of<'a>(
    claim: &PersistentVolumeClaim,
    volume: Option<&'a PersistentVolume>,
) -> Result<(&'a PersistentVolume, &'a str, &'a str), String> {
    let name = claim.name_any();
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return Err(format!("the PVC {name} is not yet bound to a PV, will not attempt to take a snapshot"));
    }
    let Some(volume) = volume else {
        return Err(format!("the PersistentVolume of the PVC {name} does not exist"));
    };
    let back = volume.spec.as_ref().and_then(|spec| spec.claim_ref.clone()).unwrap_or_default();
    let other = back.uid.as_deref().is_some_and(|uid| !uid.is_empty()) && back.uid != claim.uid();
    if back.name.as_ref() != Some(&name) || back.namespace != claim.namespace() || other {
        return Err(format!("the PersistentVolume of the PVC {name} is bound to another claim"));
    }
    match volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()) {
        Some(csi) => Ok((volume, &csi.driver, &csi.volume_handle)),
        None => Err(format!("cannot find CSI PersistentVolumeSource for volume {}", volume.name_any())),
    }
}

/// What is known when a content is to be made.
pub(super) struct Seen<'a> {
    pub(super) snapshot: &'a VolumeSnapshot,
    pub(super) claim: Option<&'a PersistentVolumeClaim>,
    pub(super) volume: Option<&'a PersistentVolume>,
    pub(super) classes: &'a [Arc<VolumeSnapshotClass>],
    pub(super) keep_mode: bool,
    /// The nodes, if contents are labelled with them.
    pub(super) nodes: Option<&'a [Arc<Node>]>,
}

/// The node whose snapshotter is to take snapshots of a volume: the first by name that the volume's affinity chooses.
fn managed_by(volume: &PersistentVolume, nodes: &[Arc<Node>]) -> Option<String> {
    let affinity = volume.spec.as_ref()?.node_affinity.as_ref()?.required.as_ref()?;
    let chosen = nodes.iter().filter(|node| {
        selectors::node_selector(affinity, &node.name_any(), selectors::labels(node.metadata.labels.as_ref()))
    });
    let node = chosen.map(|node| node.name_any()).min();
    if node.is_none() {
        tracing::warn!(
            volume = volume.name_any(),
            "no node matches the volume's affinity; its content gets no label"
        );
    }
    node
}

/// The content to make.
pub(super) fn content(seen: &Seen<'_>) -> Result<VolumeSnapshotContent, Refusal> {
    let failed = |message: String| Refusal {
        reason: "SnapshotContentCreationFailed",
        message: format!("Failed to create snapshot content with error {message}"),
    };
    let snapshot = seen.snapshot;
    let wanted = snapshot.spec.source.persistent_volume_claim_name.clone().unwrap_or_default();
    let claim = seen.claim.ok_or_else(|| failed(format!("the PVC {wanted} does not exist")))?;
    let protected = berth_kube::finalizers::has(claim, names::CLAIM);
    if claim.metadata.deletion_timestamp.is_some() && !protected {
        return Err(failed(format!(
            "cannot add finalizer on claim {wanted} because it is being deleted: no snapshot can be taken of it any more"
        )));
    }
    let (volume, driver, handle) = volume_of(claim, seen.volume).map_err(failed)?;
    let class = class(seen, driver)?;
    if class.driver != driver {
        return Err(failed(format!(
            "VolumeSnapshotClass {} is for driver {}, and the volume of the PVC {wanted} belongs to {driver}",
            class.name_any(),
            class.driver
        )));
    }
    let name = names::content(&snapshot.uid().unwrap_or_default());
    let parameters = class.parameters.clone().unwrap_or_default();
    let key = Key::of(snapshot);
    let secret = secrets::snapshot_reference(&parameters, SnapshotPurpose::Take, &name, Some(&key))
        .map_err(|failure| failed(failure.sentence()))?;
    let mode = volume.spec.as_ref().and_then(|spec| spec.volume_mode.clone());
    let mut content = VolumeSnapshotContent::new(
        &name,
        VolumeSnapshotContentSpec {
            deletion_policy: class.deletion_policy.clone(),
            driver: driver.to_owned(),
            source: VolumeSnapshotContentSource {
                volume_handle: Some(handle.to_owned()),
                snapshot_handle: None,
            },
            source_volume_mode: mode.filter(|_| seen.keep_mode),
            volume_snapshot_class_name: Some(class.name_any()),
            volume_snapshot_ref: ObjectReference { field_path: None, ..reference(snapshot) },
        },
    );
    content.metadata.annotations =
        secret.map(|secret| secret_marks(&secret, names::SECRET_NAME, names::SECRET_NAMESPACE));
    let node = seen.nodes.and_then(|nodes| managed_by(volume, nodes));
    content.metadata.labels = node.map(|node| BTreeMap::from([(names::MANAGED_BY.to_owned(), node)]));
    Ok(content)
}

/// Annotations that name a secret.
pub(super) fn secret_marks(
    secret: &SecretReference,
    name: &str,
    namespace: &str,
) -> BTreeMap<String, String> {
    BTreeMap::from([
        (name.to_owned(), secret.name.clone().unwrap_or_default()),
        (namespace.to_owned(), secret.namespace.clone().unwrap_or_default()),
    ])
}

fn class(seen: &Seen<'_>, driver: &str) -> Result<Arc<VolumeSnapshotClass>, Refusal> {
    match seen.snapshot.spec.volume_snapshot_class_name.as_deref() {
        Some(name) => {
            let found = seen.classes.iter().find(|class| class.name_any() == name);
            found.cloned().ok_or_else(|| Refusal {
                reason: "GetSnapshotClassFailed",
                message: format!(
                    "Failed to get snapshot class with error VolumeSnapshotClass {name:?} does not exist"
                ),
            })
        }
        None => default_class(seen.classes, driver, "snapshot").map_err(|message| Refusal {
            reason: "SetDefaultSnapshotClassFailed",
            message: format!("Failed to set default snapshot class with error {message}"),
        }),
    }
}

#[cfg(test)]
mod tests;
