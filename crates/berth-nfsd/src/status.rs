//! What a call is answered that was not done: every error of NFS version 3, and which of them an errno becomes.

use rustix::io::Errno;

/// The failures of `nfsstat3`, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Status {
    NotPermitted = 1,
    NoEntry = 2,
    Io = 5,
    NoSuchDevice = 6,
    Access = 13,
    Exists = 17,
    CrossDevice = 18,
    NoDevice = 19,
    NotDirectory = 20,
    IsDirectory = 21,
    Invalid = 22,
    FileTooBig = 27,
    NoSpace = 28,
    ReadOnly = 30,
    TooManyLinks = 31,
    NameTooLong = 63,
    NotEmpty = 66,
    Quota = 69,
    Stale = 70,
    Remote = 71,
    BadHandle = 10001,
    NotSynchronized = 10002,
    NotSupported = 10004,
    TooSmall = 10005,
    ServerFault = 10006,
    BadType = 10007,
    TryLater = 10008,
}

/// What a procedure comes to.
pub(crate) type Result<T> = std::result::Result<T, Status>;

impl Status {
    pub(crate) fn number(self) -> u32 {
        self as u32
    }
}

impl From<Errno> for Status {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PERM => Self::NotPermitted,
            Errno::NOENT => Self::NoEntry,
            Errno::NXIO => Self::NoSuchDevice,
            // What is mounted there is not ours to enter or to remove.
            Errno::ACCESS | Errno::BUSY | Errno::TXTBSY => Self::Access,
            Errno::EXIST => Self::Exists,
            Errno::XDEV => Self::CrossDevice,
            Errno::NODEV => Self::NoDevice,
            Errno::NOTDIR => Self::NotDirectory,
            Errno::ISDIR => Self::IsDirectory,
            // A symbolic link is never followed.
            Errno::INVAL | Errno::LOOP => Self::Invalid,
            Errno::FBIG => Self::FileTooBig,
            Errno::NOSPC => Self::NoSpace,
            Errno::ROFS => Self::ReadOnly,
            Errno::MLINK => Self::TooManyLinks,
            Errno::NAMETOOLONG => Self::NameTooLong,
            Errno::NOTEMPTY => Self::NotEmpty,
            Errno::DQUOT => Self::Quota,
            Errno::STALE => Self::Stale,
            Errno::REMOTE => Self::Remote,
            Errno::OPNOTSUPP | Errno::NOSYS => Self::NotSupported,
            Errno::NOMEM | Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::TIMEDOUT => Self::TryLater,
            Errno::BADF | Errno::FAULT => Self::ServerFault,
            _ => Self::Io,
        }
    }
}

impl From<std::io::Error> for Status {
    fn from(error: std::io::Error) -> Self {
        Errno::from_io_error(&error).map_or(Self::ServerFault, Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_becomes_what_a_client_makes_it_again() {
        for (errno, status) in [
            (Errno::PERM, 1),
            (Errno::NOENT, 2),
            (Errno::IO, 5),
            (Errno::NXIO, 6),
            (Errno::ACCESS, 13),
            (Errno::EXIST, 17),
            (Errno::XDEV, 18),
            (Errno::NODEV, 19),
            (Errno::NOTDIR, 20),
            (Errno::ISDIR, 21),
            (Errno::INVAL, 22),
            (Errno::FBIG, 27),
            (Errno::NOSPC, 28),
            (Errno::ROFS, 30),
            (Errno::MLINK, 31),
            (Errno::NAMETOOLONG, 63),
            (Errno::NOTEMPTY, 66),
            (Errno::DQUOT, 69),
            (Errno::STALE, 70),
            (Errno::REMOTE, 71),
            (Errno::OPNOTSUPP, 10004),
            (Errno::NOMEM, 10008),
            (Errno::PROTO, 5),
        ] {
            assert_eq!(Status::from(errno).number(), status, "{errno:?}");
        }
    }
}
