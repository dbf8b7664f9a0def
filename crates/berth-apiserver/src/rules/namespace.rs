//! Namespace: its phase, and the finalizers in its spec that hold it until it is empty.

use berth_core::names::NAMESPACE_NAME;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::read::{at, default, find, has, items, keep, map, name, text};
use super::table::{AGE, Column, NAME, string};
use super::{NameRule, Rules, age, names};
use crate::resource::Cause;

/// The finalizer that goes when everything in the namespace is gone.
pub(crate) const KUBERNETES: &str = "kubernetes";
const COLUMNS: &[Column] = &[NAME, string("Status", "The status of the namespace"), AGE];

/// The rules of namespaces.
pub(super) struct Namespace;

impl Rules for Namespace {
    fn default(&self, object: &mut Value) {
        let name = name(object).to_owned();
        if !name.is_empty() {
            map(object, &["metadata", "labels"]).insert(NAMESPACE_NAME.to_owned(), json!(name));
        }
        default(map(object, &["status"]), "phase", "Active");
    }

    fn prepare_create(&self, object: &mut Value) {
        map(object, &[]).insert("status".to_owned(), json!({"phase": "Active"}));
        let spec = map(object, &["spec"]);
        let finalizers = spec.entry("finalizers").or_insert(json!([]));
        if finalizers.is_null() {
            *finalizers = json!([]);
        }
        if let Some(list) = finalizers.as_array_mut().filter(|list| !list.contains(&json!(KUBERNETES))) {
            list.push(json!(KUBERNETES));
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        map(new, &["spec"]);
        if let Some(spec) = find(new, &["spec"]) {
            keep(spec, at(old, &["spec"]), "finalizers");
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec").child("finalizers");
        finalizers(object).flat_map(|finalizer| finalizer_causes(finalizer, &path)).collect()
    }

    fn validate_update(&self, _new: &Value, _old: &Value) -> Vec<Cause> {
        Vec::new()
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> Vec<Cause> {
        let phase = text(new, &["status", "phase"]);
        let deleting = has(new, &["metadata", "deletionTimestamp"]);
        let (wanted, state) = if deleting { ("Terminating", "not empty") } else { ("Active", "empty") };
        if phase == wanted {
            return Vec::new();
        }
        let detail = format!("may only be '{wanted}' if `deletionTimestamp` is {state}");
        vec![Path::new("status").child("Phase").invalid(phase, detail)]
    }

    fn name_rule(&self) -> NameRule {
        NameRule::Label
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&'static str, String)> {
        vec![
            ("metadata.name", name(object).to_owned()),
            ("status.phase", text(object, &["status", "phase"]).to_owned()),
        ]
    }

    fn supports_field(&self, label: &str) -> bool {
        matches!(label, "metadata.name" | "status.phase")
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![json!(name(object)), json!(text(object, &["status", "phase"])), json!(age::of(object, now))]
    }
}

/// Resets what an update of `namespaces/finalize` may not change: the status.
pub(crate) fn prepare_finalize(new: &mut Value, old: &Value) {
    keep(new, old, "status");
}

/// Checks an update of `namespaces/finalize`.
pub(crate) fn validate_finalize(new: &Value) -> Vec<Cause> {
    let path = Path::new("spec").child("finalizers");
    finalizers(new).enumerate().flat_map(|(index, f)| finalizer_causes(f, &path.index(index))).collect()
}

/// Whether a namespace that is being deleted still has to be emptied.
pub(crate) fn is_held(object: &Value) -> bool {
    !items(object, &["spec", "finalizers"]).is_empty()
}

fn finalizers(object: &Value) -> impl Iterator<Item = &str> {
    items(object, &["spec", "finalizers"]).iter().filter_map(Value::as_str)
}

fn finalizer_causes(finalizer: &str, path: &Path) -> Vec<Cause> {
    let mut causes = path.each_invalid(finalizer, names::qualified(finalizer));
    if !finalizer.contains('/') && !matches!(finalizer, "kubernetes" | "orphan" | "foregroundDeletion") {
        let detail = "name is neither a standard finalizer name nor is it fully qualified";
        causes.push(path.invalid(finalizer, detail));
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_namespace_is_active_labelled_and_held() {
        let mut object = json!({"metadata": {"name": "a"}, "status": {"phase": "Terminating"}});
        Namespace.default(&mut object);
        Namespace.prepare_create(&mut object);
        assert_eq!(
            object,
            json!({"metadata": {"name": "a", "labels": {"kubernetes.io/metadata.name": "a"}},
                "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}})
        );
        assert!(is_held(&object));
    }

    #[test]
    fn an_update_keeps_finalizers_and_phase() {
        let old = json!({"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}});
        let mut new = json!({"spec": {"finalizers": []}, "status": {"phase": "Terminating"}});
        Namespace.prepare_update(&mut new, &old);
        assert_eq!(new, old);
    }

    #[test]
    fn finalizers_and_phases_are_checked() {
        let odd = json!({"spec": {"finalizers": ["mine"]}});
        let expected =
            "Invalid value: \"mine\": name is neither a standard finalizer name nor is it fully qualified";
        assert_eq!(Namespace.validate(&odd)[0].to_string(), format!("spec.finalizers: {expected}"));
        assert_eq!(validate_finalize(&odd)[0].to_string(), format!("spec.finalizers[0]: {expected}"));
        let status = json!({"status": {"phase": "Terminating"}});
        assert_eq!(
            Namespace.validate_status_update(&status, &status)[0].to_string(),
            "status.Phase: Invalid value: \"Terminating\": may only be 'Active' if `deletionTimestamp` is empty"
        );
    }

    #[test]
    fn a_namespace_can_be_selected_by_phase() {
        let object = json!({"metadata": {"name": "a"}, "status": {"phase": "Active"}});
        assert!(Namespace.selectable_fields(&object).contains(&("status.phase", "Active".to_owned())));
        assert!(Namespace.supports_field("status.phase"));
        assert!(!Namespace.supports_field("metadata.namespace"));
    }
}
