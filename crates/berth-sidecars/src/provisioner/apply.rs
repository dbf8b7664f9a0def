//! Carries out what was decided about claims and volumes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use berth_csi::v1::{CapacityRange, CreateVolumeRequest, DeleteVolumeRequest, TopologyRequirement, Volume};
use berth_kube::timeline::Step;
use berth_kube::{Key, Next};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::ResourceExt as _;

use super::claim::{self, Plan, Verdict};
use super::request::{self, Wanted};
use super::source::Source;
use super::topology::{self, NoPlace, Places};
use super::{CONFLICT_PAUSE, Provisioner, volume};
use crate::driver::Identity;
use crate::failure::{Failure, is_final_for_provisioning};
use crate::finalizers;
use crate::names::{ALPHA_SELECTED_NODE, SELECTED_NODE};
use crate::secrets::{self, Purpose};

/// How often a volume that is not what was asked for is tried to be deleted at once.
const DELETE_TRIES: u32 = 5;
/// How often a change of a claim is tried again at once when somebody else was quicker.
const EDIT_TRIES: u32 = 5;

/// Why there is nothing to ask the driver for.
enum Unprepared {
    /// The selected node is gone.
    Reschedule(Failure),
    /// An external populator fills the claim.
    Foreign,
    /// Anything else; nothing was asked of the driver.
    Failed(Failure),
}

impl<F: Into<Failure>> From<F> for Unprepared {
    fn from(failure: F) -> Self {
        Self::Failed(failure.into())
    }
}

impl Provisioner {
    pub(super) async fn sync_claim(&self, key: &Key) -> Result<Next, Failure> {
        let Some(claim) = self.claims.get(key) else { return Ok(Next::Done) };
        let name = request::volume_name(&claim, &self.options)?;
        let class = claim::class_of(&claim).and_then(|class| self.classes.named(&class));
        let saved = self.volumes.named(&name).is_some();
        let plan = claim::plan(&claim, class.as_deref(), self.who(), &name, saved);
        if plan == Plan::Nothing {
            return Ok(Next::Done);
        }
        let identity = self.driver.identity_of(&self.name)?;
        let (queue, again) = (self.claim_queue.clone(), key.clone());
        let Some(_held) = self.driver.try_hold(&name, move || queue.add(again)) else {
            return Ok(Next::Done);
        };
        match (plan, class) {
            (Plan::Unmark, _) => self.unmark(&claim).await,
            (Plan::Provision, Some(class)) => self.provision(&claim, &class, &identity, &name).await,
            (Plan::Select, Some(class)) => match &self.here {
                Some(here) => self.try_to_be_selected(here, &claim, &class, &identity).await,
                None => Ok(Next::Done),
            },
            (Plan::Undo, class) => self.undo(&claim, class.as_deref(), &identity, &name).await,
            (Plan::Nothing | Plan::Provision | Plan::Select, _) => Ok(Next::Done),
        }
    }

