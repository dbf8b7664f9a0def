//! Calls with a deadline, by a volume's name alone: what its id and context are follows from its class.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use berth_csi::v1::{self, controller_client::ControllerClient, node_client::NodeClient};
use tonic::{Code, Request, Status, transport::Channel};

use crate::world::Server;

/// How much later than at its deadline an answer may come, on a machine with much to do.
const SLACK: Duration = Duration::from_secs(2);
/// How long what is repeated may take to succeed.
const PATIENCE: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_millis(50);

/// What is called for a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Create,
    Get,
    Expand,
    Snapshot,
    DeleteSnapshot,
    Publish,
    Stats,
    Health,
    Unpublish,
    Delete,
}

/// A call about the volume of a name.
pub(crate) type Call = (Kind, &'static str);

/// How a call ended; what it told, where that matters: reasons of a health, `ready` of a snapshot.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) call: Call,
    pub(crate) took: Duration,
    pub(crate) result: Result<Vec<String>, Status>,
}

/// Volumes on one share, and where they are published.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    pub(crate) parameters: BTreeMap<String, String>,
    targets: PathBuf,
}

/// Makes calls of one driver.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
}

impl Share {
    /// The share of a server under one of its addresses, and through another port if that is given.
    pub(crate) fn of(server: &Server, address: &str, port: Option<u16>) -> Self {
        let mut parameters: BTreeMap<String, String> =
            server.parameters().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        parameters.insert("server".to_owned(), address.to_owned());
        if let Some(port) = port {
            parameters.insert("mountOptions".to_owned(), format!("vers=4.1,port={port}"));
        }
        Self { parameters, targets: server.dir().join("pods") }
    }

    pub(crate) fn id(&self, name: &str) -> String {
        let share = self.parameters["share"].trim_matches('/');
        format!("{}#{share}#{name}##", self.parameters["server"])
    }

    pub(crate) fn snapshot_id(&self, name: &str) -> String {
        let share = self.parameters["share"].trim_matches('/');
        format!("{}#{share}#snap-{name}#snap-{name}#{name}", self.parameters["server"])
    }

    pub(crate) fn context(&self, name: &str) -> BTreeMap<String, String> {
        let mut context = self.parameters.clone();
        context.insert("subdir".to_owned(), name.to_owned());
        context
    }

    pub(crate) fn target(&self, name: &str) -> PathBuf {
        self.targets.join(name)
    }
}

pub(crate) fn capability() -> v1::VolumeCapability {
    v1::VolumeCapability {
        access_type: Some(v1::volume_capability::AccessType::Mount(
            v1::volume_capability::MountVolume::default(),
        )),
        access_mode: Some(v1::volume_capability::AccessMode {
            mode: v1::volume_capability::access_mode::Mode::MultiNodeMultiWriter.into(),
        }),
    }
}

fn bounded<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

impl Caller {
    pub(crate) fn new(endpoint: &str) -> Result<Self> {
        let endpoint: berth_csi::Endpoint = endpoint.parse().context("parse the endpoint")?;
        let channel = berth_csi::connect(&endpoint);
        Ok(Self { controller: ControllerClient::new(channel.clone()), node: NodeClient::new(channel) })
    }

    /// Makes a call; one that outlives its deadline is a panic.
    pub(crate) async fn make(&self, share: &Share, call: Call, deadline: Duration) -> Outcome {
        let begun = Instant::now();
        let (kind, name) = call;
        let answer = async {
            match kind {
                Kind::Publish | Kind::Stats | Kind::Health | Kind::Unpublish => {
                    self.ask_node(share, kind, name, deadline).await
                }
                _ => self.ask_controller(share, kind, name, deadline).await,
            }
        };
        let result = tokio::time::timeout(deadline + SLACK, answer).await;
        let result = result.unwrap_or_else(|_| panic!("{call:?} outlives its deadline"));
        // The client's own clock is sometimes the first.
        let result = result.map_err(|status| match status.code() {
            Code::Cancelled => Status::deadline_exceeded(status.message()),
            _ => status,
        });
        Outcome { call, took: begun.elapsed(), result }
    }

