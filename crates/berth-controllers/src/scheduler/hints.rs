//! Which pods are scheduled again when something changes.

use std::collections::{BTreeSet, HashMap, HashSet};

use berth_kube::Key;
use berth_kube::provisionable::largest_volume;
use berth_kube::storage::units;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;

use super::unfit::Plugin;

/// Pods that fit nowhere, by what stood against them.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    by_plugin: HashMap<Plugin, HashSet<Key>>,
    by_pod: HashMap<Key, BTreeSet<Plugin>>,
}

impl Waiting {
    /// Remembers why a pod waits.
    pub(super) fn insert(&mut self, pod: &Key, plugins: &BTreeSet<Plugin>) {
        self.remove(pod);
        for plugin in plugins {
            self.by_plugin.entry(*plugin).or_default().insert(pod.clone());
        }
        self.by_pod.insert(pod.clone(), plugins.clone());
    }

    /// Forgets the hints of a pod that is gone or scheduled.
    pub(super) fn remove(&mut self, pod: &Key) {
        for plugin in self.by_pod.remove(pod).into_iter().flatten() {
            if let Some(pods) = self.by_plugin.get_mut(&plugin) {
                pods.remove(pod);
            }
        }
    }

    /// The pods that wait because of one of these, in no particular order.
    pub(super) fn because(&self, plugins: &[Plugin]) -> Vec<Key> {
        let pods: HashSet<&Key> =
            plugins.iter().filter_map(|plugin| self.by_plugin.get(plugin)).flatten().collect();
        pods.into_iter().cloned().collect()
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

/// What a pod that got a node, or other labels, or that is being deleted now, may help against.
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
    // Its pods count no more, and it is no domain any more in which pods are missing.
    let Some(after) = after else { return vec![PodTopologySpread, InterPodAffinity] };
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

/// Whether there is more room in a capacity than before, in all or for one volume.
pub(super) fn has_grown(before: Option<&CSIStorageCapacity>, after: Option<&CSIStorageCapacity>) -> bool {
    let room = |capacity: &CSIStorageCapacity| capacity.capacity.as_ref().map(units);
    after.and_then(largest_volume) > before.and_then(largest_volume)
        || after.and_then(room) > before.and_then(room)
}
