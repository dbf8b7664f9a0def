//! Requests of the Node service.

use std::path::PathBuf;

use berth_core::{
    Access, Capacity, CapacityRange, Name, VolumeCapability, VolumeId,
    names::{EPHEMERAL, KUBERNETES_PARAMETER_PREFIX},
};
use berth_csi::v1;

use super::{Invalid, Parsed, absolute_path, any_path, capability, capacity_range, id, map, optional_path};
use crate::{NodeVolume, Parameters};

/// The size of an inline volume that does not say.
const DEFAULT_INLINE_SIZE: Capacity = Capacity::gibibytes(1);
/// The attribute of an inline volume that says.
const INLINE_SIZE: &str = "size";

/// The arguments of NodeStageVolume.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    pub(crate) volume: NodeVolume,
    pub(crate) staging: PathBuf,
}

impl TryFrom<v1::NodeStageVolumeRequest> for Stage {
    type Error = Invalid;

    fn try_from(request: v1::NodeStageVolumeRequest) -> Parsed<Self> {
        let publish_context = map("publish_context", request.publish_context)?;
        let context = map("volume_context", request.volume_context)?;
        let id = id("volume_id", &request.volume_id)?;
        let staging = absolute_path("staging_target_path", &request.staging_target_path)?;
        let capability = capability(request.volume_capability)?;
        let read_only = capability.mode.is_read_only() || is_mounted_read_only(&capability);
        let staged = Some(staging.clone());
        Ok(Self {
            volume: NodeVolume { id, capability, read_only, context, publish_context, staging: staged },
            staging,
        })
    }
}

/// The arguments of NodeUnstageVolume.
#[derive(Debug, Clone)]
pub(crate) struct Unstage {
    pub(crate) id: VolumeId,
    pub(crate) staging: PathBuf,
}

impl TryFrom<v1::NodeUnstageVolumeRequest> for Unstage {
    type Error = Invalid;

    fn try_from(request: v1::NodeUnstageVolumeRequest) -> Parsed<Self> {
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            staging: absolute_path("staging_target_path", &request.staging_target_path)?,
        })
    }
}

/// The arguments of NodePublishVolume.
#[derive(Debug, Clone)]
pub(crate) struct Publish {
    pub(crate) volume: NodeVolume,
    pub(crate) target: PathBuf,
    /// What to make first, for a volume that lives in a pod's own specification.
    pub(crate) inline: Option<Inline>,
}

/// A volume that is made when its pod starts and goes with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inline {
    pub(crate) name: Name,
    pub(crate) range: CapacityRange,
    pub(crate) parameters: Parameters,
}

impl TryFrom<v1::NodePublishVolumeRequest> for Publish {
    type Error = Invalid;

    fn try_from(request: v1::NodePublishVolumeRequest) -> Parsed<Self> {
        let publish_context = map("publish_context", request.publish_context)?;
        let context = map("volume_context", request.volume_context)?;
        let id: VolumeId = id("volume_id", &request.volume_id)?;
        let capability = capability(request.volume_capability)?;
        let staging = optional_path("staging_target_path", &request.staging_target_path)?;
        let target = absolute_path("target_path", &request.target_path)?;
        let read_only =
            request.readonly || capability.mode.is_read_only() || is_mounted_read_only(&capability);
        Ok(Self {
            target,
            inline: inline(&id, context.clone())?,
            volume: NodeVolume { id, capability, read_only, context, publish_context, staging },
        })
    }
}

fn is_mounted_read_only(capability: &VolumeCapability) -> bool {
    match &capability.access {
        Access::Block => false,
        Access::Mount { flags, .. } => berth_host::mount::parse_options(flags).attributes.read_only,
    }
}

/// The name under which the backend knows the inline volume that Kubernetes calls `id`, if it can know one.
pub(crate) fn inline_name(id: &VolumeId) -> Option<Name> {
    format!("ephemeral-{id}").parse().ok()
}

fn inline(id: &VolumeId, mut context: Parameters) -> Parsed<Option<Inline>> {
    if context.get(EPHEMERAL).is_none_or(|value| value != "true") {
        return Ok(None);
    }
    let name = inline_name(id).ok_or_else(|| {
        Invalid(format!("volume_id is {} bytes long, too long for an inline volume", id.as_str().len()))
    })?;
    context.retain(|key, _| !key.starts_with(KUBERNETES_PARAMETER_PREFIX));
    let size = match context.remove(INLINE_SIZE) {
        None => DEFAULT_INLINE_SIZE,
        Some(text) => {
            text.parse::<Capacity>().ok().filter(|size| *size > Capacity::ZERO).ok_or_else(|| {
                Invalid(format!("volume attribute size: {text:?} is not a size such as 1Gi"))
            })?
        }
    };
    let range = CapacityRange::new(size.as_i64(), 0).expect("a size is a range");
    Ok(Some(Inline { name, range, parameters: context }))
}

/// The arguments of NodeUnpublishVolume.
#[derive(Debug, Clone)]
pub(crate) struct Unpublish {
    pub(crate) id: VolumeId,
    pub(crate) target: PathBuf,
}

impl TryFrom<v1::NodeUnpublishVolumeRequest> for Unpublish {
    type Error = Invalid;

    fn try_from(request: v1::NodeUnpublishVolumeRequest) -> Parsed<Self> {
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            target: absolute_path("target_path", &request.target_path)?,
        })
    }
}

/// The arguments of NodeGetVolumeStats.
#[derive(Debug, Clone)]
pub(crate) struct Stats {
    pub(crate) id: VolumeId,
    pub(crate) path: PathBuf,
}

impl TryFrom<v1::NodeGetVolumeStatsRequest> for Stats {
    type Error = Invalid;

    fn try_from(request: v1::NodeGetVolumeStatsRequest) -> Parsed<Self> {
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            path: any_path("volume_path", &request.volume_path)?,
        })
    }
}

/// The arguments of NodeExpandVolume.
#[derive(Debug, Clone)]
pub(crate) struct NodeExpand {
    pub(crate) id: VolumeId,
    pub(crate) path: PathBuf,
    pub(crate) range: CapacityRange,
    pub(crate) capability: Option<VolumeCapability>,
}

impl TryFrom<v1::NodeExpandVolumeRequest> for NodeExpand {
    type Error = Invalid;

    fn try_from(request: v1::NodeExpandVolumeRequest) -> Parsed<Self> {
        Ok(Self {
            id: id("volume_id", &request.volume_id)?,
            path: any_path("volume_path", &request.volume_path)?,
            range: capacity_range(request.capacity_range)?,
            capability: capability::optional(request.volume_capability)?,
        })
    }
}

/// The arguments of NodeGetVolumeHealth.
#[derive(Debug, Clone)]
pub(crate) struct NodeHealth {
    pub(crate) id: VolumeId,
}

impl TryFrom<v1::NodeGetVolumeHealthRequest> for NodeHealth {
    type Error = Invalid;

    fn try_from(request: v1::NodeGetVolumeHealthRequest) -> Parsed<Self> {
        Ok(Self { id: id("volume_id", &request.volume_id)? })
    }
}
