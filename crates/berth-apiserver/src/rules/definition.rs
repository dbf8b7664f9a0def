//! CustomResourceDefinition: names, versions, schemas, and the conditions clients wait for.

use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{at, default, flag, has, items, keep, map, name, same, text};
use super::{NameRule, Rules, age, names};
use crate::resource::{Cause, CauseReason};
use crate::schema;

/// The keyword of rules that are written as expressions.
const EXPRESSIONS: &str = "x-kubernetes-validations";

/// The rules of definitions of custom resources.
pub(super) struct CustomResourceDefinition;

impl Rules for CustomResourceDefinition {
    fn status_keeps_metadata(&self) -> bool {
        true
    }

    fn default(&self, object: &mut Value) {
        let kind = text(object, &["spec", "names", "kind"]).to_owned();
        let named = map(object, &["spec", "names"]);
        if !kind.is_empty() {
            default(named, "singular", kind.to_lowercase());
            default(named, "listKind", format!("{kind}List"));
        }
        default(map(object, &["spec", "conversion"]), "strategy", "None");
    }

    fn prepare_create(&self, object: &mut Value) {
        let now = age::now();
        let condition = |kind: &str, reason: &str, message: &str| json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now});
        let status = json!({
            "acceptedNames": at(object, &["spec", "names"]),
            "conditions": [
                condition("NamesAccepted", "NoConflicts", "no conflicts found"),
                condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
            ],
            "storedVersions": [storage_version(object)],
        });
        map(object, &[]).insert("status".to_owned(), status);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        let accepted = at(new, &["spec", "names"]).clone();
        let stored = json!(storage_version(new));
        let status = map(new, &["status"]);
        status.insert("acceptedNames".to_owned(), accepted);
        if let Some(list) = status.entry("storedVersions").or_insert(json!([])).as_array_mut()
            && !list.contains(&stored)
        {
            list.push(stored);
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let spec = at(object, &["spec"]);
        let path = Path::new("spec");
        let mut causes = Vec::new();
        let group = text(spec, &["group"]);
        let plural = text(spec, &["names", "plural"]);
        let own = name(object);
        if own != format!("{plural}.{group}") {
            let detail = "must be spec.names.plural+\".\"+spec.group";
            causes.push(Path::new("metadata").child("name").invalid(own, detail));
        }
        if group.is_empty() {
            causes.push(path.child("group").required(""));
        } else {
            causes.extend(path.child("group").each_invalid(group, names::subdomain(group)));
            if !group.contains('.') {
                let detail = "should be a domain with at least one dot";
                causes.push(path.child("group").invalid(group, detail));
            }
        }
        let scope = text(spec, &["scope"]);
        match scope {
            "Cluster" | "Namespaced" => {}
            "" => causes.push(path.child("scope").required("")),
            other => causes.push(path.child("scope").not_supported(other, &["Cluster", "Namespaced"])),
        }
        causes.extend(version_causes(spec, &path.child("versions")));
        causes.extend(name_causes(at(spec, &["names"]), &path.child("names")));
        if storage_version(object).is_empty() {
            let path = Path::new("status").child("storedVersions");
            causes.push(path.invalid(Value::Null, "must have at least one stored version"));
        }
        causes.extend(schema_causes(spec));
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        for field in [&["group"][..], &["scope"], &["names", "plural"], &["names", "kind"]] {
            let of = |object| field.iter().fold(at(object, &["spec"]), |value, name| at(value, &[name]));
            let path = field.iter().fold(Path::new("spec"), |path, name| path.child(name));
            causes.extend(immutable(of(new), of(old), &path));
        }
        let served: Vec<&str> =
            items(new, &["spec", "versions"]).iter().map(|v| text(v, &["name"])).collect();
        for (index, stored) in
            items(new, &["status", "storedVersions"]).iter().filter_map(Value::as_str).enumerate()
        {
            if !served.contains(&stored) {
                let path = Path::new("status").child("storedVersions").index(index);
                let detail = format!(
                    "missing from spec.versions; {stored} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {stored} and removes {stored} from status.storedVersions"
                );
                causes.push(path.invalid(stored, detail));
            }
        }
        causes
    }

    fn name_rule(&self) -> NameRule {
        NameRule::Definition
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn warns(&self) -> bool {
        true
    }

    fn warnings(&self, object: &Value, _created: bool) -> Vec<String> {
        let versions = items(object, &["spec", "versions"]).iter().enumerate();
        let ruled =
            versions.filter(|(_, version)| has_expressions(at(version, &["schema", "openAPIV3Schema"])));
        ruled
            .map(|(index, _)| {
                let path = Path::new("spec").child("versions").index(index);
                let path = path.child("schema").child("openAPIV3Schema");
                format!("{path}: {EXPRESSIONS} are kept, but this server does not evaluate them")
            })
            .collect()
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        !same(at(new, &["spec"]), at(old, &["spec"]))
    }
}

