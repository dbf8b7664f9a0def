//! In which order pods are decided about, which room is kept, and who is tried again.

use berth_kube::Key;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::bind::{Stage, Written};
use super::super::hints::{has_grown, of_node};
use super::super::state::{Decision, State, TakenBack};
use super::super::unfit::Plugin;
use super::plain::{Plain, node, plain_node, pod, with, world};

fn key(name: &str) -> Key {
    Key::new("ns", name)
}

/// A pod of a priority that asks for so much CPU.
fn asks(name: &str, priority: i32, cpu: &str) -> Value {
    let pod = with(pod(&[]), "metadata/name", json!(name));
    let pod = with(pod, "metadata/uid", json!(name));
    let pod = with(pod, "spec/priority", json!(priority));
    with(pod, "spec/containers", json!([{ "name": "c", "resources": { "requests": { "cpu": cpu } } }]))
}

fn nominated(pod: Value, node: &str) -> Value {
    with(pod, "status", json!({ "nominatedNodeName": node }))
}

fn named<'a>(world: &'a Plain, name: &str) -> &'a Pod {
    world.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(name)).expect("it is in the world")
}

/// A world, and a scheduler that has seen it.
fn seen(objects: Vec<Value>) -> (Plain, State) {
    let (world, mut state) = (world(objects), State::default());
    for pod in &world.pods {
        state.pod_changed(&Key::of(pod.as_ref()), None, Some(pod));
    }
    (world, state)
}

/// Decides about pods that are all waiting when one of them asks; gives those that were helped.
fn decide(world: &Plain, state: &mut State, waiting: &[&str], asks: &str) -> Vec<Key> {
    for name in waiting {
        state.undecided.insert(&key(name), named(world, name));
    }
    let mut all = Vec::new();
    while let Some(helped) = state.decide_next(world, &key(asks), Instant::now()) {
        all.extend(helped);
    }
    all
}

/// The node of what was planned for a pod.
fn planned<'a>(state: &'a State, name: &str) -> Option<&'a str> {
    state.reservations.get(&key(name)).map(|known| known.placement.node.as_str())
}

#[test]
fn the_most_important_pod_is_decided_about_first_and_then_the_oldest() {
    let born = |pod: Value, minute: u32| {
        with(pod, "metadata/creationTimestamp", json!(format!("2026-01-01T00:{minute:02}:00Z")))
    };
    let objects = || {
        vec![
            plain_node(),
            born(asks("a-young", 0, "2"), 9),
            born(asks("z-old", 0, "2"), 1),
            born(asks("high", 10, "2"), 20),
        ]
    };
    let (world, mut state) = seen(objects());
    let all = ["a-young", "z-old", "high"];
    decide(&world, &mut state, &all, "a-young");
    assert_eq!(all.map(|name| planned(&state, name)), [None, Some("a"), Some("a")]);
    // The others need not be decided about for one that is more important.
    let (world, mut state) = seen(objects());
    decide(&world, &mut state, &all, "high");
    assert_eq!(all.map(|name| planned(&state, name)), [None, None, Some("a")]);
    // What was decided is there for the pod's own worker, which does not decide again.
    let (world, mut state) = seen(objects());
    decide(&world, &mut state, &all, "a-young");
    assert!(matches!(state.decided(&key("high"), named(&world, "high")), Some(Decision::Plan(_))));
    assert!(matches!(state.decided(&key("a-young"), named(&world, "a-young")), Some(Decision::Unfit(_))));
    assert!(state.decided(&key("a-young"), named(&world, "a-young")).is_none(), "it is said once");
}

