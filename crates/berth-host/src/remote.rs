//! Mounts of what is on other machines, which may not answer.
//!
//! Every system call that could wait for the other machine is made by a worker process that does nothing else
//! ([`crate::worker`]): it is killed at the deadline, and no thread of this process ever waits in the kernel. What is
//! mounted is read from the kernel's table, which asks nobody.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
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
    error::{Change, Error, Result},
    helper::Helper,
    mount::{Attributes, MountInfo, add_attributes, layers_at, topmost},
    usage::Space,
    worker::{self, Workers},
};

/// How much of what the kernel says about a mount is read at once.
const LOG: usize = 1024;

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const READABLE: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// The process that makes the calls of [`RemoteMounts`].
pub const MOUNT_WORKER: Helper =
    Helper { argument: "__remote-mounts", run: || worker::serve(Request::perform) };

/// Mounts, binds and unmounts filesystems of other machines, each call within a deadline: errno `ETIMEDOUT` after it.
#[derive(Debug)]
pub struct RemoteMounts {
    workers: Workers,
}

impl RemoteMounts {
    /// `program` is one whose `main` intercepts [`MOUNT_WORKER`].
    pub fn new(program: &Path) -> Self {
        Self { workers: Workers::new(program, MOUNT_WORKER.argument) }
    }

    /// Mounts `filesystem` at the existing directory `target`.
    ///
    /// A kernel that does not know the type is errno `ENODEV`. Errors carry what the kernel said about the mount.
    pub fn mount(&self, filesystem: Filesystem, target: &Path, deadline: Duration) -> Result<()> {
        let doing = format!("mount {}", filesystem.source);
        let request = Request::Mount { filesystem, target: target.to_owned() };
        self.call(&request, deadline).map(drop).map_err(|failure| failure.while_doing(doing))
    }

    /// Makes the directory `below`, which is below the mount at `root`, also appear at the existing directory `target`.
    ///
    /// No symbolic link in `below` is followed, and nothing leads out of `root`: errno `ELOOP` or `EXDEV`. An empty `below`
    /// is the root itself. Where nothing is mounted at `root`: errno `ENXIO`.
    pub fn bind(
        &self,
        root: &Path,
        below: &Path,
        target: &Path,
        attributes: Attributes,
        deadline: Duration,
    ) -> Result<()> {
        let (root, below, target) = (root.to_owned(), below.to_owned(), target.to_owned());
        let doing = format!("bind {} at {}", joined(&root, &below), target.display());
        let request = Request::Bind { root, below, target, attributes };
        self.call(&request, deadline).map(drop).map_err(|failure| failure.while_doing(doing))
    }

    /// Gives the directory `below` a mode, unless it has it; it is found as by [`RemoteMounts::bind`]. A setgid bit stays: the
    /// kubelet sets it for `fsGroup`, and changes the owners of all files again where it is missing.
    pub fn ensure_mode(&self, root: &Path, below: &Path, mode: u32, deadline: Duration) -> Result<()> {
        let doing = format!("set the mode of {}", joined(root, below));
        let request = Request::EnsureMode { root: root.to_owned(), below: below.to_owned(), mode };
        self.call(&request, deadline).map(drop).map_err(|failure| failure.while_doing(doing))
    }

    /// Asks what is mounted at `path` for its attributes: an error is the other machine's. Where nothing is mounted:
    /// errno `ENXIO`.
    pub fn probe(&self, path: &Path, deadline: Duration) -> Result<()> {
        let answer = self.call(&Request::Probe(path.to_owned()), deadline);
        answer.map(drop).map_err(|failure| failure.while_doing(format!("stat {}", path.display())))
    }

    /// The space of the filesystem mounted at `path`, by asking the other machine through it.
    pub fn space(&self, path: &Path, deadline: Duration) -> Result<Space> {
        let doing = || format!("ask for the free space of {}", path.display());
        match self.call(&Request::Space(path.to_owned()), deadline) {
            Ok(Answer::Space(space)) => Ok(space),
            Ok(Answer::Done) => Err(Error::new(doing(), Errno::PROTO)),
            Err(failure) => Err(failure.while_doing(doing())),
        }
    }

    /// Takes away everything mounted at `target`: as usual, else out of sight until its last user is gone.
    ///
    /// Not by force: that would end what others do on the same filesystem, wherever they have it mounted.
    pub fn unmount(&self, target: &Path, deadline: Duration) -> Result<Change> {
        self.unmount_by(target, &[UnmountMethod::Usual, UnmountMethod::Detach], deadline)
    }

    /// As [`RemoteMounts::unmount`], but before it goes out of sight, by force: for the last mount of a filesystem.
    pub fn unmount_last(&self, target: &Path, deadline: Duration) -> Result<Change> {
        let methods = [UnmountMethod::Usual, UnmountMethod::Force, UnmountMethod::Detach];
        self.unmount_by(target, &methods, deadline)
    }