    async fn provision(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        class: &StorageClass,
        identity: &Identity,
        name: &str,
    ) -> Result<Next, Failure> {
        let begun = Instant::now();
        let uid = claim.uid().unwrap_or_default();
        self.here.iter().for_each(|here| here.forget(&uid));
        let known = self.remembered().get(&uid).cloned();
        let wanted = match known {
            Some(wanted) => wanted,
            None => match self.prepare(claim, class, identity, false).await {
                Ok(wanted) => Arc::new(wanted),
                Err(Unprepared::Reschedule(failure)) => {
                    self.tell_failed(claim, class, &failure);
                    if finalizers::has(claim.as_ref(), &self.mark) {
                        self.delete_elsewhere(claim, class, identity, name).await?;
                    }
                    self.reschedule(claim).await?;
                    return Ok(Next::Done);
                }
                Err(Unprepared::Foreign) => {
                    self.recorder.normal(
                        claim.as_ref(),
                        "Provisioning",
                        "Assuming an external populator will provision the volume",
                    );
                    return Ok(Next::Done);
                }
                Err(Unprepared::Failed(failure)) => {
                    self.tell_failed(claim, class, &failure);
                    return Err(failure);
                }
            },
        };
        let secrets = match secrets::read(&self.cluster, wanted.secret(Purpose::Provisioner)).await {
            Ok(secrets) => secrets,
            Err(failure) => {
                self.tell_failed(claim, class, &failure);
                return Err(failure);
            }
        };
        let claim = self.cluster.update(claim.as_ref(), |claim| finalizers::add(claim, &self.mark)).await?;
        self.remembered().insert(uid, wanted.clone());
        let about = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        self.recorder.normal(
            claim.as_ref(),
            "Provisioning",
            format!("External provisioner is provisioning volume for claim \"{about}\""),
        );
        let made = self.create(&claim, &wanted, &secrets).await;
        match made.and_then(|made| self.not_of_another(made, &wanted)) {
            Ok(made) => {
                let object = volume::saved(&claim, &wanted, &made, identity, &self.identity);
                self.capacity_changed(&object);
                let next = self.save(&claim, &object).await?;
                self.options.metrics.provisioned(&wanted.class, source_kind(&claim), begun.elapsed());
                Ok(next)
            }
            Err(failure) => self.refused(&claim, class, identity, failure).await,
        }
    }

    /// Asks for a claim's volume, and tells how that went.
    async fn create(
        &self,
        claim: &PersistentVolumeClaim,
        wanted: &Wanted,
        secrets: &BTreeMap<String, String>,
    ) -> Result<Volume, Failure> {
        let begun = Instant::now();
        let made = self.ask_for(wanted, secrets).await;
        let why = made.as_ref().err().map(Failure::sentence);
        Step {
            component: "provisioner",
            call: "CreateVolume",
            state: "CREATED",
            volume: &wanted.name,
            claim: &Key::of(claim).to_string(),
            node: claim::selected_node(claim).unwrap_or_default(),
            ..Step::default()
        }
        .ended(begun, why.as_deref());
        made
    }

    /// Refuses a volume that another PersistentVolume has: a driver that confuses two must not have both use one. What
    /// was asked for may exist all the same.
    fn not_of_another(&self, made: Volume, wanted: &Wanted) -> Result<Volume, Failure> {
        let Some(owner) = self.other_owner(&made, wanted) else { return Ok(made) };
        let text = format!(
            "the CSI driver's answer to CreateVolume is volume {:?}, which belongs to PersistentVolume {owner}; this is an \
             error of the driver",
            made.volume_id
        );
        Err(tonic::Status::aborted(text).into())
    }

    /// The PersistentVolume, other than the one that is to be made, that has a volume.
    fn other_owner(&self, made: &Volume, wanted: &Wanted) -> Option<String> {
        let owners = self.volumes_by_handle.get(&made.volume_id);
        owners.iter().map(|owner| owner.name_any()).find(|owner| *owner != wanted.name)
    }

    /// Asks for the volume; what is not what was asked for is deleted again, unless it is somebody else's.
    async fn ask_for(&self, wanted: &Wanted, secrets: &BTreeMap<String, String>) -> Result<Volume, Failure> {
        let request = CreateVolumeRequest {
            name: wanted.name.clone(),
            capacity_range: Some(CapacityRange { required_bytes: wanted.bytes, limit_bytes: 0 }),
            volume_capabilities: wanted.capabilities.clone(),
            parameters: wanted.parameters.clone(),
            secrets: secrets.clone(),
            volume_content_source: wanted.source.clone(),
            accessibility_requirements: wanted.topology.clone(),
            mutable_parameters: wanted.mutable_parameters.clone(),
        };
        let answer = self.driver.call(self.options.timeout, request).await?;
        // Not final: a driver that answers like this has made something.
        let made = answer.volume.filter(|volume| !volume.volume_id.is_empty()).ok_or_else(|| {
            tonic::Status::aborted("the CSI driver's answer to CreateVolume has no volume id")
        })?;
        if self.other_owner(&made, wanted).is_some() {
            return Ok(made);
        }
        let wrong = if made.capacity_bytes != 0 && made.capacity_bytes < wanted.bytes {
            format!(
                "created volume capacity {} less than requested capacity {}",
                made.capacity_bytes, wanted.bytes
            )
        } else if wanted.source.is_some() && made.content_source.is_none() {
            "volume content source missing: the driver made an empty volume instead of a copy".to_owned()
        } else {
            return Ok(made);
        };
        let mut tries = 0;
        loop {
            tries += 1;
            let request = DeleteVolumeRequest { volume_id: made.volume_id.clone(), secrets: secrets.clone() };
            match self.driver.call(self.options.timeout, request).await {
                Ok(_) => return Err(Failure::refused(wrong)),
                Err(status) if tries == DELETE_TRIES => {
                    let text = format!("{wrong}, and deleting it failed: {}", status.message());
                    return Err(tonic::Status::aborted(text).into());
                }
                Err(_) => {}
            }
        }
    }

