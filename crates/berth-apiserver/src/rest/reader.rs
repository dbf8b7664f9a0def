//! What rules may read of other objects.

use serde_json::Value;

use super::ApiServer;
use super::registry::Registry;
use crate::rules::Reader;
use crate::store::Key;

/// Reads other objects from the store.
pub(crate) struct StoreReader<'a> {
    pub(crate) api: &'a ApiServer,
    pub(crate) registry: &'a Registry,
}

impl Reader for StoreReader<'_> {
    fn get(&self, group: &str, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let served = self.registry.by_name(group, resource)?;
        let object = self.api.inner.store.get(&Key::new(served.collection.clone(), namespace, name))?;
        serde_json::from_slice(&object.bytes).ok()
    }

    fn list(&self, group: &str, resource: &str) -> Vec<Value> {
        let Some(served) = self.registry.by_name(group, resource) else { return Vec::new() };
        let view = self.api.inner.store.view(&served.collection);
        view.range(None, None).filter_map(|object| serde_json::from_slice(&object.bytes).ok()).collect()
    }
}
