//! Volumes that are images, on this node.
//!
//! ```text
//! images/<key>/share       the volume's directory on its share, bound: as long as it is there, the share stays mounted
//! images/<key>/volume      the filesystem in the image, mounted from a loop device; it is bound at the targets
//! images/<key>/use.json    what was said to the server about it (`claims.rs`)
//! ```
//! The first publication brings all that up, the last unpublication takes it down. What cannot be taken down yet,
//! because the server is gone or a pod's own mount namespace still holds it, is tried again until it can, and until then
//! its claim on the server is not removed.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use berth_core::{Backoff, Capacity, CapacityRange, NodeId};
use berth_host::{
    loopdev,
    mount::{self, Atime, Attributes, MountInfo},
    path::Dir,
    remote,
};
use berth_nfs::{Handle, Options, Share, Target};
use parking_lot::Mutex;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedMutexGuard;

use super::{
    Config, blocking,
    claims::Claim,
    connections::{failed, find_dir},
    id::{ShareName, SubPath},
    parameters::OwnerAndMode,
    parse_share,
    record::{key_of, now},
    shares::{MountedShares, UNMOUNT},
    usage::{SPACE, usage_of},
    worker::{ImageWorkers, Work},
};
use crate::{Error, NodeExpanded, Result, Usage};

const NOTE: &str = "use.json";
/// When something is tried again that could not be taken down.
const TAKE_DOWN_BACKOFF: Backoff =
    Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(10) };

/// Others may write to the share: what they put in an image's place leads nowhere.
const PLAIN_FILES: Attributes = Attributes {
    read_only: false,
    nosuid: true,
    nodev: true,
    noexec: true,
    nosymfollow: true,
    nodiratime: false,
    atime: Atime::Default,
};

/// Where an image is brought up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Home {
    key: String,
    dir: PathBuf,
}

/// What has to be known to remove the claim on an image from the server.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// The share that the image is on, as `server:/path`.
    share: String,
    /// Empty for the share itself.
    dir: String,
    /// How it is reached, without what came from a secret.
    options: Vec<String>,
    claim: Claim,
}

/// How far an image is taken down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReleaseState {
    /// Some target has it.
    InUse,
    /// Nobody has it, and yet it is there.
    NotYet,
    Gone,
}

impl Home {
    fn share(&self) -> PathBuf {
        self.dir.join("share")
    }

    fn volume(&self) -> PathBuf {
        self.dir.join("volume")
    }

    fn note(&self) -> Option<Note> {
        serde_json::from_slice(&std::fs::read(self.dir.join(NOTE)).ok()?).ok()
    }
}

/// The volumes on this node that are images.
#[derive(Debug)]
pub(super) struct Images {
    dir: PathBuf,
    node: NodeId,
    shares: Arc<MountedShares>,
    workers: ImageWorkers,
    /// By the keys of their homes.
    entries: Mutex<HashMap<String, Arc<Entry>>>,
    /// Images that nobody uses and that could not be taken down yet.
    settling: Mutex<HashSet<String>>,
}

#[derive(Debug, Default)]
struct Entry {
    /// One at a time brings the image up, binds it or takes it down.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Somebody wanted to take the image down while it was held: who holds it checks that afterwards.
    release_wanted: AtomicBool,
}

/// A volume that is an image, as a call describes it.
#[derive(Debug)]
pub(super) struct ImageVolume {
    pub(super) share: ShareName,
    /// The share itself if `None`.
    pub(super) dir: Option<SubPath>,
    /// How the share is reached, without what came from a secret: it is written down.
    pub(super) options_without_secret: Vec<String>,
    pub(super) fs_type: String,
    pub(super) read_only: bool,
    pub(super) ownership: OwnerAndMode,
}

/// An image whose filesystem stays mounted while this is held. If it was not kept in use by then, it is taken down after.
#[derive(Debug)]
pub(super) struct ImageInUse {
    home: Home,
    images: Arc<Images>,
    entry: Arc<Entry>,
    kept: AtomicBool,
    turn: Option<OwnedMutexGuard<()>>,
}

impl ImageInUse {
    /// Where its filesystem is mounted.
    pub(super) fn volume(&self) -> PathBuf {
        self.home.volume()
    }

    /// The filesystem is bound at a target: that keeps it mounted from now on.
    pub(super) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }
}

