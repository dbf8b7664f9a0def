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
        /// "volume", "snapshot", …
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

impl From<berth_journal::Error> for Error {
    fn from(error: berth_journal::Error) -> Self {
        match error {
            berth_journal::Error::Full(_) => Self::Exhausted(error.to_string()),
            berth_journal::Error::Broken(_) => Self::State(error.to_string()),
        }
    }
}

impl Error {
    /// A volume that is not there.
    pub fn no_volume(id: &VolumeId) -> Self {
        Self::NotFound { what: "volume", id: id.to_string() }
    }

    /// A snapshot that is not there.
    pub fn no_snapshot(id: &SnapshotId) -> Self {
        Self::NotFound { what: "snapshot", id: id.to_string() }
    }
}
