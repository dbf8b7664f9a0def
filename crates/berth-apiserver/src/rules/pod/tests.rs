//! Tests of the rules of pods.

use super::*;

fn pod() -> Value {
    let mut object = json!({"metadata": {"name": "p", "namespace": "default"}, "spec": {
        "containers": [{"name": "c", "image": "busybox:1", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}]}});
    Pod.default(&mut object);
    object
}

fn with(pointer: &str, value: Value) -> Value {
    let mut object = pod();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[field] = value;
    Pod.default(&mut object);
    object
}

fn texts(causes: Vec<Cause>) -> Vec<String> {
    causes.into_iter().map(|cause| cause.to_string()).collect()
}

#[test]
fn a_new_pod_gets_its_defaults() {
    assert_eq!(
        pod()["spec"],
        json!({"containers": [{"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent", "resources": {},
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}],
            "dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "securityContext": {}, "schedulerName": "default-scheduler",
            "terminationGracePeriodSeconds": 30, "enableServiceLinks": true})
    );
}

#[test]
fn volumes_ports_probes_and_resources_get_their_defaults() {
    let mut object = json!({"spec": {"hostNetwork": true, "serviceAccountName": "s", "containers": [{"name": "c", "image": "i",
            "ports": [{"containerPort": 80}], "livenessProbe": {"httpGet": {"port": 80}},
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "resources": {"limits": {"cpu": "0.5"}}}],
        "volumes": [{"name": "a"}, {"name": "b", "configMap": {"name": "m"}}, {"name": "c", "hostPath": {"path": "/"}},
            {"name": "d", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
            {"name": "e", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]}});
    Pod.default(&mut object);
    let spec = &object["spec"];
    assert_eq!(
        spec["volumes"],
        json!([{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "m", "defaultMode": 420}},
            {"name": "c", "hostPath": {"path": "/", "type": ""}},
            {"name": "d", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}}]}},
            {"name": "e", "ephemeral": {"volumeClaimTemplate": {"spec": {"volumeMode": "Filesystem"}}}}])
    );
    let container = &spec["containers"][0];
    assert_eq!(container["ports"], json!([{"containerPort": 80, "hostPort": 80, "protocol": "TCP"}]));
    assert_eq!(
        container["livenessProbe"],
        json!({"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"}, "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3})
    );
    assert_eq!(container["env"][0]["valueFrom"]["fieldRef"]["apiVersion"], "v1");
    assert_eq!(container["resources"], json!({"limits": {"cpu": "500m"}, "requests": {"cpu": "500m"}}));
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(spec["serviceAccount"], "s");
}

#[test]
fn a_new_pod_is_pending_with_a_quality_of_service() {
    let mut object = pod();
    object["status"] = json!({"phase": "Running"});
    Pod.prepare_create(&mut object);
    assert_eq!(object["status"], json!({"phase": "Pending", "qosClass": "BestEffort"}));
    let full = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    for (resources, class) in [(json!({"requests": {"cpu": "1"}}), "Burstable"), (full, "Guaranteed")] {
        let mut object = with("/spec/containers/0/resources", resources);
        Pod.prepare_create(&mut object);
        assert_eq!(object["status"]["qosClass"], class);
    }
}

#[test]
fn valid_pods_are_accepted() {
    assert_eq!(texts(Pod.validate(&pod())), Vec::<String>::new());
    let volumes = json!([{"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "e", "ephemeral": {"volumeClaimTemplate": {"spec":
        {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}}}, {"name": "i", "csi": {"driver": "d"}}]);
    assert_eq!(texts(Pod.validate(&with("/spec/volumes", volumes))), Vec::<String>::new());
}

