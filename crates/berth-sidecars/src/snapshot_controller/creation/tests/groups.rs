//! What is made for a group, row by row.

use serde_json::{Value, json};

use crate::snapshot_controller::creation::*;

fn group(class: Option<&str>) -> VolumeGroupSnapshot {
    serde_json::from_value(json!({
        "apiVersion": "groupsnapshot.storage.k8s.io/v1",
        "kind": "VolumeGroupSnapshot",
        "metadata": { "name": "g", "namespace": "n", "uid": "u" },
        "spec": { "source": { "selector": {} }, "volumeGroupSnapshotClassName": class },
    }))
    .unwrap()
}

fn chosen(name: &str, phase: &str, source: &Value) -> Chosen {
    let claim = json!({
        "metadata": { "name": name, "namespace": "n", "uid": format!("{name}-uid") },
        "spec": { "volumeName": name },
        "status": { "phase": phase },
    });
    let mut volume = json!({
        "metadata": { "name": name },
        "spec": { "volumeMode": "Block", "claimRef": { "name": name, "namespace": "n", "uid": format!("{name}-uid") } },
    });
    volume["spec"]["csi"] = source.clone();
    (
        Arc::new(serde_json::from_value(claim).unwrap()),
        Some(Arc::new(serde_json::from_value(volume).unwrap())),
    )
}

fn csi(driver: &str, handle: &str) -> Value {
    json!({ "driver": driver, "volumeHandle": handle })
}

fn class_named(name: &str, driver: &str, default: bool) -> Arc<VolumeGroupSnapshotClass> {
    Arc::new(
        serde_json::from_value(json!({
            "metadata": { "name": name, "annotations": {
                "groupsnapshot.storage.kubernetes.io/is-default-class": default.to_string(),
            } },
            "driver": driver,
            "deletionPolicy": "Delete",
            "parameters": {
                "csi.storage.k8s.io/group-snapshotter-secret-name": "${volumegroupsnapshot.name}",
                "csi.storage.k8s.io/group-snapshotter-secret-namespace": "${volumegroupsnapshot.namespace}",
            },
        }))
        .unwrap(),
    )
}

#[test]
fn a_groups_content_names_all_volumes_and_its_members_share_its_secret() {
    let claims = [chosen("a", "Bound", &csi("d", "ha")), chosen("b", "Bound", &csi("d", "hb"))];
    let group = group(None);
    let mut made = group_content(&group, &claims, &[class_named("k", "d", true)], None).unwrap();
    assert_eq!(made.name_any(), "groupsnapcontent-u");
    assert_eq!(made.spec.source.volume_handles.as_deref(), Some(&["ha".to_owned(), "hb".to_owned()][..]));
    assert_eq!(made.spec.volume_group_snapshot_class_name.as_deref(), Some("k"));
    assert_eq!(made.annotations()["groupsnapshot.storage.kubernetes.io/deletion-secret-name"], "g");

    made.status.get_or_insert_default().volume_group_snapshot_handle = Some("gh".to_owned());
    let (its, snapshot) = member(&group, &made, "ha", claims[0].1.as_deref());
    let (snapshot_name, content_name) = member_names("u", "ha");
    assert_eq!((its.name_any(), snapshot.name_any()), (content_name, snapshot_name));
    assert_eq!(its.annotations()["groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle"], "gh");
    assert_eq!(its.annotations()["snapshot.storage.kubernetes.io/deletion-secret-name"], "g");
    assert_eq!(its.spec.source_volume_mode.as_deref(), Some("Block"));
    assert_eq!(its.spec.volume_snapshot_class_name, None);
    assert_eq!(snapshot.spec.source.persistent_volume_claim_name.as_deref(), Some("a"));
    assert_eq!(snapshot.finalizers(), ["snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection"]);
    assert_eq!(snapshot.owner_references()[0].api_version, "groupsnapshot.storage.k8s.io/v1");
    let (_, orphan) = member(&group, &made, "ha", None);
    assert_eq!(orphan.spec.source.persistent_volume_claim_name.as_deref(), Some(""));
}

