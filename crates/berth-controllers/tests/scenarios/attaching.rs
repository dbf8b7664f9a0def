//! What is attached is told once, and is let go also when its volume's object went first.

use std::io;
use std::sync::Arc;

use berth_controllers::attach_detach;
use berth_testkit::{Loops, TestCluster, delete, patch, patch_status, until, until_any, until_gone};
use http::{Method, Request};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::client::Body;
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fakes::{self, DRIVER, pod};
use crate::placement::create_node;

fn attached(node: &Node) -> Vec<String> {
    let list = node.status.as_ref().and_then(|status| status.volumes_attached.clone()).unwrap_or_default();
    list.into_iter().map(|volume| volume.name).collect()
}

/// A volume and a claim that are bound to each other; the handle is given.
async fn bound(cluster: &TestCluster, name: &str, handle: &str) -> String {
    let volume = cluster.name(name);
    let claim = json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    });
    let claim: PersistentVolumeClaim = cluster.create_namespaced(claim).await;
    cluster
        .create::<PersistentVolume>(json!({
            "metadata": { "name": volume },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": "",
                "csi": { "driver": DRIVER, "volumeHandle": handle },
                "claimRef": { "namespace": cluster.namespace, "name": name, "uid": claim.uid() },
            },
        }))
        .await;
    let status = json!({ "status": { "phase": "Bound" } });
    patch_status(&cluster.namespaced::<PersistentVolumeClaim>(), name, status).await;
    volume
}

async fn run_on(cluster: &TestCluster, name: &str, claims: &[&str], node: &str) {
    let mut pod = pod(name, claims);
    pod["spec"]["nodeName"] = json!(node);
    cluster.create_namespaced::<Pod>(pod).await;
}

/// Deletes a volume whatever protects it.
async fn drop_volume(cluster: &TestCluster, name: &str) {
    let volumes = cluster.all::<PersistentVolume>();
    patch(&volumes, name, json!({ "metadata": { "finalizers": null } })).await;
    delete(&volumes, name).await;
    until_gone(&volumes, name).await;
}

