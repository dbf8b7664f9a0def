//! What servers answer instead of doing it, and every other way a request can end badly.

use std::{fmt, time::Duration};

use crate::{Kind, Reason, rpc::record, xdr::Malformed};

/// `nfsstat3` and `nfsstat4`: one table, since version 4 kept the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

impl Status {
    pub(crate) const OK: Self = Self(0);
    pub(crate) const NO_ENTRY: Self = Self(2);
    pub(crate) const NXIO: Self = Self(6);
    pub(crate) const CROSS_DEVICE: Self = Self(18);
    pub(crate) const INVALID: Self = Self(22);
    pub(crate) const BAD_COOKIE: Self = Self(10003);
    pub(crate) const NOT_SUPPORTED: Self = Self(10004);
    pub(crate) const DELAY: Self = Self(10008);
    pub(crate) const EXPIRED: Self = Self(10011);
    pub(crate) const GRACE: Self = Self(10013);
    pub(crate) const MINOR_VERSION: Self = Self(10021);
    pub(crate) const STALE_CLIENT: Self = Self(10022);
    pub(crate) const NOT_SAME: Self = Self(10027);
    pub(crate) const ILLEGAL: Self = Self(10044);
    pub(crate) const BAD_SESSION: Self = Self(10052);
    pub(crate) const BAD_SLOT: Self = Self(10053);
    pub(crate) const NOT_BOUND: Self = Self(10055);
    pub(crate) const MISORDERED: Self = Self(10063);
    pub(crate) const FALSE_RETRY: Self = Self(10076);
    pub(crate) const DEAD_SESSION: Self = Self(10078);
    pub(crate) const NO_ASYNC: Self = Self(10094);
    pub(crate) const NO_XATTR: Self = Self(10095);

    /// Our client or session is gone, and the request was not done.
    pub(crate) fn lost_session(self) -> bool {
        matches!(
            self,
            Self::EXPIRED
                | Self::STALE_CLIENT
                | Self::BAD_SESSION
                | Self::BAD_SLOT
                | Self::NOT_BOUND
                | Self::MISORDERED
                | Self::FALSE_RETRY
                | Self::DEAD_SESSION
        )
    }

    /// The server asks to come again later.
    pub(crate) fn later(self) -> bool {
        matches!(self, Self::DELAY | Self::GRACE)
    }

    /// The server does not know how.
    pub(crate) fn unsupported(self) -> bool {
        matches!(self, Self::NOT_SUPPORTED | Self::ILLEGAL)
    }

    fn meaning(self) -> (Kind, &'static str) {
        match self.0 {
            1 => (Kind::Permission, "not permitted"),
            2 => (Kind::NotFound, "there is no such file or directory"),
            6 | 19 => (Kind::Invalid, "there is no such device"),
            13 => (Kind::Permission, "permission denied"),
            17 => (Kind::Exists, "it exists already"),
            18 | 10092 => (Kind::Invalid, "it lies on another filesystem"),
            20 | 10027 => (Kind::NotDirectory, "it is not a directory"),
            21 | 10009 => (Kind::IsDirectory, "it is a directory"),
            22 => (Kind::Invalid, "the server finds an argument invalid"),
            27 => (Kind::NoSpace, "the file would be too large"),
            28 => (Kind::NoSpace, "no space is left"),
            30 => (Kind::ReadOnly, "the filesystem is read-only"),
            31 => (Kind::NoSpace, "it has too many names already"),
            63 => (Kind::Invalid, "the name is too long"),
            66 => (Kind::NotEmpty, "the directory is not empty"),
            69 => (Kind::Quota, "the quota is used up"),
            70 | 10001 | 10014 => (Kind::Stale, "the file's handle is stale"),
            10003 => (Kind::Stale, "the directory changed while it was read"),
            10004 | 10032 | 10043 | 10044 => (Kind::Unsupported, "the server does not support it"),
            10005 | 10065 | 10066 => (Kind::Invalid, "the server finds the request's size wrong"),
            10008 => (Kind::Unreachable, "the server was still busy when we gave up asking"),
            10013 => (Kind::Unreachable, "the server still waits for its clients after a restart"),
            10012 | 10015 | 10046 => (Kind::Permission, "somebody has the file open or locked"),
            10016 => (Kind::Permission, "the export wants another security flavour than sec=sys"),
            10019 => (Kind::Unsupported, "the share was moved to another server"),
            10021 => (Kind::Unsupported, "the server does not speak this minor version"),
            10029 => (Kind::NotDirectory, "it is a symlink"),
            10039 => (Kind::Invalid, "the server does not know the owner or group"),
            10040 | 10041 => (Kind::Invalid, "the server does not take such a name"),
            10095 => (Kind::NotFound, "there is no such extended attribute"),
            10096 => (Kind::NoSpace, "the extended attribute is too large"),
            _ if self.lost_session() => (Kind::Unreachable, "the server forgets us again and again"),
            _ => (Kind::Io, "the server failed"),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (NFS status {})", self.meaning().1, self.0)
    }
}

/// Why a request failed, before anybody knows what it was for.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// There is no connection, so nothing was sent.
    Unreachable(String),
    /// The connection broke before anything was sent.
    Closed,
    /// The connection broke while we waited for the answer.
    Broken(String),
    /// No answer came within this time.
    Silent(Duration),
    /// The server's RPC layer refused.
    Refused(Refusal),
    /// The answer makes no sense.
    Malformed(&'static str),
    /// The server said no.
    Status(Status),
    /// Anything else that was decided here.
    Other(Reason),
}

/// Why a server's RPC layer refuses a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such service.
    Program,
    /// The service, or RPC itself, is not spoken in this version.
    Version,
    /// The service has no such procedure.
    Procedure,
    /// The arguments cannot be read.
    Arguments,
    /// The server failed before it could try.
    System,
    /// The credential is not accepted, for the reason of this number.
    Authentication(u32),
}

