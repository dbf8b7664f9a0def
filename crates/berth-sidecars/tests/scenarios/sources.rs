//! Claims made from other claims and from snapshots: the source stays meanwhile, goes afterwards, and is waited for.

use std::time::Duration;

use berth_kube::Backoff;
use berth_sidecars::snapshots::VolumeSnapshot;
use berth_testkit::{FakeDriver, FaultKind, patch, patch_status};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tonic::Code;

use crate::bench::{DRIVER, Server, connect, local_driver, start_components, start_components_with};
use crate::faults::{settled, unprotect};
use crate::power::Power;
use crate::snapshot_bench::{from_snapshot, gone, start_snapshotting};

const CLONING: &str = "provisioner.storage.kubernetes.io/cloning-protection";
const RESTORING: &str = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";

fn from_claim(name: &str) -> Value {
    json!({ "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": name } } })
}

fn has(object: &impl kube::ResourceExt, finalizer: &str) -> bool {
    object.finalizers().iter().any(|known| known == finalizer)
}

/// What fails is not tried again by itself while a test runs.
fn never() -> Backoff {
    Backoff { first: Duration::from_hours(1), longest: Duration::from_hours(1) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_deleted_stays_until_the_clones_of_it_are_made() {
    let (server, fake, power) = (Server::start().await, FakeDriver::new(DRIVER), Power::on());
    server.class("fast", json!({})).await;
    let components = start_components(&server.client, &connect(&fake, &power));
    let source = server.claim("source", "fast", json!({})).await;
    settled(&server, &source).await;
    server.bind("source").await;
    // Nobody knows whether the driver is at it.
    fake.fail("CreateVolume", "", FaultKind::Code(Code::Unavailable), u32::MAX);
    let clone = server.claim("clone", "fast", from_claim("source")).await;
    let other = server.claim("other", "fast", from_claim("source")).await;
    server.event("ProvisioningFailed", "code = Unavailable").await;
    server
        .wait(server.claims(), "source", "protected", |claim: Option<&PersistentVolumeClaim>| {
            claim.is_some_and(|claim| has(claim, CLONING))
        })
        .await;
    for claim in ["clone", "other"] {
        server
            .wait(server.claims(), claim, "begun", |claim: Option<&PersistentVolumeClaim>| {
                claim.is_some_and(|claim| has(claim, "creating.berth.dev/local.berth.dev"))
            })
            .await;
    }
    server.claims().delete("source", &DeleteParams::default()).await.unwrap();
    unprotect(&server, "source").await;
    components.stop().await;

    // Others take over, who do not remember what was asked for. One of the two claims is given up.
    server.claims().delete("other", &DeleteParams::default()).await.unwrap();
    unprotect(&server, "other").await;
    let kept = server.claims().get("source").await.unwrap();
    assert_eq!(kept.finalizers(), [CLONING]);
    fake.lift_faults();
    let components = start_components(&server.client, &connect(&fake, &power));
    settled(&server, &clone).await;
    server.wait(server.claims(), "other", "gone", gone::<PersistentVolumeClaim>).await;
    server.wait(server.claims(), "source", "gone", gone::<PersistentVolumeClaim>).await;
    let volumes = fake.storage.volumes.lock().clone();
    assert!(volumes.contains_key(&format!("pvc-{}", clone.uid().unwrap())));
    assert!(!volumes.contains_key(&format!("pvc-{}", other.uid().unwrap())));
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_another_claim_still_waits_for_is_kept_until_that_one_is_gone() {
    let (server, fake, power) = (Server::start().await, FakeDriver::new(DRIVER), Power::on());
    server.class("fast", json!({})).await;
    let components = start_components(&server.client, &connect(&fake, &power));
    let source = server.claim("source", "fast", json!({})).await;
    settled(&server, &source).await;
    server.bind("source").await;
    let elsewhere = json!({
        "metadata": { "annotations": { "volume.kubernetes.io/storage-provisioner": "another.example.com" } },
        "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": "source" } },
    });
    server.claim("waiting", "not-ours", elsewhere).await;
    let clone = server.claim("clone", "fast", from_claim("source")).await;
    settled(&server, &clone).await;
    server.bind("clone").await;
    server.claims().delete("source", &DeleteParams::default()).await.unwrap();
    unprotect(&server, "source").await;
    let later = server.claim("later", "fast", json!({})).await;
    settled(&server, &later).await;
    let kept = server.claims().get("source").await.unwrap();
    assert_eq!(kept.finalizers(), [CLONING]);
    unprotect(&server, "waiting").await;
    server.claims().delete("waiting", &DeleteParams::default()).await.unwrap();
    server.wait(server.claims(), "source", "gone", gone::<PersistentVolumeClaim>).await;
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_goes_on_when_its_source_is_bound_and_not_by_the_clock() {
    let (server, fake, power) = (Server::start().await, FakeDriver::new(DRIVER), Power::on());
    server.class("fast", json!({})).await;
    let driver = connect(&fake, &power);
    let components = start_components_with(&server.client, &driver, |provisioning, _, _| {
        provisioning.retry = never();
    });
    let clone = server.claim("clone", "fast", from_claim("source")).await;
    server.event("ProvisioningFailed", "it does not exist").await;
    let source = server.claim("source", "fast", json!({})).await;
    settled(&server, &source).await;
    server.event("ProvisioningFailed", "is not in Bound phase").await;
    server.bind("source").await;
    settled(&server, &clone).await;
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_waits_for_its_snapshot_and_leaves_it_unprotected() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({})).await;
    let components = start_snapshotting(&server.client, &driver);
    server.bound_claim("data", "fast", json!({})).await;
    server.snapshot("snap", "data").await;
    server.ready("snap").await;
    components.stop().await;

    // A process that died left its protection behind; and the snapshot is not ready, whoever says so.
    let mut finalizers = server.snapshots().get("snap").await.unwrap().finalizers().to_vec();
    finalizers.push(RESTORING.to_owned());
    patch(&server.snapshots(), "snap", json!({ "metadata": { "finalizers": finalizers } })).await;
    patch_status(&server.snapshots(), "snap", json!({ "status": { "readyToUse": false } })).await;
    let copy = server.claim("copy", "fast", from_snapshot("snap")).await;
    let components = start_components_with(&server.client, &driver, |provisioning, _, _| {
        provisioning.retry = never();
    });
    server.event("ProvisioningFailed", "snapshot is not Ready").await;
    assert!(has(&server.snapshots().get("snap").await.unwrap(), RESTORING), "a claim waits for it");
    patch_status(&server.snapshots(), "snap", json!({ "status": { "readyToUse": true } })).await;
    settled(&server, &copy).await;
    let free = |snapshot: Option<&VolumeSnapshot>| snapshot.is_some_and(|snapshot| !has(snapshot, RESTORING));
    server.wait(server.snapshots(), "snap", "free", free).await;
    components.stop().await;

    // Left behind again, this time with nobody who needs it.
    patch(&server.snapshots(), "snap", json!({ "metadata": { "finalizers": finalizers } })).await;
    let components = start_components(&server.client, &driver);
    server.wait(server.snapshots(), "snap", "free", free).await;
    components.stop().await;
}
