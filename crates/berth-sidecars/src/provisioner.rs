//! Provisions volumes for claims and deletes those that are released. The work on claims is in `claims.rs`, that on
//! released volumes in `volumes.rs`.
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
mod claims;
mod metrics;
mod per_node;
mod request;
mod sources;
mod topology;
mod volumes;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Queue, Recorder, storage};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use kube::ResourceExt as _;
use parking_lot::Mutex;

use self::capacity::Publisher;
use self::per_node::OwnNode;
use self::request::VolumeRequest;
use self::sources::Source;
use crate::driver::{ControllerCapability, Driver, Identity};

pub use self::capacity::{Capacity, Owner};
pub use self::metrics::Metrics;
pub use self::per_node::PerNode;

/// How a provisioner works; the defaults are upstream's.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// How many claims, and how many volumes, are worked on at a time.
    pub workers: usize,
    /// When a failed item is tried again.
    pub retry: Backoff,
    /// Claim and volume names are given to the driver as parameters, and what its class asks of the claim's labels and
    /// annotations.
    pub extra_create_metadata: bool,
    /// The filesystem of classes that name none.
    pub default_fs_type: String,
    /// A volume must be reachable from the selected node's own topology segment, not just from one like it.
    pub strict_topology: bool,
    /// Without a selected node, CreateVolume names the topology segments that there are in the cluster.
    pub immediate_topology: bool,
    /// What volumes' names begin with.
    pub volume_name_prefix: String,
    /// How much of the claim's UID, without dashes, follows; all of it as it is if `None`.
    pub volume_name_uuid_length: Option<usize>,
    /// A volume with the sole access mode ReadOnlyMany is published read-only.
    pub controller_publish_readonly: bool,
    /// A restore may not change the volume mode unless the content allows it.
    pub prevent_volume_mode_conversion: bool,
    /// Sources may be in other namespaces, if these grant it (the gate CrossNamespaceVolumeDataSource).
    pub cross_namespace_sources: bool,
    /// Whether and how the scheduler is told how much room there is.
    pub capacity: Option<Capacity>,
    /// The node, if every node has a provisioner of its own.
    pub per_node: Option<PerNode>,
    /// The counters of volumes that were created and deleted.
    pub metrics: Metrics,
    /// This process among its replicas, in events: a host or pod name.
    pub instance: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            workers: 100,
            retry: Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(5) },
            extra_create_metadata: false,
            default_fs_type: String::new(),
            strict_topology: false,
            immediate_topology: true,
            volume_name_prefix: "pvc".to_owned(),
            volume_name_uuid_length: None,
            controller_publish_readonly: false,
            prevent_volume_mode_conversion: true,
            cross_namespace_sources: false,
            capacity: None,
            per_node: None,
            metrics: Metrics::default(),
            instance: "berth".to_owned(),
        }
    }
}

/// After somebody else was quicker: look again, the change is on its way here.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);

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
        &cluster,
        &this.claim_queue,
        this.claim_loop(),
        workers,
        || this.open_claims(),
        |key| {
            let this = this.clone();
            async move { this.sync_claim(&key).await }
        },
    );
    let volumes = this.driver.run_loop(
        &cluster,
        &this.volume_queue,
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
    /// Held by those who look a source up and protect it; alone by whoever lets one go.
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

/// Who tells of capacity, if anybody is to and the driver can.
fn publisher(
    cluster: &Cluster,
    driver: &Driver,
    options: &Options,
    identity: &Identity,
    own_node: Option<&OwnNode>,
) -> Option<Arc<Publisher>> {
    let capacity = options.capacity.as_ref()?;
    if !identity.can(ControllerCapability::GetCapacity) {
        tracing::warn!("capacity is not told: the driver does not announce GET_CAPACITY");
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

/// Whether a change of a claim calls for a look: finalizers, among them our own, and other status do not.
fn matters(before: &PersistentVolumeClaim, after: &PersistentVolumeClaim) -> bool {
    let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref().and_then(|status| status.phase.clone());
    before.spec != after.spec
        || before.metadata.annotations != after.metadata.annotations
        || before.metadata.labels != after.metadata.labels
        || before.metadata.deletion_timestamp != after.metadata.deletion_timestamp
        || phase(before) != phase(after)
}
