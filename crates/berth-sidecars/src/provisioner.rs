//! Provisions volumes for claims and deletes those that are released.
//!
//! `Provisioner::sync_claim` observes a claim and plans; `Provisioner::provision` prepares the request, adds the
//! finalizer to the claim, calls CreateVolume, saves the PersistentVolume and removes the finalizer. `undo.rs` deletes what
//! was made for a claim that does not want it any more, `volumes.rs` the volumes that are released.
//!
//! Reads: PersistentVolumeClaim, PersistentVolume, StorageClass, VolumeAttachment (drivers that attach), CSINode and Node
//! (drivers with topology, unless every node has its own provisioner), VolumeSnapshot (drivers with snapshots),
//! VolumeAttributesClass, VolumeSnapshotContent and Secret (one at a time), ReferenceGrant (for a source in another
//! namespace). Writes: PersistentVolume (create, finalizer, delete), claims' finalizers and `selected-node`, finalizers
//! of sources. With capacity, what `capacity.rs` says besides.
//! Events on claims: `Provisioning`, `ProvisioningSucceeded`, `ProvisioningFailed`; on volumes: `VolumeFailedDelete`,
//! `VolumeDeleteWarning`.
//!
//! # No volume without an owner
//!
//! Between CreateVolume and the PersistentVolume nothing in Kubernetes knows the new volume; if the process dies there
//! and the claim is deleted, it would exist, and cost, for ever. So a claim carries a finalizer of ours,
//! `creating.berth.dev/<driver>`, from before the call until its PersistentVolume is saved or the driver has finally
//! refused. A claim that is deleted meanwhile stays (Terminating, usually for a moment), and the provisioner that finds it
//! with the finalizer repeats the call, which by its name gives the same volume, and deletes it (`Provisioner::undo`).
//!
//! It is a finalizer and not an annotation because an annotation would go with the claim. It carries no data because
//! claims belong to their users: a request recorded there could be forged to reach other people's secrets, snapshots
//! and volumes. What is asked for is remembered in memory, so that retries are the same, and computed anew after a
//! restart; classes cannot be changed, so it is the same but for topology, and for labels and annotations of the claim
//! that a class asks for (`${pvc.metadata.labels['KEY']}`) and a person changes just then. It names the driver, and the node
//! if every node has its own provisioner, so two provisioners never touch each other's. Another provisioner that takes
//! over ignores it, uses the same volume name and so finds the same volume. Only a claim that was being provisioned at
//! the moment of a kill and is never seen by Berth again keeps the finalizer; an orderly stop waits for the calls under
//! way and leaves none.

mod capacity;
mod metrics;
mod options;
mod per_node;
mod request;
mod sources;
mod topology;
mod undo;
mod volumes;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_core::names::events;
use berth_core::names::{
    ALPHA_SELECTED_NODE, BETA_STORAGE_PROVISIONER, DRIVER_WARNING, MIGRATED_TO, SELECTED_NODE,
    STORAGE_PROVISIONER, creating,
};
use berth_csi::remarks::Remarks;
use berth_csi::v1::{CreateVolumeRequest, DeleteVolumeRequest, Volume};
use berth_kube::timeline::Step;
use berth_kube::{Cache, Cluster, Index, Key, Loop, Next, Queue, Recorder, finalizers, storage};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment, VolumeAttributesClass};
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tonic::{Code, Status};

use self::capacity::Publisher;
use self::per_node::OwnNode;
use self::request::VolumeRequest;
use self::sources::Source;
use self::topology::TopologyError;
use crate::driver::{ControllerCapability, Driver, Identity};
use crate::failure::{Failure, is_final_for_provisioning};
use crate::secrets::{self, Purpose};

pub use self::capacity::{Capacity, Owner};
pub use self::metrics::Metrics;
pub use self::options::Options;
pub use self::per_node::PerNode;

/// After somebody else was quicker: again, as the change is on its way here.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);
/// How often a volume that is not what was asked for is tried to be deleted at once.
const DELETE_TRIES: u32 = 5;

