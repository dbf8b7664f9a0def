//! Objects seen through their types: which fields are set, what differs, how two are merged, what is taken out.
//!
//! The rules are those of structured merge and diff: atomic lists, maps and objects are one field, items of sets and
//! keyed lists are told apart by value or key, and everything else goes field by field.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::fields::{self, FieldSet};
use crate::schema::{ListType, Schema, Shape, Type};

mod merging;
mod validation;

pub(super) use merging::merge;
pub(super) use validation::validate;

/// What is known of a value inside free-form data: nothing.
static FREE: Schema = Schema {
    shape: Shape::Any,
    list: ListType::Atomic,
    atomic: false,
    granular: false,
    nullable: true,
    default: None,
    checks: None,
};

/// How a place's value is divided.
#[derive(Clone, Copy)]
pub(super) enum Form<'a> {
    /// The value is replaced and owned as a whole.
    Leaf,
    /// Each item of the list is compared by itself.
    List(&'a Schema, &'a ListType),
    /// Each field of the type is compared by itself.
    Object(&'a Type),
    /// Each key of the map is compared by itself.
    Map(&'a Schema),
}

impl<'a> Form<'a> {
    /// The form of a value at a place; free-form places take the form of what is there.
    pub(super) fn of(schema: &'a Schema, value: &Value) -> Self {
        match (&schema.shape, value) {
            _ if schema.is_atomic() && !is_free(&schema.shape) => Self::Leaf,
            (Shape::Object(link), Value::Object(_) | Value::Null) => Self::Object(link.get()),
            (Shape::Map(of), Value::Object(_) | Value::Null) => Self::Map(of),
            (Shape::List(of) | Shape::Items(of), Value::Array(_) | Value::Null) => {
                Self::List(of, &schema.list)
            }
            (shape, Value::Object(_)) if is_free(shape) => Self::Map(&FREE),
            _ => Self::Leaf,
        }
    }

    /// What is known of a key's value.
    fn child(self, key: &str) -> &'a Schema {
        match self {
            Self::Object(type_) => type_.field(key).map_or(&FREE, |field| &field.schema),
            Self::Map(of) => of,
            Self::List(..) | Self::Leaf => &FREE,
        }
    }

    /// Whether a key is a field the type names, rather than one of any keys.
    fn is_named(self, key: &str) -> bool {
        matches!(self, Self::Object(type_) if type_.field(key).is_some())
    }
}

fn is_free(shape: &Shape) -> bool {
    matches!(
        shape,
        Shape::Any | Shape::Fields | Shape::SchemaOrArray | Shape::SchemaOrBool | Shape::SchemaOrStrings
    )
}

/// The edge to an item of a set or keyed list, or why there is none.
pub(super) fn edge(of: &Schema, list: &ListType, item: &Value) -> Result<String, String> {
    let ListType::Map(names) = list else {
        return match item {
            Value::Object(_) => {
                Err("associative list without keys has an element that's a map type".to_owned())
            }
            Value::Array(_) => Err("not supported: associative list with lists as elements".to_owned()),
            Value::Null => {
                Err("associative list without keys has an element that's an explicit null".to_owned())
            }
            scalar => Ok(fields::value(scalar)),
        };
    };
    let Value::Object(object) = item else {
        let what = if item.is_null() { "a null element" } else { "non-map elements" };
        return Err(format!("associative list with keys may not have {what}"));
    };
    let mut keys = Map::new();
    for name in names {
        let default = || of.object()?.field(name)?.schema.default.as_ref();
        if let Some(value) = object.get(name.as_ref()).or_else(default) {
            keys.insert(name.to_string(), value.clone());
        }
    }
    if keys.is_empty() {
        let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
        return Err(format!(
            "associative list with keys has an element that omits all key fields [{}] (and doesn't have default values \
             for any key fields)",
            names.join(" ")
        ));
    }
    Ok(fields::key(keys))
}

/// An item's edge; items without one are passed over, as they were refused before.
fn edges<'v>(of: &Schema, list: &ListType, items: &'v [Value]) -> Vec<(String, &'v Value)> {
    items.iter().filter_map(|item| Some((edge(of, list, item).ok()?, item))).collect()
}

type Items<'v> = [(String, &'v Value)];

