//! The volume manager: makes what pods want of volumes and what is mounted the same.
//!
//! Pods say what they want ([`Volumes::want`]) and are queued when that changed. A volume is first found (a claim is
//! followed to its PersistentVolume by live requests, the plugin names the device), then worked on in its group: a device
//! with everything on it, or one volume without a device. A group has one worker at a time, which plans (a pure
//! function), does what the plan says, and plans again until nothing is left to do; groups do not wait for each other.
//! Failures come again after 500 ms, doubling to about two minutes, and at once when what they wait for changes. What may
//! have happened is kept as uncertain until it was undone, even when the pod is long gone; after a restart everything
//! that stands on disk is.
//!
//! Reads: Pod, PersistentVolumeClaim, PersistentVolume, Node. Writes: the claim's status when its filesystem has grown; the
//! node's `volumesInUse`, through [`Attachments`]. Events: `FailedMount`, `FailedMapVolume`, `FailedUnmount`,
//! `FileSystemResizeSuccessful`, `VolumeResizeFailed`.

mod disk;
mod growth;
mod plan;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use berth_core::names::CLAIM_PROTECTION;
use berth_kube::selectors::volume_on_node;
use berth_kube::storage::{owned_by, volume_name};
use berth_kube::{Backoff, Cluster, Failure, Key, Next, Queue, Recorder};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::Instant;

pub(crate) use self::disk::names;
pub(crate) use self::disk::remove_pod;
use self::plan::{Action, Mount};
use self::state::{DeviceEntry, Found, Group, Growth, PodMount, State, Wish};
use crate::ids;
use crate::layout::Layout;
use crate::plugin::{Certainty, Failed, Placed, Plugin, PodVolume, Ready, Source};
use crate::plugins::unsupported;

/// What the volume manager needs of the Node object.
#[async_trait]
pub(crate) trait Attachments: Send + Sync {
    /// Returns once Kubernetes knows that the node uses a device.
    async fn in_use(&self, unique_name: &str) -> Result<(), Failed>;

    /// The node no longer uses a device.
    fn not_in_use(&self, unique_name: &str);

    /// Whether a device is attached to the node; [`Volumes::attachment_changed`] is called when that changes.
    fn is_attached(&self, unique_name: &str) -> bool;
}

/// What a volume manager is made of.
pub(crate) struct Options {
    /// Where claims and volumes are.
    pub cluster: Cluster,
    /// Where things lie on disk.
    pub layout: Layout,
    /// The kinds of volumes; the first that serves a volume gets it.
    pub plugins: Vec<Arc<dyn Plugin>>,
    /// Where the devices in use are reported and attachments observed: the Node object.
    pub node: Arc<dyn Attachments>,
    /// Records events on pods and claims.
    pub recorder: Recorder,
    /// How long a device may take to be attached before that is a problem of the pods that want it.
    pub attach_timeout: Duration,
    /// Called with a pod's uid when its volumes have become ready, or are gone.
    pub changed: Box<dyn Fn(&str) + Send + Sync>,
}

/// The volume manager of a node.
pub(crate) struct Volumes {
    options: Options,
    state: Mutex<State>,
    queue: Queue<Work>,
    /// By the volume's name: written to while it is grown, read while containers are started with it.
    steady: Mutex<HashMap<String, Weak<RwLock<()>>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Work {
    /// Find out what a volume of a pod is.
    Find { pod: String, name: String },
    /// Make a group as it should be.
    Settle(Group),
}

/// Failures are recorded where they happen; the queue only has to try again.
#[derive(Debug)]
struct Never;

impl std::fmt::Display for Never {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("never")
    }
}

impl Failure for Never {}

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(122) };

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// It did what it should.
    Done,
    /// It goes on when something else has changed; if nothing does, it is reconciled again after this time.
    Wait(Duration),
    /// It failed, and the event is recorded.
    Failed,
}

/// As long as a kubelet lets a pod wait for its volumes before it complains.
pub(crate) const WAITING_EVENT_DELAY: Duration = Duration::from_secs(123);

const IN_USE: &str = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

impl Volumes {
    /// A volume manager that knows what stands on disk, all of it uncertain. Nothing is done before [`Volumes::run`].
    pub(crate) fn new(options: Options) -> Arc<Self> {
        let mut state = State::default();
        disk::reconstruct(&options.layout, &options.plugins, &mut state);
        let volumes = Arc::new(Self {
            options,
            state: Mutex::new(state),
            queue: Queue::new("volumes", BACKOFF),
            steady: Mutex::default(),
        });
        volumes.follow_claims();
        volumes
    }

