//! The flow of one claim: who told whom what, from `kubectl apply` to a running pod, as steps that a page can draw one by one.
//!
//! Objects' changes are seen by the watches; calls of drivers are steps that `berth up` keeps. Of a cluster that is not Berth's only
//! the objects are known.

use berth_kube::Key;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::changes::{Change, Changes};
use super::life::{begin, is_call, millis};
use crate::records::Step;

/// How many steps of one flow are shown.
const LONGEST: usize = 120;
/// How many claims can be chosen.
const CHOICES: usize = 20;

/// One thing that moves.
#[derive(Debug, Serialize)]
struct Move {
    who: &'static str,
    /// `api` between API server and component, `csi` between component and driver.
    side: &'static str,
    /// `out` to the right, `in` to the left.
    dir: &'static str,
    tok: String,
    /// Milliseconds since the beginning.
    t: f64,
    d: f64,
    what: String,
    say: String,
    diff: Vec<String>,
    set: Map<String, Value>,
    reach: String,
    bad: bool,
    #[serde(skip)]
    at: f64,
}

/// What is known of a claim besides what moved.
pub(super) struct Subject<'a> {
    pub(super) claim: &'a Key,
    pub(super) volume: &'a str,
    pub(super) class: &'a str,
    pub(super) driver: &'a str,
    pub(super) pod: &'a str,
    pub(super) node: &'a str,
    pub(super) stuck: bool,
}

/// The claims that something happened to lately, the newest first.
pub(super) fn choices(changes: &Changes) -> Vec<(Key, Timestamp)> {
    let mut found: Vec<(Key, Timestamp)> = Vec::new();
    for change in changes.iter().rev() {
        for claim in &change.claims {
            if !found.iter().any(|(known, _)| known == claim) && found.len() < CHOICES {
                found.push((claim.clone(), change.time));
            }
        }
    }
    found
}

/// All that moved for a claim.
pub(super) fn flow(subject: &Subject<'_>, changes: &Changes, steps: &[Step]) -> Value {
    let changes = changes.about(subject.claim, subject.volume);
    let began = changes.iter().rposition(|change| change.begins).unwrap_or(0);
    let changes = &changes[began..];
    let from = changes.first().map(|change| millis(change.time));
    let calls =
        steps.iter().filter(|step| is_call(step) && from.is_none_or(|from| begin(step) >= from - 50.0));
    let mut moves: Vec<Move> = calls.flat_map(of_call).collect();
    if changes.is_empty() {
        moves.extend(steps.iter().filter(|step| !is_call(step)).map(of_step));
    } else {
        moves.extend(changes.iter().map(of_change));
    }
    moves.sort_by(|a, b| a.at.total_cmp(&b.at));
    moves.truncate(LONGEST);
    let first = moves.first().map_or(0.0, |step| step.at);
    for step in &mut moves {
        step.t = step.at - first;
    }
    let running = moves.iter().find(|step| step.tok == "Running").or(moves.last());
    let total = running.map_or(0.0, |step| step.t + step.d);
    // What was there before anything moved.
    let mut before = Map::new();
    if changes.first().is_none_or(|change| !change.begins) && !subject.claim.name.is_empty() {
        before.insert("pvc".to_owned(), json!(["ok", "exists"]));
        if !subject.volume.is_empty() {
            before.insert("pv".to_owned(), json!(["ok", "exists"]));
        }
    }
    json!({
        "claim": subject.claim.name,
        "id": subject.claim.to_string(),
        "pod": subject.pod,
        "pv": subject.volume,
        "cls": subject.class,
        "driver": subject.driver,
        "node": subject.node,
        "stuck": subject.stuck,
        "begin": before,
        "total": total,
        "steps": moves,
    })
}

fn of_change(change: &Change) -> Move {
    let mut set = Map::new();
    if let Some((object, shape, word)) = &change.set {
        set.insert((*object).to_owned(), json!([shape, word]));
    }
    Move {
        who: change.who,
        side: "api",
        dir: "in",
        tok: change.token.clone(),
        t: 0.0,
        d: 0.0,
        what: change.what.clone(),
        say: change.say.clone(),
        diff: change.diff.clone(),
        set,
        reach: String::new(),
        bad: change.bad,
        at: millis(change.time),
    }
}

/// The lane of a component.
fn lane(component: &str) -> &'static str {
    match component {
        "pv-controller" => "pv-controller",
        "scheduler" => "scheduler",
        "provisioner" => "provisioner",
        "attach-detach" => "attach-detach",
        "attacher" => "attacher",
        "resizer" | "snapshotter" => "resizer",
        _ => "node",
    }
}

