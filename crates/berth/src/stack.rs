//! Everything on one machine in one process: API server, control loops, sidecars, drivers, a node.
//!
//! What lies in the data directory:
//!
//! | path | what |
//! |---|---|
//! | `apiserver/` | objects, certificates, kubeconfig |
//! | `local/` | the local driver's volumes and snapshots |
//! | `nfs/` | what the NFS driver has mounted |
//! | `node/` | the kubelet's layout: pods, plugins, registration sockets, logs |
//! | `running.json` | who runs here, and where its API is |
//! | `timeline.jsonl` | the steps of every volume |

mod foreign;
pub(crate) mod objects;
mod pods;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use berth_apiserver::auth::Credentials;
use berth_apiserver::collect;
use berth_apiserver::rest::{self, ApiServer};
use berth_apiserver::server::Server;
use berth_csi::Endpoint;
use berth_host::path::Dir;
use berth_kube::Cluster;
use berth_node::Drivers;
use berth_node::layout::Layout;
use berth_node::node::{self, Node};
use berth_runtime::Runtime;
use berth_sidecars::driver::Driver;
use berth_sidecars::registrar;
use clap::ArgMatches;
use k8s_openapi::api::storage::v1::CSINode;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::foreign::Foreign;
use self::pods::NodePods;
use crate::apiserver::{self, EmptyStore};
use crate::backup;
use crate::driver::{BACKENDS, Backend, Served};
use crate::launch::{Choice, RESTART, Sidecars, Surroundings, supervise};
use crate::machine::{self, RUNNING, Running};
use crate::metrics::Telemetry;
use crate::record;
use crate::sidecars::{self, Scope, Sidecar};
use crate::timeline::TimelineRecorder;

/// How long the node and the driver may take to find each other.
const START: Duration = Duration::from_secs(60);
/// Where the node lies in the data directory.
pub(crate) const NODE: &str = "node";
/// How long pods get to end when everything stops; what does not obey is killed.
const GRACE: Duration = Duration::from_secs(5);
/// How long calls under way get to end; a driver that hangs must not keep everything from stopping.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the start waits to see whether somebody else's driver is there; the driver itself may come at any time.
const FOREIGN_START: Duration = Duration::from_secs(1);
/// How the sidecars run here: as upstream's defaults have it, but that drivers get the claims' names, and that
/// capacity is published while the CSIDriver says that the scheduler is to read it.
const SIDECARS: [&str; 5] = [
    "sidecars",
    "--extra-create-metadata",
    "--enable-capacity",
    "--capacity-ownerref-level=-1",
    "--capacity-only-if-announced",
];

/// What runs, and where.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) data_dir: PathBuf,
    pub(crate) listen: SocketAddr,
    /// Besides the one in the data directory.
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) node_name: String,
    pub(crate) empty_store: EmptyStore,
    /// Where to keep everything that happens, if anywhere.
    pub(crate) record: Option<PathBuf>,
    pub(crate) drivers: Vec<Backend>,
    /// The sockets of drivers that somebody else runs.
    pub(crate) foreign_drivers: Vec<PathBuf>,
    pub(crate) sidecars: Vec<Sidecar>,
    /// The flags of `berth up`, as far as they are the drivers'.
    pub(crate) flags: ArgMatches,
    /// Programs that run in the place of images.
    pub(crate) stand_ins: Vec<berth_node::StandIn>,
    /// Where FlexVolume drivers are installed; in the node's directory if `None`.
    pub(crate) volume_plugins: Option<PathBuf>,
    /// How long FlexVolume drivers may take.
    pub(crate) volume_plugin_timeouts: berth_flex::Timeouts,
}

/// All roles of one machine, running.
pub(crate) struct Stack {
    pub(crate) running: Running,
    pub(crate) cluster: Cluster,
    runtime: Runtime,
    drivers: Vec<Served>,
    loops: CancellationToken,
    serving: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    server: JoinHandle<()>,
    pods: Arc<NodePods>,
    data: Dir,
    _lock: std::fs::File,
}

impl Stack {
    /// Starts all roles, or says why not; `progress` hears what is ready, and after how long.
    pub(crate) async fn start(
        options: Options,
        timeline: &TimelineRecorder,
        progress: impl Fn(&str, Duration),
    ) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let (data, lock) = machine::take(&options.data_dir)?;
        // Whoever was killed here left its own, and its process id may be another's by now.
        data.remove_written(RUNNING).context("remove what a predecessor left")?;
        let data_dir = data.path().to_owned();
        timeline.keep_in(&data_dir).context("open the timeline")?;
        let (loops, serving) = (CancellationToken::new(), CancellationToken::new());

