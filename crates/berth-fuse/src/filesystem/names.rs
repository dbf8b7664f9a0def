//! Names: finding, making, moving and removing them.

use std::sync::Arc;

use berth_nfs::{Attributes, Change, Create, Entry, FileKind, Handle, Name, Node as Special};
use bytes::Bytes;
use rustix::{fs::FileType, io::Errno};

use super::{Filesystem, Open, Outcome, Result};
use crate::{
    nodes::{Hidden, Node},
    patience::Failure,
    users::User,
    wire::{Answer, Arguments, Header, decode_device},
};

const NO_REPLACE: u32 = 1;
const O_EXCL: u32 = 0o200;
const O_TRUNC: u32 = 0o1000;
pub(super) const O_DSYNC: u32 = 0o10000;

impl Filesystem {
    pub(super) async fn lookup(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let name = from.name()?;
        let entry = self.find(&user, &dir, &name).await?;
        Ok(self.entry_outcome(&dir, &entry))
    }

    async fn find(&self, user: &User, dir: &Node, name: &Bytes) -> Result<Entry> {
        Ok(self.patience.ask(|| user.share.lookup(&dir.handle, name)).await?)
    }

    pub(super) async fn read_link(&self, header: &Header) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        let text = self.patience.ask(|| user.share.read_link(&node.handle)).await?;
        let mut body = Answer::default();
        body.bytes(&text);
        Ok(body.into())
    }

    pub(super) async fn symlink(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let (name, to) = (from.name()?, from.text()?);
        let change = Change::default();
        let made = self.patience.ask(|| user.share.symlink(&dir.handle, &name, &to, &change)).await;
        let is_link = |is: &Attributes| is.kind == FileKind::Symlink;
        let is_repeated = is_taken_again(&made);
        let made = self.made(&user, (&dir, &name), &change, made, is_link).await?;
        if is_repeated && self.patience.ask(|| user.share.read_link(&made.handle)).await? != to {
            return Err(Errno::EXIST);
        }
        Ok(self.entry_outcome(&dir, &made))
    }

    pub(super) async fn make_dir(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let bits = from.u32()?;
        from.skip(4)?;
        let (name, change) = (from.name()?, Change::mode(bits & 0o7777));
        let made = self.patience.ask(|| user.share.make_dir(&dir.handle, &name, &change)).await;
        let is_dir = |is: &Attributes| is.kind == FileKind::Directory;
        let made = self.made(&user, (&dir, &name), &change, made, is_dir).await?;
        Ok(self.entry_outcome(&dir, &made))
    }

    pub(super) async fn make_node(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let (bits, device) = (from.u32()?, decode_device(from.u32()?));
        from.skip(8)?;
        let (name, change) = (from.name()?, Change::mode(bits & 0o7777));
        let (kind, special) = match FileType::from_raw_mode(bits) {
            FileType::RegularFile => (FileKind::File, None),
            FileType::Fifo => (FileKind::Fifo, Some(Special::Fifo)),
            FileType::Socket => (FileKind::Socket, Some(Special::Socket)),
            FileType::BlockDevice => (FileKind::Block, Some(Special::Block(device.0, device.1))),
            FileType::CharacterDevice => (FileKind::Character, Some(Special::Character(device.0, device.1))),
            _ => return Err(Errno::INVAL),
        };
        let made = match special {
            None => self.patience.ask(|| user.share.create(&dir.handle, &name, Create::New, &change)).await,
            Some(special) => {
                self.patience.ask(|| user.share.make_node(&dir.handle, &name, special, &change)).await
            }
        };
        let is_device = matches!(kind, FileKind::Block | FileKind::Character);
        let is_ours = |is: &Attributes| is_new(is, kind, header.uid) && (!is_device || is.device == device);
        let made = self.made(&user, (&dir, &name), &change, made, is_ours).await?;
        Ok(self.entry_outcome(&dir, &made))
    }

    /// Creates a file and opens it.
    pub(super) async fn create(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let (flags, bits) = (from.u32()?, from.u32()?);
        from.skip(8)?;
        let (name, change) = (from.name()?, Change::mode(bits & 0o7777));
        let made = self.patience.ask(|| user.share.create(&dir.handle, &name, Create::New, &change)).await;
        let is_ours = |is: &Attributes| is_new(is, FileKind::File, header.uid);
        let entry = match self.made(&user, (&dir, &name), &change, made, is_ours).await {
            // Somebody else was faster, which is as well unless it must be ours.
            Err(Errno::EXIST) if flags & O_EXCL == 0 => self.open_existing(&user, &dir, &name, flags).await?,
            made => made?,
        };
        let mut outcome = self.entry_outcome(&dir, &entry);
        let node = self.nodes.get(outcome.counted[0])?;
        outcome.body.opened(self.keep(node, user, flags));
        Ok(outcome)
    }

    /// What a call made; one that was repeated may find its name taken by what it made itself, which is told by its
    /// looks.
    async fn made(
        &self,
        user: &User,
        (dir, name): (&Node, &Bytes),
        change: &Change,
        made: std::result::Result<Entry, Failure>,
        is_ours: impl FnOnce(&Attributes) -> bool,
    ) -> Result<Entry> {
        if !is_taken_again(&made) {
            return Ok(made?);
        }
        let mut there = self.find(user, dir, name).await?;
        if !is_ours(&there.attributes) {
            return Err(Errno::EXIST);
        }
        // The first attempt may have ended before its mode was set.
        if let Some(remaining) = change.remaining(&there.attributes) {
            there.attributes =
                self.patience.ask(|| user.share.set_attributes(&there.handle, &remaining)).await?;
        }
        Ok(there)
    }

    async fn open_existing(&self, user: &User, dir: &Node, name: &Bytes, flags: u32) -> Result<Entry> {
        let mut entry = self.find(user, dir, name).await?;
        if entry.attributes.kind != FileKind::File {
            return Err(Errno::EXIST);
        }
        self.may_open(user, &entry.handle, flags).await?;
        if flags & O_TRUNC != 0 {
            let empty = Change { size: Some(0), ..Change::default() };
            entry.attributes = self.patience.ask(|| user.share.set_attributes(&entry.handle, &empty)).await?;
        }
        Ok(entry)
    }

    /// Remembers an open file, and gives its number.
    pub(super) fn keep(&self, node: Arc<Node>, user: Arc<User>, flags: u32) -> u64 {
        node.opened();
        let number = self.number();
        let open = Open { node, user, durable: flags & O_DSYNC != 0 };
        self.files.lock().insert(number, Arc::new(open));
        number
    }

    pub(super) async fn link(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let file = self.nodes.get(from.u64()?)?;
        let name = from.name()?;
        let made = self.patience.ask(|| user.share.link(&file.handle, &dir.handle, &name)).await;
        match made {
            Err(Failure { errno: Errno::EXIST, repeated: true }) => {
                let there = self.find(&user, &dir, &name).await?;
                if there.handle != file.handle {
                    return Err(Errno::EXIST);
                }
            }
            made => made?,
        }
        let attributes = self.patience.ask(|| user.share.attributes(&file.handle)).await?;
        Ok(self.entry_outcome(&dir, &Entry { handle: file.handle.clone(), attributes }))
    }

    pub(super) async fn unlink(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let name = from.name()?;
        if !self.hide(&user, &dir, &name).await? {
            removed(self.patience.ask(|| user.share.remove(&dir.handle, &name)).await)?;
        }
        Ok(Outcome::default())
    }

    pub(super) async fn remove_dir(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let name = from.name()?;
        removed(self.patience.ask(|| user.share.remove_dir(&dir.handle, &name)).await)?;
        Ok(Outcome::default())
    }

    /// A server of NFS knows no open files, so one that is to lose its name while it is open here gets another one,
    /// which goes away at the last close. Returns whether that was necessary.
    async fn hide(&self, user: &Arc<User>, dir: &Node, name: &Bytes) -> Result<bool> {
        if self.files.lock().is_empty() {
            return Ok(false);
        }
        let entry = match self.find(user, dir, name).await {
            Err(Errno::NOENT) => return Ok(false),
            found => found?,
        };
        let Some(node) = self.nodes.find(&entry.handle).filter(|node| node.is_open()) else {
            return Ok(false);
        };
        // Another name is left, by which the server keeps it; one that hides already is somebody else's name.
        if entry.attributes.links > 1 {
            return Ok(false);
        }
        let hidden = format!(".nfs{:016x}{:08x}", entry.attributes.fileid, self.number());
        let hidden = Name::new(hidden).map_err(|_| Errno::INVAL)?;
        self.move_name(user, (&dir.handle, name), (&dir.handle, hidden.as_bytes())).await?;
        let hidden = Hidden { user: user.clone(), dir: dir.handle.clone(), name: hidden };
        if let Some(hidden) = node.hide(hidden) {
            self.remove_hidden(hidden).await?;
        }
        Ok(true)
    }

    pub(super) async fn remove_hidden(&self, hidden: Hidden) -> Result<()> {
        let Hidden { user, dir, name } = hidden;
        removed(self.patience.ask(|| user.share.remove(&dir, &name)).await)
    }

    pub(super) async fn rename(
        &self,
        header: &Header,
        from: &mut Arguments,
        flagged: bool,
    ) -> Result<Outcome> {
        let (dir, user) = self.about(header)?;
        let to = self.nodes.get(from.u64()?)?;
        let flags = if flagged { from.u32()? } else { 0 };
        if flagged {
            from.skip(4)?;
        }
        let (name, new_name) = (from.name()?, from.name()?);
        match flags {
            0 => {
                // What is replaced is hidden if it is open, unless it is the same file, which stays.
                let moved = self.find(&user, &dir, &name).await?;
                let replaced = self.nodes.find(&moved.handle).is_none_or(|node| !node.is_open());
                if replaced || !self.is_same(&user, &to, &new_name, &moved.handle).await? {
                    self.hide(&user, &to, &new_name).await?;
                }
                self.move_name(&user, (&dir.handle, &name), (&to.handle, &new_name)).await?;
            }
            NO_REPLACE => self.rename_to_nothing(&user, (&dir, &name), (&to, &new_name)).await?,
            _ => return Err(Errno::INVAL),
        }
        Ok(Outcome::default())
    }

    async fn is_same(&self, user: &User, dir: &Node, name: &Bytes, handle: &Handle) -> Result<bool> {
        match self.find(user, dir, name).await {
            Ok(entry) => Ok(entry.handle == *handle),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    async fn move_name(&self, user: &User, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        match self.patience.ask(|| user.share.rename(from.0, from.1, to.0, to.1)).await {
            Err(Failure { errno: Errno::NOENT, repeated: true }) => {
                self.patience.ask(|| user.share.lookup(to.0, to.1)).await?;
                Ok(())
            }
            renamed => Ok(renamed?),
        }
    }

    /// NFS only knows how to replace. A second name is made only if it is free, though; directories have but one.
    async fn rename_to_nothing(
        &self,
        user: &User,
        (dir, name): (&Node, &Bytes),
        (to, new_name): (&Node, &Bytes),
    ) -> Result<()> {
        let entry = self.find(user, dir, name).await?;
        if entry.attributes.kind != FileKind::Directory {
            let mut linked = self.patience.ask(|| user.share.link(&entry.handle, &to.handle, new_name)).await;
            if is_taken_again(&linked) && self.is_same(user, to, new_name, &entry.handle).await? {
                linked = Ok(());
            }
            match linked {
                Ok(()) => {
                    return removed(self.patience.ask(|| user.share.remove(&dir.handle, name)).await);
                }
                Err(Failure { errno: Errno::OPNOTSUPP | Errno::PERM | Errno::MLINK, .. }) => {}
                Err(failure) => return Err(failure.into()),
            }
        }
        match self.find(user, to, new_name).await {
            Ok(_) => Err(Errno::EXIST),
            Err(Errno::NOENT) => self.move_name(user, (&dir.handle, name), (&to.handle, new_name)).await,
            Err(errno) => Err(errno),
        }
    }
}

/// Whether a name was taken at a second attempt, perhaps by the first.
fn is_taken_again<T>(outcome: &std::result::Result<T, Failure>) -> bool {
    matches!(outcome, Err(Failure { errno: Errno::EXIST, repeated: true }))
}

/// Whether a file looks as if this user had just made it.
fn is_new(is: &Attributes, kind: FileKind, uid: u32) -> bool {
    is.kind == kind && is.size == 0 && is.uid == uid
}

/// What is gone at a second attempt was removed by the first.
fn removed(outcome: std::result::Result<(), Failure>) -> Result<()> {
    match outcome {
        Err(Failure { errno: Errno::NOENT, repeated: true }) => Ok(()),
        other => Ok(other?),
    }
}
