//! Publishes for the scheduler how much room there is: CSIStorageCapacity objects, one per class and topology segment.
//!
//! Reads: StorageClass, CSINode and Node (drivers with topology), CSIDriver (if it is to decide), CSIStorageCapacity
//! (one namespace, by labels), Pod and what it belongs to (once). Writes: CSIStorageCapacity.
//!
//! The driver is asked once per segment and parameters, however many classes share them, when one of these comes, after
//! every volume that was made or deleted there, after a failure, and after a time; each question at most once a second.
//! Objects of classes and segments that are gone, and second objects for the same, are deleted. Objects of other
//! publishers, which are recognised by their labels, are left alone.

mod goal;
mod objects;
mod owner;
mod plan;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use berth_csi::v1::{GetCapacityRequest, Topology};
use berth_kube::{Backoff, Cache, Cluster, Next, Queue};
use k8s_openapi::api::core::v1::{Node, VolumeNodeAffinity};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass};
use kube::{Api, ResourceExt as _};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use self::goal::{CapacityKey, Goal, Question};
use self::objects::Objects;
use self::plan::{Frame, Write};
use super::per_node::OwnNode;
use super::topology::Segment;
use crate::driver::{Driver, Identity};
use crate::failure::{Failure, settled};

pub use self::owner::Owner;
pub(super) use self::plan::Room;

/// The shortest time between two answers to the same question: a thousand volumes need no thousand updates.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait before the owner is looked up again.
const OWNER_RETRY: Duration = Duration::from_secs(5);
/// How long after an object that was to be written was gone it is tried again.
const REWRITE_DELAY: Duration = Duration::from_millis(20);

/// How capacity is published; the defaults are upstream's.
#[derive(Debug, Clone)]
pub struct Capacity {
    /// Where the objects are.
    pub namespace: String,
    /// With whom they go; they stay if `None`.
    pub owner: Option<Owner>,
    /// How often the driver is asked although nothing is known to have happened.
    pub poll: Duration,
    /// Also for classes that bind at once.
    pub immediate: bool,
    /// How many questions are asked at a time.
    pub workers: usize,
    /// Only while the CSIDriver says that the scheduler is to read it.
    pub only_if_announced: bool,
}

impl Capacity {
    /// As upstream does it, in a namespace.
    pub fn new(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            owner: None,
            poll: Duration::from_mins(1),
            immediate: false,
            workers: 1,
            only_if_announced: false,
        }
    }
}

/// Where the segments come from that capacity is published for.
enum TopologySource {
    /// The driver has no topology, or this is one node's: always the same.
    Fixed(Segment),
    /// The labels of all nodes on which the driver is.
    Watched(Cache<CSINode>, Cache<Node>),
}

/// What is reconciled: the set of objects, one question to the driver, or one object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Item {
    /// Which objects there should be.
    Goal,
    /// How much room there is.
    Question(Question),
    /// Whether an object, by its name, should be there.
    Object(String),
}

/// How many objects there are, for Prometheus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) goal: usize,
    pub(super) current: usize,
    pub(super) obsolete: usize,
}

/// Keeps the objects of one driver, or of one node's, current.
pub(super) struct Publisher {
    cluster: Cluster,
    driver: Driver,
    name: String,
    manager: String,
    options: Capacity,
    timeout: Duration,
    classes: Cache<StorageClass>,
    drivers: Option<Cache<CSIDriver>>,
    topology: TopologySource,
    frame: OnceLock<Frame>,
    objects: Objects,
    /// `None` until it is known: before that, nothing is too much.
    goal: Mutex<Option<Goal>>,
    /// When each question was last answered.
    answered: Mutex<HashMap<Question, Instant>>,
    queue: Queue<Item>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("driver", &self.name).finish_non_exhaustive()
    }
}

impl Publisher {
    pub(super) fn new(
        cluster: &Cluster,
        driver: &Driver,
        identity: &Identity,
        options: &super::Options,
        capacity: &Capacity,
        own_node: Option<&OwnNode>,
    ) -> Arc<Self> {
        let topology = match own_node {
            Some(own_node) => TopologySource::Fixed(own_node.segment()),
            None if identity.has_topology() => TopologySource::Watched(cluster.cache(), cluster.cache()),
            None => TopologySource::Fixed(Segment::new()),
        };
        // A question that fails is asked at least as often as one that does not.
        let retry = Backoff { longest: options.retry.longest.min(capacity.poll), ..options.retry };
        Arc::new(Self {
            manager: super::per_node::manager(own_node.map(OwnNode::name)),
            drivers: capacity.only_if_announced.then(|| cluster.cache()),
            classes: cluster.cache(),
            cluster: cluster.named("external-provisioner"),
            driver: driver.clone(),
            name: identity.name.clone(),
            options: capacity.clone(),
            timeout: options.timeout,
            topology,
            frame: OnceLock::new(),
            objects: Objects::new(),
            goal: Mutex::default(),
            answered: Mutex::default(),
            queue: cluster.queue("csistoragecapacity", retry),
        })
    }

