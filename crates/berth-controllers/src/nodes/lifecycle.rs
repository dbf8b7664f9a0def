//! Watches over nodes: says in the conditions of a node that it is silent, and taints nodes by their conditions.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::events;
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Queue, Recorder, Result, storage};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::plan::{
    Disruption, Readiness, condition, disruption, is_left, mark_silent, no_execute, readiness, same_taints,
    taints, wanted_taints,
};

const COMPONENT: &str = "node-controller";
/// Where nodes renew their leases.
const LEASES: &str = "kube-node-lease";
/// A node that has never said anything is given this long.
const STARTUP_GRACE: Duration = Duration::from_secs(60);
/// Pods are evicted from one node at a time, and from the next after this time.
const EVICTION_PAUSE: Duration = Duration::from_secs(10);

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster, grace_period: Duration) {
    let cluster = cluster.named(COMPONENT);
    let (nodes, pods): (Cache<Node>, Cache<Pod>) = (cluster.cache(), cluster.cache());
    let leases: Cache<Lease> = cluster.watch(LEASES, "", cluster.shutdown().clone());
    let queue: Queue<String> = cluster.queue("node-lifecycle", Backoff::default());
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        pods_by_node: pods.index(|pod| vec![storage::node_of_pod(pod).to_owned()]),
        queue: queue.clone(),
        grace_period,
        memory: Mutex::default(),
        nodes: nodes.clone(),
        leases: leases.clone(),
        cluster: cluster.clone(),
    });
    let (registering, others) = (controller.clone(), nodes.clone());
    Loop::new(&cluster, &queue)
        .reads(&pods)
        .subscribe(&nodes, move |before, after| {
            registering.announce(before, after);
            // How many nodes are ready decides about all of them.
            let ready = |node: Option<&Arc<Node>>| node.map(|node| readiness(node) == Readiness::Ready);
            if ready(before) == ready(after) {
                return after.or(before).map(|node| node.name_any()).into_iter().collect();
            }
            others.list().iter().map(|node| node.name_any()).collect()
        })
        .also(&leases, |lease| lease.metadata.name.clone())
        .run(4, move |node| controller.clone().reconcile(node))
        .await;
}

struct Controller {
    cluster: Cluster,
    nodes: Cache<Node>,
    leases: Cache<Lease>,
    pods_by_node: Index<Pod, String>,
    recorder: Recorder,
    queue: Queue<String>,
    grace_period: Duration,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    nodes: HashMap<String, NodeRecord>,
    /// When pods of a node were last evicted.
    evicted: Option<Instant>,
    disruption: Option<Disruption>,
}

/// What was last seen of a node, and when it changed.
#[derive(Clone, PartialEq)]
struct NodeRecord {
    uid: Option<String>,
    heartbeat: Option<Timestamp>,
    renewed: Option<Timestamp>,
    readiness: Readiness,
    seen: Instant,
}

impl Controller {
    fn announce(&self, before: Option<&Arc<Node>>, after: Option<&Arc<Node>>) {
        match (before, after) {
            (None, Some(node)) => {
                let name = node.name_any();
                let message = format!("Node {name} event: Registered Node {name} in Controller");
                self.recorder.normal(node.as_ref(), events::REGISTERED_NODE, message);
            }
            (Some(node), None) => {
                let name = node.name_any();
                let message = format!("Node {name} event: Removing Node {name} from Controller");
                self.recorder.normal(node.as_ref(), events::REMOVING_NODE, message);
            }
            _ => {}
        }
    }

    async fn reconcile(self: Arc<Self>, name: String) -> Result<Next> {
        let Some(node) = self.nodes.named(&name) else {
            self.memory.lock().nodes.remove(&name);
            return Ok(Next::Done);
        };
        let (silent, before) = self.observe(&node);
        let grace = if condition(&node, "Ready").is_some() { self.grace_period } else { STARTUP_GRACE };
        let mut node = node;
        let mut again = grace.checked_sub(silent);
        if again.is_none_or(|left| left.is_zero()) {
            again = None;
            let mut marked = (*node).clone();
            if mark_silent(&mut marked, Timestamp::now()) {
                // Not over what the node may have just said.
                node = self.cluster.update_status(&*node, |node| node.status = marked.status).await?;
                self.note_readiness(&name, readiness(&node));
            }
        }
        if before == Some(Readiness::Ready) && readiness(&node) != Readiness::Ready {
            let message = format!("Node {name} status is now: NodeNotReady");
            self.recorder.normal(node.as_ref(), events::NODE_NOT_READY, message);
        }
        let rest = self.taint(&node).await?;
        if readiness(&node) != Readiness::Ready {
            self.mark_pods(&name).await?;
        }
        let next = [again, rest].into_iter().flatten().min();
        Ok(next.map_or(Next::Done, Next::After))
    }

