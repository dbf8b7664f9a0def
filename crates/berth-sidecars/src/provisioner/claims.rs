//! From a claim to its PersistentVolume: what a claim needs, and carrying that out.
//!
//! [`Provisioner::sync_claim`] observes and plans; [`Provisioner::provision`] looks up what the request needs, adds the
//! finalizer to the claim, calls CreateVolume, saves the PersistentVolume and removes the finalizer; [`Provisioner::undo`]
//! deletes what was made for a claim that does not want it any more. `provisioner.rs` says why the finalizer is there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use berth_core::names::events;
use berth_core::names::{
    ALPHA_SELECTED_NODE, BETA_STORAGE_PROVISIONER, DRIVER_WARNING, MIGRATED_TO, SELECTED_NODE,
    STORAGE_PROVISIONER, creating,
};
use berth_csi::remarks::Remarks;
use berth_csi::v1::{CreateVolumeRequest, DeleteVolumeRequest, TopologyRequirement, Volume};
use berth_kube::timeline::Step;
use berth_kube::{Key, Next, finalizers, storage};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::ResourceExt as _;
use tonic::{Code, Status};

use super::request::{self, VolumeRequest};
use super::sources::Source;
use super::topology::{self, TopologyError, TopologyInputs};
use super::{CONFLICT_PAUSE, Provisioner};
use crate::driver::Identity;
use crate::failure::{Failure, is_final_for_provisioning};
use crate::secrets::{self, Purpose};

