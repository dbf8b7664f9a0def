//! Object-safe twins of the public traits, made by blanket implementations: backends write plain `async fn`, and the
//! services are compiled once, at the price of one box per call.
#![expect(
    clippy::elidable_lifetime_names,
    reason = "the macro names the lifetime for the methods that need it"
)]

use std::{
    collections::BTreeMap,
    future::Future,
    path::{Path, PathBuf},
    pin::Pin,
};

use berth_core::{
    CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology, VolumeCapability, VolumeId,
};
use berth_host::mount::Attributes;

use crate::{
    Attachment, AvailableCapacity, Blocks, CapacityInfo, ChangedBlocks, Cloning, Condition, Context,
    Expanded, Expansion, GroupSnapshot, GroupSnapshots, Health, InlineVolumes, Listing, Modification,
    NewSnapshot, NewVolume, NodeExpanded, NodeExpansion, NodeHealth, NodeVolume, Page, PageRequest,
    Parameters, Placement, ReadOnlyAttachment, Readiness, Result, Snapshot, Snapshots, Source, Sources,
    StagedVolume, Staging, Stats, Supports, TargetMounts, TopologyRequirement, Usage, Volume, Volumes,
};

pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// `Twin = Trait [where the trait has a plan: <P>] { async methods; plain: methods that are not async }`.
macro_rules! twin {
    (
        $twin:ident = $trait:ident {
            $(async $name:ident($($argument:ident: $type:ty),*) -> $output:ty;)*
            $(plain $plain:ident($($plain_argument:ident: $plain_type:ty),*) -> $plain_output:ty;)*
        }
    ) => {
        pub(crate) trait $twin: Send + Sync {
            $(fn $name<'a>(&'a self, $($argument: $type),*) -> Boxed<'a, $output>;)*
            $(fn $plain(&self, $($plain_argument: $plain_type),*) -> $plain_output;)*
        }

        impl<T: $trait> $twin for T {
            $(fn $name<'a>(&'a self, $($argument: $type),*) -> Boxed<'a, $output> {
                Box::pin(<T as $trait>::$name(self, $($argument),*))
            })*
            $(fn $plain(&self, $($plain_argument: $plain_type),*) -> $plain_output {
                <T as $trait>::$plain(self, $($plain_argument),*)
            })*
        }
    };
    (
        $twin:ident<P> = $trait:ident {
            $(async $name:ident($($argument:ident: $type:ty),*) -> $output:ty;)*
            $(plain $plain:ident($($plain_argument:ident: $plain_type:ty),*) -> $plain_output:ty;)*
        }
    ) => {
        pub(crate) trait $twin<P>: Send + Sync {
            $(fn $name<'a>(&'a self, $($argument: $type),*) -> Boxed<'a, $output> where P: 'a;)*
            $(fn $plain(&self, $($plain_argument: $plain_type),*) -> $plain_output;)*
        }

        impl<P, T: $trait<Plan = P>> $twin<P> for T {
            $(fn $name<'a>(&'a self, $($argument: $type),*) -> Boxed<'a, $output> where P: 'a {
                Box::pin(<T as $trait>::$name(self, $($argument),*))
            })*
            $(fn $plain(&self, $($plain_argument: $plain_type),*) -> $plain_output {
                <T as $trait>::$plain(self, $($plain_argument),*)
            })*
        }
    };
}

