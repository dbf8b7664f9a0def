//! Collects what nobody needs any more: objects whose owners are gone, the contents of namespaces that go, old events.
//!
//! Follows every collection of the store and reads live objects when it decides, so it never acts on what it merely
//! remembers. What it remembers only says which objects to check; an owner that waits may not go before everything is
//! known that happened until then. Acts through the API like any client, with the object's uid and resource
//! version as preconditions.

mod decide;
mod graph;
mod perform;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use jiff::Timestamp;
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::decide::{Item, Owner, OwnerState, Step, decide, decide_namespace, group_and_version};
use self::graph::{Former, Graph};
use self::perform::{Outcome, current, perform};
use crate::rest::{ApiServer, has_furniture, is_furniture};
use crate::rules::read::{at, text};
use crate::store::{Collection, Event, EventKind, Key, Object, Store, View};

const RETRY: Duration = Duration::from_millis(500);
/// How many observations may wait.
const WAITING_OBSERVATIONS: usize = 64;
/// How many objects of a namespace are deleted at a time: together they wait for the disk once.
const TOGETHER: usize = 64;
const EVENTS: &str = "events";
const NAMESPACES: &str = "namespaces";
const DEFINITIONS: &str = "customresourcedefinitions.apiextensions.k8s.io";

/// How long what is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long an event stays after it was last seen.
    pub event_ttl: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { event_ttl: Duration::from_secs(3600) }
    }
}

/// Collects until `shutdown` fires.
pub async fn run(api: ApiServer, options: Options, shutdown: CancellationToken) {
    let (sender, mut observations) = mpsc::channel(WAITING_OBSERVATIONS);
    let mut collector = Collector::new(api, options, sender);
    collector.follow_new();
    loop {
        let wake = collector.next_wake();
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(observation) = observations.recv() => collector.observe(&observation),
            () = tokio::time::sleep_until(wake) => collector.wake(),
            () = tokio::task::yield_now(), if collector.can_work() => {}
        }
        // Observations come first: decisions rest on them, and a follower that waits too long to deliver one has to list everything again.
        for _ in 0..WAITING_OBSERVATIONS {
            let Ok(observation) = observations.try_recv() else { break };
            collector.observe(&observation);
        }
        tokio::select! {
            () = shutdown.cancelled() => break,
            () = collector.work() => {}
        }
    }
    collector.followers.abort_all();
}

/// What a follower has seen of its collection.
enum Observation {
    Listed(Collection, View),
    Changed(Vec<Arc<Event>>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Item(Key),
    Namespace(Arc<str>),
    /// The objects that every namespace has may be missing in this one.
    NamespaceDefaults(Arc<str>),
    Event(Key),
}

struct Collector {
    api: ApiServer,
    options: Options,
    sender: mpsc::Sender<Observation>,
    followers: tokio::task::JoinSet<()>,
    followed: HashSet<Collection>,
    /// Up to which revision each collection is known; a collection that was not listed yet is missing.
    seen: HashMap<Collection, u64>,
    graph: Graph,
    /// Those who wait in the foreground for their dependents to go, by uid.
    waiting: HashMap<String, Key>,
    /// Objects with an owner of a kind that was not served when they were checked.
    unknown: HashSet<Key>,
    /// What waits for observations that are on their way.
    unsettled: Vec<Work>,
    /// Namespaces that are going.
    closing: HashSet<Arc<str>>,
    queue: VecDeque<Work>,
    queued: HashSet<Work>,
    later: BTreeMap<Instant, Vec<Work>>,
    expiries: BTreeSet<(Timestamp, Key)>,
}

/// The little that has to be known of an object that is gone.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Gone {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    metadata: GoneMetadata,
}

#[derive(Deserialize)]
struct GoneMetadata {
    #[serde(default)]
    uid: String,
}

