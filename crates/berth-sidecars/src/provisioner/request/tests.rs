//! What is asked of the driver, row by row.

use berth_csi::v1::volume_capability;
use serde_json::{Value, json};

use super::*;

fn identity(capabilities: &[ControllerCapability]) -> Identity {
    Identity {
        name: "d".to_owned(),
        services: [Service::ControllerService].into(),
        controller: capabilities.iter().copied().collect(),
        ..Identity::default()
    }
}

fn claim(spec: &Value) -> PersistentVolumeClaim {
    let mut all =
        json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    for (key, value) in spec.as_object().unwrap() {
        all[key] = value.clone();
    }
    let metadata = json!({
        "name": "c", "namespace": "ns", "uid": "a-b-c",
        "labels": { "app": "web", "tier": "front" }, "annotations": { "dir": "x/y" },
    });
    serde_json::from_value(json!({ "metadata": metadata, "spec": all })).unwrap()
}

fn asked(spec: &Value, parameters: &Value, options: &Options) -> Result<VolumeRequest, String> {
    let class = json!({ "metadata": { "name": "fast" }, "provisioner": "d", "parameters": parameters });
    let class: StorageClass = serde_json::from_value(class).unwrap();
    let identity = identity(&[ControllerCapability::CreateDeleteVolume]);
    let claim = claim(spec);
    let source = Source::of(&claim, options.cross_namespace_sources).unwrap();
    VolumeRequest::new(&claim, &class, source.as_ref(), None, &identity, options)
        .map_err(|failure| failure.to_string())
}

fn is_block(request: &VolumeRequest) -> bool {
    let access = &request.call.volume_capabilities[0].access_type;
    matches!(access, Some(volume_capability::AccessType::Block(_)))
}

#[test]
fn what_cannot_be_asked_for_is_refused_with_a_sentence() {
    let snapshot = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s" });
    let other = json!({ "kind": "PersistentVolumeClaim", "name": "o" });
    let rows = [
        (json!({ "selector": {} }), json!({}), "claim Selector is not supported"),
        (json!({ "accessModes": [] }), json!({}), "no access mode"),
        (json!({ "resources": {} }), json!({}), "requests no storage"),
        (json!({ "dataSource": snapshot }), json!({}), "CREATE_DELETE_SNAPSHOT"),
        (json!({ "dataSource": other }), json!({}), "CLONE_VOLUME"),
        (json!({}), json!({ "fstype": "a", "csi.storage.k8s.io/fstype": "b" }), "both \"fstype\""),
        (json!({}), json!({ "csi.storage.k8s.io/nonsense": "b" }), "unknown parameter key"),
        (json!({}), json!({ "csi.storage.k8s.io/node-stage-secret-name": "b" }), "node-stage"),
    ];
    for (spec, parameters, expected) in rows {
        let refused = asked(&spec, &parameters, &Options::default()).map(|_| ()).unwrap_err();
        assert!(refused.contains(expected), "{expected}: {refused}");
    }
    let class: StorageClass = serde_json::from_value(json!({ "metadata": {}, "provisioner": "d" })).unwrap();
    for identity in [Identity::default(), identity(&[])] {
        let claim = claim(&json!({}));
        let refused =
            VolumeRequest::new(&claim, &class, None, None, &identity, &Options::default()).map(|_| ());
        assert!(refused.unwrap_err().to_string().contains("does not support dynamic provisioning"));
    }
}

#[test]
fn parameters_of_kubernetes_are_not_the_drivers() {
    let parameters = json!({
        "csi.storage.k8s.io/fstype": "xfs",
        "csi.storage.k8s.io/provisioner-secret-name": "s",
        "csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}",
        "type": "ssd",
    });
    let plain = asked(&json!({}), &parameters, &Options::default()).unwrap();
    assert_eq!(plain.call.parameters, BTreeMap::from([("type".to_owned(), "ssd".to_owned())]));
    assert_eq!((plain.fs_type.as_str(), plain.bytes(), is_block(&plain)), ("xfs", 1 << 30, false));
    assert_eq!(plain.secrets[&Purpose::Provisioner].namespace.as_deref(), Some("ns"));
    let extra = Options { extra_create_metadata: true, ..Options::default() };
    let sent = asked(&json!({}), &parameters, &extra).unwrap().call.parameters;
    assert_eq!(sent["csi.storage.k8s.io/pvc/name"], "c");
    assert_eq!(sent["csi.storage.k8s.io/pvc/namespace"], "ns");
    assert_eq!(sent["csi.storage.k8s.io/pv/name"], "pvc-a-b-c");
}

#[test]
fn a_driver_gets_the_labels_and_annotations_that_its_class_asks_for_and_no_others() {
    let parameters = json!({
        "subDir": "${pvc.metadata.labels['app']}/${pvc.metadata.annotations['dir']}-${pvc.metadata.labels['none']}",
    });
    let sent = |options: &Options| {
        let request = asked(&json!({}), &parameters, options).unwrap();
        let named = |key: &String| key.contains("/labels/") || key.contains("/annotations/");
        request.call.parameters.into_iter().filter(|(key, _)| named(key)).collect::<Vec<_>>()
    };
    assert_eq!(sent(&Options::default()), []);
    let all = sent(&Options { extra_create_metadata: true, ..Options::default() });
    let pair = |key: &str, value: &str| (format!("csi.storage.k8s.io/pvc/{key}"), value.to_owned());
    assert_eq!(all, [pair("annotations/dir", "x/y"), pair("labels/app", "web")]);
}

#[test]
fn names_filesystems_and_read_only_follow_the_options() {
    let named = |length| {
        let options = Options { volume_name_uuid_length: length, ..Options::default() };
        volume_name(&claim(&json!({})), &options).unwrap()
    };
    assert_eq!((named(None).as_str(), named(Some(2)).as_str()), ("pvc-a-b-c", "pvc-ab"));
    let none = Options { volume_name_prefix: String::new(), ..Options::default() };
    assert!(volume_name(&claim(&json!({})), &none).is_err());
    let options = Options {
        default_fs_type: "ext4".to_owned(),
        controller_publish_readonly: true,
        ..Options::default()
    };
    assert_eq!(asked(&json!({}), &json!({}), &options).unwrap().fs_type, "ext4");
    let block = asked(&json!({ "volumeMode": "Block" }), &json!({}), &options).unwrap();
    assert_eq!((is_block(&block), block.fs_type.as_str(), block.read_only), (true, "", false));
    let readers = json!({ "accessModes": ["ReadOnlyMany"] });
    assert!(asked(&readers, &json!({}), &options).unwrap().read_only);
    let many = json!({ "accessModes": ["ReadOnlyMany", "ReadWriteOnce"] });
    let many = asked(&many, &json!({}), &options).unwrap();
    assert_eq!(
        (many.call.volume_capabilities.len(), many.read_only),
        (2, false),
        "one capability per access mode"
    );
}
