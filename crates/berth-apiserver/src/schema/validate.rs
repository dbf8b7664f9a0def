//! Whether a custom resource satisfies its schema, in Kubernetes' words.

use std::collections::{HashMap, HashSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value};

use super::{Checks, Field, ListType, Schema, Shape, Type, apply_defaults, prune, time};
use crate::resource::{Cause, CauseReason};

const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;

/// Checks an object of a custom resource; built-in types have no checks and pass.
pub fn validate(type_: &Type, object: &Value) -> Vec<Cause> {
    changes_of(type_, object, None)
}

/// Checks an object that replaces another: values that were wrong before and have not changed are let pass, so that an
/// object which a stricter schema has made invalid can still be written, and let go.
pub fn validate_update(type_: &Type, object: &Value, old: &Value) -> Vec<Cause> {
    let causes = validate(type_, object);
    if causes.is_empty() {
        return causes;
    }
    // What the schema has taken away or given since is no change by the writer.
    let mut old = old.clone();
    prune(type_, &mut old);
    apply_defaults(type_, &mut old);
    if is_unchanged(object, &old) {
        return Vec::new();
    }
    let mut causes = changes_of(type_, object, Some(&old));
    let repeats = |cause: &Cause| cause.reason == CauseReason::Duplicate;
    if causes.iter().any(repeats) && validate(type_, &old).iter().any(repeats) {
        causes.retain(|cause| !repeats(cause));
    }
    causes
}

/// Whether two objects differ in their metadata only.
fn is_unchanged(object: &Value, old: &Value) -> bool {
    let (Value::Object(object), Value::Object(old)) = (object, old) else { return object == old };
    let beside = |(key, _): &(&String, &Value)| *key != "metadata";
    object.iter().filter(beside).eq(old.iter().filter(beside))
}

/// What is wrong with the values that are not as they were in the old object.
fn changes_of(type_: &Type, object: &Value, old: Option<&Value>) -> Vec<Cause> {
    let mut causes = Vec::new();
    if let Some(checks) = type_.checks.as_deref() {
        check(checks, object, "", &mut causes);
    }
    if let Value::Object(fields) = object {
        for field in type_.fields.iter().filter(|field| field.schema.checks.is_some()) {
            if let Some(value) = fields.get(field.name.as_ref()) {
                let old = old.and_then(|old| old.get(field.name.as_ref()));
                value_at(&field.schema, value, old, &field.name, &mut causes);
            }
        }
    }
    causes
}

fn value_at(schema: &Schema, value: &Value, old: Option<&Value>, path: &str, causes: &mut Vec<Cause>) {
    if (value.is_null() && schema.nullable) || old == Some(value) {
        return;
    }
    if let Some(checks) = schema.checks.as_deref() {
        check(checks, value, path, causes);
    }
    match (&schema.shape, value) {
        (Shape::Object(link), Value::Object(object)) => {
            let declared = |field: &&Field| field.schema.checks.is_some();
            for field in link.get().fields.iter().filter(declared) {
                if let Some(value) = object.get(field.name.as_ref()) {
                    let old = old.and_then(|old| old.get(field.name.as_ref()));
                    value_at(&field.schema, value, old, &join(path, &field.name), causes);
                }
            }
        }
        (Shape::Map(of), Value::Object(map)) => {
            for (key, value) in map {
                value_at(of, value, old.and_then(|old| old.get(key)), &join(path, key), causes);
            }
        }
        (Shape::List(of), Value::Array(items)) => {
            let earlier = earlier_items(&schema.list, old);
            for (index, item) in items.iter().enumerate() {
                let old = earlier.get(&list_key(&schema.list, item)).copied();
                value_at(of, item, old, &format!("{path}[{index}]"), causes);
            }
            check_list(&schema.list, items, path, causes);
        }
        _ => {}
    }
}

/// The items of an old list by their keys; only those of keyed lists can be told apart.
fn earlier_items<'v>(list: &ListType, old: Option<&'v Value>) -> HashMap<Value, &'v Value> {
    match (list, old) {
        (ListType::Map(_), Some(Value::Array(items))) => {
            items.iter().map(|item| (list_key(list, item), item)).collect()
        }
        _ => HashMap::new(),
    }
}

