//! A cluster as the loops of one process see it: its client, and one cache per kind.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;

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
    /// By kind, then by field selector: `HashMap<String, Cache<K>>`.
    caches: Arc<Mutex<HashMap<TypeId, Box<dyn Any + Send + Sync>>>>,
    shutdown: CancellationToken,
}

impl Cluster {
    /// A cluster behind a client; its watches end with `shutdown`.
    pub fn new(client: Client, shutdown: CancellationToken) -> Self {
        Self { client, component: "berth".into(), caches: Arc::default(), shutdown }
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
        self.cache_where("")
    }

    /// The process's one cache of the objects of a kind that a field selector chooses, such as `spec.nodeName=a`.
    pub fn cache_where<K: Kind>(&self, fields: &str) -> Cache<K> {
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let caches: &mut HashMap<String, Cache<K>> = caches
            .entry(TypeId::of::<K>())
            .or_insert_with(|| Box::<HashMap<String, Cache<K>>>::default())
            .downcast_mut()
            .expect("the caches of a kind are kept by its type");
        if let Some(cache) = caches.get(fields) {
            return cache.clone();
        }
        let cache = Cache::new();
        caches.insert(fields.to_owned(), cache.clone());
        let config = watcher::Config { field_selector: selector(fields), ..watcher::Config::default() };
        tokio::spawn(follow(Api::all(self.client.clone()), config, cache.clone(), self.shutdown.clone()));
        cache
    }

    /// Feeds the answer to a write into the caches of its kind; one with a selector only learns of what it knows, as
    /// nobody here can tell whether the selector chooses the object.
    pub(crate) fn observe<K: Kind>(&self, object: &Arc<K>) {
        let caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let known: Vec<(bool, Cache<K>)> = caches
            .get(&TypeId::of::<K>())
            .and_then(|caches| caches.downcast_ref::<HashMap<String, Cache<K>>>())
            .into_iter()
            .flatten()
            .map(|(fields, cache)| (fields.is_empty(), cache.clone()))
            .collect();
        drop(caches);
        for (all, cache) in known {
            if all || cache.get(&crate::Key::of(object.as_ref())).is_some() {
                cache.observe_write(object);
            }
        }
    }
}

fn selector(fields: &str) -> Option<String> {
    (!fields.is_empty()).then(|| fields.to_owned())
}

async fn follow<K: Kind>(api: Api<K>, config: watcher::Config, cache: Cache<K>, shutdown: CancellationToken) {
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
                take(&cache, event);
            }
            Some(Err(error)) => {
                let wait = Duration::from_millis(10_u64 << failures.min(10));
                failures += 1;
                tracing::warn!(kind = %K::kind(&()), error = crate::error::chain(&error), "watch interrupted; trying again in {wait:?}");
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

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
