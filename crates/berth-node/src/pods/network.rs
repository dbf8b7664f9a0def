//! The network of pods: an address on the loopback interface for each, and the files and variables by which the programs in it
//! find others by name.
//!
//! Pods have the network of the machine. What they get for themselves is an address of the loopback network (127.0.0.0/8), which
//! needs no interface and is gone with whoever listens on it. It is kept in the pod's directory from before its first container
//! starts until nothing of the pod is left, so that a restart of this process changes no address.

mod files;
mod links;

use std::collections::HashMap;
use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use berth_runtime::Mount;
use k8s_openapi::api::core::v1::{Container, Pod, Service};
use parking_lot::Mutex;

pub(super) use self::files::identity;
use self::files::{hosts, name_services, resolver};
pub(super) use self::links::service_links;
use super::launch::shown;
use crate::layout::Layout;

/// The file in a pod's directory that has its address.
const ADDRESS: &str = "address";
const HOSTS: &str = "etc-hosts";
const RESOLVER: &str = "resolv.conf";
const NAME_SERVICES: &str = "nsswitch.conf";

/// What pods have of a network besides the machine's.
#[derive(Debug, Clone)]
pub struct PodNetwork {
    /// Gives pods their addresses; they have the node's if `None`.
    pub addresses: Option<PodAddresses>,
    /// Who knows the names of Services and pods, if anybody does.
    pub nameserver: Option<IpAddr>,
    /// What those names end in.
    pub domain: String,
}

impl Default for PodNetwork {
    fn default() -> Self {
        Self { addresses: None, nameserver: None, domain: "cluster.local".to_owned() }
    }
}

/// The addresses of the pods of all nodes of a machine; cheap to clone.
#[derive(Debug, Clone)]
pub struct PodAddresses(Arc<Mutex<Pool>>);

#[derive(Debug)]
struct Pool {
    range: RangeInclusive<u32>,
    /// Where the search for a free address begins: one that was just given back is not given again at once.
    next: u32,
    by_pod: HashMap<String, Ipv4Addr>,
    by_address: HashMap<Ipv4Addr, String>,
}

impl PodAddresses {
    /// The addresses from `first` to `last`, without those that pods in the directories of these nodes have.
    pub fn open(first: Ipv4Addr, last: Ipv4Addr, nodes: &[PathBuf]) -> Self {
        let range = u32::from(first)..=u32::from(last);
        let mut pool =
            Pool { next: *range.start(), range, by_pod: HashMap::new(), by_address: HashMap::new() };
        for layout in nodes.iter().map(Layout::new) {
            for uid in crate::volumes::names(&layout.pods()) {
                let kept = std::fs::read_to_string(layout.pod(&uid).join(ADDRESS)).ok();
                if let Some(address) = kept.and_then(|text| text.trim().parse().ok()) {
                    pool.take(&uid, address);
                }
            }
        }
        Self(Arc::new(Mutex::new(pool)))
    }

    /// The address of a pod, if it has one.
    fn of(&self, uid: &str) -> Option<Ipv4Addr> {
        self.0.lock().by_pod.get(uid).copied()
    }

    /// The address of a pod, from now on if it has none yet; `None` if all are taken.
    fn assign(&self, uid: &str) -> Option<Ipv4Addr> {
        let mut pool = self.0.lock();
        if let Some(address) = pool.by_pod.get(uid) {
            return Some(*address);
        }
        let (first, last) = (*pool.range.start(), *pool.range.end());
        let mut all = (pool.next..=last).chain(first..pool.next).map(Ipv4Addr::from);
        let address = all.find(|address| !pool.by_address.contains_key(address))?;
        pool.next = u32::from(address).saturating_add(1).clamp(first, last);
        pool.take(uid, address);
        Some(address)
    }

    fn release(&self, uid: &str) {
        let mut pool = self.0.lock();
        if let Some(address) = pool.by_pod.remove(uid) {
            pool.by_address.remove(&address);
        }
    }
}

impl Pool {
    fn take(&mut self, uid: &str, address: Ipv4Addr) {
        self.by_pod.insert(uid.to_owned(), address);
        self.by_address.insert(address, uid.to_owned());
    }
}

impl PodNetwork {
    /// The address of a pod; the node's, if it has none of its own.
    pub(super) fn address(&self, uid: &str, node: IpAddr) -> IpAddr {
        let own = self.addresses.as_ref().and_then(|addresses| addresses.of(uid));
        own.map_or(node, IpAddr::V4)
    }

    /// The address of a pod that may not have got its own yet, or not any more: `None` then.
    pub(super) fn given_address(&self, pod: &Pod, node: IpAddr) -> Option<IpAddr> {
        match self.addresses.as_ref().filter(|_| !uses_host_network(pod)) {
            Some(addresses) => addresses.of(pod.metadata.uid.as_deref().unwrap_or_default()).map(IpAddr::V4),
            None => Some(node),
        }
    }

    /// Nothing of a pod is left that could use its address.
    pub(super) fn release(&self, uid: &str) {
        if let Some(addresses) = &self.addresses {
            addresses.release(uid);
        }
    }

