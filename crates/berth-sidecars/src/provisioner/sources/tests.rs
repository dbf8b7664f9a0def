//! What a claim may be made from, row by row.

use serde_json::{Value, json};

use super::*;

mod grants;

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
        let change = [("/spec/dataSourceRef/apiGroup", group), ("/spec/dataSourceRef/kind", kind.into())];
        Source::of(&claim(&change), false).unwrap()
    };
    assert_eq!(kind(Value::Null, "PersistentVolumeClaim"), Some(Source::Claim(Key::new("ns", "o"))));
    assert_eq!(kind(SNAPSHOT_GROUP.into(), "VolumeSnapshot"), Some(Source::Snapshot(Key::new("ns", "o"))));
    assert_eq!(kind("populator.example.com".into(), "Thing"), Some(Source::Foreign));
    assert_eq!(Source::of(&claim(&[("/spec/dataSourceRef", Value::Null)]), false).unwrap(), None);
    let nameless = Source::of(&claim(&[("/spec/dataSourceRef/name", "".into())]), false);
    assert!(nameless.unwrap_err().to_string().contains("has no name"));
}

#[test]
fn a_source_in_another_namespace_needs_the_gate() {
    let elsewhere = claim(&[("/spec/dataSourceRef/namespace", "other".into())]);
    let refused = Source::of(&elsewhere, false).unwrap_err().to_string();
    assert!(refused.contains("CrossNamespaceVolumeDataSource"), "{refused}");
    assert_eq!(Source::of(&elsewhere, true).unwrap(), Some(Source::Claim(Key::new("other", "o"))));
    let here = claim(&[("/spec/dataSourceRef/namespace", "ns".into())]);
    assert_eq!(Source::of(&here, false).unwrap(), Some(Source::Claim(Key::new("ns", "o"))));
}

#[test]
fn a_claim_is_restored_only_from_a_snapshot_that_is_ready_and_ours() {
    let snapshot = json!({
        "metadata": { "name": "s", "namespace": "ns", "uid": "u", "deletionTimestamp": null, "finalizers": [] },
        "spec": { "source": {} },
        "status": { "boundVolumeSnapshotContentName": "sc", "readyToUse": true, "restoreSize": "1Gi" },
    });
    let content = json!({
        "metadata": { "name": "sc", "annotations": {} },
        "spec": { "driver": DRIVER, "sourceVolumeMode": "Filesystem", "deletionPolicy": "Delete", "source": {},
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

#[test]
fn a_source_is_needed_while_a_claim_waits_for_its_volume_or_may_have_one_in_the_making() {
    let pending = json!({
        "metadata": { "name": "c", "namespace": "ns", "deletionTimestamp": null, "finalizers": [] },
        "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": "o" }, "dataSourceRef": null },
        "status": { "phase": "Pending" },
    });
    let needed = |change: &[(&str, Value)]| Source::needed(&of(pending.clone(), change));
    let source = |namespace: &str| Some(Source::Claim(Key::new(namespace, "o")));
    let deleting = ("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"));
    let with_finalizer = ("/metadata/finalizers", json!([berth_core::names::creating(DRIVER)]));
    let bound = ("/status/phase", json!("Bound"));
    assert_eq!(needed(&[]), source("ns"));
    assert_eq!(needed(&[("/status", Value::Null)]), source("ns"));
    assert_eq!(needed(std::slice::from_ref(&bound)), None);
    assert_eq!(needed(std::slice::from_ref(&deleting)), None);
    assert_eq!(needed(&[deleting, with_finalizer.clone()]), source("ns"));
    assert_eq!(needed(&[bound, with_finalizer]), source("ns"));
    let elsewhere = json!({ "kind": "PersistentVolumeClaim", "name": "o", "namespace": "other" });
    assert_eq!(needed(&[("/spec/dataSourceRef", elsewhere)]), source("other"));
}

#[test]
fn a_clone_that_was_begun_is_gone_on_with_though_its_source_is_being_deleted() {
    let source = json!({
        "metadata": { "name": "o", "namespace": "ns", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": [CLONING_PROTECTION] },
        "spec": { "storageClassName": "any", "volumeName": "v" },
        "status": { "phase": "Bound" },
    });
    let volume: PersistentVolume = of(
        json!({
            "metadata": { "name": "v" },
            "spec": { "capacity": { "storage": "1Gi" }, "csi": { "driver": DRIVER, "volumeHandle": "h" },
                "claimRef": { "name": "o", "namespace": "ns", "uid": "u" } },
            "status": { "phase": "Bound" },
        }),
        &[],
    );
    let mut claim = claim(&[]);
    let check = |claim: &PersistentVolumeClaim, change: &[(&str, Value)]| {
        cloneable(claim, &of(source.clone(), change), Some(&volume), DRIVER).is_ok()
    };
    assert!(!check(&claim, &[]), "a new one comes too late");
    finalizers::add(&mut claim, &berth_core::names::creating(DRIVER));
    assert!(check(&claim, &[]));
    assert!(!check(&claim, &[("/metadata/finalizers", json!([]))]), "the source may be gone in a moment");
}
