//! Which CSI drivers this node has, as written to Kubernetes: the CSINode object, the Node's annotation and labels.

use std::collections::BTreeMap;

use berth_core::names::CSI_NODE_IDS;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// A driver as it describes itself to the node (NodeGetInfo).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverInfo {
    /// The name that the driver registered under.
    pub name: String,
    /// The driver's name for this node.
    pub node_id: String,
    /// How many of its volumes fit on this node; 0 or less is no limit.
    pub max_volumes: i64,
    /// Where this node is, in the driver's words.
    pub topology: BTreeMap<String, String>,
}

/// Why a driver cannot be announced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It gave no node id.
    #[error("error adding CSI driver node info: driverNodeID must not be empty")]
    NoNodeId,
    /// The node is elsewhere, by a label that somebody else set.
    #[error(
        "detected topology value collision: driver reported {key:?}:{reported:?} but existing label is {key:?}:{existing:?}"
    )]
    Collision {
        /// The key of the label that another driver has set to another value.
        key: String,
        /// What the driver says.
        reported: String,
        /// What the Node says.
        existing: String,
    },
    /// The annotation is damaged.
    #[error(
        "the annotation {CSI_NODE_IDS} of the Node is not a JSON object of strings; remove it, and it is written anew"
    )]
    Annotation,
}

/// A CSINode without drivers, that lives as long as the node.
pub(super) fn empty(node: &Node) -> CSINode {
    let mut object = CSINode { spec: CSINodeSpec { drivers: Vec::new() }, ..CSINode::default() };
    object.metadata.name.clone_from(&node.metadata.name);
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone().unwrap_or_default(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    }]);
    object
}

/// Whether a CSINode is this node's, and not one that a node of the same name left behind.
pub(super) fn is_owned(object: &CSINode, node: &Node) -> bool {
    object.metadata.owner_references.iter().flatten().any(|owner| {
        owner.kind == "Node"
            && Some(&owner.name) == node.metadata.name.as_ref()
            && Some(&owner.uid) == node.metadata.uid.as_ref()
    })
}

/// Adds a driver to the Node's annotation and labels.
pub(super) fn annotate(node: &mut Node, driver: &DriverInfo) -> Result<(), Unfit> {
    let mut ids = ids(node)?;
    let labels = node.metadata.labels.get_or_insert_default();
    for (key, value) in &driver.topology {
        match labels.get(key) {
            Some(existing) if existing != value => {
                return Err(Unfit::Collision {
                    key: key.clone(),
                    reported: value.clone(),
                    existing: existing.clone(),
                });
            }
            _ => labels.insert(key.clone(), value.clone()),
        };
    }
    ids.insert(driver.name.clone(), driver.node_id.clone());
    set_ids(node, &ids);
    Ok(())
}

/// Removes a driver from the Node's annotation; labels stay, as volumes may still be bound to them.
pub(super) fn remove_annotation(node: &mut Node, driver: &str) -> Result<(), Unfit> {
    let mut ids = ids(node)?;
    if ids.remove(driver).is_some() {
        set_ids(node, &ids);
    }
    Ok(())
}

/// Adds a driver to a CSINode, or replaces what it says of it.
pub(super) fn add(object: &mut CSINode, driver: &DriverInfo) {
    let allocatable = (driver.max_volumes > 0)
        .then(|| VolumeNodeResources { count: Some(i32::try_from(driver.max_volumes).unwrap_or(i32::MAX)) });
    let entry = CSINodeDriver {
        name: driver.name.clone(),
        node_id: driver.node_id.clone(),
        allocatable,
        topology_keys: Some(driver.topology.keys().cloned().collect::<Vec<_>>())
            .filter(|keys| !keys.is_empty()),
    };
    match object.spec.drivers.iter_mut().find(|known| known.name == driver.name) {
        Some(known) => *known = entry,
        None => object.spec.drivers.push(entry),
    }
}

