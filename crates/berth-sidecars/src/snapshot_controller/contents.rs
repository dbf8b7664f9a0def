//! Contents: checked, and kept for as long as a snapshot is bound to them.

use berth_kube::{Key, Next};
use kube::ResourceExt as _;

use super::Controller;
use crate::failure::Failure;
use crate::snapshots::{VolumeGroupSnapshotContent, VolumeSnapshotContent, names};
use berth_kube::finalizers;

/// What is to be done about a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes. That its snapshot does not exist is no reason to delete it.
    Nothing,
    /// It cannot be used as it is.
    Invalid,
    /// It must not go without its snapshot.
    Protect,
}

/// What to do about a content that names so many sources, is bound or not, going or not, protected or not.
pub(super) fn plan(sources: usize, bound: bool, deleting: bool, protected: bool) -> Plan {
    match (sources, bound && !deleting && !protected) {
        (1, true) => Plan::Protect,
        (1, false) => Plan::Nothing,
        _ => Plan::Invalid,
    }
}

pub(super) fn of_content(content: &VolumeSnapshotContent) -> Plan {
    let source = &content.spec.source;
    plan(
        usize::from(source.volume_handle.is_some()) + usize::from(source.snapshot_handle.is_some()),
        content.spec.volume_snapshot_ref.uid.as_deref().is_some_and(|uid| !uid.is_empty()),
        content.metadata.deletion_timestamp.is_some(),
        finalizers::has(content, names::CONTENT),
    )
}

pub(super) fn of_group(content: &VolumeGroupSnapshotContent) -> Plan {
    let source = &content.spec.source;
    let volumes = source.volume_handles.as_ref().is_some_and(|handles| !handles.is_empty());
    plan(
        usize::from(volumes) + usize::from(source.group_snapshot_handles.is_some()),
        content.spec.volume_group_snapshot_ref.uid.as_deref().is_some_and(|uid| !uid.is_empty()),
        content.metadata.deletion_timestamp.is_some(),
        finalizers::has(content, names::GROUP_CONTENT),
    )
}

impl Controller {
    pub(super) async fn sync_content(&self, key: &Key) -> Result<Next, Failure> {
        let Some(content) = self.contents.get(key) else { return Ok(Next::Done) };
        match of_content(&content) {
            Plan::Nothing => {}
            Plan::Invalid => {
                let text = "Exactly one of VolumeHandle and SnapshotHandle should be specified";
                self.recorder.warning(content.as_ref(), "ContentValidationError", text);
                tracing::warn!(content = content.name_any(), text, "a content cannot be used");
            }
            Plan::Protect => {
                self.cluster
                    .edit(content.as_ref(), |content| {
                        if content.metadata.deletion_timestamp.is_none() {
                            finalizers::add(content, names::CONTENT);
                        }
                    })
                    .await?;
            }
        }
        Ok(Next::Done)
    }
}

#[cfg(test)]
mod tests;