/// Provisions and deletes until the cluster's shutdown, then finishes what is under way.
pub async fn run(cluster: Cluster, driver: Driver, options: Options) {
    let shutdown = cluster.shutdown().clone();
    let identity = tokio::select! {
        () = shutdown.cancelled() => return,
        identity = driver.ready() => identity,
    };
    let own_node = match &options.per_node {
        None => None,
        Some(node) => tokio::select! {
            () = shutdown.cancelled() => return,
            own_node = OwnNode::find(&driver, node, options.timeout) => Some(own_node),
        },
    };
    let this = Arc::new(Provisioner::new(&cluster, driver, options, &identity, own_node));
    let workers = this.options.workers;
    let claims = this.driver.run_loop(
        this.claim_loop(),
        workers,
        || this.open_claims(),
        |key| {
            let this = this.clone();
            async move { this.sync_claim(&key).await }
        },
    );
    let volumes = this.driver.run_loop(
        this.volume_loop(),
        workers,
        || this.volumes.keys(),
        |key| {
            let this = this.clone();
            async move { this.sync_volume(&key).await }
        },
    );
    let sources = this.source_loop().run(1, |source| this.clone().sync_source(source));
    let capacity = async {
        let Some(capacity) = &this.capacity else { return };
        let refresh = this.driver.when_back(&shutdown, || capacity.refresh_all());
        tokio::join!(capacity.clone().run(), refresh);
    };
    tokio::join!(claims, volumes, sources, this.follow_snapshots(&identity), capacity);
}

struct Provisioner {
    cluster: Cluster,
    driver: Driver,
    /// The driver that this provisioner was started for.
    name: String,
    /// This process, in the attributes of the volumes it makes.
    identity: String,
    /// Its finalizer on claims.
    claim_finalizer: String,
    /// The one node that it works for.
    own_node: Option<OwnNode>,
    options: Options,
    recorder: Recorder,
    claims: Cache<PersistentVolumeClaim>,
    claims_by_class: Index<PersistentVolumeClaim, String>,
    /// Claims by the source that they still need.
    claims_by_source: Index<PersistentVolumeClaim, Source>,
    volumes: Cache<PersistentVolume>,
    volumes_by_handle: Index<PersistentVolume, String>,
    classes: Cache<StorageClass>,
    /// By volume; `None` for a driver that does not attach, whose role may not allow to read them.
    attachments: Option<(Cache<VolumeAttachment>, Index<VolumeAttachment, String>)>,
    topology_caches: Option<(Cache<CSINode>, Cache<Node>)>,
    capacity: Option<Arc<Publisher>>,
    /// What was asked of the driver for claims whose volumes may be coming into being, by UID.
    remembered: Mutex<HashMap<String, Arc<VolumeRequest>>>,
    /// Read-locked by those who look a source up and protect it; write-locked by whoever releases one.
    protecting: tokio::sync::RwLock<()>,
    claim_queue: Queue<Key>,
    volume_queue: Queue<Key>,
    source_queue: Queue<Source>,
}

impl Provisioner {
    fn new(
        cluster: &Cluster,
        driver: Driver,
        options: Options,
        identity: &Identity,
        own_node: Option<OwnNode>,
    ) -> Self {
        let name = identity.name.clone();
        let node = own_node.as_ref().map(OwnNode::name);
        let claim_finalizer = per_node::claim_finalizer(&name, node);
        let watches_topology = identity.has_topology() && own_node.is_none();
        let volumes = cluster.cache::<PersistentVolume>();
        let claims = cluster.cache::<PersistentVolumeClaim>();
        let own_finalizer = claim_finalizer.clone();
        let capacity = publisher(cluster, &driver, &options, identity, own_node.as_ref());
        Self {
            recorder: Recorder::new(cluster, &format!("{name}_{}", options.instance), ""),
            identity: own_identity(&name, node),
            claims_by_class: claims.index(move |claim| {
                let open = claim.spec.as_ref().is_some_and(|spec| spec.volume_name.is_none())
                    || claim.finalizers().contains(&own_finalizer);
                let class = storage::class_of_claim(claim);
                (open && !class.is_empty()).then(|| class.to_owned()).into_iter().collect()
            }),
            claims_by_source: claims.index(|claim| Source::needed(claim).into_iter().collect()),
            claims,
            volumes_by_handle: storage::volumes_by_handle(&volumes, &name),
            volumes,
            classes: cluster.cache(),
            attachments: identity.attaches().then(|| attachments(cluster)),
            topology_caches: watches_topology.then(|| (cluster.cache(), cluster.cache())),
            capacity,
            claim_finalizer,
            own_node,
            remembered: Mutex::default(),
            protecting: tokio::sync::RwLock::default(),
            claim_queue: cluster.queue("claims", options.retry),
            volume_queue: cluster.queue("volumes", options.retry),
            source_queue: cluster.queue("sources", options.retry),
            cluster: cluster.named("external-provisioner"),
            driver,
            name,
            options,
        }
    }

