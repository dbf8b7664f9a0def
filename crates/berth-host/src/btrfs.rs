//! Btrfs subvolumes, snapshots and quotas, by ioctl.
//!
//! A subvolume is a directory with a tree of its own: it is snapshotted, limited and deleted as a whole, in a time
//! that does not depend on what it holds.

mod ioctl;
#[cfg(test)]
pub(crate) mod loopfs;
mod quota;
#[cfg(test)]
mod tests;

use std::{
    io::Write as _,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
    sync::Barrier,
    thread,
};

use rustix::{
    fs::{StatFs, XattrFlags},
    io::Errno,
};

use self::ioctl::{Key, Next};
pub use self::quota::{
    QuotaUsage, enable_quota, inodes, quota_enabled, quota_usage, remove_stale_qgroups, set_limit,
};
use crate::{
    error::{Change, Doing as _, Error, Result},
    path::{Dir, unprotect},
};

const SUPER_MAGIC: u32 = 0x9123_683e;
const COMPRESSION: &str = "btrfs.compression";
/// How often snapshots are taken again because they were not in one transaction.
const GROUP_TRIES: usize = 16;
/// Small enough that btrfs keeps the content with the metadata, which is what a commit writes.
const BALLAST_BYTES: usize = 1024;
const BALLAST_FILES: usize = 8;
const BALLAST_DOUBLINGS: usize = 8;
/// How often a subvolume is emptied again because someone made one inside meanwhile.
const DELETE_TRIES: usize = 4;
/// The name of a snapshot inside the directory made for it.
const STAGED: &str = "snapshot";

/// How btrfs compresses what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// As the mount options say, by default not at all.
    None,
    /// Zlib compresses well and slowly.
    Zlib,
    /// LZO compresses little and fast.
    Lzo,
    /// Zstandard compresses well and fast.
    Zstd,
}

impl Compression {
    fn property(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Zlib => "zlib",
            Self::Lzo => "lzo",
            Self::Zstd => "zstd",
        }
    }
}

/// Whether `path` is on a btrfs.
pub fn is_btrfs(path: &Path) -> Result<bool> {
    Ok(has_magic(&rustix::fs::statfs(path).doing("statfs", path)?))
}

/// Makes an empty subvolume.
pub fn create_subvolume(parent: &Dir, name: &str) -> Result<()> {
    parent.check_name(name)?;
    ioctl::create_subvolume(parent.as_fd(), name).doing("create the subvolume", parent.child_path(name))
}

/// Makes a subvolume that begins as `source` is now.
pub fn snapshot(source: &Dir, parent: &Dir, name: &str, read_only: bool) -> Result<()> {
    parent.check_name(name)?;
    ioctl::snapshot(source.as_fd(), parent.as_fd(), name, read_only)
        .doing(&format!("snapshot {} as", source.path().display()), parent.child_path(name))
}

/// Snapshots several subvolumes at one instant: all of them, or none.
///
/// Btrfs takes a snapshot while it commits a transaction, so snapshots of one transaction show one instant. The
/// kernel has no call for several; they are requested at once, compared, and taken again when their transactions differ.
pub fn snapshot_together(pairs: &[(&Dir, &str)], parent: &Dir, read_only: bool) -> Result<()> {
    for (_, name) in pairs {
        parent.check_name(name)?;
    }
    let group = Group::stage(pairs, parent)?;
    let taken = group.take().and_then(|()| group.publish(read_only));
    let discarded = group.discard();
    taken.and(discarded)
}

/// Makes a subvolume read-only, or writable again.
pub fn set_read_only(subvolume: &Dir, read_only: bool) -> Result<()> {
    ioctl::set_read_only(subvolume.as_fd(), read_only).doing("set whether one may write to", subvolume.path())
}

/// Deletes a subvolume with those made inside it, and their quota groups where the kernel lets go of them yet.
pub fn delete_subvolume(parent: &Dir, name: &str) -> Result<Change> {
    parent.check_name(name)?;
    let subvolume = match parent.dir(name) {
        Ok(subvolume) => subvolume,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Change::AlreadyTrue),
        Err(error) => return Err(error),
    };
    if !is_subvolume(&subvolume)? {
        return Err(Errno::INVAL).doing("delete as a subvolume", subvolume.path());
    }
    let mut ids = vec![subvolume_id(&subvolume)?];
    let mut deleted = Err(Errno::NOTEMPTY);
    for _ in 0..DELETE_TRIES {
        ids.extend(delete_nested(&subvolume).doing("delete the subvolumes inside", subvolume.path())?);
        deleted = ioctl::destroy(parent.as_fd(), name);
        if deleted == Err(Errno::PERM) {
            unprotect_root(subvolume.as_fd()).doing("make writable", subvolume.path())?;
            deleted = ioctl::destroy(parent.as_fd(), name);
        }
        if deleted != Err(Errno::NOTEMPTY) {
            break;
        }
    }
    deleted.doing("delete the subvolume", subvolume.path())?;
    for id in ids {
        quota::remove_qgroup(parent, id)?;
    }
    Ok(Change::Made)
}

