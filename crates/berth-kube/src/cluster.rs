//! A cluster as the loops of one process see it: its client, and one cache per kind.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::metrics::Metrics;
use crate::queue::Queue;
use berth_core::{Backoff, names::LAST_APPLIED};

/// A kind of object known when the program is built.
pub trait Kind:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

/// A cluster; cheap to clone. Clones share their caches.
#[derive(Clone)]
pub struct Cluster {
    pub(crate) client: Client,
    pub(crate) component: Arc<str>,
    /// By kind, then by selector: `HashMap<Selector, Cache<K>>`.
    caches: Arc<Mutex<HashMap<TypeId, Box<dyn Any + Send + Sync>>>>,
    metrics: Option<Metrics>,
    /// Whether memory counts for more than the time to read an object.
    frugal: bool,
    shutdown: CancellationToken,
}

/// Which objects of a kind; all if both are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Selector {
    fields: String,
    labels: String,
}

impl Cluster {
    /// A cluster behind a client; its watches end with `shutdown`.
    pub fn new(client: Client, shutdown: CancellationToken) -> Self {
        let (caches, component) = (Arc::default(), "berth".into());
        Self { client, component, caches, metrics: None, frugal: false, shutdown }
    }

    /// The same cluster, whose caches made from now on keep objects that have not changed lately in little room.
    #[must_use]
    pub fn frugal(&self) -> Self {
        Self { frugal: true, ..self.clone() }
    }

    /// The same cluster, whose queues are measured.
    #[must_use]
    pub fn measured(&self, metrics: &Metrics) -> Self {
        Self { metrics: Some(metrics.clone()), ..self.clone() }
    }

    /// An empty queue, measured if the cluster's are; `name` says in metrics and in the log whose it is.
    pub fn queue<T>(&self, name: impl Into<Arc<str>>, backoff: Backoff) -> Queue<T>
    where
        T: Hash + Eq + Clone + Debug + Send + Sync + 'static,
    {
        let name = name.into();
        let meter = self.metrics.as_ref().map(|metrics| metrics.queue(&name));
        Queue::measured(name, backoff, meter)
    }

    /// The same cluster, written to in the name of `component` (the field manager).
    #[must_use]
    pub fn named(&self, component: &str) -> Self {
        Self { component: component.into(), ..self.clone() }
    }

    /// The client below.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Cancelled when the loops must end.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// The process's one cache of a kind; its watch starts with the first call.
    pub fn cache<K: Kind>(&self) -> Cache<K> {
        self.selected(Selector::default())
    }

    /// The process's one cache of the objects of a kind that a field selector chooses, such as `spec.nodeName=a`.
    pub fn cache_where<K: Kind>(&self, fields: &str) -> Cache<K> {
        self.selected(Selector { fields: fields.to_owned(), ..Selector::default() })
    }

    /// The process's one cache of the objects of a kind that a label selector chooses, such as `tier=front`.
    pub fn cache_labelled<K: Kind>(&self, labels: &str) -> Cache<K> {
        self.selected(Selector { labels: labels.to_owned(), ..Selector::default() })
    }

    fn selected<K: Kind>(&self, selector: Selector) -> Cache<K> {
        let mut caches = self.caches.lock();
        let caches: &mut HashMap<Selector, Cache<K>> = caches
            .entry(TypeId::of::<K>())
            .or_insert_with(|| Box::<HashMap<Selector, Cache<K>>>::default())
            .downcast_mut()
            .expect("the caches of a kind are kept by its type");
        if let Some(cache) = caches.get(&selector) {
            return cache.clone();
        }
        let cache = Cache::new(if self.frugal { ready::<K>() } else { usize::MAX });
        caches.insert(selector.clone(), cache.clone());
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        let config = watcher::Config {
            field_selector: given(selector.fields),
            label_selector: given(selector.labels),
            ..watcher::Config::default()
        };
        let (api, shutdown, followed) = (Api::all(self.client.clone()), self.shutdown.clone(), cache.clone());
        tokio::spawn(async move {
            follow(api, config, &followed, shutdown).await;
            // Those who listen often hold other caches, and these hold their listeners: without this, none would go.
            followed.end();
        });
        cache
    }

