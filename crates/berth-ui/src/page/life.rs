//! A volume's life: its steps, split into episodes (first mount, expand, move), because months and milliseconds do not fit one axis.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use crate::calls::micros;
use crate::records::{CallRecord, Step};

/// What is reached on the way to a mounted volume, in order.
pub(super) const MILESTONES: [&str; 4] = ["CREATED", "NODE_READY", "VOL_READY", "PUBLISHED"];
/// The calls that reach them, and who makes these.
const WAY: [(&str, &str); 4] = [
    ("provisioner", "CreateVolume"),
    ("attacher", "ControllerPublishVolume"),
    ("volume-manager", "NodeStageVolume"),
    ("volume-manager", "NodePublishVolume"),
];
/// How long nothing may happen within an episode that has reached its end, in milliseconds.
const PAUSE: i64 = 30_000;
/// The same, where what happened last failed: whoever failed tries again, with longer and longer pauses.
const BACKOFF: i64 = 900_000;

/// One stretch of a life.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Episode {
    pub(super) name: String,
    /// When it began, in milliseconds since the epoch.
    pub(super) begin: f64,
    /// Whether it has not come to its end.
    pub(super) open: bool,
    pub(super) steps: Vec<Bar>,
    /// What was reached before, and when, in milliseconds since the epoch.
    pub(super) had: BTreeMap<&'static str, f64>,
    /// What it fails to reach.
    pub(super) fails: Option<&'static str>,
    #[serde(skip)]
    kind: Kind,
}

/// One bar of a waterfall.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Bar {
    pub(super) who: String,
    pub(super) what: String,
    /// When it began, in milliseconds since the episode's begin; `None` if it has not.
    pub(super) t: Option<f64>,
    /// How long it took, in milliseconds.
    pub(super) d: Option<f64>,
    pub(super) call: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) attempt: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) err: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) reach: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) node: String,
    /// What it waits for, if it has not begun.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) waits: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Mount,
    Unmount,
    Expand,
    Snapshot,
    Delete,
}

/// What is known of a volume besides its steps.
pub(super) struct About<'a> {
    /// Whether a person has to do something before it gets on.
    pub(super) stuck: bool,
    /// Whether its driver attaches volumes.
    pub(super) attaches: bool,
    /// When the claim was made.
    pub(super) created: Timestamp,
    /// Whether the volume was created, whoever saw that.
    pub(super) has_volume: bool,
    pub(super) calls: &'a [CallRecord],
}

/// Milliseconds since the epoch, with a fraction.
pub(super) fn millis(time: Timestamp) -> f64 {
    micros(u64::try_from(time.as_microsecond()).unwrap_or(0))
}

/// When a step began, in milliseconds since the epoch.
pub(super) fn begin(step: &Step) -> f64 {
    millis(step.time) - micros(step.duration_us)
}

/// Whether a step is a call of a driver: those have the names of CSI.
pub(super) fn is_call(step: &Step) -> bool {
    let call = step.call.as_str();
    call.ends_with("Volume") || call.ends_with("Snapshot")
}

fn kind(step: &Step) -> Kind {
    match step.call.as_str() {
        "ControllerExpandVolume" | "NodeExpandVolume" => Kind::Expand,
        "NodeUnpublishVolume"
        | "NodeUnstageVolume"
        | "ControllerUnpublishVolume"
        | "VolumeAttachment deleted" => Kind::Unmount,
        "DeleteVolume" => Kind::Delete,
        call if call.ends_with("Snapshot") => Kind::Snapshot,
        _ => Kind::Mount,
    }
}

/// The episodes of a life, the oldest first.
pub(super) fn episodes(steps: &[Step], about: &About<'_>) -> Vec<Episode> {
    let mut steps: Vec<&Step> = steps.iter().collect();
    steps.sort_by(|a, b| begin(a).total_cmp(&begin(b)));
    let mut groups: Vec<(Kind, Vec<&Step>)> = Vec::new();
    for step in steps {
        let same = groups.last().is_some_and(|(known, group)| *known == kind(step) && continues(group, step));
        match groups.last_mut().filter(|_| same) {
            Some((_, group)) => group.push(step),
            None => groups.push((kind(step), vec![step])),
        }
    }
    let mut episodes: Vec<Episode> = Vec::new();
    for (kind, group) in groups {
        let mut episode = episode(kind, &group, about);
        // What is unmounted and mounted again has moved, or was restarted.
        if kind == Kind::Mount
            && let Some(last) = episodes.last()
            && last.kind == Kind::Unmount
            && episode.begin - last.end() < 300_000.0
        {
            let last = episodes.pop().unwrap_or_default();
            episode = last.followed_by(episode);
        }
        episodes.push(episode);
    }
    name(&mut episodes);
    remember(&mut episodes);
    finish(&mut episodes, about);
    episodes
}

