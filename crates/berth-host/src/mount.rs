//! Mounts by system call, never by mount(8).
//!
//! A mount is built detached, gets its attributes, and is moved into place: nobody ever sees it without them.
//! The last component of a source or target is never followed if it is a symbolic link; what leads there is
//! the caller's to trust.
#![expect(unsafe_code, reason = "mount_setattr(2) has no safe wrapper")]

mod mountinfo;
mod options;

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, StatVfsMountFlags, StatxAttributes, StatxFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
    },
};

pub(crate) use self::mountinfo::{layers_at, topmost};
pub use self::{
    mountinfo::{MountInfo, is_shared, mount_of, mounts, mounts_of},
    options::{Atime, Attributes, Options, parse_options},
};
use crate::{
    error::{Change, Doing as _, Error, Result},
    path::Dir,
};

/// How often, and after what time, a busy mount is tried again before it counts as one.
const BUSY_ATTEMPTS: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Makes `source`, a directory or any other file, also appear at the existing `target`.
///
/// The new mount inherits the attributes of the mount `source` lies on; `attributes` adds to them. What is
/// mounted below `source` does not come along.
pub fn bind(source: &Path, target: &Path, attributes: Attributes) -> Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    let tree = open_tree(CWD, plain(source), flags).doing("bind", source)?;
    refuse_symlink(&tree).doing("bind", source)?;
    add_attributes(tree.as_fd(), attributes).doing("set the mount attributes of a bind of", source)?;
    attach(&tree, target)
}

/// As [`bind`], of a directory that is held open, so that nothing can take its place on the way there.
pub fn bind_directory(source: &Dir, target: &Path, attributes: Attributes) -> Result<()> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(source, "", flags).doing("bind", source.path())?;
    add_attributes(tree.as_fd(), attributes).doing("set the mount attributes of a bind of", source.path())?;
    attach(&tree, target)
}

/// Adds attributes to what is mounted at `target`.
pub fn set_attributes(target: &Path, attributes: Attributes) -> Result<()> {
    if attributes == Attributes::default() {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mounted = rustix::fs::open(target, flags, Mode::empty()).doing("open", target)?;
    add_attributes(mounted.as_fd(), attributes).doing("set the mount attributes of", target)
}

/// Mounts the filesystem on `device` at the existing `target`; each of `options` is one option of the filesystem.
///
/// A read-only mount also makes the filesystem itself read-only, as a device that cannot be written needs.
/// Errors name the option the kernel refused, and carry what it logged.
pub fn filesystem(
    device: &Path,
    target: &Path,
    fs_type: &str,
    attributes: Attributes,
    options: &[String],
) -> Result<()> {
    let what = format!("mount {fs_type} on {}", device.display());
    let context = fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|errno| Error::new(&what, errno))?;
    let failed = |doing: String, errno: Errno| Error::new(doing + &kernel_log(&context), errno);

    fsconfig_set_string(&context, "source", device).map_err(|errno| failed(what.clone(), errno))?;
    if attributes.read_only {
        fsconfig_set_flag(&context, "ro").map_err(|errno| failed(format!("{what} read-only"), errno))?;
    }
    for option in options {
        match option.split_once('=') {
            Some((key, value)) => fsconfig_set_string(&context, key, value),
            None => fsconfig_set_flag(&context, option.as_str()),
        }
        .map_err(|errno| failed(format!("{what} with the option {option}"), errno))?;
    }
    // Some options are only judged here, and not every filesystem logs which one it disliked.
    let with = if options.is_empty() { String::new() } else { format!(" with {}", options.join(",")) };
    fsconfig_create(&context).map_err(|errno| failed(format!("{what}{with}"), errno))?;
    let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes.flags())
        .map_err(|errno| failed(what, errno))?;
    attach(&tree, target)
}

/// Removes every mount stacked on `target`; nothing mounted there, or no such path, is `AlreadyTrue`.
///
/// A mount in use is an error with errno `EBUSY`.
pub fn unmount(target: &Path) -> Result<Change> {
    unmount_all(target, UnmountFlags::NOFOLLOW)
}

