//! Tests of the rules of claims.

use super::*;

fn claim() -> Value {
    json!({"metadata": {"name": "data", "namespace": "default"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}, "volumeMode": "Filesystem", "storageClassName": "fast"},
        "status": {"phase": "Pending"}})
}

fn with(pointer: &str, value: Value) -> Value {
    let mut object = claim();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(field.to_owned(), value);
    object
}

fn texts(causes: Vec<Cause>) -> Vec<String> {
    causes.into_iter().map(|cause| cause.to_string()).collect()
}

#[test]
fn a_new_claim_gets_its_defaults() {
    let mut object = json!({"spec": {"resources": {"requests": {"storage": 1024}}}});
    PersistentVolumeClaim.default(&mut object);
    assert_eq!(
        object,
        json!({"spec": {"resources": {"requests": {"storage": "1024"}}, "volumeMode": "Filesystem"}, "status": {"phase": "Pending"}})
    );
}

#[test]
fn sources_are_mirrored_and_unknown_ones_dropped() {
    let mut object = with(
        "/spec/dataSource",
        json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}),
    );
    PersistentVolumeClaim.prepare_create(&mut object);
    assert_eq!(object["spec"]["dataSourceRef"], object["spec"]["dataSource"]);
    let mut object = with("/spec/dataSourceRef", json!({"kind": "PersistentVolumeClaim", "name": "c"}));
    PersistentVolumeClaim.prepare_create(&mut object);
    let source = json!({"apiGroup": null, "kind": "PersistentVolumeClaim", "name": "c"});
    assert_eq!(object["spec"]["dataSource"], source);
    let mut object =
        with("/spec/dataSource", json!({"apiGroup": "example.com", "kind": "Thing", "name": "s"}));
    PersistentVolumeClaim.prepare_create(&mut object);
    assert!(!has(&object, &["spec", "dataSource"]));
    assert_eq!(object["status"], json!({"phase": "Pending"}));
}

#[test]
fn valid_claims_are_accepted() {
    assert_eq!(texts(PersistentVolumeClaim.validate(&claim())), Vec::<String>::new());
    let selector = with("/spec/selector", json!({"matchLabels": {"a": "b"}}));
    assert_eq!(texts(PersistentVolumeClaim.validate(&selector)), Vec::<String>::new());
}

#[test]
fn invalid_claims_are_refused_with_the_cause() {
    for (object, expected) in [
        (
            with("/spec/accessModes", json!([])),
            "spec.accessModes: Required value: at least 1 access mode is required",
        ),
        (
            with("/spec/accessModes", json!(["ReadWriteOncePod", "ReadOnlyMany"])),
            "spec.accessModes: Forbidden: may not use ReadWriteOncePod with other access modes",
        ),
        (with("/spec/resources", json!({})), "spec.resources[storage]: Required value"),
        (
            with("/spec/resources/requests", json!({"storage": "0"})),
            "spec.resources[storage]: Invalid value: \"0\": must be greater than zero",
        ),
        (
            with("/spec/resources/requests", json!({"storage": "-1Gi"})),
            "spec.resources[storage]: Invalid value: \"-1Gi\": must be greater than zero",
        ),
        (
            with("/spec/volumeMode", json!("Raw")),
            "spec.volumeMode: Unsupported value: \"Raw\": supported values: \"Block\", \"Filesystem\"",
        ),
        (
            with("/spec/dataSource", json!({"kind": "Pod", "name": "p"})),
            "spec.dataSource: Invalid value: \"Pod\": must be 'PersistentVolumeClaim' when referencing the default apiGroup",
        ),
        (
            with("/spec/dataSource", json!({"kind": "PersistentVolumeClaim"})),
            "spec.dataSource.name: Required value",
        ),
        (
            with("/spec/selector", json!({"matchExpressions": [{"key": "a", "operator": "In"}]})),
            "spec.selector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'",
        ),
    ] {
        assert_eq!(texts(PersistentVolumeClaim.validate(&object)), [expected]);
    }
}

