//! Loops whose caches know less than the server: before data is lost, the server is asked.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use berth_testkit::{TestCluster, delete, patch, patch_status, until, until_gone};
use futures_util::FutureExt as _;
use http::{Request, Response};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::client::Body;
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tower::Service;

use crate::volume_loops;
use crate::volumes::{claim, pod, volume, volume_phase};

/// A client to whom a kind's list is empty and its watch silent; single objects and lists of a namespace are as they are.
#[derive(Clone)]
struct Blind {
    client: Client,
    resource: &'static str,
}

impl Service<Request<Body>> for Blind {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        async move {
            if request.uri().path() != format!("/api/v1/{}", this.resource) {
                return this.client.send(request).await.map_err(io::Error::other);
            }
            if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
                std::future::pending::<()>().await;
            }
            let list = json!({ "apiVersion": "v1", "kind": "List", "metadata": { "resourceVersion": "1" }, "items": [] });
            Ok(Response::new(Body::from(list.to_string().into_bytes())))
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_released_only_if_the_server_too_knows_no_claim() {
    let cluster = TestCluster::real_or_embedded("unseen-claim").await;
    let volumes = cluster.all::<PersistentVolume>();
    let (kept, released) = (cluster.name("kept"), cluster.name("released"));
    let mut wanted = claim("data", Some(""), "1Gi");
    wanted["spec"]["volumeName"] = kept.clone().into();
    let bound: PersistentVolumeClaim = cluster.create_namespaced(wanted).await;
    let pointing = |name: &str, uid: &str| {
        let mut volume = volume(name, "", "1Gi", "Retain");
        volume["spec"]["claimRef"] = json!({ "namespace": cluster.namespace, "name": "data", "uid": uid });
        volume
    };
    cluster.create::<PersistentVolume>(pointing(&kept, &bound.uid().unwrap())).await;
    cluster.create::<PersistentVolume>(pointing(&released, "another")).await;
    let blind = Blind { client: cluster.client.clone(), resource: "persistentvolumeclaims" };
    let loops = volume_loops(&Client::new(blind, "default"));
    // Kubernetes' 4-11 and 4-12.
    until(&volumes, &kept, |volume| volume_phase(volume) == "Bound").await;
    until(&volumes, &released, |volume| volume_phase(volume) == "Released").await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_let_go_only_if_the_server_too_knows_no_pod_that_uses_it() {
    let cluster = TestCluster::real_or_embedded("unseen-pod").await;
    let claims = cluster.namespaced::<PersistentVolumeClaim>();
    for name in ["used", "unused"] {
        cluster.create_namespaced::<PersistentVolumeClaim>(claim(name, Some(""), "1Gi")).await;
        delete(&claims, name).await;
        if name == "used" {
            cluster.create_namespaced::<Pod>(pod("user", "used", "node-1")).await;
        }
    }
    let blind = Blind { client: cluster.client.clone(), resource: "pods" };
    let loops = volume_loops(&Client::new(blind, "default"));
    until_gone(&claims, "unused").await;
    let used = claims.get("used").await.unwrap();
    assert!(!used.finalizers().is_empty(), "the claim is protected");
    loops.stop().await;
    patch(&claims, "used", json!({ "metadata": { "finalizers": null } })).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_told_of_a_recycler_pod_is_told_of_its_volume() {
    let cluster = TestCluster::real_or_embedded("recycler-news").await;
    let loops = volume_loops(&cluster.client);
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let name = cluster.name("v");
    let recycler = format!("recycler-for-{name}");
    let default: kube::Api<Pod> = kube::Api::namespaced(cluster.client.clone(), "default");
    let mut volume = volume(&name, "", "1Gi", "Recycle");
    volume["spec"].as_object_mut().unwrap().remove("csi");
    volume["spec"]["nfs"] = json!({ "server": "nowhere", "path": "/export" });
    cluster.create::<PersistentVolume>(volume).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    until(&volumes, &name, |volume| volume_phase(volume) == "Bound").await;
    delete(&claims, "data").await;
    let pod = until(&default, &recycler, |_| true).await;
    let event = json!({
        "metadata": { "name": format!("{recycler}.1"), "namespace": "default" },
        "involvedObject": { "kind": "Pod", "namespace": "default", "name": recycler, "uid": pod.uid() },
        "type": "Warning", "reason": "FailedMount", "message": "server nowhere not found",
    });
    let event: k8s_openapi::api::core::v1::Event = serde_json::from_value(event).unwrap();
    let events = kube::Api::namespaced(cluster.client.clone(), "default");
    events.create(&kube::api::PostParams::default(), &event).await.unwrap();
    let reported = cluster.has_event(&name, "RecyclerPod").await;
    assert_eq!(reported.message.as_deref(), Some("Recycler pod: server nowhere not found"));
    assert_eq!(reported.type_.as_deref(), Some("Warning"));
    patch_status(&default, &recycler, json!({ "status": { "phase": "Succeeded" } })).await;
    until(&volumes, &name, |volume| volume_phase(volume) == "Available").await;
    loops.stop().await;
}