#[test]
fn a_pod_with_users_of_its_own_shares_nothing_else_with_the_host() {
    for (field, value, expected) in [
        ("hostNetwork", json!(true), "spec.hostNetwork: Forbidden: when `hostUsers` is false"),
        ("hostPID", json!(true), "spec.hostPID: Forbidden: when `hostUsers` is false"),
        ("hostIPC", json!(true), "spec.hostIPC: Forbidden: when `hostUsers` is false"),
        (
            "initContainers",
            json!([{"name": "i", "image": "i", "imagePullPolicy": "Always", "terminationMessagePolicy": "File",
                "volumeDevices": [{"name": "data", "devicePath": "/dev/x"}]}]),
            "spec.initContainers[0].volumeDevices: Forbidden: when `hostUsers` is false",
        ),
    ] {
        let mut object = pod();
        object["spec"][field] = value;
        object["spec"]["hostUsers"] = json!(true);
        let forbidden = |object: &Value| {
            texts(Pod.validate(object))
                .into_iter()
                .filter(|text| text.contains("hostUsers"))
                .collect::<Vec<_>>()
        };
        assert_eq!(forbidden(&object), Vec::<String>::new(), "{field}");
        object["spec"]["hostUsers"] = json!(false);
        assert_eq!(forbidden(&object), [expected]);
    }
}

#[test]
fn invalid_volumes_are_refused_with_the_cause() {
    for (volume, expected) in [
        (
            json!({"name": "A", "emptyDir": {}}),
            "spec.volumes[1].name: Invalid value: \"A\": a lowercase RFC 1123 label must",
        ),
        (json!({"name": "data", "emptyDir": {}}), "spec.volumes[1].name: Duplicate value: \"data\""),
        (json!({"emptyDir": {}}), "spec.volumes[1].name: Required value"),
        (
            json!({"name": "b", "emptyDir": {}, "hostPath": {"path": "/"}}),
            "spec.volumes[1].hostPath: Forbidden: may not specify more than 1 volume type",
        ),
        (
            json!({"name": "b", "persistentVolumeClaim": {}}),
            "spec.volumes[1].persistentVolumeClaim.claimName: Required value",
        ),
        (
            json!({"name": "b", "hostPath": {"path": "/a/.."}}),
            "spec.volumes[1].hostPath.path: Invalid value: \"/a/..\": must not contain '..'",
        ),
        (json!({"name": "b", "configMap": {}}), "spec.volumes[1].configMap.name: Required value"),
        (
            json!({"name": "b", "secret": {"secretName": "s", "defaultMode": 512}}),
            "spec.volumes[1].secret.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive",
        ),
        (
            json!({"name": "b", "secret": {"secretName": "s", "items": [{"key": "k", "path": "../x"}]}}),
            "spec.volumes[1].secret.items[0].path: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            json!({"name": "b", "ephemeral": {}}),
            "spec.volumes[1].ephemeral.volumeClaimTemplate: Required value",
        ),
        (
            json!({"name": "b", "ephemeral": {"volumeClaimTemplate": {"metadata": {"name": "x"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}}}}),
            "spec.volumes[1].ephemeral.volumeClaimTemplate.metadata.name: Forbidden: cannot be set",
        ),
        (json!({"name": "b", "csi": {}}), "spec.volumes[1].csi.driver: Required value"),
        (
            json!({"name": "b", "projected": {"sources": [{"secret": {"name": "s", "items": [{"key": "a", "path": "x"}, {"key": "b", "path": "x"}]}}]}}),
            "spec.volumes[1].projected: Invalid value: \"s\": conflicting duplicate paths",
        ),
        (
            json!({"name": "b", "projected": {"sources": [{"serviceAccountToken": {"path": "x", "expirationSeconds": 1}}]}}),
            "spec.volumes[1].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 1: may not specify a duration less than 10 minutes",
        ),
        (
            json!({"name": "b", "downwardAPI": {"items": [{"path": "x"}]}}),
            "spec.volumes[1].downwardAPI: Required value: one of fieldRef and resourceFieldRef is required",
        ),
        (
            json!({"name": "b", "nfs": {"server": "s", "path": "x"}}),
            "spec.volumes[1].nfs.path: Invalid value: \"x\": must be an absolute path",
        ),
    ] {
        let first = json!({"name": "data", "persistentVolumeClaim": {"claimName": "claim"}});
        let mut object = with("/spec/volumes", json!([first, volume]));
        object["spec"]["serviceAccountName"] = json!("default");
        let causes = texts(Pod.validate(&object));
        assert_eq!(causes.len(), 1, "{causes:?}");
        assert!(causes[0].starts_with(expected), "{causes:?}");
    }
    let own = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "p-e"}}, {"name": "e", "ephemeral": {"volumeClaimTemplate":
        {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}}}}]);
    assert_eq!(
        texts(Pod.validate(&with("/spec/volumes", own))),
        [
            "spec.volumes[0].persistentVolumeClaim.claimName: Invalid value: \"p-e\": must not reference a PVC that gets created for an ephemeral volume"
        ]
    );
}

