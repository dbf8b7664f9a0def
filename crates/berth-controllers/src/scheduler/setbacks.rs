//! How long a pod whose placement was given up rests before it gets another.
//!
//! The same node is often chosen again, and what made the placement fail is often still so: without a rest, the scheduler
//! and a provisioner that is out of space would hand a claim to and fro as fast as they can write.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::Duration;

use berth_kube::Key;
use tokio::time::Instant;

/// After the first setback; twice as long after each further one.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);

/// The setbacks of pods that have no node yet.
#[derive(Debug, Default)]
pub(super) struct Setbacks {
    by_pod: HashMap<Key, Suffered>,
}

#[derive(Debug)]
struct Suffered {
    /// Another pod of the same name begins anew.
    uid: Option<String>,
    count: u32,
    not_before: Instant,
}

impl Setbacks {
    /// Counts a setback; says how long the pod rests.
    pub(super) fn count(&mut self, pod: &Key, uid: Option<&str>, now: Instant) -> Duration {
        let before = self.by_pod.get(pod).filter(|known| known.uid.as_deref() == uid);
        let count = before.map_or(1, |known| known.count.saturating_add(1));
        let rest = rest_after(count);
        let uid = uid.map(str::to_owned);
        self.by_pod.insert(pod.clone(), Suffered { uid, count, not_before: now + rest });
        rest
    }

    /// How much longer a pod rests.
    pub(super) fn rest(&self, pod: &Key, uid: Option<&str>, now: Instant) -> Option<Duration> {
        let known = self.by_pod.get(pod).filter(|known| known.uid.as_deref() == uid)?;
        known.not_before.checked_duration_since(now).filter(|rest| !rest.is_zero())
    }

    /// Forgets a pod that has a node, or is gone.
    pub(super) fn forget(&mut self, pod: &Key) {
        self.by_pod.remove(pod);
    }
}

/// The rest after so many setbacks, counted from 1.
fn rest_after(count: u32) -> Duration {
    SHORTEST.saturating_mul(1_u32.checked_shl(count - 1).unwrap_or(u32::MAX)).min(LONGEST)
}
