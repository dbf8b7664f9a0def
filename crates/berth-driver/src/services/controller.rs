//! The Controller service: volumes, snapshots, attachment, growth and health.

use berth_core::{CapacityRange, SnapshotId, Topology, VolumeCapability, VolumeId};
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

use super::{Reply, Services, answer, rules};
use crate::{
    Attached, ContentSource, Context, Error, NewVolume, Parameters, Result, Snapshot, TopologyRequirement,
    Volume,
    call::{
        self, Listing,
        snapshots::{CreateSnapshot, ListSnapshots, OneSnapshot},
        volumes::{Attach, CreateVolume, Detach, Expand, GetCapacity, Modify, OneVolume, Validate},
    },
    compose::{Controller as Parts, Origin},
    erased::DynSnapshots,
    locks::{Hold, Key},
};

#[tonic::async_trait]
impl Controller for Services {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Reply<CreateVolumeResponse> {
        let controller = self.controller()?;
        let (ctx, mut call) = call::read::<_, CreateVolume>(request)?;
        let has_topology = controller.provisioner.has_topology();
        call.topology = controller.provisioner.wanted(call.topology);
        let source = call.source.clone().map(|source| match source {
            ContentSource::Snapshot(id) => (Key::Snapshot(id), Hold::Shared),
            ContentSource::Volume(id) => (Key::Volume(id), Hold::Shared),
        });
        let name = (Key::VolumeName(call.new.name.clone()), Hold::Exclusive);
        let _guard = self.lock([name].into_iter().chain(source))?;
        self.check_capabilities(controller, &call.new.capabilities, &call.new.mutable)?;

