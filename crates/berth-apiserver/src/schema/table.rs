//! The table of the built-in types: `kubernetes.types`, parsed once, on first use.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use serde_json::Value;

use super::{Field, JsonLocation, Link, ListType, Patch, Schema, Shape, Type, Wire};

const TEXT: &str = include_str!("kubernetes.types");

static TABLE: LazyLock<Table> = LazyLock::new(|| Table::parse(TEXT));

/// The types, and which of them are kinds.
struct Table {
    types: Vec<Arc<Type>>,
    names: HashMap<&'static str, usize>,
    kinds: Vec<Kind>,
}

struct Kind {
    group: &'static str,
    version: &'static str,
    name: &'static str,
    index: usize,
}

/// The type of a built-in kind; the core group is empty.
pub fn built_in(group: &str, version: &str, kind: &str) -> Option<Arc<Type>> {
    let found = TABLE.kinds.iter().find(|k| k.name == kind && k.group == group && k.version == version)?;
    TABLE.types.get(found.index).cloned()
}

/// A built-in type by its name in the table, such as `meta.ObjectMeta`.
pub fn built_in_type(name: &str) -> Option<Arc<Type>> {
    TABLE.names.get(name).and_then(|index| TABLE.types.get(*index)).cloned()
}

/// All built-in kinds: group, version, kind and type.
pub fn built_in_kinds() -> impl Iterator<Item = (&'static str, &'static str, &'static str, Arc<Type>)> {
    TABLE.kinds.iter().map(|k| (k.group, k.version, k.name, TABLE.types[k.index].clone()))
}

pub(super) fn by_index(index: usize) -> &'static Type {
    &TABLE.types[index]
}

/// The link to a built-in type, by its name in the table.
pub(super) fn link(name: &str) -> Option<Link> {
    TABLE.names.get(name).copied().map(Link::BuiltIn)
}

/// A type as it stands in the text.
struct Draft {
    name: &'static str,
    atomic: bool,
    fields: Vec<(Field, bool)>,
}

impl Table {
    /// Reads the table. The text is part of the program and compared with its origin by a test, so a line that
    /// cannot be read is a mistake of ours.
    fn parse(text: &'static str) -> Self {
        let names: HashMap<&'static str, usize> = text
            .lines()
            .filter_map(|line| line.strip_prefix("type "))
            .map(|rest| rest.split(' ').next().unwrap_or(rest))
            .enumerate()
            .map(|(index, name)| (name, index))
            .collect();
        let mut drafts: Vec<Draft> = Vec::with_capacity(names.len());
        let mut kinds = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let mut words = line.split_ascii_whitespace();
            if line.starts_with("kind ") {
                kinds.extend(parse_kind(words.skip(1), &names));
            } else if line.starts_with("type ") {
                let name = words.nth(1).unwrap_or_default();
                drafts.push(Draft { name, atomic: words.next() == Some("atomic"), fields: Vec::new() });
            } else if let (Some(draft), Some(parsed)) = (drafts.last_mut(), parse_field(words, &names)) {
                draft.fields.push(parsed);
            }
        }
        let types = (0..drafts.len())
            .map(|index| {
                let is_kind = kinds.iter().any(|kind: &Kind| kind.index == index);
                Arc::new(assemble(&drafts, index, is_kind))
            })
            .collect();
        Self { types, names, kinds }
    }
}

fn parse_kind(
    mut words: impl Iterator<Item = &'static str>,
    names: &HashMap<&'static str, usize>,
) -> Option<Kind> {
    let api_version = words.next()?;
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    Some(Kind { group, version, name: words.next()?, index: *names.get(words.next()?)? })
}

fn parse_field(
    mut words: impl Iterator<Item = &'static str>,
    names: &HashMap<&'static str, usize>,
) -> Option<(Field, bool)> {
    let name = Cow::Borrowed(words.next()?);
    let number = words.next()?.parse().ok()?;
    let schema = Schema::of(parse_shape(words.next()?, names)?);
    let mut field = Field {
        name,
        number,
        pointer: false,
        always: false,
        required: false,
        patch: Patch::default(),
        schema,
    };
    let mut inline = false;
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("pointer", _) => field.pointer = true,
            ("always", _) => field.always = true,
            ("required", _) => field.required = true,
            ("atomic", _) => field.schema.atomic = true,
            ("granular", _) => field.schema.granular = true,
            ("inline", _) => inline = true,
            ("list", kind) => field.schema.list = parse_list(kind),
            ("patch", strategy) => field.patch = parse_patch(strategy),
            ("default", value) => field.schema.default = parse_default(&field.schema.shape, value),
            _ => return None,
        }
    }
    Some((field, inline))
}

