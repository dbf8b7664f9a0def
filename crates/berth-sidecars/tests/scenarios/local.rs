//! Everything once, with Berth's local driver.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::DeleteParams;
use serde_json::json;

use crate::bench::{NODE, Server, local_driver, start_components};

fn unmarked(claim: Option<&PersistentVolumeClaim>) -> bool {
    claim.is_some_and(|claim| {
        !claim
            .metadata
            .finalizers
            .iter()
            .flatten()
            .any(|finalizer| finalizer.starts_with("creating.berth.dev/"))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_gets_a_volume_and_its_release_deletes_it() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (backend, driver) = local_driver(directory.path(), false).await;
    let components = start_components(&server.client, &driver);
    server.class("fast", json!({ "mountOptions": ["noatime"] })).await;
    let claim = server.claim("data", "fast", json!({})).await;

    let volume = server.provisioned(&claim).await;
    let spec = volume.spec.clone().unwrap();
    let csi = spec.csi.unwrap();
    assert_eq!(csi.driver, "local.berth.dev");
    assert!(csi.volume_attributes.unwrap().contains_key("storage.kubernetes.io/csiProvisionerIdentity"));
    assert_eq!(spec.capacity.unwrap()["storage"].0, "16Mi");
    assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Delete"));
    assert_eq!(spec.storage_class_name.as_deref(), Some("fast"));
    assert_eq!(spec.mount_options.unwrap(), ["noatime"]);
    assert_eq!(spec.claim_ref.unwrap().uid, claim.metadata.uid);
    let term = &spec.node_affinity.unwrap().required.unwrap().node_selector_terms[0];
    assert_eq!(term.match_expressions.as_ref().unwrap()[0].values.as_deref(), Some(&[NODE.to_owned()][..]));
    server.wait(server.claims(), "data", "unmarked", unmarked).await;
    server
        .event("Provisioning", "External provisioner is provisioning volume for claim \"default/data\"")
        .await;
    server.event("ProvisioningSucceeded", "Successfully provisioned volume pvc-").await;
    assert_eq!(backend.volume_count(), 1);

    let name = server.bind("data").await.metadata.name.unwrap();
    server.claims().delete("data", &DeleteParams::default()).await.unwrap();
    server.release(&name).await;
    server.wait(server.all(), &name, "gone", |volume: Option<&PersistentVolume>| volume.is_none()).await;
    assert_eq!(backend.volume_count(), 0);
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_attached_and_detached_by_calls() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), true).await;
    let components = start_components(&server.client, &driver);
    server.class("fast", json!({})).await;
    let claim = server.claim("data", "fast", json!({})).await;
    let volume = server.provisioned(&claim).await.metadata.name.unwrap();
    server.bind("data").await;
    server.attachment("at", &volume).await;
    let attached = server.wait(server.all(), "at", "attached", is_attached).await.unwrap();
    assert_eq!(attached.metadata.finalizers.unwrap(), ["external-attacher/local-berth-dev"]);
    assert_eq!(attached.metadata.annotations.unwrap()["csi.alpha.kubernetes.io/node-id"], NODE);
    let object = server.all::<PersistentVolume>().get(&volume).await.unwrap();
    assert!(object.metadata.finalizers.unwrap().contains(&"external-attacher/local-berth-dev".to_owned()));

    // Released, but attached: it stays until it is detached.
    server.claims().delete("data", &DeleteParams::default()).await.unwrap();
    server.release(&volume).await;
    server.all::<VolumeAttachment>().delete("at", &DeleteParams::default()).await.unwrap();
    server.wait(server.all(), "at", "gone", |object: Option<&VolumeAttachment>| object.is_none()).await;
    server.wait(server.all(), &volume, "gone", |object: Option<&PersistentVolume>| object.is_none()).await;
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_does_not_attach_has_its_attachments_called_attached() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    let components = start_components(&server.client, &driver);
    server.attachment("at", "any").await;
    let attached = server.wait(server.all(), "at", "attached", is_attached).await.unwrap();
    assert_eq!(attached.metadata.finalizers, None);
    server.all::<VolumeAttachment>().delete("at", &DeleteParams::default()).await.unwrap();
    server.wait(server.all(), "at", "gone", |object: Option<&VolumeAttachment>| object.is_none()).await;
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_asks_for_more_gets_more() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    let components = start_components(&server.client, &driver);
    server.class("fast", json!({ "allowVolumeExpansion": true })).await;
    let claim = server.claim("data", "fast", json!({})).await;
    let volume = server.provisioned(&claim).await.metadata.name.unwrap();
    server.bind("data").await;
    let more = json!({ "spec": { "resources": { "requests": { "storage": "32Mi" } } } });
    berth_testkit::patch(&server.claims(), "data", more).await;
    let grown = |claim: Option<&PersistentVolumeClaim>| {
        let status = claim.and_then(|claim| claim.status.as_ref());
        let pending = status.and_then(|status| status.allocated_resource_statuses.as_ref()?.get("storage"));
        let capacity = status.and_then(|status| status.capacity.as_ref()?.get("storage"));
        pending.is_some_and(|pending| pending == "NodeResizePending")
            || capacity.is_some_and(|size| size.0 == "32Mi")
    };
    server.wait(server.claims(), "data", "grown", grown).await;
    server.event("Resizing", "External resizer is resizing volume pvc-").await;
    let object = server.all::<PersistentVolume>().get(&volume).await.unwrap();
    assert_eq!(object.spec.unwrap().capacity.unwrap()["storage"].0, "32Mi");
    components.stop().await;
}

fn is_attached(attachment: Option<&VolumeAttachment>) -> bool {
    attachment.and_then(|attachment| attachment.status.as_ref()).is_some_and(|status| status.attached)
}
