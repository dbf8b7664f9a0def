//! Changing objects by patches (JSON patch, merge patch, strategic merge patch, server-side apply), and the record of who
//! owns which fields.
//!
//! Pure functions over values: who may patch what, and what the result must satisfy, is decided elsewhere.
//!
//! Whoever writes otherwise than by apply comes to own what the write changes ([`track_update`]). An applier states the
//! fields it wants ([`apply`]); what it stated before and no longer does, and nobody else owns, goes. Fields that others
//! own with another value are conflicts, unless forced.

use std::sync::LazyLock;

use berth_core::names::LAST_APPLIED;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use self::fields::{FieldSet, display};
use self::managed::{Managed, Manager, Operation, Owned};
use crate::schema::{self, Type, time};
use crate::store::MAX_OBJECT;

mod fields;
mod json;
mod managed;
mod strategic;
mod typed;

pub use json::{MAX_OPERATIONS, json};
pub use strategic::strategic;

/// The most fields and items of lists that a configuration may have: sets of fields are made of them, several at a time, and an
/// object that can be stored has fewer.
const MAX_FIELDS: usize = 256 * 1024;

/// Why a patch cannot be applied; the variants are told apart by the answer they get.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    /// The patch itself is malformed (400).
    #[error("{0}")]
    Malformed(String),
    /// A JSON patch has too many operations (413).
    #[error("The allowed maximum operations in a JSON patch is {max}, got {0}", max = MAX_OPERATIONS)]
    TooManyOperations(usize),
    /// The operations of a JSON patch read or move too many values (413).
    #[error("The operations of the JSON patch take too long on an object of this size")]
    TooMuchWork,
    /// The patch does not fit the object (422).
    #[error("{0}")]
    Unfit(String),
    /// The patch asks for what the type does not allow (500, as kube-apiserver has it).
    #[error("{0}")]
    Failed(String),
}

impl PatchError {
    /// The HTTP status kube-apiserver answers with.
    pub fn code(&self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::TooManyOperations(_) | Self::TooMuchWork => 413,
            Self::Unfit(_) => 422,
            Self::Failed(_) => 500,
        }
    }
}

/// Applies a merge patch (RFC 7396).
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return };
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name.clone()).or_insert(Value::Null), change);
        }
    }
}

/// The manager of whatever was there before somebody first applied.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";

/// Who writes, through what, and when.
#[derive(Debug, Clone, Copy)]
pub struct Writer<'a> {
    /// The name of the field manager; empty is `unknown`.
    pub manager: &'a str,
    /// The group and version written through.
    pub api_version: &'a str,
    /// The subresource written through, or empty.
    pub subresource: &'a str,
    /// Fields this write cannot change, as dotted paths: `status`; they get no owner by it.
    pub reset: &'a [&'a str],
    /// The time of the write.
    pub now: Timestamp,
}

/// A field that somebody else owns with another value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Who owns it, in the words of messages: `"kubectl" using apps/v1`.
    pub manager: String,
    /// The path of the field, as messages have it: `.spec.replicas`.
    pub field: String,
}

/// Why a configuration cannot be applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// Others own fields with other values (409, one cause each).
    #[error("{}", conflict_message(.0))]
    Conflicts(Vec<Conflict>),
    /// The request is not one (400).
    #[error("{0}")]
    Malformed(String),
    /// The configuration is larger than an object may be, or has too many fields (413).
    #[error(
        "the configuration has {bytes} bytes and {fields} fields; at most {MAX_OBJECT} and {MAX_FIELDS} can be applied"
    )]
    TooLarge {
        /// About how many bytes it has as JSON.
        bytes: usize,
        /// How many fields and items of lists it has.
        fields: usize,
    },
    /// The configuration does not fit the type (500, as kube-apiserver has it).
    #[error("{0}")]
    Unfit(String),
}

fn conflict_message(conflicts: &[Conflict]) -> String {
    if let [Conflict { manager, field }] = conflicts {
        return format!("Apply failed with 1 conflict: conflict with {manager}: {field}");
    }
    let mut lines = Vec::new();
    let mut last = None;
    for Conflict { manager, field } in conflicts {
        if last != Some(manager) {
            lines.push(format!("conflicts with {manager}:"));
            last = Some(manager);
        }
        lines.push(format!("- {field}"));
    }
    format!("Apply failed with {} conflicts: {}", conflicts.len(), lines.join("\n"))
}

impl Writer<'_> {
    fn as_manager(&self, operation: Operation) -> Manager {
        Manager {
            name: if self.manager.is_empty() { "unknown" } else { self.manager }.to_owned(),
            operation,
            api_version: match operation {
                Operation::Apply => String::new(),
                Operation::Update => self.api_version.to_owned(),
            },
            subresource: self.subresource.to_owned(),
        }
    }

    fn ignored(&self) -> FieldSet {
        paths(self.reset.iter().copied())
    }
}

fn paths<'p>(dotted: impl Iterator<Item = &'p str>) -> FieldSet {
    let mut set = FieldSet::default();
    for path in dotted {
        set.insert(&path.split('.').map(fields::field).collect::<Vec<_>>());
    }
    set
}

