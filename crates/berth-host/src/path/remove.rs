//! Removes a tree.
//!
//! Whoever could write there may have made it immutable (`chattr +i`) or append-only (`+a`), which refuses the removal to
//! root too. Such attributes are cleared where they stand in the way.

use std::{
    ffi::{CStr, CString, OsStr},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::ffi::OsStrExt as _,
    },
};

use rustix::{
    fs::{AtFlags, FileType, IFlags, Mode, OFlags, Statx},
    io::Errno,
};

use super::{
    DIRECTORY, Dir, proc_path,
    walk::{EntryLocation, INSIDE, Visitor, file_type, is_mount_point, stat_entry, walk},
};
use crate::error::{Change, Doing as _, Result};

/// How often a tree is walked again because there was still something in it.
const ROUNDS: usize = 16;

/// What a removal may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Everything,
    /// Directories; the first entry that is something else stops the removal with ENOTEMPTY.
    EmptyDirectories,
}

/// Removes the entry `name` of `parent` with everything below it.
pub(super) fn tree(parent: &Dir, name: &OsStr, scope: Scope) -> Result<Change> {
    let path = parent.path().join(name);
    let c_name = CString::new(name.as_bytes()).doing("remove", &path)?;
    let Some(stat) = stat_entry(parent.as_fd(), &c_name).doing("stat", &path)? else {
        return Ok(Change::AlreadyTrue);
    };
    if is_mount_point(&stat) {
        return Err(Errno::XDEV).doing("remove the mount point", path);
    }
    if file_type(&stat) != FileType::Directory {
        if scope == Scope::EmptyDirectories {
            return Err(Errno::NOTDIR).doing("remove the directory", path);
        }
        return match unlink(parent.as_fd(), &c_name, AtFlags::empty(), Parent::Outside) {
            Ok(()) => Ok(Change::Made),
            Err(Errno::NOENT) => Ok(Change::AlreadyTrue),
            Err(error) => Err(error).doing("remove", path),
        };
    }
    make_accessible(parent.as_fd(), &c_name, &stat).doing("make accessible", &path)?;
    let fd = parent.open_beneath(&*c_name, DIRECTORY, Mode::empty(), INSIDE).doing("open", &path)?;
    let top = Dir { fd, path };
    for _ in 0..ROUNDS {
        walk(&top, &mut Removal { scope })?;
        match unlink(parent.as_fd(), &c_name, AtFlags::REMOVEDIR, Parent::Outside) {
            Ok(()) | Err(Errno::NOENT) => return Ok(Change::Made),
            // Someone still writes there, or the filesystem skipped entries because we removed while listing.
            Err(Errno::NOTEMPTY) => {}
            Err(error) => return Err(error).doing("remove the directory", top.path()),
        }
    }
    Err(Errno::NOTEMPTY).doing("remove the directory", top.path())
}

struct Removal {
    scope: Scope,
}

impl Visitor for Removal {
    fn file(&mut self, location: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        if self.scope == Scope::EmptyDirectories {
            return Err(location.failed("leave alone")(Errno::NOTEMPTY));
        }
        match unlink(location.parent, location.name, AtFlags::empty(), Parent::Inside) {
            // A directory now: the next round gets it.
            Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
            Err(error) => Err(location.failed("remove")(error)),
        }
    }

    fn approach(&mut self, location: &EntryLocation<'_>, stat: &Statx) -> Result<()> {
        make_accessible(location.parent, location.name, stat).map_err(location.failed("make accessible"))
    }

    fn enter(&mut self, _place: &EntryLocation<'_>, _directory: BorrowedFd<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }

    fn leave(&mut self, location: &EntryLocation<'_>, _directory: BorrowedFd<'_>) -> Result<()> {
        match unlink(location.parent, location.name, AtFlags::REMOVEDIR, Parent::Inside) {
            // Not empty: nor is then the top, which starts the next round.
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
            Err(error) => Err(location.failed("remove the directory")(error)),
        }
    }

    fn mount_point(&mut self, location: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        Err(location.failed("remove the mount point")(Errno::XDEV))
    }
}

/// Where the directory of an entry lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    /// In the tree that is removed, so that its attributes may be cleared.
    Inside,
    Outside,
}

/// Removes one entry, also one that is immutable or append-only, or that lies in such a directory of the tree.
fn unlink(parent: BorrowedFd<'_>, name: &CStr, flags: AtFlags, lies: Parent) -> rustix::io::Result<()> {
    let unlink = || rustix::fs::unlinkat(parent, name, flags);
    match unlink() {
        Err(Errno::PERM | Errno::ACCESS) => {
            if lies == Parent::Inside {
                unprotect(parent);
            }
            unprotect_entry(parent, name);
            unlink()
        }
        result => result,
    }
}

/// Clears the attributes of one entry that refuse its removal; an entry that has none, or cannot have any, is left as it
/// is. What could not be cleared shows when the removal is tried again.
fn unprotect_entry(parent: BorrowedFd<'_>, name: &CStr) {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(entry) = rustix::fs::openat2(parent, name, flags, Mode::empty(), INSIDE) else { return };
    let Ok(stat) = rustix::fs::fstat(&entry) else { return };
    // Nothing else can have attributes, and to open a device can do harm.
    if matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::Directory) {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if let Ok(entry) = rustix::fs::open(proc_path(entry.as_fd()), flags, Mode::empty()) {
            unprotect(entry.as_fd());
        }
    }
}

/// Clears the attributes of a file or directory that refuse its removal, as far as this process may.
pub(crate) fn unprotect(file: BorrowedFd<'_>) {
    let protection = IFlags::IMMUTABLE | IFlags::APPEND;
    if let Ok(attributes) = rustix::fs::ioctl_getflags(file)
        && attributes.intersects(protection)
    {
        // Refused without CAP_LINUX_IMMUTABLE: the caller's next try says that it is not permitted.
        let _ = rustix::fs::ioctl_setflags(file, attributes.difference(protection));
    }
}

/// Gives the owner all permissions of a directory: without CAP_DAC_OVERRIDE, or on NFS, it could not be emptied.
fn make_accessible(parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> rustix::io::Result<()> {
    let mode = Mode::from_raw_mode(stat.stx_mode.into());
    if mode.contains(Mode::RWXU) {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match rustix::fs::openat2(parent, name, flags, Mode::empty(), INSIDE) {
        Ok(directory) => directory,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        Err(error) => return Err(error),
    };
    let chmod = || rustix::fs::chmod(proc_path(directory.as_fd()), mode | Mode::RWXU);
    match chmod() {
        Err(Errno::PERM) => {
            unprotect_entry(parent, name);
            chmod()
        }
        result => result,
    }
}
