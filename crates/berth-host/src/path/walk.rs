//! The one walk over a tree, for copying, measuring and removing.
//!
//! Goes by descriptors, follows no symbolic link, enters no mount point, and neither recurses nor keeps more than a
//! few directories open, so that no tree is too deep for it. Entries that vanish under the walk are reported, not
//! an error.

use std::{
    ffi::{CStr, CString, OsStr},
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxAttributes, StatxFlags},
    io::Errno,
};

use super::{BENEATH, DIRECTORY, Dir};
use crate::error::{Doing as _, Error, Result};

/// How many directories of one descent are held open at once.
const OPEN_LEVELS: usize = 32;
const READ_BUFFER: usize = 32 * 1024;

/// How names are resolved inside a tree that must not be left, by mount points neither.
pub(crate) const INSIDE: ResolveFlags = BENEATH.union(ResolveFlags::NO_XDEV);

/// What to do with the entries of a tree.
pub(crate) trait Visitor {
    /// Any entry that is no directory.
    fn file(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()>;

    /// A directory about to be opened.
    fn approach(&mut self, _place: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }

    /// A directory now open, before its entries.
    fn enter(&mut self, location: &EntryLocation<'_>, directory: BorrowedFd<'_>, stat: &Statx) -> Result<()>;

    /// A directory after its entries.
    fn leave(&mut self, _place: &EntryLocation<'_>, _directory: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }

    /// A file or directory something is mounted on.
    fn mount_point(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()>;

    /// An entry was listed and then gone, or something else.
    fn vanished(&mut self) {}
}

/// Where in the tree an entry is.
pub(crate) struct EntryLocation<'a> {
    /// The directory that holds the entry.
    pub(crate) parent: BorrowedFd<'a>,
    /// The name of the entry there.
    pub(crate) name: &'a CStr,
    top: &'a Path,
    descent: &'a Descent,
}

impl EntryLocation<'_> {
    /// Turns what the system said into an error that names this place.
    pub(crate) fn failed<E: Into<io::Error>>(&self, doing: &str) -> impl FnOnce(E) -> Error {
        // The path is put together only when there is an error: in a deep tree it is long.
        move |error| Err::<(), E>(error).doing(doing, self.path()).expect_err("the result is an error")
    }

    /// Opens the entry itself, following nothing; none when it vanished or became something else.
    pub(crate) fn open(&self, flags: OFlags) -> rustix::io::Result<Option<OwnedFd>> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat2(self.parent, self.name, flags, Mode::empty(), INSIDE);
        match rustix::io::retry_on_intr(open) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn path(&self) -> PathBuf {
        let mut path = self.top.to_owned();
        path.extend(self.descent.levels.iter().skip(1).map(|level| OsStr::from_bytes(level.name.to_bytes())));
        path.push(OsStr::from_bytes(self.name.to_bytes()));
        path
    }
}

/// Visits everything below `top`, not `top` itself; the entries of a directory in no particular order.
pub(crate) fn walk(top: &Dir, visitor: &mut impl Visitor) -> Result<()> {
    Walk {
        top: top.path(),
        descent: Descent::from(top)?,
        unvisited: Vec::new(),
        buffer: vec![MaybeUninit::uninit(); READ_BUFFER].into_boxed_slice(),
    }
    .run(visitor)
}

/// What `stat` says about one entry of a directory, nothing followed; none when there is no such entry.
pub(crate) fn stat_entry(parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<Option<Statx>> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    match rustix::fs::statx(parent, name, flags, StatxFlags::BASIC_STATS) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What `stat` says about an open file.
pub(crate) fn stat_fd(fd: impl AsFd) -> rustix::io::Result<Statx> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// Whether something is mounted on the entry.
pub(crate) fn is_mount_point(stat: &Statx) -> bool {
    stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
}

/// The type of a file by its `stat`.
pub(crate) fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// What distinguishes one inode from all others of the machine.
pub(crate) fn identity(stat: &Statx) -> (u32, u32, u64) {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}

struct Walk<'a> {
    top: &'a Path,
    descent: Descent,
    /// For each level, the names of the directories in it that were not visited yet.
    unvisited: Vec<Vec<CString>>,
    buffer: Box<[MaybeUninit<u8>]>,
}

impl Walk<'_> {
    fn run(mut self, visitor: &mut impl Visitor) -> Result<()> {
        self.read(visitor)?;
        while let Some(names) = self.unvisited.last_mut() {
            if let Some(name) = names.pop() {
                self.descend(name, visitor)?;
                continue;
            }
            self.unvisited.pop();
            if !self.unvisited.is_empty() {
                let (name, directory) = self.descent.pop().doing("go back up inside", self.top)?;
                visitor.leave(&self.location(&name), directory.as_fd())?;
            }
        }
        Ok(())
    }

