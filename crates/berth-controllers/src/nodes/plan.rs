//! What follows from the state of nodes and pods. Pure.

use std::time::Duration;

use berth_core::names::{
    DISK_PRESSURE, MEMORY_PRESSURE, NETWORK_UNAVAILABLE, NODE_NOT_READY, NODE_UNREACHABLE, OUT_OF_SERVICE,
    PID_PRESSURE, UNSCHEDULABLE,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::scheduler::tolerates;

/// The conditions that a kubelet reports, and that nobody knows of a node that is silent.
const REPORTED: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];
/// A cluster of so many nodes or fewer evicts nobody while too many of them are unhealthy.
const SMALL_CLUSTER: usize = 50;
/// Too many: so many percent of them.
const UNHEALTHY_PERCENT: usize = 55;

/// What a node says about being ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// It says that it is not ready.
    NotReady,
    /// It is silent, or has never said anything.
    Unknown,
}

/// What a node's status says about being ready.
pub(super) fn readiness(node: &Node) -> Readiness {
    match condition(node, "Ready").map(|condition| condition.status.as_str()) {
        Some("True") => Readiness::Ready,
        Some("False") => Readiness::NotReady,
        _ => Readiness::Unknown,
    }
}

pub(super) fn condition<'a>(node: &'a Node, type_: &str) -> Option<&'a NodeCondition> {
    let conditions = node.status.as_ref()?.conditions.as_deref()?;
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// The conditions of a node that has been silent for too long: nobody knows them. Gives whether that changes anything.
pub(super) fn mark_silent(node: &mut Node, now: Timestamp) -> bool {
    let created = node.metadata.creation_timestamp.clone();
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    let conditions = node.status.get_or_insert_default().conditions.get_or_insert_default();
    let mut changed = false;
    for type_ in REPORTED {
        match conditions.iter_mut().find(|condition| condition.type_ == type_) {
            None => {
                conditions.push(NodeCondition {
                    type_: type_.to_owned(),
                    status: "Unknown".to_owned(),
                    reason: Some("NodeStatusNeverUpdated".to_owned()),
                    message: Some("Kubelet never posted node status.".to_owned()),
                    last_heartbeat_time: created.clone(),
                    last_transition_time: Some(now.clone()),
                });
                changed = true;
            }
            Some(condition) if condition.status != "Unknown" => {
                "Unknown".clone_into(&mut condition.status);
                condition.reason = Some("NodeStatusUnknown".to_owned());
                condition.message = Some("Kubelet stopped posting node status.".to_owned());
                condition.last_transition_time = Some(now.clone());
                changed = true;
            }
            Some(_) => {}
        }
    }
    changed
}

/// How much of a cluster is unhealthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disruption {
    /// Pods leave unhealthy nodes.
    Normal,
    /// So many nodes are unhealthy that the fault may be elsewhere: no further pods leave.
    Partial,
    /// All nodes are unhealthy: it is rather the control plane that has a problem, and no pod leaves.
    Full,
}

/// How disrupted a cluster is with so many nodes ready and not ready.
pub(super) fn disruption(ready: usize, not_ready: usize) -> Disruption {
    let all = ready + not_ready;
    if ready == 0 && not_ready > 0 {
        Disruption::Full
    } else if not_ready > 2 && not_ready * 100 >= all * UNHEALTHY_PERCENT && all <= SMALL_CLUSTER {
        Disruption::Partial
    } else {
        Disruption::Normal
    }
}

/// Whether a taint is one that only these loops set, by the state of the node.
fn is_ours(taint: &Taint) -> bool {
    match taint.effect.as_str() {
        "NoSchedule" => [
            NODE_NOT_READY,
            NODE_UNREACHABLE,
            UNSCHEDULABLE,
            MEMORY_PRESSURE,
            DISK_PRESSURE,
            PID_PRESSURE,
            NETWORK_UNAVAILABLE,
        ]
        .contains(&taint.key.as_str()),
        "NoExecute" => [NODE_NOT_READY, NODE_UNREACHABLE].contains(&taint.key.as_str()),
        _ => false,
    }
}

