//! What pods ask of the pods beside them, after `interpodaffinity/filtering_test.go` and `podtopologyspread/filtering_test.go`
//! of kube-scheduler.

use serde_json::{Value, json};

use super::plain::{node, pod, with};
use super::{HOPELESS, NO_VICTIMS, outcome};

const NEAR: &str = "node(s) didn't match pod affinity rules";
const FAR: &str = "node(s) didn't match pod anti-affinity rules";
const SHUNNED: &str = "node(s) didn't satisfy existing pods anti-affinity rules";
const SPREAD: &str = "node(s) didn't match pod topology spread constraints";

/// Nodes a and b in zone 1, c in zone 2.
fn nodes() -> Vec<Value> {
    [("a", "1"), ("b", "1"), ("c", "2")]
        .map(|(name, zone)| node(name, &json!({ "zone": zone, "host": name })))
        .into()
}

/// A pod that runs on a node, with a label `app`.
fn running(name: &str, on: &str, app: &str) -> Value {
    let pod = with(pod(&[]), "metadata/name", json!(name));
    let pod = with(pod, "metadata/labels", json!({ "app": app }));
    with(pod, "spec/nodeName", json!(on))
}

fn new(app: &str, spec: &str, value: Value) -> Value {
    with(with(pod(&[]), "metadata/labels", json!({ "app": app })), spec, value)
}

fn term(app: &str, label: &str) -> Value {
    json!({ "labelSelector": { "matchLabels": { "app": app } }, "topologyKey": label })
}

fn affinity(kind: &str, term: &Value) -> Value {
    json!({ kind: { "requiredDuringSchedulingIgnoredDuringExecution": [term] } })
}

fn spread(label: &str, skew: i32, when: &str) -> Value {
    json!([{ "maxSkew": skew, "topologyKey": label, "whenUnsatisfiable": when,
        "labelSelector": { "matchLabels": { "app": "web" } } }])
}

fn nowhere(reasons: &str, preemption: &str) -> Result<&'static str, String> {
    Err(format!(
        "0/3 nodes are available: 3 {reasons}. no new claims to deallocate, preemption: 0/3 nodes are available: 3 {preemption}."
    ))
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn pods_go_near_and_far_as_they_ask() {
    let web = || running("w", "c", "web");
    let shy =
        || with(running("s", "a", "shy"), "spec/affinity", affinity("podAntiAffinity", &term("web", "zone")));
    let elsewhere = |namespace: &str| with(web(), "metadata/namespace", json!(namespace));
    let in_all = || with(term("web", "host"), "namespaceSelector", json!({}));
    let labelled =
        || with(term("web", "host"), "namespaceSelector", json!({ "matchLabels": { "team": "x" } }));
    let team = || json!({ "kind": "Namespace", "metadata": { "name": "other", "labels": { "team": "x" } } });
    for (what, pod, there, expected) in [
        (
            "near one",
            new("db", "spec/affinity", affinity("podAffinity", &term("web", "host"))),
            vec![web()],
            Ok("c"),
        ),
        (
            "nobody to be near to",
            new("db", "spec/affinity", affinity("podAffinity", &term("web", "host"))),
            vec![],
            nowhere(NEAR, HOPELESS),
        ),
        (
            "the first of those that want to be together",
            new("web", "spec/affinity", affinity("podAffinity", &term("web", "host"))),
            vec![],
            Ok("a"),
        ),
        (
            "no such label",
            new("web", "spec/affinity", affinity("podAffinity", &term("web", "rack"))),
            vec![],
            nowhere(NEAR, HOPELESS),
        ),
        (
            "far from one",
            new("db", "spec/affinity", affinity("podAntiAffinity", &term("web", "zone"))),
            vec![running("w", "a", "web")],
            Ok("c"),
        ),
        (
            "far from those everywhere",
            new("db", "spec/affinity", affinity("podAntiAffinity", &term("web", "zone"))),
            vec![running("w", "a", "web"), running("x", "c", "web")],
            nowhere(FAR, NO_VICTIMS),
        ),
        (
            "of another namespace",
            new("db", "spec/affinity", affinity("podAffinity", &term("web", "host"))),
            vec![elsewhere("other")],
            nowhere(NEAR, HOPELESS),
        ),
        (
            "of every namespace",
            new("db", "spec/affinity", affinity("podAffinity", &in_all())),
            vec![elsewhere("other")],
            Ok("c"),
        ),
        (
            "of namespaces with a label",
            new("db", "spec/affinity", affinity("podAffinity", &labelled())),
            vec![elsewhere("other"), team()],
            Ok("c"),
        ),
        (
            "of namespaces without it",
            new("db", "spec/affinity", affinity("podAffinity", &labelled())),
            vec![elsewhere("other")],
            nowhere(NEAR, HOPELESS),
        ),
        ("shunned by one that runs", new("web", "spec/priority", json!(0)), vec![shy()], Ok("c")),
        (
            "shunned everywhere",
            new("web", "spec/priority", json!(0)),
            vec![shy(), with(with(shy(), "metadata/name", json!("t")), "spec/nodeName", json!("c"))],
            nowhere(SHUNNED, NO_VICTIMS),
        ),
    ] {
        let objects = nodes().into_iter().chain(there).collect();
        let found = outcome(pod, objects);
        assert_eq!(
            found.as_ref().map(|placement| placement.node.as_str()).map_err(Clone::clone),
            expected,
            "{what}"
        );
    }
}

