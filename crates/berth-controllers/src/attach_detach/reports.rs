//! Says in each node's status which volumes are attached: one write at a time per node, with all changes that came
//! together.
//!
//! The write is refused if the node changed since it was read, so a volume leaves the list only while the node's own
//! list of volumes in use is as we know it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_kube::{Backoff, Cache, Cluster, Key, Loop, Next, Queue, Result};
use k8s_openapi::api::core::v1::{AttachedVolume, Node};
use parking_lot::Mutex;

/// A node's status is long when it has many volumes: what changes while one was written, and as long again but at most
/// this, goes together.
const LONGEST_REST: Duration = Duration::from_millis(50);

/// Changes of what nodes report; cheap to clone.
#[derive(Clone)]
pub(super) struct Reports {
    cluster: Cluster,
    nodes: Cache<Node>,
    waiting: Arc<Mutex<HashMap<String, Waiting>>>,
    queue: Queue<String>,
    /// Volumes to reconcile once a change is written.
    volumes: Queue<String>,
}

#[derive(Default)]
struct Waiting {
    /// What is not yet sent, by volume.
    changes: HashMap<String, Report>,
    /// What the status update under way reports, by volume.
    sent: HashMap<String, Report>,
}

/// What the status of a node says of a volume: the path of its device if it is attached, which is empty for CSI.
pub(super) type Report = Option<String>;

impl Reports {
    pub(super) fn new(cluster: &Cluster, volumes: Queue<String>) -> Self {
        Self {
            cluster: cluster.clone(),
            nodes: cluster.cache(),
            waiting: Arc::default(),
            queue: cluster.queue("attached-volumes", Backoff::default()),
            volumes,
        }
    }

    /// Asks for a change; the volume is reconciled again when it is written. What is on its way already is not asked for
    /// again.
    pub(super) fn set(&self, node: &str, volume: &str, attached: Report) {
        let mut waiting = self.waiting();
        let here = waiting.entry(node.to_owned()).or_default();
        let latest = here.changes.get(volume).or_else(|| here.sent.get(volume));
        if latest == Some(&attached) {
            return;
        }
        here.changes.insert(volume.to_owned(), attached);
        drop(waiting);
        self.queue.add(node.to_owned());
    }

    /// Whether no change of this volume is on its way.
    pub(super) fn settled(&self, node: &str, volume: &str) -> bool {
        self.waiting()
            .get(node)
            .is_none_or(|waiting| !waiting.changes.contains_key(volume) && !waiting.sent.contains_key(volume))
    }

    /// Writes changes until the cluster's shutdown.
    pub(super) async fn run(&self) {
        let work = |node: String| {
            let reports = self.clone();
            async move { reports.write(&node).await }
        };
        Loop::new(&self.cluster, &self.queue).reads(&self.nodes).run(16, work).await;
    }

    async fn write(&self, name: &str) -> Result<Next> {
        let changes = {
            let mut waiting = self.waiting();
            let Some(waiting) = waiting.get_mut(name) else { return Ok(Next::Done) };
            let changes = std::mem::take(&mut waiting.changes);
            waiting.sent.clone_from(&changes);
            changes
        };
        let begun = Instant::now();
        let outcome = self.send(name, &changes).await;
        let rest = begun.elapsed().min(LONGEST_REST);
        self.answered(name, &changes, outcome.is_err());
        outcome?;
        for volume in changes.into_keys() {
            self.volumes.add(volume);
        }
        tokio::time::sleep(rest).await;
        Ok(Next::Done)
    }

    /// Takes in what became of changes that were sent; those that failed wait again, unless the opposite does.
    fn answered(&self, name: &str, changes: &HashMap<String, Report>, failed: bool) {
        let mut waiting = self.waiting();
        let Some(node) = waiting.get_mut(name) else { return };
        node.sent.clear();
        if failed {
            for (volume, attached) in changes {
                node.changes.entry(volume.clone()).or_insert_with(|| attached.clone());
            }
        }
        if node.changes.is_empty() {
            waiting.remove(name);
        }
    }

    async fn send(&self, name: &str, changes: &HashMap<String, Report>) -> Result<()> {
        let Some(node) = self.nodes.named(name) else { return Ok(()) };
        match self.patch(&node, changes).await {
            // The node writes its status often: try once more at once, then leave it to the backoff.
            Err(error) if error.is_conflict() => match self.cluster.fetch::<Node>(&Key::cluster(name)).await?
            {
                Some(node) => self.patch(&node, &still_right(&node, changes)).await,
                None => Ok(()),
            },
            Err(error) if error.is_not_found() => Ok(()),
            outcome => outcome,
        }
    }

    async fn patch(&self, node: &Node, changes: &HashMap<String, Report>) -> Result<()> {
        self.cluster
            .update_status(node, |node| {
                let status = node.status.get_or_insert_default();
                let list = changed(status.volumes_attached.take().unwrap_or_default(), changes);
                status.volumes_attached = (!list.is_empty()).then_some(list);
            })
            .await?;
        tracing::debug!(node = node.metadata.name, changes = changes.len(), "attached volumes reported");
        Ok(())
    }

    fn waiting(&self) -> parking_lot::MutexGuard<'_, HashMap<String, Waiting>> {
        self.waiting.lock()
    }
}

/// The changes but those that take away what the node has begun to use; the volumes concerned are reconciled again.
fn still_right(node: &Node, changes: &HashMap<String, Report>) -> HashMap<String, Report> {
    let in_use = node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref()).unwrap_or_default();
    let is_right = |(volume, report): &(&String, &Report)| report.is_some() || !in_use.contains(volume);
    changes.iter().filter(is_right).map(|(volume, report)| (volume.clone(), report.clone())).collect()
}

/// The list after the changes. What stays keeps its place, so that a change that is made already writes nothing.
fn changed(mut list: Vec<AttachedVolume>, changes: &HashMap<String, Report>) -> Vec<AttachedVolume> {
    list.retain(|volume| changes.get(&volume.name) != Some(&None));
    let mut attached: Vec<_> =
        changes.iter().filter_map(|(name, report)| Some((name, report.as_ref()?))).collect();
    attached.sort();
    for (name, device_path) in attached {
        match list.iter_mut().find(|volume| volume.name == *name) {
            Some(known) => known.device_path.clone_from(device_path),
            None => list.push(AttachedVolume { name: name.clone(), device_path: device_path.clone() }),
        }
    }
    list
}
