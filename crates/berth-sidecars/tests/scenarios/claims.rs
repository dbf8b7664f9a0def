//! Claims that are left alone, named otherwise, given back, or asked for again as before.

use std::sync::Arc;

use berth_sidecars::provisioner::Options;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tonic::Code;

use crate::bench::{NODE, Server, patch};
use crate::capacity::Provisioner;
use crate::fake::{Fake, FaultKind, Storage};
use crate::faults::{MARK, settled};
use crate::power::Power;

const SELECTED: &str = "volume.kubernetes.io/selected-node";

async fn begin(change: impl FnOnce(&mut Options)) -> (Server, Arc<Storage>, Provisioner) {
    let (server, storage) = (Server::start().await, Arc::new(Storage::default()));
    *storage.places.lock() = Some(Vec::new());
    server.class("fast", json!({})).await;
    server.class("late", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    let running = Provisioner::start(&server, &Fake::driver(&storage, &Power::on()), change);
    (server, storage, running)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_a_populator_fills_is_left_alone_and_said_to_be() {
    let (server, storage, running) = begin(|_| {}).await;
    let source = json!({ "apiGroup": "populator.example.com", "kind": "Image", "name": "debian" });
    let claim = server.claim("filled", "fast", json!({ "spec": { "dataSourceRef": source } })).await;
    server.event("Provisioning", "Assuming an external populator will provision the volume").await;
    let other = server.claim("other", "fast", json!({})).await;
    settled(&server, &other).await;
    assert_eq!(storage.count("CreateVolume"), 1, "the other's");
    let left = server.claims().get("filled").await.unwrap();
    assert_eq!(left.finalizers(), claim.finalizers());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_with_a_name_of_another_shape_is_found_by_it_and_not_made_twice() {
    let (server, storage, running) = begin(|options| {
        options.volume_name_prefix = "disk".to_owned();
        options.volume_name_uuid_length = Some(8);
    })
    .await;
    let claim = server.claim("data", "fast", json!({})).await;
    let name = format!("disk-{}", &claim.uid().unwrap().replace('-', "")[..8]);
    let saved = |volume: Option<&k8s_openapi::api::core::v1::PersistentVolume>| volume.is_some();
    server.wait(server.api(), &name, "saved", saved).await;
    patch(&server.claims(), "data", json!({ "metadata": { "annotations": { "look": "again" } } })).await;
    let other = server.claim("other", "fast", json!({})).await;
    let other = format!("disk-{}", &other.uid().unwrap().replace('-', "")[..8]);
    server.wait(server.api(), &other, "saved", saved).await;
    assert_eq!(storage.count("CreateVolume"), 2);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_may_be_in_the_making_is_asked_for_at_the_same_places_though_the_node_is_gone() {
    let (server, storage, running) = begin(|_| {}).await;
    storage.fail("CreateVolume", "", FaultKind::Code(Code::Unavailable), u32::MAX);
    let selected = json!({ "metadata": { "annotations": { SELECTED: NODE } } });
    let claim = server.claim("data", "late", selected).await;
    server.event("ProvisioningFailed", "code = Unavailable").await;
    server.api::<CSINode>().delete(NODE, &DeleteParams::default()).await.unwrap();
    server.api::<Node>().delete(NODE, &DeleteParams::default()).await.unwrap();
    storage.lift_faults();
    let volume = settled(&server, &claim).await;
    assert!(volume.name_any().starts_with("pvc-"));
    let asked = storage.places.lock().clone().unwrap();
    assert!(asked.len() >= 2 && asked.iter().all(|places| *places == asked[0]), "{asked:?}");
    assert_eq!(asked[0].preferred[0].segments["topology.berth.dev/node"], NODE);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_selected_node_is_gone_or_full_is_given_back_to_the_scheduler() {
    let (server, storage, running) = begin(|_| {}).await;
    let given_back = |claim: Option<&PersistentVolumeClaim>| {
        claim.is_some_and(|claim| !claim.annotations().contains_key(SELECTED))
    };
    let selected = |node: &str| json!({ "metadata": { "annotations": { SELECTED: node } } });
    server.claim("gone", "late", selected("no-such-node")).await;
    server.event("ProvisioningFailed", "has no CSINode any more").await;
    server.wait(server.claims(), "gone", "given back", given_back).await;
    assert_eq!(storage.count("CreateVolume"), 0);
    // One who was killed may have made it there: from the next node on, nobody would know.
    let annotations = json!({ SELECTED: "no-such-node" });
    let begun = json!({ "metadata": { "annotations": annotations, "finalizers": [MARK] } });
    server.claim("begun", "late", begun).await;
    server.wait(server.claims(), "begun", "given back", given_back).await;
    assert_eq!([storage.count("CreateVolume"), storage.count("DeleteVolume")], [1, 1]);
    storage.fail("CreateVolume", "", FaultKind::Code(Code::ResourceExhausted), 1);
    server.claim("full", "late", selected(NODE)).await;
    let full = server.wait(server.claims(), "full", "given back", given_back).await.unwrap();
    assert!(!full.finalizers().iter().any(|finalizer| finalizer.starts_with("creating.berth.dev/")));
    // The scheduler finds that there is room again.
    patch(&server.claims(), "full", selected(NODE)).await;
    settled(&server, &full).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_driver_warns_of_at_a_deletion_becomes_an_event_of_the_volume() {
    let (server, storage, running) = begin(|_| {}).await;
    let warning = "directory \"größe\" is kept: it is also used by claim shop/a";
    storage.deletion_warnings.lock().push(warning.to_owned());
    let claim = server.claim("data", "fast", json!({})).await;
    settled(&server, &claim).await;
    let volumes: Api<PersistentVolume> = server.api();
    let name = format!("pvc-{}", claim.uid().unwrap());
    let released = Patch::Merge(json!({ "status": { "phase": "Released" } }));
    volumes.patch_status(&name, &PatchParams::default(), &released).await.unwrap();
    assert_eq!(server.event("VolumeDeleteWarning", "shop/a").await, warning);
    assert_eq!(server.events_of("PersistentVolume", "VolumeDeleteWarning").await.len(), 1);
    let is_deleted = |volume: Option<&PersistentVolume>| {
        volume.is_none_or(|volume| volume.metadata.deletion_timestamp.is_some())
    };
    server.wait(server.api(), &name, "deleted", is_deleted).await;
    running.stop().await;
}
