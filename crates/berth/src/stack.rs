//! Everything on one machine in one process: API server, control loops, sidecars, drivers, and nodes.
//!
//! What lies in the data directory:
//!
//! | path | what |
//! |---|---|
//! | `apiserver/` | objects, certificates, kubeconfig |
//! | `local/` | the local driver's volumes and snapshots |
//! | `nfs/` | what the NFS driver has mounted |
//! | `cloud/NAME/` | the twin of a cloud (`--cloud`): its account, and the disks |
//! | `nfs-server/` | the key of the NFS server (`--nfs-export`) |
//! | `node/` | the kubelet's layout: pods, plugins, registration sockets, logs |
//! | `nodes/NAME/` | a further node (`--nodes`): its `node/`, and the directories of its drivers |
//! | `controllers/` | with several nodes: the controllers of drivers whose volumes every node reaches |
//! | `running.json` | who runs here, and where its API is |
//! | `timeline.jsonl` | the steps of every volume |
//! | `ui.json` | the token and address of the page |

pub(crate) mod clouds;
mod foreign;
mod network;
mod nfs;
pub(crate) mod nodes;
pub(crate) mod objects;
mod pods;
mod summary;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use berth_apiserver::auth::Credentials;
use berth_apiserver::collect;
use berth_apiserver::rest::{self, ApiServer};
use berth_apiserver::server::Server;
use berth_backends::services::Mode;
use berth_csi::Endpoint;
use berth_host::path::Dir;
use berth_kube::{Cluster, Key};
use berth_node::layout::Layout;
use berth_node::node::ContainerRuntime;
use berth_sidecars::driver::Driver;
use clap::ArgMatches;
use k8s_openapi::api::core::v1::Node as NodeObject;
use prometheus_client::registry::Registry;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::clouds::Clouds;
use self::network::Network;
use self::nodes::RunningNode;
use self::pods::NodePods;
use crate::apiserver::{self, EmptyStore};
use crate::backup;
use crate::cloud::Cloud;
use crate::driver::{BACKENDS, Backend, Served};
use crate::launch::{Choice, EVENTS, RESTART, Servers, Sidecars, Surroundings, supervise};
use crate::machine::{self, RUNNING, Running};
use crate::metrics::Telemetry;
use crate::nfs as nfs_server;
use crate::record;
use crate::sidecars::{self, Scope, Sidecar};
use crate::timeline::TimelineRecorder;
use crate::ui;

/// Where a node lies in its directory.
pub(crate) const NODE: &str = "node";
/// Where the controllers of drivers lie that run once for several nodes, and how each is reached there.
pub(crate) const CONTROLLERS: &str = "controllers";
pub(crate) const CONTROLLER_SOCKET: &str = "csi.sock";
/// How long pods get to end when everything stops; what does not obey is killed.
const GRACE: Duration = Duration::from_secs(5);
/// How long calls under way get to end; a driver that hangs must not keep everything from stopping.
const CALL_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How the sidecars run here: as upstream's defaults have it, but that drivers get the claims' names, and that
/// capacity is published while the CSIDriver says that the scheduler is to read it.
const SIDECARS: [&str; 5] = [
    "sidecars",
    "--extra-create-metadata",
    "--enable-capacity",
    "--capacity-ownerref-level=-1",
    "--capacity-only-if-announced",
];
/// How they run beside the driver of one node among several: nodes of one machine need not wait long for each other.
const SIDECARS_OF_NODE: [&str; 3] =
    ["--node-deployment", "--node-deployment-base-delay=500ms", "--node-deployment-max-delay=5s"];

