//! What pods want of volumes, and what is there; indexed by pod, by device and by claim.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use berth_kube::Key;
use berth_kube::storage::ephemeral_claim_name;
use k8s_openapi::api::core::v1::{Container, Pod, Volume};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tokio::time::Instant;

use super::plan::{DeviceView, Mount, View, VolumeView, Want};
use crate::plugin::{Device, Placed, Plugin, PodVolume, Ready, Source};

/// What is worked on one operation at a time: a device with all that is on it, or one volume without a device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Group {
    Device(String),
    Own(Placed),
}

#[derive(Default)]
pub(super) struct State {
    /// The pods that want volumes, by uid.
    pub(super) pods: HashMap<String, Wishes>,
    pub(super) groups: HashMap<Group, Members>,
    /// The pods that nobody wants to have volumes, but whose containers still run with them.
    held: HashSet<String>,
    /// Where each placed volume is, by the uid of its pod.
    pod_mounts: HashMap<String, HashMap<Placed, Group>>,
    /// Which volumes of which pods rest on a claim.
    claims: HashMap<Key, HashSet<(String, String)>>,
}

/// What one pod wants.
pub(super) struct Wishes {
    pub(super) pod: Arc<Pod>,
    /// By the name in the pod.
    pub(super) volumes: BTreeMap<String, Wish>,
    /// Its containers may run: it had all its volumes once, in this life of the process or in an earlier one.
    pub(super) has_begun: bool,
    /// Why the pod will never have all of them on this node.
    pub(super) refused: Option<String>,
}

#[derive(Clone)]
pub(super) struct Wish {
    pub(super) volume: Arc<Volume>,
    pub(super) block: bool,
    pub(super) claim: Option<Key>,
    /// Once it is known what the volume is.
    pub(super) found: Option<Placed>,
    /// Why that is not known yet.
    pub(super) problem: Option<String>,
}

impl Wish {
    /// Whether this was brought for the wish when its PersistentVolume was of another kind: it has been replaced by one of its
    /// name since (`berth flex migrate`), and containers that run still use what they were started with.
    fn replaces(&self, placed: &Placed) -> bool {
        let same_name = |found: &Placed| found.spec_name == placed.spec_name && found.block == placed.block;
        self.claim.is_some()
            && self.found.as_ref().is_some_and(|found| same_name(found) && found.plugin != placed.plugin)
    }
}

#[derive(Default)]
pub(super) struct Members {
    pub(super) device: Option<DeviceEntry>,
    pub(super) pod_mounts: HashMap<Placed, PodMount>,
}

pub(super) struct DeviceEntry {
    pub(super) device: Device,
    pub(super) plugin: Arc<dyn Plugin>,
    pub(super) state: Mount,
    /// Found on disk at the start.
    pub(super) reconstructed: bool,
    pub(super) in_use: bool,
    pub(super) one_pod: bool,
    /// Since when it is waited for that it is attached.
    pub(super) waiting: Option<Instant>,
}

pub(super) struct PodMount {
    pub(super) plugin: Arc<dyn Plugin>,
    /// The volume, while the pod wants it.
    pub(super) volume: Option<PodVolume>,
    /// The pod, as far as it is known, for events about it.
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) state: Mount,
    /// Found on disk at the start.
    pub(super) reconstructed: bool,
    pub(super) ready: Option<Ready>,
    pub(super) stale: bool,
    pub(super) growth: Growth,
    /// The size that the volume had when it was last brought or grown.
    pub(super) size: Option<u64>,
    pub(super) refresh_at: Option<Instant>,
    pub(super) failed: bool,
}

/// Whether what is on a volume is to be grown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    /// There is nothing to grow.
    None,
    /// It is smaller than the volume.
    Due,
    /// The driver does not grow it while it is in use: only after the next mount is it worth another try.
    Refused,
}

impl PodMount {
    fn new(plugin: Arc<dyn Plugin>) -> Self {
        Self {
            plugin,
            volume: None,
            pod: None,
            state: Mount::NotMounted,
            reconstructed: false,
            ready: None,
            stale: false,
            growth: Growth::None,
            size: None,
            refresh_at: None,
            failed: false,
        }
    }
}

/// A volume of a pod whose nature is known.
pub(super) struct Found {
    pub(super) volume: PodVolume,
    pub(super) plugin: Arc<dyn Plugin>,
    pub(super) device: Option<Device>,
}

