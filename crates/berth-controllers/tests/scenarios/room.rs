//! Room that a pod had reserved and gives back is seen by those who wait for it.

use berth_testkit::{TestCluster, delete, patch, until, until_gone};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::fakes::{DRIVER, pod};
use crate::placement::create_node;
use crate::volume_loops;

const SELECTED: &str = "volume.kubernetes.io/selected-node";
const HANDED: &str = "volume.kubernetes.io/storage-provisioner";

/// A claim that nobody makes a volume for.
async fn unmade_claim(cluster: &TestCluster, name: &str) {
    let class = cluster.name(&format!("unmade-{name}"));
    cluster
        .create::<StorageClass>(json!({
            "metadata": { "name": class }, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
        }))
        .await;
    let claim = json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    });
    cluster.create_namespaced::<PersistentVolumeClaim>(claim).await;
}

/// A pod that takes most of a node.
fn large(name: &str, claims: &[&str]) -> Value {
    let mut pod = pod(name, claims);
    pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "6" } });
    pod
}

fn refusal(pod: &Pod) -> &str {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let refused = conditions.iter().find(|known| known.type_ == "PodScheduled" && known.status == "False");
    refused.and_then(|condition| condition.message.as_deref()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_given_back_by_a_pod_without_a_node_is_taken_by_the_next() {
    let cluster = TestCluster::real_or_embedded("room-back").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    unmade_claim(&cluster, "data").await;
    let loops = volume_loops(&cluster.client).with(berth_controllers::scheduler::run);
    let pods = cluster.namespaced::<Pod>();
    cluster.create_namespaced::<Pod>(large("first", &["data"])).await;
    until(&cluster.namespaced::<PersistentVolumeClaim>(), "data", |claim| {
        claim.annotations().contains_key(SELECTED)
    })
    .await;
    cluster.create_namespaced::<Pod>(large("second", &[])).await;
    until(&pods, "second", |pod| refusal(pod).contains("Insufficient cpu")).await;
    delete(&pods, "first").await;
    let placed = until(&pods, "second", |pod| pod.spec.as_ref().unwrap().node_name.is_some()).await;
    assert_eq!(placed.spec.unwrap().node_name, Some(here));
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_reserved_node_goes_is_told_at_once() {
    let cluster = TestCluster::real_or_embedded("room-gone").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    unmade_claim(&cluster, "data").await;
    let loops = volume_loops(&cluster.client).with(berth_controllers::scheduler::run);
    let pods = cluster.namespaced::<Pod>();
    cluster.create_namespaced::<Pod>(pod("p", &["data"])).await;
    until(&cluster.namespaced::<PersistentVolumeClaim>(), "data", |claim| {
        claim.annotations().contains_key(SELECTED) && claim.annotations().contains_key(HANDED)
    })
    .await;
    // One that comes later is placed; by then the first waits for nothing but its volume.
    cluster.create_namespaced::<Pod>(pod("later", &[])).await;
    until(&pods, "later", |pod| pod.spec.as_ref().unwrap().node_name.is_some()).await;
    delete(&cluster.all::<Node>(), &here).await;
    until_gone(&cluster.all::<Node>(), &here).await;
    until(&pods, "p", |pod| refusal(pod).contains("no nodes available")).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_node_is_taken_back_says_so_and_gets_it_again() {
    let cluster = TestCluster::real_or_embedded("room-taken-back").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    unmade_claim(&cluster, "data").await;
    let loops = volume_loops(&cluster.client).with(berth_controllers::scheduler::run);
    let (pods, claims) = (cluster.namespaced::<Pod>(), cluster.namespaced::<PersistentVolumeClaim>());
    cluster.create_namespaced::<Pod>(pod("p", &["data"])).await;
    until(&claims, "data", |claim| claim.annotations().contains_key(SELECTED)).await;
    patch(&claims, "data", json!({ "metadata": { "annotations": { SELECTED: null } } })).await;
    until(&pods, "p", |pod| refusal(pod).contains("selectedNode annotation reset for PVC \"data\"")).await;
    // Whatever happens while it rests does not make it rest for ever.
    for change in ["one", "two", "three"] {
        patch(&claims, "data", json!({ "metadata": { "labels": { "change": change } } })).await;
    }
    until(&claims, "data", |claim| claim.annotations().get(SELECTED) == Some(&here)).await;
    loops.stop().await;
}
