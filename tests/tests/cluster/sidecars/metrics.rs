//! Every metric of the upstream components, by its name, on the pages of ours.

use berth_sidecars::snapshots::{VolumeSnapshot, VolumeSnapshotClass};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::sidecars::cluster::{Cluster, DRIVER, PATIENCE, get, pause};

/// What every component shows.
const COMMON: &[&str] = &[
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
    "process_max_fds",
    "csi_sidecar_operations_seconds_bucket",
    "csi_sidecar_operations_seconds_count",
    "workqueue_depth",
    "workqueue_adds_total",
    "workqueue_retries_total",
    "workqueue_queue_duration_seconds_count",
    "workqueue_work_duration_seconds_count",
    "workqueue_unfinished_work_seconds",
    "workqueue_longest_running_processor_seconds",
    "leader_election_master_status",
    "leader_election_slowpath_total",
];

/// The queues, as upstream calls them.
const QUEUES: &[&str] = &[
    "claims",
    "volumes",
    "csi-attacher-va",
    "csi-attacher-pv",
    "local.berth.dev-pvc",
    "csi-snapshotter-content",
    "snapshot-controller-snapshot",
    "snapshot-controller-content",
];

/// What single components show once they have done something.
const AFTER_WORK: &[&str] = &[
    "controller_persistentvolumeclaim_provision_total",
    "controller_persistentvolumeclaim_provision_duration_seconds_count",
    "snapshot_controller_operation_total_seconds_bucket",
    "snapshot_controller_operations_in_flight",
];

fn has(page: &str, name: &str) -> bool {
    page.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
}

async fn snapshot_kinds(cluster: &Cluster) {
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    for definition in berth_sidecars::snapshots::definitions() {
        let definition = serde_json::from_value(definition).unwrap();
        definitions.create(&PostParams::default(), &definition).await.unwrap();
    }
    let class: VolumeSnapshotClass = serde_json::from_value(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
        "metadata": {"name": "local"}, "driver": DRIVER, "deletionPolicy": "Delete",
    }))
    .unwrap();
    let classes: Api<VolumeSnapshotClass> = Api::all(cluster.client.clone());
    classes.create(&PostParams::default(), &class).await.unwrap();
}

/// Binds the claim to its volume, as the binder would.
pub(crate) async fn bind(cluster: &Cluster, volume: &str) {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(cluster.client.clone(), "default");
    let (parameters, bound) = (PatchParams::default(), Patch::Merge(json!({"status": {"phase": "Bound"}})));
    let named = Patch::Merge(json!({"spec": {"volumeName": volume}}));
    claims.patch("data", &parameters, &named).await.unwrap();
    claims.patch_status("data", &parameters, &bound).await.unwrap();
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    volumes.patch_status(volume, &parameters, &bound).await.unwrap();
}

#[tokio::test]
async fn all_components_together_show_the_metrics_that_upstream_s_show() {
    let cluster = Cluster::start().await;
    let _driver = cluster.driver().await;
    snapshot_kinds(&cluster).await;
    let (address, kubeconfig) = (cluster.csi_address(), cluster.kubeconfig());
    let args = [
        "sidecars",
        &address,
        &kubeconfig,
        "--controllers=provisioner,attacher,resizer,snapshotter,health-monitor,snapshot-controller",
        "--leader-election",
        "--leader-election-namespace=default",
        "--http-endpoint=127.0.0.1:0",
    ];
    let mut sidecars = cluster.berth("sidecars", &args, &[("POD_NAME", "sidecars-0")]);
    let http = sidecars.http().await.unwrap();
    let claim = cluster.claim("data").await;
    let volume = cluster.volume_of(&claim).await;
    bind(&cluster, &volume.name_any()).await;
    let snapshot: VolumeSnapshot = serde_json::from_value(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": "snap"},
        "spec": {"source": {"persistentVolumeClaimName": "data"}, "volumeSnapshotClassName": "local"},
    }))
    .unwrap();
    let snapshots: Api<VolumeSnapshot> = Api::namespaced(cluster.client.clone(), "default");
    snapshots.create(&PostParams::default(), &snapshot).await.unwrap();

    let deadline = std::time::Instant::now() + PATIENCE;
    let created =
        "operation_name=\"CreateSnapshotAndReady\",snapshot_type=\"dynamic\",operation_status=\"success\"";
    let page = loop {
        let (_, page) = get(&http, "/metrics");
        if page.contains(created) {
            break page;
        }
        assert!(std::time::Instant::now() < deadline, "there is no snapshot:\n{page}\n{}", sidecars.log());
        pause().await;
    };
    for name in COMMON.iter().chain(AFTER_WORK) {
        assert!(has(&page, name), "{name} is not in\n{page}");
    }
    for queue in QUEUES {
        let line = format!("workqueue_adds_total{{name=\"{queue}\"}}");
        assert!(page.contains(&line), "{line} is not in\n{page}");
    }
    for lease in ["berth-sidecars-local-berth-dev", "snapshot-controller-leader"] {
        let line = format!("leader_election_master_status{{name=\"{lease}\"}} 1");
        assert!(page.contains(&line), "{line} is not in\n{page}");
    }
    for method in ["Node/NodeGetCapabilities", "Controller/CreateVolume", "Controller/CreateSnapshot"] {
        let method = format!("method_name=\"/csi.v1.{method}\",grpc_status_code=\"OK\"");
        assert!(page.contains(&method), "{method} is not in\n{page}");
    }
    snapshots.delete("snap", &DeleteParams::default()).await.unwrap();
    while !get(&http, "/metrics").1.contains("operation_name=\"DeleteSnapshot\"") {
        assert!(std::time::Instant::now() < deadline, "the deletion is not counted");
        pause().await;
    }
    sidecars.stop().await.unwrap();
}
