//! Directories at which volumes are mounted: made, found without touching what is mounted there, and removed.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use berth_host::format::{self, Content, Filesystem};
use berth_host::mount;
use berth_host::path::Dir;
use berth_host::{Doing as _, Error};
use berth_runtime::blocking;

use crate::plugin::{Certainty, Failed};
use crate::volumes::names;

/// The mode of the directories that are made.
const DIRECTORY_MODE: u32 = 0o750;
/// How long making and checking a filesystem may take.
const FORMAT_TIMEOUT: Duration = Duration::from_secs(600);
/// The filesystem on a device whose volume names none.
const DEFAULT_FS_TYPE: &str = "ext4";

/// Makes the directory at which a volume is to be mounted; gives whether something is mounted there already.
pub(super) async fn prepare(directory: &Path) -> Result<bool, Failed> {
    let directory = directory.to_owned();
    let prepared = blocking(move || {
        if mount::is_mount_point(&directory)? {
            return Ok::<_, Error>(true);
        }
        Dir::ensure(&directory, DIRECTORY_MODE).map(|_| false)
    });
    Ok(prepared.await?)
}

/// What became of mounting something at a directory. Where it failed for good and nothing is mounted, the directory
/// goes, as nobody is asked to undo anything; otherwise it stays, so that what may be there is undone.
pub(super) async fn settled(mounted: Result<(), Failed>, directory: PathBuf) -> Result<(), Failed> {
    let Err(failed) = mounted else { return Ok(()) };
    if failed.certainty == Certainty::Uncertain {
        return Err(failed);
    }
    let removed = blocking(move || match mount::is_mount_point(&directory) {
        Ok(false) => std::fs::remove_dir(&directory).is_ok(),
        Ok(true) | Err(_) => false,
    });
    if removed.await { Err(failed) } else { Err(Failed::uncertain(failed.message)) }
}

/// Whether a directory, or a mount in its place, is there. A mount of a server that does not answer is not touched.
pub(super) async fn is_there(directory: &Path) -> Result<bool, Failed> {
    let directory = directory.to_owned();
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    Ok(blocking(move || directory.parent().is_some_and(|parent| names(parent).contains(&name))).await)
}

pub(super) async fn is_mounted(directory: &Path) -> Result<bool, Failed> {
    let directory = directory.to_owned();
    Ok(blocking(move || mount::is_mount_point(&directory)).await?)
}

pub(super) async fn unmount(directory: &Path) -> Result<(), Failed> {
    let directory = directory.to_owned();
    blocking(move || mount::unmount(&directory)).await?;
    Ok(())
}

/// Takes a volume away by `undo`. Where that fails because containers mounted something below `target`, with propagation to the
/// machine, that is unmounted, and `undo` runs again.
///
/// What is below is not asked for before there is a reason: only the table of all mounts of the machine knows.
pub(super) async fn undo_mount<F>(target: &Path, undo: impl Fn() -> F) -> Result<(), Failed>
where
    F: Future<Output = Result<(), Failed>>,
{
    let Err(failed) = undo().await else { return Ok(()) };
    let target = target.to_owned();
    match blocking(move || mount::unmount_below(&target)).await? {
        0 => Err(failed),
        _ => undo().await,
    }
}

/// Removes the directory of a volume; it may be gone already.
pub(super) async fn remove_directory(directory: &Path) -> Result<(), Failed> {
    let directory = directory.to_owned();
    let removed = blocking(move || match std::fs::remove_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.doing("remove", &directory),
    });
    removed.await.map_err(Failed::from)
}

/// Mounts a device: formatted if it is blank, checked otherwise.
pub(super) fn mount_device(
    device: &Path,
    target: &Path,
    fs_type: &str,
    options: &mount::Options,
) -> berth_host::Result<()> {
    let read_only = options.attributes.read_only;
    let fs_type = if fs_type.is_empty() { DEFAULT_FS_TYPE } else { fs_type };
    match format::probe(device)? {
        Content::Blank if read_only => {
            let blank = io::Error::other("there is no filesystem on it, and the volume is read-only");
            return Err(blank).doing("mount", device);
        }
        Content::Blank => {
            let filesystem = fs_type.parse::<Filesystem>().map_err(io::Error::other);
            let filesystem = filesystem.doing("make a filesystem on", device)?;
            format::make_on_device(device, filesystem, FORMAT_TIMEOUT)?;
        }
        Content::Filesystem(filesystem) if !read_only => format::check(filesystem, device, FORMAT_TIMEOUT)?,
        Content::Filesystem(_) | Content::Other(_) => {}
    }
    mount::filesystem(device, target, fs_type, options.attributes, &options.filesystem)
}
