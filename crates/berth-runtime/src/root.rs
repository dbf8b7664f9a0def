//! The files a container sees: an overlay over the host's root, kernel filesystems of its own, and its volumes.
//!
//! What is written to the overlay lies in a tmpfs that ends with the container's mount namespace, so nothing has to be
//! cleaned up, whoever dies. Paths inside the container are resolved with its root as the root: a symbolic link, be
//! it in the host's files or in a volume, leads to another place in the container, never out of it.
//!
//! What differs for a process that is not root of the machine is in `restricted.rs`.

mod restricted;

use std::{
    io::{self, Write as _},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
    },
    process::{Gid, Pid, PidfdFlags, Uid, pidfd_open},
    thread::{ThreadNameSpaceType, move_into_thread_name_spaces},
};

use crate::{ContainerSpec, Device, Mount, Propagation, TERMINATION_FILE, owner::Owner, sys};
use berth_host::{
    Doing as _, Error, Result,
    mount::{map_ids, mount_setattr},
    namespace::{Ids, is_restricted},
};

/// How much a container may write outside its volumes; it is memory.
const SCRATCH_SIZE: &str = "256m";
const SCRATCH_DIRECTORIES: [(&str, u32); 5] =
    [("upper", 0o755), ("work", 0o700), ("root", 0o755), ("dev", 0o755), ("empty", 0o555)];
/// The group of terminals, where it exists.
const TERMINALS: u32 = 5;
const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY;
const RESTRICTED: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
/// Links are followed below the directory that is given, and nothing leads out of it.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
const HARMLESS: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;
/// Devices every program may expect, by minor number of the memory devices.
const MEMORY_DEVICES: [(&str, u32); 5] =
    [("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)];
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Files of the kernel that show the whole machine or change it: a container finds them empty.
pub(crate) const MASKED: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];
/// Files of the kernel that a container may read and not write.
pub(crate) const READABLE: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
/// What of the host's `/dev` a container has of its own, or not at all.
const OWN_DEVICES: [&str; 6] = ["pts", "shm", "mqueue", "hugepages", "console", "ptmx"];

/// Makes a mount namespace of this process that holds the host's root without what is mounted below it, as far as that is
/// allowed.
pub(crate) fn leave_host_mounts() -> Result<()> {
    let only_root = || -> rustix::io::Result<()> {
        if is_restricted() {
            return restricted::leave_host_mounts();
        }
        sys::leave_mount_namespace()?;
        let private =
            rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)?;
        let root = open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
        attach_at(&root, CWD, "/")?;
        switch_to(&root, 1)
    };
    only_root().map_err(|errno| Error::new("make a mount namespace for containers", errno))
}

/// Makes the files of `spec` the root of this process and its parent, process 1 of the container.
///
/// `state` is the container's directory and `host` the host's mount namespace. With a user namespace as its owner all
/// files look as they do there, although none but root of the machine makes the mounts.
pub(crate) fn enter(
    spec: &ContainerSpec,
    state: BorrowedFd<'_>,
    host: BorrowedFd<'_>,
    owner: Option<Owner<'_>>,
) -> Result<()> {
    let restricted = is_restricted();
    let outside = Outside::fetch(spec, state, host, owner, restricted)?;
    let (scratch, root) = if restricted { restricted::assemble(spec)? } else { overlay(owner)? };
    root.add_kernel_filesystems(&scratch, outside.sysfs.as_ref(), &outside.host_devices, owner, restricted)?;
    if spec.security.mask_kernel_files {
        root.mask_kernel_files(&scratch)?;
    }
    // While there is no volume yet: one that is mounted at /etc is the pod's, and may be the host's.
    root.write_host_files(spec, outside.resolv_conf.as_deref())?;
    for (number, hidden) in spec.hidden.iter().enumerate() {
        let shown = spec.mounts.iter().filter_map(|mount| mount.target.strip_prefix(hidden).ok());
        root.hide(hidden, shown, &format!("hidden-{number}"), &scratch)?;
    }
    for (mount, tree) in &outside.volumes {
        root.attach(tree, &mount.target)?;
    }
    for (device, found) in &outside.devices {
        match found {
            FoundDevice::Number(number) => root.add_device(device, *number, &scratch)?,
            FoundDevice::Bound(tree) => root.attach(tree, &device.target)?,
        }
    }
    if let (Some(target), Some(tree)) = (&spec.termination_message_path, &outside.termination) {
        root.attach(tree, target)?;
    }
    if let Some(directory) = &spec.working_dir {
        root.ensure_dir(directory).doing("make the working directory", directory)?;
    }
    if spec.read_only_root {
        let mut mounts = std::iter::once(&root.directory).chain(&root.overlays);
        mounts
            .try_for_each(|mount| mount_setattr(mount.as_fd(), READ_ONLY, 0, 0, false))
            .map_err(|errno| Error::new("make the root filesystem read-only", errno))?;
    }
    rustix::system::sethostname(spec.hostname.as_bytes())
        .map_err(|errno| Error::new(format!("set the hostname {:?}", spec.hostname), errno))?;
    // The scratch filesystem lies on the host's root.
    switch_to(&root.directory, 2).map_err(|errno| Error::new("change to the container's root", errno))
}

