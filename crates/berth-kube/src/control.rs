//! A control loop, declared by what it looks at and when.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::kind::Kind;
use crate::queue::{Failure, Next, Queue};
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
    /// Looks at each object of a cache when it comes, changes or goes.
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

    /// Looks at the keys that `keys` gives for an object, whenever it comes, changes or goes; it is asked with the state
    /// after the change, or with the last known one when the object is gone.
    pub fn also<K: Kind, I: IntoIterator<Item = T>>(
        self,
        cache: &Cache<K>,
        keys: impl Fn(&Arc<K>) -> I + Send + Sync + 'static,
    ) -> Self {
        self.subscribe(cache, move |before, after| after.or(before).into_iter().flat_map(&keys).collect())
    }

    /// Looks at the keys that `keys(before, after)` gives for each change of an object, as [`Cache::subscribe`] tells it.
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