#[test]
fn nothing_new_is_decided_about_a_pod_whose_plan_is_being_carried_out() {
    let (world, mut state) = seen(vec![plain_node(), asks("high", 10, "3"), asks("low", 0, "1")]);
    decide(&world, &mut state, &["high"], "high");
    assert!(state.decided(&key("high"), named(&world, "high")).is_some());
    // It is taken back, and the pod comes again; but its worker is still writing.
    assert_eq!(state.take_back(&key("high"), "a"), TakenBack::Plan);
    assert!(
        !state.note_written(&key("high"), Written::Everything) && !state.enter(&key("high"), Stage::Binding)
    );
    decide(&world, &mut state, &["high", "low"], "low");
    assert_eq!((planned(&state, "high"), planned(&state, "low")), (None, Some("a")));
    state.end_of_work(&key("high"));
    decide(&world, &mut state, &["low"], "high");
    assert_eq!(planned(&state, "high"), Some("a"));
}

#[test]
fn a_plan_is_taken_back_only_before_its_pod_is_being_bound() {
    let (world, mut state) = seen(vec![plain_node(), asks("p", 0, "1")]);
    let p = key("p");
    assert_eq!(state.take_back(&p, "a"), TakenBack::Nothing, "nothing is planned");
    decide(&world, &mut state, &["p"], "p");
    assert_eq!(state.take_back(&p, "b"), TakenBack::Nothing, "it goes to another node");
    for stage in [Stage::Binding, Stage::Bound] {
        assert!(state.enter(&p, stage));
        assert_eq!(state.take_back(&p, "a"), TakenBack::TooLate, "{stage:?}");
    }
    assert!(state.enter(&p, Stage::Volumes), "the binding failed");
    assert_eq!(state.take_back(&p, "a"), TakenBack::Plan);
    assert!(state.board.load("a").is_none_or(|load| load.pods.is_empty()));
}

#[test]
fn room_is_not_kept_for_a_pod_that_is_being_deleted_without_a_node() {
    let high = nominated(asks("high", 10, "3"), "a");
    let (world, mut state) = seen(vec![plain_node(), high.clone(), asks("low", 0, "2")]);
    decide(&world, &mut state, &["low"], "low");
    assert_eq!(planned(&state, "low"), None, "the room is kept");
    let mut high: Value = high;
    high.as_object_mut().unwrap().remove("kind");
    let going = with(high, "metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"));
    let going: Pod = serde_json::from_value(going).unwrap();
    let helped = state.pod_changed(&key("high"), Some(named(&world, "high")), Some(&going));
    assert!(helped.contains(&key("low")), "{helped:?}");
    decide(&world, &mut state, &["low"], "low");
    assert_eq!(planned(&state, "low"), Some("a"));
}

#[test]
fn room_that_a_pod_gives_up_is_offered_to_those_that_wait() {
    // Its claim is gone, so that it needs no room.
    let hopeless = with(
        nominated(asks("high", 10, "3"), "a"),
        "spec/volumes",
        json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "gone" } }]),
    );
    let (world, mut state) = seen(vec![plain_node(), hopeless, asks("low", 0, "2")]);
    decide(&world, &mut state, &["low"], "low");
    assert_eq!(decide(&world, &mut state, &["high"], "high"), [key("low")]);
    // It fits on another node than that where room was made for it.
    let cordoned = with(node("a", &json!({})), "spec", json!({ "unschedulable": true }));
    let (mut world, mut state) =
        seen(vec![plain_node(), nominated(asks("high", 10, "3"), "a"), asks("low", 0, "2")]);
    decide(&world, &mut state, &["low"], "low");
    world.nodes = super::plain::world(vec![cordoned, node("b", &json!({}))]).nodes;
    assert_eq!(decide(&world, &mut state, &["high"], "high"), [key("low")]);
    assert_eq!(planned(&state, "high"), Some("b"));
}

