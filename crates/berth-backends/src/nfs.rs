//! The NFS backend: volumes are directories on shares of NFS servers, in the place of csi-driver-nfs, or images in them.
//!
//! The controller mounts nothing and keeps nothing: it speaks to servers as a user-space client (`berth-nfs`), all
//! about a volume is in its id (`id.rs`), and what an id does not hold is on the share itself (`record.rs`). So any
//! replica can take any call, and what csi-driver-nfs made is served as it is.
//!
//! Order makes it safe: a volume's content is built in `.berth/incoming`, its record written, and then its directory
//! renamed into place, which is what makes it a volume; a deletion removes the record, and then renames the directory
//! away. A snapshot's archive appears by a rename, too. A crash leaves at most a record of nothing, which counts for
//! nothing, and something in `.berth`, which whoever comes next goes on with or removes.
//!
//! The node (`node.rs`, `mount.rs`) mounts a share once for each set of options and binds directories of it. Images
//! (`content.rs`, `images.rs`) are mounted by loop devices, of one node at a time (`claims.rs`).

#[path = "nfs/controller/ahead.rs"]
mod ahead;
mod archive;
mod claims;
#[path = "nfs/controller/content.rs"]
mod content;
#[path = "nfs/controller/health.rs"]
mod health;
mod id;
#[path = "nfs/node/images.rs"]
mod images;
#[path = "nfs/node/mount.rs"]
mod mount;
#[path = "nfs/node/shares.rs"]
mod node;
mod parameters;
#[path = "nfs/controller/progress.rs"]
mod progress;
#[path = "nfs/controller/quota.rs"]
mod quota;
mod record;
#[path = "nfs/controller/restore.rs"]
mod restore;
mod shares;
#[path = "nfs/controller/snapshots.rs"]
mod snapshots;
#[path = "nfs/controller/upkeep.rs"]
mod upkeep;
#[path = "nfs/node/usage.rs"]
mod usage;
#[path = "nfs/controller/volumes.rs"]
mod volumes;
#[path = "nfs/node/worker.rs"]
mod worker;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use berth_core::{Capacity, CapacityRange, Name, NodeId, SnapshotId, Topology, VolumeCapability, VolumeId};
use tokio_util::task::TaskTracker;

pub use self::{id::OnDelete, mount::MountMode, worker::intercept};
use self::{
    id::{ShareName, SnapshotRef, VolumeRef},
    node::NodeMounts,
    parameters::{Class, MOUNT_OPTIONS_SECRET, Place, options_in},
    quota::Exports,
    shares::Shares,
    snapshots::Building,
};
use crate::{
    Backend, Driver, Feature, Features,
    backend::{
        About, Condition, Error, Expanded, Mounts, NewVolume, NodeExpansion, NodeInfo, Page, PageRequest,
        Parameters, Publication, Result, Room, Secrets, Snapshot, Usage, Volume,
    },
    legacy,
    services::Mode,
};

/// How an NFS backend is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// Shares (`server:/path`) whose volumes are listed even if no call has named them.
    pub shares: Vec<String>,
    /// Shares that are directories of this machine, as `server:/path=/directory`: their volumes get project quotas.
    pub export_roots: Vec<String>,
    /// How shares are reached of which no call has said it.
    pub mount_options: Vec<String>,
    /// The mode of directories whose class names none; 755 if `None`.
    pub mount_permissions: Option<u32>,
    /// What becomes of volumes whose class does not say.
    pub on_delete: Option<OnDelete>,
    /// An older archived directory of the same name makes place for a new one.
    pub replace_archived: bool,
    /// How long archived directories stay; for ever if `None`.
    pub keep_archived: Option<Duration>,
    /// Snapshots become `.tar.gz`, else `.tar`.
    pub compress_snapshots: bool,
    /// How long a caller waits for a snapshot before it is told that it is not ready yet.
    pub snapshot_patience: Duration,
    /// How long a volume's usage is told again before it is measured again.
    pub usage_lifetime: Duration,
    /// What mounts shares on this node.
    pub mount_mode: MountMode,
    /// What serves shares through FUSE and works on images: a program whose `main` begins with `berth_fuse::intercept`
    /// and [`intercept`].
    pub program: PathBuf,
    /// Where shares are mounted on this node, out of everybody's sight.
    pub mount_dir: PathBuf,
    /// How long a server may take to be mounted.
    pub mount_timeout: Duration,
}

