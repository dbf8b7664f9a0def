//! The calls that may wait for another machine, as they are asked of a worker and made by it.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
    },
};
use serde::{Deserialize, Serialize};

use crate::{
    Error,
    mount::{Attributes, add_attributes},
    usage::Space,
};

/// How much of what the kernel says about a mount is read at once.
const LOG: usize = 1024;

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const READABLE: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// A filesystem to be mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// Its type.
    pub fs_type: String,
    /// What it is called, such as `server:/path`.
    pub source: String,
    /// Its options, one each.
    pub options: Vec<String>,
}

/// One call.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Mount { filesystem: Filesystem, target: PathBuf },
    Bind { root: PathBuf, below: PathBuf, target: PathBuf, attributes: Attributes },
    EnsureMode { root: PathBuf, below: PathBuf, mode: u32 },
    Probe(PathBuf),
    Space(PathBuf),
    Unmount { target: PathBuf, method: UnmountMethod },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum UnmountMethod {
    /// What is in use stays.
    Usual,
    /// What is under way ends with errors; what is in use stays nevertheless.
    Force,
    /// It goes out of sight, and away with its last user.
    Detach,
}

/// What came of a call.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Space(Space),
}

/// Why a call failed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    errno: i32,
    /// What the kernel said besides, ready to be appended to a sentence.
    said: String,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self { errno: errno.raw_os_error(), said: String::new() }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self { errno, said: String::new() },
            None => Self { errno: Errno::IO.raw_os_error(), said: format!(" ({error})") },
        }
    }
}

impl Failure {
    pub(super) fn errno(&self) -> Errno {
        Errno::from_raw_os_error(self.errno)
    }

    pub(super) fn while_doing(self, doing: String) -> Error {
        Error::new(doing + &self.said, self.errno())
    }
}

type Outcome<T> = Result<T, Failure>;

impl Request {
    /// Makes the call, and waits for as long as it takes.
    pub(super) fn perform(self) -> Outcome<Answer> {
        match self {
            Self::Mount { filesystem, target } => mount(&filesystem, &target)?,
            Self::Bind { root, below, target, attributes } => bind(&root, &below, &target, attributes)?,
            Self::EnsureMode { root, below, mode } => ensure_mode(&root, &below, mode)?,
            Self::Probe(path) => probe(&path)?,
            Self::Space(path) => return Ok(Answer::Space(rustix::fs::statvfs(&path)?.into())),
            Self::Unmount { target, method } => unmount(&target, method)?,
        }
        Ok(Answer::Done)
    }
}

fn mount(filesystem: &Filesystem, target: &Path) -> Outcome<()> {
    let context = fsopen(filesystem.fs_type.as_str(), FsOpenFlags::FSOPEN_CLOEXEC)?;
    let made = (|| {
        fsconfig_set_string(&context, "source", filesystem.source.as_str())?;
        for option in &filesystem.options {
            match option.split_once('=') {
                Some((key, value)) => fsconfig_set_string(&context, key, value)?,
                None => fsconfig_set_flag(&context, option.as_str())?,
            }
        }
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    })();
    let tree = made.map_err(|errno| Failure { errno: errno.raw_os_error(), said: kernel_log(&context) })?;
    Ok(attach(&tree, target)?)
}

/// What the kernel logged about a mount: one message a line, a letter for its level, a space, the text.
fn kernel_log(context: &OwnedFd) -> String {
    let (mut log, mut said) = (Vec::new(), [0; LOG]);
    while let Ok(length @ 1..) = rustix::io::read(context, &mut said) {
        log.extend_from_slice(&said[..length]);
        log.push(b'\n');
    }
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = text.lines().filter_map(|line| line.get(2..)).map(str::trim).collect();
    if lines.is_empty() { String::new() } else { format!(" ({})", lines.join("; ")) }
}

fn bind(root: &Path, below: &Path, target: &Path, attributes: Attributes) -> Outcome<()> {
    let top = rustix::fs::open(root, DIRECTORY, Mode::empty())?;
    let as_cached = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    check_mount_root(rustix::fs::statx(&top, "", as_cached, StatxFlags::empty())?)?;
    let directory = open_below(top, below, DIRECTORY)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(&directory, "", flags)?;
    add_attributes(tree.as_fd(), attributes)?;
    Ok(attach(&tree, target)?)
}

fn ensure_mode(root: &Path, below: &Path, mode: u32) -> Outcome<()> {
    let top = rustix::fs::open(root, READABLE, Mode::empty())?;
    let directory = open_below(top, below, READABLE)?;
    let wanted = Mode::from_raw_mode(mode);
    if Mode::from_raw_mode(rustix::fs::fstat(&directory)?.st_mode) != wanted {
        rustix::fs::fchmod(&directory, wanted)?;
    }
    Ok(())
}

fn probe(path: &Path) -> Outcome<()> {
    let flags = AtFlags::NO_AUTOMOUNT | AtFlags::STATX_FORCE_SYNC;
    match rustix::fs::statx(CWD, path, flags, StatxFlags::MODE | StatxFlags::MTIME) {
        Err(Errno::NOENT) => Err(Errno::NXIO.into()),
        found => Ok(check_mount_root(found?)?),
    }
}

fn unmount(target: &Path, method: UnmountMethod) -> Outcome<()> {
    let flags = UnmountFlags::NOFOLLOW
        | match method {
            UnmountMethod::Usual => UnmountFlags::empty(),
            UnmountMethod::Force => UnmountFlags::FORCE,
            UnmountMethod::Detach => UnmountFlags::DETACH,
        };
    let mut removed = false;
    loop {
        match rustix::mount::unmount(target, flags) {
            Ok(()) => removed = true,
            // There was nothing below it.
            Err(Errno::INVAL) if removed => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// A directory below `top`, or `top` itself.
fn open_below(top: OwnedFd, below: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    if below.as_os_str().is_empty() {
        return Ok(top);
    }
    rustix::fs::openat2(&top, below, flags, Mode::empty(), BENEATH)
}

fn check_mount_root(found: Statx) -> rustix::io::Result<()> {
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) { Ok(()) } else { Err(Errno::NXIO) }
}

/// Puts a detached mount at `target`.
fn attach(tree: &OwnedFd, target: &Path) -> rustix::io::Result<()> {
    let directory = rustix::fs::open(target, DIRECTORY, Mode::empty())?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree, "", &directory, "", flags)
}
