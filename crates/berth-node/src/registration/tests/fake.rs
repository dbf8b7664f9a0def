//! A driver that does what it is told: answers any code, hangs, comes back, has any capability.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use berth_csi::registration::registration_server::{Registration, RegistrationServer};
use berth_csi::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use berth_csi::v1::node_server::{Node, NodeServer};
use berth_csi::v1::node_service_capability::{Rpc, Type, rpc};
use berth_csi::v1::*;
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

/// How a method answers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    Fail(Code),
    Hang,
}

/// What was asked of the driver.
#[derive(Debug, Clone)]
pub(crate) enum Call {
    Stage(NodeStageVolumeRequest),
    Unstage(NodeUnstageVolumeRequest),
    Publish(NodePublishVolumeRequest),
    Unpublish(NodeUnpublishVolumeRequest),
    Expand(NodeExpandVolumeRequest),
}

pub(crate) struct Script {
    pub(crate) answers: HashMap<&'static str, Answer>,
    pub(crate) calls: Vec<Call>,
    pub(crate) capabilities: Vec<rpc::Type>,
    pub(crate) info: NodeGetInfoResponse,
}

/// The driver's two services, on sockets of their own while it runs.
pub(crate) struct Fake {
    pub(crate) name: String,
    endpoint: PathBuf,
    script: Arc<Mutex<Script>>,
    versions: Vec<String>,
    /// What the node said of its registrations so far.
    pub(crate) statuses: watch::Sender<Vec<RegistrationStatus>>,
    running: Mutex<Option<(CancellationToken, Vec<JoinHandle<()>>)>>,
}

#[derive(Clone)]
struct Service(Arc<Mutex<Script>>);

struct Introduction {
    info: PluginInfo,
    statuses: watch::Sender<Vec<RegistrationStatus>>,
}

impl Fake {
    pub(crate) fn new(name: &str, directory: &Path, capabilities: &[rpc::Type]) -> Arc<Self> {
        Self::speaking(name, directory, capabilities, &["1.0.0"])
    }

    pub(crate) fn speaking(
        name: &str,
        directory: &Path,
        capabilities: &[rpc::Type],
        versions: &[&str],
    ) -> Arc<Self> {
        let script = Script {
            answers: HashMap::new(),
            calls: Vec::new(),
            capabilities: capabilities.to_vec(),
            info: NodeGetInfoResponse { node_id: format!("{name}-node"), ..NodeGetInfoResponse::default() },
        };
        Arc::new(Self {
            name: name.to_owned(),
            endpoint: directory.join(format!("{name}.csi.sock")),
            script: Arc::new(Mutex::new(script)),
            versions: versions.iter().map(ToString::to_string).collect(),
            statuses: watch::channel(Vec::new()).0,
            running: Mutex::default(),
        })
    }

    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }

    pub(crate) fn answer(&self, method: &'static str, answer: Option<Answer>) {
        let mut script = self.script();
        match answer {
            Some(answer) => script.answers.insert(method, answer),
            None => script.answers.remove(method),
        };
    }

    /// The calls since the last time.
    pub(crate) fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.script().calls)
    }

    /// Serves the driver, and announces it in `registry` under the name of a socket.
    pub(crate) async fn start(&self, registry: &Path, socket: &str) {
        self.start_as(Routes::new(NodeServer::new(Service(self.script.clone()))), registry, socket).await;
    }

    /// The same with services of another driver behind the socket.
    pub(crate) async fn start_as(&self, csi: Routes, registry: &Path, socket: &str) {
        let shutdown = CancellationToken::new();
        let info = PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: self.name.clone(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: self.versions.clone(),
        };
        let introduction = Introduction { info, statuses: self.statuses.clone() };
        let tasks = vec![
            serve(self.endpoint.clone(), csi, shutdown.clone()).await,
            serve(
                registry.join(socket),
                Routes::new(RegistrationServer::new(introduction)),
                shutdown.clone(),
            )
            .await,
        ];
        *self.running.lock() = Some((shutdown, tasks));
    }

    /// Ends both, as a driver that exits does.
    pub(crate) async fn stop(&self) {
        let running = self.running.lock().take();
        if let Some((shutdown, tasks)) = running {
            shutdown.cancel();
            for task in tasks {
                task.abort();
                let _ = task.await;
            }
        }
    }
}

async fn serve(path: PathBuf, routes: Routes, shutdown: CancellationToken) -> JoinHandle<()> {
    let listener = Listener::bind(&Endpoint::Unix(path)).await.unwrap();
    tokio::spawn(async move {
        let layer = CallLayer::new(Metrics::unregistered("fake"), None);
        berth_csi::serve(listener, routes, layer, shutdown.cancelled_owned()).await.unwrap();
    })
}

#[tonic::async_trait]
impl Registration for Introduction {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.statuses.send_modify(|statuses| statuses.push(request.into_inner()));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

impl Service {
    async fn take(&self, method: &'static str, call: Option<Call>) -> Result<(), Status> {
        let answer = {
            let mut script = self.0.lock();
            script.calls.extend(call);
            script.answers.get(method).copied()
        };
        match answer {
            None => Ok(()),
            Some(Answer::Fail(code)) => Err(Status::new(code, format!("{method} was told to fail"))),
            Some(Answer::Hang) => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        self.take("NodeGetInfo", None).await?;
        Ok(Response::new(self.0.lock().info.clone()))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let known = self.0.lock().capabilities.clone();
        let capabilities = known
            .into_iter()
            .map(|known| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: known.into() })) });
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        self.take("NodeStage", Some(Call::Stage(request.into_inner()))).await?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        self.take("NodeUnstage", Some(Call::Unstage(request.into_inner()))).await?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let target = request.target_path.clone();
        self.take("NodePublish", Some(Call::Publish(request))).await?;
        std::fs::create_dir_all(target)?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        self.take("NodeUnpublish", Some(Call::Unpublish(request.into_inner()))).await?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        self.take("NodeExpand", Some(Call::Expand(request.into_inner()))).await?;
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes: 0 }))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        self.take("NodeGetVolumeStats", None).await?;
        let usage = [(volume_usage::Unit::Bytes, 10), (volume_usage::Unit::Inodes, 20)]
            .map(|(unit, total)| VolumeUsage { total, used: 3, available: total - 3, unit: unit.into() });
        Ok(Response::new(NodeGetVolumeStatsResponse { usage: usage.into() }))
    }
}

/// A topology of one key.
pub(crate) fn topology(key: &str, value: &str) -> Topology {
    Topology { segments: BTreeMap::from([(key.to_owned(), value.to_owned())]) }
}
