//! The policies of a job: which failures count, which successes are enough, and when a pod is replaced.

use serde_json::{Value, json};

use super::is_indexed;
use crate::resource::Cause;
use crate::rules::field::{Path, quote};
use crate::rules::names;
use crate::rules::read::{at, has, items, number, text};

const ACTIONS: [&str; 4] = ["Count", "FailIndex", "FailJob", "Ignore"];
const MAX_RULES: usize = 20;
const MAX_EXIT_CODES: usize = 255;

/// Checks which failures count.
pub(super) fn failure_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let rules = items(spec, &["podFailurePolicy", "rules"]);
    let path = path.child("rules");
    causes.extend(too_many(rules.len(), MAX_RULES, &path));
    for (index, rule) in rules.iter().enumerate() {
        let path = path.index(index);
        causes.extend(action_cause(spec, text(rule, &["action"]), &path.child("action")));
        let (codes, conditions) = (at(rule, &["onExitCodes"]), items(rule, &["onPodConditions"]));
        if !codes.is_null() {
            causes.extend(exit_code_causes(spec, codes, &path.child("onExitCodes")));
        }
        causes.extend(condition_causes(conditions, &path.child("onPodConditions")));
        match (codes.is_null(), conditions.is_empty()) {
            (false, false) => {
                causes.push(
                    path.invalid_alone("specifying both OnExitCodes and OnPodConditions is not supported"),
                );
            }
            (true, true) => {
                causes.push(
                    path.invalid_alone("specifying one of OnExitCodes and OnPodConditions is required"),
                );
            }
            _ => {}
        }
    }
    causes
}

fn too_many(count: usize, most: usize, path: &Path) -> Option<Cause> {
    (count > most).then(|| path.too_many(count, most))
}

fn action_cause(spec: &Value, action: &str, path: &Path) -> Option<Cause> {
    match action {
        "" => {
            let known = ACTIONS.map(quote).join(" ");
            Some(path.required(format!("valid values: [{known}]")))
        }
        "FailIndex" if !has(spec, &["backoffLimitPerIndex"]) => {
            Some(path.invalid(action, "requires the backoffLimitPerIndex to be set"))
        }
        action if ACTIONS.contains(&action) => None,
        action => Some(path.not_supported(action, &ACTIONS)),
    }
}

fn condition_causes(conditions: &[Value], path: &Path) -> Vec<Cause> {
    let mut causes: Vec<Cause> = too_many(conditions.len(), MAX_RULES, path).into_iter().collect();
    for (index, pattern) in conditions.iter().enumerate() {
        let path = path.index(index);
        let kind = text(pattern, &["type"]);
        causes.extend(path.child("type").each_invalid(kind, names::qualified(kind)));
        let (status, path) = (text(pattern, &["status"]), path.child("status"));
        match status {
            "True" | "False" | "Unknown" => {}
            "" => causes.push(path.required("valid values: [\"False\" \"True\" \"Unknown\"]")),
            _ => causes.push(path.not_supported(status, &["False", "True", "Unknown"])),
        }
    }
    causes
}

fn exit_code_causes(spec: &Value, codes: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let operator = text(codes, &["operator"]);
    let within = path.child("operator");
    match operator {
        "In" | "NotIn" => {}
        "" => causes.push(within.required("valid values: [\"In\" \"NotIn\"]")),
        _ => causes.push(within.not_supported(operator, &["In", "NotIn"])),
    }
    if let Some(container) = at(codes, &["containerName"]).as_str() {
        let of = |kind| items(spec, &["template", "spec", kind]).iter();
        let is_known = of("containers").chain(of("initContainers")).any(|c| text(c, &["name"]) == container);
        if !is_known {
            let detail = "must be one of the container or initContainer names in the pod template";
            causes.push(path.child("containerName").invalid(container, detail));
        }
    }
    let path = path.child("values");
    let values: Vec<i64> = items(codes, &["values"]).iter().filter_map(Value::as_i64).collect();
    if values.is_empty() {
        causes.push(path.invalid(json!([]), "at least one value is required"));
    }
    causes.extend(too_many(values.len(), MAX_EXIT_CODES, &path));
    for (index, value) in values.iter().enumerate() {
        if operator == "In" && *value == 0 {
            causes.push(path.index(index).invalid(0, "must not be 0 for the In operator"));
        }
        if values[..index].contains(value) {
            causes.push(path.index(index).duplicate(*value));
        }
    }
    if !values.is_sorted() {
        causes.push(path.invalid(json!(values), "must be ordered"));
    }
    causes
}

