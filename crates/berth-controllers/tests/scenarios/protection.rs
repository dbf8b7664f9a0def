//! What is in use stays; and ephemeral claims.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::json;

use crate::cluster::{Loops, TestCluster, delete, patch, until, until_gone};
use crate::volumes::{claim, claim_phase, pod, volume};

fn has(object: &impl kube::ResourceExt, finalizer: &str) -> bool {
    object.finalizers().iter().any(|known| known == finalizer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_stays_while_a_pod_on_a_node_uses_it() {
    let place = TestCluster::new("in-use").await;
    let loops = Loops::of_volumes(&place.client);
    let (claims, pods) = (place.here::<PersistentVolumeClaim>(), place.here::<Pod>());
    place.create_here::<PersistentVolumeClaim>(claim("used", Some(""), "1Gi")).await;
    place.create_here::<PersistentVolumeClaim>(claim("unused", Some(""), "1Gi")).await;
    // A finalizer that somebody takes away comes back.
    patch(&claims, "used", json!({ "metadata": { "finalizers": null } })).await;
    until(&claims, "used", |claim| has(claim, "kubernetes.io/pvc-protection")).await;
    place.create_here::<Pod>(pod("user", "used", "node-1")).await;
    delete(&claims, "used").await;
    delete(&claims, "unused").await;
    until_gone(&claims, "unused").await;
    let used = claims.get("used").await.unwrap();
    assert!(used.metadata.deletion_timestamp.is_some() && has(&used, "kubernetes.io/pvc-protection"));
    pods.delete("user", &DeleteParams::default().grace_period(0)).await.unwrap();
    until_gone(&claims, "used").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attributes_class_stays_while_a_volume_names_it() {
    let place = TestCluster::new("attributes").await;
    let loops = Loops::of_volumes(&place.client);
    let classes = place.all::<VolumeAttributesClass>();
    let volumes = place.all::<PersistentVolume>();
    let (name, unused) = (place.name("gold"), place.name("unused"));
    for name in [&name, &unused] {
        let class = json!({
            "metadata": { "name": name }, "driverName": "test.berth.dev", "parameters": { "iops": "1" },
        });
        place.create::<VolumeAttributesClass>(class).await;
        until(&classes, name, |class| has(class, "kubernetes.io/vac-protection")).await;
    }
    let mut volume = volume(&place.name("v"), "", "1Gi", "Retain");
    volume["spec"]["volumeAttributesClassName"] = name.clone().into();
    let volume: PersistentVolume = place.create(volume).await;
    until(&volumes, &volume.name_any(), |volume| has(volume, "kubernetes.io/pv-protection")).await;
    delete(&classes, &name).await;
    delete(&classes, &unused).await;
    until_gone(&classes, &unused).await;
    assert!(classes.get(&name).await.unwrap().metadata.deletion_timestamp.is_some());
    delete(&volumes, &volume.name_any()).await;
    until_gone(&classes, &name).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_its_ephemeral_claims_and_takes_nobody_elses() {
    let place = TestCluster::new("ephemeral").await;
    let loops = Loops::of_volumes(&place.client).with(berth_controllers::ephemeral::run);
    let (claims, pods) = (place.here::<PersistentVolumeClaim>(), place.here::<Pod>());
    let with_template = |name: &str| {
        let mut pod = pod(name, "", "");
        pod["spec"]["volumes"] = json!([{ "name": "vol", "ephemeral": { "volumeClaimTemplate": {
            "metadata": { "labels": { "of": name } },
            "spec": claim("", Some(""), "1Gi")["spec"],
        } } }]);
        pod
    };
    let user: Pod = place.create_here(with_template("user")).await;
    let made = until(&claims, "user-vol", |_| true).await;
    assert_eq!(made.labels()["of"], "user");
    assert_eq!(made.owner_references()[0].uid, user.uid().unwrap());
    // Deleted, it is made again.
    delete(&claims, "user-vol").await;
    until(&claims, "user-vol", |claim| claim.uid() != made.uid()).await;

    place.create_here::<PersistentVolumeClaim>(claim("other-vol", Some(""), "1Gi")).await;
    place.create_here::<Pod>(with_template("other")).await;
    let event = place.has_event("other", "FailedBinding").await;
    let here = &place.namespace;
    let expected = format!(
        "ephemeral volume vol: PVC {here}/other-vol was not created for pod {here}/other (pod is not owner)"
    );
    assert_eq!(event.message, Some(expected));
    loops.stop().await;
    for name in ["user", "other"] {
        pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_larger_claim_is_told_to_wait_for_its_resizer() {
    use k8s_openapi::api::storage::v1::StorageClass;
    let place = TestCluster::new("expanded").await;
    let loops = Loops::of_volumes(&place.client).with(berth_controllers::expand::run);
    let claims = place.here::<PersistentVolumeClaim>();
    let name = place.name("class");
    let mut class = crate::volumes::class(&name, "test.berth.dev", "Immediate");
    class["allowVolumeExpansion"] = true.into();
    place.create::<StorageClass>(class).await;
    place.create::<PersistentVolume>(volume(&place.name("v"), &name, "1Gi", "Retain")).await;
    place.create_here::<PersistentVolumeClaim>(claim("data", Some(&name), "1Gi")).await;
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    patch(&claims, "data", json!({ "spec": { "resources": { "requests": { "storage": "2Gi" } } } })).await;
    let event = place.has_event("data", "ExternalExpanding").await;
    assert_eq!(event.type_.as_deref(), Some("Normal"));
    assert_eq!(event.message.as_deref(), Some("waiting for an external controller to expand this PVC"));
    loops.stop().await;
}
