//! What a snapshot tells, row by row.

use serde_json::{Value, json};

use super::*;

fn content(status: &Value) -> VolumeSnapshotContent {
    serde_json::from_value(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotContent",
        "metadata": { "name": "c" },
        "spec": { "driver": "d", "deletionPolicy": "Delete", "source": {}, "volumeSnapshotRef": {} },
        "status": status,
    }))
    .unwrap()
}

#[test]
fn the_status_of_a_snapshot_follows_its_content() {
    let nothing = json!({ "boundVolumeSnapshotContentName": "c", "readyToUse": false });
    let taken = json!({ "snapshotHandle": "h", "creationTime": 7_900_000_000_i64, "restoreSize": 1024, "readyToUse": true });
    let status_of_content = json!({
        "boundVolumeSnapshotContentName": "c", "readyToUse": true,
        "creationTime": "1970-01-01T00:00:07Z", "restoreSize": "1Ki",
    });
    for (name, before, said, group, expected) in [
        ("nothing yet", json!(null), json!(null), None, nothing.clone()),
        ("taken", json!(null), taken.clone(), None, status_of_content.clone()),
        ("taken, once more", status_of_content.clone(), taken.clone(), None, status_of_content.clone()),
        (
            "failed",
            nothing.clone(),
            json!({ "error": { "message": "no", "time": "2026-01-02T03:04:05Z" }, "readyToUse": false }),
            None,
            json!({
                "boundVolumeSnapshotContentName": "c", "readyToUse": false,
                "error": { "message": "no", "time": "2026-01-02T03:04:05Z" },
            }),
        ),
        (
            "an error of the past",
            json!({ "readyToUse": false, "error": { "message": "VolumeSnapshotContent is missing" } }),
            taken.clone(),
            None,
            status_of_content.clone(),
        ),
        (
            "a size of nothing is replaced",
            json!({ "boundVolumeSnapshotContentName": "c", "restoreSize": "0" }),
            taken.clone(),
            None,
            status_of_content.clone(),
        ),
        (
            "what is known stays",
            json!({ "boundVolumeSnapshotContentName": "b", "restoreSize": "3", "creationTime": "1970-01-01T00:00:01Z" }),
            taken.clone(),
            None,
            json!({
                "boundVolumeSnapshotContentName": "b", "readyToUse": true,
                "creationTime": "1970-01-01T00:00:01Z", "restoreSize": "3",
            }),
        ),
        (
            "a member",
            nothing,
            taken,
            Some("g"),
            json!({
                "boundVolumeSnapshotContentName": "c", "readyToUse": true, "volumeGroupSnapshotName": "g",
                "creationTime": "1970-01-01T00:00:07Z", "restoreSize": "1Ki",
            }),
        ),
    ] {
        let before: Option<VolumeSnapshotStatus> = serde_json::from_value(before).unwrap();
        let after = of_snapshot(before.as_ref(), "c", &content(&said), group);
        assert_eq!(serde_json::to_value(&after).unwrap(), expected, "{name}");
    }
}

#[test]
fn a_status_that_came_back_from_the_api_server_is_the_same_status() {
    let said = json!({ "creationTime": 7_900_000_000_i64, "readyToUse": true, "snapshotHandle": "h" });
    let first = of_snapshot(None, "c", &content(&said), None);
    let stored: VolumeSnapshotStatus = serde_json::from_value(serde_json::to_value(&first).unwrap()).unwrap();
    assert_eq!(stored, first);
    assert_eq!(of_snapshot(Some(&stored), "c", &content(&said), None), stored, "so nothing is written again");
}
