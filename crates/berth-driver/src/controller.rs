//! The controller's side of a driver: one trait for each capability, and the types they speak.
//!
//! The framework has parsed the request, refused what the spec refuses, compared it with what exists, and holds the
//! locks of every volume and snapshot named, before it calls a method. So a method is called for one volume at a time
//! and only when there is something to do.
//!
//! What a backend guarantees: `Ok` is durable, so that a crash right after it loses nothing; an error leaves nothing
//! behind, or something that the same call or the next start removes; every method can be called again after a crash
//! at any point. No method has a default that refuses: a capability that a backend lacks is a trait that it does not
//! implement.

use std::{collections::BTreeMap, future::Future, sync::Arc, time::SystemTime};

use berth_core::{
    AccessKind, AccessMode, Capacity, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology,
    VolumeCapability, VolumeId,
};

use crate::{Context, Error, Result};

/// Parameters as a StorageClass, VolumeAttributesClass or VolumeSnapshotClass gives them.
pub type Parameters = BTreeMap<String, String>;

/// Where a volume's first content comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentSource {
    /// A snapshot is restored.
    Snapshot(SnapshotId),
    /// Another volume, as it is now.
    Volume(VolumeId),
}

/// A volume to create. Its content source, if it has one, is an argument of [`Cloning::clone_volume`] or
/// [`Snapshots::restore`], so that no backend can overlook it.
#[derive(Debug, Clone)]
pub struct NewVolume {
    /// Makes the creation idempotent.
    pub name: Name,
    /// The sizes that the caller accepts.
    pub range: CapacityRange,
    /// How it will be used; at least one, all of one access kind.
    pub capabilities: Vec<VolumeCapability>,
    /// The parameters of the StorageClass.
    pub parameters: Parameters,
    /// The class's mutable parameters.
    pub mutable: Parameters,
    /// Whether it belongs to one pod and is removed with it.
    pub ephemeral: bool,
}

impl NewVolume {
    /// Filesystem or raw device.
    pub fn access(&self) -> AccessKind {
        self.capabilities.first().map_or(AccessKind::Mount, |capability| capability.access.kind())
    }
}

/// A volume that exists.
#[derive(Debug, Clone)]
pub struct Volume {
    /// What the driver calls it.
    pub id: VolumeId,
    /// The size that the caller gets as the answer.
    pub capacity: Capacity,
    /// Filesystem or raw device; `None` where the storage does not remember it, as for disks of a cloud.
    pub access: Option<AccessKind>,
    /// The parameters it was created with.
    pub parameters: Arc<Parameters>,
    /// The mutable parameters now in force.
    pub mutable: Arc<Parameters>,
    /// What the node needs to know about it.
    pub context: BTreeMap<String, String>,
    /// Where its first content came from.
    pub source: Option<ContentSource>,
    /// Where it can be used; everywhere if `None`.
    pub topology: Option<Arc<Topology>>,
    /// The nodes it is attached to.
    pub attachments: Vec<Attached>,
    /// Whether it belongs to one pod and is removed with it, as [`NewVolume::ephemeral`] said.
    pub ephemeral: bool,
}

impl Volume {
    /// A volume for filesystem access, of which nothing else is known.
    pub fn new(id: VolumeId, capacity: Capacity) -> Self {
        Self {
            id,
            capacity,
            access: Some(AccessKind::Mount),
            parameters: Arc::default(),
            mutable: Arc::default(),
            context: BTreeMap::new(),
            source: None,
            topology: None,
            attachments: Vec::new(),
            ephemeral: false,
        }
    }

    /// The same with a pair that the node will find in [`crate::NodeVolume::context`].
    #[must_use]
    pub fn with_context(mut self, key: &str, value: impl Into<String>) -> Self {
        self.context.insert(key.to_owned(), value.into());
        self
    }
}

/// A volume's attachment to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// The node that has it.
    pub node: NodeId,
    /// Attached for reading only.
    pub read_only: bool,
    /// The access mode, where the storage remembers it.
    pub mode: Option<AccessMode>,
}

/// What volumes can be used as; everything else is refused before a backend is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supports {
    pub(crate) block: bool,
    pub(crate) many_nodes: bool,
}

impl Supports {
    /// Filesystems, used on one node at a time.
    pub const fn filesystem() -> Self {
        Self { block: false, many_nodes: false }
    }

    /// Volumes can also be used as raw block devices.
    #[must_use]
    pub const fn and_block(mut self) -> Self {
        self.block = true;
        self
    }

    /// And access modes for several nodes at a time.
    #[must_use]
    pub const fn on_many_nodes(mut self) -> Self {
        self.many_nodes = true;
        self
    }
}

