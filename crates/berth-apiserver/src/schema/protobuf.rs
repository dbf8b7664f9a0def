//! Objects of the built-in kinds as protobuf, as client-go's programs send and ask for them.
//!
//! A body is a magic number and an envelope (`runtime.Unknown`) with the kind and the object's own message. The
//! messages follow the Go types: what is no pointer there is always on the wire, even when empty, so emptiness decides
//! what JSON leaves out, exactly as in strict decoding.

use serde_json::{Map, Value, json};

use super::{Type, built_in_type};

mod read;
pub(crate) mod wire;
mod write;

use wire::{Datum, Reader, put_bytes};

/// What every protobuf body of Kubernetes begins with.
pub const MAGIC: &[u8] = b"k8s\0";

/// Messages nest no deeper than this.
const MAX_DEPTH: usize = 100;

/// Why bytes are not an object, or an object cannot become bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The body does not begin as Kubernetes' protobuf does.
    #[error("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")]
    Magic,
    /// The bytes end in the middle of something.
    #[error("unexpected EOF")]
    Truncated,
    /// A number is longer than 64 bits.
    #[error("proto: integer overflow")]
    Overflow,
    /// A tag that cannot be.
    #[error("proto: illegal tag {0}")]
    Tag(u64),
    /// A field's content is of another kind than its type says.
    #[error("proto: wrong wire type for field {0}")]
    WireType(String),
    /// Text that is not UTF-8.
    #[error("proto: field {0} contains invalid UTF-8")]
    Utf8(String),
    /// Embedded JSON that is none.
    #[error("proto: field {0} does not hold JSON")]
    Json(String),
    /// Messages nest too deeply.
    #[error("proto: messages nest too deeply")]
    Depth,
    /// The envelope holds something other than a plain object.
    #[error("unsupported content encoding or type in the envelope")]
    Content,
    /// A value does not fit its field.
    #[error("the value of field {0} does not fit its type")]
    Value(String),
}

/// An object's message with its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// The group and version: `storage.k8s.io/v1`.
    pub api_version: String,
    /// The kind of the object, such as `StorageClass`.
    pub kind: String,
    /// The object's own message.
    pub message: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Reads the envelope of a request's or answer's body; the object's message is left as it is. A body that does not
    /// begin with Kubernetes' magic bytes is [`Error::Magic`].
    pub fn open(body: &'a [u8]) -> Result<Self, Error> {
        let mut fields = Reader::new(body.strip_prefix(MAGIC).ok_or(Error::Magic)?);
        let mut envelope = Self { api_version: String::new(), kind: String::new(), message: &[] };
        while let Some((number, datum)) = fields.next()? {
            match (number, datum) {
                (1, Datum::Bytes(type_meta)) => {
                    let mut names = Reader::new(type_meta);
                    while let Some((number, datum)) = names.next()? {
                        let Datum::Bytes(name) = datum else { continue };
                        let name = String::from_utf8(name.to_vec())
                            .map_err(|_| Error::Utf8("typeMeta".to_owned()))?;
                        match number {
                            1 => envelope.api_version = name,
                            2 => envelope.kind = name,
                            _ => {}
                        }
                    }
                }
                (2, Datum::Bytes(message)) => envelope.message = message,
                (3 | 4, Datum::Bytes(content)) if !content.is_empty() => return Err(Error::Content),
                _ => {}
            }
        }
        Ok(envelope)
    }

    /// The bytes of a body with this envelope: what [`Self::open`] reads.
    pub fn seal(&self) -> Vec<u8> {
        let mut type_meta = Vec::new();
        put_bytes(&mut type_meta, 1, self.api_version.as_bytes());
        put_bytes(&mut type_meta, 2, self.kind.as_bytes());
        let mut body = MAGIC.to_vec();
        put_bytes(&mut body, 1, &type_meta);
        put_bytes(&mut body, 2, self.message);
        put_bytes(&mut body, 3, &[]);
        put_bytes(&mut body, 4, &[]);
        body
    }
}

/// Reads an object from a body; its `apiVersion` and `kind` are the envelope's.
pub fn decode(type_: &Type, body: &[u8]) -> Result<Value, Error> {
    let envelope = Envelope::open(body)?;
    let mut value = decode_message(type_, envelope.message)?;
    for (name, text) in [("apiVersion", envelope.api_version), ("kind", envelope.kind)] {
        if !text.is_empty() {
            value[name] = Value::String(text);
        }
    }
    Ok(value)
}

/// Writes an object as a body; the envelope's kind is the object's own.
pub fn encode(type_: &Type, value: &Value) -> Result<Vec<u8>, Error> {
    let message = encode_message(type_, value)?;
    Ok(enclose(value, &message))
}

/// Writes a list of objects of this type as a body.
pub fn encode_list(item: &Type, list: &Value) -> Result<Vec<u8>, Error> {
    let meta = built_in_type("meta.ListMeta").unwrap_or_default();
    let mut message = Vec::new();
    put_bytes(&mut message, 1, &encode_message(&meta, list.get("metadata").unwrap_or(&json!({})))?);
    for object in list["items"].as_array().into_iter().flatten() {
        put_bytes(&mut message, 2, &encode_message(item, object)?);
    }
    Ok(enclose(list, &message))
}

/// Reads an object from its own message, without an envelope.
pub fn decode_message(type_: &Type, message: &[u8]) -> Result<Value, Error> {
    let mut object = Map::new();
    read::message(type_, message, &mut object, 0)?;
    let mut value = Value::Object(object);
    match super::decode(type_, &mut value).errors.into_iter().next() {
        Some(error) => Err(Error::Value(error)),
        None => Ok(value),
    }
}

/// Writes an object's own message, without an envelope.
pub fn encode_message(type_: &Type, value: &Value) -> Result<Vec<u8>, Error> {
    let mut message = Vec::new();
    write::message(type_, value, &mut message)?;
    Ok(message)
}

fn enclose(value: &Value, message: &[u8]) -> Vec<u8> {
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    Envelope { api_version: text("apiVersion"), kind: text("kind"), message }.seal()
}

/// The type of JSON schemas, which custom resource definitions hold in several guises.
fn json_schema() -> std::sync::Arc<Type> {
    built_in_type("apiextensions.JSONSchemaProps").unwrap_or_default()
}
