//! The bytes of a volume or a snapshot: made, copied, grown.
//!
//! A volume or snapshot is a directory holding either `data` (a subvolume or a plain directory) or `image` (a file).
//! It is built under `incoming/` and renamed into place when whole, so whatever stands in `volumes/` or `snapshots/`
//! is complete.

use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use berth_host::{
    btrfs, copy,
    format::{self, Filesystem},
    freeze::{self, Frozen},
    path::Dir,
    usage,
};

use super::{
    devices::Devices,
    kind::{Consistency, Kind, Tuning},
    record::Key,
};
use crate::{
    Error, Result,
    image::{IMAGE, TOOL_DEADLINE},
};

/// The directory or subvolume of a volume that is not an image.
pub(super) const DATA: &str = "data";
/// A copy of a directory is tried this often while its files keep changing.
const TRIES: usize = 5;

/// What is said of a copy whose files are not of one instant.
pub(super) const TORN: &str = "files changed while the directory was copied, so they are of slightly different moments; \
                               volumes of kind image or btrfs are copied at one instant";

/// Of how many moments a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copied {
    /// Everything is as it was at one instant.
    AtOneInstant,
    /// Files changed while they were copied.
    Torn,
}

/// Something to be copied: a volume or snapshot, and where the copy goes.
#[derive(Debug)]
pub(super) struct Capture {
    /// The volume or snapshot that is copied.
    pub(super) source: Key,
    /// Its kind, which is the copy's too.
    pub(super) kind: Kind,
    /// The directory holding `data` or `image`.
    pub(super) from: Dir,
    /// The directory that shall.
    pub(super) to: Dir,
    /// The copy is a snapshot: never written again.
    pub(super) read_only: bool,
}

/// Makes an empty volume in `dir`.
pub(super) fn create(dir: &Dir, kind: Kind, size: u64) -> Result<()> {
    match kind {
        Kind::Dir => {
            dir.make_dir(DATA, 0o755)?;
        }
        Kind::Btrfs => {
            btrfs::create_subvolume(dir, DATA)?;
            btrfs::set_limit(&dir.dir(DATA)?, size)?;
        }
        Kind::Image => {
            let image = dir.create_file(IMAGE, 0o600)?;
            let doing = || format!("make the image {}", dir.child_path(IMAGE).display());
            image.set_len(size).map_err(|error| berth_host::Error::new(doing(), error))?;
            image.sync_all().map_err(|error| berth_host::Error::new(doing(), error))?;
            dir.sync()?;
        }
    }
    Ok(())
}

/// Gives a volume its size: a larger image or a higher limit. Never makes an image smaller.
pub(super) fn grow(dir: &Dir, kind: Kind, size: u64) -> Result<()> {
    match kind {
        Kind::Dir => {}
        Kind::Btrfs => btrfs::set_limit(&dir.dir(DATA)?, size)?,
        Kind::Image => {
            let image = dir.open_file(IMAGE, true)?;
            let doing = || format!("grow the image {}", dir.child_path(IMAGE).display());
            let error = |error| berth_host::Error::new(doing(), error);
            if image.metadata().map_err(error)?.len() < size {
                image.set_len(size).map_err(error)?;
                image.sync_all().map_err(error)?;
            }
        }
    }
    Ok(())
}

/// Applies what mutable parameters say about the bytes themselves.
pub(super) fn tune(dir: &Dir, tuning: &Tuning) -> Result<()> {
    if tuning.compression.is_none() && tuning.noatime.is_none() {
        return Ok(());
    }
    let data = dir.dir(DATA)?;
    if let Some(compression) = tuning.compression {
        btrfs::set_compression(&data, compression)?;
    }
    if let Some(noatime) = tuning.noatime {
        usage::set_noatime(&data, noatime)?;
    }
    Ok(())
}

/// Makes a copied volume its own: writable size, own identity where two of the same cannot be mounted together.
pub(super) fn adopt_copy(dir: &Dir, kind: Kind, filesystem: Option<Filesystem>, size: u64) -> Result<()> {
    grow(dir, kind, size)?;
    if kind == Kind::Image && filesystem == Some(Filesystem::Btrfs) {
        let image = dir.child_path(IMAGE);
        if format::probe(&image)? == format::Content::Filesystem(Filesystem::Btrfs) {
            format::renew_identity(Filesystem::Btrfs, &image, TOOL_DEADLINE)?;
        }
    }
    Ok(())
}

