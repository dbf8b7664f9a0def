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

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Next, Queue};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Driver, Identity};
use crate::failure::{Failure, settled};
use crate::names::attacher_finalizer;
use crate::suspects::Suspects;

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
    /// How often the driver is asked what is attached where, if it can tell.
    pub reconcile: Duration,
    /// How many volumes a page of that has; as many as the driver likes if 0.
    pub max_entries: i32,
    /// The filesystem of volumes that name none.
    pub default_fs_type: String,
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
        }
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
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = attacher.start() => {}
    }
    let workers = attacher.options.workers;
    let attachments = attacher.queue.run(workers, shutdown.clone(), |key| attacher.clone().look_at(key));
    let volumes =
        attacher.volume_queue.run(workers, shutdown.clone(), |key| attacher.clone().look_at_volume(key));
    let again = attacher.driver.when_back(&shutdown, || {
        for attachment in attacher.ours.get(&()) {
            attacher.suspects.again(&attacher.queue, Key::of(attachment.as_ref()));
        }
    });
    tokio::join!(attachments, volumes, attacher.reconcile(), again);
}

struct Attacher {
    cluster: Cluster,
    driver: Driver,
    /// The driver that this attacher was started for.
    name: String,
    finalizer: String,
    options: Options,
    attachments: Cache<VolumeAttachment>,
    by_volume: Index<VolumeAttachment, String>,
    /// The attachments of this driver, under one value.
    ours: Index<VolumeAttachment, ()>,
    /// The attachments of this driver by node.
    by_node: Index<VolumeAttachment, String>,
    volumes: Cache<PersistentVolume>,
    nodes: Cache<CSINode>,
    /// Attachments whose state the driver contradicts: attach them again although they are attached.
    forced: Mutex<HashSet<Key>>,
    queue: Queue<Key>,
    suspects: Suspects,
    volume_queue: Queue<Key>,
}

impl Attacher {
    fn new(cluster: &Cluster, driver: Driver, options: Options, identity: &Identity) -> Self {
        let attachments = cluster.cache::<VolumeAttachment>();
        let name = identity.name.clone();
        let (ours, of_driver) = (name.clone(), name.clone());
        Self {
            finalizer: attacher_finalizer(&name),
            by_volume: attachments.index(|attachment: &VolumeAttachment| {
                attachment.spec.source.persistent_volume_name.clone().into_iter().collect()
            }),
            ours: attachments.index(
                move |attachment: &VolumeAttachment| {
                    if attachment.spec.attacher == ours { vec![()] } else { Vec::new() }
                },
            ),
            by_node: attachments.index(move |attachment: &VolumeAttachment| {
                let spec = &attachment.spec;
                (spec.attacher == of_driver).then(|| spec.node_name.clone()).into_iter().collect()
            }),
            attachments,
            volumes: cluster.cache(),
            nodes: cluster.cache(),
            forced: Mutex::default(),
            queue: cluster.queue("csi-attacher-va", options.retry),
            suspects: Suspects::default(),
            volume_queue: cluster.queue("csi-attacher-pv", options.retry),
            cluster: cluster.named("external-attacher"),
            driver,
            name,
            options,
        }
    }

    async fn start(&self) {
        self.attachments.synced().await;
        self.volumes.synced().await;
        self.nodes.synced().await;
        let (queue, volumes, ours) = (self.queue.clone(), self.volume_queue.clone(), self.name.clone());
        self.attachments.subscribe(move |before, after| match (before, after) {
            (Some(gone), None) => {
                if let Some(volume) = &gone.spec.source.persistent_volume_name {
                    volumes.add(Key::cluster(volume.as_str()));
                }
            }
            (before, Some(after)) => {
                if after.spec.attacher == ours && before.is_none_or(|before| plan::matters(before, after)) {
                    queue.add(Key::of(after.as_ref()));
                }
            }
            (None, None) => {}
        });
        let (queue, finalizer) = (self.volume_queue.clone(), self.finalizer.clone());
        let (attachments, by_volume) = (self.queue.clone(), self.by_volume.clone());
        self.volumes.subscribe(move |before, after| {
            let Some(after) = after else { return };
            if after.metadata.deletion_timestamp.is_some()
                && crate::finalizers::has(after.as_ref(), &finalizer)
            {
                queue.add(Key::of(after.as_ref()));
            }
            // An attachment may have been made before its volume was seen here.
            if before.is_none() {
                for attachment in by_volume.get(&after.name_any()) {
                    attachments.add(Key::of(attachment.as_ref()));
                }
            }
        });
        self.follow_nodes();
    }

    /// Looks again at what is not attached to a node yet when the driver comes to be known there: without the node's id
    /// it has failed before.
    fn follow_nodes(&self) {
        let (queue, by_node, driver) = (self.queue.clone(), self.by_node.clone(), self.name.clone());
        self.nodes.subscribe(move |before, after| {
            let id = |node: Option<&Arc<CSINode>>| plan::node_id(node.map(AsRef::as_ref), &driver);
            let Some(node) = after else { return };
            let known = id(Some(node));
            if known.is_none() || known == id(before) {
                return;
            }
            for attachment in by_node.get(&node.name_any()) {
                if attachment.status.as_ref().is_none_or(|status| !status.attached) {
                    queue.add(Key::of(attachment.as_ref()));
                }
            }
        });
    }

    async fn look_at(self: Arc<Self>, key: Key) -> Result<Next, Failure> {
        self.suspects.look(&self.driver, &self.queue, key.clone(), Box::pin(self.sync(&key))).await
    }

    async fn look_at_volume(self: Arc<Self>, key: Key) -> Result<Next, Failure> {
        settled(self.sync_volume(&key).await)
    }

    fn forced(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.forced.lock()
    }
}
