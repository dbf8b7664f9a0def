//! What budgets allow, after `disruption_test.go` of Kubernetes' disruption controller.

use serde_json::{Value, json};

use super::*;

fn pods(ready: usize, unready: usize, owner: Option<&str>) -> Vec<Arc<Pod>> {
    let owners = owner.map(|uid| {
        json!([{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": uid, "uid": uid, "controller": true }])
    });
    (0..ready + unready)
        .map(|number| {
            let status = if number < ready { "True" } else { "False" };
            let pod = json!({
                "metadata": { "name": format!("p{number}"), "namespace": "ns", "ownerReferences": owners },
                "status": { "conditions": [{ "type": "Ready", "status": status }] },
            });
            Arc::new(serde_json::from_value(pod).unwrap())
        })
        .collect()
}

fn budget(spec: &Value, status: &Value) -> PodDisruptionBudget {
    let budget = json!({ "metadata": { "name": "b", "namespace": "ns", "generation": 2 }, "spec": spec, "status": status });
    serde_json::from_value(budget).unwrap()
}

fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

/// What is allowed, healthy, wanted healthy, and expected.
fn counted(budget: &PodDisruptionBudget, pods: &[Arc<Pod>], scale: i32) -> [i32; 4] {
    let expected = expected(budget, pods, |_, owner| Some((owner.uid.clone(), scale)));
    let (status, _) = status(budget, pods, expected, now());
    [status.disruptions_allowed, status.current_healthy, status.desired_healthy, status.expected_pods]
        .map(|count| count.expect("every counter is written"))
}

#[test]
fn as_many_are_allowed_as_leave_enough_healthy() {
    let none =
        json!({ "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0 });
    for (spec, pods, scale, expected) in [
        (json!({ "minAvailable": 2 }), pods(3, 0, None), 0, [1, 3, 2, 3]),
        (json!({ "minAvailable": 2 }), pods(2, 1, None), 0, [0, 2, 2, 3]),
        (json!({ "minAvailable": 2 }), pods(0, 0, None), 0, [0, 0, 2, 0]),
        (json!({ "minAvailable": "50%" }), pods(3, 0, Some("s")), 3, [1, 3, 2, 3]),
        (json!({ "maxUnavailable": 1 }), pods(3, 0, Some("s")), 3, [1, 3, 2, 3]),
        (json!({ "maxUnavailable": 1 }), pods(2, 0, Some("s")), 3, [0, 2, 2, 3]),
        (json!({ "maxUnavailable": "34%" }), pods(3, 0, Some("s")), 3, [2, 3, 1, 3]),
        (json!({ "maxUnavailable": 5 }), pods(2, 0, Some("s")), 2, [2, 2, 0, 2]),
        (json!({ "maxUnavailable": 1 }), pods(2, 0, None), 0, [0, 2, 0, 0]),
        (json!({}), pods(2, 0, Some("s")), 2, [0, 2, 0, 0]),
    ] {
        assert_eq!(counted(&budget(&spec, &none), &pods, scale), expected, "{spec}");
    }
}

#[test]
fn a_pod_whose_eviction_was_allowed_does_not_count_for_two_minutes() {
    let noted = |at: &str| {
        json!({ "disruptionsAllowed": 0, "currentHealthy": 3, "desiredHealthy": 2, "expectedPods": 3,
            "disruptedPods": { "p0": at, "gone": at } })
    };
    let spec = json!({ "minAvailable": 2 });
    let just_now = budget(&spec, &noted("2025-12-31T23:59:00Z"));
    assert_eq!(counted(&just_now, &pods(3, 0, None), 0), [0, 2, 2, 3]);
    let asked = expected(&just_now, &pods(3, 0, None), |_, _| None);
    let (told, again) = status(&just_now, &pods(3, 0, None), asked, now());
    assert_eq!(told.disrupted_pods.unwrap().into_keys().collect::<Vec<_>>(), ["p0"]);
    assert_eq!(again, Some("2026-01-01T00:01:00Z".parse().unwrap()));
    let long_ago = budget(&spec, &noted("2025-12-31T23:57:00Z"));
    assert_eq!(counted(&long_ago, &pods(3, 0, None), 0), [1, 3, 2, 3]);
}

#[test]
fn pods_of_an_unknown_controller_allow_nothing() {
    let budget = budget(
        &json!({ "maxUnavailable": 1 }),
        &json!({ "disruptionsAllowed": 1, "currentHealthy": 3, "desiredHealthy": 2, "expectedPods": 3 }),
    );
    let pods = pods(3, 0, Some("s"));
    let expected = expected(&budget, &pods, |_, _| None);
    let (status, _) = status(&budget, &pods, expected, now());
    assert_eq!(status.disruptions_allowed, Some(0));
    let condition = &status.conditions.unwrap()[0];
    assert_eq!(
        (condition.reason.as_str(), condition.message.as_str()),
        ("SyncFailed", "found no controllers for pod \"p0\"")
    );
}

#[test]
fn budgets_count_anew_when_a_pod_or_a_set_gets_a_controller() {
    let of = |owner: Option<&str>| pods(1, 0, owner).remove(0);
    assert_ne!(counts_by(&of(None)), counts_by(&of(Some("s"))), "a pod is adopted");
    assert_ne!(counts_by(&of(Some("s"))), counts_by(&of(Some("t"))), "a pod changes hands");
    let set = |owner: Option<&str>, replicas: i32| -> Arc<ReplicaSet> {
        let owners = owner.map(|uid| {
            json!([{ "apiVersion": "apps/v1", "kind": "Deployment", "name": uid, "uid": uid, "controller": true }])
        });
        let set = json!({ "metadata": { "name": "r", "ownerReferences": owners },
            "spec": { "replicas": replicas, "selector": {} } });
        Arc::new(serde_json::from_value(set).unwrap())
    };
    assert_ne!(wants(&set(None, 1)), wants(&set(Some("d"), 1)), "a set is adopted");
    assert_ne!(wants(&set(None, 1)), wants(&set(None, 2)));
    assert_eq!(wants(&set(Some("d"), 1)), wants(&set(Some("d"), 1)));
}

#[test]
fn a_selector_is_shown_as_upstream_shows_it() {
    let selector = |selector: Value| serde_json::from_value::<LabelSelector>(selector).unwrap();
    assert_eq!(shown(None), "nil");
    assert_eq!(
        shown(Some(&selector(json!({ "matchLabels": { "b": "2", "a": "1" } })))),
        "&LabelSelector{MatchLabels:map[string]string{a: 1,b: 2,},MatchExpressions:[]LabelSelectorRequirement{},}"
    );
    let asked = json!({ "matchExpressions": [{ "key": "app", "operator": "In", "values": ["x", "y"] }] });
    assert_eq!(
        shown(Some(&selector(asked))),
        "&LabelSelector{MatchLabels:map[string]string{},MatchExpressions:[]LabelSelectorRequirement{\
         LabelSelectorRequirement{Key:app,Operator:In,Values:[x y],},},}"
    );
}
