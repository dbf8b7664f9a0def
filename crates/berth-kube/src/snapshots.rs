//! The types of the snapshot kinds, which Kubernetes has as custom resources: of single claims and of groups of claims.

mod groups;
mod objects;

pub use self::groups::{
    GroupSnapshotHandles, VolumeGroupSnapshot, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent,
    VolumeGroupSnapshotContentSource, VolumeGroupSnapshotContentSpec, VolumeGroupSnapshotContentStatus,
    VolumeGroupSnapshotSource, VolumeGroupSnapshotSpec, VolumeGroupSnapshotStatus, VolumeSnapshotInfo,
};
pub use self::objects::{
    SnapshotError, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, VolumeSnapshotContentSource,
    VolumeSnapshotContentSpec, VolumeSnapshotContentStatus, VolumeSnapshotSource, VolumeSnapshotSpec,
    VolumeSnapshotStatus,
};