    /// Works until the cluster's shutdown; to be called once all pods that are there have said what they want, as what
    /// nobody wants is taken away.
    pub(crate) async fn run(self: Arc<Self>) {
        let groups: Vec<Group> = self.state().groups.keys().cloned().collect();
        for group in groups {
            self.queue.add(Work::Settle(group));
        }
        let volumes = self.clone();
        let shutdown = self.options.cluster.shutdown().clone();
        self.queue
            .run(usize::MAX, shutdown, move |work| {
                let volumes = volumes.clone();
                async move {
                    Ok::<_, Never>(match work {
                        Work::Find { pod, name } => volumes.find(&pod, &name).await,
                        Work::Settle(group) => volumes.settle(&group).await,
                    })
                }
            })
            .await;
    }

    /// A pod is to have its volumes; to be called again when the pod changes.
    pub(crate) fn want(&self, pod: &Arc<Pod>) {
        let uid = pod.uid().unwrap_or_default();
        let missing = self.state().want(pod, &uid);
        for name in missing {
            self.queue.add(Work::Find { pod: uid.clone(), name });
        }
    }

    /// A pod that is not to have volumes keeps those it has until [`Volumes::unwant`]: its containers still run.
    pub(crate) fn hold(&self, pod_uid: &str) {
        self.state().hold(pod_uid);
    }

    /// A pod no longer needs its volumes.
    pub(crate) fn unwant(&self, pod_uid: &str) {
        let groups = self.state().unwant(pod_uid);
        self.settle_all(groups);
    }

    /// Where a pod finds its volumes, by their names in the pod; `None` until it has all of them.
    pub(crate) fn ready(&self, pod_uid: &str) -> Option<HashMap<String, Ready>> {
        self.state().ready(pod_uid)
    }

    /// Why a pod will never have all of its volumes on this node, once that is known.
    pub(crate) fn refused(&self, pod_uid: &str) -> Option<String> {
        self.state().pods.get(pod_uid)?.refused.clone()
    }

    /// Keeps a pod's volumes from being grown until the guards are dropped: where the kernel grows a filesystem only
    /// unmounted, its mounts are gone for a moment, and a container that starts then would find an empty directory.
    pub(crate) async fn steady(&self, pod_uid: &str) -> Vec<OwnedRwLockReadGuard<()>> {
        // In one order: of two pods, each would else wait for what the other has, and growth before it.
        let names = self.state().placed_of(pod_uid);
        let mut guards = Vec::with_capacity(names.len());
        for name in names {
            guards.push(self.steadiness(&name).read_owned().await);
        }
        guards
    }

    fn steadiness(&self, name: &str) -> Arc<RwLock<()>> {
        let mut locks = self.steady.lock();
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = locks.get(name).and_then(Weak::upgrade).unwrap_or_default();
        locks.insert(name.to_owned(), Arc::downgrade(&lock));
        lock
    }

    /// Whether a pod neither wants nor has any volume.
    pub(crate) fn is_gone(&self, pod_uid: &str) -> bool {
        self.state().is_gone(pod_uid)
    }

    /// What a pod's ConfigMap, Secret and similar volumes are made of changed.
    pub(crate) fn refresh(&self, pod_uid: &str) {
        let groups = self.state().make_stale(pod_uid);
        self.settle_all(groups);
    }

    /// The unique names of the devices that are, or may be, in use.
    pub(crate) fn devices(&self) -> Vec<String> {
        let state = self.state();
        let devices = state.groups.values().filter_map(|members| members.device.as_ref());
        devices.filter(|entry| entry.in_use).map(|entry| entry.device.unique_name.clone()).collect()
    }

    /// How many volumes there are of each plugin: those that pods want, and those that are mounted.
    pub(crate) fn counts(&self) -> [BTreeMap<String, u32>; 2] {
        let state = self.state();
        let wishes = state.pods.values().flat_map(|wishes| wishes.volumes.values());
        let wanted = wishes.filter_map(|wish| wish.found.as_ref());
        let mounted = state.groups.values().flat_map(|members| members.pod_mounts.keys());
        let count = |all: &mut dyn Iterator<Item = &Placed>| {
            let mut counts = BTreeMap::new();
            for placed in all {
                *counts.entry(placed.plugin.clone()).or_default() += 1;
            }
            counts
        };
        [count(&mut { wanted }), count(&mut { mounted })]
    }

