//! Content: a write is at the server when it returns, and on the server's disk when the file is synced or closed.
//!
//! What the server has only in its memory is kept here, too, and written again if the server restarts meanwhile.

use std::sync::{Arc, atomic::Ordering};

use berth_nfs::{Handle, access};
use bytes::Bytes;
use rustix::io::Errno;

use super::{Filesystem, Outcome, Result};
use crate::{
    nodes::{Node, Part},
    patience::{errno, is_absence},
    users::{User, is_exiting},
    wire::{Answer, Arguments, Header},
};

/// So much of one file is kept before it is brought to the server's disk.
const MOST_OF_ONE: usize = 8 << 20;
/// So many writes to one file, which may be small.
const MOST_PARTS: usize = 4096;
/// So much of all files.
const MOST_OF_ALL: usize = 64 << 20;
/// A server that restarts so often within one sync has something else to do.
const MOST_REPEATS: u32 = 8;

const ACCESS_MODE: u32 = 3;
const READ_ONLY: u32 = 0;
const WRITE_ONLY: u32 = 1;
/// The kernel's mark of a file that is opened to be run.
const TO_EXECUTE: u32 = 0x20;

impl Filesystem {
    /// Whether the server lets the user open a file like this.
    pub(super) async fn may_open(&self, user: &User, file: &Handle, flags: u32) -> Result<()> {
        let wanted = match flags & ACCESS_MODE {
            READ_ONLY if flags & TO_EXECUTE != 0 => access::EXECUTE,
            READ_ONLY => access::READ,
            WRITE_ONLY => access::MODIFY,
            _ => access::READ | access::MODIFY,
        };
        let granted = self.patience.ask(|| user.share.access(file, wanted)).await?;
        if granted == wanted { Ok(()) } else { Err(Errno::ACCESS) }
    }

    pub(super) async fn open(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        let flags = from.u32()?;
        self.may_open(&user, &node.handle, flags).await?;
        // Whoever opens a file sees what was there when somebody else closed it.
        let attributes = self.patience.ask(|| user.share.attributes(&node.handle)).await?;
        let outdated = node.note_attributes(&attributes).then_some(node.id);
        let mut body = Answer::default();
        body.opened(self.keep(node, user, flags));
        Ok(Outcome { body, counted: Vec::new(), outdated })
    }

    pub(super) async fn read(&self, from: &mut Arguments) -> Result<Outcome> {
        let open = self.open_file(from.u64()?)?;
        let (offset, size) = (from.u64()?, from.u32()?);
        let share = &open.user.share;
        let mut body = Answer::default();
        loop {
            let got = u32::try_from(body.len()).map_err(|_| Errno::IO)?;
            let at = offset + u64::from(got);
            let (data, end) = self.patience.ask(|| share.read(&open.node.handle, at, size - got)).await?;
            body.bytes(&data);
            if end || data.is_empty() || body.len() >= size as usize {
                return Ok(body.into());
            }
        }
    }

    pub(super) async fn write(&self, from: &mut Arguments) -> Result<Outcome> {
        let open = self.open_file(from.u64()?)?;
        let (offset, size) = (from.u64()?, from.u32()?);
        from.skip(20)?;
        let data = from.bytes(size as usize)?;
        let full = {
            let _writing = open.node.gate.read().await;
            self.write_all(&open.user, &open.node.handle, offset, data.clone(), open.durable).await?;
            !open.durable && self.remember(&open.node, Part { user: open.user.clone(), offset, data })
        };
        if full {
            self.commit(&open.node).await?;
        }
        let mut body = Answer::default();
        body.u32(size).u32(0);
        Ok(body.into())
    }

    async fn write_all(
        &self,
        user: &User,
        file: &Handle,
        mut offset: u64,
        mut data: Bytes,
        durable: bool,
    ) -> Result<()> {
        while !data.is_empty() {
            let written = self.patience.ask(|| user.share.write(file, offset, data.clone(), durable)).await?;
            data = data.split_off((written as usize).min(data.len()));
            offset += u64::from(written);
        }
        Ok(())
    }

