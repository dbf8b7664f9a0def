//! What differs between two clusters, and what may.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;

use super::normal::Words;
use super::side::Checkpoint;
use crate::kinds::text;

/// A difference that is meant.
pub(crate) struct Meant {
    /// The scenarios in which it shows; all that have objects of the kind if there are none.
    pub(crate) scenarios: &'static [&'static str],
    /// A kind, or `Event`.
    pub(crate) kind: &'static str,
    /// The object's name, or what the event says; `*` is any text.
    pub(crate) name: &'static str,
    /// The field, or `count` or `by` of an event; `*` is any text.
    pub(crate) path: &'static str,
    pub(crate) reason: &'static str,
}

const TOGETHER: &str =
    "upstream compares each claim of a pod with the room on a node by itself; Berth compares their sum";

const NO_STATE: &str = "upstream ends with `not found`, of the plugin for devices, which judges no pod whose claims fail before; Berth speaks of preemption";

/// What is meant to differ. An entry that no longer differs fails the scenario.
pub(crate) const MEANT: &[Meant] = &[
    Meant {
        scenarios: &[],
        kind: "Node",
        name: "*",
        path: "/metadata/annotations",
        reason: "the annotation says how long a kubelet may cache Secrets; Berth's node watches them",
    },
    Meant {
        scenarios: &["budgets"],
        kind: "Event",
        name: "Pod/alone Warning MultiplePodDisruptionBudgets: *",
        path: "count",
        reason: "upstream looks at one budget of several when a pod changes, and says that it chose; Berth looks at all",
    },
    Meant {
        scenarios: &["nodes-out-of-service"],
        kind: "Event",
        name: "Pod/db-0 Normal TaintManagerEviction: *",
        path: "count",
        reason: "upstream marks a pod that is being deleted again for each further taint; Berth marks it once",
    },
    Meant { scenarios: &["scheduling-capacity"], kind: "Pod", name: "both", path: "*", reason: TOGETHER },
    Meant {
        scenarios: &["scheduling-capacity"],
        kind: "Event",
        name: "PersistentVolumeClaim/*",
        path: "count",
        reason: TOGETHER,
    },
    Meant {
        scenarios: &["scheduling-capacity"],
        kind: "Event",
        name: "Pod/both *",
        path: "count",
        reason: TOGETHER,
    },
    Meant {
        scenarios: &["scheduling-capacity"],
        kind: "PersistentVolumeClaim",
        name: "*",
        path: "*",
        reason: TOGETHER,
    },
    Meant {
        scenarios: &["scheduling-capacity"],
        kind: "PersistentVolume",
        name: "*",
        path: "number",
        reason: TOGETHER,
    },
    Meant {
        scenarios: &["scheduling-volumes"],
        kind: "Event",
        name: "Pod/no-cla* Warning FailedScheduling: *",
        path: "count",
        reason: NO_STATE,
    },
    Meant {
        scenarios: &["scheduling-volumes"],
        kind: "Pod",
        name: "no-cla*",
        path: "/status/conditions/0/message",
        reason: NO_STATE,
    },
    Meant {
        scenarios: &["scheduling-volumes"],
        kind: "Event",
        name: "PersistentVolumeClaim/no-class Warning ProvisioningFailed: *",
        path: "count",
        reason: "Berth says besides what can be done about a class that there is not",
    },
];

/// A field, a number of objects or a count of events that is not the same on both sides.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Difference {
    kind: String,
    name: String,
    path: String,
    kubernetes: String,
    berth: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, name, path, kubernetes, berth } = self;
        write!(f, "{kind} {name} {path}\n      Kubernetes: {kubernetes}\n      Berth:      {berth}")
    }
}

/// A checkpoint of one side, with the words of that side.
pub(crate) struct ObservedCheckpoint<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) words: &'a Words,
}

