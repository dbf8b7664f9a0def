//! /metrics and /healthz, for Prometheus and for kubelet's probes.

use std::{convert::Infallible, pin::Pin, sync::Arc};

use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Bytes, body::Incoming, header::CONTENT_TYPE};
use hyper_util::rt::TokioIo;
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::net::TcpListener;

/// The answer to "are you well?": a sentence if not.
pub(crate) type Ready = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

/// Starts serving; ends with the process.
pub(crate) async fn serve(
    address: &str,
    registry: Registry,
    ready: impl Fn() -> Ready + Send + Sync + 'static,
) -> anyhow::Result<()> {
    // Go's ":8080" means every address.
    let address = if address.starts_with(':') { format!("0.0.0.0{address}") } else { address.to_owned() };
    let listener = TcpListener::bind(&address).await?;
    tracing::info!(address = %listener.local_addr()?, "serving /metrics and /healthz");
    let shared = Arc::new((registry, ready));
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let shared = shared.clone();
            let service = hyper::service::service_fn(move |request| {
                let shared = shared.clone();
                async move { Ok::<_, Infallible>(answer(&request, &shared.0, &shared.1).await) }
            });
            // A client that breaks off is no news.
            tokio::spawn(
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    Ok(())
}

async fn answer(
    request: &Request<Incoming>,
    registry: &Registry,
    ready: &(impl Fn() -> Ready + Sync),
) -> Response<Full<Bytes>> {
    match request.uri().path() {
        "/metrics" => {
            let mut text = String::new();
            match encode(&mut text, registry) {
                Ok(()) => {
                    let mut response = plain(StatusCode::OK, text);
                    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                    response
                        .headers_mut()
                        .insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(openmetrics));
                    response
                }
                Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            }
        }
        "/healthz" | "/livez" | "/readyz" => match ready().await {
            Ok(()) => plain(StatusCode::OK, "ok\n".to_owned()),
            Err(why) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        },
        _ => plain(StatusCode::NOT_FOUND, "try /metrics or /healthz\n".to_owned()),
    }
}

fn plain(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response
}
