//! What the processes of a pod may do, as its securityContext says, and the parts of volumes that it mounts.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use serde_json::{Value, json};

use crate::world::{World, container};

const STATUS: &str = "cat /proc/self/status";

/// Runs a container with these fields to its end, and returns what it printed.
async fn printed(world: &World, name: &str, fields: Value, whole: Value) -> String {
    let mut main = json!({ "name": "main", "image": "i", "command": ["sh", "-c", STATUS] });
    main.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let mut spec = json!({ "containers": [main], "restartPolicy": "Never", "volumes": [{ "name": "e", "emptyDir": {} }] });
    spec.as_object_mut().unwrap().extend(whole.as_object().unwrap().clone());
    world.pod(name, spec).await;
    let pod = world.until_phase(name, "Succeeded").await;
    world.log(&pod, "main", false).await
}

async fn status(world: &World, name: &str, security: Value) -> HashMap<String, String> {
    let log = printed(world, name, json!({ "securityContext": security }), json!({})).await;
    let fields = log.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_has_the_rights_that_its_security_context_says() {
    let world = World::new().await;
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let own = own.lines().find_map(|line| line.strip_prefix("CapPrm:\t")).unwrap();
    let none = "0000000000000000";
    let cases = [
        (json!({}), "00000000a00425fb", "0", "0"),
        (json!({ "capabilities": { "drop": ["ALL"] } }), none, "0", "0"),
        (json!({ "capabilities": { "drop": ["all"], "add": ["NET_ADMIN"] } }), "0000000000001000", "0", "0"),
        (
            json!({ "capabilities": { "add": ["CAP_NET_ADMIN"], "drop": ["CHOWN"] } }),
            "00000000a00435fa",
            "0",
            "0",
        ),
        (json!({ "capabilities": { "add": ["ALL"] } }), own, "0", "0"),
        (json!({ "privileged": true }), own, "0", "0"),
        (
            json!({ "privileged": true, "capabilities": { "add": ["SYS_ADMIN"], "drop": ["ALL"] } }),
            own,
            "0",
            "0",
        ),
        (json!({ "allowPrivilegeEscalation": false }), "00000000a00425fb", "1", "0"),
        (json!({ "seccompProfile": { "type": "RuntimeDefault" } }), "00000000a00425fb", "0", "2"),
        (json!({ "seccompProfile": { "type": "Unconfined" } }), "00000000a00425fb", "0", "0"),
        (json!({ "privileged": true, "seccompProfile": { "type": "RuntimeDefault" } }), own, "0", "0"),
    ];
    for (number, (security, capabilities, no_new_privileges, seccomp)) in cases.into_iter().enumerate() {
        let status = status(&world, &format!("p{number}"), security.clone()).await;
        assert_eq!(status["CapEff"], capabilities, "{security}");
        assert_eq!(status["CapBnd"], capabilities, "{security}");
        assert_eq!(status["NoNewPrivs"], no_new_privileges, "{security}");
        assert_eq!(status["Seccomp"], seccomp, "{security}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_security_context_asks_for_and_the_node_cannot_do_is_refused_by_name() {
    let world = World::new().await;
    let cases = [
        (
            json!({ "capabilities": { "add": ["FLYING"] } }),
            json!({}),
            "capabilities.add: \"FLYING\" is no capability",
        ),
        (
            json!({ "seccompProfile": { "type": "Localhost", "localhostProfile": "p.json" } }),
            json!({}),
            "securityContext.seccompProfile Localhost is not supported",
        ),
        (
            json!({ "appArmorProfile": { "type": "RuntimeDefault" } }),
            json!({}),
            "securityContext.appArmorProfile RuntimeDefault is not supported",
        ),
    ];
    for (number, (security, whole, message)) in cases.into_iter().enumerate() {
        let name = format!("p{number}");
        let main = json!({ "name": "main", "image": "i", "command": ["true"], "securityContext": security });
        let mut spec = json!({ "containers": [main], "terminationGracePeriodSeconds": 0 });
        spec.as_object_mut().unwrap().extend(whole.as_object().unwrap().clone());
        world.pod(&name, spec).await;
        world.has_event(&name, "Failed", message).await;
        let waits = |pod: &_| {
            container(pod, "main").is_some_and(|main| main.state.as_ref().unwrap().waiting.is_some())
        };
        world.until_pod(&name, waits).await;
        world.delete(&name).await;
    }
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setuid_program_in_a_volume_makes_nobody_root() {
    let world = World::new().await;
    let make = json!({
        "name": "make", "image": "i", "volumeMounts": [{ "name": "e", "mountPath": "/e" }],
        "command": ["sh", "-c", "cp /usr/bin/id /e/id && chmod 4755 /e/id && mknod /e/zero c 1 5; stat -c %a /e/id"],
    });
    let fields = json!({
        "command": ["sh", "-c", "/e/id -u"],
        "volumeMounts": [{ "name": "e", "mountPath": "/e" }],
        "securityContext": {
            "runAsUser": 65534, "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
        },
    });
    assert_eq!(
        printed(&world, "strict", fields.clone(), json!({ "initContainers": [make] })).await,
        "65534\n"
    );
    // The volume alone is enough.
    let mut lax = fields;
    lax["securityContext"] = json!({ "runAsUser": 65534 });
    assert_eq!(printed(&world, "lax", lax, json!({ "initContainers": [make] })).await, "65534\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_mounts_a_part_of_a_volume() {
    let world = World::new().await;
    let map = json!({ "metadata": { "name": "c" }, "data": { "k": "value" } });
    world.create(&world.here::<ConfigMap>(), map).await;
    let fields = json!({
        "command": ["sh", "-c", "cat /etc/k; echo; ls /whole; ls /whole/logs; echo x > /part/file; cat /whole/logs/web/file"],
        "env": [{ "name": "ROLE", "value": "web" }],
        "volumeMounts": [
            { "name": "c", "mountPath": "/etc/k", "subPath": "k" },
            { "name": "e", "mountPath": "/whole" },
            { "name": "e", "mountPath": "/part", "subPathExpr": "logs/$(ROLE)" },
        ],
    });
    let volumes = json!({ "volumes": [{ "name": "e", "emptyDir": {} }, { "name": "c", "configMap": { "name": "c" } }] });
    assert_eq!(printed(&world, "p", fields, volumes).await, "value\nlogs\nweb\nx\n");
    world.delete("p").await;
    world.until_clean().await;
}

fn waiting_reason(pod: &Pod) -> Option<&str> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.first()?.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sub_path_out_of_the_volume_or_of_an_unknown_variable_is_refused() {
    let world = World::new().await;
    let link = json!({
        "name": "link", "image": "i", "command": ["ln", "-s", "/etc", "/e/out"],
        "volumeMounts": [{ "name": "e", "mountPath": "/e" }],
    });
    let leads_out =
        "failed to prepare subPath for volumeMount \"e\" of container \"main\": it leads out of the volume";
    let cases = [
        (json!({ "subPath": "out" }), leads_out),
        (json!({ "subPath": "out/made" }), leads_out),
        (
            json!({ "subPathExpr": "$(NOBODY)" }),
            "subPathExpr names NOBODY, which is no variable of the container",
        ),
        (json!({ "subPathExpr": "a/$(UP)" }), "must be a relative path without .."),
    ];
    for (number, (mut mount, message)) in cases.into_iter().enumerate() {
        let name = format!("p{number}");
        (mount["name"], mount["mountPath"]) = ("e".into(), "/data".into());
        let main = json!({
            "name": "main", "image": "i", "command": ["ls", "/data"], "volumeMounts": [mount],
            "env": [{ "name": "UP", "value": "../.." }],
        });
        let spec = json!({
            "initContainers": [link], "containers": [main], "volumes": [{ "name": "e", "emptyDir": {} }],
            "terminationGracePeriodSeconds": 0,
        });
        world.pod(&name, spec).await;
        world.has_event(&name, "Failed", message).await;
        world.until_pod(&name, |pod| waiting_reason(pod) == Some("CreateContainerConfigError")).await;
        world.delete(&name).await;
    }
    world.until_clean().await;
}
