//! Strategic merge patch: a merge patch that knows lists whose items have keys.
//!
//! Besides values a patch carries directives: `$patch` (replace, delete), `$retainKeys`, `$setElementOrder/LIST` and
//! `$deleteFromPrimitiveList/LIST`. Merge keys and strategies come from the type.

use std::collections::{HashMap, HashSet, VecDeque};

use serde_json::{Map, Value};

use super::PatchError;
use crate::schema::{Patch, Schema, Shape, Type};

const DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const ELEMENT_ORDER: &str = "$setElementOrder/";
const DELETE_FROM_LIST: &str = "$deleteFromPrimitiveList/";

/// Applies a strategic merge patch to an object of this type.
pub fn strategic(type_: &Type, target: &mut Value, patch: Value) -> Result<(), PatchError> {
    let Value::Object(patch) = patch else {
        return Err(PatchError::Malformed(
            "json: cannot unmarshal array into Go value of type map[string]interface {}".to_owned(),
        ));
    };
    let original = match target.take() {
        Value::Object(original) => original,
        _ => Map::new(),
    };
    *target = Value::Object(merge_map(original, patch, ObjectSchema::Fields(type_))?);
    Ok(())
}

/// What is known about an object: its fields, that all its values are alike, or nothing.
#[derive(Clone, Copy)]
enum ObjectSchema<'a> {
    Fields(&'a Type),
    Values(&'a Schema),
    Nothing,
}

impl<'a> ObjectSchema<'a> {
    fn of(schema: &'a Schema) -> Self {
        match &schema.shape {
            Shape::Object(link) => Self::Fields(link.get()),
            Shape::Map(of) => Self::Values(of),
            _ => Self::Nothing,
        }
    }

    /// What is known about the objects below a key, and how the key's value is patched.
    fn child(self, key: &str) -> (Self, Patch) {
        match self {
            Self::Fields(type_) => type_.field(key).map_or((Self::Nothing, Patch::default()), |field| {
                (Self::elements(&field.schema), field.patch.clone())
            }),
            Self::Values(schema) => (Self::of(schema), Patch::default()),
            Self::Nothing => (Self::Nothing, Patch::default()),
        }
    }

    fn elements(schema: &'a Schema) -> Self {
        match &schema.shape {
            Shape::List(of) => Self::of(of),
            _ => Self::of(schema),
        }
    }
}

type Object = Map<String, Value>;

fn merge_map(mut original: Object, mut patch: Object, known: ObjectSchema<'_>) -> Result<Object, PatchError> {
    if let Some(directive) = patch.remove(DIRECTIVE) {
        return match directive.as_str() {
            Some("replace") => Ok(patch),
            Some("delete") => Ok(Map::new()),
            _ => Err(unknown_directive(&directive, &patch)),
        };
    }
    retain_keys(&mut original, &mut patch)?;
    order_lists(&mut original, &mut patch, known)?;
    for (name, change) in patch {
        if let Some(list) = name.strip_prefix(DELETE_FROM_LIST) {
            delete_from_list(&mut original, list, &change);
        } else if change.is_null() {
            original.remove(&name);
        } else {
            merge_field(&mut original, name, change, known)?;
        }
    }
    Ok(original)
}

fn merge_field(
    original: &mut Object,
    name: String,
    change: Value,
    known: ObjectSchema<'_>,
) -> Result<(), PatchError> {
    let (below, strategy) = known.child(&name);
    let merged = match (original.remove(&name), change) {
        (Some(Value::Object(old)), Value::Object(new)) => Some(Value::Object(merge_map(old, new, below)?)),
        (Some(Value::Array(old)), Value::Array(new)) if strategy.merge => {
            Some(Value::Array(merge_list(old, new, below, strategy.key.as_deref(), &name)?.items))
        }
        (Some(Value::Array(_)), new @ Value::Array(_)) => Some(new),
        (_, mut new) => {
            discard_nulls(&mut new);
            without_directives(new)
        }
    };
    if let Some(merged) = merged {
        original.insert(name, merged);
    }
    Ok(())
}

/// `$retainKeys`: of the original, only the keys in this list stay.
fn retain_keys(original: &mut Object, patch: &mut Object) -> Result<(), PatchError> {
    let bad = || PatchError::Malformed("invalid patch format of retainKeys".to_owned());
    let Some(listed) = patch.remove(RETAIN_KEYS) else { return Ok(()) };
    let listed = listed.as_array().ok_or_else(bad)?;
    let listed: HashSet<&str> = listed.iter().filter_map(Value::as_str).collect();
    let kept = |key: &String| listed.contains(key.as_str());
    let covered = patch.iter().all(|(key, value)| {
        value.is_null() || key.starts_with(DELETE_FROM_LIST) || key.starts_with(ELEMENT_ORDER) || kept(key)
    });
    if !covered {
        return Err(bad());
    }
    original.retain(|key, _| kept(key));
    Ok(())
}

/// `$setElementOrder/LIST`: merges the list and puts the items in the patch's order.
fn order_lists(original: &mut Object, patch: &mut Object, known: ObjectSchema<'_>) -> Result<(), PatchError> {
    let names: Vec<String> = patch.keys().filter(|key| key.starts_with(ELEMENT_ORDER)).cloned().collect();
    for directive in names {
        let order = patch.remove(&directive).unwrap_or_default();
        let Value::Array(order) = order else { return Err(expected("[]interface {}", &order)) };
        let name = &directive[ELEMENT_ORDER.len()..];
        let (below, strategy) = known.child(name);
        let key = strategy.key.as_deref();
        let old = list_of(original, name)?;
        let new = list_of(patch, name)?;
        check_order(new.as_deref().unwrap_or_default(), &order, key)?;
        let anything = old.iter().chain(&new).any(|list| !list.is_empty());
        let merged = match (old, new) {
            (None, None) => continue,
            _ if !anything => {
                return Err(PatchError::Failed("no elements in any of the given slices".to_owned()));
            }
            (Some(old), None) => Merged { items: old.clone(), server: old },
            (None, Some(new)) => match without_directives(Value::Array(new)) {
                Some(Value::Array(items)) => Merged { items, server: Vec::new() },
                _ => continue,
            },
            (Some(old), Some(new)) if strategy.merge => merge_list(old, new, below, key, name)?,
            (Some(old), Some(new)) => Merged { items: new, server: old },
        };
        let sorted = sort_merged(merged.items, &order, &merged.server, key);
        original.insert(name.to_owned(), Value::Array(sorted));
        patch.remove(name);
    }
    Ok(())
}

fn list_of(object: &Object, name: &str) -> Result<Option<Vec<Value>>, PatchError> {
    match object.get(name) {
        None => Ok(None),
        Some(Value::Array(items)) => Ok(Some(items.clone())),
        Some(other) => Err(expected("[]interface {}", other)),
    }
}

/// The items of a patch stand in the order its `$setElementOrder` says.
fn check_order(patch: &[Value], order: &[Value], key: Option<&str>) -> Result<(), PatchError> {
    if order.is_empty() || patch.is_empty() {
        return Ok(());
    }
    let deleted = |item: &&Value| key.is_some() && item.get(DIRECTIVE) == Some(&Value::from("delete"));
    let mut items = patch.iter().filter(|item| !deleted(item)).peekable();
    for place in order {
        while items.next_if(|item| item.get(DIRECTIVE).is_some()).is_some() {}
        items.next_if(|item| same(place, item, key));
    }
    if items.peek().is_none() {
        return Ok(());
    }
    let (patch, order) = (Value::from(patch), Value::from(order));
    Err(PatchError::Failed(format!(
        "The order in patch list:\n{patch}\n doesn't match $setElementOrder list:\n{order}\n"
    )))
}

fn delete_from_list(original: &mut Object, name: &str, gone: &Value) {
    if let (Some(Value::Array(items)), Value::Array(gone)) = (original.get_mut(name), gone) {
        let gone: HashSet<&Value> = gone.iter().collect();
        items.retain(|item| !gone.contains(item));
    }
}

/// A merged list, and what has become of the server's list meanwhile.
///
/// Kubernetes merges in place and then sorts by the server's list, in which deleted items have made room by then and
/// new ones have taken that room; the order of the result depends on it.
struct Merged {
    items: Vec<Value>,
    server: Vec<Value>,
}

fn merge_list(
    original: Vec<Value>,
    patch: Vec<Value>,
    known: ObjectSchema<'_>,
    key: Option<&str>,
    name: &str,
) -> Result<Merged, PatchError> {
    let Some(first) = original.iter().chain(&patch).next() else {
        return Ok(Merged { items: Vec::new(), server: original });
    };
    let all_objects = first.is_object();
    if original.iter().chain(&patch).any(|item| item.is_object() != all_objects) {
        let lists = Value::from(vec![original, patch]);
        return Err(PatchError::Failed(format!("list element types are not identical: {lists}")));
    }
    if first.is_array() {
        return Err(PatchError::Unfit("lists of lists are not supported".to_owned()));
    }
    if !all_objects {
        let mut seen = HashSet::with_capacity(original.len() + patch.len());
        let merged = original.iter().chain(&patch).filter(|item| seen.insert(*item)).cloned().collect();
        let items = sort_merged(merged, &patch, &original, None);
        return Ok(Merged { items, server: original });
    }
    let Some(key) = key else {
        return Err(PatchError::Failed(format!("cannot merge lists without merge key for {name}")));
    };
    let mut list = InPlace { length: original.len(), server: original };
    let (replacement, patch) = list.take_directives(patch, key)?;
    let before = replacement.unwrap_or_else(|| list.server[..list.length].to_vec());
    let merged = merge_items(&before, &patch, known, key)?;
    list.append(&merged[before.len()..]);
    Ok(Merged { items: sort_merged(merged, &patch, &before, Some(key)), server: list.server })
}

/// The server's list while it is changed in place: the items, and how many of them count.
struct InPlace {
    server: Vec<Value>,
    length: usize,
}

impl InPlace {
    /// Deletes the items with these values of their key, one after the other.
    fn delete(&mut self, key: &str, values: &[Value]) {
        if values.is_empty() {
            return;
        }
        let mut places: HashMap<&Value, Vec<usize>> = HashMap::new();
        for (at, item) in self.server.iter().enumerate() {
            if let Some(value) = item.get(key) {
                places.entry(value).or_default().push(at);
            }
        }
        let mut gone = vec![false; self.server.len()];
        let mut last = self.server.len();
        // Of each deletion what follows moves up; the last place keeps its item but no longer counts.
        let mut left_over = VecDeque::new();
        for at in values.iter().filter_map(|value| places.remove(value)).flatten() {
            while gone[last - 1] {
                last -= 1;
            }
            left_over.push_front(self.server[last - 1].clone());
            gone[at] = true;
        }
        let mut gone = gone.into_iter();
        self.server.retain(|_| gone.next() == Some(false));
        self.length = self.server.len();
        self.server.extend(left_over);
    }

    fn append(&mut self, added: &[Value]) {
        for (place, item) in self.server[self.length..].iter_mut().zip(added) {
            *place = item.clone();
        }
    }

    /// Carries out `$patch` in items: delete an item, or replace the whole list. Returns the replacement, if any, and
    /// the items to merge.
    fn take_directives(
        &mut self,
        patch: Vec<Value>,
        key: &str,
    ) -> Result<(Option<Vec<Value>>, Vec<Value>), PatchError> {
        let mut rest = Vec::with_capacity(patch.len());
        let mut replace = false;
        let mut deleted = Vec::new();
        for item in patch {
            match item.get(DIRECTIVE).map(Value::as_str) {
                None => rest.push(item),
                Some(Some("delete")) => {
                    deleted.push(item.get(key).ok_or_else(|| no_merge_key(&item, key))?.clone());
                }
                Some(Some("replace")) => replace = true,
                Some(Some("merge")) => {
                    let message = "merging lists cannot yet be specified in the patch".to_owned();
                    return Err(PatchError::Failed(message));
                }
                Some(_) => {
                    let Value::Object(object) = &item else { continue };
                    return Err(unknown_directive(&item[DIRECTIVE], object));
                }
            }
        }
        self.delete(key, &deleted);
        Ok(if replace { (Some(rest), Vec::new()) } else { (None, rest) })
    }
}

fn merge_items(
    before: &[Value],
    patch: &[Value],
    known: ObjectSchema<'_>,
    key: &str,
) -> Result<Vec<Value>, PatchError> {
    let mut merged = before.to_vec();
    let mut places: HashMap<&Value, VecDeque<usize>> = HashMap::with_capacity(before.len());
    for (at, item) in before.iter().enumerate() {
        if let Some(value) = item.get(key) {
            places.entry(value).or_default().push_back(at);
        }
    }
    for item in patch {
        let Value::Object(change) = item else { continue };
        let value = change.get(key).ok_or_else(|| no_merge_key(item, key))?;
        let same = places.entry(value).or_default();
        if let Some(old) = same.front().and_then(|at| merged.get_mut(*at)) {
            let Value::Object(fields) = old.take() else { continue };
            *old = Value::Object(merge_map(fields, change.clone(), known)?);
            // A null takes the key itself away.
            if old.get(key).is_none() {
                same.pop_front();
            }
        } else {
            same.push_back(merged.len());
            merged.push(item.clone());
        }
    }
    Ok(merged)
}

/// Sorts a merged list: the patch's items in the patch's order, the server's own in theirs, and where both are known
/// to the server, as the server had them.
fn sort_merged(merged: Vec<Value>, order: &[Value], server: &[Value], key: Option<&str>) -> Vec<Value> {
    let (in_order, on_server) = (first_places(order, key), first_places(server, key));
    let place = |places: &HashMap<&Value, usize>, item: &Value| places.get(identity(item, key)?).copied();
    let (mut patched, mut own): (Vec<_>, Vec<_>) =
        merged.into_iter().partition(|item| place(&in_order, item).is_some());
    patched.sort_by_cached_key(|item| place(&in_order, item));
    own.sort_by_cached_key(|item| place(&on_server, item));
    let mut sorted = Vec::with_capacity(patched.len() + own.len());
    let mut patched = patched.into_iter().peekable();
    for item in own {
        while let Some(next) = patched.peek() {
            match (place(&on_server, &item), place(&on_server, next)) {
                (Some(left), Some(right)) if left < right => break,
                _ => sorted.extend(patched.next()),
            }
        }
        sorted.push(item);
    }
    sorted.extend(patched);
    sorted
}

/// Where each item of a list stands first.
fn first_places<'v>(list: &'v [Value], key: Option<&str>) -> HashMap<&'v Value, usize> {
    let mut places = HashMap::with_capacity(list.len());
    for (at, item) in list.iter().enumerate() {
        if let Some(identity) = identity(item, key) {
            places.entry(identity).or_insert(at);
        }
    }
    places
}

