//! PersistentVolumeClaim, and claim templates in pods and stateful sets.

use berth_core::names::{BETA_STORAGE_CLASS, IN_TREE_PLUGIN_PREFIX};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::field::Path;
use super::quantity::{self, Quantity, canonicalise_list};
use super::read::{
    annotation, at, default, default_pointer, entries, find, has, items, keep, map, name, same, text,
};
use super::table::{AGE, Column, NAME, string, wide};
use super::volume::{VOLUME_MODES, access_mode_causes, class, deprecated_annotations, phase};
use super::{Rules, age, names, selector, table};
use crate::resource::Cause;

const COLUMNS: &[Column] = &[
    NAME,
    string("Status", "Whether the claim is pending, bound or lost."),
    string("Volume", "The volume it is bound to."),
    string("Capacity", "How much the volume holds."),
    string("Access Modes", "How the volume can be mounted."),
    string("StorageClass", "StorageClass of the pvc"),
    string("VolumeAttributesClass", "VolumeAttributesClass of the pvc"),
    AGE,
    wide("VolumeMode", "Whether a filesystem or a raw block device is asked for."),
];
const RESIZE_STATES: [&str; 5] = [
    "ControllerResizeInProgress",
    "ControllerResizeInfeasible",
    "NodeResizeInProgress",
    "NodeResizeInfeasible",
    "NodeResizePending",
];
const IMMUTABLE: &str = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";

/// The rules of claims.
pub(super) struct PersistentVolumeClaim;

impl Rules for PersistentVolumeClaim {
    fn warns(&self) -> bool {
        true
    }

    fn warnings(&self, object: &Value, _created: bool) -> Vec<String> {
        deprecated_annotations(object, &[BETA_STORAGE_CLASS])
    }

    fn default(&self, object: &mut Value) {
        map(object, &["spec"]);
        if let Some(spec) = object.get_mut("spec") {
            default_spec(spec);
        }
        let status = map(object, &["status"]);
        default(status, "phase", "Pending");
        canonicalise_list(status, "capacity");
        canonicalise_list(status, "allocatedResources");
    }

