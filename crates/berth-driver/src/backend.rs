//! What a backend is: the trait every kind of storage implements, and the words it speaks.
//!
//! A backend sees neither CSI nor Kubernetes. The services in front of it have already parsed the request, refused
//! what the spec refuses, compared it with what exists, and hold the locks of every volume and snapshot named, so a
//! backend's method is called for one volume at a time and only when there is something to do.
//!
//! Guarantees a backend gives: a method that returned `Ok` is durable (a crash right after it loses nothing); a
//! method that did not leaves nothing behind, or something that its own restart removes; every method can be
//! called again after a crash at any point.

mod error;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use async_trait::async_trait;
use berth_core::{
    AccessKind, Capacity, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology,
    VolumeCapability, VolumeId,
};

use berth_host::mount::{self, Attributes};

pub use self::error::{Error, Result};
use crate::Features;

/// Parameters as the StorageClass (or VolumeAttributesClass, or snapshot class) gives them.
pub type Parameters = BTreeMap<String, String>;

/// The secrets of a call. What is in them is read by name and never formatted.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(BTreeMap<String, String>);

impl Secrets {
    /// The secret of that name; upper and lower case are the same.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

impl From<BTreeMap<String, String>> for Secrets {
    fn from(secrets: BTreeMap<String, String>) -> Self {
        Self(secrets)
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets")
    }
}

/// What the secrets of a call are about.
#[derive(Debug, Clone, Copy)]
pub enum About<'a> {
    /// What is made of a class with these parameters.
    Class(&'a Parameters),
    /// A volume.
    Volume(&'a VolumeId),
    /// A snapshot.
    Snapshot(&'a SnapshotId),
}

/// Where a volume's first content comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentSource {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// Another volume, as it is now.
    Volume(VolumeId),
}

/// A volume to create. Its name is not taken, its source exists, its capabilities agree with each other.
#[derive(Debug, Clone)]
pub struct NewVolume {
    /// Makes the creation idempotent.
    pub name: Name,
    /// The sizes the caller takes.
    pub range: CapacityRange,
    /// How it will be used; at least one, all of one access kind.
    pub capabilities: Vec<VolumeCapability>,
    /// The class's parameters.
    pub parameters: Parameters,
    /// The class's mutable parameters.
    pub mutable: Parameters,
    /// Its first content.
    pub source: Option<ContentSource>,
    /// Whether it belongs to one pod and goes with it.
    pub ephemeral: bool,
}

/// A volume that exists.
#[derive(Debug, Clone)]
pub struct Volume {
    /// What the driver calls it.
    pub id: VolumeId,
    /// Its size.
    pub capacity: Capacity,
    /// Filesystem or raw device.
    pub access: AccessKind,
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
    pub attachments: Vec<Attachment>,
    /// Whether it belongs to one pod and goes with it, as [`NewVolume::ephemeral`] said.
    pub ephemeral: bool,
}

/// A volume's presence on a node, from the controller's side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The node.
    pub node: NodeId,
    /// Attached for reading only.
    pub read_only: bool,
    /// With this mode.
    pub mode: berth_core::AccessMode,
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
    /// Filesystem or raw device.
    pub access: AccessKind,
    /// When it was taken.
    pub created: SystemTime,
    /// Whether volumes can be made of it already.
    pub ready: bool,
    /// The group it was taken with.
    pub group: Option<GroupSnapshotId>,
    /// Where it can be used; everywhere if `None`.
    pub topology: Option<Arc<Topology>>,
}

/// Snapshots taken at one instant.
#[derive(Debug, Clone)]
pub struct GroupSnapshot {
    /// What the driver calls the group.
    pub id: GroupSnapshotId,
    /// Its members.
    pub snapshots: Vec<Snapshot>,
    /// The instant.
    pub created: SystemTime,
}

/// One page of a listing in a stable order.
#[derive(Debug)]
pub struct Page<T> {
    /// The entries.
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
    /// The most entries.
    pub limit: usize,
}

/// How much can still be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// In all.
    pub available: Capacity,
    /// As one volume.
    pub largest_volume: Option<Capacity>,
    /// At least.
    pub smallest_volume: Option<Capacity>,
}

/// The outcome of growing a volume from the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expanded {
    /// The size now.
    pub capacity: Capacity,
    /// Whether the node has to grow the filesystem too.
    pub node_expansion_required: bool,
}

