//! The mounts of a container, made ready on the host: the interface has no word for a directory below a volume that must not be
//! left, for `nosuid` and `nodev`, or, in older runtimes, for all that is mounted below a mount.
//!
//! Each is a copy of the volume's mount in the container's directory, with those attributes. The runtime binds it into the
//! container, which inherits them. When the container runs it has mounts of its own, and the copies are taken away: as long as
//! they are there, whatever is mounted below the volume stays in use on this side, too. Those of a start that was broken off are
//! taken away with the container's directory, be it by the next process.
//!
//! All of them lie below a mount that no copy of a tree takes along (`set_apart`). A container that has the machine's `/` as a
//! volume would otherwise have the copies of every other such container in its own, and their number would double with each.

use std::{
    fs,
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::Path,
};

use berth_host::{
    Doing as _, Result,
    mount::{Attributes, bind, is_mount_point, mount_setattr, mounts, unmount_lazily},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags},
    mount::{MoveMountFlags, move_mount},
};

use super::v1;
use crate::{ContainerSpec, Propagation, TERMINATION_FILE, blocking, root::clone_volume};

/// Where the copies are, in a container's directory.
const MOUNTS: &str = "mounts";

/// Mounts the directory of all containers on itself, so that what is mounted below it is left out wherever `/` is bound.
pub(super) fn set_apart(containers: &Path) -> Result<()> {
    // Copies that were made before would be hidden by it; they go with their containers.
    if is_mount_point(containers)? || mounts()?.iter().any(|mount| mount.target.starts_with(containers)) {
        return Ok(());
    }
    bind(containers, containers, Attributes::default())?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mounted = rustix::fs::open(containers, flags, Mode::empty()).doing("open", containers)?;
    mount_setattr(mounted.as_fd(), 0, 0, libc::MS_UNBINDABLE, false).doing("set apart", containers)
}

/// Makes the mounts of a container ready in its directory, which is there.
pub(super) fn make(directory: &Path, spec: &ContainerSpec) -> Result<Vec<v1::Mount>> {
    let place = directory.join(MOUNTS);
    fs::create_dir(&place).doing("make", &place)?;
    let mut made = Vec::new();
    for (number, mount) in spec.mounts.iter().enumerate() {
        let source = match &mount.sub_path {
            Some(below) => mount.source.join(below),
            None => mount.source.clone(),
        };
        let tree = clone_volume(mount).doing("bind", &source)?;
        if mount.propagation == Propagation::HostToContainer {
            // The runtime passes on later mounts only from a mount that is shared; this one still only receives those of the volume.
            mount_setattr(tree.as_fd(), 0, 0, libc::MS_SHARED, true).doing("share", &source)?;
        }
        let target = place.join(number.to_string());
        let seen = rustix::fs::fstat(&tree).doing("look at", &source)?;
        if FileType::from_raw_mode(seen.st_mode) == FileType::Directory {
            fs::create_dir(&target).doing("make", &target)?;
        } else {
            fs::File::create_new(&target).doing("make", &target)?;
        }
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&tree, "", CWD, &target, flags).doing("mount at", &target)?;
        made.push(v1::Mount {
            container_path: mount.target.to_string_lossy().into_owned(),
            host_path: target.to_string_lossy().into_owned(),
            readonly: mount.read_only,
            propagation: match mount.propagation {
                Propagation::None => v1::MountPropagation::PropagationPrivate,
                Propagation::HostToContainer => v1::MountPropagation::PropagationHostToContainer,
                Propagation::Bidirectional => v1::MountPropagation::PropagationBidirectional,
            }
            .into(),
            ..v1::Mount::default()
        });
    }
    if let Some(path) = &spec.termination_message_path {
        let file = directory.join(TERMINATION_FILE);
        let opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o666).open(&file);
        let opened = opened.doing("make", &file)?;
        // Whatever the umask says: the container may run as any user.
        rustix::fs::fchmod(&opened, Mode::from_raw_mode(0o666)).doing("open to all", &file)?;
        made.push(v1::Mount {
            container_path: path.to_string_lossy().into_owned(),
            host_path: file.to_string_lossy().into_owned(),
            ..v1::Mount::default()
        });
    }
    Ok(made)
}

/// Takes away what was made ready for a container that has been started.
pub(super) async fn release(directory: &Path) {
    let directory = directory.to_owned();
    if let Err(error) = blocking(move || take_away(&directory)).await {
        tracing::warn!(error = error.sentence(), "a mount that was made ready for a container is left");
    }
}

/// Takes away what was made ready for a container; what it has itself, and what is mounted in its volumes, stays.
pub(super) fn take_away(directory: &Path) -> Result<()> {
    let place = directory.join(MOUNTS);
    let Ok(entries) = fs::read_dir(&place) else { return Ok(()) };
    for entry in entries.flatten() {
        let path = entry.path();
        if is_mount_point(&path)? {
            // Otherwise what goes here would also go from the container, and from the volume that this is a copy of. Who receives
            // mounts by this copy receives them from the volume then.
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mounted = rustix::fs::open(&path, flags, Mode::empty()).doing("open", &path)?;
            mount_setattr(mounted.as_fd(), 0, 0, libc::MS_PRIVATE, true).doing("set apart", &path)?;
        }
        unmount_lazily(&path)?;
    }
    Ok(())
}
