//! What is known about files, what can be changed, and who may do what.

use berth_nfs::{Change, FileKind, Name, Time, TimeChange, Version, access};
use bytes::Bytes;
use rustix::io::Errno;

use super::{BELIEVED, Filesystem, Outcome, Result};
use crate::{
    nodes::Node,
    wire::{Answer, Arguments, Header, Validity},
};

const MODE: u32 = 1;
const UID: u32 = 1 << 1;
const GID: u32 = 1 << 2;
const SIZE: u32 = 1 << 3;
const ACCESSED: u32 = 1 << 4;
const MODIFIED: u32 = 1 << 5;
const BY_FILE: u32 = 1 << 6;
const ACCESSED_NOW: u32 = 1 << 7;
const MODIFIED_NOW: u32 = 1 << 8;

const MAY_EXECUTE: u32 = 1;
const MAY_WRITE: u32 = 2;
const MAY_READ: u32 = 4;

const MUST_BE_NEW: u32 = 1;
const MUST_BE_THERE: u32 = 2;
/// The only extended attributes that NFS carries.
const PREFIX: &[u8] = b"user.";

impl Filesystem {
    fn known(node: &Node, attributes: &berth_nfs::Attributes) -> Outcome {
        node.note_attributes(attributes);
        let mut attributes = attributes.clone();
        // The name that keeps an open file on the server is none that programs gave it.
        attributes.links -= u32::from(node.is_hidden() && attributes.links > 0);
        let mut body = Answer::default();
        body.timed_attributes(&attributes, Validity { entry: 0, attributes: BELIEVED });
        body.into()
    }

    pub(super) async fn get_attributes(&self, header: &Header) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        let attributes = self.patience.ask(|| user.share.attributes(&node.handle)).await?;
        Ok(Self::known(&node, &attributes))
    }

    pub(super) async fn set_attributes(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, mut user) = self.about(header)?;
        let wish = Wish::read(from)?;
        if let Some(file) = wish.file {
            // What may be done to an open file was decided when it was opened.
            user = self.open_file(file)?.user.clone();
        }
        if wish.change.size.is_some() {
            // What is kept of it would bring back what is cut off.
            self.commit(&node).await?;
        }
        let attributes = self.patience.ask(|| user.share.set_attributes(&node.handle, &wish.change)).await?;
        Ok(Self::known(&node, &attributes))
    }

    pub(super) async fn access(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        let asked = from.u32()?;
        let is_dir = node.kind == FileKind::Directory;
        let mut wanted = 0;
        for (mask, right) in [
            (MAY_READ, access::READ),
            (MAY_WRITE, access::MODIFY),
            (MAY_EXECUTE, if is_dir { access::LOOKUP } else { access::EXECUTE }),
        ] {
            if asked & mask != 0 {
                wanted |= right;
            }
        }
        let granted = self.patience.ask(|| user.share.access(&node.handle, wanted)).await?;
        if granted == wanted { Ok(Outcome::default()) } else { Err(Errno::ACCESS) }
    }

    pub(super) async fn space(&self, header: &Header) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        let space = self.patience.ask(|| user.share.space(&node.handle)).await?;
        let mut body = Answer::default();
        body.space(&space);
        Ok(body.into())
    }

    /// Versions before 4.2 have none, and the kernel asks no more when it hears that.
    fn with_xattrs(user: &crate::users::User) -> Result<()> {
        if user.share.version() < Version::V4_2 { Err(Errno::NOSYS) } else { Ok(()) }
    }

    pub(super) async fn xattr(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        Self::with_xattrs(&user)?;
        let room = from.u32()?;
        from.skip(4)?;
        let name = attribute_name(&from.text()?)?;
        let value = self.patience.ask(|| user.share.xattr(&node.handle, &name)).await;
        fit(&value.map_err(no_data)?.ok_or(Errno::OPNOTSUPP)?, room)
    }

    pub(super) async fn xattrs(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        Self::with_xattrs(&user)?;
        let room = from.u32()?;
        let names = self.patience.ask(|| user.share.xattrs(&node.handle)).await?.unwrap_or_default();
        let all: Vec<u8> = names.iter().flat_map(|name| [PREFIX, name.as_bytes(), &[0]].concat()).collect();
        fit(&all, room)
    }

    pub(super) async fn set_xattr(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        Self::with_xattrs(&user)?;
        let (size, flags) = (from.u32()?, from.u32()?);
        let name = attribute_name(&from.text()?)?;
        let value = from.bytes(size as usize)?;
        if flags & (MUST_BE_NEW | MUST_BE_THERE) != 0 {
            let there = match self.patience.ask(|| user.share.xattr(&node.handle, &name)).await {
                Ok(_) => true,
                Err(failure) if no_data(failure) == Errno::NODATA => false,
                Err(failure) => return Err(failure.into()),
            };
            match (there, flags & MUST_BE_NEW != 0) {
                (true, true) => return Err(Errno::EXIST),
                (false, false) => return Err(Errno::NODATA),
                _ => {}
            }
        }
        let done = self.patience.ask(|| user.share.set_xattr(&node.handle, &name, value.clone())).await?;
        done.map(|()| Outcome::default()).ok_or(Errno::OPNOTSUPP)
    }

    pub(super) async fn remove_xattr(&self, header: &Header, from: &mut Arguments) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        Self::with_xattrs(&user)?;
        let name = attribute_name(&from.text()?)?;
        let done = self.patience.ask(|| user.share.remove_xattr(&node.handle, &name)).await;
        done.map_err(no_data)?.map(|()| Outcome::default()).ok_or(Errno::OPNOTSUPP)
    }
}

