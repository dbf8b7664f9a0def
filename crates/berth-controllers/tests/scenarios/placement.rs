//! Pods get their nodes and their volumes.

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};

use crate::fakes::{self, DRIVER, node, pod};
use crate::place::{Kind, Loops, Place, delete, until, until_any, until_gone};

fn claim(name: &str, class: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    })
}

fn class(name: &str) -> Value {
    json!({ "metadata": { "name": name }, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer" })
}

/// The status of a new object is not taken from its creator, so it is written after.
async fn create_node(place: &Place, name: &str) -> Node {
    let wanted = node(name);
    let created: Node = place.create(wanted.clone()).await;
    let mut full = serde_json::to_value(&created).unwrap();
    full["status"] = wanted["status"].clone();
    let full: Node = serde_json::from_value(full).unwrap();
    place.all::<Node>().replace_status(name, &PostParams::default(), &full).await.unwrap()
}

fn everything(place: &Place) -> Loops {
    Loops::of_volumes(&place.client)
        .with(berth_controllers::scheduler::run)
        .with(berth_controllers::attach_detach::run)
        .with(fakes::provisioner)
        .with(fakes::attacher)
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn refusal(pod: &Pod) -> &str {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let refused =
        conditions.iter().find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    refused.and_then(|condition| condition.message.as_deref()).unwrap_or_default()
}

fn reports(node: &Node, volume: &str) -> bool {
    let attached =
        node.status.as_ref().and_then(|status| status.volumes_attached.as_deref()).unwrap_or_default();
    attached.iter().any(|attached| attached.name == volume)
}

async fn all<K: Kind>(api: &Api<K>) -> Vec<K> {
    api.list(&ListParams::default()).await.unwrap().items
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_waits_for_its_pod_is_provisioned_attached_and_let_go() {
    let place = Place::new("placement-whole").await;
    let (here, made) = (place.name("a"), place.name("made"));
    create_node(&place, &here).await;
    place.create::<StorageClass>(class(&made)).await;
    place.create_here::<PersistentVolumeClaim>(claim("data", &made)).await;
    let loops = everything(&place);

    place.create_here::<Pod>(pod("p", &["data"])).await;
    let placed = until(&place.here::<Pod>(), "p", |pod| !node_of(pod).is_empty()).await;
    assert_eq!(node_of(&placed), here);
    let bound: PersistentVolumeClaim = place.here().get("data").await.unwrap();
    assert_eq!(bound.annotations()["volume.kubernetes.io/selected-node"], here);
    let volume: PersistentVolume =
        place.all().get(&bound.spec.as_ref().unwrap().volume_name.clone().unwrap()).await.unwrap();
    let unique = format!("kubernetes.io/csi/{DRIVER}^{}", bound.uid().unwrap());
    until(&place.all::<Node>(), &here, |node| reports(node, &unique)).await;
    let attachment =
        until_any(&place.all::<VolumeAttachment>(), |attachment| attachment.spec.node_name == here).await;
    assert_eq!(attachment.spec.source.persistent_volume_name, Some(volume.name_any()));
    assert!(attachment.name_any().starts_with("csi-") && attachment.name_any().len() == 68);
    let event = place.has_event("p", "SuccessfulAttachVolume").await;
    assert_eq!(
        event.message.unwrap().trim_end(),
        format!("AttachVolume.Attach succeeded for volume {:?}", volume.name_any())
    );
    let event = place.has_event("p", "Scheduled").await;
    assert_eq!(event.message, Some(format!("Successfully assigned {}/p to {here}", place.namespace)));

    // While the node uses it, the volume stays, whoever is gone.
    let cluster = berth_kube::Cluster::new(place.client.clone(), tokio_util::sync::CancellationToken::new());
    fakes::uses(&cluster, &here, &[&unique]).await;
    delete(&place.here::<Pod>(), "p").await;
    until_gone(&place.here::<Pod>(), "p").await;
    let still: VolumeAttachment = place.all().get(&attachment.name_any()).await.unwrap();
    assert!(still.metadata.deletion_timestamp.is_none());
    fakes::uses(&cluster, &here, &[]).await;
    until_gone(&place.all::<VolumeAttachment>(), &attachment.name_any()).await;
    until(&place.all::<Node>(), &here, |node| !reports(node, &unique)).await;
    loops.stop().await;
}
