//! The node's side: a share is mounted once for each set of options, out of sight, and directories of it are bound at
//! the targets. Whatever may wait for a server has a deadline, and nothing is remembered but what the kernel knows.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use berth_core::{Access, AccessKind, Capacity, NodeId, VolumeId};
use berth_host::{
    mount::{self, Attributes, MountInfo},
    path::Dir,
    remote::{self, RemoteMounts},
};
use berth_nfs::Nfs;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tokio::sync::RwLock;

use super::{
    Config,
    id::ShareName,
    mount::{MountMode, Plan, refused_by},
    parameters::{MOUNT_OPTIONS_SECRET, Place, VolumeKind, check_secret_options, options_in},
    record::hex,
    worker::ImageWorkers,
};
use crate::backend::{Condition, Error, Mounts, Publication, Result, Severity, Usage, Volume};

/// How long a mount is asked whether it is of use.
const PROBE: Duration = Duration::from_secs(3);
/// How long a mount that did not answer is not asked again.
const SILENCE: Duration = Duration::from_secs(30);
/// How long one attempt to unmount may take.
pub(super) const UNMOUNT: Duration = Duration::from_secs(10);
/// How long a directory on a mounted share may take to be found.
pub(super) const LOOKUP: Duration = Duration::from_secs(30);

/// One at a time mounts or unmounts a share, and nobody meanwhile uses it. It holds when, and why, the last one could
/// not mount it.
type Turn = Arc<RwLock<Option<(Instant, String)>>>;

/// When a share was looked at last, and what was found: its standing, or why it did not answer.
type Probe = Arc<tokio::sync::Mutex<Option<(Instant, std::result::Result<Standing, String>)>>>;

/// The shares mounted on this node.
#[derive(Debug)]
pub(super) struct NodeMounts {
    /// Itself, for what goes on behind an answer.
    pub(super) this: Weak<Self>,
    pub(super) node: NodeId,
    mode: MountMode,
    dir: PathBuf,
    /// Where images are brought up (`images.rs`).
    pub(super) images: PathBuf,
    pub(super) timeout: Duration,
    /// What serves shares where the kernel does not, and works on images.
    pub(super) program: PathBuf,
    /// The mode that directories get whose volume names none.
    pub(super) permissions: Option<u32>,
    pub(super) nfs: Nfs,
    pub(super) remote: RemoteMounts,
    pub(super) image_workers: ImageWorkers,
    /// The options of a volume that has none.
    default_options: Vec<String>,
    turns: Mutex<HashMap<String, Turn>>,
    /// Images that nobody uses and that could not be taken down yet.
    pub(super) settling: Mutex<HashSet<String>>,
    probes: Mutex<HashMap<String, Probe>>,
    /// Filesystems that did not answer, whose they are, and when that was.
    silent: Mutex<HashMap<(u32, u32), (String, Instant)>>,
    pub(super) usages: Mutex<HashMap<VolumeId, (Instant, Usage)>>,
    /// Volumes that are too large to be counted, and since when.
    pub(super) too_large: Mutex<HashMap<VolumeId, Instant>>,
}

/// How a share is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Absent,
    Stale,
    Usable,
}

/// What is heard of something mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Answer {
    Well,
    Stale,
    /// Nothing, within the time it was given.
    None,
    Error(String),
}

/// A volume, as far as a node has to know it.
pub(super) fn volume(id: &VolumeId, context: &BTreeMap<String, String>) -> Volume {
    Volume {
        id: id.clone(),
        capacity: Capacity::ZERO,
        access: AccessKind::Mount,
        parameters: Arc::default(),
        mutable: Arc::default(),
        context: context.clone(),
        source: None,
        topology: None,
        attachments: Vec::new(),
        ephemeral: false,
    }
}