    /// A device was attached or detached.
    pub(crate) fn attachment_changed(&self, unique_name: &str) {
        let group = Group::Device(unique_name.to_owned());
        let known = self.state().groups.contains_key(&group);
        if known {
            self.queue.add(Work::Settle(group));
        }
    }

    /// Tries at once what failed: a driver has come.
    pub(crate) fn retry(&self) {
        let (volumes, groups) = self.state().failed();
        for (pod, name) in volumes {
            self.queue.add(Work::Find { pod, name });
        }
        self.settle_all(groups);
    }

    fn settle_all(&self, groups: Vec<Group>) {
        for group in groups {
            self.queue.add(Work::Settle(group));
        }
    }

    fn follow_claims(self: &Arc<Self>) {
        let volumes = Arc::downgrade(self);
        self.options.cluster.cache::<PersistentVolumeClaim>().on_change(move |claim| {
            let Some(volumes) = volumes.upgrade() else { return };
            let grows = claim.status.as_ref().is_some_and(|status| {
                status.allocated_resource_statuses.is_some()
                    || status.conditions.as_ref().is_some_and(|c| !c.is_empty())
            });
            volumes.claim_changed(&Key::of(claim.as_ref()), grows);
        });
        let volumes = Arc::downgrade(self);
        self.options.cluster.cache::<PersistentVolume>().on_change(move |volume| {
            let Some(volumes) = volumes.upgrade() else { return };
            let Some(claim) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else { return };
            if let (Some(namespace), Some(name)) = (&claim.namespace, &claim.name) {
                volumes.claim_changed(&Key::new(namespace, name), false);
            }
        });
    }

    fn claim_changed(&self, claim: &Key, grows: bool) {
        let users = self.state().users(claim);
        for (pod, name, known) in users {
            if grows || !known {
                self.queue.add(Work::Find { pod, name });
            }
        }
    }

    async fn find(&self, uid: &str, name: &str) -> Next {
        let wish = self
            .state()
            .pods
            .get(uid)
            .and_then(|wishes| Some((wishes.pod.clone(), wishes.volumes.get(name)?.clone())));
        let Some((pod, wish)) = wish else { return Next::Done };
        let volume = match resolve(&self.options.cluster, &pod, &wish).await {
            Ok(volume) => volume,
            Err(problem) => return self.unfound(uid, name, &problem),
        };
        let Some(plugin) = self.options.plugins.iter().find(|plugin| plugin.serves(&volume.source)) else {
            return self.unfound(uid, name, &unsupported(&volume));
        };
        match plugin.device(&volume) {
            Ok(device) => {
                let groups = self.state().found(name, Found { volume, plugin: plugin.clone(), device });
                self.settle_all(groups);
                Next::Done
            }
            Err(failed) => self.unfound(uid, name, &failed.message),
        }
    }

    fn unfound(&self, uid: &str, name: &str, problem: &str) -> Next {
        let (pod, before) = {
            let mut state = self.state();
            let Some(wishes) = state.pods.get_mut(uid) else { return Next::Done };
            let Some(wish) = wishes.volumes.get_mut(name) else { return Next::Done };
            let before = wish.problem.replace(problem.to_owned());
            (wishes.pod.clone(), before)
        };
        // A pod may be here before the last write to its claim is; what is still so at the second attempt is a problem.
        if before.as_deref() != Some(problem) {
            return Next::Retry;
        }
        let message = format!(
            "Unable to attach or mount volumes: unmounted volumes=[{name}], unattached volumes=[], \
             failed to process volumes=[{name}]: {problem}"
        );
        self.options.recorder.warning(pod.as_ref(), "FailedMount", message);
        Next::Retry
    }