    /// The newest state of an object that a cache has.
    pub(crate) fn known<K: Kind>(&self, key: &crate::Key) -> Option<Arc<K>> {
        let caches = self.caches_of::<K>();
        let found = caches.iter().filter_map(|(_, cache)| cache.get(key));
        found.max_by_key(|object| crate::cache::revision(object.as_ref()))
    }

    fn caches_of<K: Kind>(&self) -> Vec<(Selector, Cache<K>)> {
        let caches = self.caches.lock();
        let caches = caches
            .get(&TypeId::of::<K>())
            .and_then(|caches| caches.downcast_ref::<HashMap<Selector, Cache<K>>>());
        caches.into_iter().flatten().map(|(selector, cache)| (selector.clone(), cache.clone())).collect()
    }

    /// Those who will want to know the answer to a write that is about to begin.
    pub(crate) fn observers<K: Kind>(&self) -> Vec<Observer<K>> {
        let caches = self.caches_of::<K>().into_iter();
        let observer = |(selector, cache): (Selector, Cache<K>)| Observer {
            all: selector == Selector::default(),
            lists: cache.lists(),
            cache,
        };
        caches.map(observer).collect()
    }
}

/// A cache, as it was when a write began.
pub(crate) struct Observer<K> {
    /// It has no selector. One that has only learns of what it knows: nobody here can tell whether the selector chooses
    /// the object.
    all: bool,
    lists: u64,
    cache: Cache<K>,
}

impl<K: Kind> Observer<K> {
    /// Takes in the answer; false if that takes another look at the object.
    pub(crate) fn observe(&self, object: &Arc<K>) -> bool {
        let is_ours = self.all || self.cache.contains(&crate::Key::of(object.as_ref()));
        !is_ours || self.cache.observe_write(object, self.lists)
    }
}

/// How many objects of a kind a frugal cache keeps ready: of those kinds that have one per volume, what is being worked
/// on; of the others, which loops read all at once, all.
fn ready<K: Kind>() -> usize {
    const PER_VOLUME: [&str; 6] = [
        "PersistentVolume",
        "PersistentVolumeClaim",
        "Pod",
        "VolumeAttachment",
        "VolumeSnapshot",
        "VolumeSnapshotContent",
    ];
    if PER_VOLUME.contains(&&*K::kind(&())) { 128 } else { usize::MAX }
}

async fn follow<K: Kind>(
    api: Api<K>,
    config: watcher::Config,
    cache: &Cache<K>,
    shutdown: CancellationToken,
) {
    let mut events = std::pin::pin!(watcher(api, config));
    let mut failures = 0_u32;
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            None => return,
            Some(Ok(event)) => {
                failures = 0;
                take(cache, event);
            }
            Some(Err(error)) => {
                let wait = Duration::from_millis(10_u64 << failures.min(10));
                failures += 1;
                tracing::warn!(kind = %K::kind(&()), error = berth_core::error_chain(&error), "watch interrupted; trying again in {wait:?}");
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = tokio::time::sleep(wait) => {}
                }
            }
        }
    }
}

fn take<K: Kind>(cache: &Cache<K>, event: watcher::Event<K>) {
    match event {
        watcher::Event::Init => cache.begin_list(),
        watcher::Event::InitApply(object) => cache.listed(&Arc::new(trimmed(object))),
        watcher::Event::InitDone => cache.end_list(),
        watcher::Event::Apply(object) => cache.applied(&Arc::new(trimmed(object))),
        watcher::Event::Delete(object) => cache.deleted(&object),
    }
}

/// Half of an object's bytes say who set which field, and what kubectl applied last; no loop reads that.
pub(crate) fn trimmed<K: Kind>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    if object.annotations().contains_key(LAST_APPLIED) {
        object.annotations_mut().remove(LAST_APPLIED);
    }
    object
}
