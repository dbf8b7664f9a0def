//! Runs containers by another program that speaks the Container Runtime Interface (CRI), version 1, such as containerd: with
//! images, below the same node as containers that are processes.
//!
//! Each pod is a sandbox of the runtime, and each run of a container a container in it. Labels tell those of one directory from
//! all others of the runtime, so that they are found again after a restart. A directory per container, named as those of
//! processes, holds its termination message and the mounts that were made ready for it (`cri/mounts.rs`).
//!
//! A pod has the network of the machine, as pods of processes have it, so that no network plugin is needed.
//!
//! That a container has ended is heard from the runtime's events; of one without them (containerd before 1.7) the containers are
//! listed at short intervals while any of ours runs.

mod calls;
mod changes;
mod config;
mod images;
mod mounts;
mod stream;
mod v1;

use std::{
    collections::{HashMap, HashSet},
    fmt, fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use berth_host::{mount::unmount_lazily, path::remove_tree};
use jiff::Timestamp;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::timeout,
};
use tonic::transport::Channel;

pub(crate) use self::stream::{Control, Remote};
use self::{
    calls::{answer, found, reach},
    changes::{rotate_logs, watch_containers},
    stream::Streams,
    v1::runtime_service_client::RuntimeServiceClient,
};
use crate::{
    AttachCall, Attached, ContainerId, ContainerSpec, Error, Exec, ExecCall, Exit, Images, KnownContainer,
    Reason, Result, Runtime, State, Usage, blocking, cgroup::Cgroups, status::termination_message,
};

/// How long the runtime may take to answer what it only has to look up.
const LOOK_UP: Duration = Duration::from_secs(30);
/// How long it may take to start or stop something, as with the kubelet.
const CHANGE: Duration = Duration::from_secs(240);
/// How long to wait before a runtime that was lost is called again.
const PAUSE: Duration = Duration::from_secs(1);
/// The largest answer that is taken: a list of thousands of containers.
const LARGEST: usize = 64 << 20;

/// The containers of one directory, run by another program.
#[derive(Clone)]
pub struct Cri(Arc<Inner>);

struct Inner {
    endpoint: String,
    directory: PathBuf,
    /// The value of the label of everything that is ours.
    owner: String,
    version: v1::VersionResponse,
    channel: Channel,
    cgroups: std::result::Result<Cgroups, String>,
    containers: Mutex<HashMap<ContainerId, Arc<Container>>>,
    sandboxes: Mutex<HashMap<String, Arc<Sandboxes>>>,
    /// What is mounted in the directory is not bound along with anything else; held while a container's is made or removed.
    is_apart: Mutex<bool>,
    /// Something runs that did not before.
    started: Arc<Notify>,
    tasks: Mutex<Vec<AbortHandle>>,
}

/// The sandboxes of a pod: one, and those before it that have ended.
type Sandboxes = tokio::sync::Mutex<Vec<Sandbox>>;

#[derive(Debug, Clone)]
struct Sandbox {
    id: String,
    attempt: u32,
}

struct Container {
    id: ContainerId,
    namespace: String,
    pod_name: String,
    directory: PathBuf,
    /// What the runtime calls it, once it is made.
    name: OnceLock<String>,
    log: OnceLock<PathBuf>,
    /// The digest of its image, by which it is found in a registry.
    image: OnceLock<String>,
    tty: bool,
    /// `None` while it is being started.
    state: watch::Sender<Option<State>>,
    /// Held while its state is asked for.
    observing: tokio::sync::Mutex<()>,
}

impl fmt::Debug for Cri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cri").field("endpoint", &self.0.endpoint).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in self.tasks.lock().drain(..) {
            task.abort();
        }
    }
}

