//! Why a pod fits nowhere, in Kubernetes' words.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// What judged a node unfit; decides which changes lead to another attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Plugin {
    /// There is no node at all.
    Nodes,
    NodeUnschedulable,
    TaintToleration,
    NodeAffinity,
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

/// Why a pod fits nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unfit {
    pub(super) message: String,
    pub(super) plugins: BTreeSet<Plugin>,
}

impl Unfit {
    /// There is no node.
    pub(super) fn no_nodes() -> Self {
        let message = "no nodes available to schedule pods".to_owned();
        Self { message, plugins: BTreeSet::from([Plugin::Nodes]) }
    }

    /// The pod itself fits no node, whatever the nodes.
    pub(super) fn everywhere(why: &Why, nodes: usize, preempts: bool) -> Self {
        let message = format!(
            "0/{nodes} nodes are available: {}. {}",
            why.reasons.join(", "),
            preemption(nodes, 0, nodes, preempts)
        );
        Self { message, plugins: BTreeSet::from([why.plugin]) }
    }

    /// Each node has its own reasons.
    pub(super) fn each(nodes: &[Why], preempts: bool) -> Self {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in nodes.iter().flat_map(|why| &why.reasons) {
            *counts.entry(reason).or_default() += 1;
        }
        let mut reasons: Vec<String> =
            counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        reasons.sort();
        let resolvable = nodes.iter().filter(|why| why.resolvable).count();
        let message = format!(
            "0/{} nodes are available: {}. {}",
            nodes.len(),
            reasons.join(", "),
            preemption(nodes.len(), resolvable, nodes.len() - resolvable, preempts)
        );
        Self { message, plugins: nodes.iter().map(|why| why.plugin).collect() }
    }
}

/// Pods are never evicted for others here, so there never is a victim.
fn preemption(nodes: usize, resolvable: usize, hopeless: usize, preempts: bool) -> String {
    if !preempts {
        return "preemption: not eligible due to preemptionPolicy=Never.".to_owned();
    }
    let mut parts = Vec::new();
    if resolvable > 0 {
        parts.push(format!("{resolvable} No preemption victims found for incoming pod"));
    }
    if hopeless > 0 {
        parts.push(format!("{hopeless} Preemption is not helpful for scheduling"));
    }
    parts.sort();
    format!("preemption: 0/{nodes} nodes are available: {}.", parts.join(", "))
}