#[test]
fn invalid_mounts_and_devices_are_refused_with_the_cause() {
    for (mount, expected) in [
        (
            json!({"name": "none", "mountPath": "/x"}),
            "spec.containers[0].volumeMounts[0].name: Not found: \"none\"",
        ),
        (json!({"name": "data"}), "spec.containers[0].volumeMounts[0].mountPath: Required value"),
        (
            json!({"name": "data", "mountPath": "/x", "subPath": "/a"}),
            "spec.containers[0].volumeMounts.subPath: Invalid value: \"/a\": must be a relative path",
        ),
        (
            json!({"name": "data", "mountPath": "/x", "subPath": "a", "subPathExpr": "b"}),
            "spec.containers[0].volumeMounts[0].subPathExpr: Invalid value: \"b\": subPathExpr and subPath are mutually exclusive",
        ),
        (
            json!({"name": "data", "mountPath": "/x", "mountPropagation": "Bidirectional"}),
            "spec.containers[0].volumeMounts.mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers",
        ),
        (
            json!({"name": "data", "mountPath": "/x", "recursiveReadOnly": "Enabled"}),
            "spec.containers[0].volumeMounts.recursiveReadOnly: Forbidden: may only be specified when readOnly is true",
        ),
    ] {
        assert_eq!(texts(Pod.validate(&with("/spec/containers/0/volumeMounts", json!([mount])))), [expected]);
    }
    let twice = json!([{"name": "data", "mountPath": "/x"}, {"name": "data", "mountPath": "/x"}]);
    assert_eq!(
        texts(Pod.validate(&with("/spec/containers/0/volumeMounts", twice))),
        ["spec.containers[0].volumeMounts[1].mountPath: Invalid value: \"/x\": must be unique"]
    );
    let device = json!([{"name": "data", "devicePath": "/dev/x"}]);
    assert_eq!(
        texts(Pod.validate(&with("/spec/containers/0/volumeDevices", device))),
        [
            "spec.containers[0].volumeMounts[0].name: Invalid value: \"data\": must not already exist in volumeDevices",
            "spec.containers[0].volumeDevices[0].name: Invalid value: \"data\": must not already exist in volumeMounts"
        ]
    );
}

