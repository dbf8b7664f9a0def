//! The embedded API server, on a store in a temporary directory.

use std::path::Path;

use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::store::{self, Store};
use kube::Client;
use kube::client::Body;
use tempfile::TempDir;
use tower::{ServiceExt as _, service_fn};

/// An API server in this process. Its directory is removed when this is dropped.
pub struct EmbeddedServer {
    /// The server itself, a service of HTTP requests.
    pub api: ApiServer,
    directory: TempDir,
}

impl EmbeddedServer {
    /// Starts a server on an empty store.
    pub async fn start() -> Self {
        Self::open(tempfile::tempdir().unwrap(), Options::default()).await
    }

    /// Starts a server on the store in a directory, which may have been used before.
    pub async fn open(directory: TempDir, options: Options) -> Self {
        let (store, _) = Store::open(&directory.path().join("store"), store::Options::default()).unwrap();
        let api = ApiServer::new(store, options);
        assert!(api.bootstrap().await.is_ok(), "the API server does not start");
        Self { api, directory }
    }

    /// The temporary directory, of which the server uses only `store`.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Ends the server and keeps its directory.
    pub fn into_directory(self) -> TempDir {
        self.directory
    }

    /// A client that calls the server within this process.
    pub fn client(&self) -> Client {
        Client::new(self.api.clone(), "default")
    }

    /// A client all of whose requests are shown to `observe` before the server gets them.
    pub fn observed_client(
        &self,
        observe: impl Fn(&http::Request<Body>) + Clone + Send + Sync + 'static,
    ) -> Client {
        let api = self.api.clone();
        let service = service_fn(move |request: http::Request<Body>| {
            observe(&request);
            let api = api.clone();
            async move { api.oneshot(request).await.map_err(tower::BoxError::from) }
        });
        Client::new(service, "default")
    }
}
