//! Project quotas of ext4 and XFS: a limit to what all files of one project take, and how much that is.
//!
//! A directory that is of a project and hands it on makes everything that is made below it count. Both filesystems
//! understand the same calls; quotactl_fd(2) needs no path of a device.
#![expect(unsafe_code, reason = "quotas are set by ioctl and quotactl_fd, which have no safe wrappers")]

use std::os::fd::{AsFd as _, AsRawFd as _};

use rustix::{
    io::Errno,
    ioctl::{Getter, Opcode, Setter, ioctl, opcode},
};

use crate::{
    error::{Change, Doing as _, Error, Result},
    path::Dir,
};

const FS_IOC_FSGETXATTR: Opcode = opcode::read::<FileAttributes>(b'X', 31);
const FS_IOC_FSSETXATTR: Opcode = opcode::write::<FileAttributes>(b'X', 32);
/// What is made in a directory is of the directory's project.
const INHERIT: u32 = 0x200;

const PROJECT_QUOTA: u32 = 2;
const Q_GETQUOTA: u32 = 0x80_0007;
const Q_SETQUOTA: u32 = 0x80_0008;
const Q_XGETQSTAT: u32 = 0x5805;
/// The limits of bytes are to be set.
const SET_SPACE: u32 = 1;
/// Limits of projects are counted and enforced.
const ENFORCED: u16 = 1 << 4 | 1 << 5;
/// The unit of a limit.
const UNIT: u64 = 1024;

/// The layout of the kernel's `fsxattr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct FileAttributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    unused: [u8; 8],
}

/// The layout of the kernel's `if_dqblk`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    hard_limit: u64,
    soft_limit: u64,
    bytes: u64,
    inode_hard_limit: u64,
    inode_soft_limit: u64,
    inodes: u64,
    byte_grace: u64,
    inode_grace: u64,
    valid: u32,
}

/// The layout of the kernel's `fs_quota_stat`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct State {
    version: i8,
    flags: u16,
    unused: i8,
    files: [[u64; 3]; 2],
    more: [u32; 5],
}

/// A project as a directory has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Project {
    /// Its number; 0 is none.
    pub id: u32,
    /// Whether what is made in the directory gets it.
    pub inherited: bool,
}

/// What a project takes, and may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProjectUsage {
    /// The most bytes, if there is a limit.
    pub limit: Option<u64>,
    /// The bytes that count for the project.
    pub bytes: u64,
    /// The files and directories that count for the project.
    pub inodes: u64,
}

/// Refuses a filesystem on which projects have no limits; the error says what to do about it.
pub fn check(dir: &Dir) -> Result<()> {
    let mut state = State { version: 1, ..State::default() };
    let asked = call(dir, Q_XGETQSTAT, 0, &mut state);
    match asked {
        Ok(()) if state.flags & ENFORCED == ENFORCED => Ok(()),
        Err(errno) if !matches!(errno, Errno::NOSYS | Errno::SRCH | Errno::OPNOTSUPP | Errno::INVAL) => {
            Err(errno).doing("ask for the quotas of", dir.path())
        }
        _ => Err(Error::new(
            format!(
                "use project quotas on {}: the filesystem has to be ext4 (made with -O quota,project) or xfs, mounted with \
                 the option prjquota",
                dir.path().display()
            ),
            Errno::OPNOTSUPP,
        )),
    }
}

/// The project of a directory.
pub fn project(dir: &Dir) -> Result<Project> {
    let attributes = attributes(dir)?;
    Ok(Project { id: attributes.project, inherited: attributes.flags & INHERIT != 0 })
}

/// Makes a directory one of a project, and what is made in it from now on.
pub fn set_project(dir: &Dir, id: u32) -> Result<Change> {
    if project(dir)? == (Project { id, inherited: true }) {
        return Ok(Change::AlreadyTrue);
    }
    let now = attributes(dir)?;
    let wanted = FileAttributes { project: id, flags: now.flags | INHERIT, ..now };
    // SAFETY: FS_IOC_FSSETXATTR reads one `fsxattr`.
    unsafe { ioctl(dir, Setter::<FS_IOC_FSSETXATTR, FileAttributes>::new(wanted)) }
        .doing("set the project of", dir.path())?;
    Ok(Change::Made)
}

/// Lets a project take at most so many bytes, or any number; `dir` is any directory of its filesystem.
pub fn set_limit(dir: &Dir, id: u32, bytes: Option<u64>) -> Result<Change> {
    let units = bytes.map_or(0, |bytes| bytes.div_ceil(UNIT).max(1));
    if usage(dir, id)?.limit.map_or(0, |limit| limit.div_ceil(UNIT)) == units {
        return Ok(Change::AlreadyTrue);
    }
    let mut wanted = Counted { hard_limit: units, valid: SET_SPACE, ..Counted::default() };
    call(dir, Q_SETQUOTA, id, &mut wanted).doing("set the quota of a project on", dir.path())?;
    Ok(Change::Made)
}

/// What a project takes; one that nobody has used takes nothing. `dir` is any directory of its filesystem.
pub fn usage(dir: &Dir, id: u32) -> Result<ProjectUsage> {
    let mut counted = Counted::default();
    match call(dir, Q_GETQUOTA, id, &mut counted) {
        Err(Errno::NOENT) => return Ok(ProjectUsage::default()),
        asked => asked.doing("ask for the quota of a project on", dir.path())?,
    }
    let limit = Some(counted.hard_limit.saturating_mul(UNIT)).filter(|limit| *limit > 0);
    Ok(ProjectUsage { limit, bytes: counted.bytes, inodes: counted.inodes })
}

fn attributes(dir: &Dir) -> Result<FileAttributes> {
    // SAFETY: FS_IOC_FSGETXATTR fills one `fsxattr` when it succeeds.
    unsafe { ioctl(dir, Getter::<FS_IOC_FSGETXATTR, FileAttributes>::new()) }
        .doing("read the project of", dir.path())
}

/// Asks about project `id` on the filesystem of `dir`; `argument` has the layout that the command takes.
fn call<T>(dir: &Dir, command: u32, id: u32, argument: &mut T) -> std::result::Result<(), Errno> {
    // SAFETY: the fd is open, and `argument` is live and of the layout that the kernel reads and fills for the command:
    // `if_dqblk` for Q_GETQUOTA and Q_SETQUOTA, `fs_quota_stat` for Q_XGETQSTAT.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            dir.as_fd().as_raw_fd(),
            command << 8 | PROJECT_QUOTA,
            id,
            std::ptr::from_mut(argument),
        )
    };
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
}

const _: () = assert!(size_of::<FileAttributes>() == 28);
const _: () = assert!(size_of::<Counted>() == 72);
const _: () = assert!(size_of::<State>() == 80 && std::mem::offset_of!(State, flags) == 2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_filesystem_without_project_quotas_says_how_to_get_them() {
        let dir = tempfile::tempdir().unwrap();
        let error = check(&Dir::open(dir.path()).unwrap()).unwrap_err();
        assert!(error.to_string().contains("prjquota"), "{error}");
    }
}
