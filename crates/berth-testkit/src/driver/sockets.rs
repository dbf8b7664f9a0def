//! Drivers behind sockets: one that a kubelet registers, and one whose connections break when it crashes.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use berth_csi::registration::registration_server::{Registration, RegistrationServer};
use berth_csi::registration::{
    CSI_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use parking_lot::Mutex;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::FakeDriver;

/// A server on a Unix socket, until it is stopped or dropped.
struct SocketServer {
    task: JoinHandle<()>,
}

impl SocketServer {
    async fn start(path: PathBuf, routes: Routes) -> Self {
        let listener = Listener::bind(&Endpoint::Unix(path)).await.unwrap();
        let layer = CallLayer::new(Metrics::unregistered("fake"), None);
        let serving = berth_csi::serve(listener, routes, layer, std::future::pending::<()>());
        Self { task: tokio::spawn(async move { serving.await.unwrap() }) }
    }

    /// Ends the server and waits until nothing of it runs any more.
    async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for SocketServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A driver on a socket of its own, which a second socket in a plugin registry announces to a kubelet.
///
/// It runs between [`RegisteredDriver::start`] and [`RegisteredDriver::stop`]. Dropped, it ends as a driver that is killed.
pub struct RegisteredDriver {
    driver: Arc<FakeDriver>,
    endpoint: PathBuf,
    versions: Vec<String>,
    statuses: watch::Sender<Vec<RegistrationStatus>>,
    running: Mutex<Vec<SocketServer>>,
}

impl Deref for RegisteredDriver {
    type Target = FakeDriver;

    fn deref(&self) -> &FakeDriver {
        &self.driver
    }
}

impl RegisteredDriver {
    /// A driver that will have its socket in a directory, and supports version 1.0.0.
    pub fn new(name: &str, directory: &Path) -> Self {
        Self::with_versions(name, directory, &["1.0.0"])
    }

    /// A driver that will have its socket in a directory, and registers with these versions.
    pub fn with_versions(name: &str, directory: &Path, versions: &[&str]) -> Self {
        Self {
            driver: FakeDriver::new(name),
            endpoint: directory.join(format!("{name}.csi.sock")),
            versions: versions.iter().map(ToString::to_string).collect(),
            statuses: watch::channel(Vec::new()).0,
            running: Mutex::default(),
        }
    }

    /// What the kubelet answered to registrations so far.
    pub fn statuses(&self) -> watch::Receiver<Vec<RegistrationStatus>> {
        self.statuses.subscribe()
    }

    /// Serves the driver, and announces it in `registry` by a socket of this name.
    pub async fn start(&self, registry: &Path, socket: &str) {
        self.start_as(self.driver.routes(), registry, socket).await;
    }

    /// As [`RegisteredDriver::start`], with the services of another driver behind the socket.
    pub async fn start_as(&self, services: Routes, registry: &Path, socket: &str) {
        let info = PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: self.driver.name.clone(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: self.versions.clone(),
        };
        let registration = Registrar { info, statuses: self.statuses.clone() };
        let registration = Routes::new(RegistrationServer::new(registration));
        let driver = SocketServer::start(self.endpoint.clone(), services).await;
        let registration = SocketServer::start(registry.join(socket), registration).await;
        *self.running.lock() = vec![driver, registration];
    }

    /// Ends both servers, as a driver that exits does.
    pub async fn stop(&self) {
        let running = std::mem::take(&mut *self.running.lock());
        for server in running {
            server.stop().await;
        }
    }
}

struct Registrar {
    info: PluginInfo,
    statuses: watch::Sender<Vec<RegistrationStatus>>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.statuses.send_modify(|statuses| statuses.push(request.into_inner()));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// A driver behind a socket, all of whose connections break when [`super::FaultKind::Crash`] strikes. It is back at once.
pub struct CrashingSocket {
    /// The address that callers connect to.
    pub endpoint: Endpoint,
    _end: DropGuard,
    _driver: SocketServer,
    _directory: tempfile::TempDir,
}

impl CrashingSocket {
    /// Serves a driver until this is dropped.
    pub async fn serve(driver: &Arc<FakeDriver>) -> Self {
        let directory = tempfile::Builder::new().prefix("cs-").rand_bytes(5).tempdir().unwrap();
        let (inner, outer) = (directory.path().join("driver"), directory.path().join("csi.sock"));
        let server = SocketServer::start(inner.clone(), driver.routes()).await;
        let end = CancellationToken::new();
        let listener = UnixListener::bind(&outer).unwrap();
        tokio::spawn(relay(listener, inner, driver.clone(), end.clone()));
        Self {
            endpoint: Endpoint::Unix(outer),
            _end: end.drop_guard(),
            _driver: server,
            _directory: directory,
        }
    }
}

/// Passes bytes on, until the driver crashes.
async fn relay(listener: UnixListener, inner: PathBuf, driver: Arc<FakeDriver>, end: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = end.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (Ok((mut caller, _)), Ok(mut served)) = (accepted, UnixStream::connect(&inner).await) else {
            continue;
        };
        let (driver, end) = (driver.clone(), end.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = end.cancelled() => {}
                () = driver.crashed.notified() => {}
                _ = tokio::io::copy_bidirectional(&mut caller, &mut served) => {}
            }
        });
    }
}
