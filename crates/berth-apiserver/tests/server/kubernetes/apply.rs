//! Server-side apply and the tracking of owners do what Kubernetes' field manager does.

use berth_apiserver::patch::{ApplyError, Writer, apply, track_update};
use berth_apiserver::schema::{built_in, built_in_kinds};
use serde_json::{Map, Value, json};

use super::peer::{about, ask};
use super::random::Random;

const POD: (&str, &str, &str) = ("", "v1", "Pod");
const TIME: &str = "2026-01-01T00:00:00Z";

fn writer(manager: &str) -> Writer<'_> {
    let now = TIME.parse().expect("the constant is a time");
    Writer { manager, api_version: "v1", subresource: "", reset: &[], now }
}

/// Times are set to one, and owners put in an order that does not depend on them.
fn comparable(mut object: Value) -> Value {
    if let Some(Value::Array(entries)) = object.pointer_mut("/metadata/managedFields") {
        for entry in entries.iter_mut().filter(|entry| entry.get("time").is_some()) {
            entry["time"] = TIME.into();
        }
        entries.sort_by_key(|entry| (entry["manager"].to_string(), entry["operation"].to_string()));
    }
    object
}

type Kind<'a> = (&'a str, &'a str, &'a str);

fn question(op: &str, live: &Value, given: &Value, manager: &str, force: bool) -> Value {
    question_about(POD, op, live, given, manager, force)
}

fn question_about(
    kind: Kind<'_>,
    op: &str,
    live: &Value,
    given: &Value,
    manager: &str,
    force: bool,
) -> Value {
    let mut question = about(op, kind);
    question["object"] = live.clone();
    question["patch"] = given.clone();
    question["manager"] = manager.into();
    question["force"] = force.into();
    question
}

/// Writes through both; returns the new state.
fn both(op: &str, live: &Value, given: &Value, manager: &str, force: bool) -> Value {
    both_of(POD, op, live, given, manager, force)
}

fn both_of(kind: Kind<'_>, op: &str, live: &Value, given: &Value, manager: &str, force: bool) -> Value {
    let type_ = built_in(kind.0, kind.1, kind.2).expect("the kind is built in");
    let api_version = given["apiVersion"].as_str().unwrap_or_default();
    let writer = Writer { api_version, ..writer(manager) };
    let ours = if op == "apply" {
        apply(&type_, live, given, &writer, force)
    } else {
        let mut new = given.clone();
        track_update(&type_, live, &mut new, &writer);
        Ok(new)
    };
    let question = question_about(kind, op, live, given, manager, force);
    let theirs = ask(&question);
    match (ours, theirs["error"].as_str()) {
        (Ok(ours), None) => {
            let theirs = comparable(theirs["object"].clone());
            assert_eq!(comparable(ours), theirs, "{question}");
            theirs
        }
        (Err(ours), Some(theirs)) => {
            if let ApplyError::Conflicts(conflicts) = &ours
                && conflicts.len() == 1
            {
                assert_eq!(ours.to_string(), theirs, "{question}");
            }
            let count = |text: &str| text.split_whitespace().nth(3).map(str::to_owned);
            assert_eq!(count(&ours.to_string()), count(theirs), "{question}\n{ours}\n{theirs}");
            live.clone()
        }
        (ours, _) => panic!("{question}\nours: {ours:?}\ntheirs: {theirs}"),
    }
}

fn some<T>(random: &mut Random, of: &[&str], mut make: impl FnMut(&mut Random, &str) -> T) -> Vec<T> {
    let mut names = of.to_vec();
    let count = random.below(of.len() + 1);
    (0..count)
        .map(|_| {
            let name = names.remove(random.below(names.len()));
            make(random, name)
        })
        .collect()
}

fn map(random: &mut Random) -> Value {
    let entries = some(random, &["a", "b", "c"], |random, name| {
        (name.to_owned(), Value::from(random.below(3).to_string()))
    });
    Value::Object(entries.into_iter().collect())
}

fn container(random: &mut Random, name: &str) -> Value {
    let mut container = json!({"name": name});
    if !random.once_in(3) {
        container["image"] = random.below(3).to_string().into();
    }
    if random.once_in(2) {
        let ports = some(random, &["80", "81"], |random, port| {
            let mut entry = json!({"containerPort": port.parse::<u16>().expect("a number")});
            if random.once_in(2) {
                entry["protocol"] = (*random.pick(&["TCP", "UDP"])).into();
            }
            if random.once_in(2) {
                entry["name"] = random.below(2).to_string().into();
            }
            entry
        });
        container["ports"] = ports.into();
    }
    if random.once_in(3) {
        container["resources"] = if random.once_in(2) {
            json!({})
        } else {
            json!({"limits": {"cpu": random.below(3).to_string()}})
        };
    }
    if random.once_in(3) {
        container["args"] = some(random, &["x", "y"], |_, name| name.to_owned()).into();
    }
    container
}

