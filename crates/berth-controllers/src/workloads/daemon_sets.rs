//! DaemonSets: one pod on every node that suits.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use berth_core::names::{CONTROLLER_REVISION_HASH, events};
use berth_kube::selectors::is_empty;
use berth_kube::{Backoff, Cache, Cluster, Key, Loop, Next, Result, storage};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use parking_lot::Mutex;

use super::ownership::Dependents;
use super::pods::{BURST, Pods, from_template, in_growing_batches};
use super::revisions::History;
use super::workload::{Workloads, again_after, is_selected};
use plan::{ObservedSet, Step, plan, spare_revisions, template_for, verdict};

/// How long the replacement of a pod that ended by itself waits at first, and at most.
const REPLACE_AFTER: (SignedDuration, SignedDuration) =
    (SignedDuration::from_secs(1), SignedDuration::from_mins(15));

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let sets = Workloads::new(&cluster, "daemonset-controller", is_selected);
    let controller = Arc::new(Controller {
        pods: Pods::new(&sets),
        revisions: Dependents::new(&sets.cluster),
        nodes: sets.cluster.cache(),
        ended: Mutex::default(),
        sets,
    });
    let (of_pod, of_node) = (controller.clone(), controller.clone());
    let queue = controller.sets.cluster.queue("daemon-sets", Backoff::default());
    Loop::new(&controller.sets.cluster, &queue)
        .keyed(&controller.sets.cache)
        .subscribe(&controller.pods.dependents.cache, move |before, after| {
            of_pod.pods.changed(&of_pod.sets, before, after)
        })
        .subscribe(&controller.nodes, move |before, after| of_node.node_changed(before, after))
        .reads(&controller.revisions.cache)
        .run(32, move |set| controller.clone().reconcile(set))
        .await;
}

/// How often a node's pod ended by itself, and when it is replaced again.
type Ended = HashMap<(String, String), (SignedDuration, Timestamp)>;

struct Controller {
    sets: Workloads<DaemonSet>,
    pods: Pods,
    revisions: Dependents<ControllerRevision>,
    nodes: Cache<Node>,
    /// By the set's uid and the node.
    ended: Mutex<Ended>,
}

impl Controller {
    /// Every set, when a node comes or goes; else those that judge it differently now. Its status changes all the time.
    fn node_changed(&self, before: Option<&Arc<Node>>, after: Option<&Arc<Node>>) -> Vec<Key> {
        let sets = self.sets.cache.list().into_iter();
        match (before, after) {
            (Some(before), Some(after)) => {
                let unchanged = before.spec == after.spec && before.metadata.labels == after.metadata.labels;
                sets.filter(|set| !unchanged && verdict(set, before) != verdict(set, after))
                    .map(|set| Key::of(set.as_ref()))
                    .collect()
            }
            _ => sets.map(|set| Key::of(set.as_ref())).collect(),
        }
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(set) = self.sets.cache.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&set.spec, set.uid()) else { return Ok(Next::Done) };
        if is_empty(&spec.selector) {
            let message = "This daemon set is selecting all pods. A non-empty selector is required.";
            self.sets.recorder.warning(set.as_ref(), events::SELECTING_ALL, message);
            return Ok(Next::Done);
        }
        let collisions = set.status.as_ref().and_then(|status| status.collision_count).unwrap_or(0);
        let history = History::observe(
            &self.sets.cluster,
            set.as_ref(),
            &spec.template,
            CONTROLLER_REVISION_HASH,
            &self.revisions,
            collisions,
        )
        .await?;
        let Some(history) = history else { return Ok(Next::Done) };
        let hash = history.newest.labels().get(CONTROLLER_REVISION_HASH).cloned().unwrap_or_default();
        self.sets.claim(&set, &self.pods.dependents).await?;

