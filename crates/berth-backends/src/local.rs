//! The local backend: volumes on this machine's own disk.
//!
//! Data directory:
//! ```text
//! volumes/<key>/{data | image}     a volume: a subvolume or directory, or an image file
//! snapshots/<key>/{data | image}   a snapshot
//! incoming/<key>                   being built; renamed into place when whole; emptied at start
//! trash/                           being removed, in the background
//! lost/                            data whose record was damaged: kept for a person to inspect
//! state/volumes.journal            the records; what is not in it does not exist
//! lock                             one driver per data directory
//! ```
//! Order makes it safe: data is renamed into place and synced, then recorded; a record is removed first, then the
//! data. So a crash leaves data without a record, never a record without data, and the next start removes it.

mod content;
mod devices;
mod direct;
mod health;
mod kind;
mod node;
mod record;
mod room;
mod snapshots;
mod start;
mod state;
#[cfg(test)]
mod tests;
mod trash;
mod volumes;

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use berth_core::{Capacity, NodeId, Topology};
use berth_host::{path::Dir, usage::TreeUsage};
use berth_journal::{Barrier, GroupCommit};
use parking_lot::{Mutex, MutexGuard};

use self::{devices::Devices, record::Key, state::State, trash::Trash};
pub use self::{direct::DirectVolumes, kind::Kind};
use crate::{Controller, Driver, Error, Node, Readiness, Result, services::Mode};

/// How a local backend is set up.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Config {
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// The node whose disk this is.
    pub node: NodeId,
    /// The kind of volumes whose class names none; the best the disk can do if `None`.
    pub kind: Option<Kind>,
    /// Volumes are attached to nodes; that is bookkeeping only, and therefore asked for.
    pub attachment: bool,
    /// Volumes are accessible from this node only.
    pub topology: bool,
    /// Volumes grow from the controller.
    pub expansion: bool,
    /// What is on a volume is grown on the node.
    pub node_expansion: bool,
    /// Volumes have mutable parameters.
    pub modification: bool,
    /// Changed blocks of snapshots can be asked for.
    pub changed_blocks: bool,
    /// How many volumes this node takes.
    pub max_volumes: Option<u32>,
    /// A mount shows a volume's files as those of the pod's group, which the kubelet then does not give them to.
    pub group_by_mount: bool,
    /// The key of this node's topology.
    pub topology_key: String,
    /// How many times the disk may be promised.
    pub overcommit: f64,
    /// The largest volume that is made or grown.
    pub max_volume_size: Capacity,
    /// The largest volume that is grown on the node.
    pub max_volume_size_on_node: Capacity,
    /// Simulated pools, by the value of the parameter `kind`; that parameter then chooses a pool and not a kind.
    pub pools: BTreeMap<String, Capacity>,
    /// Unknown class parameters are ignored instead of refused.
    pub ignore_unknown_parameters: bool,
    /// Mutable parameters that are taken without any effect.
    pub mutable_without_effect: Vec<String>,
    /// Changed blocks are listed in pieces of one length.
    pub fixed_length_blocks: bool,
}

impl Config {
    /// Everything but attachment, nothing simulated.
    pub fn new(data_dir: PathBuf, node: NodeId) -> Self {
        Self {
            data_dir,
            node,
            kind: None,
            attachment: false,
            topology: true,
            expansion: true,
            node_expansion: true,
            modification: true,
            changed_blocks: true,
            max_volumes: None,
            group_by_mount: false,
            topology_key: berth_core::names::TOPOLOGY_NODE.to_owned(),
            overcommit: 1.0,
            max_volume_size: Capacity::MAX,
            max_volume_size_on_node: Capacity::MAX,
            pools: BTreeMap::new(),
            ignore_unknown_parameters: false,
            mutable_without_effect: Vec::new(),
            fixed_length_blocks: false,
        }
    }
}

