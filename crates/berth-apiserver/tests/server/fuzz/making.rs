//! Random values: such as fit a type, such as nearly do, and such as fit nothing.

use std::sync::Arc;

use berth_apiserver::schema::{self, Schema, Shape, Type};
use serde_json::{Map, Value, json};

use crate::kubernetes::random::Random;

/// Names that mean something somewhere.
const NAMES: &[&str] = &[
    "metadata",
    "name",
    "namespace",
    "labels",
    "annotations",
    "finalizers",
    "managedFields",
    "fieldsV1",
    "f:metadata",
    "k:{\"name\":\"a\"}",
    "v:\"a\"",
    ".",
    "spec",
    "status",
    "containers",
    "volumes",
    "conditions",
    "type",
    "$patch",
    "$retainKeys",
    "$setElementOrder/containers",
    "$deleteFromPrimitiveList/finalizers",
    "a",
    "b",
    "",
    "a/b",
    "~",
    "0",
    "-",
    "é",
];

const TEXTS: &[&str] = &[
    "",
    "a",
    "b",
    "delete",
    "replace",
    "merge",
    "1Gi",
    "-1",
    "1e400",
    "0.000000001n",
    "2026-01-01T00:00:00Z",
    "v1",
    "Pod",
    "\u{0}",
    "😀",
    "a.b/c",
    "ReadWriteOnce",
    "kubernetes.io/pvc-protection",
    "Apply",
    "Update",
];

/// The built-in type of a random kind, with its group and version, and kind.
pub(crate) fn kind(random: &mut Random) -> (String, &'static str, Arc<Type>) {
    let kinds: Vec<_> = schema::built_in_kinds().collect();
    let (group, version, kind, type_) = random.pick(&kinds).clone();
    let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    (api_version, kind, type_)
}

/// A random JSON value of any type, nested at most `depth` levels deep.
pub(crate) fn any(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 6 } else { 8 }) {
        0 => Value::Null,
        1 => json!(random.once_in(2)),
        2 => json!(i64::try_from(random.below(100)).unwrap() - 50),
        3 => [json!(i64::MAX), json!(i64::MIN), json!(u64::MAX), json!(1.5e300), json!(-0.0)]
            [random.below(5)]
        .clone(),
        4 | 5 => json!(random.pick(TEXTS)),
        6 => (0..random.below(4)).map(|_| any(random, depth - 1)).collect(),
        _ => {
            let field = |random: &mut Random| ((*random.pick(NAMES)).to_owned(), any(random, depth - 1));
            Value::Object((0..random.below(5)).map(|_| field(random)).collect())
        }
    }
}

/// An object of a type, with some of its fields; here and there something else than it should be.
pub(crate) fn object(random: &mut Random, type_: &Type, depth: usize) -> Value {
    let mut fields = Map::new();
    let wanted = if type_.fields.len() < 8 { 2 } else { 1 + type_.fields.len() / 5 };
    for field in &type_.fields {
        if random.once_in(wanted) {
            fields.insert(field.name.to_string(), value(random, &field.schema, depth));
        }
    }
    if random.once_in(20) {
        fields.insert((*random.pick(NAMES)).to_owned(), any(random, 2));
    }
    Value::Object(fields)
}

fn value(random: &mut Random, schema: &Schema, depth: usize) -> Value {
    if random.once_in(60) {
        return any(random, 3);
    }
    let several = if depth == 0 { 0 } else { random.below(3) };
    match &schema.shape {
        Shape::Int32 | Shape::Int64 | Shape::Double => json!(random.below(100)),
        Shape::Bool => json!(random.once_in(2)),
        Shape::Bytes => json!(*random.pick(&["", "YQ==", "not base64"])),
        Shape::Quantity => {
            json!(*random.pick(&["1", "1Gi", "0.5", "1e3", "100m", "12345678901234567890123Ei"]))
        }
        Shape::Time | Shape::MicroTime => json!(*random.pick(&["2026-01-01T00:00:00Z", "never"])),
        Shape::IntOrString => [json!(8080), json!("http"), json!("50%")][random.below(3)].clone(),
        Shape::Object(link) if depth > 0 => object(random, link.get(), depth - 1),
        Shape::List(of) | Shape::Items(of) => (0..several).map(|_| value(random, of, depth - 1)).collect(),
        Shape::Map(of) => {
            let field =
                |random: &mut Random| ((*random.pick(NAMES)).to_owned(), value(random, of, depth - 1));
            Value::Object((0..several).map(|_| field(random)).collect())
        }
        Shape::Object(_) => json!({}),
        Shape::String | Shape::Duration => json!(random.pick(TEXTS)),
        _ => any(random, depth.min(3)),
    }
}

/// An object of a random kind with a name, as a client would send it.
pub(crate) fn named(random: &mut Random) -> (Arc<Type>, Value) {
    let (api_version, kind, type_) = kind(random);
    let mut made = object(random, &type_, 6);
    made["apiVersion"] = api_version.into();
    made["kind"] = kind.into();
    if !made["metadata"].is_object() {
        made["metadata"] = json!({});
    }
    made["metadata"]["name"] = "fuzzed".into();
    (type_, made)
}

/// Bytes with some of them changed, removed, repeated or added.
pub(crate) fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(6) {
        let at = random.below(bytes.len() + 1);
        match random.below(5) {
            0 if at < bytes.len() => bytes[at] = u8::try_from(random.below(256)).unwrap(),
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 => bytes.truncate(at),
            3 => {
                let end = (at + random.below(30)).min(bytes.len());
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            _ => bytes.insert(at, *random.pick(b"{}[]\",:\\0129-eE.tfn \n\x00\x0a\xff")),
        }
    }
}
