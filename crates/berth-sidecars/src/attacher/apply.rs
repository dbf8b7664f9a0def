//! Carries out what was decided about attachments.

use std::collections::BTreeMap;
use std::time::Instant;

use berth_csi::v1::ControllerUnpublishVolumeRequest;
use berth_kube::timeline::Step;
use berth_kube::{Key, Next, finalizers};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeSpec};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentStatus, VolumeError};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use tonic::Code;

use super::Attacher;
use super::plan::{self, Attached, Plan, Volume};
use crate::driver::Identity;
use crate::failure::Failure;
use crate::secrets;

/// The longest message of a VolumeError, in bytes.
const LONGEST_MESSAGE: usize = 1024;

impl Attacher {
    pub(super) async fn sync(&self, key: &Key) -> Result<Next, Failure> {
        let Some(attachment) = self.attachments.get(key).filter(|attachment| self.scope.includes(attachment))
        else {
            self.forced.lock().remove(key);
            return Ok(Next::Done);
        };
        let identity = self.driver.identity_of(&self.name)?;
        let forced = self.forced.lock().contains(key);
        let plan = plan::plan(&attachment, identity.attaches(), &self.finalizer, forced);
        if plan == Plan::Nothing {
            return Ok(Next::Done);
        }
        let volume = plan::volume_of(&attachment);
        let held = match &volume {
            Ok(Volume::Named(name)) => name.clone(),
            Ok(Volume::Inline(spec)) => {
                spec.csi.as_ref().map(|csi| csi.volume_handle.clone()).unwrap_or_default()
            }
            Err(_) => key.name.clone(),
        };
        let (queue, again) = (self.queue.clone(), key.clone());
        let Some(_held) = self.driver.try_hold(&held, move || queue.add(again)) else {
            return Ok(Next::Done);
        };
        match plan {
            Plan::Nothing => Ok(Next::Done),
            Plan::Call => {
                self.set_attached(&attachment, BTreeMap::new()).await?;
                Ok(Next::Done)
            }
            Plan::Release => self.release(&attachment).await,
            Plan::Attach => {
                self.forced.lock().remove(key);
                let done = match volume {
                    Ok(volume) => self.attach(&attachment, &volume, &identity).await,
                    Err(failure) => Err(failure),
                };
                self.report_failure(key, done, false).await
            }
            Plan::Detach => {
                let done = match volume {
                    Ok(volume) => self.detach(&attachment, &volume).await,
                    // Never valid, so never attached.
                    Err(_) => self.release(&attachment).await,
                };
                self.report_failure(key, done, true).await
            }
        }
    }

    async fn attach(
        &self,
        attachment: &VolumeAttachment,
        volume: &Volume,
        identity: &Identity,
    ) -> Result<Next, Failure> {
        let (spec, object) = match volume {
            Volume::Inline(spec) => ((**spec).clone(), None),
            Volume::Named(name) => {
                let object = self.volumes.named(name);
                (plan::attachable(object.as_deref(), name)?, object)
            }
        };
        let csi = plan::csi_of(&spec, &self.name)?;
        let node = attachment.spec.node_name.as_str();
        let node = plan::node_id(self.nodes.named(node).as_deref(), &self.name).ok_or_else(|| {
            Failure::refused(format!(
                "CSINode {node} does not contain driver {}; is its node plugin running and registered there?",
                self.name
            ))
        })?;
        let attached = Attached {
            handle: csi.volume_handle.clone(),
            node,
            secret: csi.controller_publish_secret_ref.clone(),
        };
        let secrets = secrets::read(&self.cluster, attached.secret.as_ref()).await?;
        let request = plan::publish(&spec, &attached, identity, &self.options.default_fs_type, secrets)?;
        let keep_volume = async {
            match object {
                Some(object) => {
                    let kept = self
                        .cluster
                        .update(object.as_ref(), |object| finalizers::add(object, &self.finalizer));
                    kept.await.map(|_| ())
                }
                None => Ok(()),
            }
        };
        let keep_attachment =
            self.cluster.update(attachment, |attachment| plan::keep(attachment, &self.finalizer, &attached));
        let ((), kept) = tokio::try_join!(keep_volume, keep_attachment)?;
        let begun = Instant::now();
        let answer = self.driver.call(self.options.timeout, request).await.map_err(Failure::from);
        trace_call("ControllerPublishVolume", "NODE_READY", attachment, begun, answer.as_ref().err());
        self.set_attached(&kept, answer?.publish_context).await?;
        Ok(Next::Done)
    }

