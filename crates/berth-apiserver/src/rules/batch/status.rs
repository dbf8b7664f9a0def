//! The status of a job: what may be written there, and how it is shown.

use serde_json::Value;

use super::{NOT_NEGATIVE, policies};
use crate::resource::Cause;
use crate::rules::field::Path;
use crate::rules::read::{at, flag, has, items, number, same, text};

/// Whether the condition of a type holds.
pub(super) fn has_condition(status: &Value, kind: &str) -> bool {
    items(status, &["conditions"])
        .iter()
        .find(|condition| text(condition, &["type"]) == kind)
        .is_some_and(|condition| text(condition, &["status"]) == "True")
}

/// The status of a job in one word.
pub(super) fn shown(job: &Value) -> &'static str {
    let status = at(job, &["status"]);
    let has_condition = |kind| has_condition(status, kind);
    if has_condition("Complete") {
        "Complete"
    } else if has_condition("Failed") {
        "Failed"
    } else if has(job, &["metadata", "deletionTimestamp"]) {
        "Terminating"
    } else if has_condition("Suspended") {
        "Suspended"
    } else if has_condition("FailureTarget") {
        "FailureTarget"
    } else if has_condition("SuccessCriteriaMet") {
        "SuccessCriteriaMet"
    } else {
        "Running"
    }
}

/// Checks the status of a job that replaces another. What is wrong already may stay.
pub(super) fn causes(new: &Value, old: &Value) -> Vec<Cause> {
    let path = Path::new("status");
    let (spec, before) = (at(new, &["spec"]), at(old, &["status"]));
    let status = at(new, &["status"]);
    let mut causes = counter_causes(status, before, &path);
    causes.extend(condition_causes(status, before, &path));
    let completions = number(spec, &["completions"]);
    for field in ["completedIndexes", "failedIndexes"] {
        let indexes = text(status, &[field]);
        if let Some(completions) = completions.filter(|_| indexes != text(before, &[field]))
            && let Err(why) = policies::count_indexes(indexes, completions)
        {
            causes.push(path.child(field).invalid(indexes, format!("error parsing {field}: {why}")));
        }
    }
    let start = ["startTime"];
    if has(before, &start)
        && !same(at(before, &start), at(status, &start))
        && !flag(new, &["spec", "suspend"])
    {
        let detail = "field is immutable for unsuspended job once set";
        causes.push(path.child("startTime").invalid(at(status, &start).clone(), detail));
    }
    causes
}

fn counter_causes(status: &Value, before: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let count = |status: &Value, field: &str| number(status, &[field]).unwrap_or_default();
    for field in ["active", "succeeded", "failed", "ready", "terminating"] {
        if count(status, field) < 0 {
            causes.push(path.child(field).invalid(count(status, field), NOT_NEGATIVE));
        }
    }
    if count(status, "failed") < count(before, "failed") {
        let detail = "cannot decrease the failed counter";
        causes.push(path.child("failed").invalid(count(status, "failed"), detail));
    }
    if count(status, "ready") > count(status, "active") {
        let detail = "cannot set more ready pods than active";
        causes.push(path.child("ready").invalid(count(status, "ready"), detail));
    }
    causes
}

fn condition_causes(status: &Value, before: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let conditions = path.child("conditions");
    let has_condition = |kind| has_condition(status, kind);
    let (complete, failed) = (has_condition("Complete"), has_condition("Failed"));
    if complete && failed {
        causes.push(conditions.invalid_alone("cannot set Complete=True and Failed=true conditions"));
    }
    for kind in ["Failed", "Complete", "FailureTarget", "SuccessCriteriaMet"] {
        if self::has_condition(before, kind) && !has_condition(kind) {
            let terminal = if kind == "SuccessCriteriaMet" { "" } else { "terminal " };
            let detail = format!("cannot disable the {terminal}{kind}=True condition");
            causes.push(conditions.invalid_alone(&detail));
        }
    }
    let completed_at = at(status, &["completionTime"]);
    if complete && completed_at.is_null() {
        let detail = "completionTime is required for Complete jobs";
        causes.push(path.child("completionTime").required(detail));
    }
    if !complete && !completed_at.is_null() {
        let detail = "cannot set completionTime when there is no Complete=True condition";
        causes.push(path.child("completionTime").invalid(completed_at.clone(), detail));
    }
    if failed && !has_condition("FailureTarget") {
        let detail = "cannot set Failed=True condition without the FailureTarget=true condition";
        causes.push(conditions.invalid_alone(detail));
    }
    if complete && !has_condition("SuccessCriteriaMet") {
        let detail = "cannot set Complete=True condition without the SuccessCriteriaMet=true condition";
        causes.push(conditions.invalid_alone(detail));
    }
    if complete || failed {
        let active = number(status, &["active"]).unwrap_or_default();
        if active > 0 {
            causes.push(path.child("active").invalid(active, "active>0 is invalid for finished job"));
        }
        if !has(status, &["startTime"]) {
            causes.push(path.child("startTime").required("startTime is required for finished job"));
        }
        let uncounted = at(status, &["uncountedTerminatedPods"]);
        if !items(uncounted, &["succeeded"]).is_empty() || !items(uncounted, &["failed"]).is_empty() {
            let path = path.child("uncountedTerminatedPods");
            causes.push(path.invalid(uncounted.clone(), "must be empty for finished job"));
        }
    }
    causes
}
