//! Create, update and patch: one way to write an object, tried again when somebody else was faster.
//!
//! Every written object goes through defaults, preparation, admission, validation and the record of who manages which
//! fields, and then as bytes to the store.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http::header::USER_AGENT;
use http::{Method, Response};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value, json};

use super::content::{self, from_store, renew, to_store};
use super::error::{Answer, Failure};
use super::object::{self, Expected};
use super::registry::{Served, Stored};
use super::request::{self, FieldValidation, WriteOptions};
use super::{Body, Call, crd};
use crate::patch::{self, PatchError, Writer};
use crate::resource::{Cause, CauseReason, Subresource};
use crate::rules::{self, Operation, Reader, read};
use crate::schema::{self, Shape, Type};
use crate::store::{self, Change, Expect, Key, Object, WriteError};

/// How often a name is made up before giving up.
const NAME_TRIES: usize = 8;
/// How often a write is tried again when others are faster.
pub(super) const WRITE_TRIES: usize = 64;
/// Objects nest no deeper than this: JSON is read to 127 levels, and lists and events put a few around an object.
const MAX_DEPTH: usize = 120;
const CUSTOM_PATCH_FORMATS: &str =
    "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";

/// What a write led to.
pub(crate) enum Written {
    /// The object as it is stored now.
    Stored(Arc<Object>),
    /// The object as it would be stored, or as it was last.
    Value(Value),
}

impl Written {
    /// The object as a JSON value, whichever way it is held; stored bytes are parsed at each call.
    pub(crate) fn value(&self) -> Answer<Value> {
        match self {
            Self::Stored(object) => serde_json::from_slice(&object.bytes).map_err(Failure::internal),
            Self::Value(value) => Ok(value.clone()),
        }
    }
}

impl Call {
    /// Answers with what was written, and with warnings about it unless it was deleted.
    pub(crate) fn reply(
        &self,
        code: u16,
        written: Written,
        mut warnings: Vec<String>,
    ) -> Answer<Response<Body>> {
        let rules = &self.served.rules;
        if self.subresource.is_none() && self.parts.method != Method::DELETE && rules.warns() {
            warnings.extend(rules.warnings(&written.value()?, code == 201));
        }
        let presenter = self.presenter()?;
        let mut response = match written {
            Written::Stored(object) => presenter.respond_stored(code, &object.bytes)?,
            Written::Value(object) => presenter.respond(code, object)?,
        };
        content::warn(&mut response, &warnings);
        Ok(response)
    }

    pub(crate) async fn create(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = self.query.write_options("CreateOptions")?;
        let mut warnings = Vec::new();
        let expected = Expected::of(&self.served, &self.registry);
        let mut new =
            object::decode(&self.parts.headers, bytes, &expected, options.field_validation, &mut warnings)?;
        self.check_namespace(&mut new)?;
        if !object::text(&new, "resourceVersion").is_empty() {
            return Err(Failure::plain(500, "resourceVersion should not be set on objects to be created"));
        }
        to_store(&self.served, &mut new);
        let written = self.insert(new, &options, Tracking::Update).await?;
        self.after_write(&written, options.dry_run).await?;
        self.reply(201, written, warnings)
    }

