//! The node's side of a driver: where volumes are used.
//!
//! The framework keeps the record of what is staged and published, makes the targets, binds, applies read-only, mount
//! flags and group ownership, and undoes what failed or what a crash left half done. A backend says what to bind
//! ([`Sources`]), and, if its volumes need it, prepares them once per node ([`Staging`]).

use std::{
    any::Any,
    collections::BTreeMap,
    future::Future,
    path::{Path, PathBuf},
};

use berth_core::{AccessKind, Capacity, CapacityRange, Name, VolumeCapability, VolumeId};
use berth_host::{
    mount::{self, Attributes},
    path::Dir,
};

use crate::{Condition, Context, Error, Result, Volume, Volumes};

/// A volume as a call on a node describes it.
#[derive(Debug, Clone)]
pub struct NodeVolume {
    /// What the driver calls it.
    pub id: VolumeId,
    /// As what it is used, and with which mount flags.
    pub capability: VolumeCapability,
    /// Whether writes are refused, by the flag, the access mode or a mount flag.
    pub read_only: bool,
    /// What the controller said about it ([`Volume::context`]); empty where the call does not repeat it.
    pub context: BTreeMap<String, String>,
    /// What [`crate::Attachment::attach`] answered; empty where the call does not repeat it.
    pub publish_context: BTreeMap<String, String>,
    /// Where it is staged, for backends that stage.
    pub staging: Option<PathBuf>,
}

impl NodeVolume {
    /// Refuses to use a raw volume as a filesystem, and the other way round.
    pub fn check_access(&self, is_for: AccessKind) -> Result<()> {
        let wanted = self.capability.access.kind();
        if is_for == wanted {
            return Ok(());
        }
        Err(Error::Invalid(format!("volume {:?} is for {is_for} access, not for {wanted}", self.id)))
    }
}

/// What shall appear at a target. It owns whatever keeps it usable until the framework has bound it, or failed to.
pub struct Source {
    root: PathBuf,
    below: PathBuf,
    kind: AccessKind,
    guard: Option<Box<dyn Any + Send + Sync>>,
}

impl Source {
    /// A directory of this machine.
    pub fn directory(path: impl Into<PathBuf>) -> Self {
        Self { root: path.into(), below: PathBuf::new(), kind: AccessKind::Mount, guard: None }
    }

    /// A directory below a root; no symbolic link below the root is followed, and nothing leads out of it.
    pub fn below(root: impl Into<PathBuf>, below: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), below: below.into(), kind: AccessKind::Mount, guard: None }
    }

    /// A block device; it has to be read-only by itself where that is asked for.
    pub fn device(path: impl Into<PathBuf>) -> Self {
        Self { root: path.into(), below: PathBuf::new(), kind: AccessKind::Block, guard: None }
    }

    /// Drops the guard once the source is bound or could not be.
    #[must_use]
    pub fn guarded_by(mut self, guard: impl Any + Send + Sync) -> Self {
        self.guard = Some(Box::new(guard));
        self
    }

    /// The trusted part of its path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where it is below the root; empty for the root itself.
    pub fn relative(&self) -> &Path {
        &self.below
    }

    /// The path from the root of this machine.
    pub fn path(&self) -> PathBuf {
        // Joining nothing would add a slash.
        if self.below.as_os_str().is_empty() { self.root.clone() } else { self.root.join(&self.below) }
    }

    /// Filesystem or raw device.
    pub fn kind(&self) -> AccessKind {
        self.kind
    }

    /// What [`Source::guarded_by`] was given.
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Opens a source that is a directory.
    pub(crate) fn open(&self) -> Result<Dir> {
        open_below(&self.root, &self.below)
    }
}

/// Opens a directory below a root, through no symbolic link.
fn open_below(root: &Path, below: &Path) -> Result<Dir> {
    let dir = Dir::open(root)?;
    match below.to_str() {
        Some("") => Ok(dir),
        Some(below) => Ok(dir.dir(below)?),
        None => Err(Error::Invalid(format!("{} is not a UTF-8 path", root.join(below).display()))),
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("path", &self.path()).finish_non_exhaustive()
    }
}

/// Says what to bind at a target.
pub trait Sources: Send + Sync + 'static {
    /// Refuses a volume that does not exist ([`Error::NotFound`]) or cannot be used so, before anything is changed.
    /// A node that cannot know it lets [`Sources::source`] find out.
    fn check(&self, _ctx: &Context, _volume: &NodeVolume) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }

    /// What to bind; [`Error::Precondition`] if the volume is not (or no longer) prepared where it is staged.
    fn source(&self, ctx: &Context, volume: &NodeVolume) -> impl Future<Output = Result<Source>> + Send;
}

