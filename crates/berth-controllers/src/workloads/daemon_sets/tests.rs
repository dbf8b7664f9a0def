//! Which nodes get pods, and how they are replaced; after `daemon_controller_test.go` and `update_test.go` of
//! kube-controller-manager.
//!
//! A pod is written as node, template and state: `a1+` is on node `a`, of template 1 and available, `a1?` is not ready,
//! `a1!` has failed.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::plan::{ObservedSet, Step, node_of, plan, spare_revisions, template_for, verdict};
use crate::workloads::pods::from_template;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(strategy: &Value, pod: Value) -> DaemonSet {
    let mut spec = json!({ "containers": [{ "name": "c" }] });
    if let (Some(into), Value::Object(more)) = (spec.as_object_mut(), pod) {
        into.extend(more);
    }
    serde_json::from_value(json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": { "name": "d", "namespace": "ns", "uid": "set", "generation": 2,
            "annotations": { "deprecated.daemonset.template.generation": "2" } },
        "spec": { "selector": { "matchLabels": { "app": "d" } }, "updateStrategy": strategy,
            "template": { "metadata": { "labels": { "app": "d" } }, "spec": spec } },
    }))
    .unwrap()
}

fn rolling(missing: &Value, surge: &Value) -> Value {
    json!({ "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": missing, "maxSurge": surge } })
}

fn node(name: &str, spec: &Value) -> Arc<Node> {
    Arc::new(
        serde_json::from_value(
            json!({ "metadata": { "name": name, "labels": { "disk": name } }, "spec": spec }),
        )
        .unwrap(),
    )
}