fn continues(group: &[&Step], step: &Step) -> bool {
    let Some(last) = group.last() else { return true };
    #[expect(clippy::cast_possible_truncation, reason = "milliseconds since the epoch fit")]
    let pause = (begin(step) - millis(last.time)) as i64;
    let failed = group.iter().rev().take(4).any(|step| !step.error.is_empty());
    let done = group.iter().any(|step| step.state == "PUBLISHED");
    pause
        < if failed {
            BACKOFF
        } else if done {
            PAUSE
        } else {
            BACKOFF / 3
        }
}

fn episode(kind: Kind, group: &[&Step], about: &About<'_>) -> Episode {
    let first = group.first().map_or(0.0, |step| begin(step));
    let mut attempts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let failed = |step: &Step| {
        group.iter().any(|other| {
            other.call == step.call && other.component == step.component && !other.error.is_empty()
        })
    };
    let bars = group.iter().map(|step| {
        let attempt = attempts.entry((&step.component, &step.call)).or_default();
        *attempt += 1;
        Bar {
            who: step.component.clone(),
            what: step.call.clone(),
            t: Some((begin(step) - first).max(0.0)),
            d: Some(micros(step.duration_us)),
            call: is_call(step),
            attempt: failed(step).then_some(*attempt),
            code: (!step.error.is_empty()).then(|| code(step, about.calls)),
            err: step.error.clone(),
            reach: step.state.clone(),
            node: step.node.clone(),
            waits: String::new(),
        }
    });
    Episode { begin: first, steps: bars.collect(), kind, ..Episode::default() }
}

/// The code of a call that failed, from the account of calls; the step has only its message.
fn code(step: &Step, calls: &[CallRecord]) -> String {
    let near = |call: &&CallRecord| {
        call.name() == step.call && (call.time.as_millisecond() - step.time.as_millisecond()).abs() < 1000
    };
    calls
        .iter()
        .filter(|call| call.code != "OK")
        .find(near)
        .map_or_else(|| "failed".to_owned(), |call| call.code.clone())
}

impl Episode {
    /// When its last step ended, in milliseconds since the epoch.
    fn end(&self) -> f64 {
        let end = |bar: &Bar| bar.t.unwrap_or(0.0) + bar.d.unwrap_or(0.0);
        self.begin + self.steps.iter().map(end).fold(0.0, f64::max)
    }

    fn followed_by(mut self, next: Self) -> Self {
        let offset = next.begin - self.begin;
        self.steps.extend(next.steps.into_iter().map(|bar| Bar { t: bar.t.map(|t| t + offset), ..bar }));
        self.kind = Kind::Mount;
        "moved".clone_into(&mut self.name);
        self
    }

    fn reached(&self, milestone: &str) -> bool {
        self.steps.iter().any(|bar| bar.reach == milestone)
    }

    /// The node that the volume came to.
    fn node(&self) -> String {
        let on = |bar: &&Bar| bar.call && !bar.node.is_empty();
        self.steps.iter().rfind(on).map_or_else(String::new, |bar| bar.node.clone())
    }
}

fn name(episodes: &mut [Episode]) {
    let mut mounted = String::new();
    for episode in episodes {
        let node = episode.node();
        let on = if node.is_empty() { String::new() } else { format!(" on {node}") };
        let moved = episode.name == "moved";
        episode.name = match episode.kind {
            Kind::Mount if mounted.is_empty() && !moved => "First mount".to_owned(),
            Kind::Mount if moved && !node.is_empty() && node != mounted => format!("Move to {node}"),
            Kind::Mount => format!("Mount again{on}"),
            Kind::Unmount => format!("Unmount{on}"),
            Kind::Expand => "Expand".to_owned(),
            Kind::Snapshot => "Snapshot".to_owned(),
            Kind::Delete => "Delete".to_owned(),
        };
        if episode.kind == Kind::Mount {
            mounted = if node.is_empty() { "somewhere".to_owned() } else { node };
        }
    }
}

/// Notes in each episode what earlier ones had reached.
fn remember(episodes: &mut [Episode]) {
    let mut had: BTreeMap<&'static str, f64> = BTreeMap::new();
    for episode in episodes {
        // Where the volume is mounted is reached anew each time.
        episode.had =
            had.iter().filter(|(name, _)| **name == "CREATED").map(|(name, at)| (*name, *at)).collect();
        for milestone in MILESTONES {
            let reached = episode.steps.iter().find(|bar| bar.reach == milestone);
            if let Some(bar) = reached {
                had.insert(milestone, episode.begin + bar.t.unwrap_or(0.0) + bar.d.unwrap_or(0.0));
            }
        }
    }
}

