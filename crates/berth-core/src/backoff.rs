//! Pauses between the attempts of something that fails.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

/// The pauses between repeated attempts: `first`, then twice as long each time, up to `longest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The pause after the first failure.
    pub first: Duration,
    /// The longest pause, without the random part that [`Backoff::pause`] adds.
    pub longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(5), longest: Duration::from_secs(120) }
    }
}

impl Backoff {
    /// Returns the pause after the `attempt`th failure in a row, counted from 1, without a random part.
    pub fn exact_pause(&self, attempt: u32) -> Duration {
        let factor = 1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }

    /// Returns the pause after the `attempt`th failure in a row, counted from 1, lengthened by a random part of up to a
    /// quarter, so that many callers that failed at the same time do not all try again at the same time.
    pub fn pause(&self, attempt: u32) -> Duration {
        let pause = self.exact_pause(attempt);
        pause + pause.mul_f64(random_fraction() / 4.0)
    }
}

/// Returns a number from 0 to 1 that differs each time. It is good enough to spread retries, and for nothing else.
pub fn random_fraction() -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a fraction of 2^64 needs no more bits than a float has")]
    let fraction = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let backoff = Backoff { first: Duration::from_millis(10), longest: Duration::from_millis(50) };
        let pauses: Vec<_> = (1..=5).map(|attempt| backoff.exact_pause(attempt).as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 50, 50]);
        assert_eq!(backoff.exact_pause(u32::MAX), backoff.longest);
    }

    #[test]
    fn the_random_part_is_at_most_a_quarter() {
        let backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(1) };
        for _ in 0..100 {
            let pause = backoff.pause(1);
            assert!(pause >= Duration::from_millis(100) && pause <= Duration::from_millis(125), "{pause:?}");
        }
    }
}
