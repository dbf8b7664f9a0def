//! Finding, making, changing and removing files.

use bytes::Bytes;

use super::{
    attributes::{self, Bitmap, ReceivedAttributes, write_change, write_is_directory},
    compound::{ANONYMOUS, Compound, op},
    open::skip_change,
    session::Session,
};
use crate::{
    Attributes, Change, Cookie, DirEntry, Entry, Handle, Name, Node, Space, Target,
    share::{Limits, Listed, Listing},
    status::{Fault, Status},
    xdr::Malformed,
};

const LONGEST_NAME: usize = 1024;
const LONGEST_LINK: usize = 4096;
const DIRECTORY: u32 = 2;
const BLOCK: u32 = 3;
const CHARACTER: u32 = 4;
const SYMLINK: u32 = 5;
const SOCKET: u32 = 6;
const FIFO: u32 = 7;

impl Session {
    /// Finds the root of a share.
    pub(crate) async fn root(&self, target: &Target) -> Result<(Entry, Limits), Fault> {
        // Servers bound the number of operations, so a long path takes several requests.
        const AT_ONCE: usize = 8;
        let names: Vec<&str> = target.components().collect();
        let mut at = None;
        let mut chunks = names.chunks(AT_ONCE);
        loop {
            let names = chunks.next().unwrap_or_default();
            let mut compound = Compound::default();
            match &at {
                Some(handle) => compound.put(handle),
                None => drop(compound.op(op::PUTROOTFH)),
            }
            for name in names {
                compound.lookup(name.as_bytes());
            }
            compound.op(op::GETFH);
            compound.get_attributes(attributes::ROOT);
            let mut answer = self.call(compound).await?;
            answer.take(if at.is_some() { op::PUTFH } else { op::PUTROOTFH })?;
            for _ in names {
                answer.take(op::LOOKUP)?;
            }
            let handle = attributes::handle(answer.take(op::GETFH)?)?;
            let received = answer.received_attributes(attributes::ROOT)?;
            if chunks.len() > 0 {
                at = Some(handle);
                continue;
            }
            let (request, response) = self.room();
            let read = received.max_read.unwrap_or(u64::MAX).min(response);
            let write = received.max_write.unwrap_or(u64::MAX).min(request);
            return Ok((Entry { handle, attributes: received.attributes()? }, Limits::new(read, write)));
        }
    }

    pub(crate) async fn lookup(&self, dir: &Handle, name: &[u8]) -> Result<Entry, Fault> {
        let mut compound = Compound::on(dir);
        compound.lookup(name);
        compound.get_entry();
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.take(op::LOOKUP)?;
        answer.entry()
    }

    async fn fetch_attributes(&self, file: &Handle, asked: Bitmap) -> Result<ReceivedAttributes, Fault> {
        let mut compound = Compound::on(file);
        compound.get_attributes(asked);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.received_attributes(asked)
    }

    pub(crate) async fn attributes(&self, file: &Handle) -> Result<Attributes, Fault> {
        self.fetch_attributes(file, attributes::FILE).await?.attributes()
    }

    pub(crate) async fn access(&self, file: &Handle, wanted: u32) -> Result<u32, Fault> {
        let mut compound = Compound::on(file);
        compound.op(op::ACCESS).u32(wanted);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        let results = answer.take(op::ACCESS)?;
        // What the server does not know is not refused.
        let supported = results.u32()?;
        Ok((results.u32()? | !supported) & wanted)
    }

    pub(crate) async fn space(&self, file: &Handle) -> Result<Space, Fault> {
        Ok(self.fetch_attributes(file, attributes::SPACE).await?.space)
    }

    pub(crate) async fn set_attributes(&self, file: &Handle, change: &Change) -> Result<Attributes, Fault> {
        let mut compound = Compound::on(file);
        write_change(compound.op(op::SETATTR).fixed(&ANONYMOUS), change);
        compound.get_attributes(attributes::FILE);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        Bitmap::read(answer.take(op::SETATTR)?)?;
        answer.attributes()
    }

    /// Sends what makes something that is not a file.
    async fn make(&self, mut compound: Compound) -> Result<Entry, Fault> {
        compound.get_entry();
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        let results = answer.take(op::CREATE)?;
        skip_change(results)?;
        Bitmap::read(results)?;
        answer.entry()
    }

    pub(crate) async fn make_dir(&self, dir: &Handle, name: &[u8], change: &Change) -> Result<Entry, Fault> {
        let mut compound = Compound::on(dir);
        write_change(compound.op(op::CREATE).u32(DIRECTORY).opaque(name), change);
        self.make(compound).await
    }

    pub(crate) async fn symlink(
        &self,
        dir: &Handle,
        name: &[u8],
        to: &[u8],
        change: &Change,
    ) -> Result<Entry, Fault> {
        let mut compound = Compound::on(dir);
        write_change(compound.op(op::CREATE).u32(SYMLINK).opaque(to).opaque(name), change);
        self.make(compound).await
    }

