//! A framework for CSI drivers: implement a few small traits, compose them, serve the result.
//!
//! This is a whole driver, `examples/mycsi`; copy it to begin with. It depends on nothing but this crate, and can live
//! in any repository: `berth-driver = { git = "<this repository>" }`.
//! ```no_run
#![doc = include_str!("../../../examples/mycsi/src/main.rs")]
//! ```
//! Storage that remembers its volumes itself implements [`Volumes`] instead of [`Provision`]; further traits are
//! further capabilities (snapshots, attachment, expansion, …), and one line each in the composition. What a driver
//! announces follows from what it was composed of ([`Driver`], [`Controller`], [`Node`]).
//!
//! The framework owns what is the same for every driver: gRPC, parsing, the spec's error tables, idempotency, locks,
//! the record of what is mounted, recovery after a crash, mounts, deadlines, secrets, registration. A backend sees
//! neither CSI nor Kubernetes, only the types of `berth-core`, of which those that the traits use are re-exported.

mod announce;
mod call;
mod compose;
mod context;
mod controller;
mod erased;
mod error;
mod ledger;
mod locks;
mod node;
mod parameters;
mod recorded;
mod serve;
pub mod services;

pub use announce::Announced;
pub use compose::{Controller, ControllerBuilder, Driver, Node};
pub use context::{Claim, Context, Pod, Secrets};
pub use controller::{
    Attached, Attachment, AvailableCapacity, BlockRange, Blocks, CapacityInfo, ChangedBlocks, Cloning,
    Condition, ContentSource, Expanded, Expansion, GroupSnapshot, GroupSnapshots, Health, Listing,
    Modification, NewSnapshot, NewVolume, Page, PageRequest, Parameters, Placement, ReadOnlyAttachment,
    Readiness, Severity, Snapshot, Snapshots, Supports, TopologyRequirement, Volume, Volumes,
};
pub use error::{Error, Result};
pub use node::{
    Amounts, InlineVolumes, MachineMounts, NodeExpanded, NodeExpansion, NodeHealth, NodeVolume, Source,
    Sources, StagedVolume, Staging, Stats, TargetMounts, Usage, blocking,
};
pub use parameters::{FromParameters, InvalidParameter};
pub use recorded::{
    Provision, ProvisionAttachment, ProvisionCloning, ProvisionExpansion, ProvisionSnapshots, Recorded,
};
pub use serve::Options;
pub use services::Services;

pub use berth_core::{
    Access, AccessKind, AccessMode, Capacity, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId,
    Topology, VolumeCapability, VolumeId,
};

/// What the file of a small driver needs.
pub mod prelude {
    pub use crate::{
        Capacity, Context, Controller, Driver, Error, NewVolume, Node, NodeId, NodeVolume, Options,
        Provision, Recorded, Result, Source, Sources, Supports, Volume, VolumeId,
    };
}
