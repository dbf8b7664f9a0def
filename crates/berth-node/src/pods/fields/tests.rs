//! Walks every field of a pod's specification.

use std::collections::BTreeSet;

use serde_json::json;

use super::*;

/// The fields of Kubernetes' types, as the API server has them.
const TYPES: &str = include_str!("../../../../berth-apiserver/src/schema/kubernetes.types");

/// The names of a type's fields.
fn fields_of(kind: &str) -> BTreeSet<String> {
    let head = format!("type core.{kind}");
    let mut lines = TYPES.lines().skip_while(|line| line.split(" atomic").next() != Some(&head)).skip(1);
    let mut fields = BTreeSet::new();
    for line in lines.by_ref().take_while(|line| line.starts_with("  ")) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if words.contains(&"inline") {
            let within = words.iter().find_map(|word| word.strip_prefix("core."));
            fields.extend(fields_of(within.expect("what is inline has a type")));
        } else {
            fields.insert(words[0].to_owned());
        }
    }
    assert!(!fields.is_empty(), "there is no type {kind}");
    fields
}

#[test]
fn every_field_has_a_row_and_every_row_is_a_field() {
    for fields in [&POD, &POD_SECURITY, &CONTAINER, &LIFECYCLE, &RESOURCES, &SECURITY] {
        let mut known = fields_of(fields.kind);
        if fields.kind == "Container" {
            known.extend(fields_of("EphemeralContainer"));
        }
        let rows: BTreeSet<String> = fields.rows.iter().map(|(field, _)| (*field).to_owned()).collect();
        assert_eq!(rows.len(), fields.rows.len(), "a field of {} has two rows", fields.kind);
        assert_eq!(rows, known, "{}", fields.kind);
    }
}

/// A value of each ignored field that asks for something, and one that does not.
fn samples(kind: &str, field: &str) -> (Value, Value) {
    match (kind, field) {
        ("PodSpec", "hostIPC" | "hostPID" | "setHostnameAsFQDN" | "shareProcessNamespace") => {
            (json!(true), json!(false))
        }
        ("PodSpec", "os") => (json!({ "name": "windows" }), json!({ "name": "linux" })),
        ("PodSpec", "schedulingGroup") => (json!({ "podGroupName": "group" }), Value::Null),
        ("PodSecurityContext", "sysctls") => (json!([{ "name": "a", "value": "1" }]), json!([])),
        ("PodSecurityContext" | "SecurityContext", "seLinuxOptions") => {
            (json!({ "level": "s0" }), Value::Null)
        }
        ("PodSecurityContext" | "SecurityContext", "windowsOptions") => {
            (json!({ "runAsUserName": "a" }), Value::Null)
        }
        ("Container", "ports") => (
            json!([{ "containerPort": 80, "hostPort": 8080 }]),
            json!([{ "containerPort": 80, "hostPort": 80 }, { "containerPort": 81 }]),
        ),
        ("Container", "restartPolicyRules") => (json!([{ "action": "Restart" }]), json!([])),
        ("PodSpec", "resourceClaims") | ("ResourceRequirements", "claims") => {
            (json!([{ "name": "gpu" }]), json!([]))
        }
        ("ResourceRequirements", "limits") => (
            json!({ "hugepages-2Mi": "2Mi" }),
            json!({ "cpu": "1", "memory": "1Mi", "ephemeral-storage": "1Mi" }),
        ),
        _ => (json!("value"), Value::Null),
    }
}

#[test]
fn every_field_that_is_ignored_is_named_when_it_asks_for_something() {
    let tables = [
        (&POD, "", true),
        (&POD_SECURITY, "securityContext", true),
        (&CONTAINER, "", false),
        (&LIFECYCLE, "lifecycle", false),
        (&RESOURCES, "resources", false),
        (&SECURITY, "securityContext", false),
    ];
    for ((fields, within, of_pod), has_images) in
        tables.into_iter().flat_map(|table| [(table, false), (table, true)])
    {
        for (field, treatment) in fields.rows {
            let is_ignored = match treatment {
                Ignored(_) => true,
                IgnoredByProcesses(_) => !has_images,
                IgnoredByCri(_) => has_images,
                Honoured | NoEffect(_) | Refused => continue,
            };
            let (asks, does_not) = samples(fields.kind, field);
            let name = if within.is_empty() { (*field).to_owned() } else { format!("{within}.{field}") };
            let named = if is_ignored { vec![name.clone()] } else { vec![] };
            for (value, expected) in [(asks, named), (does_not, vec![])] {
                let mut object = json!({});
                if within.is_empty() {
                    object[field] = value.clone();
                } else {
                    object[within] = json!({ *field: value.clone() });
                }
                let found = if *field == "targetContainerName" {
                    // Not a field of the type that containers are started from.
                    ignored(&CONTAINER, &object, "", has_images)
                } else if of_pod {
                    object["containers"] = json!([]);
                    let pod = serde_json::from_value(json!({ "spec": object })).unwrap();
                    ignored_of_pod(&pod, has_images)
                } else {
                    object["name"] = json!("c");
                    ignored_of_container(&serde_json::from_value(object).unwrap(), has_images)
                };
                assert_eq!(found, expected, "{name}: {value}, images: {has_images}");
            }
        }
    }
}
