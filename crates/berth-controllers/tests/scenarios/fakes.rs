//! What others do in a cluster: a provisioner, an attacher and a node that write what real ones would.

use std::sync::Arc;

use berth_kube::{Cluster, Key};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentStatus};
use kube::ResourceExt as _;
use serde_json::{Value, json};

/// The driver of all fakes.
pub(crate) const DRIVER: &str = "fake.csi.example.com";
const FINALIZER: &str = "external-attacher/fake-csi-example-com";

/// Makes a volume for each claim of a class `*-made` that was given to a node. The name of what a claim is cloned from is that of
/// the node that has it: as provisioners of single nodes do, it gives the claim to that node.
pub(crate) async fn provisioner(cluster: Cluster) {
    let queue = berth_kube::Queue::new("fake-provisioner", berth_kube::Backoff::default());
    let claims = cluster.cache::<PersistentVolumeClaim>();
    claims.synced().await;
    let to = queue.clone();
    claims.on_change(move |claim| to.add(Key::of(claim.as_ref())));
    let shutdown = cluster.shutdown().clone();
    queue
        .run(32, shutdown, |key| {
            let (cluster, claims) = (cluster.clone(), claims.clone());
            async move {
                if let Some(claim) = claims.get(&key) {
                    provision(&cluster, &claim).await?;
                }
                Ok::<_, berth_kube::Error>(berth_kube::Next::Done)
            }
        })
        .await;
}

async fn provision(cluster: &Cluster, claim: &PersistentVolumeClaim) -> berth_kube::Result<()> {
    let spec = claim.spec.as_ref().unwrap();
    let class = spec.storage_class_name.as_deref().unwrap_or_default();
    let node = claim.annotations().get("volume.kubernetes.io/selected-node");
    let asked = claim.annotations().contains_key("volume.kubernetes.io/storage-provisioner");
    let (Some(node), None, true, true) = (node, &spec.volume_name, class.ends_with("-made"), asked) else {
        return Ok(());
    };
    if let Some(source) = spec.data_source.as_ref().filter(|source| source.name != *node) {
        let there = source.name.clone();
        let handed = cluster
            .update(claim, |claim| {
                claim.annotations_mut().insert("volume.kubernetes.io/selected-node".to_owned(), there);
            })
            .await;
        return handed.map(drop);
    }
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": {
            "name": format!("pvc-{}", claim.uid().unwrap()),
            "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER },
        },
        "spec": {
            "accessModes": spec.access_modes, "capacity": { "storage": "1Gi" },
            "persistentVolumeReclaimPolicy": "Delete", "storageClassName": class,
            "csi": { "driver": DRIVER, "volumeHandle": claim.uid() },
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "namespace": claim.namespace(), "name": claim.name_any(), "uid": claim.uid(),
            },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                { "key": "kubernetes.io/hostname", "operator": "In", "values": [node] },
            ] }] } },
        },
    }))
    .unwrap();
    match cluster.create(&volume).await {
        Err(error) if !error.is_already_exists() => Err(error),
        _ => Ok(()),
    }
}

/// Attaches and detaches everything at once.
pub(crate) async fn attacher(cluster: Cluster) {
    let queue = berth_kube::Queue::new("fake-attacher", berth_kube::Backoff::default());
    let attachments = cluster.cache::<VolumeAttachment>();
    attachments.synced().await;
    let to = queue.clone();
    attachments.on_change(move |attachment| to.add(Key::of(attachment.as_ref())));
    let shutdown = cluster.shutdown().clone();
    queue
        .run(32, shutdown, |key| {
            let (cluster, attachments) = (cluster.clone(), attachments.clone());
            async move {
                if let Some(attachment) = attachments.get(&key) {
                    attach(&cluster, attachment).await?;
                }
                Ok::<_, berth_kube::Error>(berth_kube::Next::Done)
            }
        })
        .await;
}