/// The taints that keep new pods away from a node, by its conditions.
fn no_schedule(node: &Node) -> Vec<&'static str> {
    let mut keys = Vec::new();
    match condition(node, "Ready").map(|condition| condition.status.as_str()) {
        Some("False") => keys.push(NODE_NOT_READY),
        Some("Unknown") => keys.push(NODE_UNREACHABLE),
        _ => {}
    }
    for (type_, key) in [
        ("MemoryPressure", MEMORY_PRESSURE),
        ("DiskPressure", DISK_PRESSURE),
        ("NetworkUnavailable", NETWORK_UNAVAILABLE),
        ("PIDPressure", PID_PRESSURE),
    ] {
        if condition(node, type_).is_some_and(|condition| condition.status == "True") {
            keys.push(key);
        }
    }
    if node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
        keys.push(UNSCHEDULABLE);
    }
    keys
}

/// The taint that has pods leave a node.
pub(super) fn no_execute(node: &Node) -> Option<&'static str> {
    condition(node, "Ready")?;
    match readiness(node) {
        Readiness::Ready => None,
        Readiness::NotReady => Some(NODE_NOT_READY),
        Readiness::Unknown => Some(NODE_UNREACHABLE),
    }
}

/// Whether a node has a taint of this effect that has pods leave it because it is unhealthy.
pub(super) fn is_left(node: &Node) -> bool {
    taints(node).iter().any(|taint| taint.effect == "NoExecute" && is_ours(taint))
}

/// The taints that a node shall have. `evict` is the one that has pods leave it; what others set stays.
pub(super) fn wanted_taints(node: &Node, evict: Option<&str>, now: Timestamp) -> Vec<Taint> {
    let mut wanted: Vec<Taint> = taints(node).iter().filter(|taint| !is_ours(taint)).cloned().collect();
    let schedule = no_schedule(node).into_iter().map(|key| (key, "NoSchedule"));
    for (key, effect) in schedule.chain(evict.map(|key| (key, "NoExecute"))) {
        let known = taints(node).iter().find(|taint| taint.key == key && taint.effect == effect);
        wanted.push(known.cloned().unwrap_or_else(|| Taint {
            key: key.to_owned(),
            effect: effect.to_owned(),
            value: None,
            time_added: Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now))),
        }));
    }
    wanted
}

/// The taints of a node.
pub(super) fn taints(node: &Node) -> &[Taint] {
    node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default()
}

/// Whether two lists hold the same taints, in whatever order.
pub(super) fn same_taints(some: &[Taint], others: &[Taint]) -> bool {
    some.len() == others.len() && some.iter().all(|taint| others.contains(taint))
}

/// When a pod has to leave its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Never,
    Now,
    /// So long after the taints were first seen.
    After(Duration),
}

/// When a pod with these tolerations has to leave a node with these taints.
pub(super) fn leave(taints: &[Taint], tolerations: &[Toleration]) -> Leave {
    let mut shortest: Option<i64> = None;
    let mut taints = taints.iter().filter(|taint| taint.effect == "NoExecute").peekable();
    if taints.peek().is_none() {
        return Leave::Never;
    }
    for taint in taints {
        let mut tolerated = false;
        for toleration in tolerations.iter().filter(|toleration| tolerates(toleration, taint)) {
            tolerated = true;
            if let Some(seconds) = toleration.toleration_seconds {
                shortest = Some(shortest.map_or(seconds, |known| known.min(seconds)));
            }
        }
        if !tolerated {
            return Leave::Now;
        }
    }
    match shortest {
        None => Leave::Never,
        Some(seconds) if seconds <= 0 => Leave::Now,
        Some(seconds) => Leave::After(Duration::from_secs(seconds.unsigned_abs())),
    }
}

/// Why a pod that nobody else will remove is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Garbage {
    /// It was to be deleted before it had a node.
    NeverScheduled,
    /// It is being deleted, and its node is out of service.
    OutOfService,
    /// Its node does not exist; to be checked again, and asked of the API server, before it is removed.
    NoNode,
}

/// Whether a pod is one that nobody else will remove, given its node if that exists.
pub(super) fn garbage(pod: &Pod, node: Option<&Node>) -> Option<Garbage> {
    let deleting = pod.metadata.deletion_timestamp.is_some();
    let name = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    if name.is_empty() {
        return deleting.then_some(Garbage::NeverScheduled);
    }
    let Some(node) = node else { return Some(Garbage::NoNode) };
    let out = taints(node).iter().any(|taint| taint.key == OUT_OF_SERVICE);
    (deleting && out && readiness(node) != Readiness::Ready).then_some(Garbage::OutOfService)
}
