//! Tables of what is expanded, what replaces what, and what is refused.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::objects::NodeFacts;
use super::super::tests::{Bench, NODE, object_of, pod};
use super::*;

/// The table of the Kubernetes documentation and of the kubelet's own tests.
#[test]
fn references_are_expanded() {
    let known = |name: &str| match name {
        "VAR_A" => Some("A"),
        "VAR_B" => Some("B"),
        "VAR_C" => Some("C"),
        "VAR_REF" => Some("$(VAR_A)"),
        "VAR_EMPTY" => Some(""),
        _ => None,
    };
    for (text, expected) in [
        ("$(VAR_A)", "A"),
        ("___$(VAR_B)___", "___B___"),
        ("$$(VAR_B)_$(VAR_A)", "$(VAR_B)_A"),
        ("$$(VAR_A)_$$(VAR_B)", "$(VAR_A)_$(VAR_B)"),
        ("f000-$$VAR_A", "f000-$VAR_A"),
        ("foo\\$(VAR_C)bar", "foo\\Cbar"),
        ("foo\\\\$(VAR_C)bar", "foo\\\\Cbar"),
        ("$(VAR_A$(VAR_B)", "$(VAR_A$(VAR_B)"),
        ("$(VAR_A", "$(VAR_A"),
        ("$$$(VAR_B)", "$B"),
        ("$$$$(VAR_B)", "$$(VAR_B)"),
        ("$VAR_A", "$VAR_A"),
        ("$(VAR_DNE)$(VAR_A)", "$(VAR_DNE)A"),
        ("$(VAR_REF)", "$(VAR_A)"),
        ("$(VAR_EMPTY)", ""),
        ("foo$(VAR_EMPTY)bar", "foobar"),
        ("$()", "$()"),
        ("$", "$"),
        ("", ""),
        ("a$", "a$"),
        ("ü$ü$(VAR_A)ü", "ü$üAü"),
        ("$$$", "$$"),
    ] {
        assert_eq!(expand(text, known), expected, "{text}");
    }
}

fn objects() -> Objects {
    let config = json!({ "data": { "key": "config", "other": "o" }, "binaryData": { "raw": "AAE=" } });
    let secret = json!({ "data": { "key": "c2VjcmV0", "pass": "cHc=" } });
    let bad = json!({ "data": { "bytes": "/w==", "zero": "YQBi" } });
    Objects {
        config_maps: [("c".to_owned(), Arc::new(object_of(config)))].into(),
        secrets: [
            ("s".to_owned(), Arc::new(object_of(secret))),
            ("bad".to_owned(), Arc::new(object_of(bad))),
        ]
        .into(),
        node: NodeFacts { addresses: vec!["192.0.2.7".to_owned()], ..NodeFacts::default() },
    }
}

fn rendered(container: Value) -> Result<Vec<(String, String)>, String> {
    let mut container = container;
    container["name"] = "main".into();
    environment(&pod(json!({})), &object_of(container), &objects()).map_err(|failed| failed.message)
}

