//! Small files that are replaced as a whole and that nobody else may read.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// The end of the name of a file that is being written.
const TEMPORARY: &str = ".new";
/// How often a name that somebody else has taken is passed over.
const ATTEMPTS: usize = 16;

/// Replaces the file at `path`, or makes it, with mode 0600.
///
/// A reader sees the old contents or the new ones, whole, and after a return so does the next boot. The contents are
/// written to a new file in the directory of `path`, opened so that it can be neither an existing file nor a symbolic link; a symbolic
/// link at `path` itself is replaced and not followed. What a writer that was killed left behind is removed by
/// the next one. Several processes may write the same path at once: one of them is the last.
pub fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(CWD, parent, flags, Mode::empty())?;
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    remove_leftovers(parent, directory.as_fd(), &prefix)?;
    for _ in 0..ATTEMPTS {
        let Some((temporary, mut file)) = create(directory.as_fd(), &prefix)? else { continue };
        let written = file.write_all(contents).and_then(|()| file.sync_all());
        let renamed = written
            .and_then(|()| Ok(rustix::fs::renameat(directory.as_fd(), &temporary, directory.as_fd(), name)?));
        match renamed {
            Ok(()) => return Ok(rustix::fs::fsync(directory.as_fd())?),
            // Another writer took the file for a leftover before it was locked.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                // The first error is the one to report.
                let _ = rustix::fs::unlinkat(directory.as_fd(), &temporary, AtFlags::empty());
                return Err(error);
            }
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Makes and locks a new, empty file; `None` if its name is taken.
fn create(directory: BorrowedFd<'_>, prefix: &OsStr) -> io::Result<Option<(OsString, File)>> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let mut name = prefix.to_owned();
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    name.push(format!("{}-{number}{TEMPORARY}", std::process::id()));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = match rustix::fs::openat(directory, &name, flags, mode) {
        Err(Errno::EXIST) => return Ok(None),
        opened => opened?,
    };
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    // The mask of the process may have taken the owner's own rights.
    rustix::fs::fchmod(&file, mode)?;
    Ok(Some((name, File::from(file))))
}

/// Removes temporary files that no living writer has locked.
fn remove_leftovers(parent: &Path, directory: BorrowedFd<'_>, prefix: &OsStr) -> io::Result<()> {
    for entry in std::fs::read_dir(parent)? {
        let name = entry?.file_name().into_vec();
        if !name.starts_with(prefix.as_bytes()) || !name.ends_with(TEMPORARY.as_bytes()) {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // A symbolic link, and what cannot be opened or is locked, is not a leftover of ours or still in use.
        let Ok(file) = rustix::fs::openat(directory, &name, flags, Mode::empty()) else { continue };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match rustix::fs::unlinkat(directory, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole_and_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "a much longer old text").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        write_private(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(names(directory.path()), ["token"]);
    }

    #[test]
    fn links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let victim = directory.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        let path = directory.path().join("token");
        symlink(&victim, &path).unwrap();
        symlink(&victim, directory.path().join(".token.link.new")).unwrap();
        for number in 0..4 {
            symlink(&victim, directory.path().join(format!(".token.{}-{number}.new", std::process::id())))
                .unwrap();
        }
        write_private(&path, b"new").unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"mine");
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[test]
    fn leftovers_are_removed_and_files_in_use_are_not() {
        let directory = tempfile::tempdir().unwrap();
        for name in [".token.77-0.new", ".other.77-0.new", ".token.78-0.new"] {
            fs::write(directory.path().join(name), "half").unwrap();
        }
        let in_use = File::open(directory.path().join(".token.78-0.new")).unwrap();
        rustix::fs::flock(&in_use, FlockOperation::LockExclusive).unwrap();
        write_private(&directory.path().join("token"), b"new").unwrap();
        assert_eq!(names(directory.path()), [".other.77-0.new", ".token.78-0.new", "token"]);
    }

    #[test]
    fn writers_of_one_path_do_not_disturb_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::thread::scope(|scope| {
            for byte in b'a'..b'e' {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..20 {
                        write_private(path, &[byte; 5000]).unwrap();
                    }
                });
            }
        });
        let contents = fs::read(&path).unwrap();
        assert_eq!(contents.len(), 5000);
        assert!(contents.iter().all(|byte| *byte == contents[0]));
        assert_eq!(names(directory.path()), ["token"]);
    }

    #[test]
    fn a_directory_that_is_missing_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = write_private(&directory.path().join("none/token"), b"new").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(write_private(Path::new("/"), b"").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
