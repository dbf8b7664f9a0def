//! Binds VolumeSnapshots to VolumeSnapshotContents, and groups of them; never calls a driver.
//!
//! Reads: VolumeSnapshot, VolumeSnapshotContent, VolumeSnapshotClass, the same three of groups, PersistentVolumeClaim,
//! PersistentVolume; Node if contents are labelled with nodes. Writes: contents (create, binding, finalizer, `…-being-deleted` annotation, delete), snapshots'
//! class, finalizers, status and owner, members of groups, claims' finalizer.
//! Events: Normal `CreatingSnapshot`, `SnapshotCreated`, `SnapshotReady`; Warning `SnapshotValidationError`,
//! `SnapshotContentMissing`, `SnapshotContentMismatch`, `SnapshotContentMisbound`, `SnapshotMisbound`,
//! `GetSnapshotClassFailed`, `SetDefaultSnapshotClassFailed`, `SnapshotContentCreationFailed`, `SnapshotDeletePending`,
//! `ContentValidationError`; and the same of groups.
//!
//! A content whose VolumeSnapshot does not exist is never deleted: it may have come from another cluster's backup.
//! What waits for another object is looked at again when that object changes; nothing is polled.

mod claims;
mod contents;
mod creation;
mod groups;
mod metrics;
mod snapshots;
mod status;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Queue, Recorder};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use self::groups::Groups;
use self::metrics::Operations;
use crate::failure::settled;
use crate::snapshots::{
    SnapshotError, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, names, served,
};

pub use self::metrics::Metrics;

/// How a snapshot controller works; the defaults are upstream's.
#[derive(Debug, Clone)]
pub struct Options {
    /// How many objects of each kind are worked on at a time.
    pub workers: usize,
    /// When a failed item is tried again.
    pub retry: Backoff,
    /// Contents remember the volume mode, so that a restore cannot change it by mistake.
    pub prevent_volume_mode_conversion: bool,
    /// Contents of volumes that are bound to places are labelled with a node there, whose snapshotter is to act on them.
    pub distributed: bool,
    /// How long operations take.
    pub metrics: Metrics,
    /// How often a cluster without the kinds is looked at again.
    pub kinds: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: 10,
            retry: Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(5) },
            prevent_volume_mode_conversion: true,
            distributed: false,
            metrics: Metrics::default(),
            kinds: Duration::from_secs(30),
        }
    }
}

const COMPONENT: &str = "snapshot-controller";

/// Binds until the cluster's shutdown, then finishes what is under way.
pub async fn run(cluster: Cluster, options: Options) {
    let pause = options.kinds;
    if !served::wait(&cluster, served::SNAPSHOTS, COMPONENT, pause).await {
        return;
    }
    let shutdown = cluster.shutdown().clone();
    let this = Arc::new(Controller::new(&cluster, options));
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = this.start() => {}
    }
    let workers = this.options.workers;
    let snapshots = this.snapshot_queue.run(workers, shutdown.clone(), |key| {
        let this = this.clone();
        async move { settled(this.sync_snapshot(&key).await) }
    });
    let contents = this.content_queue.run(workers, shutdown.clone(), |key| {
        let this = this.clone();
        async move { settled(this.sync_content(&key).await) }
    });
    let claims = this.claim_queue.run(workers, shutdown.clone(), |key| {
        let this = this.clone();
        async move { settled(this.sync_claim(&key).await) }
    });
    let groups = async {
        if served::wait(&cluster, served::GROUPS, COMPONENT, pause).await {
            groups::run(this.clone()).await;
        }
    };
    tokio::join!(snapshots, contents, claims, groups);
}

