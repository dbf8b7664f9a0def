//! The ways in which Berth's programs can be arranged around a kubelet.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::machine;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::kinds::{CSI_NODE, NODE};

/// The testbed's only node.
pub(super) const HERE: &str = "testbed";
const COMPONENTS: &str = "--controllers=provisioner,attacher,resizer,snapshotter,snapshot-controller";

/// The programs of a deployment that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// `berth controller local`, which the kubelet learns of by itself.
    OneProcess,
    /// `berth node local`, and `berth sidecars` over its socket.
    NodeAndSidecars,
    /// `berth driver local`, and each component under its upstream name.
    AsUpstream,
    /// `berth node local` with the components that can run on every node, as the manifests have it.
    PerNode,
}

/// How long a kubelet may take to let volumes go after a test that failed.
const GRACE: Duration = Duration::from_secs(60);

/// The programs of one driver; dropped before its end, it ends the test's pods while somebody can still unmount for them.
pub(super) struct Deployment<'a> {
    cluster: &'a Cluster,
    shape: Shape,
    socket: PathBuf,
    driver: Option<Program>,
    beside: Vec<Program>,
}

impl<'a> Deployment<'a> {
    /// Starts everything, and waits until the kubelet has told the cluster of the driver.
    pub(super) async fn start(cluster: &'a Cluster, shape: Shape) -> Result<Self> {
        let socket = cluster.path(&format!("{HERE}.sock"));
        let mut deployment = Self { cluster, shape, socket, driver: None, beside: Vec::new() };
        deployment.start_driver().await?;
        deployment.beside = deployment.start_beside()?;
        until_known(cluster).await?;
        let labels = json!({"metadata": {"labels": {"test": cluster.name}}});
        cluster.patch(NODE, HERE, labels).await?;
        Ok(deployment)
    }

    /// Kills the driver's process.
    pub(super) fn kill_driver(&mut self) -> Result<()> {
        self.driver.take().context("no driver runs")?.kill()
    }

    /// Starts the driver's process, for the first time or again.
    pub(super) async fn start_driver(&mut self) -> Result<()> {
        let (cluster, registry) = (self.cluster, option("plugin-registration-path", &registry()));
        let started = match self.shape {
            Shape::OneProcess => {
                let socket = option("kubelet-registration-path", &self.socket);
                let kubeconfig = cluster.kubeconfig();
                let args = ["--kind=image", "--attach", COMPONENTS, &kubeconfig, &registry, &socket];
                cluster.local("controller", HERE, &args).await
            }
            Shape::NodeAndSidecars => {
                cluster.local("node", HERE, &["--kind=image", "--attach", &registry]).await
            }
            Shape::AsUpstream => cluster.local("driver", HERE, &["--kind=image", "--attach"]).await,
            Shape::PerNode => cluster.node(HERE, &self::registry(), &["--kind=image"]).await,
        };
        self.driver = Some(started?);
        Ok(())
    }

    fn start_beside(&self) -> Result<Vec<Program>> {
        let (address, kubeconfig) = (option("csi-address", &self.socket), self.cluster.kubeconfig());
        let election = ["--leader-election", &format!("--leader-election-namespace={}", self.cluster.name)]
            .map(str::to_owned);
        let start = |name: &str, own: &[&str]| {
            let args: Vec<&str> = [name, &kubeconfig]
                .into_iter()
                .chain(own.iter().copied())
                .chain(election.iter().map(String::as_str))
                .collect();
            self.cluster.berth(name, &args, &[])
        };
        match self.shape {
            Shape::OneProcess => Ok(Vec::new()),
            Shape::PerNode => Ok(vec![self.cluster.snapshot_controller()?]),
            Shape::NodeAndSidecars => Ok(vec![start("sidecars", &[&address, COMPONENTS])?]),
            Shape::AsUpstream => {
                let names = ["csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter"];
                let each = names.map(|name| start(name, &[&address, "-v=5"]));
                let mut all = each.into_iter().collect::<Result<Vec<_>>>()?;
                all.push(start("snapshot-controller", &[])?);
                all.push(self.registrar(&address)?);
                Ok(all)
            }
        }
    }

    fn registrar(&self, address: &str) -> Result<Program> {
        let path = option("kubelet-registration-path", &self.socket);
        let registry = option("plugin-registration-path", &registry());
        self.cluster.berth("registrar", &["csi-node-driver-registrar", address, &path, &registry], &[])
    }

    fn staged(&self) -> Result<Vec<PathBuf>> {
        machine::mounts_below(&kubelet_root().join("plugins/kubernetes.io/csi").join(&self.cluster.driver))
    }

    /// Stops everything, and checks that nothing of the driver is left on the machine.
    pub(super) async fn finish(mut self) -> Result<()> {
        let csi = self.cluster.csi(HERE)?;
        let (volumes, snapshots) = (csi.volumes().await?, csi.snapshots().await?);
        ensure!(
            volumes.is_empty() && snapshots.is_empty(),
            "the driver still has {volumes:?}, {snapshots:?}"
        );
        for program in self.beside.drain(..).chain(self.driver.take()) {
            let (name, held) = (program.name(), program.resident()? >> 20);
            self.cluster.step(&format!("{name} holds {held} MiB"));
            program.stop().await?;
        }
        let staged = self.staged()?;
        ensure!(staged.is_empty(), "still staged: {staged:?}");
        let mounted: Vec<_> = machine::mounts_below(&kubelet_root().join("pods"))?
            .into_iter()
            .filter(|target| is_of(target, &self.cluster.driver))
            .collect();
        ensure!(mounted.is_empty(), "still mounted: {mounted:?}");
        let socket = registry().join(format!("{}-reg.sock", self.cluster.driver));
        ensure!(!socket.exists(), "{} is still there", socket.display());
        Ok(())
    }
}

impl Drop for Deployment<'_> {
    fn drop(&mut self) {
        if self.driver.is_none() {
            return;
        }
        let grace = format!("--timeout={}s", GRACE.as_secs());
        if let Err(error) = self.cluster.kubectl(&["delete", "pods", "--all", &grace]) {
            eprintln!("could not clean up after a test: {error:#}");
        }
        let deadline = Instant::now() + GRACE;
        while Instant::now() < deadline && self.staged().is_ok_and(|staged| !staged.is_empty()) {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Where the kubelet keeps what it has.
pub(super) fn kubelet_root() -> PathBuf {
    std::env::var_os("KUBELET_ROOT").map_or_else(|| "/var/lib/kubelet".into(), PathBuf::from)
}

/// Waits until the kubelet has told the cluster of the test's driver.
pub(super) async fn until_known(cluster: &Cluster) -> Result<()> {
    let known = |node: &Value| {
        let drivers = node["spec"]["drivers"].as_array();
        drivers.is_some_and(|all| all.iter().any(|driver| driver["name"] == json!(cluster.driver)))
    };
    cluster.until(CSI_NODE, HERE, "knows the driver", known).await.map(drop)
}

/// Where drivers register with the kubelet.
pub(super) fn registry() -> PathBuf {
    kubelet_root().join("plugins_registry")
}

/// Whether this is a volume of the driver in a pod: the kubelet keeps notes beside what it has mounted.
fn is_of(target: &Path, driver: &str) -> bool {
    let notes = target.with_file_name("vol_data.json");
    std::fs::read_to_string(notes).is_ok_and(|notes| notes.contains(&format!("{driver:?}")))
}

/// A flag with a path.
pub(super) fn option(name: &str, value: &Path) -> String {
    format!("--{name}={}", value.display())
}
