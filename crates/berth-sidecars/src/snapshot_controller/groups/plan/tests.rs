//! What comes next for a group, row by row.

use serde_json::{Value, json};

use super::*;
use crate::snapshots::tests::merge;

const GOING: &str = "2026-01-02T03:04:05Z";
const KEPT: &str = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-bound-protection";

fn group(change: Value) -> VolumeGroupSnapshot {
    let mut object = json!({
        "apiVersion": "groupsnapshot.storage.k8s.io/v1",
        "kind": "VolumeGroupSnapshot",
        "metadata": { "name": "g", "namespace": "n", "uid": "u", "finalizers": [KEPT] },
        "spec": { "source": { "selector": { "matchLabels": { "a": "b" } } } },
    });
    merge(&mut object, change);
    serde_json::from_value(object).unwrap()
}

fn content(change: Value) -> VolumeGroupSnapshotContent {
    let mut object = json!({
        "apiVersion": "groupsnapshot.storage.k8s.io/v1",
        "kind": "VolumeGroupSnapshotContent",
        "metadata": { "name": "groupsnapcontent-u", "annotations": {} },
        "spec": {
            "driver": "d",
            "deletionPolicy": "Delete",
            "source": { "volumeHandles": ["v", "w"] },
            "volumeGroupSnapshotRef": { "name": "g", "namespace": "n", "uid": "u" },
        },
    });
    merge(&mut object, change);
    serde_json::from_value(object).unwrap()
}

fn words(steps: Vec<Step>) -> Vec<String> {
    let word = |step| match step {
        Step::Status(status) => format!("status {}", status.ready_to_use.unwrap()),
        Step::Fail(reason, _) => format!("fail {reason}"),
        Step::Pending(_) => "pending".to_owned(),
        Step::Protect(_) => "protect".to_owned(),
        Step::Release(_) => "release".to_owned(),
        Step::Group(step) => format!("{step:?}").to_lowercase(),
        other => format!("{other:?}").to_lowercase(),
    };
    steps.into_iter().map(word).collect()
}

fn planned(of: Value, its: Option<Value>, restoring: Option<&str>, has_members: bool) -> Vec<String> {
    let (group, content) = (group(of), its.map(content));
    words(plan(&ObservedGroup { group: &group, content: content.as_ref(), restoring, has_members }))
}

#[test]
fn groups_are_created_bound_and_reported_after_their_members_are_made() {
    let given = json!({ "spec": { "source": { "selector": null, "volumeGroupSnapshotContentName": "groupsnapcontent-u" } } });
    let existing = json!({ "spec": {
        "source": { "volumeHandles": null, "groupSnapshotHandles": { "volumeGroupSnapshotHandle": "gh", "volumeSnapshotHandles": ["h"] } },
        "volumeGroupSnapshotRef": { "uid": null },
    } });
    let ready = json!({ "status": { "boundVolumeGroupSnapshotContentName": "groupsnapcontent-u", "readyToUse": true } });
    let taken = json!({ "status": {
        "volumeGroupSnapshotHandle": "gh", "readyToUse": true,
        "volumeSnapshotInfoList": [{ "volumeHandle": "v", "snapshotHandle": "h" }],
    } });
    let another = json!({ "spec": { "volumeGroupSnapshotRef": { "uid": "x" } } });
    for (name, of, its, expected) in [
        ("new", json!({ "metadata": { "finalizers": [] } }), None, vec!["protect", "create"]),
        ("kept", json!({}), None, vec!["create"]),
        ("with a content", json!({}), Some(json!({})), vec!["status false"]),
        ("taken", json!({}), Some(taken), vec!["members", "status true"]),
        ("ready", ready.clone(), Some(json!({})), vec![]),
        ("ready, its content gone", ready.clone(), None, vec!["fail GroupSnapshotContentMissing"]),
        ("ready, its content another's", ready, Some(another.clone()), vec!["fail GroupSnapshotMisbound"]),
        ("the content is another's", json!({}), Some(another), vec!["fail GroupSnapshotContentMisbound"]),
        ("given", given.clone(), Some(existing.clone()), vec!["bind", "status false"]),
        ("given, its content missing", given.clone(), None, vec!["fail GroupSnapshotContentMissing"]),
        ("given one of volumes", given, Some(json!({})), vec!["fail GroupSnapshotContentMismatch"]),
        (
            "of claims, and the content is given",
            json!({}),
            Some(existing),
            vec!["fail GroupSnapshotContentMismatch"],
        ),
        (
            "no source",
            json!({ "spec": { "source": { "selector": null } } }),
            None,
            vec!["fail GroupSnapshotValidationError"],
        ),
        (
            "two sources",
            json!({ "spec": { "source": { "volumeGroupSnapshotContentName": "x" } } }),
            None,
            vec!["fail GroupSnapshotValidationError"],
        ),
    ] {
        assert_eq!(planned(of, its, None, false), expected, "{name}");
    }
}

#[test]
fn deletion_of_a_group_follows_its_contents_policy_and_takes_the_members_along() {
    let going = json!({ "metadata": { "deletionTimestamp": GOING } });
    let leaving = json!({ "metadata": { "deletionTimestamp": GOING, "annotations": {
        "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted": "yes",
    } } });
    let retained = json!({ "spec": { "deletionPolicy": "Retain" } });
    let another = json!({ "spec": { "volumeGroupSnapshotRef": { "uid": "x" } } });
    let unkept = json!({ "metadata": { "deletionTimestamp": GOING, "finalizers": [] } });
    for (name, of, its, restoring, members, expected) in [
        (
            "Delete",
            going.clone(),
            Some(json!({})),
            None,
            true,
            vec!["markcontent", "deletecontent", "deletemembers"],
        ),
        ("Delete, under way", going.clone(), Some(leaving), None, false, vec![]),
        ("Delete, done", going.clone(), None, None, false, vec!["release"]),
        (
            "Retain",
            going.clone(),
            Some(retained),
            None,
            true,
            vec!["markcontent", "deletemembers", "release"],
        ),
        ("another's content", going.clone(), Some(another), None, true, vec!["deletemembers", "release"]),
        ("a member is being restored", going, Some(json!({})), Some("m"), true, vec!["pending"]),
        ("not kept by us", unkept, Some(json!({})), None, true, vec![]),
    ] {
        assert_eq!(planned(of, its, restoring, members), expected, "{name}");
    }
}

#[test]
fn a_content_is_found_by_what_is_bound_given_or_would_be_made() {
    assert_eq!(content_name(&group(json!({}))), "groupsnapcontent-u");
    let given = json!({ "spec": { "source": { "volumeGroupSnapshotContentName": "x" } } });
    assert_eq!(content_name(&group(given)), "x");
    let bound = json!({ "status": { "boundVolumeGroupSnapshotContentName": "y" } });
    assert_eq!(content_name(&group(bound)), "y");
}
