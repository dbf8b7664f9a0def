//! Who depends on whom: an index from owners to dependents, by uid.

use std::collections::{BTreeSet, HashMap};

use super::decide::Item;
use crate::store::Key;

/// All objects that have owners, and whom they depend on.
#[derive(Debug, Default)]
pub(super) struct Graph {
    owners: HashMap<Key, Vec<String>>,
    dependents: HashMap<String, BTreeSet<Key>>,
}

impl Graph {
    /// Whether nobody depends on anybody.
    pub(super) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Notes an object's owners as they are now.
    pub(super) fn observe(&mut self, item: &Item) {
        self.forget(&item.key);
        if item.owners.is_empty() {
            return;
        }
        let owners: Vec<String> = item.owners.iter().map(|owner| owner.uid.clone()).collect();
        for owner in &owners {
            self.dependents.entry(owner.clone()).or_default().insert(item.key.clone());
        }
        self.owners.insert(item.key.clone(), owners);
    }

    /// Forgets an object that is gone or has no owners any more.
    pub(super) fn forget(&mut self, key: &Key) {
        for owner in self.owners.remove(key).unwrap_or_default() {
            if let Some(dependents) = self.dependents.get_mut(&owner) {
                dependents.remove(key);
                if dependents.is_empty() {
                    self.dependents.remove(&owner);
                }
            }
        }
    }

    /// Who depends on the object with this uid.
    pub(super) fn dependents(&self, uid: &str) -> impl Iterator<Item = &Key> {
        self.dependents.get(uid).into_iter().flatten()
    }

    /// All objects of a collection that have owners.
    pub(super) fn of(&self, collection: &crate::store::Collection) -> Vec<Key> {
        self.owners.keys().filter(|key| key.collection == *collection).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::Collection;

    #[test]
    fn dependents_are_found_by_their_owners_uid_until_they_forget_it() {
        let key = Key::new(Collection::new("things"), "ns", "a");
        let owned = json!({"metadata": {"ownerReferences": [{"uid": "o"}, {"uid": "p"}]}});
        let mut graph = Graph::default();
        graph.observe(&Item::read(&key, &owned));
        assert_eq!(graph.dependents("o").collect::<Vec<_>>(), [&key]);
        assert_eq!(graph.of(&key.collection).len(), 1);
        let less = json!({"metadata": {"ownerReferences": [{"uid": "p"}]}});
        graph.observe(&Item::read(&key, &less));
        assert_eq!(graph.dependents("o").count(), 0);
        assert_eq!(graph.dependents("p").count(), 1);
        graph.forget(&key);
        assert!(graph.is_empty() && graph.dependents.is_empty());
    }
}