    /// Gives a pod its address, and writes the files by which its programs find names, before one of them starts.
    pub(super) fn prepare(&self, layout: &Layout, pod: &Pod, node: IpAddr) -> Result<(), String> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let identity = identity(pod, &self.domain)?;
        let directory = layout.pod(uid);
        let failed = |what: &Path, error: &std::io::Error| format!("write {}: {error}", what.display());
        std::fs::create_dir_all(&directory).map_err(|error| failed(&directory, &error))?;
        let keep = |name: &str, text: &str| {
            let path = directory.join(name);
            // Containers that run see the file itself, so it is not replaced by another one.
            let is_there = std::fs::read_to_string(&path).is_ok_and(|there| there == text);
            let write = || {
                std::fs::write(&path, text)?;
                // Whatever the umask says: every user in a container reads them.
                std::fs::set_permissions(&path, Permissions::from_mode(0o644))
            };
            let written = if is_there { Ok(()) } else { write() };
            written.map_err(|error| failed(&path, &error))
        };
        if let Some(addresses) = self.addresses.as_ref().filter(|_| !uses_host_network(pod)) {
            let address = addresses.assign(uid).ok_or("no address is left for the pod")?;
            keep(ADDRESS, &address.to_string())?;
        }
        let machine = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        keep(HOSTS, &hosts(pod, &identity, self.address(uid, node), &machine("/etc/hosts")))?;
        keep(RESOLVER, &resolver(pod, self, &machine("/etc/resolv.conf")))?;
        if let Some(text) = name_services(&machine("/etc/nsswitch.conf")) {
            keep(NAME_SERVICES, &text)?;
        }
        Ok(())
    }
}

/// The mounts of these files in a container, but where it has something else there.
pub(super) fn mounts(layout: &Layout, pod: &Pod, container: &Container) -> Vec<Mount> {
    let directory = layout.pod(pod.metadata.uid.as_deref().unwrap_or_default());
    let files =
        [(HOSTS, "/etc/hosts"), (RESOLVER, "/etc/resolv.conf"), (NAME_SERVICES, "/etc/nsswitch.conf")];
    let own = |target: &str| {
        let mut mounts = container.volume_mounts.iter().flatten();
        mounts.any(|mount| Path::new("/").join(&mount.mount_path) == Path::new(target))
    };
    let files = files.into_iter().filter(|(_, target)| !own(target));
    let files = files.map(|(name, target)| (directory.join(name), target)).filter(|(path, _)| path.exists());
    files.map(|(path, target)| Mount { read_only: false, ..shown(&path, Path::new(target)) }).collect()
}

/// Whether a pod asks for the network of its node, and so has its address.
pub(super) fn uses_host_network(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true))
}

/// Whether a pod asks for names that nobody here knows, as there is no resolver for them.
pub(super) fn misses_nameserver(network: &PodNetwork, pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let named = spec.and_then(|spec| spec.subdomain.as_deref()).is_some_and(|name| !name.is_empty());
    network.nameserver.is_none() && named
}

/// The Services of a pod's namespace, of which it gets variables.
pub(super) fn services_of(services: &berth_kube::Cache<Service>, pod: &Pod) -> Vec<Arc<Service>> {
    let mut all = services.list();
    all.retain(|service| service.metadata.namespace == pod.metadata.namespace);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_one_pods_until_nothing_of_it_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::new(directory.path());
        std::fs::create_dir_all(layout.pod("old")).unwrap();
        std::fs::write(layout.pod("old").join(ADDRESS), "127.9.0.1").unwrap();
        let (first, last) = (Ipv4Addr::new(127, 9, 0, 1), Ipv4Addr::new(127, 9, 0, 3));
        let addresses = PodAddresses::open(first, last, &[directory.path().to_owned()]);
        assert_eq!(addresses.of("old"), Some(first));
        let two = addresses.assign("a");
        assert_eq!((two, addresses.assign("a")), (Some(Ipv4Addr::new(127, 9, 0, 2)), two));
        addresses.release("a");
        assert_eq!(addresses.assign("b"), Some(last), "one that was given back is not given again at once");
        assert_eq!(addresses.assign("c"), two);
        assert_eq!(addresses.assign("d"), None);
    }

    #[test]
    fn a_pod_has_no_address_before_it_gets_its_own_and_after() {
        let pod = |host: bool| -> Pod {
            let spec = serde_json::json!({ "hostNetwork": host, "containers": [] });
            serde_json::from_value(serde_json::json!({ "metadata": { "uid": "a" }, "spec": spec })).unwrap()
        };
        let node = IpAddr::from([192, 0, 2, 1]);
        let (first, last) = (Ipv4Addr::new(127, 9, 0, 1), Ipv4Addr::new(127, 9, 0, 3));
        let addresses = PodAddresses::open(first, last, &[]);
        let network = PodNetwork { addresses: Some(addresses.clone()), ..PodNetwork::default() };
        assert_eq!(network.given_address(&pod(false), node), None);
        assert_eq!(network.given_address(&pod(true), node), Some(node));
        addresses.assign("a");
        assert_eq!(network.given_address(&pod(false), node), Some(first.into()));
        network.release("a");
        assert_eq!(network.given_address(&pod(false), node), None);
        assert_eq!(PodNetwork::default().given_address(&pod(false), node), Some(node));
    }

    #[test]
    fn every_user_reads_the_files_by_which_names_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::new(directory.path());
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": { "uid": "a", "name": "web", "namespace": "default" }, "spec": { "containers": [] },
        }))
        .unwrap();
        // What a write under a stricter umask makes.
        std::fs::create_dir_all(layout.pod("a")).unwrap();
        for name in [HOSTS, RESOLVER] {
            std::fs::write(layout.pod("a").join(name), "").unwrap();
            std::fs::set_permissions(layout.pod("a").join(name), Permissions::from_mode(0o600)).unwrap();
        }
        PodNetwork::default().prepare(&layout, &pod, IpAddr::from([192, 0, 2, 1])).unwrap();
        for name in [HOSTS, RESOLVER] {
            let mode = std::fs::metadata(layout.pod("a").join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o644, "{name}");
        }
    }
}