/// What comes from the host, detached from its tree.
struct Outside<'a> {
    volumes: Vec<(&'a Mount, OwnedFd)>,
    devices: Vec<(&'a Device, FoundDevice)>,
    termination: Option<OwnedFd>,
    sysfs: Option<OwnedFd>,
    host_devices: Vec<HostDevice>,
    resolv_conf: Option<Vec<u8>>,
}

/// A device of the host for a container: its number, or a mount of it where no device can be made.
enum FoundDevice {
    Number(u64),
    Bound(OwnedFd),
}

/// What lies below the host's `/dev`, at a path that is relative to it.
struct HostDevice {
    path: PathBuf,
    kind: HostDeviceKind,
}

enum HostDeviceKind {
    Directory,
    Link(PathBuf),
    Node { mode: u32, user: u32, group: u32, number: u64 },
}

impl<'a> Outside<'a> {
    fn fetch(
        spec: &'a ContainerSpec,
        state: BorrowedFd<'_>,
        host: BorrowedFd<'_>,
        owner: Option<Owner<'_>>,
        restricted: bool,
    ) -> Result<Self> {
        let enter = |errno| Error::new("enter a mount namespace", errno);
        let ours = pidfd_open(Pid::INIT, PidfdFlags::empty()).map_err(enter)?;
        rustix::thread::move_into_link_name_space(host, None).map_err(enter)?;
        let fetched = Self::fetch_here(spec, state, owner, restricted);
        move_into_thread_name_spaces(ours.as_fd(), ThreadNameSpaceType::MOUNT).map_err(enter)?;
        fetched
    }

    fn fetch_here(
        spec: &'a ContainerSpec,
        state: BorrowedFd<'_>,
        owner: Option<Owner<'_>>,
        restricted: bool,
    ) -> Result<Self> {
        let mut volumes = Vec::new();
        for mount in &spec.mounts {
            let bound = match &mount.sub_path {
                Some(below) => clone_volume(mount).doing("bind", mount.source.join(below)),
                None => clone_volume(mount).doing("bind", &mount.source),
            };
            let bound = bound?;
            if let Some(owner) = owner {
                map_ids(bound.as_fd(), owner.namespace, true)
                    .doing("show with the ids of the pod's user namespace", &mount.source)?;
            }
            volumes.push((mount, bound));
        }
        // A volume in a volume has to come after it.
        volumes.sort_by_key(|(mount, _)| mount.target.components().count());
        let mut devices = Vec::new();
        for device in &spec.devices {
            let found = find_device(&device.source, restricted);
            devices.push((device, found.doing("use as a device", &device.source)?));
        }
        let termination = match spec.termination_message_path {
            Some(_) => Some(clone_file(state, TERMINATION_FILE).doing("bind", TERMINATION_FILE)?),
            None => None,
        };
        if let (Some(termination), Some(owner)) = (&termination, owner) {
            // Anybody may write it in any case.
            let _ = map_ids(termination.as_fd(), owner.namespace, false);
        }
        // Root of a user namespace is not the machine's, and its devices and settings are not for it.
        let may_use_host_devices = spec.security.host_devices && owner.is_none();
        let sysfs = clone_sysfs(may_use_host_devices, restricted).ok();
        let mut host_devices = Vec::new();
        if may_use_host_devices {
            list_devices(Path::new(""), &mut host_devices).doing("list", "/dev")?;
        }
        let resolv_conf = std::fs::read("/etc/resolv.conf").ok();
        Ok(Self { volumes, devices, termination, sysfs, host_devices, resolv_conf })
    }
}

/// A detached copy of what a mount of a container shows, with its attributes and its propagation.
pub(crate) fn clone_volume(mount: &Mount) -> rustix::io::Result<OwnedFd> {
    let tree = match &mount.sub_path {
        Some(below) => {
            let found = open_below(&mount.source, below)?;
            // The descriptor is what was found: whoever exchanges names now changes nothing.
            let flags = OpenTreeFlags::AT_RECURSIVE | OpenTreeFlags::AT_EMPTY_PATH;
            clone_tree(found.as_fd(), Path::new(""), flags)?
        }
        None => clone_tree(CWD, &mount.source, OpenTreeFlags::AT_RECURSIVE)?,
    };
    if FileType::from_raw_mode(rustix::fs::fstat(&tree)?.st_mode) == FileType::Symlink {
        return Err(Errno::LOOP);
    }
    let propagation = match mount.propagation {
        Propagation::None => libc::MS_PRIVATE,
        Propagation::HostToContainer => libc::MS_SLAVE,
        Propagation::Bidirectional => libc::MS_SHARED,
    };
    let attributes = if mount.restricted { RESTRICTED } else { 0 };
    mount_setattr(tree.as_fd(), attributes, 0, propagation, true)?;
    if mount.read_only {
        mount_setattr(tree.as_fd(), READ_ONLY, 0, 0, mount.recursive_read_only)?;
    }
    Ok(tree)
}

/// Finds what the `sub_path` of a mount names, as the start of its container does it, and makes the directories that are missing.
pub fn find_sub_path(mount: &Mount) -> std::io::Result<()> {
    match &mount.sub_path {
        Some(below) => Ok(open_below(&mount.source, below).map(drop)?),
        None => Ok(()),
    }
}

/// Opens what `below` names in the volume `source`; directories that are missing are made with the mode of the volume's.
///
/// Each step is taken from the volume's directory, so a link that leads out of the volume is refused (`EXDEV`) also when
/// somebody puts it there at this moment.
fn open_below(source: &Path, below: &Path) -> rustix::io::Result<OwnedFd> {
    if below.components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(Errno::XDEV);
    }
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let volume = rustix::fs::open(source, directory | OFlags::NOFOLLOW, Mode::empty())?;
    let open = |path: &Path, flags| rustix::fs::openat2(&volume, path, flags, Mode::empty(), BENEATH);
    match open(below, OFlags::PATH | OFlags::CLOEXEC) {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    let permissions = rustix::fs::fstat(&volume)?.st_mode & 0o777;
    let mut path = PathBuf::new();
    let mut found = open(Path::new("."), directory)?;
    for part in below.components() {
        path.push(part);
        match rustix::fs::mkdirat(&found, part.as_os_str(), Mode::from_raw_mode(permissions)) {
            Ok(()) => {
                // Whatever the umask says; the new directory may have inherited further bits.
                let new = open(&path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
                let inherited = rustix::fs::fstat(&new)?.st_mode & 0o7000;
                rustix::fs::fchmod(&new, Mode::from_raw_mode(inherited | permissions))?;
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        found = open(&path, directory)?;
    }
    Ok(found)
}

fn clone_file(directory: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    let tree = clone_tree(directory, Path::new(name), OpenTreeFlags::empty())?;
    mount_setattr(tree.as_fd(), 0, 0, libc::MS_PRIVATE, false)?;
    Ok(tree)
}

/// A detached copy of a mount with `path` as its root, out of which no way leads.
pub(crate) fn clone_tree(
    directory: BorrowedFd<'_>,
    path: &Path,
    more: OpenTreeFlags,
) -> rustix::io::Result<OwnedFd> {
    // Behind a trailing slash the kernel would follow a link.
    let path: PathBuf = path.components().collect();
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW
        | more;
    open_tree(directory, path, flags)
}

fn find_device(path: &Path, restricted: bool) -> io::Result<FoundDevice> {
    let seen = std::fs::metadata(path)?;
    if !seen.file_type().is_block_device() {
        return Err(Errno::NOTBLK.into());
    }
    if !restricted {
        return Ok(FoundDevice::Number(seen.rdev()));
    }
    let bound = clone_tree(CWD, &std::fs::canonicalize(path)?, OpenTreeFlags::empty())?;
    mount_setattr(bound.as_fd(), 0, 0, libc::MS_PRIVATE, false)?;
    Ok(FoundDevice::Bound(bound))
}

/// The tmpfs that takes what is written, and the overlay with it over the host's root.
fn overlay(owner: Option<Owner<'_>>) -> Result<(OwnedFd, Root)> {
    let make = || -> rustix::io::Result<_> {
        let scratch = new_filesystem("tmpfs", &[("size", SCRATCH_SIZE), ("mode", "0755")], 0)?;
        for (name, mode) in SCRATCH_DIRECTORIES {
            rustix::fs::mkdirat(&scratch, name, Mode::from_raw_mode(mode))?;
        }
        // The overlay's layers must be in our mount namespace, and are named from here.
        let lower = owner.map(|owner| mapped_root(&scratch, owner)).transpose()?;
        attach_at(&scratch, CWD, "/")?;
        rustix::process::fchdir(&scratch)?;
        if let Some(lower) = &lower {
            attach_at(lower, scratch.as_fd(), "lower")?;
        }
        let lower = if lower.is_some() { "lower" } else { "/" };
        let layers = [("source", "overlay"), ("lowerdir", lower), ("upperdir", "upper"), ("workdir", "work")];
        let root = new_filesystem("overlay", &layers, 0)?;
        attach_at(&root, scratch.as_fd(), "root")?;
        let owner = owner.map(|owner| owner.root());
        Ok((scratch, Root { directory: root, owner, overlays: Vec::new() }))
    };
    make().map_err(|errno| Error::new("lay an overlay over the host's root", errno))
}

/// The host's root with the ids of a user namespace, and the upper layer over it with the same owner.
fn mapped_root(scratch: &OwnedFd, owner: Owner<'_>) -> rustix::io::Result<OwnedFd> {
    let lower = clone_tree(CWD, Path::new("/"), OpenTreeFlags::empty())?;
    mount_setattr(lower.as_fd(), 0, 0, libc::MS_PRIVATE, false)?;
    map_ids(lower.as_fd(), owner.namespace, false)?;
    rustix::fs::mkdirat(scratch, "lower", Mode::from_raw_mode(0o755))?;
    let (user, group) = owner.root();
    rustix::fs::chownat(scratch, "upper", Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(lower)
}

fn new_filesystem(kind: &str, options: &[(&str, &str)], attributes: u64) -> rustix::io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, *value)?;
    }
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::from_bits_retain(u32::try_from(attributes).unwrap_or(0));
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn attach_at(tree: &OwnedFd, directory: BorrowedFd<'_>, path: &str) -> rustix::io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    move_mount(tree, "", directory, path, flags)
}

/// Makes an attached mount the root of the mount namespace, and takes away the `old` mounts that were the root before.
fn switch_to(root: &OwnedFd, old: usize) -> rustix::io::Result<()> {
    rustix::process::fchdir(root)?;
    // The old root lands on top of the new one, from where it is taken off: no directory is needed for it.
    rustix::process::pivot_root(".", ".")?;
    for _ in 0..old {
        rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    }
    rustix::process::chdir("/")
}

/// The root directory of the container while its files and mounts are added.
struct Root {
    directory: OwnedFd,
    /// Whose the files are that are made in it, where that is not us.
    owner: Option<(Uid, Gid)>,
    /// The mounts in it that show directories of the host, where it is not one overlay itself.
    overlays: Vec<OwnedFd>,
}

impl Root {
    fn open(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::openat2(&self.directory, path, flags | OFlags::CLOEXEC, Mode::empty(), IN_ROOT)
    }

    fn ensure_dir(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match (self.open(path, flags), path.parent(), path.file_name()) {
            (Err(Errno::NOENT), Some(parent), Some(name)) => {
                let parent = self.ensure_dir(parent)?;
                match self.make(|| rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755))) {
                    Ok(()) | Err(Errno::EXIST) => self.open(path, flags),
                    Err(errno) => Err(errno),
                }
            }
            (opened, ..) => opened,
        }
    }

    /// Makes a file as its owner. In what shows the ids of a user namespace nobody else can.
    fn make<T>(&self, make: impl FnOnce() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        match self.owner {
            Some((user, group)) => sys::making_files_of(user, group, make),
            None => make(),
        }
    }

    fn ensure_file(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        match (self.open(path, OFlags::PATH), path.parent(), path.file_name()) {
            (Err(Errno::NOENT), Some(parent), Some(name)) => {
                let parent = self.ensure_dir(parent)?;
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                self.make(|| rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o644)))?;
                self.open(path, OFlags::PATH)
            }
            (opened, ..) => opened,
        }
    }

    /// Puts a detached mount at `target`, which is made when it is missing.
    fn attach(&self, tree: &OwnedFd, target: &Path) -> Result<()> {
        let attach = || -> rustix::io::Result<()> {
            let is_dir = FileType::from_raw_mode(rustix::fs::fstat(tree)?.st_mode) == FileType::Directory;
            let place = if is_dir { self.ensure_dir(target) } else { self.ensure_file(target) }?;
            attach_at(tree, place.as_fd(), "")
        };
        attach().doing("mount in the container at", target)
    }

    /// Covers a directory by a new one, in which there are only the directories that lead to what is `shown` in it.
    fn hide<'a>(
        &self,
        path: &Path,
        shown: impl Iterator<Item = &'a Path>,
        cover: &str,
        scratch: &OwnedFd,
    ) -> Result<()> {
        let hide = || -> rustix::io::Result<()> {
            let place = match self.open(path, OFlags::PATH | OFlags::DIRECTORY) {
                Err(Errno::NOENT) => return Ok(()),
                opened => opened?,
            };
            rustix::fs::mkdirat(scratch, cover, Mode::from_raw_mode(0o555))?;
            for shown in shown {
                let mut made = PathBuf::from(cover);
                for part in shown.components() {
                    made.push(part);
                    match rustix::fs::mkdirat(scratch, &made, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno),
                    }
                }
            }
            let cover = clone_tree(scratch.as_fd(), Path::new(cover), OpenTreeFlags::empty())?;
            mount_setattr(cover.as_fd(), READ_ONLY, 0, 0, false)?;
            attach_at(&cover, place.as_fd(), "")
        };
        hide().doing("hide in the container", path)
    }

    fn add_kernel_filesystems(
        &self,
        scratch: &OwnedFd,
        sysfs: Option<&OwnedFd>,
        host_devices: &[HostDevice],
        owner: Option<Owner<'_>>,
        restricted: bool,
    ) -> Result<()> {
        let make = |errno| Error::new("mount a kernel filesystem for the container", errno);
        let proc = match new_filesystem("proc", &[], HARMLESS | libc::MOUNT_ATTR_NODEV) {
            // Where the machine hides parts of its own, as in a container, only that one is to be had.
            Err(Errno::PERM) if restricted => {
                clone_tree(CWD, Path::new("/proc"), OpenTreeFlags::AT_RECURSIVE)
            }
            mounted => mounted,
        };
        let proc = proc.map_err(make)?;
        self.attach(&proc, Path::new("/proc"))?;
        if let Some(sysfs) = sysfs {
            self.attach(sysfs, Path::new("/sys"))?;
        }
        let dev = clone_tree(scratch.as_fd(), Path::new("dev"), OpenTreeFlags::empty()).map_err(make)?;
        mount_setattr(dev.as_fd(), HARMLESS, 0, 0, false).map_err(make)?;
        let devices = |errno| Error::new("make the device files of the container", errno);
        fill_dev(&dev, host_devices, restricted).map_err(devices)?;
        if let Some(owner) = owner {
            map_ids(dev.as_fd(), owner.namespace, false).map_err(devices)?;
        }
        self.attach(&dev, Path::new("/dev"))?;
        if restricted {
            let of_host =
                host_devices.iter().filter(|device| matches!(device.kind, HostDeviceKind::Node { .. }));
            let names = restricted::common_devices().chain(of_host.map(|device| device.path.as_path()));
            names.into_iter().try_for_each(|name| self.bind_device(name)).map_err(devices)?;
        }
        let group = owner.and_then(|owner| owner.range.outside(TERMINALS)).unwrap_or(TERMINALS).to_string();
        let mut terminals = vec![("ptmxmode", "0666"), ("mode", "0620")];
        if !restricted || Ids::read().has_group(TERMINALS) {
            terminals.push(("gid", &group));
        }
        let pts = new_filesystem("devpts", &terminals, HARMLESS).map_err(make)?;
        self.attach(&pts, Path::new("/dev/pts"))
    }

    /// Empties what shows the whole machine, and makes read-only what changes it.
    fn mask_kernel_files(&self, scratch: &OwnedFd) -> Result<()> {
        for path in MASKED.map(Path::new) {
            let mask = || -> rustix::io::Result<()> {
                let found = match self.open(path, OFlags::PATH) {
                    Err(Errno::NOENT) => return Ok(()),
                    opened => opened?,
                };
                let is_dir =
                    FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) == FileType::Directory;
                let cover = if is_dir { "empty" } else { "dev/null" };
                let cover = clone_tree(scratch.as_fd(), Path::new(cover), OpenTreeFlags::empty())?;
                // Without device nodes it is an empty file.
                if is_dir || is_restricted() {
                    mount_setattr(cover.as_fd(), READ_ONLY, 0, 0, false)?;
                }
                attach_at(&cover, found.as_fd(), "")
            };
            mask().doing("mask in the container", path)?;
        }
        for path in READABLE.map(Path::new) {
            let protect = || -> rustix::io::Result<()> {
                let found = match self.open(path, OFlags::PATH) {
                    Err(Errno::NOENT) => return Ok(()),
                    opened => opened?,
                };
                let whole = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
                let copy = clone_tree(found.as_fd(), Path::new(""), whole)?;
                mount_setattr(copy.as_fd(), READ_ONLY, 0, 0, true)?;
                attach_at(&copy, found.as_fd(), "")
            };
            protect().doing("make read-only in the container", path)?;
        }
        Ok(())
    }

    fn add_device(&self, device: &Device, number: u64, scratch: &OwnedFd) -> Result<()> {
        let target = &device.target;
        let mode = if device.read_only { 0o440 } else { 0o660 };
        let add = || -> io::Result<()> {
            let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
                return Err(Errno::INVAL.into());
            };
            let parent = self.ensure_dir(parent)?;
            let on = rustix::fs::fstat(&parent)?.st_dev;
            if on != rustix::fs::fstat(&self.directory)?.st_dev && on != rustix::fs::fstat(scratch)?.st_dev {
                return self.find_device(target, number);
            }
            match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
            let mode = Mode::from_raw_mode(mode);
            Ok(rustix::fs::mknodat(&parent, name, FileType::BlockDevice, mode, number)?)
        };
        add().doing("make in the container the device", target)
    }

    /// Takes a device as a volume has it; nothing is made or replaced there, as it would be the host's.
    fn find_device(&self, target: &Path, number: u64) -> io::Result<()> {
        let found = self.open(target, OFlags::PATH).and_then(rustix::fs::fstat);
        match found {
            Ok(found)
                if FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice
                    && found.st_rdev == number =>
            {
                Ok(())
            }
            _ => Err(io::Error::other("it lies in a volume; choose a devicePath that does not")),
        }
    }

    /// The hostname, and the resolver's configuration where the host keeps it on a filesystem of its own.
    fn write_host_files(&self, spec: &ContainerSpec, resolv_conf: Option<&[u8]>) -> Result<()> {
        let write = |name: &str, content: &[u8]| -> io::Result<()> {
            let etc = self.ensure_dir(Path::new("/etc"))?;
            match rustix::fs::unlinkat(&etc, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = self.make(|| rustix::fs::openat(&etc, name, flags, Mode::from_raw_mode(0o644)))?;
            std::fs::File::from(file).write_all(content)
        };
        write("hostname", format!("{}\n", spec.hostname).as_bytes()).doing("write", "/etc/hostname")?;
        match (resolv_conf, self.open(Path::new("/etc/resolv.conf"), OFlags::PATH)) {
            (Some(content), Err(Errno::NOENT)) => {
                write("resolv.conf", content).doing("write", "/etc/resolv.conf")
            }
            _ => Ok(()),
        }
    }
}

