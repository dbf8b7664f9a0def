//! All that a cluster asks of node-local storage, once.

use serde_json::{Value, json};

use crate::deploy::cluster::{At, Cluster, pause};
use crate::deploy::used::NODES;

const CLASS: &str = "berth-local";
const SNAPSHOTS: &str = "snapshot.storage.k8s.io/v1";
const GROUPS: &str = "groupsnapshot.storage.k8s.io/v1";
const STORAGE: &str = "storage.k8s.io/v1";
/// The node that a content is labelled with.
const MANAGED_BY: &str = "/metadata/labels/snapshot.storage.kubernetes.io~1managed-by";

/// Everything, from nothing to nothing.
pub(crate) async fn play(cluster: &Cluster) {
    rooms_are_told(cluster).await;
    volumes_are_made_grown_and_changed(cluster).await;
    snapshots_are_taken_and_restored(cluster).await;
    a_claim_that_binds_at_once_finds_a_node(cluster).await;
    what_fails_is_told_again(cluster).await;
    for claim in ["data", "restored", "cloned", "gold", "at-once"] {
        forget(cluster, claim).await;
    }
    groups_are_taken(cluster).await;
}

/// A claim as the scheduler leaves it for the first node, with more fields in its spec.
async fn claim(cluster: &Cluster, name: &str, more: Value) {
    claim_on(cluster, NODES[0], name, more).await;
}

/// The same for any node.
async fn claim_on(cluster: &Cluster, node: &str, name: &str, more: Value) {
    let mut spec = json!({
        "storageClassName": CLASS, "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Mi"}},
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let metadata = json!({
        "annotations": {"volume.kubernetes.io/selected-node": node}, "labels": {"app": "db"},
    });
    cluster.create(&At::claim(name), json!({"metadata": metadata, "spec": spec})).await;
}

pub(crate) async fn bound(cluster: &Cluster, name: &str) -> At {
    let bound = |claim: &Value| claim["status"]["phase"] == "Bound";
    let claim = cluster.until(&At::claim(name), "gets bound", bound).await;
    At::volume(claim["spec"]["volumeName"].as_str().unwrap())
}

/// Deletes a claim, and waits until its volume is gone too.
pub(crate) async fn forget(cluster: &Cluster, name: &str) {
    let volume = bound(cluster, name).await;
    cluster.delete(&At::claim(name)).await;
    cluster.gone(&volume).await;
}

async fn rooms_are_told(cluster: &Cluster) {
    let at = At { namespace: "berth-system", ..At::cluster(STORAGE, "CSIStorageCapacity", "") };
    let of = |class: &'static str| {
        move |all: &[Value]| all.iter().filter(|room| room["storageClassName"] == class).count()
    };
    let rooms = cluster.until_all(&at, "there is one per node", |all| of(CLASS)(all) == NODES.len()).await;
    for room in rooms {
        assert_eq!(room["metadata"]["ownerReferences"][0]["kind"], "DaemonSet", "{room:#}");
        assert!(room["nodeTopology"]["matchLabels"]["topology.berth.dev/node"].is_string(), "{room:#}");
    }
    let class = At::cluster(STORAGE, "StorageClass", "short-lived");
    let fields = json!({"provisioner": "local.berth.dev", "volumeBindingMode": "WaitForFirstConsumer"});
    cluster.create(&class, fields).await;
    cluster.until_all(&at, "the new class has them too", |all| of("short-lived")(all) == NODES.len()).await;
    cluster.delete(&class).await;
    cluster.until_all(&at, "they go with their class", |all| of("short-lived")(all) == 0).await;
}