    /// Claims, when they, their classes or their sources change.
    fn claim_loop(self: &Arc<Self>) -> Loop<Key> {
        let this = Arc::downgrade(self);
        let (by_class, by_source) = (self.claims_by_class.clone(), self.claims_by_source.clone());
        let (of_volume, keys) = (by_source.clone(), |claims: Vec<Arc<PersistentVolumeClaim>>| {
            claims.iter().map(|claim| Key::of(claim.as_ref())).collect::<Vec<_>>()
        });
        let mut claims = Loop::new(&self.cluster, &self.claim_queue)
            .subscribe(&self.claims, move |before, after| {
                if let (Some(gone), None, Some(this)) = (before, after, this.upgrade()) {
                    let uid = gone.uid().unwrap_or_default();
                    this.remembered.lock().remove(&uid);
                    this.own_node.iter().for_each(|own_node| own_node.forget(&uid));
                }
                let changed = before.zip(after).is_none_or(|(before, after)| matters(before, after));
                let Some(claim) = after.or(before).filter(|_| changed) else { return Vec::new() };
                let key = Key::of(claim.as_ref());
                let mut affected = keys(by_source.get(&Source::Claim(key.clone())));
                affected.extend(after.map(|_| key));
                affected
            })
            .subscribe(&self.classes, move |_, after| {
                after.map_or_else(Vec::new, |class| keys(by_class.get(&class.name_any())))
            })
            .subscribe(&self.volumes, move |before, after| {
                let phase = |volume: &Arc<PersistentVolume>| volume.status.as_ref()?.phase.clone();
                let owner = after.and_then(|volume| volume.spec.as_ref()?.claim_ref.as_ref());
                let Some(owner) = owner.filter(|_| before.and_then(phase) != after.and_then(phase)) else {
                    return Vec::new();
                };
                let name = |part: &Option<String>| part.clone().unwrap_or_default();
                keys(of_volume.get(&Source::Claim(Key::new(name(&owner.namespace), name(&owner.name)))))
            });
        if let Some((csi_nodes, nodes)) = &self.topology_caches {
            claims = claims.reads(csi_nodes).reads(nodes);
        }
        claims
    }

    /// Volumes, when they change or are detached.
    fn volume_loop(&self) -> Loop<Key> {
        let volumes = Loop::new(&self.cluster, &self.volume_queue).keyed(&self.volumes).reads(&self.classes);
        match &self.attachments {
            None => volumes,
            Some((attachments, _)) => volumes.subscribe(attachments, |before, after| {
                let volume = before.filter(|_| after.is_none());
                let volume = volume.and_then(|gone| gone.spec.source.persistent_volume_name.as_deref());
                volume.map(Key::cluster).into_iter().collect()
            }),
        }
    }

    /// The claims that have no volume, or may have another in the making.
    fn open_claims(&self) -> Vec<Key> {
        let classes = self.claims_by_class.values();
        let claims = classes.iter().flat_map(|class| self.claims_by_class.get(class));
        claims.map(|claim| Key::of(claim.as_ref())).collect()
    }
}

