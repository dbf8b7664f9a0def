//! CSIDriver, CSINode, VolumeAttachment and CSIStorageCapacity.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::quantity::{self, canonicalise};
use super::read::{
    at, default_pointer, entries, find, flag, has, items, keep, map, name, number, same, text,
};
use super::sources::driver_causes;
use super::table::{AGE, Column, NAME, boolean, integer, string};
use super::{Rules, age, names, selector, table, volume};
use crate::resource::Cause;

const NODE_ID: usize = 256;
const METADATA_SIZE: usize = 256 * 1024;
const ERROR_SIZE: usize = 1024;
const FS_GROUP_POLICIES: [&str; 3] = ["File", "None", "ReadWriteOnceWithFSType"];
const LIFECYCLES: [&str; 2] = ["Persistent", "Ephemeral"];
const TOKENS_IN_ATTRIBUTES: &str = "spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent possible logging of tokens in volume attributes";
const DRIVER_COLUMNS: &[Column] = &[
    NAME,
    boolean("AttachRequired", "Whether volumes are attached before they are mounted."),
    boolean("PodInfoOnMount", "Whether the driver is told about the pod."),
    boolean("StorageCapacity", "Whether the scheduler asks for free capacity."),
    string("TokenRequests", "The audiences of the tokens it gets."),
    boolean("RequiresRepublish", "Whether mounts are refreshed from time to time."),
    string("Modes", "What life its volumes can have."),
    AGE,
];
const NODE_COLUMNS: &[Column] = &[NAME, integer("Drivers", "How many CSI drivers the node has."), AGE];
const ATTACHMENT_COLUMNS: &[Column] = &[
    NAME,
    table::column("Attacher", "string", "name", "The driver that attaches.", 0),
    string("PV", "The volume."),
    string("Node", "The node."),
    boolean("Attached", "Whether it is attached."),
    AGE,
];

/// The rules of CSI drivers.
pub(super) struct CsiDriver;

impl Rules for CsiDriver {
    fn warns(&self) -> bool {
        true
    }

    fn warnings(&self, object: &Value, created: bool) -> Vec<String> {
        let tokens = !items(object, &["spec", "tokenRequests"]).is_empty();
        if created && tokens && !has(object, &["spec", "serviceAccountTokenInSecrets"]) {
            return vec![TOKENS_IN_ATTRIBUTES.to_owned()];
        }
        Vec::new()
    }

    fn default(&self, object: &mut Value) {
        let spec = map(object, &["spec"]);
        default_pointer(spec, "attachRequired", true);
        default_pointer(spec, "podInfoOnMount", false);
        default_pointer(spec, "storageCapacity", false);
        default_pointer(spec, "fsGroupPolicy", "ReadWriteOnceWithFSType");
        default_pointer(spec, "requiresRepublish", false);
        default_pointer(spec, "seLinuxMount", false);
        if spec.get("volumeLifecycleModes").is_none_or(super::read::is_empty) {
            spec.insert("volumeLifecycleModes".to_owned(), json!(["Persistent"]));
        }
    }

    fn prepare_create(&self, object: &mut Value) {
        map(object, &["spec"]).remove("preventPodSchedulingIfMissing");
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if !has(old, &["spec", "preventPodSchedulingIfMissing"]) {
            map(new, &["spec"]).remove("preventPodSchedulingIfMissing");
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        driver_spec_causes(at(object, &["spec"]), &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        // Upstream spells the first one so.
        for (field, path) in
            [("attachRequired", "attachedRequired"), ("volumeLifecycleModes", "volumeLifecycleModes")]
        {
            let field = ["spec", field];
            causes.extend(immutable(at(new, &field), at(old, &field), &Path::new("spec").child(path)));
        }
        causes
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        !same(at(new, &["spec"]), at(old, &["spec"]))
    }

    fn columns(&self) -> &'static [Column] {
        DRIVER_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = at(object, &["spec"]);
        let join = |texts: Vec<&str>| texts.join(",");
        let tokens = if has(spec, &["tokenRequests"]) {
            join(items(spec, &["tokenRequests"]).iter().map(|t| text(t, &["audience"])).collect())
        } else {
            "<unset>".to_owned()
        };
        let modes = join(items(spec, &["volumeLifecycleModes"]).iter().filter_map(Value::as_str).collect());
        vec![
            json!(name(object)),
            json!(at(spec, &["attachRequired"]).as_bool().unwrap_or(true)),
            json!(flag(spec, &["podInfoOnMount"])),
            json!(flag(spec, &["storageCapacity"])),
            json!(tokens),
            json!(flag(spec, &["requiresRepublish"])),
            json!(table::or(&modes, "<none>")),
            json!(age::of(object, now)),
        ]
    }
}

fn driver_spec_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for (field, shown) in [
        ("attachRequired", "attachedRequired"),
        ("podInfoOnMount", "podInfoOnMount"),
        ("storageCapacity", "storageCapacity"),
    ] {
        if !has(spec, &[field]) {
            causes.push(path.child(shown).required(""));
        }
    }
    let policy = text(spec, &["fsGroupPolicy"]);
    if has(spec, &["fsGroupPolicy"]) && !FS_GROUP_POLICIES.contains(&policy) {
        causes.push(path.child("fsGroupPolicy").not_supported(policy, &FS_GROUP_POLICIES));
    }
    causes.extend(token_causes(spec, &path.child("tokenRequests")));
    for mode in items(spec, &["volumeLifecycleModes"]).iter().map(|m| m.as_str().unwrap_or_default()) {
        if !LIFECYCLES.contains(&mode) {
            causes.push(path.child("volumeLifecycleModes").not_supported(mode, &LIFECYCLES));
        }
    }
    if !has(spec, &["seLinuxMount"]) {
        causes.push(path.child("seLinuxMount").required(""));
    }
    if let Some(period) = number(spec, &["nodeAllocatableUpdatePeriodSeconds"]).filter(|period| *period < 10)
    {
        let path = path.child("nodeAllocatableUpdatePeriodSeconds");
        causes.push(path.invalid(period, "must be greater than or equal to 10 seconds"));
    }
    let in_secrets = at(spec, &["serviceAccountTokenInSecrets"]);
    if !in_secrets.is_null() && items(spec, &["tokenRequests"]).is_empty() {
        let detail = "serviceAccountTokenInSecrets is set but no tokenRequests are specified";
        causes.push(path.child("serviceAccountTokenInSecrets").invalid(in_secrets.clone(), detail));
    }
    causes
}

