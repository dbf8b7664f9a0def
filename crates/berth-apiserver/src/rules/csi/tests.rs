//! Tests of the rules of the CSI kinds.

use super::*;

fn texts(causes: Vec<Cause>) -> Vec<String> {
    causes.into_iter().map(|cause| cause.to_string()).collect()
}

#[test]
fn a_driver_gets_its_defaults() {
    let mut driver = json!({"spec": {"attachRequired": false}});
    CsiDriver.default(&mut driver);
    assert_eq!(
        driver["spec"],
        json!({"attachRequired": false, "podInfoOnMount": false, "storageCapacity": false, "requiresRepublish": false,
            "seLinuxMount": false, "fsGroupPolicy": "ReadWriteOnceWithFSType", "volumeLifecycleModes": ["Persistent"]})
    );
    assert!(CsiDriver.validate(&driver).is_empty());
}

#[test]
fn invalid_drivers_are_refused_with_the_cause() {
    let check = |field: &str, value: Value| {
        let mut driver = json!({"spec": {}});
        CsiDriver.default(&mut driver);
        driver["spec"][field] = value;
        texts(CsiDriver.validate(&driver))
    };
    assert_eq!(
        check("fsGroupPolicy", json!("All")),
        [
            "spec.fsGroupPolicy: Unsupported value: \"All\": supported values: \"File\", \"None\", \"ReadWriteOnceWithFSType\""
        ]
    );
    assert_eq!(
        check("volumeLifecycleModes", json!(["Forever"])),
        [
            "spec.volumeLifecycleModes: Unsupported value: \"Forever\": supported values: \"Persistent\", \"Ephemeral\""
        ]
    );
    assert_eq!(
        check("tokenRequests", json!([{"audience": "a"}, {"audience": "a"}])),
        ["spec.tokenRequests[1].audience: Duplicate value: \"a\""]
    );
    assert_eq!(
        check("tokenRequests", json!([{"audience": "a", "expirationSeconds": 5}])),
        [
            "spec.tokenRequests[0].expirationSeconds: Invalid value: 5: may not specify a duration less than 10 minutes"
        ]
    );
    assert_eq!(
        check("nodeAllocatableUpdatePeriodSeconds", json!(9)),
        [
            "spec.nodeAllocatableUpdatePeriodSeconds: Invalid value: 9: must be greater than or equal to 10 seconds"
        ]
    );
    assert_eq!(
        check("serviceAccountTokenInSecrets", json!(true)),
        [
            "spec.serviceAccountTokenInSecrets: Invalid value: true: serviceAccountTokenInSecrets is set but no tokenRequests are specified"
        ]
    );
}

#[test]
fn a_driver_keeps_how_it_attaches() {
    let mut old = json!({"spec": {}});
    CsiDriver.default(&mut old);
    let mut new = old.clone();
    new["spec"]["attachRequired"] = json!(false);
    new["spec"]["podInfoOnMount"] = json!(true);
    assert_eq!(
        texts(CsiDriver.validate_update(&new, &old)),
        ["spec.attachedRequired: Invalid value: false: field is immutable"]
    );
    assert!(CsiDriver.generation_changes(&new, &old));
    assert!(!CsiDriver.unconditional_update());
}

#[test]
fn nodes_list_each_driver_once_and_keep_its_identity() {
    let node = |drivers: Value| json!({"spec": {"drivers": drivers}});
    let old =
        node(json!([{"name": "d", "nodeID": "n", "topologyKeys": ["zone"], "allocatable": {"count": 3}}]));
    assert!(CsiNode.validate(&old).is_empty());
    let more =
        node(json!([{"name": "d", "nodeID": "n", "topologyKeys": ["zone"], "allocatable": {"count": 5}}]));
    assert!(CsiNode.validate_update(&more, &old).is_empty());
    let other = node(json!([{"name": "d", "nodeID": "m", "topologyKeys": ["zone"]}]));
    assert!(texts(CsiNode.validate_update(&other, &old))[0].ends_with("field is immutable"));
    for (drivers, expected) in [
        (json!([{"name": "d", "nodeID": ""}]), "spec.drivers[0].nodeID: Required value"),
        (json!([{"nodeID": "n"}]), "spec.drivers[0].name: Required value"),
        (
            json!([{"name": "d", "nodeID": "n"}, {"name": "d", "nodeID": "n"}]),
            "spec.drivers[1].name: Duplicate value: \"d\"",
        ),
        (
            json!([{"name": "d", "nodeID": "n", "allocatable": {"count": -1}}]),
            "spec.drivers[0].allocatable.count: Invalid value: -1: must be greater than or equal to 0",
        ),
        (
            json!([{"name": "d", "nodeID": "n", "topologyKeys": ["a", "a"]}]),
            "spec.drivers[0]: Duplicate value: \"a\"",
        ),
    ] {
        assert_eq!(texts(CsiNode.validate(&node(drivers))), [expected]);
    }
}

