//! Create, update, patch and apply: one way to write an object, tried again when somebody else was faster.
//!
//! Every written object goes through defaults, preparation, admission, validation and the record of who manages which
//! fields.

use std::sync::Arc;

use http::header::USER_AGENT;
use http::{Method, Response};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::content::{self, from_store, renew, to_store};
use super::error::{Answer, Failure};
use super::object::{self, Encoded, Expected};
use super::registry::{Registry, Stored};
use super::request::{self, WriteOptions};
use super::{ApiServer, Body, Call, crd};
use crate::patch::{self, ApplyError, PatchError, Writer};
use crate::resource::{Cause, CauseReason, Subresource};
use crate::rules::{self, Operation, Reader, read};
use crate::schema::{self, Shape, Type};
use crate::store::{self, Expect, Key, Object, WriteError};

/// How often a name is made up before giving up.
const NAME_TRIES: usize = 8;
/// How often a write is tried again when others are faster.
const WRITE_TRIES: usize = 64;
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
        if depth <= object::MAX_DEPTH {
            return Ok(encoded);
        }
        let cause = Cause {
            reason: CauseReason::TooMany,
            message: format!(
                "Too many: {depth}: an object, its managedFields included, may be nested at most {} levels deep",
                object::MAX_DEPTH
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

    fn check_name(&self, new: &mut Value) -> Answer<()> {
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
            object::settle_patched(&self.served, &mut object, options.field_validation, &mut warnings)?;
            self.check_namespace(&mut object)?;
            self.check_name(&mut object)?;
            to_store(&self.served, &mut object);
            Ok(object)
        };
        let written = self.modify(&options, Tracking::Update, change).await?;
        self.after_write(&written, options.dry_run).await?;
        self.reply(200, written, warnings)
    }

    async fn apply(&self, bytes: &[u8], options: &WriteOptions) -> Answer<(u16, Written)> {
        if options.field_manager.is_none() {
            let cause = Cause {
                reason: CauseReason::Required,
                message: "Required value: is required for apply patch".to_owned(),
                field: "fieldManager".to_owned(),
            };
            return Err(Failure::invalid_options("PatchOptions", &[cause]));
        }
        let mut applied = object::parse_yaml(bytes)
            .map_err(|why| Failure::bad_request(format!("error decoding YAML: {why}")))?;
        self.check_applied(&applied)?;
        to_store(&self.served, &mut applied);
        for _ in 0..WRITE_TRIES {
            if self.store().get(&self.key(&self.name)).is_some() {
                let written = self
                    .modify(options, Tracking::Settled, |old| self.applied(Some(old), &applied, options))
                    .await?;
                return Ok((200, written));
            }
            if self.subresource.is_some() {
                return Err(Failure::not_found(&self.served.resource, &self.name));
            }
            let uid = object::text(&applied, "uid");
            if !uid.is_empty() {
                let why = format!(
                    "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                );
                return Err(Failure::conflict(&self.served.resource, &self.name, &why));
            }
            let new = self.applied(None, &applied, options)?;
            match self.insert(new, options, Tracking::Settled).await {
                Ok(written) => return Ok((201, written)),
                // Somebody else created it just now: then it is a change.
                Err(failure) if failure.reason == "AlreadyExists" => {}
                Err(failure) => return Err(failure),
            }
        }
        Err(Failure::modified(&self.served.resource, &self.name))
    }

    fn check_applied(&self, applied: &Value) -> Answer<()> {
        if !applied.is_object() {
            return Err(Failure::bad_request("error decoding YAML: the patch is not an object"));
        }
        let (kind, api_version) = (read::text(applied, &["kind"]), read::text(applied, &["apiVersion"]));
        if kind != &*self.served.resource.kind || api_version != self.served.api_version {
            let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
            return Err(Failure::bad_request(format!("invalid object type: {group}/{version}, Kind={kind}")));
        }
        if read::has(applied, &["metadata", "managedFields"]) {
            return Err(Failure::bad_request("metadata.managedFields must be nil"));
        }
        Ok(())
    }

    /// What is applied, merged into what is there, under the name and namespace of the path.
    fn applied(&self, old: Option<&Value>, applied: &Value, options: &WriteOptions) -> Answer<Value> {
        let mut merged = merge_applied(self, old, applied, options)?;
        self.check_namespace(&mut merged)?;
        self.check_name(&mut merged)?;
        Ok(merged)
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
            track(self, None, new, options);
        }
        served.rules.prepare_create(new);
        if served.rules.counts_generation() {
            object::metadata(new).insert("generation".to_owned(), 1.into());
        }
        self.admit(Operation::Create, new, None)?;
        self.validate(new, None)?;
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
            track(self, Some(old), new, options);
        }
        let managers = object::managers(new);
        if is_status {
            served.rules.prepare_status_update(new, old);
        } else if is_finalize {
            rules::namespace::prepare_finalize(new, old);
        } else {
            served.rules.prepare_update(new, old);
            if served.rules.generation_changes(new, old) {
                object::bump_generation(new);
            }
        }
        object::set_managers(new, managers);
        // What admission checks of updates, Kubernetes checks last.
        if !is_status {
            rules::complete_update(&served.resource, new, old);
        }
        self.validate(new, Some(old))?;
        if !is_status {
            self.admit(Operation::Update, new, Some(old))?;
        }
        if &*served.resource.group == crd::GROUP && !is_status {
            Self::prepare_definition(new);
        }
        keep_times(new, old);
        Ok(())
    }

    /// Asks admission; what it may read is the store.
    pub(crate) fn admit(&self, operation: Operation, new: &mut Value, old: Option<&Value>) -> Answer<()> {
        let reader = StoreReader { api: &self.api, registry: &self.registry };
        rules::admit(operation, &self.served.resource, new, old, &reader).map_err(|denied| {
            let name = object::text(new, "name");
            Failure::denied(&self.served.resource, name, denied.code, denied.reason, &denied.message)
        })
    }

    fn validate(&self, new: &Value, old: Option<&Value>) -> Answer<()> {
        let served = &self.served;
        let is_status = self.subresource == Some(Subresource::Status);
        let is_finalize = self.subresource == Some(Subresource::Finalize);
        let mut causes = match old {
            None => rules::metadata_causes(new, served.resource.namespaced, served.rules.name_rule()),
            Some(old) => rules::metadata_update_causes(new, old),
        };
        causes.extend(match old {
            None => served.rules.validate(new),
            Some(old) if is_status => served.rules.validate_status_update(new, old),
            Some(_) if is_finalize => rules::namespace::validate_finalize(new),
            Some(old) => served.rules.validate_update(new, old),
        });
        if causes.is_empty() {
            return Ok(());
        }
        let name = object::text(new, "name");
        if served.stored == Stored::CoreEvents {
            return Err(Failure::invalid_kind("", "Event", name, &causes));
        }
        Err(Failure::invalid(&served.resource, name, &causes))
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

/// Records that the caller changed what differs between `old` and `new`.
fn track(call: &Call, old: Option<&Value>, new: &mut Value, options: &WriteOptions) {
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

/// What is applied, merged into the object that is there.
fn merge_applied(call: &Call, old: Option<&Value>, applied: &Value, options: &WriteOptions) -> Answer<Value> {
    let manager = options.field_manager.as_deref().unwrap_or_default();
    let nothing = json!({});
    let type_ = &call.served.stored_schema;
    let merged = patch::apply(type_, old.unwrap_or(&nothing), applied, &writer(call, manager), options.force);
    let mut merged = merged.map_err(apply_failure)?;
    if let Some(error) = schema::decode(type_, &mut merged).errors.first() {
        return Err(Failure::plain(500, patch::misfit_message(applied, error)));
    }
    Ok(merged)
}

fn apply_failure(error: ApplyError) -> Failure {
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

/// Reads other objects from the store.
struct StoreReader<'a> {
    api: &'a ApiServer,
    registry: &'a Registry,
}

impl Reader for StoreReader<'_> {
    fn get(&self, group: &str, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let served = self.registry.by_name(group, resource)?;
        let object = self.api.inner.store.get(&Key::new(served.collection.clone(), namespace, name))?;
        serde_json::from_slice(&object.bytes).ok()
    }

    fn list(&self, group: &str, resource: &str) -> Vec<Value> {
        let Some(served) = self.registry.by_name(group, resource) else { return Vec::new() };
        let view = self.api.inner.store.view(&served.collection);
        view.range(None, None).filter_map(|object| serde_json::from_slice(&object.bytes).ok()).collect()
    }
}
