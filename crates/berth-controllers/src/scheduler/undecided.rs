//! The pods that are to be decided about, the most important one first.
//!
//! Workers take pods from a queue side by side and in no order that could be relied on. So a worker that is to decide about its
//! pod decides first about every pod here that is more important.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use berth_kube::Key;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::board::priority;

/// Pods to decide about, in the order of their importance: by priority, then the oldest first.
#[derive(Debug, Default)]
pub(super) struct Undecided {
    order: BTreeSet<Rank>,
    by_pod: HashMap<Key, Rank>,
}

type Rank = (Reverse<i32>, Option<Timestamp>, Key);

impl Undecided {
    /// Adds a pod, in its place among the others.
    pub(super) fn insert(&mut self, key: &Key, pod: &Pod) {
        self.remove(key);
        let created = pod.metadata.creation_timestamp.as_ref().map(|created| created.0);
        let rank = (Reverse(priority(pod)), created, key.clone());
        self.order.insert(rank.clone());
        self.by_pod.insert(key.clone(), rank);
    }

    /// Removes a pod, which need not be among them.
    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(rank) = self.by_pod.remove(key) {
            self.order.remove(&rank);
        }
    }

    /// Whether a pod is among them.
    pub(super) fn contains(&self, key: &Key) -> bool {
        self.by_pod.contains_key(key)
    }

    /// The most important pod of those that are admitted.
    pub(super) fn first(&self, admitted: impl Fn(&Key) -> bool) -> Option<&Key> {
        self.order.iter().map(|(_, _, key)| key).find(|key| admitted(key))
    }
}