/// The endpoint that a runtime of this directory was opened with, if there was one.
pub fn endpoint_of(directory: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(directory.join(ENDPOINT)) {
        Ok(endpoint) => Ok(Some(endpoint)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The file in the directory with the endpoint.
const ENDPOINT: &str = "endpoint";

impl Cri {
    /// Reaches the runtime at an endpoint such as `unix:///run/containerd/containerd.sock`, and takes up the containers of a
    /// directory, which is made when it is missing.
    ///
    /// What still runs is adopted; what has ended meanwhile is there as exited; what was never started is removed.
    pub async fn open(endpoint: &str, directory: &Path) -> Result<Self> {
        let (channel, version) = reach(endpoint).await?;
        let doing = || format!("open the containers in {}", directory.display());
        let failed =
            |error: io::Error| Error::host(doing(), berth_host::Error::new("prepare the directory", error));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        // Before there is anything to be found again.
        fs::write(directory.join(ENDPOINT), endpoint).map_err(failed)?;
        let digest = Sha256::digest(directory.as_os_str().as_encoded_bytes());
        let owner = u64::from_be_bytes(digest[..8].try_into().expect("a digest has more than eight bytes"));
        let owner = format!("{owner:016x}");
        let runtime = Self(Arc::new(Inner {
            endpoint: endpoint.to_owned(),
            directory: directory.to_owned(),
            owner,
            version,
            channel,
            cgroups: Cgroups::open(directory),
            containers: Mutex::default(),
            sandboxes: Mutex::default(),
            is_apart: Mutex::default(),
            started: Arc::default(),
            tasks: Mutex::default(),
        }));
        runtime.adopt().await?;
        let tasks = [
            tokio::spawn(watch_containers(Arc::downgrade(&runtime.0), runtime.client())).abort_handle(),
            tokio::spawn(rotate_logs(Arc::downgrade(&runtime.0))).abort_handle(),
        ];
        runtime.0.tasks.lock().extend(tasks);
        Ok(runtime)
    }

    /// Whether a runtime answers at an endpoint, and can do what is needed.
    pub async fn check(endpoint: &str) -> Result<()> {
        reach(endpoint).await.map(drop)
    }

    /// Removes every container and every pod, with all that was made for them.
    pub async fn remove_all(&self) -> Result<()> {
        for uid in self.pods() {
            self.remove_pod(&uid).await?;
        }
        let directory = self.0.directory.clone();
        let removed = blocking(move || {
            unmount_lazily(&directory)?;
            remove_tree(&directory)
        });
        removed.await.map(drop).map_err(|error| Error::host("remove what is left of containers", error))
    }

    fn client(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.0.channel.clone()).max_decoding_message_size(LARGEST)
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, HashMap<ContainerId, Arc<Container>>> {
        self.0.containers.lock()
    }

    fn get(&self, id: &ContainerId) -> Option<Arc<Container>> {
        self.lock().get(id).cloned()
    }

    fn sandboxes(&self, uid: &str) -> Arc<Sandboxes> {
        self.0.sandboxes.lock().entry(uid.to_owned()).or_default().clone()
    }

    /// Takes up what an earlier process has left, in the runtime and in the directory.
    async fn adopt(&self) -> Result<()> {
        let selector = config::of_owner(&self.0.owner);
        let filter = v1::PodSandboxFilter { label_selector: selector.clone(), ..Default::default() };
        let request = v1::ListPodSandboxRequest { filter: Some(filter) };
        let sandboxes = answer("list the pods", LOOK_UP, self.client().list_pod_sandbox(request)).await?;
        for sandbox in sandboxes.items {
            let Some(uid) = config::pod_of(&sandbox.labels) else { continue };
            let attempt = sandbox.metadata.map_or(0, |metadata| metadata.attempt);
            self.sandboxes(uid).lock().await.push(Sandbox { id: sandbox.id, attempt });
        }
        let mut known = HashSet::new();
        for found in self.list().await? {
            let Some((id, namespace, pod_name)) = config::identify(&found.labels, found.metadata.as_ref())
            else {
                continue;
            };
            if found.state == i32::from(v1::ContainerState::ContainerCreated) {
                self.discard(&found.id).await?;
                continue;
            }
            known.insert(id.directory());
            let container = Arc::new(Container {
                directory: self.0.directory.join(id.directory()),
                namespace,
                pod_name,
                name: OnceLock::from(found.id),
                log: OnceLock::new(),
                image: OnceLock::new(),
                tty: config::has_terminal(&found.annotations),
                state: watch::Sender::new(None),
                observing: tokio::sync::Mutex::default(),
                id: id.clone(),
            });
            mounts::release(&container.directory).await;
            self.observe(&container).await?;
            self.lock().insert(id, container);
        }
        let runtime = self.clone();
        let removed = blocking(move || {
            remove_others(&runtime.0.directory, &known)?;
            runtime.end_if_empty()
        });
        removed.await.map_err(|error| Error::host("remove what is left of containers", error))
    }

    /// Every container of ours, as the runtime lists it.
    async fn list(&self) -> Result<Vec<v1::Container>> {
        let selector = config::of_owner(&self.0.owner);
        let filter = v1::ContainerFilter { label_selector: selector, ..Default::default() };
        let request = v1::ListContainersRequest { filter: Some(filter) };
        let listed = answer("list the containers", LOOK_UP, self.client().list_containers(request)).await?;
        Ok(listed.containers)
    }

    /// The container of that name, and whether it is a new one, which the caller has to start.
    fn entry(&self, id: &ContainerId, spec: &ContainerSpec) -> (Arc<Container>, bool) {
        let mut containers = self.lock();
        if let Some(container) = containers.get(id) {
            return (Arc::clone(container), false);
        }
        let container = Arc::new(Container {
            id: id.clone(),
            namespace: spec.namespace.clone(),
            pod_name: spec.pod_name.clone(),
            directory: self.0.directory.join(id.directory()),
            name: OnceLock::new(),
            log: OnceLock::from(spec.log.clone()),
            image: OnceLock::new(),
            tty: spec.tty,
            state: watch::Sender::new(None),
            observing: tokio::sync::Mutex::default(),
        });
        containers.insert(id.clone(), Arc::clone(&container));
        (container, true)
    }

    async fn launch(&self, container: &Arc<Container>, spec: &ContainerSpec) -> Result<()> {
        let (sandbox, sandbox_config) = self.sandbox(spec).await?;
        let directory = container.directory.clone();
        self.clear_directory(directory.clone()).await?;
        let (wanted, containers) = (spec.clone(), self.clone());
        let made = blocking(move || {
            containers.make_directory(&directory)?;
            mounts::make(&directory, &wanted)
        })
        .await
        .map_err(|error| Error::host(format!("start container {}", spec.name), error));
        let launched = match made {
            Ok(mounts) => {
                Box::pin(self.create_and_start(container, spec, mounts, sandbox, sandbox_config)).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = launched {
            self.discard_all(&container.id).await;
            let _ = self.clear_directory(container.directory.clone()).await;
            return Err(error);
        }
        mounts::release(&container.directory).await;
        self.observe(container).await?;
        self.0.started.notify_one();
        Ok(())
    }

    /// Makes the directory of a container, where its mounts are apart from others.
    fn make_directory(&self, directory: &Path) -> std::result::Result<(), berth_host::Error> {
        let mut is_apart = self.0.is_apart.lock();
        if !*is_apart {
            mounts::set_apart(&self.0.directory)?;
            *is_apart = true;
        }
        let created = fs::DirBuilder::new().mode(0o700).create(directory);
        created.map_err(|error| berth_host::Error::new("make the container's directory", error))
    }

    async fn create_and_start(
        &self,
        container: &Container,
        spec: &ContainerSpec,
        mounts: Vec<v1::Mount>,
        pod_sandbox_id: String,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<()> {
        let doing = format!("create container {}", spec.name);
        let target = spec.target.as_ref().and_then(|target| self.running_in(&container.id.pod_uid, target));
        let config = config::container(spec, &self.0.owner, mounts, target).map_err(|error| {
            Error::host(doing.clone(), berth_host::Error::new("find the devices of the container", error))
        })?;
        let request = v1::CreateContainerRequest {
            pod_sandbox_id,
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        // One that an earlier attempt has made, whose answer was lost.
        self.discard_all(&container.id).await;
        let created = Box::pin(answer(&doing, CHANGE, self.client().create_container(request))).await?;
        let container_id = created.container_id;
        let _ = container.name.set(container_id.clone());
        let request = v1::StartContainerRequest { container_id: container_id.clone() };
        let doing = format!("start container {}", spec.name);
        let started = answer(&doing, CHANGE, self.client().start_container(request)).await;
        if let Err(error) = started {
            // One whose command does not run has ended, and says so itself.
            let status = self.status(&container_id).await?;
            if status.is_none_or(|status| status.state != i32::from(v1::ContainerState::ContainerExited)) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The running container of that name in a pod.
    fn running_in(&self, uid: &str, name: &str) -> Option<String> {
        let containers = self.lock();
        let mut found = containers.values().filter(|container| {
            container.id.pod_uid == uid && container.id.name == name && container.is_running()
        });
        found.next()?.name.get().cloned()
    }

    /// The sandbox of a container's pod, which is started if none is ready.
    async fn sandbox(&self, spec: &ContainerSpec) -> Result<(String, v1::PodSandboxConfig)> {
        let group = self.pod_group(spec).await?;
        let sandboxes = self.sandboxes(&spec.pod_uid);
        let mut sandboxes = sandboxes.lock().await;
        let latest = sandboxes.iter().max_by_key(|sandbox| sandbox.attempt);
        if let Some(Sandbox { id, attempt }) = latest {
            let request = v1::PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: false };
            let doing = "look at the sandbox of the pod";
            let status = found(answer(doing, LOOK_UP, self.client().pod_sandbox_status(request)).await)?;
            let state = status.and_then(|found| found.status).map(|status| status.state);
            if state == Some(v1::PodSandboxState::SandboxReady.into()) {
                return Ok((id.clone(), config::sandbox(spec, &self.0.owner, *attempt, &group)));
            }
        }
        let attempt = latest.map_or(0, |latest| latest.attempt + 1);
        let config = config::sandbox(spec, &self.0.owner, attempt, &group);
        let request = v1::RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: spec.pod.handler.clone().unwrap_or_default(),
        };
        let doing = "start the sandbox of the pod";
        let id = answer(doing, CHANGE, self.client().run_pod_sandbox(request)).await?.pod_sandbox_id;
        sandboxes.push(Sandbox { id: id.clone(), attempt });
        Ok((id, config))
    }

    /// The control group of a container's pod, with its limits; none where the machine has no groups.
    async fn pod_group(&self, spec: &ContainerSpec) -> Result<PathBuf> {
        let (runtime, uid, limits) = (self.clone(), spec.pod_uid.clone(), spec.pod_limits);
        let made = blocking(move || {
            let Ok(cgroups) = &runtime.0.cgroups else { return Ok(PathBuf::new()) };
            cgroups.prepare_pod(&uid, &limits)
        });
        made.await.map_err(|error| Error::host("make the control group of the pod", error))
    }

    async fn status(&self, container_id: &str) -> Result<Option<v1::ContainerStatus>> {
        let request = v1::ContainerStatusRequest { container_id: container_id.to_owned(), verbose: false };
        let status = answer("look at a container", LOOK_UP, self.client().container_status(request)).await;
        Ok(found(status)?.and_then(|found| found.status))
    }

    /// Asks the runtime for the state of a container that was made and has not ended as far as we know.
    async fn observe(&self, container: &Container) -> Result<()> {
        let _observing = container.observing.lock().await;
        let Some(name) = container.name.get() else { return Ok(()) };
        if matches!(*container.state.borrow(), Some(State::Exited(_))) {
            return Ok(());
        }
        let status = self.status(name).await?;
        if let Some(status) = status.as_ref().filter(|status| !status.log_path.is_empty()) {
            let _ = container.log.set(status.log_path.clone().into());
        }
        if let Some(status) = &status {
            let _ = container.image.set(status.image_ref.clone());
        }
        match status {
            Some(status) if status.state == i32::from(v1::ContainerState::ContainerRunning) => {
                let started = time(status.started_at).unwrap_or_else(Timestamp::now);
                container.state.send_replace(Some(State::Running { started }));
            }
            Some(status) if status.state == i32::from(v1::ContainerState::ContainerCreated) => {}
            status => {
                let directory = container.directory.clone();
                let message = blocking(move || termination_message(&directory)).await;
                let exit = match status {
                    Some(status) => exit(&status, message),
                    None => Exit::unknown("the container was removed by somebody else".to_owned()),
                };
                container.state.send_replace(Some(State::Exited(exit)));
            }
        }
        Ok(())
    }

    /// Looks at every container that is not listed as running any more.
    async fn observe_ended(&self) -> Result<()> {
        let running = i32::from(v1::ContainerState::ContainerRunning);
        let before: Vec<Arc<Container>> =
            self.lock().values().filter(|container| container.is_running()).cloned().collect();
        let listed: HashSet<String> = self
            .list()
            .await?
            .into_iter()
            .filter(|container| container.state == running)
            .map(|container| container.id)
            .collect();
        for container in before {
            if container.name.get().is_some_and(|name| !listed.contains(name)) {
                self.observe(&container).await?;
            }
        }
        Ok(())
    }

    /// Removes a container of the runtime, whether or not it runs.
    async fn discard(&self, container_id: &str) -> Result<()> {
        let request = v1::RemoveContainerRequest { container_id: container_id.to_owned() };
        found(answer("remove a container", CHANGE, self.client().remove_container(request)).await).map(drop)
    }

    /// Removes whatever the runtime has of a container that was not started.
    async fn discard_all(&self, id: &ContainerId) {
        for found in self.list().await.unwrap_or_default() {
            let known = config::identify(&found.labels, found.metadata.as_ref());
            if known.is_some_and(|(known, ..)| known == *id)
                && let Err(error) = self.discard(&found.id).await
            {
                tracing::warn!(container = %id, error = error.sentence(), "a container that was not started is left");
            }
        }
    }

    async fn clear_directory(&self, directory: PathBuf) -> Result<()> {
        let runtime = self.clone();
        let removed = blocking(move || {
            mounts::take_away(&directory)?;
            remove_tree(&directory)?;
            runtime.end_if_empty()
        });
        removed.await.map_err(|error| Error::host("remove what is left of a container", error))
    }

    /// After the last container nothing stays mounted.
    fn end_if_empty(&self) -> std::result::Result<(), berth_host::Error> {
        let mut is_apart = self.0.is_apart.lock();
        if directories(&self.0.directory)?.is_empty() {
            unmount_lazily(&self.0.directory)?;
            *is_apart = false;
        }
        Ok(())
    }

    /// The name of a container that runs.
    fn running(&self, id: &ContainerId) -> Result<(Arc<Container>, String)> {
        let container = self.get(id).ok_or_else(|| Error::NotFound(id.clone()))?;
        match container.name.get().filter(|_| container.is_running()) {
            Some(name) => Ok((container.clone(), name.clone())),
            None => Err(Error::NotRunning(id.clone())),
        }
    }
}

#[async_trait]
impl Runtime for Cri {
    fn version(&self) -> String {
        let version = &self.0.version;
        format!("{}://{}", version.runtime_name, version.runtime_version)
    }

    fn images(&self) -> Option<&dyn Images> {
        Some(self)
    }

    fn limits_containers(&self) -> std::result::Result<(), &str> {
        self.0.cgroups.as_ref().map(drop).map_err(String::as_str)
    }

    async fn usages(&self) -> Vec<(ContainerId, Usage)> {
        let filter = v1::ContainerStatsFilter {
            label_selector: config::of_owner(&self.0.owner),
            ..Default::default()
        };
        let request = v1::ListContainerStatsRequest { filter: Some(filter) };
        let mut client = self.client();
        let stats = answer("measure the containers", LOOK_UP, client.list_container_stats(request)).await;
        let number = |value: Option<v1::UInt64Value>| value.map_or(0, |value| value.value);
        let usage = |stats: v1::ContainerStats| {
            let attributes = stats.attributes?;
            let (id, ..) = config::identify(&attributes.labels, attributes.metadata.as_ref())?;
            let (cpu, memory) = (stats.cpu.unwrap_or_default(), stats.memory.unwrap_or_default());
            let usage = Usage {
                cpu: number(cpu.usage_core_nano_seconds),
                memory: number(memory.usage_bytes),
                working_set: number(memory.working_set_bytes),
                anonymous: number(memory.rss_bytes),
                pids: 0,
            };
            self.get(&id).filter(|container| container.is_running()).map(|_| (id, usage))
        };
        match stats {
            Ok(stats) => stats.stats.into_iter().filter_map(usage).collect(),
            Err(error) => {
                tracing::warn!(error = error.sentence(), "containers are not measured");
                Vec::new()
            }
        }
    }

    fn containers(&self) -> Vec<KnownContainer> {
        let containers = self.lock();
        let known = |container: &Arc<Container>| {
            let state = container.state.borrow().clone()?;
            let Container { id, namespace, pod_name, .. } = &**container;
            Some(KnownContainer {
                id: id.clone(),
                namespace: namespace.clone(),
                pod_name: pod_name.clone(),
                state,
            })
        };
        containers.values().filter_map(known).collect()
    }

    fn pods(&self) -> Vec<String> {
        self.0.sandboxes.lock().keys().cloned().collect()
    }

    async fn start(&self, spec: ContainerSpec) -> Result<ContainerId> {
        let id = ContainerId::of(&spec);
        loop {
            let (container, is_new) = self.entry(&id, &spec);
            if is_new {
                let runtime = self.clone();
                // In a task of its own, so that it goes on when the caller is dropped.
                let launch = async move {
                    let launched = Box::pin(runtime.launch(&container, &spec)).await;
                    if launched.is_err() {
                        runtime.lock().remove(&container.id);
                    }
                    launched
                };
                let started = tokio::spawn(launch).await;
                return started.expect("starting a container does not panic").map(|()| id);
            }
            let mut state = container.state.subscribe();
            drop(container);
            // An error means that whoever was starting it has failed.
            if state.wait_for(Option::is_some).await.is_ok() {
                return Ok(id);
            }
        }
    }

    fn state(&self, id: &ContainerId) -> Option<State> {
        self.get(id)?.state.borrow().clone()
    }

    fn address(&self, id: &ContainerId) -> String {
        let name = self.get(id).and_then(|container| container.name.get().cloned());
        format!("{}://{}", self.0.version.runtime_name, name.unwrap_or_default())
    }

    fn image(&self, id: &ContainerId) -> Option<String> {
        self.get(id)?.image.get().cloned()
    }

    async fn exited(&self, id: &ContainerId) -> Exit {
        let state = self.get(id).map(|container| container.state.subscribe());
        Exit::awaited(id, state).await
    }

    async fn stop(&self, id: &ContainerId, grace: Duration) -> Exit {
        let Some(container) = self.get(id) else {
            return Exit::unknown(format!("there is no container {id}"));
        };
        // What is being started is stopped as soon as it has been.
        let _ = container.state.subscribe().wait_for(Option::is_some).await;
        let seconds = i64::try_from(grace.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
        while let (true, Some(container_id)) = (container.is_running(), container.name.get().cloned()) {
            let request = v1::StopContainerRequest { container_id, timeout: seconds };
            let stopped =
                answer("stop a container", grace + CHANGE, self.client().stop_container(request)).await;
            let observed = match found(stopped) {
                Ok(_) => self.observe(&container).await,
                Err(error) => Err(error),
            };
            if let Err(error) = observed {
                tracing::warn!(container = %id, error = error.sentence(), "a container does not stop");
            }
            if container.is_running() {
                // The runtime is away, or needs a moment more.
                let _ = timeout(PAUSE, self.exited(id)).await;
            }
        }
        self.exited(id).await
    }

    async fn remove(&self, id: &ContainerId) -> Result<()> {
        let Some(container) = self.get(id) else { return Ok(()) };
        if !matches!(*container.state.borrow(), Some(State::Exited(_))) {
            return Err(Error::StillRunning(id.clone()));
        }
        if let Some(name) = container.name.get() {
            self.discard(name).await?;
        }
        self.clear_directory(container.directory.clone()).await?;
        self.lock().remove(id);
        Ok(())
    }

    async fn stop_pod(&self, uid: &str) -> Result<()> {
        let Some(sandboxes) = self.0.sandboxes.lock().get(uid).cloned() else { return Ok(()) };
        for Sandbox { id, .. } in &*sandboxes.lock().await {
            let request = v1::StopPodSandboxRequest { pod_sandbox_id: id.clone() };
            let doing = "stop the sandbox of the pod";
            found(answer(doing, CHANGE, self.client().stop_pod_sandbox(request)).await)?;
        }
        Ok(())
    }

    async fn remove_pod(&self, uid: &str) -> Result<()> {
        let Some(sandboxes) = self.0.sandboxes.lock().get(uid).cloned() else { return Ok(()) };
        self.stop_pod(uid).await?;
        let mut sandboxes = sandboxes.lock().await;
        while let Some(Sandbox { id, .. }) = sandboxes.last() {
            let request = v1::RemovePodSandboxRequest { pod_sandbox_id: id.clone() };
            let doing = "remove the sandbox of the pod";
            found(answer(doing, CHANGE, self.client().remove_pod_sandbox(request)).await)?;
            sandboxes.pop();
        }
        let left: Vec<Arc<Container>> =
            self.lock().values().filter(|container| container.id.pod_uid == uid).cloned().collect();
        for container in left {
            // Went with its sandbox.
            self.observe(&container).await?;
            self.clear_directory(container.directory.clone()).await?;
            self.lock().remove(&container.id);
        }
        let (runtime, pod) = (self.clone(), uid.to_owned());
        blocking(move || {
            if let Ok(cgroups) = &runtime.0.cgroups {
                cgroups.remove_pod(&pod);
            }
        })
        .await;
        self.0.sandboxes.lock().remove(uid);
        Ok(())
    }

    async fn attach(&self, id: &ContainerId, call: AttachCall) -> Result<Attached> {
        let (container, container_id) = self.running(id)?;
        let AttachCall { stdin, stdout, stderr } = call;
        let tty = container.tty;
        let request =
            v1::AttachRequest { container_id, stdin, tty, stdout: stdout || tty, stderr: stderr && !tty };
        let url = answer("attach to a container", LOOK_UP, self.client().attach(request)).await?.url;
        let wanted = Streams { stdin, stdout: stdout || tty, stderr, tty };
        let remote = stream::connect(&url, wanted).await.map_err(|error| Error::Exec(error.to_string()))?;
        Ok(Attached::remote(remote))
    }

    async fn exec(&self, id: &ContainerId, call: ExecCall) -> Result<Exec> {
        let (_, container_id) = self.running(id)?;
        let ExecCall { command, tty, stdin, size } = call;
        let request = v1::ExecRequest { container_id, cmd: command, tty, stdin, stdout: true, stderr: !tty };
        let url = answer("exec in a container", LOOK_UP, self.client().exec(request)).await?.url;
        let wanted = Streams { stdin, stdout: true, stderr: true, tty };
        let remote = stream::connect(&url, wanted).await.map_err(|error| Error::Exec(error.to_string()))?;
        if let Some(size) = size {
            remote.control.resize(size);
        }
        Ok(Exec::remote(remote))
    }

    async fn run(&self, id: &ContainerId, command: Vec<String>, kept: usize) -> Result<(i32, Vec<u8>)> {
        let (_, container_id) = self.running(id)?;
        // Whoever asks limits the time; the runtime kills the command when the call is dropped.
        let request = v1::ExecSyncRequest { container_id, cmd: command, timeout: 0 };
        let ended = self.client().exec_sync(request).await;
        let ended = ended.map_err(|status| Error::Exec(status.message().to_owned()))?.into_inner();
        let mut output = ended.stdout;
        output.extend(ended.stderr);
        output.truncate(kept);
        Ok((ended.exit_code, output))
    }
}

impl Container {
    fn is_running(&self) -> bool {
        matches!(*self.state.borrow(), Some(State::Running { .. }))
    }
}

/// Removes the directories of containers that the runtime does not know.
fn remove_others(directory: &Path, known: &HashSet<String>) -> std::result::Result<(), berth_host::Error> {
    for name in directories(directory)?.into_iter().filter(|name| !known.contains(name)) {
        let place = directory.join(name);
        mounts::take_away(&place)?;
        remove_tree(&place)?;
    }
    Ok(())
}

/// The names of the directories of containers.
fn directories(directory: &Path) -> std::result::Result<Vec<String>, berth_host::Error> {
    let entries = fs::read_dir(directory);
    let entries =
        entries.map_err(|error| berth_host::Error::new("read the directory of containers", error))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.filter(|name| ContainerId::from_directory(name).is_some()).collect())
}

fn exit(status: &v1::ContainerStatus, message: String) -> Exit {
    let reason = match (status.reason.as_str(), status.exit_code) {
        ("OOMKilled", _) => Reason::OutOfMemory,
        ("StartError", _) => Reason::StartError,
        ("ContainerStatusUnknown" | "Unknown", _) => Reason::ContainerStatusUnknown,
        (_, 0) => Reason::Completed,
        _ => Reason::Error,
    };
    let own = Some(&status.message).filter(|own| reason == Reason::StartError && !own.is_empty());
    Exit {
        code: status.exit_code,
        signal: None,
        reason,
        message: own.cloned().unwrap_or(message),
        started: time(status.started_at),
        finished: time(status.finished_at).unwrap_or_else(Timestamp::now),
    }
}

/// A time in nanoseconds; 0 is none.
fn time(nanoseconds: i64) -> Option<Timestamp> {
    Timestamp::from_nanosecond(nanoseconds.into()).ok().filter(|_| nanoseconds != 0)
}
