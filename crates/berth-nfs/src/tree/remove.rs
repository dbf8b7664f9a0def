//! Removes a tree of files and directories from a server.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::{
    ENTRIES, TRIES,
    walk::{Visitor, walk},
};
use crate::{Cookie, DirEntry, FileKind, Handle, Kind, Name, Reason, Result, Share, status::Fault};

/// Somebody who fills a directory while it is emptied wins after so many rounds.
const ROUNDS: u32 = 16;

impl Share {
    /// Removes a name with all below it; one that is not there is removed already. Can be repeated after a failure.
    pub async fn remove_tree(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let top = match self.lookup(dir, name.as_ref()).await {
            Ok(top) => top,
            Err(error) if error.kind() == Kind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let name =
            Name::new(name).map_err(|invalid| Fault::Other(Reason::new(Kind::Invalid, invalid.to_string())));
        let name = self.with_context(name, || "remove a tree".to_owned())?;
        if top.attributes.kind != FileKind::Directory {
            return self.ensure_removed(dir, &name).await;
        }
        walk(self, &Remove { share: self }, Doomed::new(dir.clone(), name, top.handle)).await
    }

    async fn ensure_removed(&self, dir: &Handle, name: &Name) -> Result<()> {
        gone(|| self.remove(dir, name)).await
    }
}

/// Removes until it is certain that it is gone.
async fn gone<F: Future<Output = Result<()>>>(mut remove: impl FnMut() -> F) -> Result<()> {
    let mut tries = 1;
    loop {
        match remove().await {
            Err(error) if error.kind() == Kind::NotFound => return Ok(()),
            Err(error) if error.kind() == Kind::Interrupted && tries < TRIES => tries += 1,
            other => return other,
        }
    }
}

struct Remove<'a> {
    share: &'a Share,
}

struct Doomed {
    parent: Handle,
    name: Name,
    handle: Handle,
    /// Not all of it has been seen.
    more: AtomicBool,
    refilled: AtomicU32,
}

impl Doomed {
    fn new(parent: Handle, name: Name, handle: Handle) -> Self {
        Self { parent, name, handle, more: AtomicBool::new(false), refilled: AtomicU32::new(0) }
    }
}

impl Remove<'_> {
    /// Removes a file, or returns a directory to be emptied first.
    async fn remove(&self, dir: &Handle, entry: DirEntry) -> Result<Option<Doomed>> {
        if entry.attributes.kind == FileKind::Directory {
            return Ok(Some(Doomed::new(dir.clone(), entry.name, entry.handle)));
        }
        self.share.ensure_removed(dir, &entry.name).await?;
        Ok(None)
    }
}

impl Visitor for Remove<'_> {
    type Dir = Doomed;

    /// Treats pages from the beginning while they hold only files, since a position means little in a directory that
    /// shrinks.
    async fn enter(&self, dir: &Doomed) -> Result<Vec<Doomed>> {
        let mut first: Option<Name> = None;
        loop {
            let page = match self.share.read_dir(&dir.handle, Cookie::default()).await {
                Ok(page) => page,
                // Somebody else removed it.
                Err(error) if matches!(error.kind(), Kind::NotFound | Kind::Stale) => return Ok(Vec::new()),
                Err(error) => return Err(error),
            };
            let now = page.entries.first().map(|entry| entry.name.clone());
            if now.is_some() && now == first {
                let reason = Reason::new(Kind::Protocol, "the server still lists what it has removed");
                return self.share.with_context(Err(Fault::Other(reason)), || {
                    format!("empty the directory {:?}", dir.name)
                });
            }
            first = now;
            let below: Vec<Doomed> = stream::iter(page.entries)
                .map(|entry| self.remove(&dir.handle, entry))
                .buffer_unordered(ENTRIES)
                .try_filter_map(async |doomed| Ok(doomed))
                .try_collect()
                .await?;
            dir.more.store(page.next.is_some(), Ordering::Relaxed);
            if !below.is_empty() || page.next.is_none() {
                return Ok(below);
            }
        }
    }

    async fn leave(&self, dir: &Doomed) -> Result<bool> {
        if dir.more.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match gone(|| self.share.remove_dir(&dir.parent, &dir.name)).await {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == Kind::NotEmpty => {
                if dir.refilled.fetch_add(1, Ordering::Relaxed) < ROUNDS { Ok(false) } else { Err(error) }
            }
            Err(error) => Err(error),
        }
    }
}
