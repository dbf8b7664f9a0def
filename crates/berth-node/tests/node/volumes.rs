//! Claims on a whole node.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::world::World;

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
    let claims = world.here::<PersistentVolumeClaim>();
    let claim = json!({
        "metadata": { "name": "c" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "pv",
            "resources": { "requests": { "storage": "1Gi" } },
        },
    });
    let claim = world.create(&claims, claim).await;
    world.has_event("p", "FailedMount", "PVC is not bound").await;
    let volume = json!({
        "metadata": { "name": "pv" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": "",
            "hostPath": { "path": data.path() },
            "claimRef": { "namespace": "default", "name": "c", "uid": claim.metadata.uid },
        },
    });
    world.create(&Api::<PersistentVolume>::all(world.client.clone()), volume).await;
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound", "capacity": { "storage": "1Gi" } } }));
    claims.patch_status("c", &PatchParams::default(), &bound).await.unwrap();
    let pod: Pod = world.until_phase("p", "Succeeded").await;
    assert_eq!(world.log(&pod, "main", false).await, "claimed");
    world.delete("p").await;
    assert!(data.path().join("file").exists(), "a claim's data outlives the pod");
    world.until_clean().await;
}
