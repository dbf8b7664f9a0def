//! Gives the files of a volume to a group, as Kubernetes' fsGroup means it.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Statx},
    io::Errno,
};

use crate::{
    error::{Change, Doing as _, Result},
    path::{
        Dir, proc_path,
        walk::{Place, Visitor, file_type, stat_fd, walk},
    },
};

const FOR_FILES: Mode = Mode::RGRP.union(Mode::WGRP);
/// With set-group-ID, what is made in a directory later belongs to the group too.
const FOR_DIRECTORIES: Mode = Mode::RWXG.union(Mode::SGID);

/// Gives `top` and all below it to the group `gid`, which may then read and write it all.
///
/// `top` itself changes last, so that a `top` that belongs to the group says that everything below does; a call that
/// finds it so does nothing. Mount points below are left alone, symbolic links are given away but not followed.
pub fn give_to_group(top: &Dir, gid: u32) -> Result<Change> {
    let stat = stat_fd(top).doing("look at", top.path())?;
    if is_given(&stat, gid, FOR_DIRECTORIES) {
        return Ok(Change::AlreadyTrue);
    }
    walk(top, &mut Giving { gid })?;
    give(top.as_fd(), gid, FOR_DIRECTORIES).doing("give to a group", top.path())?;
    Ok(Change::Made)
}

struct Giving {
    gid: u32,
}

impl Visitor for Giving {
    fn file(&mut self, place: &Place<'_>, _stat: &Statx) -> Result<()> {
        match place.open(OFlags::PATH) {
            Ok(Some(fd)) => give(fd.as_fd(), self.gid, FOR_FILES).map_err(place.failed("give to a group")),
            // Gone, or something was mounted there just now.
            Ok(None) | Err(Errno::XDEV) => Ok(()),
            Err(error) => Err(place.failed("open")(error)),
        }
    }

    fn enter(&mut self, place: &Place<'_>, directory: BorrowedFd<'_>, _stat: &Statx) -> Result<()> {
        give(directory, self.gid, FOR_DIRECTORIES).map_err(place.failed("give to a group"))
    }

    fn mount_point(&mut self, _place: &Place<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }
}

fn is_given(stat: &Statx, gid: u32, permissions: Mode) -> bool {
    stat.stx_gid == gid && Mode::from_raw_mode(stat.stx_mode.into()).contains(permissions)
}

fn give(file: BorrowedFd<'_>, gid: u32, permissions: Mode) -> rustix::io::Result<()> {
    let stat = stat_fd(file)?;
    if is_given(&stat, gid, permissions) {
        return Ok(());
    }
    rustix::fs::chownat(file, c"", None, Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?;
    if file_type(&stat) == FileType::Symlink {
        return Ok(());
    }
    // After chown, which takes set-user-ID and set-group-ID away.
    rustix::fs::chmod(proc_path(file), Mode::from_raw_mode(stat.stx_mode.into()) | permissions)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
        path::Path,
    };

    use super::*;
    use crate::mount;

    /// Unmounts when the test ends.
    struct Mounted<'a>(&'a Path);

    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            let _ = mount::unmount(self.0);
        }
    }

    const GID: u32 = 4321;

    fn seen(path: &Path) -> (u32, u32) {
        let stat = fs::symlink_metadata(path).unwrap();
        (stat.gid(), stat.mode() & 0o7777)
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn everything_below_is_given_and_nothing_behind_a_link_is() {
        let place = tempfile::tempdir().unwrap();
        let (volume, outside) = (place.path().join("volume"), place.path().join("outside"));
        fs::create_dir_all(volume.join("a/b")).unwrap();
        fs::write(&outside, "").unwrap();
        fs::write(volume.join("a/file"), "").unwrap();
        fs::write(volume.join("a/program"), "").unwrap();
        symlink(&outside, volume.join("a/link")).unwrap();
        for (name, mode) in [("a", 0o700), ("a/b", 0o500), ("a/file", 0o600), ("a/program", 0o4711)] {
            chmod(&volume.join(name), mode);
        }
        chmod(&outside, 0o600);
        chmod(&volume, 0o755);

        let top = Dir::open(&volume).unwrap();
        assert_eq!(give_to_group(&top, GID).unwrap(), Change::Made);
        assert_eq!(seen(&volume), (GID, 0o2775));
        assert_eq!(seen(&volume.join("a")), (GID, 0o2770));
        assert_eq!(seen(&volume.join("a/b")), (GID, 0o2570));
        assert_eq!(seen(&volume.join("a/file")), (GID, 0o660));
        assert_eq!(seen(&volume.join("a/program")), (GID, 0o4771));
        assert_eq!(seen(&volume.join("a/link")).0, GID);
        assert_eq!(seen(&outside), (0, 0o600));
    }

    #[test]
    fn a_root_that_is_given_says_that_all_is_and_one_that_is_not_starts_again() {
        let place = tempfile::tempdir().unwrap();
        let (top, file) = (Dir::open(place.path()).unwrap(), place.path().join("file"));
        give_to_group(&top, GID).unwrap();
        fs::write(&file, "").unwrap();
        chmod(&file, 0o600);
        assert_eq!(give_to_group(&top, GID).unwrap(), Change::AlreadyTrue);
        assert_eq!(seen(&file).1, 0o600, "the root was right, so nothing below was looked at");

        for wrong in [0o0770, 0o2750, 0o2550] {
            chmod(place.path(), wrong);
            chmod(&file, 0o600);
            assert_eq!(give_to_group(&top, GID).unwrap(), Change::Made, "{wrong:o}");
            assert_eq!(seen(&file), (GID, 0o660), "{wrong:o}");
        }
    }

    #[test]
    fn what_is_mounted_below_keeps_its_group() {
        let place = tempfile::tempdir().unwrap();
        let below = place.path().join("below");
        fs::create_dir(&below).unwrap();
        mount::filesystem(Path::new("none"), &below, "tmpfs", mount::Attributes::default(), &[]).unwrap();
        let _mounted = Mounted(&below);
        give_to_group(&Dir::open(place.path()).unwrap(), GID).unwrap();
        assert_eq!(seen(&below).0, 0);
        assert_eq!(seen(place.path()).0, GID);
    }
}
