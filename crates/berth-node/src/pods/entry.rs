//! What is kept of one pod.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use berth_runtime::{ContainerId, Runtime, State};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use parking_lot::{Mutex, MutexGuard};

use super::decide::Known;
use super::status::whole_seconds;

/// One pod, until nothing of it is left.
pub(super) struct Entry {
    pub(super) uid: String,
    seen: Mutex<Seen>,
    /// For the worker of the pod.
    pub(super) work: tokio::sync::Mutex<Work>,
    /// For the worker that writes its status.
    told: Mutex<Told>,
}

#[derive(Default)]
struct Seen {
    pod: Option<Arc<Pod>>,
    gone: bool,
    /// A container lacks something for its environment.
    misses: bool,
    /// What it lacks may have come.
    came: bool,
}

#[derive(Default)]
pub(super) struct Told {
    /// What Kubernetes is to know.
    pub(super) status: Option<PodStatus>,
    /// Nothing of the pod is left here: Kubernetes can forget it.
    pub(super) finished: bool,
}

#[derive(Default)]
pub(super) struct Work {
    /// By name.
    pub(super) containers: HashMap<String, Known>,
    /// Every run that the runtime still knows.
    pub(super) runs: HashSet<ContainerId>,
    /// Runs that are being stopped, with the grace they were given.
    pub(super) stopping: HashMap<ContainerId, Duration>,
    /// Runs whose end is waited for.
    pub(super) watched: HashSet<ContainerId>,
    /// Where the logs lie.
    pub(super) logs: Option<PathBuf>,
    /// The pod has ended, whether or not Kubernetes knows.
    pub(super) is_over: bool,
    /// The pod ends, or has ended, because its time was over.
    pub(super) is_expired: bool,
    /// When this process first looked at the pod.
    first_seen: Option<Timestamp>,
}

impl Entry {
    pub(super) fn new(uid: &str) -> Self {
        Self {
            uid: uid.to_owned(),
            seen: Mutex::default(),
            work: tokio::sync::Mutex::default(),
            told: Mutex::default(),
        }
    }

    pub(super) fn observe(&self, pod: &Arc<Pod>, gone: bool) {
        let mut seen = self.seen();
        seen.pod = Some(pod.clone());
        seen.gone = gone;
    }

    /// The pod as Kubernetes has it.
    pub(super) fn latest(&self) -> Option<Arc<Pod>> {
        let seen = self.seen();
        seen.pod.clone().filter(|_| !seen.gone)
    }

    /// The pod as it was last seen, be it gone.
    pub(super) fn last_seen(&self) -> Option<Arc<Pod>> {
        self.seen().pod.clone()
    }

    /// Notes whether a container lacks something; whether that may have come since it was looked for.
    pub(super) fn set_misses(&self, misses: bool) -> bool {
        let mut seen = self.seen();
        seen.misses = misses;
        misses && seen.came
    }

    /// Something that containers may lack has come to a namespace; whether one of this pod does.
    pub(super) fn something_came(&self, namespace: &str) -> bool {
        let mut seen = self.seen();
        let there = |pod: &Arc<Pod>| pod.metadata.namespace.as_deref() == Some(namespace);
        let here = seen.pod.as_ref().is_some_and(there);
        seen.came |= here;
        here && seen.misses
    }

    /// Whether something has come since this was last asked.
    pub(super) fn take_came(&self) -> bool {
        std::mem::take(&mut self.seen().came)
    }

    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock()
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }
}

impl Work {
    /// Takes up a run that was started in an earlier life of this process.
    pub(super) fn adopt(&mut self, id: ContainerId, state: State) {
        let known = self.containers.entry(id.name.clone()).or_default();
        match &known.run {
            Some(_) if known.attempt > id.attempt => {
                if let (State::Exited(ended), true) = (state, known.attempt == id.attempt + 1) {
                    known.last = Some(ended);
                }
            }
            latest => {
                if let (Some(State::Exited(ended)), true) = (latest, known.attempt + 1 == id.attempt) {
                    known.last = Some(ended.clone());
                }
                known.run = Some(state);
                known.attempt = id.attempt;
                known.crashes = id.attempt;
            }
        }
        self.runs.insert(id);
    }

    /// Looks which containers have ended.
    pub(super) fn look(&mut self, runtime: &Runtime) {
        for id in &self.runs {
            let Some(known) = self.containers.get_mut(&id.name) else { continue };
            if known.attempt == id.attempt
                && known.is_running()
                && let Some(state) = runtime.state(id)
            {
                known.run = Some(state);
            }
        }
    }

    /// The run of a container that goes on.
    pub(super) fn running(&self, uid: &str, name: &str) -> Option<ContainerId> {
        let known = self.containers.get(name).filter(|known| known.is_running())?;
        Some(ContainerId { pod_uid: uid.to_owned(), name: name.to_owned(), attempt: known.attempt })
    }

    /// When the node first saw the pod.
    pub(super) fn first_seen(&mut self, pod: &Pod) -> Timestamp {
        let here = *self.first_seen.get_or_insert_with(Timestamp::now);
        let told = pod.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        // The status has it from an earlier life of this process, or from this one without the part of a second.
        told.filter(|told| *told != whole_seconds(here)).unwrap_or(here)
    }

    pub(super) fn any_running(&self) -> bool {
        self.containers.values().any(Known::is_running)
    }
}

/// Whether Kubernetes knows that the pod has ended.
pub(super) fn is_final(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}
