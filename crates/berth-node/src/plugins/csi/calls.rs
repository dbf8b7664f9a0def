//! Calls to a driver: each with its deadline, and its answer as what is known of the outcome.

use berth_csi::code;
use berth_csi::v1::node_client::NodeClient;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::plugin::{Certainty, Failed};
use crate::registration::{CALL, Driver, within};

/// Calls one method of a driver's node service.
pub(super) async fn call<Q, A, F>(
    driver: &Driver,
    request: Q,
    method: impl FnOnce(NodeClient<Channel>, Request<Q>) -> F,
) -> Result<A, Status>
where
    F: Future<Output = Result<Response<A>, Status>>,
{
    let mut request = Request::new(request);
    request.set_timeout(CALL);
    within(CALL, method(NodeClient::new(driver.channel.clone()), request)).await.map(Response::into_inner)
}

/// An answer as the outcome of something that brings a volume.
pub(super) fn failed(status: &Status) -> Failed {
    let certainty = if code::is_final(status.code()) { Certainty::Final } else { Certainty::Uncertain };
    Failed { certainty, message: text(status) }
}

/// An answer as the outcome of something that takes a volume away: whatever it was, it must be tried again.
pub(super) fn not_undone(status: &Status) -> Failed {
    Failed::uncertain(text(status))
}

/// An answer to a question that changes nothing.
pub(super) fn unanswered(what: &str, status: &Status) -> Failed {
    Failed::unchanged(format!("{what}: {}", text(status)))
}

/// The words in which Kubernetes tells of such errors.
fn text(status: &Status) -> String {
    format!("rpc error: code = {} desc = {}", code::go_name(status.code()), status.message())
}
