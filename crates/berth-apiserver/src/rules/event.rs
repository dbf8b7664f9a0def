//! Event, which both the core API and events.k8s.io serve from one store, and Lease.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{at, has, name, number, same, text};
use super::table::{AGE, Column, NAME, string, wide};
use super::{NameRule, Rules, age, metadata_fields, names, table};
use crate::resource::Cause;

/// What the fields are called in the core API and in events.k8s.io.
const FIELDS: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];
const INVOLVED: [&str; 7] = [
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
];
const REGARDING: [&str; 7] = [
    "regarding.kind",
    "regarding.namespace",
    "regarding.name",
    "regarding.uid",
    "regarding.apiVersion",
    "regarding.resourceVersion",
    "regarding.fieldPath",
];
const COLUMNS: &[Column] = &[
    string("Last Seen", "When it was seen last."),
    string("Type", "Normal or Warning."),
    string("Reason", "Why it was written."),
    string("Object", "What it is about."),
    wide("Subobject", "Which part of the object it is about."),
    wide("Source", "Who wrote it."),
    string("Message", "What happened."),
    wide("First Seen", "When it was seen first."),
    wide("Count", "How often it was seen."),
    table::column("Name", "string", "name", "The name of the object.", 1),
];
const LEASE_COLUMNS: &[Column] = &[NAME, string("Holder", "Who holds it."), AGE];

/// The rules of events; strict for those that come through events.k8s.io.
pub(super) struct Event {
    pub(super) strict: bool,
}

impl Rules for Event {
    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = plain_causes(object, self.strict);
        if self.strict {
            causes.extend(series_causes(object));
            causes.extend(strict_causes(object));
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = plain_causes(new, self.strict);
        if !self.strict {
            return causes;
        }
        if !same(at(new, &["series"]), at(old, &["series"])) {
            causes.extend(series_causes(new));
        }
        for field in [
            "involvedObject",
            "reason",
            "message",
            "source",
            "firstTimestamp",
            "lastTimestamp",
            "count",
            "type",
            "eventTime",
            "action",
            "related",
            "reportingController",
            "reportingInstance",
        ] {
            causes.extend(immutable(read(new, field), read(old, field), &Path::new(field)));
        }
        causes
    }

    fn name_rule(&self) -> NameRule {
        if self.strict { NameRule::Subdomain } else { NameRule::PathSegment }
    }

    fn create_on_update(&self) -> bool {
        true
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&'static str, String)> {
        let about = read(object, "involvedObject");
        let names = if self.strict { REGARDING } else { INVOLVED };
        let mut fields = metadata_fields(object);
        fields.extend(names.map(|name| {
            let part = name.rsplit('.').next().unwrap_or_default();
            (name, text(about, &[part]).to_owned())
        }));
        fields.push(("reason", text(object, &["reason"]).to_owned()));
        fields.push(("type", text(object, &["type"]).to_owned()));
        let reporter = if self.strict { "reportingController" } else { "reportingComponent" };
        fields.push((reporter, controller(object).to_owned()));
        if !self.strict {
            let source = table::or(text(read(object, "source"), &["component"]), controller(object));
            fields.push(("source", source.to_owned()));
        }
        fields
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let time = |field| read(object, field);
        let first = if time("firstTimestamp").is_null() { time("eventTime") } else { time("firstTimestamp") };
        let mut last = if time("lastTimestamp").is_null() { first } else { time("lastTimestamp") };
        let mut count = read(object, "count").as_i64().filter(|count| *count != 0).unwrap_or(1);
        if has(object, &["series"]) {
            last = at(object, &["series", "lastObservedTime"]);
            count = number(object, &["series", "count"]).unwrap_or_default();
        }
        let about = read(object, "involvedObject");
        let kind = text(about, &["kind"]).to_lowercase();
        let target = match text(about, &["name"]) {
            "" => kind,
            name => format!("{kind}/{name}"),
        };
        let source = read(object, "source");
        let component = table::or(text(source, &["component"]), controller(object));
        let instance = table::or(text(source, &["host"]), text(object, &["reportingInstance"]));
        let writer =
            if instance.is_empty() { component.to_owned() } else { format!("{component}, {instance}") };
        vec![
            json!(age::since(last, now)),
            json!(text(object, &["type"])),
            json!(text(object, &["reason"])),
            json!(target),
            json!(text(about, &["fieldPath"])),
            json!(writer),
            json!(read(object, "message").as_str().unwrap_or_default().trim()),
            json!(age::since(first, now)),
            json!(count),
            json!(name(object)),
        ]
    }
}

