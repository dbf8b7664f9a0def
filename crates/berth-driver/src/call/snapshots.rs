//! Requests about snapshots, groups of them, and what is in them.

use std::collections::BTreeSet;

use berth_core::{GroupSnapshotId, Name, SnapshotId, VolumeId};
use berth_csi::v1;

use super::{
    Invalid, Listing, Parsed, at_most, id, listing, map, missing, optional_id, topology_requirement,
};
use crate::{NewSnapshot, Parameters, TopologyRequirement};

/// How many ranges one message of a stream holds where the caller does not say.
const DEFAULT_RANGES: usize = 256;
/// How many it holds at most, whatever the caller says.
const MAX_RANGES: usize = 8192;

/// The arguments of CreateSnapshot.
#[derive(Debug, Clone)]
pub(crate) struct CreateSnapshot {
    pub(crate) new: NewSnapshot,
    pub(crate) topology: Option<TopologyRequirement>,
}

impl TryFrom<v1::CreateSnapshotRequest> for CreateSnapshot {
    type Error = Invalid;

    fn try_from(request: v1::CreateSnapshotRequest) -> Parsed<Self> {
        let new = NewSnapshot {
            name: id("name", &request.name)?,
            source: id("source_volume_id", &request.source_volume_id)?,
            parameters: map("parameters", request.parameters)?,
        };
        Ok(Self { new, topology: topology_requirement(request.accessibility_requirements)? })
    }
}

/// Any request that names a snapshot and nothing else: DeleteSnapshot, GetSnapshot.
#[derive(Debug, Clone)]
pub(crate) struct OneSnapshot {
    pub(crate) id: SnapshotId,
}

impl TryFrom<v1::DeleteSnapshotRequest> for OneSnapshot {
    type Error = Invalid;

    fn try_from(request: v1::DeleteSnapshotRequest) -> Parsed<Self> {
        Ok(Self { id: id("snapshot_id", &request.snapshot_id)? })
    }
}

impl TryFrom<v1::GetSnapshotRequest> for OneSnapshot {
    type Error = Invalid;

    fn try_from(request: v1::GetSnapshotRequest) -> Parsed<Self> {
        Ok(Self { id: id("snapshot_id", &request.snapshot_id)? })
    }
}

/// The arguments of ListSnapshots.
#[derive(Debug, Clone)]
pub(crate) struct ListSnapshots {
    pub(crate) listing: Listing,
    pub(crate) source: Option<VolumeId>,
    pub(crate) snapshot: Option<SnapshotId>,
}

impl TryFrom<v1::ListSnapshotsRequest> for ListSnapshots {
    type Error = Invalid;

    fn try_from(request: v1::ListSnapshotsRequest) -> Parsed<Self> {
        Ok(Self {
            listing: listing(request.max_entries, request.starting_token)?,
            source: optional_id("source_volume_id", &request.source_volume_id)?,
            snapshot: optional_id("snapshot_id", &request.snapshot_id)?,
        })
    }
}

/// The arguments of CreateVolumeGroupSnapshot.
#[derive(Debug, Clone)]
pub(crate) struct CreateGroup {
    pub(crate) name: Name,
    pub(crate) sources: BTreeSet<VolumeId>,
    pub(crate) parameters: Parameters,
}

impl TryFrom<v1::CreateVolumeGroupSnapshotRequest> for CreateGroup {
    type Error = Invalid;

    fn try_from(request: v1::CreateVolumeGroupSnapshotRequest) -> Parsed<Self> {
        let name = id("name", &request.name)?;
        if request.source_volume_ids.is_empty() {
            return Err(missing("source_volume_ids"));
        }
        let sources = set_of("source_volume_ids", &request.source_volume_ids)?;
        Ok(Self { name, sources, parameters: map("parameters", request.parameters)? })
    }
}

fn set_of<T: Ord + std::str::FromStr<Err = berth_core::InvalidId>>(
    field: &str,
    texts: &[String],
) -> Parsed<BTreeSet<T>> {
    let mut set = BTreeSet::new();
    for text in texts {
        if !set.insert(id(field, text)?) {
            return Err(Invalid(format!("{field} holds {text:?} twice")));
        }
    }
    Ok(set)
}

/// The arguments of DeleteVolumeGroupSnapshot and GetVolumeGroupSnapshot.
#[derive(Debug, Clone)]
pub(crate) struct OneGroup {
    pub(crate) id: GroupSnapshotId,
    /// The members the caller knows of.
    pub(crate) members: BTreeSet<SnapshotId>,
}

macro_rules! names_one_group {
    ($($request:ident),*) => {$(
        impl TryFrom<v1::$request> for OneGroup {
            type Error = Invalid;

            fn try_from(request: v1::$request) -> Parsed<Self> {
                Ok(Self {
                    id: id("group_snapshot_id", &request.group_snapshot_id)?,
                    members: set_of("snapshot_ids", &request.snapshot_ids)?,
                })
            }
        }
    )*};
}
names_one_group!(DeleteVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotRequest);

/// The arguments of GetMetadataAllocated.
#[derive(Debug, Clone)]
pub(crate) struct Allocated {
    pub(crate) snapshot: SnapshotId,
    pub(crate) part: Part,
}

/// The arguments of GetMetadataDelta.
#[derive(Debug, Clone)]
pub(crate) struct Delta {
    pub(crate) base: SnapshotId,
    pub(crate) target: SnapshotId,
    pub(crate) part: Part,
}

/// From where on, and how many ranges per message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// As it came: the spec wants OUT_OF_RANGE for a negative one too, which only a known size makes a sentence of.
    pub(crate) starting_offset: i64,
    pub(crate) ranges_per_message: usize,
}

fn part(starting_offset: i64, max_results: i32) -> Parsed<Part> {
    let wanted = at_most("max_results", max_results)?.unwrap_or(DEFAULT_RANGES);
    Ok(Part { starting_offset, ranges_per_message: wanted.min(MAX_RANGES) })
}

impl TryFrom<v1::GetMetadataAllocatedRequest> for Allocated {
    type Error = Invalid;

    fn try_from(request: v1::GetMetadataAllocatedRequest) -> Parsed<Self> {
        Ok(Self {
            snapshot: id("snapshot_id", &request.snapshot_id)?,
            part: part(request.starting_offset, request.max_results)?,
        })
    }
}

impl TryFrom<v1::GetMetadataDeltaRequest> for Delta {
    type Error = Invalid;

    fn try_from(request: v1::GetMetadataDeltaRequest) -> Parsed<Self> {
        Ok(Self {
            base: id("base_snapshot_id", &request.base_snapshot_id)?,
            target: id("target_snapshot_id", &request.target_snapshot_id)?,
            part: part(request.starting_offset, request.max_results)?,
        })
    }
}
