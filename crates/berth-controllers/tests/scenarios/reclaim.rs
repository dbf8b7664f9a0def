//! What becomes of volumes whose claim is gone.

use berth_testkit::{TestCluster, delete, patch_status, until, until_gone};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::volume_loops;
use crate::volumes::{claim, claim_phase, pod, provisioned, volume, volume_phase};

fn host_path(name: &str, path: &str, policy: &str) -> serde_json::Value {
    let mut volume = volume(name, "", "1Gi", policy);
    volume["spec"].as_object_mut().unwrap().remove("csi");
    volume["spec"]["hostPath"] = json!({ "path": path });
    volume
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_path_below_tmp_is_deleted_with_its_volume() {
    let cluster = TestCluster::real_or_embedded("hostpath").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let directory = tempfile::Builder::new().prefix("berth-hostpath").tempdir_in("/tmp").unwrap();
    let path = directory.path().join("volume");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("file"), "data").unwrap();
    let name = cluster.name("v");
    cluster.create::<PersistentVolume>(host_path(&name, path.to_str().unwrap(), "Delete")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    assert!(path.join("file").exists());
    delete(&claims, "data").await;
    until_gone(&volumes, &name).await;
    assert!(!path.exists());
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_path_elsewhere_fails_and_says_why() {
    let cluster = TestCluster::real_or_embedded("hostpath-elsewhere").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let name = cluster.name("v");
    cluster.create::<PersistentVolume>(host_path(&name, "/nowhere/of/berth", "Delete")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    delete(&claims, "data").await;
    let failed = until(&volumes, &name, |volume| volume_phase(volume) == "Failed").await;
    let message = failed.status.unwrap().message.unwrap();
    assert_eq!(message, "host_path deleter only supports /tmp/.+ but received provided /nowhere/of/berth");
    cluster.has_event(&name, "VolumeFailedDelete").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recycled_volume_is_emptied_by_a_pod_and_free_again() {
    let cluster = TestCluster::real_or_embedded("recycled").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let default: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let name = cluster.name("v");
    let recycler = format!("recycler-for-{name}");
    cluster.create::<PersistentVolume>(host_path(&name, "/tmp/of/nobody", "Recycle")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    // A pod that the API server keeps, but that is not scheduled, does not protect the claim; its data is in use.
    cluster.create_namespaced::<Pod>(pod("user", "data", "")).await;
    delete(&claims, "data").await;
    until(&volumes, &name, |volume| volume_phase(volume) == "Released").await;
    cluster.has_event(&name, "VolumeFailedRecycle").await;
    delete(&cluster.namespaced::<Pod>(), "user").await;

    let started = until(&default, &recycler, |_| true).await;
    let spec = started.spec.as_ref().unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("Never"));
    assert_eq!(spec.active_deadline_seconds, Some(60));
    assert_eq!(spec.volumes.as_ref().unwrap()[0].host_path.as_ref().unwrap().path, "/tmp/of/nobody");
    patch_status(&default, &recycler, json!({ "status": { "phase": "Succeeded" } })).await;
    let free = until(&volumes, &name, |volume| volume_phase(volume) == "Available").await;
    assert!(free.spec.as_ref().unwrap().claim_ref.is_none());
    assert!(!free.annotations().contains_key("pv.kubernetes.io/bound-by-controller"));
    until_gone(&default, &recycler).await;
    cluster.has_event(&name, "VolumeRecycled").await;

    // The next one gets it, and this time the pod fails.
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("next", Some(""), "1Gi")).await;
    until(&claims, "next", |claim| claim_phase(claim) == "Bound").await;
    delete(&claims, "next").await;
    until(&default, &recycler, |_| true).await;
    let failed = json!({ "status": { "phase": "Failed", "message": "disk on fire" } });
    patch_status(&default, &recycler, failed).await;
    let volume = until(&volumes, &name, |volume| volume_phase(volume) == "Failed").await;
    assert_eq!(
        volume.status.unwrap().message.as_deref(),
        Some("Recycle failed: failed to recycle volume: disk on fire")
    );
    loops.stop().await;
    delete(&default, &recycler).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_made_for_a_claim_that_found_another_is_released_for_its_provisioner() {
    let cluster = TestCluster::real_or_embedded("race").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let name = cluster.name("v");
    cluster.create::<PersistentVolume>(volume(&name, "", "1Gi", "Retain")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    let bound = until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    let late: PersistentVolume = cluster.create(provisioned(&bound, "Delete")).await;
    until(&volumes, &late.name_any(), |volume| volume_phase(volume) == "Released").await;
    let late: PersistentVolume = {
        let mut another = provisioned(&bound, "Retain");
        another["metadata"]["name"] = cluster.name("late").into();
        cluster.create(another).await
    };
    // With another policy it is freed; a volume that a person reserved stays reserved by name.
    let freed = until(&volumes, &late.name_any(), |volume| volume_phase(volume) == "Available").await;
    assert!(freed.spec.unwrap().claim_ref.unwrap().uid.is_none());
    loops.stop().await;
}
