//! Compares, now and then, what is called attached with what the driver says is attached.

use std::collections::{HashMap, HashSet};

use berth_csi::v1::ListVolumesRequest;
use berth_kube::Key;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use tonic::Status;

use super::Attacher;
use super::plan::{self, Volume};
use crate::driver::ControllerCapability;

/// The nodes that each volume is attached to.
type Published = HashMap<String, HashSet<String>>;

impl Attacher {
    /// Asks at every interval, if the driver can answer that.
    pub(super) async fn reconcile(&self) {
        loop {
            tokio::select! {
                () = self.cluster.shutdown().cancelled() => return,
                () = tokio::time::sleep(self.options.reconcile) => {}
            }
            let Ok(identity) = self.driver.identity() else { continue };
            if !identity.attaches()
                || !identity.can(ControllerCapability::ListVolumes)
                || !identity.can(ControllerCapability::ListVolumesPublishedNodes)
            {
                continue;
            }
            // Before the list: what is called attached by now is in it.
            let attachments = self.ours.get(&());
            match self.published().await {
                Ok(published) => {
                    for attachment in attachments {
                        self.compare(&attachment, &published);
                    }
                }
                Err(status) => tracing::warn!(error = status.message(), "listing what is attached failed"),
            }
        }
    }

    fn compare(&self, attachment: &VolumeAttachment, published: &Published) {
        if attachment.metadata.deletion_timestamp.is_some() {
            return;
        }
        let spec = match plan::volume_of(attachment) {
            Ok(Volume::Named(name)) => self.volumes.named(&name).and_then(|volume| volume.spec.clone()),
            Ok(Volume::Inline(spec)) => Some(*spec),
            Err(_) => return,
        };
        let node = self.nodes.named(&attachment.spec.node_name);
        let Ok(attached) = plan::detachable(attachment, spec.as_ref(), node.as_deref(), &self.name) else {
            return;
        };
        let really = published.get(&attached.handle).is_some_and(|nodes| nodes.contains(&attached.node));
        let called = attachment.status.as_ref().is_some_and(|status| status.attached);
        // What is not called attached is being worked on anyway.
        if called && !really {
            tracing::warn!(
                attachment = attachment.name_any(),
                volume = attached.handle,
                node = attached.node,
                "the driver does not have it attached; attaching again"
            );
            let key = Key::of(attachment);
            self.forced.lock().insert(key.clone());
            self.queue.add(key);
        }
    }

    /// All pages, each within the time of one call.
    async fn published(&self) -> Result<Published, Status> {
        let mut published = Published::new();
        let mut tokens = HashSet::new();
        let mut starting_token = String::new();
        loop {
            let request = ListVolumesRequest { max_entries: self.options.max_entries, starting_token };
            let page = self.driver.call(self.options.timeout, request).await?;
            for entry in page.entries {
                let nodes = entry.status.map(|status| status.published_node_ids).unwrap_or_default();
                let handle = entry.volume.map(|volume| volume.volume_id).unwrap_or_default();
                published.entry(handle).or_default().extend(nodes);
            }
            if page.next_token.is_empty() {
                return Ok(published);
            }
            if !tokens.insert(page.next_token.clone()) {
                return Err(Status::internal(
                    "the CSI driver's ListVolumes never ends: it gives a token again",
                ));
            }
            starting_token = page.next_token;
        }
    }
}
