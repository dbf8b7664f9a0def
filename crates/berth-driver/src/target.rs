//! The `target_path` of NodePublishVolume, where a volume appears for a workload: made, bound, and removed again.
//!
//! Nothing is removed but an empty directory or an empty file, and nothing is changed where something unexpected is
//! found: a target is chosen by the caller, and what lies there may be somebody's data.

use std::{
    fs::{self, DirBuilder, FileType, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

use berth_core::{Access, AccessKind, VolumeCapability};
use berth_host::{
    mount::{self, Attributes},
    ownership,
    path::Dir,
};

use crate::{Error, Result, Source, TargetMounts};

/// As what a volume is published at its target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Publication<'a> {
    /// As what, and with which mount options.
    pub(crate) capability: &'a VolumeCapability,
    /// Whether writes are refused.
    pub(crate) read_only: bool,
}

impl Publication<'_> {
    fn attributes(self) -> Attributes {
        let wanted = match &self.capability.access {
            // The filesystem read its own options when it was mounted; a bind takes only those of a mount.
            Access::Mount { flags, .. } => mount::parse_options(flags).attributes,
            Access::Block => Attributes::default(),
        };
        Attributes { read_only: self.read_only, ..wanted }
    }
}

/// Refuses a target at which a volume cannot be put; changes nothing.
pub(crate) fn check(mounts: &dyn TargetMounts, target: &Path, kind: AccessKind) -> Result<()> {
    // Before anything else, because what is mounted there may not answer.
    if mounts.is_mounted(target)? {
        return Err(in_the_way(target, "something else is mounted there"));
    }
    let Some(found) = file_type_at(target)? else { return Ok(()) };
    match kind {
        AccessKind::Mount if !found.is_dir() => Err(in_the_way(target, "it is not a directory")),
        AccessKind::Mount if !is_empty_directory(target)? => {
            Err(in_the_way(target, "the directory is not empty"))
        }
        AccessKind::Block if !found.is_file() => Err(in_the_way(target, "it is not a regular file")),
        AccessKind::Block if !is_empty_file(target)? => Err(in_the_way(target, "the file is not empty")),
        AccessKind::Mount | AccessKind::Block => Ok(()),
    }
}

/// Makes `source` appear at a target that [`check`] did not refuse.
pub(crate) fn bind(
    mounts: &dyn TargetMounts,
    source: &Source,
    target: &Path,
    publication: Publication<'_>,
) -> Result<()> {
    make(target, publication.capability.access.kind())?;
    if let Access::Mount { group: Some(gid), .. } = publication.capability.access
        && !publication.read_only
    {
        ownership::give_to_group(&source.open()?, gid)?;
    }
    mounts.bind(source, target, publication.attributes())
}

/// Takes away whatever is mounted at the target, and the empty directory or file below it.
pub(crate) fn remove(mounts: &dyn TargetMounts, target: &Path) -> Result<()> {
    mounts.unmount(target)?;
    let Some(found) = file_type_at(target)? else { return Ok(()) };
    let removed = if found.is_dir() {
        fs::remove_dir(target)
    } else if found.is_file() && is_empty_file(target)? {
        fs::remove_file(target)
    } else {
        return Err(in_the_way(target, "it is not an empty file though nothing is mounted there"));
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            Err(in_the_way(target, "the directory is not empty though nothing is mounted there"))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(host("remove", target, error)),
        _ => Ok(()),
    }
}

fn make(target: &Path, kind: AccessKind) -> Result<()> {
    if let Some(parent) = target.parent() {
        Dir::ensure(parent, 0o750)?;
    }
    let made = match kind {
        AccessKind::Mount => DirBuilder::new().mode(0o750).create(target),
        AccessKind::Block => {
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(target).map(drop)
        }
    };
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(host("make the target", target, error))
        }
        _ => Ok(()),
    }
}

