//! Services and their endpoints as the forwarder and the resolver see them: read from the caches, by name and by address.

use std::net::Ipv4Addr;
use std::sync::Arc;

use berth_core::names::SERVICE_NAME;
use berth_kube::{Cache, Cluster, Index, Key};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use kube::ResourceExt as _;

pub(crate) struct View {
    pub(crate) services: Cache<Service>,
    pub(crate) slices: Cache<EndpointSlice>,
    by_namespace: Index<Service, String>,
    by_address: Index<Service, Ipv4Addr>,
    of_service: Index<EndpointSlice, Key>,
    with_endpoint: Index<EndpointSlice, Ipv4Addr>,
}

/// An endpoint with the ports that its slice gives it.
#[derive(Debug, Clone)]
pub(crate) struct Reachable {
    pub(crate) address: Ipv4Addr,
    pub(crate) hostname: Option<String>,
    pub(crate) ports: Vec<EndpointPort>,
    pub(crate) ready: bool,
    /// It answers still, though it is about to end.
    pub(crate) draining: bool,
}

impl Reachable {
    /// What it is called below its Service: by its host name, or by its address.
    pub(crate) fn label(&self) -> String {
        self.hostname.clone().unwrap_or_else(|| self.address.to_string().replace('.', "-"))
    }

    /// Where it answers for a port of that name and protocol.
    pub(crate) fn port(&self, name: &str, protocol: &str) -> Option<u16> {
        let fits = |port: &&EndpointPort| {
            port.name.as_deref().unwrap_or_default() == name
                && port.protocol.as_deref().unwrap_or("TCP") == protocol
        };
        self.ports.iter().find(fits)?.port.and_then(|port| u16::try_from(port).ok())
    }
}

impl View {
    pub(crate) fn new(cluster: &Cluster) -> Self {
        let services: Cache<Service> = cluster.cache();
        let slices: Cache<EndpointSlice> = cluster.cache();
        Self {
            by_namespace: services.index(|service| service.namespace().into_iter().collect()),
            by_address: services.index(|service| address(service).into_iter().collect()),
            of_service: slices.index(|slice| service_of(slice).into_iter().collect()),
            with_endpoint: slices.index(|slice| addresses(slice).collect()),
            services,
            slices,
        }
    }

    pub(crate) async fn synced(&self) {
        tokio::join!(self.services.synced(), self.slices.synced());
    }

    pub(crate) fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.services.get(&Key::new(namespace, name))
    }

    pub(crate) fn service_at(&self, address: Ipv4Addr) -> Option<Arc<Service>> {
        self.by_address.get(&address).into_iter().next()
    }

    /// Whether there is a Service in a namespace.
    pub(crate) fn has_namespace(&self, namespace: &str) -> bool {
        !self.by_namespace.get(namespace).is_empty()
    }

    /// All endpoints of a Service, in the order of its slices.
    pub(crate) fn endpoints(&self, service: &Key) -> Vec<Reachable> {
        let mut slices = self.of_service.get(service);
        slices.sort_by_key(|slice| slice.name_any());
        slices.iter().flat_map(|slice| reachable(slice)).collect()
    }

    /// The names, below their Services, of the ready endpoints at an address.
    pub(crate) fn endpoints_at(&self, address: Ipv4Addr) -> Vec<(Key, String)> {
        let slices = self.with_endpoint.get(&address);
        let all = slices.iter().filter_map(|slice| Some((service_of(slice)?, reachable(slice))));
        let named = all.flat_map(|(service, all)| {
            let here =
                all.into_iter().filter(|one| one.ready && one.address == address && one.hostname.is_some());
            here.map(move |one| (service.clone(), one.label())).collect::<Vec<_>>()
        });
        named.collect()
    }
}

/// The Service that a slice belongs to.
pub(crate) fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let name = slice.labels().get(SERVICE_NAME)?;
    Some(Key::new(slice.namespace().unwrap_or_default(), name.clone()))
}

/// The address at which a Service answers, if it has one.
pub(crate) fn address(service: &Service) -> Option<Ipv4Addr> {
    service.spec.as_ref()?.cluster_ip.as_deref()?.parse().ok()
}

fn addresses(slice: &EndpointSlice) -> impl Iterator<Item = Ipv4Addr> {
    let endpoints = slice.endpoints.iter().flatten();
    endpoints.flat_map(|endpoint| &endpoint.addresses).filter_map(|address| address.parse().ok())
}

fn reachable(slice: &EndpointSlice) -> Vec<Reachable> {
    let of = |endpoint: &Endpoint| {
        let conditions = endpoint.conditions.clone().unwrap_or_default();
        let address = endpoint.addresses.first()?.parse().ok()?;
        Some(Reachable {
            address,
            hostname: endpoint.hostname.clone().filter(|name| !name.is_empty()),
            ports: slice.ports.clone().unwrap_or_default(),
            // Who does not say is ready.
            ready: conditions.ready.unwrap_or(true),
            draining: conditions.serving == Some(true) && conditions.terminating == Some(true),
        })
    };
    slice.endpoints.iter().flatten().filter_map(of).collect()
}
