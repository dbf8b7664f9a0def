//! JSON patch (RFC 6902) with the habits of the library kube-apiserver uses.
//!
//! Those habits are relied on: a `test` for null passes where there is nothing (finalizers of kube-rs), `replace`
//! sets a key that is not there, and a negative index counts from the end. The messages are that library's too.

use serde_json::Value;

use super::PatchError;

/// The most operations one patch may have.
pub const MAX_OPERATIONS: usize = 10_000;

/// The most bytes one patch may copy, all its operations together.
const MAX_COPIED: usize = 3 * 1024 * 1024;
/// The most values one patch may read or move, all its operations together. Ten thousand operations on a list of half a
/// million items would otherwise take minutes.
const MAX_STEPS: usize = 50_000_000;
/// A patch nests values no deeper than this; it is about what can be stored.
const MAX_DEPTH: usize = 120;

/// Applies a JSON patch; on an error the target is left half-changed.
pub fn json(target: &mut Value, patch: &Value) -> Result<(), PatchError> {
    let Value::Array(operations) = patch else {
        let message = "json: cannot unmarshal object into Go value of type jsonpatch.Patch";
        return Err(PatchError::Malformed(message.to_owned()));
    };
    if operations.len() > MAX_OPERATIONS {
        return Err(PatchError::TooManyOperations(operations.len()));
    }
    let mut spent = Spent::default();
    operations.iter().try_for_each(|operation| apply(target, operation, &mut spent))
}

/// What the operations of one patch have cost so far.
#[derive(Default)]
struct Spent {
    copied: usize,
    steps: usize,
}

impl Spent {
    /// Counts what an operation reads or moves.
    fn steps(&mut self, steps: usize) -> Result<(), PatchError> {
        self.steps += steps;
        if self.steps > MAX_STEPS {
            return Err(PatchError::TooMuchWork);
        }
        Ok(())
    }
}

fn apply(target: &mut Value, operation: &Value, spent: &mut Spent) -> Result<(), PatchError> {
    let kind = operation["op"].as_str().unwrap_or("unknown");
    let value = &operation["value"];
    let path = |name: &str| {
        operation[name]
            .as_str()
            .ok_or_else(|| unfit(format!("{kind} operation failed to decode {name}: missing value")))
    };
    match kind {
        "add" => add(target, path("path")?, value.clone(), spent),
        "remove" => {
            let path = path("path")?;
            remove(target, path, spent).map(drop)
        }
        "replace" => replace(target, path("path")?, value.clone(), spent),
        "move" => relocate(target, path("from")?, path("path")?, spent),
        "copy" => copy(target, path("from")?, path("path")?, spent),
        "test" => test(target, path("path")?, value),
        other => Err(unfit(format!("Unexpected kind: {other}"))),
    }
}

fn add(target: &mut Value, path: &str, value: Value, spent: &mut Spent) -> Result<(), PatchError> {
    let missing =
        || unfit(format!("add operation does not apply: doc is missing path: \"{path}\": missing value"));
    check_depth(path, &value, spent)?;
    let (container, key) = find(target, path).ok_or_else(missing)?;
    spent.steps(moved_items(container))?;
    insert(container, &key, value).map_err(|e| unfit(format!("error in add for path: '{path}': {e}")))
}

fn remove(target: &mut Value, path: &str, spent: &mut Spent) -> Result<Value, PatchError> {
    let missing =
        || unfit(format!("remove operation does not apply: doc is missing path: \"{path}\": missing value"));
    let (container, key) = find(target, path).ok_or_else(missing)?;
    spent.steps(moved_items(container))?;
    take(container, &key).map_err(|e| unfit(format!("error in remove for path: '{path}': {e}")))
}

fn replace(target: &mut Value, path: &str, value: Value, spent: &mut Spent) -> Result<(), PatchError> {
    if path.is_empty() {
        if !value.is_object() && !value.is_array() {
            return Err(unfit("replace operation value must be object or array".to_owned()));
        }
        *target = value;
        return Ok(());
    }
    let missing = |what| {
        unfit(format!("replace operation does not apply: doc is missing {what}: {path}: missing value"))
    };
    check_depth(path, &value, spent)?;
    let (container, key) = find(target, path).ok_or_else(|| missing("path"))?;
    match container {
        Value::Array(items) => {
            let index = index(&key, items.len()).map_err(|_| missing("key"))?;
            items[index] = value;
        }
        Value::Object(map) => {
            map.insert(key, value);
        }
        _ => return Err(missing("path")),
    }
    Ok(())
}

fn relocate(target: &mut Value, from: &str, path: &str, spent: &mut Spent) -> Result<(), PatchError> {
    let missing = |what, place: &str| {
        unfit(format!("move operation does not apply: doc is missing {what} path: {place}: missing value"))
    };
    let (container, key) = find(target, from).ok_or_else(|| missing("from", from))?;
    spent.steps(moved_items(container))?;
    let value = take(container, &key).map_err(|e| unfit(format!("error in move for path: '{key}': {e}")))?;
    check_depth(path, &value, spent)?;
    let (container, key) = find(target, path).ok_or_else(|| missing("destination", path))?;
    spent.steps(moved_items(container))?;
    insert(container, &key, value).map_err(|e| unfit(format!("error in move for path: '{path}': {e}")))
}