#[test]
fn what_prevents_a_group_is_reported() {
    let bound = chosen("a", "Bound", &csi("d", "ha"));
    let created = "GroupSnapshotContentCreationFailed";
    for (name, class, claims, classes, expected) in [
        ("no claims", Some("k"), vec![], vec![("k", "d", false)], (created, "not applied to any PVC")),
        (
            "one is not bound",
            Some("k"),
            vec![bound.clone(), chosen("b", "Pending", &csi("d", "hb"))],
            vec![("k", "d", false)],
            (created, "the PVC b is not yet bound"),
        ),
        (
            "one is no CSI volume",
            Some("k"),
            vec![bound.clone(), chosen("b", "Bound", &json!(null))],
            vec![("k", "d", false)],
            (created, "cannot find CSI"),
        ),
        (
            "two drivers",
            Some("k"),
            vec![bound.clone(), chosen("b", "Bound", &csi("e", "hb"))],
            vec![("k", "d", false)],
            (created, "different drivers (d and e)"),
        ),
        (
            "another driver's class",
            Some("k"),
            vec![bound.clone()],
            vec![("k", "e", false)],
            (created, "Volume CSI driver (d) mismatch with VolumeGroupSnapshotClass (e)"),
        ),
        (
            "no such class",
            Some("x"),
            vec![bound.clone()],
            vec![("k", "d", true)],
            ("GetGroupSnapshotClassFailed", "\"x\" does not exist"),
        ),
        (
            "no default",
            None,
            vec![bound.clone()],
            vec![("k", "d", false)],
            ("SetDefaultGroupSnapshotClassFailed", "cannot find default group snapshot class"),
        ),
        (
            "two defaults",
            None,
            vec![bound],
            vec![("k", "d", true), ("l", "d", true)],
            ("SetDefaultGroupSnapshotClassFailed", "2 default snapshot classes were found"),
        ),
    ] {
        let classes: Vec<_> =
            classes.into_iter().map(|(name, driver, default)| class_named(name, driver, default)).collect();
        let refusal = group_content(&group(class), &claims, &classes, None).unwrap_err();
        assert_eq!(refusal.reason, expected.0, "{name}");
        assert!(refusal.message.contains(expected.1), "{name}: {}", refusal.message);
    }
}

#[test]
fn where_there_is_a_snapshotter_on_every_node_a_group_is_taken_on_the_one_that_has_all_members() {
    let nodes = [("n1", "a"), ("n2", "b"), ("n3", "b")].map(|(name, zone)| {
        let node = json!({ "metadata": { "name": name, "labels": { "zone": zone } } });
        Arc::new(serde_json::from_value::<Node>(node).unwrap())
    });
    let in_zones = |name: &str, zones: &[&str]| {
        let (claim, volume) = chosen(name, "Bound", &csi("d", name));
        let mut volume = serde_json::to_value(volume.unwrap().as_ref()).unwrap();
        if !zones.is_empty() {
            volume["spec"]["nodeAffinity"] = json!({ "required": { "nodeSelectorTerms": [
                { "matchExpressions": [{ "key": "zone", "operator": "In", "values": zones }] },
            ] } });
        }
        (claim, Some(Arc::new(serde_json::from_value(volume).unwrap())))
    };
    let several = "volumes of several nodes (x on n1; y on n2, n3), which cannot be taken at one instant";
    for (what, claims, expected) in [
        ("one node", vec![in_zones("x", &["a"]), in_zones("y", &["a"])], Ok(Some("n1"))),
        ("the first of several", vec![in_zones("x", &["b"]), in_zones("y", &["b"])], Ok(Some("n2"))),
        ("what both reach", vec![in_zones("x", &["a", "b"]), in_zones("y", &["b"])], Ok(Some("n2"))),
        ("one that is everywhere", vec![in_zones("x", &[]), in_zones("y", &["a"])], Ok(Some("n1"))),
        ("all are everywhere", vec![in_zones("x", &[]), in_zones("y", &[])], Ok(None)),
        ("two nodes", vec![in_zones("x", &["a"]), in_zones("y", &["b"])], Err(several)),
        (
            "no node",
            vec![in_zones("x", &["c"])],
            Err("no node matches the affinity of the volume of claim x"),
        ),
    ] {
        let classes = [class_named("k", "d", true)];
        let made = group_content(&group(None), &claims, &classes, Some(&nodes));
        match (made, expected) {
            (Ok(made), Ok(node)) => {
                let label = "snapshot.storage.kubernetes.io/managed-by";
                assert_eq!(made.labels().get(label).map(String::as_str), node, "{what}");
                let (member, _) = member(&group(None), &made, "x", None);
                assert_eq!(member.labels().get(label).map(String::as_str), node, "{what}");
            }
            (Err(refusal), Err(text)) => {
                assert_eq!(refusal.reason, "GroupSnapshotContentCreationFailed", "{what}");
                assert!(refusal.message.contains(text), "{what}: {}", refusal.message);
            }
            (made, _) => panic!("{what}: {made:?}"),
        }
    }
}
