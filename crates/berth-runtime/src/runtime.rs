//! Runs containers as processes of this machine, and finds them again after a restart.
//!
//! Each container has a directory, named after pod, container and attempt, which is all that is kept about it: a
//! container does not depend on this process, so one that is killed with -9 loses nothing, and the next one adopts what
//! runs and learns how the rest has ended.

use std::{
    collections::HashMap,
    fmt, fs, io,
    os::{fd::AsRawFd, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use berth_host::{path::remove_tree, user_namespace::UserNamespace};
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, unix::AsyncFd},
    net::unix::pipe,
    sync::watch,
};

use crate::{
    ContainerSpec, SPEC_FILE,
    attach::{AttachCall, Attached, Client},
    blocking,
    cgroup::{Cgroups, Prepared, Usage},
    exec::Exec,
    interface::{KnownContainer, Runtime},
    joiner::ExecCall,
    launcher::Launcher,
    processes,
    status::{self, Exit, Found, Shim, State},
};

/// How long a container may take to end after its first process was asked to kill it, which still records the exit code.
const KILL_PATIENCE: Duration = Duration::from_secs(2);

/// What every function of this module returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something could not be done with a container.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A container without a command.
    #[error("container {0} names no command, and images are not pulled")]
    NoCommand(String),
    /// A name or path that cannot be used.
    #[error("container {container}: {problem}")]
    Invalid {
        /// The name of the container.
        container: String,
        /// What is wrong with it.
        problem: String,
    },
    /// There is no such container.
    #[error("there is no container {0}")]
    NotFound(ContainerId),
    /// The container does not run.
    #[error("container {0} is not running")]
    NotRunning(ContainerId),
    /// The container still runs.
    #[error("container {0} is still running")]
    StillRunning(ContainerId),
    /// No container runtime answers where one was expected.
    #[error("no container runtime answers at {endpoint}: {why}")]
    Unreachable {
        /// Where it was expected.
        endpoint: String,
        /// What the attempt ended with.
        why: String,
    },
    /// A container runtime refused a call.
    #[error("{doing}: {why}")]
    Refused {
        /// What we were doing.
        doing: String,
        /// What the runtime answered.
        why: String,
    },
    /// A container runtime does not have what a call was about.
    #[error("{0}: it is not there")]
    Missing(String),
    /// A process could not be started in a container; the message is the joiner's.
    #[error("{0}")]
    Exec(String),
    /// The machine refused an operation on the container.
    #[error("{doing}")]
    Host {
        /// What we were doing.
        doing: String,
        /// What the machine said.
        source: berth_host::Error,
    },
}

/// Names one container, now and ever: a restart is another one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId {
    /// The uid of its pod.
    pub pod_uid: String,
    /// Its name in the pod.
    pub name: String,
    /// How often it was started before.
    pub attempt: u32,
}

/// The runtime that needs nothing installed: its containers are processes of this machine, those of one directory.
#[derive(Debug, Clone)]
pub struct Processes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    directory: PathBuf,
    launcher: Launcher,
    /// Or why this machine has none for us.
    cgroups: std::result::Result<Arc<Cgroups>, String>,
    containers: Mutex<HashMap<ContainerId, Arc<Container>>>,
}

#[derive(Debug)]
struct Container {
    directory: PathBuf,
    /// Its control group, from which its name follows.
    group: Option<(Arc<Cgroups>, ContainerId)>,
    /// `None` while it is being started.
    state: watch::Sender<Option<State>>,
    shim: OnceLock<Arc<Shim>>,
    /// Whether we have killed its first process, so that nothing records how it ended.
    killed: AtomicBool,
}

