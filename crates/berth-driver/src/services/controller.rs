//! The Controller service: each call in a few lines, what it takes in `volumes` and `snapshots`.

mod snapshots;
mod volumes;

use berth_csi::v1::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeHealthRequest, ControllerGetVolumeHealthResponse,
    ControllerGetVolumeRequest, ControllerGetVolumeResponse, ControllerListVolumeHealthRequest,
    ControllerListVolumeHealthResponse, ControllerModifyVolumeRequest, ControllerModifyVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerServiceCapability,
    ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse, CreateSnapshotRequest,
    CreateSnapshotResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteSnapshotRequest,
    DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse, GetCapacityRequest,
    GetCapacityResponse, GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, ValidateVolumeCapabilitiesRequest,
    ValidateVolumeCapabilitiesResponse, controller_get_volume_response,
    controller_server::Controller,
    controller_service_capability::{Rpc, Type},
    list_snapshots_response, list_volumes_response,
};
use tonic::{Request, Response};

use super::{Driver, Reply, answer};
use crate::{
    Feature,
    backend::Secrets,
    call::{
        Listing,
        snapshots::{CreateSnapshot, ListSnapshots, OneSnapshot},
        volumes::{Attach, CreateVolume, Detach, Expand, Modify, OneVolume, Room, Validate},
    },
};

