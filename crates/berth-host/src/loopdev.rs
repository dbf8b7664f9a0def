//! Loop devices by ioctl: a file as a block device.
//!
//! A device attached with `autoclear` lives as long as someone holds it: the `LoopDevice`, then the filesystem
//! mounted on it, so that unmounting also detaches and a crash leaves nothing behind. A device without it stays
//! until `detach`.
#![expect(unsafe_code, reason = "the loop driver speaks ioctl")]

mod ioctl;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Seek as _, SeekFrom},
    os::unix::{
        ffi::OsStringExt as _,
        fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rustix::{
    fs::{CWD, FileType, Mode},
    io::Errno,
};

use crate::error::{Change, Doing as _, Error, Result};

const CONTROL: &str = "/dev/loop-control";

/// Others attach at the same time; a dozen losing rounds in a row would already be remarkable.
const ATTACH_ATTEMPTS: u32 = 100;

/// Whoever merely reads a device (udev, blkid, our own listing) has closed it within this many attempts.
const DETACH_ATTEMPTS: u32 = 20;
const DETACH_PAUSE: Duration = Duration::from_millis(5);

/// The major number of every loop device; the minor is its N.
pub const MAJOR: u32 = 7;

/// How a file is attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Refuse writes to the device.
    pub read_only: bool,
    /// Bypass the page cache of the file; where its filesystem cannot, the kernel quietly goes through the cache.
    pub direct_io: bool,
    /// Detach when the last user closes the device.
    pub autoclear: bool,
}

/// A loop device held open.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    number: u32,
    _held: File,
}

/// A loop device and the file behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// The N of `/dev/loopN`.
    pub number: u32,
    /// The path of the file when it was attached, or since renamed to.
    pub backing: PathBuf,
    /// The `st_dev` of the file.
    pub device: u64,
    /// The inode of the file.
    pub inode: u64,
    /// Whether the device detaches with its last user.
    pub autoclear: bool,
    /// Whether it refuses writes.
    pub read_only: bool,
}

impl LoopDevice {
    /// Attaches `image`, which must not be a symbolic link, to a free loop device.
    ///
    /// Two devices on one image destroy it, and the kernel does not mind: that this is the only one is the
    /// caller's duty.
    pub fn attach(image: &Path, options: Options) -> Result<Self> {
        let backing = OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(libc::O_NOFOLLOW)
            .open(image)
            .doing("open the image", image)?;
        let control = OpenOptions::new().read(true).write(true).open(CONTROL).doing("open", CONTROL)?;
        for _ in 0..ATTACH_ATTEMPTS {
            let number = ioctl::free_number(&control).doing("find a free loop device for", image)?;
            let path = node(number)?;
            let device = match OpenOptions::new().read(true).write(!options.read_only).open(&path) {
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) => continue,
                opened => opened.doing("open the loop device", &path)?,
            };
            match ioctl::configure(&device, &backing, options) {
                // Someone else took it between the two calls.
                Err(Errno::BUSY) => {}
                Err(errno) => return Err(errno).doing("attach a loop device to", image),
                Ok(()) => return Ok(Self { path, number, _held: device }),
            }
        }
        Err(Errno::BUSY).doing("win a free loop device for", image)
    }

    /// Opens the device if `image` is what it is attached to, by device and inode; while it is open, it stays attached.
    pub fn open_if_attached(number: u32, image: &Path) -> Result<Option<Self>> {
        let Some(identity) = identity_of(image)? else { return Ok(None) };
        if backing_name(number).doing("read the backing file of", name(number))?.is_none() {
            return Ok(None);
        }
        let path = node(number)?;
        match File::open(&path).and_then(|device| Ok((ioctl::status(&device)?, device))) {
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error).doing("read the status of", path),
            Ok((status, held)) if (status.device(), status.inode()) == identity => {
                Ok(Some(Self { path, number, _held: held }))
            }
            Ok(_) => Ok(None),
        }
    }

    /// The path of the device node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The N of `/dev/loopN`.
    pub fn number(&self) -> u32 {
        self.number
    }
}

/// The device node of a number.
pub fn path_of(number: u32) -> PathBuf {
    Path::new("/dev").join(name(number))
}

/// The N of `/dev/loopN`.
pub fn number_of(device: &str) -> Option<u32> {
    device.strip_prefix("/dev/loop")?.parse().ok()
}

/// The devices attached to `image`, found by what file it is and not by its name.
///
/// To ask, each attached device is opened for a moment; one that is about to detach does so only afterwards.
#[cfg(test)]
pub(crate) fn attached_to(image: &Path) -> Result<Vec<Attached>> {
    let Some(identity) = identity_of(image)? else { return Ok(Vec::new()) };
    // A device whose backing file cannot be read is on another filesystem, which is broken: this image could be stat'ed.
    let readable =
        attached(|_| true)?.into_iter().filter_map(|(number, backing)| inspect(number, backing).ok()?);
    Ok(readable.filter(|device| (device.device, device.inode) == identity).collect())
}

/// The devices whose file lies below `dir`, or lay there until it was deleted.
pub fn attached_below(dir: &Path) -> Result<Vec<Attached>> {
    let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let found = attached(|backing| backing.starts_with(&dir))?.into_iter();
    found.filter_map(|(number, backing)| inspect(number, backing).transpose()).collect()
}

/// Whether a device is attached to a file below `dir`, by its name alone: neither the file nor the device is asked, so
/// that the answer does not wait for a disk that is far away. `dir` is to have no symbolic link in it.
pub fn is_backing_below(dir: &Path) -> Result<bool> {
    Ok(!attached(|backing| backing.starts_with(dir))?.is_empty())
}

