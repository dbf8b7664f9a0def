//! A framework for CSI drivers: implement a few small traits, compose them, serve the result.
//!
//! What a driver announces follows from what it was composed of ([`Driver`], [`Controller`], [`Node`]). The framework
//! owns what is the same for every driver: gRPC, parsing, the spec's error tables, idempotency, locks,
//! the record of what is mounted, recovery after a crash, mounts, deadlines and secrets ([`services`]). A backend sees
//! neither CSI nor Kubernetes, only the types of `berth-core`.

mod announce;
pub mod backend;
mod call;
mod compose;
mod context;
mod controller;
mod erased;
mod error;
mod features;
mod ledger;
#[doc(hidden)]
pub mod legacy;
mod locks;
mod node;
pub mod services;
mod target;

pub use announce::Announced;
pub use backend::Backend;
pub use compose::{Controller, ControllerBuilder, Driver, Node};
pub use context::{Claim, Context, Pod, Secrets};
pub use controller::{
    Attached, Attachment, AvailableCapacity, BlockRange, Blocks, CapacityInfo, ChangedBlocks, Cloning,
    Condition, ContentSource, Expanded, Expansion, GroupSnapshot, GroupSnapshots, Health, Listing,
    Modification, NewSnapshot, NewVolume, Page, PageRequest, Parameters, Placement, ReadOnlyAttachment,
    Readiness, Severity, Snapshot, Snapshots, Supports, TopologyRequirement, Volume, Volumes,
};
pub use error::{Error, Result};
pub use features::{Feature, Features};
pub use node::{
    Amounts, InlineVolumes, MachineMounts, NodeExpanded, NodeExpansion, NodeHealth, NodeVolume, Source,
    Sources, StagedVolume, Staging, Stats, TargetMounts, Usage,
};
pub use services::Services;