impl Drop for ImageInUse {
    fn drop(&mut self) {
        // Before the check, so that it sees everybody who cannot have the image from now on.
        self.turn = None;
        if self.entry.release_wanted.swap(false, Ordering::AcqRel) || !self.kept.load(Ordering::Relaxed) {
            let (images, home) = (self.images.clone(), self.home.clone());
            self.images.shares.runtime().spawn(async move { images.release(&home).await });
        }
    }
}

impl Images {
    pub(super) fn new(config: &Config, shares: Arc<MountedShares>) -> Self {
        Self {
            // Not among the shares: what is bound there counts as a use of one.
            dir: config.mount_dir.with_file_name("images"),
            node: config.node.clone(),
            shares,
            workers: ImageWorkers::new(&config.program),
            entries: Mutex::default(),
            settling: Mutex::default(),
        }
    }

    fn home(&self, share: &ShareName, dir: &str) -> Home {
        // Not of the options: one image is brought up once, however it is reached.
        let key = key_of(&format!("{}#{}#{dir}", share.server, share.share));
        Home { dir: self.dir.join(&key), key }
    }

    /// The home of the filesystem that is mounted somewhere, if it is an image's.
    fn home_of(&self, mounted: &MountInfo) -> Result<Option<Home>> {
        if is_share(mounted) {
            return Ok(None);
        }
        let here = std::fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let all = mount::mounts()?;
        let found = all.iter().filter(|mount| mount.device == mounted.device);
        let keys = found.filter_map(|mount| mount.target.strip_prefix(&here).ok()?.iter().next()?.to_str());
        Ok(keys.map(|key| Home { key: key.to_owned(), dir: self.dir.join(key) }).next())
    }

    fn entry(&self, home: &Home) -> Arc<Entry> {
        self.entries.lock().entry(home.key.clone()).or_default().clone()
    }

    async fn turn(&self, home: &Home) -> OwnedMutexGuard<()> {
        self.entry(home).turn.clone().lock_owned().await
    }