/// Whether the directory is the root of a subvolume.
pub fn is_subvolume(dir: &Dir) -> Result<bool> {
    let stat = rustix::fs::fstat(dir).doing("stat", dir.path())?;
    let filesystem = rustix::fs::fstatfs(dir).doing("statfs", dir.path())?;
    Ok(stat.st_ino == ioctl::ROOT_INODE && has_magic(&filesystem))
}

/// The id of the subvolume that holds the directory.
pub fn subvolume_id(dir: &Dir) -> Result<u64> {
    Ok(ioctl::subvolume_info(dir.as_fd()).doing("look up the subvolume of", dir.path())?.id)
}

/// Sets how files made in the directory from now on are compressed; directories made inside take it over.
pub fn set_compression(dir: &Dir, algorithm: Compression) -> Result<()> {
    rustix::fs::fsetxattr(dir, COMPRESSION, algorithm.property().as_bytes(), XattrFlags::empty())
        .doing("set the compression of", dir.path())
}

/// How files made in the directory are compressed.
pub fn compression(dir: &Dir) -> Result<Compression> {
    let mut value = [0; 64];
    match rustix::fs::fgetxattr(dir, COMPRESSION, &mut value) {
        Ok(length) => {
            // Some kernels append a level, as in "zstd:3".
            let name = value[..length].split(|&byte| byte == b':').next().unwrap_or_default();
            let known = [Compression::Zlib, Compression::Lzo, Compression::Zstd];
            let found = known.into_iter().find(|algorithm| algorithm.property().as_bytes() == name);
            Ok(found.unwrap_or(Compression::None))
        }
        Err(Errno::NODATA) => Ok(Compression::None),
        Err(error) => Err(error).doing("read the compression of", dir.path()),
    }
}

/// Commits everything: it survives a crash, and quotas have counted it.
pub fn sync(path: &Path) -> Result<()> {
    ioctl::sync(Dir::open(path)?.as_fd()).doing("commit", path)
}

fn has_magic(filesystem: &StatFs) -> bool {
    u32::try_from(filesystem.f_type) == Ok(SUPER_MAGIC)
}

