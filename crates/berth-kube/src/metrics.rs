//! What Prometheus sees of the loops: client-go's metrics of queues and of leadership, so that dashboards fit.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

/// The metrics of a process's queues and leases, by the name of each; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    depth: Family<Name, Gauge>,
    adds: Family<Name, Counter>,
    retries: Family<Name, Counter>,
    waited: Seconds,
    worked: Seconds,
    running: Running,
    leading: Family<Name, Gauge>,
    slow_paths: Family<Name, Counter>,
}

type Seconds = Family<Name, Histogram, fn() -> Histogram>;

/// From ten nanoseconds to ten seconds, as client-go has it.
fn seconds() -> Seconds {
    Family::new_with_constructor(|| Histogram::new(exponential_buckets(1e-8, 10.0, 10)))
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Name {
    name: Arc<str>,
}

impl Metrics {
    /// Adds client-go's `workqueue_*` and `leader_election_*` to the registry.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            depth: Family::default(),
            adds: Family::default(),
            retries: Family::default(),
            waited: seconds(),
            worked: seconds(),
            running: Running::default(),
            leading: Family::default(),
            slow_paths: Family::default(),
        };
        registry.register("workqueue_depth", "Keys that wait to be reconciled", metrics.depth.clone());
        registry.register("workqueue_adds", "Keys that were put into the queue", metrics.adds.clone());
        registry.register("workqueue_retries", "Keys that failed and come again", metrics.retries.clone());
        registry.register(
            "workqueue_queue_duration_seconds",
            "How long a key waits before it is reconciled",
            metrics.waited.clone(),
        );
        registry.register(
            "workqueue_work_duration_seconds",
            "How long the reconciliation of a key takes",
            metrics.worked.clone(),
        );
        registry.register_collector(Box::new(metrics.running.clone()));
        registry.register(
            "leader_election_master_status",
            "Whether this replica holds the lease",
            metrics.leading.clone(),
        );
        registry.register(
            "leader_election_slowpath",
            "How often a lease had to be read before it could be renewed",
            metrics.slow_paths.clone(),
        );
        metrics
    }

    /// What is measured of the queues of one name.
    pub(crate) fn queue(&self, name: &str) -> Meter {
        let name = Name { name: name.into() };
        self.running.of_all().entry(name.name.clone()).or_default();
        Meter {
            depth: self.depth.get_or_create_owned(&name),
            adds: self.adds.get_or_create_owned(&name),
            retries: self.retries.get_or_create_owned(&name),
            waited: self.waited.get_or_create_owned(&name),
            worked: self.worked.get_or_create_owned(&name),
            running: self.running.clone(),
            name: name.name,
        }
    }

    /// Whether a lease is held, and how often it had to be read to be renewed.
    pub(crate) fn lease(&self, name: &str) -> (Gauge, Counter) {
        let name = Name { name: name.into() };
        (self.leading.get_or_create_owned(&name), self.slow_paths.get_or_create_owned(&name))
    }
}

/// What is measured of one queue.
#[derive(Clone, Debug)]
pub(crate) struct Meter {
    name: Arc<str>,
    pub(crate) depth: Gauge,
    pub(crate) adds: Counter,
    pub(crate) retries: Counter,
    pub(crate) waited: Histogram,
    worked: Histogram,
    running: Running,
}

impl Meter {
    /// Begins to measure the work on a key.
    pub(crate) fn begin(&self) -> WorkTimer {
        let mut queues = self.running.of_all();
        let work = queues.entry(self.name.clone()).or_default();
        let number = work.next;
        work.next += 1;
        work.begun.insert(number, Instant::now());
        WorkTimer { meter: self.clone(), number }
    }
}

/// Measures the work on one key from its beginning until this is dropped.
pub(crate) struct WorkTimer {
    meter: Meter,
    number: u64,
}

impl Drop for WorkTimer {
    fn drop(&mut self) {
        let mut queues = self.meter.running.of_all();
        let begun = queues.get_mut(&self.meter.name).and_then(|work| work.begun.remove(&self.number));
        if let Some(begun) = begun {
            self.meter.worked.observe(begun.elapsed().as_secs_f64());
        }
    }
}

/// The keys that are being worked on right now, by queue; its age is computed when somebody asks.
#[derive(Clone, Debug, Default)]
struct Running {
    queues: Arc<Mutex<BTreeMap<Arc<str>, RunningWork>>>,
}

#[derive(Debug, Default)]
struct RunningWork {
    next: u64,
    begun: HashMap<u64, Instant>,
}

impl Running {
    fn of_all(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, RunningWork>> {
        self.queues.lock()
    }
}

impl Collector for Running {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let now = Instant::now();
        let ages = |work: &RunningWork| -> Vec<f64> {
            work.begun.values().map(|begun| now.saturating_duration_since(*begun).as_secs_f64()).collect()
        };
        let ages: Vec<_> = self.of_all().iter().map(|(name, work)| (name.clone(), ages(work))).collect();
        if ages.is_empty() {
            return Ok(());
        }
        let of_all: fn(&[f64]) -> f64 = |ages| ages.iter().fold(0.0, |sum, age| sum + age);
        let of_longest: fn(&[f64]) -> f64 = |ages| ages.iter().copied().fold(0.0, f64::max);
        for (metric, help, of) in [
            ("workqueue_unfinished_work_seconds", "The age of all work under way, together", of_all),
            (
                "workqueue_longest_running_processor_seconds",
                "The age of the oldest reconciliation under way",
                of_longest,
            ),
        ] {
            let mut encoder = encoder.encode_descriptor(metric, help, None, MetricType::Gauge)?;
            for (name, ages) in &ages {
                ConstGauge::new(of(ages)).encode(encoder.encode_family(&Name { name: name.clone() })?)?;
            }
        }
        Ok(())
    }
}