/// The items by their edges. Lists may be long, so nothing goes through one for each item of another.
fn by_edge<'e, 'v>(items: &'e Items<'v>) -> HashMap<&'e str, Vec<&'v Value>> {
    let mut found: HashMap<&str, Vec<&Value>> = HashMap::with_capacity(items.len());
    for (edge, item) in items {
        found.entry(edge).or_default().push(item);
    }
    found
}

/// The object's root as a place.
fn root(type_: &Type) -> Form<'_> {
    Form::Object(type_)
}

/// The fields an object sets.
pub(super) fn field_set(type_: &Type, object: &Value) -> FieldSet {
    let mut set = FieldSet::default();
    collect(root(type_), object, &mut Vec::new(), &mut set);
    set
}

fn collect(form: Form<'_>, value: &Value, path: &mut Vec<String>, set: &mut FieldSet) {
    match (form, value) {
        (Form::List(of, list), Value::Array(items)) => {
            let items = edges(of, list, items);
            let same = by_edge(&items);
            for (edge, item) in &items {
                path.push(edge.clone());
                set.insert(path);
                if same[edge.as_str()].len() == 1 {
                    collect(Form::of(of, item), item, path, set);
                }
                path.pop();
            }
        }
        (Form::Object(_) | Form::Map(_), Value::Object(object)) => {
            for (key, item) in object {
                path.push(fields::field(key));
                let empty = item.is_null() || item.as_object().is_some_and(Map::is_empty);
                if empty || !form.is_named(key) {
                    set.insert(path);
                }
                collect(Form::of(form.child(key), item), item, path, set);
                path.pop();
            }
        }
        (Form::Leaf, _) => set.insert(path),
        _ => {}
    }
}

/// What has become of an object's fields.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub(super) added: FieldSet,
    pub(super) modified: FieldSet,
    pub(super) removed: FieldSet,
}

impl Comparison {
    /// The comparison without the fields of a set, and those below them.
    pub(super) fn without(&self, ignored: &FieldSet) -> Self {
        Self {
            added: self.added.without(ignored),
            modified: self.modified.without(ignored),
            removed: self.removed.without(ignored),
        }
    }
}

/// Compares two objects of a type.
pub(super) fn compare(type_: &Type, old: &Value, new: &Value) -> Comparison {
    let mut found = Comparison::default();
    compare_forms(root(type_), root(type_), Some(old), Some(new), &mut Vec::new(), &mut found);
    found
}

fn compare_at(
    schema: &Schema,
    old: Option<&Value>,
    new: Option<&Value>,
    path: &mut Vec<String>,
    found: &mut Comparison,
) {
    let form = |value: Option<&Value>, other: Option<&Value>| {
        Form::of(schema, value.or(other).unwrap_or(&Value::Null))
    };
    compare_forms(form(old, new), form(new, old), old, new, path, found);
}

fn compare_forms(
    old_form: Form<'_>,
    new_form: Form<'_>,
    old: Option<&Value>,
    new: Option<&Value>,
    path: &mut Vec<String>,
    found: &mut Comparison,
) {
    let form = match (old_form, new_form) {
        (Form::Leaf, form) if old.is_some_and(Value::is_null) => form,
        (form, _) => form,
    };
    let is_empty = |value: Option<&Value>| match value {
        Some(Value::Array(items)) => items.is_empty(),
        Some(Value::Object(map)) => map.is_empty(),
        _ => true,
    };
    let leaf = matches!(form, Form::Leaf)
        || std::mem::discriminant(&old_form) != std::mem::discriminant(&new_form)
        || (is_empty(old) && is_empty(new));
    if !leaf {
        compare_below(form, old, new, path, found);
    }
    match (old, new) {
        (None, Some(_)) => found.added.insert(path),
        (Some(_), None) => found.removed.insert(path),
        (Some(old), Some(new)) if leaf && old != new => found.modified.insert(path),
        _ => {}
    }
}

fn compare_below<'v>(
    form: Form<'_>,
    old: Option<&'v Value>,
    new: Option<&'v Value>,
    path: &mut Vec<String>,
    found: &mut Comparison,
) {
    if let Form::List(of, list) = form {
        let items = |value: Option<&'v Value>| value.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        compare_items(of, &edges(of, list, items(old)), &edges(of, list, items(new)), path, found);
        return;
    }
    let fields = |value: Option<&'v Value>| value.and_then(Value::as_object);
    let (old, new) = (fields(old), fields(new));
    let get = |map: Option<&'v Map<String, Value>>, key: &str| map.and_then(|map| map.get(key));
    for key in old.into_iter().flat_map(Map::keys) {
        path.push(fields::field(key));
        compare_at(form.child(key), get(old, key), get(new, key), path, found);
        path.pop();
    }
    for (key, value) in new.into_iter().flatten().filter(|(key, _)| get(old, key).is_none()) {
        path.push(fields::field(key));
        compare_at(form.child(key), None, Some(value), path, found);
        path.pop();
    }
}