        let observed = self.observe(&set, &uid, &hash);
        let applied = self.apply(&observed, &uid, plan(&observed)).await;
        let observed = self.observe(&set, &uid, &hash);
        let (status, again) = observed.status(history.collisions);
        self.sets.write_status(&set, status).await?;
        applied?;
        if set.metadata.deletion_timestamp.is_none() {
            let of_pods = observed.pods.iter().filter_map(|pod| pod.labels().get(CONTROLLER_REVISION_HASH));
            let hashes: HashSet<&String> = of_pods.chain([&hash]).collect();
            let live = history.all.iter().filter(|revision| {
                revision.labels().get(CONTROLLER_REVISION_HASH).is_some_and(|hash| hashes.contains(hash))
            });
            let live: HashSet<String> = live.map(|revision| revision.name_any()).collect();
            // The newest is live, and none of the old ones.
            let limit = spare_revisions(spec.revision_history_limit, live.len().saturating_sub(1));
            history.truncate(&self.sets.cluster, &live, Some(limit)).await?;
        }
        let again = again.into_iter().chain(self.next_replacement(&uid)).min();
        Ok(again_after(again))
    }

    fn observe<'a>(&self, set: &'a DaemonSet, uid: &str, hash: &'a str) -> ObservedSet<'a> {
        let now = Timestamp::now();
        let mut pods = self.pods.of(uid);
        pods.retain(|pod| is_selected(set, &pod.metadata) && !self.pods.is_going(pod));
        let ended = self.ended.lock();
        let held = ended.iter().filter(|((set, _), (_, until))| set == uid && *until > now);
        let held = held.map(|((_, node), _)| node.clone()).collect();
        ObservedSet { set, hash, nodes: self.nodes.list(), pods, held, now }
    }

    /// In how many seconds a pod that ended may be replaced.
    fn next_replacement(&self, uid: &str) -> Option<i64> {
        let now = Timestamp::now();
        let ended = self.ended.lock();
        let waiting = ended.iter().filter(|((set, _), (_, until))| set == uid && *until > now);
        waiting.map(|(_, (_, until))| until.duration_since(now).as_secs() + 1).min()
    }

    /// Has the replacement of a node's pod wait, twice as long as the last time.
    fn hold(&self, uid: &str, node: &str) {
        let (first, most) = REPLACE_AFTER;
        let now = Timestamp::now();
        let mut ended = self.ended.lock();
        // One that ran for twice the longest pause counts as well again.
        ended.retain(|_, (_, until)| now.duration_since(*until) < most * 2);
        let entry = ended.entry((uid.to_owned(), node.to_owned())).or_insert((SignedDuration::ZERO, now));
        let pause = (entry.0 * 2).clamp(first, most);
        *entry = (pause, now.checked_add(pause).unwrap_or(now));
    }

    async fn apply(&self, observed: &ObservedSet<'_>, uid: &str, steps: Vec<Step>) -> Result<()> {
        in_growing_batches(steps.into_iter().take(BURST), |step| self.take(observed, uid, step)).await
    }

    async fn take(&self, observed: &ObservedSet<'_>, uid: &str, step: Step) -> Result<()> {
        let set = observed.set;
        match step {
            Step::Create { node } => {
                self.pods.create(set, &from_template(set, template_for(set, observed.hash, &node))).await
            }
            Step::Delete { pod } => self.pods.delete(set, &pod).await,
            Step::Replace { pod, node } => {
                self.hold(uid, &node);
                let name = Key::of(pod.as_ref());
                if storage::phase_of_pod(&pod) == "Failed" {
                    let message =
                        format!("Found failed daemon pod {name} on node {node}, will try to kill it");
                    self.sets.recorder.warning(set, events::FAILED_DAEMON_POD, message);
                } else {
                    let message =
                        format!("Found succeeded daemon pod {name} on node {node}, will try to delete it");
                    self.sets.recorder.normal(set, events::SUCCEEDED_DAEMON_POD, message);
                }
                self.pods.delete(set, &pod).await
            }
        }
    }
}
