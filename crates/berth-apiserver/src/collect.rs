//! Collects what nobody needs any more: objects whose owners are gone, the contents of namespaces that go, old events.
//!
//! Follows every collection of the store and reads live objects when it decides, so it never acts on what it merely
//! remembers. Acts through the API like any client, with the object's uid and resource version as preconditions.

mod decide;
mod graph;
mod perform;

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::decide::{Item, Owner, OwnerState, Step, decide, decide_namespace};
use self::graph::Graph;
use self::perform::{Outcome, current, perform};
use crate::rest::ApiServer;
use crate::rules::read::{at, has, text};
use crate::store::{Collection, Event, EventKind, Key, Object, Store, View};

const RETRY: Duration = Duration::from_millis(500);
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
    let (sender, mut news) = mpsc::channel(64);
    let mut collector = Collector::new(api, options, sender);
    collector.follow_new();
    loop {
        let wake = collector.next_wake();
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(news) = news.recv() => collector.observe(&news),
            () = tokio::time::sleep_until(wake) => collector.wake(),
        }
        collector.work().await;
    }
    collector.followers.abort_all();
}

/// What a follower tells about its collection.
enum News {
    Listed(Collection, View),
    Changed(Vec<Arc<Event>>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Item(Key),
    Namespace(Arc<str>),
    Event(Key),
}

struct Collector {
    api: ApiServer,
    options: Options,
    sender: mpsc::Sender<News>,
    followers: tokio::task::JoinSet<()>,
    followed: HashSet<Collection>,
    graph: Graph,
    /// Namespaces that are going.
    closing: HashSet<Arc<str>>,
    queue: VecDeque<Work>,
    queued: HashSet<Work>,
    later: Vec<(Instant, Work)>,
    expiries: BTreeSet<(Timestamp, Key)>,
}

/// The little that has to be known of an object that is gone.
#[derive(Deserialize)]
struct Gone {
    metadata: GoneMetadata,
}

#[derive(Deserialize)]
struct GoneMetadata {
    #[serde(default)]
    uid: String,
}

impl Collector {
    fn new(api: ApiServer, options: Options, sender: mpsc::Sender<News>) -> Self {
        Self {
            api,
            options,
            sender,
            followers: tokio::task::JoinSet::new(),
            followed: HashSet::new(),
            graph: Graph::default(),
            closing: HashSet::new(),
            queue: VecDeque::new(),
            queued: HashSet::new(),
            later: Vec::new(),
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

    fn push(&mut self, work: Work) {
        if self.queued.insert(work.clone()) {
            self.queue.push_back(work);
        }
    }

    fn observe(&mut self, news: &News) {
        match news {
            News::Listed(collection, view) => {
                for key in self.graph.of(collection) {
                    self.graph.forget(&key);
                }
                for object in view.range(None, None) {
                    self.see(object);
                }
            }
            News::Changed(events) => {
                for event in events {
                    match event.kind {
                        EventKind::Added | EventKind::Modified => self.see(&event.object),
                        EventKind::Deleted => self.miss(&event.object),
                    }
                }
            }
        }
    }

    fn see(&mut self, object: &Object) {
        let key = &object.key;
        if key.collection.as_str() == DEFINITIONS {
            self.follow_new();
        }
        if self.closing.contains(&key.namespace) {
            self.push(Work::Namespace(key.namespace.clone()));
        }
        let has = |word: &[u8]| object.bytes.windows(word.len()).any(|window| window == word);
        let is_event = key.collection.as_str() == EVENTS;
        if !is_event && !has(b"\"ownerReferences\"") && !has(b"\"deletionTimestamp\"") {
            self.graph.forget(key);
            return;
        }
        let Ok(value) = serde_json::from_slice(&object.bytes) else { return };
        if is_event {
            self.expiries.insert((expiry(&value, self.options.event_ttl), key.clone()));
        }
        let item = Item::read(key, &value);
        self.graph.observe(&item);
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
        if self.closing.contains(&key.namespace) {
            self.push(Work::Namespace(key.namespace.clone()));
        }
        if key.collection.as_str() == NAMESPACES {
            self.closing.remove(&key.name);
        }
        if self.graph.is_empty() {
            return;
        }
        // Whoever waits in the foreground for this one has to be asked again.
        let owners = serde_json::from_slice(&object.bytes).map(|value| Item::read(key, &value).owners);
        self.graph.forget(key);
        for owner in owners.unwrap_or_default() {
            if let Some(owner) = self.owner_key(key, &owner) {
                self.push(Work::Item(owner));
            }
        }
        let Ok(gone) = serde_json::from_slice::<Gone>(&object.bytes) else { return };
        let dependents: Vec<Key> = self.graph.dependents(&gone.metadata.uid).cloned().collect();
        for dependent in dependents {
            self.push(Work::Item(dependent));
        }
    }

    /// Where an owner of an object is, if its kind is served and may own it.
    fn owner_key(&self, dependent: &Key, owner: &Owner) -> Option<Key> {
        let registry = self.api.registry();
        let served = registry.by_name(&owner.group, &owner.kind)?;
        let namespace = if served.resource.namespaced { &*dependent.namespace } else { "" };
        if served.resource.namespaced && namespace.is_empty() {
            return None;
        }
        Some(Key::new(served.collection.clone(), namespace, owner.name.as_str()))
    }

    fn owner_state(&self, dependent: &Key, owner: &Owner) -> OwnerState {
        let Some(key) = self.owner_key(dependent, owner) else { return OwnerState::Unknown };
        let Some(found) = current(&self.api, &key) else { return OwnerState::Dangling };
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
                let dependents: Vec<Item> = self
                    .graph
                    .dependents(&item.uid)
                    .filter_map(|key| current(&self.api, key).map(|object| Item::read(key, &object)))
                    .collect();
                decide(&item, &owners, &dependents)
            }
            Work::Namespace(name) => {
                let key = Key::new(Collection::new(NAMESPACES), "", name.clone());
                let Some(namespace) = current(&self.api, &key) else { return Vec::new() };
                decide_namespace(&namespace, &self.contents(name))
            }
            Work::Event(key) => {
                let Some(event) = current(&self.api, key) else { return Vec::new() };
                let expiry = expiry(&event, self.options.event_ttl);
                if expiry > Timestamp::now() {
                    self.expiries.insert((expiry, key.clone()));
                    return Vec::new();
                }
                vec![Step::Delete { key: key.clone(), policy: decide::Policy::Background }]
            }
        }
    }

