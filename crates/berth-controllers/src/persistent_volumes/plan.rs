//! Decides what to do about one claim ([`plan_claim`]) or one volume ([`plan_volume`]), from what was observed of it.
//!
//! A claim that names no class is decided in `plan_free_claim`: a free volume that fits comes first, then the default
//! class, and without either the claim stays Pending. The API server gives new claims the default class before they come
//! here.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;

use super::names;
use super::step::{About, PlannedEvent, Step, Unbound, VolumePhase};
use berth_core::names::events;
use berth_core::names::{
    BIND_COMPLETED, BOUND_BY_CONTROLLER, HOST_PATH_PLUGIN, IN_TREE_PLUGIN_PREFIX, MIGRATED_TO,
    PROVISIONED_BY, SELECTED_NODE, csi_driver_of_plugin,
};
use berth_kube::storage;

/// What there is to know about a claim.
#[derive(Clone, Copy)]
pub(super) struct ObservedClaim<'a> {
    pub(super) claim: &'a PersistentVolumeClaim,
    /// The volume it names, or, if it names none, the one that was found for it.
    pub(super) volume: Option<&'a PersistentVolume>,
    /// The class it asks for, if there is one of that name.
    pub(super) class: Option<&'a StorageClass>,
    /// The class that claims without a class get.
    pub(super) default_class: Option<&'a str>,
    /// The pods that use it and have no node yet.
    pub(super) unscheduled: &'a [String],
}

/// What to do about a claim.
pub(super) fn plan_claim(observed: &ObservedClaim<'_>) -> Vec<Step> {
    let mut steps: Vec<Step> = names::migration_of_claim(observed.claim).into_iter().collect();
    let completed = observed.claim.annotations().contains_key(BIND_COMPLETED);
    let named = !storage::volume_name(observed.claim).is_empty();
    steps.extend(match (completed, named) {
        (false, false) => plan_free_claim(observed),
        (false, true) => plan_reserved_claim(observed),
        (true, _) => plan_bound_claim(observed),
    });
    steps
}

/// A claim that takes any volume.
fn plan_free_claim(observed: &ObservedClaim<'_>) -> Vec<Step> {
    if observed.volume.is_some() {
        return bind();
    }
    if let (false, Some(class)) = (has_class(observed.claim), observed.default_class) {
        // The changed claim comes by again.
        return vec![Step::AssignClass(class.to_owned())];
    }
    if is_delayed(observed.class) && !observed.claim.annotations().contains_key(SELECTED_NODE) {
        return vec![wait_for_consumer(observed.unscheduled), Step::ClaimUnbound(Unbound::Pending)];
    }
    if storage::class_of_claim(observed.claim).is_empty() {
        let message = "no persistent volumes available for this claim and no storage class is set";
        return vec![
            PlannedEvent::normal(About::Claim, events::FAILED_BINDING, message),
            Step::ClaimUnbound(Unbound::Pending),
        ];
    }
    plan_provisioning(observed)
}

pub(super) fn wait_for_consumer(pods: &[String]) -> Step {
    match pods {
        [] => PlannedEvent::normal(
            About::Claim,
            events::WAIT_FOR_FIRST_CONSUMER,
            "waiting for first consumer to be created before binding",
        ),
        [pod] => PlannedEvent::normal(
            About::Claim,
            events::WAIT_FOR_POD_SCHEDULED,
            format!("waiting for pod {pod} to be scheduled"),
        ),
        pods => PlannedEvent::normal(
            About::Claim,
            events::WAIT_FOR_POD_SCHEDULED,
            format!("waiting for pods {} to be scheduled", pods.join(",")),
        ),
    }
}

