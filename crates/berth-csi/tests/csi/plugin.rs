//! A plugin whose calls do what their names say, and a server for it.

use std::sync::Arc;
use std::time::Duration;

use berth_csi::v1::controller_server::{Controller, ControllerServer};
use berth_csi::v1::identity_server::{Identity, IdentityServer};
use berth_csi::v1::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use berth_csi::v1::{
    CreateVolumeRequest, CreateVolumeResponse, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
    ProbeRequest, ProbeResponse, Volume,
};
use berth_csi::{CallLayer, Endpoint, Listener, Metrics, connect, serve};
use prometheus_client::registry::Registry;
use tempfile::TempDir;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::{StreamExt, iter, pending};
use tonic::codegen::BoxStream;
use tonic::service::Routes;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

type Answer<T> = Result<Response<T>, Status>;
type Blocks = BoxStream<GetMetadataAllocatedResponse>;

/// Longer than anything here takes; a test that waits this long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The plugin; its clones share what slow calls report and wait for.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    /// One permit for each slow call that began.
    pub(crate) began: Arc<Semaphore>,
    /// A slow call takes one permit and ends.
    pub(crate) gate: Arc<Semaphore>,
    /// One permit for each slow call that came to its end.
    pub(crate) done: Arc<Semaphore>,
}

impl Plugin {
    pub(crate) fn new() -> Self {
        let none = || Arc::new(Semaphore::new(0));
        Self { began: none(), gate: none(), done: none() }
    }

    pub(crate) fn routes(&self) -> Routes {
        Routes::new(IdentityServer::new(self.clone()))
            .add_service(ControllerServer::new(self.clone()))
            .add_service(SnapshotMetadataServer::new(self.clone()))
    }
}

/// Waits for `count` permits.
pub(crate) async fn take(semaphore: &Semaphore, count: u32) {
    let acquired = tokio::time::timeout(PATIENCE, semaphore.acquire_many(count)).await;
    acquired.expect("the calls got this far").expect("the semaphore is never closed").forget();
}

#[tonic::async_trait]
impl Identity for Plugin {
    async fn probe(&self, _: Request<ProbeRequest>) -> Answer<ProbeResponse> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}

#[tonic::async_trait]
impl Controller for Plugin {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Answer<CreateVolumeResponse> {
        let request = request.into_inner();
        match request.name.as_str() {
            "missing" => return Err(Status::not_found("the source is not there: über")),
            "broken" => return Err(Status::internal("the disk is broken")),
            "panics" => panic!("the handler was told to panic"),
            "slow" => {
                self.began.add_permits(1);
                self.gate.acquire().await.expect("the semaphore is never closed").forget();
                self.done.add_permits(1);
            }
            _ => {}
        }
        let volume =
            Volume { volume_id: request.name, volume_context: request.parameters, ..Default::default() };
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Plugin {
    async fn get_metadata_allocated(&self, request: Request<GetMetadataAllocatedRequest>) -> Answer<Blocks> {
        let block =
            |bytes| Ok(GetMetadataAllocatedResponse { volume_capacity_bytes: bytes, ..Default::default() });
        let two = iter([block(1), block(2)]);
        match request.into_inner().snapshot_id.as_str() {
            "missing" => Err(Status::not_found("no such snapshot")),
            "breaks" => {
                Ok(Response::new(Box::pin(two.chain(iter([Err(Status::data_loss("a block is gone"))])))))
            }
            "endless" => Ok(Response::new(Box::pin(two.chain(pending())))),
            _ => Ok(Response::new(Box::pin(two))),
        }
    }
}

/// A layer and the registry its metrics are in.
pub(crate) fn layer(max_duration: Option<Duration>) -> (CallLayer, Registry) {
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry, "test.berth");
    (CallLayer::new(metrics, max_duration), registry)
}

/// The registry as Prometheus reads it.
pub(crate) fn scraped(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    text
}

/// The plugin behind a real socket.
pub(crate) struct Served {
    pub(crate) plugin: Plugin,
    pub(crate) endpoint: Endpoint,
    pub(crate) layer: CallLayer,
    pub(crate) registry: Registry,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
    _directory: TempDir,
}

impl Served {
    pub(crate) async fn on_a_socket(max_duration: Option<Duration>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::Unix(directory.path().join("csi.sock"));
        Self::at(&endpoint, directory, max_duration).await
    }

    pub(crate) async fn at(endpoint: &Endpoint, directory: TempDir, max_duration: Option<Duration>) -> Self {
        let listener = Listener::bind(endpoint).await.unwrap();
        let endpoint = listener.endpoint().clone();
        let plugin = Plugin::new();
        let (layer, registry) = layer(max_duration);
        let (stop, stopped) = oneshot::channel();
        let shutdown = async { stopped.await.expect("the test stops the server") };
        let serving = serve(listener, plugin.routes(), layer.clone(), shutdown);
        let server = tokio::spawn(async { serving.await.unwrap() });
        Self { plugin, endpoint, layer, registry, stop, server, _directory: directory }
    }

    pub(crate) fn channel(&self) -> Channel {
        connect(&self.endpoint)
    }

    /// Tells the server to stop, and hands out the task that ends when it has.
    pub(crate) fn stop(self) -> JoinHandle<()> {
        self.stop.send(()).unwrap();
        self.server
    }
}

pub(crate) fn create(name: &str) -> CreateVolumeRequest {
    CreateVolumeRequest { name: name.to_owned(), ..Default::default() }
}
