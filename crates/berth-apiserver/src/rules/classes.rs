//! The rules of StorageClasses and VolumeAttributesClasses: defaults, validation, and the columns of tables.

use berth_core::names::{BETA_DEFAULT_CLASS, DEFAULT_CLASS};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{annotation, at, default_pointer, entries, flag, items, map, name, same, text};
use super::table::{AGE, Column, NAME, string};
use super::{Rules, age, names, nodes, table};
use crate::resource::Cause;

const PARAMETERS: usize = 512;
const PARAMETERS_SIZE: usize = 256 * 1024;
const BINDING_MODES: [&str; 2] = ["Immediate", "WaitForFirstConsumer"];
const RECLAIM: [&str; 2] = ["Delete", "Retain"];
const CLASS_COLUMNS: &[Column] = &[
    NAME,
    string("Provisioner", "Who makes the volumes."),
    string("ReclaimPolicy", "What happens to a volume when its claim goes."),
    string("VolumeBindingMode", "When volumes are made and bound."),
    string("AllowVolumeExpansion", "Whether volumes can grow."),
    AGE,
];
const ATTRIBUTES_COLUMNS: &[Column] = &[NAME, string("DriverName", "The driver it is for."), AGE];

/// The rules of storage classes.
pub(super) struct StorageClass;

impl Rules for StorageClass {
    fn default(&self, object: &mut Value) {
        let object = map(object, &[]);
        default_pointer(object, "reclaimPolicy", "Delete");
        default_pointer(object, "volumeBindingMode", "Immediate");
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = provisioner_causes(text(object, &["provisioner"]), &Path::new("provisioner"));
        causes.extend(parameter_causes(object, true));
        let policy = text(object, &["reclaimPolicy"]);
        if !policy.is_empty() && !RECLAIM.contains(&policy) {
            causes.push(Path::new("reclaimPolicy").not_supported(policy, &RECLAIM));
        }
        let path = Path::new("volumeBindingMode");
        match at(object, &["volumeBindingMode"]).as_str() {
            None => causes.push(path.required("")),
            Some(mode) if !BINDING_MODES.contains(&mode) => {
                causes.push(path.not_supported(mode, &BINDING_MODES));
            }
            Some(_) => {}
        }
        let path = Path::new("allowedTopologies");
        let mut seen = Vec::new();
        for (index, term) in items(object, &["allowedTopologies"]).iter().enumerate() {
            let (allowed, complaints) = nodes::topology_causes(term, &path.index(index));
            causes.extend(complaints);
            if seen.contains(&allowed) {
                causes.push(path.index(index).child("matchLabelExpressions").duplicate(""));
            }
            seen.push(allowed);
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let fixed = ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"];
        let mut causes = self.validate(new);
        causes.extend(
            fixed
                .iter()
                .filter_map(|field| immutable(at(new, &[field]), at(old, &[field]), &Path::new(field))),
        );
        causes
    }

    fn columns(&self) -> &'static [Column] {
        CLASS_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let default = if is_default(object) { " (default)" } else { "" };
        vec![
            json!(format!("{}{default}", name(object))),
            json!(text(object, &["provisioner"])),
            json!(table::or(text(object, &["reclaimPolicy"]), "Delete")),
            json!(table::or(text(object, &["volumeBindingMode"]), "Immediate")),
            json!(flag(object, &["allowVolumeExpansion"])),
            json!(age::of(object, now)),
        ]
    }
}

/// Whether claims without a class get this one.
pub(super) fn is_default(class: &Value) -> bool {
    annotation(class, DEFAULT_CLASS) == "true" || annotation(class, BETA_DEFAULT_CLASS) == "true"
}

/// The rules of volume attributes classes.
pub(super) struct VolumeAttributesClass;

impl Rules for VolumeAttributesClass {
    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = provisioner_causes(text(object, &["driverName"]), &Path::new("driverName"));
        causes.extend(parameter_causes(object, false));
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes: Vec<Cause> = ["driverName", "parameters"]
            .iter()
            .filter(|field| !same(at(new, &[field]), at(old, &[field])))
            .map(|field| Path::new(field).forbidden(format!("updates to {field} are forbidden.")))
            .collect();
        causes.extend(self.validate(new));
        causes
    }

    fn columns(&self) -> &'static [Column] {
        ATTRIBUTES_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![json!(name(object)), json!(text(object, &["driverName"])), json!(age::of(object, now))]
    }
}

fn provisioner_causes(provisioner: &str, path: &Path) -> Vec<Cause> {
    if provisioner.is_empty() {
        return vec![path.required("")];
    }
    let lower = provisioner.to_lowercase();
    path.each_invalid(&lower, names::qualified(&lower))
}

