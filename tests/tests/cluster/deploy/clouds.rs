//! The controllers of `deploy/digitalocean` and `deploy/aliyun`, run as the manifests run them against twins of the APIs, with what their
//! roles allow and nothing else; and the drivers of nodes, which may do nothing.

use std::collections::BTreeSet;

use berth_e2e::cloud::{ALIYUN, Account, DIGITALOCEAN, Provider};
use berth_e2e::driver;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use crate::deploy::cluster::{At, Cluster};
use crate::deploy::door::Door;
use crate::deploy::manifests::Manifests;
use crate::deploy::roles::Allowed;
use crate::deploy::scenario::{bound, forget, until_counted_up};
use crate::deploy::used::{SECRET, start};

const STORAGE: &str = "storage.k8s.io/v1";
const GROUPS: &str = "groupsnapshot.storage.k8s.io/v1";

/// What a cluster has of one cloud.
struct Cloud {
    provider: &'static Provider,
    /// The flag for the address of the API.
    url: &'static str,
    /// The credentials of the twin, where they are not what every Secret here holds.
    credentials: &'static [&'static str],
    class: &'static str,
    snapshot_class: &'static str,
    /// The labels that the kubelet gives the node: the driver's topology.
    labels: &'static [(&'static str, &'static str)],
    /// The size of a claim in GiB.
    size: u64,
    /// What the node is told of an attached volume.
    told: &'static str,
    /// Whether snapshots of several volumes can be taken together.
    groups: bool,
    /// A class by which a volume is changed, if it can be.
    modification: Option<(&'static str, &'static str)>,
}

/// What the kubelet would make: a node, and what the driver is called there.
async fn create_objects(cluster: &Cluster, cloud: &Cloud) {
    let labels: serde_json::Map<String, Value> =
        cloud.labels.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    let keys: Vec<&str> = cloud.labels.iter().map(|(key, _)| *key).collect();
    cluster.create(&At::cluster("v1", "Node", "node-1"), json!({"metadata": {"labels": labels}})).await;
    let (name, id) = (cloud.provider.driver, cloud.provider.instance);
    let known = json!({"name": name, "nodeID": id, "topologyKeys": keys});
    cluster.create(&At::cluster(STORAGE, "CSINode", "node-1"), json!({"spec": {"drivers": [known]}})).await;
}

async fn claim(cluster: &Cluster, cloud: &Cloud, name: &str, source: Option<Value>) {
    // As large as what it is copied from has become.
    let size = cloud.size + u64::from(source.is_some());
    let mut spec = json!({
        "storageClassName": cloud.class, "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": format!("{size}Gi")}},
    });
    if let Some(source) = source {
        spec["dataSource"] = source;
    }
    cluster.create(&At::claim(name), json!({"spec": spec})).await;
}

fn from_snapshot(name: &str) -> Value {
    json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name})
}

/// Attaches a volume as the attach-detach controller asks for it, and detaches it again.
async fn attach_and_detach(cluster: &Cluster, cloud: &Cloud, twin: &Account, volume: &At) {
    let driver = cloud.provider.driver;
    let handle = cluster.find(volume).await.unwrap()["spec"]["csi"]["volumeHandle"].clone();
    let at = At::cluster(STORAGE, "VolumeAttachment", "attached");
    let spec =
        json!({"attacher": driver, "nodeName": "node-1", "source": {"persistentVolumeName": volume.name}});
    cluster.create(&at, json!({"spec": spec})).await;
    let attached = cluster.until(&at, "is attached", |it| it["status"]["attached"] == true).await;
    let context = &attached["status"]["attachmentMetadata"];
    assert!(context[cloud.told].is_string(), "{attached:#}");
    assert_eq!(twin.servers_of(handle.as_str().unwrap()).unwrap(), [cloud.provider.instance]);
    cluster.delete(&at).await;
    assert!(twin.servers_of(handle.as_str().unwrap()).unwrap().is_empty());

    // A node that is none: the error is told, again and again.
    let at = At::cluster(STORAGE, "VolumeAttachment", "nowhere");
    let spec =
        json!({"attacher": driver, "nodeName": "node-2", "source": {"persistentVolumeName": volume.name}});
    cluster.create(&at, json!({"spec": spec})).await;
    cluster.until(&at, "has an error", |it| it["status"]["attachError"].is_object()).await;
    cluster.delete(&at).await;
}