    async fn settle(&self, group: &Group) -> Next {
        // What failed or has to wait is not tried twice in a row, and does not hold up the rest of the group.
        let mut unable: Vec<Action> = Vec::new();
        let (mut failed, mut wait) = (false, None);
        loop {
            let attached = match group {
                Group::Device(name) => self.options.node.is_attached(name),
                Group::Own(_) => true,
            };
            let Some(view) = self.state().view(group, attached, Instant::now()) else { return Next::Done };
            let mut progress = false;
            for action in plan::plan(&view) {
                if unable.contains(&action) {
                    continue;
                }
                let outcome = match &action {
                    Action::TearDown(placed) => self.tear_down(placed).await,
                    Action::ReportInUse => self.report_in_use(group).await,
                    Action::AwaitAttachment => self.await_attachment(group).await,
                    Action::Stage(placed) => self.stage(group, placed).await,
                    Action::SetUp(placed) => self.set_up(placed).await,
                    Action::Refuse(placed) => {
                        self.problem(placed, "SetUp", "SetUpDevice", IN_USE);
                        Outcome::Wait(WAITING_EVENT_DELAY)
                    }
                    Action::Expand(placed) => self.expand(placed).await,
                    Action::Unstage => self.unstage(group).await,
                    Action::ReportNotInUse => self.report_not_in_use(group),
                };
                match outcome {
                    Outcome::Done => {
                        progress = true;
                        // A pod does not wait for what is left to do about the device.
                        if matches!(action, Action::TearDown(_)) {
                            self.tidy(group);
                        }
                        continue;
                    }
                    Outcome::Wait(at_most) => wait = Some(at_most),
                    Outcome::Failed => failed = true,
                }
                unable.push(action);
            }
            if !progress {
                break;
            }
        }
        self.tidy(group);
        if failed {
            return Next::Retry;
        }
        let refresh = self.state().next_refresh(group).map(|due| due - Instant::now());
        wait.into_iter().chain(refresh).min().map_or(Next::Done, Next::After)
    }