impl Provisioner {
    async fn sync_claim(&self, key: &Key) -> Result<Next, Failure> {
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
                Err(Unprepared::Elsewhere(node)) => return self.hand_over(claim, &node).await,
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
            // No other node has the source.
            Verdict::Reschedule if self.own_node.is_some() && Source::named(claim).is_some() => {
                self.remove_claim_finalizer(claim).await?;
                Err(failure)
            }
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

    /// Selects the node that has the claim's source. The scheduler, which does not know where sources are, finds that another
    /// node is selected than the one that it chose, and tries the pod again, for which only that node will do then.
    async fn hand_over(&self, claim: &PersistentVolumeClaim, node: &str) -> Result<Next, Failure> {
        let selected = self.cluster.update(claim, |claim| {
            claim.annotations_mut().insert(SELECTED_NODE.to_owned(), node.to_owned());
            claim.annotations_mut().remove(ALPHA_SELECTED_NODE);
        });
        selected.await?;
        let text = format!("Selected node {node:?} for the volume, because the claim's source is there");
        self.recorder.normal(claim, events::PROVISIONING, text);
        Ok(Next::Done)
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
    fn capacity_changed(&self, volume: &PersistentVolume) {
        let (Some(capacity), Some(spec)) = (&self.capacity, &volume.spec) else { return };
        match (&spec.node_affinity, &spec.storage_class_name) {
            (Some(affinity), _) => capacity.refresh_topologies(affinity),
            (None, Some(class)) => capacity.refresh_class(class),
            (None, None) => {}
        }
    }
}

/// What publishes capacity, if it is asked for and the driver can.
fn publisher(
    cluster: &Cluster,
    driver: &Driver,
    options: &Options,
    identity: &Identity,
    own_node: Option<&OwnNode>,
) -> Option<Arc<Publisher>> {
    let capacity = options.capacity.as_ref()?;
    if !identity.can(ControllerCapability::GetCapacity) {
        tracing::warn!("capacity is not published: the driver does not announce GET_CAPACITY");
        return None;
    }
    let publisher = Publisher::new(cluster, driver, identity, options, capacity, own_node);
    options.metrics.count_objects_of(&publisher);
    Some(publisher)
}

/// All attachments, and by volume.
fn attachments(cluster: &Cluster) -> (Cache<VolumeAttachment>, Index<VolumeAttachment, String>) {
    let all = cluster.cache::<VolumeAttachment>();
    let by_volume =
        all.index(|attachment| attachment.spec.source.persistent_volume_name.clone().into_iter().collect());
    (all, by_volume)
}

/// How this process is called in the attributes of the volumes it makes.
fn own_identity(driver: &str, node: Option<&str>) -> String {
    let now = Timestamp::now();
    let identity = format!("{}-{}-{driver}", now.as_millisecond(), now.subsec_nanosecond() % 10_000);
    node.map_or(identity.clone(), |node| format!("{identity}-{node}"))
}

/// Whether a change of a claim needs a reconciliation: finalizers, among them our own, and other status do not.
fn matters(before: &PersistentVolumeClaim, after: &PersistentVolumeClaim) -> bool {
    let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref().and_then(|status| status.phase.clone());
    before.spec != after.spec
        || before.metadata.annotations != after.metadata.annotations
        || before.metadata.labels != after.metadata.labels
        || before.metadata.deletion_timestamp != after.metadata.deletion_timestamp
        || phase(before) != phase(after)
}

/// Why there is nothing to ask the driver for.
#[derive(Debug)]
enum Unprepared {
    /// The selected node is gone.
    Reschedule(Failure),
    /// Another node has the claim's source.
    Elsewhere(String),
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
fn is_begun(claim: &PersistentVolumeClaim) -> bool {
    let prefix = creating("");
    claim.finalizers().iter().any(|finalizer| finalizer.starts_with(&prefix))
}

/// What to do about a claim whose volume is, or would be, called `volume`; `saved` says whether it exists.
fn plan(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    scope: Scope<'_>,
    volume: &str,
    saved: bool,
) -> Plan {
    let has_finalizer = claim.finalizers().iter().any(|finalizer| finalizer == scope.claim_finalizer);
    let bound_to = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if saved || bound_to == volume {
        return if has_finalizer { Plan::RemoveFinalizer } else { Plan::Nothing };
    }
    let wanted = bound_to.is_empty()
        && claim.metadata.deletion_timestamp.is_none()
        && is_handed_to(claim, scope.driver)
        && class.is_none_or(|class| class.provisioner == scope.driver);
    let turn = if wanted { turn(claim, class, scope) } else { Turn::NotOurs };
    match (turn, has_finalizer) {
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
