//! One answer of the driver and what there is, row by row.

use serde_json::{Value, json};

use super::*;

fn frame(owner: Option<&str>) -> Frame {
    let owner = owner.map(|uid| OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "Deployment".to_owned(),
        name: "driver".to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    });
    Frame { driver: "d.example.com".to_owned(), manager: "m".to_owned(), namespace: "ns".to_owned(), owner }
}

fn capacity_key() -> CapacityKey {
    CapacityKey { class: "fast".to_owned(), segment: [("zone".to_owned(), "z1".to_owned())].into() }
}

/// An object; the later in the alphabet, the younger.
fn object(
    name: &str,
    capacity: Option<&str>,
    largest: Option<&str>,
    owners: &Value,
) -> Arc<CSIStorageCapacity> {
    let minute = name.bytes().next().unwrap() - b'a' + 10;
    let object = json!({
        "metadata": {
            "name": name, "namespace": "ns", "ownerReferences": owners,
            "creationTimestamp": format!("2026-01-01T00:{minute}:00Z"),
        },
        "storageClassName": "fast", "nodeTopology": { "matchLabels": { "zone": "z1" } },
        "capacity": capacity, "maximumVolumeSize": largest,
    });
    Arc::new(serde_json::from_value(object).unwrap())
}

fn owner(uid: &str, controller: Option<bool>) -> Value {
    json!({ "apiVersion": "apps/v1", "kind": "Deployment", "name": "driver", "uid": uid, "controller": controller })
}

fn plan(frame: &Frame, room: Room, there: &[Arc<CSIStorageCapacity>]) -> Vec<String> {
    let writes = frame.plan(&capacity_key(), room, there);
    let described = writes.into_iter().map(|write| match write {
        Write::Create(_) => "create".to_owned(),
        Write::Update(object) => format!("update {}", object.name_any()),
        Write::Delete(object) => format!("delete {}", object.name_any()),
    });
    described.collect()
}

/// What there is, what the driver answers, and what is written.
type Row = (&'static str, Room, Vec<Arc<CSIStorageCapacity>>, &'static [&'static str]);

const GIGABYTE: Room = Room { available: 1 << 30, largest: None };

#[test]
fn what_is_missing_is_made_what_differs_is_updated_and_the_second_is_deleted() {
    let none = || json!([]);
    let gigabyte = |name: &str| object(name, Some("1Gi"), None, &none());
    let limited = Room { largest: Some(1 << 20), ..GIGABYTE };
    let rows: Vec<Row> = vec![
        ("none", GIGABYTE, vec![], &["create"]),
        ("the same", GIGABYTE, vec![gigabyte("a")], &[]),
        ("the same in other units", GIGABYTE, vec![object("a", Some("1024Mi"), None, &none())], &[]),
        ("more than there was", GIGABYTE, vec![object("a", Some("1Mi"), None, &none())], &["update a"]),
        ("no capacity described", GIGABYTE, vec![object("a", None, None, &none())], &["update a"]),
        ("nothing left", Room { available: 0, largest: None }, vec![gigabyte("a")], &["update a"]),
        (
            "nothing left, as described",
            Room { available: 0, largest: None },
            vec![object("a", Some("0"), None, &none())],
            &[],
        ),
        ("a limit comes", limited, vec![gigabyte("a")], &["update a"]),
        ("a limit stays", limited, vec![object("a", Some("1Gi"), Some("1Mi"), &none())], &[]),
        ("a limit changes", limited, vec![object("a", Some("1Gi"), Some("2Mi"), &none())], &["update a"]),
        ("a limit goes", GIGABYTE, vec![object("a", Some("1Gi"), Some("1Mi"), &none())], &["update a"]),
        ("two", GIGABYTE, vec![gigabyte("b"), gigabyte("a")], &["delete b"]),
        (
            "three, the oldest wrong",
            limited,
            vec![gigabyte("c"), gigabyte("a"), gigabyte("b")],
            &["delete c", "delete b", "update a"],
        ),
    ];
    for (row, room, there, expected) in rows {
        assert_eq!(plan(&frame(None), room, &there), expected, "{row}");
    }
}

#[test]
fn an_owner_that_is_missing_is_added_and_others_stay() {
    let owned = |owners: Value| object("a", Some("1Gi"), None, &owners);
    let us = || frame(Some("us"));
    assert_eq!(plan(&us(), GIGABYTE, &[owned(json!([owner("us", Some(true))]))]), [""; 0]);
    for (row, owners) in [
        ("none", json!([])),
        ("somebody else's", json!([owner("them", Some(true))])),
        ("ours, but not as its controller", json!([owner("us", Some(false))])),
        ("ours, unsaid as what", json!([owner("us", None)])),
    ] {
        assert_eq!(plan(&us(), GIGABYTE, &[owned(owners)]), ["update a"], "{row}");
    }
    for owners in [
        json!([owner("them", Some(true))]),
        json!([owner("them", None)]),
        json!([owner("us", None), owner("them", Some(true))]),
    ] {
        let mut object = owned(owners).as_ref().clone();
        us().write_into(&mut object, GIGABYTE);
        us().write_into(&mut object, GIGABYTE);
        let owners: Vec<_> =
            object.owner_references().iter().map(|owner| (owner.uid.as_str(), owner.controller)).collect();
        assert_eq!(
            owners,
            [("them", None), ("us", Some(true))],
            "once, beside the others, as the only controller"
        );
    }
    assert_eq!(plan(&frame(None), GIGABYTE, &[owned(json!([owner("them", Some(true))]))]), [""; 0]);
}

#[test]
fn a_new_object_says_whose_it_is_of_what_and_how_much() {
    let room = Room { available: 3 << 30, largest: Some(1 << 30) };
    let Some(Write::Create(made)) = frame(Some("us")).plan(&capacity_key(), room, &[]).pop() else {
        panic!()
    };
    assert_eq!(
        serde_json::to_value(&made).unwrap(),
        json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity",
            "metadata": {
                "generateName": "csisc-", "namespace": "ns",
                "labels": {
                    "csi.storage.k8s.io/drivername": "d.example.com", "csi.storage.k8s.io/managed-by": "m",
                },
                "ownerReferences": [owner("us", Some(true))],
            },
            "storageClassName": "fast", "nodeTopology": { "matchLabels": { "zone": "z1" } },
            "capacity": "3Gi", "maximumVolumeSize": "1Gi",
        })
    );
    assert_eq!(
        frame(None).selector(),
        "csi.storage.k8s.io/drivername=d.example.com,csi.storage.k8s.io/managed-by=m"
    );
}

#[test]
fn a_volume_fits_if_there_is_room_and_it_is_not_too_large() {
    let answer = |available, maximum| {
        Room::from(GetCapacityResponse {
            available_capacity: available,
            maximum_volume_size: maximum,
            minimum_volume_size: None,
        })
    };
    assert!(answer(10, None).fits(10) && !answer(10, None).fits(11));
    assert!(answer(10, Some(5)).fits(5) && !answer(10, Some(5)).fits(6));
    assert_eq!(answer(-1, Some(-1)), Room { available: 0, largest: Some(0) }, "promised too much");
}
