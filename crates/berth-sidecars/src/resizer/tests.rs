//! A volume that the driver will not grow in use, on the embedded API server.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use berth_csi::v1::controller_server::{Controller, ControllerServer};
use berth_csi::v1::identity_server::{Identity, IdentityServer};
use berth_csi::v1::{self, controller_service_capability, plugin_capability};
use berth_csi::{CallLayer, Metrics};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::codegen::http;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tower::{ServiceExt as _, service_fn};

use super::*;
use crate::driver::Service;

const DRIVER: &str = "test.berth.dev";
const PATIENCE: Duration = Duration::from_secs(60);

/// A driver that grows a volume only while no pod exists.
#[derive(Clone)]
struct Offline {
    pods: Api<Pod>,
    calls: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Identity for Offline {
    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Ok(Response::new(v1::ProbeResponse { ready: None }))
    }

    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        Ok(Response::new(v1::GetPluginInfoResponse { name: DRIVER.to_owned(), ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        let service = plugin_capability::Service { r#type: Service::ControllerService.into() };
        let controller = v1::PluginCapability { r#type: Some(plugin_capability::Type::Service(service)) };
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities: vec![controller] }))
    }
}

#[tonic::async_trait]
impl Controller for Offline {
    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::ControllerGetCapabilitiesResponse>, Status> {
        let rpc = controller_service_capability::Rpc { r#type: ControllerCapability::ExpandVolume.into() };
        let grows =
            v1::ControllerServiceCapability { r#type: Some(controller_service_capability::Type::Rpc(rpc)) };
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities: vec![grows] }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<v1::ControllerExpandVolumeRequest>,
    ) -> Result<Response<v1::ControllerExpandVolumeResponse>, Status> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.pods.get_opt("web").await.unwrap().is_some() {
            return Err(Status::failed_precondition("the volume is in use"));
        }
        let capacity_bytes = request.into_inner().capacity_range.unwrap_or_default().required_bytes;
        let answer = v1::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: false };
        Ok(Response::new(answer))
    }
}

/// A claim for more than its volume has, a pod that uses it, and a resizer.
struct Stage {
    client: Client,
    calls: Arc<AtomicUsize>,
    /// How often pods were listed.
    looks: watch::Receiver<usize>,
    shutdown: CancellationToken,
    _place: tempfile::TempDir,
}

impl Stage {
    async fn set(handle_volume_in_use_error: bool) -> Self {
        let place = tempfile::tempdir().unwrap();
        let (store, _) =
            berth_apiserver::store::Store::open(place.path(), berth_apiserver::store::Options::default())
                .unwrap();
        let api = berth_apiserver::rest::ApiServer::new(store, berth_apiserver::rest::Options::default());
        assert!(api.bootstrap().await.is_ok());
        let (look, looks) = watch::channel(0);
        let service = service_fn(move |request: http::Request<kube::client::Body>| {
            if request.method() == "GET" && request.uri().path().ends_with("/pods") {
                look.send_modify(|looks| *looks += 1);
            }
            let api = api.clone();
            async move { api.oneshot(request).await.map_err(tower::BoxError::from) }
        });
        let client = Client::new(service, "default");
        let calls = Arc::new(AtomicUsize::new(0));
        let stage = Self { client, calls, looks, shutdown: CancellationToken::new(), _place: place };
        stage.objects().await;
        let driver = Offline { pods: stage.pods(), calls: stage.calls.clone() };
        let routes =
            Routes::new(IdentityServer::new(driver.clone())).add_service(ControllerServer::new(driver));
        let layer = CallLayer::new(Metrics::unregistered(DRIVER), None);
        let driver = Driver::in_process(berth_csi::in_process(routes, &layer));
        let retry = Backoff { first: Duration::from_millis(1), longest: Duration::from_millis(10) };
        let options = Options { retry, handle_volume_in_use_error, ..Options::default() };
        let cluster = Cluster::new(stage.client.clone(), stage.shutdown.clone());
        tokio::spawn(run(cluster, driver, options));
        stage
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn objects(&self) {
        fn object<K: serde::de::DeserializeOwned>(object: Value) -> K {
            serde_json::from_value(object).unwrap()
        }
        let new = PostParams::default();
        let volume = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }]);
        let pod = object(json!({
            "metadata": { "name": "web" },
            "spec": { "containers": [{ "name": "c", "image": "i" }], "volumes": volume },
        }));
        self.pods().create(&new, &pod).await.unwrap();
        let common = json!({ "accessModes": ["ReadWriteOnce"], "storageClassName": "" });
        let mut spec = common.clone();
        spec["volumeName"] = json!("pv");
        spec["resources"] = json!({ "requests": { "storage": "2Gi" } });
        let claim = object(json!({ "metadata": { "name": "data" }, "spec": spec }));
        let claim = self.claims().create(&new, &claim).await.unwrap();
        let bound = json!({ "status": { "phase": "Bound", "capacity": { "storage": "1Gi" } } });
        self.claims().patch_status("data", &PatchParams::default(), &Patch::Merge(bound)).await.unwrap();
        let mut spec = common;
        spec["capacity"] = json!({ "storage": "1Gi" });
        spec["csi"] = json!({ "driver": DRIVER, "volumeHandle": "h" });
        spec["claimRef"] = json!({ "namespace": "default", "name": "data", "uid": claim.uid() });
        let volume: PersistentVolume = object(json!({ "metadata": { "name": "pv" }, "spec": spec }));
        Api::all(self.client.clone()).create(&new, &volume).await.unwrap();
    }

    /// Waits until the claim has grown.
    async fn grown(&self) {
        let grown = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            let capacity = status.and_then(|status| status.capacity.as_ref());
            capacity.is_some_and(|capacity| capacity["storage"].0 == "2Gi")
        };
        let waiting = kube::runtime::wait::await_condition(self.claims(), "data", grown);
        tokio::time::timeout(PATIENCE, Box::pin(waiting)).await.unwrap().unwrap();
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_is_refused_in_use_is_not_tried_again_while_a_pod_uses_it() {
    let stage = Stage::set(true).await;
    let mut looks = stage.looks.clone();
    tokio::time::timeout(PATIENCE, looks.wait_for(|looks| *looks >= 5)).await.unwrap().unwrap();
    assert_eq!(stage.calls.load(Ordering::SeqCst), 1);
    let at_once = DeleteParams::default().grace_period(0);
    stage.pods().delete("web", &at_once).await.unwrap();
    stage.grown().await;
    assert_eq!(stage.calls.load(Ordering::SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_refusals_in_use_are_not_handled_the_volume_is_tried_again_whoever_uses_it() {
    let stage = Stage::set(false).await;
    let tried = async {
        while stage.calls.load(Ordering::SeqCst) < 5 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, tried).await.unwrap();
    assert_eq!(*stage.looks.borrow(), 0, "nobody asks who uses it");
    stage.pods().delete("web", &DeleteParams::default().grace_period(0)).await.unwrap();
    stage.grown().await;
}
