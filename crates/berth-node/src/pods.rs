//! Pods: what each pod's containers and volumes should be by now, done, and told to Kubernetes.
//!
//! Each pod has one worker at a time. It looks at the pod, its volumes and its containers, decides (a pure function),
//! starts and stops what the decision says, and leaves the status to a second worker, so that a slow write delays
//! neither containers nor volumes. A pod is driven by events alone: it changed, its volumes did, a container ended, a
//! pause is over. Containers do not depend on this process: after a restart they are found again and not restarted.
//!
//! Reads: Pod of this node. Writes: its status; deletes it when nothing of it is left. Events: `Pulled`, `Created`,
//! `Started`, `Killing`, `BackOff`, `Failed`, `DeadlineExceeded`.

mod decide;
mod entry;
mod finish;
mod launch;
mod qos;
mod report;
mod run;
mod status;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use berth_kube::{Backoff, Cache, Cluster, Failure, Next, Queue, Recorder};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};

use self::entry::{Entry, is_final};
use crate::layout::Layout;
use crate::volumes::{Volumes, names};
use berth_runtime::{Runtime, State};

/// What runs the pods of a node.
pub struct Options {
    /// Where the pods are.
    pub cluster: Cluster,
    /// The node's name.
    pub node: String,
    /// The node's address, which is also its pods'.
    pub address: IpAddr,
    /// Where things lie on disk.
    pub layout: Layout,
    /// Runs containers.
    pub runtime: Runtime,
    /// Brings volumes.
    pub volumes: Arc<Volumes>,
    /// Tells pods what happens.
    pub recorder: Recorder,
    /// Variables that every container gets unless it sets them itself.
    pub environment: Vec<(String, String)>,
    /// Directories of the machine that containers do not see.
    pub hidden: Vec<PathBuf>,
    /// Pods to look at, by uid; whoever has something to tell about a pod adds it here.
    pub queue: Queue<String>,
}

/// The pods of a node.
pub struct Pods {
    options: Options,
    cache: Cache<Pod>,
    entries: Mutex<HashMap<String, Arc<Entry>>>,
    statuses: Queue<String>,
}

/// A queue for [`Options::queue`].
pub fn queue() -> Queue<String> {
    Queue::new("pods", Backoff::default())
}

impl Pods {
    /// Takes up the pods that are there: those of the cluster, and what is left here of others. Returns when all of them
    /// have told the volume manager what they want.
    pub async fn start(options: Options) -> Arc<Self> {
        let fields = format!("spec.nodeName={}", options.node);
        let cache = options.cluster.cache_where::<Pod>(&fields);
        cache.synced().await;
        let pods = Arc::new(Self {
            options,
            cache,
            entries: Mutex::default(),
            statuses: Queue::new("pod statuses", Backoff::default()),
        });
        for pod in pods.cache.list() {
            if !is_final(&pod) {
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
    pub async fn run(self: Arc<Self>) {
        let shutdown = self.options.cluster.shutdown().clone();
        let (syncing, telling) = (self.clone(), self.clone());
        let sync = self.options.queue.run(usize::MAX, shutdown.clone(), move |uid: String| {
            let pods = syncing.clone();
            async move { pods.sync(&uid).await }
        });
        let tell = self.statuses.run(usize::MAX, shutdown, move |uid: String| {
            let pods = telling.clone();
            async move { pods.report(&uid).await }
        });
        tokio::join!(sync, tell);
    }

    /// The number of the latest run of a container, and whether it was ever started.
    pub(crate) async fn latest(&self, uid: &str, container: &str) -> Option<u32> {
        let entry = self.entry(uid)?;
        let work = entry.work.lock().await;
        work.containers.get(container).filter(|known| known.run.is_some()).map(|known| known.attempt)
    }

    fn observe(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) {
        let Some(pod) = after.or(before) else { return };
        let uid = pod.uid().unwrap_or_default();
        let entry = self.entries().entry(uid.clone()).or_insert_with(|| Arc::new(Entry::new(&uid))).clone();
        entry.observe(pod, after.is_none());
        self.options.queue.add(uid);
    }

    /// Takes up containers and directories, also of pods that are gone.
    async fn adopt(&self) {
        for (id, spec, state) in self.options.runtime.containers() {
            let uid = id.pod_uid.clone();
            let entry =
                self.entries().entry(uid.clone()).or_insert_with(|| Arc::new(Entry::new(&uid))).clone();
            // Whatever Kubernetes says of the pod, its volumes are not taken from under what runs.
            if matches!(state, State::Running { .. }) {
                self.options.volumes.hold(&uid);
            }
            let mut work = entry.work.lock().await;
            work.logs = Some(self.options.layout.logs(&spec.namespace, &spec.pod_name, &uid));
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
        let told = changed.clone();
        let cluster = &self.options.cluster;
        cluster.cache::<ConfigMap>().on_change(move |map| told(map.metadata.namespace.as_deref()));
        cluster.cache::<Secret>().on_change(move |secret| changed(secret.metadata.namespace.as_deref()));
    }

    async fn sync(self: Arc<Self>, uid: &str) -> Result<Next, Error> {
        let Some(entry) = self.entry(uid) else { return Ok(Next::Done) };
        let mut work = entry.work.lock().await;
        work.look(&self.options.runtime);
        self.watch(&mut work);
        match entry.latest() {
            Some(pod) if pod.metadata.deletion_timestamp.is_some() => {
                Ok(self.finish(&entry, &mut work, &pod))
            }
            Some(pod) if work.is_over || is_final(&pod) => Ok(self.rest(&entry, &mut work, &pod)),
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

/// Why a pod could not be brought further.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Kubernetes(#[from] berth_kube::Error),
    #[error("remove what is left of the pod")]
    Remove(#[source] std::io::Error),
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
            Self::Remove(error) => format!("{self}: {error}"),
            Self::Container(error) => format!("{self}: {}", error.sentence()),
        }
    }
}