/// What a program wants changed.
struct Wish {
    change: Change,
    /// By which open file.
    file: Option<u64>,
}

impl Wish {
    fn read(from: &mut Arguments) -> Result<Self> {
        let valid = from.u32()?;
        from.skip(4)?;
        let (file, size) = (from.u64()?, from.u64()?);
        from.skip(8)?;
        let (accessed, modified) = (from.u64()?, from.u64()?);
        from.skip(8)?;
        let (accessed_nanoseconds, modified_nanoseconds) = (from.u32()?, from.u32()?);
        from.skip(4)?;
        let mode = from.u32()?;
        from.skip(4)?;
        let (uid, gid) = (from.u32()?, from.u32()?);
        let has = |bit: u32| valid & bit != 0;
        let time = |at: u32, now: u32, seconds: u64, nanoseconds: u32| {
            let given = TimeChange::At(Time { seconds: seconds.cast_signed(), nanoseconds });
            has(at).then_some(if has(now) { TimeChange::Now } else { given })
        };
        let change = Change {
            mode: has(MODE).then_some(mode & 0o7777),
            uid: has(UID).then_some(uid),
            gid: has(GID).then_some(gid),
            size: has(SIZE).then_some(size),
            accessed: time(ACCESSED, ACCESSED_NOW, accessed, accessed_nanoseconds),
            modified: time(MODIFIED, MODIFIED_NOW, modified, modified_nanoseconds),
        };
        Ok(Self { change, file: has(BY_FILE).then_some(file) })
    }
}

fn attribute_name(name: &Bytes) -> Result<Name> {
    let own = name.strip_prefix(PREFIX).ok_or(Errno::OPNOTSUPP)?;
    Name::new(own).map_err(|_| Errno::INVAL)
}

/// Servers say of an attribute what they say of a file.
fn no_data(failure: crate::patience::Failure) -> Errno {
    if failure.errno == Errno::NOENT { Errno::NODATA } else { failure.errno }
}

/// A value, or its size if there is no room to put it.
fn fit(value: &[u8], room: u32) -> Result<Outcome> {
    let size = u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?;
    let mut body = Answer::default();
    match room {
        0 => body.u32(size).u32(0),
        _ if size > room => return Err(Errno::RANGE),
        _ => body.bytes(value),
    };
    Ok(body.into())
}
