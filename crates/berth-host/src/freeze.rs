//! Freezing a mounted filesystem: everything is on its device, and writers wait.
#![expect(unsafe_code, reason = "filesystems freeze by ioctl")]

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    ioctl::{Opcode, Setter, ioctl, opcode},
};

use crate::error::{Change, Doing as _, Result};

const FIFREEZE: Opcode = opcode::read_write::<i32>(b'X', 119);
const FITHAW: Opcode = opcode::read_write::<i32>(b'X', 120);

/// A frozen filesystem, thawed when dropped.
#[must_use = "the filesystem thaws when this is dropped"]
#[derive(Debug)]
pub struct Frozen {
    mount_point: PathBuf,
    root: Option<File>,
}

/// Freezes the filesystem at `mount_point`; one that is frozen already is an error with errno `EBUSY`.
///
/// The kernel thaws nothing by itself: should this process be killed, somebody has to call `thaw`.
pub fn freeze(mount_point: &Path) -> Result<Frozen> {
    let root = File::open(mount_point).doing("open", mount_point)?;
    // SAFETY: FIFREEZE takes no argument into account.
    unsafe { ioctl(&root, Setter::<FIFREEZE, i32>::new(0)) }.doing("freeze", mount_point)?;
    Ok(Frozen { mount_point: mount_point.into(), root: Some(root) })
}

/// Thaws the filesystem at `mount_point`; one that is not frozen is `AlreadyTrue`.
pub fn thaw(mount_point: &Path) -> Result<Change> {
    let root = File::open(mount_point).doing("open", mount_point)?;
    thaw_root(&root).doing("thaw", mount_point)
}

impl Frozen {
    /// Thaws the filesystem. Returns whether that failed.
    pub fn thaw(mut self) -> Result<()> {
        self.root
            .take()
            .map_or(Ok(Change::AlreadyTrue), |root| thaw_root(&root))
            .doing("thaw", &self.mount_point)?;
        Ok(())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Some(root) = self.root.take()
            && let Err(error) = thaw_root(&root)
        {
            tracing::error!(mount = %self.mount_point.display(), %error, "a frozen filesystem cannot be thawed");
        }
    }
}

fn thaw_root(root: &File) -> io::Result<Change> {
    // SAFETY: FITHAW takes no argument into account.
    match unsafe { ioctl(root, Setter::<FITHAW, i32>::new(0)) } {
        Ok(()) => Ok(Change::Made),
        Err(Errno::INVAL) => Ok(Change::AlreadyTrue),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc, thread, time::Duration};

    use super::*;
    use crate::{format::Filesystem, mount::testing::TestDirectory};

    const MINUTE: Duration = Duration::from_secs(60);

    /// Begins a write at `mount_point`, and returns what hears of its end.
    fn write(mount_point: &Path) -> mpsc::Receiver<()> {
        let (done, written) = mpsc::channel();
        let file = mount_point.join("file");
        thread::spawn(move || {
            fs::write(file, "x").unwrap();
            let _ = done.send(());
        });
        written
    }

    /// Whether a write at `mount_point` waits; it is let through by `release` before this returns.
    fn write_waits(mount_point: &Path, release: impl FnOnce()) -> bool {
        let written = write(mount_point);
        let waits = written.recv_timeout(Duration::from_millis(200)).is_err();
        release();
        written.recv_timeout(MINUTE).is_ok() && waits
    }

    #[test]
    fn writers_wait_while_a_filesystem_is_frozen() {
        for fs in [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs] {
            let directory = TestDirectory::new();
            let image = directory.formatted("image", fs, 300 << 20);
            let (target, _) = directory.mounted(&image, fs);
            let frozen = freeze(&target).unwrap();
            assert_eq!(freeze(&target).unwrap_err().errno(), Some(libc::EBUSY));
            assert!(write_waits(&target, || frozen.thaw().unwrap()), "{fs}");
            let frozen = freeze(&target).unwrap();
            assert!(write_waits(&target, || drop(frozen)), "{fs}");
            assert!(write(&target).recv_timeout(MINUTE).is_ok(), "{fs}");
        }
    }

    #[test]
    fn thawing_what_is_not_frozen_is_already_true() {
        let directory = TestDirectory::new();
        let image = directory.formatted("image", Filesystem::Ext4, 16 << 20);
        let (target, _) = directory.mounted(&image, Filesystem::Ext4);
        assert_eq!(thaw(&target).unwrap(), Change::AlreadyTrue);
        let frozen = freeze(&target).unwrap();
        assert_eq!(thaw(&target).unwrap(), Change::Made);
        frozen.thaw().unwrap();
        assert_eq!(thaw(&target).unwrap(), Change::AlreadyTrue);
    }

    #[test]
    fn what_was_written_is_on_the_device_once_it_is_frozen() {
        let directory = TestDirectory::new();
        let image = directory.formatted("image", Filesystem::Ext4, 16 << 20);
        let (target, _) = directory.mounted(&image, Filesystem::Ext4);
        fs::write(target.join("file"), "not synced by anyone").unwrap();
        let frozen = freeze(&target).unwrap();
        let copied = directory.path("copied");
        fs::copy(&image, &copied).unwrap();
        frozen.thaw().unwrap();
        let (copy, _) = directory.mounted(&copied, Filesystem::Ext4);
        assert_eq!(fs::read_to_string(copy.join("file")).unwrap(), "not synced by anyone");
    }
}
