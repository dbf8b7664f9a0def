//! The files of a container where its host process is no root of the machine, but only of a user namespace.
//!
//! There the kernel refuses much of what [`super`] does with root: an overlay over a directory that something of the machine
//! is mounted below, `/` for one; device nodes; a copy of a mount without what is mounted below it. So the root of the
//! container is a directory in memory, with one overlay for each directory of the host's `/`, or below that where something
//! is mounted; devices are those of the host, each bound by itself. As with root, what is mounted on the host is not shown.
//!
//! Files of users who do not exist in the namespace, root's for one, can be read and not changed. New files are possible in
//! the directories whose upper layer is made here beforehand: those of `/`, a few below `/var` and `/usr`, and those
//! that lead to what is mounted in the container.

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, AtFlags, CWD, Mode, OFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    },
};

use super::{
    MEMORY_DEVICES, READ_ONLY, Root, SCRATCH_DIRECTORIES, SCRATCH_SIZE, attach_at, clone_tree, new_filesystem,
};
use crate::{ContainerSpec, sys};
use berth_host::{Error, Result, mount::mount_setattr};

/// What every container has of its own.
const KERNEL_DIRECTORIES: [&str; 3] = ["proc", "sys", "dev"];
/// A file that every container has of its own.
const OWN_FILE: &str = "etc/hostname";
/// Directories besides those of `/` in which containers may make files.
const WRITABLE: [&str; 8] = [
    "/usr/local",
    "/usr/local/bin",
    "/usr/local/lib",
    "/var/cache",
    "/var/lib",
    "/var/log",
    "/var/spool",
    "/var/tmp",
];

/// Makes a mount namespace of this process without the mounts that were made in this user namespace, which would outlive
/// their end here. Those of the machine cannot be removed.
pub(super) fn leave_host_mounts() -> rustix::io::Result<()> {
    let mounted = berth_host::mount::mounts().unwrap_or_default();
    sys::leave_mount_namespace()?;
    let private = rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    for mount in mounted.iter().rev().filter(|mount| mount.target != Path::new("/")) {
        // One of the machine, or below one that is gone already.
        let _ = rustix::mount::unmount(&mount.target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
    Ok(())
}

/// The tmpfs that takes what is written, and the root of the container in it.
pub(super) fn assemble(spec: &ContainerSpec) -> Result<(OwnedFd, Root)> {
    let make = |errno: Errno| Error::new("make a root filesystem in memory", errno);
    let scratch = new_filesystem("tmpfs", &[("size", SCRATCH_SIZE), ("mode", "0755")], 0).map_err(make)?;
    let umask = rustix::process::umask(Mode::empty());
    let assembled = Assembly::begin(&scratch).map_err(make).and_then(|mut assembly| {
        assembly.writable = writable(spec);
        assembly.mounted = berth_host::mount::mounts()?.into_iter().map(|mount| mount.target).collect();
        assembly.add(Path::new(""))?;
        Ok(assembly.root)
    });
    rustix::process::umask(umask);
    assembled.map(|root| (scratch, root))
}

/// The directories, without links in their names, in which files are to be made.
fn writable(spec: &ContainerSpec) -> Vec<PathBuf> {
    let volumes = spec.mounts.iter().map(|mount| &mount.target);
    let devices = spec.devices.iter().map(|device| &device.target);
    let parents =
        volumes.chain(devices).chain(&spec.termination_message_path).filter_map(|path| path.parent());
    let all = parents.chain(spec.working_dir.as_deref()).chain(WRITABLE.map(Path::new));
    all.map(without_links).collect()
}

/// A path of the host with the links in it resolved, as far as it exists.
fn without_links(path: &Path) -> PathBuf {
    let exists = path.ancestors().find_map(|part| Some((part, std::fs::canonicalize(part).ok()?)));
    match exists {
        Some((part, resolved)) => resolved.join(path.strip_prefix(part).unwrap_or(Path::new(""))),
        None => path.to_owned(),
    }
}

/// A root that is being put together.
struct Assembly<'a> {
    scratch: &'a OwnedFd,
    root: Root,
    writable: Vec<PathBuf>,
    /// Where something is mounted on the host.
    mounted: Vec<PathBuf>,
    /// How many overlays there are.
    layers: u32,
}

impl<'a> Assembly<'a> {
    fn begin(scratch: &'a OwnedFd) -> rustix::io::Result<Self> {
        for (name, mode) in SCRATCH_DIRECTORIES {
            rustix::fs::mkdirat(scratch, name, Mode::from_raw_mode(mode))?;
        }
        // The overlays' layers must be in our mount namespace, and are named from here.
        attach_at(scratch, CWD, "/")?;
        rustix::process::fchdir(scratch)?;
        let root = clone_tree(scratch.as_fd(), Path::new("root"), OpenTreeFlags::empty())?;
        attach_at(&root, scratch.as_fd(), "root")?;
        Ok(Self {
            scratch,
            root: Root { directory: root, owner: None, overlays: Vec::new() },
            writable: Vec::new(),
            mounted: Vec::new(),
            layers: 0,
        })
    }

    /// Shows what is in a directory of the host, given relative to `/`, each entry by itself.
    fn add(&mut self, directory: &Path) -> Result<()> {
        let failed = |error| Error::new(format!("list /{}", directory.display()), error);
        let entries = std::fs::read_dir(Path::new("/").join(directory)).map_err(failed)?;
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let path = directory.join(entry.file_name());
            // What is gone meanwhile is not there.
            let Ok(metadata) = entry.metadata() else { continue };
            let shown = if metadata.is_symlink() {
                self.add_link(&path)
            } else if metadata.is_dir() {
                let is_own = KERNEL_DIRECTORIES.iter().any(|own| Path::new(own) == path);
                if is_own { Ok(()) } else { self.add_directory(&path, metadata.mode()) }
            } else if metadata.is_file() && path != Path::new(OWN_FILE) {
                self.add_file(&path)
            } else {
                Ok(())
            };
            match shown {
                // It is gone meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                shown => shown,
            }
            .map_err(|error| Error::new(format!("show /{} in a container", path.display()), error))?;
        }
        Ok(())
    }

    fn add_link(&self, path: &Path) -> io::Result<()> {
        let target = std::fs::read_link(Path::new("/").join(path))?;
        Ok(rustix::fs::symlinkat(target, &self.root.directory, path)?)
    }

    fn add_file(&self, path: &Path) -> io::Result<()> {
        let host = Path::new("/").join(path);
        let file = clone_tree(CWD, &host, OpenTreeFlags::empty())?;
        mount_setattr(file.as_fd(), READ_ONLY, 0, libc::MS_PRIVATE, false)?;
        let place = self.root.ensure_file(&host)?;
        Ok(attach_at(&file, place.as_fd(), "")?)
    }

    fn add_directory(&mut self, path: &Path, mode: u32) -> io::Result<()> {
        let host = Path::new("/").join(path);
        rustix::fs::mkdirat(&self.root.directory, path, Mode::from_raw_mode(mode & 0o1777))?;
        let readable = rustix::fs::accessat(CWD, &host, Access::READ_OK | Access::EXEC_OK, AtFlags::EACCESS);
        if self.mounted.contains(&host) || readable.is_err() {
            return Ok(());
        }
        if self.mounted.iter().any(|mounted| mounted.starts_with(&host)) {
            return self.add(path).map_err(|error| io::Error::other(error.sentence()));
        }
        let upper = Path::new("upper").join(path);
        self.make_upper(&host, &upper, mode)?;
        let overlay = self.overlay(&host, &upper)?;
        let place = self.root.open(path, OFlags::PATH | OFlags::DIRECTORY)?;
        attach_at(&overlay, place.as_fd(), "")?;
        self.root.overlays.push(overlay);
        Ok(())
    }

    /// Makes the upper layer of an overlay over `host`, with the directories in it that can be written.
    fn make_upper(&self, host: &Path, upper: &Path, mode: u32) -> rustix::io::Result<()> {
        let make = |path: &Path, mode: u32| match rustix::fs::mkdirat(
            self.scratch,
            path,
            Mode::from_raw_mode(mode & 0o1777),
        ) {
            Err(Errno::EXIST) => Ok(()),
            outcome => outcome,
        };
        let mut around = PathBuf::new();
        for part in upper.components() {
            around.push(part);
            make(&around, if around == upper { mode } else { 0o755 })?;
        }
        for writable in self.writable.iter().filter_map(|writable| writable.strip_prefix(host).ok()) {
            let mut path = PathBuf::new();
            for part in writable.components() {
                path.push(part);
                match std::fs::symlink_metadata(host.join(&path)) {
                    Ok(found) if found.is_dir() => make(&upper.join(&path), found.mode())?,
                    _ => break,
                }
            }
        }
        Ok(())
    }

    fn overlay(&mut self, host: &Path, upper: &Path) -> rustix::io::Result<OwnedFd> {
        self.layers += 1;
        let work = Path::new("work").join(self.layers.to_string());
        rustix::fs::mkdirat(self.scratch, &work, Mode::from_raw_mode(0o700))?;
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", "overlay")?;
        fsconfig_set_flag(&context, "userxattr")?;
        fsconfig_set_string(&context, "lowerdir", escaped(host))?;
        fsconfig_set_string(&context, "upperdir", upper)?;
        fsconfig_set_string(&context, "workdir", work)?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    }
}

