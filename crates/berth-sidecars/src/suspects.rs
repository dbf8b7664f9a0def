//! Who a driver may have died of.
//!
//! When a driver that was away is back, everything is looked at again at once, except an item whose own call broke the
//! connection: the driver may have died of it, and would again. That one waits for its backoff, which grows, so that it
//! does not keep the driver from serving the others.

use std::collections::HashSet;

use berth_kube::{Key, Next, Queue};
use parking_lot::{Mutex, MutexGuard};

use crate::driver::Driver;
use crate::failure::{Failure, settled};

/// Items under way, and those whose last call broke.
#[derive(Default)]
pub(crate) struct Suspects {
    keys: Mutex<HashSet<Key>>,
}

impl Suspects {
    /// Looks at an item of a queue, and remembers it if its call breaks.
    pub(crate) async fn look(
        &self,
        driver: &Driver,
        queue: &Queue<Key>,
        key: Key,
        look: impl Future<Output = Result<Next, Failure>>,
    ) -> Result<Next, Failure> {
        // From the beginning: the driver can be back before the failure is written down everywhere.
        self.keys().insert(key.clone());
        let result = look.await;
        if !result.as_ref().is_err_and(Failure::is_broken_call) {
            self.keys().remove(&key);
        }
        // It came back meanwhile, and left out what was under way.
        if result.as_ref().is_err_and(Failure::is_absence) && driver.identity().is_ok() {
            queue.add(key);
        }
        settled(result)
    }

    /// Looks at an item again, as the driver is back; not at a suspect.
    pub(crate) fn again(&self, queue: &Queue<Key>, key: Key) {
        if !self.keys().contains(&key) {
            queue.add(key);
        }
    }

    fn keys(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.keys.lock()
    }
}