    fn location<'a>(&'a self, name: &'a CStr) -> EntryLocation<'a> {
        EntryLocation { parent: self.descent.current(), name, top: self.top, descent: &self.descent }
    }

    /// Visits the files of the current directory and remembers its directories.
    fn read(&mut self, visitor: &mut impl Visitor) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut directories = Vec::new();
        let mut entries = RawDir::new(self.descent.current(), &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // What the kernel says of a directory that was removed while it was open.
                Err(Errno::NOENT) => {
                    visitor.vanished();
                    break;
                }
                Err(error) => return Err(self.location(c"").failed("list")(error)),
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if entry.file_type() == FileType::Directory {
                directories.push(name.to_owned());
                continue;
            }
            let location = self.location(name);
            match stat_entry(location.parent, name).map_err(location.failed("stat"))? {
                None => visitor.vanished(),
                Some(stat) if file_type(&stat) == FileType::Directory => directories.push(name.to_owned()),
                Some(stat) if is_mount_point(&stat) => visitor.mount_point(&location, &stat)?,
                Some(stat) => visitor.file(&location, &stat)?,
            }
        }
        self.buffer = buffer;
        self.unvisited.push(directories);
        Ok(())
    }

    fn descend(&mut self, name: CString, visitor: &mut impl Visitor) -> Result<()> {
        let location = self.location(&name);
        let Some(stat) = stat_entry(location.parent, &name).map_err(location.failed("stat"))? else {
            visitor.vanished();
            return Ok(());
        };
        if is_mount_point(&stat) {
            return visitor.mount_point(&location, &stat);
        }
        visitor.approach(&location, &stat)?;
        let directory = match location.open(DIRECTORY) {
            Ok(Some(directory)) => directory,
            Ok(None) => {
                visitor.vanished();
                return Ok(());
            }
            Err(Errno::XDEV) => return visitor.mount_point(&location, &stat),
            Err(error) => return Err(location.failed("open the directory")(error)),
        };
        visitor.enter(&location, directory.as_fd(), &stat)?;
        self.descent.push(name, directory).doing("descend inside", self.top)?;
        self.read(visitor)
    }
}

/// The directories from a top down to the current one, of which only the deepest are held open.
pub(crate) struct Descent {
    levels: Vec<Level>,
}

struct Level {
    name: CString,
    /// None once the descent went far below: it is opened again as the `..` of its child.
    fd: Option<OwnedFd>,
    /// Known once `fd` was closed.
    identity: (u32, u32, u64),
}

impl Descent {
    /// Starts at `top`, by a descriptor of its own, since the reading position belongs to a descriptor.
    pub(crate) fn from(top: &Dir) -> Result<Self> {
        let fd = rustix::fs::openat(top, c".", DIRECTORY, Mode::empty()).doing("open", top.path())?;
        Ok(Self { levels: vec![Level { name: CString::default(), fd: Some(fd), identity: (0, 0, 0) }] })
    }

    /// The directory that the walk is in.
    pub(crate) fn current(&self) -> BorrowedFd<'_> {
        let level = self.levels.last().expect("a descent has a top");
        level.fd.as_ref().expect("the deepest level is open").as_fd()
    }

    /// Goes down into an opened directory of the current one.
    pub(crate) fn push(&mut self, name: CString, fd: OwnedFd) -> rustix::io::Result<()> {
        self.levels.push(Level { name, fd: Some(fd), identity: (0, 0, 0) });
        let far = self.levels.len().checked_sub(OPEN_LEVELS + 1);
        if let Some(level) = far.and_then(|index| self.levels.get_mut(index))
            && let Some(fd) = level.fd.take()
        {
            level.identity = identity(&stat_fd(&fd)?);
        }
        Ok(())
    }

    /// Goes up by one and gives the directory that was left; ESTALE when that was moved elsewhere meanwhile.
    pub(crate) fn pop(&mut self) -> rustix::io::Result<(CString, OwnedFd)> {
        let child = self.levels.pop().expect("only a directory that was entered is left");
        let fd = child.fd.expect("the deepest level is open");
        let parent = self.levels.last_mut().expect("the top is never left");
        if parent.fd.is_none() {
            let up = rustix::fs::openat(&fd, c"..", DIRECTORY, Mode::empty())?;
            if identity(&stat_fd(&up)?) != parent.identity {
                return Err(Errno::STALE);
            }
            parent.fd = Some(up);
        }
        Ok((child.name, fd))
    }
}
