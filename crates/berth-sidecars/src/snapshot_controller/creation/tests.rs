use serde_json::{Value, json};

use super::*;

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

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
    let seen = Seen {
        snapshot: &snapshot,
        claim: Some(&claim),
        volume: Some(&volume),
        classes: &classes,
        keep_mode: true,
    };
    let made = content(&seen).unwrap();
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
    let forgetful = content(&Seen { keep_mode: false, ..seen }).unwrap();
    assert_eq!(forgetful.spec.source_volume_mode, None);
}

#[test]
fn what_stands_in_the_way_of_a_snapshot_is_told_with_upstreams_reason() {
    let classless = json!({ "spec": { "volumeSnapshotClassName": null } });
    let going = json!({ "metadata": { "deletionTimestamp": "2026-01-02T03:04:05Z" } });
    let kept = json!({ "metadata": {
        "deletionTimestamp": "2026-01-02T03:04:05Z",
        "finalizers": ["snapshot.storage.kubernetes.io/pvc-as-source-protection"],
    } });
    let created = "SnapshotContentCreationFailed";
    for (name, its, of, on, classes, expected) in [
        (
            "no claim",
            json!({}),
            None,
            Some(json!({})),
            vec![("a", "d", false)],
            Some((created, "the PVC c does not exist")),
        ),
        (
            "unbound",
            json!({}),
            Some(json!({ "status": { "phase": "Pending" } })),
            Some(json!({})),
            vec![("a", "d", false)],
            Some((created, "the PVC c is not yet bound to a PV")),
        ),
        (
            "no volume",
            json!({}),
            Some(json!({})),
            None,
            vec![("a", "d", false)],
            Some((created, "does not exist")),
        ),
        (
            "another's volume",
            json!({}),
            Some(json!({})),
            Some(json!({ "spec": { "claimRef": { "uid": "x" } } })),
            vec![("a", "d", false)],
            Some((created, "bound to another claim")),
        ),
        (
            "no CSI volume",
            json!({}),
            Some(json!({})),
            Some(json!({ "spec": { "csi": null } })),
            vec![("a", "d", false)],
            Some((created, "cannot find CSI PersistentVolumeSource")),
        ),
        (
            "a claim that goes",
            json!({}),
            Some(going),
            Some(json!({})),
            vec![("a", "d", false)],
            Some((created, "because it is being deleted")),
        ),
        (
            "a claim that goes but is kept already",
            json!({}),
            Some(kept),
            Some(json!({})),
            vec![("a", "d", false)],
            None,
        ),
        (
            "no such class",
            json!({}),
            Some(json!({})),
            Some(json!({})),
            vec![("b", "d", true)],
            Some(("GetSnapshotClassFailed", "\"a\" does not exist")),
        ),
        (
            "another driver's class",
            json!({}),
            Some(json!({})),
            Some(json!({})),
            vec![("a", "e", false)],
            Some((created, "VolumeSnapshotClass a is for driver e")),
        ),
        (
            "no default class",
            classless.clone(),
            Some(json!({})),
            Some(json!({})),
            vec![("a", "d", false), ("b", "e", true)],
            Some(("SetDefaultSnapshotClassFailed", "cannot find default snapshot class")),
        ),
        (
            "one default class",
            classless.clone(),
            Some(json!({})),
            Some(json!({})),
            vec![("a", "d", true), ("b", "e", true), ("c", "d", false)],
            None,
        ),
        (
            "two default classes",
            classless,
            Some(json!({})),
            Some(json!({})),
            vec![("b", "d", true), ("a", "d", true)],
            Some(("SetDefaultSnapshotClassFailed", "2 default snapshot classes were found: a, b")),
        ),
    ] {
        let (snapshot, claim, volume) = (snapshot(its), of.map(claim), on.map(volume));
        let classes: Vec<_> =
            classes.into_iter().map(|(name, driver, default)| class_named(name, driver, default)).collect();
        let made = content(&Seen {
            snapshot: &snapshot,
            claim: claim.as_ref(),
            volume: volume.as_ref(),
            classes: &classes,
            keep_mode: true,
        });
        match (made, expected) {
            (Ok(_), None) => {}
            (Err(refusal), Some((reason, text))) => {
                assert_eq!(refusal.reason, reason, "{name}");
                assert!(refusal.message.contains(text), "{name}: {}", refusal.message);
            }
            (made, _) => panic!("{name}: {made:?}"),
        }
    }
}
