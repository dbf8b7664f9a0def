//! DaemonSets: one pod on every node that suits.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::{CONTROLLER_REVISION_HASH, events};
use berth_kube::selectors::is_empty;
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Recorder, Result, storage};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use parking_lot::Mutex;

use super::ownership::{chooses, claim, controller};
use super::pods::{BURST, Deletions, from_template, in_growing_batches};
use super::revisions::History;
use plan::{ObservedSet, Step, node_of, plan, template_for, verdict};

const COMPONENT: &str = "daemonset-controller";
/// How long the replacement of a pod that ended by itself waits at first, and at most.
const REPLACE_AFTER: (SignedDuration, SignedDuration) =
    (SignedDuration::from_secs(1), SignedDuration::from_mins(15));

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let (sets, pods): (Cache<DaemonSet>, Cache<Pod>) = (cluster.cache(), cluster.cache());
    let (revisions, nodes): (Cache<ControllerRevision>, Cache<Node>) = (cluster.cache(), cluster.cache());
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        owned: pods
            .index(|pod| controller(&pod.metadata).map(|owner| owner.uid.clone()).into_iter().collect()),
        orphans: pods.index(|pod| {
            let orphan = controller(&pod.metadata).is_none();
            pod.namespace().filter(|_| orphan).into_iter().collect()
        }),
        revisions_of: revisions.index(|revision| {
            controller(&revision.metadata).map(|owner| owner.uid.clone()).into_iter().collect()
        }),
        orphan_revisions: revisions.index(|revision| {
            let orphan = controller(&revision.metadata).is_none();
            revision.namespace().filter(|_| orphan).into_iter().collect()
        }),
        by_namespace: sets.index(|set| set.namespace().into_iter().collect()),
        deleted: Deletions::default(),
        ended: Mutex::default(),
        cluster: cluster.clone(),
        sets,
        nodes,
    });
    let (of_pod, of_node) = (controller.clone(), controller.clone());
    Loop::new(&cluster, &cluster.queue("daemon-sets", Backoff::default()))
        .keyed(&controller.sets)
        .subscribe(&pods, move |before, after| of_pod.pod_changed(before, after))
        .subscribe(&controller.nodes, move |before, after| of_node.node_changed(before, after))
        .reads(&revisions)
        .run(32, move |set| controller.clone().reconcile(set))
        .await;
}

/// How often a node's pod ended by itself, and when it is replaced again.
type Ended = HashMap<(String, String), (SignedDuration, Timestamp)>;

struct Controller {
    cluster: Cluster,
    sets: Cache<DaemonSet>,
    nodes: Cache<Node>,
    recorder: Recorder,
    /// Pods by their controller's uid.
    owned: Index<Pod, String>,
    /// Pods without a controller, by namespace.
    orphans: Index<Pod, String>,
    /// Revisions by their controller's uid.
    revisions_of: Index<ControllerRevision, String>,
    /// Revisions without a controller, by namespace.
    orphan_revisions: Index<ControllerRevision, String>,
    by_namespace: Index<DaemonSet, String>,
    deleted: Deletions,
    /// By the set's uid and the node.
    ended: Mutex<Ended>,
}

