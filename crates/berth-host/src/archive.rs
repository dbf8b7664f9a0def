//! The format of archives: tar, as csi-driver-nfs, container images, GNU tar and Go read and write it.
//!
//! Written is POSIX.1-2001 (pax): what does not fit a plain header (long names, times below a second, large numbers,
//! extended attributes) is in a record before it, and holes are in GNU's sparse format 1.0. Read is that, plain ustar,
//! and GNU's long names. No I/O here: [`encode`] gives the bytes before an entry's data, [`Decoder`] takes bytes as
//! they come.

mod decode;
mod encode;
#[cfg(test)]
mod tests;
mod unpack;

use std::ops::Range;

pub use self::{
    decode::{Decoder, Event},
    encode::{encode, end, padding, stored_length},
    unpack::unpack_layer,
};

/// The unit of everything in an archive.
const BLOCK: usize = 512;
/// As [`BLOCK`], for lengths.
const BLOCK_BYTES: u64 = 512;
/// Longer names, and more of records, make no sense.
const MAX_RECORDS: u64 = 1 << 20;
/// A file in more pieces is kept as a whole.
pub const MAX_PIECES: usize = 10_000;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// It is a regular file.
    File,
    /// Another name of a file that came before.
    HardLink,
    /// It is a symbolic link.
    Symlink,
    /// It is a character device.
    Character,
    /// It is a block device.
    Block,
    /// It is a directory.
    Directory,
    /// It is a named pipe.
    Fifo,
}

/// One entry of an archive, without its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Its path, as the archive has it.
    pub path: Vec<u8>,
    /// The type of the entry, with what only this type has.
    pub kind: EntryKind,
    /// Its permissions, without the type.
    pub mode: u32,
    /// The user it belongs to.
    pub uid: u32,
    /// The group it belongs to.
    pub gid: u32,
    /// The length of the file.
    pub size: u64,
    /// Since 1970, in seconds and nanoseconds.
    pub modified: (i64, u32),
    /// Of a device: major and minor number.
    pub device: (u32, u32),
    /// What a symbolic link says; the path of the file of which a hard link is another name.
    pub link: Vec<u8>,
    /// Extended attributes, with their full names.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// The pieces of a file that are not holes, if it has any holes.
    pub pieces: Option<Vec<Range<u64>>>,
}

/// Why an archive cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Damaged(String);

impl Damaged {
    fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}
