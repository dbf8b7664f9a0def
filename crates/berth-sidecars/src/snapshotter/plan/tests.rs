//! What comes next for a content, row by row.

use serde_json::json;

use super::*;
use crate::snapshots::tests::merge;

/// A content of ours that is bound, kept and of a volume; policy Delete.
fn observed() -> ObservedContent {
    ObservedContent {
        ours: true,
        source: Source::Volume,
        bound: true,
        delete: true,
        deleting: false,
        being_created: false,
        being_deleted: false,
        protected: true,
        has_handle: false,
        grouped: false,
        ready: false,
    }
}

fn taken() -> ObservedContent {
    ObservedContent { has_handle: true, ready: true, ..observed() }
}

#[test]
fn a_content_is_created_checked_or_left_alone_by_its_source_and_status() {
    let given = ObservedContent { source: Source::Handle, ..observed() };
    let member = ObservedContent { source: Source::Member, ..observed() };
    for (name, observed, expected) in [
        ("another driver's", ObservedContent { ours: false, ..observed() }, Plan::Nothing),
        ("new, of a volume", observed(), Plan::Create),
        ("failed, of a volume", ObservedContent { being_created: false, ..observed() }, Plan::Create),
        ("unanswered", ObservedContent { being_created: true, ..observed() }, Plan::Create),
        ("taken, not ready", ObservedContent { has_handle: true, ..observed() }, Plan::Create),
        ("ready", taken(), Plan::Nothing),
        (
            "ready and still annotated",
            ObservedContent { being_created: true, ..taken() },
            Plan::RemoveAnnotation,
        ),
        ("given", given, Plan::Check),
        ("given and not bound", ObservedContent { bound: false, ..given }, Plan::Check),
        ("given and not ready", ObservedContent { has_handle: true, ..given }, Plan::Check),
        ("given and ready", ObservedContent { has_handle: true, ready: true, ..given }, Plan::Nothing),
        ("a member before its group is taken", member, Plan::Nothing),
        ("a member, not ready", ObservedContent { has_handle: true, grouped: true, ..member }, Plan::Check),
        (
            "a member, ready",
            ObservedContent { has_handle: true, grouped: true, ready: true, ..member },
            Plan::Nothing,
        ),
        ("without a source", ObservedContent { source: Source::Invalid, ..observed() }, Plan::Nothing),
        (
            "unwanted before it was begun",
            ObservedContent { being_deleted: true, ..observed() },
            Plan::Nothing,
        ),
        (
            "unwanted but retained",
            ObservedContent { being_deleted: true, delete: false, ..observed() },
            Plan::Create,
        ),
        (
            "unwanted while unanswered",
            ObservedContent { being_deleted: true, being_created: true, ..observed() },
            Plan::Create,
        ),
    ] {
        assert_eq!(plan(observed), expected, "{name}");
    }
}

#[test]
fn a_content_is_deleted_only_when_its_snapshot_is_and_the_driver_has_finally_answered() {
    let going = ObservedContent { deleting: true, ..taken() };
    let wanted_gone = ObservedContent { being_deleted: true, ..going };
    let unbound = ObservedContent { source: Source::Handle, bound: false, ..going };
    for (name, observed, expected) in [
        ("deleted by hand while its snapshot lives", going, Plan::Nothing),
        ("its snapshot is deleted too", wanted_gone, Plan::Delete),
        (
            "unanswered",
            ObservedContent { being_created: true, has_handle: false, ready: false, ..wanted_gone },
            Plan::Create,
        ),
        (
            "answered and still annotated",
            ObservedContent { being_created: true, ..wanted_gone },
            Plan::RemoveAnnotation,
        ),
        ("never taken", ObservedContent { has_handle: false, ready: false, ..wanted_gone }, Plan::Release),
        (
            "never taken, nothing to release",
            ObservedContent { has_handle: false, protected: false, ..wanted_gone },
            Plan::Nothing,
        ),
        ("retained", ObservedContent { delete: false, ..wanted_gone }, Plan::Release),
        (
            "a member, which goes with its group",
            ObservedContent { grouped: true, ..wanted_gone },
            Plan::Release,
        ),
        ("not being deleted itself", ObservedContent { deleting: false, ..wanted_gone }, Plan::Nothing),
        ("given and never bound, policy Delete", unbound, Plan::Delete),
        ("given and never bound, policy Retain", ObservedContent { delete: false, ..unbound }, Plan::Release),
        ("given and never bound, unchecked", ObservedContent { has_handle: false, ..unbound }, Plan::Release),
        (
            "given and never bound, annotated",
            ObservedContent { being_created: true, ..unbound },
            Plan::Delete,
        ),
        ("given and bound, its snapshot lives", ObservedContent { bound: true, ..unbound }, Plan::Nothing),
        (
            "given and bound, its snapshot goes",
            ObservedContent { bound: true, being_deleted: true, ..unbound },
            Plan::Delete,
        ),
        ("another driver's", ObservedContent { ours: false, ..wanted_gone }, Plan::Nothing),
    ] {
        assert_eq!(plan(observed), expected, "{name}");
    }
}

