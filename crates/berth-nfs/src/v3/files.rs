//! The procedures, each as the call it serves.

use bytes::Bytes;

use super::{Client, procedure, wire};
use crate::{
    Attributes, Change, Cookie, Create, DirEntry, Entry, Handle, Node, Space,
    share::{Limits, Listed, Listing, Written},
    status::Fault,
    xdr::{Decoder, Encoder, Malformed},
};

/// Names in the answers of servers; [`crate::Name`] has the last word.
const LONGEST_NAME: usize = 1024;
const LONGEST_LINK: usize = 4096;

fn of(handle: &Handle) -> Encoder {
    let mut arguments = Encoder::default();
    arguments.opaque(handle.as_bytes());
    arguments
}

fn named(dir: &Handle, name: &[u8]) -> Encoder {
    let mut arguments = of(dir);
    arguments.opaque(name);
    arguments
}

impl Client {
    pub(crate) async fn limits(&self, root: &Handle) -> Result<Limits, Fault> {
        let mut answer = self.ask(procedure::FSINFO, of(root)).await?;
        wire::maybe_attributes(&mut answer)?;
        let read = answer.u32()?;
        answer.u64()?;
        let write = answer.u32()?;
        Ok(Limits::new(read.into(), write.into()))
    }

    pub(crate) async fn lookup(&self, dir: &Handle, name: &[u8]) -> Result<Entry, Fault> {
        let mut answer = self.ask(procedure::LOOKUP, named(dir, name)).await?;
        let handle = wire::handle(&mut answer)?;
        let attributes = wire::maybe_attributes(&mut answer)?;
        self.complete(handle, attributes).await
    }

    async fn complete(&self, handle: Handle, attributes: Option<Attributes>) -> Result<Entry, Fault> {
        let attributes = match attributes {
            Some(attributes) => attributes,
            None => self.attributes(&handle).await?,
        };
        Ok(Entry { handle, attributes })
    }

    pub(crate) async fn attributes(&self, file: &Handle) -> Result<Attributes, Fault> {
        Ok(wire::attributes(&mut self.ask(procedure::GETATTR, of(file)).await?)?)
    }

    pub(crate) async fn access(&self, file: &Handle, wanted: u32) -> Result<u32, Fault> {
        let mut arguments = of(file);
        arguments.u32(wanted);
        let mut answer = self.ask(procedure::ACCESS, arguments).await?;
        wire::maybe_attributes(&mut answer)?;
        Ok(answer.u32()? & wanted)
    }

    pub(crate) async fn set_attributes(&self, file: &Handle, change: &Change) -> Result<Attributes, Fault> {
        let mut arguments = of(file);
        wire::change(&mut arguments, change);
        arguments.bool(false);
        let mut answer = self.ask(procedure::SETATTR, arguments).await?;
        match wire::after_change(&mut answer)? {
            Some(attributes) => Ok(attributes),
            None => self.attributes(file).await,
        }
    }

    /// Does what makes a new entry, and finds it if the server does not answer with it.
    async fn make(&self, number: u32, arguments: Encoder, dir: &Handle, name: &[u8]) -> Result<Entry, Fault> {
        let mut answer = self.ask(number, arguments).await?;
        let handle = wire::optional(&mut answer, wire::handle)?;
        let attributes = wire::maybe_attributes(&mut answer)?;
        match handle {
            Some(handle) => self.complete(handle, attributes).await,
            None => self.lookup(dir, name).await,
        }
    }

    pub(crate) async fn make_dir(&self, dir: &Handle, name: &[u8], change: &Change) -> Result<Entry, Fault> {
        let mut arguments = named(dir, name);
        wire::change(&mut arguments, change);
        self.make(procedure::MKDIR, arguments, dir, name).await
    }

    pub(crate) async fn create(
        &self,
        dir: &Handle,
        name: &[u8],
        how: Create,
        change: &Change,
    ) -> Result<Entry, Fault> {
        let mut arguments = named(dir, name);
        arguments.u32(match how {
            Create::Truncate => 0,
            Create::New => 1,
        });
        wire::change(&mut arguments, &Change { size: Some(change.size.unwrap_or(0)), ..change.clone() });
        self.make(procedure::CREATE, arguments, dir, name).await
    }

    pub(crate) async fn symlink(
        &self,
        dir: &Handle,
        name: &[u8],
        to: &[u8],
        change: &Change,
    ) -> Result<Entry, Fault> {
        let mut arguments = named(dir, name);
        wire::change(&mut arguments, change);
        arguments.opaque(to);
        self.make(procedure::SYMLINK, arguments, dir, name).await
    }

    pub(crate) async fn make_node(
        &self,
        dir: &Handle,
        name: &[u8],
        node: Node,
        change: &Change,
    ) -> Result<Entry, Fault> {
        let mut arguments = named(dir, name);
        let (kind, device) = match node {
            Node::Block(major, minor) => (3, Some((major, minor))),
            Node::Character(major, minor) => (4, Some((major, minor))),
            Node::Socket => (6, None),
            Node::Fifo => (7, None),
        };
        arguments.u32(kind);
        wire::change(&mut arguments, change);
        device.map(|(major, minor)| arguments.u32(major).u32(minor));
        self.make(procedure::MKNOD, arguments, dir, name).await
    }

