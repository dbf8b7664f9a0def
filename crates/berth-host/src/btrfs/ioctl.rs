//! The ioctls of btrfs, with the layouts of `linux/btrfs.h` and `linux/btrfs_tree.h`.
#![expect(unsafe_code, reason = "ioctls, and file handles put together by hand")]

use std::{
    mem::size_of,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use rustix::{
    io::{Errno, Result},
    ioctl::{self, Opcode, opcode},
};

/// The first inode of every subvolume: its root directory.
pub(super) const ROOT_INODE: u64 = 256;
/// The greatest object id that belongs to a user's inode or subvolume.
pub(super) const LAST_OBJECT: u64 = u64::MAX - 255;
/// The subvolume every btrfs begins with.
pub(super) const TOP_SUBVOLUME: u64 = 5;
pub(super) const ROOT_TREE: u64 = 1;
pub(super) const QUOTA_TREE: u64 = 8;
/// Searched as tree number 0, the tree of the subvolume the descriptor is in.
pub(super) const OWN_TREE: u64 = 0;
pub(super) const INODE_ITEM: u32 = 1;
pub(super) const ROOT_ITEM: u32 = 132;
pub(super) const ROOT_REF: u32 = 156;
pub(super) const QGROUP_STATUS: u32 = 240;
pub(super) const QGROUP_INFO: u32 = 242;
pub(super) const QGROUP_LIMIT: u32 = 244;
/// In the flags of a limit: the referenced bytes are limited.
pub(super) const LIMIT_REFERENCED: u64 = 1;

const MAGIC: u8 = 0x94;
const NAME_MAX: usize = 255;
const FLAG_READ_ONLY: u64 = 1 << 1;
const FLAG_BY_ID: u64 = 1 << 4;
const QUOTA_ENABLE: u64 = 1;
const SEARCH_BUFFER: usize = 128 * 1024;

const SYNC: Opcode = opcode::none(MAGIC, 8);
const TREE_SEARCH_V2: Opcode = opcode::read_write::<SearchHeader>(MAGIC, 17);
const SNAP_CREATE_V2: Opcode = opcode::write::<VolumeArgs>(MAGIC, 23);
const SUBVOL_CREATE_V2: Opcode = opcode::write::<VolumeArgs>(MAGIC, 24);
const START_SYNC: Opcode = opcode::read::<u64>(MAGIC, 24);
const SUBVOL_GETFLAGS: Opcode = opcode::read::<u64>(MAGIC, 25);
const SUBVOL_SETFLAGS: Opcode = opcode::write::<u64>(MAGIC, 26);
const FS_INFO: Opcode = opcode::read::<FilesystemInfo>(MAGIC, 31);
const QUOTA_CTL: Opcode = opcode::read_write::<QuotaControl>(MAGIC, 40);
const QGROUP_CREATE: Opcode = opcode::write::<QgroupCreate>(MAGIC, 42);
const QGROUP_SET_LIMIT: Opcode = opcode::read::<QgroupLimit>(MAGIC, 43);
const QUOTA_RESCAN_WAIT: Opcode = opcode::none(MAGIC, 46);
const GET_SUBVOL_INFO: Opcode = opcode::read::<SubvolumeInfo>(MAGIC, 60);
const SNAP_DESTROY_V2: Opcode = opcode::write::<VolumeArgs>(MAGIC, 63);

/// The layout of the kernel's `btrfs_ioctl_vol_args_v2`.
#[repr(C)]
struct VolumeArgs {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}
const _: () = assert!(size_of::<VolumeArgs>() == 4096);

/// The layout of the kernel's `btrfs_ioctl_get_subvol_info_args`.
#[repr(C)]
pub(super) struct SubvolumeInfo {
    pub(super) id: u64,
    name: [u8; 256],
    parent_id: u64,
    directory: u64,
    generation: u64,
    flags: u64,
    uuids: [[u8; 16]; 3],
    changed_transaction: u64,
    /// The transaction that made the subvolume.
    pub(super) made_in_transaction: u64,
    sent_received_transactions: [u64; 2],
    times: [Time; 4],
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<SubvolumeInfo>() == 504);

#[repr(C)]
#[derive(Clone, Copy)]
struct Time {
    seconds: u64,
    nanoseconds: u32,
}

/// The layout of the kernel's `btrfs_ioctl_fs_info_args`.
#[repr(C)]
struct FilesystemInfo {
    max_id: u64,
    devices: u64,
    id: [u8; 16],
    rest: [u64; 124],
}
const _: () = assert!(size_of::<FilesystemInfo>() == 1024);

/// The layout of the kernel's `btrfs_ioctl_quota_ctl_args`.
#[repr(C)]
struct QuotaControl {
    command: u64,
    status: u64,
}
const _: () = assert!(size_of::<QuotaControl>() == 16);

/// The layout of the kernel's `btrfs_ioctl_qgroup_create_args`.
#[repr(C)]
struct QgroupCreate {
    create: u64,
    qgroup: u64,
}
const _: () = assert!(size_of::<QgroupCreate>() == 16);

/// The layout of the kernel's `btrfs_ioctl_qgroup_limit_args`.
#[repr(C)]
struct QgroupLimit {
    qgroup: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved_referenced: u64,
    reserved_exclusive: u64,
}
const _: () = assert!(size_of::<QgroupLimit>() == 48);

/// `struct btrfs_ioctl_search_key` and the buffer size of `struct btrfs_ioctl_search_args_v2`.
#[repr(C)]
struct SearchHeader {
    tree: u64,
    min_object: u64,
    max_object: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_kind: u32,
    max_kind: u32,
    items: u32,
    unused: u32,
    unused_too: [u64; 4],
    buffer_size: u64,
}
const _: () = assert!(size_of::<SearchHeader>() == 112);

#[repr(C)]
struct SearchArgs {
    header: SearchHeader,
    buffer: [u8; SEARCH_BUFFER],
}
const _: () = assert!(size_of::<SearchArgs>() == 112 + SEARCH_BUFFER);

/// The key of an item in a tree; trees are sorted by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) object: u64,
    pub(super) kind: u32,
    pub(super) offset: u64,
}