/// Fields nobody owns: the server's own.
static UNOWNED: LazyLock<FieldSet> = LazyLock::new(|| {
    let paths_of_metadata = [
        "metadata.name",
        "metadata.namespace",
        "metadata.creationTimestamp",
        "metadata.selfLink",
        "metadata.uid",
        "metadata.clusterName",
        "metadata.generation",
        "metadata.managedFields",
        "metadata.resourceVersion",
    ];
    paths(["apiVersion", "kind", "metadata"].into_iter().chain(paths_of_metadata))
});

/// Gives the writer of an update (create, replace, or a patch other than apply) what it changed.
///
/// `live` is the object before, `{}` at creation; `new` the object as it will be stored. Its `managedFields` are
/// written anew.
pub fn track_update(type_: &Type, live: &Value, new: &mut Value, writer: &Writer<'_>) {
    let mut managed = given_or_live(live, new, writer);
    clear_managed(new);
    let created = live["metadata"]["uid"].as_str().unwrap_or_default().is_empty();
    if !managed.entries.is_empty() || created {
        update(type_, live, new, &mut managed, writer);
        managed.cap();
    }
    managed.write(new);
}

/// The entries to begin with: a client may rewrite them, even empty them, but not by leaving them out.
fn given_or_live(live: &Value, new: &Value, writer: &Writer<'_>) -> Managed {
    let given = &new["metadata"]["managedFields"];
    if writer.subresource.is_empty() {
        let emptied = given.as_array().is_some_and(|entries| {
            entries.is_empty() || entries.len() == 1 && entries[0].as_object().is_some_and(is_blank)
        });
        if emptied {
            return Managed::default();
        }
        if let Ok(managed) = Managed::read(new)
            && !managed.entries.is_empty()
        {
            return managed;
        }
    }
    Managed::read(live).unwrap_or_default()
}

fn is_blank(entry: &serde_json::Map<String, Value>) -> bool {
    entry.values().all(|value| value.is_null() || value.as_str() == Some(""))
}

fn update(type_: &Type, live: &Value, new: &Value, managed: &mut Managed, writer: &Writer<'_>) {
    let ignored = writer.ignored();
    let changes = typed::compare(type_, live, new).without(&ignored);
    managed.yield_to(None, &changes);
    let taken = changes.modified.union(&changes.added).without(&ignored).difference(&UNOWNED);
    if taken.is_empty() {
        return;
    }
    let owned = managed.entries.entry(writer.as_manager(Operation::Update)).or_default();
    owned.set = owned.set.union(&taken);
    writer.api_version.clone_into(&mut owned.api_version);
    owned.time = Some(time::write(writer.now));
}

/// Applies a configuration to an object (`{}` where there is none yet) and returns the object with its new owners.
///
/// The result is merged only: decoding, defaults and validation come after.
pub fn apply(
    type_: &Type,
    live: &Value,
    applied: &Value,
    writer: &Writer<'_>,
    force: bool,
) -> Result<Value, ApplyError> {
    if applied["metadata"]["managedFields"].as_array().is_some() {
        return Err(ApplyError::Malformed("metadata.managedFields must be nil".to_owned()));
    }
    let (bytes, fields) = (schema::json::length(applied), count_fields(applied));
    if bytes > MAX_OBJECT || fields > MAX_FIELDS {
        return Err(ApplyError::TooLarge { bytes, fields });
    }
    let problems = typed::validate(type_, applied);
    if !problems.is_empty() {
        return Err(ApplyError::Unfit(unfit_message(applied, &problems)));
    }
    let mut managed = Managed::read(live)
        .map_err(|error| ApplyError::Unfit(format!("failed to decode managed fields: {error}")))?;
    let mut bare = live.clone();
    clear_managed(&mut bare);
    if managed.entries.is_empty() {
        let nothing = json!({"apiVersion": applied["apiVersion"], "kind": applied["kind"]});
        let before = Writer { manager: BEFORE_FIRST_APPLY, ..*writer };
        update(type_, &nothing, &bare, &mut managed, &before);
        managed.cap();
    }
    let attempt = |force| apply_once(type_, &bare, applied, managed.clone(), writer, force);
    let result = match attempt(force) {
        Err(conflicts) if writer.manager == "kubectl" => {
            let own = last_applied(type_, &bare, writer).unwrap_or_default();
            let left: Vec<_> = conflicts.into_iter().filter(|(_, path)| !own.has_path(path)).collect();
            if left.is_empty() { attempt(true) } else { Err(left) }
        }
        other => other,
    };
    let (mut object, managed) = result.map_err(|conflicts| ApplyError::Conflicts(described(conflicts)))?;
    if writer.manager == "kubectl" {
        renew_last_applied(&mut object, applied);
    }
    managed.write(&mut object);
    Ok(object)
}

/// How many fields and items of lists a configuration has, at every depth.
fn count_fields(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.iter().map(|item| 1 + count_fields(item)).sum(),
        Value::Object(map) => map.values().map(|value| 1 + count_fields(value)).sum(),
        _ => 0,
    }
}

type Paths = Vec<(Manager, Vec<String>)>;