#[test]
fn invalid_containers_are_refused_with_the_cause() {
    for (pointer, value, expected) in [
        ("/spec/containers", json!([]), "spec.containers: Required value"),
        ("/spec/containers/0/name", json!(""), "spec.containers[0].name: Required value"),
        ("/spec/containers/0/image", json!(""), "spec.containers[0].image: Required value"),
        (
            "/spec/containers/0/imagePullPolicy",
            json!("Sometimes"),
            "spec.containers[0].imagePullPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        ),
        (
            "/spec/containers/0/ports",
            json!([{"containerPort": 70000}]),
            "spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
        ),
        (
            "/spec/containers/0/env",
            json!([{"name": "a=b"}]),
            "spec.containers[0].env[0].name: Invalid value: \"a=b\": a valid environment variable name must consist only of printable ASCII characters other than '='",
        ),
        (
            "/spec/containers/0/resources",
            json!({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
            "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ),
        (
            "/spec/containers/0/livenessProbe",
            json!({"periodSeconds": 5}),
            "spec.containers[0].livenessProbe: Required value: must specify a handler type",
        ),
        (
            "/spec/initContainers",
            json!([{"name": "c", "image": "i"}]),
            "spec.initContainers[0].name: Duplicate value: \"c\"",
        ),
        (
            "/spec/restartPolicy",
            json!("Maybe"),
            "spec.restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ),
        (
            "/spec/activeDeadlineSeconds",
            json!(0),
            "spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive",
        ),
    ] {
        assert_eq!(texts(Pod.validate(&with(pointer, value))), [expected]);
    }
}

#[test]
fn almost_nothing_of_a_pods_spec_changes() {
    let old = pod();
    assert!(Pod.validate_update(&with("/spec/containers/0/image", json!("busybox:2")), &old).is_empty());
    assert!(
        Pod.validate_update(&with("/spec/tolerations", json!([{"key": "a", "operator": "Exists"}])), &old)
            .is_empty()
    );
    let moved = texts(Pod.validate_update(&with("/spec/nodeName", json!("n")), &old));
    assert!(moved[0].starts_with("spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,"), "{moved:?}");
    let volumes = json!([{"name": "data", "emptyDir": {}}]);
    assert_eq!(Pod.validate_update(&with("/spec/volumes", volumes), &old).len(), 1);
    assert!(Pod.generation_changes(&with("/spec/nodeName", json!("n")), &old));
}

#[test]
fn a_status_update_keeps_spec_owners_and_quality() {
    let mut old = pod();
    old["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"});
    let mut new = with("/spec/nodeName", json!("n"));
    new["metadata"]["ownerReferences"] = json!([{}]);
    new["status"] = json!({"phase": "Running"});
    Pod.prepare_status_update(&mut new, &old);
    assert_eq!(new["spec"], old["spec"]);
    assert!(new["metadata"].get("ownerReferences").is_none());
    assert_eq!(new["status"], json!({"phase": "Running", "qosClass": "BestEffort"}));
}

#[test]
fn deletion_waits_only_for_pods_that_run() {
    let mut object = pod();
    assert_eq!(Pod.grace_seconds(&object, None), 0);
    object["spec"]["nodeName"] = json!("n");
    assert_eq!(Pod.grace_seconds(&object, None), 30);
    assert_eq!(Pod.grace_seconds(&object, Some(5)), 5);
    assert_eq!(Pod.grace_seconds(&object, Some(-5)), 1);
    object["status"]["phase"] = json!("Succeeded");
    assert_eq!(Pod.grace_seconds(&object, None), 0);
}

#[test]
fn rows_look_as_kubectl_prints_them() {
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
    let row = |status: Value| {
        let mut object = pod();
        object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        object["status"] = status;
        let cells = Pod.cells(&object, now);
        cells.iter().take(5).map(|c| c.as_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row(json!({"phase": "Pending"})), "p 0/1 Pending 0 10m");
    assert_eq!(
        row(
            json!({"phase": "Running", "containerStatuses": [{"ready": true, "state": {"running": {}}, "restartCount": 0}]})
        ),
        "p 1/1 Running 0 10m"
    );
    assert_eq!(
        row(
            json!({"phase": "Running", "containerStatuses": [{"ready": false, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3,
            "lastState": {"terminated": {"finishedAt": "2026-01-01T00:08:00Z"}}}]})
        ),
        "p 0/1 CrashLoopBackOff 3 (2m ago) 10m"
    );
    assert_eq!(
        row(
            json!({"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]})
        ),
        "p 0/1 Completed 0 10m"
    );
    assert_eq!(
        row(json!({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 2}}}]})),
        "p 0/1 ExitCode:2 0 10m"
    );
    assert_eq!(
        row(json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]})),
        "p 0/1 Init:0/0 0 10m"
    );
    assert_eq!(
        row(
            json!({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]})
        ),
        "p 0/1 ContainerCreating 0 10m"
    );
    let mut gone = pod();
    gone["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    gone["status"] = json!({"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}]});
    let cells = Pod.cells(&gone, now);
    assert_eq!(cells[2], "Terminating");
    assert_eq!(cells[5..], ["10.0.0.1", "<none>", "<none>", "<none>"].map(|c| json!(c)));
}

#[test]
fn pods_are_selected_by_node_and_phase() {
    let mut object = pod();
    object["spec"]["nodeName"] = json!("n");
    let fields = Pod.selectable_fields(&object);
    assert!(fields.contains(&("spec.nodeName", "n".to_owned())));
    assert!(Pod.supports_field("status.phase") && Pod.supports_field("spec.hostNetwork"));
    assert!(!Pod.supports_field("spec.volumes"));
}
