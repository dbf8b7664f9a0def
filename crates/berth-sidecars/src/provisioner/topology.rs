//! Where a new volume must be reachable from.
//!
//! | binding | strict | allowed | immediate topology | requisite | preferred |
//! |---|---|---|---|---|---|
//! | first consumer | yes | any | | the node's segment | the same |
//! | first consumer | no | none | | all segments with the node's keys | from the node's on |
//! | first consumer | no | some | | the allowed ones | from the first that holds the node on |
//! | immediate | | some | | the allowed ones | from one chosen by the claim's name on |
//! | immediate | | none | yes | all segments | from one chosen by the claim's name on |
//! | immediate | | none | no | nothing is required | |

use std::collections::{BTreeMap, BTreeSet};

use berth_csi::v1::{Topology, TopologyRequirement};
use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolumeClaim,
    TopologySelectorTerm, VolumeNodeAffinity,
};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::ResourceExt as _;

use super::Provisioner;

/// The topology keys and values of one segment.
pub(super) type Segment = BTreeMap<String, String>;

/// What a requirement for a new volume is computed from.
pub(super) struct TopologyInputs<'a> {
    /// The name of the driver, as in CSINode.
    pub(super) driver: &'a str,
    /// The CSINode of every node, with its drivers.
    pub(super) csi_nodes: &'a [std::sync::Arc<CSINode>],
    /// All nodes of the cluster, whose labels hold the segments.
    pub(super) nodes: &'a [std::sync::Arc<Node>],
    /// The `allowedTopologies` of the StorageClass.
    pub(super) allowed: &'a [TopologySelectorTerm],
    /// The node of the first consumer, if the class waits for one.
    pub(super) selected: Option<&'a str>,
    /// The claim, whose name spreads volumes over segments.
    pub(super) claim: &'a str,
    /// Only the selected node's segment will do.
    pub(super) strict: bool,
    /// Without a selected node, ask for all segments of the cluster.
    pub(super) immediate: bool,
}

/// Why no requirement can be stated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum TopologyError {
    /// The driver is not (or no longer) on the selected node: another must be selected.
    #[error("the selected node {0:?} has no CSINode any more; another node must be selected")]
    NodeGone(String),
    /// Something that may be different soon.
    #[error("{0}")]
    NotNow(String),
}

impl Provisioner {
    /// Where a claim's volume must be reachable from; `None` if anywhere will do.
    pub(super) fn requirement(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        relaxed: bool,
    ) -> Result<Option<TopologyRequirement>, TopologyError> {
        let (csi_nodes, nodes) = match (&self.topology_caches, &self.own_node) {
            (Some((csi_nodes, nodes)), _) => (csi_nodes.list(), nodes.list()),
            (None, Some(own_node)) => {
                let (csi_node, node) = own_node.objects(&self.name);
                (vec![csi_node], vec![node])
            }
            (None, None) => return Ok(None),
        };
        let inputs = TopologyInputs {
            driver: &self.name,
            csi_nodes: &csi_nodes,
            nodes: &nodes,
            allowed: class.allowed_topologies.as_deref().unwrap_or_default(),
            selected: self.selected_node(claim, class),
            claim: &claim.name_any(),
            strict: self.options.strict_topology,
            immediate: self.options.immediate_topology,
        };
        match requirement(&inputs) {
            Err(_) if relaxed => Ok(requirement(&TopologyInputs { selected: None, ..inputs }).ok().flatten()),
            found => found,
        }
    }
}

/// The requirement for a new volume; `None` if it may be anywhere.
pub(super) fn requirement(inputs: &TopologyInputs<'_>) -> Result<Option<TopologyRequirement>, TopologyError> {
    let allowed = flatten(inputs.allowed);
    let (requisite, preferred) = match inputs.selected {
        Some(node) => {
            let own = segment_of(inputs, node)?;
            if inputs.strict {
                if !allowed.is_empty() && !allowed.iter().any(|term| within(term, &own)) {
                    return Err(TopologyError::NotNow(format!(
                        "selected node {node:?} topology {own:?} is not in allowed topologies: {allowed:?}"
                    )));
                }
                (vec![own.clone()], vec![own])
            } else if allowed.is_empty() {
                let all = aggregate(inputs, &own.keys().cloned().collect());
                let preferred = rotated(&all, |term| *term == own).unwrap_or_else(|| all.clone());
                (all, preferred)
            } else {
                let preferred = rotated(&allowed, |term| within(term, &own)).ok_or_else(|| {
                    TopologyError::NotNow(format!(
                        "topology {own:?} from selected node {node:?} is not in requisite: {allowed:?}"
                    ))
                })?;
                (allowed, preferred)
            }
        }
        None if !allowed.is_empty() => spread(allowed, inputs.claim),
        None if inputs.immediate => {
            // The first by name rather than any, so that a retry asks for the same.
            let mut known: Vec<_> =
                inputs.csi_nodes.iter().map(|node| (node.name_any(), keys_of(node, inputs.driver))).collect();
            known.sort();
            let keys = known.into_iter().map(|(_, keys)| keys).find(|keys| !keys.is_empty());
            let all = keys.map(|keys| aggregate(inputs, &keys)).unwrap_or_default();
            if all.is_empty() {
                return Err(TopologyError::NotNow(format!(
                    "no available topology found: no node has driver {:?} with topology keys and the labels for them",
                    inputs.driver
                )));
            }
            spread(all, inputs.claim)
        }
        None => return Ok(None),
    };
    Ok(Some(TopologyRequirement { requisite: csi(requisite), preferred: csi(preferred) }))
}

