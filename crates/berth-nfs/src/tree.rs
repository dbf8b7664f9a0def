//! Whole trees: paths that never leave their share and never follow a symlink, removing, copying and measuring.

use crate::{Change, Entry, Handle, Result, Share};

/// What a tree holds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Bytes on disk, a file with several names counted once.
    pub used: u64,
    /// Lengths of the files.
    pub size: u64,
    /// Everything that is not a directory.
    pub files: u64,
    /// Directories below the top.
    pub directories: u64,
}

/// What a copy did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Files and directories that were made or brought up to date.
    pub entries: u64,
    /// Those that were equal already.
    pub skipped: u64,
    /// Bytes copied, by the server or through us.
    pub bytes: u64,
}

#[expect(clippy::unused_async, reason = "the wire is still to come")]
impl Share {
    /// Finds a directory below the share; every component must be a directory, and no symlink is followed.
    pub async fn open_dir(&self, path: &str) -> Result<Entry> {
        let _ = path;
        unimplemented!("the wire is still to come")
    }

    /// Makes a directory with those above it, and tells whether it made the last one; only that one gets `change`.
    pub async fn make_dirs(&self, path: &str, change: &Change) -> Result<(Entry, bool)> {
        let _ = (path, change);
        unimplemented!("the wire is still to come")
    }

    /// Removes a name with all below it; one that is not there is removed already. Can be repeated after a failure.
    pub async fn remove_tree(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let _ = (dir, name);
        unimplemented!("the wire is still to come")
    }

    /// Copies what is in directory `from` of this share into directory `to` of another or the same; what is equal
    /// there already is left alone, so that it can be repeated after a failure.
    pub async fn copy_tree(&self, from: &Handle, other: &Share, to: &Handle) -> Result<Copied> {
        let _ = (from, other, to);
        unimplemented!("the wire is still to come")
    }

    /// Measures a directory.
    pub async fn usage(&self, dir: &Handle) -> Result<Usage> {
        let _ = dir;
        unimplemented!("the wire is still to come")
    }
}
