//! The directory that is served: its files by handle, acting on them as the caller, and what is known about each.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
    path::{Component, Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use berth_host::{
    acting::{self, User},
    file_handle,
};
use berth_nfs::{Attributes, FileKind, Time, rpc};
use parking_lot::{Mutex, MutexGuard};
use ring::hmac;
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, StatxTimestamp},
    io::Errno,
};

use crate::{
    handle::{self, Identity, Named},
    listing::Listings,
    search::Search,
    status::{Result, Status},
};

/// How every name below the directory is found: nothing leads out of it, through a link or into another filesystem.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);
const AS_PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const STAT: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);
/// How many changes to different files go on at a time, unless their numbers are congruent.
const LOCKS: usize = 256;
/// Handles of the kernel that leave no room in one of NFS are not used.
const LONGEST_KERNEL_HANDLE: usize = 48;
const NANOSECONDS: i64 = 1_000_000_000;

/// How files are found by their handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handles {
    /// By the kernel's file handles, for which the process needs CAP_DAC_READ_SEARCH and the filesystem has to have some.
    Kernel,
    /// By the file's number: where a file was last is remembered, and searched for after a restart.
    Search,
}

/// The directory that is served.
pub(crate) struct Export {
    root: OwnedFd,
    root_identity: Identity,
    key: hmac::Key,
    fsid: u64,
    /// Where files without handles of the kernel's are.
    search: Option<Search>,
    locks: Vec<Mutex<()>>,
    verifier: AtomicU64,
    pub(crate) listings: Listings,
    /// Whether answers wait for the disk.
    pub(crate) is_synchronous: bool,
}

/// A file, found by its handle or name.
pub(crate) struct Object {
    fd: OwnedFd,
    pub(crate) attributes: Attributes,
    pub(crate) identity: Identity,
}

impl AsFd for Object {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Object {
    /// A path that names exactly this file, for calls that take no descriptor of a path.
    pub(crate) fn path(&self) -> String {
        format!("/proc/thread-self/fd/{}", self.fd.as_raw_fd())
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.attributes.kind == FileKind::Directory
    }

    pub(crate) fn require_directory(&self) -> Result<()> {
        if self.is_directory() { Ok(()) } else { Err(Status::NotDirectory) }
    }

    /// Fails unless it has content that is read and written.
    pub(crate) fn require_file(&self) -> Result<()> {
        match self.attributes.kind {
            FileKind::File => Ok(()),
            FileKind::Directory => Err(Status::IsDirectory),
            _ => Err(Status::Invalid),
        }
    }
}

impl Export {
    /// Opens a directory to serve it; the key signs handles.
    pub(crate) fn open(
        path: &Path,
        key: &[u8],
        handles: Option<Handles>,
        is_synchronous: bool,
    ) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let kernel = || {
            let handle = file_handle::of(root.as_fd())?;
            if handle.bytes.len() > LONGEST_KERNEL_HANDLE || u8::try_from(handle.kind).is_err() {
                return Err(Errno::OVERFLOW);
            }
            file_handle::open(root.as_fd(), &handle).map(drop)
        };
        let by_kernel = match handles {
            Some(Handles::Kernel) => kernel().map(|()| true)?,
            Some(Handles::Search) => false,
            None => kernel().is_ok(),
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, key);
        let root_identity = identity(&stat(root.as_fd())?);
        Ok(Self {
            fsid: number(hmac::sign(&key, b"fsid").as_ref()),
            listings: Listings::default(),
            search: (!by_kernel).then(|| Search::new(root_identity.inode)),
            root,
            root_identity,
            key,
            locks: (0..LOCKS).map(|_| Mutex::default()).collect(),
            verifier: AtomicU64::new(rpc::random()),
            is_synchronous,
        })
    }

    /// How files are found.
    pub(crate) fn handles(&self) -> Handles {
        if self.search.is_some() { Handles::Search } else { Handles::Kernel }
    }

