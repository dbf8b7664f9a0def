//! What the PV controller can do: each step is one write or one event, and what a write changes is decided here, purely.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use berth_kube::Severity;

use berth_core::names::{
    BETA_STORAGE_PROVISIONER, BIND_COMPLETED, BOUND_BY_CONTROLLER, MIGRATED_TO, PRE_RESIZE_CAPACITY,
    STORAGE_PROVISIONER,
};
use berth_kube::storage;

/// The phase of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VolumePhase {
    Available,
    Bound,
    Released,
    Failed,
}

impl VolumePhase {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Available => "Available",
            Self::Bound => "Bound",
            Self::Released => "Released",
            Self::Failed => "Failed",
        }
    }
}

/// The phase of a claim that has no volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unbound {
    Pending,
    Lost,
}

impl Unbound {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Lost => "Lost",
        }
    }
}

/// Whom an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum About {
    Claim,
    Volume,
}

/// An event that a plan records about the claim or the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedEvent {
    pub(super) about: About,
    pub(super) severity: Severity,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl PlannedEvent {
    pub(super) fn normal(about: About, reason: &'static str, message: impl Into<String>) -> Step {
        Step::Record(Self { about, severity: Severity::Normal, reason, message: message.into() })
    }

    pub(super) fn warning(about: About, reason: &'static str, message: impl Into<String>) -> Step {
        Step::Record(Self { about, severity: Severity::Warning, reason, message: message.into() })
    }
}

/// One write, one event, or one deed outside Kubernetes, about one claim and one volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// The volume points at the claim.
    BindVolume,
    /// The volume is in this phase, with this message.
    VolumePhase(VolumePhase, String),
    /// The claim points at the volume.
    BindClaim,
    /// The claim is bound, and says what it got.
    ClaimBound,
    /// The claim is in this phase and has nothing.
    ClaimUnbound(Unbound),
    /// The claim is of this class.
    AssignClass(String),
    /// The claim is this provisioner's to serve.
    HandOver(String),
    /// The claim's annotation about CSI migration is this.
    MigrateClaim(Option<&'static str>),
    /// The volume's annotation about CSI migration and its finalizers are these.
    MigrateVolume(Option<&'static str>, Vec<String>),
    /// The volume points at no claim; one that a person reserved stays reserved by name.
    UnbindVolume,
    /// An event is recorded about the claim or the volume.
    Record(PlannedEvent),
    /// The directory of a released hostPath volume is removed, and then the volume.
    DeleteHostPath,
    /// A released volume is emptied by a pod.
    Recycle,
    /// The state is contradictory: try again later.
    Refuse(String),
}

/// What a step writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Volume,
    VolumeStatus,
    Claim,
    ClaimStatus,
    Nothing,
}

impl Step {
    pub(super) fn target(&self) -> Target {
        match self {
            Self::BindVolume | Self::MigrateVolume(..) | Self::UnbindVolume => Target::Volume,
            Self::VolumePhase(..) => Target::VolumeStatus,
            Self::BindClaim | Self::AssignClass(_) | Self::HandOver(_) | Self::MigrateClaim(_) => {
                Target::Claim
            }
            Self::ClaimBound | Self::ClaimUnbound(_) => Target::ClaimStatus,
            Self::Record(_) | Self::DeleteHostPath | Self::Recycle | Self::Refuse(_) => Target::Nothing,
        }
    }

    /// Makes the step's change to a volume.
    pub(super) fn change_volume(&self, volume: &mut PersistentVolume, claim: Option<&PersistentVolumeClaim>) {
        match self {
            Self::BindVolume => {
                if let Some(claim) = claim {
                    bind_volume(volume, claim);
                }
            }
            Self::VolumePhase(phase, message) => {
                let status = volume.status.get_or_insert_default();
                if status.phase.as_deref() != Some(phase.as_str()) {
                    status.phase = Some(phase.as_str().to_owned());
                    status.message = (!message.is_empty()).then(|| message.clone());
                }
            }
            Self::UnbindVolume => unbind_volume(volume),
            Self::MigrateVolume(driver, finalizers) => {
                annotate(volume.annotations_mut(), MIGRATED_TO, *driver);
                volume.metadata.finalizers = (!finalizers.is_empty()).then(|| finalizers.clone());
            }
            _ => {}
        }
        drop_empty(&mut volume.metadata);
    }