/// Deletes all subvolumes inside one, wherever in it they are, and returns their ids.
fn delete_nested(subvolume: &Dir) -> rustix::io::Result<Vec<u64>> {
    let anywhere = subvolume.as_fd();
    let mut ids = vec![ioctl::subvolume_info(anywhere)?.id];
    let mut next = 0;
    while let Some(&id) = ids.get(next) {
        let known = ids.len();
        let from = Key { object: id, kind: ioctl::ROOT_REF, offset: 0 };
        let to = Key { object: id, kind: ioctl::ROOT_REF, offset: u64::MAX };
        ioctl::search(anywhere, ioctl::ROOT_TREE, from, to, |key, _| {
            ids.push(key.offset);
            Next::Item
        })?;
        if ids.len() > known {
            // A user may have made it read-only or immutable, and then nothing can be deleted in it.
            unprotect_root(ioctl::open_subvolume(anywhere, id)?.as_fd())?;
        }
        next += 1;
    }
    let nested = ids.split_off(1);
    // Those further inside were found later.
    for &id in nested.iter().rev() {
        let mut destroyed = ioctl::destroy_by_id(anywhere, id);
        if destroyed == Err(Errno::PERM) {
            unprotect_root(ioctl::open_subvolume(anywhere, id)?.as_fd())?;
            destroyed = ioctl::destroy_by_id(anywhere, id);
        }
        match destroyed {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(nested)
}

/// Makes a subvolume writable, and clears the attributes (`chattr +i`, `+a`) of its root that refuse its deletion.
fn unprotect_root(subvolume: BorrowedFd<'_>) -> rustix::io::Result<()> {
    if ioctl::is_read_only(subvolume)? {
        ioctl::set_read_only(subvolume, false)?;
    }
    unprotect(subvolume);
    Ok(())
}

/// Snapshots about to be taken in one transaction.
struct Group<'a> {
    parent: &'a Dir,
    pairs: &'a [(&'a Dir, &'a str)],
    /// A directory for each: taking a snapshot locks the directory it is made in until the transaction is
    /// committed, so two snapshots made in one directory are never in one transaction.
    stages: Vec<Dir>,
}

impl<'a> Group<'a> {
    fn stage(pairs: &'a [(&'a Dir, &'a str)], parent: &'a Dir) -> Result<Self> {
        let mut group = Self { parent, pairs, stages: Vec::new() };
        // What a crash left behind.
        group.discard()?;
        for (_, name) in pairs {
            group.stages.push(parent.ensure_dir(&stage_name(name), 0o700)?);
        }
        Ok(group)
    }

    fn take(&self) -> Result<()> {
        for attempt in 0..GROUP_TRIES {
            // Each snapshot first writes out its source; what is clean lets all of them start at once.
            rustix::fs::syncfs(self.parent).doing("flush", self.parent.path())?;
            self.take_at_once(attempt)?;
            if self.is_one_transaction()? {
                return Ok(());
            }
            for stage in &self.stages {
                delete_subvolume(stage, STAGED)?;
            }
        }
        let doing = format!(
            "snapshot {} subvolumes into {} in one transaction, tried {GROUP_TRIES} times",
            self.pairs.len(),
            self.parent.path().display()
        );
        Err(Error::new(doing, Errno::TIMEDOUT))
    }

    fn take_at_once(&self, attempt: usize) -> Result<()> {
        let barrier = Barrier::new(self.pairs.len() + 1);
        thread::scope(|scope| {
            let takers: Vec<_> = self
                .pairs
                .iter()
                .zip(&self.stages)
                .map(|((source, _), stage)| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        // Writable, for a read-only one cannot be moved to its place.
                        snapshot(source, stage, STAGED, false)
                    })
                })
                .collect();
            let committing = self.start_commit(attempt);
            barrier.wait();
            committing?;
            takers.into_iter().try_for_each(|taker| taker.join().expect("taking a snapshot does not panic"))
        })
    }

    /// Starts to commit a transaction that takes a while, the longer the more attempts there were.
    ///
    /// Whoever wants to start the next transaction waits until this one is on its way to the disk, then all are let
    /// in at once; and the first of them cannot commit before this one has arrived there. So the others have
    /// that long to join, not just microseconds.
    fn start_commit(&self, attempt: usize) -> Result<()> {
        if let Some(stage) = self.stages.first() {
            stage.remove_tree("ballast")?;
            let ballast = stage.ensure_dir("ballast", 0o700)?;
            for number in 0..BALLAST_FILES << attempt.min(BALLAST_DOUBLINGS) {
                let mut file = ballast.create_file(&number.to_string(), 0o600)?;
                file.write_all(&[0; BALLAST_BYTES]).doing("write to", ballast.path())?;
            }
        }
        ioctl::start_commit(self.parent.as_fd()).doing("start to commit", self.parent.path())
    }

    fn is_one_transaction(&self) -> Result<bool> {
        let mut transactions = Vec::new();
        for stage in &self.stages {
            let taken = stage.dir(STAGED)?;
            let info = ioctl::subvolume_info(taken.as_fd()).doing("stat", taken.path())?;
            transactions.push(info.made_in_transaction);
        }
        transactions.dedup();
        Ok(transactions.len() <= 1)
    }

    fn publish(&self, read_only: bool) -> Result<()> {
        for (done, ((_, name), stage)) in self.pairs.iter().zip(&self.stages).enumerate() {
            if let Err(error) = stage.rename(STAGED, self.parent, name) {
                for (_, name) in &self.pairs[..done] {
                    delete_subvolume(self.parent, name)?;
                }
                return Err(error);
            }
        }
        if read_only {
            for (_, name) in self.pairs {
                set_read_only(&self.parent.dir(name)?, true)?;
            }
        }
        Ok(())
    }

    fn discard(&self) -> Result<()> {
        for (_, name) in self.pairs {
            let stage = stage_name(name);
            if self.parent.exists(&stage)? {
                delete_subvolume(&self.parent.dir(&stage)?, STAGED)?;
                self.parent.remove_tree(&stage)?;
            }
        }
        Ok(())
    }
}

fn stage_name(name: &str) -> String {
    format!(".{name}.taking")
}