/// Marks the last episode as open if it has not come to its end and the volume is stuck, with what it still waits for.
fn finish(episodes: &mut Vec<Episode>, about: &About<'_>) {
    if !about.stuck {
        return;
    }
    if episodes.is_empty() && !about.has_volume {
        let created = millis(about.created);
        episodes.push(Episode { name: "First mount".to_owned(), begin: created, ..Episode::default() });
    }
    let Some(last) =
        episodes.last_mut().filter(|last| last.kind == Kind::Mount && !last.reached("PUBLISHED"))
    else {
        return;
    };
    last.open = true;
    let mut waits_for = "";
    for ((who, call), milestone) in WAY.into_iter().zip(MILESTONES) {
        let needless = milestone == "NODE_READY" && !about.attaches;
        let created = milestone == "CREATED" && about.has_volume;
        if needless || created || last.reached(milestone) || last.had.contains_key(milestone) {
            continue;
        }
        last.fails.get_or_insert(milestone);
        if !last.steps.iter().any(|bar| bar.what == call) {
            let waits = match waits_for {
                "" => "has not been called".to_owned(),
                before => format!("waits for {before}"),
            };
            last.steps.push(Bar {
                who: who.to_owned(),
                what: call.to_owned(),
                call: true,
                waits,
                ..Bar::default()
            });
        }
        waits_for = call;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(at_ms: i64, component: &str, call: &str, state: &str, node: &str, error: &str) -> Step {
        Step {
            time: Timestamp::from_millisecond(1_000_000 + at_ms).unwrap(),
            component: component.to_owned(),
            call: call.to_owned(),
            state: state.to_owned(),
            node: node.to_owned(),
            error: error.to_owned(),
            duration_us: 1000,
            ..Step::default()
        }
    }

    fn about(stuck: bool) -> About<'static> {
        let at = |ms| Timestamp::from_millisecond(ms).unwrap();
        About { stuck, attaches: true, created: at(1_000_000), has_volume: true, calls: &[] }
    }

    fn mount(at: i64, node: &str) -> Vec<Step> {
        vec![
            step(at, "attacher", "ControllerPublishVolume", "NODE_READY", node, ""),
            step(at + 10, "volume-manager", "NodeStageVolume", "VOL_READY", node, ""),
            step(at + 20, "volume-manager", "NodePublishVolume", "PUBLISHED", node, ""),
        ]
    }

    #[test]
    fn a_life_is_split_into_its_episodes() {
        let mut steps = vec![step(5, "provisioner", "CreateVolume", "CREATED", "", "")];
        steps.extend(mount(10, "a"));
        steps.push(step(60_000, "resizer", "ControllerExpandVolume", "", "", ""));
        steps.push(step(60_100, "volume-manager", "NodeExpandVolume", "", "a", ""));
        steps.push(step(3_000_000, "volume-manager", "NodeUnpublishVolume", "", "a", ""));
        steps.push(step(3_000_100, "attacher", "ControllerUnpublishVolume", "", "a", ""));
        steps.extend(mount(3_002_000, "b"));
        let found = episodes(&steps, &about(false));
        let names: Vec<_> = found.iter().map(|episode| episode.name.as_str()).collect();
        assert_eq!(names, ["First mount", "Expand", "Move to b"]);
        assert_eq!(found[2].steps.len(), 5);
        assert!(found[2].had.contains_key("CREATED") && !found[2].had.contains_key("PUBLISHED"));
        assert!(found.iter().all(|episode| !episode.open));
    }

    #[test]
    fn attempts_that_fail_are_one_open_episode_with_what_still_waits() {
        let fails = [0, 1_000, 3_000, 120_000, 600_000];
        let steps: Vec<Step> = fails
            .iter()
            .map(|at| step(*at, "attacher", "ControllerPublishVolume", "", "a", "limit reached"))
            .collect();
        let found = episodes(&steps, &about(true));
        assert_eq!(found.len(), 1);
        assert!(found[0].open && found[0].fails == Some("NODE_READY"));
        assert_eq!(found[0].steps[4].attempt, Some(5));
        let waits: Vec<_> =
            found[0].steps[5..].iter().map(|bar| (bar.what.as_str(), bar.waits.as_str())).collect();
        assert_eq!(
            waits,
            [
                ("NodeStageVolume", "waits for ControllerPublishVolume"),
                ("NodePublishVolume", "waits for NodeStageVolume"),
            ]
        );
    }

    #[test]
    fn a_claim_that_nobody_takes_up_has_an_open_episode_without_steps() {
        let found = episodes(&[], &About { has_volume: false, ..about(true) });
        assert_eq!((found.len(), found[0].fails), (1, Some("CREATED")));
        assert!(found[0].steps.iter().all(|bar| bar.t.is_none()));
        assert!(episodes(&[], &about(false)).is_empty());
    }
}
