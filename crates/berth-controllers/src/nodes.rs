//! Nodes that fail: what their conditions and taints say, which pods leave them, and pods that nobody else removes.
//!
//! Reads: Node, Lease of `kube-node-lease`, Pod. Writes: Node conditions, when a node is silent, and taints; pods' Ready
//! condition when their node fails; pods' `DisruptionTarget` condition and phase before they are deleted. Deletes: pods that do
//! not tolerate a `NoExecute` taint, and pods whose node cannot remove them. Events: `NodeNotReady`, `RegisteredNode`,
//! `RemovingNode` on nodes, `NodeNotReady` and `TaintManagerEviction` on pods.
//!
//! | module | replaces, in Kubernetes |
//! |---|---|
//! | `lifecycle` | node-lifecycle-controller |
//! | `eviction` | taint-eviction-controller |
//! | `pod_gc` | pod-garbage-collector-controller |
//!
//! A node is alive while its lease or its status changes; how long it has been silent is measured by this process's own
//! clock from the last change it saw, so that neither a clock that differs nor a restart makes a node look dead. The decisions
//! are pure functions in `plan.rs`.

mod eviction;
mod lifecycle;
mod plan;
mod pod_gc;
#[cfg(test)]
mod tests;

use std::time::Duration;

use berth_kube::Cluster;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::DeleteParams;
use kube::{ResourceExt as _, api::Preconditions};

/// How long a node may be silent before it is unhealthy, in Kubernetes.
pub const GRACE_PERIOD: Duration = Duration::from_secs(50);

/// Runs until the cluster's shutdown; a node that is silent for longer than `grace_period` is unhealthy.
pub async fn run(cluster: Cluster, grace_period: Duration) {
    tokio::join!(
        lifecycle::run(cluster.clone(), grace_period),
        eviction::run(cluster.clone()),
        pod_gc::run(cluster),
    );
}

/// Says in a pod's status why it is deleted.
pub(crate) fn disrupt(pod: &mut Pod, reason: &str, message: &str, now: Timestamp) {
    let observed_generation = pod.metadata.generation;
    let conditions = pod.status.get_or_insert_default().conditions.get_or_insert_default();
    let condition = PodCondition {
        type_: "DisruptionTarget".to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_transition_time: Some(Time(now)),
        observed_generation,
        ..PodCondition::default()
    };
    match conditions.iter_mut().find(|known| known.type_ == condition.type_) {
        Some(known) if known.status == "True" => {}
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
}

/// How a pod is deleted that still is this one: by its node after its grace period, or at once by nobody but the API server.
pub(crate) fn deletion(pod: &Pod, at_once: bool) -> DeleteParams {
    DeleteParams {
        grace_period_seconds: at_once.then_some(0),
        preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
        ..DeleteParams::default()
    }
}
