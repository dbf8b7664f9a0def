//! `berth sidecars` beside a driver.

use std::time::Instant;

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;

use crate::sidecars::cluster::{Cluster, DRIVER, PATIENCE, get, pause};

/// Says, as the binder would, that nobody claims a volume any more, and waits until the provisioner is done with it.
/// Nobody here takes the protection off that Kubernetes itself puts on volumes.
pub(crate) async fn release(client: &Client, volume: &str) {
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let released = Patch::Merge(json!({"status": {"phase": "Released"}}));
    volumes.patch_status(volume, &PatchParams::default(), &released).await.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while let Some(left) = volumes.get_opt(volume).await.unwrap() {
        let ours = left.finalizers().iter().any(|finalizer| finalizer.starts_with("external-provisioner"));
        if left.metadata.deletion_timestamp.is_some() && !ours {
            return;
        }
        assert!(Instant::now() < deadline, "the volume is not deleted: {left:?}");
        pause().await;
    }
}

#[tokio::test]
async fn a_volume_is_made_for_a_claim_and_deleted_when_it_is_released() {
    let cluster = Cluster::start().await;
    let driver = cluster.driver().await;
    let mut sidecars = cluster.berth(
        "sidecars",
        &["sidecars", &cluster.csi_address(), &cluster.kubeconfig(), "-v=5", "--http-endpoint=127.0.0.1:0"],
        &[],
    );
    let claim = cluster.claim("data").await;
    let volume = cluster.volume_of(&claim).await;
    assert_eq!(volume.annotations()["pv.kubernetes.io/provisioned-by"], DRIVER);
    assert_eq!(cluster.on_disk(), 1);

    let http = sidecars.http().await.unwrap();
    assert_eq!(get(&http, "/healthz").0, 200);
    assert_eq!(get(&http, "/healthz/leader-election").0, 200);
    let (_, metrics) = get(&http, "/metrics");
    let counted = "csi_sidecar_operations_seconds_count{driver_name=\"local.berth.dev\",\
                   method_name=\"/csi.v1.Controller/CreateVolume\",grpc_status_code=\"OK\"} 1";
    assert!(metrics.contains(counted), "{metrics}");

    release(&cluster.client, &volume.name_any()).await;
    assert_eq!(cluster.on_disk(), 0);
    sidecars.stop().await.unwrap();
    driver.stop().await.unwrap();
}

#[tokio::test]
async fn a_driver_that_comes_late_and_restarts_is_waited_for() {
    let cluster = Cluster::start().await;
    let args = ["sidecars", &cluster.csi_address(), &cluster.kubeconfig(), "--controllers=provisioner"];
    let mut sidecars = cluster.berth("sidecars", &args, &[]);
    sidecars.says("the CSI driver is not ready").await.unwrap();
    let mut driver = cluster.driver().await;
    cluster.volume_of(&cluster.claim("first").await).await;
    assert!(!sidecars.log().contains("csi-attacher"), "it was not asked for");
    driver.kill().unwrap();
    let second = cluster.claim("second").await;
    let _driver = cluster.driver().await;
    cluster.volume_of(&second).await;
}