        let pods = Arc::new(NodePods::default());
        let telemetry = Telemetry::default();
        let (api, server, kubeconfig) =
            serve_api(&data_dir, &options, &serving, pods.clone(), &telemetry).await?;
        let address = server.address();
        let server = tokio::spawn(server.run(serving.clone()));
        let mut running = Running {
            pid: std::process::id(),
            address,
            kubeconfig,
            node: options.node_name.clone(),
            started: jiff::Timestamp::now(),
            ready: false,
        };
        data.write_atomically(RUNNING, &serde_json::to_vec_pretty(&running)?)?;
        progress(&format!("API server on https://{address}"), begun.elapsed());

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
        let layout = Layout::new(data_dir.join(NODE));
        let flex = flex_drivers(&options, &layout, &loops);
        let mut tasks = start_control_loops(&api, &cluster, &flex, &loops);
        let mut lines = Vec::new();
        for backend in &options.drivers {
            let directory = data_dir.join(backend.name);
            Dir::ensure(&directory, 0o700)?;
            lines.push((backend, backend.embed(&options.flags, &directory, &options.node_name)?));
        }
        // The driver needs none of them.
        let objects = lines.iter().map(|(backend, line)| (backend.objects)(&(backend.driver_name)(line)));
        let objects = tokio::spawn(objects::ensure(client.clone(), objects.collect()));
        progress("control loops: volumes, claims, scheduler, attach-detach, workloads", begun.elapsed());

        let mut drivers = Vec::new();
        for (backend, line) in lines {
            let driver = start_driver(backend, line, &layout, &serving, &telemetry).await?;
            progress(&format!("driver {}: {}", driver.name, driver.remark()), begun.elapsed());
            drivers.push(driver);
        }

        // Who waits for a node that is ready finds the classes, too.
        objects.await.expect("creating objects does not panic").context("create the classes")?;
        let node = start_node(&cluster, &options, &layout, &data_dir, address).await?;
        let (runtime, registered) = (node.runtime().clone(), node.drivers().clone());
        telemetry.observe(&cluster, node.usage().clone(), timeline.operations());
        pods.set(node).await;
        tasks.extend(drivers.iter().map(|driver| keep_registered(driver, &layout, &loops)));
        tasks.extend(start_sidecars(&options.sidecars, &cluster, &drivers, &telemetry)?);
        all_ready(&cluster, &options.node_name, &registered, &drivers).await?;
        let host = foreign_host(&options, &cluster, (queues, telemetry), registered, &layout, &drivers);
        let report = |text: &str| progress(text, begun.elapsed());
        tasks.extend(serve_foreign(host, &options.foreign_drivers, &loops, report).await);
        running.ready = true;
        data.write_atomically(RUNNING, &serde_json::to_vec_pretty(&running)?)?;
        progress(&format!("node {} is ready", options.node_name), begun.elapsed());
        Ok(Self {
            running,
            cluster,
            runtime,
            pods,
            drivers,
            loops,
            serving,
            tasks,
            server,
            data,
            _lock: lock,
        })
    }

    /// Stops pods, takes their volumes away, then stops everything. Objects stay, and the next start runs the pods again.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.loops.cancel();
        let ended = async {
            for task in self.tasks {
                let _ = task.await;
            }
            self.pods.ended().await;
        };
        if timeout(PATIENCE, ended).await.is_err() {
            tracing::warn!("a driver does not answer; stopping without its answer");
        }
        machine::stop_containers(&self.runtime, GRACE).await;
        self.serving.cancel();
        let _ = self.server.await;
        for driver in self.drivers {
            if let Err(error) = driver.ended().await {
                tracing::error!("the driver ended badly: {error:#}");
            }
        }
        machine::take_volumes_away(self.data.path()).await?;
        let _ = self.data.remove_file(RUNNING);
        Ok(())
    }
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

/// Where a driver of this machine listens.
fn socket(layout: &Layout, driver: &str) -> PathBuf {
    layout.plugins().join(driver).join("csi.sock")
}