fn variables(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn what_comes_later_replaces_what_came_before_in_its_place() {
    let container = json!({
        "envFrom": [
            { "configMapRef": { "name": "c" } },
            { "prefix": "S_", "secretRef": { "name": "s" } },
            { "configMapRef": { "name": "gone", "optional": true } },
            { "secretRef": { "name": "gone", "optional": true } }
        ],
        "env": [
            { "name": "A", "value": "a" },
            { "name": "B", "value": "$(A)-$(key)-$(S_pass)-$(LATER)" },
            { "name": "LATER", "value": "x" },
            { "name": "other", "value": "new" },
            { "name": "A", "value": "$(A)$(A)" },
            { "name": "EMPTY" },
        ]
    });
    let expected = variables(&[
        ("key", "config"),
        ("other", "new"),
        ("S_key", "secret"),
        ("S_pass", "pw"),
        ("A", "aa"),
        ("B", "a-config-pw-$(LATER)"),
        ("LATER", "x"),
        ("EMPTY", ""),
    ]);
    assert_eq!(rendered(container), Ok(expected));
}

#[test]
fn values_come_from_everywhere_and_are_not_expanded() {
    let from = |name: &str, source: Value| json!({ "name": name, "valueFrom": source });
    let container = json!({ "env": [
        from("CONFIG", json!({ "configMapKeyRef": { "name": "c", "key": "key" } })),
        from("SECRET", json!({ "secretKeyRef": { "name": "s", "key": "pass" } })),
        from("NAME", json!({ "fieldRef": { "fieldPath": "metadata.name" } })),
        from("NODE", json!({ "fieldRef": { "fieldPath": "spec.nodeName" } })),
        from("HOST", json!({ "fieldRef": { "fieldPath": "status.hostIP" } })),
        from("CPU", json!({ "resourceFieldRef": { "resource": "limits.cpu" } })),
        from("NO_MAP", json!({ "configMapKeyRef": { "name": "gone", "key": "key", "optional": true } })),
        from("NO_KEY", json!({ "configMapKeyRef": { "name": "c", "key": "gone", "optional": true } })),
        from("NO_SECRET", json!({ "secretKeyRef": { "name": "gone", "key": "key", "optional": true } })),
        from("NO_SECRET_KEY", json!({ "secretKeyRef": { "name": "s", "key": "gone", "optional": true } })),
        json!({ "name": "ALL", "value": "$(CONFIG) $(SECRET) $(NO_KEY)" }),
    ], "resources": { "limits": { "cpu": "2" } } });
    let expected = variables(&[
        ("CONFIG", "config"),
        ("SECRET", "pw"),
        ("NAME", "pod"),
        ("NODE", NODE),
        ("HOST", "192.0.2.7"),
        ("CPU", "2"),
        ("ALL", "config pw $(NO_KEY)"),
    ]);
    assert_eq!(rendered(container), Ok(expected));
}

#[test]
fn what_is_missing_or_no_text_is_refused_without_its_value() {
    let from = |source: Value| json!({ "env": [{ "name": "V", "valueFrom": source }] });
    for (container, expected) in [
        (json!({ "envFrom": [{ "configMapRef": { "name": "gone" } }] }), "configmap \"gone\" not found"),
        (json!({ "envFrom": [{ "secretRef": { "name": "gone" } }] }), "secret \"gone\" not found"),
        (from(json!({ "configMapKeyRef": { "name": "gone", "key": "k" } })), "configmap \"gone\" not found"),
        (from(json!({ "secretKeyRef": { "name": "gone", "key": "k" } })), "secret \"gone\" not found"),
        (
            from(json!({ "configMapKeyRef": { "name": "c", "key": "k" } })),
            "couldn't find key k in ConfigMap ns/c",
        ),
        (
            from(json!({ "configMapKeyRef": { "name": "c", "key": "raw" } })),
            "couldn't find key raw in ConfigMap ns/c",
        ),
        (from(json!({ "secretKeyRef": { "name": "s", "key": "k" } })), "couldn't find key k in Secret ns/s"),
        (
            from(json!({ "secretKeyRef": { "name": "bad", "key": "bytes" } })),
            "key bytes of secret \"bad\" is not text and cannot be an environment variable: mount it as a file",
        ),
        (
            from(json!({ "secretKeyRef": { "name": "bad", "key": "zero" } })),
            "environment variable V holds a NUL byte, which none can",
        ),
        (
            from(json!({ "fieldRef": { "fieldPath": "spec.x" } })),
            "environment variable V: unsupported fieldPath: spec.x",
        ),
        (
            from(json!({ "resourceFieldRef": { "resource": "x" } })),
            "environment variable V: unsupported container resource : x",
        ),
        (
            from(json!({ "fileKeyRef": { "volumeName": "v", "path": "p", "key": "k" } })),
            "environment variable V takes its value from a file (fileKeyRef), which Berth does not do yet",
        ),
    ] {
        assert_eq!(rendered(container.clone()), Err(expected.to_owned()), "{container}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_container_refers_to_is_read_from_the_cluster() {
    use k8s_openapi::api::core::v1::{ConfigMap, Secret};
    let bench = Bench::new().await;
    bench
        .create::<ConfigMap>(json!({ "metadata": { "name": "c", "namespace": "ns" }, "data": { "a": "1" } }))
        .await;
    bench
        .create::<Secret>(json!({ "metadata": { "name": "s", "namespace": "ns" }, "data": { "b": "Mg==" } }))
        .await;
    let container: Container = object_of(json!({ "name": "main",
        "envFrom": [{ "configMapRef": { "name": "c" } }, { "secretRef": { "name": "s" } }],
        "env": [
            { "name": "MEMORY", "valueFrom": { "resourceFieldRef": { "resource": "limits.memory", "divisor": "1Gi" } } },
            { "name": "HOST", "valueFrom": { "fieldRef": { "fieldPath": "status.hostIPs" } } },
        ]
    }));
    let pod = pod(json!({}));
    let objects = Objects::of_container(&bench.cluster, &pod, &container).await.unwrap();
    let expected = variables(&[("a", "1"), ("b", "2"), ("MEMORY", "2"), ("HOST", "192.0.2.7")]);
    assert_eq!(environment(&pod, &container, &objects).unwrap(), expected);
}
