//! What a pod's volumes ask of its node: the four volume plugins of kube-scheduler, as pure functions.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use berth_kube::Key;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;

use super::board::Board;
use super::unfit::{Plugin, Why};
use super::world::World;
use berth_core::names;
use berth_kube::provisionable::{Refusal, reports_capacity};
use berth_kube::selectors::{label_selector, labels, volume_on_node};
use berth_kube::storage;

pub(super) const BIND_CONFLICT: &str = "node(s) didn't find available persistent volumes to bind";
pub(super) const NODE_CONFLICT: &str = "node(s) didn't match PersistentVolume's node affinity";
pub(super) const NO_SPACE: &str = "node(s) did not have enough free storage";
pub(super) const VOLUME_MISSING: &str =
    "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)";
pub(super) const IN_USE: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode \
                                 already in-use by another pod";
pub(super) const TOO_MANY: &str = "node(s) exceed max volume count";
pub(super) const ZONE: &str = "node(s) had no available volume zone";
const UNBOUND: &str = "pod has unbound immediate PersistentVolumeClaims";

/// What was found out about a pod's volumes before any node is judged.
#[derive(Debug, Default)]
pub(super) struct PodClaims {
    all: Vec<Arc<PersistentVolumeClaim>>,
    bound: Vec<Arc<PersistentVolumeClaim>>,
    /// To be bound or provisioned for the node that is chosen.
    delayed: Vec<Arc<PersistentVolumeClaim>>,
    /// A claim for one pod only is used by another.
    exclusive_in_use: bool,
    zones: Vec<(String, BTreeSet<String>)>,
}

/// What to do about a pod's unbound claims if it goes to a certain node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PodVolumes {
    /// Claims, and the volumes to reserve for them.
    pub(super) bind: Vec<(Key, String)>,
    /// Claims to have volumes made for the node.
    pub(super) provision: Vec<Key>,
    /// How well the volumes fit, 0 to 100.
    pub(super) score: i128,
}

/// What is true whatever the node.
pub(super) fn judge_pod(world: &impl World, board: &Board, pod: &Pod) -> Result<PodClaims, Why> {
    let mut found = PodClaims::default();
    let of_pod = storage::claims_of_pod(pod);
    for claim in of_pod.iter().filter(|claim| !claim.ephemeral) {
        if world.claim(&claim.key).is_none() {
            let reason = format!("persistentvolumeclaim {:?} not found", claim.key.name);
            return Err(Why::never(Plugin::VolumeRestrictions, reason));
        }
    }
    for of in &of_pod {
        found.all.push(usable(world, pod, of)?);
    }
    let me = Key::of(pod);
    for claim in &found.all {
        let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
        let exclusive = modes.iter().any(|mode| mode == "ReadWriteOncePod");
        if exclusive && board.in_use(&Key::of(claim.as_ref()), &me) {
            found.exclusive_in_use = true;
        }
        if storage::is_bound(claim) {
            found.bound.push(claim.clone());
        } else if storage::volume_name(claim).is_empty() && is_delayed(world, claim) {
            found.delayed.push(claim.clone());
        } else {
            return Err(Why::never(Plugin::VolumeBinding, UNBOUND));
        }
    }
    found.zones = zones(world, &found.bound)?;
    Ok(found)
}

fn usable(
    world: &impl World,
    pod: &Pod,
    of: &storage::ClaimOfPod,
) -> Result<Arc<PersistentVolumeClaim>, Why> {
    let name = &of.key.name;
    let never = |reason: String| Err(Why::never(Plugin::VolumeBinding, reason));
    let Some(claim) = world.claim(&of.key) else {
        return never(format!(
            "waiting for ephemeral volume controller to create the persistentvolumeclaim {name:?}"
        ));
    };
    if claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Lost") {
        let volume = storage::volume_name(&claim);
        return never(format!(
            "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {volume:?}"
        ));
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return never(format!("persistentvolumeclaim {name:?} is being deleted"));
    }
    if of.ephemeral && !storage::owned_by(&claim, pod) {
        let key = &of.key;
        return never(format!("PVC {key} was not created for pod {} (pod is not owner)", Key::of(pod)));
    }
    Ok(claim)
}

