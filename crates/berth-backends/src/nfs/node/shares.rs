//! The shares that are mounted on this node: each once for each set of options, below a directory of the driver's own.
//!
//! A share is mounted by the kernel or served by a FUSE process (`mount.rs`). Nothing watches that process: the next call
//! that needs the share finds a mount that is stale, unmounts it and mounts anew (`ensure_mounted`). Pods that were bound
//! to the old mount keep it, with errors, until they are restarted.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use berth_core::hex;
use berth_host::{
    mount::{self, Attributes, MountInfo},
    remote::{self, RemoteMounts},
};
use parking_lot::Mutex;
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tokio::{
    runtime::Handle,
    sync::{OwnedRwLockReadGuard, RwLock},
};

use super::{
    blocking,
    id::ShareName,
    mount::{Mounter, refused_by},
};
use crate::{Error, Result};

/// How long a mount is asked whether it is of use.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a mount that did not answer is not asked again.
const UNRESPONSIVE_MOUNT_RETRY_AFTER: Duration = Duration::from_secs(30);
/// How long one attempt to unmount may take.
pub(super) const UNMOUNT: Duration = Duration::from_secs(10);
/// How long a directory on a mounted share may take to be found.
pub(super) const LOOKUP: Duration = Duration::from_secs(30);

/// When, and why, a share could not be mounted last.
type LastFailure = Option<(Instant, String)>;

/// When a share was last checked, and the result: the state of its mount, or why it did not answer.
type LastProbe = Option<(Instant, std::result::Result<MountState, String>)>;

/// The shares mounted on this node.
#[derive(Debug)]
pub(super) struct MountedShares {
    dir: PathBuf,
    mounter: Mounter,
    /// By the name of the directory that each is mounted at.
    entries: Mutex<HashMap<String, Arc<Entry>>>,
    /// Filesystems that did not answer, their server, and when that was.
    unresponsive: Mutex<HashMap<(u32, u32), (String, Instant)>>,
    runtime: Handle,
}

#[derive(Debug, Default)]
struct Entry {
    /// One at a time mounts or unmounts the share, and nobody meanwhile uses it.
    turn: Arc<RwLock<LastFailure>>,
    probe: tokio::sync::Mutex<LastProbe>,
    /// Somebody wanted to unmount the share while it was held: who holds it checks that afterwards.
    release_wanted: AtomicBool,
}

/// Whether a share is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MountState {
    Absent,
    Stale,
    Usable,
}

/// What is heard of something mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Well,
    Stale,
    /// Nothing, within the time it was given.
    None,
    Error(String),
}

/// A share that stays mounted while this is held. If nothing of it was kept in use by then, it is unmounted after.
#[derive(Debug)]
pub(super) struct ShareInUse {
    root: PathBuf,
    shares: Arc<MountedShares>,
    entry: Arc<Entry>,
    kept: AtomicBool,
    stays: Option<OwnedRwLockReadGuard<LastFailure>>,
}

impl ShareInUse {
    /// Where it is mounted.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Something of it is bound somewhere: that keeps it mounted from now on.
    pub(super) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }
}

impl Drop for ShareInUse {
    fn drop(&mut self) {
        // Before the check, so that it sees everybody who cannot have the share from now on.
        self.stays = None;
        if self.entry.release_wanted.swap(false, Ordering::AcqRel) || !self.kept.load(Ordering::Relaxed) {
            let (shares, root) = (self.shares.clone(), std::mem::take(&mut self.root));
            self.shares.runtime.spawn(async move { shares.release_root(root).await });
        }
    }
}

impl MountedShares {
    /// Nothing is mounted, or what an earlier process left. To be called within a runtime.
    pub(super) fn new(dir: PathBuf, mounter: Mounter) -> Self {
        let runtime = Handle::current();
        Self { dir, mounter, entries: Mutex::default(), unresponsive: Mutex::default(), runtime }
    }

    pub(super) fn mounter(&self) -> &Mounter {
        &self.mounter
    }

