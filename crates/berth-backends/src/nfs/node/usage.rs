//! What volumes take, asked on a node: of the filesystem in an image, of a project, or of the server. None of it waits for
//! a server that does not answer.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use berth_core::VolumeId;
use berth_host::{mount::MountInfo, remote, usage::Space};
use berth_nfs::{Kind, Options, Share, Target};
use parking_lot::Mutex;
use rustix::io::Errno;

use super::{
    NfsNode, blocking,
    connections::failed,
    mount::{not_answering, refused_by},
    parse_share,
};
use crate::{Amounts, Context, Error, Result, Stats, Usage};

/// How long a server may take to answer with its space.
pub(super) const SPACE: Duration = Duration::from_secs(3);
/// How long what is in a volume may be counted; what takes longer is not tried again for a while.
const COUNT: Duration = Duration::from_secs(3);
const TOO_LARGE: Duration = Duration::from_secs(60 * 60);

/// What was measured, so that it is not measured for everybody who asks.
#[derive(Debug)]
pub(super) struct Usages {
    /// How long a measurement is answered before it is made again.
    lifetime: Duration,
    known: Mutex<HashMap<VolumeId, (Instant, Usage)>>,
    /// Volumes that are too large to be counted, and since when.
    too_large: Mutex<HashMap<VolumeId, Instant>>,
}

impl Usages {
    pub(super) fn new(lifetime: Duration) -> Self {
        Self { lifetime, known: Mutex::default(), too_large: Mutex::default() }
    }
}

impl Stats for NfsNode {
    // By asking the server and not the kernel, which would wait for it.
    async fn usage(&self, _: &Context, id: &VolumeId, path: &Path) -> Result<Usage> {
        if let Some(usage) = self.0.images.usage(path).await? {
            return Ok(usage);
        }
        if let Some(usage) = self.0.controller.quota_usage(id.as_str()).await? {
            return Ok(usage);
        }
        let usages = &self.0.usages;
        let known = usages.known.lock().get(id).copied();
        if let Some((_, usage)) = known.filter(|(at, _)| at.elapsed() < usages.lifetime) {
            return Ok(usage);
        }
        match self.measure(id, path.to_owned()).await {
            Ok(usage) => {
                usages.known.lock().insert(id.clone(), (Instant::now(), usage));
                Ok(usage)
            }
            // An old answer is better than none, and the server's absence shows elsewhere.
            Err(error) => known.map(|(_, usage)| usage).ok_or(error),
        }
    }
}

/// Why a mount could not be measured. A server that refuses is there: it may be asked the next moment, and whoever asks how
/// the volume is has to hear what it says.
enum Unmeasured {
    Silence(Error),
    Refusal(Error),
}

impl Unmeasured {
    fn new(is_silence: bool, error: Error) -> Self {
        if is_silence { Self::Silence(error) } else { Self::Refusal(error) }
    }
}

impl From<Error> for Unmeasured {
    fn from(error: Error) -> Self {
        Self::Refusal(error)
    }
}

impl NfsNode {
    async fn measure(&self, id: &VolumeId, path: PathBuf) -> Result<Usage> {
        let at = path.clone();
        let found = blocking(move || Ok(remote::mounted_at(&at)?)).await?;
        let found = found.ok_or_else(|| Error::NotFound { what: "mount", id: path.display().to_string() })?;
        if self.0.shares.is_unresponsive(&found) {
            return Err(not_answering(&found.source, "a moment ago"));
        }
        self.measure_mount(id, path, &found).await.map_err(|unmeasured| match unmeasured {
            Unmeasured::Silence(error) => {
                self.0.shares.note_unresponsive(&found);
                error
            }
            Unmeasured::Refusal(error) => error,
        })
    }

    async fn measure_mount(
        &self,
        id: &VolumeId,
        path: PathBuf,
        found: &MountInfo,
    ) -> std::result::Result<Usage, Unmeasured> {
        if found.fs_type.starts_with("fuse") {
            let shares = self.0.shares.clone();
            let space = blocking(move || Ok(shares.remote().space(&path, SPACE))).await?;
            return space.map(|space| usage_of(&space)).map_err(|error| {
                let is_silence = error.errno() == Some(Errno::TIMEDOUT.raw_os_error());
                Unmeasured::new(is_silence, refused_by(&found.source, &error))
            });
        }
        let share = parse_share(&found.source)?;
        let connection = found.super_options.split(',').filter(|option| {
            ["vers=", "port=", "mountport="].iter().any(|key| option.starts_with(key))
                && !option.ends_with("=0")
        });
        let options = Options::parse(connection).map_err(|error| Error::State(error.to_string()))?;
        let target = Target { server: share.server.clone(), path: share.path(), options };
        let unheard = |error: berth_nfs::Error| {
            Unmeasured::new(matches!(error.kind(), Kind::Unreachable | Kind::Interrupted), failed(error))
        };
        let asked = tokio::time::timeout(SPACE, async {
            let share = self.0.shares.mounter().nfs.share(&target).await.map_err(unheard)?;
            let space = share.space(&share.root()).await.map_err(unheard)?;
            Ok((share, space))
        });
        let late = || Unmeasured::Silence(not_answering(&target, &format!("within {SPACE:?}")));
        let (share, space) = asked.await.unwrap_or_else(|_| Err(late()))?;
        let whole = Usage {
            bytes: amounts(space.bytes_total, space.bytes_free, space.bytes_available),
            inodes: Some(amounts(space.files_total, space.files_free, space.files_available)),
        };
        // The kernel says which directory of the share is mounted there, so the share found by it is the volume.
        let Some(counted) = self.count(id, &share).await else { return Ok(whole) };
        let files = counted.files + counted.directories;
        Ok(Usage {
            bytes: Amounts { used: counted.used, ..whole.bytes },
            inodes: whole.inodes.map(|inodes| Amounts { used: files, ..inodes }),
        })
    }

    /// What is in the volume, unless that takes too long; then the share as a whole has to do.
    async fn count(&self, id: &VolumeId, volume: &Share) -> Option<berth_nfs::tree::Usage> {
        let too_large = || self.0.usages.too_large.lock();
        if too_large().get(id).is_some_and(|since| since.elapsed() < TOO_LARGE) {
            return None;
        }
        let counted = tokio::time::timeout(COUNT, volume.usage(&volume.root())).await;
        if counted.is_err() {
            too_large().insert(id.clone(), Instant::now());
        }
        counted.ok()?.ok()
    }
}

fn amounts(total: u64, free: u64, available: u64) -> Amounts {
    Amounts { total, used: total.saturating_sub(free), available }
}

/// The server's space as its mount reports it.
pub(super) fn usage_of(space: &Space) -> Usage {
    Usage {
        bytes: amounts(space.total, space.free, space.available),
        inodes: Some(amounts(space.inodes_total, space.inodes_free, space.inodes_free)),
    }
}
