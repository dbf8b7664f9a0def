//! From a pod's containers as they are to what comes next: which start, which stop, and what the pod is by now.
//!
//! Pure: no clock, no runtime, no Kubernetes.

use std::collections::HashMap;
use std::time::Duration;

use berth_core::Backoff;
use berth_runtime::{Exit, State};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, PodSpec};

/// What is known of one container.
#[derive(Debug, Clone, Default)]
pub(super) struct ContainerRecord {
    /// What became of its latest run; none before the first.
    pub(super) run: Option<State>,
    /// How the run before that ended.
    pub(super) last: Option<Exit>,
    /// How often it was started before the latest run.
    pub(super) attempt: u32,
    /// How often it was started anew without having run for long.
    pub(super) crashes: u32,
    /// Why the next run could not be started.
    pub(super) problem: Option<Problem>,
    /// What its probes say; a container without is started and ready as soon as it runs.
    pub(super) health: Health,
}

/// What a container's probes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Health {
    pub(super) started: bool,
    pub(super) ready: bool,
}

impl Default for Health {
    fn default() -> Self {
        Self { started: true, ready: true }
    }
}

/// Why a run could not be started, and when to try again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) tries: u32,
    pub(super) again: Timestamp,
}

impl ContainerRecord {
    pub(super) fn is_running(&self) -> bool {
        matches!(self.run, Some(State::Running { .. }))
    }

    fn is_started(&self) -> bool {
        self.is_running() && self.health.started
    }

    pub(super) fn ended(&self) -> Option<&Exit> {
        match &self.run {
            Some(State::Exited(ended)) => Some(ended),
            _ => None,
        }
    }

    /// How long to wait after the end of its latest run before the next.
    fn pause(&self) -> Duration {
        let long = self.ended().is_some_and(|ended| {
            ended.started.is_some_and(|started| ended.finished.duration_since(started) >= HEALTHY)
        });
        if long || self.crashes == 0 { Duration::ZERO } else { RESTART.exact_pause(self.crashes) }
    }
}

/// The pauses between the starts of a container that ends again and again, as the kubelet has them.
pub(super) const RESTART: Backoff =
    Backoff { first: Duration::from_secs(10), longest: Duration::from_mins(5) };

/// A container that ran so long is not counted as crashing.
const HEALTHY: SignedDuration = SignedDuration::from_mins(10);

/// What a pod is by now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Pending,
    Running,
    Succeeded,
    Failed,
}

impl Phase {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }

    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// Why a container does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// What the node does next about a pod, and how the pod stands meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    /// The containers to be started now.
    pub(super) start: Vec<String>,
    /// The containers to be stopped, as nobody needs them any more.
    pub(super) stop: Vec<String>,
    /// Why containers that do not run do not.
    pub(super) waiting: HashMap<String, Waiting>,
    /// The phase that the pod's status gets.
    pub(super) phase: Phase,
    /// Whether its init containers have done their work.
    pub(super) initialized: bool,
    /// When to decide anew even if nothing happens.
    pub(super) wake: Option<Timestamp>,
    /// The pod is ended because it was there for longer than it may be.
    pub(super) is_expired: bool,
}

/// Whether an init container goes on running beside the others.
pub(super) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Until when a pod may be active that the node first saw at this time.
pub(super) fn deadline(spec: &PodSpec, first_observed: Timestamp) -> Option<Timestamp> {
    let allowed = SignedDuration::from_secs(spec.active_deadline_seconds?);
    // What no calendar knows never comes.
    first_observed.checked_add(allowed).ok()
}

/// Returns what to do next about a pod whose containers are as `known` says.
pub(super) fn decide(
    spec: &PodSpec,
    known: &HashMap<String, ContainerRecord>,
    volumes_ready: bool,
    deadline: Option<Timestamp>,
    now: Timestamp,
    whole_name: &str,
) -> Decision {
    let nothing = ContainerRecord::default();
    let record = |name: &str| known.get(name).unwrap_or(&nothing);
    let begun = spec.containers.iter().any(|container| record(&container.name).run.is_some());
    let initial = if spec.init_containers.as_ref().is_some_and(|all| !all.is_empty()) {
        "PodInitializing"
    } else {
        "ContainerCreating"
    };
    let mut decider = Decider { volumes_ready, now, whole_name, decision: Decision::new() };
    let mut failed = false;
    for container in spec.init_containers.iter().flatten() {
        let (state, sidecar) = (record(&container.name), is_sidecar(container));
        let done = match &state.run {
            Some(State::Running { .. }) => sidecar && state.is_started(),
            Some(State::Exited(ended)) => !sidecar && (ended.code == 0 || begun),
            None => begun && !sidecar,
        };
        if !decider.decision.initialized {
            decider.wait(&container.name, "PodInitializing");
        } else if !done {
            if restarts(spec, container, state) {
                decider.start(&container.name, state, initial);
            } else if state.ended().is_some() {
                failed = true;
            }
            decider.decision.initialized = begun;
        }
    }
    for container in &spec.containers {
        let state = record(&container.name);
        if !decider.decision.initialized {
            decider.wait(&container.name, "PodInitializing");
        } else if !state.is_running() && restarts(spec, container, state) {
            decider.start(&container.name, state, initial);
        }
    }
    // They are started whatever the others do, and once.
    for container in spec.ephemeral_containers.iter().flatten() {
        let state = record(&container.name);
        if state.run.is_none() {
            decider.start(&container.name, state, initial);
        }
    }
    let mut decision = decider.decision;
    decision.finish(spec, known, failed);
    if let Some(deadline) = deadline {
        decision.keep(deadline, spec, known, now);
    }
    decision
}