/// How sources are put at targets and taken away.
pub trait TargetMounts: Send + Sync + 'static {
    /// Whether something is mounted at the target, and of use.
    fn is_mounted(&self, target: &Path) -> impl Future<Output = Result<bool>> + Send;

    /// Makes the source appear at the target, an empty directory or file.
    fn bind(
        &self,
        source: &Source,
        target: &Path,
        attributes: Attributes,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Takes away whatever is mounted at the target, if anything is.
    fn unmount(&self, target: &Path) -> impl Future<Output = Result<()>> + Send;
}

/// Mounts of what is on this machine, which always answers.
#[derive(Debug, Clone, Copy)]
pub struct MachineMounts;

impl TargetMounts for MachineMounts {
    async fn is_mounted(&self, target: &Path) -> Result<bool> {
        let target = target.to_owned();
        blocking(move || Ok(mount::is_mount_point(&target)?)).await
    }

    async fn bind(&self, source: &Source, target: &Path, attributes: Attributes) -> Result<()> {
        let (root, below, target) = (source.root.clone(), source.below.clone(), target.to_owned());
        blocking(move || {
            if below.as_os_str().is_empty() {
                return Ok(mount::bind(&root, &target, attributes)?);
            }
            Ok(mount::bind_directory(&open_below(&root, &below)?, &target, attributes)?)
        })
        .await
    }

    async fn unmount(&self, target: &Path) -> Result<()> {
        let target = target.to_owned();
        blocking(move || Ok(mount::unmount(&target).map(drop)?)).await
    }
}

/// Runs work that makes system calls on a thread that may block; for backends, whose methods must not.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let outcome = tokio::task::spawn_blocking(work).await;
    outcome.unwrap_or_else(|error| Err(Error::State(format!("a task did not finish: {error}"))))
}

/// A volume that is staged on this node when the driver starts.
#[derive(Debug, Clone)]
pub struct StagedVolume {
    /// The id under which the volume was staged.
    pub id: VolumeId,
    /// The path where it is staged.
    pub staging: PathBuf,
    /// With which capability it was staged.
    pub capability: VolumeCapability,
}

/// Volumes are prepared once per node before they are published to workloads.
pub trait Staging: Send + Sync + 'static {
    /// Prepares a volume below the staging path. Idempotent; repairs what a crash left half done.
    fn stage(
        &self,
        ctx: &Context,
        volume: &NodeVolume,
        staging: &Path,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Undoes [`Staging::stage`], also half of it, also for a volume that is gone.
    fn unstage(
        &self,
        ctx: &Context,
        id: &VolumeId,
        staging: &Path,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Called once at start with every volume that is staged on this node: makes sure that they still are, and takes
    /// down what belongs to none of them.
    fn recover(&self, _staged: Vec<StagedVolume>) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// How much of a volume is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Size and use in bytes.
    pub bytes: Amounts,
    /// Size and use in inodes, for filesystems.
    pub inodes: Option<Amounts>,
}

/// How much there is of bytes or inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amounts {
    /// All there is; 0 where unlimited or unknown.
    pub total: u64,
    /// What is in use.
    pub used: u64,
    /// What can still be used.
    pub available: u64,
}

/// The node can say how full a volume is.
pub trait Stats: Send + Sync + 'static {
    /// Seen at a path where the volume is staged or published.
    fn usage(&self, ctx: &Context, id: &VolumeId, path: &Path) -> impl Future<Output = Result<Usage>> + Send;
}

/// The outcome of growing a volume on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeExpanded {
    /// Everything on it has this size now.
    Done(Capacity),
    /// It has not grown: this machine can grow it only while it is not mounted. The framework unpublishes, unstages,
    /// stages (which grows) and publishes again, then asks once more; whatever is still mounted elsewhere is answered
    /// FAILED_PRECONDITION, and grows when it is staged next.
    NeedsRemount,
}

/// What is on a volume is grown on the node.
pub trait NodeExpansion: Send + Sync + 'static {
    /// Grows it to the volume's size, seen at the path where it is staged, or else published.
    fn expand_on_node(
        &self,
        ctx: &Context,
        id: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> impl Future<Output = Result<NodeExpanded>> + Send;
}

/// The node knows what is wrong with volumes and with the storage.
pub trait NodeHealth: Send + Sync + 'static {
    /// What is wrong with a volume, where it is staged and published.
    fn volume_health(
        &self,
        ctx: &Context,
        id: &VolumeId,
        staging: Option<&Path>,
        targets: &[PathBuf],
    ) -> impl Future<Output = Result<Vec<Condition>>> + Send;

    /// What is wrong with the storage on this node.
    fn storage_health(&self, ctx: &Context) -> impl Future<Output = Result<Vec<Condition>>> + Send;
}

/// Volumes can be made for one pod when it starts, and removed when it ends.
pub trait InlineVolumes: Volumes {
    /// The volume of that name.
    fn find_inline(&self, ctx: &Context, name: &Name) -> impl Future<Output = Result<Option<Volume>>> + Send;
}
