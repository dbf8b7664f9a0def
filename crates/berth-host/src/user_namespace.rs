//! User namespaces for containers: a range of ids of the machine that counts as 0 and up inside.
//!
//! A process of such a namespace is root there and nobody elsewhere. The files that it is to have as its own are shown to it
//! by mounts that translate their ids ([`crate::mount::map_ids`]); on disk they keep the ids that they have.
#![expect(unsafe_code, reason = "clone3(2) has no safe wrapper")]

use std::{
    fs, io, mem,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{Mode, OFlags},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, WaitOptions},
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Users and groups of the machine that are 0 and up in a user namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IdRange {
    /// The id of the machine that is 0 inside.
    pub first: u32,
    /// How many ids there are.
    pub count: u32,
}

impl IdRange {
    /// The machine's id of one inside; those that do not exist there have none.
    pub fn outside(self, inside: u32) -> Option<u32> {
        (inside < self.count).then(|| self.first.checked_add(inside)).flatten()
    }
}

/// A user namespace, which exists as long as this or a process in it does.
#[derive(Debug)]
pub struct UserNamespace(OwnedFd);

impl UserNamespace {
    /// Makes a namespace with this range of users and of groups; for root of the machine.
    pub fn new(range: IdRange) -> Result<Self> {
        let map = format!("0 {} {}\n", range.first, range.count);
        Self::with_maps(&map, &map)
    }

    /// Makes a namespace in which two groups have changed places and everything else is as outside: a mount that shows files
    /// with its ids shows those of one group as the other's.
    pub fn exchanging_groups(one: u32, other: u32) -> Result<Self> {
        Self::with_maps(&everything_but(&[]), &(exchanged(one, other) + &everything_but(&[one, other])))
    }

    fn with_maps(users: &str, groups: &str) -> Result<Self> {
        let failed = |error: io::Error| Error::new("make a user namespace", error);
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let child = spawn(&theirs, &ours).map_err(failed)?;
        let process = format!("/proc/{}", child.as_raw_nonzero());
        let open = || -> io::Result<OwnedFd> {
            fs::write(format!("{process}/uid_map"), users)?;
            fs::write(format!("{process}/gid_map"), groups)?;
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            Ok(rustix::fs::open(format!("{process}/ns/user"), flags, Mode::empty())?)
        };
        let opened = open();
        // Its end of the pipe is at its end now, and so is the process.
        drop(ours);
        let _ = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), WaitOptions::empty()));
        opened.map(Self).map_err(|error| Error::new("give a user namespace its ids", error))
    }
}

impl AsFd for UserNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Lines of a map by which ids are the same inside and outside, apart from some.
fn everything_but(others: &[u32]) -> String {
    let mut others = others.to_vec();
    others.sort_unstable();
    // The last number is no id.
    let firsts = [0].into_iter().chain(others.iter().map(|other| other.saturating_add(1)));
    let ranges = firsts.zip(others.iter().copied().chain([u32::MAX])).filter(|(first, end)| first < end);
    let lines: Vec<String> =
        ranges.map(|(first, end)| format!("{first} {first} {}\n", end - first)).collect();
    lines.concat()
}

fn exchanged(one: u32, other: u32) -> String {
    if one == other { format!("{one} {one} 1\n") } else { format!("{one} {other} 1\n{other} {one} 1\n") }
}

