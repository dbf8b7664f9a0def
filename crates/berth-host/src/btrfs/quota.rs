//! Quotas of subvolumes, and what they count.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use super::ioctl::{self, Key, Next};
use crate::{
    error::{Change, Doing as _, Result},
    path::Dir,
};

/// What a subvolume takes, and what it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaUsage {
    /// Bytes the subvolume refers to, shared with others or not.
    pub referenced: u64,
    /// The most it may refer to.
    pub limit: Option<u64>,
}

/// Turns quotas on and waits until everything there already is counted.
pub fn enable_quota(path: &Path) -> Result<Change> {
    let dir = Dir::open(path)?;
    let change = if enabled(&dir)? { Change::AlreadyTrue } else { Change::Made };
    ioctl::enable_quota(dir.as_fd()).doing("enable quotas of", path)?;
    ioctl::wait_for_rescan(dir.as_fd()).doing("wait for the quota scan of", path)?;
    Ok(change)
}

/// Whether quotas are on.
pub fn quota_enabled(path: &Path) -> Result<bool> {
    enabled(&Dir::open(path)?)
}

/// Limits the bytes a subvolume may refer to; `u64::MAX` lifts the limit.
pub fn set_limit(subvolume: &Dir, bytes: u64) -> Result<()> {
    let id = super::subvolume_id(subvolume)?;
    // Asked from inside, a subvolume that is full has no room for the change that would give it more.
    let outside = Dir::open(subvolume.path().parent().unwrap_or(subvolume.path()))?;
    ioctl::limit_referenced(outside.as_fd(), id, bytes).doing("limit the size of", subvolume.path())
}

/// What the subvolume takes now, data that is not yet committed included.
pub fn quota_usage(subvolume: &Dir) -> Result<QuotaUsage> {
    let id = super::subvolume_id(subvolume)?;
    let filesystem = ioctl::filesystem_id(subvolume.as_fd()).doing("identify", subvolume.path())?;
    let usage = match usage_in_memory(&qgroup_directory(filesystem, id)) {
        // Before Linux 5.9 there is no such directory.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => usage_on_disk(subvolume.as_fd(), id),
        other => other,
    };
    usage.doing("ask for the quota of", subvolume.path())
}

/// Removes the quota groups of subvolumes that are gone, and says how many.
pub fn remove_stale_qgroups(path: &Path) -> Result<usize> {
    let dir = Dir::open(path)?;
    let mut removed = 0;
    for id in stale_qgroups(dir.as_fd()).doing("list stale quota groups of", path)? {
        removed += usize::from(remove_qgroup(&dir, id)? == Change::Made);
    }
    Ok(removed)
}

/// How many inodes the subvolume has, its root directory included.
pub fn inodes(subvolume: &Dir) -> Result<u64> {
    let from = Key { object: ioctl::ROOT_INODE, kind: ioctl::INODE_ITEM, offset: 0 };
    let to = Key { object: ioctl::LAST_OBJECT, kind: ioctl::INODE_ITEM, offset: 0 };
    let mut count = 0;
    // The inode item is the first of each object: once seen, a batch may end and pass over all its extents.
    let counted = ioctl::search(subvolume.as_fd(), ioctl::OWN_TREE, from, to, |key, _| {
        count += u64::from(key.kind == ioctl::INODE_ITEM);
        Next::Object
    });
    counted.doing("count the inodes of", subvolume.path())?;
    Ok(count)
}

/// Removes the quota group of a subvolume that was deleted, when the kernel lets it go.
pub(super) fn remove_qgroup(anywhere: &Dir, id: u64) -> Result<Change> {
    match ioctl::remove_qgroup(anywhere.as_fd(), id) {
        Ok(()) => Ok(Change::Made),
        // Gone already, still in use until the cleaner has run, or quotas are off (EINVAL before Linux 5.15).
        Err(Errno::NOENT | Errno::BUSY | Errno::NOTCONN | Errno::INVAL) => Ok(Change::AlreadyTrue),
        Err(error) => Err(error).doing(&format!("remove the quota group 0/{id} of"), anywhere.path()),
    }
}

