//! What the commands of the embedded machine share: where it is, and how to talk to it.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_host::path::Dir;
use berth_kube::{Cluster, Key, Kind};
use berth_node::layout::Layout;
use berth_runtime::{Cri, Processes, Runtime, State, endpoint_of};
use clap::Args;
use k8s_openapi::api::core::v1::Node;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::stack;

/// Where everything of root lies by default.
const DATA_DIR: &str = "/var/lib/berth";
/// And everything of another user, in the directory for data of its home.
const USER_DATA_DIR: &str = "berth";

/// Locked as long as somebody runs there.
pub(crate) const LOCK: &str = "berth.lock";
/// The file that names the process which holds the lock, and where its API is.
pub(crate) const RUNNING: &str = "running.json";

/// Which machine is meant.
#[derive(Debug, Clone, Args)]
pub(crate) struct DataDirArg {
    /// Where everything is kept: objects, volumes, pods
    #[arg(long, env = "BERTH_DATA_DIR", default_value_os_t = default_data_dir(), value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
}

/// Where everything lies if nobody says where: root's in the place of services, another user's at home.
pub(crate) fn default_data_dir() -> PathBuf {
    if rustix::process::geteuid().is_root() && !berth_host::namespace::is_own() {
        return DATA_DIR.into();
    }
    let named =
        |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = named("XDG_DATA_HOME").or_else(|| Some(named("HOME")?.join(".local/share")));
    data.map_or_else(|| DATA_DIR.into(), |data| data.join(USER_DATA_DIR))
}

/// The cluster that a command reads: that of a kubeconfig, or the one that `berth up` runs in a data directory.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClusterArgs {
    /// The data directory of `berth up` [default: /var/lib/berth, without root ~/.local/share/berth]
    #[arg(long, env = "BERTH_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// The kubeconfig of another cluster [default: KUBECONFIG, unless --data-dir is given]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// The data directory that is named.
    pub(crate) fn data_dir(&self) -> Option<&Path> {
        self.data_dir.as_deref()
    }

    /// What people call the cluster: the context of the kubeconfig, or the name of this machine's.
    pub(crate) fn name(&self) -> String {
        let named = match (&self.kubeconfig, &self.data_dir) {
            (None, Some(_)) => None,
            (path, _) => kubeconfig_named(path.as_deref()).ok().flatten(),
        };
        named.and_then(|config| config.current_context).unwrap_or_else(|| "berth".to_owned())
    }

    /// Connects to the cluster, and says where its timeline is kept if `berth up` runs it on this machine. The error says
    /// what to do if there is no cluster.
    pub(crate) async fn connect(&self) -> anyhow::Result<(Cluster, Option<PathBuf>)> {
        let data_dir = self.data_dir.clone().unwrap_or_else(default_data_dir);
        let named = match (&self.kubeconfig, &self.data_dir) {
            (None, Some(_)) => None,
            (path, _) => kubeconfig_named(path.as_deref())?,
        };
        if let Some(kubeconfig) = named {
            let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
            // A kubeconfig that was copied from the data directory leads to the same cluster.
            let running = Running::find(&data_dir).ok().flatten();
            let is_ours = running.is_some_and(|running| {
                config
                    .cluster_url
                    .authority()
                    .is_some_and(|authority| authority.as_str() == running.address.to_string())
            });
            return Ok((read_only(Client::try_from(config)?), is_ours.then_some(data_dir)));
        }
        let running = match Running::find(&data_dir) {
            Ok(Some(running)) => running,
            Ok(None) => bail!(
                "no berth runs in {}: start it with `berth up`, or give --data-dir or --kubeconfig",
                data_dir.display()
            ),
            Err(error) => bail!("cannot read {}: {error}. Use sudo, or --kubeconfig", data_dir.display()),
        };
        Ok((connect(&running).await?, Some(data_dir)))
    }
}

