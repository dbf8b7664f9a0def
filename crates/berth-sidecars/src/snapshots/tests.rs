//! The definitions and the types say the same.

use std::collections::BTreeSet;

use kube::Resource;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::*;

/// Changes an object as a merge patch does, but keeps null, which reads as not there.
pub(crate) fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

#[test]
fn every_definition_is_well_formed_and_named_after_what_it_defines() {
    for definition in definitions() {
        let spec = &definition["spec"];
        let name =
            format!("{}.{}", spec["names"]["plural"].as_str().unwrap(), spec["group"].as_str().unwrap());
        assert_eq!(definition["metadata"]["name"], name);
        let stored = spec["versions"].as_array().unwrap().iter().filter(|version| version["storage"] == true);
        assert_eq!(stored.count(), 1, "{name}");
    }
}

#[test]
fn the_definitions_serve_the_names_versions_and_scopes_of_upstream() {
    for (kind, short, scope, served, stored) in [
        ("VolumeSnapshot", &["vs"][..], "Namespaced", &["v1"][..], "v1"),
        ("VolumeSnapshotContent", &["vsc", "vscs"], "Cluster", &["v1"], "v1"),
        ("VolumeSnapshotClass", &["vsclass", "vsclasses"], "Cluster", &["v1"], "v1"),
        ("VolumeGroupSnapshot", &["vgs"], "Namespaced", &["v1", "v1beta2"], "v1beta2"),
        ("VolumeGroupSnapshotContent", &["vgsc", "vgscs"], "Cluster", &["v1", "v1beta2"], "v1beta2"),
        ("VolumeGroupSnapshotClass", &["vgsclass", "vgsclasses"], "Cluster", &["v1", "v1beta2"], "v1beta2"),
    ] {
        let all = definitions();
        let spec =
            &all.iter().find(|definition| definition["spec"]["names"]["kind"] == kind).unwrap()["spec"];
        assert_eq!(spec["names"]["shortNames"], json!(short), "{kind}");
        assert_eq!(spec["scope"], scope, "{kind}");
        let versions = spec["versions"].as_array().unwrap();
        let names = |field: &str| -> Vec<&str> {
            let chosen = versions.iter().filter(|version| version[field] == true);
            chosen.map(|version| version["name"].as_str().unwrap()).collect()
        };
        assert_eq!(names("served"), served, "{kind}");
        assert_eq!(names("storage"), [stored], "{kind}");
        let classes = kind.ends_with("Class");
        for version in versions {
            assert_eq!(version["subresources"]["status"].is_object(), !classes, "{kind}");
        }
    }
}

/// All fields of a schema, as paths.
fn fields(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        fields(inner, &path, found);
        fields(&inner["items"], &path, found);
        found.insert(path);
    }
}

/// An object with every field of a schema.
fn filled(schema: &Value) -> Value {
    if schema["x-kubernetes-int-or-string"] == true {
        return json!("1Gi");
    }
    match (schema["type"].as_str(), schema["format"].as_str()) {
        (Some("object"), _) => match schema["properties"].as_object() {
            Some(fields) => fields.iter().map(|(name, inner)| (name.clone(), filled(inner))).collect(),
            None if schema["additionalProperties"].is_object() => json!({ "key": "value" }),
            None => json!({}),
        },
        (Some("array"), _) => json!([filled(&schema["items"])]),
        (Some("integer"), _) => json!(7),
        (Some("boolean"), _) => json!(true),
        (_, Some("date-time")) => json!("2026-01-02T03:04:05Z"),
        _ => json!("text"),
    }
}

/// Every field of the definition survives our type, so nothing is lost and nothing has another name.
fn matches<K: Resource<DynamicType = ()> + Serialize + DeserializeOwned>() {
    let (kind, version) = (K::kind(&()), K::version(&()));
    let all = definitions();
    let definition = all.iter().find(|definition| definition["spec"]["names"]["kind"] == *kind).unwrap();
    assert_eq!(definition["spec"]["group"], *K::group(&()));
    assert_eq!(definition["spec"]["names"]["plural"], *K::plural(&()));
    let versions = definition["spec"]["versions"].as_array().unwrap();
    let schema = &versions.iter().find(|known| known["name"] == *version).unwrap()["schema"];
    let mut object = filled(&schema["openAPIV3Schema"]);
    (object["apiVersion"], object["kind"]) = (json!(K::api_version(&())), json!(kind));
    object["metadata"] = json!({ "name": "a" });
    let typed: K = serde_json::from_value(object.clone()).unwrap();
    assert_eq!(serde_json::to_value(&typed).unwrap(), object, "{kind}");
    let mut known = BTreeSet::new();
    fields(&schema["openAPIV3Schema"], "", &mut known);
    assert!(known.len() > 5, "{kind}: {known:?}");
}

#[test]
fn every_field_of_a_definition_is_a_field_of_its_type() {
    matches::<VolumeSnapshot>();
    matches::<VolumeSnapshotContent>();
    matches::<VolumeSnapshotClass>();
    matches::<VolumeGroupSnapshot>();
    matches::<VolumeGroupSnapshotContent>();
    matches::<VolumeGroupSnapshotClass>();
}

#[test]
fn members_are_named_by_the_hash_of_group_and_volume() {
    let hex = "4888fb23f417fea4ae44a3aedae303f90011f242a3d3eaa6b006f7277dec6042";
    let named = (format!("snapshot-{hex}"), format!("snapcontent-{hex}"));
    assert_eq!(member_names("uid", "handle"), named);
}
