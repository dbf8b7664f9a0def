//! ReplicaSets: as many pods as asked for.

mod plan;
#[cfg(test)]
mod tests;

use berth_core::names::events;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Recorder, Result};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use parking_lot::{Mutex, MutexGuard};

use super::ownership::{chooses, claim, controller, reference};
use berth_kube::storage;
use plan::{Pods, is_active, is_ready, plan, status};

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
        deleted: Mutex::default(),
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
    /// Uids of pods that were deleted, until they are seen to go.
    deleted: Mutex<HashSet<String>>,
}

impl Controller {
    /// The sets that a pod's change matters to: its own, or those that may adopt it.
    fn pod_changed(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) -> Vec<Key> {
        if let Some(before) = before
            && after.is_none_or(|after| after.metadata.deletion_timestamp.is_some())
            && let Some(uid) = before.uid()
        {
            self.deleted().remove(&uid);
        }
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
        let pods = claim(&self.cluster, set.as_ref(), &spec.selector, owned, orphans).await?;
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
        let deleted = self.deleted();
        let going = |pod: &Pod| pod.uid().is_some_and(|uid| deleted.contains(&uid));
        pods.iter().filter(|pod| is_active(pod) && !going(pod)).cloned().collect()
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

    /// Makes pods, twice as many at a time as long as it goes well, so that a refusal is heard after one and not after
    /// hundreds.
    async fn create(&self, set: &ReplicaSet, count: usize) -> Option<(String, String)> {
        let pod = from_template(set);
        let (mut left, mut batch) = (count, 1);
        while left > 0 {
            let now = batch.min(left);
            let made = join_all((0..now).map(|_| self.cluster.create(&pod))).await;
            let mut failure = None;
            for made in made {
                match made {
                    Ok(pod) => {
                        let message = format!("Created pod: {}", pod.name_any());
                        self.recorder.normal(set, events::SUCCESSFUL_CREATE, message);
                    }
                    Err(error) => {
                        let why = error.chain();
                        self.recorder.warning(set, events::FAILED_CREATE, format!("Error creating: {why}"));
                        failure = Some((events::FAILED_CREATE.to_owned(), why));
                    }
                }
            }
            if failure.is_some() {
                return failure;
            }
            left -= now;
            batch *= 2;
        }
        None
    }

    async fn delete(&self, set: &ReplicaSet, pods: Vec<Arc<Pod>>) -> Option<(String, String)> {
        self.deleted().extend(pods.iter().filter_map(|pod| pod.uid()));
        let outcomes = join_all(pods.iter().map(|pod| self.cluster.delete(pod.as_ref()))).await;
        let mut failure = None;
        for (pod, outcome) in pods.iter().zip(outcomes) {
            let name = pod.name_any();
            match outcome {
                Ok(()) => {
                    self.recorder.normal(set, events::SUCCESSFUL_DELETE, format!("Deleted pod: {name}"));
                }
                Err(error) => {
                    self.deleted().remove(&pod.uid().unwrap_or_default());
                    let why = error.chain();
                    self.recorder.warning(set, events::FAILED_DELETE, format!("Error deleting: {why}"));
                    failure = Some((events::FAILED_DELETE.to_owned(), why));
                }
            }
        }
        failure
    }

    fn deleted(&self) -> MutexGuard<'_, HashSet<String>> {
        self.deleted.lock()
    }
}

fn from_template(set: &ReplicaSet) -> Pod {
    let template = set.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default();
    let meta = template.metadata.unwrap_or_default();
    let mut prefix = format!("{}-", set.name_any());
    // A name that would be too long is used without the dash, as Kubernetes does.
    if prefix.len() > 253 {
        prefix.pop();
    }
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(prefix),
            namespace: set.namespace(),
            labels: meta.labels,
            annotations: meta.annotations,
            finalizers: meta.finalizers,
            owner_references: Some(vec![reference(set)]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}
