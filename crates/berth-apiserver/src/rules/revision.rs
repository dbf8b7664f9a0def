//! ControllerRevision: a numbered copy of what a workload was.

use serde_json::Value;

use super::Rules;
use super::field::Path;
use super::metadata::immutable;
use super::read::{at, number};
use crate::resource::Cause;

/// The rules of controller revisions.
pub(super) struct Revision;

impl Rules for Revision {
    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        if let Some(revision) = number(object, &["revision"]).filter(|revision| *revision < 0) {
            let detail = "must be greater than or equal to 0";
            causes.push(Path::new("revision").invalid(revision, detail));
        }
        if at(object, &["data"]).is_null() {
            causes.push(Path::new("data").required("data is mandatory"));
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        causes.extend(immutable(at(new, &["data"]), at(old, &["data"]), &Path::new("data")));
        causes
    }
}
