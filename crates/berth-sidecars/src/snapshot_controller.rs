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
//! What waits for another object is reconciled again when that object changes; nothing is polled.

mod binding;
mod claims;
mod creation;
mod groups;
mod metrics;
mod snapshots;
mod status;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Queue, Recorder, finalizers};
use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;

use self::binding::Content;
use self::groups::Groups;
use crate::failure::settled;
use crate::snapshots::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, names, served};

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
    /// Contents of volumes with a topology are labelled with a node in it, whose snapshotter is to act on them.
    pub distributed: bool,
    /// How long operations take.
    pub metrics: Metrics,
    /// How often a cluster without the CustomResourceDefinitions is asked for them again.
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
    let this = Arc::new(Controller::new(&cluster, options));
    let workers = this.options.workers;
    let measured = async {
        this.contents.synced().await;
        this.classes.synced().await;
        this.measure::<VolumeSnapshot>();
    };
    let snapshots = this.snapshot_loop().run(workers, |key| {
        let this = this.clone();
        async move { settled(this.sync::<VolumeSnapshot>(&key).await) }
    });
    let contents = Loop::new(&cluster, &this.content_queue).keyed(&this.contents).run(workers, |key| {
        let this = this.clone();
        async move { settled(this.sync_content::<VolumeSnapshot>(&key).await) }
    });
    let claims = this.claim_loop().run(workers, |key| {
        let this = this.clone();
        async move { settled(this.sync_claim(&key).await) }
    });
    let groups = async {
        if served::wait(&cluster, served::GROUPS, COMPONENT, pause).await {
            groups::run(this.clone()).await;
        }
    };
    tokio::select! {
        () = cluster.shutdown().cancelled() => {}
        () = measured => {}
    }
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

    /// Snapshots, when they, their contents, classes, claims or volumes, or the claims restored from them change.
    fn snapshot_loop(&self) -> Loop<Key> {
        let (by_content, by_class) = (self.by_content.clone(), self.by_class.clone());
        let (of_claim, of_volume) = (self.by_claim.clone(), self.by_claim.clone());
        let keys = |snapshots: &[Arc<VolumeSnapshot>]| {
            snapshots.iter().map(|snapshot| Key::of(snapshot.as_ref())).collect::<Vec<_>>()
        };
        // Those that are ready need their claim no more.
        let unready = move |mut snapshots: Vec<Arc<VolumeSnapshot>>| {
            snapshots.retain(|snapshot| !status::is_ready(snapshot));
            keys(&snapshots)
        };
        let snapshots = Loop::new(&self.cluster, &self.snapshot_queue)
            .keyed(&self.snapshots)
            .also(&self.contents, move |content| {
                let mut snapshots = keys(&by_content.get(&content.name_any()));
                snapshots.push(owner_key(content.as_ref()));
                snapshots
            })
            .also(&self.classes, move |class| {
                let mut waiting = keys(&by_class.get(&class.name_any()));
                waiting.extend(keys(&by_class.get("")));
                waiting
            })
            .subscribe(&self.claims, move |before, after| {
                let Some(claim) = after.or(before) else { return Vec::new() };
                let mut snapshots = unready(of_claim.get(&Key::of(claim.as_ref())));
                snapshots.extend(before.into_iter().flat_map(|before| claims::restored_from(before)));
                snapshots
            })
            .subscribe(&self.volumes, move |_, after| {
                let claim = after.and_then(|volume| volume.spec.as_ref()?.claim_ref.as_ref());
                claim.map_or_else(Vec::new, |claim| unready(of_volume.get(&key_of(claim))))
            });
        match &self.nodes {
            None => snapshots,
            Some(nodes) => snapshots.reads(nodes),
        }
    }

    /// Claims that are kept while snapshots of them are being taken.
    fn claim_loop(&self) -> Loop<Key> {
        Loop::new(&self.cluster, &self.claim_queue)
            .also(&self.snapshots, |snapshot| claim_of(snapshot))
            .subscribe(&self.claims, |before, after| {
                let kept =
                    |claim: &&Arc<PersistentVolumeClaim>| finalizers::has(claim.as_ref(), names::CLAIM);
                let new = after.filter(|_| before.is_none()).filter(kept);
                new.map(|claim| Key::of(claim.as_ref())).into_iter().collect()
            })
    }
}

/// The claim that a snapshot is of.
fn claim_of(snapshot: &VolumeSnapshot) -> Option<Key> {
    let name = snapshot.spec.source.persistent_volume_claim_name.clone()?;
    Some(Key::new(snapshot.namespace().unwrap_or_default(), name))
}

/// The snapshot or the group that a content belongs to.
fn owner_key(content: &impl Content) -> Key {
    key_of(content.owner())
}

fn key_of(reference: &ObjectReference) -> Key {
    Key::new(reference.namespace.clone().unwrap_or_default(), reference.name.clone().unwrap_or_default())
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
