//! `berth sidecars` killed for real, with the driver and the API server as processes of their own: whatever it was
//! about, its successor finishes, and in the end nothing is left on the disk.
//!
//! Every fifth step, or all of them with `BERTH_SIDECARS_KILLS` set; in process, `berth-sidecars` dies at every step of
//! everything.

use std::fs;
use std::path::Path;
use std::time::Instant;

use berth_e2e::program::Program;
use berth_sidecars::snapshots::{self, VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::sidecars::cluster::{Cluster, DRIVER, PATIENCE, pause};
use crate::sidecars::gate::Gate;

/// Starts `berth sidecars`, with the snapshot controller.
fn sidecars(cluster: &Cluster, log: &str, socket: &Path, kubeconfig: &Path) -> Program {
    let (socket, kubeconfig) =
        (format!("--csi-address={}", socket.display()), format!("--kubeconfig={}", kubeconfig.display()));
    let all = "--controllers=provisioner,attacher,resizer,snapshotter,snapshot-controller";
    cluster.berth(log, &["sidecars", &socket, &kubeconfig, all, "--retry-interval-start=50ms"], &[])
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

/// Waits until nothing is left, or all there is is as wanted.
async fn until<K>(api: &Api<K>, what: &str, wanted: impl Fn(&[K]) -> bool)
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
{
    let deadline = Instant::now() + PATIENCE;
    loop {
        let there = api.list(&ListParams::default()).await.unwrap().items;
        if wanted(&there) {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {there:#?}");
        pause().await;
    }
}

/// A volume and a snapshot of it, from nothing to nothing.
async fn life(client: &Client) {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), "default");
    let objects: Api<VolumeSnapshot> = Api::namespaced(client.clone(), "default");
    let claim = json!({
        "metadata": { "name": "data" },
        "spec": {
            "storageClassName": "local", "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Mi" } },
        },
    });
    create(&claims, claim).await;
    let bound = |claim: &PersistentVolumeClaim| {
        claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
    };
    until(&claims, "bound", |claims| claims.iter().any(bound)).await;
    let snapshot = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": { "name": "snap" },
        "spec": { "source": { "persistentVolumeClaimName": "data" } },
    });
    create(&objects, snapshot).await;
    let ready = |snapshot: &VolumeSnapshot| {
        snapshot.status.as_ref().is_some_and(|status| status.ready_to_use == Some(true))
    };
    until(&objects, "ready", |snapshots| snapshots.iter().any(ready)).await;
    objects.delete("snap", &DeleteParams::default()).await.unwrap();
    claims.delete("data", &DeleteParams::default()).await.unwrap();
    until(&objects, "snapshots gone", <[VolumeSnapshot]>::is_empty).await;
    until(&claims, "claims gone", <[PersistentVolumeClaim]>::is_empty).await;
    until(&Api::all(client.clone()), "contents gone", <[VolumeSnapshotContent]>::is_empty).await;
    until(&Api::all(client.clone()), "volumes gone", <[PersistentVolume]>::is_empty).await;
}

/// The kinds and a class of snapshots, and Kubernetes' own loops, which run in this process.
async fn prepare_cluster(client: &Client) -> CancellationToken {
    let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    let kinds: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::from_gvk(&kind));
    for definition in snapshots::definitions() {
        create(&kinds, definition).await;
    }
    let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass");
    let classes: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::from_gvk(&kind));
    let class = json!({
        "metadata": {
            "name": "snaps", "annotations": { "snapshot.storage.kubernetes.io/is-default-class": "true" },
        },
        "driver": DRIVER, "deletionPolicy": "Delete",
    });
    create(&classes, class).await;
    let shutdown = CancellationToken::new();
    let cluster = berth_kube::Cluster::new(client.clone(), shutdown.clone());
    tokio::spawn(berth_controllers::persistent_volumes::run(cluster.clone()));
    tokio::spawn(berth_controllers::protection::run(cluster));
    shutdown
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_step_of_a_volumes_life_it_leaves_nothing_and_loses_nothing() {
    let every = if std::env::var_os("BERTH_SIDECARS_KILLS").is_some() { 1 } else { 5 };
    let cluster = Cluster::start().await;
    let loops = prepare_cluster(&cluster.client).await;
    let _loops = loops.drop_guard();
    let driver = cluster.driver().await;
    let socket = cluster.path("csi.sock");
    for done in [false, true] {
        for last in (1..).step_by(every) {
            let gated = cluster.path(&format!("gate-{last}-{done}"));
            let gate = Gate::open(cluster.client.clone(), &socket, &gated, last, done).await;
            let kubeconfig = cluster.path("gate.kubeconfig");
            let config = json!({
                "apiVersion": "v1", "kind": "Config", "current-context": "gate",
                "clusters": [{ "name": "gate", "cluster": { "server": format!("http://{}", gate.api) } }],
                "contexts": [{ "name": "gate", "context": { "cluster": "gate", "user": "gate" } }],
                "users": [{ "name": "gate", "user": {} }],
            });
            fs::write(&kubeconfig, config.to_string()).unwrap();
            let doomed = sidecars(&cluster, "doomed", &gated, &kubeconfig);
            gate.watch(doomed.pid());
            let successor = async {
                gate.killed().await;
                let own = cluster.path("api/kubeconfig");
                let _successor = sidecars(&cluster, "successor", &socket, &own);
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = life(&cluster.client) => {}
                () = successor => {}
            }
            let left = ["volumes/volumes", "volumes/snapshots"].map(|dir| entries(&cluster.path(dir)));
            assert_eq!(left, [0, 0], "killed at step {last} of {:?}, done {done}", gate.steps());
            if !gate.has_killed() {
                assert!(last > 10, "a life has more steps than {:?}", gate.steps());
                break;
            }
        }
    }
    driver.stop().await.unwrap();
}
