//! When the next request of an account may be sent.
//!
//! An account has one limiter. It holds requests back for as long as the provider asks, lets them go in the order in which
//! they came, and spaces them for a while after the provider complained: many that waited would otherwise go at once,
//! and be refused again. Where the provider's limit is known ([`Limiter::within`]), it is kept before anybody complains.

use std::{
    collections::VecDeque,
    fmt,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long requests stay spaced after a complaint.
const CAREFUL: Duration = Duration::from_secs(60);
/// Below so many requests that are left, they are spread over the time until there are more.
const FEW: u64 = 20;
/// No provider's word holds requests back longer: it is asked again then.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// The pace of all requests of one account.
pub(crate) struct Limiter {
    /// The least time between two requests, always.
    least: Duration,
    /// And after a complaint.
    careful: Duration,
    /// At most so many requests in that time.
    most: Option<(usize, Duration)>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When the last requests were, or will be, sent: as many as `most` says.
    sent: VecDeque<Instant>,
    /// The provider speaks of a limit, so it has one.
    is_limited: bool,
    /// The earliest time for the next request.
    next: Instant,
    /// The time between requests until `careful_until`.
    spacing: Duration,
    careful_until: Instant,
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("least", &self.least).finish_non_exhaustive()
    }
}

impl Limiter {
    /// At most `rate` requests a second, if that is not 0; after a complaint at most `careful` a second.
    pub(crate) fn new(rate: f64, careful: f64) -> Self {
        let spacing =
            |rate: f64| if rate > 0.0 { Duration::from_secs_f64(1.0 / rate) } else { Duration::ZERO };
        let now = Instant::now();
        Self {
            least: spacing(rate),
            careful: spacing(careful),
            most: None,
            state: Mutex::new(State {
                sent: VecDeque::new(),
                is_limited: false,
                next: now,
                spacing: Duration::ZERO,
                careful_until: now,
            }),
        }
    }

    /// And never more than `count` requests in any `time`, once the provider said that it counts them.
    pub(crate) fn within(mut self, count: usize, time: Duration) -> Self {
        self.most = Some((count, time));
        self
    }

    /// Waits for this request's turn; false, at once, if that comes after `until`.
    pub(crate) async fn turn(&self, until: Instant) -> bool {
        let at = {
            let mut state = self.state.lock();
            let now = Instant::now();
            let mut at = state.next.max(now);
            if let Some((count, time)) = self.most
                && state.is_limited
                && state.sent.len() >= count
                && let Some(first) = state.sent.front()
            {
                at = at.max(*first + time);
            }
            if at > until {
                return false;
            }
            if let Some((count, _)) = self.most {
                state.sent.push_back(at);
                while state.sent.len() > count {
                    state.sent.pop_front();
                }
            }
            let spacing = if at < state.careful_until { state.spacing.max(self.least) } else { self.least };
            state.next = at + spacing;
            at
        };
        tokio::time::sleep_until(at).await;
        true
    }

    /// The provider refused a request because there were too many, and asks for this pause.
    pub(crate) fn complained(&self, pause: Duration) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.next = state.next.max(now + pause.min(LONGEST_PAUSE));
        state.spacing = self.careful;
        state.careful_until = state.next + CAREFUL;
    }

    /// The provider says how many requests are left until a time (seconds of Unix time).
    pub(crate) fn observe_quota(&self, remaining: u64, reset: u64) {
        self.state.lock().is_limited = true;
        if remaining >= FEW {
            return;
        }
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let until = Duration::from_secs(reset).saturating_sub(unix).min(LONGEST_PAUSE);
        let now = Instant::now();
        let mut state = self.state.lock();
        if remaining == 0 {
            state.next = state.next.max(now + until);
        }
        state.spacing = until / u32::try_from(remaining.max(1)).unwrap_or(u32::MAX);
        state.careful_until = now + until;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_one_second() -> Instant {
        Instant::now() + Duration::from_secs(1)
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_as_long_as_the_provider_asks_and_then_go_one_by_one() {
        let limiter = Limiter::new(0.0, 4.0);
        let start = Instant::now();
        for _ in 0..100 {
            assert!(limiter.turn(in_one_second()).await);
        }
        assert_eq!(start.elapsed(), Duration::ZERO);

        limiter.complained(Duration::from_secs(3));
        assert!(!limiter.turn(in_one_second()).await, "nobody waits beyond his deadline");
        let patient = Instant::now() + Duration::from_secs(60);
        for _ in 0..5 {
            assert!(limiter.turn(patient).await);
        }
        assert_eq!(start.elapsed(), Duration::from_secs(4));
        tokio::time::sleep(Duration::from_secs(70)).await;
        let later = Instant::now();
        for _ in 0..10 {
            assert!(limiter.turn(in_one_second()).await);
        }
        assert_eq!(later.elapsed(), Duration::ZERO, "a complaint is forgotten after a while");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_requests_are_spread_and_none_is_sent_when_none_is_left() {
        let limiter = Limiter::new(0.0, 4.0);
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        limiter.observe_quota(5000, unix + 3600);
        assert!(limiter.turn(in_one_second()).await);
        limiter.observe_quota(10, unix + 100);
        let start = Instant::now();
        let patient = start + Duration::from_secs(60);
        assert!(limiter.turn(patient).await && limiter.turn(patient).await);
        assert!(start.elapsed() >= Duration::from_secs(9), "{:?}", start.elapsed());
        limiter.observe_quota(0, unix + 200);
        assert!(!limiter.turn(in_one_second()).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_that_is_known_is_never_reached() {
        let limiter = Limiter::new(0.0, 4.0).within(3, Duration::from_secs(60));
        for _ in 0..10 {
            assert!(limiter.turn(in_one_second()).await, "there may be none");
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        limiter.observe_quota(5000, unix + 3600);
        let (start, mut sent) = (Instant::now(), Vec::new());
        for _ in 0..7 {
            assert!(limiter.turn(start + Duration::from_secs(300)).await);
            sent.push(start.elapsed().as_secs());
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(sent, [0, 1, 2, 60, 61, 62, 120]);
        let soon = || Instant::now() + Duration::from_millis(1);
        assert!(limiter.turn(soon()).await, "of the last minute there are only two");
        assert!(!limiter.turn(soon()).await, "nobody waits beyond the deadline");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_of_ones_own_is_kept() {
        let limiter = Limiter::new(10.0, 4.0);
        let start = Instant::now();
        for _ in 0..11 {
            assert!(limiter.turn(start + Duration::from_secs(9)).await);
        }
        assert_eq!(start.elapsed(), Duration::from_secs(1));
    }
}
