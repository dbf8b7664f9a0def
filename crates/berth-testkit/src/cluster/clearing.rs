//! Takes everything of a scenario off a real server, whatever became of the scenario.
//!
//! Nobody there collects what lost its owner or its namespace, and nobody removes finalizers once the loops are gone; what
//! is left over would be work for the loops of the next scenario.

use futures_util::future::join_all;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment, VolumeAttributesClass};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::{Client, Resource};
use serde_json::json;

use super::Kind;

/// Removes a namespace, what is in it, and all that is named after it.
pub(super) async fn clear(client: &Client, namespace: &str) {
    // What makes others first.
    inside::<Deployment>(client, namespace).await;
    inside::<ReplicaSet>(client, namespace).await;
    inside::<Pod>(client, namespace).await;
    let recyclers = format!("recycler-for-{namespace}-");
    remove(&Api::<Pod>::namespaced(client.clone(), "default"), |pod| is_named(pod, &recyclers)).await;
    let ours = format!("{namespace}-");
    remove(&Api::<VolumeAttachment>::all(client.clone()), |attachment| {
        attachment.spec.node_name.starts_with(&ours)
    })
    .await;
    inside::<PersistentVolumeClaim>(client, namespace).await;
    remove(&Api::<PersistentVolume>::all(client.clone()), |volume| {
        let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        is_named(volume, &ours) || claim.is_some_and(|claim| claim.namespace.as_deref() == Some(namespace))
    })
    .await;
    remove(&Api::<StorageClass>::all(client.clone()), |class| is_named(class, &ours)).await;
    remove(&Api::<VolumeAttributesClass>::all(client.clone()), |class| is_named(class, &ours)).await;
    remove(&Api::<Node>::all(client.clone()), |node| is_named(node, &ours)).await;
    remove(&Api::<Namespace>::all(client.clone()), |known| known.metadata.name.as_deref() == Some(namespace))
        .await;
    finalize(client, namespace).await;
}

fn is_named(object: &impl Resource, prefix: &str) -> bool {
    object.meta().name.as_ref().is_some_and(|name| name.starts_with(prefix))
}

async fn inside<K: Kind + Resource<Scope = NamespaceResourceScope>>(client: &Client, namespace: &str) {
    remove(&Api::<K>::namespaced(client.clone(), namespace), |_| true).await;
}

async fn remove<K: Kind>(api: &Api<K>, chosen: impl Fn(&K) -> bool) {
    let list = match api.list(&ListParams::default()).await {
        Ok(list) => list.items,
        Err(error) => return eprintln!("list {} to clear them: {error}", K::kind(&())),
    };
    join_all(list.iter().filter(|object| chosen(object)).map(|object| remove_one(api, object))).await;
}

async fn remove_one<K: Kind>(api: &Api<K>, object: &K) {
    let name = object.meta().name.clone().unwrap_or_default();
    let done = async {
        api.delete(&name, &DeleteParams::default().grace_period(0)).await?;
        if object.meta().finalizers.is_some() {
            let none = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
            api.patch(&name, &PatchParams::default(), &none).await?;
        }
        Ok(())
    };
    match done.await {
        Ok(()) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => eprintln!("remove {} {name}: {error}", K::kind(&())),
    }
}

/// A namespace ends when its own finalizer is taken away, through a door of its own.
async fn finalize(client: &Client, name: &str) {
    let body = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name }, "spec": { "finalizers": [] },
    });
    let request = http::Request::put(format!("/api/v1/namespaces/{name}/finalize"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes());
    match client.request_text(request.unwrap()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => eprintln!("finalize namespace {name}: {error}"),
    }
}