async fn volumes_are_made_grown_and_changed(cluster: &Cluster) {
    for tier in ["gold", "silver"] {
        let class = json!({"driverName": "local.berth.dev", "parameters": {"tier": tier}});
        cluster.create(&At::cluster(STORAGE, "VolumeAttributesClass", tier), class).await;
    }
    claim(cluster, "data", json!({})).await;
    claim(cluster, "gold", json!({"volumeAttributesClassName": "gold"})).await;
    let volume = bound(cluster, "data").await;
    bound(cluster, "gold").await;

    let more = json!({"spec": {"resources": {"requests": {"storage": "2Mi"}}}});
    cluster.merge(&At::claim("data"), more).await;
    let grown = |volume: &Value| volume["spec"]["capacity"]["storage"] == "2Mi";
    cluster.until(&volume, "grows", grown).await;
    let at = At::claim("data");
    let settled = |claim: &Value| {
        claim["status"]["capacity"]["storage"] == "2Mi"
            || claim["status"]["conditions"].to_string().contains("Pending")
    };
    let claim = cluster.until(&at, "has its new size or waits for the kubelet", settled).await;
    if claim["status"]["capacity"]["storage"] != "2Mi" {
        // As the kubelet says that it is done.
        let done = json!({
            "capacity": {"storage": "2Mi"}, "conditions": null, "allocatedResourceStatuses": null,
        });
        cluster.merge_status(&at, done).await;
    }

    cluster.merge(&at, json!({"spec": {"volumeAttributesClassName": "silver"}})).await;
    let changed = |claim: &Value| claim["status"]["currentVolumeAttributesClassName"] == "silver";
    cluster.until(&at, "is silver", changed).await;
    // The other node has the same role and does not take this for its work.
    let events = cluster.events("data").await;
    assert!(!events.iter().any(|(reason, ..)| reason.ends_with("Failed")), "{events:?}");
}

async fn snapshots_are_taken_and_restored(cluster: &Cluster) {
    let at = At::snapshot("then");
    let spec = json!({
        "volumeSnapshotClassName": CLASS, "source": {"persistentVolumeClaimName": "data"},
    });
    cluster.create(&at, json!({"spec": spec})).await;
    let snapshot = cluster.until(&at, "gets ready", |it| it["status"]["readyToUse"] == true).await;
    let content = snapshot["status"]["boundVolumeSnapshotContentName"].as_str().unwrap();
    let content = At::cluster(SNAPSHOTS, "VolumeSnapshotContent", content);
    let found = cluster.find(&content).await.unwrap();
    assert_eq!(found.pointer(MANAGED_BY), Some(&json!(NODES[0])), "{found:#}");

    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "then"});
    let more = |source: Value| json!({"dataSource": source, "resources": {"requests": {"storage": "2Mi"}}});
    claim(cluster, "restored", more(source)).await;
    claim(cluster, "cloned", more(json!({"kind": "PersistentVolumeClaim", "name": "data"}))).await;
    bound(cluster, "restored").await;
    bound(cluster, "cloned").await;
}

async fn a_claim_that_binds_at_once_finds_a_node(cluster: &Cluster) {
    let class = json!({"provisioner": "local.berth.dev", "volumeBindingMode": "Immediate"});
    cluster.create(&At::cluster(STORAGE, "StorageClass", "at-once"), class).await;
    let spec = json!({
        "storageClassName": "at-once", "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Mi"}},
    });
    cluster.create(&At::claim("at-once"), json!({"spec": spec})).await;
    bound(cluster, "at-once").await;
}

/// Waits until an event about something is counted up; meanwhile touches what is to be touched.
pub(crate) async fn until_counted_up(cluster: &Cluster, name: &str, reason: &str, touched: Option<&At>) {
    for round in 0.. {
        let events = cluster.events(name).await;
        if events.iter().any(|(why, count, _)| why == reason && *count > 1) {
            return;
        }
        assert!(round < 2000, "{events:?}");
        if let Some(at) = touched {
            cluster.merge(at, json!({"metadata": {"labels": {"round": round.to_string()}}})).await;
        }
        pause().await;
    }
}