/// The outcome of growing a volume on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeExpansion {
    /// Everything on it has this size now.
    Done(Capacity),
    /// This machine can grow it only while it is not mounted: the front unpublishes, unstages, stages (which grows)
    /// and publishes again, if nobody is using it.
    NeedsRemount,
}

/// How bad a volume's condition is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Usable, not as it should be.
    Degraded,
    /// Cannot be used now.
    Inaccessible,
    /// Data is or seems to be gone.
    DataLoss,
}

/// Something that is wrong with a volume or with the storage below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// How bad.
    pub severity: Severity,
    /// One CamelCase word for machines.
    pub reason: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// A volume's usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Size and use in bytes.
    pub bytes: Amounts,
    /// Size and use in inodes, for filesystems.
    pub inodes: Option<Amounts>,
}

/// Of one resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amounts {
    /// All there is; 0 where unlimited or unknown.
    pub total: u64,
    /// Taken.
    pub used: u64,
    /// Left.
    pub available: u64,
}

/// A part of a raw volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// In bytes from the start.
    pub offset: u64,
    /// In bytes.
    pub length: u64,
}

/// The parts of a snapshot that hold data or changed, produced lazily on a blocking thread.
pub struct Blocks {
    /// The volume's size when the snapshot was taken.
    pub capacity: Capacity,
    /// Whether every range has the same length.
    pub fixed_length: bool,
    /// In ascending order.
    pub ranges: Box<dyn Iterator<Item = Result<BlockRange>> + Send>,
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blocks").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// A volume that is staged on this node when the driver starts.
#[derive(Debug, Clone)]
pub struct StagedVolume {
    /// Which.
    pub id: VolumeId,
    /// Where.
    pub staging: PathBuf,
    /// How.
    pub capability: VolumeCapability,
}

/// This node, as a place for volumes.
#[derive(Debug, Clone)]
pub struct NodeInfo {
    /// What the driver calls it.
    pub id: NodeId,
    /// How many volumes it takes; no limit if `None`.
    pub max_volumes: Option<u32>,
    /// Where it is.
    pub topology: Option<Topology>,
}

/// How a volume is wanted at a target.
#[derive(Debug, Clone, Copy)]
pub struct Publication<'a> {
    /// Where it is staged, for backends that stage.
    pub staging: Option<&'a Path>,
    /// As what, and with which mount options.
    pub capability: &'a VolumeCapability,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The secrets of the call, where there is one.
    pub secrets: &'a Secrets,
}

/// How volumes are put at targets and taken away; called on threads that may block.
pub trait Mounts: Send + Sync {
    /// Whether something is mounted at the target, and of use.
    fn is_bound(&self, target: &Path) -> Result<bool> {
        Ok(mount::is_mount_point(target)?)
    }
    /// Makes the directory or device of [`Backend::publish_source`] appear at the target.
    fn bind(&self, source: &Path, target: &Path, attributes: Attributes) -> Result<()> {
        Ok(mount::bind(source, target, attributes)?)
    }
    /// What [`Backend::publish_source`] gave could not be put at a target: it is kept no longer for that one's sake.
    fn let_go(&self, _source: &Path) {}
    /// Takes away whatever is mounted at the target.
    fn unbind(&self, target: &Path) -> Result<()> {
        mount::unmount(target)?;
        Ok(())
    }
}

/// Mounts of what is on this machine, which always answers.
#[derive(Debug, Clone, Copy)]
pub struct OnThisMachine;

impl Mounts for OnThisMachine {}