fn pod(set: &DaemonSet, text: &str) -> Arc<Pod> {
    let (node, rest) = text.split_at(1);
    let (hash, state) = rest.split_at(1);
    let mut pod = from_template(set, template_for(set, hash, node));
    pod.metadata.name = Some(text.to_owned());
    pod.metadata.uid = Some(text.to_owned());
    pod.spec.as_mut().unwrap().node_name = Some(node.to_owned());
    let ready = json!([{ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T08:00:00Z" }]);
    let (phase, conditions) = match state {
        "+" => ("Running", ready),
        "!" => ("Failed", json!([])),
        _ => ("Running", json!([])),
    };
    pod.status = serde_json::from_value(json!({ "phase": phase, "conditions": conditions })).unwrap();
    Arc::new(pod)
}

fn observed<'a>(set: &'a DaemonSet, nodes: &str, pods: &str) -> ObservedSet<'a> {
    ObservedSet {
        set,
        hash: "2",
        nodes: nodes.split_whitespace().map(|name| node(name, &json!({}))).collect(),
        pods: pods.split_whitespace().map(|text| pod(set, text)).collect(),
        held: std::collections::HashSet::new(),
        now: now(),
    }
}

fn steps(observed: &ObservedSet<'_>) -> String {
    let shown = plan(observed).into_iter().map(|step| match step {
        Step::Create { node } => format!("create {node}"),
        Step::Delete { pod } => format!("delete {}", pod.name_any()),
        Step::Replace { pod, .. } => format!("replace {}", pod.name_any()),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[test]
fn every_node_that_suits_has_one_pod_of_the_newest_template() {
    let one = rolling(&json!(1), &json!(0));
    let surge = rolling(&json!(0), &json!(1));
    for (what, strategy, nodes, pods, expected) in [
        ("on every node", &one, "a b c", "", "create a, create b, create c"),
        ("where one lacks", &one, "a b c", "a2+ c2?", "create b"),
        ("all there", &one, "a b", "a2+ b2+", ""),
        ("one too many", &one, "a", "a2+ a2?", "delete a2?"),
        ("a failed one is replaced", &one, "a b", "a2! b2+", "replace a2!"),
        ("an old one is replaced", &one, "a b c", "a1+ b1+ c1+", "delete a1+"),
        ("one at a time", &one, "a b c", "a2? b1+ c1+", ""),
        ("then the next", &one, "a b c", "a2+ b1+ c1+", "delete b1+"),
        ("one that is missing anyway is replaced at once", &one, "a b c", "a1+ b1? c1+", "delete b1?"),
        (
            "several at a time",
            &rolling(&json!(2), &json!(0)),
            "a b c",
            "a1+ b1+ c1+",
            "delete a1+, delete b1+",
        ),
        (
            "by percent, rounded up",
            &rolling(&json!("34%"), &json!(0)),
            "a b c",
            "a1+ b1+ c1+",
            "delete a1+, delete b1+",
        ),
        ("on delete, nothing", &json!({ "type": "OnDelete" }), "a b", "a1+ b1+", ""),
        ("surge: a new one first", &surge, "a b", "a1+ b1+", "create a"),
        ("surge: the old one waits", &surge, "a b", "a1+ a2? b1+", ""),
        ("surge: then it goes", &surge, "a b", "a1+ a2+ b1+", "delete a1+"),
        ("surge: one that is missing anyway goes at once", &surge, "a b", "a1? b2+", "delete a1?"),
    ] {
        let set = set(strategy, json!({}));
        assert_eq!(steps(&observed(&set, nodes, pods)), expected, "{what}");
    }
}

#[test]
fn taints_selectors_and_affinity_choose_nodes() {
    let plain = set(&json!({}), json!({}));
    let selects = set(&json!({}), json!({ "nodeSelector": { "disk": "a" } }));
    let named = set(&json!({}), json!({ "nodeName": "a" }));
    let tolerant = set(&json!({}), json!({ "tolerations": [{ "operator": "Exists" }] }));
    let taint = |key: &str, effect: &str| json!({ "taints": [{ "key": key, "effect": effect }] });
    for (what, set, name, spec, should_run, may_stay) in [
        ("any node", &plain, "a", json!({}), true, true),
        ("the selected node", &selects, "a", json!({}), true, true),
        ("another node", &selects, "b", json!({}), false, false),
        ("the named node", &named, "a", json!({}), true, true),
        ("not the named node", &named, "b", json!({}), false, false),
        ("kept free of new pods", &plain, "a", taint("x", "NoSchedule"), false, true),
        ("kept free of pods", &plain, "a", taint("x", "NoExecute"), false, false),
        ("better not", &plain, "a", taint("x", "PreferNoSchedule"), true, true),
        ("tolerated", &tolerant, "a", taint("x", "NoExecute"), true, true),
        ("cordoned", &plain, "a", json!({ "unschedulable": true }), true, true),
        ("not ready", &plain, "a", taint("node.kubernetes.io/not-ready", "NoExecute"), true, true),
        ("not heard of", &plain, "a", taint("node.kubernetes.io/unreachable", "NoExecute"), true, true),
        (
            "out of service",
            &plain,
            "a",
            taint("node.kubernetes.io/out-of-service", "NoExecute"),
            false,
            false,
        ),
    ] {
        let verdict = verdict(set, &node(name, &spec));
        assert_eq!((verdict.should_run, verdict.may_stay), (should_run, may_stay), "{what}");
    }
}

#[test]
fn a_pod_is_for_its_node_alone_and_those_of_lost_nodes_go() {
    let affinity = json!({ "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution":
        { "nodeSelectorTerms": [{ "matchExpressions": [{ "key": "disk", "operator": "Exists" }] }] } } } });
    let set = set(&json!({}), affinity);
    let mut pod = from_template(&set, template_for(&set, "2", "a"));
    assert_eq!(node_of(&pod), "a");
    let labels = json!(pod.metadata.labels);
    assert_eq!(
        labels,
        json!({ "app": "d", "controller-revision-hash": "2", "pod-template-generation": "2" })
    );
    let spec = pod.spec.clone().unwrap();
    assert_eq!(spec.tolerations.unwrap().len(), 6);
    let term = &spec
        .affinity
        .unwrap()
        .node_affinity
        .unwrap()
        .required_during_scheduling_ignored_during_execution
        .unwrap()
        .node_selector_terms[0];
    assert!(term.match_expressions.is_some() && term.match_fields.is_some());
    pod.metadata.name = Some("lost".to_owned());
    let mut seen = observed(&set, "b", "b2+");
    seen.pods.push(Arc::new(pod));
    assert_eq!(steps(&seen), "delete lost");
    // The next replacement of a pod that keeps ending waits.
    let mut seen = observed(&set, "a b", "a2!");
    seen.held.extend(["a".to_owned(), "b".to_owned()]);
    assert_eq!(steps(&seen), "");
}

#[test]
fn the_status_counts_nodes() {
    let set = set(&json!({}), json!({}));
    let mut seen = observed(&set, "a b c", "a2+ b1? d1+");
    seen.nodes.push(node("d", &json!({ "taints": [{ "key": "x", "effect": "NoSchedule" }] })));
    let (status, again) = seen.status(0);
    assert_eq!(
        (
            status.desired_number_scheduled,
            status.current_number_scheduled,
            status.number_ready,
            status.number_misscheduled
        ),
        (3, 2, 1, 1)
    );
    assert_eq!(
        (status.updated_number_scheduled, status.number_available, status.number_unavailable, again),
        (Some(1), Some(1), Some(2), None)
    );
}

#[test]
fn while_a_new_pod_surges_the_old_one_counts_and_the_new_one_is_waited_for() {
    let mut set = set(&rolling(&json!(0), &json!(1)), json!({}));
    set.spec.as_mut().unwrap().min_ready_seconds = Some(30);
    let mut seen = observed(&set, "a", "a1+ a2+");
    for (pod, created) in seen.pods.iter_mut().zip(["2026-01-01T07:00:00Z", "2026-01-01T07:59:00Z"]) {
        let pod = Arc::make_mut(pod);
        pod.metadata.creation_timestamp = Some(Time(created.parse().unwrap()));
    }
    // Both are ready since eight o'clock.
    seen.now = "2026-01-01T08:00:10Z".parse().unwrap();
    let (status, again) = seen.status(0);
    assert_eq!((status.updated_number_scheduled, status.number_available, again), (None, None, Some(20)));
    seen.now = "2026-01-01T08:01:00Z".parse().unwrap();
    let (status, again) = seen.status(0);
    assert_eq!((status.updated_number_scheduled, status.number_available, again), (None, Some(1), None));
    assert_eq!(steps(&seen), "delete a1+");
    // The old one has been available for long, and the new one has not.
    let ready =
        &mut Arc::make_mut(&mut seen.pods[1]).status.as_mut().unwrap().conditions.as_mut().unwrap()[0];
    ready.last_transition_time = Some(Time("2026-01-01T08:00:50Z".parse().unwrap()));
    let (status, again) = seen.status(0);
    assert_eq!((status.number_available, again), (Some(1), Some(20)));
    assert_eq!(steps(&seen), "");
}

#[test]
fn old_revisions_that_pods_are_of_count_towards_the_limit() {
    for (limit, in_use, expected) in
        [(None, 0, 10), (Some(2), 0, 2), (Some(2), 1, 1), (Some(1), 3, 0), (Some(0), 0, 0)]
    {
        assert_eq!(spare_revisions(limit, in_use), expected, "{limit:?} {in_use}");
    }
}
