//! The documents: paths with their operations, and the schemas they speak of.

use serde_json::{Map, Value, json};

use super::schemas::{Schemas, published_name};
use crate::rest::registry::{Registry, Served};
use crate::schema;

const V3: &str = "#/components/schemas/";
pub(super) const V2: &str = "#/definitions/";

/// The document of one group and version.
pub(super) fn v3(registry: &Registry, group: &str, version: &str) -> Value {
    let mut schemas = Schemas::new(V3);
    let mut paths = Map::new();
    let resources = registry.version(group, version).map(|version| version.resources.as_slice());
    for served in resources.unwrap_or_default() {
        add(&mut paths, &mut schemas, served, Style::V3);
    }
    json!({
        "openapi": "3.0.0",
        "info": { "title": "Kubernetes", "version": "unversioned" },
        "paths": paths,
        "components": { "schemas": schemas.found },
    })
}

/// The document of everything, in the older format.
pub(super) fn v2(registry: &Registry) -> Value {
    let mut schemas = Schemas::new(V2);
    let mut paths = Map::new();
    for served in registry.all() {
        add(&mut paths, &mut schemas, served, Style::V2);
    }
    json!({
        "swagger": "2.0",
        "info": { "title": "Kubernetes", "version": "unversioned" },
        "paths": paths,
        "definitions": schemas.found,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    V2,
    V3,
}

fn add(paths: &mut Map<String, Value>, schemas: &mut Schemas, served: &Served, style: Style) {
    let resource = &served.resource;
    let kind = json!({ "group": &*resource.group, "version": &*resource.version, "kind": &*resource.kind });
    let list_kind =
        json!({ "group": &*resource.group, "version": &*resource.version, "kind": &*resource.list_kind });
    let reference = kind_schema(schemas, served, &kind);
    let list = list_schema(schemas, served, &reference, &list_kind);
    let root = if resource.group.is_empty() {
        format!("/api/{}", resource.version)
    } else {
        format!("/apis/{}/{}", resource.group, resource.version)
    };
    let collection = if resource.namespaced {
        format!("{root}/namespaces/{{namespace}}/{}", resource.plural)
    } else {
        format!("{root}/{}", resource.plural)
    };
    let operation = |action: &str, body: Option<&Value>, answer: &Value| Operation {
        action: action.to_owned(),
        kind: kind.clone(),
        name: format!("{action}{}", resource.kind),
        body: body.cloned(),
        answer: answer.clone(),
        custom: !resource.built_in,
        style,
    };
    let has = |verb: &str| resource.verbs.contains(&verb);
    let mut methods = Map::new();
    if has("list") {
        methods.insert("get".to_owned(), operation("list", None, &list).value());
    }
    if has("create") {
        methods.insert("post".to_owned(), operation("post", Some(&reference), &reference).value());
    }
    if has("deletecollection") {
        methods.insert("delete".to_owned(), operation("deletecollection", None, &list).value());
    }
    path_parameters(&mut methods, &collection, style);
    paths.insert(collection.clone(), Value::Object(methods));
    if !has("get") {
        return;
    }
    let mut methods = Map::new();
    methods.insert("get".to_owned(), operation("get", None, &reference).value());
    methods.insert("put".to_owned(), operation("put", Some(&reference), &reference).value());
    methods.insert(
        "patch".to_owned(),
        operation("patch", Some(&json!({ "type": "object" })), &reference).value(),
    );
    methods.insert("delete".to_owned(), operation("delete", None, &reference).value());
    let item = format!("{collection}/{{name}}");
    path_parameters(&mut methods, &item, style);
    paths.insert(item, Value::Object(methods));
}

/// Collects the schema of a kind and marks it as one.
fn kind_schema(schemas: &mut Schemas, served: &Served, kind: &Value) -> Value {
    let Some(definition) = &served.definition else {
        let reference = schemas.reference(&served.schema);
        if let Some(schema) = schemas.found.get_mut(&published_name(&served.schema.name)) {
            schema["x-kubernetes-group-version-kind"] = json!([kind]);
        }
        return reference;
    };
    let name = custom_name(served);
    let mut schema = definition.openapi.clone();
    if !schema.is_object() {
        schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    }
    if let Some(metadata) = schema::built_in_type("meta.ObjectMeta") {
        let metadata = schemas.reference(&metadata);
        schema["properties"]["metadata"] = json!({ "allOf": [metadata], "default": {} });
    }
    for field in ["apiVersion", "kind"] {
        if schema["properties"][field].is_null() {
            schema["properties"][field] = json!({ "type": "string" });
        }
    }
    schema["x-kubernetes-group-version-kind"] = json!([kind]);
    let link = schemas.link(&name);
    schemas.found.insert(name, schema);
    link
}

/// `io.k8s.storage.snapshot.v1.VolumeSnapshot`: the group backwards, then version and kind.
fn custom_name(served: &Served) -> String {
    let mut parts: Vec<&str> = served.resource.group.split('.').collect();
    parts.reverse();
    format!("{}.{}.{}", parts.join("."), served.resource.version, served.resource.kind)
}

fn list_schema(schemas: &mut Schemas, served: &Served, item: &Value, kind: &Value) -> Value {
    if !served.resource.verbs.contains(&"list") {
        return item.clone();
    }
    let own =
        if served.resource.built_in { published_name(&served.schema.name) } else { custom_name(served) };
    let name = format!("{own}List");
    let metadata = match schema::built_in_type("meta.ListMeta") {
        Some(type_) => schemas.reference(&type_),
        None => json!({ "type": "object" }),
    };
    let schema = json!({
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "allOf": [metadata], "default": {} },
            "items": { "type": "array", "items": { "allOf": [item], "default": {} } },
        },
        "x-kubernetes-group-version-kind": [kind],
    });
    let link = schemas.link(&name);
    schemas.found.insert(name, schema);
    link
}

