//! The rules of PriorityClasses, and how important a pod is by them.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{at, default_pointer, flag, has, map, name, number, text};
use super::table::{AGE, Column, NAME, boolean, integer, string};
use super::{Rules, age};
use crate::resource::Cause;

/// Who is preempted for a pod that does not say otherwise.
pub(super) const PREEMPT_LOWER: &str = "PreemptLowerPriority";
const POLICIES: [&str; 2] = ["Never", PREEMPT_LOWER];
const SYSTEM_PREFIX: &str = "system-";
/// The largest value of a class that is not the system's own.
const HIGHEST_FOR_USERS: i64 = 1_000_000_000;
const COLUMNS: &[Column] = &[
    NAME,
    integer("Value", "How important pods of the class are."),
    boolean("Global-Default", "Whether pods that name no class are of this one."),
    AGE,
    string("PreemptionPolicy", "Whether its pods may take the place of less important ones."),
];

/// A class that is there from the start.
pub(crate) struct SystemClass {
    pub(crate) name: &'static str,
    pub(crate) value: i64,
    pub(crate) description: &'static str,
}

/// The classes of the system itself, which alone may have names that begin with `system-`.
pub(crate) const SYSTEM_CLASSES: [SystemClass; 2] = [
    SystemClass {
        name: "system-node-critical",
        value: 2_000_001_000,
        description: "Used for system critical pods that must not be moved from their current node.",
    },
    SystemClass {
        name: "system-cluster-critical",
        value: 2_000_000_000,
        description: "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
    },
];

/// What a class gives its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Priority {
    pub(super) class: String,
    pub(super) value: i64,
    pub(super) policy: String,
}

impl Priority {
    /// Of a pod that names a class: the class, if there is one of that name.
    pub(super) fn of_class(class: &Value) -> Self {
        let policy = text(class, &["preemptionPolicy"]);
        Self {
            class: name(class).to_owned(),
            value: number(class, &["value"]).unwrap_or_default(),
            policy: if policy.is_empty() { PREEMPT_LOWER } else { policy }.to_owned(),
        }
    }

    /// Of a pod that names a class of the system, be its object there or not.
    pub(super) fn of_system(wanted: &str) -> Option<Self> {
        let class = SYSTEM_CLASSES.iter().find(|class| class.name == wanted)?;
        Some(Self { class: class.name.to_owned(), value: class.value, policy: PREEMPT_LOWER.to_owned() })
    }

    /// Of a pod that names no class: the default class, the least important if there are several.
    pub(super) fn of_default(classes: &[Value]) -> Self {
        let defaults = classes.iter().filter(|class| flag(class, &["globalDefault"]));
        defaults.map(Self::of_class).min_by_key(|class| class.value).unwrap_or(Self {
            class: String::new(),
            value: 0,
            policy: PREEMPT_LOWER.to_owned(),
        })
    }
}

/// The rules of priority classes.
pub(super) struct PriorityClass;

impl Rules for PriorityClass {
    fn default(&self, object: &mut Value) {
        default_pointer(map(object, &[]), "preemptionPolicy", PREEMPT_LOWER);
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        let (own, value) = (name(object), number(object, &["value"]).unwrap_or_default());
        if own.starts_with(SYSTEM_PREFIX) {
            causes.extend(system_complaint(own, value, flag(object, &["globalDefault"])).map(|complaint| {
                Path::new("metadata").child("name").forbidden(format!(
                    "priority class names with '{SYSTEM_PREFIX}' prefix are reserved for system use only. error: {complaint}"
                ))
            }));
        } else if value > HIGHEST_FOR_USERS {
            let detail = format!("maximum allowed value of a user defined priority is {HIGHEST_FOR_USERS}");
            causes.push(Path::new("value").forbidden(detail));
        }
        if has(object, &["preemptionPolicy"]) {
            let policy = text(object, &["preemptionPolicy"]);
            let path = Path::new("preemptionPolicy");
            if policy.is_empty() {
                causes.push(path.required(""));
            } else if !POLICIES.contains(&policy) {
                causes.push(path.not_supported(policy, &[PREEMPT_LOWER, "Never"]));
            }
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        if number(new, &["value"]).unwrap_or_default() != number(old, &["value"]).unwrap_or_default() {
            causes.push(Path::new("value").forbidden("may not be changed in an update."));
        }
        let policy = ["preemptionPolicy"];
        causes.extend(immutable(at(new, &policy), at(old, &policy), &Path::new("preemptionPolicy")));
        causes
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            json!(name(object)),
            json!(number(object, &["value"]).unwrap_or_default()),
            json!(flag(object, &["globalDefault"])),
            json!(age::of(object, now)),
            json!(text(object, &["preemptionPolicy"])),
        ]
    }
}

/// What is wrong with a class that is named like one of the system.
fn system_complaint(own: &str, value: i64, default: bool) -> Option<String> {
    let Some(class) = SYSTEM_CLASSES.iter().find(|class| class.name == own) else {
        return Some(format!("{own} is not a known system priority class"));
    };
    if value != class.value {
        return Some(format!("value of {own} PriorityClass must be {}", class.value));
    }
    default.then(|| format!("globalDefault of {own} PriorityClass must be false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_keep_to_the_range_and_the_names_of_users() {
        let class = |name: &str, value: i64| json!({ "metadata": { "name": name }, "value": value });
        for (class, expected) in [
            (class("high", 1_000_000_000), None),
            (class("low", -2_147_483_648), None),
            (class("high", 1_000_000_001), Some("value")),
            (class("system-node-critical", 2_000_001_000), None),
            (class("system-node-critical", 5), Some("metadata.name")),
            (class("system-mine", 5), Some("metadata.name")),
            (
                json!({ "metadata": { "name": "x" }, "value": 1, "preemptionPolicy": "Maybe" }),
                Some("preemptionPolicy"),
            ),
        ] {
            let causes = PriorityClass.validate(&class);
            assert_eq!(causes.first().map(|cause| cause.field.as_str()), expected, "{class}");
        }
    }

    #[test]
    fn neither_value_nor_policy_of_a_class_changes() {
        let old = json!({ "metadata": { "name": "x" }, "value": 1, "preemptionPolicy": "Never" });
        let causes = PriorityClass.validate_update(
            &json!({ "metadata": { "name": "x" }, "value": 2, "preemptionPolicy": PREEMPT_LOWER }),
            &old,
        );
        let fields: Vec<&str> = causes.iter().map(|cause| cause.field.as_str()).collect();
        assert_eq!(fields, ["value", "preemptionPolicy"]);
        let mut described = old.clone();
        described["description"] = json!("words");
        described["globalDefault"] = json!(true);
        assert!(PriorityClass.validate_update(&described, &old).is_empty());
    }

    #[test]
    fn the_least_important_of_several_default_classes_counts() {
        let class = |name: &str, value: i64, default: bool| json!({ "metadata": { "name": name }, "value": value, "globalDefault": default });
        let classes = [class("a", 30, true), class("b", 20, true), class("c", 10, false)];
        let found = Priority::of_default(&classes);
        assert_eq!((found.class.as_str(), found.value), ("b", 20));
        assert_eq!(Priority::of_default(&classes[2..]).value, 0);
    }
}