    /// Forgets what is gone, and queues the pods that have lost their last volume by that.
    fn tidy(&self, group: &Group) {
        let gone = self.state().tidy(group);
        for uid in gone {
            if self.is_gone(&uid) {
                (self.options.changed)(&uid);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// What a volume of a pod is, or why that cannot be said yet.
async fn resolve(cluster: &Cluster, pod: &Arc<Pod>, wish: &Wish) -> Result<PodVolume, String> {
    let name = wish.volume.name.clone();
    let Some(key) = &wish.claim else {
        let csi = wish.volume.csi.as_ref().and_then(|csi| csi.read_only);
        let flex = wish.volume.flex_volume.as_ref().and_then(|flex| flex.read_only);
        let nfs = wish.volume.nfs.as_ref().and_then(|nfs| nfs.read_only);
        let read_only = csi.or(flex).or(nfs).unwrap_or(false);
        let source = Source::Inline(wish.volume.clone());
        return Ok(PodVolume::new(pod.clone(), name, source, wish.block, read_only));
    };
    let (volume, claim) = bound(cluster, pod, wish, key)
        .await
        .map_err(|problem| format!("error processing PVC {key}: {problem}"))?;
    let mode = volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("Filesystem");
    if wish.block != (mode == "Block") {
        let field = if wish.block { "volumeDevices" } else { "volumeMounts" };
        return Err(format!("volume {name} has volumeMode {mode}, but is specified in {field}"));
    }
    let read_only =
        wish.volume.persistent_volume_claim.as_ref().and_then(|claim| claim.read_only).unwrap_or(false);
    let source = Source::Persistent { volume, claim };
    Ok(PodVolume::new(pod.clone(), name, source, wish.block, read_only))
}

async fn bound(
    cluster: &Cluster,
    pod: &Pod,
    wish: &Wish,
    key: &Key,
) -> Result<(Arc<PersistentVolume>, Arc<PersistentVolumeClaim>), String> {
    let claim = cluster
        .fetch::<PersistentVolumeClaim>(key)
        .await
        .map_err(|error| format!("failed to fetch PVC from API server: {}", error.chain()))?
        .ok_or_else(|| {
            format!("failed to fetch PVC from API server: persistentvolumeclaims {:?} not found", key.name)
        })?;
    let name = check_claim(pod, wish, &claim)?;
    let volume = cluster
        .fetch::<PersistentVolume>(&Key::cluster(name))
        .await
        .map_err(|error| format!("failed to fetch PV {name} from API server: {}", error.chain()))?
        .ok_or_else(|| {
            format!("failed to fetch PV {name} from API server: persistentvolumes {name:?} not found")
        })?;
    check_volume(&volume, &claim)?;
    Ok((volume, claim))
}

/// The name of the volume that a claim is bound to, if the pod may use it.
fn check_claim<'a>(pod: &Pod, wish: &Wish, claim: &'a PersistentVolumeClaim) -> Result<&'a str, String> {
    let meta = &claim.metadata;
    if wish.volume.ephemeral.is_some() && !owned_by(claim, pod) {
        let (claim, pod) = (Key::of(claim), Key::of(pod));
        return Err(format!("PVC {claim} was not created for pod {pod} (pod is not owner)"));
    }
    if meta.deletion_timestamp.is_some()
        && !meta.finalizers.iter().flatten().any(|finalizer| finalizer == CLAIM_PROTECTION)
    {
        return Err("PVC is being deleted".to_owned());
    }
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return Err("PVC is not bound".to_owned());
    }
    let name = volume_name(claim);
    if name.is_empty() { Err("PVC has empty pvc.Spec.VolumeName".to_owned()) } else { Ok(name) }
}

fn check_volume(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let Some(reference) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    if reference.uid == claim.metadata.uid {
        return Ok(());
    }
    let (there, wanted) = (reference.uid.as_deref(), claim.metadata.uid.as_deref());
    let (there, wanted) = (there.unwrap_or_default(), wanted.unwrap_or_default());
    Err(format!(
        "found PV object {name} but its pv.Spec.ClaimRef.UID {there} does not point to claim.UID {wanted}"
    ))
}

/// One operation on a device or on a pod's volume, what it does to what is known, and the event when it fails.
impl Volumes {
    async fn set_up(&self, placed: &Placed) -> Outcome {
        if let Some(refused) = self.refuse_other_node(placed).await {
            return refused;
        }
        let Some((plugin, volume, before)) = self.begin(placed) else { return Outcome::Done };
        // A volume may have to belong to a user or a group of the pod.
        let result = match ids::check_pod(&volume.pod) {
            Ok(()) => plugin.set_up(&volume).await,
            Err(why) => Err(Failed::unchanged(why)),
        };
        let failed = {
            let mut state = self.state();
            let Some(pod_mount) = state.pod_mount_mut(placed) else { return Outcome::Done };
            match result {
                Ok(ready) => {
                    pod_mount.state = Mount::Mounted;
                    pod_mount.reconstructed = false;
                    pod_mount.ready = Some(ready);
                    pod_mount.failed = false;
                    pod_mount.size = pod_mount.size.or_else(|| state::size(&volume));
                    pod_mount.refresh_at = plugin.refresh_after(&volume).map(|after| Instant::now() + after);
                    state.note_begun(&placed.pod_uid);
                    None
                }
                Err(failed) => {
                    pod_mount.state = before.after_failure(failed.certainty, pod_mount.reconstructed);
                    pod_mount.stale = before == Mount::Mounted;
                    Some(failed)
                }
            }
        };
        match failed {
            None => {
                if before != Mount::Mounted {
                    tracing::info!(pod = %placed.pod_uid, volume = %placed.spec_name, "mounted");
                    (self.options.changed)(&placed.pod_uid);
                }
                Outcome::Done
            }
            Some(failed) => {
                self.problem(placed, "SetUp", "MapPodDevice", &failed.message);
                Outcome::Failed
            }
        }
    }

    /// Refuses to bring a volume to a node that its PersistentVolume may not be used on; one that is there stays.
    async fn refuse_other_node(&self, placed: &Placed) -> Option<Outcome> {
        let (volume, pod) = {
            let state = self.state();
            let pod_mount = state.pod_mount(placed).filter(|known| known.state != Mount::Mounted)?;
            let PodVolume { source: Source::Persistent { volume, .. }, pod, .. } =
                pod_mount.volume.as_ref()?
            else {
                return None;
            };
            volume.spec.as_ref()?.node_affinity.as_ref()?;
            (volume.clone(), pod.clone())
        };
        let name = pod.spec.as_ref()?.node_name.clone()?;
        // Labels by which a driver says where the node is may be newer than the cache.
        let cached = self.options.cluster.cache::<Node>().named(&name);
        if cached.is_some_and(|node| volume_on_node(&volume, &node)) {
            return None;
        }
        let cause = match self.options.cluster.fetch::<Node>(&Key::cluster(&name)).await {
            Ok(Some(node)) if volume_on_node(&volume, &node) => return None,
            Ok(Some(_)) => "no matching NodeSelectorTerms".to_owned(),
            Ok(None) => format!("nodes {name:?} not found"),
            Err(error) => error.chain(),
        };
        self.problem(placed, "NodeAffinity check", "NodeAffinity check", &cause);
        Some(Outcome::Failed)
    }

