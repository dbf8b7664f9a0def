//! The five services of CSI over the parts of a [`Driver`].
//!
//! A handler reads the call and its context (`call.rs`), refuses what was not composed, takes the locks, compares
//! with what is there, delegates, and answers. What the spec rules for many calls stands once, in `rules`.

mod answer;
mod controller;
mod group;
mod identity;
mod node;
mod rules;
mod snapshot_metadata;
mod status;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc};

use berth_core::{Name, VolumeId};
use berth_csi::v1::{
    controller_server::ControllerServer, group_controller_server::GroupControllerServer,
    identity_server::IdentityServer, node_server::NodeServer,
    snapshot_metadata_server::SnapshotMetadataServer,
};
use berth_host::path::Dir;
use prometheus_client::registry::Registry;
use tonic::{Response, Status, service::Routes};

use crate::{
    Announced, Error, Page, PageRequest, Result,
    call::Listing,
    compose::{Controller, Driver, Node, RegisterMetrics},
    erased::DynReadiness,
    ledger::Ledger,
    locks::{Guard, Hold, Key, Locks},
};

/// Larger than any request that makes sense, so that one that makes none is answered rather than cut off.
const MAX_REQUEST: usize = 16 << 20;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

type Reply<T> = std::result::Result<Response<T>, Status>;

/// Which services a process offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Controller and node services.
    All,
    /// Those that need no particular node.
    Controller,
    /// Those that work where the volume is used.
    Node,
}

/// How a driver runs.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the record of what is mounted on this node lives, and inline volumes are staged.
    pub state_dir: PathBuf,
    /// What is the driver's own: no volume is staged or published below.
    pub private_dir: PathBuf,
    /// How many entries of a listing are asked of the backend at once.
    pub default_page: usize,
    /// The most entries of a listing whose caller names no limit; all of them if `None`.
    pub longest_listing: Option<usize>,
    /// Whether detaching a volume that is still in use on this node is refused. Deleting one always is.
    pub check_volume_lifecycle: bool,
}

impl Config {
    /// Everything the driver keeps is in this directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        let private_dir = directory.into();
        Self {
            state_dir: private_dir.join("state"),
            private_dir,
            default_page: 1000,
            longest_listing: None,
            check_volume_lifecycle: false,
        }
    }
}

/// The services of a driver that runs.
pub struct Services {
    name: String,
    version: String,
    announced: Announced,
    controller: Option<Controller>,
    node: Option<Node>,
    readiness: Option<Arc<dyn DynReadiness>>,
    metrics: Option<RegisterMetrics>,
    config: Config,
    locks: Arc<Locks>,
    ledger: Arc<Ledger>,
    held: node::Held,
}

impl Services {
    pub(crate) fn open(driver: Driver, config: Config) -> Result<Arc<Self>> {
        check_name(&driver.name)?;
        driver.check()?;
        let ledger = if driver.node.is_some() {
            let boot_id = std::fs::read_to_string(BOOT_ID)
                .map_err(|error| berth_host::Error::new(format!("read {BOOT_ID}"), error))?;
            Ledger::open(&Dir::ensure(&config.state_dir, 0o700)?, boot_id.trim())?
        } else {
            Ledger::in_memory()
        };
        let announced = driver.announces();
        let Driver { name, version, controller, node, readiness, metrics } = driver;
        Ok(Arc::new(Self {
            name,
            version,
            announced,
            controller,
            node,
            readiness,
            metrics,
            config,
            locks: Locks::new(),
            ledger: Arc::new(ledger),
            held: node::Held::default(),
        }))
    }

    /// The driver's name, as StorageClass.provisioner and GetPluginInfo say it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shows the metrics that the backend has of its own.
    pub fn register_metrics(&self, registry: &mut Registry) {
        if let Some(register) = &self.metrics {
            register(registry);
        }
    }

    /// What the driver announces.
    pub fn announces(&self) -> &Announced {
        &self.announced
    }

    /// Whether the storage can be used now; the error is a sentence why not.
    pub async fn ready(&self) -> Result<()> {
        match &self.readiness {
            Some(readiness) => readiness.ready().await,
            None => Ok(()),
        }
    }

    /// The services that the driver's parts have; calls of all others are UNIMPLEMENTED.
    pub fn routes(self: &Arc<Self>) -> Routes {
        let shared = || Arc::clone(self);
        let mut routes =
            Routes::new(IdentityServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST));
        if let Some(controller) = &self.controller {
            routes = routes
                .add_service(ControllerServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST));
            if controller.parts.group_snapshots.is_some() {
                routes = routes.add_service(
                    GroupControllerServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST),
                );
            }
            if controller.parts.changed_blocks.is_some() {
                routes = routes.add_service(
                    SnapshotMetadataServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST),
                );
            }
        }
        if self.node.is_some() {
            routes =
                routes.add_service(NodeServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST));
        }
        routes
    }

    /// Undoes what a killed predecessor left half done on this node; to be run before the first call.
    pub async fn recover(&self) -> Result<()> {
        match &self.node {
            Some(node) => self.recover_node(node).await,
            None => Ok(()),
        }
    }

    /// Takes down all that is published and staged on this node, when nobody calls any more; gives how much that was.
    pub async fn take_down(&self) -> Result<usize> {
        match &self.node {
            Some(node) => self.take_node_down(node).await,
            None => Ok(0),
        }
    }

    /// A part that is there, or the answer that it is not.
    fn part<'a, T>(&self, part: Option<&'a T>, what: &str) -> std::result::Result<&'a T, Status>
    where
        T: ?Sized,
    {
        part.ok_or_else(|| Status::unimplemented(format!("{} has no {what}", self.name)))
    }

    fn controller(&self) -> std::result::Result<&Controller, Status> {
        self.part(self.controller.as_ref(), "controller")
    }

    fn node(&self) -> std::result::Result<&Node, Status> {
        self.part(self.node.as_ref(), "node")
    }

    fn lock(&self, keys: impl IntoIterator<Item = (Key, Hold)>) -> Result<Guard> {
        self.locks.try_lock(keys)
    }

    fn lock_volume(&self, id: &VolumeId) -> Result<Guard> {
        self.lock([(Key::Volume(id.clone()), Hold::Exclusive)])
    }

    /// Runs what may block, on a thread that may.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Ledger) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let ledger = Arc::clone(&self.ledger);
        crate::node::blocking(move || work(&ledger)).await
    }

    /// Asks the backend for page after page until the caller has what it wants.
    async fn gather<T, F>(&self, listing: Listing, fetch: impl Fn(PageRequest) -> F) -> Result<Page<T>>
    where
        F: Future<Output = Result<Page<T>>>,
    {
        let mut gathered = Page { entries: Vec::new(), next: listing.after };
        let most = listing.most.or(self.config.longest_listing);
        loop {
            let room = most.map_or(usize::MAX, |most| most - gathered.entries.len());
            let limit = room.min(self.config.default_page.max(1));
            let page = fetch(PageRequest { after: gathered.next.take(), limit }).await?;
            gathered.entries.extend(page.entries);
            gathered.next = page.next;
            let full = most.is_some_and(|most| gathered.entries.len() >= most);
            if full || gathered.next.is_none() {
                return Ok(gathered);
            }
        }
    }
}

/// The spec's rules for a plugin's name.
fn check_name(name: &str) -> Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let fits = name.len() <= 63 && name.parse::<Name>().is_ok();
    if fits && name.chars().all(allowed) && is_end(name.chars().next()) && is_end(name.chars().last()) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "the driver name {name:?} is not at most 63 letters, digits, dots and dashes that begin and end with a letter \
         or digit"
    )))
}
