//! Metrics and health over HTTP, for Prometheus and for kubelet's probes.

mod process;

pub(crate) use self::process::Process;

use std::{convert::Infallible, pin::Pin, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Bytes, body::Incoming, header::CONTENT_TYPE};
use hyper_util::rt::TokioIo;
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::net::TcpListener;

/// How long until a connection is accepted after one could not be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The answer to "are you well?".
pub(crate) type Ready = Pin<Box<dyn Future<Output = Result<(), Unwell>> + Send>>;

/// What is wrong, and the body of the answer that says so.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unwell {
    pub(crate) status: StatusCode,
    pub(crate) why: String,
}

impl Unwell {
    /// The usual failure of a check.
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, why: why.into() }
    }
}

type Check = Box<dyn Fn() -> Ready + Send + Sync>;

/// What is served: metrics under one path, checks under others.
pub(crate) struct Site {
    registry: Registry,
    metrics: String,
    checks: Vec<(&'static str, Check)>,
}

impl Site {
    /// Metrics under `/metrics`, those of the process among them, and nothing else yet.
    pub(crate) fn new(mut registry: Registry) -> Self {
        registry.register_collector(Box::new(process::Process));
        Self { registry, metrics: "/metrics".to_owned(), checks: Vec::new() }
    }

    /// The same with its metrics under another path.
    pub(crate) fn metrics_at(mut self, path: &str) -> Self {
        path.clone_into(&mut self.metrics);
        self
    }

    /// The same with a check under a path.
    pub(crate) fn check(
        mut self,
        path: &'static str,
        check: impl Fn() -> Ready + Send + Sync + 'static,
    ) -> Self {
        self.checks.push((path, Box::new(check)));
        self
    }

    /// Starts serving; ends with the process.
    pub(crate) async fn serve(self, address: &str) -> anyhow::Result<()> {
        // Go's ":8080" means every address.
        let address = if address.starts_with(':') { format!("0.0.0.0{address}") } else { address.to_owned() };
        let listener = TcpListener::bind(&address).await?;
        let checks: Vec<_> = self.checks.iter().map(|(path, _)| *path).collect();
        tracing::info!(address = %listener.local_addr()?, metrics = self.metrics, ?checks, "serving HTTP");
        let site = Arc::new(self);
        tokio::spawn(async move {
            loop {
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Most likely there are too many open files, which only time mends.
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                let site = site.clone();
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let site = site.clone();
                    async move { Ok::<_, Infallible>(site.answer(request.uri().path()).await) }
                });
                // A client that breaks off is no news.
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Ok(())
    }

    async fn answer(&self, path: &str) -> Response<Full<Bytes>> {
        if let Some((_, check)) = self.checks.iter().find(|(known, _)| *known == path) {
            return match check().await {
                Ok(()) => plain(StatusCode::OK, "ok".to_owned()),
                Err(unwell) => plain(unwell.status, format!("{}\n", unwell.why)),
            };
        }
        if path == self.metrics {
            return self.metrics();
        }
        let known: Vec<_> =
            self.checks.iter().map(|(path, _)| *path).chain([self.metrics.as_str()]).collect();
        plain(StatusCode::NOT_FOUND, format!("try {}\n", known.join(" or ")))
    }

    fn metrics(&self) -> Response<Full<Bytes>> {
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            return plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"));
        }
        let mut response = plain(StatusCode::OK, text);
        let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(openmetrics));
        response
    }
}

fn plain(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn checks_metrics_and_everything_else_have_their_answers() {
        let gone = || Unwell { status: StatusCode::NOT_FOUND, why: "gone".to_owned() };
        let site = Site::new(Registry::default())
            .metrics_at("/numbers")
            .check("/healthz", || Box::pin(async { Ok(()) }))
            .check("/healthz/leader-election", || Box::pin(async { Err(Unwell::new("expired")) }))
            .check("/gone", move || Box::pin(async move { Err(gone()) }));
        for (path, status) in [
            ("/healthz", 200),
            ("/healthz/leader-election", 500),
            ("/gone", 404),
            ("/numbers", 200),
            ("/metrics", 404),
            ("/", 404),
        ] {
            assert_eq!(site.answer(path).await.status().as_u16(), status, "{path}");
        }
    }
}
