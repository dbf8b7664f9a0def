//! The NFS backend: volumes are directories on shares of NFS servers, in the place of csi-driver-nfs, or images in them.
//!
//! The controller mounts nothing and keeps nothing: it speaks to servers as a user-space client (`berth-nfs`), all
//! about a volume is in its id (`id.rs`), and what an id does not hold is on the share itself (`record.rs`). So any
//! replica can take any call, and what csi-driver-nfs made is served as it is.
//!
//! Order makes it safe: a volume's content is built in `.berth/incoming`, its record written, and then its directory
//! renamed into place, which is what makes it a volume; a deletion removes the record, and then renames the directory
//! away. A snapshot's archive appears by a rename, too. A crash leaves at most a record of nothing, which counts for
//! nothing, and something in `.berth`, which whoever comes next goes on with or removes.
//!
//! The node's side (`node.rs`) mounts a share once for each set of options and binds directories of it. Images are mounted
//! by loop devices, of one node at a time (`claims.rs`).

mod allowed;
mod claims;
mod controller;
mod id;
mod node;
mod parameters;
mod record;
mod shares;

use std::{path::PathBuf, sync::Arc, time::Duration};

use berth_core::NodeId;

use self::id::ShareName;
pub use self::{
    allowed::AllowedServers,
    controller::NfsController,
    id::OnDelete,
    node::{DirectMounts, IMAGE_WORKER, MountMode, NfsNode},
};
use crate::{Controller, Driver, Error, Node, Result, blocking, services::Mode};

/// How an NFS backend is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The id of this node, which NodeGetInfo answers.
    pub node: NodeId,
    /// The servers that may be spoken to.
    pub allowed_servers: AllowedServers,
    /// Shares (`server:/path`) whose volumes are listed even if no call has named them.
    pub shares: Vec<String>,
    /// Shares that are directories of this machine, as `server:/path=/directory`: their volumes get project quotas.
    pub export_roots: Vec<String>,
    /// How shares are reached of which no call has said it.
    pub mount_options: Vec<String>,
    /// The mode of directories whose class names none; 755 if `None`.
    pub mount_permissions: Option<u32>,
    /// What becomes of volumes whose class does not say.
    pub on_delete: Option<OnDelete>,
    /// An older archived directory of the same name makes place for a new one.
    pub replace_archived: bool,
    /// How long archived directories stay; for ever if `None`.
    pub keep_archived: Option<Duration>,
    /// Snapshots become `.tar.gz`, else `.tar`.
    pub compress_snapshots: bool,
    /// How long a caller waits for a snapshot before the answer is that it is not ready yet.
    pub snapshot_patience: Duration,
    /// How long a measured usage of a volume is answered before it is measured again.
    pub usage_lifetime: Duration,
    /// What mounts shares on this node.
    pub mount_mode: MountMode,
    /// What serves shares through FUSE and works on images: a program whose `main` intercepts
    /// `berth_fuse::SERVER`, `berth_host::remote::MOUNT_WORKER` and [`IMAGE_WORKER`].
    pub program: PathBuf,
    /// Where shares are mounted on this node, out of everybody's sight.
    pub mount_dir: PathBuf,
    /// How long a server may take to be mounted.
    pub mount_timeout: Duration,
}

impl Config {
    /// As csi-driver-nfs is by default.
    pub fn new(mount_dir: PathBuf, node: NodeId) -> Self {
        Self {
            node,
            allowed_servers: AllowedServers::default(),
            shares: Vec::new(),
            export_roots: Vec::new(),
            mount_options: Vec::new(),
            mount_permissions: None,
            on_delete: None,
            replace_archived: false,
            keep_archived: None,
            compress_snapshots: true,
            snapshot_patience: Duration::from_secs(3),
            usage_lifetime: Duration::from_mins(10),
            mount_mode: MountMode::Kernel,
            // This program, also if its file has been replaced meanwhile.
            program: PathBuf::from("/proc/self/exe"),
            mount_dir,
            mount_timeout: Duration::from_secs(110),
        }
    }
}

/// Volumes on NFS servers: both sides of the backend. There is nothing to attach or to stage.
#[derive(Debug, Clone)]
pub struct Nfs {
    node_id: NodeId,
    /// The controller's side, which creates, deletes and expands volumes and takes snapshots.
    pub controller: Arc<NfsController>,
    /// The node's side, which mounts shares and publishes volumes to pods.
    pub node: Arc<NfsNode>,
}

impl Nfs {
    /// A backend that has spoken to nobody yet. What an earlier process left mounted and nobody uses is unmounted.
    pub async fn start(config: Config) -> Result<Self> {
        let controller = NfsController::new(config.clone())?;
        let node = NfsNode::start(&config, controller.clone()).await;
        Ok(Self { node_id: config.node, controller: Arc::new(controller), node: Arc::new(node) })
    }

    /// A driver with the parts that the mode wants.
    pub fn driver(&self, name: &str, version: &str, mode: Mode) -> Driver {
        let mut driver = Driver::new(name, version);
        if mode != Mode::Node {
            let nfs = &self.controller;
            let controller = Controller::new(nfs).listing(nfs).capacity(nfs).snapshots(nfs).cloning(nfs);
            driver = driver.controller(controller.expansion(nfs).health(nfs));
        }
        if mode != Mode::Controller {
            let nfs = &self.node;
            let node = Node::binding(self.node_id.clone(), nfs).mounts(nfs).inline_by_reference();
            driver = driver.node(node.stats(nfs).expansion(nfs).health(nfs));
        }
        let metrics = self.controller.metrics().clone();
        driver.metrics(move |registry| metrics.register(registry))
    }

    /// Waits until deleted data is really gone and snapshots are whole, at most this long; the rest is left to whoever
    /// comes next.
    pub async fn drain(&self, at_most: Duration) {
        self.controller.drain(at_most).await;
    }
}

/// Reads `server:/path`; an IPv6 address is in brackets.
fn parse_share(text: &str) -> Result<ShareName> {
    let (server, path) = text.split_once(":/").ok_or_else(|| {
        Error::Invalid(format!(
            "share {text:?} is not of the form server:/path, such as nfs.example.com:/export"
        ))
    })?;
    ShareName::new(server.trim_start_matches('[').trim_end_matches(']'), path)
}