    /// As [`RemoteMounts::unmount`], but only as usual: what is in use stays, errno `EBUSY`.
    pub fn unmount_unused(&self, target: &Path, deadline: Duration) -> Result<Change> {
        self.unmount_by(target, &[UnmountMethod::Usual], deadline)
    }

    /// As [`RemoteMounts::unmount`], but by force from the beginning: whoever still uses it, if only because its mount
    /// namespace is a copy of this one, gets errors from now on.
    pub fn end(&self, target: &Path, deadline: Duration) -> Result<Change> {
        self.unmount_by(target, &[UnmountMethod::Force, UnmountMethod::Detach], deadline)
    }

    fn unmount_by(&self, target: &Path, methods: &[UnmountMethod], deadline: Duration) -> Result<Change> {
        let mut last = Ok(Change::AlreadyTrue);
        for &method in methods {
            match self.call(&Request::Unmount { target: target.to_owned(), method }, deadline) {
                Ok(_) => return Ok(Change::Made),
                // Nothing is mounted there. Or it went out of sight, which is enough: what is still to be written may
                // wait for the other machine long after.
                Err(failure) if !is_mounted(target)? => {
                    let was_mounted =
                        last.is_err() || !matches!(failure.errno(), Errno::INVAL | Errno::NOENT);
                    return Ok(if was_mounted { Change::Made } else { Change::AlreadyTrue });
                }
                Err(failure) => last = Err(failure),
            }
        }
        last.map_err(|failure| failure.while_doing(format!("unmount {}", target.display())))
    }

    fn call(&self, request: &Request, deadline: Duration) -> std::result::Result<Answer, Failure> {
        self.workers.call(request, deadline).unwrap_or_else(|error| Err(error.into()))
    }
}

/// Whether the kernel can mount filesystems of this type for us, be it by a module that it loads for that. Those of other
/// machines are for root of this one.
pub fn kernel_has(fs_type: &str) -> bool {
    !crate::namespace::is_restricted() && fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC).is_ok()
}

/// Mounts `filesystem` by the calling thread: for one whose mount waits for nobody, or in a process that somebody watches.
/// Its options may name open files of this process.
pub fn mount_here(filesystem: Filesystem, target: &Path) -> Result<()> {
    let doing = format!("mount {}", filesystem.source);
    let request = Request::Mount { filesystem, target: target.to_owned() };
    request.perform().map(drop).map_err(|failure| failure.while_doing(doing))
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

/// For people; joining nothing would add a slash.
fn joined(root: &Path, below: &Path) -> String {
    if below.as_os_str().is_empty() {
        root.display().to_string()
    } else {
        root.join(below).display().to_string()
    }
}

// What follows is asked of a worker, and made by it.

/// A filesystem to be mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// The type by which the kernel knows it, such as `nfs`.
    pub fs_type: String,
    /// What it is called, such as `server:/path`.
    pub source: String,
    /// Its options, one each.
    pub options: Vec<String>,
}

/// A system call that a worker makes.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Mount { filesystem: Filesystem, target: PathBuf },
    Bind { root: PathBuf, below: PathBuf, target: PathBuf, attributes: Attributes },
    EnsureMode { root: PathBuf, below: PathBuf, mode: u32 },
    Probe(PathBuf),
    Space(PathBuf),
    Unmount { target: PathBuf, method: UnmountMethod },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum UnmountMethod {
    /// What is in use stays.
    Usual,
    /// What is under way ends with errors; what is in use stays nevertheless.
    Force,
    /// It goes out of sight, and away with its last user.
    Detach,
}

/// What came of a call.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Done,
    Space(Space),
}

/// Why a call failed.
#[derive(Debug, Serialize, Deserialize)]
struct Failure {
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
    fn errno(&self) -> Errno {
        Errno::from_raw_os_error(self.errno)
    }

    fn while_doing(self, doing: String) -> Error {
        Error::new(doing + &self.said, self.errno())
    }
}

type Outcome<T> = std::result::Result<T, Failure>;

