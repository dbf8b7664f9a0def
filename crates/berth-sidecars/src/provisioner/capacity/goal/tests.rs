//! Classes, nodes and what they come to, row by row.

use serde_json::{Value, json};

use super::*;

const DRIVER: &str = "d.example.com";

fn read<K: serde::de::DeserializeOwned>(object: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(object).unwrap())
}

/// A node as labels, and as the drivers on it with their keys.
fn node(name: &str, labels: &Value, drivers: &Value) -> (Arc<Node>, Arc<CSINode>) {
    let drivers: Vec<Value> = drivers
        .as_object()
        .unwrap()
        .iter()
        .map(|(driver, keys)| json!({ "name": driver, "nodeID": name, "topologyKeys": keys }))
        .collect();
    (
        read(json!({ "metadata": { "name": name, "labels": labels } })),
        read(json!({ "metadata": { "name": name }, "spec": { "drivers": drivers } })),
    )
}

fn segment(pairs: &[(&str, &str)]) -> Segment {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn every_segment_that_the_driver_runs_in_is_there_once() {
    let zone = |name: &str, zone: &str| node(name, &json!({ "zone": zone }), &json!({ DRIVER: ["zone"] }));
    let z1 = || segment(&[("zone", "z1")]);
    let rows = [
        ("no nodes", vec![], vec![]),
        ("one", vec![zone("a", "z1")], vec![z1()]),
        ("two at one capacity_key", vec![zone("a", "z1"), zone("b", "z1")], vec![z1()]),
        ("two capacity_keys", vec![zone("a", "z1"), zone("b", "z2")], vec![z1(), segment(&[("zone", "z2")])]),
        (
            "another driver's",
            vec![node("a", &json!({ "zone": "z1" }), &json!({ "other": ["zone"] }))],
            vec![],
        ),
        ("no driver", vec![node("a", &json!({ "zone": "z1" }), &json!({}))], vec![]),
        ("label not there yet", vec![node("a", &json!({}), &json!({ DRIVER: ["zone"] }))], vec![]),
        (
            "no keys: every node",
            vec![node("a", &json!({ "zone": "z1" }), &json!({ DRIVER: [] }))],
            vec![segment(&[])],
        ),
        ("null keys", vec![node("a", &json!({}), &json!({ DRIVER: null }))], vec![segment(&[])]),
        (
            "two keys, in whatever order",
            vec![
                node("a", &json!({ "zone": "z1", "rack": "r1" }), &json!({ DRIVER: ["zone", "rack"] })),
                node("b", &json!({ "zone": "z1", "rack": "r1" }), &json!({ DRIVER: ["rack", "zone"] })),
            ],
            vec![segment(&[("rack", "r1"), ("zone", "z1")])],
        ),
        (
            "nodes with different keys",
            vec![zone("a", "z1"), node("b", &json!({ "host": "b" }), &json!({ DRIVER: ["host"] }))],
            vec![segment(&[("host", "b")]), z1()],
        ),
    ];
    for (row, nodes, expected) in rows {
        let (nodes, csi_nodes): (Vec<_>, Vec<_>) = nodes.into_iter().unzip();
        let found: Vec<_> = segments(&csi_nodes, &nodes, DRIVER).into_iter().collect();
        assert_eq!(found, expected, "{row}");
    }
    let (node, csi_node) = zone("a", "z1");
    assert!(segments(&[csi_node], &[], DRIVER).is_empty(), "a CSINode without its node");
    assert!(segments(&[], &[node], DRIVER).is_empty(), "a node without its CSINode");
}

#[test]
fn classes_of_the_driver_count_and_those_that_bind_at_once_only_if_asked_for() {
    let class = |name: &str, provisioner: &str, mode: Value| -> Arc<StorageClass> {
        read(json!({ "metadata": { "name": name }, "provisioner": provisioner, "volumeBindingMode": mode }))
    };
    let all = [
        class("late", DRIVER, "WaitForFirstConsumer".into()),
        class("now", DRIVER, "Immediate".into()),
        class("unsaid", DRIVER, Value::Null),
        class("foreign", "other", "WaitForFirstConsumer".into()),
    ];
    let names = |immediate| classes(&all, DRIVER, immediate).into_keys().collect::<Vec<_>>();
    assert_eq!(names(false), ["late", "unsaid"]);
    assert_eq!(names(true), ["late", "now", "unsaid"]);
}

#[test]
fn the_driver_is_asked_with_its_own_parameters_and_once_for_classes_that_share_them() {
    let class = |name: &str, parameters: Value| -> Arc<StorageClass> {
        read(json!({ "metadata": { "name": name }, "provisioner": DRIVER, "parameters": parameters }))
    };
    let all = [
        class("a", json!({ "pool": "fast", "csi.storage.k8s.io/fstype": "xfs" })),
        class("b", json!({ "pool": "fast", "csi.storage.k8s.io/provisioner-secret-name": "s" })),
        class("c", json!({ "pool": "slow" })),
    ];
    let here = segment(&[("zone", "z1")]);
    let goal = Goal { segments: [here.clone()].into(), classes: classes(&all, DRIVER, false) };
    let capacity_key = |class: &str| CapacityKey { class: class.to_owned(), segment: here.clone() };
    let question = goal.question(&capacity_key("a")).unwrap();
    assert_eq!(question.parameters, Parameters::from([("pool".to_owned(), "fast".to_owned())]));
    assert_eq!(goal.question(&capacity_key("b")), Some(question.clone()));
    assert_eq!(goal.answered(&question), [capacity_key("a"), capacity_key("b")]);
    assert_ne!(goal.question(&capacity_key("c")), Some(question.clone()));
    assert_eq!(goal.capacity_keys().count(), 3);
    assert_eq!(goal.question(&CapacityKey { class: "a".to_owned(), segment: segment(&[]) }), None);
    let elsewhere = Question { segment: segment(&[("zone", "z2")]), ..question };
    assert!(goal.answered(&elsewhere).is_empty());
}

#[test]
fn the_segment_of_an_object_is_in_its_labels_alone() {
    let of = |topology: Value| {
        let object = json!({ "metadata": {}, "storageClassName": "a", "nodeTopology": topology });
        CapacityKey::of(&read::<CSIStorageCapacity>(object)).map(|capacity_key| capacity_key.segment)
    };
    assert_eq!(of(json!({ "matchLabels": { "zone": "z1" } })), Some(segment(&[("zone", "z1")])));
    assert_eq!(of(json!({})), Some(segment(&[])));
    assert_eq!(of(json!({ "matchLabels": {}, "matchExpressions": [] })), Some(segment(&[])));
    assert_eq!(of(Value::Null), None, "no topology is no node, which nobody here would say");
    let rule = json!([{ "key": "zone", "operator": "Exists" }]);
    assert_eq!(of(json!({ "matchExpressions": rule })), None);
}

#[test]
fn a_volumes_affinity_names_its_places() {
    let affinity = |terms: Value| {
        let affinity = json!({ "required": { "nodeSelectorTerms": terms } });
        segments_of(&serde_json::from_value(affinity).unwrap())
    };
    let is = |key: &str, values: &[&str]| json!({ "key": key, "operator": "In", "values": values });
    assert_eq!(
        affinity(json!([
            { "matchExpressions": [is("zone", &["z1"]), is("rack", &["r1"])] },
            { "matchExpressions": [is("zone", &["z2"])] },
        ])),
        [segment(&[("rack", "r1"), ("zone", "z1")]), segment(&[("zone", "z2")])]
    );
    let rules = json!([
        { "matchExpressions": [is("zone", &["z1", "z2"])] },
        { "matchExpressions": [{ "key": "zone", "operator": "Exists" }] },
        { "matchExpressions": [is("zone", &["z1"])], "matchFields": [is("metadata.name", &["n"])] },
    ]);
    assert!(affinity(rules).is_empty());
}
