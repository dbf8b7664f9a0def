//! The calls about places: how much fits where, and where this driver is.

use std::time::Duration;

use berth_csi::v1;
use berth_csi::v1::node_client::NodeClient;
use tonic::Status;

use super::{Driver, ask};

impl Driver {
    /// GetCapacity.
    pub async fn capacity(
        &self,
        timeout: Duration,
        request: v1::GetCapacityRequest,
    ) -> Result<v1::GetCapacityResponse, Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.get_capacity(request).await }).await
    }

    /// NodeGetInfo.
    pub async fn node_info(&self, timeout: Duration) -> Result<v1::NodeGetInfoResponse, Status> {
        let mut client = NodeClient::new(self.shared.wire.clone());
        ask(timeout, v1::NodeGetInfoRequest {}, |request| async move { client.node_get_info(request).await })
            .await
    }
}