async fn start_driver(
    backend: &Backend,
    line: ArgMatches,
    layout: &Layout,
    serving: &CancellationToken,
    telemetry: &Telemetry,
) -> anyhow::Result<Served> {
    let opened = (backend.open)(line, berth_backends::services::Mode::All).await?;
    let socket = socket(layout, opened.driver.name());
    Dir::ensure(socket.parent().expect("a socket lies in a directory"), 0o700)?;
    let mut registry = Registry::default();
    let served = Served::start(opened, &Endpoint::Unix(socket), None, &mut registry, serving.clone()).await?;
    telemetry.add(registry);
    Ok(served)
}

/// What the drivers that somebody else runs are served with.
fn foreign_host(
    options: &Options,
    cluster: &Cluster,
    (queues, telemetry): (berth_kube::Metrics, Telemetry),
    registered: Drivers,
    layout: &Layout,
    drivers: &[Served],
) -> foreign::Host {
    let own = drivers.iter().map(|driver| (driver.name.clone(), socket(layout, &driver.name)));
    foreign::Host {
        table: options.sidecars.clone(),
        cluster: cluster.clone(),
        queues,
        telemetry,
        registered,
        registry: layout.registry(),
        served: Mutex::new(own.collect()),
        single: options.foreign_drivers.len() == 1,
    }
}

/// Serves drivers that somebody else runs, and says which of them are there.
async fn serve_foreign(
    host: foreign::Host,
    sockets: &[PathBuf],
    loops: &CancellationToken,
    report: impl Fn(&str),
) -> Vec<JoinHandle<()>> {
    let host = Arc::new(host);
    let mut tasks = Vec::new();
    for socket in sockets {
        let driver = Foreign::new(socket, host.clone());
        report(&match driver.identity_within(FOREIGN_START).await {
            Some(identity) => format!("driver {} at {}", identity.name, socket.display()),
            None => format!("waiting for a driver at {}", socket.display()),
        });
        tasks.push(tokio::spawn(driver.run(loops.clone())));
    }
    tasks
}

/// Starts the sidecars that a cluster has one of, and for each driver those that it needs.
pub(crate) fn start_sidecars(
    table: &[Sidecar],
    cluster: &Cluster,
    drivers: &[Served],
    telemetry: &Telemetry,
) -> anyhow::Result<Vec<JoinHandle<()>>> {
    let mut started = Vec::new();
    let mut start = |sidecars: Sidecars, driver: Option<Driver>| {
        let cluster = cluster.clone();
        started.push(tokio::spawn(async move {
            if let Err(error) = sidecars.run_in(cluster, driver).await {
                tracing::error!("sidecars do not run: {error:#}");
            }
        }));
    };
    for row in table.iter().filter(|row| row.scope == Scope::Cluster) {
        let line = row.command().try_get_matches_from([row.name])?;
        let mut registry = Registry::default();
        start(Sidecars::configure(Choice::Single(row), &line, surroundings(), &mut registry)?, None);
        telemetry.add(registry);
    }
    for driver in drivers {
        let client = driver.client();
        start(sidecars_of(table, &driver.name, &client, telemetry)?, Some(client));
    }
    Ok(started)
}

/// The sidecars of one driver. Each driver has its own, with the same metrics.
fn sidecars_of(
    table: &[Sidecar],
    name: &str,
    driver: &Driver,
    telemetry: &Telemetry,
) -> anyhow::Result<Sidecars> {
    let line = sidecars::command(table).try_get_matches_from(SIDECARS)?;
    let mut registry = Registry::with_labels([("driver".into(), name.to_owned().into())].into_iter());
    let configured = Sidecars::configure(Choice::Of(table), &line, surroundings(), &mut registry)?;
    driver.measure(&mut registry);
    telemetry.add(registry);
    Ok(configured)
}

/// The environment of the sidecars here.
fn surroundings() -> Surroundings {
    Surroundings {
        host: "berth".to_owned(),
        namespace: Some("kube-system".to_owned()),
        ..Surroundings::default()
    }
}

/// Takes away what drivers have mounted below a data directory where none runs; gives how many mounts there were.
pub(crate) async fn take_volumes_down(data_dir: &Path) -> anyhow::Result<usize> {
    let mut taken = 0;
    for backend in BACKENDS {
        let directory = data_dir.join(backend.name);
        if directory.exists() {
            let line = backend.embed(&crate::up::default_flags()?, &directory, "berth")?;
            let opened = (backend.open)(line, berth_backends::services::Mode::All).await?;
            let away = opened.driver.take_down().await;
            taken += away.with_context(|| format!("take the volumes of driver {} away", backend.name))?;
        }
    }
    Ok(taken)
}

