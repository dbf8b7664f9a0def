//! A control loop, declared by the caches that it follows, and its queue of keys to reconcile: each at most once, one worker
//! per key at a time, failures again after a growing pause.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque, hash_map::Entry};
use std::fmt::{Debug, Display};
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use berth_core::Backoff;

use crate::cluster::Cluster;
use crate::kind::Kind;
use crate::metrics::Meter;
use crate::{Cache, Key};

/// A loop over the keys of a queue, which are added when objects of the caches that it names change:
///
/// ```no_run
/// # use berth_kube::{Backoff, Cluster, Error, Key, Loop, Next};
/// # use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
/// # async fn run(cluster: Cluster) {
/// let claims = cluster.cache::<PersistentVolumeClaim>();
/// let volumes = cluster.cache::<PersistentVolume>();
/// Loop::new(&cluster, &cluster.queue("claims", Backoff::default()))
///     .keyed(&claims)
///     .also(&volumes, |volume| {
///         let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
///         Some(Key::new(claim.namespace.clone()?, claim.name.clone()?))
///     })
///     .run(4, |claim| async move {
///         println!("{claim} or its volume changed");
///         Ok::<_, Error>(Next::Done)
///     })
///     .await;
/// # }
/// ```
///
/// Guarantees: no key is worked on before the first list of every cache that the loop names is complete; then every
/// object that is there counts as a change, so that nothing that happened before the start is missed. The loop ends with
/// the cluster's shutdown, after the work under way.
#[must_use = "a loop does nothing until it runs"]
pub struct Loop<T> {
    queue: Queue<T>,
    shutdown: CancellationToken,
    synced: Vec<BoxFuture<'static, ()>>,
    subscriptions: Vec<Subscription<T>>,
}

/// Has a cache add to the queue.
type Subscription<T> = Box<dyn FnOnce(&Queue<T>) + Send>;

impl Loop<Key> {
    /// Reconciles each object of a cache when it comes, changes or goes.
    pub fn keyed<K: Kind>(self, cache: &Cache<K>) -> Self {
        self.also(cache, |object| Some(Key::of(object.as_ref())))
    }
}

impl<T: Hash + Eq + Clone + Debug + Send + Sync + 'static> Loop<T> {
    /// A loop over what is in a queue, to which others may add, too.
    pub fn new(cluster: &Cluster, queue: &Queue<T>) -> Self {
        let (queue, shutdown) = (queue.clone(), cluster.shutdown().clone());
        Self { queue, shutdown, synced: Vec::new(), subscriptions: Vec::new() }
    }

    /// Reconciles the keys that `keys` gives for an object, whenever it comes, changes or goes; it is asked with the state
    /// after the change, or with the last known one when the object is gone.
    pub fn also<K: Kind, I: IntoIterator<Item = T>>(
        self,
        cache: &Cache<K>,
        keys: impl Fn(&Arc<K>) -> I + Send + Sync + 'static,
    ) -> Self {
        self.subscribe(cache, move |before, after| after.or(before).into_iter().flat_map(&keys).collect())
    }

    /// Reconciles the keys that `keys(before, after)` gives for each change of an object, as [`Cache::subscribe`] delivers it.
    pub fn subscribe<K: Kind>(
        mut self,
        cache: &Cache<K>,
        keys: impl Fn(Option<&Arc<K>>, Option<&Arc<K>>) -> Vec<T> + Send + Sync + 'static,
    ) -> Self {
        let followed = cache.clone();
        self.subscriptions.push(Box::new(move |queue| {
            let queue = queue.clone();
            followed.subscribe(move |before, after| queue.add_all(keys(before, after)));
        }));
        self.reads(cache)
    }

    /// Does not begin before the first list of a cache, which its work reads.
    pub fn reads<K: Kind>(mut self, cache: &Cache<K>) -> Self {
        let cache = cache.clone();
        self.synced.push(Box::pin(async move { cache.synced().await }));
        self
    }

    /// The queue whose keys the loop works on.
    pub fn queue(&self) -> &Queue<T> {
        &self.queue
    }

    /// Cancelled when the loop must end.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Works on up to `workers` keys at a time, never on one twice at a time, until the cluster's shutdown.
    pub async fn run<R, E>(mut self, workers: usize, work: impl Fn(T) -> R + Send + Sync)
    where
        R: Future<Output = Result<Next, E>> + Send + 'static,
        E: Failure + Send + 'static,
    {
        if self.begin().await {
            self.queue.run(workers, self.shutdown.clone(), work).await;
        }
    }

    /// Waits for the caches and subscribes to them; false if the shutdown came first.
    async fn begin(&mut self) -> bool {
        tokio::select! {
            () = self.shutdown.cancelled() => return false,
            _ = join_all(self.synced.drain(..)) => {}
        }
        for subscribe in self.subscriptions.drain(..) {
            subscribe(&self.queue);
        }
        true
    }
}

