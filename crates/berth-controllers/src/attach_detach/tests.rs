//! The decisions of kube-controller-manager's reconciler and its states of the world, row by row. Rows are named after
//! the Go tests they come from (`reconciler_test.go`, `desired_state_of_world_test.go`, `actual_state_of_world_test.go`).

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::json;

use super::observe::{facts, terminated};
use super::plan::{
    Action, Attachment, Detach, NodeFacts, ObservedVolume, OnNode, PodName, UNMOUNT_WAIT, conflict_message,
    plan,
};

const GOOD: NodeFacts = NodeFacts { exists: true, managed: true, ready: true, out_of_service: false };
const SICK: NodeFacts = NodeFacts { ready: false, ..GOOD };
const OUT: NodeFacts = NodeFacts { out_of_service: true, ..SICK };
const GONE: NodeFacts = NodeFacts { exists: false, managed: false, ready: false, out_of_service: false };
const SELFISH: NodeFacts = NodeFacts { managed: false, ..GOOD };

fn idle() -> OnNode {
    OnNode {
        node: GOOD,
        pods: Vec::new(),
        attachment: None,
        reported: false,
        settled: true,
        in_use: false,
        attaching_for: None,
        unwanted_for: None,
        conflict_reported: false,
    }
}

fn pod(name: &str) -> PodName {
    PodName { namespace: "ns".to_owned(), name: name.to_owned() }
}

fn wanted() -> OnNode {
    OnNode { pods: vec![pod("p")], ..idle() }
}

#[expect(clippy::unnecessary_wraps, reason = "reads well in the rows")]
fn attached() -> Option<Attachment> {
    Some(Attachment { attached: true, ..Attachment::default() })
}

#[expect(clippy::unnecessary_wraps, reason = "reads well in the rows")]
fn pending() -> Option<Attachment> {
    Some(Attachment::default())
}

#[expect(clippy::unnecessary_wraps, reason = "reads well in the rows")]
fn failed() -> Option<Attachment> {
    Some(Attachment { error: Some("no".into()), ..Attachment::default() })
}

#[expect(clippy::unnecessary_wraps, reason = "reads well in the rows")]
fn deleting() -> Option<Attachment> {
    Some(Attachment { attached: true, deleting: true, error: None })
}

fn attach(node: &str) -> Action {
    Action::Attach { node: node.to_owned() }
}

fn report(node: &str, attached: bool) -> Action {
    Action::Report { node: node.to_owned(), attached }
}

fn detach(node: &str, why: Detach) -> Action {
    Action::Detach { node: node.to_owned(), verify: why == Detach::Unused, why }
}

fn unwanted(node: &str) -> Action {
    Action::Unwanted { node: node.to_owned() }
}

fn forget(node: &str) -> Action {
    Action::Forget { node: node.to_owned() }
}

#[expect(clippy::unnecessary_wraps, reason = "reads well in the rows")]
fn since(seconds: u64) -> Option<Duration> {
    Some(Duration::from_secs(seconds))
}

/// What is to be done about a volume that is on one node only.
fn one(here: OnNode) -> Vec<Action> {
    plan(&ObservedVolume {
        shareable: false,
        unmount_wait: UNMOUNT_WAIT,
        nodes: [("a".to_owned(), here)].into(),
    })
}