impl Processes {
    /// Opens the containers of a directory, which is made when it is missing; called in a tokio runtime.
    ///
    /// What still runs is adopted; what has ended meanwhile is there as exited; what was never started is removed.
    /// An entry that cannot be read is left alone and logged, and does not prevent the others.
    /// `program` is one whose `main` intercepts [`crate::LAUNCHER`].
    pub fn open(directory: &Path, program: &Path) -> Result<Self> {
        let doing = || format!("open the containers in {}", directory.display());
        let failed =
            |error: io::Error| Error::host(doing(), berth_host::Error::new("read the directory", error));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        let launcher = Launcher::start(program).map_err(|error| Error::host(doing(), error))?;
        let inner = Inner {
            directory: directory.to_owned(),
            launcher,
            cgroups: Cgroups::open(directory).map(Arc::new),
            containers: Mutex::new(HashMap::new()),
        };
        let runtime = Self(Arc::new(inner));
        for entry in fs::read_dir(directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if let Err(error) = runtime.adopt(&path) {
                tracing::error!(path = %path.display(), error = error.sentence(), "a container cannot be taken up");
            }
        }
        if let Ok(cgroups) = &runtime.0.cgroups {
            cgroups.retain(&runtime.lock().keys().cloned().collect::<Vec<_>>());
        }
        Ok(runtime)
    }

    /// Sends a signal to the command of a container; one that has ended needs none.
    pub fn signal(&self, id: &ContainerId, signal: i32) -> Result<()> {
        let container = self.get(id).ok_or_else(|| Error::NotFound(id.clone()))?;
        let Some(shim) = container.running() else { return Ok(()) };
        shim.signal(signal).map_err(|error| Error::host(format!("signal container {id}"), error))
    }

    /// What each container that runs has taken.
    fn measure(&self) -> Vec<(ContainerId, Usage)> {
        let containers: Vec<(ContainerId, Arc<Container>)> =
            self.lock().iter().map(|(id, container)| (id.clone(), container.clone())).collect();
        let by_namespace = match &self.0.cgroups {
            Ok(_) => HashMap::new(),
            Err(_) => processes::usage_by_namespace(),
        };
        let usage = |id: &ContainerId, shim: &Shim| match &self.0.cgroups {
            Ok(cgroups) => cgroups.usage(id),
            Err(_) => by_namespace.get(&processes::namespace(shim.pid())?).copied(),
        };
        let running = containers.into_iter().filter_map(|(id, container)| {
            let usage = usage(&id, container.running()?)?;
            Some((id, usage))
        });
        running.collect()
    }

    fn adopt(&self, directory: &Path) -> std::result::Result<(), berth_host::Error> {
        let name = directory.file_name().and_then(|name| name.to_str());
        let id = name.and_then(ContainerId::from_directory);
        let group = id.as_ref().and_then(|id| self.group(id));
        let container = Arc::new(Container::new(directory.to_owned(), group));
        if container.take_up(id.is_some())?
            && let Some(id) = id
        {
            self.lock().insert(id, container);
        }
        Ok(())
    }

    /// The container of that name, and whether it is a new one, which the caller has to start.
    fn entry(&self, id: &ContainerId) -> (Arc<Container>, bool) {
        let mut containers = self.lock();
        if let Some(container) = containers.get(id) {
            return (Arc::clone(container), false);
        }
        let container = Arc::new(Container::new(self.0.directory.join(id.directory()), self.group(id)));
        containers.insert(id.clone(), Arc::clone(&container));
        (container, true)
    }

    fn group(&self, id: &ContainerId) -> Option<(Arc<Cgroups>, ContainerId)> {
        Some((self.0.cgroups.as_ref().ok()?.clone(), id.clone()))
    }