/// A field by its core name, also where the object has the other API's names.
fn read<'a>(object: &'a Value, field: &str) -> &'a Value {
    let core = if field == "reportingController" { "reportingComponent" } else { field };
    match FIELDS.iter().find(|(name, _)| *name == core) {
        Some((core, other)) => {
            let value = at(object, &[core]);
            if value.is_null() { at(object, &[other]) } else { value }
        }
        None => at(object, &[field]),
    }
}

fn controller(object: &Value) -> &str {
    read(object, "reportingController").as_str().unwrap_or_default()
}

fn plain_causes(object: &Value, strict: bool) -> Vec<Cause> {
    let namespace = text(object, &["metadata", "namespace"]);
    let about = text(read(object, "involvedObject"), &["namespace"]);
    let new_style = !read(object, "eventTime").is_null();
    let mut causes = Vec::new();
    let agrees = match (about.is_empty(), new_style) {
        (true, false) => matches!(namespace, "" | "default"),
        (true, true) => matches!(namespace, "default" | "kube-system"),
        (false, false) => namespace == about,
        (false, true) => true,
    };
    if !agrees {
        let path = Path::new("involvedObject").child("namespace");
        causes.push(path.invalid(about, "does not match event.namespace"));
    }
    if new_style {
        let reporter = Path::new(if strict { "reportingController" } else { "reportingComponent" });
        if controller(object).is_empty() {
            causes.push(reporter.required(""));
        }
        causes.extend(reporter.each_invalid(controller(object), names::qualified(controller(object))));
        for (field, limit) in [("reportingInstance", 128), ("action", 128), ("reason", 128)] {
            let value = text(object, &[field]);
            if value.is_empty() {
                causes.push(Path::new(field).required(""));
            }
            if value.len() > limit {
                causes.push(Path::new(field).invalid("", format!("can have at most {limit} characters")));
            }
        }
        if read(object, "message").as_str().unwrap_or_default().len() > 1024 {
            causes.push(Path::new("message").invalid("", "can have at most 1024 characters"));
        }
    }
    causes.extend(Path::new("namespace").each_invalid(namespace, names::subdomain(namespace)));
    causes
}

fn series_causes(object: &Value) -> Vec<Cause> {
    let series = at(object, &["series"]);
    let mut causes = Vec::new();
    if series.is_null() {
        return causes;
    }
    if number(series, &["count"]).unwrap_or_default() < 2 {
        causes.push(Path::new("series.count").invalid("", "should be at least 2"));
    }
    if !has(series, &["lastObservedTime"]) {
        causes.push(Path::new("series.lastObservedTime").required(""));
    }
    causes
}

fn strict_causes(object: &Value) -> Vec<Cause> {
    let mut causes = Vec::new();
    if !has(object, &["eventTime"]) {
        causes.push(Path::new("eventTime").required(""));
    }
    let kind = text(object, &["type"]);
    if !matches!(kind, "Normal" | "Warning") {
        causes.push(Path::new("type").invalid("", format!("has invalid value: {kind}")));
    }
    for field in ["firstTimestamp", "lastTimestamp", "count", "source"] {
        let value = read(object, field);
        let set = match value {
            Value::Number(number) => number.as_i64() != Some(0),
            Value::Object(map) => map.values().any(|v| v.as_str().is_some_and(|t| !t.is_empty())),
            other => !other.is_null(),
        };
        if set {
            causes.push(Path::new(field).invalid("", "needs to be unset"));
        }
    }
    causes
}

/// The rules of leases.
pub(super) struct Lease;

impl Rules for Lease {
    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec");
        let spec = at(object, &["spec"]);
        let mut causes = Vec::new();
        if let Some(seconds) = number(spec, &["leaseDurationSeconds"]).filter(|seconds| *seconds <= 0) {
            causes.push(path.child("leaseDurationSeconds").invalid(seconds, "must be greater than 0"));
        }
        if let Some(count) = number(spec, &["leaseTransitions"]).filter(|count| *count < 0) {
            causes.push(path.child("leaseTransitions").invalid(count, "must be greater than or equal to 0"));
        }
        if !text(spec, &["preferredHolder"]).is_empty() && text(spec, &["strategy"]).is_empty() {
            let detail = "may only be specified if `strategy` is defined";
            causes.push(path.child("preferredHolder").forbidden(detail));
        }
        causes
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn create_on_update(&self) -> bool {
        true
    }

