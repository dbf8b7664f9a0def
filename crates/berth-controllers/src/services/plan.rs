//! Which endpoints a Service has, and which slices hold them: pure functions.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use berth_core::names::{
    ENDPOINT_SLICE_CONTROLLER, ENDPOINT_SLICE_MANAGED_BY, ENDPOINTS_MANAGED_BY, HEADLESS_SERVICE,
    OVER_CAPACITY, SERVICE_NAME, SKIP_MIRROR,
};
use berth_kube::storage::{is_over, node_of_pod};
use k8s_openapi::api::core::v1::{
    EndpointAddress, EndpointPort as CorePort, EndpointSubset, Endpoints, ObjectReference, Pod, Service,
    ServicePort,
};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

const IPV4: &str = "IPv4";
const IPV6: &str = "IPv6";
/// The value of the label by which the controller of Endpoints says that it keeps them.
const ENDPOINTS_CONTROLLER: &str = "endpoint-controller";
/// How many endpoints a slice holds, and how many addresses Endpoints.
const PER_SLICE: usize = 100;
const PER_ENDPOINTS: usize = 1000;

/// Endpoints by the family of their addresses and the ports that they have in common: as text for the order, then as they are.
pub(super) type EndpointsByPorts = BTreeMap<(&'static str, String), (Vec<EndpointPort>, Vec<Endpoint>)>;

/// A write of a slice.
#[derive(Debug)]
pub(super) enum Step {
    Create(Box<EndpointSlice>),
    Update(Arc<EndpointSlice>, Box<EndpointSlice>),
    Delete(Arc<EndpointSlice>),
}

/// Whether a Service says by a selector which pods answer.
pub(super) fn has_selector(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    let external = spec.and_then(|spec| spec.type_.as_deref()) == Some("ExternalName");
    !external && spec.and_then(|spec| spec.selector.as_ref()).is_some_and(|selector| !selector.is_empty())
}

/// Whether a Service selects a pod.
pub(super) fn is_selected(service: &Service, pod: &Pod) -> bool {
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    has_selector(service)
        && selector.into_iter().flatten().all(|(name, value)| pod.labels().get(name) == Some(value))
}

/// What of a pod says whether and where traffic goes to it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Traffic {
    address: Option<String>,
    ready: bool,
    terminating: bool,
    over: bool,
}

/// Reads from a pod whether and where traffic goes to it.
pub(super) fn traffic(pod: &Pod) -> Traffic {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    Traffic {
        address: status.and_then(|status| status.pod_ip.clone()).filter(|address| !address.is_empty()),
        ready: conditions
            .into_iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        over: is_over(pod),
    }
}

/// The endpoints of a Service: the pods that it selects, by the ports that they answer at.
pub(super) fn selected(service: &Service, pods: &[Arc<Pod>]) -> EndpointsByPorts {
    let mut wanted = EndpointsByPorts::new();
    let publishes = publishes_not_ready(service);
    for pod in pods.iter().filter(|pod| is_selected(service, pod)) {
        let traffic = traffic(pod);
        let Some(address) = traffic.address.filter(|_| !traffic.over) else { continue };
        // Services have the one family here.
        if family(&address) != Some(IPV4) {
            continue;
        }
        let ports = ports(service, pod);
        let endpoint = Endpoint {
            addresses: vec![address],
            conditions: Some(EndpointConditions {
                ready: Some(publishes || traffic.ready && !traffic.terminating),
                serving: Some(traffic.ready),
                terminating: Some(traffic.terminating),
            }),
            hostname: hostname(service, pod),
            node_name: Some(node_of_pod(pod).to_owned()).filter(|node| !node.is_empty()),
            target_ref: Some(ObjectReference {
                kind: Some("Pod".to_owned()),
                namespace: pod.namespace(),
                name: pod.metadata.name.clone(),
                uid: pod.uid(),
                ..ObjectReference::default()
            }),
            ..Endpoint::default()
        };
        add(&mut wanted, ports, endpoint);
    }
    sorted(wanted)
}

/// The endpoints that somebody wrote for a Service without a selector.
pub(super) fn mirrored(service: &Service, endpoints: Option<&Endpoints>) -> EndpointsByPorts {
    let mut wanted = EndpointsByPorts::new();
    let external = service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) == Some("ExternalName");
    let skipped =
        |endpoints: &&Endpoints| endpoints.labels().get(SKIP_MIRROR).is_none_or(|skip| skip != "true");
    let Some(endpoints) = endpoints.filter(skipped).filter(|_| !external) else { return wanted };
    for subset in endpoints.subsets.iter().flatten() {
        let ports: Vec<EndpointPort> = subset.ports.iter().flatten().map(of_core).collect();
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let others = subset.not_ready_addresses.iter().flatten().map(|address| (address, false));
        for (address, ready) in ready.chain(others) {
            let endpoint = Endpoint {
                addresses: vec![address.ip.clone()],
                conditions: Some(EndpointConditions { ready: Some(ready), ..EndpointConditions::default() }),
                hostname: address.hostname.clone(),
                node_name: address.node_name.clone(),
                target_ref: address.target_ref.clone(),
                ..Endpoint::default()
            };
            add(&mut wanted, ports.clone(), endpoint);
        }
    }
    sorted(wanted)
}

