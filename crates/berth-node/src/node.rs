//! A whole node: its Node object, drivers, volumes and pods, joined.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use berth_host::path::Dir;
use berth_kube::{Cluster, Recorder};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::ResourceExt as _;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::layout::Layout;
use crate::machine::{self, Machine};
use crate::metrics::VolumeCounts;
use crate::plugin::{Failed, Plugin};
use crate::plugins::csi::Csi;
use crate::plugins::{Flex, NfsMounts, Refresh, plugins};
use crate::pods::{self, PodNetwork, Pods, StandIn, Supply};
use crate::registration::{self, Drivers};
use crate::stats::FigureReader;
use crate::tokens::Tokens;
use crate::usage::UsageReader;
use crate::volumes::{self, Attachments, Volumes};
use berth_runtime::{
    AttachCall, Attached, ContainerId, Cri, Exec, ExecCall, LogOptions, Processes, Runtime, endpoint_of, logs,
};

/// How long a container has to end that the next runtime does not know.
const END_GRACE: Duration = Duration::from_secs(2);

/// What a node is made of.
pub struct Options {
    /// The cluster; the node works until its shutdown.
    pub cluster: Cluster,
    /// The name of the Node object.
    pub name: String,
    /// Where everything of the node lies: the kubelet's layout.
    pub directory: PathBuf,
    /// What runs the containers of pods on this node.
    pub runtime: ContainerRuntime,
    /// A program whose `main` intercepts [`berth_runtime::LAUNCHER`], to run containers.
    pub program: PathBuf,
    /// Labels beside those that every node has.
    pub labels: BTreeMap<String, String>,
    /// How others reach the machine; found out if `None`.
    pub address: Option<IpAddr>,
    /// How long the node's lease holds; as long as the kubelet's if `None`.
    pub lease_duration: Option<Duration>,
    /// What pods have of a network besides the machine's.
    pub network: PodNetwork,
    /// Variables that every container gets unless it sets them itself.
    pub environment: Vec<(String, String)>,
    /// Directories of the machine that containers do not see, beside the node's own.
    pub hidden: Vec<PathBuf>,
    /// Programs that run in the place of images; they are started as `program`, with the words of the row.
    pub stand_ins: Vec<StandIn>,
    /// Where FlexVolume drivers are installed; below the node's directory if `None`.
    pub volume_plugins: Option<PathBuf>,
    /// How long a CSI driver may take for a call; as long as with the kubelet if `None`.
    pub csi_timeout: Option<Duration>,
    /// How long a volume may take to be attached before that is a problem of the pods that want it; as long as with the kubelet if
    /// `None`.
    pub attach_timeout: Option<Duration>,
    /// How long FlexVolume drivers may take.
    pub volume_plugin_timeouts: berth_flex::Timeouts,
    /// Processes and threads that each pod may have; any number if `None`.
    pub pod_pids_limit: Option<u64>,
    /// What mounts `nfs` volumes; pods that have one are refused if `None`.
    pub nfs: Option<Arc<dyn NfsMounts>>,
}

/// What runs the containers of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ContainerRuntime {
    /// This program: they are processes of this machine, and run its files.
    #[default]
    Process,
    /// A program that speaks the Container Runtime Interface: they run images.
    Cri {
        /// Where it listens, such as `unix:///run/containerd/containerd.sock`.
        endpoint: String,
    },
}

impl ContainerRuntime {
    /// Opens the runtime for the containers of a layout. What the other kind has left there is ended first: nothing that runs is
    /// started twice.
    async fn open(&self, layout: &Layout, program: &Path) -> Result<Arc<dyn Runtime>, berth_runtime::Error> {
        match self {
            Self::Process => {
                remove_cri(layout).await?;
                Ok(Arc::new(Processes::open(&layout.containers(), program)?))
            }
            Self::Cri { endpoint } => {
                if layout.containers().exists() {
                    let left = Processes::open(&layout.containers(), program)?;
                    for known in left.containers() {
                        left.stop(&known.id, END_GRACE).await;
                        left.remove(&known.id).await?;
                    }
                }
                Ok(Arc::new(Cri::open(endpoint, &layout.cri()).await?))
            }
        }
    }
}

