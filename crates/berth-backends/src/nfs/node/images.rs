//! Volumes that are images, on this node.
//!
//! ```text
//! images/<key>/share       the volume's directory on its share, bound: as long as it is there, the share stays mounted
//! images/<key>/volume      the filesystem in the image, mounted from a loop device; it is bound at the targets
//! images/<key>/use.json    what was said to the server about it (`claims.rs`)
//! ```
//! The first publication brings all that up, the last unpublication takes it down. What cannot be taken down yet,
//! because the server is gone or a pod's own mount namespace still holds it, is tried again until it can, and until then
//! the server is not told that it is free.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_core::{Access, Capacity, CapacityRange};
use berth_host::{
    loopdev,
    mount::{self, Atime, Attributes, MountInfo},
    path::Dir,
    remote,
};
use berth_nfs::{Handle, Options, Share, Target};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{
    claims::Claim,
    id::{ShareName, SubPath},
    mount::refused,
    node::{LOOKUP, NodeMounts, UNMOUNT, blocking},
    parameters::{Look, Place, VolumeKind},
    parse_share,
    record::{key_of, now},
    shares::{failed, find_dir},
    usage::{SPACE, usage_of},
    worker::Work,
};
use crate::backend::{Error, NodeExpansion, Publication, Result, Secrets, Usage};

const NOTE: &str = "use.json";
/// How long until something is tried again that could not be taken down, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(10);

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

/// What has to be known to tell the server that an image is free again.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// `server:/path`.
    share: String,
    /// Empty for the share itself.
    dir: String,
    /// How it is reached, without what came from a secret.
    options: Vec<String>,
    claim: Claim,
}

/// How far an image is taken down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
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

impl NodeMounts {
    fn home(&self, share: &ShareName, dir: &str) -> Home {
        // Not of the options: one image is brought up once, however it is reached.
        let key = key_of(&format!("{}#{}#{dir}", share.server, share.share));
        Home { dir: self.images.join(&key), key }
    }

    /// The home whose filesystem is mounted at `source`.
    pub(super) fn home_at(&self, source: &Path) -> Option<Home> {
        let key = source.strip_prefix(&self.images).ok()?.components().next()?.as_os_str().to_str()?;
        Some(Home { key: key.to_owned(), dir: self.images.join(key) })
    }

    /// The home of the filesystem that is mounted somewhere, if it is an image's.
    fn home_of(&self, mounted: &MountInfo) -> Result<Option<Home>> {
        if is_share(mounted) {
            return Ok(None);
        }
        let here = std::fs::canonicalize(&self.images).unwrap_or_else(|_| self.images.clone());
        let all = mount::mounts()?;
        let found = all.iter().filter(|mount| mount.device == mounted.device);
        let keys = found.filter_map(|mount| mount.target.strip_prefix(&here).ok()?.iter().next()?.to_str());
        Ok(keys.map(|key| Home { key: key.to_owned(), dir: self.images.join(key) }).next())
    }

