//! How often drivers are called, counted from the calls that `berth up` keeps: per minute for an hour, and per driver.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use crate::records::{CALLS, CallRecord, Tail};

/// How many minutes are counted.
const MINUTES: i64 = 60;
/// How much of the account of calls is read at the start, in bytes.
const READ: u64 = 4 << 20;
/// Over how many seconds the rate of calls is taken.
const SECONDS: i64 = 10;
/// How many durations of a driver are remembered, for their 95th percentile.
const REMEMBERED: usize = 512;

/// How many calls there were, by minute and by driver.
#[derive(Debug, Default)]
pub(crate) struct CallCounts {
    /// Calls and failures by minute since the epoch.
    minutes: BTreeMap<i64, (u32, u32)>,
    /// The same by second, of the last few.
    seconds: BTreeMap<i64, (u32, u32)>,
    drivers: HashMap<String, Driver>,
    /// Whether calls can be seen here at all.
    known: bool,
    /// Where further ones come from.
    tail: Option<Tail>,
}

/// What is known of the calls of one driver.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct CallFigures {
    pub(crate) count: usize,
    pub(crate) failed: usize,
    /// Below this many milliseconds are 95 of 100 calls.
    pub(crate) p95: Option<f64>,
}

#[derive(Debug, Default)]
struct Driver {
    recent: VecDeque<(Timestamp, bool, u64)>,
}

impl CallCounts {
    /// Counts the calls that `berth up` keeps in a directory, if there is one; without it calls cannot be seen.
    pub(crate) fn follow(records: Option<&Path>) -> Self {
        let tail = records.map(|directory| Tail::new(directory.join(CALLS), READ));
        Self { known: tail.is_some(), tail, ..Self::default() }
    }

    /// Counts what was called since the last time.
    pub(crate) fn read_on(&mut self) {
        let calls = self.tail.as_mut().map(Tail::next::<CallRecord>).unwrap_or_default();
        self.take(&calls);
    }

    /// Adds calls to the counts.
    fn take(&mut self, calls: &[CallRecord]) {
        for call in calls {
            let failed = call.code != "OK";
            let second = call.time.as_second();
            for counts in
                [self.minutes.entry(second / 60).or_default(), self.seconds.entry(second).or_default()]
            {
                counts.0 += 1;
                counts.1 += u32::from(failed);
            }
            let driver = self.drivers.entry(call.driver.clone()).or_default();
            driver.recent.push_back((call.time, failed, call.duration_us));
            if driver.recent.len() > REMEMBERED {
                driver.recent.pop_front();
            }
        }
        let newest = self.minutes.keys().next_back().copied().unwrap_or_default();
        self.minutes.retain(|minute, _| *minute > newest - 2 * MINUTES);
        let newest = self.seconds.keys().next_back().copied().unwrap_or_default();
        self.seconds.retain(|second, _| *second > newest - 2 * SECONDS);
    }

    /// Calls and failures of each of the last sixty minutes, the oldest first; null where calls cannot be seen.
    pub(crate) fn per_minute(&self, now: Timestamp) -> Value {
        if !self.known {
            return Value::Null;
        }
        let last = now.as_second() / 60;
        let of = |minute: i64| self.minutes.get(&minute).copied().unwrap_or_default();
        json!((last - MINUTES + 1..=last).map(of).collect::<Vec<_>>())
    }

    /// The calls of one driver in the last hour; `None` where calls cannot be seen.
    pub(crate) fn of(&self, driver: &str, now: Timestamp) -> Option<CallFigures> {
        let driver = self.drivers.get(driver).filter(|_| self.known)?;
        let begin = now.as_second() - 3600;
        let recent: Vec<_> = driver.recent.iter().filter(|call| call.0.as_second() >= begin).collect();
        let mut took: Vec<u64> = recent.iter().map(|call| call.2).collect();
        took.sort_unstable();
        let p95 = took.get((took.len() * 95 / 100).min(took.len().saturating_sub(1)));
        Some(CallFigures {
            count: recent.len(),
            failed: recent.iter().filter(|call| call.1).count(),
            p95: p95.map(|us| micros(*us)),
        })
    }

    /// Calls and failures per second, over the last ten seconds that are over; `None` where calls cannot be seen.
    pub(crate) fn per_second(&self, now: Timestamp) -> Option<(f64, f64)> {
        let last = now.as_second();
        let of = self.seconds.range(last - SECONDS..last).map(|(_, counts)| *counts);
        let (calls, failed) = of.fold((0, 0), |(calls, failed), of| (calls + of.0, failed + of.1));
        let rate = |count: u32| f64::from(count) / f64::from(u8::try_from(SECONDS).unwrap_or(u8::MAX));
        self.known.then(|| (rate(calls), rate(failed)))
    }
}

/// Milliseconds with a fraction.
#[expect(clippy::cast_precision_loss, reason = "it is shown with two digits")]
pub(crate) fn micros(us: u64) -> f64 {
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
        let mut counts = CallCounts { known: true, ..CallCounts::default() };
        counts.take(&[
            at("2026-01-01T00:00:10Z", "OK", 1000),
            at("2026-01-01T00:00:20Z", "INTERNAL", 3000),
            at("2026-01-01T00:01:20Z", "OK", 2000),
        ]);
        let now = "2026-01-01T00:01:30Z".parse().unwrap();
        let minutes = counts.per_minute(now);
        assert_eq!((minutes[58].clone(), minutes[59].clone()), (json!([2, 1]), json!([1, 0])));
        assert_eq!(counts.of("a", now), Some(CallFigures { count: 3, failed: 1, p95: Some(3.0) }));
        assert_eq!(counts.of("b", now), None);
        assert_eq!(counts.per_second(now), Some((0.1, 0.0)));
        assert_eq!(CallCounts::follow(None).per_second(now), None);
    }
}