impl Config {
    /// As csi-driver-nfs is by default.
    pub fn new(mount_dir: PathBuf, node: NodeId) -> Self {
        Self {
            node,
            shares: Vec::new(),
            export_roots: Vec::new(),
            mount_options: Vec::new(),
            mount_permissions: None,
            on_delete: None,
            replace_archived: false,
            keep_archived: None,
            compress_snapshots: true,
            snapshot_patience: Duration::from_secs(3),
            usage_lifetime: Duration::from_mins(10),
            mount_mode: MountMode::Kernel,
            // This program, also if its file has been replaced meanwhile.
            program: PathBuf::from("/proc/self/exe"),
            mount_dir,
            mount_timeout: Duration::from_secs(110),
        }
    }
}

/// All that NFS volumes can do. There is nothing to attach or to stage.
const FEATURES: Features = Features::new(&[
    Feature::Volumes,
    Feature::ListVolumes,
    Feature::GetVolume,
    Feature::Capacity,
    Feature::Snapshots,
    Feature::Clone,
    Feature::ControllerExpand,
    Feature::NodeExpand,
    Feature::Stats,
    Feature::Health,
    Feature::SingleNodeMultiWriter,
    Feature::InlineByReference,
]);

/// Volumes on NFS servers.
#[derive(Debug, Clone)]
pub struct Nfs(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    shares: Shares,
    exports: Exports,
    /// Snapshots whose archives are being written by this process.
    building: Building,
    /// Everything that goes on behind an answer.
    tasks: TaskTracker,
    mounts: Arc<NodeMounts>,
}

impl Nfs {
    /// A backend that has spoken to nobody yet.
    pub fn new(config: Config) -> Result<Self> {
        let shares = config.shares.iter().map(|text| parse_share(text)).collect::<Result<Vec<_>>>()?;
        let shares = Shares::new(&shares, config.mount_options.clone());
        let exports = Exports::new(&config.export_roots)?;
        let mounts = NodeMounts::new(&config);
        // On a thread of its own, which may wait: nobody uses them, so it is soon done.
        let tidying = mounts.clone();
        let tidied = std::thread::spawn(move || tidying.release_unused()).join();
        if let Ok(Err(error)) = tidied {
            tracing::warn!(%error, "a share stays mounted that nobody uses");
        }
        mounts.release_unused_images();
        Ok(Self(Arc::new(Inner {
            shares,
            exports,
            building: Building::default(),
            tasks: TaskTracker::new(),
            mounts,
            config,
        })))
    }

    /// A driver of these volumes, with the parts that `mode` says.
    pub fn driver(&self, name: &str, version: &str, mode: Mode) -> Driver {
        legacy::driver(name, version, mode, Arc::new(self.clone()))
    }

    /// Waits until deleted data is really gone and snapshots are whole, at most this long; the rest is left to whoever
    /// comes next.
    pub async fn drain(&self, at_most: Duration) {
        self.0.tasks.close();
        let _ = tokio::time::timeout(at_most, self.0.tasks.wait()).await;
        self.0.tasks.reopen();
    }
}

/// Reads `server:/path`; an IPv6 address is in brackets.
fn parse_share(text: &str) -> Result<ShareName> {
    let (server, path) = text.split_once(":/").ok_or_else(|| {
        Error::Invalid(format!(
            "share {text:?} is not of the form server:/path, such as nfs.example.com:/export"
        ))
    })?;
    ShareName::new(server.trim_start_matches('[').trim_end_matches(']'), path)
}

impl Inner {
    /// Remembers what a call says about reaching what it is about.
    fn heed(&self, about: About<'_>, secrets: &Secrets) {
        let Some(options) = secrets.get(MOUNT_OPTIONS_SECRET) else { return };
        let share = match about {
            About::Class(parameters) => {
                Class::parse(parameters).and_then(|class| class.share()).ok().flatten()
            }
            About::Volume(id) => VolumeRef::parse(id.as_str()).ok().map(|volume| volume.share),
            About::Snapshot(id) => SnapshotRef::parse(id.as_str()).ok().map(|snapshot| snapshot.share),
        };
        if let Some(share) = share {
            self.shares.learn_secret(&share, options_in(options));
        }
    }
}