fn is_delayed(world: &impl World, claim: &PersistentVolumeClaim) -> bool {
    let mode =
        world.class(storage::class_of_claim(claim)).and_then(|class| class.volume_binding_mode.clone());
    mode.as_deref() == Some("WaitForFirstConsumer")
}

const ZONE_LABELS: [&str; 4] = [names::BETA_ZONE, names::BETA_REGION, names::ZONE, names::REGION];

fn zones(
    world: &impl World,
    bound: &[Arc<PersistentVolumeClaim>],
) -> Result<Vec<(String, BTreeSet<String>)>, Why> {
    let mut zones = Vec::new();
    for claim in bound {
        let name = storage::volume_name(claim);
        let Some(volume) = world.volume(name) else {
            return Err(Why::never(Plugin::VolumeZone, format!("persistentvolume {name:?} not found")));
        };
        for label in ZONE_LABELS {
            if let Some(value) = volume.labels().get(label) {
                zones.push((label.to_owned(), value.split("__").map(str::to_owned).collect()));
            }
        }
    }
    Ok(zones)
}

/// Whether a node suits the pod's volumes, and what to do about them there.
pub(super) fn judge_node(
    world: &impl World,
    board: &Board,
    found: &PodClaims,
    node: &Node,
) -> Result<PodVolumes, Why> {
    if found.all.is_empty() {
        return Ok(PodVolumes::default());
    }
    if found.exclusive_in_use {
        return Err(Why::now(Plugin::VolumeRestrictions, IN_USE));
    }
    limits(world, board, &found.all, node)?;
    let volumes = binding(world, board, found, node)?;
    zone(&found.zones, node)?;
    Ok(volumes)
}

fn zone(zones: &[(String, BTreeSet<String>)], node: &Node) -> Result<(), Why> {
    let labels = labels(node.metadata.labels.as_ref());
    if !ZONE_LABELS.iter().any(|label| labels.contains_key(*label)) {
        return Ok(());
    }
    for (label, values) in zones {
        let current = match label.as_str() {
            names::BETA_ZONE => names::ZONE,
            names::BETA_REGION => names::REGION,
            label => label,
        };
        let value = labels.get(label).or_else(|| labels.get(current));
        if value.is_none_or(|value| !values.contains(value)) {
            return Err(Why::never(Plugin::VolumeZone, ZONE));
        }
    }
    Ok(())
}

fn binding(world: &impl World, board: &Board, found: &PodClaims, node: &Node) -> Result<PodVolumes, Why> {
    let mut reasons = Vec::new();
    for claim in &found.bound {
        match world.volume(storage::volume_name(claim)) {
            None => {
                reasons.push(VOLUME_MISSING);
                break;
            }
            Some(volume) if !volume_on_node(&volume, node) => {
                reasons.push(NODE_CONFLICT);
                break;
            }
            Some(_) => {}
        }
    }
    let delayed = choose(world, board, &found.delayed, node);
    match delayed {
        Ok(volumes) if reasons.is_empty() => return Ok(volumes),
        Ok(_) => {}
        Err(reason) => reasons.push(reason),
    }
    reasons.sort_by_key(|reason| {
        [NODE_CONFLICT, BIND_CONFLICT, NO_SPACE, VOLUME_MISSING].iter().position(|r| r == reason)
    });
    let reasons = reasons.into_iter().map(Into::into).collect();
    Err(Why { plugin: Plugin::VolumeBinding, reasons, resolvable: false })
}

