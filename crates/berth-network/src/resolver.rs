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

use self::message::{A, AAAA, ANY, Code, Data, PTR, Question, Record, SRV, Sections, TXT};
use crate::accept::accept;
use crate::view::{Reachable, View, address};

/// The version of the specification that is kept, which has a name of its own.
const SPECIFICATION: &str = "1.1.0";
/// How many questions in datagrams are worked on at a time, and how many connections there may be: these keep their places
/// while they are silent, and must not take those of datagrams.
const MOST_DATAGRAMS: usize = 512;
const MOST_CONNECTIONS: usize = 64;
/// How long a connection may be silent, and how long a client may take to read an answer.
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
        let both =
            async { tokio::join!(self.serve_datagrams(&names, own), self.serve_connections(&names, own)) };
        shutdown.run_until_cancelled(both).await;
    }

    async fn serve_datagrams(&self, names: &Arc<Names>, own: Option<SocketAddr>) {
        let limit = Arc::new(Semaphore::new(MOST_DATAGRAMS));
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

    async fn serve_connections(&self, names: &Arc<Names>, own: Option<SocketAddr>) {
        let limit = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        loop {
            let Ok(permit) = limit.clone().acquire_owned().await else { return };
            let Ok((mut stream, _)) = accept(&self.connections).await else { continue };
            let names = names.clone();
            tokio::spawn(async move {
                // A client that goes away or says nonsense ends its own connection.
                while let Ok(Ok(question)) = timeout(SILENT, read(&mut stream)).await {
                    let Some(answer) = names.respond(&question, own, false).await else { break };
                    let length = u16::try_from(answer.len()).unwrap_or(0).to_be_bytes();
                    let answer = [&length[..], &answer].concat();
                    if !matches!(timeout(SILENT, stream.write_all(&answer)).await, Ok(Ok(()))) {
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
    /// The name stands for another one.
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
        Some(match self.find(&question.labels, question.kind) {
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
                // An alias is an answer also while nobody knows what it stands for.
                let sections = self.behind_alias(&question, target, own).await;
                question.answer(Code::Fine, true, &sections, udp)
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

    /// An alias, and the addresses of the name that it stands for, which may be a name of here or of others. An alias of an alias
    /// is left to the client.
    async fn behind_alias(&self, question: &Question, target: String, own: Option<SocketAddr>) -> Sections {
        let target = target.trim_end_matches('.').to_ascii_lowercase();
        let mut sections =
            Sections { answers: vec![Record::new(Data::Alias(target.clone()))], ..Sections::default() };
        let labels: Vec<String> = target.split('.').map(str::to_owned).collect();
        match self.find(&labels, question.kind) {
            Lookup::Records(found) if matches!(question.kind, A | ANY) => {
                let named = |record: Record| Record::of(target.clone(), record.data);
                sections.answers.extend(found.answers.into_iter().map(named));
            }
            // Records of other kinds may hold names, which cannot be copied from one message to another.
            Lookup::Foreign if matches!(question.kind, A | AAAA) => {
                let asked = message::ask(question.id, &target, question.kind);
                let found = match upstream::ask(&asked, own, true).await {
                    Ok(found) if !message::is_truncated(&found) => Ok(found),
                    _ => upstream::ask(&asked, own, false).await,
                };
                if let Ok(found) = found {
                    sections.raw = message::copied(&found, &target, question.kind);
                }
            }
            _ => {}
        }
        sections
    }

    fn find(&self, labels: &[String], kind: u16) -> Lookup {
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        if let Some(found) = self.backwards(&labels, kind) {
            return found;
        }
        let domain = self.domain.iter().map(String::as_str);
        let inner = labels.len().checked_sub(self.domain.len());
        let Some(inner) = inner.filter(|inner| labels[*inner..].iter().copied().eq(domain)) else {
            return Lookup::Foreign;
        };
        match &labels[..inner] {
            [] | ["svc" | "pod"] => Lookup::Records(Sections::default()),
            ["dns-version"] => records(kind, TXT, vec![Record::new(Data::Text(SPECIFICATION.to_owned()))]),
            [namespace, "svc" | "pod"] => {
                let known = self.view.has_namespace(namespace);
                if known { Lookup::Records(Sections::default()) } else { Lookup::NoSuchName }
            }
            [dashed, _, "pod"] => match dashed.replace('-', ".").parse() {
                Ok(address) => records(kind, A, vec![Record::new(Data::Address(address))]),
                Err(_) => Lookup::NoSuchName,
            },
            [rest @ .., service, namespace, "svc"] => match self.view.service(namespace, service) {
                Some(found) => self.of_service(rest, &found, kind),
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