#[test]
fn room_that_a_more_important_pod_took_is_not_kept_again_for_the_other() {
    let there = with(asks("x", 1, "3"), "spec/nodeName", json!("a"));
    let (world, mut state) =
        seen(vec![plain_node(), there, nominated(asks("first", 10, "3"), "a"), asks("more", 20, "3")]);
    assert_eq!(decide(&world, &mut state, &["more"], "more"), [key("first")], "it looks for another node");
    assert_eq!(state.board.nomination(&key("first")), None);
    // Somebody changes a label before the status says so.
    let mut labelled = named(&world, "first").clone();
    labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    state.pod_changed(&key("first"), Some(named(&world, "first")), Some(&labelled));
    assert_eq!(state.board.nomination(&key("first")), None);
    assert_eq!(state.board.nomination(&key("more")), Some("a"));
}

#[test]
fn pods_that_wait_hear_of_what_helps_them() {
    let spread = json!([{ "maxSkew": 1, "topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": { "matchLabels": { "app": "x" } } }]);
    let pod = |name: &str| with(asks(name, 0, "1"), "metadata/labels", json!({ "app": "x" }));
    let there = with(pod("there"), "spec/nodeName", json!("a"));
    let nodes = [node("a", &json!({ "host": "a" })), node("b", &json!({ "host": "b" }))];
    let full = with(nodes[1].clone(), "spec", json!({ "unschedulable": true }));
    let waits = with(pod("waits"), "spec/topologySpreadConstraints", spread);
    let (world, mut state) = seen(vec![nodes[0].clone(), full, there, waits]);
    decide(&world, &mut state, &["waits"], "waits");
    assert_eq!(planned(&state, "waits"), None);
    // A pod that is being deleted does not count any more.
    let before = named(&world, "there").clone();
    let mut going = before.clone();
    going.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-01-01T00:00:00Z")).expect("it is a time");
    let helped = state.pod_changed(&key("there"), Some(&before), Some(&going));
    assert!(helped.contains(&key("waits")), "{helped:?}");
    // Nor does a domain of which no node is left.
    let gone: Node = Node::default();
    assert!(of_node(Some(&gone), None).contains(&Plugin::PodTopologySpread));
}

#[test]
fn a_pod_on_a_node_that_asks_for_less_than_before_makes_room() {
    let there = with(asks("there", 0, "3"), "spec/nodeName", json!("a"));
    let (world, mut state) = seen(vec![plain_node(), there.clone(), asks("waits", 0, "2")]);
    decide(&world, &mut state, &["waits"], "waits");
    let before = named(&world, "there").clone();
    let smaller = with(there, "spec/containers/0/resources/requests/cpu", json!("1"));
    let smaller = super::plain::world(vec![smaller]).pods.remove(0);
    let helped = state.pod_changed(&key("there"), Some(&before), Some(&smaller));
    assert!(helped.contains(&key("waits")), "{helped:?}");
    decide(&world, &mut state, &["waits"], "waits");
    assert_eq!(planned(&state, "waits"), Some("a"));
}

#[test]
fn a_capacity_grows_in_all_or_for_one_volume() {
    let capacity = |size: &str, largest: Value| -> CSIStorageCapacity {
        let capacity = json!({ "metadata": {}, "storageClassName": "c", "capacity": size, "maximumVolumeSize": largest });
        serde_json::from_value(capacity).unwrap()
    };
    for (before, after, grown) in [
        (None, Some(capacity("1Gi", Value::Null)), true),
        (Some(capacity("1Gi", Value::Null)), Some(capacity("2Gi", Value::Null)), true),
        (Some(capacity("1Gi", json!("1Gi"))), Some(capacity("2Gi", json!("1Gi"))), true),
        (Some(capacity("2Gi", json!("1Gi"))), Some(capacity("2Gi", json!("2Gi"))), true),
        (Some(capacity("2Gi", json!("1Gi"))), Some(capacity("1Gi", json!("1Gi"))), false),
        (Some(capacity("2Gi", Value::Null)), None, false),
    ] {
        assert_eq!(has_grown(before.as_ref(), after.as_ref()), grown, "{before:?} {after:?}");
    }
}