/// One page of a listing in a stable order.
#[derive(Debug)]
pub struct Page<T> {
    /// The entries of this page.
    pub entries: Vec<T>,
    /// Where the next page starts, if there is more.
    pub next: Option<String>,
}

/// Where a page starts and how long it may be.
#[derive(Debug, Clone)]
pub struct PageRequest {
    /// The previous page's `next`. A backend answers a token it never gave with [`Error::Busy`], which travels as
    /// ABORTED, the spec's code for it.
    pub after: Option<String>,
    /// The most entries that the page may have.
    pub limit: usize,
}

/// The topologies of which a volume or snapshot has to be accessible from one; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyRequirement {
    /// All that are acceptable.
    pub requisite: Vec<Topology>,
    /// Those that are better than others, the best first.
    pub preferred: Vec<Topology>,
}

impl TopologyRequirement {
    fn all(&self) -> impl Iterator<Item = &Topology> {
        // The preferred ones are among the requisite ones wherever both are given.
        self.requisite.iter().chain(&self.preferred)
    }

    /// Whether a thing with that topology is where the caller wants it; a thing without one is everywhere. One that a whole
    /// zone reaches is reached by each node of the zone, so either may say more than the other.
    pub fn accepts(&self, topology: Option<&Topology>) -> bool {
        let fits = |own: &Topology, wanted: &Topology| own.satisfies(wanted) || wanted.satisfies(own);
        topology.is_none_or(|own| self.all().any(|wanted| fits(own, wanted)))
    }

    /// Whether this topology is named and no other.
    pub(crate) fn names_only(&self, topology: &Topology) -> bool {
        self.all().all(|wanted| wanted == topology)
    }

    /// Refuses what is to be where the storage is not, which is at `here`.
    pub fn check(wanted: Option<&Self>, here: Option<&Topology>) -> Result<()> {
        match wanted {
            Some(wanted) if !wanted.accepts(here) => {
                let here = here.map(ToString::to_string).unwrap_or_default();
                Err(Error::Exhausted(format!(
                    "nothing can be made at {wanted}; this driver's storage is at {here}"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Display for TopologyRequirement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: Vec<String> = self.all().map(ToString::to_string).collect();
        f.write_str(&all.join(" or "))
    }
}

/// Volumes that the storage itself remembers: it can be asked for what a creation would make, and for an id.
/// Storage that remembers nothing implements [`crate::Provision`] instead.
pub trait Volumes: Send + Sync + 'static {
    /// All that a creation needs, read once from the request.
    type Plan: Send + Sync + 'static;

    /// What volumes can be used as.
    fn supports(&self) -> Supports {
        Supports::filesystem()
    }

    /// Reads a request and refuses what can never work, without I/O.
    fn plan(&self, ctx: &Context, new: &NewVolume) -> Result<Self::Plan>;

    /// Refuses what can never work; answers ValidateVolumeCapabilities and GetCapacity, where nothing is made and the
    /// name is not one of the caller's.
    fn check(&self, ctx: &Context, new: &NewVolume) -> Result<()> {
        self.plan(ctx, new).map(drop)
    }

    /// Whether a pair of a context or of a class's parameters is so, by the pairs that the volume is known to have.
    fn agrees(&self, _volume: &Volume, known: &Parameters, (key, value): (&str, &str)) -> bool {
        known.get(key).is_some_and(|known| known == value)
    }

    /// The volume that the plan would make, if it exists.
    fn find(&self, ctx: &Context, plan: &Self::Plan) -> impl Future<Output = Result<Option<Volume>>> + Send;

    /// Makes the planned volume, empty. `Ok` means that it is durable.
    fn create(&self, ctx: &Context, plan: Self::Plan) -> impl Future<Output = Result<Volume>> + Send;

    /// The volume of that id.
    fn get(&self, ctx: &Context, id: &VolumeId) -> impl Future<Output = Result<Option<Volume>>> + Send;

    /// Removes it, or what a creation or deletion that failed has left of it; `Ok` if nothing is there,
    /// [`Error::Precondition`] if something still needs it.
    fn delete(&self, ctx: &Context, id: &VolumeId) -> impl Future<Output = Result<()>> + Send;
}

/// Volumes can be made of volumes.
pub trait Cloning: Volumes {
    /// As [`Volumes::create`], with the content that `source` has now.
    fn clone_volume(
        &self,
        ctx: &Context,
        plan: Self::Plan,
        source: &Volume,
    ) -> impl Future<Output = Result<Volume>> + Send;
}

/// Volumes can be listed.
pub trait Listing: Send + Sync + 'static {
    /// Volumes in the order of their ids, with their attachments.
    fn list(&self, ctx: &Context, page: &PageRequest) -> impl Future<Output = Result<Page<Volume>>> + Send;
}

/// Volumes are accessible only from some topologies.
pub trait Placement: Volumes {
    /// The same topology in the keys that the topologies of volumes have, where a caller may use others for the same.
    fn canonical(&self, topology: Topology) -> Topology {
        topology
    }

    /// Chooses a topology that the caller accepts and notes it in the plan; [`Error::Exhausted`] if there is none.
    /// Called only for a volume that is to be made.
    fn place(
        &self,
        ctx: &Context,
        plan: &mut Self::Plan,
        wanted: Option<&TopologyRequirement>,
    ) -> impl Future<Output = Result<Topology>> + Send;
}

/// How much can still be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AvailableCapacity {
    /// The bytes that can still be provisioned in all.
    pub available: Capacity,
    /// The largest volume that can be provisioned.
    pub largest_volume: Option<Capacity>,
    /// The smallest volume that can be provisioned.
    pub smallest_volume: Option<Capacity>,
}

/// The storage knows how much can still be created.
pub trait CapacityInfo: Send + Sync + 'static {
    /// With these parameters in that topology; nothing in one that is not the storage's.
    fn available_capacity(
        &self,
        ctx: &Context,
        parameters: &Parameters,
        topology: Option<&Topology>,
    ) -> impl Future<Output = Result<AvailableCapacity>> + Send;
}

/// Volumes must be attached to a node before it can use them.
pub trait Attachment: Send + Sync + 'static {
    /// Whether [`Volume::attachments`] has every attachment. Storage that cannot say so is asked to detach a volume also
    /// where none is listed.
    fn knows_attachments(&self) -> bool {
        true
    }

