//! Attends to one registration socket: registers its driver, keeps what it says of the node current, and deregisters it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use berth_csi::code::status_text;
use berth_csi::registration::{CSI_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus};
use berth_csi::v1::NodeGetInfoRequest;
use berth_csi::{Client, Endpoint};
use berth_kube::{Backoff, Cache};
use k8s_openapi::api::storage::v1::CSIDriver;
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Driver, Drivers, version};
use crate::layout::Layout;
use crate::machine::{DriverInfo, Machine};

/// How long a socket may take to be listened on.
const DIAL: Duration = Duration::from_secs(10);
/// How long a plugin may take to say who it is.
const INFO: Duration = Duration::from_secs(1);
/// How long a plugin may take to hear what came of it.
const NOTIFY: Duration = Duration::from_secs(5);
/// How soon a socket is dialled again that is not listened on yet.
const DIAL_BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(2), longest: Duration::from_millis(500) };
/// How soon a registration that failed is tried again.
const REGISTRATION_BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(122) };

/// What attending to a socket needs; cheap to clone.
#[derive(Clone)]
pub(super) struct Attendant {
    pub(super) machine: Arc<Machine>,
    pub(super) layout: Layout,
    pub(super) drivers: Drivers,
    pub(super) objects: Cache<CSIDriver>,
    /// Script whenever a CSIDriver changes.
    pub(super) changed: Arc<watch::Sender<()>>,
    /// How long a driver may take for one call.
    pub(super) timeout: Duration,
    pub(super) shutdown: CancellationToken,
}

/// Why a driver was not registered.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("dial failed at socket {}, err: {error}", path.display())]
    Dial { path: PathBuf, error: String },
    #[error("failed to get plugin info using RPC GetInfo at socket {}, err: {}", path.display(), status.message())]
    Info { path: PathBuf, status: Box<Status> },
    #[error("RegisterPlugin error -- no handler registered for plugin type: {kind} at socket {}", path.display())]
    Type { kind: String, path: PathBuf },
    #[error("RegisterPlugin error -- plugin validation failed with err: {0}")]
    Invalid(String),
    #[error("RegisterPlugin error -- plugin registration failed with err: {0}")]
    Failed(String),
    #[error("failed to send registration status at socket {}, err: {}", path.display(), status.message())]
    Notify { path: PathBuf, status: Box<Status> },
}

