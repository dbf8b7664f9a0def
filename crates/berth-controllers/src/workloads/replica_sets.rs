//! ReplicaSets: as many pods as asked for.

mod plan;
#[cfg(test)]
mod tests;

use berth_core::names::events;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Recorder, Result};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::ownership::{chooses, claim, controller};
use super::pods::{Deletions, from_template, in_growing_batches, is_active, is_ready};
use berth_kube::storage;
use plan::{Pods, plan, status};

const COMPONENT: &str = "replicaset-controller";

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let (sets, pods): (Cache<ReplicaSet>, Cache<Pod>) = (cluster.cache(), cluster.cache());
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        owned: pods
            .index(|pod| controller(&pod.metadata).map(|owner| owner.uid.clone()).into_iter().collect()),
        orphans: pods.index(|pod| {
            let orphan = controller(&pod.metadata).is_none();
            pod.namespace().filter(|_| orphan).into_iter().collect()
        }),
        siblings: sets
            .index(|set| controller(&set.metadata).map(|owner| owner.uid.clone()).into_iter().collect()),
        by_namespace: sets.index(|set| set.namespace().into_iter().collect()),
        deleted: Deletions::default(),
        cluster: cluster.clone(),
        sets,
        pods,
    });
    let (sets, pods) = (controller.sets.clone(), controller.pods.clone());
    let follower = controller.clone();
    Loop::new(&cluster, &cluster.queue("replica-sets", Backoff::default()))
        .keyed(&sets)
        .subscribe(&pods, move |before, after| follower.pod_changed(before, after))
        .run(32, move |set| controller.clone().reconcile(set))
        .await;
}

struct Controller {
    cluster: Cluster,
    sets: Cache<ReplicaSet>,
    pods: Cache<Pod>,
    recorder: Recorder,
    /// Pods by their controller's uid.
    owned: Index<Pod, String>,
    /// Pods without a controller, by namespace.
    orphans: Index<Pod, String>,
    /// Sets by their controller's uid.
    siblings: Index<ReplicaSet, String>,
    by_namespace: Index<ReplicaSet, String>,
    deleted: Deletions,
}

impl Controller {
    /// The sets that a pod's change matters to: its own, or those that may adopt it.
    fn pod_changed(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) -> Vec<Key> {
        self.deleted.observe(before, after);
        let mut keys = Vec::new();
        for pod in before.into_iter().chain(after) {
            let namespace = pod.namespace().unwrap_or_default();
            if let Some(owner) = controller(&pod.metadata) {
                if owner.kind == "ReplicaSet" {
                    keys.push(Key::new(namespace, owner.name.clone()));
                }
                continue;
            }
            let sets = self.by_namespace.get(namespace.as_str()).into_iter();
            let adopting = sets
                .filter(|set| set.spec.as_ref().is_some_and(|spec| chooses(&spec.selector, &pod.metadata)));
            keys.extend(adopting.map(|set| Key::of(set.as_ref())));
        }
        keys
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(set) = self.sets.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&set.spec, set.uid()) else { return Ok(Next::Done) };
        let (owned, orphans) = (self.owned.get(&uid), self.orphans.get(key.namespace.as_str()));
        let pods =
            claim(&self.cluster, set.as_ref(), |meta| chooses(&spec.selector, meta), owned, orphans).await?;
        let mut active = self.active(&pods);
        let terminating = pods.iter().filter(|pod| !storage::is_over(pod) && !active.contains(pod)).count();
        let mut failure = None;
        if set.metadata.deletion_timestamp.is_none() {
            let steps = plan(&set, &active, &self.related(&set, &pods), Timestamp::now());
            failure = self.apply(&set, steps).await;
            active = self.active(&self.owned.get(&uid));
            active.retain(|pod| chooses(&spec.selector, &pod.metadata));
        }
        let (status, again) = status(&set, &active, terminating, failure.as_ref(), Timestamp::now());
        if set.status.as_ref() != Some(&status) {
            self.cluster.update_status(set.as_ref(), |set| set.status = Some(status)).await?;
        }
        Ok(match (failure, again) {
            (Some(_), _) => Next::Retry,
            (None, Some(seconds)) => Next::After(Duration::from_secs(seconds.unsigned_abs())),
            (None, None) => Next::Done,
        })
    }

    fn active(&self, pods: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
        pods.iter().filter(|pod| is_active(pod) && !self.deleted.is_going(pod)).cloned().collect()
    }

    /// How many ready pods of the set and of its siblings each node has.
    fn related(&self, set: &ReplicaSet, own: &[Arc<Pod>]) -> HashMap<String, usize> {
        let mut pods = own.to_vec();
        if let Some(owner) = controller(&set.metadata) {
            let others = self.siblings.get(owner.uid.as_str());
            let others =
                others.iter().filter(|other| other.uid() != set.uid()).filter_map(|other| other.uid());
            pods.extend(others.flat_map(|uid| self.owned.get(&uid)));
        }
        let mut nodes = HashMap::new();
        for pod in pods.iter().filter(|pod| is_active(pod) && is_ready(pod)) {
            *nodes.entry(storage::node_of_pod(pod).to_owned()).or_default() += 1;
        }
        nodes
    }

    /// Makes or deletes pods; reason and message if that failed.
    async fn apply(&self, set: &ReplicaSet, steps: Pods) -> Option<(String, String)> {
        match steps {
            Pods::Right => None,
            Pods::Create(count) => self.create(set, count).await,
            Pods::Delete(pods) => self.delete(set, pods).await,
        }
    }

    async fn create(&self, set: &ReplicaSet, count: usize) -> Option<(String, String)> {
        let template = set.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default();
        let pod = from_template(set, template);
        let create = async |_| match self.cluster.create(&pod).await {
            Ok(pod) => {
                let message = format!("Created pod: {}", pod.name_any());
                self.recorder.normal(set, events::SUCCESSFUL_CREATE, message);
                Ok(())
            }
            Err(error) => {
                let why = error.chain();
                self.recorder.warning(set, events::FAILED_CREATE, format!("Error creating: {why}"));
                Err((events::FAILED_CREATE.to_owned(), why))
            }
        };
        in_growing_batches(0..count, create).await.err()
    }

    async fn delete(&self, set: &ReplicaSet, pods: Vec<Arc<Pod>>) -> Option<(String, String)> {
        for pod in &pods {
            self.deleted.begin(pod);
        }
        let outcomes = join_all(pods.iter().map(|pod| self.cluster.delete(pod.as_ref()))).await;
        let mut failure = None;
        for (pod, outcome) in pods.iter().zip(outcomes) {
            let name = pod.name_any();
            match outcome {
                Ok(()) => {
                    self.recorder.normal(set, events::SUCCESSFUL_DELETE, format!("Deleted pod: {name}"));
                }
                Err(error) => {
                    self.deleted.failed(pod);
                    let why = error.chain();
                    self.recorder.warning(set, events::FAILED_DELETE, format!("Error deleting: {why}"));
                    failure = Some((events::FAILED_DELETE.to_owned(), why));
                }
            }
        }
        failure
    }
}