    /// Stores a new object, under a made-up name if it asks for one.
    pub(crate) async fn insert(
        &self,
        new: Value,
        options: &WriteOptions,
        tracking: Tracking,
    ) -> Answer<Written> {
        let resource = &self.served.resource;
        if self.served.definition.as_ref().is_some_and(|definition| definition.terminating) {
            return Err(Failure::terminating(resource));
        }
        let prefix = object::text(&new, "generateName").to_owned();
        let generated = object::text(&new, "name").is_empty() && !prefix.is_empty();
        let mut name = object::text(&new, "name").to_owned();
        for _ in 0..NAME_TRIES {
            let mut object = new.clone();
            if generated {
                name = object::generate_name(&prefix)?;
                object::metadata(&mut object).insert("name".to_owned(), name.as_str().into());
            }
            object::begin(&mut object)?;
            self.prepare_new(&mut object, options, tracking)?;
            let _address = self.assign_address(&mut object, None).await?;
            let encoded = self.encode(&object, 0)?;
            let key = self.key(&name);
            if options.dry_run {
                return match self.store().get(&key) {
                    Some(_) => Err(Failure::already_exists(resource, &name)),
                    None => Ok(Written::Value(object)),
                };
            }
            match self.store().write(key, Expect::Absent, encoded.put()).await {
                Ok(stored) => return Ok(Written::Stored(stored)),
                Err(WriteError::Exists(_)) if generated => {}
                Err(WriteError::Exists(other)) => {
                    let mut failure = Failure::already_exists(resource, &name);
                    let other: Value = serde_json::from_slice(&other.bytes).unwrap_or_default();
                    if object::is_deleting(&other) {
                        failure.message = format!("object is being deleted: {}", failure.message);
                    }
                    return Err(failure);
                }
                Err(error) => return Err(self.write_failure(&name, error)),
            }
        }
        Err(Failure::generated_name_taken(resource, &name))
    }

    /// An object as the store gets it, unless it is too large, or so deep that nobody could read it from there.
    ///
    /// An object that is larger already, stored before there was a limit, may be written as long as it does not grow: its
    /// finalizers can be removed.
    fn encode(&self, object: &Value, current: usize) -> Answer<Encoded> {
        let encoded = Encoded::new(object);
        if encoded.length() > store::MAX_OBJECT.max(current) {
            return Err(Failure::object_too_large());
        }
        let depth = encoded.depth();
        if depth <= MAX_DEPTH {
            return Ok(encoded);
        }
        let cause = Cause {
            reason: CauseReason::TooMany,
            message: format!(
                "Too many: {depth}: an object, its managedFields included, may be nested at most {MAX_DEPTH} levels deep"
            ),
            field: "<nil>".to_owned(),
        };
        Err(Failure::invalid(&self.served.resource, object::text(object, "name"), &[cause]))
    }

