//! Deletes pods that do not tolerate a `NoExecute` taint of their node, or not for any longer.

use std::collections::HashMap;
use std::sync::Arc;

use berth_core::names::events;
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Recorder, Result, storage};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::plan::{Leave, leave, taints};
use super::{deletion, disrupt};

const COMPONENT: &str = "taint-eviction-controller";

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let (nodes, pods): (Cache<Node>, Cache<Pod>) = (cluster.cache(), cluster.cache());
    let pods_by_node: Index<Pod, String> = pods.index(|pod| vec![storage::node_of_pod(pod).to_owned()]);
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        since: Mutex::default(),
        cluster: cluster.clone(),
        nodes: nodes.clone(),
        pods: pods.clone(),
    });
    Loop::new(&cluster, &cluster.queue("taint-eviction", Backoff::default()))
        .keyed(&pods)
        .subscribe(&nodes, move |before, after| {
            let of = |node: Option<&Arc<Node>>| node.map(|node| taints(node).to_vec()).unwrap_or_default();
            let node = after.or(before).filter(|_| of(before) != of(after));
            let pods = node.map(|node| pods_by_node.get(node.name_any().as_str()));
            pods.iter().flatten().map(|pod| Key::of(pod.as_ref())).collect()
        })
        .run(8, move |pod| controller.clone().reconcile(pod))
        .await;
}

struct Controller {
    cluster: Cluster,
    nodes: Cache<Node>,
    pods: Cache<Pod>,
    recorder: Recorder,
    /// Since when a pod tolerates a taint for a limited time, by its uid.
    since: Mutex<HashMap<Key, (Option<String>, Instant)>>,
}

impl Controller {
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let pod = self.pods.get(&key).filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let Some(pod) = pod else {
            self.since.lock().remove(&key);
            return Ok(Next::Done);
        };
        let Some(node) = self.nodes.named(storage::node_of_pod(&pod)) else { return Ok(Next::Done) };
        let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
        match leave(taints(&node), tolerations) {
            Leave::Never => {
                let known = self.since.lock().remove(&key);
                if known.is_some_and(|(uid, _)| uid == pod.metadata.uid) {
                    let message = format!("Cancelling deletion of Pod {key}");
                    self.recorder.normal(pod.as_ref(), events::TAINT_MANAGER_EVICTION, message);
                }
                Ok(Next::Done)
            }
            Leave::Now => self.evict(&key, &pod).await,
            Leave::After(time) => {
                let since = {
                    let mut since = self.since.lock();
                    let begun = (pod.metadata.uid.clone(), Instant::now());
                    let known = since.entry(key.clone()).or_insert_with(|| begun.clone());
                    if known.0 != begun.0 {
                        *known = begun;
                    }
                    known.1
                };
                match time.checked_sub(since.elapsed()) {
                    Some(left) if !left.is_zero() => Ok(Next::After(left)),
                    _ => self.evict(&key, &pod).await,
                }
            }
        }
    }

    async fn evict(&self, key: &Key, pod: &Pod) -> Result<Next> {
        let message = format!("Marking for deletion Pod {key}");
        self.recorder.normal(pod, events::TAINT_MANAGER_EVICTION, message);
        let now = Timestamp::now();
        let why = "Taint manager: deleting due to NoExecute taint";
        self.cluster.edit_status(pod, |pod| disrupt(pod, "DeletionByTaintManager", why, now)).await?;
        self.cluster.delete_with(pod, &deletion(pod, false)).await?;
        self.since.lock().remove(key);
        Ok(Next::Done)
    }
}