/// The host's `/sys`, of which a container changes nothing unless it may use the devices of the host.
fn clone_sysfs(writable: bool, restricted: bool) -> rustix::io::Result<OwnedFd> {
    // What the machine has mounted below it cannot be left out then.
    let more = if restricted { OpenTreeFlags::AT_RECURSIVE } else { OpenTreeFlags::empty() };
    let sysfs = clone_tree(CWD, Path::new("/sys"), more)?;
    let attributes = HARMLESS | libc::MOUNT_ATTR_NODEV | if writable { 0 } else { READ_ONLY };
    mount_setattr(sysfs.as_fd(), attributes, 0, libc::MS_PRIVATE, restricted)?;
    Ok(sysfs)
}

/// Lists what lies below a directory of the host's `/dev`, on the same filesystem.
fn list_devices(below: &Path, found: &mut Vec<HostDevice>) -> io::Result<()> {
    let directory = Path::new("/dev").join(below);
    let filesystem = std::fs::metadata(&directory)?.dev();
    for entry in std::fs::read_dir(&directory)? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if OWN_DEVICES.iter().any(|own| Path::new(own) == path) {
            continue;
        }
        // Devices come and go; what is gone meanwhile is not there.
        let Ok(metadata) = entry.metadata() else { continue };
        let kind = metadata.file_type();
        if kind.is_dir() {
            if metadata.dev() == filesystem {
                found.push(HostDevice { path: path.clone(), kind: HostDeviceKind::Directory });
                list_devices(&path, found)?;
            }
        } else if kind.is_symlink() {
            if let Ok(target) = std::fs::read_link(entry.path()) {
                found.push(HostDevice { path, kind: HostDeviceKind::Link(target) });
            }
        } else if kind.is_block_device() || kind.is_char_device() {
            let (mode, user, group) = (metadata.mode(), metadata.uid(), metadata.gid());
            let kind = HostDeviceKind::Node { mode, user, group, number: metadata.rdev() };
            found.push(HostDevice { path, kind });
        }
    }
    Ok(())
}