/// Whether a schema, or one inside it, has rules written as expressions.
fn has_expressions(schema: &Value) -> bool {
    let below = |(keyword, value): (&String, &Value)| match (keyword.as_str(), value) {
        (EXPRESSIONS, Value::Array(rules)) => !rules.is_empty(),
        ("properties", Value::Object(properties)) => properties.values().any(has_expressions),
        ("items" | "additionalProperties" | "not", schema) => has_expressions(schema),
        ("allOf" | "anyOf" | "oneOf", Value::Array(schemas)) => schemas.iter().any(has_expressions),
        _ => false,
    };
    schema.as_object().is_some_and(|schema| schema.iter().any(below))
}

fn storage_version(object: &Value) -> &str {
    let stored = items(object, &["spec", "versions"]).iter().find(|version| flag(version, &["storage"]));
    stored.map_or("", |version| text(version, &["name"]))
}

fn version_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let versions = items(spec, &["versions"]);
    let mut causes = Vec::new();
    let mut seen = Vec::new();
    for (index, version) in versions.iter().enumerate() {
        let path = path.index(index);
        let name = text(version, &["name"]);
        if seen.contains(&name) {
            causes.push(path.child("name").duplicate(name));
        }
        seen.push(name);
        let complaints = names::label(name);
        if !complaints.is_empty() {
            causes.push(path.child("name").invalid(name, complaints.join(",")));
        }
        let schema = ["schema", "openAPIV3Schema"];
        let schema_path = path.child("schema").child("openAPIV3Schema");
        if !has(version, &schema) {
            causes.push(schema_path.required(""));
        } else if text(at(version, &schema), &["type"]) != "object" {
            let given = text(at(version, &schema), &["type"]);
            let path = schema_path.child("type");
            causes.push(if given.is_empty() {
                path.required("must not be empty at the root")
            } else {
                path.invalid(given, "must be object at the root")
            });
        }
    }
    let stored = versions.iter().filter(|version| flag(version, &["storage"])).count();
    if stored != 1 {
        let shown = at(spec, &["versions"]).clone();
        causes.push(path.invalid(shown, "must have exactly one version marked as storage version"));
    }
    causes
}

/// What is wrong with the schemas themselves.
fn schema_causes(spec: &Value) -> Vec<Cause> {
    let versions = items(spec, &["versions"]);
    let schema = |version| at(version, &["schema", "openAPIV3Schema"]);
    // Kubernetes keeps a schema that all versions share in one place, and names that place.
    let shared = versions.iter().all(|version| schema(version) == schema(&versions[0]));
    let checked = if shared { versions.get(..1).unwrap_or_default() } else { versions };
    let mut causes = Vec::new();
    for (index, version) in checked.iter().enumerate().filter(|(_, version)| is_object(schema(version))) {
        let path = if shared {
            Path::new("spec").child("validation")
        } else {
            Path::new("spec").child("versions").index(index).child("schema")
        };
        let errors = schema::from_openapi(schema(version)).err().unwrap_or_default();
        causes.extend(errors.iter().map(|error| schema_cause(&path.child("openAPIV3Schema"), error)));
    }
    causes
}

fn is_object(schema: &Value) -> bool {
    text(schema, &["type"]) == "object"
}

/// A complaint about a schema, `.properties[a].type: Required value: …`, as a cause.
fn schema_cause(path: &Path, error: &str) -> Cause {
    let (place, message) = error.split_once(": ").unwrap_or(("", error));
    let reason = if message.starts_with("Required") { CauseReason::Required } else { CauseReason::Invalid };
    Cause { reason, message: message.to_owned(), field: format!("{path}{place}") }
}

