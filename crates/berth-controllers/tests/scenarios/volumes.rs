//! Claims and volumes from end to end.

use berth_testkit::{TestCluster, delete, patch, until, until_all, until_gone};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::counting::{counting, writes};
use crate::volume_loops;

pub(crate) fn claim(name: &str, class: Option<&str>, size: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": size } },
            "storageClassName": class,
        },
    })
}

pub(crate) fn class(name: &str, provisioner: &str, mode: &str) -> Value {
    json!({ "metadata": { "name": name }, "provisioner": provisioner, "volumeBindingMode": mode })
}

pub(crate) fn volume(name: &str, class: &str, size: &str, policy: &str) -> Value {
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
pub(crate) fn provisioned(claim: &PersistentVolumeClaim, policy: &str) -> Value {
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

pub(crate) fn claim_phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub(crate) fn volume_phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_handed_over_bound_protected_and_released() {
    let cluster = TestCluster::real_or_embedded("dynamic").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let class_name = cluster.name("fast");
    cluster.create::<StorageClass>(class(&class_name, "test.berth.dev", "Immediate")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(&class_name), "1Gi")).await;

    let handed = until(&claims, "data", |claim| {
        claim.annotations().get("volume.kubernetes.io/storage-provisioner").map(String::as_str)
            == Some("test.berth.dev")
    })
    .await;
    assert_eq!(handed.annotations()["volume.beta.kubernetes.io/storage-provisioner"], "test.berth.dev");
    assert_eq!(claim_phase(&handed), "Pending");
    cluster.has_event("data", "ExternalProvisioning").await;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_for_a_volume_that_fits_and_leaves_it_released() {
    let cluster = TestCluster::real_or_embedded("static").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let (none, small, large) = (cluster.name("none"), cluster.name("small"), cluster.name("large"));
    cluster.create::<StorageClass>(class(&none, "kubernetes.io/no-provisioner", "Immediate")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(&none), "2Gi")).await;
    cluster.has_event("data", "ProvisioningFailed").await;
    cluster.create::<PersistentVolume>(volume(&small, &none, "1Gi", "Retain")).await;
    until(&volumes, &small, |volume| volume_phase(volume) == "Available").await;
    cluster.create::<PersistentVolume>(volume(&large, &none, "3Gi", "Retain")).await;

    let bound = until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    assert_eq!(bound.spec.as_ref().unwrap().volume_name.as_deref(), Some(large.as_str()));
    assert_eq!(bound.status.as_ref().unwrap().capacity.as_ref().unwrap()["storage"].0, "3Gi");
    let volume = until(&volumes, &large, |volume| volume_phase(volume) == "Bound").await;
    assert_eq!(volume.annotations()["pv.kubernetes.io/bound-by-controller"], "yes");
    assert_eq!(volume.spec.as_ref().unwrap().claim_ref.as_ref().unwrap().uid, bound.uid());

    delete(&claims, "data").await;
    let volume = until(&volumes, &large, |volume| volume_phase(volume) == "Released").await;
    assert_eq!(volume.spec.as_ref().unwrap().claim_ref.as_ref().unwrap().uid, bound.uid());
    // A person gives it free for the next one.
    patch(&volumes, &large, json!({ "spec": { "claimRef": null } })).await;
    until(&volumes, &large, |volume| volume_phase(volume) == "Available").await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("next", Some(&none), "3Gi")).await;
    until(&claims, "next", |claim| claim_phase(claim) == "Bound").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_for_its_first_consumer_and_says_for_whom() {
    let cluster = TestCluster::real_or_embedded("consumer").await;
    let loops = volume_loops(&cluster.client);
    let claims = cluster.namespaced::<PersistentVolumeClaim>();
    let wait = cluster.name("wait");
    cluster.create::<StorageClass>(class(&wait, "test.berth.dev", "WaitForFirstConsumer")).await;
    // A free volume that fits is the scheduler's to give.
    let free = cluster.name("free");
    cluster.create::<PersistentVolume>(volume(&free, &wait, "1Gi", "Retain")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(&wait), "1Gi")).await;
    cluster.has_event("data", "WaitForFirstConsumer").await;
    cluster.create_namespaced::<Pod>(pod("user", "data", "")).await;
    let event = cluster.has_event("data", "WaitForPodScheduled").await;
    assert_eq!(event.message.as_deref(), Some("waiting for pod user to be scheduled"));
    let selected =
        json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": "node-1" } } });
    patch(&claims, "data", selected).await;
    until(&claims, "data", |claim| {
        claim.annotations().contains_key("volume.kubernetes.io/storage-provisioner")
    })
    .await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_without_a_class_gets_the_default_class_when_there_is_one() {
    let cluster = TestCluster::real_or_embedded("retroactive").await;
    let loops = volume_loops(&cluster.client);
    let claims = cluster.namespaced::<PersistentVolumeClaim>();
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", None, "1Gi")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("opted-out", Some(""), "1Gi")).await;
    cluster.has_event("data", "FailedBinding").await;
    let name = cluster.name("default");
    let mut class = class(&name, "test.berth.dev", "Immediate");
    class["metadata"]["annotations"] = json!({ "storageclass.kubernetes.io/is-default-class": "true" });
    cluster.create::<StorageClass>(class).await;
    let given = until(&claims, "data", |claim| {
        claim.annotations().contains_key("volume.kubernetes.io/storage-provisioner")
    })
    .await;
    assert_eq!(given.spec.as_ref().unwrap().storage_class_name.as_deref(), Some(name.as_str()));
    let out = claims.get("opted-out").await.unwrap();
    assert_eq!(out.spec.unwrap().storage_class_name.as_deref(), Some(""));
    loops.stop().await;
    delete(&cluster.all::<StorageClass>(), &name).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_volume_is_gone_is_lost_until_the_volume_is_back() {
    let cluster = TestCluster::real_or_embedded("lost").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let name = cluster.name("v");
    cluster.create::<PersistentVolume>(volume(&name, "", "1Gi", "Retain")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    let bound = until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    until(&volumes, &name, |volume| volume_phase(volume) == "Bound").await;
    // Somebody insists.
    delete(&volumes, &name).await;
    patch(&volumes, &name, json!({ "metadata": { "finalizers": null } })).await;
    until_gone(&volumes, &name).await;
    let lost = until(&claims, "data", |claim| claim_phase(claim) == "Lost").await;
    assert!(lost.status.unwrap().capacity.is_none());
    cluster.has_event("data", "ClaimLost").await;

    let mut again = volume(&name, "", "1Gi", "Retain");
    again["spec"]["claimRef"] = json!({ "namespace": bound.namespace(), "name": "data", "uid": bound.uid() });
    cluster.create::<PersistentVolume>(again).await;
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    until(&volumes, &name, |volume| volume_phase(volume) == "Bound").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_claims_that_name_one_volume_do_not_both_get_it() {
    let cluster = TestCluster::real_or_embedded("misbound").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let name = cluster.name("v");
    let wanting = |claim_name: &str| {
        let mut claim = claim(claim_name, Some(""), "1Gi");
        claim["spec"]["volumeName"] = name.clone().into();
        claim
    };
    cluster.create_namespaced::<PersistentVolumeClaim>(wanting("first")).await;
    cluster.has_event("first", "FailedBinding").await;
    cluster.create::<PersistentVolume>(volume(&name, "", "1Gi", "Retain")).await;
    let first = until(&claims, "first", |claim| claim_phase(claim) == "Bound").await;
    assert!(!first.annotations().contains_key("pv.kubernetes.io/bound-by-controller"));
    cluster.create_namespaced::<PersistentVolumeClaim>(wanting("second")).await;
    let event = cluster.has_event("second", "FailedBinding").await;
    assert_eq!(event.message, Some(format!("volume \"{name}\" already bound to a different claim.")));
    let second = claims.get("second").await.unwrap();
    assert_eq!(claim_phase(&second), "Pending");
    // A volume that is bound by the claim's name waits for the claim to let go; it never changes hands by itself.
    assert_eq!(volumes.get(&name).await.unwrap().spec.unwrap().claim_ref.unwrap().uid, first.uid());
    loops.stop().await;
}

/// As many as BERTH_CLAIMS says, 200 if it says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_claims_at_once_get_a_volume_each() {
    let count: usize = std::env::var("BERTH_CLAIMS").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    let cluster = TestCluster::real_or_embedded("many").await;
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let none = cluster.name("none");
    cluster.create::<StorageClass>(class(&none, "kubernetes.io/no-provisioner", "Immediate")).await;
    let names: Vec<String> = (0..count).map(|n| cluster.name(&format!("v{n}"))).collect();
    let made = futures_util::future::join_all(names.iter().enumerate().map(async |(n, name)| {
        cluster.create::<PersistentVolume>(volume(name, &none, "1Gi", "Retain")).await;
        cluster.create_namespaced::<PersistentVolumeClaim>(claim(&format!("c{n}"), Some(&none), "1Gi")).await;
    }));
    made.await;
    let start = std::time::Instant::now();
    let (client, counts) = counting(&cluster.client);
    let loops = volume_loops(&client);
    let bound = until_all(&claims, count, |claim| claim_phase(claim) == "Bound").await;
    println!("{count} claims bound in {:?} with {} writes", start.elapsed(), writes(&counts));
    // One makes the volume available and four bind it; the rest is for two that write the same at once.
    assert!(writes(&counts) <= 6 * count, "{:#?}", counts.lock());
    let got: std::collections::HashSet<String> =
        bound.iter().map(|claim| claim.spec.as_ref().unwrap().volume_name.clone().unwrap()).collect();
    assert_eq!(got.len(), count);
    for volume in volumes.list(&kube::api::ListParams::default()).await.unwrap() {
        if names.contains(&volume.name_any()) {
            assert_eq!(volume_phase(&volume), "Bound");
        }
    }
    loops.stop().await;
}

pub(crate) fn pod(name: &str, claim: &str, node: &str) -> Value {
    let mut pod = json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "main", "image": "none" }],
            "volumes": [{ "name": "vol", "persistentVolumeClaim": { "claimName": claim } }],
        },
    });
    if !node.is_empty() {
        pod["spec"]["nodeName"] = node.into();
    }
    pod
}