    /// The namespace of an object in a body is the one of the path, or is left out.
    pub(crate) fn check_namespace(&self, new: &mut Value) -> Answer<()> {
        let given = object::text(new, "namespace").to_owned();
        if !given.is_empty() && given != self.namespace {
            return Err(Failure::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        if self.namespace.is_empty() {
            object::metadata(new).remove("namespace");
        } else {
            object::metadata(new).insert("namespace".to_owned(), self.namespace.as_str().into());
        }
        Ok(())
    }

    pub(super) fn check_name(&self, new: &mut Value) -> Answer<()> {
        let given = object::text(new, "name");
        if given.is_empty() {
            return Err(Failure::bad_request(format!(
                "the name of the object ({} based on URL) was undeterminable: name must be provided",
                self.name
            )));
        }
        if given != self.name {
            return Err(Failure::bad_request(format!(
                "the name of the object ({given}) does not match the name on the URL ({})",
                self.name
            )));
        }
        let namespace = object::text(new, "namespace");
        if !namespace.is_empty() && namespace != self.namespace {
            return Err(Failure::bad_request(format!(
                "the namespace of the object ({namespace}) does not match the namespace on the URL ({})",
                self.namespace
            )));
        }
        self.check_namespace(new)
    }

    pub(crate) async fn update(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = self.query.write_options("UpdateOptions")?;
        let mut warnings = Vec::new();
        let expected = Expected::of(&self.served, &self.registry);
        let mut new =
            object::decode(&self.parts.headers, bytes, &expected, options.field_validation, &mut warnings)?;
        self.check_name(&mut new)?;
        to_store(&self.served, &mut new);
        let creates = self.served.rules.create_on_update() && self.subresource.is_none();
        if creates && self.store().get(&self.key(&self.name)).is_none() {
            if !object::text(&new, "resourceVersion").is_empty() || !object::text(&new, "uid").is_empty() {
                return Err(Failure::not_found(&self.served.resource, &self.name));
            }
            let written = self.insert(new, &options, Tracking::Update).await?;
            return self.reply(201, written, warnings);
        }
        let written = self.modify(&options, Tracking::Update, |_| Ok(new.clone())).await?;
        self.after_write(&written, options.dry_run).await?;
        self.reply(200, written, warnings)
    }

    /// Changes the object by `change`, which sees it in the form of the store, and stores the result.
    pub(crate) async fn modify(
        &self,
        options: &WriteOptions,
        tracking: Tracking,
        mut change: impl FnMut(&Value) -> Answer<Value>,
    ) -> Answer<Written> {
        let resource = &self.served.resource;
        for _ in 0..WRITE_TRIES {
            let current = self.current()?;
            let mut old: Value = serde_json::from_slice(&current.bytes).map_err(Failure::internal)?;
            // Whoever moves objects to a new storage version writes them unchanged.
            let outdated = renew(&self.served, &mut old);
            let mut new = change(&old)?;
            self.check_version(&mut new, &old)?;
            self.prepare_changed(&mut new, &old, options, tracking)?;
            let _address = self.assign_address(&mut new, Some(&old)).await?;
            let gone = self.is_finished(&new, &old);
            if !gone && !outdated && new == old {
                return Ok(Written::Stored(current));
            }
            let encoded = self.encode(&new, current.bytes.len())?;
            if options.dry_run {
                return Ok(Written::Value(new));
            }
            let what = if gone { encoded.remove() } else { encoded.put() };
            let key = self.key(&self.name);
            match self.store().write(key, Expect::Revision(current.revision), what).await {
                Ok(_) if gone => return Ok(Written::Value(new)),
                Ok(stored) => return Ok(Written::Stored(stored)),
                Err(WriteError::Conflict(_)) => {}
                Err(error) => return Err(self.write_failure(&self.name, error)),
            }
        }
        Err(Failure::modified(resource, &self.name))
    }

    /// Whether the last thing that kept a deleted object has gone.
    fn is_finished(&self, new: &Value, old: &Value) -> bool {
        if !object::is_deleting(new) || !object::finalizers(new).is_empty() {
            return false;
        }
        // A namespace also waits for its own finalizers, a pod for its grace period.
        if &*self.served.resource.kind == "Namespace" && self.served.resource.group.is_empty() {
            return read::items(new, &["spec", "finalizers"]).is_empty();
        }
        read::number(old, &["metadata", "deletionGracePeriodSeconds"]).unwrap_or(0) == 0
    }

    pub(crate) fn write_failure(&self, name: &str, error: WriteError) -> Failure {
        let resource = &self.served.resource;
        match error {
            WriteError::Exists(_) => Failure::already_exists(resource, name),
            WriteError::Missing => Failure::not_found(resource, name),
            WriteError::Conflict(_) => Failure::modified(resource, name),
            WriteError::Full(why) | WriteError::Storage(why) => Failure::internal(why),
            error @ WriteError::Quarantined => {
                Failure::internal(format!("{} {name:?}: {error}", resource.qualified()))
            }
        }
    }

    pub(crate) async fn patch(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let media = content::media_type(&self.parts.headers);
        let built_in = self.served.resource.built_in;
        let options = self.query.write_options("PatchOptions")?;
        match media {
            "application/apply-patch+yaml" => {
                let (code, written) = self.apply(bytes, &options).await?;
                self.after_write(&written, options.dry_run).await?;
                return self.reply(code, written, Vec::new());
            }
            "application/json-patch+json" | "application/merge-patch+json" => {}
            "application/strategic-merge-patch+json" if built_in => {}
            _ => return Err(Failure::unsupported_patch((!built_in).then_some(CUSTOM_PATCH_FORMATS))),
        }
        let patch = parse_patch(bytes, media)?;
        if self.query.flag_if_given("force").is_some() {
            let cause = request::forbidden("force", "may not be specified for non-apply patch");
            return Err(Failure::invalid_options("PatchOptions", &[cause]));
        }
        let mut warnings = Vec::new();
        let change = |old: &Value| {
            let mut object = old.clone();
            from_store(&self.served, &mut object);
            match media {
                "application/json-patch+json" => patch::json(&mut object, &patch),
                "application/merge-patch+json" => {
                    patch::merge(&mut object, &patch);
                    Ok(())
                }
                _ => patch::strategic(&self.served.schema, &mut object, patch.clone()),
            }
            .map_err(|error| patch_failure(&error))?;
            warnings.clear();
            settle_patched(&self.served, &mut object, options.field_validation, &mut warnings)?;
            self.check_namespace(&mut object)?;
            self.check_name(&mut object)?;
            to_store(&self.served, &mut object);
            Ok(object)
        };
        let written = self.modify(&options, Tracking::Update, change).await?;
        self.after_write(&written, options.dry_run).await?;
        self.reply(200, written, warnings)
    }
}

/// Reads a patch; complaints are worded as Kubernetes does for each kind of patch.
fn parse_patch(bytes: &[u8], media: &str) -> Answer<Value> {
    let prefix =
        if media == "application/strategic-merge-patch+json" { "" } else { "error decoding patch: " };
    let refuse = |why: &str| Failure::bad_request(format!("{prefix}{why}"));
    let patch: Value = serde_json::from_slice(bytes).map_err(|error| refuse(&error.to_string()))?;
    let (fits, expected) = match media {
        "application/json-patch+json" => (patch.is_array(), "a list of operations"),
        _ => (patch.is_object(), "an object"),
    };
    if !fits && !patch.is_null() {
        return Err(refuse(&format!("the patch is not {expected}")));
    }
    Ok(patch)
}

/// Brings a patched object into its type's form; complaints are worded as for patches.
fn settle_patched(
    served: &Served,
    object: &mut Value,
    validation: FieldValidation,
    warnings: &mut Vec<String>,
) -> Answer<()> {
    let before = object.clone();
    let decoded = schema::decode(&served.schema, object);
    let refuse = |why: &str| {
        let cause = Cause {
            reason: CauseReason::Invalid,
            message: format!("Invalid value: {:?}: {why}", before.to_string()),
            field: "patch".to_owned(),
        };
        Failure::invalid_kind("", "", "", &[cause])
    };
    if let Some(error) = decoded.errors.first() {
        return Err(refuse(error));
    }
    if read::text(object, &["kind"]) != &*served.resource.kind
        || read::text(object, &["apiVersion"]) != served.api_version
    {
        return Err(refuse("kind and apiVersion may not be changed"));
    }
    let found: Vec<String> = decoded.unknown.iter().map(|path| format!("unknown field {path:?}")).collect();
    match validation {
        FieldValidation::Strict if !found.is_empty() => {
            Err(refuse(&format!("strict decoding error: {}", found.join(", "))))
        }
        FieldValidation::Warn => {
            warnings.extend(found);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn patch_failure(error: &PatchError) -> Failure {
    match error.code() {
        400 => Failure::bad_request(error.to_string()),
        413 => Failure::too_large(format!("Request entity too large: {error}")),
        422 => Failure::unprocessable(),
        _ => Failure::plain(500, error.to_string()),
    }
}

/// Who may have written an object, for the record of managers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// The writer owns what it changed.
    Update,
    /// The managers were settled already, by an apply.
    Settled,
}

impl Call {
    /// Makes a new object ready to be stored. It has a name, a uid and a namespace.
    pub(crate) fn prepare_new(
        &self,
        new: &mut Value,
        options: &WriteOptions,
        tracking: Tracking,
    ) -> Answer<()> {
        let served = &self.served;
        self.default(new)?;
        // What is added from here on belongs to nobody: otherwise the next apply without it would take it away.
        if tracking == Tracking::Update {
            let type_ = &served.stored_schema;
            patch::track_update(type_, &empty(type_), new, &writer(self, options));
        }
        served.rules.prepare_create(new);
        if served.rules.counts_generation() {
            object::metadata(new).insert("generation".to_owned(), 1.into());
        }
        rules::admit(Operation::Create, &served.resource, new, None, self)
            .map_err(|denied| Failure::denied(&served.resource, object::text(new, "name"), &denied))?;
        let mut causes = rules::metadata_causes(new, served.resource.namespaced, served.rules.name_rule());
        causes.extend(served.rules.validate(new));
        self.refuse_invalid(new, &causes)?;
        if &*served.resource.group == crd::GROUP {
            Self::prepare_definition(new);
        }
        Ok(())
    }

    /// Fills in defaults. Those of custom resources come from users and may be large: they end where the object is larger than
    /// any that can be stored, and then it is refused for that, not for what is missing in it.
    fn default(&self, new: &mut Value) -> Answer<()> {
        self.served.rules.default(new);
        if self.served.definition.is_some() && schema::json::length(new) > store::MAX_OBJECT {
            return Err(Failure::object_too_large());
        }
        Ok(())
    }

    /// Makes a changed object ready to be stored.
    pub(crate) fn prepare_changed(
        &self,
        new: &mut Value,
        old: &Value,
        options: &WriteOptions,
        tracking: Tracking,
    ) -> Answer<()> {
        let served = &self.served;
        let is_status = self.subresource == Some(Subresource::Status);
        let is_finalize = self.subresource == Some(Subresource::Finalize);
        object::carry_over(new, old);
        self.default(new)?;
        // A binding changes what nobody else may, and is no write of the pod itself: nobody comes to own anything.
        if self.subresource == Some(Subresource::Binding) {
            return Ok(());
        }
        if tracking == Tracking::Update {
            patch::track_update(&served.stored_schema, old, new, &writer(self, options));
        }
        let managers = object::managers(new);
        if is_status {
            served.rules.prepare_status_update(new, old);
        } else if is_finalize {
            rules::namespace::prepare_finalize(new, old);
        } else if self.subresource == Some(Subresource::EphemeralContainers) {
            rules::pod::ephemeral::prepare(new, old);
            if served.rules.generation_changes(new, old) {
                object::bump_generation(new);
            }
        } else {
            served.rules.prepare_update(new, old);
            if served.rules.generation_changes(new, old) {
                object::bump_generation(new);
            }
        }
        object::set_managers(new, managers);
        // What admission checks of updates, Kubernetes checks last.
        if !is_status {
            rules::complete_update(&served.resource, new, old, self);
        }
        let mut causes = rules::metadata_update_causes(new, old);
        causes.extend(match self.subresource {
            Some(Subresource::Status) => served.rules.validate_status_update(new, old),
            Some(Subresource::Finalize) => rules::namespace::validate_finalize(new),
            Some(Subresource::EphemeralContainers) => rules::pod::ephemeral::validate(new, old),
            _ => served.rules.validate_update(new, old),
        });
        self.refuse_invalid(new, &causes)?;
        if !is_status {
            rules::admit(Operation::Update, &served.resource, new, Some(old), self)
                .map_err(|denied| Failure::denied(&served.resource, object::text(new, "name"), &denied))?;
        }
        if &*served.resource.group == crd::GROUP && !is_status {
            Self::prepare_definition(new);
        }
        keep_times(new, old);
        Ok(())
    }

    /// Refuses an object that breaks rules.
    fn refuse_invalid(&self, new: &Value, causes: &[Cause]) -> Answer<()> {
        let name = object::text(new, "name");
        match causes {
            [] => Ok(()),
            _ if self.served.stored == Stored::CoreEvents => {
                Err(Failure::invalid_kind("", "Event", name, causes))
            }
            _ => Err(Failure::invalid(&self.served.resource, name, causes)),
        }
    }

    fn prepare_definition(new: &mut Value) {
        crd::establish(new, &object::now());
    }

    /// The refusal to write an object that is not the one, or not in the state, that the client means.
    pub(crate) fn broken_precondition(&self, name: &str, what: &str, given: &str, found: &str) -> Failure {
        let resource = &self.served.resource;
        let separator = if self.namespace.is_empty() { "" } else { "/" };
        let why = format!(
            "StorageError: invalid object, Code: 4, Key: /registry/{}/{}{separator}{name}, ResourceVersion: 0, \
             AdditionalErrorMsg: Precondition failed: {what} in precondition: {given}, {what} in object meta: {found}",
            resource.plural, self.namespace
        );
        Failure::conflict(resource, name, &why)
    }

    /// Checks the version and uid that a changed object carries against the stored one.
    pub(crate) fn check_version(&self, new: &mut Value, old: &Value) -> Answer<()> {
        let resource = &self.served.resource;
        let name = object::text(old, "name").to_owned();
        let uid = object::text(new, "uid");
        if !uid.is_empty() && uid != object::text(old, "uid") {
            return Err(self.broken_precondition(&name, "UID", uid, object::text(old, "uid")));
        }
        let version = read::at(new, &["metadata", "resourceVersion"]);
        let given = version.as_str().unwrap_or_default();
        if given.is_empty() || given == "0" {
            if !self.served.rules.unconditional_update() {
                let cause = Cause {
                    reason: CauseReason::Invalid,
                    message: "Invalid value: 0: must be specified for an update".to_owned(),
                    field: "metadata.resourceVersion".to_owned(),
                };
                return Err(Failure::invalid_kind(&resource.group, &resource.plural, &name, &[cause]));
            }
            let current = read::at(old, &["metadata", "resourceVersion"]).clone();
            object::metadata(new).insert("resourceVersion".to_owned(), current);
            return Ok(());
        }
        if given.parse::<u64>().is_err() {
            let cause = Cause {
                reason: CauseReason::Invalid,
                message: format!("Invalid value: {given:?}: must be a whole number"),
                field: "metadata.resourceVersion".to_owned(),
            };
            return Err(Failure::invalid_kind("", "", "", &[cause]));
        }
        if given != object::text(old, "resourceVersion") {
            return Err(Failure::modified(resource, &name));
        }
        Ok(())
    }
}

/// The longest name that is taken from a client's own description of itself.
const NAME_LIMIT: usize = 128;

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
fn keep_times(new: &mut Value, old: &Value) {
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

/// Who writes, for the record of managers: by the name in the options, else by the program's own.
pub(super) fn writer<'a>(call: &'a Call, options: &'a WriteOptions) -> Writer<'a> {
    let has_status = call.served.resource.subresources.contains(&Subresource::Status);
    let reset: &[&str] = match call.subresource {
        Some(Subresource::Status) if call.served.rules.status_keeps_metadata() => &["spec", "metadata"],
        Some(Subresource::Status) => &["spec"],
        Some(Subresource::Finalize | Subresource::EphemeralContainers) => &["status"],
        None if has_status => &["status"],
        _ => &[],
    };
    Writer {
        manager: options.field_manager.as_deref().unwrap_or_else(|| program(call)),
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

/// What admission reads besides the object is in the store.
impl Reader for Call {
    fn get(&self, group: &str, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let served = self.registry.by_name(group, resource)?;
        let object = self.store().get(&Key::new(served.collection.clone(), namespace, name))?;
        serde_json::from_slice(&object.bytes).ok()
    }

    fn list(&self, group: &str, resource: &str) -> Vec<Value> {
        let Some(served) = self.registry.by_name(group, resource) else { return Vec::new() };
        let view = self.store().view(&served.collection);
        view.range(None, None).filter_map(|object| serde_json::from_slice(&object.bytes).ok()).collect()
    }

    fn toleration_seconds(&self) -> rules::TolerationSeconds {
        self.api.inner.options.toleration_seconds
    }
}

/// The bytes of an object but for its version, which the store fills in at the very end.
struct Encoded {
    before: Vec<u8>,
    after: Vec<u8>,
    depth: usize,
}

impl Encoded {
    fn new(object: &Value) -> Self {
        // Nothing but the number is left to write under the store's lock.
        let mut depth = 2;
        let mut before = b"{".to_vec();
        let mut after = Vec::new();
        let mut metadata = Vec::new();
        for (key, value) in object.as_object().into_iter().flatten() {
            match (key.as_str(), value) {
                ("metadata", Value::Object(fields)) => {
                    depth = depth.max(2 + members(&mut metadata, fields, "resourceVersion"));
                }
                ("metadata", _) => {}
                ("apiVersion" | "kind", _) => {
                    depth = depth.max(1 + member(&mut before, key, value));
                    before.push(b',');
                }
                _ => {
                    after.push(b',');
                    depth = depth.max(1 + member(&mut after, key, value));
                }
            }
        }
        before.extend_from_slice(br#""metadata":{"#);
        before.extend_from_slice(&metadata);
        if !metadata.is_empty() {
            before.push(b',');
        }
        before.extend_from_slice(br#""resourceVersion":""#);
        let mut end = br#""}"#.to_vec();
        end.append(&mut after);
        end.push(b'}');
        Self { before, after: end, depth }
    }

    /// How deep the object nests, itself included.
    fn depth(&self) -> usize {
        self.depth
    }

    /// How many bytes the object has, but for its version.
    fn length(&self) -> usize {
        self.before.len() + self.after.len()
    }

    /// The change that stores the object.
    fn put(self) -> Change {
        Change::Put(Box::new(move |revision| self.fill(revision)))
    }

    /// The change that removes the object, whose last state this was.
    fn remove(self) -> Change {
        Change::Delete(Box::new(move |revision| self.fill(revision)))
    }

    fn fill(self, revision: u64) -> Bytes {
        let mut bytes = self.before;
        bytes.reserve_exact(self.after.len() + 20);
        bytes.extend_from_slice(revision.to_string().as_bytes());
        bytes.extend_from_slice(&self.after);
        bytes.into()
    }
}

/// Writes the members of an object; returns how deep the deepest value nests.
fn members(bytes: &mut Vec<u8>, map: &Map<String, Value>, without: &str) -> usize {
    let mut deepest = 0;
    for (key, value) in map.iter().filter(|(key, _)| *key != without) {
        if !bytes.is_empty() {
            bytes.push(b',');
        }
        deepest = deepest.max(member(bytes, key, value));
    }
    deepest
}

/// Writes a member of an object; returns how deep its value nests.
fn member(bytes: &mut Vec<u8>, key: &str, value: &Value) -> usize {
    let mut deepest = 0;
    // Writing JSON values to memory does not fail.
    let _ = serde_json::to_writer(&mut *bytes, key);
    bytes.push(b':');
    let nesting = Nesting { depth: 0, deepest: &mut deepest };
    let _ = value.serialize(&mut serde_json::Serializer::with_formatter(bytes, nesting));
    deepest
}

/// Compact JSON, and how deep it gets.
struct Nesting<'a> {
    depth: usize,
    deepest: &'a mut usize,
}

impl Nesting<'_> {
    fn enter(&mut self) {
        self.depth += 1;
        *self.deepest = self.depth.max(*self.deepest);
    }
}

impl Formatter for Nesting<'_> {
    fn begin_array<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.enter();
        writer.write_all(b"[")
    }

    fn end_array<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth -= 1;
        writer.write_all(b"]")
    }

    fn begin_object<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.enter();
        writer.write_all(b"{")
    }

    fn end_object<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth -= 1;
        writer.write_all(b"}")
    }
}

/// The change that stores an object.
pub(crate) fn put(object: &Value) -> Change {
    Encoded::new(object).put()
}

/// The change that removes an object whose last state was this.
pub(crate) fn remove(object: &Value) -> Change {
    Encoded::new(object).remove()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_filled_into_the_bytes() {
        for object in [
            json!({ "apiVersion": "v1", "kind": "A", "metadata": { "name": "x", "resourceVersion": "1" }, "spec": [1] }),
            json!({ "apiVersion": "v1", "kind": "A", "metadata": {} }),
        ] {
            let mut expected = object.clone();
            expected["metadata"]["resourceVersion"] = "42".into();
            let bytes = Encoded::new(&object).fill(42);
            assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), expected);
        }
    }

    #[test]
    fn how_deep_an_object_nests_is_known_when_it_is_encoded() {
        for (object, depth) in [
            (json!({ "metadata": {} }), 2),
            (json!({ "metadata": { "labels": {} }, "spec": {} }), 3),
            (json!({ "metadata": { "managedFields": [{ "fieldsV1": {} }] } }), 5),
            (json!({ "metadata": {}, "spec": { "a": [[], { "b": 1 }], "c": [] }, "data": 1 }), 4),
        ] {
            assert_eq!(Encoded::new(&object).depth(), depth, "{object}");
        }
    }
}
