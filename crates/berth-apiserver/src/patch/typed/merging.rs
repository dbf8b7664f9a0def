//! Merging an applied configuration into an object.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{Form, by_edge, edges, root};
use crate::schema::{ListType, Schema, Type};

/// The object with what is applied put over it.
pub(in crate::patch) fn merge(type_: &Type, live: &Value, applied: &Value) -> Value {
    merge_forms(root(type_), Some(live), Some(applied)).unwrap_or_else(|| Value::Object(Map::new()))
}

fn merge_at(schema: &Schema, live: Option<&Value>, applied: Option<&Value>) -> Option<Value> {
    let decisive = match (live, applied) {
        (Some(live), Some(Value::Null)) => live,
        (_, Some(applied)) => applied,
        (live, None) => live?,
    };
    merge_forms(Form::of(schema, decisive), live, applied)
}

fn merge_forms(form: Form<'_>, live: Option<&Value>, applied: Option<&Value>) -> Option<Value> {
    let is_empty = |value: Option<&Value>| match value {
        Some(Value::Array(items)) => items.is_empty(),
        Some(Value::Object(map)) => map.is_empty(),
        _ => true,
    };
    if is_empty(live) && is_empty(applied) {
        return applied.or(live).cloned();
    }
    match form {
        Form::Leaf => applied.or(live).cloned(),
        Form::List(of, list) => {
            let items = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
            let merged = merge_items(of, list, &items(live), &items(applied));
            (!merged.is_empty()).then_some(Value::Array(merged))
        }
        Form::Object(_) | Form::Map(_) => {
            let fields =
                |value: Option<&Value>| value.and_then(Value::as_object).cloned().unwrap_or_default();
            let (live, applied) = (fields(live), fields(applied));
            let keys = live.keys().chain(applied.keys().filter(|key| !live.contains_key(*key)));
            let merged: Map<String, Value> = keys
                .filter_map(|key| {
                    Some((key.clone(), merge_at(form.child(key), live.get(key), applied.get(key))?))
                })
                .collect();
            (!merged.is_empty()).then_some(Value::Object(merged))
        }
    }
}

/// Merges two lists: applied items come in the applied order, others stay where they were among them.
fn merge_items(of: &Schema, list: &ListType, live: &[Value], applied: &[Value]) -> Vec<Value> {
    let (live, applied) = (edges(of, list, live), edges(of, list, applied));
    let (live_items, applied_items) = (by_edge(&live), by_edge(&applied));
    let wanted = |edge: &String| applied_items.get(edge.as_str()).and_then(|same| same.first().copied());
    // Of items with the same key none is the one to merge with.
    let present = |edge: &String| match live_items.get(edge.as_str()).map(Vec::as_slice) {
        Some([item]) => Some(*item),
        _ => None,
    };
    let known = |edge: &String| live_items.contains_key(edge.as_str());
    let mut shared = applied.iter().map(|(edge, _)| edge).filter(|edge| known(edge)).peekable();
    let mut merged = Vec::with_capacity(live.len() + applied.len());
    let mut taken: HashSet<&String> = HashSet::new();
    let (mut left, mut right) = (live.iter().peekable(), applied.iter().peekable());
    loop {
        if let (Some((ours, _)), Some((theirs, _))) = (left.peek(), right.peek()) {
            if ours == theirs {
                taken.insert(theirs);
                merged.extend(merge_at(of, present(ours), wanted(ours)));
                left.next();
                right.next();
                shared.next();
                continue;
            }
            if wanted(ours).is_some() && shared.peek().is_some_and(|next| *next != ours) {
                left.next();
                continue;
            }
        }
        if let Some((ours, item)) = left.peek() {
            if wanted(ours).is_none() {
                merged.extend(merge_at(of, Some(item), None));
                left.next();
                continue;
            }
            if taken.contains(ours) {
                left.next();
            }
        }
        match right.next() {
            Some((theirs, item)) => {
                taken.insert(theirs);
                merged.extend(merge_at(of, present(theirs), Some(item)));
                shared.next_if(|next| *next == theirs);
            }
            None if left.peek().is_none() => return merged,
            None => {}
        }
    }
}
