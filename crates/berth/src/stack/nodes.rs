//! The nodes of `berth up`: each with directories, drivers and sidecars of its own, switched on and off one by one.
//!
//! The first node lies in the data directory itself, each further one in `nodes/NAME`. Among several nodes each has a view of
//! the cluster of its own, which ends with it, so that nothing of a node that is off goes on.
//!
//! Whether a node is on is an annotation of its Node ([`NODE_POWER`]), so it survives restarts: `berth nodes stop` writes it,
//! the task of the node ([`keep`]) acts on it and writes what became of it ([`NODE_POWERED`]). Switching off is a
//! power cut: loops end, containers are killed, no volume is unstaged, and what the node had mounted is gone. Nobody tells
//! Kubernetes; the lease of the node just ends.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use berth_backends::services::Mode;
use berth_core::names::{NODE_POWER, NODE_POWERED};
use berth_csi::Endpoint;
use berth_host::path::Dir;
use berth_kube::{Cluster, Key};
use berth_node::layout::Layout;
use berth_node::node::{self, Node};
use berth_node::{Drivers, PodNetwork};
use berth_runtime::Runtime;
use berth_sidecars::registrar;
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::storage::v1::CSINode;
use kube::ResourceExt as _;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::clouds::Clouds;
use super::pods::NodePods;
use super::{NODE, Options, foreign, role, start_driver_sidecars, take_root_away};
use crate::driver::{Backend, Served};
use crate::launch::{EVENTS, RESTART, Servers};
use crate::machine;
use crate::metrics::Telemetry;

/// Where further nodes lie in the data directory.
pub(crate) const NODES: &str = "nodes";
/// What the annotations say of a node that is off, and of one that is on.
pub(crate) const OFF: &str = "off";
pub(crate) const ON: &str = "on";
/// How long the node and the driver may take to find each other.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(60);
/// How long calls under way get to end; a driver that hangs must not keep everything from stopping.
const CALL_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Where nodes lie in a data directory: that of the first, and of every further one that there has been.
pub(crate) fn roots(data_dir: &Path) -> Vec<PathBuf> {
    let further = std::fs::read_dir(data_dir.join(NODES)).into_iter().flatten().flatten();
    let mut further: Vec<_> = further.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    further.sort();
    std::iter::once(data_dir.to_owned()).chain(further).collect()
}

/// The names of so many nodes: the given one, and it with a number.
pub(crate) fn names(first: &str, count: usize) -> Vec<String> {
    let further = (2..=count).map(|number| format!("{first}-{number}"));
    std::iter::once(first.to_owned()).chain(further).collect()
}

/// Whether a node is to be off.
pub(crate) fn is_off(node: &NodeObject) -> bool {
    node.annotations().get(NODE_POWER).is_some_and(|power| power == OFF)
}

/// What the nodes of a machine have in common.
pub(super) struct Machine {
    pub(super) options: Options,
    pub(super) data_dir: PathBuf,
    /// The cluster as the rest of the process sees it.
    pub(super) cluster: Cluster,
    pub(super) queues: berth_kube::Metrics,
    pub(super) api: SocketAddr,
    pub(super) telemetry: Telemetry,
    pub(super) pods: Arc<NodePods>,
    /// What the pods of all nodes have of a network.
    pub(super) network: PodNetwork,
    pub(super) clouds: Clouds,
    /// Where FlexVolume drivers are installed, for all nodes.
    pub(super) volume_plugins: PathBuf,
    /// Hears if a driver of a node ends.
    pub(super) servers: Servers,
}

impl Machine {
    fn has_several(&self) -> bool {
        self.options.nodes > 1
    }

    /// Where a node lies.
    fn root(&self, name: &str) -> PathBuf {
        if name == self.options.node_name {
            return self.data_dir.clone();
        }
        self.data_dir.join(NODES).join(name)
    }

    /// A registry for the metrics of a node, which name it if there are several.
    fn registry_of(&self, node: &str) -> Registry {
        let of_node = self.has_several().then(|| ("node".into(), node.to_owned().into()));
        Registry::with_labels(of_node.into_iter())
    }