/// Detaches the device; one that is not attached is `AlreadyTrue`.
///
/// The kernel takes the order also for a device in use, and carries it out when the last user is gone. Until then
/// the answer here is an error with errno `EBUSY`; ask again to learn that it has happened.
pub fn detach(number: u32) -> Result<Change> {
    let Some(backing) = backing_name(number).doing("read the backing file of", name(number))? else {
        return Ok(Change::AlreadyTrue);
    };
    match node(number).and_then(|path| File::open(&path).doing("open the loop device", path)) {
        Ok(device) => match ioctl::clear(&device) {
            Ok(()) => {}
            Err(Errno::NXIO) => return Ok(Change::AlreadyTrue),
            Err(errno) => return Err(errno).doing("detach", name(number)),
        },
        Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::ENXIO)) => {
            return Ok(Change::AlreadyTrue);
        }
        Err(error) => return Err(error),
    }
    for attempt in 0..DETACH_ATTEMPTS {
        if attempt > 0 {
            thread::sleep(DETACH_PAUSE);
        }
        // A different file means that the number has already been given to someone else.
        if backing_name(number).doing("read the backing file of", name(number))?.as_ref() != Some(&backing) {
            return Ok(Change::Made);
        }
    }
    Err(Errno::BUSY).doing("detach", name(number))
}

/// Makes the device as large as its file has become.
pub fn refresh_capacity(number: u32) -> Result<()> {
    let path = node(number)?;
    let device = File::open(&path).doing("open the loop device", &path)?;
    ioctl::refresh_capacity(&device).doing("refresh the capacity of", &path)
}

/// How far the kernel reads ahead on the device, in KiB.
pub fn read_ahead_kb(number: u32) -> Result<u64> {
    let path = sysfs(number).join("queue/read_ahead_kb");
    let text = fs::read_to_string(&path).doing("read", &path)?;
    text.trim()
        .parse()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        .doing("parse", path)
}

/// Sets how far the kernel reads ahead on the device.
pub fn set_read_ahead_kb(number: u32, kb: u64) -> Result<()> {
    let path = sysfs(number).join("queue/read_ahead_kb");
    fs::write(&path, kb.to_string()).doing("write", path)
}

/// The size in bytes of a block device or a regular file.
pub fn size(path: &Path) -> Result<u64> {
    File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).doing("read the size of", path)
}

/// Whether a filesystem, or anyone else who claims it for himself, holds the block device.
///
/// The question is put by claiming the device for a moment.
pub fn is_in_use(path: &Path) -> Result<bool> {
    let seen = fs::metadata(path).doing("stat", path)?;
    if !seen.file_type().is_block_device() {
        return Err(Errno::NOTBLK).doing("claim", path);
    }
    match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        claimed => claimed.map(|_| false).doing("claim", path),
    }
}

/// The devices that have a file with such a name, in order.
fn attached(wanted: impl Fn(&Path) -> bool) -> Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for number in numbers()? {
        let backing = backing_name(number).doing("read the backing file of", name(number))?;
        found.extend(backing.filter(|backing| wanted(backing)).map(|backing| (number, backing)));
    }
    found.sort_unstable();
    Ok(found)
}

/// The devices there are, attached or not.
fn numbers() -> Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/sys/block").doing("list", "/sys/block")? {
        let entry = entry.doing("list", "/sys/block")?;
        numbers.extend(
            entry.file_name().to_str().and_then(|name| name.strip_prefix("loop")?.parse::<u32>().ok()),
        );
    }
    Ok(numbers)
}

/// What is attached, or `None` where it no longer is.
fn inspect(number: u32, backing: PathBuf) -> Result<Option<Attached>> {
    let path = node(number)?;
    match File::open(&path).and_then(|device| Ok(ioctl::status(&device)?)) {
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error).doing("read the status of", path),
        Ok(status) => Ok(Some(Attached {
            number,
            backing,
            device: status.device(),
            inode: status.inode(),
            autoclear: status.autoclear(),
            read_only: status.read_only(),
        })),
    }
}

/// The `st_dev` and inode of an image, or `None` where it is missing.
fn identity_of(image: &Path) -> Result<Option<(u64, u64)>> {
    match fs::metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        seen => seen.map(|seen| Some((seen.dev(), seen.ino()))).doing("stat the image", image),
    }
}

/// Whether this is the answer of a device that is no longer attached, or no longer there.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENOENT))
}

/// The name of the attached file without the suffix that the kernel adds for a deleted one, or `None` where none is attached.
fn backing_name(number: u32) -> io::Result<Option<PathBuf>> {
    let name = match fs::read(sysfs(number).join("loop/backing_file")) {
        Ok(name) => name,
        // The attribute goes away with the attachment, also between open and read.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let name = name.strip_suffix(b"\n").unwrap_or(&name);
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    Ok((!name.is_empty()).then(|| std::ffi::OsString::from_vec(name.to_vec()).into()))
}

/// The device node, made where `/dev` is not kept by the kernel.
fn node(number: u32) -> Result<PathBuf> {
    let path = path_of(number);
    if path.exists() {
        return Ok(path);
    }
    let numbers = sysfs(number).join("dev");
    let text = fs::read_to_string(&numbers).doing("read", &numbers)?;
    let device = text
        .trim()
        .split_once(':')
        .and_then(|(major, minor)| Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?)))
        .ok_or_else(|| Error::new(format!("parse {}", numbers.display()), io::ErrorKind::InvalidData))?;
    match rustix::fs::mknodat(CWD, &path, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, device) {
        Ok(()) | Err(Errno::EXIST) => Ok(path),
        Err(errno) => Err(errno).doing("make the device node", path),
    }
}

fn sysfs(number: u32) -> PathBuf {
    Path::new("/sys/block").join(name(number))
}

fn name(number: u32) -> String {
    format!("loop{number}")
}

#[cfg(test)]
mod tests;
