//! Answers what the names of Services and pods are, by Kubernetes' specification of DNS, and asks the machine's own resolvers
//! for all other names.
//!
//! | name below the domain | answer |
//! |---|---|
//! | `SERVICE.NAMESPACE.svc` | the Service's address; of a headless one, those of its ready endpoints; of an ExternalName, an alias |
//! | `HOST.SERVICE.NAMESPACE.svc` | the endpoint with that host name, or with that address written with dashes |
//! | `_PORT._PROTOCOL.SERVICE.NAMESPACE.svc` | port and name (SRV), for each endpoint if the Service is headless |
//! | `1-2-3-4.NAMESPACE.pod` | that address |
//! | an address backwards, `in-addr.arpa` | the Service, or the endpoints with a host name, there (PTR) |
//!
//! Reads: Service, EndpointSlice.

mod message;
mod upstream;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Cluster, Key};
use k8s_openapi::api::core::v1::Service;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use self::message::{A, ANY, Code, Data, PTR, Question, Record, SRV, Sections, TXT};
use crate::view::{Reachable, View, address};

/// The version of the specification that is kept, which has a name of its own.
const SPECIFICATION: &str = "1.1.0";
/// How many questions are worked on at a time.
const MOST: usize = 512;
/// How long a connection may be silent.
const SILENT: Duration = Duration::from_secs(10);
const PORT: u16 = 53;
/// The largest question that is read, in bytes.
const QUESTION: usize = 4096;

/// Listens for questions; see [`Resolver::run`].
pub struct Resolver {
    datagrams: Arc<UdpSocket>,
    connections: TcpListener,
    domain: Vec<String>,
}

impl Resolver {
    /// Listens at port 53 of an address, for names that end in `domain`.
    pub async fn listen(address: Ipv4Addr, domain: &str) -> io::Result<Self> {
        let datagrams = Arc::new(UdpSocket::bind((address, PORT)).await?);
        let connections = TcpListener::bind((address, PORT)).await?;
        let domain = domain.split('.').map(str::to_owned).collect();
        Ok(Self { datagrams, connections, domain })
    }

    /// Answers until the cluster's shutdown.
    pub async fn run(self: Arc<Self>, cluster: Cluster) {
        let shutdown = cluster.shutdown().clone();
        let view = View::new(&cluster);
        // Before that a name that exists would be said not to.
        if shutdown.run_until_cancelled(view.synced()).await.is_none() {
            return;
        }
        let names = Arc::new(Names { view, domain: self.domain.clone() });
        let own = self.datagrams.local_addr().ok();
        let limit = Arc::new(Semaphore::new(MOST));
        let both = async {
            tokio::join!(
                self.serve_datagrams(&names, own, &limit),
                self.serve_connections(&names, own, &limit)
            )
        };
        shutdown.run_until_cancelled(both).await;
    }

    async fn serve_datagrams(&self, names: &Arc<Names>, own: Option<SocketAddr>, limit: &Arc<Semaphore>) {
        let mut buffer = [0; QUESTION];
        loop {
            let Ok(permit) = limit.clone().acquire_owned().await else { return };
            let Ok((length, from)) = self.datagrams.recv_from(&mut buffer).await else { continue };
            let (question, names, socket) =
                (buffer[..length].to_vec(), names.clone(), self.datagrams.clone());
            tokio::spawn(async move {
                if let Some(answer) = names.respond(&question, own, true).await {
                    let _ = socket.send_to(&answer, from).await;
                }
                drop(permit);
            });
        }
    }

    async fn serve_connections(&self, names: &Arc<Names>, own: Option<SocketAddr>, limit: &Arc<Semaphore>) {
        loop {
            let Ok(permit) = limit.clone().acquire_owned().await else { return };
            let Ok((mut stream, _)) = self.connections.accept().await else { continue };
            let names = names.clone();
            tokio::spawn(async move {
                // A client that goes away or says nonsense ends its own connection.
                while let Ok(Ok(question)) = timeout(SILENT, read(&mut stream)).await {
                    let Some(answer) = names.respond(&question, own, false).await else { break };
                    let length = u16::try_from(answer.len()).unwrap_or(0).to_be_bytes();
                    if stream.write_all(&[&length[..], &answer].concat()).await.is_err() {
                        break;
                    }
                }
                drop(permit);
            });
        }
    }
}

