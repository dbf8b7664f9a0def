//! From protobuf messages to JSON.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::wire::{Datum, Reader};
use super::{Error, MAX_DEPTH, json_schema};
use crate::schema::{Field, JsonLocation, Schema, Shape, Type, time};

/// Reads a message into an object; what is not known is passed over, as Go does.
pub(super) fn message(
    type_: &Type,
    bytes: &[u8],
    object: &mut Map<String, Value>,
    depth: usize,
) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::Depth);
    }
    let mut fields = Reader::new(bytes);
    while let Some((number, datum)) = fields.next()? {
        let Ok(index) = type_.wire.binary_search_by_key(&number, |wire| wire.number) else { continue };
        match &type_.wire[index].place {
            JsonLocation::Inline(link) => {
                let Datum::Bytes(bytes) = datum else { return Err(Error::WireType(number.to_string())) };
                message(link.get(), bytes, object, depth + 1)?;
            }
            JsonLocation::Field(index) => field(&type_.fields[*index], datum, object, depth)?,
        }
    }
    Ok(())
}

fn field(
    field: &Field,
    datum: Datum<'_>,
    object: &mut Map<String, Value>,
    depth: usize,
) -> Result<(), Error> {
    let name = field.name.as_ref();
    let wrong = || Error::WireType(name.to_owned());
    match (&field.schema.shape, datum) {
        (Shape::Object(link), Datum::Bytes(bytes)) => {
            // A message that comes in several parts is the sum of them.
            let slot = object.entry(name).or_insert_with(|| json!({}));
            let Value::Object(inner) = slot else { return Err(wrong()) };
            message(link.get(), bytes, inner, depth + 1)?;
        }
        (Shape::List(of), datum) => {
            let slot = object.entry(name).or_insert_with(|| json!([]));
            let Value::Array(items) = slot else { return Err(wrong()) };
            match (&of.shape, datum) {
                (Shape::Int32 | Shape::Int64 | Shape::Bool, Datum::Bytes(packed)) => {
                    let mut packed = Reader::new(packed);
                    while !packed.is_empty() {
                        items.push(value(of, Datum::Varint(packed.varint()?), name, depth)?);
                    }
                }
                (_, datum) => items.push(value(of, datum, name, depth)?),
            }
        }
        (Shape::Map(of), Datum::Bytes(bytes)) => {
            let (key, item) = entry(of, bytes, name, depth)?;
            let slot = object.entry(name).or_insert_with(|| json!({}));
            let Value::Object(map) = slot else { return Err(wrong()) };
            map.insert(key, item);
        }
        (Shape::Map(_), _) => return Err(wrong()),
        (_, datum) => {
            object.insert(name.to_owned(), value(&field.schema, datum, name, depth)?);
        }
    }
    Ok(())
}

fn entry(of: &Schema, bytes: &[u8], name: &str, depth: usize) -> Result<(String, Value), Error> {
    let mut key = String::new();
    let mut item = Value::Null;
    let mut fields = Reader::new(bytes);
    while let Some((number, datum)) = fields.next()? {
        match (number, datum) {
            (1, Datum::Bytes(bytes)) => key = text(bytes, name)?,
            (2, datum) => item = value(of, datum, name, depth)?,
            _ => {}
        }
    }
    Ok((key, item))
}

fn value(schema: &Schema, datum: Datum<'_>, name: &str, depth: usize) -> Result<Value, Error> {
    let bytes = match (&schema.shape, datum) {
        (Shape::Bool, Datum::Varint(raw)) => return Ok(Value::from(raw != 0)),
        (Shape::Int32 | Shape::Int64, Datum::Varint(raw)) => return Ok(Value::from(raw.cast_signed())),
        (Shape::Double, Datum::Fixed64(raw)) => return Ok(Value::from(f64::from_bits(raw))),
        (Shape::Bool | Shape::Int32 | Shape::Int64 | Shape::Double, _) => {
            return Err(Error::WireType(name.to_owned()));
        }
        (_, Datum::Bytes(bytes)) => bytes,
        _ => return Err(Error::WireType(name.to_owned())),
    };
    match &schema.shape {
        Shape::String => text(bytes, name).map(Value::String),
        Shape::Bytes => Ok(Value::String(BASE64.encode(bytes))),
        Shape::Quantity => quantity(bytes, name),
        Shape::Time => Ok(timestamp(bytes, name)?.map_or(Value::Null, |at| time::write(at).into())),
        Shape::MicroTime => {
            Ok(timestamp(bytes, name)?.map_or(Value::Null, |at| time::write_micro(at).into()))
        }
        Shape::IntOrString => int_or_string(bytes, name),
        Shape::Any | Shape::RawExtension | Shape::Fields => raw(bytes, name),
        Shape::SchemaOrArray | Shape::SchemaOrBool | Shape::SchemaOrStrings => {
            schema_or(&schema.shape, bytes, name, depth)
        }
        Shape::Object(link) => {
            let mut object = Map::new();
            message(link.get(), bytes, &mut object, depth + 1)?;
            Ok(Value::Object(object))
        }
        Shape::Items(of) => {
            let mut items = Vec::new();
            let mut fields = Reader::new(bytes);
            while let Some((number, datum)) = fields.next()? {
                if number == 1 {
                    items.push(value(of, datum, name, depth)?);
                }
            }
            Ok(if items.is_empty() { Value::Null } else { Value::Array(items) })
        }
        _ => Err(Error::WireType(name.to_owned())),
    }
}