    pub(crate) async fn link(&self, file: &Handle, dir: &Handle, name: &[u8]) -> Result<(), Fault> {
        let mut arguments = of(file);
        arguments.append(named(dir, name));
        self.ask(procedure::LINK, arguments).await.map(drop)
    }

    pub(crate) async fn read_link(&self, link: &Handle) -> Result<Bytes, Fault> {
        let mut answer = self.ask(procedure::READLINK, of(link)).await?;
        wire::maybe_attributes(&mut answer)?;
        Ok(Bytes::copy_from_slice(&answer.opaque(LONGEST_LINK)?))
    }

    pub(crate) async fn remove(&self, dir: &Handle, name: &[u8]) -> Result<(), Fault> {
        self.ask(procedure::REMOVE, named(dir, name)).await.map(drop)
    }

    pub(crate) async fn remove_dir(&self, dir: &Handle, name: &[u8]) -> Result<(), Fault> {
        self.ask(procedure::RMDIR, named(dir, name)).await.map(drop)
    }

    pub(crate) async fn rename(
        &self,
        from: &Handle,
        name: &[u8],
        to: &Handle,
        new_name: &[u8],
    ) -> Result<(), Fault> {
        let mut arguments = named(from, name);
        arguments.append(named(to, new_name));
        self.ask(procedure::RENAME, arguments).await.map(drop)
    }

    pub(crate) async fn read(&self, file: &Handle, offset: u64, length: u32) -> Result<(Bytes, bool), Fault> {
        let mut arguments = of(file);
        arguments.u64(offset).u32(length);
        let mut answer = self.ask(procedure::READ, arguments).await?;
        wire::maybe_attributes(&mut answer)?;
        let count = answer.u32()? as usize;
        let end = answer.bool()?;
        let mut data = answer.opaque(length as usize)?;
        data.truncate(count);
        Ok((data, end))
    }

    pub(crate) async fn write(
        &self,
        file: &Handle,
        offset: u64,
        data: Bytes,
        durable: bool,
    ) -> Result<Written, Fault> {
        let mut arguments = of(file);
        let length = data.len();
        arguments.u64(offset).length(length).u32(if durable { 2 } else { 0 }).data(data);
        let mut answer = self.ask(procedure::WRITE, arguments).await?;
        wire::after_change(&mut answer)?;
        Written::read(&mut answer, length)
    }

    pub(crate) async fn commit(&self, file: &Handle) -> Result<[u8; 8], Fault> {
        let mut arguments = of(file);
        arguments.u64(0).u32(0);
        let mut answer = self.ask(procedure::COMMIT, arguments).await?;
        wire::after_change(&mut answer)?;
        Ok(answer.fixed()?)
    }

    pub(crate) async fn read_dir(&self, dir: &Handle, cookie: Cookie, size: u32) -> Result<Listing, Fault> {
        let mut arguments = of(dir);
        arguments.u64(cookie.position).fixed(&cookie.verifier).u32(size).u32(size);
        match self.ask(procedure::READDIRPLUS, arguments).await {
            Ok(answer) => Ok(listing(answer, true)?),
            Err(fault) if fault.unsupported() => self.read_names(dir, cookie, size).await,
            Err(fault) => Err(fault),
        }
    }

    async fn read_names(&self, dir: &Handle, cookie: Cookie, size: u32) -> Result<Listing, Fault> {
        let mut arguments = of(dir);
        arguments.u64(cookie.position).fixed(&cookie.verifier).u32(size);
        Ok(listing(self.ask(procedure::READDIR, arguments).await?, false)?)
    }

    pub(crate) async fn space(&self, file: &Handle) -> Result<Space, Fault> {
        let mut answer = self.ask(procedure::FSSTAT, of(file)).await?;
        wire::maybe_attributes(&mut answer)?;
        Ok(Space {
            bytes_total: answer.u64()?,
            bytes_free: answer.u64()?,
            bytes_available: answer.u64()?,
            files_total: answer.u64()?,
            files_free: answer.u64()?,
            files_available: answer.u64()?,
        })
    }
}

/// Reads a page of a directory, with what `READDIRPLUS` adds or without.
fn listing(mut answer: Decoder, plus: bool) -> Result<Listing, Malformed> {
    wire::maybe_attributes(&mut answer)?;
    let verifier = answer.fixed()?;
    let mut listing = Listing::default();
    let mut position = 0;
    while answer.bool()? {
        answer.u64()?;
        let name = answer.opaque(LONGEST_NAME)?;
        position = answer.u64()?;
        let (mut attributes, mut handle) = (None, None);
        if plus {
            attributes = wire::maybe_attributes(&mut answer)?;
            handle = wire::optional(&mut answer, wire::handle)?;
        }
        if matches!(name.as_ref(), b"." | b"..") {
            continue;
        }
        let name = crate::Name::new(&name).map_err(|_| Malformed("a directory holds an impossible name"))?;
        listing.entries.push(match (handle, attributes) {
            (Some(handle), Some(attributes)) => Listed::Whole(DirEntry { name, handle, attributes }),
            _ => Listed::Named(name),
        });
    }
    if !answer.bool()? {
        if position == 0 {
            return Err(Malformed("a page of a directory is empty though more is to come"));
        }
        listing.next = Some(Cookie { position, verifier });
    }
    Ok(listing)
}
