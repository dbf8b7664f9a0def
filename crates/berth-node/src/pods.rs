//! Pods: brings each pod's containers and volumes to what they should be, and reports their status to Kubernetes.
//!
//! Each pod has one worker at a time. It observes the pod, its volumes and its containers, decides (a pure function),
//! starts and stops what the decision says, and leaves the status to a second worker, so that a slow write delays
//! neither containers nor volumes. A pod is driven by events alone: it changed, its volumes did, a container ended, a
//! pause is over. Containers do not depend on this process: after a restart they are found again and not restarted.
//!
//! Reads: Pod of this node, Secrets with credentials for images. Writes: its status; deletes it when nothing of it is left. Events: those of `warnings` and `images`, `Unhealthy`, `FailedPostStartHook`, `FailedPreStopHook`, `LifecycleHTTPFallback`, `Created`, `Started`, `Killing`, `BackOff`, `Failed`,
//! `DeadlineExceeded`, `Evicted`, those of `user_namespaces`.

mod actions;
mod decide;
mod eviction;
mod fields;
mod finish;
mod https;
mod images;
mod launch;
mod network;
mod probes;
mod resources;
mod status;
#[cfg(test)]
mod tests;
mod user_namespaces;
mod warnings;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_kube::storage::is_over;
use berth_kube::timeline::Step;
use berth_kube::{Backoff, Cache, Cluster, Failure, Key, Next, Queue, Recorder, Severity, reference};
use berth_runtime::{
    ContainerId, ContainerSpec, IdRange, KnownContainer, Reason, Runtime, State, blocking, log_files,
};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, PodSpec, PodStatus, Secret, Service};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};

use self::decide::{ContainerRecord, Decision, Problem, RESTART, deadline, decide};
use self::finish::grace;
pub use self::launch::StandIn;
use self::launch::{container_spec, find_sub_paths};
pub use self::network::{PodAddresses, PodNetwork};
use self::probes::{Failed, Probes, has_probes, initial_health, known_health};
pub(crate) use self::resources::Supply;
use self::status::whole_seconds;
use crate::layout::Layout;
use crate::plugin::Ready;
use crate::volumes::{Volumes, names};

/// Why a container is waiting that lacks something its specification names.
const CONFIG_ERROR: &str = "CreateContainerConfigError";

/// What runs the pods of a node.
pub(crate) struct Options {
    /// Where the pods are.
    pub cluster: Cluster,
    /// The name of the Node object that the pods are bound to.
    pub node: String,
    /// The node's address, which is also that of pods that have none of their own.
    pub address: IpAddr,
    /// What pods have of a network besides the machine's.
    pub network: PodNetwork,
    /// Where things lie on disk.
    pub layout: Layout,
    /// The runtime that containers are started, stopped and found again with.
    pub runtime: Arc<dyn Runtime>,
    /// The volume manager, which gets the volumes that each pod wants.
    pub volumes: Arc<Volumes>,
    /// What there is to be shared by the pods.
    pub supply: Supply,
    /// Records events on pods.
    pub recorder: Recorder,
    /// Variables that every container gets unless it sets them itself.
    pub environment: Vec<(String, String)>,
    /// Directories of the machine that containers do not see.
    pub hidden: Vec<PathBuf>,
    /// Programs that run in the place of images.
    pub stand_ins: Vec<StandIn>,
    /// The program that has them all.
    pub program: PathBuf,
    /// Pods to reconcile, by uid; whoever changes something that concerns a pod adds it here.
    pub queue: Queue<String>,
}

/// The pods of a node.
pub(crate) struct Pods {
    options: Options,
    cache: Cache<Pod>,
    services: Cache<Service>,
    entries: Mutex<HashMap<String, Arc<Entry>>>,
    statuses: Queue<String>,
    /// For probes and hooks.
    https: https::Connector,
}

/// One pod, until nothing of it is left.
struct Entry {
    uid: String,
    observed: Mutex<ObservedPod>,
    /// For the worker of the pod.
    work: tokio::sync::Mutex<Work>,
    /// For the worker that writes its status.
    pending_report: Mutex<PendingReport>,
}

#[derive(Default)]
struct ObservedPod {
    pod: Option<Arc<Pod>>,
    gone: bool,
    /// A container lacks something for its environment.
    misses: bool,
    /// What it lacks may have come.
    came: bool,
    /// When the node found that the pod cannot stay, and why.
    ended: Option<(Timestamp, End)>,
}

