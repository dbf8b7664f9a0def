//! The listener: TLS on loopback, HTTP/1.1 and HTTP/2, and nobody unknown beyond health and version.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::header::AUTHORIZATION;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use jiff::Timestamp;
use parking_lot::{Mutex, RwLock};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use rustls::server::{ClientHello, ResolvesServerCert, ServerConfig, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tower::Service;

use crate::auth::{AuthError, Credentials, Identity, Pair};
use crate::rest::{ApiServer, Body, Failure};

/// A client that connects and then says nothing is let go after this.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HEADERS: Duration = Duration::from_secs(30);
/// How often an HTTP/2 client is asked whether it is still there, and how long it may take to say so.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);
/// How long requests may go on after the end was asked for.
const GRACE: Duration = Duration::from_secs(3);
const RENEWAL_CHECK: Duration = Duration::from_secs(12 * 3600);

/// How often connections that cannot be accepted are logged.
const COMPLAINT: Duration = Duration::from_secs(60);

/// How many connections are served at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How many all clients may have together.
    pub total: usize,
    /// How many one client may have: whoever has the same certificate, or without one the same address.
    pub per_client: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // A kubelet or controller needs a handful, but a client may keep thousands of watches; each connection costs a
        // descriptor and some 50 KB. One client leaves a quarter of the connections to others.
        Self { total: 4096, per_client: 3072 }
    }
}

/// Counts connections, and refuses those beyond the limits.
#[derive(Debug)]
struct Connections {
    limits: Limits,
    open: Mutex<HashMap<Client, usize>>,
    refusals: Complaint,
}

/// Whose connection it is, as far as that is known.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Client {
    /// Without a certificate, or not yet with one.
    Address(IpAddr),
    /// The user that a certificate names.
    User(String),
}

/// A place among the connections that are served, free again when dropped.
struct Admission {
    connections: Arc<Connections>,
    client: Client,
}

impl Connections {
    fn admit(self: &Arc<Self>, client: Client) -> Option<Admission> {
        let mut open = self.open.lock();
        let total: usize = open.values().sum();
        let own = open.get(&client).copied().unwrap_or_default();
        if total >= self.limits.total || own >= self.limits.per_client {
            drop(open);
            self.refusals.warn(
                &format!("{client:?} has {own} connections, all clients {total}"),
                "refused a connection",
            );
            return None;
        }
        *open.entry(client.clone()).or_default() += 1;
        drop(open);
        Some(Admission { connections: self.clone(), client })
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        if let Some(count) = open.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.client);
            }
        }
    }
}

/// A warning that may come with every connection, and is logged once a minute.
#[derive(Debug, Default)]
struct Complaint(Mutex<(Option<Instant>, u64)>);

impl Complaint {
    fn warn(&self, why: &str, what: &str) {
        let mut state = self.0.lock();
        let (last, left_out) = &mut *state;
        if last.is_some_and(|last| last.elapsed() < COMPLAINT) {
            *left_out += 1;
            return;
        }
        tracing::warn!(why, since_the_last_warning = *left_out, "{what}");
        (*last, *left_out) = (Some(Instant::now()), 0);
    }
}

/// What failed while serving.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be had.
    #[error("cannot listen on {address}")]
    Bind {
        /// The address that was to be listened on, as the caller gave it.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The credentials cannot be used.
    #[error("cannot set up the credentials")]
    Credentials(#[from] AuthError),
}

/// A listener that is bound and not yet serving.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    api: ApiServer,
    credentials: Arc<Credentials>,
    certificate: Arc<Rotating>,
    acceptor: TlsAcceptor,
    kubeconfig: Option<PathBuf>,
    limits: Limits,
}

impl Server {
    /// Binds `address` and writes the kubeconfig, if a place is given.
    pub async fn bind(
        address: SocketAddr,
        api: ApiServer,
        credentials: Arc<Credentials>,
        kubeconfig: Option<PathBuf>,
    ) -> Result<Self, ServerError> {
        let certificate = Arc::new(Rotating(RwLock::new(certified(&credentials.server)?)));
        let acceptor = TlsAcceptor::from(Arc::new(tls(&credentials, &certificate)?));
        let bound = |source| ServerError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bound)?;
        let address = listener.local_addr().map_err(bound)?;
        let limits = Limits::default();
        let server = Self { listener, address, api, credentials, certificate, acceptor, kubeconfig, limits };
        server.write_kubeconfig(&server.credentials)?;
        Ok(server)
    }

    /// Serves other numbers of connections than by default.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn write_kubeconfig(&self, credentials: &Credentials) -> Result<(), AuthError> {
        let url = format!("https://{}", self.address);
        self.kubeconfig.as_ref().map_or(Ok(()), |path| credentials.write_kubeconfig(path, &url))
    }

    /// Serves until `shutdown`; requests that are under way get a moment to end.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut tasks = tokio::task::JoinSet::new();
        let mut renewal = tokio::time::interval(RENEWAL_CHECK);
        let connections = Arc::new(Connections {
            limits: self.limits,
            open: Mutex::default(),
            refusals: Complaint::default(),
        });
        let failures = Complaint::default();
        renewal.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = renewal.tick() => self.renew(),
                Some(_) = tasks.join_next() => {}
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        // A stream that is dropped is closed: the client learns at once that it has to wait.
                        let Some(admission) = connections.admit(Client::Address(peer.ip())) else { continue };
                        let connection = Connection {
                            api: self.api.clone(),
                            credentials: self.credentials.clone(),
                            acceptor: self.acceptor.clone(),
                            admission,
                        };
                        tasks.spawn(connection.serve(stream, shutdown.clone()));
                    }
                    // Out of file descriptors, mostly: others will close theirs.
                    Err(error) => {
                        failures.warn(&error.to_string(), "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
            }
        }
        let ended = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(GRACE * 2, ended).await;
    }

    fn renew(&self) {
        let renewed = Credentials::ensure(self.credentials.directory(), Timestamp::now()).and_then(|fresh| {
            self.certificate.replace(certified(&fresh.server)?);
            self.write_kubeconfig(&fresh)
        });
        if let Err(error) = renewed {
            tracing::error!(%error, "cannot renew the certificates");
        }
    }
}

