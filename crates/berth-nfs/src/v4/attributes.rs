//! Attributes as version 4 writes them: a bitmap of numbers, and the values in their order.

use bytes::Bytes;

use crate::{
    Attributes, Change, FileKind, Handle, Space, Time, TimeChange,
    status::{Fault, Status},
    xdr::{Decoder, Encoder, Malformed},
};

const TYPE: u32 = 1;
const SIZE: u32 = 4;
const FSID: u32 = 8;
const RDATTR_ERROR: u32 = 11;
const FILEHANDLE: u32 = 19;
const FILEID: u32 = 20;
const FILES_AVAIL: u32 = 21;
const FILES_FREE: u32 = 22;
const FILES_TOTAL: u32 = 23;
const MAXREAD: u32 = 30;
const MAXWRITE: u32 = 31;
const MODE: u32 = 33;
const NUMLINKS: u32 = 35;
const OWNER: u32 = 36;
const OWNER_GROUP: u32 = 37;
const RAWDEV: u32 = 41;
const SPACE_AVAIL: u32 = 42;
const SPACE_FREE: u32 = 43;
const SPACE_TOTAL: u32 = 44;
const SPACE_USED: u32 = 45;
const TIME_ACCESS: u32 = 47;
const TIME_ACCESS_SET: u32 = 48;
const TIME_METADATA: u32 = 52;
const TIME_MODIFY: u32 = 53;
const TIME_MODIFY_SET: u32 = 54;

/// Whoever has no number here.
const NOBODY: u32 = 65534;
const LONGEST_OWNER: usize = 1024;

/// A set of attributes by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bitmap(u128);

impl Bitmap {
    const fn of(numbers: &[u32]) -> Self {
        let mut bits = 0;
        let mut at = 0;
        while at < numbers.len() {
            bits |= 1 << numbers[at];
            at += 1;
        }
        Self(bits)
    }

    pub(super) fn write(self, to: &mut Encoder) {
        let words = (128 - self.0.leading_zeros()).div_ceil(32);
        to.u32(words);
        for word in 0..words {
            to.u32(u32::try_from(self.0 >> (32 * word) & 0xffff_ffff).expect("32 bits were kept"));
        }
    }

    pub(super) fn read(from: &mut Decoder) -> Result<Self, Malformed> {
        let words = from.count(4)?;
        let mut bits = 0;
        for word in 0..words {
            let value = u128::from(from.u32()?);
            if value != 0 && word >= 4 {
                return Err(Malformed("there are no attributes of such numbers"));
            }
            if word < 4 {
                bits |= value << (32 * word);
            }
        }
        Ok(Self(bits))
    }

    fn has(self, number: u32) -> bool {
        self.0 & (1 << number) != 0
    }
}

/// All that [`Attributes`] holds.
pub(super) const FILE: Bitmap = Bitmap::of(&[
    TYPE,
    SIZE,
    FSID,
    FILEID,
    MODE,
    NUMLINKS,
    OWNER,
    OWNER_GROUP,
    RAWDEV,
    SPACE_USED,
    TIME_ACCESS,
    TIME_METADATA,
    TIME_MODIFY,
]);
/// The same of an entry in a directory, with its handle.
pub(super) const ENTRY: Bitmap = Bitmap(FILE.0 | Bitmap::of(&[RDATTR_ERROR, FILEHANDLE]).0);
/// The same of a share's root, with what the server can move at once.
pub(super) const ROOT: Bitmap = Bitmap(FILE.0 | Bitmap::of(&[MAXREAD, MAXWRITE]).0);
/// Room on the filesystem.
pub(super) const SPACE: Bitmap =
    Bitmap::of(&[FILES_AVAIL, FILES_FREE, FILES_TOTAL, SPACE_AVAIL, SPACE_FREE, SPACE_TOTAL]);

/// What a server answered of those that were asked for.
#[derive(Debug, Default)]
pub(super) struct ReceivedAttributes {
    kind: Option<FileKind>,
    size: u64,
    fsid: (u64, u64),
    fileid: u64,
    mode: u32,
    links: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    device: (u32, u32),
    used: Option<u64>,
    accessed: Time,
    changed: Time,
    modified: Time,
    pub(super) handle: Option<Handle>,
    pub(super) error: Option<Status>,
    pub(super) max_read: Option<u64>,
    pub(super) max_write: Option<u64>,
    pub(super) space: Space,
}

impl ReceivedAttributes {
    /// Reads a `fattr4`, in which only `asked` attributes may be.
    pub(super) fn read(from: &mut Decoder, asked: Bitmap) -> Result<Self, Malformed> {
        let present = Bitmap::read(from)?;
        if present.0 & !asked.0 != 0 {
            return Err(Malformed("it has attributes that nobody asked for"));
        }
        let mut values = Decoder::new(from.opaque(usize::MAX)?);
        let mut attributes = Self::default();
        for number in (0..128).filter(|number| present.has(*number)) {
            attributes.take(number, &mut values)?;
        }
        Ok(attributes)
    }

