//! Lookups that are put together: while one request is under way, those who come meanwhile wait and are answered by the next,
//! all at once.
//!
//! A lookup on its own waits some milliseconds, which is little beside a request, for others that come with it. Under load, one request
//! answers as many as have come, so the number of requests depends on time and not on how many ask. Every answer is from a request
//! that was sent after it was asked for.

use std::{collections::HashMap, fmt, hash::Hash, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use super::{Deadline, Failure, Outcome};

/// How long nobody else must have come before a request is sent, and how long that is waited for.
const QUIET: Duration = Duration::from_millis(10);
const LONGEST_GATHERING: Duration = Duration::from_millis(500);

/// Lookups at a provider, where one key may fail on its own.
pub(crate) type Found<K, V> = Lookups<K, Outcome<V>, Failure>;

/// What fetches some things at once; a key that is not in the answer does not exist.
type Fetch<K, V, E> = dyn Fn(Vec<K>) -> BoxFuture<'static, Result<HashMap<K, V>, E>> + Send + Sync;
/// Somebody who waits for a key.
type Waiter<V, E> = oneshot::Sender<Result<Option<V>, E>>;

/// Finds things by their keys.
pub(crate) struct Lookups<K, V, E> {
    inner: Arc<Inner<K, V, E>>,
}

struct Inner<K, V, E> {
    fetch: Box<Fetch<K, V, E>>,
    queue: Mutex<Queue<K, V, E>>,
}

struct Queue<K, V, E> {
    waiting: HashMap<K, Vec<Waiter<V, E>>>,
    /// How many ever came.
    came: u64,
    is_served: bool,
}

impl<K, V, E> fmt::Debug for Lookups<K, V, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lookups")
    }
}

impl<K, V, E> Lookups<K, V, E>
where
    K: Clone + Eq + Hash + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    E: Clone + Send + Sync + 'static,
{
    /// Lookups by that fetch.
    pub(crate) fn new(
        fetch: impl Fn(Vec<K>) -> BoxFuture<'static, Result<HashMap<K, V>, E>> + Send + Sync + 'static,
    ) -> Self {
        let queue = Mutex::new(Queue { waiting: HashMap::new(), came: 0, is_served: false });
        Self { inner: Arc::new(Inner { fetch: Box::new(fetch), queue }) }
    }

    /// The thing of that key, as it is now; `Err(None)` if the fetch panicked.
    pub(crate) async fn get(&self, key: K) -> Result<Option<V>, Option<E>> {
        let (sender, receiver) = oneshot::channel();
        let is_served = {
            let mut queue = self.inner.queue.lock();
            queue.waiting.entry(key).or_default().push(sender);
            queue.came += 1;
            std::mem::replace(&mut queue.is_served, true)
        };
        if !is_served {
            // A task of its own: whoever asked first may be dropped while others wait.
            tokio::spawn(self.inner.clone().serve());
        }
        receiver.await.map_err(|_| None)?.map_err(Some)
    }
}

impl<K, V, E> Inner<K, V, E>
where
    K: Clone + Eq + Hash + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    E: Clone + Send + Sync + 'static,
{
    /// Waits until those have come who come at the same time.
    async fn gather(&self) {
        let until = Instant::now() + LONGEST_GATHERING;
        let mut came = self.queue.lock().came;
        loop {
            tokio::time::sleep(QUIET).await;
            let now = self.queue.lock().came;
            if now == came || Instant::now() >= until {
                return;
            }
            came = now;
        }
    }

    async fn serve(self: Arc<Self>) {
        let _unserved = Unserved(&self.queue);
        loop {
            {
                let mut queue = self.queue.lock();
                if queue.waiting.is_empty() {
                    queue.is_served = false;
                    return;
                }
            }
            self.gather().await;
            let waiting = std::mem::take(&mut self.queue.lock().waiting);
            let fetched = (self.fetch)(waiting.keys().cloned().collect()).await;
            for (key, waiters) in waiting {
                let answer = fetched.as_ref().map(|found| found.get(&key).cloned()).map_err(Clone::clone);
                for waiter in waiters {
                    // Whoever no longer waits needs no answer.
                    let _ = waiter.send(answer.clone());
                }
            }
        }
    }
}

/// The thing of that key, as the provider has it now; a failure if it does not say so before the deadline.
pub(crate) async fn look_up<K, V>(
    lookups: &Found<K, V>,
    provider: &str,
    key: K,
    until: Deadline,
) -> Outcome<Option<V>>
where
    K: Clone + Eq + Hash + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    let unclear = |why: &str| Failure::Unclear(format!("a lookup at {provider} {why}"));
    match tokio::time::timeout_at(until.instant(), lookups.get(key)).await {
        Err(_) => Err(unclear("did not end before the call's deadline")),
        Ok(Err(None)) => Err(unclear("broke off")),
        Ok(Err(Some(failure))) => Err(failure),
        Ok(Ok(found)) => found.transpose(),
    }
}

/// Lets the next lookup start anew if a fetch panics; whoever waited is told by the end of its channel.
struct Unserved<'a, K, V, E>(&'a Mutex<Queue<K, V, E>>);

impl<K, V, E> Drop for Unserved<'_, K, V, E> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.0.lock();
            queue.is_served = false;
            queue.waiting.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn those_who_come_while_one_is_answered_are_answered_together() {
        let batches = Arc::new(Mutex::new(Vec::new()));
        let seen = batches.clone();
        let lookups: Arc<Lookups<u32, u32, String>> = Arc::new(Lookups::new(move |mut keys: Vec<u32>| {
            let seen = seen.clone();
            Box::pin(async move {
                keys.sort_unstable();
                seen.lock().push(keys.clone());
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                if keys.contains(&13) {
                    return Err("thirteen".to_owned());
                }
                Ok(keys.into_iter().filter(|key| key % 2 == 0).map(|key| (key, key * 10)).collect())
            })
        }));
        let ask = |key| {
            let lookups = lookups.clone();
            tokio::spawn(async move { lookups.get(key).await })
        };
        let first = ask(2);
        while batches.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let others: Vec<_> = (2..12).map(ask).collect();
        assert_eq!(first.await.unwrap(), Ok(Some(20)));
        for (key, other) in (2..12).zip(others) {
            assert_eq!(other.await.unwrap(), Ok((key % 2 == 0).then_some(key * 10)));
        }
        assert_eq!(*batches.lock(), [vec![2], (2..12).collect()]);
        assert_eq!(lookups.get(13).await, Err(Some("thirteen".to_owned())));
        assert_eq!(lookups.get(4).await, Ok(Some(40)), "one failure is not the next one's");
    }
}
