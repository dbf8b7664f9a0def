//! The listings of a small cluster.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::state::{Objects, PATIENCE, Usage};

fn objects<K: DeserializeOwned + kube::ResourceExt>(all: &[Value]) -> Objects<K> {
    all.iter().map(|object| std::sync::Arc::new(serde_json::from_value(object.clone()).unwrap())).collect()
}

fn claim(name: &str, class: &str, phase: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"storageClassName": class, "volumeName": if phase == "Bound" { format!("pv-{name}") } else { String::new() },
            "resources": {"requests": {"storage": "1Gi"}}},
        "status": {"phase": phase}})
}

fn volume(name: &str) -> Value {
    json!({"metadata": {"name": format!("pv-{name}")},
        "spec": {"capacity": {"storage": "2Gi"}, "claimRef": {"namespace": "shop", "name": name}, "storageClassName": "fast",
            "csi": {"driver": "a.csi", "volumeHandle": name}}, "status": {"phase": "Bound"}})
}

/// A healthy and a full volume, and a claim whose class is missing, on one node.
pub(in crate::top) fn cluster() -> ClusterState {
    let pod = |name: &str| {
        json!({"metadata": {"name": format!("pod-{name}"), "namespace": "shop"},
            "spec": {"nodeName": "n1", "containers": [], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]},
            "status": {"phase": "Running"}})
    };
    let gib = |part: u64| Usage { used: part << 20, capacity: 1 << 30, inodes_used: 1, inodes: 10 };
    let key = |name: &str| berth_kube::Key::new("shop", name);
    ClusterState {
        classes: objects(&[json!({"metadata": {"name": "fast"}, "provisioner": "a.csi"})]),
        claims: objects(&[
            claim("calm", "fast", "Bound"),
            claim("full", "fast", "Bound"),
            claim("stuck", "gone\u{1b}[2J", "Pending"),
        ]),
        volumes: objects(&[volume("calm"), volume("full")]),
        pods: objects(&[pod("calm"), pod("full")]),
        nodes: objects(&[
            json!({"metadata": {"name": "n1"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
        ]),
        csi_nodes: objects(&[
            json!({"metadata": {"name": "n1"}, "spec": {"drivers": [{"name": "a.csi", "nodeID": "n1", "allocatable": {"count": 9}}]}}),
        ]),
        drivers: objects(&[json!({"metadata": {"name": "a.csi"}, "spec": {"attachRequired": false}})]),
        usage: [(key("calm"), gib(256)), (key("full"), gib(1010))].into(),
        now: "2026-01-01T01:00:00Z".parse().unwrap(),
        patience: PATIENCE,
        ..ClusterState::default()
    }
}

fn figures() -> Figures {
    Figures::of(&cluster(), &CallCounts::follow(None))
}

fn names(figures: &Figures, arrangement: &Arrangement) -> Vec<String> {
    let lines = figures.listing(arrangement.view).arranged(arrangement);
    lines.iter().map(|line| line.cells[1].text.clone()).collect()
}

#[test]
fn the_worst_stands_first_and_every_column_sorts() {
    let figures = figures();
    let by = |sort: &str, reverse: bool| {
        names(&figures, &Arrangement { sort: sort.to_owned(), reverse, ..Arrangement::default() })
    };
    assert_eq!(by("", false), ["shop/stuck", "shop/full", "shop/calm"]);
    assert_eq!(by("", true), ["shop/calm", "shop/full", "shop/stuck"]);
    assert_eq!(by("claim", false), ["shop/calm", "shop/full", "shop/stuck"]);
    assert_eq!(by("used", false), ["shop/full", "shop/calm", "shop/stuck"]);
    // What is equal stays in the order of the names.
    assert_eq!(by("age", false), ["shop/calm", "shop/full", "shop/stuck"]);
    assert_eq!(by("no-such-column", false), by("", false));
}

#[test]
fn a_filter_wants_all_its_words_and_attention_only_what_needs_it() {
    let figures = figures();
    let filtered = |filter: &str, stuck: bool| {
        names(&figures, &Arrangement { filter: filter.to_owned(), stuck, ..Arrangement::default() })
    };
    assert_eq!(filtered("FAST n1", false), ["shop/full", "shop/calm"]);
    assert_eq!(filtered("fast stuck", false), Vec::<String>::new());
    assert_eq!(filtered("", true), ["shop/stuck", "shop/full"]);
}

#[test]
fn the_plain_text_has_the_summary_and_a_line_for_each() {
    let view = |view: View| text(&figures(), &Arrangement { view, ..Arrangement::default() });
    let volumes = view(View::Volumes);
    let lines: Vec<&str> = volumes.lines().collect();
    assert_eq!(
        lines[0],
        "2 things need attention; 3 claims, 2 bound; 1.2 GiB used of 2 GiB; 1 of 1 node ready; calls not seen here"
    );
    assert!(lines[1].starts_with("STATE          CLAIM       POD"), "{volumes}");
    assert!(lines[2].starts_with("No such class  shop/stuck  –"), "{volumes}");
    assert!(lines[3].starts_with("98 % full      shop/full   pod-full  n1"), "{volumes}");
    assert!(lines[4].contains("25 %") && lines[4].contains("Healthy"), "{volumes}");
    assert_eq!(lines.len(), 5);
    assert!(!volumes.contains('\u{1b}'), "a name must not change the terminal: {volumes:?}");
    let attention = view(View::Attention);
    assert!(attention.contains("names the class gone"), "{attention}");
    assert!(view(View::Nodes).contains("a.csi (2 of 9)"), "{}", view(View::Nodes));
    let drivers = view(View::Drivers);
    assert!(drivers.contains("Registered  a.csi   1 of 1        2"), "{drivers}");
}

#[test]
fn what_may_not_be_read_is_named() {
    let mut state = cluster();
    state.nodes = Objects::unknown();
    state.unreadable.push(Unreadable { kind: "Node".to_owned(), why: "forbidden".to_owned() });
    let figures = Figures::of(&state, &CallCounts::follow(None));
    let text = text(&figures, &Arrangement::default());
    assert!(text.contains("not read: Node: forbidden") && !text.contains("ready"), "{text}");
}

#[test]
fn columns_go_until_the_others_fit() {
    let figures = figures();
    let listing = figures.listing(View::Volumes);
    let lines = listing.arranged(&Arrangement::default());
    let names = |room: usize| {
        let widths = listing.widths(&lines, room);
        assert!(widths.iter().map(|(_, width)| width + 2).sum::<usize>() <= room + 2, "{widths:?}");
        widths.iter().map(|(at, _)| listing.columns[*at].name).collect::<Vec<_>>()
    };
    assert_eq!(names(200).len(), VOLUMES.len());
    assert!(names(80).contains(&"SIZE") && !names(80).contains(&"INODES"), "{:?}", names(80));
    assert_eq!(names(42), ["STATE", "CLAIM", "USED"]);
}
