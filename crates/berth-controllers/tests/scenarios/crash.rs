//! Death between any two writes: the loops lose their server at the n-th write, for every n, and others take over.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use berth_testkit::{TestCluster, delete, patch_status, until, until_gone};
use futures_util::FutureExt as _;
use http::{Method, Request, Response};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::client::Body;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tower::Service;

use crate::volume_loops;
use crate::volumes::{claim, claim_phase, class, provisioned, volume, volume_phase};

/// Whether the last write before death reaches the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    NotSent,
    AnswerLost,
}

/// A client that lets some writes through and then nothing any more.
#[derive(Clone)]
struct Mortal {
    client: Client,
    lives: Arc<AtomicUsize>,
    last: Last,
    dead: CancellationToken,
}

impl Service<Request<Body>> for Mortal {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let counts = request.method() != Method::GET && !request.uri().path().ends_with("/events");
        let this = self.clone();
        async move {
            let gone = || io::Error::from(io::ErrorKind::ConnectionReset);
            if this.dead.is_cancelled() {
                return Err(gone());
            }
            let left =
                || this.lives.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            if counts && left().is_err() {
                if this.last == Last::AnswerLost {
                    let _ = this.client.send(request).await;
                }
                this.dead.cancel();
                return Err(gone());
            }
            let answer = this.client.send(request);
            tokio::select! {
                () = this.dead.cancelled() => Err(gone()),
                answer = answer => answer.map_err(io::Error::other),
            }
        }
        .boxed()
    }
}

/// Runs a story for every number of writes after which the loops die, until they outlive it; the story must end well.
async fn for_every_death<S: Future<Output = ()>>(name: &str, story: impl Fn(Arc<TestCluster>) -> S) {
    for last in [Last::NotSent, Last::AnswerLost] {
        for lives in 0.. {
            let cluster =
                Arc::new(TestCluster::real_or_embedded(&format!("{name}-{lives}-{}", last as u8)).await);
            let dead = CancellationToken::new();
            let mortal = Mortal {
                client: cluster.client.clone(),
                lives: Arc::new(AtomicUsize::new(lives)),
                last,
                dead: dead.clone(),
            };
            let loops = volume_loops(&Client::new(mortal, "default"));
            let successors = async {
                dead.cancelled().await;
                loops.stop().await;
                let heirs = volume_loops(&cluster.client);
                std::future::pending::<()>().await;
                drop(heirs);
            };
            tokio::select! {
                () = story(cluster.clone()) => {}
                () = successors => {}
            }
            if !dead.is_cancelled() {
                assert!(lives > 4, "the story has more writes than {lives}");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn binding_and_recycling_survive_death_at_every_write() {
    for_every_death("crash-recycle", |cluster| async move {
        let (claims, volumes) =
            (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
        let default: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
        let name = cluster.name("v");
        let mut volume = volume(&name, "", "1Gi", "Recycle");
        volume["spec"].as_object_mut().unwrap().remove("csi");
        volume["spec"]["hostPath"] = json!({ "path": "/tmp/of/nobody" });
        cluster.create::<PersistentVolume>(volume).await;
        cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
        let bound = until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
        assert_eq!(bound.spec.unwrap().volume_name.as_deref(), Some(name.as_str()));
        delete(&claims, "data").await;
        until_gone(&claims, "data").await;
        // The node lets every recycler pod succeed, however many there are.
        let node = async {
            loop {
                let recycler = format!("recycler-for-{name}");
                until(&default, &recycler, |pod| pod.metadata.deletion_timestamp.is_none()).await;
                let done = json!({ "status": { "phase": "Succeeded" } });
                let patch = kube::api::Patch::Merge(done);
                let _ = default.patch_status(&recycler, &kube::api::PatchParams::default(), &patch).await;
                until_gone(&default, &recycler).await;
            }
        };
        let free = until(&volumes, &name, |volume| volume_phase(volume) == "Available");
        let free = tokio::select! {
            () = node => unreachable!("the node never ends"),
            free = free => free,
        };
        assert!(free.spec.unwrap().claim_ref.is_none());
        until_gone(&default, &format!("recycler-for-{name}")).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provisioning_and_releasing_survive_death_at_every_write() {
    for_every_death("crash-dynamic", |cluster| async move {
        let (claims, volumes) =
            (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
        let fast = cluster.name("fast");
        let mut class = class(&fast, "test.berth.dev", "Immediate");
        class["metadata"]["annotations"] = json!({ "storageclass.kubernetes.io/is-default-class": "true" });
        // Created before the class, so that the class is given to it later.
        cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", None, "1Gi")).await;
        cluster.create::<StorageClass>(class).await;
        let asked = until(&claims, "data", |claim| {
            claim.annotations().contains_key("volume.kubernetes.io/storage-provisioner")
        })
        .await;
        let made: PersistentVolume = cluster.create(provisioned(&asked, "Delete")).await;
        until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
        until(&volumes, &made.name_any(), |volume| volume_phase(volume) == "Bound").await;
        delete(&claims, "data").await;
        until(&volumes, &made.name_any(), |volume| volume_phase(volume) == "Released").await;
        delete(&volumes, &made.name_any()).await;
        until_gone(&volumes, &made.name_any()).await;
        let left = claims.get_opt("data").await.unwrap();
        assert!(left.is_none());
        delete(&cluster.all::<StorageClass>(), &fast).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_was_left_behind_by_another_binding_is_not_believed() {
    let cluster = TestCluster::real_or_embedded("forged").await;
    let (claims, volumes) =
        (cluster.namespaced::<PersistentVolumeClaim>(), cluster.all::<PersistentVolume>());
    let default: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let name = cluster.name("v");
    let recycler = format!("recycler-for-{name}");
    let forged = json!({
        "metadata": { "name": recycler, "namespace": "default" },
        "spec": { "containers": [{ "name": "main", "image": "none" }] },
    });
    let forged: Pod = serde_json::from_value(forged).unwrap();
    let forged = default.create(&kube::api::PostParams::default(), &forged).await.unwrap();
    patch_status(&default, &recycler, json!({ "status": { "phase": "Succeeded" } })).await;
    let mut volume = volume(&name, "", "1Gi", "Recycle");
    volume["spec"].as_object_mut().unwrap().remove("csi");
    volume["spec"]["hostPath"] = json!({ "path": "/tmp/of/nobody" });
    cluster.create::<PersistentVolume>(volume).await;
    cluster.create_namespaced::<PersistentVolumeClaim>(claim("data", Some(""), "1Gi")).await;
    let loops = volume_loops(&cluster.client);
    until(&claims, "data", |claim| claim_phase(claim) == "Bound").await;
    delete(&claims, "data").await;
    let ours = until(&default, &recycler, |pod| pod.uid() != forged.uid()).await;
    assert!(ours.owner_references().iter().any(|owner| owner.name == name));
    assert_eq!(volume_phase(&volumes.get(&name).await.unwrap()), "Released");
    loops.stop().await;
    delete(&default, &recycler).await;
}
