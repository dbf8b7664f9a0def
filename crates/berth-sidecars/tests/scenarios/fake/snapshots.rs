//! Snapshots and groups of the driver in memory.

use berth_csi::v1::group_controller_server::GroupController;
use berth_csi::v1::{self, group_controller_service_capability};
use berth_sidecars::driver::GroupCapability;
use tonic::{Request, Response, Status};

use super::{Fake, Lie, Storage};

impl Storage {
    /// Whether this answer says ready.
    fn is_ready(&self) -> bool {
        let mut unready = self.unready.lock();
        let ready = *unready == 0;
        *unready = unready.saturating_sub(1);
        ready
    }

    fn snapshot(&self, name: &str, ready_to_use: bool) -> Option<v1::Snapshot> {
        let source_volume_id = self.snapshots.lock().get(name)?.clone();
        Some(v1::Snapshot {
            size_bytes: 1 << 20,
            snapshot_id: format!("id-{name}"),
            source_volume_id,
            ready_to_use,
            ..v1::Snapshot::default()
        })
    }
}

impl Fake {
    pub(super) async fn take_snapshot(
        &self,
        request: v1::CreateSnapshotRequest,
    ) -> Result<Response<v1::CreateSnapshotResponse>, Status> {
        self.storage.secrets.lock().push(request.secrets.clone());
        let answer = self.call("CreateSnapshot", &request.name, |lie| {
            if lie == Some(Lie::Empty) {
                return v1::CreateSnapshotResponse::default();
            }
            if lie == Some(Lie::Another) {
                let part = self.storage.taken_for_others.lock();
                let all = self.storage.snapshots.lock().clone();
                let (other, _) = all.iter().find(|(_, volume)| volume.contains(part.as_str())).unwrap();
                return v1::CreateSnapshotResponse { snapshot: self.storage.snapshot(other, true) };
            }
            self.storage.snapshots.lock().insert(request.name.clone(), request.source_volume_id.clone());
            let snapshot = self.storage.snapshot(&request.name, self.storage.is_ready());
            v1::CreateSnapshotResponse { snapshot }
        });
        let mut answer = answer.await?;
        // Whether or not it is ready: a driver may forget to stop.
        let words = format!("copied {} of many", request.source_volume_id);
        berth_csi::remarks::set_progress(answer.metadata_mut(), &words);
        berth_csi::remarks::add_warnings(answer.metadata_mut(), &self.storage.warnings.lock());
        Ok(answer)
    }

    pub(super) async fn drop_snapshot(
        &self,
        request: v1::DeleteSnapshotRequest,
    ) -> Result<Response<v1::DeleteSnapshotResponse>, Status> {
        self.storage.secrets.lock().push(request.secrets.clone());
        self.call("DeleteSnapshot", &request.snapshot_id, |_| {
            self.storage.snapshots.lock().remove(request.snapshot_id.trim_start_matches("id-"));
            v1::DeleteSnapshotResponse {}
        })
        .await
    }

    pub(super) async fn show_snapshot(
        &self,
        request: v1::ListSnapshotsRequest,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        self.call("ListSnapshots", &request.snapshot_id, |lie| {
            let mut name = request.snapshot_id.trim_start_matches("id-").to_owned();
            if lie == Some(Lie::Another) {
                let all = self.storage.snapshots.lock();
                name = all.keys().find(|other| **other != name).cloned().unwrap_or_default();
            }
            let found = self.storage.snapshot(&name, self.storage.is_ready());
            let entries = found
                .into_iter()
                .map(|snapshot| v1::list_snapshots_response::Entry { snapshot: Some(snapshot) })
                .collect();
            v1::ListSnapshotsResponse { entries, ..v1::ListSnapshotsResponse::default() }
        })
        .await
    }

    fn members(&self, group: &str, ready: bool) -> Vec<v1::Snapshot> {
        let prefix = format!("{group}/");
        let names: Vec<String> = self.storage.snapshots.lock().keys().cloned().collect();
        let of_group = names.into_iter().filter(|name| name.starts_with(&prefix));
        of_group.filter_map(|name| self.storage.snapshot(&name, ready)).collect()
    }
}

#[tonic::async_trait]
impl GroupController for Fake {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<v1::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::GroupControllerGetCapabilitiesResponse>, Status> {
        let kind = GroupCapability::CreateDeleteGetVolumeGroupSnapshot.into();
        let rpc = group_controller_service_capability::Rpc { r#type: kind };
        let rpc = Some(group_controller_service_capability::Type::Rpc(rpc));
        let capabilities = vec![v1::GroupControllerServiceCapability { r#type: rpc }];
        Ok(Response::new(v1::GroupControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<v1::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<v1::CreateVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        self.call("CreateVolumeGroupSnapshot", &request.name, |lie| {
            for (number, volume) in request.source_volume_ids.iter().enumerate() {
                let member = format!("{}/{number}", request.name);
                self.storage.snapshots.lock().insert(member, volume.clone());
            }
            let ready_to_use = self.storage.is_ready();
            let group = v1::VolumeGroupSnapshot {
                group_snapshot_id: request.name.clone(),
                snapshots: self.members(&request.name, ready_to_use),
                ready_to_use,
                ..v1::VolumeGroupSnapshot::default()
            };
            let group_snapshot = (lie != Some(Lie::Empty)).then_some(group);
            v1::CreateVolumeGroupSnapshotResponse { group_snapshot }
        })
        .await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<v1::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<v1::DeleteVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        self.call("DeleteVolumeGroupSnapshot", &request.group_snapshot_id, |_| {
            for member in &request.snapshot_ids {
                self.storage.snapshots.lock().remove(member.trim_start_matches("id-"));
            }
            v1::DeleteVolumeGroupSnapshotResponse {}
        })
        .await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<v1::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<v1::GetVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        self.call("GetVolumeGroupSnapshot", &request.group_snapshot_id, |_| {
            let ready_to_use = self.storage.is_ready();
            let group = v1::VolumeGroupSnapshot {
                group_snapshot_id: request.group_snapshot_id.clone(),
                snapshots: self.members(&request.group_snapshot_id, ready_to_use),
                ready_to_use,
                ..v1::VolumeGroupSnapshot::default()
            };
            v1::GetVolumeGroupSnapshotResponse { group_snapshot: Some(group) }
        })
        .await
    }
}