/// Checks when a pod is replaced.
pub(super) fn replacement_causes(spec: &Value, path: &Path) -> Option<Cause> {
    let policy = at(spec, &["podReplacementPolicy"]).as_str()?;
    let known: &[&str] =
        if has(spec, &["podFailurePolicy"]) { &["Failed"] } else { &["Failed", "TerminatingOrFailed"] };
    (!known.contains(&policy)).then(|| path.not_supported(policy, known))
}

/// Checks which successes are enough.
pub(super) fn success_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let policy = at(spec, &["successPolicy"]);
    if policy.is_null() {
        return Vec::new();
    }
    if !is_indexed(spec) {
        return vec![path.invalid(policy.clone(), "requires indexed completion mode")];
    }
    let path = path.child("rules");
    let rules = items(policy, &["rules"]);
    let mut causes: Vec<Cause> = too_many(rules.len(), MAX_RULES, &path).into_iter().collect();
    if rules.is_empty() {
        let detail = "at least one rules must be specified when the successPolicy is specified";
        causes.push(path.required(detail));
    }
    let completions = number(spec, &["completions"]).unwrap_or_default();
    for (index, rule) in rules.iter().enumerate() {
        causes.extend(success_rule_causes(rule, completions, &path.index(index)));
    }
    causes
}

fn success_rule_causes(rule: &Value, completions: i64, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let (count, indexes) = (number(rule, &["succeededCount"]), at(rule, &["succeededIndexes"]).as_str());
    if count.is_none() && indexes.is_none() {
        causes.push(path.required("at least one of succeededCount or succeededIndexes must be specified"));
    }
    let mut total = None;
    if let Some(indexes) = indexes {
        let path = path.child("succeededIndexes");
        match count_indexes(indexes, completions) {
            Ok(count) => total = Some(count),
            Err(why) => causes.push(path.invalid(indexes, format!("error parsing succeededIndexes: {why}"))),
        }
    }
    let path = path.child("succeededCount");
    let Some(count) = count else { return causes };
    if count < 0 {
        causes.push(path.invalid(count, super::NOT_NEGATIVE));
    }
    if count > completions {
        let detail =
            format!("must be less than or equal to {completions} (the number of specified completions)");
        causes.push(path.invalid(count, detail));
    }
    if let Some(total) = total.filter(|total| count > *total) {
        let detail = format!(
            "must be less than or equal to {total} (the number of indexes in the specified succeededIndexes field)"
        );
        causes.push(path.invalid(count, detail));
    }
    causes
}

/// How many indexes a list such as `0-2,5` names, all of them below `completions` and each larger than the one before.
pub(super) fn count_indexes(list: &str, completions: i64) -> Result<i64, String> {
    let mut total = 0;
    let mut previous: Option<i64> = None;
    for interval in list.split(',').filter(|_| !list.is_empty()) {
        let limit = |text: &str| {
            text.parse::<i64>()
                .map_err(|_| format!("cannot convert string to integer for index: {}", quote(text)))
        };
        let limits: Vec<&str> = interval.split('-').collect();
        let (first, end) = match limits.as_slice() {
            [first] => (limit(first)?, limit(first)?),
            [first, end] => (limit(first)?, limit(end)?),
            _ => {
                return Err(format!(
                    "the fragment {} violates the requirement that an index interval can have at most two parts separated by '-'",
                    quote(interval)
                ));
            }
        };
        if end >= completions {
            return Err(format!("too large index: {}", quote(limits.last().unwrap_or(&""))));
        }
        if limits.len() == 2 && first >= end {
            return Err(format!("non-increasing order, previous: {first}, current: {end}"));
        }
        if let Some(previous) = previous.filter(|previous| *previous >= first) {
            return Err(format!("non-increasing order, previous: {previous}, current: {first}"));
        }
        total += end - first + 1;
        previous = Some(end);
    }
    Ok(total)
}
