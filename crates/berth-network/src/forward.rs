//! Passes connections and datagrams to the addresses of Services on to their endpoints, in turn.
//!
//! Reads: Service, EndpointSlice. Events on Services: `NotServed` for what of them is not done here, `PortNotServed` for a port
//! that cannot be listened at.
//!
//! Nobody listens for a port without a ready endpoint. Where endpoints have the same port as their Service, the forwarder waits
//! until one of them listens: a process that listens at all addresses answers at that of the Service, too, and would find its
//! port taken if the forwarder were there first.

mod sockets;
mod transfer;

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_kube::{Backoff, Cluster, Key, Loop, Next, Recorder};
use k8s_openapi::api::core::v1::{Service, ServicePort};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use self::sockets::{Listeners, Listening};
use self::transfer::{Targets, serve_tcp, serve_udp};
use crate::view::{Reachable, View, address, service_of};

/// How long to wait before it is looked again whether endpoints listen, first and at most.
const FIRST_LOOK: Duration = Duration::from_millis(50);
const LAST_LOOK: Duration = Duration::from_secs(5);
/// How long to wait where somebody listens at all addresses, which is how it stays as a rule.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// How old what is known of the machine's sockets may be, at most.
const OLD: Duration = Duration::from_secs(1);
/// How long until a port is tried again that somebody else has.
const BUSY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Protocol {
    Tcp,
    Udp,
}

/// A port of a Service, and where its traffic goes.
#[derive(Debug, PartialEq, Eq)]
struct Forward {
    at: (Protocol, SocketAddr),
    targets: Vec<SocketAddr>,
    /// How long a client keeps its endpoint, if it does.
    affinity: Option<Duration>,
}

impl Forward {
    /// Whether an endpoint has the port that the Service has, so that it may answer at the Service's address itself.
    fn has_port_of_endpoint(&self) -> bool {
        let (_, at) = self.at;
        self.targets.iter().any(|target| target.port() == at.port())
    }
}

#[derive(Debug)]
struct Open {
    targets: Arc<Targets>,
    close: CancellationToken,
}

/// What became of an attempt to listen for a port of a Service.
#[derive(Debug)]
enum Start {
    Opened(Open),
    /// No endpoint listens yet.
    NobodyListens,
    /// Whoever listens at all addresses answers for the Service, too.
    IsAnswered,
}

/// The ports of one Service that are listened at.
type OpenPorts = HashMap<(Protocol, SocketAddr), Open>;

struct Forwarder {
    view: View,
    recorder: Recorder,
    /// Where the resolver listens itself.
    reserved: Option<Ipv4Addr>,
    open: Mutex<HashMap<Key, OpenPorts>>,
    /// How long to wait before endpoints are looked at again, by Service.
    pauses: Mutex<HashMap<Key, Duration>>,
    /// Who listened where, and when that was read.
    listeners: tokio::sync::Mutex<Option<(Instant, Arc<Listeners>)>>,
    shutdown: CancellationToken,
}

/// Runs until the cluster's shutdown. At the address `reserved` somebody else listens.
pub async fn run(cluster: Cluster, reserved: Option<Ipv4Addr>) {
    let cluster = cluster.named("service-forwarder");
    let view = View::new(&cluster);
    let (services, slices) = (view.services.clone(), view.slices.clone());
    let forwarder = Arc::new(Forwarder {
        view,
        recorder: Recorder::new(&cluster, "service-forwarder", ""),
        reserved,
        open: Mutex::default(),
        pauses: Mutex::default(),
        listeners: tokio::sync::Mutex::default(),
        shutdown: cluster.shutdown().child_token(),
    });
    let announcing = forwarder.clone();
    Loop::new(&cluster, &cluster.queue("service-forwarder", Backoff::default()))
        .subscribe(&services, move |before, after| {
            let spec = |service: Option<&Arc<Service>>| service.and_then(|service| service.spec.clone());
            if let Some(service) = after.filter(|_| spec(before) != spec(after)) {
                announcing.announce(service);
            }
            after.or(before).map(|service| Key::of(service.as_ref())).into_iter().collect()
        })
        .also(&slices, |slice| service_of(slice))
        .run(1, move |key| {
            let forwarder = forwarder.clone();
            async move { Ok::<_, berth_kube::Error>(forwarder.reconcile(&key).await) }
        })
        .await;
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // Whoever comes next is to find the ports free.
        self.shutdown.cancel();
    }
}

impl Forwarder {
    /// Says what of a Service is not done here.
    fn announce(&self, service: &Service) {
        let problems = unserved(service);
        if !problems.is_empty() {
            self.recorder.warning(service, "NotServed", problems.join("; "));
        }
    }

