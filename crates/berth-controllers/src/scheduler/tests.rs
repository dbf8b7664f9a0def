//! kube-scheduler's reasons, row by row. Rows carry the names of the Go tests they come from (`volume_binding_test.go`,
//! `csi_test.go` of nodevolumelimits, `volume_zone_test.go`, `volume_restrictions_test.go`, `taint_toleration_test.go`).

mod neighbours;
mod plain;
mod preempt;
mod state;

use berth_kube::Key;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use self::plain::*;
use super::board::Board;
use super::decide::decide;
use super::unfit::Plugin;
use berth_kube::resources::requested;

const HOPELESS: &str = "Preemption is not helpful for scheduling";
const NO_VICTIMS: &str = "No preemption victims found for incoming pod";

/// Where the pod goes, or why nowhere.
fn outcome(pod: Value, objects: Vec<Value>) -> Result<super::decide::Placement, String> {
    let world = world(objects.into_iter().chain([pod]).collect());
    let mut board = Board::default();
    for pod in &world.pods {
        board.observe(&Key::of(pod.as_ref()), None, Some(pod));
    }
    decide(&world, &mut board, world.pods.last().unwrap()).map_err(|unfit| unfit.message)
}

fn refused(reasons: &str, preemption: &str) -> Result<&'static str, String> {
    Err(format!(
        "0/1 nodes are available: {reasons}. no new claims to deallocate, preemption: 0/1 nodes are available: 1 {preemption}."
    ))
}

type Row = (&'static str, Value, Vec<Value>, Result<&'static str, String>);