/// The writes after which the slices that `manager` keeps for a Service hold what is wanted, and nothing else.
pub(super) fn plan(
    service: &Service,
    wanted: &EndpointsByPorts,
    slices: &[Arc<EndpointSlice>],
    manager: &str,
    of: Option<&Endpoints>,
) -> Vec<Step> {
    let own = |slice: &&Arc<EndpointSlice>| {
        slice.labels().get(ENDPOINT_SLICE_MANAGED_BY).is_some_and(|known| known == manager)
    };
    let mut left: Vec<&Arc<EndpointSlice>> = slices.iter().filter(own).collect();
    // What was deleted already only waits for its finalizers.
    left.retain(|slice| slice.metadata.deletion_timestamp.is_none());
    left.sort_by_key(|slice| slice.name_any());
    let mut steps = Vec::new();
    let empty = EndpointsByPorts::from([((IPV4, String::new()), (Vec::new(), Vec::new()))]);
    // As upstream, a Service without endpoints has one slice that says so.
    let wanted = if wanted.is_empty() && manager == ENDPOINT_SLICE_CONTROLLER { &empty } else { wanted };
    for ((family, _), (ports, endpoints)) in wanted {
        let chunks = endpoints.chunks(PER_SLICE).map(<[Endpoint]>::to_vec);
        let none = endpoints.is_empty().then(Vec::new);
        for endpoints in chunks.chain(none) {
            let slice = EndpointSlice {
                address_type: (*family).to_owned(),
                endpoints: Some(endpoints),
                ports: Some(ports.clone()).filter(|ports| !ports.is_empty()),
                ..slice(service, manager, of)
            };
            let fits = |known: &&Arc<EndpointSlice>| {
                known.address_type == *family && known.ports.clone().unwrap_or_default() == *ports
            };
            // One that held nothing can hold anything of its family, which cannot be changed.
            let holds_nothing =
                |known: &&Arc<EndpointSlice>| known.address_type == *family && held(known).is_empty();
            let found = left.iter().position(fits).or_else(|| left.iter().position(holds_nothing));
            match found.map(|index| left.remove(index)) {
                None => steps.push(Step::Create(Box::new(slice))),
                Some(known) if is_same(known, &slice) => {}
                Some(known) => steps.push(Step::Update(known.clone(), Box::new(slice))),
            }
        }
    }
    steps.extend(left.into_iter().map(|slice| Step::Delete(slice.clone())));
    steps
}

/// The Endpoints of a Service with a selector.
pub(super) fn endpoints(service: &Service, wanted: &EndpointsByPorts) -> Endpoints {
    let (mut subsets, mut room, mut whole) = (Vec::new(), PER_ENDPOINTS, true);
    for (ports, endpoints) in wanted.values() {
        let (mut ready, mut others) = (Vec::new(), Vec::new());
        for endpoint in endpoints {
            let conditions = endpoint.conditions.clone().unwrap_or_default();
            let is_ready = conditions.ready == Some(true);
            if conditions.terminating == Some(true) && !is_ready {
                continue;
            }
            if room == 0 {
                whole = false;
                continue;
            }
            room -= 1;
            let address = EndpointAddress {
                ip: endpoint.addresses.first().cloned().unwrap_or_default(),
                hostname: endpoint.hostname.clone(),
                node_name: endpoint.node_name.clone(),
                target_ref: endpoint.target_ref.clone(),
            };
            if is_ready { &mut ready } else { &mut others }.push(address);
        }
        if ready.is_empty() && others.is_empty() {
            continue;
        }
        let list = |list: Vec<EndpointAddress>| Some(list).filter(|list| !list.is_empty());
        subsets.push(EndpointSubset {
            addresses: list(ready),
            not_ready_addresses: list(others),
            ports: Some(ports.iter().map(to_core).collect::<Vec<_>>()).filter(|ports| !ports.is_empty()),
        });
    }
    let mut labels = labels(service);
    labels.insert(ENDPOINTS_MANAGED_BY.to_owned(), ENDPOINTS_CONTROLLER.to_owned());
    let truncated = (OVER_CAPACITY.to_owned(), "truncated".to_owned());
    Endpoints {
        metadata: ObjectMeta {
            name: service.metadata.name.clone(),
            namespace: service.namespace(),
            labels: Some(labels),
            annotations: (!whole).then(|| std::iter::once(truncated).collect()),
            ..ObjectMeta::default()
        },
        subsets: Some(subsets).filter(|subsets| !subsets.is_empty()),
    }
}

/// Whether the controller keeps these Endpoints, and not a person.
pub(super) fn is_of_controller(endpoints: &Endpoints) -> bool {
    endpoints.labels().get(ENDPOINTS_MANAGED_BY).is_some_and(|manager| manager == ENDPOINTS_CONTROLLER)
}

