//! Why an item could not be brought where it should be, and whether the driver may still be working on it.

use std::time::Duration;

use berth_csi::code;
use berth_kube::Next;
use tonic::{Code, Status};

use crate::driver;

/// A failed reconciliation of an item.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Kubernetes refused, or could not be reached.
    #[error(transparent)]
    Kube(#[from] berth_kube::Error),
    /// The driver refused, or could not be reached.
    #[error("{}", code::status_text(.0))]
    Call(#[from] Status),
    /// The objects do not add up; a person has to change one of them.
    #[error("{0}")]
    Refused(String),
}

impl Failure {
    /// A sentence that a person can act on.
    pub(crate) fn refused(text: impl Into<String>) -> Self {
        Self::Refused(text.into())
    }

    /// The error and its causes, for events.
    pub(crate) fn sentence(&self) -> String {
        match self {
            Self::Kube(error) => error.chain(),
            Self::Call(_) | Self::Refused(_) => self.to_string(),
        }
    }

    /// The driver's code, if it was the driver.
    pub(crate) fn code(&self) -> Option<Code> {
        match self {
            Self::Call(status) => Some(status.code()),
            Self::Kube(_) | Self::Refused(_) => None,
        }
    }

    /// Whether somebody else was merely quicker.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Kube(error) if error.is_conflict())
    }

    /// Whether a call broke on its way to the driver, or back.
    pub(crate) fn is_broken_call(&self) -> bool {
        matches!(self, Self::Call(status) if berth_csi::from_transport(status))
    }

    /// Whether the driver was not even asked, because it is away.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self, Self::Call(status) if status.message() == driver::ABSENT)
    }

    /// What to do about it, where the driver's own words may not say.
    pub(crate) fn hint(&self) -> &'static str {
        match self.code() {
            Some(Code::Unavailable) => " (is the driver's controller running?)",
            Some(Code::DeadlineExceeded) => " (the driver is slow; the call is repeated until it answers)",
            Some(Code::Unauthenticated | Code::PermissionDenied) => {
                " (check the driver's credentials and the secrets that the StorageClass names)"
            }
            _ => "",
        }
    }
}

impl berth_kube::Failure for Failure {
    fn is_conflict(&self) -> bool {
        Self::is_conflict(self)
    }

    fn describe(&self) -> String {
        self.sentence()
    }
}

/// After somebody else was quicker: again, as the change is on its way here.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);

/// The result of a reconciliation: that somebody else was quicker is no failure.
pub(crate) fn settled(result: Result<Next, Failure>) -> Result<Next, Failure> {
    match result {
        Err(failure) if failure.is_conflict() => Ok(Next::After(CONFLICT_PAUSE)),
        result => result,
    }
}

/// Whether a code means that the driver is certainly not working on it any more.
///
/// Provisioning draws the line elsewhere than [`code::is_final`]: RESOURCE_EXHAUSTED is what a driver answers when there
/// is no room in a topology segment, and the scheduler must be free to choose another. And ALREADY_EXISTS says that there is a
/// volume of this name, if not as asked for: names are claims' own, so it must not be forgotten.
pub(crate) fn is_final_for_provisioning(code: Code) -> bool {
    code == Code::ResourceExhausted || (code != Code::AlreadyExists && code::is_final(code))
}
