//! The listener over real sockets.

use std::net::Ipv4Addr;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::*;
use crate::rest::Options;
use crate::store::{self, Store};

struct Running {
    api: ApiServer,
    address: SocketAddr,
    credentials: Arc<Credentials>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
    directory: tempfile::TempDir,
}

async fn start() -> Running {
    start_with(Limits::default()).await
}

async fn start_with(limits: Limits) -> Running {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(&directory.path().join("store"), store::Options::default()).unwrap();
    let credentials = Arc::new(Credentials::ensure(&directory.path().join("pki"), Timestamp::now()).unwrap());
    let shutdown = CancellationToken::new();
    let options =
        Options { credentials: Some(credentials.clone()), shutdown: shutdown.clone(), ..Options::default() };
    let api = ApiServer::new(store, options);
    api.bootstrap().await.unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = Server::bind(address, api.clone(), credentials.clone(), Some(kubeconfig)).await.unwrap();
    let address = server.address();
    let task = tokio::spawn(server.with_limits(limits).run(shutdown.clone()));
    Running { api, address, credentials, shutdown, task, directory }
}

impl Running {
    fn client(&self, pair: Option<&Pair>, protocol: &[u8]) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.credentials.authority.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match pair {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        config
    }

    /// The status line and body of the answer to a GET.
    async fn get(&self, path: &str, pair: Option<&Pair>, token: Option<&str>) -> (String, String) {
        let connector = TlsConnector::from(Arc::new(self.client(pair, b"http/1.1")));
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = connector.connect(name, stream).await.unwrap();
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // The server may close without saying goodbye in TLS.
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.lines().next().unwrap().to_owned(), body.to_owned())
    }
}

#[tokio::test]
async fn only_health_and_version_are_told_to_strangers() {
    let running = start().await;
    for path in ["/healthz", "/readyz", "/livez", "/version"] {
        assert_eq!(running.get(path, None, None).await.0, "HTTP/1.1 200 OK", "{path}");
    }
    for path in ["/api/v1/namespaces", "/apis", "/openapi/v3", "/metrics", "/nowhere"] {
        let (status, body) = running.get(path, None, None).await;
        assert_eq!(status, "HTTP/1.1 401 Unauthorized", "{path}");
        assert!(body.contains("\"reason\":\"Unauthorized\""), "{body}");
    }
    assert_eq!(running.get("/api", None, Some("guess")).await.0, "HTTP/1.1 401 Unauthorized");
}

#[tokio::test]
async fn certificates_and_tokens_say_who_asks() {
    let running = start().await;
    let admin = running.credentials.admin.clone();
    assert_eq!(running.get("/api/v1/namespaces", Some(&admin), None).await.0, "HTTP/1.1 200 OK");
    let token = running.credentials.admin_token().to_owned();
    let (status, body) = running.get("/api/v1/namespaces/default", None, Some(&token)).await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(body.contains("\"name\":\"default\""), "{body}");
}

#[tokio::test]
async fn a_certificate_of_another_authority_is_refused() {
    let running = start().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Credentials::ensure(elsewhere.path(), Timestamp::now()).unwrap();
    let connector = TlsConnector::from(Arc::new(running.client(Some(&other.admin), b"http/1.1")));
    let stream = TcpStream::connect(running.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    // The refusal comes with the first bytes, after the client believes the handshake done.
    if let Ok(mut stream) = connector.connect(name, stream).await {
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        assert!(stream.read(&mut [0; 16]).await.is_err());
    }
}

#[tokio::test]
async fn http2_is_agreed_on_when_the_client_can() {
    let running = start().await;
    let connector = TlsConnector::from(Arc::new(running.client(None, b"h2")));
    let stream = TcpStream::connect(running.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = connector.connect(name, stream).await.unwrap();
    let connection: &ClientConnection = stream.get_ref().1;
    assert_eq!(connection.alpn_protocol(), Some(&b"h2"[..]));
}

#[tokio::test]
async fn the_kubeconfig_is_private_and_names_the_address() {
    use std::os::unix::fs::PermissionsExt;
    let running = start().await;
    let path = running.directory.path().join("kubeconfig");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(&format!("server: https://{}", running.address)), "{text}");
}

#[tokio::test]
async fn shutting_down_ends_idle_connections_and_the_server() {
    let running = start().await;
    let idle = TcpStream::connect(running.address).await.unwrap();
    assert_eq!(running.get("/healthz", None, None).await.0, "HTTP/1.1 200 OK");
    running.shutdown.cancel();
    drop(idle);
    running.task.await.unwrap();
    assert!(TcpStream::connect(running.address).await.is_err());
}

/// Both ends of a connection after the handshake, the server's not being served yet.
async fn connected(
    running: &Running,
) -> (Connection, TlsStream<TcpStream>, impl AsyncRead + AsyncWrite + Unpin) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (server, _) = listener.accept().await.unwrap();
    let certificate = Arc::new(Rotating(RwLock::new(certified(&running.credentials.server).unwrap())));
    let acceptor = TlsAcceptor::from(Arc::new(tls(&running.credentials, &certificate).unwrap()));
    let connector =
        TlsConnector::from(Arc::new(running.client(Some(&running.credentials.admin), b"http/1.1")));
    let name = ServerName::try_from("localhost").unwrap();
    let (server, client) = tokio::join!(acceptor.accept(server), connector.connect(name, client));
    let connection = Connection {
        api: running.api.clone(),
        credentials: running.credentials.clone(),
        acceptor,
        admission: connections(Limits::default()).admit(Client::Address(Ipv4Addr::LOCALHOST.into())).unwrap(),
    };
    (connection, server.unwrap(), client.unwrap())
}