fn text(bytes: &[u8], name: &str) -> Result<String, Error> {
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::Utf8(name.to_owned()))
}

fn quantity(bytes: &[u8], name: &str) -> Result<Value, Error> {
    let mut fields = Reader::new(bytes);
    let mut found = "0".to_owned();
    while let Some((number, datum)) = fields.next()? {
        if let (1, Datum::Bytes(bytes)) = (number, datum) {
            found = text(bytes, name)?;
        }
    }
    Ok(Value::String(found))
}

/// Seconds and nanoseconds; an empty message is no time at all.
fn timestamp(bytes: &[u8], name: &str) -> Result<Option<Timestamp>, Error> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let (mut seconds, mut nanos) = (0_i64, 0_i32);
    let mut fields = Reader::new(bytes);
    while let Some((number, datum)) = fields.next()? {
        match (number, datum) {
            (1, Datum::Varint(raw)) => seconds = raw.cast_signed(),
            (2, Datum::Varint(raw)) => nanos = i32::try_from(raw.cast_signed()).unwrap_or_default(),
            _ => {}
        }
    }
    Timestamp::new(seconds, nanos).map(Some).map_err(|_| Error::Value(name.to_owned()))
}

fn int_or_string(bytes: &[u8], name: &str) -> Result<Value, Error> {
    let (mut kind, mut integer, mut words) = (0, 0_i64, String::new());
    let mut fields = Reader::new(bytes);
    while let Some((number, datum)) = fields.next()? {
        match (number, datum) {
            (1, Datum::Varint(raw)) => kind = raw,
            (2, Datum::Varint(raw)) => integer = raw.cast_signed(),
            (3, Datum::Bytes(bytes)) => words = text(bytes, name)?,
            _ => {}
        }
    }
    Ok(if kind == 1 { Value::String(words) } else { Value::from(integer) })
}

/// JSON text in the first field of a message.
fn raw(bytes: &[u8], name: &str) -> Result<Value, Error> {
    let mut fields = Reader::new(bytes);
    let mut found = Value::Null;
    while let Some((number, datum)) = fields.next()? {
        if let (1, Datum::Bytes(json)) = (number, datum) {
            found = serde_json::from_slice(json).map_err(|_| Error::Json(name.to_owned()))?;
        }
    }
    Ok(found)
}

fn schema_or(shape: &Shape, bytes: &[u8], name: &str, depth: usize) -> Result<Value, Error> {
    let type_ = json_schema();
    let nested = |bytes: &[u8]| {
        let mut object = Map::new();
        message(&type_, bytes, &mut object, depth + 1).map(|()| Value::Object(object))
    };
    let (mut schema, mut items, mut allows) = (None, Vec::new(), false);
    let mut fields = Reader::new(bytes);
    while let Some((number, datum)) = fields.next()? {
        match (shape, number, datum) {
            (Shape::SchemaOrBool, 1, Datum::Varint(raw)) => allows = raw != 0,
            (Shape::SchemaOrBool, 2, Datum::Bytes(bytes))
            | (Shape::SchemaOrArray | Shape::SchemaOrStrings, 1, Datum::Bytes(bytes)) => {
                schema = Some(nested(bytes)?);
            }
            (Shape::SchemaOrArray, 2, Datum::Bytes(bytes)) => items.push(nested(bytes)?),
            (Shape::SchemaOrStrings, 2, Datum::Bytes(bytes)) => items.push(text(bytes, name)?.into()),
            _ => {}
        }
    }
    Ok(match (shape, schema) {
        (_, Some(schema)) => schema,
        (Shape::SchemaOrBool, None) => Value::from(allows),
        (_, None) => Value::Array(items),
    })
}