#[test]
fn a_volume_on_one_node() {
    let rows: Vec<(&str, OnNode, Vec<Action>)> = vec![
        ("Test_Run_Positive_DoNothing", idle(), vec![forget("a")]),
        ("Test_Run_Positive_OneDesiredVolumeAttach", wanted(), vec![attach("a")]),
        (
            "attach succeeded: told once, then reported",
            OnNode { attachment: attached(), attaching_for: since(1), ..wanted() },
            vec![Action::Attached { node: "a".into() }, report("a", true)],
        ),
        (
            "attached and reported: nothing",
            OnNode { attachment: attached(), reported: true, in_use: true, ..wanted() },
            vec![],
        ),
        (
            "VerifyNoDetachForUncertain: an attachment under way is waited for",
            OnNode { attachment: pending(), attaching_for: since(20), ..wanted() },
            vec![Action::Again(Duration::from_secs(100))],
        ),
        (
            "an attachment found at start-up is waited for anew",
            OnNode { attachment: pending(), ..wanted() },
            vec![Action::Attaching { node: "a".into() }, Action::Again(Duration::from_secs(120))],
        ),
        (
            "an attachment that takes too long is told",
            OnNode { attachment: pending(), attaching_for: since(121), ..wanted() },
            vec![Action::Slow { node: "a".into() }, Action::Again(Duration::from_secs(120))],
        ),
        (
            "Test_Run_OneVolumeAttach with an error: told, and left to the attacher",
            OnNode { attachment: failed(), attaching_for: since(1), ..wanted() },
            vec![Action::Failed { node: "a".into(), error: "no".into() }],
        ),
        (
            "a report without an attachment is taken back (verify)",
            OnNode { reported: true, ..wanted() },
            vec![report("a", false), attach("a")],
        ),
        (
            "an attachment that somebody deletes is not reported, and not made again before it is gone",
            OnNode { attachment: deleting(), reported: true, ..wanted() },
            vec![report("a", false)],
        ),
        (
            "Test_Run_AddVolumeToNode on a node that attaches by itself",
            OnNode { node: SELFISH, ..wanted() },
            vec![],
        ),
        ("a node that is gone gets no new attachment", OnNode { node: GONE, ..wanted() }, vec![]),
        (
            "wanted again before it was detached",
            OnNode { attachment: attached(), reported: true, unwanted_for: since(9), ..wanted() },
            vec![Action::Wanted { node: "a".into() }],
        ),
    ];
    for (name, here, expected) in rows {
        assert_eq!(one(here), expected, "{name}");
    }
}

#[test]
fn a_volume_that_nobody_wants() {
    let there = || OnNode { attachment: attached(), ..idle() };
    let wait = |seconds| Action::Again(UNMOUNT_WAIT.saturating_sub(Duration::from_secs(seconds)));
    let rows: Vec<(&str, OnNode, Vec<Action>)> = vec![
        (
            "Test_Run_Positive_OneDesiredVolumeAttachThenDetachWithUnmountedVolume: first the report",
            OnNode { reported: true, ..there() },
            vec![unwanted("a"), report("a", false)],
        ),
        (
            "… while the report is on its way nothing else happens",
            OnNode { settled: false, unwanted_for: since(1), ..there() },
            vec![report("a", false)],
        ),
        (
            "… then the attachment",
            OnNode { unwanted_for: since(1), ..there() },
            vec![detach("a", Detach::Unused)],
        ),
        (
            "Test_Run_Positive_OneDesiredVolumeAttachThenDetachWithMountedVolume: waits",
            OnNode { reported: true, in_use: true, unwanted_for: since(60), ..there() },
            vec![wait(60)],
        ),
        (
            "6 minutes passed, but the node is well: waits for it",
            OnNode { reported: true, in_use: true, unwanted_for: since(400), ..there() },
            vec![],
        ),
        (
            "Test_Run_OneVolumeDetachOnUnhealthyNode: not before 6 minutes",
            OnNode { node: SICK, reported: true, in_use: true, unwanted_for: since(60), ..there() },
            vec![wait(60)],
        ),
        (
            "… after 6 minutes: the report first even then",
            OnNode { node: SICK, reported: true, in_use: true, unwanted_for: since(360), ..there() },
            vec![report("a", false)],
        ),
        (
            "… then by force",
            OnNode { node: SICK, in_use: true, unwanted_for: since(360), ..there() },
            vec![detach("a", Detach::Timeout)],
        ),
        (
            "Test_Run_OneVolumeDetachOnOutOfServiceTaintedNode: by force at once",
            OnNode { node: OUT, in_use: true, unwanted_for: since(0), ..there() },
            vec![detach("a", Detach::OutOfService)],
        ),
        (
            "Test_Run_OneVolumeDetachOnNoOutOfServiceTaintedNode: waits",
            OnNode { node: SICK, in_use: true, ..there() },
            vec![unwanted("a"), wait(0)],
        ),
        (
            "a node that is gone uses nothing",
            OnNode { node: GONE, in_use: true, unwanted_for: since(0), ..there() },
            vec![detach("a", Detach::Unused)],
        ),
        (
            "Test_Run_UpdateNodeStatusFailBeforeOneVolumeDetachNodeWithReadWriteOnce: never before the report is gone",
            OnNode { reported: true, settled: false, unwanted_for: since(9), ..there() },
            vec![report("a", false)],
        ),
        (
            "uncertain: an attachment that never succeeded is undone too",
            OnNode { attachment: pending(), unwanted_for: since(0), ..idle() },
            vec![detach("a", Detach::Unused)],
        ),
        ("being detached: waits", OnNode { attachment: deleting(), ..idle() }, vec![]),
        (
            "detached, still reported",
            OnNode { reported: true, ..idle() },
            vec![report("a", false), forget("a")],
        ),
        ("a node that attaches by itself keeps its own", OnNode { node: SELFISH, ..there() }, vec![]),
    ];
    for (name, here, expected) in rows {
        assert_eq!(one(here), expected, "{name}");
    }
}