    pub(super) fn remote(&self) -> &RemoteMounts {
        &self.mounter.remote
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Makes sure that a share is mounted with these options, and answers.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        share: &ShareName,
        options: &[String],
    ) -> Result<ShareInUse> {
        let key = key_of(share, options);
        let (root, entry) = (self.dir.join(&key), self.entry(&key));
        let in_use = |stays| ShareInUse {
            root: root.clone(),
            shares: self.clone(),
            entry: entry.clone(),
            kept: AtomicBool::new(false),
            stays: Some(stays),
        };
        let asked = Instant::now();
        let stays = entry.turn.clone().read_owned().await;
        if self.mount_state(asked, &entry, &root, share).await? == MountState::Usable {
            return Ok(in_use(stays));
        }
        drop(stays);
        let mut alone = entry.turn.clone().write_owned().await;
        // Otherwise each of a hundred callers would wait for its own deadline, one after the other.
        if let Some((at, why)) = &*alone
            && *at > asked
        {
            return Err(Error::Unavailable(why.clone()));
        }
        let mounted = self.ensure_mounted(&entry, &root, share, options).await;
        if let Err(Error::Unavailable(why)) = &mounted {
            *alone = Some((Instant::now(), why.clone()));
        }
        mounted?;
        Ok(in_use(alone.downgrade()))
    }

    async fn ensure_mounted(
        self: &Arc<Self>,
        entry: &Entry,
        root: &Path,
        share: &ShareName,
        options: &[String],
    ) -> Result<()> {
        match self.mount_state(Instant::now(), entry, root, share).await? {
            MountState::Usable => return Ok(()),
            MountState::Stale => {
                let (remote, root) = (self.mounter.remote.clone(), root.to_owned());
                blocking(move || Ok(remote.unmount(&root, UNMOUNT).map(drop)?)).await?;
            }
            MountState::Absent => {}
        }
        self.mounter.mount(share, options, root).await?;
        self.note_answer(&share.to_string());
        Ok(())
    }

    /// Whether the share is mounted and of use; a server that does not answer is an error. Of many who ask at once one
    /// probes it, for all that had `asked` before it began.
    async fn mount_state(
        self: &Arc<Self>,
        asked: Instant,
        entry: &Entry,
        root: &Path,
        share: &ShareName,
    ) -> Result<MountState> {
        let mut last = entry.probe.lock().await;
        if let Some((begun, found)) = &*last
            && *begun > asked
        {
            return found.clone().map_err(Error::Unavailable);
        }
        let begun = Instant::now();
        let (remote, at) = (self.mounter.remote.clone(), root.to_owned());
        let found = match blocking(move || Ok(remote.probe(&at, PROBE_TIMEOUT))).await? {
            Ok(()) => {
                self.note_answer(&share.to_string());
                Ok(MountState::Usable)
            }
            Err(error) if is_absent(&error) => Ok(MountState::Absent),
            Err(error) if is_stale(&error) => Ok(MountState::Stale),
            Err(error) => Err(refused_by(share, &error)),
        };
        *last = match &found {
            Ok(mount_state) => Some((begun, Ok(*mount_state))),
            Err(Error::Unavailable(why)) => Some((begun, Err(why.clone()))),
            Err(_) => None,
        };
        found
    }

    fn entry(&self, key: &str) -> Arc<Entry> {
        self.entries.lock().entry(key.to_owned()).or_default().clone()
    }

