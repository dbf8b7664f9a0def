//! A provisioner beside the driver of one node, one on every node instead of one for all.
//!
//! A claim belongs to the node that is selected for it. For a class that waits for the first consumer the scheduler
//! selects one; for others the provisioners do: each waits for a time of its own, asks whether its node has the room,
//! and writes its name, which one of them is the first to do. Who sees another's name before that gives up; who wrote
//! its name and then fails takes it away again, and all begin anew.
//!
//! What a claim is restored or cloned from is on one node, which the scheduler does not know. A provisioner whose node is
//! selected for such a claim and does not have the source selects the node that has it, before it calls the driver
//! (`Provisioner::hand_over`): that of the claim that is cloned, or of the label `managed-by` of the snapshot's content.
//!
//! A volume is deleted where it can be reached.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::{SELECTED_NODE, creating};
use berth_csi::v1::GetCapacityRequest;
use berth_kube::Next;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::capacity::Room;
use super::request::VolumeRequest;
use super::sources::Source;
use super::topology::Segment;
use super::{CONFLICT_PAUSE, Provisioner};
use crate::driver::{ControllerCapability, Driver, Identity};
use crate::failure::Failure;
use crate::node_topology::NodeTopology;

/// Who keeps the capacity objects of a whole cluster current.
const MANAGER: &str = "external-provisioner";
/// The longest value of a label, and the longest name of a finalizer after its domain.
const LONGEST_NAME: usize = 63;

/// One provisioner among those of all nodes; the defaults are upstream's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerNode {
    /// The name of the node that this provisioner runs on.
    pub name: String,
    /// Also provisions for classes that bind at once.
    pub immediate: bool,
    /// How long to wait at most before the first attempt to be selected; twice as long before each further one.
    pub base_delay: Duration,
    /// How long to wait at most.
    pub max_delay: Duration,
}

impl PerNode {
    /// As upstream does it, on a node.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            immediate: true,
            base_delay: Duration::from_secs(20),
            max_delay: Duration::from_mins(1),
        }
    }

    /// How long to wait before an attempt, counted from 0; `chance` is from 0 to 1.
    fn delay(&self, attempt: u32, chance: f64) -> Duration {
        let doubled = self.base_delay.saturating_mul(1_u32.checked_shl(attempt).unwrap_or(u32::MAX));
        doubled.min(self.max_delay).saturating_sub(self.base_delay.mul_f64(chance))
    }
}

/// This node as the driver sees it, and the claims that it tries to be selected for.
pub(super) struct OwnNode {
    options: PerNode,
    topology: NodeTopology,
    /// By the claims' UIDs.
    attempts: Mutex<HashMap<String, Attempt>>,
}

#[derive(Debug, Clone, Copy)]
struct Attempt {
    number: u32,
    due: Instant,
}

impl OwnNode {
    /// Asks the driver for its topology until it answers.
    pub(super) async fn find(driver: &Driver, options: &PerNode, timeout: Duration) -> Self {
        Self::new(options.clone(), NodeTopology::find(driver, timeout).await)
    }

    pub(super) fn new(options: PerNode, topology: NodeTopology) -> Self {
        Self { options, topology, attempts: Mutex::default() }
    }

    pub(super) fn name(&self) -> &str {
        &self.options.name
    }

    /// Whether claims that no node is selected for are for the taking.
    pub(super) fn takes_free_claims(&self) -> bool {
        self.options.immediate
    }

    /// The topology, empty if the driver has none.
    pub(super) fn segment(&self) -> Segment {
        self.topology.0.clone().unwrap_or_default()
    }

    /// Node and CSINode as they will be, or are: there is no need to watch all of them for one.
    pub(super) fn objects(&self, driver: &str) -> (Arc<CSINode>, Arc<Node>) {
        let metadata = ObjectMeta { name: Some(self.options.name.clone()), ..ObjectMeta::default() };
        let own = CSINodeDriver {
            name: driver.to_owned(),
            node_id: self.options.name.clone(),
            topology_keys: Some(self.segment().into_keys().collect()),
            ..CSINodeDriver::default()
        };
        let labelled = ObjectMeta { labels: Some(self.segment()), ..metadata.clone() };
        (
            Arc::new(CSINode { metadata, spec: CSINodeSpec { drivers: vec![own] } }),
            Arc::new(Node { metadata: labelled, ..Node::default() }),
        )
    }

    /// Whether a volume can be used here; one without topology can be used everywhere.
    pub(super) fn reaches(&self, volume: &PersistentVolume) -> bool {
        self.topology.reaches(volume)
    }

    /// How long to wait before the next attempt to be selected for a claim; begins to wait if not yet begun.
    fn rest(&self, uid: &str) -> Duration {
        let mut attempts = self.attempts();
        let attempt = attempts.entry(uid.to_owned()).or_insert_with(|| self.attempt(0));
        attempt.due.saturating_duration_since(Instant::now())
    }

