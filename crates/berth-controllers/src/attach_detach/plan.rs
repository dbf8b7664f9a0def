//! What to do about one volume, given where it is wanted and where it is attached. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

/// How long a volume that nobody wants on a node may still be mounted there before it is taken away from a node that
/// is not ready, unless somebody decided otherwise.
pub(crate) const UNMOUNT_WAIT: Duration = Duration::from_secs(6 * 60);
/// How long an attachment may take before there is an event and other nodes wait for it no longer.
pub(crate) const ATTACH_WAIT: Duration = Duration::from_secs(2 * 60);

/// A pod, as far as events need it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodName {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// What is known of an attachment object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Attachment {
    pub(crate) attached: bool,
    pub(crate) deleting: bool,
    pub(crate) error: Option<String>,
}

/// What is known of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its own name")]
pub(crate) struct NodeFacts {
    /// The object is there.
    pub(crate) exists: bool,
    /// It leaves attaching to us.
    pub(crate) managed: bool,
    pub(crate) ready: bool,
    /// It is tainted as out of service: nothing runs on it, whatever its status says.
    pub(crate) out_of_service: bool,
}

/// The volume on one node.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its own name")]
pub(crate) struct OnNode {
    pub(crate) node: NodeFacts,
    /// Pods there that want it.
    pub(crate) pods: Vec<PodName>,
    pub(crate) attachment: Option<Attachment>,
    /// The node's status says it is attached.
    pub(crate) reported: bool,
    /// No change of that is on its way.
    pub(crate) settled: bool,
    /// The node says it may be mounted there.
    pub(crate) in_use: bool,
    /// Since when we try to attach it.
    pub(crate) attaching_for: Option<Duration>,
    /// Since when nobody wants it there.
    pub(crate) unwanted_for: Option<Duration>,
    /// The pods there already have the event that it is attached elsewhere.
    pub(crate) conflict_reported: bool,
}

/// One volume, with every node that wants it, has it or reports it.
#[derive(Debug, Clone)]
pub(crate) struct ObservedVolume {
    /// It may be attached to several nodes at a time.
    pub(crate) shareable: bool,
    /// How long to wait for a node that is not ready to unmount it.
    pub(crate) unmount_wait: Duration,
    pub(crate) nodes: BTreeMap<String, OnNode>,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask for the attachment.
    Attach { node: String },
    /// Remember since when we wait for it.
    Attaching { node: String },
    /// Record on the pods that it is attached.
    Attached { node: String },
    /// Record on the pods that it could not be attached.
    Failed { node: String, error: String },
    /// Record on the pods that it takes long.
    Slow { node: String },
    /// Record on the pods that it is attached elsewhere, and who uses it there.
    Conflict { node: String, users: Vec<PodName> },
    /// Say in the node's status whether it may be mounted.
    Report { node: String, attached: bool },
    /// Take the attachment away; `verify` asks the node's status once more before.
    Detach { node: String, verify: bool, why: Detach },
    /// It is wanted again: forget since when it was not.
    Wanted { node: String },
    /// It is not there any more: forget everything.
    Forget { node: String },
    /// Remember since when it is not wanted.
    Unwanted { node: String },
    /// Look again after this time.
    Again(Duration),
}

/// Why a volume is detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detach {
    /// Nobody uses it there.
    Unused,
    /// The node is not ready, and did not unmount it in time.
    Timeout,
    /// The node is out of service.
    OutOfService,
}

/// What to do now; detaching comes first, so that a volume that moves is free as early as possible.
pub(crate) fn plan(observed: &ObservedVolume) -> Vec<Action> {
    let mut actions = Vec::new();
    for (node, here) in &observed.nodes {
        if here.pods.is_empty() {
            plan_unwanted(node, here, observed.unmount_wait, &mut actions);
        }
    }
    for (node, here) in &observed.nodes {
        if !here.pods.is_empty() {
            plan_wanted(observed, node, here, &mut actions);
        }
    }
    actions
}

fn plan_unwanted(node: &str, here: &OnNode, unmount_wait: Duration, actions: &mut Vec<Action>) {
    // A node that attaches by itself is none of our business.
    if here.node.exists && !here.node.managed {
        return;
    }
    let report_gone = || Action::Report { node: node.to_owned(), attached: false };
    let Some(attachment) = &here.attachment else {
        if here.reported || !here.settled {
            actions.push(report_gone());
        }
        actions.push(Action::Forget { node: node.to_owned() });
        return;
    };
    if attachment.deleting {
        if here.reported || !here.settled {
            actions.push(report_gone());
        }
        return;
    }
    let waited = here.unwanted_for.unwrap_or_default();
    if here.unwanted_for.is_none() {
        actions.push(Action::Unwanted { node: node.to_owned() });
    }
    let expired = waited >= unmount_wait;
    let forced = expired && !(here.node.exists && here.node.ready);
    if here.in_use && here.node.exists && !forced && !here.node.out_of_service {
        if !expired {
            actions.push(Action::Again(unmount_wait.saturating_sub(waited)));
        }
        return;
    }
    // The node must not be allowed to mount what is being detached: first the report, then the rest.
    if here.node.exists && (here.reported || !here.settled) {
        actions.push(report_gone());
        return;
    }
    let why = if here.node.out_of_service {
        Detach::OutOfService
    } else if here.in_use && here.node.exists {
        Detach::Timeout
    } else {
        Detach::Unused
    };
    actions.push(Action::Detach { node: node.to_owned(), verify: why == Detach::Unused, why });
}

