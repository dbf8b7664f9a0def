//! Removes pods that no node will remove: of nodes that are gone or out of service, and those that never had one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Result, storage};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::plan::{Garbage, garbage};
use super::{deletion, disrupt};

const COMPONENT: &str = "pod-garbage-collector";
/// A node that is missing may come to be known a little later.
const QUARANTINE: Duration = Duration::from_secs(40);

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let (nodes, pods): (Cache<Node>, Cache<Pod>) = (cluster.cache(), cluster.cache());
    let pods_by_node: Index<Pod, String> = pods.index(|pod| vec![storage::node_of_pod(pod).to_owned()]);
    let collector = Arc::new(Collector {
        missing: Mutex::default(),
        cluster: cluster.clone(),
        nodes: nodes.clone(),
        pods: pods.clone(),
    });
    Loop::new(&cluster, &cluster.queue("pod-gc", Backoff::default()))
        .keyed(&pods)
        .subscribe(&nodes, move |before, after| {
            let of = |node: Option<&Arc<Node>>| {
                node.map(|node| (super::plan::readiness(node), super::plan::taints(node).to_vec()))
            };
            let node = after.or(before).filter(|_| of(before) != of(after));
            let pods = node.map(|node| pods_by_node.get(node.name_any().as_str()));
            pods.iter().flatten().map(|pod| Key::of(pod.as_ref())).collect()
        })
        .run(4, move |pod| collector.clone().reconcile(pod))
        .await;
}

struct Collector {
    cluster: Cluster,
    nodes: Cache<Node>,
    pods: Cache<Pod>,
    /// Since when a node is missing that pods are on.
    missing: Mutex<HashMap<String, Instant>>,
}

impl Collector {
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(pod) = self.pods.get(&key) else { return Ok(Next::Done) };
        let node = storage::node_of_pod(&pod);
        let known = self.nodes.named(node);
        if known.is_some() {
            self.missing.lock().remove(node);
        }
        match garbage(&pod, known.as_deref()) {
            None => return Ok(Next::Done),
            Some(Garbage::NeverScheduled) => {}
            Some(Garbage::OutOfService) => {
                tracing::warn!(pod = %key, node, "removing a pod of a node that is out of service");
            }
            Some(Garbage::NoNode) => {
                let since = *self.missing.lock().entry(node.to_owned()).or_insert_with(Instant::now);
                if let Some(left) = QUARANTINE.checked_sub(since.elapsed()).filter(|left| !left.is_zero()) {
                    return Ok(Next::After(left));
                }
                if self.cluster.fetch::<Node>(&Key::cluster(node)).await?.is_some() {
                    self.missing.lock().remove(node);
                    return Ok(Next::Done);
                }
                let now = Timestamp::now();
                let why = "PodGC: node no longer exists";
                self.cluster.edit_status(&*pod, |pod| disrupt(pod, "DeletionByPodGC", why, now)).await?;
            }
        }
        // Whoever counts pods shall see that it did not succeed.
        if !storage::is_over(&pod) {
            let fail = |pod: &mut Pod| pod.status.get_or_insert_default().phase = Some("Failed".to_owned());
            self.cluster.edit_status(&*pod, fail).await?;
        }
        self.cluster.delete_with(&*pod, &deletion(&pod, true)).await?;
        Ok(Next::Done)
    }
}