/// What the attacher of a driver does that attaches nothing: it calls it attached, and keeps nothing.
async fn call_attached(cluster: &TestCluster, node: &str) -> VolumeAttachment {
    let attachments = cluster.all::<VolumeAttachment>();
    let open = |attachment: &VolumeAttachment| {
        attachment.spec.node_name == node && attachment.status.as_ref().is_none_or(|status| !status.attached)
    };
    let attachment = until_any(&attachments, open).await;
    patch_status(&attachments, &attachment.name_any(), json!({ "status": { "attached": true } })).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_goes_though_its_volume_went_first() {
    let cluster = TestCluster::real_or_embedded("volume-first").await;
    let (node, attachments) = (cluster.name("a"), cluster.all::<VolumeAttachment>());
    let nodes = cluster.all::<Node>();
    create_node(&cluster, &node).await;
    let loops = Loops::new(&cluster.client)
        .with(|cluster| attach_detach::run(cluster, None, attach_detach::FORCE_DETACH_AFTER));
    let volume = bound(&cluster, "one", &cluster.name("handle")).await;
    run_on(&cluster, "first", &["one"], &node).await;
    let first = call_attached(&cluster, &node).await.name_any();
    until(&nodes, &node, |node| !attached(node).is_empty()).await;
    drop_volume(&cluster, &volume).await;
    until_gone(&attachments, &first).await;

    // Once more, and nobody sees the volume go; nor does the node speak of it any more.
    let volume = bound(&cluster, "two", &cluster.name("other")).await;
    run_on(&cluster, "second", &["two"], &node).await;
    let second = call_attached(&cluster, &node).await.name_any();
    until(&nodes, &node, |node| !attached(node).is_empty()).await;
    loops.stop().await;
    drop_volume(&cluster, &volume).await;
    patch_status(&nodes, &node, json!({ "status": { "volumesAttached": null } })).await;
    let loops = Loops::new(&cluster.client)
        .with(|cluster| attach_detach::run(cluster, None, attach_detach::FORCE_DETACH_AFTER));
    until_gone(&attachments, &second).await;
    loops.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_that_names_a_volume_of_old_serves_a_new_one_of_the_same_handle() {
    let cluster = TestCluster::real_or_embedded("volume-anew").await;
    let (node, attachments) = (cluster.name("a"), cluster.all::<VolumeAttachment>());
    create_node(&cluster, &node).await;
    let loops = Loops::new(&cluster.client)
        .with(|cluster| attach_detach::run(cluster, None, attach_detach::FORCE_DETACH_AFTER));
    let volume = bound(&cluster, "one", &cluster.name("handle")).await;
    run_on(&cluster, "first", &["one"], &node).await;
    let made = until_any(&attachments, |attachment| attachment.spec.node_name == node).await.name_any();
    loops.stop().await;

    // As somebody else left it: of the same name, with another volume object that is gone.
    delete(&attachments, &made).await;
    let old = json!({
        "metadata": { "name": made },
        "spec": {
            "attacher": DRIVER, "nodeName": node,
            "source": { "persistentVolumeName": format!("{volume}-of-old") },
        },
    });
    cluster.create::<VolumeAttachment>(old).await;
    let loops = Loops::new(&cluster.client)
        .with(|cluster| attach_detach::run(cluster, None, attach_detach::FORCE_DETACH_AFTER));
    call_attached(&cluster, &node).await;
    until(&cluster.all::<Node>(), &node, |node| !attached(node).is_empty()).await;
    // Somebody deletes it: the pod gets another, of the volume that there is.
    delete(&attachments, &made).await;
    until(&attachments, &made, |attachment| {
        attachment.spec.source.persistent_volume_name.as_ref() == Some(&volume)
    })
    .await;
    loops.stop().await;
}

/// The lists of attached volumes that were written to a node's status, in order.
type Lists = Arc<Mutex<Vec<Vec<String>>>>;

/// The same client, and what is written through it to the node's status.
fn listening(client: &Client, node: &str) -> (Client, Lists) {
    let (lists, path) = (Lists::default(), format!("/api/v1/nodes/{node}/status"));
    let (client, heard) = (client.clone(), lists.clone());
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, heard) = (client.clone(), heard.clone());
        let ours = request.method() == Method::PATCH && request.uri().path() == path;
        async move {
            if !ours {
                return client.send(request).await.map_err(io::Error::other);
            }
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.map_err(io::Error::other)?;
            let written: Value = serde_json::from_slice(&body)?;
            let again = Request::from_parts(parts, Body::from(body.to_vec()));
            let answer = client.send(again).await.map_err(io::Error::other)?;
            if answer.status().is_success() {
                let list = written["status"]["volumesAttached"].as_array().cloned().unwrap_or_default();
                let names = list.iter().map(|volume| volume["name"].as_str().unwrap().to_owned()).collect();
                heard.lock().push(names);
            }
            Ok(answer)
        }
    });
    (Client::new(service, "default"), lists)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_told_of_each_attached_volume_once() {
    const COUNT: usize = 100;
    let cluster = TestCluster::real_or_embedded("told-once").await;
    let node = cluster.name("a");
    create_node(&cluster, &node).await;
    let names: Vec<String> = (0..COUNT).map(|at| format!("v{at}")).collect();
    for name in &names {
        bound(&cluster, name, &cluster.name(name)).await;
    }
    let claims: Vec<&str> = names.iter().map(String::as_str).collect();
    run_on(&cluster, "p", &claims, &node).await;
    let (client, lists) = listening(&cluster.client, &node);
    let loops = Loops::new(&client)
        .with(|cluster| attach_detach::run(cluster, None, attach_detach::FORCE_DETACH_AFTER))
        .with(fakes::attacher);
    until(&cluster.all::<Node>(), &node, |node| attached(node).len() == COUNT).await;
    loops.stop().await;
    let lists = lists.lock();
    println!("{COUNT} volumes reported in {} writes", lists.len());
    for pair in lists.windows(2) {
        assert!(pair[1].len() > pair[0].len(), "a write without news: {} of {}", pair[1].len(), lists.len());
        assert_eq!(pair[1][..pair[0].len()], pair[0][..], "what is listed stays where it is");
    }
}