/// What runs, and where.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) data_dir: PathBuf,
    pub(crate) listen: SocketAddr,
    /// Besides the one in the data directory.
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The name of the first node.
    pub(crate) node_name: String,
    /// How many nodes there are.
    pub(crate) nodes: usize,
    /// How the control loops judge nodes that fail.
    pub(crate) controllers: berth_controllers::Options,
    /// How long pods that do not say stay on a node that failed.
    pub(crate) toleration_seconds: rest::TolerationSeconds,
    pub(crate) empty_store: EmptyStore,
    /// Whether and where the page is served.
    pub(crate) ui: ui::UpArgs,
    /// Where to keep everything that happens, if anywhere.
    pub(crate) record: Option<PathBuf>,
    pub(crate) drivers: Vec<Backend>,
    /// The providers of which a twin runs here.
    pub(crate) clouds: Vec<&'static Cloud>,
    /// The sockets of drivers that somebody else runs.
    pub(crate) foreign_drivers: Vec<PathBuf>,
    pub(crate) sidecars: Vec<Sidecar>,
    /// The flags of `berth up`, as far as they are the drivers'.
    pub(crate) flags: ArgMatches,
    /// What runs the containers of pods.
    pub(crate) runtime: ContainerRuntime,
    /// Programs that run in the place of images.
    pub(crate) stand_ins: Vec<berth_node::StandIn>,
    /// Where FlexVolume drivers are installed; in the node's directory if `None`.
    pub(crate) volume_plugins: Option<PathBuf>,
    /// How long every call of a CSI driver may take; as long as with the kubelet and the upstream sidecars if `None`.
    pub(crate) call_timeout: Option<Duration>,
    /// How long FlexVolume drivers may take.
    pub(crate) volume_plugin_timeouts: berth_flex::Timeouts,
    /// Processes and threads that each pod may have; any number if `None`.
    pub(crate) pod_pids_limit: Option<u64>,
    /// Mount options of `nfs` volumes that have none.
    pub(crate) nfs_mounts: Vec<String>,
    /// Whether and where an NFS server runs.
    pub(crate) nfs_server: nfs_server::ServerArgs,
}

impl Options {
    /// A machine that is soon gone again: one node, no driver, a free port, no page.
    pub(crate) fn temporary(directory: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            data_dir: directory.to_owned(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            kubeconfig: None,
            node_name: "berth".to_owned(),
            nodes: 1,
            controllers: berth_controllers::Options::default(),
            toleration_seconds: rest::TolerationSeconds::default(),
            empty_store: EmptyStore::default(),
            ui: ui::UpArgs::off(),
            record: None,
            drivers: Vec::new(),
            clouds: Vec::new(),
            foreign_drivers: Vec::new(),
            sidecars: sidecars::SIDECARS.to_vec(),
            flags: crate::up::default_flags()?,
            runtime: ContainerRuntime::Process,
            stand_ins: Vec::new(),
            volume_plugins: None,
            call_timeout: None,
            volume_plugin_timeouts: berth_flex::Timeouts::default(),
            pod_pids_limit: None,
            nfs_mounts: Vec::new(),
            nfs_server: nfs_server::ServerArgs::off(),
        })
    }
}

/// All roles of one machine, running.
pub(crate) struct Stack {
    pub(crate) running: Running,
    pub(crate) cluster: Cluster,
    machine: Arc<nodes::Machine>,
    /// Each gives its node back when it ends, if that is on.
    nodes: Vec<JoinHandle<anyhow::Result<Option<RunningNode>>>>,
    /// The controllers of drivers that run once for all nodes.
    controllers: Vec<Served>,
    loops: CancellationToken,
    serving: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    servers: Servers,
    server: JoinHandle<anyhow::Result<()>>,
    nfs_server: Option<nfs_server::Started>,
    data: Dir,
    _lock: std::fs::File,
}

impl Stack {
    /// Starts all roles, or says why not; `progress` hears what is ready, and after how long.
    pub(crate) async fn start(
        options: Options,
        timeline: &TimelineRecorder,
        progress: impl Fn(&str, Duration) + Sync,
    ) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let progress = |what: &str| progress(what, begun.elapsed());
        let (data, lock) = machine::take(&options.data_dir)?;
        // Whoever was killed here left its own, and its process id may be another's by now.
        data.remove_written(RUNNING).context("remove what a predecessor left")?;
        let data_dir = data.path().to_owned();
        timeline.keep_in(&data_dir).context("open the timeline")?;
        let (loops, serving) = (CancellationToken::new(), CancellationToken::new());

        let pods = Arc::new(NodePods::default());
        let telemetry = Telemetry::default();
        let (api, server, kubeconfig, network) =
            serve_api(&data_dir, &options, &serving, pods.clone(), &telemetry, &progress).await?;
        let servers = Servers::new();
        let mut running = Running::new(server.address(), kubeconfig, &options.node_name);
        let (address, server) = (server.address(), run_api(&servers, server, &serving));
        data.write_atomically(RUNNING, &serde_json::to_vec_pretty(&running)?)?;
        progress(&format!("API server on https://{address}"));
        // Mounts that a predecessor left wait for it.
        let nfs_server = options.nfs_server.start(&data_dir, &progress).await?;

