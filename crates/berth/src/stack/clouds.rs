//! Twins of clouds beside the drivers (`berth up --cloud`): each node is a server of every twin.
//!
//! A twin keeps its account in `cloud/NAME` of the data directory. It starts before the drivers, which it answers, and ends after
//! them. Programs that run in the place of the provider's own driver ([`crate::stand_ins`]) are pointed at it, too, whatever
//! address their manifest names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use berth_cloud::Twin;
use berth_host::path::Dir;
use berth_node::StandIn;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cloud::{Address, CLOUDS, Cloud};

/// Where twins lie in the data directory.
pub(crate) const DIRECTORY: &str = "cloud";

/// Where the twin of a provider lies.
fn directory(data_dir: &Path, cloud: &Cloud) -> PathBuf {
    data_dir.join(DIRECTORY).join(cloud.name)
}

/// Takes away the devices of twins that were killed; their disks stay.
pub(crate) fn release(data_dir: &Path) -> anyhow::Result<()> {
    for cloud in CLOUDS {
        let released = berth_cloud::release(&directory(data_dir, cloud));
        released.with_context(|| format!("take the devices of cloud {} away", cloud.name))?;
    }
    Ok(())
}

/// A twin that serves.
struct RunningCloud {
    cloud: &'static Cloud,
    twin: Arc<Twin>,
}

/// The twins of one machine.
pub(super) struct Clouds {
    running: Vec<RunningCloud>,
    /// The names of the nodes: the first is the first server of each twin, and so on.
    nodes: Vec<String>,
    servers: TaskTracker,
    stop: CancellationToken,
}

impl Clouds {
    /// Starts the twins of these providers, with a server for each node.
    pub(super) async fn start(
        clouds: &[&'static Cloud],
        data_dir: &Path,
        nodes: Vec<String>,
    ) -> anyhow::Result<Self> {
        let (servers, stop) = (TaskTracker::new(), CancellationToken::new());
        let mut all = Self { running: Vec::new(), nodes, servers, stop };
        for &cloud in clouds {
            let options = cloud.twin(directory(data_dir, cloud), all.nodes.len())?;
            let twin = Twin::open(options).await;
            let twin = twin.with_context(|| format!("start the twin of cloud {}", cloud.name))?;
            for number in 1..=all.nodes.len() {
                // Containers may have it mounted before the first disk comes.
                Dir::ensure(&twin.devices_of(&(cloud.instance)(number)), 0o755)?;
            }
            let (serving, stop) = (twin.clone(), all.stop.clone());
            all.servers.spawn(async move {
                if let Err(error) = serving.serve(stop).await {
                    tracing::error!(cloud = cloud.name, %error, "the twin of a cloud ended");
                }
            });
            all.running.push(RunningCloud { cloud, twin });
        }
        Ok(all)
    }

    /// Where each provider's API is.
    pub(super) fn addresses(&self) -> BTreeMap<String, String> {
        let address = |one: &RunningCloud| (one.cloud.name.to_owned(), one.twin.url().to_owned());
        self.running.iter().map(address).collect()
    }

    /// The flags by which the driver of a backend finds its twin on a node; none if no twin is for it.
    pub(super) fn flags(&self, backend: &str, node: &str) -> Vec<OsString> {
        let Some(one) = self.running.iter().find(|one| one.cloud.name == backend) else { return Vec::new() };
        let credentials = one.cloud.credential_flags.iter().map(OsString::from);
        (one.cloud.address_flags)(&self.address(one, node)).into_iter().chain(credentials).collect()
    }

    /// The programs that run in the place of images on a node, of which drivers of clouds find the twins.
    pub(super) fn stand_ins(&self, table: &[StandIn], node: &str) -> Vec<StandIn> {
        let pointed = |row: &StandIn| {
            let is_driver = |one: &&RunningCloud| {
                row.words.iter().map(String::as_str).take(2).eq(["driver", one.cloud.name])
            };
            let Some(one) = self.running.iter().find(is_driver) else { return row.clone() };
            let address = self.address(one, node);
            let flags = (one.cloud.address_flags)(&address).into_iter();
            StandIn {
                last_words: flags.map(|word| word.to_string_lossy().into_owned()).collect(),
                directories: vec![address.devices],
                ..row.clone()
            }
        };
        table.iter().map(pointed).collect()
    }

    /// Where a node finds what it needs of a twin.
    fn address(&self, one: &RunningCloud, node: &str) -> Address {
        let instance = self.instance(one.cloud, node);
        Address {
            api: one.twin.url().to_owned(),
            metadata: one.twin.metadata_url(&instance),
            devices: one.twin.devices_of(&instance),
        }
    }

    /// The server that a node is.
    fn instance(&self, cloud: &Cloud, node: &str) -> String {
        let number = self.nodes.iter().position(|name| name == node).unwrap_or_default() + 1;
        (cloud.instance)(number)
    }

    /// Gives a node power, or cuts it: its devices are gone then, and what it had not written.
    pub(super) async fn set_power(&self, node: &str, on: bool) -> anyhow::Result<()> {
        for one in &self.running {
            let (twin, instance) = (one.twin.clone(), self.instance(one.cloud, node));
            // Disks that are in use are copied.
            let switched = tokio::task::spawn_blocking(move || twin.set_power(&instance, on)).await?;
            switched.with_context(|| format!("switch the power of node {node} at {}", one.cloud.name))?;
        }
        Ok(())
    }

    /// Ends the twins; devices that nobody uses go with them.
    pub(super) async fn stop(&self) {
        self.stop.cancel();
        self.servers.close();
        self.servers.wait().await;
    }
}
