//! Patches of every kind, on objects of every kind.

use berth_apiserver::patch::{self, Writer};
use berth_apiserver::schema;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::fuzz;
use super::making::{any, named, object};
use crate::kubernetes::random::Random;

/// A path into a value, mostly one that exists.
fn pointer(random: &mut Random, value: &Value) -> String {
    let mut path = String::new();
    let mut at = value;
    while !random.once_in(4) {
        let (name, next) = match at {
            Value::Object(fields) if !fields.is_empty() => {
                let (name, next) = fields.iter().nth(random.below(fields.len())).unwrap();
                (name.replace('~', "~0").replace('/', "~1"), next)
            }
            Value::Array(items) if !items.is_empty() => {
                let index = random.below(items.len());
                (index.to_string(), &items[index])
            }
            _ => break,
        };
        path.push('/');
        path.push_str(&name);
        at = next;
    }
    if random.once_in(4) {
        let more: &str =
            random.pick::<&str>(&["/-", "/x", "/0", "/-1", "/18446744073709551616", "x", "/", "/~2"]);
        path.push_str(more);
    }
    path
}

#[test]
fn json_patches() {
    fuzz(|random| {
        let mut target = any(random, 5);
        let operations = (0..random.below(8)).map(|_| {
            let kind = *random.pick(&["add", "remove", "replace", "move", "copy", "test", "other"]);
            let (path, from) = (pointer(random, &target), pointer(random, &target));
            let mut operation = json!({ "op": kind, "path": path, "from": from, "value": any(random, 3) });
            if random.once_in(10) {
                operation = any(random, 2);
            }
            operation
        });
        let patch: Value = operations.collect();
        let _ = patch::json(&mut target, &patch);
    });
}

#[test]
fn merge_patches_that_are_made_twice_change_nothing_more() {
    fuzz(|random| {
        let (mut target, patch) = (any(random, 5), any(random, 5));
        patch::merge(&mut target, &patch);
        let once = target.clone();
        patch::merge(&mut target, &patch);
        assert_eq!(once, target);
    });
}

#[test]
fn strategic_merge_patches() {
    fuzz(|random| {
        let (type_, mut target) = named(random);
        let patch = if random.once_in(5) { any(random, 5) } else { object(random, &type_, 6) };
        let patch = directed(random, patch);
        let _ = patch::strategic(&type_, &mut target, patch);
    });
}

/// Puts directives into a patch.
fn directed(random: &mut Random, mut patch: Value) -> Value {
    match &mut patch {
        Value::Object(fields) => {
            let names: Vec<String> = fields.keys().cloned().collect();
            for name in &names {
                let inner = fields[name].take();
                fields[name] = directed(random, inner);
            }
            if let Some(name) = names.first().filter(|_| random.once_in(4)) {
                let directive = *random.pick(&["$setElementOrder/", "$deleteFromPrimitiveList/"]);
                let order = fields[name].clone();
                fields.insert(format!("{directive}{name}"), order);
            }
            if random.once_in(10) {
                fields
                    .insert("$patch".to_owned(), json!(*random.pick(&["delete", "replace", "merge", "no"])));
            }
            if random.once_in(20) {
                fields.insert("$retainKeys".to_owned(), json!(names));
            }
        }
        Value::Array(items) => {
            for item in items {
                let inner = item.take();
                *item = directed(random, inner);
            }
        }
        _ => {}
    }
    patch
}

#[test]
fn server_side_apply() {
    fuzz(|random| {
        let (type_, mut live) = named(random);
        let api_version = live["apiVersion"].as_str().unwrap().to_owned();
        let writer = |manager| Writer {
            manager,
            api_version: &api_version,
            subresource: "",
            reset: &[],
            now: Timestamp::UNIX_EPOCH,
        };
        if random.once_in(2) {
            live["metadata"]["managedFields"] = any(random, 6);
        }
        schema::decode(&type_, &mut live);
        for round in 0..3 {
            let mut applied = object(random, &type_, 6);
            applied["apiVersion"] = live["apiVersion"].clone();
            applied["kind"] = live["kind"].clone();
            let manager = *random.pick(&["kubectl", "a", ""]);
            if let Ok(new) = patch::apply(&type_, &live, &applied, &writer(manager), random.once_in(2)) {
                live = new;
            }
            if round == 1 {
                let before = live.clone();
                patch::merge(&mut live, &object(random, &type_, 4));
                patch::track_update(&type_, &before, &mut live, &writer("updater"));
            }
        }
    });
}