#[derive(Default)]
struct PendingReport {
    /// What Kubernetes is to know.
    status: Option<PodStatus>,
    /// Nothing of the pod is left here: Kubernetes can forget it.
    finished: bool,
}

#[derive(Default)]
struct Work {
    /// Every container of the pod that was ever started, by its name.
    containers: HashMap<String, ContainerRecord>,
    /// Every run that the runtime still knows.
    runs: HashSet<ContainerId>,
    /// Runs that are being stopped, with the grace they were given.
    stopping: HashMap<ContainerId, Duration>,
    /// Runs whose end is waited for.
    watched: HashSet<ContainerId>,
    /// The probes of the runs that go on.
    probes: HashMap<ContainerId, Probes>,
    /// Where the logs lie.
    logs: Option<PathBuf>,
    /// The pod has ended, whether or not Kubernetes knows.
    is_over: bool,
    /// What held its containers together was stopped after that.
    is_stopped: bool,
    /// Why the node ends, or has ended, the pod.
    end: Option<End>,
    /// When this process first observed the pod.
    first_observed: Option<Timestamp>,
}

/// Why the node ended a pod that would have gone on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct End {
    reason: &'static str,
    message: String,
}

/// What became of an attempt to start a container.
type Started = Result<(ContainerId, State), (&'static str, String)>;

/// A queue for [`Options::queue`].
pub(crate) fn queue() -> Queue<String> {
    Queue::new("pods", Backoff::default())
}

impl Pods {
    /// Takes up the pods that are there: those of the cluster, and what is left here of others. Returns when all of them
    /// have passed what they want to the volume manager.
    pub(crate) async fn start(options: Options) -> Arc<Self> {
        let fields = format!("spec.nodeName={}", options.node);
        let cache = options.cluster.cache_where::<Pod>(&fields);
        let services = options.cluster.cache::<Service>();
        tokio::join!(cache.synced(), services.synced());
        let pods = Arc::new(Self {
            options,
            cache,
            services,
            entries: Mutex::default(),
            statuses: Queue::new("pod statuses", Backoff::default()),
            https: https::Connector::new(),
        });
        for pod in pods.cache.list() {
            if !is_over(&pod) {
                pods.options.volumes.want(&pod);
            }
        }
        pods.adopt().await;
        let weak = Arc::downgrade(&pods);
        pods.cache.subscribe(move |before, after| {
            if let Some(pods) = weak.upgrade() {
                pods.observe(before, after);
            }
        });
        pods.follow_objects();
        pods
    }

    /// Works until the cluster's shutdown.
    pub(crate) async fn run(self: Arc<Self>) {
        let shutdown = self.options.cluster.shutdown().clone();
        let (syncing, reporting) = (self.clone(), self.clone());
        let sync = self.options.queue.run(usize::MAX, shutdown.clone(), move |uid: String| {
            let pods = syncing.clone();
            async move { pods.sync(&uid).await }
        });
        let report = self.statuses.run(usize::MAX, shutdown, move |uid: String| {
            let pods = reporting.clone();
            async move { pods.report(&uid).await }
        });
        tokio::join!(sync, report, self.clone().watch_storage());
    }

    /// The number of the latest run of a container, and whether it was ever started.
    pub(crate) async fn latest(&self, uid: &str, container: &str) -> Option<u32> {
        let entry = self.entry(uid)?;
        let work = entry.work.lock().await;
        work.containers.get(container).filter(|known| known.run.is_some()).map(|known| known.attempt)
    }

    /// The address at which a pod is reached.
    pub(crate) fn address(&self, uid: &str) -> IpAddr {
        self.options.network.address(uid, self.options.address)
    }

    fn observe(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) {
        let Some(pod) = after.or(before) else { return };
        let uid = pod.uid().unwrap_or_default();
        let entry = self.entries().entry(uid.clone()).or_insert_with(|| Arc::new(Entry::new(&uid))).clone();
        {
            let mut observed = entry.observed();
            observed.pod = Some(pod.clone());
            observed.gone = after.is_none();
        }
        self.options.queue.add(uid);
    }

    /// Takes up containers and directories, also of pods that are gone.
    async fn adopt(&self) {
        for KnownContainer { id, namespace, pod_name, state } in self.options.runtime.containers() {
            let uid = id.pod_uid.clone();
            let entry =
                self.entries().entry(uid.clone()).or_insert_with(|| Arc::new(Entry::new(&uid))).clone();
            // Whatever Kubernetes says of the pod, its volumes are not taken from under what runs.
            if matches!(state, State::Running { .. }) {
                self.options.volumes.hold(&uid);
            }
            let mut work = entry.work.lock().await;
            work.logs = Some(self.options.layout.logs(&namespace, &pod_name, &uid));
            work.adopt(id, state);
        }
        let layout = &self.options.layout;
        let logs = layout.root().join("logs");
        let left = names(&layout.pods()).into_iter().map(|uid| (uid, None));
        let logged = names(&logs).into_iter().filter_map(|name| {
            let uid = name.rsplit_once('_')?.1.to_owned();
            Some((uid, Some(logs.join(name))))
        });
        for (uid, logs) in left.chain(logged) {
            let entry =
                self.entries().entry(uid.clone()).or_insert_with(|| Arc::new(Entry::new(&uid))).clone();
            if let Some(logs) = logs {
                entry.work.lock().await.logs = Some(logs);
            }
        }
        for uid in self.options.runtime.pods() {
            self.entries().entry(uid.clone()).or_insert_with(|| Arc::new(Entry::new(&uid)));
        }
        let uids: Vec<String> = self.entries().keys().cloned().collect();
        for uid in uids {
            self.options.queue.add(uid);
        }
    }

    /// Containers that lack something for their environment are tried again when it may have come.
    fn follow_objects(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let changed = Arc::new(move |namespace: Option<&str>| {
            let Some(pods) = weak.upgrade() else { return };
            let namespace = namespace.unwrap_or_default();
            let waiting: Vec<String> = {
                let entries = pods.entries();
                let waiting = entries.iter().filter(|(_, entry)| entry.something_came(namespace));
                waiting.map(|(uid, _)| uid.clone()).collect()
            };
            for uid in waiting {
                pods.options.queue.add(uid);
            }
        });
        let map_changed = changed.clone();
        let cluster = &self.options.cluster;
        cluster.cache::<ConfigMap>().on_change(move |map| map_changed(map.metadata.namespace.as_deref()));
        cluster.cache::<Secret>().on_change(move |secret| changed(secret.metadata.namespace.as_deref()));
    }

    async fn sync(self: Arc<Self>, uid: &str) -> Result<Next, Error> {
        let Some(entry) = self.entry(uid) else { return Ok(Next::Done) };
        let mut work = entry.work.lock().await;
        let Work { runs, containers, .. } = &mut *work;
        for id in &*runs {
            let latest = containers.get_mut(&id.name).filter(|known| known.attempt == id.attempt);
            if let Some(known) = latest.filter(|known| known.is_running())
                && let Some(state) = self.options.runtime.state(id)
            {
                known.run = Some(state);
            }
        }
        self.watch(&mut work);
        match entry.latest() {
            Some(pod) if pod.metadata.deletion_timestamp.is_some() => {
                Ok(self.finish(&entry, &mut work, &pod))
            }
            Some(pod) if work.is_over || is_over(&pod) => Ok(self.rest(&entry, &mut work, &pod)),
            Some(pod) => Ok(self.run_pod(&entry, &mut work, &pod).await),
            None => self.clear(&entry, &mut work).await,
        }
    }

    fn entry(&self, uid: &str) -> Option<Arc<Entry>> {
        self.entries().get(uid).cloned()
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<String, Arc<Entry>>> {
        self.entries.lock()
    }
}

impl Pods {
    async fn run_pod(self: &Arc<Self>, entry: &Arc<Entry>, work: &mut Work, pod: &Arc<Pod>) -> Next {
        let Some(spec) = &pod.spec else { return Next::Done };
        self.options.volumes.want(pod);
        let volumes = self.options.volumes.ready(&entry.uid);
        let name = whole_name(pod);
        if entry.take_came() {
            let problems = work.containers.values_mut().filter_map(|known| known.problem.as_mut());
            for problem in problems.filter(|problem| problem.reason == CONFIG_ERROR) {
                problem.again = Timestamp::now();
            }
        }
        let all = spec.init_containers.iter().flatten().chain(&spec.containers);
        for container in all {
            if let Some(known) = work.containers.get_mut(&container.name) {
                self.note_pull_later(pod, container, known);
            }
        }
        if let Some(message) = self.options.volumes.refused(&entry.uid) {
            entry.end(End { reason: status::ATTACH_LIMIT, message });
        }
        let ended = entry.observed().ended.clone();
        let deadline = deadline(spec, work.first_observed(pod));
        let deadline = ended.iter().map(|(since, _)| *since).chain(deadline).min();
        let decision = loop {
            self.follow_probes(entry, work, pod, spec);
            let (ready, now) = (volumes.is_some(), Timestamp::now());
            let decision = decide(spec, &work.containers, ready, deadline, now, &name);
            let Some(volumes) = volumes.as_ref().filter(|_| !decision.start.is_empty()) else {
                break decision;
            };
            self.start_all(entry, work, pod, spec, &decision, volumes).await;
        };
        if decision.is_expired && work.end.is_none() {
            work.end = Some(self.note_end(pod, ended.map(|(_, end)| end)));
        }
        let is_evicted = work.end.as_ref().is_some_and(|end| end.reason == status::EVICTED);
        let grace = if is_evicted { eviction::GRACE } else { grace(pod) };
        for name in &decision.stop {
            self.stop(entry, work, pod, name, grace, &format!("Stopping container {name}"));
        }
        for (name, waiting) in
            decision.waiting.iter().filter(|(_, waiting)| waiting.reason == "CrashLoopBackOff")
        {
            let message = format!("Back-off restarting failed container {name} in pod {}", whole_name(pod));
            tracing::debug!(pod = %entry.uid, container = %name, "{}", waiting.message);
            self.emit(pod, name, Severity::Warning, "BackOff", message);
        }
        if decision.phase.is_final() {
            work.is_over = true;
            self.options.volumes.unwant(&entry.uid);
        }
        let misses = work.containers.values().filter_map(|known| known.problem.as_ref());
        let came = entry.set_misses(misses.into_iter().any(|problem| problem.reason == CONFIG_ERROR));
        self.report_later(entry, work, pod, &decision, volumes.is_some());
        if came {
            return Next::After(Duration::ZERO);
        }
        match decision.wake {
            Some(wake) => {
                Next::After(Duration::try_from(wake.duration_since(Timestamp::now())).unwrap_or_default())
            }
            None => Next::Done,
        }
    }

    /// Records on a pod why the node ends it: for a reason of its own, or because the pod's time is over.
    fn note_end(&self, pod: &Pod, ended: Option<End>) -> End {
        let recorder = &self.options.recorder;
        if let Some(end) = ended {
            recorder.warning(pod, end.reason, &end.message);
            return end;
        }
        recorder.normal(pod, status::EXPIRED, status::EXPIRED_MESSAGE);
        End { reason: status::EXPIRED, message: status::EXPIRED_MESSAGE.to_owned() }
    }

    /// Takes in what the probes of running containers found, and stops those that failed one.
    fn follow_probes(self: &Arc<Self>, entry: &Arc<Entry>, work: &mut Work, pod: &Arc<Pod>, spec: &PodSpec) {
        let all = spec.init_containers.iter().flatten().chain(&spec.containers);
        let all: Vec<&Container> = all.filter(|container| has_probes(container)).collect();
        let running = |work: &Work, name: &str| work.running(&entry.uid, name);
        let current: HashSet<ContainerId> =
            all.iter().filter_map(|container| running(work, &container.name)).collect();
        work.probes.retain(|id, _| current.contains(id));
        for container in all {
            let Some(id) = running(work, &container.name) else { continue };
            let Some(record) = work.containers.get_mut(&container.name) else { continue };
            let Some(State::Running { started }) = record.run else { continue };
            let probes = work.probes.entry(id.clone()).or_insert_with(|| {
                let health = known_health(pod, container, id.attempt);
                Probes::start(self, pod, container, &id, started, health)
            });
            let findings = probes.findings();
            record.health = findings.health;
            let name = &container.name;
            let (own, why) = match findings.failed {
                None => continue,
                Some(Failed::PostStart) => (None, "FailedPostStartHook".to_owned()),
                Some(Failed::Probe(kind)) => {
                    let probe = kind.of(container);
                    let own = probe.and_then(|probe| probe.termination_grace_period_seconds);
                    let kind = kind.as_str().to_lowercase();
                    (own, format!("Container {name} failed {kind} probe, will be restarted"))
                }
            };
            let own = own.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
            self.stop(entry, work, pod, name, own.unwrap_or_else(|| grace(pod)), &why);
        }
    }

    /// Leaves the pod's status to its worker.
    fn report_later(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Arc<Pod>,
        decision: &Decision,
        volumes_ready: bool,
    ) {
        let view = status::View {
            pod,
            first_observed: work.first_observed(pod),
            logs: work.logs.as_deref(),
            known: &work.containers,
            decision,
            volumes_ready,
            node_address: self.options.address,
            address: self.options.network.given_address(pod, self.options.address),
            end: work.end.as_ref(),
            runtime: &*self.options.runtime,
        };
        entry.pending_report().status = Some(status::build(&view));
        self.statuses.add(entry.uid.clone());
    }

    async fn start_all(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        work: &mut Work,
        pod: &Arc<Pod>,
        spec: &PodSpec,
        decision: &Decision,
        volumes: &HashMap<String, Ready>,
    ) {
        let prepared = self.options.network.prepare(&self.options.layout, pod, self.options.address);
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let (namespace, name) = (part(&pod.metadata.namespace), part(&pod.metadata.name));
        work.logs = Some(self.options.layout.logs(&namespace, &name, &entry.uid));
        let has_images = self.options.runtime.images().is_some();
        let ephemeral: Vec<Container> = spec
            .ephemeral_containers
            .iter()
            .flatten()
            .filter_map(|one| launch::of_ephemeral(one, has_images))
            .collect();
        let all = spec.init_containers.iter().flatten().chain(&spec.containers).chain(&ephemeral);
        let due = all.filter(|container| decision.start.contains(&container.name));
        let _steady = self.options.volumes.steady(&entry.uid).await;
        let starts = due.map(|container| {
            let known = work.containers.get(&container.name);
            let attempt = known.filter(|known| known.run.is_some()).map_or(0, |known| known.attempt + 1);
            let prepared = prepared.clone().map_err(|problem| (CONFIG_ERROR, problem));
            async move {
                let started = match prepared {
                    Ok(()) => self.start_container(pod, container, attempt, volumes).await,
                    Err(problem) => Err(problem),
                };
                (container, started)
            }
        });
        let begun = Instant::now();
        for (container, started) in join_all(starts).await {
            let step = Step {
                component: "node",
                call: &format!("container {} started", container.name),
                pod: &Key::of(pod.as_ref()).to_string(),
                node: &self.options.node,
                ..Step::default()
            };
            step.ended(begun, started.as_ref().err().map(|(_, why)| why.as_str()));
            self.note_start(work, pod, container, started);
        }
        self.watch(work);
    }

    async fn start_container(
        &self,
        pod: &Arc<Pod>,
        container: &Container,
        attempt: u32,
        volumes: &HashMap<String, Ready>,
    ) -> Started {
        let image = match self.options.runtime.images() {
            Some(images) => Some(self.ensure_image(images, pod, container).await?),
            None => None,
        };
        let mut spec = container_spec(self, pod, container, attempt, volumes, image)
            .await
            .map_err(|problem| (CONFIG_ERROR, problem))?;
        if spec.mounts.iter().any(|mount| mount.sub_path.is_some()) {
            let (named, asked) = (container.clone(), spec.clone());
            let found = blocking(move || find_sub_paths(&named, &asked)).await;
            found.map_err(|problem| (CONFIG_ERROR, problem))?;
        }
        if user_namespaces::is_wanted(pod) {
            if spec.image.is_some() {
                let why = "hostUsers: false is not supported with --runtime cri, as a user namespace of its own cannot have \
                           the machine's network, which pods have";
                return Err((CONFIG_ERROR, format!("container {}: {why}", container.name)));
            }
            spec.user_namespace = Some(self.user_namespace(pod, container, spec.clone()).await?);
        }
        if attempt == 0 {
            self.warn_of_differences(pod, container);
        }
        if let Some(directory) = spec.log.parent() {
            let made = std::fs::create_dir_all(directory);
            made.map_err(|error| ("CreateContainerError", format!("make {}: {error}", directory.display())))?;
        }
        let runtime = &self.options.runtime;
        let id = runtime.start(spec).await.map_err(|error| ("CreateContainerError", error.sentence()))?;
        // One that was too quick to be seen running has all but ended.
        let state = match runtime.state(&id) {
            Some(state) => state,
            None => State::Exited(runtime.exited(&id).await),
        };
        Ok((id, state))
    }

    /// The ids of the machine that a container of a pod with `hostUsers: false` has. Why there are none, an event says.
    async fn user_namespace(
        &self,
        pod: &Arc<Pod>,
        container: &Container,
        spec: ContainerSpec,
    ) -> Result<IdRange, (&'static str, String)> {
        let (layout, named, container) = (self.options.layout.clone(), pod.clone(), container.clone());
        let prepared = blocking(move || user_namespaces::prepare(&layout, &named, &container, &spec)).await;
        prepared.map_err(|(reason, message)| {
            self.options.recorder.record(reference(pod.as_ref()), Severity::Warning, reason, &message);
            ("CreateContainerError", message)
        })
    }

    fn note_start(
        self: &Arc<Self>,
        work: &mut Work,
        pod: &Arc<Pod>,
        container: &Container,
        started: Started,
    ) {
        let known = work.containers.entry(container.name.clone()).or_default();
        match started {
            Ok((id, state)) => {
                let before = known.run.take();
                if let Some(State::Exited(ended)) = before {
                    let long = ended.started.is_some_and(|started| {
                        ended.finished.duration_since(started) >= jiff::SignedDuration::from_mins(10)
                    });
                    known.crashes = if long { 1 } else { known.crashes.saturating_add(1) };
                    known.last = Some(ended);
                }
                known.attempt = id.attempt;
                known.problem = None;
                known.run = Some(state);
                known.health = initial_health(container);
                match &known.run {
                    Some(State::Exited(ended)) if ended.reason == Reason::StartError => {
                        let message = format!("Error: {}", ended.message);
                        self.emit(pod, &container.name, Severity::Warning, "Failed", message);
                    }
                    _ => {
                        self.emit(pod, &container.name, Severity::Normal, "Created", "Container created");
                        self.emit(pod, &container.name, Severity::Normal, "Started", "Container started");
                    }
                }
                self.forget_before_last(work, &id);
                work.runs.insert(id);
            }
            Err((reason, message)) => {
                let tries = known.problem.as_ref().map_or(1, |problem| problem.tries + 1);
                let again = Timestamp::now() + RESTART.exact_pause(tries);
                let why = if images::is_about_image(reason) { reason } else { &message };
                self.emit(pod, &container.name, Severity::Warning, "Failed", format!("Error: {why}"));
                known.problem = Some(Problem { reason, message, tries, again });
            }
        }
    }

    /// Only the run before the latest is kept: for its exit code and its log.
    fn forget_before_last(self: &Arc<Self>, work: &mut Work, latest: &ContainerId) {
        let old = |id: &ContainerId| id.name == latest.name && id.attempt + 1 < latest.attempt;
        let old: Vec<ContainerId> = work.runs.extract_if(|id| old(id)).collect();
        for id in old {
            let logs = work.logs.clone();
            let runtime = self.options.runtime.clone();
            tokio::spawn(async move {
                if let Err(error) = runtime.remove(&id).await {
                    tracing::warn!(container = %id, error = error.sentence(), "an old run is left");
                }
                let Some(logs) = logs else { return };
                for path in log_files(&logs.join(&id.name).join(format!("{}.log", id.attempt))) {
                    // What cannot be removed now is removed with the pod.
                    let _ = std::fs::remove_file(path);
                }
            });
        }
    }

    /// Waits for the end of every run that goes on.
    fn watch(&self, work: &mut Work) {
        work.watched.retain(|id| work.runs.contains(id));
        for id in &work.runs {
            let known = work.containers.get(&id.name);
            let runs = known.is_some_and(|known| known.attempt == id.attempt && known.is_running());
            if runs && work.watched.insert(id.clone()) {
                let (runtime, queue, id) =
                    (self.options.runtime.clone(), self.options.queue.clone(), id.clone());
                let shutdown = self.options.cluster.shutdown().clone();
                tokio::spawn(async move {
                    let ended = shutdown.run_until_cancelled(runtime.exited(&id)).await;
                    if ended.is_some() {
                        queue.add(id.pod_uid);
                    }
                });
            }
        }
    }
}

impl Entry {
    fn new(uid: &str) -> Self {
        Self {
            uid: uid.to_owned(),
            observed: Mutex::default(),
            work: tokio::sync::Mutex::default(),
            pending_report: Mutex::default(),
        }
    }

    /// Notes that the pod cannot stay, unless it cannot for another reason already.
    fn end(&self, end: End) {
        self.observed().ended.get_or_insert((Timestamp::now(), end));
    }

    /// The pod as Kubernetes has it.
    fn latest(&self) -> Option<Arc<Pod>> {
        let observed = self.observed();
        observed.pod.clone().filter(|_| !observed.gone)
    }

    /// The pod as it was last seen, be it gone.
    fn last_observed(&self) -> Option<Arc<Pod>> {
        self.observed().pod.clone()
    }

    /// Notes whether a container lacks something; returns whether that may have come since then.
    fn set_misses(&self, misses: bool) -> bool {
        let mut observed = self.observed();
        observed.misses = misses;
        misses && observed.came
    }

    /// Something that containers may lack has come to a namespace; whether one of this pod does.
    fn something_came(&self, namespace: &str) -> bool {
        let mut observed = self.observed();
        let there = |pod: &Arc<Pod>| pod.metadata.namespace.as_deref() == Some(namespace);
        let here = observed.pod.as_ref().is_some_and(there);
        observed.came |= here;
        here && observed.misses
    }

    /// Whether something has come since this was last asked.
    fn take_came(&self) -> bool {
        std::mem::take(&mut self.observed().came)
    }

    fn pending_report(&self) -> MutexGuard<'_, PendingReport> {
        self.pending_report.lock()
    }

    fn observed(&self) -> MutexGuard<'_, ObservedPod> {
        self.observed.lock()
    }
}