/// How often a volume that is not what was asked for is tried to be deleted at once.
const DELETE_TRIES: u32 = 5;

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
        let class = self.classes.named(storage::class_of_claim(&claim));
        let saved = self.volumes.named(&name).is_some();
        let planned = plan(&claim, class.as_deref(), self.scope(), &name, saved);
        if planned == Plan::Nothing {
            return Ok(Next::Done);
        }
        let identity = self.driver.identity_of(&self.name)?;
        let (queue, again) = (self.claim_queue.clone(), key.clone());
        let Some(_held) = self.driver.try_hold(&name, move || queue.add(again)) else {
            return Ok(Next::Done);
        };
        match (planned, class) {
            (Plan::RemoveFinalizer, _) => self.remove_claim_finalizer(&claim).await.map(|()| Next::Done),
            (Plan::Provision, Some(class)) => self.provision(&claim, &class, &identity, &name).await,
            (Plan::Select, Some(class)) => match &self.own_node {
                Some(own_node) => self.try_select_own_node(own_node, &claim, &class, &identity).await,
                None => Ok(Next::Done),
            },
            (Plan::Undo, class) => self.undo(&claim, class.as_deref(), &identity, &name).await,
            (Plan::Nothing | Plan::Provision | Plan::Select, _) => Ok(Next::Done),
        }
    }

    fn scope(&self) -> Scope<'_> {
        let node = self.own_node.as_ref().map(|own_node| (own_node.name(), own_node.takes_free_claims()));
        Scope { driver: &self.name, claim_finalizer: &self.claim_finalizer, node }
    }

    /// Makes a claim's volume: looks up what the request needs, adds the finalizer, calls CreateVolume, saves the
    /// PersistentVolume.
    async fn provision(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        class: &StorageClass,
        identity: &Identity,
        name: &str,
    ) -> Result<Next, Failure> {
        let begun = Instant::now();
        let uid = claim.uid().unwrap_or_default();
        self.own_node.iter().for_each(|own_node| own_node.forget(&uid));
        let known = self.remembered.lock().get(&uid).cloned();
        let request = match known {
            Some(request) => request,
            None => match self.prepare(claim, class, identity, false).await {
                Ok(request) => Arc::new(request),
                Err(Unprepared::Reschedule(failure)) => {
                    self.record_failed(claim, class, &failure);
                    if finalizers::has(claim.as_ref(), &self.claim_finalizer) {
                        self.delete_elsewhere(claim, class, identity, name).await?;
                    }
                    self.reschedule(claim).await?;
                    return Ok(Next::Done);
                }
                Err(Unprepared::Foreign) => {
                    self.recorder.normal(
                        claim.as_ref(),
                        events::PROVISIONING,
                        "Assuming an external populator will provision the volume",
                    );
                    return Ok(Next::Done);
                }
                Err(Unprepared::Failed(failure)) => {
                    self.record_failed(claim, class, &failure);
                    return Err(failure);
                }
            },
        };
        let secrets = match secrets::read(&self.cluster, request.secrets.get(&Purpose::Provisioner)).await {
            Ok(secrets) => secrets,
            Err(failure) => {
                self.record_failed(claim, class, &failure);
                return Err(failure);
            }
        };
        let claim = self
            .cluster
            .update(claim.as_ref(), |claim| finalizers::add(claim, &self.claim_finalizer))
            .await?;
        self.remembered.lock().insert(uid, request.clone());
        let about = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        self.recorder.normal(
            claim.as_ref(),
            events::PROVISIONING,
            format!("External provisioner is provisioning volume for claim \"{about}\""),
        );
        let made = match self.create(&claim, &request, &secrets).await {
            Ok(made) => made,
            Err(failure) => return self.refused(&claim, class, identity, failure).await,
        };
        if let Some(owner) = self.other_owner(&made, name) {
            // A driver that confuses two volumes must not have both use one. What was asked for may exist all the same.
            let text = format!(
                "the CSI driver's answer to CreateVolume is volume {:?}, which belongs to PersistentVolume {owner}; this is \
                 an error of the driver",
                made.volume_id
            );
            return self.refused(&claim, class, identity, Status::aborted(text).into()).await;
        }
        let object = request.persistent_volume(&claim, &made, identity, &self.identity);
        self.capacity_changed(&object);
        self.save(&claim, &object).await?;
        self.options.metrics.provisioned(&request.class, source_kind(&claim), begun.elapsed());
        Ok(Next::Done)
    }

    /// Calls CreateVolume. What is not what was asked for is deleted again, unless it is somebody else's.
    async fn create(
        &self,
        claim: &PersistentVolumeClaim,
        request: &VolumeRequest,
        secrets: &BTreeMap<String, String>,
    ) -> Result<Volume, Failure> {
        let begun = Instant::now();
        let name = request.name();
        let made = async {
            let call = CreateVolumeRequest { secrets: secrets.clone(), ..request.call.clone() };
            let answer = self.driver.respond(self.options.timeout, call).await?;
            for warning in Remarks::of(answer.metadata()).warnings {
                self.recorder.warning(claim, DRIVER_WARNING, warning);
            }
            // Not final: a driver that answers like this has made something.
            let made =
                answer.into_inner().volume.filter(|volume| !volume.volume_id.is_empty()).ok_or_else(
                    || Status::aborted("the CSI driver's answer to CreateVolume has no volume id"),
                )?;
            let Some(wrong) = request.difference(&made).filter(|_| self.other_owner(&made, name).is_none())
            else {
                return Ok(made);
            };
            let mut tries = 0;
            loop {
                tries += 1;
                let volume_id = made.volume_id.clone();
                let call = DeleteVolumeRequest { volume_id, secrets: secrets.clone() };
                match self.driver.call(self.options.timeout, call).await {
                    Ok(_) => return Err(Failure::refused(wrong)),
                    Err(status) if tries == DELETE_TRIES => {
                        let text = format!("{wrong}, and deleting it failed: {}", status.message());
                        return Err(Status::aborted(text).into());
                    }
                    Err(_) => {}
                }
            }
        }
        .await;
        let why = made.as_ref().err().map(Failure::sentence);
        Step {
            component: "provisioner",
            call: "CreateVolume",
            state: "CREATED",
            volume: name,
            claim: &Key::of(claim).to_string(),
            node: selected_node(claim).unwrap_or_default(),
            ..Step::default()
        }
        .ended(begun, why.as_deref());
        made
    }

    /// The PersistentVolume, other than the one called `name`, that has a volume.
    fn other_owner(&self, made: &Volume, name: &str) -> Option<String> {
        let owners = self.volumes_by_handle.get(&made.volume_id);
        owners.iter().map(|owner| owner.name_any()).find(|owner| owner != name)
    }

    /// Creates the PersistentVolume, then removes the claim's finalizer.
    async fn save(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        object: &PersistentVolume,
    ) -> Result<(), Failure> {
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
                    self.recorder.warning(claim.as_ref(), events::PROVISIONING_FAILED, failure.sentence());
                    return Err(failure);
                }
            }
            Err(error) => {
                let text = format!("Error saving the PersistentVolume {name}: {}", error.chain());
                self.recorder.warning(claim.as_ref(), events::PROVISIONING_FAILED, text);
                return Err(error.into());
            }
        }
        let text = format!("Successfully provisioned volume {name}");
        self.recorder.normal(claim.as_ref(), events::PROVISIONING_SUCCEEDED, text);
        self.remove_claim_finalizer(claim).await?;
        self.release_source(claim);
        Ok(())
    }

    /// The driver did not make a volume, or did not say so.
    async fn refused(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        class: &StorageClass,
        identity: &Identity,
        failure: Failure,
    ) -> Result<Next, Failure> {
        self.record_failed(claim, class, &failure);
        self.capacity.iter().for_each(|capacity| capacity.refresh_class(&class.name_any()));
        let selected = self.selected_node(claim, class).is_some();
        let verdict =
            failure.code().map_or(Verdict::Finished, |code| verdict(code, identity.has_topology(), selected));
        match verdict {
            Verdict::InBackground => Err(failure),
            Verdict::Reschedule => {
                self.reschedule(claim).await?;
                Ok(Next::Done)
            }
            Verdict::Infeasible => {
                self.remove_claim_finalizer(claim).await?;
                tracing::warn!(claim = %Key::of(claim.as_ref()), error = failure.sentence(), "no such volume can be made");
                Ok(Next::After(self.options.retry.longest))
            }
            Verdict::Finished => {
                self.remove_claim_finalizer(claim).await?;
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
                Err(Unprepared::Foreign) => {
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
            Ok(request) => self.delete_made(claim, &request, name).await,
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

    /// Tells why a claim that is deleted, or given to another, stays as it is.
    fn not_undone(&self, claim: &PersistentVolumeClaim, what: &str, failure: Failure) -> Failure {
        let text = format!("{what}{}{}", failure.sentence(), failure.hint());
        self.recorder.warning(claim, events::PROVISIONING_FAILED, text);
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
    ) -> Result<VolumeRequest, Unprepared> {
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
        let attributes = attributes.as_deref();
        let mut request =
            VolumeRequest::new(claim, class, source.as_ref(), attributes, identity, &self.options)?;
        request.call.volume_content_source = self.resolve_source(claim, source).await?;
        if identity.has_topology() {
            request.call.accessibility_requirements = match self.requirement(claim, class, relaxed) {
                Err(gone @ TopologyError::NodeGone(_)) => {
                    return Err(Unprepared::Reschedule(Failure::refused(gone.to_string())));
                }
                found => found.map_err(|wrong| Failure::refused(wrong.to_string()))?,
            };
        }
        Ok(request)
    }

    /// Where a claim's volume must be reachable from; `None` if anywhere will do.
    pub(super) fn requirement(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        relaxed: bool,
    ) -> Result<Option<TopologyRequirement>, TopologyError> {
        let (csi_nodes, nodes) = match (&self.topology_caches, &self.own_node) {
            (Some((csi_nodes, nodes)), _) => (csi_nodes.list(), nodes.list()),
            (None, Some(own_node)) => {
                let (csi_node, node) = own_node.objects(&self.name);
                (vec![csi_node], vec![node])
            }
            (None, None) => return Ok(None),
        };
        let inputs = TopologyInputs {
            driver: &self.name,
            csi_nodes: &csi_nodes,
            nodes: &nodes,
            allowed: class.allowed_topologies.as_deref().unwrap_or_default(),
            selected: self.selected_node(claim, class),
            claim: &claim.name_any(),
            strict: self.options.strict_topology,
            immediate: self.options.immediate_topology,
        };
        match topology::requirement(&inputs) {
            Err(_) if relaxed => {
                Ok(topology::requirement(&TopologyInputs { selected: None, ..inputs }).ok().flatten())
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
        match &self.own_node {
            Some(own_node) => Some(own_node.name()),
            None => selected_node(claim).filter(|_| waits(class)),
        }
    }

    /// Removes the claim's finalizer and forgets what was asked for.
    async fn remove_claim_finalizer(&self, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
        self.cluster.edit(claim, |claim| finalizers::remove(claim, &self.claim_finalizer)).await?;
        self.remembered.lock().remove(&claim.uid().unwrap_or_default());
        Ok(())
    }

    /// Asks the scheduler for another node, and removes the claim's finalizer.
    async fn reschedule(&self, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
        let rescheduled = self.cluster.edit(claim, |claim| {
            finalizers::remove(claim, &self.claim_finalizer);
            claim.annotations_mut().remove(SELECTED_NODE);
            claim.annotations_mut().remove(ALPHA_SELECTED_NODE);
        });
        rescheduled.await?;
        self.remembered.lock().remove(&claim.uid().unwrap_or_default());
        Ok(())
    }

    fn record_failed(&self, claim: &PersistentVolumeClaim, class: &StorageClass, failure: &Failure) {
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
        self.recorder.warning(claim, events::PROVISIONING_FAILED, text);
    }

    /// A volume came or went where the scheduler may look for room next.
    pub(super) fn capacity_changed(&self, volume: &PersistentVolume) {
        let (Some(capacity), Some(spec)) = (&self.capacity, &volume.spec) else { return };
        match (&spec.node_affinity, &spec.storage_class_name) {
            (Some(affinity), _) => capacity.refresh_topologies(affinity),
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

/// What is to be done about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// Its PersistentVolume is saved: remove the finalizer.
    RemoveFinalizer,
    /// Create its volume and save the PersistentVolume.
    Provision,
    /// No node is selected for it: try to have this one selected.
    Select,
    /// A volume may have been made that nobody wants any more: find it, delete it, remove the finalizer.
    Undo,
}

/// Which claims are a provisioner's: those of a driver, on all nodes or on one.
#[derive(Debug, Clone, Copy)]
struct Scope<'a> {
    driver: &'a str,
    /// Its finalizer on claims.
    claim_finalizer: &'a str,
    /// The one node, and whether it takes claims that no node is selected for.
    node: Option<(&'a str, bool)>,
}

/// Whose turn it is to make a claim's volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Ours,
    /// Whose node is selected first.
    Anybodys,
    NotOurs,
}

/// What a failed CreateVolume means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Nothing was made and nothing is being made.
    Finished,
    /// As finished, and trying again soon is useless.
    Infeasible,
    /// The driver may still be at it: the same call must be repeated until there is a final answer.
    InBackground,
    /// There is no room at the selected node: the scheduler must choose another.
    Reschedule,
}

/// The node that was selected for a claim's first consumer.
fn selected_node(claim: &PersistentVolumeClaim) -> Option<&str> {
    let annotations = claim.annotations();
    let node = annotations.get(SELECTED_NODE).or_else(|| annotations.get(ALPHA_SELECTED_NODE));
    node.map(String::as_str).filter(|node| !node.is_empty())
}

/// Whether the class waits for a claim's first consumer.
fn waits(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// Whether a claim says that a volume may be being made for it, by the finalizer of any provisioner.
pub(super) fn is_begun(claim: &PersistentVolumeClaim) -> bool {
    let prefix = creating("");
    claim.finalizers().iter().any(|finalizer| finalizer.starts_with(&prefix))
}

/// What to do about a claim whose volume is, or would be, called `volume`; `saved` tells whether it exists.
fn plan(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    scope: Scope<'_>,
    volume: &str,
    saved: bool,
) -> Plan {
    let marked = claim.finalizers().iter().any(|finalizer| finalizer == scope.claim_finalizer);
    let bound_to = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if saved || bound_to == volume {
        return if marked { Plan::RemoveFinalizer } else { Plan::Nothing };
    }
    let wanted = bound_to.is_empty()
        && claim.metadata.deletion_timestamp.is_none()
        && is_handed_to(claim, scope.driver)
        && class.is_none_or(|class| class.provisioner == scope.driver);
    let turn = if wanted { turn(claim, class, scope) } else { Turn::NotOurs };
    match (turn, marked) {
        (Turn::Ours, _) if class.is_some() => Plan::Provision,
        // The class is gone, so the question whether a volume was made cannot even be asked yet.
        (Turn::Ours, _) | (Turn::NotOurs, false) => Plan::Nothing,
        (Turn::Anybodys, false) => Plan::Select,
        (Turn::Anybodys | Turn::NotOurs, true) => Plan::Undo,
    }
}

fn turn(claim: &PersistentVolumeClaim, class: Option<&StorageClass>, scope: Scope<'_>) -> Turn {
    match (scope.node, selected_node(claim), class.map(waits)) {
        (Some((node, _)), Some(selected), _) if node != selected => Turn::NotOurs,
        (_, Some(_), _) | (_, None, None) | (None, None, Some(false)) => Turn::Ours,
        (Some((_, true)), None, Some(false)) => Turn::Anybodys,
        (Some((_, false)), None, Some(false)) | (_, None, Some(true)) => Turn::NotOurs,
    }
}

fn is_handed_to(claim: &PersistentVolumeClaim, driver: &str) -> bool {
    let annotations = claim.annotations();
    let provisioner =
        annotations.get(STORAGE_PROVISIONER).or_else(|| annotations.get(BETA_STORAGE_PROVISIONER));
    [provisioner, annotations.get(MIGRATED_TO)].into_iter().flatten().any(|named| named == driver)
}

/// What a code that CreateVolume was answered with means.
fn verdict(code: Code, topology: bool, selected: bool) -> Verdict {
    match code {
        Code::ResourceExhausted if topology && selected => Verdict::Reschedule,
        Code::InvalidArgument => Verdict::Infeasible,
        code if is_final_for_provisioning(code) => Verdict::Finished,
        _ => Verdict::InBackground,
    }
}

#[cfg(test)]
mod tests;
