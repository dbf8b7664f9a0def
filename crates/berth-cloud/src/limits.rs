//! How many calls are taken in which time, as the provider's rate limits have it.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;

/// Calls in a window of time that begins with the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    calls: u64,
    length: Duration,
}

/// A rate limit: several windows, or none at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RateLimit(Vec<Window>);

impl std::str::FromStr for RateLimit {
    type Err = String;

    /// Reads a limit such as `250/m,5000/h`, or `none`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::default());
        }
        let window = |part: &str| {
            let (calls, unit) = part.trim().split_once('/')?;
            let length = match unit {
                "s" => Duration::from_secs(1),
                "m" => Duration::from_secs(60),
                "h" => Duration::from_secs(3600),
                _ => return None,
            };
            Some(Window { calls: calls.parse().ok().filter(|calls| *calls > 0)?, length })
        };
        let windows: Option<Vec<_>> = text.split(',').map(window).collect();
        windows.map(Self).ok_or_else(|| format!("`{text}` is no rate limit such as 250/m,5000/h or none"))
    }
}

/// What is left of the longest window, as the answer's headers tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    /// When the window ends.
    pub(crate) reset: Timestamp,
    /// For how long nothing is taken any more; `None` if this call was.
    pub(crate) retry_after: Option<Duration>,
}

/// Counts calls by key against the limit.
pub(crate) struct Limiter {
    limit: Mutex<RateLimit>,
    counts: Mutex<HashMap<String, Vec<(Timestamp, u64)>>>,
}

impl Limiter {
    pub(crate) fn new(limit: RateLimit) -> Self {
        Self { limit: Mutex::new(limit), counts: Mutex::default() }
    }

    /// Sets another limit and begins to count anew.
    pub(crate) fn set(&self, limit: RateLimit) {
        *self.limit.lock() = limit;
        self.counts.lock().clear();
    }

    /// Counts a call; `None` where there is no limit.
    pub(crate) fn take(&self, key: &str, now: Timestamp) -> Option<Allowance> {
        let limit = self.limit.lock().0.clone();
        let mut counts = self.counts.lock();
        let windows =
            counts.entry(key.to_owned()).or_insert_with(|| limit.iter().map(|_| (now, 0)).collect());
        let mut retry_after = None;
        for (window, (start, count)) in limit.iter().zip(windows.iter_mut()) {
            if now.duration_since(*start) >= window.length.try_into().unwrap_or(jiff::SignedDuration::MAX) {
                (*start, *count) = (now, 0);
            }
            if *count >= window.calls {
                let left =
                    Duration::try_from((*start + window.length).duration_since(now)).unwrap_or_default();
                retry_after = retry_after.max(Some(left));
            }
        }
        if retry_after.is_none() {
            for (_, count) in windows.iter_mut() {
                *count += 1;
            }
        }
        let longest = limit.iter().zip(windows.iter()).max_by_key(|(window, _)| window.length);
        longest.map(|(window, (start, count))| Allowance {
            limit: window.calls,
            remaining: window.calls.saturating_sub(*count),
            reset: *start + window.length,
            retry_after,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_beyond_the_limit_wait_for_the_end_of_the_window() {
        let limiter = Limiter::new("2/m,3/h".parse().unwrap());
        let start = Timestamp::UNIX_EPOCH;
        let take = |seconds: u64| limiter.take("", start + Duration::from_secs(seconds)).unwrap();
        assert_eq!((take(0).remaining, take(1).remaining), (2, 1));
        assert_eq!(take(10).retry_after, Some(Duration::from_secs(50)));
        assert_eq!(take(60).retry_after, None);
        assert_eq!(take(61).retry_after, Some(Duration::from_secs(3539)));
        assert_eq!(take(61).reset, start + Duration::from_secs(3600));
        assert_eq!(limiter.take("other", start).unwrap().remaining, 2);
        limiter.set("none".parse().unwrap());
        assert_eq!(limiter.take("", start), None);
        assert!("5/d".parse::<RateLimit>().is_err() && "0/s".parse::<RateLimit>().is_err());
    }
}
