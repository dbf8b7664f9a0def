//! For tests: an HTTP server on loopback that answers as a function says, and remembers what it was asked.

use std::{convert::Infallible, sync::Arc};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpListener;

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    /// The path with its query.
    pub(crate) target: String,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: Value,
}

impl Asked {
    /// Method, path and query.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.method, self.target)
    }
}

/// The answer that the script gives.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Json(u16, Value),
    With(u16, Vec<(&'static str, String)>, Value),
    /// The connection is closed without an answer.
    Drop,
}

type Answering = dyn Fn(&Asked) -> Reply + Send + Sync;

/// A server that ends with its owner.
pub(crate) struct Scripted {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: tokio::task::AbortHandle,
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Scripted {
    /// Serves on a free port of loopback.
    pub(crate) async fn serve(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (noted, answer): (_, Arc<Answering>) = (asked.clone(), Arc::new(answer));
        let serving = async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (noted, answer) = (noted.clone(), answer.clone());
                let service = service_fn(move |request| one(request, noted.clone(), answer.clone()));
                tokio::spawn(async move {
                    // A connection that is closed without an answer ends with an error.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        };
        Self { url, asked, task: tokio::spawn(serving).abort_handle() }
    }

    /// Method, path and query of everything that was asked so far, and forgets it.
    pub(crate) fn take_lines(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock()).iter().map(Asked::line).collect()
    }

    /// Everything that was asked so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().clone()
    }
}

async fn one(
    request: Request<Incoming>,
    noted: Arc<Mutex<Vec<Asked>>>,
    answer: Arc<Answering>,
) -> Result<Response<Full<Bytes>>, &'static str> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| "broken off")?.to_bytes();
    let asked = Asked {
        method: parts.method.to_string(),
        target: parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
        headers: parts.headers,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
    };
    noted.lock().push(asked.clone());
    let (status, headers, value) = match answer(&asked) {
        Reply::Json(status, value) => (status, Vec::new(), value),
        Reply::With(status, headers, value) => (status, headers, value),
        Reply::Drop => return Err("closed"),
    };
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(name, value);
    }
    let text = match value {
        Value::Null => String::new(),
        // Metadata services answer plain text.
        Value::String(text) => text,
        value => value.to_string(),
    };
    let response: Result<_, Infallible> = Ok(response.body(Full::new(Bytes::from(text))).unwrap());
    response.map_err(|never| match never {})
}
