//! Gives the files of a volume to a group, as Kubernetes' fsGroup means it.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Statx},
    io::Errno,
};

use crate::{
    error::{Change, Doing as _, Error, Result},
    path::{
        Dir, proc_path,
        walk::{EntryLocation, Visitor, file_type, stat_fd, walk},
    },
};

/// When the files of a volume are given to a group, as a pod's `fsGroupChangePolicy` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupPolicy {
    /// All files, each time.
    #[default]
    Always,
    /// Only if the top is not given to the group yet.
    OnRootMismatch,
}

/// The permissions that a group gets.
#[derive(Clone, Copy)]
struct Permissions {
    files: Mode,
    directories: Mode,
}

impl Permissions {
    /// Set-group-ID is always among those for directories: what is made in them later belongs to the group too.
    const fn new(files: Mode, execute: Mode) -> Self {
        Self { files, directories: files.union(execute).union(Mode::SGID) }
    }
}

const FOR_GROUP: Permissions = Permissions::new(Mode::RGRP.union(Mode::WGRP), Mode::XGRP);
/// What the kubelet gives: the owner gets as much as the group.
const READ_ONLY: Permissions = Permissions::new(Mode::RUSR.union(Mode::RGRP), Mode::XUSR.union(Mode::XGRP));
const READ_WRITE: Permissions =
    Permissions::new(READ_ONLY.files.union(Mode::WUSR).union(Mode::WGRP), Mode::XUSR.union(Mode::XGRP));

/// Gives `top` and all below it to the group `gid`, which may then read and write it all.
///
/// `top` itself changes last, so that a `top` that belongs to the group says that everything below does; a call that
/// finds it so does nothing. Mount points below are left alone, symbolic links are given away but not followed.
pub fn give_to_group(top: &Dir, gid: u32) -> Result<Change> {
    let stat = stat_fd(top).doing("stat", top.path())?;
    if is_given(&stat, gid, FOR_GROUP.directories) {
        return Ok(Change::AlreadyTrue);
    }
    walk(top, &mut Giving { gid, permissions: FOR_GROUP, change: Change::AlreadyTrue, tolerant: None })?;
    give(top.as_fd(), gid, FOR_GROUP.directories).doing("give to a group", top.path())?;
    Ok(Change::Made)
}

/// Gives `top` and all below it to the group `gid` the way the kubelet does for a pod's `fsGroup`.
///
/// As [`give_to_group`], but owner and group both get at least to read (and, unless `read_only`, write) everything,
/// and a file that cannot be given is no error: filesystems that know no groups, or do not let us change them, still
/// serve. The log then names the first such file and their number.
pub fn apply_group(top: &Dir, gid: u32, policy: GroupPolicy, read_only: bool) -> Result<Change> {
    let permissions = if read_only { READ_ONLY } else { READ_WRITE };
    let stat = stat_fd(top).doing("stat", top.path())?;
    if policy == GroupPolicy::OnRootMismatch && is_given(&stat, gid, permissions.directories) {
        return Ok(Change::AlreadyTrue);
    }
    let mut giving =
        Giving { gid, permissions, change: Change::AlreadyTrue, tolerant: Some(Refusals::default()) };
    walk(top, &mut giving)?;
    let given = give(top.as_fd(), gid, permissions.directories).doing("give to a group", top.path());
    giving.note(given)?;
    if let Some(Refusals { count, first: Some(first) }) = giving.tolerant {
        tracing::warn!(gid, count, first = first.sentence(), "files could not be given to the pod's group");
    }
    Ok(giving.change)
}

struct Giving {
    gid: u32,
    permissions: Permissions,
    change: Change,
    /// Where refusals are counted rather than returned.
    tolerant: Option<Refusals>,
}

#[derive(Default)]
struct Refusals {
    count: u64,
    first: Option<Error>,
}

impl Giving {
    fn note(&mut self, given: Result<Change>) -> Result<()> {
        match (given, &mut self.tolerant) {
            (Ok(Change::AlreadyTrue), _) => {}
            (Ok(Change::Made), _) => self.change = Change::Made,
            (Err(error), Some(refusals)) => {
                refusals.count += 1;
                refusals.first.get_or_insert(error);
            }
            (Err(error), None) => return Err(error),
        }
        Ok(())
    }
}

impl Visitor for Giving {
    fn file(&mut self, location: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        let given = match location.open(OFlags::PATH) {
            Ok(Some(fd)) => {
                give(fd.as_fd(), self.gid, self.permissions.files).map_err(location.failed("give to a group"))
            }
            // Gone, or something was mounted there just now.
            Ok(None) | Err(Errno::XDEV) => return Ok(()),
            Err(error) => Err(location.failed("open")(error)),
        };
        self.note(given)
    }

    fn enter(
        &mut self,
        location: &EntryLocation<'_>,
        directory: BorrowedFd<'_>,
        _stat: &Statx,
    ) -> Result<()> {
        let given = give(directory, self.gid, self.permissions.directories)
            .map_err(location.failed("give to a group"));
        self.note(given)
    }

    fn mount_point(&mut self, _place: &EntryLocation<'_>, _stat: &Statx) -> Result<()> {
        Ok(())
    }
}

fn is_given(stat: &Statx, gid: u32, permissions: Mode) -> bool {
    stat.stx_gid == gid && Mode::from_raw_mode(stat.stx_mode.into()).contains(permissions)
}

