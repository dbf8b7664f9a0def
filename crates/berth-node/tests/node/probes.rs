//! Probes of containers, and what the node says about fields that it does not honour.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_that_the_node_cannot_run_keeps_the_container_from_starting() {
    let world = World::new().await;
    start(&world, json!({ "livenessProbe": { "httpGet": { "port": 1, "scheme": "HTTPS" } } })).await;
    world.has_event("p", "Failed", "the scheme HTTPS is not supported in livenessProbe").await;
    let pod = world
        .until_pod("p", |pod| {
            container(pod, "main").is_some_and(|main| main.state.as_ref().unwrap().waiting.is_some())
        })
        .await;
    assert!(!is_ready(&pod));
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
        "containers": [main], "terminationGracePeriodSeconds": 0, "hostPID": true, "os": { "name": "linux" },
        "hostAliases": [{ "ip": "10.0.0.1", "hostnames": ["other"] }],
    });
    world.pod("p", spec).await;
    world.has_event("p", "FieldsIgnored", "ignores: ports, lifecycle.stopSignal").await;
    world.has_event("p", "FieldsIgnored", "ignores: hostAliases, hostPID").await;
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