    fn get(&self, id: &ContainerId) -> Option<Arc<Container>> {
        self.lock().get(id).cloned()
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, HashMap<ContainerId, Arc<Container>>> {
        self.0.containers.lock()
    }
}

#[async_trait]
impl Runtime for Processes {
    fn version(&self) -> String {
        concat!("process://", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn address(&self, id: &ContainerId) -> String {
        format!("process://{id}")
    }

    fn limits_containers(&self) -> std::result::Result<(), &str> {
        self.0.cgroups.as_ref().map(drop).map_err(String::as_str)
    }

    async fn usages(&self) -> Vec<(ContainerId, Usage)> {
        let runtime = self.clone();
        blocking(move || runtime.measure()).await
    }

    fn containers(&self) -> Vec<KnownContainer> {
        let containers: Vec<_> =
            self.lock().iter().map(|(id, container)| (id.clone(), Arc::clone(container))).collect();
        let known = |(id, container): (ContainerId, Arc<Container>)| {
            let state = container.state.borrow().clone()?;
            let ContainerSpec { namespace, pod_name, .. } = read_spec(&container.directory).ok()?;
            Some(KnownContainer { id, namespace, pod_name, state })
        };
        containers.into_iter().filter_map(known).collect()
    }

    async fn start(&self, spec: ContainerSpec) -> Result<ContainerId> {
        let id = ContainerId::of(&spec);
        check(&id, &spec)?;
        loop {
            let (container, is_new) = self.entry(&id);
            if is_new {
                let (runtime, name) = (self.clone(), id.clone());
                // In a task of its own, so that it goes on when the caller is dropped.
                let launch = async move {
                    let (inner, new) = (Arc::clone(&runtime.0), Arc::clone(&container));
                    let launched = blocking(move || {
                        // It may run although its start was reported as failed: for want of a descriptor to watch it
                        // with, say.
                        if new.take_up(true)? {
                            return Ok(None);
                        }
                        let made = fs::DirBuilder::new().mode(0o700).create(&new.directory);
                        made.map_err(|error| {
                            berth_host::Error::new("make the container's directory", error)
                        })?;
                        let launch = || {
                            let namespace = spec.user_namespace.map(UserNamespace::new).transpose()?;
                            let group = new.prepare_group(&spec)?;
                            inner.launcher.launch(&new.directory, &spec, group.as_ref(), namespace.as_ref())
                        };
                        launch().map(Some).inspect_err(|_| {
                            new.remove_group();
                            let _ = remove_tree(&new.directory);
                        })
                    })
                    .await;
                    let started = match launched {
                        Ok(Some(started)) => wait_for_end(started).await.and_then(|()| container.begin()),
                        Ok(None) => Ok(()),
                        Err(error) => Err(error),
                    };
                    started.map_err(|error| {
                        runtime.lock().remove(&name);
                        Error::host(format!("start container {}", name.name), error)
                    })
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

    async fn exited(&self, id: &ContainerId) -> Exit {
        let state = self.get(id).map(|container| container.state.subscribe());
        Exit::awaited(id, state).await
    }

    async fn stop(&self, id: &ContainerId, grace: Duration) -> Exit {
        let Some(container) = self.get(id) else {
            return Exit::unknown(format!("there is no container {id}"));
        };
        let exited = || self.exited(id);
        // What is being started is stopped as soon as it has been.
        let _ = container.state.subscribe().wait_for(Option::is_some).await;
        // A signal that cannot be sent has the same consequence as one that is ignored.
        if !grace.is_zero()
            && container.send(|shim| shim.signal(libc::SIGTERM))
            && let Ok(exit) = tokio::time::timeout(grace, exited()).await
        {
            return exit;
        }
        if container.send(Shim::kill_all)
            && let Ok(exit) = tokio::time::timeout(KILL_PATIENCE, exited()).await
        {
            return exit;
        }
        container.killed.store(true, Ordering::Relaxed);
        container.send(Shim::kill);
        exited().await
    }

    async fn remove(&self, id: &ContainerId) -> Result<()> {
        let Some(container) = self.get(id) else { return Ok(()) };
        if !matches!(*container.state.borrow(), Some(State::Exited(_))) {
            return Err(Error::StillRunning(id.clone()));
        }
        let directory = container.directory.clone();
        blocking(move || remove_tree(&directory))
            .await
            .map_err(|error| Error::host(format!("remove container {id}"), error))?;
        self.lock().remove(id);
        Ok(())
    }

    async fn attach(&self, id: &ContainerId, call: AttachCall) -> Result<Attached> {
        let container = self.get(id).ok_or_else(|| Error::NotFound(id.clone()))?;
        if container.running().is_none() {
            return Err(Error::NotRunning(id.clone()));
        }
        let connect = move || {
            let spec = read_spec(&container.directory)?;
            let connected = Client::connect(&container.directory, call);
            connected
                .map(|client| (client, spec.tty))
                .map_err(|errno| berth_host::Error::new("connect to it", errno))
        };
        let failed = |error| Error::host(format!("attach to container {id}"), error);
        let (client, tty) = blocking(connect).await.map_err(failed)?;
        Attached::open(client, tty)
    }

    async fn exec(&self, id: &ContainerId, call: ExecCall) -> Result<Exec> {
        let container = self.get(id).ok_or_else(|| Error::NotFound(id.clone()))?;
        if container.running().is_none() {
            return Err(Error::NotRunning(id.clone()));
        }
        let (runtime, tty) = (self.clone(), call.tty);
        let join = move || {
            let shim = container.shim.get().expect("a running container has a shim");
            let spec = read_spec(&container.directory)?;
            let group = container.group.as_ref().map(|(groups, id)| groups.membership(id)).transpose()?;
            runtime.0.launcher.exec(shim, &spec, group.as_ref(), &call)
        };
        let failed = |error| Error::host(format!("exec in container {id}"), error);
        Exec::open(blocking(join).await.map_err(failed)?, tty).await
    }
}

impl Container {
    fn new(directory: PathBuf, group: Option<(Arc<Cgroups>, ContainerId)>) -> Self {
        Self {
            directory,
            group,
            state: watch::Sender::new(None),
            shim: OnceLock::new(),
            killed: AtomicBool::new(false),
        }
    }

    /// Takes up what an earlier start has left: whether that is a container, be it an ended one. What never was one, or
    /// is not `ours`, is removed.
    fn take_up(self: &Arc<Self>, ours: bool) -> std::result::Result<bool, berth_host::Error> {
        let found = status::find(&self.directory)?;
        let known = ours && read_spec(&self.directory).is_ok();
        match found {
            Found::Ended if known => self.end(),
            Found::Running(shim) if known => {
                let status = status::read_status(&self.directory)?;
                if !shim.is_reachable() {
                    // Its volumes are mounted where we cannot see them, and nobody can be started in it.
                    self.killed.store(true, Ordering::Relaxed);
                    shim.kill()?;
                }
                self.run(shim, status.started.unwrap_or_else(Timestamp::now))?;
            }
            // Not ours, or lost to a power cut, which nothing survives that the directory could be needed for.
            Found::Running(shim) => {
                shim.kill()?;
                return remove_tree(&self.directory).map(|_| false);
            }
            Found::Ended | Found::NeverStarted => return remove_tree(&self.directory).map(|_| false),
        }
        Ok(true)
    }

    /// Takes up a container that was just launched.
    fn begin(self: &Arc<Self>) -> std::result::Result<(), berth_host::Error> {
        let status = status::read_status(&self.directory)?;
        if status.pid.is_none() && status.exit.is_some() {
            self.end();
            return Ok(());
        }
        self.run(Shim::launched(&self.directory)?, status.started.unwrap_or_else(Timestamp::now))?;
        Ok(())
    }

    /// Watches a container that runs until it has ended.
    fn run(self: &Arc<Self>, shim: Shim, started: Timestamp) -> std::result::Result<(), berth_host::Error> {
        let shim = Arc::clone(self.shim.get_or_init(|| Arc::new(shim)));
        let ended = pollable(shim).map_err(|error| berth_host::Error::new("watch a container", error))?;
        // One that failed to start is never seen running.
        if status::read_status(&self.directory)?.exit.is_none() {
            self.state.send_replace(Some(State::Running { started }));
        }
        let container = Arc::clone(self);
        tokio::spawn(async move {
            // An error would mean that the reactor is gone, and with it everybody who waits.
            let _ = ended.readable().await;
            ended.get_ref().reap();
            blocking(move || container.end()).await;
        });
        Ok(())
    }

    fn prepare_group(
        &self,
        spec: &ContainerSpec,
    ) -> std::result::Result<Option<Prepared>, berth_host::Error> {
        let prepared =
            self.group.as_ref().map(|(groups, id)| groups.prepare(id, &spec.pod_limits, &spec.limits));
        prepared.transpose()
    }

    fn remove_group(&self) {
        if let Some((groups, id)) = &self.group {
            groups.remove(id);
        }
    }

    fn end(&self) {
        self.remove_group();
        let exit = Exit::read(&self.directory, self.killed.load(Ordering::Relaxed));
        self.state.send_replace(Some(State::Exited(exit)));
    }

    fn running(&self) -> Option<&Shim> {
        match *self.state.borrow() {
            Some(State::Running { .. }) => self.shim.get().map(Arc::as_ref),
            _ => None,
        }
    }

    /// Whether a signal was sent to the shim.
    fn send(&self, signal: impl FnOnce(&Shim) -> std::result::Result<(), berth_host::Error>) -> bool {
        self.running().is_some_and(|shim| signal(shim).is_ok())
    }
}

impl ContainerId {
    pub(crate) fn of(spec: &ContainerSpec) -> Self {
        Self { pod_uid: spec.pod_uid.clone(), name: spec.name.clone(), attempt: spec.attempt }
    }

    /// The name of its directory; names of containers have no underscore.
    pub(crate) fn directory(&self) -> String {
        format!("{}_{}_{}", self.pod_uid, self.name, self.attempt)
    }

    pub(crate) fn from_directory(name: &str) -> Option<Self> {
        let (rest, attempt) = name.rsplit_once('_')?;
        let (pod_uid, name) = rest.rsplit_once('_')?;
        Some(Self { pod_uid: pod_uid.to_owned(), name: name.to_owned(), attempt: attempt.parse().ok()? })
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.pod_uid, self.name, self.attempt)
    }
}

impl Error {
    pub(crate) fn host(doing: impl Into<String>, source: berth_host::Error) -> Self {
        Self::Host { doing: doing.into(), source }
    }

    /// One sentence with the cause, for an event or a log line.
    pub fn sentence(&self) -> String {
        match self {
            Self::Host { doing, source } => format!("{doing}: {}", source.sentence()),
            other => other.to_string(),
        }
    }
}

fn check(id: &ContainerId, spec: &ContainerSpec) -> Result<()> {
    let invalid = |problem: String| Err(Error::Invalid { container: spec.name.clone(), problem });
    if spec.command.first().is_none_or(String::is_empty) {
        return Err(Error::NoCommand(spec.name.clone()));
    }
    let is_name = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
    if !is_name(&id.pod_uid) || !is_name(&id.name) || id.name.contains('_') {
        return invalid(format!("{:?} and {:?} cannot name a pod and its container", id.pod_uid, id.name));
    }
    let paths = spec.mounts.iter().flat_map(|mount| [&mount.source, &mount.target]);
    let paths = paths.chain(spec.devices.iter().flat_map(|device| [&device.source, &device.target]));
    let paths = paths.chain(&spec.working_dir).chain(&spec.termination_message_path).chain([&spec.log]);
    for path in paths {
        if !path.is_absolute() {
            return invalid(format!("the path {} must begin with a slash", path.display()));
        }
    }
    Ok(())
}

fn read_spec(directory: &Path) -> std::result::Result<ContainerSpec, berth_host::Error> {
    let read = || -> io::Result<_> { Ok(serde_json::from_slice(&fs::read(directory.join(SPEC_FILE))?)?) };
    read().map_err(|error| berth_host::Error::new("read the container's specification", error))
}

async fn wait_for_end(pipe: std::os::fd::OwnedFd) -> std::result::Result<(), berth_host::Error> {
    let failed = |error| berth_host::Error::new("wait for the command", error);
    let mut pipe = pipe::Receiver::from_owned_fd(pipe).map_err(failed)?;
    pipe.read_to_end(&mut Vec::new()).await.map_err(failed)?;
    Ok(())
}

/// Has tokio watch a descriptor.
pub(crate) fn pollable<T: AsRawFd>(owner: T) -> io::Result<AsyncFd<T>> {
    #[expect(deprecated, reason = "its successor is unsafe; all our types own the descriptor that they name")]
    AsyncFd::new(owner)
}
