//! Custom resources are pruned, defaulted and validated as kube-apiserver's libraries do it.

use berth_apiserver::schema::{apply_defaults, decode, from_openapi, validate};
use serde_json::{Value, json};

use super::peer::ask;

fn same_as_peer(schema: &Value, object: &Value) {
    let theirs = ask(&json!({"op": "custom", "patch": schema, "object": object}));
    assert!(theirs.get("error").is_none(), "{theirs}");
    let type_ = match from_openapi(schema) {
        Ok(type_) => type_,
        Err(errors) => {
            assert_eq!(theirs["text"], "schema", "{schema}: {errors:?} {theirs}");
            return;
        }
    };
    assert!(theirs.get("text").is_none(), "{schema}: {theirs}");
    let mut ours = object.clone();
    let decoded = decode(&type_, &mut ours);
    apply_defaults(&type_, &mut ours);
    assert_eq!(ours, theirs["object"], "{schema} {object}");
    let mut found: Vec<String> = validate(&type_, &ours)
        .into_iter()
        .map(|cause| format!("{} | {} | {}", cause.reason.as_str(), cause.field, cause.message))
        .collect();
    found.extend(decoded.unknown.iter().map(|path| format!("unknown {path}")));
    found.sort();
    assert_eq!(json!(found), theirs.get("strict").cloned().unwrap_or(json!([])), "{schema} {object}");
}

/// A schema with one field of each kind.
fn wide() -> Value {
    json!({"type": "object", "required": ["spec"], "properties": {"spec": {"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-z]+$"},
        "mode": {"type": "string", "enum": ["A", "B"], "default": "A"},
        "size": {"type": "integer", "minimum": 1, "maximum": 10, "format": "int32"},
        "count": {"type": "integer"},
        "ratio": {"type": "number", "exclusiveMinimum": true, "minimum": 0.5, "exclusiveMaximum": true, "maximum": 2},
        "step": {"type": "integer", "multipleOf": 3},
        "on": {"type": "boolean", "default": false},
        "port": {"x-kubernetes-int-or-string": true},
        "when": {"type": "string", "format": "date-time"},
        "data": {"type": "string", "format": "byte"},
        "maybe": {"type": "string", "nullable": true},
        "list": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "string", "maxLength": 1}},
        "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "keyed": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
            "items": {"type": "object", "required": ["k"], "properties": {"k": {"type": "string"}, "v": {"type": "integer", "default": 7}}}},
        "map": {"type": "object", "maxProperties": 2, "minProperties": 1, "additionalProperties": {"type": "integer"}},
        "objects": {"type": "object", "additionalProperties": {"type": "object", "properties": {"a": {"type": "string", "default": "d"}}}},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": {"typed": {"type": "string"}}},
        "any": {"x-kubernetes-preserve-unknown-fields": true},
        "closed": {"type": "object"},
        "deep": {"type": "object", "default": {}, "properties": {"x": {"type": "string", "default": "y"}}},
        "either": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "some": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "anyOf": [{"required": ["a"]}, {"properties": {"b": {"enum": ["z"]}}, "required": ["b"]}]},
        "all": {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 5}]},
        "none": {"type": "string", "not": {"enum": ["bad"]}},
    }}, "status": {"type": "object", "properties": {"ready": {"type": "boolean"}}}}})
}

fn scalar_changes() -> Vec<Value> {
    vec![
        json!({}),
        json!({"name": null}),
        json!({"name": "a"}),
        json!({"name": "ABCDEFG"}),
        json!({"name": 1}),
        json!({"name": ["x"]}),
        json!({"mode": "C"}),
        json!({"mode": null}),
        json!({"size": 0}),
        json!({"size": 11}),
        json!({"size": 1.5}),
        json!({"size": "1"}),
        json!({"size": true}),
        json!({"size": 3_000_000_000_u64}),
        json!({"count": 1.5}),
        json!({"ratio": 0.5}),
        json!({"ratio": 2}),
        json!({"ratio": 0.6}),
        json!({"step": 4}),
        json!({"step": 6}),
        json!({"ratio": 1}),
        json!({"ratio": "x"}),
        json!({"on": "yes"}),
        json!({"port": true}),
        json!({"port": 1.5}),
        json!({"port": "http"}),
        json!({"when": "2026-01-01T00:00:00Z"}),
        json!({"when": "soon"}),
    ]
}

fn compound_changes() -> Vec<Value> {
    vec![
        json!({"data": "aGk="}),
        json!({"data": "%"}),
        json!({"maybe": null}),
        json!({"list": []}),
        json!({"list": ["a", "b", "c"]}),
        json!({"list": ["abc"]}),
        json!({"list": "x"}),
        json!({"list": [null]}),
        json!({"set": ["a", "a", "b", "a"]}),
        json!({"keyed": [{"k": "a"}, {"k": "b", "v": 1}, {"k": "a", "x": 1}]}),
        json!({"keyed": [{}]}),
        json!({"map": {}}),
        json!({"map": {"a": 1, "b": 2, "c": 3}}),
        json!({"map": {"a": "x", "b": null}}),
        json!({"objects": {"a": {}, "b": {"x": 1}, "c": null}}),
        json!({"free": {"anything": {"goes": [1]}, "typed": 1}}),
        json!({"any": [1, {"a": null}]}),
        json!({"closed": {"a": 1}}),
        json!({"deep": null}),
        json!({"deep": {"x": null, "z": 1}}),
        json!({"either": {}}),
        json!({"either": {"a": "1"}}),
        json!({"either": {"a": "1", "b": "2"}}),
        json!({"some": {}}),
        json!({"some": {"b": "y"}}),
        json!({"all": 4}),
        json!({"all": 9}),
        json!({"none": "bad"}),
        json!({"unknown": {"x": 1}, "other": 2}),
    ]
}

#[test]
fn custom_resources_are_treated_as_kubernetes_treats_them() {
    let schema = wide();
    same_as_peer(&schema, &json!({}));
    for change in scalar_changes().into_iter().chain(compound_changes()) {
        let mut spec = json!({"name": "abc"});
        for (name, value) in change.as_object().expect("an object") {
            spec[name] = value.clone();
        }
        same_as_peer(&schema, &json!({"spec": spec, "status": {"ready": true, "x": 1}}));
    }
}

#[test]
fn schemas_that_are_not_structural_are_refused() {
    for properties in [
        json!({"a": {}}),
        json!({"a": {"type": "array"}}),
        json!({"a": {"type": "object", "properties": {"b": {"type": "string"}}, "additionalProperties": {"type": "string"}}}),
        json!({"a": {"type": "array", "items": {}}}),
        json!({"a": {"properties": {"b": {"type": "string"}}}}),
    ] {
        let schema = json!({"type": "object", "properties": properties});
        assert!(from_openapi(&schema).is_err(), "{schema}");
        if schema["properties"]["a"].get("additionalProperties").is_none() {
            same_as_peer(&schema, &json!({}));
        }
    }
}
