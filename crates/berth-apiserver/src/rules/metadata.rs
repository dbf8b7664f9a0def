//! Rules for `metadata`, which all kinds share.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::field::Path;
use super::names::{self, NameRule};
use super::read::{at, entries, has, items, number, text};
use super::selector::label_causes;
use crate::resource::Cause;

/// The most that all annotations of an object may hold.
pub(crate) const ANNOTATIONS_LIMIT: usize = 256 * 1024;
const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";

/// Checks the metadata of an object that is created.
pub(crate) fn metadata_causes(object: &Value, namespaced: bool, rule: NameRule) -> Vec<Cause> {
    let path = Path::new("metadata");
    let metadata = at(object, &["metadata"]);
    let mut causes = Vec::new();
    let generate = text(metadata, &["generateName"]);
    if !generate.is_empty() {
        causes.extend(path.child("generateName").each_invalid(generate, rule.complaints(generate, true)));
    }
    match text(metadata, &["name"]) {
        "" => causes.push(path.child("name").required("name or generateName is required")),
        name => causes.extend(path.child("name").each_invalid(name, rule.complaints(name, false))),
    }
    let namespace = text(metadata, &["namespace"]);
    match (namespaced, namespace.is_empty()) {
        (true, true) => causes.push(path.child("namespace").required("")),
        (true, false) => {
            causes.extend(path.child("namespace").each_invalid(namespace, names::label(namespace)));
        }
        (false, false) => causes.push(path.child("namespace").forbidden("not allowed on this type")),
        (false, true) => {}
    }
    if let Some(generation) = number(metadata, &["generation"]).filter(|generation| *generation < 0) {
        causes.push(path.child("generation").invalid(generation, "must be greater than or equal to 0"));
    }
    causes.extend(label_causes(at(metadata, &["labels"]), &path.child("labels")));
    causes.extend(annotation_causes(at(metadata, &["annotations"]), &path.child("annotations")));
    causes.extend(owner_causes(metadata, &path.child("ownerReferences")));
    causes.extend(finalizer_causes(metadata, &path.child("finalizers")));
    causes.extend(standard_finalizer_causes(object));
    causes
}

/// Checks the metadata of an object that replaces another.
pub(crate) fn metadata_update_causes(new: &Value, old: &Value) -> Vec<Cause> {
    let path = Path::new("metadata");
    let standard = standard_finalizer_causes(new);
    let (new, old) = (at(new, &["metadata"]), at(old, &["metadata"]));
    let mut causes = Vec::new();
    if has(old, &["deletionTimestamp"]) {
        let finalizers = |metadata| -> BTreeSet<String> {
            items(metadata, &["finalizers"]).iter().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let added: Vec<String> =
            finalizers(new).difference(&finalizers(old)).map(|f| format!("{f:?}")).collect();
        if !added.is_empty() {
            let added = added.join(", ");
            let detail = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{added}}}"
            );
            causes.push(path.child("finalizers").forbidden(detail));
        }
    }
    if text(new, &["resourceVersion"]).is_empty() {
        causes.push(path.child("resourceVersion").invalid("", "must be specified for an update"));
    }
    let generation = number(new, &["generation"]).unwrap_or_default();
    if generation < number(old, &["generation"]).unwrap_or_default() {
        causes.push(path.child("generation").invalid(generation, "must not be decremented"));
    }
    for field in
        ["name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"]
    {
        causes.extend(immutable(at(new, &[field]), at(old, &[field]), &path.child(field)));
    }
    causes.extend(label_causes(at(new, &["labels"]), &path.child("labels")));
    causes.extend(annotation_causes(at(new, &["annotations"]), &path.child("annotations")));
    causes.extend(owner_causes(new, &path.child("ownerReferences")));
    causes.extend(standard);
    causes
}

/// Refuses a change of a field that never changes.
pub(crate) fn immutable(new: &Value, old: &Value, path: &Path) -> Option<Cause> {
    let changed = !super::read::same(new, old);
    changed.then(|| path.invalid(super::read::pruned(new), "field is immutable"))
}

