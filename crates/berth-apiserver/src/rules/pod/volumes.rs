//! Checks of a pod's volumes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::super::field::{Path, quote};
use super::super::quantity;
use super::super::read::{at, has, items, text};
use super::super::{claim, csi, names, sources};
use super::defaults::SOURCES;
use crate::resource::Cause;

const MORE: &str = "may not specify more than 1 volume type";
const CONFLICT: &str = "conflicting duplicate paths";

/// The volumes that are fine, by name, and what is wrong with the others.
pub(super) fn causes<'a>(
    spec: &'a Value,
    pod: &str,
    path: &Path,
) -> (BTreeMap<&'a str, &'a Value>, Vec<Cause>) {
    let volumes = items(spec, &["volumes"]);
    let made: BTreeSet<String> = volumes
        .iter()
        .filter(|volume| has(volume, &["ephemeral"]) && !pod.is_empty())
        .map(|volume| format!("{pod}-{}", text(volume, &["name"])))
        .collect();
    let mut fine = BTreeMap::new();
    let mut causes = Vec::new();
    for (index, volume) in volumes.iter().enumerate() {
        let path = path.index(index);
        let name = text(volume, &["name"]);
        let mut complaints = source_causes(volume, name, pod, &path);
        if name.is_empty() {
            complaints.push(path.child("name").required(""));
        } else {
            complaints.extend(path.child("name").each_invalid(name, names::label(name)));
        }
        if fine.contains_key(name) {
            complaints.push(path.child("name").duplicate(name));
        }
        if complaints.is_empty() {
            fine.insert(name, volume);
        }
        causes.extend(complaints);
        let claim = text(volume, &["persistentVolumeClaim", "claimName"]);
        if made.contains(claim) {
            let detail = "must not reference a PVC that gets created for an ephemeral volume";
            causes.push(path.child("persistentVolumeClaim").child("claimName").invalid(claim, detail));
        }
    }
    (fine, causes)
}

/// Refuses tokens for pods that run as nobody.
pub(super) fn token_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    if !text(spec, &["serviceAccountName"]).is_empty() {
        return Vec::new();
    }
    let mut causes = Vec::new();
    for (index, volume) in items(spec, &["volumes"]).iter().enumerate() {
        let path = path.index(index).child("projected").child("sources");
        for (index, source) in items(volume, &["projected", "sources"]).iter().enumerate() {
            if has(source, &["serviceAccountToken"]) {
                let path = path.index(index).child("serviceAccountToken");
                causes.push(path.forbidden("must not be specified when serviceAccountName is not set"));
            }
        }
    }
    causes
}

fn source_causes(volume: &Value, name: &str, pod: &str, path: &Path) -> Vec<Cause> {
    let given: Vec<&str> = SOURCES.into_iter().filter(|source| has(volume, &[source])).collect();
    let mut causes = Vec::new();
    for (index, source) in given.iter().enumerate() {
        if index > 0 {
            // Two paths are spelled in upstream's own way.
            let field = match *source {
                "cephfs" => "cephFS",
                "downwardAPI" => "downwarAPI",
                other => other,
            };
            causes.push(path.child(field).forbidden(MORE));
        } else {
            causes.extend(one_source_causes(source, at(volume, &[source]), path));
            if *source == "ephemeral" && !pod.is_empty() && !name.is_empty() {
                let claim = format!("{pod}-{name}");
                let complaints = names::subdomain(&claim);
                causes.extend(complaints.into_iter().map(|complaint| {
                    path.child("name").invalid(name, format!("PVC name {}: {complaint}", quote(&claim)))
                }));
            }
        }
        if *source == "iscsi" {
            let source = at(volume, &["iscsi"]);
            causes.extend(sources::iscsi_name_cause(source, name, &path.child("name"), name));
        }
    }
    if given.is_empty() {
        causes.push(path.required("must specify a volume type"));
    }
    causes
}

fn one_source_causes(name: &str, source: &Value, path: &Path) -> Vec<Cause> {
    let within = path.child(if name == "gcePersistentDisk" { "persistentDisk" } else { name });
    match name {
        "emptyDir" => {
            let limit = quantity::from_value(at(source, &["sizeLimit"]));
            let negative = limit.is_ok_and(|limit| limit.is_negative());
            let detail = "SizeLimit field must be a valid resource quantity";
            if negative { vec![within.child("sizeLimit").forbidden(detail)] } else { Vec::new() }
        }
        "gitRepo" => {
            let mut causes = Vec::new();
            if text(source, &["repository"]).is_empty() {
                causes.push(within.child("repository").required(""));
            }
            causes.extend(sources::descending(text(source, &["directory"]), &within.child("directory")));
            causes
        }
        "secret" => keyed_causes(source, "secretName", &within),
        "configMap" => keyed_causes(source, "name", &within),
        "downwardAPI" => {
            let mut causes: Vec<Cause> =
                sources::mode_causes(source, "defaultMode", &within).into_iter().collect();
            causes.extend(items(source, &["items"]).iter().flat_map(|file| downward_causes(file, &within)));
            causes
        }
        "projected" => projected_causes(source, &within),
        "csi" => {
            let mut causes = sources::driver_causes(text(source, &["driver"]), &within.child("driver"));
            if has(source, &["nodePublishSecretRef"]) {
                match text(source, &["nodePublishSecretRef", "name"]) {
                    "" => causes.push(within.child("nodePublishSecretRef").child("name").required("")),
                    name => causes.extend(within.child("name").each_invalid(name, names::subdomain(name))),
                }
            }
            causes
        }
        "ephemeral" => {
            let path = within.child("volumeClaimTemplate");
            match at(source, &["volumeClaimTemplate"]) {
                Value::Null => vec![path.required("")],
                template => claim::template_causes(template, &path),
            }
        }
        "image" => {
            let mut causes = Vec::new();
            if text(source, &["reference"]).is_empty() {
                causes.push(within.child("reference").required(""));
            }
            let policy = text(source, &["pullPolicy"]);
            let known = ["Always", "IfNotPresent", "Never"];
            if policy.is_empty() {
                causes.push(within.child("pullPolicy").required(""));
            } else if !known.contains(&policy) {
                causes.push(within.child("pullPolicy").not_supported(policy, &known));
            }
            causes
        }
        _ => sources::causes(name, source, &within, false),
    }
}

