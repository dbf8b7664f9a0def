//! How many pods to make, which to delete first, and what the status says. Pure.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use berth_kube::selectors::labels;
use berth_kube::storage;

use crate::workloads::pods::{Availability, BURST, is_ready, nonzero, ready_since, seconds_to_available};

/// What to do about a set's pods.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    Nothing,
    Create(usize),
    Delete(Vec<Arc<Pod>>),
}

/// What to do, given the set's active pods and how many ready relatives each has on its node.
pub(super) fn plan(
    set: &ReplicaSet,
    active: &[Arc<Pod>],
    related: &HashMap<String, usize>,
    now: Timestamp,
) -> Step {
    let wanted = usize::try_from(wanted(set)).unwrap_or(0);
    match active.len().cmp(&wanted) {
        Ordering::Equal => Step::Nothing,
        Ordering::Less => Step::Create((wanted - active.len()).min(BURST)),
        Ordering::Greater => {
            let mut pods = active.to_vec();
            pods.sort_by(|a, b| first_to_go(a, b, related, now));
            pods.truncate((active.len() - wanted).min(BURST));
            Step::Delete(pods)
        }
    }
}

/// How many pods a set should have.
pub(super) fn wanted(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

/// Orders pods by how little is lost with them: without a node, pending, not ready, cheap, crowded, young.
pub(super) fn first_to_go(a: &Pod, b: &Pod, related: &HashMap<String, usize>, now: Timestamp) -> Ordering {
    let crowd = |pod: &Pod| related.get(storage::node_of_pod(pod)).copied().unwrap_or(0);
    by_state(a, b)
        .then_with(|| cost(a).cmp(&cost(b)))
        .then_with(|| crowd(b).cmp(&crowd(a)))
        .then_with(|| match (ready_since(a), ready_since(b)) {
            (Some(x), Some(y)) => younger(x, y, a, b, now),
            _ => Ordering::Equal,
        })
        .then_with(|| restarts(b).cmp(&restarts(a)))
        .then_with(|| match (created(a), created(b)) {
            (Some(x), Some(y)) => younger(x, y, a, b, now),
            (x, y) => x.cmp(&y),
        })
}

/// Orders the pods of a Job in the same way, but what a pod's deletion costs does not count, nor how many others are on its
/// node, and of two ages the smaller one is first, however close they are.
pub(in crate::workloads) fn first_of_job_to_go(a: &Pod, b: &Pod) -> Ordering {
    by_state(a, b)
        .then_with(|| match (ready_since(a), ready_since(b)) {
            (Some(x), Some(y)) => y.cmp(&x),
            _ => Ordering::Equal,
        })
        .then_with(|| restarts(b).cmp(&restarts(a)))
        .then_with(|| match (created(a), created(b)) {
            (Some(x), Some(y)) => y.cmp(&x),
            (x, y) => x.cmp(&y),
        })
}

/// Pods without a node, pending and not ready are first.
fn by_state(a: &Pod, b: &Pod) -> Ordering {
    let assigned = |pod: &Pod| !storage::node_of_pod(pod).is_empty();
    let phase = |pod: &Pod| match storage::phase_of_pod(pod) {
        "Pending" => 0,
        "Unknown" => 1,
        _ => 2,
    };
    let state = |pod: &Pod| (assigned(pod), phase(pod), is_ready(pod));
    state(a).cmp(&state(b))
}

/// The younger goes first; those of about the same age (by powers of two) in no particular order.
fn younger(x: Timestamp, y: Timestamp, a: &Pod, b: &Pod, now: Timestamp) -> Ordering {
    if x == y {
        return Ordering::Equal;
    }
    let age = |time: Timestamp| {
        let seconds = u64::try_from(now.duration_since(time).as_nanos().max(0)).unwrap_or(u64::MAX);
        seconds.checked_ilog2().map_or(0, |power| power + 1)
    };
    age(x).cmp(&age(y)).then_with(|| a.uid().cmp(&b.uid()))
}

fn created(pod: &Pod) -> Option<Timestamp> {
    pod.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

fn cost(pod: &Pod) -> i32 {
    pod.annotations()
        .get(berth_core::names::POD_DELETION_COST)
        .and_then(|cost| cost.parse().ok())
        .unwrap_or(0)
}

fn restarts(pod: &Pod) -> i32 {
    let statuses =
        pod.status.as_ref().and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
    statuses.iter().map(|status| status.restart_count).max().unwrap_or(0)
}

/// The status of a set, and in how many seconds it changes by itself because a pod was ready for long enough.
pub(super) fn status(
    set: &ReplicaSet,
    active: &[Arc<Pod>],
    terminating: usize,
    failure: Option<&(String, String)>,
    now: Timestamp,
) -> (ReplicaSetStatus, Option<i64>) {
    let spec = set.spec.clone().unwrap_or_default();
    let minimum = spec.min_ready_seconds.unwrap_or(0);
    let template = spec.template.and_then(|template| template.metadata).and_then(|meta| meta.labels);
    let (mut labelled, mut availability) = (0, Availability::default());
    for pod in active {
        let have = labels(pod.metadata.labels.as_ref());
        if template.iter().flatten().all(|(key, value)| have.get(key) == Some(value)) {
            labelled += 1;
        }
        availability.count(seconds_to_available(pod, minimum, now));
    }
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let status = ReplicaSetStatus {
        replicas: count(active.len()),
        fully_labeled_replicas: nonzero(labelled),
        ready_replicas: nonzero(availability.ready),
        available_replicas: nonzero(availability.available),
        terminating_replicas: Some(count(terminating)),
        observed_generation: set.metadata.generation,
        conditions: conditions(set, failure, now),
    };
    (status, availability.next)
}

/// Reason and message of a failure to make or delete pods become a condition that goes when the failure does.
fn conditions(
    set: &ReplicaSet,
    failure: Option<&(String, String)>,
    now: Timestamp,
) -> Option<Vec<ReplicaSetCondition>> {
    let known = set.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    let (old, mut conditions): (Vec<_>, Vec<_>) =
        known.into_iter().partition(|known| known.type_ == "ReplicaFailure");
    if let Some((reason, message)) = failure {
        let same = old.into_iter().find(|old| old.reason.as_ref() == Some(reason));
        conditions.push(same.unwrap_or_else(|| ReplicaSetCondition {
            type_: "ReplicaFailure".to_owned(),
            status: "True".to_owned(),
            reason: Some(reason.clone()),
            message: Some(message.clone()),
            last_transition_time: Some(Time(now)),
        }));
    }
    (!conditions.is_empty()).then_some(conditions)
}
