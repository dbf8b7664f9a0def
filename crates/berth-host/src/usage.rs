//! How much space and how many inodes filesystems, trees and files take, and whether reading them costs writes.

use std::{
    collections::HashSet,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
};

use rustix::fs::{IFlags, StatVfs, Statx};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing as _, Result},
    path::{
        Dir,
        walk::{EntryLocation, Visitor, identity, stat_fd, walk},
    },
};

/// The unit of `st_blocks`, whatever the filesystem's block size is.
const BLOCK: u64 = 512;

/// The space of a filesystem, in bytes and in inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// The size of the filesystem in bytes.
    pub total: u64,
    /// Unused bytes, including those reserved for root.
    pub free: u64,
    /// Unused bytes that everyone may take.
    pub available: u64,
    /// All inodes; 0 where the filesystem makes them as needed.
    pub inodes_total: u64,
    /// The inodes that nobody uses.
    pub inodes_free: u64,
}

/// What a tree takes on its filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeUsage {
    /// Allocated bytes; a file with many hard links counts once, holes count nothing.
    pub bytes: u64,
    /// Inodes, the top directory included.
    pub inodes: u64,
}

/// The space of the filesystem that holds `path`.
pub fn space(path: &Path) -> Result<Space> {
    rustix::fs::statvfs(path).map(Space::from).doing("ask for the free space of", path)
}

/// The space of the filesystem that holds `dir`.
pub(crate) fn space_at(dir: &Dir) -> Result<Space> {
    rustix::fs::fstatvfs(dir).map(Space::from).doing("ask for the free space of", dir.path())
}

/// What the tree takes, mount points in it left out.
pub fn tree(dir: &Dir) -> Result<TreeUsage> {
    let mut measuring = Measuring::default();
    measuring.count(&stat_fd(dir.as_fd()).doing("stat", dir.path())?);
    walk(dir, &mut measuring)?;
    Ok(measuring.usage)
}

/// The bytes a file has allocated.
pub fn file_allocated(path: &Path) -> Result<u64> {
    Ok(std::fs::symlink_metadata(path).doing("stat", path)?.blocks() * BLOCK)
}

/// Whether reading files made in the directory from now on leaves their access time alone.
///
/// ext4 and xfs hand this down to whatever is made inside; btrfs keeps it to the directory itself.
pub fn set_noatime(dir: &Dir, on: bool) -> Result<()> {
    let mut flags = rustix::fs::ioctl_getflags(dir).doing("read the inode flags of", dir.path())?;
    flags.set(IFlags::NOATIME, on);
    rustix::fs::ioctl_setflags(dir, flags).doing("set the inode flags of", dir.path())
}

/// Whether [`set_noatime`] is on.
pub fn noatime(dir: &Dir) -> Result<bool> {
    let flags = rustix::fs::ioctl_getflags(dir).doing("read the inode flags of", dir.path())?;
    Ok(flags.contains(IFlags::NOATIME))
}

impl From<StatVfs> for Space {
    fn from(stat: StatVfs) -> Self {
        Self {
            total: stat.f_blocks * stat.f_frsize,
            free: stat.f_bfree * stat.f_frsize,
            available: stat.f_bavail * stat.f_frsize,
            inodes_total: stat.f_files,
            inodes_free: stat.f_ffree,
        }
    }
}

#[derive(Default)]
struct Measuring {
    usage: TreeUsage,
    /// Inodes with several names that were counted.
    linked: HashSet<(u32, u32, u64)>,
}

impl Measuring {
    fn count(&mut self, stat: &Statx) {
        self.usage.bytes += stat.stx_blocks * BLOCK;
        self.usage.inodes += 1;
    }
}

impl Visitor for Measuring {
    fn file(&mut self, _place: &EntryLocation<'_>, stat: &Statx) -> Result<()> {
        if stat.stx_nlink <= 1 || self.linked.insert(identity(stat)) {
            self.count(stat);
        }
        Ok(())
    }

