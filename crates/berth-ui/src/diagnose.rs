//! From what was observed to what is wrong: a pure function, with one file of rules per kind of object.

mod attachments;
mod claims;
mod drivers;
mod pods;
mod snapshots;
mod volumes;

use std::collections::HashMap;
use std::sync::Arc;

use berth_kube::storage::{claims_of_pod, csi_source, is_over, node_of_pod};
use berth_kube::{Key, storage};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;

use crate::finding::{Finding, Severity};
use crate::state::ClusterState;

/// What to do about a failure whose message names the cause.
const RETRIED: &str = "correct what the message names; the component that failed tries again by itself";

/// Everything that is wrong with a cluster's storage, the worst first; nothing for a healthy one.
pub fn diagnose(state: &ClusterState) -> Vec<Finding> {
    judge(&Observed::new(state))
}

/// The same, of what is observed already.
pub(crate) fn judge(observed: &Observed<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    claims::diagnose(observed, &mut findings);
    pods::diagnose(observed, &mut findings);
    volumes::diagnose(observed, &mut findings);
    attachments::diagnose(observed, &mut findings);
    snapshots::diagnose(observed, &mut findings);
    drivers::diagnose(observed, &mut findings);
    findings.sort_by(|a, b| {
        b.severity
            .cmp(&a.severity)
            .then_with(|| a.trouble.cmp(&b.trouble))
            .then_with(|| a.object.cmp(&b.object))
    });
    findings
}

/// Whether anything needs a person.
pub fn needs_a_person(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.severity.needs_a_person())
}

/// The state, with the objects that belong to each other found once.
pub(crate) struct Observed<'a> {
    pub(crate) state: &'a ClusterState,
    /// The pods that name a claim and are not over.
    users: HashMap<Key, Vec<&'a Pod>>,
    /// The attachments of a volume.
    attachments: HashMap<&'a str, Vec<&'a VolumeAttachment>>,
    /// The volumes of a driver by handle.
    by_handle: HashMap<(&'a str, &'a str), Vec<&'a PersistentVolume>>,
}

impl<'a> Observed<'a> {
    pub(crate) fn new(state: &'a ClusterState) -> Self {
        let mut users: HashMap<Key, Vec<&Pod>> = HashMap::new();
        for pod in state.pods.iter().filter(|pod| !is_over(pod)) {
            for claim in claims_of_pod(pod) {
                users.entry(claim.key).or_default().push(pod);
            }
        }
        let mut attachments: HashMap<&str, Vec<&VolumeAttachment>> = HashMap::new();
        for attachment in state.attachments.iter() {
            if let Some(volume) = attachment.spec.source.persistent_volume_name.as_deref() {
                attachments.entry(volume).or_default().push(attachment);
            }
        }
        let mut by_handle: HashMap<(&str, &str), Vec<&PersistentVolume>> = HashMap::new();
        for volume in state.volumes.iter() {
            if let Some(csi) = csi_source(volume) {
                by_handle.entry((&csi.driver, &csi.volume_handle)).or_default().push(volume);
            }
        }
        Self { state, users, attachments, by_handle }
    }

    pub(crate) fn users_of(&self, claim: &Key) -> &[&'a Pod] {
        self.users.get(claim).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn attachments_of(&self, volume: &str) -> &[&'a VolumeAttachment] {
        self.attachments.get(volume).map_or(&[], Vec::as_slice)
    }

    /// The newest of the events about an object that has one of these reasons, unless a success came after it.
    fn last_failure(&self, object: &impl ResourceExt, reasons: &[&str]) -> Option<&'a Event> {
        let events = self.state.events.about(object);
        let is = |event: &Arc<Event>, reasons: &[&str]| {
            event.reason.as_deref().is_some_and(|reason| reasons.contains(&reason))
        };
        let at = events.iter().rposition(|event| is(event, reasons))?;
        let over = |event: &Arc<Event>| {
            let reason = event.reason.as_deref().unwrap_or_default();
            reason.ends_with("Succeeded")
                || reason.ends_with("Successful")
                || reason.starts_with("Successful")
        };
        (!events[at + 1..].iter().any(over)).then(|| &*events[at])
    }

    /// Whether a node is there and ready; `None` if nodes may not be read.
    fn node_state(&self, name: &str) -> Option<NodeState> {
        if !self.state.nodes.are_known() {
            return None;
        }
        Some(match self.state.nodes.named(name) {
            None => NodeState::Gone,
            Some(node) if is_ready(node) => NodeState::Ready,
            Some(_) => NodeState::NotReady,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeState {
    Ready,
    NotReady,
    Gone,
}

/// Whether a node is ready for pods.
pub fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The message of an event, or its reason.
fn message(event: &Event) -> String {
    event.message.clone().or_else(|| event.reason.clone()).unwrap_or_default()
}

/// An event as evidence: who said it, how often.
fn event_as_evidence(event: &Event) -> String {
    let who = event
        .source
        .as_ref()
        .and_then(|source| source.component.clone())
        .or_else(|| event.reporting_component.clone())
        .filter(|who| !who.is_empty());
    let times =
        event.count.filter(|count| *count > 1).map_or_else(String::new, |count| format!(", {count} times"));
    let who = who.map_or_else(String::new, |who| format!(" by {who}"));
    format!("event {}{who}{times}: {}", event.reason.as_deref().unwrap_or_default(), message(event))
}

/// A length of time in the largest unit that it fills.
pub(crate) fn span(time: std::time::Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// The class that a claim asks for, with how it says so.
fn class_of(claim: &k8s_openapi::api::core::v1::PersistentVolumeClaim) -> &str {
    storage::class_of_claim(claim)
}

/// Names one after the other, and how many more there are than a person reads.
fn names<'n>(names: impl IntoIterator<Item = &'n str>) -> String {
    const SHOWN: usize = 5;
    let mut all: Vec<&str> = names.into_iter().collect();
    all.sort_unstable();
    all.dedup();
    if all.is_empty() {
        return "none".to_owned();
    }
    let more = all.len().saturating_sub(SHOWN);
    let shown = all[..all.len() - more].join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// The pods of a claim that are on a node.
fn on_nodes<'p>(pods: &[&'p Pod]) -> Vec<&'p Pod> {
    pods.iter().copied().filter(|pod| !node_of_pod(pod).is_empty()).collect()
}

/// An error by its severity, unless the object is used by nobody.
fn severity_if_used(used: bool) -> Severity {
    if used { Severity::Error } else { Severity::Warning }
}