    fn take(&mut self, number: u32, from: &mut Decoder) -> Result<(), Malformed> {
        match number {
            TYPE => self.kind = Some(FileKind::from_number(from.u32()?)?),
            SIZE => self.size = from.u64()?,
            FSID => self.fsid = (from.u64()?, from.u64()?),
            RDATTR_ERROR => self.error = Some(Status(from.u32()?)).filter(|error| *error != Status::OK),
            FILEHANDLE => self.handle = Some(handle(from)?),
            FILEID => self.fileid = from.u64()?,
            FILES_AVAIL => self.space.files_available = from.u64()?,
            FILES_FREE => self.space.files_free = from.u64()?,
            FILES_TOTAL => self.space.files_total = from.u64()?,
            MAXREAD => self.max_read = Some(from.u64()?),
            MAXWRITE => self.max_write = Some(from.u64()?),
            MODE => self.mode = from.u32()? & 0o7777,
            NUMLINKS => self.links = Some(from.u32()?),
            OWNER => self.uid = Some(owner(&from.opaque(LONGEST_OWNER)?)),
            OWNER_GROUP => self.gid = Some(owner(&from.opaque(LONGEST_OWNER)?)),
            RAWDEV => self.device = (from.u32()?, from.u32()?),
            SPACE_AVAIL => self.space.bytes_available = from.u64()?,
            SPACE_FREE => self.space.bytes_free = from.u64()?,
            SPACE_TOTAL => self.space.bytes_total = from.u64()?,
            SPACE_USED => self.used = Some(from.u64()?),
            TIME_ACCESS => self.accessed = time(from)?,
            TIME_METADATA => self.changed = time(from)?,
            TIME_MODIFY => self.modified = time(from)?,
            _ => return Err(Malformed("it has attributes that nobody asked for")),
        }
        Ok(())
    }

    pub(super) fn attributes(self) -> Result<Attributes, Fault> {
        Ok(Attributes {
            kind: self.kind.ok_or(Fault::Malformed("it does not say what kind of file this is"))?,
            mode: self.mode,
            uid: self.uid.unwrap_or(NOBODY),
            gid: self.gid.unwrap_or(NOBODY),
            size: self.size,
            used: self.used.unwrap_or(self.size),
            fileid: self.fileid,
            fsid: self.fsid,
            links: self.links.unwrap_or(1),
            device: self.device,
            accessed: self.accessed,
            modified: self.modified,
            changed: self.changed,
        })
    }
}

pub(super) fn handle(from: &mut Decoder) -> Result<Handle, Malformed> {
    let bytes = from.opaque(Handle::LONGEST)?;
    Ok(Handle::new(Bytes::copy_from_slice(&bytes)))
}

/// Reads an owner: a number, or nobody for a name such as `name@domain`.
fn owner(text: &[u8]) -> u32 {
    let text = std::str::from_utf8(text).unwrap_or_default();
    match text.split('@').next() {
        Some("root") => 0,
        _ => text.parse().unwrap_or(NOBODY),
    }
}

fn time(from: &mut Decoder) -> Result<Time, Malformed> {
    let seconds = from.u64()?.cast_signed();
    Ok(Time { seconds, nanoseconds: from.u32()?.min(999_999_999) })
}

/// Writes a change as `fattr4`.
pub(super) fn write_change(to: &mut Encoder, change: &Change) {
    let mut bits = 0;
    let mut values = Encoder::default();
    if let Some(size) = change.size {
        bits |= 1 << SIZE;
        values.u64(size);
    }
    if let Some(mode) = change.mode {
        bits |= 1 << MODE;
        values.u32(mode & 0o7777);
    }
    for (number, id) in [(OWNER, change.uid), (OWNER_GROUP, change.gid)] {
        if let Some(id) = id {
            bits |= 1 << number;
            values.opaque(id.to_string().as_bytes());
        }
    }
    for (number, moment) in [(TIME_ACCESS_SET, change.accessed), (TIME_MODIFY_SET, change.modified)] {
        match moment {
            None => continue,
            Some(TimeChange::Now) => values.u32(0),
            Some(TimeChange::At(time)) => {
                values.u32(1).u64(time.seconds.cast_unsigned()).u32(time.nanoseconds)
            }
        };
        bits |= 1 << number;
    }
    Bitmap(bits).write(to);
    to.length(values.len()).append(values);
}

/// Writes `fattr4` that says only: a directory.
pub(super) fn write_is_directory(to: &mut Encoder) {
    Bitmap::of(&[TYPE]).write(to);
    to.u32(4).u32(2);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_are_written_and_read() {
        for bitmap in [FILE, ENTRY, ROOT, SPACE, Bitmap(0), Bitmap(1 << 95)] {
            let mut to = Encoder::default();
            bitmap.write(&mut to);
            let mut from = Decoder::new(to.finish().concat().into());
            assert_eq!(Bitmap::read(&mut from), Ok(bitmap));
            assert!(from.is_empty());
        }
    }

    #[test]
    fn owners_are_numbers_or_root() {
        assert_eq!(owner(b"1000"), 1000);
        assert_eq!(owner(b"root@localdomain"), 0);
        assert_eq!(owner(b"nobody"), NOBODY);
        assert_eq!(owner(b"alice@example.com"), NOBODY);
        assert_eq!(owner(b"\xff"), NOBODY);
        assert_eq!(owner(b""), NOBODY);
    }

    #[test]
    fn attributes_that_nobody_asked_for_are_refused() {
        let mut to = Encoder::default();
        Bitmap::of(&[TYPE, 60]).write(&mut to);
        to.opaque(&[0; 16]);
        let mut from = Decoder::new(to.finish().concat().into());
        assert!(ReceivedAttributes::read(&mut from, FILE).is_err());
    }
}