    /// Takes in what the node and its lease say; gives how long it has been silent, and whether it was ready before.
    fn observe(&self, node: &Node) -> (Duration, Option<Readiness>) {
        let name = node.name_any();
        let lease = self.leases.get(&Key::new(LEASES, &name));
        let renewed = lease.and_then(|lease| lease.spec.as_ref()?.renew_time.as_ref().map(|time| time.0));
        let heartbeat = condition(node, "Ready")
            .and_then(|condition| condition.last_heartbeat_time.as_ref().map(|time| time.0));
        let now = Instant::now();
        let mut memory = self.memory.lock();
        let known = memory.nodes.get(&name).filter(|known| known.uid == node.metadata.uid);
        let before = known.map(|known| known.readiness);
        let same = known.filter(|known| known.heartbeat == heartbeat && known.renewed == renewed);
        let seen = same.map_or(now, |known| known.seen);
        let known = NodeRecord {
            uid: node.metadata.uid.clone(),
            heartbeat,
            renewed,
            readiness: readiness(node),
            seen,
        };
        memory.nodes.insert(name, known);
        (now.duration_since(seen), before)
    }

    fn note_readiness(&self, name: &str, readiness: Readiness) {
        if let Some(known) = self.memory.lock().nodes.get_mut(name) {
            known.readiness = readiness;
        }
    }

    /// Gives the node the taints that it should have; returns when to check again.
    async fn taint(&self, node: &Node) -> Result<Option<Duration>> {
        let disruption = self.disruption();
        let left = is_left(node);
        let mut evict = no_execute(node);
        let mut again = None;
        match disruption {
            Disruption::Full => evict = None,
            Disruption::Partial if !left => evict = None,
            Disruption::Normal if !left && evict.is_some() => {
                if let Some(pause) = self.try_evict() {
                    again = Some(pause);
                    evict = None;
                }
            }
            Disruption::Partial | Disruption::Normal => {}
        }
        let wanted = wanted_taints(node, evict, Timestamp::now());
        if !same_taints(taints(node), &wanted) {
            let wanted = Some(wanted).filter(|taints| !taints.is_empty());
            self.cluster.update(node, |node| node.spec.get_or_insert_default().taints = wanted).await?;
        }
        Ok(again)
    }

    /// How disrupted the cluster is. Whoever comes out of a whole disruption is given time anew: it was not their fault.
    fn disruption(&self) -> Disruption {
        let nodes = self.nodes.list();
        let ready = nodes.iter().filter(|node| readiness(node) == Readiness::Ready).count();
        let now = disruption(ready, nodes.len() - ready);
        let mut memory = self.memory.lock();
        let before = memory.disruption.replace(now);
        if before != Some(now) {
            match now {
                // At the start nodes are about to come.
                _ if before.is_none() => {}
                Disruption::Full => tracing::warn!("no node is ready: no pods leave their nodes"),
                Disruption::Partial => tracing::warn!("many nodes are not ready: no further pods leave them"),
                Disruption::Normal => {}
            }
            if before == Some(Disruption::Full) {
                let anew = Instant::now();
                memory.nodes.values_mut().for_each(|known| known.seen = anew);
            }
            drop(memory);
            for node in nodes {
                self.queue.add(node.name_any());
            }
        }
        now
    }

    /// Whether the pods of one more node may be evicted; else how long to wait.
    fn try_evict(&self) -> Option<Duration> {
        let mut memory = self.memory.lock();
        let waited = memory.evicted.map(|last| last.elapsed());
        match waited.and_then(|waited| EVICTION_PAUSE.checked_sub(waited)) {
            Some(left) if !left.is_zero() => Some(left),
            _ => {
                memory.evicted = Some(Instant::now());
                None
            }
        }
    }

    /// Pods of a node that failed are not ready, so that nobody sends them requests.
    async fn mark_pods(&self, node: &str) -> Result<()> {
        for pod in self.pods_by_node.get(node) {
            let mut changed = false;
            let marked =
                self.cluster.edit_status(&*pod, |pod| changed = mark_not_ready(pod, Timestamp::now()));
            if marked.await?.is_some() && changed {
                self.recorder.warning(pod.as_ref(), events::NODE_NOT_READY, "Node is not ready");
            }
        }
        Ok(())
    }
}

/// Has a pod that is ready say that it is not; gives whether that changed anything.
pub(super) fn mark_not_ready(pod: &mut Pod, now: Timestamp) -> bool {
    let conditions = pod.status.iter_mut().flat_map(|status| status.conditions.iter_mut().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready" && condition.status == "True");
    let Some(ready) = ready.next() else { return false };
    "False".clone_into(&mut ready.status);
    ready.last_transition_time = Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now)));
    true
}
