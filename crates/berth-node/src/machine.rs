//! Keeps the objects that stand for this machine: its Node, its lease, and its CSINode.
//!
//! Reads: its Node, its CSINode. Writes: Node (labels, annotations, status), the Lease of its name in `kube-node-lease`
//! every 10 s if it holds for 40 s, CSINode. The status is written when it changes, and every 5 minutes; everything that waits to be written
//! at the same time is one write. The node is ready once its CSINode exists: before that, nobody could know that a
//! volume's driver is missing here.

mod csi_node;
mod facts;
mod lease;
mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_kube::{Backoff, Cache, Cluster, Key};
use berth_runtime::blocking;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSINode;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};

pub(crate) use self::csi_node::{DriverInfo, Unfit};
use self::facts::Facts;
use self::status::Now;
use crate::plugin::Failed;

/// The Kubernetes whose kubelet this node stands in for.
const KUBELET_VERSION: &str = concat!("v1.36.0+berth.", env!("CARGO_PKG_VERSION"));
/// How often the status is written when nothing changes.
const HEARTBEAT: Duration = Duration::from_secs(5 * 60);
/// How long to wait after a write that failed.
const WRITE_BACKOFF: Backoff = Backoff { first: Duration::from_millis(50), longest: Duration::from_secs(10) };
/// The status is long when there are many volumes: what changes while it was written, and as long again but at most this,
/// goes together.
const LONGEST_REST: Duration = Duration::from_millis(50);
/// How often a write is tried again because somebody else was quicker.
const ATTEMPTS: u32 = 10;

/// How a node presents itself.
#[derive(Debug, Clone)]
pub struct Options {
    /// The name of the Node and CSINode objects.
    pub name: String,
    /// The node's directory: its disk is the node's ephemeral storage.
    pub data_dir: PathBuf,
    /// Labels beside those that every node has.
    pub labels: BTreeMap<String, String>,
    /// How others reach the machine; found out if `None`.
    pub address: Option<IpAddr>,
    /// The port of the node's own API (logs, exec).
    pub port: Option<u16>,
    /// How many pods the node takes.
    pub max_pods: u32,
    /// The runtime's name and version, such as `process://0.1.0`.
    pub runtime: String,
    /// How long the node's lease holds; it is renewed four times in this time.
    pub lease_duration: Duration,
}

impl Options {
    /// Returns options with the kubelet's defaults for everything but name and directory.
    pub fn new(name: impl Into<String>, data_dir: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            data_dir: data_dir.into(),
            labels: BTreeMap::new(),
            address: None,
            port: None,
            max_pods: 1100,
            runtime: concat!("process://", env!("CARGO_PKG_VERSION")).to_owned(),
            lease_duration: lease::DURATION,
        }
    }
}

/// Why the node's objects could not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Kubernetes refused, or could not be reached.
    #[error("keeping the objects of node {node}")]
    Kubernetes {
        /// The name of the node.
        node: String,
        /// What the API server answered.
        source: Box<berth_kube::Error>,
    },
    /// The driver does not fit the node.
    #[error("announcing the driver {driver}")]
    Driver {
        /// The name of the driver.
        driver: String,
        /// What of its announcement cannot be used.
        source: Unfit,
    },
}

/// The result of writing the node's objects.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// This machine as Kubernetes sees it.
pub struct Machine {
    cluster: Cluster,
    options: Options,
    facts: Facts,
    nodes: Cache<Node>,
    csi_nodes: Cache<CSINode>,
    desired: Mutex<DesiredStatus>,
    wake: Notify,
    written: watch::Sender<Written>,
    attached: watch::Sender<BTreeSet<String>>,
    /// The drivers that the CSINode names.
    announced: watch::Sender<BTreeSet<String>>,
    /// Held while labels, annotations or the CSINode are written: drivers register at the same time.
    announcing: tokio::sync::Mutex<()>,
}

/// What the status shall say; `version` counts the changes.
#[derive(Default)]
struct DesiredStatus {
    in_use: BTreeSet<String>,
    version: u64,
}

/// Up to which version the status was written, or failed to be.
#[derive(Default, Clone)]
struct Written {
    in_use: BTreeSet<String>,
    version: u64,
    failed: Option<(u64, String)>,
}

