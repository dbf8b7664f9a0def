//! Why a backend could not do what it was asked.

use berth_core::{SnapshotId, VolumeId};

/// What every method returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a backend could not do what it was asked. Each variant is one row of the spec's error tables.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request can never work; the message names the field, parameter or option.
    #[error("{0}")]
    Invalid(String),
    /// A volume, snapshot, group or node that is not there.
    #[error("{what} {id:?} does not exist")]
    NotFound {
        /// The kind of thing, such as "volume" or "snapshot".
        what: &'static str,
        /// The id asked for.
        id: String,
    },
    /// Something of that name or at that path is there and is different.
    #[error("{0}")]
    Conflict(String),
    /// Not in the state that the call needs, such as in use or not staged.
    #[error("{0}")]
    Precondition(String),
    /// No size in the range can be had.
    #[error("{0}")]
    OutOfRange(String),
    /// No room, or a limit is reached.
    #[error("{0}")]
    Exhausted(String),
    /// Another operation on the same thing is under way.
    #[error("{0}")]
    Busy(String),
    /// This backend cannot do it.
    #[error("{0} is not supported by this driver")]
    Unsupported(&'static str),
    /// What the storage is on does not answer.
    #[error("{0}")]
    Unavailable(String),
    /// The storage does not let the driver do it.
    #[error("{0}")]
    Denied(String),
    /// The machine said no.
    #[error(transparent)]
    Host(#[from] berth_host::Error),
    /// The driver's own records could not be written or read.
    #[error("{0}")]
    State(String),
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Host(berth_host::Error::new("use the storage", error))
    }
}

impl From<berth_journal::Error> for Error {
    fn from(error: berth_journal::Error) -> Self {
        match error {
            berth_journal::Error::Full(_) => Self::Exhausted(error.to_string()),
            berth_journal::Error::Broken(_) => Self::State(error.to_string()),
        }
    }
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $variant:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(sentence: impl Into<String>) -> Self {
            Self::$variant(sentence.into())
        }
    )*};
}

impl Error {
    constructors! {
        /// The request can never work; the sentence names the field, parameter or option.
        invalid => Invalid;
        /// Something of that name or at that path exists and is different.
        conflict => Conflict;
        /// The state that the call needs is missing, such as in use or not staged.
        precondition => Precondition;
        /// No size in the range is possible.
        out_of_range => OutOfRange;
        /// There is no room, or a limit is reached.
        exhausted => Exhausted;
        /// The work is under way and goes on; the same call will find it.
        in_progress => Busy;
        /// The storage does not answer.
        unavailable => Unavailable;
        /// The storage does not let the driver do it.
        denied => Denied;
        /// Something that should not happen.
        internal => State;
    }

    /// The same error of a call that left something behind which could not be taken back.
    ///
    /// Provisioners take most codes for the end of a creation, and then forget what was asked for when its claim is deleted:
    /// what is left would be nobody's. After UNAVAILABLE they repeat the call, which finds it.
    #[must_use]
    pub fn unfinished(self, left: &Self) -> Self {
        match self {
            Self::Busy(_) | Self::Unavailable(_) => self,
            error => Self::Unavailable(format!("{error}; what was made cannot be taken back yet: {left}")),
        }
    }

    /// A volume, snapshot, group or node that does not exist.
    pub fn not_found(what: &'static str, id: impl std::fmt::Display) -> Self {
        Self::NotFound { what, id: id.to_string() }
    }

    /// A volume that is not there.
    pub fn no_volume(id: &VolumeId) -> Self {
        Self::NotFound { what: "volume", id: id.to_string() }
    }

    /// A snapshot that is not there.
    pub fn no_snapshot(id: &SnapshotId) -> Self {
        Self::NotFound { what: "snapshot", id: id.to_string() }
    }
}