async fn what_fails_is_told_again(cluster: &Cluster) {
    let source = |name: &str| {
        let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name});
        json!({"dataSource": source})
    };
    // Nobody works for this claim, which keeps its source.
    claim_on(cluster, "nowhere", "of-nobody", source("then")).await;
    claim(cluster, "of-nothing", source("nothing")).await;
    until_counted_up(cluster, "of-nothing", "ProvisioningFailed", None).await;
    let at = At::snapshot("then");
    cluster.ask_to_delete(&at).await;
    // Somebody who touches it makes the controller look again.
    until_counted_up(cluster, "then", "SnapshotDeletePending", Some(&at)).await;
    cluster.delete(&At::claim("of-nothing")).await;
    cluster.delete(&At::claim("of-nobody")).await;
    cluster.gone(&at).await;
    let contents = At::cluster(SNAPSHOTS, "VolumeSnapshotContent", "");
    cluster.until_all(&contents, "its content goes too", <[Value]>::is_empty).await;
}

/// A group whose members are on one node is taken there; one of several nodes is refused.
async fn groups_are_taken(cluster: &Cluster) {
    claim(cluster, "one", json!({})).await;
    claim(cluster, "other", json!({})).await;
    claim_on(cluster, NODES[1], "away", json!({})).await;
    for name in ["one", "other", "away"] {
        bound(cluster, name).await;
    }
    cluster.merge(&At::claim("away"), json!({"metadata": {"labels": {"app": "web", "tier": "all"}}})).await;
    cluster.merge(&At::claim("one"), json!({"metadata": {"labels": {"tier": "all"}}})).await;
    let class = json!({"driver": "local.berth.dev", "deletionPolicy": "Delete"});
    cluster.create(&At::cluster(GROUPS, "VolumeGroupSnapshotClass", CLASS), class).await;
    let at =
        |name: &'static str| At { namespace: "default", ..At::cluster(GROUPS, "VolumeGroupSnapshot", name) };
    let spec = |labels: Value| json!({ "volumeGroupSnapshotClassName": CLASS, "source": {"selector": {"matchLabels": labels}} });
    let group = at("both");
    cluster.create(&group, json!({"spec": spec(json!({"app": "db"}))})).await;
    let ready = cluster.until(&group, "gets ready", |it| it["status"]["readyToUse"] == true).await;
    let content = ready["status"]["boundVolumeGroupSnapshotContentName"].as_str().unwrap();
    let found = cluster.find(&At::cluster(GROUPS, "VolumeGroupSnapshotContent", content)).await.unwrap();
    assert_eq!(found.pointer(MANAGED_BY), Some(&json!(NODES[0])), "{found:#}");
    let members = At::snapshot("");
    assert_eq!(cluster.list(&members).await.len(), 2);

    let scattered = at("scattered");
    cluster.create(&scattered, json!({"spec": spec(json!({"tier": "all"}))})).await;
    let refused = |it: &Value| {
        let message = it["status"]["error"]["message"].as_str().unwrap_or_default();
        message.contains("volumes of several nodes (away on node-2; one on node-1)")
    };
    cluster.until(&scattered, "says that its members are on several nodes", refused).await;
    cluster.delete(&scattered).await;

    // A member is restored where it is, whatever node the scheduler chose.
    let member = cluster.list(&members).await[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": member});
    claim_on(cluster, NODES[1], "of-member", json!({"dataSource": source})).await;
    let volume = cluster.find(&bound(cluster, "of-member").await).await.unwrap();
    assert!(volume["spec"]["nodeAffinity"].to_string().contains(NODES[0]), "{volume:#}");
    forget(cluster, "of-member").await;

    cluster.delete(&group).await;
    cluster.until_all(&members, "the members go too", <[Value]>::is_empty).await;
    let contents = At::cluster(SNAPSHOTS, "VolumeSnapshotContent", "");
    cluster.until_all(&contents, "their contents go too", <[Value]>::is_empty).await;
    for name in ["one", "other", "away"] {
        forget(cluster, name).await;
    }
}
