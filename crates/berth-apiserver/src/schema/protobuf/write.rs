//! From JSON to protobuf messages, byte for byte as Go's types write them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_core::Quantity;
use serde_json::Value;

use super::wire::{put_bytes, put_double, put_integer};
use super::{Error, json_schema};
use crate::schema::{Field, JsonLocation, Schema, Shape, Type, time};

const NOTHING: &Value = &Value::Null;

/// Writes an object's fields, in the order of their numbers.
pub(super) fn message(type_: &Type, object: &Value, out: &mut Vec<u8>) -> Result<(), Error> {
    for wire in &type_.wire {
        match &wire.place {
            JsonLocation::Inline(link) => {
                let mut inner = Vec::new();
                message(link.get(), object, &mut inner)?;
                put_bytes(out, wire.number, &inner);
            }
            JsonLocation::Field(index) => {
                let field = &type_.fields[*index];
                let value = object.get(field.name.as_ref()).unwrap_or(NOTHING);
                if !value.is_null() || is_always_written(field) {
                    put(&field.schema, field.name.as_ref(), wire.number, value, out)?;
                }
            }
        }
    }
    Ok(())
}

fn is_always_written(field: &Field) -> bool {
    let optional =
        matches!(field.schema.shape, Shape::List(_) | Shape::Map(_) | Shape::Items(_) | Shape::Bytes);
    !field.pointer && !optional
}

fn put(schema: &Schema, name: &str, number: u32, value: &Value, out: &mut Vec<u8>) -> Result<(), Error> {
    let wrong = || Error::Value(name.to_owned());
    match &schema.shape {
        Shape::List(of) => {
            for item in value.as_array().ok_or_else(wrong)? {
                put(of, name, number, item, out)?;
            }
        }
        Shape::Map(of) => {
            for (key, item) in value.as_object().ok_or_else(wrong)? {
                let mut entry = Vec::new();
                put_bytes(&mut entry, 1, key.as_bytes());
                put(of, name, 2, item, &mut entry)?;
                put_bytes(out, number, &entry);
            }
        }
        Shape::String => put_bytes(out, number, text(value).ok_or_else(wrong)?.as_bytes()),
        Shape::Bytes if value.is_null() => {}
        Shape::Bytes => {
            let bytes = BASE64.decode(text(value).ok_or_else(wrong)?).map_err(|_| wrong())?;
            put_bytes(out, number, &bytes);
        }
        Shape::Int32 | Shape::Int64 => {
            let integer = if value.is_null() { Some(0) } else { value.as_i64() };
            put_integer(out, number, integer.ok_or_else(wrong)?.cast_unsigned());
        }
        Shape::Bool => put_integer(out, number, u64::from(value.as_bool().unwrap_or_default())),
        Shape::Double => put_double(out, number, value.as_f64().unwrap_or_default()),
        _ => {
            let mut inner = Vec::new();
            compound(schema, name, value, &mut inner)?;
            put_bytes(out, number, &inner);
        }
    }
    Ok(())
}

/// The content of what has a message of its own on the wire.
fn compound(schema: &Schema, name: &str, value: &Value, out: &mut Vec<u8>) -> Result<(), Error> {
    let wrong = || Error::Value(name.to_owned());
    match &schema.shape {
        Shape::Object(link) => message(link.get(), value, out)?,
        Shape::Items(of) => {
            for item in value.as_array().into_iter().flatten() {
                put(of, name, 1, item, out)?;
            }
        }
        Shape::Quantity => {
            let given = match value {
                Value::Null => "0".to_owned(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let canonical = Quantity::canonical(&given).map_err(|_| wrong())?;
            put_bytes(out, 1, canonical.as_bytes());
        }
        Shape::Time | Shape::MicroTime if value.is_null() => {}
        Shape::Time | Shape::MicroTime => {
            let at = value.as_str().and_then(time::parse).ok_or_else(wrong)?;
            let nanos = match schema.shape {
                Shape::MicroTime => at.subsec_nanosecond() / 1000 * 1000,
                _ => 0,
            };
            put_integer(out, 1, at.as_second().cast_unsigned());
            put_integer(out, 2, i64::from(nanos).cast_unsigned());
        }
        Shape::IntOrString => {
            put_integer(out, 1, u64::from(value.is_string()));
            put_integer(out, 2, value.as_i64().unwrap_or_default().cast_unsigned());
            put_bytes(out, 3, value.as_str().unwrap_or_default().as_bytes());
        }
        Shape::Any | Shape::RawExtension | Shape::Fields => {
            if !value.is_null() {
                put_bytes(out, 1, value.to_string().as_bytes());
            }
        }
        Shape::SchemaOrArray | Shape::SchemaOrBool | Shape::SchemaOrStrings => {
            schema_or(&schema.shape, value, out)?;
        }
        _ => return Err(wrong()),
    }
    Ok(())
}

fn schema_or(shape: &Shape, value: &Value, out: &mut Vec<u8>) -> Result<(), Error> {
    let nested = |value: &Value| {
        let mut inner = Vec::new();
        message(&json_schema(), value, &mut inner).map(|()| inner)
    };
    match (shape, value) {
        (Shape::SchemaOrBool, Value::Object(_)) => {
            put_integer(out, 1, 1);
            put_bytes(out, 2, &nested(value)?);
        }
        (Shape::SchemaOrBool, _) => put_integer(out, 1, u64::from(value == &Value::Bool(true))),
        (_, Value::Object(_)) => put_bytes(out, 1, &nested(value)?),
        (Shape::SchemaOrArray, Value::Array(items)) => {
            for item in items {
                put_bytes(out, 2, &nested(item)?);
            }
        }
        (_, Value::Array(items)) => {
            for item in items {
                put_bytes(out, 2, item.as_str().unwrap_or_default().as_bytes());
            }
        }
        _ => {}
    }
    Ok(())
}

fn text(value: &Value) -> Option<&str> {
    if value.is_null() { Some("") } else { value.as_str() }
}
