//! Removes a tree.

use std::{
    ffi::{CStr, CString},
    os::fd::{AsFd as _, BorrowedFd},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Statx},
    io::Errno,
};

use super::{
    DIRECTORY, Dir, proc_path,
    walk::{INSIDE, Place, Visitor, file_type, is_mount_point, stat_entry, walk},
};
use crate::error::{Change, Doing as _, Result};

/// How often a tree is walked again because there was still something in it.
const ROUNDS: usize = 16;

/// Removes the entry `name` of `parent` with everything below it.
pub(super) fn tree(parent: &Dir, name: &str) -> Result<Change> {
    let path = parent.child_path(name);
    let c_name = CString::new(name).doing("remove", &path)?;
    let Some(stat) = stat_entry(parent.as_fd(), &c_name).doing("look at", &path)? else {
        return Ok(Change::AlreadyTrue);
    };
    if is_mount_point(&stat) {
        return Err(Errno::XDEV).doing("remove the mount point", path);
    }
    if file_type(&stat) != FileType::Directory {
        return parent.remove_file(name);
    }
    make_accessible(parent.as_fd(), &c_name, &stat).doing("make accessible", &path)?;
    let fd = parent.open_beneath(name, DIRECTORY, Mode::empty(), INSIDE).doing("open", &path)?;
    let top = Dir { fd, path };
    for _ in 0..ROUNDS {
        walk(&top, &mut Removal)?;
        match rustix::fs::unlinkat(&parent.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(Change::Made),
            // Someone still writes there, or the filesystem skipped entries because we removed while listing.
            Err(Errno::NOTEMPTY) => {}
            Err(error) => return Err(error).doing("remove the directory", top.path()),
        }
    }
    Err(Errno::NOTEMPTY).doing("remove the directory", top.path())
}

struct Removal;

impl Visitor for Removal {
    fn file(&mut self, place: &Place<'_>, _stat: &Statx) -> Result<()> {
        match rustix::fs::unlinkat(place.parent, place.name, AtFlags::empty()) {
            // A directory now: the next round gets it.
            Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
            Err(error) => Err(place.failed("remove")(error)),
        }
    }

    fn approach(&mut self, place: &Place<'_>, stat: &Statx) -> Result<()> {
        make_accessible(place.parent, place.name, stat).map_err(place.failed("make accessible"))
    }

    fn enter(&mut self, _place: &Place<'_>, _directory: BorrowedFd<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }

    fn leave(&mut self, place: &Place<'_>, _directory: BorrowedFd<'_>) -> Result<()> {
        match rustix::fs::unlinkat(place.parent, place.name, AtFlags::REMOVEDIR) {
            // Not empty: nor is then the top, which starts the next round.
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
            Err(error) => Err(place.failed("remove the directory")(error)),
        }
    }

    fn mount_point(&mut self, place: &Place<'_>, _stat: &Statx) -> Result<()> {
        Err(place.failed("remove the mount point")(Errno::XDEV))
    }
}

/// Gives the owner all permissions of a directory: without CAP_DAC_OVERRIDE, or on NFS, it could not be emptied.
fn make_accessible(parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> rustix::io::Result<()> {
    let mode = Mode::from_raw_mode(stat.stx_mode.into());
    if mode.contains(Mode::RWXU) {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat2(parent, name, flags, Mode::empty(), INSIDE) {
        Ok(fd) => rustix::fs::chmod(proc_path(fd.as_fd()), mode | Mode::RWXU),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(()),
        Err(error) => Err(error),
    }
}
