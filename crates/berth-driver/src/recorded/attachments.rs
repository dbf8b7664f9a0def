//! Attachment of recorded volumes: who has a volume stands in its record.

use std::{collections::BTreeMap, future::Future};

use berth_core::{AccessMode, NodeId, VolumeCapability, VolumeId};
use serde::{Deserialize, Serialize};

use super::{Provision, Record, Recorded};
use crate::{
    Attached, Attachment, Context, Error, ReadOnlyAttachment, Result, Volume, ledger::record::ModeRecord,
};

/// Recorded volumes are attached to a node before it can use them.
pub trait ProvisionAttachment: Provision {
    /// Attaches and waits until it is done; [`Error::NotFound`] for an unknown node. What it returns reaches the node as
    /// [`crate::NodeVolume::publish_context`]. Repeated for the same node, it answers the same. Whether the volume's other
    /// attachments allow it has been checked.
    fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
        read_only: bool,
    ) -> impl Future<Output = Result<BTreeMap<String, String>>> + Send;

    /// Detaches from the node; `Ok` if it is not attached there.
    fn detach(&self, ctx: &Context, id: &VolumeId, node: &NodeId) -> impl Future<Output = Result<()>> + Send;
}

/// A node that has a volume, or may have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AttachmentRecord {
    node: String,
    read_only: bool,
    #[serde(with = "ModeRecord")]
    mode: AccessMode,
}

impl AttachmentRecord {
    pub(super) fn attached(&self) -> Result<Attached> {
        let node = self.node.parse().map_err(|error| Error::internal(format!("a record's node: {error}")))?;
        Ok(Attached { node, read_only: self.read_only, mode: Some(self.mode) })
    }
}

impl<B: ProvisionAttachment> Recorded<B> {
    /// Changes a volume's record; its attachments are those that `change` leaves.
    async fn edit(&self, id: &VolumeId, change: impl FnOnce(&mut Record)) -> Result<()> {
        let Some((stem, mut record)) = self.record_of(id).await? else { return Err(Error::no_volume(id)) };
        let before = record.clone();
        change(&mut record);
        if record != before {
            self.write(&stem, record).await?;
        }
        Ok(())
    }

    /// The record names the node before the backend is asked, so that a volume that may be attached is detached again and is not deleted.
    async fn ensure_attached(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
        read_only: bool,
    ) -> Result<BTreeMap<String, String>> {
        let wanted = AttachmentRecord { node: node.to_string(), read_only, mode: capability.mode };
        let known = volume.attachments.iter().any(|attached| attached.node == *node);
        if !known {
            self.edit(&volume.id, |record| record.attachments.push(wanted)).await?;
        }
        let outcome = self.backend.attach(ctx, volume, node, capability, read_only).await;
        let is_certain = matches!(
            outcome,
            Err(Error::Invalid(_)
                | Error::NotFound { .. }
                | Error::Conflict(_)
                | Error::Precondition(_)
                | Error::Exhausted(_)
                | Error::Denied(_))
        );
        if is_certain && !known {
            self.forget_attachment(&volume.id, node).await?;
        }
        outcome
    }

    async fn forget_attachment(&self, id: &VolumeId, node: &NodeId) -> Result<()> {
        self.edit(id, |record| record.attachments.retain(|attached| attached.node != node.as_str())).await
    }
}

impl<B: ProvisionAttachment> Attachment for Recorded<B> {
    async fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        self.ensure_attached(ctx, volume, node, capability, false).await
    }

    async fn detach(&self, ctx: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        let Some((_, record)) = self.record_of(id).await? else { return Ok(()) };
        for attached in &record.attachments {
            let attached = attached.attached()?;
            if node.is_none_or(|node| attached.node == *node) {
                self.backend.detach(ctx, id, &attached.node).await?;
                self.forget_attachment(id, &attached.node).await?;
            }
        }
        Ok(())
    }
}

impl<B: ProvisionAttachment> ReadOnlyAttachment for Recorded<B> {
    async fn attach_read_only(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        self.ensure_attached(ctx, volume, node, capability, true).await
    }
}