fn parse_default(shape: &Shape, text: &'static str) -> Option<Value> {
    match shape {
        Shape::Int32 | Shape::Int64 => text.parse::<i64>().ok().map(Value::from),
        _ => Some(Value::from(text)),
    }
}

fn parse_list(kind: &'static str) -> ListType {
    match kind.split_once(':') {
        Some((_, keys)) => ListType::Map(keys.split(',').map(Cow::Borrowed).collect()),
        None if kind == "set" => ListType::Set,
        None => ListType::Atomic,
    }
}

fn parse_patch(strategy: &'static str) -> Patch {
    let (strategies, key) = strategy.split_once(':').map_or((strategy, None), |(s, key)| (s, Some(key)));
    Patch {
        merge: strategies.split(',').any(|s| s == "merge"),
        key: key.map(Cow::Borrowed),
        retain_keys: strategies.split(',').any(|s| s == "retainKeys"),
    }
}

fn parse_shape(word: &'static str, names: &HashMap<&'static str, usize>) -> Option<Shape> {
    let of = |rest| Some(Box::new(Schema::of(parse_shape(rest, names)?)));
    if let Some(rest) = word.strip_prefix("[]") {
        return Some(Shape::List(of(rest)?));
    }
    if let Some(rest) = word.strip_prefix("items:") {
        return Some(Shape::Items(of(rest)?));
    }
    if let Some(rest) = word.strip_prefix("map:") {
        return Some(Shape::Map(of(rest)?));
    }
    Some(match word {
        "string" => Shape::String,
        "int32" => Shape::Int32,
        "int64" => Shape::Int64,
        "bool" => Shape::Bool,
        "double" => Shape::Double,
        "bytes" => Shape::Bytes,
        "quantity" => Shape::Quantity,
        "time" => Shape::Time,
        "microtime" => Shape::MicroTime,
        "duration" => Shape::Duration,
        "intOrString" => Shape::IntOrString,
        "rawExtension" => Shape::RawExtension,
        "fields" => Shape::Fields,
        "json" => Shape::Any,
        "schemaOrArray" => Shape::SchemaOrArray,
        "schemaOrBool" => Shape::SchemaOrBool,
        "schemaOrStrings" => Shape::SchemaOrStrings,
        name => Shape::Object(Link::BuiltIn(*names.get(name)?)),
    })
}

/// Puts a type together: inlined fields join its own, and both are found by name and by number.
fn assemble(drafts: &[Draft], index: usize, is_kind: bool) -> Type {
    let draft = &drafts[index];
    let mut fields = Vec::with_capacity(draft.fields.len() + 2);
    let mut wire = Vec::new();
    let mut own = Vec::new();
    for (field, inline) in &draft.fields {
        match &field.schema.shape {
            Shape::Object(Link::BuiltIn(target)) if *inline => {
                let flat = assemble(drafts, *target, false);
                fields.extend(flat.fields);
                if field.number > 0 {
                    wire.push(Wire {
                        number: field.number,
                        place: JsonLocation::Inline(Link::BuiltIn(*target)),
                    });
                }
            }
            _ => {
                own.push((field.number, field.name.clone()));
                fields.push(field.clone());
            }
        }
    }
    if is_kind {
        fields.extend(["apiVersion", "kind"].map(|name| Field {
            name: Cow::Borrowed(name),
            number: 0,
            pointer: false,
            always: false,
            required: false,
            patch: Patch::default(),
            schema: Schema::of(Shape::String),
        }));
    }
    fields.sort_by(|a, b| a.name.cmp(&b.name));
    // A kind that describes another object has fields of these names itself.
    fields.dedup_by(|a, b| a.name == b.name);
    let place = |name: &str| fields.binary_search_by(|f: &Field| f.name.as_ref().cmp(name)).ok();
    wire.extend(own.iter().filter(|(number, _)| *number > 0).filter_map(|(number, name)| {
        Some(Wire { number: *number, place: JsonLocation::Field(place(name)?) })
    }));
    wire.sort_by_key(|wire| wire.number);
    Type { name: Cow::Borrowed(draft.name), fields, wire, atomic: draft.atomic, ..Type::default() }
}

#[cfg(test)]
pub(super) fn unread_lines() -> Vec<&'static str> {
    let table = &*TABLE;
    TEXT.lines()
        .filter(|line| line.starts_with("  "))
        .filter(|line| parse_field(line.split_ascii_whitespace(), &table.names).is_none())
        .collect()
}