impl Key {
    /// The key that follows immediately, if any does.
    fn next(self) -> Option<Self> {
        let Self { object, kind, offset } = self;
        if let Some(offset) = offset.checked_add(1) {
            Some(Self { object, kind, offset })
        } else if kind < u8::MAX.into() {
            Some(Self { object, kind: kind + 1, offset: 0 })
        } else {
            Some(Self { object: object.checked_add(1)?, kind: 0, offset: 0 })
        }
    }
}

/// Where a search goes on after a batch of items that ended with the given key.
pub(super) enum Next {
    /// With the next item.
    Item,
    /// With the next object, whatever else belongs to this one.
    Object,
}

pub(super) fn create_subvolume(parent: BorrowedFd<'_>, name: &str) -> Result<()> {
    // SAFETY: the ioctl takes a `VolumeArgs`.
    unsafe { call::<SUBVOL_CREATE_V2, _>(parent, &mut named(name)?) }
}

pub(super) fn snapshot(
    source: BorrowedFd<'_>,
    parent: BorrowedFd<'_>,
    name: &str,
    read_only: bool,
) -> Result<()> {
    let mut args = named(name)?;
    args.fd = source.as_raw_fd().into();
    args.flags = if read_only { FLAG_READ_ONLY } else { 0 };
    // SAFETY: the ioctl takes a `VolumeArgs`.
    unsafe { call::<SNAP_CREATE_V2, _>(parent, &mut args) }
}

pub(super) fn destroy(parent: BorrowedFd<'_>, name: &str) -> Result<()> {
    // SAFETY: the ioctl takes a `VolumeArgs`.
    unsafe { call::<SNAP_DESTROY_V2, _>(parent, &mut named(name)?) }
}