impl NodeMounts {
    /// Nothing is mounted, or what an earlier process left.
    pub(super) fn new(config: &Config) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            node: config.node.clone(),
            mode: config.mount_mode,
            dir: config.mount_dir.clone(),
            // Not among the shares: what is bound there counts as a use of one.
            images: config.mount_dir.with_file_name("images"),
            timeout: config.mount_timeout,
            program: config.program.clone(),
            permissions: config.mount_permissions,
            nfs: Nfs::new(),
            remote: RemoteMounts::new(&config.program),
            image_workers: ImageWorkers::new(&config.program),
            default_options: config.mount_options.clone(),
            turns: Mutex::default(),
            settling: Mutex::default(),
            probes: Mutex::default(),
            silent: Mutex::default(),
            usages: Mutex::default(),
            too_large: Mutex::default(),
        })
    }

    /// Makes sure that the volume is mounted, and gives where.
    pub(super) async fn source(self: &Arc<Self>, place: Place, how: Publication<'_>) -> Result<PathBuf> {
        check_secret_options(&secret_options(&how))?;
        match place.kind {
            VolumeKind::Directory => self.directory_source(place, how).await,
            VolumeKind::Image => self.image_source(place, how).await,
        }
    }

    /// Makes sure that the volume's share is mounted, and gives its root, which stays for as long as the guard is held.
    pub(super) async fn share_root(
        self: &Arc<Self>,
        place: &Place,
        how: &Publication<'_>,
    ) -> Result<(PathBuf, impl Drop + use<>)> {
        let options = self.options_of(place, how);
        let key = key_of(&place.share, &options);
        let root = self.dir.join(&key);
        let stays = self.mounted(&key, &root, &place.share, &options).await?;
        Ok((root, stays))
    }

    async fn directory_source(self: &Arc<Self>, place: Place, how: Publication<'_>) -> Result<PathBuf> {
        let (root, stays) = self.share_root(&place, &how).await?;
        let below = PathBuf::from(place.dir.as_ref().map_or("", |dir| dir.as_str()));
        if let Some(mode) = place.look.mode.or(self.permissions).filter(|_| !how.read_only) {
            let (this, at, beneath, share) = (self.clone(), root.clone(), below.clone(), place.share.clone());
            let changed = blocking(move || {
                let changed = this.remote.ensure_mode(&at, &beneath, mode, LOOKUP);
                changed.map_err(|error| refused_by(&share, &error))
            });
            if let Err(error) = changed.await {
                drop(stays);
                self.let_share_go(root).await?;
                return Err(error);
            }
        }
        // Joining nothing would add a slash.
        Ok(if below.as_os_str().is_empty() { root } else { root.join(below) })
    }

    /// Makes sure that the share is mounted and answers. It stays mounted for as long as the guard is held.
    async fn mounted(
        self: &Arc<Self>,
        key: &str,
        root: &Path,
        share: &ShareName,
        options: &[String],
    ) -> Result<impl Drop + use<>> {
        let turn = self.turn(key);
        let asked = Instant::now();
        let stays = turn.clone().read_owned().await;
        if self.standing_since(asked, key, root, share).await? == Standing::Usable {
            return Ok(stays);
        }
        drop(stays);
        let mut alone = turn.write_owned().await;
        // Otherwise each of a hundred callers would wait for its own deadline, one after the other.
        if let Some((at, why)) = &*alone
            && *at > asked
        {
            return Err(Error::Unavailable(why.clone()));
        }
        let mounted = self.ensure_mounted(root, share, options).await;
        if let Err(Error::Unavailable(why)) = &mounted {
            *alone = Some((Instant::now(), why.clone()));
        }
        mounted?;
        Ok(alone.downgrade())
    }

    async fn ensure_mounted(
        self: &Arc<Self>,
        root: &Path,
        share: &ShareName,
        options: &[String],
    ) -> Result<()> {
        match self.standing(root, share).await? {
            Standing::Usable => return Ok(()),
            Standing::Stale => {
                let (this, root) = (self.clone(), root.to_owned());
                blocking(move || Ok(this.remote.unmount(&root, UNMOUNT).map(drop)?)).await?;
            }
            Standing::Absent => {}
        }
        let plan = Plan::make(&self.nfs, share, options, self.timeout).await?;
        let (this, at) = (self.clone(), root.to_owned());
        blocking(move || {
            Dir::ensure(&at, 0o700)?;
            this.mode.mount(&plan, &at, this.timeout, &this.remote, &this.program)
        })
        .await?;
        self.note_answer(&share.to_string());
        Ok(())
    }

    /// As [`NodeMounts::standing`]; of many who ask at once one finds out, for all that had asked before it began.
    async fn standing_since(
        self: &Arc<Self>,
        asked: Instant,
        key: &str,
        root: &Path,
        share: &ShareName,
    ) -> Result<Standing> {
        let probe = {
            let mut probes = self.probes.lock();
            probes.entry(key.to_owned()).or_default().clone()
        };
        let mut last = probe.lock().await;
        if let Some((begun, found)) = &*last
            && *begun > asked
        {
            return found.clone().map_err(Error::Unavailable);
        }
        let begun = Instant::now();
        let found = self.standing(root, share).await;
        *last = match &found {
            Ok(standing) => Some((begun, Ok(*standing))),
            Err(Error::Unavailable(why)) => Some((begun, Err(why.clone()))),
            Err(_) => None,
        };
        found
    }

    /// Whether the share is mounted and of use; a server that does not answer is an error.
    async fn standing(self: &Arc<Self>, root: &Path, share: &ShareName) -> Result<Standing> {
        let (this, root, share) = (self.clone(), root.to_owned(), share.clone());
        blocking(move || match this.remote.probe(&root, PROBE) {
            Ok(()) => {
                this.note_answer(&share.to_string());
                Ok(Standing::Usable)
            }
            Err(error) if is_absent(&error) => Ok(Standing::Absent),
            Err(error) if is_stale(&error) => Ok(Standing::Stale),
            Err(error) => Err(refused_by(&share, &error)),
        })
        .await
    }

    pub(super) fn turn(&self, key: &str) -> Turn {
        let mut turns = self.turns.lock();
        turns.entry(key.to_owned()).or_default().clone()
    }

    fn silent(&self) -> MutexGuard<'_, HashMap<(u32, u32), (String, Instant)>> {
        self.silent.lock()
    }

    /// Whether a filesystem did not answer a moment ago.
    pub(super) fn is_silent(&self, found: &MountInfo) -> bool {
        self.silent().get(&found.device).is_some_and(|(_, since)| since.elapsed() < SILENCE)
    }

    pub(super) fn note_silent(&self, found: &MountInfo) {
        let server = server_of(&found.source).to_owned();
        self.silent().insert(found.device, (server, Instant::now()));
    }

    /// A server answers: whatever of it was left in peace can be asked again.
    fn note_answer(&self, share: &str) {
        self.silent().retain(|_, (server, _)| server != server_of(share));
    }

    /// Asks what is mounted there whether it is of use; one that did not answer is left in peace for a while.
    fn ask(&self, target: &Path, found: &MountInfo) -> Answer {
        if self.is_silent(found) {
            return Answer::None;
        }
        match self.remote.probe(target, PROBE) {
            Ok(()) => {
                self.silent().remove(&found.device);
                Answer::Well
            }
            Err(error) if error.errno() == Some(Errno::TIMEDOUT.raw_os_error()) => {
                self.note_silent(found);
                Answer::None
            }
            Err(error) if is_stale(&error) => Answer::Stale,
            Err(error) => Answer::Error(error.sentence()),
        }
    }

    /// What is wrong with a volume at a target, as far as can be seen there.
    pub(super) async fn condition_at(self: &Arc<Self>, target: PathBuf) -> Result<Option<Condition>> {
        let this = self.clone();
        blocking(move || {
            let place = target.display();
            let unusable =
                |reason, message| Ok(Some(Condition { severity: Severity::Inaccessible, reason, message }));
            let Some(found) = remote::mounted_at(&target)? else {
                return unusable("NotMounted", format!("nothing is mounted at {place}; start the pod again"));
            };
            let source = &found.source;
            match this.ask(&target, &found) {
                Answer::Well => Ok(None),
                Answer::None => unusable("ServerUnreachable", format!("{source} does not answer at {place}")),
                Answer::Stale => unusable(
                    "StaleHandle",
                    format!("the server no longer knows what of {source} is at {place}; start the pod again"),
                ),
                Answer::Error(why) => unusable("ShareUnusable", why),
            }
        })
        .await
    }

    /// Unmounts shares of a filesystem that nobody has at a target any more.
    pub(super) fn release(&self, device: (u32, u32)) -> Result<()> {
        let here = std::fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let shared = |mount: &&MountInfo| mount.device == device && mount.target.parent() == Some(&here);
        let is_used = |mount: &MountInfo| mount.device == device && !mount.target.starts_with(&here);
        let mounts = mount::mounts()?;
        if mounts.iter().any(is_used) {
            return Ok(());
        }
        for root in mounts.iter().filter(shared) {
            let Some(key) = root.target.file_name().and_then(|name| name.to_str()) else { continue };
            let turn = self.turn(key);
            let _alone = turn.blocking_write();
            // Again, now that nobody can bind it.
            let mounts = mount::mounts()?;
            if mounts.iter().any(is_used) {
                return Ok(());
            }
            // Whoever found it stale has mounted it anew by now.
            if !mounts.iter().filter(shared).any(|mount| mount.target == root.target) {
                continue;
            }
            if root.fs_type.starts_with("fuse") {
                // The process behind it is to end now, not when the last copy of this mount namespace does.
                self.remote.end(&root.target, UNMOUNT)?;
            } else {
                self.remote.unmount_last(&root.target, UNMOUNT)?;
            }
            let _ = std::fs::remove_dir(&root.target);
        }
        Ok(())
    }

    /// Unmounts shares that nobody has at a target: of a driver that was killed before it got that far.
    pub(super) fn release_unused(&self) -> Result<()> {
        let Ok(here) = std::fs::canonicalize(&self.dir) else { return Ok(()) };
        for root in mount::mounts()?.iter().filter(|mount| mount.target.parent() == Some(&here)) {
            self.release(root.device)?;
        }
        Ok(())
    }

    /// As [`NodeMounts::release_root`], for who has the share's root of [`NodeMounts::share_root`] and holds it no longer.
    pub(super) async fn let_share_go(self: &Arc<Self>, root: PathBuf) -> Result<()> {
        let this = self.clone();
        blocking(move || {
            this.release_root(&root);
            Ok(())
        })
        .await
    }

    /// Unmounts the share of a volume that could not be bound, unless it has other users.
    fn release_root(&self, root: &Path) {
        let released = remote::mounted_at(root).map_err(Error::from);
        let released = released.and_then(|found| found.map_or(Ok(()), |found| self.release(found.device)));
        if let Err(error) = released {
            tracing::warn!(%error, "a share stays mounted that nobody uses");
        }
    }
}