fn token_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut audiences = BTreeSet::new();
    for (index, request) in items(spec, &["tokenRequests"]).iter().enumerate() {
        let path = path.index(index);
        let audience = text(request, &["audience"]);
        if !audiences.insert(audience) {
            causes.push(path.child("audience").duplicate(audience));
            continue;
        }
        causes.extend(token_expiry_cause(request, &path));
    }
    causes
}

/// Checks how long a service account token is asked to live.
pub(super) fn token_expiry_cause(request: &Value, path: &Path) -> Option<Cause> {
    let seconds = number(request, &["expirationSeconds"])?;
    let path = path.child("expirationSeconds");
    if seconds < 600 {
        return Some(path.invalid(seconds, "may not specify a duration less than 10 minutes"));
    }
    (seconds > 1 << 32).then(|| path.invalid(seconds, "may not specify a duration larger than 2^32 seconds"))
}

/// The rules of CSI nodes.
pub(super) struct CsiNode;

impl Rules for CsiNode {
    fn default(&self, object: &mut Value) {
        default_pointer(map(object, &["spec"]), "drivers", json!([]));
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec").child("drivers");
        let mut seen = BTreeSet::new();
        let mut causes = Vec::new();
        for (index, driver) in items(object, &["spec", "drivers"]).iter().enumerate() {
            let path = path.index(index);
            let name = text(driver, &["name"]);
            causes.extend(driver_causes(name, &path.child("name")));
            let id = text(driver, &["nodeID"]);
            if id.is_empty() {
                causes.push(path.child("nodeID").required(""));
            }
            if id.len() > NODE_ID {
                causes
                    .push(path.child("nodeID").invalid(id, format!("must be {NODE_ID} characters or less")));
            }
            if let Some(count) = number(driver, &["allocatable", "count"]).filter(|count| *count < 0) {
                let path = path.child("allocatable").child("count");
                causes.push(path.invalid(count, "must be greater than or equal to 0"));
            }
            if !seen.insert(name) {
                causes.push(path.child("name").duplicate(name));
            }
            let mut keys = BTreeSet::new();
            for key in items(driver, &["topologyKeys"]).iter().map(|k| k.as_str().unwrap_or_default()) {
                if key.is_empty() {
                    causes.push(path.required(""));
                }
                if !keys.insert(key) {
                    causes.push(path.duplicate(key));
                }
                causes.extend(path.each_invalid(key, names::qualified(key)));
            }
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        let fixed = |driver: &Value| {
            let mut driver = driver.clone();
            super::read::drop(&mut driver, "allocatable");
            driver
        };
        for old in items(old, &["spec", "drivers"]) {
            let renewed = items(new, &["spec", "drivers"])
                .iter()
                .filter(|d| text(d, &["name"]) == text(old, &["name"]));
            for new in renewed {
                if !same(&fixed(new), &fixed(old)) {
                    let shown = format!(
                        "{{\"Name\":{},\"NodeID\":{},\"TopologyKeys\":{},\"Allocatable\":null}}",
                        at(new, &["name"]),
                        json!(text(new, &["nodeID"])),
                        at(new, &["topologyKeys"])
                    );
                    causes
                        .push(Path::new("spec").child("drivers").invalid_shown(&shown, "field is immutable"));
                }
            }
        }
        causes
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn columns(&self) -> &'static [Column] {
        NODE_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let drivers = items(object, &["spec", "drivers"]).len();
        vec![json!(name(object)), json!(drivers), json!(age::of(object, now))]
    }
}

/// The rules of volume attachments.
pub(super) struct VolumeAttachment;

impl Rules for VolumeAttachment {
    fn status_keeps_metadata(&self) -> bool {
        true
    }

