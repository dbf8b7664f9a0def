//! What every written object goes through: defaults, preparation, admission, validation, generation, managers.

use serde_json::Value;

use super::error::{Answer, Failure};
use super::managed;
use super::query::WriteOptions;
use super::reader::StoreReader;
use super::registry::Stored;
use super::{Call, crd, object};
use crate::resource::{Cause, CauseReason, Subresource};
use crate::rules::{self, Operation, read};

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
        self.served.rules.default(new);
        // What is added from here on belongs to nobody: otherwise the next apply without it would take it away.
        if tracking == Tracking::Update {
            managed::track(self, None, new, options);
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
        self.served.rules.default(new);
        // A binding changes what nobody else may, and is no write of the pod itself: nobody comes to own anything.
        if self.subresource == Some(Subresource::Binding) {
            return Ok(());
        }
        if tracking == Tracking::Update {
            managed::track(self, Some(old), new, options);
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
        managed::keep_times(new, old);
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
                message: format!(
                    "Invalid value: {given:?}: strconv.ParseUint: parsing {given:?}: invalid syntax"
                ),
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