impl Mounts for NodeMounts {
    fn is_bound(&self, target: &Path) -> Result<bool> {
        match remote::mounted_at(target)? {
            None => Ok(false),
            Some(found) => Ok(!matches!(self.ask(target, &found), Answer::Stale)),
        }
    }

    fn bind(&self, source: &Path, target: &Path, attributes: Attributes) -> Result<()> {
        match self.home_at(source) {
            Some(home) => self.bind_image(&home, target, attributes),
            None => self.bind_share(source, target, attributes),
        }
    }

    fn let_go(&self, source: &Path) {
        match self.home_at(source) {
            Some(home) => self.release_image(&home),
            None => {
                if let Ok((root, _)) = self.on_share(source) {
                    self.release_root(&root);
                }
            }
        }
    }

    fn unbind(&self, target: &Path) -> Result<()> {
        let taken = remote::all_mounted_at(target)?;
        if !taken.is_empty() {
            self.remote.unmount(target, UNMOUNT)?;
        }
        for found in taken {
            if let Err(error) = self.release(found.device).and_then(|()| self.release_mounted(&found)) {
                tracing::warn!(%error, "a share stays mounted that nobody uses");
            }
        }
        Ok(())
    }
}

impl NodeMounts {
    /// Makes a directory of a mounted share appear at a target.
    fn bind_share(&self, source: &Path, target: &Path, attributes: Attributes) -> Result<()> {
        let (root, below) = self.on_share(source)?;
        // What is being bound has no user yet that anybody could see.
        let turn = self.turn(&root.file_name().map(OsStr::to_string_lossy).unwrap_or_default());
        let _stays = turn.blocking_read();
        self.bind_below(&root, below, target, attributes)
    }