/// As `unmount`, but takes a mount in use out of sight at once and lets it end with its last user.
pub fn unmount_lazily(target: &Path) -> Result<Change> {
    unmount_all(target, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
}

/// Removes every mount below `top`, the youngest first, and gives how many there were; one in use goes out of sight.
///
/// Does not touch `top` itself, so that a mount of a server that does not answer holds nobody up: the last component of
/// the path is not resolved. Where the directory above is missing, there is nothing to remove.
pub fn unmount_below(top: &Path) -> Result<usize> {
    let (Some(parent), Some(name)) = (top.parent(), top.file_name()) else {
        return Err(Errno::INVAL).doing("unmount what is below", top);
    };
    let top = match std::fs::canonicalize(parent) {
        Ok(parent) => parent.join(name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error).doing("resolve", parent),
    };
    let below: Vec<PathBuf> = mounts()?
        .into_iter()
        .filter(|mount| mount.target != top && mount.target.starts_with(&top))
        .map(|mount| mount.target)
        .collect();
    for target in below.iter().rev() {
        unmount_lazily(target)?;
    }
    Ok(below.len())
}

/// Whether something is mounted exactly at `path`; a missing path is `false`.
pub fn is_mount_point(path: &Path) -> Result<bool> {
    match observe(path) {
        Ok(seen) => Ok(seen.is_some_and(|seen| seen.is_root)),
        Err(_) => Ok(mountinfo::listed_at(path)?.is_some()),
    }
}

/// Whether writes at `path` are refused, by its mount or by its filesystem.
pub fn is_read_only(path: &Path) -> Result<bool> {
    let seen = rustix::fs::statvfs(path).doing("read the filesystem flags of", path)?;
    Ok(seen.f_flag.contains(StatVfsMountFlags::RDONLY))
}

struct MountIdentity {
    is_root: bool,
    mount_id: u64,
}

/// The mount `path` is on, or `None` where there is no such path.
fn observe(path: &Path) -> io::Result<Option<MountIdentity>> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match rustix::fs::statx(CWD, plain(path), flags, StatxFlags::MNT_ID) {
        Ok(seen) => Ok(Some(MountIdentity {
            is_root: seen.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
            mount_id: seen.stx_mnt_id,
        })),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn unmount_all(target: &Path, flags: UnmountFlags) -> Result<Change> {
    let mut change = Change::AlreadyTrue;
    let mut patience = BUSY_ATTEMPTS;
    loop {
        match rustix::mount::unmount(plain(target), flags) {
            Ok(()) => change = Change::Made,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(change),
            // Also the answer for a mount that this namespace may not take apart.
            Err(Errno::INVAL) if !is_mount_point(target)? => return Ok(change),
            // A child on its way from fork to exec has a copy of every file this process has open.
            Err(Errno::BUSY) if patience > 0 => {
                patience -= 1;
                thread::sleep(BUSY_PAUSE);
            }
            Err(errno) => return Err(errno).doing("unmount", target),
        }
    }
}

/// Puts a detached mount at `target`.
fn attach(tree: &OwnedFd, target: &Path) -> Result<()> {
    let place =
        rustix::fs::open(plain(target), OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
            .doing("open the mount point", target)?;
    refuse_symlink(&place).doing("mount at", target)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree, "", &place, "", flags).doing("mount at", target)
}

fn refuse_symlink(file: &OwnedFd) -> std::result::Result<(), Errno> {
    match FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode) {
        FileType::Symlink => Err(Errno::LOOP),
        _ => Ok(()),
    }
}

pub(crate) fn add_attributes(tree: BorrowedFd<'_>, attributes: Attributes) -> io::Result<()> {
    let mut set = attributes.flags();
    let mut clear = MountAttrFlags::empty();
    match attributes.atime {
        Atime::Default => set.remove(MountAttrFlags::MOUNT_ATTR__ATIME),
        // The access time is one value of several bits, which the kernel wants cleared as a whole.
        _ => clear = MountAttrFlags::MOUNT_ATTR__ATIME,
    }
    Ok(mount_setattr(tree, set.bits().into(), clear.bits().into(), 0, false)?)
}

/// Sets and clears attributes of a mount and sets its propagation (0 leaves it), for it alone or all mounts below.
pub fn mount_setattr(
    tree: BorrowedFd<'_>,
    set: u64,
    clear: u64,
    propagation: u64,
    recursive: bool,
) -> rustix::io::Result<()> {
    set_attr(tree, libc::mount_attr { attr_set: set, attr_clr: clear, propagation, userns_fd: 0 }, recursive)
}

/// Shows the files of a detached mount, and with `recursive` those of all mounts below it, with the ids that they have in
/// a user namespace: what is owned by 0 on disk is owned by root there, and what is made there by its root is owned by 0.
///
/// `EINVAL` says that a filesystem among them cannot do that, or not with this kernel.
pub fn map_ids(tree: BorrowedFd<'_>, namespace: BorrowedFd<'_>, recursive: bool) -> rustix::io::Result<()> {
    let userns_fd = u64::from(namespace.as_raw_fd().cast_unsigned());
    let attr = libc::mount_attr { attr_set: libc::MOUNT_ATTR_IDMAP, attr_clr: 0, propagation: 0, userns_fd };
    set_attr(tree, attr, recursive)
}

/// As [`map_ids`], for what is mounted at `target` already; what is mounted below it is not there any more.
pub fn map_ids_at(target: &Path, namespace: BorrowedFd<'_>) -> Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    let doing = "show with other ids";
    let tree = open_tree(CWD, plain(target), flags).doing(doing, target)?;
    map_ids(tree.as_fd(), namespace, false).doing(doing, target)?;
    unmount(target)?;
    attach(&tree, target)
}

/// Finds out whether [`map_ids`] can be done for what is at `source` and mounted below it. Nothing is mounted.
pub fn check_mappable(source: &Path, namespace: BorrowedFd<'_>) -> Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW
        | OpenTreeFlags::AT_RECURSIVE;
    let doing = "show with the ids of a user namespace";
    let tree = open_tree(CWD, plain(source), flags).doing(doing, source)?;
    map_ids(tree.as_fd(), namespace, true).doing(doing, source)
}

fn set_attr(tree: BorrowedFd<'_>, attr: libc::mount_attr, recursive: bool) -> rustix::io::Result<()> {
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the fd is open, the path a constant C string, and `attr` a live `mount_attr` of the size given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

/// What the kernel logged about this filesystem context, in parentheses, or nothing.
fn kernel_log(context: &OwnedFd) -> String {
    let mut messages = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(length @ 1..) = rustix::io::read(context, &mut buffer) {
        let message = String::from_utf8_lossy(&buffer[..length]);
        // One message each: a letter for its level, a space, the text.
        messages.push(message.get(2..).unwrap_or_default().trim_end().to_owned());
    }
    if messages.is_empty() { String::new() } else { format!(" ({})", messages.join("; ")) }
}

/// The path without a trailing slash, behind which the kernel would follow a link.
fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