/// Reads one question from a connection, which has its length before it.
async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).await?;
    let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut question).await?;
    Ok(question)
}

/// What is known of a name.
#[derive(Debug, PartialEq, Eq)]
enum Lookup {
    /// Records of the kind that was asked for, or none, but the name exists.
    Records(Sections),
    /// The name stands for another one, which others know.
    Alias(String),
    NoSuchName,
    /// Not a name of here.
    Foreign,
}

struct Names {
    view: View,
    domain: Vec<String>,
}

impl Names {
    async fn respond(&self, bytes: &[u8], own: Option<SocketAddr>, udp: bool) -> Option<Vec<u8>> {
        let question = match Question::parse(bytes) {
            Ok(question) => question,
            Err(refusal) => return refusal,
        };
        let zone = self.domain.join(".");
        let authority = || vec![Record::of(zone.clone(), Data::Authority(zone.clone()))];
        let fail = || question.answer(Code::Failed, false, &Sections::default(), udp);
        Some(match self.find(&question) {
            Lookup::Records(sections) if sections.answers.is_empty() => {
                let sections = Sections { authority: authority(), ..sections };
                question.answer(Code::Fine, true, &sections, udp)
            }
            Lookup::Records(sections) => question.answer(Code::Fine, true, &sections, udp),
            Lookup::NoSuchName => {
                let sections = Sections { authority: authority(), ..Sections::default() };
                question.answer(Code::NoSuchName, true, &sections, udp)
            }
            Lookup::Alias(target) => {
                let asked = message::ask(question.id, &target, question.kind);
                // An alias is an answer also while nobody knows what it stands for.
                let found = upstream::ask(&asked, own, false).await.ok();
                let raw =
                    found.map_or((0, Vec::new()), |found| message::copied(&found, &target, question.kind));
                let answers = vec![Record::new(Data::Alias(target))];
                question.answer(Code::Fine, true, &Sections { answers, raw, ..Sections::default() }, udp)
            }
            Lookup::Foreign => match upstream::ask(bytes, own, udp).await {
                Ok(answer) => answer,
                Err(error) => {
                    tracing::debug!(name = question.name(), %error, "nobody else answers");
                    fail()
                }
            },
        })
    }

    fn find(&self, question: &Question) -> Lookup {
        let labels: Vec<&str> = question.labels.iter().map(String::as_str).collect();
        if let Some(found) = self.backwards(&labels, question.kind) {
            return found;
        }
        let domain = self.domain.iter().map(String::as_str);
        let inner = labels.len().checked_sub(self.domain.len());
        let Some(inner) = inner.filter(|inner| labels[*inner..].iter().copied().eq(domain)) else {
            return Lookup::Foreign;
        };
        match &labels[..inner] {
            [] | ["svc" | "pod"] => Lookup::Records(Sections::default()),
            ["dns-version"] => {
                records(question.kind, TXT, vec![Record::new(Data::Text(SPECIFICATION.to_owned()))])
            }
            [namespace, "svc" | "pod"] => {
                let known = self.view.has_namespace(namespace);
                if known { Lookup::Records(Sections::default()) } else { Lookup::NoSuchName }
            }
            [dashed, _, "pod"] => match dashed.replace('-', ".").parse() {
                Ok(address) => records(question.kind, A, vec![Record::new(Data::Address(address))]),
                Err(_) => Lookup::NoSuchName,
            },
            [rest @ .., service, namespace, "svc"] => match self.view.service(namespace, service) {
                Some(found) => self.of_service(rest, &found, question.kind),
                None => Lookup::NoSuchName,
            },
            _ => Lookup::NoSuchName,
        }
    }

