//! The account of one call: counted from its beginning, logged and measured once at its end.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::{Code, Status};
use tracing::Span;

use super::{Shared, rpc_of};
use crate::code;
use crate::v1::METHODS;

/// A call under way; its end is settled when this is dropped, so that no way out is missed.
pub(super) struct Call {
    shared: Arc<Shared>,
    path: String,
    began: Instant,
    pub(super) span: Span,
    outcome: Option<(Code, String)>,
    _under_way: TaskTrackerToken,
}

impl Call {
    pub(super) fn begin(shared: Arc<Shared>, path: &str, span: Span) -> Self {
        shared.metrics.began();
        let under_way = shared.under_way.token();
        Self {
            shared,
            path: path.to_owned(),
            began: Instant::now(),
            span,
            outcome: None,
            _under_way: under_way,
        }
    }

    /// Ends the call with what its handler answered.
    pub(super) fn finish(mut self, status: &Status) {
        self.outcome = Some((status.code(), status.message().to_owned()));
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (code, message) = self.outcome.take().unwrap_or_else(|| {
            if std::thread::panicking() {
                (Code::Internal, "the handler panicked".to_owned())
            } else {
                (Code::Cancelled, "dropped before its end".to_owned())
            }
        });
        let took = self.began.elapsed();
        self.shared.metrics.ended(method_label(&self.path, code), code, took);

        let rpc = rpc_of(&self.path);
        let duration_ms = took.as_secs_f64() * 1000.0;
        let name = code::grpc_name(code);
        // The level is part of a callsite, hence one statement for each.
        match code {
            // A caller finds out by asking what a driver has not.
            Code::Ok | Code::Unimplemented if only_reads(rpc) => {
                tracing::debug!(parent: &self.span, rpc, duration_ms, code = name, "{rpc} finished with {name}");
            }
            Code::Ok => {
                tracing::info!(parent: &self.span, rpc, duration_ms, code = name, "{rpc} finished with {name}");
            }
            Code::Internal | Code::Unknown | Code::DataLoss => tracing::error!(
                parent: &self.span, rpc, duration_ms, code = name, error = message, "{rpc} failed with {name}"
            ),
            _ => tracing::warn!(
                parent: &self.span, rpc, duration_ms, code = name, error = message, "{rpc} was refused with {name}"
            ),
        }
    }
}

/// Paths that no service answers come from the client; as labels they would grow without bound.
fn method_label(path: &str, code: Code) -> &str {
    let known = METHODS.iter().any(|(known, _)| *known == path);
    if code == Code::Unimplemented && !known { "unknown" } else { path }
}

/// Whether a call changes nothing: orchestrators repeat those all day long.
fn only_reads(rpc: &str) -> bool {
    let method = rpc.rsplit_once('/').map_or(rpc, |(_, method)| method);
    let verb = ["GroupController", "Controller", "Node"]
        .iter()
        .find_map(|service| method.strip_prefix(service))
        .unwrap_or(method);
    ["Probe", "Get", "List", "Validate"].iter().any(|read| verb.starts_with(read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_only_read_are_told_from_those_that_change_something() {
        let mut changing: Vec<&str> =
            METHODS.iter().map(|(path, _)| rpc_of(path)).filter(|rpc| !only_reads(rpc)).collect();
        changing.sort_unstable();
        assert_eq!(
            changing,
            [
                "Controller/ControllerExpandVolume",
                "Controller/ControllerModifyVolume",
                "Controller/ControllerPublishVolume",
                "Controller/ControllerUnpublishVolume",
                "Controller/CreateSnapshot",
                "Controller/CreateVolume",
                "Controller/DeleteSnapshot",
                "Controller/DeleteVolume",
                "GroupController/CreateVolumeGroupSnapshot",
                "GroupController/DeleteVolumeGroupSnapshot",
                "Node/NodeExpandVolume",
                "Node/NodePublishVolume",
                "Node/NodeStageVolume",
                "Node/NodeUnpublishVolume",
                "Node/NodeUnstageVolume",
            ]
        );
    }

    #[test]
    fn a_path_nobody_serves_does_not_become_a_label() {
        assert_eq!(method_label("/made.Up/Path", Code::Unimplemented), "unknown");
        assert_eq!(method_label("/made.Up/Path", Code::Ok), "/made.Up/Path");
        let create = "/csi.v1.Controller/CreateVolume";
        assert_eq!(method_label(create, Code::Unimplemented), create);
    }
}