    async fn reconcile(&self, key: &Key) -> Next {
        let service = self.view.service(&key.namespace, &key.name);
        let wanted = match &service {
            Some(service) if service.metadata.deletion_timestamp.is_none() => {
                forwards(service, &self.view.endpoints(key), self.reserved)
            }
            _ => Vec::new(),
        };
        let listeners = self.listeners(key, &wanted).await;
        let mut all = self.open.lock();
        let open = all.entry(key.clone()).or_default();
        open.retain(|at, known| {
            let kept = wanted.iter().any(|forward| forward.at == *at);
            if !kept {
                known.close.cancel();
            }
            kept
        });
        let mut again = None;
        for forward in wanted {
            if let Some(known) = open.get(&forward.at) {
                known.targets.set(forward.targets, forward.affinity);
                continue;
            }
            let started = match &listeners {
                Ok(listeners) => self.start(&forward, listeners),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            match started {
                Ok(Start::Opened(opened)) => {
                    open.insert(forward.at, opened);
                }
                Ok(Start::NobodyListens) => {
                    let mut pauses = self.pauses.lock();
                    let pause = pauses.entry(key.clone()).or_insert(FIRST_LOOK);
                    again = Some(again.unwrap_or(*pause).min(*pause));
                    *pause = (*pause * 2).min(LAST_LOOK);
                }
                Ok(Start::IsAnswered) => again = Some(again.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN)),
                Err(error) => {
                    if let Some(service) = &service {
                        let (_, at) = forward.at;
                        let message = format!("nobody forwards what goes to {at}: {error}");
                        self.recorder.warning(service.as_ref(), "PortNotServed", message);
                    }
                    again = Some(again.unwrap_or(BUSY).min(BUSY));
                }
            }
        }
        if open.is_empty() {
            all.remove(key);
        }
        if again.is_none() {
            self.pauses.lock().remove(key);
        }
        again.map_or(Next::Done, Next::After)
    }

    /// Who listens where, if that decides about a port of the Service that is not open yet. One reading serves several Services, but
    /// it is never older than the last pause of this one.
    async fn listeners(&self, key: &Key, wanted: &[Forward]) -> io::Result<Arc<Listeners>> {
        let is_asked = {
            let all = self.open.lock();
            let open = all.get(key);
            let is_open = |forward: &Forward| open.is_some_and(|open| open.contains_key(&forward.at));
            wanted.iter().any(|forward| forward.has_port_of_endpoint() && !is_open(forward))
        };
        if !is_asked {
            return Ok(Arc::default());
        }
        // Half of the next pause is the last one.
        let old = self.pauses.lock().get(key).map_or(FIRST_LOOK, |pause| (*pause / 2).min(OLD));
        let mut known = self.listeners.lock().await;
        if let Some((_, listeners)) = known.as_ref().filter(|(at, _)| at.elapsed() < old) {
            return Ok(listeners.clone());
        }
        let listeners = tokio::task::spawn_blocking(Listeners::read).await.map_err(io::Error::other)??;
        let listeners = Arc::new(listeners);
        *known = Some((Instant::now(), listeners.clone()));
        Ok(listeners)
    }

    /// Listens for a port of a Service, unless that is for its endpoints to do first.
    fn start(&self, forward: &Forward, listeners: &Listeners) -> io::Result<Start> {
        let (protocol, at) = forward.at;
        // Whoever listens everywhere answers here, too, and needs nobody in between; but who may end, so it is looked again.
        if forward.has_port_of_endpoint() {
            let found: Vec<_> =
                forward.targets.iter().map(|target| listeners.at(protocol, *target)).collect();
            match found {
                found if found.contains(&Listening::There) => {}
                found if found.contains(&Listening::Everywhere) => return Ok(Start::IsAnswered),
                _ => return Ok(Start::NobodyListens),
            }
        }
        let targets = Arc::new(Targets::new(forward.targets.clone(), forward.affinity));
        let close = self.shutdown.child_token();
        match protocol {
            Protocol::Tcp => {
                let listener = transfer::listen(at)?;
                tokio::spawn(serve_tcp(listener, targets.clone(), close.clone()));
            }
            Protocol::Udp => {
                let socket = transfer::bind(at)?;
                tokio::spawn(serve_udp(socket, targets.clone(), close.clone()));
            }
        }
        Ok(Start::Opened(Open { targets, close }))
    }
}

