//! Pods get their nodes and their volumes.

use berth_controllers::attach_detach;
use berth_testkit::{Loops, TestCluster, delete, patch, until, until_any, until_gone};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::fakes::{self, DRIVER, node, pod};
use crate::volume_loops;

fn claim(name: &str, class: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    })
}

fn class(name: &str) -> Value {
    json!({ "metadata": { "name": name }, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer" })
}

/// The status of a new object is not taken from its creator, so it is written after; and a new node is tainted as not
/// ready until a controller sees that it is.
pub(crate) async fn create_node(cluster: &TestCluster, name: &str) -> Node {
    let wanted = node(name);
    let created: Node = cluster.create(wanted.clone()).await;
    let mut full = serde_json::to_value(&created).unwrap();
    full["status"] = wanted["status"].clone();
    let full: Node = serde_json::from_value(full).unwrap();
    cluster.all::<Node>().replace_status(name, &PostParams::default(), &full).await.unwrap();
    patch(&cluster.all::<Node>(), name, json!({ "spec": { "taints": null } })).await
}

fn everything(cluster: &TestCluster) -> Loops {
    volume_loops(&cluster.client)
        .with(berth_controllers::scheduler::run)
        .with(|cluster| attach_detach::run(cluster, None, attach_detach::FORCE_DETACH_AFTER))
        .with(fakes::provisioner)
        .with(fakes::attacher)
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn refusal(pod: &Pod) -> &str {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let refused =
        conditions.iter().find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    refused.and_then(|condition| condition.message.as_deref()).unwrap_or_default()
}

fn reports(node: &Node, volume: &str) -> bool {
    let attached =
        node.status.as_ref().and_then(|status| status.volumes_attached.as_deref()).unwrap_or_default();
    attached.iter().any(|attached| attached.name == volume)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_waits_for_its_pod_is_provisioned_attached_and_let_go() {
    let cluster = TestCluster::real_or_embedded("placement-whole").await;
    let (here, made) = (cluster.name("a"), cluster.name("made"));
    create_node(&cluster, &here).await;
    cluster.create::<StorageClass>(class(&made)).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", &made)).await;
    let loops = everything(&cluster);

    cluster.create_namespaced::<Pod>(pod("p", &["data"])).await;
    let placed = until(&cluster.namespaced::<Pod>(), "p", |pod| !node_of(pod).is_empty()).await;
    assert_eq!(node_of(&placed), here);
    let bound: PersistentVolumeClaim = cluster.namespaced().get("data").await.unwrap();
    assert_eq!(bound.annotations()["volume.kubernetes.io/selected-node"], here);
    let volume: PersistentVolume =
        cluster.all().get(&bound.spec.as_ref().unwrap().volume_name.clone().unwrap()).await.unwrap();
    let unique = format!("kubernetes.io/csi/{DRIVER}^{}", bound.uid().unwrap());
    until(&cluster.all::<Node>(), &here, |node| reports(node, &unique)).await;
    let attachment =
        until_any(&cluster.all::<VolumeAttachment>(), |attachment| attachment.spec.node_name == here).await;
    assert_eq!(attachment.spec.source.persistent_volume_name, Some(volume.name_any()));
    assert!(attachment.name_any().starts_with("csi-") && attachment.name_any().len() == 68);
    let event = cluster.has_event("p", "SuccessfulAttachVolume").await;
    assert_eq!(
        event.message.unwrap().trim_end(),
        format!("AttachVolume.Attach succeeded for volume {:?}", volume.name_any())
    );
    let event = cluster.has_event("p", "Scheduled").await;
    assert_eq!(event.message, Some(format!("Successfully assigned {}/p to {here}", cluster.namespace)));

    // While the node uses it, the volume stays, whoever is gone.
    let caches = berth_kube::Cluster::new(cluster.client.clone(), tokio_util::sync::CancellationToken::new());
    fakes::uses(&caches, &here, &[&unique]).await;
    delete(&cluster.namespaced::<Pod>(), "p").await;
    until_gone(&cluster.namespaced::<Pod>(), "p").await;
    let still: VolumeAttachment = cluster.all().get(&attachment.name_any()).await.unwrap();
    assert!(still.metadata.deletion_timestamp.is_none());
    fakes::uses(&caches, &here, &[]).await;
    until_gone(&cluster.all::<VolumeAttachment>(), &attachment.name_any()).await;
    until(&cluster.all::<Node>(), &here, |node| !reports(node, &unique)).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_fits_nowhere_says_why_and_goes_when_something_helps() {
    let cluster = TestCluster::real_or_embedded("placement-unfit").await;
    let loops = everything(&cluster);
    let pods = cluster.namespaced::<Pod>();

    cluster.create_namespaced::<Pod>(pod("p", &["data"])).await;
    until(&pods, "p", |pod| refusal(pod).starts_with("no nodes available")).await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    until(&pods, "p", |pod| refusal(pod).contains("persistentvolumeclaim \"data\" not found")).await;
    let made = cluster.name("made");
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", &made)).await;
    let refused = until(&pods, "p", |pod| refusal(pod).contains("unbound immediate")).await;
    assert_eq!(
        refusal(&refused),
        "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. no new claims to deallocate, preemption: 0/1 nodes are \
         available: 1 Preemption is not helpful for scheduling."
    );
    let event = cluster.has_event("p", "FailedScheduling").await;
    assert_eq!(event.source.unwrap().component.as_deref(), Some("default-scheduler"));
    cluster.create::<StorageClass>(class(&made)).await;
    until(&pods, "p", |pod| node_of(pod) == here).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_behind_a_gate_waits_and_a_foreign_one_is_left_alone() {
    let cluster = TestCluster::real_or_embedded("placement-gates").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    let loops = everything(&cluster);
    let pods = cluster.namespaced::<Pod>();
    let mut gated = pod("gated", &[]);
    gated["spec"]["schedulingGates"] = json!([{ "name": "example.com/wait" }]);
    cluster.create_namespaced::<Pod>(gated).await;
    let mut foreign = pod("foreign", &[]);
    foreign["spec"]["schedulerName"] = json!("somebody-else");
    cluster.create_namespaced::<Pod>(foreign).await;
    // One that comes after both is placed; by then both were looked at.
    cluster.create_namespaced::<Pod>(pod("last", &[])).await;
    until(&pods, "last", |pod| node_of(pod) == here).await;
    for name in ["gated", "foreign"] {
        assert_eq!(node_of(&pods.get(name).await.unwrap()), "", "{name}");
    }
    let open = kube::api::Patch::Merge(json!({ "spec": { "schedulingGates": null } }));
    pods.patch("gated", &kube::api::PatchParams::default(), &open).await.unwrap();
    until(&pods, "gated", |pod| node_of(pod) == here).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_moves_only_when_its_node_lets_go_or_is_out_of_service() {
    let cluster = TestCluster::real_or_embedded("placement-moves").await;
    let (a, b) = (cluster.name("a"), cluster.name("b"));
    for node in [&a, &b] {
        create_node(&cluster, node).await;
    }
    let name = cluster.name("volume");
    cluster
        .create::<PersistentVolume>(json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": "",
                "csi": { "driver": DRIVER, "volumeHandle": name },
                "claimRef": { "namespace": cluster.namespace, "name": "data" },
            },
        }))
        .await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", "")).await;
    let loops = everything(&cluster);
    let on = |pod_name: &str, node: &str| {
        let mut pod = pod(pod_name, &["data"]);
        pod["spec"]["nodeName"] = json!(node);
        pod
    };
    let unique = format!("kubernetes.io/csi/{DRIVER}^{name}");
    let nodes = cluster.all::<Node>();
    cluster.create_namespaced::<Pod>(on("first", &a)).await;
    until(&nodes, &a, |node| reports(node, &unique)).await;
    let caches = berth_kube::Cluster::new(cluster.client.clone(), tokio_util::sync::CancellationToken::new());
    fakes::uses(&caches, &a, &[&unique]).await;

    cluster.create_namespaced::<Pod>(on("second", &b)).await;
    let event = cluster.has_event("second", "FailedAttachVolume").await;
    let expected = format!("Multi-Attach error for volume {name:?} Volume is already used by pod(s) first");
    assert_eq!(event.message, Some(expected));
    delete(&cluster.namespaced::<Pod>(), "first").await;
    until_gone(&cluster.namespaced::<Pod>(), "first").await;
    assert!(!reports(&nodes.get(&b).await.unwrap(), &unique), "the first node still uses it");

    let taint = json!({ "spec": { "taints": [{ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" }] } });
    nodes.patch(&a, &kube::api::PatchParams::default(), &kube::api::Patch::Merge(taint)).await.unwrap();
    until(&nodes, &b, |node| reports(node, &unique)).await;
    assert!(!reports(&nodes.get(&a).await.unwrap(), &unique));
    loops.stop().await;
}

/// 1,000 with BERTH_LONG set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pods_at_once_are_placed_quickly() {
    let count = if std::env::var_os("BERTH_LONG").is_some() { 1000 } else { 200 };
    let cluster = TestCluster::real_or_embedded("placement-many").await;
    let here = cluster.name("a");
    for at in 0..count {
        cluster.create_namespaced::<Pod>(pod(&format!("p{at}"), &[])).await;
    }
    let loops = everything(&cluster);
    let shutdown = tokio_util::sync::CancellationToken::new();
    let caches = berth_kube::Cluster::new(cluster.client.clone(), shutdown.clone());
    caches.cache::<Pod>().synced().await;
    let started = std::time::Instant::now();
    create_node(&cluster, &here).await;
    let pods = caches.cache::<Pod>();
    let (sender, mut receiver) = tokio::sync::watch::channel(std::collections::HashSet::new());
    pods.on_change(move |pod| {
        if !node_of(pod).is_empty() {
            sender.send_modify(|placed| {
                placed.insert(pod.name_any());
            });
        }
    });
    let placed = receiver.wait_for(|placed| placed.len() == count);
    tokio::time::timeout(berth_testkit::PATIENCE, placed).await.unwrap().unwrap();
    println!("{count} pods in {:?}", started.elapsed());
    shutdown.cancel();
    loops.stop().await;
}