impl Attendant {
    /// Attends to a socket until the shutdown; `wanted` is the generation that is there, if any is.
    pub(super) async fn attend(self, path: PathBuf, mut wanted: watch::Receiver<Option<u64>>) {
        let shutdown = self.shutdown.clone();
        // The name under which something of this socket may be known to Kubernetes.
        let mut name = None;
        let work = async {
            loop {
                let there = wanted.borrow_and_update().is_some();
                let work = async {
                    if there {
                        self.keep_registered(&path, &mut name).await;
                    } else {
                        self.deregister(&path, &mut name).await;
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    () = work => {}
                    changed = wanted.changed() => if changed.is_err() { return },
                }
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = work => {}
        }
    }

    /// Registers the driver, again if need be, and keeps it so; never returns.
    async fn keep_registered(&self, path: &Path, name: &mut Option<String>) {
        let mut failures = 0;
        loop {
            match self.register(path, name).await {
                Ok(driver) => {
                    tracing::info!(driver = driver.name, socket = %path.display(), "registered");
                    failures = 0;
                    self.keep_current(&driver).await;
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(socket = %path.display(), %error, "a driver was not registered");
                    if let Some(name) = name.as_deref() {
                        self.forget(name, path).await;
                    }
                    tokio::time::sleep(REGISTRATION_BACKOFF.pause(failures)).await;
                }
            }
        }
    }

    async fn register(&self, path: &Path, name: &mut Option<String>) -> Result<Driver, Refused> {
        let plugin = dial(path).await?;
        let info = plugin
            .call(INFO, InfoRequest {})
            .await
            .map_err(|status| Refused::Info { path: path.to_owned(), status: Box::new(status) })?;
        let result = self.accept(path, info, name).await;
        let status = match &result {
            Ok(_) => RegistrationStatus { plugin_registered: true, error: String::new() },
            Err(error) => RegistrationStatus { plugin_registered: false, error: error.to_string() },
        };
        let notified = plugin.call(NOTIFY, status).await;
        let driver = result?;
        notified.map_err(|status| Refused::Notify { path: path.to_owned(), status: Box::new(status) })?;
        Ok(driver)
    }

    async fn accept(
        &self,
        path: &Path,
        info: PluginInfo,
        name: &mut Option<String>,
    ) -> Result<Driver, Refused> {
        if info.r#type != CSI_PLUGIN {
            return Err(Refused::Type { kind: info.r#type, path: path.to_owned() });
        }
        let invalid = |why: String| Refused::Invalid(format!("CSI driver {:?}: {why}", info.name));
        if info.name.is_empty() {
            return Err(invalid("the plugin gave no name".to_owned()));
        }
        let version = version::highest(&info.supported_versions).ok_or_else(|| {
            invalid(format!(
                "none of the versions {:?} are supported; a 1.x is needed",
                info.supported_versions
            ))
        })?;
        if let Some(rival) = self.drivers.rival(&info.name, path, version) {
            return Err(invalid(format!(
                "another driver with the same name is already registered with a higher supported version: {rival}"
            )));
        }
        let endpoint = match info.endpoint.as_str() {
            "" => Ok(Endpoint::Unix(path.to_owned())),
            endpoint => endpoint.parse::<Endpoint>(),
        };
        // As its manifest calls it, which knows one kubelet's directory.
        let endpoint = endpoint.map(|endpoint| match endpoint {
            Endpoint::Unix(socket) => Endpoint::Unix(self.layout.locate(&socket)),
            tcp @ Endpoint::Tcp { .. } => tcp,
        });
        let client = Client::connect(&endpoint.map_err(|error| invalid(error.to_string()))?);
        client.measure_with(&self.drivers.calls);
        // From here on something of it may be in Kubernetes; a name that it had before is not its own any more.
        if let Some(before) = name.replace(info.name.clone()).filter(|before| *before != info.name) {
            self.forget(&before, path).await;
        }
        let (described, capabilities) = tokio::try_join!(
            describe(&info.name, &client, self.timeout),
            client.node_capabilities(self.timeout)
        )
        .map_err(|status| Refused::Failed(status_text(&status)))?;
        self.machine.announce(&described).await.map_err(|error| Refused::Failed(error.chain()))?;
        let driver = Driver {
            name: info.name,
            client,
            timeout: self.timeout,
            capabilities: Arc::new(capabilities),
            version,
            socket: path.to_owned(),
            refresh: Arc::new(Notify::new()),
        };
        self.drivers.insert(driver.clone());
        Ok(driver)
    }

    /// Repeats what the driver says of the node as often as its CSIDriver asks for; returns when Kubernetes lost it.
    async fn keep_current(&self, driver: &Driver) {
        let mut changed = self.changed.subscribe();
        loop {
            let period = self
                .objects
                .named(&driver.name)
                .and_then(|object| object.spec.node_allocatable_update_period_seconds)
                .and_then(|seconds| u64::try_from(seconds).ok())
                .filter(|seconds| *seconds > 0);
            let pause = async {
                match period {
                    Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = pause => {}
                () = driver.refresh.notified() => {}
                () = self.machine.lost(&driver.name) => return,
                _ = changed.changed() => continue,
            }
            match describe(&driver.name, &driver.client, self.timeout).await {
                Ok(described) => {
                    if let Err(error) = self.machine.announce(&described).await {
                        tracing::warn!(
                            driver = driver.name,
                            error = error.chain(),
                            "what the driver says of the node was not written"
                        );
                    }
                }
                Err(status) => {
                    tracing::warn!(
                        driver = driver.name,
                        error = status_text(&status),
                        "the driver says nothing of the node"
                    );
                }
            }
        }
    }

    async fn deregister(&self, path: &Path, name: &mut Option<String>) {
        if let Some(known) = name.as_deref() {
            self.forget(known, path).await;
            *name = None;
        }
    }

    /// Removes the driver of this socket here and in Kubernetes, however long that takes.
    async fn forget(&self, name: &str, path: &Path) {
        self.drivers.remove(name, path);
        let mut failures = 0;
        // Another socket may have taken the name over.
        while self.drivers.get(name).is_none() {
            match self.machine.withdraw(name).await {
                Ok(()) => {
                    tracing::info!(driver = name, "deregistered");
                    return;
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(driver = name, error = error.chain(), "a driver was not withdrawn");
                    tokio::time::sleep(REGISTRATION_BACKOFF.pause(failures)).await;
                }
            }
        }
    }
}

/// Connects to a socket; one that was just made may not be listened on yet.
async fn dial(path: &Path) -> Result<Client, Refused> {
    let mut attempts = 0;
    let connected = tokio::time::timeout(DIAL, async {
        loop {
            if UnixStream::connect(path).await.is_ok() {
                return;
            }
            attempts += 1;
            tokio::time::sleep(DIAL_BACKOFF.pause(attempts)).await;
        }
    });
    let failed = |error: String| Refused::Dial { path: path.to_owned(), error };
    connected.await.map_err(|_| failed(format!("nobody listened within {DIAL:?}")))?;
    Ok(Client::connect(&Endpoint::Unix(path.to_owned())))
}

/// What a driver says of the node.
async fn describe(name: &str, client: &Client, timeout: Duration) -> Result<DriverInfo, Status> {
    let answer = client.call(timeout, NodeGetInfoRequest {}).await?;
    Ok(DriverInfo {
        name: name.to_owned(),
        node_id: answer.node_id,
        max_volumes: answer.max_volumes_per_node,
        topology: answer.accessible_topology.map(|topology| topology.segments).unwrap_or_default(),
    })
}