    /// An attempt was in vain; how long to wait before the next.
    fn wait_again(&self, uid: &str) -> Duration {
        let mut attempts = self.attempts();
        let number = attempts.get(uid).map_or(0, |attempt| attempt.number.saturating_add(1));
        let attempt = self.attempt(number);
        attempts.insert(uid.to_owned(), attempt);
        attempt.due.saturating_duration_since(Instant::now())
    }

    /// A claim is selected for, or gone.
    pub(super) fn forget(&self, uid: &str) {
        self.attempts().remove(uid);
    }

    fn attempt(&self, number: u32) -> Attempt {
        Attempt { number, due: Instant::now() + self.options.delay(number, berth_core::random_fraction()) }
    }

    fn attempts(&self) -> MutexGuard<'_, HashMap<String, Attempt>> {
        self.attempts.lock()
    }
}

impl Provisioner {
    /// Tries to have this node selected for a claim that no node is selected for.
    pub(super) async fn try_select_own_node(
        &self,
        own_node: &OwnNode,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        identity: &Identity,
    ) -> Result<Next, Failure> {
        let uid = claim.uid().unwrap_or_default();
        let rest = own_node.rest(&uid);
        if !rest.is_zero() {
            return Ok(Next::After(rest));
        }
        // Where something here fails the node that is selected fails in the same way, and records it: were it recorded here,
        // every node would.
        match self.node_of_source(claim, own_node).await {
            Ok(Some(node)) if node != own_node.name() => {
                own_node.forget(&uid);
                return self.hand_over(claim, &node).await;
            }
            Ok(_) => {}
            Err(failure) => tracing::debug!(error = failure.sentence(), "the source's node is not known"),
        }
        match self.has_room(claim, class, identity).await {
            Ok(true) => {}
            Ok(false) => return Ok(Next::After(own_node.wait_again(&uid).max(CONFLICT_PAUSE))),
            Err(failure) => tracing::debug!(error = failure.sentence(), "whether there is room is not known"),
        }
        let selected = self.cluster.update(claim, |claim| {
            claim.annotations_mut().insert(SELECTED_NODE.to_owned(), own_node.name().to_owned());
        });
        match selected.await {
            // Comes again by the change.
            Ok(_) => own_node.forget(&uid),
            Err(error) if error.is_not_found() => own_node.forget(&uid),
            Err(error) => {
                own_node.wait_again(&uid);
                return Err(error.into());
            }
        }
        Ok(Next::Done)
    }

    /// Whether a claim's volume would fit here, as far as the driver knows.
    async fn has_room(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        identity: &Identity,
    ) -> Result<bool, Failure> {
        let source = Source::of(claim, self.options.cross_namespace_sources)?;
        let volume = VolumeRequest::new(claim, class, source.as_ref(), None, identity, &self.options)?;
        let topology = identity.has_topology().then(|| self.requirement(claim, class, false));
        let topology = match topology.transpose() {
            Ok(topology) => topology.flatten(),
            // The class is for other nodes.
            Err(_) if class.allowed_topologies.is_some() => return Ok(false),
            Err(wrong) => return Err(Failure::refused(wrong.to_string())),
        };
        if !identity.can(ControllerCapability::GetCapacity) {
            return Ok(true);
        }
        let bytes = volume.bytes();
        let segments = topology.map(|topology| topology.requisite).unwrap_or_default();
        let request = GetCapacityRequest {
            volume_capabilities: volume.call.volume_capabilities,
            parameters: volume.call.parameters,
            accessible_topology: segments.into_iter().next(),
        };
        let room = Room::from(self.driver.call(self.options.timeout, request).await?);
        Ok(room.fits(bytes))
    }
}

/// Who keeps capacity objects current, in their label.
pub(super) fn manager(node: Option<&str>) -> String {
    match node {
        None => MANAGER.to_owned(),
        Some(node) => joined(MANAGER, node),
    }
}

/// The finalizer by which a claim remembers that a volume may be coming into being for it, and on which node.
pub(super) fn claim_finalizer(driver: &str, node: Option<&str>) -> String {
    let Some(node) = node else { return creating(driver) };
    let name = format!("{driver}_{node}");
    if name.len() <= LONGEST_NAME {
        return creating(&name);
    }
    let kept: String = name.chars().take(LONGEST_NAME - 9).collect();
    creating(&format!("{kept}-{}", hash(&name)))
}

/// A base and a suffix joined as upstream joins them: if that is too long, as much of the base as fits and its hash.
fn joined(base: &str, suffix: &str) -> String {
    let name = format!("{base}-{suffix}");
    if name.len() <= LONGEST_NAME {
        return name;
    }
    match LONGEST_NAME.checked_sub(10 + suffix.len()).filter(|left| *left > 0) {
        Some(left) => format!("{}-{}-{suffix}", &base[..left.min(base.len())], hash(base)),
        None => format!("{base}-{}", hash(&name)),
    }
}

/// The 32-bit FNV-1a hash, in hexadecimal.
fn hash(text: &str) -> String {
    let hash =
        text.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests;
