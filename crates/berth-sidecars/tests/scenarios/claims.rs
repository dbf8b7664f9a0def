//! Claims that are left alone, named otherwise, given back, or asked for again as before.

use std::sync::Arc;

use berth_csi::{PluginService, v1};
use berth_sidecars::provisioner::Options;
use berth_testkit::{FakeDriver, FaultKind, Loops, patch};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tonic::Code;

use crate::bench::{DRIVER, NODE, Server, connect};
use crate::capacity::start_provisioner;
use crate::faults::{FINALIZER, settled};
use crate::power::Power;

const SELECTED: &str = "volume.kubernetes.io/selected-node";

async fn begin(change: impl FnOnce(&mut Options)) -> (Server, Arc<FakeDriver>, Loops) {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    fake.capabilities.lock().plugin.push(PluginService::VolumeAccessibilityConstraints);
    server.class("fast", json!({})).await;
    server.class("late", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    let running = start_provisioner(&server, &connect(&fake, &Power::on()), change);
    (server, fake, running)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_a_populator_fills_is_left_alone_and_said_to_be() {
    let (server, fake, running) = begin(|_| {}).await;
    let source = json!({ "apiGroup": "populator.example.com", "kind": "Image", "name": "debian" });
    let claim = server.claim("filled", "fast", json!({ "spec": { "dataSourceRef": source } })).await;
    server.event("Provisioning", "Assuming an external populator will provision the volume").await;
    let other = server.claim("other", "fast", json!({})).await;
    settled(&server, &other).await;
    assert_eq!(fake.count("CreateVolume"), 1, "the other's");
    let left = server.claims().get("filled").await.unwrap();
    assert_eq!(left.finalizers(), claim.finalizers());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_with_a_name_of_another_shape_is_found_by_it_and_not_made_twice() {
    let (server, fake, running) = begin(|options| {
        options.volume_name_prefix = "disk".to_owned();
        options.volume_name_uuid_length = Some(8);
    })
    .await;
    let claim = server.claim("data", "fast", json!({})).await;
    let name = format!("disk-{}", &claim.uid().unwrap().replace('-', "")[..8]);
    let saved = |volume: Option<&k8s_openapi::api::core::v1::PersistentVolume>| volume.is_some();
    server.wait(server.all(), &name, "saved", saved).await;
    patch(&server.claims(), "data", json!({ "metadata": { "annotations": { "look": "again" } } })).await;
    let other = server.claim("other", "fast", json!({})).await;
    let other = format!("disk-{}", &other.uid().unwrap().replace('-', "")[..8]);
    server.wait(server.all(), &other, "saved", saved).await;
    assert_eq!(fake.count("CreateVolume"), 2);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_may_be_in_the_making_is_requested_with_the_same_topology_though_the_node_is_gone() {
    let (server, fake, running) = begin(|_| {}).await;
    fake.fail("CreateVolume", "", FaultKind::Code(Code::Unavailable), u32::MAX);
    let selected = json!({ "metadata": { "annotations": { SELECTED: NODE } } });
    let claim = server.claim("data", "late", selected).await;
    server.event("ProvisioningFailed", "code = Unavailable").await;
    server.all::<CSINode>().delete(NODE, &DeleteParams::default()).await.unwrap();
    server.all::<Node>().delete(NODE, &DeleteParams::default()).await.unwrap();
    fake.lift_faults();
    let volume = settled(&server, &claim).await;
    assert!(volume.name_any().starts_with("pvc-"));
    let requests = fake.requests::<v1::CreateVolumeRequest>();
    let topologies: Vec<_> =
        requests.into_iter().filter_map(|request| request.accessibility_requirements).collect();
    assert!(topologies.len() >= 2, "{topologies:?}");
    assert!(topologies.iter().all(|topology| *topology == topologies[0]), "{topologies:?}");
    assert_eq!(topologies[0].preferred[0].segments["topology.berth.dev/node"], NODE);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_selected_node_is_gone_or_full_is_given_back_to_the_scheduler() {
    let (server, fake, running) = begin(|_| {}).await;
    let given_back = |claim: Option<&PersistentVolumeClaim>| {
        claim.is_some_and(|claim| !claim.annotations().contains_key(SELECTED))
    };
    let selected = |node: &str| json!({ "metadata": { "annotations": { SELECTED: node } } });
    server.claim("gone", "late", selected("no-such-node")).await;
    server.event("ProvisioningFailed", "has no CSINode any more").await;
    server.wait(server.claims(), "gone", "given back", given_back).await;
    assert_eq!(fake.count("CreateVolume"), 0);
    // One who was killed may have made it there: from the next node on, nobody would know.
    let annotations = json!({ SELECTED: "no-such-node" });
    let begun = json!({ "metadata": { "annotations": annotations, "finalizers": [FINALIZER] } });
    server.claim("begun", "late", begun).await;
    server.wait(server.claims(), "begun", "given back", given_back).await;
    assert_eq!([fake.count("CreateVolume"), fake.count("DeleteVolume")], [1, 1]);
    fake.fail("CreateVolume", "", FaultKind::Code(Code::ResourceExhausted), 1);
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
    let (server, fake, running) = begin(|_| {}).await;
    let warning = "directory \"größe\" is kept: it is also used by claim shop/a";
    fake.storage.deletion_warnings.lock().push(warning.to_owned());
    let claim = server.claim("data", "fast", json!({})).await;
    settled(&server, &claim).await;
    let volumes: Api<PersistentVolume> = server.all();
    let name = format!("pvc-{}", claim.uid().unwrap());
    let released = Patch::Merge(json!({ "status": { "phase": "Released" } }));
    volumes.patch_status(&name, &PatchParams::default(), &released).await.unwrap();
    assert_eq!(server.event("VolumeDeleteWarning", "shop/a").await.message.as_deref(), Some(warning));
    assert_eq!(server.events_of("PersistentVolume", "VolumeDeleteWarning").await.len(), 1);
    let is_deleted = |volume: Option<&PersistentVolume>| {
        volume.is_none_or(|volume| volume.metadata.deletion_timestamp.is_some())
    };
    server.wait(server.all(), &name, "deleted", is_deleted).await;
    running.stop().await;
}
