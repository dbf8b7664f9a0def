//! Room that a pod had reserved and gives back is seen by those who wait for it.

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::cluster::{Loops, TestCluster, delete, patch, until, until_gone};
use crate::fakes::{DRIVER, pod};
use crate::placement::create_node;

const SELECTED: &str = "volume.kubernetes.io/selected-node";
const HANDED: &str = "volume.kubernetes.io/storage-provisioner";

/// A claim that nobody makes a volume for.
async fn unmade_claim(place: &TestCluster, name: &str) {
    let class = place.name(&format!("unmade-{name}"));
    place
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
    place.create_here::<PersistentVolumeClaim>(claim).await;
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
    let place = TestCluster::new("room-back").await;
    let here = place.name("a");
    create_node(&place, &here).await;
    unmade_claim(&place, "data").await;
    let loops = Loops::of_volumes(&place.client).with(berth_controllers::scheduler::run);
    let pods = place.here::<Pod>();
    place.create_here::<Pod>(large("first", &["data"])).await;
    until(&place.here::<PersistentVolumeClaim>(), "data", |claim| claim.annotations().contains_key(SELECTED))
        .await;
    place.create_here::<Pod>(large("second", &[])).await;
    until(&pods, "second", |pod| refusal(pod).contains("Insufficient cpu")).await;
    delete(&pods, "first").await;
    let placed = until(&pods, "second", |pod| pod.spec.as_ref().unwrap().node_name.is_some()).await;
    assert_eq!(placed.spec.unwrap().node_name, Some(here));
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_reserved_node_goes_is_told_at_once() {
    let place = TestCluster::new("room-gone").await;
    let here = place.name("a");
    create_node(&place, &here).await;
    unmade_claim(&place, "data").await;
    let loops = Loops::of_volumes(&place.client).with(berth_controllers::scheduler::run);
    let pods = place.here::<Pod>();
    place.create_here::<Pod>(pod("p", &["data"])).await;
    until(&place.here::<PersistentVolumeClaim>(), "data", |claim| {
        claim.annotations().contains_key(SELECTED) && claim.annotations().contains_key(HANDED)
    })
    .await;
    // One that comes later is placed; by then the first waits for nothing but its volume.
    place.create_here::<Pod>(pod("later", &[])).await;
    until(&pods, "later", |pod| pod.spec.as_ref().unwrap().node_name.is_some()).await;
    delete(&place.all::<Node>(), &here).await;
    until_gone(&place.all::<Node>(), &here).await;
    until(&pods, "p", |pod| refusal(pod).contains("no nodes available")).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_node_is_taken_back_says_so_and_gets_it_again() {
    let place = TestCluster::new("room-taken-back").await;
    let here = place.name("a");
    create_node(&place, &here).await;
    unmade_claim(&place, "data").await;
    let loops = Loops::of_volumes(&place.client).with(berth_controllers::scheduler::run);
    let (pods, claims) = (place.here::<Pod>(), place.here::<PersistentVolumeClaim>());
    place.create_here::<Pod>(pod("p", &["data"])).await;
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
