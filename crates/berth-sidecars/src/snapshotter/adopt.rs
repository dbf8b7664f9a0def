//! Finds the node of contents that somebody made for snapshots that exist.
//!
//! Where each node has a snapshotter of its own, the snapshot controller labels a content with the node of its volume. A
//! content with a snapshot's handle names no volume. So each snapshotter asks its driver for the snapshots of contents
//! without a label, and labels those that its driver has; from then on it works on them like on all others.

use std::sync::Arc;

use berth_csi::v1::ListSnapshotsRequest;
use berth_kube::{Key, Loop, Next};

use super::Context;
use crate::driver::ControllerCapability;
use crate::failure::Failure;
use crate::snapshots::{VolumeSnapshotContent, names};

/// Labels contents until the cluster's shutdown.
pub(super) async fn run(context: Arc<Context>, node: String) {
    let unlabelled =
        context.cluster.cache_labelled::<VolumeSnapshotContent>(&format!("!{}", names::MANAGED_BY));
    let queue = context.cluster.queue("csi-snapshotter-unlabelled", context.options.retry);
    let work = |key: Key| {
        let (context, unlabelled, node) = (context.clone(), unlabelled.clone(), node.clone());
        async move {
            let found = unlabelled.get(&key);
            if let Some(found) = found.filter(|found| found.metadata.deletion_timestamp.is_none()) {
                adopt(&context, &found, &node).await?;
            }
            Ok::<_, Failure>(Next::Done)
        }
    };
    Loop::new(&context.cluster, &queue).keyed(&unlabelled).run(1, work).await;
}

async fn adopt(context: &Context, found: &VolumeSnapshotContent, node: &str) -> Result<(), Failure> {
    let handle = found.spec.source.snapshot_handle.clone();
    let Some(handle) = handle.filter(|_| found.spec.driver == context.name) else { return Ok(()) };
    if !context.driver.identity_of(&context.name)?.can(ControllerCapability::ListSnapshots) {
        return Ok(());
    }
    let request = ListSnapshotsRequest { snapshot_id: handle.clone(), ..ListSnapshotsRequest::default() };
    let answer = context.driver.call(context.options.timeout, request).await?;
    let mut known = answer.entries.iter().filter_map(|entry| entry.snapshot.as_ref());
    if known.any(|snapshot| snapshot.snapshot_id == handle) {
        let label = |object: &mut VolumeSnapshotContent| {
            let labels = object.metadata.labels.get_or_insert_default();
            labels.entry(names::MANAGED_BY.to_owned()).or_insert_with(|| node.to_owned());
        };
        context.cluster.edit(found, label).await?;
    }
    Ok(())
}