/// Takes a group of snapshots, and removes it again.
async fn take_and_remove_group(cluster: &Cluster, cloud: &Cloud) {
    claim(cluster, cloud, "grouped", None).await;
    bound(cluster, "grouped").await;
    cluster.merge(&At::claim("grouped"), json!({"metadata": {"labels": {"app": "db"}}})).await;
    let class = json!({"driver": cloud.provider.driver, "deletionPolicy": "Delete"});
    cluster.create(&At::cluster(GROUPS, "VolumeGroupSnapshotClass", "together"), class).await;
    let group = At { namespace: "default", ..At::cluster(GROUPS, "VolumeGroupSnapshot", "both") };
    let selector = json!({"selector": {"matchLabels": {"app": "db"}}});
    let spec = json!({"volumeGroupSnapshotClassName": "together", "source": selector});
    cluster.create(&group, json!({"spec": spec})).await;
    cluster.until(&group, "gets ready", |it| it["status"]["readyToUse"] == true).await;
    cluster.delete(&group).await;
    cluster.until_all(&At::snapshot(""), "the members go too", <[Value]>::is_empty).await;
    forget(cluster, "grouped").await;
}

/// All that a cluster asks of cloud disks, once.
async fn play(cluster: &Cluster, cloud: &Cloud, twin: &Account) {
    if cloud.groups {
        take_and_remove_group(cluster, cloud).await;
    }
    claim(cluster, cloud, "data", None).await;
    let volume = bound(cluster, "data").await;
    attach_and_detach(cluster, cloud, twin, &volume).await;
    if let Some((key, value)) = cloud.modification {
        let class = json!({"driverName": cloud.provider.driver, "parameters": {key: value}});
        cluster.create(&At::cluster(STORAGE, "VolumeAttributesClass", "changed"), class).await;
        let change = json!({"spec": {"volumeAttributesClassName": "changed"}});
        cluster.merge(&At::claim("data"), change).await;
        let changed = |claim: &Value| claim["status"]["currentVolumeAttributesClassName"] == "changed";
        cluster.until(&At::claim("data"), "is changed", changed).await;
    }
    let larger = format!("{}Gi", cloud.size + 1);
    let more = json!({"spec": {"resources": {"requests": {"storage": larger}}}});
    cluster.merge(&At::claim("data"), more).await;
    cluster.until(&volume, "grows", |volume| volume["spec"]["capacity"]["storage"] == larger).await;
    let waits = |claim: &Value| claim["status"]["conditions"].to_string().contains("Pending");
    cluster.until(&At::claim("data"), "waits for the kubelet to grow the filesystem", waits).await;

    let at = At::snapshot("then");
    let spec = json!({"volumeSnapshotClassName": cloud.snapshot_class, "source": {"persistentVolumeClaimName": "data"}});
    cluster.create(&at, json!({"spec": spec})).await;
    cluster.until(&at, "gets ready", |it| it["status"]["readyToUse"] == true).await;
    claim(cluster, cloud, "restored", Some(from_snapshot("then"))).await;
    claim(cluster, cloud, "cloned", Some(json!({"kind": "PersistentVolumeClaim", "name": "data"}))).await;
    for copy in ["restored", "cloned"] {
        bound(cluster, copy).await;
    }
    let (disks, snapshots) = twin.ids().unwrap();
    assert_eq!((disks.len(), snapshots.len()), (3, 1));

    claim(cluster, cloud, "of-nothing", Some(from_snapshot("nothing"))).await;
    until_counted_up(cluster, "of-nothing", "ProvisioningFailed", None).await;
    cluster.delete(&At::claim("of-nothing")).await;
    cluster.delete(&at).await;
    for claim in ["data", "restored", "cloned"] {
        forget(cluster, claim).await;
    }
    assert_eq!(twin.ids().unwrap(), (BTreeSet::new(), BTreeSet::new()), "something is left in the account");
}