    /// Keeps what was written, and returns whether that is enough.
    fn remember(&self, node: &Node, part: Part) -> bool {
        let length = part.data.len();
        let mut unsaved = node.unsaved();
        unsaved.push(part);
        let all = self.kept.fetch_add(length, Ordering::Relaxed) + length;
        let own: usize = unsaved.iter().map(|part| part.data.len()).sum();
        own > MOST_OF_ONE || unsaved.len() > MOST_PARTS || all > MOST_OF_ALL
    }

    /// Brings what was written to the server's disk; an error is returned once, and the data it is about is lost.
    pub(super) async fn commit(&self, node: &Node) -> Result<()> {
        if node.unsaved().is_empty() {
            return Ok(());
        }
        let _alone = node.gate.write().await;
        let parts = node.unsaved().clone();
        let done = self.patience.bound(self.save(node, &parts)).await;
        node.unsaved().clear();
        node.suspect(false);
        self.kept.fetch_sub(parts.iter().map(|part| part.data.len()).sum(), Ordering::Relaxed);
        done
    }

    async fn save(&self, node: &Node, parts: &[Part]) -> Result<()> {
        let mut writers: Vec<&Arc<User>> = Vec::new();
        for part in parts {
            if !writers.iter().any(|user| Arc::ptr_eq(user, &part.user)) {
                writers.push(&part.user);
            }
        }
        let mut lost = node.is_suspect();
        for _ in 0..MOST_REPEATS {
            if lost {
                for part in parts {
                    self.write_all(&part.user, &node.handle, part.offset, part.data.clone(), false).await?;
                }
            }
            // The client forgets what it is to commit when it begins.
            node.suspect(true);
            lost = false;
            for user in &writers {
                match user.share.commit(&node.handle).await {
                    Ok(()) => {}
                    // The server was gone, or has restarted, and nobody knows what it had in its memory.
                    Err(error) if is_absence(&error) => lost = true,
                    Err(error) => return Err(errno(&error)),
                }
            }
            if !lost {
                return Ok(());
            }
        }
        Err(Errno::IO)
    }

    pub(super) async fn sync(&self, from: &mut Arguments) -> Result<Outcome> {
        let open = self.open_file(from.u64()?)?;
        self.commit(&open.node).await?;
        Ok(Outcome::default())
    }

    /// A descriptor is closed.
    pub(super) async fn flush(self: &Arc<Self>, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let open = self.open_file(from.u64()?)?;
        if is_exiting(header.pid) {
            // Nobody hears of it any more, and no signal would end the wait.
            let (this, node) = (self.clone(), open.node.clone());
            self.tasks.spawn(async move { this.commit(&node).await });
            return Ok(Outcome::default());
        }
        self.commit(&open.node).await?;
        Ok(Outcome::default())
    }

    /// The last descriptor is gone.
    pub(super) fn release(self: &Arc<Self>, from: &mut Arguments) -> Result<Outcome> {
        let open = self.files.lock().remove(&from.u64()?).ok_or(Errno::BADF)?;
        if let Some(hidden) = open.node.closed() {
            // Nobody waits for this, and no signal would end it.
            let this = self.clone();
            self.tasks.spawn(async move { this.remove_hidden(hidden).await });
        }
        Ok(Outcome::default())
    }

    pub(super) async fn allocate(&self, from: &mut Arguments) -> Result<Outcome> {
        let open = self.open_file(from.u64()?)?;
        let (offset, length, mode) = (from.u64()?, from.u64()?, from.u32()?);
        if mode != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let share = &open.user.share;
        let done = self.patience.ask(|| share.allocate(&open.node.handle, offset, length)).await?;
        done.map(|()| Outcome::default()).ok_or(Errno::OPNOTSUPP)
    }
}
