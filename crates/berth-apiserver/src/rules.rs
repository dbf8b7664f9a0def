//! What is particular to each kind: defaults, what clients may not set, validation, updates, columns, field selectors,
//! admission.
//!
//! Pure functions over JSON values. Whoever writes objects calls, in this order: [`Rules::default`], one of the
//! `prepare_` functions, [`admit`], then [`metadata_causes`] (or [`metadata_update_causes`]) and one of the `validate`
//! functions. Texts and field paths are those of kube-apiserver, because people and programs read them.

pub(crate) mod admission;
pub(crate) mod age;
mod batch;
pub(crate) mod budget;
mod claim;
mod classes;
mod config;
mod csi;
pub(crate) mod custom;
mod definition;
mod endpoints;
pub(crate) mod event;
pub(crate) mod field;
pub(crate) mod jsonpath;
pub(crate) mod metadata;
pub(crate) mod names;
pub(crate) mod namespace;
mod node;
mod nodes;
pub(crate) mod pod;
pub(crate) mod priority;
pub(crate) mod quantity;
pub(crate) mod read;
mod revision;
pub(crate) mod selector;
pub(crate) mod service;
mod sources;
pub(crate) mod table;
mod volume;
mod workload;

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

pub use self::admission::TolerationSeconds;
pub(crate) use self::admission::{Denied, Operation, Reader, admit, complete_update};
pub(crate) use self::metadata::{metadata_causes, metadata_update_causes};
pub(crate) use self::names::NameRule;
pub use self::selector::{FieldSelector, LabelSelector, parse_field_selector, parse_label_selector};
pub(crate) use self::table::Column;
use crate::resource::Cause;

/// What is particular to one kind.
pub(crate) trait Rules: Send + Sync {
    /// Fills in what the client left out.
    fn default(&self, _object: &mut Value) {}

    /// Resets what clients may not set on a new object.
    fn prepare_create(&self, _object: &mut Value) {}

    /// Resets what an update may not change: status, mostly.
    fn prepare_update(&self, _new: &mut Value, _old: &Value) {}

    /// Resets what an update of the status may not change: everything else.
    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep_all_but_status(new, old);
    }

    /// Whether an update of the status leaves the metadata alone, too.
    fn status_keeps_metadata(&self) -> bool {
        false
    }

    /// Checks a new object; its metadata is checked apart.
    fn validate(&self, _object: &Value) -> Vec<Cause> {
        Vec::new()
    }

    /// Checks an object that replaces another.
    fn validate_update(&self, new: &Value, _old: &Value) -> Vec<Cause> {
        self.validate(new)
    }

    /// Checks an object whose status replaces another's.
    fn validate_status_update(&self, _new: &Value, _old: &Value) -> Vec<Cause> {
        Vec::new()
    }

    /// Which names its objects may have.
    fn name_rule(&self) -> NameRule {
        NameRule::Subdomain
    }

    /// Whether an update may leave the resource version out.
    fn unconditional_update(&self) -> bool {
        true
    }

    /// Whether an update of an object that is not there creates it.
    fn create_on_update(&self) -> bool {
        false
    }

    /// Whether objects carry `metadata.generation` from the start.
    fn counts_generation(&self) -> bool {
        false
    }

    /// Whether the change is one that `metadata.generation` counts.
    fn generation_changes(&self, _new: &Value, _old: &Value) -> bool {
        false
    }

    /// The fields that field selectors may ask for, with the object's values.
    fn selectable_fields(&self, object: &Value) -> Vec<(&str, String)> {
        metadata_fields(object)
    }

    /// Whether field selectors may ask for a field.
    fn supports_field(&self, label: &str) -> bool {
        matches!(label, "metadata.name" | "metadata.namespace")
            || self.selectable_fields(&Value::Null).iter().any(|(name, _)| *name == label)
    }

    /// The columns of a table of its objects.
    fn columns(&self) -> &[Column] {
        table::PLAIN
    }

    /// The cells of an object's row, one per column.
    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        vec![json!(read::name(object)), read::at(object, &["metadata", "creationTimestamp"]).clone()]
    }

    /// Whether there is anything to warn the writers of objects about.
    fn warns(&self) -> bool {
        false
    }

    /// What to warn the writer of an object about.
    fn warnings(&self, _object: &Value, _created: bool) -> Vec<String> {
        Vec::new()
    }

    /// Whether a deletion that does not say what becomes of dependents leaves them alone.
    fn orphans_dependents(&self) -> bool {
        false
    }

    /// How long a deletion waits, in seconds: only pods wait.
    fn grace_seconds(&self, _object: &Value, _asked: Option<i64>) -> i64 {
        0
    }
}

