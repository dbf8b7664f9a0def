//! The rules of PersistentVolumes: defaults, validation, and the columns of tables.

use berth_core::names::{BETA_MOUNT_OPTIONS, BETA_STORAGE_CLASS, RENAMED_NODE_LABELS};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::quantity::{self, Quantity, canonicalise_list};
use super::read::{
    annotation, at, default, default_pointer, entries, find, has, is_empty, items, keep, map, name, same,
    text,
};
use super::table::{AGE, Column, NAME, string, wide};
use super::{Rules, age, names, sources, table};
use crate::resource::Cause;

/// All access modes, sorted.
pub(super) const ACCESS_MODES: [&str; 4] =
    ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
/// All volume modes, sorted.
pub(super) const VOLUME_MODES: [&str; 2] = ["Block", "Filesystem"];
const RECLAIM: [&str; 3] = ["Delete", "Recycle", "Retain"];
const INLINE: &str = "in the context of inline volumes";
const COLUMNS: &[Column] = &[
    NAME,
    string("Capacity", "How much the volume holds."),
    string("Access Modes", "How the volume can be mounted."),
    string("Reclaim Policy", "What happens to the volume when its claim goes."),
    string("Status", "Whether the volume is available, bound, released or failed."),
    string("Claim", "The claim it is bound to."),
    string("StorageClass", "StorageClass of the pv"),
    string("VolumeAttributesClass", "VolumeAttributesClass of the pv"),
    string("Reason", "Why it failed."),
    AGE,
    wide("VolumeMode", "Whether it has a filesystem or is a raw block device."),
];

const RECYCLE: &str = "spec.persistentVolumeReclaimPolicy: The Recycle reclaim policy is deprecated. Instead, the recommended approach is to use dynamic provisioning.";
/// Sources that no longer work, with the versions since when.
const DEPRECATED: &[(&str, &str, &str)] = &[
    ("cephfs", "v1.28", "v1.31"),
    ("photonPersistentDisk", "v1.11", "v1.16"),
    ("scaleIO", "v1.16", "v1.22"),
    ("storageOS", "v1.22", "v1.25"),
    ("glusterfs", "v1.25", "v1.26"),
    ("rbd", "v1.28", "v1.31"),
];

/// Warnings about annotations that fields have replaced.
pub(super) fn deprecated_annotations(object: &Value, keys: &[&str]) -> Vec<String> {
    let used = keys.iter().filter(|key| has(object, &["metadata", "annotations", key]));
    used.map(|key| {
        let (since, instead) =
            if *key == BETA_STORAGE_CLASS { ("v1.8", "storageClassName") } else { ("v1.31", "mountOptions") };
        format!("metadata.annotations[{key}]: deprecated since {since}; use \"{instead}\" attribute instead")
    })
    .collect()
}

/// The rules of persistent volumes.
pub(super) struct PersistentVolume;

impl Rules for PersistentVolume {
    fn warns(&self) -> bool {
        true
    }

    fn warnings(&self, object: &Value, _created: bool) -> Vec<String> {
        let mut warnings = deprecated_annotations(object, &[BETA_STORAGE_CLASS, BETA_MOUNT_OPTIONS]);
        if text(object, &["spec", "persistentVolumeReclaimPolicy"]) == "Recycle" {
            warnings.push(RECYCLE.to_owned());
        }
        let used = DEPRECATED.iter().filter(|(source, _, _)| has(object, &["spec", source]));
        warnings.extend(used.map(|(source, since, until)| {
            format!("spec.{source}: deprecated in {since}, non-functional in {until}+")
        }));
        warnings
    }

    fn default(&self, object: &mut Value) {
        let spec = map(object, &["spec"]);
        default(spec, "persistentVolumeReclaimPolicy", "Retain");
        default_pointer(spec, "volumeMode", "Filesystem");
        canonicalise_list(spec, "capacity");
        if let Some(spec) = object.get_mut("spec") {
            sources::fill(spec);
        }
        default(map(object, &["status"]), "phase", "Pending");
    }

