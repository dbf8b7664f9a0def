//! PodDisruptionBudgets count the pods of their controllers, and a disruption that does not come is not announced for ever.

use berth_testkit::{Loops, TestCluster, until};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::fakes::{self, pod};
use crate::placement::create_node;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_is_adopted_counts_by_what_its_controller_wants() {
    let cluster = TestCluster::real_or_embedded("budgets-adopted").await;
    let mut orphan = pod("orphan", &[]);
    orphan["metadata"]["labels"] = json!({ "app": "web" });
    cluster.create_namespaced::<Pod>(orphan).await;
    let budget = json!({
        "metadata": { "name": "web" },
        "spec": { "maxUnavailable": 1, "selector": { "matchLabels": { "app": "web" } } },
    });
    cluster.create_namespaced::<PodDisruptionBudget>(budget).await;
    let loops = Loops::new(&cluster.client).with(berth_controllers::workloads::run);
    let budgets = cluster.namespaced::<PodDisruptionBudget>();
    let expects = |pods: i32| {
        move |budget: &PodDisruptionBudget| {
            let status = budget.status.clone().unwrap_or_default();
            status.observed_generation.is_some() && status.expected_pods == Some(pods)
        }
    };
    until(&budgets, "web", expects(0)).await;
    // The set finds the pod that it wants, and makes none.
    let set = json!({
        "metadata": { "name": "web" },
        "spec": {
            "replicas": 1, "selector": { "matchLabels": { "app": "web" } },
            "template": {
                "metadata": { "labels": { "app": "web" } },
                "spec": { "containers": [{ "name": "c", "image": "one" }] },
            },
        },
    });
    cluster.create_namespaced::<ReplicaSet>(set).await;
    until(&budgets, "web", expects(1)).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disruption_that_does_not_come_is_taken_back() {
    let cluster = TestCluster::real_or_embedded("budgets-stale").await;
    create_node(&cluster, &cluster.name("a")).await;
    let loops = Loops::new(&cluster.client)
        .with(berth_controllers::scheduler::run)
        .with(berth_controllers::workloads::run)
        .with(fakes::kubelet);
    let pods: Api<Pod> = cluster.namespaced();
    cluster.create_namespaced::<Pod>(pod("p", &[])).await;
    let running = until(&pods, "p", |pod| {
        pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
    })
    .await;
    let mut conditions =
        serde_json::to_value(running.status.and_then(|status| status.conditions).unwrap_or_default())
            .unwrap();
    conditions.as_array_mut().unwrap().push(json!({
        "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "why",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }));
    let announced = Patch::Merge(json!({ "status": { "conditions": conditions } }));
    pods.patch_status("p", &PatchParams::default(), &announced).await.unwrap();
    until(&pods, "p", |pod| {
        let conditions =
            pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        conditions.iter().any(|known| known.type_ == "DisruptionTarget" && known.status == "False")
    })
    .await;
    loops.stop().await;
}
