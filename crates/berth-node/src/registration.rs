//! Lets CSI drivers join the node: each announces itself by a socket in `plugins_registry`, as with the kubelet.
//!
//! Reads: CSIDriver. Writes (through [`Machine`]): Node annotation and labels, CSINode.
//! Every socket is attended to by a task of its own, so a driver that hangs keeps no other waiting. A socket that is
//! made anew is registered anew; when it goes, its driver goes with it.

mod attend;
mod sockets;
mod version;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use berth_csi::{Call, Client, ClientMetrics, NodeCapability};
use berth_kube::{Cache, Cluster};
use k8s_openapi::api::storage::v1::CSIDriver;
use tokio::sync::{Notify, watch};
use tonic::Status;

use self::attend::Attendant;
use self::sockets::{SocketChange, Sockets};
use self::version::Version;
use crate::layout::Layout;
use crate::machine::Machine;

/// How long a driver may take for one call, as with the kubelet.
pub(crate) const CALL: Duration = Duration::from_secs(2 * 60);

/// Why drivers cannot join.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory cannot be made or watched.
    #[error("watching {} for drivers", path.display())]
    Watch {
        /// The directory that is watched.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A driver that is registered here; cheap to clone.
#[derive(Clone)]
pub struct Driver {
    /// The name that the driver registered under.
    pub name: String,
    client: Client,
    /// How long it may take for one call.
    timeout: Duration,
    /// What its node service can do, asked when it registered: a driver that changes is registered anew.
    capabilities: Arc<HashSet<NodeCapability>>,
    version: Version,
    /// The registration socket that it came with.
    socket: PathBuf,
    refresh: Arc<Notify>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("name", &self.name)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// Whether its node service can do this.
    pub fn can(&self, capability: NodeCapability) -> bool {
        self.capabilities.contains(&capability)
    }

    /// Calls it, for as long as a driver may take.
    pub(crate) async fn call<C: Call>(&self, request: C) -> Result<C::Answer, Status> {
        self.client.call(self.timeout, request).await
    }
}

/// The drivers that are registered here; cheap to clone.
#[derive(Debug, Clone)]
pub struct Drivers {
    registered: Arc<watch::Sender<HashMap<String, Driver>>>,
    /// How long their calls took.
    pub(crate) calls: ClientMetrics,
}

impl Default for Drivers {
    fn default() -> Self {
        Self { registered: Arc::new(watch::channel(HashMap::new()).0), calls: ClientMetrics::default() }
    }
}

impl Drivers {
    /// The driver of this name.
    pub fn get(&self, name: &str) -> Option<Driver> {
        self.registered.borrow().get(name).cloned()
    }

    /// The names of all drivers, in no particular order.
    pub fn names(&self) -> Vec<String> {
        self.registered.borrow().keys().cloned().collect()
    }

    /// Completes when a driver came or went after this was called.
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.registered.subscribe();
        async move {
            if receiver.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits for the driver of this name.
    pub async fn wait(&self, name: &str) -> Driver {
        loop {
            let changed = self.changed();
            if let Some(driver) = self.get(name) {
                return driver;
            }
            changed.await;
        }
    }

    /// Asks a driver for its limits again, and writes them to Kubernetes: something showed that they are not right.
    pub fn refresh(&self, name: &str) {
        if let Some(driver) = self.get(name) {
            driver.refresh.notify_one();
        }
    }

    /// Why a driver cannot be registered beside those that are: one of its name, from another socket and not older.
    fn rival(&self, name: &str, socket: &Path, version: Version) -> Option<Version> {
        let registered = self.registered.borrow();
        let known = registered.get(name).filter(|known| known.socket != socket)?;
        (known.version >= version).then_some(known.version)
    }

    fn insert(&self, driver: Driver) {
        self.registered.send_modify(|registered| {
            registered.insert(driver.name.clone(), driver);
        });
    }

    /// Removes a driver if it came with this socket.
    fn remove(&self, name: &str, socket: &Path) -> bool {
        self.registered.send_if_modified(|registered| {
            let ours = registered.get(name).is_some_and(|known| known.socket == socket);
            if ours {
                registered.remove(name);
            }
            ours
        })
    }
}

/// Watches `directory` for drivers until the cluster's shutdown; those already there register at once. Each call of a driver may
/// take `timeout`.
pub(crate) fn start(
    cluster: &Cluster,
    machine: Arc<Machine>,
    directory: &Path,
    timeout: Duration,
) -> Result<Drivers, Error> {
    let failed = |source| Error::Watch { path: directory.to_owned(), source };
    std::fs::create_dir_all(directory).map_err(failed)?;
    let (sockets, seen) = Sockets::watch(directory).map_err(failed)?;
    let drivers = Drivers::default();
    let objects: Cache<CSIDriver> = cluster.cache();
    let (changed, _) = watch::channel(());
    let changed = Arc::new(changed);
    objects.on_change({
        let changed = changed.clone();
        move |_| {
            changed.send_replace(());
        }
    });
    let attendant = Attendant {
        machine,
        layout: Layout::new(directory.parent().unwrap_or(directory)),
        drivers: drivers.clone(),
        objects,
        changed,
        timeout,
        shutdown: cluster.shutdown().clone(),
    };
    tokio::spawn(follow(sockets, seen, attendant));
    Ok(drivers)
}

async fn follow(mut sockets: Sockets, mut seen: Vec<SocketChange>, attendant: Attendant) {
    // Each socket ever seen, with the generation that is there now.
    let mut wanted: HashMap<PathBuf, watch::Sender<Option<u64>>> = HashMap::new();
    let mut generation = 0;
    loop {
        for seen in seen {
            generation += 1;
            let (path, now) = match seen {
                SocketChange::Come(path) => (path, Some(generation)),
                SocketChange::Gone(path) => (path, None),
            };
            if let Some(known) = wanted.get(&path) {
                known.send_replace(now);
            } else if now.is_some() {
                let (sender, receiver) = watch::channel(now);
                tokio::spawn(attendant.clone().attend(path.clone(), receiver));
                wanted.insert(path, sender);
            }
        }
        seen = tokio::select! {
            () = attendant.shutdown.cancelled() => return,
            seen = sockets.next() => match seen {
                Ok(seen) => seen,
                Err(error) => {
                    tracing::error!(%error, "drivers that come from now on are not seen");
                    attendant.shutdown.cancelled().await;
                    return;
                }
            },
        };
    }
}

#[cfg(test)]
pub(crate) mod tests;