    /// From here on the volume may be there, whatever becomes of the call.
    fn begin(&self, placed: &Placed) -> Option<(Arc<dyn Plugin>, PodVolume, Mount)> {
        let mut state = self.state();
        let pod_mount = state.pod_mount_mut(placed)?;
        let volume = pod_mount.volume.clone()?;
        let before = pod_mount.state;
        if before == Mount::NotMounted {
            pod_mount.state = Mount::Uncertain;
        }
        pod_mount.stale = false;
        Some((pod_mount.plugin.clone(), volume, before))
    }

    async fn tear_down(&self, placed: &Placed) -> Outcome {
        let plugin = {
            let mut state = self.state();
            let Some(pod_mount) = state.pod_mount_mut(placed) else { return Outcome::Done };
            pod_mount.ready = None;
            pod_mount.refresh_at = None;
            pod_mount.plugin.clone()
        };
        let result = plugin.tear_down(placed).await;
        let (failed, pod) = {
            let mut state = self.state();
            let Some(pod_mount) = state.pod_mount_mut(placed) else { return Outcome::Done };
            let pod = pod_mount.pod.clone();
            match result {
                Ok(()) => {
                    pod_mount.state = Mount::NotMounted;
                    pod_mount.reconstructed = false;
                    pod_mount.growth = Growth::None;
                    pod_mount.failed = false;
                    (None, pod)
                }
                Err(failed) => {
                    if failed.certainty != Certainty::Unchanged {
                        pod_mount.state = Mount::Uncertain;
                    }
                    pod_mount.failed = true;
                    (Some(failed), pod)
                }
            }
        };
        let Some(failed) = failed else {
            tracing::info!(pod = %placed.pod_uid, volume = %placed.spec_name, "unmounted");
            return Outcome::Done;
        };
        let operation = if placed.block { "UnmapVolume" } else { "UnmountVolume" };
        let message =
            format!("{operation}.TearDown failed for volume {:?} : {}", placed.spec_name, failed.message);
        self.complain(pod.as_deref(), placed, "FailedUnmount", message);
        Outcome::Failed
    }

    async fn stage(&self, group: &Group, placed: &Placed) -> Outcome {
        if let Some(refused) = self.refuse_other_node(placed).await {
            return refused;
        }
        let begun = {
            let mut state = self.state();
            let volume = state.pod_mount(placed).and_then(|pod_mount: &PodMount| pod_mount.volume.clone());
            state.device_mut(group).zip(volume).map(|(entry, volume)| {
                let before = entry.state;
                if before == Mount::NotMounted {
                    entry.state = Mount::Uncertain;
                }
                entry.waiting = None;
                (entry.plugin.clone(), volume, before)
            })
        };
        let Some((plugin, volume, before)) = begun else { return Outcome::Done };
        let result = plugin.stage(&volume).await;
        let failed = self.with_device(group, |entry| match result {
            Ok(()) => {
                entry.state = Mount::Mounted;
                entry.reconstructed = false;
                None
            }
            Err(failed) => {
                entry.state = before.after_failure(failed.certainty, entry.reconstructed);
                Some(failed)
            }
        });
        match failed.flatten() {
            None => Outcome::Done,
            Some(failed) => {
                self.problem(placed, "MountDevice", "SetUpDevice", &failed.message);
                Outcome::Failed
            }
        }
    }

    async fn unstage(&self, group: &Group) -> Outcome {
        let device =
            self.with_device(group, |entry| (entry.plugin.clone(), entry.device.unique_name.clone()));
        let Some((plugin, name)) = device else { return Outcome::Done };
        let result = plugin.unstage(&name).await;
        let outcome = self.with_device(group, |entry| match result {
            Ok(()) => {
                entry.state = Mount::NotMounted;
                entry.reconstructed = false;
                Outcome::Done
            }
            Err(failed) => {
                if failed.certainty != Certainty::Unchanged {
                    entry.state = Mount::Uncertain;
                }
                tracing::warn!(device = name, error = %failed, "UnmountDevice failed; trying again");
                Outcome::Failed
            }
        });
        outcome.unwrap_or(Outcome::Done)
    }