impl Machine {
    /// Creates or adopts the node's objects and keeps them until the cluster's shutdown; returns when it is ready.
    pub async fn start(cluster: Cluster, options: Options) -> Result<Arc<Self>> {
        let facts = {
            let (data_dir, pods, address) = (options.data_dir.clone(), options.max_pods, options.address);
            blocking(move || Facts::read(&data_dir, pods, address)).await
        };
        let cluster = cluster.named("kubelet");
        let machine = Arc::new(Self {
            nodes: cluster.cache(),
            csi_nodes: cluster.cache(),
            cluster,
            options,
            facts,
            desired: Mutex::default(),
            wake: Notify::new(),
            written: watch::channel(Written::default()).0,
            attached: watch::channel(BTreeSet::new()).0,
            announced: watch::channel(BTreeSet::new()).0,
            announcing: tokio::sync::Mutex::default(),
        });
        let describe = |node: &mut Node| {
            status::describe(node, &machine.options);
            Ok(())
        };
        let node = machine.change_node(describe).await?;
        // Until the volume manager knows better, what was in use before a restart still is.
        machine.desired().in_use.extend(in_use_of(&node));
        machine.ensure_csi_node(&node).await?;
        machine.write_status().await?;
        machine.follow();
        machine.follow_csi_node();
        tokio::spawn(Arc::clone(&machine).keep_status());
        let lease_duration = machine.options.lease_duration;
        tokio::spawn(lease::keep(machine.cluster.clone(), node, lease_duration));
        Ok(machine)
    }

