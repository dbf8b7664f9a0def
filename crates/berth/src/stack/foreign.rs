//! Drivers that somebody else runs (`berth up --driver-endpoint`): what their capabilities call for, by their socket alone.
//!
//! A driver that is not there is waited for. One that restarts is asked again who it is: if it is the same as before, its sidecars
//! go on, and otherwise they and its registration begin anew, because another version may need others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_core::Backoff;
use berth_csi::{Endpoint, PluginService, v1};
use berth_kube::Cluster;
use berth_node::Drivers;
use berth_sidecars::driver::{Driver, Identity};
use berth_sidecars::registrar;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::sidecars_of;
use crate::launch::Sidecars;
use crate::metrics::Telemetry;
use crate::sidecars::Sidecar;

/// How long the start waits to see whether a driver is there; the driver itself may come at any time.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a driver that is ready gets to register with the node by itself.
const OWN_REGISTRATION: Duration = Duration::from_secs(1);
/// How long a question about the node may take.
const ASKING: Duration = Duration::from_secs(10);
/// How long to wait before a driver is asked again who it is, where connections to it do not last.
const ASK_AGAIN: Backoff = Backoff { first: Duration::from_millis(50), longest: Duration::from_mins(1) };

/// What the foreign drivers of one machine share.
pub(super) struct Host {
    pub(super) table: Vec<Sidecar>,
    pub(super) cluster: Cluster,
    pub(super) queues: berth_kube::Metrics,
    pub(super) telemetry: Telemetry,
    /// How long every call may take; as long as with the upstream sidecars if `None`.
    pub(super) call_timeout: Option<Duration>,
    /// The drivers that the node knows.
    pub(super) registered: Drivers,
    /// Where registration sockets lie.
    pub(super) registry: PathBuf,
    /// Who has sidecars: drivers by name, each with its socket. A second one of the same name would do the same work twice.
    pub(super) served: Mutex<BTreeMap<String, PathBuf>>,
    /// Whether this is the only foreign driver, so that none but itself can be its controller.
    pub(super) single: bool,
}

/// Serves the drivers behind these sockets, and says which of them are there.
pub(super) async fn serve(
    host: Host,
    sockets: &[PathBuf],
    loops: &CancellationToken,
    report: &(dyn Fn(&str) + Sync),
) -> Vec<JoinHandle<()>> {
    let host = Arc::new(host);
    let mut tasks = Vec::new();
    for socket in sockets {
        let driver = Foreign::new(socket, host.clone());
        report(&match driver.identity_within(FIRST_ANSWER_TIMEOUT).await {
            Some(identity) => format!("driver {} at {}", identity.name, socket.display()),
            None => format!("waiting for a driver at {}", socket.display()),
        });
        tasks.push(tokio::spawn(driver.run(loops.clone())));
    }
    tasks
}

/// A driver behind a socket.
struct Foreign {
    socket: PathBuf,
    driver: Driver,
    host: Arc<Host>,
    /// By the driver's name, because their metrics say it; registered once.
    sidecars: BTreeMap<String, Arc<Sidecars>>,
}

impl Foreign {
    fn new(socket: &Path, host: Arc<Host>) -> Self {
        let driver = Driver::connect(&Endpoint::Unix(socket.to_owned()));
        Self { socket: socket.to_owned(), driver, host, sidecars: BTreeMap::new() }
    }

    /// Who the driver is, if it answers within that time.
    async fn identity_within(&self, time: Duration) -> Option<Arc<Identity>> {
        tokio::time::timeout(time, self.driver.ready()).await.ok()
    }

