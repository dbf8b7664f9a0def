//! The older document as protobuf, the only form in which client-go asks for it.
//!
//! kubectl checks lists of objects by it before it sends them. It holds the definitions, and of each what says how
//! values are formed; the paths are in JSON only.

use serde_json::{Map, Value};

use crate::schema::protobuf::wire::{put_bytes, put_integer};

/// Numbers of the message `Schema`; all other messages have one or two fields.
mod field {
    pub(super) const REF: u32 = 1;
    pub(super) const FORMAT: u32 = 2;
    pub(super) const DESCRIPTION: u32 = 4;
    pub(super) const REQUIRED: u32 = 19;
    pub(super) const ADDITIONAL_PROPERTIES: u32 = 21;
    pub(super) const TYPE: u32 = 22;
    pub(super) const ITEMS: u32 = 23;
    pub(super) const PROPERTIES: u32 = 25;
    pub(super) const EXTENSION: u32 = 31;
}

/// Writes the older document, given as JSON.
pub(super) fn encode(document: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    put_text(&mut out, 1, &document["swagger"]);
    put_message(&mut out, 2, |info| {
        put_text(info, 1, &document["info"]["title"]);
        put_text(info, 2, &document["info"]["version"]);
    });
    put_message(&mut out, 8, |_| {});
    put_message(&mut out, 9, |definitions| put_named(definitions, &document["definitions"]));
    out
}

fn put_message(out: &mut Vec<u8>, number: u32, write: impl FnOnce(&mut Vec<u8>)) {
    let mut message = Vec::new();
    write(&mut message);
    put_bytes(out, number, &message);
}

fn put_text(out: &mut Vec<u8>, number: u32, value: &Value) {
    if let Some(text) = value.as_str().filter(|text| !text.is_empty()) {
        put_bytes(out, number, text.as_bytes());
    }
}

/// Writes schemas with their names, which is the form of definitions and of properties alike.
fn put_named(out: &mut Vec<u8>, schemas: &Value) {
    for (name, schema) in schemas.as_object().into_iter().flatten() {
        put_message(out, 1, |named| {
            put_bytes(named, 1, name.as_bytes());
            put_message(named, 2, |out| put_schema(out, schema));
        });
    }
}

fn put_schema(out: &mut Vec<u8>, schema: &Value) {
    let Some(schema) = schema.as_object() else { return };
    // A reference with a default beside it: the older format takes the reference alone.
    if let Some([referred]) = schema.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
        return put_schema(out, referred);
    }
    let get = |name: &str| schema.get(name).unwrap_or(&Value::Null);
    put_text(out, field::REF, get("$ref"));
    put_text(out, field::DESCRIPTION, get("description"));
    if !is_open(schema) {
        put_text(out, field::FORMAT, get("format"));
        put_form(out, schema);
    }
    for (name, value) in schema.iter().filter(|(name, _)| name.starts_with("x-")) {
        put_message(out, field::EXTENSION, |named| {
            put_bytes(named, 1, name.as_bytes());
            // JSON is YAML.
            put_message(named, 2, |any| put_bytes(any, 2, value.to_string().as_bytes()));
        });
    }
}

/// Whether values may have a form that the older format has no words for.
fn is_open(schema: &Map<String, Value>) -> bool {
    ["nullable", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"]
        .iter()
        .any(|name| schema.get(*name) == Some(&Value::Bool(true)))
}

fn put_form(out: &mut Vec<u8>, schema: &Map<String, Value>) {
    for name in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
        put_text(out, field::REQUIRED, name);
    }
    match schema.get("additionalProperties") {
        Some(Value::Bool(allowed)) => {
            put_message(out, field::ADDITIONAL_PROPERTIES, |item| put_integer(item, 2, u64::from(*allowed)));
        }
        Some(of) => put_message(out, field::ADDITIONAL_PROPERTIES, |item| {
            put_message(item, 1, |out| put_schema(out, of));
        }),
        None => {}
    }
    if let Some(type_) = schema.get("type") {
        put_message(out, field::TYPE, |item| put_text(item, 1, type_));
    }
    if let Some(items) = schema.get("items") {
        put_message(out, field::ITEMS, |item| put_message(item, 1, |out| put_schema(out, items)));
    }
    if let Some(properties) = schema.get("properties") {
        put_message(out, field::PROPERTIES, |out| put_named(out, properties));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_schema_has_its_form_and_a_reference_stands_alone() {
        let mut out = Vec::new();
        put_schema(&mut out, &json!({ "type": "object", "required": ["a"], "x-k": [1] }));
        assert_eq!(
            out,
            b"\x9a\x01\x01a\xb2\x01\x08\x0a\x06object\xfa\x01\x0c\x0a\x03x-k\x12\x05\x12\x03[1]"[..]
        );
        let mut out = Vec::new();
        put_schema(&mut out, &json!({ "allOf": [{ "$ref": "#/definitions/A" }], "default": {} }));
        assert_eq!(out, b"\x0a\x0f#/definitions/A");
        let mut out = Vec::new();
        put_schema(&mut out, &json!({ "type": "string", "nullable": true }));
        assert_eq!(out, b"");
    }
}