struct Controller {
    cluster: Cluster,
    options: Options,
    recorder: Recorder,
    snapshots: Cache<VolumeSnapshot>,
    /// By the claim they are of.
    by_claim: Index<VolumeSnapshot, Key>,
    /// By the content they name or are bound to.
    by_content: Index<VolumeSnapshot, String>,
    /// Those that are not bound yet, by their class; empty if they name none.
    by_class: Index<VolumeSnapshot, String>,
    /// By the group they belong to.
    by_group: Index<VolumeSnapshot, Key>,
    contents: Cache<VolumeSnapshotContent>,
    /// By the driver's id of their group.
    by_group_handle: Index<VolumeSnapshotContent, String>,
    classes: Cache<VolumeSnapshotClass>,
    claims: Cache<PersistentVolumeClaim>,
    /// Claims that wait for their volume, by the snapshot they are restored from.
    restoring: Index<PersistentVolumeClaim, Key>,
    volumes: Cache<PersistentVolume>,
    /// Only if contents are labelled with nodes.
    nodes: Option<Cache<Node>>,
    /// Known once the cluster serves the kinds.
    groups: OnceLock<Groups>,
    snapshot_queue: Queue<Key>,
    content_queue: Queue<Key>,
    claim_queue: Queue<Key>,
}

impl Controller {
    fn new(cluster: &Cluster, options: Options) -> Self {
        let snapshots = cluster.cache::<VolumeSnapshot>();
        let contents = cluster.cache::<VolumeSnapshotContent>();
        let claims = cluster.cache::<PersistentVolumeClaim>();
        Self {
            recorder: Recorder::new(cluster, COMPONENT, ""),
            by_claim: snapshots.index(|snapshot| claim_of(snapshot).into_iter().collect()),
            by_content: snapshots.index(|snapshot: &VolumeSnapshot| {
                let status = snapshot.status.as_ref();
                let bound = status.and_then(|status| status.bound_volume_snapshot_content_name.clone());
                let named = snapshot.spec.source.volume_snapshot_content_name.clone();
                bound.into_iter().chain(named).collect()
            }),
            by_class: snapshots.index(|snapshot: &VolumeSnapshot| {
                let bound = snapshot
                    .status
                    .as_ref()
                    .is_some_and(|status| status.bound_volume_snapshot_content_name.is_some());
                let class = snapshot.spec.volume_snapshot_class_name.clone().unwrap_or_default();
                if bound { Vec::new() } else { vec![class] }
            }),
            by_group: snapshots.index(|snapshot| group_of(snapshot).into_iter().collect()),
            by_group_handle: contents.index(|content: &VolumeSnapshotContent| {
                let status = content.status.as_ref();
                status.and_then(|status| status.volume_group_snapshot_handle.clone()).into_iter().collect()
            }),
            restoring: claims.index(claims::restored_from),
            snapshots,
            contents,
            classes: cluster.cache(),
            claims,
            volumes: cluster.cache(),
            nodes: options.distributed.then(|| cluster.cache()),
            groups: OnceLock::new(),
            snapshot_queue: cluster.queue("snapshot-controller-snapshot", options.retry),
            content_queue: cluster.queue("snapshot-controller-content", options.retry),
            claim_queue: cluster.queue("snapshot-controller-claim", options.retry),
            cluster: cluster.named(COMPONENT),
            options,
        }
    }

    /// Waits for the caches and puts what there is, and then what changes, into the queues.
    async fn start(&self) {
        self.snapshots.synced().await;
        self.contents.synced().await;
        self.classes.synced().await;
        self.claims.synced().await;
        self.volumes.synced().await;
        if let Some(nodes) = &self.nodes {
            nodes.synced().await;
        }
        self.measure();
        let (queue, claims) = (self.snapshot_queue.clone(), self.claim_queue.clone());
        self.snapshots.on_change(move |snapshot| {
            queue.add(Key::of(snapshot.as_ref()));
            if let Some(claim) = claim_of(snapshot) {
                claims.add(claim);
            }
        });
        let (queue, snapshots) = (self.content_queue.clone(), self.snapshot_queue.clone());
        let by_content = self.by_content.clone();
        self.contents.on_change(move |content| {
            queue.add(Key::of(content.as_ref()));
            snapshots.add(snapshot_of(content));
            for snapshot in by_content.get(&content.name_any()) {
                snapshots.add(Key::of(snapshot.as_ref()));
            }
        });
        let (queue, by_class) = (self.snapshot_queue.clone(), self.by_class.clone());
        self.classes.on_change(move |class| {
            for name in [class.name_any(), String::new()] {
                for snapshot in by_class.get(&name) {
                    queue.add(Key::of(snapshot.as_ref()));
                }
            }
        });
        self.follow_claims();
    }