    /// Makes a directory of the share that is mounted at `root` appear at a target; the share has to stay mounted meanwhile.
    pub(super) fn bind_below(
        &self,
        root: &Path,
        below: &Path,
        target: &Path,
        attributes: Attributes,
    ) -> Result<()> {
        self.remote.bind(root, below, target, attributes, LOOKUP).map_err(|error| {
            let found = remote::mounted_at(root).ok().flatten();
            let source = found.map_or_else(|| root.display().to_string(), |found| found.source);
            match refused_by(&source, &error) {
                // The last other user of the share went away just now.
                _ if is_absent(&error) => {
                    Error::Busy("the share was unmounted meanwhile; try again".to_owned())
                }
                Error::NotFound { .. } => {
                    Error::NotFound { what: "directory", id: below.display().to_string() }
                }
                other => other,
            }
        })
    }

    /// The root of the mounted share that a directory is on, and where it is below that.
    fn on_share<'a>(&self, source: &'a Path) -> Result<(PathBuf, &'a Path)> {
        let relative = source
            .strip_prefix(&self.dir)
            .map_err(|_| Error::State(format!("{} is on no share", source.display())))?;
        let mut parts = relative.components();
        let key = parts.next().map(|key| key.as_os_str().to_owned()).unwrap_or_default();
        Ok((self.dir.join(key), parts.as_path()))
    }
}