impl Request {
    /// Makes the call, and waits for as long as it takes.
    fn perform(self) -> Outcome<Answer> {
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
    let present = Mode::from_raw_mode(rustix::fs::fstat(&directory)?.st_mode);
    let wanted = Mode::from_raw_mode(mode) | (present & Mode::SGID);
    if present != wanted {
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

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    #[ignore = "other tests start it as a process"]
    fn worker_process() {
        if worker::tests::is_worker() {
            worker::answer_requests(Request::perform).unwrap();
        }
    }

    fn mounts() -> RemoteMounts {
        RemoteMounts { workers: worker::tests::workers_of("remote::tests::worker_process") }
    }

    fn filesystem(fs_type: &str, option: &str) -> Filesystem {
        Filesystem { fs_type: fs_type.into(), source: "test".into(), options: vec![option.into()] }
    }

    fn tmpfs(at: &Path) {
        mounts().mount(filesystem("tmpfs", "size=1m"), at, SOON).unwrap();
    }

    #[test]
    fn a_filesystem_is_mounted_and_a_directory_of_it_bound() {
        let (scratch, mounts) = (Scratch::new(), mounts());
        let (share, target) = (scratch.dir("share"), scratch.dir("target"));
        tmpfs(&share);
        assert!(is_mounted(&share).unwrap());
        std::fs::create_dir_all(share.join("a/b")).unwrap();
        std::fs::write(share.join("a/b/file"), "here").unwrap();
        let read_only = Attributes { read_only: true, ..Attributes::default() };
        mounts.bind(&share, Path::new("a/b"), &target, read_only, SOON).unwrap();
        assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "here");
        assert!(std::fs::write(target.join("file"), "x").is_err());
        mounts.ensure_mode(&share, Path::new("a/b"), 0o751, SOON).unwrap();
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&target).unwrap().permissions());
        assert_eq!(mode & 0o7777, 0o751);
        mounts.probe(&target, SOON).unwrap();
        assert_eq!(mounts.space(&target, SOON).unwrap().total, 1 << 20);
        assert_eq!(mounts.unmount(&target, SOON).unwrap(), Change::Made);
        assert_eq!(mounts.unmount(&target, SOON).unwrap(), Change::AlreadyTrue);
        assert!(!is_mounted(&target).unwrap() && !is_mounted(&scratch.0.path().join("none/such")).unwrap());
    }

    #[test]
    fn a_mode_is_set_beside_the_setgid_bit_that_is_there() {
        use std::os::unix::fs::PermissionsExt as _;
        let (scratch, mounts) = (Scratch::new(), mounts());
        let share = scratch.dir("share");
        let mode_after = |present: u32, wanted: u32| {
            std::fs::set_permissions(&share, std::fs::Permissions::from_mode(present)).unwrap();
            mounts.ensure_mode(&share, Path::new(""), wanted, SOON).unwrap();
            std::fs::metadata(&share).unwrap().permissions().mode() & 0o7777
        };
        assert_eq!(mode_after(0o2775, 0o777), 0o2777);
        assert_eq!(mode_after(0o2777, 0o777), 0o2777);
        assert_eq!(mode_after(0o1755, 0o770), 0o770);
        assert_eq!(mode_after(0o755, 0o2770), 0o2770);
    }

    #[test]
    fn a_link_on_the_share_leads_nowhere() {
        let (scratch, mounts) = (Scratch::new(), mounts());
        let (share, target) = (scratch.dir("share"), scratch.dir("target"));
        tmpfs(&share);
        std::os::unix::fs::symlink("/etc", share.join("evil")).unwrap();
        std::fs::create_dir(share.join("dir")).unwrap();
        std::os::unix::fs::symlink("/", share.join("dir/evil")).unwrap();
        for below in ["evil", "dir/evil", "dir/evil/etc", "../target", "dir/../../target", "/etc"] {
            let error =
                mounts.bind(&share, Path::new(below), &target, Attributes::default(), SOON).unwrap_err();
            let errno = error.errno().map(Errno::from_raw_os_error);
            assert!(matches!(errno, Some(Errno::LOOP | Errno::XDEV | Errno::NOTDIR)), "{below}: {error:?}");
            assert!(!is_mounted(&target).unwrap());
        }
    }

    #[test]
    fn a_directory_that_nothing_is_mounted_at_is_no_share() {
        let (scratch, mounts) = (Scratch::new(), mounts());
        let (share, target) = (scratch.dir("share"), scratch.dir("target"));
        scratch.dir("share/dir");
        let error = mounts.bind(&share, Path::new("dir"), &target, Attributes::default(), SOON).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::NXIO.raw_os_error()));
        assert!(!is_mounted(&target).unwrap());
    }

    #[test]
    fn errors_of_the_kernel_are_answered() {
        let scratch = Scratch::new();
        let target = scratch.dir("target");
        let mounts = mounts();
        let error = mounts.mount(filesystem("tmpfs", "nonsense=1"), &target, SOON).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::INVAL.raw_os_error()));
        assert!(error.to_string().contains("nonsense"), "{error}");
        let error = mounts.mount(filesystem("nosuchfs", "x"), &target, SOON).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::NODEV.raw_os_error()));
    }

    #[test]
    fn a_mount_in_use_goes_out_of_sight() {
        let (scratch, mounts) = (Scratch::new(), mounts());
        let share = scratch.dir("share");
        tmpfs(&share);
        std::fs::write(share.join("file"), "held").unwrap();
        let held = std::fs::File::open(share.join("file")).unwrap();
        assert_eq!(mounts.unmount(&share, SOON).unwrap(), Change::Made);
        assert!(!is_mounted(&share).unwrap());
        drop(held);
    }
}