    /// Makes sure that the image's filesystem is mounted, and gives where.
    pub(super) async fn image_source(
        self: &Arc<Self>,
        place: Place,
        how: Publication<'_>,
    ) -> Result<PathBuf> {
        VolumeKind::Image.check(std::slice::from_ref(how.capability))?;
        let dir = place.dir.as_ref().map_or("", SubPath::as_str).to_owned();
        let home = self.home(&place.share, &dir);
        let read_only = how.capability.mode.is_read_only();
        let turn = self.turn(&home.key);
        let _turn = turn.write().await;
        if let Some(found) = remote::mounted_at(&home.volume())? {
            if !read_only && found.super_options.split(',').any(|option| option == "ro") {
                return Err(Error::Precondition(
                    "the volume is in use on this node for reading only, and cannot be written meanwhile"
                        .to_owned(),
                ));
            }
            return Ok(home.volume());
        }
        let claim = Claim {
            node: self.node.to_string(),
            place: home.dir.display().to_string(),
            read_only,
            since: now(),
        };
        let options = self.options_of(&place, &Publication { secrets: &Secrets::default(), ..how });
        let note = Note { share: place.share.to_string(), dir, options, claim };
        let Access::Mount { fs_type, .. } = &how.capability.access else {
            return Err(Error::State("a raw device was checked to be a filesystem".to_owned()));
        };
        let work = Work::Mount {
            share: home.share(),
            at: home.volume(),
            fs_type: fs_type.clone(),
            read_only,
            look: Look { mode: place.look.mode.or(self.permissions), ..place.look },
        };
        let target = target(&place.share, &self.options_of(&place, &how))?;
        let (root, stays) = self.share_root(&place, &how).await?;
        let brought_up = self.bring_up(&home, &root, note, &target, work).await;
        // Whoever unmounts the share because nobody has it needs it for itself.
        drop(stays);
        if let Err(error) = brought_up {
            self.take_down(&home).await;
            self.let_share_go(root).await?;
            return Err(error);
        }
        Ok(home.volume())
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
            this.bind_below(&root, &below, &at.share(), PLAIN_FILES)
        })
        .await?;
        let (share, dir) = self.reach(target, &note.dir).await?;
        note.claim.take(&share, &dir).await?;
        let this = self.clone();
        blocking(move || this.image_workers.run(&work, this.timeout)).await
    }

    /// The volume's directory, by the user-space client.
    async fn reach(&self, target: &Target, dir: &str) -> Result<(Share, Handle)> {
        let reaching = async {
            let share = self.nfs.share(target).await.map_err(failed)?;
            let found = find_dir(&share, dir).await?;
            let found = found.ok_or_else(|| Error::NotFound { what: "directory", id: dir.to_owned() })?;
            Ok((share, found.handle))
        };
        let reached = tokio::time::timeout(self.timeout, reaching).await;
        reached.map_err(|_| Error::Unavailable("the server does not answer".to_owned()))?
    }

    /// Makes the filesystem appear at a target.
    pub(super) fn bind_image(&self, home: &Home, target: &Path, attributes: Attributes) -> Result<()> {
        let turn = self.turn(&home.key);
        let _turn = turn.blocking_write();
        if !remote::is_mounted(&home.volume())? {
            return Err(Error::Busy("the image was unmounted meanwhile; try again".to_owned()));
        }
        let bound = self.remote.bind(&home.volume(), Path::new(""), target, attributes, LOOKUP);
        bound.map_err(|error| refused(&error))
    }

    /// Takes down the image of a filesystem that was just taken from a target, unless another has it.
    pub(super) fn release_mounted(&self, mounted: &MountInfo) -> Result<()> {
        if let Some(home) = self.home_of(mounted)? {
            self.release_image(&home);
        }
        Ok(())
    }

    pub(super) fn release_image(&self, home: &Home) {
        let (Some(this), Ok(runtime)) = (self.this.upgrade(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        let turn = self.turn(&home.key);
        let _turn = turn.blocking_write();
        runtime.block_on(this.take_down(home));
    }

    /// Takes down what nobody has, and goes on in the background where that does not work at once.
    async fn take_down(self: &Arc<Self>, home: &Home) {
        match self.settle(home).await {
            Ok(Standing::InUse | Standing::Gone) => {}
            Ok(Standing::NotYet) => self.settle_later(home),
            Err(error) => {
                tracing::warn!(%error, "an image that nobody uses cannot be let go of yet");
                self.settle_later(home);
            }
        }
    }

    /// Nothing tells when a server is back, or when somebody else's mount namespace is gone: it is tried again.
    fn settle_later(self: &Arc<Self>, home: &Home) {
        if !self.settling().insert(home.key.clone()) {
            return;
        }
        let (this, home) = (self.clone(), home.clone());
        tokio::spawn(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                let turn = this.turn(&home.key);
                let _turn = turn.write().await;
                if matches!(this.settle(&home).await, Ok(Standing::InUse | Standing::Gone)) {
                    // While nobody else can find that it has to be tried again, and think that somebody does.
                    this.settling().remove(&home.key);
                    return;
                }
                pause = (pause * 2).min(LAST_PAUSE);
            }
        });
    }

    fn settling(&self) -> parking_lot::MutexGuard<'_, std::collections::HashSet<String>> {
        self.settling.lock()
    }

    /// Takes an image down and tells the server, unless some target has it; whoever calls it has its turn.
    async fn settle(self: &Arc<Self>, home: &Home) -> Result<Standing> {
        let (this, at) = (self.clone(), home.clone());
        let standing = blocking(move || this.let_go(&at)).await?;
        if standing != Standing::Gone {
            return Ok(standing);
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
        Ok(Standing::Gone)
    }

    /// Unmounts what no target has.
    fn let_go(&self, home: &Home) -> Result<Standing> {
        let images = std::fs::canonicalize(&self.images).unwrap_or_else(|_| self.images.clone());
        if let Some(found) = remote::mounted_at(&home.volume())? {
            let outside =
                |mount: &MountInfo| mount.device == found.device && !mount.target.starts_with(&images);
            if mount::mounts()?.iter().any(outside) {
                return Ok(Standing::InUse);
            }
            if is_busy(self.remote.unmount_unused(&home.volume(), UNMOUNT))? {
                return Ok(Standing::NotYet);
            }
        }
        let Some(found) = remote::mounted_at(&home.share())? else { return Ok(Standing::Gone) };
        // The kernel goes on writing to the image after it is out of sight, and while others see it.
        let share = images.join(&home.key).join("share");
        if loopdev::is_backing_below(&share)? || is_busy(self.remote.unmount_unused(&home.share(), UNMOUNT))?
        {
            return Ok(Standing::NotYet);
        }
        self.release(found.device)?;
        Ok(Standing::Gone)
    }

    /// Takes down what a driver left that was killed.
    pub(super) fn release_unused_images(self: &Arc<Self>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let Ok(homes) = std::fs::read_dir(&self.images) else { return };
        for entry in homes.flatten() {
            let Some(key) = entry.file_name().to_str().map(str::to_owned) else { continue };
            let (this, home) = (self.clone(), Home { dir: self.images.join(&key), key });
            runtime.spawn(async move {
                let turn = this.turn(&home.key);
                let _turn = turn.write().await;
                this.take_down(&home).await;
            });
        }
    }

    /// The use of the filesystem at a path, if it is an image's.
    pub(super) async fn image_usage(self: &Arc<Self>, path: &Path) -> Result<Option<Usage>> {
        let (this, path) = (self.clone(), path.to_owned());
        blocking(move || match remote::mounted_at(&path)? {
            Some(found) if !is_share(&found) => Ok(Some(usage_of(&this.remote.space(&path, SPACE)?))),
            _ => Ok(None),
        })
        .await
    }

    /// Lets the filesystem at a path have all of its image; a directory has no size.
    pub(super) async fn grow(self: &Arc<Self>, at: &Path, range: CapacityRange) -> Result<NodeExpansion> {
        let (this, at) = (self.clone(), at.to_owned());
        let required = range.required().unwrap_or(Capacity::ZERO);
        blocking(move || {
            let found = remote::mounted_at(&at)?;
            let found =
                found.ok_or_else(|| Error::NotFound { what: "mount", id: at.display().to_string() })?;
            let Some(home) = this.home_of(&found)? else { return Ok(NodeExpansion::Done(required)) };
            let turn = this.turn(&home.key);
            let _turn = turn.blocking_write();
            let work = Work::Grow { share: home.share(), at: home.volume(), size: required.bytes() };
            this.image_workers.run(&work, this.timeout)?;
            Ok(NodeExpansion::Done(Capacity::new(loopdev::size(Path::new(&found.source))?)))
        })
        .await
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
