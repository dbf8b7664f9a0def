//! Types of custom resources: from a structural schema, with its defaults.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::{Checks, Field, Link, ListType, Patch, Schema, Shape, Type, json, table};
use crate::store::MAX_OBJECT;

/// Makes a type of a version's `openAPIV3Schema`, or says why the schema is not structural.
pub fn from_openapi(openapi: &Value) -> Result<Type, Vec<String>> {
    let mut reader = Reader::default();
    if openapi["type"].as_str() != Some("object") {
        reader.errors.push("type: Invalid value: must be object at the root".to_owned());
    }
    let mut root = reader.object(openapi, "");
    root.fields.retain(|field| !["apiVersion", "kind", "metadata"].contains(&field.name.as_ref()));
    root.fields.extend(resource_fields());
    root.fields.sort_by(|a, b| a.name.cmp(&b.name));
    root.checks = Some(Box::new(reader.checks(openapi, "")));
    if reader.errors.is_empty() { Ok(root) } else { Err(reader.errors) }
}

/// What every object of the API has.
fn resource_fields() -> Vec<Field> {
    let metadata = table::link("meta.ObjectMeta").map_or(Shape::Any, Shape::Object);
    [("apiVersion", Shape::String), ("kind", Shape::String), ("metadata", metadata)]
        .into_iter()
        .map(|(name, shape)| field(Cow::Borrowed(name), Schema::of(shape)))
        .collect()
}

fn field(name: Cow<'static, str>, schema: Schema) -> Field {
    Field { name, number: 0, pointer: true, always: false, required: false, patch: Patch::default(), schema }
}

/// Reads schemas and collects what is wrong with them.
#[derive(Default)]
struct Reader {
    errors: Vec<String>,
    /// Inside `allOf` and the like, where values are restricted but not declared.
    nested: bool,
}

impl Reader {
    fn schema(&mut self, node: &Value, path: &str) -> Schema {
        let flag = |name: &str| node[name].as_bool().unwrap_or_default();
        let kind = node["type"].as_str().unwrap_or_default();
        let free = flag("x-kubernetes-preserve-unknown-fields");
        let int_or_string = flag("x-kubernetes-int-or-string");
        if kind.is_empty() && !free && !int_or_string && !self.nested {
            self.errors
                .push(format!("{path}.type: Required value: must not be empty for specified object fields"));
        }
        let shape = match kind {
            _ if int_or_string => Shape::IntOrString,
            "string" => Shape::String,
            "integer" => Shape::Int64,
            "number" => Shape::Double,
            "boolean" => Shape::Bool,
            "array" => Shape::List(Box::new(self.items(node, path))),
            "object" => self.map_or_object(node, path),
            _ if node["properties"].is_object() => self.map_or_object(node, path),
            _ if node["items"].is_object() => Shape::List(Box::new(self.items(node, path))),
            _ => Shape::Any,
        };
        Schema {
            shape,
            list: self.list_type(node, path),
            atomic: node["x-kubernetes-map-type"].as_str() == Some("atomic"),
            granular: false,
            nullable: flag("nullable"),
            default: node.get("default").filter(|default| !default.is_null()).cloned(),
            checks: Some(Box::new(self.checks(node, path))),
        }
    }

    fn items(&mut self, node: &Value, path: &str) -> Schema {
        match node.get("items") {
            Some(items @ Value::Object(_)) => self.schema(items, &format!("{path}.items")),
            _ if self.nested => Schema::default(),
            _ => {
                self.errors.push(format!("{path}.items: Required value: must be specified"));
                Schema::default()
            }
        }
    }

    fn map_or_object(&mut self, node: &Value, path: &str) -> Shape {
        let values = &node["additionalProperties"];
        if values.is_object() && !node["properties"].is_object() {
            let of = self.schema(values, &format!("{path}.additionalProperties"));
            return Shape::Map(Box::new(of));
        }
        if values.is_object() && !self.nested {
            self.errors
                .push(format!("{path}.additionalProperties: Forbidden: must not be used with properties"));
        }
        Shape::Object(Link::from(self.object(node, path)))
    }

    fn object(&mut self, node: &Value, path: &str) -> Type {
        let flag = |name: &str| node[name].as_bool().unwrap_or_default();
        let required = strings(&node["required"]);
        let mut fields: Vec<Field> = Vec::new();
        for (name, property) in node["properties"].as_object().into_iter().flatten() {
            let schema = self.schema(property, &format!("{path}.properties[{name}]"));
            let mut declared = field(Cow::Owned(name.clone()), schema);
            declared.required = required.contains(name);
            fields.push(declared);
        }
        if flag("x-kubernetes-embedded-resource") {
            for extra in resource_fields() {
                fields.retain(|declared| declared.name != extra.name);
                fields.push(extra);
            }
        }
        fields.sort_by(|a, b| a.name.cmp(&b.name));
        Type {
            fields,
            preserve_unknown: flag("x-kubernetes-preserve-unknown-fields")
                || node["additionalProperties"].as_bool() == Some(true),
            unstructured: true,
            atomic: node["x-kubernetes-map-type"].as_str() == Some("atomic"),
            ..Type::default()
        }
    }