        let client = kube::Client::new(api.clone(), "default");
        let mut registry = Registry::default();
        api.measure(&mut registry);
        let queues = berth_kube::Metrics::register(&mut registry);
        telemetry.add(registry);
        let cluster = Cluster::new(client.clone(), loops.clone()).measured(&queues);
        if let Some(directory) = &options.record {
            Dir::ensure(directory, 0o700)?;
            timeline.record_in(directory).with_context(|| format!("record in {}", directory.display()))?;
            record::keep_objects(&cluster, directory)?;
        }
        let page = options.ui.start(&data, &cluster, &mut running).await?;
        let (volume_plugins, flex) = watch_volume_plugins(&options, &data_dir, &loops);
        let mut tasks = start_control_loops(&api, &cluster, &flex, &options.controllers, &loops);
        tasks.extend(page.map(|page| tokio::spawn(page.run(loops.clone()))));
        // The driver needs none of them.
        let objects = tokio::spawn(objects::ensure(client.clone(), driver_objects(&options, &data_dir)?));
        let (pod_network, forwarding) =
            network.start(&cluster, &client, address, &data_dir, &progress).await?;
        tasks.extend(forwarding);
        progress("control loops: volumes, claims, scheduler, attach-detach, nodes, workloads");
        let clouds = start_clouds(&options, &data_dir, &mut running, &progress).await?;
        let controllers =
            start_controllers(&options, &data_dir, &clouds, &servers, &serving, &telemetry).await?;
        // Who waits for a node that is ready finds the classes, too.
        objects.await.expect("creating objects does not panic").context("create the classes")?;
        // It watches snapshots, whose definitions are there now.
        telemetry.observe(&cluster, timeline.operations());
        tasks.extend(start_cluster_sidecars(&options, &cluster, &telemetry)?);
        for driver in &controllers {
            tasks.extend(start_driver_sidecars(&options.sidecars, &cluster, driver, None, &telemetry)?);
        }
        let machine = Arc::new(nodes::Machine {
            cluster: cluster.clone(),
            api: address,
            options,
            data_dir,
            queues,
            telemetry,
            pods,
            network: pod_network,
            clouds,
            volume_plugins,
            servers: servers.clone(),
        });
        let nodes = keep_nodes(&machine, &loops, &progress).await?;
        running.ready = true;
        data.write_atomically(RUNNING, &serde_json::to_vec_pretty(&running)?)?;
        Ok(Self {
            running,
            cluster,
            machine,
            nodes,
            controllers,
            loops,
            serving,
            tasks,
            servers,
            server,
            nfs_server,
            data,
            _lock: lock,
        })
    }

    /// Returns, when the API server, a driver or a node has ended without being asked to, which one and why. Nothing can be
    /// relied on then: the caller is to [`Stack::stop`] the rest.
    pub(crate) async fn failed(&self) -> String {
        self.servers.failed().await
    }

    /// Stops pods, takes their volumes away, then stops everything. Objects stay, and the next start runs the pods again.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.loops.cancel();
        let ended = async {
            for task in self.tasks {
                let _ = task.await;
            }
        };
        if timeout(CALL_DRAIN_TIMEOUT, ended).await.is_err() {
            tracing::warn!("a driver does not answer; stopping without its answer");
        }
        let halted = self.nodes.into_iter().map(async |node| match node.await? {
            Ok(Some(node)) => node.halt(&self.machine, GRACE).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error).context("a node cannot be stopped"),
        });
        for halted in futures_util::future::join_all(halted).await {
            halted?;
        }
        self.cluster.finish_events(EVENTS).await;
        self.serving.cancel();
        let _ = self.server.await;
        for driver in self.controllers {
            if let Err(error) = driver.ended().await {
                tracing::error!("the driver ended badly: {error:#}");
            }
        }
        machine::take_volumes_away(self.data.path()).await?;
        // Nothing is mounted from it any more.
        if let Some(server) = self.nfs_server {
            server.stop().await;
        }
        self.machine.clouds.stop().await;
        let _ = self.data.remove_file(RUNNING);
        Ok(())
    }
}

