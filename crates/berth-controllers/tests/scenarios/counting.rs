//! A client that counts what is asked of the server, so that a scenario can say how much work something costs.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use tower::Service;

/// How many requests were answered, by method, the kind of object and the status of the answer.
pub(crate) type Counts = Arc<Mutex<BTreeMap<(String, String, u16), usize>>>;

#[derive(Clone)]
struct Counting {
    client: Client,
    counts: Counts,
}

/// The same client, and what is asked through it from now on.
pub(crate) fn counting(client: &Client) -> (Client, Counts) {
    let counts = Counts::default();
    (Client::new(Counting { client: client.clone(), counts: counts.clone() }, "default"), counts)
}

/// How many writes there were, but for events.
pub(crate) fn writes(counts: &Counts) -> usize {
    let counts = counts.lock();
    let is_write = |method: &str, kind: &str| method != Method::GET && kind != "events";
    counts.iter().filter(|((method, kind, _), _)| is_write(method, kind)).map(|(_, count)| count).sum()
}

impl Service<Request<Body>> for Counting {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (client, counts) = (self.client.clone(), self.counts.clone());
        async move {
            let (method, kind) = (request.method().to_string(), kind_of(request.uri().path()));
            let answer = client.send(request).await.map_err(io::Error::other)?;
            *counts.lock().entry((method, kind, answer.status().as_u16())).or_default() += 1;
            Ok(answer)
        }
        .boxed()
    }
}

/// The plural of what a path is about.
fn kind_of(path: &str) -> String {
    let mut parts = path.trim_start_matches('/').split('/');
    let skip = if parts.next() == Some("apis") { 2 } else { 1 };
    let mut parts = parts.skip(skip).peekable();
    let first = parts.next().unwrap_or_default();
    let inside = (first == "namespaces").then(|| parts.nth(1)).flatten();
    inside.unwrap_or(first).to_owned()
}