fn parameter_causes(object: &Value, may_be_empty: bool) -> Vec<Cause> {
    let path = Path::new("parameters");
    let parameters: Vec<(&str, &Value)> = entries(object, &["parameters"]).collect();
    if parameters.len() > PARAMETERS {
        return vec![path.too_long(PARAMETERS)];
    }
    let mut causes = Vec::new();
    if parameters.iter().any(|(key, _)| key.is_empty()) {
        causes.push(path.invalid("", "field can not be empty."));
    }
    let size: usize =
        parameters.iter().map(|(key, value)| key.len() + value.as_str().map_or(0, str::len)).sum();
    if size > PARAMETERS_SIZE {
        causes.push(path.too_long(PARAMETERS_SIZE));
    }
    if !may_be_empty && parameters.is_empty() {
        causes.push(path.required("must contain at least one key/value pair"));
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class() -> Value {
        json!({"metadata": {"name": "fast"}, "provisioner": "csi.example.com", "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate"})
    }

    fn with(field: &str, value: Value) -> Value {
        let mut object = class();
        object[field] = value;
        object
    }

    fn texts(causes: Vec<Cause>) -> Vec<String> {
        causes.into_iter().map(|cause| cause.to_string()).collect()
    }

    #[test]
    fn a_new_class_gets_its_defaults() {
        let mut object = json!({"provisioner": "x"});
        StorageClass.default(&mut object);
        assert_eq!(
            object,
            json!({"provisioner": "x", "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate"})
        );
    }

    #[test]
    fn invalid_classes_are_refused_with_the_cause() {
        assert_eq!(texts(StorageClass.validate(&class())), Vec::<String>::new());
        let term = json!({"matchLabelExpressions": [{"key": "zone", "values": ["a"]}]});
        for (object, expected) in [
            (with("provisioner", json!("")), "provisioner: Required value"),
            (
                with("reclaimPolicy", json!("Recycle")),
                "reclaimPolicy: Unsupported value: \"Recycle\": supported values: \"Delete\", \"Retain\"",
            ),
            (
                with("volumeBindingMode", json!("Late")),
                "volumeBindingMode: Unsupported value: \"Late\": supported values: \"Immediate\", \"WaitForFirstConsumer\"",
            ),
            (
                with("parameters", json!({"": "x"})),
                "parameters: Invalid value: \"\": field can not be empty.",
            ),
            (
                with("parameters", json!({"a": "x".repeat(PARAMETERS_SIZE)})),
                "parameters: Too long: may not be more than 262144 bytes",
            ),
            (
                with("allowedTopologies", json!([term, term])),
                "allowedTopologies[1].matchLabelExpressions: Duplicate value: \"\"",
            ),
            (
                with(
                    "allowedTopologies",
                    json!([{"matchLabelExpressions": [{"key": "zone", "values": []}]}]),
                ),
                "allowedTopologies[0].matchLabelExpressions[0].values: Required value",
            ),
        ] {
            assert_eq!(texts(StorageClass.validate(&object)), [expected]);
        }
        assert!(
            texts(StorageClass.validate(&with("provisioner", json!("a b"))))[0]
                .starts_with("provisioner: Invalid value: \"a b\": name part")
        );
    }

    #[test]
    fn what_volumes_were_made_with_never_changes() {
        for (field, value, text) in [
            ("provisioner", json!("other"), "provisioner: Invalid value: \"other\": field is immutable"),
            ("parameters", json!({"a": "b"}), "parameters: Invalid value: {\"a\":\"b\"}: field is immutable"),
            (
                "reclaimPolicy",
                json!("Retain"),
                "reclaimPolicy: Invalid value: \"Retain\": field is immutable",
            ),
            (
                "volumeBindingMode",
                json!("WaitForFirstConsumer"),
                "volumeBindingMode: Invalid value: \"WaitForFirstConsumer\": field is immutable",
            ),
        ] {
            assert_eq!(texts(StorageClass.validate_update(&with(field, value), &class())), [text]);
        }
        assert!(
            StorageClass.validate_update(&with("allowVolumeExpansion", json!(true)), &class()).is_empty()
        );
    }

    #[test]
    fn attributes_classes_have_parameters_that_never_change() {
        let object = json!({"driverName": "d", "parameters": {"iops": "1"}});
        assert!(VolumeAttributesClass.validate(&object).is_empty());
        assert_eq!(
            texts(VolumeAttributesClass.validate(&json!({"driverName": "d"}))),
            ["parameters: Required value: must contain at least one key/value pair"]
        );
        let new = json!({"driverName": "d", "parameters": {"iops": "2"}});
        assert_eq!(
            texts(VolumeAttributesClass.validate_update(&new, &object)),
            ["parameters: Forbidden: updates to parameters are forbidden."]
        );
    }

    #[test]
    fn the_default_class_is_marked() {
        let mut object = class();
        object["metadata"]["annotations"] = json!({"storageclass.kubernetes.io/is-default-class": "true"});
        let cells = StorageClass.cells(&object, Timestamp::UNIX_EPOCH);
        assert_eq!(
            cells[..5],
            [
                json!("fast (default)"),
                json!("csi.example.com"),
                json!("Delete"),
                json!("Immediate"),
                json!(false)
            ]
        );
    }
}
