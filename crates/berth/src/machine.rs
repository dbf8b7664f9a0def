//! What the commands of the embedded machine share: where it is, and how to talk to it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_host::path::Dir;
use berth_runtime::{Runtime, State};
use clap::Args;
use k8s_openapi::api::core::v1::Node;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::{Deserialize, Serialize};

use crate::stack;

/// Where everything lies by default.
pub(crate) const DATA_DIR: &str = "/var/lib/berth";

/// Locked as long as somebody runs there.
pub(crate) const LOCK: &str = "berth.lock";
/// Tells who.
pub(crate) const RUNNING: &str = "running.json";

/// Which machine is meant.
#[derive(Debug, Clone, Args)]
pub(crate) struct Place {
    /// Where everything is kept: objects, volumes, pods
    #[arg(long, env = "BERTH_DATA_DIR", default_value = DATA_DIR, value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
}

/// Which API is asked: the embedded one, or any cluster's.
#[derive(Debug, Clone, Args)]
pub(crate) struct Where {
    #[command(flatten)]
    pub(crate) place: Place,

    /// Ask the cluster of this kubeconfig instead
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
}

impl Where {
    /// A client of the API that is meant; a sentence that says what to do if there is none.
    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        if let Some(path) = &self.kubeconfig {
            return client(path).await;
        }
        let data_dir = &self.place.data_dir;
        let Some(running) = Running::find(data_dir) else {
            bail!(
                "no berth runs in {}: start it with `berth up`, or name another --data-dir",
                data_dir.display()
            );
        };
        client(&running.kubeconfig).await
    }
}

/// A client of the API that a kubeconfig names.
pub(crate) async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig)
        .with_context(|| format!("read the kubeconfig {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Whether a node is ready for pods.
pub(crate) fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Mounting needs root.
pub(crate) fn require_root(command: &str) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("`berth {command}` mounts volumes and runs pods, which only root may: run it with sudo");
    }
    Ok(())
}

/// Who runs in a data directory; read by the other commands.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Running {
    pub(crate) pid: u32,
    pub(crate) address: SocketAddr,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) node: String,
    pub(crate) started: jiff::Timestamp,
    /// Everything is there: what the API says of the node may be of an earlier life.
    #[serde(default)]
    pub(crate) ready: bool,
}

impl Running {
    /// Who runs in this data directory, if somebody does.
    pub(crate) fn find(data_dir: &Path) -> Option<Self> {
        if !Self::is_somebody_in(data_dir) {
            return None;
        }
        let text = std::fs::read(data_dir.join(RUNNING)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Whether somebody is there, be it only about to start or to stop.
    pub(crate) fn is_somebody_in(data_dir: &Path) -> bool {
        // Whoever can take the lock proves that nobody is.
        Dir::open(data_dir).is_ok_and(|dir| dir.lock_exclusively(LOCK).is_err())
    }
}

/// The one kubeconfig of a data directory.
pub(crate) fn kubeconfig(data_dir: &Path) -> PathBuf {
    data_dir.join("apiserver/kubeconfig")
}

/// Makes the data directory ours alone.
pub(crate) fn take(data_dir: &Path) -> anyhow::Result<(Dir, std::fs::File)> {
    let data_dir = std::path::absolute(data_dir)?;
    let data = Dir::ensure(&data_dir, 0o700).with_context(|| format!("open {}", data_dir.display()))?;
    // Others look whether the lock is free by taking it for a moment.
    let mut attempts = 20;
    let lock = loop {
        match data.lock_exclusively(LOCK) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && attempts > 0 => {
                attempts -= 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => break outcome,
        }
    };
    match lock {
        Ok(lock) => Ok((data, lock)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            let who = Running::find(&data_dir).map(|running| format!(" (process {})", running.pid));
            bail!(
                "berth already runs in {}{}: use it, stop it with `berth down`, or choose another --data-dir",
                data_dir.display(),
                who.unwrap_or_default()
            )
        }
        Err(error) => Err(error).context("lock the data directory"),
    }
}

/// Stops every container that runs, all at the same time; gives how many there were.
pub(crate) async fn stop_containers(runtime: &Runtime, grace: Duration) -> usize {
    let containers = runtime.containers();
    let running = containers.iter().filter(|(_, _, state)| matches!(state, State::Running { .. })).count();
    futures_util::future::join_all(containers.iter().map(|(id, _, _)| runtime.stop(id, grace))).await;
    running
}

/// Takes all volumes away from below a data directory; gives how many mounts there were.
pub(crate) async fn take_volumes_away(data_dir: &Path) -> anyhow::Result<usize> {
    let mut taken = stack::take_volumes_down(data_dir).await?;
    // Only the node's: a person may have mounted a disk for the rest.
    let node = data_dir.join(stack::NODE);
    if node.exists() {
        taken += berth_host::mount::unmount_below(&node).context("unmount what is left")?;
    }
    Ok(taken)
}
