//! Tables of fields, resources and the way they are written.

use serde_json::{Value, json};

use super::super::tests::{UID, object_of, pod};
use super::*;

fn described_pod() -> Pod {
    let mut pod = pod(json!({
        "serviceAccountName": "robot",
        "containers": [
            { "name": "main", "resources": {
                "requests": { "cpu": "250m", "memory": "64Mi", "hugepages-2Mi": "4Mi" },
                "limits": { "cpu": "1500m", "memory": "128Mi", "hugepages-2Mi": "4Mi" } } },
            { "name": "free" }
        ],
        "initContainers": [{ "name": "first", "resources": { "requests": { "cpu": "3" } } }]
    }));
    pod.metadata.labels = Some(object_of(json!({ "b": "2", "a": "one \"quoted\"\n", "x.y/z": "slash" })));
    pod.metadata.annotations = Some(object_of(json!({ "note": "grün \u{1F6A2} \u{200b}\u{1}\t" })));
    pod.status = Some(object_of(
        json!({ "podIP": "10.0.0.9", "podIPs": [{ "ip": "10.0.0.9" }, { "ip": "fd00::9" }] }),
    ));
    pod
}

fn node() -> NodeFacts {
    NodeFacts {
        addresses: vec!["192.0.2.7".to_owned(), "fd00::7".to_owned()],
        allocatable: object_of(json!({ "cpu": "3500m", "memory": "2Gi", "ephemeral-storage": "10G" })),
    }
}

#[test]
fn fields_have_the_values_that_the_kubelet_gives() {
    for (path, expected) in [
        ("metadata.name", "pod"),
        ("metadata.namespace", "ns"),
        ("metadata.uid", UID),
        ("metadata.labels", "a=\"one \\\"quoted\\\"\\n\"\nb=\"2\"\nx.y/z=\"slash\""),
        ("metadata.annotations", "note=\"grün \u{1F6A2} \\u200b\\x01\\t\""),
        ("metadata.labels['b']", "2"),
        ("metadata.labels['x.y/z']", "slash"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['note']", "grün \u{1F6A2} \u{200b}\u{1}\t"),
        ("spec.nodeName", "here"),
        ("spec.serviceAccountName", "robot"),
        ("status.podIP", "10.0.0.9"),
        ("status.podIPs", "10.0.0.9,fd00::9"),
        ("status.hostIP", "192.0.2.7"),
        ("status.hostIPs", "192.0.2.7,fd00::7"),
    ] {
        assert_eq!(field_value(&described_pod(), path, &node()).as_deref(), Ok(expected), "{path}");
        let in_volumes = metadata_value(&described_pod(), path).ok();
        assert_eq!(in_volumes.as_deref(), path.starts_with("metadata").then_some(expected), "{path}");
    }
}

#[test]
fn fields_that_there_are_not_are_refused() {
    for (path, expected) in [
        ("spec.containers", "unsupported fieldPath: spec.containers"),
        ("", "unsupported fieldPath: "),
        ("['a']", "unsupported fieldPath: ['a']"),
        ("metadata.name['a']", "fieldPath \"metadata.name['a']\" does not support subscript"),
    ] {
        assert_eq!(field_value(&described_pod(), path, &node()).unwrap_err().to_string(), expected);
    }
    let nowhere = NodeFacts::default();
    assert_eq!(field_value(&described_pod(), "status.hostIP", &nowhere), Err(NoValue::Address));
    assert_eq!(field_value(&described_pod(), "status.hostIPs", &nowhere), Err(NoValue::Address));
}

#[test]
fn resources_are_rounded_up_and_limits_are_the_nodes_where_there_are_none() {
    for (container, resource, divisor, expected) in [
        ("main", "limits.cpu", None, Ok("2")),
        ("main", "limits.cpu", Some("0"), Ok("2")),
        ("main", "limits.cpu", Some("1m"), Ok("1500")),
        ("main", "requests.cpu", None, Ok("1")),
        ("main", "requests.cpu", Some("100m"), Ok("3")),
        ("main", "limits.memory", None, Ok("134217728")),
        ("main", "limits.memory", Some("1Mi"), Ok("128")),
        ("main", "requests.memory", Some("1M"), Ok("68")),
        ("main", "requests.hugepages-2Mi", Some("1Mi"), Ok("4")),
        ("main", "limits.hugepages-2Mi", None, Ok("4194304")),
        ("main", "limits.ephemeral-storage", Some("1G"), Ok("10")),
        ("main", "requests.ephemeral-storage", None, Ok("0")),
        ("free", "limits.cpu", Some("1m"), Ok("3500")),
        ("free", "limits.memory", Some("1Gi"), Ok("2")),
        ("free", "limits.hugepages-2Mi", None, Ok("0")),
        ("free", "requests.cpu", None, Ok("0")),
        ("first", "requests.cpu", None, Ok("3")),
        ("main", "limits.pods", None, Err("unsupported container resource : limits.pods")),
        ("main", "cpu", None, Err("unsupported container resource : cpu")),
        ("main", "wants.cpu", None, Err("unsupported container resource : wants.cpu")),
        ("gone", "limits.cpu", None, Err("container gone not found")),
    ] {
        let selector = |name: Value| {
            object_of::<ResourceFieldSelector>(
                json!({ "containerName": name, "resource": resource, "divisor": divisor }),
            )
        };
        let value = resource_value(&described_pod(), None, &selector(container.into()), &node());
        let value = value.map_err(|error| error.to_string());
        assert_eq!(value.as_deref().map_err(String::as_str), expected, "{container} {resource} {divisor:?}");
        // The same of the container itself.
        if let (Some(own), Ok(_)) = (find(&described_pod(), container), expected) {
            let own = resource_value(&described_pod(), Some(own), &selector(Value::Null), &node());
            assert_eq!(own.as_deref().ok(), expected.ok(), "{container} {resource} {divisor:?}");
        }
    }
}

#[test]
fn the_pods_own_limit_comes_before_the_nodes() {
    let pod = pod(json!({ "resources": { "limits": { "cpu": "2" } } }));
    let selector = object_of(json!({ "containerName": "main", "resource": "limits.cpu" }));
    assert_eq!(resource_value(&pod, None, &selector, &node()).as_deref(), Ok("2"));
}
