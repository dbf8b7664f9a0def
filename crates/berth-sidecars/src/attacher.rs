//! Attaches volumes to nodes and detaches them, as VolumeAttachments ask.
//!
//! Reads: VolumeAttachment, PersistentVolume, CSINode; Secret and Node one at a time. Writes: attachments' finalizer,
//! annotations and status, volumes' finalizer. Errors stand in `status.attachError` and `status.detachError`, from where
//! Kubernetes carries them into the pods' events.
//!
//! A driver that does not attach (no PUBLISH_UNPUBLISH_VOLUME) has its attachments called attached at once.
//!
//! Before the first call an attachment is given everything that detaching needs: the node's id, the volume's handle and
//! the name of the secret. So it can be detached when the volume, the node or the class are long gone; a secret that is
//! gone is done without, and what the driver does not know any more (NOT_FOUND) while Kubernetes does not know it either
//! is detached.

mod apply;
mod plan;
mod reconcile;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Queue, finalizers};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::ResourceExt as _;
use parking_lot::Mutex;

use crate::driver::{Driver, Identity};
use crate::failure::settled;

pub(crate) use self::plan::capability;

/// How an attacher works; the defaults are upstream's.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// How many attachments are worked on at a time.
    pub workers: usize,
    /// When a failed item is tried again.
    pub retry: Backoff,
    /// How often the driver is asked what is attached where, if it can answer that.
    pub reconcile: Duration,
    /// How many volumes a page of that has; as many as the driver likes if 0.
    pub max_entries: i32,
    /// The filesystem of volumes that name none.
    pub default_fs_type: String,
    /// The one node that this attacher is for, if every node has a driver and an attacher of its own.
    pub only_node: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(15),
            workers: 10,
            retry: Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(5) },
            reconcile: Duration::from_mins(1),
            max_entries: 0,
            default_fs_type: String::new(),
            only_node: None,
        }
    }
}

/// Which attachments are this attacher's: those of its driver, on its node if it is for one.
#[derive(Debug, Clone)]
struct Scope {
    driver: String,
    node: Option<String>,
}

impl Scope {
    fn includes(&self, attachment: &VolumeAttachment) -> bool {
        let spec = &attachment.spec;
        spec.attacher == self.driver && self.node.as_ref().is_none_or(|node| spec.node_name == *node)
    }
}

/// Attaches and detaches until the cluster's shutdown, then finishes what is under way.
pub async fn run(cluster: Cluster, driver: Driver, options: Options) {
    let shutdown = cluster.shutdown().clone();
    let identity = tokio::select! {
        () = shutdown.cancelled() => return,
        identity = driver.ready() => identity,
    };
    let attacher = Arc::new(Attacher::new(&cluster, driver, options, &identity));
    let workers = attacher.options.workers;
    let attachments = attacher.driver.run_loop(
        attacher.attachment_loop(),
        workers,
        || attacher.ours.get(&()).iter().map(|attachment| Key::of(attachment.as_ref())).collect(),
        |key| {
            let attacher = attacher.clone();
            async move { attacher.sync(&key).await }
        },
    );
    let volumes = attacher.volume_loop().run(workers, |key| {
        let attacher = attacher.clone();
        async move { settled(attacher.sync_volume(&key).await) }
    });
    tokio::join!(attachments, volumes, attacher.reconcile());
}

struct Attacher {
    cluster: Cluster,
    driver: Driver,
    /// The driver that this attacher was started for.
    name: String,
    scope: Scope,
    finalizer: String,
    options: Options,
    attachments: Cache<VolumeAttachment>,
    by_volume: Index<VolumeAttachment, String>,
    /// The attachments of this attacher, under one value.
    ours: Index<VolumeAttachment, ()>,
    /// The attachments of this attacher by node.
    by_node: Index<VolumeAttachment, String>,
    volumes: Cache<PersistentVolume>,
    nodes: Cache<CSINode>,
    /// Attachments whose state the driver contradicts: attach them again although they are attached.
    forced: Mutex<HashSet<Key>>,
    queue: Queue<Key>,
    volume_queue: Queue<Key>,
}

