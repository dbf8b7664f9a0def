//! What a Deployment's status says of its rollout. Pure.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DeploymentCondition, DeploymentStatus, ReplicaSet};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use super::plan::{ObservedDeployment, available, max_unavailable, size, wanted};
use crate::workloads::pods::nonzero;

const AVAILABLE: &str = "Available";
const PROGRESSING: &str = "Progressing";
const FAILURE: &str = "ReplicaFailure";
const DONE: &str = "NewReplicaSetAvailable";
const LATE: &str = "ProgressDeadlineExceeded";
const PAUSED: &str = "DeploymentPaused";

/// The status, and in how many seconds the rollout is late if nothing happens.
pub(super) fn status(
    observed: &ObservedDeployment<'_>,
    created: Option<&str>,
    collisions: Option<i32>,
    now: Timestamp,
) -> (DeploymentStatus, Option<i64>) {
    let deployment = observed.deployment;
    let old = deployment.status.clone().unwrap_or_default();
    let sum = |of: fn(&ReplicaSet) -> i32| observed.all().map(|set| of(set)).sum::<i32>();
    let ready = |set: &ReplicaSet| set.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0);
    let going =
        |set: &ReplicaSet| set.status.as_ref().and_then(|status| status.terminating_replicas).unwrap_or(0);
    let working = sum(available);
    let mut status = DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: nonzero(sum(actual)),
        updated_replicas: nonzero(observed.new.as_ref().map_or(0, |new| actual(new))),
        ready_replicas: nonzero(sum(ready)),
        available_replicas: nonzero(working),
        unavailable_replicas: nonzero(sum(size) - working),
        terminating_replicas: Some(sum(going)),
        collision_count: collisions.or(old.collision_count),
        conditions: old.conditions.clone(),
    };
    let enough = working >= wanted(deployment) - max_unavailable(deployment);
    let condition = if enough {
        condition(
            AVAILABLE,
            "True",
            "MinimumReplicasAvailable",
            "Deployment has minimum availability.".into(),
            now,
        )
    } else {
        let message = "Deployment does not have minimum availability.".into();
        condition(AVAILABLE, "False", "MinimumReplicasUnavailable", message, now)
    };
    set(&mut status, condition);
    let again = progress(observed, &old, &mut status, created, now);
    match observed.new.as_ref().and_then(|new| failure(new)) {
        Some(failure) => set(&mut status, failure),
        None => remove(&mut status, FAILURE),
    }
    status.conditions = status.conditions.filter(|conditions| !conditions.is_empty());
    (status, again)
}

fn actual(set: &ReplicaSet) -> i32 {
    set.status.as_ref().map_or(0, |status| status.replicas)
}

fn failure(set: &ReplicaSet) -> Option<DeploymentCondition> {
    let conditions = set.status.as_ref()?.conditions.as_deref()?;
    let failure = conditions.iter().find(|condition| condition.type_ == FAILURE)?;
    Some(DeploymentCondition {
        type_: FAILURE.to_owned(),
        status: failure.status.clone(),
        reason: failure.reason.clone(),
        message: failure.message.clone(),
        last_transition_time: failure.last_transition_time.clone(),
        last_update_time: failure.last_transition_time.clone(),
    })
}

fn progress(
    observed: &ObservedDeployment<'_>,
    old: &DeploymentStatus,
    status: &mut DeploymentStatus,
    created: Option<&str>,
    now: Timestamp,
) -> Option<i64> {
    let deployment = observed.deployment;
    let spec = deployment.spec.as_ref();
    let deadline = spec.and_then(|spec| spec.progress_deadline_seconds).filter(|seconds| *seconds < i32::MAX);
    let Some(deadline) = deadline else {
        remove(status, PROGRESSING);
        return None;
    };
    let known = find(old, PROGRESSING).cloned();
    let reason = known.as_ref().and_then(|known| known.reason.clone()).unwrap_or_default();
    if spec.and_then(|spec| spec.paused) == Some(true) {
        if reason != PAUSED && reason != LATE {
            set(status, condition(PROGRESSING, "Unknown", PAUSED, "Deployment is paused".into(), now));
        }
        return None;
    }
    if reason == PAUSED {
        let message = "Deployment is resumed".into();
        set(status, condition(PROGRESSING, "Unknown", "DeploymentResumed", message, now));
        return None;
    }
    let named = |what: &str| match &observed.new {
        Some(new) => format!("ReplicaSet {:?} {what}", new.name_any()),
        None => format!("Deployment {:?} {what}", deployment.name_any()),
    };
    if let Some(name) = created {
        let message = format!("Created new replica set {name:?}");
        set(status, condition(PROGRESSING, "True", "NewReplicaSetCreated", message, now));
    } else if let (None, Some(new)) = (&known, &observed.new) {
        let message = format!("Found new replica set {:?}", new.name_any());
        set(status, condition(PROGRESSING, "True", "FoundNewReplicaSet", message, now));
    }
    let count = |count: Option<i32>| count.unwrap_or(0);
    let all_new = count(status.replicas) == count(status.updated_replicas);
    if all_new && reason == DONE && created.is_none() {
        return None;
    }
    let wanted = wanted(deployment);
    let complete = count(status.updated_replicas) == wanted
        && all_new
        && count(status.available_replicas) == wanted
        && status.observed_generation >= deployment.metadata.generation;
    let leftover = |status: &DeploymentStatus| count(status.replicas) - count(status.updated_replicas);
    let moved = count(status.updated_replicas) > count(old.updated_replicas)
        || leftover(status) < leftover(old)
        || count(status.ready_replicas) > count(old.ready_replicas)
        || count(status.available_replicas) > count(old.available_replicas);
    if complete {
        set(status, condition(PROGRESSING, "True", DONE, named("has successfully progressed."), now));
        return None;
    }
    if moved {
        // Each progress is a new time, even if the reason stays.
        let mut condition =
            condition(PROGRESSING, "True", "ReplicaSetUpdated", named("is progressing."), now);
        if let Some(known) = known.filter(|known| known.status == "True") {
            condition.last_transition_time = known.last_transition_time;
        }
        remove(status, PROGRESSING);
        set(status, condition);
        return Some(i64::from(deadline) + 1);
    }
    let current = find(status, PROGRESSING)?.clone();
    let reason = current.reason.unwrap_or_default();
    if reason == LATE || reason == DONE {
        return None;
    }
    let passed = now.duration_since(current.last_update_time?.0).as_secs();
    if passed <= i64::from(deadline) {
        return Some(i64::from(deadline) - passed + 1);
    }
    set(status, condition(PROGRESSING, "False", LATE, named("has timed out progressing."), now));
    None
}

fn condition(kind: &str, status: &str, reason: &str, message: String, now: Timestamp) -> DeploymentCondition {
    DeploymentCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_transition_time: Some(Time(now)),
        last_update_time: Some(Time(now)),
    }
}

fn find<'a>(status: &'a DeploymentStatus, kind: &str) -> Option<&'a DeploymentCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

fn remove(status: &mut DeploymentStatus, kind: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_ != kind);
    }
}

/// Sets a condition; one with the same status and reason stays as it is.
fn set(status: &mut DeploymentStatus, mut new: DeploymentCondition) {
    if let Some(known) = find(status, &new.type_) {
        if known.status == new.status && known.reason == new.reason {
            return;
        }
        if known.status == new.status {
            new.last_transition_time.clone_from(&known.last_transition_time);
        }
    }
    let kind = new.type_.clone();
    remove(status, &kind);
    status.conditions.get_or_insert_default().push(new);
}
