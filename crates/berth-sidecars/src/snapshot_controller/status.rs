//! What a snapshot's status is, given its content's; compared by value, so that only a real change is written.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::size;
use crate::snapshots::{
    VolumeGroupSnapshotContent, VolumeGroupSnapshotStatus, VolumeSnapshot, VolumeSnapshotContent,
    VolumeSnapshotStatus,
};

/// Whether a snapshot can be restored from.
pub(super) fn is_ready(snapshot: &VolumeSnapshot) -> bool {
    snapshot.status.as_ref().is_some_and(|status| status.ready_to_use == Some(true))
}

/// A snapshot's status from its content's. What is bound, when it was taken and its size, once known, stay.
pub(super) fn of_snapshot(
    before: Option<&VolumeSnapshotStatus>,
    content_name: &str,
    content: &VolumeSnapshotContent,
    group: Option<&str>,
) -> VolumeSnapshotStatus {
    let said = content.status.clone().unwrap_or_default();
    let mut status = before.cloned().unwrap_or_default();
    status.bound_volume_snapshot_content_name.get_or_insert_with(|| content_name.to_owned());
    if status.creation_time.is_none() {
        status.creation_time = said.creation_time.and_then(time);
    }
    status.ready_to_use = Some(said.ready_to_use == Some(true));
    let unknown = status.restore_size.as_ref().is_none_or(|known| size::bytes(known).unwrap_or(0) == 0);
    if let (true, Some(bytes)) = (unknown, said.restore_size) {
        status.restore_size = Some(size::quantity(bytes));
    }
    status.error = said.error;
    if status.volume_group_snapshot_name.is_none() {
        status.volume_group_snapshot_name = group.map(str::to_owned);
    }
    status
}

/// A group's status from its content's.
pub(super) fn of_group(
    before: Option<&VolumeGroupSnapshotStatus>,
    content_name: &str,
    content: &VolumeGroupSnapshotContent,
) -> VolumeGroupSnapshotStatus {
    let said = content.status.clone().unwrap_or_default();
    let mut status = before.cloned().unwrap_or_default();
    status.bound_volume_group_snapshot_content_name.get_or_insert_with(|| content_name.to_owned());
    if status.creation_time.is_none() {
        status.creation_time = said.creation_time;
    }
    status.ready_to_use = Some(said.ready_to_use == Some(true));
    status.error = said.error;
    status
}

/// A time as people read it: whole seconds, as they come back from the API server.
fn time(nanoseconds: i64) -> Option<Time> {
    let seconds = nanoseconds.div_euclid(1_000_000_000);
    Timestamp::from_second(seconds).ok().map(Time)
}

#[cfg(test)]
mod tests;
