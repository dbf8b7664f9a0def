//! When a volume is deleted, row by row.

use serde_json::json;

use super::*;

const DRIVER: &str = "d.example.com";

#[expect(clippy::struct_excessive_bools, reason = "a row of a table")]
struct Row {
    phase: &'static str,
    policy: &'static str,
    by: Option<&'static str>,
    driver: &'static str,
    protected: bool,
    deleting: bool,
    attached: bool,
    reached: bool,
}

const RELEASED: Row = Row {
    phase: "Released",
    policy: "Delete",
    by: Some(DRIVER),
    driver: DRIVER,
    protected: true,
    deleting: false,
    attached: false,
    reached: true,
};

fn planned(row: &Row) -> Plan {
    let mut volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": { "name": "v" },
        "spec": {
            "persistentVolumeReclaimPolicy": row.policy,
            "csi": { "driver": row.driver, "volumeHandle": "h" },
        },
        "status": { "phase": row.phase },
    }))
    .unwrap();
    if let Some(by) = row.by {
        volume.annotations_mut().insert(PROVISIONED_BY.to_owned(), by.to_owned());
    }
    if row.protected {
        volume.finalizers_mut().push(PROVISIONER_FINALIZER.to_owned());
    }
    if row.deleting {
        volume.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            "2026-01-01T00:00:00Z".parse().unwrap(),
        ));
    }
    plan(&volume, DRIVER, row.reached, row.attached)
}

#[test]
fn a_volume_is_deleted_only_if_released_ours_to_delete_and_attached_nowhere() {
    let rows = [
        ("released", RELEASED, Plan::Delete),
        ("released, not protected yet", Row { protected: false, ..RELEASED }, Plan::Delete),
        ("released, deleted by a person", Row { deleting: true, ..RELEASED }, Plan::Delete),
        ("going without us", Row { deleting: true, protected: false, ..RELEASED }, Plan::Nothing),
        ("still attached", Row { attached: true, ..RELEASED }, Plan::Attached),
        ("of another driver", Row { by: Some("x"), driver: "x", ..RELEASED }, Plan::Nothing),
        ("made by a person", Row { by: None, ..RELEASED }, Plan::Delete),
        ("of our driver, made by another", Row { by: Some("x"), ..RELEASED }, Plan::Nothing),
        (
            "bound, of our driver, made by another",
            Row { phase: "Bound", by: Some("x"), protected: false, ..RELEASED },
            Plan::Nothing,
        ),
        ("bound", Row { phase: "Bound", ..RELEASED }, Plan::Nothing),
        ("available", Row { phase: "Available", ..RELEASED }, Plan::Nothing),
        ("failed", Row { phase: "Failed", ..RELEASED }, Plan::Nothing),
        ("retained, protected", Row { policy: "Retain", ..RELEASED }, Plan::Unprotect),
        ("recycled, protected", Row { policy: "Recycle", ..RELEASED }, Plan::Unprotect),
        ("retained", Row { policy: "Retain", protected: false, ..RELEASED }, Plan::Nothing),
        ("bound, not protected", Row { phase: "Bound", protected: false, ..RELEASED }, Plan::Protect),
        (
            "bound, made by a person",
            Row { phase: "Bound", by: None, protected: false, ..RELEASED },
            Plan::Protect,
        ),
        ("bound, going", Row { phase: "Bound", protected: false, deleting: true, ..RELEASED }, Plan::Nothing),
        ("available, not protected", Row { phase: "Available", protected: false, ..RELEASED }, Plan::Nothing),
    ];
    for (name, row, expected) in rows {
        assert_eq!(planned(&row), expected, "{name}");
    }
}

#[test]
fn a_nodes_own_provisioner_deletes_only_what_it_reaches_and_keeps_nothing_from_going() {
    let far = Row { reached: false, ..RELEASED };
    assert_eq!(planned(&far), Plan::Nothing);
    assert_eq!(planned(&Row { phase: "Bound", protected: false, ..far }), Plan::Nothing);
    let retained = Row { policy: "Retain", reached: false, ..RELEASED };
    assert_eq!(planned(&retained), Plan::Unprotect, "its own node may be gone for ever");
}
