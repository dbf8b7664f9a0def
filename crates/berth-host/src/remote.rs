//! Mounts of what is on other machines, which may not answer.
//!
//! Every call that could wait for the other machine is made by a child process that does nothing else: it is killed at
//! the deadline, and no thread of this process ever waits in the kernel. What is mounted is read from the kernel's
//! table, which asks nobody.

mod child;

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    time::Duration,
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
    },
};

use self::child::{hear_child, in_child};
use crate::{
    error::{Change, Error, Result},
    mount::{Attributes, MountInfo, add_attributes, layers_at, topmost},
    usage::Space,
};

/// How much of what the kernel says about a mount is kept.
const LOG: usize = 1024;

/// A filesystem on another machine.
#[derive(Debug, Clone, Copy)]
pub struct Filesystem<'a> {
    /// Its type.
    pub fs_type: &'a str,
    /// What it is called, such as `server:/path`.
    pub source: &'a str,
    /// Its options, one each.
    pub options: &'a [String],
    /// An open file that the options name by its number.
    pub file: Option<BorrowedFd<'a>>,
}

/// Whether the kernel can mount filesystems of this type, be it by a module that it loads for that.
pub fn kernel_has(fs_type: &str) -> bool {
    fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC).is_ok()
}

/// Mounts `filesystem` at the existing directory `target`; errno `ETIMEDOUT` at the deadline.
///
/// A kernel that does not know the type is errno `ENODEV`. Errors carry what the kernel said about the mount.
pub fn mount(filesystem: Filesystem<'_>, target: &Path, deadline: Duration) -> Result<()> {
    let Filesystem { fs_type, source, options, file } = filesystem;
    let doing = || format!("mount {source}");
    let text = |text: &str| CString::new(text).map_err(|_| Error::new(doing(), Errno::INVAL));
    let (fs_type, name) = (text(fs_type)?, text(source)?);
    let options = options
        .iter()
        .map(|option| match option.split_once('=') {
            Some((key, value)) => Ok((text(key)?, Some(text(value)?))),
            None => Ok((text(option)?, None)),
        })
        .collect::<Result<Vec<_>>>()?;
    let target = c_path(target)?;
    let outcome = hear_child(deadline, file, |log| {
        let context = fsopen(&*fs_type, FsOpenFlags::FSOPEN_CLOEXEC)?;
        let made = (|| {
            fsconfig_set_string(&context, c"source", &*name)?;
            for (key, value) in &options {
                match value {
                    Some(value) => fsconfig_set_string(&context, &**key, &**value)?,
                    None => fsconfig_set_flag(&context, &**key)?,
                }
            }
            fsconfig_create(&context)?;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, rustix::mount::MountAttrFlags::empty())
        })();
        let tree = made.inspect_err(|_| {
            let mut said = [0; LOG];
            while let Ok(length @ 1..) = rustix::io::read(&context, &mut said) {
                let _ = rustix::io::write(log, &said[..length]);
            }
        })?;
        put(&tree, &target)
    });
    outcome.map(drop).map_err(|failure| failure.while_doing(doing()))
}

/// Makes the directory `below`, which is below the mount at `root`, also appear at the existing directory `target`.
///
/// No symbolic link in `below` is followed, and nothing leads out of `root`: errno `ELOOP` or `EXDEV`. An empty `below`
/// is the root itself. Where nothing is mounted at `root`: errno `ENXIO`.
pub fn bind(
    root: &Path,
    below: &Path,
    target: &Path,
    attributes: Attributes,
    deadline: Duration,
) -> Result<()> {
    let (place, top, to) = (c_path(below)?, c_path(root)?, c_path(target)?);
    let outcome = in_child(deadline, |_| {
        let top = rustix::fs::open(&*top, DIRECTORY, Mode::empty())?;
        let as_known = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        mount_root(rustix::fs::statx(&top, c"", as_known, StatxFlags::empty())?)?;
        let directory = if place.is_empty() {
            top
        } else {
            rustix::fs::openat2(&top, &*place, DIRECTORY, Mode::empty(), BENEATH)?
        };
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(&directory, c"", flags)?;
        add_attributes(tree.as_fd(), attributes).map_err(|error| error_number(&error))?;
        put(&tree, &to)
    });
    let doing = || format!("bind {} at {}", root.join(below).display(), target.display());
    outcome.map_err(|failure| failure.while_doing(doing()))
}

/// Gives the directory `below` a mode, unless it has it; it is found as by [`bind`].
pub fn ensure_mode(root: &Path, below: &Path, mode: u32, deadline: Duration) -> Result<()> {
    let (place, top) = (c_path(below)?, c_path(root)?);
    let outcome = in_child(deadline, |_| {
        let top = rustix::fs::open(&*top, READABLE, Mode::empty())?;
        let directory = if place.is_empty() {
            top
        } else {
            rustix::fs::openat2(&top, &*place, READABLE, Mode::empty(), BENEATH)?
        };
        let wanted = Mode::from_raw_mode(mode);
        if Mode::from_raw_mode(rustix::fs::fstat(&directory)?.st_mode) != wanted {
            rustix::fs::fchmod(&directory, wanted)?;
        }
        Ok(())
    });
    let doing = || format!("set the mode of {}", root.join(below).display());
    outcome.map_err(|failure| failure.while_doing(doing()))
}

