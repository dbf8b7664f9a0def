//! The Node service: each call in a few lines, what it takes in the modules below.

mod expand;
mod inline;
mod publish;
mod recovery;
mod stage;

use std::{collections::BTreeMap, path::Path};

use berth_core::VolumeId;
use berth_csi::v1::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetStorageHealthRequest,
    NodeGetStorageHealthResponse, NodeGetVolumeHealthRequest, NodeGetVolumeHealthResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest,
    NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest, NodeStageVolumeResponse,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse,
    node_server::Node,
    node_service_capability::{Rpc, Type},
};
use tonic::{Request, Response, Status};

use super::{Driver, Reply, answer};
use crate::{
    Feature,
    backend::{Error, Volume},
    call::node::{NodeExpand, NodeHealth, Publish, Stage, Stats, Unpublish, Unstage},
    ledger::Phase,
};

#[tonic::async_trait]
impl Node for Driver {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Reply<NodeStageVolumeResponse> {
        self.need(Feature::Stage)?;
        let call = Stage::try_from(request.into_inner())?;
        self.ensure_staged(call).await?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Reply<NodeUnstageVolumeResponse> {
        self.need(Feature::Stage)?;
        let call = Unstage::try_from(request.into_inner())?;
        self.ensure_unstaged(&call).await?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Reply<NodePublishVolumeResponse> {
        let call = Publish::try_from(request.into_inner())?;
        self.ensure_published(call).await?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Reply<NodeUnpublishVolumeResponse> {
        let call = Unpublish::try_from(request.into_inner())?;
        self.ensure_unpublished(call).await?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Reply<NodeGetVolumeStatsResponse> {
        self.need(Feature::Stats)?;
        let call = Stats::try_from(request.into_inner())?;
        let volume = self.known_here(&self.volume_at(&call.id, &call.path)?).await?;
        let usage = answer::usage(&self.backend.usage(&volume, &call.path).await?);
        Ok(Response::new(NodeGetVolumeStatsResponse { usage }))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Reply<NodeGetVolumeHealthResponse> {
        self.need(Feature::Health)?;
        let call = NodeHealth::try_from(request.into_inner())?;
        let volume = self.known_here(&self.ledger.backend_id(&call.id)).await?;
        let staging = self.ledger.staged(&volume.id).map(|staged| staged.path);
        let published = self.ledger.published(&volume.id).into_iter();
        let mounted = published.filter(|published| published.phase == Phase::Mounted);
        let targets: Vec<_> = mounted.map(|published| published.target).collect();
        let conditions = self.backend.node_health(&volume, staging.as_deref(), &targets).await?;
        let volume_health = Some(answer::volume_health(&call.id, conditions));
        Ok(Response::new(NodeGetVolumeHealthResponse { volume_health }))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Reply<NodeGetStorageHealthResponse> {
        self.need(Feature::Health)?;
        Ok(Response::new(answer::storage_health(self.backend.storage_health().await?)))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Reply<NodeExpandVolumeResponse> {
        self.need(Feature::NodeExpand)?;
        let call = NodeExpand::try_from(request.into_inner())?;
        let id = self.volume_at(&call.id, &call.path)?;
        let capacity_bytes = self.ensure_grown(&id, &call).await?.as_i64();
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Reply<NodeGetCapabilitiesResponse> {
        let capabilities = self
            .features
            .node()
            .into_iter()
            .map(|rpc| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })) });
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Reply<NodeGetInfoResponse> {
        let node = self.backend.node();
        let topology = node.topology.as_ref().filter(|_| self.features.has(Feature::Topology));
        Ok(Response::new(NodeGetInfoResponse {
            node_id: node.id.to_string(),
            max_volumes_per_node: node.max_volumes.map_or(0, i64::from),
            accessible_topology: topology.map(answer::place),
        }))
    }
}

impl Driver {
    /// A volume that was staged or published here, of which the call says no more than its id.
    async fn known_here(&self, id: &VolumeId) -> crate::backend::Result<Volume> {
        let known = self.backend.volume_on_node(id, &BTreeMap::new()).await?;
        known.ok_or_else(|| Error::no_volume(id))
    }

    /// The backend's id of the volume that is staged or published at `path` and that the caller calls `id`.
    fn volume_at(&self, id: &VolumeId, path: &Path) -> Result<VolumeId, Status> {
        let published = self.ledger.published_at(path).filter(|published| published.is(id));
        if let Some(published) = published.filter(|published| published.phase == Phase::Mounted) {
            return Ok(published.volume);
        }
        let volume = self.ledger.backend_id(id);
        let staged = self.ledger.staged(&volume).filter(|staged| staged.phase == Phase::Mounted);
        if staged.is_some_and(|staged| staged.path == path) {
            return Ok(volume);
        }
        Err(Status::not_found(format!("volume {id:?} is not staged or published at {}", path.display())))
    }
}
