//! Nodes that fail: whose claims their pods use is told on the claims, and again when they recover.

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
enum Standing {
    Ready,
    /// Since when, if it says so.
    NotReady(Option<Timestamp>),
    /// It says nothing.
    Unknown,
    /// It was deleted.
    Gone,
}

impl Standing {
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
    TellFailed,
    TellRecovered,
}

fn plan(standing: Standing, told: bool, now: Timestamp, patience: Duration) -> Plan {
    match (standing, told) {
        (Standing::Ready, true) => Plan::TellRecovered,
        (Standing::Gone, false) => Plan::TellFailed,
        (Standing::NotReady(since), false) => {
            let been = since.map_or(patience, |since| now.duration_since(since).unsigned_abs());
            match patience.checked_sub(been) {
                Some(left) if !left.is_zero() => Plan::Wait(left),
                _ => Plan::TellFailed,
            }
        }
        (Standing::Ready | Standing::Unknown, false) | (_, true) => Plan::Nothing,
    }
}

/// Tells of nodes until the cluster's shutdown.
pub(super) async fn run(monitor: Arc<Monitor>) {
    let nodes = monitor.cluster.cache::<Node>();
    let queue = monitor.cluster.queue("nodes", Backoff::default());
    let changed = Loop::new(&monitor.cluster, &queue).subscribe(&nodes, |before, after| {
        let of = |node: Option<&Arc<Node>>| Standing::of(node.map(AsRef::as_ref));
        let changed = after.or(before).filter(|_| of(before) != of(after));
        changed.map(|node| node.name_any()).into_iter().collect()
    });
    let failed: Arc<Mutex<HashSet<String>>> = Arc::default();
    let work = |name: String| {
        let (monitor, nodes, failed) = (monitor.clone(), nodes.clone(), failed.clone());
        async move {
            let failed = || failed.lock();
            let standing = Standing::of(nodes.named(&name).as_deref());
            let told = failed().contains(&name);
            match plan(standing, told, Timestamp::now(), monitor.options.node_patience) {
                Plan::Nothing => {}
                Plan::Wait(left) => return Ok(Next::After(left)),
                Plan::TellFailed => {
                    monitor.tell_failed(&name).await?;
                    failed().insert(name.clone());
                }
                Plan::TellRecovered => {
                    monitor.tell_recovered(&name).await?;
                    failed().remove(&name);
                }
            }
            if standing == Standing::Gone {
                failed().remove(&name);
            }
            Ok::<_, Failure>(Next::Done)
        }
    };
    changed.run(1, work).await;
}

impl Monitor {
    async fn tell_failed(&self, node: &str) -> Result<(), Failure> {
        for (key, pods) in self.used_on(node).await? {
            let Some(claim) = self.claims.get(&key) else { continue };
            let text = format!(
                "Pods: [ {} ] consuming PVC: {} in namespace: {} are now on a failed node: {node}",
                pods.join(" "),
                key.name,
                key.namespace
            );
            self.recorder.warning(claim.as_ref(), "NodeFailed", text);
        }
        Ok(())
    }

    async fn tell_recovered(&self, node: &str) -> Result<(), Failure> {
        for key in self.used_on(node).await?.keys() {
            if let Some(claim) = self.claims.get(key) {
                // A warning, as upstream has it: who filters for those sees both ends.
                self.recorder.warning(claim.as_ref(), "NodeRecovered", format!("Node: {node} recovered"));
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
        let not_ready = |minutes: u32| Standing::NotReady(Some(now - minutes * MINUTE));
        for (standing, told, expected) in [
            (Standing::Ready, false, Plan::Nothing),
            (not_ready(1), false, Plan::Wait(4 * MINUTE)),
            (not_ready(5), false, Plan::TellFailed),
            (not_ready(60), true, Plan::Nothing),
            (Standing::Ready, true, Plan::TellRecovered),
            (Standing::NotReady(None), false, Plan::TellFailed),
            (Standing::Unknown, false, Plan::Nothing),
            (Standing::Gone, false, Plan::TellFailed),
            (Standing::Gone, true, Plan::Nothing),
        ] {
            assert_eq!(plan(standing, told, now, 5 * MINUTE), expected, "{standing:?} {told}");
        }
    }

    #[test]
    fn a_node_says_by_its_condition_whether_it_is_ready() {
        let node = |conditions| -> Node {
            serde_json::from_value(json!({ "metadata": {}, "status": { "conditions": conditions } })).unwrap()
        };
        let ready = |status: &str| json!([{ "type": "Ready", "status": status }]);
        assert_eq!(Standing::of(Some(&node(ready("True")))), Standing::Ready);
        assert_eq!(Standing::of(Some(&node(ready("False")))), Standing::NotReady(None));
        assert_eq!(Standing::of(Some(&node(ready("Unknown")))), Standing::NotReady(None));
        assert_eq!(Standing::of(Some(&node(json!([])))), Standing::Unknown);
        assert_eq!(Standing::of(None), Standing::Gone);
    }
}
