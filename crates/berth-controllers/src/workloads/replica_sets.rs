//! ReplicaSets: as many pods as asked for.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use berth_core::names::events;
use berth_kube::{Backoff, Cluster, Index, Key, Loop, Next, Result, storage};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::ownership::controller;
use super::pods::{Pods, from_template, in_growing_batches, is_active, is_ready};
use super::workload::{Workloads, again_after, is_selected};
pub(super) use plan::rank_in_job;
use plan::{Step, plan, status};

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let sets = Workloads::new(&cluster, "replicaset-controller", is_selected);
    let controller = Arc::new(Controller {
        pods: Pods::new(&sets),
        siblings: sets.cache.index(|set: &ReplicaSet| {
            controller(&set.metadata).map(|owner| owner.uid.clone()).into_iter().collect()
        }),
        sets,
    });
    let of_pod = controller.clone();
    let queue = controller.sets.cluster.queue("replica-sets", Backoff::default());
    Loop::new(&controller.sets.cluster, &queue)
        .keyed(&controller.sets.cache)
        .subscribe(&controller.pods.dependents.cache, move |before, after| {
            of_pod.pods.changed(&of_pod.sets, before, after)
        })
        .run(32, move |set| controller.clone().reconcile(set))
        .await;
}

struct Controller {
    sets: Workloads<ReplicaSet>,
    pods: Pods,
    /// Sets by their controller's uid.
    siblings: Index<ReplicaSet, String>,
}

impl Controller {
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(set) = self.sets.cache.get(&key) else { return Ok(Next::Done) };
        let Some(uid) = set.uid() else { return Ok(Next::Done) };
        let pods = self.sets.claim(&set, &self.pods.dependents).await?;
        let mut active = self.active(&pods);
        let terminating = pods.iter().filter(|pod| !storage::is_over(pod) && !active.contains(pod)).count();
        let mut failure = None;
        if set.metadata.deletion_timestamp.is_none() {
            let step = plan(&set, &active, &self.related(&set, &pods), Timestamp::now());
            failure = self.apply(&set, step).await;
            active = self.active(&self.pods.of(&uid));
            active.retain(|pod| is_selected(set.as_ref(), &pod.metadata));
        }
        let (status, again) = status(&set, &active, terminating, failure.as_ref(), Timestamp::now());
        self.sets.write_status(&set, status).await?;
        Ok(if failure.is_some() { Next::Retry } else { again_after(again) })
    }

    fn active(&self, pods: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
        pods.iter().filter(|pod| is_active(pod) && !self.pods.is_going(pod)).cloned().collect()
    }

    /// How many ready pods of the set and of its siblings each node has.
    fn related(&self, set: &ReplicaSet, own: &[Arc<Pod>]) -> HashMap<String, usize> {
        let mut pods = own.to_vec();
        if let Some(owner) = controller(&set.metadata) {
            let others = self.siblings.get(owner.uid.as_str());
            let others =
                others.iter().filter(|other| other.uid() != set.uid()).filter_map(|other| other.uid());
            pods.extend(others.flat_map(|uid| self.pods.of(&uid)));
        }
        let mut nodes = HashMap::new();
        for pod in pods.iter().filter(|pod| is_active(pod) && is_ready(pod)) {
            *nodes.entry(storage::node_of_pod(pod).to_owned()).or_default() += 1;
        }
        nodes
    }

    /// Creates or deletes pods; reason and message if that failed.
    async fn apply(&self, set: &ReplicaSet, step: Step) -> Option<(String, String)> {
        match step {
            Step::Nothing => None,
            Step::Create(count) => {
                let template = set.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default();
                let pod = from_template(set, template);
                let created = in_growing_batches(0..count, |_| self.pods.create(set, &pod)).await;
                created.err().map(|error| (events::FAILED_CREATE.to_owned(), error.chain()))
            }
            Step::Delete(pods) => {
                let deleted = join_all(pods.iter().map(|pod| self.pods.delete(set, pod))).await;
                let error = deleted.into_iter().filter_map(Result::err).next_back();
                error.map(|error| (events::FAILED_DELETE.to_owned(), error.chain()))
            }
        }
    }
}