fn keyed_causes(source: &Value, name: &str, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    if text(source, &[name]).is_empty() {
        causes.push(path.child(name).required(""));
    }
    causes.extend(sources::mode_causes(source, "defaultMode", path));
    for (index, item) in items(source, &["items"]).iter().enumerate() {
        causes.extend(key_causes(item, &path.child("items").index(index)));
    }
    causes
}

fn key_causes(item: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for field in ["key", "path"] {
        if text(item, &[field]).is_empty() {
            causes.push(path.child(field).required(""));
        }
    }
    causes.extend(sources::unreserved(text(item, &["path"]), &path.child("path")));
    causes.extend(sources::mode_causes(item, "mode", path));
    causes
}

fn downward_causes(file: &Value, path: &Path) -> Vec<Cause> {
    let target = text(file, &["path"]);
    let mut causes = Vec::new();
    if target.is_empty() {
        causes.push(path.child("path").required(""));
    }
    causes.extend(sources::unreserved(target, &path.child("path")));
    match (has(file, &["fieldRef"]), has(file, &["resourceFieldRef"])) {
        (true, both) => {
            let field = text(file, &["fieldRef", "fieldPath"]);
            if field.is_empty() {
                causes.push(path.child("fieldRef").child("fieldPath").required(""));
            }
            if both {
                let detail = "fieldRef and resourceFieldRef can not be specified simultaneously";
                causes.push(path.invalid("resource", detail));
            }
        }
        (false, true) => {
            let path = path.child("resourceFieldRef");
            if text(file, &["resourceFieldRef", "containerName"]).is_empty() {
                causes.push(path.child("containerName").required(""));
            } else if text(file, &["resourceFieldRef", "resource"]).is_empty() {
                causes.push(path.child("resource").required(""));
            }
        }
        (false, false) => causes.push(path.required("one of fieldRef and resourceFieldRef is required")),
    }
    causes.extend(sources::mode_causes(file, "mode", path));
    causes
}

fn projected_causes(source: &Value, path: &Path) -> Vec<Cause> {
    let mut causes: Vec<Cause> = sources::mode_causes(source, "defaultMode", path).into_iter().collect();
    let mut paths = BTreeSet::new();
    for (index, part) in items(source, &["sources"]).iter().enumerate() {
        let within = path.child("sources").index(index);
        let mut count = 0;
        for kind in ["secret", "configMap"] {
            let part = at(part, &[kind]);
            if part.is_null() {
                continue;
            }
            count += 1;
            let within = within.child(kind);
            if text(part, &["name"]).is_empty() {
                causes.push(within.child("name").required(""));
            }
            for (index, item) in items(part, &["items"]).iter().enumerate() {
                causes.extend(key_causes(item, &within.child("items").index(index)));
                let target = text(item, &["path"]);
                if !target.is_empty() && !paths.insert(target) {
                    causes.push(path.invalid(text(part, &["name"]), CONFLICT));
                }
            }
        }
        if has(part, &["downwardAPI"]) {
            count += 1;
            for file in items(part, &["downwardAPI", "items"]) {
                causes.extend(downward_causes(file, &within.child("downwardAPI")));
                let target = text(file, &["path"]);
                if !target.is_empty() && !paths.insert(target) {
                    causes.push(path.invalid(target, CONFLICT));
                }
            }
        }
        let token = at(part, &["serviceAccountToken"]);
        if !token.is_null() {
            count += 1;
            causes.extend(csi::token_expiry_cause(token, &within.child("serviceAccountToken")));
            match text(token, &["path"]) {
                "" => causes.push(path.child("path").required("")),
                target => causes.extend(sources::unreserved(target, &path.child("path"))),
            }
        }
        count += ["clusterTrustBundle", "podCertificate"].iter().filter(|kind| has(part, &[kind])).count();
        if count > 1 {
            causes.push(within.forbidden("may not specify more than 1 volume type per source"));
        }
    }
    causes
}