/// What to do with a key after its reconciliation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing until something changes.
    Done,
    /// Again after this time, whatever happens.
    After(Duration),
    /// Again after the backoff, without calling it a failure in the log.
    Retry,
}

/// An error of a loop.
pub trait Failure: Display {
    /// Somebody else was quicker: normal, and not worth a line in the log.
    fn is_conflict(&self) -> bool {
        false
    }

    /// The error and its causes.
    fn describe(&self) -> String {
        self.to_string()
    }
}

impl Failure for crate::Error {
    fn is_conflict(&self) -> bool {
        Self::is_conflict(self)
    }

    fn describe(&self) -> String {
        self.chain()
    }
}

/// Keys to reconcile; cheap to clone.
pub struct Queue<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

struct Shared<T> {
    name: Arc<str>,
    backoff: Backoff,
    state: Mutex<State<T>>,
    changed: Notify,
    meter: Option<Meter>,
}

struct State<T> {
    ready: VecDeque<T>,
    /// What is in `ready`, or must be reconciled again once its worker is done, and since when.
    wanted: HashMap<T, Instant>,
    busy: HashSet<T>,
    failures: HashMap<T, u32>,
    /// When each delayed key is due; a key has one time, the earliest.
    due: HashMap<T, (Instant, u64)>,
    delayed: BTreeMap<(Instant, u64), T>,
    sequence: u64,
    meter: Option<Meter>,
}

impl<T> Drop for State<T> {
    fn drop(&mut self) {
        if let Some(meter) = &self.meter {
            meter.depth.dec_by(i64::try_from(self.ready.len()).unwrap_or(i64::MAX));
        }
    }
}

impl<T: Hash + Eq + Clone + Debug + Send + Sync + 'static> Queue<T> {
    /// An empty queue; `name` says in the log whose it is. One that is measured is made by [`crate::Cluster::queue`].
    pub fn new(name: impl Into<Arc<str>>, backoff: Backoff) -> Self {
        Self::measured(name.into(), backoff, None)
    }

    /// An empty queue, measured if there is a meter.
    pub(crate) fn measured(name: Arc<str>, backoff: Backoff, meter: Option<Meter>) -> Self {
        let state = State {
            ready: VecDeque::new(),
            wanted: HashMap::new(),
            busy: HashSet::new(),
            failures: HashMap::new(),
            due: HashMap::new(),
            delayed: BTreeMap::new(),
            sequence: 0,
            meter: meter.clone(),
        };
        let (state, changed) = (Mutex::new(state), Notify::new());
        Self { shared: Arc::new(Shared { name, backoff, state, changed, meter }) }
    }

    /// Adds a key, to be reconciled as soon as possible, even if it waits for its backoff: something changed.
    pub fn add(&self, key: T) {
        self.state().add(key);
        self.shared.changed.notify_one();
    }

    /// Adds keys, to be reconciled as soon as possible.
    pub(crate) fn add_all(&self, keys: Vec<T>) {
        if !keys.is_empty() {
            let mut state = self.state();
            for key in keys {
                state.add(key);
            }
            drop(state);
            self.shared.changed.notify_one();
        }
    }

    /// Adds a key that is reconciled after a time, or earlier if it is added meanwhile.
    pub fn add_after(&self, key: T, after: Duration) {
        self.state().delay(key, Instant::now() + after);
        self.shared.changed.notify_one();
    }

    /// How many keys are ready and wait for a worker.
    pub fn depth(&self) -> usize {
        self.state().ready.len()
    }

    /// Reconciles up to `workers` keys at a time until `shutdown`, then waits for those under way.
    pub async fn run<R, E>(
        &self,
        workers: usize,
        shutdown: CancellationToken,
        work: impl Fn(T) -> R + Send + Sync,
    ) where
        R: Future<Output = Result<Next, E>> + Send + 'static,
        E: Failure + Send + 'static,
    {
        self.run_boxed(workers, shutdown, &|key| Box::pin(outcome(work(key)))).await;
    }

    /// The same, compiled once for a kind of key and not for every kind of work.
    async fn run_boxed(
        &self,
        workers: usize,
        shutdown: CancellationToken,
        work: &(dyn Fn(T) -> BoxFuture<'static, Outcome> + Send + Sync),
    ) {
        let mut under_way = JoinSet::new();
        loop {
            while under_way.len() < workers && !shutdown.is_cancelled() {
                let Some(key) = self.state().next() else { break };
                let work = work(key.clone());
                let timer = self.shared.meter.as_ref().map(Meter::begin);
                under_way.spawn(async move {
                    let outcome = work.await;
                    drop(timer);
                    (key, outcome)
                });
            }
            let due = self.state().delayed.keys().next().map(|(due, _)| *due);
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = self.shared.changed.notified() => {}
                Some(Ok((key, outcome))) = under_way.join_next() => self.finish(key, outcome),
                () = until(due) => self.state().promote(Instant::now()),
            }
        }
        while under_way.join_next().await.is_some() {}
    }

    fn finish(&self, key: T, outcome: Outcome) {
        let queue = &*self.shared.name;
        let next = match outcome {
            Outcome::Done(next) => next,
            Outcome::Conflict => {
                tracing::debug!(queue, ?key, "changed by somebody else; trying again");
                Next::Retry
            }
            Outcome::Failed(error) => {
                tracing::warn!(queue, ?key, error, "failed; trying again");
                Next::Retry
            }
            Outcome::Panicked => {
                tracing::error!(queue, ?key, "panicked; trying again");
                Next::Retry
            }
        };
        let mut state = self.state();
        state.busy.remove(&key);
        match next {
            Next::Retry => {
                let failures = state.failures.entry(key.clone()).or_default();
                *failures = failures.saturating_add(1);
                let pause = self.shared.backoff.pause(*failures);
                if let Some(meter) = &self.shared.meter {
                    meter.retries.inc();
                }
                state.delay(key.clone(), Instant::now() + pause);
            }
            Next::Done => {
                state.failures.remove(&key);
            }
            Next::After(pause) => {
                state.failures.remove(&key);
                state.delay(key.clone(), Instant::now() + pause);
            }
        }
        if state.wanted.contains_key(&key) {
            state.push(key);
        }
    }

    fn state(&self) -> parking_lot::MutexGuard<'_, State<T>> {
        self.shared.state.lock()
    }
}