/// Removes every container and pod of a layout that a container runtime has; it must be there for that.
pub async fn remove_cri(layout: &Layout) -> Result<(), berth_runtime::Error> {
    let failed = |error| berth_runtime::Error::Refused {
        doing: format!("read {}", layout.cri().display()),
        why: io::Error::to_string(&error),
    };
    match endpoint_of(&layout.cri()).map_err(failed)? {
        Some(endpoint) => Cri::open(&endpoint, &layout.cri()).await?.remove_all().await,
        None => Ok(()),
    }
}

/// Why a node could not start, or cannot do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The Node object could not be written.
    #[error("register the node")]
    Machine(#[from] machine::Error),
    /// Drivers could not be let in.
    #[error("open the registry of drivers")]
    Registration(#[from] registration::Error),
    /// The containers could not be taken up.
    #[error("take up the containers")]
    Runtime(#[source] berth_runtime::Error),
    /// The node's directory could not be made.
    #[error("make the node's directory")]
    Directory(#[source] berth_host::Error),
    /// What is asked for cannot be had as things are; the text is for whoever asked.
    #[error("{0}")]
    Unready(String),
    /// It should work, but does not; the text is for whoever asked.
    #[error("{0}")]
    Failed(String),
}

/// A node that works until its cluster's shutdown.
pub struct Node {
    layout: Layout,
    machine: Arc<Machine>,
    drivers: Drivers,
    volumes: Arc<Volumes>,
    pods: Arc<Pods>,
    runtime: Arc<dyn Runtime>,
    usage: UsageReader,
    figures: FigureReader,
    tasks: JoinSet<()>,
}

impl Node {
    /// Starts a node, and takes up what an earlier life of it has left in the directory.
    pub async fn start(options: Options) -> Result<Self, Error> {
        let layout = Layout::new(&options.directory);
        for directory in [layout.root().to_owned(), layout.pods(), layout.plugins(), layout.registry()] {
            Dir::ensure(&directory, 0o750).map_err(Error::Directory)?;
        }
        let cluster = options.cluster.named("kubelet");
        let defaults = machine::Options::new(&options.name, &options.directory);
        let presented = machine::Options {
            labels: options.labels,
            address: options.address,
            lease_duration: options.lease_duration.unwrap_or(defaults.lease_duration),
            ..defaults
        };
        let runtime = options.runtime.open(&layout, &options.program).await.map_err(Error::Runtime)?;
        let presented = machine::Options { runtime: runtime.version(), ..presented };
        let machine = Machine::start(cluster.clone(), presented).await?;
        let drivers = registration::start(
            &cluster,
            machine.clone(),
            &layout.registry(),
            options.csi_timeout.unwrap_or(registration::CALL),
        )?;
        let recorder = Recorder::new(&cluster, "kubelet", &options.name);
        let flex = berth_flex::Drivers::watch(
            options.volume_plugins.unwrap_or_else(|| layout.volume_plugins()),
            options.volume_plugin_timeouts,
            cluster.shutdown().clone(),
        );
        // What stands on disk is read with what these say.
        cluster.cache::<CSIDriver>().synced().await;
        let queue = pods::queue();
        let manager: Arc<OnceLock<Weak<Volumes>>> = Arc::default();
        let changed = queue.clone();
        let volumes = Volumes::new(volumes::Options {
            cluster: cluster.clone(),
            layout: layout.clone(),
            plugins: all_plugins(
                &layout,
                &cluster,
                &options.name,
                &drivers,
                &flex,
                &recorder,
                options.nfs,
                &manager,
            ),
            node: machine.clone(),
            recorder: recorder.clone(),
            attach_timeout: options.attach_timeout.unwrap_or(volumes::WAITING_EVENT_DELAY),
            changed: Box::new(move |uid| changed.add(uid.to_owned())),
        });
        // Nobody has asked for a refresh yet: no pod is set up before `run`.
        let _ = manager.set(Arc::downgrade(&volumes));
        machine.only_in_use(volumes.devices());
        follow_attachments(&cluster, &options.name, &volumes);
        let figures = FigureReader::new(&cluster, &options.name, &runtime);
        let usage = UsageReader::new(&cluster, &options.name, &drivers, &flex, &layout);
        let pods = Pods::start(pods::Options {
            cluster: cluster.clone(),
            node: options.name,
            address: machine.address(),
            network: options.network,
            layout: layout.clone(),
            runtime: runtime.clone(),
            volumes: volumes.clone(),
            supply: Supply { memory: machine.memory(), pod_pids: options.pod_pids_limit },
            recorder,
            environment: options.environment,
            hidden: options.hidden.into_iter().chain([options.directory]).collect(),
            // Where there are images, they run themselves.
            stand_ins: if runtime.images().is_some() { Vec::new() } else { options.stand_ins },
            program: options.program,
            queue,
        })
        .await;
        let mut tasks = JoinSet::new();
        tasks.spawn(volumes.clone().run());
        tasks.spawn(pods.clone().run());
        let registered = drivers.clone();
        tasks.spawn(follow(cluster.clone(), volumes.clone(), move || registered.changed().boxed()));
        tasks.spawn(follow(cluster, volumes.clone(), move || flex.changed().boxed()));
        Ok(Self { layout, machine, drivers, volumes, pods, runtime, usage, figures, tasks })
    }

    /// Returns when all work has ended after the cluster's shutdown.
    pub async fn ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }

    /// Returns what keeps the Node and CSINode objects.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    /// Returns the runtime that the containers of all pods run in.
    pub fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    /// The drivers that have registered.
    pub fn drivers(&self) -> &Drivers {
        &self.drivers
    }

    /// Adds the kubelet's metrics of volumes to a registry: `csi_operations_seconds` and `volume_manager_total_volumes`.
    pub fn register(&self, registry: &mut Registry) {
        self.drivers.calls.register(registry, "csi_operations_seconds");
        registry.register_collector(Box::new(VolumeCounts(self.volumes.clone())));
    }

    /// How full the volumes of this node's pods are.
    pub fn usage(&self) -> &UsageReader {
        &self.usage
    }

    /// What this node and its containers take of processor and memory.
    pub fn figures(&self) -> &FigureReader {
        &self.figures
    }

    /// The log of a container, or of the run before its latest.
    pub async fn logs(
        &self,
        pod: &Pod,
        container: &str,
        previous: bool,
        options: LogOptions,
    ) -> Result<BoxStream<'static, io::Result<Bytes>>, Error> {
        let uid = pod.uid().unwrap_or_default();
        let name = pod.name_any();
        let latest = self.pods.latest(&uid, container).await;
        let attempt = match (latest, previous) {
            (Some(latest), false) => latest,
            (Some(latest), true) if latest > 0 => latest - 1,
            (_, true) => {
                let text = format!("previous terminated container {container:?} in pod {name:?} not found");
                return Err(Error::Unready(text));
            }
            (None, false) => {
                let text = format!("container {container:?} in pod {name:?} is waiting to start");
                return Err(Error::Unready(text));
            }
        };
        let path = self.layout.log(&pod.namespace().unwrap_or_default(), &name, &uid, container, attempt);
        let id = ContainerId { pod_uid: uid, name: container.to_owned(), attempt };
        let runtime = self.runtime.clone();
        let ended = async move {
            runtime.exited(&id).await;
        };
        match logs(&path, options, ended).await {
            Ok(stream) => Ok(stream.boxed()),
            Err(error) => {
                Err(Error::Failed(format!("the log of container {container:?} cannot be read: {error}")))
            }
        }
    }

    /// Runs a command in a running container.
    pub async fn exec(&self, pod: &Pod, container: &str, call: ExecCall) -> Result<Exec, Error> {
        let id = self.latest_run(pod, container).await?;
        self.runtime.exec(&id, call).await.map_err(|error| refused(container, &error))
    }

    /// Joins the streams of a running container's own process.
    pub async fn attach(&self, pod: &Pod, container: &str, call: AttachCall) -> Result<Attached, Error> {
        let id = self.latest_run(pod, container).await?;
        self.runtime.attach(&id, call).await.map_err(|error| refused(container, &error))
    }

    /// Connects to a port of a pod: at its own address, else at the machine's, as it may listen only there.
    pub async fn connect(&self, pod: &Pod, port: u16) -> Result<TcpStream, Error> {
        let own = self.pods.address(&pod.uid().unwrap_or_default());
        let mut local = vec![
            own,
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
            self.machine.address(),
        ];
        // The node's stands at the end.
        local.dedup();
        if own == self.machine.address() {
            local.remove(0);
        }
        let mut refusals = Vec::new();
        for address in local {
            match TcpStream::connect((address, port)).await {
                Ok(stream) => return Ok(stream),
                Err(error) => refusals.push(format!("dial tcp {}: {error}", SocketAddr::new(address, port))),
            }
        }
        Err(Error::Failed(format!("error forwarding port {port} to the pod: {}", refusals.join("; "))))
    }

    /// The latest run of a container, which must have been started.
    async fn latest_run(&self, pod: &Pod, container: &str) -> Result<ContainerId, Error> {
        let pod_uid = pod.uid().unwrap_or_default();
        match self.pods.latest(&pod_uid, container).await {
            Some(attempt) => Ok(ContainerId { pod_uid, name: container.to_owned(), attempt }),
            None => {
                Err(Error::Unready(format!("container not found ({container:?}): it has not started yet")))
            }
        }
    }
}

fn refused(container: &str, error: &berth_runtime::Error) -> Error {
    match error {
        berth_runtime::Error::NotRunning(_) | berth_runtime::Error::NotFound(_) => {
            Error::Unready(format!("container not found ({container:?}): it does not run"))
        }
        error => Error::Failed(error.sentence()),
    }
}

#[expect(clippy::too_many_arguments, reason = "each is a part of the node, and this is called once")]
fn all_plugins(
    layout: &Layout,
    cluster: &Cluster,
    node: &str,
    drivers: &Drivers,
    flex: &berth_flex::Drivers,
    recorder: &Recorder,
    nfs: Option<Arc<dyn NfsMounts>>,
    volumes: &Arc<OnceLock<Weak<Volumes>>>,
) -> Vec<Arc<dyn Plugin>> {
    let volumes = volumes.clone();
    let refresh: Refresh = Arc::new(move |uid| {
        if let Some(volumes) = volumes.get().and_then(Weak::upgrade) {
            volumes.refresh(uid);
        }
    });
    let tokens = Tokens::new(cluster);
    let mut all = plugins(layout, cluster, node, &tokens, recorder, nfs, refresh);
    all.push(Arc::new(Csi::new(cluster, layout, node, drivers.clone(), tokens)));
    // The last, as it owns the directories of every name that is a driver's.
    all.push(Arc::new(Flex::new(cluster, layout, node, flex.clone(), recorder.clone())));
    all
}

/// Notifies the volume manager of every device that is attached or detached.
fn follow_attachments(cluster: &Cluster, name: &str, volumes: &Arc<Volumes>) {
    fn attached(node: &NodeObject) -> HashSet<&str> {
        let status = node.status.as_ref().and_then(|status| status.volumes_attached.as_ref());
        status.into_iter().flatten().map(|volume| volume.name.as_str()).collect()
    }
    let (name, volumes) = (name.to_owned(), Arc::downgrade(volumes));
    cluster.cache::<NodeObject>().subscribe(move |before, after| {
        let Some(node) = after.filter(|node| node.name_any() == name) else { return };
        let Some(volumes) = volumes.upgrade() else { return };
        let before = before.map(|node| attached(node)).unwrap_or_default();
        for device in attached(node).symmetric_difference(&before) {
            volumes.attachment_changed(device);
        }
    });
}

/// What waited for a driver is tried again when one comes; `changed` gives a future that ends at the next change.
async fn follow(
    cluster: Cluster,
    volumes: Arc<Volumes>,
    changed: impl Fn() -> BoxFuture<'static, ()> + Send + Sync,
) {
    let shutdown = cluster.shutdown();
    let mut next = changed();
    while shutdown.run_until_cancelled(next.as_mut()).await.is_some() {
        next = changed();
        volumes.retry();
    }
}

#[async_trait]
impl Attachments for Machine {
    async fn in_use(&self, unique_name: &str) -> Result<(), Failed> {
        Self::in_use(self, unique_name).await
    }

    fn not_in_use(&self, unique_name: &str) {
        Self::not_in_use(self, unique_name);
    }

    fn is_attached(&self, unique_name: &str) -> bool {
        Self::is_attached(self, unique_name)
    }
}
