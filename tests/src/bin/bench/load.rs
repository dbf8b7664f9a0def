//! A number of callers that each make one call after the other, until all are made or the time is up.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::task::JoinSet;
use tonic::Status;

use crate::table::Quantity;

/// How many calls are under way at once, where it is not said otherwise.
pub(crate) const CALLERS: usize = 8;

/// What came of a load.
#[derive(Debug)]
pub(crate) struct Run<T> {
    /// From the first call to the last answer.
    pub(crate) took: Duration,
    /// The answers, in the order they came.
    pub(crate) answers: Vec<T>,
    /// How long each call took.
    pub(crate) latencies: Latencies,
}

/// How long calls took.
#[derive(Debug, Default)]
pub(crate) struct Latencies(Vec<Duration>);

/// Makes the calls of the given numbers; the first refusal ends it all.
pub(crate) async fn run<T, C, F>(
    callers: usize,
    calls: Range<usize>,
    limit: Duration,
    call: C,
) -> Result<Run<T>>
where
    T: Send + 'static,
    C: Fn(usize) -> F + Clone + Send + 'static,
    F: Future<Output = Result<T, Status>> + Send,
{
    let next = Arc::new(AtomicUsize::new(calls.start));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (next, call) = (next.clone(), call.clone());
        tasks.spawn(async move {
            let mut done = Vec::new();
            while start.elapsed() < limit {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= calls.end {
                    break;
                }
                let began = Instant::now();
                let answer = call(number).await?;
                done.push((began.elapsed(), answer));
            }
            Ok::<_, Status>(done)
        });
    }
    let mut all = Vec::new();
    while let Some(done) = tasks.join_next().await {
        all.extend(done.context("a caller panicked")??);
    }
    let took = start.elapsed();
    let (latencies, answers) = all.into_iter().unzip();
    Ok(Run { took, answers, latencies: Latencies(latencies) })
}

impl<T> Default for Run<T> {
    fn default() -> Self {
        Self { took: Duration::ZERO, answers: Vec::new(), latencies: Latencies::default() }
    }
}

impl<T> Run<T> {
    /// Adds what another load came to, as if one had gone on.
    pub(crate) fn append(&mut self, other: Self) {
        self.took += other.took;
        self.answers.extend(other.answers);
        self.latencies.0.extend(other.latencies.0);
    }

    /// How many calls were answered per second.
    pub(crate) fn rate(&self) -> f64 {
        rate(self.answers.len(), self.took)
    }
}

impl Latencies {
    /// Makes one call and notes how long it took.
    pub(crate) async fn time<T>(
        &mut self,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let began = Instant::now();
        let answer = call.await;
        self.add(began.elapsed());
        answer
    }

    /// Notes how long something took.
    pub(crate) fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The time within which so many of a hundred calls were answered.
    pub(crate) fn percentile(&self, percent: usize) -> Quantity {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        Quantity::Seconds(sorted.get(rank - 1).copied().unwrap_or_default().as_secs_f64())
    }
}

/// The median and the worst but one of a hundred.
impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} / {}", self.percentile(50), self.percentile(99))
    }
}

/// So many in that time, per second.
pub(crate) fn rate(count: usize, time: Duration) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / time.as_secs_f64().max(f64::EPSILON)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Latencies, run};

    #[tokio::test]
    async fn every_call_is_made_once_and_a_refusal_ends_the_load() {
        let done = run(3, 5..105, Duration::MAX, |number| async move { Ok(number) }).await.unwrap();
        let mut answers = done.answers;
        answers.sort_unstable();
        assert_eq!(answers, (5..105).collect::<Vec<_>>());
        let refused = run(3, 0..10, Duration::MAX, |number| async move {
            if number == 7 { Err(tonic::Status::internal("no")) } else { Ok(()) }
        });
        assert!(refused.await.is_err());
        let late = run(3, 0..10, Duration::ZERO, |_| async { Ok(()) }).await.unwrap();
        assert!(late.answers.is_empty());
    }

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let latencies = Latencies((1..=200).rev().map(Duration::from_millis).collect());
        assert_eq!(latencies.to_string(), "100.0 ms / 198.0 ms");
        assert_eq!(Latencies::default().to_string(), "0 µs / 0 µs");
    }
}
