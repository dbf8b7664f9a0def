//! How pods live: volumes, init containers, restarts, ends.

use berth_testkit::until_gone;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::world::{World, container, is_ready};

fn sh(name: &str, script: &str) -> Value {
    json!({ "name": name, "image": "some/image:1", "command": ["sh", "-c", script] })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_runs_sees_its_volumes_and_leaves_nothing() {
    let world = World::new().await;
    world
        .create(&world.here::<ConfigMap>(), json!({ "metadata": { "name": "c" }, "data": { "k": "map" } }))
        .await;
    world
        .create(
            &world.here::<Secret>(),
            json!({ "metadata": { "name": "s" }, "stringData": { "k": "secret" } }),
        )
        .await;
    let mut main = sh(
        "main",
        "cat /c/k /s/k; echo; echo kept > /e/file; (echo x > /c/y) 2>&1; echo $NAME $HOSTNAME $(hostname); \
         trap 'exit 0' TERM; touch /e/ready; while :; do sleep 0.02; done",
    );
    main["env"] = json!([{ "name": "NAME", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }]);
    main["volumeMounts"] = json!([
        { "name": "e", "mountPath": "/e" }, { "name": "c", "mountPath": "/c" }, { "name": "s", "mountPath": "/s" },
    ]);
    let volumes = json!([
        { "name": "e", "emptyDir": {} }, { "name": "c", "configMap": { "name": "c" } },
        { "name": "s", "secret": { "secretName": "s" } }, { "name": "unused", "configMap": { "name": "missing" } },
    ]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes })).await;
    let pod = world.until_pod("p", is_ready).await;
    let status = pod.status.as_ref().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(status.pod_ip.as_deref(), Some("127.0.0.1"));
    assert_eq!(status.qos_class.as_deref(), Some("BestEffort"));
    assert!(status.start_time.is_some());
    let main = container(&pod, "main").unwrap();
    assert!(main.ready && main.started == Some(true) && main.restart_count == 0);
    assert!(main.state.as_ref().unwrap().running.is_some());
    world.exec(&pod, "main", "while [ ! -e /e/ready ]; do sleep 0.01; done").await;
    let log = world.until_log(&pod, "main", "p p p\n").await;
    assert!(log.starts_with("mapsecret\n") && log.contains("Read-only file system"), "{log}");
    assert_eq!(world.exec(&pod, "main", "cat /e/file").await, "kept\n");
    world.has_event("p", "ImageIgnored", "images are not pulled").await;
    world.has_event("p", "Started", "Container started").await;
    assert_eq!(world.mounts().len(), 1, "the secret is a tmpfs: {:?}", world.mounts());
    world.delete("p").await;
    world.has_event("p", "Killing", "Stopping container main").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_config_map_reaches_a_running_pod() {
    let world = World::new().await;
    let maps = world.here::<ConfigMap>();
    world.create(&maps, json!({ "metadata": { "name": "c" }, "data": { "k": "old" } })).await;
    let mut main = sh("main", "while [ $(cat /c/k) != new ]; do sleep 0.01; done; echo seen");
    main["volumeMounts"] = json!([{ "name": "c", "mountPath": "/c" }]);
    let volumes = json!([{ "name": "c", "configMap": { "name": "c" } }]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes, "restartPolicy": "Never" })).await;
    world.until_phase("p", "Running").await;
    let patch = Patch::Merge(json!({ "data": { "k": "new" } }));
    maps.patch("c", &PatchParams::default(), &patch).await.unwrap();
    world.until_phase("p", "Succeeded").await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_end_as_their_containers_do_and_give_their_volumes_back() {
    let world = World::new().await;
    for (name, script, phase, code) in
        [("good", "echo done > /dev/termination-log", "Succeeded", 0), ("bad", "exit 3", "Failed", 3)]
    {
        let mut main = sh("main", script);
        main["volumeMounts"] = json!([{ "name": "e", "mountPath": "/e" }]);
        let volumes = json!([{ "name": "e", "emptyDir": { "medium": "Memory" } }]);
        world.pod(name, json!({ "containers": [main], "volumes": volumes, "restartPolicy": "Never" })).await;
        let pod = world.until_phase(name, phase).await;
        let ended = container(&pod, "main").unwrap().state.clone().unwrap().terminated.unwrap();
        assert_eq!(ended.exit_code, code);
        assert_eq!(ended.message.as_deref(), (code == 0).then_some("done\n"));
        assert!(!is_ready(&pod));
        // Its log stays as long as the pod does.
        world.log(&pod, "main", false).await;
    }
    while !world.mounts().is_empty() {
        tokio::task::yield_now().await;
    }
    world.delete("good").await;
    world.delete("bad").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_crashes_is_started_again_after_growing_pauses() {
    let world = World::new().await;
    let script = "echo run; exit 5";
    world.pod("p", json!({ "containers": [sh("main", script)], "restartPolicy": "OnFailure" })).await;
    let pod = world
        .until_pod("p", |pod| {
            let waiting = container(pod, "main").and_then(|c| c.state.as_ref()?.waiting.as_ref());
            waiting.is_some_and(|waiting| waiting.reason.as_deref() == Some("CrashLoopBackOff"))
        })
        .await;
    let main = container(&pod, "main").unwrap();
    let waiting = main.state.as_ref().unwrap().waiting.as_ref().unwrap();
    let uid = pod.metadata.uid.as_deref().unwrap();
    assert_eq!(
        waiting.message.as_deref().unwrap(),
        format!("back-off 10s restarting failed container=main pod=p_default({uid})")
    );
    assert_eq!(main.restart_count, 1, "the first restart is at once: {main:#?}");
    assert_eq!(main.last_state.as_ref().unwrap().terminated.as_ref().unwrap().exit_code, 5);
    assert_eq!(pod.status.as_ref().unwrap().phase.as_deref(), Some("Running"));
    world.has_event("p", "BackOff", "Back-off restarting failed container main in pod p_default").await;
    assert_eq!(world.log(&pod, "main", false).await, "run\n");
    assert_eq!(world.log(&pod, "main", true).await, "run\n");
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_containers_run_in_order_and_sidecars_beside_the_rest() {
    let world = World::new().await;
    let mount = json!([{ "name": "e", "mountPath": "/e" }]);
    let step = |name: &str, script: &str| {
        let mut container = sh(name, script);
        container["volumeMounts"] = mount.clone();
        container
    };
    let mut side = step("side", "echo side >> /e/order; trap 'exit 0' TERM; while :; do sleep 0.02; done");
    side["restartPolicy"] = "Always".into();
    // A sidecar counts as started when it runs, so what comes next waits for what it writes.
    let second = "while ! grep -q side /e/order; do sleep 0.01; done; echo second >> /e/order";
    let init = json!([step("first", "echo first >> /e/order"), side, step("second", second)]);
    let main = step("main", "cat /e/order");
    let spec = json!({
        "initContainers": init, "containers": [main], "restartPolicy": "Never",
        "volumes": [{ "name": "e", "emptyDir": {} }],
    });
    world.pod("p", spec).await;
    let pod = world.until_phase("p", "Succeeded").await;
    assert_eq!(world.log(&pod, "main", false).await, "first\nside\nsecond\n");
    let side = container(&pod, "side").unwrap().state.clone().unwrap();
    assert!(side.terminated.is_some(), "the sidecar is stopped when its pod is done: {side:?}");
    world.delete("p").await;

    let failing = json!({
        "initContainers": [sh("first", "exit 1")], "containers": [sh("main", "exit 0")], "restartPolicy": "Never",
    });
    world.pod("q", failing).await;
    let pod = world.until_phase("q", "Failed").await;
    assert!(container(&pod, "main").unwrap().state.clone().unwrap().waiting.is_some());
    world.delete("q").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_start_says_why_and_starts_when_it_can() {
    let world = World::new().await;
    let mut main = sh("main", "echo $one $two $three $four");
    let maps = ["one", "two", "three", "four"];
    let value = |map: &str| json!({ "configMapKeyRef": { "name": map, "key": "k" } });
    main["env"] = maps.map(|map| json!({ "name": map, "valueFrom": value(map) })).to_vec().into();
    world.pod("p", json!({ "containers": [main], "restartPolicy": "Never" })).await;
    let waits = |pod: &Pod, reason: &str| {
        let waiting = container(pod, "main").and_then(|c| c.state.as_ref()?.waiting.as_ref());
        waiting.is_some_and(|waiting| waiting.reason.as_deref() == Some(reason))
    };
    world.until_pod("p", |pod| waits(pod, "CreateContainerConfigError")).await;
    // It tries again when a map comes, not when its time is over: that is 80 seconds after the fourth failure, longer
    // than anything is waited for here.
    for map in maps {
        world.has_event("p", "Failed", &format!("configmap {map:?} not found")).await;
        let map = json!({ "metadata": { "name": map }, "data": { "k": format!("there-{map}") } });
        world.create(&world.here::<ConfigMap>(), map).await;
    }
    let pod = world.until_phase("p", "Succeeded").await;
    assert_eq!(world.log(&pod, "main", false).await, "there-one there-two there-three there-four\n");
    world.delete("p").await;

    let nothing = json!({ "name": "main", "image": "some/image:1" });
    world.pod("q", json!({ "containers": [nothing] })).await;
    world.until_pod("q", |pod| waits(pod, "CreateContainerError")).await;
    world.has_event("q", "Failed", "names no command, and images are not pulled").await;
    world.delete("q").await;

    let missing = json!({ "name": "main", "image": "some/image:1", "command": ["/no/such/program"] });
    world.pod("r", json!({ "containers": [missing], "restartPolicy": "Never" })).await;
    let pod = world.until_phase("r", "Failed").await;
    let ended = container(&pod, "main").unwrap().state.clone().unwrap().terminated.unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (128, Some("StartError")));
    world.delete("r").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stubborn_pod_is_killed_after_its_grace_and_a_forgotten_one_is_cleaned_up() {
    let world = World::new().await;
    let stubborn = "trap '' TERM; while :; do sleep 0.02; done";
    let spec = json!({ "containers": [sh("main", stubborn)], "terminationGracePeriodSeconds": 1 });
    world.pod("p", spec.clone()).await;
    world.until_pod("p", is_ready).await;
    world.delete("p").await;
    world.pod("q", spec).await;
    world.until_pod("q", is_ready).await;
    let now = DeleteParams::default().grace_period(0);
    let _ = world.here::<Pod>().delete("q", &now).await.unwrap();
    until_gone(&world.here::<Pod>(), "q").await;
    world.until_clean().await;
}

fn has_exceeded_its_deadline(pod: &Pod) -> bool {
    let status = pod.status.as_ref().unwrap();
    let message = "Pod was active on the node longer than the specified deadline";
    status.phase.as_deref() == Some("Failed")
        && status.reason.as_deref() == Some("DeadlineExceeded")
        && status.message.as_deref() == Some(message)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_waits_for_its_volumes_fails_when_its_time_is_over() {
    let world = World::new().await;
    let mut main = sh("main", "exit 0");
    main["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    let volumes = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "missing" } }]);
    let spec = json!({ "containers": [main], "volumes": volumes, "activeDeadlineSeconds": 1 });
    world.pod("p", spec).await;
    let pod = world.until_phase("p", "Failed").await;
    assert!(has_exceeded_its_deadline(&pod), "{pod:#?}");
    assert!(container(&pod, "main").unwrap().state.clone().unwrap().waiting.is_some());
    world.has_event("p", "DeadlineExceeded", "longer than the specified deadline").await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_is_stopped_when_its_time_is_over_and_has_failed_even_if_it_ends_well() {
    let world = World::new().await;
    let mut main = sh("main", "trap 'exit 0' TERM; touch /e/ready; while :; do sleep 0.02; done");
    main["volumeMounts"] = json!([{ "name": "e", "mountPath": "/e" }]);
    let volumes = json!([{ "name": "e", "emptyDir": { "medium": "Memory" } }]);
    let spec = json!({ "containers": [main], "volumes": volumes, "activeDeadlineSeconds": 3600 });
    world.pod("p", spec).await;
    let pod = world.until_pod("p", is_ready).await;
    world.exec(&pod, "main", "while [ ! -e /e/ready ]; do sleep 0.01; done").await;
    world.begin_long_ago("p").await;
    let pod = world.until_phase("p", "Failed").await;
    assert!(has_exceeded_its_deadline(&pod), "{pod:#?}");
    let ended = container(&pod, "main").unwrap().state.clone().unwrap().terminated.unwrap();
    assert_eq!(ended.exit_code, 0);
    world.has_event("p", "DeadlineExceeded", "longer than the specified deadline").await;
    world.has_event("p", "Killing", "Stopping container main").await;
    while !world.mounts().is_empty() {
        tokio::task::yield_now().await;
    }
    world.delete("p").await;
    world.until_clean().await;
}
