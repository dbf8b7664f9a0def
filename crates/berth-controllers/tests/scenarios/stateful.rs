//! StatefulSets and DaemonSets from end to end: claims that stay and go, rollouts, adoption, and every node with its pod.

use std::collections::HashMap;

use berth_testkit::{Loops, TestCluster, delete, patch, until, until_any, until_gone};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, StatefulSet};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::fakes::{self, DRIVER};
use crate::placement::create_node;
use crate::volume_loops;

fn loops(cluster: &TestCluster) -> Loops {
    volume_loops(&cluster.client)
        .with(berth_controllers::scheduler::run)
        .with(berth_controllers::workloads::run)
        .with(fakes::provisioner)
        .with(fakes::kubelet)
}

fn template(image: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": "web" } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": [{ "name": "c", "image": image }] },
    })
}

fn stateful_set(class: &str, replicas: i32) -> Value {
    json!({
        "metadata": { "name": "web" },
        "spec": {
            "replicas": replicas, "serviceName": "web", "selector": { "matchLabels": { "app": "web" } },
            "revisionHistoryLimit": 1, "template": template("one"),
            "volumeClaimTemplates": [{ "metadata": { "name": "data" }, "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": { "requests": { "storage": "1Gi" } } } }],
        },
    })
}

/// As `kubectl rollout status` judges it.
fn rolled_out(set: &StatefulSet, wanted: i32) -> bool {
    let status = set.status.clone().unwrap_or_default();
    status.observed_generation == set.metadata.generation
        && status.replicas == wanted
        && status.available_replicas == Some(wanted)
        && status.updated_replicas.unwrap_or(0) == wanted
        && status.current_revision == status.update_revision
}

