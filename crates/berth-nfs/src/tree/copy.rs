//! Copying a tree.
//!
//! Everything gets its times last, when all else about it is right: whatever has them already was finished by an
//! earlier run and is skipped.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use tokio::sync::{OnceCell, Semaphore};

use super::walk::{Visitor, walk};
use crate::{
    Attributes, Change, DirEntry, Entry, FileKind, Handle, Kind, Name, Node, Result, Share, TimeChange,
};

/// Mebibytes on their way at the same time, of all files together.
const CHUNKS: usize = 16;

/// What a copy did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Files, links and special files that were made.
    pub entries: u64,
    /// Those that were equal already.
    pub skipped: u64,
    /// Bytes copied, by the server or through us.
    pub bytes: u64,
}

impl Share {
    /// Copies a directory's content, owner, mode, times and extended attributes (where both sides have them) into
    /// directory `to` of the same or another share. What is equal there already is left alone, so that it can be
    /// repeated after a failure; what else is there stays.
    pub async fn copy_tree(&self, from: &Handle, other: &Share, to: &Handle) -> Result<Copied> {
        let copy = Copy {
            from: self,
            to: other,
            names: Mutex::default(),
            chunks: Semaphore::new(CHUNKS),
            entries: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        let like = self.attributes(from).await?;
        walk(self, &copy, Pair { from: from.clone(), like, to: to.clone() }).await?;
        Ok(Copied {
            entries: copy.entries.into_inner(),
            skipped: copy.skipped.into_inner(),
            bytes: copy.bytes.into_inner(),
        })
    }
}

/// Filesystem and number.
type Inode = ((u64, u64), u64);

pub(super) struct Copy<'a> {
    pub(super) from: &'a Share,
    pub(super) to: &'a Share,
    /// Files with several names: the copy of each, once it is there.
    names: Mutex<HashMap<Inode, Arc<OnceCell<Handle>>>>,
    /// Bounds what is in memory.
    pub(super) chunks: Semaphore,
    entries: AtomicU64,
    skipped: AtomicU64,
    pub(super) bytes: AtomicU64,
}

pub(super) struct Pair {
    from: Handle,
    like: Attributes,
    to: Handle,
}

impl Visitor for Copy<'_> {
    type Dir = Pair;

    async fn enter(&self, dir: &Pair) -> Result<Vec<Pair>> {
        self.from.for_each_entry(&dir.from, |entry| self.copy(&dir.to, entry)).await
    }

    async fn leave(&self, dir: &Pair) -> Result<bool> {
        self.copy_xattrs(&dir.from, &dir.to).await?;
        self.finish(&dir.to, &dir.like).await?;
        Ok(true)
    }
}