/// Whether a container that does not run is to run (again).
fn restarts(spec: &PodSpec, container: &Container, state: &ContainerRecord) -> bool {
    let Some(ended) = state.ended() else { return !state.is_running() };
    let policy = container.restart_policy.as_deref().or(spec.restart_policy.as_deref()).unwrap_or("Always");
    match policy {
        "Never" => false,
        "OnFailure" => ended.code != 0,
        _ => true,
    }
}

struct Decider<'a> {
    volumes_ready: bool,
    now: Timestamp,
    whole_name: &'a str,
    decision: Decision,
}

impl Decider<'_> {
    fn wait(&mut self, container: &str, reason: &'static str) {
        self.decision.waiting.insert(container.to_owned(), Waiting { reason, message: String::new() });
    }

    fn start(&mut self, container: &str, state: &ContainerRecord, initial: &'static str) {
        if !self.volumes_ready {
            self.wait(container, initial);
            return;
        }
        let (due, waiting) = if let Some(problem) = &state.problem {
            (problem.again, Waiting { reason: problem.reason, message: problem.message.clone() })
        } else if let Some(ended) = state.ended() {
            let pause = state.pause();
            let message = format!(
                "back-off {} restarting failed container={} pod={}",
                in_words(pause),
                container,
                self.whole_name
            );
            (ended.finished + pause, Waiting { reason: "CrashLoopBackOff", message })
        } else {
            (self.now, Waiting { reason: initial, message: String::new() })
        };
        if due <= self.now {
            self.decision.start.push(container.to_owned());
        } else {
            self.decision.wake_at(due);
        }
        self.decision.waiting.insert(container.to_owned(), waiting);
    }
}

impl Decision {
    fn new() -> Self {
        Self {
            start: Vec::new(),
            stop: Vec::new(),
            waiting: HashMap::new(),
            phase: Phase::Pending,
            initialized: true,
            wake: None,
            is_expired: false,
        }
    }

    fn wake_at(&mut self, time: Timestamp) {
        self.wake = Some(self.wake.map_or(time, |wake| wake.min(time)));
    }

    /// Ends a pod whose time is over: nothing is started any more, what runs is stopped, sidecars after the others.
    fn keep(
        &mut self,
        deadline: Timestamp,
        spec: &PodSpec,
        known: &HashMap<String, ContainerRecord>,
        now: Timestamp,
    ) {
        let ends = || known.values().filter_map(ContainerRecord::ended).map(|ended| ended.finished);
        if self.phase.is_final() && ends().all(|finished| finished <= deadline) {
            return;
        }
        if now < deadline {
            self.wake_at(deadline);
            return;
        }
        self.is_expired = true;
        self.start.clear();
        self.wake = None;
        // A container that ended does not wait to run again.
        self.waiting.retain(|name, _| known.get(name).is_none_or(|known| known.run.is_none()));
        let runs =
            |container: &&Container| known.get(&container.name).is_some_and(ContainerRecord::is_running);
        let all = spec.init_containers.iter().flatten().chain(&spec.containers);
        let (sidecars, others): (Vec<&Container>, Vec<&Container>) =
            all.filter(runs).partition(|container| is_sidecar(container));
        let next = if others.is_empty() { sidecars } else { others };
        self.stop = next.into_iter().map(|container| container.name.clone()).collect();
        self.stop.extend(running_ephemeral(spec, known));
        if self.stop.is_empty() {
            self.phase = Phase::Failed;
        }
    }

    fn finish(
        &mut self,
        spec: &PodSpec,
        known: &HashMap<String, ContainerRecord>,
        failed_to_initialize: bool,
    ) {
        let record = |container: &Container| known.get(&container.name);
        let ended = |container: &Container| record(container).and_then(ContainerRecord::ended);
        let over = failed_to_initialize
            || spec
                .containers
                .iter()
                .all(|container| ended(container).is_some() && !self.waiting.contains_key(&container.name));
        let sidecars = || spec.init_containers.iter().flatten();
        if over {
            self.start.clear();
            let ephemeral = || spec.ephemeral_containers.iter().flatten();
            self.waiting.retain(|name, _| {
                !sidecars().any(|container| container.name == *name && is_sidecar(container))
                    && !ephemeral().any(|container| container.name == *name)
            });
            let running = sidecars().chain(&spec.containers);
            let running =
                running.filter(|container| record(container).is_some_and(ContainerRecord::is_running));
            self.stop = running.map(|container| container.name.clone()).collect();
            self.stop.extend(running_ephemeral(spec, known));
        }
        let all_good =
            || spec.containers.iter().all(|container| ended(container).is_some_and(|ended| ended.code == 0));
        self.phase = if over && self.stop.is_empty() {
            if !failed_to_initialize && all_good() { Phase::Succeeded } else { Phase::Failed }
        } else if self.initialized
            && spec.containers.iter().all(|c| record(c).is_some_and(|known| known.run.is_some()))
        {
            Phase::Running
        } else {
            Phase::Pending
        };
    }
}

/// The ephemeral containers of a pod that run.
fn running_ephemeral(spec: &PodSpec, known: &HashMap<String, ContainerRecord>) -> Vec<String> {
    let all = spec.ephemeral_containers.iter().flatten().map(|container| container.name.clone());
    all.filter(|name| known.get(name).is_some_and(ContainerRecord::is_running)).collect()
}

/// A duration as Go prints it: `10s`, `1m20s`, `5m0s`.
fn in_words(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 60 { format!("{seconds}s") } else { format!("{}m{}s", seconds / 60, seconds % 60) }
}