    fn prepare_create(&self, object: &mut Value) {
        let status = json!({"phase": "Pending", "lastPhaseTransitionTime": age::now()});
        map(object, &[]).insert("status".to_owned(), status);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        let (new_status, old_status) = (at(new, &["status"]), at(old, &["status"]));
        let time = |status| text(status, &["lastPhaseTransitionTime"]).to_owned();
        let (new_time, old_time) = (time(new_status), time(old_status));
        let moved = text(new_status, &["phase"]) != text(old_status, &["phase"]);
        let stamp = match moved {
            true if new_time.is_empty() || new_time == old_time => age::now(),
            false if new_time.is_empty() => old_time,
            _ => return,
        };
        if !stamp.is_empty() {
            map(new, &["status"]).insert("lastPhaseTransitionTime".to_owned(), json!(stamp));
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        spec_causes(at(object, &["spec"]), name(object), false, &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        let (new, old) = (at(new, &["spec"]), at(old, &["spec"]));
        let source = |spec: &Value| -> Value {
            let of = |source: &&str| spec.get(*source).map(|value| ((*source).to_owned(), value.clone()));
            Value::Object(sources::PERSISTENT.iter().filter_map(of).collect())
        };
        let (mut new_source, old_source) = (source(new), source(old));
        // A secret for expansion may be added once.
        if has(old, &["csi"])
            && !has(old, &["csi", "controllerExpandSecretRef"])
            && let Some(csi) = find(&mut new_source, &["csi"]).and_then(Value::as_object_mut)
        {
            csi.remove("controllerExpandSecretRef");
        }
        let path = Path::new("spec");
        if !same(&new_source, &old_source) {
            let difference = super::field::difference(&old_source, &new_source);
            let detail = format!("spec.persistentvolumesource is immutable after creation\n{difference}");
            causes.push(path.child("persistentvolumesource").forbidden(detail));
        }
        let mode = |spec| at(spec, &["volumeMode"]);
        causes.extend(super::metadata::immutable(mode(new), mode(old), &Path::new("volumeMode")));
        if has(old, &["nodeAffinity"])
            && !same_affinity(at(new, &["nodeAffinity"]), at(old, &["nodeAffinity"]))
        {
            let detail = "field is immutable, except for updating from beta label to GA";
            causes.push(Path::new("nodeAffinity").invalid(at(new, &["nodeAffinity"]).clone(), detail));
        }
        let class = &["volumeAttributesClassName"];
        if has(old, class) && !has(new, class) {
            let detail = "update from non-nil value to nil is forbidden";
            causes.push(path.child("volumeAttributesClassName").forbidden(detail));
        }
        causes
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = at(object, &["spec"]);
        let claim = at(spec, &["claimRef"]);
        let claim = if claim.is_null() {
            String::new()
        } else {
            format!("{}/{}", text(claim, &["namespace"]), text(claim, &["name"]))
        };
        let capacity = quantity::from_value(at(spec, &["capacity", "storage"])).unwrap_or(Quantity::ZERO);
        vec![
            json!(name(object)),
            json!(capacity.to_string()),
            json!(table::access_modes(items(spec, &["accessModes"]))),
            json!(text(spec, &["persistentVolumeReclaimPolicy"])),
            json!(phase(object)),
            json!(claim),
            json!(class(object)),
            json!(at(spec, &["volumeAttributesClassName"]).as_str().unwrap_or("<unset>")),
            json!(text(object, &["status", "reason"])),
            json!(age::of(object, now)),
            json!(table::or(text(spec, &["volumeMode"]), "<unset>")),
        ]
    }
}

/// The phase of a volume or claim, or that it is on its way out.
pub(super) fn phase(object: &Value) -> &str {
    if has(object, &["metadata", "deletionTimestamp"]) {
        "Terminating"
    } else {
        text(object, &["status", "phase"])
    }
}

/// The class of a volume or claim, also where only the old annotation names it.
pub(super) fn class(object: &Value) -> &str {
    match object.pointer("/metadata/annotations").and_then(|a| a.get(BETA_STORAGE_CLASS)) {
        Some(_) => annotation(object, BETA_STORAGE_CLASS),
        None => text(object, &["spec", "storageClassName"]),
    }
}

/// Checks the spec of a persistent volume; also of one that stands inside an attachment.
pub(super) fn spec_causes(spec: &Value, volume: &str, inline: bool, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    if inline {
        for field in ["claimRef", "capacity"] {
            if !is_empty(at(spec, &[field])) {
                causes.push(path.child(field).forbidden(format!("may not be specified {INLINE}")));
            }
        }
        if !has(spec, &["csi"]) {
            causes.push(path.child("csi").required(format!("has to be specified {INLINE}")));
        }
    }
    if items(spec, &["accessModes"]).is_empty() {
        causes.push(path.child("accessModes").required(""));
    }
    causes.extend(access_mode_causes(spec, path));
    if !inline {
        causes.extend(capacity_causes(spec, &path.child("capacity")));
    }
    causes.extend(reclaim_causes(spec, inline, path));
    if has(spec, &["nodeAffinity"]) {
        causes.extend(affinity_causes(spec, inline, &path.child("nodeAffinity")));
    }
    causes.extend(source_causes(spec, volume, path));
    causes.extend(class_causes(spec, inline, path));
    causes
}

/// Checks that access modes are known ones and that ReadWriteOncePod stands alone.
pub(super) fn access_mode_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let path = path.child("accessModes");
    let modes: Vec<&str> =
        items(spec, &["accessModes"]).iter().map(|m| m.as_str().unwrap_or_default()).collect();
    let known = |mode: &&&str| ACCESS_MODES.contains(*mode);
    let mut causes: Vec<Cause> = modes
        .iter()
        .filter(|mode| !known(mode))
        .map(|mode| path.not_supported(*mode, &ACCESS_MODES))
        .collect();
    let single = "ReadWriteOncePod";
    if modes.contains(&single) && modes.iter().filter(known).any(|mode| *mode != single) {
        causes.push(path.forbidden("may not use ReadWriteOncePod with other access modes"));
    }
    causes
}

fn capacity_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let capacity = at(spec, &["capacity"]);
    if is_empty(capacity) {
        causes.push(path.required(""));
    }
    if !has(capacity, &["storage"]) || entries(capacity, &[]).count() > 1 {
        causes.push(path.not_supported(capacity.clone(), &["storage"]));
    }
    for (resource, quantity) in entries(capacity, &[]) {
        let path = path.key(resource);
        match quantity::from_value(quantity) {
            Ok(quantity) => {
                if quantity.value() < 0 {
                    causes.push(path.invalid(quantity.value(), "must be a valid resource quantity"));
                }
                if !quantity.is_positive() {
                    causes.push(path.invalid(quantity.to_string(), "must be greater than zero"));
                }
            }
            Err(error) => causes.push(path.invalid(quantity.clone(), error.to_string())),
        }
    }
    causes
}