impl Controller {
    /// The sets that a pod's change matters to: its own, or those that may adopt it.
    fn pod_changed(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) -> Vec<Key> {
        self.deleted.observe(before, after);
        let mut keys = Vec::new();
        for pod in before.into_iter().chain(after) {
            let namespace = pod.namespace().unwrap_or_default();
            if let Some(owner) = controller(&pod.metadata) {
                if owner.kind == "DaemonSet" {
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

    /// Every set, when a node comes or goes; else those that judge it differently now. Its status changes all the time.
    fn node_changed(&self, before: Option<&Arc<Node>>, after: Option<&Arc<Node>>) -> Vec<Key> {
        let sets = self.sets.list().into_iter();
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
        let Some(set) = self.sets.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&set.spec, set.uid()) else { return Ok(Next::Done) };
        if is_empty(&spec.selector) {
            let message = "This daemon set is selecting all pods. A non-empty selector is required.";
            self.recorder.warning(set.as_ref(), events::SELECTING_ALL, message);
            return Ok(Next::Done);
        }
        let selects = |meta: &_| chooses(&spec.selector, meta);
        let (owned, orphans) =
            (self.revisions_of.get(&uid), self.orphan_revisions.get(key.namespace.as_str()));
        let all = claim(&self.cluster, set.as_ref(), selects, owned, orphans).await?;
        let collisions = set.status.as_ref().and_then(|status| status.collision_count).unwrap_or(0);
        let history = History::observe(
            &self.cluster,
            set.as_ref(),
            &spec.template,
            CONTROLLER_REVISION_HASH,
            all,
            collisions,
        )
        .await?;
        let hash = history.newest.labels().get(CONTROLLER_REVISION_HASH).cloned().unwrap_or_default();
        let (owned, orphans) = (self.owned.get(&uid), self.orphans.get(key.namespace.as_str()));
        claim(&self.cluster, set.as_ref(), selects, owned, orphans).await?;

        let observed = self.observe(&set, &uid, &hash);
        let applied = self.apply(&observed, &uid, plan(&observed)).await;
        let observed = self.observe(&set, &uid, &hash);
        let (status, again) = observed.status(history.collisions);
        if set.status.as_ref() != Some(&status) {
            self.cluster.update_status(set.as_ref(), |set| set.status = Some(status)).await?;
        }
        applied?;
        if set.metadata.deletion_timestamp.is_none() {
            let of_pods = observed.pods.iter().filter_map(|pod| pod.labels().get(CONTROLLER_REVISION_HASH));
            let hashes: HashSet<&String> = of_pods.chain([&hash]).collect();
            let live = history.all.iter().filter(|revision| {
                revision.labels().get(CONTROLLER_REVISION_HASH).is_some_and(|hash| hashes.contains(hash))
            });
            let live: HashSet<String> = live.map(|revision| revision.name_any()).collect();
            history.truncate(&self.cluster, &live, spec.revision_history_limit).await?;
        }
        let again = again.into_iter().chain(self.next_replacement(&uid)).min();
        Ok(again.map_or(Next::Done, |seconds| Next::After(Duration::from_secs(seconds.unsigned_abs()))))
    }

    fn observe<'a>(&self, set: &'a DaemonSet, uid: &str, hash: &'a str) -> ObservedSet<'a> {
        let now = Timestamp::now();
        let selector = set.spec.as_ref().map(|spec| &spec.selector);
        let mut pods = self.owned.get(uid);
        pods.retain(|pod| {
            selector.is_some_and(|selector| chooses(selector, &pod.metadata)) && !self.deleted.is_going(pod)
        });
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
                let pod = from_template(set, template_for(set, observed.hash, &node));
                match self.cluster.create(&pod).await {
                    Ok(pod) => {
                        let message = format!("Created pod: {}", pod.name_any());
                        self.recorder.normal(set, events::SUCCESSFUL_CREATE, message);
                        Ok(())
                    }
                    Err(error) => {
                        let message = format!("Error creating: {}", error.chain());
                        self.recorder.warning(set, events::FAILED_CREATE, message);
                        Err(error)
                    }
                }
            }
            Step::Delete { pod } => self.delete(set, &pod).await,
            Step::Replace { pod, node } => {
                self.hold(uid, &node);
                let name = Key::of(pod.as_ref());
                if storage::phase_of_pod(&pod) == "Failed" {
                    let message =
                        format!("Found failed daemon pod {name} on node {node}, will try to kill it");
                    self.recorder.warning(set, events::FAILED_DAEMON_POD, message);
                } else {
                    let message =
                        format!("Found succeeded daemon pod {name} on node {node}, will try to delete it");
                    self.recorder.normal(set, events::SUCCEEDED_DAEMON_POD, message);
                }
                self.delete(set, &pod).await
            }
        }
    }

    async fn delete(&self, set: &DaemonSet, pod: &Pod) -> Result<()> {
        self.deleted.begin(pod);
        match self.cluster.delete(pod).await {
            Ok(()) => {
                let message = format!("Deleted pod: {}", pod.name_any());
                self.recorder.normal(set, events::SUCCESSFUL_DELETE, message);
                Ok(())
            }
            Err(error) => {
                self.deleted.failed(pod);
                let message =
                    format!("Error deleting {} on {}: {}", pod.name_any(), node_of(pod), error.chain());
                self.recorder.warning(set, events::FAILED_DELETE, message);
                Err(error)
            }
        }
    }
}