/// The entry of `volumes/` must be on disk before the record.
const VOLUMES: Barrier = Barrier::Directory(0);
/// The entry of `snapshots/` must be on disk before the record.
const SNAPSHOTS: Barrier = Barrier::Directory(1);

/// Volumes on this machine's disk.
#[derive(Debug, Clone)]
pub struct Local(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    default_kind: Kind,
    /// The data directory is on btrfs.
    is_btrfs: bool,
    /// And quotas are on there, so that volumes can be of kind btrfs.
    offers_btrfs: bool,
    /// Its filesystem can share blocks between files.
    reflink: bool,
    root: Dir,
    volumes: Dir,
    snapshots: Dir,
    incoming: Dir,
    lost: Dir,
    state: Mutex<State>,
    journal: GroupCommit,
    devices: Devices,
    trash: Trash,
    topology: Option<Arc<Topology>>,
    /// What a walk through a volume found, and how long it took.
    walks: Mutex<HashMap<Key, Walk>>,
    /// Held while a node's attachments are counted and one is added.
    attaching: tokio::sync::Mutex<()>,
    _lock: File,
}

#[derive(Debug, Clone, Copy)]
struct Walk {
    usage: TreeUsage,
    at: Instant,
    took: Duration,
}

impl Local {
    /// Opens the data directory, finishes or undoes what the last run left half done.
    pub async fn open(config: Config) -> Result<Self> {
        let opened = tokio::task::spawn_blocking(move || start::open(config)).await;
        opened
            .map_err(|panic| Error::State(format!("open the data directory: {panic}")))?
            .map(|inner| Self(Arc::new(inner)))
    }

    /// A driver of these volumes, with the parts that `mode` says.
    pub fn driver(&self, name: &str, version: &str, mode: Mode) -> Driver {
        let (local, config) = (Arc::new(self.clone()), &self.0.config);
        let mut driver = Driver::new(name, version).readiness(&local);
        if mode != Mode::Node {
            let mut controller = Controller::new(&local)
                .listing(&local)
                .capacity(&local)
                .cloning(&local)
                .group_snapshots(&local)
                .health(&local);
            if config.attachment {
                controller = controller.read_only_attachment(&local);
            }
            if config.topology {
                controller = controller.placement(&local);
            }
            if config.expansion {
                controller = controller.expansion(&local);
            }
            if config.modification {
                controller = controller.modification(&local);
            }
            if config.changed_blocks {
                controller = controller.changed_blocks(&local);
            }
            driver = driver.controller(controller);
        }
        if mode != Mode::Controller {
            let mut node = Node::binding(config.node.clone(), &local)
                .staging(&local)
                .stats(&local)
                .health(&local)
                .inline_volumes(&local);
            if config.node_expansion {
                node = node.expansion(&local);
            }
            if let Some(topology) = &self.0.topology {
                node = node.topology(Topology::clone(topology));
            }
            if let Some(most) = config.max_volumes {
                node = node.max_volumes(most);
            }
            if config.group_by_mount {
                node = node.mount_group();
            }
            driver = driver.node(node);
        }
        driver
    }

    /// The kind of volumes whose class names none.
    pub fn default_kind(&self) -> Kind {
        self.0.default_kind
    }

    /// How many volumes there are.
    pub fn volume_count(&self) -> usize {
        self.0.state().volume_count()
    }

    /// Waits until deleted data is really gone, at most this long.
    pub async fn drain(&self, at_most: Duration) {
        let inner = self.0.clone();
        // Whatever is not done is done at the next start.
        let _ = tokio::task::spawn_blocking(move || inner.trash.drain(at_most)).await;
    }
}

impl Local {
    /// Runs work that makes system calls on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = self.0.clone();
        crate::blocking(move || work(&inner)).await
    }
}

impl Readiness for Local {
    async fn ready(&self) -> Result<()> {
        self.blocking(|inner| Ok(inner.root.free_space().map(|_| ())?)).await
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
