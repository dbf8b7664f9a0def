//! Who depends on whom: an index from owners to dependents, by uid.

use std::collections::{BTreeSet, HashMap};

use super::decide::{Item, Owner};
use crate::store::Key;

/// All objects that have owners, and whom they depend on.
#[derive(Debug, Default)]
pub(super) struct Graph {
    owners: HashMap<Key, Vec<Reference>>,
    dependents: HashMap<String, Dependents>,
}

/// What is remembered of a reference to an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    pub(super) uid: String,
    /// The owner cannot go before this dependent.
    pub(super) blocks: bool,
}

#[derive(Debug, Default)]
struct Dependents {
    keys: BTreeSet<Key>,
    /// Who the owner was, if it was seen to go.
    gone: Option<Former>,
}

/// An owner that is gone, as its dependents have to name it.
#[derive(Debug)]
pub(super) struct Former {
    pub(super) group: String,
    pub(super) kind: String,
    pub(super) key: Key,
}

impl Graph {
    /// Whether nobody depends on anybody.
    pub(super) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Notes an object's owners as they are now; returns whom it holds back no longer.
    pub(super) fn observe(&mut self, item: &Item) -> Vec<String> {
        let references: Vec<Reference> = item
            .owners
            .iter()
            .map(|owner| Reference { uid: owner.uid.clone(), blocks: owner.blocks })
            .collect();
        // First the new ones: what is known of an owner is forgotten with its last dependent.
        for reference in &references {
            self.dependents.entry(reference.uid.clone()).or_default().keys.insert(item.key.clone());
        }
        let previous = if references.is_empty() {
            self.owners.remove(&item.key)
        } else {
            self.owners.insert(item.key.clone(), references.clone())
        };
        let previous = previous.unwrap_or_default();
        for reference in &previous {
            if !references.iter().any(|kept| kept.uid == reference.uid) {
                self.part(&item.key, &reference.uid);
            }
        }
        let blocks = |uid: &str| references.iter().any(|reference| reference.uid == uid && reference.blocks);
        previous.into_iter().filter(|was| was.blocks && !blocks(&was.uid)).map(|was| was.uid).collect()
    }

    /// Forgets an object that is gone or has no owners any more; returns whom it holds back no longer.
    pub(super) fn forget(&mut self, key: &Key) -> Vec<String> {
        let previous = self.owners.remove(key).unwrap_or_default();
        for reference in &previous {
            self.part(key, &reference.uid);
        }
        previous.into_iter().filter(|was| was.blocks).map(|was| was.uid).collect()
    }

    fn part(&mut self, key: &Key, owner: &str) {
        if let Some(dependents) = self.dependents.get_mut(owner) {
            dependents.keys.remove(key);
            if dependents.keys.is_empty() {
                self.dependents.remove(owner);
            }
        }
    }

    /// Who depends on the object with this uid.
    pub(super) fn dependents(&self, uid: &str) -> impl Iterator<Item = &Key> {
        self.dependents.get(uid).into_iter().flat_map(|dependents| &dependents.keys)
    }

    /// Notes that the object with this uid was seen to go, as long as somebody depends on it.
    pub(super) fn bury(&mut self, uid: &str, former: Former) {
        if let Some(dependents) = self.dependents.get_mut(uid) {
            dependents.gone = Some(former);
        }
    }

    /// Whether the owner that a dependent names was seen to go.
    pub(super) fn saw_go(&self, dependent: &Key, owner: &Owner) -> bool {
        let gone = self.dependents.get(&owner.uid).and_then(|dependents| dependents.gone.as_ref());
        gone.is_some_and(|gone| {
            let in_reach = gone.key.namespace.is_empty() || gone.key.namespace == dependent.namespace;
            in_reach && *gone.key.name == *owner.name && gone.kind == owner.kind && gone.group == owner.group
        })
    }

    /// All objects that have owners.
    pub(super) fn all(&self) -> impl Iterator<Item = &Key> {
        self.owners.keys()
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
        assert_eq!(graph.all().count(), 1);
        let less = json!({"metadata": {"ownerReferences": [{"uid": "p"}]}});
        graph.observe(&Item::read(&key, &less));
        assert_eq!(graph.dependents("o").count(), 0);
        assert_eq!(graph.dependents("p").count(), 1);
        graph.forget(&key);
        assert!(graph.is_empty() && graph.dependents.is_empty());
    }

    #[test]
    fn who_is_held_back_no_longer_is_told() {
        let key = Key::new(Collection::new("things"), "ns", "a");
        let owned =
            |owners: serde_json::Value| Item::read(&key, &json!({"metadata": {"ownerReferences": owners}}));
        let blocking = |uid: &str| json!({"uid": uid, "blockOwnerDeletion": true});
        let mut graph = Graph::default();
        let nobody: [&str; 0] = [];
        assert_eq!(graph.observe(&owned(json!([blocking("o"), blocking("p"), {"uid": "q"}]))), nobody);
        assert_eq!(graph.observe(&owned(json!([{"uid": "o"}, blocking("p"), {"uid": "q"}]))), ["o"]);
        assert_eq!(graph.observe(&owned(json!([blocking("p")]))), nobody);
        assert_eq!(graph.observe(&owned(json!([]))), ["p"]);
        graph.observe(&owned(json!([blocking("o"), {"uid": "p"}])));
        assert_eq!(graph.forget(&key), ["o"]);
    }

    #[test]
    fn an_owner_that_was_seen_to_go_is_remembered_by_what_it_was() {
        let (key, former_key) = (
            Key::new(Collection::new("things"), "ns", "a"),
            Key::new(Collection::new("owners.example.com"), "ns", "o"),
        );
        let owned = json!({"metadata": {"ownerReferences":
            [{"apiVersion": "example.com/v1", "kind": "Owner", "name": "o", "uid": "u"}]}});
        let item = Item::read(&key, &owned);
        let mut graph = Graph::default();
        graph.observe(&item);
        assert!(!graph.saw_go(&key, &item.owners[0]));
        let former = Former { group: "example.com".to_owned(), kind: "Owner".to_owned(), key: former_key };
        graph.bury("u", former);
        graph.observe(&item);
        assert!(graph.saw_go(&key, &item.owners[0]));
        let elsewhere = Key::new(Collection::new("things"), "other", "a");
        assert!(!graph.saw_go(&elsewhere, &item.owners[0]));
        graph.forget(&key);
        assert!(graph.dependents.is_empty());
    }
}