impl Collector {
    fn new(api: ApiServer, options: Options, sender: mpsc::Sender<Observation>) -> Self {
        Self {
            api,
            options,
            sender,
            followers: tokio::task::JoinSet::new(),
            followed: HashSet::new(),
            seen: HashMap::new(),
            graph: Graph::default(),
            waiting: HashMap::new(),
            unknown: HashSet::new(),
            unsettled: Vec::new(),
            closing: HashSet::new(),
            queue: VecDeque::new(),
            queued: HashSet::new(),
            later: BTreeMap::new(),
            expiries: BTreeSet::new(),
        }
    }

    /// Follows the collections that are served and not followed yet.
    fn follow_new(&mut self) {
        for served in self.api.registry().all() {
            if self.followed.insert(served.collection.clone()) {
                let (store, collection) = (self.api.store().clone(), served.collection.clone());
                self.followers.spawn(follow(store, collection, self.sender.clone()));
            }
        }
    }

    /// Follows what the definitions say at this revision, which the API may not serve yet.
    fn follow_definitions(&mut self, revision: u64) {
        if self.api.registry().generation < revision {
            self.api.reload_definitions();
        }
        self.follow_new();
        // With what is served changes who can be found, and what a namespace waits for.
        let items = std::mem::take(&mut self.unknown).into_iter().map(Work::Item);
        let namespaces = self.closing.iter().cloned().map(Work::Namespace);
        for work in items.chain(namespaces).collect::<Vec<Work>>() {
            self.push(work);
        }
    }

    /// Whether every collection was listed: before that, dependents may be unknown.
    fn is_ready(&self) -> bool {
        self.seen.len() == self.followed.len()
    }

    /// Whether everything is known here that happened up to a revision.
    fn has_seen(&self, revision: u64) -> bool {
        let store = self.api.store();
        self.seen.iter().all(|(collection, &seen)| {
            seen >= revision || store.watch(collection, seen).is_ok_and(|watch| watch.revision() >= revision)
        })
    }

    fn push(&mut self, work: Work) {
        if self.queued.insert(work.clone()) {
            self.queue.push_back(work);
        }
    }

    /// Asks owners again who wait for a dependent that holds them back no longer.
    fn ask_again(&mut self, owners: &[String]) {
        for owner in owners {
            if let Some(key) = self.waiting.get(owner) {
                self.push(Work::Item(key.clone()));
            }
        }
    }

    fn observe(&mut self, observation: &Observation) {
        for work in std::mem::take(&mut self.unsettled) {
            self.push(work);
        }
        match observation {
            Observation::Listed(collection, view) => {
                let is_again = self.seen.insert(collection.clone(), view.revision()).is_some();
                if is_again {
                    self.forget(collection, view);
                }
                for object in view.range(None, None) {
                    self.see(object);
                }
                if is_again {
                    self.queue_everything();
                }
                // There is no event for what was deleted before the list.
                if has_furniture(collection) {
                    for namespace in self.api.store().view(&Collection::new(NAMESPACES)).range(None, None) {
                        self.push(Work::NamespaceDefaults(namespace.key.name.clone()));
                    }
                }
            }
            Observation::Changed(events) => {
                if let Some(last) = events.last() {
                    self.seen.insert(last.object.key.collection.clone(), last.revision);
                }
                for event in events {
                    match event.kind {
                        EventKind::Added | EventKind::Modified => self.see(&event.object),
                        EventKind::Deleted => self.miss(&event.object),
                    }
                }
            }
        }
    }

    /// Forgets what is not in a collection any more.
    fn forget(&mut self, collection: &Collection, view: &View) {
        let is_gone =
            |key: &Key| key.collection == *collection && view.get(&key.namespace, &key.name).is_none();
        let gone: Vec<Key> = self.graph.all().filter(|key| is_gone(key)).cloned().collect();
        for key in gone {
            self.graph.forget(&key);
        }
        // Seeing the list brings back who is still there, with the uid it has now.
        self.waiting.retain(|_, key| key.collection != *collection);
        if collection.as_str() == NAMESPACES {
            self.closing.clear();
        }
        if collection.as_str() == DEFINITIONS {
            self.follow_definitions(view.revision());
        }
    }