/// Checks annotations, also those of templates.
pub(crate) fn annotation_causes(annotations: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut size = 0;
    for (key, value) in entries(annotations, &[]) {
        causes.extend(path.each_invalid(key, names::qualified(&key.to_lowercase())));
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    if size > ANNOTATIONS_LIMIT {
        causes.push(path.too_long(ANNOTATIONS_LIMIT));
    }
    causes
}

fn owner_causes(metadata: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut controller = String::new();
    for owner in items(metadata, &["ownerReferences"]) {
        let api_version = text(owner, &["apiVersion"]);
        let kind = text(owner, &["kind"]);
        if api_version.rsplit('/').next().is_none_or(str::is_empty) {
            causes.push(path.child("apiVersion").invalid(api_version, "version must not be empty"));
        }
        for field in ["kind", "name", "uid"] {
            if text(owner, &[field]).is_empty() {
                causes.push(path.child(field).invalid("", "must not be empty"));
            }
        }
        if api_version == "v1" && kind == "Event" {
            let detail = "/v1, Kind=Event is disallowed from being an owner";
            causes.push(path.invalid(owner.clone(), detail));
        }
        if at(owner, &["controller"]) == &json!(true) {
            let current = format!("{kind}/{}", text(owner, &["name"]));
            if controller.is_empty() {
                controller = current;
            } else {
                let detail = format!(
                    "Only one reference can have Controller set to true. Found \"true\" in references for {controller} and {current}"
                );
                causes.push(path.invalid(at(metadata, &["ownerReferences"]).clone(), detail));
            }
        }
    }
    causes
}

/// Finalizers of most built-in kinds have a domain, but for a few old ones.
fn standard_finalizer_causes(object: &Value) -> Vec<Cause> {
    let group = text(object, &["apiVersion"]).rsplit_once('/').map_or("", |(group, _)| group);
    if !matches!(group, "" | "apps" | "batch" | "storage.k8s.io") || text(object, &["kind"]) == "Event" {
        return Vec::new();
    }
    let path = Path::new("metadata").child("finalizers");
    let finalizers =
        items(object, &["metadata", "finalizers"]).iter().map(|f| f.as_str().unwrap_or_default());
    finalizers
        .enumerate()
        .filter(|(_, f)| !f.contains('/') && !matches!(*f, "kubernetes" | ORPHAN | FOREGROUND))
        .map(|(index, finalizer)| {
            let detail = "name is neither a standard finalizer name nor is it fully qualified";
            path.index(index).invalid(finalizer, detail)
        })
        .collect()
}

fn finalizer_causes(metadata: &Value, path: &Path) -> Vec<Cause> {
    let finalizers: Vec<&str> = items(metadata, &["finalizers"]).iter().filter_map(Value::as_str).collect();
    let mut causes: Vec<Cause> =
        finalizers.iter().flat_map(|f| path.each_invalid(f, names::qualified(f))).collect();
    if finalizers.contains(&ORPHAN) && finalizers.contains(&FOREGROUND) {
        let detail = format!("finalizer {ORPHAN} and {FOREGROUND} cannot be both set");
        causes.push(path.invalid(at(metadata, &["finalizers"]).clone(), detail));
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn created(metadata: Value) -> Vec<String> {
        let object = Value::Object([("metadata".to_owned(), metadata)].into_iter().collect());
        metadata_causes(&object, true, NameRule::Subdomain).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn plain_metadata_is_fine() {
        let metadata = json!({"name": "a", "namespace": "b", "labels": {"app": "web"}, "annotations": {"UPPER.io/x": "y"},
            "finalizers": ["example.com/x"], "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]});
        assert_eq!(created(metadata), Vec::<String>::new());
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(
            created(json!({})),
            [
                "metadata.name: Required value: name or generateName is required",
                "metadata.namespace: Required value"
            ]
        );
        assert!(
            created(json!({"name": "A", "namespace": "b"}))[0]
                .starts_with("metadata.name: Invalid value: \"A\": a lowercase RFC 1123 subdomain")
        );
        assert!(created(json!({"name": "a", "namespace": "b.c"}))[0].ends_with("must not contain dots"));
        assert!(
            created(json!({"name": "a", "namespace": "b", "labels": {"a": "b c"}}))[0]
                .starts_with("metadata.labels: Invalid value: \"b c\": a valid label must be")
        );
        assert_eq!(
            created(
                json!({"name": "a", "namespace": "b", "annotations": {"a": "x".repeat(ANNOTATIONS_LIMIT)}})
            ),
            ["metadata.annotations: Too long: may not be more than 262144 bytes"]
        );
        assert_eq!(
            created(
                json!({"name": "a", "namespace": "b", "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p"}]})
            ),
            ["metadata.ownerReferences.uid: Invalid value: \"\": must not be empty"]
        );
        assert_eq!(
            created(json!({"name": "a", "namespace": "b", "finalizers": ["orphan", "foregroundDeletion"]})),
            [
                "metadata.finalizers: Invalid value: [\"orphan\",\"foregroundDeletion\"]: finalizer orphan and foregroundDeletion cannot be both set"
            ]
        );
        let owner =
            |name| json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": "u", "controller": true});
        assert!(
            created(json!({"name": "a", "namespace": "b", "ownerReferences": [owner("p"), owner("q")]}))[0]
                .contains("references for Pod/p and Pod/q")
        );
    }

    #[test]
    fn cluster_scoped_objects_have_no_namespace() {
        let object = json!({"metadata": {"name": "a", "namespace": "b"}});
        let causes = metadata_causes(&object, false, NameRule::Subdomain);
        assert_eq!(causes[0].to_string(), "metadata.namespace: Forbidden: not allowed on this type");
    }

    #[test]
    fn updates_keep_identity_and_add_no_finalizers_while_deleting() {
        let old = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1", "deletionTimestamp": "t", "finalizers": ["x/y"]}});
        assert!(metadata_update_causes(&old, &old).is_empty());
        let mut new = old.clone();
        new["metadata"]["uid"] = json!("v");
        new["metadata"]["finalizers"] = json!(["x/y", "x/z"]);
        new["metadata"]["resourceVersion"] = json!("");
        let causes: Vec<String> =
            metadata_update_causes(&new, &old).iter().map(ToString::to_string).collect();
        assert_eq!(
            causes,
            [
                "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers []string{\"x/z\"}",
                "metadata.resourceVersion: Invalid value: \"\": must be specified for an update",
                "metadata.uid: Invalid value: \"v\": field is immutable",
            ]
        );
    }
}
