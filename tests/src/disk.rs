//! A disk of a chosen filesystem, made from a sparse file in a temporary directory.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::machine::{self, run};

/// What the disk is formatted with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskType {
    /// Has subvolumes, quotas and reflinks.
    Btrfs,
    /// Has reflinks, and neither subvolumes nor their quotas.
    Xfs,
    /// Has neither subvolumes nor reflinks.
    Ext4,
}

/// A temporary directory with a mounted disk in it; everything mounted or attached below goes with it.
#[derive(Debug)]
pub struct Disk {
    dir: TempDir,
}

impl DiskType {
    /// The name mkfs and mount know it by.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Xfs => "xfs",
            Self::Ext4 => "ext4",
        }
    }
}

impl Disk {
    /// A new disk of `mib` MiB, of which only what is written takes space.
    pub fn new(kind: DiskType, mib: u64) -> Result<Self> {
        // The path stays short: a socket's may have 107 bytes.
        let dir =
            tempfile::Builder::new().prefix("berth-").rand_bytes(6).tempdir().context("make a directory")?;
        let disk = Self { dir };
        let image = disk.path().join("disk.img");
        let mounted = disk.mount_point();
        std::fs::File::create(&image)?.set_len(mib << 20)?;
        std::fs::create_dir(&mounted)?;
        let (image, mounted) = (image.display().to_string(), mounted.display().to_string());
        let force = if kind == DiskType::Ext4 { "-F" } else { "-f" };
        run(&format!("mkfs.{}", kind.as_str()), &["-q", force, &image])?;
        run("mount", &["-t", kind.as_str(), "-o", "loop", &image, &mounted])?;
        Ok(disk)
    }

    /// The temporary directory: sockets, logs, staging and target paths live here, beside the disk.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the disk is mounted.
    pub fn mount_point(&self) -> PathBuf {
        self.path().join("disk")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = machine::clear_below(self.dir.path()) {
            eprintln!("could not clean up after a test: {error:#}");
            // Removing the tree now would reach into whatever is still mounted.
            self.dir.disable_cleanup(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Disk, DiskType};
    use crate::machine::{loops_below, mounts_below, run};

    #[test]
    fn everything_mounted_and_attached_goes_with_the_disk() {
        for kind in [DiskType::Btrfs, DiskType::Xfs, DiskType::Ext4] {
            let disk = Disk::new(kind, 512).unwrap();
            let dir = disk.path().to_path_buf();
            let found =
                run("findmnt", &["-no", "FSTYPE", &disk.mount_point().display().to_string()]).unwrap();
            assert_eq!(found.trim(), kind.as_str());

            // A filesystem in an image on the disk, mounted beside it, and bound somewhere else.
            let (image, inner, bound) =
                (disk.mount_point().join("image"), dir.join("inner"), dir.join("bound"));
            fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
            run("mkfs.ext4", &["-q", &image.display().to_string()]).unwrap();
            for made in [&inner, &bound] {
                fs::create_dir(made).unwrap();
            }
            let inner = inner.display().to_string();
            run("mount", &["-o", "loop", &image.display().to_string(), &inner]).unwrap();
            run("mount", &["--bind", &inner, &bound.display().to_string()]).unwrap();
            run("losetup", &["-f", &image.display().to_string()]).unwrap();
            run("fsfreeze", &["-f", &inner]).unwrap();
            assert_eq!(mounts_below(&dir).unwrap().len(), 3);
            assert_eq!(loops_below(&dir).unwrap().len(), 3);

            drop(disk);
            assert!(mounts_below(&dir).unwrap().is_empty());
            assert!(loops_below(&dir).unwrap().is_empty());
            assert!(!dir.exists());
            // A device that the kernel still holds would show a path without the directory.
            assert!(loops_below(std::path::Path::new("/image")).unwrap().is_empty());
        }
    }
}
