//! What an attachment needs, row by row.

use serde_json::{Value, json};

use super::*;

const DRIVER: &str = "d.example.com";
const FINALIZER: &str = "external-attacher/d-example-com";

fn attachment(kept: bool, deleting: bool, attached: bool) -> VolumeAttachment {
    let mut attachment: VolumeAttachment = serde_json::from_value(json!({
        "metadata": { "name": "at" },
        "spec": { "attacher": DRIVER, "nodeName": "n", "source": { "persistentVolumeName": "v" } },
        "status": { "attached": attached },
    }))
    .unwrap();
    if kept {
        finalizers::add(&mut attachment, FINALIZER);
    }
    if deleting {
        attachment.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            "2026-01-01T00:00:00Z".parse().unwrap(),
        ));
    }
    attachment
}

#[expect(clippy::needless_pass_by_value, reason = "reads well in the rows")]
fn spec(csi: Value) -> PersistentVolumeSpec {
    serde_json::from_value(json!({ "accessModes": ["ReadWriteOnce"], "csi": csi })).unwrap()
}

fn csi_node(id: &str) -> CSINode {
    let driver = json!({ "name": DRIVER, "nodeID": id });
    serde_json::from_value(json!({ "metadata": { "name": "n" }, "spec": { "drivers": [driver] } })).unwrap()
}

#[test]
fn the_finalizer_is_upstreams() {
    assert_eq!(finalizer(DRIVER), FINALIZER);
    assert_eq!(finalizer("a.b."), "external-attacher/a-b-X");
}

#[test]
fn an_attachment_is_attached_detached_called_attached_or_left_alone() {
    // finalizer, deleting, attached, driver attaches, driver contradicts
    let rows = [
        ("new", (false, false, false, true, false), Plan::Attach),
        ("attached", (true, false, true, true, false), Plan::Nothing),
        ("attached, but the driver says no", (true, false, true, true, true), Plan::Attach),
        ("attaching failed before", (true, false, false, true, false), Plan::Attach),
        ("to be detached", (true, true, true, true, false), Plan::Detach),
        ("to be detached, perhaps attached", (true, true, false, true, false), Plan::Detach),
        ("going, never attached", (false, true, false, true, false), Plan::Nothing),
        ("trivial, new", (false, false, false, false, false), Plan::Call),
        ("trivial, attached", (false, false, true, false, false), Plan::Nothing),
        ("trivial, going", (false, true, true, false, false), Plan::Nothing),
        ("trivial now, kept from before", (true, true, true, false, false), Plan::Release),
    ];
    for (row, (kept, deleting, attached, attaches, forced), expected) in rows {
        assert_eq!(
            plan(&attachment(kept, deleting, attached), attaches, FINALIZER, forced),
            expected,
            "{row}"
        );
    }
}

#[test]
fn errors_and_what_we_keep_are_no_news_but_deletion_and_attached_are() {
    let before = attachment(false, false, false);
    let mut after = before.clone();
    after.status.as_mut().unwrap().attach_error = Some(k8s_openapi::api::storage::v1::VolumeError::default());
    finalizers::add(&mut after, FINALIZER);
    assert!(!matters(&before, &after));
    assert!(matters(&before, &attachment(false, true, false)));
    assert!(matters(&before, &attachment(false, false, true)));
}

#[test]
fn an_attachment_names_exactly_one_volume() {
    let mut both = attachment(false, false, false);
    both.spec.source.inline_volume_spec = Some(PersistentVolumeSpec::default());
    assert!(volume_of(&both).unwrap_err().to_string().contains("both"));
    both.spec.source.persistent_volume_name = None;
    assert!(matches!(volume_of(&both), Ok(Volume::Inline(_))));
    both.spec.source.inline_volume_spec = None;
    assert!(volume_of(&both).unwrap_err().to_string().contains("neither"));
    assert_eq!(volume_of(&attachment(false, false, false)).unwrap(), Volume::Named("v".to_owned()));
}

#[test]
fn a_volume_that_is_missing_or_going_is_not_attached() {
    assert!(attachable(None, "v").unwrap_err().to_string().contains("does not exist"));
    let going = json!({ "metadata": { "name": "v", "deletionTimestamp": "2026-01-01T00:00:00Z" } });
    let going: PersistentVolume = serde_json::from_value(going).unwrap();
    assert!(attachable(Some(&going), "v").unwrap_err().to_string().contains("marked for deletion"));
    assert!(csi_of(&spec(json!({ "driver": "other", "volumeHandle": "h" })), DRIVER).is_err());
    assert!(csi_of(&PersistentVolumeSpec::default(), DRIVER).is_err());
}

#[test]
fn what_is_kept_is_enough_to_detach_when_volume_and_node_are_gone() {
    let secret = SecretReference { name: Some("s".into()), namespace: Some("ns".into()) };
    let kept = Attached { handle: "h".into(), node: "id".into(), secret: Some(secret) };
    let mut object = attachment(false, true, true);
    keep(&mut object, FINALIZER, &kept);
    assert_eq!(detachable(&object, None, None, DRIVER).unwrap(), kept);
    let again = csi_node("new-id");
    assert_eq!(detachable(&object, None, Some(&again), DRIVER).unwrap().node, "id", "where it was attached");
}

#[test]
fn an_attachment_of_another_attacher_is_detached_by_what_there_is() {
    let there = spec(json!({ "driver": DRIVER, "volumeHandle": "h" }));
    let object = attachment(true, true, true);
    let found = detachable(&object, Some(&there), Some(&csi_node("id")), DRIVER).unwrap();
    assert_eq!((found.handle.as_str(), found.node.as_str(), found.secret), ("h", "id", None));
    let gone = detachable(&object, None, Some(&csi_node("id")), DRIVER).unwrap_err().to_string();
    assert!(gone.contains("remove the finalizer"), "{gone}");
    let nowhere = detachable(&object, Some(&there), None, DRIVER).unwrap_err().to_string();
    assert!(nowhere.contains("has no id for driver"), "{nowhere}");
}

#[test]
fn read_only_is_passed_on_only_to_drivers_that_take_it() {
    let volume = spec(
        json!({ "driver": DRIVER, "volumeHandle": "h", "readOnly": true, "volumeAttributes": { "a": "b" } }),
    );
    let attached = Attached { handle: "h".into(), node: "id".into(), secret: None };
    let mut identity = Identity { name: DRIVER.to_owned(), ..Identity::default() };
    let request = publish(&volume, &attached, &identity, "xfs", BTreeMap::new()).unwrap();
    assert!(!request.readonly);
    assert_eq!(request.volume_context["a"], "b");
    let Some(berth_csi::v1::volume_capability::AccessType::Mount(mount)) =
        request.volume_capability.unwrap().access_type
    else {
        panic!("a filesystem is mounted")
    };
    assert_eq!(mount.fs_type, "xfs", "the default, as the volume names none");
    identity.controller.insert(ControllerCapability::PublishReadonly);
    assert!(publish(&volume, &attached, &identity, "", BTreeMap::new()).unwrap().readonly);
}
