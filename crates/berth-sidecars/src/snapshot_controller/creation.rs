//! The contents of snapshots and of groups, and the objects of a group's members: which class, which volumes, which
//! secret; decided without a write.

use berth_core::names::events;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use berth_kube::{Key, Kind, reference, selectors};
use k8s_openapi::api::core::v1::{
    Node, ObjectReference, PersistentVolume, PersistentVolumeClaim, SecretReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource as _, ResourceExt as _};

use crate::secrets::{self, SnapshotPurpose};
use crate::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent,
    VolumeGroupSnapshotContentSource, VolumeGroupSnapshotContentSpec, VolumeSnapshot, VolumeSnapshotClass,
    VolumeSnapshotContent, VolumeSnapshotContentSource, VolumeSnapshotContentSpec,
    VolumeSnapshotContentStatus, VolumeSnapshotInfo, VolumeSnapshotSource, VolumeSnapshotSpec, member_names,
    names,
};

/// Why a content cannot be made: the event's reason, and what a person should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// A class of snapshots, or of groups of them.
pub(super) trait Class: Kind {
    /// The annotation of the default class.
    const DEFAULT: &'static str;
    /// What is taken by it.
    const WHAT: &'static str;
    /// Reason and beginning of the message if the class that is named does not exist.
    const NOT_FOUND: (&'static str, &'static str);
    /// The same if none is named and there is no default.
    const NO_DEFAULT: (&'static str, &'static str);

    fn driver(&self) -> &str;
}

impl Class for VolumeSnapshotClass {
    const DEFAULT: &'static str = names::DEFAULT_CLASS;
    const WHAT: &'static str = "snapshot";
    const NOT_FOUND: (&'static str, &'static str) =
        (events::GET_SNAPSHOT_CLASS_FAILED, "Failed to get snapshot class with error");
    const NO_DEFAULT: (&'static str, &'static str) =
        (events::SET_DEFAULT_SNAPSHOT_CLASS_FAILED, "Failed to set default snapshot class with error");

    fn driver(&self) -> &str {
        &self.driver
    }
}

impl Class for VolumeGroupSnapshotClass {
    const DEFAULT: &'static str = names::DEFAULT_GROUP_CLASS;
    const WHAT: &'static str = "group snapshot";
    const NOT_FOUND: (&'static str, &'static str) =
        (events::GET_GROUP_SNAPSHOT_CLASS_FAILED, "failed to get group snapshot class with error");
    const NO_DEFAULT: (&'static str, &'static str) = (
        events::SET_DEFAULT_GROUP_SNAPSHOT_CLASS_FAILED,
        "Failed to set default group snapshot class with error",
    );

    fn driver(&self) -> &str {
        &self.driver
    }
}

/// The class that is named, or the one default class of a driver.
fn class<C: Class>(named: Option<&str>, driver: &str, classes: &[Arc<C>]) -> Result<Arc<C>, Refusal> {
    let refusal = |(reason, beginning): (&'static str, &str), wrong: String| Refusal {
        reason,
        message: format!("{beginning} {wrong}"),
    };
    if let Some(name) = named {
        let found = classes.iter().find(|class| class.name_any() == name);
        return found
            .cloned()
            .ok_or_else(|| refusal(C::NOT_FOUND, format!("{} {name:?} does not exist", C::kind(&()))));
    }
    let is_default =
        |class: &&Arc<C>| class.annotations().get(C::DEFAULT).is_some_and(|value| value == "true");
    let chosen: Vec<&Arc<C>> =
        classes.iter().filter(is_default).filter(|class| class.driver() == driver).collect();
    match chosen.as_slice() {
        [class] => Ok((*class).clone()),
        [] => Err(refusal(
            C::NO_DEFAULT,
            format!(
                "cannot find default {} class for driver {driver}: name one in the spec, or mark one as default",
                C::WHAT
            ),
        )),
        several => {
            let mut all: Vec<String> = several.iter().map(|class| class.name_any()).collect();
            all.sort();
            let (count, all) = (all.len(), all.join(", "));
            let text = format!("{count} default snapshot classes were found: {all}; leave only one");
            Err(refusal(C::NO_DEFAULT, text))
        }
    }
}

/// The volume of a claim, if a snapshot can be taken of it: bound both ways, and of a CSI driver.
fn volume_of<'a>(
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

/// What is known when the content of a snapshot is to be made.
pub(super) struct ContentInputs<'a> {
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

/// The content to make for a snapshot.
pub(super) fn content(inputs: &ContentInputs<'_>) -> Result<VolumeSnapshotContent, Refusal> {
    let failed = |message: String| Refusal {
        reason: events::SNAPSHOT_CONTENT_CREATION_FAILED,
        message: format!("Failed to create snapshot content with error {message}"),
    };
    let snapshot = inputs.snapshot;
    let wanted = snapshot.spec.source.persistent_volume_claim_name.clone().unwrap_or_default();
    let claim = inputs.claim.ok_or_else(|| failed(format!("the PVC {wanted} does not exist")))?;
    let protected = berth_kube::finalizers::has(claim, names::CLAIM);
    if claim.metadata.deletion_timestamp.is_some() && !protected {
        return Err(failed(format!(
            "cannot add finalizer on claim {wanted} because it is being deleted: no snapshot can be taken of it any more"
        )));
    }
    let (volume, driver, handle) = volume_of(claim, inputs.volume).map_err(failed)?;
    let named = snapshot.spec.volume_snapshot_class_name.as_deref();
    let class = class(named, driver, inputs.classes)?;
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
            source_volume_mode: mode.filter(|_| inputs.keep_mode),
            volume_snapshot_class_name: Some(class.name_any()),
            volume_snapshot_ref: ObjectReference { field_path: None, ..reference(snapshot) },
        },
    );
    content.metadata.annotations =
        secret.map(|secret| secret_marks(&secret, names::SECRET_NAME, names::SECRET_NAMESPACE));
    let node = inputs.nodes.and_then(|nodes| managed_by(volume, nodes));
    content.metadata.labels = node.map(|node| BTreeMap::from([(names::MANAGED_BY.to_owned(), node)]));
    Ok(content)
}

