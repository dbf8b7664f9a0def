//! Claims on a whole node.

use berth_kube::storage::attachment_name;
use berth_testkit::{RegisteredDriver, until};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::world::World;

/// The claim `c`, for the volume `pv`.
async fn claim(world: &World) -> PersistentVolumeClaim {
    let claim = json!({
        "metadata": { "name": "c" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "pv",
            "resources": { "requests": { "storage": "1Gi" } },
        },
    });
    world.create(&world.here(), claim).await
}

/// Makes the volume `pv` of a source, and binds the claim to it.
async fn bind(world: &World, claim: &PersistentVolumeClaim, source: Value) {
    let mut volume = json!({
        "metadata": { "name": "pv" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": "",
            "claimRef": { "namespace": "default", "name": "c", "uid": claim.metadata.uid },
        },
    });
    berth_testkit::merge(&mut volume["spec"], source);
    world.create(&Api::<PersistentVolume>::all(world.client.clone()), volume).await;
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound", "capacity": { "storage": "1Gi" } } }));
    let claims = world.here::<PersistentVolumeClaim>();
    claims.patch_status("c", &PatchParams::default(), &bound).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_rejected_by_a_node_that_can_have_no_more_volumes_and_the_limit_is_read_again() {
    const DRIVER: &str = "a.example";
    let world = World::new().await;
    let driver = json!({
        "metadata": { "name": DRIVER }, "spec": { "nodeAllocatableUpdatePeriodSeconds": 3600 },
    });
    world.create(&Api::<CSIDriver>::all(world.client.clone()), driver).await;
    let sockets = tempfile::tempdir().unwrap();
    let fake = RegisteredDriver::new(DRIVER, sockets.path());
    fake.node_info.lock().max_volumes_per_node = 2;
    fake.start(&world.path().join("plugins_registry"), "a.sock").await;
    let nodes = Api::<CSINode>::all(world.client.clone());
    let limit = |node: &CSINode| node.spec.drivers.first()?.allocatable.as_ref()?.count;
    until(&nodes, "n", |node| limit(node) == Some(2)).await;

    let claim = claim(&world).await;
    bind(&world, &claim, json!({ "csi": { "driver": DRIVER, "volumeHandle": "h" } })).await;
    let attachments = Api::<VolumeAttachment>::all(world.client.clone());
    let name = attachment_name(DRIVER, "h", "n");
    let attachment = json!({
        "metadata": { "name": name },
        "spec": { "attacher": DRIVER, "nodeName": "n", "source": { "persistentVolumeName": "pv" } },
    });
    world.create(&attachments, attachment).await;
    // 8 is RESOURCE_EXHAUSTED.
    let error = json!({ "message": "all 1 slots are taken", "errorCode": 8 });
    let failed = Patch::Merge(json!({ "status": { "attached": false, "attachError": error } }));
    attachments.patch_status(&name, &PatchParams::default(), &failed).await.unwrap();
    fake.node_info.lock().max_volumes_per_node = 1;

    let main = json!({
        "name": "main", "image": "i", "command": ["true"], "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
    });
    let volumes = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "c" } }]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes, "restartPolicy": "Never" })).await;
    let pod = world.until_phase("p", "Failed").await;
    let status = pod.status.unwrap();
    assert_eq!(status.reason.as_deref(), Some("VolumeAttachmentLimitExceeded"));
    let message = status.message.unwrap();
    assert!(
        message.starts_with("Pod was rejected: Node has reached its volume attachment limit"),
        "{message}"
    );
    assert!(message.ends_with("all 1 slots are taken"), "{message}");
    world
        .has_event("p", "VolumeAttachmentLimitExceeded", "Node has reached its volume attachment limit")
        .await;
    until(&nodes, "n", |node| limit(node) == Some(1)).await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_waits_for_its_claim_and_says_so() {
    let world = World::new().await;
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("file"), "claimed").unwrap();
    let main = json!({
        "name": "main", "image": "i", "command": ["cat", "/v/file"],
        "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
    });
    let volumes = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "c" } }]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes, "restartPolicy": "Never" })).await;
    world.has_event("p", "FailedMount", "persistentvolumeclaims \"c\" not found").await;
    let claim = claim(&world).await;
    world.has_event("p", "FailedMount", "PVC is not bound").await;
    bind(&world, &claim, json!({ "hostPath": { "path": data.path() } })).await;
    let pod: Pod = world.until_phase("p", "Succeeded").await;
    assert_eq!(world.log(&pod, "main", false).await, "claimed");
    world.delete("p").await;
    assert!(data.path().join("file").exists(), "a claim's data outlives the pod");
    world.until_clean().await;
}