/// All differences between the two sides at a checkpoint.
pub(crate) fn differences(
    kubernetes: &ObservedCheckpoint<'_>,
    berth: &ObservedCheckpoint<'_>,
) -> Vec<Difference> {
    let mut found = Vec::new();
    for ((kind, real), (_, ours)) in kubernetes.checkpoint.objects.iter().zip(&berth.checkpoint.objects) {
        let (real, ours) = (by_name(kubernetes.words, real), by_name(berth.words, ours));
        let names: BTreeSet<&String> = real.keys().chain(ours.keys()).collect();
        for name in names {
            let none = Vec::new();
            let (real, ours) = (real.get(name).unwrap_or(&none), ours.get(name).unwrap_or(&none));
            let mut differ = |path: &str, kubernetes: String, berth: String| {
                let difference = Difference {
                    kind: kind.name.to_owned(),
                    name: name.clone(),
                    path: path.to_owned(),
                    kubernetes,
                    berth,
                };
                found.push(difference);
            };
            if real.len() != ours.len() {
                differ("number", real.len().to_string(), ours.len().to_string());
                continue;
            }
            for (real, ours) in real.iter().zip(ours) {
                compare("", Some(real), Some(ours), &mut differ);
            }
        }
    }
    for (at, (real, ours)) in kubernetes.checkpoint.remarks.iter().zip(&berth.checkpoint.remarks).enumerate()
    {
        compare(
            "",
            Some(&kubernetes.words.object(real)),
            Some(&berth.words.object(ours)),
            &mut |path, kubernetes, berth| {
                let (kind, name, path) = ("Remark".to_owned(), at.to_string(), path.to_owned());
                found.push(Difference { kind, name, path, kubernetes, berth });
            },
        );
    }
    let (real, ours) = (
        kubernetes.words.events(&kubernetes.checkpoint.events),
        berth.words.events(&berth.checkpoint.events),
    );
    let said: BTreeSet<&String> = real.keys().chain(ours.keys()).collect();
    for event in said {
        let field = |events: &BTreeMap<String, Value>, field: &str| match events.get(event) {
            Some(event) => event[field].to_string(),
            None => "none".to_owned(),
        };
        let fields: &[&str] =
            if real.contains_key(event) && ours.contains_key(event) { &["count", "by"] } else { &["count"] };
        for path in fields {
            let (kubernetes, berth) = (field(&real, path), field(&ours, path));
            if kubernetes != berth {
                let (kind, name, path) = ("Event".to_owned(), event.clone(), (*path).to_owned());
                found.push(Difference { kind, name, path, kubernetes, berth });
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// The objects by name; those of equal names, which were generated, sorted by what they say.
fn by_name(words: &Words, objects: &[Value]) -> BTreeMap<String, Vec<Value>> {
    let mut named: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for object in objects {
        let object = words.object(object);
        named.entry(text(&object, "/metadata/name").to_owned()).or_default().push(object);
    }
    for objects in named.values_mut() {
        objects.sort_by_key(Value::to_string);
    }
    named
}

fn compare(
    path: &str,
    real: Option<&Value>,
    ours: Option<&Value>,
    differ: &mut impl FnMut(&str, String, String),
) {
    match (real, ours) {
        (Some(Value::Object(real)), Some(Value::Object(ours))) => {
            let fields: BTreeSet<&String> = real.keys().chain(ours.keys()).collect();
            for field in fields {
                compare(&format!("{path}/{field}"), real.get(field), ours.get(field), differ);
            }
        }
        (Some(Value::Array(real)), Some(Value::Array(ours))) if real.len() == ours.len() => {
            for (at, (real, ours)) in real.iter().zip(ours).enumerate() {
                compare(&format!("{path}/{at}"), Some(real), Some(ours), differ);
            }
        }
        (real, ours) if real == ours => {}
        (real, ours) => {
            let show = |value: Option<&Value>| value.map_or("nothing".to_owned(), Value::to_string);
            differ(path, show(real), show(ours));
        }
    }
}

impl Meant {
    fn is_of(&self, scenario: &str) -> bool {
        self.scenarios.is_empty() || self.scenarios.contains(&scenario)
    }

    fn covers(&self, scenario: &str, difference: &Difference) -> bool {
        self.is_of(scenario)
            && self.kind == difference.kind
            && matches(self.name, &difference.name)
            && matches(self.path, &difference.path)
    }
}

/// Whether a text is as a pattern says, in which `*` is any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((begin, rest)) => text.strip_prefix(begin).is_some_and(|text| {
            (0..=text.len()).filter(|at| text.is_char_boundary(*at)).any(|at| matches(rest, &text[at..]))
        }),
    }
}

/// What is wrong with a scenario: differences that are not meant, and entries of the list that differ no longer.
pub(crate) fn judge(scenario: &str, kinds: &BTreeSet<&str>, found: &[(String, Difference)]) -> Vec<String> {
    let mut unmeant: BTreeMap<&Difference, Vec<&str>> = BTreeMap::new();
    for (checkpoint, difference) in found {
        if !MEANT.iter().any(|meant| meant.covers(scenario, difference)) {
            unmeant.entry(difference).or_default().push(checkpoint);
        }
    }
    let mut complaints: Vec<String> = unmeant
        .into_iter()
        .map(|(difference, at)| format!("{difference}\n      at: {}", at.join(", ")))
        .collect();
    for meant in MEANT.iter().filter(|meant| meant.is_of(scenario)) {
        let is_there = !meant.scenarios.is_empty() || kinds.contains(meant.kind);
        if is_there && !found.iter().any(|(_, difference)| meant.covers(scenario, difference)) {
            let Meant { kind, name, path, reason, .. } = meant;
            complaints.push(format!("no longer differs: {kind} {name} {path} ({reason})"));
        }
    }
    complaints
}