    /// Queues everything once more: there is no event for what was deleted before a list, nor what depended on it.
    fn queue_everything(&mut self) {
        let items = self.graph.all().chain(self.waiting.values()).cloned().map(Work::Item);
        let namespaces = self.closing.iter().cloned().map(Work::Namespace);
        let all: Vec<Work> = items.chain(namespaces).collect();
        for work in all {
            self.push(work);
        }
    }

    fn see(&mut self, object: &Object) {
        let key = &object.key;
        if key.collection.as_str() == DEFINITIONS {
            self.follow_definitions(object.revision);
        }
        if is_furniture(key) {
            self.push(Work::NamespaceDefaults(key.namespace.clone()));
        }
        let has = |word: &[u8]| object.bytes.windows(word.len()).any(|window| window == word);
        let is_event = key.collection.as_str() == EVENTS;
        let concerns = is_event || has(b"\"ownerReferences\"") || has(b"\"deletionTimestamp\"");
        let value = concerns.then(|| serde_json::from_slice(&object.bytes).ok()).flatten();
        let item = value.as_ref().map(|value| Item::read(key, value));
        // What is on its way out is asked about when it is gone.
        if self.closing.contains(&key.namespace) && !item.as_ref().is_some_and(|item| item.deleting) {
            self.push(Work::Namespace(key.namespace.clone()));
        }
        // Events are old some day, whoever owns them.
        if is_event {
            if let Some(value) = value {
                self.expiries.insert((expiry(&value, self.options.event_ttl), key.clone()));
            }
            return;
        }
        let Some(item) = item else {
            let released = self.graph.forget(key);
            self.ask_again(&released);
            return;
        };
        if item.deleting && item.foreground {
            self.waiting.insert(item.uid.clone(), key.clone());
        } else {
            self.waiting.remove(&item.uid);
        }
        let released = self.graph.observe(&item);
        self.ask_again(&released);
        if item.deleting && key.collection.as_str() == NAMESPACES {
            self.closing.insert(key.name.clone());
            self.push(Work::Namespace(key.name.clone()));
        }
        if !item.owners.is_empty() || (item.deleting && (item.foreground || item.orphan)) {
            self.push(Work::Item(key.clone()));
        }
    }

    fn miss(&mut self, object: &Object) {
        let key = &object.key;
        if is_furniture(key) {
            self.push(Work::NamespaceDefaults(key.namespace.clone()));
        }
        // With each that goes there may be many left; they are checked when the last of a kind went.
        let is_last =
            || self.api.store().view(&key.collection).range(Some(&key.namespace), None).next().is_none();
        if self.closing.contains(&key.namespace) && is_last() {
            self.push(Work::Namespace(key.namespace.clone()));
        }
        if key.collection.as_str() == NAMESPACES {
            self.closing.remove(&key.name);
        }
        if key.collection.as_str() == DEFINITIONS {
            self.follow_definitions(object.revision);
        }
        self.unknown.remove(key);
        let released = self.graph.forget(key);
        self.ask_again(&released);
        if self.graph.is_empty() && self.waiting.is_empty() {
            return;
        }
        let Ok(gone) = serde_json::from_slice::<Gone>(&object.bytes) else { return };
        let uid = gone.metadata.uid;
        self.waiting.remove(&uid);
        let dependents: Vec<Key> = self.graph.dependents(&uid).cloned().collect();
        if dependents.is_empty() {
            return;
        }
        let group = group_and_version(&gone.api_version).0.to_owned();
        self.graph.bury(&uid, Former { group, kind: gone.kind, key: key.clone() });
        for dependent in dependents {
            self.push(Work::Item(dependent));
        }
    }

