//! What a driver's answers say of a snapshot, as a content's status: only what is new is changed.

use berth_csi::v1;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::snapshots::{
    SnapshotError, VolumeGroupSnapshotContentStatus, VolumeSnapshotContentStatus, VolumeSnapshotInfo,
};

/// The status after an answer about a snapshot. Id, time and size, once known, stay.
pub(super) fn snapshot(
    before: Option<&VolumeSnapshotContentStatus>,
    answer: &v1::Snapshot,
    now: Timestamp,
) -> VolumeSnapshotContentStatus {
    let mut status = before.cloned().unwrap_or_default();
    status.snapshot_handle.get_or_insert_with(|| answer.snapshot_id.clone());
    status.ready_to_use = Some(answer.ready_to_use);
    status.creation_time.get_or_insert_with(|| {
        nanoseconds(answer.creation_time.as_ref().map(|time| (time.seconds, time.nanos)))
            .unwrap_or_else(|| since_1970(now))
    });
    if status.restore_size.is_none() && answer.size_bytes > 0 {
        status.restore_size = Some(answer.size_bytes);
    }
    if status.volume_group_snapshot_handle.is_none() && !answer.group_snapshot_id.is_empty() {
        status.volume_group_snapshot_handle = Some(answer.group_snapshot_id.clone());
    }
    status.error = None;
    status
}

/// The status after an answer about a group. Id, time and members, once known, stay; whether they are ready changes.
pub(super) fn group(
    before: Option<&VolumeGroupSnapshotContentStatus>,
    answer: &v1::VolumeGroupSnapshot,
    list_members: bool,
    now: Timestamp,
) -> VolumeGroupSnapshotContentStatus {
    let mut status = before.cloned().unwrap_or_default();
    status.volume_group_snapshot_handle.get_or_insert_with(|| answer.group_snapshot_id.clone());
    status.ready_to_use = Some(answer.ready_to_use);
    let created = nanoseconds(answer.creation_time.as_ref().map(|time| (time.seconds, time.nanos)));
    let created = created.and_then(|nanos| Timestamp::from_nanosecond(i128::from(nanos)).ok());
    status.creation_time.get_or_insert_with(|| Time(created.unwrap_or(now)));
    let unknown = status.volume_snapshot_info_list.as_ref().is_none_or(Vec::is_empty);
    if list_members && unknown && !answer.snapshots.is_empty() {
        status.volume_snapshot_info_list = Some(answer.snapshots.iter().map(member).collect());
    }
    status.error = None;
    status
}

fn member(snapshot: &v1::Snapshot) -> VolumeSnapshotInfo {
    VolumeSnapshotInfo {
        volume_handle: snapshot.source_volume_id.clone(),
        snapshot_handle: snapshot.snapshot_id.clone(),
        creation_time: nanoseconds(snapshot.creation_time.as_ref().map(|time| (time.seconds, time.nanos))),
        ready_to_use: Some(snapshot.ready_to_use),
        restore_size: (snapshot.size_bytes > 0).then_some(snapshot.size_bytes),
    }
}

/// What went wrong; the same error again keeps the time of the first.
pub(super) fn error(before: Option<&SnapshotError>, message: &str, now: Timestamp) -> SnapshotError {
    match before {
        Some(before) if before.message.as_deref() == Some(message) => before.clone(),
        _ => SnapshotError { time: Some(Time(now)), message: Some(message.to_owned()) },
    }
}

/// A time as the nanoseconds since 1970 that contents hold.
pub(super) fn since_1970(time: Timestamp) -> i64 {
    i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX)
}

/// A driver's time, unless it gave none.
fn nanoseconds(time: Option<(i64, i32)>) -> Option<i64> {
    let (seconds, nanos) = time?;
    seconds.checked_mul(1_000_000_000)?.checked_add(i64::from(nanos))
}

#[cfg(test)]
mod tests;