    /// Makes a directory below what is mounted at `root` appear at a target, on a thread that may block. Somebody holds
    /// what keeps it mounted.
    pub(super) fn bind(
        &self,
        root: &Path,
        below: &Path,
        target: &Path,
        attributes: Attributes,
    ) -> Result<()> {
        self.remote().bind(root, below, target, attributes, LOOKUP).map_err(|error| {
            let found = remote::mounted_at(root).ok().flatten();
            let source = found.map_or_else(|| root.display().to_string(), |found| found.source);
            match refused_by(&source, &error) {
                // Somebody else unmounted it.
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

    /// Whether a filesystem did not answer a moment ago.
    pub(super) fn is_unresponsive(&self, found: &MountInfo) -> bool {
        let known = self.unresponsive.lock();
        known.get(&found.device).is_some_and(|(_, since)| since.elapsed() < UNRESPONSIVE_MOUNT_RETRY_AFTER)
    }

    pub(super) fn note_unresponsive(&self, found: &MountInfo) {
        let server = server_of(&found.source).to_owned();
        self.unresponsive.lock().insert(found.device, (server, Instant::now()));
    }

    /// A server answers: whatever of it was left in peace can be asked again.
    fn note_answer(&self, share: &str) {
        self.unresponsive.lock().retain(|_, (server, _)| server != server_of(share));
    }

    /// Asks what is mounted at a target whether it is of use, on a thread that may block; one that did not answer is left
    /// in peace for a while.
    pub(super) fn ask(&self, target: &Path, found: &MountInfo) -> Answer {
        if self.is_unresponsive(found) {
            return Answer::None;
        }
        match self.remote().probe(target, PROBE_TIMEOUT) {
            Ok(()) => {
                self.unresponsive.lock().remove(&found.device);
                Answer::Well
            }
            Err(error) if error.errno() == Some(Errno::TIMEDOUT.raw_os_error()) => {
                self.note_unresponsive(found);
                Answer::None
            }
            Err(error) if is_stale(&error) => Answer::Stale,
            Err(error) => Answer::Error(error.sentence()),
        }
    }

    /// Unmounts shares of a filesystem that nobody has at a target any more. One that is held at the moment is left to who
    /// holds it: nobody waits here for a server that somebody else uses.
    pub(super) async fn release(self: &Arc<Self>, device: (u32, u32)) -> Result<()> {
        let this = self.clone();
        for root in blocking(move || this.unused_roots(device)).await? {
            let Some(key) = root.target.file_name().and_then(|name| name.to_str()) else { continue };
            let entry = self.entry(key);
            entry.release_wanted.store(true, Ordering::Release);
            let Ok(_alone) = entry.turn.clone().try_write_owned() else { continue };
            entry.release_wanted.store(false, Ordering::Release);
            let this = self.clone();
            blocking(move || {
                // Again, now that nobody can bind it. Whoever found it stale has mounted it anew by now.
                if !this.unused_roots(device)?.iter().any(|unused| unused.target == root.target) {
                    return Ok(());
                }
                if root.fs_type.starts_with("fuse") {
                    // The process behind it is to end now, not when the last copy of this mount namespace does.
                    this.remote().end(&root.target, UNMOUNT)?;
                } else {
                    this.remote().unmount_last(&root.target, UNMOUNT)?;
                }
                let _ = std::fs::remove_dir(&root.target);
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Where a filesystem is mounted as a share, if nobody has it anywhere else.
    fn unused_roots(&self, device: (u32, u32)) -> Result<Vec<MountInfo>> {
        let here = std::fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let mut mounts = mount::mounts()?;
        mounts.retain(|mount| mount.device == device);
        if mounts.iter().any(|mount| !mount.target.starts_with(&here)) {
            return Ok(Vec::new());
        }
        mounts.retain(|mount| mount.target.parent() == Some(&here));
        Ok(mounts)
    }

    /// Unmounts shares that nobody has at a target: of a driver that was killed before it got that far.
    pub(super) async fn release_unused(self: &Arc<Self>) -> Result<()> {
        let Ok(here) = std::fs::canonicalize(&self.dir) else { return Ok(()) };
        let mounts = blocking(|| Ok(mount::mounts()?)).await?;
        for root in mounts.iter().filter(|mount| mount.target.parent() == Some(&here)) {
            self.release(root.device).await?;
        }
        Ok(())
    }

    /// Unmounts the share of a volume that could not be bound, unless it has other users.
    async fn release_root(self: &Arc<Self>, root: PathBuf) {
        let released = match blocking(move || Ok(remote::mounted_at(&root)?)).await {
            Ok(Some(found)) => self.release(found.device).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = released {
            tracing::warn!(%error, "a share stays mounted that nobody uses");
        }
    }
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

pub(super) fn is_stale(error: &berth_host::Error) -> bool {
    // A FUSE mount whose process is gone says that it is not connected, or, while it goes, that it was aborted.
    let gone = [Errno::STALE, Errno::NOTCONN, Errno::CONNABORTED];
    gone.map(|errno| Some(errno.raw_os_error())).contains(&error.errno())
}