/// Copies everything at one instant.
///
/// Mounted images are frozen for the time of the copy, subvolumes are snapshotted in one transaction, and
/// directories, which nothing can freeze, are copied again until nothing in them changed meanwhile. A directory that
/// never rests is refused, or copied as it is where `consistency` allows that.
pub(super) fn capture(
    captures: &[Capture],
    (incoming, devices, reflink): (&Dir, &Devices, bool),
    consistency: Consistency,
) -> Result<Copied> {
    let mut copied = Copied::AtOneInstant;
    let mut images: Vec<Key> =
        captures.iter().filter(|capture| capture.kind == Kind::Image).map(|capture| capture.source).collect();
    // Sorted, so that two callers copying the same volumes cannot wait for each other.
    images.sort_unstable();
    let locks: Vec<_> = images.iter().map(|key| devices.copying(*key)).collect();
    let _held: Vec<_> = locks.iter().map(|lock| lock.lock()).collect();
    for attempt in 1.. {
        let frozen = freeze_images(captures, devices, reflink)?;
        capture_subvolumes(captures, incoming)?;
        for capture in captures.iter().filter(|capture| capture.kind == Kind::Image) {
            copy::file(&capture.from.child_path(IMAGE), &capture.to.child_path(IMAGE))?;
        }
        let dirs: Vec<&Capture> = captures.iter().filter(|capture| capture.kind == Kind::Dir).collect();
        let at_rest = capture_directories(&dirs)?;
        for frozen in frozen {
            frozen.thaw()?;
        }
        if at_rest {
            break;
        }
        if attempt == TRIES {
            if consistency == Consistency::Strict {
                return Err(Error::Precondition(
                    "files kept changing while the directory was copied, and a volume of kind dir cannot be frozen to copy \
                     it at one instant; pause the writers, use kind image or btrfs, or accept files of different moments \
                     with the class parameter consistency: best-effort"
                        .to_owned(),
                ));
            }
            copied = Copied::Torn;
            break;
        }
        empty(captures)?;
    }
    for capture in captures {
        sync(&capture.to)?;
    }
    Ok(copied)
}

fn freeze_images(captures: &[Capture], devices: &Devices, reflink: bool) -> Result<Vec<Frozen>> {
    let mut frozen = Vec::new();
    for capture in captures.iter().filter(|capture| capture.kind == Kind::Image) {
        let image = capture.from.child_path(IMAGE);
        if let Some(mount) = devices.of(capture.source).mounted_at {
            frozen.push(freeze::freeze(&mount)?);
        } else if let Some(device) = devices.writable(capture.source, &image)? {
            if !reflink {
                return Err(Error::Precondition(
                    "a raw block volume in use can be copied at one instant only where the data directory's \
                     filesystem has reflinks (xfs, btrfs); stop its users first"
                        .to_owned(),
                ));
            }
            flush_device(device.path())?;
        }
    }
    Ok(frozen)
}

/// What programs wrote through the device's cache must be in the image before it is copied.
fn flush_device(device: &Path) -> Result<()> {
    std::fs::File::open(device)
        .and_then(|device| device.sync_all())
        .map_err(|error| berth_host::Error::new(format!("flush {}", device.display()), error).into())
}

fn capture_subvolumes(captures: &[Capture], incoming: &Dir) -> Result<()> {
    let subvolumes: Vec<&Capture> = captures.iter().filter(|capture| capture.kind == Kind::Btrfs).collect();
    let sources =
        subvolumes.iter().map(|capture| capture.from.dir(DATA)).collect::<berth_host::Result<Vec<_>>>()?;
    if subvolumes.is_empty() {
        return Ok(());
    }
    if let ([one], [source]) = (subvolumes.as_slice(), sources.as_slice()) {
        return Ok(btrfs::snapshot(source, &one.to, DATA, one.read_only)?);
    }
    let names: Vec<String> = subvolumes.iter().map(|capture| format!("{}.{DATA}", capture.source)).collect();
    let pairs: Vec<(&Dir, &str)> =
        sources.iter().zip(&names).map(|(source, name)| (source, name.as_str())).collect();
    // Writable at first, for a read-only subvolume cannot be moved.
    btrfs::snapshot_together(&pairs, incoming, false)?;
    for (capture, name) in subvolumes.iter().zip(&names) {
        incoming.rename(name, &capture.to, DATA)?;
        btrfs::set_read_only(&capture.to.dir(DATA)?, capture.read_only)?;
    }
    Ok(())
}

/// Copies directories; returns whether nothing in them changed from before the first to after the last copy.
fn capture_directories(captures: &[&Capture]) -> Result<bool> {
    if captures.is_empty() {
        return Ok(true);
    }
    let sources =
        captures.iter().map(|capture| capture.from.dir(DATA)).collect::<berth_host::Result<Vec<_>>>()?;
    let fingerprints = || sources.iter().map(copy::fingerprint).collect::<berth_host::Result<Vec<_>>>();
    let before = fingerprints()?;
    let mut at_rest = true;
    for (capture, source) in captures.iter().zip(&sources) {
        let copied = copy::tree(source, &capture.to.ensure_dir(DATA, 0o755)?)?;
        at_rest &= copied.changed == 0;
    }
    Ok(at_rest && before == fingerprints()?)
}

/// Takes back what a first try copied.
fn empty(captures: &[Capture]) -> Result<()> {
    for capture in captures {
        match capture.kind {
            Kind::Image => {
                capture.to.remove_file(IMAGE)?;
            }
            Kind::Btrfs => {
                btrfs::delete_subvolume(&capture.to, DATA)?;
            }
            Kind::Dir => {
                capture.to.remove_tree(DATA)?;
            }
        }
    }
    Ok(())
}

fn sync(dir: &Dir) -> Result<()> {
    rustix::fs::syncfs(dir.as_fd())
        .map_err(|error| berth_host::Error::new(format!("sync {}", dir.path().display()), error).into())
}

/// Where a volume's image is.
pub(super) fn image_path(volumes: &Dir, key: Key) -> PathBuf {
    volumes.path().join(key.to_string()).join(IMAGE)
}
