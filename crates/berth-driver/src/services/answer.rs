//! What the backend says, in the messages of CSI.

use std::{collections::HashSet, time::SystemTime};

use berth_core::{Topology, VolumeId};
use berth_csi::v1;

use crate::{Amounts, Condition, ContentSource, GroupSnapshot, Severity, Snapshot, Usage, Volume};

pub(super) fn volume(volume: Volume, has_topology: bool) -> v1::Volume {
    v1::Volume {
        capacity_bytes: volume.capacity.as_i64(),
        volume_id: volume.id.to_string(),
        volume_context: volume.context,
        content_source: volume.source.map(content_source),
        accessible_topology: accessible(volume.topology.as_deref(), has_topology),
    }
}

fn content_source(source: ContentSource) -> v1::VolumeContentSource {
    use v1::volume_content_source::{SnapshotSource, Type, VolumeSource};
    let source = match source {
        ContentSource::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.to_string() }),
        ContentSource::Volume(id) => Type::Volume(VolumeSource { volume_id: id.to_string() }),
    };
    v1::VolumeContentSource { r#type: Some(source) }
}

/// A driver without topology must not answer with one.
fn accessible(from: Option<&Topology>, has_topology: bool) -> Vec<v1::Topology> {
    from.filter(|_| has_topology).map(topology).into_iter().collect()
}

pub(super) fn topology(topology: &Topology) -> v1::Topology {
    v1::Topology { segments: topology.0.clone() }
}

pub(super) fn nodes(volume: &Volume) -> Vec<String> {
    volume.attachments.iter().map(|attachment| attachment.node.to_string()).collect()
}

pub(super) fn snapshot(snapshot: Snapshot, has_topology: bool) -> v1::Snapshot {
    v1::Snapshot {
        size_bytes: snapshot.size.as_i64(),
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.source.to_string(),
        creation_time: Some(time(snapshot.created)),
        ready_to_use: snapshot.ready,
        group_snapshot_id: snapshot.group.map(|id| id.to_string()).unwrap_or_default(),
        accessible_topology: accessible(snapshot.topology.as_deref(), has_topology),
    }
}

pub(super) fn group(group: GroupSnapshot, has_topology: bool) -> v1::VolumeGroupSnapshot {
    v1::VolumeGroupSnapshot {
        group_snapshot_id: group.id.to_string(),
        creation_time: Some(time(group.created)),
        ready_to_use: group.snapshots.iter().all(|member| member.ready),
        snapshots: group.snapshots.into_iter().map(|member| snapshot(member, has_topology)).collect(),
    }
}

fn time(time: SystemTime) -> prost_types::Timestamp {
    time.into()
}

/// What is wrong with a volume; each pair of severity and reason once, as the spec demands.
pub(super) fn volume_health(id: &VolumeId, conditions: Vec<Condition>) -> v1::VolumeHealth {
    let mut seen = HashSet::new();
    let health_statuses = conditions
        .into_iter()
        .map(|condition| v1::volume_health::VolumeHealthEntry {
            status: volume_severity(condition.severity).into(),
            reason: condition.reason.to_owned(),
            message: condition.message,
        })
        .filter(|entry| seen.insert((entry.status, entry.reason.clone())))
        .collect();
    v1::VolumeHealth { volume_id: id.to_string(), health_statuses }
}

fn volume_severity(severity: Severity) -> v1::VolumeHealthErrorType {
    match severity {
        Severity::Degraded => v1::VolumeHealthErrorType::Degraded,
        Severity::Inaccessible => v1::VolumeHealthErrorType::Inaccessible,
        Severity::DataLoss => v1::VolumeHealthErrorType::DataLoss,
    }
}

/// What is wrong with the storage; each pair of severity and reason once, as the spec demands.
pub(super) fn storage_health(conditions: Vec<Condition>) -> v1::NodeGetStorageHealthResponse {
    let mut seen = HashSet::new();
    let backend_health = conditions
        .into_iter()
        .map(|condition| v1::node_get_storage_health_response::StorageBackendHealth {
            status: storage_severity(condition.severity).into(),
            reason: condition.reason.to_owned(),
            message: condition.message,
            volume_capability: None,
        })
        .filter(|entry| seen.insert((entry.status, entry.reason.clone())))
        .collect();
    v1::NodeGetStorageHealthResponse { backend_health }
}

fn storage_severity(severity: Severity) -> v1::StorageHealthErrorType {
    match severity {
        Severity::Degraded => v1::StorageHealthErrorType::StorageDegraded,
        Severity::Inaccessible | Severity::DataLoss => v1::StorageHealthErrorType::StorageUnreachable,
    }
}

pub(super) fn usage(usage: &Usage) -> Vec<v1::VolumeUsage> {
    use v1::volume_usage::Unit;
    let number = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let of = |unit: Unit, amounts: Amounts| v1::VolumeUsage {
        available: number(amounts.available),
        total: number(amounts.total),
        used: number(amounts.used),
        unit: unit.into(),
    };
    let mut all = vec![of(Unit::Bytes, usage.bytes)];
    all.extend(usage.inodes.map(|inodes| of(Unit::Inodes, inodes)));
    all
}
