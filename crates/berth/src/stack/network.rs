//! The addresses and names of Services and pods of `berth up`: a block of loopback addresses, the forwarder, the resolver, and
//! the Services of the API server and of the resolver itself.
//!
//! The block is that of the Service `kubernetes`, so it is kept with the objects, also by a backup. If another machine of this
//! host has it by now, all Services move to another one.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use berth_apiserver::rest::{self, ServiceRange};
use berth_apiserver::store::Store;
use berth_core::names::CLUSTER_SERVICE_NAME;
use berth_kube::Cluster;
use berth_network::block::Block;
use berth_network::forward;
use berth_network::resolver::Resolver;
use berth_node::{PodAddresses, PodNetwork};
use k8s_openapi::api::core::v1::{Endpoints, Service};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
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
            rest::move_services(store, known, block.api())
                .await
                .context("move the Services to other addresses")?;
        }
        Ok(Self { block: Some(block) })
    }

    /// The addresses that Services get.
    pub(super) fn service_range(&self) -> Option<ServiceRange> {
        let (network, prefix) = self.block.as_ref()?.services();
        Some(ServiceRange { network, prefix })
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
        ensure_services(client, &block, api).await.context("make the Services of the machine")?;
        let (first, last) = block.pods();
        let roots: Vec<_> = nodes::roots(data_dir).into_iter().map(|root| root.join(NODE)).collect();
        let mut tasks = Vec::new();
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

/// The Services by which pods find the API server and the resolver; and an address for each that was stored without one, by an
/// older version.
async fn ensure_services(client: &Client, block: &Block, api: SocketAddr) -> Result<(), kube::Error> {
    let listed = Api::<Service>::all(client.clone()).list(&kube::api::ListParams::default()).await?;
    let own = |namespace: &str, name: &str| {
        let there = |service: &Service| {
            service.namespace().as_deref() == Some(namespace) && service.name_any() == name
        };
        listed.items.iter().any(there)
    };
    // Those of the machine first, as they want certain addresses.
    if !own("default", API) {
        let ports = json!([{ "name": "https", "port": 443, "targetPort": api.port() }]);
        let labels = json!({ "component": "apiserver", "provider": "kubernetes" });
        create(client, "default", API, labels, block.api().into(), ports).await?;
    }
    if !own("kube-system", RESOLVER) {
        let ports = json!([
            { "name": "dns", "port": 53, "protocol": "UDP" }, { "name": "dns-tcp", "port": 53, "protocol": "TCP" },
        ]);
        let labels = json!({ "k8s-app": RESOLVER, (CLUSTER_SERVICE_NAME): "CoreDNS" });
        create(client, "kube-system", RESOLVER, labels, block.resolver().into(), ports).await?;
    }
    // Who listens everywhere is found on the loopback address, too.
    let ip = if api.ip().is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { api.ip() };
    let endpoints = json!({
        "apiVersion": "v1", "kind": "Endpoints", "metadata": { "name": API },
        "subsets": [{ "addresses": [{ "ip": ip }], "ports": [{ "name": "https", "port": api.port(), "protocol": "TCP" }] }],
    });
    let all = Api::<Endpoints>::namespaced(client.clone(), "default");
    all.patch(API, &PatchParams::apply("berth").force(), &Patch::Apply(endpoints)).await?;
    let bare = listed.items.iter().filter(|service| {
        let spec = service.spec.clone().unwrap_or_default();
        spec.cluster_ip.is_none_or(|address| address.is_empty())
            && spec.type_.as_deref() != Some("ExternalName")
    });
    for service in bare {
        let all = Api::<Service>::namespaced(client.clone(), &service.namespace().unwrap_or_default());
        let name = service.name_any();
        if let Err(error) = all.patch(&name, &PatchParams::default(), &Patch::Merge(json!({}))).await {
            tracing::warn!(service = name, %error, "a Service stays without an address");
        }
    }
    Ok(())
}

async fn create(
    client: &Client,
    namespace: &str,
    name: &str,
    labels: Value,
    address: IpAddr,
    ports: Value,
) -> Result<(), kube::Error> {
    let object = json!({
        "metadata": { "name": name, "labels": labels },
        "spec": { "clusterIP": address, "ports": ports },
    });
    let object: Service = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    match Api::namespaced(client.clone(), namespace).create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(error),
    }
}
