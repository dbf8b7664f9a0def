//! How requests travel, and what the provider's answers mean.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use hyper::{Method, header::USER_AGENT};
use serde::Deserialize;

use super::{
    api::Tags,
    signing::{AccessKey, Stamp, sign},
};
use crate::cloud::{AGENT, Answer, Endpoint, Failure, Limiter, Message, Protocol, Refusal, Verdict};

/// The provider does not say for how long it takes nothing: first so long, and up to the second with each refusal.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// One action with its parameters.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) action: &'static str,
    pub(super) parameters: Vec<(String, String)>,
}

impl Call {
    pub(super) fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.parameters.push((name.to_owned(), value.into()));
        self
    }

    pub(super) fn maybe(self, name: &str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.with(name, value.to_string()),
            None => self,
        }
    }

    pub(super) fn tags(self, tags: &Tags) -> Self {
        tags.iter().zip(1..).fold(self, |call, ((key, value), number)| {
            call.with(&format!("Tag.{number}.Key"), key).with(&format!("Tag.{number}.Value"), value)
        })
    }

    pub(super) fn list(self, name: &str, values: &[&str]) -> Self {
        values
            .iter()
            .zip(1..)
            .fold(self, |call, (value, number)| call.with(&format!("{name}.{number}"), *value))
    }
}

/// Requests that are signed with an account's key.
#[derive(Debug)]
pub(super) struct Signing {
    pub(super) key: AccessKey,
    /// How often in a row the provider refused for the rate.
    pub(super) refused: AtomicU32,
}

impl Protocol for Signing {
    const PROVIDER: &'static str = super::PROVIDER;

    type Request = Call;

    fn name(&self, call: &Call) -> String {
        call.action.to_owned()
    }

    fn message(&self, call: &Call, endpoint: &Endpoint) -> Message {
        let signed = sign(&self.key, endpoint.host(), call.action, &call.parameters, &Stamp::now());
        let mut headers = signed.headers;
        headers.push((USER_AGENT, AGENT.to_owned()));
        Message { method: Method::POST, path: format!("?{}", signed.query), headers, body: None }
    }

    fn judge(&self, what: &str, answer: &Answer, _: &Limiter) -> Verdict {
        if answer.status.is_success() {
            self.refused.store(0, Ordering::Relaxed);
            return Verdict::Done;
        }
        let complaint: Complaint = serde_json::from_slice(&answer.body).unwrap_or_default();
        if complaint.code.starts_with("Throttling") {
            let times = self.refused.fetch_add(1, Ordering::Relaxed).min(4);
            return Verdict::Pause((PAUSES.0 * (1 << times)).min(PAUSES.1));
        }
        Verdict::Failed(refusal(what, answer, complaint))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Complaint {
    code: String,
    message: String,
    request_id: String,
}

/// What the provider said when it did not do what it was asked.
fn refusal(what: &str, answer: &Answer, complaint: Complaint) -> Failure {
    let status = answer.status.as_u16();
    let request = Some(complaint.request_id.as_str())
        .filter(|id| !id.is_empty())
        .or_else(|| answer.header("x-acs-request-id"))
        .map_or_else(String::new, |id| format!(" (request {id})"));
    let words = if complaint.code.is_empty() {
        String::from_utf8_lossy(&answer.body).chars().take(200).collect()
    } else {
        // The provider repeats what was signed, which names everything that was sent.
        let message = complaint.message.split("server string to sign").next().unwrap_or_default();
        format!("{}: {}", complaint.code, message.trim())
    };
    let said = format!("{what}: {status} {words}{request}");
    // A server that failed may have done the work before.
    if status >= 500 || status == 408 || complaint.code.is_empty() {
        return Failure::Unclear(said);
    }
    Failure::Refused { meaning: meaning(status, &complaint.code), status, code: complaint.code, said }
}

/// What a code means. Their number is large, so they are told apart by how they begin; those that are known to mean something
/// else come first.
fn meaning(status: u16, code: &str) -> Refusal {
    let begins = |with: &[&str]| with.iter().any(|with| code.starts_with(with));
    if begins(&[
        "QuotaExceed",
        "InstanceDiskLimitExceed",
        "OperationDenied.NoStock",
        "InvalidAccountStatus.NotEnoughBalance",
    ]) {
        return Refusal::Exhausted;
    }
    if begins(&[
        "BurstingEnabledForModifyingDiskUnsupported",
        "DiskCreatingSnapshot",
        "IncorrectDiskStatus",
        "IncorrectInstanceStatus",
        "IncorrectSnapshotStatus",
        "InvalidOperation.Conflict",
        "InvalidSnapshot.NotReady",
        "InvalidStatus.DiskNotReady",
        "LastOrderProcessing",
        "OperationConflict",
    ]) {
        return Refusal::Busy;
    }
    if status == 401
        || begins(&[
            "Forbidden",
            "IncompleteSignature",
            "InvalidAccessKeyId",
            "InvalidSecurityToken",
            "NoPermission",
            "SignatureDoesNotMatch",
            "UserNotInTheWhiteList",
        ])
    {
        return Refusal::Denied;
    }
    if status == 400 && begins(&["Invalid", "Missing", "MissingParameter"]) {
        return Refusal::Invalid;
    }
    Refusal::Precondition
}

/// Whether the provider refused with one of these codes, or with one that begins so and goes on with a dot.
pub(super) fn is_code(failure: &Failure, codes: &[&str]) -> bool {
    let Failure::Refused { code, .. } = failure else { return false };
    codes
        .iter()
        .any(|known| code.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// Whether the disk, snapshot or other resource that an action names is not there.
pub(super) fn is_gone(failure: &Failure) -> bool {
    let codes = [
        "InvalidDiskId.NotFound",
        "InvalidSnapshotId.NotFound",
        "InvalidSnapshotGroupId.NotFound",
        "InvalidResourceId.NotFound",
    ];
    is_code(failure, &codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_a_caller_has_to_do() {
        for (status, code, expected) in [
            (403, "QuotaExceed.PostPaidDisk", Refusal::Exhausted),
            (403, "QuotaExceed.Snapshot", Refusal::Exhausted),
            (403, "InstanceDiskLimitExceeded", Refusal::Exhausted),
            (403, "OperationDenied.NoStock", Refusal::Exhausted),
            (403, "IncorrectDiskStatus", Refusal::Busy),
            (403, "IncorrectDiskStatus.Initializing", Refusal::Busy),
            (400, "InvalidStatus.DiskNotReady", Refusal::Busy),
            (403, "InvalidSnapshot.NotReady", Refusal::Busy),
            (403, "LastOrderProcessing", Refusal::Busy),
            (403, "Forbidden.RAM", Refusal::Denied),
            (404, "InvalidAccessKeyId.NotFound", Refusal::Denied),
            (400, "SignatureDoesNotMatch", Refusal::Denied),
            (400, "InvalidDiskSize.NotSupported", Refusal::Invalid),
            (400, "InvalidProvisionedIops.LimitExceed", Refusal::Invalid),
            (400, "MissingParameter", Refusal::Invalid),
            (403, "DiskInCoolingPeriod", Refusal::Precondition),
            (403, "ResourcesNotInSameZone", Refusal::Precondition),
        ] {
            assert_eq!(meaning(status, code), expected, "{code}");
        }
    }
}
