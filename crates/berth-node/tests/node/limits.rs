//! What pods may take of the machine, how they end when they take more, and containers that are added to them.

use berth_runtime::{Reason, State};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::world::{World, container};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_out_of_memory_is_reported_as_such_and_no_group_is_left() {
    let mut world = World::new().await;
    let main = json!({
        "name": "main", "image": "i", "command": ["tail", "/dev/zero"],
        "resources": { "limits": { "memory": "16Mi", "cpu": "500m" } },
    });
    let other = json!({
        "name": "other", "image": "i", "command": ["sleep", "1000"],
        "resources": { "requests": { "memory": "8Mi" } },
    });
    let spec = json!({
        "containers": [main, other], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
    });
    world.pod("p", spec).await;
    let ended = |pod: &Pod| {
        let main = container(pod, "main")?;
        main.state.as_ref()?.terminated.clone()
    };
    let pod = world.until_pod("p", |pod| ended(pod).is_some()).await;
    let ended = ended(&pod).unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (137, Some("OOMKilled")), "{ended:?}");
    assert_eq!(pod.status.as_ref().unwrap().qos_class.as_deref(), Some("Burstable"));

    // Only the container that runs has a group, also for the next node of the directory.
    let groups = world.groups();
    assert!(groups.iter().any(|group| group.ends_with("other_0")), "{groups:?}");
    assert!(!groups.iter().any(|group| group.ends_with("main_0")), "{groups:?}");
    world.kill().await;
    world.start().await;
    assert_eq!(world.groups(), groups);
    let known = world.node().runtime().containers();
    let main = known.iter().find(|known| known.id.name == "main").unwrap();
    assert!(matches!(&main.state, State::Exited(exit) if exit.reason == Reason::OutOfMemory));
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_log_is_the_message_of_a_container_that_leaves_none() {
    let world = World::new().await;
    let with = |policy: &str, name: &str, script: &str| {
        json!({
            "name": name, "image": "i", "command": ["sh", "-c", script], "terminationMessagePolicy": policy,
        })
    };
    let spec = json!({
        "restartPolicy": "Never",
        "containers": [
            with("FallbackToLogsOnError", "log", "for i in $(seq 100); do echo line $i; done; exit 1"),
            with("FallbackToLogsOnError", "file", "echo logged; echo said > /dev/termination-log; exit 1"),
            with("FallbackToLogsOnError", "good", "echo logged"),
            with("File", "none", "echo logged; exit 1"),
        ],
    });
    world.pod("p", spec).await;
    let pod = world.until_phase("p", "Failed").await;
    let message = |name: &str| {
        let state = container(&pod, name).unwrap().state.clone().unwrap();
        state.terminated.unwrap().message.unwrap_or_default()
    };
    let expected: Vec<String> = (21..=100).map(|line| format!("line {line}")).collect();
    assert_eq!(message("log").lines().collect::<Vec<_>>(), expected);
    assert_eq!(message("file"), "said\n");
    assert_eq!((message("good"), message("none")), (String::new(), String::new()));
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_is_added_to_a_pod_that_runs_and_started_once() {
    let world = World::new().await;
    let main = json!({ "name": "main", "image": "i", "command": ["sleep", "1000"] });
    world.pod("p", json!({ "containers": [main], "terminationGracePeriodSeconds": 0 })).await;
    world.until_phase("p", "Running").await;
    let added = json!({ "spec": { "ephemeralContainers": [
        { "name": "debug", "image": "i", "command": ["sh", "-c", "echo hello; exit 3"], "targetContainerName": "main" },
    ] } });
    let patch = Patch::Strategic(added);
    let pods = world.here::<Pod>();
    pods.patch_subresource("ephemeralcontainers", "p", &PatchParams::default(), &patch).await.unwrap();
    let ended = |pod: &Pod| {
        let all = pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
        all.iter().find(|one| one.name == "debug")?.state.as_ref()?.terminated.clone()
    };
    let pod = world.until_pod("p", |pod| ended(pod).is_some()).await;
    assert_eq!(ended(&pod).unwrap().exit_code, 3);
    assert_eq!(pod.status.as_ref().unwrap().phase.as_deref(), Some("Running"));
    assert_eq!(world.log(&pod, "debug", false).await, "hello\n");
    world.has_event("p", "FieldsIgnored", "targetContainerName").await;
    world.has_event("p", "Started", "").await;
    // It stays as it is, and what it is cannot be changed.
    let changed =
        Patch::Strategic(json!({ "spec": { "ephemeralContainers": [{ "name": "debug", "image": "j" }] } }));
    let refused = pods.patch_subresource("ephemeralcontainers", "p", &PatchParams::default(), &changed).await;
    assert!(format!("{:?}", refused.unwrap_err()).contains("may not be changed"));
    world.delete("p").await;
    world.until_clean().await;
}