    /// Publishes until the shutdown, then finishes what is under way.
    pub(super) async fn run(self: Arc<Self>) {
        let shutdown = self.cluster.shutdown().clone();
        let frame = tokio::select! {
            () = shutdown.cancelled() => return,
            frame = self.prepare() => self.frame.get_or_init(|| frame),
        };
        let api: Api<CSIStorageCapacity> =
            Api::namespaced(self.cluster.client().clone(), &self.options.namespace);
        let selector = frame.selector();
        let following = self.objects.follow(api, &selector, |object| self.changed(object));
        let working = async {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.objects.synced() => {}
            }
            self.subscribe();
            let work = |item| self.clone().reconcile(item);
            self.queue.run(self.options.workers, shutdown.clone(), work).await;
        };
        tokio::select! {
            () = following => {}
            () = working => {}
        }
    }

    /// Waits until it is known what there should be, and whose it is.
    async fn prepare(&self) -> Frame {
        self.classes.synced().await;
        if let Some(drivers) = &self.drivers {
            drivers.synced().await;
        }
        if let TopologySource::Watched(csi_nodes, nodes) = &self.topology {
            csi_nodes.synced().await;
            nodes.synced().await;
        }
        let mut owner = None;
        while let Some(wanted) = self.options.owner.as_ref().filter(|_| owner.is_none()) {
            match owner::find(self.cluster.client(), &self.options.namespace, wanted).await {
                Ok(found) => owner = Some(found),
                Err(error) => {
                    tracing::warn!(
                        error = error.sentence(),
                        "capacity is not published: its objects have no owner; trying again in {OWNER_RETRY:?}"
                    );
                    tokio::time::sleep(OWNER_RETRY).await;
                }
            }
        }
        Frame {
            driver: self.name.clone(),
            manager: self.manager.clone(),
            namespace: self.options.namespace.clone(),
            owner,
        }
    }

    fn subscribe(&self) {
        self.queue.add(Item::Goal);
        let queue = self.queue.clone();
        self.classes.subscribe(move |_, _| queue.add(Item::Goal));
        if let Some(drivers) = &self.drivers {
            let queue = self.queue.clone();
            drivers.subscribe(move |_, _| queue.add(Item::Goal));
        }
        if let TopologySource::Watched(csi_nodes, nodes) = &self.topology {
            let queue = self.queue.clone();
            csi_nodes.subscribe(move |before, after| {
                if before.map(|node| &node.spec) != after.map(|node| &node.spec) {
                    queue.add(Item::Goal);
                }
            });
            let queue = self.queue.clone();
            nodes.subscribe(move |before, after| {
                // Every node's status changes all the time.
                if before.map(|node| &node.metadata.labels) != after.map(|node| &node.metadata.labels) {
                    queue.add(Item::Goal);
                }
            });
        }
    }

    /// An object came, changed or went.
    fn changed(&self, object: &CSIStorageCapacity) {
        let goal = self.goal();
        let Some(goal) = goal.as_ref() else { return };
        let there = CapacityKey::of(object)
            .map(|capacity_key| (self.objects.at(&capacity_key), goal.question(&capacity_key)));
        match there {
            Some((there, Some(question))) if there.is_empty() => self.queue.add(Item::Question(question)),
            Some((there, Some(_))) if there.len() == 1 => {}
            _ => self.queue.add(Item::Object(object.name_any())),
        }
    }
}

/// Reasons to ask again.
impl Publisher {
    /// A volume was created or deleted in these segments.
    pub(super) fn refresh_topologies(&self, affinity: &VolumeNodeAffinity) {
        let goal = self.goal();
        for segment in goal::segments_of(affinity) {
            let classes = goal.iter().flat_map(|goal| goal.classes.keys());
            self.refresh(
                goal.as_ref(),
                classes.map(|class| CapacityKey { class: class.clone(), segment: segment.clone() }),
            );
        }
    }

    /// A volume of a class was made or deleted somewhere, or could not be made.
    pub(super) fn refresh_class(&self, class: &str) {
        let goal = self.goal();
        let segments = goal.iter().flat_map(|goal| &goal.segments);
        self.refresh(
            goal.as_ref(),
            segments.map(|segment| CapacityKey { class: class.to_owned(), segment: segment.clone() }),
        );
    }

    /// The driver was away.
    pub(super) fn refresh_all(&self) {
        let goal = self.goal();
        self.refresh(goal.as_ref(), goal.iter().flat_map(Goal::capacity_keys));
    }

    fn refresh(&self, goal: Option<&Goal>, capacity_keys: impl Iterator<Item = CapacityKey>) {
        for question in capacity_keys.filter_map(|capacity_key| goal?.question(&capacity_key)) {
            self.queue.add(Item::Question(question));
        }
    }
}

/// What is done about each item.
impl Publisher {
    async fn reconcile(self: Arc<Self>, item: Item) -> Result<Next, Failure> {
        settled(match item {
            Item::Goal => {
                self.aim();
                Ok(Next::Done)
            }
            Item::Question(question) => self.ask(&question).await,
            Item::Object(name) => self.tidy(&name).await,
        })
    }

