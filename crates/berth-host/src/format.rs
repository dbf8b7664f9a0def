//! What is on a device, making filesystems, growing them.
//!
//! Nothing here overwrites data: a filesystem is only made where a probe proves that there is nothing, and next to
//! the image rather than in it, so that a crash leaves either no filesystem or a whole one.
#![expect(unsafe_code, reason = "filesystems grow by ioctl")]

mod btrfs_identity;
mod grow;
mod probe;

use std::{
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, Instant},
};

pub use self::{
    grow::grow_mounted,
    probe::{filesystem_size, probe},
};
use crate::{
    copy,
    error::{Doing as _, Error, Result},
    exec::{self, Output},
    loopdev,
};

const MIB: u64 = 1 << 20;

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// There is provably nothing on it.
    Blank,
    /// A filesystem that can be mounted.
    Filesystem(Filesystem),
    /// Something else, by name, or "unrecognised data"; also more than one signature at once.
    Other(String),
}

/// The filesystems Berth makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Filesystem {
    /// ext4; ext2 and ext3 are not it.
    Ext4,
    /// The filesystem XFS, which cannot shrink.
    Xfs,
    /// The filesystem btrfs, with checksums of data.
    Btrfs,
}

/// Whether a filesystem became larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// The filesystem is as large as its device.
    Grown,
    /// It already fills its device.
    AlreadyFull,
}

/// A filesystem type that is not one of `Filesystem`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown filesystem {0:?}, known are ext4, xfs and btrfs")]
pub struct UnknownFilesystem(String);

impl Filesystem {
    /// The name that mount(2) knows.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// The Debian package with its tools.
    const fn package(self) -> &'static str {
        match self {
            Self::Ext4 => "e2fsprogs",
            Self::Xfs => "xfsprogs",
            Self::Btrfs => "btrfs-progs",
        }
    }
}

impl fmt::Display for Filesystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Filesystem {
    type Err = UnknownFilesystem;