#[test]
fn a_volume_on_two_nodes() {
    let conflict = |users: Vec<PodName>| Action::Conflict { node: "b".into(), users };
    let used = || OnNode { attachment: attached(), reported: true, in_use: true, ..wanted() };
    let rows: Vec<(&str, bool, OnNode, OnNode, Vec<Action>)> = vec![
        (
            "Test_Run_OneVolumeAttachAndDetachMultipleNodesWithReadWriteMany",
            true,
            used(),
            wanted(),
            vec![attach("b")],
        ),
        (
            "Test_Run_OneVolumeAttachAndDetachMultipleNodesWithReadWriteOnce: told once who uses it",
            false,
            used(),
            wanted(),
            vec![conflict(vec![pod("p")])],
        ),
        ("… and only once", false, used(), OnNode { conflict_reported: true, ..wanted() }, vec![]),
        (
            "ReportMultiAttachError: nobody there, detaching first",
            false,
            OnNode { attachment: attached(), reported: true, unwanted_for: since(1), ..idle() },
            wanted(),
            vec![report("a", false), conflict(vec![])],
        ),
        (
            "Test_Run_OneVolumeAttachAndDetachUncertainNodesWithReadWriteOnce: uncertain is no conflict",
            false,
            OnNode { attachment: pending(), attaching_for: since(120), ..wanted() },
            wanted(),
            vec![Action::Slow { node: "a".into() }, Action::Again(Duration::from_secs(120)), attach("b")],
        ),
        (
            "uncertain and unwanted: undone first, one operation per volume",
            false,
            OnNode { attachment: pending(), unwanted_for: since(1), ..idle() },
            wanted(),
            vec![detach("a", Detach::Unused)],
        ),
        (
            "Test_Run_OneVolumeAttachAndDetachTimeoutNodesWithReadWriteOnce: waits while it is being detached",
            false,
            OnNode { attachment: Some(Attachment { deleting: true, ..Attachment::default() }), ..idle() },
            wanted(),
            vec![],
        ),
        ("two nodes want it, neither has it: one gets it", false, wanted(), wanted(), vec![attach("a")]),
        ("two nodes want it and may share it", true, wanted(), wanted(), vec![attach("a"), attach("b")]),
    ];
    on_two_nodes(rows);
}