/// Finds FlexVolume drivers, for the controllers; each node does that for itself. Returns where they are installed, too.
fn watch_volume_plugins(
    options: &Options,
    data_dir: &Path,
    loops: &CancellationToken,
) -> (PathBuf, berth_flex::Drivers) {
    let own = || Layout::new(data_dir.join(NODE)).volume_plugins();
    let directory = options.volume_plugins.clone().unwrap_or_else(own);
    let drivers =
        berth_flex::Drivers::watch(directory.clone(), options.volume_plugin_timeouts, loops.clone());
    (directory, drivers)
}

/// Starts the loops that need no node and no driver.
fn start_control_loops(
    api: &ApiServer,
    cluster: &Cluster,
    flex: &berth_flex::Drivers,
    options: &berth_controllers::Options,
    loops: &CancellationToken,
) -> Vec<JoinHandle<()>> {
    let collector = {
        let (api, loops) = (api.clone(), loops.clone());
        move || collect::run(api.clone(), collect::Options::default(), loops.clone())
    };
    let controllers = {
        let (cluster, flex, options) = (cluster.clone(), flex.clone(), options.clone());
        move || berth_controllers::run(cluster.clone(), flex.clone(), options.clone())
    };
    vec![role("garbage-collector", loops, collector), role("controllers", loops, controllers)]
}

/// The objects of all drivers.
fn driver_objects(options: &Options, data_dir: &Path) -> anyhow::Result<Vec<objects::Objects>> {
    let of_driver = |backend: &Backend| {
        let directory = data_dir.join(backend.name);
        let line = backend.embed(&options.flags, &directory, &options.node_name, Vec::new())?;
        let name = (backend.driver_name)(&line);
        let mut objects = (backend.objects)(&name);
        if backend.name == "nfs" {
            objects.classes.extend(options.nfs_server.class(&name));
        }
        Ok(objects)
    };
    options.drivers.iter().map(of_driver).collect()
}