        let origin = Box::pin(find_origin(&ctx, controller, &call));
        let provisioner = &controller.provisioner;
        let (volume, existed) = provisioner.ensure(&ctx, &call.new, call.topology.as_ref(), origin).await?;
        if existed {
            // It may be on its way out; then the name is free again soon.
            let _stays = self.lock([(Key::Volume(volume.id.clone()), Hold::Shared)])?;
            if let Some(what) = rules::difference(&volume, &call) {
                let name = &call.new.name;
                let sentence = format!("there is a volume named {name:?} already, but {what}");
                return Err(Error::Conflict(sentence).into());
            }
        }
        Ok(ctx.reply(CreateVolumeResponse { volume: Some(answer::volume(volume, has_topology)) }))
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Reply<DeleteVolumeResponse> {
        let controller = self.controller()?;
        let (ctx, OneVolume { id }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        if let Some(volume) = controller.provisioner.get(&ctx, &id).await? {
            if let Some(attached) = volume.attachments.first() {
                let sentence = format!("volume {id:?} is attached to node {:?}", attached.node);
                return Err(Error::Precondition(sentence).into());
            }
            self.check_unused_here(&id)?;
        }
        // Also where there is none: a creation or deletion that failed may have left something of it.
        unless_gone("volume", controller.provisioner.delete(&ctx, &id).await)?;
        Ok(ctx.reply(DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Reply<ControllerPublishVolumeResponse> {
        let controller = self.controller()?;
        let attachment = self.part(controller.parts.attachment.as_deref(), "attachment")?;
        let (ctx, Attach { id, node, capability, read_only }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        let volume = existing_volume(&ctx, controller, &id).await?;
        self.check_capabilities(controller, std::slice::from_ref(&capability), &Parameters::new())?;
        rules::check_kind(&volume, capability.access.kind())?;
        let wanted = Attached { node: node.clone(), read_only, mode: Some(capability.mode) };
        rules::check_attach(&volume.attachments, &wanted)?;
        let publish_context = match (read_only, &controller.parts.read_only_attachment) {
            (false, _) => attachment.attach(&ctx, &volume, &node, &capability).await?,
            (true, Some(part)) => part.attach_read_only(&ctx, &volume, &node, &capability).await?,
            (true, None) => return Err(Error::invalid("readonly is not supported by this driver").into()),
        };
        Ok(Response::new(ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Reply<ControllerUnpublishVolumeResponse> {
        let controller = self.controller()?;
        let attachment = self.part(controller.parts.attachment.as_deref(), "attachment")?;
        let (ctx, Detach { id, node }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        let is_meant = |attached: &Attached| node.as_ref().is_none_or(|node| attached.node == *node);
        let is_due = if attachment.knows_attachments() {
            let volume = controller.provisioner.get(&ctx, &id).await?;
            volume.is_some_and(|volume| volume.attachments.iter().any(is_meant))
        } else {
            // The storage finds out itself, so nobody has to ask it before.
            true
        };
        if is_due {
            let is_here =
                self.node.as_ref().is_some_and(|here| node.as_ref().is_none_or(|node| *node == here.id));
            if self.config.check_volume_lifecycle && is_here {
                self.check_unused_here(&id)?;
            }
            attachment.detach(&ctx, &id, node.as_ref()).await?;
        }
        Ok(Response::new(ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Reply<ValidateVolumeCapabilitiesResponse> {
        let controller = self.controller()?;
        let (ctx, call) = call::read::<_, Validate>(request)?;
        let volume = existing_volume(&ctx, controller, &call.id).await?;
        let response = match self.objection(&ctx, controller, &volume, &call) {
            Ok(()) => call.confirmed(),
            Err(Error::Invalid(message)) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            Err(other) => return Err(other.into()),
        };
        Ok(Response::new(response))
    }

    async fn list_volumes(&self, request: Request<ListVolumesRequest>) -> Reply<ListVolumesResponse> {
        let controller = self.controller()?;
        let listing = self.part(controller.parts.listing.as_deref(), "listing of volumes")?;
        let (ctx, call) = call::read::<_, Listing>(request)?;
        let page = self.gather(call, async |page| listing.list(&ctx, &page).await).await?;
        let entries = page.entries.into_iter().map(|volume| list_volumes_response::Entry {
            status: Some(list_volumes_response::VolumeStatus { published_node_ids: answer::nodes(&volume) }),
            volume: Some(answer::volume(volume, controller.provisioner.has_topology())),
        });
        let response =
            ListVolumesResponse { entries: entries.collect(), next_token: page.next.unwrap_or_default() };
        Ok(Response::new(response))
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<ControllerListVolumeHealthRequest>,
    ) -> Reply<ControllerListVolumeHealthResponse> {
        let health = self.part(self.controller()?.parts.health.as_deref(), "health of volumes")?;
        let (ctx, call) = call::read::<_, Listing>(request)?;
        let page = self.gather(call, async |page| health.list_unhealthy(&ctx, &page).await).await?;
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
        let health = self.part(self.controller()?.parts.health.as_deref(), "health of volumes")?;
        let (ctx, OneVolume { id }) = call::read(request)?;
        // Without asking for the volume first: one whose record is damaged is known only here.
        let conditions = health.health(&ctx, &id).await?;
        let volume_health = Some(answer::volume_health(&id, conditions));
        Ok(Response::new(ControllerGetVolumeHealthResponse { volume_health }))
    }

    async fn get_capacity(&self, request: Request<GetCapacityRequest>) -> Reply<GetCapacityResponse> {
        let controller = self.controller()?;
        let capacity = self.part(controller.parts.capacity.as_deref(), "capacity")?;
        let (ctx, GetCapacity { capabilities, parameters, topology }) = call::read(request)?;
        self.check_capabilities(controller, &capabilities, &Parameters::new())?;
        let new = unnamed(parameters, Parameters::new(), capabilities);
        controller.provisioner.check(&ctx, &new)?;
        let topology = topology.and_then(|topology| controller.provisioner.canonical(topology));
        let found = capacity.available_capacity(&ctx, &new.parameters, topology.as_ref()).await?;
        Ok(Response::new(GetCapacityResponse {
            available_capacity: found.available.as_i64(),
            maximum_volume_size: found.largest_volume.map(berth_core::Capacity::as_i64),
            minimum_volume_size: found.smallest_volume.map(berth_core::Capacity::as_i64),
        }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Reply<ControllerGetCapabilitiesResponse> {
        let capabilities =
            self.announced.controller.iter().map(|&rpc| ControllerServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
            });
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    /// A caller that named the snapshot's topology and no other does not get it again: the field is optional, and
    /// csi-sanity 5.6.0 compares it with the caller's by the inner state of its protobuf library, where two equal
    /// topologies differ. GetSnapshot and ListSnapshots always answer with it.
    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Reply<CreateSnapshotResponse> {
        let controller = self.controller()?;
        let snapshots = self.part(controller.parts.snapshots.as_deref(), "snapshots")?;
        let (ctx, CreateSnapshot { new, topology }) = call::read(request)?;
        let topology = controller.provisioner.wanted(topology);
        let _guard = self.lock([
            (Key::SnapshotName(new.name.clone()), Hold::Exclusive),
            (Key::Volume(new.source.clone()), Hold::Exclusive),
        ])?;
        let has_topology = controller.provisioner.has_topology();
        let mut snapshot = match snapshots.find_snapshot(&ctx, &new).await? {
            Some(existing) if existing.source == new.source => existing,
            Some(existing) => {
                let (name, source) = (&new.name, &existing.source);
                let sentence = format!("there is a snapshot named {name:?} already, of volume {source:?}");
                return Err(Error::Conflict(sentence).into());
            }
            None => {
                let volume = existing_volume(&ctx, controller, &new.source).await?;
                TopologyRequirement::check(topology.as_ref(), volume.topology.as_deref())?;
                snapshots.take_snapshot(&ctx, new, &volume).await?
            }
        };
        let is_named = |own: &Topology| topology.as_ref().is_some_and(|wanted| wanted.names_only(own));
        snapshot.topology = snapshot.topology.filter(|own| !is_named(own));
        let progress = if snapshot.ready { None } else { snapshots.progress(&snapshot.id) };
        let snapshot = answer::snapshot(snapshot, has_topology);
        let mut answer = ctx.reply(CreateSnapshotResponse { snapshot: Some(snapshot) });
        if let Some(words) = progress {
            berth_csi::remarks::set_progress(answer.metadata_mut(), &words);
        }
        Ok(answer)
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Reply<DeleteSnapshotResponse> {
        let controller = self.controller()?;
        let snapshots = self.part(controller.parts.snapshots.as_deref(), "snapshots")?;
        let (ctx, OneSnapshot { id }) = call::read(request)?;
        let _guard = self.lock([(Key::Snapshot(id.clone()), Hold::Exclusive)])?;
        // Only where it can matter: asking for a snapshot makes a backend go on with one that it was taking.
        if controller.parts.group_snapshots.is_some()
            && let Some(group) = snapshots.snapshot(&ctx, &id).await?.and_then(|snapshot| snapshot.group)
        {
            let sentence = format!("snapshot {id:?} belongs to group {group:?} and goes only with it");
            return Err(Error::Invalid(sentence).into());
        }
        unless_gone("snapshot", snapshots.delete_snapshot(&ctx, &id).await)?;
        Ok(ctx.reply(DeleteSnapshotResponse {}))
    }

    async fn list_snapshots(&self, request: Request<ListSnapshotsRequest>) -> Reply<ListSnapshotsResponse> {
        let controller = self.controller()?;
        let snapshots = self.part(controller.parts.snapshots.as_deref(), "snapshots")?;
        let (ctx, ListSnapshots { listing, source, snapshot }) = call::read(request)?;
        let (found, next) = match &snapshot {
            None => {
                let fetch = async |page| snapshots.list_snapshots(&ctx, source.as_ref(), &page).await;
                let page = self.gather(listing, fetch).await?;
                (page.entries, page.next)
            }
            Some(id) => {
                let is_meant = |found: &Snapshot| source.as_ref().is_none_or(|id| found.source == *id);
                let found = snapshots.snapshot(&ctx, id).await?.filter(is_meant);
                (found.into_iter().collect(), None)
            }
        };
        let entries = found.into_iter().map(|snapshot| list_snapshots_response::Entry {
            snapshot: Some(answer::snapshot(snapshot, controller.provisioner.has_topology())),
        });
        let response =
            ListSnapshotsResponse { entries: entries.collect(), next_token: next.unwrap_or_default() };
        Ok(Response::new(response))
    }

    async fn get_snapshot(&self, request: Request<GetSnapshotRequest>) -> Reply<GetSnapshotResponse> {
        let controller = self.controller()?;
        let snapshots = self.part(controller.parts.snapshots.as_deref(), "snapshots")?;
        let (ctx, OneSnapshot { id }) = call::read(request)?;
        let snapshot = existing_snapshot(&ctx, snapshots, &id).await?;
        let snapshot = answer::snapshot(snapshot, controller.provisioner.has_topology());
        Ok(Response::new(GetSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Reply<ControllerExpandVolumeResponse> {
        let controller = self.controller()?;
        let expansion = self.part(controller.parts.expansion.as_deref(), "expansion")?;
        let (ctx, Expand { id, range, capability }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        let volume = existing_volume(&ctx, controller, &id).await?;
        if let Some(capability) = &capability {
            rules::check_kind(&volume, capability.access.kind())?;
        }
        if range.limit().is_some_and(|limit| limit < volume.capacity) {
            let sentence = format!("the volume has {} and cannot shrink", volume.capacity);
            return Err(Error::OutOfRange(sentence).into());
        }
        let expanded = expansion.expand(&ctx, &volume, range).await?;
        Ok(ctx.reply(ControllerExpandVolumeResponse {
            capacity_bytes: expanded.capacity.as_i64(),
            node_expansion_required: expanded.node_expansion_required,
        }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> Reply<ControllerGetVolumeResponse> {
        let controller = self.controller()?;
        let (ctx, OneVolume { id }) = call::read(request)?;
        let volume = existing_volume(&ctx, controller, &id).await?;
        let published_node_ids = answer::nodes(&volume);
        Ok(Response::new(ControllerGetVolumeResponse {
            volume: Some(answer::volume(volume, controller.provisioner.has_topology())),
            status: Some(controller_get_volume_response::VolumeStatus { published_node_ids }),
        }))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<ControllerModifyVolumeRequest>,
    ) -> Reply<ControllerModifyVolumeResponse> {
        let controller = self.controller()?;
        let modification = self.part(controller.parts.modification.as_deref(), "modification")?;
        let (ctx, Modify { id, mutable }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        let volume = existing_volume(&ctx, controller, &id).await?;
        modification.modify(&ctx, &volume, mutable).await?;
        Ok(ctx.reply(ControllerModifyVolumeResponse {}))
    }
}

impl Services {
    /// Refuses capabilities that no volume of this driver can have, and mutable parameters where there are none.
    pub(super) fn check_capabilities(
        &self,
        controller: &Parts,
        capabilities: &[VolumeCapability],
        mutable: &Parameters,
    ) -> Result<()> {
        for capability in capabilities {
            rules::check_supported(controller.provisioner.supports(), capability)?;
            rules::check_group(capability, self.node.as_ref().is_none_or(|node| node.mount_group))?;
        }
        if !mutable.is_empty() && controller.parts.modification.is_none() {
            return Err(Error::invalid("mutable_parameters are not supported by this driver"));
        }
        Ok(())
    }

    fn check_unused_here(&self, id: &VolumeId) -> Result<()> {
        match self.ledger.path_of(id) {
            Some(path) => Err(Error::Precondition(format!("volume {id:?} is in use at {}", path.display()))),
            None => Ok(()),
        }
    }

    /// Why the volume is not as the caller thinks, if it is not.
    fn objection(&self, ctx: &Context, controller: &Parts, volume: &Volume, call: &Validate) -> Result<()> {
        let wanted = call.capabilities.first().map(|capability| capability.access.kind());
        if let Some(wanted) = wanted {
            rules::check_kind(volume, wanted)?;
        }
        for (field, given, known) in [
            ("volume_context", &call.context, &volume.context),
            ("parameters", &call.parameters, &volume.parameters),
            ("mutable_parameters", &call.mutable, &volume.mutable),
        ] {
            let agrees = |pair: (&str, &str)| controller.provisioner.agrees(volume, known, pair);
            if let Some(key) = rules::disagreement(given, agrees) {
                return Err(Error::Invalid(format!("{field}: {key:?} is not what the volume has")));
            }
        }
        self.check_capabilities(controller, &call.capabilities, &call.mutable)?;
        // What it was made with counts, also where the caller does not repeat it.
        let parameters = Parameters::clone(&volume.parameters);
        controller
            .provisioner
            .check(ctx, &unnamed(parameters, call.mutable.clone(), call.capabilities.clone()))
    }
}

/// A volume of these parameters that nobody asked to be made.
fn unnamed(parameters: Parameters, mutable: Parameters, capabilities: Vec<VolumeCapability>) -> NewVolume {
    let name = "unnamed".parse().expect("the word is a name");
    let range = CapacityRange::default();
    NewVolume { name, range, capabilities, parameters, mutable, ephemeral: false }
}

pub(super) async fn existing_volume(ctx: &Context, controller: &Parts, id: &VolumeId) -> Result<Volume> {
    controller.provisioner.get(ctx, id).await?.ok_or_else(|| Error::no_volume(id))
}

pub(super) async fn existing_snapshot(
    ctx: &Context,
    snapshots: &dyn DynSnapshots,
    id: &SnapshotId,
) -> Result<Snapshot> {
    snapshots.snapshot(ctx, id).await?.ok_or_else(|| Error::no_snapshot(id))
}

/// Looks up a new volume's content source, and refuses one that does not fit.
async fn find_origin(ctx: &Context, controller: &Parts, call: &CreateVolume) -> Result<Origin> {
    let (origin, size, access) = match &call.source {
        None => return Ok(Origin::Nothing),
        Some(ContentSource::Snapshot(id)) => {
            let snapshots = controller.parts.snapshots.as_deref();
            let snapshots = snapshots
                .ok_or_else(|| Error::invalid("volume_content_source: this driver has no snapshots"))?;
            let snapshot = existing_snapshot(ctx, snapshots, id).await?;
            if !snapshot.ready {
                return Err(Error::Precondition(format!("snapshot {id:?} is not ready to use yet")));
            }
            let (size, access) = (snapshot.size, snapshot.access);
            (Origin::Snapshot(Box::new(snapshot)), size, access)
        }
        Some(ContentSource::Volume(_)) if !controller.provisioner.clones() => {
            return Err(Error::invalid("volume_content_source: this driver cannot clone volumes"));
        }
        Some(ContentSource::Volume(id)) => {
            let volume = existing_volume(ctx, controller, id).await?;
            let (size, access) = (volume.capacity, volume.access);
            (Origin::Volume(Box::new(volume)), size, access)
        }
    };
    let wanted = call.new.access();
    if let Some(access) = access.filter(|access| *access != wanted) {
        let sentence = format!("the source is for {access} access, the volume shall be for {wanted} access");
        return Err(Error::Invalid(sentence));
    }
    rules::check_source_size(&call.new.range, size)?;
    Ok(origin)
}

/// A deletion of what is not there has succeeded.
pub(super) fn unless_gone(kind: &str, deleted: Result<()>) -> Result<()> {
    match deleted {
        Err(Error::NotFound { what, .. }) if what == kind => Ok(()),
        other => other,
    }
}
