//! A door to the API server for one account: only what its roles allow goes through, and all that is asked is written
//! down.
//!
//! It also does what seldom happens by itself: every other change of an object comes too late, as if somebody else had
//! been quicker, and of some kinds every other object is made although its maker does not hear of it. What is done about
//! that needs permissions too.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use http::request::Parts;
use http::{Method, StatusCode};
use kube::Client;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::deploy::roles::{Allowed, Asked};

/// The kinds of which every other object is made without its maker hearing of it.
const MADE_UNHEARD: [&str; 4] =
    ["persistentvolumes", "volumesnapshots", "volumesnapshotcontents", "volumegroupsnapshotcontents"];

/// The way of one account to the API server.
pub(crate) struct Door {
    shared: Arc<Shared>,
    pub(crate) address: SocketAddr,
    _end: DropGuard,
}

struct Shared {
    client: Client,
    allowed: Vec<Allowed>,
    passed: Mutex<BTreeSet<Asked>>,
    refused: watch::Sender<Option<String>>,
    times: Mutex<HashMap<String, u32>>,
}

impl Door {
    /// Opens a door for those who are allowed this.
    pub(crate) async fn open(client: Client, allowed: Vec<Allowed>) -> Self {
        let shared = Arc::new(Shared {
            client,
            allowed,
            passed: Mutex::default(),
            refused: watch::Sender::new(None),
            times: Mutex::default(),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let door = shared.clone();
        let requests = Router::new().fallback(move |request: Request| {
            let door = door.clone();
            async move { door.answer(request).await }
        });
        let end = CancellationToken::new();
        let stop = end.clone();
        tokio::spawn(async move {
            tokio::select! {
                served = async { axum::serve(listener, requests).await } => served.unwrap(),
                () = stop.cancelled() => {}
            }
        });
        Self { shared, address, _end: end.drop_guard() }
    }

    /// Waits until something is asked that no rule allows, and gives it.
    pub(crate) async fn refusal(&self) -> String {
        let mut refused = self.shared.refused.subscribe();
        refused.wait_for(Option::is_some).await.unwrap().clone().unwrap()
    }

    /// What is allowed and was never asked, in one word each.
    pub(crate) fn unused(&self) -> BTreeSet<String> {
        let passed = self.shared.passed.lock();
        let unused =
            self.shared.allowed.iter().filter(|allowed| !passed.iter().any(|asked| allowed.covers(asked)));
        unused.map(Allowed::kind).collect()
    }
}

impl Shared {
    async fn answer(&self, request: Request) -> Response {
        let (mut parts, body) = request.into_parts();
        parts.headers.remove(http::header::HOST);
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let (path, query) = (parts.uri.path().to_owned(), parts.uri.query().unwrap_or_default().to_owned());
        let Some(asked) = Asked::read(&parts.method, &path, &query) else {
            // Everybody may ask what there is.
            if parts.method != Method::GET || !(path.starts_with("/api") || path == "/version") {
                return self.refuse(format!("{} {path}", parts.method));
            }
            return self.forward(parts, body).await;
        };
        if !self.allowed.iter().any(|allowed| allowed.covers(&asked)) {
            return self.refuse(asked.to_string());
        }
        self.passed.lock().insert(asked.clone());
        match asked.verb.as_str() {
            "patch" if asked.resource != "events" && self.is_odd(&path) => {
                status(StatusCode::CONFLICT, "Conflict", &asked.to_string())
            }
            "create" if MADE_UNHEARD.contains(&asked.resource.as_str()) && self.is_odd(&asked.resource) => {
                self.forward(parts.clone(), body.clone()).await;
                self.forward(parts, body).await
            }
            _ => self.forward(parts, body).await,
        }
    }

    fn refuse(&self, what: String) -> Response {
        let answer = status(StatusCode::FORBIDDEN, "Forbidden", &what);
        self.refused.send_replace(Some(what));
        answer
    }

    /// Whether something happens for the first time, the third, and so on.
    fn is_odd(&self, what: &str) -> bool {
        let mut times = self.times.lock();
        let times = times.entry(what.to_owned()).or_default();
        *times += 1;
        *times % 2 == 1
    }

    async fn forward(&self, parts: Parts, body: Bytes) -> Response {
        let request = http::Request::from_parts(parts, body.to_vec().into());
        match self.client.send(request).await {
            Ok(answer) => answer.map(Body::new),
            Err(error) => status(StatusCode::BAD_GATEWAY, "InternalError", &error.to_string()),
        }
    }
}

/// A refusal as Kubernetes words it.
fn status(code: StatusCode, reason: &str, what: &str) -> Response {
    let body = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code.as_u16(),
        "message": format!("{reason}: {what}"),
    });
    Response::builder()
        .status(code)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()))
        .unwrap()
}