/// Finds a volume or a promise of one for each unbound claim.
fn choose(
    world: &impl World,
    board: &Board,
    delayed: &[Arc<PersistentVolumeClaim>],
    node: &Node,
) -> Result<PodVolumes, &'static str> {
    let mut chosen = PodVolumes::default();
    let (mut to_match, mut to_provision) = (Vec::new(), Vec::new());
    for claim in delayed {
        let key = Key::of(claim.as_ref());
        let selected = claim
            .annotations()
            .get(berth_core::names::SELECTED_NODE)
            .map(String::as_str)
            .or_else(|| board.node_promised(&key));
        match selected {
            Some(selected) if selected != node.name_any() => return Err(BIND_CONFLICT),
            Some(_) => to_provision.push(claim),
            None => to_match.push(claim),
        }
    }
    to_match.sort_by_key(|claim| storage::requested(claim));
    let mut taken: HashSet<String> = HashSet::new();
    let mut fits: Fits = BTreeMap::new();
    for claim in to_match {
        match find_volume(world, board, claim, node, &taken) {
            Some(volume) => {
                taken.insert(volume.name_any());
                let fit = fits.entry(storage::class_of_volume(&volume).to_owned()).or_default();
                fit.0 += storage::requested(claim);
                fit.1 += storage::capacity(&volume);
                chosen.bind.push((Key::of(claim.as_ref()), volume.name_any()));
            }
            None => to_provision.push(claim),
        }
    }
    if !fits.is_empty() {
        // A volume that is hardly larger than asked for is the best one.
        chosen.score = mean(&fits, |asked, size| asked * 100 / size.max(1));
    }
    let mut room: Fits = BTreeMap::new();
    for claim in to_provision {
        if let Some(capacity) = provisionable(world, claim, node)? {
            let fit = room.entry(storage::class_of_claim(claim).to_owned()).or_default();
            let is_first = fit.0 == 0;
            fit.0 += storage::requested(claim);
            fit.1 = capacity;
            // Alone each was judged already, by the largest volume that there can be.
            if !is_first && capacity > 0 && fit.0 > capacity {
                return Err(NO_SPACE);
            }
        }
        chosen.provision.push(Key::of(claim.as_ref()));
    }
    if fits.is_empty() && !room.is_empty() {
        // New volumes go where most is left.
        chosen.score = mean(&room, |asked, size| 100 - (asked * 100 / size.max(1)).clamp(0, 100));
    }
    Ok(chosen)
}

/// By class: what is asked for, and what there is.
type Fits = BTreeMap<String, (i128, i128)>;

fn mean(fits: &Fits, score: impl Fn(i128, i128) -> i128) -> i128 {
    let sum: i128 = fits.values().map(|(asked, size)| score(*asked, *size).clamp(0, 100)).sum();
    sum / i128::try_from(fits.len().max(1)).unwrap_or(1)
}

/// The volume for a claim on a node: the one reserved for it, or the smallest that will do.
fn find_volume(
    world: &impl World,
    board: &Board,
    claim: &PersistentVolumeClaim,
    node: &Node,
    taken: &HashSet<String>,
) -> Option<Arc<PersistentVolume>> {
    let key = Key::of(claim);
    let mut best: Option<Arc<PersistentVolume>> = None;
    for volume in world.candidates(claim) {
        let name = volume.name_any();
        let (Some(spec), Some(asked)) = (&volume.spec, &claim.spec) else { continue };
        let ours = storage::refers_to(&volume, claim);
        let mode = |mode: Option<&String>| mode.is_none_or(|mode| mode == "Filesystem");
        let attributes = |class: Option<&String>| class.filter(|class| !class.is_empty()).cloned();
        if taken.contains(&name)
            || (spec.claim_ref.is_some() && !ours)
            || board.promised(&name).is_some_and(|promised| *promised != key)
            || storage::capacity(&volume) < storage::requested(claim)
            || mode(spec.volume_mode.as_ref()) != mode(asked.volume_mode.as_ref())
            || attributes(spec.volume_attributes_class_name.as_ref())
                != attributes(asked.volume_attributes_class_name.as_ref())
            || volume.metadata.deletion_timestamp.is_some()
        {
            continue;
        }
        let here = volume_on_node(&volume, node);
        if ours {
            return here.then_some(volume);
        }
        let available =
            volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Available");
        let selected = asked
            .selector
            .as_ref()
            .is_none_or(|selector| label_selector(selector, labels(volume.metadata.labels.as_ref())));
        let modes = spec.access_modes.as_deref().unwrap_or_default();
        let accessible = asked.access_modes.iter().flatten().all(|mode| modes.contains(mode));
        let fits = available
            && selected
            && storage::class_of_volume(&volume) == storage::class_of_claim(claim)
            && here
            && accessible;
        let order = |volume: &PersistentVolume| (storage::capacity(volume), volume.name_any());
        if fits && best.as_ref().is_none_or(|best| order(best) > order(&volume)) {
            best = Some(volume);
        }
    }
    best
}

