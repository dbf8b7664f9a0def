//! What a server says about a file, and what can be changed.

use crate::xdr::Malformed;

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// It is a regular file.
    File,
    /// It is a directory.
    Directory,
    /// It is a symbolic link, which is never followed.
    Symlink,
    /// It is a named pipe.
    Fifo,
    /// It is a Unix socket.
    Socket,
    /// It is a block device.
    Block,
    /// It is a character device.
    Character,
}

impl FileKind {
    /// Reads the number that stands for a kind in all versions of NFS. Those that version 4 has besides, named attributes
    /// and their directories, never turn up, since nobody opens them.
    pub fn from_number(number: u32) -> Result<Self, Malformed> {
        Ok(match number {
            1 => Self::File,
            2 => Self::Directory,
            3 => Self::Block,
            4 => Self::Character,
            5 => Self::Symlink,
            6 => Self::Socket,
            7 => Self::Fifo,
            _ => return Err(Malformed("there is no such kind of file")),
        })
    }

    /// The number that stands for this kind in all versions of NFS.
    pub fn number(self) -> u32 {
        match self {
            Self::File => 1,
            Self::Directory => 2,
            Self::Block => 3,
            Self::Character => 4,
            Self::Symlink => 5,
            Self::Socket => 6,
            Self::Fifo => 7,
        }
    }
}

/// A moment, since 1970.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Whole seconds since 1970; negative before.
    pub seconds: i64,
    /// And this much of the next.
    pub nanoseconds: u32,
}

/// All that is known about a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// The type of the file.
    pub kind: FileKind,
    /// Permission bits, with setuid, setgid and sticky: at most 0o7777.
    pub mode: u32,
    /// Owner. A server of version 4 that sends names is understood for `root` and numbers; others are 65534.
    pub uid: u32,
    /// Group, as for the owner.
    pub gid: u32,
    /// The length in bytes.
    pub size: u64,
    /// Bytes it takes on disk.
    pub used: u64,
    /// Number within its filesystem.
    pub fileid: u64,
    /// The filesystem it is on, by the server's number.
    pub fsid: (u64, u64),
    /// How many names it has.
    pub links: u32,
    /// Major and minor number, if it is a device.
    pub device: (u32, u32),
    /// When the content was last read.
    pub accessed: Time,
    /// When the content was last changed.
    pub modified: Time,
    /// When the content or an attribute was last changed.
    pub changed: Time,
}

/// New files of a directory with this bit get its group, and new directories the bit as well.
const SETGID: u32 = 0o2000;

/// What to set a time to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeChange {
    /// The server takes the time of its own clock.
    Now,
    /// The caller gives the time.
    At(Time),
}

/// What to change; `None` leaves as it is.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Change {
    /// The permission bits, with setuid, setgid and sticky.
    pub mode: Option<u32>,
    /// The user id of the owner.
    pub uid: Option<u32>,
    /// The group id of the file.
    pub gid: Option<u32>,
    /// Length: cuts, or extends by zeros.
    pub size: Option<u64>,
    /// Time of the last read.
    pub accessed: Option<TimeChange>,
    /// Time of the last change.
    pub modified: Option<TimeChange>,
}

impl Change {
    /// Only the permission bits.
    pub fn mode(mode: u32) -> Self {
        Self { mode: Some(mode), ..Self::default() }
    }

    /// What remains to be set on a file that was made with this change and is so now, if anything does.
    ///
    /// A directory that is made in one with the setgid bit has that bit too, by mkdir(2): a mode that does not name it does
    /// not take it away.
    pub fn remaining(&self, now: &Attributes) -> Option<Self> {
        let inherited = if now.kind == FileKind::Directory { now.mode & SETGID } else { 0 };
        let mode = self.mode.map(|mode| mode | inherited);
        let differs = |wanted: Option<u32>, now: u32| wanted.is_some_and(|wanted| wanted != now);
        let is_set = !differs(mode, now.mode) && !differs(self.uid, now.uid) && !differs(self.gid, now.gid);
        (!is_set).then(|| Self { mode, ..self.clone() })
    }

    /// What is to change, for messages.
    pub(crate) fn what(&self) -> &'static str {
        match self {
            Self { uid: Some(_), .. } | Self { gid: Some(_), .. } => "owner",
            Self { mode: Some(_), .. } => "mode",
            Self { size: Some(_), .. } => "size",
            _ => "times",
        }
    }

    /// Whether nothing is to change.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What to do when a file to be created exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Create {
    /// The call fails with [`Kind::Exists`](crate::Kind::Exists).
    New,
    /// The file is emptied and used.
    Truncate,
}

/// A special file to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// It is a named pipe.
    Fifo,
    /// It is a Unix socket.
    Socket,
    /// A block device of this major and minor number.
    Block(u32, u32),
    /// A character device of this major and minor number.
    Character(u32, u32),
}

pub mod access {
    //! Rights to a file, to be asked for together.

    /// Reading a file, listing a directory.
    pub const READ: u32 = 1;
    /// Finding names in a directory.
    pub const LOOKUP: u32 = 2;
    /// Changing what is there.
    pub const MODIFY: u32 = 4;
    /// Adding to what is there.
    pub const EXTEND: u32 = 8;
    /// Removing names from a directory.
    pub const DELETE: u32 = 0x10;
    /// The right to run a file.
    pub const EXECUTE: u32 = 0x20;
}

/// Room on a filesystem.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// The size of the filesystem in bytes.
    pub bytes_total: u64,
    /// The bytes that nobody uses.
    pub bytes_free: u64,
    /// Free bytes that we may use.
    pub bytes_available: u64,
    /// Files it can hold.
    pub files_total: u64,
    /// Files that can still be made.
    pub files_free: u64,
    /// Files that we may still make.
    pub files_available: u64,
}
