//! The GroupController service.

use std::collections::BTreeSet;

use berth_core::SnapshotId;
use berth_csi::v1::{
    CreateVolumeGroupSnapshotRequest, CreateVolumeGroupSnapshotResponse, DeleteVolumeGroupSnapshotRequest,
    DeleteVolumeGroupSnapshotResponse, GetVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotResponse,
    GroupControllerGetCapabilitiesRequest, GroupControllerGetCapabilitiesResponse,
    GroupControllerServiceCapability,
    group_controller_server::GroupController,
    group_controller_service_capability::{Rpc, Type},
};
use tonic::{Request, Response};

use super::{Driver, Reply, answer};
use crate::{
    Feature,
    backend::{Error, GroupSnapshot, Result},
    call::snapshots::{CreateGroup, OneGroup},
    locks::{Hold, Key},
};

#[tonic::async_trait]
impl GroupController for Driver {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<GroupControllerGetCapabilitiesRequest>,
    ) -> Reply<GroupControllerGetCapabilitiesResponse> {
        let capabilities = self.features.group().into_iter().map(|rpc| GroupControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
        });
        Ok(Response::new(GroupControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<CreateVolumeGroupSnapshotRequest>,
    ) -> Reply<CreateVolumeGroupSnapshotResponse> {
        self.need(Feature::GroupSnapshots)?;
        let call = CreateGroup::try_from(request.into_inner())?;
        let group = answer::group(self.ensure_group(call).await?, self.features);
        Ok(Response::new(CreateVolumeGroupSnapshotResponse { group_snapshot: Some(group) }))
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<DeleteVolumeGroupSnapshotRequest>,
    ) -> Reply<DeleteVolumeGroupSnapshotResponse> {
        self.need(Feature::GroupSnapshots)?;
        let call = OneGroup::try_from(request.into_inner())?;
        self.ensure_no_group(&call).await?;
        Ok(Response::new(DeleteVolumeGroupSnapshotResponse {}))
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<GetVolumeGroupSnapshotRequest>,
    ) -> Reply<GetVolumeGroupSnapshotResponse> {
        self.need(Feature::GroupSnapshots)?;
        let call = OneGroup::try_from(request.into_inner())?;
        let found = self.backend.group(&call.id).await?;
        let group =
            found.ok_or_else(|| Error::NotFound { what: "group snapshot", id: call.id.to_string() })?;
        check_members(&group, &call.members)?;
        let group = answer::group(group, self.features);
        Ok(Response::new(GetVolumeGroupSnapshotResponse { group_snapshot: Some(group) }))
    }
}

impl Driver {
    async fn ensure_group(&self, call: CreateGroup) -> Result<GroupSnapshot> {
        let sources = call.sources.iter().map(|id| (Key::Volume(id.clone()), Hold::Exclusive));
        let name = (Key::GroupName(call.name.clone()), Hold::Exclusive);
        let _guard = self.lock(sources.chain([name]))?;
        if let Some(existing) = self.backend.find_group(&call.name).await? {
            let sources: BTreeSet<_> = existing.snapshots.iter().map(|member| &member.source).collect();
            if sources.into_iter().eq(&call.sources) {
                return Ok(existing);
            }
            let name = &call.name;
            return Err(Error::Conflict(format!(
                "there is a group named {name:?} already, of other volumes"
            )));
        }
        for id in &call.sources {
            self.volume(id).await?;
        }
        let sources: Vec<_> = call.sources.into_iter().collect();
        self.backend.create_group(call.name, &sources, &call.parameters).await
    }

    async fn ensure_no_group(&self, call: &OneGroup) -> Result<()> {
        let _guard = self.lock([(Key::Group(call.id.clone()), Hold::Exclusive)])?;
        let Some(group) = self.backend.group(&call.id).await? else { return Ok(()) };
        check_members(&group, &call.members)?;
        let members =
            group.snapshots.iter().map(|member| (Key::Snapshot(member.id.clone()), Hold::Exclusive));
        let _members = self.lock(members)?;
        match self.backend.delete_group(&call.id).await {
            Err(Error::NotFound { what: "group snapshot", .. }) => Ok(()),
            other => other,
        }
    }
}

/// Refuses a call whose idea of the group's members is wrong.
fn check_members(group: &GroupSnapshot, given: &BTreeSet<SnapshotId>) -> Result<()> {
    let members: BTreeSet<&SnapshotId> = group.snapshots.iter().map(|member| &member.id).collect();
    if members.iter().copied().eq(given) {
        return Ok(());
    }
    let members: Vec<_> = members.into_iter().map(SnapshotId::as_str).collect();
    Err(Error::Invalid(format!(
        "snapshot_ids are not the members of the group, which are {}",
        members.join(", ")
    )))
}
