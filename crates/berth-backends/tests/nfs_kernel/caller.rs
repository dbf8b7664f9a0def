//! Who calls a driver over its socket, as a cluster does, each call with a deadline.

use std::{path::Path, time::Duration};

use berth_csi::{
    Endpoint,
    v1::{self, controller_client::ControllerClient, node_client::NodeClient},
};
use tonic::{Request, Status, transport::Channel};

use super::kernel::{class, share};

/// Calls about volumes on the kernel's server, by their names.
pub(crate) struct Caller {
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    version: String,
    deadline: Duration,
}

fn capability() -> v1::VolumeCapability {
    v1::VolumeCapability {
        access_type: Some(v1::volume_capability::AccessType::Mount(
            v1::volume_capability::MountVolume::default(),
        )),
        access_mode: Some(v1::volume_capability::AccessMode {
            mode: v1::volume_capability::access_mode::Mode::MultiNodeMultiWriter.into(),
        }),
    }
}

impl Caller {
    pub(crate) fn new(socket: &Path, version: &str, deadline: Duration) -> Self {
        let channel = berth_csi::connect(&Endpoint::Unix(socket.to_owned()));
        let (controller, node) = (ControllerClient::new(channel.clone()), NodeClient::new(channel));
        Self { controller, node, version: version.to_owned(), deadline }
    }

    fn id(&self, name: &str) -> String {
        format!("127.0.0.1#{}#{name}##", share(&self.version).trim_matches('/'))
    }

    fn bounded<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline);
        request
    }

    pub(crate) async fn create(&self, name: &str) -> Result<(), Status> {
        let request = v1::CreateVolumeRequest {
            name: name.to_owned(),
            volume_capabilities: vec![capability()],
            parameters: class(&self.version, &[]),
            ..Default::default()
        };
        self.controller.clone().create_volume(self.bounded(request)).await.map(drop)
    }

    pub(crate) async fn delete(&self, name: &str) -> Result<(), Status> {
        let request = v1::DeleteVolumeRequest { volume_id: self.id(name), ..Default::default() };
        self.controller.clone().delete_volume(self.bounded(request)).await.map(drop)
    }

    pub(crate) async fn publish(&self, name: &str, target: &Path) -> Result<(), Status> {
        let mut context = class(&self.version, &[]);
        context.insert("subdir".to_owned(), name.to_owned());
        let request = v1::NodePublishVolumeRequest {
            volume_id: self.id(name),
            target_path: target.display().to_string(),
            volume_capability: Some(capability()),
            volume_context: context,
            ..Default::default()
        };
        self.node.clone().node_publish_volume(self.bounded(request)).await.map(drop)
    }

    pub(crate) async fn unpublish(&self, name: &str, target: &Path) -> Result<(), Status> {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: self.id(name),
            target_path: target.display().to_string(),
        };
        self.node.clone().node_unpublish_volume(self.bounded(request)).await.map(drop)
    }

    pub(crate) async fn stats(&self, name: &str, target: &Path) -> Result<Vec<v1::VolumeUsage>, Status> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: self.id(name),
            volume_path: target.display().to_string(),
            ..Default::default()
        };
        Ok(self.node.clone().node_get_volume_stats(self.bounded(request)).await?.into_inner().usage)
    }

    /// The reasons why a volume is not well.
    pub(crate) async fn health(&self, name: &str) -> Result<Vec<String>, Status> {
        let request = v1::NodeGetVolumeHealthRequest { volume_id: self.id(name), ..Default::default() };
        let answer = self.node.clone().node_get_volume_health(self.bounded(request)).await?.into_inner();
        let statuses = answer.volume_health.unwrap_or_default().health_statuses;
        Ok(statuses.into_iter().map(|status| status.reason).collect())
    }
}
