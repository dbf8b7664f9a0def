//! What fields a type has: one structure for the built-in kinds and for custom resources.
//!
//! The built-in kinds come from a compact table ([`built_in`]), custom resources from their structural schemas
//! ([`from_openapi`]). Strict decoding, protobuf, strategic merge, server-side apply and OpenAPI are driven by it.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::Value;

mod decode;
mod description;
pub mod json;
pub mod protobuf;
mod structural;
mod table;
pub mod time;
mod validate;

pub use decode::{Decoded, decode, prune};
pub use description::{describe_field, describe_type};
pub use structural::{apply_defaults, from_openapi};
pub use table::{built_in, built_in_kinds, built_in_type};
pub use validate::{validate, validate_update};

/// A type: an object with named fields.
#[derive(Debug, Clone, Default)]
pub struct Type {
    /// `core.PodSpec` for a built-in type; empty for an anonymous one.
    pub name: Cow<'static, str>,
    /// The JSON fields by name, sorted; fields of inlined types are among them.
    pub fields: Vec<Field>,
    /// How the fields lie in protobuf messages, by number; empty for custom resources.
    pub wire: Vec<Wire>,
    /// The object is owned and replaced as a whole.
    pub atomic: bool,
    /// Fields that are not declared are kept.
    pub preserve_unknown: bool,
    /// Values are kept as they came (custom resources) instead of as Go's types would hold them.
    pub unstructured: bool,
    /// What an object of the type must satisfy beyond that; set at the root of a custom resource.
    pub checks: Option<Box<Checks>>,
}

/// One field of a [`Type`].
#[derive(Debug, Clone)]
pub struct Field {
    /// The field's name in JSON, which is also its name in field paths and in `managedFields`.
    pub name: Cow<'static, str>,
    /// The protobuf number; 0 when the field is not on the wire.
    pub number: u32,
    /// Absent and empty are different things.
    pub pointer: bool,
    /// JSON has the field even when it is empty.
    pub always: bool,
    /// OpenAPI lists the field as required.
    pub required: bool,
    /// How a strategic merge patch treats it.
    pub patch: Patch,
    /// What values it takes.
    pub schema: Schema,
}

/// What values a place in an object takes.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    /// The form of the value.
    pub shape: Shape,
    /// Who owns what in a list.
    pub list: ListType,
    /// A map or object that is owned and replaced as a whole.
    pub atomic: bool,
    /// Owned field by field here, though its type is owned as a whole elsewhere.
    pub granular: bool,
    /// `null` is a value of its own.
    pub nullable: bool,
    /// The value taken when there is none.
    pub default: Option<Value>,
    /// What values must satisfy beyond their shape (custom resources).
    pub checks: Option<Box<Checks>>,
}

/// The form of a value.
#[derive(Debug, Clone, Default)]
pub enum Shape {
    /// The value is text, a JSON string.
    String,
    /// The value is an integer that fits into 32 bits with its sign.
    Int32,
    /// The value is an integer that fits into 64 bits with its sign.
    Int64,
    /// The value is true or false.
    Bool,
    /// The value is a number of double precision; in JSON it may be written as an integer.
    Double,
    /// Bytes, base64 in JSON.
    Bytes,
    /// A quantity such as `10Gi`.
    Quantity,
    /// A time in whole seconds.
    Time,
    /// A time in microseconds.
    MicroTime,
    /// A duration as Go writes it.
    Duration,
    /// An integer or text.
    IntOrString,
    /// An embedded object of any kind.
    RawExtension,
    /// A set of fields, as `managedFields` has it.
    Fields,
    /// Any JSON at all.
    #[default]
    Any,
    /// A JSON schema, or a list of them.
    SchemaOrArray,
    /// A JSON schema, or true or false.
    SchemaOrBool,
    /// A JSON schema, or a list of names.
    SchemaOrStrings,
    /// An object with named fields.
    Object(Link),
    /// The value is a JSON array whose items all have this schema.
    List(Box<Schema>),
    /// A list that protobuf wraps in a message of its own.
    Items(Box<Schema>),
    /// An object with any keys and values of one schema.
    Map(Box<Schema>),
}

/// A reference to a type; built-in types refer to each other in circles, hence by number.
#[derive(Debug, Clone)]
pub enum Link {
    /// A type of the built-in table.
    BuiltIn(usize),
    /// A type of a custom resource.
    Owned(Arc<Type>),
}

/// Who owns what in a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ListType {
    /// One owner for the whole list.
    #[default]
    Atomic,
    /// An owner per value.
    Set,
    /// An owner per item, and the items told apart by these fields.
    Map(Vec<Cow<'static, str>>),
}

