//! A gate between a program and what it works on: the API server on one side, the driver on the other. At one step, a
//! write or a call, it kills the program: before the step is done, or right after, when nobody has heard of it yet.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use http::{Method, StatusCode};
use kube::Client;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tonic::transport::Channel;
use tower::ServiceExt as _;

/// The ways of one program, and its death.
pub(crate) struct Gate {
    shared: Arc<Shared>,
    /// Where the API server is.
    pub(crate) api: SocketAddr,
    _end: DropGuard,
}

struct Shared {
    steps: Mutex<Vec<String>>,
    last: usize,
    done: bool,
    program: watch::Sender<Option<Pid>>,
    dead: CancellationToken,
}

impl Gate {
    /// Opens a gate to an API server, which gets a port, and to a driver, which gets a socket.
    pub(crate) async fn open(client: Client, driver: &Path, socket: &Path, last: usize, done: bool) -> Self {
        let (end, program) = (CancellationToken::new(), watch::channel(None).0);
        let shared =
            Arc::new(Shared { steps: Mutex::default(), last, done, program, dead: CancellationToken::new() });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = listener.local_addr().unwrap();
        let gate = shared.clone();
        let requests = Router::new().fallback(move |request: Request| {
            let (gate, client) = (gate.clone(), client.clone());
            async move { gate.request(&client, request).await }
        });
        let stop = end.clone();
        tokio::spawn(async move {
            tokio::select! {
                served = async { axum::serve(listener, requests).await } => served.unwrap(),
                () = stop.cancelled() => {}
            }
        });
        let channel = berth_csi::connect(&Endpoint::Unix(driver.to_owned()));
        let gate = shared.clone();
        let calls = Router::new().fallback(move |request: Request| {
            let (gate, channel) = (gate.clone(), channel.clone());
            async move { gate.call(channel, request).await }
        });
        let listener = Listener::bind(&Endpoint::Unix(socket.to_owned())).await.unwrap();
        let (layer, stop) = (CallLayer::new(Metrics::unregistered("gate"), None), end.clone());
        tokio::spawn(async move {
            berth_csi::serve(listener, Routes::from(calls), layer, stop.cancelled()).await.unwrap();
        });
        Self { shared, api, _end: end.drop_guard() }
    }

    /// Says which program to kill; until then every step waits.
    pub(crate) fn watch(&self, program: Pid) {
        self.shared.program.send_replace(Some(program));
    }

    /// Returns when the program is killed.
    pub(crate) async fn killed(&self) {
        self.shared.dead.cancelled().await;
    }

    /// Whether the program was killed.
    pub(crate) fn has_killed(&self) -> bool {
        self.shared.dead.is_cancelled()
    }

    /// The steps so far.
    pub(crate) fn steps(&self) -> Vec<String> {
        self.shared.steps.lock().clone()
    }
}

impl Shared {
    async fn request(&self, client: &Client, request: Request) -> Response {
        let (mut parts, body) = request.into_parts();
        parts.headers.remove(http::header::HOST);
        let path = parts.uri.path().to_owned();
        let write = parts.method != Method::GET && !path.contains("/events") && !path.contains("/leases");
        let what = format!("{} {path}", parts.method);
        let work = async {
            let body = axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec();
            let answer = client.send(http::Request::from_parts(parts, body.into())).await.unwrap();
            answer.map(Body::new)
        };
        if write { self.step(what, work).await } else { work.await }
    }

    async fn call(&self, channel: Channel, request: Request) -> Response {
        let path = request.uri().path().to_owned();
        let work = async {
            let answer = channel.oneshot(request.map(tonic::body::Body::new)).await.unwrap();
            answer.map(Body::new)
        };
        let asked = path.contains("Identity") || path.ends_with("GetCapabilities");
        if asked { work.await } else { self.step(path, work).await }
    }

    /// One step, unless the program is dead, or dies before it.
    async fn step(&self, what: String, work: impl Future<Output = Response>) -> Response {
        let nobody = || Response::builder().status(StatusCode::BAD_GATEWAY).body(Body::empty()).unwrap();
        let step = {
            let mut steps = self.steps.lock();
            steps.push(what);
            steps.len()
        };
        if step < self.last {
            return work.await;
        }
        if step == self.last {
            if self.done {
                work.await;
            }
            let mut program = self.program.subscribe();
            let program = program.wait_for(Option::is_some).await.unwrap().unwrap();
            rustix::process::kill_process(program, Signal::KILL).unwrap();
            self.dead.cancel();
        }
        nobody()
    }
}