    fn from_str(text: &str) -> std::result::Result<Self, UnknownFilesystem> {
        [Self::Ext4, Self::Xfs, Self::Btrfs]
            .into_iter()
            .find(|fs| fs.as_str() == text)
            .ok_or_else(|| UnknownFilesystem(text.into()))
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blank => f.write_str("nothing"),
            Self::Filesystem(fs) => fs.fmt(f),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// The least size in bytes in which the filesystem can be made.
pub const fn minimum_size(fs: Filesystem) -> u64 {
    match fs {
        // Below there is no room for a journal.
        Filesystem::Ext4 => 2 * MIB,
        Filesystem::Xfs => 300 * MIB,
        // Two copies of the metadata, one of the data, and what is reserved at the beginning.
        Filesystem::Btrfs => 109 * MIB,
    }
}

/// Makes a filesystem in the regular file `image`, which must be blank.
///
/// The filesystem is made in `<image>.mkfs`, a sparse file of the same length, owner and mode, which then replaces
/// `image`: another inode, without what was preallocated. An image that is not blank is an error of kind
/// `AlreadyExists`, one too small of kind `InvalidInput`.
pub fn make(image: &Path, fs: Filesystem, deadline: Duration) -> Result<()> {
    let seen = fs::symlink_metadata(image).doing("stat the image", image)?;
    let refuse = |kind, why: String| Err(io::Error::new(kind, why)).doing(&format!("make {fs} in"), image);
    if !seen.is_file() {
        return refuse(io::ErrorKind::InvalidInput, "not a regular file".into());
    }
    if seen.len() < minimum_size(fs) {
        let (size, minimum) = (seen.len(), minimum_size(fs) / MIB);
        return refuse(
            io::ErrorKind::InvalidInput,
            format!("{size} bytes are too few, the minimum is {minimum} MiB"),
        );
    }
    match probe(image)? {
        Content::Blank => {}
        content => return refuse(io::ErrorKind::AlreadyExists, format!("there is already {content}")),
    }
    let draft = Draft::create(image, &seen)?;
    make_in(&draft.path, fs, deadline)?;
    draft.replace(image)
}

/// Makes a filesystem on the block device `device`, which must be blank.
///
/// A device that is not blank is an error of kind `AlreadyExists`. One that was being formatted when this process was
/// killed is not blank.
pub fn make_on_device(device: &Path, fs: Filesystem, deadline: Duration) -> Result<()> {
    match probe(device)? {
        Content::Blank => make_in(device, fs, deadline),
        content => {
            let there = format!("there is already {content}");
            Err(io::Error::new(io::ErrorKind::AlreadyExists, there)).doing(&format!("make {fs} on"), device)
        }
    }
}

/// Makes a filesystem on the block device `device`, whatever is on it: for a device whose formatting was cut off, which
/// only the caller can know.
pub fn remake_on_device(device: &Path, fs: Filesystem, deadline: Duration) -> Result<()> {
    make_in(device, fs, deadline)
}

/// Whether the btrfs on `device` has the identity of one that is mounted here from another device.
pub fn is_identity_taken(device: &Path) -> Result<bool> {
    let Some(fsid) = btrfs_identity::fsid(device).doing("read the identity of", device)? else {
        return Ok(false);
    };
    let devices = Path::new("/sys/fs/btrfs").join(fsid).join("devices");
    let Ok(known) = fs::read_dir(&devices) else { return Ok(false) };
    let own = fs::canonicalize(device).doing("resolve", device)?;
    Ok(known.flatten().any(|entry| Some(entry.file_name().as_os_str()) != own.file_name()))
}

/// Grows an unmounted filesystem to the size of its image.
///
/// Only ext4 can: the others grow mounted, and are an error of kind `Unsupported` here. A resize2fs that is killed can
/// leave a filesystem that only a person can repair, so it works on a copy, `<image>.grown`, which then replaces the
/// image; the copy shares its blocks where the disk can do that.
pub fn grow_unmounted(fs: Filesystem, image: &Path, deadline: Duration) -> Result<Growth> {
    if fs != Filesystem::Ext4 {
        let only_mounted = io::Error::new(io::ErrorKind::Unsupported, format!("{fs} can only grow mounted"));
        return Err(only_mounted).doing("grow", image);
    }
    let end = Instant::now() + deadline;
    let before = filesystem_size(image, fs)?;
    // ext4 has blocks of up to 4 KiB, and leaves what is less alone.
    if loopdev::size(image)? < before + 4096 {
        return Ok(Growth::AlreadyFull);
    }
    let draft = Draft::copy(image)?;
    let left = || end.saturating_duration_since(Instant::now());
    // resize2fs insists on a full check before.
    repair_ext4(&["-f", "-p"], &draft.path, left())?;
    tool(fs, "resize2fs", &[], &draft.path, left(), &[0])?;
    if filesystem_size(&draft.path, fs)? <= before {
        return Ok(Growth::AlreadyFull);
    }
    draft.replace(image)?;
    Ok(Growth::Grown)
}

/// Makes an unmounted filesystem consistent before it is mounted; damage beyond safe repair is an error.
///
/// XFS and Btrfs do this by themselves when they are mounted.
pub fn check(fs: Filesystem, device_or_image: &Path, deadline: Duration) -> Result<()> {
    match fs {
        Filesystem::Ext4 => repair_ext4(&["-p"], device_or_image, deadline),
        Filesystem::Xfs | Filesystem::Btrfs => Ok(()),
    }
}

/// Gives a copied, unmounted filesystem an identity of its own where it could not be mounted next to the original.
///
/// Only Btrfs needs it, and no tool for it: ext4 does not mind, and XFS is content with the mount option `nouuid`.
pub fn renew_identity(fs: Filesystem, image: &Path, _deadline: Duration) -> Result<()> {
    match fs {
        Filesystem::Btrfs => btrfs_identity::renew(image).doing("renew the identity of", image),
        Filesystem::Ext4 | Filesystem::Xfs => Ok(()),
    }
}

fn make_in(file: &Path, fs: Filesystem, deadline: Duration) -> Result<()> {
    let (program, options): (_, &[&str]) = match fs {
        // Discarding costs nothing in a sparse file, and is how mke2fs learns that the file reads as zeros: the
        // kernel then need not write inode tables later, nor mke2fs a journal now.
        Filesystem::Ext4 => ("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", "lazy_journal_init=1"]),
        Filesystem::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
        Filesystem::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
    };
    tool(fs, program, options, file, deadline, &[0]).map(drop)
}

fn repair_ext4(options: &[&str], device_or_image: &Path, deadline: Duration) -> Result<()> {
    // e2fsck(8): 1 says that errors were corrected.
    tool(Filesystem::Ext4, "e2fsck", options, device_or_image, deadline, &[0, 1]).map(drop)
}

fn tool(
    fs: Filesystem,
    program: &str,
    options: &[&str],
    file: &Path,
    deadline: Duration,
    accepted: &[i32],
) -> Result<Output> {
    let args = options.iter().map(OsStr::new).chain([file.as_os_str()]);
    exec::run_accepting(program, args, deadline, accepted).map_err(|error| match error.errno() {
        Some(errno @ libc::ENOENT) => {
            let doing = format!("run {program} of the Debian package {}", fs.package());
            Error::new(doing, io::Error::from_raw_os_error(errno))
        }
        _ => error,
    })
}

/// The file in which a filesystem is made or grown before it becomes the image; removed unless it does.
struct Draft {
    path: PathBuf,
    file: File,
}

impl Draft {
    /// An empty file like the image.
    fn create(image: &Path, like: &fs::Metadata) -> Result<Self> {
        let path = Self::free_path(image, ".mkfs")?;
        let file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).doing("create", &path)?;
        let draft = Self { path, file };
        fchown(&draft.file, Some(like.uid()), Some(like.gid()))
            .and_then(|()| draft.file.set_permissions(Permissions::from_mode(like.mode() & 0o7777)))
            .and_then(|()| draft.file.set_len(like.len()))
            .doing("prepare", &draft.path)?;
        Ok(draft)
    }

    /// A copy of the image.
    fn copy(image: &Path) -> Result<Self> {
        let path = Self::free_path(image, ".grown")?;
        copy::file(image, &path)?;
        let file = OpenOptions::new().read(true).write(true).open(&path).doing("open", &path)?;
        Ok(Self { path, file })
    }

    /// The path of a draft, with what a killed run left there removed.
    fn free_path(image: &Path, suffix: &str) -> Result<PathBuf> {
        let mut path = OsString::from(image);
        path.push(suffix);
        let path = PathBuf::from(path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).doing("remove the leftover", path)
            }
            _ => Ok(path),
        }
    }

    fn replace(self, image: &Path) -> Result<()> {
        self.file.sync_all().doing("write out", &self.path)?;
        fs::rename(&self.path, image).doing("put a filesystem in place of", image)?;
        let parent = image.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        File::open(parent).and_then(|dir| dir.sync_all()).doing("write out", parent)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already where it became the image.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;
