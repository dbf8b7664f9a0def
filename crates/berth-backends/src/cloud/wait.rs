//! How long a call may take, and when to look again at what is under way.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::Context;

/// A call without a deadline ends within this time.
const USUAL: Duration = Duration::from_secs(120);
/// And one with a deadline not later than this.
const LONGEST: Duration = Duration::from_secs(600);

/// Up to so many who wait look every other second; more look at the ticks of crowds, and from the second number on seldom.
pub(crate) const FEW_ENOUGH: usize = 20;
const CROWDED: usize = 50;

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

/// How long things usually take, by their names, learned from what was waited for.
#[derive(Debug, Default)]
pub(crate) struct Durations(Mutex<HashMap<&'static str, Duration>>);

impl Durations {
    /// Something took that long, or less: until somebody looked.
    pub(crate) fn observe(&self, what: &'static str, took: Duration) {
        let mut known = self.0.lock();
        let usual = known.entry(what).or_insert(took);
        *usual = (*usual * 3 + took) / 4;
    }

    /// How long it usually takes; `None` if it was never waited for.
    pub(crate) fn usual(&self, what: &str) -> Option<Duration> {
        self.0.lock().get(what).copied()
    }
}

/// When to look at what is under way. Where it is known how long that usually takes, the first look comes after three quarters of
/// the time, which finds out as well if it takes less than before; else it comes soon. Later ones come at whole ticks, at which all
/// who wait look together, so that one request can answer them all.
#[derive(Debug)]
pub(crate) struct Pace {
    looks: u32,
    usual: Option<Duration>,
    /// The time between looks while very many wait.
    crowd: Duration,
}

impl Pace {
    /// Nobody has looked yet, and nothing is known.
    pub(crate) fn new() -> Self {
        Self { looks: 0, usual: None, crowd: Duration::from_secs(4) }
    }

    /// Nobody has looked yet at what usually takes so long; while very many wait, looks come at these ticks.
    pub(crate) fn of(usual: Option<Duration>, crowd: Duration) -> Self {
        Self { looks: 0, usual, crowd }
    }

    /// How often was looked.
    pub(crate) fn looks(&self) -> u32 {
        self.looks
    }

    /// Waits until it is time to look again, while `others` wait as well; false if that is after the deadline.
    pub(crate) async fn next(&mut self, others: usize, deadline: Deadline) -> bool {
        let now = Instant::now();
        // Never so late that nobody could look before the deadline.
        let first = self.usual.map(|usual| now + (usual * 3 / 4).min(deadline.left(Duration::MAX) / 2));
        let earliest = first.filter(|_| self.looks == 0).unwrap_or(now);
        let at = match (self.looks, others) {
            (0, 0..=2) => first.unwrap_or(now + Duration::from_millis(100)),
            (1, 0..=2) => {
                let quarter = self.usual.map_or(Duration::from_millis(400), |usual| usual / 4);
                now + quarter.clamp(Duration::from_millis(100), Duration::from_secs(1))
            }
            (_, 0..=2) => tick(earliest, Duration::from_secs(1)),
            (_, 3..=FEW_ENOUGH) => tick(earliest, Duration::from_secs(2)),
            (_, 21..=CROWDED) => tick(earliest, (self.crowd / 2).max(Duration::from_secs(4))),
            _ => tick(earliest, self.crowd),
        };
        self.looks += 1;
        let left = deadline.left(Duration::MAX);
        // A tick that comes too late is not waited for.
        let at = if at > deadline.0 && left > Duration::from_secs(2) { now + left / 2 } else { at };
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

/// The next multiple of `length` since this process first asked.
fn tick(now: Instant, length: Duration) -> Instant {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let start = *START.get_or_init(|| now);
    let since = now.saturating_duration_since(start).as_millis();
    let length = length.as_millis();
    let next = (since / length + 1) * length;
    start + Duration::from_millis(u64::try_from(next).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CROWD: Duration = Duration::from_secs(20);

    #[tokio::test(start_paused = true)]
    async fn the_first_look_comes_when_it_is_usually_almost_done_and_never_after_the_deadline() {
        let durations = Durations::default();
        assert_eq!(durations.usual("attach"), None);
        for _ in 0..9 {
            durations.observe("attach", Duration::from_secs(8));
        }
        let (usual, start) = (durations.usual("attach"), Instant::now());
        assert_eq!(usual, Some(Duration::from_secs(8)));
        let mut pace = Pace::of(usual, CROWD);
        assert!(pace.next(0, Deadline::after(Duration::from_secs(60))).await);
        assert_eq!(start.elapsed(), Duration::from_secs(6));
        assert!(pace.next(0, Deadline::after(Duration::from_secs(60))).await);
        assert_eq!(start.elapsed(), Duration::from_secs(7));
        // Whoever has less time looks in the middle of it.
        let start = Instant::now();
        assert!(Pace::of(usual, CROWD).next(0, Deadline::after(Duration::from_secs(2))).await);
        assert_eq!(start.elapsed(), Duration::from_secs(1));
        // What takes less than before is noticed, because the look comes earlier than that.
        for _ in 0..20 {
            let usual = durations.usual("attach").unwrap();
            durations.observe("attach", usual * 3 / 4);
        }
        assert!(durations.usual("attach").unwrap() < Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn many_who_wait_look_at_the_same_time() {
        let look = async |begun: u64| {
            tokio::time::sleep(Duration::from_millis(begun)).await;
            let mut pace = Pace::of(Some(Duration::from_secs(5)), CROWD);
            assert!(pace.next(50, Deadline::after(Duration::from_secs(60))).await);
            Instant::now()
        };
        let looks = futures_util::future::join_all([0, 10, 20].map(look)).await;
        assert!(looks.iter().all(|at| *at == looks[0]), "{looks:?}");
    }
}