async fn serve_api(
    data_dir: &Path,
    options: &Options,
    serving: &CancellationToken,
    pods: Arc<NodePods>,
    telemetry: &Telemetry,
) -> anyhow::Result<(ApiServer, Server, PathBuf)> {
    let directory = data_dir.join("apiserver");
    let has_driver_records = !backup::driver_records(data_dir).is_empty();
    let (store, _) = apiserver::open_store(&directory, has_driver_records, options.empty_store).await?;
    let credentials = Arc::new(Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now())?);
    let api = ApiServer::new(
        store,
        rest::Options {
            credentials: Some(credentials.clone()),
            pods: Some(pods),
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
    Ok((api, server, kubeconfig))
}

/// The FlexVolume drivers as the controllers know them: these and the node each ask the drivers, as on a cluster.
/// Starts the loops that need no node and no driver.
fn start_control_loops(
    api: &ApiServer,
    cluster: &Cluster,
    flex: &berth_flex::Drivers,
    loops: &CancellationToken,
) -> Vec<JoinHandle<()>> {
    let collector = {
        let (api, loops) = (api.clone(), loops.clone());
        move || collect::run(api.clone(), collect::Options::default(), loops.clone())
    };
    let controllers = {
        let (cluster, flex) = (cluster.clone(), flex.clone());
        move || berth_controllers::run(cluster.clone(), flex.clone())
    };
    vec![role("garbage-collector", loops, collector), role("controllers", loops, controllers)]
}

fn keep_registered(driver: &Served, layout: &Layout, loops: &CancellationToken) -> JoinHandle<()> {
    let registration = registrar::Options {
        directory: layout.registry(),
        driver: driver.name.clone(),
        endpoint: socket(layout, &driver.name),
    };
    tokio::spawn(registrar::keep_registered(registration, loops.clone()))
}

fn flex_drivers(options: &Options, layout: &Layout, loops: &CancellationToken) -> berth_flex::Drivers {
    let directory = options.volume_plugins.clone().unwrap_or_else(|| layout.volume_plugins());
    berth_flex::Drivers::watch(directory, options.volume_plugin_timeouts, loops.clone())
}

async fn start_node(
    cluster: &Cluster,
    options: &Options,
    layout: &Layout,
    data_dir: &Path,
    api: SocketAddr,
) -> anyhow::Result<Node> {
    // Who listens everywhere is found on the loopback address, too.
    let host = if api.ip().is_unspecified() { "127.0.0.1".to_owned() } else { api.ip().to_string() };
    let options = node::Options {
        cluster: cluster.clone(),
        name: options.node_name.clone(),
        directory: layout.root().to_owned(),
        program: std::env::current_exe().context("find this program")?,
        labels: BTreeMap::new(),
        address: None,
        environment: vec![
            ("KUBERNETES_SERVICE_HOST".to_owned(), host),
            ("KUBERNETES_SERVICE_PORT".to_owned(), api.port().to_string()),
        ],
        hidden: vec![data_dir.to_owned()],
        stand_ins: options.stand_ins.clone(),
        volume_plugins: options.volume_plugins.clone(),
        volume_plugin_timeouts: options.volume_plugin_timeouts,
    };
    Node::start(options).await.context("start the node")
}

/// Returns when the node takes pods and knows every driver.
async fn all_ready(
    cluster: &Cluster,
    node: &str,
    registered: &Drivers,
    drivers: &[Served],
) -> anyhow::Result<()> {
    timeout(START, node_ready(cluster, node)).await.context("the node does not get ready")?;
    for driver in drivers {
        // By both: what the object says may be of an earlier life.
        let taken = async {
            registered.wait(&driver.name).await;
            driver_registered(cluster, node, &driver.name).await;
        };
        timeout(START, taken)
            .await
            .with_context(|| format!("the node does not take the driver {}", driver.name))?;
    }
    Ok(())
}

/// Returns when the node knows the driver; a claim before that would have to be tried again.
async fn driver_registered(cluster: &Cluster, node: &str, driver: &str) {
    let (registered, mut wait) = tokio::sync::watch::channel(false);
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
    let (ready, mut wait) = tokio::sync::watch::channel(false);
    let name = name.to_owned();
    cluster.cache::<k8s_openapi::api::core::v1::Node>().subscribe(move |_, node| {
        if node.is_some_and(|node| node.metadata.name.as_deref() == Some(&name) && machine::is_ready(node)) {
            ready.send_replace(true);
        }
    });
    // The sender lives with the cache.
    let _ = wait.wait_for(|ready| *ready).await;
}