impl State {
    /// Takes in what a pod wants; gives the volumes that are to be found.
    pub(super) fn want(&mut self, pod: &Arc<Pod>, uid: &str) -> Vec<String> {
        let mut missing = Vec::new();
        let has_begun = self.held.remove(uid);
        let wishes = self.pods.entry(uid.to_owned()).or_insert_with(|| Wishes {
            pod: pod.clone(),
            volumes: BTreeMap::new(),
            has_begun,
            refused: None,
        });
        wishes.pod = pod.clone();
        for (volume, block) in mentioned(pod) {
            if wishes.volumes.contains_key(&volume.name) {
                continue;
            }
            let claim = claim(pod, volume);
            if let Some(claim) = &claim {
                self.claims.entry(claim.clone()).or_default().insert((uid.to_owned(), volume.name.clone()));
            }
            missing.push(volume.name.clone());
            let wish = Wish { volume: Arc::new(volume.clone()), block, claim, found: None, problem: None };
            wishes.volumes.insert(volume.name.clone(), wish);
        }
        for (placed, group) in self.pod_mounts.get(uid).into_iter().flatten() {
            if let Some(pod_mount) =
                self.groups.get_mut(group).and_then(|members| members.pod_mounts.get_mut(placed))
            {
                pod_mount.pod = Some(pod.clone());
                if let Some(volume) = &mut pod_mount.volume {
                    volume.pod = pod.clone();
                }
            }
        }
        missing
    }

    /// Keeps what a pod has although it wants nothing.
    pub(super) fn hold(&mut self, uid: &str) {
        match self.pods.get_mut(uid) {
            Some(wishes) => wishes.has_begun = true,
            None => drop(self.held.insert(uid.to_owned())),
        }
    }

    /// Forgets what a pod wants, and that it is held; gives what there is to be taken away.
    pub(super) fn unwant(&mut self, uid: &str) -> Vec<Group> {
        let (held, wishes) = (self.held.remove(uid), self.pods.remove(uid));
        if !held && wishes.is_none() {
            return Vec::new();
        }
        for (name, wish) in wishes.into_iter().flat_map(|wishes| wishes.volumes) {
            let Some(claim) = wish.claim else { continue };
            if let Some(users) = self.claims.get_mut(&claim) {
                users.remove(&(uid.to_owned(), name));
                if users.is_empty() {
                    self.claims.remove(&claim);
                }
            }
        }
        let mut touched = Vec::new();
        for (placed, group) in self.pod_mounts.get(uid).into_iter().flatten() {
            if let Some(pod_mount) =
                self.groups.get_mut(group).and_then(|members| members.pod_mounts.get_mut(placed))
            {
                pod_mount.volume = None;
            }
            touched.push(group.clone());
        }
        touched
    }

    /// Takes in what a volume of a pod is; gives what is to be worked on, which is nothing if nobody wants it any more.
    pub(super) fn found(&mut self, name: &str, found: Found) -> Vec<Group> {
        let Found { volume, plugin, device } = found;
        let uid = volume.pod_uid().to_owned();
        let placed = Placed {
            plugin: plugin.name_of(&volume),
            pod_uid: uid.clone(),
            spec_name: volume.spec_name().to_owned(),
            block: volume.block,
        };
        let Some(wishes) = self.pods.get_mut(&uid) else { return Vec::new() };
        let Some(wish) = wishes.volumes.get_mut(name) else { return Vec::new() };
        wish.found = Some(placed.clone());
        wish.problem = None;
        let complete = wishes.volumes.values().all(|wish| wish.found.is_some());
        let group = device
            .as_ref()
            .map_or_else(|| Group::Own(placed.clone()), |device| Group::Device(device.unique_name.clone()));
        let known = self.locate(&placed, &group);
        let members = self.groups.entry(group.clone()).or_default();
        if let Some(device) = device {
            let one_pod = is_for_one_pod(&volume);
            match &mut members.device {
                Some(entry) => {
                    entry.one_pod = one_pod;
                    entry.device = device;
                }
                None => members.device = Some(DeviceEntry::new(device, plugin.clone(), one_pod)),
            }
        }
        // A pod that joins others cannot have it grown either.
        let refused = members.pod_mounts.values().any(|pod_mount| pod_mount.growth == Growth::Refused);
        let known = known.unwrap_or_else(|| PodMount::new(plugin));
        let pod_mount = members.pod_mounts.entry(placed.clone()).or_insert(known);
        pod_mount.growth = match must_grow(&volume, pod_mount.size) {
            true if refused => Growth::Refused,
            true => Growth::Due,
            false if pod_mount.growth == Growth::Refused => Growth::Refused,
            false => Growth::None,
        };
        pod_mount.pod = Some(volume.pod.clone());
        pod_mount.volume = Some(volume);
        let all = self.pod_mounts.entry(uid).or_default();
        all.insert(placed, group.clone());
        // Only now is it known what of an earlier life the pod does not want.
        if complete { all.values().cloned().collect() } else { vec![group] }
    }