/// Connects to the API of what runs in a data directory.
pub(crate) async fn connect(running: &Running) -> anyhow::Result<Cluster> {
    let kubeconfig = read_kubeconfig(&running.kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(read_only(Client::try_from(config)?))
}

/// The kubeconfig that a flag or else the environment variable KUBECONFIG names, if either does.
pub(crate) fn kubeconfig_named(flag: Option<&Path>) -> anyhow::Result<Option<Kubeconfig>> {
    match flag {
        Some(path) => read_kubeconfig(path).map(Some),
        None => Kubeconfig::from_env().context("read the kubeconfig that KUBECONFIG names"),
    }
}

fn read_kubeconfig(path: &Path) -> anyhow::Result<Kubeconfig> {
    Kubeconfig::read_from(path).with_context(|| format!("read the kubeconfig {}", path.display()))
}

/// A cluster that only requests are sent to: it starts no watch, so nothing has to be stopped.
fn read_only(client: Client) -> Cluster {
    Cluster::new(client, CancellationToken::new())
}

/// Whether a node is ready for pods.
pub(crate) fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Waits until an object is (or is no longer) as it should be; gives its last state, `None` if it was deleted.
pub(crate) async fn until<K: Kind>(
    cluster: &Cluster,
    limit: Duration,
    key: Key,
    done: impl Fn(Option<&K>) -> bool,
) -> anyhow::Result<Option<Arc<K>>> {
    let cache = cluster.cache::<K>();
    let (notify, mut changes) = watch::channel(());
    cache.subscribe(move |_, _| {
        notify.send_replace(());
    });
    let wait = async {
        cache.synced().await;
        loop {
            changes.mark_unchanged();
            let now = cache.get(&key);
            if done(now.as_deref()) {
                return now;
            }
            // The sender lives as long as the cache.
            let _ = changes.changed().await;
        }
    };
    match tokio::time::timeout(limit, wait).await {
        Ok(object) => Ok(object),
        Err(_) => bail!("{} {key} is not as it should be after {limit:?}", K::kind(&())),
    }
}

/// Refuses a command that does what only root may, unless root runs it.
pub(crate) fn require_root(command: &str, what_it_does: &str) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("`berth {command}` {what_it_does}, which only root may: run it with sudo");
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
    /// Where the page is, if it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ui: Option<SocketAddr>,
    /// Where the API of each cloud is whose twin runs here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) clouds: BTreeMap<String, String>,
    /// Everything is there: what the API says of the node may be of an earlier life.
    #[serde(default)]
    pub(crate) ready: bool,
}

impl Running {
    /// This process, with an API and nothing else yet.
    pub(crate) fn new(address: SocketAddr, kubeconfig: PathBuf, node: &str) -> Self {
        Self {
            pid: std::process::id(),
            address,
            kubeconfig,
            node: node.to_owned(),
            started: jiff::Timestamp::now(),
            ui: None,
            clouds: BTreeMap::new(),
            ready: false,
        }
    }

    /// The process that runs in this data directory, if one does. An error means that the directory cannot be read, and
    /// so says nothing of what runs there.
    pub(crate) fn find(data_dir: &Path) -> io::Result<Option<Self>> {
        if !Self::is_locked(data_dir)? {
            return Ok(None);
        }
        match std::fs::read(data_dir.join(RUNNING)) {
            // What starts or stops just now has the lock and no file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        }
    }

    /// Whether a process has locked the directory, be it one that starts or stops just now. Leaves a directory without a
    /// lock file as it is: the file would make it pass for a data directory.
    pub(crate) fn is_locked(data_dir: &Path) -> io::Result<bool> {
        if !data_dir.join(LOCK).try_exists()? {
            return Ok(false);
        }
        match Dir::open(data_dir).and_then(|dir| dir.lock_exclusively(LOCK)) {
            Ok(_) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(error) => Err(error.kind().into()),
        }
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
    // Others test whether the lock is free by taking it for a moment.
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
            let who =
                Running::find(&data_dir).ok().flatten().map(|running| format!(" (process {})", running.pid));
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
pub(crate) async fn stop_containers(runtime: &dyn Runtime, grace: Duration) -> usize {
    let containers = runtime.containers();
    let running = containers.iter().filter(|known| matches!(known.state, State::Running { .. })).count();
    futures_util::future::join_all(containers.iter().map(|known| runtime.stop(&known.id, grace))).await;
    for uid in runtime.pods() {
        if let Err(error) = runtime.stop_pod(&uid).await {
            tracing::warn!(pod = uid, error = error.sentence(), "something of a pod goes on");
        }
    }
    running
}

/// Stops the containers of a node that no process serves, of whichever runtime; gives how many there were. They are kept as ended
/// ones for the next start, unless everything is removed.
pub(crate) async fn stop_left_containers(
    layout: &Layout,
    grace: Duration,
    purge: bool,
) -> anyhow::Result<usize> {
    let mut left = 0;
    if layout.containers().exists() {
        let runtime = Processes::open(&layout.containers(), &std::env::current_exe()?)?;
        left += stop_containers(&runtime, grace).await;
    }
    if let Some(endpoint) = endpoint_of(&layout.cri())? {
        let runtime = Cri::open(&endpoint, &layout.cri()).await.with_context(|| {
            format!("the containers of {} cannot be stopped without their runtime", layout.cri().display())
        })?;
        left += stop_containers(&runtime, grace).await;
        if purge {
            runtime.remove_all().await?;
        }
    }
    Ok(left)
}

/// Takes all volumes away from below a data directory, of all its nodes; gives how many mounts there were.
pub(crate) async fn take_volumes_away(data_dir: &Path) -> anyhow::Result<usize> {
    let mut taken = 0;
    for root in stack::nodes::roots(data_dir) {
        taken += stack::take_root_away(&root).await?;
    }
    Ok(taken)
}