/// Removes a driver from a CSINode.
pub(super) fn remove(object: &mut CSINode, driver: &str) {
    object.spec.drivers.retain(|known| known.name != driver);
}

fn ids(node: &Node) -> Result<BTreeMap<String, String>, Unfit> {
    match node.metadata.annotations.as_ref().and_then(|annotations| annotations.get(CSI_NODE_IDS)) {
        Some(text) if !text.is_empty() => serde_json::from_str(text).map_err(|_| Unfit::Annotation),
        _ => Ok(BTreeMap::new()),
    }
}

fn set_ids(node: &mut Node, ids: &BTreeMap<String, String>) {
    let annotations = node.metadata.annotations.get_or_insert_default();
    if ids.is_empty() {
        annotations.remove(CSI_NODE_IDS);
    } else {
        annotations.insert(CSI_NODE_IDS.to_owned(), serde_json::json!(ids).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(name: &str) -> DriverInfo {
        DriverInfo {
            name: name.to_owned(),
            node_id: format!("{name}-node"),
            max_volumes: 3,
            topology: BTreeMap::from([
                ("b/zone".to_owned(), "1".to_owned()),
                ("a/rack".to_owned(), "2".to_owned()),
            ]),
        }
    }

    #[test]
    fn drivers_come_and_go_and_labels_stay() {
        let mut node = Node::default();
        annotate(&mut node, &driver("x")).unwrap();
        annotate(&mut node, &driver("y")).unwrap();
        assert_eq!(
            node.metadata.annotations.as_ref().unwrap()[CSI_NODE_IDS],
            r#"{"x":"x-node","y":"y-node"}"#
        );
        remove_annotation(&mut node, "x").unwrap();
        assert_eq!(node.metadata.annotations.as_ref().unwrap()[CSI_NODE_IDS], r#"{"y":"y-node"}"#);
        remove_annotation(&mut node, "y").unwrap();
        assert!(node.metadata.annotations.unwrap().is_empty());
        assert_eq!(node.metadata.labels.unwrap().len(), 2);
    }

    #[test]
    fn a_label_of_another_value_and_a_damaged_annotation_are_refused() {
        let mut node = Node::default();
        node.metadata.labels = Some(BTreeMap::from([("b/zone".to_owned(), "9".to_owned())]));
        assert_eq!(
            annotate(&mut node, &driver("x")).unwrap_err().to_string(),
            r#"detected topology value collision: driver reported "b/zone":"1" but existing label is "b/zone":"9""#
        );
        let mut node = Node::default();
        node.metadata.annotations = Some(BTreeMap::from([(CSI_NODE_IDS.to_owned(), "[".to_owned())]));
        assert_eq!(annotate(&mut node, &driver("x")), Err(Unfit::Annotation));
    }

    #[test]
    fn limits_are_counted_and_capped_and_keys_are_sorted() {
        let count = |max_volumes| {
            let mut object = CSINode::default();
            add(&mut object, &driver("x"));
            add(&mut object, &DriverInfo { max_volumes, ..driver("x") });
            assert_eq!(object.spec.drivers.len(), 1);
            assert_eq!(
                object.spec.drivers[0].topology_keys,
                Some(vec!["a/rack".to_owned(), "b/zone".to_owned()])
            );
            object.spec.drivers[0].allocatable.as_ref().and_then(|allocatable| allocatable.count)
        };
        assert_eq!((count(0), count(-1), count(7), count(1 << 40)), (None, None, Some(7), Some(i32::MAX)));
    }

    #[test]
    fn a_csi_node_of_an_earlier_node_is_not_ours() {
        let mut node = Node::default();
        node.metadata.name = Some("n".to_owned());
        node.metadata.uid = Some("1".to_owned());
        let object = empty(&node);
        assert!(is_owned(&object, &node));
        node.metadata.uid = Some("2".to_owned());
        assert!(!is_owned(&object, &node));
    }
}