impl Attacher {
    fn new(cluster: &Cluster, driver: Driver, options: Options, identity: &Identity) -> Self {
        let attachments = cluster.cache::<VolumeAttachment>();
        let name = identity.name.clone();
        let scope = Scope { driver: name.clone(), node: options.only_node.clone() };
        let (ours, on_node) = (scope.clone(), scope.clone());
        Self {
            finalizer: plan::finalizer(&name),
            by_volume: attachments.index(|attachment: &VolumeAttachment| {
                attachment.spec.source.persistent_volume_name.clone().into_iter().collect()
            }),
            ours: attachments.index(
                move |attachment: &VolumeAttachment| {
                    if ours.includes(attachment) { vec![()] } else { Vec::new() }
                },
            ),
            by_node: attachments.index(move |attachment: &VolumeAttachment| {
                on_node.includes(attachment).then(|| attachment.spec.node_name.clone()).into_iter().collect()
            }),
            attachments,
            volumes: cluster.cache(),
            nodes: cluster.cache(),
            forced: Mutex::default(),
            queue: cluster.queue("csi-attacher-va", options.retry),
            volume_queue: cluster.queue("csi-attacher-pv", options.retry),
            cluster: cluster.named("external-attacher"),
            driver,
            name,
            scope,
            options,
        }
    }

    /// Attachments, when they change, when their volume is seen, and when the driver comes to be known on their node:
    /// without the node's id they have failed before.
    fn attachment_loop(&self) -> Loop<Key> {
        let (ours, driver) = (self.scope.clone(), self.name.clone());
        let (by_volume, by_node) = (self.by_volume.clone(), self.by_node.clone());
        Loop::new(&self.cluster, &self.queue)
            .subscribe(&self.attachments, move |before, after| {
                let changed = after.filter(|after| {
                    ours.includes(after) && before.is_none_or(|before| plan::matters(before, after))
                });
                changed.map(|after| Key::of(after.as_ref())).into_iter().collect()
            })
            .subscribe(&self.volumes, move |before, after| {
                // An attachment may have been made before its volume was seen here.
                let seen = after.filter(|_| before.is_none());
                let attachments = seen.map_or_else(Vec::new, |volume| by_volume.get(&volume.name_any()));
                attachments.iter().map(|attachment| Key::of(attachment.as_ref())).collect()
            })
            .subscribe(&self.nodes, move |before, after| {
                let id = |node: Option<&Arc<CSINode>>| plan::node_id(node.map(AsRef::as_ref), &driver);
                let known = id(after);
                if known.is_none() || known == id(before) {
                    return Vec::new();
                }
                let attachments = after.map_or_else(Vec::new, |node| by_node.get(&node.name_any()));
                attachments
                    .iter()
                    .filter(|attachment| attachment.status.as_ref().is_none_or(|status| !status.attached))
                    .map(|attachment| Key::of(attachment.as_ref()))
                    .collect()
            })
    }

    /// Volumes that are kept until they are detached, when they are to go or an attachment of theirs is gone.
    fn volume_loop(&self) -> Loop<Key> {
        let finalizer = self.finalizer.clone();
        Loop::new(&self.cluster, &self.volume_queue)
            .subscribe(&self.attachments, |before, after| {
                let gone = before.filter(|_| after.is_none());
                let volume = gone.and_then(|gone| gone.spec.source.persistent_volume_name.as_deref());
                volume.map(Key::cluster).into_iter().collect()
            })
            .subscribe(&self.volumes, move |_, after| {
                let leaving = after.filter(|after| {
                    after.metadata.deletion_timestamp.is_some() && finalizers::has(after.as_ref(), &finalizer)
                });
                leaving.map(|volume| Key::of(volume.as_ref())).into_iter().collect()
            })
    }
}
