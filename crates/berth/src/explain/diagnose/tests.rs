//! One row per way of being stuck.

use k8s_openapi::api::storage::v1::CSINode;
use serde_json::{Value, json};

use super::*;

fn claim(phase: &str, class: Option<&str>) -> PersistentVolumeClaim {
    serde_json::from_value(json!({
        "metadata": {"name": "data", "namespace": "default", "uid": "1", "finalizers": ["kubernetes.io/pvc-protection"]},
        "spec": {"storageClassName": class, "volumeName": "pv"},
        "status": {"phase": phase},
    }))
    .unwrap()
}

fn class(name: &str, mode: &str) -> StorageClass {
    serde_json::from_value(
        json!({"metadata": {"name": name}, "provisioner": "a.driver", "volumeBindingMode": mode}),
    )
    .unwrap()
}

fn pod(node: &str, status: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default", "uid": "2"},
        "spec": {"nodeName": node, "containers": [], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]},
        "status": status,
    }))
    .unwrap()
}

fn node(driver: &str) -> CSINode {
    serde_json::from_value(json!({
        "metadata": {"name": "node"}, "spec": {"drivers": [{"name": driver, "nodeID": "node"}]},
    }))
    .unwrap()
}

fn event(uid: &str, reason: &str, message: &str) -> Event {
    serde_json::from_value(json!({
        "metadata": {}, "involvedObject": {"uid": uid}, "reason": reason, "message": message,
    }))
    .unwrap()
}

fn why(observed: &Observed) -> (bool, String) {
    let found = diagnose(observed);
    assert_eq!(found.stuck, found.what_to_do.is_some(), "{found:?}");
    (found.stuck, found.why)
}

#[test]
fn every_way_of_being_stuck_has_its_sentence() {
    let pending = |class_name: Option<&str>| Observed {
        claim: Some(claim("Pending", class_name)),
        ..Observed::default()
    };
    let unschedulable = json!({"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]});
    let rows: Vec<(&str, Observed, bool, &str)> = vec![
        ("a class that is not there", pending(Some("gone")), true, "names the class gone"),
        ("no class and no default", pending(None), true, "no default class"),
        (
            "waiting for a pod is not stuck",
            Observed { classes: vec![class("slow", "WaitForFirstConsumer")], ..pending(Some("slow")) },
            false,
            "first pod",
        ),
        (
            "a driver that nobody registered",
            Observed { classes: vec![class("fast", "Immediate")], ..pending(Some("fast")) },
            true,
            "registered on no node",
        ),
        (
            "a driver that refuses",
            Observed {
                classes: vec![class("fast", "Immediate")],
                events: vec![event("1", "ProvisioningFailed", "the disk is full")],
                ..pending(Some("fast"))
            },
            true,
            "the disk is full",
        ),
        (
            "a pod that fits nowhere",
            Observed {
                classes: vec![class("slow", "WaitForFirstConsumer")],
                users: vec![pod("", &unschedulable)],
                ..pending(Some("slow"))
            },
            true,
            "0/1 nodes are available",
        ),
        (
            "a mount that fails",
            Observed {
                claim: Some(claim("Bound", None)),
                users: vec![pod("node", &json!({"phase": "Pending"}))],
                events: vec![event("2", "FailedMount", "no such device")],
                ..Observed::default()
            },
            true,
            "no such device",
        ),
        (
            "a lost volume",
            Observed { claim: Some(claim("Lost", None)), ..Observed::default() },
            true,
            "is gone",
        ),
        (
            "a claim that is missing",
            Observed { missing_claim: Some("data".into()), ..Observed::default() },
            true,
            "names the claim data",
        ),
        (
            "a bound claim",
            Observed { claim: Some(claim("Bound", None)), ..Observed::default() },
            false,
            "No problems found",
        ),
    ];
    for (name, observed, is_stuck, expected) in rows {
        let (stuck, why) = why(&observed);
        assert!(stuck == is_stuck && why.contains(expected), "{name}: {why}");
    }
}

#[test]
fn a_failure_that_was_overcome_is_not_reported() {
    let mut observed = Observed { claim: Some(claim("Bound", None)), ..Observed::default() };
    observed.events =
        vec![event("1", "VolumeResizeFailed", "no room"), event("1", "VolumeResizeSuccessful", "done")];
    assert!(!why(&observed).0);
    observed.events.reverse();
    assert_eq!(why(&observed), (true, "no room".to_owned()));
}

#[test]
fn a_claim_in_deletion_names_the_pods_that_hold_it() {
    let mut held = claim("Bound", None);
    held.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
    let observed = Observed {
        claim: Some(held),
        users: vec![pod("node", &json!({"phase": "Running"}))],
        ..Observed::default()
    };
    let found = diagnose(&observed);
    assert!(found.why.contains("still used by web"), "{found:?}");
    assert!(found.what_to_do.unwrap().contains("kubectl delete pod web"));
}

#[test]
fn a_driver_is_blamed_only_if_a_provisioner_has_taken_up_the_claim() {
    let waiting = |nodes: Vec<CSINode>, events| Observed {
        claim: Some(claim("Pending", Some("fast"))),
        classes: vec![class("fast", "Immediate")],
        nodes,
        events,
        ..Observed::default()
    };
    // The binder's event says that a provisioner is waited for, which is no sign of one.
    let external = || event("1", "ExternalProvisioning", "Waiting for a volume to be created");
    for nodes in [vec![node("a.driver")], Vec::new()] {
        let registered = !nodes.is_empty();
        let (stuck, sentence) = why(&waiting(nodes, vec![external()]));
        assert!(
            stuck && sentence.contains("no provisioner is running for the driver a.driver"),
            "{sentence}"
        );
        assert_eq!(sentence.contains("registered on no node"), !registered, "{sentence}");
    }
    let taken_up = event("1", "Provisioning", "External provisioner is provisioning volume");
    let (stuck, sentence) = why(&waiting(Vec::new(), vec![external(), taken_up]));
    assert!(stuck && sentence.contains("neither a volume nor a failure"), "{sentence}");
}