    /// Makes sure that the image's filesystem is mounted; `options` are how its share is reached.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        image: ImageVolume,
        options: &[String],
    ) -> Result<ImageInUse> {
        let dir = image.dir.as_ref().map_or("", SubPath::as_str).to_owned();
        let home = self.home(&image.share, &dir);
        let turn = self.turn(&home).await;
        let at = home.volume();
        let in_use = |home| ImageInUse {
            entry: self.entry(&home),
            home,
            images: self.clone(),
            kept: AtomicBool::new(false),
            turn: Some(turn),
        };
        if let Some(found) = blocking(move || Ok(remote::mounted_at(&at)?)).await? {
            if !image.read_only && found.super_options.split(',').any(|option| option == "ro") {
                return Err(Error::Precondition(
                    "the volume is in use on this node for reading only, and cannot be written meanwhile"
                        .to_owned(),
                ));
            }
            return Ok(in_use(home));
        }
        let claim = Claim {
            node: self.node.to_string(),
            place: home.dir.display().to_string(),
            read_only: image.read_only,
            since: now(),
        };
        let work = Work::Mount {
            share: home.share(),
            at: home.volume(),
            fs_type: image.fs_type,
            read_only: image.read_only,
            ownership: image.ownership,
        };
        let note = Note { share: image.share.to_string(), dir, options: image.options_without_secret, claim };
        let target = target(&image.share, options)?;
        let share = self.shares.acquire(&image.share, options).await?;
        let brought_up = self.bring_up(&home, share.root(), note, &target, work).await;
        if brought_up.is_ok() {
            share.keep();
        }
        // Whoever unmounts the share because nobody has it needs it for itself.
        drop(share);
        let in_use = in_use(home);
        brought_up.map(|()| in_use)
    }

    /// Whoever calls it sees to it that the share stays mounted.
    async fn bring_up(
        self: &Arc<Self>,
        home: &Home,
        root: &Path,
        note: Note,
        target: &Target,
        work: Work,
    ) -> Result<()> {
        let (this, at, root) = (self.clone(), home.clone(), root.to_owned());
        let below = PathBuf::from(&note.dir);
        let text = serde_json::to_vec(&note).map_err(|error| Error::State(error.to_string()))?;
        blocking(move || {
            for dir in [at.share(), at.volume()] {
                Dir::ensure(&dir, 0o700)?;
            }
            Dir::open(&at.dir)?.write_atomically(NOTE, &text)?;
            if remote::is_mounted(&at.share())? {
                return Ok(());
            }
            this.shares.bind(&root, &below, &at.share(), PLAIN_FILES)
        })
        .await?;
        let (share, dir) = self.reach(target, &note.dir).await?;
        note.claim.take(&share, &dir).await?;
        self.run(work).await?;
        note.claim.note_mounted(&share, &dir).await
    }

    async fn run(self: &Arc<Self>, work: Work) -> Result<()> {
        let this = self.clone();
        blocking(move || this.workers.run(&work, this.shares.mounter().timeout)).await
    }

    /// The volume's directory, by the user-space client.
    async fn reach(&self, target: &Target, dir: &str) -> Result<(Share, Handle)> {
        let mounter = self.shares.mounter();
        let reaching = async {
            let share = mounter.nfs.share(target).await.map_err(failed)?;
            let found = find_dir(&share, dir).await?;
            let found = found.ok_or_else(|| Error::NotFound { what: "directory", id: dir.to_owned() })?;
            Ok((share, found.handle))
        };
        let reached = tokio::time::timeout(mounter.timeout, reaching).await;
        reached.map_err(|_| Error::Unavailable("the server does not answer".to_owned()))?
    }

    /// Takes down the image of a filesystem that was just taken from a target, unless another has it.
    pub(super) async fn release_mounted(self: &Arc<Self>, mounted: &MountInfo) -> Result<()> {
        let (this, mounted) = (self.clone(), mounted.clone());
        let Some(home) = blocking(move || this.home_of(&mounted)).await? else { return Ok(()) };
        let entry = self.entry(&home);
        entry.release_wanted.store(true, Ordering::Release);
        // One that is held at the moment is left to who holds it.
        let Ok(_turn) = entry.turn.clone().try_lock_owned() else { return Ok(()) };
        entry.release_wanted.store(false, Ordering::Release);
        self.take_down(&home).await;
        Ok(())
    }

    async fn release(self: &Arc<Self>, home: &Home) {
        let _turn = self.turn(home).await;
        self.take_down(home).await;
    }

    /// Takes down what nobody has, and goes on in the background where that does not work at once; whoever calls it has
    /// the image's turn.
    async fn take_down(self: &Arc<Self>, home: &Home) {
        match self.settle(home).await {
            Ok(ReleaseState::InUse | ReleaseState::Gone) => {}
            Ok(ReleaseState::NotYet) => self.settle_later(home),
            Err(error) => {
                tracing::warn!(%error, "an image that nobody uses cannot be released yet");
                self.settle_later(home);
            }
        }
    }

    /// There is no event when a server is back, or when somebody else's mount namespace is gone: it is tried again.
    fn settle_later(self: &Arc<Self>, home: &Home) {
        if !self.settling.lock().insert(home.key.clone()) {
            return;
        }
        let (this, home) = (self.clone(), home.clone());
        self.shares.runtime().spawn(async move {
            for attempt in 1.. {
                tokio::time::sleep(TAKE_DOWN_BACKOFF.exact_pause(attempt)).await;
                let _turn = this.turn(&home).await;
                if matches!(this.settle(&home).await, Ok(ReleaseState::InUse | ReleaseState::Gone)) {
                    // While nobody else can find that it has to be tried again, and think that somebody does.
                    this.settling.lock().remove(&home.key);
                    return;
                }
            }
        });
    }

    /// Unmounts an image and removes its claim from the server, unless some target has it; the caller holds its lock.
    async fn settle(self: &Arc<Self>, home: &Home) -> Result<ReleaseState> {
        let (this, at) = (self.clone(), home.clone());
        let (state, share) = blocking(move || this.unmount_unused(&at)).await?;
        if let Some(share) = share {
            self.shares.release(share.device).await?;
        }
        if state != ReleaseState::Gone {
            return Ok(state);
        }
        if let Some(note) = home.note() {
            let share = parse_share(&note.share)?;
            match self.reach(&target(&share, &note.options)?, &note.dir).await {
                Ok((share, dir)) => note.claim.give_back(&share, &dir).await?,
                // With the volume went all that was said about it.
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // One by one: what were still mounted there would not be emptied.
        for dir in [home.share(), home.volume()] {
            let _ = std::fs::remove_dir(dir);
        }
        let _ = Dir::open(&home.dir).and_then(|dir| dir.remove_written(NOTE));
        let _ = std::fs::remove_dir(&home.dir);
        Ok(ReleaseState::Gone)
    }

    /// Unmounts what no target has, and gives the share that it was on.
    fn unmount_unused(&self, home: &Home) -> Result<(ReleaseState, Option<MountInfo>)> {
        let remote_mounts = self.shares.remote();
        let images = std::fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        if let Some(found) = remote::mounted_at(&home.volume())? {
            let outside =
                |mount: &MountInfo| mount.device == found.device && !mount.target.starts_with(&images);
            if mount::mounts()?.iter().any(outside) {
                return Ok((ReleaseState::InUse, None));
            }
            if is_busy(remote_mounts.unmount_unused(&home.volume(), UNMOUNT))? {
                return Ok((ReleaseState::NotYet, None));
            }
        }
        let Some(found) = remote::mounted_at(&home.share())? else { return Ok((ReleaseState::Gone, None)) };
        // The kernel goes on writing to the image after it is out of sight, and while others see it.
        let share = images.join(&home.key).join("share");
        if loopdev::is_backing_below(&share)?
            || is_busy(remote_mounts.unmount_unused(&home.share(), UNMOUNT))?
        {
            return Ok((ReleaseState::NotYet, None));
        }
        Ok((ReleaseState::Gone, Some(found)))
    }

    /// Begins to take down what no target has: what a driver left that was killed, and what somebody else unmounted at a target.
    pub(super) async fn release_unused(self: &Arc<Self>) -> Result<()> {
        let this = self.clone();
        for home in blocking(move || this.unused_homes()).await? {
            let this = self.clone();
            self.shares.runtime().spawn(async move { this.release(&home).await });
        }
        Ok(())
    }

    /// The images that are at no target, or not mounted at all.
    fn unused_homes(&self) -> Result<Vec<Home>> {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return Ok(Vec::new()) };
        let images = std::fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let mounts = mount::mounts()?;
        let is_used = |home: &Home| {
            let volume = images.join(&home.key).join("volume");
            let own = mounts.iter().find(|mount| mount.target == volume);
            own.is_some_and(|own| {
                let outside =
                    |mount: &MountInfo| mount.device == own.device && !mount.target.starts_with(&images);
                mounts.iter().any(outside)
            })
        };
        let homes = entries.flatten().filter_map(|entry| {
            let key = entry.file_name().to_str()?.to_owned();
            Some(Home { dir: self.dir.join(&key), key })
        });
        Ok(homes.filter(|home| !is_used(home)).collect())
    }

    /// The use of the filesystem at a path, if it is an image's.
    pub(super) async fn usage(&self, path: &Path) -> Result<Option<Usage>> {
        let (shares, path) = (self.shares.clone(), path.to_owned());
        blocking(move || match remote::mounted_at(&path)? {
            Some(found) if !is_share(&found) => Ok(Some(usage_of(&shares.remote().space(&path, SPACE)?))),
            _ => Ok(None),
        })
        .await
    }

    /// Lets the filesystem at a path have all of its image; a directory has no size.
    pub(super) async fn grow(self: &Arc<Self>, at: &Path, range: CapacityRange) -> Result<NodeExpanded> {
        let required = range.required().unwrap_or(Capacity::ZERO);
        let (this, at) = (self.clone(), at.to_owned());
        let found = blocking(move || {
            let found = remote::mounted_at(&at)?;
            let found =
                found.ok_or_else(|| Error::NotFound { what: "mount", id: at.display().to_string() })?;
            Ok(this.home_of(&found)?.map(|home| (home, found.source)))
        });
        let Some((home, device)) = found.await? else { return Ok(NodeExpanded::Done(required)) };
        let _turn = self.turn(&home).await;
        self.run(Work::Grow { share: home.share(), at: home.volume(), size: required.bytes() }).await?;
        let size = blocking(move || Ok(loopdev::size(Path::new(&device))?)).await?;
        Ok(NodeExpanded::Done(Capacity::new(size)))
    }
}

/// Whether what is mounted is a share itself.
fn is_share(mounted: &MountInfo) -> bool {
    mounted.fs_type.starts_with("nfs") || mounted.fs_type.starts_with("fuse")
}

fn is_busy<T>(unmounted: berth_host::Result<T>) -> Result<bool> {
    match unmounted {
        Err(error) if error.errno() == Some(Errno::BUSY.raw_os_error()) => Ok(true),
        other => Ok(other.map(|_| false)?),
    }
}

fn target(share: &ShareName, options: &[String]) -> Result<Target> {
    let options = Options::parse(options).map_err(|error| {
        Error::Invalid(format!(
            "mount options: {error}; kind image needs a server that the driver itself can ask"
        ))
    })?;
    Ok(Target { server: share.server.clone(), path: share.path(), options })
}