/// Asks what is mounted at `path` for its attributes: an error is the other machine's, or errno `ETIMEDOUT`. Where nothing
/// is mounted: errno `ENXIO`.
pub fn probe(path: &Path, deadline: Duration) -> Result<()> {
    let place = c_path(path)?;
    let outcome = in_child(deadline, |_| {
        let flags = AtFlags::NO_AUTOMOUNT | AtFlags::STATX_FORCE_SYNC;
        match rustix::fs::statx(CWD, &*place, flags, StatxFlags::MODE | StatxFlags::MTIME) {
            Err(Errno::NOENT) => Err(Errno::NXIO),
            found => mount_root(found?),
        }
    });
    outcome.map_err(|failure| failure.while_doing(format!("look at {}", path.display())))
}

/// The space of the filesystem mounted at `path`, by asking the other machine through it; errno `ETIMEDOUT` at the
/// deadline.
pub fn space(path: &Path, deadline: Duration) -> Result<Space> {
    let place = c_path(path)?;
    let said = hear_child(deadline, None, |answer| {
        let space = Space::from(rustix::fs::statvfs(&*place)?);
        let numbers = [space.total, space.free, space.available, space.inodes_total, space.inodes_free];
        for number in numbers {
            rustix::io::write(answer, &number.to_ne_bytes())?;
        }
        Ok(())
    });
    let doing = || format!("ask for the free space of {}", path.display());
    let said = said.map_err(|failure| failure.while_doing(doing()))?;
    let mut numbers =
        said.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap_or_default()));
    let mut next = || numbers.next().ok_or_else(|| Error::new(doing(), Errno::IO));
    Ok(Space {
        total: next()?,
        free: next()?,
        available: next()?,
        inodes_total: next()?,
        inodes_free: next()?,
    })
}

/// Whether something is mounted exactly at `path`, by the kernel's table.
pub fn is_mounted(path: &Path) -> Result<bool> {
    Ok(mounted_at(path)?.is_some())
}

/// What is mounted exactly at `path`, by the kernel's table; a path that leads nowhere has nothing.
pub fn mounted_at(path: &Path) -> Result<Option<MountInfo>> {
    Ok(topmost(all_mounted_at(path)?))
}

/// Everything that is mounted at `path`, one on the other, by the kernel's table.
pub fn all_mounted_at(path: &Path) -> Result<Vec<MountInfo>> {
    // A directory's list of names asks nobody what is mounted on them, and is shorter than the table.
    if let (Some(parent), Some(name)) = (path.parent(), path.file_name())
        && let Ok(mut names) = std::fs::read_dir(parent)
        && !names.any(|entry| entry.map_or(true, |entry| entry.file_name() == name))
    {
        return Ok(Vec::new());
    }
    match layers_at(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        found => found,
    }
}

/// Takes away everything mounted at `target`: as usual, else out of sight until its last user is gone.
///
/// Not by force: that would end what others do on the same filesystem, wherever they have it mounted.
pub fn unmount(target: &Path, deadline: Duration) -> Result<Change> {
    unmount_by(target, &[UnmountFlags::empty(), UnmountFlags::DETACH], deadline)
}

/// As [`unmount`], but before it goes out of sight, by force: for the last mount of a filesystem.
pub fn unmount_last(target: &Path, deadline: Duration) -> Result<Change> {
    unmount_by(target, &[UnmountFlags::empty(), UnmountFlags::FORCE, UnmountFlags::DETACH], deadline)
}

/// As [`unmount`], but only as usual: what is in use stays, errno `EBUSY`.
pub fn unmount_unused(target: &Path, deadline: Duration) -> Result<Change> {
    unmount_by(target, &[UnmountFlags::empty()], deadline)
}

/// As [`unmount`], but by force from the beginning: whoever still uses it, if only because its mount namespace is a
/// copy of this one, gets errors from now on.
pub fn end(target: &Path, deadline: Duration) -> Result<Change> {
    unmount_by(target, &[UnmountFlags::FORCE, UnmountFlags::DETACH], deadline)
}

fn unmount_by(target: &Path, ways: &[UnmountFlags], deadline: Duration) -> Result<Change> {
    let place = c_path(target)?;
    let mut last = Ok(Change::AlreadyTrue);
    for &flags in ways {
        let outcome = in_child(deadline, |_| {
            let mut removed = false;
            loop {
                match rustix::mount::unmount(&*place, flags | UnmountFlags::NOFOLLOW) {
                    Ok(()) => removed = true,
                    // There was nothing below it.
                    Err(Errno::INVAL) if removed => return Ok(()),
                    failed => return failed,
                }
            }
        });
        match outcome {
            Ok(()) => return Ok(Change::Made),
            // Nothing is mounted there. Or it went out of sight, which is enough: what is still to be written may wait for
            // the other machine long after.
            Err(failure) if !is_mounted(target)? => {
                let was_mounted = last.is_err() || !matches!(failure.errno, Errno::INVAL | Errno::NOENT);
                return Ok(if was_mounted { Change::Made } else { Change::AlreadyTrue });
            }
            Err(failure) => last = Err(failure),
        }
    }
    last.map_err(|failure| failure.while_doing(format!("unmount {}", target.display())))
}

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const READABLE: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

