//! Carries out what was decided about sizes and attributes.

use std::sync::Arc;
use std::time::Instant;

use berth_core::names::events;
use berth_core::names::{
    KUBERNETES_PARAMETER_PREFIX, MODIFY_SECRET_NAME, MODIFY_SECRET_NAMESPACE, NODE_EXPANSION_NOT_REQUIRED,
    PRE_RESIZE_CAPACITY,
};
use berth_csi::code;
use berth_csi::v1::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
    ControllerModifyVolumeRequest,
};
use berth_kube::timeline::Step;
use berth_kube::{Key, Next, storage};
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus, Pod, SecretReference,
};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::ResourceExt as _;

use super::expand::{self, Sizes};
use super::{Abilities, Resizer, modify};
use crate::attacher;
use crate::driver::Identity;
use crate::failure::Failure;
use crate::secrets;
use crate::size;

impl Resizer {
    pub(super) async fn sync(&self, key: &Key) -> Result<Next, Failure> {
        let Some(claim) = self.claims.get(key) else { return Ok(Next::Done) };
        let Some(volume) = self.volume_of(&claim) else { return Ok(Next::Done) };
        let identity = self.driver.identity_of(&self.name)?;
        let abilities = Abilities::of(&identity);
        self.forget_old_size(&claim, &volume).await?;
        let target = Sizes::of(&claim, &volume)
            .and_then(|sizes| expand::target(&sizes, self.remembered(&claim).expand_refused, abilities));
        let change = if abilities.modify {
            modify::plan(&claim, self.remembered(&claim).modify_refused)
        } else {
            modify::Plan::Nothing
        };
        if target.is_none() && change == modify::Plan::Nothing {
            return Ok(Next::Done);
        }
        let (queue, again) = (self.queue.clone(), key.clone());
        let Some(_held) = self.driver.try_hold(&volume.name_any(), move || queue.add(again)) else {
            return Ok(Next::Done);
        };
        // One failing must not keep the other from being done.
        let grown = match target {
            Some(bytes) => self.expand(&claim, &volume, bytes, &identity).await,
            None => Ok(Next::Done),
        };
        let current = self.claims.get(key).unwrap_or(claim);
        let Some(volume) = self.volume_of(&current) else { return grown };
        let modified = match change {
            modify::Plan::Nothing => return grown,
            modify::Plan::Cancel => self.cancel(&current).await,
            modify::Plan::Apply(class) => self.modify(&current, &volume, &class).await,
        };
        match (grown?, modified?) {
            (Next::Retry, _) | (_, Next::Retry) => Ok(Next::Retry),
            (Next::After(one), Next::After(other)) => Ok(Next::After(one.min(other))),
            (Next::After(pause), Next::Done) | (Next::Done, Next::After(pause)) => Ok(Next::After(pause)),
            (Next::Done, Next::Done) => Ok(Next::Done),
        }
    }

    /// The volume of a bound claim, if it is this driver's and bound back.
    fn volume_of(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let bound = claim.status.as_ref()?.phase.as_deref() == Some("Bound");
        let volume = self.volumes.named(claim.spec.as_ref()?.volume_name.as_deref()?).filter(|_| bound)?;
        let spec = volume.spec.as_ref()?;
        let back = spec.claim_ref.as_ref()?;
        let ours = spec.csi.as_ref()?.driver == self.name
            && self.topology.as_ref().is_none_or(|topology| topology.reaches(&volume));
        (ours && back.uid == claim.uid() && back.namespace == claim.namespace()).then_some(volume)
    }

    /// The node has finished: the volume need not remember its old size.
    async fn forget_old_size(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
    ) -> Result<(), Failure> {
        let done = Sizes::of(claim, volume).is_some_and(|sizes| sizes.actual >= sizes.volume);
        if done && volume.annotations().contains_key(PRE_RESIZE_CAPACITY) {
            self.cluster
                .update(volume, |volume| {
                    volume.annotations_mut().remove(PRE_RESIZE_CAPACITY);
                })
                .await?;
        }
        Ok(())
    }

