//! Something that is made when needed, used by many, made again when broken and dropped when idle.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{sync::Mutex, time::Instant};

use crate::status::Fault;

/// What can be kept standing.
pub(crate) trait Idle {
    /// Whether it can still be used.
    fn is_alive(&self) -> bool;
    /// How long nobody has used it.
    fn idle_for(&self) -> Duration;
}

/// A place for one of these.
#[derive(Debug)]
pub(crate) struct Standing<T> {
    slot: Mutex<Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    current: Option<Arc<T>>,
    failed: Option<(Instant, Fault)>,
}

impl<T> Default for Standing<T> {
    fn default() -> Self {
        Self { slot: Mutex::new(Slot { current: None, failed: None }) }
    }
}

impl<T: Idle> Standing<T> {
    /// What stands here, made if necessary: by one caller, while the others wait and share its success or failure.
    pub(crate) async fn get<F>(&self, make: impl FnOnce() -> F) -> Result<Arc<T>, Fault>
    where
        F: Future<Output = Result<T, Fault>>,
    {
        let asked = Instant::now();
        let mut slot = self.slot.lock().await;
        if let Some(current) = slot.current.as_ref().filter(|current| current.is_alive()) {
            return Ok(current.clone());
        }
        slot.current = None;
        // Otherwise each of a hundred callers would wait for its own timeout, one after the other.
        if let Some((at, fault)) = &slot.failed
            && *at > asked
        {
            return Err(fault.clone());
        }
        match make().await {
            Ok(new) => {
                let new = Arc::new(new);
                slot.current = Some(new.clone());
                Ok(new)
            }
            Err(fault) => {
                slot.failed = Some((Instant::now(), fault.clone()));
                Err(fault)
            }
        }
    }

    /// Drops what was not used for so long; tells whether anything stands here still.
    pub(crate) fn drop_idle(&self, longest: Duration) -> bool {
        let Ok(mut slot) = self.slot.try_lock() else { return true };
        if slot.current.as_ref().is_some_and(|current| !current.is_alive() || current.idle_for() >= longest) {
            slot.current = None;
        }
        slot.current.is_some()
    }
}
