//! The one error of this crate: what was being done, and what the system said.

use std::{io, path::Path};

/// A failed operation on the machine.
///
/// Display says what we were doing; the source says what the kernel or the tool answered.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct Error {
    doing: String,
    source: io::Error,
}

/// What every function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Whether an `ensure` operation had anything to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The machine was changed.
    Made,
    /// It was already so.
    AlreadyTrue,
}

impl Error {
    /// An error while `doing` something.
    pub fn new(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { doing: doing.into(), source: source.into() }
    }

    /// The errno, where the system gave one.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// The kind of the underlying I/O error.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// One sentence with the cause, for a status message or a log line.
    pub fn sentence(&self) -> String {
        format!("{}: {}", self.doing, self.source)
    }
}

/// Adds to an I/O result what was being done, and to what.
pub trait Doing<T> {
    /// `what` is a verb phrase such as "mount"; `path` is its object.
    fn doing(self, what: &str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: &str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::new(format!("{what} {}", path.as_ref().display()), source))
    }
}