fn publishes_not_ready(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.publish_not_ready_addresses) == Some(true)
}

/// The name of a pod below that of its Service, if it says that it wants one there.
fn hostname(service: &Service, pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let wants = spec.subdomain.is_some() && spec.subdomain == service.metadata.name;
    spec.hostname.clone().filter(|hostname| wants && !hostname.is_empty())
}

/// The ports of a Service as a pod has them; one that the pod does not name is left out.
fn ports(service: &Service, pod: &Pod) -> Vec<EndpointPort> {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_ref()).into_iter().flatten();
    let found = ports.filter_map(|port| {
        Some(EndpointPort {
            name: Some(port.name.clone().unwrap_or_default()),
            protocol: Some(protocol(port).to_owned()),
            port: Some(target(port, pod)?),
            app_protocol: port.app_protocol.clone(),
        })
    });
    found.collect()
}

fn protocol(port: &ServicePort) -> &str {
    port.protocol.as_deref().unwrap_or("TCP")
}

fn target(port: &ServicePort, pod: &Pod) -> Option<i32> {
    let name = match &port.target_port {
        None | Some(IntOrString::Int(0)) => return Some(port.port),
        Some(IntOrString::Int(number)) => return Some(*number),
        Some(IntOrString::String(name)) => name,
    };
    let spec = pod.spec.as_ref()?;
    let is_sidecar = |container: &&k8s_openapi::api::core::v1::Container| {
        container.restart_policy.as_deref() == Some("Always")
    };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten().filter(is_sidecar));
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let fits = |known: &&k8s_openapi::api::core::v1::ContainerPort| {
        known.name.as_ref() == Some(name) && known.protocol.as_deref().unwrap_or("TCP") == protocol(port)
    };
    ports.find(fits).map(|known| known.container_port)
}

/// The family of an address; none if it is not one.
fn family(address: &str) -> Option<&'static str> {
    Some(if address.parse::<IpAddr>().ok()?.is_ipv4() { IPV4 } else { IPV6 })
}

fn add(wanted: &mut EndpointsByPorts, ports: Vec<EndpointPort>, endpoint: Endpoint) {
    let Some(family) = endpoint.addresses.first().and_then(|address| family(address)) else { return };
    let key = (family, format!("{ports:?}"));
    wanted.entry(key).or_insert_with(|| (ports, Vec::new())).1.push(endpoint);
}

fn sorted(mut wanted: EndpointsByPorts) -> EndpointsByPorts {
    for (_, endpoints) in wanted.values_mut() {
        endpoints.sort_by(|one, other| {
            let name = |endpoint: &Endpoint| endpoint.target_ref.as_ref().and_then(|pod| pod.name.clone());
            name(one).cmp(&name(other)).then_with(|| one.addresses.cmp(&other.addresses))
        });
    }
    wanted
}

fn labels(service: &Service) -> BTreeMap<String, String> {
    let mut labels = service.labels().clone();
    let headless = service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None");
    if headless {
        labels.insert(HEADLESS_SERVICE.to_owned(), String::new());
    }
    labels
}

/// A slice for a Service without what it holds.
fn slice(service: &Service, manager: &str, of: Option<&Endpoints>) -> EndpointSlice {
    let name = service.name_any();
    let mut labels = of.map_or_else(|| labels(service), |endpoints| endpoints.labels().clone());
    labels.insert(SERVICE_NAME.to_owned(), name.clone());
    labels.insert(ENDPOINT_SLICE_MANAGED_BY.to_owned(), manager.to_owned());
    let (kind, owner) = match of {
        Some(endpoints) => ("Endpoints", &endpoints.metadata),
        None => ("Service", &service.metadata),
    };
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{name}-")),
            namespace: service.namespace(),
            labels: Some(labels),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: kind.to_owned(),
                name: owner.name.clone().unwrap_or_default(),
                uid: owner.uid.clone().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        },
        ..EndpointSlice::default()
    }
}

/// Whether a slice holds what it is to hold.
fn is_same(known: &EndpointSlice, wanted: &EndpointSlice) -> bool {
    held(known) == held(wanted)
        && known.ports.clone().unwrap_or_default() == wanted.ports.clone().unwrap_or_default()
        && known.metadata.labels == wanted.metadata.labels
}

/// The endpoints that a slice holds.
fn held(slice: &EndpointSlice) -> &[Endpoint] {
    slice.endpoints.as_deref().unwrap_or_default()
}

fn of_core(port: &CorePort) -> EndpointPort {
    EndpointPort {
        name: Some(port.name.clone().unwrap_or_default()),
        protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".to_owned())),
        port: Some(port.port),
        app_protocol: port.app_protocol.clone(),
    }
}

fn to_core(port: &EndpointPort) -> CorePort {
    CorePort {
        name: port.name.clone().filter(|name| !name.is_empty()),
        protocol: port.protocol.clone(),
        port: port.port.unwrap_or_default(),
        app_protocol: port.app_protocol.clone(),
    }
}
