//! The GroupController service: snapshots of several volumes at one instant.

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
use tonic::{Request, Response, Status};

use super::{
    Reply, Services, answer,
    controller::{existing_volume, unless_gone},
};
use crate::{
    Context, Error, GroupSnapshot, Result,
    call::{
        self,
        snapshots::{CreateGroup, OneGroup},
    },
    compose::Controller,
    erased::DynGroupSnapshots,
    locks::{Hold, Key},
};

#[tonic::async_trait]
impl GroupController for Services {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<GroupControllerGetCapabilitiesRequest>,
    ) -> Reply<GroupControllerGetCapabilitiesResponse> {
        let capabilities = self.announced.group.iter().map(|&rpc| GroupControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
        });
        Ok(Response::new(GroupControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<CreateVolumeGroupSnapshotRequest>,
    ) -> Reply<CreateVolumeGroupSnapshotResponse> {
        let (controller, groups) = self.groups()?;
        let (ctx, call) = call::read(request)?;
        let group = self.ensure_group(&ctx, controller, groups, call).await?;
        let group = answer::group(group, controller.provisioner.has_topology());
        Ok(ctx.reply(CreateVolumeGroupSnapshotResponse { group_snapshot: Some(group) }))
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<DeleteVolumeGroupSnapshotRequest>,
    ) -> Reply<DeleteVolumeGroupSnapshotResponse> {
        let (_, groups) = self.groups()?;
        let (ctx, OneGroup { id, members }) = call::read(request)?;
        let _guard = self.lock([(Key::Group(id.clone()), Hold::Exclusive)])?;
        if let Some(group) = groups.group(&ctx, &id).await? {
            check_members(&group, &members)?;
            let members = group.snapshots.iter().map(|member| Key::Snapshot(member.id.clone()));
            let _members = self.lock(members.map(|member| (member, Hold::Exclusive)))?;
            unless_gone("group snapshot", groups.delete_group(&ctx, &id).await)?;
        }
        Ok(ctx.reply(DeleteVolumeGroupSnapshotResponse {}))
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<GetVolumeGroupSnapshotRequest>,
    ) -> Reply<GetVolumeGroupSnapshotResponse> {
        let (controller, groups) = self.groups()?;
        let (ctx, OneGroup { id, members }) = call::read(request)?;
        let found = groups.group(&ctx, &id).await?;
        let group = found.ok_or_else(|| Error::not_found("group snapshot", &id))?;
        check_members(&group, &members)?;
        let group = answer::group(group, controller.provisioner.has_topology());
        Ok(Response::new(GetVolumeGroupSnapshotResponse { group_snapshot: Some(group) }))
    }
}

impl Services {
    fn groups(&self) -> std::result::Result<(&Controller, &dyn DynGroupSnapshots), Status> {
        let controller = self.controller()?;
        Ok((controller, self.part(controller.parts.group_snapshots.as_deref(), "group snapshots")?))
    }

    async fn ensure_group(
        &self,
        ctx: &Context,
        controller: &Controller,
        groups: &dyn DynGroupSnapshots,
        call: CreateGroup,
    ) -> Result<GroupSnapshot> {
        let sources = call.sources.iter().map(|id| (Key::Volume(id.clone()), Hold::Exclusive));
        let name = (Key::GroupName(call.name.clone()), Hold::Exclusive);
        let _guard = self.lock(sources.chain([name]))?;
        if let Some(existing) = groups.find_group(ctx, &call.name).await? {
            let sources: BTreeSet<_> = existing.snapshots.iter().map(|member| &member.source).collect();
            if sources.into_iter().eq(&call.sources) {
                return Ok(existing);
            }
            let name = &call.name;
            return Err(Error::Conflict(format!(
                "there is a group named {name:?} already, of other volumes"
            )));
        }
        let mut volumes = Vec::new();
        for id in &call.sources {
            volumes.push(existing_volume(ctx, controller, id).await?);
        }
        groups.take_group_snapshot(ctx, &call.name, &volumes, &call.parameters).await
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