    /// Attaches and waits until it is done; [`Error::NotFound`] for an unknown node, [`Error::Exhausted`] at the
    /// node's limit. What it returns reaches the node as [`crate::NodeVolume::publish_context`]. Repeated for the same
    /// node, it answers the same. Whether the volume's other attachments allow it has been checked.
    fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> impl Future<Output = Result<BTreeMap<String, String>>> + Send;

    /// Detaches from the node, or from all.
    fn detach(
        &self,
        ctx: &Context,
        id: &VolumeId,
        node: Option<&NodeId>,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// Volumes can be attached so that the node cannot write.
pub trait ReadOnlyAttachment: Attachment {
    /// Attaches the volume as [`Attachment::attach`] does, for reading only.
    fn attach_read_only(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> impl Future<Output = Result<BTreeMap<String, String>>> + Send;
}

/// The outcome of growing a volume from the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expanded {
    /// The volume's size from now on.
    pub capacity: Capacity,
    /// Whether the node has to grow the filesystem too.
    pub node_expansion_required: bool,
}

/// Volumes can be made larger.
pub trait Expansion: Send + Sync + 'static {
    /// Whether also while they are in use.
    fn online(&self) -> bool {
        true
    }

    /// Grows to a size in the range; never asked to shrink.
    fn expand(
        &self,
        ctx: &Context,
        volume: &Volume,
        range: CapacityRange,
    ) -> impl Future<Output = Result<Expanded>> + Send;
}

/// Volumes have parameters that can change.
pub trait Modification: Send + Sync + 'static {
    /// Applies mutable parameters, all or none.
    fn modify(
        &self,
        ctx: &Context,
        volume: &Volume,
        mutable: Parameters,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// A snapshot to take.
#[derive(Debug, Clone)]
pub struct NewSnapshot {
    /// The caller's name for it, which makes a repeated call mean the same snapshot.
    pub name: Name,
    /// The volume that it is of.
    pub source: VolumeId,
    /// The snapshot class's parameters.
    pub parameters: Parameters,
}

/// A snapshot that exists.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// What the driver calls it.
    pub id: SnapshotId,
    /// The volume it was taken of.
    pub source: VolumeId,
    /// The least size of a volume restored from it.
    pub size: Capacity,
    /// Filesystem or raw device; `None` where the storage does not remember it.
    pub access: Option<AccessKind>,
    /// When it was taken.
    pub created: SystemTime,
    /// Whether volumes can be made of it already.
    pub ready: bool,
    /// The group it was taken with.
    pub group: Option<GroupSnapshotId>,
    /// Where it can be used; everywhere if `None`.
    pub topology: Option<Arc<Topology>>,
}

/// Snapshots can be taken, and volumes made of them.
pub trait Snapshots: Volumes {
    /// The snapshot that taking this one would give, if it exists.
    fn find_snapshot(
        &self,
        ctx: &Context,
        new: &NewSnapshot,
    ) -> impl Future<Output = Result<Option<Snapshot>>> + Send;

    /// Takes a snapshot; `ready` is false while the content is fixed but not yet copied.
    fn take_snapshot(
        &self,
        ctx: &Context,
        new: NewSnapshot,
        source: &Volume,
    ) -> impl Future<Output = Result<Snapshot>> + Send;

