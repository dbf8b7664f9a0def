//! Takes the announcement of a disruption off a pod that is not disrupted after all, as Kubernetes' disruption controller does.
//!
//! Whoever evicts or preempts a pod sets its condition `DisruptionTarget` before it deletes the pod. If the deletion then fails, or
//! is not tried again, the pod stays, and the condition says otherwise.
//!
//! Reads: Pod. Writes: the condition `DisruptionTarget` of pods.

use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Key, Loop, Next, Result, storage};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// How long after its announcement a disruption may begin.
const DISRUPTION_TIMEOUT: SignedDuration = SignedDuration::from_mins(2);
const TYPE: &str = "DisruptionTarget";
/// The kubelet announces that it ends a pod, and may take as long as the pod's grace period for it.
const BY_KUBELET: &str = "TerminationByKubelet";

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let pods: Cache<Pod> = cluster.cache();
    let queue = cluster.queue("stale-disruptions", Backoff::default());
    Loop::new(&cluster.clone(), &queue)
        .also(&pods.clone(), |pod| announcement(pod).map(|_| Key::of(pod.as_ref())))
        .run(4, move |pod| reconcile(cluster.clone(), pods.clone(), pod))
        .await;
}

async fn reconcile(cluster: Cluster, pods: Cache<Pod>, key: Key) -> Result<Next> {
    let Some(pod) = pods.get(&key) else { return Ok(Next::Done) };
    let now = Timestamp::now();
    let Some(wait) = expires_in(&pod, now) else { return Ok(Next::Done) };
    if !wait.is_zero() {
        return Ok(Next::After(wait));
    }
    cluster
        .update_status(pod.as_ref(), |pod| {
            let observed_generation = pod.metadata.generation;
            let conditions = pod.status.iter_mut().flat_map(|status| status.conditions.iter_mut().flatten());
            for condition in conditions.filter(|condition| condition.type_ == TYPE) {
                "False".clone_into(&mut condition.status);
                condition.last_transition_time = Some(Time(now));
                condition.observed_generation = observed_generation;
            }
        })
        .await?;
    Ok(Next::Done)
}

/// In how long the announcement of a pod's disruption is to be taken back, if it has one and nothing else happens.
fn expires_in(pod: &Pod, now: Timestamp) -> Option<Duration> {
    let since = announcement(pod)?.last_transition_time.as_ref().map_or(Timestamp::MIN, |since| since.0);
    let until = since.saturating_add(DISRUPTION_TIMEOUT).unwrap_or(Timestamp::MAX);
    Some(Duration::try_from(until.duration_since(now)).unwrap_or_default())
}

/// The condition that announces the disruption of a pod that still runs, unless its node set it.
fn announcement(pod: &Pod) -> Option<&PodCondition> {
    if pod.metadata.deletion_timestamp.is_some() || storage::is_over(pod) {
        return None;
    }
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    conditions.iter().find(|condition| {
        condition.type_ == TYPE
            && condition.status == "True"
            && condition.reason.as_deref() != Some(BY_KUBELET)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_disruption_that_does_not_begin_is_taken_back_after_two_minutes() {
        let now: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
        let (old, new) = ("2026-01-01T11:00:00Z", "2026-01-01T11:59:00Z");
        let preempted = "PreemptionByScheduler";
        for (what, since, status, reason, phase, deleted, expected) in [
            ("long ago", old, "True", preempted, "Running", None, Some(0)),
            ("a minute ago", new, "True", preempted, "Running", None, Some(60)),
            ("taken back", old, "False", preempted, "Running", None, None),
            ("set by the node", old, "True", BY_KUBELET, "Running", None, None),
            ("ended", old, "True", preempted, "Failed", None, None),
            ("being deleted", old, "True", preempted, "Running", Some(new), None),
        ] {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": { "name": "p", "deletionTimestamp": deleted },
                "status": { "phase": phase, "conditions": [
                    { "type": TYPE, "status": status, "reason": reason, "lastTransitionTime": since },
                ] },
            }))
            .unwrap();
            assert_eq!(expires_in(&pod, now), expected.map(Duration::from_secs), "{what}");
        }
        assert_eq!(expires_in(&Pod::default(), now), None, "not announced");
    }
}
