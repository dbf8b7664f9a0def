//! A temporary directory for tests whose mounts and loop devices go away with it, also when a test fails.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

use super::{Attributes, filesystem, mounts, unmount_lazily};
use crate::{
    format::{self, Filesystem},
    loopdev::{self, LoopDevice},
};

pub(crate) struct TestDirectory(tempfile::TempDir);

impl TestDirectory {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// A sparse file of `size` bytes.
    pub(crate) fn image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        path
    }

    pub(crate) fn tmpfs(&self, name: &str) -> PathBuf {
        let target = self.dir(name);
        filesystem(Path::new("berth-test"), &target, "tmpfs", Attributes::default(), &[]).unwrap();
        target
    }

    /// An image of `size` bytes with a new filesystem.
    pub(crate) fn formatted(&self, name: &str, fs: Filesystem, size: u64) -> PathBuf {
        let image = self.image(name, size);
        format::make(&image, fs, Duration::from_secs(60)).unwrap();
        image
    }

    /// Mounts the image by an autoclear device, and gives the mount point and the number of the device.
    pub(crate) fn mounted(&self, image: &Path, fs: Filesystem) -> (PathBuf, u32) {
        let options = loopdev::Options { autoclear: true, ..loopdev::Options::default() };
        let device = LoopDevice::attach(image, options).unwrap();
        let name = image.file_name().unwrap().to_str().unwrap();
        let target = self.dir(&format!("{name}.mounted"));
        filesystem(device.path(), &target, fs.as_str(), Attributes::default(), &[]).unwrap();
        (target, device.number())
    }
}

/// Makes the filesystem at `mount_point` fail all further access, as a dead disk does.
pub(crate) fn shut_down(mount_point: &Path) {
    const GOING_DOWN: Opcode = opcode::read::<u32>(b'X', 125);
    const NO_LOG_FLUSH: u32 = 2;
    let root = File::open(mount_point).unwrap();
    // SAFETY: the ioctl reads one u32, whatever direction its number claims.
    unsafe { ioctl(&root, Setter::<GOING_DOWN, u32>::new(NO_LOG_FLUSH)) }.unwrap();
}

/// Whether no loop device is attached to `image`, once those who only read loop devices have closed them.
pub(crate) fn is_detached(image: &Path) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        if loopdev::attached_to(image).unwrap().is_empty() {
            return true;
        }
    }
    false
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let mut targets: Vec<_> = mounts().unwrap().into_iter().map(|mount| mount.target).collect();
        targets.retain(|target| target.starts_with(self.0.path()));
        targets.sort();
        for target in targets.iter().rev() {
            let _ = unmount_lazily(target);
        }
        for device in loopdev::attached_below(self.0.path()).unwrap_or_default() {
            let _ = loopdev::detach(device.number);
        }
    }
}