fn check(rows: Vec<Row>) {
    for (name, pod, objects, expected) in rows {
        let outcome = outcome(pod, objects);
        let outcome = outcome.as_ref().map(|placement| placement.node.as_str());
        assert_eq!(outcome.map_err(Clone::clone), expected, "{name}");
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn claims_that_no_node_can_help() {
    let mut rows: Vec<Row> = vec![
        ("pod has no PVCs", pod(&[]), vec![plain_node()], Ok("a")),
        (
            "PVC does not exist",
            pod(&["c"]),
            vec![plain_node()],
            refused("persistentvolumeclaim \"c\" not found", HOPELESS),
        ),
        (
            "part of PVCs are not bound / immediate claims not bound",
            pod(&["b", "c"]),
            vec![
                plain_node(),
                bound("b", "v"),
                volume("v", "", "1Gi"),
                claim("c", "now"),
                class("now", "d", "Immediate"),
            ],
            refused("pod has unbound immediate PersistentVolumeClaims", HOPELESS),
        ),
        (
            "unbound claim without a class counts as immediate",
            pod(&["c"]),
            vec![plain_node(), claim("c", "")],
            refused("pod has unbound immediate PersistentVolumeClaims", HOPELESS),
        ),
        (
            "prebound claim (no bind-completed) counts as immediate",
            pod(&["c"]),
            vec![plain_node(), with(claim("c", "w"), "spec/volumeName", json!("v")), waiting("w")],
            refused("pod has unbound immediate PersistentVolumeClaims", HOPELESS),
        ),
        (
            "PVC is lost",
            pod(&["c"]),
            vec![plain_node(), with(bound("c", "gone"), "status", json!({ "phase": "Lost" }))],
            refused("persistentvolumeclaim \"c\" bound to non-existent persistentvolume \"gone\"", HOPELESS),
        ),
        (
            "PVC is being deleted",
            pod(&["c"]),
            vec![
                plain_node(),
                with(bound("c", "v"), "metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z")),
            ],
            refused("persistentvolumeclaim \"c\" is being deleted", HOPELESS),
        ),
        (
            "pv not found",
            pod(&["c"]),
            vec![plain_node(), bound("c", "v")],
            refused("persistentvolume \"v\" not found", HOPELESS),
        ),
        ("no nodes", pod(&[]), vec![], Err("no nodes available to schedule pods".to_owned())),
        (
            "a pod that may not preempt",
            with(pod(&["c"]), "spec/preemptionPolicy", json!("Never")),
            vec![plain_node()],
            Err("0/1 nodes are available: persistentvolumeclaim \"c\" not found. \
                 no new claims to deallocate, preemption: not eligible due to preemptionPolicy=Never."
                .to_owned()),
        ),
    ];
    let mut ephemeral = pod(&[]);
    ephemeral["spec"]["volumes"] = json!([{ "name": "e", "ephemeral": {} }]);
    rows.push((
        "generic ephemeral: PVC not there yet",
        ephemeral.clone(),
        vec![plain_node()],
        refused(
            "waiting for ephemeral volume controller to create the persistentvolumeclaim \"p-e\"",
            HOPELESS,
        ),
    ));
    rows.push((
        "generic ephemeral: PVC of somebody else",
        ephemeral.clone(),
        vec![plain_node(), bound("p-e", "v")],
        refused("PVC ns/p-e was not created for pod ns/p (pod is not owner)", HOPELESS),
    ));
    let owner =
        json!([{ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pod-uid", "controller": true }]);
    rows.push((
        "generic ephemeral: all bound",
        ephemeral,
        vec![
            plain_node(),
            with(bound("p-e", "v"), "metadata/ownerReferences", owner),
            volume("v", "", "1Gi"),
        ],
        Ok("a"),
    ));
    check(rows);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn volume_binding_per_node() {
    let here = || node("a", &json!({ "zone": "1" }));
    let conflict = || refused("node(s) didn't find available persistent volumes to bind", HOPELESS);
    let topologies = json!([{ "matchLabelExpressions": [{ "key": "zone", "values": ["2"] }] }]);
    let selected = |node: &str| {
        let mut claim = claim("c", "w");
        claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = json!(node);
        claim
    };
    let static_class = || class("w", "kubernetes.io/no-provisioner", "WaitForFirstConsumer");
    check(
        vec![
            (
                "all bound",
                pod(&["c"]),
                vec![here(), bound("c", "v"), on(volume("v", "", "1Gi"), "zone", "1")],
                Ok("a"),
            ),
            (
                "bound PVC, node affinity does not match",
                pod(&["c"]),
                vec![here(), bound("c", "v"), on(volume("v", "", "1Gi"), "zone", "2")],
                refused("node(s) didn't match PersistentVolume's node affinity", HOPELESS),
            ),
            ("unbound, to be provisioned", pod(&["c"]), vec![here(), claim("c", "w"), waiting("w")], Ok("a")),
            (
                "unbound, no matching PV and no provisioner",
                pod(&["c"]),
                vec![here(), claim("c", "w"), static_class()],
                conflict(),
            ),
            (
                "static match",
                pod(&["c"]),
                vec![here(), claim("c", "w"), static_class(), volume("v", "w", "2Gi")],
                Ok("a"),
            ),
            (
                "static: too small",
                pod(&["c"]),
                vec![here(), claim("c", "w"), static_class(), volume("v", "w", "1M")],
                conflict(),
            ),
            (
                "static: on another node",
                pod(&["c"]),
                vec![here(), claim("c", "w"), static_class(), on(volume("v", "w", "2Gi"), "zone", "2")],
                conflict(),
            ),
            (
                "static: not available",
                pod(&["c"]),
                vec![
                    here(),
                    claim("c", "w"),
                    static_class(),
                    with(volume("v", "w", "2Gi"), "status/phase", json!("Pending")),
                ],
                conflict(),
            ),
            (
                "static: other access mode",
                pod(&["c"]),
                vec![
                    here(),
                    claim("c", "w"),
                    static_class(),
                    with(volume("v", "w", "2Gi"), "spec/accessModes", json!(["ReadOnlyMany"])),
                ],
                conflict(),
            ),
            (
                "two claims, one volume",
                pod(&["c", "d"]),
                vec![here(), claim("c", "w"), claim("d", "w"), static_class(), volume("v", "w", "2Gi")],
                conflict(),
            ),
            (
                "prebound PV for the claim, even if not available",
                pod(&["c"]),
                vec![
                    here(),
                    claim("c", "w"),
                    static_class(),
                    with(
                        with(
                            volume("v", "w", "2Gi"),
                            "spec/claimRef",
                            json!({ "name": "c", "namespace": "ns" }),
                        ),
                        "status/phase",
                        json!("Pending"),
                    ),
                ],
                Ok("a"),
            ),
            (
                "allowedTopologies do not match",
                pod(&["c"]),
                vec![here(), claim("c", "w"), with(waiting("w"), "allowedTopologies", topologies)],
                conflict(),
            ),
            ("selected node is this one", pod(&["c"]), vec![here(), selected("a"), waiting("w")], Ok("a")),
            (
                "selected node is another one",
                pod(&["c"]),
                vec![here(), selected("b"), waiting("w")],
                conflict(),
            ),
            (
                "bound elsewhere and nothing to bind: both reasons",
                pod(&["c", "d"]),
                vec![
                    here(),
                    bound("c", "v"),
                    on(volume("v", "", "1Gi"), "zone", "2"),
                    claim("d", "w"),
                    static_class(),
                ],
                refused(
                    "1 node(s) didn't find available persistent volumes to bind, \
                 1 node(s) didn't match PersistentVolume's node affinity",
                    HOPELESS,
                )
                .map_err(|message| {
                    message.replace("available: 1 node(s) didn't find", "available: node(s) didn't find")
                }),
            ),
        ]
        .into_iter()
        .map(counted)
        .collect(),
    );
}

/// Reasons of nodes are counted; there is one node.
fn counted((name, pod, objects, expected): Row) -> Row {
    let expected =
        expected.map_err(|message| message.replacen("available: node(s)", "available: 1 node(s)", 1));
    (name, pod, objects, expected)
}

#[test]
fn storage_capacity() {
    let driver =
        || json!({ "kind": "Driver", "metadata": { "name": "d" }, "spec": { "storageCapacity": true } });
    let capacity = |size: &str, topology: Value, maximum: Value| {
        json!({ "kind": "Capacity", "metadata": { "name": "x" }, "storageClassName": "w", "capacity": size,
            "nodeTopology": topology, "maximumVolumeSize": maximum })
    };
    let base = || vec![node("a", &json!({ "zone": "1" })), claim("c", "w"), waiting("w"), driver()];
    let and = |more: Value| base().into_iter().chain([more]).collect::<Vec<_>>();
    let full = || refused("node(s) did not have enough free storage", HOPELESS);
    let zone = |zone: &str| json!({ "matchLabels": { "zone": zone } });
    check(
        vec![
            ("no capacity object", pod(&["c"]), base(), full()),
            ("enough", pod(&["c"]), and(capacity("1Gi", zone("1"), Value::Null)), Ok("a")),
            ("too little", pod(&["c"]), and(capacity("1Mi", zone("1"), Value::Null)), full()),
            (
                "enough for each of two and not for both",
                pod(&["c", "d"]),
                and(capacity("1536Mi", zone("1"), Value::Null))
                    .into_iter()
                    .chain([claim("d", "w")])
                    .collect(),
                full(),
            ),
            (
                "enough for both",
                pod(&["c", "d"]),
                and(capacity("2Gi", zone("1"), Value::Null)).into_iter().chain([claim("d", "w")]).collect(),
                Ok("a"),
            ),
            (
                "maximumVolumeSize counts more than capacity",
                pod(&["c"]),
                and(capacity("9Gi", zone("1"), json!("1Mi"))),
                full(),
            ),
            ("other topology", pod(&["c"]), and(capacity("9Gi", zone("2"), Value::Null)), full()),
            ("no topology is nowhere", pod(&["c"]), and(capacity("9Gi", Value::Null, Value::Null)), full()),
            ("every topology", pod(&["c"]), and(capacity("9Gi", json!({}), Value::Null)), Ok("a")),
        ]
        .into_iter()
        .map(counted)
        .collect(),
    );
}

#[test]
fn node_volume_limits() {
    let limit = |count: i32| {
        json!({ "kind": "CSINode", "metadata": { "name": "a" },
            "spec": { "drivers": [{ "name": "d", "nodeID": "a", "allocatable": { "count": count } }] } })
    };
    let other = |claim: &str| {
        let mut pod = pod(&[claim]);
        pod["metadata"]["name"] = json!("other");
        pod["spec"]["nodeName"] = json!("a");
        pod
    };
    let both = || vec![bound("c", "v"), volume("v", "", "1Gi"), bound("d", "w"), volume("w", "", "1Gi")];
    let and = |more: Vec<Value>| [plain_node()].into_iter().chain(both()).chain(more).collect::<Vec<_>>();
    let full = || refused("node(s) exceed max volume count", NO_VICTIMS);
    let attachment = json!({ "kind": "Attachment", "metadata": { "name": "x" },
        "spec": { "attacher": "d", "nodeName": "a", "source": { "persistentVolumeName": "w" } } });
    let needed = json!({ "kind": "Driver", "metadata": { "name": "d" }, "spec": { "preventPodSchedulingIfMissing": true } });
    check(
        vec![
            ("fits when node volume limit >= new pod's volumes", pod(&["c"]), and(vec![limit(1)]), Ok("a")),
            ("doesn't when node volume limit <= new pod's volumes", pod(&["c"]), and(vec![limit(0)]), full()),
            ("counts pods of the node", pod(&["c"]), and(vec![limit(1), other("d")]), full()),
            ("a volume used twice counts once", pod(&["c"]), and(vec![limit(1), other("c")]), Ok("a")),
            ("counts attachments without pods", pod(&["c"]), and(vec![limit(1), attachment.clone()]), full()),
            (
                "attachments of pods count once",
                pod(&["c"]),
                and(vec![limit(2), other("d"), attachment]),
                Ok("a"),
            ),
            (
                "unbound claims count by their class",
                pod(&["u"]),
                and(vec![limit(1), other("d"), claim("u", "w"), waiting("w")]),
                full(),
            ),
            (
                "driver must be there and is not",
                pod(&["c"]),
                and(vec![needed]),
                refused("d CSI driver is not installed on the node", NO_VICTIMS)
                    .map_err(|message| message.replacen("available: d", "available: 1 d", 1)),
            ),
        ]
        .into_iter()
        .map(counted)
        .collect(),
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn volume_zones_and_exclusive_claims() {
    let zone = "topology.kubernetes.io/zone";
    let old = "failure-domain.beta.kubernetes.io/zone";
    let labelled = |key: &str, value: &str| {
        let mut volume = volume("v", "", "1Gi");
        volume["metadata"]["labels"][key] = json!(value);
        volume
    };
    let with_zone = |value: &str| node("a", &json!({ zone: value }));
    let no = || refused("node(s) had no available volume zone", HOPELESS);
    let exclusive = || with(bound("c", "v"), "spec/accessModes", json!(["ReadWriteOncePod"]));
    let other = |phase: &str| {
        let mut pod = pod(&["c"]);
        pod["metadata"]["name"] = json!("other");
        pod["spec"]["nodeName"] = json!("a");
        pod["status"] = json!({ "phase": phase });
        pod
    };
    let in_use = || {
        refused(
            "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod",
            NO_VICTIMS,
        )
    };
    check(
        vec![
            (
                "node without zone labels",
                pod(&["c"]),
                vec![plain_node(), bound("c", "v"), labelled(zone, "1")],
                Ok("a"),
            ),
            (
                "label zone failure domain matched",
                pod(&["c"]),
                vec![with_zone("1"), bound("c", "v"), labelled(zone, "1")],
                Ok("a"),
            ),
            ("label failed", pod(&["c"]), vec![with_zone("2"), bound("c", "v"), labelled(zone, "1")], no()),
            (
                "set of zones",
                pod(&["c"]),
                vec![with_zone("2"), bound("c", "v"), labelled(zone, "1__2")],
                Ok("a"),
            ),
            (
                "beta label on PV, GA label on node",
                pod(&["c"]),
                vec![with_zone("1"), bound("c", "v"), labelled(old, "1")],
                Ok("a"),
            ),
            (
                "beta label on PV, other GA label on node",
                pod(&["c"]),
                vec![with_zone("2"), bound("c", "v"), labelled(old, "1")],
                no(),
            ),
            (
                "ReadWriteOncePod, free",
                pod(&["c"]),
                vec![plain_node(), exclusive(), volume("v", "", "1Gi")],
                Ok("a"),
            ),
            (
                "ReadWriteOncePod, in use",
                pod(&["c"]),
                vec![plain_node(), exclusive(), volume("v", "", "1Gi"), other("Running")],
                in_use(),
            ),
            (
                "ReadWriteOncePod, used by a pod that is over",
                pod(&["c"]),
                vec![plain_node(), exclusive(), volume("v", "", "1Gi"), other("Succeeded")],
                Ok("a"),
            ),
            (
                "ReadWriteOnce, used by another pod on the node",
                pod(&["c"]),
                vec![plain_node(), bound("c", "v"), volume("v", "", "1Gi"), other("Running")],
                Ok("a"),
            ),
        ]
        .into_iter()
        .map(counted)
        .collect(),
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn nodes_are_judged_by_taints_selectors_and_room() {
    let tainted = |effect: &str| {
        let taint = json!({ "taints": [{ "key": "k", "value": "v", "effect": effect }] });
        with(plain_node(), "spec", taint)
    };
    let tolerating = |toleration: Value| with(pod(&[]), "spec/tolerations", json!([toleration]));
    let taints = || refused("node(s) had untolerated taint(s)", HOPELESS);
    let affinity = || refused("node(s) didn't match Pod's node affinity/selector", HOPELESS);
    let asking = |name: &str, amount: &str| {
        let container = json!([{ "name": "c", "resources": { "requests": { name: amount } } }]);
        with(pod(&[]), "spec/containers", container)
    };
    let required = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["b"] }] }] } } });
    let mut busy = asking("cpu", "3");
    busy["metadata"]["name"] = json!("busy");
    busy["spec"]["nodeName"] = json!("a");
    let cordoned = || with(plain_node(), "spec", json!({ "unschedulable": true }));
    let rows: Vec<Row> = vec![
        ("NoSchedule", pod(&[]), vec![tainted("NoSchedule")], taints()),
        ("NoExecute", pod(&[]), vec![tainted("NoExecute")], taints()),
        ("PreferNoSchedule", pod(&[]), vec![tainted("PreferNoSchedule")], Ok("a")),
        (
            "Exists",
            tolerating(json!({ "key": "k", "operator": "Exists" })),
            vec![tainted("NoSchedule")],
            Ok("a"),
        ),
        ("Equal", tolerating(json!({ "key": "k", "value": "v" })), vec![tainted("NoSchedule")], Ok("a")),
        (
            "other value",
            tolerating(json!({ "key": "k", "value": "w" })),
            vec![tainted("NoSchedule")],
            taints(),
        ),
        (
            "other effect",
            tolerating(json!({ "key": "k", "operator": "Exists", "effect": "NoExecute" })),
            vec![tainted("NoSchedule")],
            taints(),
        ),
        ("everything", tolerating(json!({ "operator": "Exists" })), vec![tainted("NoSchedule")], Ok("a")),
        ("cordoned", pod(&[]), vec![cordoned()], refused("node(s) were unschedulable", HOPELESS)),
        (
            "cordoned, tolerated",
            tolerating(json!({ "key": "node.kubernetes.io/unschedulable", "operator": "Exists" })),
            vec![cordoned()],
            Ok("a"),
        ),
        (
            "nodeSelector",
            with(pod(&[]), "spec/nodeSelector", json!({ "x": "y" })),
            vec![plain_node()],
            affinity(),
        ),
        ("node affinity by name", with(pod(&[]), "spec/affinity", required), vec![plain_node()], affinity()),
        ("fits", asking("cpu", "4"), vec![plain_node()], Ok("a")),
        ("never fits", asking("cpu", "4001m"), vec![plain_node()], refused("Insufficient cpu", HOPELESS)),
        (
            "does not fit now",
            asking("cpu", "2"),
            vec![plain_node(), busy],
            refused("Insufficient cpu", NO_VICTIMS),
        ),
        ("memory", asking("memory", "9Gi"), vec![plain_node()], refused("Insufficient memory", HOPELESS)),
        (
            "unknown resource",
            asking("example.com/gpu", "1"),
            vec![plain_node()],
            refused("Insufficient example.com/gpu", HOPELESS),
        ),
        (
            "no room for pods",
            pod(&[]),
            vec![with(plain_node(), "status/allocatable/pods", json!("0"))],
            refused("Too many pods", NO_VICTIMS),
        ),
    ];
    let rows = rows.into_iter().map(counted).map(|(name, pod, objects, expected)| {
        let expected = expected.map_err(|message| {
            message.replacen("available: Insuf", "available: 1 Insuf", 1).replacen(
                "available: Too",
                "available: 1 Too",
                1,
            )
        });
        (name, pod, objects, expected)
    });
    check(rows.collect());
}

#[test]
fn reasons_of_many_nodes_are_counted_and_sorted() {
    let mut tainted = node("t", &json!({}));
    tainted["spec"] = json!({ "taints": [{ "key": "k", "effect": "NoSchedule" }] });
    let objects = vec![
        tainted,
        node("a", &json!({ "zone": "1" })),
        node("b", &json!({ "zone": "1" })),
        bound("c", "v"),
        on(volume("v", "", "1Gi"), "zone", "2"),
    ];
    assert_eq!(
        outcome(pod(&["c"]), objects).unwrap_err(),
        "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match PersistentVolume's node \
         affinity. no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
    );
}

#[test]
fn the_best_node_has_the_volume_that_fits_best_or_most_left_or_fewest_pods() {
    let on_node = |pod_name: &str, node: &str, cpu: &str| {
        json!({ "kind": "Pod", "metadata": { "name": pod_name, "namespace": "ns" }, "spec": { "nodeName": node,
            "containers": [{ "name": "c", "resources": { "requests": { "cpu": cpu } } }] } })
    };
    let nodes = || vec![node("a", &json!({ "n": "a" })), node("b", &json!({ "n": "b" }))];
    let with_nodes = |more: Vec<Value>| nodes().into_iter().chain(more).collect::<Vec<_>>();
    assert_eq!(outcome(pod(&[]), nodes()).unwrap().node, "a");
    assert_eq!(outcome(pod(&[]), with_nodes(vec![on_node("x", "a", "2")])).unwrap().node, "b");
    assert_eq!(outcome(pod(&[]), with_nodes(vec![on_node("x", "a", "0")])).unwrap().node, "b");
    let static_class = class("w", "kubernetes.io/no-provisioner", "WaitForFirstConsumer");
    let big = on(volume("big", "w", "100Gi"), "n", "a");
    let right = on(volume("right", "w", "1Gi"), "n", "b");
    let best = outcome(pod(&["c"]), with_nodes(vec![claim("c", "w"), static_class, big, right])).unwrap();
    assert_eq!((best.node.as_str(), best.volumes.bind[0].1.as_str()), ("b", "right"));
}

#[test]
fn a_volume_that_was_just_promised_is_not_given_away_again() {
    let static_class = class("w", "kubernetes.io/no-provisioner", "WaitForFirstConsumer");
    let world =
        world(vec![plain_node(), claim("c", "w"), static_class, volume("v", "w", "1Gi"), pod(&["c"])]);
    let mut board = Board::default();
    assert!(decide(&world, &mut board, &world.pods[0]).is_ok());
    board.promise_volume("v", &Key::new("ns", "another"));
    let unfit = decide(&world, &mut board, &world.pods[0]).unwrap_err();
    assert!(unfit.plugins.contains(&Plugin::VolumeBinding));
    board.release(&Key::new("ns", "another"), Some("v"));
    assert!(decide(&world, &mut board, &world.pods[0]).is_ok());
}

#[test]
fn a_pod_asks_for_the_most_that_it_needs_at_any_time() {
    let of = |cpu: &str| json!({ "requests": { "cpu": cpu } });
    let pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": {
        "containers": [{ "name": "a", "resources": of("1") }, { "name": "b", "resources": of("500m") }],
        "initContainers": [
            { "name": "helper", "restartPolicy": "Always", "resources": of("200m") },
            { "name": "start", "resources": of("3") },
        ],
        "overhead": { "cpu": "10m" },
    } }))
    .unwrap();
    // The start needs 3 beside the helper's 0.2; the containers with the helper only 1.7.
    assert_eq!(requested(&pod).get("cpu"), Some(&3210));
}

