//! Deployments from end to end: made, scaled, updated, and what kubectl reads of it.

use berth_testkit::{Loops, TestCluster, until, until_any, until_gone};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use crate::fakes;
use crate::placement::create_node;

fn replicas(deployment: &Deployment) -> (i32, i32, i32) {
    let status = deployment.status.clone().unwrap_or_default();
    let count = |count: Option<i32>| count.unwrap_or(0);
    (count(status.replicas), count(status.updated_replicas), count(status.available_replicas))
}

fn progress(deployment: &Deployment) -> &str {
    let conditions =
        deployment.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let progress = conditions.iter().find(|condition| condition.type_ == "Progressing");
    progress.and_then(|condition| condition.reason.as_deref()).unwrap_or_default()
}

/// As `kubectl rollout status` judges it.
fn rolled_out(deployment: &Deployment, wanted: i32) -> bool {
    deployment.status.as_ref().and_then(|status| status.observed_generation) == deployment.metadata.generation
        && replicas(deployment) == (wanted, wanted, wanted)
        && progress(deployment) == "NewReplicaSetAvailable"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_rolled_out_scaled_and_updated() {
    let cluster = TestCluster::real_or_embedded("rollouts-whole").await;
    create_node(&cluster, &cluster.name("a")).await;
    let loops = Loops::new(&cluster.client)
        .with(berth_controllers::scheduler::run)
        .with(berth_controllers::workloads::run)
        .with(fakes::kubelet);
    let (deployments, sets, pods) =
        (cluster.namespaced::<Deployment>(), cluster.namespaced::<ReplicaSet>(), cluster.namespaced::<Pod>());
    cluster
        .create_namespaced::<Deployment>(json!({
            "metadata": { "name": "web" },
            "spec": {
                "replicas": 3, "revisionHistoryLimit": 1, "selector": { "matchLabels": { "app": "web" } },
                "template": {
                    "metadata": { "labels": { "app": "web" } },
                    "spec": { "terminationGracePeriodSeconds": 0, "containers": [{ "name": "c", "image": "one" }] },
                },
            },
        }))
        .await;
    let first = until(&deployments, "web", |deployment| rolled_out(deployment, 3)).await;
    assert_eq!(first.annotations()["deployment.kubernetes.io/revision"], "1");
    let set = until_any(&sets, |_| true).await;
    assert!(set.name_any().starts_with("web-"));
    assert_eq!(set.labels()["pod-template-hash"], set.name_any()["web-".len()..]);
    let event = cluster.has_event("web", "ScalingReplicaSet").await;
    assert_eq!(event.message, Some(format!("Scaled up replica set {} from 0 to 3", set.name_any())));
    cluster.has_event(&set.name_any(), "SuccessfulCreate").await;

    let change = |change: serde_json::Value| {
        let deployments = deployments.clone();
        async move { deployments.patch("web", &PatchParams::default(), &Patch::Merge(change)).await.unwrap() }
    };
    change(json!({ "spec": { "replicas": 5 } })).await;
    until(&deployments, "web", |deployment| rolled_out(deployment, 5)).await;
    for (at, image) in ["two", "three"].into_iter().enumerate() {
        let spec = json!({ "containers": [{ "name": "c", "image": image }] });
        change(json!({ "spec": { "template": { "spec": spec } } })).await;
        let revision = (at + 2).to_string();
        until(&deployments, "web", |deployment| {
            rolled_out(deployment, 5)
                && deployment.annotations()["deployment.kubernetes.io/revision"] == revision
        })
        .await;
    }
    until_gone(&sets, &set.name_any()).await;
    let left = sets.list(&ListParams::default()).await.unwrap().items;
    assert_eq!(left.len(), 2, "one old set is kept");
    let running = pods.list(&ListParams::default()).await.unwrap().items;
    let images: Vec<_> =
        running.iter().map(|pod| pod.spec.as_ref().unwrap().containers[0].image.clone().unwrap()).collect();
    assert_eq!(images, vec!["three"; 5]);

    // A pod that is taken away comes back; one whose labels change is let go and replaced.
    let name = running[0].name_any();
    let label = Patch::Merge(json!({ "metadata": { "labels": { "app": "debug" } } }));
    pods.patch(&name, &PatchParams::default(), &label).await.unwrap();
    until(&pods, &name, |pod| pod.owner_references().is_empty()).await;
    berth_testkit::delete(&pods, &running[1].name_any()).await;
    until(&deployments, "web", |deployment| rolled_out(deployment, 5)).await;
    until_gone(&pods, &running[1].name_any()).await;
    change(json!({ "spec": { "replicas": 0 } })).await;
    until(&deployments, "web", |deployment| rolled_out(deployment, 0)).await;
    loops.stop().await;
}