async fn roles_allow_what_the_programs_do_and_nothing_else(cloud: &Cloud) {
    let (name, instance) = (cloud.provider.name, cloud.provider.instance);
    let manifests = Manifests::build(name);
    let cluster = Cluster::start().await;
    let data = cluster.path("cloud").display().to_string();
    let mut words = vec!["cloud", name, "--data-dir", &data, "--rate-limit", "none"];
    words.extend(cloud.credentials);
    let mut twin =
        Program::start(&driver::binary().unwrap(), &words, &[], cluster.path("cloud.log")).unwrap();
    let line = twin.says("http://127.0.0.1:").await.unwrap();
    let url = line.split_whitespace().next_back().unwrap().to_owned();
    let account = Account::at(&url).unwrap();

    cluster.apply(&Manifests::build("snapshot-crds").served(), &[]);
    cluster.apply(&manifests.served(), &[]);
    create_objects(&cluster, cloud).await;
    let (controller, node) = (format!("berth-{name}-controller"), format!("berth-{name}-node"));
    let door = |account: &str| Door::open(cluster.client.clone(), Allowed::to(account, &manifests));
    let controllers = door(&controller).await;
    let (nodes, snapshots) = (door(&node).await, door("berth-snapshot-controller").await);

    let metadata = format!("--metadata-url={url}/_node/{instance}");
    let twins = [&format!("{}={url}/", cloud.url), metadata.as_str()];
    let deployment = manifests.get("Deployment", &controller);
    let mut programs: Vec<Program> = ["first", "second"]
        .iter()
        .map(|node| start(&cluster, deployment, node, &controllers, &twins))
        .collect();
    let set = manifests.get("DaemonSet", &node);
    programs.push(start(&cluster, set, "node-1", &nodes, &[&metadata]));
    let deployment = manifests.get("Deployment", "berth-snapshot-controller");
    programs.push(start(&cluster, deployment, "control-plane", &snapshots, &[]));
    for program in &mut programs {
        program.says("serving HTTP").await.unwrap();
    }
    tokio::select! {
        () = play(&cluster, cloud, &account) => {}
        what = controllers.refusal() => panic!("the controller may not {what}"),
        what = nodes.refusal() => panic!("the nodes may not {what}"),
        what = snapshots.refusal() => panic!("the snapshot controller may not {what}"),
    }

    for program in programs {
        program.stop().await.unwrap();
    }
    assert_eq!(controllers.unused(), BTreeSet::new(), "the controller may do this, and never does");
    twin.stop().await.unwrap();
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_roles_of_digitalocean_allow_what_the_programs_do_and_nothing_else() {
    roles_allow_what_the_programs_do_and_nothing_else(&Cloud {
        provider: &DIGITALOCEAN,
        url: "--url",
        credentials: &[],
        class: "do-block-storage",
        snapshot_class: "do-block-storage",
        labels: &[("region", "nyc3")],
        size: 1,
        told: "dobs.csi.digitalocean.com/volume-name",
        groups: false,
        modification: None,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_roles_of_aliyun_allow_what_the_programs_do_and_nothing_else() {
    roles_allow_what_the_programs_do_and_nothing_else(&Cloud {
        provider: &ALIYUN,
        url: "--ecs-endpoint",
        credentials: &["--access-key-secret", SECRET],
        class: "alicloud-disk-essd",
        snapshot_class: "alibabacloud-disk-snapshot",
        labels: &[
            ("topology.diskplugin.csi.alibabacloud.com/zone", "cn-hangzhou-h"),
            ("topology.kubernetes.io/zone", "cn-hangzhou-h"),
            ("topology.kubernetes.io/region", "cn-hangzhou"),
            ("alibabacloud.com/ecs-instance-id", "i-berth1"),
        ],
        size: 20,
        told: "serialNumber",
        groups: true,
        modification: Some(("diskTags/team", "blue")),
    })
    .await;
}
