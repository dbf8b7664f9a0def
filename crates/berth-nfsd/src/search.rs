//! Files by their numbers, where the kernel gives no handles: where a file was last is remembered, and if it is not there, or if
//! the server was started anew, the directory is searched.

use std::{
    collections::HashMap,
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::fs::{CWD, Dir, Mode, OFlags};

use crate::{
    export::{Export, Object},
    handle::Identity,
    status::{Result, Status},
};

/// Names of one file that are remembered.
const MOST_NAMES: usize = 16;
/// Deeper than any path that the kernel takes.
const DEEPEST: usize = 2048;
/// How often the whole directory is searched for files that are not where they were.
const PAUSE: Duration = Duration::from_secs(5);

/// The number of a directory, and a name in it.
type NameOf = (u64, Box<[u8]>);

/// Where files are: for each number the directories and names that it was found under.
pub(crate) struct Search {
    root: u64,
    names: Mutex<HashMap<u64, Vec<NameOf>>>,
    /// When the last search ended; held during one.
    searched: Mutex<Option<Instant>>,
}

impl Search {
    pub(crate) fn new(root: u64) -> Self {
        Self { root, names: Mutex::default(), searched: Mutex::default() }
    }

    /// Remembers where a file is.
    pub(crate) fn note(&self, directory: u64, name: &[u8], inode: u64) {
        let mut names = self.names.lock();
        let known = names.entry(inode).or_default();
        known.retain(|(of, is)| *of != directory || **is != *name);
        if known.len() == MOST_NAMES {
            known.remove(0);
        }
        known.push((directory, name.into()));
    }

    /// Forgets one name of a file.
    pub(crate) fn forget(&self, directory: u64, name: &[u8], inode: u64) {
        let mut names = self.names.lock();
        if let Some(known) = names.get_mut(&inode) {
            known.retain(|(of, is)| *of != directory || **is != *name);
            if known.is_empty() {
                names.remove(&inode);
            }
        }
    }

    /// The file with this identity: where it was, or wherever a search finds it.
    pub(crate) fn find(&self, export: &Export, wanted: Identity) -> Result<Object> {
        if let Some(found) = self.find_known(export, wanted) {
            return Ok(found);
        }
        let mut searched = self.searched.lock();
        // Somebody may have searched while we waited for that.
        if let Some(found) = self.find_known(export, wanted) {
            return Ok(found);
        }
        if searched.is_some_and(|last| last.elapsed() < PAUSE) {
            return Err(Status::Stale);
        }
        self.names.lock().clear();
        self.search(export);
        *searched = Some(Instant::now());
        self.find_known(export, wanted).ok_or(Status::Stale)
    }

    fn find_known(&self, export: &Export, wanted: Identity) -> Option<Object> {
        let paths =
            if wanted.inode == self.root { vec![PathBuf::from(".")] } else { self.paths(wanted.inode) };
        let mut found = paths.iter().filter_map(|path| export.below(path).ok());
        found.find(|object| object.identity == wanted)
    }

    /// Where a file was last.
    fn paths(&self, inode: u64) -> Vec<PathBuf> {
        let names = self.names.lock();
        let path = |(directory, name): &NameOf| {
            let (mut above, mut parts) = (*directory, vec![name]);
            while above != self.root {
                let (next, name) = names.get(&above)?.last()?;
                if parts.len() == DEEPEST {
                    return None;
                }
                parts.push(name);
                above = *next;
            }
            Some(parts.iter().rev().map(|part| OsStr::from_bytes(part)).collect())
        };
        names.get(&inode).map(|known| known.iter().rev().filter_map(path).collect()).unwrap_or_default()
    }

    /// Remembers every file of the directory; what cannot be read is passed over.
    fn search(&self, export: &Export) {
        let mut directories = vec![(PathBuf::from("."), self.root)];
        while let Some((path, inode)) = directories.pop() {
            let Ok(entries) = export.below(&path).and_then(|directory| Ok(entries(&directory)?)) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_bytes();
                let below = path.join(OsStr::from_bytes(name));
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let Ok(child) = export.below(&below) else { continue };
                self.note(inode, name, child.identity.inode);
                if child.is_directory() {
                    directories.push((below, child.identity.inode));
                }
            }
        }
    }
}

fn entries(directory: &Object) -> rustix::io::Result<Dir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Dir::new(rustix::fs::openat(CWD, directory.path(), flags, Mode::empty())?)
}
