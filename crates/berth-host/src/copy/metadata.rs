//! Copies what a file is besides its bytes: owner, extended attributes, mode and times.

use std::{
    ffi::{CStr, CString},
    os::fd::BorrowedFd,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, Statx, StatxTimestamp, Timespec, Timestamps, Uid, XattrFlags},
    io::{Errno, Result},
};

use crate::path::{proc_path, walk::file_type};

/// The kernel's bounds for a list of attributes and for a value are the same.
const ATTRIBUTE_MAX: usize = 64 * 1024;
const ACCESS_ACL: &CStr = c"system.posix_acl_access";
const DEFAULT_ACL: &CStr = c"system.posix_acl_default";

/// Copies metadata, with room for extended attributes.
pub(super) struct Metadata {
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Metadata {
    pub(super) fn new() -> Self {
        Self { names: vec![0; ATTRIBUTE_MAX], value: vec![0; ATTRIBUTE_MAX] }
    }

    /// Gives `destination` what `source` has, whose `stat` this is; both may have been opened with `O_PATH`.
    pub(super) fn copy(
        &mut self,
        source: BorrowedFd<'_>,
        stat: &Statx,
        destination: BorrowedFd<'_>,
    ) -> Result<()> {
        let path = proc_path(destination);
        // The order matters: a new owner costs a file its capabilities and its setuid bit, an ACL changes the mode.
        let (user, group) = (Uid::from_raw(stat.stx_uid), Gid::from_raw(stat.stx_gid));
        rustix::fs::chownat(CWD, &path, Some(user), Some(group), AtFlags::empty())?;
        self.copy_attributes(&proc_path(source), &path)?;
        if file_type(stat) != FileType::Symlink {
            rustix::fs::chmod(&path, Mode::from_raw_mode(stat.stx_mode.into()))?;
        }
        let times = Timestamps {
            last_access: timespec(&stat.stx_atime),
            last_modification: timespec(&stat.stx_mtime),
        };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty())
    }

    fn copy_attributes(&mut self, source: &str, destination: &str) -> Result<()> {
        let listed = match rustix::fs::listxattr(source, &mut self.names[..]) {
            Ok(length) => &self.names[..length],
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(error) => return Err(error),
        };
        for name in listed.split_inclusive(|&byte| byte == 0) {
            let name = CStr::from_bytes_with_nul(name).map_err(|_| Errno::ILSEQ)?;
            let length = match rustix::fs::getxattr(source, name, &mut self.value[..]) {
                Ok(length) => length,
                // Removed since it was listed.
                Err(Errno::NODATA) => continue,
                Err(error) => return Err(error),
            };
            match rustix::fs::setxattr(destination, name, &self.value[..length], XattrFlags::empty()) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS) if is_of_the_machine(name) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Takes away the ACLs a directory was born with, so that what is made in it is born without.
pub(super) fn remove_acls(directory: BorrowedFd<'_>) -> Result<()> {
    for name in [DEFAULT_ACL, ACCESS_ACL] {
        match rustix::fs::fremovexattr(directory, name) {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether an attribute says how one filesystem or one machine treats a file, rather than what a user gave it.
fn is_of_the_machine(name: &CStr) -> bool {
    let name = name.to_bytes();
    let of_users: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
    name == b"security.selinux" || !of_users.iter().any(|prefix| name.starts_with(prefix))
}

fn timespec(time: &StatxTimestamp) -> Timespec {
    Timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec.into() }
}

/// A symbolic link's target.
pub(super) fn read_link(link: BorrowedFd<'_>) -> Result<CString> {
    rustix::fs::readlinkat(link, c"", Vec::new())
}
