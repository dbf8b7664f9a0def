//! Measures how much space a tree of files and directories takes.

use std::collections::HashSet;

use parking_lot::Mutex;

use super::walk::{Visitor, walk};
use crate::{DirEntry, FileKind, Handle, Kind, Result, Share};

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

impl Share {
    /// Measures what is below a directory; what goes away meanwhile is not counted.
    pub async fn usage(&self, dir: &Handle) -> Result<Usage> {
        // The top must be there.
        self.attributes(dir).await?;
        let measure = Measure { share: self, sums: Mutex::default() };
        walk(self, &measure, dir.clone()).await?;
        Ok(measure.sums.into_inner().usage)
    }
}

struct Measure<'a> {
    share: &'a Share,
    sums: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    usage: Usage,
    /// Files with several names, as filesystem and number.
    seen: HashSet<((u64, u64), u64)>,
}

impl Sums {
    fn add(&mut self, entry: &DirEntry) {
        let is = &entry.attributes;
        if is.kind == FileKind::Directory {
            self.usage.directories += 1;
        } else if is.links > 1 && !self.seen.insert((is.fsid, is.fileid)) {
            return;
        } else {
            self.usage.files += 1;
        }
        self.usage.used = self.usage.used.saturating_add(is.used);
        if is.kind == FileKind::File {
            self.usage.size = self.usage.size.saturating_add(is.size);
        }
    }
}

impl Visitor for Measure<'_> {
    type Dir = Handle;

    async fn enter(&self, dir: &Handle) -> Result<Vec<Handle>> {
        let below = self.share.for_each_entry(dir, async |entry| {
            self.sums.lock().add(&entry);
            Ok((entry.attributes.kind == FileKind::Directory).then_some(entry.handle))
        });
        match below.await {
            Err(error) if matches!(error.kind(), Kind::Stale | Kind::NotFound) => Ok(Vec::new()),
            other => other,
        }
    }

    async fn leave(&self, _: &Handle) -> Result<bool> {
        Ok(true)
    }
}
