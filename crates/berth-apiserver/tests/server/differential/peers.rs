//! The two servers: kube-apiserver over TLS, and Berth in process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use berth_apiserver::auth::{Credentials, Identity};
use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::store::{self, Store};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tower::ServiceExt;

use crate::differential::answer::Ready;

/// One of the servers.
pub(crate) enum Peer {
    Berth(Berth),
    Real(Real),
}

/// An answer as it came.
pub(crate) struct Received {
    pub(crate) code: u16,
    pub(crate) media: String,
    pub(crate) warnings: Vec<String>,
    pub(crate) body: Vec<u8>,
}

/// Berth's server on a store of its own.
pub(crate) struct Berth {
    pub(crate) api: ApiServer,
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) directory: tempfile::TempDir,
}

/// The testbed's kube-apiserver, reached over TLS on a port of this machine.
pub(crate) struct Real {
    port: u16,
    tls: TlsConnector,
}

impl Peer {
    pub(crate) async fn send(&self, ready: Ready) -> Received {
        let lines = ready.lines;
        let mut request = Request::builder().method(ready.method.as_str()).uri(&ready.path);
        for (name, value) in &ready.headers {
            request = request.header(name, value);
        }
        if let Self::Real(_) = self {
            request = request.header("host", "localhost").header("content-length", ready.body.len());
        }
        let mut request = request.body(Full::new(ready.body)).expect("a request of the corpus is one");
        match self {
            Self::Berth(berth) => {
                request.extensions_mut().insert(Identity::new("admin", ["system:masters".to_owned()]));
                let response = berth.api.clone().oneshot(request).await.expect("the service never fails");
                receive(response, lines).await
            }
            Self::Real(real) => {
                let mut sender = real.connect_once().await;
                let response = sender.send_request(request).await.expect("the real server answers");
                receive(response, lines).await
            }
        }
    }
}

impl Berth {
    pub(crate) async fn start() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (store, _) =
            Store::open(&directory.path().join("store"), store::Options::default()).expect("a store");
        let now = jiff::Timestamp::now();
        let credentials =
            Arc::new(Credentials::ensure(&directory.path().join("pki"), now).expect("credentials"));
        let options = Options { credentials: Some(credentials.clone()), ..Options::default() };
        let api = ApiServer::new(store, options);
        api.bootstrap().await.expect("the first objects");
        Self { api, credentials, directory }
    }
}

/// Where the testbed keeps its state.
pub(crate) fn testbed() -> PathBuf {
    let state = std::env::var_os("KUBE_STATE").expect("KUBE_STATE names the testbed's state: make test-kube");
    Path::new(&state).to_path_buf()
}

impl Real {
    pub(crate) fn connect() -> Self {
        let pki = testbed().join("pki");
        let certificate = |name| CertificateDer::from_pem_file(pki.join(name)).expect("a certificate");
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate("ca.crt")).expect("an authority");
        let key = PrivateKeyDer::from_pem_file(pki.join("admin.key")).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the protocol's versions")
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate("admin.crt")], key)
            .expect("the administrator's certificate");
        let port = std::env::var("PORT").map_or(6443, |port| port.parse().expect("a port"));
        Self { port, tls: TlsConnector::from(Arc::new(config)) }
    }

    async fn connect_once(&self) -> hyper::client::conn::http1::SendRequest<Full<Bytes>> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.expect("the real server listens");
        let name = ServerName::try_from("localhost").expect("a name");
        let stream = self.tls.connect(name, stream).await.expect("the real server is ours");
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("it speaks HTTP");
        tokio::spawn(connection);
        sender
    }
}

async fn receive<B>(response: Response<B>, lines: Option<usize>) -> Received
where
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: std::fmt::Debug,
{
    let (parts, body) = response.into_parts();
    let mut body = Box::pin(body);
    let header = |name: &str| parts.headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.expect("the answer arrives").into_data() {
            bytes.extend_from_slice(&data);
        }
        let newlines = bytes.split(|byte| *byte == b'\n').count() - 1;
        if parts.status == 200 && lines.is_some_and(|wanted| newlines >= wanted) {
            break;
        }
    }
    Received {
        code: parts.status.as_u16(),
        media: header("content-type").next().unwrap_or_default().to_owned(),
        warnings: header("warning").map(str::to_owned).collect(),
        body: bytes,
    }
}