#[async_trait]
impl Backend for Nfs {
    fn features(&self) -> Features {
        FEATURES
    }

    fn node(&self) -> NodeInfo {
        NodeInfo { id: self.0.config.node.clone(), max_volumes: None, topology: None }
    }

    fn heed(&self, about: About<'_>, secrets: &Secrets) {
        self.0.heed(about, secrets);
    }

    async fn check_parameters(
        &self,
        parameters: &Parameters,
        _: &Parameters,
        capabilities: &[VolumeCapability],
    ) -> Result<()> {
        let class = Class::parse(parameters)?;
        class.kind.check(capabilities)?;
        class.share().map(|_| ())
    }

    async fn find_volume(&self, _: &Name) -> Result<Option<Volume>> {
        // A name alone says nothing: see `find_made`.
        Ok(None)
    }

    async fn find_made(&self, wanted: &NewVolume) -> Result<Option<Volume>> {
        self.0.find_made(wanted).await
    }

    async fn volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        self.0.volume(id).await
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume> {
        self.0.create_volume(new).await
    }

    async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.0.delete_volume(id).await
    }

    async fn clear_volume(&self, id: &VolumeId) -> Result<()> {
        self.0.clear_volume(id).await
    }

    fn agrees(&self, volume: &Volume, known: &Parameters, pair: (&str, &str)) -> bool {
        parameters::agrees(volume, known, pair)
    }

    async fn list_volumes(&self, page: PageRequest) -> Result<Page<Volume>> {
        self.0.list_volumes(&page).await
    }

    async fn room(&self, parameters: &Parameters, _: Option<&Topology>) -> Result<Room> {
        self.0.room(parameters).await
    }

    async fn expand_volume(&self, id: &VolumeId, range: CapacityRange) -> Result<Expanded> {
        self.0.expand_volume(id, range).await
    }

    async fn volume_health(&self, id: &VolumeId) -> Result<Vec<Condition>> {
        self.0.volume_health(id).await
    }

    async fn list_unhealthy(&self, page: PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        self.0.list_unhealthy(&page).await
    }

    async fn find_taken(
        &self,
        name: &Name,
        source: &VolumeId,
        parameters: &Parameters,
    ) -> Result<Option<Snapshot>> {
        self.0.find_taken(name, source, parameters).await
    }

    async fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>> {
        self.0.snapshot(id).await
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

    fn snapshot_progress(&self, id: &SnapshotId) -> Option<String> {
        self.0.snapshot_progress(id)
    }

    async fn list_snapshots(&self, source: Option<&VolumeId>, page: PageRequest) -> Result<Page<Snapshot>> {
        self.0.list_snapshots(source, &page).await
    }

    async fn volume_on_node(
        &self,
        id: &VolumeId,
        context: &BTreeMap<String, String>,
    ) -> Result<Option<Volume>> {
        Ok(Some(node::volume(id, context)))
    }

    fn mounts(&self) -> Arc<dyn Mounts> {
        self.0.mounts.clone()
    }

    async fn stage(&self, _: &Volume, _: &std::path::Path, _: &VolumeCapability) -> Result<()> {
        Err(Error::Unsupported("staging"))
    }

    async fn unstage(&self, _: &VolumeId, _: &std::path::Path) -> Result<()> {
        Err(Error::Unsupported("staging"))
    }

    async fn publish_source(&self, volume: &Volume, how: Publication<'_>) -> Result<PathBuf> {
        let place = Place::parse(volume.id.as_str(), &volume.context)?;
        self.0.mounts.source(place, how).await
    }

    async fn usage(&self, volume: &Volume, path: &std::path::Path) -> Result<Usage> {
        self.0.usage(volume, path).await
    }

    async fn expand_on_node(
        &self,
        _: &Volume,
        at: &std::path::Path,
        range: CapacityRange,
    ) -> Result<NodeExpansion> {
        self.0.mounts.grow(at, range).await
    }

    async fn node_health(
        &self,
        volume: &Volume,
        _: Option<&std::path::Path>,
        targets: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        self.0.node_health(&volume.id, targets).await
    }

    async fn storage_health(&self) -> Result<Vec<Condition>> {
        self.0.storage_health().await
    }
}

/// A size that a record may hold.
fn capacity(bytes: u64) -> Capacity {
    Capacity::new(bytes)
}
