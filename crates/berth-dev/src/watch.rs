//! Changes of files and directory trees, by inotify: of sources, which are built again, and of the driver's files, which calls change.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

/// How long nothing may happen before changes count as complete: an editor writes a file in several steps.
const QUIET: Duration = Duration::from_millis(100);
/// More directories than these are not watched: somebody watches a whole disk.
const MOST_DIRECTORIES: usize = 4096;
/// Directories of this name hold what is built, not what it is built from.
const BUILT: [&str; 2] = ["target", "node_modules"];

/// A path that changed, and how.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Change {
    pub(crate) path: PathBuf,
    pub(crate) how: How,
}

/// How a path changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    Created,
    Written,
    Removed,
}

/// Files and directory trees that are watched.
#[derive(Debug)]
pub(crate) struct Watch {
    inotify: AsyncFd<OwnedFd>,
    roots: Vec<PathBuf>,
    directories: HashMap<i32, PathBuf>,
}

impl Watch {
    /// Watches these files and directory trees. Names that begin with a dot, and directories of what was built, are left out.
    pub(crate) fn new(roots: Vec<PathBuf>) -> io::Result<Self> {
        let descriptor = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe for types that could give up their descriptor; OwnedFd cannot"
        )]
        let inotify = AsyncFd::new(descriptor)?;
        let mut watch = Self { inotify, roots, directories: HashMap::new() };
        for root in watch.roots.clone() {
            if root.is_dir() {
                watch.add_tree(&root)?;
            } else {
                // Editors replace a file, so that its directory is what can be watched.
                let parent = root.parent().filter(|parent| !parent.as_os_str().is_empty());
                watch.add(parent.unwrap_or(Path::new(".")))?;
            }
        }
        Ok(watch)
    }

    fn add(&mut self, directory: &Path) -> io::Result<()> {
        if self.directories.len() >= MOST_DIRECTORIES {
            return Ok(());
        }
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ONLYDIR;
        let number = inotify::add_watch(&self.inotify, directory, flags)?;
        self.directories.insert(number, directory.to_owned());
        Ok(())
    }

    fn add_tree(&mut self, directory: &Path) -> io::Result<()> {
        self.add(directory)?;
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() && is_watched(&entry.file_name()) {
                // What is gone again by now is no longer of interest.
                let _ = self.add_tree(&entry.path());
            }
        }
        Ok(())
    }

    /// What changed since it was last asked, without waiting.
    pub(crate) fn drain(&mut self) -> Vec<Change> {
        let mut events = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            if let Some(name) = event.file_name() {
                events.push((event.wd(), event.events(), OsStr::from_bytes(name.to_bytes()).to_owned()));
            }
        }
        let mut changes = Vec::new();
        for (number, flags, name) in events {
            let Some(path) = self.directories.get(&number).map(|directory| directory.join(&name)) else {
                continue;
            };
            if !is_watched(&name) || !self.is_below_root(&path) {
                continue;
            }
            let how = if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
                How::Created
            } else if flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
                How::Removed
            } else {
                How::Written
            };
            if how == How::Created && flags.contains(ReadFlags::ISDIR) {
                let _ = self.add_tree(&path);
            }
            changes.push(Change { path, how });
        }
        combine(changes)
    }

    /// Waits for changes, until nothing more changes.
    pub(crate) async fn changed(&mut self) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        loop {
            let ready = self.inotify.readable();
            let mut ready =
                match tokio::time::timeout(if changes.is_empty() { Duration::MAX } else { QUIET }, ready)
                    .await
                {
                    Ok(Ok(ready)) => ready,
                    Ok(Err(_)) => std::future::pending().await,
                    Err(_quiet) => return combine(changes),
                };
            ready.clear_ready();
            changes.extend(self.drain());
        }
    }

    fn is_below_root(&self, path: &Path) -> bool {
        let plain = path.strip_prefix(".").unwrap_or(path);
        self.roots
            .iter()
            .any(|root| path.starts_with(root) || plain.starts_with(root.strip_prefix(".").unwrap_or(root)))
    }
}

fn is_watched(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    !name.starts_with('.') && !name.ends_with('~') && !BUILT.contains(&&*name)
}

/// One change for each path. What came and went again is none.
fn combine(changes: Vec<Change>) -> Vec<Change> {
    let mut combined: Vec<Change> = Vec::new();
    for change in changes {
        let Some(at) = combined.iter().position(|known| known.path == change.path) else {
            combined.push(change);
            continue;
        };
        match (combined[at].how, change.how) {
            (How::Created, How::Removed) => drop(combined.remove(at)),
            (How::Created, _) => {}
            (How::Removed, How::Created) => combined[at].how = How::Written,
            (_, how) => combined[at].how = how,
        }
    }
    combined
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names(changes: &[Change], top: &Path) -> Vec<(String, How)> {
        let mut names: Vec<_> = changes
            .iter()
            .map(|change| (change.path.strip_prefix(top).unwrap().display().to_string(), change.how))
            .collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn changes_of_trees_and_files_are_found_and_combined() {
        let top = tempfile::tempdir().unwrap();
        let top = top.path();
        fs::create_dir_all(top.join("src/deep")).unwrap();
        fs::write(top.join("Cargo.toml"), "").unwrap();
        let mut watch = Watch::new(vec![top.join("src"), top.join("Cargo.toml")]).unwrap();
        assert!(watch.drain().is_empty());
        fs::write(top.join("src/deep/a.rs"), "a").unwrap();
        fs::write(top.join("src/.hidden"), "a").unwrap();
        fs::write(top.join("other"), "not watched").unwrap();
        fs::write(top.join("src/passing"), "").unwrap();
        fs::remove_file(top.join("src/passing")).unwrap();
        let changes = tokio::time::timeout(Duration::from_secs(30), watch.changed()).await.unwrap();
        assert_eq!(names(&changes, top), [("src/deep/a.rs".to_owned(), How::Created)]);
        // Replaced, as an editor does it.
        fs::write(top.join("new"), "x").unwrap();
        fs::rename(top.join("new"), top.join("Cargo.toml")).unwrap();
        fs::create_dir(top.join("src/later")).unwrap();
        let changes = tokio::time::timeout(Duration::from_secs(30), watch.changed()).await.unwrap();
        assert_eq!(
            names(&changes, top),
            [("Cargo.toml".to_owned(), How::Created), ("src/later".to_owned(), How::Created)]
        );
        fs::write(top.join("src/later/b.rs"), "b").unwrap();
        let changes = tokio::time::timeout(Duration::from_secs(30), watch.changed()).await.unwrap();
        assert_eq!(names(&changes, top), [("src/later/b.rs".to_owned(), How::Created)]);
    }
}