    /// The snapshot of that id.
    fn snapshot(
        &self,
        ctx: &Context,
        id: &SnapshotId,
    ) -> impl Future<Output = Result<Option<Snapshot>>> + Send;

    /// Removes a snapshot that belongs to no group, or what is left of it; `Ok` if nothing is there.
    fn delete_snapshot(&self, ctx: &Context, id: &SnapshotId) -> impl Future<Output = Result<()>> + Send;

    /// Snapshots in the order of their ids, all or those of one volume.
    fn list_snapshots(
        &self,
        ctx: &Context,
        source: Option<&VolumeId>,
        page: &PageRequest,
    ) -> impl Future<Output = Result<Page<Snapshot>>> + Send;

    /// As [`Volumes::create`], with the snapshot's content.
    fn restore(
        &self,
        ctx: &Context,
        plan: Self::Plan,
        snapshot: &Snapshot,
    ) -> impl Future<Output = Result<Volume>> + Send;

    /// How far a snapshot is that is not ready, in words for people, such as "copied 1 GiB of 4 GiB (25 %)".
    fn progress(&self, _id: &SnapshotId) -> Option<String> {
        None
    }
}

/// Snapshots taken at one instant.
#[derive(Debug, Clone)]
pub struct GroupSnapshot {
    /// What the driver calls the group.
    pub id: GroupSnapshotId,
    /// The snapshots of its members.
    pub snapshots: Vec<Snapshot>,
    /// The instant at which all of them were taken.
    pub created: SystemTime,
}

/// Snapshots of several volumes can be taken at one instant.
pub trait GroupSnapshots: Snapshots {
    /// The group of that name.
    fn find_group(
        &self,
        ctx: &Context,
        name: &Name,
    ) -> impl Future<Output = Result<Option<GroupSnapshot>>> + Send;

    /// Takes snapshots of all the volumes.
    fn take_group_snapshot(
        &self,
        ctx: &Context,
        name: &Name,
        sources: &[Volume],
        parameters: &Parameters,
    ) -> impl Future<Output = Result<GroupSnapshot>> + Send;

    /// The group of that id.
    fn group(
        &self,
        ctx: &Context,
        id: &GroupSnapshotId,
    ) -> impl Future<Output = Result<Option<GroupSnapshot>>> + Send;

    /// Removes a group and all its snapshots; `Ok` if it is not there.
    fn delete_group(&self, ctx: &Context, id: &GroupSnapshotId) -> impl Future<Output = Result<()>> + Send;
}

/// A part of a raw volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// In bytes from the start.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// The parts of a snapshot that hold data or changed, produced lazily on a blocking thread.
pub struct Blocks {
    /// The volume's size when the snapshot was taken.
    pub capacity: Capacity,
    /// Whether every range has the same length.
    pub fixed_length: bool,
    /// The ranges, in ascending order of their offsets.
    pub ranges: Box<dyn Iterator<Item = Result<BlockRange>> + Send>,
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blocks").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// The storage knows which blocks a snapshot of a raw volume holds.
pub trait ChangedBlocks: Snapshots {
    /// The parts that hold data, from an offset on.
    fn allocated(
        &self,
        ctx: &Context,
        snapshot: &Snapshot,
        from: u64,
    ) -> impl Future<Output = Result<Blocks>> + Send;

    /// The parts in which two snapshots of one volume differ, from an offset on.
    fn changed(
        &self,
        ctx: &Context,
        base: &Snapshot,
        target: &Snapshot,
        from: u64,
    ) -> impl Future<Output = Result<Blocks>> + Send;
}

/// How bad a condition is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Usable, but not as it should be.
    Degraded,
    /// Cannot be used now.
    Inaccessible,
    /// Data is or seems to be gone.
    DataLoss,
}

/// Something that is wrong with a volume or with the storage below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// How much the volume suffers.
    pub severity: Severity,
    /// One CamelCase word for machines.
    pub reason: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// The storage knows what is wrong with its volumes.
pub trait Health: Send + Sync + 'static {
    /// What is wrong with a volume; nothing if empty. [`Error::NotFound`] for one that never was; a volume whose
    /// record is damaged is answered here although [`Volumes::get`] no longer knows it.
    fn health(&self, ctx: &Context, id: &VolumeId) -> impl Future<Output = Result<Vec<Condition>>> + Send;

    /// Volumes with which something is wrong, in the order of their ids.
    fn list_unhealthy(
        &self,
        ctx: &Context,
        page: &PageRequest,
    ) -> impl Future<Output = Result<Page<(VolumeId, Vec<Condition>)>>> + Send;
}

/// Whether the storage can be used now.
pub trait Readiness: Send + Sync + 'static {
    /// Answers Probe; the error is a sentence why not.
    fn ready(&self) -> impl Future<Output = Result<()>> + Send;
}