fn pod(random: &mut Random) -> Value {
    let mut metadata = json!({"name": "p", "namespace": "n"});
    let mut spec = Map::new();
    if random.once_in(2) {
        metadata["labels"] = map(random);
    }
    if random.once_in(2) {
        metadata["finalizers"] = some(random, &["f", "g", "h"], |_, name| name.to_owned()).into();
    }
    if random.once_in(2) {
        spec.insert("nodeSelector".to_owned(), map(random));
    }
    if random.once_in(4) {
        spec.insert("nodeName".to_owned(), random.below(3).to_string().into());
    }
    if random.once_in(3) {
        let tolerations = some(random, &["k", "l"], |_, name| json!({"key": name}));
        spec.insert("tolerations".to_owned(), tolerations.into());
    }
    if random.once_in(3) {
        let context = if random.once_in(3) {
            json!({})
        } else {
            json!({"runAsUser": random.below(3), "seLinuxOptions": {"level": "x"}})
        };
        spec.insert("securityContext".to_owned(), context);
    }
    if !random.once_in(4) {
        let containers = some(random, &["a", "b", "c"], container);
        spec.insert("containers".to_owned(), containers.into());
    }
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
    if !random.once_in(8) {
        pod["spec"] = spec.into();
    }
    pod
}

#[test]
fn random_writes_have_the_owners_kubernetes_gives_them() {
    let mut random = Random::new(11);
    let managers = ["one", "two", "kubectl"];
    for _ in 0..250 {
        let mut live = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}});
        for step in 0..8 {
            let manager = *random.pick(&managers);
            let mut given = pod(&mut random);
            if random.once_in(3) {
                if step > 0 {
                    given["metadata"]["uid"] = "u".into();
                }
                live = both("update", &live, &given, manager, false);
            } else {
                let force = random.once_in(3);
                live = both("apply", &live, &given, manager, force);
            }
            if step == 0 {
                live["metadata"]["uid"] = "u".into();
            }
        }
    }
}

#[test]
fn applying_the_same_again_changes_nothing() {
    let empty = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}});
    let config = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"a": "1"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let once = both("apply", &empty, &config, "me", false);
    let twice = both("apply", &once, &config, "me", false);
    assert_eq!(once, twice);
}

#[test]
fn what_was_there_before_the_first_apply_has_an_owner() {
    let live = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "uid": "u", "labels": {"a": "1"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let config = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "j"}]}});
    both("apply", &live, &config, "me", false);
    let applied = both("apply", &live, &config, "me", true);
    assert_eq!(applied["metadata"]["managedFields"][0]["manager"], "before-first-apply");
}

#[test]
fn kubectl_takes_over_from_client_side_apply() {
    let config = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "annotations": {}},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let mut live = config.clone();
    live["metadata"]["annotations"] =
        json!({"kubectl.kubernetes.io/last-applied-configuration": config.to_string()});
    let empty = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}});
    let live = both("update", &empty, &live, "kubectl-client-side-apply", false);
    let mut changed = config;
    changed["spec"]["containers"][0]["image"] = "j".into();
    both("apply", &live, &changed, "someone", false);
    both("apply", &live, &changed, "kubectl", false);
}

#[test]
fn configurations_that_do_not_fit_are_refused_in_the_same_words() {
    let live = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}});
    for spec in [
        json!({"nope": 1}),
        json!({"containers": [{"name": "a"}, {"name": "a"}]}),
        json!({"containers": ["a"]}),
        json!({"containers": [null]}),
        json!({"hostNetwork": "yes"}),
        json!({"nodeName": 2}),
        json!({"containers": {"a": 1}}),
        json!({"securityContext": "x"}),
        json!({"terminationGracePeriodSeconds": "soon"}),
        json!({"tolerations": [{"nope": 1}]}),
    ] {
        let given = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "n"}, "spec": spec});
        let type_ = built_in(POD.0, POD.1, POD.2).expect("pods are built in");
        let ours = apply(&type_, &live, &given, &writer("me"), false).expect_err("it does not fit");
        let theirs = ask(&question("apply", &live, &given, "me", false));
        // Kubernetes prints the value as Go does, Berth as JSON.
        let start = |text: &str| text.split(", got ").next().map(str::to_owned);
        assert_eq!(start(&ours.to_string()), theirs["error"].as_str().and_then(start), "{given}");
    }
}

#[test]
fn an_item_without_its_key_has_the_default_key() {
    let live = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}});
    let given = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"containers": [{"image": "a", "ports": [{"name": "b"}]}]}});
    both("apply", &live, &given, "me", false);
}

#[test]
fn filled_objects_of_all_kinds_have_the_owners_kubernetes_gives_them() {
    for (group, version, kind, type_) in built_in_kinds() {
        if group == "meta.k8s.io" || type_.field("metadata").is_none() {
            continue;
        }
        let kind = (group, version, kind);
        let filled = |seed: u64| {
            let mut question = about("fill", kind);
            question["seed"] = seed.into();
            let mut object = ask(&question)["object"].clone();
            object["metadata"]["managedFields"] = Value::Null;
            object
        };
        let (first, second) = (filled(1), filled(2));
        let empty = json!({"apiVersion": first["apiVersion"], "kind": first["kind"], "metadata": {}});
        let created = both_of(kind, "update", &empty, &first, "one", false);
        let applied = both_of(kind, "apply", &created, &second, "two", true);
        let again = both_of(kind, "apply", &applied, &first, "two", true);
        both_of(kind, "update", &again, &second, "three", false);
    }
}