struct Connection {
    api: ApiServer,
    credentials: Arc<Credentials>,
    acceptor: TlsAcceptor,
    admission: Admission,
}

impl Connection {
    async fn serve(self, stream: TcpStream, shutdown: CancellationToken) {
        let _ = stream.set_nodelay(true);
        let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, self.acceptor.accept(stream)).await else {
            return;
        };
        self.speak(stream, shutdown).await;
    }

    /// Answers requests until the client goes, the end is asked for, or nothing is asked to begin with.
    async fn speak(self, stream: TlsStream<TcpStream>, shutdown: CancellationToken) {
        let peer = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let identity = peer.and_then(|der| Credentials::certificate_identity(der));
        // Whoever has a certificate is counted by it, and takes no place from strangers at the same address.
        let mut admission = self.admission;
        if let Some(identity) = &identity {
            let connections = admission.connections.clone();
            drop(admission);
            match connections.admit(Client::User(identity.user.clone())) {
                Some(admitted) => admission = admitted,
                None => return,
            }
        }
        let _admission = admission;
        let asked = Arc::new(AtomicBool::new(false));
        let service =
            Authenticated { api: self.api, credentials: self.credentials, identity, asked: asked.clone() };
        let mut builder = Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADERS);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PING)
            .keep_alive_timeout(PONG)
            .max_concurrent_streams(1000);
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        tokio::pin!(connection);
        // The time for headers counts only from when HTTP/1 is known to be spoken.
        let silence = async {
            tokio::time::sleep(HEADERS).await;
            if asked.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            _ = connection.as_mut() => return,
            () = shutdown.cancelled() => {}
            () = silence => {}
        }
        connection.as_mut().graceful_shutdown();
        let _ = tokio::time::timeout(GRACE, connection).await;
    }
}

/// The API for those who are known.
struct Authenticated {
    api: ApiServer,
    credentials: Arc<Credentials>,
    identity: Option<Identity>,
    /// Whether there was a request on this connection.
    asked: Arc<AtomicBool>,
}

impl Authenticated {
    fn identify(&self, request: &Request<Incoming>) -> Result<Option<Identity>, Failure> {
        if let Some(identity) = &self.identity {
            return Ok(Some(identity.clone()));
        }
        let Some(header) = request.headers().get(AUTHORIZATION) else { return Ok(None) };
        let token = header.to_str().ok().and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        let Some(token) = token else { return Err(Failure::unauthorized()) };
        if let Some(identity) = self.credentials.static_token(token) {
            return Ok(Some(identity));
        }
        self.api
            .authenticate(token, &[])
            .map(|(identity, _)| Some(identity))
            .map_err(|_| Failure::unauthorized())
    }
}

impl hyper::service::Service<Request<Incoming>> for Authenticated {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        self.asked.store(true, Ordering::Relaxed);
        let refused = match self.identify(&request) {
            Ok(Some(identity)) => {
                request.extensions_mut().insert(identity);
                None
            }
            Ok(None) if is_public(request.uri().path()) => None,
            Ok(None) => Some(Failure::unauthorized()),
            Err(failure) => Some(failure),
        };
        let mut api = self.api.clone();
        Box::pin(async move {
            match refused {
                Some(failure) => Ok(ApiServer::refuse(&failure)),
                None => api.call(request).await,
            }
        })
    }
}

fn is_public(path: &str) -> bool {
    let first = path.trim_start_matches('/').split('/').next();
    matches!(first, Some("healthz" | "livez" | "readyz" | "version"))
}

/// The server's certificate, which changes while it serves.
#[derive(Debug)]
struct Rotating(RwLock<Arc<CertifiedKey>>);

impl Rotating {
    fn replace(&self, new: Arc<CertifiedKey>) {
        *self.0.write() = new;
    }
}

impl ResolvesServerCert for Rotating {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().clone())
    }
}

fn damaged(why: &impl std::fmt::Display) -> AuthError {
    AuthError::Tls(rustls::Error::General(why.to_string()))
}

fn certified(pair: &Pair) -> Result<Arc<CertifiedKey>, AuthError> {
    let certificate =
        CertificateDer::from_pem_slice(pair.certificate.as_bytes()).map_err(|error| damaged(&error))?;
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).map_err(|error| damaged(&error))?;
    let key = rustls::crypto::ring::sign::any_supported_type(&key)?;
    Ok(Arc::new(CertifiedKey::new(vec![certificate], key)))
}

fn tls(credentials: &Credentials, certificate: &Arc<Rotating>) -> Result<ServerConfig, AuthError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let authority =
        CertificateDer::from_pem_slice(credentials.authority.as_bytes()).map_err(|error| damaged(&error))?;
    let mut roots = RootCertStore::empty();
    roots.add(authority)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|error| damaged(&error))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificate.clone());
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests;