    fn default(&self, object: &mut Value) {
        default_pointer(map(object, &["status"]), "attached", false);
    }

    fn prepare_create(&self, object: &mut Value) {
        map(object, &[]).insert("status".to_owned(), json!({"attached": false}));
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        keep_metadata(new, old);
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec");
        let spec = at(object, &["spec"]);
        let mut causes = driver_causes(text(spec, &["attacher"]), &path.child("attacher"));
        causes.extend(attachment_source_causes(at(spec, &["source"]), &path.child("source")));
        let node = text(spec, &["nodeName"]);
        causes.extend(path.child("nodeName").each_invalid(node, names::subdomain(node)));
        let path = Path::new("status");
        let status = at(object, &["status"]);
        let size: usize = entries(status, &["attachmentMetadata"])
            .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
            .sum();
        if size > METADATA_SIZE {
            causes.push(path.child("attachmentMetadata").too_long(METADATA_SIZE));
        }
        for field in ["attachError", "detachError"] {
            let path = path.child(field);
            let error = at(status, &[field]);
            // Upstream names the limit of the metadata here.
            if text(error, &["message"]).len() > ERROR_SIZE {
                causes.push(path.child("message").too_long(METADATA_SIZE));
            }
            if let Some(code) = number(error, &["errorCode"]).filter(|code| *code < 0) {
                causes.push(path.child("errorCode").invalid(code, names::in_range(0, i64::from(i32::MAX))));
            }
        }
        if let Some(volume) = at(spec, &["source", "persistentVolumeName"]).as_str() {
            let path = Path::new("spec.source.persistentVolumeName");
            causes.extend(path.each_invalid(volume, names::subdomain(volume)));
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        let (new, old) = (at(new, &["spec"]), at(old, &["spec"]));
        if !same(new, old) {
            let shown = format!(
                "{{\"Attacher\":{},\"Source\":{{\"PersistentVolumeName\":{},\"InlineVolumeSpec\":{}}},\"NodeName\":{}}}",
                json!(text(new, &["attacher"])),
                at(new, &["source", "persistentVolumeName"]),
                at(new, &["source", "inlineVolumeSpec"]),
                json!(text(new, &["nodeName"]))
            );
            causes.push(Path::new("spec").invalid_shown(&shown, "field is immutable"));
        }
        causes
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        self.validate_update(new, old)
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn columns(&self) -> &'static [Column] {
        ATTACHMENT_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = at(object, &["spec"]);
        vec![
            json!(name(object)),
            json!(text(spec, &["attacher"])),
            json!(text(spec, &["source", "persistentVolumeName"])),
            json!(text(spec, &["nodeName"])),
            json!(flag(object, &["status", "attached"])),
            json!(age::of(object, now)),
        ]
    }
}

fn attachment_source_causes(source: &Value, path: &Path) -> Vec<Cause> {
    const ONE: &str = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
    let volume = at(source, &["persistentVolumeName"]);
    match (has(source, &["inlineVolumeSpec"]), volume.as_str()) {
        (false, None) => vec![path.required(ONE)],
        (true, Some(_)) => vec![path.forbidden(ONE)],
        (false, Some("")) => {
            vec![path.child("persistentVolumeName").required("must specify non empty persistentVolumeName")]
        }
        (false, Some(_)) => Vec::new(),
        (true, None) => {
            let path = path.child("inlineVolumeSpec");
            volume::spec_causes(at(source, &["inlineVolumeSpec"]), "", true, &path)
        }
    }
}

/// Keeps what a status update may not touch in the metadata.
pub(super) fn keep_metadata(new: &mut Value, old: &Value) {
    const FIELDS: [&str; 5] = ["labels", "annotations", "finalizers", "ownerReferences", "generateName"];
    let old = at(old, &["metadata"]);
    map(new, &["metadata"]);
    if let Some(metadata) = find(new, &["metadata"]) {
        for field in FIELDS {
            keep(metadata, old, field);
        }
    }
}

/// The rules of CSI storage capacities.
pub(super) struct CsiStorageCapacity;

impl Rules for CsiStorageCapacity {
    fn default(&self, object: &mut Value) {
        for field in ["capacity", "maximumVolumeSize"] {
            if let Some(quantity) = object.get_mut(field) {
                canonicalise(quantity);
            }
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let topology = at(object, &["nodeTopology"]);
        let mut causes = selector::label_selector_causes(topology, &Path::new("nodeTopology"));
        let class = text(object, &["storageClassName"]);
        causes.extend(Path::new("storageClassName").each_invalid(class, names::subdomain(class)));
        let capacity = at(object, &["capacity"]);
        match quantity::from_value(capacity) {
            Ok(quantity) if quantity.is_negative() => {
                let detail = "must be greater than or equal to 0";
                causes.push(Path::new("capacity").invalid(quantity.to_string(), detail));
            }
            Err(error) if !capacity.is_null() => {
                causes.push(Path::new("capacity").invalid(capacity.clone(), error.to_string()));
            }
            _ => {}
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        for field in ["nodeTopology", "storageClassName"] {
            causes.extend(immutable(at(new, &[field]), at(old, &[field]), &Path::new(field)));
        }
        causes
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