/// What makes an item the same as another: its key, or all of it. Items without the key are like no other.
fn identity<'v>(item: &'v Value, key: Option<&str>) -> Option<&'v Value> {
    match key {
        Some(key) => item.get(key),
        None => Some(item),
    }
}

fn same(left: &Value, right: &Value, key: Option<&str>) -> bool {
    identity(left, key).is_some_and(|left| identity(right, key) == Some(left))
}

/// A new value without what in it is for the merge only; `None` when it is nothing but a directive.
fn without_directives(value: Value) -> Option<Value> {
    match value {
        Value::Object(object) if object.contains_key(DIRECTIVE) => None,
        Value::Object(object) => Some(Value::Object(
            object.into_iter().filter_map(|(name, value)| Some((name, without_directives(value)?))).collect(),
        )),
        Value::Array(items) => Some(Value::Array(items.into_iter().filter_map(without_directives).collect())),
        other => Some(other),
    }
}

fn discard_nulls(value: &mut Value) {
    match value {
        Value::Object(object) => {
            object.retain(|_, value| !value.is_null());
            object.values_mut().for_each(discard_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(discard_nulls),
        _ => {}
    }
}

fn unknown_directive(directive: &Value, patch: &Object) -> PatchError {
    let mut patch = patch.clone();
    patch.insert(DIRECTIVE.to_owned(), directive.clone());
    let patch = Value::Object(patch);
    PatchError::Failed(format!("unknown patch type: {directive} in map: {patch}"))
}

fn no_merge_key(item: &Value, key: &str) -> PatchError {
    PatchError::Failed(format!("map: {item} does not contain declared merge key: {key}"))
}

fn expected(wanted: &str, found: &Value) -> PatchError {
    let found = match found {
        Value::Null => "nil",
        Value::Bool(_) => "bool",
        Value::Number(_) => "int64",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    };
    PatchError::Failed(format!("expected a {wanted}, but received a {found}"))
}
