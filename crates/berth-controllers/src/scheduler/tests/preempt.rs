//! Who makes room for whom, after `default_preemption_test.go` and `preemption_test.go` of kube-scheduler.

use berth_kube::Key;
use serde_json::{Value, json};

use super::super::board::Board;
use super::super::decide::decide;
use super::super::unfit::{Preemption, Unfit};
use super::plain::{bound, claim, node, plain_node, pod, volume, with, world};
use super::{HOPELESS, NO_VICTIMS};

/// A pod of a priority that asks for so much CPU.
fn asks(name: &str, priority: i32, cpu: &str) -> Value {
    let pod = with(pod(&[]), "metadata/name", json!(name));
    let pod = with(pod, "metadata/uid", json!(name));
    let pod = with(pod, "metadata/labels", json!({ "app": name }));
    let pod = with(pod, "spec/priority", json!(priority));
    with(pod, "spec/containers", json!([{ "name": "c", "resources": { "requests": { "cpu": cpu } } }]))
}

/// The same on a node, which it started on at that minute.
fn runs(name: &str, on: &str, priority: i32, cpu: &str, minute: u32) -> Value {
    let pod = with(asks(name, priority, cpu), "spec/nodeName", json!(on));
    with(pod, "status", json!({ "startTime": format!("2026-01-01T00:{minute:02}:00Z") }))
}

fn nodes(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| node(name, &json!({ "host": name, "zone": "1" }))).collect()
}

