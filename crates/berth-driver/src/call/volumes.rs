//! Requests of the Controller service about volumes.

use std::collections::BTreeMap;

use berth_core::{CapacityRange, NodeId, Topology, VolumeCapability, VolumeId};
use berth_csi::v1::{self, volume_content_source::Type as Source};

use super::{
    Invalid, Listing, Parsed, capability, capability::message_of, capacity_range, id, listing, map, missing,
    optional_id, topology, topology_requirement,
};
use crate::{ContentSource, NewVolume, Parameters, TopologyRequirement};

/// The arguments of CreateVolume.
#[derive(Debug, Clone)]
pub(crate) struct CreateVolume {
    pub(crate) new: NewVolume,
    pub(crate) source: Option<ContentSource>,
    pub(crate) topology: Option<TopologyRequirement>,
}

impl TryFrom<v1::CreateVolumeRequest> for CreateVolume {
    type Error = Invalid;

    fn try_from(request: v1::CreateVolumeRequest) -> Parsed<Self> {
        let new = NewVolume {
            name: id("name", &request.name)?,
            range: capacity_range(request.capacity_range)?,
            capabilities: capability::all(request.volume_capabilities)?,
            parameters: map("parameters", request.parameters)?,
            mutable: map("mutable_parameters", request.mutable_parameters)?,
            ephemeral: false,
        };
        Ok(Self {
            new,
            source: request.volume_content_source.map(source).transpose()?,
            topology: topology_requirement(request.accessibility_requirements)?,
        })
    }
}

fn source(message: v1::VolumeContentSource) -> Parsed<ContentSource> {
    match message.r#type {
        None => Err(missing("volume_content_source.type")),
        Some(Source::Snapshot(snapshot)) => {
            id("volume_content_source.snapshot.snapshot_id", &snapshot.snapshot_id)
                .map(ContentSource::Snapshot)
        }
        Some(Source::Volume(volume)) => {
            id("volume_content_source.volume.volume_id", &volume.volume_id).map(ContentSource::Volume)
        }
    }
}

/// Any request that names a volume and nothing else: DeleteVolume, ControllerGetVolume, ControllerGetVolumeHealth.
#[derive(Debug, Clone)]
pub(crate) struct OneVolume {
    pub(crate) id: VolumeId,
}

macro_rules! names_one_volume {
    ($($request:ident),*) => {$(
        impl TryFrom<v1::$request> for OneVolume {
            type Error = Invalid;

            fn try_from(request: v1::$request) -> Parsed<Self> {
                Ok(Self { id: id("volume_id", &request.volume_id)? })
            }
        }
    )*};
}
names_one_volume!(DeleteVolumeRequest, ControllerGetVolumeRequest, ControllerGetVolumeHealthRequest);

/// The arguments of ControllerPublishVolume.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    pub(crate) id: VolumeId,
    pub(crate) node: NodeId,
    pub(crate) capability: VolumeCapability,
    pub(crate) read_only: bool,
}

impl TryFrom<v1::ControllerPublishVolumeRequest> for Attach {
    type Error = Invalid;

    fn try_from(request: v1::ControllerPublishVolumeRequest) -> Parsed<Self> {
        map("volume_context", request.volume_context)?;
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            node: id("node_id", &request.node_id)?,
            capability: capability(request.volume_capability)?,
            read_only: request.readonly,
        })
    }
}

/// ControllerUnpublishVolume; from every node where none is named.
#[derive(Debug, Clone)]
pub(crate) struct Detach {
    pub(crate) id: VolumeId,
    pub(crate) node: Option<NodeId>,
}

impl TryFrom<v1::ControllerUnpublishVolumeRequest> for Detach {
    type Error = Invalid;

    fn try_from(request: v1::ControllerUnpublishVolumeRequest) -> Parsed<Self> {
        Ok(Self { id: id("volume_id", &request.volume_id)?, node: optional_id("node_id", &request.node_id)? })
    }
}