    /// Makes the step's change to a claim.
    pub(super) fn change_claim(&self, claim: &mut PersistentVolumeClaim, volume: Option<&PersistentVolume>) {
        match self {
            Self::BindClaim => {
                if let Some(volume) = volume {
                    bind_claim(claim, volume);
                }
            }
            Self::ClaimBound => {
                if let Some(volume) = volume {
                    claim_bound(claim, volume);
                }
            }
            Self::ClaimUnbound(phase) => {
                let status = claim.status.get_or_insert_default();
                status.phase = Some(phase.as_str().to_owned());
                status.access_modes = None;
                status.capacity = None;
                status.current_volume_attributes_class_name = None;
            }
            Self::AssignClass(class) => {
                claim.spec.get_or_insert_default().storage_class_name = Some(class.clone());
            }
            Self::HandOver(provisioner) => {
                let annotations = claim.annotations_mut();
                if annotations.get(STORAGE_PROVISIONER) != Some(provisioner) {
                    annotate(annotations, STORAGE_PROVISIONER, Some(provisioner));
                    annotate(annotations, BETA_STORAGE_PROVISIONER, Some(provisioner));
                }
            }
            Self::MigrateClaim(driver) => annotate(claim.annotations_mut(), MIGRATED_TO, *driver),
            _ => {}
        }
        drop_empty(&mut claim.metadata);
    }
}

/// No annotations and an empty list of them are the same to everybody but a comparison.
fn drop_empty(meta: &mut ObjectMeta) {
    if meta.annotations.as_ref().is_some_and(BTreeMap::is_empty) {
        meta.annotations = None;
    }
}

fn annotate(annotations: &mut BTreeMap<String, String>, name: &str, value: Option<&str>) {
    match value {
        Some(value) => annotations.insert(name.to_owned(), value.to_owned()),
        None => annotations.remove(name),
    };
}

fn bind_volume(volume: &mut PersistentVolume, claim: &PersistentVolumeClaim) {
    // A volume that already named the claim was reserved for it by a person or a provisioner.
    if !storage::refers_to(volume, claim) {
        let annotations = volume.annotations_mut();
        if !annotations.contains_key(BOUND_BY_CONTROLLER) {
            annotate(annotations, BOUND_BY_CONTROLLER, Some("yes"));
        }
    }
    let known = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let same = known.is_some_and(|known| {
        (&known.name, &known.namespace, &known.uid)
            == (&claim.metadata.name, &claim.metadata.namespace, &claim.metadata.uid)
    });
    if !same {
        volume.spec.get_or_insert_default().claim_ref = Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolumeClaim".to_owned()),
            name: claim.metadata.name.clone(),
            namespace: claim.metadata.namespace.clone(),
            uid: claim.metadata.uid.clone(),
            resource_version: claim.metadata.resource_version.clone(),
            field_path: None,
        });
    }
}

fn unbind_volume(volume: &mut PersistentVolume) {
    if volume.annotations_mut().remove(BOUND_BY_CONTROLLER).is_some() {
        volume.spec.get_or_insert_default().claim_ref = None;
    } else if let Some(reference) = volume.spec.as_mut().and_then(|spec| spec.claim_ref.as_mut()) {
        reference.uid = None;
    }
}

fn bind_claim(claim: &mut PersistentVolumeClaim, volume: &PersistentVolume) {
    let name = volume.name_any();
    if storage::volume_name(claim) != name {
        claim.spec.get_or_insert_default().volume_name = Some(name);
        if !claim.annotations().contains_key(BOUND_BY_CONTROLLER) {
            annotate(claim.annotations_mut(), BOUND_BY_CONTROLLER, Some("yes"));
        }
    }
    if !claim.annotations().contains_key(BIND_COMPLETED) {
        annotate(claim.annotations_mut(), BIND_COMPLETED, Some("yes"));
    }
}

fn claim_bound(claim: &mut PersistentVolumeClaim, volume: &PersistentVolume) {
    let Some(spec) = volume.spec.as_ref() else { return };
    let before_resize = volume.annotations().get(PRE_RESIZE_CAPACITY);
    let status = claim.status.get_or_insert_default();
    let before = status.phase.replace("Bound".to_owned());
    if status.access_modes != spec.access_modes {
        status.access_modes.clone_from(&spec.access_modes);
    }
    if before.as_deref() == Some("Bound") {
        // From here on the sizes may differ on purpose: the filesystem is grown after the volume.
        return;
    }
    if let Some(size) = before_resize.filter(|size| size.parse::<berth_core::Quantity>().is_ok()) {
        let capacity = status.capacity.get_or_insert_default();
        capacity.insert("storage".to_owned(), Quantity(size.clone()));
    } else if storage::bytes(status.capacity.as_ref()) != storage::bytes(spec.capacity.as_ref()) {
        status.capacity.clone_from(&spec.capacity);
    }
    // The resizer owns the field once the claim is bound.
    if before.as_deref().is_none_or(|phase| phase.is_empty() || phase == "Pending") {
        status.current_volume_attributes_class_name.clone_from(&spec.volume_attributes_class_name);
    }
}
