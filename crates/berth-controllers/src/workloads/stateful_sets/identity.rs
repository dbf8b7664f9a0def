//! What a StatefulSet's pods and claims are called, what their labels are, and who owns the claims. Pure.

use berth_core::names::{CONTROLLER_REVISION_HASH, POD_INDEX, STATEFUL_SET_POD_NAME};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt as _;

use crate::workloads::ownership::reference;
use crate::workloads::pods::from_template;

/// The name of the pod with an ordinal.
pub(super) fn pod_name(set: &StatefulSet, ordinal: i32) -> String {
    format!("{}-{ordinal}", set.name_any())
}

/// The ordinal in the name of a pod of the set; `None` if it is not named as one of its pods.
pub(super) fn ordinal_in(set: &str, pod: &str) -> Option<i32> {
    let digits = pod.strip_prefix(set)?.strip_prefix('-')?;
    let ordinal = digits.parse::<i32>().ok()?;
    (ordinal >= 0 && ordinal.to_string() == digits).then_some(ordinal)
}

/// The ordinals that the set should have.
pub(super) fn ordinals(set: &StatefulSet) -> std::ops::Range<i32> {
    let spec = set.spec.as_ref();
    let start = spec.and_then(|spec| spec.ordinals.as_ref()?.start).unwrap_or(0);
    let count = spec.and_then(|spec| spec.replicas).unwrap_or(1);
    start..start.saturating_add(count)
}

/// The claims of the pod with an ordinal: name of the volume and claim.
pub(super) fn claims(set: &StatefulSet, ordinal: i32) -> Vec<(String, PersistentVolumeClaim)> {
    let Some(spec) = &set.spec else { return Vec::new() };
    let templates = spec.volume_claim_templates.iter().flatten();
    templates
        .map(|template| {
            let volume = template.name_any();
            let mut labels = template.labels().clone();
            labels.extend(spec.selector.match_labels.clone().into_iter().flatten());
            let claim = PersistentVolumeClaim {
                metadata: ObjectMeta {
                    name: Some(format!("{volume}-{}-{ordinal}", set.name_any())),
                    namespace: set.namespace(),
                    labels: Some(labels),
                    annotations: template.metadata.annotations.clone(),
                    finalizers: template.metadata.finalizers.clone(),
                    ..ObjectMeta::default()
                },
                spec: template.spec.clone(),
                status: None,
            };
            (volume, claim)
        })
        .collect()
}

/// Whether a claim of this name is one that the set makes.
pub(super) fn makes_claim(set: &StatefulSet, claim: &str) -> bool {
    let templates = set.spec.iter().flat_map(|spec| spec.volume_claim_templates.iter().flatten());
    templates
        .map(|template| format!("{}-{}", template.name_any(), set.name_any()))
        .any(|prefix| ordinal_in(&prefix, claim).is_some())
}

/// The pod with an ordinal, from the template of a revision.
pub(super) fn new_pod(set: &StatefulSet, template: PodTemplateSpec, revision: &str, ordinal: i32) -> Pod {
    let mut pod = from_template(set, template);
    let name = pod_name(set, ordinal);
    pod.metadata.name = Some(name.clone());
    pod.labels_mut().insert(CONTROLLER_REVISION_HASH.to_owned(), revision.to_owned());
    identify(set, ordinal, &mut pod);
    let spec = pod.spec.get_or_insert_default();
    spec.hostname = Some(name);
    spec.subdomain =
        set.spec.as_ref().and_then(|spec| spec.service_name.clone()).filter(|name| !name.is_empty());
    pod
}

/// Whether a pod has the labels and volumes that its ordinal gives it.
pub(super) fn is_identified(set: &StatefulSet, ordinal: i32, pod: &Pod) -> bool {
    let mut identified = pod.clone();
    identify(set, ordinal, &mut identified);
    identified == *pod
}

/// Gives a pod the labels and volumes of its ordinal.
pub(super) fn identify(set: &StatefulSet, ordinal: i32, pod: &mut Pod) {
    let name = pod_name(set, ordinal);
    let labels = pod.labels_mut();
    labels.insert(STATEFUL_SET_POD_NAME.to_owned(), name);
    labels.insert(POD_INDEX.to_owned(), ordinal.to_string());
    let claims = claims(set, ordinal);
    if claims.is_empty() {
        return;
    }
    let volumes = pod.spec.get_or_insert_default().volumes.get_or_insert_default();
    for (volume, claim) in claims {
        let claim_name = claim.name_any();
        let source = PersistentVolumeClaimVolumeSource { claim_name: claim_name.clone(), read_only: None };
        match volumes.iter_mut().find(|known| known.name == volume) {
            Some(known) => {
                let is_right = known
                    .persistent_volume_claim
                    .as_ref()
                    .is_some_and(|known| known.claim_name == claim_name);
                if !is_right {
                    *known =
                        Volume { name: volume, persistent_volume_claim: Some(source), ..Volume::default() };
                }
            }
            None => volumes.push(Volume {
                name: volume,
                persistent_volume_claim: Some(source),
                ..Volume::default()
            }),
        }
    }
}

/// Whether claims go with the set, and with their pod when the set is scaled down.
fn retention(set: &StatefulSet) -> (bool, bool) {
    let policy = set.spec.as_ref().and_then(|spec| spec.persistent_volume_claim_retention_policy.as_ref());
    let deletes = |policy: Option<&String>| policy.is_some_and(|policy| policy == "Delete");
    (
        deletes(policy.and_then(|policy| policy.when_deleted.as_ref())),
        deletes(policy.and_then(|policy| policy.when_scaled.as_ref())),
    )
}

/// The owners that a claim should have by the retention policy; `pod` is the pod that uses it, if there is one, and
/// `condemned` says that the set does not want that pod any more. A claim that something else controls is not taken.
pub(super) fn owners(
    set: &StatefulSet,
    pod: Option<&Pod>,
    condemned: bool,
    claim: &PersistentVolumeClaim,
) -> Vec<OwnerReference> {
    let is_set =
        |owner: &OwnerReference| owner.kind == "StatefulSet" && Some(&owner.uid) == set.metadata.uid.as_ref();
    let is_pod = |owner: &OwnerReference| {
        owner.kind == "Pod" && pod.is_some_and(|pod| Some(&owner.uid) == pod.metadata.uid.as_ref())
    };
    let known = claim.metadata.owner_references.as_deref().unwrap_or_default();
    let mut owners: Vec<OwnerReference> =
        known.iter().filter(|owner| !is_set(owner) && !is_pod(owner)).cloned().collect();
    if owners.iter().any(|owner| owner.controller == Some(true)) {
        return owners;
    }
    let (with_set, with_pod) = retention(set);
    let wanted = match pod {
        Some(pod) if condemned && with_pod => Some(reference(pod)),
        _ if with_set && !(condemned && with_pod) => Some(reference(set)),
        _ => None,
    };
    // The same reference stays where it was, so that nothing is written for an order.
    if let Some(wanted) = wanted {
        match known.iter().position(|owner| owner.uid == wanted.uid) {
            Some(at) if known.get(at) == Some(&wanted) => owners.insert(at.min(owners.len()), wanted),
            _ => owners.push(wanted),
        }
    }
    owners
}

/// Whether a claim belongs to an earlier pod of this name, with which it will go.
pub(super) fn is_stale(claim: &PersistentVolumeClaim, pod: &str) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    owners.into_iter().any(|owner| owner.kind == "Pod" && owner.name == pod)
}
