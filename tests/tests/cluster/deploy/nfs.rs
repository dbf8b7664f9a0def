//! The NFS controller of the manifests, run as they run it, with what its role allows and nothing else; and the driver of a
//! node, which may do nothing.

use std::collections::BTreeSet;
use std::fs;

use berth_e2e::nfs::Server;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use crate::deploy::cluster::{At, Cluster};
use crate::deploy::door::Door;
use crate::deploy::manifests::Manifests;
use crate::deploy::roles::Allowed;
use crate::deploy::scenario::{bound, forget, until_counted_up};
use crate::deploy::used::start;

const CLASS: &str = "nfs-csi";

/// A class whose secret says how the server is reached.
async fn create_objects(cluster: &Cluster, server: &Server) {
    let secret = At { namespace: "default", ..At::cluster("v1", "Secret", "options") };
    cluster.create(&secret, json!({"stringData": {"mountOptions": server.options}})).await;
    let class = json!({
        "provisioner": "nfs.csi.k8s.io", "allowVolumeExpansion": true,
        "parameters": {
            "server": "127.0.0.1", "share": "/export", "subDir": "${pvc.metadata.labels['app']}/${pvc.metadata.name}",
            "csi.storage.k8s.io/provisioner-secret-name": "options",
            "csi.storage.k8s.io/provisioner-secret-namespace": "default",
        },
    });
    cluster.create(&At::cluster("storage.k8s.io/v1", "StorageClass", CLASS), class).await;
}

async fn claim(cluster: &Cluster, name: &str, source: Option<Value>) {
    let mut spec = json!({
        "storageClassName": CLASS, "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    });
    if let Some(source) = source {
        spec["dataSource"] = source;
        // As large as what it is copied from has become.
        spec["resources"]["requests"]["storage"] = json!("2Gi");
    }
    let metadata = json!({"labels": {"app": "db"}});
    cluster.create(&At::claim(name), json!({"metadata": metadata, "spec": spec})).await;
}

fn from_snapshot(name: &str) -> Value {
    json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name})
}

/// All that a cluster asks of NFS volumes, once.
async fn play(cluster: &Cluster, server: &Server) {
    claim(cluster, "data", None).await;
    let volume = bound(cluster, "data").await;
    let dir = server.export().join("db/data");
    fs::write(dir.join("file"), "precious").unwrap();
    let more = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    cluster.merge(&At::claim("data"), more).await;
    cluster.until(&volume, "grows", |volume| volume["spec"]["capacity"]["storage"] == "2Gi").await;
    let grown = |claim: &Value| claim["status"]["capacity"]["storage"] == "2Gi";
    cluster.until(&At::claim("data"), "has its new size", grown).await;

    let at = At::snapshot("then");
    let spec =
        json!({"volumeSnapshotClassName": "berth-nfs", "source": {"persistentVolumeClaimName": "data"}});
    cluster.create(&at, json!({"spec": spec})).await;
    cluster.until(&at, "gets ready", |it| it["status"]["readyToUse"] == true).await;
    claim(cluster, "restored", Some(from_snapshot("then"))).await;
    claim(cluster, "cloned", Some(json!({"kind": "PersistentVolumeClaim", "name": "data"}))).await;
    for copy in ["restored", "cloned"] {
        bound(cluster, copy).await;
        let file = server.export().join(format!("db/{copy}/file"));
        assert_eq!(fs::read_to_string(file).unwrap(), "precious", "{copy}");
    }

    claim(cluster, "of-nothing", Some(from_snapshot("nothing"))).await;
    until_counted_up(cluster, "of-nothing", "ProvisioningFailed", None).await;
    cluster.delete(&At::claim("of-nothing")).await;
    cluster.delete(&at).await;
    for claim in ["data", "restored", "cloned"] {
        forget(cluster, claim).await;
    }
    assert!(!server.export().join("db").exists(), "a volume is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_roles_of_nfs_allow_what_the_programs_do_and_nothing_else() {
    let (nfs, server) = (Manifests::build("nfs"), Server::start(&[]).unwrap());
    let cluster = Cluster::start().await;
    cluster.apply(&Manifests::build("snapshot-crds").served(), &[]);
    cluster.apply(&nfs.served(), &[]);
    create_objects(&cluster, &server).await;
    let door = |account| Door::open(cluster.client.clone(), Allowed::to(account, &nfs));
    let controllers = door("berth-nfs-controller").await;
    let (nodes, snapshots) = (door("berth-nfs-node").await, door("berth-snapshot-controller").await);

    let deployment = nfs.get("Deployment", "berth-nfs-controller");
    let mut programs: Vec<Program> =
        ["first", "second"].iter().map(|node| start(&cluster, deployment, node, &controllers, &[])).collect();
    programs.push(start(&cluster, nfs.get("DaemonSet", "berth-nfs-node"), "node-1", &nodes, &[]));
    let deployment = nfs.get("Deployment", "berth-snapshot-controller");
    programs.push(start(&cluster, deployment, "control-plane", &snapshots, &[]));
    for program in &mut programs {
        program.says("serving HTTP").await.unwrap();
    }
    tokio::select! {
        () = play(&cluster, &server) => {}
        what = controllers.refusal() => panic!("the controller may not {what}"),
        what = nodes.refusal() => panic!("the nodes may not {what}"),
        what = snapshots.refusal() => panic!("the snapshot controller may not {what}"),
    }

    for program in programs {
        program.stop().await.unwrap();
    }
    assert_eq!(controllers.unused(), BTreeSet::new(), "the controller may do this, and never does");
    cluster.finish().await;
}