fn plan_wanted(observed: &ObservedVolume, node: &str, here: &OnNode, actions: &mut Vec<Action>) {
    if !here.node.exists || !here.node.managed {
        // Nothing is done for it, but other nodes wait for it, and not for ever.
        if here.attachment.as_ref().is_some_and(|attachment| !attachment.attached && !attachment.deleting) {
            plan_wait(node, here, actions);
        }
        return;
    }
    if here.unwanted_for.is_some() {
        actions.push(Action::Wanted { node: node.to_owned() });
    }
    let report = |attached| Action::Report { node: node.to_owned(), attached };
    match &here.attachment {
        Some(attachment) if attachment.deleting => {
            if here.reported || !here.settled {
                actions.push(report(false));
            }
        }
        Some(attachment) if attachment.attached => {
            if here.attaching_for.is_some() {
                actions.push(Action::Attached { node: node.to_owned() });
            }
            if !here.reported || !here.settled {
                actions.push(report(true));
            }
        }
        Some(attachment) => {
            if here.reported || !here.settled {
                actions.push(report(false));
            }
            if let Some(error) = &attachment.error {
                if here.attaching_for.is_none() {
                    actions.push(Action::Attaching { node: node.to_owned() });
                }
                actions.push(Action::Failed { node: node.to_owned(), error: error.clone() });
            } else if here.attaching_for.is_some_and(|waited| waited >= ATTACH_WAIT) {
                actions.push(Action::Slow { node: node.to_owned() });
                actions.push(Action::Again(ATTACH_WAIT));
            } else {
                plan_wait(node, here, actions);
            }
        }
        None => plan_attach(observed, node, here, actions),
    }
}

/// Looks again once an attachment under way has had its time.
fn plan_wait(node: &str, here: &OnNode, actions: &mut Vec<Action>) {
    if here.attaching_for.is_none() {
        actions.push(Action::Attaching { node: node.to_owned() });
    }
    let left = ATTACH_WAIT.saturating_sub(here.attaching_for.unwrap_or_default());
    if !left.is_zero() {
        actions.push(Action::Again(left));
    }
}

fn plan_attach(observed: &ObservedVolume, node: &str, here: &OnNode, actions: &mut Vec<Action>) {
    if here.reported || !here.settled {
        actions.push(Action::Report { node: node.to_owned(), attached: false });
    }
    if !observed.shareable {
        let elsewhere = || observed.nodes.iter().filter(|(other, _)| *other != node);
        let attached =
            |there: &OnNode| there.attachment.as_ref().is_some_and(|attachment| attachment.attached);
        if elsewhere().any(|(_, there)| attached(there)) {
            if !here.conflict_reported {
                let mut users: Vec<PodName> = elsewhere()
                    .filter(|(_, there)| attached(there))
                    .flat_map(|(_, there)| there.pods.clone())
                    .collect();
                users.sort();
                actions.push(Action::Conflict { node: node.to_owned(), users });
            }
            return;
        }
        if elsewhere().any(|(_, there)| is_under_way(there)) {
            return;
        }
        // Two nodes want it and neither has it: the first in order gets it, and the other has an event once it is attached there.
        let first = observed.nodes.iter().find(|(_, there)| there.node.managed && !there.pods.is_empty());
        if first.is_some_and(|(first, there)| first != node && there.attachment.is_none()) {
            return;
        }
    }
    actions.push(Action::Attach { node: node.to_owned() });
}

/// Whether an attachment may still succeed: it is being made, or being undone. One that failed or took too long is
/// uncertain, which is no conflict.
fn is_under_way(there: &OnNode) -> bool {
    there.attachment.as_ref().is_some_and(|attachment| {
        let in_time = there.attaching_for.unwrap_or_default() < ATTACH_WAIT;
        there.pods.is_empty() || attachment.deleting || (attachment.error.is_none() && in_time)
    })
}

/// The event of pods whose volume is attached elsewhere; it does not name pods of other namespaces.
pub(crate) fn conflict_message(volume: &str, namespace: &str, users: &[PodName]) -> String {
    let (local, other): (Vec<&PodName>, Vec<&PodName>) =
        users.iter().partition(|pod| pod.namespace == namespace);
    let why = if users.is_empty() {
        "Volume is already exclusively attached to one node and can't be attached to another".to_owned()
    } else if local.is_empty() {
        format!("Volume is already used by {} pod(s) in different namespaces", other.len())
    } else {
        let names: Vec<&str> = local.iter().map(|pod| pod.name.as_str()).collect();
        let others = match other.len() {
            0 => String::new(),
            count => format!(" and {count} pod(s) in different namespaces"),
        };
        format!("Volume is already used by pod(s) {}{others}", names.join(", "))
    };
    format!("Multi-Attach error for volume {volume:?} {why}")
}