/// Whether a volume can be made for a claim on a node; how many bytes there are, where that is known.
fn provisionable(
    world: &impl World,
    claim: &PersistentVolumeClaim,
    node: &Node,
) -> Result<Option<i128>, &'static str> {
    let class = world.class(storage::class_of_claim(claim)).ok_or(BIND_CONFLICT)?;
    let driver = world.driver(&class.provisioner);
    let reported = driver.as_deref().is_some_and(reports_capacity);
    let capacities = if reported { world.capacities(&class.name_any()) } else { Vec::new() };
    let found = berth_kube::provisionable::provisionable(
        &class,
        driver.as_deref(),
        capacities.iter().map(AsRef::as_ref),
        node,
        storage::requested(claim),
    );
    found.map_err(|refusal| match refusal {
        Refusal::NoProvisioner | Refusal::Topology => BIND_CONFLICT,
        Refusal::NoSpace => NO_SPACE,
    })
}

/// Whether a node may have as many volumes of each driver as it then would.
fn limits(
    world: &impl World,
    board: &Board,
    new: &[Arc<PersistentVolumeClaim>],
    node: &Node,
) -> Result<(), Why> {
    let name = node.name_any();
    let csi_node = world.csi_node(&name);
    let mut wanted: HashMap<String, String> =
        new.iter().filter_map(|claim| driver_and_handle(world, claim)).collect();
    for driver in wanted.values() {
        let needed =
            world.driver(driver).is_some_and(|d| d.spec.prevent_pod_scheduling_if_missing == Some(true));
        let there = csi_node.iter().any(|node| node.spec.drivers.iter().any(|d| d.name == *driver));
        if needed && !there {
            let reason = format!("{driver} CSI driver is not installed on the node");
            return Err(Why::now(Plugin::VolumeLimits, reason));
        }
    }
    let allowed: HashMap<String, i32> = csi_node
        .iter()
        .flat_map(|node| &node.spec.drivers)
        .filter_map(|driver| Some((driver.name.clone(), driver.allocatable.as_ref()?.count?)))
        .collect();
    if !wanted.values().any(|driver| allowed.contains_key(driver)) {
        return Ok(());
    }
    let mut present: HashMap<String, String> = HashMap::new();
    for pod in board.load(&name).into_iter().flat_map(|load| &load.pods).filter_map(|key| world.pod(key)) {
        let of_pod = storage::claims_of_pod(&pod);
        let claims = of_pod.iter().filter_map(|claim| world.claim(&claim.key));
        present.extend(claims.filter_map(|claim| driver_and_handle(world, &claim)));
    }
    wanted.retain(|volume, _| !present.contains_key(volume));
    for attachment in world.attachments(&name) {
        let volume =
            attachment.spec.source.persistent_volume_name.as_deref().and_then(|name| world.volume(name));
        if let Some(csi) = volume.as_ref().and_then(|volume| volume.spec.as_ref()?.csi.as_ref()) {
            let driver = &attachment.spec.attacher;
            present.insert(format!("{driver}/{}", csi.volume_handle), driver.clone());
        }
    }
    let count = |volumes: &HashMap<String, String>, driver: &String| {
        volumes.values().filter(|d| *d == driver).count()
    };
    for driver in wanted.values() {
        let total = count(&present, driver) + count(&wanted, driver);
        if allowed.get(driver).is_some_and(|allowed| total > usize::try_from(*allowed).unwrap_or(0)) {
            return Err(Why::now(Plugin::VolumeLimits, TOO_MANY));
        }
    }
    Ok(())
}

/// A claim's volume as `driver/handle` and its driver; one that is not there yet counts by its class.
fn driver_and_handle(world: &impl World, claim: &PersistentVolumeClaim) -> Option<(String, String)> {
    if let Some(volume) = world.volume(storage::volume_name(claim)) {
        let csi = volume.spec.as_ref()?.csi.as_ref()?;
        return Some((format!("{}/{}", csi.driver, csi.volume_handle), csi.driver.clone()));
    }
    let driver = world.class(storage::class_of_claim(claim))?.provisioner.clone();
    Some((format!("{driver}/to be made for {}", Key::of(claim)), driver))
}