fn plan_provisioning(observed: &ObservedClaim<'_>) -> Vec<Step> {
    let failed =
        |message: String| vec![PlannedEvent::warning(About::Claim, events::PROVISIONING_FAILED, message)];
    let Some(class) = observed.class else {
        return failed(format!(
            "storageclass.storage.k8s.io {:?} not found: create it, or delete the claim and name another class",
            storage::class_of_claim(observed.claim)
        ));
    };
    let provisioner = csi_driver_of_plugin(&class.provisioner).unwrap_or(&class.provisioner);
    if provisioner.starts_with(IN_TREE_PLUGIN_PREFIX) {
        return failed(format!(
            "no volume plugin matched name: {provisioner}; class {:?} makes no volumes, so one that fits the claim must be created by hand",
            class.name_any()
        ));
    }
    let message = format!(
        "Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by the \
         system administrator. If volume creation is delayed, please verify that the provisioner is running and \
         correctly registered."
    );
    let mut steps = vec![Step::HandOver(provisioner.to_owned())];
    if provisioner != class.provisioner {
        steps.push(Step::MigrateClaim(csi_driver_of_plugin(&class.provisioner)));
    }
    steps.push(PlannedEvent::normal(About::Claim, events::EXTERNAL_PROVISIONING, message));
    steps
}

/// A claim that wants one particular volume.
fn plan_reserved_claim(observed: &ObservedClaim<'_>) -> Vec<Step> {
    let pending = Step::ClaimUnbound(Unbound::Pending);
    let Some(volume) = observed.volume else {
        let message = format!(
            "waiting for persistent volume {:?}, which this claim names and which does not exist",
            storage::volume_name(observed.claim)
        );
        return vec![PlannedEvent::normal(About::Claim, events::FAILED_BINDING, message), pending];
    };
    let name = volume.name_any();
    let Some(owner) = claim_ref(volume) else {
        return match why_unfit(volume, observed.claim) {
            None => bind(),
            Some(why) => {
                let message = format!("Cannot bind to requested volume {name:?}: {why}");
                vec![PlannedEvent::warning(About::Claim, events::VOLUME_MISMATCH, message), pending]
            }
        };
    };
    if storage::refers_to(volume, observed.claim) {
        return bind();
    }
    let taken = PlannedEvent::warning(
        About::Claim,
        events::FAILED_BINDING,
        format!("volume {name:?} already bound to a different claim."),
    );
    if observed.claim.annotations().contains_key(BOUND_BY_CONTROLLER) {
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        let owner = format!("{}/{}", text(&owner.namespace), text(&owner.name));
        return vec![taken, Step::Refuse(format!("volume {name:?} is claimed by {owner:?}"))];
    }
    vec![taken, pending]
}

/// A claim whose binding was finished once.
fn plan_bound_claim(observed: &ObservedClaim<'_>) -> Vec<Step> {
    if storage::volume_name(observed.claim).is_empty() {
        let message = "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!";
        return lost(observed.claim, events::CLAIM_LOST, message);
    }
    let Some(volume) = observed.volume else {
        let message = "Bound claim has lost its PersistentVolume. Data on the volume is lost!";
        return lost(observed.claim, events::CLAIM_LOST, message);
    };
    match claim_ref(volume) {
        Some(owner) if owner.uid != observed.claim.metadata.uid => {
            let message = "Two claims are bound to the same volume, this one is bound incorrectly";
            lost(observed.claim, events::CLAIM_MISBOUND, message)
        }
        _ => bind(),
    }
}

fn lost(claim: &PersistentVolumeClaim, reason: &'static str, message: &str) -> Vec<Step> {
    if claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Lost") {
        return Vec::new();
    }
    vec![Step::ClaimUnbound(Unbound::Lost), PlannedEvent::warning(About::Claim, reason, message)]
}

/// The four writes of a binding; the volume's first, so that a crash leaves it promised rather than free.
fn bind() -> Vec<Step> {
    vec![
        Step::BindVolume,
        Step::VolumePhase(VolumePhase::Bound, String::new()),
        Step::BindClaim,
        Step::ClaimBound,
    ]
}

