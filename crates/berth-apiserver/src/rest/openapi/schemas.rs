//! Types as OpenAPI schemas.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::document::V2;
use crate::schema::{Field, ListType, Schema, Shape, Type, describe_field, describe_type};

/// Collects the schemas of types and of all the types they use.
pub(super) struct Schemas {
    /// What references to schemas begin with: `#/components/schemas/` in version 3, `#/definitions/` in version 2.
    prefix: &'static str,
    pub(super) found: BTreeMap<String, Value>,
}

impl Schemas {
    pub(super) fn new(prefix: &'static str) -> Self {
        Self { prefix, found: BTreeMap::new() }
    }

    /// A reference to a type, whose schema is collected.
    pub(super) fn reference(&mut self, type_: &Type) -> Value {
        let name = published_name(&type_.name);
        if !self.found.contains_key(&name) {
            // Types refer to each other in circles: the name is entered before the fields are read.
            self.found.insert(name.clone(), Value::Null);
            let schema = self.object(type_);
            self.found.insert(name.clone(), schema);
        }
        self.link(&name)
    }

    /// A reference to a schema by its name.
    pub(super) fn link(&self, name: &str) -> Value {
        json!({ "$ref": format!("{}{name}", self.prefix) })
    }

    fn object(&mut self, type_: &Type) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for field in &type_.fields {
            if field.required {
                required.push(Value::from(field.name.as_ref()));
            }
            let mut property = self.field(field);
            if let Some(text) = describe_field(&type_.name, &field.name) {
                // Clients skip what stands beside a reference.
                if property.get("$ref").is_some() {
                    property = json!({ "allOf": [property] });
                }
                property["description"] = text.into();
            }
            properties.insert(field.name.to_string(), property);
        }
        let mut schema = json!({ "type": "object" });
        if let Some(text) = describe_type(&type_.name) {
            schema["description"] = text.into();
        }
        if !properties.is_empty() {
            schema["properties"] = Value::Object(properties);
        }
        if !required.is_empty() {
            schema["required"] = required.into();
        }
        if type_.atomic {
            schema["x-kubernetes-map-type"] = "atomic".into();
        }
        if type_.preserve_unknown {
            schema["x-kubernetes-preserve-unknown-fields"] = true.into();
        }
        schema
    }

    fn field(&mut self, field: &Field) -> Value {
        let mut schema = self.schema(&field.schema);
        let mut strategy = Vec::new();
        if field.patch.merge {
            strategy.push("merge");
        }
        if field.patch.retain_keys {
            strategy.push("retainKeys");
        }
        if !strategy.is_empty() {
            schema["x-kubernetes-patch-strategy"] = strategy.join(",").into();
        }
        if let Some(key) = &field.patch.key {
            schema["x-kubernetes-patch-merge-key"] = key.as_ref().into();
        }
        schema
    }

    fn schema(&mut self, schema: &Schema) -> Value {
        let mut value = match &schema.shape {
            Shape::String | Shape::Duration => json!({ "type": "string" }),
            Shape::Int32 => json!({ "type": "integer", "format": "int32" }),
            Shape::Int64 => json!({ "type": "integer", "format": "int64" }),
            Shape::Bool => json!({ "type": "boolean" }),
            Shape::Double => json!({ "type": "number", "format": "double" }),
            Shape::Bytes => json!({ "type": "string", "format": "byte" }),
            Shape::Time => self.named(
                "io.k8s.apimachinery.pkg.apis.meta.v1.Time",
                json!({ "type": "string", "format": "date-time" }),
            ),
            Shape::MicroTime => self.named(
                "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime",
                json!({ "type": "string", "format": "date-time" }),
            ),
            Shape::Quantity => {
                let schema = self.either(json!({}), ["string", "number"]);
                self.named("io.k8s.apimachinery.pkg.api.resource.Quantity", schema)
            }
            Shape::IntOrString => {
                let schema = self.either(json!({ "format": "int-or-string" }), ["integer", "string"]);
                self.named("io.k8s.apimachinery.pkg.util.intstr.IntOrString", schema)
            }
            Shape::RawExtension => {
                self.named("io.k8s.apimachinery.pkg.runtime.RawExtension", json!({ "type": "object" }))
            }
            Shape::Fields => {
                self.named("io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1", json!({ "type": "object" }))
            }
            Shape::Any | Shape::SchemaOrArray | Shape::SchemaOrBool | Shape::SchemaOrStrings => json!({}),
            // Clients skip what stands beside a reference, hence the detour.
            Shape::Object(link) => json!({ "allOf": [self.reference(link.get())], "default": {} }),
            Shape::List(of) | Shape::Items(of) => json!({ "type": "array", "items": self.schema(of) }),
            Shape::Map(of) => json!({ "type": "object", "additionalProperties": self.schema(of) }),
        };
        if matches!(schema.shape, Shape::List(_) | Shape::Items(_)) {
            match &schema.list {
                ListType::Atomic => value["x-kubernetes-list-type"] = "atomic".into(),
                ListType::Set => value["x-kubernetes-list-type"] = "set".into(),
                ListType::Map(keys) => {
                    value["x-kubernetes-list-type"] = "map".into();
                    value["x-kubernetes-list-map-keys"] = keys.iter().map(AsRef::<str>::as_ref).collect();
                }
            }
        } else if schema.atomic {
            value["x-kubernetes-map-type"] = "atomic".into();
        } else if schema.granular {
            value["x-kubernetes-map-type"] = "granular".into();
        }
        value
    }

    /// A schema of one of two types; version 2 cannot say so and calls it a string.
    fn either(&self, mut schema: Value, types: [&str; 2]) -> Value {
        if self.prefix == V2 {
            schema["type"] = "string".into();
        } else {
            schema["oneOf"] = types.iter().map(|name| json!({ "type": name })).collect();
        }
        schema
    }

    fn named(&mut self, name: &str, schema: Value) -> Value {
        self.found.entry(name.to_owned()).or_insert(schema);
        self.link(name)
    }
}

/// The name under which Kubernetes publishes a type of the table.
pub(super) fn published_name(name: &str) -> String {
    let (group, kind) = name.split_once('.').unwrap_or(("", name));
    match group {
        "meta" => format!("io.k8s.apimachinery.pkg.apis.meta.v1.{kind}"),
        "apiextensions" => {
            format!("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.{kind}")
        }
        group => format!("io.k8s.api.{group}.v1.{kind}"),
    }
}