#[test]
fn preferences_and_soft_taints_decide_between_nodes_that_suit() {
    let node = |name: &str, more: &[(&str, Value)]| {
        let mut node = with(plain_node(), "metadata/name", json!(name));
        for (path, value) in more {
            node = with(node, path, value.clone());
        }
        node
    };
    let soft = json!([{ "key": "own", "value": "x", "effect": "PreferNoSchedule" }]);
    let zone = |zone: &str| ("metadata/labels", json!({ "zone": zone }));
    let prefers = |weights: &[(&str, i32)]| {
        let term = |(zone, weight): &(&str, i32)| {
            json!({ "weight": weight, "preference": { "matchExpressions": [
                { "key": "zone", "operator": "In", "values": [zone] }] } })
        };
        let terms: Vec<Value> = weights.iter().map(term).collect();
        json!({ "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": terms } })
    };
    let zones = || vec![node("a", &[zone("one")]), node("b", &[zone("two")])];
    let tolerates = json!([{ "key": "own", "operator": "Exists" }]);
    let rows: Vec<Row> = vec![
        ("nothing is preferred", pod(&[]), zones(), Ok("a")),
        ("one is preferred", with(pod(&[]), "spec/affinity", prefers(&[("two", 1)])), zones(), Ok("b")),
        (
            "one is preferred more",
            with(pod(&[]), "spec/affinity", prefers(&[("two", 50), ("one", 60)])),
            zones(),
            Ok("a"),
        ),
        ("no node is preferred", with(pod(&[]), "spec/affinity", prefers(&[("three", 1)])), zones(), Ok("a")),
        (
            "one is avoided",
            pod(&[]),
            vec![node("a", &[("spec/taints", soft.clone())]), node("b", &[])],
            Ok("b"),
        ),
        (
            "its taint is tolerated",
            with(pod(&[]), "spec/tolerations", tolerates),
            vec![node("a", &[("spec/taints", soft.clone())]), node("b", &[])],
            Ok("a"),
        ),
        (
            "taints weigh more than preferences",
            with(pod(&[]), "spec/affinity", prefers(&[("one", 100)])),
            vec![node("a", &[zone("one"), ("spec/taints", soft)]), node("b", &[zone("two")])],
            Ok("b"),
        ),
    ];
    check(rows);
}
