//! How many pods to make, which to delete first, and what the status says. Pure.

use std::cmp::{Ordering, Reverse};
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
            pods.sort_by_cached_key(|pod| rank(pod, related, now));
            pods.truncate((active.len() - wanted).min(BURST));
            Step::Delete(pods)
        }
    }
}

/// How many pods a set should have.
pub(super) fn wanted(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

/// What decides which of a set's pods go first, the smallest first. The order is Kubernetes', but for pods that have been ready
/// for about the same time, or are about as old: Kubernetes takes the one with the smaller uid, unless the times are equal, and
/// such an order can run in a circle. Here what comes next decides, and the uid at last.
type ReplicaRank = (State, i32, Reverse<usize>, Option<u32>, Reverse<i32>, Option<u32>, Option<String>);

/// What decides which of a Job's pods go first, the smallest first.
type JobRank = (State, Option<Reverse<Timestamp>>, Reverse<i32>, Option<Reverse<Timestamp>>);

/// Whether a pod has a node, how far it is, and whether it is ready.
type State = (bool, u8, bool);

/// Ranks a pod by how little is lost with it: without a node, pending, not ready, cheap, crowded, young.
pub(super) fn rank(pod: &Pod, related: &HashMap<String, usize>, now: Timestamp) -> ReplicaRank {
    let crowd = related.get(storage::node_of_pod(pod)).copied().unwrap_or(0);
    (
        state(pod),
        cost(pod),
        Reverse(crowd),
        ready_since(pod).map(|since| age(since, now)),
        Reverse(restarts(pod)),
        created(pod).map(|since| age(since, now)),
        pod.uid(),
    )
}

/// Ranks a pod of a Job in the same way, but what a pod's deletion costs does not count, nor how many others are on its node,
/// and of two ages the smaller one is first, however close they are.
pub(in crate::workloads) fn rank_in_job(pod: &Pod) -> JobRank {
    (state(pod), ready_since(pod).map(Reverse), Reverse(restarts(pod)), created(pod).map(Reverse))
}

/// Pods without a node, pending and not ready are first.
fn state(pod: &Pod) -> State {
    let phase = match storage::phase_of_pod(pod) {
        "Pending" => 0,
        "Unknown" => 1,
        _ => 2,
    };
    (!storage::node_of_pod(pod).is_empty(), phase, is_ready(pod))
}

/// How long ago something was, by powers of two.
fn age(since: Timestamp, now: Timestamp) -> u32 {
    let nanoseconds = u64::try_from(now.duration_since(since).as_nanos().max(0)).unwrap_or(u64::MAX);
    nanoseconds.checked_ilog2().map_or(0, |power| power + 1)
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
