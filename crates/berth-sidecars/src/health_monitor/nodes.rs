//! Nodes that fail: an event on each claim that their pods use, and another when they recover.

use berth_core::names::events;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use berth_kube::storage::{self, ClaimOfPod};
use berth_kube::{Backoff, Key, Loop, Next};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;
use parking_lot::Mutex;

use super::Monitor;
use crate::failure::Failure;

/// Whether a node works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeState {
    Ready,
    /// Since when, if it says so.
    NotReady(Option<Timestamp>),
    /// It has no Ready condition.
    Unknown,
    /// Its Node object was deleted.
    Gone,
}

impl NodeState {
    fn of(node: Option<&Node>) -> Self {
        let Some(node) = node else { return Self::Gone };
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
        match ready {
            None => Self::Unknown,
            Some(condition) if condition.status == "True" => Self::Ready,
            Some(condition) => Self::NotReady(condition.last_transition_time.as_ref().map(|time| time.0)),
        }
    }
}

/// What is to be done about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    Nothing,
    Wait(Duration),
    RecordFailed,
    RecordRecovered,
}

fn plan(state: NodeState, reported: bool, now: Timestamp, patience: Duration) -> Plan {
    match (state, reported) {
        (NodeState::Ready, true) => Plan::RecordRecovered,
        (NodeState::Gone, false) => Plan::RecordFailed,
        (NodeState::NotReady(since), false) => {
            let been = since.map_or(patience, |since| now.duration_since(since).unsigned_abs());
            match patience.checked_sub(been) {
                Some(left) if !left.is_zero() => Plan::Wait(left),
                _ => Plan::RecordFailed,
            }
        }
        (NodeState::Ready | NodeState::Unknown, false) | (_, true) => Plan::Nothing,
    }
}

/// Records events of nodes that fail until the cluster's shutdown.
pub(super) async fn run(monitor: Arc<Monitor>) {
    let nodes = monitor.cluster.cache::<Node>();
    let queue = monitor.cluster.queue("nodes", Backoff::default());
    let changed = Loop::new(&monitor.cluster, &queue).subscribe(&nodes, |before, after| {
        let of = |node: Option<&Arc<Node>>| NodeState::of(node.map(AsRef::as_ref));
        let changed = after.or(before).filter(|_| of(before) != of(after));
        changed.map(|node| node.name_any()).into_iter().collect()
    });
    let failed: Arc<Mutex<HashSet<String>>> = Arc::default();
    let work = |name: String| {
        let (monitor, nodes, failed) = (monitor.clone(), nodes.clone(), failed.clone());
        async move {
            let failed = || failed.lock();
            let state = NodeState::of(nodes.named(&name).as_deref());
            let reported = failed().contains(&name);
            match plan(state, reported, Timestamp::now(), monitor.options.node_patience) {
                Plan::Nothing => {}
                Plan::Wait(left) => return Ok(Next::After(left)),
                Plan::RecordFailed => {
                    monitor.record_failed(&name).await?;
                    failed().insert(name.clone());
                }
                Plan::RecordRecovered => {
                    monitor.record_recovered(&name).await?;
                    failed().remove(&name);
                }
            }
            if state == NodeState::Gone {
                failed().remove(&name);
            }
            Ok::<_, Failure>(Next::Done)
        }
    };
    changed.run(1, work).await;
}

impl Monitor {
    async fn record_failed(&self, node: &str) -> Result<(), Failure> {
        for (key, pods) in self.used_on(node).await? {
            let Some(claim) = self.claims.get(&key) else { continue };
            let text = format!(
                "Pods: [ {} ] consuming PVC: {} in namespace: {} are now on a failed node: {node}",
                pods.join(" "),
                key.name,
                key.namespace
            );
            self.recorder.warning(claim.as_ref(), events::NODE_FAILED, text);
        }
        Ok(())
    }

    async fn record_recovered(&self, node: &str) -> Result<(), Failure> {
        for key in self.used_on(node).await?.keys() {
            if let Some(claim) = self.claims.get(key) {
                // A warning, as upstream has it: who filters for those sees both ends.
                self.recorder.warning(
                    claim.as_ref(),
                    events::NODE_RECOVERED,
                    format!("Node: {node} recovered"),
                );
            }
        }
        Ok(())
    }

    /// The claims of this driver's volumes that pods on a node use, with the pods' names.
    async fn used_on(&self, node: &str) -> Result<BTreeMap<Key, Vec<String>>, Failure> {
        let mut used: BTreeMap<Key, Vec<String>> = BTreeMap::new();
        let pods = self.cluster.fetch_where::<Pod>("", &format!("spec.nodeName={node}")).await?;
        for pod in pods.iter().filter(|pod| !storage::is_over(pod)) {
            for ClaimOfPod { key, .. } in storage::claims_of_pod(pod) {
                if self.claims.get(&key).is_some_and(|claim| self.is_ours(&claim)) {
                    used.entry(key).or_default().push(pod.name_any());
                }
            }
        }
        Ok(used)
    }

    /// Whether a claim is bound to a volume of this driver.
    fn is_ours(&self, claim: &PersistentVolumeClaim) -> bool {
        let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        self.volumes.named(name).is_some_and(|volume| super::watched(&volume, &self.name).is_some())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);

    #[test]
    fn a_node_has_failed_after_five_minutes_and_recovers_once() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let not_ready = |minutes: u32| NodeState::NotReady(Some(now - minutes * MINUTE));
        for (state, reported, expected) in [
            (NodeState::Ready, false, Plan::Nothing),
            (not_ready(1), false, Plan::Wait(4 * MINUTE)),
            (not_ready(5), false, Plan::RecordFailed),
            (not_ready(60), true, Plan::Nothing),
            (NodeState::Ready, true, Plan::RecordRecovered),
            (NodeState::NotReady(None), false, Plan::RecordFailed),
            (NodeState::Unknown, false, Plan::Nothing),
            (NodeState::Gone, false, Plan::RecordFailed),
            (NodeState::Gone, true, Plan::Nothing),
        ] {
            assert_eq!(plan(state, reported, now, 5 * MINUTE), expected, "{state:?} {reported}");
        }
    }

    #[test]
    fn a_node_says_by_its_condition_whether_it_is_ready() {
        let node = |conditions| -> Node {
            serde_json::from_value(json!({ "metadata": {}, "status": { "conditions": conditions } })).unwrap()
        };
        let ready = |status: &str| json!([{ "type": "Ready", "status": status }]);
        assert_eq!(NodeState::of(Some(&node(ready("True")))), NodeState::Ready);
        assert_eq!(NodeState::of(Some(&node(ready("False")))), NodeState::NotReady(None));
        assert_eq!(NodeState::of(Some(&node(ready("Unknown")))), NodeState::NotReady(None));
        assert_eq!(NodeState::of(Some(&node(json!([])))), NodeState::Unknown);
        assert_eq!(NodeState::of(None), NodeState::Gone);
    }
}
