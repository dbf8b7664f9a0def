//! Rows of the error tables that are answered with a wrong code.

use super::*;

pub(super) fn controller_errors() -> Vec<Switch> {
    type Attach = ControllerPublishVolumeRequest;
    type Validate = ValidateVolumeCapabilitiesRequest;
    type Expand = ControllerExpandVolumeRequest;
    vec![
        internal("errors.create.no-name", |r: &CreateVolumeRequest| r.name.is_empty()),
        internal("errors.create.no-capabilities", |r: &CreateVolumeRequest| r.volume_capabilities.is_empty()),
        internal("errors.create.no-access-type", |r: &CreateVolumeRequest| {
            r.volume_capabilities.iter().any(|one| one.access_type.is_none())
        }),
        internal("errors.create.no-access-mode", |r: &CreateVolumeRequest| {
            r.volume_capabilities.iter().any(|one| one.access_mode.is_none())
        }),
        internal("errors.create.negative-size", |r: &CreateVolumeRequest| {
            required(r.capacity_range.as_ref()) < 0
        }),
        internal("errors.create.limit-below-required", |r: &CreateVolumeRequest| {
            r.volume_content_source.is_none()
                && r.capacity_range
                    .is_some_and(|range| range.limit_bytes > 0 && range.limit_bytes < range.required_bytes)
        }),
        internal("errors.create.impossible-size", |r: &CreateVolumeRequest| {
            required(r.capacity_range.as_ref()) == i64::MAX
        }),
        internal("errors.create.snapshot-missing", |r| source_snapshot(r).as_deref() == Some(MISSING)),
        internal("errors.create.volume-missing", |r| source_volume(r).as_deref() == Some(MISSING)),
        recode("errors.create.other-size", Code::AlreadyExists, |r: &CreateVolumeRequest| {
            r.volume_content_source.is_none()
        }),
        recode("errors.create.other-source", Code::AlreadyExists, |r: &CreateVolumeRequest| {
            r.volume_content_source.is_some()
        }),
        recode("errors.create.smaller-than-source", Code::OutOfRange, |r: &CreateVolumeRequest| {
            r.volume_content_source.is_some()
        }),
        internal("errors.delete.no-id", |r: &DeleteVolumeRequest| r.volume_id.is_empty()),
        refuse("errors.delete.missing", Code::NotFound, |_, r: &DeleteVolumeRequest| r.volume_id == MISSING),
        internal("errors.attach.no-volume", |r: &Attach| r.volume_id.is_empty()),
        internal("errors.attach.no-node", |r: &Attach| r.node_id.is_empty()),
        internal("errors.attach.no-capability", |r: &Attach| r.volume_capability.is_none()),
        internal("errors.attach.missing", |r: &Attach| {
            r.volume_id == MISSING && !r.node_id.is_empty() && r.volume_capability.is_some()
        }),
        internal("errors.attach.node-missing", |r: &Attach| r.node_id == MISSING),
        recode("errors.attach.other-mode", Code::AlreadyExists, |_: &Attach| true),
        recode("errors.attach.limit", Code::ResourceExhausted, |_: &Attach| true),
        internal("errors.detach.no-id", |r: &ControllerUnpublishVolumeRequest| r.volume_id.is_empty()),
        internal("errors.validate.no-id", |r: &Validate| r.volume_id.is_empty()),
        internal("errors.validate.no-capabilities", |r: &Validate| r.volume_capabilities.is_empty()),
        internal("errors.validate.missing", |r: &Validate| r.volume_id == MISSING),
        internal("errors.list.token", |r: &ListVolumesRequest| r.starting_token.contains("no token")),
        internal("errors.list.negative", |r: &ListVolumesRequest| r.max_entries < 0),
        internal("errors.snapshot.no-name", |r: &CreateSnapshotRequest| r.name.is_empty()),
        internal("errors.snapshot.no-source", |r: &CreateSnapshotRequest| r.source_volume_id.is_empty()),
        internal("errors.snapshot.source-missing", |r: &CreateSnapshotRequest| r.source_volume_id == MISSING),
        recode("errors.snapshot.other-source", Code::AlreadyExists, |_: &CreateSnapshotRequest| true),
        internal("errors.delete-snapshot.no-id", |r: &DeleteSnapshotRequest| r.snapshot_id.is_empty()),
        refuse("errors.delete-snapshot.missing", Code::NotFound, |_, r: &DeleteSnapshotRequest| {
            r.snapshot_id == MISSING
        }),
        internal("errors.list-snapshots.token", |r: &ListSnapshotsRequest| {
            r.starting_token.contains("no token")
        }),
        internal("errors.list-snapshots.negative", |r: &ListSnapshotsRequest| r.max_entries < 0),
        internal("errors.get-snapshot.no-id", |r: &GetSnapshotRequest| r.snapshot_id.is_empty()),
        internal("errors.get-snapshot.missing", |r: &GetSnapshotRequest| r.snapshot_id == MISSING),
        internal("errors.expand.no-id", |r: &Expand| r.volume_id.is_empty()),
        internal("errors.expand.no-range", |r: &Expand| r.capacity_range.is_none()),
        internal("errors.expand.missing", |r: &Expand| r.volume_id == MISSING),
        refuse("errors.expand.smaller", Code::OutOfRange, |_, r: &Expand| {
            required(r.capacity_range.as_ref()) == HALF
        }),
        internal("errors.expand.impossible-size", |r: &Expand| {
            required(r.capacity_range.as_ref()) == i64::MAX
        }),
        internal("errors.modify.no-id", |r: &ControllerModifyVolumeRequest| r.volume_id.is_empty()),
        internal("errors.modify.missing", |r: &ControllerModifyVolumeRequest| r.volume_id == MISSING),
        internal("errors.modify.unknown-parameter", |r: &ControllerModifyVolumeRequest| {
            r.mutable_parameters.contains_key("berth-certify-unknown")
        }),
        internal("errors.get-volume.no-id", |r: &ControllerGetVolumeRequest| r.volume_id.is_empty()),
        internal("errors.get-volume.missing", |r: &ControllerGetVolumeRequest| r.volume_id == MISSING),
        internal("errors.health.no-id", |r: &ControllerGetVolumeHealthRequest| r.volume_id.is_empty()),
        internal("errors.health.missing", |r: &ControllerGetVolumeHealthRequest| r.volume_id == MISSING),
        internal("errors.group.no-name", |r: &CreateVolumeGroupSnapshotRequest| r.name.is_empty()),
        internal("errors.group.no-sources", |r: &CreateVolumeGroupSnapshotRequest| {
            r.source_volume_ids.is_empty()
        }),
        internal("errors.group.get-no-id", |r: &GetVolumeGroupSnapshotRequest| {
            r.group_snapshot_id.is_empty()
        }),
        internal("errors.group.get-missing", |r: &GetVolumeGroupSnapshotRequest| {
            r.group_snapshot_id == MISSING
        }),
        internal("errors.group.delete-no-id", |r: &DeleteVolumeGroupSnapshotRequest| {
            r.group_snapshot_id.is_empty()
        }),
        refuse("errors.group.delete-missing", Code::NotFound, |_, r: &DeleteVolumeGroupSnapshotRequest| {
            r.group_snapshot_id == MISSING
        }),
    ]
}

