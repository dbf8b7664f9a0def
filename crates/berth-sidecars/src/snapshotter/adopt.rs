//! Finds the node of contents that somebody made for snapshots, and groups of them, that exist.
//!
//! Where each node has a snapshotter of its own, the snapshot controller labels a content with the node of its volumes. A
//! content with the handle of a snapshot or of a group names no volume. So each snapshotter asks its driver for what the
//! contents without a label name, and labels those that its driver has; from then on it works on them like on all others.
//! Those that are being deleted are labelled too, since nobody else would release them.

use std::sync::Arc;

use berth_csi::v1::{GetVolumeGroupSnapshotRequest, ListSnapshotsRequest};
use berth_kube::{Key, Kind, Loop, Next};
use tonic::Code;

use super::Context;
use crate::driver::{ControllerCapability, GroupCapability};
use crate::failure::Failure;
use crate::snapshots::{VolumeGroupSnapshotContent, VolumeSnapshotContent, names};

/// A content that may name by its handle what exists already.
pub(super) trait Given: Kind {
    const QUEUE: &str;

    /// Whether this node's driver has what the content names.
    fn is_here(&self, context: &Context) -> impl Future<Output = Result<bool, Failure>> + Send;
}

/// Labels contents until the cluster's shutdown.
pub(super) async fn run<C: Given>(context: Arc<Context>, node: String) {
    let unlabelled = context.cluster.cache_labelled::<C>(&format!("!{}", names::MANAGED_BY));
    let queue = context.cluster.queue(C::QUEUE, context.options.retry);
    let work = |key: Key| {
        let (context, unlabelled, node) = (context.clone(), unlabelled.clone(), node.clone());
        async move {
            if let Some(found) = unlabelled.get(&key)
                && found.is_here(&context).await?
            {
                let label = |object: &mut C| {
                    let labels = object.meta_mut().labels.get_or_insert_default();
                    labels.entry(names::MANAGED_BY.to_owned()).or_insert_with(|| node.clone());
                };
                context.cluster.edit(&*found, label).await?;
            }
            Ok::<_, Failure>(Next::Done)
        }
    };
    Loop::new(&context.cluster, &queue).keyed(&unlabelled).run(1, work).await;
}

impl Given for VolumeSnapshotContent {
    const QUEUE: &str = "csi-snapshotter-unlabelled";

    async fn is_here(&self, context: &Context) -> Result<bool, Failure> {
        let handle = self.spec.source.snapshot_handle.clone();
        let Some(handle) = handle.filter(|_| self.spec.driver == context.name) else { return Ok(false) };
        if !context.driver.identity_of(&context.name)?.can(ControllerCapability::ListSnapshots) {
            return Ok(false);
        }
        let request = ListSnapshotsRequest { snapshot_id: handle.clone(), ..ListSnapshotsRequest::default() };
        let answer = context.driver.call(context.options.timeout, request).await?;
        let mut known = answer.entries.iter().filter_map(|entry| entry.snapshot.as_ref());
        Ok(known.any(|snapshot| snapshot.snapshot_id == handle))
    }
}

impl Given for VolumeGroupSnapshotContent {
    const QUEUE: &str = "csi-snapshotter-groupsnapshots-unlabelled";

    async fn is_here(&self, context: &Context) -> Result<bool, Failure> {
        let handles = self.spec.source.group_snapshot_handles.clone();
        let Some(handles) = handles.filter(|_| self.spec.driver == context.name) else { return Ok(false) };
        let identity = context.driver.identity_of(&context.name)?;
        if !identity.group.contains(&GroupCapability::CreateDeleteGetVolumeGroupSnapshot) {
            return Ok(false);
        }
        // Without its class's secrets: a driver for one node's storage has them no use for.
        let request = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: handles.volume_group_snapshot_handle,
            snapshot_ids: handles.volume_snapshot_handles,
            ..GetVolumeGroupSnapshotRequest::default()
        };
        match context.driver.call(context.options.timeout, request).await {
            Ok(_) => Ok(true),
            Err(status) if status.code() == Code::NotFound => Ok(false),
            // It has the group, and refuses what else the content says of it. By the label somebody tells the owner so.
            Err(status) if status.code() == Code::InvalidArgument => Ok(true),
            Err(status) => Err(status.into()),
        }
    }
}