fn apply_once(
    type_: &Type,
    live: &Value,
    applied: &Value,
    mut managed: Managed,
    writer: &Writer<'_>,
    force: bool,
) -> Result<(Value, Managed), Paths> {
    let own = writer.as_manager(Operation::Apply);
    let ignored = writer.ignored();
    let last = managed.entries.get(&own).cloned();
    let owned = Owned {
        set: typed::field_set(type_, applied).without(&ignored),
        api_version: writer.api_version.to_owned(),
        time: last.as_ref().and_then(|last| last.time.clone()),
    };
    managed.entries.insert(own.clone(), owned);
    let merged = typed::merge(type_, live, applied);
    let object = match last {
        Some(last) if !last.set.is_empty() => drop_abandoned(type_, &merged, &last.set, &managed),
        _ => merged,
    };
    let changes = typed::compare(type_, live, &object).without(&ignored);
    let conflicts = managed.yield_to(Some(&own), &changes);
    if !force && !conflicts.is_empty() {
        return Err(conflicts
            .into_iter()
            .flat_map(|(manager, set)| set.paths().into_iter().map(move |path| (manager.clone(), path)))
            .collect());
    }
    if let Some(owned) = managed.entries.get_mut(&own) {
        owned.set = owned.set.difference(&UNOWNED);
        if object != *live {
            owned.time = Some(time::write(writer.now));
        }
    }
    managed.entries.retain(|_, owned| !owned.set.is_empty());
    Ok((object, managed))
}

/// Takes out what this applier stated before, no longer states, and nobody else owns.
fn drop_abandoned(type_: &Type, merged: &Value, last: &FieldSet, managed: &Managed) -> Value {
    let named = |set: &FieldSet| typed::with_named_fields(type_, set);
    let all = named(&typed::field_set(type_, merged));
    let pruned = typed::remove(type_, merged, &named(last));
    let kept = named(&typed::field_set(type_, &pruned)).union(&named(&managed.union()));
    let pruned = typed::remove(type_, merged, &all.difference(&kept));
    let kept = named(&typed::field_set(type_, &pruned));
    typed::remove(type_, merged, &all.difference(&kept).intersection(&named(last)))
}

fn described(mut conflicts: Paths) -> Vec<Conflict> {
    conflicts.sort_by(|(a, _), (b, _)| a.cmp(b));
    conflicts
        .into_iter()
        .map(|(manager, path)| Conflict {
            manager: manager.display(),
            field: path.iter().map(|edge| display(edge)).collect(),
        })
        .collect()
}

fn unfit_message(applied: &Value, problems: &[String]) -> String {
    let (name, kind) = described_object(applied);
    let problems = match problems {
        [one] => one.clone(),
        all => format!("errors:\n  {}", all.join("\n  ")),
    };
    format!("failed to create typed patch object ({name}; {kind}): {problems}")
}

/// What kube-apiserver says when what came of an apply has a value that its type cannot hold.
pub(crate) fn misfit_message(applied: &Value, problem: &str) -> String {
    let (name, kind) = described_object(applied);
    let decoding = if problem.starts_with("illegal base64") { "error decoding from json: " } else { "" };
    format!(
        "failed to convert new object ({name}; {kind}) to proper version: \
         unable to convert unstructured object to {kind}: {decoding}{problem}"
    )
}

fn described_object(applied: &Value) -> (String, String) {
    let text = |place: &Value| place.as_str().unwrap_or_default().to_owned();
    let (namespace, name) = (text(&applied["metadata"]["namespace"]), text(&applied["metadata"]["name"]));
    let (api_version, kind) = (text(&applied["apiVersion"]), text(&applied["kind"]));
    let slash = if api_version.contains('/') { "" } else { "/" };
    (format!("{namespace}/{name}"), format!("{slash}{api_version}, Kind={kind}"))
}

/// The fields that client-side apply set last and that are still as it set them.
fn last_applied(type_: &Type, live: &Value, writer: &Writer<'_>) -> Option<FieldSet> {
    let text = live["metadata"]["annotations"][LAST_APPLIED].as_str()?;
    let last: Value = serde_json::from_str(text).ok()?;
    if last["apiVersion"].as_str() != Some(writer.api_version) {
        return None;
    }
    let changes = typed::compare(type_, &last, live);
    Some(
        typed::field_set(type_, &last)
            .difference(&changes.modified)
            .difference(&changes.added)
            .difference(&changes.removed),
    )
}

/// Keeps the annotation of client-side apply in step, where there is one.
fn renew_last_applied(object: &mut Value, applied: &Value) {
    let Some(annotations) = object.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) else {
        return;
    };
    let Some(annotation) = annotations.get_mut(LAST_APPLIED) else { return };
    if annotation.as_str().unwrap_or_default().is_empty() {
        return;
    }
    let mut configuration = applied.clone();
    if let Some(Value::Object(annotations)) = configuration.pointer_mut("/metadata/annotations") {
        annotations.remove(LAST_APPLIED);
    }
    *annotation = format!("{configuration}\n").into();
}

fn clear_managed(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
}

#[cfg(test)]
mod tests;
