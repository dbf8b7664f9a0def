//! A driver behind a socket, all of whose connections break when it crashes.

use std::path::PathBuf;
use std::sync::Arc;

use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::bench::DRIVER;
use crate::fake::{Fake, Storage};

/// The socket of a driver over a storage.
pub(crate) struct Socket {
    pub(crate) endpoint: Endpoint,
    _end: DropGuard,
    _place: tempfile::TempDir,
}

impl Socket {
    pub(crate) async fn serve(storage: &Arc<Storage>) -> Self {
        let place = tempfile::Builder::new().prefix("cs-").rand_bytes(5).tempdir().unwrap();
        let (inner, outer) = (place.path().join("driver"), place.path().join("csi.sock"));
        let end = CancellationToken::new();
        let driver = Listener::bind(&Endpoint::Unix(inner.clone())).await.unwrap();
        let layer = CallLayer::new(Metrics::unregistered(DRIVER), None);
        let (routes, stop) = (Fake::routes(storage), end.clone());
        tokio::spawn(async move {
            berth_csi::serve(driver, routes, layer, stop.cancelled()).await.unwrap();
        });
        let listener = UnixListener::bind(&outer).unwrap();
        tokio::spawn(relay(listener, inner, storage.clone(), end.clone()));
        Self { endpoint: Endpoint::Unix(outer), _end: end.drop_guard(), _place: place }
    }
}

/// Passes bytes on, until the driver crashes. It is back at once.
async fn relay(listener: UnixListener, driver: PathBuf, storage: Arc<Storage>, end: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = end.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (Ok((mut caller, _)), Ok(mut driver)) = (accepted, UnixStream::connect(&driver).await) else {
            continue;
        };
        let (storage, end) = (storage.clone(), end.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = end.cancelled() => {}
                () = storage.crashed.notified() => {}
                _ = tokio::io::copy_bidirectional(&mut caller, &mut driver) => {}
            }
        });
    }
}
