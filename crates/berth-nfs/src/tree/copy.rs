//! Copying a tree.
//!
//! Everything gets its times last, when all else about it is right: whatever has them already was finished by an
//! earlier run and is skipped.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, Semaphore};

use super::{
    ENTRIES, TreeEntry,
    walk::{Visitor, walk},
};
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
    /// repeated after a failure; what else is there is removed. What goes away meanwhile is left out.
    pub async fn copy_tree(&self, from: &Handle, other: &Share, to: &Handle) -> Result<Copied> {
        let copy = Copy {
            from: self,
            to: other,
            names: Mutex::default(),
            adopted: Mutex::default(),
            chunks: Semaphore::new(CHUNKS),
            entries: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        let top = Entry { handle: from.clone(), attributes: self.attributes(from).await? };
        walk(self, &copy, Pair { from: TreeEntry::top(top), to: to.clone(), is_new: false }).await?;
        Ok(Copied {
            entries: copy.entries.into_inner(),
            skipped: copy.skipped.into_inner(),
            bytes: copy.bytes.into_inner(),
        })
    }
}

/// A file of the source: its filesystem and its number there.
type Inode = ((u64, u64), u64);

fn inode(of: &Attributes) -> Inode {
    (of.fsid, of.fileid)
}

pub(super) struct Copy<'a> {
    pub(super) from: &'a Share,
    pub(super) to: &'a Share,
    /// Files with several names: the copy of each, once it is there.
    names: Mutex<HashMap<Inode, Arc<OnceCell<Handle>>>>,
    /// What an earlier run left with several names, and whose copy each is now: two files that were one then must not
    /// stay one.
    adopted: Mutex<HashMap<Inode, Inode>>,
    /// Bounds what is in memory.
    pub(super) chunks: Semaphore,
    entries: AtomicU64,
    skipped: AtomicU64,
    pub(super) bytes: AtomicU64,
}

pub(super) struct Pair {
    from: TreeEntry,
    to: Handle,
    /// Made by this run, so that nothing of an earlier one is in it.
    is_new: bool,
}

impl Visitor for Copy<'_> {
    type Dir = Pair;

    async fn enter(&self, dir: &Pair) -> Result<Vec<Pair>> {
        let entered = self.from.at(&dir.from, |from| self.copy_entries(from, dir)).await?;
        if let Some((_, Some(below))) = entered {
            return Ok(below);
        }
        // It went away: whatever was copied of it is no more either.
        self.keep_only(&HashSet::new(), &dir.to).await?;
        Ok(Vec::new())
    }

    async fn leave(&self, dir: &Pair) -> Result<bool> {
        let copied =
            self.from.at(&dir.from, |from| async move { self.copy_xattrs(from.handle(), &dir.to).await });
        copied.await?;
        self.finish(&dir.to, dir.from.attributes()).await?;
        Ok(true)
    }
}

impl Copy<'_> {
    /// Copies what is in a directory, unless that is something else by now.
    async fn copy_entries(&self, from: TreeEntry, dir: &Pair) -> Result<Option<Vec<Pair>>> {
        if from.attributes().kind != FileKind::Directory {
            return Ok(None);
        }
        // First, since it may take the room that the rest needs.
        if !dir.is_new {
            self.prune(from.handle(), &dir.to).await?;
        }
        let copy = |entry: DirEntry| self.copy(&dir.to, entry.name.clone(), from.below(entry));
        self.from.for_each_entry(from.handle(), copy).await.map(Some)
    }

    /// Removes what an earlier run copied and the original does not have any more.
    async fn prune(&self, from: &Handle, to: &Handle) -> Result<()> {
        let names = self.from.for_each_entry(from, async |entry| Ok(Some(entry.name))).await?;
        self.keep_only(&names.into_iter().collect(), to).await
    }

    async fn keep_only(&self, names: &HashSet<Name>, to: &Handle) -> Result<()> {
        let is_other = async |entry: DirEntry| Ok((!names.contains(&entry.name)).then_some(entry.name));
        let others = self.to.for_each_entry(to, is_other).await?;
        stream::iter(others)
            .map(|name| async move { self.to.remove_tree(to, name).await })
            .buffer_unordered(ENTRIES)
            .try_for_each(async |()| Ok(()))
            .await
    }

    /// Copies one entry, or what has its name by then; what is below a directory is left to the walk.
    async fn copy(&self, to: &Handle, name: Name, from: TreeEntry) -> Result<Option<Pair>> {
        let copied = self.from.at(&from, |from| self.copy_found(to, &name, from)).await?;
        if let Some((_, below)) = copied {
            return Ok(below);
        }
        // It went away, and what was copied of it goes, too.
        self.to.remove_tree(to, &name).await?;
        Ok(None)
    }

    async fn copy_found(&self, to: &Handle, name: &Name, from: TreeEntry) -> Result<Option<Pair>> {
        let like = from.attributes();
        if like.kind == FileKind::Directory {
            let (to, is_new) = self.copy_dir(to, name).await?;
            return Ok(Some(Pair { from, to, is_new }));
        }
        if like.links < 2 {
            self.copy_new(to, name, &from).await?;
            return Ok(None);
        }
        let cell = {
            let mut names = self.names.lock();
            names.entry(inode(like)).or_default().clone()
        };
        let mut first = false;
        let copy = cell
            .get_or_try_init(|| async {
                first = true;
                self.copy_new(to, name, &from).await
            })
            .await?;
        if !first {
            self.link(copy, to, name).await?;
        }
        Ok(None)
    }

    /// Makes a directory, and returns whether it is new.
    async fn copy_dir(&self, to: &Handle, name: &Name) -> Result<(Handle, bool)> {
        loop {
            let (entry, is_new) = self.to.ensure_dir(to, name, &Change::mode(0o700)).await?;
            if entry.attributes.kind == FileKind::Directory {
                return Ok((entry.handle, is_new));
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
                if inode(&found.attributes) == inode(&wanted) {
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
    async fn copy_new(&self, to: &Handle, name: &Name, from: &TreeEntry) -> Result<Handle> {
        let like = from.attributes();
        let text = match like.kind {
            FileKind::Symlink => Some(self.from.read_link(from.handle()).await?),
            _ => None,
        };
        if let Some(found) = self.to.find(to, name).await? {
            if self.is_copy(&found, like, text.as_ref()).await? && self.adopt(&found.attributes, like) {
                self.skipped.fetch_add(1, Ordering::Relaxed);
                return Ok(found.handle);
            }
            self.to.remove_tree(to, name).await?;
        }
        let handle = self.make(to, name, from, text).await?;
        self.entries.fetch_add(1, Ordering::Relaxed);
        Ok(handle)
    }

    /// Takes what an earlier run left as the copy of a file, unless it is another's already.
    fn adopt(&self, found: &Attributes, like: &Attributes) -> bool {
        if found.links < 2 {
            return true;
        }
        let mut adopted = self.adopted.lock();
        *adopted.entry(inode(found)).or_insert_with(|| inode(like)) == inode(like)
    }

    async fn make(&self, to: &Handle, name: &Name, from: &TreeEntry, text: Option<Bytes>) -> Result<Handle> {
        let like = from.attributes();
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
                return self.copy_file(to, name, from).await;
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
            let value = match self.from.xattr(from, &name).await {
                // Removed meanwhile.
                Err(error) if error.kind() == Kind::NotFound => continue,
                value => value?,
            };
            if let Some(value) = value
                && self.to.set_xattr(to, &name, value).await?.is_none()
            {
                return Ok(());
            }
        }
        Ok(())
    }
}
