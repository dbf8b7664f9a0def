//! The ReplicaSet of a Deployment's template: its name, its labels, its annotations, its revision.

use std::collections::BTreeMap;

use berth_core::names::{
    DEPLOYMENT_DESIRED_REPLICAS, DEPLOYMENT_MAX_REPLICAS, DEPLOYMENT_REVISION, DEPLOYMENT_REVISION_HISTORY,
    LAST_APPLIED,
};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::plan::{max_surge, wanted};
use crate::workloads::ownership::reference;

const HASH: &str = "pod-template-hash";
/// Annotations that a set does not get from its Deployment.
const OWN: [&str; 6] = [
    LAST_APPLIED,
    DEPLOYMENT_REVISION,
    DEPLOYMENT_REVISION_HISTORY,
    DEPLOYMENT_DESIRED_REPLICAS,
    DEPLOYMENT_MAX_REPLICAS,
    "deprecated.deployment.rollback.to",
];

/// Whether a set has the Deployment's current template.
pub(super) fn is_current(deployment: &Deployment, set: &ReplicaSet) -> bool {
    let Some(wanted) = deployment.spec.as_ref().map(|spec| &spec.template) else { return false };
    let Some(template) = set.spec.as_ref().and_then(|spec| spec.template.as_ref()) else { return false };
    without_hash(template) == without_hash(wanted)
}

fn without_hash(template: &PodTemplateSpec) -> PodTemplateSpec {
    let mut template = template.clone();
    let meta = template.metadata.get_or_insert_default();
    if let Some(labels) = &mut meta.labels {
        labels.remove(HASH);
    }
    meta.labels = meta.labels.take().filter(|labels| !labels.is_empty());
    meta.annotations = meta.annotations.take().filter(|annotations| !annotations.is_empty());
    // A set's template was read back from the server, which may add a null time.
    meta.creation_timestamp = None;
    template
}

/// A short name for a template; `collisions` gives another one should it be taken.
pub(in crate::workloads) fn hash(template: &PodTemplateSpec, collisions: i32) -> String {
    const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let text = serde_json::to_vec(&without_hash(template)).unwrap_or_default();
    let mut hash: u32 = 0x811c_9dc5;
    let salt = if collisions > 0 { collisions.to_le_bytes().to_vec() } else { Vec::new() };
    for byte in text.into_iter().chain(salt) {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    hash.to_string().bytes().map(|digit| char::from(ALPHABET[usize::from(digit) % ALPHABET.len()])).collect()
}

/// The set for the current template.
pub(super) fn new_set(deployment: &Deployment, replicas: i32, revision: i64) -> ReplicaSet {
    let spec = deployment.spec.clone().unwrap_or_default();
    let collisions = deployment.status.as_ref().and_then(|status| status.collision_count).unwrap_or(0);
    let hash = hash(&spec.template, collisions);
    let mut template = spec.template;
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(HASH.to_owned(), hash.clone());
    let labels = labels.clone();
    let mut selector = spec.selector;
    selector.match_labels.get_or_insert_default().insert(HASH.to_owned(), hash.clone());
    let mut name = deployment.name_any();
    name.truncate(253 - 1 - hash.len());
    let mut annotations = inherited(deployment);
    annotations.insert(DEPLOYMENT_REVISION.to_owned(), revision.to_string());
    annotations.extend(sizes(deployment));
    ReplicaSet {
        metadata: ObjectMeta {
            name: Some(format!("{name}-{hash}")),
            namespace: deployment.namespace(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![reference(deployment)]),
            ..ObjectMeta::default()
        },
        spec: Some(ReplicaSetSpec {
            replicas: Some(replicas),
            min_ready_seconds: spec.min_ready_seconds,
            selector,
            template: Some(template),
        }),
        status: None,
    }
}

fn inherited(deployment: &Deployment) -> BTreeMap<String, String> {
    let annotations = deployment.annotations().iter();
    annotations.filter(|(key, _)| !OWN.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// For how many pods a set is judged; distinguishes a change of the Deployment's size from a rollout.
pub(super) fn sizes(deployment: &Deployment) -> [(String, String); 2] {
    let wanted = wanted(deployment);
    [
        (DEPLOYMENT_DESIRED_REPLICAS.to_owned(), wanted.to_string()),
        (DEPLOYMENT_MAX_REPLICAS.to_owned(), (wanted + max_surge(deployment)).to_string()),
    ]
}

/// Brings what the current set inherits up to date: annotations, the time a pod must be ready, and its revision.
pub(super) fn refresh(deployment: &Deployment, set: &mut ReplicaSet, revision_now: i64) {
    let before = revision(&set.metadata);
    let annotations = set.annotations_mut();
    annotations.extend(inherited(deployment));
    if before < revision_now {
        if before > 0 {
            let history = annotations.entry(DEPLOYMENT_REVISION_HISTORY.to_owned()).or_default();
            if !history.is_empty() {
                history.push(',');
            }
            history.push_str(&before.to_string());
        }
        annotations.insert(DEPLOYMENT_REVISION.to_owned(), revision_now.to_string());
    }
    if let (Some(spec), Some(wanted)) = (&mut set.spec, &deployment.spec) {
        spec.min_ready_seconds = wanted.min_ready_seconds.filter(|seconds| *seconds > 0);
    }
}

/// The revision an object has; 0 for none.
pub(super) fn revision(meta: &ObjectMeta) -> i64 {
    number(meta, DEPLOYMENT_REVISION).unwrap_or(0)
}

/// For how many pods a set was last judged.
pub(super) fn desired_annotation(set: &ReplicaSet) -> Option<i32> {
    number(&set.metadata, DEPLOYMENT_DESIRED_REPLICAS).and_then(|number| i32::try_from(number).ok())
}

/// How many pods its Deployment might have had then.
pub(super) fn max_annotation(set: &ReplicaSet) -> Option<i32> {
    number(&set.metadata, DEPLOYMENT_MAX_REPLICAS).and_then(|number| i32::try_from(number).ok())
}

fn number(meta: &ObjectMeta, annotation: &str) -> Option<i64> {
    meta.annotations.as_ref()?.get(annotation)?.parse().ok()
}
