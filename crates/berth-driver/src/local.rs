//! The local backend: volumes on this machine's own disk.
//!
//! Data directory:
//! ```text
//! volumes/<key>/{data | image}     a volume: a subvolume or directory, or an image file
//! snapshots/<key>/{data | image}   a snapshot
//! incoming/<key>                   being built; renamed into place when whole; emptied at start
//! trash/                           being removed, in the background
//! lost/                            data whose record was damaged: kept for a person to look at
//! state/volumes.journal            the records; what is not in it does not exist
//! lock                             one driver per data directory
//! ```
//! Order makes it safe: data is renamed into place and synced, then recorded; a record is removed first, then the
//! data. So a crash leaves data without a record, never a record without data, and the next start removes it.

mod content;
mod devices;
mod health;
mod kind;
mod node;
mod record;
mod room;
mod snapshots;
mod start;
mod state;
#[cfg(test)]
mod tests;
mod trash;
mod volumes;

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use berth_core::{
    Capacity, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology, VolumeCapability, VolumeId,
};
use berth_host::{path::Dir, usage::TreeUsage};
use berth_journal::{Barrier, GroupCommit};
use parking_lot::{Mutex, MutexGuard};

pub use self::kind::Kind;
use self::{devices::Devices, record::Key, state::State, trash::Trash};
use crate::{
    Backend, Driver, Feature, Features,
    backend::{
        Attachment, Blocks, Condition, Error, Expanded, GroupSnapshot, NewVolume, NodeExpansion, NodeInfo,
        Page, PageRequest, Parameters, Publication, Result, Room, Snapshot, StagedVolume, Usage, Volume,
    },
    legacy,
    services::Mode,
};

/// How a local backend is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// This node.
    pub node: NodeId,
    /// The kind of volumes whose class names none; the best the disk can do if `None`.
    pub kind: Option<Kind>,
    /// What the backend offers; see [`Config::new`] for all of it.
    pub features: Features,
    /// How many volumes this node takes.
    pub max_volumes: Option<u32>,
    /// The key of this node's topology.
    pub topology_key: String,
    /// How many times the disk may be promised.
    pub overcommit: f64,
    /// The largest volume.
    pub max_volume_size: Capacity,
    /// The largest volume that is grown on the node.
    pub max_volume_size_on_node: Capacity,
    /// Simulated pools, by the value of the parameter `kind`; that parameter then chooses a pool and not a kind.
    pub pools: BTreeMap<String, Capacity>,
    /// Unknown class parameters are ignored instead of refused.
    pub ignore_unknown_parameters: bool,
    /// Mutable parameters that are taken without any effect.
    pub mutable_without_effect: Vec<String>,
    /// Changed blocks are listed in pieces of one length.
    pub fixed_length_blocks: bool,
}

impl Config {
    /// Everything on, nothing simulated.
    pub fn new(data_dir: PathBuf, node: NodeId) -> Self {
        Self {
            data_dir,
            node,
            kind: None,
            features: FEATURES,
            max_volumes: None,
            topology_key: berth_core::names::TOPOLOGY_NODE.to_owned(),
            overcommit: 1.0,
            max_volume_size: Capacity::MAX,
            max_volume_size_on_node: Capacity::MAX,
            pools: BTreeMap::new(),
            ignore_unknown_parameters: false,
            mutable_without_effect: Vec::new(),
            fixed_length_blocks: false,
        }
    }
}

/// All that local volumes can do. Attaching is bookkeeping only and therefore asked for.
const FEATURES: Features = Features::new(&[
    Feature::Volumes,
    Feature::ListVolumes,
    Feature::GetVolume,
    Feature::Capacity,
    Feature::Snapshots,
    Feature::Clone,
    Feature::ControllerExpand,
    Feature::NodeExpand,
    Feature::Modify,
    Feature::GroupSnapshots,
    Feature::SnapshotMetadata,
    Feature::Topology,
    Feature::Stage,
    Feature::Stats,
    Feature::Health,
    Feature::SingleNodeMultiWriter,
    Feature::MountGroup,
]);

/// The entry of `volumes/` must be on disk before the record.
const VOLUMES: Barrier = Barrier::Directory(0);
/// The entry of `snapshots/` must be on disk before the record.
const SNAPSHOTS: Barrier = Barrier::Directory(1);

