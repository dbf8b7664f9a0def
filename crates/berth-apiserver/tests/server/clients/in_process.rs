//! A server without a socket that can be restarted below its clients.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::{Request, Response};
use berth_apiserver::rest::{ApiServer, Body, Options};
use berth_apiserver::store::{self, OpenError, Store};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tower::{Service, ServiceExt};

use super::PATIENCE;

type Running = Option<(ApiServer, CancellationToken)>;

/// The server, or nothing while it restarts.
#[derive(Clone)]
pub(crate) struct InProcess {
    running: Arc<Mutex<Running>>,
    history: usize,
}

impl InProcess {
    pub(crate) async fn start(directory: &Path, history: usize) -> Self {
        let server = Self { running: Arc::default(), history };
        server.restart(directory).await;
        server
    }

    /// Stops the server, and starts another on the same store.
    pub(crate) async fn restart(&self, directory: &Path) {
        if let Some((_, shutdown)) = self.running.lock().take() {
            shutdown.cancel();
        }
        // The store is free when the last request and the last watch have ended.
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        let opened = async {
            loop {
                let options = store::Options { history_events: self.history, ..store::Options::default() };
                match Store::open(directory, options) {
                    Ok((store, _)) => return store,
                    Err(OpenError::InUse(_)) => ticks.tick().await,
                    Err(error) => panic!("{error}"),
                };
            }
        };
        let store = tokio::time::timeout(PATIENCE, opened).await.expect("the store is let go");
        let shutdown = CancellationToken::new();
        let api = ApiServer::new(store, Options { shutdown: shutdown.clone(), ..Options::default() });
        api.bootstrap().await.unwrap();
        *self.running.lock() = Some((api, shutdown));
    }

    pub(crate) fn client(&self) -> kube::Client {
        kube::Client::new(self.clone(), "default")
    }
}

impl Service<Request<kube::client::Body>> for InProcess {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let api = self.running.lock().as_ref().map(|(api, _)| api.clone());
        Box::pin(async move {
            let api = api.ok_or(io::ErrorKind::ConnectionRefused)?;
            api.oneshot(request).await.map_err(|never| match never {})
        })
    }
}