    fn enter(&mut self, _place: &EntryLocation<'_>, _directory: BorrowedFd<'_>, stat: &Statx) -> Result<()> {
        self.count(stat);
        Ok(())
    }

    fn mount_point(&mut self, _place: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::{TreeUsage, file_allocated, noatime, set_noatime, space, tree};
    use crate::{
        btrfs::loopfs::{Bind, LoopFs, run},
        path::Dir,
    };

    #[test]
    fn the_space_of_a_filesystem_is_what_df_says() {
        let filesystem = LoopFs::new("ext4");
        let reported = space(&filesystem.path()).unwrap();
        let path = filesystem.path();
        let columns = "--output=size,avail,itotal,iavail";
        let df = run("df", &["--block-size=1", columns, path.to_str().unwrap()]);
        let expected: Vec<u64> =
            df.lines().nth(1).unwrap().split_whitespace().map(|n| n.parse().unwrap()).collect();
        assert_eq!(
            [reported.total, reported.available, reported.inodes_total, reported.inodes_free],
            expected[..]
        );
        assert!(reported.free > reported.available, "ext4 reserves space for root");
        assert_eq!(filesystem.dir().free_space().unwrap(), reported);
    }

    #[test]
    fn a_tree_takes_what_du_says_and_nothing_behind_links_and_mounts() {
        let holder = tempfile::tempdir().unwrap();
        let top = holder.path().join("top");
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::create_dir(top.join("mounted")).unwrap();
        fs::write(top.join("a/file"), vec![1; 100_000]).unwrap();
        fs::hard_link(top.join("a/file"), top.join("a/b/same")).unwrap();
        fs::File::create(top.join("hole")).unwrap().set_len(1 << 30).unwrap();
        symlink("/etc", top.join("etc")).unwrap();
        symlink("/usr", top.join("a/usr")).unwrap();
        run("mkfifo", &[top.join("pipe").to_str().unwrap()]);

        let du = run("du", &["--summarize", "--block-size=1", top.to_str().unwrap()]);
        let bytes: u64 = du.split_whitespace().next().unwrap().parse().unwrap();
        let du = run("du", &["--summarize", "--inodes", top.to_str().unwrap()]);
        let inodes: u64 = du.split_whitespace().next().unwrap().parse().unwrap();
        let dir = Dir::open(&top).unwrap();
        assert_eq!(tree(&dir).unwrap(), TreeUsage { bytes, inodes });

        // What is below the mount point is not seen, and neither is the mount point itself.
        let allocated = file_allocated(&top.join("mounted")).unwrap();
        let _bound = Bind::new(&top.join("a"), &top.join("mounted"));
        assert_eq!(tree(&dir).unwrap(), TreeUsage { bytes: bytes - allocated, inodes: inodes - 1 });
    }

    #[test]
    fn the_allocation_of_a_file_leaves_out_its_holes() {
        let filesystem = LoopFs::new("xfs");
        let path = filesystem.path().join("sparse");
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        assert_eq!(file_allocated(&path).unwrap(), 0);
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 1 << 20, 1 << 20).unwrap();
        assert_eq!(file_allocated(&path).unwrap(), 1 << 20);
    }

    #[test]
    fn noatime_is_handed_down_on_ext4_and_xfs_but_not_on_btrfs() {
        for (kind, handed_down) in [("ext4", true), ("xfs", true), ("btrfs", false)] {
            let filesystem = LoopFs::new(kind);
            let dir = filesystem.dir().ensure_dir("volume", 0o755).unwrap();
            assert!(!noatime(&dir).unwrap(), "{kind}");
            set_noatime(&dir, true).unwrap();
            assert!(noatime(&dir).unwrap(), "{kind}");
            let inside = dir.ensure_dir("inside", 0o755).unwrap();
            assert_eq!(noatime(&inside).unwrap(), handed_down, "{kind}");
            set_noatime(&dir, false).unwrap();
            assert!(!noatime(&dir).unwrap(), "{kind}");
        }
    }
}
