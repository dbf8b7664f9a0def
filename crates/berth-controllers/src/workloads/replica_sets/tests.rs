//! Which pods are made, which go first, and what the status says; after `replica_set_test.go` and
//! `controller_utils_test.go` of kube-controller-manager.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::plan::{Step, plan, rank, rank_in_job, status};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(replicas: i32, ready_for: i32) -> ReplicaSet {
    serde_json::from_value(json!({ "metadata": { "name": "s", "generation": 4 }, "spec": {
        "replicas": replicas, "minReadySeconds": ready_for, "selector": { "matchLabels": { "app": "s" } },
        "template": { "metadata": { "labels": { "app": "s", "more": "1" } } } } }))
    .unwrap()
}

#[expect(clippy::needless_pass_by_value, reason = "reads well in the rows")]
fn pod(uid: &str, node: &str, phase: &str, ready_at: Value, extra: &Value) -> Arc<Pod> {
    let conditions = if ready_at.is_null() {
        json!([])
    } else {
        json!([{ "type": "Ready", "status": "True", "lastTransitionTime": ready_at }])
    };
    let mut pod = json!({
        "metadata": { "name": uid, "uid": uid, "labels": { "app": "s" }, "creationTimestamp": "2026-01-01T08:00:00Z" },
        "spec": { "nodeName": node, "containers": [] },
        "status": { "phase": phase, "conditions": conditions },
    });
    if let Some(extra) = extra.as_object() {
        for (key, value) in extra {
            match key.as_str() {
                "cost" => {
                    pod["metadata"]["annotations"] =
                        json!({ "controller.kubernetes.io/pod-deletion-cost": value });
                }
                "created" => pod["metadata"]["creationTimestamp"] = value.clone(),
                "restarts" => {
                    pod["status"]["containerStatuses"] = json!([{ "name": "c", "image": "", "imageID": "",
                        "ready": true, "restartCount": value }]);
                }
                "label" => pod["metadata"]["labels"]["more"] = value.clone(),
                other => panic!("{other}"),
            }
        }
    }
    Arc::new(serde_json::from_value(pod).unwrap())
}

#[test]
fn pods_with_the_least_to_lose_go_first() {
    let early = json!("2026-01-01T09:00:00Z");
    let late = json!("2026-01-01T11:59:50Z");
    let none = Value::Null;
    let run =
        |uid: &str, node: &str, ready: &Value, extra: Value| pod(uid, node, "Running", ready.clone(), &extra);
    // Each before the next: 1 to 8 of upstream's order.
    let rows = [
        ("unassigned", run("z", "", &none, json!({})), run("a", "n", &none, json!({}))),
        ("pending", pod("z", "n", "Pending", Value::Null, &Value::Null), run("a", "n", &none, json!({}))),
        ("unknown", pod("z", "n", "Unknown", Value::Null, &Value::Null), run("a", "n", &none, json!({}))),
        ("not ready", run("z", "n", &none, json!({})), run("a", "n", &early, json!({}))),
        ("cheap", run("z", "n", &early, json!({ "cost": "-5" })), run("a", "n", &early, json!({}))),
        ("crowded", run("z", "crowded", &early, json!({})), run("a", "n", &early, json!({}))),
        ("ready for a short time", run("z", "n", &late, json!({})), run("a", "n", &early, json!({}))),
        (
            "restarted often",
            run("z", "n", &early, json!({ "restarts": 3 })),
            run("a", "n", &early, json!({ "restarts": 1 })),
        ),
        ("young", run("z", "n", &none, json!({ "created": late })), run("a", "n", &none, json!({}))),
    ];
    let related = HashMap::from([("crowded".to_owned(), 2), ("n".to_owned(), 1)]);
    for (name, first, second) in rows {
        let rank = |pod: &Pod| rank(pod, &related, now());
        assert!(rank(&first) < rank(&second), "{name}");
        // A Job's pods go in the same order, but for what they cost and who is beside them.
        let of_job = if ["cheap", "crowded"].contains(&name) { Ordering::Equal } else { Ordering::Less };
        assert_eq!(rank_in_job(&first).cmp(&rank_in_job(&second)), of_job, "{name}, of a Job");
    }
    // Ages that are about the same are none to a ReplicaSet, which takes the smaller uid, and differ to a Job.
    let about = json!("2026-01-01T09:00:01Z");
    let (older, younger) = (run("a", "n", &early, json!({})), run("z", "n", &about, json!({})));
    assert!(rank(&older, &related, now()) < rank(&younger, &related, now()));
    assert!(rank_in_job(&younger) < rank_in_job(&older));
    // One whose condition does not say since when it is ready goes before those that say it.
    let unknown = pod("z", "n", "Running", json!("2026-01-01T09:00:00Z"), &Value::Null);
    let mut unknown = Arc::unwrap_or_clone(unknown);
    unknown.status.as_mut().unwrap().conditions.as_mut().unwrap()[0].last_transition_time = None;
    assert!(rank(&unknown, &related, now()) < rank(&older, &related, now()));
    assert!(rank_in_job(&unknown) < rank_in_job(&older));
}