#[test]
fn attachments_name_one_source_and_never_change() {
    let object = |source: Value| json!({"spec": {"attacher": "d", "nodeName": "n", "source": source}});
    let old = object(json!({"persistentVolumeName": "pv"}));
    assert_eq!(texts(VolumeAttachment.validate(&old)), Vec::<String>::new());
    assert_eq!(
        texts(VolumeAttachment.validate(&object(json!({})))),
        [
            "spec.source: Required value: must specify exactly one of inlineVolumeSpec and persistentVolumeName"
        ]
    );
    let inline = json!({"inlineVolumeSpec": {"csi": {"driver": "d", "volumeHandle": "h"}, "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1"}}});
    assert_eq!(
        texts(VolumeAttachment.validate(&object(inline))),
        [
            "spec.source.inlineVolumeSpec.capacity: Forbidden: may not be specified in the context of inline volumes"
        ]
    );
    let mut new = old.clone();
    new["spec"]["nodeName"] = json!("other");
    assert!(texts(VolumeAttachment.validate_update(&new, &old))[0].starts_with("spec: Invalid value: {"));
    let mut failed = old.clone();
    failed["status"] =
        json!({"attached": false, "attachError": {"message": "x".repeat(2000), "errorCode": -1}});
    assert_eq!(
        texts(VolumeAttachment.validate(&failed)),
        [
            "status.attachError.message: Too long: may not be more than 262144 bytes",
            "status.attachError.errorCode: Invalid value: -1: must be between 0 and 2147483647, inclusive"
        ]
    );
}

#[test]
fn a_status_update_of_an_attachment_keeps_its_metadata() {
    let old = json!({"metadata": {"name": "a", "finalizers": ["x/y"]}, "spec": {"attacher": "d"}});
    let mut new =
        json!({"metadata": {"name": "a", "labels": {"l": "m"}}, "spec": {}, "status": {"attached": true}});
    VolumeAttachment.prepare_status_update(&mut new, &old);
    assert_eq!(
        new,
        json!({"metadata": {"name": "a", "finalizers": ["x/y"]}, "spec": {"attacher": "d"}, "status": {"attached": true}})
    );
}

#[test]
fn capacities_keep_what_they_are_about() {
    let mut old = json!({"metadata": {"name": "c"}, "storageClassName": "fast", "capacity": "1024Mi"});
    CsiStorageCapacity.default(&mut old);
    assert_eq!(old["capacity"], "1Gi");
    let mut new = old.clone();
    new["capacity"] = json!("2Gi");
    assert!(CsiStorageCapacity.validate_update(&new, &old).is_empty());
    new["storageClassName"] = json!("slow");
    assert_eq!(
        texts(CsiStorageCapacity.validate_update(&new, &old)),
        ["storageClassName: Invalid value: \"slow\": field is immutable"]
    );
    new["capacity"] = json!("-1");
    assert_eq!(
        texts(CsiStorageCapacity.validate(&new)),
        ["capacity: Invalid value: \"-1\": must be greater than or equal to 0"]
    );
}

#[test]
fn rows_look_as_kubectl_prints_them() {
    let mut driver =
        json!({"metadata": {"name": "d", "creationTimestamp": "1970-01-01T00:00:00Z"}, "spec": {}});
    CsiDriver.default(&mut driver);
    assert_eq!(
        CsiDriver.cells(&driver, Timestamp::UNIX_EPOCH),
        [
            json!("d"),
            json!(true),
            json!(false),
            json!(false),
            json!("<unset>"),
            json!(false),
            json!("Persistent"),
            json!("0s")
        ]
    );
    let attachment = json!({"metadata": {"name": "a"}, "spec": {"attacher": "d", "nodeName": "n", "source": {"persistentVolumeName": "pv"}}, "status": {"attached": true}});
    assert_eq!(
        VolumeAttachment.cells(&attachment, Timestamp::UNIX_EPOCH),
        [json!("a"), json!("d"), json!("pv"), json!("n"), json!(true), json!("<unknown>")]
    );
    assert_eq!(
        CsiNode.cells(&json!({"metadata": {"name": "n"}, "spec": {"drivers": [{}]}}), Timestamp::UNIX_EPOCH)
            [1],
        1
    );
}