/// Starts the nodes, and has each be on or off as it is told.
async fn keep_nodes(
    machine: &Arc<nodes::Machine>,
    loops: &CancellationToken,
    progress: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<Vec<JoinHandle<anyhow::Result<Option<RunningNode>>>>> {
    let started = start_nodes(machine, progress).await?;
    let keep = |(name, node): (String, Option<RunningNode>)| {
        let kept = nodes::keep(machine.clone(), name.clone(), node);
        machine.servers.spawn(format!("node {name}"), loops.clone(), async move { Ok(kept.await) })
    };
    Ok(started.into_iter().map(keep).collect())
}

/// Starts every node that is not switched off, all at the same time.
async fn start_nodes(
    machine: &nodes::Machine,
    progress: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<Vec<(String, Option<RunningNode>)>> {
    let names = nodes::names(&machine.options.node_name, machine.options.nodes);
    let several = names.len() > 1;
    let starts = names.into_iter().map(async |name: String| {
        let known = machine.cluster.fetch::<NodeObject>(&Key::cluster(&name)).await?;
        if several && known.is_some_and(|node| nodes::is_off(&node)) {
            nodes::finish_power_cut(machine, &name).await?;
            progress(&format!("node {name} is off; `berth nodes start {name}` switches it on"));
            return anyhow::Ok((name, None));
        }
        let started = RunningNode::start(machine, &name, progress).await?;
        Ok((name, Some(started)))
    });
    futures_util::future::try_join_all(starts).await
}

/// Starts the twins of clouds, in which every node is a server, and says where they are.
async fn start_clouds(
    options: &Options,
    data_dir: &Path,
    running: &mut Running,
    progress: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<Clouds> {
    let names = nodes::names(&options.node_name, options.nodes);
    let clouds = Clouds::start(&options.clouds, data_dir, names).await?;
    running.clouds = clouds.addresses();
    for (name, address) in &running.clouds {
        progress(&format!("cloud {name} on {address}"));
    }
    Ok(clouds)
}

/// With several nodes: the drivers whose volumes every node reaches have one controller for all.
async fn start_controllers(
    options: &Options,
    data_dir: &Path,
    clouds: &Clouds,
    servers: &Servers,
    serving: &CancellationToken,
    telemetry: &Telemetry,
) -> anyhow::Result<Vec<Served>> {
    let mut controllers = Vec::new();
    for backend in options.drivers.iter().filter(|backend| backend.separable && options.nodes > 1) {
        let directory = data_dir.join(CONTROLLERS).join(backend.name);
        Dir::ensure(&directory, 0o700)?;
        let twin = clouds.flags(backend.name, &options.node_name);
        let line = backend.embed(&options.flags, &directory, &options.node_name, twin)?;
        let opened = (backend.open)(line, Mode::Controller).await?;
        let socket = Endpoint::Unix(directory.join(CONTROLLER_SOCKET));
        let mut registry = Registry::with_labels([("node".into(), "".into())].into_iter());
        let served = Served::start(opened, &socket, None, &mut registry, servers, serving.clone()).await?;
        telemetry.add(registry);
        controllers.push(served);
    }
    Ok(controllers)
}

/// Starts a role that is started again whenever it fails.
fn role<R>(
    name: &'static str,
    shutdown: &CancellationToken,
    run: impl Fn() -> R + Send + Sync + 'static,
) -> JoinHandle<()>
where
    R: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(supervise(RESTART, name, shutdown.clone(), run))
}

/// Starts the sidecars that a cluster has one of.
fn start_cluster_sidecars(
    options: &Options,
    cluster: &Cluster,
    telemetry: &Telemetry,
) -> anyhow::Result<Vec<JoinHandle<()>>> {
    let mut started = Vec::new();
    for row in options.sidecars.iter().filter(|row| row.scope == Scope::Cluster) {
        let mut line = row.command().try_get_matches_from([row.name])?;
        if options.nodes > 1 && row.name == "snapshot-controller" {
            // Snapshots of a node's volumes are taken by that node's snapshotter.
            let words = [row.name, "--enable-distributed-snapshotting"];
            line = row.command().try_get_matches_from(words)?;
        }
        started.push(start_sidecars(Choice::Single(row), &line, cluster, None, None, telemetry)?);
    }
    Ok(started)
}

/// Starts the sidecars that a driver needs: for the whole cluster, or only for what is on `node`.
pub(crate) fn start_driver_sidecars(
    table: &[Sidecar],
    cluster: &Cluster,
    driver: &Served,
    node: Option<&str>,
    telemetry: &Telemetry,
) -> anyhow::Result<Vec<JoinHandle<()>>> {
    let Some(name) = node else {
        let line = sidecars::command(table).try_get_matches_from(SIDECARS)?;
        return Ok(vec![start_sidecars(Choice::Of(table), &line, cluster, Some(driver), None, telemetry)?]);
    };
    let line =
        sidecars::command(table).try_get_matches_from(SIDECARS.iter().chain(&SIDECARS_OF_NODE).copied())?;
    let mut started = vec![start_sidecars(Choice::Of(table), &line, cluster, Some(driver), node, telemetry)?];
    for row in table.iter().filter(|row| row.name == "csi-attacher") {
        let line = row.command().try_get_matches_from([row.name, "--only-node", name])?;
        started.push(start_sidecars(Choice::Single(row), &line, cluster, Some(driver), node, telemetry)?);
    }
    Ok(started)
}

/// The sidecars of a driver that somebody else runs. Each driver has its own, with the same metrics.
fn sidecars_of(host: &foreign::Host, name: &str, driver: &Driver) -> anyhow::Result<Sidecars> {
    let timeout = host.call_timeout.map(|timeout| format!("--timeout={}s", timeout.as_secs()));
    let words = SIDECARS.iter().map(|word| (*word).to_owned()).chain(timeout);
    let line = sidecars::command(&host.table).try_get_matches_from(words)?;
    let mut registry = Registry::with_labels([("driver".into(), name.to_owned().into())].into_iter());
    let configured = Sidecars::configure(Choice::Of(&host.table), &line, surroundings(None), &mut registry)?;
    driver.measure(&mut registry);
    host.telemetry.add(registry);
    Ok(configured)
}

/// The environment of the sidecars here.
fn surroundings(node: Option<&str>) -> Surroundings {
    Surroundings {
        host: "berth".to_owned(),
        namespace: Some("kube-system".to_owned()),
        node: node.map(str::to_owned),
        ..Surroundings::default()
    }
}

fn start_sidecars(
    choice: Choice<'_>,
    line: &ArgMatches,
    cluster: &Cluster,
    driver: Option<&Served>,
    node: Option<&str>,
    telemetry: &Telemetry,
) -> anyhow::Result<JoinHandle<()>> {
    // Each driver has sidecars of its own, on each node, with the same metrics.
    let of_driver = driver.map(|driver| ("driver".into(), driver.name.clone().into()));
    let of_node = node.map(|node| ("node".into(), node.to_owned().into()));
    let mut registry = Registry::with_labels(of_driver.into_iter().chain(of_node));
    let sidecars = Sidecars::configure(choice, line, surroundings(node), &mut registry)?;
    let (cluster, driver) = (cluster.clone(), driver.map(Served::client));
    // What is measured of a driver's calls is the same for all its sidecars.
    if let (Some(driver), Choice::Of(_)) = (&driver, choice) {
        driver.measure(&mut registry);
    }
    match node {
        Some(node) => telemetry.add_of_node(node, registry),
        None => telemetry.add(registry),
    }
    Ok(tokio::spawn(async move {
        if let Err(error) = sidecars.run_in(cluster, driver).await {
            tracing::error!("sidecars do not run: {error:#}");
        }
    }))
}

/// Takes away what drivers have mounted for a node where none runs, and what is left below its directory; gives how many
/// mounts there were.
pub(crate) async fn take_root_away(root: &Path) -> anyhow::Result<usize> {
    let mut taken = 0;
    for backend in BACKENDS {
        let directory = root.join(backend.name);
        if directory.exists() {
            // The node of a cloud's driver needs no account for this.
            let (mode, flags) = match Cloud::find(backend.name) {
                Some(cloud) => (Mode::Node, cloud.offline_flags.iter().map(Into::into).collect()),
                None => (Mode::All, Vec::new()),
            };
            let line = backend.embed(&crate::up::default_flags()?, &directory, "berth", flags)?;
            let opened = (backend.open)(line, mode).await?;
            let away = opened.driver.take_down().await;
            taken += away.with_context(|| format!("take the volumes of driver {} away", backend.name))?;
        }
    }
    // Only the node's: a person may have mounted a disk for the rest.
    let node = root.join(NODE);
    if node.exists() {
        taken += berth_host::mount::unmount_below(&node).context("unmount what is left")?;
    }
    Ok(taken)
}

/// Has the API server answer until `serving` is cancelled.
fn run_api(servers: &Servers, server: Server, serving: &CancellationToken) -> JoinHandle<anyhow::Result<()>> {
    let (name, until) = (format!("the API server on https://{}", server.address()), serving.clone());
    servers.spawn(name, serving.clone(), async move {
        server.run(until).await;
        Ok(())
    })
}

async fn serve_api(
    data_dir: &Path,
    options: &Options,
    serving: &CancellationToken,
    pods: Arc<NodePods>,
    telemetry: &Telemetry,
    progress: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<(ApiServer, Server, PathBuf, Network)> {
    let directory = data_dir.join("apiserver");
    let has_driver_records = !backup::driver_records(data_dir).is_empty();
    let (store, _) = apiserver::open_store(&directory, has_driver_records, options.empty_store).await?;
    let network = Network::take(data_dir, &store, progress).await?;
    let credentials = Arc::new(Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now())?);
    let api = ApiServer::new(
        store,
        rest::Options {
            credentials: Some(credentials.clone()),
            pods: Some(pods),
            toleration_seconds: options.toleration_seconds,
            service_range: network.service_range(),
            metrics: Some(Arc::new({
                let telemetry = telemetry.clone();
                move || telemetry.text()
            })),
            shutdown: serving.clone(),
        },
    );
    api.bootstrap().await.map_err(|failure| anyhow::anyhow!("prepare the API: {failure:?}"))?;
    let kubeconfig = machine::kubeconfig(data_dir);
    let server = Server::bind(options.listen, api.clone(), credentials.clone(), Some(kubeconfig.clone()))
        .await
        .with_context(|| {
            format!(
                "listen on {}: is something else there? --listen 127.0.0.1:0 takes a free port",
                options.listen
            )
        })?;
    if let Some(path) = &options.kubeconfig {
        credentials.write_kubeconfig(path, &format!("https://{}", server.address()))?;
    }
    Ok((api, server, kubeconfig, network))
}