/// Annotations that name a secret.
fn secret_marks(secret: &SecretReference, name: &str, namespace: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        (name.to_owned(), secret.name.clone().unwrap_or_default()),
        (namespace.to_owned(), secret.namespace.clone().unwrap_or_default()),
    ])
}

/// A claim and its volume.
pub(super) type Chosen = (Arc<PersistentVolumeClaim>, Option<Arc<PersistentVolume>>);

/// The node whose snapshotter is to take a group: the first by name that has all members. Snapshots of one instant can be
/// taken on one node only.
fn managed_together(claims: &[Chosen], nodes: &[Arc<Node>]) -> Result<Option<String>, String> {
    let mut common: Option<BTreeSet<String>> = None;
    let mut places = Vec::new();
    for (claim, volume) in claims {
        let affinity =
            volume.as_ref().and_then(|volume| volume.spec.as_ref()?.node_affinity.as_ref()?.required.clone());
        let Some(affinity) = affinity else { continue };
        let has = |node: &&Arc<Node>| {
            let labels = selectors::labels(node.metadata.labels.as_ref());
            selectors::node_selector(&affinity, &node.name_any(), labels)
        };
        let its: BTreeSet<String> = nodes.iter().filter(has).map(|node| node.name_any()).collect();
        if its.is_empty() {
            return Err(format!("no node matches the affinity of the volume of claim {}", claim.name_any()));
        }
        let all = its.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        places.push(format!("{} on {all}", claim.name_any()));
        common = Some(match common {
            Some(known) => known.intersection(&its).cloned().collect(),
            None => its,
        });
    }
    match common {
        Some(common) if common.is_empty() => Err(format!(
            "the selector chooses volumes of several nodes ({}), which cannot be taken at one instant: let it choose claims \
             of one node, or take a snapshot of each claim",
            places.join("; ")
        )),
        common => Ok(common.and_then(|common| common.into_iter().next())),
    }
}

/// The content to make for the claims that a group's selector chose; `nodes` if contents are labelled with them.
pub(super) fn group_content(
    group: &VolumeGroupSnapshot,
    claims: &[Chosen],
    classes: &[Arc<VolumeGroupSnapshotClass>],
    nodes: Option<&[Arc<Node>]>,
) -> Result<VolumeGroupSnapshotContent, Refusal> {
    let failed = |message: String| Refusal {
        reason: events::GROUP_SNAPSHOT_CONTENT_CREATION_FAILED,
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
    let class = class(group.spec.volume_group_snapshot_class_name.as_deref(), driver, classes)?;
    if class.driver != driver {
        return Err(failed(format!(
            "Volume CSI driver ({driver}) mismatch with VolumeGroupSnapshotClass ({}) {}",
            class.driver,
            class.name_any()
        )));
    }
    let node = nodes.map_or(Ok(None), |nodes| managed_together(claims, nodes)).map_err(failed)?;
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
    content.metadata.labels = node.map(|node| BTreeMap::from([(names::MANAGED_BY.to_owned(), node)]));
    Ok(content)
}

/// The objects of a member, as they are made, before they know each other's UIDs.
pub(super) fn member(
    group: &VolumeGroupSnapshot,
    content: &VolumeGroupSnapshotContent,
    volume_handle: &str,
    volume: Option<&PersistentVolume>,
) -> (VolumeSnapshotContent, VolumeSnapshot) {
    let (snapshot_name, content_name) = member_names(&group.uid().unwrap_or_default(), volume_handle);
    let namespace = group.namespace();
    let spec = volume.and_then(|volume| volume.spec.as_ref());
    let handle = content.status.as_ref().and_then(|status| status.volume_group_snapshot_handle.clone());
    let mut annotations = BTreeMap::from([(names::GROUP_HANDLE.to_owned(), handle.unwrap_or_default())]);
    // The group's secret is its members' too; it was named with the group's names, which a member has not.
    for (from, to) in [
        (names::GROUP_SECRET_NAME, names::SECRET_NAME),
        (names::GROUP_SECRET_NAMESPACE, names::SECRET_NAMESPACE),
    ] {
        if let Some(value) = content.annotations().get(from) {
            annotations.insert(to.to_owned(), value.clone());
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
    member.metadata.annotations = Some(annotations);
    // Whoever took the group has its members.
    let node = content.labels().get(names::MANAGED_BY).cloned();
    member.metadata.labels = node.map(|node| BTreeMap::from([(names::MANAGED_BY.to_owned(), node)]));
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

/// The owner reference by which a member belongs to its group.
pub(super) fn owner(group: &VolumeGroupSnapshot) -> OwnerReference {
    OwnerReference {
        api_version: VolumeGroupSnapshot::api_version(&()).into_owned(),
        kind: VolumeGroupSnapshot::kind(&()).into_owned(),
        name: group.name_any(),
        uid: group.uid().unwrap_or_default(),
        ..OwnerReference::default()
    }
}

#[cfg(test)]
mod tests;
