//! What a backend's error becomes on the wire.

use rustix::io::Errno;
use tonic::{Code, Status};

use crate::Error;

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let sentence = match &error {
            Error::Host(host) => host.sentence(),
            other => other.to_string(),
        };
        Self::new(code(&error), sentence)
    }
}

/// No `_` arm: a new kind of error has to choose its code.
fn code(error: &Error) -> Code {
    match error {
        // The caller must change the request; Kubernetes shows the sentence and keeps trying in vain.
        Error::Invalid(_) => Code::InvalidArgument,
        // The caller checks the id; for a deletion it takes the work as done.
        Error::NotFound { .. } => Code::NotFound,
        // The caller must change the request or the name.
        Error::Conflict(_) => Code::AlreadyExists,
        // The caller brings about the state that is missing and tries again with back-off.
        Error::Precondition(_) => Code::FailedPrecondition,
        // The caller must ask for another size.
        Error::OutOfRange(_) => Code::OutOfRange,
        // The caller tries again later or elsewhere; Kubernetes looks for another node.
        Error::Exhausted(_) => Code::ResourceExhausted,
        // The caller tries again with back-off, without a change.
        Error::Busy(_) => Code::Aborted,
        // The caller asks for the capabilities and never calls this again.
        Error::Unsupported(_) => Code::Unimplemented,
        // The caller tries again with back-off: what was under way may have been done or not.
        Error::Unavailable(_) => Code::Unavailable,
        // The caller changes the export, the credentials or the request.
        Error::Denied(_) => Code::PermissionDenied,
        Error::Host(host) => match host.errno().map(Errno::from_raw_os_error) {
            // As for Exhausted.
            Some(Errno::NOSPC | Errno::DQUOT) => Code::ResourceExhausted,
            // The caller cannot know what was done, and tries again.
            _ => Code::Internal,
        },
        // As for the machine's errors.
        Error::State(_) => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(errno: Errno) -> Error {
        Error::Host(berth_host::Error::new("make the file /x", errno))
    }

    #[test]
    fn every_error_has_the_code_of_the_specs_row() {
        let text = || "why".to_owned();
        for (error, code) in [
            (Error::Invalid(text()), Code::InvalidArgument),
            (Error::NotFound { what: "volume", id: "v".into() }, Code::NotFound),
            (Error::Conflict(text()), Code::AlreadyExists),
            (Error::Precondition(text()), Code::FailedPrecondition),
            (Error::OutOfRange(text()), Code::OutOfRange),
            (Error::Exhausted(text()), Code::ResourceExhausted),
            (Error::Busy(text()), Code::Aborted),
            (Error::Unsupported("cloning"), Code::Unimplemented),
            (Error::Unavailable(text()), Code::Unavailable),
            (Error::Denied(text()), Code::PermissionDenied),
            (host(Errno::NOSPC), Code::ResourceExhausted),
            (host(Errno::DQUOT), Code::ResourceExhausted),
            (host(Errno::IO), Code::Internal),
            (Error::State(text()), Code::Internal),
        ] {
            let said = format!("{error:?}");
            assert_eq!(Status::from(error).code(), code, "{said}");
        }
    }

    #[test]
    fn what_the_system_said_reaches_the_caller() {
        let message = Status::from(host(Errno::NOSPC)).message().to_owned();
        assert!(message.starts_with("make the file /x: No space left"), "{message}");
    }
}