/// Destroys a subvolume wherever it is in the filesystem of `anywhere`.
pub(super) fn destroy_by_id(anywhere: BorrowedFd<'_>, id: u64) -> Result<()> {
    let mut args = named("")?;
    args.flags = FLAG_BY_ID;
    // The id shares its place with the name.
    args.name[..8].copy_from_slice(&id.to_ne_bytes());
    // SAFETY: the ioctl takes a `VolumeArgs`.
    unsafe { call::<SNAP_DESTROY_V2, _>(anywhere, &mut args) }
}

pub(super) fn is_read_only(subvolume: BorrowedFd<'_>) -> Result<bool> {
    let mut flags = 0_u64;
    // SAFETY: the ioctl fills in a `u64`.
    unsafe { call::<SUBVOL_GETFLAGS, _>(subvolume, &mut flags)? };
    Ok(flags & FLAG_READ_ONLY != 0)
}

pub(super) fn set_read_only(subvolume: BorrowedFd<'_>, read_only: bool) -> Result<()> {
    let mut flags = if read_only { FLAG_READ_ONLY } else { 0 };
    // SAFETY: the ioctl takes a `u64`.
    unsafe { call::<SUBVOL_SETFLAGS, _>(subvolume, &mut flags) }
}

pub(super) fn subvolume_info(inside: BorrowedFd<'_>) -> Result<Box<SubvolumeInfo>> {
    // SAFETY: `SubvolumeInfo` is made of integers only, for which all zeros are valid.
    let mut info: Box<SubvolumeInfo> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: the ioctl fills in a `SubvolumeInfo`.
    unsafe { call::<GET_SUBVOL_INFO, _>(inside, &mut *info)? };
    Ok(info)
}

/// The id under which `/sys/fs/btrfs` knows the filesystem.
pub(super) fn filesystem_id(inside: BorrowedFd<'_>) -> Result<[u8; 16]> {
    let mut info = FilesystemInfo { max_id: 0, devices: 0, id: [0; 16], rest: [0; 124] };
    // SAFETY: the ioctl fills in a `FilesystemInfo`.
    unsafe { call::<FS_INFO, _>(inside, &mut info)? };
    Ok(info.id)
}

/// Commits the running transaction.
pub(super) fn sync(inside: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the ioctl has no argument.
    unsafe { ioctl::ioctl(inside, ioctl::NoArg::<SYNC>::new()) }
}

/// Starts to commit the running transaction and returns when nobody can join it any more.
pub(super) fn start_commit(inside: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the ioctl fills in a `u64`.
    unsafe { call::<START_SYNC, _>(inside, &mut 0_u64) }
}

pub(super) fn enable_quota(inside: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the ioctl takes a `QuotaControl`.
    unsafe { call::<QUOTA_CTL, _>(inside, &mut QuotaControl { command: QUOTA_ENABLE, status: 0 }) }
}

/// Waits until no rescan of the quotas runs.
pub(super) fn wait_for_rescan(inside: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the ioctl has no argument.
    rustix::io::retry_on_intr(|| unsafe { ioctl::ioctl(inside, ioctl::NoArg::<QUOTA_RESCAN_WAIT>::new()) })
}

pub(super) fn remove_qgroup(inside: BorrowedFd<'_>, qgroup: u64) -> Result<()> {
    // SAFETY: the ioctl takes a `QgroupCreate`.
    unsafe { call::<QGROUP_CREATE, _>(inside, &mut QgroupCreate { create: 0, qgroup }) }
}

/// Limits the referenced bytes of a subvolume of the filesystem that `outside` is on.
pub(super) fn limit_referenced(outside: BorrowedFd<'_>, subvolume: u64, bytes: u64) -> Result<()> {
    let mut args = QgroupLimit {
        qgroup: subvolume,
        flags: LIMIT_REFERENCED,
        max_referenced: bytes,
        max_exclusive: 0,
        reserved_referenced: 0,
        reserved_exclusive: 0,
    };
    // SAFETY: the ioctl takes a `QgroupLimit`.
    unsafe { call::<QGROUP_SET_LIMIT, _>(outside, &mut args) }
}

