//! Waiting for a log to grow.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    path::Path,
};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};

use crate::error::{Doing as _, Result};

/// Readable when a file in the directory was written, created or renamed.
#[derive(Debug)]
pub struct Watch(OwnedFd);

impl Watch {
    /// Watches a directory.
    pub fn new(directory: &Path) -> Result<Self> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).doing("watch", directory)?;
        let flags = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        inotify::add_watch(&fd, directory, flags).doing("watch", directory)?;
        Ok(Self(fd))
    }

    /// Forgets what has happened so far.
    pub fn clear(&self) {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.0, &mut buffer);
        while reader.next().is_ok() {}
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
