//! The addresses and names of Services and pods of `berth up`: a block of loopback addresses, the forwarder, the resolver, and
//! the Services of the API server and of the resolver itself.
//!
//! The block is that of the Service `kubernetes`, so it is kept with the objects, also by a backup. If another machine of this
//! host has it by now, all Services move to another one.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use berth_apiserver::rest::{self, ServiceRange};
use berth_apiserver::store::Store;
use berth_core::names::CLUSTER_SERVICE_NAME;
use berth_kube::{Backoff, Cluster, Key, Loop, Next};
use berth_network::block::Block;
use berth_network::forward;
use berth_network::resolver::Resolver;
use berth_node::{PodAddresses, PodNetwork};
use k8s_openapi::api::core::v1::{
    EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Service, ServicePort, ServiceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::task::JoinHandle;

use super::{NODE, nodes, role};

/// What the names of Services end in.
const DOMAIN: &str = "cluster.local";
const API: &str = "kubernetes";
const RESOLVER: &str = "kube-dns";

/// What there is of a network; nothing if there are no addresses.
pub(super) struct Network {
    block: Option<Block>,
}

impl Network {
    /// Takes the addresses that the Services in the store have, or free ones.
    pub(super) async fn take(
        data_dir: &Path,
        store: &Store,
        progress: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<Self> {
        let known = rest::api_service_address(store);
        let block = match Block::take(data_dir, known) {
            Ok(block) => block,
            Err(error) => {
                progress(&format!("Services and pods get no addresses of their own: {error:#}"));
                return Ok(Self { block: None });
            }
        };
        if let Some(known) = known.filter(|known| *known != block.api()) {
            tracing::warn!(from = %known, to = %block.api(), "the addresses of the Services are others' by now; all move");
            rest::move_services(store, range(&block))
                .await
                .context("move the Services to other addresses")?;
        }
        Ok(Self { block: Some(block) })
    }

    /// The addresses that Services get.
    pub(super) fn service_range(&self) -> Option<ServiceRange> {
        self.block.as_ref().map(range)
    }

    /// Starts to forward and to resolve; returns what pods get of it.
    pub(super) async fn start(
        self,
        cluster: &Cluster,
        client: &Client,
        api: SocketAddr,
        data_dir: &Path,
        progress: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<(PodNetwork, Vec<JoinHandle<()>>)> {
        let Some(block) = self.block else { return Ok((PodNetwork::default(), Vec::new())) };
        let services = Arc::new(MachineServices::new(cluster, client, &block, api));
        // What a damaged record or a full disk keeps from being written is tried again later.
        if let Err(error) = services.ensure_all().await {
            progress(&format!(
                "pods may not find the API server or names: make the Services of the machine: {error}"
            ));
        }
        let (first, last) = block.pods();
        let roots: Vec<_> = nodes::roots(data_dir).into_iter().map(|root| root.join(NODE)).collect();
        let mut tasks = vec![role("machine-services", cluster.shutdown(), move || services.clone().run())];
        let own = block.resolver();
        let nameserver = match Resolver::listen(own, DOMAIN).await {
            Ok(resolver) => {
                let (resolver, cluster) = (Arc::new(resolver), cluster.clone());
                let shutdown = cluster.shutdown().clone();
                tasks.push(role("resolver", &shutdown, move || resolver.clone().run(cluster.clone())));
                Some(IpAddr::V4(own))
            }
            Err(error) => {
                let why = "pods have the machine's name servers, and no names of Services";
                progress(&format!("{why}: listen on {own}:53: {error}"));
                None
            }
        };
        let (forwarded, shutdown) = (cluster.clone(), cluster.shutdown().clone());
        // The block is held as long as somebody forwards.
        let block = Arc::new(block);
        tasks.push(role("service-forwarder", &shutdown, move || {
            let (cluster, block) = (forwarded.clone(), block.clone());
            async move { forward::run(cluster, Some(block.resolver())).await }
        }));
        let addresses = Some(PodAddresses::open(first, last, &roots));
        Ok((PodNetwork { addresses, nameserver, domain: DOMAIN.to_owned() }, tasks))
    }
}

fn range(block: &Block) -> ServiceRange {
    let (network, prefix) = block.services();
    ServiceRange { network, prefix }
}

/// The Services by which pods find the API server and the resolver: they are there as long as the machine runs, also after a
/// `kubectl delete service --all`. And an address for each Service that was stored without one, by an older version.
struct MachineServices {
    cluster: Cluster,
    client: Client,
    api_address: Ipv4Addr,
    resolver_address: Ipv4Addr,
    /// Where the API server listens.
    api: SocketAddr,
}

impl MachineServices {
    fn new(cluster: &Cluster, client: &Client, block: &Block, api: SocketAddr) -> Self {
        Self {
            cluster: cluster.named("machine-services"),
            client: client.clone(),
            api_address: block.api(),
            resolver_address: block.resolver(),
            api,
        }
    }

    async fn run(self: Arc<Self>) {
        let (services, endpoints) = (self.cluster.cache::<Service>(), self.cluster.cache::<Endpoints>());
        let queue = self.cluster.queue("machine-services", Backoff::default());
        // Also what went, or was never made, before anybody watched.
        queue.add(Key::new("default", API));
        queue.add(Key::new("kube-system", RESOLVER));
        Loop::new(&self.cluster, &queue)
            .also(&services, |service| {
                Some(Key::of(service.as_ref())).filter(|key| is_own(key) || is_bare(service))
            })
            .also(&endpoints, |endpoints| Some(Key::of(endpoints.as_ref())).filter(is_own))
            .run(1, |key| {
                let (this, service) = (self.clone(), services.get(&key));
                async move {
                    match service {
                        None => this.ensure(&key).await?,
                        Some(service) if is_bare(&service) => this.give_address(&key).await?,
                        // Its Endpoints may have gone with a predecessor.
                        Some(_) if key.name == API => this.ensure_endpoints().await?,
                        Some(_) => {}
                    }
                    Ok::<_, berth_kube::Error>(Next::Done)
                }
            })
            .await;
    }

    /// Both Services, before anything else asks for their addresses.
    async fn ensure_all(&self) -> berth_kube::Result<()> {
        let made = self.ensure(&Key::new("default", API)).await;
        self.ensure(&Key::new("kube-system", RESOLVER)).await.and(made)
    }

    async fn ensure(&self, key: &Key) -> berth_kube::Result<()> {
        let (labels, address, ports) = match key.name.as_str() {
            API => {
                let target = i32::from(self.api.port());
                let labels = [("component", "apiserver"), ("provider", "kubernetes")];
                (labels, self.api_address, vec![service_port("https", "TCP", 443, target)])
            }
            RESOLVER => {
                let ports = vec![service_port("dns", "UDP", 53, 53), service_port("dns-tcp", "TCP", 53, 53)];
                ([("k8s-app", RESOLVER), (CLUSTER_SERVICE_NAME, "CoreDNS")], self.resolver_address, ports)
            }
            _ => return Ok(()),
        };
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let service = Service {
            metadata: ObjectMeta { labels: Some(labels.into()), ..metadata(key) },
            spec: Some(ServiceSpec {
                cluster_ip: Some(address.to_string()),
                ports: Some(ports),
                ..ServiceSpec::default()
            }),
            ..Service::default()
        };
        match self.cluster.create(&service).await {
            Err(error) if error.is_already_exists() => {}
            created => drop(created?),
        }
        if key.name == API { self.ensure_endpoints().await } else { Ok(()) }
    }

    async fn ensure_endpoints(&self) -> berth_kube::Result<()> {
        let key = Key::new("default", API);
        // Who listens everywhere is found on the loopback address, too.
        let ip = self.api.ip();
        let ip = if ip.is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { ip };
        let port = EndpointPort {
            name: Some("https".to_owned()),
            port: self.api.port().into(),
            protocol: Some("TCP".to_owned()),
            ..EndpointPort::default()
        };
        let subset = EndpointSubset {
            addresses: Some(vec![EndpointAddress { ip: ip.to_string(), ..EndpointAddress::default() }]),
            ports: Some(vec![port]),
            ..EndpointSubset::default()
        };
        let wanted = Endpoints { metadata: metadata(&key), subsets: Some(vec![subset]) };
        match self.cluster.fetch::<Endpoints>(&key).await? {
            None => self.cluster.create(&wanted).await.map(drop),
            Some(known) => {
                let change = |known: &mut Endpoints| known.subsets.clone_from(&wanted.subsets);
                self.cluster.edit(known.as_ref(), change).await.map(drop)
            }
        }
    }

    /// Any write of a Service gives it the address that it lacks.
    async fn give_address(&self, key: &Key) -> berth_kube::Result<()> {
        let all = Api::<Service>::namespaced(self.client.clone(), &key.namespace);
        match all.patch(&key.name, &PatchParams::default(), &Patch::Merge(json!({}))).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(berth_kube::Error::Request {
                action: "patch",
                kind: "Service".to_owned(),
                name: key.to_string(),
                source: Box::new(error),
            }),
            Ok(_) => Ok(()),
        }
    }
}

fn metadata(key: &Key) -> ObjectMeta {
    let (namespace, name) = (Some(key.namespace.clone()), Some(key.name.clone()));
    ObjectMeta { namespace, name, ..ObjectMeta::default() }
}

fn service_port(name: &str, protocol: &str, port: i32, target: i32) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        protocol: Some(protocol.to_owned()),
        port,
        target_port: Some(IntOrString::Int(target)),
        ..ServicePort::default()
    }
}

/// Whether it is the name of one of the machine's own Services.
fn is_own(key: &Key) -> bool {
    matches!((key.namespace.as_str(), key.name.as_str()), ("default", API) | ("kube-system", RESOLVER))
}

/// Whether a Service was stored without the address that it is to have.
fn is_bare(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    let external = spec.and_then(|spec| spec.type_.as_deref()) == Some("ExternalName");
    let address = spec.and_then(|spec| spec.cluster_ip.as_deref());
    !external && service.metadata.deletion_timestamp.is_none() && address.is_none_or(str::is_empty)
}
