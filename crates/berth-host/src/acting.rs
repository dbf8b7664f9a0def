//! Acts on files as another user, on one thread: what a file server does for its clients.
//!
//! The kernel checks and owns files by a thread's filesystem user and group ids, which are those of the process unless they are
//! set apart. They are set by system calls and not by the C library, which would set some of them for every thread.
#![expect(unsafe_code, reason = "neither rustix nor the C library sets these ids for one thread")]

use std::io;

use rustix::{
    fs::Mode,
    io::Errno,
    process::Gid,
    thread::{UnshareFlags, set_thread_groups},
};

use crate::error::{Error, Result};

/// A user and its groups, as the kernel knows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The id of the user.
    pub uid: u32,
    /// The group of what it makes.
    pub gid: u32,
    /// Groups that it is in besides.
    pub groups: Vec<u32>,
}

/// Gives the calling thread a file mode mask of its own, which masks nothing: modes are then what a client asked for. The working directory
/// is the thread's own from then on, too.
pub fn unmask_thread() -> Result<()> {
    // SAFETY: this takes nothing from other threads; only the mask, the root and the working directory of this one are parted.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }
        .map_err(|error| Error::new("give a thread a file mode mask of its own", error))?;
    rustix::process::umask(Mode::empty());
    Ok(())
}

/// Does something as `user`, as far as files are concerned, and is root again afterwards.
///
/// Needs root. Where the user cannot be taken on, nothing is done. If the thread cannot become root again the whole process is aborted,
/// because what it did next would be done as somebody else.
pub fn act_as<T>(user: &User, work: impl FnOnce() -> T) -> io::Result<T> {
    let groups = |groups: &[u32]| {
        let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)
    };
    // -1 leaves every id as it is, so it cannot be anybody's, and what comes next would be done as root.
    if [user.uid, user.gid].iter().chain(&user.groups).any(|id| *id == u32::MAX) {
        return Err(Errno::INVAL.into());
    }
    let back = Back(rustix::process::getgroups()?.iter().map(|gid| gid.as_raw()).collect());
    groups(&user.groups)?;
    if !set(libc::SYS_setfsgid, user.gid) || !set(libc::SYS_setfsuid, user.uid) {
        return Err(Errno::PERM.into());
    }
    let done = work();
    drop(back);
    Ok(done)
}

/// Makes the thread root again, also while it panics.
struct Back(Vec<u32>);

impl Drop for Back {
    fn drop(&mut self) {
        let groups: Vec<Gid> = self.0.iter().copied().map(Gid::from_raw).collect();
        let is_root = set(libc::SYS_setfsuid, 0) && set(libc::SYS_setfsgid, 0);
        if !is_root || set_thread_groups(&groups).is_err() {
            std::process::abort();
        }
    }
}

/// Sets one of the two ids of this thread, and says whether it is that now: the call itself only tells what it was.
fn set(call: libc::c_long, id: u32) -> bool {
    // SAFETY: both calls take one number and change nothing but an id of this thread.
    unsafe {
        libc::syscall(call, id);
        libc::syscall(call, u32::MAX) == libc::c_long::from(id)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    fn user(uid: u32, gid: u32, groups: &[u32]) -> User {
        User { uid, gid, groups: groups.to_vec() }
    }

    #[test]
    fn files_are_made_and_refused_as_for_the_user_itself() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let path = dir.path().join("file");
        let made = act_as(&user(2001, 2002, &[]), || File::create(&path)).unwrap();
        assert_eq!(made.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::os::unix::fs::chown(dir.path(), Some(0), Some(3001)).unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o775)).unwrap();
        act_as(&user(2001, 2002, &[3001]), || File::create(&path)).unwrap().unwrap();
        let is = fs::metadata(&path).unwrap();
        assert_eq!((is.uid(), is.gid()), (2001, 2002));
        // And root again.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
        let own = dir.path().join("own");
        File::create(&own).unwrap();
        assert_eq!(fs::metadata(&own).unwrap().uid(), 0);
    }

    #[test]
    fn nobody_who_cannot_be_is_taken_for_root() {
        for bad in [user(u32::MAX, 1, &[]), user(1, u32::MAX, &[]), user(1, 1, &[u32::MAX])] {
            assert!(act_as(&bad, || panic!("it is done")).is_err());
        }
    }

    #[test]
    fn a_thread_that_panics_is_root_again() {
        let dir = tempfile::tempdir().unwrap();
        let panicked = std::panic::catch_unwind(|| act_as(&user(2001, 2001, &[2002]), || panic!("as asked")));
        assert!(panicked.is_err());
        let path = dir.path().join("file");
        File::create(&path).unwrap();
        let is = fs::metadata(&path).unwrap();
        assert_eq!((is.uid(), is.gid()), (0, 0));
    }

    #[test]
    fn a_thread_that_masks_nothing_leaves_others_their_mask() {
        let mask = || {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            status.lines().find(|line| line.starts_with("Umask:")).unwrap().to_owned()
        };
        let before = mask();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                unmask_thread().unwrap();
                let mode = Mode::from_raw_mode(0o666);
                let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
                rustix::fs::open(&path, flags, mode).unwrap();
            });
        });
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
        assert_eq!(mask(), before);
    }
}