#[test]
fn only_what_a_bound_claim_may_change_changes() {
    let old = claim();
    let refused = |new: &Value, old: &Value| texts(PersistentVolumeClaim.validate_update(new, old));
    assert_eq!(refused(&with("/spec/volumeName", json!("pv")), &old), Vec::<String>::new());
    let grown = with("/spec/resources", json!({"requests": {"storage": "2Gi"}}));
    assert!(refused(&grown, &old)[0].starts_with("spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims\n@@ "));
    let mut bound = old.clone();
    bound["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    let mut grown_bound = grown.clone();
    grown_bound["status"] = bound["status"].clone();
    assert_eq!(refused(&grown_bound, &bound), Vec::<String>::new());
    assert_eq!(
        refused(&bound, &grown_bound),
        ["spec.resources.requests.storage: Forbidden: field can not be less than status.capacity"]
    );
    assert!(
        refused(&with("/spec/accessModes", json!(["ReadWriteMany"])), &old)[0]
            .contains("-  \"ReadWriteOnce\"\n+  \"ReadWriteMany\"\n")
    );
    assert_eq!(refused(&with("/spec/storageClassName", json!("slow")), &old).len(), 1);
}

#[test]
fn a_class_may_be_set_once() {
    let mut old = claim();
    old["spec"].as_object_mut().unwrap().remove("storageClassName");
    assert!(PersistentVolumeClaim.validate_update(&claim(), &old).is_empty());
    assert_eq!(PersistentVolumeClaim.validate_update(&old, &claim()).len(), 1);
    old["metadata"]["annotations"] = json!({"volume.beta.kubernetes.io/storage-class": "fast"});
    assert!(PersistentVolumeClaim.validate_update(&claim(), &old).is_empty());
    let mut other = claim();
    other["metadata"]["annotations"] = json!({"volume.beta.kubernetes.io/storage-class": "slow"});
    assert!(texts(PersistentVolumeClaim.validate_update(&other, &old))[0].contains("metadata.annotations.volume.beta.kubernetes.io/storage-class: Invalid value: \"slow\": field is immutable"));
}

#[test]
fn an_attributes_class_in_use_is_not_taken_away() {
    let mut old = with("/spec/volumeAttributesClassName", json!("gold"));
    old["status"] = json!({"phase": "Bound", "currentVolumeAttributesClassName": "gold"});
    let mut new = old.clone();
    new["spec"]["volumeAttributesClassName"] = json!("");
    assert_eq!(
        texts(PersistentVolumeClaim.validate_update(&new, &old)),
        [
            "spec.volumeAttributesClassName: Forbidden: update to empty string is forbidden when status.currentVolumeAttributesClassName is not nil"
        ]
    );
}

#[test]
fn a_status_is_checked() {
    let mut new = claim();
    new["status"] = json!({"allocatedResourceStatuses": {"storage": "Growing"}, "capacity": {"storage": "-1"}, "allocatedResources": {"cpu": "1"}});
    assert_eq!(
        texts(PersistentVolumeClaim.validate_status_update(&new, &claim())),
        [
            "status.capacity[storage]: Invalid value: -1: must be a valid resource quantity",
            "status.allocatedResourceStatuses: Unsupported value: \"storage\": supported values: \"ControllerResizeInProgress\", \"ControllerResizeInfeasible\", \"NodeResizeInProgress\", \"NodeResizeInfeasible\", \"NodeResizePending\"",
            "status.allocatedResources: Unsupported value: \"cpu\": supported values: \"storage\"",
        ]
    );
}

#[test]
fn rows_look_as_kubectl_prints_them() {
    let mut object = claim();
    object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    let now = "2026-01-01T00:00:10Z".parse().unwrap();
    assert_eq!(
        PersistentVolumeClaim.cells(&object, now),
        ["data", "Pending", "", "", "", "fast", "<unset>", "10s", "Filesystem"].map(|c| json!(c))
    );
    object["spec"]["volumeName"] = json!("pv");
    object["status"] =
        json!({"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]});
    assert_eq!(
        PersistentVolumeClaim.cells(&object, now),
        ["data", "Bound", "pv", "1Gi", "RWO", "fast", "<unset>", "10s", "Filesystem"].map(|c| json!(c))
    );
}
