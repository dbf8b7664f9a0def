//! Names of files that outlive the process that asked for them: what a file server gives to its clients.
//!
//! A handle names a file on its filesystem, wherever it is moved, until it is removed. Whoever can open handles passes by the
//! permissions of directories, so a server must give out handles that nobody can make up.
#![expect(unsafe_code, reason = "the two calls have no safe wrapper")]

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::io::Errno;

/// No filesystem's handles are longer: MAX_HANDLE_SZ.
const LONGEST: usize = 128;

/// A file's name on its filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileHandle {
    /// How the filesystem has written it.
    pub kind: i32,
    /// What only the filesystem can read.
    pub bytes: Vec<u8>,
}

/// What the kernel reads and writes: `struct file_handle`.
#[repr(C)]
struct Raw {
    length: u32,
    kind: i32,
    bytes: [u8; LONGEST],
}

/// The handle of an open file, which may be open as a path alone (`O_PATH`). `EOPNOTSUPP` if the filesystem has none.
pub fn of(file: BorrowedFd<'_>) -> Result<FileHandle, Errno> {
    let mut raw = Raw { length: 128, kind: 0, bytes: [0; LONGEST] };
    let mut mount: libc::c_int = 0;
    // SAFETY: the empty path ends with a zero, and the handle has the room that it says; both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if done != 0 {
        return Err(last_error());
    }
    let length = raw.length as usize;
    let bytes = raw.bytes.get(..length).ok_or(Errno::OVERFLOW)?;
    Ok(FileHandle { kind: raw.kind, bytes: bytes.to_vec() })
}

/// Opens the file that a handle names, as a path (`O_PATH`), without following it if it is a symbolic link.
///
/// `mount` is any file of the same filesystem, open for more than its path. `ESTALE` if there is no such file any more, `EPERM` if the
/// process may not pass by the permissions of directories (CAP_DAC_READ_SEARCH).
pub fn open(mount: BorrowedFd<'_>, handle: &FileHandle) -> Result<OwnedFd, Errno> {
    let mut raw = Raw { length: 0, kind: handle.kind, bytes: [0; LONGEST] };
    raw.bytes.get_mut(..handle.bytes.len()).ok_or(Errno::INVAL)?.copy_from_slice(&handle.bytes);
    raw.length = u32::try_from(handle.bytes.len()).map_err(|_| Errno::INVAL)?;
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: the handle is as long as it says and outlives the call; what comes back is a new descriptor that nobody else owns.
    unsafe {
        let opened = libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw const raw, flags);
        let opened = i32::try_from(opened).unwrap_or(-1);
        if opened < 0 { Err(last_error()) } else { Ok(OwnedFd::from_raw_fd(opened)) }
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_file_is_found_by_its_handle_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mount = File::open(dir.path()).unwrap();
        fs::write(dir.path().join("file"), "content").unwrap();
        let file = File::open(dir.path().join("file")).unwrap();
        let handle = of(file.as_fd()).unwrap();
        drop(file);
        fs::rename(dir.path().join("file"), dir.path().join("moved")).unwrap();
        let again = open(mount.as_fd(), &handle).unwrap();
        assert_eq!(of(again.as_fd()).unwrap(), handle);
        let read = fs::read_to_string(format!("/proc/self/fd/{}", again.as_raw_fd())).unwrap();
        assert_eq!(read, "content");
        drop(again);
        fs::remove_file(dir.path().join("moved")).unwrap();
        assert_eq!(open(mount.as_fd(), &handle).unwrap_err(), Errno::STALE);
        let long = FileHandle { kind: handle.kind, bytes: vec![0; LONGEST + 1] };
        assert_eq!(open(mount.as_fd(), &long).unwrap_err(), Errno::INVAL);
    }
}
