//! The volume manager: makes what pods want of volumes and what is mounted the same.
//!
//! Pods say what they want ([`Volumes::want`]) and are told when that changed. A volume is first found (a claim is
//! followed to its PersistentVolume by live requests, the plugin names the device), then worked on in its group: a device
//! with everything on it, or one volume without a device. A group has one worker at a time, which plans (a pure
//! function), does what the plan says, and plans again until nothing is left to do; groups do not wait for each other.
//! Failures come again after 500 ms, doubling to about two minutes, and at once when what they wait for changes. What may
//! have happened is kept as uncertain until it was undone, even when the pod is long gone; after a restart everything
//! that stands on disk is.
//!
//! Reads: Pod, PersistentVolumeClaim, PersistentVolume. Writes: the claim's status when its filesystem has grown; the
//! node's `volumesInUse`, through [`Attachments`]. Events: `FailedMount`, `FailedMapVolume`, `FailedUnmount`,
//! `FileSystemResizeSuccessful`, `VolumeResizeFailed`.

mod disk;
mod growth;
mod operate;
mod plan;
mod resolve;
mod state;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use berth_kube::{Backoff, Cluster, Failure, Key, Next, Queue, Recorder};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::Instant;

pub(crate) use self::disk::names;
pub use self::disk::remove_pod;
use self::operate::Outcome;
use self::plan::Action;
use self::state::{Found, Group, State};
use crate::layout::Layout;
use crate::plugin::{Failed, Plugin, Ready};

/// What the volume manager needs of the Node object.
#[async_trait]
pub trait Attachments: Send + Sync {
    /// Returns once Kubernetes knows that the node uses a device.
    async fn in_use(&self, unique_name: &str) -> Result<(), Failed>;

    /// The node no longer uses a device.
    fn not_in_use(&self, unique_name: &str);

    /// Whether a device is attached to the node; [`Volumes::attachment_changed`] is called when that changes.
    fn is_attached(&self, unique_name: &str) -> bool;
}

/// What a volume manager is made of.
pub struct Options {
    /// Where claims and volumes are.
    pub cluster: Cluster,
    /// Where things lie on disk.
    pub layout: Layout,
    /// The kinds of volumes; the first that serves a volume gets it.
    pub plugins: Vec<Arc<dyn Plugin>>,
    /// The Node object.
    pub node: Arc<dyn Attachments>,
    /// Tells pods and claims what happens.
    pub recorder: Recorder,
    /// Called with a pod's uid when its volumes have become ready, or are gone.
    pub changed: Box<dyn Fn(&str) + Send + Sync>,
}

/// The volume manager of a node.
pub struct Volumes {
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

/// Failures are told where they happen; the queue only has to come again.
#[derive(Debug)]
struct Never;

impl std::fmt::Display for Never {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("never")
    }
}

impl Failure for Never {}

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(122) };

impl Volumes {
    /// A volume manager that knows what stands on disk, all of it uncertain. Nothing is done before [`Volumes::run`].
    pub fn new(options: Options) -> Arc<Self> {
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
    pub async fn run(self: Arc<Self>) {
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
    pub fn want(&self, pod: &Arc<Pod>) {
        let uid = pod.uid().unwrap_or_default();
        let missing = self.state().want(pod, &uid);
        for name in missing {
            self.queue.add(Work::Find { pod: uid.clone(), name });
        }
    }

    /// A pod that is not to have volumes keeps those it has until [`Volumes::unwant`]: its containers still run.
    pub fn hold(&self, pod_uid: &str) {
        self.state().hold(pod_uid);
    }

    /// A pod no longer needs its volumes.
    pub fn unwant(&self, pod_uid: &str) {
        let groups = self.state().unwant(pod_uid);
        self.settle_all(groups);
    }

    /// Where a pod finds its volumes, by their names in the pod; `None` until it has all of them.
    pub fn ready(&self, pod_uid: &str) -> Option<HashMap<String, Ready>> {
        self.state().ready(pod_uid)
    }

    /// Keeps a pod's volumes from being grown until the guards are dropped: where the kernel grows a filesystem only
    /// unmounted, its mounts are gone for a moment, and a container that starts then would find an empty directory.
    pub async fn steady(&self, pod_uid: &str) -> Vec<OwnedRwLockReadGuard<()>> {
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

    /// What keeps a pod from having its volumes, one sentence each.
    pub fn problems(&self, pod_uid: &str) -> Vec<String> {
        self.state().problems(pod_uid)
    }

    /// Whether a pod neither wants nor has any volume.
    pub fn is_gone(&self, pod_uid: &str) -> bool {
        self.state().is_gone(pod_uid)
    }

    /// What a pod's ConfigMap, Secret and similar volumes are made of changed.
    pub fn refresh(&self, pod_uid: &str) {
        let groups = self.state().make_stale(pod_uid);
        self.settle_all(groups);
    }

    /// The unique names of the devices that are, or may be, in use.
    pub fn devices(&self) -> Vec<String> {
        let state = self.state();
        let devices = state.groups.values().filter_map(|members| members.device.as_ref());
        devices.filter(|entry| entry.in_use).map(|entry| entry.device.unique_name.clone()).collect()
    }

    /// A device was attached or detached.
    pub fn attachment_changed(&self, unique_name: &str) {
        let group = Group::Device(unique_name.to_owned());
        let known = self.state().groups.contains_key(&group);
        if known {
            self.queue.add(Work::Settle(group));
        }
    }

    /// Tries at once what failed: a driver has come.
    pub fn retry(&self) {
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
        let volume = match resolve::resolve(&self.options.cluster, &pod, &wish).await {
            Ok(volume) => volume,
            Err(problem) => return self.unfound(uid, name, &problem),
        };
        let Some(plugin) = self.options.plugins.iter().find(|plugin| plugin.serves(&volume.source)) else {
            return self.unfound(
                uid,
                name,
                "no volume plugin matched: Berth does not mount this kind of volume yet",
            );
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
        // A pod may be here before the last write to its claim is; what is so at the second look is a problem.
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
                match self.operate(group, action.clone()).await {
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

    /// Forgets what is gone, and tells the pods that have lost their last volume by that.
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