/// What distinguishes an item of a set or keyed list from the others.
fn list_key(list: &ListType, item: &Value) -> Value {
    match list {
        ListType::Atomic => Value::Null,
        ListType::Set => item.clone(),
        ListType::Map(names) => {
            let keys = names.iter();
            let keys = keys.filter_map(|name| Some((name.to_string(), item.get(name.as_ref())?.clone())));
            Value::Object(keys.collect())
        }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn check(checks: &Checks, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let before = causes.len();
    check_type(checks, value, path, causes);
    if causes.len() > before && value.is_null() {
        return;
    }
    check_combinations(checks, value, path, causes);
    match value {
        Value::String(text) => check_text(checks, text, path, causes),
        Value::Number(number) => check_number(checks, number, path, causes),
        Value::Array(items) => check_items(checks, items, path, causes),
        Value::Object(object) => check_object(checks, object, path, causes),
        _ => {}
    }
    if !checks.enumeration.is_empty() && !checks.enumeration.contains(value) {
        let allowed: Vec<String> = checks
            .enumeration
            .iter()
            .map(|allowed| {
                format!("{:?}", allowed.as_str().map_or_else(|| allowed.to_string(), str::to_owned))
            })
            .collect();
        let message =
            format!("Unsupported value: {}: supported values: {}", shown(value), allowed.join(", "));
        causes.push(cause(CauseReason::NotSupported, path, message));
    }
}

fn check_type(checks: &Checks, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let (found, found_format) = match value {
        Value::Null => ("null", ""),
        Value::Bool(_) => ("boolean", ""),
        Value::Number(number) if is_whole(number) => ("integer", "int64"),
        Value::Number(_) => ("number", "float64"),
        Value::String(_) => ("string", ""),
        Value::Array(_) => ("array", ""),
        Value::Object(_) => ("object", ""),
    };
    let wanted = if checks.int_or_string { "integer,string" } else { checks.kind.as_str() };
    let fits = wanted.is_empty()
        || wanted.split(',').any(|wanted| wanted == found || (wanted == "number" && found == "integer"));
    if fits {
        return;
    }
    // A format is more to the point than a type, where a value can have one.
    let formatted =
        !checks.format.is_empty() && !matches!(value, Value::Null | Value::String(_) | Value::Array(_));
    let (wanted, found) = if formatted { (checks.format.as_str(), found_format) } else { (wanted, found) };
    let message = format!("Invalid value: {found:?}: {path} in body must be of type {wanted}: {found:?}");
    causes.push(cause(CauseReason::TypeInvalid, path, message));
}

fn is_whole(number: &serde_json::Number) -> bool {
    !number.is_f64() || number.as_f64().is_some_and(|value| value.fract() == 0.0)
}

fn check_text(checks: &Checks, text: &str, path: &str, causes: &mut Vec<Cause>) {
    let length = text.chars().count() as u64;
    let value = Value::from(text);
    // Only the first of these is reported.
    if let Some(max) = checks.max_length.filter(|max| length > *max) {
        let unit = if max == 1 { "byte" } else { "bytes" };
        causes.push(cause(
            CauseReason::TooLong,
            path,
            format!("Too long: may not be more than {max} {unit}"),
        ));
    } else if let Some(min) = checks.min_length.filter(|min| length < *min) {
        causes.push(invalid(&value, path, &format!("should be at least {min} chars long")));
    } else if let Some(pattern) = checks.pattern.as_ref().filter(|pattern| !pattern.is_match(text)) {
        causes.push(invalid(&value, path, &format!("should match '{pattern}'")));
    }
    if checks.kind == "string" && !has_format(&checks.format, text) {
        let detail = format!("must be of type {}: {}", checks.format, shown(&value));
        let message = format!("Invalid value: {}: {path} in body {detail}", shown(&value));
        causes.push(cause(CauseReason::TypeInvalid, path, message));
    }
}

/// Whether text has a format; formats that are not known say nothing.
fn has_format(format: &str, text: &str) -> bool {
    match format {
        "date-time" | "datetime" => time::parse(text).is_some(),
        "date" => text.len() == 10 && time::parse(&format!("{text}T00:00:00Z")).is_some(),
        "byte" => BASE64.decode(text).is_ok(),
        "ipv4" => text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<std::net::Ipv6Addr>().is_ok(),
        "uuid" => is_uuid(text),
        _ => true,
    }
}

fn is_uuid(text: &str) -> bool {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    digits.len() == 32
        && digits.iter().all(u8::is_ascii_hexdigit)
        && (text.len() == 32 || text.split('-').map(str::len).collect::<Vec<_>>() == [8, 4, 4, 4, 12])
}

fn check_number(checks: &Checks, number: &serde_json::Number, path: &str, causes: &mut Vec<Cause>) {
    let Some(value) = number.as_f64() else { return };
    let shown = Value::Number(number.clone());
    if let Some(factor) = checks.multiple_of.filter(|factor| (value / factor).fract() != 0.0) {
        causes.push(invalid(&shown, path, &format!("should be a multiple of {}", decimal(factor))));
    }
    match checks.maximum {
        Some((limit, true)) if value >= limit => {
            causes.push(invalid(&shown, path, &format!("should be less than {}", decimal(limit))));
        }
        Some((limit, false)) if value > limit => {
            causes.push(invalid(
                &shown,
                path,
                &format!("should be less than or equal to {}", decimal(limit)),
            ));
        }
        _ => {}
    }
    match checks.minimum {
        Some((limit, true)) if value <= limit => {
            causes.push(invalid(&shown, path, &format!("should be greater than {}", decimal(limit))));
        }
        Some((limit, false)) if value < limit => {
            let detail = format!("should be greater than or equal to {}", decimal(limit));
            causes.push(invalid(&shown, path, &detail));
        }
        _ => {}
    }
    let (low, high) = match checks.format.as_str() {
        "int32" => (f64::from(i32::MIN), f64::from(i32::MAX)),
        _ => (-TWO_TO_63, TWO_TO_63),
    };
    if checks.kind == "integer" && (!is_whole(number) || value < low || value > high) {
        let format = match checks.format.as_str() {
            "" => "(default format)".to_owned(),
            format => format!("with format {format}"),
        };
        let detail = format!("Checked value must be of type integer {format} in {path}");
        causes.push(cause(CauseReason::Invalid, "", format!("Invalid value: \"\": {detail}")));
    }
}

/// A limit as Go writes it: whole numbers without a point.
fn decimal(limit: f64) -> String {
    if limit.abs() >= 1e21 {
        let text = format!("{limit:e}");
        return text.replace('e', "e+");
    }
    limit.to_string()
}

fn check_items(checks: &Checks, items: &[Value], path: &str, causes: &mut Vec<Cause>) {
    let count = items.len() as u64;
    if let Some(min) = checks.min_items.filter(|min| count < *min) {
        causes.push(invalid(&count.into(), path, &format!("should have at least {min} items")));
    }
    if let Some(max) = checks.max_items.filter(|max| count > *max) {
        causes.push(too_many(count, max, path));
    }
    let mut seen = HashSet::new();
    if checks.unique_items && !items.iter().all(|item| seen.insert(item)) {
        causes.push(invalid(&Value::from(""), path, "shouldn't contain duplicates"));
    }
}

fn check_object(checks: &Checks, object: &Map<String, Value>, path: &str, causes: &mut Vec<Cause>) {
    let count = object.len() as u64;
    if let Some(min) = checks.min_properties.filter(|min| count < *min) {
        causes.push(invalid(&count.into(), path, &format!("should have at least {min} properties")));
    }
    if let Some(max) = checks.max_properties.filter(|max| count > *max) {
        causes.push(too_many(count, max, path));
    }
    for name in checks.required.iter().filter(|name| !object.contains_key(*name)) {
        causes.push(cause(CauseReason::Required, &join(path, name), "Required value".to_owned()));
    }
}

fn check_combinations(checks: &Checks, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let problems = |schema: &Schema| {
        let mut found = Vec::new();
        value_at(schema, value, None, path, &mut found);
        found
    };
    let failed =
        |detail: String| cause(CauseReason::Invalid, "", format!("Invalid value: \"\": {path:?} {detail}"));
    if !checks.any_of.is_empty() {
        let found: Vec<_> = checks.any_of.iter().map(problems).collect();
        if found.iter().all(|found| !found.is_empty()) {
            causes.push(failed("must validate at least one schema (anyOf)".to_owned()));
            causes.extend(closest(&checks.any_of, found, value));
        }
    }
    if !checks.one_of.is_empty() {
        let found: Vec<_> = checks.one_of.iter().map(problems).collect();
        let only = "must validate one and only one schema (oneOf)";
        match found.iter().filter(|found| found.is_empty()).count() {
            1 => {}
            0 => {
                causes.push(failed(format!("{only}. Found none valid")));
                causes.extend(closest(&checks.one_of, found, value));
            }
            count => causes.push(failed(format!("{only}. Found {count} valid alternatives"))),
        }
    }
    if !checks.all_of.is_empty() {
        let found: Vec<_> = checks.all_of.iter().map(problems).collect();
        let valid = found.iter().filter(|found| found.is_empty()).count();
        if valid < found.len() {
            let none = if valid == 0 { ". None validated" } else { "" };
            causes.push(failed(format!("must validate all the schemas (allOf){none}")));
            causes.extend(found.into_iter().flatten());
        }
    }
    if checks.not.as_ref().is_some_and(|not| problems(not).is_empty()) {
        causes.push(failed("must not validate the schema (not)".to_owned()));
    }
}

/// What is wrong by the alternative that says most about a value: the others were probably not meant.
fn closest(alternatives: &[Schema], found: Vec<Vec<Cause>>, value: &Value) -> Vec<Cause> {
    let mut best = (0, Vec::new());
    for (alternative, causes) in alternatives.iter().zip(found) {
        let reach = reach(alternative, value);
        if reach > best.0 {
            best = (reach, causes);
        }
    }
    best.1
}

/// How many values a schema says something about.
fn reach(schema: &Schema, value: &Value) -> usize {
    let below: usize = match (&schema.shape, value) {
        (Shape::Object(link), Value::Object(object)) => {
            let known =
                |(name, value): (&String, &Value)| Some(reach(&link.get().field(name)?.schema, value));
            object.iter().filter_map(known).sum()
        }
        (Shape::Map(of), Value::Object(map)) => map.values().map(|value| reach(of, value)).sum(),
        (Shape::List(of), Value::Array(items)) => items.iter().map(|item| reach(of, item)).sum(),
        _ => 0,
    };
    1 + below
}

/// Items of sets and keyed lists occur once; the first repetition of each is reported.
fn check_list(list: &ListType, items: &[Value], path: &str, causes: &mut Vec<Cause>) {
    if *list == ListType::Atomic {
        return;
    }
    let mut seen: HashMap<String, usize> = HashMap::new();
    for (index, item) in items.iter().enumerate() {
        let key = list_key(list, item);
        let times = seen.entry(key.to_string()).or_default();
        *times += 1;
        if *times == 2 {
            let place = format!("{path}[{index}]");
            causes.push(cause(CauseReason::Duplicate, &place, format!("Duplicate value: {}", shown(&key))));
        }
    }
}

fn too_many(count: u64, max: u64, path: &str) -> Cause {
    let unit = if max == 1 { "item" } else { "items" };
    cause(CauseReason::TooMany, path, format!("Too many: {count}: must have at most {max} {unit}"))
}

fn invalid(value: &Value, path: &str, detail: &str) -> Cause {
    let message = format!("Invalid value: {}: {path} in body {detail}", shown(value));
    cause(CauseReason::Invalid, path, message)
}

/// A value as messages quote it.
fn shown(value: &Value) -> String {
    value.to_string()
}

fn cause(reason: CauseReason, path: &str, message: String) -> Cause {
    let field = if path.is_empty() { "<nil>".to_owned() } else { path.to_owned() };
    Cause { reason, message, field }
}
