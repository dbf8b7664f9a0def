//! A pod's row: what `kubectl get pods` makes of its state.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::super::age;
use super::super::read::{at, flag, has, items, name, number, text};
use super::super::table::{AGE, Column, NAME, or, string, wide};

pub(super) const COLUMNS: &[Column] = &[
    NAME,
    string("Ready", "How many of its containers are ready."),
    string("Status", "What its containers are doing."),
    string("Restarts", "How often its containers were restarted, and when last."),
    AGE,
    wide("IP", "Its address."),
    wide("Node", "The node it is on."),
    wide("Nominated Node", "The node that is being cleared for it."),
    wide("Readiness Gates", "How many of its readiness gates are open."),
];

/// What has been counted so far.
#[derive(Default)]
struct State {
    reason: String,
    ready: usize,
    restarts: i64,
    last: Option<Timestamp>,
}

impl State {
    fn restarted(&mut self, status: &Value) {
        self.restarts += number(status, &["restartCount"]).unwrap_or_default();
        let finished = text(status, &["lastState", "terminated", "finishedAt"]).parse::<Timestamp>().ok();
        self.last = self.last.max(finished);
    }
}

/// The cells of a pod.
pub(super) fn cells(pod: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (at(pod, &["spec"]), at(pod, &["status"]));
    let state = state(pod);
    let sidecars = items(spec, &["initContainers"]).iter().filter(|c| is_sidecar(c)).count();
    let total = items(spec, &["containers"]).len() + sidecars;
    let restarts = match state.last.filter(|_| state.restarts != 0) {
        Some(last) => format!("{} ({} ago)", state.restarts, age::human(now.duration_since(last).as_secs())),
        None => state.restarts.to_string(),
    };
    let address = items(status, &["podIPs"]).first().map_or("", |address| text(address, &["ip"]));
    vec![
        json!(name(pod)),
        json!(format!("{}/{total}", state.ready)),
        json!(state.reason),
        json!(restarts),
        json!(age::of(pod, now)),
        json!(or(address, "<none>")),
        json!(or(text(spec, &["nodeName"]), "<none>")),
        json!(or(text(status, &["nominatedNodeName"]), "<none>")),
        json!(gates(spec, status)),
    ]
}

fn state(pod: &Value) -> State {
    let status = at(pod, &["status"]);
    let phase = text(status, &["phase"]);
    let mut state = State { reason: or(text(status, &["reason"]), phase).to_owned(), ..State::default() };
    let gated = items(status, &["conditions"])
        .iter()
        .any(|c| text(c, &["type"]) == "PodScheduled" && text(c, &["reason"]) == "SchedulingGated");
    if gated {
        "SchedulingGated".clone_into(&mut state.reason);
    }
    let mut of_sidecars = State::default();
    let initializing = initialize(pod, &mut state, &mut of_sidecars);
    if !initializing || condition(status, "Initialized") {
        state.restarts = of_sidecars.restarts;
        state.last = of_sidecars.last;
        run(status, &mut state);
    }
    if has(pod, &["metadata", "deletionTimestamp"]) {
        if text(status, &["reason"]) == "NodeLost" {
            "Unknown".clone_into(&mut state.reason);
        } else if !matches!(phase, "Failed" | "Succeeded") {
            "Terminating".clone_into(&mut state.reason);
        }
    }
    state
}

/// Looks at the init containers; whether one of them is still at work.
fn initialize(pod: &Value, state: &mut State, of_sidecars: &mut State) -> bool {
    let containers = items(pod, &["spec", "initContainers"]);
    for (index, status) in items(pod, &["status", "initContainerStatuses"]).iter().enumerate() {
        let container = containers.iter().find(|c| text(c, &["name"]) == text(status, &["name"]));
        let sidecar = container.is_some_and(is_sidecar);
        state.restarted(status);
        if sidecar {
            of_sidecars.restarted(status);
        }
        let terminated = at(status, &["state", "terminated"]);
        let waiting = text(status, &["state", "waiting", "reason"]);
        if !terminated.is_null() && number(terminated, &["exitCode"]).unwrap_or_default() == 0 {
            continue;
        }
        if sidecar && flag(status, &["started"]) {
            state.ready += usize::from(flag(status, &["ready"]));
            continue;
        }
        state.reason = if !terminated.is_null() {
            format!("Init:{}", ending(terminated))
        } else if !waiting.is_empty() && waiting != "PodInitializing" {
            format!("Init:{waiting}")
        } else {
            format!("Init:{index}/{}", containers.len())
        };
        return true;
    }
    false
}

fn run(status: &Value, state: &mut State) {
    let mut running = false;
    let mut failure = String::new();
    for container in items(status, &["containerStatuses"]).iter().rev() {
        state.restarted(container);
        let terminated = at(container, &["state", "terminated"]);
        let waiting = text(container, &["state", "waiting", "reason"]);
        if !waiting.is_empty() {
            waiting.clone_into(&mut state.reason);
        } else if !terminated.is_null() {
            state.reason = ending(terminated);
            if number(terminated, &["exitCode"]).unwrap_or_default() != 0 {
                state.reason.clone_into(&mut failure);
            }
        } else if flag(container, &["ready"]) && has(container, &["state", "running"]) {
            running = true;
            state.ready += 1;
        }
    }
    if state.reason == "Completed" {
        if running && condition(status, "Ready") {
            "Running".clone_into(&mut state.reason);
        } else if !failure.is_empty() {
            state.reason = failure;
        } else if running {
            "NotReady".clone_into(&mut state.reason);
        }
    }
}

fn ending(terminated: &Value) -> String {
    let reason = text(terminated, &["reason"]);
    match number(terminated, &["signal"]).unwrap_or_default() {
        _ if !reason.is_empty() => reason.to_owned(),
        0 => format!("ExitCode:{}", number(terminated, &["exitCode"]).unwrap_or_default()),
        signal => format!("Signal:{signal}"),
    }
}

fn condition(status: &Value, kind: &str) -> bool {
    let of_kind = |c: &&Value| text(c, &["type"]) == kind;
    items(status, &["conditions"]).iter().find(of_kind).is_some_and(|c| text(c, &["status"]) == "True")
}

fn is_sidecar(container: &Value) -> bool {
    text(container, &["restartPolicy"]) == "Always"
}

fn gates(spec: &Value, status: &Value) -> String {
    let gates = items(spec, &["readinessGates"]);
    if gates.is_empty() {
        return "<none>".to_owned();
    }
    let open = gates.iter().filter(|gate| condition(status, text(gate, &["conditionType"]))).count();
    format!("{open}/{}", gates.len())
}