    /// The file that a client's handle names.
    pub(crate) fn find(&self, handle: &[u8]) -> Result<Object> {
        let object = match (handle::read(&self.key, handle)?, &self.search) {
            (Named::ByKernel(kernel), None) => self.object(file_handle::open(self.root.as_fd(), &kernel)?)?,
            (Named::BySearch(of), Some(search)) => search.find(self, of)?,
            // It is of a start that found files in another way.
            _ => return Err(Status::Stale),
        };
        // What somebody moved out of the directory is not served any more; the kernel knows the whole path of a directory only.
        if object.is_directory() && object.identity != self.root_identity && !self.is_below(&object)? {
            return Err(Status::Stale);
        }
        Ok(object)
    }

    fn is_below(&self, directory: &Object) -> Result<bool> {
        let path = |fd: BorrowedFd<'_>| {
            let link = format!("/proc/thread-self/fd/{}", fd.as_raw_fd());
            let path = rustix::fs::readlinkat(CWD, link, Vec::new())?;
            Ok::<_, Errno>(PathBuf::from(OsString::from_vec(path.into_bytes())))
        };
        Ok(path(directory.as_fd())?.starts_with(path(self.root.as_fd())?))
    }

    /// The handle of a file, for the client.
    pub(crate) fn handle(&self, object: &Object) -> Result<Vec<u8>> {
        let named = match self.search {
            None => Named::ByKernel(file_handle::of(object.as_fd())?),
            Some(_) => Named::BySearch(object.identity),
        };
        handle::write(&self.key, &named)
    }

    /// Remembers where a file is, if it is found by that.
    pub(crate) fn note(&self, directory: &Object, name: &[u8], file: &Object) {
        if let Some(search) = &self.search {
            search.note(directory.identity.inode, name, file.identity.inode);
        }
    }

    /// The directory that is served.
    pub(crate) fn root(&self) -> Result<Object> {
        self.below(Path::new("."))
    }

    /// A directory by its path below the directory, for a client that mounts it.
    pub(crate) fn locate(&self, path: &Path) -> Result<Object> {
        let mut found = self.root()?;
        for part in path.components() {
            let name = match part {
                Component::CurDir => continue,
                Component::Normal(name) => name.as_bytes(),
                _ => return Err(Status::Access),
            };
            let below = self.child(found.as_fd(), name)?;
            below.require_directory()?;
            self.note(&found, name, &below);
            found = below;
        }
        Ok(found)
    }

    /// A file by its path below the directory, as the server sees it.
    pub(crate) fn below(&self, path: &Path) -> Result<Object> {
        self.object(rustix::fs::openat2(&self.root, path, AS_PATH, Mode::empty(), BENEATH)?)
    }

    pub(crate) fn is_root(&self, object: &Object) -> bool {
        object.identity == self.root_identity
    }

    /// Everything about a file that is open.
    pub(crate) fn object(&self, fd: OwnedFd) -> Result<Object> {
        let stat = stat(fd.as_fd())?;
        Ok(Object { attributes: self.attributes_of(&stat)?, identity: identity(&stat), fd })
    }

    /// The file of a name in a directory, as the caller may find it.
    pub(crate) fn child(&self, directory: BorrowedFd<'_>, name: &[u8]) -> Result<Object> {
        match rustix::fs::openat2(directory, name, AS_PATH, Mode::empty(), BENEATH) {
            // Another filesystem is mounted there.
            Err(Errno::XDEV) => Err(Status::Access),
            opened => self.object(opened?),
        }
    }

    /// The directory above one.
    pub(crate) fn parent(&self, directory: &Object) -> Result<Object> {
        let up = if self.is_root(directory) { "." } else { ".." };
        let flags = AS_PATH | OFlags::DIRECTORY;
        let parent = self.object(rustix::fs::openat(directory.as_fd(), up, flags, Mode::empty())?)?;
        // Somebody may have moved it out of ours just now.
        if self.is_below(&parent)? { Ok(parent) } else { Err(Status::Stale) }
    }

    /// What is known about a file now.
    pub(crate) fn attributes(&self, object: &Object) -> Option<Attributes> {
        stat(object.as_fd()).ok().and_then(|stat| self.attributes_of(&stat).ok())
    }

    fn attributes_of(&self, stat: &Statx) -> Result<Attributes> {
        let time = |of: StatxTimestamp| Time { seconds: of.tv_sec, nanoseconds: of.tv_nsec };
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        // The number stays the same when a filesystem gets another device's number at the next boot.
        let own = device == self.root_identity.device;
        let fsid = if own { 0 } else { u64::from(device.0) << 32 | u64::from(device.1) } ^ self.fsid;
        Ok(Attributes {
            kind: kind(FileType::from_raw_mode(stat.stx_mode.into())).ok_or(Status::ServerFault)?,
            mode: u32::from(stat.stx_mode) & 0o7777,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: stat.stx_size,
            used: stat.stx_blocks.saturating_mul(512),
            fileid: stat.stx_ino,
            fsid: (fsid, 0),
            links: stat.stx_nlink,
            device: (stat.stx_rdev_major, stat.stx_rdev_minor),
            accessed: time(stat.stx_atime),
            modified: time(stat.stx_mtime),
            changed: time(stat.stx_ctime),
        })
    }

    /// Keeps others who change one of these files waiting, so that what was before a change and what is after it fit together.
    pub(crate) fn lock(&self, files: &[&Object]) -> Vec<MutexGuard<'_, ()>> {
        let count = u64::try_from(LOCKS).unwrap_or(u64::MAX);
        let numbers: BTreeSet<_> = files.iter().map(|file| file.identity.inode % count).collect();
        numbers
            .into_iter()
            .filter_map(|number| self.locks.get(usize::try_from(number).ok()?))
            .map(Mutex::lock)
            .collect()
    }

    /// Forgets that a file has a name.
    pub(crate) fn forget(&self, directory: &Object, name: &[u8], file: &Object) {
        if let Some(search) = &self.search {
            search.forget(directory.identity.inode, name, file.identity.inode);
        }
    }

    /// The write verifier: another one means that what was not committed may be lost.
    pub(crate) fn verifier(&self) -> u64 {
        self.verifier.load(Ordering::SeqCst)
    }

    /// Puts content and attributes of a file on the disk, which is open for that.
    pub(crate) fn sync(&self, file: BorrowedFd<'_>, only_data: bool) -> Result<()> {
        if !self.is_synchronous {
            return Ok(());
        }
        let synced = if only_data { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) };
        synced.inspect_err(|_| {
            // What the disk did not take is gone from memory too: clients have to send it again.
            self.verifier.store(rpc::random(), Ordering::SeqCst);
        })?;
        Ok(())
    }

    /// Puts the names of a directory, or the attributes of a file, on the disk. Special files have nothing to open for that.
    pub(crate) fn sync_metadata(&self, object: &Object) -> Result<()> {
        if !self.is_synchronous || !matches!(object.attributes.kind, FileKind::Directory | FileKind::File) {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = rustix::fs::openat(CWD, object.path(), flags, Mode::empty())?;
        self.sync(open.as_fd(), false)
    }

    /// A number that stands for a name in its directory's listing.
    pub(crate) fn cookie(&self, name: &[u8]) -> u64 {
        // The first are those of `.` and `..`; kernels take the highest bit for a sign.
        (number(hmac::sign(&self.key, name).as_ref()) >> 1).max(3)
    }
}

/// Does something as a user, by the kernel's checks.
pub(crate) fn act_as<T>(user: &User, work: impl FnOnce() -> Result<T>) -> Result<T> {
    acting::act_as(user, work)?
}

fn stat(fd: BorrowedFd<'_>) -> rustix::io::Result<Statx> {
    rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, STAT)
}

fn identity(stat: &Statx) -> Identity {
    let knows = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    let nanoseconds =
        stat.stx_btime.tv_sec.wrapping_mul(NANOSECONDS).wrapping_add(stat.stx_btime.tv_nsec.into());
    Identity {
        inode: stat.stx_ino,
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        created: if knows { nanoseconds.cast_unsigned() } else { 0 },
    }
}

fn kind(of: FileType) -> Option<FileKind> {
    Some(match of {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::Character,
        FileType::BlockDevice => FileKind::Block,
        FileType::Unknown => return None,
    })
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}
