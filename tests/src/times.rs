//! How long something took, many times.

use std::time::Duration;

use crate::table::Quantity;

/// Times of the same thing.
#[derive(Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Adds one measurement to the others.
    pub fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The time within which so many of a hundred were done.
    pub fn percentile(&self, percent: usize) -> Quantity {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        seconds(sorted.get(rank - 1).copied().unwrap_or_default())
    }
}

/// A time as a figure.
pub fn seconds(time: Duration) -> Quantity {
    Quantity::Seconds(time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Times, seconds};

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let times = Times((1..=50).rev().map(Duration::from_millis).collect());
        let at = |percent| times.percentile(percent);
        let is = |millis| seconds(Duration::from_millis(millis));
        assert_eq!([at(50), at(90), at(100)], [is(25), is(45), is(50)]);
        assert_eq!(Times::default().percentile(50), is(0));
    }
}
