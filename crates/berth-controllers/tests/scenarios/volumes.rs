//! Claims and volumes from end to end.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::place::{Loops, Place, delete, until, until_gone};

fn claim(name: &str, class: Option<&str>, size: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": size } },
            "storageClassName": class,
        },
    })
}

fn class(name: &str, provisioner: &str, mode: &str) -> Value {
    json!({ "metadata": { "name": name }, "provisioner": provisioner, "volumeBindingMode": mode })
}

fn volume(name: &str, class: &str, size: &str, policy: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": size },
            "persistentVolumeReclaimPolicy": policy,
            "storageClassName": class,
            "csi": { "driver": "test.berth.dev", "volumeHandle": name },
        },
    })
}

/// What an external provisioner makes for a claim.
fn provisioned(claim: &PersistentVolumeClaim, policy: &str) -> Value {
    let name = format!("pvc-{}", claim.uid().unwrap());
    let mut volume =
        volume(&name, claim.spec.as_ref().unwrap().storage_class_name.as_deref().unwrap(), "1Gi", policy);
    volume["metadata"]["annotations"] = json!({ "pv.kubernetes.io/provisioned-by": "test.berth.dev" });
    volume["spec"]["claimRef"] = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "namespace": claim.namespace(), "name": claim.name_any(), "uid": claim.uid(),
    });
    volume
}

fn claim_phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn volume_phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_handed_over_bound_protected_and_released() {
    let place = Place::new("dynamic").await;
    let loops = Loops::of_volumes(&place.client);
    let (claims, volumes) = (place.here::<PersistentVolumeClaim>(), place.all::<PersistentVolume>());
    let class_name = place.name("fast");
    place.create::<StorageClass>(class(&class_name, "test.berth.dev", "Immediate")).await;
    place.create_here::<PersistentVolumeClaim>(claim("data", Some(&class_name), "1Gi")).await;

    let handed = until(&claims, "data", |claim| {
        claim.annotations().get("volume.kubernetes.io/storage-provisioner").map(String::as_str)
            == Some("test.berth.dev")
    })
    .await;
    assert_eq!(handed.annotations()["volume.beta.kubernetes.io/storage-provisioner"], "test.berth.dev");
    assert_eq!(claim_phase(&handed), "Pending");
    place.has_event("data", "ExternalProvisioning").await;

    let volume: PersistentVolume = serde_json::from_value(provisioned(&handed, "Delete")).unwrap();
    let name = volume.name_any();
    volumes.create(&PostParams::default(), &volume).await.unwrap();
    let bound = until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    assert_eq!(bound.spec.as_ref().unwrap().volume_name.as_deref(), Some(name.as_str()));
    for annotation in ["pv.kubernetes.io/bind-completed", "pv.kubernetes.io/bound-by-controller"] {
        assert_eq!(bound.annotations()[annotation], "yes");
    }
    let status = bound.status.as_ref().unwrap();
    assert_eq!(status.capacity.as_ref().unwrap()["storage"].0, "1Gi");
    assert_eq!(status.access_modes.as_deref(), Some(&["ReadWriteOnce".to_owned()][..]));
    assert!(bound.finalizers().iter().any(|finalizer| finalizer == "kubernetes.io/pvc-protection"));
    let volume = until(&volumes, &name, |volume| volume_phase(volume) == "Bound").await;
    assert!(!volume.annotations().contains_key("pv.kubernetes.io/bound-by-controller"));
    assert!(volume.finalizers().iter().any(|finalizer| finalizer == "kubernetes.io/pv-protection"));

    // A bound volume that is deleted stays until its claim is gone.
    delete(&volumes, &name).await;
    until(&volumes, &name, |volume| volume.metadata.deletion_timestamp.is_some()).await;
    delete(&claims, "data").await;
    until_gone(&claims, "data").await;
    until_gone(&volumes, &name).await;
    loops.stop().await;
}
