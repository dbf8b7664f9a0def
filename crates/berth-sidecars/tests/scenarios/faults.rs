//! A driver that refuses, hangs and loses answers, and objects that go before their time.

use std::time::Duration;

use berth_sidecars::driver::Driver;
use berth_testkit::{CrashingSocket, FakeDriver, FaultKind, Lie, patch};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttributesClass};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tonic::Code;

use crate::bench::{DRIVER, Server, connect, start_components, start_components_with};
use crate::power::Power;

pub(crate) const FINALIZER: &str = "creating.berth.dev/local.berth.dev";

fn is_marked(claim: &PersistentVolumeClaim) -> bool {
    claim.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

/// Takes away what the protection controller would.
pub(crate) async fn unprotect(server: &Server, claim: &str) {
    while let Some(mut now) = server.claims().get_opt(claim).await.unwrap() {
        now.finalizers_mut().retain(|finalizer| finalizer != "kubernetes.io/pvc-protection");
        match server.claims().replace(claim, &PostParams::default(), &now).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(kube::Error::Api(status)) if status.code == 404 => return,
            replaced => {
                replaced.unwrap();
                return;
            }
        }
    }
}

/// Whether the volume is saved and the claim without its finalizer.
pub(crate) async fn settled(server: &Server, claim: &PersistentVolumeClaim) -> PersistentVolume {
    let volume = server.provisioned(claim).await;
    let unmarked = |claim: Option<&PersistentVolumeClaim>| claim.is_some_and(|claim| !is_marked(claim));
    server.wait(server.claims(), &claim.name_any(), "unmarked", unmarked).await;
    volume
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_call_for_one_volume_blocks_no_other() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({})).await;
    let stuck = server.claim("stuck", "fast", json!({})).await;
    let uid = stuck.uid().unwrap();
    fake.fail("CreateVolume", &uid, FaultKind::Hang, u32::MAX);
    let power = Power::on();
    let driver = connect(&fake, &power);
    let components = start_components_with(&server.client, &driver, |provisioning, _, _| {
        (provisioning.workers, provisioning.timeout) = (2, Duration::from_secs(5));
    });
    fake.until_called("CreateVolume", &uid, 1).await;
    for name in ["one", "two", "three"] {
        let claim = server.claim(name, "fast", json!({})).await;
        server.provisioned(&claim).await;
    }
    assert!(server.all::<PersistentVolume>().get_opt(&format!("pvc-{uid}")).await.unwrap().is_none());
    // After its time the call is repeated, and once the driver answers it works.
    fake.until_called("CreateVolume", &uid, 2).await;
    fake.lift_faults();
    settled(&server, &stuck).await;
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attributes_class_of_another_driver_is_asked_of_the_driver_and_can_be_recovered_from() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({})).await;
    for (name, driver) in [("foreign", "other.example.com"), ("gold", DRIVER)] {
        let class =
            json!({ "metadata": { "name": name }, "driverName": driver, "parameters": { "tier": name } });
        server.create::<VolumeAttributesClass>(class).await;
    }
    let components = start_components(&server.client, &connect(&fake, &Power::on()));
    let claim = server.claim("data", "fast", json!({})).await;
    settled(&server, &claim).await;
    server.bind("data").await;
    fake.fail("ControllerModifyVolume", "", FaultKind::Code(Code::InvalidArgument), u32::MAX);
    patch(&server.claims(), "data", json!({ "spec": { "volumeAttributesClassName": "foreign" } })).await;
    let refused = |claim: Option<&PersistentVolumeClaim>| {
        let status = claim.and_then(|claim| claim.status.as_ref());
        let step = status.and_then(|status| status.modify_volume_status.as_ref());
        let conditions = status.and_then(|status| status.conditions.as_ref());
        step.is_some_and(|step| {
            step.status == "Infeasible"
                && step.target_volume_attributes_class_name.as_deref() == Some("foreign")
        }) && conditions.is_some_and(|conditions| {
            conditions.iter().any(|condition| {
                condition.type_ == "ModifyVolumeError"
                    && condition.reason.as_deref() == Some("InvalidArgument")
            })
        })
    };
    server.wait(server.claims(), "data", "refused by the driver", refused).await;
    server.event("VolumeModifyFailed", "the class is for driver \"other.example.com\"").await;
    fake.lift_faults();
    patch(&server.claims(), "data", json!({ "spec": { "volumeAttributesClassName": "gold" } })).await;
    let recovered = |claim: Option<&PersistentVolumeClaim>| {
        claim.and_then(|claim| claim.status.as_ref()).is_some_and(|status| {
            status.current_volume_attributes_class_name.as_deref() == Some("gold")
                && status.modify_volume_status.is_none()
        })
    };
    server.wait(server.claims(), "data", "changed to gold", recovered).await;
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_takes_too_long_behind_a_socket_is_late_and_the_driver_is_not_gone() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({})).await;
    let socket = CrashingSocket::serve(&fake).await;
    let driver = Driver::connect(&socket.endpoint);
    let mut identity = driver.watch();
    identity.wait_for(Option::is_some).await.unwrap();
    fake.fail("CreateVolume", "", FaultKind::Hang, 5);
    let components = start_components_with(&server.client, &driver, |provisioning, _, _| {
        provisioning.timeout = Duration::from_millis(100);
    });
    let claim = server.claim("data", "fast", json!({})).await;
    settled(&server, &claim).await;
    let failed = server.events_of("PersistentVolumeClaim", "ProvisioningFailed").await;
    assert!(!failed.is_empty());
    for event in failed {
        let message = event.message.unwrap_or_default();
        assert!(message.contains("code = DeadlineExceeded"), "{message}");
    }
    assert!(!identity.has_changed().unwrap(), "it was there all the time");
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_made_behind_a_lost_answer_is_found_again_or_deleted_with_its_claim() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({})).await;
    let power = Power::on();
    let components = start_components(&server.client, &connect(&fake, &power));
    fake.fail("CreateVolume", "", FaultKind::DoneBut(Code::DeadlineExceeded), 2);
    let claim = server.claim("data", "fast", json!({})).await;
    settled(&server, &claim).await;
    assert_eq!(fake.storage.volumes.lock().len(), 1);
    assert_eq!(fake.count("CreateVolume"), 3);

    // The claim goes while nobody knows whether its volume exists.
    fake.fail("CreateVolume", "", FaultKind::DoneBut(Code::Unavailable), u32::MAX);
    let claim = server.claim("gone", "fast", json!({})).await;
    fake.until_called("CreateVolume", &claim.uid().unwrap(), 1).await;
    server
        .wait(server.claims(), "gone", "has its finalizer", |claim: Option<&PersistentVolumeClaim>| {
            claim.is_some_and(is_marked)
        })
        .await;
    server.claims().delete("gone", &DeleteParams::default()).await.unwrap();
    unprotect(&server, "gone").await;
    fake.lift_faults();
    server
        .wait(server.claims(), "gone", "gone", |claim: Option<&PersistentVolumeClaim>| claim.is_none())
        .await;
    let name = format!("pvc-{}", claim.uid().unwrap());
    if server.all::<PersistentVolume>().get_opt(&name).await.unwrap().is_some() {
        server.release(&name).await;
        server.wait(server.all(), &name, "gone", |volume: Option<&PersistentVolume>| volume.is_none()).await;
    }
    assert!(!fake.storage.volumes.lock().contains_key(&name));
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_was_made_otherwise_than_it_is_asked_for_now_is_not_forgotten() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({})).await;
    let components = start_components(&server.client, &connect(&fake, &Power::on()));
    // As after a death, if the class was made anew with other parameters meanwhile.
    fake.fail("CreateVolume", "", FaultKind::DoneBut(Code::AlreadyExists), u32::MAX);
    server.claim("data", "fast", json!({})).await;
    server.event("ProvisioningFailed", "code = AlreadyExists").await;
    server.claims().delete("data", &DeleteParams::default()).await.unwrap();
    unprotect(&server, "data").await;
    server.event("ProvisioningFailed", "whether there is a volume pvc-").await;
    assert!(is_marked(&server.claims().get("data").await.unwrap()));
    fake.lift_faults();
    server
        .wait(server.claims(), "data", "gone", |claim: Option<&PersistentVolumeClaim>| claim.is_none())
        .await;
    assert!(fake.storage.volumes.lock().is_empty());
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_has_an_event_and_leaves_no_finalizer_and_a_volume_that_is_too_small_is_deleted() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({})).await;
    let power = Power::on();
    let components = start_components(&server.client, &connect(&fake, &power));
    fake.fail("CreateVolume", "", FaultKind::Code(Code::OutOfRange), 1);
    fake.fail("CreateVolume", "", FaultKind::Lie(Lie::Small), 1);
    let claim = server.claim("data", "fast", json!({})).await;
    let message = server.event("ProvisioningFailed", "code = OutOfRange").await.message.unwrap();
    assert!(
        message.starts_with("failed to provision volume with StorageClass \"fast\": rpc error: "),
        "{message}"
    );
    server.event("ProvisioningFailed", "less than requested capacity").await;
    settled(&server, &claim).await;
    assert_eq!(fake.count("DeleteVolume"), 1);
    components.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_is_detached_though_its_volume_and_node_are_gone() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.class("fast", json!({ "reclaimPolicy": "Retain" })).await;
    let power = Power::on();
    let first = start_components(&server.client, &connect(&fake, &power));
    let claim = server.claim("data", "fast", json!({})).await;
    let volume = settled(&server, &claim).await.name_any();
    fake.fail("ControllerPublishVolume", "", FaultKind::Code(Code::Internal), 1);
    server.attachment("at", &volume).await;
    let attached = |object: Option<&VolumeAttachment>| {
        object.and_then(|object| object.status.as_ref()).is_some_and(|status| status.attached)
    };
    let object = server.wait(server.all(), "at", "attached", attached).await.unwrap();
    assert!(object.status.unwrap().attach_error.is_none(), "what is attached has no error");
    first.stop().await;

    let api = server.all::<PersistentVolume>();
    patch(&api, &volume, json!({ "metadata": { "finalizers": null } })).await;
    api.delete(&volume, &DeleteParams::default()).await.unwrap();
    server
        .all::<k8s_openapi::api::storage::v1::CSINode>()
        .delete("node-a", &DeleteParams::default())
        .await
        .unwrap();
    server
        .all::<k8s_openapi::api::core::v1::Node>()
        .delete("node-a", &DeleteParams::default())
        .await
        .unwrap();
    server.all::<VolumeAttachment>().delete("at", &DeleteParams::default()).await.unwrap();
    fake.fail("ControllerUnpublishVolume", "", FaultKind::DoneBut(Code::NotFound), 1);
    let second = start_components(&server.client, &connect(&fake, &power));
    server.wait(server.all(), "at", "gone", |object: Option<&VolumeAttachment>| object.is_none()).await;
    assert!(fake.storage.attached.lock().is_empty());
    second.stop().await;
}