/// What to do about a volume; `claim` is the one it points at, if that still exists (by uid).
pub(super) fn plan_volume(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> Vec<Step> {
    let mut steps = Vec::new();
    if let Some((driver, finalizers)) = names::migration_of_volume(volume) {
        steps.push(Step::MigrateVolume(driver, finalizers));
    }
    let Some(_) = bound_uid(volume) else {
        steps.push(Step::VolumePhase(VolumePhase::Available, String::new()));
        return steps;
    };
    let Some(claim) = claim else {
        steps.extend(release(volume));
        return steps;
    };
    let name = volume.name_any();
    match storage::volume_name(claim) {
        "" if is_block(volume_mode(volume)) != is_block(claim_mode(claim)) => {
            let claim_name = claim.name_any();
            steps.push(PlannedEvent::warning(About::Volume, events::VOLUME_MISMATCH, format!("Cannot bind PersistentVolume to requested PersistentVolumeClaim {claim_name:?} due to incompatible volumeMode.")));
            steps.push(PlannedEvent::warning(About::Claim, events::VOLUME_MISMATCH, format!("Cannot bind PersistentVolume {name:?} to requested PersistentVolumeClaim due to incompatible volumeMode.")));
        }
        // The claim's turn finishes the binding.
        "" => {}
        other if other == name => steps.push(Step::VolumePhase(VolumePhase::Bound, String::new())),
        _ if volume.annotations().contains_key(PROVISIONED_BY)
            && names::reclaim_policy(volume) == "Delete" =>
        {
            // Made for this claim, which found another volume meanwhile.
            steps.extend(release(volume));
        }
        _ => {
            steps.push(Step::UnbindVolume);
            steps.push(Step::VolumePhase(VolumePhase::Available, String::new()));
        }
    }
    steps
}

/// The claim of a volume is gone.
fn release(volume: &PersistentVolume) -> Vec<Step> {
    let mut steps = Vec::new();
    // A failure stays visible while the reclaiming is tried again.
    if !matches!(phase(volume), "Released" | "Failed") {
        steps.push(Step::VolumePhase(VolumePhase::Released, String::new()));
    }
    if volume.annotations().get(MIGRATED_TO).is_some_and(|driver| !driver.is_empty()) {
        return steps;
    }
    match names::reclaim_policy(volume) {
        "Retain" => {}
        "Recycle" => steps.push(Step::Recycle),
        "Delete" => match deleter(volume) {
            Deleter::External => {}
            Deleter::HostPath => steps.push(Step::DeleteHostPath),
            Deleter::Unknown(why) => steps.extend(fail(volume, events::VOLUME_FAILED_DELETE, why)),
        },
        _ => {
            let message = "Volume has unrecognized PersistentVolumeReclaimPolicy";
            steps.extend(fail(volume, "VolumeUnknownReclaimPolicy", message.to_owned()));
        }
    }
    steps
}

/// Says once, in the volume's status and as an event, why it could not be reclaimed.
pub(super) fn fail(volume: &PersistentVolume, reason: &'static str, message: String) -> Vec<Step> {
    if phase(volume) == "Failed" {
        return Vec::new();
    }
    let event = PlannedEvent::warning(About::Volume, reason, message.clone());
    vec![Step::VolumePhase(VolumePhase::Failed, message), event]
}

enum Deleter {
    External,
    HostPath,
    Unknown(String),
}

fn deleter(volume: &PersistentVolume) -> Deleter {
    let name = volume.name_any();
    match volume.annotations().get(PROVISIONED_BY).map(String::as_str) {
        Some(HOST_PATH_PLUGIN) => return Deleter::HostPath,
        Some(plugin) if csi_driver_of_plugin(plugin).is_some() => return Deleter::External,
        Some(plugin) if plugin.starts_with(IN_TREE_PLUGIN_PREFIX) => {
            return Deleter::Unknown(format!("no volume plugin matched name: {plugin}"));
        }
        Some(plugin) if !plugin.is_empty() => return Deleter::External,
        _ => {}
    }
    match &volume.spec {
        Some(spec) if spec.csi.is_some() => Deleter::External,
        Some(spec) if spec.host_path.is_some() => Deleter::HostPath,
        _ => Deleter::Unknown(format!(
            "error getting deleter volume plugin for volume {name:?}: no volume plugin matched"
        )),
    }
}

/// Whether a volume may be emptied or deleted: the claim it was bound to is gone, or bound to another volume.
pub(super) fn is_released(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> bool {
    let Some(uid) = bound_uid(volume) else { return false };
    match claim.filter(|claim| claim.metadata.uid.as_deref() == Some(uid)) {
        None => true,
        Some(claim) => {
            let bound_to = storage::volume_name(claim);
            !bound_to.is_empty() && bound_to != volume.name_any()
        }
    }
}

/// Why a volume that a claim names does not fit it; labels do not matter then.
fn why_unfit(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<String> {
    if volume.metadata.deletion_timestamp.is_some() {
        return Some(format!("the volume is marked for deletion {:?}", volume.name_any()));
    }
    let why = if storage::capacity(volume) < storage::requested(claim) {
        "requested PV is too small"
    } else if storage::class_of_volume(volume) != storage::class_of_claim(claim) {
        "storageClassName does not match"
    } else if volume_attributes_class(volume) != claim_attributes_class(claim) {
        "volumeAttributesClassName does not match"
    } else if is_block(volume_mode(volume)) != is_block(claim_mode(claim)) {
        "incompatible volumeMode"
    } else if !AccessModes::of_volume(volume).contains(AccessModes::of_claim(claim)) {
        "incompatible accessMode"
    } else {
        return None;
    };
    Some(why.to_owned())
}

/// Whether a claim says what class it wants, be it none.
pub(super) fn has_class(claim: &PersistentVolumeClaim) -> bool {
    claim.annotations().contains_key(berth_core::names::BETA_STORAGE_CLASS)
        || claim.spec.as_ref().is_some_and(|spec| spec.storage_class_name.is_some())
}

/// Whether claims of a class wait for the scheduler to choose a node.
pub(super) fn is_delayed(class: Option<&StorageClass>) -> bool {
    class.and_then(|class| class.volume_binding_mode.as_deref()) == Some("WaitForFirstConsumer")
}

/// The claim a volume points at.
pub(super) fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref())
}

/// The uid of the claim a volume was bound to; none if it is only reserved.
pub(super) fn bound_uid(volume: &PersistentVolume) -> Option<&str> {
    claim_ref(volume)?.uid.as_deref().filter(|uid| !uid.is_empty())
}

/// The phase in a volume's status; empty if it has none yet.
pub(super) fn phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Whether a volume mode is that of a raw device.
pub(super) fn is_block(mode: Option<&str>) -> bool {
    mode == Some("Block")
}

/// The mode of a volume's spec (`Filesystem` or `Block`), if it says one.
pub(super) fn volume_mode(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref())
}

