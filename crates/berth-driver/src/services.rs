//! The five services of CSI over one backend.
//!
//! A handler parses ([`crate::call`]), refuses what the backend's features lack, takes the locks, compares with what
//! is there, delegates, and answers. What the spec rules for many calls stands once, in `rules`.

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

use berth_core::{Name, SnapshotId, VolumeId};
use berth_csi::v1::{
    controller_server::ControllerServer, group_controller_server::GroupControllerServer,
    identity_server::IdentityServer, node_server::NodeServer,
    snapshot_metadata_server::SnapshotMetadataServer,
};
use berth_host::path::Dir;
use tonic::{Response, Status, service::Routes};

use crate::{
    Backend, Feature, Features,
    backend::{Error, Mounts, Page, PageRequest, Result, Snapshot, Volume},
    call::Listing,
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
    /// All of them.
    All,
    /// Those that need no particular node.
    Controller,
    /// Those that work where the volume is used.
    Node,
}

/// How a driver runs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The driver's name, as it stands in StorageClass.provisioner.
    pub name: String,
    /// The driver's version.
    pub version: String,
    /// Where the record of what is mounted on this node lives, and inline volumes are staged.
    pub state_dir: PathBuf,
    /// What is the driver's own: no volume is staged or published below.
    pub private_dir: PathBuf,
    /// Which services are offered.
    pub mode: Mode,
    /// How many entries of a listing are asked of the backend at once.
    pub default_page: usize,
    /// Whether detaching a volume that is still in use on this node is refused. Deleting one always is.
    pub check_volume_lifecycle: bool,
}

/// A CSI driver: the services over a backend.
pub struct Driver {
    backend: Arc<dyn Backend>,
    features: Features,
    config: Config,
    locks: Arc<Locks>,
    ledger: Arc<Ledger>,
    mounts: Arc<dyn Mounts>,
    /// Held while a node's attachments are counted and one is added.
    attaching: tokio::sync::Mutex<()>,
}

impl Driver {
    /// A driver whose node part knows what was mounted before it was started; [`Driver::recover`] comes next.
    pub fn new(config: Config, backend: Arc<dyn Backend>) -> Result<Arc<Self>> {
        check_name(&config.name)?;
        let ledger = match config.mode {
            Mode::Controller => Ledger::in_memory(),
            Mode::All | Mode::Node => {
                let boot_id = std::fs::read_to_string(BOOT_ID)
                    .map_err(|error| berth_host::Error::new(format!("read {BOOT_ID}"), error))?;
                Ledger::open(&Dir::ensure(&config.state_dir, 0o700)?, boot_id.trim())?
            }
        };
        Ok(Arc::new(Self {
            features: backend.features(),
            mounts: backend.mounts(),
            backend,
            config,
            locks: Locks::new(),
            ledger: Arc::new(ledger),
            attaching: tokio::sync::Mutex::default(),
        }))
    }

    /// The services that the mode and the backend's features have; calls of all others are UNIMPLEMENTED.
    pub fn routes(self: &Arc<Self>) -> Routes {
        let shared = || Arc::clone(self);
        let mut routes =
            Routes::new(IdentityServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST));
        if self.offers_controller() {
            routes = routes
                .add_service(ControllerServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST));
            if self.features.has(Feature::GroupSnapshots) {
                routes = routes.add_service(
                    GroupControllerServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST),
                );
            }
            if self.features.has(Feature::SnapshotMetadata) {
                routes = routes.add_service(
                    SnapshotMetadataServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST),
                );
            }
        }
        if self.offers_node() {
            routes =
                routes.add_service(NodeServer::from_arc(shared()).max_decoding_message_size(MAX_REQUEST));
        }
        routes
    }

    /// Undoes what a killed predecessor left half done on this node; to be run before the first call.
    pub async fn recover(&self) -> Result<()> {
        if self.offers_node() { self.recover_node().await } else { Ok(()) }
    }

    /// Takes down all that is published and staged on this node, when nobody calls any more; gives how much that was.
    pub async fn take_down(&self) -> Result<usize> {
        if self.offers_node() { self.take_node_down().await } else { Ok(0) }
    }

    fn offers_controller(&self) -> bool {
        self.config.mode != Mode::Node
    }

    fn offers_node(&self) -> bool {
        self.config.mode != Mode::Controller
    }

    fn need(&self, feature: Feature) -> std::result::Result<(), Status> {
        if self.features.has(feature) {
            return Ok(());
        }
        Err(Status::unimplemented(format!("{} does not have {feature:?}", self.config.name)))
    }

    fn lock(&self, keys: impl IntoIterator<Item = (Key, Hold)>) -> Result<Guard> {
        self.locks.try_lock(keys)
    }

    fn lock_volume(&self, id: &VolumeId) -> Result<Guard> {
        self.lock([(Key::Volume(id.clone()), Hold::Exclusive)])
    }

    async fn volume(&self, id: &VolumeId) -> Result<Volume> {
        self.backend.volume(id).await?.ok_or_else(|| Error::no_volume(id))
    }

    async fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        self.backend.snapshot(id).await?.ok_or_else(|| Error::no_snapshot(id))
    }

    /// Runs what may block, on a thread that may.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Ledger) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let ledger = Arc::clone(&self.ledger);
        tokio::task::spawn_blocking(move || work(&ledger))
            .await
            .unwrap_or_else(|error| Err(Error::State(format!("a task did not finish: {error}"))))
    }

    /// Asks the backend for page after page until the caller has what it wants.
    async fn gather<T, F>(&self, listing: Listing, fetch: impl Fn(PageRequest) -> F) -> Result<Page<T>>
    where
        F: Future<Output = Result<Page<T>>>,
    {
        let mut gathered = Page { entries: Vec::new(), next: listing.after };
        loop {
            let room = listing.most.map_or(usize::MAX, |most| most - gathered.entries.len());
            let limit = room.min(self.config.default_page.max(1));
            let page = fetch(PageRequest { after: gathered.next.take(), limit }).await?;
            gathered.entries.extend(page.entries);
            gathered.next = page.next;
            let full = listing.most.is_some_and(|most| gathered.entries.len() >= most);
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