    async fn expand(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        bytes: i64,
        identity: &Identity,
    ) -> Result<Next, Failure> {
        if self.remembered(claim).in_use && self.is_in_use(claim).await? {
            return Ok(Next::Retry);
        }
        let begun = self
            .cluster
            .update_status(claim, |claim| {
                expand::begun(claim.status.get_or_insert_default(), bytes);
                if claim.annotations().contains_key(NODE_EXPANSION_NOT_REQUIRED) {
                    claim.annotations_mut().remove(NODE_EXPANSION_NOT_REQUIRED);
                }
            })
            .await?;
        let text = format!("External resizer is resizing volume {}", volume.name_any());
        self.recorder.normal(claim, events::RESIZING, text);
        match self.grow(volume, bytes, identity).await {
            Ok(answer) => self.grown(&begun, volume, bytes, &answer).await,
            Err(failure) => self.not_grown(&begun, volume, failure).await,
        }
    }

    /// Asks the driver, unless all is the node's work.
    async fn grow(
        &self,
        volume: &PersistentVolume,
        bytes: i64,
        identity: &Identity,
    ) -> Result<ControllerExpandVolumeResponse, Failure> {
        if !Abilities::of(identity).controller_expand {
            return Ok(ControllerExpandVolumeResponse {
                capacity_bytes: bytes,
                node_expansion_required: true,
            });
        }
        let spec = volume.spec.clone().unwrap_or_default();
        let csi = spec.csi.clone().ok_or_else(|| Failure::refused("the volume is no CSI volume"))?;
        let secrets = secrets::read(&self.cluster, csi.controller_expand_secret_ref.as_ref()).await?;
        let request = ControllerExpandVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            secrets,
            volume_capability: Some(attacher::capability(&spec, &csi, identity, "")?),
        };
        let begun = Instant::now();
        let answer = self.driver.call(self.options.timeout, request).await.map_err(Failure::from);
        let why = answer.as_ref().err().map(Failure::sentence);
        Step {
            component: "resizer",
            call: "ControllerExpandVolume",
            volume: &volume.name_any(),
            ..Step::default()
        }
        .ended(begun, why.as_deref());
        let answer = answer?;
        if answer.capacity_bytes < bytes {
            let less = answer.capacity_bytes;
            return Err(Failure::refused(format!(
                "the driver says that it grew the volume to {less} bytes, not {bytes}"
            )));
        }
        Ok(answer)
    }

    async fn grown(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        bytes: i64,
        answer: &ControllerExpandVolumeResponse,
    ) -> Result<Next, Failure> {
        self.remember(claim, |memory| (memory.expand_refused, memory.in_use) = (false, false));
        let size = answer.capacity_bytes.max(bytes);
        let old = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage").cloned());
        let smaller = old.as_ref().and_then(size::bytes).is_none_or(|old| old < size);
        if smaller {
            let volume = self.volumes.named(&volume.name_any()).unwrap_or_else(|| Arc::new(volume.clone()));
            self.cluster
                .update(volume.as_ref(), |volume| {
                    let spec = volume.spec.get_or_insert_default();
                    spec.capacity.get_or_insert_default().insert("storage".to_owned(), size::quantity(size));
                    if let Some(old) = old.filter(|_| answer.node_expansion_required) {
                        volume.annotations_mut().entry(PRE_RESIZE_CAPACITY.to_owned()).or_insert(old.0);
                    }
                })
                .await?;
        }
        let node = answer.node_expansion_required;
        self.cluster
            .update_status(claim, |claim| {
                let status = claim.status.get_or_insert_default();
                if node {
                    expand::pending_on_node(status);
                } else {
                    expand::finished(status, size);
                    claim.annotations_mut().insert(NODE_EXPANSION_NOT_REQUIRED.to_owned(), "true".to_owned());
                }
            })
            .await?;
        if node {
            let text = "Require file system resize of volume on node";
            self.recorder.normal(claim, events::FILE_SYSTEM_RESIZE_REQUIRED, text);
        } else {
            self.recorder.normal(claim, events::VOLUME_RESIZE_SUCCESSFUL, "Resize volume succeeded");
        }
        Ok(Next::Done)
    }

    async fn not_grown(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        failure: Failure,
    ) -> Result<Next, Failure> {
        if failure.is_conflict() {
            return Err(failure);
        }
        let verdict = match &failure {
            Failure::Call(status) => expand::verdict(status.code()),
            Failure::Refused(_) => expand::Verdict::Refused,
            Failure::Kube(_) => expand::Verdict::Uncertain,
        };
        let (volume, name) = (volume.name_any(), &self.name);
        let why = format!("{}{}", failure.sentence(), failure.hint());
        let text = format!("resize volume {volume:?} by resizer {name:?} failed: {why}");
        self.recorder.warning(claim, events::VOLUME_RESIZE_FAILED, text);
        let infeasible = verdict == expand::Verdict::Infeasible;
        self.remember(claim, |memory| {
            memory.expand_refused = verdict != expand::Verdict::Uncertain;
            memory.in_use = verdict == expand::Verdict::InUse && self.options.handle_volume_in_use_error;
        });
        if verdict != expand::Verdict::Uncertain {
            self.edit_status(claim, |status| expand::failed(status, infeasible, &why)).await?;
        }
        if infeasible { Ok(Next::After(self.options.retry.longest)) } else { Err(failure) }
    }

    /// Whether a pod that has not ended uses a claim.
    async fn is_in_use(&self, claim: &PersistentVolumeClaim) -> Result<bool, Failure> {
        let namespace = claim.namespace().unwrap_or_default();
        let pods = self.cluster.fetch_all::<Pod>(&namespace).await?;
        let name = claim.name_any();
        let uses = |pod: &Pod| {
            !storage::is_over(pod) && storage::claims_of_pod(pod).iter().any(|used| used.key.name == name)
        };
        Ok(pods.iter().any(uses))
    }

    async fn modify(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        class: &str,
    ) -> Result<Next, Failure> {
        let found = self.attributes.as_ref().and_then(|classes| classes.named(class));
        let Some(found) = found else {
            let text =
                format!("VAC {class:?} does not exist; create it, or name another VolumeAttributesClass");
            self.recorder.warning(claim, events::VOLUME_MODIFY_FAILED, text);
            if claim.status.as_ref().is_none_or(|status| {
                status.modify_volume_status.as_ref().is_none_or(|known| known.status != modify::IN_PROGRESS)
            }) {
                self.cluster
                    .update_status(claim, |claim| {
                        modify::set(claim.status.get_or_insert_default(), modify::PENDING, class);
                    })
                    .await?;
            }
            return Ok(Next::Done);
        };
        let marked = self
            .cluster
            .update_status(claim, |claim| {
                modify::set(claim.status.get_or_insert_default(), modify::IN_PROGRESS, class);
            })
            .await?;
        let text = format!("external resizer is modifying volume {} with vac {class}", claim.name_any());
        self.recorder.normal(claim, events::VOLUME_MODIFY, text);
        let mut parameters = found.parameters.clone().unwrap_or_default();
        if self.options.extra_modify_metadata {
            parameters.insert(format!("{KUBERNETES_PARAMETER_PREFIX}pvc/name"), claim.name_any());
            parameters.insert(
                format!("{KUBERNETES_PARAMETER_PREFIX}pvc/namespace"),
                claim.namespace().unwrap_or_default(),
            );
            parameters.insert(format!("{KUBERNETES_PARAMETER_PREFIX}pv/name"), volume.name_any());
        }
        match self.change(volume, parameters).await {
            Ok(()) => self.modified(&marked, volume, class).await,
            Err(failure) => self.not_modified(&marked, &found, failure).await,
        }
    }

    async fn change(
        &self,
        volume: &PersistentVolume,
        mutable_parameters: std::collections::BTreeMap<String, String>,
    ) -> Result<(), Failure> {
        let csi = volume.spec.as_ref().and_then(|spec| spec.csi.clone());
        let csi = csi.ok_or_else(|| Failure::refused("the volume is no CSI volume"))?;
        let annotation = |key: &str| volume.annotations().get(key).cloned().filter(|value| !value.is_empty());
        let secret = match (annotation(MODIFY_SECRET_NAME), annotation(MODIFY_SECRET_NAMESPACE)) {
            (Some(name), Some(namespace)) => {
                Some(SecretReference { name: Some(name), namespace: Some(namespace) })
            }
            _ => csi.controller_expand_secret_ref,
        };
        let secrets = secrets::read(&self.cluster, secret.as_ref()).await?;
        let request =
            ControllerModifyVolumeRequest { volume_id: csi.volume_handle, secrets, mutable_parameters };
        self.driver.call(self.options.timeout, request).await?;
        Ok(())
    }

    async fn modified(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        class: &str,
    ) -> Result<Next, Failure> {
        self.remember(claim, |memory| memory.modify_refused = false);
        let volume = self.volumes.named(&volume.name_any()).unwrap_or_else(|| Arc::new(volume.clone()));
        self.cluster
            .update(volume.as_ref(), |volume| {
                volume.spec.get_or_insert_default().volume_attributes_class_name = Some(class.to_owned());
            })
            .await?;
        self.cluster
            .update_status(claim, |claim| modify::finished(claim.status.get_or_insert_default(), class))
            .await?;
        let text =
            format!("external resizer modified volume {} with vac {class} successfully", claim.name_any());
        self.recorder.normal(claim, events::VOLUME_MODIFY_SUCCESSFUL, text);
        Ok(Next::Done)
    }

    async fn not_modified(
        &self,
        claim: &PersistentVolumeClaim,
        class: &VolumeAttributesClass,
        failure: Failure,
    ) -> Result<Next, Failure> {
        if failure.is_conflict() {
            return Err(failure);
        }
        let (verdict, code) = match &failure {
            Failure::Call(status) => (modify::verdict(status.code()), code::go_name(status.code())),
            // Nothing was asked of the driver.
            Failure::Refused(_) => (modify::Verdict::Refused, "FailedPrecondition"),
            Failure::Kube(_) => (modify::Verdict::Uncertain, "Unknown"),
        };
        let mut why = format!("{}{}", failure.sentence(), failure.hint());
        // The driver is asked all the same, as upstream does: it alone knows which parameters it takes.
        if class.driver_name != self.name {
            why = format!("{why} (the class is for driver {:?}, not {:?})", class.driver_name, self.name);
        }
        let name = class.name_any();
        self.recorder.warning(
            claim,
            events::VOLUME_MODIFY_FAILED,
            format!("modify volume with vac {name:?} failed: {why}"),
        );
        let infeasible = verdict == modify::Verdict::Infeasible;
        self.remember(claim, |memory| memory.modify_refused = verdict != modify::Verdict::Uncertain);
        self.edit_status(claim, |status| modify::failed(status, infeasible, code, &why)).await?;
        if infeasible { Ok(Next::After(self.options.retry.longest)) } else { Err(failure) }
    }

    async fn cancel(&self, claim: &PersistentVolumeClaim) -> Result<Next, Failure> {
        self.cluster
            .update_status(claim, |claim| modify::cancelled(claim.status.get_or_insert_default()))
            .await?;
        self.remember(claim, |memory| memory.modify_refused = false);
        self.recorder.normal(
            claim,
            events::VOLUME_MODIFY_CANCELED,
            "Cancelled modify volume: the claim asks for its current class",
        );
        Ok(Next::Done)
    }

    /// Changes the status as it is now; what cannot be written is in the event anyway.
    async fn edit_status(
        &self,
        claim: &PersistentVolumeClaim,
        change: impl Fn(&mut PersistentVolumeClaimStatus),
    ) -> Result<(), Failure> {
        let current = self.claims.get(&Key::of(claim)).filter(|current| current.uid() == claim.uid());
        let Some(current) = current else { return Ok(()) };
        self.cluster
            .update_status(current.as_ref(), |claim| change(claim.status.get_or_insert_default()))
            .await?;
        Ok(())
    }
}