#[test]
fn which_pods_go_does_not_depend_on_the_order_in_which_they_are_seen() {
    // By their uids, a goes before b and b before c; by its restarts, c goes before a, which became ready when c did.
    let ready = |uid: &str, at: &str, restarts: i32| {
        pod(uid, "n", "Running", json!(at), &json!({ "restarts": restarts }))
    };
    let (a, c) = (ready("a", "2026-01-01T09:00:00Z", 0), ready("c", "2026-01-01T09:00:00Z", 5));
    let b = ready("b", "2026-01-01T09:00:01Z", 0);
    let none = HashMap::new();
    for seen in [[&a, &b, &c], [&b, &c, &a], [&c, &a, &b]] {
        let pods: Vec<Arc<Pod>> = seen.into_iter().cloned().collect();
        assert_eq!(plan(&set(2, 0), &pods, &none, now()), Step::Delete(vec![c.clone()]));
    }
    // Of so many the sort of Rust's library notices an order that runs in a circle, and panics.
    let many: Vec<Arc<Pod>> = (0..100)
        .map(|n| {
            let (at, uid) = (format!("2026-01-01T09:00:0{}Z", n % 7), format!("{:02}", n * 37 % 100));
            ready(&uid, &at, n * 13 % 5)
        })
        .collect();
    let reversed: Vec<Arc<Pod>> = many.iter().rev().cloned().collect();
    assert_eq!(plan(&set(20, 0), &many, &none, now()), plan(&set(20, 0), &reversed, &none, now()));
}

#[test]
fn as_many_pods_as_asked_for() {
    let pods: Vec<Arc<Pod>> =
        (0..3).map(|n| pod(&format!("p{n}"), "n", "Running", Value::Null, &Value::Null)).collect();
    let none = HashMap::new();
    assert_eq!(plan(&set(3, 0), &pods, &none, now()), Step::Nothing);
    assert_eq!(plan(&set(5, 0), &pods, &none, now()), Step::Create(2));
    assert_eq!(plan(&set(5000, 0), &pods, &none, now()), Step::Create(500));
    let Step::Delete(gone) = plan(&set(1, 0), &pods, &none, now()) else { panic!("some must go") };
    assert_eq!(gone.len(), 2);
}

#[test]
fn the_status_counts_labels_readiness_and_availability() {
    let pods = [
        pod("a", "n", "Running", json!("2026-01-01T09:00:00Z"), &json!({ "label": "1" })),
        pod("b", "n", "Running", json!("2026-01-01T11:59:50Z"), &Value::Null),
        pod("c", "n", "Pending", Value::Null, &Value::Null),
    ];
    let failure = ("FailedCreate".to_owned(), "no".to_owned());
    let (seen, again) = status(&set(3, 60), &pods, 1, Some(&failure), now());
    assert_eq!(
        (seen.replicas, seen.fully_labeled_replicas, seen.ready_replicas, seen.available_replicas),
        (3, Some(1), Some(2), Some(1))
    );
    assert_eq!((seen.terminating_replicas, seen.observed_generation, again), (Some(1), Some(4), Some(50)));
    let conditions = seen.conditions.clone().unwrap();
    assert_eq!(
        (conditions[0].type_.as_str(), conditions[0].reason.as_deref()),
        ("ReplicaFailure", Some("FailedCreate"))
    );
    let mut failed = set(3, 60);
    failed.status = Some(seen);
    assert_eq!(status(&failed, &pods, 0, None, now()).0.conditions, None, "it goes when the failure does");
}