    async fn report_in_use(&self, group: &Group) -> Outcome {
        let Some(name) = self.with_device(group, |entry| entry.device.unique_name.clone()) else {
            return Outcome::Done;
        };
        match self.options.node.in_use(&name).await {
            Ok(()) => {
                self.with_device(group, |entry| entry.in_use = true);
                Outcome::Done
            }
            Err(Failed { message, .. }) => {
                tracing::warn!(device = name, error = message, "not reported as in use; trying again");
                Outcome::Failed
            }
        }
    }

    fn report_not_in_use(&self, group: &Group) -> Outcome {
        let name = self.with_device(group, |entry| {
            entry.in_use = false;
            entry.device.unique_name.clone()
        });
        if let Some(name) = name {
            self.options.node.not_in_use(&name);
        }
        Outcome::Done
    }

    /// Attaching is the work of others, who record their failures; only a long wait has an event, and ends a pod that has not
    /// begun and waits on a node which has as many devices as it can have: another pod in its place may go elsewhere.
    async fn await_attachment(&self, group: &Group) -> Outcome {
        let now = Instant::now();
        let since = self.with_device(group, |entry| *entry.waiting.get_or_insert(now));
        if since.is_some_and(|since| now - since >= self.options.attach_timeout) {
            let waiting: Vec<(Placed, Arc<dyn Plugin>, PodVolume)> = {
                let state = self.state();
                let pod_mounts = state.groups.get(group).into_iter().flat_map(|members| &members.pod_mounts);
                pod_mounts
                    // A pod that has the device already does not wait, whatever the Node object says now.
                    .filter(|(_, pod_mount)| pod_mount.state != Mount::Mounted)
                    .filter_map(|(placed, pod_mount)| {
                        Some((placed.clone(), pod_mount.plugin.clone(), pod_mount.volume.clone()?))
                    })
                    .collect()
            };
            for (placed, plugin, volume) in waiting {
                if !self.has_begun(&placed.pod_uid)
                    && let Some(why) = plugin.attach_limit(&volume).await
                {
                    self.refuse(&placed.pod_uid, &volume.name, &why);
                    continue;
                }
                self.problem(&placed, "WaitForAttach", "WaitForAttach", "timed out waiting for the condition: the volume is not attached to this node; its VolumeAttachment says why");
            }
        }
        Outcome::Wait(self.options.attach_timeout)
    }

    fn has_begun(&self, pod_uid: &str) -> bool {
        self.state().pods.get(pod_uid).is_some_and(|wishes| wishes.has_begun)
    }

    /// Notes that a pod will never have one of its volumes on this node.
    fn refuse(&self, pod_uid: &str, name: &str, why: &str) {
        let message = format!(
            "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[{name}], \
             unattached volumes=[{name}], failed to process volumes=[]: {why}"
        );
        if let Some(wishes) = self.state().pods.get_mut(pod_uid) {
            wishes.refused = Some(message);
        }
        (self.options.changed)(pod_uid);
    }

    /// Records why a pod does not get its volume, and its event: `mount` and `map` name the step for filesystems and devices.
    fn problem(&self, placed: &Placed, mount: &str, map: &str, cause: &str) {
        let pod = {
            let mut state = self.state();
            let Some(pod_mount) = state.pod_mount_mut(placed) else { return };
            pod_mount.failed = true;
            pod_mount.pod.clone()
        };
        let (reason, step) = if placed.block {
            ("FailedMapVolume", format!("MapVolume.{map}"))
        } else {
            ("FailedMount", format!("MountVolume.{mount}"))
        };
        let message = format!("{step} failed for volume {:?} : {cause}", placed.spec_name);
        self.complain(pod.as_deref(), placed, reason, message);
    }

    fn complain(&self, pod: Option<&Pod>, placed: &Placed, reason: &str, message: String) {
        tracing::warn!(pod = %placed.pod_uid, volume = %placed.spec_name, reason, error = message, "trying again");
        if let Some(pod) = pod {
            self.options.recorder.warning(pod, reason, message);
        }
    }

    fn with_device<T>(&self, group: &Group, change: impl FnOnce(&mut DeviceEntry) -> T) -> Option<T> {
        self.state().device_mut(group).map(change)
    }
}
