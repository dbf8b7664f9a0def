//! Who manages which fields: kept up with every write, and the base of server-side apply.

use http::header::USER_AGENT;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::Call;
use super::error::{Answer, Failure};
use super::object;
use super::query::WriteOptions;
use crate::patch::{self, ApplyError, Writer};
use crate::resource::{Cause, CauseReason, Subresource};
use crate::rules::read;
use crate::schema::{self, Shape, Type};

/// The longest name that is taken from a client's own description of itself.
const NAME_LIMIT: usize = 128;

/// Records that the caller changed what differs between `old` and `new`.
pub(crate) fn track(call: &Call, old: Option<&Value>, new: &mut Value, options: &WriteOptions) {
    let manager = options.field_manager.as_deref().unwrap_or_else(|| program(call));
    let type_ = &call.served.stored_schema;
    let empty = if old.is_none() { empty(type_) } else { Value::Null };
    patch::track_update(type_, old.unwrap_or(&empty), new, &writer(call, manager));
}

/// What a new object is compared with: an empty one, which in Go has all its structures, so nobody owns these.
fn empty(type_: &Type) -> Value {
    let present = type_.fields.iter().filter_map(|field| {
        let value = match &field.schema.shape {
            Shape::Object(link) if !field.pointer => empty(link.get()),
            Shape::List(_) if field.always => json!([]),
            Shape::Map(_) if field.always => json!({}),
            _ => return None,
        };
        Some((field.name.to_string(), value))
    });
    Value::Object(present.collect())
}

/// Takes over the old managers if nothing but their times has changed.
pub(crate) fn keep_times(new: &mut Value, old: &Value) {
    let managers = |object: &Value| read::at(object, &["metadata", "managedFields"]).clone();
    let (now, before) = (managers(new), managers(old));
    if now == before || without_times(now.clone()) != without_times(before.clone()) {
        return;
    }
    object::metadata(new).insert("managedFields".to_owned(), before);
    if new != old {
        object::metadata(new).insert("managedFields".to_owned(), now);
    }
}

fn without_times(mut managers: Value) -> Value {
    for entry in managers.as_array_mut().into_iter().flatten() {
        read::drop(entry, "time");
    }
    managers
}

/// What is applied, merged into the object that is there.
pub(crate) fn apply(
    call: &Call,
    old: Option<&Value>,
    applied: &Value,
    options: &WriteOptions,
) -> Answer<Value> {
    let manager = options.field_manager.as_deref().unwrap_or_default();
    let nothing = json!({});
    let type_ = &call.served.stored_schema;
    let merged = patch::apply(type_, old.unwrap_or(&nothing), applied, &writer(call, manager), options.force);
    let mut merged = merged.map_err(failure)?;
    if let Some(error) = schema::decode(type_, &mut merged).errors.first() {
        return Err(Failure::plain(500, patch::misfit_message(applied, error)));
    }
    Ok(merged)
}

fn failure(error: ApplyError) -> Failure {
    let message = error.to_string();
    match error {
        ApplyError::Conflicts(conflicts) => {
            let mut causes: Vec<Cause> = conflicts
                .into_iter()
                .map(|conflict| Cause {
                    reason: CauseReason::ManagerConflict,
                    message: format!("conflict with {}", conflict.manager),
                    field: conflict.field,
                })
                .collect();
            causes.sort_by(|one, other| one.field.cmp(&other.field));
            Failure::apply_conflict(message, &causes)
        }
        ApplyError::Malformed(_) => Failure::bad_request(message),
        ApplyError::Unfit(_) => Failure::plain(500, message),
    }
}

fn writer<'a>(call: &'a Call, manager: &'a str) -> Writer<'a> {
    let has_status = call.served.resource.subresources.contains(&Subresource::Status);
    let reset: &[&str] = match call.subresource {
        Some(Subresource::Status) if call.served.rules.status_keeps_metadata() => &["spec", "metadata"],
        Some(Subresource::Status) => &["spec"],
        Some(Subresource::Finalize) => &["status"],
        None if has_status => &["status"],
        _ => &[],
    };
    Writer {
        manager,
        api_version: &call.served.api_version,
        subresource: call.subresource.map_or("", Subresource::name),
        reset,
        now: Timestamp::now(),
    }
}

/// The name a program gives itself: what stands before the version in its user agent.
fn program(call: &Call) -> &str {
    let agent = call.parts.headers.get(USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let name = agent.split('/').next().unwrap_or_default();
    name.get(..NAME_LIMIT).unwrap_or(name)
}