// Those with a plan end in `compose::Provisioner`, the only place where the plan's type is forgotten.
twin! { DynVolumes<P> = Volumes {
    async find(ctx: &'a Context, plan: &'a P) -> Option<Volume>;
    async create(ctx: &'a Context, plan: P) -> Volume;
    async get(ctx: &'a Context, id: &'a VolumeId) -> Option<Volume>;
    async delete(ctx: &'a Context, id: &'a VolumeId) -> ();
    plain supports() -> Supports;
    plain plan(ctx: &Context, new: &NewVolume) -> Result<P>;
    plain check(ctx: &Context, new: &NewVolume) -> Result<()>;
    plain agrees(volume: &Volume, known: &Parameters, pair: (&str, &str)) -> bool;
} }
twin! { DynCloning<P> = Cloning {
    async clone_volume(ctx: &'a Context, plan: P, source: &'a Volume) -> Volume;
} }
twin! { DynRestoring<P> = Snapshots {
    async restore(ctx: &'a Context, plan: P, snapshot: &'a Snapshot) -> Volume;
} }
twin! { DynPlacement<P> = Placement {
    async place(ctx: &'a Context, plan: &'a mut P, wanted: Option<&'a TopologyRequirement>) -> Topology;
    plain canonical(topology: Topology) -> Topology;
} }
twin! { DynListing = Listing {
    async list(ctx: &'a Context, page: &'a PageRequest) -> Page<Volume>;
} }
twin! { DynCapacityInfo = CapacityInfo {
    async available_capacity(
        ctx: &'a Context, parameters: &'a Parameters, topology: Option<&'a Topology>
    ) -> AvailableCapacity;
} }
twin! { DynAttachment = Attachment {
    async attach(
        ctx: &'a Context, volume: &'a Volume, node: &'a NodeId, capability: &'a VolumeCapability
    ) -> BTreeMap<String, String>;
    async detach(ctx: &'a Context, id: &'a VolumeId, node: Option<&'a NodeId>) -> ();
    plain knows_attachments() -> bool;
} }
twin! { DynReadOnlyAttachment = ReadOnlyAttachment {
    async attach_read_only(
        ctx: &'a Context, volume: &'a Volume, node: &'a NodeId, capability: &'a VolumeCapability
    ) -> BTreeMap<String, String>;
} }
twin! { DynExpansion = Expansion {
    async expand(ctx: &'a Context, volume: &'a Volume, range: CapacityRange) -> Expanded;
    plain online() -> bool;
} }
twin! { DynModification = Modification {
    async modify(ctx: &'a Context, volume: &'a Volume, mutable: Parameters) -> ();
} }
twin! { DynSnapshots = Snapshots {
    async find_snapshot(ctx: &'a Context, new: &'a NewSnapshot) -> Option<Snapshot>;
    async take_snapshot(ctx: &'a Context, new: NewSnapshot, source: &'a Volume) -> Snapshot;
    async snapshot(ctx: &'a Context, id: &'a SnapshotId) -> Option<Snapshot>;
    async delete_snapshot(ctx: &'a Context, id: &'a SnapshotId) -> ();
    async list_snapshots(
        ctx: &'a Context, source: Option<&'a VolumeId>, page: &'a PageRequest
    ) -> Page<Snapshot>;
    plain progress(id: &SnapshotId) -> Option<String>;
} }
twin! { DynGroupSnapshots = GroupSnapshots {
    async find_group(ctx: &'a Context, name: &'a Name) -> Option<GroupSnapshot>;
    async take_group_snapshot(
        ctx: &'a Context, name: &'a Name, sources: &'a [Volume], parameters: &'a Parameters
    ) -> GroupSnapshot;
    async group(ctx: &'a Context, id: &'a GroupSnapshotId) -> Option<GroupSnapshot>;
    async delete_group(ctx: &'a Context, id: &'a GroupSnapshotId) -> ();
} }
twin! { DynChangedBlocks = ChangedBlocks {
    async allocated(ctx: &'a Context, snapshot: &'a Snapshot, from: u64) -> Blocks;
    async changed(ctx: &'a Context, base: &'a Snapshot, target: &'a Snapshot, from: u64) -> Blocks;
} }
twin! { DynHealth = Health {
    async health(ctx: &'a Context, id: &'a VolumeId) -> Vec<Condition>;
    async list_unhealthy(ctx: &'a Context, page: &'a PageRequest) -> Page<(VolumeId, Vec<Condition>)>;
} }
twin! { DynReadiness = Readiness {
    async ready() -> ();
} }
twin! { DynSources = Sources {
    async check(ctx: &'a Context, volume: &'a NodeVolume) -> ();
    async source(ctx: &'a Context, volume: &'a NodeVolume) -> Source;
} }
twin! { DynTargetMounts = TargetMounts {
    async is_mounted(target: &'a Path) -> bool;
    async bind(source: &'a Source, target: &'a Path, attributes: Attributes) -> ();
    async unmount(target: &'a Path) -> ();
} }
twin! { DynStaging = Staging {
    async stage(ctx: &'a Context, volume: &'a NodeVolume, staging: &'a Path) -> ();
    async unstage(ctx: &'a Context, id: &'a VolumeId, staging: &'a Path) -> ();
    async recover(staged: Vec<StagedVolume>) -> ();
} }
twin! { DynStats = Stats {
    async usage(ctx: &'a Context, id: &'a VolumeId, path: &'a Path) -> Usage;
} }
twin! { DynNodeExpansion = NodeExpansion {
    async expand_on_node(
        ctx: &'a Context, id: &'a VolumeId, path: &'a Path, range: CapacityRange
    ) -> NodeExpanded;
} }
twin! { DynNodeHealth = NodeHealth {
    async volume_health(
        ctx: &'a Context, id: &'a VolumeId, staging: Option<&'a Path>, targets: &'a [PathBuf]
    ) -> Vec<Condition>;
    async storage_health(ctx: &'a Context) -> Vec<Condition>;
} }
twin! { DynInlineVolumes = InlineVolumes {
    async find_inline(ctx: &'a Context, name: &'a Name) -> Option<Volume>;
} }
