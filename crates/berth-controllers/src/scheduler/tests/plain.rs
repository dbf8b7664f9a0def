//! A world of objects in plain lists, and the objects that the tables are made of.

use std::sync::Arc;

use berth_kube::Key;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};
use serde_json::{Value, json};

use super::super::world::World;
use berth_kube::storage;

/// Objects in plain lists.
#[derive(Default)]
pub(super) struct Plain {
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) pods: Vec<Arc<Pod>>,
    pub(super) namespaces: Vec<Arc<Namespace>>,
    pub(super) claims: Vec<Arc<PersistentVolumeClaim>>,
    pub(super) volumes: Vec<Arc<PersistentVolume>>,
    pub(super) classes: Vec<Arc<StorageClass>>,
    pub(super) drivers: Vec<Arc<CSIDriver>>,
    pub(super) csi_nodes: Vec<Arc<CSINode>>,
    pub(super) attachments: Vec<Arc<VolumeAttachment>>,
    pub(super) capacities: Vec<Arc<CSIStorageCapacity>>,
    pub(super) budgets: Vec<Arc<PodDisruptionBudget>>,
}

fn named<K: kube::ResourceExt>(list: &[Arc<K>], name: &str) -> Option<Arc<K>> {
    list.iter().find(|object| object.name_any() == name).cloned()
}

impl World for Plain {
    fn nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.clone()
    }
    fn pod(&self, key: &Key) -> Option<Arc<Pod>> {
        self.pods.iter().find(|pod| Key::of(pod.as_ref()) == *key).cloned()
    }
    fn namespace(&self, name: &str) -> Option<Arc<Namespace>> {
        named(&self.namespaces, name)
    }
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.iter().find(|claim| Key::of(claim.as_ref()) == *key).cloned()
    }
    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        named(&self.volumes, name)
    }
    fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
        named(&self.classes, name)
    }
    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        named(&self.drivers, name)
    }
    fn csi_node(&self, name: &str) -> Option<Arc<CSINode>> {
        named(&self.csi_nodes, name)
    }
    fn attachments(&self, node: &str) -> Vec<Arc<VolumeAttachment>> {
        self.attachments.iter().filter(|attachment| attachment.spec.node_name == node).cloned().collect()
    }
    fn capacities(&self, class: &str) -> Vec<Arc<CSIStorageCapacity>> {
        self.capacities.iter().filter(|capacity| capacity.storage_class_name == class).cloned().collect()
    }
    fn budgets(&self) -> Vec<Arc<PodDisruptionBudget>> {
        self.budgets.clone()
    }
    fn candidates(&self, claim: &PersistentVolumeClaim) -> Vec<Arc<PersistentVolume>> {
        let fits = |volume: &PersistentVolume| match storage::claim_of_volume(volume) {
            Some(key) => key == Key::of(claim),
            None => storage::class_of_volume(volume) == storage::class_of_claim(claim),
        };
        self.volumes.iter().filter(|volume| fits(volume)).cloned().collect()
    }
}

/// Reads objects by their kind.
pub(super) fn world(objects: Vec<Value>) -> Plain {
    fn read<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
        Arc::new(serde_json::from_value(value).unwrap())
    }
    let mut world = Plain::default();
    for mut object in objects {
        let kind = object["kind"].take();
        object.as_object_mut().unwrap().remove("kind");
        match kind.as_str().unwrap() {
            "Node" => world.nodes.push(read(object)),
            "Pod" => world.pods.push(read(object)),
            "Namespace" => world.namespaces.push(read(object)),
            "Claim" => world.claims.push(read(object)),
            "Volume" => world.volumes.push(read(object)),
            "Class" => world.classes.push(read(object)),
            "Driver" => world.drivers.push(read(object)),
            "CSINode" => world.csi_nodes.push(read(object)),
            "Attachment" => world.attachments.push(read(object)),
            "Budget" => world.budgets.push(read(object)),
            "Capacity" => world.capacities.push(read(object)),
            other => panic!("{other}"),
        }
    }
    world
}

pub(super) fn node(name: &str, labels: &Value) -> Value {
    json!({ "kind": "Node", "metadata": { "name": name, "labels": labels },
        "status": { "allocatable": { "cpu": "4", "memory": "8Gi", "pods": "10" } } })
}

pub(super) fn plain_node() -> Value {
    node("a", &json!({}))
}

pub(super) fn pod(claims: &[&str]) -> Value {
    let volumes: Vec<Value> = claims
        .iter()
        .map(|claim| json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } }))
        .collect();
    json!({ "kind": "Pod", "metadata": { "name": "p", "namespace": "ns", "uid": "pod-uid" },
        "spec": { "containers": [{ "name": "c" }], "volumes": volumes } })
}

pub(super) fn claim(name: &str, class: &str) -> Value {
    json!({ "kind": "Claim", "metadata": { "name": name, "namespace": "ns", "uid": format!("uid-{name}"), "annotations": {} },
        "spec": { "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } } } })
}

pub(super) fn bound(name: &str, volume: &str) -> Value {
    let mut claim = claim(name, "");
    claim["metadata"]["annotations"]["pv.kubernetes.io/bind-completed"] = json!("yes");
    claim["spec"]["volumeName"] = json!(volume);
    claim
}

pub(super) fn volume(name: &str, class: &str, size: &str) -> Value {
    json!({ "kind": "Volume", "metadata": { "name": name, "labels": {} },
        "spec": { "accessModes": ["ReadWriteOnce"], "capacity": { "storage": size }, "storageClassName": class,
            "csi": { "driver": "d", "volumeHandle": name } },
        "status": { "phase": "Available" } })
}

pub(super) fn on(mut volume: Value, label: &str, value: &str) -> Value {
    volume["spec"]["nodeAffinity"] = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [
        { "key": label, "operator": "In", "values": [value] }] }] } });
    volume
}

pub(super) fn class(name: &str, provisioner: &str, mode: &str) -> Value {
    json!({ "kind": "Class", "metadata": { "name": name }, "provisioner": provisioner, "volumeBindingMode": mode })
}

pub(super) fn waiting(name: &str) -> Value {
    class(name, "d", "WaitForFirstConsumer")
}

pub(super) fn with(mut object: Value, path: &str, value: Value) -> Value {
    let mut at = &mut object;
    for part in path.split('/') {
        at = match part.parse::<usize>() {
            Ok(number) => &mut at[number],
            Err(_) => &mut at[part],
        };
    }
    *at = value;
    object
}