async fn attach(cluster: &Cluster, mut attachment: Arc<VolumeAttachment>) -> berth_kube::Result<()> {
    if attachment.spec.attacher != DRIVER {
        return Ok(());
    }
    if attachment.metadata.deletion_timestamp.is_some() {
        if attachment.finalizers().iter().any(|finalizer| finalizer == FINALIZER) {
            cluster
                .update(attachment.as_ref(), |attachment| {
                    attachment.finalizers_mut().retain(|finalizer| finalizer != FINALIZER);
                })
                .await?;
        }
        return Ok(());
    }
    if attachment.status.as_ref().is_some_and(|status| status.attached) {
        return Ok(());
    }
    if attachment.finalizers().is_empty() {
        attachment = cluster
            .update(attachment.as_ref(), |attachment| attachment.finalizers_mut().push(FINALIZER.to_owned()))
            .await?;
    }
    cluster
        .update_status(attachment.as_ref(), |attachment| {
            attachment.status =
                Some(VolumeAttachmentStatus { attached: true, ..VolumeAttachmentStatus::default() });
        })
        .await?;
    Ok(())
}

/// A node that leaves attaching to the controller, ready, with room for pods.
pub(crate) fn node(name: &str) -> Value {
    json!({
        "metadata": {
            "name": name,
            "labels": { "kubernetes.io/hostname": name },
            "annotations": { "volumes.kubernetes.io/controller-managed-attach-detach": "true" },
        },
        "status": {
            "allocatable": { "cpu": "8", "memory": "16Gi", "pods": "2000" },
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

/// Sets the volumes that a node says may be mounted on it.
pub(crate) async fn uses(cluster: &Cluster, name: &str, volumes: &[&str]) {
    loop {
        let node = cluster.fetch::<Node>(&Key::cluster(name)).await.unwrap().unwrap();
        let list: Vec<String> = volumes.iter().map(|volume| (*volume).to_owned()).collect();
        let outcome = cluster
            .update_status(node.as_ref(), |node| node.status.as_mut().unwrap().volumes_in_use = Some(list))
            .await;
        match outcome {
            Ok(_) => return,
            Err(error) if error.is_conflict() => {}
            Err(error) => panic!("{}", error.chain()),
        }
    }
}

/// A pod of one container with these claims.
pub(crate) fn pod(name: &str, claims: &[&str]) -> Value {
    let volumes: Vec<Value> = claims
        .iter()
        .enumerate()
        .map(|(at, claim)| json!({ "name": format!("v{at}"), "persistentVolumeClaim": { "claimName": claim } }))
        .collect();
    json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "c", "image": "any" }],
            "volumes": volumes, "terminationGracePeriodSeconds": 0,
        },
    })
}

/// Runs every pod that has a node at once.
pub(crate) async fn kubelet(cluster: Cluster) {
    let queue = berth_kube::Queue::new("fake-kubelet", berth_kube::Backoff::default());
    let pods = cluster.cache::<Pod>();
    pods.synced().await;
    let to = queue.clone();
    pods.on_change(move |pod| to.add(Key::of(pod.as_ref())));
    let shutdown = cluster.shutdown().clone();
    queue
        .run(32, shutdown, |key| {
            let (cluster, pods) = (cluster.clone(), pods.clone());
            async move {
                if let Some(pod) = pods.get(&key) {
                    start(&cluster, &pod).await?;
                }
                Ok::<_, berth_kube::Error>(berth_kube::Next::Done)
            }
        })
        .await;
}

async fn start(cluster: &Cluster, pod: &Pod) -> berth_kube::Result<()> {
    let placed = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let running = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    if !placed || running || pod.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let ready = json!({ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let started = cluster
        .update_status(pod, |pod| {
            let status = pod.status.get_or_insert_default();
            status.phase = Some("Running".to_owned());
            status.conditions.get_or_insert_default().push(serde_json::from_value(ready).unwrap());
        })
        .await;
    match started {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}