async fn class(cluster: &TestCluster) -> String {
    let name = cluster.name("made");
    let class = json!({ "metadata": { "name": name }, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete", "allowVolumeExpansion": true });
    cluster.create::<StorageClass>(class).await;
    name
}

async fn claims(cluster: &TestCluster) -> HashMap<String, String> {
    let claims =
        cluster.namespaced::<PersistentVolumeClaim>().list(&ListParams::default()).await.unwrap().items;
    claims.iter().map(|claim| (claim.name_any(), claim.uid().unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stateful_set_keeps_its_names_and_claims_through_scaling_rollouts_and_recreation() {
    let cluster = TestCluster::real_or_embedded("stateful-whole").await;
    create_node(&cluster, &cluster.name("a")).await;
    let class = class(&cluster).await;
    let (loops, _collector) = (loops(&cluster), cluster.collect_garbage());
    let (sets, pods) = (cluster.namespaced::<StatefulSet>(), cluster.namespaced::<Pod>());
    cluster.create_namespaced::<StatefulSet>(stateful_set(&class, 3)).await;
    until(&sets, "web", |set| rolled_out(set, 3)).await;
    let first = claims(&cluster).await;
    assert_eq!(first.len(), 3, "{first:?}");
    let pod = until(&pods, "web-2", |_| true).await;
    assert_eq!(pod.labels()["statefulset.kubernetes.io/pod-name"], "web-2");
    let revisions = cluster.namespaced::<ControllerRevision>();
    let oldest = until_any(&revisions, |revision| revision.revision == 1).await;
    let event = cluster.has_event("web", "SuccessfulCreate").await;
    assert!(event.message.unwrap().starts_with("Create "));

    // Scaled down and up: the claims stay, and are found again.
    patch(&sets, "web", json!({ "spec": { "replicas": 1 } })).await;
    until(&sets, "web", |set| rolled_out(set, 1)).await;
    until_gone(&pods, "web-1").await;
    patch(&sets, "web", json!({ "spec": { "replicas": 3 } })).await;
    until(&sets, "web", |set| rolled_out(set, 3)).await;
    assert_eq!(claims(&cluster).await, first);

    // Rolled, above a partition first. A new revision for each template, and one old one is kept.
    let update = json!({ "spec": { "template": template("two"), "updateStrategy": { "rollingUpdate": { "partition": 2 } } } });
    patch(&sets, "web", update).await;
    let image = |pod: &Pod| pod.spec.as_ref().unwrap().containers[0].image.clone().unwrap();
    until(&pods, "web-2", |pod| image(pod) == "two").await;
    until(&sets, "web", |set| {
        let status = set.status.clone().unwrap_or_default();
        status.updated_replicas == Some(1) && status.available_replicas == Some(3)
    })
    .await;
    assert_eq!(image(&until(&pods, "web-0", |_| true).await), "one");
    patch(&sets, "web", json!({ "spec": { "updateStrategy": { "rollingUpdate": { "partition": 0 } } } }))
        .await;
    until(&sets, "web", |set| rolled_out(set, 3)).await;
    patch(&sets, "web", json!({ "spec": { "template": template("three") } })).await;
    until(&pods, "web-0", |pod| image(pod) == "three").await;
    let set = until(&sets, "web", |set| rolled_out(set, 3)).await;
    assert_eq!(claims(&cluster).await, first);
    let newest = until_any(&revisions, |revision| revision.revision == 3).await;
    assert_eq!(Some(newest.name_any()), set.status.unwrap().update_revision);
    until_gone(&revisions, &oldest.name_any()).await;

    // Deleted without its pods and created again: it takes them back, and restarts none.
    let before: Vec<_> =
        pods.list(&ListParams::default()).await.unwrap().items.iter().map(ResourceExt::uid).collect();
    let orphan =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    sets.delete("web", &orphan).await.unwrap();
    until_gone(&sets, "web").await;
    let kept = until(&revisions, &newest.name_any(), |kept| kept.owner_references().is_empty()).await;
    assert_eq!(kept.uid(), newest.uid(), "its history stays");
    let mut again = stateful_set(&class, 3);
    again["spec"]["template"] = template("three");
    again["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = json!("2Gi");
    cluster.create_namespaced::<StatefulSet>(again).await;
    until(&sets, "web", |set| rolled_out(set, 3)).await;
    let after: Vec<_> =
        pods.list(&ListParams::default()).await.unwrap().items.iter().map(ResourceExt::uid).collect();
    assert_eq!(before, after);
    // Claims that are smaller than the template say so.
    let event = cluster.has_event("web", "ClaimSmallerThanTemplate").await;
    assert!(event.message.unwrap().contains("berth resize statefulset/web SIZE"));
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_go_by_the_retention_policy() {
    let cluster = TestCluster::real_or_embedded("stateful-retention").await;
    create_node(&cluster, &cluster.name("a")).await;
    let class = class(&cluster).await;
    let (loops, _collector) = (loops(&cluster), cluster.collect_garbage());
    let sets = cluster.namespaced::<StatefulSet>();
    let all = cluster.namespaced::<PersistentVolumeClaim>();
    let mut set = stateful_set(&class, 3);
    set["spec"]["podManagementPolicy"] = json!("Parallel");
    set["spec"]["persistentVolumeClaimRetentionPolicy"] =
        json!({ "whenDeleted": "Delete", "whenScaled": "Delete" });
    cluster.create_namespaced::<StatefulSet>(set).await;
    until(&sets, "web", |set| rolled_out(set, 3)).await;
    let first = claims(&cluster).await;
    patch(&sets, "web", json!({ "spec": { "replicas": 1 } })).await;
    until_gone(&all, "data-web-2").await;
    until_gone(&all, "data-web-1").await;
    // A pod that comes back gets a claim of its own, and not the one that goes.
    patch(&sets, "web", json!({ "spec": { "replicas": 2 } })).await;
    until(&sets, "web", |set| rolled_out(set, 2)).await;
    let second = claims(&cluster).await;
    assert_eq!(second["data-web-0"], first["data-web-0"]);
    assert_ne!(second["data-web-1"], first["data-web-1"]);
    delete(&sets, "web").await;
    until_gone(&all, "data-web-0").await;
    until_gone(&all, "data-web-1").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_set_has_a_pod_on_every_node_that_suits() {
    let cluster = TestCluster::real_or_embedded("daemon-whole").await;
    let (a, b) = (cluster.name("a"), cluster.name("b"));
    create_node(&cluster, &a).await;
    let loops = Loops::new(&cluster.client)
        .with(berth_controllers::scheduler::run)
        .with(berth_controllers::workloads::run)
        .with(fakes::kubelet);
    let (sets, pods) = (cluster.namespaced::<DaemonSet>(), cluster.namespaced::<Pod>());
    cluster
        .create_namespaced::<DaemonSet>(json!({ "metadata": { "name": "agent" }, "spec": {
            "selector": { "matchLabels": { "app": "web" } }, "template": template("one") } }))
        .await;
    let settled = |set: &DaemonSet, wanted: i32| {
        let status = set.status.clone().unwrap_or_default();
        status.observed_generation == set.metadata.generation
            && (status.desired_number_scheduled, status.number_ready) == (wanted, wanted)
            && status.updated_number_scheduled == Some(wanted)
    };
    until(&sets, "agent", |set| settled(set, 1)).await;
    create_node(&cluster, &b).await;
    until(&sets, "agent", |set| settled(set, 2)).await;
    let on = |node: &str| {
        let node = node.to_owned();
        move |pod: &Pod| pod.spec.as_ref().unwrap().node_name.as_ref() == Some(&node)
    };
    until_any(&pods, on(&b)).await;
    patch(&sets, "agent", json!({ "spec": { "template": template("two") } })).await;
    until(&sets, "agent", |set| settled(set, 2)).await;
    let images = pods.list(&ListParams::default()).await.unwrap().items;
    assert!(
        images.iter().all(|pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some("two"))
    );
    // A taint that nobody tolerates drives the pod away.
    patch(
        &cluster.all::<Node>(),
        &b,
        json!({ "spec": { "taints": [{ "key": "x", "effect": "NoExecute" }] } }),
    )
    .await;
    until(&sets, "agent", |set| settled(set, 1)).await;
    loops.stop().await;
}