#[test]
fn a_volume_has_one_operation_at_a_time() {
    let rows: Vec<(&str, bool, OnNode, OnNode, Vec<Action>)> = vec![
        (
            "an attachment under way elsewhere is waited for",
            false,
            OnNode { attachment: pending(), attaching_for: since(20), ..wanted() },
            wanted(),
            vec![Action::Again(Duration::from_secs(100))],
        ),
        (
            "… also one found at start-up",
            false,
            OnNode { attachment: pending(), ..wanted() },
            wanted(),
            vec![Action::Attaching { node: "a".into() }, Action::Again(Duration::from_secs(120))],
        ),
        (
            "… also one to a node that is gone",
            false,
            OnNode { node: GONE, attachment: pending(), ..wanted() },
            wanted(),
            vec![Action::Attaching { node: "a".into() }, Action::Again(Duration::from_secs(120))],
        ),
        (
            "… which is uncertain after the same time",
            false,
            OnNode { node: GONE, attachment: pending(), attaching_for: since(120), ..wanted() },
            wanted(),
            vec![attach("b")],
        ),
        (
            "… and one that failed is uncertain at once",
            false,
            OnNode { attachment: failed(), attaching_for: since(1), ..wanted() },
            wanted(),
            vec![Action::Failed { node: "a".into(), error: "no".into() }, attach("b")],
        ),
        (
            "… but a volume that may be shared waits for nobody",
            true,
            OnNode { attachment: pending(), attaching_for: since(20), ..wanted() },
            wanted(),
            vec![Action::Again(Duration::from_secs(100)), attach("b")],
        ),
    ];
    on_two_nodes(rows);
}

/// Rows of whether the volume may be shared, how it is on each of two nodes, and what is to be done.
fn on_two_nodes(rows: Vec<(&str, bool, OnNode, OnNode, Vec<Action>)>) {
    for (name, shareable, a, b, expected) in rows {
        let observed = ObservedVolume {
            shareable,
            unmount_wait: UNMOUNT_WAIT,
            nodes: [("a".to_owned(), a), ("b".to_owned(), b)].into(),
        };
        assert_eq!(plan(&observed), expected, "{name}");
    }
}

#[test]
fn pods_are_told_who_uses_their_volume_but_not_across_namespaces() {
    let foreign = |name: &str| PodName { namespace: "other".to_owned(), name: name.to_owned() };
    let prefix = "Multi-Attach error for volume \"pv\" ";
    for (users, expected) in [
        (vec![], "Volume is already exclusively attached to one node and can't be attached to another"),
        (vec![pod("x"), pod("y")], "Volume is already used by pod(s) x, y"),
        (
            vec![pod("x"), foreign("z")],
            "Volume is already used by pod(s) x and 1 pod(s) in different namespaces",
        ),
        (vec![foreign("y"), foreign("z")], "Volume is already used by 2 pod(s) in different namespaces"),
    ] {
        assert_eq!(conflict_message("pv", "ns", &users), format!("{prefix}{expected}"));
    }
}

#[test]
fn a_pod_needs_its_volumes_until_nothing_of_it_runs() {
    let running = json!([{ "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": { "running": {} } }]);
    let ended = json!([{ "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": { "terminated": { "exitCode": 0 } } }]);
    let none = json!([]);
    for (phase, deleted, containers, expected) in [
        ("Running", false, &running, false),
        ("Pending", false, &none, false),
        ("Succeeded", false, &ended, true),
        ("Failed", false, &running, true),
        ("Running", true, &running, false),
        ("Running", true, &ended, true),
        ("Pending", true, &none, true),
    ] {
        let mut pod =
            json!({ "metadata": {}, "status": { "phase": phase, "containerStatuses": containers } });
        if deleted {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(terminated(&pod), expected, "{phase} deleted={deleted}");
    }
}

#[test]
fn a_node_is_managed_by_its_annotation_and_out_of_service_by_its_taint() {
    let node: Node = serde_json::from_value(json!({
        "metadata": { "annotations": { "volumes.kubernetes.io/controller-managed-attach-detach": "" } },
        "spec": { "taints": [{ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" }] },
        "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] },
    }))
    .unwrap();
    assert_eq!(facts(&node), OUT);
    assert!(!facts(&Node::default()).managed);
}
