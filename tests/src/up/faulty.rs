//! A driver that does what it is told: works, answers any code, or never answers.
//!
//! It runs in the test's own process on sockets of its own, and is introduced to a machine as any driver is: by a socket
//! in its registration directory.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Result;
use berth_csi::{
    CallLayer, Endpoint, Listener, Metrics,
    registration::{
        CSI_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
    v1::{
        NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse,
        NodePublishVolumeRequest, NodePublishVolumeResponse, NodeUnpublishVolumeRequest,
        NodeUnpublishVolumeResponse,
        node_server::{Node, NodeServer},
    },
};
use parking_lot::{Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tonic::{Code, Request, Response, Status, service::Routes};

/// What a driver does with NodePublishVolume.
#[derive(Debug, Clone, Copy)]
pub enum Mood {
    /// The call does what it should.
    Works,
    /// The call fails with this code.
    Fails(Code),
    /// The call is never answered.
    Hangs,
}

/// A driver without staging or attaching, running.
#[derive(Debug)]
pub struct Faulty {
    state: Arc<Mutex<State>>,
    servers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    /// By volume; it works for all others.
    moods: HashMap<String, Mood>,
    asked: Vec<String>,
    told: Vec<RegistrationStatus>,
}

#[derive(Debug, Clone)]
struct Service {
    info: PluginInfo,
    state: Arc<Mutex<State>>,
}

impl Faulty {
    /// Serves the driver, and introduces it to the machine with this data directory by a socket of this name.
    pub async fn start(name: &str, dir: &Path, data: &Path, socket: &str) -> Result<Self> {
        let endpoint = dir.join(format!("{socket}.csi"));
        let registration = data.join("node/plugins_registry").join(socket);
        let state =
            Arc::new(Mutex::new(State { moods: HashMap::new(), asked: Vec::new(), told: Vec::new() }));
        let info = PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: name.to_owned(),
            endpoint: endpoint.display().to_string(),
            supported_versions: vec!["1.0.0".to_owned()],
        };
        let service = Service { info, state: state.clone() };
        let node = serve(endpoint, Routes::new(NodeServer::new(service.clone()))).await?;
        let introduction = serve(registration, Routes::new(RegistrationServer::new(service))).await?;
        Ok(Self { state, servers: vec![node, introduction] })
    }

    /// Changes how it answers for one volume.
    pub fn be(&self, mood: Mood, volume: &str) {
        self.state().moods.insert(volume.to_owned(), mood);
    }

    /// Whether NodePublishVolume was called for this volume.
    pub fn was_asked(&self, volume: &str) -> bool {
        self.state().asked.iter().any(|asked| asked == volume)
    }

    /// What the machine said of its registration.
    pub fn statuses(&self) -> Vec<RegistrationStatus> {
        self.state().told.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Drop for Faulty {
    /// Ends as a driver that crashes does: its sockets stay, and nobody answers there.
    fn drop(&mut self) {
        for server in &self.servers {
            server.abort();
        }
    }
}

async fn serve(path: PathBuf, routes: Routes) -> Result<JoinHandle<()>> {
    let listener = Listener::bind(&Endpoint::Unix(path)).await?;
    Ok(tokio::spawn(async move {
        let layer = CallLayer::new(Metrics::unregistered("faulty"), None);
        let _ = berth_csi::serve(listener, routes, layer, std::future::pending()).await;
    }))
}

impl Service {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.state().told.push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse { node_id: "faulty".to_owned(), ..Default::default() }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        Ok(Response::new(NodeGetCapabilitiesResponse::default()))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let mood = {
            let mut state = self.state();
            let mood = state.moods.get(&request.volume_id).copied().unwrap_or(Mood::Works);
            state.asked.push(request.volume_id);
            mood
        };
        match mood {
            Mood::Works => {
                std::fs::create_dir_all(request.target_path)?;
                Ok(Response::new(NodePublishVolumeResponse {}))
            }
            Mood::Fails(code) => Err(Status::new(code, "the disk is on strike")),
            Mood::Hangs => std::future::pending().await,
        }
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        match std::fs::remove_dir_all(request.into_inner().target_path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(Response::new(NodeUnpublishVolumeResponse {})),
        }
    }
}