fn budget(name: &str, allowed: i32) -> Value {
    json!({ "kind": "Budget", "metadata": { "name": name, "namespace": "ns" },
        "spec": { "selector": { "matchLabels": { "app": name } } },
        "status": { "disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1 } })
}

/// What is decided about the last pod; the board is as it was.
fn decided(objects: Vec<Value>) -> Result<String, Unfit> {
    let world = world(objects.into_iter().map(kinded).collect());
    let mut board = Board::default();
    for pod in &world.pods {
        board.observe(&Key::of(pod.as_ref()), None, Some(pod));
    }
    let before = format!("{:?}", sorted(&board));
    let decided = decide(&world, &mut board, world.pods.last().unwrap());
    assert_eq!(format!("{:?}", sorted(&board)), before, "the board is as it was");
    decided.map(|placement| placement.node)
}

/// Pods are written without a kind above.
fn kinded(mut object: Value) -> Value {
    if object["kind"].is_null() {
        object["kind"] = json!("Pod");
    }
    object
}

fn sorted(board: &Board) -> Vec<(String, String)> {
    let mut placed: Vec<_> = board.placed().map(|(key, node)| (key.to_string(), node.to_owned())).collect();
    placed.sort();
    placed
}

/// The node and the victims that were chosen.
fn victims(objects: Vec<Value>) -> Option<(String, Vec<String>)> {
    match decided(objects).unwrap_err().preemption {
        Preemption::Victims { node, pods, .. } => {
            Some((node, pods.into_iter().map(|pod| pod.name.clone()).collect()))
        }
        Preemption::NotEligible | Preemption::InVain => None,
    }
}

fn chosen(node: &str, pods: &[&str]) -> (String, Vec<String>) {
    (node.to_owned(), pods.iter().map(|pod| (*pod).to_owned()).collect())
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn as_few_and_as_unimportant_pods_as_possible_leave_one_node() {
    for (what, there, pod, expected) in [
        ("nobody is less important", vec![runs("x", "a", 5, "4", 0)], asks("p", 5, "1"), None),
        ("one is", vec![runs("x", "a", 5, "4", 0)], asks("p", 10, "1"), Some(chosen("a", &["x"]))),
        (
            "removing all of them would not do",
            vec![runs("x", "a", 5, "2", 0), runs("y", "a", 50, "2", 0)],
            asks("p", 10, "3"),
            None,
        ),
        (
            "the more important one is spared",
            vec![runs("x", "a", 5, "2", 0), runs("y", "a", 1, "2", 0)],
            asks("p", 10, "2"),
            Some(chosen("a", &["y"])),
        ),
        (
            "the one that runs longer is spared",
            vec![runs("x", "a", 5, "2", 0), runs("y", "a", 5, "2", 7)],
            asks("p", 10, "2"),
            Some(chosen("a", &["y"])),
        ),
        (
            "both if need be, the most important one first",
            vec![runs("x", "a", 1, "2", 0), runs("y", "a", 5, "2", 0)],
            asks("p", 10, "4"),
            Some(chosen("a", &["y", "x"])),
        ),
        (
            "the node whose most important victim is the least important",
            vec![runs("x", "a", 5, "4", 0), runs("y", "b", 3, "2", 0), runs("z", "b", 3, "2", 0)],
            asks("p", 10, "4"),
            Some(chosen("b", &["y", "z"])),
        ),
        (
            "then the smallest sum of priorities",
            vec![
                runs("x", "a", 5, "2", 0),
                runs("w", "a", 4, "2", 0),
                runs("y", "b", 5, "2", 0),
                runs("z", "b", 3, "2", 0),
            ],
            asks("p", 10, "4"),
            Some(chosen("b", &["y", "z"])),
        ),
        (
            "few pods of a negative priority rather than many",
            vec![runs("x", "a", -1, "2", 0), runs("w", "a", -1, "2", 0), runs("y", "b", -1, "4", 0)],
            asks("p", 10, "4"),
            Some(chosen("b", &["y"])),
        ),
        (
            "then the pods that started last",
            vec![runs("x", "a", 5, "4", 3), runs("y", "b", 5, "4", 9)],
            asks("p", 10, "4"),
            Some(chosen("b", &["y"])),
        ),
        (
            "then the first node",
            vec![runs("x", "a", 5, "4", 3), runs("y", "b", 5, "4", 3)],
            asks("p", 10, "4"),
            Some(chosen("a", &["x"])),
        ),
        (
            "a budget is rather kept than a priority",
            vec![runs("x", "a", 1, "4", 0), runs("y", "b", 5, "4", 0), budget("x", 0)],
            asks("p", 10, "4"),
            Some(chosen("b", &["y"])),
        ),
        (
            "a pod that a budget protects is spared before a more important one",
            vec![runs("x", "a", 1, "2", 0), runs("y", "a", 5, "2", 0), budget("x", 0)],
            asks("p", 10, "2"),
            Some(chosen("a", &["y"])),
        ),
        (
            "a budget that allows one is no obstacle",
            vec![runs("x", "a", 1, "4", 0), runs("y", "b", 5, "4", 0), budget("x", 1)],
            asks("p", 10, "4"),
            Some(chosen("a", &["x"])),
        ),
        (
            "a budget is broken if nothing else helps",
            vec![runs("x", "a", 1, "4", 0), runs("y", "b", 50, "4", 0), budget("x", 0)],
            asks("p", 10, "4"),
            Some(chosen("a", &["x"])),
        ),
    ] {
        let mut objects = nodes(&["a", "b"]);
        // With one node's worth of pods the other is full of pods that nobody preempts.
        if !there.iter().any(|pod| pod["spec"]["nodeName"] == "b") {
            objects.push(runs("fixed", "b", 1000, "4", 0));
        }
        objects.extend(there);
        objects.push(pod);
        assert_eq!(victims(objects), expected, "{what}");
    }
}

#[test]
fn pods_make_room_of_every_kind() {
    let port = |pod: Value| {
        with(
            pod,
            "spec/containers",
            json!([{ "name": "c", "ports": [{ "containerPort": 80, "hostPort": 80 }] }]),
        )
    };
    let far = json!({ "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [
        { "labelSelector": { "matchLabels": { "app": "x" } }, "topologyKey": "host" }] } });
    let limit = json!({ "kind": "CSINode", "metadata": { "name": "a" },
        "spec": { "drivers": [{ "name": "d", "nodeID": "a", "allocatable": { "count": 1 } }] } });
    let uses = |pod: Value, claim: &str| {
        let volumes = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": claim } }]);
        with(pod, "spec/volumes", volumes)
    };
    let exclusive = with(bound("c", "v"), "spec/accessModes", json!(["ReadWriteOncePod"]));
    let crowded = with(plain_node(), "status/allocatable", json!({ "cpu": "4", "pods": "1" }));
    for (what, objects) in [
        ("a place among the pods", vec![crowded, runs("x", "a", 1, "1", 0), asks("p", 10, "1")]),
        ("a port", vec![plain_node(), port(runs("x", "a", 1, "1", 0)), port(asks("p", 10, "1"))]),
        (
            "distance",
            vec![
                node("a", &json!({ "host": "a" })),
                runs("x", "a", 1, "1", 0),
                with(asks("p", 10, "1"), "spec/affinity", far.clone()),
            ],
        ),
        (
            "distance that the other wants",
            vec![
                node("a", &json!({ "host": "a" })),
                with(runs("y", "a", 1, "1", 0), "spec/affinity", far),
                asks("x", 10, "1"),
            ],
        ),
        (
            "a volume more",
            vec![
                plain_node(),
                limit,
                bound("c", "v"),
                volume("v", "", "1Gi"),
                bound("e", "w"),
                volume("w", "", "1Gi"),
                uses(runs("x", "a", 1, "1", 0), "c"),
                uses(asks("p", 10, "1"), "e"),
            ],
        ),
        (
            "a claim for one pod only",
            vec![
                plain_node(),
                exclusive,
                volume("v", "", "1Gi"),
                uses(runs("x", "a", 1, "1", 0), "c"),
                uses(asks("p", 10, "1"), "c"),
            ],
        ),
    ] {
        let found = victims(objects);
        assert_eq!(found.map(|(node, pods)| (node, pods.len())), Some(("a".to_owned(), 1)), "{what}");
    }
}

#[test]
fn what_pods_cannot_help_is_said() {
    let message = |objects: Vec<Value>| decided(objects).unwrap_err().message;
    let full = "0/1 nodes are available: 1 Insufficient cpu.";
    let never = with(asks("p", 10, "1"), "spec/preemptionPolicy", json!("Never"));
    let small = || runs("s", "a", 1, "1", 0);
    for (what, objects, expected) in [
        (
            "nobody is less important",
            vec![plain_node(), runs("x", "a", 5, "4", 0), asks("p", 5, "1")],
            format!(
                "{full} no new claims to deallocate, preemption: 0/1 nodes are available: 1 {NO_VICTIMS}."
            ),
        ),
        (
            "the others stay",
            vec![plain_node(), runs("x", "a", 50, "3", 0), small(), asks("p", 10, "2")],
            format!(
                "{full} no new claims to deallocate, preemption: 0/1 nodes are available: 1 Insufficient cpu."
            ),
        ),
        (
            "more than the node has",
            vec![plain_node(), small(), asks("p", 10, "5")],
            format!("{full} no new claims to deallocate, preemption: 0/1 nodes are available: 1 {HOPELESS}."),
        ),
        (
            "a claim that is not there",
            vec![
                plain_node(),
                small(),
                with(
                    asks("p", 10, "1"),
                    "spec/volumes",
                    json!([
                { "name": "v", "persistentVolumeClaim": { "claimName": "c" } }]),
                ),
            ],
            format!(
                "0/1 nodes are available: persistentvolumeclaim \"c\" not found. no new claims to deallocate, preemption: 0/1 nodes are available: 1 {HOPELESS}."
            ),
        ),
        (
            "it may not preempt",
            vec![plain_node(), runs("x", "a", 1, "4", 0), never],
            format!(
                "{full} no new claims to deallocate, preemption: not eligible due to preemptionPolicy=Never."
            ),
        ),
        ("it preempts", vec![plain_node(), runs("x", "a", 1, "4", 0), asks("p", 10, "1")], full.to_owned()),
    ] {
        assert_eq!(message(objects), expected, "{what}");
    }
    let unbound = decided(
        vec![plain_node(), claim("c", "")]
            .into_iter()
            .chain([with(
                asks("p", 10, "1"),
                "spec/volumes",
                json!([
            { "name": "v", "persistentVolumeClaim": { "claimName": "c" } }]),
            )])
            .collect(),
    );
    assert_eq!(unbound.unwrap_err().preemption, Preemption::InVain);
}

#[test]
fn nobody_else_is_preempted_while_pods_still_leave() {
    let leaving = |reason: &str| {
        let pod =
            with(runs("x", "a", 1, "4", 0), "metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"));
        with(
            pod,
            "status/conditions",
            json!([{ "type": "DisruptionTarget", "status": "True", "reason": reason }]),
        )
    };
    let nominated = || with(asks("p", 10, "4"), "status", json!({ "nominatedNodeName": "a" }));
    let objects = |there: Value, pod: Value| {
        nodes(&["a", "b"]).into_iter().chain([there, runs("y", "b", 1, "4", 0), pod]).collect()
    };
    let waits = decided(objects(leaving("PreemptionByScheduler"), nominated())).unwrap_err();
    assert_eq!(waits.preemption, Preemption::NotEligible);
    assert_eq!(
        waits.message,
        "0/2 nodes are available: 2 Insufficient cpu. no new claims to deallocate, preemption: not eligible due to a terminating pod on the nominated node."
    );
    // Somebody else deletes the pod, or the pod was not nominated: it preempts.
    assert!(victims(objects(leaving("EvictionByEvictionAPI"), nominated())).is_some());
    assert!(victims(objects(leaving("PreemptionByScheduler"), asks("p", 10, "4"))).is_some());
    // The nominated node cannot take it any more, whoever leaves.
    let mut cordoned: Vec<Value> = objects(leaving("PreemptionByScheduler"), nominated());
    cordoned[0]["spec"] = json!({ "unschedulable": true });
    assert_eq!(victims(cordoned), Some(chosen("b", &["y"])));
}

#[test]
fn room_that_pods_made_is_kept_for_whom_they_made_it() {
    let nominated = |name: &str, priority: i32| {
        with(asks(name, priority, "3"), "status", json!({ "nominatedNodeName": "a" }))
    };
    let on = |pod: Value| decided(vec![plain_node(), nominated("first", 10), pod]);
    let message = on(asks("less", 5, "2")).unwrap_err().message;
    assert!(message.starts_with("0/1 nodes are available: 1 Insufficient cpu."), "{message}");
    assert!(on(asks("equal", 10, "2")).is_err(), "it came first");
    assert_eq!(on(asks("more", 11, "2")).unwrap(), "a");
    assert_eq!(on(asks("small", 5, "1")).unwrap(), "a", "there is room for both");
    // One that is more important takes the place of both, and nothing is kept for the other.
    let decided =
        decided(vec![plain_node(), nominated("first", 10), runs("x", "a", 1, "3", 0), asks("more", 20, "3")]);
    let Preemption::Victims { withdrawn, .. } = decided.unwrap_err().preemption else {
        panic!("it preempts")
    };
    assert_eq!(withdrawn, [Key::new("ns", "first")]);
    // The pod itself goes where room was made for it, though the other node is emptier.
    let world = nodes(&["b", "a"]).into_iter().chain([
        runs("x", "a", 1, "1", 0),
        with(asks("p", 10, "3"), "status", json!({ "nominatedNodeName": "a" })),
    ]);
    assert_eq!(super::preempt::decided(world.collect()).unwrap(), "a");
}
