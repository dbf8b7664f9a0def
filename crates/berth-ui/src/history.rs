//! How full volumes were: a few hundred points per volume, coarser the longer they go back.

use std::collections::HashMap;

use berth_kube::Key;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::state::Usage;

/// How many points a volume has at most.
const POINTS: usize = 240;

/// The usage of all volumes over time.
#[derive(Debug, Default)]
pub(crate) struct History {
    volumes: HashMap<Key, Vec<(i64, u64)>>,
}

impl History {
    /// Takes in a measurement of all volumes. A volume that did not change gets no point, but its last one moves on.
    pub(crate) fn take<'a>(&mut self, now: Timestamp, all: impl Iterator<Item = (&'a Key, &'a Usage)>) {
        for (key, usage) in all {
            let points = self.volumes.entry(key.clone()).or_default();
            let still =
                points.len() > 1 && points[points.len() - 2..].iter().all(|point| point.1 == usage.used);
            if still && let Some(last) = points.last_mut() {
                last.0 = now.as_millisecond();
                continue;
            }
            points.push((now.as_millisecond(), usage.used));
            if points.len() > POINTS {
                thin(points);
            }
        }
    }

    /// Forgets volumes that are gone.
    pub(crate) fn keep(&mut self, exists: impl Fn(&Key) -> bool) {
        self.volumes.retain(|key, _| exists(key));
    }

    /// Time in milliseconds and bytes, oldest first.
    pub(crate) fn of(&self, key: &Key) -> Value {
        json!(self.volumes.get(key).map(Vec::as_slice).unwrap_or_default())
    }

    /// How many bytes more there are every hour, by what was measured over at least ten minutes; `None` if that is not known.
    pub(crate) fn rate(&self, key: &Key) -> Option<f64> {
        let points = self.volumes.get(key)?;
        let ((begin, before), (end, after)) = (points.first()?, points.last()?);
        let hours = f64::from(i32::try_from((end - begin) / 1000).ok()?) / 3600.0;
        #[expect(clippy::cast_precision_loss, reason = "a rate is shown with two digits")]
        (hours > 1.0 / 6.0).then(|| (*after as f64 - *before as f64) / hours)
    }
}

/// Keeps every second point of the older half, and the newest.
fn thin(points: &mut Vec<(i64, u64)>) {
    let half = points.len() / 2;
    let mut number = 0;
    points.retain(|_| {
        number += 1;
        number > half || number % 2 == 1
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn points_stay_few_and_the_first_and_last_are_kept() {
        let mut history = History::default();
        let key = Key::new("a", "b");
        for second in 0..5_000 {
            let usage = Usage { used: u64::try_from(second).unwrap(), capacity: 10_000, ..Usage::default() };
            history.take(at(second), [(&key, &usage)].into_iter());
        }
        let points = &history.volumes[&key];
        assert!(points.len() <= POINTS && points.len() > POINTS / 2);
        assert_eq!((points[0], points[points.len() - 1]), ((0, 0), (4_999_000, 4_999)));
        assert!(points.is_sorted());
        assert!((history.rate(&key).unwrap() - 3600.0).abs() < 1.0);
    }

    #[test]
    fn a_volume_that_does_not_change_takes_no_room() {
        let mut history = History::default();
        let key = Key::new("a", "b");
        for second in 0..1_000 {
            history.take(at(second), [(&key, &Usage { used: 7, ..Usage::default() })].into_iter());
        }
        assert_eq!(history.volumes[&key], [(0, 7), (999_000, 7)]);
        history.keep(|_| false);
        assert_eq!(history.of(&key), json!([]));
    }
}