fn reclaim_causes(spec: &Value, inline: bool, path: &Path) -> Option<Cause> {
    let path = path.child("persistentVolumeReclaimPolicy");
    let policy = text(spec, &["persistentVolumeReclaimPolicy"]);
    if policy.is_empty() {
        return None;
    }
    if inline {
        return (policy != "Retain").then(|| path.forbidden(format!("may only be Retain {INLINE}")));
    }
    (!RECLAIM.contains(&policy)).then(|| path.not_supported(policy, &RECLAIM))
}

fn affinity_causes(spec: &Value, inline: bool, path: &Path) -> Vec<Cause> {
    if inline {
        return vec![path.forbidden(format!("may not be specified {INLINE}"))];
    }
    let required = at(spec, &["nodeAffinity", "required"]);
    if required.is_null() {
        return vec![path.child("required").required("must specify required node constraints")];
    }
    super::nodes::selector_causes(required, &path.child("required"))
}

fn source_causes(spec: &Value, volume: &str, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let given: Vec<&str> = sources::PERSISTENT.into_iter().filter(|source| has(spec, &[source])).collect();
    for (index, source) in given.iter().enumerate() {
        // Upstream forgets to refuse a flex volume beside another source, and spells two paths in its own way.
        if index > 0 && *source != "flexVolume" {
            let field = if *source == "cephfs" { "cephFS" } else { source };
            causes.push(path.child(field).forbidden("may not specify more than 1 volume type"));
            continue;
        }
        let value = at(spec, &[source]);
        let field = if *source == "gcePersistentDisk" { "persistentDisk" } else { source };
        let within = path.child(field);
        match *source {
            "csi" => causes.extend(sources::csi_causes(value, &within)),
            _ => causes.extend(sources::causes(source, value, &within, true)),
        }
        if *source == "iscsi" {
            let portal = text(value, &["targetPortal"]);
            causes.extend(sources::iscsi_name_cause(value, volume, &within.child("targetportal"), portal));
        }
        if *source == "local" && !has(spec, &["nodeAffinity"]) {
            causes.push(path.child("nodeAffinity").required("Local volume requires node affinity"));
        }
    }
    if given.is_empty() {
        causes.push(path.required("must specify a volume type"));
    }
    let root = text(spec, &["hostPath", "path"]);
    let is_root = !root.is_empty() && root.split('/').all(|part| part.is_empty() || part == ".");
    if is_root && text(spec, &["persistentVolumeReclaimPolicy"]) == "Recycle" {
        let detail = "may not be 'recycle' for a hostPath mount of '/'";
        causes.push(path.child("persistentVolumeReclaimPolicy").forbidden(detail));
    }
    causes
}

