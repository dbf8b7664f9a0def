//! What is made for a snapshot, row by row.

use serde_json::{Value, json};

use super::*;
use crate::snapshots::tests::merge;

mod groups;

fn with<T: serde::de::DeserializeOwned>(mut object: Value, change: Value) -> T {
    merge(&mut object, change);
    serde_json::from_value(object).unwrap()
}

fn snapshot(change: Value) -> VolumeSnapshot {
    let object = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": { "name": "s", "namespace": "n", "uid": "u" },
        "spec": { "source": { "persistentVolumeClaimName": "c" }, "volumeSnapshotClassName": "a" },
    });
    with(object, change)
}

fn claim(change: Value) -> PersistentVolumeClaim {
    let object = json!({
        "metadata": { "name": "c", "namespace": "n", "uid": "cu" },
        "spec": { "volumeName": "v" },
        "status": { "phase": "Bound" },
    });
    with(object, change)
}

fn volume(change: Value) -> PersistentVolume {
    let object = json!({
        "metadata": { "name": "v" },
        "spec": {
            "volumeMode": "Block",
            "claimRef": { "name": "c", "namespace": "n", "uid": "cu" },
            "csi": { "driver": "d", "volumeHandle": "h" },
        },
    });
    with(object, change)
}

fn class_named(name: &str, driver: &str, default: bool) -> Arc<VolumeSnapshotClass> {
    let object = json!({
        "metadata": { "name": name, "annotations": {
            "snapshot.storage.kubernetes.io/is-default-class": default.to_string(),
        } },
        "driver": driver,
        "deletionPolicy": "Retain",
        "parameters": {
            "csi.storage.k8s.io/snapshotter-secret-name": "${volumesnapshot.name}-secret",
            "csi.storage.k8s.io/snapshotter-secret-namespace": "${volumesnapshot.namespace}",
        },
    });
    Arc::new(serde_json::from_value(object).unwrap())
}

#[test]
fn a_content_is_made_of_snapshot_claim_volume_and_class() {
    let (snapshot, claim, volume) = (snapshot(json!({})), claim(json!({})), volume(json!({})));
    let classes = [class_named("a", "d", false)];
    let inputs = ContentInputs {
        snapshot: &snapshot,
        claim: Some(&claim),
        volume: Some(&volume),
        classes: &classes,
        keep_mode: true,
        nodes: None,
    };
    let made = content(&inputs).unwrap();
    assert_eq!(made.name_any(), "snapcontent-u");
    assert_eq!(made.spec.source.volume_handle.as_deref(), Some("h"));
    assert_eq!((made.spec.driver.as_str(), made.spec.deletion_policy.as_str()), ("d", "Retain"));
    assert_eq!(made.spec.volume_snapshot_class_name.as_deref(), Some("a"));
    assert_eq!(made.spec.source_volume_mode.as_deref(), Some("Block"));
    let back = &made.spec.volume_snapshot_ref;
    assert_eq!(
        (back.name.as_deref(), back.namespace.as_deref(), back.uid.as_deref()),
        (Some("s"), Some("n"), Some("u"))
    );
    assert_eq!(back.api_version.as_deref(), Some("snapshot.storage.k8s.io/v1"));
    assert_eq!(made.annotations()["snapshot.storage.kubernetes.io/deletion-secret-name"], "s-secret");
    assert_eq!(made.annotations()["snapshot.storage.kubernetes.io/deletion-secret-namespace"], "n");
    let forgetful = content(&ContentInputs { keep_mode: false, ..inputs }).unwrap();
    assert_eq!(forgetful.spec.source_volume_mode, None);
}

/// The reason and the message of a refusal, if there is one.
fn refused(
    its: Value,
    of: Option<Value>,
    on: Option<Value>,
    classes: &[(&str, &str, bool)],
) -> (String, String) {
    let (snapshot, claim, volume) = (snapshot(its), of.map(claim), on.map(volume));
    let classes: Vec<_> =
        classes.iter().map(|(name, driver, default)| class_named(name, driver, *default)).collect();
    let made = content(&ContentInputs {
        snapshot: &snapshot,
        claim: claim.as_ref(),
        volume: volume.as_ref(),
        classes: &classes,
        keep_mode: true,
        nodes: None,
    });
    made.err().map(|refusal| (refusal.reason.to_owned(), refusal.message)).unwrap_or_default()
}

