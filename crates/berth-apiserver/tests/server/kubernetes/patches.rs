//! Patches do to objects what Kubernetes' libraries do to them.

use berth_apiserver::patch;
use berth_apiserver::schema::built_in;
use serde_json::{Map, Value, json};

use super::peer::{about, ask};
use super::random::Random;

fn strategic_cases() -> Vec<(Value, Value)> {
    let containers = json!({"spec": {"containers": [
        {"name": "a", "image": "1", "ports": [{"containerPort": 80, "name": "x"}], "env": [{"name": "E", "value": "1"}]},
        {"name": "b", "image": "2"}, {"name": "c", "image": "3"}]}});
    vec![
        (containers.clone(), json!({"spec": {"containers": [{"name": "b", "image": "9"}]}})),
        (containers.clone(), json!({"spec": {"containers": [{"name": "d", "image": "4"}]}})),
        (containers.clone(), json!({"spec": {"containers": [{"$patch": "delete", "name": "b"}]}})),
        (containers.clone(), json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}})),
        (containers.clone(), json!({"spec": {"containers": [{"$patch": "merge", "name": "b"}]}})),
        (containers.clone(), json!({"spec": {"containers": [{"$patch": "what", "name": "b"}]}})),
        (containers.clone(), json!({"spec": {"containers": [{"image": "no name"}]}})),
        (containers.clone(), json!({"spec": {"$patch": "replace", "nodeName": "n"}})),
        (containers.clone(), json!({"spec": {"$patch": "delete"}})),
        (containers.clone(), json!({"spec": {"$patch": "merge"}})),
        (containers.clone(), json!({"spec": null})),
        (containers.clone(), json!({"spec": {"containers": null}})),
        (
            containers.clone(),
            json!({"spec": {"containers": [{"name": "a", "ports": [{"containerPort": 80, "name": null}, {"containerPort": 81}], "env": [{"$patch": "delete", "name": "E"}]}]}}),
        ),
        (
            containers.clone(),
            json!({"spec": {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}], "containers": [{"name": "a", "image": "9"}]}}),
        ),
        (
            containers.clone(),
            json!({"spec": {"$setElementOrder/containers": [{"name": "n"}, {"name": "c"}], "containers": [{"name": "n"}, {"$patch": "delete", "name": "a"}]}}),
        ),
        (
            containers.clone(),
            json!({"spec": {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}], "containers": [{"name": "a"}, {"name": "c"}]}}),
        ),
        (containers.clone(), json!({"spec": {"$setElementOrder/containers": [{"name": "a"}]}})),
        (containers.clone(), json!({"spec": {"$setElementOrder/containers": "a"}})),
        (
            json!({}),
            json!({"spec": {"$setElementOrder/containers": [{"name": "a"}], "containers": [{"name": "a"}]}}),
        ),
        (
            json!({"spec": {}}),
            json!({"spec": {"$setElementOrder/containers": [{"name": "a"}], "containers": [{"name": "a"}, {"$patch": "delete", "name": "x"}]}}),
        ),
    ]
}

