//! The six modes of topology, and what makes each impossible.

use std::sync::Arc;

use serde_json::json;

use super::*;

const DRIVER: &str = "d.example.com";

fn node(name: &str, zone: &str) -> Arc<Node> {
    Arc::new(
        serde_json::from_value(
            json!({ "metadata": { "name": name, "labels": { "zone": zone, "rack": "r1" } } }),
        )
        .unwrap(),
    )
}

fn csi_node(name: &str, keys: &[&str]) -> Arc<CSINode> {
    let driver = json!({ "name": DRIVER, "nodeID": name, "topologyKeys": keys });
    Arc::new(
        serde_json::from_value(json!({ "metadata": { "name": name }, "spec": { "drivers": [driver] } }))
            .unwrap(),
    )
}

fn allowed(zones: &[&str]) -> Vec<TopologySelectorTerm> {
    let expressions = json!([{ "matchLabelExpressions": [{ "key": "zone", "values": zones }] }]);
    if zones.is_empty() { Vec::new() } else { serde_json::from_value(expressions).unwrap() }
}

/// The zones of requisite and preferred.
type Zones = Result<Option<(Vec<String>, Vec<String>)>, TopologyError>;

fn asked(selected: Option<&str>, strict: bool, zones: &[&str], immediate: bool) -> Zones {
    let nodes = [node("a", "z1"), node("b", "z2"), node("c", "z3"), node("d", "z2")];
    let csi_nodes = ["a", "b", "c", "d"].map(|name| csi_node(name, &["zone"]));
    ask_of(&nodes, &csi_nodes, selected, strict, zones, immediate)
}

fn ask_of(
    nodes: &[Arc<Node>],
    csi_nodes: &[Arc<CSINode>],
    selected: Option<&str>,
    strict: bool,
    zones: &[&str],
    immediate: bool,
) -> Zones {
    let allowed = allowed(zones);
    let inputs = TopologyInputs {
        driver: DRIVER,
        csi_nodes,
        nodes,
        allowed: &allowed,
        selected,
        claim: "data",
        strict,
        immediate,
    };
    let zone = |terms: Vec<Topology>| {
        terms.into_iter().map(|mut term| term.segments.remove("zone").unwrap()).collect()
    };
    requirement(&inputs).map(|found| found.map(|found| (zone(found.requisite), zone(found.preferred))))
}

#[expect(clippy::unnecessary_wraps, reason = "reads well in the rows")]
fn zones(requisite: &[&str], preferred: &[&str]) -> Zones {
    let own = |zones: &[&str]| zones.iter().map(ToString::to_string).collect();
    Ok(Some((own(requisite), own(preferred))))
}

#[test]
fn first_consumer_strict_asks_for_the_nodes_topology_alone() {
    assert_eq!(asked(Some("b"), true, &[], true), zones(&["z2"], &["z2"]));
    assert_eq!(asked(Some("b"), true, &["z1", "z2"], true), zones(&["z2"], &["z2"]));
    let refused = asked(Some("b"), true, &["z1"], true).unwrap_err().to_string();
    assert!(refused.contains("is not in allowed topologies"), "{refused}");
}

#[test]
fn first_consumer_asks_for_all_places_from_the_nodes_on() {
    assert_eq!(asked(Some("b"), false, &[], true), zones(&["z1", "z2", "z3"], &["z2", "z3", "z1"]));
}

#[test]
fn first_consumer_with_allowed_places_asks_for_them_from_the_nodes_on() {
    assert_eq!(asked(Some("c"), false, &["z3", "z1"], true), zones(&["z1", "z3"], &["z3", "z1"]));
    let refused = asked(Some("b"), false, &["z3", "z1"], true).unwrap_err().to_string();
    assert!(refused.contains("is not in requisite"), "{refused}");
}

#[test]
fn immediate_with_allowed_places_asks_for_them_from_one_chosen_by_the_name_on() {
    for immediate in [true, false] {
        let (requisite, mut preferred) = asked(None, false, &["z3", "z1"], immediate).unwrap().unwrap();
        assert_eq!(requisite, ["z1", "z3"]);
        preferred.sort();
        assert_eq!(preferred, requisite);
    }
}

