//! Which capacity objects there should be: one per class and topology segment. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use k8s_openapi::api::core::v1::{Node, VolumeNodeAffinity};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity, StorageClass};
use kube::ResourceExt as _;

use crate::provisioner::topology::{self, Segment};

/// What a class asks of the driver.
pub(super) type Parameters = BTreeMap<String, String>;

/// What one object is about: the room for volumes of a class in a topology segment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CapacityKey {
    pub(super) class: String,
    pub(super) segment: Segment,
}

impl CapacityKey {
    /// The class and segment of an object; `None` if no class and segment of this driver could have it.
    pub(super) fn of(object: &CSIStorageCapacity) -> Option<Self> {
        let topology = object.node_topology.as_ref()?;
        if topology.match_expressions.iter().flatten().next().is_some() {
            return None;
        }
        let segment = topology.match_labels.clone().unwrap_or_default();
        Some(Self { class: object.storage_class_name.clone(), segment })
    }
}

/// What is asked of the driver: classes with the same parameters have the same answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Question {
    pub(super) segment: Segment,
    pub(super) parameters: Parameters,
}

/// The classes and topology segments of a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Goal {
    pub(super) segments: BTreeSet<Segment>,
    /// Each with what it asks of the driver.
    pub(super) classes: BTreeMap<String, Parameters>,
}

impl Goal {
    /// Whether there should be an object for this.
    pub(super) fn wants(&self, capacity_key: &CapacityKey) -> bool {
        self.classes.contains_key(&capacity_key.class) && self.segments.contains(&capacity_key.segment)
    }

    /// Whether an object is one of those that there should be.
    pub(super) fn wants_object(&self, object: &CSIStorageCapacity) -> bool {
        CapacityKey::of(object).is_some_and(|capacity_key| self.wants(&capacity_key))
    }

    /// Everything that there should be an object for.
    pub(super) fn capacity_keys(&self) -> impl Iterator<Item = CapacityKey> {
        self.classes.keys().flat_map(|class| {
            self.segments.iter().map(|segment| CapacityKey { class: class.clone(), segment: segment.clone() })
        })
    }

    /// The question whose answer belongs to a class and segment.
    pub(super) fn question(&self, capacity_key: &CapacityKey) -> Option<Question> {
        let parameters = self.classes.get(&capacity_key.class)?.clone();
        self.segments
            .contains(&capacity_key.segment)
            .then(|| Question { segment: capacity_key.segment.clone(), parameters })
    }

    /// The classes and segments that an answer belongs to.
    pub(super) fn answered(&self, question: &Question) -> Vec<CapacityKey> {
        if !self.segments.contains(&question.segment) {
            return Vec::new();
        }
        let classes = self.classes.iter().filter(|(_, parameters)| **parameters == question.parameters);
        classes
            .map(|(class, _)| CapacityKey { class: class.clone(), segment: question.segment.clone() })
            .collect()
    }
}

/// The driver's classes that capacity is published for; those that bind at once only if asked for, as no scheduler reads it.
pub(super) fn classes(
    all: &[Arc<StorageClass>],
    driver: &str,
    immediate: bool,
) -> BTreeMap<String, Parameters> {
    let at_once = |class: &StorageClass| class.volume_binding_mode.as_deref() == Some("Immediate");
    all.iter()
        .filter(|class| class.provisioner == driver && (immediate || !at_once(class)))
        .map(|class| {
            let mut parameters = class.parameters.clone().unwrap_or_default();
            parameters.retain(|key, _| !key.starts_with(KUBERNETES_PARAMETER_PREFIX));
            (class.name_any(), parameters)
        })
        .collect()
}

/// The segments of the nodes that the driver runs on. One whose labels are still missing is left out until they come.
pub(super) fn segments(csi_nodes: &[Arc<CSINode>], nodes: &[Arc<Node>], driver: &str) -> BTreeSet<Segment> {
    let by_name: HashMap<String, &Arc<Node>> = nodes.iter().map(|node| (node.name_any(), node)).collect();
    let segment = |csi_node: &Arc<CSINode>| {
        csi_node.spec.drivers.iter().find(|known| known.name == driver)?;
        topology::labels_of(by_name.get(&csi_node.name_any())?, &topology::keys_of(csi_node, driver))
    };
    csi_nodes.iter().filter_map(segment).collect()
}

/// The segments that a volume's affinity names, as far as it names values rather than other rules.
pub(super) fn segments_of(affinity: &VolumeNodeAffinity) -> Vec<Segment> {
    let terms = affinity.required.iter().flat_map(|required| &required.node_selector_terms);
    terms
        .filter(|term| term.match_fields.iter().flatten().next().is_none())
        .filter_map(|term| {
            let expressions = term.match_expressions.iter().flatten();
            expressions
                .map(|expression| match (expression.operator.as_str(), expression.values.as_deref()) {
                    ("In", Some([value])) => Some((expression.key.clone(), value.clone())),
                    _ => None,
                })
                .collect::<Option<Segment>>()
        })
        .collect()
}

#[cfg(test)]
mod tests;
