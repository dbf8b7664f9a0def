//! Tests of the table and of strict decoding.

use serde_json::json;

use super::*;

#[test]
fn every_line_of_the_table_is_read() {
    assert_eq!(table::unread_lines(), Vec::<&str>::new());
    assert!(built_in_kinds().count() > 40);
    assert!(built_in_kinds().all(|(.., type_)| !type_.fields.is_empty()));
}

#[test]
fn types_know_their_fields() {
    let claim = built_in("", "v1", "PersistentVolumeClaim").unwrap();
    let conditions = claim.at("status.conditions").unwrap();
    assert_eq!(conditions.patch.key.as_deref(), Some("type"));
    assert_eq!(conditions.schema.list, ListType::Map(vec!["type".into()]));
    assert_eq!(claim.at("spec.storageClassName").map(|f| (f.number, f.pointer)), Some((5, true)));
    assert!(claim.at("spec.selector").unwrap().schema.is_atomic());
    assert!(claim.field("apiVersion").is_some());
    let volume = built_in("", "v1", "PersistentVolume").unwrap();
    assert!(volume.at("spec.csi.driver").is_some(), "inlined fields are found");
    assert!(built_in("", "v1", "Pod").is_some() && built_in("", "v2", "Pod").is_none());
    assert!(built_in_type("meta.ObjectMeta").is_some());
}

#[test]
fn unknown_fields_are_removed_and_reported_with_their_paths() {
    let pod = built_in("", "v1", "Pod").unwrap();
    let mut value = json!({"apiVersion": "v1", "kind": "Pod", "extra": 1,
        "metadata": {"name": "a", "labels": {"any": "thing"}, "nmae": "x"},
        "spec": {"containers": [{"name": "c", "imagee": "i", "ports": [{"containerPort": 1, "x": {}}]}]}});
    let decoded = decode(&pod, &mut value);
    assert_eq!(
        decoded.unknown,
        ["extra", "metadata.nmae", "spec.containers[0].imagee", "spec.containers[0].ports[0].x"]
    );
    assert_eq!(decoded.errors, Vec::<String>::new());
    assert_eq!(
        value,
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": {"any": "thing"}},
            "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 1}], "resources": {}}]}, "status": {}})
    );
}

#[test]
fn values_take_the_form_of_gos_types() {
    let claim = built_in("", "v1", "PersistentVolumeClaim").unwrap();
    let mut value = json!({"metadata": {"name": "a", "annotations": null, "generation": 0,
            "labels": {"a": null}},
        "spec": {"accessModes": [], "storageClassName": "", "volumeName": "",
            "resources": {"requests": {"storage": "1024Mi"}}},
        "status": {"conditions": [{"type": "Resizing", "status": "True",
            "lastTransitionTime": "2026-01-01T00:00:00.5Z", "lastProbeTime": null}]}});
    assert_eq!(decode(&claim, &mut value), Decoded::default());
    assert_eq!(
        value,
        json!({"metadata": {"name": "a", "labels": {"a": ""}},
            "spec": {"storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"conditions": [{"type": "Resizing", "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z", "lastProbeTime": null}]}})
    );
}

#[test]
fn decoding_twice_is_decoding_once() {
    for (.., type_) in built_in_kinds() {
        let mut once = json!({"metadata": {"name": "a"}, "spec": {}, "status": {}});
        decode(&type_, &mut once);
        let mut twice = once.clone();
        decode(&type_, &mut twice);
        assert_eq!(once, twice, "{}", type_.name);
    }
}

#[test]
fn misfits_are_reported_in_gos_words() {
    let claim = built_in("", "v1", "PersistentVolumeClaim").unwrap();
    let first = |mut value: Value| decode(&claim, &mut value).errors.first().cloned().unwrap_or_default();
    let into = "json: cannot unmarshal";
    assert_eq!(
        first(json!({"metadata": {"name": 5}})),
        format!("{into} number into Go struct field ObjectMeta.metadata.name of type string")
    );
    assert_eq!(
        first(json!({"metadata": {"generation": 1.5}})),
        format!("{into} number 1.5 into Go struct field ObjectMeta.metadata.generation of type int64")
    );
    assert_eq!(
        first(json!({"metadata": {"labels": {"a": true}}})),
        format!("{into} bool into Go struct field ObjectMeta.metadata.labels of type string")
    );
    let message = first(json!({"spec": {"resources": {"requests": {"storage": "ten"}}}}));
    assert!(message.starts_with("quantities must match the regular expression"), "{message}");
    assert!(first(json!({"spec": "no"})).ends_with(
        "string into Go struct field PersistentVolumeClaim.spec of type v1.PersistentVolumeClaimSpec"
    ));
    let secret = built_in("", "v1", "Secret").unwrap();
    let errors = decode(&secret, &mut json!({"data": {"a": "not base64"}})).errors;
    assert_eq!(errors, ["illegal base64 data at input byte 3"]);
    assert_eq!(
        decode(&secret, &mut json!([])).errors,
        ["json: cannot unmarshal array into Go value of type v1.Secret"]
    );
}

#[test]
fn pruning_leaves_known_values_alone() {
    let claim = built_in("", "v1", "PersistentVolumeClaim").unwrap();
    let mut value =
        json!({"spec": {"x": 1, "accessModes": [], "resources": {"requests": {"storage": "1024Mi"}}}});
    assert_eq!(prune(&claim, &mut value), ["spec.x"]);
    assert_eq!(value, json!({"spec": {"accessModes": [], "resources": {"requests": {"storage": "1024Mi"}}}}));
}

#[test]
fn damaged_protobuf_is_an_error_or_an_object_but_no_panic() {
    let pod = built_in("", "v1", "Pod").unwrap();
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": {"b": "c"},
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}},
            "livenessProbe": {"httpGet": {"port": "http"}}}]}});
    let good = protobuf::encode(&pod, &object).unwrap();
    for at in 0..good.len() {
        for byte in [0x00, 0x01, 0x7f, 0x80, 0xff, good[at].wrapping_add(8)] {
            let mut bad = good.clone();
            bad[at] = byte;
            drop(protobuf::decode(&pod, &bad));
        }
        drop(protobuf::decode(&pod, &good[..at]));
    }
}

#[test]
fn protobuf_that_nests_without_end_is_refused() {
    let crd = built_in("apiextensions.k8s.io", "v1", "CustomResourceDefinition").unwrap();
    let props = crd.at("spec.versions.schema.openAPIV3Schema").unwrap();
    let props = props.schema.object().unwrap();
    // Field 28 is `not`, a schema again.
    let mut message = Vec::new();
    for _ in 0..500 {
        let mut outer = vec![0xe2, 0x01];
        let mut length = message.len();
        while length >= 0x80 {
            outer.push(length.to_le_bytes()[0] | 0x80);
            length >>= 7;
        }
        outer.push(length.to_le_bytes()[0]);
        outer.extend(message);
        message = outer;
    }
    assert_eq!(protobuf::decode_message(props, &message), Err(protobuf::Error::Depth));
}