/// Opens the root directory of a subvolume wherever it is in the filesystem of `anywhere`.
pub(super) fn open_subvolume(anywhere: BorrowedFd<'_>, id: u64) -> Result<OwnedFd> {
    /// `struct file_handle` with the `struct btrfs_fid` of a file without a parent.
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        inode: [u8; 8],
        subvolume: [u8; 8],
        generation: [u8; 4],
    }
    const BTRFS_WITHOUT_PARENT: i32 = 0x4d;
    let mut handle = Handle {
        bytes: 20,
        kind: BTRFS_WITHOUT_PARENT,
        inode: ROOT_INODE.to_ne_bytes(),
        subvolume: id.to_ne_bytes(),
        // 0 is any generation.
        generation: [0; 4],
    };
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: `handle` begins like a `file_handle` and has the bytes after it that it says to have.
    let fd = unsafe { libc::open_by_handle_at(anywhere.as_raw_fd(), (&raw mut handle).cast(), flags) };
    if fd < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: the call succeeded, so this is a new descriptor nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls `each` with the items of a tree from the key `from` to the key `to`.
///
/// After each batch it goes on as the last call of `each` says. Needs CAP_SYS_ADMIN.
pub(super) fn search(
    inside: BorrowedFd<'_>,
    tree: u64,
    from: Key,
    to: Key,
    mut each: impl FnMut(Key, &[u8]) -> Next,
) -> Result<()> {
    // SAFETY: `SearchArgs` is made of integers only, for which all zeros are valid.
    let mut args: Box<SearchArgs> = Box::new(unsafe { std::mem::zeroed() });
    let mut start = Some(from);
    while let Some(from) = start.filter(|&start| start <= to) {
        args.header = SearchHeader {
            tree,
            min_object: from.object,
            max_object: to.object,
            min_offset: from.offset,
            max_offset: to.offset,
            min_transid: 0,
            max_transid: u64::MAX,
            min_kind: from.kind,
            max_kind: to.kind,
            items: u32::MAX,
            unused: 0,
            unused_too: [0; 4],
            buffer_size: SEARCH_BUFFER as u64,
        };
        // SAFETY: the ioctl takes a `SearchHeader` followed by as many bytes as it says.
        unsafe { call::<TREE_SEARCH_V2, _>(inside, &mut *args)? };
        start = None;
        let mut rest = &args.buffer[..];
        for _ in 0..args.header.items {
            let (key, data, after) = split_item(rest).ok_or(Errno::PROTO)?;
            start = match each(key, data) {
                Next::Item => key.next(),
                Next::Object => key.object.checked_add(1).map(|object| Key { object, kind: 0, offset: 0 }),
            };
            rest = after;
        }
    }
    Ok(())
}

/// Takes a `struct btrfs_ioctl_search_header` and its data off a buffer.
fn split_item(buffer: &[u8]) -> Option<(Key, &[u8], &[u8])> {
    let number = |at: usize| Some(u64::from_ne_bytes(buffer.get(at..at + 8)?.try_into().ok()?));
    let short = |at: usize| Some(u32::from_ne_bytes(buffer.get(at..at + 4)?.try_into().ok()?));
    let key = Key { object: number(8)?, offset: number(16)?, kind: short(24)? };
    let (data, rest) = buffer.get(32..)?.split_at_checked(short(28)?.try_into().ok()?)?;
    Some((key, data, rest))
}

fn named(name: &str) -> Result<VolumeArgs> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    let mut args = VolumeArgs { fd: 0, transid: 0, flags: 0, unused: [0; 4], name: [0; 4040] };
    args.name[..name.len()].copy_from_slice(name.as_bytes());
    Ok(args)
}

/// # Safety
/// The kernel must read and write no more than a `T` for the ioctl.
unsafe fn call<const OPCODE: Opcode, T>(fd: BorrowedFd<'_>, argument: &mut T) -> Result<()> {
    // SAFETY: the caller knows what the ioctl takes.
    unsafe { ioctl::ioctl(fd, ioctl::Updater::<OPCODE, T>::new(argument)) }
}