fn mount_root(found: Statx) -> std::result::Result<(), Errno> {
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) { Ok(()) } else { Err(Errno::NXIO) }
}

/// Puts a detached mount at `target`.
fn put(tree: &OwnedFd, target: &CStr) -> std::result::Result<(), Errno> {
    let place = rustix::fs::open(target, DIRECTORY, Mode::empty())?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree, c"", &place, c"", flags)
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(format!("use the path {}", path.display()), Errno::INVAL))
}

fn error_number(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory whose mounts go away with it.
    struct Scratch(tempfile::TempDir);

    impl Scratch {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn dir(&self, name: &str) -> std::path::PathBuf {
            let path = self.0.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = crate::mount::unmount_below(self.0.path());
        }
    }

    const SOON: Duration = Duration::from_secs(10);

    fn tmpfs(at: &Path) {
        let options = ["size=1m".to_owned()];
        mount(Filesystem { fs_type: "tmpfs", source: "test", options: &options, file: None }, at, SOON)
            .unwrap();
    }

    #[test]
    fn a_filesystem_is_mounted_and_a_directory_of_it_bound() {
        let scratch = Scratch::new();
        let (share, target) = (scratch.dir("share"), scratch.dir("target"));
        tmpfs(&share);
        assert!(is_mounted(&share).unwrap());
        std::fs::create_dir_all(share.join("a/b")).unwrap();
        std::fs::write(share.join("a/b/file"), "here").unwrap();
        let read_only = Attributes { read_only: true, ..Attributes::default() };
        bind(&share, Path::new("a/b"), &target, read_only, SOON).unwrap();
        assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "here");
        assert!(std::fs::write(target.join("file"), "x").is_err());
        ensure_mode(&share, Path::new("a/b"), 0o751, SOON).unwrap();
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&target).unwrap().permissions());
        assert_eq!(mode & 0o7777, 0o751);
        probe(&target, SOON).unwrap();
        assert_eq!(space(&target, SOON).unwrap().total, 1 << 20);
        assert_eq!(unmount(&target, SOON).unwrap(), Change::Made);
        assert_eq!(unmount(&target, SOON).unwrap(), Change::AlreadyTrue);
        assert!(!is_mounted(&target).unwrap() && !is_mounted(&scratch.0.path().join("none/such")).unwrap());
    }

    #[test]
    fn a_link_on_the_share_leads_nowhere() {
        let scratch = Scratch::new();
        let (share, target) = (scratch.dir("share"), scratch.dir("target"));
        tmpfs(&share);
        std::os::unix::fs::symlink("/etc", share.join("evil")).unwrap();
        std::fs::create_dir(share.join("dir")).unwrap();
        std::os::unix::fs::symlink("/", share.join("dir/evil")).unwrap();
        for below in ["evil", "dir/evil", "dir/evil/etc", "../target", "dir/../../target", "/etc"] {
            let error = bind(&share, Path::new(below), &target, Attributes::default(), SOON).unwrap_err();
            let errno = error.errno().map(Errno::from_raw_os_error);
            assert!(matches!(errno, Some(Errno::LOOP | Errno::XDEV | Errno::NOTDIR)), "{below}: {error:?}");
            assert!(!is_mounted(&target).unwrap());
        }
    }

    #[test]
    fn a_directory_that_nothing_is_mounted_at_is_no_share() {
        let scratch = Scratch::new();
        let (share, target) = (scratch.dir("share"), scratch.dir("target"));
        scratch.dir("share/dir");
        let error = bind(&share, Path::new("dir"), &target, Attributes::default(), SOON).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::NXIO.raw_os_error()));
        assert!(!is_mounted(&target).unwrap());
    }

    #[test]
    fn what_the_kernel_refuses_is_told() {
        let scratch = Scratch::new();
        let target = scratch.dir("target");
        let options = ["nonsense=1".to_owned()];
        let odd = Filesystem { fs_type: "tmpfs", source: "test", options: &options, file: None };
        let error = mount(odd, &target, SOON).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::INVAL.raw_os_error()));
        assert!(error.to_string().contains("nonsense"), "{error}");
        let unknown = Filesystem { fs_type: "nosuchfs", source: "test", options: &[], file: None };
        assert_eq!(mount(unknown, &target, SOON).unwrap_err().errno(), Some(Errno::NODEV.raw_os_error()));
    }

    #[test]
    fn a_mount_in_use_goes_out_of_sight() {
        let scratch = Scratch::new();
        let share = scratch.dir("share");
        tmpfs(&share);
        std::fs::write(share.join("file"), "held").unwrap();
        let held = std::fs::File::open(share.join("file")).unwrap();
        assert_eq!(unmount(&share, SOON).unwrap(), Change::Made);
        assert!(!is_mounted(&share).unwrap());
        drop(held);
    }
}
