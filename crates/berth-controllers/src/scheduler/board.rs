//! What each node already carries: pods that run there, pods that were just placed there and are not written yet, and pods
//! for which others make room there.

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

/// What a pod takes of its node.
#[derive(Debug, Clone, PartialEq)]
struct Placed {
    node: String,
    request: Amounts,
    claims: Vec<Key>,
    ports: Vec<HostPort>,
    /// It wants other pods to be elsewhere.
    is_apart: bool,
    /// Placed by us, and not seen with its node yet.
    assumed: bool,
}

impl Placed {
    fn new(pod: &Pod, node: &str, assumed: bool) -> Self {
        Self {
            node: node.to_owned(),
            request: requested(pod),
            claims: storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect(),
            ports: host_ports(pod),
            is_apart: wants_distance(pod),
            assumed,
        }
    }

    /// Whether it takes the same of the same node, be it assumed or seen.
    fn takes_the_same_as(&self, other: &Self) -> bool {
        Self { assumed: other.assumed, ..self.clone() } == *other
    }
}

/// A pod for which others make room.
#[derive(Debug)]
struct Nominated {
    priority: i32,
    placed: Placed,
}

/// A pod that was taken off its node to see what it is like without it.
#[derive(Debug)]
pub(super) struct Lifted {
    key: Key,
    placed: Placed,
}

/// A port of the node itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostPort {
    address: String,
    protocol: String,
    port: i32,
}

impl HostPort {
    /// Whether two pods cannot have these ports on one node.
    fn conflicts(&self, other: &Self) -> bool {
        let everywhere = |port: &Self| port.address == "0.0.0.0";
        self.port == other.port
            && self.protocol == other.protocol
            && (self.address == other.address || everywhere(self) || everywhere(other))
    }
}

/// The ports of its node that a pod takes.
pub(super) fn host_ports(pod: &Pod) -> Vec<HostPort> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let helpers = spec.init_containers.iter().flatten();
    let helpers = helpers.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let or = |given: Option<&String>, default: &str| {
        given.filter(|given| !given.is_empty()).map_or_else(|| default.to_owned(), Clone::clone)
    };
    spec.containers
        .iter()
        .chain(helpers)
        .flat_map(|container| container.ports.iter().flatten())
        .filter_map(|port| {
            let number = port.host_port.filter(|number| *number > 0)?;
            Some(HostPort {
                address: or(port.host_ip.as_ref(), "0.0.0.0"),
                protocol: or(port.protocol.as_ref(), "TCP"),
                port: number,
            })
        })
        .collect()
}

/// How important a pod is.
pub(super) fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// The node that a pod's status names, on which others make room for it.
pub(super) fn nominated_node(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.nominated_node_name.as_deref().filter(|node| !node.is_empty())
}

/// All nodes' loads, and what was promised to pods and claims and is not written yet.
#[derive(Debug, Default)]
pub(super) struct Board {
    loads: HashMap<String, Load>,
    placed: HashMap<Key, Placed>,
    nominated: HashMap<Key, Nominated>,
    users: HashMap<Key, HashSet<Key>>,
    /// Pods on nodes that want other pods to be elsewhere.
    apart: HashSet<Key>,
    /// Volumes chosen for claims.
    volumes: HashMap<String, Key>,
    /// Nodes chosen for claims.
    nodes: HashMap<Key, String>,
}

impl Board {
    /// Takes in the change of a pod; says whether a node carries less, or is to carry less.
    pub(super) fn observe(&mut self, key: &Key, before: Option<&Pod>, after: Option<&Pod>) -> bool {
        let Some(pod) = after.filter(|pod| !storage::is_over(pod)) else {
            let was_nominated = self.withdraw(key);
            return self.remove(key).is_some() || was_nominated;
        };
        let node = storage::node_of_pod(pod);
        if node.is_empty() {
            if pod.metadata.deletion_timestamp.is_some() {
                return self.withdraw(key);
            }
            // What the status says counts when it changes. Until it is written, what was decided counts.
            return match (before.and_then(nominated_node), nominated_node(pod)) {
                (before, after) if before == after => false,
                (_, Some(node)) => self.nominate(key, pod, node),
                (_, None) => self.withdraw(key),
            };
        }
        let placed = Placed::new(pod, node, false);
        match self.placed.get_mut(key) {
            Some(known) if known.takes_the_same_as(&placed) => {
                known.assumed = false;
                false
            }
            _ => self.place(key, placed),
        }
    }

    /// Counts a pod on a node from now on; says whether another node carries less, or is to carry less.
    pub(super) fn assume(&mut self, key: &Key, pod: &Pod, node: &str) -> bool {
        self.place(key, Placed::new(pod, node, true))
    }

