//! Which claim a pod's ephemeral volume needs, and whose an existing one is.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::{claim_for, is_pods, wants_claims};
use berth_kube::storage;

fn pod() -> Pod {
    serde_json::from_value(json!({
        "metadata": { "namespace": "ns", "name": "pod", "uid": "u" },
        "spec": { "containers": [], "volumes": [
            { "name": "plain", "emptyDir": {} },
            { "name": "vol", "ephemeral": { "volumeClaimTemplate": {
                "metadata": { "labels": { "a": "b" }, "annotations": { "c": "d" } },
                "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
            } } },
        ] },
    }))
    .unwrap()
}

#[test]
fn a_claim_is_made_from_the_template_and_owned_by_the_pod() {
    let pod = pod();
    let [plain, volume] = storage::volumes_of_pod(&pod) else { panic!("two volumes") };
    assert!(claim_for(&pod, plain).is_none());
    let claim = serde_json::to_value(claim_for(&pod, volume).unwrap()).unwrap();
    assert_eq!(
        claim,
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {
                "namespace": "ns", "name": "pod-vol", "labels": { "a": "b" }, "annotations": { "c": "d" },
                "ownerReferences": [{
                    "apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "u",
                    "controller": true, "blockOwnerDeletion": true,
                }],
            },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
        })
    );
}

#[test]
fn a_claim_of_somebody_else_is_not_taken() {
    let pod = pod();
    let volume = &storage::volumes_of_pod(&pod)[1];
    let mut claim = claim_for(&pod, volume).unwrap();
    assert!(is_pods(&claim, &pod, volume).is_ok());
    claim.metadata.owner_references.as_mut().unwrap()[0].uid = "other".to_owned();
    let why = is_pods(&claim, &pod, volume).unwrap_err().to_string();
    assert_eq!(why, "ephemeral volume vol: PVC ns/pod-vol was not created for pod ns/pod (pod is not owner)");
}

#[test]
fn pods_that_are_going_away_or_have_no_such_volume_want_nothing() {
    let mut pod = pod();
    assert!(wants_claims(&pod));
    pod.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
    assert!(!wants_claims(&pod));
    assert!(!wants_claims(&Pod::default()));
}