    /// Notes that a placed volume belongs to `group`; gives what is known of it from where it was thought to be.
    fn locate(&mut self, placed: &Placed, group: &Group) -> Option<PodMount> {
        let known = self.pod_mounts.get(&placed.pod_uid)?.get(placed)?;
        if known == group {
            return None;
        }
        let known = known.clone();
        let members = self.groups.get_mut(&known)?;
        let pod_mount = members.pod_mounts.remove(placed);
        if members.pod_mounts.is_empty() && members.device.is_none() {
            self.groups.remove(&known);
        }
        pod_mount
    }

    /// Takes in a volume that an earlier life of this process may have brought.
    pub(super) fn reconstruct(&mut self, placed: Placed, plugin: &Arc<dyn Plugin>, device: Option<Device>) {
        let group = device
            .as_ref()
            .map_or_else(|| Group::Own(placed.clone()), |device| Group::Device(device.unique_name.clone()));
        if let Some(device) = device {
            self.reconstruct_device(device, plugin);
        }
        let pod_mount =
            PodMount { state: Mount::Uncertain, reconstructed: true, ..PodMount::new(plugin.clone()) };
        self.pod_mounts.entry(placed.pod_uid.clone()).or_default().insert(placed.clone(), group.clone());
        self.groups.entry(group).or_default().pod_mounts.insert(placed, pod_mount);
    }

    /// Takes in a device that an earlier life of this process may have prepared; it then also reported it.
    pub(super) fn reconstruct_device(&mut self, device: Device, plugin: &Arc<dyn Plugin>) {
        let members = self.groups.entry(Group::Device(device.unique_name.clone())).or_default();
        if members.device.is_none() {
            let state = if device.stage { Mount::Uncertain } else { Mount::NotMounted };
            let in_use = device.attach;
            let entry = DeviceEntry::new(device, plugin.clone(), false);
            members.device = Some(DeviceEntry { state, reconstructed: true, in_use, ..entry });
        }
    }

    /// What planning needs to know of a group, with what is due for a refresh by `now`.
    pub(super) fn view(&mut self, group: &Group, attached: bool, now: Instant) -> Option<View> {
        let members = self.groups.get_mut(group)?;
        for pod_mount in members.pod_mounts.values_mut() {
            if pod_mount.refresh_at.is_some_and(|due| due <= now) {
                pod_mount.refresh_at = None;
                pod_mount.stale = true;
            }
        }
        let members = &self.groups[group];
        let device = members.device.as_ref().map(|entry| DeviceView {
            attach: entry.device.attach,
            stage: entry.device.stage,
            state: entry.state,
            in_use: entry.in_use,
            attached,
            one_pod: entry.one_pod,
        });
        let mut volumes: Vec<VolumeView> = members
            .pod_mounts
            .iter()
            .map(|(placed, pod_mount)| VolumeView {
                placed: placed.clone(),
                want: self.wanted(placed, pod_mount),
                state: pod_mount.state,
                stale: pod_mount.stale,
                grow: pod_mount.growth == Growth::Due,
            })
            .collect();
        volumes.sort_unstable_by(|a, b| a.placed.pod_uid.cmp(&b.placed.pod_uid));
        Some(View { device, volumes })
    }

    fn wanted(&self, placed: &Placed, pod_mount: &PodMount) -> Want {
        if pod_mount.volume.is_some() {
            return Want::Yes;
        }
        if self.held.contains(&placed.pod_uid) {
            return Want::Unknown;
        }
        match self.pods.get(&placed.pod_uid) {
            Some(wishes) if wishes.volumes.values().any(|wish| wish.found.is_none()) => Want::Unknown,
            Some(wishes) if wishes.volumes.values().any(|wish| wish.replaces(placed)) => Want::Unknown,
            _ => Want::No,
        }
    }