/// A step that is no call, for a life of which no objects' changes are known.
fn of_step(step: &Step) -> Move {
    Move {
        who: lane(&step.component),
        side: "api",
        dir: "in",
        tok: step.call.split_whitespace().next().unwrap_or_default().to_owned(),
        t: 0.0,
        d: f64::from(u32::try_from(step.duration_us).unwrap_or(u32::MAX)) / 1000.0,
        what: step.call.clone(),
        say: format!("{}: {}.", step.component, step.call),
        diff: Vec::new(),
        set: Map::new(),
        reach: step.state.clone(),
        bad: !step.error.is_empty(),
        at: begin(step),
    }
}

/// A call goes to the driver, and its answer comes back.
fn of_call(step: &Step) -> [Move; 2] {
    let who = lane(&step.component);
    let took = f64::from(u32::try_from(step.duration_us).unwrap_or(u32::MAX)) / 1000.0;
    let bad = !step.error.is_empty();
    let token = step.call.strip_suffix("Volume").unwrap_or(&step.call);
    let mut asked = vec![format!(" {}", step.call)];
    for (name, value) in [("volume", &step.volume), ("node", &step.node), ("pod", &step.pod)] {
        if !value.is_empty() {
            asked.push(format!("   {name}: {value}"));
        }
    }
    let answer = if bad {
        vec![format!(" {}: failed", step.call), format!("   {}", step.error)]
    } else {
        vec![format!(" {}: OK", step.call)]
    };
    let out = Move {
        who,
        side: "csi",
        dir: "out",
        tok: token.to_owned(),
        t: 0.0,
        d: took,
        what: format!("calls {}", step.call),
        say: asks(&step.call, &step.node),
        diff: asked,
        set: Map::new(),
        reach: String::new(),
        bad: false,
        at: begin(step),
    };
    let back = Move {
        who,
        side: "csi",
        dir: "in",
        tok: if bad { "failed".to_owned() } else { "OK".to_owned() },
        t: 0.0,
        d: 0.0,
        what: if bad { "gets an error".to_owned() } else { "gets OK".to_owned() },
        say: if bad { format!("The driver refuses: {}", step.error) } else { done(&step.call).to_owned() },
        diff: answer,
        set: Map::new(),
        reach: step.state.clone(),
        bad,
        at: millis(step.time),
    };
    [out, back]
}

fn asks(call: &str, node: &str) -> String {
    let node = if node.is_empty() { "the node" } else { node };
    match call {
        "CreateVolume" => "The provisioner asks the driver for a volume.".to_owned(),
        "DeleteVolume" => "The provisioner asks the driver to delete the volume.".to_owned(),
        "ControllerPublishVolume" => {
            format!("The attacher asks the driver to make the volume reachable from {node}.")
        }
        "ControllerUnpublishVolume" => {
            format!("The attacher asks the driver to take the volume away from {node}.")
        }
        "ControllerExpandVolume" => "The resizer asks the driver for a larger volume.".to_owned(),
        "NodeStageVolume" => {
            format!("The driver makes a filesystem if there is none, and mounts the volume once for {node}.")
        }
        "NodePublishVolume" => "The driver binds the mount into the pod's directory.".to_owned(),
        "NodeUnpublishVolume" => "The driver takes the mount out of the pod's directory.".to_owned(),
        "NodeUnstageVolume" => format!("The driver unmounts the volume from {node}."),
        "NodeExpandVolume" => "The driver makes the filesystem larger, while it is in use.".to_owned(),
        "CreateSnapshot" => "The snapshotter asks the driver for a snapshot.".to_owned(),
        other => format!("The driver is asked: {other}."),
    }
}

fn done(call: &str) -> &'static str {
    match call {
        "CreateVolume" => "The volume exists.",
        "DeleteVolume" => "The volume is gone.",
        "ControllerPublishVolume" => "The node can reach the volume.",
        "ControllerUnpublishVolume" => "The node cannot reach the volume any more.",
        "ControllerExpandVolume" => "The volume is larger; its filesystem may still have to grow.",
        "NodeStageVolume" => "The volume is formatted and mounted on the node.",
        "NodePublishVolume" => "The pod's directory shows the volume.",
        "NodeUnpublishVolume" | "NodeUnstageVolume" => "It is unmounted.",
        "NodeExpandVolume" => "The filesystem has grown.",
        "CreateSnapshot" => "The snapshot exists.",
        _ => "It is done.",
    }
}
