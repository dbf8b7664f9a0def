//! One operation at a time per volume, across all components beside a driver.
//!
//! Nobody waits: whoever finds a volume busy leaves word how to be called when it is free and gives its worker to
//! another volume, so a call that hangs costs exactly one worker however much is asked of its volume.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

type Waiter = Box<dyn FnOnce() + Send>;

/// What is being worked on; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Locks {
    busy: Arc<Mutex<HashMap<String, Vec<Waiter>>>>,
}

/// A volume held until this is dropped.
pub(crate) struct Held {
    locks: Locks,
    volume: String,
}

impl Locks {
    /// Holds a volume, or calls `when_free` once it is free again.
    pub(crate) fn try_hold(&self, volume: &str, when_free: impl FnOnce() + Send + 'static) -> Option<Held> {
        let mut busy = self.busy();
        if let Some(waiters) = busy.get_mut(volume) {
            waiters.push(Box::new(when_free));
            return None;
        }
        busy.insert(volume.to_owned(), Vec::new());
        Some(Held { locks: self.clone(), volume: volume.to_owned() })
    }

    fn busy(&self) -> MutexGuard<'_, HashMap<String, Vec<Waiter>>> {
        self.busy.lock()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let waiters = self.locks.busy().remove(&self.volume).unwrap_or_default();
        for waiter in waiters {
            waiter();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_busy_volume_is_refused_and_everybody_who_asked_is_called_when_it_is_free() {
        let locks = Locks::default();
        let called = Arc::new(AtomicUsize::new(0));
        let count = || {
            let called = called.clone();
            move || {
                called.fetch_add(1, Ordering::Relaxed);
            }
        };
        let held = locks.try_hold("a", count()).unwrap();
        assert!(locks.try_hold("a", count()).is_none());
        assert!(locks.try_hold("a", count()).is_none());
        assert!(locks.try_hold("b", count()).is_some(), "another volume is free");
        assert_eq!(called.load(Ordering::Relaxed), 0);
        drop(held);
        assert_eq!(called.load(Ordering::Relaxed), 2);
        assert!(locks.try_hold("a", count()).is_some());
    }
}
