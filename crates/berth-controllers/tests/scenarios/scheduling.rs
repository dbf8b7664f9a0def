//! Who gets the room that is there: order, preemption, and plans that are taken back.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use berth_testkit::{Loops, TestCluster, patch, until, until_gone};
use futures_util::FutureExt as _;
use http::{Method, Request, Response};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim, Pod};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::Service;

use crate::fakes::{self, DRIVER, pod};
use crate::placement::create_node;
use crate::volume_loops;

const SELECTED: &str = "volume.kubernetes.io/selected-node";

/// A pod that takes most of a node, of a class of priority.
fn large(name: &str, class: Option<&str>) -> Value {
    let mut pod = pod(name, &[]);
    pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "6" } });
    pod["spec"]["priorityClassName"] = json!(class);
    pod
}

async fn important(cluster: &TestCluster) -> String {
    let name = cluster.name("important");
    cluster.create::<PriorityClass>(json!({ "metadata": { "name": name }, "value": 1000 })).await;
    name
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn is_refused(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|known| known.type_ == "PodScheduled" && known.status == "False")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_most_important_of_many_waiting_pods_gets_the_room() {
    let cluster = TestCluster::real_or_embedded("scheduling-order").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    let important = important(&cluster).await;
    for at in 0..30 {
        cluster.create_namespaced::<Pod>(large(&format!("low-{at}"), None)).await;
    }
    cluster.create_namespaced::<Pod>(large("high", Some(&important))).await;
    let loops = Loops::new(&cluster.client).with(berth_controllers::scheduler::run);
    let pods = cluster.namespaced::<Pod>();
    until(&pods, "high", |pod| node_of(pod) == here).await;
    for at in 0..30 {
        until(&pods, &format!("low-{at}"), is_refused).await;
    }
    let placed = pods.list(&ListParams::default()).await.unwrap();
    let placed: Vec<String> =
        placed.iter().filter(|pod| !node_of(pod).is_empty()).map(ResourceExt::name_any).collect();
    assert_eq!(placed, ["high"]);
    let preempted = cluster.events_of("Pod", "Preempted").await;
    assert!(preempted.is_empty(), "nobody had the room before: {preempted:#?}");
    loops.stop().await;
}

/// A client whose requests to bind a pod wait until they are let through.
#[derive(Clone)]
struct Gate {
    client: Client,
    pod: String,
    open: watch::Receiver<bool>,
    waiting: watch::Sender<bool>,
}

impl Service<Request<Body>> for Gate {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut gate = self.clone();
        async move {
            let held = format!("/pods/{}/binding", gate.pod);
            if request.method() == Method::POST && request.uri().path().ends_with(&held) {
                gate.waiting.send_replace(true);
                gate.open.wait_for(|open| *open).await.map_err(io::Error::other)?;
            }
            gate.client.send(request).await.map_err(io::Error::other)
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_is_preempted_while_it_is_being_bound_does_not_keep_the_node() {
    let cluster = TestCluster::real_or_embedded("scheduling-taken-back").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    let important = important(&cluster).await;
    let (open, gate) = (watch::channel(false), watch::channel(false));
    let client =
        Gate { client: cluster.client.clone(), pod: "low".to_owned(), open: open.1, waiting: gate.0 };
    let loops = Loops::new(&Client::new(client, "default")).with(berth_controllers::scheduler::run);
    let pods = cluster.namespaced::<Pod>();
    cluster.create_namespaced::<Pod>(large("low", None)).await;
    let mut is_held = gate.1;
    is_held.wait_for(|held| *held).await.unwrap();
    cluster.create_namespaced::<Pod>(large("high", Some(&important))).await;
    cluster.has_event("low", "Preempted").await;
    open.0.send_replace(true);
    until(&pods, "high", |pod| node_of(pod) == here).await;
    until_gone(&pods, "low").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_a_restored_and_a_new_claim_starts_where_the_source_is() {
    let cluster = TestCluster::real_or_embedded("scheduling-restored").await;
    let (first, last, made) = (cluster.name("a"), cluster.name("b"), cluster.name("made"));
    for node in [&first, &last] {
        create_node(&cluster, node).await;
    }
    let class = json!({ "metadata": { "name": made }, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer" });
    cluster.create::<StorageClass>(class).await;
    let claim = |name: &str, source: Option<&str>| {
        let source = source.map(|name| json!({ "kind": "PersistentVolumeClaim", "name": name }));
        json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": made, "dataSource": source,
                "resources": { "requests": { "storage": "1Gi" } },
            },
        })
    };
    let loops =
        volume_loops(&cluster.client).with(berth_controllers::scheduler::run).with(fakes::provisioner);
    let (pods, claims) = (cluster.namespaced::<Pod>(), cluster.namespaced::<PersistentVolumeClaim>());
    // The fake provisioner has what is on a node, and hands the claim over to it.
    for (at, source) in [&last, &first].into_iter().enumerate() {
        let (restored, new, name) = (format!("restored-{at}"), format!("new-{at}"), format!("p{at}"));
        cluster.create_namespaced::<PersistentVolumeClaim>(claim(&new, None)).await;
        cluster.create_namespaced::<PersistentVolumeClaim>(claim(&restored, Some(source))).await;
        cluster.create_namespaced::<Pod>(pod(&name, &[&new, &restored])).await;
        until(&pods, &name, |pod| node_of(pod) == source.as_str()).await;
        for claim in [restored, new] {
            assert_eq!(claims.get(&claim).await.unwrap().annotations()[SELECTED], **source, "{claim}");
        }
    }
    // A clone of a claim of the same pod is no reason to wait with that claim.
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("original", None)).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("clone", Some("original"))).await;
    cluster.create_namespaced::<Pod>(pod("both", &["clone", "original"])).await;
    until(&claims, "original", |claim| claim.annotations().contains_key(SELECTED)).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_wants_a_neighbour_hears_of_labels_of_namespaces() {
    let cluster = TestCluster::real_or_embedded("scheduling-namespaces").await;
    let here = cluster.name("a");
    create_node(&cluster, &here).await;
    let loops = Loops::new(&cluster.client).with(berth_controllers::scheduler::run);
    let pods = cluster.namespaced::<Pod>();
    let mut there = pod("there", &[]);
    there["metadata"]["labels"] = json!({ "app": "there" });
    cluster.create_namespaced::<Pod>(there).await;
    until(&pods, "there", |pod| node_of(pod) == here).await;
    let mut beside = pod("beside", &[]);
    beside["spec"]["affinity"] = json!({ "podAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [{
        "labelSelector": { "matchLabels": { "app": "there" } }, "topologyKey": "kubernetes.io/hostname",
        "namespaceSelector": { "matchLabels": { "team": "one" } },
    }] } });
    cluster.create_namespaced::<Pod>(beside).await;
    until(&pods, "beside", is_refused).await;
    patch(
        &cluster.all::<Namespace>(),
        &cluster.namespace,
        json!({ "metadata": { "labels": { "team": "one" } } }),
    )
    .await;
    until(&pods, "beside", |pod| node_of(pod) == here).await;
    loops.stop().await;
}