impl Copy<'_> {
    /// Copies one entry; what is below a directory is left to the walk.
    async fn copy(&self, to: &Handle, entry: DirEntry) -> Result<Option<Pair>> {
        let (name, like) = (&entry.name, &entry.attributes);
        if like.kind == FileKind::Directory {
            let to = self.copy_dir(to, name).await?;
            return Ok(Some(Pair { from: entry.handle, like: entry.attributes, to }));
        }
        if like.links < 2 {
            self.copy_new(to, &entry).await?;
            return Ok(None);
        }
        let cell = {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            names.entry((like.fsid, like.fileid)).or_default().clone()
        };
        let mut first = false;
        let copy = cell
            .get_or_try_init(|| async {
                first = true;
                self.copy_new(to, &entry).await
            })
            .await?;
        if !first {
            self.link(copy, to, name).await?;
        }
        Ok(None)
    }

    async fn copy_dir(&self, to: &Handle, name: &Name) -> Result<Handle> {
        loop {
            let (entry, _) = self.to.ensure_dir(to, name, &Change::mode(0o700)).await?;
            if entry.attributes.kind == FileKind::Directory {
                return Ok(entry.handle);
            }
            self.to.remove_tree(to, name).await?;
        }
    }

    /// Gives a copy another name.
    async fn link(&self, copy: &Handle, to: &Handle, name: &Name) -> Result<()> {
        loop {
            match self.to.link(copy, to, name).await {
                Ok(()) => break,
                Err(error) if matches!(error.kind(), Kind::Exists | Kind::Interrupted) => {}
                Err(error) => return Err(error),
            }
            if let Some(found) = self.to.find(to, name).await? {
                let wanted = self.to.attributes(copy).await?;
                if (found.attributes.fsid, found.attributes.fileid) == (wanted.fsid, wanted.fileid) {
                    self.skipped.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                self.to.remove_tree(to, name).await?;
            }
        }
        self.entries.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Copies something that is not a directory, unless it is there.
    async fn copy_new(&self, to: &Handle, entry: &DirEntry) -> Result<Handle> {
        let (name, like) = (&entry.name, &entry.attributes);
        let text = match like.kind {
            FileKind::Symlink => Some(self.from.read_link(&entry.handle).await?),
            _ => None,
        };
        if let Some(found) = self.to.find(to, name).await? {
            if self.is_copy(&found, like, text.as_ref()).await? {
                self.skipped.fetch_add(1, Ordering::Relaxed);
                return Ok(found.handle);
            }
            self.to.remove_tree(to, name).await?;
        }
        let handle = self.make(to, entry, text).await?;
        self.entries.fetch_add(1, Ordering::Relaxed);
        Ok(handle)
    }

    async fn make(&self, to: &Handle, entry: &DirEntry, text: Option<Bytes>) -> Result<Handle> {
        let (name, like) = (&entry.name, &entry.attributes);
        let node = match (like.kind, text) {
            (FileKind::Symlink, Some(text)) => {
                let made = self.to.symlink(to, name, &text, &Change::default()).await?;
                self.finish(&made.handle, like).await?;
                return Ok(made.handle);
            }
            (FileKind::Fifo, _) => Node::Fifo,
            (FileKind::Socket, _) => Node::Socket,
            (FileKind::Block, _) => Node::Block(like.device.0, like.device.1),
            (FileKind::Character, _) => Node::Character(like.device.0, like.device.1),
            (FileKind::File | FileKind::Directory | FileKind::Symlink, _) => {
                return self.copy_file(to, entry).await;
            }
        };
        let made = self.to.make_node(to, name, node, &Change::mode(0o600)).await?;
        self.finish(&made.handle, like).await?;
        Ok(made.handle)
    }

    /// Whether an earlier run finished this.
    async fn is_copy(&self, found: &Entry, like: &Attributes, text: Option<&Bytes>) -> Result<bool> {
        let is = &found.attributes;
        let same = is.kind == like.kind
            && (is.uid, is.gid) == (like.uid, like.gid)
            && (is.size == like.size || is.kind != FileKind::File)
            // A symlink has no mode, and servers set its times or do not; its text tells all.
            && ((is.mode, is.modified) == (like.mode, like.modified) || is.kind == FileKind::Symlink)
            && (is.device == like.device || !matches!(is.kind, FileKind::Block | FileKind::Character));
        match text {
            Some(text) if same => Ok(self.to.read_link(&found.handle).await? == *text),
            _ => Ok(same),
        }
    }

    /// Gives owner, mode and times.
    pub(super) async fn finish(&self, to: &Handle, like: &Attributes) -> Result<()> {
        let mode = (like.kind != FileKind::Symlink).then_some(like.mode);
        let times = Change {
            accessed: Some(TimeChange::At(like.accessed)),
            modified: Some(TimeChange::At(like.modified)),
            ..Change::default()
        };
        let all = Change { mode, uid: Some(like.uid), gid: Some(like.gid), ..times.clone() };
        let is = self.to.set_attributes(to, &all).await?;
        // A change of owner takes setuid and setgid away, on some servers after they were set.
        if mode.is_some_and(|mode| mode != is.mode) {
            self.to.set_attributes(to, &Change { mode, ..times }).await?;
        }
        Ok(())
    }

    pub(super) async fn copy_xattrs(&self, from: &Handle, to: &Handle) -> Result<()> {
        for name in self.from.xattrs(from).await?.unwrap_or_default() {
            if let Some(value) = self.from.xattr(from, &name).await?
                && self.to.set_xattr(to, &name, value).await?.is_none()
            {
                return Ok(());
            }
        }
        Ok(())
    }
}
