//! A volume that the driver will not grow in use, on the embedded API server.

use std::time::Duration;

use berth_csi::{ControllerCapability, PluginService};
use berth_testkit::{Capabilities, EmbeddedServer, FakeDriver, FaultKind, Loops, PATIENCE, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::Code;

use super::*;

const DRIVER: &str = "test.berth.dev";

/// A claim for more than its volume has, a pod that uses it, and a resizer beside a driver that refuses to grow the volume.
struct Stage {
    client: Client,
    driver: Arc<FakeDriver>,
    /// How often pods were listed.
    lists: watch::Receiver<usize>,
    _resizer: Loops,
    _server: EmbeddedServer,
}

impl Stage {
    async fn set(handle_volume_in_use_error: bool) -> Self {
        let server = EmbeddedServer::start().await;
        let lists = watch::Sender::new(0);
        let listed = lists.clone();
        let client = server.observed_client(move |request| {
            if request.method() == "GET" && request.uri().path().ends_with("/pods") {
                listed.send_modify(|lists| *lists += 1);
            }
        });
        objects(&client).await;
        let driver = FakeDriver::new(DRIVER);
        *driver.capabilities.lock() = Capabilities {
            plugin: vec![PluginService::ControllerService],
            controller: vec![ControllerCapability::ExpandVolume.into()],
            ..Capabilities::default()
        };
        driver.fail("ControllerExpandVolume", "", FaultKind::Code(Code::FailedPrecondition), u32::MAX);
        let retry = Backoff { first: Duration::from_millis(1), longest: Duration::from_millis(10) };
        let options = Options { retry, handle_volume_in_use_error, ..Options::default() };
        let connection = Driver::in_process(driver.in_process());
        let resizer = Loops::new(&client).with(|cluster| run(cluster, connection, options));
        Self { client, driver, lists: lists.subscribe(), _resizer: resizer, _server: server }
    }

    /// Lets the driver grow the volume, and deletes the pod that uses it.
    async fn delete_pod(&self) {
        self.driver.lift_faults();
        pods(&self.client).delete("web", &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// Waits until the claim has grown.
    async fn grown(&self) {
        until(&claims(&self.client), "data", |claim: &PersistentVolumeClaim| {
            let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
            capacity.is_some_and(|capacity| capacity["storage"].0 == "2Gi")
        })
        .await;
    }
}

fn pods(client: &Client) -> Api<Pod> {
    Api::namespaced(client.clone(), "default")
}

fn claims(client: &Client) -> Api<PersistentVolumeClaim> {
    Api::namespaced(client.clone(), "default")
}

async fn objects(client: &Client) {
    fn object<K: serde::de::DeserializeOwned>(object: Value) -> K {
        serde_json::from_value(object).unwrap()
    }
    let new = PostParams::default();
    let volume = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }]);
    let pod = object(json!({
        "metadata": { "name": "web" },
        "spec": { "containers": [{ "name": "c", "image": "i" }], "volumes": volume },
    }));
    pods(client).create(&new, &pod).await.unwrap();
    let common = json!({ "accessModes": ["ReadWriteOnce"], "storageClassName": "" });
    let mut spec = common.clone();
    spec["volumeName"] = json!("pv");
    spec["resources"] = json!({ "requests": { "storage": "2Gi" } });
    let claim = object(json!({ "metadata": { "name": "data" }, "spec": spec }));
    let claim = claims(client).create(&new, &claim).await.unwrap();
    let bound = json!({ "status": { "phase": "Bound", "capacity": { "storage": "1Gi" } } });
    claims(client).patch_status("data", &PatchParams::default(), &Patch::Merge(bound)).await.unwrap();
    let mut spec = common;
    spec["capacity"] = json!({ "storage": "1Gi" });
    spec["csi"] = json!({ "driver": DRIVER, "volumeHandle": "h" });
    spec["claimRef"] = json!({ "namespace": "default", "name": "data", "uid": claim.uid() });
    let volume: PersistentVolume = object(json!({ "metadata": { "name": "pv" }, "spec": spec }));
    Api::all(client.clone()).create(&new, &volume).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_is_refused_in_use_is_not_tried_again_while_a_pod_uses_it() {
    let stage = Stage::set(true).await;
    let mut lists = stage.lists.clone();
    tokio::time::timeout(PATIENCE, lists.wait_for(|lists| *lists >= 5)).await.unwrap().unwrap();
    assert_eq!(stage.driver.count("ControllerExpandVolume"), 1);
    stage.delete_pod().await;
    stage.grown().await;
    assert_eq!(stage.driver.count("ControllerExpandVolume"), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_refusals_in_use_are_not_handled_the_volume_is_tried_again_whoever_uses_it() {
    let stage = Stage::set(false).await;
    stage.driver.until_called("ControllerExpandVolume", "", 5).await;
    assert_eq!(*stage.lists.borrow(), 0, "nobody asks who uses it");
    stage.delete_pod().await;
    stage.grown().await;
}