    /// Serves a backend for a node: all of it, or without its controller if that runs once for all nodes.
    async fn start_driver(
        &self,
        backend: &Backend,
        node: &str,
        layout: &Layout,
        serving: &CancellationToken,
    ) -> anyhow::Result<Served> {
        let directory = self.root(node).join(backend.name);
        Dir::ensure(&directory, 0o700)?;
        let twin = self.clouds.flags(backend.name, node);
        let line = backend.embed(&self.options.flags, &directory, node, twin)?;
        let mode = if self.has_several() && backend.separable { Mode::Node } else { Mode::All };
        let opened = (backend.open)(line, mode).await?;
        let socket = socket(layout, opened.driver.name());
        Dir::ensure(socket.parent().expect("a socket lies in a directory"), 0o700)?;
        let mut registry = self.registry_of(node);
        let (endpoint, stop) = (Endpoint::Unix(socket), serving.clone());
        let served = Served::start(opened, &endpoint, None, &mut registry, &self.servers, stop).await?;
        self.telemetry.add_of_node(node, registry);
        Ok(served)
    }
}

/// A node that is on.
pub(super) struct RunningNode {
    name: String,
    root: PathBuf,
    /// Its own view of the cluster among several nodes.
    cluster: Cluster,
    runtime: Arc<dyn Runtime>,
    drivers: Vec<Served>,
    /// Its loops and sidecars.
    loops: CancellationToken,
    /// Its drivers, which end after them.
    serving: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl RunningNode {
    /// Starts a node, and returns when it takes pods and knows its drivers.
    pub(super) async fn start(
        machine: &Machine,
        name: &str,
        progress: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<Self> {
        let loops = machine.cluster.shutdown().child_token();
        let serving = CancellationToken::new();
        let started = Self::start_until(machine, name, &loops, &serving, progress).await;
        if started.is_err() {
            loops.cancel();
            serving.cancel();
        }
        started.with_context(|| format!("start node {name}"))
    }

    async fn start_until(
        machine: &Machine,
        name: &str,
        loops: &CancellationToken,
        serving: &CancellationToken,
        progress: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<Self> {
        let several = machine.has_several();
        let cluster = if several {
            let client = machine.cluster.client().clone();
            Cluster::new(client, loops.clone()).compressed().measured(&machine.queues)
        } else {
            machine.cluster.clone()
        };
        machine.clouds.set_power(name, true).await?;
        let root = machine.root(name);
        let layout = Layout::new(root.join(NODE));
        let mut drivers = Vec::new();
        for backend in &machine.options.drivers {
            let driver = machine.start_driver(backend, name, &layout, serving).await?;
            progress(&format!("driver {}: {}", driver.name, driver.remark()));
            drivers.push(driver);
        }
        let node = start_node(machine, &cluster, name, &layout).await?;
        let (runtime, registered) = (node.runtime().clone(), node.drivers().clone());
        machine.telemetry.node_started(name, node.usage().clone());
        let mut registry = machine.registry_of(name);
        node.register(&mut registry);
        machine.telemetry.add_of_node(name, registry);
        machine.pods.set(name, node).await;
        let mut tasks = Vec::new();
        for (backend, driver) in machine.options.drivers.iter().zip(&drivers) {
            let registration = registrar::Options {
                directory: layout.registry(),
                driver: driver.name.clone(),
                endpoint: socket(&layout, &driver.name),
            };
            let until = loops.clone();
            tasks.push(role("driver-registrar", loops, move || {
                registrar::keep_registered(registration.clone(), until.clone())
            }));
            if several && backend.separable {
                // These run once, beside the driver's controller.
                continue;
            }
            let node = several.then_some(name);
            let sidecars = &machine.options.sidecars;
            tasks.extend(start_driver_sidecars(sidecars, &cluster, driver, node, &machine.telemetry)?);
        }
        let names: Vec<String> = drivers.iter().map(|driver| driver.name.clone()).collect();
        all_ready(&machine.cluster, name, &registered, &names).await?;
        if name == machine.options.node_name {
            let host = foreign_host(machine, &cluster, registered, &layout, &drivers);
            tasks.extend(foreign::serve(host, &machine.options.foreign_drivers, loops, progress).await);
        }
        progress(&format!("node {name} is ready"));
        let (loops, serving) = (loops.clone(), serving.clone());
        Ok(Self { name: name.to_owned(), root, cluster, runtime, drivers, loops, serving, tasks })
    }

    /// Ends everything of the node, containers after `grace`, and takes away what it has mounted.
    pub(super) async fn halt(self, machine: &Machine, grace: Duration) -> anyhow::Result<()> {
        self.loops.cancel();
        let ended = async {
            for task in self.tasks {
                let _ = task.await;
            }
            machine.pods.ended(&self.name).await;
        };
        if timeout(CALL_DRAIN_TIMEOUT, ended).await.is_err() {
            tracing::warn!(node = self.name, "a driver does not answer; stopping without its answer");
        }
        machine.telemetry.forget_node(&self.name);
        machine::stop_containers(&*self.runtime, grace).await;
        // A power cut takes the processes and the disks at once: nobody is left who could acknowledge what does not reach a
        // disk any more. What the kernel has not written yet is lost before it is unmounted.
        if grace.is_zero()
            && let Err(error) = machine.clouds.set_power(&self.name, false).await
        {
            tracing::error!(node = self.name, "the node keeps devices of a cloud: {error:#}");
        }
        if machine.has_several() && !grace.is_zero() {
            self.cluster.finish_events(EVENTS).await;
        }
        self.serving.cancel();
        for driver in self.drivers {
            if let Err(error) = driver.ended().await {
                tracing::error!(node = self.name, "the driver ended badly: {error:#}");
            }
        }
        take_root_away(&self.root).await?;
        Ok(())
    }
}

/// Ends what a power cut of a node has left that was itself interrupted, in the same order as [`RunningNode::halt`].
pub(super) async fn finish_power_cut(machine: &Machine, name: &str) -> anyhow::Result<()> {
    let root = machine.root(name);
    let layout = Layout::new(root.join(NODE));
    machine::stop_left_containers(&layout, Duration::ZERO, false).await?;
    machine.clouds.set_power(name, false).await?;
    take_root_away(&root).await.map(drop)
}

/// Has a node be on or off, as its annotation says, until the shutdown; returns it if it is on then.
pub(super) async fn keep(
    machine: Arc<Machine>,
    name: String,
    mut running: Option<RunningNode>,
) -> Option<RunningNode> {
    let shutdown = machine.cluster.shutdown().clone();
    if !machine.has_several() {
        shutdown.cancelled().await;
        return running;
    }
    let mut wanted = follow_power(&machine.cluster, &name, running.is_some());
    let mut failures = 0;
    loop {
        let on = *wanted.borrow_and_update();
        let mut pause = None;
        match (on, running.take()) {
            (true, None) => match RunningNode::start(&machine, &name, &|_| {}).await {
                Ok(node) => running = Some(node),
                Err(error) => {
                    failures += 1;
                    pause = Some(RESTART.pause(failures));
                    machine.telemetry.forget_node(&name);
                    tracing::error!(node = name, "the node does not start: {error:#}");
                }
            },
            (false, Some(node)) => {
                if let Err(error) = node.halt(&machine, Duration::ZERO).await {
                    tracing::error!(node = name, "the node is off, and left something mounted: {error:#}");
                }
            }
            (_, same) => running = same,
        }
        if pause.is_none() {
            failures = 0;
            note_power(&machine.cluster, &name, running.is_some()).await;
        }
        let again = async {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => return running,
            // The sender lives with the cache.
            _ = wanted.changed() => {}
            () = again => {}
        }
    }
}

/// Whether the node is to be on, as far as it is known. A Node that is removed says nothing new: one that is off stays off.
fn follow_power(cluster: &Cluster, name: &str, on: bool) -> watch::Receiver<bool> {
    let (power, wanted) = watch::channel(on);
    let name = name.to_owned();
    cluster.cache::<NodeObject>().subscribe(move |_, node| {
        if let Some(node) = node.filter(|node| node.name_any() == name) {
            let on = !is_off(node);
            power.send_if_modified(|known| std::mem::replace(known, on) != on);
        }
    });
    wanted
}

/// Says on the Node whether it is on; whoever switched it waits for this.
async fn note_power(cluster: &Cluster, name: &str, on: bool) {
    let state = if on { ON } else { OFF };
    let noted = async {
        let Some(node) = cluster.fetch::<NodeObject>(&Key::cluster(name)).await? else { return Ok(()) };
        if node.annotations().get(NODE_POWERED).is_some_and(|known| known == state) {
            return Ok(());
        }
        let edit = |node: &mut NodeObject| {
            node.annotations_mut().insert(NODE_POWERED.to_owned(), state.to_owned());
        };
        cluster.edit(&*node, edit).await.map(|_| ())
    };
    if let Err(error) = noted.await {
        tracing::warn!(node = name, error = berth_kube::Error::chain(&error), "its power was not noted");
    }
}

/// What the drivers that somebody else runs are served with, on the first node.
fn foreign_host(
    machine: &Machine,
    cluster: &Cluster,
    registered: Drivers,
    layout: &Layout,
    drivers: &[Served],
) -> foreign::Host {
    let own = drivers.iter().map(|driver| (driver.name.clone(), socket(layout, &driver.name)));
    foreign::Host {
        table: machine.options.sidecars.clone(),
        cluster: cluster.clone(),
        queues: machine.queues.clone(),
        telemetry: machine.telemetry.clone(),
        call_timeout: machine.options.call_timeout,
        registered,
        registry: layout.registry(),
        served: Mutex::new(own.collect()),
        single: machine.options.foreign_drivers.len() == 1,
    }
}

/// Where a driver of a node listens.
fn socket(layout: &Layout, driver: &str) -> PathBuf {
    layout.plugins().join(driver).join("csi.sock")
}

async fn start_node(
    machine: &Machine,
    cluster: &Cluster,
    name: &str,
    layout: &Layout,
) -> anyhow::Result<Node> {
    let (api, options) = (machine.api, &machine.options);
    // Who listens everywhere is found on the loopback address, too.
    let host = if api.ip().is_unspecified() { "127.0.0.1".to_owned() } else { api.ip().to_string() };
    let options = node::Options {
        cluster: cluster.clone(),
        name: name.to_owned(),
        directory: layout.root().to_owned(),
        runtime: options.runtime.clone(),
        program: std::env::current_exe().context("find this program")?,
        labels: BTreeMap::new(),
        address: None,
        lease_duration: Some(lease_duration(options.controllers.node_monitor_grace_period)),
        environment: vec![
            ("KUBERNETES_SERVICE_HOST".to_owned(), host),
            ("KUBERNETES_SERVICE_PORT".to_owned(), api.port().to_string()),
        ],
        network: machine.network.clone(),
        hidden: vec![machine.data_dir.clone()],
        stand_ins: machine.clouds.stand_ins(&options.stand_ins, name),
        volume_plugins: Some(machine.volume_plugins.clone()),
        csi_timeout: options.call_timeout,
        attach_timeout: None,
        volume_plugin_timeouts: options.volume_plugin_timeouts,
        pod_pids_limit: options.pod_pids_limit,
        nfs: Some(Arc::new(super::nfs::Mounts::new(layout, &options.nfs_mounts)?)),
    };
    Node::start(options).await.context("start the node")
}

/// How long the leases of nodes hold: as in Kubernetes, but less than the time after which a silent node is unhealthy.
fn lease_duration(grace_period: Duration) -> Duration {
    Duration::from_secs(40).min(grace_period * 4 / 5)
}

/// Returns when the node takes pods and knows every driver.
async fn all_ready(
    cluster: &Cluster,
    node: &str,
    registered: &Drivers,
    drivers: &[String],
) -> anyhow::Result<()> {
    timeout(REGISTRATION_TIMEOUT, node_ready(cluster, node)).await.context("the node does not get ready")?;
    for driver in drivers {
        // By both: what the object says may be of an earlier life.
        let taken = async {
            registered.wait(driver).await;
            driver_registered(cluster, node, driver).await;
        };
        timeout(REGISTRATION_TIMEOUT, taken)
            .await
            .with_context(|| format!("the node does not take the driver {driver}"))?;
    }
    Ok(())
}

/// Returns when the node knows the driver; a claim before that would have to be tried again.
async fn driver_registered(cluster: &Cluster, node: &str, driver: &str) {
    let (registered, mut wait) = watch::channel(false);
    let (node, name) = (node.to_owned(), driver.to_owned());
    cluster.cache::<CSINode>().subscribe(move |_, known| {
        let drivers = known.filter(|known| known.metadata.name.as_deref() == Some(&node));
        if drivers.is_some_and(|known| known.spec.drivers.iter().any(|driver| driver.name == name)) {
            registered.send_replace(true);
        }
    });
    // The sender lives with the cache.
    let _ = wait.wait_for(|registered| *registered).await;
}

/// Returns when the node takes pods.
async fn node_ready(cluster: &Cluster, name: &str) {
    let (ready, mut wait) = watch::channel(false);
    let name = name.to_owned();
    cluster.cache::<NodeObject>().subscribe(move |_, node| {
        if node.is_some_and(|node| node.metadata.name.as_deref() == Some(&name) && machine::is_ready(node)) {
            ready.send_replace(true);
        }
    });
    // The sender lives with the cache.
    let _ = wait.wait_for(|ready| *ready).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_node_lies_in_the_data_directory_and_others_below_it() {
        assert_eq!(names("box", 1), ["box"]);
        assert_eq!(names("box", 3), ["box", "box-2", "box-3"]);
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(roots(directory.path()), [directory.path()]);
        for name in ["box-3", "box-2"] {
            std::fs::create_dir_all(directory.path().join(NODES).join(name)).unwrap();
        }
        let expected = [
            directory.path().to_owned(),
            directory.path().join("nodes/box-2"),
            directory.path().join("nodes/box-3"),
        ];
        assert_eq!(roots(directory.path()), expected);
    }
}
