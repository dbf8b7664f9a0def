//! How often drivers are called, counted from the calls that `berth up` keeps: per minute for an hour, and per driver.

use std::collections::{BTreeMap, HashMap, VecDeque};

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::records::CallRecord;

/// How many minutes are counted.
const MINUTES: i64 = 60;
/// How many durations of a driver are remembered, for their 95th percentile.
const REMEMBERED: usize = 512;

/// How many calls there were, by minute and by driver.
#[derive(Debug, Default)]
pub(crate) struct CallCounts {
    /// Calls and failures by minute since the epoch.
    minutes: BTreeMap<i64, (u32, u32)>,
    drivers: HashMap<String, Driver>,
    /// Whether calls can be seen here at all.
    known: bool,
}

#[derive(Debug, Default)]
struct Driver {
    recent: VecDeque<(Timestamp, bool, u64)>,
}

impl CallCounts {
    /// Nothing counted yet; `known` says whether calls can be seen here at all.
    pub(crate) fn new(known: bool) -> Self {
        Self { known, ..Self::default() }
    }

    /// Adds calls to the counts.
    pub(crate) fn take(&mut self, calls: &[CallRecord]) {
        for call in calls {
            let failed = call.code != "OK";
            let minute = self.minutes.entry(call.time.as_second() / 60).or_default();
            minute.0 += 1;
            minute.1 += u32::from(failed);
            let driver = self.drivers.entry(call.driver.clone()).or_default();
            driver.recent.push_back((call.time, failed, call.duration_us));
            if driver.recent.len() > REMEMBERED {
                driver.recent.pop_front();
            }
        }
        let newest = self.minutes.keys().next_back().copied().unwrap_or_default();
        self.minutes.retain(|minute, _| *minute > newest - 2 * MINUTES);
    }

    /// Calls and failures of each of the last sixty minutes, the oldest first; null where calls cannot be seen.
    pub(super) fn per_minute(&self, now: Timestamp) -> Value {
        if !self.known {
            return Value::Null;
        }
        let last = now.as_second() / 60;
        let of = |minute: i64| self.minutes.get(&minute).copied().unwrap_or_default();
        json!((last - MINUTES + 1..=last).map(of).collect::<Vec<_>>())
    }

    /// What is known of one driver; null where calls cannot be seen.
    pub(super) fn of(&self, driver: &str, now: Timestamp) -> Value {
        let Some(driver) = self.drivers.get(driver).filter(|_| self.known) else { return Value::Null };
        let begin = now.as_second() - 3600;
        let recent: Vec<_> = driver.recent.iter().filter(|call| call.0.as_second() >= begin).collect();
        let mut took: Vec<u64> = recent.iter().map(|call| call.2).collect();
        took.sort_unstable();
        let p95 = took.get((took.len() * 95 / 100).min(took.len().saturating_sub(1)));
        json!({
            "count": recent.len(),
            "failed": recent.iter().filter(|call| call.1).count(),
            "p95": p95.map(|us| micros(*us)),
        })
    }
}

/// Milliseconds with a fraction.
#[expect(clippy::cast_precision_loss, reason = "it is shown with two digits")]
pub(super) fn micros(us: u64) -> f64 {
    us as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_minute_and_by_driver() {
        let at = |text: &str, code: &str, took: u64| CallRecord {
            time: text.parse().unwrap(),
            driver: "a".to_owned(),
            code: code.to_owned(),
            duration_us: took,
            ..CallRecord::default()
        };
        let mut counts = CallCounts::new(true);
        counts.take(&[
            at("2026-01-01T00:00:10Z", "OK", 1000),
            at("2026-01-01T00:00:20Z", "INTERNAL", 3000),
            at("2026-01-01T00:01:20Z", "OK", 2000),
        ]);
        let now = "2026-01-01T00:01:30Z".parse().unwrap();
        let minutes = counts.per_minute(now);
        assert_eq!((minutes[58].clone(), minutes[59].clone()), (json!([2, 1]), json!([1, 0])));
        assert_eq!(counts.of("a", now), json!({ "count": 3, "failed": 1, "p95": 3.0 }));
        assert_eq!(counts.of("b", now), Value::Null);
    }
}
