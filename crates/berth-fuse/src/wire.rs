//! FUSE on the wire: requests as the kernel writes them, answers as it reads them, in this machine's byte order.

use berth_nfs::{Attributes, FileKind, Space, Time};
use bytes::{Buf as _, Bytes};
use rustix::{fs::FileType, io::Errno};

/// The minor version of protocol 7 that is spoken here.
pub(crate) const MINOR: u32 = 31;
/// What one request moves at most.
pub(crate) const LARGEST_TRANSFER: u32 = 1 << 20;
/// The kernel wants room for a whole request, with its header.
pub(crate) const LARGEST_REQUEST: usize = LARGEST_TRANSFER as usize + (64 << 10);

const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
/// What programs take as the best size for their reads and writes.
const BLOCK_SIZE: u32 = 64 << 10;
/// The unit of `st_blocks`.
const SECTOR: u64 = 512;
const NOTIFY_INVALID_INODE: i32 = 2;

pub(crate) mod op {
    //! What can be asked.
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const ACCESS: u32 = 34;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
}

/// Who asks for what, about which file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The thread that asks; 0 if it is in a namespace that we do not see.
    pub(crate) pid: u32,
}

/// The arguments of a request, read one after the other.
#[derive(Debug)]
pub(crate) struct Arguments(Bytes);

pub(crate) fn parse(message: &[u8]) -> Option<(Header, Arguments)> {
    let mut from = Bytes::copy_from_slice(message);
    if from.len() < IN_HEADER || from.get_u32_ne() as usize != message.len() {
        return None;
    }
    let header = Header {
        opcode: from.get_u32_ne(),
        unique: from.get_u64_ne(),
        node: from.get_u64_ne(),
        uid: from.get_u32_ne(),
        gid: from.get_u32_ne(),
        pid: from.get_u32_ne(),
    };
    from.advance(4);
    Some((header, Arguments(from)))
}

impl Arguments {
    pub(crate) fn u32(&mut self) -> Result<u32, Errno> {
        self.0.try_get_u32_ne().map_err(|_| Errno::IO)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Errno> {
        self.0.try_get_u64_ne().map_err(|_| Errno::IO)
    }

    pub(crate) fn skip(&mut self, bytes: usize) -> Result<(), Errno> {
        if self.0.len() < bytes {
            return Err(Errno::IO);
        }
        self.0.advance(bytes);
        Ok(())
    }

    /// Bytes up to a zero byte.
    pub(crate) fn text(&mut self) -> Result<Bytes, Errno> {
        let end = self.0.iter().position(|&byte| byte == 0).ok_or(Errno::IO)?;
        let text = self.0.split_to(end);
        self.0.advance(1);
        Ok(text)
    }

    /// Reads a name that ends with a zero byte.
    pub(crate) fn name(&mut self) -> Result<Bytes, Errno> {
        let name = self.text()?;
        if name.len() > 255 { Err(Errno::NAMETOOLONG) } else { Ok(name) }
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Result<Bytes, Errno> {
        if self.0.len() < length { Err(Errno::IO) } else { Ok(self.0.split_to(length)) }
    }
}

/// The body of an answer to the kernel.
#[derive(Debug, Default)]
pub(crate) struct Answer(Vec<u8>);

/// How long the kernel may cache an answer, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Validity {
    pub(crate) entry: u64,
    pub(crate) attributes: u64,
}

impl Answer {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Writes the kernel's `fuse_entry_out`.
    pub(crate) fn entry(&mut self, node: u64, attributes: &Attributes, valid: Validity) -> &mut Self {
        self.u64(node).u64(0).u64(valid.entry).u64(valid.attributes).u32(0).u32(0).attributes(attributes)
    }

    /// `fuse_entry_out` for a name without anything else.
    pub(crate) fn no_entry(&mut self) -> &mut Self {
        self.bytes(&[0; 128])
    }

    /// Writes the kernel's `fuse_attr_out`.
    pub(crate) fn timed_attributes(&mut self, attributes: &Attributes, valid: Validity) -> &mut Self {
        self.u64(valid.attributes).u32(0).u32(0).attributes(attributes)
    }

    fn attributes(&mut self, of: &Attributes) -> &mut Self {
        self.u64(of.fileid).u64(of.size).u64(of.used.div_ceil(SECTOR));
        let times = [of.accessed, of.modified, of.changed];
        for Time { seconds, .. } in times {
            self.u64(seconds.cast_unsigned());
        }
        for Time { nanoseconds, .. } in times {
            self.u32(nanoseconds);
        }
        self.u32(file_type(of.kind) | of.mode).u32(of.links).u32(of.uid).u32(of.gid);
        self.u32(encode_device(of.device)).u32(BLOCK_SIZE).u32(0)
    }