/// A kind of storage. Methods that a backend's [`Features`] do not promise are never called; their defaults refuse.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// What this backend can do.
    fn features(&self) -> Features;

    /// This node.
    fn node(&self) -> NodeInfo;

    /// Whether the backend can work now; a sentence why not otherwise. Answers Probe.
    async fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Called once at start with every volume that is staged on this node: makes sure that they still are (loop
    /// devices are attached again, frozen filesystems thawed) and takes down what belongs to none of them.
    async fn recover(&self, _staged: Vec<StagedVolume>) -> Result<()> {
        Ok(())
    }

    /// Refuses parameters that no volume of these capabilities can have, naming the first.
    async fn check_parameters(
        &self,
        parameters: &Parameters,
        mutable: &Parameters,
        capabilities: &[VolumeCapability],
    ) -> Result<()>;

    /// Told before a call that has secrets: how to reach what it is about.
    fn heed(&self, _about: About<'_>, _secrets: &Secrets) {}

    /// The volume that a creation would make, if it is there. By its name, unless a backend's ids hold more than that.
    async fn find_made(&self, wanted: &NewVolume) -> Result<Option<Volume>> {
        self.find_volume(&wanted.name).await
    }
    /// The volume of that name.
    async fn find_volume(&self, name: &Name) -> Result<Option<Volume>>;
    /// The volume of that id.
    async fn volume(&self, id: &VolumeId) -> Result<Option<Volume>>;
    /// Makes a volume.
    async fn create_volume(&self, new: NewVolume) -> Result<Volume>;
    /// Removes a volume that exists; `Precondition` if something still needs it.
    async fn delete_volume(&self, id: &VolumeId) -> Result<()>;
    /// Removes what a creation or deletion that failed may have left of a volume that does not exist.
    async fn clear_volume(&self, _id: &VolumeId) -> Result<()> {
        Ok(())
    }

    /// Whether a pair of a context or of a class's parameters is so, by what the volume is known to have.
    fn agrees(&self, _volume: &Volume, known: &Parameters, (key, value): (&str, &str)) -> bool {
        known.get(key).is_some_and(|known| known == value)
    }

    /// Volumes in the order of their ids.
    async fn list_volumes(&self, _page: PageRequest) -> Result<Page<Volume>> {
        Err(Error::Unsupported("listing volumes"))
    }
    /// How much can be created with these parameters in that place.
    async fn room(&self, _parameters: &Parameters, _topology: Option<&Topology>) -> Result<Room> {
        Err(Error::Unsupported("capacity"))
    }
    /// Whether a node of that id is known.
    async fn node_exists(&self, node: &NodeId) -> Result<bool> {
        Ok(*node == self.node().id)
    }
    /// How many volumes are attached to the node.
    async fn attached_count(&self, _node: &NodeId) -> Result<usize> {
        Err(Error::Unsupported("attaching"))
    }
    /// Attaches a volume; returns the publish context. Replaces an attachment to the same node.
    async fn attach(&self, _id: &VolumeId, _attachment: Attachment) -> Result<BTreeMap<String, String>> {
        Err(Error::Unsupported("attaching"))
    }
    /// Detaches a volume from one node, or from all.
    async fn detach(&self, _id: &VolumeId, _node: Option<&NodeId>) -> Result<()> {
        Err(Error::Unsupported("detaching"))
    }
    /// Grows a volume to the range's required size; never shrinks.
    async fn expand_volume(&self, _id: &VolumeId, _range: CapacityRange) -> Result<Expanded> {
        Err(Error::Unsupported("expanding"))
    }
    /// Applies mutable parameters, all or none.
    async fn modify_volume(&self, _id: &VolumeId, _mutable: Parameters) -> Result<()> {
        Err(Error::Unsupported("modifying"))
    }
    /// What is wrong with a volume; nothing if empty. `NotFound` for one that never was; a volume whose record is
    /// damaged is answered here although [`Backend::volume`] no longer knows it.
    async fn volume_health(&self, _id: &VolumeId) -> Result<Vec<Condition>> {
        Err(Error::Unsupported("health"))
    }
    /// Volumes with which something is wrong, in the order of their ids.
    async fn list_unhealthy(&self, _page: PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        Err(Error::Unsupported("health"))
    }

    /// The snapshot that taking one would give, if it is there. By its name, unless a backend's ids hold more than that.
    async fn find_taken(
        &self,
        name: &Name,
        _source: &VolumeId,
        _parameters: &Parameters,
    ) -> Result<Option<Snapshot>> {
        self.find_snapshot(name).await
    }
    /// The snapshot of that name.
    async fn find_snapshot(&self, _name: &Name) -> Result<Option<Snapshot>> {
        Err(Error::Unsupported("snapshots"))
    }
    /// The snapshot of that id.
    async fn snapshot(&self, _id: &SnapshotId) -> Result<Option<Snapshot>> {
        Err(Error::Unsupported("snapshots"))
    }
    /// How far a snapshot is that is not ready, in words for people, such as "copied 1 GiB of 4 GiB (25 %)".
    fn snapshot_progress(&self, _id: &SnapshotId) -> Option<String> {
        None
    }
    /// Takes a snapshot of a volume that exists.
    async fn create_snapshot(
        &self,
        _name: Name,
        _source: &VolumeId,
        _parameters: &Parameters,
    ) -> Result<Snapshot> {
        Err(Error::Unsupported("snapshots"))
    }
    /// Removes a snapshot that exists and belongs to no group.
    async fn delete_snapshot(&self, _id: &SnapshotId) -> Result<()> {
        Err(Error::Unsupported("snapshots"))
    }
    /// Snapshots in the order of their ids, all or those of one volume.
    async fn list_snapshots(&self, _source: Option<&VolumeId>, _page: PageRequest) -> Result<Page<Snapshot>> {
        Err(Error::Unsupported("snapshots"))
    }

    /// The group of that name.
    async fn find_group(&self, _name: &Name) -> Result<Option<GroupSnapshot>> {
        Err(Error::Unsupported("group snapshots"))
    }
    /// The group of that id.
    async fn group(&self, _id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        Err(Error::Unsupported("group snapshots"))
    }
    /// Takes snapshots of volumes that exist, at one instant.
    async fn create_group(
        &self,
        _name: Name,
        _sources: &[VolumeId],
        _parameters: &Parameters,
    ) -> Result<GroupSnapshot> {
        Err(Error::Unsupported("group snapshots"))
    }
    /// Removes a group and all its snapshots.
    async fn delete_group(&self, _id: &GroupSnapshotId) -> Result<()> {
        Err(Error::Unsupported("group snapshots"))
    }

    /// The parts of a raw snapshot that hold data, from an offset on.
    async fn allocated_blocks(&self, _snapshot: &SnapshotId, _from: u64) -> Result<Blocks> {
        Err(Error::Unsupported("snapshot metadata"))
    }
    /// The parts in which two raw snapshots of one volume differ, from an offset on.
    async fn changed_blocks(&self, _base: &SnapshotId, _target: &SnapshotId, _from: u64) -> Result<Blocks> {
        Err(Error::Unsupported("snapshot metadata"))
    }

    /// The volume that a call on this node means. A backend that is reached over a network goes by what the caller's
    /// context says, and asks nobody.
    async fn volume_on_node(
        &self,
        id: &VolumeId,
        _context: &BTreeMap<String, String>,
    ) -> Result<Option<Volume>> {
        self.volume(id).await
    }
    /// How volumes are put at targets on this node.
    fn mounts(&self) -> Arc<dyn Mounts> {
        Arc::new(OnThisMachine)
    }
    /// Prepares a volume on this node below the staging path. Idempotent; repairs what a crash left half done.
    async fn stage(&self, volume: &Volume, staging: &Path, capability: &VolumeCapability) -> Result<()>;
    /// Undoes [`Backend::stage`], also half of it, also for a volume that is gone.
    async fn unstage(&self, id: &VolumeId, staging: &Path) -> Result<()>;
    /// The directory or device node that is to be bound at a workload's target path.
    /// `Precondition` if the volume is not (or no longer) prepared at the staging path.
    /// The front mounts what it gets read-only where asked; a raw device must be read-only by itself.
    async fn publish_source(&self, volume: &Volume, how: Publication<'_>) -> Result<PathBuf>;

    /// A volume's usage, seen at a path where it is staged or published.
    async fn usage(&self, _volume: &Volume, _path: &Path) -> Result<Usage> {
        Err(Error::Unsupported("usage"))
    }
    /// Grows what is on the volume to the volume's size, seen at the path where it is staged, or else published.
    async fn expand_on_node(
        &self,
        _volume: &Volume,
        _at: &Path,
        _range: CapacityRange,
    ) -> Result<NodeExpansion> {
        Err(Error::Unsupported("expanding"))
    }
    /// What is wrong with a volume on this node, where it is staged and published.
    async fn node_health(
        &self,
        _volume: &Volume,
        _staging: Option<&Path>,
        _targets: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        Err(Error::Unsupported("health"))
    }
    /// What is wrong with the storage on this node.
    async fn storage_health(&self) -> Result<Vec<Condition>> {
        Err(Error::Unsupported("health"))
    }
}
