//! Which claims are kept for their snapshots, row by row.

use serde_json::json;

use super::*;

#[test]
fn a_pending_claim_holds_the_snapshot_that_it_names() {
    let snapshot = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s" });
    let elsewhere = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s", "namespace": "other" });
    for (name, spec, phase, expected) in [
        ("no source", json!({}), "Pending", vec![]),
        ("dataSource", json!({ "dataSource": snapshot }), "Pending", vec![Key::new("n", "s")]),
        ("dataSourceRef", json!({ "dataSourceRef": snapshot }), "Pending", vec![Key::new("n", "s")]),
        (
            "both",
            json!({ "dataSource": snapshot, "dataSourceRef": snapshot }),
            "Pending",
            vec![Key::new("n", "s")],
        ),
        ("another namespace", json!({ "dataSourceRef": elsewhere }), "Pending", vec![Key::new("other", "s")]),
        ("bound", json!({ "dataSource": snapshot }), "Bound", vec![]),
        (
            "a claim",
            json!({ "dataSource": { "kind": "PersistentVolumeClaim", "name": "s" } }),
            "Pending",
            vec![],
        ),
        (
            "no kind of ours",
            json!({ "dataSource": { "apiGroup": "x", "kind": "VolumeSnapshot", "name": "s" } }),
            "Pending",
            vec![],
        ),
    ] {
        let claim = json!({ "metadata": { "name": "c", "namespace": "n" }, "spec": spec, "status": { "phase": phase } });
        assert_eq!(restored_from(&serde_json::from_value(claim).unwrap()), expected, "{name}");
    }
}