/// What is at the target, unless it is a symbolic link, which is never taken for what it leads to.
fn file_type_at(target: &Path) -> Result<Option<FileType>> {
    match fs::symlink_metadata(target) {
        Ok(found) if found.is_symlink() => Err(in_the_way(target, "it is a symbolic link")),
        Ok(found) => Ok(Some(found.file_type())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(host("look at the target", target, error)),
    }
}

fn is_empty_directory(path: &Path) -> Result<bool> {
    let mut entries = fs::read_dir(path).map_err(|error| host("list the target", path, error))?;
    Ok(entries.next().is_none())
}

fn is_empty_file(path: &Path) -> Result<bool> {
    let found = fs::symlink_metadata(path).map_err(|error| host("look at the target", path, error))?;
    Ok(found.len() == 0)
}

fn in_the_way(target: &Path, why: &str) -> Error {
    Error::Precondition(format!("the target {} cannot be used: {why}", target.display()))
}

fn host(doing: &str, path: &Path, error: io::Error) -> Error {
    berth_host::Error::new(format!("{doing} {}", path.display()), error).into()
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::{FileTypeExt as _, MetadataExt as _, symlink},
        path::PathBuf,
    };

    use berth_core::AccessMode;

    use crate::MachineMounts;

    use super::*;

    /// A directory whose mounts go away with it.
    struct MountedDir(tempfile::TempDir);

    impl MountedDir {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn volume(&self) -> PathBuf {
            let path = self.path("volume");
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("data"), "kept").unwrap();
            path
        }
    }

    impl Drop for MountedDir {
        fn drop(&mut self) {
            let mut targets: Vec<_> =
                mount::mounts().unwrap().into_iter().map(|mount| mount.target).collect();
            targets.retain(|target| target.starts_with(self.0.path()));
            for target in targets.iter().rev() {
                let _ = mount::unmount_lazily(target);
            }
        }
    }

    fn mounted(flags: &[&str], group: Option<u32>) -> VolumeCapability {
        let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
        let access = Access::Mount { fs_type: String::new(), flags, group };
        VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
    }

    const BLOCK: VolumeCapability =
        VolumeCapability { access: Access::Block, mode: AccessMode::SingleNodeWriter };

    fn writable(capability: &VolumeCapability) -> Publication<'_> {
        Publication { capability, read_only: false }
    }

    #[test]
    fn a_volume_appears_at_a_target_whose_parents_are_missing_and_leaves_nothing_behind() {
        let dir = MountedDir::new();
        let (volume, target) = (dir.volume(), dir.path("pods/1/volumes/target"));
        check(&MachineMounts, &target, AccessKind::Mount).unwrap();
        bind(&MachineMounts, &Source::directory(&volume), &target, writable(&mounted(&[], None))).unwrap();
        assert!(MachineMounts.is_mounted(&target).unwrap());
        assert_eq!(fs::read_to_string(target.join("data")).unwrap(), "kept");

        remove(&MachineMounts, &target).unwrap();
        assert!(!target.exists());
        assert_eq!(fs::read_to_string(volume.join("data")).unwrap(), "kept");
        remove(&MachineMounts, &target).unwrap();
    }

    #[test]
    fn a_device_appears_at_an_empty_file() {
        let dir = MountedDir::new();
        let target = dir.path("device");
        check(&MachineMounts, &target, AccessKind::Block).unwrap();
        bind(&MachineMounts, &Source::device("/dev/null"), &target, writable(&BLOCK)).unwrap();
        assert!(fs::metadata(&target).unwrap().file_type().is_char_device());
        remove(&MachineMounts, &target).unwrap();
        assert!(!target.exists());
    }

    #[test]
    fn mount_options_and_read_only_reach_the_target_and_those_of_a_filesystem_do_not() {
        let dir = MountedDir::new();
        let (volume, target) = (dir.volume(), dir.path("target"));
        let capability = mounted(&["noexec", "data=ordered,nodev"], None);
        bind(
            &MachineMounts,
            &Source::directory(&volume),
            &target,
            Publication { capability: &capability, read_only: true },
        )
        .unwrap();
        let options = mount::mount_of(&target).unwrap().unwrap().options;
        for option in ["ro", "noexec", "nodev"] {
            assert!(options.split(',').any(|found| found == option), "{option} in {options}");
        }
        assert!(fs::write(target.join("new"), "").is_err());
    }

    #[test]
    fn a_target_with_something_in_it_is_refused_and_stays_as_it_is() {
        let dir = MountedDir::new();
        let full = dir.path("full");
        fs::create_dir(&full).unwrap();
        fs::write(full.join("mine"), "precious").unwrap();
        let (text, link, empty) = (dir.path("text"), dir.path("link"), dir.path("empty"));
        fs::write(&text, "precious").unwrap();
        fs::create_dir(&empty).unwrap();
        symlink(&empty, &link).unwrap();
        for (target, kind, why) in [
            (&full, AccessKind::Mount, "not empty"),
            (&text, AccessKind::Block, "not empty"),
            (&text, AccessKind::Mount, "not a directory"),
            (&empty, AccessKind::Block, "not a regular file"),
            (&link, AccessKind::Mount, "symbolic link"),
        ] {
            let Err(Error::Precondition(sentence)) = check(&MachineMounts, target, kind) else {
                panic!("{target:?} as {kind}")
            };
            assert!(sentence.contains(why), "{sentence}");
        }
        for target in [&full, &text, &link] {
            assert!(matches!(remove(&MachineMounts, target), Err(Error::Precondition(_))), "{target:?}");
        }
        assert_eq!(fs::read_to_string(full.join("mine")).unwrap(), "precious");
        assert_eq!(fs::read_to_string(&text).unwrap(), "precious");
        assert!(link.is_symlink());
    }

    #[test]
    fn a_target_where_something_else_is_mounted_is_refused() {
        let dir = MountedDir::new();
        let (volume, target) = (dir.volume(), dir.path("target"));
        bind(&MachineMounts, &Source::directory(&volume), &target, writable(&mounted(&[], None))).unwrap();
        assert!(matches!(check(&MachineMounts, &target, AccessKind::Mount), Err(Error::Precondition(_))));
    }

    #[test]
    fn what_was_written_below_the_mount_is_never_removed() {
        let dir = MountedDir::new();
        let (volume, target) = (dir.volume(), dir.path("target"));
        fs::create_dir(&target).unwrap();
        fs::write(target.join("below"), "precious").unwrap();
        mount::bind(&volume, &target, Attributes::default()).unwrap();
        assert!(matches!(remove(&MachineMounts, &target), Err(Error::Precondition(_))));
        assert!(!MachineMounts.is_mounted(&target).unwrap());
        assert_eq!(fs::read_to_string(target.join("below")).unwrap(), "precious");
    }

    #[test]
    fn a_group_gets_the_files_unless_they_are_read_only() {
        let dir = MountedDir::new();
        let volume = dir.volume();
        let capability = mounted(&[], Some(7777));
        bind(
            &MachineMounts,
            &Source::directory(&volume),
            &dir.path("reader"),
            Publication { capability: &capability, read_only: true },
        )
        .unwrap();
        assert_eq!(fs::metadata(volume.join("data")).unwrap().gid(), 0);
        bind(&MachineMounts, &Source::directory(&volume), &dir.path("writer"), writable(&capability))
            .unwrap();
        let seen = fs::metadata(dir.path("writer/data")).unwrap();
        assert_eq!((seen.gid(), seen.mode() & 0o060), (7777, 0o060));
    }

    #[test]
    fn a_busy_target_is_an_error_and_stays_bound() {
        let dir = MountedDir::new();
        let (volume, target) = (dir.volume(), dir.path("target"));
        bind(&MachineMounts, &Source::directory(&volume), &target, writable(&mounted(&[], None))).unwrap();
        let held = fs::File::open(target.join("data")).unwrap();
        let Err(Error::Host(error)) = remove(&MachineMounts, &target) else { panic!("a file is open there") };
        assert_eq!(error.errno(), Some(rustix::io::Errno::BUSY.raw_os_error()));
        assert!(MachineMounts.is_mounted(&target).unwrap());
        drop(held);
        remove(&MachineMounts, &target).unwrap();
    }
}