    /// Takes an assumed pod off its node again; says whether it was on one.
    pub(super) fn forget(&mut self, key: &Key) -> bool {
        self.placed.get(key).is_some_and(|placed| placed.assumed) && self.remove(key).is_some()
    }

    /// Keeps room on a node for a pod, against pods that are less important; says whether room was kept on another node.
    pub(super) fn nominate(&mut self, key: &Key, pod: &Pod, node: &str) -> bool {
        if self.placed.contains_key(key) {
            return false;
        }
        let nominated = Nominated { priority: priority(pod), placed: Placed::new(pod, node, true) };
        let before = self.nominated.insert(key.clone(), nominated);
        before.is_some_and(|before| before.placed.node != node)
    }

    /// Keeps no room for a pod any more; says whether any was kept.
    pub(super) fn withdraw(&mut self, key: &Key) -> bool {
        self.nominated.remove(key).is_some()
    }

    /// Whether room is kept for any pod.
    pub(super) fn has_nominated(&self) -> bool {
        !self.nominated.is_empty()
    }

    /// Where room is kept for a pod.
    pub(super) fn nomination(&self, key: &Key) -> Option<&str> {
        self.nominated.get(key).map(|nominated| nominated.placed.node.as_str())
    }

    /// The pods for which room is kept on a node and that are less important.
    pub(super) fn nominated_below(&self, node: &str, priority: i32) -> Vec<Key> {
        let on = self.nominated.iter().filter(|(_, nominated)| nominated.placed.node == node);
        on.filter(|(_, nominated)| nominated.priority < priority).map(|(key, _)| key.clone()).collect()
    }

    /// Counts the pods for which room is kept and that are at least as important, until [`Board::lift`].
    pub(super) fn count_nominated(&mut self, except: &Key, priority: i32) -> Vec<Key> {
        let counted: Vec<(Key, Placed)> = self
            .nominated
            .iter()
            .filter(|(key, nominated)| {
                *key != except && nominated.priority >= priority && !self.placed.contains_key(key)
            })
            .map(|(key, nominated)| (key.clone(), nominated.placed.clone()))
            .collect();
        let keys = counted.iter().map(|(key, _)| key.clone()).collect();
        for (key, placed) in counted {
            self.add(&key, placed);
        }
        keys
    }

    /// Takes a pod off its node until [`Board::put_back`].
    pub(super) fn lift(&mut self, key: &Key) -> Option<Lifted> {
        self.remove(key).map(|placed| Lifted { key: key.clone(), placed })
    }

    /// Puts a pod back where it was.
    pub(super) fn put_back(&mut self, lifted: Lifted) {
        self.add(&lifted.key, lifted.placed);
    }

    /// Whether none of the ports is taken on a node.
    pub(super) fn has_ports(&self, node: &str, ports: &[HostPort]) -> bool {
        let pods = self.loads.get(node).into_iter().flat_map(|load| &load.pods);
        let mut taken = pods.filter_map(|key| self.placed.get(key)).flat_map(|placed| &placed.ports);
        ports.is_empty() || !taken.any(|taken| ports.iter().any(|port| port.conflicts(taken)))
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

    /// Says whether the pod was somewhere before, or room was kept for it on another node.
    fn place(&mut self, key: &Key, placed: Placed) -> bool {
        let moved = self.remove(key).is_some();
        let nominated = self.nominated.remove(key);
        let had_room = nominated.is_some_and(|nominated| nominated.placed.node != placed.node);
        self.add(key, placed);
        moved || had_room
    }

    fn add(&mut self, key: &Key, placed: Placed) {
        let load = self.loads.entry(placed.node.clone()).or_default();
        for (name, amount) in &placed.request {
            *load.requested.entry(name.clone()).or_default() += amount;
        }
        load.pods.insert(key.clone());
        for claim in &placed.claims {
            self.users.entry(claim.clone()).or_default().insert(key.clone());
        }
        if placed.is_apart {
            self.apart.insert(key.clone());
        }
        self.placed.insert(key.clone(), placed);
    }

    fn remove(&mut self, key: &Key) -> Option<Placed> {
        let placed = self.placed.remove(key)?;
        self.apart.remove(key);
        if let Some(load) = self.loads.get_mut(&placed.node) {
            for (name, amount) in &placed.request {
                if let Some(sum) = load.requested.get_mut(name) {
                    *sum -= amount;
                }
            }
            load.pods.remove(key);
            if load.pods.is_empty() {
                self.loads.remove(&placed.node);
            }
        }
        for claim in &placed.claims {
            if let Some(users) = self.users.get_mut(claim) {
                users.remove(key);
                if users.is_empty() {
                    self.users.remove(claim);
                }
            }
        }
        Some(placed)
    }
}
