//! A cluster that is watched while somebody looks at it: one cache per kind that may be read, events, how full volumes are, and
//! whether the API server still answers.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};
use berth_kube::{Cache, Cluster, Key, Kind};
use futures_util::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::history::History;
use crate::state::{ClusterState, Objects, PATIENCE, Unreadable, Usage};

macro_rules! caches {
    ($($field:ident: $kind:ty,)*) => {
        /// The caches of the kinds that may be read.
        struct Caches {
            $($field: Option<Cache<$kind>>,)*
            unreadable: Vec<Unreadable>,
        }

        impl Caches {
            /// Starts to watch every kind but those that may not be read.
            fn of(cluster: &Cluster, unreadable: Vec<Unreadable>) -> Self {
                Self {
                    $($field: may_read::<$kind>(&unreadable).then(|| cluster.cache()),)*
                    unreadable,
                }
            }

            /// Calls `changed` for every change from now on; what is there already counts as one.
            fn on_change(&self, changed: &Arc<Notify>) {
                $(if let Some(cache) = &self.$field {
                    let changed = changed.clone();
                    cache.subscribe(move |_, _| changed.notify_one());
                })*
            }

            /// Each kind, whether its first list is complete, and how many objects have come.
            fn progress(&self) -> Vec<(String, bool, usize)> {
                vec![$((
                    <$kind as kube::Resource>::plural(&()).into_owned(),
                    // Who has no snapshots waits for them for ever.
                    self.$field.as_ref().is_none_or(|cache| is_optional::<$kind>() || cache.synced().now_or_never().is_some()),
                    self.$field.as_ref().map_or(0, Cache::len),
                ),)*]
            }

            /// What all caches hold now.
            fn state(&self) -> ClusterState {
                ClusterState {
                    $($field: objects(self.$field.as_ref()),)*
                    unreadable: self.unreadable.clone(),
                    now: Timestamp::now(),
                    patience: PATIENCE,
                    ..ClusterState::default()
                }
            }
        }
    };
}

caches! {
    classes: StorageClass,
    attributes_classes: VolumeAttributesClass,
    claims: PersistentVolumeClaim,
    volumes: PersistentVolume,
    pods: Pod,
    attachments: VolumeAttachment,
    nodes: Node,
    csi_nodes: CSINode,
    drivers: CSIDriver,
    capacities: CSIStorageCapacity,
    snapshots: VolumeSnapshot,
    contents: VolumeSnapshotContent,
    snapshot_classes: VolumeSnapshotClass,
}

/// Whether a kind is not among those that may not be read.
pub(crate) fn may_read<K: Kind>(unreadable: &[Unreadable]) -> bool {
    !unreadable.iter().any(|known| known.kind == K::kind(&()))
}

/// Kinds that a cluster may not have.
fn is_optional<K: Kind>() -> bool {
    K::group(&()) == "snapshot.storage.k8s.io" || K::kind(&()) == "VolumeAttributesClass"
}

fn objects<K: Kind>(cache: Option<&Cache<K>>) -> Objects<K> {
    cache.map_or_else(Objects::unknown, |cache| cache.list().into_iter().collect())
}

impl Caches {
    /// Whether every list is complete.
    fn are_synced(&self) -> bool {
        self.progress().iter().all(|(_, synced, _)| *synced)
    }
}

/// Events, which are watched only while somebody looks: there are many, and nobody else keeps them.
struct WatchedEvents {
    cache: Cache<Event>,
    until: CancellationToken,
}

impl WatchedEvents {
    fn begin(cluster: &Cluster, changed: &Arc<Notify>) -> Self {
        let until = cluster.shutdown().child_token();
        let cache = cluster.watch("", "", until.clone());
        let changed = changed.clone();
        cache.subscribe(move |_, _| changed.notify_one());
        Self { cache, until }
    }

    fn list(&self) -> Vec<Arc<Event>> {
        self.cache.list()
    }
}

impl Drop for WatchedEvents {
    fn drop(&mut self) {
        self.until.cancel();
    }
}

/// What is collected before it is looked at again, at least.
const COLLECT: Duration = Duration::from_millis(200);
/// How often nodes are asked how full volumes are: kubelets measure once a minute.
const MEASURE: Duration = Duration::from_secs(30);
/// How often is tried whether the API server still answers.
const PROBE: Duration = Duration::from_secs(10);
/// How often is told how far the first lists are.
const PROGRESS: Duration = Duration::from_millis(200);
/// How long the API server may take to say that it is there.
const ANSWER: Duration = Duration::from_secs(5);

/// How full volumes are and were.
#[derive(Default)]
struct Measured {
    usage: BTreeMap<Key, Usage>,
    unreadable: Option<Unreadable>,
    history: History,
}

/// A cluster that is watched from when somebody looks at it for the first time.
pub(crate) struct WatchedCluster {
    pub(crate) cluster: Cluster,
    /// What may not be read.
    unreadable: Vec<Unreadable>,
    caches: OnceLock<Caches>,
    events: Mutex<Option<WatchedEvents>>,
    measured: Mutex<Measured>,
    lost: Mutex<Option<(Timestamp, String)>>,
    /// Told of every change from the first look on.
    pub(crate) changed: Arc<Notify>,
}