    fn prepare_create(&self, object: &mut Value) {
        map(object, &[]).insert("status".to_owned(), json!({"phase": "Pending"}));
        let spec = map(object, &["spec"]);
        drop_foreign_namespace(spec, &Value::Null);
        drop_unknown_source(spec, &Value::Null);
        mirror_sources(spec);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        let spec = map(new, &["spec"]);
        drop_foreign_namespace(spec, at(old, &["spec"]));
        drop_unknown_source(spec, at(old, &["spec"]));
        mirror_sources(spec);
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        spec_causes(at(object, &["spec"]), &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        let path = Path::new("spec");
        let (mut changed, original) = comparable(new, old, &mut causes);
        let bound = text(new, &["status", "phase"]) == "Bound";
        if bound {
            let asked = at(old, &["spec", "resources", "requests", "storage"]).clone();
            if let Some(Value::Object(requests)) = find(&mut changed, &["resources", "requests"]) {
                requests.insert("storage".to_owned(), asked);
            }
            keep(&mut changed, &original, "volumeAttributesClassName");
        }
        if !same(&changed, &original) {
            let difference = super::field::difference(&original, &changed);
            causes.push(path.forbidden(format!("{IMMUTABLE}\n{difference}")));
        }
        let size = |value: &Value| quantity::from_value(value).unwrap_or(Quantity::ZERO);
        let storage = ["spec", "resources", "requests", "storage"];
        let new_size = size(at(new, &storage));
        if new_size < size(at(old, &storage)) && new_size <= size(at(old, &["status", "capacity", "storage"]))
        {
            let path = path.child("resources").child("requests").child("storage");
            causes.push(path.forbidden("field can not be less than status.capacity"));
        }
        let mode = ["spec", "volumeMode"];
        causes.extend(super::metadata::immutable(at(new, &mode), at(old, &mode), &Path::new("volumeMode")));
        causes.extend(attributes_class_cause(new, old));
        causes
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> Vec<Cause> {
        let status = at(new, &["status"]);
        let path = Path::new("status");
        let mut causes = Vec::new();
        for (resource, quantity) in entries(status, &["capacity"]) {
            causes.extend(not_negative(quantity, &path.child("capacity").key(resource)));
        }
        let resizing = path.child("allocatedResourceStatuses");
        for (resource, state) in entries(status, &["allocatedResourceStatuses"]) {
            causes.extend(resource_causes(resource, &resizing));
            if !RESIZE_STATES.contains(&state.as_str().unwrap_or_default()) {
                let mut known = RESIZE_STATES;
                known.sort_unstable();
                causes.push(resizing.not_supported(resource, &known));
            }
        }
        let allocated = path.child("allocatedResources");
        for (resource, quantity) in entries(status, &["allocatedResources"]) {
            let complaints = resource_causes(resource, &allocated);
            if complaints.is_empty() {
                causes.extend(not_negative(quantity, &allocated.key(resource)));
            }
            causes.extend(complaints);
        }
        causes
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = at(object, &["spec"]);
        let volume = text(spec, &["volumeName"]);
        let (mut capacity, mut modes) = (String::new(), String::new());
        if !volume.is_empty() {
            let held = quantity::from_value(at(object, &["status", "capacity", "storage"]));
            capacity = held.unwrap_or(Quantity::ZERO).to_string();
            modes = table::access_modes(items(object, &["status", "accessModes"]));
        }
        vec![
            json!(name(object)),
            json!(phase(object)),
            json!(volume),
            json!(capacity),
            json!(modes),
            json!(class(object)),
            json!(at(spec, &["volumeAttributesClassName"]).as_str().unwrap_or("<unset>")),
            json!(age::of(object, now)),
            json!(table::or(text(spec, &["volumeMode"]), "<unset>")),
        ]
    }
}

/// Fills in what a claim's spec leaves out.
pub(super) fn default_spec(spec: &mut Value) {
    let spec = map(spec, &[]);
    default_pointer(spec, "volumeMode", "Filesystem");
    if let Some(Value::Object(resources)) = spec.get_mut("resources") {
        canonicalise_list(resources, "requests");
        canonicalise_list(resources, "limits");
    }
}

/// Checks a claim's spec.
pub(super) fn spec_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    if items(spec, &["accessModes"]).is_empty() {
        causes.push(path.child("accessModes").required("at least 1 access mode is required"));
    }
    if has(spec, &["selector"]) {
        causes.extend(selector::label_selector_causes(at(spec, &["selector"]), &path.child("selector")));
    }
    causes.extend(access_mode_causes(spec, path));
    causes.extend(size_causes(spec, &path.child("resources").key("storage")));
    let class = text(spec, &["storageClassName"]);
    if !class.is_empty() {
        causes.extend(path.child("storageClassName").each_invalid(class, names::subdomain(class)));
    }
    let mode = text(spec, &["volumeMode"]);
    if has(spec, &["volumeMode"]) && !VOLUME_MODES.contains(&mode) {
        causes.push(path.child("volumeMode").not_supported(mode, &VOLUME_MODES));
    }
    causes.extend(source_causes(spec, path));
    let class = text(spec, &["volumeAttributesClassName"]);
    if !class.is_empty() {
        causes.extend(path.child("volumeAttributesClassName").each_invalid(class, names::subdomain(class)));
    }
    causes
}

/// Checks a claim template: labels, annotations and a spec, nothing else.
pub(super) fn template_causes(template: &Value, path: &Path) -> Vec<Cause> {
    let metadata = path.child("metadata");
    let mut causes = super::metadata::annotation_causes(
        at(template, &["metadata", "annotations"]),
        &metadata.child("annotations"),
    );
    causes.extend(selector::label_causes(at(template, &["metadata", "labels"]), &metadata.child("labels")));
    for (field, value) in entries(template, &["metadata"]) {
        if !matches!(field, "annotations" | "labels") && !super::read::is_empty(value) {
            causes.push(metadata.child(field).forbidden("cannot be set"));
        }
    }
    causes.extend(spec_causes(at(template, &["spec"]), &path.child("spec")));
    causes
}

fn size_causes(spec: &Value, path: &Path) -> Option<Cause> {
    let asked = at(spec, &["resources", "requests", "storage"]);
    if asked.is_null() {
        return Some(path.required(""));
    }
    match quantity::from_value(asked) {
        Err(error) => Some(path.invalid(asked.clone(), error.to_string())),
        Ok(size) if !size.is_positive() => Some(path.invalid(size.to_string(), "must be greater than zero")),
        Ok(_) => None,
    }
}

fn source_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for field in ["dataSource", "dataSourceRef"] {
        let source = at(spec, &[field]);
        if source.is_null() {
            continue;
        }
        let path = path.child(field);
        for field in ["name", "kind"] {
            if text(source, &[field]).is_empty() {
                causes.push(path.child(field).required(""));
            }
        }
        let (group, kind) = (text(source, &["apiGroup"]), text(source, &["kind"]));
        if group.is_empty() && kind != "PersistentVolumeClaim" {
            let detail = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
            causes.push(path.invalid(kind, detail));
        }
        if !group.is_empty() {
            causes.extend(path.child("apiGroup").each_invalid(group, names::subdomain(group)));
        }
        let namespace = text(source, &["namespace"]);
        if field == "dataSourceRef" && !namespace.is_empty() {
            causes.extend(path.child("namespace").each_invalid(namespace, names::label(namespace)));
        }
    }
    let (source, reference) = (at(spec, &["dataSource"]), at(spec, &["dataSourceRef"]));
    if !source.is_null() && !reference.is_null() {
        let field = |value: &Value, field| at(value, &[field]).clone();
        let matches = ["apiGroup", "kind", "name"].iter().all(|f| field(source, f) == field(reference, f));
        // Upstream shows a path where the value should be, which prints as an empty structure.
        if !text(reference, &["namespace"]).is_empty() {
            let detail = "may not be specified when dataSourceRef.namespace is specified";
            causes.push(path.invalid(json!({}), detail));
        } else if !matches {
            causes.push(path.invalid(json!({}), "must match dataSourceRef"));
        }
    }
    causes
}

