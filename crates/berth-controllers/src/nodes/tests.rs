//! Decision tables: silent nodes, taints by conditions, disruption, tolerations, and pods that nobody removes.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use serde_json::{Value, json};

use super::lifecycle::mark_not_ready;
use super::plan::{
    Disruption, Garbage, Leave, Readiness, disruption, garbage, leave, mark_silent, no_execute, readiness,
    same_taints, taints, wanted_taints,
};

fn node(status: Option<&str>, more: Value) -> Node {
    let mut conditions = Vec::new();
    if let Some(status) = status {
        conditions.push(json!({ "type": "Ready", "status": status }));
    }
    let mut node = json!({
        "metadata": { "name": "a", "creationTimestamp": "2026-01-01T00:00:00Z" },
        "spec": {}, "status": { "conditions": conditions },
    });
    json_patch(&mut node, more);
    serde_json::from_value(node).unwrap()
}

fn json_patch(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                json_patch(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from),
        (into, from) => *into = from,
    }
}

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

#[test]
fn nobody_knows_the_conditions_of_a_silent_node() {
    let mut never = node(None, json!({}));
    assert!(mark_silent(&mut never, now()));
    let conditions = never.status.as_ref().unwrap().conditions.as_ref().unwrap();
    assert_eq!(conditions.len(), 4);
    assert!(conditions.iter().all(|condition| condition.status == "Unknown"
        && condition.reason.as_deref() == Some("NodeStatusNeverUpdated")
        && condition.last_heartbeat_time == never.metadata.creation_timestamp));

    let more = json!({ "status": { "conditions": [
        { "type": "DiskPressure", "status": "False" }, { "type": "Own", "status": "True" },
    ] } });
    let mut stopped = node(Some("True"), more);
    assert_eq!(readiness(&stopped), Readiness::Ready);
    assert!(mark_silent(&mut stopped, now()));
    assert_eq!(readiness(&stopped), Readiness::Unknown);
    let conditions = stopped.status.clone().unwrap().conditions.unwrap();
    let reason = |type_: &str| {
        let found = conditions.iter().find(|condition| condition.type_ == type_).unwrap();
        (found.status.as_str().to_owned(), found.reason.clone().unwrap_or_default())
    };
    assert_eq!(reason("Ready"), ("Unknown".to_owned(), "NodeStatusUnknown".to_owned()));
    assert_eq!(reason("DiskPressure"), ("Unknown".to_owned(), "NodeStatusUnknown".to_owned()));
    assert_eq!(reason("MemoryPressure"), ("Unknown".to_owned(), "NodeStatusNeverUpdated".to_owned()));
    assert_eq!(reason("Own"), ("True".to_owned(), String::new()));
    assert!(!mark_silent(&mut stopped, now()), "the second time nothing changes");
}

#[test]
fn taints_follow_from_conditions_and_those_of_others_stay() {
    let condition =
        |type_: &str| json!({ "status": { "conditions": [{ "type": type_, "status": "True" }] } });
    let schedule = |key: &str| format!("{key}:NoSchedule");
    let cases = [
        (node(Some("True"), json!({})), vec![]),
        (node(None, json!({})), vec![]),
        (node(Some("False"), json!({})), vec![schedule("node.kubernetes.io/not-ready")]),
        (node(Some("Unknown"), json!({})), vec![schedule("node.kubernetes.io/unreachable")]),
        (
            node(Some("True"), condition("MemoryPressure")),
            vec![schedule("node.kubernetes.io/memory-pressure")],
        ),
        (node(Some("True"), condition("DiskPressure")), vec![schedule("node.kubernetes.io/disk-pressure")]),
        (node(Some("True"), condition("PIDPressure")), vec![schedule("node.kubernetes.io/pid-pressure")]),
        (
            node(Some("True"), condition("NetworkUnavailable")),
            vec![schedule("node.kubernetes.io/network-unavailable")],
        ),
        (
            node(Some("True"), json!({ "spec": { "unschedulable": true } })),
            vec![schedule("node.kubernetes.io/unschedulable")],
        ),
        (
            node(
                Some("True"),
                json!({ "spec": { "taints": [
                    { "key": "own", "effect": "NoExecute" }, { "key": "node.kubernetes.io/not-ready", "effect": "NoSchedule" },
                    { "key": "node.kubernetes.io/unreachable", "effect": "NoExecute" },
                    { "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" },
                ] } }),
            ),
            vec!["own:NoExecute".to_owned(), "node.kubernetes.io/out-of-service:NoExecute".to_owned()],
        ),
    ];
    for (node, expected) in cases {
        let wanted = wanted_taints(&node, None, now());
        let names: Vec<_> = wanted.iter().map(|taint| format!("{}:{}", taint.key, taint.effect)).collect();
        assert_eq!(names, expected, "{node:?}");
        let mut settled = node.clone();
        settled.spec.get_or_insert_default().taints = Some(wanted.clone());
        assert!(same_taints(taints(&settled), &wanted_taints(&settled, None, now())));
    }
}