    /// Tells Kubernetes of the volume, then takes the mark away.
    async fn save(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        object: &PersistentVolume,
    ) -> Result<Next, Failure> {
        let name = object.name_any();
        match self.cluster.create(object).await {
            Ok(_) => {}
            Err(error) if error.is_already_exists() => {
                let there = self.cluster.fetch::<PersistentVolume>(&Key::cluster(&name)).await?;
                let owner = there.and_then(|there| there.spec.as_ref()?.claim_ref.as_ref()?.uid.clone());
                if owner != claim.uid() {
                    let failure = Failure::refused(format!(
                        "a PersistentVolume called {name} exists and belongs to another claim; rename or delete it"
                    ));
                    self.recorder.warning(claim.as_ref(), "ProvisioningFailed", failure.sentence());
                    return Err(failure);
                }
            }
            Err(error) => {
                let text = format!("Error saving the PersistentVolume {name}: {}", error.chain());
                self.recorder.warning(claim.as_ref(), "ProvisioningFailed", text);
                return Err(error.into());
            }
        }
        let text = format!("Successfully provisioned volume {name}");
        self.recorder.normal(claim.as_ref(), "ProvisioningSucceeded", text);
        self.unmark(claim).await?;
        self.let_go_of_source(claim);
        Ok(Next::Done)
    }

    /// The driver did not make a volume, or did not say so.
    async fn refused(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        class: &StorageClass,
        identity: &Identity,
        failure: Failure,
    ) -> Result<Next, Failure> {
        self.tell_failed(claim, class, &failure);
        self.capacity.iter().for_each(|capacity| capacity.refresh_class(&class.name_any()));
        let selected = self.selected_node(claim, class).is_some();
        let verdict = failure
            .code()
            .map_or(Verdict::Finished, |code| claim::verdict(code, identity.has_topology(), selected));
        match verdict {
            Verdict::InBackground => Err(failure),
            Verdict::Reschedule => {
                self.reschedule(claim).await?;
                Ok(Next::Done)
            }
            Verdict::Infeasible => {
                self.unmark(claim).await?;
                tracing::warn!(claim = %Key::of(claim.as_ref()), error = failure.sentence(), "no such volume can be made");
                Ok(Next::After(self.options.retry.longest))
            }
            Verdict::Finished => {
                self.unmark(claim).await?;
                Err(failure)
            }
        }
    }