impl Work {
    /// Takes up a run that was started in an earlier life of this process.
    fn adopt(&mut self, id: ContainerId, state: State) {
        let known = self.containers.entry(id.name.clone()).or_default();
        match &known.run {
            Some(_) if known.attempt > id.attempt => {
                if let (State::Exited(ended), true) = (state, known.attempt == id.attempt + 1) {
                    known.last = Some(ended);
                }
            }
            latest => {
                if let (Some(State::Exited(ended)), true) = (latest, known.attempt + 1 == id.attempt) {
                    known.last = Some(ended.clone());
                }
                known.run = Some(state);
                known.attempt = id.attempt;
                known.crashes = id.attempt;
            }
        }
        self.runs.insert(id);
    }

    /// The run of a container that goes on.
    fn running(&self, uid: &str, name: &str) -> Option<ContainerId> {
        let known = self.containers.get(name).filter(|known| known.is_running())?;
        Some(ContainerId { pod_uid: uid.to_owned(), name: name.to_owned(), attempt: known.attempt })
    }

    /// When the node first saw the pod.
    fn first_observed(&mut self, pod: &Pod) -> Timestamp {
        let here = *self.first_observed.get_or_insert_with(Timestamp::now);
        let recorded = pod.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        // The status has it from an earlier life of this process, or from this one without the part of a second.
        recorded.filter(|recorded| *recorded != whole_seconds(here)).unwrap_or(here)
    }

    fn any_running(&self) -> bool {
        self.containers.values().any(ContainerRecord::is_running)
    }
}

/// A pod as upstream names it in messages: `name_namespace(uid)`.
fn whole_name(pod: &Pod) -> String {
    let meta = &pod.metadata;
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}_{}({})", part(&meta.name), part(&meta.namespace), part(&meta.uid))
}

/// Why a pod could not be brought further.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Kubernetes(#[from] berth_kube::Error),
    #[error("remove what is left of the pod")]
    Remove(#[source] berth_host::Error),
    #[error("remove a container of the pod")]
    Container(#[source] berth_runtime::Error),
}

impl Failure for Error {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Kubernetes(error) if error.is_conflict())
    }

    fn describe(&self) -> String {
        match self {
            Self::Kubernetes(error) => error.chain(),
            Self::Remove(error) => format!("{self}: {}", error.sentence()),
            Self::Container(error) => format!("{self}: {}", error.sentence()),
        }
    }
}