    /// Forgets what is neither wanted nor there; gives the pods that may have lost their last volume by that.
    pub(super) fn tidy(&mut self, group: &Group) -> Vec<String> {
        let Some(members) = self.groups.get(group) else { return Vec::new() };
        let gone: Vec<Placed> = members
            .pod_mounts
            .iter()
            .filter(|(placed, pod_mount)| {
                pod_mount.state == Mount::NotMounted && self.wanted(placed, pod_mount) == Want::No
            })
            .map(|(placed, _)| placed.clone())
            .collect();
        let Some(members) = self.groups.get_mut(group) else { return Vec::new() };
        for placed in &gone {
            members.pod_mounts.remove(placed);
            if let Some(pod_mounts) = self.pod_mounts.get_mut(&placed.pod_uid) {
                pod_mounts.remove(placed);
                if pod_mounts.is_empty() {
                    self.pod_mounts.remove(&placed.pod_uid);
                }
            }
        }
        let unused = |entry: &DeviceEntry| entry.state == Mount::NotMounted && !entry.in_use;
        if members.pod_mounts.is_empty() && members.device.as_ref().is_none_or(unused) {
            self.groups.remove(group);
        }
        gone.into_iter().map(|placed| placed.pod_uid).collect()
    }

    /// When the next refresh of a group is due.
    pub(super) fn next_refresh(&self, group: &Group) -> Option<Instant> {
        self.groups.get(group)?.pod_mounts.values().filter_map(|pod_mount| pod_mount.refresh_at).min()
    }

    /// Remembers of a pod that has all its volumes that its containers are started with them.
    pub(super) fn note_begun(&mut self, uid: &str) {
        if self.ready(uid).is_some()
            && let Some(wishes) = self.pods.get_mut(uid)
        {
            wishes.has_begun = true;
        }
    }

    /// The volumes of a pod, by their names in the pod, if it has all that it wants.
    pub(super) fn ready(&self, uid: &str) -> Option<HashMap<String, Ready>> {
        let wishes = self.pods.get(uid)?;
        let ready = |(name, wish): (&String, &Wish)| {
            let pod_mount = self.pod_mount(wish.found.as_ref()?)?;
            (pod_mount.state == Mount::Mounted).then(|| Some((name.clone(), pod_mount.ready.clone()?)))?
        };
        wishes.volumes.iter().map(ready).collect()
    }

    /// The names of the volumes that a pod has, or may have: each once, in an order that is the same for all pods.
    pub(super) fn placed_of(&self, uid: &str) -> BTreeSet<String> {
        self.pod_mounts.get(uid).into_iter().flatten().map(|(placed, _)| placed.spec_name.clone()).collect()
    }

    /// Whether a pod neither has nor may have any volume.
    pub(super) fn is_gone(&self, uid: &str) -> bool {
        !self.pods.contains_key(uid) && !self.held.contains(uid) && !self.pod_mounts.contains_key(uid)
    }

    /// Marks the content that a pod's own words describe as changed; gives what is to be worked on.
    pub(super) fn make_stale(&mut self, uid: &str) -> Vec<Group> {
        let mut touched = Vec::new();
        for (placed, group) in self.pod_mounts.get(uid).into_iter().flatten() {
            let pod_mount = self.groups.get_mut(group).and_then(|members| members.pod_mounts.get_mut(placed));
            let Some(pod_mount) = pod_mount else { continue };
            // A driver says itself when it wants to be called again.
            let described = pod_mount.volume.as_ref().is_some_and(
                |volume| matches!(&volume.source, Source::Inline(volume) if volume.csi.is_none() && volume.flex_volume.is_none()),
            );
            if described {
                pod_mount.stale = true;
                touched.push(group.clone());
            }
        }
        touched
    }

    /// The volumes that rest on a claim: pod, name, and whether it is known what the volume is.
    pub(super) fn users(&self, claim: &Key) -> Vec<(String, String, bool)> {
        let known = |uid: &str, name: &str| {
            self.pods
                .get(uid)
                .and_then(|wishes| wishes.volumes.get(name))
                .is_some_and(|wish| wish.found.is_some())
        };
        let users = self.claims.get(claim).into_iter().flatten();
        users.map(|(uid, name)| (uid.clone(), name.clone(), known(uid, name))).collect()
    }

    /// All that has failed last time: volumes to be found, and groups.
    pub(super) fn failed(&self) -> (Vec<(String, String)>, Vec<Group>) {
        let volumes = self.pods.iter().flat_map(|(uid, wishes)| {
            let failed = wishes.volumes.iter().filter(|(_, wish)| wish.problem.is_some());
            failed.map(|(name, _)| (uid.clone(), name.clone()))
        });
        let groups = self.groups.iter().filter(|(_, members)| {
            members.pod_mounts.values().any(|pod_mount| pod_mount.failed)
                || members.device.as_ref().is_some_and(|device| device.state == Mount::Uncertain)
        });
        (volumes.collect(), groups.map(|(group, _)| group.clone()).collect())
    }