    /// Lets the metrics see what snapshots go through.
    fn measure(&self) {
        let operations = Operations::new(&self.options.metrics, metrics::SNAPSHOT);
        let (contents, classes) = (self.contents.clone(), self.classes.clone());
        self.snapshots.subscribe(move |before, after| {
            let Some(snapshot) = after.or(before) else { return };
            let status = snapshot.status.as_ref();
            let content = snapshots::plan::content_name(snapshot).and_then(|name| contents.named(&name));
            let class = snapshot.spec.volume_snapshot_class_name.as_deref().unwrap_or_default();
            let of_class = || classes.named(class).map(|class| class.driver.clone());
            let seen = metrics::Seen {
                uid: snapshot.uid().unwrap_or_default(),
                driver: content.map(|content| content.spec.driver.clone()).or_else(of_class),
                given: snapshot.spec.source.volume_snapshot_content_name.is_some(),
                taken: status::is_taken(status),
                ready: status::is_ready(snapshot),
                deleting: snapshot.metadata.deletion_timestamp.is_some(),
            };
            if after.is_some() { operations.observe(&seen) } else { operations.gone(&seen) }
        });
    }

    /// Snapshots wait for their claims to be bound, and stay while claims are restored from them.
    fn follow_claims(&self) {
        let (queue, own, by_claim) =
            (self.snapshot_queue.clone(), self.claim_queue.clone(), self.by_claim.clone());
        self.claims.subscribe(move |before, after| {
            let Some(claim) = after.or(before) else { return };
            let restored = before.into_iter().flat_map(|before| claims::restored_from(before));
            restored.for_each(|snapshot| queue.add(snapshot));
            for snapshot in by_claim.get(&Key::of(claim.as_ref())) {
                if !status::is_ready(&snapshot) {
                    queue.add(Key::of(snapshot.as_ref()));
                }
            }
            if before.is_none() && berth_kube::finalizers::has(claim.as_ref(), names::CLAIM) {
                own.add(Key::of(claim.as_ref()));
            }
        });
        let (queue, by_claim) = (self.snapshot_queue.clone(), self.by_claim.clone());
        self.volumes.subscribe(move |_, after| {
            let claim = after.and_then(|volume| volume.spec.as_ref()?.claim_ref.as_ref());
            let Some(claim) = claim else { return };
            let key =
                Key::new(claim.namespace.clone().unwrap_or_default(), claim.name.clone().unwrap_or_default());
            for snapshot in by_claim.get(&key) {
                if !status::is_ready(&snapshot) {
                    queue.add(Key::of(snapshot.as_ref()));
                }
            }
        });
    }
}

/// The claim that a snapshot is of.
fn claim_of(snapshot: &VolumeSnapshot) -> Option<Key> {
    let name = snapshot.spec.source.persistent_volume_claim_name.clone()?;
    Some(Key::new(snapshot.namespace().unwrap_or_default(), name))
}

/// The snapshot that a content belongs to.
fn snapshot_of(content: &VolumeSnapshotContent) -> Key {
    let back = &content.spec.volume_snapshot_ref;
    Key::new(back.namespace.clone().unwrap_or_default(), back.name.clone().unwrap_or_default())
}

/// The group that a snapshot belongs to, by its owner (of whatever version) or its status.
fn group_of(snapshot: &VolumeSnapshot) -> Option<Key> {
    let owner = snapshot.owner_references().iter().find(|owner| {
        let group = owner.api_version.split_once('/').map(|(group, _)| group);
        owner.kind == "VolumeGroupSnapshot" && group == Some(names::GROUPS_GROUP)
    });
    let named = snapshot.status.as_ref().and_then(|status| status.volume_group_snapshot_name.clone());
    let name = owner.map(|owner| owner.name.clone()).or(named).filter(|name| !name.is_empty())?;
    Some(Key::new(snapshot.namespace().unwrap_or_default(), name))
}

fn error_now(message: &str) -> SnapshotError {
    SnapshotError { time: Some(Time(Timestamp::now())), message: Some(message.to_owned()) }
}
