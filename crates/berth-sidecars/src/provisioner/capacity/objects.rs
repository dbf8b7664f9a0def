//! The capacity objects of one publisher as they are: one watch of one namespace, by labels, as its role allows no more.
//!
//! What was written here is known as soon as the write returns. A write that a list under way does not know yet may be
//! forgotten again; then a second object is made, found to be one too many, and deleted.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::goal::CapacityKey;

/// The objects, by name and by class and segment.
pub(super) struct Objects {
    state: Mutex<State>,
    synced: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    by_name: HashMap<String, Arc<CSIStorageCapacity>>,
    by_key: HashMap<CapacityKey, BTreeSet<String>>,
    /// Up to here the watch has delivered everything.
    seen: u64,
    /// What a list that is under way has brought so far.
    listed: Option<HashSet<String>>,
}

impl Objects {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), synced: watch::channel(false).0 }
    }

    /// Follows the objects that a selector chooses, for ever; `changed` hears of each that came, changed or went.
    pub(super) async fn follow(
        &self,
        api: Api<CSIStorageCapacity>,
        selector: &str,
        changed: impl Fn(&CSIStorageCapacity),
    ) {
        let config = watcher::Config::default().labels(selector);
        let mut events = std::pin::pin!(watcher(api, config).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.take(event).iter().for_each(|object| changed(object)),
                Err(error) => {
                    tracing::warn!(%error, "cannot follow CSIStorageCapacity objects; trying again");
                }
            }
        }
    }

    /// Returns when the first list is complete.
    pub(super) async fn synced(&self) {
        let mut synced = self.synced.subscribe();
        // The sender lives as long as `self`.
        let _ = synced.wait_for(|synced| *synced).await;
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<CSIStorageCapacity>> {
        self.state().by_name.get(name).cloned()
    }

    /// The objects of one class and topology segment.
    pub(super) fn at(&self, capacity_key: &CapacityKey) -> Vec<Arc<CSIStorageCapacity>> {
        let state = self.state();
        let names = state.by_key.get(capacity_key).into_iter().flatten();
        names.filter_map(|name| state.by_name.get(name).cloned()).collect()
    }

    pub(super) fn list(&self) -> Vec<Arc<CSIStorageCapacity>> {
        self.state().by_name.values().cloned().collect()
    }

    /// Takes in the answer to a write, unless the watch has already brought as much or more.
    pub(super) fn observe(&self, written: &Arc<CSIStorageCapacity>) {
        let mut state = self.state();
        if revision(written) > state.seen {
            state.put(written);
        }
    }

    /// An object is gone.
    pub(super) fn forget(&self, name: &str) {
        self.state().remove(name);
    }

    /// Takes in what the watch delivers; the objects that it was new for.
    fn take(&self, event: watcher::Event<CSIStorageCapacity>) -> Vec<Arc<CSIStorageCapacity>> {
        let mut state = self.state();
        match event {
            watcher::Event::Init => {
                state.listed = Some(HashSet::new());
                Vec::new()
            }
            watcher::Event::InitApply(object) => {
                state.listed.get_or_insert_default().insert(object.name_any());
                state.observe(object).into_iter().collect()
            }
            watcher::Event::InitDone => {
                let listed = state.listed.take().unwrap_or_default();
                let is_gone = |object: &&Arc<CSIStorageCapacity>| {
                    !listed.contains(&object.name_any()) && revision(object) <= state.seen
                };
                let gone: Vec<_> = state.by_name.values().filter(is_gone).cloned().collect();
                for object in &gone {
                    state.remove(&object.name_any());
                }
                self.synced.send_replace(true);
                gone
            }
            watcher::Event::Apply(object) => state.observe(object).into_iter().collect(),
            watcher::Event::Delete(object) => {
                state.seen = state.seen.max(revision(&object));
                state.remove(&object.name_any()).into_iter().collect()
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    fn observe(&mut self, mut object: CSIStorageCapacity) -> Option<Arc<CSIStorageCapacity>> {
        object.metadata.managed_fields = None;
        self.seen = self.seen.max(revision(&object));
        let object = Arc::new(object);
        self.put(&object).then_some(object)
    }

    fn put(&mut self, object: &Arc<CSIStorageCapacity>) -> bool {
        let name = object.name_any();
        if self.by_name.get(&name).is_some_and(|known| revision(known) >= revision(object)) {
            return false;
        }
        self.remove(&name);
        if let Some(capacity_key) = CapacityKey::of(object) {
            self.by_key.entry(capacity_key).or_default().insert(name.clone());
        }
        self.by_name.insert(name, object.clone());
        true
    }

    fn remove(&mut self, name: &str) -> Option<Arc<CSIStorageCapacity>> {
        let object = self.by_name.remove(name)?;
        if let Some(capacity_key) = CapacityKey::of(&object)
            && let Some(names) = self.by_key.get_mut(&capacity_key)
        {
            names.remove(name);
            if names.is_empty() {
                self.by_key.remove(&capacity_key);
            }
        }
        Some(object)
    }
}

/// Kubernetes promises that versions of one kind can be compared as integers.
fn revision(object: &CSIStorageCapacity) -> u64 {
    object.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