fn compare_items(
    of: &Schema,
    old: &Items<'_>,
    new: &Items<'_>,
    path: &mut Vec<String>,
    found: &mut Comparison,
) {
    let (mut old_items, mut new_items) = (by_edge(old), by_edge(new));
    for (edge, _) in old.iter().chain(new) {
        let before = old_items.remove(edge.as_str()).unwrap_or_default();
        let after = new_items.remove(edge.as_str()).unwrap_or_default();
        // All items of an edge are compared when the first one comes.
        if before.is_empty() && after.is_empty() {
            continue;
        }
        path.push(edge.clone());
        match (before.len(), after.len()) {
            (0 | 1, 0 | 1) => compare_at(of, before.first().copied(), after.first().copied(), path, found),
            // Items with the same key are one thing as long as there are several.
            (2.., 2..) if before != after => found.modified.insert(path),
            (2.., 2..) => {}
            (2.., _) => {
                if let Some(item) = after.first() {
                    compare_at(of, None, Some(item), path, found);
                }
                found.removed.insert(path);
            }
            (_, 2..) => {
                if let Some(item) = before.first() {
                    compare_at(of, Some(item), None, path, found);
                }
                found.added.insert(path);
            }
        }
        path.pop();
    }
}

/// Takes fields out of an object.
pub(super) fn remove(type_: &Type, object: &Value, gone: &FieldSet) -> Value {
    remove_from(root(type_), object, gone)
}

/// What is left of a value; null when nothing is.
fn remove_from(form: Form<'_>, value: &Value, gone: &FieldSet) -> Value {
    match (form, value) {
        (Form::List(of, list), Value::Array(items)) => {
            let kept = items.iter().filter_map(|item| {
                let edge = edge(of, list, item).ok()?;
                if gone.has(&edge) {
                    return None;
                }
                Some(
                    gone.below(&edge)
                        .map_or_else(|| item.clone(), |g| remove_from(Form::of(of, item), item, g)),
                )
            });
            let kept: Vec<Value> = kept.collect();
            if kept.is_empty() { Value::Null } else { Value::Array(kept) }
        }
        (Form::Object(_) | Form::Map(_), Value::Object(object)) => {
            let mut kept = Map::new();
            for (key, item) in object {
                let edge = fields::field(key);
                if gone.has(&edge) {
                    continue;
                }
                let rest = match gone.below(&edge) {
                    Some(gone) => remove_from(Form::of(form.child(key), item), item, gone),
                    None => item.clone(),
                };
                kept.insert(key.clone(), rest);
            }
            if kept.is_empty() { Value::Null } else { Value::Object(kept) }
        }
        (Form::Leaf, Value::Array(_) | Value::Object(_)) => Value::Null,
        (_, scalar) => scalar.clone(),
    }
}

/// The set with all named fields that lead to its members.
pub(super) fn with_named_fields(type_: &Type, set: &FieldSet) -> FieldSet {
    name_fields(Some(Named::Type(type_)), set)
}

#[derive(Clone, Copy)]
enum Named<'a> {
    Type(&'a Type),
    Schema(&'a Schema),
}

fn name_fields(known: Option<Named<'_>>, set: &FieldSet) -> FieldSet {
    let mut named = FieldSet::default();
    for (edge, member, below) in set.edges() {
        let type_ = match known {
            Some(Named::Type(type_)) => Some(type_),
            Some(Named::Schema(schema)) => match &schema.shape {
                Shape::Object(link) => Some(link.get()),
                _ => None,
            },
            None => None,
        };
        let field = edge.strip_prefix("f:").and_then(|name| type_?.field(name));
        let next = match (field, known) {
            (Some(field), _) => Some(Named::Schema(&field.schema)),
            (None, Some(Named::Schema(schema))) => match &schema.shape {
                Shape::Map(of) | Shape::List(of) | Shape::Items(of) => Some(Named::Schema(of)),
                _ => None,
            },
            _ => None,
        };
        named.put(edge, member || (field.is_some() && !below.is_empty()), name_fields(next, below));
    }
    named
}