/// Starts a process in a new user namespace, which ends when the pipe does, and thus also when this process dies.
fn spawn(theirs: &OwnedFd, ours: &OwnedFd) -> io::Result<Pid> {
    // SAFETY: all zeros is a `clone_args` that asks for nothing.
    let mut args: libc::clone_args = unsafe { mem::zeroed() };
    args.flags = u64::from(libc::CLONE_NEWUSER.cast_unsigned());
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    let (theirs, ours) = (theirs.as_raw_fd(), ours.as_raw_fd());
    // SAFETY: without a stack and CLONE_VM this is fork. The child has one thread and makes system calls only.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let mut byte = 0u8;
            // SAFETY: as above; the descriptors are copies of this process alone, and `byte` has room for the one read.
            unsafe {
                libc::close(ours);
                while libc::read(theirs, (&raw mut byte).cast(), 1) > 0 {}
                libc::_exit(0)
            }
        }
        pid => i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| io::Error::other("the kernel gave no process id")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use rustix::{
        fs::CWD,
        mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree},
    };

    use super::*;
    use crate::mount;

    const RANGE: IdRange = IdRange { first: 1_900_000_000, count: 65_536 };

    #[test]
    fn an_id_inside_is_one_of_the_range_outside() {
        assert_eq!(RANGE.outside(0), Some(1_900_000_000));
        assert_eq!(RANGE.outside(65_535), Some(1_900_065_535));
        assert_eq!(RANGE.outside(65_536), None);
    }

    #[test]
    fn a_mount_shows_files_with_the_ids_of_a_namespace_and_leaves_them_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let (volume, shown) = (directory.path().join("volume"), directory.path().join("shown"));
        fs::create_dir(&volume).unwrap();
        fs::create_dir(&shown).unwrap();
        fs::write(volume.join("file"), "").unwrap();
        std::os::unix::fs::chown(volume.join("file"), Some(1000), Some(2000)).unwrap();
        let namespace = UserNamespace::new(RANGE).unwrap();
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, &volume, flags).unwrap();
        mount::map_ids(tree.as_fd(), namespace.as_fd(), false).unwrap();
        move_mount(&tree, "", CWD, &shown, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
        let seen = fs::metadata(shown.join("file")).unwrap();
        // For us, who do not exist in the namespace, there is nothing that could own a new file there.
        let refused = fs::write(shown.join("new"), "").unwrap_err();
        drop(tree);
        let _ = mount::unmount(&shown).unwrap();
        assert_eq!((seen.uid(), seen.gid()), (RANGE.first + 1000, RANGE.first + 2000));
        assert_eq!(refused.raw_os_error(), Some(libc::EOVERFLOW));
        let kept = fs::metadata(volume.join("file")).unwrap();
        assert_eq!((kept.uid(), kept.gid()), (1000, 2000));
    }

    #[test]
    fn two_groups_change_places_and_nothing_else_does() {
        assert_eq!(everything_but(&[]), "0 0 4294967295\n");
        assert_eq!(everything_but(&[7, 0]), "1 1 6\n8 8 4294967287\n");
        assert_eq!(everything_but(&[4_294_967_294, 3]), "0 0 3\n4 4 4294967290\n");
        assert_eq!(exchanged(0, 7), "0 7 1\n7 0 1\n");
        let directory = tempfile::tempdir().unwrap();
        let (volume, target) = (directory.path().join("volume"), directory.path().join("target"));
        fs::create_dir(&volume).unwrap();
        fs::create_dir(&target).unwrap();
        for (name, group) in [("own", 0), ("other", 4242), ("third", 9)] {
            fs::write(volume.join(name), "").unwrap();
            std::os::unix::fs::chown(volume.join(name), Some(5), Some(group)).unwrap();
        }
        mount::bind(&volume, &target, mount::Attributes { nosuid: true, ..Default::default() }).unwrap();
        let namespace = UserNamespace::exchanging_groups(0, 4242).unwrap();
        mount::map_ids_at(&target, namespace.as_fd()).unwrap();
        let seen = ["own", "other", "third"].map(|name| fs::metadata(target.join(name)).unwrap());
        fs::write(target.join("new"), "").unwrap();
        let new = fs::metadata(volume.join("new")).unwrap();
        let mounted = mount::mounts().unwrap().into_iter().filter(|mount| mount.target == target).count();
        let _ = mount::unmount(&target).unwrap();
        assert_eq!(seen.map(|file| (file.uid(), file.gid())), [(5, 4242), (5, 0), (5, 9)]);
        assert_eq!(
            (new.uid(), new.gid()),
            (0, 4242),
            "what our group makes belongs on disk to the one it is there"
        );
        assert_eq!(mounted, 1);
    }

    #[test]
    fn what_cannot_be_shown_so_is_found_out_without_mounting_it() {
        let namespace = UserNamespace::new(RANGE).unwrap();
        let directory = tempfile::tempdir().unwrap();
        mount::check_mappable(directory.path(), namespace.as_fd()).unwrap();
        let error = mount::check_mappable("/proc/self".as_ref(), namespace.as_fd()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{}", error.sentence());
    }

    #[test]
    fn ids_that_overflow_are_refused() {
        let range = IdRange { first: u32::MAX - 10, count: 65_536 };
        assert!(UserNamespace::new(range).is_err());
        assert_eq!(range.outside(11), None);
    }
}
