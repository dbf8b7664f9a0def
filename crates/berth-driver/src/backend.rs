//! The trait that a backend implements as a whole, with [`Features`] that say what of it there is; being replaced by the
//! traits of `controller.rs` and `node.rs`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use berth_core::{
    CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology, VolumeCapability, VolumeId,
};
use berth_host::mount::{self, Attributes};

use crate::Features;
pub use crate::{
    Amounts, Attached as Attachment, AvailableCapacity as Room, BlockRange, Blocks, Condition, ContentSource,
    Error, Expanded, GroupSnapshot, NodeExpanded as NodeExpansion, Page, PageRequest, Parameters, Result,
    Secrets, Severity, Snapshot, StagedVolume, Usage, Volume,
};

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