impl<T: Hash + Eq + Clone> State<T> {
    fn add(&mut self, key: T) {
        if let Some(due) = self.due.remove(&key) {
            self.delayed.remove(&due);
        }
        let Entry::Vacant(unwanted) = self.wanted.entry(key.clone()) else { return };
        unwanted.insert(Instant::now());
        if let Some(meter) = &self.meter {
            meter.adds.inc();
        }
        if !self.busy.contains(&key) {
            self.push(key);
        }
    }

    fn push(&mut self, key: T) {
        self.ready.push_back(key);
        if let Some(meter) = &self.meter {
            meter.depth.inc();
        }
    }

    fn delay(&mut self, key: T, due: Instant) {
        if self.wanted.contains_key(&key) {
            return;
        }
        match self.due.get(&key) {
            Some((known, _)) if *known <= due => return,
            Some(known) => {
                self.delayed.remove(known);
            }
            None => {}
        }
        self.sequence += 1;
        self.due.insert(key.clone(), (due, self.sequence));
        self.delayed.insert((due, self.sequence), key);
    }

    fn promote(&mut self, now: Instant) {
        while let Some(entry) = self.delayed.first_entry() {
            if entry.key().0 > now {
                return;
            }
            let key = entry.remove();
            self.due.remove(&key);
            self.add(key);
        }
    }

    fn next(&mut self) -> Option<T> {
        let key = self.ready.pop_front()?;
        let since = self.wanted.remove(&key);
        if let Some(meter) = &self.meter {
            meter.depth.dec();
            meter.waited.observe(since.map_or(0.0, |since| since.elapsed().as_secs_f64()));
        }
        self.busy.insert(key.clone());
        Some(key)
    }
}

/// What became of the work on a key.
enum Outcome {
    Done(Next),
    Conflict,
    Failed(String),
    Panicked,
}

async fn outcome<E: Failure>(work: impl Future<Output = Result<Next, E>>) -> Outcome {
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(Ok(next)) => Outcome::Done(next),
        Ok(Err(error)) if error.is_conflict() => Outcome::Conflict,
        Ok(Err(error)) => Outcome::Failed(error.describe()),
        Err(_panic) => Outcome::Panicked,
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
