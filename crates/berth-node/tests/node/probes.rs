//! Probes of containers, and what the node says about fields that it does not honour.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::world::{World, container, is_ready};

/// A pod with one container that runs until it is stopped, with these probes and an emptyDir at `/e`.
async fn start(world: &World, probes: Value) -> Pod {
    let mut main = json!({
        "name": "main", "image": "i", "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done"],
        "volumeMounts": [{ "name": "e", "mountPath": "/e" }],
    });
    for (name, probe) in probes.as_object().unwrap() {
        main[name] = probe.clone();
    }
    let volumes = json!([{ "name": "e", "emptyDir": {} }]);
    world.pod("p", json!({ "containers": [main], "volumes": volumes })).await
}

fn exec(script: &str) -> Value {
    json!({ "exec": { "command": ["sh", "-c", script] }, "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 30 })
}

fn is_running(pod: &Pod) -> bool {
    container(pod, "main").is_some_and(|main| main.state.as_ref().unwrap().running.is_some())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_ready_only_while_its_readiness_probe_succeeds() {
    let world = World::new().await;
    start(&world, json!({ "readinessProbe": exec("test -e /e/ready || { echo not yet; exit 1; }") })).await;
    world.has_event("p", "Unhealthy", "Readiness probe failed: not yet").await;
    let pod = world.until_pod("p", is_running).await;
    assert!(!is_ready(&pod));
    let main = container(&pod, "main").unwrap();
    assert!(!main.ready && main.started == Some(true));
    world.exec(&pod, "main", "touch /e/ready").await;
    world.until_pod("p", is_ready).await;
    world.exec(&pod, "main", "rm /e/ready").await;
    let pod = world.until_pod("p", |pod| !is_ready(pod)).await;
    assert_eq!(container(&pod, "main").unwrap().restart_count, 0, "an unready container is not restarted");
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_whose_liveness_probe_fails_is_started_again() {
    let world = World::new().await;
    start(
        &world,
        json!({ "livenessProbe": exec("test ! -e /e/sick || { rm /e/sick; echo sick; exit 1; }") }),
    )
    .await;
    let pod = world.until_pod("p", is_ready).await;
    world.exec(&pod, "main", "touch /e/sick").await;
    world.has_event("p", "Unhealthy", "Liveness probe failed: sick").await;
    world.has_event("p", "Killing", "Container main failed liveness probe, will be restarted").await;
    let again = |pod: &Pod| is_ready(pod) && container(pod, "main").unwrap().restart_count == 1;
    world.until_pod("p", again).await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_else_is_probed_before_the_startup_probe_succeeds() {
    let world = World::new().await;
    let mut startup = exec("test -e /e/started");
    startup["failureThreshold"] = 1000.into();
    start(&world, json!({ "startupProbe": startup, "livenessProbe": exec("test -e /e/started") })).await;
    world.has_event("p", "Unhealthy", "Startup probe failed: the command exited with 1").await;
    let pod = world.until_pod("p", is_running).await;
    let main = container(&pod, "main").unwrap();
    assert!(!main.ready && main.started == Some(false));
    world.exec(&pod, "main", "touch /e/started").await;
    let pod = world.until_pod("p", is_ready).await;
    assert_eq!(
        container(&pod, "main").unwrap().restart_count,
        0,
        "the liveness probe would have failed before"
    );
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_ready_stays_ready_while_the_node_restarts() {
    let mut world = World::new().await;
    start(&world, json!({ "readinessProbe": exec("test ! -e /e/sick") })).await;
    let pod = world.until_pod("p", is_ready).await;
    world.exec(&pod, "main", "touch /e/sick").await;
    world.until_pod("p", |pod| !is_ready(pod)).await;
    world.exec(&pod, "main", "rm /e/sick").await;
    world.until_pod("p", is_ready).await;
    world.kill().await;
    world.start().await;
    let pod = world.until_pod("p", is_ready).await;
    assert_eq!(container(&pod, "main").unwrap().restart_count, 0);
    // The probes go on.
    world.exec(&pod, "main", "touch /e/sick").await;
    world.until_pod("p", |pod| !is_ready(pod)).await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_probed_by_its_port_its_path_and_its_status() {
    let world = World::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let status = Arc::new(AtomicU16::new(500));
    let answered = status.clone();
    // Pods share the machine's network, so that the test can be what the pod serves.
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                    break;
                }
            }
            let request = String::from_utf8(request).unwrap();
            let good = request.starts_with("GET /healthz?x=1 HTTP/1.1\r\n")
                && request.contains("\r\nX-Name: value\r\n");
            let code = if good { answered.load(Ordering::SeqCst) } else { 400 };
            // Who connects to see whether it can asks for nothing.
            let _ = stream
                .write_all(format!("HTTP/1.1 {code} Word\r\nContent-Length: 0\r\n\r\n").as_bytes())
                .await;
        }
    });
    let get = json!({ "path": "/healthz?x=1", "port": "web", "httpHeaders": [{ "name": "X-Name", "value": "value" }] });
    let main = json!({
        "name": "main", "image": "i", "command": ["sleep", "1000"], "ports": [{ "name": "web", "containerPort": port }],
        "startupProbe": { "tcpSocket": { "port": port }, "periodSeconds": 1, "failureThreshold": 1000 },
        "readinessProbe": { "httpGet": get, "periodSeconds": 1, "timeoutSeconds": 30 },
    });
    world.pod("p", json!({ "containers": [main], "terminationGracePeriodSeconds": 0 })).await;
    world.has_event("p", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 500").await;
    let pod = world.until_pod("p", is_running).await;
    assert!(!is_ready(&pod));
    status.store(204, Ordering::SeqCst);
    world.until_pod("p", is_ready).await;
    world.delete("p").await;
    world.until_clean().await;
}

/// A server of gRPC that answers one call: whether the service "db" is well.
#[derive(Clone)]
struct Health(Arc<AtomicU16>);

impl tower::Service<http::Request<tonic::body::Body>> for Health {
    type Response = http::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = futures_util::future::BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let status = self.0.load(Ordering::SeqCst);
        Box::pin(async move {
            let asked = request.into_body().collect().await.unwrap().to_bytes();
            // A message: not compressed, its length, then the field of the service's name.
            let good = asked.as_ref() == b"\0\0\0\0\x04\x0a\x02db";
            let status = if good { u8::try_from(status).unwrap() } else { 3 };
            let answer = Bytes::copy_from_slice(&[0, 0, 0, 0, 2, 8, status]);
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
            let frames = [Ok::<_, tonic::Status>(Frame::data(answer)), Ok(Frame::trailers(trailers))];
            let body = tonic::body::Body::new(StreamBody::new(futures_util::stream::iter(frames)));
            let response = http::Response::builder().header("content-type", "application/grpc");
            Ok(response.body(body).unwrap())
        })
    }
}

impl tonic::server::NamedService for Health {
    const NAME: &'static str = "grpc.health.v1.Health";
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_probe_asks_a_service_whether_it_is_well() {
    let world = World::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let status = Arc::new(AtomicU16::new(2));
    let server = tonic::transport::Server::builder().add_service(Health(status.clone()));
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    tokio::spawn(server.serve_with_incoming(incoming));
    let probe =
        json!({ "grpc": { "port": port, "service": "db" }, "periodSeconds": 1, "timeoutSeconds": 30 });
    start(&world, json!({ "readinessProbe": probe })).await;
    let unhealthy = "Readiness probe failed: service unhealthy (responded with \"NOT_SERVING\")";
    world.has_event("p", "Unhealthy", unhealthy).await;
    status.store(1, Ordering::SeqCst);
    world.until_pod("p", is_ready).await;
    world.delete("p").await;
    world.until_clean().await;
}

/// What a server was asked for: the names of its protocols that the client offered, and the request.
type Asked = Arc<Mutex<Vec<(Option<Vec<u8>>, String)>>>;

/// Serves HTTP by TLS, with a certificate that nobody has signed and that is long over, for another name.
async fn serve_https(status: Arc<AtomicU16>, asked: Asked) -> u16 {
    let mut parameters = rcgen::CertificateParams::new(vec!["other.example".to_owned()]).unwrap();
    parameters.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = parameters.self_signed(&key).unwrap().der().clone();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.serialize_der().try_into().unwrap())
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                    break;
                }
            }
            let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
            asked.lock().unwrap().push((protocol, String::from_utf8(request).unwrap()));
            let code = status.load(Ordering::SeqCst);
            let _ = stream.write_all(format!("HTTP/1.1 {code} Word\r\n\r\n").as_bytes()).await;
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_probed_by_https_whatever_its_certificate() {
    let world = World::new().await;
    let (status, asked) = (Arc::new(AtomicU16::new(503)), Asked::default());
    let port = serve_https(status.clone(), asked.clone()).await;
    let headers = json!([{ "name": "X-Name", "value": "value" }, { "name": "host", "value": "www.example" }]);
    let get = json!({ "scheme": "HTTPS", "host": "127.0.0.1", "port": "web", "path": "/healthz", "httpHeaders": headers });
    let main = json!({
        "name": "main", "image": "i", "command": ["sleep", "1000"], "ports": [{ "name": "web", "containerPort": port }],
        "readinessProbe": { "httpGet": get, "periodSeconds": 1, "timeoutSeconds": 30 },
        "lifecycle": { "preStop": { "httpGet": { "scheme": "HTTPS", "port": port, "path": "/stop" } } },
    });
    world.pod("p", json!({ "containers": [main], "terminationGracePeriodSeconds": 1 })).await;
    world.has_event("p", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503").await;
    let pod = world.until_pod("p", is_running).await;
    assert!(!is_ready(&pod));
    status.store(200, Ordering::SeqCst);
    world.until_pod("p", is_ready).await;
    let (protocol, request) = asked.lock().unwrap()[0].clone();
    assert_eq!(protocol, None, "HTTP/2 is not offered");
    assert!(
        request.starts_with("GET /healthz HTTP/1.1\r\n") && request.contains("\r\nX-Name: value\r\n"),
        "{request}"
    );
    assert!(request.contains("\r\nhost: www.example\r\n") && !request.contains("Host:"), "{request}");
    world.delete("p").await;
    let asked = asked.lock().unwrap().clone();
    assert!(asked.iter().any(|(_, request)| request.starts_with("GET /stop HTTP/1.1\r\n")), "{asked:?}");
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_that_finds_http_where_https_should_be_asks_again_without_credentials() {
    let world = World::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (told, mut requests) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap_or(0);
            let is_http = request.starts_with(b"GET ");
            let answer = if is_http { "HTTP/1.1 200 OK\r\n\r\n" } else { "HTTP/1.0 400 Bad Request\r\n\r\n" };
            let _ = stream.write_all(answer.as_bytes()).await;
            if is_http {
                told.send(String::from_utf8_lossy(&request[..length]).into_owned()).unwrap();
            }
        }
    });
    let headers =
        json!([{ "name": "Authorization", "value": "secret" }, { "name": "X-Name", "value": "value" }]);
    let hook =
        json!({ "httpGet": { "scheme": "HTTPS", "port": port, "path": "/start", "httpHeaders": headers } });
    start(&world, json!({ "lifecycle": { "postStart": hook } })).await;
    world.until_pod("p", is_ready).await;
    let request = requests.recv().await.unwrap();
    assert!(request.starts_with("GET /start ") && request.contains("X-Name: value"), "{request}");
    assert!(!request.contains("secret"), "{request}");
    world.has_event("p", "LifecycleHTTPFallback", "got HTTP response, retry with HTTP succeeded").await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_that_have_no_effect_are_named() {
    let world = World::new().await;
    let main = json!({
        "name": "main", "image": "i", "command": ["sleep", "1000"],
        "lifecycle": { "stopSignal": "SIGUSR1" }, "ports": [{ "containerPort": 80, "hostPort": 8080 }],
    });
    let spec = json!({
        "containers": [main], "terminationGracePeriodSeconds": 0, "hostPID": true, "hostIPC": true,
        "os": { "name": "linux" },
    });
    world.pod("p", spec).await;
    world.has_event("p", "FieldsIgnored", "ignores: ports, lifecycle.stopSignal").await;
    world.has_event("p", "FieldsIgnored", "ignores: hostIPC, hostPID").await;
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_is_started_and_ready_once_its_post_start_hook_is_done() {
    let world = World::new().await;
    let hook = "echo begun > /dev/termination-log; until test -e /tmp/go; do sleep 0.01; done; echo done > /tmp/done";
    start(&world, json!({ "lifecycle": { "postStart": { "exec": { "command": ["sh", "-c", hook] } } } }))
        .await;
    let pod = world
        .until_pod("p", |pod| {
            container(pod, "main").is_some_and(|main| main.state.as_ref().unwrap().running.is_some())
        })
        .await;
    world.exec(&pod, "main", "until grep -q begun /dev/termination-log; do sleep 0.01; done").await;
    let pod = world.here::<Pod>().get("p").await.unwrap();
    let main = container(&pod, "main").unwrap();
    assert!(!main.ready && main.started == Some(false) && !is_ready(&pod));
    world.exec(&pod, "main", "touch /tmp/go").await;
    let pod = world.until_pod("p", is_ready).await;
    assert_eq!(container(&pod, "main").unwrap().started, Some(true));
    assert_eq!(world.exec(&pod, "main", "cat /tmp/done").await, "done\n");
    world.delete("p").await;
    world.until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_whose_post_start_hook_fails_is_stopped_and_started_again() {
    let world = World::new().await;
    let hook = json!({ "exec": { "command": ["sh", "-c", "echo no luck; exit 3"] } });
    start(&world, json!({ "lifecycle": { "postStart": hook } })).await;
    world.has_event("p", "FailedPostStartHook", "PostStartHook failed: no luck").await;
    world.has_event("p", "Killing", "FailedPostStartHook").await;
    let pod =
        world.until_pod("p", |pod| container(pod, "main").is_some_and(|main| main.restart_count > 0)).await;
    assert!(!is_ready(&pod));
    world.delete("p").await;
    world.until_clean().await;
}
