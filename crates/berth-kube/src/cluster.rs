//! A cluster as the loops of one process see it: its client, and one cache per kind.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use kube::{Client, ResourceExt};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::key::Key;
use crate::kind::Kind;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::recorder::Writers;
use crate::watch::{Sink, Watch};
use berth_core::{Backoff, names::LAST_APPLIED};

/// A cluster; cheap to clone. Clones share their caches.
#[derive(Clone)]
pub struct Cluster {
    pub(crate) client: Client,
    pub(crate) component: Arc<str>,
    caches: Arc<Caches>,
    metrics: Option<Metrics>,
    /// Whether memory counts for more than the time to read an object.
    compressed: bool,
    shutdown: CancellationToken,
    pub(crate) writers: Writers,
}

/// By kind, then by selector: `HashMap<Selector, Cache<K>>`.
type Caches = Mutex<HashMap<TypeId, Box<dyn Any + Send + Sync>>>;

/// Which objects of a kind; all if both are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Selector {
    pub(crate) fields: String,
    pub(crate) labels: String,
}

impl Cluster {
    /// A cluster behind a client; its watches end with `shutdown`.
    pub fn new(client: Client, shutdown: CancellationToken) -> Self {
        let (caches, component) = (Arc::default(), "berth".into());
        let writers = Writers::default();
        Self { client, component, caches, metrics: None, compressed: false, shutdown, writers }
    }