/// Where to listen for a Service, and where to pass that on: to its ready endpoints, or if there are none to those that are
/// about to end.
fn forwards(service: &Service, endpoints: &[Reachable], reserved: Option<Ipv4Addr>) -> Vec<Forward> {
    let Some(address) = address(service).filter(|address| Some(*address) != reserved) else {
        return Vec::new();
    };
    let spec = service.spec.clone().unwrap_or_default();
    let timeout = spec.session_affinity_config.and_then(|config| config.client_ip?.timeout_seconds);
    let affinity = (spec.session_affinity.as_deref() == Some("ClientIP"))
        .then(|| Duration::from_secs(u64::try_from(timeout.unwrap_or(10800)).unwrap_or(10800)));
    let of_port = |port: &ServicePort| {
        let named = port.protocol.as_deref().unwrap_or("TCP");
        let protocol = match named {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            _ => return None,
        };
        let name = port.name.as_deref().unwrap_or_default();
        let targets = |wanted: fn(&Reachable) -> bool| -> Vec<SocketAddr> {
            let all = endpoints.iter().filter(|endpoint| wanted(endpoint));
            all.filter_map(|endpoint| Some((endpoint.address, endpoint.port(name, named)?).into())).collect()
        };
        let mut found = targets(|endpoint| endpoint.ready);
        if found.is_empty() {
            found = targets(|endpoint| endpoint.draining);
        }
        let at = SocketAddr::from((address, u16::try_from(port.port).ok()?));
        (!found.is_empty()).then_some(Forward { at: (protocol, at), targets: found, affinity })
    };
    spec.ports.iter().flatten().filter_map(of_port).collect()
}

/// What of a Service is not done here, each as a sentence that names its field.
fn unserved(service: &Service) -> Vec<String> {
    let spec = service.spec.clone().unwrap_or_default();
    let mut problems = Vec::new();
    match spec.type_.as_deref() {
        Some(kind @ "NodePort") => problems.push(format!(
            "type {kind}: no port of the node is opened for it; it answers at its clusterIP and by its name, on this machine"
        )),
        Some(kind @ "LoadBalancer") => problems.push(format!(
            "type {kind}: there is no load balancer; it answers at its clusterIP and by its name, on this machine"
        )),
        _ => {}
    }
    if spec.external_ips.is_some_and(|addresses| !addresses.is_empty()) {
        problems.push("externalIPs: nobody answers there".to_owned());
    }
    if spec.session_affinity.as_deref() == Some("ClientIP") {
        let why = "sessionAffinity ClientIP: clients on one machine have one address, unless they bind another, so one \
                   endpoint gets all that they send";
        problems.push(why.to_owned());
    }
    if spec.ports.iter().flatten().any(|port| port.protocol.as_deref() == Some("SCTP")) {
        problems.push("ports of protocol SCTP are not forwarded".to_owned());
    }
    if spec.internal_traffic_policy.as_deref() == Some("Local") {
        problems.push(
            "internalTrafficPolicy Local: endpoints of all nodes of this machine get traffic".to_owned(),
        );
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: &Value) -> Service {
        serde_json::from_value(json!({ "metadata": { "name": "web", "namespace": "shop" }, "spec": spec }))
            .unwrap()
    }

    fn endpoint(last: u8, ready: bool, draining: bool) -> Reachable {
        let port = json!({ "name": "http", "protocol": "TCP", "port": 8080 });
        Reachable {
            address: Ipv4Addr::new(127, 9, 8, last),
            hostname: None,
            ports: vec![serde_json::from_value(port).unwrap()],
            ready,
            draining,
        }
    }

    #[test]
    fn ready_endpoints_get_the_traffic_and_draining_ones_if_there_are_no_others() {
        let web = service(&json!({ "clusterIP": "127.9.0.5", "ports": [{ "name": "http", "port": 80 }] }));
        let targets = |endpoints: &[Reachable]| -> Vec<String> {
            let forwards = forwards(&web, endpoints, None);
            forwards.iter().flat_map(|forward| &forward.targets).map(ToString::to_string).collect()
        };
        let all = [endpoint(1, true, false), endpoint(2, false, true), endpoint(3, false, false)];
        assert_eq!(targets(&all), ["127.9.8.1:8080"]);
        assert_eq!(targets(&all[1..]), ["127.9.8.2:8080"]);
        assert_eq!(targets(&all[2..]), [] as [&str; 0]);
        assert!(forwards(&web, &all, Some(Ipv4Addr::new(127, 9, 0, 5))).is_empty());
        let headless = service(&json!({ "clusterIP": "None", "ports": [{ "name": "http", "port": 80 }] }));
        assert!(forwards(&headless, &all, None).is_empty());
    }

    #[test]
    fn what_is_not_done_is_said() {
        assert!(unserved(&service(&json!({ "type": "ClusterIP", "sessionAffinity": "None" }))).is_empty());
        for (spec, part) in [
            (json!({ "type": "NodePort" }), "type NodePort: no port of the node"),
            (json!({ "type": "LoadBalancer" }), "type LoadBalancer: there is no load balancer"),
            (json!({ "externalIPs": ["192.0.2.1"] }), "externalIPs"),
            (json!({ "sessionAffinity": "ClientIP" }), "sessionAffinity ClientIP"),
            (json!({ "ports": [{ "port": 1, "protocol": "SCTP" }] }), "SCTP"),
            (json!({ "internalTrafficPolicy": "Local" }), "internalTrafficPolicy Local"),
        ] {
            let said = unserved(&service(&spec));
            assert!(said.len() == 1 && said[0].contains(part), "{said:?}");
        }
    }
}