    /// The name of the node.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// The memory of the machine in bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.facts.capacity.memory
    }

    /// The address under which others reach the machine.
    pub fn address(&self) -> IpAddr {
        self.facts.address
    }

    /// Says that a volume is in use here, and returns when Kubernetes has it: from then on it is not detached.
    pub async fn in_use(&self, unique_name: &str) -> Result<(), Failed> {
        let version = {
            let mut desired = self.desired();
            if !desired.in_use.insert(unique_name.to_owned())
                && self.written.borrow().in_use.contains(unique_name)
            {
                return Ok(());
            }
            desired.version += 1;
            desired.version
        };
        let mut written = self.written.subscribe();
        self.wake.notify_one();
        let settled = |written: &Written| {
            written.version >= version
                || written.failed.as_ref().is_some_and(|(failed, _)| *failed >= version)
        };
        // The sender lives as long as `self`.
        let Ok(written) = written.wait_for(settled).await else { return Ok(()) };
        match &written.failed {
            Some((_, error)) if written.version < version => Err(Failed::unchanged(format!(
                "the volume {unique_name} could not be reported as in use by node {}: {error}",
                self.options.name
            ))),
            _ => Ok(()),
        }
    }

    /// Says that a volume is not in use here any more; reported to Kubernetes with the next write, which this triggers.
    pub fn not_in_use(&self, unique_name: &str) {
        let mut desired = self.desired();
        if desired.in_use.remove(unique_name) {
            desired.version += 1;
            drop(desired);
            self.wake.notify_one();
        }
    }

    /// Says which volumes are in use and that no others are: after a restart, what the node had reported before is kept
    /// until this is called.
    pub fn only_in_use(&self, unique_names: impl IntoIterator<Item = String>) {
        let mut desired = self.desired();
        desired.in_use = unique_names.into_iter().collect();
        desired.version += 1;
        drop(desired);
        self.wake.notify_one();
    }

    /// Whether a volume is attached.
    pub fn is_attached(&self, unique_name: &str) -> bool {
        self.attached.borrow().contains(unique_name)
    }

    /// Writes to Kubernetes that a driver is registered here: Node annotation and labels, then CSINode.
    pub async fn announce(&self, driver: &DriverInfo) -> Result<()> {
        let unfit = |source| Error::Driver { driver: driver.name.clone(), source };
        if driver.node_id.is_empty() {
            return Err(unfit(Unfit::NoNodeId));
        }
        let _alone = self.announcing.lock().await;
        let node = self.change_node(|node| csi_node::annotate(node, driver).map_err(unfit)).await?;
        self.change_csi_node(&node, |object| {
            // What a driver says of a node may not be changed, only removed and said anew.
            let wanted = {
                let mut wanted = object.clone();
                csi_node::add(&mut wanted, driver);
                wanted
            };
            let is_same = |a: &CSINode, b: &CSINode| {
                let of = |object: &CSINode| {
                    let known = object.spec.drivers.iter().find(|known| known.name == driver.name)?;
                    Some((known.node_id.clone(), known.topology_keys.clone()))
                };
                of(a).is_none() || of(a) == of(b)
            };
            if is_same(object, &wanted) {
                *object = wanted;
                true
            } else {
                csi_node::remove(object, &driver.name);
                false
            }
        })
        .await
    }

    /// Writes to Kubernetes that a driver is not registered here any more.
    pub async fn withdraw(&self, driver: &str) -> Result<()> {
        let _alone = self.announcing.lock().await;
        let node = self
            .change_node(|node| {
                csi_node::remove_annotation(node, driver)
                    .map_err(|source| Error::Driver { driver: driver.to_owned(), source })
            })
            .await?;
        self.change_csi_node(&node, |object| {
            csi_node::remove(object, driver);
            true
        })
        .await
    }

    /// Waits until Kubernetes does not know of a driver any more that was announced: somebody removed it.
    pub async fn lost(&self, driver: &str) {
        let mut announced = self.announced.subscribe();
        // The sender lives as long as `self`.
        let _ = announced.wait_for(|announced| !announced.contains(driver)).await;
    }

    fn desired(&self) -> MutexGuard<'_, DesiredStatus> {
        self.desired.lock()
    }

    fn key(&self) -> Key {
        Key::cluster(&self.options.name)
    }

    fn failed(&self, source: berth_kube::Error) -> Error {
        Error::Kubernetes { node: self.options.name.clone(), source: Box::new(source) }
    }

    /// The Node, made if it is not there.
    async fn ensure_node(&self) -> Result<Arc<Node>> {
        loop {
            let known = self.cluster.fetch::<Node>(&self.key()).await.map_err(|error| self.failed(error))?;
            if let Some(node) = known {
                return Ok(node);
            }
            let mut node = Node::default();
            node.metadata.name = Some(self.options.name.clone());
            status::describe(&mut node, &self.options);
            status::report(&mut node, &self.options, &self.facts, &self.now(Some("node is starting")));
            match self.cluster.create(&node).await {
                Err(error) if error.is_already_exists() => {}
                created => return created.map_err(|error| self.failed(error)),
            }
        }
    }

    /// Changes the Node's metadata, unless `change` refuses to; it is asked again if somebody else was quicker.
    async fn change_node(&self, mut change: impl FnMut(&mut Node) -> Result<()> + Send) -> Result<Arc<Node>> {
        loop {
            let node = self.ensure_node().await?;
            let mut refused = None;
            let edit = |node: &mut Node| {
                let mut changed = node.clone();
                match change(&mut changed) {
                    Ok(()) => *node = changed,
                    Err(error) => refused = Some(error),
                }
            };
            let changed = self.cluster.edit(&*node, edit).await.map_err(|error| self.failed(error))?;
            match (refused, changed) {
                (Some(error), _) => return Err(error),
                (None, Some(node)) => return Ok(node),
                // It was removed meanwhile, and is made anew.
                (None, None) => {}
            }
        }
    }

    /// The CSINode of this node, made if it is not there; one of an earlier node of this name is replaced.
    async fn ensure_csi_node(&self, node: &Node) -> Result<Arc<CSINode>> {
        for attempt in 1_u32.. {
            let known =
                self.cluster.fetch::<CSINode>(&self.key()).await.map_err(|error| self.failed(error))?;
            match known {
                Some(known) if csi_node::is_owned(&known, node) => return Ok(known),
                Some(known) => self.cluster.delete(&*known).await.map_err(|error| self.failed(error))?,
                None => {}
            }
            match self.cluster.create(&csi_node::empty(node)).await {
                Err(error) if error.is_already_exists() && attempt < ATTEMPTS => {}
                created => return created.map_err(|error| self.failed(error)),
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Changes the CSINode until `change` says that it is as it shall be.
    async fn change_csi_node(
        &self,
        node: &Node,
        mut change: impl FnMut(&mut CSINode) -> bool + Send,
    ) -> Result<()> {
        loop {
            let object = self.ensure_csi_node(node).await?;
            let mut done = false;
            let edit = |object: &mut CSINode| done = change(object);
            let changed = self.cluster.edit(&*object, edit).await.map_err(|error| self.failed(error))?;
            if changed.is_some() && done {
                return Ok(());
            }
        }
    }

    /// Learns from the Node's cache what is attached, and wakes the writer when somebody undid its work.
    fn follow(self: &Arc<Self>) {
        let machine = Arc::downgrade(self);
        self.nodes.subscribe(move |before, after| {
            let Some(machine) = machine.upgrade() else { return };
            let Some(node) = after.or(before) else { return };
            if node.metadata.name.as_ref() != Some(&machine.options.name) {
                return;
            }
            let attached = after.map(|node| attached_of(node)).unwrap_or_default();
            machine.attached.send_if_modified(|known| {
                let differs = *known != attached;
                *known = attached;
                differs
            });
            if !after.is_some_and(|node| status::is_ready(node)) {
                machine.wake.notify_one();
            }
        });
    }

    /// Learns from the CSINode's cache which drivers Kubernetes knows of.
    fn follow_csi_node(self: &Arc<Self>) {
        let machine = Arc::downgrade(self);
        self.csi_nodes.subscribe(move |before, after| {
            let Some(machine) = machine.upgrade() else { return };
            let Some(object) = after.or(before) else { return };
            if object.metadata.name.as_ref() != Some(&machine.options.name) {
                return;
            }
            let drivers = after.map(|object| object.spec.drivers.as_slice()).unwrap_or_default();
            machine.announced.send_replace(drivers.iter().map(|driver| driver.name.clone()).collect());
            if after.is_none() {
                machine.wake.notify_one();
            }
        });
    }

    async fn keep_status(self: Arc<Self>) {
        let mut failures = 0;
        loop {
            let wait = if failures == 0 { HEARTBEAT } else { WRITE_BACKOFF.pause(failures) };
            tokio::select! {
                () = self.cluster.shutdown().cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
            let begun = Instant::now();
            match self.write_status().await {
                Ok(()) => {
                    failures = 0;
                    tokio::time::sleep(begun.elapsed().min(LONGEST_REST)).await;
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(
                        node = self.options.name,
                        error = error.chain(),
                        "the node's status was not written"
                    );
                }
            }
        }
    }

    /// Writes the status as it is wanted now, and wakes those who wait for it.
    async fn write_status(&self) -> Result<()> {
        let (in_use, version) = {
            let desired = self.desired();
            (desired.in_use.clone(), desired.version)
        };
        let result = self.try_write_status(&in_use).await;
        self.written.send_modify(|written| match &result {
            Ok(()) => *written = Written { in_use, version, failed: None },
            Err(error) => written.failed = Some((version, error.chain())),
        });
        result
    }

    async fn try_write_status(&self, in_use: &BTreeSet<String>) -> Result<()> {
        let mut known = self.nodes.named(&self.options.name);
        loop {
            let node = match known.take() {
                Some(node) => node,
                None => self.ensure_node().await?,
            };
            if !self
                .csi_nodes
                .named(&self.options.name)
                .is_some_and(|known| csi_node::is_owned(&known, &node))
            {
                self.ensure_csi_node(&node).await?;
            }
            let now = Now { in_use: in_use.clone(), ..self.now(None) };
            let report = |node: &mut Node| status::report(node, &self.options, &self.facts, &now);
            let written = self.cluster.edit_status(&*node, report).await;
            // What the cache knows may be a Node that is gone: then the server is asked.
            if written.map_err(|error| self.failed(error))?.is_some() {
                return Ok(());
            }
        }
    }

    fn now(&self, not_ready: Option<&'static str>) -> Now {
        Now {
            time: Timestamp::now(),
            not_ready,
            disk_full: facts::is_disk_full(&self.options.data_dir),
            in_use: self.desired().in_use.clone(),
        }
    }
}

fn in_use_of(node: &Node) -> Vec<String> {
    node.status.as_ref().and_then(|status| status.volumes_in_use.clone()).unwrap_or_default()
}

fn attached_of(node: &Node) -> BTreeSet<String> {
    let attached = node.status.as_ref().and_then(|status| status.volumes_attached.as_ref());
    attached.into_iter().flatten().map(|volume| volume.name.clone()).collect()
}

impl Error {
    /// The error and its causes in one sentence.
    pub fn chain(&self) -> String {
        berth_core::error_chain(self)
    }
}

#[cfg(test)]
mod tests;