#[tokio::test]
async fn a_client_that_is_silent_after_the_handshake_is_let_go() {
    let running = start().await;
    let (connection, server, _client) = connected(&running).await;
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    let speaking = connection.speak(server, running.shutdown.clone());
    tokio::time::timeout(HEADERS * 10, speaking).await.expect("it is let go");
    assert!(began.elapsed() >= HEADERS, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_client_that_watches_may_be_silent() {
    let running = start().await;
    let (connection, server, mut client) = connected(&running).await;
    let speaking = tokio::spawn(connection.speak(server, running.shutdown.clone()));
    let watch = "GET /api/v1/namespaces?watch=1 HTTP/1.1\r\nHost: localhost\r\n\r\n";
    client.write_all(watch.as_bytes()).await.unwrap();
    assert!(client.read(&mut [0; 16]).await.unwrap() > 0);
    tokio::time::pause();
    assert!(tokio::time::timeout(HEADERS * 2, speaking).await.is_err());
}

/// A connection without a certificate, if the server takes it.
async fn connect_as_stranger(running: &Running) -> std::io::Result<impl AsyncRead + AsyncWrite> {
    let connector = TlsConnector::from(Arc::new(running.client(None, b"http/1.1")));
    let name = ServerName::try_from("localhost").unwrap();
    connector.connect(name, TcpStream::connect(running.address).await?).await
}

#[tokio::test]
async fn connections_beyond_the_limit_are_refused_until_others_end() {
    let running = start_with(Limits { total: 3, per_client: 2 }).await;
    let first = connect_as_stranger(&running).await.unwrap();
    let second = connect_as_stranger(&running).await.unwrap();
    assert!(connect_as_stranger(&running).await.is_err(), "a third is closed");
    drop((first, second));
    // The server notices in its own time that they have ended.
    let admitted = async { while connect_as_stranger(&running).await.is_err() {} };
    tokio::time::timeout(Duration::from_secs(60), admitted).await.unwrap();
    running.shutdown.cancel();
    running.task.await.unwrap();
}

fn connections(limits: Limits) -> Arc<Connections> {
    Arc::new(Connections { limits, open: Mutex::default(), refusals: Complaint::default() })
}

#[test]
fn connections_are_counted_by_client_and_in_total() {
    let connections = connections(Limits { total: 3, per_client: 2 });
    let (stranger, user) = (Client::Address(Ipv4Addr::LOCALHOST.into()), Client::User("admin".to_owned()));
    let first = connections.admit(stranger.clone()).unwrap();
    let second = connections.admit(stranger.clone()).unwrap();
    assert!(connections.admit(stranger.clone()).is_none(), "more than one client may have");
    let third = connections.admit(user.clone()).unwrap();
    assert!(connections.admit(user.clone()).is_none(), "more than all may have");
    drop((first, second));
    assert!(connections.admit(stranger).is_some());
    drop(third);
    assert!(connections.open.lock().is_empty());
    assert_eq!(connections.refusals.0.lock().1, 1, "the second refusal is not logged");
}