    /// Finds out which objects there should be.
    fn aim(&self) {
        let announced = self.drivers.as_ref().is_none_or(|drivers| {
            drivers.named(&self.name).is_some_and(|driver| driver.spec.storage_capacity == Some(true))
        });
        let segments = match &self.topology {
            TopologySource::Fixed(segment) => [segment.clone()].into(),
            TopologySource::Watched(csi_nodes, nodes) => {
                goal::segments(&csi_nodes.list(), &nodes.list(), &self.name)
            }
        };
        let classes = goal::classes(&self.classes.list(), &self.name, self.options.immediate);
        let new = if announced { Goal { segments, classes } } else { Goal::default() };
        let mut goal = self.goal();
        let old = goal.replace(new.clone());
        drop(goal);
        for capacity_key in new.capacity_keys() {
            let before = old.as_ref().and_then(|old| old.question(&capacity_key));
            let question = new.question(&capacity_key).filter(|question| before.as_ref() != Some(question));
            if let Some(question) = question {
                self.queue.add(Item::Question(question));
            }
        }
        for object in self.objects.list().iter().filter(|object| !new.wants_object(object)) {
            self.queue.add(Item::Object(object.name_any()));
        }
    }

    /// Asks how much room there is, and publishes it.
    async fn ask(&self, question: &Question) -> Result<Next, Failure> {
        if self.keys_answered_by(question).is_empty() {
            self.answered().remove(question);
            return Ok(Next::Done);
        }
        let last = self.answered().get(question).copied();
        if let Some(rest) =
            last.and_then(|last| REFRESH_INTERVAL.checked_sub(last.elapsed())).filter(|rest| !rest.is_zero())
        {
            return Ok(Next::After(rest));
        }
        self.driver.identity_of(&self.name)?;
        let segments = question.segment.clone();
        let request = GetCapacityRequest {
            volume_capabilities: Vec::new(),
            parameters: question.parameters.clone(),
            accessible_topology: (!segments.is_empty()).then_some(Topology { segments }),
        };
        let room = Room::from(self.driver.call(self.timeout, request).await?);
        self.answered().insert(question.clone(), Instant::now());
        for capacity_key in self.keys_answered_by(question) {
            for write in self.frame().plan(&capacity_key, room, &self.objects.at(&capacity_key)) {
                if !self.write(write, room).await? {
                    return Ok(Next::After(REWRITE_DELAY));
                }
            }
        }
        Ok(Next::After(self.options.poll))
    }

    /// Deletes an object that there should not be.
    async fn tidy(&self, name: &str) -> Result<Next, Failure> {
        let Some(object) = self.objects.get(name) else { return Ok(Next::Done) };
        let wanted = match self.goal().as_ref() {
            None => true,
            Some(goal) => {
                let first = |capacity_key: CapacityKey| {
                    plan::kept(&self.objects.at(&capacity_key)).is_some_and(|kept| kept.name_any() == name)
                };
                goal.wants_object(&object) && CapacityKey::of(&object).is_some_and(first)
            }
        };
        if !wanted {
            self.cluster.delete(object.as_ref()).await?;
            self.objects.forget(name);
        }
        Ok(Next::Done)
    }

    /// Makes a write; false if the object to write is gone.
    async fn write(&self, write: Write, room: Room) -> Result<bool, Failure> {
        match write {
            Write::Create(object) => self.objects.observe(&self.cluster.create(object.as_ref()).await?),
            Write::Update(object) => {
                let updated =
                    self.cluster.update(object.as_ref(), |object| self.frame().write_into(object, room));
                match updated.await {
                    Ok(updated) => self.objects.observe(&updated),
                    Err(error) if error.is_not_found() => {
                        self.objects.forget(&object.name_any());
                        return Ok(false);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Write::Delete(object) => {
                self.cluster.delete(object.as_ref()).await?;
                self.objects.forget(&object.name_any());
            }
        }
        Ok(true)
    }

    /// How many objects there are, should be and should not be.
    pub(super) fn counts(&self) -> Counts {
        let goal = self.goal();
        let Some(goal) = goal.as_ref() else { return Counts { goal: 0, current: 0, obsolete: 0 } };
        let current =
            goal.capacity_keys().filter(|capacity_key| !self.objects.at(capacity_key).is_empty()).count();
        let obsolete = self.objects.list().iter().filter(|object| !goal.wants_object(object)).count();
        Counts { goal: goal.segments.len() * goal.classes.len(), current, obsolete }
    }

    fn keys_answered_by(&self, question: &Question) -> Vec<CapacityKey> {
        self.goal().as_ref().map(|goal| goal.answered(question)).unwrap_or_default()
    }

    fn frame(&self) -> &Frame {
        self.frame.get().expect("items are reconciled after everything was prepared")
    }

    fn goal(&self) -> MutexGuard<'_, Option<Goal>> {
        self.goal.lock()
    }

    fn answered(&self) -> MutexGuard<'_, HashMap<Question, Instant>> {
        self.answered.lock()
    }
}
