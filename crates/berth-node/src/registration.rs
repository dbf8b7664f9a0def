//! Lets CSI drivers join the node: each announces itself by a socket in `plugins_registry`, as with the kubelet.
//!
//! Reads: CSIDriver. Writes (through [`Machine`]): Node annotation and labels, CSINode.
//! Every socket is attended to by a task of its own, so a driver that hangs keeps no other waiting. A socket that is
//! made anew is registered anew; when it goes, its driver goes with it.

mod attend;
mod sockets;
mod version;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use berth_csi::v1::node_client::NodeClient;
use berth_csi::v1::node_service_capability::rpc;
use berth_csi::v1::{NodeGetCapabilitiesRequest, node_service_capability};
use berth_kube::{Cache, Cluster};
use k8s_openapi::api::storage::v1::CSIDriver;
use parking_lot::RwLock;
use tokio::sync::{Notify, watch};
use tonic::transport::Channel;
use tonic::{Request, Status};

use self::attend::Attendant;
use self::sockets::{Seen, Sockets};
use self::version::Version;
use crate::machine::Machine;

/// How long a driver may take for one call, as with the kubelet.
pub const CALL: Duration = Duration::from_secs(2 * 60);

/// Why drivers cannot join.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory cannot be made or watched.
    #[error("watching {} for drivers", path.display())]
    Watch {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What the node service of a driver can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is one capability of the spec")]
pub struct Capabilities {
    /// STAGE_UNSTAGE_VOLUME.
    pub stage: bool,
    /// GET_VOLUME_STATS.
    pub stats: bool,
    /// EXPAND_VOLUME.
    pub expand: bool,
    /// SINGLE_NODE_MULTI_WRITER.
    pub single_node_multi_writer: bool,
    /// VOLUME_MOUNT_GROUP.
    pub mount_group: bool,
}

/// A driver that is registered here; cheap to clone.
#[derive(Clone)]
pub struct Driver {
    /// Its name.
    pub name: String,
    /// The connection to it, which is made anew when it breaks.
    pub channel: Channel,
    capabilities: Arc<RwLock<Capabilities>>,
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
    /// What it could do when it was last asked.
    pub fn capabilities(&self) -> Capabilities {
        *self.capabilities.read()
    }

    /// Asks what it can do: it may have been replaced since it was registered.
    pub async fn ask_capabilities(&self) -> Result<Capabilities, Status> {
        let capabilities = ask_capabilities(self.channel.clone()).await?;
        *self.capabilities.write() = capabilities;
        Ok(capabilities)
    }
}

/// The drivers that are registered here; cheap to clone.
#[derive(Debug, Clone)]
pub struct Drivers {
    registered: Arc<watch::Sender<HashMap<String, Driver>>>,
}

impl Default for Drivers {
    fn default() -> Self {
        Self { registered: Arc::new(watch::channel(HashMap::new()).0) }
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

    /// Asks a driver for its limits again, and tells Kubernetes: something showed that they are not right.
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

/// Watches `directory` for drivers until the cluster's shutdown; those already there register at once.
pub fn start(cluster: &Cluster, machine: Arc<Machine>, directory: &Path) -> Result<Drivers, Error> {
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
        drivers: drivers.clone(),
        objects,
        changed,
        shutdown: cluster.shutdown().clone(),
    };
    tokio::spawn(follow(sockets, seen, attendant));
    Ok(drivers)
}

async fn follow(mut sockets: Sockets, mut seen: Vec<Seen>, attendant: Attendant) {
    // Each socket ever seen, with the generation that is there now.
    let mut wanted: HashMap<PathBuf, watch::Sender<Option<u64>>> = HashMap::new();
    let mut generation = 0;
    loop {
        for seen in seen {
            generation += 1;
            let (path, now) = match seen {
                Seen::Come(path) => (path, Some(generation)),
                Seen::Gone(path) => (path, None),
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

async fn ask_capabilities(channel: Channel) -> Result<Capabilities, Status> {
    let mut request = Request::new(NodeGetCapabilitiesRequest {});
    request.set_timeout(CALL);
    let mut node = NodeClient::new(channel);
    let answer = within(CALL, node.node_get_capabilities(request)).await?.into_inner();
    let mut capabilities = Capabilities::default();
    for capability in answer.capabilities {
        let Some(node_service_capability::Type::Rpc(known)) = capability.r#type else { continue };
        match known.r#type() {
            rpc::Type::StageUnstageVolume => capabilities.stage = true,
            rpc::Type::GetVolumeStats => capabilities.stats = true,
            rpc::Type::ExpandVolume => capabilities.expand = true,
            rpc::Type::SingleNodeMultiWriter => capabilities.single_node_multi_writer = true,
            rpc::Type::VolumeMountGroup => capabilities.mount_group = true,
            _ => {}
        }
    }
    Ok(capabilities)
}

/// A call that is not waited for longer than this, whatever the other side does.
pub(crate) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded(format!("the driver did not answer within {limit:?}")))
    })
}

#[cfg(test)]
pub(crate) mod tests;