    fn owner_state(&self, dependent: &Key, owner: &Owner) -> OwnerState {
        let registry = self.api.registry();
        let version = registry.version(&owner.group, &owner.version);
        let mut kinds = version.into_iter().flat_map(|version| &version.resources);
        let Some(served) = kinds.find(|served| *served.resource.kind == *owner.kind) else {
            // The definition of its kind may have gone with it.
            let is_gone = self.graph.saw_go(dependent, owner);
            return if is_gone { OwnerState::Dangling } else { OwnerState::Unknown };
        };
        let namespace = if served.resource.namespaced { &*dependent.namespace } else { "" };
        // Nobody knows in which namespace such an owner should be.
        if served.resource.namespaced && namespace.is_empty() {
            return OwnerState::Unknown;
        }
        let key = Key::new(served.collection.clone(), namespace, owner.name.as_str());
        let Some(found) = current(&self.api, &key) else {
            // An owner whose record was damaged has not gone, and its dependents must not go with it.
            let has_gone = self.api.store().is_whole() || self.graph.saw_go(dependent, owner);
            return if has_gone { OwnerState::Dangling } else { OwnerState::Unknown };
        };
        let found = Item::read(&key, &found);
        match found {
            found if found.uid != owner.uid => OwnerState::Dangling,
            found if found.deleting && found.foreground => OwnerState::Waiting,
            _ => OwnerState::Solid,
        }
    }

    fn plan(&mut self, work: &Work) -> Vec<Step> {
        match work {
            Work::Item(key) => {
                let Some(object) = current(&self.api, key) else { return Vec::new() };
                let item = Item::read(key, &object);
                let owners: Vec<OwnerState> =
                    item.owners.iter().map(|owner| self.owner_state(key, owner)).collect();
                if owners.contains(&OwnerState::Unknown) {
                    self.unknown.insert(key.clone());
                }
                let dependents: Vec<Item> = self
                    .graph
                    .dependents(&item.uid)
                    .filter_map(|key| current(&self.api, key).map(|object| Item::read(key, &object)))
                    .filter(|dependent| dependent.depends_on(&item.uid))
                    .collect();
                let steps = decide(&item, &owners, &dependents);
                // A dependent that is not known yet would lose its owner, and go with it.
                let lets_go = steps.iter().any(|step| matches!(step, Step::DropFinalizer { .. }));
                if lets_go && !self.has_seen(item.version.parse().unwrap_or_default()) {
                    self.unsettled.push(work.clone());
                    return Vec::new();
                }
                steps
            }
            Work::Namespace(name) => {
                let key = Key::new(Collection::new(NAMESPACES), "", name.clone());
                let Some(namespace) = current(&self.api, &key) else { return Vec::new() };
                decide_namespace(&namespace, &self.contents(name))
            }
            Work::NamespaceDefaults(namespace) => {
                vec![Step::NamespaceDefaults { namespace: namespace.to_string() }]
            }
            Work::Event(key) => {
                let Some(event) = current(&self.api, key) else { return Vec::new() };
                let expiry = expiry(&event, self.options.event_ttl);
                if expiry > Timestamp::now() {
                    self.expiries.insert((expiry, key.clone()));
                    return Vec::new();
                }
                let target = Item::read(key, &event).target();
                vec![Step::Delete { target, policy: decide::Policy::Background }]
            }
        }
    }

    /// Everything in a namespace that is served.
    fn contents(&self, namespace: &str) -> Vec<Item> {
        let registry = self.api.registry();
        let namespaced = registry.all().filter(|served| served.resource.namespaced);
        let collections: HashSet<&Collection> = namespaced.map(|served| &served.collection).collect();
        let mut contents = Vec::new();
        for collection in collections {
            for object in self.api.store().view(collection).range(Some(namespace), None) {
                let value = serde_json::from_slice(&object.bytes).unwrap_or_default();
                contents.push(Item::read(&object.key, &value));
            }
        }
        contents
    }