fn enabled(dir: &Dir) -> Result<bool> {
    const ON: u64 = 1;
    let key = Key { object: 0, kind: ioctl::QGROUP_STATUS, offset: 0 };
    let mut flags = 0;
    let searched = ioctl::search(dir.as_fd(), ioctl::QUOTA_TREE, key, key, |_, status| {
        // Version and generation come first.
        flags = number(status, 2);
        Next::Item
    });
    match searched {
        Ok(()) => Ok(flags & ON != 0),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error).doing("ask for quotas of", dir.path()),
    }
}

fn qgroup_directory(filesystem: [u8; 16], subvolume: u64) -> PathBuf {
    let mut id = String::new();
    for (index, byte) in filesystem.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            id.push('-');
        }
        write!(id, "{byte:02x}").expect("writing to a string succeeds");
    }
    PathBuf::from(format!("/sys/fs/btrfs/{id}/qgroups/0_{subvolume}"))
}

fn usage_in_memory(qgroup: &Path) -> std::io::Result<QuotaUsage> {
    let value = |name: &str| -> std::io::Result<u64> {
        fs::read_to_string(qgroup.join(name))?.trim().parse().map_err(std::io::Error::other)
    };
    let limited = value("limit_flags")? & ioctl::LIMIT_REFERENCED != 0;
    Ok(QuotaUsage {
        // What is written but not yet in a committed transaction is counted as reserved, then moves over.
        referenced: value("referenced")? + value("rsv_data")?,
        limit: if limited { Some(value("max_referenced")?) } else { None },
    })
}

pub(super) fn usage_on_disk(inside: BorrowedFd<'_>, id: u64) -> std::io::Result<QuotaUsage> {
    let mut referenced = None;
    let mut limit = None;
    for kind in [ioctl::QGROUP_INFO, ioctl::QGROUP_LIMIT] {
        let key = Key { object: 0, kind, offset: id };
        ioctl::search(inside, ioctl::QUOTA_TREE, key, key, |_, item| {
            if kind == ioctl::QGROUP_INFO {
                referenced = Some(number(item, 1));
            } else if number(item, 0) & ioctl::LIMIT_REFERENCED != 0 {
                limit = Some(number(item, 1));
            }
            Next::Item
        })?;
    }
    Ok(QuotaUsage { referenced: referenced.ok_or(Errno::NOENT)?, limit })
}

fn stale_qgroups(inside: BorrowedFd<'_>) -> rustix::io::Result<BTreeSet<u64>> {
    let mut ids = BTreeSet::new();
    let from = Key { object: 0, kind: ioctl::QGROUP_INFO, offset: ioctl::TOP_SUBVOLUME + 1 };
    // Ids of groups that were put together by hand have a level in the upper 16 bits; they are not ours.
    let to = Key { object: 0, kind: ioctl::QGROUP_INFO, offset: (1 << 48) - 1 };
    ioctl::search(inside, ioctl::QUOTA_TREE, from, to, |key, _| {
        ids.insert(key.offset);
        Next::Item
    })?;
    let from = Key { object: ioctl::ROOT_INODE, kind: ioctl::ROOT_ITEM, offset: 0 };
    let to = Key { object: ioctl::LAST_OBJECT, kind: ioctl::ROOT_ITEM, offset: u64::MAX };
    ioctl::search(inside, ioctl::ROOT_TREE, from, to, |key, _| {
        if key.kind == ioctl::ROOT_ITEM {
            ids.remove(&key.object);
        }
        Next::Item
    })?;
    Ok(ids)
}

/// The `index`th little-endian u64 of an item.
fn number(item: &[u8], index: usize) -> u64 {
    let bytes = item.get(index * 8..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
