//! A connection that is opened when it is needed, shared by all callers, opened again when it broke and closed when it is idle.

use std::{future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::status::Fault;

/// A connection that says whether it still works, and since when nobody used it.
pub(crate) trait Idle {
    /// Whether it can still be used.
    fn is_alive(&self) -> bool;
    /// How long nobody has used it.
    fn idle_for(&self) -> Duration;
}

/// Holds one connection, or the attempt to open it.
#[derive(Debug)]
pub(crate) struct SharedConnection<T> {
    slot: Arc<Mutex<Slot<T>>>,
}

type Made<T> = Result<Arc<T>, Fault>;

/// No caller ever holds anything that another one waits for, not even its turn: callers are often left half done, to be
/// gone on with or not, while the same task waits for a call of somebody else.
#[derive(Debug)]
enum Slot<T> {
    Empty,
    Making(watch::Receiver<Option<Made<T>>>),
    Made(Arc<T>),
}

impl<T> Default for SharedConnection<T> {
    fn default() -> Self {
        Self { slot: Arc::new(Mutex::new(Slot::Empty)) }
    }
}

impl<T: Idle + Send + Sync + 'static> SharedConnection<T> {
    /// Returns the connection. If there is none, one task opens it, and all callers that wait get its success or failure.
    pub(crate) async fn get<F>(&self, make: impl FnOnce() -> F) -> Made<T>
    where
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let mut making = {
            let mut slot = self.slot.lock();
            match &*slot {
                Slot::Made(current) if current.is_alive() => return Ok(current.clone()),
                // Closed only if its maker panicked or its runtime is gone.
                Slot::Making(making) if making.has_changed().is_ok() => making.clone(),
                _ => self.begin(&mut slot, make()),
            }
        };
        match making.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(result)) => result.clone(),
            _ => Err(Fault::Closed),
        }
    }

    fn begin(
        &self,
        slot: &mut Slot<T>,
        make: impl Future<Output = Result<T, Fault>> + Send + 'static,
    ) -> watch::Receiver<Option<Made<T>>> {
        let (end, making) = watch::channel(None);
        *slot = Slot::Making(making.clone());
        let place = self.slot.clone();
        tokio::spawn(async move {
            let result = make.await.map(Arc::new);
            *place.lock() = result.clone().map_or(Slot::Empty, Slot::Made);
            end.send_replace(Some(result));
        });
        making
    }

    /// Drops what was not used for so long; returns whether anything stands here still.
    pub(crate) fn drop_idle(&self, longest: Duration) -> bool {
        let mut slot = self.slot.lock();
        let is_idle = match &*slot {
            Slot::Made(current) => !current.is_alive() || current.idle_for() >= longest,
            Slot::Empty | Slot::Making(_) => false,
        };
        if is_idle {
            *slot = Slot::Empty;
        }
        !matches!(*slot, Slot::Empty)
    }
}
