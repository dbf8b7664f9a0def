//! What a gRPC code means to the caller, and how codes are spelled in logs and metrics.

use tonic::{Code, Status};

/// Whether an answer with this code means that the operation certainly is not going on any more.
///
/// After a code that is not final the volume may still come into being (or go) in the background: the caller
/// must repeat the same call until it gets a final answer, and must not forget the volume or try elsewhere.
/// The sidecars of Kubernetes draw the line in the same place.
pub fn is_final(code: Code) -> bool {
    // No `_` arm: every code is a decision.
    match code {
        // The caller stopped waiting; the plugin may not have stopped working.
        Code::Cancelled | Code::DeadlineExceeded
        // The connection broke, perhaps after the plugin began.
        | Code::Unavailable
        // Sent by the transport too, when an answer is too large, so the work may have been done.
        | Code::ResourceExhausted
        // CSI: an operation for the same volume is still pending.
        | Code::Aborted => false,
        Code::Ok
        | Code::Unknown
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => true,
    }
}

/// The name the gRPC documents use, as in `NOT_FOUND`.
pub fn grpc_name(code: Code) -> &'static str {
    names(code).0
}

/// The name Go's gRPC uses, as in `NotFound`; metrics of other CSI drivers carry these.
pub fn go_name(code: Code) -> &'static str {
    names(code).1
}

/// A status as Kubernetes' own components write it, which is what people search for.
pub fn status_text(status: &Status) -> String {
    format!("rpc error: code = {} desc = {}", go_name(status.code()), status.message())
}

fn names(code: Code) -> (&'static str, &'static str) {
    match code {
        Code::Ok => ("OK", "OK"),
        Code::Cancelled => ("CANCELLED", "Canceled"),
        Code::Unknown => ("UNKNOWN", "Unknown"),
        Code::InvalidArgument => ("INVALID_ARGUMENT", "InvalidArgument"),
        Code::DeadlineExceeded => ("DEADLINE_EXCEEDED", "DeadlineExceeded"),
        Code::NotFound => ("NOT_FOUND", "NotFound"),
        Code::AlreadyExists => ("ALREADY_EXISTS", "AlreadyExists"),
        Code::PermissionDenied => ("PERMISSION_DENIED", "PermissionDenied"),
        Code::ResourceExhausted => ("RESOURCE_EXHAUSTED", "ResourceExhausted"),
        Code::FailedPrecondition => ("FAILED_PRECONDITION", "FailedPrecondition"),
        Code::Aborted => ("ABORTED", "Aborted"),
        Code::OutOfRange => ("OUT_OF_RANGE", "OutOfRange"),
        Code::Unimplemented => ("UNIMPLEMENTED", "Unimplemented"),
        Code::Internal => ("INTERNAL", "Internal"),
        Code::Unavailable => ("UNAVAILABLE", "Unavailable"),
        Code::DataLoss => ("DATA_LOSS", "DataLoss"),
        Code::Unauthenticated => ("UNAUTHENTICATED", "Unauthenticated"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_final_or_not_as_the_sidecars_see_it() {
        let expected = [
            (0, "OK", "OK", true),
            (1, "CANCELLED", "Canceled", false),
            (2, "UNKNOWN", "Unknown", true),
            (3, "INVALID_ARGUMENT", "InvalidArgument", true),
            (4, "DEADLINE_EXCEEDED", "DeadlineExceeded", false),
            (5, "NOT_FOUND", "NotFound", true),
            (6, "ALREADY_EXISTS", "AlreadyExists", true),
            (7, "PERMISSION_DENIED", "PermissionDenied", true),
            (8, "RESOURCE_EXHAUSTED", "ResourceExhausted", false),
            (9, "FAILED_PRECONDITION", "FailedPrecondition", true),
            (10, "ABORTED", "Aborted", false),
            (11, "OUT_OF_RANGE", "OutOfRange", true),
            (12, "UNIMPLEMENTED", "Unimplemented", true),
            (13, "INTERNAL", "Internal", true),
            (14, "UNAVAILABLE", "Unavailable", false),
            (15, "DATA_LOSS", "DataLoss", true),
            (16, "UNAUTHENTICATED", "Unauthenticated", true),
        ];
        assert_eq!(expected.len(), 17);
        for (number, grpc, go, last) in expected {
            let code = Code::from_i32(number);
            assert_eq!(code as i32, number);
            assert_eq!((grpc_name(code), go_name(code), is_final(code)), (grpc, go, last), "code {number}");
        }
    }
}