    async fn ask_controller(
        &self,
        share: &Share,
        kind: Kind,
        name: &str,
        deadline: Duration,
    ) -> Result<Vec<String>, Status> {
        let mut controller = self.controller.clone();
        let volume_id = share.id(name);
        match kind {
            Kind::Create => {
                let message = v1::CreateVolumeRequest {
                    name: name.to_owned(),
                    volume_capabilities: vec![capability()],
                    parameters: share.parameters.clone(),
                    ..Default::default()
                };
                controller.create_volume(bounded(message, deadline)).await.map(|_| Vec::new())
            }
            Kind::Expand => {
                let message = v1::ControllerExpandVolumeRequest {
                    volume_id,
                    capacity_range: Some(v1::CapacityRange { required_bytes: 1 << 30, limit_bytes: 0 }),
                    ..Default::default()
                };
                controller.controller_expand_volume(bounded(message, deadline)).await.map(|_| Vec::new())
            }
            Kind::Snapshot => {
                let message = v1::CreateSnapshotRequest {
                    source_volume_id: volume_id,
                    name: format!("snap-{name}"),
                    ..Default::default()
                };
                let answer = controller.create_snapshot(bounded(message, deadline)).await?.into_inner();
                let ready = answer.snapshot.is_some_and(|snapshot| snapshot.ready_to_use);
                Ok(if ready { vec!["ready".to_owned()] } else { Vec::new() })
            }
            Kind::DeleteSnapshot => {
                let message =
                    v1::DeleteSnapshotRequest { snapshot_id: share.snapshot_id(name), ..Default::default() };
                controller.delete_snapshot(bounded(message, deadline)).await.map(|_| Vec::new())
            }
            Kind::Get => {
                let message = v1::ControllerGetVolumeRequest { volume_id };
                controller.controller_get_volume(bounded(message, deadline)).await.map(|_| Vec::new())
            }
            _ => {
                let message = v1::DeleteVolumeRequest { volume_id, ..Default::default() };
                controller.delete_volume(bounded(message, deadline)).await.map(|_| Vec::new())
            }
        }
    }

    async fn ask_node(
        &self,
        share: &Share,
        kind: Kind,
        name: &str,
        deadline: Duration,
    ) -> Result<Vec<String>, Status> {
        let mut node = self.node.clone();
        let (volume_id, target_path) = (share.id(name), share.target(name).display().to_string());
        match kind {
            Kind::Publish => {
                let message = v1::NodePublishVolumeRequest {
                    volume_id,
                    target_path,
                    volume_capability: Some(capability()),
                    volume_context: share.context(name),
                    ..Default::default()
                };
                node.node_publish_volume(bounded(message, deadline)).await.map(|_| Vec::new())
            }
            Kind::Stats => {
                let message = v1::NodeGetVolumeStatsRequest {
                    volume_id,
                    volume_path: target_path,
                    ..Default::default()
                };
                node.node_get_volume_stats(bounded(message, deadline)).await.map(|_| Vec::new())
            }
            Kind::Health => {
                let message = v1::NodeGetVolumeHealthRequest { volume_id, ..Default::default() };
                let answer = node.node_get_volume_health(bounded(message, deadline)).await?.into_inner();
                let statuses = answer.volume_health.unwrap_or_default().health_statuses;
                Ok(statuses.into_iter().map(|status| status.reason).collect())
            }
            _ => {
                let message = v1::NodeUnpublishVolumeRequest { volume_id, target_path };
                node.node_unpublish_volume(bounded(message, deadline)).await.map(|_| Vec::new())
            }
        }
    }

    /// Repeats a call as an orchestrator does until it succeeds, a snapshot until it is ready.
    pub(crate) async fn until_done(&self, share: &Share, call: Call) {
        let begun = Instant::now();
        loop {
            let outcome = self.make(share, call, Duration::from_secs(20)).await;
            match &outcome.result {
                Ok(told) if call.0 != Kind::Snapshot || told.iter().any(|word| word == "ready") => return,
                Ok(_) => {}
                Err(status) => assert!(
                    matches!(status.code(), Code::Aborted | Code::Unavailable | Code::DeadlineExceeded),
                    "{call:?} does not come right: {status:?}"
                ),
            }
            assert!(begun.elapsed() < PATIENCE, "{call:?} does not succeed: {:?}", outcome.result);
            tokio::time::sleep(PAUSE).await;
        }
    }
}