#[test]
fn pods_leave_by_what_the_node_says_and_a_taint_keeps_its_time() {
    assert_eq!(no_execute(&node(Some("True"), json!({}))), None);
    assert_eq!(no_execute(&node(None, json!({}))), None);
    assert_eq!(no_execute(&node(Some("False"), json!({}))), Some("node.kubernetes.io/not-ready"));
    assert_eq!(no_execute(&node(Some("Unknown"), json!({}))), Some("node.kubernetes.io/unreachable"));
    let mut silent = node(Some("Unknown"), json!({}));
    let first = wanted_taints(&silent, no_execute(&silent), now());
    silent.spec.get_or_insert_default().taints = Some(first.clone());
    let later = now() + jiff::SignedDuration::from_secs(30);
    assert_eq!(wanted_taints(&silent, no_execute(&silent), later), first);
    // It speaks again, and says that it is not ready: the one taint takes the place of the other.
    let swapped = Node { status: node(Some("False"), json!({})).status, ..silent };
    let keys: Vec<_> = wanted_taints(&swapped, no_execute(&swapped), later)
        .iter()
        .map(|taint| (taint.key.clone(), taint.effect.clone()))
        .collect();
    let not_ready = "node.kubernetes.io/not-ready".to_owned();
    assert_eq!(keys, [(not_ready.clone(), "NoSchedule".to_owned()), (not_ready, "NoExecute".to_owned())]);
}

#[test]
fn a_small_cluster_that_is_mostly_down_evicts_nobody() {
    let cases = [
        ((0, 0), Disruption::Normal),
        ((1, 0), Disruption::Normal),
        ((0, 1), Disruption::Full),
        ((0, 3), Disruption::Full),
        ((2, 1), Disruption::Normal),
        ((1, 2), Disruption::Normal),
        ((1, 3), Disruption::Partial),
        ((2, 3), Disruption::Partial),
        ((3, 3), Disruption::Normal),
        ((9, 11), Disruption::Partial),
        ((45, 55), Disruption::Normal),
    ];
    for ((ready, not_ready), expected) in cases {
        assert_eq!(disruption(ready, not_ready), expected, "{ready} of {}", ready + not_ready);
    }
}

#[test]
fn pods_leave_when_the_shortest_toleration_ends() {
    let taint = |key: &str, effect: &str| Taint {
        key: key.to_owned(),
        effect: effect.to_owned(),
        value: Some("v".to_owned()),
        time_added: None,
    };
    let tolerates = |key: &str, seconds: Option<i64>| Toleration {
        key: Some(key.to_owned()).filter(|key| !key.is_empty()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: seconds,
        value: None,
    };
    let after = |seconds| Leave::After(Duration::from_secs(seconds));
    let (a, b) = (taint("a", "NoExecute"), taint("b", "NoExecute"));
    let cases = [
        (vec![], vec![], Leave::Never),
        (vec![taint("a", "NoSchedule")], vec![], Leave::Never),
        (vec![a.clone()], vec![], Leave::Now),
        (vec![a.clone()], vec![tolerates("b", None)], Leave::Now),
        (vec![a.clone()], vec![tolerates("a", None)], Leave::Never),
        (vec![a.clone()], vec![tolerates("", None)], Leave::Never),
        (vec![a.clone()], vec![tolerates("a", Some(300))], after(300)),
        (vec![a.clone()], vec![tolerates("a", Some(300)), tolerates("a", Some(5))], after(5)),
        (vec![a.clone()], vec![tolerates("a", Some(300)), tolerates("a", None)], after(300)),
        (vec![a.clone()], vec![tolerates("a", Some(0))], Leave::Now),
        (vec![a.clone()], vec![tolerates("a", Some(-3))], Leave::Now),
        (vec![a.clone(), b.clone()], vec![tolerates("a", None)], Leave::Now),
        (vec![a.clone(), b.clone()], vec![tolerates("a", Some(10)), tolerates("b", Some(7))], after(7)),
        (vec![a, b], vec![tolerates("a", None), tolerates("b", Some(7))], after(7)),
    ];
    for (taints, tolerations, expected) in cases {
        assert_eq!(leave(&taints, &tolerations), expected, "{taints:?} {tolerations:?}");
    }
}

#[test]
fn pods_that_no_node_removes_are_garbage() {
    let pod = |node: &str, deleting: bool| -> Pod {
        let mut pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [] } });
        if !node.is_empty() {
            pod["spec"]["nodeName"] = json!(node);
        }
        if deleting {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        serde_json::from_value(pod).unwrap()
    };
    let out = json!({ "spec": { "taints": [{ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" }] } });
    let cases = vec![
        (pod("", false), None, None),
        (pod("", true), None, Some(Garbage::NeverScheduled)),
        (pod("a", false), None, Some(Garbage::NoNode)),
        (pod("a", true), None, Some(Garbage::NoNode)),
        (pod("a", true), Some(node(Some("True"), json!({}))), None),
        (pod("a", true), Some(node(Some("Unknown"), json!({}))), None),
        (pod("a", true), Some(node(Some("Unknown"), out.clone())), Some(Garbage::OutOfService)),
        (pod("a", true), Some(node(Some("False"), out.clone())), Some(Garbage::OutOfService)),
        (pod("a", false), Some(node(Some("Unknown"), out.clone())), None),
        // It says that it works: it removes its pods itself.
        (pod("a", true), Some(node(Some("True"), out)), None),
    ];
    for (pod, node, expected) in cases {
        assert_eq!(garbage(&pod, node.as_ref()), expected, "{pod:?} on {node:?}");
    }
}

#[test]
fn pods_of_a_failed_node_are_marked_once() {
    let mut pod: Pod = serde_json::from_value(json!({
        "metadata": { "name": "p" }, "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
    }))
    .unwrap();
    assert!(mark_not_ready(&mut pod, now()));
    assert!(!mark_not_ready(&mut pod, now()));
    assert!(!mark_not_ready(&mut Pod::default(), now()));
}
