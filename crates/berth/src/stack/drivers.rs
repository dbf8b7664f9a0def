//! The drivers of one machine: which run, their sockets, and how they stop.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use berth_backends::local::{self, Local};
use berth_backends::nfs::{self, Nfs};
use berth_backends::{Driver, Services, services};
use berth_core::{NodeId, names};
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use berth_host::path::Dir;
use berth_node::layout::Layout;
use berth_sidecars::registrar;
use prometheus_client::registry::Registry;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The local driver's directory in the data directory.
const LOCAL: &str = "local";
/// The NFS driver's directory in the data directory.
const NFS: &str = "nfs";

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A driver that is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Volumes on this machine's disk.
    Local,
    /// Volumes on NFS servers.
    Nfs(NfsChoice),
}

/// How the NFS driver is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NfsChoice {
    /// Its name, as it stands in StorageClass.provisioner.
    pub(crate) name: String,
    /// What mounts; what the kernel can do if `None`.
    pub(crate) mount_mode: Option<nfs::MountMode>,
    /// How servers are reached of which no class says it.
    pub(crate) mount_options: Vec<String>,
}

impl Choice {
    /// The driver's name.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Local => names::LOCAL_DRIVER,
            Self::Nfs(choice) => &choice.name,
        }
    }
}

/// A driver that runs.
pub(crate) struct Running {
    pub(crate) name: String,
    pub(crate) socket: PathBuf,
    /// What a person may want to know of it.
    pub(crate) remark: String,
    volumes: Volumes,
    server: JoinHandle<()>,
}

/// Whose volumes a driver serves.
enum Volumes {
    Local(Local),
    Nfs(Nfs),
}

impl Running {
    /// Starts a driver on what it finds in the data directory.
    pub(crate) async fn start(
        choice: &Choice,
        data_dir: &Path,
        layout: &Layout,
        node: &str,
        serving: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let (volumes, driver, remark) = match choice {
            Choice::Local => {
                let (local, driver) = open_local(data_dir, node).await?;
                let remark = format!("volumes are {} by default", local.default_kind());
                (Volumes::Local(local), driver, remark)
            }
            Choice::Nfs(choice) => {
                let (nfs, driver, mode) = open_nfs(data_dir, node, choice)?;
                let by = match mode {
                    nfs::MountMode::Kernel => "the kernel",
                    nfs::MountMode::Fuse => "FUSE",
                };
                (Volumes::Nfs(nfs), driver, format!("shares are mounted by {by}"))
            }
        };
        driver.recover().await.context("undo what a crash left half done")?;
        let socket = layout.plugins().join(choice.name()).join("csi.sock");
        let endpoint = Endpoint::Unix(socket.clone());
        Dir::ensure(socket.parent().expect("a socket lies in a directory"), 0o700)?;
        let listener = Listener::bind(&endpoint).await.context("listen for CSI calls")?;
        let layer = CallLayer::new(Metrics::register(&mut Registry::default(), choice.name()), None);
        let stop = serving.clone().cancelled_owned();
        let server = tokio::spawn(async move {
            if let Err(error) = berth_csi::serve(listener, driver.routes(), layer, stop).await {
                tracing::error!(%error, "the driver ended badly");
            }
        });
        Ok(Self { name: choice.name().to_owned(), socket, remark, volumes, server })
    }

    /// Waits for the calls under way, after `serving` ended, and for what goes on behind them, at most this long.
    pub(crate) async fn stop(self, drain: Duration) {
        let _ = self.server.await;
        match self.volumes {
            Volumes::Local(local) => local.drain(drain).await,
            Volumes::Nfs(nfs) => nfs.drain(drain).await,
        }
    }

    /// Lets the node know of the driver, for as long as both are there.
    pub(crate) fn introduce(&self, layout: &Layout, shutdown: CancellationToken) -> JoinHandle<()> {
        let options = registrar::Options {
            directory: layout.registry(),
            driver: self.name.clone(),
            endpoint: self.socket.clone(),
        };
        tokio::spawn(async move {
            while !shutdown.is_cancelled() {
                if let Err(error) = registrar::serve(options.clone(), shutdown.clone()).await {
                    tracing::warn!(%error, "the driver is not registered; trying again");
                    tokio::select! {
                        () = shutdown.cancelled() => {}
                        () = tokio::time::sleep(Duration::from_secs(1)) => {}
                    }
                }
            }
        })
    }
}

/// Takes away what drivers have mounted below a data directory where none runs; gives how many mounts there were.
pub(crate) async fn take_down(data_dir: &Path) -> anyhow::Result<usize> {
    let mut taken = 0;
    if data_dir.join(LOCAL).exists() {
        let (_local, driver) = open_local(data_dir, "berth").await?;
        taken += driver.take_down().await.context("take the local driver's volumes away")?;
    }
    if data_dir.join(NFS).exists() {
        let choice = NfsChoice {
            name: names::NFS_DRIVER.to_owned(),
            mount_mode: Some(nfs::MountMode::Kernel),
            mount_options: Vec::new(),
        };
        let (_nfs, driver, _) = open_nfs(data_dir, "berth", &choice)?;
        taken += driver.take_down().await.context("take the NFS driver's volumes away")?;
    }
    Ok(taken)
}

async fn open_local(data_dir: &Path, node: &str) -> anyhow::Result<(Local, Arc<Services>)> {
    let directory = data_dir.join(LOCAL);
    let mut config = local::Config::new(directory.clone(), node_id(node)?);
    config.attachment = true;
    let local = Local::open(config).await.with_context(|| format!("open {}", directory.display()))?;
    let driver = open(local.driver(names::LOCAL_DRIVER, VERSION, services::Mode::All), directory)?;
    Ok((local, driver))
}

fn open_nfs(
    data_dir: &Path,
    node: &str,
    choice: &NfsChoice,
) -> anyhow::Result<(Nfs, Arc<Services>, nfs::MountMode)> {
    let directory = data_dir.join(NFS);
    Dir::ensure(&directory, 0o700)?;
    let mode = choice.mount_mode.unwrap_or_else(what_the_kernel_can);
    let mut config = nfs::Config::new(directory.join("shares"), node_id(node)?);
    config.mount_mode = mode;
    config.mount_options.clone_from(&choice.mount_options);
    let nfs = Nfs::new(config)?;
    let driver = open(nfs.driver(&choice.name, VERSION, services::Mode::All), directory)?;
    Ok((nfs, driver, mode))
}

fn open(driver: Driver, directory: PathBuf) -> anyhow::Result<Arc<Services>> {
    Ok(driver.open(services::Config::new(directory))?)
}

fn node_id(node: &str) -> anyhow::Result<NodeId> {
    node.parse().context("the node's name cannot be the driver's node id")
}

/// The kernel mounts where it can: its client is faster, and knows locks.
fn what_the_kernel_can() -> nfs::MountMode {
    if berth_host::remote::kernel_has("nfs") { nfs::MountMode::Kernel } else { nfs::MountMode::Fuse }
}
