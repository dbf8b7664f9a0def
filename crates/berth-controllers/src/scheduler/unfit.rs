//! Why a pod fits nowhere, in Kubernetes' words.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use berth_kube::Key;

/// A node on which no pod can help, or none was asked to.
const HOPELESS: &str = "Preemption is not helpful for scheduling";
/// A node without a pod that is less important.
pub(super) const NO_VICTIMS: &str = "No preemption victims found for incoming pod";

/// What goes before the verdict on preemption.
const NO_DEVICES: &str = "no new claims to deallocate, ";

/// What judged a node unfit; decides which changes lead to another attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Plugin {
    /// There is no node at all.
    Nodes,
    NodeUnschedulable,
    TaintToleration,
    NodeAffinity,
    NodePorts,
    Resources,
    VolumeRestrictions,
    VolumeLimits,
    VolumeBinding,
    VolumeZone,
    PodTopologySpread,
    InterPodAffinity,
}

/// Why one node does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Why {
    pub(super) plugin: Plugin,
    pub(super) reasons: Vec<Cow<'static, str>>,
    /// Fewer pods on the node would help.
    pub(super) resolvable: bool,
}

impl Why {
    /// A reason that only a change of the node, the pod or its volumes can lift.
    pub(super) fn never(plugin: Plugin, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { plugin, reasons: vec![reason.into()], resolvable: false }
    }

    /// A reason that goes when other pods go.
    pub(super) fn now(plugin: Plugin, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { plugin, reasons: vec![reason.into()], resolvable: true }
    }
}

/// Why a pod fits nowhere, and what is done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unfit {
    pub(super) message: String,
    pub(super) plugins: BTreeSet<Plugin>,
    pub(super) preemption: Preemption,
}

/// Whether other pods make room for one that fits nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Preemption {
    /// These do, on this node.
    Victims {
        /// The node that the pod is nominated for.
        node: String,
        /// The pods that leave, the most important one first.
        pods: Vec<Key>,
        /// Pods for which room was kept there and that are less important.
        withdrawn: Vec<Key>,
    },
    /// The pod may not preempt, or the pods that make room are still leaving: what was decided stays.
    NotEligible,
    /// None can; room that was kept for the pod is given up.
    InVain,
}

impl Unfit {
    /// There is no node.
    pub(super) fn no_nodes() -> Self {
        let message = "no nodes available to schedule pods".to_owned();
        Self { message, plugins: BTreeSet::from([Plugin::Nodes]), preemption: Preemption::InVain }
    }

    /// The pod itself fits no node, whatever the nodes.
    pub(super) fn everywhere(why: &Why, nodes: usize, may_preempt: Result<(), &'static str>) -> Self {
        let reasons = why.reasons.join(", ");
        let (preemption, text) = in_vain(nodes, [(nodes, HOPELESS)].into(), may_preempt);
        let message = format!("0/{nodes} nodes are available: {reasons}. {text}");
        Self { message, plugins: BTreeSet::from([why.plugin]), preemption }
    }

    /// Each node has its own reasons, and no pods can make room: `dry_run` says why not, on the nodes where it was tried.
    pub(super) fn each(nodes: &[Why], dry_run: &[Why], may_preempt: Result<(), &'static str>) -> Self {
        let mut reasons = counted(dry_run);
        if nodes.len() > dry_run.len() {
            reasons.push((nodes.len() - dry_run.len(), HOPELESS));
        }
        let (preemption, text) = in_vain(nodes.len(), reasons, may_preempt);
        let message = format!("{} {text}", Self::reasons(nodes));
        Self { message, plugins: nodes.iter().map(|why| why.plugin).collect(), preemption }
    }

    /// Each node has its own reasons, and pods make room on one of them.
    pub(super) fn with_victims(nodes: &[Why], preemption: Preemption) -> Self {
        let plugins = nodes.iter().map(|why| why.plugin).collect();
        Self { message: Self::reasons(nodes), plugins, preemption }
    }

    fn reasons(nodes: &[Why]) -> String {
        format!("0/{} nodes are available: {}.", nodes.len(), listed(counted(nodes)))
    }
}

/// How many nodes have each reason.
fn counted(nodes: &[Why]) -> Vec<(usize, &str)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in nodes.iter().flat_map(|why| &why.reasons) {
        *counts.entry(reason).or_default() += 1;
    }
    counts.into_iter().map(|(reason, count)| (count, reason)).collect()
}

fn listed(reasons: Vec<(usize, &str)>) -> String {
    let mut reasons: Vec<String> =
        reasons.into_iter().map(|(count, reason)| format!("{count} {reason}")).collect();
    reasons.sort();
    reasons.join(", ")
}

/// What is said of a preemption that does not come about. That no devices' claims can be given up for the pod, Kubernetes says of
/// every pod.
fn in_vain(
    nodes: usize,
    reasons: Vec<(usize, &str)>,
    may_preempt: Result<(), &'static str>,
) -> (Preemption, String) {
    if let Err(why) = may_preempt {
        return (Preemption::NotEligible, format!("{NO_DEVICES}preemption: {why}"));
    }
    let text = format!("{NO_DEVICES}preemption: 0/{nodes} nodes are available: {}.", listed(reasons));
    (Preemption::InVain, text)
}
