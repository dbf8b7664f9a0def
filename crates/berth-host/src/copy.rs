//! Copies that lose nothing: whole trees, and image files.

mod data;
mod metadata;
#[cfg(test)]
mod tests;

use std::{
    ffi::CString,
    fs::{self, File, OpenOptions},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Statx},
    io::Errno,
};

use self::{data::Data, metadata::Metadata};
use crate::{
    error::{Change, Doing as _, Result},
    path::{
        Dir,
        walk::{Descent, EntryLocation, INSIDE, Visitor, file_type, identity, stat_fd, walk},
    },
};

/// How the name of the directory begins that holds one name of each file with several while a tree is copied.
const LINKS: &str = ".berth-links";
const BLOCK: u64 = 512;

/// What a copy did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Copied {
    /// Entries made that are no directories.
    pub files: u64,
    /// Bytes of data, copied or shared.
    pub bytes: u64,
    /// Whether there was data and all of it is shared with the source.
    pub cloned: bool,
    /// Sockets, which mean nothing without their process.
    pub sockets_skipped: u64,
    /// Files that changed or vanished while they were copied: the copy may hold neither their old nor their new state.
    pub changed: u64,
}

impl Copied {
    fn add_data(&mut self, data: &Data, stat: &Statx) {
        let (bytes, cloned) = match data {
            Data::Cloned => (stat.stx_size.min(stat.stx_blocks * BLOCK), true),
            Data::Copied(bytes) => (*bytes, false),
        };
        if bytes > 0 {
            self.cloned = cloned && (self.cloned || self.bytes == 0);
        }
        self.bytes += bytes;
    }
}

/// Copies what is in `source`, and the metadata of `source` itself, to the empty directory `destination`.
///
/// Owner, mode, times, extended attributes and ACLs, hard links, symbolic links, FIFOs, devices and holes are kept.
/// Of what is mounted inside only the mount point is copied, as an empty directory. What was copied is durable.
pub fn tree(source: &Dir, destination: &Dir) -> Result<Copied> {
    let own = stat_fd(source.as_fd()).doing("stat", source.path())?;
    metadata::remove_acls(destination.as_fd()).doing("prepare", destination.path())?;
    let mut copying = Copying {
        links: Links::new(source, destination)?,
        destination: Descent::from(destination)?,
        destination_identity: identity(&stat_fd(destination.as_fd()).doing("stat", destination.path())?),
        metadata: Metadata::new(),
        copied: Copied::default(),
    };
    walk(source, &mut copying)?;
    copying.links.discard()?;
    copying
        .metadata
        .copy(source.as_fd(), &own, destination.as_fd())
        .doing("copy the metadata of", source.path())?;
    rustix::fs::syncfs(destination).doing("flush", destination.path())?;
    Ok(copying.copied)
}

/// A number that stays the same while nothing in the tree is made, changed or removed.
///
/// The clock behind the times of files may tick only every few milliseconds: a change within the same tick, of a
/// file that keeps its size, can go unnoticed.
pub fn fingerprint(source: &Dir) -> Result<u128> {
    let own = stat_fd(source.as_fd()).doing("stat", source.path())?;
    let mut fingerprint = Fingerprint(hash(0, &[], &own));
    walk(source, &mut fingerprint)?;
    Ok(fingerprint.0)
}

/// Copies an image to a new file of the same mode, and makes that durable.
pub fn file(source: &Path, destination: &Path) -> Result<Copied> {
    let from = File::open(source).doing("open", source)?;
    let before = stat_fd(&from).doing("stat", source)?;
    if file_type(&before) != FileType::RegularFile {
        return Err(Errno::INVAL).doing("copy as a file", source);
    }
    let to = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(destination)
        .doing("create", destination)?;
    let copy = || -> io::Result<Copied> {
        let mut copied = Copied { files: 1, ..Copied::default() };
        copied.add_data(&data::copy(&from, &to, before.stx_size)?, &before);
        copied.changed = u64::from(differ(&before, &stat_fd(&from)?));
        to.set_permissions(fs::Permissions::from_mode(u32::from(before.stx_mode) & 0o7777))?;
        to.sync_all()?;
        let parent = destination.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(copied)
    };
    let copied = copy();
    if copied.is_err() {
        // The error of the copy is what the caller should get, not that its rest stays behind.
        let _ = fs::remove_file(destination);
    }
    copied.doing(&format!("copy {} to", source.display()), destination)
}

