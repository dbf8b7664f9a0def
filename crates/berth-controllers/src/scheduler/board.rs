//! What each node already carries: pods that run there, and pods that were just placed there and are not written yet.

use std::collections::{HashMap, HashSet};

use berth_kube::Key;
use berth_kube::resources::{Amounts, requested};
use berth_kube::storage;
use k8s_openapi::api::core::v1::Pod;

use super::neighbours::wants_distance;

/// What one node carries.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) requested: Amounts,
    pub(super) pods: HashSet<Key>,
}

#[derive(Debug)]
struct Placed {
    node: String,
    request: Amounts,
    claims: Vec<Key>,
    /// Placed by us, and not seen with its node yet.
    assumed: bool,
}

/// All nodes' loads, and what was promised to pods and claims and is not written yet.
#[derive(Debug, Default)]
pub(super) struct Board {
    loads: HashMap<String, Load>,
    placed: HashMap<Key, Placed>,
    users: HashMap<Key, HashSet<Key>>,
    /// Pods on nodes that want other pods to be elsewhere.
    apart: HashSet<Key>,
    /// Volumes chosen for claims.
    volumes: HashMap<String, Key>,
    /// Nodes chosen for claims.
    nodes: HashMap<Key, String>,
}

impl Board {
    /// Takes in a pod as it is now; says whether a node carries less.
    pub(super) fn observe(&mut self, key: &Key, pod: Option<&Pod>) -> bool {
        let Some(pod) = pod.filter(|pod| !storage::is_over(pod)) else {
            return self.remove(key);
        };
        let node = storage::node_of_pod(pod);
        if node.is_empty() {
            return false;
        }
        match self.placed.get_mut(key) {
            Some(placed) if placed.node == node => {
                placed.assumed = false;
                false
            }
            _ => self.place(key, pod, node, false),
        }
    }

    /// Counts a pod on a node from now on.
    pub(super) fn assume(&mut self, key: &Key, pod: &Pod, node: &str) {
        self.place(key, pod, node, true);
    }

    /// Takes an assumed pod off its node again; says whether it was on one.
    pub(super) fn forget(&mut self, key: &Key) -> bool {
        self.placed.get(key).is_some_and(|placed| placed.assumed) && self.remove(key)
    }

    /// What a node carries.
    pub(super) fn load(&self, node: &str) -> Option<&Load> {
        self.loads.get(node)
    }

    /// The pods on nodes, each with its node.
    pub(super) fn placed(&self) -> impl Iterator<Item = (&Key, &str)> {
        self.placed.iter().map(|(key, placed)| (key, placed.node.as_str()))
    }

    /// Those of them that want other pods to be elsewhere.
    pub(super) fn apart(&self) -> impl Iterator<Item = (&Key, &str)> {
        self.apart.iter().filter_map(|key| Some((key, self.placed.get(key)?.node.as_str())))
    }

    /// Whether a pod other than `except` that has a node uses the claim.
    pub(super) fn in_use(&self, claim: &Key, except: &Key) -> bool {
        self.users.get(claim).is_some_and(|users| users.iter().any(|user| user != except))
    }

    /// Promises a volume to a claim until [`Board::release`].
    pub(super) fn promise_volume(&mut self, volume: &str, claim: &Key) {
        self.volumes.insert(volume.to_owned(), claim.clone());
    }

    /// Whom a volume is promised to.
    pub(super) fn promised(&self, volume: &str) -> Option<&Key> {
        self.volumes.get(volume)
    }

    /// Promises a node for a claim until [`Board::release`].
    pub(super) fn promise_node(&mut self, claim: &Key, node: &str) {
        self.nodes.insert(claim.clone(), node.to_owned());
    }

    /// The node promised for a claim.
    pub(super) fn node_promised(&self, claim: &Key) -> Option<&str> {
        self.nodes.get(claim).map(String::as_str)
    }

    /// Drops the promises to a claim: they are written, or void.
    pub(super) fn release(&mut self, claim: &Key, volume: Option<&str>) {
        self.nodes.remove(claim);
        if let Some(volume) = volume
            && self.volumes.get(volume) == Some(claim)
        {
            self.volumes.remove(volume);
        }
    }

    fn place(&mut self, key: &Key, pod: &Pod, node: &str, assumed: bool) -> bool {
        let moved = self.remove(key);
        let request = requested(pod);
        let load = self.loads.entry(node.to_owned()).or_default();
        for (name, amount) in &request {
            *load.requested.entry(name.clone()).or_default() += amount;
        }
        load.pods.insert(key.clone());
        let claims: Vec<Key> = storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect();
        for claim in &claims {
            self.users.entry(claim.clone()).or_default().insert(key.clone());
        }
        if wants_distance(pod) {
            self.apart.insert(key.clone());
        }
        self.placed.insert(key.clone(), Placed { node: node.to_owned(), request, claims, assumed });
        moved
    }

    fn remove(&mut self, key: &Key) -> bool {
        let Some(placed) = self.placed.remove(key) else { return false };
        self.apart.remove(key);
        if let Some(load) = self.loads.get_mut(&placed.node) {
            for (name, amount) in placed.request {
                if let Some(sum) = load.requested.get_mut(&name) {
                    *sum -= amount;
                }
            }
            load.pods.remove(key);
            if load.pods.is_empty() {
                self.loads.remove(&placed.node);
            }
        }
        for claim in placed.claims {
            if let Some(users) = self.users.get_mut(&claim) {
                users.remove(key);
                if users.is_empty() {
                    self.users.remove(&claim);
                }
            }
        }
        true
    }
}