/// How a strategic merge patch treats a field.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Patch {
    /// Lists are merged instead of replaced.
    pub merge: bool,
    /// The field by which the items of a merged list are told apart; `None`: they are scalars.
    pub key: Option<Cow<'static, str>>,
    /// A patch may name the only keys to keep.
    pub retain_keys: bool,
}

/// Where a part of a protobuf message goes in JSON.
#[derive(Debug, Clone)]
pub struct Wire {
    /// The number of the part in the protobuf message.
    pub number: u32,
    /// The place in JSON.
    pub place: JsonLocation,
}

/// The place of a part of a protobuf message in JSON.
#[derive(Debug, Clone)]
pub enum JsonLocation {
    /// The field at this index of [`Type::fields`].
    Field(usize),
    /// A message whose fields stand in the same JSON object.
    Inline(Link),
}

/// What values must satisfy beyond their shape, in the words of OpenAPI.
#[derive(Debug, Clone, Default)]
pub struct Checks {
    /// The `type` keyword; empty when any type will do.
    pub kind: String,
    /// The `format` keyword; empty when there is none. A format that is not known is not checked.
    pub format: String,
    /// The only values that are allowed (`enum`); when the list is empty, every value is.
    pub enumeration: Vec<Value>,
    /// The smallest number, and whether it is itself excluded.
    pub minimum: Option<(f64, bool)>,
    /// The largest number, and whether it is itself excluded.
    pub maximum: Option<(f64, bool)>,
    /// What a number must be a multiple of.
    pub multiple_of: Option<f64>,
    /// The least number of Unicode characters that text may have; `None` sets no limit.
    pub min_length: Option<u64>,
    /// The greatest number of Unicode characters that text may have; `None` sets no limit.
    pub max_length: Option<u64>,
    /// The least number of items that a list may have; `None` sets no limit.
    pub min_items: Option<u64>,
    /// The greatest number of items that a list may have; `None` sets no limit.
    pub max_items: Option<u64>,
    /// The least number of properties that an object may have; `None` sets no limit.
    pub min_properties: Option<u64>,
    /// The greatest number of properties that an object may have; `None` sets no limit.
    pub max_properties: Option<u64>,
    /// No two items are equal.
    pub unique_items: bool,
    /// The expression text must match.
    pub pattern: Option<regex::Regex>,
    /// The properties that must be there.
    pub required: Vec<String>,
    /// The value is an object of the API, with `apiVersion`, `kind` and `metadata`.
    pub embedded: bool,
    /// An integer or text.
    pub int_or_string: bool,
    /// All of these hold.
    pub all_of: Vec<Schema>,
    /// At least one of these holds.
    pub any_of: Vec<Schema>,
    /// Exactly one of these holds.
    pub one_of: Vec<Schema>,
    /// This does not hold.
    pub not: Option<Schema>,
}

impl Type {
    /// The field of this JSON name.
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields
            .binary_search_by(|field| field.name.as_ref().cmp(name))
            .ok()
            .and_then(|index| self.fields.get(index))
    }

    /// The field at a dotted path such as `spec.template.spec`, passing through lists and maps.
    pub fn at(&self, path: &str) -> Option<&Field> {
        let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
        let field = self.field(first)?;
        match rest {
            None => Some(field),
            Some(rest) => field.schema.object()?.at(rest),
        }
    }

    /// The field's name as Go names the type in messages: `v1.PodSpec`.
    pub fn go_name(&self) -> String {
        format!("v1.{}", self.short_name())
    }

    /// The name without its group: `PodSpec`.
    pub fn short_name(&self) -> &str {
        self.name.rsplit('.').next().unwrap_or_default()
    }
}

impl Schema {
    /// A schema of this shape and nothing more.
    pub fn of(shape: Shape) -> Self {
        Self { shape, ..Self::default() }
    }

    /// The type of the object this is, or of the objects in this list or map.
    pub fn object(&self) -> Option<&Type> {
        match &self.shape {
            Shape::Object(link) => Some(link.get()),
            Shape::List(of) | Shape::Items(of) | Shape::Map(of) => of.object(),
            _ => None,
        }
    }

    /// Whether an object or map is owned and replaced as a whole.
    pub fn is_atomic(&self) -> bool {
        match &self.shape {
            Shape::Object(link) => self.atomic || (link.get().atomic && !self.granular),
            Shape::Map(_) => self.atomic,
            Shape::List(_) | Shape::Items(_) => self.list == ListType::Atomic,
            _ => true,
        }
    }
}

impl Link {
    /// The type referred to.
    pub fn get(&self) -> &Type {
        match self {
            Self::BuiltIn(index) => table::by_index(*index),
            Self::Owned(owned) => owned,
        }
    }
}

impl From<Type> for Link {
    fn from(owned: Type) -> Self {
        Self::Owned(Arc::new(owned))
    }
}

#[cfg(test)]
mod tests;