struct Operation {
    action: String,
    kind: Value,
    name: String,
    body: Option<Value>,
    answer: Value,
    custom: bool,
    style: Style,
}

impl Operation {
    fn value(self) -> Value {
        let mut parameters: Vec<Value> = query_parameters(&self.action)
            .iter()
            .map(|&(name, type_)| match self.style {
                Style::V3 => {
                    json!({ "name": name, "in": "query", "schema": { "type": type_, "uniqueItems": true } })
                }
                Style::V2 => json!({ "name": name, "in": "query", "type": type_, "uniqueItems": true }),
            })
            .collect();
        let mut value = json!({
            "operationId": self.name,
            "x-kubernetes-action": self.action,
            "x-kubernetes-group-version-kind": self.kind,
        });
        match self.style {
            Style::V3 => {
                let content = |schema: &Value| json!({ "application/json": { "schema": schema } });
                if let Some(body) = &self.body {
                    value["requestBody"] =
                        json!({ "content": body_content(&self.action, self.custom, body), "required": true });
                }
                value["responses"] =
                    json!({ "200": { "description": "OK", "content": content(&self.answer) } });
            }
            Style::V2 => {
                if let Some(body) = &self.body {
                    parameters
                        .push(json!({ "name": "body", "in": "body", "required": true, "schema": body }));
                }
                value["responses"] = json!({ "200": { "description": "OK", "schema": self.answer } });
            }
        }
        value["parameters"] = parameters.into();
        value
    }
}

/// What a request may be written in; custom resources know neither strategic merge patches nor protobuf, and clients
/// choose by this list.
fn body_content(action: &str, custom: bool, body: &Value) -> Value {
    let formats: &[&str] = match (action, custom) {
        ("patch", false) => &[
            "application/apply-patch+yaml",
            "application/json-patch+json",
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
        ],
        ("patch", true) => {
            &["application/apply-patch+yaml", "application/json-patch+json", "application/merge-patch+json"]
        }
        (_, false) => &["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"],
        (_, true) => &["application/json", "application/yaml"],
    };
    formats.iter().map(|&format| (format.to_owned(), json!({ "schema": body }))).collect::<Map<_, _>>().into()
}

fn query_parameters(action: &str) -> &'static [(&'static str, &'static str)] {
    const WRITE: &[(&str, &str)] =
        &[("dryRun", "string"), ("fieldManager", "string"), ("fieldValidation", "string")];
    match action {
        "list" => &[
            ("allowWatchBookmarks", "boolean"),
            ("continue", "string"),
            ("fieldSelector", "string"),
            ("labelSelector", "string"),
            ("limit", "integer"),
            ("resourceVersion", "string"),
            ("resourceVersionMatch", "string"),
            ("sendInitialEvents", "boolean"),
            ("timeoutSeconds", "integer"),
            ("watch", "boolean"),
        ],
        "patch" => &[
            ("dryRun", "string"),
            ("fieldManager", "string"),
            ("fieldValidation", "string"),
            ("force", "boolean"),
        ],
        "post" | "put" => WRITE,
        "delete" => &[
            ("dryRun", "string"),
            ("gracePeriodSeconds", "integer"),
            ("orphanDependents", "boolean"),
            ("propagationPolicy", "string"),
        ],
        _ => &[],
    }
}

fn path_parameters(methods: &mut Map<String, Value>, path: &str, style: Style) {
    let named = ["namespace", "name"].into_iter().filter(|name| path.contains(&format!("{{{name}}}")));
    let parameters: Vec<Value> = named
        .map(|name| match style {
            Style::V3 => json!({
                "name": name, "in": "path", "required": true, "schema": { "type": "string", "uniqueItems": true },
            }),
            Style::V2 => {
                json!({ "name": name, "in": "path", "required": true, "type": "string", "uniqueItems": true })
            }
        })
        .collect();
    if !parameters.is_empty() {
        methods.insert("parameters".to_owned(), parameters.into());
    }
}