#[test]
fn immediate_asks_for_all_places_or_for_nothing() {
    let (requisite, mut preferred) = asked(None, false, &[], true).unwrap().unwrap();
    assert_eq!(requisite, ["z1", "z2", "z3"]);
    preferred.sort();
    assert_eq!(preferred, requisite);
    assert_eq!(asked(None, false, &[], false), Ok(None));
}

#[test]
fn without_keys_labels_or_nodes_there_is_no_requirement() {
    let (nodes, csi) = ([node("a", "z1")], [csi_node("a", &["zone"])]);
    assert_eq!(
        ask_of(&nodes, &[], Some("a"), false, &[], true),
        Err(TopologyError::NodeGone("a".to_owned()))
    );
    let rows = [
        (ask_of(&[], &csi, Some("a"), false, &[], true), "error getting selected node"),
        (
            ask_of(&nodes, &[csi_node("a", &[])], Some("a"), false, &[], true),
            "no topology key found on CSINode a",
        ),
        (
            ask_of(&nodes, &[csi_node("a", &["none"])], Some("a"), false, &[], true),
            "do not match topology keys",
        ),
        (ask_of(&nodes, &[csi_node("a", &[])], None, false, &[], true), "no available topology found"),
        (ask_of(&nodes, &[], None, false, &[], true), "no available topology found"),
    ];
    for (found, expected) in rows {
        let Err(TopologyError::NotNow(text)) = found else { panic!("{expected}: {found:?}") };
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn allowed_terms_are_flattened_ordered_and_each_there_once() {
    let terms: Vec<TopologySelectorTerm> = serde_json::from_value(json!([
        { "matchLabelExpressions": [{ "key": "zone", "values": ["b", "a"] }, { "key": "rack", "values": ["2", "1"] }] },
        { "matchLabelExpressions": [{ "key": "zone", "values": ["a"] }, { "key": "rack", "values": ["1"] }] },
        { "matchLabelExpressions": [{ "key": "zone", "values": ["c"] }] },
    ]))
    .unwrap();
    let flat: Vec<String> =
        flatten(&terms).iter().map(|term| term.values().cloned().collect::<Vec<_>>().join("/")).collect();
    assert_eq!(flat, ["c", "1/a", "1/b", "2/a", "2/b"]);
}

#[test]
fn claims_of_one_stateful_set_go_round() {
    // FNV-1 of the empty string is its offset basis, of "a" a published value.
    assert_eq!((fnv(""), fnv("a")), (0x811c_9dc5, 0x050c_5d7e));
    assert_eq!(hash_and_offset("data-web-3"), (fnv("web"), 3));
    assert_eq!(hash_and_offset("web-3"), (fnv("web"), 3));
    assert_eq!(hash_and_offset("data-web"), (fnv("data-web"), 0));
    let terms: Vec<Segment> =
        ["1", "2", "3"].iter().map(|zone| Segment::from([("z".into(), (*zone).into())])).collect();
    let firsts: BTreeSet<String> =
        (0..3).map(|number| spread(terms.clone(), &format!("data-web-{number}")).1[0]["z"].clone()).collect();
    assert_eq!(firsts.len(), 3, "three claims, three segments");
}

#[test]
fn a_volume_is_usable_where_its_places_are() {
    let topology = |pairs: &[(&str, &str)]| Topology {
        segments: pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
    };
    let terms = affinity(&[topology(&[("zone", "a"), ("rack", "1")]), topology(&[("zone", "b")])]).unwrap();
    let terms = terms.required.unwrap().node_selector_terms;
    let first = terms[0].match_expressions.as_ref().unwrap();
    assert_eq!((terms.len(), first.len()), (2, 2));
    assert_eq!((first[0].key.as_str(), first[0].operator.as_str()), ("rack", "In"));
    assert_eq!(affinity(&[]), None);
    assert_eq!(affinity(&[topology(&[])]), None);
}
