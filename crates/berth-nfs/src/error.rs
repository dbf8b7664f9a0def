//! What can go wrong, by what a caller can do about it.

use std::fmt;

/// The result of every call.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that failed: what we were doing, on which share, and why.
#[derive(Debug, Clone, thiserror::Error)]
#[error("could not {doing} on {share}")]
pub struct Error {
    doing: String,
    share: String,
    #[source]
    reason: Reason,
}

/// What a caller decides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// There is no such file, export or attribute.
    NotFound,
    /// There is one already.
    Exists,
    /// The directory has entries.
    NotEmpty,
    /// A directory was needed.
    NotDirectory,
    /// Anything but a directory was needed.
    IsDirectory,
    /// The disk is full.
    NoSpace,
    /// The quota is used up.
    Quota,
    /// The filesystem or the export is read-only.
    ReadOnly,
    /// The server does not let us.
    Permission,
    /// The handle means nothing any more: look the file up again.
    Stale,
    /// The server finds the request wrong, or it was wrong before it was sent.
    Invalid,
    /// The server did not answer.
    Unreachable,
    /// The connection or the server went away meanwhile: whether it was done is not known.
    Interrupted,
    /// The server, or this client, cannot do this.
    Unsupported,
    /// The server's answer makes no sense.
    Protocol,
    /// The server failed to read or write its disk, or for a reason that it did not give.
    Io,
}

/// Why a call failed.
#[derive(Debug, Clone)]
pub struct Reason {
    kind: Kind,
    text: String,
    status: Option<u32>,
}

impl Reason {
    /// What a caller decides by.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn with_status(self, status: u32) -> Self {
        Self { status: Some(status), ..self }
    }

    pub(crate) fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), status: None }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Reason {}

impl Error {
    pub(crate) fn new(doing: impl Into<String>, share: impl Into<String>, reason: Reason) -> Self {
        Self { doing: doing.into(), share: share.into(), reason }
    }

    /// What a caller decides by.
    pub fn kind(&self) -> Kind {
        self.reason.kind
    }

    /// The number of `nfsstat3` or `nfsstat4`, if that is what the server answered.
    pub fn status(&self) -> Option<u32> {
        self.reason.status
    }
}
