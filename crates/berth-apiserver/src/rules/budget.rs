//! The rules of PodDisruptionBudgets: how many pods of an application may be disrupted at a time, and whether one of them
//! may be evicted now.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::read::{at, drop, has, items, keep, map, name, number, same, text};
use super::selector::{LabelSelector, label_selector_causes};
use super::table::{AGE, Column, NAME, integer, string};
use super::{Rules, age};
use crate::resource::Cause;

const COLUMNS: &[Column] = &[
    NAME,
    string("Min Available", "The minimum number of pods that must be available."),
    string("Max Unavailable", "The maximum number of pods that may be unavailable."),
    integer("Allowed Disruptions", "Calculated number of pods that may be disrupted at this time."),
    AGE,
];
const EVICTION_POLICIES: [&str; 2] = ["AlwaysAllow", "IfHealthyBudget"];
/// How many evictions a budget may carry that its controller has not seen.
const MOST_UNSEEN: usize = 2000;

/// The rules of budgets.
pub(super) struct Budget;

impl Rules for Budget {
    fn default(&self, object: &mut Value) {
        default_status(object);
    }

    fn prepare_create(&self, object: &mut Value) {
        drop(object, "status");
        default_status(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec");
        let spec = at(object, &["spec"]);
        let mut causes = Vec::new();
        if has(spec, &["minAvailable"]) && has(spec, &["maxUnavailable"]) {
            let detail = "minAvailable and maxUnavailable cannot be both set";
            causes.push(path.invalid(spec.clone(), detail));
        }
        for field in ["minAvailable", "maxUnavailable"] {
            causes.extend(amount_cause(at(spec, &[field]), &path.child(field)));
        }
        if has(spec, &["selector"]) {
            causes.extend(label_selector_causes(at(spec, &["selector"]), &path.child("selector")));
        }
        let policy = text(spec, &["unhealthyPodEvictionPolicy"]);
        if has(spec, &["unhealthyPodEvictionPolicy"]) && !EVICTION_POLICIES.contains(&policy) {
            causes.push(path.child("unhealthyPodEvictionPolicy").not_supported(policy, &EVICTION_POLICIES));
        }
        causes
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> Vec<Cause> {
        let path = Path::new("status");
        let counters = ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"];
        let negative = counters.iter().filter_map(|field| {
            let value = number(new, &["status", field]).filter(|value| *value < 0)?;
            Some(path.child(field).invalid(value, "must be greater than or equal to 0"))
        });
        negative.collect()
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        !same(at(new, &["spec"]), at(old, &["spec"]))
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let amount = |field| match at(object, &["spec", field]) {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            _ => "N/A".to_owned(),
        };
        vec![
            json!(name(object)),
            json!(amount("minAvailable")),
            json!(amount("maxUnavailable")),
            json!(number(object, &["status", "disruptionsAllowed"]).unwrap_or_default()),
            json!(age::of(object, now)),
        ]
    }
}

/// The counters that are written even when they are zero.
fn default_status(object: &mut Value) {
    let status = map(object, &["status"]);
    for counter in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
        super::read::default_pointer(status, counter, 0);
    }
}

/// A number of pods, or a share of them from 0% to 100%.
fn amount_cause(amount: &Value, path: &Path) -> Option<Cause> {
    match amount {
        Value::Number(number) if number.as_i64().is_some_and(|number| number < 0) => {
            Some(path.invalid(amount.clone(), "must be greater than or equal to 0"))
        }
        Value::String(text) => {
            let Some(percent) = text.strip_suffix('%').and_then(|digits| digits.parse::<u64>().ok()) else {
                let detail = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')";
                return Some(path.invalid(amount.clone(), detail));
            };
            (percent > 100).then(|| path.invalid(amount.clone(), "must not be greater than 100%"))
        }
        _ => None,
    }
}

/// Whether a pod is beyond what budgets protect: it has ended, never started, or goes anyway.
pub(crate) fn is_beyond_budgets(pod: &Value) -> bool {
    is_over(pod) || text(pod, &["status", "phase"]) == "Pending"
}

/// Whether a pod has ended or goes anyway: nothing that it becomes can be protected any more.
pub(crate) fn is_over(pod: &Value) -> bool {
    matches!(text(pod, &["status", "phase"]), "Succeeded" | "Failed")
        || has(pod, &["metadata", "deletionTimestamp"])
}

/// Whether a budget is about a pod of its namespace.
pub(crate) fn protects(budget: &Value, pod: &Value) -> bool {
    let selector = at(budget, &["spec", "selector"]);
    !selector.is_null()
        && LabelSelector::from_value(selector)
            .is_ok_and(|selector| selector.matches(at(pod, &["metadata", "labels"])))
}

/// What a budget says about the eviction of one of its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The pod is not among those that keep the application going.
    Unhealthy,
    /// One disruption fewer is allowed from now on.
    Counted,
    /// Not now; the message of the cause, and after how many seconds to ask again.
    Later(String, u32),
    /// The budget cannot be counted on.
    Broken(&'static str),
}

/// Whether a pod may be evicted now.
pub(crate) fn judge(budget: &Value, pod: &Value) -> Verdict {
    let status = |field| number(budget, &["status", field]).unwrap_or_default();
    let own = name(budget);
    let ready = items(pod, &["status", "conditions"])
        .iter()
        .any(|condition| text(condition, &["type"]) == "Ready" && text(condition, &["status"]) == "True");
    let (healthy, needed) = (status("currentHealthy"), status("desiredHealthy"));
    if !ready {
        let always = text(budget, &["spec", "unhealthyPodEvictionPolicy"]) == "AlwaysAllow";
        if always || healthy >= needed && needed > 0 {
            return Verdict::Unhealthy;
        }
    }
    if status("observedGeneration") < number(budget, &["metadata", "generation"]).unwrap_or_default() {
        let why = format!("The disruption budget {own} is still being processed by the server.");
        return Verdict::Later(why, 10);
    }
    if status("disruptionsAllowed") < 0 {
        return Verdict::Broken("pdb disruptions allowed is negative");
    }
    if at(budget, &["status", "disruptedPods"]).as_object().is_some_and(|pods| pods.len() > MOST_UNSEEN) {
        return Verdict::Broken(
            "DisruptedPods map too big - too many evictions not confirmed by PDB controller",
        );
    }
    if status("disruptionsAllowed") == 0 {
        let condition = items(budget, &["status", "conditions"]).iter().find(|condition| {
            text(condition, &["type"]) == "DisruptionAllowed" && text(condition, &["status"]) == "False"
        });
        let (reason, message) = condition
            .map_or(("", ""), |condition| (text(condition, &["reason"]), text(condition, &["message"])));
        let why = if reason == "SyncFailed" && !message.is_empty() {
            format!(
                "The disruption budget {own} does not allow evicting pods currently because it failed sync: {message}"
            )
        } else if healthy <= needed {
            format!("The disruption budget {own} needs {needed} healthy pods and has {healthy} currently")
        } else if message.is_empty() {
            format!("The disruption budget {own} does not allow evicting pods currently")
        } else {
            format!(
                "The disruption budget {own} does not allow evicting pods currently ({reason}): {message}"
            )
        };
        return Verdict::Later(why, 0);
    }
    Verdict::Counted
}

/// A budget with the eviction of a pod counted.
pub(crate) fn count_eviction(budget: &mut Value, pod: &str, now: &str) {
    let allowed = number(budget, &["status", "disruptionsAllowed"]).unwrap_or_default() - 1;
    let status = map(budget, &["status"]);
    status.insert("disruptionsAllowed".to_owned(), json!(allowed));
    let noted = status.entry("disruptedPods").or_insert_with(|| json!({}));
    if let Some(noted) = noted.as_object_mut() {
        noted.insert(pod.to_owned(), json!(now));
    }
    if allowed == 0
        && let Some(conditions) = budget.pointer_mut("/status/conditions").and_then(Value::as_array_mut)
        && let Some(condition) =
            conditions.iter_mut().find(|condition| text(condition, &["type"]) == "DisruptionAllowed")
        && text(condition, &["status"]) == "True"
    {
        condition["status"] = json!("False");
        condition["reason"] = json!("InsufficientPods");
        condition["message"] = json!("");
        condition["lastTransitionTime"] = json!(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_name_one_sensible_amount() {
        for (spec, expected) in [
            (json!({ "minAvailable": 1 }), None),
            (json!({ "maxUnavailable": "100%" }), None),
            (json!({}), None),
            (json!({ "minAvailable": 1, "maxUnavailable": 1 }), Some("spec")),
            (json!({ "minAvailable": -1 }), Some("spec.minAvailable")),
            (json!({ "maxUnavailable": "101%" }), Some("spec.maxUnavailable")),
            (json!({ "maxUnavailable": "some" }), Some("spec.maxUnavailable")),
            (json!({ "unhealthyPodEvictionPolicy": "Maybe" }), Some("spec.unhealthyPodEvictionPolicy")),
        ] {
            let causes = Budget.validate(&json!({ "metadata": { "name": "b" }, "spec": spec }));
            assert_eq!(causes.first().map(|cause| cause.field.as_str()), expected, "{spec}");
        }
    }

    #[test]
    fn an_eviction_is_allowed_while_the_budget_lasts() {
        let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        let unready = json!({ "status": {} });
        let budget = |allowed: i64, healthy: i64, needed: i64| {
            json!({ "metadata": { "name": "b", "generation": 1 }, "status": { "observedGeneration": 1,
                "disruptionsAllowed": allowed, "currentHealthy": healthy, "desiredHealthy": needed } })
        };
        let later = |why: &str, after| Verdict::Later(format!("The disruption budget b {why}"), after);
        for (budget, pod, expected) in [
            (budget(1, 3, 2), &ready, Verdict::Counted),
            (budget(0, 2, 2), &ready, later("needs 2 healthy pods and has 2 currently", 0)),
            (budget(0, 3, 2), &ready, later("does not allow evicting pods currently", 0)),
            (budget(0, 2, 2), &unready, Verdict::Unhealthy),
            (budget(0, 1, 2), &unready, later("needs 2 healthy pods and has 1 currently", 0)),
            (
                json!({ "metadata": { "name": "b", "generation": 2 }, "status": { "observedGeneration": 1 } }),
                &ready,
                later("is still being processed by the server.", 10),
            ),
        ] {
            assert_eq!(judge(&budget, pod), expected, "{budget} {pod}");
        }
        let mut last = budget(1, 3, 2);
        last["status"]["conditions"] = json!([{ "type": "DisruptionAllowed", "status": "True" }]);
        count_eviction(&mut last, "p", "now");
        assert_eq!(last["status"]["disruptionsAllowed"], json!(0));
        assert_eq!(last["status"]["disruptedPods"], json!({ "p": "now" }));
        assert_eq!(last["status"]["conditions"][0]["status"], json!("False"));
    }
}