    pub(crate) async fn make_node(
        &self,
        dir: &Handle,
        name: &[u8],
        node: Node,
        change: &Change,
    ) -> Result<Entry, Fault> {
        let mut compound = Compound::on(dir);
        let arguments = compound.op(op::CREATE);
        match node {
            Node::Block(major, minor) => arguments.u32(BLOCK).u32(major).u32(minor),
            Node::Character(major, minor) => arguments.u32(CHARACTER).u32(major).u32(minor),
            Node::Socket => arguments.u32(SOCKET),
            Node::Fifo => arguments.u32(FIFO),
        };
        write_change(arguments.opaque(name), change);
        self.make(compound).await
    }

    pub(crate) async fn link(&self, file: &Handle, dir: &Handle, name: &[u8]) -> Result<(), Fault> {
        let mut compound = Compound::on(file);
        compound.op(op::SAVEFH);
        compound.put(dir);
        compound.op(op::LINK).opaque(name);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.take(op::SAVEFH)?;
        answer.take(op::PUTFH)?;
        answer.take(op::LINK).map(drop)
    }

    pub(crate) async fn read_link(&self, link: &Handle) -> Result<Bytes, Fault> {
        let mut compound = Compound::on(link);
        compound.op(op::READLINK);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        Ok(Bytes::copy_from_slice(&answer.take(op::READLINK)?.opaque(LONGEST_LINK)?))
    }

    pub(crate) async fn remove(&self, dir: &Handle, name: &[u8]) -> Result<(), Fault> {
        self.remove_if(dir, name, op::NVERIFY).await
    }

    pub(crate) async fn remove_dir(&self, dir: &Handle, name: &[u8]) -> Result<(), Fault> {
        self.remove_if(dir, name, op::VERIFY).await
    }

    /// REMOVE takes files and directories alike, so the request first makes sure which it is.
    async fn remove_if(&self, dir: &Handle, name: &[u8], verify: u32) -> Result<(), Fault> {
        let mut compound = Compound::on(dir);
        compound.lookup(name);
        write_is_directory(compound.op(verify));
        compound.put(dir);
        compound.op(op::REMOVE).opaque(name);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.take(op::LOOKUP)?;
        answer.take(verify)?;
        answer.take(op::PUTFH)?;
        answer.take(op::REMOVE).map(drop)
    }

    pub(crate) async fn rename(
        &self,
        from: &Handle,
        name: &[u8],
        to: &Handle,
        new_name: &[u8],
    ) -> Result<(), Fault> {
        let mut compound = Compound::on(from);
        compound.op(op::SAVEFH);
        compound.put(to);
        compound.op(op::RENAME).opaque(name).opaque(new_name);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.take(op::SAVEFH)?;
        answer.take(op::PUTFH)?;
        answer.take(op::RENAME).map(drop)
    }

    pub(crate) async fn read_dir(&self, dir: &Handle, cookie: Cookie, size: u32) -> Result<Listing, Fault> {
        let mut compound = Compound::on(dir);
        let arguments = compound.op(op::READDIR);
        arguments.u64(cookie.position).fixed(&cookie.verifier).u32(size).u32(size);
        attributes::ENTRY.write(arguments);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        let results = match answer.take(op::READDIR) {
            // The verifier is no longer that of the directory.
            Err(Fault::Status(Status::NOT_SAME)) => return Err(Fault::Status(Status::BAD_COOKIE)),
            other => other?,
        };
        let verifier = results.fixed()?;
        let mut listing = Listing::default();
        let mut position = 0;
        while results.bool()? {
            position = results.u64()?;
            let name = results.opaque(LONGEST_NAME)?;
            let received = ReceivedAttributes::read(results, attributes::ENTRY)?;
            // They do not belong here, but servers have been seen to list them.
            if matches!(name.as_ref(), b"." | b"..") {
                continue;
            }
            let name = Name::new(&name).map_err(|_| Malformed("a directory holds an impossible name"))?;
            listing.entries.push(listed(name, received)?);
        }
        if !results.bool()? {
            if position == 0 {
                return Err(Fault::Malformed("a page of a directory is empty though more is to come"));
            }
            listing.next = Some(Cookie { position, verifier });
        }
        Ok(listing)
    }
}

fn listed(name: Name, mut received: ReceivedAttributes) -> Result<Listed, Fault> {
    match (received.error, received.handle.take()) {
        (None, Some(handle)) => {
            Ok(Listed::Whole(DirEntry { name, handle, attributes: received.attributes()? }))
        }
        // It went away while the server was reading; the lookup that follows will show it.
        (Some(Status::NO_ENTRY) | None, _) => Ok(Listed::Named(name)),
        (Some(error), _) => Err(Fault::Status(error)),
    }
}
