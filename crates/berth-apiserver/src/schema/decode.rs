//! Strict decoding: unknown fields are found and removed, values take the form Go's types would give them.
//!
//! kube-apiserver decodes a body into a Go struct, so what it stores is what that struct writes: unknown fields are
//! gone, quantities and times are canonical, empty optional fields are left out, empty obligatory ones are there.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_core::Quantity;
use serde_json::{Map, Value};

use super::{Field, Schema, Shape, Type, table, time};

/// What was found while decoding.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Decoded {
    /// Fields that the type does not have, as paths: `spec.containers[0].foo`.
    pub unknown: Vec<String>,
    /// Values that do not fit, in Go's words; a server reports the first. What a custom resource's own schema checks
    /// ([`super::validate`]) is not among them, but its metadata is.
    pub errors: Vec<String>,
}

impl Decoded {
    /// What strict field validation objects to, given the keys that stood in the body twice.
    pub fn strict(&self, duplicates: &[String]) -> Vec<String> {
        let below = |path: &str, unknown: &String| {
            path.strip_prefix(unknown.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let known = |path: &&String| !self.unknown.iter().any(|unknown| below(path, unknown));
        let unknown = self.unknown.iter().map(|path| format!("unknown field \"{path}\""));
        let duplicate = duplicates.iter().filter(known).map(|path| format!("duplicate field \"{path}\""));
        unknown.chain(duplicate).collect()
    }
}

/// Brings an object into the form its type gives it and says what was unknown and what did not fit.
pub fn decode(type_: &Type, value: &mut Value) -> Decoded {
    walk(type_, value, Mode::Decode)
}

/// Removes the fields the type does not have and returns their paths; all other values stay as they are.
pub fn prune(type_: &Type, value: &mut Value) -> Vec<String> {
    walk(type_, value, Mode::Prune).unknown
}

fn walk(type_: &Type, value: &mut Value, mode: Mode) -> Decoded {
    let mut walker = Walker { mode, ..Walker::default() };
    match value {
        Value::Object(object) => walker.object(type_, object),
        other => {
            let found = go_kind(other);
            let message = format!("json: cannot unmarshal {found} into Go value of type {}", type_.go_name());
            walker.found.errors.push(message);
        }
    }
    walker.found
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    #[default]
    Decode,
    Prune,
}

#[derive(Default)]
struct Walker {
    mode: Mode,
    found: Decoded,
    /// Where we are, with indexes and keys.
    path: String,
    /// Where we are, as Go's messages say it: the struct we are in, and field names only.
    fields: String,
    owner: String,
}

impl Walker {
    fn object(&mut self, type_: &Type, object: &mut Map<String, Value>) {
        let outer = std::mem::replace(&mut self.owner, type_.short_name().to_owned());
        let mut dropped = Vec::new();
        for (name, value) in object.iter_mut() {
            let Some(field) = type_.field(name) else {
                if !type_.preserve_unknown {
                    self.found.unknown.push(self.path_to(name));
                    dropped.push(name.clone());
                }
                continue;
            };
            let (path, fields) = (self.path.len(), self.fields.len());
            self.enter(name);
            if type_.unstructured && field.schema.checks.is_none() {
                // Go's types begin here: messages name places from here on.
                let outside = std::mem::take(&mut self.fields);
                self.value(&field.schema, value);
                self.fields = outside;
            } else {
                self.value(&field.schema, value);
            }
            self.path.truncate(path);
            self.fields.truncate(fields);
        }
        for name in dropped {
            object.remove(&name);
        }
        if self.mode == Mode::Decode && !type_.unstructured {
            settle(type_, object);
        }
        self.owner = outer;
    }

    fn value(&mut self, schema: &Schema, value: &mut Value) {
        if value.is_null() {
            return;
        }
        match (&schema.shape, &mut *value) {
            (Shape::Object(link), Value::Object(object)) => self.object(link.get(), object),
            (Shape::List(of) | Shape::Items(of), Value::Array(items)) => {
                for (index, item) in items.iter_mut().enumerate() {
                    let path = self.path.len();
                    self.path.push_str(&["[", &index.to_string(), "]"].concat());
                    self.item(of, item);
                    self.path.truncate(path);
                }
            }
            (Shape::Map(of), Value::Object(map)) => {
                for (key, item) in map.iter_mut() {
                    let path = self.path.len();
                    self.path.push('.');
                    self.path.push_str(key);
                    self.item(of, item);
                    self.path.truncate(path);
                }
            }
            (Shape::SchemaOrArray | Shape::SchemaOrBool | Shape::SchemaOrStrings, _) => {
                self.json_schema(value);
            }
            _ if self.mode == Mode::Prune || schema.checks.is_some() => {}
            (shape, _) => self.scalar(shape, value),
        }
    }

    /// An item of a list or map: Go has no place for "nothing" there, so null is the empty value.
    fn item(&mut self, of: &Schema, item: &mut Value) {
        if item.is_null() && self.mode == Mode::Decode && of.checks.is_none() && !of.nullable {
            *item = empty(&of.shape);
        }
        self.value(of, item);
    }

    fn json_schema(&mut self, value: &mut Value) {
        let Some(link) = table::link("apiextensions.JSONSchemaProps") else { return };
        match value {
            Value::Object(object) => self.object(link.get(), object),
            Value::Array(items) => {
                for item in items {
                    if let Value::Object(object) = item {
                        self.object(link.get(), object);
                    }
                }
            }
            _ => {}
        }
    }

    fn scalar(&mut self, shape: &Shape, value: &mut Value) {
        match decode_scalar(shape, value) {
            Ok(None) => {}
            Ok(Some(canonical)) => *value = canonical,
            Err(Misfit::Kind(found)) => {
                let place = match self.fields.as_str() {
                    "" => "value".to_owned(),
                    fields => format!("struct field {}.{fields}", self.owner),
                };
                let wanted = go_type(shape);
                self.found
                    .errors
                    .push(format!("json: cannot unmarshal {found} into Go {place} of type {wanted}"));
            }
            Err(Misfit::Text(text)) => self.found.errors.push(text),
        }
    }

    fn enter(&mut self, name: &str) {
        for path in [&mut self.path, &mut self.fields] {
            if !path.is_empty() {
                path.push('.');
            }
            path.push_str(name);
        }
    }

    fn path_to(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

/// Why a scalar does not fit.
enum Misfit {
    /// It is of this kind of JSON.
    Kind(String),
    /// A parser of its own says so.
    Text(String),
}

/// Checks a scalar; returns its canonical form where that differs.
fn decode_scalar(shape: &Shape, value: &Value) -> Result<Option<Value>, Misfit> {
    let kind = || Misfit::Kind(go_kind(value).to_owned());
    match shape {
        Shape::String => value.as_str().map(|_| None).ok_or_else(kind),
        Shape::Bool => value.as_bool().map(|_| None).ok_or_else(kind),
        Shape::Double => value.as_f64().map(|_| None).ok_or_else(kind),
        Shape::Int32 | Shape::Int64 => decode_integer(shape, value).map(|()| None),
        Shape::Quantity => {
            let text = match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            match Quantity::canonical(&text) {
                Ok(canonical) if value.as_str() == Some(canonical.as_str()) => Ok(None),
                Ok(canonical) => Ok(Some(Value::String(canonical))),
                Err(error) => Err(Misfit::Text(error.to_string())),
            }
        }
        Shape::Time | Shape::MicroTime => {
            let text = value.as_str().ok_or_else(|| go_value(value, "string"))?;
            let canonical = match shape {
                Shape::Time => time::canonical(text),
                _ => time::canonical_micro(text),
            };
            canonical
                .map(|canonical| (canonical != text).then_some(Value::String(canonical)))
                .map_err(|error| Misfit::Text(error.to_string()))
        }
        Shape::IntOrString => match value {
            Value::String(_) => Ok(None),
            other => decode_integer(&Shape::Int32, other).map(|()| None).map_err(|misfit| match misfit {
                Misfit::Kind(found) => {
                    Misfit::Text(format!("json: cannot unmarshal {found} into Go value of type int32"))
                }
                text @ Misfit::Text(_) => text,
            }),
        },
        Shape::Bytes => {
            let text = value.as_str().ok_or_else(kind)?;
            match BASE64.decode(text) {
                Ok(_) => Ok(None),
                Err(error) => Err(Misfit::Text(illegal_base64(text, &error))),
            }
        }
        Shape::Object(_) | Shape::List(_) | Shape::Items(_) | Shape::Map(_) => Err(kind()),
        Shape::Duration
        | Shape::RawExtension
        | Shape::Fields
        | Shape::Any
        | Shape::SchemaOrArray
        | Shape::SchemaOrBool
        | Shape::SchemaOrStrings => Ok(None),
    }
}

fn decode_integer(shape: &Shape, value: &Value) -> Result<(), Misfit> {
    let fits = match shape {
        Shape::Int32 => value.as_i64().is_some_and(|number| i32::try_from(number).is_ok()),
        _ => value.as_i64().is_some(),
    };
    match value {
        _ if fits => Ok(()),
        Value::Number(number) => Err(Misfit::Kind(format!("number {number}"))),
        other => Err(Misfit::Kind(go_kind(other).to_owned())),
    }
}

fn go_value(value: &Value, wanted: &str) -> Misfit {
    Misfit::Text(format!("json: cannot unmarshal {} into Go value of type {wanted}", go_kind(value)))
}

fn illegal_base64(text: &str, error: &base64::DecodeError) -> String {
    let at = match error {
        base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => *at,
        _ => text.len() / 4 * 4,
    };
    format!("illegal base64 data at input byte {at}")
}

fn go_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn go_type(shape: &Shape) -> String {
    match shape {
        Shape::String => "string".to_owned(),
        Shape::Int32 => "int32".to_owned(),
        Shape::Int64 => "int64".to_owned(),
        Shape::Bool => "bool".to_owned(),
        Shape::Double => "float64".to_owned(),
        Shape::Bytes => "[]uint8".to_owned(),
        Shape::Quantity => "resource.Quantity".to_owned(),
        Shape::Object(link) => link.get().go_name(),
        Shape::List(of) | Shape::Items(of) => format!("[]{}", go_type(&of.shape)),
        Shape::Map(of) => format!("map[string]{}", go_type(&of.shape)),
        _ => "interface {}".to_owned(),
    }
}

/// Leaves out what Go leaves out, and puts in what Go always writes.
fn settle(type_: &Type, object: &mut Map<String, Value>) {
    object.retain(|name, value| match type_.field(name) {
        // That these are empty, and not absent, means that a client takes all owners away.
        Some(field) if field.name == "managedFields" && value.is_array() => true,
        Some(field) => field.always || !(value.is_null() || (!field.pointer && is_empty(field, value))),
        None => true,
    });
    for field in type_.fields.iter().filter(|field| field.always) {
        match object.get_mut(field.name.as_ref()) {
            Some(Value::Null) | None => {
                object.insert(field.name.to_string(), absent(field));
            }
            Some(_) => {}
        }
    }
}

fn is_empty(field: &Field, value: &Value) -> bool {
    match (&field.schema.shape, value) {
        (Shape::Any | Shape::RawExtension | Shape::Fields, value) => value.is_null(),
        (_, Value::Null) => true,
        (_, Value::Bool(set)) => !set,
        (Shape::IntOrString, _) => false,
        (_, Value::Number(number)) => number.as_f64() == Some(0.0),
        (_, Value::String(text)) => text.is_empty(),
        (_, Value::Array(items)) => items.is_empty(),
        (_, Value::Object(map)) => map.is_empty(),
    }
}

fn absent(field: &Field) -> Value {
    if field.pointer { Value::Null } else { empty(&field.schema.shape) }
}

/// The empty value of a shape as Go writes it.
fn empty(shape: &Shape) -> Value {
    match shape {
        Shape::String => Value::from(""),
        Shape::Int32 | Shape::Int64 | Shape::Double | Shape::IntOrString => Value::from(0),
        Shape::Bool => Value::from(false),
        Shape::Quantity => Value::from("0"),
        Shape::Duration => Value::from("0s"),
        Shape::Object(link) => {
            let mut object = Map::new();
            settle(link.get(), &mut object);
            Value::Object(object)
        }
        _ => Value::Null,
    }
}