/// Where a volume can be used, as its PersistentVolume says it.
pub(super) fn affinity(topologies: &[Topology]) -> Option<VolumeNodeAffinity> {
    let term = |topology: &Topology| NodeSelectorTerm {
        match_expressions: Some(
            topology
                .segments
                .iter()
                .map(|(key, value)| NodeSelectorRequirement {
                    key: key.clone(),
                    operator: "In".to_owned(),
                    values: Some(vec![value.clone()]),
                })
                .collect(),
        ),
        match_fields: None,
    };
    let terms: Vec<_> =
        topologies.iter().filter(|topology| !topology.segments.is_empty()).map(term).collect();
    (!terms.is_empty())
        .then_some(VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: terms }) })
}

fn csi(terms: Vec<Segment>) -> Vec<Topology> {
    terms.into_iter().map(|segments| Topology { segments }).collect()
}

/// The topology of a node, in the driver's keys.
fn segment_of(inputs: &TopologyInputs<'_>, name: &str) -> Result<Segment, TopologyError> {
    let csi_node = inputs
        .csi_nodes
        .iter()
        .find(|node| node.name_any() == name)
        .ok_or_else(|| TopologyError::NodeGone(name.to_owned()))?;
    let node = inputs.nodes.iter().find(|node| node.name_any() == name).ok_or_else(|| {
        TopologyError::NotNow(format!("error getting selected node {name:?}: it does not exist"))
    })?;
    let keys = keys_of(csi_node, inputs.driver);
    if keys.is_empty() {
        return Err(TopologyError::NotNow(format!(
            "no topology key found on CSINode {name}; is driver {:?} running and registered there?",
            inputs.driver
        )));
    }
    labels_of(node, &keys).ok_or_else(|| {
        TopologyError::NotNow(format!(
            "topology labels from selected node {name:?} do not match topology keys from CSINode {keys:?}"
        ))
    })
}

/// The topology keys of the driver on a node.
pub(super) fn keys_of(node: &CSINode, driver: &str) -> BTreeSet<String> {
    let own = node.spec.drivers.iter().find(|known| known.name == driver);
    own.and_then(|own| own.topology_keys.clone()).unwrap_or_default().into_iter().collect()
}

/// A node's labels of these keys; `None` if one is missing.
pub(super) fn labels_of(node: &Node, keys: &BTreeSet<String>) -> Option<Segment> {
    let labels = node.metadata.labels.as_ref();
    keys.iter().map(|key| Some((key.clone(), labels?.get(key)?.clone()))).collect()
}

/// The topologies of all nodes that have these keys, each once and in order.
fn aggregate(inputs: &TopologyInputs<'_>, keys: &BTreeSet<String>) -> Vec<Segment> {
    ordered(inputs.nodes.iter().filter_map(|node| labels_of(node, keys)).collect())
}

/// Every combination of the values that the terms allow, each once and in order.
fn flatten(terms: &[TopologySelectorTerm]) -> Vec<Segment> {
    let mut flat = Vec::new();
    for term in terms {
        let mut combinations = vec![Segment::new()];
        for expression in term.match_label_expressions.iter().flatten() {
            combinations = combinations
                .iter()
                .flat_map(|segment| {
                    expression.values.iter().map(|value| {
                        let mut segment = segment.clone();
                        segment.insert(expression.key.clone(), value.clone());
                        segment
                    })
                })
                .collect();
        }
        flat.extend(combinations.into_iter().filter(|segment| !segment.is_empty()));
    }
    ordered(flat)
}

/// Short ones first, then by keys and values.
fn ordered(mut terms: Vec<Segment>) -> Vec<Segment> {
    terms.sort_by(|one, other| one.len().cmp(&other.len()).then_with(|| one.cmp(other)));
    terms.dedup();
    terms
}

fn within(term: &Segment, segment: &Segment) -> bool {
    term.iter().all(|(key, value)| segment.get(key) == Some(value))
}

/// The same terms beginning with the first that is wanted.
fn rotated(terms: &[Segment], wanted: impl Fn(&Segment) -> bool) -> Option<Vec<Segment>> {
    let first = terms.iter().position(wanted)?;
    Some([&terms[first..], &terms[..first]].concat())
}

fn spread(terms: Vec<Segment>, claim: &str) -> (Vec<Segment>, Vec<Segment>) {
    let (hash, offset) = hash_and_offset(claim);
    let count = u32::try_from(terms.len()).unwrap_or(u32::MAX).max(1);
    let first = usize::try_from(hash.wrapping_add(offset) % count).unwrap_or(0);
    let preferred = [&terms[first..], &terms[..first]].concat();
    (terms, preferred)
}

/// Claims of one StatefulSet (`claim-set-3`) hash alike and differ by their number, so they go to different segments.
fn hash_and_offset(claim: &str) -> (u32, u32) {
    let numbered =
        claim.rsplit_once('-').and_then(|(rest, number)| Some((rest, number.parse::<u32>().ok()?)));
    match numbered {
        Some((rest, number)) => (fnv(rest.rsplit_once('-').map_or(rest, |(_, set)| set)), number),
        None => (fnv(claim), 0),
    }
}

/// The 32-bit FNV-1 hash, which upstream uses.
fn fnv(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash: u32, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(byte))
}

#[cfg(test)]
mod tests;