    fn list_type(&mut self, node: &Value, path: &str) -> ListType {
        match node["x-kubernetes-list-type"].as_str() {
            Some("set") => ListType::Set,
            Some("map") => {
                let keys = strings(&node["x-kubernetes-list-map-keys"]);
                if keys.is_empty() {
                    self.errors.push(format!(
                        "{path}.x-kubernetes-list-map-keys: Required value: must not be empty if \
                        x-kubernetes-list-type is map"
                    ));
                }
                ListType::Map(keys.into_iter().map(Cow::Owned).collect())
            }
            _ => ListType::Atomic,
        }
    }

    fn pattern(&mut self, pattern: &str, path: &str) -> Option<regex::Regex> {
        let compiled = regex::Regex::new(pattern).ok();
        if compiled.is_none() {
            let message = "must be a valid regular expression";
            self.errors.push(format!("{path}.pattern: Invalid value: {pattern:?}: {message}"));
        }
        compiled
    }

    fn checks(&mut self, node: &Value, path: &str) -> Checks {
        let flag = |name: &str| node[name].as_bool().unwrap_or_default();
        let number = |name: &str| node[name].as_f64();
        let count = |name: &str| node[name].as_u64();
        let text = |name: &str| node[name].as_str().unwrap_or_default().to_owned();
        let pattern = node["pattern"].as_str().and_then(|pattern| self.pattern(pattern, path));
        let outside = std::mem::replace(&mut self.nested, true);
        let mut all = |name: &str| -> Vec<Schema> {
            let members = node[name].as_array().into_iter().flatten().enumerate();
            members.map(|(index, member)| self.schema(member, &format!("{path}.{name}[{index}]"))).collect()
        };
        let (all_of, any_of, one_of) = (all("allOf"), all("anyOf"), all("oneOf"));
        let not = node.get("not").map(|not| self.schema(not, &format!("{path}.not")));
        self.nested = outside;
        Checks {
            kind: text("type"),
            format: text("format"),
            enumeration: node["enum"].as_array().cloned().unwrap_or_default(),
            minimum: number("minimum").map(|limit| (limit, flag("exclusiveMinimum"))),
            maximum: number("maximum").map(|limit| (limit, flag("exclusiveMaximum"))),
            multiple_of: number("multipleOf"),
            min_length: count("minLength"),
            max_length: count("maxLength"),
            min_items: count("minItems"),
            max_items: count("maxItems"),
            min_properties: count("minProperties"),
            max_properties: count("maxProperties"),
            unique_items: flag("uniqueItems"),
            pattern,
            required: strings(&node["required"]),
            embedded: flag("x-kubernetes-embedded-resource"),
            int_or_string: flag("x-kubernetes-int-or-string"),
            all_of,
            any_of,
            one_of,
            not,
        }
    }
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// Fills in the defaults of a custom resource; nulls where null is no value are taken for absent.
///
/// Built-in types are left alone: their defaults are rules of the kinds. A default of many bytes may be due in many places:
/// when more bytes than an object may have are filled in, the rest is left out, and the object is too large to be stored.
pub fn apply_defaults(type_: &Type, object: &mut Value) {
    if let (true, Value::Object(fields)) = (type_.unstructured, object) {
        Defaults { left: Some(MAX_OBJECT) }.fields(type_, fields);
    }
}

/// Fills in defaults while there are bytes left for them.
struct Defaults {
    /// None when more was filled in than fits.
    left: Option<usize>,
}

impl Defaults {
    /// A copy of the default. The one that is too much is still filled in, so that the object is too large for certain;
    /// after it there are none.
    fn take(&mut self, default: &Value) -> Option<Value> {
        self.left = self.left?.checked_sub(json::length(default));
        Some(default.clone())
    }

    fn fields(&mut self, type_: &Type, object: &mut Map<String, Value>) {
        object.retain(|name, value| {
            let schema = type_.field(name).map(|field| &field.schema);
            !(value.is_null() && schema.is_some_and(|schema| !schema.nullable && schema.default.is_none()))
        });
        for field in &type_.fields {
            let Some(default) = &field.schema.default else { continue };
            let found = object.get(field.name.as_ref());
            if found.is_none_or(|value| value.is_null() && !field.schema.nullable) {
                let Some(default) = self.take(default) else { return };
                object.insert(field.name.to_string(), default);
            }
        }
        for (name, value) in object.iter_mut() {
            if let Some(field) = type_.field(name) {
                self.value(&field.schema, value);
            }
        }
    }

    fn value(&mut self, schema: &Schema, value: &mut Value) {
        match (&schema.shape, value) {
            (Shape::Object(link), Value::Object(object)) if link.get().unstructured => {
                self.fields(link.get(), object);
            }
            (Shape::Map(of), Value::Object(map)) => {
                map.retain(|_, value| !(value.is_null() && !of.nullable && of.default.is_none()));
                for value in map.values_mut() {
                    self.item(of, value);
                }
            }
            (Shape::List(of), Value::Array(items)) => items.iter_mut().for_each(|item| self.item(of, item)),
            _ => {}
        }
    }

    fn item(&mut self, of: &Schema, value: &mut Value) {
        if value.is_null() && !of.nullable {
            *value = of.default.as_ref().and_then(|default| self.take(default)).unwrap_or_default();
        }
        self.value(of, value);
    }
}
