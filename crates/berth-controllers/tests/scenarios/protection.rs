//! What is in use stays; and ephemeral claims.

use berth_testkit::{TestCluster, delete, patch, until, until_gone};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::json;

use crate::volume_loops;
use crate::volumes::{claim, claim_phase, pod, volume};

fn has(object: &impl kube::ResourceExt, finalizer: &str) -> bool {
    object.finalizers().iter().any(|known| known == finalizer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_stays_while_a_pod_on_a_node_uses_it() {
    let cluster = TestCluster::real_or_embedded("in-use").await;
    let loops = volume_loops(&cluster.client);
    let (claims, pods) = (cluster.namespaced::<PersistentVolumeClaim>(), cluster.namespaced::<Pod>());
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("used", Some(""), "1Gi")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("unused", Some(""), "1Gi")).await;
    // A finalizer that somebody takes away comes back.
    patch(&claims, "used", json!({ "metadata": { "finalizers": null } })).await;
    until(&claims, "used", |claim| has(claim, "kubernetes.io/pvc-protection")).await;
    cluster.create_namespaced::<Pod>(pod("user", "used", "node-1")).await;
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
    let cluster = TestCluster::real_or_embedded("attributes").await;
    let loops = volume_loops(&cluster.client);
    let classes = cluster.all::<VolumeAttributesClass>();
    let volumes = cluster.all::<PersistentVolume>();
    let (name, unused) = (cluster.name("gold"), cluster.name("unused"));
    for name in [&name, &unused] {
        let class = json!({
            "metadata": { "name": name }, "driverName": "test.berth.dev", "parameters": { "iops": "1" },
        });
        cluster.create::<VolumeAttributesClass>(class).await;
        until(&classes, name, |class| has(class, "kubernetes.io/vac-protection")).await;
    }
    let mut volume = volume(&cluster.name("v"), "", "1Gi", "Retain");
    volume["spec"]["volumeAttributesClassName"] = name.clone().into();
    let volume: PersistentVolume = cluster.create(volume).await;
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
    let cluster = TestCluster::real_or_embedded("ephemeral").await;
    let loops = volume_loops(&cluster.client).with(berth_controllers::ephemeral::run);
    let (claims, pods) = (cluster.namespaced::<PersistentVolumeClaim>(), cluster.namespaced::<Pod>());
    let with_template = |name: &str| {
        let mut pod = pod(name, "", "");
        pod["spec"]["volumes"] = json!([{ "name": "vol", "ephemeral": { "volumeClaimTemplate": {
            "metadata": { "labels": { "of": name } },
            "spec": claim("", Some(""), "1Gi")["spec"],
        } } }]);
        pod
    };
    let user: Pod = cluster.create_namespaced(with_template("user")).await;
    let made = until(&claims, "user-vol", |_| true).await;
    assert_eq!(made.labels()["of"], "user");
    assert_eq!(made.owner_references()[0].uid, user.uid().unwrap());
    // Deleted, it is made again.
    delete(&claims, "user-vol").await;
    until(&claims, "user-vol", |claim| claim.uid() != made.uid()).await;

    cluster.create_namespaced::<PersistentVolumeClaim>(claim("other-vol", Some(""), "1Gi")).await;
    cluster.create_namespaced::<Pod>(with_template("other")).await;
    let event = cluster.has_event("other", "FailedBinding").await;
    let here = &cluster.namespace;
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
    let cluster = TestCluster::real_or_embedded("expanded").await;
    let loops = volume_loops(&cluster.client).with(berth_controllers::expand::run);
    let claims = cluster.namespaced::<PersistentVolumeClaim>();
    let name = cluster.name("class");
    let mut class = crate::volumes::class(&name, "test.berth.dev", "Immediate");
    class["allowVolumeExpansion"] = true.into();
    cluster.create::<StorageClass>(class).await;
    cluster.create::<PersistentVolume>(volume(&cluster.name("v"), &name, "1Gi", "Retain")).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(&name), "1Gi")).await;
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    patch(&claims, "data", json!({ "spec": { "resources": { "requests": { "storage": "2Gi" } } } })).await;
    let event = cluster.has_event("data", "ExternalExpanding").await;
    assert_eq!(event.type_.as_deref(), Some("Normal"));
    assert_eq!(event.message.as_deref(), Some("waiting for an external controller to expand this PVC"));
    loops.stop().await;
}
