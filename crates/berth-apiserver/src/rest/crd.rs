//! Custom resource definitions: what they serve, and the conditions that say so.

use std::sync::Arc;

use serde_json::{Value, json};

use super::registry::{Definition, ScalePaths, Served, Stored};
use crate::resource::{Resource, Subresource};
use crate::rules::custom::CustomRules;
use crate::rules::read;
use crate::schema::{self, Type};
use crate::store::Collection;

/// The group of the definitions.
pub(crate) const GROUP: &str = "apiextensions.k8s.io";
/// The plural name of the definitions.
pub(crate) const PLURAL: &str = "customresourcedefinitions";
/// The verbs of custom resources, in the order of discovery.
const VERBS: &[&str] = &["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"];
/// Keeps a definition until its objects are gone.
pub(crate) const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

/// The resources of a definition, one per served version.
pub(crate) fn served(definition: &Value) -> Vec<Served> {
    with_flag(definition, "served")
}

/// The resource of a definition in the version that is stored, whether or not that is served.
pub(crate) fn stored(definition: &Value) -> Option<Served> {
    with_flag(definition, "storage").into_iter().next()
}

/// The resources of the versions that have a flag.
fn with_flag(definition: &Value, flag: &str) -> Vec<Served> {
    let versions = read::items(definition, &["spec", "versions"]);
    let storage = versions.iter().find(|version| read::flag(version, &["storage"]));
    let group = read::text(definition, &["spec", "group"]);
    let Some(storage) = storage else { return Vec::new() };
    let storage = format!("{group}/{}", read::text(storage, &["name"]));
    versions
        .iter()
        .filter(|version| read::flag(version, &[flag]))
        .map(|version| one(definition, version, &storage))
        .collect()
}

fn one(definition: &Value, version: &Value, storage: &str) -> Served {
    let names = |field: &str| read::text(definition, &["spec", "names", field]);
    let words = |field: &str| -> Vec<Arc<str>> {
        let words = read::items(definition, &["spec", "names", field]);
        words.iter().filter_map(Value::as_str).map(Arc::from).collect()
    };
    let has = |field: &str| read::has(version, &["subresources", field]);
    let mut subresources = Vec::new();
    if has("status") {
        subresources.push(Subresource::Status);
    }
    if has("scale") {
        subresources.push(Subresource::Scale);
    }
    let kind = names("kind");
    let list_kind = Some(names("listKind")).filter(|name| !name.is_empty());
    let singular = Some(names("singular")).filter(|name| !name.is_empty());
    let resource = Resource {
        group: read::text(definition, &["spec", "group"]).into(),
        version: read::text(version, &["name"]).into(),
        kind: kind.into(),
        list_kind: list_kind.map_or_else(|| format!("{kind}List").into(), Arc::from),
        plural: names("plural").into(),
        singular: singular.map_or_else(|| kind.to_lowercase().into(), Arc::from),
        short_names: words("shortNames"),
        categories: words("categories"),
        namespaced: read::text(definition, &["spec", "scope"]) == "Namespaced",
        subresources,
        verbs: VERBS,
        built_in: false,
    };
    let openapi = read::at(version, &["schema", "openAPIV3Schema"]).clone();
    let api_version = resource.api_version();
    let schema = Arc::new(type_of(&openapi));
    Served {
        rules: Arc::new(CustomRules::new(version, schema.clone())),
        stored_schema: schema.clone(),
        schema,
        collection: Collection::from(resource.qualified().as_str()),
        stored: if api_version == storage && !has_older(definition, storage) {
            Stored::Same
        } else {
            Stored::As(storage.to_owned())
        },
        scale: has("scale").then(|| scale_paths(version)),
        definition: Some(Definition {
            name: read::name(definition).to_owned(),
            openapi,
            terminating: read::has(definition, &["metadata", "deletionTimestamp"]),
        }),
        api_version,
        resource,
    }
}

/// Whether some objects may lie in the store as another version wrote them, when that was the one to store.
fn has_older(definition: &Value, storage: &str) -> bool {
    let stored = read::items(definition, &["status", "storedVersions"]);
    let now = storage.rsplit('/').next().unwrap_or_default();
    !matches!(stored, [only] if only == now)
}

/// The type of a definition's objects; one that keeps everything if the schema is not understood.
fn type_of(openapi: &Value) -> Type {
    schema::from_openapi(openapi).unwrap_or_else(|_| Type {
        preserve_unknown: true,
        unstructured: true,
        ..Type::default()
    })
}

fn scale_paths(version: &Value) -> ScalePaths {
    let path = |field: &str| read::text(version, &["subresources", "scale", field]).to_owned();
    ScalePaths {
        spec: path("specReplicasPath"),
        status: path("statusReplicasPath"),
        selector: Some(path("labelSelectorPath")).filter(|path| !path.is_empty()),
    }
}

/// How versions of a custom group are ordered: GA before beta before alpha, higher before lower.
pub(crate) fn version_order(version: &str) -> (u8, u64, u64) {
    let Some(rest) = version.strip_prefix('v') else { return (0, 0, 0) };
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (major, rest) = rest.split_at(digits);
    let Ok(major) = major.parse() else { return (0, 0, 0) };
    let stage = |rest: &str, name: &str| rest.strip_prefix(name).map(|minor| minor.parse().unwrap_or(0));
    if rest.is_empty() {
        (3, major, 0)
    } else if let Some(minor) = stage(rest, "beta") {
        (2, major, minor)
    } else if let Some(minor) = stage(rest, "alpha") {
        (1, major, minor)
    } else {
        (0, 0, 0)
    }
}

/// Where the definitions lie.
pub(crate) fn definitions() -> Collection {
    Collection::new(format!("{PLURAL}.{GROUP}"))
}

/// Where a definition's objects lie.
pub(crate) fn collection(definition: &Value) -> Collection {
    let group = read::text(definition, &["spec", "group"]);
    Collection::new(format!("{}.{group}", read::text(definition, &["spec", "names", "plural"])))
}

/// Fills the status of a definition: its names are accepted and its resources are served.
pub(crate) fn establish(definition: &mut Value, now: &str) {
    let names = read::at(definition, &["spec", "names"]).clone();
    let storage: Vec<Value> = read::items(definition, &["spec", "versions"])
        .iter()
        .filter(|version| read::flag(version, &["storage"]))
        .map(|version| read::at(version, &["name"]).clone())
        .collect();
    let condition = |type_: &str, reason: &str, message: &str| {
        json!({
            "type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now,
        })
    };
    let have = read::items(definition, &["status", "conditions"]);
    let established = have.iter().any(|condition| read::text(condition, &["type"]) == "Established");
    let mut stored = read::items(definition, &["status", "storedVersions"]).to_vec();
    for version in storage {
        if !stored.contains(&version) {
            stored.push(version);
        }
    }
    let status = read::map(definition, &["status"]);
    status.insert("acceptedNames".to_owned(), names);
    status.insert("storedVersions".to_owned(), stored.into());
    if !established {
        let conditions = [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ];
        status.insert("conditions".to_owned(), conditions.into_iter().collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_stability_then_age() {
        let mut versions = ["v1alpha1", "v2beta1", "v1", "foo", "v10", "v2"];
        versions.sort_by_key(|version| std::cmp::Reverse(version_order(version)));
        assert_eq!(versions, ["v10", "v2", "v1", "v2beta1", "v1alpha1", "foo"]);
    }
}