/// The rules of a kind without particular ones.
pub(crate) struct Plain;

impl Rules for Plain {}

/// The rules of a kind.
pub(crate) fn of(group: &str, kind: &str) -> Arc<dyn Rules> {
    match (group, kind) {
        ("", "PersistentVolume") => Arc::new(volume::PersistentVolume),
        ("", "PersistentVolumeClaim") => Arc::new(claim::PersistentVolumeClaim),
        ("", "Pod") => Arc::new(pod::Pod),
        ("", "Namespace") => Arc::new(namespace::Namespace),
        ("", "Node") => Arc::new(node::Node),
        ("", "ConfigMap") => Arc::new(config::ConfigMap),
        ("", "Secret") => Arc::new(config::Secret),
        ("", "ServiceAccount") => Arc::new(config::ServiceAccount),
        ("", "Service") => Arc::new(service::Service),
        ("", "Endpoints") => Arc::new(endpoints::Endpoints),
        ("discovery.k8s.io", "EndpointSlice") => Arc::new(endpoints::EndpointSlice),
        ("", "Event") => Arc::new(event::Event { strict: false }),
        ("events.k8s.io", "Event") => Arc::new(event::Event { strict: true }),
        ("apps", "Deployment") => Arc::new(workload::Workload::Deployment),
        ("apps", "ReplicaSet") => Arc::new(workload::Workload::ReplicaSet),
        ("apps", "StatefulSet") => Arc::new(workload::Workload::StatefulSet),
        ("apps", "DaemonSet") => Arc::new(workload::Workload::DaemonSet),
        ("apps", "ControllerRevision") => Arc::new(revision::Revision),
        ("batch", "Job") => Arc::new(batch::Job),
        ("batch", "CronJob") => Arc::new(batch::CronJob),
        ("apiextensions.k8s.io", "CustomResourceDefinition") => {
            Arc::new(definition::CustomResourceDefinition)
        }
        ("coordination.k8s.io", "Lease") => Arc::new(event::Lease),
        ("rbac.authorization.k8s.io", "Role" | "ClusterRole") => Arc::new(node::Rbac { binding: false }),
        ("rbac.authorization.k8s.io", "RoleBinding" | "ClusterRoleBinding") => {
            Arc::new(node::Rbac { binding: true })
        }
        ("policy", "PodDisruptionBudget") => Arc::new(budget::Budget),
        ("scheduling.k8s.io", "PriorityClass") => Arc::new(priority::PriorityClass),
        ("storage.k8s.io", "StorageClass") => Arc::new(classes::StorageClass),
        ("storage.k8s.io", "VolumeAttributesClass") => Arc::new(classes::VolumeAttributesClass),
        ("storage.k8s.io", "CSIDriver") => Arc::new(csi::CsiDriver),
        ("storage.k8s.io", "CSINode") => Arc::new(csi::CsiNode),
        ("storage.k8s.io", "VolumeAttachment") => Arc::new(csi::VolumeAttachment),
        ("storage.k8s.io", "CSIStorageCapacity") => Arc::new(csi::CsiStorageCapacity),
        _ => Arc::new(Plain),
    }
}

/// `metadata.name` and `metadata.namespace`, which every kind can be selected by.
pub(crate) fn metadata_fields(object: &Value) -> Vec<(&'static str, String)> {
    let mut fields = vec![("metadata.name", read::name(object).to_owned())];
    let namespace = read::text(object, &["metadata", "namespace"]);
    if !namespace.is_empty() {
        fields.push(("metadata.namespace", namespace.to_owned()));
    }
    fields
}