/// Whether files in the directory can share their data, found out by trying.
pub fn can_reflink(dir: &Dir) -> Result<bool> {
    let (from_name, from) = dir.create_temporary("reflink")?;
    let to = dir.create_temporary("reflink");
    let shared = to.as_ref().is_ok_and(|(_, to)| {
        rustix::io::write(&from, &[1; 4096]).is_ok() && rustix::fs::ioctl_ficlone(to, &from).is_ok()
    });
    dir.remove_file(&from_name)?;
    dir.remove_file(&to?.0)?;
    Ok(shared)
}

/// A copy of a tree under way.
struct Copying<'a> {
    destination: Descent,
    destination_identity: (u32, u32, u64),
    links: Links<'a>,
    metadata: Metadata,
    copied: Copied,
}

impl Visitor for Copying<'_> {
    fn file(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()> {
        if file_type(stat) == FileType::Socket {
            self.copied.sockets_skipped += 1;
            return Ok(());
        }
        let linked = stat.stx_nlink > 1;
        let made = if linked && self.links.give(stat, location, self.destination.current())? {
            true
        } else {
            let made = match file_type(stat) {
                FileType::RegularFile => self.copy_regular(location)?,
                _ => self.copy_special(location)?,
            };
            if made && linked {
                self.links.keep(stat, location, self.destination.current())?;
            }
            made
        };
        if made {
            self.copied.files += 1;
        } else {
            self.copied.changed += 1;
        }
        Ok(())
    }

    fn enter(
        &mut self,
        location: &EntryLocation<'_>,
        _directory: BorrowedFd<'_>,
        stat: &Statx,
    ) -> Result<()> {
        if identity(stat) == self.destination_identity {
            return Err(location.failed("copy a tree into itself, at")(Errno::INVAL));
        }
        let made = self.make_directory(location)?;
        self.destination.push(location.name.to_owned(), made).map_err(location.failed("copy the directory"))
    }

    fn leave(&mut self, location: &EntryLocation<'_>, directory: BorrowedFd<'_>) -> Result<()> {
        let failed = || location.failed("copy the metadata of");
        let (_, made) = self.destination.pop().map_err(failed())?;
        // Only now, when nothing more is made inside that would change the times again or take over an ACL.
        let stat = stat_fd(directory).map_err(failed())?;
        self.metadata.copy(directory, &stat, made.as_fd()).map_err(failed())
    }

    fn mount_point(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()> {
        if file_type(stat) == FileType::Directory {
            let directory = self.make_directory(location)?;
            let mode = Mode::from_raw_mode(stat.stx_mode.into());
            rustix::fs::fchmod(directory, mode).map_err(location.failed("copy the mount point"))?;
        }
        Ok(())
    }

    fn vanished(&mut self) {
        self.copied.changed += 1;
    }
}

impl Copying<'_> {
    fn make_directory(&self, location: &EntryLocation<'_>) -> Result<OwnedFd> {
        let parent = self.destination.current();
        rustix::fs::mkdirat(parent, location.name, Mode::RWXU)
            .map_err(location.failed("copy the directory"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat2(parent, location.name, flags, Mode::empty(), INSIDE)
            .map_err(location.failed("copy the directory"))
    }

    /// Copies a regular file; false when it is none any more.
    fn copy_regular(&mut self, location: &EntryLocation<'_>) -> Result<bool> {
        let mut copy = || -> io::Result<bool> {
            // Without NONBLOCK a FIFO put in its place just now would hold us forever.
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOATIME;
            let Some(source) = location.open(flags)? else { return Ok(false) };
            let source = File::from(source);
            let before = stat_fd(&source)?;
            if file_type(&before) != FileType::RegularFile {
                return Ok(false);
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mode = Mode::RUSR | Mode::WUSR;
            let current = self.destination.current();
            let destination = File::from(rustix::fs::openat2(current, location.name, flags, mode, INSIDE)?);
            self.copied.add_data(&data::copy(&source, &destination, before.stx_size)?, &before);
            self.copied.changed += u64::from(differ(&before, &stat_fd(&source)?));
            self.metadata.copy(source.as_fd(), &before, destination.as_fd())?;
            Ok(true)
        };
        copy().map_err(location.failed("copy"))
    }

    /// Copies a symbolic link, a FIFO or a device; false when it is none of them any more.
    fn copy_special(&mut self, location: &EntryLocation<'_>) -> Result<bool> {
        let mut copy = || -> rustix::io::Result<bool> {
            let Some(source) = location.open(OFlags::PATH)? else { return Ok(false) };
            let stat = stat_fd(&source)?;
            let current = self.destination.current();
            match file_type(&stat) {
                FileType::Symlink => {
                    rustix::fs::symlinkat(metadata::read_link(source.as_fd())?, current, location.name)?;
                }
                kind @ (FileType::Fifo | FileType::CharacterDevice | FileType::BlockDevice) => {
                    let device = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
                    rustix::fs::mknodat(current, location.name, kind, Mode::RUSR | Mode::WUSR, device)?;
                }
                _ => return Ok(false),
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let made = rustix::fs::openat2(current, location.name, flags, Mode::empty(), INSIDE)?;
            self.metadata.copy(source.as_fd(), &stat, made.as_fd())?;
            Ok(true)
        };
        copy().map_err(location.failed("copy"))
    }
}

/// Files that have several names in the source.
///
/// The first copy of each gets another name in a directory made for that, to link from when the next name comes up.
/// Paths would not do: those of a deep tree are longer than the kernel takes.
struct Links<'a> {
    destination: &'a Dir,
    name: String,
    directory: Option<Dir>,
}

impl<'a> Links<'a> {
    fn new(source: &Dir, destination: &'a Dir) -> Result<Self> {
        let mut name = LINKS.to_owned();
        while source.exists(&name)? {
            name.push('_');
        }
        Ok(Self { destination, name, directory: None })
    }

    /// Links the name at `location` to the file copied already; false when it was not copied yet.
    fn give(&self, stat: &Statx, location: &EntryLocation<'_>, current: BorrowedFd<'_>) -> Result<bool> {
        let Some(directory) = &self.directory else { return Ok(false) };
        match rustix::fs::linkat(directory, link_name(stat), current, location.name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(location.failed("copy the hard link")(error)),
        }
    }

    /// Keeps a name of the file just copied.
    fn keep(&mut self, stat: &Statx, location: &EntryLocation<'_>, current: BorrowedFd<'_>) -> Result<()> {
        let directory = match &mut self.directory {
            Some(directory) => directory,
            missing => {
                // One that is there already belongs to the tree: it was made in the source just now.
                if self.destination.make_dir(&self.name, 0o700)? == Change::AlreadyTrue {
                    return Err(Errno::EXIST).doing("make", self.destination.child_path(&self.name));
                }
                missing.insert(self.destination.dir(&self.name)?)
            }
        };
        rustix::fs::linkat(current, location.name, &*directory, link_name(stat), AtFlags::empty())
            .map_err(location.failed("keep a hard link of"))
    }

    fn discard(&mut self) -> Result<()> {
        if self.directory.take().is_some() {
            self.destination.remove_tree(&self.name)?;
        }
        Ok(())
    }
}

fn link_name(stat: &Statx) -> CString {
    let (major, minor, inode) = identity(stat);
    CString::new(format!("{major}-{minor}-{inode}")).expect("numbers hold no NUL")
}

struct Fingerprint(u128);

impl Fingerprint {
    fn add(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()> {
        // The directory's inode identifies its path, which goes into the sum with the directory itself.
        let parent = stat_fd(location.parent).map_err(location.failed("stat the directory of"))?.stx_ino;
        // A sum, since the order in which a directory is listed means nothing.
        self.0 = self.0.wrapping_add(hash(parent, location.name.to_bytes(), stat));
        Ok(())
    }
}

impl Visitor for Fingerprint {
    fn file(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()> {
        self.add(location, stat)
    }

    fn enter(
        &mut self,
        location: &EntryLocation<'_>,
        _directory: BorrowedFd<'_>,
        stat: &Statx,
    ) -> Result<()> {
        self.add(location, stat)
    }

    fn mount_point(&mut self, _place: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }
}

fn hash(parent: u64, name: &[u8], stat: &Statx) -> u128 {
    let half = |which: u8| {
        let mut hasher = DefaultHasher::new();
        let (modified, changed) = (&stat.stx_mtime, &stat.stx_ctime);
        (which, parent, name, stat.stx_ino, stat.stx_size, stat.stx_mode).hash(&mut hasher);
        (modified.tv_sec, modified.tv_nsec, changed.tv_sec, changed.tv_nsec).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

/// Whether a file changed between two calls of stat.
fn differ(before: &Statx, after: &Statx) -> bool {
    let state = |stat: &Statx| {
        let (modified, changed) = (&stat.stx_mtime, &stat.stx_ctime);
        (stat.stx_size, modified.tv_sec, modified.tv_nsec, changed.tv_sec, changed.tv_nsec)
    };
    state(before) != state(after)
}
