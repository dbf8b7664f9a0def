//! What comes next for a snapshot, row by row.

use serde_json::{Value, json};

use super::*;
use crate::snapshots::tests::merge;

const GOING: &str = "2026-01-02T03:04:05Z";
const SOURCE: &str = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection";
const BOUND: &str = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection";
const IN_GROUP: &str = "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection";

/// A snapshot of a claim that is kept in every way.
fn snapshot(change: Value) -> VolumeSnapshot {
    let mut object = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": { "name": "s", "namespace": "n", "uid": "u", "finalizers": [SOURCE, BOUND] },
        "spec": { "source": { "persistentVolumeClaimName": "c" } },
    });
    merge(&mut object, change);
    serde_json::from_value(object).unwrap()
}

/// The content of that snapshot; policy Delete.
fn content(change: Value) -> VolumeSnapshotContent {
    let mut object = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotContent",
        "metadata": { "name": "snapcontent-u", "annotations": {} },
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

fn given() -> Value {
    json!({ "spec": { "source": { "persistentVolumeClaimName": null, "volumeSnapshotContentName": "snapcontent-u" } } })
}

fn existing() -> Value {
    json!({ "spec": { "source": { "volumeHandle": null, "snapshotHandle": "h" } } })
}

fn both(mut first: Value, second: Value) -> Value {
    merge(&mut first, second);
    first
}

/// What is planned, in a word each.
fn words(steps: Vec<Step>) -> Vec<String> {
    let word = |step| match step {
        Step::Protect(added) => format!("protect {}", added.len()),
        Step::Release(removed) => {
            let short = |name: &&str| {
                name.trim_start_matches("snapshot.storage.kubernetes.io/volumesnapshot-").to_owned()
            };
            format!("release {}", removed.iter().map(short).collect::<Vec<_>>().join(" "))
        }
        Step::Create => "create".to_owned(),
        Step::Bind => "bind".to_owned(),
        Step::Status(status) => format!("status {}", status.ready_to_use.unwrap()),
        Step::Group(_) => "own".to_owned(),
        Step::Fail(reason, _) => format!("fail {reason}"),
        Step::Pending(_) => "pending".to_owned(),
        Step::MarkContent => "mark".to_owned(),
        Step::DeleteContent => "delete".to_owned(),
    };
    steps.into_iter().map(word).collect()
}

fn planned(snapshot: Value, content_change: Option<Value>, group: Group<'_>, restoring: bool) -> Vec<String> {
    let (snapshot, content) = (self::snapshot(snapshot), content_change.map(content));
    let handle =
        content.as_ref().and_then(|content| content.status.as_ref()?.volume_group_snapshot_handle.clone());
    let content_group = if handle.is_some() { group } else { Group::None };
    words(plan(&ObservedSnapshot {
        snapshot: &snapshot,
        content: content.as_ref(),
        group,
        content_group,
        restoring,
    }))
}

#[test]
fn snapshots_of_claims_are_created_bound_and_reported() {
    let written =
        json!({ "status": { "boundVolumeSnapshotContentName": "snapcontent-u", "readyToUse": false } });
    let ready =
        json!({ "status": { "boundVolumeSnapshotContentName": "snapcontent-u", "readyToUse": true } });
    for (name, snapshot, content, expected) in [
        ("new", json!({ "metadata": { "finalizers": [] } }), None, vec!["protect 1", "create"]),
        ("kept", json!({}), None, vec!["create"]),
        (
            "with a content",
            json!({ "metadata": { "finalizers": [SOURCE] } }),
            Some(json!({})),
            vec!["protect 1", "status false"],
        ),
        (
            "retained",
            json!({ "metadata": { "finalizers": [SOURCE] } }),
            Some(json!({ "spec": { "deletionPolicy": "Retain" } })),
            vec!["status false"],
        ),
        ("written, nothing new", written.clone(), Some(json!({})), vec![]),
        (
            "taken",
            written.clone(),
            Some(json!({ "status": { "readyToUse": true, "snapshotHandle": "h" } })),
            vec!["status true"],
        ),
        (
            "failed",
            written,
            Some(json!({ "status": { "error": { "message": "no" } } })),
            vec!["status false"],
        ),
        ("ready", ready.clone(), Some(json!({})), vec![]),
        ("ready, its content gone", ready.clone(), None, vec!["fail SnapshotContentMissing"]),
        (
            "ready, its content another's",
            ready,
            Some(json!({ "spec": { "volumeSnapshotRef": { "uid": "x" } } })),
            vec!["fail SnapshotMisbound"],
        ),
        (
            "a content of that name is another's",
            json!({}),
            Some(json!({ "spec": { "volumeSnapshotRef": { "uid": "x" } } })),
            vec!["fail SnapshotContentMisbound"],
        ),
        (
            "a content of that name is nobody's",
            json!({}),
            Some(json!({ "spec": { "volumeSnapshotRef": { "uid": null } } })),
            vec!["fail SnapshotContentMisbound"],
        ),
        (
            "a content of that name is given",
            json!({}),
            Some(existing()),
            vec!["fail SnapshotContentMismatch"],
        ),
        (
            "no source",
            json!({ "spec": { "source": { "persistentVolumeClaimName": null } } }),
            None,
            vec!["fail SnapshotValidationError"],
        ),
        (
            "two sources",
            json!({ "spec": { "source": { "volumeSnapshotContentName": "x" } } }),
            None,
            vec!["fail SnapshotValidationError"],
        ),
    ] {
        assert_eq!(planned(snapshot, content, Group::None, false), expected, "{name}");
    }
}

#[test]
fn given_snapshots_are_bound_both_ways() {
    let free = both(existing(), json!({ "spec": { "volumeSnapshotRef": { "uid": null } } }));
    let classed = both(given(), json!({ "spec": { "volumeSnapshotClassName": "a" } }));
    for (name, snapshot, content, expected) in [
        ("its content is missing", given(), None, vec!["fail SnapshotContentMissing"]),
        ("free", given(), Some(free.clone()), vec!["bind", "status false"]),
        ("bound", given(), Some(existing()), vec!["status false"]),
        ("bound without a class", classed.clone(), Some(existing()), vec!["bind", "status false"]),
        (
            "bound with a class",
            classed,
            Some(both(existing(), json!({ "spec": { "volumeSnapshotClassName": "b" } }))),
            vec!["status false"],
        ),
        (
            "ready",
            given(),
            Some(both(existing(), json!({ "status": { "readyToUse": true } }))),
            vec!["status true"],
        ),
        ("of a volume", given(), Some(json!({})), vec!["fail SnapshotContentMismatch"]),
        (
            "for another name",
            given(),
            Some(both(free.clone(), json!({ "spec": { "volumeSnapshotRef": { "name": "x" } } }))),
            vec!["fail SnapshotContentMisbound"],
        ),
        (
            "for another namespace",
            given(),
            Some(both(free, json!({ "spec": { "volumeSnapshotRef": { "namespace": "x" } } }))),
            vec!["fail SnapshotContentMisbound"],
        ),
        (
            "another's",
            given(),
            Some(both(existing(), json!({ "spec": { "volumeSnapshotRef": { "uid": "x" } } }))),
            vec!["fail SnapshotContentMisbound"],
        ),
    ] {
        assert_eq!(planned(snapshot, content, Group::None, false), expected, "{name}");
    }
}

#[test]
fn deletion_follows_the_contents_policy() {
    let going = json!({ "metadata": { "deletionTimestamp": GOING } });
    let marked = json!({ "metadata": { "annotations": {
        "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes",
    } } });
    let retained = json!({ "spec": { "deletionPolicy": "Retain" } });
    let leaving = both(marked.clone(), going.clone());
    let only_bound = json!({ "metadata": { "deletionTimestamp": GOING, "finalizers": [BOUND] } });
    let unkept = json!({ "metadata": { "deletionTimestamp": GOING, "finalizers": [] } });
    let all = "release as-source-protection bound-protection";
    for (name, snapshot, content, restoring, expected) in [
        (
            "Delete, dynamic",
            going.clone(),
            Some(json!({})),
            false,
            vec!["mark", "delete", "release as-source-protection"],
        ),
        (
            "Delete, dynamic, marked",
            going.clone(),
            Some(marked),
            false,
            vec!["delete", "release as-source-protection"],
        ),
        ("Delete, dynamic, its content leaves", only_bound.clone(), Some(leaving), false, vec![]),
        ("Delete, dynamic, its content is gone", only_bound, None, false, vec!["release bound-protection"]),
        (
            "Delete, given",
            both(going.clone(), given()),
            Some(existing()),
            false,
            vec!["mark", "delete", "release as-source-protection"],
        ),
        (
            "Delete, dynamic, deleted before it was kept",
            json!({ "metadata": { "deletionTimestamp": GOING, "finalizers": [SOURCE] } }),
            Some(json!({})),
            false,
            vec!["mark", "delete"],
        ),
        ("Retain, dynamic", going.clone(), Some(retained.clone()), false, vec!["mark", all]),
        (
            "Retain, given",
            both(going.clone(), given()),
            Some(both(existing(), retained)),
            false,
            vec!["mark", all],
        ),
        (
            "given, never bound",
            both(going.clone(), given()),
            Some(both(existing(), json!({ "spec": { "volumeSnapshotRef": { "uid": null } } }))),
            false,
            vec![all],
        ),
        (
            "the content is another's",
            going.clone(),
            Some(json!({ "spec": { "volumeSnapshotRef": { "uid": "x" } } })),
            false,
            vec![all],
        ),
        ("no content", going.clone(), None, false, vec![all]),
        ("being restored", going.clone(), Some(json!({})), true, vec!["pending"]),
        ("being restored without a content", going, None, true, vec![all]),
        ("not kept by us", unkept, Some(json!({})), false, vec![]),
    ] {
        assert_eq!(planned(snapshot, content, Group::None, restoring), expected, "{name}");
    }
}

#[test]
fn members_wait_for_their_group_and_go_with_it() {
    let owner = json!({ "metadata": { "ownerReferences": [{
        "apiVersion": "groupsnapshot.storage.k8s.io/v1beta2", "kind": "VolumeGroupSnapshot", "name": "g", "uid": "gu",
    }] } });
    let going = both(
        owner.clone(),
        json!({ "metadata": {
        "deletionTimestamp": GOING, "finalizers": [SOURCE, BOUND, IN_GROUP],
    } }),
    );
    let taken =
        json!({ "status": { "snapshotHandle": "h", "volumeGroupSnapshotHandle": "gh", "readyToUse": true } });
    let named = json!({ "status": {
        "boundVolumeSnapshotContentName": "snapcontent-u", "readyToUse": true, "volumeGroupSnapshotName": "g",
    } });
    let live = Group::Live("g");
    for (name, snapshot, content, group, expected) in [
        ("before its content is made", owner.clone(), None, live, vec![]),
        ("taken", owner.clone(), Some(taken.clone()), live, vec!["status true"]),
        ("taken, groups not known yet", owner.clone(), Some(taken.clone()), Group::Unknown, vec![]),
        ("taken, its group gone", owner, Some(taken.clone()), Group::Gone, vec![]),
        ("given and ready without an owner", named, Some(taken.clone()), live, vec!["own"]),
        ("deleted alone", going.clone(), Some(taken.clone()), live, vec!["pending"]),
        ("deleted with its group", going.clone(), Some(taken.clone()), Group::Leaving, vec![]),
        ("deleted, groups not known yet", going.clone(), Some(taken.clone()), Group::Unknown, vec![]),
        (
            "deleted after its group",
            going.clone(),
            Some(taken),
            Group::Gone,
            vec!["mark", "delete", "release as-source-protection in-group-protection"],
        ),
        (
            "deleted after its group, without a content",
            going,
            None,
            Group::Gone,
            vec!["release as-source-protection bound-protection in-group-protection"],
        ),
    ] {
        assert_eq!(planned(snapshot, content, group, false), expected, "{name}");
    }
}

#[test]
fn a_content_is_found_by_what_is_bound_given_or_would_be_made() {
    assert_eq!(content_name(&snapshot(json!({}))).as_deref(), Some("snapcontent-u"));
    assert_eq!(content_name(&snapshot(given())).as_deref(), Some("snapcontent-u"));
    let bound = json!({ "status": { "boundVolumeSnapshotContentName": "other" } });
    assert_eq!(content_name(&snapshot(bound)).as_deref(), Some("other"));
    let member = json!({ "metadata": { "ownerReferences": [{
        "apiVersion": "groupsnapshot.storage.k8s.io/v1", "kind": "VolumeGroupSnapshot", "name": "g", "uid": "gu",
    }] } });
    assert_eq!(content_name(&snapshot(member.clone())), None, "not made by a group's controller");
    let mut made = snapshot(member);
    made.metadata.name = Some("snapshot-0a1b".to_owned());
    assert_eq!(content_name(&made).as_deref(), Some("snapcontent-0a1b"));
}