fn content(change: serde_json::Value) -> VolumeSnapshotContent {
    let mut object = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotContent",
        "metadata": { "name": "c", "annotations": {} },
        "spec": {
            "driver": "d",
            "deletionPolicy": "Delete",
            "source": { "volumeHandle": "v" },
            "volumeSnapshotRef": { "name": "s", "namespace": "n", "uid": "u" },
        },
    });
    merge(&mut object, change);
    serde_json::from_value(object).unwrap()
}

#[test]
fn what_matters_is_read_from_the_objects() {
    let bare = ObservedContent { protected: false, ..observed() };
    for (name, change, expected) in [
        ("a volume's", json!({}), bare),
        (
            "unbound",
            json!({ "spec": { "volumeSnapshotRef": { "uid": "" } } }),
            ObservedContent { bound: false, ..bare },
        ),
        (
            "retained",
            json!({ "spec": { "deletionPolicy": "Retain" } }),
            ObservedContent { delete: false, ..bare },
        ),
        ("others'", json!({ "spec": { "driver": "e" } }), ObservedContent { ours: false, ..bare }),
        (
            "given",
            json!({ "spec": { "source": { "volumeHandle": null, "snapshotHandle": "h" } } }),
            ObservedContent { source: Source::Handle, ..bare },
        ),
        (
            "both",
            json!({ "spec": { "source": { "snapshotHandle": "h" } } }),
            ObservedContent { source: Source::Invalid, ..bare },
        ),
        (
            "a member",
            json!({
                "metadata": { "annotations": { "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle": "g" } },
                "status": { "volumeGroupSnapshotHandle": "g", "snapshotHandle": "h" },
            }),
            ObservedContent { source: Source::Member, grouped: true, has_handle: true, ..bare },
        ),
        (
            "annotated",
            json!({ "metadata": { "annotations": {
                "snapshot.storage.kubernetes.io/volumesnapshot-being-created": "yes",
                "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes",
            } } }),
            ObservedContent { being_created: true, being_deleted: true, ..bare },
        ),
        (
            "kept and going",
            json!({ "metadata": {
                "deletionTimestamp": "2026-01-02T03:04:05Z",
                "finalizers": ["snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"],
            } }),
            ObservedContent { deleting: true, protected: true, ..bare },
        ),
        (
            "ready",
            json!({ "status": { "readyToUse": true, "snapshotHandle": "h" } }),
            ObservedContent { protected: false, ..taken() },
        ),
    ] {
        assert_eq!(ObservedContent::content(&content(change), "d"), expected, "{name}");
    }
}

#[test]
fn own_writes_do_not_bring_a_content_back_into_the_queue() {
    let annotated = json!({ "metadata": { "annotations": {
        "snapshot.storage.kubernetes.io/volumesnapshot-being-created": "yes",
    } } });
    let unwanted = json!({ "metadata": { "annotations": {
        "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes",
    } } });
    let grouped = |status: serde_json::Value| {
        json!({
            "metadata": { "annotations": { "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle": "g" } },
            "status": status,
        })
    };
    for (name, before, after, expected) in [
        ("nothing", json!({}), json!({}), false),
        ("the annotation set", json!({}), annotated.clone(), false),
        ("the annotation removed", annotated, json!({}), false),
        ("an error told", json!({}), json!({ "status": { "error": { "message": "m" } } }), false),
        ("taken", json!({}), json!({ "status": { "snapshotHandle": "h", "readyToUse": false } }), false),
        (
            "not ready any more",
            json!({ "status": { "readyToUse": true } }),
            json!({ "status": { "readyToUse": false } }),
            false,
        ),
        (
            "ready",
            json!({ "status": { "readyToUse": false } }),
            json!({ "status": { "readyToUse": true } }),
            true,
        ),
        ("the finalizer", json!({}), json!({ "metadata": { "finalizers": ["f"] } }), false),
        ("a label", json!({}), json!({ "metadata": { "labels": { "a": "b" } } }), false),
        ("unwanted", json!({}), unwanted, true),
        ("deleted", json!({}), json!({ "metadata": { "deletionTimestamp": "2026-01-02T03:04:05Z" } }), true),
        ("another policy", json!({}), json!({ "spec": { "deletionPolicy": "Retain" } }), true),
        ("bound", json!({ "spec": { "volumeSnapshotRef": { "uid": null } } }), json!({}), true),
        ("a member's handle", grouped(json!({})), grouped(json!({ "snapshotHandle": "h" })), true),
    ] {
        let (before, after) = (content(before), content(after));
        let observed = (ObservedContent::content(&before, "d"), ObservedContent::content(&after, "d"));
        assert_eq!(
            matters((&before, observed.0), (&after, observed.1), names::BEING_CREATED),
            expected,
            "{name}"
        );
    }
}
