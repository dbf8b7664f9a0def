//! The servers that are measured, each in a process of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_apiserver::auth::Credentials;
use berth_apiserver::collect;
use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::server::Server;
use berth_apiserver::store::{self, Store};
use tokio_util::sync::CancellationToken;

use super::Outcome;
use super::http::Endpoint;

const PATIENCE: Duration = Duration::from_secs(120);
const AGAIN: Duration = Duration::from_millis(2);

/// Serves from a data directory until killed: what the measured process does.
pub(crate) async fn serve(directory: &Path, port: u16) -> Outcome<()> {
    let (store, _) = Store::open(&directory.join("store"), store::Options::default())?;
    let credentials = Arc::new(Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now())?);
    let shutdown = CancellationToken::new();
    let options =
        Options { credentials: Some(credentials.clone()), shutdown: shutdown.clone(), ..Options::default() };
    let api = ApiServer::new(store, options);
    api.bootstrap().await.map_err(|failure| format!("{failure:?}"))?;
    tokio::spawn(collect::run(api.clone(), collect::Options::default(), shutdown.clone()));
    let server = Server::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), api, credentials, None).await?;
    server.run(shutdown).await;
    Ok(())
}

/// A process that ends with its owner, and its log.
struct Process(Child, PathBuf);

impl Process {
    #[expect(clippy::disallowed_methods, reason = "what is measured is the whole process")]
    fn start(program: &Path, arguments: &[String], log: &Path) -> Outcome<Self> {
        let file = std::fs::File::create(log)?;
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .map_err(|error| format!("start {}: {error}", program.display()))?;
        Ok(Self(child, log.to_owned()))
    }

    fn resident(&self) -> Outcome<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.ok_or("no VmRSS")?.trim().trim_end_matches(" kB").parse::<u64>()?;
        Ok(kilobytes * 1024)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that nobody listens on, as far as anybody can say.
fn free_port() -> Outcome<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Waits until the server says that it is ready.
async fn until_ready(process: &mut Process, endpoint: &Endpoint) -> Outcome<()> {
    let ready = async {
        loop {
            if let Some(status) = process.0.try_wait()? {
                let log = std::fs::read_to_string(&process.1)?;
                return Err(format!("the server ended with {status}: {log}").into());
            }
            if let Ok(mut connection) = endpoint.connect().await
                && let Ok(reply) = connection.get("/readyz").await
                && reply.status == 200
            {
                return Ok(());
            }
            tokio::time::sleep(AGAIN).await;
        }
    };
    tokio::time::timeout(PATIENCE, ready).await.map_err(|_| "the server is not ready")?
}

/// A running Berth API server; its process ends when this is dropped.
pub(crate) struct Berth {
    process: Process,
    pub(crate) endpoint: Endpoint,
    pub(crate) ready: Duration,
}

impl Berth {
    pub(crate) async fn start(directory: &Path) -> Outcome<Self> {
        // Made here, so that the client knows them; to make them takes the server a few milliseconds.
        let credentials = Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now())?;
        let port = free_port()?;
        let endpoint = Endpoint::new(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), &credentials)?;
        let arguments = ["serve".to_owned(), directory.display().to_string(), port.to_string()];
        let begin = Instant::now();
        let mut process = Process::start(&std::env::current_exe()?, &arguments, &directory.join("log"))?;
        until_ready(&mut process, &endpoint).await?;
        Ok(Self { process, endpoint, ready: begin.elapsed() })
    }

    pub(crate) fn resident(&self) -> Outcome<u64> {
        self.process.resident()
    }
}

/// kube-apiserver and its etcd, which syncs to the disk.
pub(crate) struct Kube {
    server: Process,
    etcd: Process,
    pub(crate) endpoint: Endpoint,
    pub(crate) ready: Duration,
}

impl Kube {
    pub(crate) async fn start(directory: &Path, binaries: &Path) -> Outcome<Self> {
        let pki = directory.join("pki");
        let credentials = Credentials::ensure(&pki, jiff::Timestamp::now())?;
        let [port, client_port, peer_port] = [free_port()?, free_port()?, free_port()?];
        let (client, peer) =
            (format!("http://127.0.0.1:{client_port}"), format!("http://127.0.0.1:{peer_port}"));
        let etcd = [
            "--name=bench".to_owned(),
            format!("--data-dir={}", directory.join("etcd").display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=bench={peer}"),
            "--log-level=warn".to_owned(),
        ];
        let etcd = Process::start(&binaries.join("etcd"), &etcd, &directory.join("etcd.log"))?;
        until_open(client_port).await?;
        let endpoint = Endpoint::new(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), &credentials)?;
        let arguments = Self::arguments(&pki, port, &client);
        let begin = Instant::now();
        let log = directory.join("kube-apiserver.log");
        let mut server = Process::start(&binaries.join("kube-apiserver"), &arguments, &log)?;
        until_ready(&mut server, &endpoint).await?;
        Ok(Self { server, etcd, endpoint, ready: begin.elapsed() })
    }

    fn arguments(pki: &Path, port: u16, etcd: &str) -> Vec<String> {
        let file = |name: &str| pki.join(name).display().to_string();
        vec![
            format!("--etcd-servers={etcd}"),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            "--endpoint-reconciler-type=none".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
            "--authorization-mode=Node,RBAC".to_owned(),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--client-ca-file={}", file("ca.crt")),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            // It takes a public key from a certificate, but not from a private key of this form.
            format!("--service-account-key-file={}", file("server.crt")),
            format!("--service-account-signing-key-file={}", file("server.key")),
        ]
    }

    /// The memory of the server, and of etcd.
    pub(crate) fn resident(&self) -> Outcome<(u64, u64)> {
        Ok((self.server.resident()?, self.etcd.resident()?))
    }
}

async fn until_open(port: u16) -> Outcome<()> {
    let open = async {
        while tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            tokio::time::sleep(AGAIN).await;
        }
    };
    tokio::time::timeout(PATIENCE, open).await.map_err(|_| "etcd does not listen".into())
}