    /// Finds the volume that may have been made for a claim that does not want it any more, and deletes it.
    async fn undo(
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
        match claim::plan(&live, class, self.who(), name, saved) {
            Plan::Undo => {}
            Plan::Unmark => return self.unmark(&live).await.map(|_| self.undone()),
            Plan::Nothing | Plan::Provision | Plan::Select => return Ok(Next::Done),
        }
        let known = self.remembered().get(&live.uid().unwrap_or_default()).cloned();
        let wanted = match (known, class) {
            (Some(wanted), _) => wanted,
            (None, Some(class)) => match self.prepare(&live, class, identity, true).await {
                Ok(wanted) => Arc::new(wanted),
                Err(Unprepared::Foreign) => return self.unmark(&live).await.map(|_| self.undone()),
                Err(Unprepared::Failed(failure) | Unprepared::Reschedule(failure)) => {
                    self.tell_failed(&live, class, &failure);
                    return Err(failure);
                }
            },
            (None, None) => {
                let text = format!(
                    "whether a volume was created for this claim can only be found out with its StorageClass {:?}, which \
                     is gone: create it again, or remove the finalizer {} if you know that there is no volume {name}",
                    claim::class_of(&live).unwrap_or_default(),
                    self.mark
                );
                self.recorder.warning(live.as_ref(), "ProvisioningFailed", text);
                return Ok(Next::Done);
            }
        };
        self.delete_made(&live, &wanted, name).await?;
        self.unmark(&live).await?;
        self.let_go_of_source(&live);
        Ok(self.undone())
    }

    /// What was begun on this node is undone, and may be begun anew: no change of the claim will say so.
    fn undone(&self) -> Next {
        if self.here.is_some() { Next::After(CONFLICT_PAUSE) } else { Next::Done }
    }

