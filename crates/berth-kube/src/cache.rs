//! A local copy of all objects of a kind, kept current by one watch and shared by every loop of the process.
//!
//! Guarantees: `get` never goes back in time for an object; a write made through [`crate::Cluster`] is visible here as
//! soon as the write returns; subscribers hear of every change exactly once, in order, after it is visible.

use std::collections::{HashMap, HashSet, hash_map::Entry};
use std::hash::Hash;
use std::sync::Arc;

use kube::ResourceExt;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::{
    Key,
    kind::Kind,
    objects::{Objects, Taken},
};

type Subscriber<K> = Box<dyn Fn(Option<&Arc<K>>, Option<&Arc<K>>) + Send + Sync>;

/// All objects of a kind; cheap to clone.
pub struct Cache<K> {
    shared: Arc<Shared<K>>,
}

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

struct Shared<K> {
    objects: RwLock<Objects<K>>,
    /// Held while a change is made and delivered, so that subscribers get changes in the order in which they were made.
    delivery: Mutex<Delivery<K>>,
    synced: watch::Sender<bool>,
}

struct Delivery<K> {
    subscribers: Vec<Subscriber<K>>,
    /// The version up to which the watch has delivered everything.
    seen: u64,
    /// What a list that is under way has brought so far, and the versions of what was written meanwhile; `None` if
    /// none is under way.
    listed: Option<HashMap<Key, u64>>,
    /// The newest version that the list has brought.
    newest: u64,
    /// How many lists are complete.
    lists: u64,
}

impl<K: Kind> Cache<K> {
    /// An empty cache, and not yet synced, that keeps so many objects ready to read.
    pub(crate) fn new(ready: usize) -> Self {
        let delivery =
            Mutex::new(Delivery { subscribers: Vec::new(), seen: 0, listed: None, newest: 0, lists: 0 });
        Self {
            shared: Arc::new(Shared {
                objects: RwLock::new(Objects::new(ready)),
                delivery,
                synced: watch::channel(false).0,
            }),
        }
    }