    fn of_service(&self, rest: &[&str], service: &Service, kind: u16) -> Lookup {
        let spec = service.spec.clone().unwrap_or_default();
        if spec.type_.as_deref() == Some("ExternalName") {
            return match rest {
                [] => Lookup::Alias(spec.external_name.unwrap_or_default()),
                _ => Lookup::NoSuchName,
            };
        }
        let own = address(service);
        let key = Key::of(service);
        let ready = || -> Vec<Reachable> {
            self.view.endpoints(&key).into_iter().filter(|endpoint| endpoint.ready).collect()
        };
        match rest {
            [] => {
                let addresses = own.map_or_else(|| unique(&ready()), |own| vec![own]);
                let all: Vec<Record> =
                    addresses.into_iter().map(|one| Record::new(Data::Address(one))).collect();
                // As in a cluster, a headless Service without endpoints has no name.
                if all.is_empty() { Lookup::NoSuchName } else { records(kind, A, all) }
            }
            [host] => {
                let named: Vec<Reachable> =
                    ready().into_iter().filter(|endpoint| endpoint.label() == *host).collect();
                let all: Vec<Record> =
                    unique(&named).into_iter().map(|one| Record::new(Data::Address(one))).collect();
                if all.is_empty() { Lookup::NoSuchName } else { records(kind, A, all) }
            }
            [port, protocol] => self.ports(service, port, protocol, kind, own, &ready()),
            _ => Lookup::NoSuchName,
        }
    }

    /// The ports of a Service that are called so.
    fn ports(
        &self,
        service: &Service,
        port: &str,
        protocol: &str,
        kind: u16,
        own: Option<Ipv4Addr>,
        endpoints: &[Reachable],
    ) -> Lookup {
        let (Some(port), Some(protocol)) = (port.strip_prefix('_'), protocol.strip_prefix('_')) else {
            return Lookup::NoSuchName;
        };
        let protocol = protocol.to_uppercase();
        let key = Key::of(service);
        let base = format!("{}.{}.svc.{}", key.name, key.namespace, self.domain.join("."));
        let mut sections = Sections::default();
        let mut add = |port: u16, target: String, address: Ipv4Addr| {
            sections.answers.push(Record::new(Data::Service { port, target: target.clone() }));
            sections.additional.push(Record::of(target, Data::Address(address)));
        };
        if let Some(own) = own {
            let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_ref()).into_iter().flatten();
            let fits = ports.filter(|known| {
                known.name.as_deref() == Some(port) && known.protocol.as_deref().unwrap_or("TCP") == protocol
            });
            fits.filter_map(|known| u16::try_from(known.port).ok())
                .for_each(|port| add(port, base.clone(), own));
        } else {
            for endpoint in endpoints {
                if let Some(port) = endpoint.port(port, &protocol) {
                    add(port, format!("{}.{base}", endpoint.label()), endpoint.address);
                }
            }
        }
        match sections.answers.is_empty() {
            true => Lookup::NoSuchName,
            false if kind == SRV || kind == ANY => Lookup::Records(sections),
            false => Lookup::Records(Sections::default()),
        }
    }

    /// The name of an address; `None` if the question is another.
    fn backwards(&self, labels: &[&str], kind: u16) -> Option<Lookup> {
        let [d, c, b, a, "in-addr", "arpa"] = labels else { return None };
        let address: Ipv4Addr = [a, b, c, d].map(|part| (*part).to_owned()).join(".").parse().ok()?;
        let name = |key: &Key| format!("{}.{}.svc.{}", key.name, key.namespace, self.domain.join("."));
        let mut names: Vec<String> =
            self.view.service_at(address).iter().map(|service| name(&Key::of(service.as_ref()))).collect();
        let endpoints = self.view.endpoints_at(address);
        names.extend(endpoints.into_iter().map(|(service, host)| format!("{host}.{}", name(&service))));
        if names.is_empty() {
            return None;
        }
        let all = names.into_iter().map(|name| Record::new(Data::Pointer(name))).collect();
        Some(records(kind, PTR, all))
    }
}

/// The records if they are of the kind that was asked for; else none, of a name that exists.
fn records(asked: u16, kind: u16, answers: Vec<Record>) -> Lookup {
    let fits = asked == kind || asked == ANY;
    Lookup::Records(Sections { answers: if fits { answers } else { Vec::new() }, ..Sections::default() })
}

/// The addresses of endpoints, each once: those of several ports are in several slices.
fn unique(endpoints: &[Reachable]) -> Vec<Ipv4Addr> {
    let mut all: Vec<Ipv4Addr> = endpoints.iter().map(|endpoint| endpoint.address).collect();
    all.sort_unstable();
    all.dedup();
    all
}
