//! One operation at a time on each instance: providers refuse a second attachment or detachment while one is under way.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// Queues by the ids of instances; each is served in the order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    known: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
}

impl Queues {
    /// Waits until nobody before us works on that instance; the next may when the guard is dropped.
    pub(crate) async fn enter(&self, instance: &str) -> OwnedMutexGuard<()> {
        let queue = {
            let mut known = self.known.lock();
            known.retain(|_, queue| queue.strong_count() > 0);
            let queue = known.get(instance).and_then(Weak::upgrade).unwrap_or_default();
            known.insert(instance.to_owned(), Arc::downgrade(&queue));
            queue
        };
        queue.lock_owned().await
    }
}
