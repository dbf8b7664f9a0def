//! Why a call of a provider's API did not succeed, and what the driver makes of it.

use std::fmt;

use crate::Error;

/// What an API's call came to.
pub(crate) type Outcome<T> = std::result::Result<T, Failure>;

/// What a provider's refusal means; each provider has words and codes of its own for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Something else is done to the same disk or instance, so that this has to wait.
    Busy,
    /// The account, or the instance, has as many as it may have.
    Exhausted,
    /// The credentials do not allow it.
    Denied,
    /// A parameter can never be right.
    Invalid,
    /// The disk, snapshot or instance is not as it would have to be.
    Precondition,
}

/// Why a call of the API did not succeed.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The provider answered, and nothing was done.
    Refused {
        meaning: Refusal,
        status: u16,
        /// The word that the provider has for it, if it has one.
        code: String,
        /// The request and the provider's words, with the number of the request.
        said: String,
    },
    /// Whether anything was done is not known.
    Unclear(String),
    /// Nothing was sent, because the account may not send any more before the call's end.
    Held(String),
}

impl Failure {
    /// The status that the provider answered with, if it refused.
    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Unclear(_) | Self::Held(_) => None,
        }
    }

    /// Whether the provider refused with that meaning.
    pub(crate) fn means(&self, wanted: Refusal) -> bool {
        matches!(self, Self::Refused { meaning, .. } if *meaning == wanted)
    }

    /// Whether the provider's words contain these, in whatever case.
    pub(crate) fn says(&self, words: &str) -> bool {
        matches!(self, Self::Refused { said, .. } if said.to_lowercase().contains(words))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { said, .. } | Self::Unclear(said) | Self::Held(said) => f.write_str(said),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Unclear(said) | Failure::Held(said) => Self::Unavailable(said),
            Failure::Refused { meaning, said, .. } => match meaning {
                Refusal::Busy => Self::Busy(said),
                Refusal::Exhausted => Self::Exhausted(said),
                Refusal::Denied => Self::Denied(said),
                Refusal::Invalid => Self::Invalid(said),
                Refusal::Precondition => Self::Precondition(said),
            },
        }
    }
}

/// Whether whoever gets this error takes it that nothing was made.
pub(crate) fn is_final(error: &Error) -> bool {
    !matches!(error, Error::Unavailable(_) | Error::Busy(_))
}