impl NodeMounts {
    /// What the volume, the claim's class and the call's secret say about mounting, without what a bind carries.
    pub(super) fn options_of(&self, place: &Place, how: &Publication<'_>) -> Vec<String> {
        let flags = match &how.capability.access {
            Access::Mount { flags, .. } => flags.clone(),
            Access::Block => Vec::new(),
        };
        let said = [flags, place.mount_options.clone(), secret_options(how)].concat();
        let options = mount::parse_options(&said).filesystem;
        if options.is_empty() { mount::parse_options(&self.default_options).filesystem } else { options }
    }
}

/// What the call's secret says about mounting.
fn secret_options(how: &Publication<'_>) -> Vec<String> {
    how.secrets.get(MOUNT_OPTIONS_SECRET).map(options_in).unwrap_or_default()
}

/// What a mounted share is called: the same for all that can share it.
fn key_of(share: &ShareName, options: &[String]) -> String {
    let mut sum = Sha256::new();
    for part in
        [share.server.as_str(), share.share.as_str()].into_iter().chain(options.iter().map(String::as_str))
    {
        sum.update(part);
        sum.update([0]);
    }
    hex(&sum.finalize()[..16])
}

/// The server in `server:/path`.
fn server_of(share: &str) -> &str {
    share.split_once(":/").map_or(share, |(server, _)| server)
}

/// Whether nothing is mounted where something was expected.
fn is_absent(error: &berth_host::Error) -> bool {
    error.errno() == Some(Errno::NXIO.raw_os_error())
}

fn is_stale(error: &berth_host::Error) -> bool {
    // A FUSE mount whose process is gone says that it is not connected, or, while it goes, that it was aborted.
    let gone = [Errno::STALE, Errno::NOTCONN, Errno::CONNABORTED];
    gone.map(|errno| Some(errno.raw_os_error())).contains(&error.errno())
}

pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Error::State(format!("a task did not finish: {error}"))))
}