/// A path as overlay wants the lower layer, where a colon separates layers.
fn escaped(path: &Path) -> std::ffi::OsString {
    use std::os::unix::ffi::OsStringExt as _;
    let escape = |byte: &u8| match byte {
        b':' | b'\\' => vec![b'\\', *byte],
        other => vec![*other],
    };
    std::ffi::OsString::from_vec(path.as_os_str().as_bytes().iter().flat_map(escape).collect())
}

impl Root {
    /// Shows a device of the host at the same path; one that the host does not have is not there either.
    pub(super) fn bind_device(&self, name: &Path) -> rustix::io::Result<()> {
        let path = Path::new("/dev").join(name);
        let device = match clone_tree(CWD, &path, OpenTreeFlags::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            cloned => cloned?,
        };
        mount_setattr(device.as_fd(), 0, 0, libc::MS_PRIVATE, false)?;
        let place = self.ensure_file(&path)?;
        attach_at(&device, place.as_fd(), "")
    }
}

/// The devices that every container has.
pub(super) fn common_devices<'a>() -> impl Iterator<Item = &'a Path> {
    MEMORY_DEVICES.iter().map(|(name, _)| *name).chain(["tty"]).map(|name| Path::new(OsStr::new(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_the_same_place_without_links() {
        let directory = tempfile::tempdir().unwrap();
        let top = std::fs::canonicalize(directory.path()).unwrap();
        std::fs::create_dir(top.join("run")).unwrap();
        std::os::unix::fs::symlink("run", top.join("link")).unwrap();
        assert_eq!(without_links(&top.join("link/a/b")), top.join("run/a/b"));
        assert_eq!(without_links(&top.join("none/a")), top.join("none/a"));
        assert_eq!(without_links(Path::new("/")), Path::new("/"));
    }

    #[test]
    fn a_colon_in_a_path_separates_no_layers() {
        assert_eq!(escaped(Path::new("/a:b\\c")), OsStr::new("/a\\:b\\\\c"));
    }
}
