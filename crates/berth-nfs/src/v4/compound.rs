//! Requests of several operations, and their answers.

use super::attributes::{self, Bitmap, ReceivedAttributes};
use crate::{
    Attributes, Entry, Handle,
    status::{Fault, Status},
    xdr::{Decoder, Encoder},
};

pub(super) mod op {
    //! The numbers of the operations of a COMPOUND.
    pub(in crate::v4) const ACCESS: u32 = 3;
    pub(in crate::v4) const CLOSE: u32 = 4;
    pub(in crate::v4) const COMMIT: u32 = 5;
    pub(in crate::v4) const CREATE: u32 = 6;
    pub(in crate::v4) const GETATTR: u32 = 9;
    pub(in crate::v4) const GETFH: u32 = 10;
    pub(in crate::v4) const LINK: u32 = 11;
    pub(in crate::v4) const LOOKUP: u32 = 15;
    pub(in crate::v4) const NVERIFY: u32 = 17;
    pub(in crate::v4) const OPEN: u32 = 18;
    pub(in crate::v4) const OPEN_CONFIRM: u32 = 20;
    pub(in crate::v4) const PUTFH: u32 = 22;
    pub(in crate::v4) const PUTROOTFH: u32 = 24;
    pub(in crate::v4) const READ: u32 = 25;
    pub(in crate::v4) const READDIR: u32 = 26;
    pub(in crate::v4) const READLINK: u32 = 27;
    pub(in crate::v4) const REMOVE: u32 = 28;
    pub(in crate::v4) const RENAME: u32 = 29;
    pub(in crate::v4) const SAVEFH: u32 = 32;
    pub(in crate::v4) const SETATTR: u32 = 34;
    pub(in crate::v4) const SETCLIENTID: u32 = 35;
    pub(in crate::v4) const SETCLIENTID_CONFIRM: u32 = 36;
    pub(in crate::v4) const VERIFY: u32 = 37;
    pub(in crate::v4) const WRITE: u32 = 38;
    pub(in crate::v4) const EXCHANGE_ID: u32 = 42;
    pub(in crate::v4) const CREATE_SESSION: u32 = 43;
    pub(in crate::v4) const DESTROY_SESSION: u32 = 44;
    pub(in crate::v4) const SEQUENCE: u32 = 53;
    pub(in crate::v4) const DESTROY_CLIENTID: u32 = 57;
    pub(in crate::v4) const RECLAIM_COMPLETE: u32 = 58;
    pub(in crate::v4) const ALLOCATE: u32 = 59;
    pub(in crate::v4) const COPY: u32 = 60;
    pub(in crate::v4) const SEEK: u32 = 69;
    pub(in crate::v4) const CLONE: u32 = 71;
    pub(in crate::v4) const GETXATTR: u32 = 72;
    pub(in crate::v4) const SETXATTR: u32 = 73;
    pub(in crate::v4) const LISTXATTRS: u32 = 74;
    pub(in crate::v4) const REMOVEXATTR: u32 = 75;
}

const LONGEST_TAG: usize = 1024;

/// Reads and writes without opening.
pub(super) const ANONYMOUS: [u8; 16] = [0; 16];

/// A request to be.
#[derive(Debug, Default)]
pub(super) struct Compound {
    count: u32,
    body: Encoder,
}

impl Compound {
    /// Begins on this file or directory.
    pub(super) fn on(file: &Handle) -> Self {
        let mut compound = Self::default();
        compound.put(file);
        compound
    }

    /// Adds an operation, whose arguments are to be written.
    pub(super) fn op(&mut self, number: u32) -> &mut Encoder {
        self.count += 1;
        self.body.u32(number)
    }

    pub(super) fn put(&mut self, file: &Handle) {
        self.op(op::PUTFH).opaque(file.as_bytes());
    }

    pub(super) fn lookup(&mut self, name: &[u8]) {
        self.op(op::LOOKUP).opaque(name);
    }

    pub(super) fn get_attributes(&mut self, asked: Bitmap) {
        asked.write(self.op(op::GETATTR));
    }

    /// Asks for handle and attributes of what the last operation found or made.
    pub(super) fn get_entry(&mut self) {
        self.op(op::GETFH);
        self.get_attributes(attributes::FILE);
    }

    /// The request, with the operation that must stand first, if any.
    pub(super) fn encode(self, minor: u32, first: Option<Encoder>) -> Encoder {
        let mut message = Encoder::default();
        message.opaque(b"").u32(minor).u32(self.count + u32::from(first.is_some()));
        first.map(|first| message.append(first));
        message.append(self.body);
        message
    }
}

/// An answer, read operation by operation.
#[derive(Debug)]
pub(super) struct Answer {
    rest: Decoder,
    left: u32,
    status: Status,
}

impl Answer {
    pub(super) fn new(mut message: Decoder) -> Result<Self, Fault> {
        let status = Status(message.u32()?);
        message.opaque(LONGEST_TAG)?;
        let left = message.u32()?;
        Ok(Self { rest: message, left, status })
    }

    /// The results of the next operation, which must be this one and have succeeded.
    pub(super) fn take(&mut self, number: u32) -> Result<&mut Decoder, Fault> {
        match self.status_of(number)? {
            Status::OK => Ok(&mut self.rest),
            other => Err(Fault::Status(other)),
        }
    }

    /// How the next operation went, which must be this one.
    pub(super) fn status_of(&mut self, number: u32) -> Result<Status, Fault> {
        if self.left == 0 {
            return match self.status {
                Status::OK => Err(Fault::Malformed("it answers fewer operations than were asked")),
                other => Err(Fault::Status(other)),
            };
        }
        self.left -= 1;
        let (found, status) = (self.rest.u32()?, Status(self.rest.u32()?));
        // An operation that the server does not know is answered as another.
        if found != number && status == Status::OK {
            return Err(Fault::Malformed("it answers another operation than was asked"));
        }
        Ok(status)
    }

    pub(super) fn rest(&mut self) -> &mut Decoder {
        &mut self.rest
    }

    pub(super) fn received_attributes(&mut self, asked: Bitmap) -> Result<ReceivedAttributes, Fault> {
        Ok(ReceivedAttributes::read(self.take(op::GETATTR)?, asked)?)
    }

    pub(super) fn attributes(&mut self) -> Result<Attributes, Fault> {
        self.received_attributes(attributes::FILE)?.attributes()
    }

    /// What [`Compound::get_entry`] asked for.
    pub(super) fn entry(&mut self) -> Result<Entry, Fault> {
        let handle = attributes::handle(self.take(op::GETFH)?)?;
        Ok(Entry { handle, attributes: self.attributes()? })
    }
}
