//! Tests of the rules of persistent volumes.

use super::*;

fn volume() -> Value {
    json!({"metadata": {"name": "pv"}, "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem", "csi": {"driver": "d", "volumeHandle": "h"}}})
}

fn with(pointer: &str, value: Value) -> Value {
    let mut object = volume();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(field.to_owned(), value);
    object
}

fn texts(causes: Vec<Cause>) -> Vec<String> {
    causes.into_iter().map(|cause| cause.to_string()).collect()
}

#[test]
fn a_new_volume_gets_its_defaults() {
    let mut object = json!({"spec": {"capacity": {"storage": "1024Mi"}, "hostPath": {"path": "/x"}}, "status": {"phase": "Bound"}});
    PersistentVolume.default(&mut object);
    assert_eq!(
        object["spec"],
        json!({"capacity": {"storage": "1Gi"}, "hostPath": {"path": "/x", "type": ""},
            "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem"})
    );
    PersistentVolume.prepare_create(&mut object);
    assert_eq!(object["status"]["phase"], "Pending");
    assert!(object["status"]["lastPhaseTransitionTime"].is_string());
}

#[test]
fn valid_volumes_are_accepted() {
    assert_eq!(texts(PersistentVolume.validate(&volume())), Vec::<String>::new());
    let local = json!({"metadata": {"name": "pv"}, "spec": {"capacity": {"storage": "1"}, "accessModes": ["ReadWriteOncePod"], "local": {"path": "/x"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n"]}]}]}}}});
    assert_eq!(texts(PersistentVolume.validate(&local)), Vec::<String>::new());
}

#[test]
fn invalid_volumes_are_refused_with_the_cause() {
    for (object, expected) in [
        (with("/spec/accessModes", json!([])), "spec.accessModes: Required value"),
        (
            with("/spec/accessModes", json!(["RWO"])),
            "spec.accessModes: Unsupported value: \"RWO\": supported values: \"ReadOnlyMany\", \"ReadWriteMany\", \"ReadWriteOnce\", \"ReadWriteOncePod\"",
        ),
        (
            with("/spec/accessModes", json!(["ReadWriteOncePod", "ReadWriteOnce"])),
            "spec.accessModes: Forbidden: may not use ReadWriteOncePod with other access modes",
        ),
        (
            with("/spec/capacity", json!({"storage": "1", "cpu": "1"})),
            "spec.capacity: Unsupported value: {\"cpu\":\"1\",\"storage\":\"1\"}: supported values: \"storage\"",
        ),
        (
            with("/spec/capacity", json!({"storage": "0"})),
            "spec.capacity[storage]: Invalid value: \"0\": must be greater than zero",
        ),
        (
            with("/spec/persistentVolumeReclaimPolicy", json!("Keep")),
            "spec.persistentVolumeReclaimPolicy: Unsupported value: \"Keep\": supported values: \"Delete\", \"Recycle\", \"Retain\"",
        ),
        (
            with("/spec/nodeAffinity", json!({})),
            "spec.nodeAffinity.required: Required value: must specify required node constraints",
        ),
        (
            with("/spec/nfs", json!({"server": "s", "path": "/"})),
            "spec.csi: Forbidden: may not specify more than 1 volume type",
        ),
        (
            with("/spec/volumeMode", json!("Raw")),
            "spec.volumeMode: Unsupported value: \"Raw\": supported values: \"Block\", \"Filesystem\"",
        ),
        (
            with("/spec/volumeAttributesClassName", json!("")),
            "spec.volumeAttributesClassName: Required value: an empty string is disallowed",
        ),
    ] {
        assert_eq!(texts(PersistentVolume.validate(&object)), [expected]);
    }
    let mut none = volume();
    none["spec"].as_object_mut().unwrap().remove("csi");
    assert_eq!(texts(PersistentVolume.validate(&none)), ["spec: Required value: must specify a volume type"]);
    none["spec"]["local"] = json!({"path": "/x"});
    assert_eq!(
        texts(PersistentVolume.validate(&none)),
        ["spec.nodeAffinity: Required value: Local volume requires node affinity"]
    );
    let mut root = volume();
    root["spec"].as_object_mut().unwrap().remove("csi");
    root["spec"]["hostPath"] = json!({"path": "//"});
    root["spec"]["persistentVolumeReclaimPolicy"] = json!("Recycle");
    assert_eq!(
        texts(PersistentVolume.validate(&root)),
        ["spec.persistentVolumeReclaimPolicy: Forbidden: may not be 'recycle' for a hostPath mount of '/'"]
    );
}

#[test]
fn the_source_and_mode_never_change() {
    let old = volume();
    let refused = |new: Value| texts(PersistentVolume.validate_update(&new, &old));
    assert_eq!(refused(with("/spec/capacity", json!({"storage": "2Gi"}))), Vec::<String>::new());
    assert_eq!(refused(with("/spec/claimRef", json!({"name": "c", "namespace": "n"}))), Vec::<String>::new());
    assert_eq!(
        refused(with("/spec/csi/controllerExpandSecretRef", json!({"name": "c", "namespace": "n"}))),
        Vec::<String>::new()
    );
    let causes = refused(with("/spec/csi/volumeHandle", json!("other")));
    assert!(causes[0].starts_with("spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after creation\n@@ "), "{causes:?}");
    assert_eq!(
        refused(with("/spec/volumeMode", json!("Block"))),
        ["volumeMode: Invalid value: \"Block\": field is immutable"]
    );
}

#[test]
fn node_affinity_is_set_once_but_labels_may_get_their_final_names() {
    let affinity = |key: &str| json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": ["z"]}]}]}});
    let old = with("/spec/nodeAffinity", affinity("failure-domain.beta.kubernetes.io/zone"));
    assert!(PersistentVolume.validate_update(&old, &volume()).is_empty());
    let renamed = with("/spec/nodeAffinity", affinity("topology.kubernetes.io/zone"));
    assert!(PersistentVolume.validate_update(&renamed, &old).is_empty());
    let other = with("/spec/nodeAffinity", affinity("example.com/zone"));
    let causes = texts(PersistentVolume.validate_update(&other, &old));
    assert!(
        causes[0].ends_with("field is immutable, except for updating from beta label to GA"),
        "{causes:?}"
    );
}

#[test]
fn a_status_update_changes_only_the_status_and_stamps_phase_changes() {
    let mut old = volume();
    old["status"] = json!({"phase": "Pending", "lastPhaseTransitionTime": "2020-01-01T00:00:00Z"});
    let mut new = old.clone();
    new["spec"]["capacity"]["storage"] = json!("9Gi");
    new["status"] = json!({"phase": "Available"});
    PersistentVolume.prepare_status_update(&mut new, &old);
    assert_eq!(new["spec"], old["spec"]);
    assert_ne!(new["status"]["lastPhaseTransitionTime"], old["status"]["lastPhaseTransitionTime"]);
    let mut same = old.clone();
    same["status"] = json!({"phase": "Pending"});
    PersistentVolume.prepare_status_update(&mut same, &old);
    assert_eq!(same["status"], old["status"]);
}

#[test]
fn rows_look_as_kubectl_prints_them() {
    let mut object = volume();
    object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    object["spec"]["claimRef"] = json!({"namespace": "default", "name": "data"});
    object["spec"]["storageClassName"] = json!("fast");
    object["status"] = json!({"phase": "Bound"});
    let now = "2026-01-01T00:05:03Z".parse().unwrap();
    let cells = PersistentVolume.cells(&object, now);
    assert_eq!(
        cells,
        ["pv", "1Gi", "RWO", "Retain", "Bound", "default/data", "fast", "<unset>", "", "5m3s", "Filesystem"]
            .map(|c| json!(c))
    );
    assert_eq!(cells.len(), PersistentVolume.columns().len());
    object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:05:00Z");
    assert_eq!(PersistentVolume.cells(&object, now)[4], "Terminating");
}
