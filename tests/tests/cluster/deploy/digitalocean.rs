//! The controller of `deploy/digitalocean`, run as the manifests run it against a twin of the API, with what its role allows and
//! nothing else; and the driver of a node, which may do nothing.

use std::collections::BTreeSet;

use berth_e2e::cloud::Account;
use berth_e2e::driver;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use crate::deploy::cluster::{At, Cluster};
use crate::deploy::door::Door;
use crate::deploy::manifests::Manifests;
use crate::deploy::roles::Allowed;
use crate::deploy::scenario::{bound, forget, until_counted_up};
use crate::deploy::used::start;

const CLASS: &str = "do-block-storage";
const DRIVER: &str = "dobs.csi.digitalocean.com";
const STORAGE: &str = "storage.k8s.io/v1";

/// What the kubelet would make: a node, and what the driver is called there.
async fn create_objects(cluster: &Cluster) {
    let labels = json!({"metadata": {"labels": {"region": "nyc3"}}});
    cluster.create(&At::cluster("v1", "Node", "node-1"), labels).await;
    let known = json!({"name": DRIVER, "nodeID": "1", "topologyKeys": ["region"]});
    cluster.create(&At::cluster(STORAGE, "CSINode", "node-1"), json!({"spec": {"drivers": [known]}})).await;
}

async fn claim(cluster: &Cluster, name: &str, source: Option<Value>) {
    let mut spec = json!({
        "storageClassName": CLASS, "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    });
    if let Some(source) = source {
        spec["dataSource"] = source;
        // As large as what it is copied from has become.
        spec["resources"]["requests"]["storage"] = json!("2Gi");
    }
    cluster.create(&At::claim(name), json!({"spec": spec})).await;
}

fn from_snapshot(name: &str) -> Value {
    json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name})
}

/// Attaches a volume as the attach-detach controller asks for it, and detaches it again.
async fn attach_and_detach(cluster: &Cluster, twin: &Account, volume: &At) {
    let handle = cluster.find(volume).await.unwrap()["spec"]["csi"]["volumeHandle"].clone();
    let at = At::cluster(STORAGE, "VolumeAttachment", "attached");
    let spec =
        json!({"attacher": DRIVER, "nodeName": "node-1", "source": {"persistentVolumeName": volume.name}});
    cluster.create(&at, json!({"spec": spec})).await;
    let attached = cluster.until(&at, "is attached", |it| it["status"]["attached"] == true).await;
    let context = &attached["status"]["attachmentMetadata"];
    assert_eq!(context[format!("{DRIVER}/volume-name")], json!(volume.name), "{attached:#}");
    assert_eq!(twin.servers_of(handle.as_str().unwrap()).unwrap(), ["1"]);
    cluster.delete(&at).await;
    assert!(twin.servers_of(handle.as_str().unwrap()).unwrap().is_empty());

    // A node that is none: the error is told, again and again.
    let at = At::cluster(STORAGE, "VolumeAttachment", "nowhere");
    let spec =
        json!({"attacher": DRIVER, "nodeName": "node-2", "source": {"persistentVolumeName": volume.name}});
    cluster.create(&at, json!({"spec": spec})).await;
    cluster.until(&at, "has an error", |it| it["status"]["attachError"].is_object()).await;
    cluster.delete(&at).await;
}

/// All that a cluster asks of cloud disks, once.
async fn play(cluster: &Cluster, twin: &Account) {
    claim(cluster, "data", None).await;
    let volume = bound(cluster, "data").await;
    attach_and_detach(cluster, twin, &volume).await;
    let more = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    cluster.merge(&At::claim("data"), more).await;
    cluster.until(&volume, "grows", |volume| volume["spec"]["capacity"]["storage"] == "2Gi").await;
    let waits = |claim: &Value| claim["status"]["conditions"].to_string().contains("Pending");
    cluster.until(&At::claim("data"), "waits for the kubelet to grow the filesystem", waits).await;

    let at = At::snapshot("then");
    let spec = json!({"volumeSnapshotClassName": CLASS, "source": {"persistentVolumeClaimName": "data"}});
    cluster.create(&at, json!({"spec": spec})).await;
    cluster.until(&at, "gets ready", |it| it["status"]["readyToUse"] == true).await;
    claim(cluster, "restored", Some(from_snapshot("then"))).await;
    claim(cluster, "cloned", Some(json!({"kind": "PersistentVolumeClaim", "name": "data"}))).await;
    for copy in ["restored", "cloned"] {
        bound(cluster, copy).await;
    }
    let (disks, snapshots) = twin.ids().unwrap();
    assert_eq!((disks.len(), snapshots.len()), (3, 1));

    claim(cluster, "of-nothing", Some(from_snapshot("nothing"))).await;
    until_counted_up(cluster, "of-nothing", "ProvisioningFailed", None).await;
    cluster.delete(&At::claim("of-nothing")).await;
    cluster.delete(&at).await;
    for claim in ["data", "restored", "cloned"] {
        forget(cluster, claim).await;
    }
    assert_eq!(twin.ids().unwrap(), (BTreeSet::new(), BTreeSet::new()), "something is left in the account");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_roles_of_digitalocean_allow_what_the_programs_do_and_nothing_else() {
    let manifests = Manifests::build("digitalocean");
    let cluster = Cluster::start().await;
    let data = cluster.path("cloud").display().to_string();
    let words = ["cloud", "digitalocean", "--data-dir", &data, "--rate-limit", "none"];
    let mut cloud =
        Program::start(&driver::binary().unwrap(), &words, &[], cluster.path("cloud.log")).unwrap();
    let line = cloud.says("http://127.0.0.1:").await.unwrap();
    let url = line.split_whitespace().next_back().unwrap().to_owned();
    let twin = Account::at(&url).unwrap();

    cluster.apply(&Manifests::build("snapshot-crds").served(), &[]);
    cluster.apply(&manifests.served(), &[]);
    create_objects(&cluster).await;
    let door = |account| Door::open(cluster.client.clone(), Allowed::to(account, &manifests));
    let controllers = door("berth-digitalocean-controller").await;
    let (nodes, snapshots) = (door("berth-digitalocean-node").await, door("berth-snapshot-controller").await);

    let deployment = manifests.get("Deployment", "berth-digitalocean-controller");
    let metadata = format!("--metadata-url={url}/_node/1");
    let twins = [&format!("--url={url}/"), metadata.as_str()];
    let mut programs: Vec<Program> = ["first", "second"]
        .iter()
        .map(|node| start(&cluster, deployment, node, &controllers, &twins))
        .collect();
    let set = manifests.get("DaemonSet", "berth-digitalocean-node");
    programs.push(start(&cluster, set, "node-1", &nodes, &[&metadata]));
    let deployment = manifests.get("Deployment", "berth-snapshot-controller");
    programs.push(start(&cluster, deployment, "control-plane", &snapshots, &[]));
    for program in &mut programs {
        program.says("serving HTTP").await.unwrap();
    }
    tokio::select! {
        () = play(&cluster, &twin) => {}
        what = controllers.refusal() => panic!("the controller may not {what}"),
        what = nodes.refusal() => panic!("the nodes may not {what}"),
        what = snapshots.refusal() => panic!("the snapshot controller may not {what}"),
    }

    for program in programs {
        program.stop().await.unwrap();
    }
    assert_eq!(controllers.unused(), BTreeSet::new(), "the controller may do this, and never does");
    cloud.stop().await.unwrap();
    cluster.finish().await;
}
