//! Calls in full: one log event with request and answer of each, at the level of debugging, without secrets.
//!
//! A caller and a driver each emit their side. Whoever runs them decides what becomes of the events: at `-v=5` they are log
//! lines, as with other CSI drivers and sidecars; `berth up` also keeps those of callers.

use std::fmt::Debug;
use std::time::Duration;

use berth_core::names::SERVICE_ACCOUNT_TOKENS;
use bytes::Bytes;
use prost::Message;
use tonic::{Code, Status};

use crate::{Call, code, v1};

/// The target of the log events.
pub const TARGET: &str = "calls";

/// What stands in the place of a secret.
const STRIPPED: &str = "***stripped***";

/// Whose side of a call is emitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Caller,
    Driver,
}

/// Whether anybody wants to know calls in full: making their text takes longer than many a call.
pub(crate) fn is_wanted() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// A message as text. Fields that the protocol marks as secret are stripped by the messages themselves; the tokens of a pod's
/// service account stand in a field that is not marked.
pub(crate) fn shown(message: &dyn Debug) -> String {
    let text = format!("{message:?}");
    let begin = format!("{SERVICE_ACCOUNT_TOKENS:?}: \"");
    let Some(at) = text.find(&begin).map(|at| at + begin.len()) else { return text };
    let mut escaped = false;
    let end = text[at..].char_indices().find(|(_, c)| {
        let ends = *c == '"' && !escaped;
        escaped = *c == '\\' && !escaped;
        ends
    });
    // Without an end it is no text of a map: better nothing than a secret.
    let rest = end.map_or("\"", |(end, _)| &text[at + end..]);
    format!("{}{STRIPPED}{rest}", &text[..at])
}

/// Emits one call as a log event.
pub(crate) fn emit(
    side: Side,
    driver: &str,
    method: &str,
    request: &str,
    outcome: Result<&str, &Status>,
    took: Duration,
) {
    let side = match side {
        Side::Caller => "caller",
        Side::Driver => "driver",
    };
    let (response, code, error) = match outcome {
        Ok(response) => (response, Code::Ok, ""),
        Err(status) => ("", status.code(), status.message()),
    };
    let code = code::grpc_name(code);
    let duration_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    tracing::debug!(target: TARGET, side, driver, method, request, response, code, error, duration_us, "GRPC call");
}

/// Request and answer of a unary call as text, from their frames; `None` for methods that are not of CSI, and for frames that are not
/// whole.
pub fn described(method: &str, request: &Bytes, response: Option<&Bytes>) -> Option<(String, String)> {
    macro_rules! by_method {
        ($($request:ident)*) => {
            $(if method == <v1::$request as Call>::METHOD {
                let response = match response {
                    Some(response) => shown(&decoded::<<v1::$request as Call>::Answer>(response)?),
                    None => String::new(),
                };
                return Some((shown(&decoded::<v1::$request>(request)?), response));
            })*
        };
    }
    by_method!(
        GetPluginInfoRequest GetPluginCapabilitiesRequest ProbeRequest CreateVolumeRequest DeleteVolumeRequest
        ControllerPublishVolumeRequest ControllerUnpublishVolumeRequest ValidateVolumeCapabilitiesRequest ListVolumesRequest
        ControllerListVolumeHealthRequest ControllerGetVolumeHealthRequest GetCapacityRequest ControllerGetCapabilitiesRequest
        CreateSnapshotRequest DeleteSnapshotRequest ListSnapshotsRequest GetSnapshotRequest ControllerExpandVolumeRequest
        ControllerGetVolumeRequest ControllerModifyVolumeRequest GroupControllerGetCapabilitiesRequest
        CreateVolumeGroupSnapshotRequest DeleteVolumeGroupSnapshotRequest GetVolumeGroupSnapshotRequest NodeStageVolumeRequest
        NodeUnstageVolumeRequest NodePublishVolumeRequest NodeUnpublishVolumeRequest NodeGetVolumeStatsRequest
        NodeGetVolumeHealthRequest NodeGetStorageHealthRequest NodeExpandVolumeRequest NodeGetCapabilitiesRequest
        NodeGetInfoRequest
    );
    None
}

/// The message of a frame: whether it is compressed, its length, and itself.
fn decoded<M: Message + Default>(frame: &Bytes) -> Option<M> {
    let (head, message) = frame.split_at_checked(5)?;
    if head[0] != 0 {
        return None;
    }
    M::decode(message).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::METHODS;

    fn framed(message: &impl Message) -> Bytes {
        let bytes = message.encode_to_vec();
        let mut frame = vec![0];
        frame.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
        frame.extend(bytes);
        frame.into()
    }

    #[test]
    fn no_secret_is_shown() {
        let tokens = r#"{"aud": {"token": "s3cret\"", "expirationTimestamp": ""}}"#;
        let request = v1::NodePublishVolumeRequest {
            volume_id: "vol-1".to_owned(),
            secrets: [("password".to_owned(), "s3cret".to_owned())].into(),
            volume_context: [
                ("a".to_owned(), "first".to_owned()),
                (SERVICE_ACCOUNT_TOKENS.to_owned(), tokens.to_owned()),
                ("z".to_owned(), "last".to_owned()),
            ]
            .into(),
            ..v1::NodePublishVolumeRequest::default()
        };
        let text = shown(&request);
        assert!(!text.contains("s3cret"), "{text}");
        for known in ["vol-1", "first", "last", STRIPPED] {
            assert!(text.contains(known), "{known} is not in {text}");
        }
        let (text, _) = described("/csi.v1.Node/NodePublishVolume", &framed(&request), None).unwrap();
        assert!(text.contains("vol-1") && !text.contains("s3cret"), "{text}");
    }

    #[test]
    fn every_unary_method_is_described() {
        let empty = Bytes::from_static(&[0; 5]);
        for (method, _) in METHODS.iter().filter(|(_, streams)| !streams) {
            assert!(described(method, &empty, Some(&empty)).is_some(), "{method}");
        }
        assert_eq!(described("/csi.v1.Identity/Other", &empty, None), None);
        assert_eq!(described("/csi.v1.Identity/Probe", &Bytes::from_static(&[0]), None), None);
    }
}