    /// Deletes the volume that may have been made on a node that is gone, by one who was killed before he could say so:
    /// from another node on, nobody would know of it.
    async fn delete_elsewhere(
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
            Ok(wanted) => self.delete_made(claim, &wanted, name).await,
            Err(Unprepared::Foreign) => Ok(()),
            Err(Unprepared::Failed(failure) | Unprepared::Reschedule(failure)) => {
                Err(self.not_undone(claim, "", failure))
            }
        }
    }

    /// Finds the volume that may have been made for a claim by making it, and deletes it.
    async fn delete_made(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        wanted: &Wanted,
        name: &str,
    ) -> Result<(), Failure> {
        let secrets = secrets::read_if_there(&self.cluster, wanted.secret(Purpose::Provisioner)).await?;
        match self.create(claim, wanted, &secrets).await {
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

    /// Tells why a claim that is deleted, or given to another, stays as it is.
    fn not_undone(&self, claim: &PersistentVolumeClaim, what: &str, failure: Failure) -> Failure {
        let text = format!("{what}{}{}", failure.sentence(), failure.hint());
        self.recorder.warning(claim, "ProvisioningFailed", text);
        failure
    }

    /// Looks up everything that the request needs. `relaxed`: for a claim that is not to be provisioned any more, so
    /// that a node that is gone is no obstacle.
    async fn prepare(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        identity: &Identity,
        relaxed: bool,
    ) -> Result<Wanted, Unprepared> {
        let source = Source::of(claim, self.options.cross_namespace_sources)?;
        if source == Some(Source::Foreign) {
            return Err(Unprepared::Foreign);
        }
        let attributes =
            match claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref()) {
                Some(name) if !name.is_empty() => {
                    let found = self.cluster.fetch::<VolumeAttributesClass>(&Key::cluster(name)).await?;
                    Some(found.ok_or_else(|| {
                        Failure::refused(format!("VolumeAttributesClass {name:?} does not exist"))
                    })?)
                }
                _ => None,
            };
        let mut wanted = request::wanted(claim, class, attributes.as_deref(), identity, &self.options)?;
        wanted.source = self.look_up_source(claim, source).await?;
        if identity.has_topology() {
            wanted.topology = match self.requirement(claim, class, relaxed) {
                Err(gone @ NoPlace::NodeGone(_)) => {
                    return Err(Unprepared::Reschedule(Failure::refused(gone.to_string())));
                }
                found => found.map_err(|wrong| Failure::refused(wrong.to_string()))?,
            };
        }
        Ok(wanted)
    }

    /// Where a claim's volume must be reachable from; `None` if anywhere will do.
    pub(super) fn requirement(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        relaxed: bool,
    ) -> Result<Option<TopologyRequirement>, NoPlace> {
        let (csi_nodes, nodes) = match (&self.places, &self.here) {
            (Some((csi_nodes, nodes)), _) => (csi_nodes.list(), nodes.list()),
            (None, Some(here)) => {
                let (csi_node, node) = here.objects(&self.name);
                (vec![csi_node], vec![node])
            }
            (None, None) => return Ok(None),
        };
        let places = Places {
            driver: &self.name,
            csi_nodes: &csi_nodes,
            nodes: &nodes,
            allowed: class.allowed_topologies.as_deref().unwrap_or_default(),
            selected: self.selected_node(claim, class),
            claim: &claim.name_any(),
            strict: self.options.strict_topology,
            immediate: self.options.immediate_topology,
        };
        match topology::requirement(&places) {
            Err(_) if relaxed => {
                Ok(topology::requirement(&Places { selected: None, ..places }).ok().flatten())
            }
            found => found,
        }
    }

    /// The node that a claim's volume is for: the first consumer's, or the one whose provisioner this is.
    fn selected_node<'a>(
        &'a self,
        claim: &'a PersistentVolumeClaim,
        class: &StorageClass,
    ) -> Option<&'a str> {
        match &self.here {
            Some(here) => Some(here.name()),
            None => claim::selected_node(claim).filter(|_| claim::waits(class)),
        }
    }

    /// Takes the mark away and forgets what was asked for.
    async fn unmark(&self, claim: &PersistentVolumeClaim) -> Result<Next, Failure> {
        self.edit(claim, |claim| finalizers::remove(claim, &self.mark)).await?;
        self.remembered().remove(&claim.uid().unwrap_or_default());
        Ok(Next::Done)
    }

    /// Asks the scheduler for another node, and takes the mark away.
    async fn reschedule(&self, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
        self.edit(claim, |claim| {
            finalizers::remove(claim, &self.mark);
            claim.annotations_mut().remove(SELECTED_NODE);
            claim.annotations_mut().remove(ALPHA_SELECTED_NODE);
        })
        .await?;
        self.remembered().remove(&claim.uid().unwrap_or_default());
        Ok(())
    }

    /// Changes a claim as it is now, again if somebody else was quicker; one that is gone needs no change.
    async fn edit(
        &self,
        claim: &PersistentVolumeClaim,
        change: impl Fn(&mut PersistentVolumeClaim),
    ) -> Result<(), Failure> {
        let key = Key::of(claim);
        let mut current = self.claims.get(&key).filter(|current| current.uid() == claim.uid());
        for _ in 0..EDIT_TRIES {
            let Some(claim_now) = current else { return Ok(()) };
            match self.cluster.update(claim_now.as_ref(), &change).await {
                Ok(_) => return Ok(()),
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) if error.is_conflict() => {
                    current = self
                        .cluster
                        .fetch(&key)
                        .await?
                        .filter(|now: &Arc<PersistentVolumeClaim>| now.uid() == claim.uid());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(Failure::refused(format!("claim {key} is changed all the time by somebody else")))
    }

    fn tell_failed(&self, claim: &PersistentVolumeClaim, class: &StorageClass, failure: &Failure) {
        if failure.is_conflict() {
            return;
        }
        self.options.metrics.not_provisioned(&class.name_any(), source_kind(claim));
        let text = format!(
            "failed to provision volume with StorageClass {:?}: {}{}",
            class.name_any(),
            failure.sentence(),
            failure.hint()
        );
        self.recorder.warning(claim, "ProvisioningFailed", text);
    }

    /// A volume came or went where the scheduler may look for room next.
    pub(super) fn capacity_changed(&self, volume: &PersistentVolume) {
        let (Some(capacity), Some(spec)) = (&self.capacity, &volume.spec) else { return };
        match (&spec.node_affinity, &spec.storage_class_name) {
            (Some(affinity), _) => capacity.refresh_places(affinity),
            (None, Some(class)) => capacity.refresh_class(class),
            (None, None) => {}
        }
    }
}

/// The kind of what a claim is made from.
fn source_kind(claim: &PersistentVolumeClaim) -> &str {
    let source = claim.spec.as_ref().and_then(|spec| spec.data_source.as_ref());
    source.map(|source| source.kind.as_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
