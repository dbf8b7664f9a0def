//! Node selectors: which nodes a volume or a pod can be on.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::field::Path;
use super::names;
use super::read::{items, text};
use super::selector::values_cause;
use crate::resource::Cause;

/// Checks a node selector: terms of label expressions and field expressions.
pub(super) fn selector_causes(selector: &Value, path: &Path) -> Vec<Cause> {
    let path = path.child("nodeSelectorTerms");
    let terms = items(selector, &["nodeSelectorTerms"]);
    if terms.is_empty() {
        return vec![path.required("must have at least one node selector term")];
    }
    terms.iter().enumerate().flat_map(|(index, term)| term_causes(term, &path.index(index))).collect()
}

/// Checks one term of a node selector.
pub(super) fn term_causes(term: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for (index, expression) in items(term, &["matchExpressions"]).iter().enumerate() {
        causes.extend(label_expression_causes(expression, &path.child("matchExpressions").index(index)));
    }
    for (index, expression) in items(term, &["matchFields"]).iter().enumerate() {
        causes.extend(field_expression_causes(expression, &path.child("matchFields").index(index)));
    }
    causes
}

/// Checks one term of a class's allowed topologies; returns the values it allows for each key.
pub(super) fn topology_causes(term: &Value, path: &Path) -> (BTreeMap<String, BTreeSet<String>>, Vec<Cause>) {
    let mut allowed = BTreeMap::new();
    let mut causes = Vec::new();
    for (index, expression) in items(term, &["matchLabelExpressions"]).iter().enumerate() {
        let path = path.child("matchLabelExpressions").index(index);
        let values = items(expression, &["values"]);
        if values.is_empty() {
            causes.push(path.child("values").required(""));
        }
        let mut seen = BTreeSet::new();
        for (index, value) in values.iter().filter_map(Value::as_str).enumerate() {
            if !seen.insert(value.to_owned()) {
                causes.push(path.child("values").index(index).duplicate(value));
            }
        }
        let key = text(expression, &["key"]);
        causes.extend(path.child("key").each_invalid(key, names::qualified(key)));
        if allowed.insert(key.to_owned(), seen).is_some() {
            causes.push(path.child("key").duplicate(key));
        }
    }
    (allowed, causes)
}

fn label_expression_causes(expression: &Value, path: &Path) -> Vec<Cause> {
    let values = items(expression, &["values"]);
    let mut causes = Vec::new();
    match text(expression, &["operator"]) {
        operator @ ("In" | "NotIn" | "Exists" | "DoesNotExist") => {
            causes.extend(values_cause(operator, values, path));
        }
        "Gt" | "Lt" if values.len() != 1 => {
            let detail = "must be specified single value when `operator` is 'Lt' or 'Gt'";
            causes.push(path.child("values").required(detail));
        }
        "Gt" | "Lt" => {}
        other => causes.push(path.child("operator").invalid(other, "not a valid selector operator")),
    }
    let key = text(expression, &["key"]);
    causes.extend(path.child("key").each_invalid(key, names::qualified(key)));
    for (index, value) in values.iter().filter_map(Value::as_str).enumerate() {
        causes.extend(path.child("values").index(index).each_invalid(value, names::label_value(value)));
    }
    causes
}

fn field_expression_causes(expression: &Value, path: &Path) -> Vec<Cause> {
    let values = items(expression, &["values"]);
    let mut causes = Vec::new();
    match text(expression, &["operator"]) {
        "In" | "NotIn" if values.len() != 1 => {
            let detail = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";
            causes.push(path.child("values").required(detail));
        }
        "In" | "NotIn" => {}
        other => causes.push(path.child("operator").invalid(other, "not a valid selector operator")),
    }
    match text(expression, &["key"]) {
        "metadata.name" => {
            for (index, value) in values.iter().filter_map(Value::as_str).enumerate() {
                causes.extend(path.child("values").index(index).each_invalid(value, names::subdomain(value)));
            }
        }
        key => causes.push(path.child("key").invalid(key, "not a valid field selector key")),
    }
    causes
}