impl From<record::Failure> for Fault {
    fn from(failure: record::Failure) -> Self {
        match failure {
            record::Failure::Closed => Self::Broken("the server closed it".to_owned()),
            record::Failure::Broken(error) => Self::Broken(error.to_string()),
            record::Failure::TooLong => Self::Malformed("it is longer than anything we ask for"),
        }
    }
}

impl From<Malformed> for Fault {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed.0)
    }
}

impl Fault {
    /// The server does not know how: it, or its RPC layer, says so.
    pub(crate) fn unsupported(&self) -> bool {
        match self {
            Self::Status(status) => status.unsupported(),
            Self::Refused(refusal) => *refusal == Refusal::Procedure,
            _ => false,
        }
    }

    /// The server does not speak this version.
    pub(crate) fn other_version(&self) -> bool {
        match self {
            Self::Status(status) => *status == Status::MINOR_VERSION,
            Self::Refused(refusal) => matches!(refusal, Refusal::Program | Refusal::Version),
            _ => false,
        }
    }

    pub(crate) fn is(&self, status: Status) -> bool {
        matches!(self, Self::Status(is) if *is == status)
    }
}

impl From<Fault> for Reason {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Unreachable(why) => Self::new(Kind::Unreachable, why),
            Fault::Closed => Self::new(Kind::Unreachable, "the server closes the connection again and again"),
            Fault::Broken(why) => Self::new(
                Kind::Interrupted,
                format!("the connection broke ({why}); whether it was done is not known"),
            ),
            Fault::Silent(waited) => Self::new(
                Kind::Unreachable,
                format!("the server did not answer within {} s", waited.as_secs_f32()),
            ),
            Fault::Refused(refusal) => refusal.into(),
            Fault::Malformed(what) => {
                Self::new(Kind::Protocol, format!("the server's answer makes no sense: {what}"))
            }
            Fault::Status(status) => Self::new(status.meaning().0, status.to_string()).with_status(status.0),
            Fault::Other(reason) => reason,
        }
    }
}

impl From<Refusal> for Reason {
    fn from(refusal: Refusal) -> Self {
        let (kind, text) = match refusal {
            Refusal::Program => (Kind::Unsupported, "the server does not offer this service".to_owned()),
            Refusal::Version => (Kind::Unsupported, "the server does not speak this version".to_owned()),
            Refusal::Procedure => (Kind::Unsupported, "the server does not support it".to_owned()),
            Refusal::Arguments => (Kind::Protocol, "the server cannot read our request".to_owned()),
            Refusal::System => (Kind::Io, "the server failed before it could try".to_owned()),
            Refusal::Authentication(5) => {
                (Kind::Permission, "the server wants another security flavour than sec=sys".to_owned())
            }
            Refusal::Authentication(code) => (
                Kind::Permission,
                format!("the server does not accept who we say we are (RPC auth status {code})"),
            ),
        };
        Self::new(kind, text)
    }
}
