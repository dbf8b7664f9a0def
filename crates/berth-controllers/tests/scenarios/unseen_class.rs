//! An attributes class goes only if the server too knows nobody who names it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use berth_testkit::{Loops, TestCluster, delete, patch, until, until_gone};
use http::{Request, Response};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::client::Body;
use kube::{Client, ResourceExt as _};
use serde_json::json;

use crate::volumes::{claim, volume};

/// A client whose caches stay empty of a kind: its first list is empty and its watch silent. Later lists are true.
fn late(client: &Client, resource: &'static str) -> Client {
    let (client, listed) = (client.clone(), Arc::new(AtomicBool::new(false)));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, listed) = (client.clone(), listed.clone());
        async move {
            let about = request.uri().path() == format!("/api/v1/{resource}");
            if about && request.uri().query().is_some_and(|query| query.contains("watch=true")) {
                std::future::pending::<()>().await;
            }
            if about && !listed.swap(true, Ordering::SeqCst) {
                let list = json!({
                    "apiVersion": "v1", "kind": "List", "metadata": { "resourceVersion": "1" }, "items": [],
                });
                return Ok(Response::new(Body::from(list.to_string().into_bytes())));
            }
            client.send(request).await.map_err(io::Error::other)
        }
    });
    Client::new(service, "default")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attributes_class_goes_only_if_the_server_too_knows_nobody_who_names_it() {
    for resource in ["persistentvolumes", "persistentvolumeclaims"] {
        let cluster = TestCluster::real_or_embedded("unseen-class").await;
        let classes = cluster.all::<VolumeAttributesClass>();
        let (used, unused) = (cluster.name("used"), cluster.name("unused"));
        let class = |name: &str, finalizers: &[&str]| {
            json!({
                "metadata": { "name": name, "finalizers": finalizers },
                "driverName": "test.berth.dev", "parameters": { "iops": "1" },
            })
        };
        for name in [&used, &unused] {
            cluster.create::<VolumeAttributesClass>(class(name, &["kubernetes.io/vac-protection"])).await;
            delete(&classes, name).await;
        }
        if resource == "persistentvolumes" {
            let mut volume = volume(&cluster.name("v"), "", "1Gi", "Retain");
            volume["spec"]["volumeAttributesClassName"] = used.clone().into();
            cluster.create::<PersistentVolume>(volume).await;
        } else {
            let mut claim = claim("data", Some(""), "1Gi");
            claim["spec"]["volumeAttributesClassName"] = used.clone().into();
            cluster.create_namespaced::<PersistentVolumeClaim>(claim).await;
        }
        let loops = Loops::new(&late(&cluster.client, resource)).with(berth_controllers::protection::run);
        until_gone(&classes, &unused).await;
        // One more comes and goes, so that the first two were surely looked at.
        let last = cluster.name("last");
        cluster.create::<VolumeAttributesClass>(class(&last, &[])).await;
        until(&classes, &last, |class| !class.finalizers().is_empty()).await;
        delete(&classes, &last).await;
        until_gone(&classes, &last).await;
        let kept = classes.get(&used).await.unwrap();
        assert!(!kept.finalizers().is_empty(), "{resource}");
        loops.stop().await;
        patch(&classes, &used, json!({ "metadata": { "finalizers": null } })).await;
    }
}