fn more_strategic_cases() -> Vec<(Value, Value)> {
    let volumes = json!({"spec": {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}, {"name": "w", "hostPath": {"path": "/"}}]}});
    let metadata = json!({"metadata": {"labels": {"a": "1", "b": "2"}, "finalizers": ["x", "y"], "annotations": {"k": "v"}}});
    vec![
        (
            volumes.clone(),
            json!({"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}]}}),
        ),
        (
            volumes.clone(),
            json!({"spec": {"volumes": [{"name": "v", "$retainKeys": ["name"], "hostPath": {"path": "/x"}}]}}),
        ),
        (volumes.clone(), json!({"spec": {"volumes": [{"name": "v", "$retainKeys": "name"}]}})),
        (
            volumes,
            json!({"spec": {"volumes": [{"name": "v", "emptyDir": null, "hostPath": {"path": "/x", "type": null}}]}}),
        ),
        (metadata.clone(), json!({"metadata": {"labels": {"a": null, "c": "3"}}})),
        (metadata.clone(), json!({"metadata": {"labels": {"$patch": "replace", "c": "3"}}})),
        (metadata.clone(), json!({"metadata": {"labels": null, "annotations": {"n": null}}})),
        (metadata.clone(), json!({"metadata": {"finalizers": ["z", "x"]}})),
        (
            metadata.clone(),
            json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["x"], "$setElementOrder/finalizers": ["z", "y"], "finalizers": ["z"]}}),
        ),
        (metadata.clone(), json!({"metadata": {"$deleteFromPrimitiveList/finalizers": "x"}})),
        (metadata.clone(), json!({"metadata": {"$deleteFromPrimitiveList/ownerReferences": ["x"]}})),
        (metadata, json!({"metadata": {"ownerReferences": [{"uid": "u", "name": "n", "kind": null}]}})),
        (json!({"spec": {"tolerations": [{"key": "a"}]}}), json!({"spec": {"tolerations": [{"key": "b"}]}})),
        (
            json!({"spec": {"nodeSelector": {"a": "b"}}}),
            json!({"spec": {"nodeSelector": {"c": "d"}, "x": {"y": null, "z": 1}}}),
        ),
        (json!({"spec": {"nodeName": "a"}}), json!({"spec": {"nodeName": {"a": 1}}})),
        (
            json!({"status": {"conditions": [{"type": "A", "status": "True"}]}}),
            json!({"status": {"conditions": [{"type": "B", "status": "False"}, {"type": "A", "reason": "r"}]}}),
        ),
        (json!({"spec": {"containers": ["a"]}}), json!({"spec": {"containers": [{"name": "a"}]}})),
        (
            json!({"spec": {"securityContext": {"runAsUser": 1, "sysctls": [{"name": "a"}]}}}),
            json!({"spec": {"securityContext": {"runAsUser": null, "sysctls": [{"name": "b"}]}}}),
        ),
    ]
}

fn same_as_peer(question: &Value, ours: Result<Value, patch::PatchError>, texts: bool) {
    let theirs = ask(question);
    match (ours, theirs["error"].as_str()) {
        (Ok(ours), None) => assert_eq!(ours, theirs["object"], "{question}"),
        // Values in the text are printed as Go does by the one and as JSON by the other.
        (Err(ours), Some(theirs)) if texts => {
            assert_eq!(ours.to_string().split(':').next(), theirs.split(':').next(), "{question}");
        }
        (Err(_), Some(_)) => {}
        (ours, _) => panic!("{question}\nours: {ours:?}\ntheirs: {theirs}"),
    }
}

fn strategic(object: &Value, change: &Value) {
    let kind = ("", "v1", "Pod");
    let type_ = built_in(kind.0, kind.1, kind.2).expect("pods are built in");
    let mut question = about("strategic", kind);
    question["object"] = object.clone();
    question["patch"] = change.clone();
    let mut ours = object.clone();
    let result = patch::strategic(&type_, &mut ours, change.clone()).map(|()| ours);
    same_as_peer(&question, result, true);
}

#[test]
fn strategic_merge_patches_do_what_kubernetes_does() {
    for (object, change) in strategic_cases().into_iter().chain(more_strategic_cases()) {
        strategic(&object, &change);
    }
}

/// A list of named things in some order.
fn containers(random: &mut Random, patch: bool) -> Vec<Value> {
    let mut names = vec!["a", "b", "c", "d", "e"];
    let mut list = Vec::new();
    for _ in 0..random.below(5) {
        let name = names.remove(random.below(names.len()));
        let mut item = json!({"name": name});
        if patch && random.once_in(4) {
            item["$patch"] = "delete".into();
        } else {
            item["image"] =
                if patch && random.once_in(4) { Value::Null } else { json!(random.below(3).to_string()) };
            if random.once_in(2) {
                let ports: Vec<_> = (0..random.below(3))
                    .map(|port| json!({"containerPort": port, "name": random.below(9).to_string()}))
                    .collect();
                item["ports"] = ports.into();
            }
        }
        list.push(item);
    }
    if patch && random.once_in(12) {
        list.insert(random.below(list.len() + 1), json!({"$patch": "replace"}));
    }
    list
}