    fn columns(&self) -> &'static [Column] {
        LEASE_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let holder = text(object, &["spec", "holderIdentity"]);
        vec![json!(name(object)), json!(holder), json!(age::of(object, now))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Event = Event { strict: false };
    const NEW: Event = Event { strict: true };

    fn texts(causes: Vec<Cause>) -> Vec<String> {
        causes.into_iter().map(|cause| cause.to_string()).collect()
    }

    fn old_style() -> Value {
        json!({"metadata": {"name": "e", "namespace": "default"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"},
            "reason": "Started", "message": " it runs\n", "type": "Normal", "count": 3, "source": {"component": "kubelet", "host": "n"},
            "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:01:00Z"})
    }

    fn new_style() -> Value {
        json!({"metadata": {"name": "e", "namespace": "default"}, "regarding": {"kind": "Pod", "name": "p", "namespace": "default"},
            "reason": "Started", "note": "it runs", "type": "Normal", "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "berth.io/x", "reportingInstance": "x-0", "action": "Run"})
    }

    #[test]
    fn events_of_both_styles_are_accepted() {
        assert_eq!(texts(OLD.validate(&old_style())), Vec::<String>::new());
        assert_eq!(texts(NEW.validate(&new_style())), Vec::<String>::new());
        let mut stored = new_style();
        for (core, other) in FIELDS {
            if let Some(value) = stored.as_object_mut().unwrap().remove(other) {
                stored[core] = value;
            }
        }
        assert_eq!(stored["involvedObject"]["name"], "p");
        assert_eq!(texts(NEW.validate(&stored)), Vec::<String>::new());
    }

    #[test]
    fn invalid_events_are_refused_with_the_cause() {
        let mut event = old_style();
        event["involvedObject"]["namespace"] = json!("other");
        assert_eq!(
            texts(OLD.validate(&event)),
            ["involvedObject.namespace: Invalid value: \"other\": does not match event.namespace"]
        );
        for (field, value, expected) in [
            ("type", json!("Odd"), "type: Invalid value: \"\": has invalid value: Odd"),
            ("action", json!(""), "action: Required value"),
            (
                "reportingInstance",
                json!("x".repeat(129)),
                "reportingInstance: Invalid value: \"\": can have at most 128 characters",
            ),
            (
                "series",
                json!({"count": 1, "lastObservedTime": "2026-01-01T00:00:00.000000Z"}),
                "series.count: Invalid value: \"\": should be at least 2",
            ),
            ("deprecatedCount", json!(2), "count: Invalid value: \"\": needs to be unset"),
        ] {
            let mut event = new_style();
            event[field] = value;
            assert_eq!(texts(NEW.validate(&event)), [expected]);
        }
    }

    #[test]
    fn a_strict_event_changes_only_its_series() {
        let mut event = new_style();
        event["series"] = json!({"count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z"});
        assert!(NEW.validate_update(&event, &new_style()).is_empty());
        event["note"] = json!("other");
        assert_eq!(
            texts(NEW.validate_update(&event, &new_style())),
            ["message: Invalid value: \"other\": field is immutable"]
        );
    }

    #[test]
    fn events_are_selected_by_what_they_are_about() {
        for event in [old_style(), new_style()] {
            assert!(OLD.selectable_fields(&event).contains(&("involvedObject.name", "p".to_owned())));
        }
        assert!(NEW.selectable_fields(&new_style()).contains(&("regarding.name", "p".to_owned())));
        assert!(OLD.supports_field("involvedObject.uid") && !OLD.supports_field("regarding.uid"));
        assert!(NEW.supports_field("reportingController") && !NEW.supports_field("source"));
        assert!(!OLD.supports_field("message"));
    }

    #[test]
    fn rows_look_as_kubectl_prints_them() {
        let now = "2026-01-01T00:03:05Z".parse().unwrap();
        assert_eq!(
            OLD.cells(&old_style(), now),
            [
                json!("2m5s"),
                json!("Normal"),
                json!("Started"),
                json!("pod/p"),
                json!(""),
                json!("kubelet, n"),
                json!("it runs"),
                json!("3m5s"),
                json!(3),
                json!("e")
            ]
        );
        assert_eq!(
            NEW.cells(&new_style(), now)[..4],
            [json!("3m5s"), json!("Normal"), json!("Started"), json!("pod/p")]
        );
    }

    #[test]
    fn leases_have_positive_durations() {
        assert!(
            Lease.validate(&json!({"spec": {"leaseDurationSeconds": 15, "holderIdentity": "me"}})).is_empty()
        );
        assert_eq!(
            texts(Lease.validate(&json!({"spec": {"leaseDurationSeconds": 0, "leaseTransitions": -1}}))),
            [
                "spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0",
                "spec.leaseTransitions: Invalid value: -1: must be greater than or equal to 0"
            ]
        );
        assert!(Lease.create_on_update() && !Lease.unconditional_update());
    }
}
