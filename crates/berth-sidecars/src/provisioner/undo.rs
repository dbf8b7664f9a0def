//! Deletes what was made for a claim that does not want it any more.

use std::sync::Arc;

use berth_core::names::events;
use berth_csi::v1::DeleteVolumeRequest;
use berth_kube::{Key, Next, storage};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;

use super::request::VolumeRequest;
use super::{CONFLICT_PAUSE, Plan, Provisioner, Unprepared, plan};
use crate::driver::Identity;
use crate::failure::{Failure, is_final_for_provisioning};
use crate::secrets::{self, Purpose};

impl Provisioner {
    /// Finds the volume that may have been made for a claim that does not want it any more, and deletes it.
    pub(super) async fn undo(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        class: Option<&StorageClass>,
        identity: &Identity,
        name: &str,
    ) -> Result<Next, Failure> {
        // Data is about to be deleted: what the caches say is not enough.
        let live = self.cluster.fetch::<PersistentVolumeClaim>(&Key::of(claim.as_ref())).await?;
        let Some(live) = live.filter(|live| live.uid() == claim.uid()) else { return Ok(Next::Done) };
        let saved = self.cluster.fetch::<PersistentVolume>(&Key::cluster(name)).await?.is_some();
        match plan(&live, class, self.scope(), name, saved) {
            Plan::Undo => {}
            Plan::RemoveFinalizer => return self.remove_claim_finalizer(&live).await.map(|()| self.undone()),
            Plan::Nothing | Plan::Provision | Plan::Select => return Ok(Next::Done),
        }
        let known = self.remembered.lock().get(&live.uid().unwrap_or_default()).cloned();
        let request = match (known, class) {
            (Some(request), _) => request,
            (None, Some(class)) => match self.prepare(&live, class, identity, true).await {
                Ok(request) => Arc::new(request),
                Err(Unprepared::Foreign | Unprepared::Elsewhere(_)) => {
                    return self.remove_claim_finalizer(&live).await.map(|()| self.undone());
                }
                Err(Unprepared::Failed(failure) | Unprepared::Reschedule(failure)) => {
                    self.record_failed(&live, class, &failure);
                    return Err(failure);
                }
            },
            (None, None) => {
                let text = format!(
                    "whether a volume was created for this claim can only be found out with its StorageClass {:?}, which \
                     is gone: create it again, or remove the finalizer {} if you know that there is no volume {name}",
                    storage::class_of_claim(&live),
                    self.claim_finalizer
                );
                self.recorder.warning(live.as_ref(), events::PROVISIONING_FAILED, text);
                return Ok(Next::Done);
            }
        };
        self.delete_made(&live, &request, name).await?;
        self.remove_claim_finalizer(&live).await?;
        self.release_source(&live);
        Ok(self.undone())
    }

    /// What was begun on this node is undone, and may be begun anew: no change of the claim will say so.
    fn undone(&self) -> Next {
        if self.own_node.is_some() { Next::After(CONFLICT_PAUSE) } else { Next::Done }
    }

    /// Deletes the volume that may have been made on a node that is gone, by one who was killed before he could say so:
    /// from another node on, nobody would know of it.
    pub(super) async fn delete_elsewhere(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        class: &StorageClass,
        identity: &Identity,
        name: &str,
    ) -> Result<(), Failure> {
        // Data is about to be deleted: what the caches say is not enough.
        if self.cluster.fetch::<PersistentVolume>(&Key::cluster(name)).await?.is_some() {
            return Ok(());
        }
        match self.prepare(claim, class, identity, true).await {
            Ok(request) => self.delete_made(claim, &request, name).await,
            Err(Unprepared::Foreign | Unprepared::Elsewhere(_)) => Ok(()),
            Err(Unprepared::Failed(failure) | Unprepared::Reschedule(failure)) => {
                Err(self.not_undone(claim, "", failure))
            }
        }
    }

    /// Finds the volume that may have been made for a claim by making it, and deletes it.
    async fn delete_made(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        request: &VolumeRequest,
        name: &str,
    ) -> Result<(), Failure> {
        let secret = request.secrets.get(&Purpose::Provisioner);
        let secrets = secrets::read_if_there(&self.cluster, secret).await?;
        match self.create(claim, request, &secrets).await {
            Ok(made) if self.volumes_by_handle.get(&made.volume_id).is_empty() => {
                let request = DeleteVolumeRequest { volume_id: made.volume_id, secrets };
                let deleted = self.driver.call(self.options.timeout, request).await;
                deleted.map(drop).map_err(|status| self.not_undone(claim, "", status.into()))
            }
            // Somebody made a PersistentVolume for it by hand.
            Ok(_) => Ok(()),
            Err(failure) if !failure.code().is_none_or(is_final_for_provisioning) => {
                let text = format!("whether there is a volume {name} to delete is not known: ");
                Err(self.not_undone(claim, &text, failure))
            }
            Err(failure) => {
                tracing::debug!(error = failure.sentence(), volume = name, "no volume to undo");
                Ok(())
            }
        }
    }

    /// Records why a claim that is deleted, or given to another, stays as it is.
    fn not_undone(&self, claim: &PersistentVolumeClaim, what: &str, failure: Failure) -> Failure {
        let text = format!("{what}{}{}", failure.sentence(), failure.hint());
        self.recorder.warning(claim, events::PROVISIONING_FAILED, text);
        failure
    }
}