    /// Serves the driver until `stop`; then finishes what is under way.
    async fn run(mut self, stop: CancellationToken) {
        loop {
            let identity = tokio::select! {
                () = stop.cancelled() => return,
                identity = self.driver.ready() => identity,
            };
            let sidecars = self.sidecars_for(&identity);
            let term = stop.child_token();
            let cluster =
                Cluster::new(self.host.cluster.client().clone(), term.clone()).measured(&self.host.queues);
            let work = async {
                let running = async {
                    if let Some(sidecars) = &sidecars
                        && let Err(error) = sidecars.run_in(cluster, Some(self.driver.clone())).await
                    {
                        tracing::error!(driver = identity.name, "sidecars do not run: {error:#}");
                    }
                };
                tokio::join!(running, self.register(&identity.name, &term));
            };
            let until = async {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = self.changed(&identity) => {
                        tracing::info!(driver = identity.name, "the driver has changed; its sidecars start anew");
                    }
                }
                term.cancel();
            };
            tokio::join!(work, until);
            if sidecars.is_some() {
                self.host.served.lock().remove(&identity.name);
            }
        }
    }

    /// The sidecars of a driver, unless another one of its name has them.
    fn sidecars_for(&mut self, identity: &Identity) -> Option<Arc<Sidecars>> {
        let name = &identity.name;
        if !self.host.single && !identity.services.contains(&PluginService::ControllerService) {
            tracing::info!(driver = name, "no sidecars: this process of the driver has no controller");
            return None;
        }
        let mut served = self.host.served.lock();
        if let Some(other) = served.get(name) {
            tracing::error!(
                driver = name,
                socket = %self.socket.display(),
                "no sidecars: a driver of this name has them already, at {}; give one of them another name",
                other.display()
            );
            return None;
        }
        let sidecars = match self.sidecars.get(name) {
            Some(known) => known.clone(),
            None => match sidecars_of(&self.host, name, &self.driver) {
                Ok(sidecars) => self.sidecars.entry(name.clone()).or_insert(Arc::new(sidecars)).clone(),
                Err(error) => {
                    tracing::error!(driver = name, "sidecars do not run: {error:#}");
                    return None;
                }
            },
        };
        served.insert(name.clone(), self.socket.clone());
        Some(sidecars)
    }

    /// Registers the driver with the node while nobody else does, until `term`.
    async fn register(&self, name: &str, term: &CancellationToken) {
        let work = async {
            let registered = &self.host.registered;
            loop {
                self.driver.ready().await;
                if tokio::time::timeout(OWN_REGISTRATION, registered.wait(name)).await.is_err() {
                    break;
                }
                // It has a registrar of its own, or another process of its name is on this node.
                loop {
                    let changed = registered.changed();
                    if registered.get(name).is_none() {
                        break;
                    }
                    changed.await;
                }
            }
            let info = self.driver.call(ASKING, v1::NodeGetInfoRequest {}).await;
            if info.is_err_and(|status| status.code() == Code::Unimplemented) {
                tracing::info!(
                    driver = name,
                    "not registered: this process of the driver has no node service"
                );
                return;
            }
            let options = registrar::Options {
                directory: self.host.registry.clone(),
                driver: name.to_owned(),
                endpoint: self.socket.clone(),
            };
            registrar::keep_registered(options, term.clone()).await;
        };
        tokio::select! {
            () = term.cancelled() => {}
            () = work => {}
        }
    }

    /// Returns when the driver is another one than `known`; notifies the node of each restart.
    async fn changed(&self, known: &Identity) {
        let mut unchanged = 0;
        loop {
            let begun = Instant::now();
            self.disconnected().await;
            self.driver.ask_again();
            if *self.driver.ready().await != *known {
                return;
            }
            self.host.registered.refresh(&known.name);
            unchanged = if begun.elapsed() > ASK_AGAIN.longest { 1 } else { unchanged + 1 };
            tokio::time::sleep(ASK_AGAIN.pause(unchanged)).await;
        }
    }

    /// Returns when the process behind the socket ends: the kernel then closes a connection on which nothing was said.
    async fn disconnected(&self) {
        let Ok(mut connection) = UnixStream::connect(&self.socket).await else { return };
        let mut buffer = [0; 1024];
        while connection.read(&mut buffer).await.is_ok_and(|length| length > 0) {}
    }
}