fn name_causes(given: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for field in ["plural", "singular"] {
        let value = text(given, &[field]);
        if field == "plural" && value.is_empty() {
            causes.push(path.child(field).required(""));
        } else if !value.is_empty() {
            causes.extend(path.child(field).each_invalid(value, names::label(value)));
        }
    }
    let kind = text(given, &["kind"]);
    if kind.is_empty() {
        causes.push(path.child("kind").required(""));
    } else {
        causes.extend(path.child("kind").each_invalid(kind, names::label(&kind.to_lowercase())));
    }
    let list = text(given, &["listKind"]);
    if !kind.is_empty() && kind == list {
        causes.push(path.child("listKind").invalid(list, "kind and listKind may not be the same"));
    }
    for field in ["shortNames", "categories"] {
        for (index, value) in items(given, &[field]).iter().filter_map(Value::as_str).enumerate() {
            causes.extend(path.child(field).index(index).each_invalid(value, names::label(value)));
        }
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition() -> Value {
        let mut object = json!({"metadata": {"name": "things.example.com"}, "spec": {"group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
        CustomResourceDefinition.default(&mut object);
        object
    }

    fn texts(causes: Vec<Cause>) -> Vec<String> {
        causes.into_iter().map(|cause| cause.to_string()).collect()
    }

    #[test]
    fn a_new_definition_is_named_and_established() {
        let mut object = definition();
        assert_eq!(object["spec"]["names"]["singular"], "thing");
        assert_eq!(object["spec"]["names"]["listKind"], "ThingList");
        assert_eq!(object["spec"]["conversion"]["strategy"], "None");
        CustomResourceDefinition.prepare_create(&mut object);
        let status = &object["status"];
        assert_eq!(status["storedVersions"], json!(["v1"]));
        assert_eq!(status["acceptedNames"], object["spec"]["names"]);
        let established: Vec<&str> =
            items(status, &["conditions"]).iter().map(|c| text(c, &["type"])).collect();
        assert_eq!(established, ["NamesAccepted", "Established"]);
    }

    #[test]
    fn invalid_definitions_are_refused_with_the_cause() {
        assert_eq!(texts(CustomResourceDefinition.validate(&definition())), Vec::<String>::new());
        for (pointer, value, expected) in [
            (
                "/metadata/name",
                json!("x"),
                "metadata.name: Invalid value: \"x\": must be spec.names.plural+\".\"+spec.group",
            ),
            (
                "/spec/scope",
                json!("World"),
                "spec.scope: Unsupported value: \"World\": supported values: \"Cluster\", \"Namespaced\"",
            ),
            ("/spec/versions/0/schema", json!({}), "spec.versions[0].schema.openAPIV3Schema: Required value"),
            (
                "/spec/names/listKind",
                json!("Thing"),
                "spec.names.listKind: Invalid value: \"Thing\": kind and listKind may not be the same",
            ),
        ] {
            let mut object = definition();
            *object.pointer_mut(pointer).unwrap() = value;
            assert_eq!(texts(CustomResourceDefinition.validate(&object)), [expected]);
        }
        let mut object = definition();
        object["spec"]["versions"][0]["storage"] = json!(false);
        assert!(
            texts(CustomResourceDefinition.validate(&object))[0]
                .ends_with("must have exactly one version marked as storage version")
        );
    }

    #[test]
    fn a_definition_keeps_what_it_defines() {
        let mut old = definition();
        CustomResourceDefinition.prepare_create(&mut old);
        let mut new = old.clone();
        new["spec"]["scope"] = json!("Cluster");
        assert_eq!(
            texts(CustomResourceDefinition.validate_update(&new, &old)),
            ["spec.scope: Invalid value: \"Cluster\": field is immutable"]
        );
        let mut new = old.clone();
        new["spec"]["versions"] = json!([{"name": "v2", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]);
        CustomResourceDefinition.prepare_update(&mut new, &old);
        assert_eq!(new["status"]["storedVersions"], json!(["v1", "v2"]));
        assert!(
            texts(CustomResourceDefinition.validate_update(&new, &old))[0]
                .starts_with("status.storedVersions[0]: Invalid value: \"v1\": missing from spec.versions")
        );
    }
}