#[test]
fn pods_are_spread_over_domains() {
    let hard = |label: &str, skew: i32| {
        new("web", "spec/topologySpreadConstraints", spread(label, skew, "DoNotSchedule"))
    };
    let soft = new("web", "spec/topologySpreadConstraints", spread("zone", 1, "ScheduleAnyway"));
    let at = |nodes: &[&str]| -> Vec<Value> {
        nodes.iter().enumerate().map(|(number, node)| running(&format!("w{number}"), node, "web")).collect()
    };
    let mut few = hard("zone", 1);
    few["spec"]["topologySpreadConstraints"][0]["minDomains"] = json!(3);
    for (what, pod, there, expected) in [
        ("nothing there", hard("zone", 1), at(&[]), Ok("a")),
        ("to the emptier zone", hard("zone", 1), at(&["a"]), Ok("c")),
        ("to the emptier host", hard("host", 1), at(&["a", "c"]), Ok("b")),
        ("a larger skew", hard("zone", 2), at(&["a"]), Ok("b")),
        (
            "of another label",
            hard("zone", 1),
            vec![running("d", "a", "db"), running("e", "b", "db")],
            Ok("c"),
        ),
        ("fewer domains than asked for", few, at(&["a", "c"]), nowhere(SPREAD, NO_VICTIMS)),
        (
            "no such label",
            hard("rack", 1),
            at(&[]),
            nowhere(&format!("{SPREAD} (missing required label)"), HOPELESS),
        ),
        ("only preferred", soft, at(&["a", "a"]), Ok("c")),
    ] {
        let objects = nodes().into_iter().chain(there).collect();
        let found = outcome(pod, objects);
        assert_eq!(
            found.as_ref().map(|placement| placement.node.as_str()).map_err(Clone::clone),
            expected,
            "{what}"
        );
    }
}

#[test]
fn what_is_preferred_decides_between_nodes_that_suit() {
    let preferred = |kind: &str| {
        json!({ kind: { "preferredDuringSchedulingIgnoredDuringExecution": [
        { "weight": 10, "podAffinityTerm": term("web", "host") }] } })
    };
    for (kind, expected) in [("podAffinity", "b"), ("podAntiAffinity", "a")] {
        let objects = nodes().into_iter().chain([running("w", "b", "web")]).collect();
        let found = outcome(new("db", "spec/affinity", preferred(kind)), objects);
        assert_eq!(found.map(|placement| placement.node), Ok(expected.to_owned()), "{kind}");
    }
}