    /// Whether there is something to do, and enough is known to do it.
    fn can_work(&self) -> bool {
        self.is_ready() && !self.queue.is_empty()
    }

    /// Does what is next.
    async fn work(&mut self) {
        if !self.is_ready() {
            return;
        }
        let Some(work) = self.queue.pop_front() else { return };
        self.queued.remove(&work);
        let steps = self.plan(&work);
        let again = match &work {
            Work::Namespace(_) => self.take_all(&steps).await,
            _ => self.take(&steps).await,
        };
        if let Some(again) = again {
            self.later.entry(again).or_default().push(work);
        }
    }

    /// Takes steps one after the other; says when to try again if one cannot be taken, which ends it.
    async fn take(&mut self, steps: &[Step]) -> Option<Instant> {
        for step in steps {
            if let Step::Visit { key } = step {
                self.push(Work::Item(key.clone()));
                continue;
            }
            let again = again(step, perform(&self.api, step).await);
            if again.is_some() {
                return again;
            }
        }
        None
    }

    /// Takes steps of which none depends on another; says when to try again if some cannot be taken.
    async fn take_all(&self, steps: &[Step]) -> Option<Instant> {
        let mut latest = None;
        for steps in steps.chunks(TOGETHER) {
            let outcomes = join_all(steps.iter().map(|step| perform(&self.api, step))).await;
            let failed = steps.iter().zip(outcomes).filter_map(|(step, outcome)| again(step, outcome));
            latest = failed.max().max(latest);
        }
        latest
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        let retry = self.later.first_key_value().map(|(at, _)| *at);
        let expiry = self.expiries.first().map(|(at, _)| {
            let left = at.duration_since(Timestamp::now());
            now + Duration::try_from(left).unwrap_or_default()
        });
        [retry, expiry].into_iter().flatten().min().unwrap_or(now + Duration::from_secs(3600))
    }

    fn wake(&mut self) {
        let now = Instant::now();
        while let Some(due) = self.later.first_entry().filter(|entry| *entry.key() <= now) {
            for work in due.remove() {
                self.push(work);
            }
        }
        let time = Timestamp::now();
        while self.expiries.first().is_some_and(|(at, _)| *at <= time) {
            if let Some((_, key)) = self.expiries.pop_first() {
                self.push(Work::Event(key));
            }
        }
    }
}

/// When to try again after an outcome, if at all.
fn again(step: &Step, outcome: Outcome) -> Option<Instant> {
    match outcome {
        Outcome::Done => None,
        Outcome::Conflict => Some(Instant::now()),
        Outcome::Failed(status) => {
            tracing::warn!(%status, ?step, "cannot collect; will try again");
            Some(Instant::now() + RETRY)
        }
    }
}

/// Delivers everything that happens in a collection, starting with what is there.
async fn follow(store: Store, collection: Collection, sender: mpsc::Sender<Observation>) {
    loop {
        let view = store.view(&collection);
        let revision = view.revision();
        if sender.send(Observation::Listed(collection.clone(), view)).await.is_err() {
            return;
        }
        let Ok(mut watch) = store.watch(&collection, revision) else { continue };
        while let Ok(events) = watch.next().await {
            if sender.send(Observation::Changed(events)).await.is_err() {
                return;
            }
        }
    }
}

/// When an event is too old: some time after it was last seen.
fn expiry(event: &serde_json::Value, ttl: Duration) -> Timestamp {
    let time = |path: &[&str]| text(event, path).parse::<Timestamp>().ok();
    let seen = [
        time(&["metadata", "creationTimestamp"]),
        time(&["lastTimestamp"]),
        time(&["eventTime"]),
        at(event, &["series", "lastObservedTime"]).as_str().and_then(|text| text.parse().ok()),
    ];
    let last = seen.into_iter().flatten().max().unwrap_or(Timestamp::UNIX_EPOCH);
    last.checked_add(ttl).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