/// The mode a claim asks for.
pub(super) fn claim_mode(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref())
}

/// A volume's VolumeAttributesClass; empty for none.
pub(super) fn volume_attributes_class(volume: &PersistentVolume) -> &str {
    volume.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

/// The VolumeAttributesClass a claim asks for; empty for none.
pub(super) fn claim_attributes_class(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

/// A set of access modes, ordered by how many they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct AccessModes {
    count: u32,
    bits: u8,
}

impl AccessModes {
    fn new(modes: Option<&Vec<String>>) -> Self {
        let bits = modes.into_iter().flatten().fold(0, |bits, mode| {
            bits | match mode.as_str() {
                "ReadWriteOnce" => 1,
                "ReadOnlyMany" => 2,
                "ReadWriteMany" => 4,
                "ReadWriteOncePod" => 8,
                _ => 0,
            }
        });
        Self { count: u8::count_ones(bits), bits }
    }

    pub(super) fn of_volume(volume: &PersistentVolume) -> Self {
        Self::new(volume.spec.as_ref().and_then(|spec| spec.access_modes.as_ref()))
    }

    pub(super) fn of_claim(claim: &PersistentVolumeClaim) -> Self {
        Self::new(claim.spec.as_ref().and_then(|spec| spec.access_modes.as_ref()))
    }

    pub(super) fn contains(self, other: Self) -> bool {
        self.bits & other.bits == other.bits
    }
}
