//! Server-side apply: what is stated is merged into the object that is there, or becomes a new one.

use serde_json::{Value, json};

use super::Call;
use super::content::to_store;
use super::error::{Answer, Failure};
use super::object;
use super::request::WriteOptions;
use super::write::{Tracking, WRITE_TRIES, Written, writer};
use crate::patch::{self, ApplyError};
use crate::resource::{Cause, CauseReason};
use crate::rules::read;
use crate::schema;

impl Call {
    pub(super) async fn apply(&self, bytes: &[u8], options: &WriteOptions) -> Answer<(u16, Written)> {
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

/// What is applied, merged into the object that is there.
fn merge_applied(call: &Call, old: Option<&Value>, applied: &Value, options: &WriteOptions) -> Answer<Value> {
    let nothing = json!({});
    let type_ = &call.served.stored_schema;
    let merged = patch::apply(type_, old.unwrap_or(&nothing), applied, &writer(call, options), options.force);
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
        ApplyError::TooLarge { .. } => Failure::too_large(message),
        ApplyError::Unfit(_) => Failure::plain(500, message),
    }
}