    async fn detach(&self, attachment: &VolumeAttachment, volume: &Volume) -> Result<Next, Failure> {
        let (spec, named): (Option<PersistentVolumeSpec>, Option<&str>) = match volume {
            Volume::Inline(spec) => (Some((**spec).clone()), None),
            Volume::Named(name) => {
                (self.volumes.named(name).and_then(|volume| volume.spec.clone()), Some(name.as_str()))
            }
        };
        let node = attachment.spec.node_name.as_str();
        let attached =
            plan::detachable(attachment, spec.as_ref(), self.nodes.named(node).as_deref(), &self.name)?;
        // A secret that is gone must not keep the attachment for ever: the driver may not need it.
        let secrets = match secrets::read(&self.cluster, attached.secret.as_ref()).await {
            Err(Failure::Refused(why)) => {
                tracing::warn!(attachment = attachment.name_any(), why, "detaching without the secret");
                BTreeMap::new()
            }
            secrets => secrets?,
        };
        let request =
            ControllerUnpublishVolumeRequest { volume_id: attached.handle, node_id: attached.node, secrets };
        let begun = Instant::now();
        let answer = self.driver.call(self.options.timeout, request).await.map_err(Failure::from);
        trace_call("ControllerUnpublishVolume", "", attachment, begun, answer.as_ref().err());
        match answer {
            Err(failure) if failure.code() == Some(Code::NotFound) && self.is_gone(node, named).await? => {}
            result => {
                result?;
            }
        }
        self.release(attachment).await
    }

    /// Whether the node or the volume that the driver does not know is unknown to Kubernetes too.
    async fn is_gone(&self, node: &str, volume: Option<&str>) -> Result<bool, Failure> {
        if self.cluster.fetch::<Node>(&Key::cluster(node)).await?.is_none() {
            return Ok(true);
        }
        match volume {
            Some(volume) => {
                Ok(self.cluster.fetch::<PersistentVolume>(&Key::cluster(volume)).await?.is_none())
            }
            None => Ok(false),
        }
    }

    /// Detached: first the finalizer, so that the attachment goes; if others keep it, it says what it is.
    async fn release(&self, attachment: &VolumeAttachment) -> Result<Next, Failure> {
        let freed = self
            .cluster
            .update(attachment, |attachment| finalizers::remove(attachment, &self.finalizer))
            .await;
        let left = match freed {
            Err(error) if error.is_not_found() => return Ok(Next::Done),
            freed => freed?,
        };
        if left.finalizers().is_empty() {
            return Ok(Next::Done);
        }
        let said = self.cluster.update_status(left.as_ref(), |attachment| {
            attachment.status = Some(VolumeAttachmentStatus::default());
        });
        match said.await {
            Err(error) if error.is_not_found() => {}
            said => {
                said?;
            }
        }
        Ok(Next::Done)
    }

    async fn set_attached(
        &self,
        attachment: &VolumeAttachment,
        metadata: BTreeMap<String, String>,
    ) -> Result<(), Failure> {
        self.cluster
            .update_status(attachment, |attachment| {
                attachment.status = Some(VolumeAttachmentStatus {
                    attached: true,
                    attachment_metadata: (!metadata.is_empty()).then_some(metadata),
                    attach_error: None,
                    detach_error: attachment.status.as_ref().and_then(|status| status.detach_error.clone()),
                });
            })
            .await?;
        Ok(())
    }

    /// Writes a failure where people look for it.
    async fn report_failure(
        &self,
        key: &Key,
        done: Result<Next, Failure>,
        detaching: bool,
    ) -> Result<Next, Failure> {
        let failure = match done {
            Err(failure) if !failure.is_conflict() => failure,
            done => return done,
        };
        let Some(attachment) = self.attachments.get(key) else { return Err(failure) };
        // The API server takes no longer one.
        let mut message = format!("{}{}", failure.sentence(), failure.hint());
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
        let error = VolumeError {
            message: Some(message),
            time: Some(Time(Timestamp::now())),
            error_code: failure.code().filter(|_| !detaching).map(|code| code as i32),
        };
        let same = |known: Option<&VolumeError>| known.is_some_and(|known| known.message == error.message);
        let status = attachment.status.clone().unwrap_or_default();
        let known = if detaching { status.detach_error.as_ref() } else { status.attach_error.as_ref() };
        if !same(known) {
            let reported = self.cluster.update_status(attachment.as_ref(), |attachment| {
                let status = attachment.status.get_or_insert_default();
                if detaching {
                    status.detach_error = Some(error);
                } else {
                    status.attach_error = Some(error);
                }
            });
            if let Err(error) = reported.await {
                tracing::debug!(error = error.chain(), "the failure could not be written to the attachment");
            }
        }
        Err(failure)
    }

    /// Lets a volume go that is being deleted and attached nowhere.
    pub(super) async fn sync_volume(&self, key: &Key) -> Result<Next, Failure> {
        let Some(volume) = self.volumes.get(key) else { return Ok(Next::Done) };
        let deleting = volume.metadata.deletion_timestamp.is_some();
        if !deleting || !finalizers::has(volume.as_ref(), &self.finalizer) {
            return Ok(Next::Done);
        }
        // Comes again when the last attachment goes.
        if !self.by_volume.get(key.name.as_str()).is_empty() {
            return Ok(Next::Done);
        }
        self.cluster.remove_finalizer(volume.as_ref(), &self.finalizer).await?;
        Ok(Next::Done)
    }
}

fn trace_call(
    call: &str,
    state: &str,
    attachment: &VolumeAttachment,
    begun: Instant,
    failure: Option<&Failure>,
) {
    let why = failure.map(Failure::sentence);
    Step {
        component: "attacher",
        call,
        state,
        volume: attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default(),
        node: &attachment.spec.node_name,
        ..Step::default()
    }
    .ended(begun, why.as_deref());
}