/// The new and the old spec without what may differ: a volume name and a class that are set for the first time.
fn comparable(new: &Value, old: &Value, causes: &mut Vec<Cause>) -> (Value, Value) {
    let (mut changed, mut original) = (at(new, &["spec"]).clone(), at(old, &["spec"]).clone());
    mirror_sources(map(&mut original, &[]));
    if text(&original, &["volumeName"]).is_empty() {
        keep(&mut original, &changed, "volumeName");
    }
    let class = at(new, &["spec", "storageClassName"]).as_str();
    let had_class = has(old, &["spec", "storageClassName"]);
    let old_annotation = at(old, &["metadata", "annotations", BETA_STORAGE_CLASS]).as_str();
    let new_annotation = at(new, &["metadata", "annotations", BETA_STORAGE_CLASS]).as_str();
    let from_annotation = old_annotation.is_some()
        && !had_class
        && class == old_annotation
        && (new_annotation.is_none() || new_annotation == old_annotation);
    if from_annotation {
        keep(&mut changed, &original, "storageClassName");
        return (changed, original);
    }
    if new_annotation.unwrap_or_default() != old_annotation.unwrap_or_default() {
        let path = Path::new("metadata").child("annotations").child(BETA_STORAGE_CLASS);
        causes.push(path.invalid(annotation(new, BETA_STORAGE_CLASS), "field is immutable"));
    }
    if class.is_some() && !had_class && (old_annotation.is_none() || class == old_annotation) {
        keep(&mut changed, &original, "storageClassName");
    }
    (changed, original)
}

fn attributes_class_cause(new: &Value, old: &Value) -> Option<Cause> {
    let field = ["spec", "volumeAttributesClassName"];
    if same(at(new, &field), at(old, &field)) || !has(old, &["status", "currentVolumeAttributesClassName"]) {
        return None;
    }
    let to = match at(new, &field).as_str() {
        None => "nil",
        Some("") => "empty string",
        Some(_) => return None,
    };
    let detail =
        format!("update to {to} is forbidden when status.currentVolumeAttributesClassName is not nil");
    Some(Path::new("spec").child("volumeAttributesClassName").forbidden(detail))
}

/// A source in another namespace is dropped silently: the feature for it is off.
fn drop_foreign_namespace(spec: &mut Map<String, Value>, old: &Value) {
    let foreign = spec.get("dataSourceRef").is_some_and(|r| !text(r, &["namespace"]).is_empty());
    if foreign && !has(old, &["dataSourceRef"]) {
        spec.remove("dataSourceRef");
    }
}

/// `dataSource` alone may name only claims and snapshots; anything else is dropped silently.
fn drop_unknown_source(spec: &mut Map<String, Value>, old: &Value) {
    if has(old, &["dataSource"]) || spec.get("dataSourceRef").is_some_and(|r| !r.is_null()) {
        return;
    }
    let known = spec.get("dataSource").is_some_and(|source| {
        matches!(
            (text(source, &["apiGroup"]), text(source, &["kind"])),
            ("", "PersistentVolumeClaim") | ("snapshot.storage.k8s.io", "VolumeSnapshot")
        )
    });
    if !known {
        spec.remove("dataSource");
    }
}

/// Makes `dataSource` and `dataSourceRef` say the same, whichever was given.
fn mirror_sources(spec: &mut Map<String, Value>) {
    let given = |name: &str| spec.get(name).filter(|value| !value.is_null()).cloned();
    let short = |source: Value| {
        let field = |name: &str| at(&source, &[name]).clone();
        json!({ "apiGroup": field("apiGroup"), "kind": field("kind"), "name": field("name") })
    };
    match (given("dataSource"), given("dataSourceRef")) {
        (Some(source), None) => {
            spec.insert("dataSourceRef".to_owned(), short(source));
        }
        (None, Some(reference)) if text(&reference, &["namespace"]).is_empty() => {
            spec.insert("dataSource".to_owned(), short(reference));
        }
        _ => {}
    }
}

fn not_negative(quantity: &Value, path: &Path) -> Option<Cause> {
    match quantity::from_value(quantity) {
        Ok(quantity) => {
            let value = quantity.value();
            (value < 0).then(|| path.invalid(value, "must be a valid resource quantity"))
        }
        Err(error) => Some(path.invalid(quantity.clone(), error.to_string())),
    }
}

fn resource_causes(resource: &str, path: &Path) -> Vec<Cause> {
    let causes = path.each_invalid(resource, names::qualified(resource));
    let native = !resource.contains('/') || resource.contains(IN_TREE_PLUGIN_PREFIX);
    if causes.is_empty() && native && resource != "storage" {
        return vec![path.not_supported(resource, &["storage"])];
    }
    causes
}

#[cfg(test)]
mod tests;