pub(super) fn node_errors() -> Vec<Switch> {
    type Stage = NodeStageVolumeRequest;
    type Publish = NodePublishVolumeRequest;
    type Stats = NodeGetVolumeStatsRequest;
    vec![
        internal("errors.stage.no-id", |r: &Stage| r.volume_id.is_empty()),
        internal("errors.stage.no-path", |r: &Stage| r.staging_target_path.is_empty()),
        internal("errors.stage.no-capability", |r: &Stage| r.volume_capability.is_none()),
        of_deleted::<Stage>("errors.stage.missing", |r| r.volume_id.clone()),
        internal("errors.unstage.no-id", |r: &NodeUnstageVolumeRequest| r.volume_id.is_empty()),
        internal("errors.unstage.no-path", |r: &NodeUnstageVolumeRequest| r.staging_target_path.is_empty()),
        internal("errors.publish.no-id", |r: &Publish| r.volume_id.is_empty()),
        internal("errors.publish.no-target", |r: &Publish| r.target_path.is_empty()),
        internal("errors.publish.no-capability", |r: &Publish| r.volume_capability.is_none()),
        internal("errors.publish.no-staging", |r: &Publish| r.staging_target_path.is_empty()),
        of_deleted::<Publish>("errors.publish.missing", |r| r.volume_id.clone()),
        recode("errors.publish.other-mode", Code::AlreadyExists, |_: &Publish| true),
        internal("errors.unpublish.no-id", |r: &NodeUnpublishVolumeRequest| r.volume_id.is_empty()),
        internal("errors.unpublish.no-target", |r: &NodeUnpublishVolumeRequest| r.target_path.is_empty()),
        internal("errors.stats.no-id", |r: &Stats| r.volume_id.is_empty()),
        internal("errors.stats.no-path", |r: &Stats| r.volume_path.is_empty()),
        internal("errors.stats.missing", |r: &Stats| r.volume_id == MISSING),
        internal("errors.stats.other-path", |r: &Stats| {
            is_volume(&r.volume_id) && !r.volume_path.is_empty() && !r.volume_path.contains("target-")
        }),
        internal("errors.node-expand.no-id", |r: &NodeExpandVolumeRequest| r.volume_id.is_empty()),
        internal("errors.node-expand.no-path", |r: &NodeExpandVolumeRequest| r.volume_path.is_empty()),
        internal("errors.node-expand.missing", |r: &NodeExpandVolumeRequest| r.volume_id == MISSING),
        internal("errors.node-health.no-id", |r: &NodeGetVolumeHealthRequest| r.volume_id.is_empty()),
        internal("errors.node-health.missing", |r: &NodeGetVolumeHealthRequest| r.volume_id == MISSING),
    ]
}