    /// The object of this key.
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.objects().get(key)
    }

    /// The object of this key in this version, unless it would have to be decoded.
    pub(crate) fn decoded(&self, key: &Key, revision: u64) -> Option<Arc<K>> {
        self.objects().decoded(key, revision)
    }

    /// The object of this name, for kinds without namespaces.
    pub fn named(&self, name: &str) -> Option<Arc<K>> {
        self.get(&Key::cluster(name))
    }

    /// All objects, in no particular order.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.objects().iter().collect()
    }

    /// The keys of all objects, in no particular order; much cheaper than the objects where these are at rest.
    pub fn keys(&self) -> Vec<Key> {
        self.objects().keys().cloned().collect()
    }

    /// Whether there is an object of this key.
    pub fn contains(&self, key: &Key) -> bool {
        self.objects().contains(key)
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.objects().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns when the first list is complete; decisions that need "there is none" wait for this.
    pub async fn synced(&self) {
        let mut synced = self.shared.synced.subscribe();
        // The sender lives as long as `self`.
        let _ = synced.wait_for(|synced| *synced).await;
    }

    /// Calls `subscriber(before, after)` for every object there is (before is `None`) and then for every change (after
    /// is `None` when the object is gone). It must be quick and must not write to Kubernetes: put a key into a queue.
    pub fn subscribe(&self, subscriber: impl Fn(Option<&Arc<K>>, Option<&Arc<K>>) + Send + Sync + 'static) {
        self.subscribe_boxed(Box::new(subscriber));
    }

    fn subscribe_boxed(&self, subscriber: Subscriber<K>) {
        let mut delivery = self.delivery();
        // One by one: all of them at once, awake, would be the most this process ever holds.
        for object in self.keys().iter().filter_map(|key| self.get(key)) {
            subscriber(None, Some(&object));
        }
        delivery.subscribers.push(subscriber);
    }

    /// Calls `subscriber` with the state after each change, or the last known one when the object is gone.
    pub fn on_change(&self, subscriber: impl Fn(&Arc<K>) + Send + Sync + 'static) {
        self.subscribe(move |before, after| {
            if let Some(object) = after.or(before) {
                subscriber(object);
            }
        });
    }

    /// An index of the objects by the values that `of` gives for each.
    pub fn index<V: Hash + Eq + Clone + Send + Sync + 'static>(
        &self,
        of: impl Fn(&K) -> Vec<V> + Send + Sync + 'static,
    ) -> Index<K, V> {
        let keys: Arc<RwLock<HashMap<V, Keys>>> = Arc::default();
        let index = Index { cache: self.clone(), keys: keys.clone() };
        self.subscribe(move |before, after| {
            let mut keys = keys.write();
            if let Some(before) = before {
                let key = Key::of(before.as_ref());
                for value in of(before) {
                    if keys.get_mut(&value).is_some_and(|found| found.remove(&key)) {
                        keys.remove(&value);
                    }
                }
            }
            if let Some(after) = after {
                for value in of(after) {
                    let key = Key::of(after.as_ref());
                    match keys.entry(value) {
                        Entry::Occupied(mut found) => found.get_mut().insert(key),
                        Entry::Vacant(place) => {
                            place.insert(Keys::One(key));
                        }
                    }
                }
            }
        });
        index
    }

    /// How many lists are complete, for whoever begins to write.
    pub(crate) fn lists(&self) -> u64 {
        self.delivery().lists
    }

    /// Takes in the answer to a write of our own, unless the watch has already brought as much or more.
    ///
    /// False if it cannot tell: a list that was completed since the write began may have come before the object or after
    /// its end, of which there is no second event.
    pub(crate) fn observe_write(&self, object: &Arc<K>, lists: u64) -> bool {
        let mut delivery = self.delivery();
        if delivery.lists != lists && !self.contains(&Key::of(object.as_ref())) {
            return false;
        }
        if revision(object.as_ref()) > delivery.seen {
            // A list under way may be older than this write, and must not take it for gone.
            if let Some(listed) = &mut delivery.listed {
                listed.entry(Key::of(object.as_ref())).or_insert(revision(object.as_ref()));
            }
            self.put(&delivery, object);
        }
        true
    }

    /// Nothing comes any more, and no subscriber is called.
    pub(crate) fn end(&self) {
        let subscribers = std::mem::take(&mut self.delivery().subscribers);
        // What they hold may be the last of another cache.
        drop(subscribers);
    }

    /// Begins a list: objects that it does not bring are gone when it ends.
    pub(crate) fn begin_list(&self) {
        let mut delivery = self.delivery();
        delivery.listed = Some(HashMap::new());
        delivery.newest = 0;
    }

    /// A list brought an object.
    pub(crate) fn listed(&self, object: &Arc<K>) {
        let mut delivery = self.delivery();
        delivery.listed.get_or_insert_default().insert(Key::of(object.as_ref()), u64::MAX);
        delivery.newest = delivery.newest.max(revision(object.as_ref()));
        self.put(&delivery, object);
    }

    /// A list is complete: what it did not bring is gone.
    pub(crate) fn end_list(&self) {
        let mut delivery = self.delivery();
        let listed = delivery.listed.take().unwrap_or_default();
        // The answer to an earlier write must not bring back what the list no longer has.
        delivery.seen = delivery.seen.max(delivery.newest);
        delivery.lists += 1;
        let newest = delivery.newest;
        let is_gone = |key: &&Key| listed.get(*key).is_none_or(|version| *version <= newest);
        let gone: Vec<Key> = self.objects().keys().filter(is_gone).cloned().collect();
        for key in gone {
            self.remove(&delivery, &key);
        }
        self.shared.synced.send_replace(true);
    }

    /// The watch brought an object.
    pub(crate) fn applied(&self, object: &Arc<K>) {
        let mut delivery = self.delivery();
        delivery.seen = delivery.seen.max(revision(object.as_ref()));
        self.put(&delivery, object);
    }

    /// The watch brought the deletion of an object.
    pub(crate) fn deleted(&self, object: &K) {
        let mut delivery = self.delivery();
        delivery.seen = delivery.seen.max(revision(object));
        self.remove(&delivery, &Key::of(object));
    }

    fn put(&self, delivery: &Delivery<K>, object: &Arc<K>) {
        let key = Key::of(object.as_ref());
        let before = {
            let mut objects = self.shared.objects.write();
            match objects.put(key, revision(object.as_ref()), object.clone()) {
                Taken::Not => return,
                Taken::First => None,
                Taken::InsteadOf(before) => Some(before),
            }
        };
        // A new object of the same name is delivered as one deletion and one creation.
        let replaced = before.as_ref().is_some_and(|before| before.uid() != object.uid());
        for subscriber in &delivery.subscribers {
            if replaced {
                subscriber(before.as_ref(), None);
                subscriber(None, Some(object));
            } else {
                subscriber(before.as_ref(), Some(object));
            }
        }
    }

    fn remove(&self, delivery: &Delivery<K>, key: &Key) {
        let before = self.shared.objects.write().remove(key);
        if let Some(before) = before {
            for subscriber in &delivery.subscribers {
                subscriber(Some(&before), None);
            }
        }
    }

    fn objects(&self) -> parking_lot::RwLockReadGuard<'_, Objects<K>> {
        self.shared.objects.read()
    }

    fn delivery(&self) -> parking_lot::MutexGuard<'_, Delivery<K>> {
        self.shared.delivery.lock()
    }
}