#[tonic::async_trait]
impl Controller for Driver {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Reply<CreateVolumeResponse> {
        self.need(Feature::Volumes)?;
        let call = CreateVolume::try_from(request.into_inner())?;
        let volume = answer::volume(self.ensure_volume(call).await?, self.features);
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Reply<DeleteVolumeResponse> {
        self.need(Feature::Volumes)?;
        let request = request.into_inner();
        let secrets = Secrets::from(request.secrets.clone());
        let call = OneVolume::try_from(request)?;
        self.ensure_no_volume(&call.id, &secrets).await?;
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Reply<ControllerPublishVolumeResponse> {
        self.need(Feature::Attach)?;
        let call = Attach::try_from(request.into_inner())?;
        let publish_context = self.ensure_attached(call).await?;
        Ok(Response::new(ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Reply<ControllerUnpublishVolumeResponse> {
        self.need(Feature::Attach)?;
        let call = Detach::try_from(request.into_inner())?;
        self.ensure_detached(call).await?;
        Ok(Response::new(ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Reply<ValidateVolumeCapabilitiesResponse> {
        let call = Validate::try_from(request.into_inner())?;
        let response = match self.objection(&call).await? {
            None => call.confirmed(),
            Some(message) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
        };
        Ok(Response::new(response))
    }

    async fn list_volumes(&self, request: Request<ListVolumesRequest>) -> Reply<ListVolumesResponse> {
        self.need(Feature::ListVolumes)?;
        let call = Listing::try_from(request.into_inner())?;
        let page = self.gather(call, |page| self.backend.list_volumes(page)).await?;
        let entries = page.entries.into_iter().map(|volume| list_volumes_response::Entry {
            status: Some(list_volumes_response::VolumeStatus { published_node_ids: answer::nodes(&volume) }),
            volume: Some(answer::volume(volume, self.features)),
        });
        let response =
            ListVolumesResponse { entries: entries.collect(), next_token: page.next.unwrap_or_default() };
        Ok(Response::new(response))
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<ControllerListVolumeHealthRequest>,
    ) -> Reply<ControllerListVolumeHealthResponse> {
        self.need(Feature::Health)?;
        let call = Listing::try_from(request.into_inner())?;
        let page = self.gather(call, |page| self.backend.list_unhealthy(page)).await?;
        let entries = page.entries.into_iter().map(|(id, conditions)| answer::volume_health(&id, conditions));
        Ok(Response::new(ControllerListVolumeHealthResponse {
            entries: entries.collect(),
            next_token: page.next.unwrap_or_default(),
        }))
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<ControllerGetVolumeHealthRequest>,
    ) -> Reply<ControllerGetVolumeHealthResponse> {
        self.need(Feature::Health)?;
        let call = OneVolume::try_from(request.into_inner())?;
        // Not by way of `volume`, which does not know a volume whose record is damaged.
        let conditions = self.backend.volume_health(&call.id).await?;
        let volume_health = Some(answer::volume_health(&call.id, conditions));
        Ok(Response::new(ControllerGetVolumeHealthResponse { volume_health }))
    }

    async fn get_capacity(&self, request: Request<GetCapacityRequest>) -> Reply<GetCapacityResponse> {
        self.need(Feature::Capacity)?;
        let call = Room::try_from(request.into_inner())?;
        let room = self.room(call).await?;
        Ok(Response::new(GetCapacityResponse {
            available_capacity: room.available.as_i64(),
            maximum_volume_size: room.largest_volume.map(berth_core::Capacity::as_i64),
            minimum_volume_size: room.smallest_volume.map(berth_core::Capacity::as_i64),
        }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Reply<ControllerGetCapabilitiesResponse> {
        let capabilities =
            self.features.controller().into_iter().map(|rpc| ControllerServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
            });
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Reply<CreateSnapshotResponse> {
        self.need(Feature::Snapshots)?;
        let call = CreateSnapshot::try_from(request.into_inner())?;
        let snapshot = self.ensure_snapshot(call).await?;
        let words = if snapshot.ready { None } else { self.backend.snapshot_progress(&snapshot.id) };
        let snapshot = answer::snapshot(snapshot, self.features);
        let mut answer = Response::new(CreateSnapshotResponse { snapshot: Some(snapshot) });
        if let Some(words) = words {
            berth_csi::progress::tell(answer.metadata_mut(), &words);
        }
        Ok(answer)
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Reply<DeleteSnapshotResponse> {
        self.need(Feature::Snapshots)?;
        let request = request.into_inner();
        let secrets = Secrets::from(request.secrets.clone());
        let call = OneSnapshot::try_from(request)?;
        self.ensure_no_snapshot(&call.id, &secrets).await?;
        Ok(Response::new(DeleteSnapshotResponse {}))
    }

    async fn list_snapshots(&self, request: Request<ListSnapshotsRequest>) -> Reply<ListSnapshotsResponse> {
        self.need(Feature::Snapshots)?;
        let call = ListSnapshots::try_from(request.into_inner())?;
        let page = self.snapshots(call).await?;
        let entries = page.entries.into_iter().map(|snapshot| list_snapshots_response::Entry {
            snapshot: Some(answer::snapshot(snapshot, self.features)),
        });
        let response =
            ListSnapshotsResponse { entries: entries.collect(), next_token: page.next.unwrap_or_default() };
        Ok(Response::new(response))
    }

    async fn get_snapshot(&self, request: Request<GetSnapshotRequest>) -> Reply<GetSnapshotResponse> {
        self.need(Feature::Snapshots)?;
        let call = OneSnapshot::try_from(request.into_inner())?;
        let snapshot = answer::snapshot(self.snapshot(&call.id).await?, self.features);
        Ok(Response::new(GetSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Reply<ControllerExpandVolumeResponse> {
        self.need(Feature::ControllerExpand)?;
        let call = Expand::try_from(request.into_inner())?;
        let expanded = self.ensure_size(call).await?;
        Ok(Response::new(ControllerExpandVolumeResponse {
            capacity_bytes: expanded.capacity.as_i64(),
            node_expansion_required: expanded.node_expansion_required,
        }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> Reply<ControllerGetVolumeResponse> {
        self.need(Feature::GetVolume)?;
        let call = OneVolume::try_from(request.into_inner())?;
        let volume = self.volume(&call.id).await?;
        let published_node_ids = answer::nodes(&volume);
        Ok(Response::new(ControllerGetVolumeResponse {
            volume: Some(answer::volume(volume, self.features)),
            status: Some(controller_get_volume_response::VolumeStatus { published_node_ids }),
        }))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<ControllerModifyVolumeRequest>,
    ) -> Reply<ControllerModifyVolumeResponse> {
        self.need(Feature::Modify)?;
        let call = Modify::try_from(request.into_inner())?;
        self.ensure_mutable(call).await?;
        Ok(Response::new(ControllerModifyVolumeResponse {}))
    }
}
