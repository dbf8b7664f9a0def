//! What a claim may be made from, row by row.

use serde_json::{Value, json};

use super::*;

const DRIVER: &str = "d";

fn of<K: serde::de::DeserializeOwned>(mut object: Value, change: &[(&str, Value)]) -> K {
    for (path, value) in change {
        *object.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn claim(change: &[(&str, Value)]) -> PersistentVolumeClaim {
    let spec = json!({ "resources": { "requests": { "storage": "2Gi" } }, "volumeMode": "Filesystem",
        "dataSourceRef": { "apiGroup": null, "kind": "PersistentVolumeClaim", "name": "o", "namespace": null } });
    of(json!({ "metadata": { "name": "c", "namespace": "ns" }, "spec": spec }), change)
}

#[test]
fn the_source_is_a_snapshot_a_claim_a_populators_or_refused() {
    let kind = |group: Value, kind: &str| {
        Source::of(&claim(&[
            ("/spec/dataSourceRef/apiGroup", group),
            ("/spec/dataSourceRef/kind", kind.into()),
        ]))
        .unwrap()
    };
    assert_eq!(kind(Value::Null, "PersistentVolumeClaim"), Some(Source::Claim("o".into())));
    assert_eq!(kind(SNAPSHOT_GROUP.into(), "VolumeSnapshot"), Some(Source::Snapshot("o".into())));
    assert_eq!(kind("populator.example.com".into(), "Thing"), Some(Source::Foreign));
    assert_eq!(Source::of(&claim(&[("/spec/dataSourceRef", Value::Null)])).unwrap(), None);
    assert!(Source::of(&claim(&[("/spec/dataSourceRef/namespace", "other".into())])).is_err());
    assert!(Source::of(&claim(&[("/spec/dataSourceRef/namespace", "ns".into())])).is_ok());
}

#[test]
fn a_claim_is_restored_only_from_a_snapshot_that_is_ready_and_ours() {
    let snapshot = json!({
        "metadata": { "name": "s", "namespace": "ns", "uid": "u", "deletionTimestamp": null, "finalizers": [] },
        "spec": {},
        "status": { "boundVolumeSnapshotContentName": "sc", "readyToUse": true, "restoreSize": "1Gi" },
    });
    let content = json!({
        "metadata": { "name": "sc", "annotations": {} },
        "spec": { "driver": DRIVER, "sourceVolumeMode": "Filesystem",
            "volumeSnapshotRef": { "name": "s", "namespace": "ns", "uid": "u" } },
        "status": { "snapshotHandle": "h" },
    });
    let now = || json!("2026-01-01T00:00:00Z");
    let check = |of_snapshot: &[(&str, Value)], of_content: &[(&str, Value)], prevent: bool| {
        let content: VolumeSnapshotContent = of(content.clone(), of_content);
        restorable(&claim(&[]), &of(snapshot.clone(), of_snapshot), Some(&content), DRIVER, prevent)
            .map_err(|failure| failure.to_string())
    };
    assert_eq!(check(&[], &[], true).unwrap(), "h");
    let protected = json!([SNAPSHOT_SOURCE_PROTECTION]);
    assert!(
        check(&[("/metadata/deletionTimestamp", now()), ("/metadata/finalizers", protected)], &[], true)
            .is_ok()
    );
    let block = ("/spec/sourceVolumeMode", json!("Block"));
    assert!(check(&[], std::slice::from_ref(&block), false).is_ok(), "the check is off");
    let allowed = ("/metadata/annotations", json!({ ALLOW_MODE_CHANGE: "true" }));
    assert!(check(&[], &[block.clone(), allowed], true).is_ok());
    for (refused, expected) in [
        (check(&[("/metadata/deletionTimestamp", now())], &[], true), "being deleted"),
        (check(&[("/status/boundVolumeSnapshotContentName", Value::Null)], &[], true), "not bound"),
        (check(&[("/status/readyToUse", json!(false))], &[], true), "not Ready"),
        (check(&[("/status/restoreSize", json!("3Gi"))], &[], true), "less than the size"),
        (check(&[], &[("/spec/volumeSnapshotRef/uid", json!("x"))], true), "different snapshot"),
        (check(&[], &[("/spec/volumeSnapshotRef/namespace", json!("x"))], true), "different snapshot"),
        (check(&[], &[("/spec/driver", json!("x"))], true), "taken by driver"),
        (check(&[], &[("/status/snapshotHandle", Value::Null)], true), "no snapshot handle"),
        (check(&[], &[block], true), "modifies the mode"),
    ] {
        let text = refused.unwrap_err();
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let gone = restorable(&claim(&[]), &of(snapshot, &[]), None, DRIVER, true).unwrap_err().to_string();
    assert!(gone.contains("does not exist"), "{gone}");
}

#[test]
fn a_claim_is_cloned_only_from_one_that_is_bound_ours_and_not_larger() {
    let source = json!({
        "metadata": { "name": "o", "namespace": "ns", "uid": "u", "deletionTimestamp": null },
        "spec": { "storageClassName": "other", "volumeName": "v", "volumeMode": null },
        "status": { "phase": "Bound" },
    });
    let volume = json!({
        "metadata": { "name": "v" },
        "spec": { "capacity": { "storage": "1Gi" }, "csi": { "driver": DRIVER, "volumeHandle": "h" },
            "claimRef": { "name": "o", "namespace": "ns", "uid": "u" } },
        "status": { "phase": "Bound" },
    });
    let check = |of_source: &[(&str, Value)], of_volume: &[(&str, Value)]| {
        let volume: PersistentVolume = of(volume.clone(), of_volume);
        cloneable(&claim(&[]), &of(source.clone(), of_source), Some(&volume), DRIVER)
            .map_err(|failure| failure.to_string())
    };
    assert_eq!(check(&[], &[]).unwrap(), "h", "another class is allowed");
    for (refused, expected) in [
        (check(&[("/status/phase", json!("Pending"))], &[]), "not in Bound phase"),
        (check(&[("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"))], &[]), "being deleted"),
        (check(&[("/spec/storageClassName", json!(""))], &[]), "no StorageClass"),
        (check(&[("/spec/volumeMode", json!("Block"))], &[]), "another volume mode"),
        (check(&[], &[("/spec/csi", Value::Null)]), "no CSI volume"),
        (check(&[], &[("/spec/csi/driver", json!("x"))]), "belongs to driver"),
        (check(&[], &[("/status/phase", json!("Released"))]), "its volume is not Bound"),
        (check(&[], &[("/spec/claimRef/uid", json!("x"))]), "different claim"),
        (check(&[], &[("/spec/capacity/storage", json!("3Gi"))]), "requests less"),
    ] {
        let text = refused.unwrap_err();
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let gone = cloneable(&claim(&[]), &of(source, &[]), None, DRIVER).unwrap_err().to_string();
    assert!(gone.contains("does not exist"), "{gone}");
}
