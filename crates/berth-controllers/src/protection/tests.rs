//! Kubernetes' cases of the three protections, as far as they are decisions; the rest is lived through in
//! `tests/scenarios/protection.rs`.
//!
//! Left out: the condition `Unused`, which is not written here.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use serde_json::{Value, json};

use super::claims::is_user;
use super::{FinalizerChange, attribute_classes, finalizer_change, volumes};

fn claim(deleted: bool, finalizer: bool, owner: &str) -> PersistentVolumeClaim {
    let mut object = json!({ "metadata": { "namespace": "ns", "name": "pod-vol" } });
    if deleted {
        object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    }
    if finalizer {
        object["metadata"]["finalizers"] = json!(["kubernetes.io/pvc-protection"]);
    }
    if !owner.is_empty() {
        object["metadata"]["ownerReferences"] =
            json!([{ "apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": owner, "controller": true }]);
    }
    serde_json::from_value(object).unwrap()
}

fn pod(node: &str, volume: &Value, change: &Value) -> Pod {
    let mut object = json!({
        "metadata": { "namespace": "ns", "name": "pod", "uid": "u" },
        "spec": { "nodeName": node, "containers": [], "volumes": [{ "name": "x", "emptyDir": {} }, volume] },
        "status": { "phase": "Running" },
    });
    for (part, fields) in change.as_object().unwrap() {
        object[part].as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    serde_json::from_value(object).unwrap()
}

#[test]
fn a_finalizer_comes_with_the_object_and_goes_with_its_deletion() {
    let finalizer = "kubernetes.io/pvc-protection";
    for (case, deleted, has, expected) in [
        ("PVC without finalizer -> finalizer is added", false, false, FinalizerChange::Add),
        ("PVC with finalizer -> no action", false, true, FinalizerChange::Nothing),
        ("deleted PVC with finalizer -> finalizer is removed", true, true, FinalizerChange::RemoveIfUnused),
        ("deleted PVC without finalizer -> no action", true, false, FinalizerChange::Nothing),
    ] {
        assert_eq!(finalizer_change(&claim(deleted, has, ""), finalizer), expected, "{case}");
    }
}

#[test]
fn pods_with_a_node_use_their_claims() {
    let named = || json!({ "name": "vol", "persistentVolumeClaim": { "claimName": "pod-vol" } });
    let other = || json!({ "name": "vol", "persistentVolumeClaim": { "claimName": "unrelatedPVC" } });
    let ephemeral = || json!({ "name": "vol", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } });
    let failed = || json!({ "status": { "phase": "Failed" } });
    let going = |grace: i64| json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace } });
    for (case, node, volume, change, owner, used) in [
        ("pod with the PVC exists", "n", named(), json!({}), "", true),
        ("pod with unrelated PVC and EmptyDir exists", "n", other(), json!({}), "", false),
        ("pod with the PVC finished but is not deleted", "n", named(), failed(), "", true),
        ("pod with the PVC is not scheduled", "", named(), json!({}), "", false),
        ("pod with the PVC is deleted with grace", "n", named(), going(30), "", true),
        ("pod with the PVC is shut down", "n", named(), going(0), "", true),
        ("pod with its own ephemeral PVC", "n", ephemeral(), json!({}), "u", true),
        ("pod with somebody else's ephemeral PVC", "n", ephemeral(), json!({}), "other", false),
        ("pod with its own ephemeral PVC is deleted with grace", "n", ephemeral(), going(30), "u", true),
        ("pod with its own ephemeral PVC is shut down", "n", ephemeral(), going(0), "u", false),
    ] {
        assert_eq!(is_user(&pod(node, &volume, &change), &claim(true, true, owner)), used, "{case}");
    }
}

#[test]
fn a_volume_is_protected_while_it_is_bound() {
    let finalizers = || json!(["kubernetes.io/pv-protection"]);
    let deleted = || json!("2026-01-01T00:00:00Z");
    for (case, finalizers, deleted, phase, expected) in [
        (
            "PV without finalizer -> finalizer is added",
            json!([]),
            Value::Null,
            "Available",
            FinalizerChange::Add,
        ),
        ("PVC with finalizer -> no action", finalizers(), Value::Null, "Bound", FinalizerChange::Nothing),
        (
            "deleted PV with finalizer -> finalizer is removed",
            finalizers(),
            deleted(),
            "Released",
            FinalizerChange::RemoveIfUnused,
        ),
        (
            "deleted PV with finalizer but it's referenced",
            finalizers(),
            deleted(),
            "Bound",
            FinalizerChange::Nothing,
        ),
        ("deleted PV without finalizer", json!([]), deleted(), "Available", FinalizerChange::Nothing),
    ] {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": { "name": "v", "finalizers": finalizers, "deletionTimestamp": deleted },
            "status": { "phase": phase },
        }))
        .unwrap();
        assert_eq!(volumes::plan(&volume), expected, "{case}");
    }
}

#[test]
fn every_place_that_names_an_attributes_class_uses_it() {
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": { "name": "c" },
        "spec": { "volumeAttributesClassName": "gold" },
        "status": {
            "currentVolumeAttributesClassName": "silver",
            "modifyVolumeStatus": { "status": "InProgress", "targetVolumeAttributesClassName": "gold" },
        },
    }))
    .unwrap();
    assert_eq!(attribute_classes::named_by_claim(&claim), ["gold", "silver"]);
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": { "name": "v" }, "spec": { "volumeAttributesClassName": "gold" },
    }))
    .unwrap();
    assert_eq!(attribute_classes::named_by_volume(&volume), ["gold"]);
    assert!(attribute_classes::named_by_volume(&PersistentVolume::default()).is_empty());
}