/// Objects of a cache by a value derived from them.
pub struct Index<K, V> {
    cache: Cache<K>,
    keys: Arc<RwLock<HashMap<V, Keys>>>,
}

/// Who has a value. Mostly it is one, and a set takes as much room as ten.
enum Keys {
    One(Key),
    Many(HashSet<Key>),
}

impl Keys {
    fn insert(&mut self, key: Key) {
        match self {
            Self::One(known) if *known == key => {}
            Self::One(known) => *self = Self::Many(HashSet::from([known.clone(), key])),
            Self::Many(keys) => {
                keys.insert(key);
            }
        }
    }

    /// Says whether nobody is left.
    fn remove(&mut self, key: &Key) -> bool {
        match self {
            Self::One(known) => known == key,
            Self::Many(keys) => {
                keys.remove(key);
                keys.is_empty()
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Key> {
        let (one, many) = match self {
            Self::One(key) => (Some(key), None),
            Self::Many(keys) => (None, Some(keys)),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

impl<K, V> Clone for Index<K, V> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), keys: self.keys.clone() }
    }
}

impl<K: Kind, V: Hash + Eq + Clone> Index<K, V> {
    /// All objects with this value.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, value: &Q) -> Vec<Arc<K>>
    where
        V: std::borrow::Borrow<Q>,
    {
        let keys = self.keys.read();
        keys.get(value).into_iter().flat_map(Keys::iter).filter_map(|key| self.cache.get(key)).collect()
    }

    /// All values that some object has.
    pub fn values(&self) -> Vec<V> {
        self.keys.read().keys().cloned().collect()
    }
}

/// Kubernetes promises that versions of one kind can be compared as integers.
pub(crate) fn revision<K: ResourceExt>(object: &K) -> u64 {
    object.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn config(version: u64) -> Arc<ConfigMap> {
        let mut config = ConfigMap::default();
        config.metadata.name = Some("a".to_owned());
        config.metadata.resource_version = Some(version.to_string());
        Arc::new(config)
    }

    #[test]
    fn the_answer_to_a_write_does_not_bring_back_what_a_list_since_did_not_have() {
        let cache = Cache::<ConfigMap>::new(usize::MAX);
        let key = Key::cluster("a");
        cache.begin_list();
        cache.end_list();
        let lists = cache.lists();
        // Written, deleted by another, and then listed.
        cache.begin_list();
        cache.end_list();
        assert!(!cache.observe_write(&config(8), lists) && !cache.contains(&key));
        // Whoever asks again knows.
        assert!(cache.observe_write(&config(8), cache.lists()) && cache.contains(&key));
        cache.begin_list();
        cache.listed(&config(8));
        cache.end_list();
        assert!(cache.observe_write(&config(9), lists), "what the list has brought is replaced");
        assert_eq!(revision(&*cache.get(&key).expect("it is there")), 9);
    }
}
