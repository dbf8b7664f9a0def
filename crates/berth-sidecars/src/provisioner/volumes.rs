//! Deletes the storage of volumes whose claims are gone, and then the volumes.
//!
//! What a volume needs is decided from the volume and its attachments.

use std::time::Instant;

use berth_core::names::events;
use berth_core::names::{
    DELETION_SECRET_NAME, DELETION_SECRET_NAMESPACE, PROVISIONED_BY, PROVISIONER_FINALIZER,
};
use berth_csi::{remarks::Remarks, v1::DeleteVolumeRequest};
use berth_kube::timeline::Step;
use berth_kube::{Key, Next, finalizers};
use k8s_openapi::api::core::v1::{PersistentVolume, SecretReference};
use kube::ResourceExt as _;

use super::Provisioner;
use crate::failure::Failure;
use crate::secrets::{self, Purpose};

impl Provisioner {
    pub(super) async fn sync_volume(&self, key: &Key) -> Result<Next, Failure> {
        let Some(volume) = self.volumes.get(key) else { return Ok(Next::Done) };
        let attached = || {
            self.attachments
                .as_ref()
                .is_some_and(|(_, by_volume)| !by_volume.get(key.name.as_str()).is_empty())
        };
        let reached = |volume| self.own_node.as_ref().is_none_or(|own_node| own_node.reaches(volume));
        match plan(&volume, &self.name, reached(&volume), attached()) {
            // Comes again when the attachment goes.
            Plan::Nothing | Plan::Attached => return Ok(Next::Done),
            Plan::Protect => {
                self.cluster
                    .update(volume.as_ref(), |volume| finalizers::add(volume, PROVISIONER_FINALIZER))
                    .await?;
                return Ok(Next::Done);
            }
            Plan::Unprotect => {
                self.cluster
                    .update(volume.as_ref(), |volume| finalizers::remove(volume, PROVISIONER_FINALIZER))
                    .await?;
                return Ok(Next::Done);
            }
            Plan::Delete => {}
        }
        self.driver.identity_of(&self.name)?;
        let (queue, again) = (self.volume_queue.clone(), key.clone());
        let Some(_held) = self.driver.try_hold(&key.name, move || queue.add(again)) else {
            return Ok(Next::Done);
        };
        // Data is about to be deleted: what the cache says is not enough.
        let live =
            self.cluster.fetch::<PersistentVolume>(key).await?.filter(|live| live.uid() == volume.uid());
        let Some(live) = live else { return Ok(Next::Done) };
        if plan(&live, &self.name, reached(&live), attached()) != Plan::Delete {
            return Ok(Next::Done);
        }
        let begun = Instant::now();
        let class =
            live.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref()).unwrap_or_default();
        match self.delete(&live).await {
            Err(failure) if !failure.is_conflict() => {
                self.options.metrics.not_deleted(class);
                let text = format!("{}{}", failure.sentence(), failure.hint());
                self.recorder.warning(live.as_ref(), events::VOLUME_FAILED_DELETE, text);
                Err(failure)
            }
            result => {
                if result.is_ok() {
                    self.options.metrics.deleted(class, begun.elapsed());
                }
                result
            }
        }
    }

    async fn delete(&self, volume: &PersistentVolume) -> Result<Next, Failure> {
        let handle = volume.spec.as_ref().and_then(|spec| Some(spec.csi.as_ref()?.volume_handle.clone()));
        let volume_id =
            handle.ok_or_else(|| Failure::refused("the volume is no CSI volume; delete it by hand"))?;
        let secrets = secrets::read_if_there(&self.cluster, self.deletion_secret(volume).as_ref()).await?;
        let begun = Instant::now();
        let request = DeleteVolumeRequest { volume_id, secrets };
        let deleted = self.driver.respond(self.options.timeout, request).await.map_err(Failure::from);
        let why = deleted.as_ref().err().map(Failure::sentence);
        Step {
            component: "provisioner",
            call: "DeleteVolume",
            volume: &volume.name_any(),
            ..Step::default()
        }
        .ended(begun, why.as_deref());
        for warning in Remarks::of(deleted?.metadata()).warnings {
            self.recorder.warning(volume, "VolumeDeleteWarning", warning);
        }
        self.capacity_changed(volume);
        self.cluster.delete(volume).await?;
        self.cluster.remove_finalizer(volume, PROVISIONER_FINALIZER).await?;
        Ok(Next::Done)
    }

    /// The secret that deletes a volume: the one it was made with, or what its class says now.
    fn deletion_secret(&self, volume: &PersistentVolume) -> Option<SecretReference> {
        let annotation = |key: &str| volume.annotations().get(key).cloned();
        if let (Some(name), Some(namespace)) =
            (annotation(DELETION_SECRET_NAME), annotation(DELETION_SECRET_NAMESPACE))
        {
            return (!name.is_empty() && !namespace.is_empty())
                .then_some(SecretReference { name: Some(name), namespace: Some(namespace) });
        }
        let class = volume.spec.as_ref()?.storage_class_name.as_deref()?;
        let parameters = self.classes.named(class)?.parameters.clone()?;
        secrets::reference(&parameters, Purpose::Provisioner, &volume.name_any(), None).ok().flatten()
    }
}

/// What is to be done about a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// It must not go before its storage is deleted.
    Protect,
    /// Its storage outlives it.
    Unprotect,
    /// Delete its storage, then itself.
    Delete,
    /// It would be deleted, but is still attached, or being detached.
    Attached,
}

/// What to do about a volume that is attached or not; `reached` says whether it is for this provisioner to delete.
pub(super) fn plan(volume: &PersistentVolume, driver: &str, reached: bool, attached: bool) -> Plan {
    let Some(spec) = &volume.spec else { return Plan::Nothing };
    // Whoever made it says whose it is; of one that a person made, its driver.
    let whose = volume.annotations().get(PROVISIONED_BY).or_else(|| spec.csi.as_ref().map(|csi| &csi.driver));
    if whose.is_none_or(|whose| whose != driver) {
        return Plan::Nothing;
    }
    let protected = volume.finalizers().iter().any(|finalizer| finalizer == PROVISIONER_FINALIZER);
    let deleting = volume.metadata.deletion_timestamp.is_some();
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    if spec.persistent_volume_reclaim_policy.as_deref() != Some("Delete") {
        return if protected { Plan::Unprotect } else { Plan::Nothing };
    }
    match phase {
        _ if !reached => Plan::Nothing,
        "Bound" if !deleting && !protected => Plan::Protect,
        "Released" if protected || !deleting => {
            if attached {
                Plan::Attached
            } else {
                Plan::Delete
            }
        }
        _ => Plan::Nothing,
    }
}

#[cfg(test)]
mod tests;
