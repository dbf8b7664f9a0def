//! A driver over an NFS backend, served on a socket as it is in a cluster.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_backends::{Services, nfs::Nfs, services};
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use prometheus_client::registry::Registry;
use tokio::{sync::oneshot, task::JoinHandle};

const SOON: Duration = Duration::from_secs(20);

/// A driver that takes calls.
pub(crate) struct Served {
    driver: Arc<Services>,
    backend: Nfs,
    pub(crate) socket: PathBuf,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Served {
    /// Begins to serve, with everything that the driver keeps below `dir`.
    pub(crate) async fn start(dir: &Path, backend: Nfs) -> Self {
        let config = services::Config::new(dir.join("driver"));
        let driver = backend.driver("nfs.csi.k8s.io", "1", services::Mode::All).open(config).unwrap();
        driver.recover().await.unwrap();
        let socket = dir.join("csi.sock");
        let listener = Listener::bind(&Endpoint::Unix(socket.clone())).await.unwrap();
        let layer = CallLayer::new(Metrics::register(&mut Registry::default(), "nfs"), None);
        let (stop, stopped) = oneshot::channel::<()>();
        let routes = driver.routes();
        let serving = tokio::spawn(async move {
            berth_csi::serve(listener, routes, layer, async { drop(stopped.await) }).await.unwrap();
        });
        Self { driver, backend, socket, stop, serving }
    }

    /// Serves no more, takes down what is published, and returns how much that was.
    pub(crate) async fn end(self) -> usize {
        let _ = self.stop.send(());
        self.serving.await.unwrap();
        let published = self.driver.take_down().await.unwrap();
        self.backend.drain(SOON).await;
        published
    }
}