/// Takes everything but `status` and `metadata` from the old object.
pub(crate) fn keep_all_but_status(new: &mut Value, old: &Value) {
    let fields: Vec<String> = [&*new, old]
        .iter()
        .filter_map(|object| object.as_object())
        .flat_map(|map| map.keys())
        .filter(|key| !matches!(key.as_str(), "status" | "metadata" | "kind" | "apiVersion"))
        .cloned()
        .collect();
    for field in fields {
        read::keep(new, old, &field);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_can_be_selected_by_its_name() {
        let claims = of("", "PersistentVolumeClaim");
        assert!(claims.supports_field("metadata.name") && !claims.supports_field("spec.volumeName"));
    }

    #[test]
    fn every_row_has_a_cell_for_every_column() {
        let kinds = [
            ("", "PersistentVolume"),
            ("", "PersistentVolumeClaim"),
            ("", "Pod"),
            ("", "Namespace"),
            ("", "Node"),
            ("", "ConfigMap"),
            ("", "Secret"),
            ("", "ServiceAccount"),
            ("", "Service"),
            ("", "Endpoints"),
            ("discovery.k8s.io", "EndpointSlice"),
            ("", "Event"),
            ("events.k8s.io", "Event"),
            ("coordination.k8s.io", "Lease"),
            ("storage.k8s.io", "StorageClass"),
            ("storage.k8s.io", "VolumeAttributesClass"),
            ("storage.k8s.io", "CSIDriver"),
            ("storage.k8s.io", "CSINode"),
            ("storage.k8s.io", "VolumeAttachment"),
            ("storage.k8s.io", "CSIStorageCapacity"),
            ("apps", "Deployment"),
            ("apps", "ReplicaSet"),
            ("apps", "StatefulSet"),
            ("apps", "DaemonSet"),
            ("batch", "Job"),
            ("batch", "CronJob"),
            ("rbac.authorization.k8s.io", "Role"),
            ("rbac.authorization.k8s.io", "RoleBinding"),
            ("apiextensions.k8s.io", "CustomResourceDefinition"),
            ("example.com", "Anything"),
        ];
        for (group, kind) in kinds {
            let rules = of(group, kind);
            let cells = rules.cells(&json!({}), Timestamp::UNIX_EPOCH);
            assert_eq!(cells.len(), rules.columns().len(), "{kind}");
        }
    }

    #[test]
    fn no_rule_panics_on_odd_objects() {
        let odd = [
            json!(null),
            json!([]),
            json!({"metadata": 3, "spec": [], "status": "x"}),
            json!({"spec": {"containers": {}, "volumes": [1, "a", null], "template": 5, "versions": [[]]}}),
        ];
        for kind in [
            "PersistentVolume",
            "PersistentVolumeClaim",
            "Pod",
            "Namespace",
            "Node",
            "ConfigMap",
            "Secret",
            "Service",
            "Endpoints",
            "Event",
        ] {
            exercise(&*of("", kind), &odd);
        }
        for kind in [
            "StorageClass",
            "VolumeAttributesClass",
            "CSIDriver",
            "CSINode",
            "VolumeAttachment",
            "CSIStorageCapacity",
        ] {
            exercise(&*of("storage.k8s.io", kind), &odd);
        }
        for kind in ["Deployment", "ReplicaSet", "StatefulSet", "DaemonSet"] {
            exercise(&*of("apps", kind), &odd);
        }
        for kind in ["Job", "CronJob"] {
            exercise(&*of("batch", kind), &odd);
        }
        exercise(&*of("apiextensions.k8s.io", "CustomResourceDefinition"), &odd);
        exercise(&*of("rbac.authorization.k8s.io", "RoleBinding"), &odd);
        exercise(&*of("events.k8s.io", "Event"), &odd);
        exercise(&*of("discovery.k8s.io", "EndpointSlice"), &odd);
    }

    fn exercise(rules: &dyn Rules, objects: &[Value]) {
        for old in objects {
            for new in objects {
                let mut changed = new.clone();
                rules.validate_update(&changed, old);
                rules.validate_status_update(&changed, old);
                rules.cells(&changed, Timestamp::UNIX_EPOCH);
                rules.selectable_fields(&changed);
                rules.default(&mut changed);
                rules.prepare_create(&mut changed);
                rules.prepare_update(&mut changed, old);
                rules.prepare_status_update(&mut changed, old);
                rules.validate(&changed);
                metadata_causes(&changed, true, rules.name_rule());
                metadata_update_causes(&changed, old);
            }
        }
    }
}
