//! The calls about snapshots and groups of them.

use std::collections::HashSet;
use std::time::Duration;

use berth_csi::v1::group_controller_client::GroupControllerClient;
use berth_csi::v1::{self, group_controller_service_capability};
use tonic::Status;

use super::wire::Wire;
use super::{ASKING, Driver, GroupCapability, LARGEST_ANSWER, Shared};

impl Driver {
    /// CreateSnapshot; with it how far the snapshot is, if it is not ready and the driver says.
    pub async fn create_snapshot(
        &self,
        timeout: Duration,
        request: v1::CreateSnapshotRequest,
    ) -> Result<(v1::Snapshot, Option<String>), Status> {
        let mut client = self.controller();
        let mut progress = None;
        let answer = self
            .call(timeout, request, |request| async {
                let answer = client.create_snapshot(request).await?;
                progress = berth_csi::progress::told(answer.metadata());
                Ok(answer)
            })
            .await?;
        let snapshot = answer.snapshot.filter(|snapshot| !snapshot.snapshot_id.is_empty());
        // Not final: a driver that answers like this has made something.
        let snapshot = snapshot
            .ok_or_else(|| Status::aborted("the CSI driver's answer to CreateSnapshot has no snapshot id"))?;
        let progress = progress.filter(|_| !snapshot.ready_to_use);
        Ok((snapshot, progress))
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(
        &self,
        timeout: Duration,
        request: v1::DeleteSnapshotRequest,
    ) -> Result<(), Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.delete_snapshot(request).await }).await?;
        Ok(())
    }

    /// ListSnapshots for one snapshot; `None` if the driver does not know it.
    pub async fn find_snapshot(
        &self,
        timeout: Duration,
        request: v1::ListSnapshotsRequest,
    ) -> Result<Option<v1::Snapshot>, Status> {
        let mut client = self.controller();
        let wanted = request.snapshot_id.clone();
        let answer = self
            .call(timeout, request, |request| async move { client.list_snapshots(request).await })
            .await?;
        // What was not asked for must not be taken for it: it would be deleted instead one day.
        let mut found = answer.entries.into_iter().filter_map(|entry| entry.snapshot);
        Ok(found.find(|snapshot| snapshot.snapshot_id == wanted))
    }

    /// CreateVolumeGroupSnapshot.
    pub async fn create_group_snapshot(
        &self,
        timeout: Duration,
        request: v1::CreateVolumeGroupSnapshotRequest,
    ) -> Result<v1::VolumeGroupSnapshot, Status> {
        let mut client = self.group_controller();
        let answer =
            self.call(timeout, request, |request| async move {
                client.create_volume_group_snapshot(request).await
            })
            .await?;
        let group = answer.group_snapshot.filter(|group| !group.group_snapshot_id.is_empty());
        // Not final: a driver that answers like this has made something.
        group.ok_or_else(|| {
            Status::aborted("the CSI driver's answer to CreateVolumeGroupSnapshot has no group snapshot id")
        })
    }

    /// GetVolumeGroupSnapshot.
    pub async fn find_group_snapshot(
        &self,
        timeout: Duration,
        request: v1::GetVolumeGroupSnapshotRequest,
    ) -> Result<v1::VolumeGroupSnapshot, Status> {
        let mut client = self.group_controller();
        let answer = self
            .call(timeout, request, |request| async move { client.get_volume_group_snapshot(request).await })
            .await?;
        answer
            .group_snapshot
            .ok_or_else(|| Status::internal("the CSI driver's answer to GetVolumeGroupSnapshot is empty"))
    }

    /// DeleteVolumeGroupSnapshot.
    pub async fn delete_group_snapshot(
        &self,
        timeout: Duration,
        request: v1::DeleteVolumeGroupSnapshotRequest,
    ) -> Result<(), Status> {
        let mut client = self.group_controller();
        self.call(
            timeout,
            request,
            |request| async move { client.delete_volume_group_snapshot(request).await },
        )
        .await?;
        Ok(())
    }

    fn group_controller(&self) -> GroupControllerClient<Wire> {
        GroupControllerClient::new(self.shared.wire.clone()).max_decoding_message_size(LARGEST_ANSWER)
    }
}

pub(super) async fn group_capabilities(
    shared: &Shared,
    name: Option<&str>,
) -> Result<HashSet<GroupCapability>, Status> {
    let mut client = GroupControllerClient::new(shared.wire.clone());
    let answer = shared
        .ask(name, ASKING, v1::GroupControllerGetCapabilitiesRequest {}, |request| async move {
            client.group_controller_get_capabilities(request).await
        })
        .await?;
    let types = answer.capabilities.iter().filter_map(|capability| {
        let kind = capability.r#type.as_ref();
        kind.map(|group_controller_service_capability::Type::Rpc(rpc)| rpc.r#type())
    });
    Ok(types.collect())
}