    /// Writes the kernel's `fuse_open_out`.
    pub(crate) fn opened(&mut self, number: u64) -> &mut Self {
        self.u64(number).u32(0).u32(0)
    }

    /// Writes the kernel's `fuse_dirent`.
    pub(crate) fn listed(&mut self, ino: u64, next: u64, kind: FileKind, name: &[u8]) -> &mut Self {
        self.u64(ino).u64(next).u32(u32::try_from(name.len()).unwrap_or(u32::MAX)).u32(file_type(kind) >> 12);
        self.bytes(name).bytes(&[0; 8][..name.len().next_multiple_of(8) - name.len()])
    }

    /// Writes the kernel's `fuse_statfs_out`.
    pub(crate) fn space(&mut self, space: &Space) -> &mut Self {
        let unit = |bytes: u64| bytes / 4096;
        self.u64(unit(space.bytes_total)).u64(unit(space.bytes_free)).u64(unit(space.bytes_available));
        self.u64(space.files_total).u64(space.files_free);
        self.u32(4096).u32(255).u32(4096).bytes(&[0; 28])
    }
}

/// The size of `fuse_dirent` with a name of this length.
pub(crate) fn listed_size(name: usize) -> usize {
    24 + name.next_multiple_of(8)
}

/// The header of an answer: an errno, or 0.
pub(crate) fn out_header(unique: u64, errno: i32, body: usize) -> Vec<u8> {
    let length = u32::try_from(OUT_HEADER + body).expect("an answer is not longer than a transfer");
    let mut header = Answer::default();
    header.u32(length).bytes(&(-errno).to_ne_bytes()).u64(unique);
    header.0
}

/// Tells the kernel to ask again for a file's attributes before it believes them.
pub(crate) fn forget_attributes(node: u64) -> Vec<u8> {
    let mut message = out_header(0, -NOTIFY_INVALID_INODE, 24);
    let mut body = Answer::default();
    // An offset below zero leaves the content alone.
    body.u64(node).bytes(&(-1_i64).to_ne_bytes()).u64(0);
    message.extend_from_slice(body.as_bytes());
    message
}

fn file_type(kind: FileKind) -> u32 {
    let kind = match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::Block => FileType::BlockDevice,
        FileKind::Character => FileType::CharacterDevice,
    };
    kind.as_raw_mode()
}

/// As the kernel squeezes a device's number into 32 bits.
fn encode_device((major, minor): (u32, u32)) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xf_ff00) << 12)
}

/// Major and minor number.
pub(crate) fn decode_device(encoded: u32) -> (u32, u32) {
    ((encoded >> 8) & 0xfff, (encoded & 0xff) | ((encoded >> 12) & 0xf_ff00))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_or_lying_request_is_none() {
        assert!(parse(&[0; 39]).is_none());
        let mut message = vec![0; 48];
        assert!(parse(&message).is_none());
        message[..4].copy_from_slice(&48_u32.to_ne_bytes());
        let (_, mut arguments) = parse(&message).unwrap();
        assert_eq!(arguments.u64(), Ok(0));
        assert_eq!(arguments.u32(), Err(Errno::IO));
        assert_eq!(arguments.text(), Err(Errno::IO));
        assert_eq!(arguments.bytes(1), Err(Errno::IO));
        assert_eq!(arguments.skip(1), Err(Errno::IO));
    }

    #[test]
    fn devices_keep_their_numbers() {
        for device in [(8, 1), (259, 65_537), (0, 0), (4095, 1_048_575)] {
            assert_eq!(decode_device(encode_device(device)), device);
        }
    }

    #[test]
    fn structures_have_the_sizes_of_the_protocol() {
        let attributes = Attributes {
            kind: FileKind::File,
            mode: 0o644,
            uid: 1,
            gid: 2,
            size: 3,
            used: 513,
            fileid: 4,
            fsid: (0, 0),
            links: 1,
            device: (0, 0),
            accessed: Time::default(),
            modified: Time::default(),
            changed: Time::default(),
        };
        let valid = Validity { entry: 0, attributes: 1 };
        assert_eq!(Answer::default().entry(1, &attributes, valid).len(), 128);
        assert_eq!(Answer::default().timed_attributes(&attributes, valid).len(), 104);
        assert_eq!(Answer::default().opened(1).len(), 16);
        assert_eq!(Answer::default().space(&Space::default()).len(), 80);
        assert_eq!(Answer::default().listed(1, 2, FileKind::File, b"name").len(), listed_size(4));
        assert_eq!(forget_attributes(1).len(), 40);
    }
}