fn give(file: BorrowedFd<'_>, gid: u32, permissions: Mode) -> rustix::io::Result<Change> {
    let stat = stat_fd(file)?;
    let is_link = file_type(&stat) == FileType::Symlink;
    if is_given(&stat, gid, if is_link { Mode::empty() } else { permissions }) {
        return Ok(Change::AlreadyTrue);
    }
    rustix::fs::chownat(file, c"", None, Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?;
    if is_link {
        return Ok(Change::Made);
    }
    // After chown, which takes set-user-ID and set-group-ID away.
    rustix::fs::chmod(proc_path(file), Mode::from_raw_mode(stat.stx_mode.into()) | permissions)?;
    Ok(Change::Made)
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
        let scratch = tempfile::tempdir().unwrap();
        let (volume, outside) = (scratch.path().join("volume"), scratch.path().join("outside"));
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
        let scratch = tempfile::tempdir().unwrap();
        let (top, file) = (Dir::open(scratch.path()).unwrap(), scratch.path().join("file"));
        give_to_group(&top, GID).unwrap();
        fs::write(&file, "").unwrap();
        chmod(&file, 0o600);
        assert_eq!(give_to_group(&top, GID).unwrap(), Change::AlreadyTrue);
        assert_eq!(seen(&file).1, 0o600, "the root was right, so nothing below was read");

        for wrong in [0o0770, 0o2750, 0o2550] {
            chmod(scratch.path(), wrong);
            chmod(&file, 0o600);
            assert_eq!(give_to_group(&top, GID).unwrap(), Change::Made, "{wrong:o}");
            assert_eq!(seen(&file), (GID, 0o660), "{wrong:o}");
        }
    }

    #[test]
    fn a_pods_group_gets_what_the_kubelet_gives_and_the_owner_as_much() {
        for (read_only, file, directory) in [(false, 0o660, 0o2770), (true, 0o440, 0o2550)] {
            let scratch = tempfile::tempdir().unwrap();
            let (below, link) = (scratch.path().join("below"), scratch.path().join("link"));
            fs::create_dir(&below).unwrap();
            fs::write(below.join("file"), "").unwrap();
            symlink("/etc/passwd", &link).unwrap();
            for path in [below.join("file"), below.clone(), scratch.path().to_owned()] {
                chmod(&path, 0);
            }
            let top = Dir::open(scratch.path()).unwrap();
            assert_eq!(apply_group(&top, GID, GroupPolicy::Always, read_only).unwrap(), Change::Made);
            assert_eq!(seen(&below.join("file")), (GID, file));
            assert_eq!(seen(&below), (GID, directory));
            assert_eq!(seen(scratch.path()), (GID, directory));
            assert_eq!(seen(&link).0, GID);
            assert_eq!(seen(Path::new("/etc/passwd")).0, 0);
            assert_eq!(apply_group(&top, GID, GroupPolicy::Always, read_only).unwrap(), Change::AlreadyTrue);
        }
    }

    #[test]
    fn only_a_mismatch_at_the_root_starts_the_walk_where_the_pod_says_so() {
        let scratch = tempfile::tempdir().unwrap();
        let (top, file) = (Dir::open(scratch.path()).unwrap(), scratch.path().join("file"));
        fs::write(&file, "").unwrap();
        let apply = |policy, read_only| apply_group(&top, GID, policy, read_only).unwrap();
        for (root, read_only, policy, expected) in [
            (0o2770, false, GroupPolicy::OnRootMismatch, Change::AlreadyTrue),
            (0o2775, false, GroupPolicy::OnRootMismatch, Change::AlreadyTrue),
            (0o2750, false, GroupPolicy::OnRootMismatch, Change::Made),
            (0o0770, false, GroupPolicy::OnRootMismatch, Change::Made),
            (0o2550, true, GroupPolicy::OnRootMismatch, Change::AlreadyTrue),
            (0o2540, true, GroupPolicy::OnRootMismatch, Change::Made),
            (0o2770, false, GroupPolicy::Always, Change::Made),
        ] {
            apply(GroupPolicy::Always, read_only);
            chmod(scratch.path(), root);
            chmod(&file, 0o600);
            assert_eq!(apply(policy, read_only), expected, "{root:o} {read_only} {policy:?}");
            let walked = seen(&file).1 != 0o600;
            assert_eq!(walked, expected == Change::Made, "{root:o} {read_only} {policy:?}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_given_stops_a_strict_walk_only() {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join("file"), "").unwrap();
        let bound = scratch.path().join("bound");
        fs::create_dir(&bound).unwrap();
        mount::bind(scratch.path(), &bound, mount::Attributes { read_only: true, ..Default::default() })
            .unwrap();
        let _mounted = Mounted(&bound);
        let top = Dir::open(&bound).unwrap();
        assert!(give_to_group(&top, GID).is_err());
        assert_eq!(apply_group(&top, GID, GroupPolicy::Always, false).unwrap(), Change::AlreadyTrue);
    }

    #[test]
    fn what_is_mounted_below_keeps_its_group() {
        let scratch = tempfile::tempdir().unwrap();
        let below = scratch.path().join("below");
        fs::create_dir(&below).unwrap();
        mount::filesystem(Path::new("none"), &below, "tmpfs", mount::Attributes::default(), &[]).unwrap();
        let _mounted = Mounted(&below);
        give_to_group(&Dir::open(scratch.path()).unwrap(), GID).unwrap();
        assert_eq!(seen(&below).0, 0);
        assert_eq!(seen(scratch.path()).0, GID);
    }
}
