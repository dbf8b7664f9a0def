//! Directories held open, and everything below them reached without leaving them.
//!
//! Volumes hold whatever their users put there, so a path below a volume is never resolved by name from the root.
//! [`Dir`] keeps a descriptor and resolves below it with `openat2`: neither `..`, an absolute path nor a symbolic
//! link someone planted leads out.

mod links;
mod remove;
pub(crate) mod walk;

#[cfg(test)]
mod tests;

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use rustix::{
    fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, ResolveFlags},
    io::Errno,
};

use self::remove::Scope;
pub(crate) use self::remove::unprotect;
use crate::{
    error::{Change, Doing as _, Error, Result},
    usage::{self, Space},
};

/// How every name below a [`Dir`] is resolved.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// How often, and after what time, a lock is tried again before somebody else has it.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// A directory held open; its path is only for messages and for tools that want one.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name in the directory.
    pub name: OsString,
    /// What the entry is; a symbolic link is not followed.
    pub kind: Kind,
}

/// What an entry of a directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It is a regular file.
    File,
    /// It is a directory.
    Directory,
    /// A symbolic link, wherever it leads.
    Symlink,
    /// A FIFO, a socket or a device.
    Other,
}

impl Dir {
    /// Opens a trusted directory; its own path may lead through symbolic links.
    pub fn open(path: &Path) -> Result<Self> {
        let fd = rustix::fs::open(path, DIRECTORY, Mode::empty()).doing("open the directory", path)?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Opens a trusted directory, after making it and its missing parents with exactly `mode`.
    pub fn ensure(path: &Path, mode: u32) -> Result<Self> {
        let missing: Vec<&Path> =
            path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.is_dir()).collect();
        for directory in missing.into_iter().rev() {
            match fs::create_dir(directory) {
                Ok(()) => fs::set_permissions(directory, fs::Permissions::from_mode(mode))
                    .doing("set the mode of", directory)?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).doing("make the directory", directory),
            }
        }
        Self::open(path)
    }

    /// The path under which the directory was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The group that it belongs to.
    pub fn group(&self) -> Result<u32> {
        Ok(walk::stat_fd(&self.fd).doing("stat", &self.path)?.stx_gid)
    }

    /// The path of an entry, for messages and tools.
    pub fn child_path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens an existing directory below.
    pub fn dir(&self, relative: &str) -> Result<Dir> {
        let path = self.child_path(relative);
        let fd = self
            .open_beneath(relative, DIRECTORY, Mode::empty(), BENEATH)
            .doing("open the directory", &path)?;
        Ok(Self { fd, path })
    }

    /// Makes a directory whose mode is exactly `mode`; one that is there already keeps its own.
    pub fn make_dir(&self, name: &str, mode: u32) -> Result<Change> {
        self.check_name(name)?;
        let path = self.child_path(name);
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) => {
                let directory = self.dir(name)?;
                rustix::fs::fchmod(&directory.fd, Mode::from_raw_mode(mode))
                    .doing("set the mode of", &path)?;
                Ok(Change::Made)
            }
            Err(Errno::EXIST) if self.kind_of(name).doing("stat", &path)? == Some(Kind::Directory) => {
                Ok(Change::AlreadyTrue)
            }
            Err(error) => Err(error).doing("make the directory", path),
        }
    }

    /// Opens a directory, after making it when it is missing.
    pub fn ensure_dir(&self, name: &str, mode: u32) -> Result<Dir> {
        self.make_dir(name, mode)?;
        self.dir(name)
    }

    /// Makes a file that must not exist yet, open for reading and writing, its mode exactly `mode`.
    pub fn create_file(&self, name: &str, mode: u32) -> Result<File> {
        self.check_name(name)?;
        let path = self.child_path(name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let fd = self
            .open_beneath(name, flags, Mode::RUSR | Mode::WUSR, BENEATH)
            .doing("create the file", &path)?;
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode)).doing("set the mode of", &path)?;
        Ok(fd.into())
    }

    /// Opens a regular file below, for reading or for both; anything else there is EINVAL.
    pub fn open_file(&self, relative: &str, write: bool) -> Result<File> {
        let path = self.child_path(relative);
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        // Without NONBLOCK a FIFO planted in place of the file would hold us forever.
        let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let fd = self.open_beneath(relative, flags, Mode::empty(), BENEATH).doing("open the file", &path)?;
        let stat = rustix::fs::fstat(&fd).doing("stat", &path)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            Ok(fd.into())
        } else {
            Err(Errno::INVAL).doing("open as a regular file", path)
        }
    }

    /// Whether there is an entry of that name below, be it a dangling symbolic link.
    pub fn exists(&self, relative: &str) -> Result<bool> {
        Ok(self.kind_of(relative).doing("search", self.child_path(relative))?.is_some())
    }

    /// The entries, sorted by name.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let read = || -> rustix::io::Result<Vec<Entry>> {
            let mut entries = Vec::new();
            for entry in rustix::fs::Dir::read_from(&self.fd)? {
                let entry = entry?;
                let name = entry.file_name();
                if name == c"." || name == c".." {
                    continue;
                }
                let kind = match entry.file_type() {
                    FileType::Unknown => {
                        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
                            Ok(stat) => FileType::from_raw_mode(stat.st_mode).into(),
                            Err(Errno::NOENT) => continue,
                            Err(error) => return Err(error),
                        }
                    }
                    known => known.into(),
                };
                entries.push(Entry { name: OsStr::from_bytes(name.to_bytes()).to_owned(), kind });
            }
            entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            Ok(entries)
        };
        read().doing("list", &self.path)
    }

    /// Removes an entry with everything below it, immutable (`chattr +i`) and append-only files too.
    ///
    /// Follows no symbolic link, and stops with EXDEV at the first mount point. May be repeated after any failure.
    pub fn remove_tree(&self, name: impl AsRef<OsStr>) -> Result<Change> {
        self.check_os_name(name.as_ref())?;
        remove::tree(self, name.as_ref(), Scope::Everything)
    }

    /// Removes a directory that holds nothing but directories, as [`Dir::remove_tree`] does.
    ///
    /// Stops with ENOTEMPTY at the first entry that is no directory; empty directories found before it are gone then.
    pub fn remove_empty_tree(&self, name: &str) -> Result<Change> {
        self.check_name(name)?;
        remove::tree(self, name.as_ref(), Scope::EmptyDirectories)
    }

    /// Removes an entry that is not a directory.
    pub fn remove_file(&self, name: &str) -> Result<Change> {
        self.check_name(name)?;
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) => Ok(Change::Made),
            Err(Errno::NOENT) => Ok(Change::AlreadyTrue),
            Err(error) => Err(error).doing("remove", self.child_path(name)),
        }
    }

    /// Moves an entry to another directory of the same filesystem; whatever has the new name stays (EEXIST).
    pub fn rename(&self, name: &str, to: &Dir, new_name: &str) -> Result<()> {
        self.check_name(name)?;
        to.check_name(new_name)?;
        let moved = match rustix::fs::renameat_with(&self.fd, name, &to.fd, new_name, RenameFlags::NOREPLACE)
        {
            // NFS knows no flags of rename and says EINVAL; checking first is the best there is.
            Err(Errno::INVAL) if to.exists(new_name)? => Err(Errno::EXIST),
            Err(Errno::INVAL) => rustix::fs::renameat(&self.fd, name, &to.fd, new_name),
            other => other,
        };
        moved.map_err(|error| {
            let (from, to) = (self.child_path(name), to.child_path(new_name));
            Error::new(format!("rename {} to {}", from.display(), to.display()), error)
        })
    }

    /// Writes a file as a whole, mode 0600: after a crash there is the old content or the new one.
    pub fn write_atomically(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.check_name(name)?;
        let (temporary, mut file) = self.create_temporary(name)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| {
            rustix::fs::renameat(&self.fd, &temporary, &self.fd, name).map_err(io::Error::from)
        });
        if let Err(error) = written {
            // The error of the write is what the caller should get, not that its rest stays behind.
            let _ = self.remove_file(&temporary);
            return Err(error).doing("write", self.child_path(name));
        }
        self.sync()
    }

    /// Removes a file that was written atomically, with what writers that were killed left of it.
    pub fn remove_written(&self, name: &str) -> Result<Change> {
        let unfinished = format!(".{name}.");
        for entry in self.entries()? {
            let Some(entry) = entry.name.to_str() else { continue };
            if entry.strip_suffix(".new").is_some_and(|rest| rest.starts_with(&unfinished)) {
                self.remove_file(entry)?;
            }
        }
        self.remove_file(name)
    }

    /// Makes what was created, renamed and removed in the directory durable.
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).doing("flush the directory", &self.path)
    }

    /// The space of the filesystem the directory is on.
    pub fn free_space(&self) -> Result<Space> {
        usage::space_at(self)
    }

    /// Locks by a lock file until the returned file is dropped; EWOULDBLOCK when another holds the lock.
    pub fn lock_exclusively(&self, name: &str) -> Result<File> {
        self.check_name(name)?;
        let path = self.child_path(name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let fd = self
            .open_beneath(name, flags, Mode::RUSR | Mode::WUSR, BENEATH)
            .doing("open the lock file", &path)?;
        let mut attempts = LOCK_ATTEMPTS;
        loop {
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                // A child of who had it, on its way from fork to exec or to closing what it does not need.
                Err(Errno::WOULDBLOCK) if attempts > 0 => {
                    attempts -= 1;
                    std::thread::sleep(LOCK_PAUSE);
                }
                locked => return locked.map(|()| fd.into()).doing("lock", &path),
            }
        }
    }

    /// A new file under a name nobody uses, of which `name` is a part.
    pub(crate) fn create_temporary(&self, name: &str) -> Result<(String, File)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let temporary = format!(".{name}.{}-{number}.new", std::process::id());
            match self.create_file(&temporary, 0o600) {
                Ok(file) => return Ok((temporary, file)),
                // Left behind by a crash: process ids repeat, in a container at every start.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn open_beneath(
        &self,
        relative: impl rustix::path::Arg + Copy,
        flags: OFlags,
        mode: Mode,
        resolve: ResolveFlags,
    ) -> rustix::io::Result<OwnedFd> {
        rustix::io::retry_on_intr(|| rustix::fs::openat2(&self.fd, relative, flags, mode, resolve))
    }

    fn kind_of(&self, relative: &str) -> rustix::io::Result<Option<Kind>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match self.open_beneath(relative, flags, Mode::empty(), BENEATH) {
            Ok(fd) => Ok(Some(FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode).into())),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Refuses what is not a single name of an entry.
    pub(crate) fn check_name(&self, name: &str) -> Result<()> {
        self.check_os_name(name.as_ref())
    }

    fn check_os_name(&self, name: &OsStr) -> Result<()> {
        let bytes = name.as_bytes();
        if matches!(bytes, b"" | b"." | b"..") || bytes.contains(&b'/') || bytes.contains(&0) {
            let doing = format!("use {:?} as a name in {}", name.to_string_lossy(), self.path.display());
            return Err(Error::new(doing, Errno::INVAL));
        }
        Ok(())
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<FileType> for Kind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Symlink,
            _ => Self::Other,
        }
    }
}

/// Removes what is at a trusted path with everything below it, as [`Dir::remove_tree`] does; "not there" is
/// `AlreadyTrue`.
pub fn remove_tree(path: &Path) -> Result<Change> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL).doing("remove", path);
    };
    match Dir::open(parent) {
        Ok(parent) => parent.remove_tree(name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Change::AlreadyTrue),
        Err(error) => Err(error),
    }
}

/// A path that names exactly what the descriptor refers to, be it a symbolic link opened as such.
///
/// For calls that have no variant for descriptors opened with `O_PATH`.
pub(crate) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/thread-self/fd/{}", fd.as_raw_fd())
}