    pub(super) fn pod_mount(&self, placed: &Placed) -> Option<&PodMount> {
        let group = self.pod_mounts.get(&placed.pod_uid)?.get(placed)?;
        self.groups.get(group)?.pod_mounts.get(placed)
    }

    pub(super) fn pod_mount_mut(&mut self, placed: &Placed) -> Option<&mut PodMount> {
        let group = self.pod_mounts.get(&placed.pod_uid)?.get(placed)?;
        self.groups.get_mut(group)?.pod_mounts.get_mut(placed)
    }

    pub(super) fn device_mut(&mut self, group: &Group) -> Option<&mut DeviceEntry> {
        self.groups.get_mut(group)?.device.as_mut()
    }
}

impl DeviceEntry {
    fn new(device: Device, plugin: Arc<dyn Plugin>, one_pod: bool) -> Self {
        Self {
            device,
            plugin,
            state: Mount::NotMounted,
            reconstructed: false,
            in_use: false,
            one_pod,
            waiting: None,
        }
    }
}

/// The volumes that the pod's containers use, and whether as block devices.
fn mentioned(pod: &Pod) -> Vec<(&Volume, bool)> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let containers = || spec.init_containers.iter().flatten().chain(&spec.containers);
    let mounts = |container: &Container, name: &str| {
        container.volume_mounts.iter().flatten().any(|mount| mount.name == name)
    };
    let devices = |container: &Container, name: &str| {
        container.volume_devices.iter().flatten().any(|device| device.name == name)
    };
    let debug = |name: &str| {
        let containers = spec.ephemeral_containers.iter().flatten();
        containers
            .flat_map(|container| container.volume_mounts.iter().flatten())
            .any(|mount| mount.name == name)
    };
    let volumes = spec.volumes.iter().flatten();
    volumes
        .filter_map(|volume| {
            let block = containers().any(|container| devices(container, &volume.name));
            let mounted =
                debug(&volume.name) || containers().any(|container| mounts(container, &volume.name));
            (block || mounted).then_some((volume, block))
        })
        .collect()
}

/// The claim that a volume of a pod rests on.
fn claim(pod: &Pod, volume: &Volume) -> Option<Key> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(Key::new(namespace, &claim.claim_name));
    }
    volume.ephemeral.as_ref().map(|_| Key::new(namespace, ephemeral_claim_name(pod, volume)))
}

/// Whether only one pod may have the volume at a time.
fn is_for_one_pod(volume: &PodVolume) -> bool {
    match &volume.source {
        Source::Inline(_) => false,
        Source::Persistent { volume, .. } => {
            let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_ref());
            modes.into_iter().flatten().any(|mode| mode == "ReadWriteOncePod")
        }
    }
}

/// The size of a claim's volume in bytes.
pub(super) fn size(volume: &PodVolume) -> Option<u64> {
    let Source::Persistent { volume, .. } = &volume.source else { return None };
    bytes(volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?)
}

/// Whether what is on a volume must be grown to the volume's size; `brought` is the size that it had when this node
/// last brought or grew it.
fn must_grow(volume: &PodVolume, brought: Option<u64>) -> bool {
    let Source::Persistent { claim, .. } = &volume.source else { return false };
    let (Some(size), Some(status)) = (size(volume), &claim.status) else { return false };
    let resize = status.allocated_resource_statuses.as_ref().and_then(|all| all.get("storage"));
    match resize.map(String::as_str) {
        Some("NodeResizePending" | "NodeResizeInProgress") => true,
        Some(_) => false,
        None => {
            let known = status.capacity.as_ref().and_then(|capacity| bytes(capacity.get("storage")?));
            // Where several nodes have the volume, the first to grow it makes the claim say so for all.
            let shared = claim
                .spec
                .as_ref()
                .and_then(|spec| spec.access_modes.as_ref())
                .is_some_and(|modes| modes.iter().any(|mode| mode == "ReadWriteMany"));
            known.is_some_and(|known| known < size) || shared && brought.is_some_and(|brought| brought < size)
        }
    }
}

fn bytes(quantity: &Quantity) -> Option<u64> {
    quantity.0.parse::<berth_core::Quantity>().ok()?.bytes().and_then(|bytes| u64::try_from(bytes).ok())
}
