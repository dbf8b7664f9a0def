//! Reading and changing objects by field names, where absent, null and empty mean the same.

use serde_json::{Map, Value, json};

static NULL: Value = Value::Null;

/// What is at a path of field names, or null.
pub(crate) fn at<'a>(value: &'a Value, path: &[&str]) -> &'a Value {
    path.iter().try_fold(value, |value, name| value.get(name)).unwrap_or(&NULL)
}

/// The text at a path, or the empty one.
pub(crate) fn text<'a>(value: &'a Value, path: &[&str]) -> &'a str {
    at(value, path).as_str().unwrap_or_default()
}

/// The items of the list at a path.
pub(crate) fn items<'a>(value: &'a Value, path: &[&str]) -> &'a [Value] {
    at(value, path).as_array().map_or(&[], Vec::as_slice)
}

/// The entries of the map at a path.
pub(crate) fn entries<'a>(value: &'a Value, path: &[&str]) -> impl Iterator<Item = (&'a str, &'a Value)> {
    at(value, path).as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}

/// The number at a path.
pub(crate) fn number(value: &Value, path: &[&str]) -> Option<i64> {
    at(value, path).as_i64()
}

/// Whether the flag at a path is set.
pub(crate) fn flag(value: &Value, path: &[&str]) -> bool {
    at(value, path).as_bool().unwrap_or_default()
}

/// Whether something is at a path that is not null.
pub(crate) fn has(value: &Value, path: &[&str]) -> bool {
    !at(value, path).is_null()
}

/// Whether there is nothing to speak of at a path: absent, null, an empty text, list or map.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether two values mean the same: absent, null and empty fields do not tell them apart.
pub(crate) fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            one.iter().all(|(key, value)| same(value, other.get(key).unwrap_or(&NULL)))
                && other.iter().all(|(key, value)| one.contains_key(key) || is_empty(value))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        _ => one == other || (is_empty(one) && is_empty(other)),
    }
}

/// The value without the empty lists and maps in its maps, as it is shown in messages.
pub(crate) fn pruned(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.iter().filter(|(_, value)| value.is_string() || !is_empty(value));
            Value::Object(kept.map(|(key, value)| (key.clone(), pruned(value))).collect())
        }
        other => other.clone(),
    }
}

/// The annotation of that name, or the empty text.
pub(crate) fn annotation<'a>(object: &'a Value, name: &str) -> &'a str {
    text(object, &["metadata", "annotations", name])
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, &["metadata", "name"])
}

/// The map at a path, made if there is none.
pub(crate) fn map<'a>(value: &'a mut Value, path: &[&str]) -> &'a mut Map<String, Value> {
    let mut value = value;
    for name in path {
        value = ensure_map(value).entry(*name).or_insert(Value::Null);
    }
    ensure_map(value)
}

/// Sets a field to a default if it is absent, null or an empty text.
pub(crate) fn default(map: &mut Map<String, Value>, name: &str, value: impl Into<Value>) {
    match map.get(name) {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(_) => return,
    }
    map.insert(name.to_owned(), value.into());
}

/// Sets a field to a default if it is absent or null; an empty text is a choice.
pub(crate) fn default_pointer(map: &mut Map<String, Value>, name: &str, value: impl Into<Value>) {
    if map.get(name).is_none_or(Value::is_null) {
        map.insert(name.to_owned(), value.into());
    }
}

/// The map at a path if there is one.
pub(crate) fn map_at<'a>(value: &'a mut Value, path: &[&str]) -> Option<&'a mut Map<String, Value>> {
    find(value, path)?.as_object_mut()
}

/// The items of the list at a path.
pub(crate) fn items_mut<'a>(value: &'a mut Value, path: &[&str]) -> impl Iterator<Item = &'a mut Value> {
    find(value, path).and_then(Value::as_array_mut).into_iter().flatten()
}

/// What is at a path, if anything.
pub(crate) fn find<'a>(value: &'a mut Value, path: &[&str]) -> Option<&'a mut Value> {
    path.iter().try_fold(value, |value, name| value.get_mut(name))
}

/// Makes a top-level field the same as in another object.
pub(crate) fn keep(new: &mut Value, old: &Value, name: &str) {
    let new = ensure_map(new);
    match old.get(name) {
        Some(value) => new.insert(name.to_owned(), value.clone()),
        None => new.remove(name),
    };
}

/// Takes a top-level field away.
pub(crate) fn drop(object: &mut Value, name: &str) {
    if let Some(map) = object.as_object_mut() {
        map.remove(name);
    }
}

fn ensure_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it was made an object just now"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_null_and_empty_are_the_same() {
        assert!(same(&json!({"a": null, "b": {}}), &json!({"c": []})));
        assert!(same(&json!([{"a": ""}]), &json!([{}])));
        assert!(!same(&json!({"a": false}), &json!({})));
        assert!(!same(&json!({"a": [1]}), &json!({"a": [1, 2]})));
    }

    #[test]
    fn defaults_do_not_overwrite() {
        let mut value = json!({"a": "x", "b": "", "c": null});
        let map = map(&mut value, &[]);
        default(map, "a", "y");
        default(map, "b", "y");
        default(map, "c", 3);
        assert_eq!(value, json!({"a": "x", "b": "y", "c": 3}));
    }

    #[test]
    fn paths_into_nothing_are_null() {
        assert_eq!(at(&json!({"a": {"b": 1}}), &["a", "b"]), &json!(1));
        assert_eq!(text(&json!([]), &["a", "b"]), "");
        assert_eq!(items(&json!({"a": 1}), &["a"]), &[] as &[Value]);
    }
}