/// The arguments of ValidateVolumeCapabilities.
#[derive(Debug, Clone)]
pub(crate) struct Validate {
    pub(crate) id: VolumeId,
    pub(crate) capabilities: Vec<VolumeCapability>,
    pub(crate) context: BTreeMap<String, String>,
    pub(crate) parameters: Parameters,
    pub(crate) mutable: Parameters,
}

impl TryFrom<v1::ValidateVolumeCapabilitiesRequest> for Validate {
    type Error = Invalid;

    fn try_from(request: v1::ValidateVolumeCapabilitiesRequest) -> Parsed<Self> {
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            capabilities: capability::all(request.volume_capabilities)?,
            context: map("volume_context", request.volume_context)?,
            parameters: map("parameters", request.parameters)?,
            mutable: map("mutable_parameters", request.mutable_parameters)?,
        })
    }
}

impl Validate {
    /// The answer that everything asked for is so.
    pub(crate) fn confirmed(self) -> v1::ValidateVolumeCapabilitiesResponse {
        let confirmed = v1::validate_volume_capabilities_response::Confirmed {
            volume_context: self.context,
            volume_capabilities: self.capabilities.iter().map(message_of).collect(),
            parameters: self.parameters,
            mutable_parameters: self.mutable,
        };
        v1::ValidateVolumeCapabilitiesResponse { confirmed: Some(confirmed), message: String::new() }
    }
}

impl TryFrom<v1::ListVolumesRequest> for Listing {
    type Error = Invalid;

    fn try_from(request: v1::ListVolumesRequest) -> Parsed<Self> {
        listing(request.max_entries, request.starting_token)
    }
}

impl TryFrom<v1::ControllerListVolumeHealthRequest> for Listing {
    type Error = Invalid;

    fn try_from(request: v1::ControllerListVolumeHealthRequest) -> Parsed<Self> {
        listing(request.max_entries, request.starting_token)
    }
}

/// The arguments of GetCapacity.
#[derive(Debug, Clone)]
pub(crate) struct GetCapacity {
    pub(crate) capabilities: Vec<VolumeCapability>,
    pub(crate) parameters: Parameters,
    pub(crate) topology: Option<Topology>,
}

impl TryFrom<v1::GetCapacityRequest> for GetCapacity {
    type Error = Invalid;

    fn try_from(request: v1::GetCapacityRequest) -> Parsed<Self> {
        Ok(Self {
            capabilities: capability::any(request.volume_capabilities)?,
            parameters: map("parameters", request.parameters)?,
            topology: request
                .accessible_topology
                .map(|segments| topology("accessible_topology", segments))
                .transpose()?,
        })
    }
}

/// The arguments of ControllerExpandVolume.
#[derive(Debug, Clone)]
pub(crate) struct Expand {
    pub(crate) id: VolumeId,
    pub(crate) range: CapacityRange,
    pub(crate) capability: Option<VolumeCapability>,
}

impl TryFrom<v1::ControllerExpandVolumeRequest> for Expand {
    type Error = Invalid;

    fn try_from(request: v1::ControllerExpandVolumeRequest) -> Parsed<Self> {
        let range = capacity_range(request.capacity_range)?;
        let id = id("volume_id", &request.volume_id)?;
        if range == CapacityRange::default() {
            return Err(missing("capacity_range"));
        }
        Ok(Self { id, range, capability: capability::optional(request.volume_capability)? })
    }
}

/// The arguments of ControllerModifyVolume.
#[derive(Debug, Clone)]
pub(crate) struct Modify {
    pub(crate) id: VolumeId,
    pub(crate) mutable: Parameters,
}

impl TryFrom<v1::ControllerModifyVolumeRequest> for Modify {
    type Error = Invalid;

    fn try_from(request: v1::ControllerModifyVolumeRequest) -> Parsed<Self> {
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            mutable: map("mutable_parameters", request.mutable_parameters)?,
        })
    }
}
