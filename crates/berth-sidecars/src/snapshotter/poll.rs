//! How long to wait before a snapshot that is taken, but not ready, is asked for again.

use std::time::Duration;

/// An eighth of its age, within bounds: quick for quick drivers, rare for those that upload for hours.
pub(super) fn pause(age: Duration, (least, most): (Duration, Duration)) -> Duration {
    (age / 8).clamp(least, most.max(least))
}

/// The age of what was created then, both in nanoseconds since 1970.
pub(super) fn age(created: Option<i64>, now: i64) -> Duration {
    let nanos = created.map_or(0, |created| now.saturating_sub(created));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_age_of_the_snapshot_within_bounds() {
        let bounds = (Duration::from_secs(1), Duration::from_mins(1));
        for (age, expected) in [(0, 1), (4, 1), (16, 2), (80, 10), (3600, 60)] {
            assert_eq!(pause(Duration::from_secs(age), bounds), Duration::from_secs(expected), "{age}");
        }
    }

    #[test]
    fn a_clock_that_is_behind_gives_no_age() {
        assert_eq!(age(Some(10), 5), Duration::ZERO);
        assert_eq!(age(None, 5), Duration::ZERO);
        assert_eq!(age(Some(5), 10), Duration::from_nanos(5));
    }
}