/// Volumes on this machine's disk.
#[derive(Debug, Clone)]
pub struct Local(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    default_kind: Kind,
    /// The data directory is on btrfs.
    is_btrfs: bool,
    /// And quotas are on there, so that volumes can be of kind btrfs.
    offers_btrfs: bool,
    /// Its filesystem can share blocks between files.
    reflink: bool,
    root: Dir,
    volumes: Dir,
    snapshots: Dir,
    incoming: Dir,
    lost: Dir,
    state: Mutex<State>,
    journal: GroupCommit,
    devices: Devices,
    trash: Trash,
    topology: Option<Arc<Topology>>,
    /// What a walk through a volume found, and how long it took.
    walks: Mutex<HashMap<Key, Walk>>,
    _lock: File,
}

#[derive(Debug, Clone, Copy)]
struct Walk {
    usage: TreeUsage,
    at: Instant,
    took: Duration,
}

impl Local {
    /// Opens the data directory, finishes or undoes what the last run left half done.
    pub async fn open(config: Config) -> Result<Self> {
        let opened = tokio::task::spawn_blocking(move || start::open(config)).await;
        opened
            .map_err(|panic| Error::State(format!("open the data directory: {panic}")))?
            .map(|inner| Self(Arc::new(inner)))
    }

    /// A driver of these volumes, with the parts that `mode` says.
    pub fn driver(&self, name: &str, version: &str, mode: Mode) -> Driver {
        legacy::driver(name, version, mode, Arc::new(self.clone()))
    }

    /// The kind of volumes whose class names none.
    pub fn default_kind(&self) -> Kind {
        self.0.default_kind
    }

    /// How many volumes there are.
    pub fn volume_count(&self) -> usize {
        self.0.state().volume_count()
    }

    /// Waits until deleted data is really gone, at most this long.
    pub async fn drain(&self, at_most: Duration) {
        let inner = self.0.clone();
        // Whatever is not done is done at the next start.
        let _ = tokio::task::spawn_blocking(move || inner.trash.drain(at_most)).await;
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Runs work that makes system calls on a thread that may block.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = self.clone();
        match tokio::task::spawn_blocking(move || work(&inner)).await {
            Ok(outcome) => outcome,
            Err(panic) => Err(Error::State(format!("the operation did not end: {panic}"))),
        }
    }
}

#[async_trait]
impl Backend for Local {
    fn features(&self) -> Features {
        self.0.config.features
    }

    fn node(&self) -> NodeInfo {
        NodeInfo {
            id: self.0.config.node.clone(),
            max_volumes: self.0.config.max_volumes,
            topology: self.0.topology.as_deref().cloned(),
        }
    }

    async fn ready(&self) -> Result<()> {
        self.0.blocking(|inner| Ok(inner.root.free_space().map(|_| ())?)).await
    }

    async fn recover(&self, staged: Vec<StagedVolume>) -> Result<()> {
        self.0.blocking(move |inner| inner.recover_node(&staged)).await
    }

    async fn check_parameters(
        &self,
        parameters: &Parameters,
        mutable: &Parameters,
        capabilities: &[VolumeCapability],
    ) -> Result<()> {
        self.0.check_parameters(parameters, mutable, capabilities)
    }

    async fn find_volume(&self, name: &Name) -> Result<Option<Volume>> {
        self.0.find_volume(name)
    }

    async fn volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        Ok(self.0.volume(id).map(|(key, record)| self.0.describe_volume(key, &record)))
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume> {
        self.0.create_volume(new).await
    }

