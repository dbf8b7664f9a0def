//! Whether a class can have a volume made for a node: the scheduler's rule over classes, drivers and CSIStorageCapacity objects.

use berth_core::names::NO_PROVISIONER;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIStorageCapacity, StorageClass};

use crate::selectors::{Labels, label_selector, labels, topology};
use crate::storage::units;

/// Why no volume of a class can be made for a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The class has no provisioner: its volumes are made by hand.
    NoProvisioner,
    /// The class allows volumes in other topologies only.
    Topology,
    /// No capacity that holds for the node has room for a volume of that size.
    NoSpace,
}

/// Whether a volume of this many bytes can be made for a node; how many bytes are left there, where the driver reports that.
/// `capacities` are those of the class.
pub fn provisionable<'c>(
    class: &StorageClass,
    driver: Option<&CSIDriver>,
    capacities: impl IntoIterator<Item = &'c CSIStorageCapacity>,
    node: &Node,
    asked: i128,
) -> Result<Option<i128>, Refusal> {
    if class.provisioner.is_empty() || class.provisioner == NO_PROVISIONER {
        return Err(Refusal::NoProvisioner);
    }
    let labels = labels(node.metadata.labels.as_ref());
    if !topology(class.allowed_topologies.as_deref().unwrap_or_default(), labels) {
        return Err(Refusal::Topology);
    }
    if !driver.is_some_and(reports_capacity) {
        return Ok(None);
    }
    capacities
        .into_iter()
        .filter(|capacity| holds_for(capacity, labels))
        .find(|capacity| largest_volume(capacity).is_some_and(|largest| largest >= asked))
        .map(|capacity| Some(capacity.capacity.as_ref().map_or(0, units)))
        .ok_or(Refusal::NoSpace)
}

/// Whether a driver's capacity is to be looked at before a volume is made.
pub fn reports_capacity(driver: &CSIDriver) -> bool {
    driver.spec.storage_capacity == Some(true)
}

/// Whether a capacity holds for a node with these labels; one without a topology is available nowhere.
pub fn holds_for(capacity: &CSIStorageCapacity, labels: &Labels) -> bool {
    capacity.node_topology.as_ref().is_some_and(|topology| label_selector(topology, labels))
}

/// The largest volume that can be made.
pub fn largest_volume(capacity: &CSIStorageCapacity) -> Option<i128> {
    capacity.maximum_volume_size.as_ref().or(capacity.capacity.as_ref()).map(units)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_volume_is_made_where_class_topology_and_capacity_allow_it() {
        let node: Node =
            serde_json::from_value(json!({"metadata": {"name": "n", "labels": {"zone": "1"}}})).unwrap();
        let driver: CSIDriver =
            serde_json::from_value(json!({"metadata": {}, "spec": {"storageCapacity": true}})).unwrap();
        let class = |provisioner: &str, topologies: Value| -> StorageClass {
            let class = json!({"metadata": {}, "provisioner": provisioner, "allowedTopologies": topologies});
            serde_json::from_value(class).unwrap()
        };
        let capacity = |size: &str, maximum: Value, zone: Value| -> CSIStorageCapacity {
            let capacity = json!({"metadata": {}, "storageClassName": "c", "capacity": size, "maximumVolumeSize": maximum,
                "nodeTopology": zone});
            serde_json::from_value(capacity).unwrap()
        };
        let here = || json!({"matchLabels": {"zone": "1"}});
        let only = |zone: &str| json!([{"matchLabelExpressions": [{"key": "zone", "values": [zone]}]}]);
        let cases = [
            ("enough", class("d", Value::Null), capacity("2", Value::Null, here()), Ok(Some(2))),
            (
                "too little",
                class("d", Value::Null),
                capacity("1", Value::Null, here()),
                Err(Refusal::NoSpace),
            ),
            (
                "no single one so large",
                class("d", Value::Null),
                capacity("9", json!("1"), here()),
                Err(Refusal::NoSpace),
            ),
            (
                "nowhere",
                class("d", Value::Null),
                capacity("9", Value::Null, Value::Null),
                Err(Refusal::NoSpace),
            ),
            ("allowed", class("d", only("1")), capacity("2", Value::Null, here()), Ok(Some(2))),
            (
                "not allowed",
                class("d", only("2")),
                capacity("2", Value::Null, here()),
                Err(Refusal::Topology),
            ),
            // As Kubernetes has it, a term that asks for nothing allows nothing.
            (
                "empty term",
                class("d", json!([{}])),
                capacity("2", Value::Null, here()),
                Err(Refusal::Topology),
            ),
            (
                "by hand",
                class(NO_PROVISIONER, Value::Null),
                capacity("2", Value::Null, here()),
                Err(Refusal::NoProvisioner),
            ),
        ];
        for (name, class, capacity, expected) in cases {
            assert_eq!(provisionable(&class, Some(&driver), [&capacity], &node, 2), expected, "{name}");
        }
        let class = class("d", Value::Null);
        assert_eq!(provisionable(&class, None, [], &node, 2), Ok(None), "nobody reports");
        assert_eq!(provisionable(&class, Some(&driver), [], &node, 2), Err(Refusal::NoSpace), "no capacity");
    }
}