#[test]
fn random_strategic_merge_patches_do_what_kubernetes_does() {
    let mut random = Random::new(7);
    for _ in 0..1500 {
        let object = json!({"spec": {"containers": containers(&mut random, false)}});
        let list = containers(&mut random, true);
        let mut spec = Map::new();
        if random.once_in(2) {
            let mut order: Vec<_> = list
                .iter()
                .filter(|item| item.get("$patch").is_none())
                .map(|item| json!({"name": item["name"]}))
                .collect();
            for name in ["a", "b", "c", "f"] {
                if random.once_in(3) && !order.iter().any(|entry| entry["name"] == name) {
                    order.insert(random.below(order.len() + 1), json!({"name": name}));
                }
            }
            spec.insert("$setElementOrder/containers".to_owned(), order.into());
        }
        if !random.once_in(6) {
            spec.insert("containers".to_owned(), list.into());
        }
        strategic(&object, &json!({"spec": spec}));
    }
}

#[test]
fn random_finalizer_patches_do_what_kubernetes_does() {
    let mut random = Random::new(8);
    let some = |random: &mut Random| {
        let mut all = vec!["a", "b", "c", "d"];
        (0..random.below(4)).map(|_| all.remove(random.below(all.len()))).collect::<Vec<_>>()
    };
    for _ in 0..500 {
        let object = json!({"metadata": {"finalizers": some(&mut random)}});
        let added = some(&mut random);
        // Of what is both added and deleted, chance decides in Kubernetes.
        let mut deleted = some(&mut random);
        deleted.retain(|name| !added.contains(name));
        let mut metadata = json!({"$deleteFromPrimitiveList/finalizers": deleted});
        if random.once_in(2) {
            metadata["$setElementOrder/finalizers"] = json!(added);
        }
        metadata["finalizers"] = json!(added);
        strategic(&object, &json!({"metadata": metadata}));
    }
}

#[test]
fn json_patches_do_what_kubernetes_does() {
    let object = json!({"a": {"b": [1, 2, {"c": "d"}], "e/f": "g", "n": null, "~": 1}, "x": "y"});
    let mut random = Random::new(3);
    let ops = ["add", "remove", "replace", "move", "copy", "test", "nonsense"];
    let paths = [
        "/a", "/a/b", "/a/b/0", "/a/b/2/c", "/a/b/-", "/a/b/-1", "/a/b/3", "/a/b/9", "/a/b/x", "/a/e~1f",
        "/a/~0", "/a/n", "/a/n/z", "/q", "/q/r", "/x", "/x/y", "",
    ];
    let values = [json!(1), json!(null), json!("y"), json!({"c": "d"}), json!([])];
    for op in ops {
        for path in paths {
            // The library panics on these.
            if path.is_empty() && ["replace", "test"].contains(&op) {
                continue;
            }
            for value in &values {
                let from = random.pick(&paths);
                let change = json!([{"op": op, "path": path, "value": value, "from": from}]);
                let question = json!({"op": "json", "object": object, "patch": change});
                let mut ours = object.clone();
                let result = patch::json(&mut ours, &change).map(|()| ours);
                same_as_peer(&question, result, true);
            }
        }
    }
}

#[test]
fn merge_patches_do_what_kubernetes_does() {
    let mut random = Random::new(5);
    for _ in 0..500 {
        let object = json!({"o": tree(&mut random, 3)});
        let change = json!({"o": tree(&mut random, 3), "p": tree(&mut random, 2)});
        let question = json!({"op": "merge", "object": object, "patch": change});
        let mut ours = object.clone();
        patch::merge(&mut ours, &change);
        same_as_peer(&question, Ok(ours), false);
    }
}

fn tree(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 3 } else { 6 }) {
        0 => Value::Null,
        1 => json!(random.below(3)),
        2 => json!(["l", random.below(3)]),
        _ => {
            let mut object = Map::new();
            for name in ["a", "b", "c"] {
                if random.once_in(2) {
                    object.insert(name.to_owned(), tree(random, depth - 1));
                }
            }
            Value::Object(object)
        }
    }
}