fn copy(target: &mut Value, from: &str, path: &str, spent: &mut Spent) -> Result<(), PatchError> {
    let missing = |what, place: &str| {
        unfit(format!("copy operation does not apply: doc is missing {what} path: {place}: missing value"))
    };
    let (container, key) = find(target, from).ok_or_else(|| missing("from", from))?;
    let value = get(container, &key)
        .map_err(|e| unfit(format!("error in copy for from: '{from}': {e}")))?
        .cloned()
        .unwrap_or_default();
    spent.copied += value.to_string().len();
    if spent.copied > MAX_COPIED {
        return Err(unfit(format!(
            "Unable to complete the copy, the accumulated size increase of copy is {}, exceeding the limit \
             {MAX_COPIED}",
            spent.copied
        )));
    }
    check_depth(path, &value, spent)?;
    let (container, key) = find(target, path).ok_or_else(|| missing("destination", path))?;
    spent.steps(moved_items(container))?;
    insert(container, &key, value).map_err(|e| unfit(format!("error while adding value during copy: {e}")))
}

fn test(target: &mut Value, path: &str, value: &Value) -> Result<(), PatchError> {
    let failed = || unfit(format!("testing value {path} failed: test failed"));
    if path.is_empty() {
        return if target == value { Ok(()) } else { Err(failed()) };
    }
    let missing = || unfit(format!("test operation does not apply: is missing path: {path}: missing value"));
    let (container, key) = find(target, path).ok_or_else(missing)?;
    let found = get(container, &key).map_err(|e| unfit(format!("error in test for path: '{path}': {e}")))?;
    if found.unwrap_or(&Value::Null) == value { Ok(()) } else { Err(failed()) }
}

/// Refuses values that would stand too deep for those who walk through them.
fn check_depth(path: &str, value: &Value, spent: &mut Spent) -> Result<(), PatchError> {
    fn depth(value: &Value, values: &mut usize) -> usize {
        *values += 1;
        match value {
            Value::Array(items) => 1 + items.iter().map(|item| depth(item, values)).max().unwrap_or_default(),
            Value::Object(map) => 1 + map.values().map(|item| depth(item, values)).max().unwrap_or_default(),
            _ => 0,
        }
    }
    let mut values = 0;
    let depth = depth(value, &mut values);
    spent.steps(values)?;
    if path.split('/').count() + depth > MAX_DEPTH {
        return Err(unfit("exceeded max depth".to_owned()));
    }
    Ok(())
}

/// About how many values an insertion or removal moves, as many as a processor moves in the time of one other step.
fn moved_items(container: &Value) -> usize {
    container.as_array().map_or(1, |items| 1 + items.len() / 16)
}

/// The list or object a path ends in, and the last part of the path.
fn find<'a>(target: &'a mut Value, path: &str) -> Option<(&'a mut Value, String)> {
    let (parents, key) = path.rsplit_once('/')?;
    let mut container = target;
    for part in parents.split('/').skip(1) {
        let part = unescape(part);
        container = match container {
            Value::Object(map) => map.get_mut(&part)?,
            Value::Array(items) => {
                let index = index(&part, items.len()).ok()?;
                items.get_mut(index)?
            }
            _ => return None,
        };
    }
    (container.is_object() || container.is_array()).then(|| (container, unescape(key)))
}

fn unescape(part: &str) -> String {
    part.replace("~1", "/").replace("~0", "~")
}

fn get<'a>(container: &'a Value, key: &str) -> Result<Option<&'a Value>, String> {
    match container {
        Value::Array(items) => index(key, items.len()).map(|index| items.get(index)),
        other => Ok(other.get(key)),
    }
}

fn insert(container: &mut Value, key: &str, value: Value) -> Result<(), String> {
    match container {
        Value::Array(items) if key == "-" => items.push(value),
        Value::Array(items) => {
            let at = index(key, items.len() + 1).map_err(|error| match key.parse::<i64>() {
                Ok(_) => error,
                Err(_) => format!("value was not a proper array index: '{key}': {error}"),
            })?;
            items.insert(at, value);
        }
        Value::Object(map) => {
            map.insert(key.to_owned(), value);
        }
        _ => return Err("invalid state detected".to_owned()),
    }
    Ok(())
}

fn take(container: &mut Value, key: &str) -> Result<Value, String> {
    match container {
        Value::Array(items) => index(key, items.len()).map(|index| items.remove(index)),
        Value::Object(map) => {
            map.remove(key).ok_or_else(|| format!("Unable to remove nonexistent key: {key}: missing value"))
        }
        _ => Err("invalid state detected".to_owned()),
    }
}

/// The index a key means in a list with this many places.
fn index(key: &str, places: usize) -> Result<usize, String> {
    let index: i64 = key.parse().map_err(|_| format!("{key:?} is not an index of a list"))?;
    let invalid = || format!("Unable to access invalid index: {index}: invalid index referenced");
    let length = i64::try_from(places).map_err(|_| invalid())?;
    let counted = if index < 0 { index + length } else { index };
    usize::try_from(counted).ok().filter(|counted| *counted < places).ok_or_else(invalid)
}

fn unfit(message: String) -> PatchError {
    PatchError::Unfit(message)
}
