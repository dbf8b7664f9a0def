//! How long a call may take, and when to look again at what is under way.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::Context;

/// A call without a deadline ends within this time.
const USUAL: Duration = Duration::from_secs(120);
/// And one with a deadline not later than this.
const LONGEST: Duration = Duration::from_secs(600);

/// When a call's caller no longer waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// The deadline of a call.
    pub(crate) fn of(ctx: &Context) -> Self {
        let remaining = if ctx.deadline().is_some() { ctx.remaining().min(LONGEST) } else { USUAL };
        Self::after(remaining)
    }

    /// So long from now.
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// The instant at which the call must have ended.
    pub(crate) fn instant(self) -> Instant {
        self.0
    }

    /// What is left of it, and no more than `most`.
    pub(crate) fn left(self, most: Duration) -> Duration {
        self.0.saturating_duration_since(Instant::now()).min(most)
    }

    /// Whether nothing is left.
    pub(crate) fn is_over(self) -> bool {
        self.0 <= Instant::now()
    }
}

/// When to look at what is under way. The first looks come soon; later ones come at whole ticks, at which all who wait look
/// together, so that one request can answer them all.
#[derive(Debug)]
pub(crate) struct Pace {
    looks: u32,
}

impl Pace {
    /// Nobody has looked yet.
    pub(crate) fn new() -> Self {
        Self { looks: 0 }
    }

    /// How often was looked.
    pub(crate) fn looks(&self) -> u32 {
        self.looks
    }

    /// Waits until it is time to look again, while `others` wait as well; false if that is after the deadline.
    pub(crate) async fn next(&mut self, others: usize, deadline: Deadline) -> bool {
        let now = Instant::now();
        let at = match (self.looks, others) {
            (0, 0..=2) => now + Duration::from_millis(100),
            (1, 0..=2) => now + Duration::from_millis(400),
            (_, 0..=2) => tick(now, Duration::from_secs(1)),
            (_, 3..=20) => tick(now, Duration::from_secs(2)),
            _ => tick(now, Duration::from_secs(4)),
        };
        self.looks += 1;
        if at > deadline.0 {
            return false;
        }
        tokio::time::sleep_until(at).await;
        true
    }
}

/// Somebody who waits for what is under way, counted.
pub(crate) struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    /// One more waits, until this is dropped.
    pub(crate) fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }

    /// How many others wait.
    pub(crate) fn others(&self) -> usize {
        self.0.load(Ordering::Relaxed).saturating_sub(1)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Does this work now and after each pause, for as long as `what` is in use and the handle is kept.
pub(crate) fn repeat_while_used<T, F>(
    what: &Arc<T>,
    pause: Duration,
    work: impl Fn(Arc<T>) -> F + Send + 'static,
) -> AbortOnDropHandle<()>
where
    T: Send + Sync + 'static,
    F: Future<Output = ()> + Send,
{
    let weak = Arc::downgrade(what);
    AbortOnDropHandle::new(tokio::spawn(async move {
        while let Some(used) = weak.upgrade() {
            work(used).await;
            tokio::time::sleep(pause).await;
        }
    }))
}

/// The next multiple of `length` since this process first asked.
fn tick(now: Instant, length: Duration) -> Instant {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let start = *START.get_or_init(|| now);
    let since = now.saturating_duration_since(start).as_millis();
    let length = length.as_millis();
    let next = (since / length + 1) * length;
    start + Duration::from_millis(u64::try_from(next).unwrap_or(u64::MAX))
}
