//! Pods with `hostUsers: false`: each has ids of its own, and finds its volumes as without them.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use serde_json::{Value, json};

use crate::world::{World, container, is_ready};

/// The ids of the machine that are 0 in a pod, and their number, as the kernel tells its processes.
const MAP: &str = "tr -s ' ' < /proc/self/uid_map | tr -s ' ' < /proc/self/gid_map; ";

fn without_host_users(main: &Value, volumes: &Value) -> Value {
    json!({ "hostUsers": false, "containers": [main], "volumes": volumes, "restartPolicy": "Never", "terminationGracePeriodSeconds": 0 })
}

async fn printed(world: &World, name: &str, spec: Value) -> String {
    world.pod(name, spec).await;
    let pod = world.until_phase(name, "Succeeded").await;
    world.log(&pod, "main", false).await
}

/// The number of the range of ids that a pod has, as its record says.
fn recorded(world: &World, pod: &Pod) -> Option<u32> {
    let path = world.path().join("pods").join(pod.metadata.uid.as_ref().unwrap()).join("userns");
    let record: Value = serde_json::from_slice(&std::fs::read(path).ok()?).unwrap();
    u32::try_from(record["uidMappings"][0]["hostId"].as_u64().unwrap()).ok()
}

/// Which pods of the world have a range of the machine.
fn taken(world: &World) -> Vec<PathBuf> {
    let links = std::fs::read_dir("/run/berth/user-namespaces").into_iter().flatten().flatten();
    let pods = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    pods.filter(|pod| pod.starts_with(world.path())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_volume_looks_the_same_to_a_pod_without_host_users() {
    let world = World::new().await;
    let map = json!({ "metadata": { "name": "c" }, "data": { "k": "value" } });
    world.create(&world.here::<ConfigMap>(), map).await;
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("file"), "").unwrap();
    std::os::unix::fs::chown(host.path().join("file"), Some(1000), Some(2000)).unwrap();
    let script = "stat -c %u:%g /empty /memory /config/k /part /host/file /projected/labels; cat /config/k; echo; \
         touch /empty/x /memory/x /part/x /host/x; stat -c %u:%g /empty/x /host/x; id -G; echo bye > /dev/termination-log";
    let main = json!({
        "name": "main", "image": "i", "command": ["sh", "-c", script],
        "volumeMounts": [
            { "name": "e", "mountPath": "/empty" }, { "name": "m", "mountPath": "/memory" },
            { "name": "c", "mountPath": "/config" }, { "name": "e", "mountPath": "/part", "subPath": "a/b" },
            { "name": "h", "mountPath": "/host" }, { "name": "p", "mountPath": "/projected" },
        ],
    });
    let labels = json!({ "path": "labels", "fieldRef": { "fieldPath": "metadata.name" } });
    let volumes = json!([
        { "name": "e", "emptyDir": {} }, { "name": "m", "emptyDir": { "medium": "Memory" } },
        { "name": "c", "configMap": { "name": "c" } }, { "name": "h", "hostPath": { "path": host.path() } },
        { "name": "p", "projected": { "sources": [{ "downwardAPI": { "items": [labels] } }] } },
    ]);
    let mut spec = without_host_users(&main, &volumes);
    let with_users = spec.clone();
    spec["securityContext"] = json!({ "fsGroup": 4321, "supplementalGroups": [99] });
    let log = printed(&world, "p", spec.clone()).await;
    let expected = "0:4321\n0:4321\n0:4321\n0:4321\n1000:2000\n0:4321\nvalue\n0:4321\n0:0\n0 99 4321\n";
    assert_eq!(log, expected);
    let pod = world.here::<Pod>().get("p").await.unwrap();
    let ended = container(&pod, "main").unwrap().state.as_ref().unwrap().terminated.clone().unwrap();
    assert_eq!(ended.message.as_deref(), Some("bye\n"));
    let made = std::fs::metadata(host.path().join("x")).unwrap();
    assert_eq!((made.uid(), made.gid()), (0, 0), "files on disk have the ids that the pod sees");
    // The same pod with the machine's users prints the same.
    let mut with_users = with_users;
    with_users["hostUsers"] = true.into();
    with_users["securityContext"] = spec["securityContext"].clone();
    assert_eq!(printed(&world, "q", with_users).await, expected);
    for name in ["p", "q"] {
        world.delete(name).await;
    }
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_pods_have_different_ids_and_keep_them_when_the_node_restarts() {
    let mut world = World::new().await;
    let main = |script: &str| {
        json!({
            "name": "main", "image": "i", "command": ["sh", "-c", script],
            "readinessProbe": { "exec": { "command": ["sh", "-c", "test $(id -u) = 0 && test -O /etc"] }, "periodSeconds": 1 },
        })
    };
    let mut first = Vec::new();
    for name in ["a", "b"] {
        let mut spec = without_host_users(&main(&format!("{MAP} exec sleep 1000")), &json!([]));
        spec["restartPolicy"] = "Always".into();
        world.pod(name, spec).await;
        let pod = world.until_pod(name, is_ready).await;
        let id = recorded(&world, &pod).unwrap();
        assert_eq!(world.until_log(&pod, "main", "\n").await, format!(" 0 {id} 65536\n"));
        // Further processes are in the same namespace, whose root is nobody outside.
        assert_eq!(world.exec(&pod, "main", MAP).await, format!(" 0 {id} 65536\n"));
        first.push(id);
    }
    assert!(first[0].abs_diff(first[1]) >= 65_536, "{first:?}");
    assert_eq!(taken(&world).len(), 2);
    world.kill().await;
    world.start().await;
    let pod = world.until_pod("a", is_ready).await;
    assert_eq!(recorded(&world, &pod), Some(first[0]));
    assert_eq!(world.exec(&pod, "main", "id -u; touch /etc/x; stat -c %u /etc/x").await, "0\n0\n");
    // A container that is started again has the same ids, and a pod that comes later has others.
    world.exec(&pod, "main", "kill -KILL 2").await;
    let pod =
        world.until_pod("a", |pod| is_ready(pod) && container(pod, "main").unwrap().restart_count == 1).await;
    assert_eq!(world.until_log(&pod, "main", "\n").await, format!(" 0 {} 65536\n", first[0]));
    world.pod("c", without_host_users(&main("exec sleep 1000"), &json!([]))).await;
    let pod = world.until_pod("c", is_ready).await;
    assert!(!first.contains(&recorded(&world, &pod).unwrap()));
    for name in ["a", "b", "c"] {
        world.delete(name).await;
    }
    world.until_clean().await;
    assert!(taken(&world).is_empty(), "ids are free again when their pod is gone: {:?}", taken(&world));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_without_host_users_are_rights_in_the_pod_alone() {
    let world = World::new().await;
    let script = "grep -E '^(Uid|Gid|Groups|CapEff|NoNewPrivs|Seccomp):' /proc/self/status | tr -s '\\t ' ' '; \
         mount -t tmpfs none /mnt 2>/dev/null && echo mounted; hostname x 2>/dev/null && echo named; true";
    let cases = [
        (
            json!({}),
            "Uid: 0 0 0 0\nGid: 0 0 0 0\nGroups: 0\nCapEff: 00000000a00425fb\nNoNewPrivs: 0\nSeccomp: 0\n",
        ),
        (
            json!({ "capabilities": { "drop": ["ALL"], "add": ["SYS_ADMIN"] } }),
            "Uid: 0 0 0 0\nGid: 0 0 0 0\nGroups: 0\nCapEff: 0000000000200000\nNoNewPrivs: 0\nSeccomp: 0\nmounted\nnamed\n",
        ),
        (
            json!({
                "runAsUser": 1000, "runAsGroup": 2000, "runAsNonRoot": true, "allowPrivilegeEscalation": false,
                "seccompProfile": { "type": "RuntimeDefault" }, "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            }),
            "Uid: 1000 1000 1000 1000\nGid: 2000 2000 2000 2000\nGroups: 2000\nCapEff: 0000000000000000\nNoNewPrivs: 1\nSeccomp: 2\n",
        ),
    ];
    for (number, (security, expected)) in cases.into_iter().enumerate() {
        let main = json!({ "name": "main", "image": "i", "command": ["sh", "-c", script], "securityContext": security });
        let log = printed(&world, &format!("p{number}"), without_host_users(&main, &json!([]))).await;
        let log = log.replace(" \n", "\n");
        let groups = expected.replace("Groups: 0\n", "Groups:\n").replace("Groups: 2000\n", "Groups:\n");
        assert!(log == expected || log == groups, "{security}: {log}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_cannot_be_shown_with_other_ids_is_named_by_an_event() {
    let world = World::new().await;
    let main = json!({
        "name": "main", "image": "i", "command": ["sleep", "1000"], "volumeMounts": [{ "name": "h", "mountPath": "/h" }],
    });
    let volumes = json!([{ "name": "h", "hostPath": { "path": "/sys/kernel" } }]);
    world.pod("p", without_host_users(&main, &volumes)).await;
    let why = "MountVolume.SetUp failed for volume \"h\": /sys/kernel: its filesystem, or one that is mounted in it, has no \
               idmapped mounts";
    world.has_event("p", "FailedMount", why).await;
    let waits = |pod: &Pod| {
        let state = container(pod, "main").and_then(|main| main.state.clone());
        let waiting = state.and_then(|state| state.waiting);
        waiting.is_some_and(|waiting| waiting.reason.as_deref() == Some("CreateContainerError"))
    };
    world.until_pod("p", waits).await;
    world.delete("p").await;
    let main = json!({
        "name": "main", "image": "i", "command": ["sleep", "1000"], "securityContext": { "runAsUser": 65_536 },
    });
    world.pod("q", without_host_users(&main, &json!([]))).await;
    let why = "hostUsers: false: container main: the user or group 65536 does not exist with it, only those from 0 to 65535";
    world.has_event("q", "FailedCreatePodSandBox", why).await;
    world.delete("q").await;
    world.until_clean().await;
    assert!(taken(&world).is_empty());
}