    async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.0.delete_volume(id).await
    }

    async fn list_volumes(&self, page: PageRequest) -> Result<Page<Volume>> {
        self.0.list_volumes(&page)
    }

    async fn room(&self, parameters: &Parameters, topology: Option<&Topology>) -> Result<Room> {
        self.0.room(parameters, topology)
    }

    async fn attached_count(&self, node: &NodeId) -> Result<usize> {
        Ok(self.0.state().attached_to(node.as_str()))
    }

    async fn attach(&self, id: &VolumeId, attachment: Attachment) -> Result<BTreeMap<String, String>> {
        self.0.attach(id, &attachment).await
    }

    async fn detach(&self, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        self.0.detach(id, node).await
    }

    async fn expand_volume(&self, id: &VolumeId, range: CapacityRange) -> Result<Expanded> {
        self.0.expand_volume(id, range).await
    }

    async fn modify_volume(&self, id: &VolumeId, mutable: Parameters) -> Result<()> {
        self.0.modify_volume(id, mutable).await
    }

    async fn volume_health(&self, id: &VolumeId) -> Result<Vec<Condition>> {
        let id = id.clone();
        self.0.blocking(move |inner| inner.volume_health(&id)).await
    }

    async fn list_unhealthy(&self, page: PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        self.0.blocking(move |inner| inner.list_unhealthy(&page)).await
    }

    async fn find_snapshot(&self, name: &Name) -> Result<Option<Snapshot>> {
        self.0.find_snapshot(name)
    }

    async fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>> {
        Ok(self.0.snapshot(id).map(|(key, record)| self.0.describe_snapshot(key, &record)))
    }

    async fn create_snapshot(
        &self,
        name: Name,
        source: &VolumeId,
        parameters: &Parameters,
    ) -> Result<Snapshot> {
        self.0.create_snapshot(&name, source, parameters).await
    }

    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.0.delete_snapshot(id).await
    }

    async fn list_snapshots(&self, source: Option<&VolumeId>, page: PageRequest) -> Result<Page<Snapshot>> {
        self.0.list_snapshots(source, &page)
    }

    async fn find_group(&self, name: &Name) -> Result<Option<GroupSnapshot>> {
        self.0.find_group(name)
    }

    async fn group(&self, id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        Ok(self.0.group(id))
    }

    async fn create_group(
        &self,
        name: Name,
        sources: &[VolumeId],
        parameters: &Parameters,
    ) -> Result<GroupSnapshot> {
        self.0.create_group(&name, sources, parameters).await
    }

    async fn delete_group(&self, id: &GroupSnapshotId) -> Result<()> {
        self.0.delete_group(id).await
    }

    async fn allocated_blocks(&self, snapshot: &SnapshotId, from: u64) -> Result<Blocks> {
        let snapshot = snapshot.clone();
        self.0.blocking(move |inner| inner.allocated_blocks(&snapshot, from)).await
    }

    async fn changed_blocks(&self, base: &SnapshotId, target: &SnapshotId, from: u64) -> Result<Blocks> {
        let (base, target) = (base.clone(), target.clone());
        self.0.blocking(move |inner| inner.changed_blocks(&base, &target, from)).await
    }

    async fn stage(&self, volume: &Volume, staging: &Path, capability: &VolumeCapability) -> Result<()> {
        let (id, staging, capability) = (volume.id.clone(), staging.to_owned(), capability.clone());
        self.0.blocking(move |inner| inner.stage(&id, &staging, &capability)).await
    }

    async fn unstage(&self, id: &VolumeId, staging: &Path) -> Result<()> {
        let (id, staging) = (id.clone(), staging.to_owned());
        self.0.blocking(move |inner| inner.unstage(&id, &staging)).await
    }

    async fn publish_source(&self, volume: &Volume, how: Publication<'_>) -> Result<PathBuf> {
        self.0.publish_source(&volume.id, how.staging, how.capability, how.read_only)
    }

    async fn usage(&self, volume: &Volume, path: &Path) -> Result<Usage> {
        let (id, path) = (volume.id.clone(), path.to_owned());
        self.0.blocking(move |inner| inner.usage(&id, &path)).await
    }

    async fn expand_on_node(
        &self,
        volume: &Volume,
        at: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpansion> {
        let (id, at) = (volume.id.clone(), at.to_owned());
        self.0.blocking(move |inner| inner.expand_on_node(&id, &at, range)).await
    }

    async fn node_health(
        &self,
        volume: &Volume,
        staging: Option<&Path>,
        _: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        let (id, staging) = (volume.id.clone(), staging.map(Path::to_owned));
        self.0.blocking(move |inner| inner.node_health(&id, staging.as_deref())).await
    }

    async fn storage_health(&self) -> Result<Vec<Condition>> {
        self.0.blocking(|inner| Ok(inner.storage_health())).await
    }
}
