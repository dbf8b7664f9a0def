//! Which pods are scheduled again when something changes.

use std::collections::{BTreeSet, HashMap, HashSet};

use berth_kube::Key;
use k8s_openapi::api::core::v1::Node;

use super::unfit::Plugin;

/// Pods that fit nowhere, by what stood against them.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    by_plugin: HashMap<Plugin, HashSet<Key>>,
    by_pod: HashMap<Key, (BTreeSet<Plugin>, i32)>,
}

impl Waiting {
    /// Remembers why a pod of a priority waits.
    pub(super) fn insert(&mut self, pod: &Key, plugins: &BTreeSet<Plugin>, priority: i32) {
        self.remove(pod);
        for plugin in plugins {
            self.by_plugin.entry(*plugin).or_default().insert(pod.clone());
        }
        self.by_pod.insert(pod.clone(), (plugins.clone(), priority));
    }

    /// Forgets the hints of a pod that is gone or scheduled.
    pub(super) fn remove(&mut self, pod: &Key) {
        for plugin in self.by_pod.remove(pod).into_iter().flat_map(|(plugins, _)| plugins) {
            if let Some(pods) = self.by_plugin.get_mut(&plugin) {
                pods.remove(pod);
            }
        }
    }

    /// The pods that wait because of one of these, the most important ones first.
    pub(super) fn because(&self, plugins: &[Plugin]) -> Vec<Key> {
        let pods: HashSet<&Key> =
            plugins.iter().filter_map(|plugin| self.by_plugin.get(plugin)).flatten().collect();
        let mut pods: Vec<Key> = pods.into_iter().cloned().collect();
        pods.sort_by_key(|pod| std::cmp::Reverse(self.by_pod.get(pod).map(|(_, priority)| *priority)));
        pods
    }
}

/// What a pod that leaves its node may help against.
pub(super) const POD_LEFT: [Plugin; 6] = [
    Plugin::NodePorts,
    Plugin::Resources,
    Plugin::VolumeLimits,
    Plugin::VolumeRestrictions,
    Plugin::PodTopologySpread,
    Plugin::InterPodAffinity,
];

/// What a pod that got a node, or other labels, may help against.
pub(super) const POD_CAME: [Plugin; 2] = [Plugin::PodTopologySpread, Plugin::InterPodAffinity];

/// What a plan that is given up may help against: it held room, and volumes were promised.
pub(super) const PLAN_GIVEN_UP: [Plugin; 7] = [
    Plugin::NodePorts,
    Plugin::Resources,
    Plugin::VolumeLimits,
    Plugin::VolumeRestrictions,
    Plugin::VolumeBinding,
    Plugin::PodTopologySpread,
    Plugin::InterPodAffinity,
];

/// What a change of a node may help against.
pub(super) fn of_node(before: Option<&Node>, after: Option<&Node>) -> Vec<Plugin> {
    use Plugin::{
        InterPodAffinity, NodeAffinity, NodePorts, NodeUnschedulable, Nodes, PodTopologySpread, Resources,
        TaintToleration, VolumeBinding, VolumeLimits, VolumeRestrictions, VolumeZone,
    };
    let Some(after) = after else { return Vec::new() };
    let Some(before) = before else {
        return vec![
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
        ];
    };
    let mut helps = Vec::new();
    if before.metadata.labels != after.metadata.labels {
        helps.extend([NodeAffinity, VolumeBinding, VolumeZone, PodTopologySpread, InterPodAffinity]);
    }
    let taints = |node: &Node| node.spec.as_ref().map(|spec| (spec.taints.clone(), spec.unschedulable));
    if taints(before) != taints(after) {
        helps.extend([TaintToleration, NodeUnschedulable, PodTopologySpread]);
    }
    let allocatable = |node: &Node| node.status.as_ref().and_then(|status| status.allocatable.clone());
    if allocatable(before) != allocatable(after) {
        helps.push(Resources);
    }
    helps
}