    /// The same cluster, whose caches made from now on keep objects that have not changed lately in little room.
    #[must_use]
    pub fn compressed(&self) -> Self {
        Self { compressed: true, ..self.clone() }
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

    /// The client that all requests of this cluster go through.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Cancelled when the loops must end.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Writes the events, and the counts of events, that wait in the recorders of this cluster, for at most `limit`. For the
    /// end of a process, after its loops: what is recorded later may be lost.
    pub async fn finish_events(&self, limit: Duration) {
        if !self.writers.finish(limit).await {
            tracing::warn!("the API server did not take all events in {limit:?}; the last ones are lost");
        }
    }

    /// The process's one cache of a kind; its watch starts with the first call.
    pub fn cache<K: Kind>(&self) -> Cache<K> {
        (K::operations().cache)(self, Selector::default())
    }

    /// The process's one cache of the objects of a kind that a field selector chooses, such as `spec.nodeName=a`.
    pub fn cache_where<K: Kind>(&self, fields: &str) -> Cache<K> {
        (K::operations().cache)(self, Selector { fields: fields.to_owned(), ..Selector::default() })
    }

    /// The process's one cache of the objects of a kind that a label selector chooses, such as `tier=front`.
    pub fn cache_labelled<K: Kind>(&self, labels: &str) -> Cache<K> {
        (K::operations().cache)(self, Selector { labels: labels.to_owned(), ..Selector::default() })
    }

    pub(crate) fn selected<K: Kind>(&self, selector: Selector) -> Cache<K> {
        let mut caches = self.caches.lock();
        let caches: &mut HashMap<Selector, Cache<K>> = caches
            .entry(TypeId::of::<K>())
            .or_insert_with(|| Box::<HashMap<Selector, Cache<K>>>::default())
            .downcast_mut()
            .expect("the caches of a kind are kept by its type");
        if let Some(cache) = caches.get(&selector) {
            return cache.clone();
        }
        let cache = self.watched("", selector.clone(), self.shutdown.clone());
        caches.insert(selector, cache.clone());
        cache
    }

    /// A cache that nobody else sees, of the objects in a namespace that a field selector chooses; it ends with `until`.
    pub fn watch<K: Kind>(&self, namespace: &str, fields: &str, until: CancellationToken) -> Cache<K> {
        let selector = Selector { fields: fields.to_owned(), ..Selector::default() };
        (K::operations().watch)(self, namespace, selector, until)
    }

    pub(crate) fn watched<K: Kind>(
        &self,
        namespace: &str,
        selector: Selector,
        until: CancellationToken,
    ) -> Cache<K> {
        let cache = Cache::new(if self.compressed { ready::<K>() } else { usize::MAX });
        let watch = Watch {
            client: self.client.clone(),
            kind: K::kind(&()),
            path: K::url_path(&(), Some(namespace).filter(|namespace| !namespace.is_empty())),
            fields: selector.fields,
            labels: selector.labels,
            sink: Arc::new(CacheSink { cache: cache.clone(), caches: self.caches.clone() }),
        };
        tokio::spawn(watch.run(until));
        cache
    }

    /// The newest state of an object that a cache has.
    pub(crate) fn known<K: Kind>(&self, key: &Key) -> Option<Arc<K>> {
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
    /// It has no selector. One that has only learns of what it knows: it is not known here whether the selector chooses
    /// the object.
    all: bool,
    lists: u64,
    cache: Cache<K>,
}

impl<K: Kind> Observer<K> {
    /// Takes in the answer; false if the object has to be read again.
    pub(crate) fn observe(&self, object: &Arc<K>) -> bool {
        let is_ours = self.all || self.cache.contains(&Key::of(object.as_ref()));
        !is_ours || self.cache.observe_write(object, self.lists)
    }
}

/// How many objects of a kind a cache that compresses keeps ready: of those kinds that have one per volume, what is being worked
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

/// Fills a cache. An object that another cache of the kind has in the same version, as it has those that this process wrote
/// itself, is not decoded again, and both hold one copy.
struct CacheSink<K> {
    cache: Cache<K>,
    caches: Arc<Caches>,
}

/// What says which version of which object it is.
#[derive(Deserialize)]
struct Version {
    metadata: VersionMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VersionMeta {
    name: String,
    #[serde(default)]
    namespace: String,
    resource_version: String,
}

impl<K: Kind> CacheSink<K> {
    fn read(&self, json: &[u8]) -> serde_json::Result<Arc<K>> {
        match self.known(json) {
            Some(object) => Ok(object),
            None => Ok(Arc::new(trimmed(K::decode(json)?))),
        }
    }

    fn known(&self, json: &[u8]) -> Option<Arc<K>> {
        let Version { metadata } = serde_json::from_slice(json).ok()?;
        let revision = metadata.resource_version.parse().ok()?;
        let key = Key::new(metadata.namespace, metadata.name);
        let caches = self.caches.lock();
        let caches = caches.get(&TypeId::of::<K>())?.downcast_ref::<HashMap<Selector, Cache<K>>>()?;
        caches.values().find_map(|cache| cache.decoded(&key, revision))
    }
}

impl<K: Kind> Sink for CacheSink<K> {
    fn begin_list(&self) {
        self.cache.begin_list();
    }

    fn listed(&self, json: &[u8]) -> serde_json::Result<()> {
        self.cache.listed(&self.read(json)?);
        Ok(())
    }

    fn end_list(&self) {
        self.cache.end_list();
    }

    fn applied(&self, json: &[u8]) -> serde_json::Result<Option<String>> {
        let object = self.read(json)?;
        self.cache.applied(&object);
        Ok(object.resource_version())
    }

    fn deleted(&self, json: &[u8]) -> serde_json::Result<Option<String>> {
        let object = K::decode(json)?;
        self.cache.deleted(&object);
        Ok(object.resource_version())
    }

    fn end(&self) {
        // Those who listen often hold other caches, and these hold their listeners: without this, none would go.
        self.cache.end();
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

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn json(name: &str, version: u32) -> Vec<u8> {
        let metadata =
            serde_json::json!({"name": name, "namespace": "n", "resourceVersion": version.to_string()});
        serde_json::json!({"metadata": metadata, "data": {"version": version.to_string()}})
            .to_string()
            .into_bytes()
    }

    #[test]
    fn caches_of_a_kind_hold_one_copy_of_a_version() {
        let (all, some) = (Cache::<ConfigMap>::new(usize::MAX), Cache::<ConfigMap>::new(usize::MAX));
        let selector = Selector { fields: "spec.nodeName=a".to_owned(), ..Selector::default() };
        let caches = HashMap::from([(Selector::default(), all.clone()), (selector, some.clone())]);
        let caches: Arc<Caches> =
            Arc::new(Mutex::new(HashMap::from([(TypeId::of::<ConfigMap>(), Box::new(caches) as _)])));
        let sink = |cache: &Cache<ConfigMap>| CacheSink { cache: cache.clone(), caches: caches.clone() };
        let (all_sink, some_sink) = (sink(&all), sink(&some));
        let key = Key::new("n", "one");
        let copies = || (all.get(&key).unwrap(), some.get(&key).unwrap());

        all_sink.applied(&json("one", 1)).unwrap();
        some_sink.applied(&json("one", 1)).unwrap();
        let (in_all, in_some) = copies();
        assert!(Arc::ptr_eq(&in_all, &in_some));

        // Another version is another object.
        some_sink.applied(&json("one", 2)).unwrap();
        let (in_all, in_some) = copies();
        assert_eq!(
            (
                in_all.data.as_ref().unwrap()["version"].as_str(),
                in_some.data.as_ref().unwrap()["version"].as_str()
            ),
            ("1", "2")
        );
        some_sink.listed(&json("two", 3)).unwrap();
        assert!(all.get(&Key::new("n", "two")).is_none());
    }

    #[test]
    fn what_is_no_object_is_an_error() {
        let cache = Cache::<ConfigMap>::new(usize::MAX);
        let sink = CacheSink { cache: cache.clone(), caches: Arc::default() };
        assert!(sink.applied(b"{").is_err());
        assert!(sink.applied(br#"{"metadata": {"name": 1}}"#).is_err());
        assert!(cache.is_empty());
    }
}