    /// Everything in a namespace, with whether it is on its way out.
    fn contents(&self, namespace: &str) -> Vec<(Key, bool)> {
        let mut contents = Vec::new();
        for collection in &self.followed {
            for object in self.api.store().view(collection).range(Some(namespace), None) {
                let deleting = serde_json::from_slice(&object.bytes)
                    .is_ok_and(|value| has(&value, &["metadata", "deletionTimestamp"]));
                contents.push((object.key.clone(), deleting));
            }
        }
        contents
    }

    async fn work(&mut self) {
        while let Some(work) = self.queue.pop_front() {
            self.queued.remove(&work);
            for step in self.plan(&work) {
                if let Step::Visit { key } = &step {
                    self.push(Work::Item(key.clone()));
                    continue;
                }
                let again = match perform(&self.api, &step).await {
                    Outcome::Done => continue,
                    Outcome::Conflict => Instant::now(),
                    Outcome::Failed(status) => {
                        tracing::warn!(%status, ?step, "cannot collect; will try again");
                        Instant::now() + RETRY
                    }
                };
                self.later.push((again, work.clone()));
                break;
            }
        }
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        let retry = self.later.iter().map(|(at, _)| *at).min();
        let expiry = self.expiries.first().map(|(at, _)| {
            let left = at.duration_since(Timestamp::now());
            now + Duration::try_from(left).unwrap_or_default()
        });
        [retry, expiry].into_iter().flatten().min().unwrap_or(now + Duration::from_secs(3600))
    }

    fn wake(&mut self) {
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.later).into_iter().partition(|(at, _)| *at <= now);
        self.later = later;
        let due: Vec<(Instant, Work)> = due;
        for (_, work) in due {
            self.push(work);
        }
        let time = Timestamp::now();
        while self.expiries.first().is_some_and(|(at, _)| *at <= time) {
            if let Some((_, key)) = self.expiries.pop_first() {
                self.push(Work::Event(key));
            }
        }
    }
}

/// Tells everything that happens in a collection, starting with what is there.
async fn follow(store: Store, collection: Collection, sender: mpsc::Sender<News>) {
    loop {
        let view = store.view(&collection);
        let revision = view.revision();
        if sender.send(News::Listed(collection.clone(), view)).await.is_err() {
            return;
        }
        let Ok(mut watch) = store.watch(&collection, revision) else { continue };
        while let Ok(events) = watch.next().await {
            if sender.send(News::Changed(events)).await.is_err() {
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