/// Fills a new `/dev`; a `restricted` process makes no devices, and has files where those of the host are bound.
fn fill_dev(dev: &OwnedFd, host_devices: &[HostDevice], restricted: bool) -> rustix::io::Result<()> {
    // Modes are meant as they are written, whatever the caller's umask.
    let umask = rustix::process::umask(Mode::empty());
    let add = |path: &Path, kind: FileType, mode: u32, number: u64| {
        let (kind, number) = if restricted { (FileType::RegularFile, 0) } else { (kind, number) };
        rustix::fs::mknodat(dev, path, kind, Mode::from_raw_mode(mode), number)
    };
    let numbers = MEMORY_DEVICES.map(|(name, minor)| (name, rustix::fs::makedev(1, minor)));
    for (name, number) in numbers.into_iter().chain([("tty", rustix::fs::makedev(5, 0))]) {
        add(Path::new(name), FileType::CharacterDevice, 0o666, number)?;
    }
    for (name, target) in LINKS {
        rustix::fs::symlinkat(target, dev, name)?;
    }
    rustix::fs::mkdirat(dev, "pts", Mode::from_raw_mode(0o755))?;
    rustix::fs::mkdirat(dev, "shm", Mode::from_raw_mode(0o1777))?;
    for HostDevice { path, kind } in host_devices {
        let made = match kind {
            HostDeviceKind::Directory => rustix::fs::mkdirat(dev, path, Mode::from_raw_mode(0o755)),
            HostDeviceKind::Link(target) => rustix::fs::symlinkat(target, dev, path),
            HostDeviceKind::Node { mode, user, group, number } => {
                add(path, FileType::from_raw_mode(*mode), *mode & 0o7777, *number).and_then(|()| {
                    let owner = (Some(Uid::from_raw(*user)), Some(Gid::from_raw(*group)));
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    if restricted { Ok(()) } else { rustix::fs::chownat(dev, path, owner.0, owner.1, flags) }
                })
            }
        };
        match made {
            // Every container has it already.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    rustix::process::umask(umask);
    Ok(())
}