impl WatchedCluster {
    /// Nothing is watched yet. Kinds that may not be read are left out and named; `probe` finds out which these are, and fails if
    /// the API server does not answer.
    pub(crate) async fn new(cluster: &Cluster, probe: bool) -> berth_kube::Result<Self> {
        let unreadable = if probe { ClusterState::read(cluster, None).await?.unreadable } else { Vec::new() };
        Ok(Self {
            cluster: cluster.clone(),
            unreadable,
            caches: OnceLock::new(),
            events: Mutex::default(),
            measured: Mutex::default(),
            lost: Mutex::default(),
            changed: Arc::default(),
        })
    }

    /// What may not be read.
    pub(crate) fn unreadable(&self) -> &[Unreadable] {
        &self.unreadable
    }

    fn caches(&self) -> &Caches {
        self.caches.get_or_init(|| {
            let caches = Caches::of(&self.cluster, self.unreadable.clone());
            caches.on_change(&self.changed);
            caches
        })
    }

    /// Watches everything, events too, until [`Self::pause`]; returns when the first lists are complete, and says meanwhile how
    /// far they are.
    pub(crate) async fn resume(&self, progress: impl Fn(Vec<(String, bool, usize)>)) {
        if may_read::<Event>(&self.unreadable) {
            *self.events.lock() = Some(WatchedEvents::begin(&self.cluster, &self.changed));
        }
        while !self.caches().are_synced() && !self.cluster.shutdown().is_cancelled() {
            progress(self.caches().progress());
            sleep(PROGRESS).await;
        }
    }

    /// Ends the watch of events; the other kinds stay in their caches.
    pub(crate) fn pause(&self) {
        self.events.lock().take();
    }

    /// Each kind, whether its first list is complete, and how many objects have come.
    pub(crate) fn progress(&self) -> Vec<(String, bool, usize)> {
        self.caches().progress()
    }

    /// The cluster as it is now, with usage as it was last measured.
    pub(crate) fn state(&self) -> ClusterState {
        let mut state = self.caches().state();
        if let Some(events) = &*self.events.lock() {
            state.events = events.list().into_iter().collect();
        }
        let measured = self.measured.lock();
        state.usage.clone_from(&measured.usage);
        state.unreadable.extend(measured.unreadable.clone());
        state
    }

    /// Calls `refresh` at once, when something has changed, and `every` so often for what only time can show; meanwhile measures how
    /// full volumes are, and whether the API server answers. A large cluster is looked at less often, so that this never takes
    /// more than a tenth of a core. Returns never.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        every: Duration,
        refresh: impl Fn() + Send + Sync + 'static,
    ) {
        let refresh = Arc::new(refresh);
        let (mut measured, mut probed) = (None::<Instant>, Instant::now());
        let (mut changed, mut looked) = (true, Instant::now());
        loop {
            if measured.is_none_or(|at| at.elapsed() >= MEASURE) {
                measured = Some(Instant::now());
                let watched = self.clone();
                tokio::spawn(async move { watched.measure().await });
            }
            if probed.elapsed() >= PROBE {
                probed = Instant::now();
                let watched = self.clone();
                tokio::spawn(async move { watched.probe().await });
            }
            if changed || looked.elapsed() >= every {
                looked = Instant::now();
                let refresh = refresh.clone();
                let _ = tokio::task::spawn_blocking(move || refresh()).await;
                sleep((looked.elapsed() * 9).clamp(COLLECT, Duration::from_secs(10))).await;
            }
            changed = timeout(every.min(PROBE), self.changed.notified()).await.is_ok();
        }
    }

    /// How full a volume was, and how many bytes more there are every hour.
    pub(crate) fn history(&self, claim: &Key) -> (serde_json::Value, Option<f64>) {
        let measured = self.measured.lock();
        (measured.history.of(claim), measured.history.rate(claim))
    }

    /// Asks the nodes that are ready how full volumes are.
    async fn measure(&self) {
        let mut state = self.caches().state();
        let known = state.unreadable.len();
        state.measure(&self.cluster).await;
        let mut measured = self.measured.lock();
        measured.history.keep(|key| state.claims.get(key).is_some());
        measured.history.take(Timestamp::now(), state.usage.iter());
        let unreadable = state.unreadable.into_iter().nth(known);
        if measured.usage != state.usage || measured.unreadable != unreadable {
            (measured.usage, measured.unreadable) = (state.usage, unreadable);
            self.changed.notify_one();
        }
    }

    /// Tries whether the API server still answers.
    async fn probe(&self) {
        let why = match timeout(ANSWER, self.cluster.client().apiserver_version()).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no answer within {ANSWER:?}")),
        };
        let mut lost = self.lost.lock();
        let had = lost.is_some();
        match why {
            None => *lost = None,
            Some(why) if !had => *lost = Some((Timestamp::now(), why)),
            Some(_) => {}
        }
        if had != lost.is_some() {
            self.changed.notify_one();
        }
    }

    /// Since when the API server does not answer, and why; `None` while it does.
    pub(crate) fn lost(&self) -> Option<(Timestamp, String)> {
        self.lost.lock().clone()
    }
}