fn class_causes(spec: &Value, inline: bool, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let class = text(spec, &["storageClassName"]);
    if !class.is_empty() {
        let path = path.child("storageClassName");
        if inline {
            causes.push(path.forbidden(format!("may not be specified {INLINE}")));
        } else {
            causes.extend(path.each_invalid(class, names::subdomain(class)));
        }
    }
    let mode = text(spec, &["volumeMode"]);
    if has(spec, &["volumeMode"]) {
        let path = path.child("volumeMode");
        if inline && mode != "Filesystem" {
            causes.push(path.forbidden(format!("may not specify volumeMode other than Filesystem {INLINE}")));
        } else if !inline && !VOLUME_MODES.contains(&mode) {
            causes.push(path.not_supported(mode, &VOLUME_MODES));
        }
    }
    // Attachments' inline volumes are not asked about attribute classes.
    if has(spec, &["volumeAttributesClassName"]) && !inline {
        let class = text(spec, &["volumeAttributesClassName"]);
        let field = path.child("volumeAttributesClassName");
        if class.is_empty() {
            causes.push(field.required("an empty string is disallowed"));
        } else {
            causes.extend(field.each_invalid(class, names::subdomain(class)));
        }
        if !has(spec, &["csi"]) {
            let detail = "has to be specified when using volumeAttributesClassName";
            causes.push(path.child("csi").required(detail));
        }
    }
    causes
}

/// Whether two node affinities are the same, but for well-known labels that got their final names.
fn same_affinity(new: &Value, old: &Value) -> bool {
    fn rename(value: &mut Value, new: &Value) {
        match value {
            Value::Array(items) => {
                items.iter_mut().enumerate().for_each(|(index, item)| rename(item, &new[index]));
            }
            Value::Object(map) => {
                for (key, value) in map {
                    let wanted = new.get(key).unwrap_or(&Value::Null);
                    let renamed = RENAMED_NODE_LABELS.iter().find(|(old, _)| key == "key" && value == old);
                    match renamed.filter(|(_, name)| wanted == name) {
                        Some(_) => *value = wanted.clone(),
                        None => rename(value, wanted),
                    }
                }
            }
            _ => {}
        }
    }
    let mut old = old.clone();
    rename(&mut old, new);
    same(new, &old)
}

#[cfg(test)]
mod tests;