#[test]
fn a_snapshot_is_taken_only_of_a_bound_claim_of_a_csi_driver() {
    let going = json!({ "metadata": { "deletionTimestamp": "2026-01-02T03:04:05Z" } });
    let kept = json!({ "metadata": {
        "deletionTimestamp": "2026-01-02T03:04:05Z",
        "finalizers": ["snapshot.storage.kubernetes.io/pvc-as-source-protection"],
    } });
    let pending = json!({ "status": { "phase": "Pending" } });
    let another = json!({ "spec": { "claimRef": { "uid": "x" } } });
    let local = json!({ "spec": { "csi": null } });
    let as_is = || Some(json!({}));
    for (name, of, on, expected) in [
        ("no claim", None, as_is(), "the PVC c does not exist"),
        ("unbound", Some(pending), as_is(), "the PVC c is not yet bound to a PV"),
        ("no volume", as_is(), None, "the PersistentVolume of the PVC c does not exist"),
        ("another's volume", as_is(), Some(another), "bound to another claim"),
        ("no CSI volume", as_is(), Some(local), "cannot find CSI PersistentVolumeSource"),
        ("a claim that goes", Some(going), as_is(), "because it is being deleted"),
        ("a claim that goes but is kept already", Some(kept), as_is(), ""),
    ] {
        let (reason, message) = refused(json!({}), of, on, &[("a", "d", false)]);
        assert_eq!(reason, if expected.is_empty() { "" } else { "SnapshotContentCreationFailed" }, "{name}");
        assert!(message.contains(expected), "{name}: {message}");
    }
}

#[test]
fn a_class_is_the_named_one_or_the_only_default_of_the_volumes_driver() {
    let named = json!({});
    let unnamed = json!({ "spec": { "volumeSnapshotClassName": null } });
    let no_default = "SetDefaultSnapshotClassFailed";
    for (name, its, classes, reason, text) in [
        ("named", &named, &[("a", "d", false)][..], "", ""),
        ("no such class", &named, &[("b", "d", true)], "GetSnapshotClassFailed", "\"a\" does not exist"),
        (
            "another driver's",
            &named,
            &[("a", "e", false)],
            "SnapshotContentCreationFailed",
            "a is for driver e",
        ),
        (
            "no default",
            &unnamed,
            &[("a", "d", false), ("b", "e", true)],
            no_default,
            "cannot find default snapshot class",
        ),
        ("one default", &unnamed, &[("a", "d", true), ("b", "e", true), ("c", "d", false)], "", ""),
        (
            "two defaults",
            &unnamed,
            &[("b", "d", true), ("a", "d", true)],
            no_default,
            "2 default snapshot classes were found: a, b",
        ),
    ] {
        let (given, message) = refused(its.clone(), Some(json!({})), Some(json!({})), classes);
        assert_eq!(given, reason, "{name}");
        assert!(message.contains(text), "{name}: {message}");
    }
}

#[test]
fn where_there_is_a_snapshotter_on_every_node_a_content_is_labelled_with_one_that_its_volume_is_bound_to() {
    let affinity = json!({ "required": { "nodeSelectorTerms": [
        { "matchExpressions": [{ "key": "zone", "operator": "In", "values": ["b"] }] },
    ] } });
    let (snapshot, claim) = (snapshot(json!({})), claim(json!({})));
    let classes = [class_named("a", "d", false)];
    let nodes = [("n3", "b"), ("n1", "a"), ("n2", "b")].map(|(name, zone)| {
        let node = json!({ "metadata": { "name": name, "labels": { "zone": zone } } });
        Arc::new(serde_json::from_value::<Node>(node).unwrap())
    });
    let label = |affinity: Value, nodes: Option<&[Arc<Node>]>| {
        let volume = volume(json!({ "spec": { "nodeAffinity": affinity } }));
        let (claim, volume) = (Some(&claim), Some(&volume));
        let inputs =
            ContentInputs { snapshot: &snapshot, claim, volume, classes: &classes, keep_mode: true, nodes };
        content(&inputs).unwrap().labels().get("snapshot.storage.kubernetes.io/managed-by").cloned()
    };
    assert_eq!(label(affinity.clone(), Some(&nodes)).as_deref(), Some("n2"));
    assert_eq!(label(affinity.clone(), None), None, "not asked for");
    assert_eq!(label(Value::Null, Some(&nodes)), None, "the volume has no topology");
    assert_eq!(label(affinity, Some(&nodes[1..2])), None, "no node is there");
}
