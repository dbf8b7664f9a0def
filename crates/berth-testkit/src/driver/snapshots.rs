//! Snapshots and groups of snapshots of the driver in memory.

use berth_csi::v1;
use bytes::Bytes;
use tonic::{Response, Status};

use super::{FakeDriver, Lie, Storage, answer, name_of_id};

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

    fn group(&self, name: &str) -> v1::VolumeGroupSnapshot {
        let ready_to_use = self.is_ready();
        let prefix = format!("{name}/");
        let names: Vec<String> = self.snapshots.lock().keys().cloned().collect();
        let members = names.into_iter().filter(|member| member.starts_with(&prefix));
        v1::VolumeGroupSnapshot {
            group_snapshot_id: name.to_owned(),
            snapshots: members.filter_map(|member| self.snapshot(&member, ready_to_use)).collect(),
            ready_to_use,
            ..v1::VolumeGroupSnapshot::default()
        }
    }
}

impl FakeDriver {
    pub(super) fn create_snapshot(
        &self,
        request: &v1::CreateSnapshotRequest,
        lie: Option<Lie>,
    ) -> Result<Response<Bytes>, Status> {
        let storage = &self.storage;
        let snapshot = match lie {
            Some(Lie::Empty) => None,
            Some(Lie::Another) => {
                let part = storage.other_volume.lock();
                let all = storage.snapshots.lock().clone();
                let (other, _) = all.iter().find(|(_, volume)| volume.contains(part.as_str())).unwrap();
                storage.snapshot(other, true)
            }
            _ => {
                storage.snapshots.lock().insert(request.name.clone(), request.source_volume_id.clone());
                storage.snapshot(&request.name, storage.is_ready())
            }
        };
        let mut answer = answer(&v1::CreateSnapshotResponse { snapshot })?;
        // Whether or not it is ready: a driver may forget to stop.
        let words = format!("copied {} of many", request.source_volume_id);
        berth_csi::remarks::set_progress(answer.metadata_mut(), &words);
        berth_csi::remarks::add_warnings(answer.metadata_mut(), &storage.snapshot_warnings.lock());
        Ok(answer)
    }

    pub(super) fn delete_snapshot(&self, request: &v1::DeleteSnapshotRequest) -> v1::DeleteSnapshotResponse {
        self.storage.snapshots.lock().remove(name_of_id(&request.snapshot_id));
        v1::DeleteSnapshotResponse {}
    }

    pub(super) fn list_snapshots(
        &self,
        request: &v1::ListSnapshotsRequest,
        lie: Option<Lie>,
    ) -> v1::ListSnapshotsResponse {
        let mut name = name_of_id(&request.snapshot_id).to_owned();
        if lie == Some(Lie::Another) {
            let all = self.storage.snapshots.lock();
            name = all.keys().find(|other| **other != name).cloned().unwrap_or_default();
        }
        let found = self.storage.snapshot(&name, self.storage.is_ready());
        let entry = |snapshot| v1::list_snapshots_response::Entry { snapshot: Some(snapshot) };
        let entries = found.into_iter().map(entry).collect();
        v1::ListSnapshotsResponse { entries, ..v1::ListSnapshotsResponse::default() }
    }

    pub(super) fn group_capabilities(&self) -> v1::GroupControllerGetCapabilitiesResponse {
        use v1::group_controller_service_capability::{Rpc, Type};
        let capability = |capability: &berth_csi::GroupCapability| v1::GroupControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: (*capability).into() })),
        };
        let capabilities = self.capabilities.lock().group.iter().map(capability).collect();
        v1::GroupControllerGetCapabilitiesResponse { capabilities }
    }

    pub(super) fn create_group(
        &self,
        request: &v1::CreateVolumeGroupSnapshotRequest,
        lie: Option<Lie>,
    ) -> v1::CreateVolumeGroupSnapshotResponse {
        for (number, volume) in request.source_volume_ids.iter().enumerate() {
            let member = format!("{}/{number}", request.name);
            self.storage.snapshots.lock().insert(member, volume.clone());
        }
        let group = self.storage.group(&request.name);
        let group_snapshot = (lie != Some(Lie::Empty)).then_some(group);
        v1::CreateVolumeGroupSnapshotResponse { group_snapshot }
    }

    pub(super) fn delete_group(
        &self,
        request: &v1::DeleteVolumeGroupSnapshotRequest,
    ) -> v1::DeleteVolumeGroupSnapshotResponse {
        for member in &request.snapshot_ids {
            self.storage.snapshots.lock().remove(name_of_id(member));
        }
        v1::DeleteVolumeGroupSnapshotResponse {}
    }

    pub(super) fn get_group(
        &self,
        request: &v1::GetVolumeGroupSnapshotRequest,
    ) -> v1::GetVolumeGroupSnapshotResponse {
        let group = self.storage.group(&request.group_snapshot_id);
        v1::GetVolumeGroupSnapshotResponse { group_snapshot: Some(group) }
    }
}
