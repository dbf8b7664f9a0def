//! A node that ends and comes back: what runs goes on, what nobody wants is removed.

use berth_testkit::until_gone;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::world::{World, container, is_ready};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_pods_are_adopted_and_keep_their_data_and_mounts() {
    let mut world = World::new().await;
    let maps = world.here::<ConfigMap>();
    world.create(&maps, json!({ "metadata": { "name": "c" }, "data": { "k": "old" } })).await;
    let script = "echo data > /e/file; while :; do sleep 0.02; done";
    let main = json!({
        "name": "main", "image": "i", "command": ["sh", "-c", script],
        "volumeMounts": [{ "name": "e", "mountPath": "/e" }, { "name": "c", "mountPath": "/c" }],
    });
    let volumes = json!([
        { "name": "e", "emptyDir": { "medium": "Memory" } }, { "name": "c", "configMap": { "name": "c" } },
    ]);
    world
        .pod("p", json!({ "containers": [main], "volumes": volumes, "terminationGracePeriodSeconds": 1 }))
        .await;
    let before = world.until_pod("p", is_ready).await;
    world.exec(&before, "main", "while [ ! -e /e/file ]; do sleep 0.01; done").await;
    let mounts = world.mounts();
    assert!(!mounts.is_empty());

    world.kill().await;
    assert_eq!(world.mounts(), mounts);
    maps.patch("c", &PatchParams::default(), &Patch::Merge(json!({ "data": { "k": "new" } }))).await.unwrap();
    world.start().await;

    let after = world.until_pod("p", is_ready).await;
    assert_eq!(container(&after, "main"), container(&before, "main"), "it was not restarted");
    assert_eq!(world.exec(&after, "main", "cat /e/file").await, "data\n");
    world.exec(&after, "main", "while [ $(cat /c/k) != new ]; do sleep 0.01; done").await;
    assert_eq!(world.mounts(), mounts);
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_went_while_the_node_was_away_are_removed_with_all_they_had() {
    let mut world = World::new().await;
    // It needs its volume to the end, which takes a while.
    let script = "trap 'sleep 0.5; cat /e/file > /h/last; exit' TERM; echo data > /e/file; touch /h/ready; \
                  while :; do sleep 0.02; done";
    let main = json!({
        "name": "main", "image": "i", "command": ["sh", "-c", script],
        "volumeMounts": [{ "name": "e", "mountPath": "/e" }, { "name": "h", "mountPath": "/h" }],
    });
    let host = tempfile::tempdir().unwrap();
    let volumes = json!([
        { "name": "e", "emptyDir": { "medium": "Memory" } }, { "name": "h", "hostPath": { "path": host.path() } },
    ]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes })).await;
    let pod = world.until_pod("p", is_ready).await;
    world.exec(&pod, "main", "while [ ! -e /h/ready ]; do sleep 0.01; done").await;
    world.kill().await;
    assert!(!world.mounts().is_empty());
    let now = DeleteParams::default().grace_period(0);
    let _ = world.here::<Pod>().delete("p", &now).await.unwrap();
    until_gone(&world.here::<Pod>(), "p").await;
    world.start().await;
    world.until_clean().await;
    assert_eq!(std::fs::read_to_string(host.path().join("last")).unwrap(), "data\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_ended_while_the_node_was_away_is_reported_with_its_exit_code() {
    let mut world = World::new().await;
    let script = "while [ ! -e /e/go ]; do sleep 0.01; done; exit 7";
    let main = json!({
        "name": "main", "image": "i", "command": ["sh", "-c", script],
        "volumeMounts": [{ "name": "e", "mountPath": "/e" }],
    });
    let gate = tempfile::tempdir().unwrap();
    let volumes = json!([{ "name": "e", "hostPath": { "path": gate.path() } }]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes, "restartPolicy": "Never" })).await;
    world.until_pod("p", is_ready).await;
    world.kill().await;
    std::fs::write(gate.path().join("go"), "").unwrap();
    world.start().await;
    let pod = world.until_phase("p", "Failed").await;
    assert_eq!(container(&pod, "main").unwrap().state.clone().unwrap().terminated.unwrap().exit_code, 7);
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_of_a_pod_goes_on_while_the_node_is_away() {
    let mut world = World::new().await;
    let main = json!({ "name": "main", "image": "i", "command": ["sleep", "infinity"] });
    let spec = json!({
        "containers": [main], "activeDeadlineSeconds": 3600, "terminationGracePeriodSeconds": 1,
    });
    world.pod("p", spec).await;
    world.until_pod("p", is_ready).await;
    world.kill().await;
    world.begin_long_ago("p").await;
    world.start().await;
    let pod = world.until_phase("p", "Failed").await;
    assert_eq!(pod.status.as_ref().unwrap().reason.as_deref(), Some("DeadlineExceeded"));
    assert!(container(&pod, "main").unwrap().state.clone().unwrap().terminated.is_some());
    world.delete("p").await;
    world.until_clean().await;
}
