//! What a node and its containers take of processor and memory, as `/stats/summary` and metrics.k8s.io have it.
//!
//! Nothing is measured while nobody asks. The rate of processor time is that since the last time somebody asked, if that is
//! neither too short nor too long ago; otherwise it is measured while whoever asks waits.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_kube::{Cache, Cluster};
use berth_runtime::{ContainerId, Runtime, TICK, Usage, blocking};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use parking_lot::Mutex;

/// Over less than this, the kernel's counters say little.
const SHORTEST: Duration = Duration::from_millis(500);
/// What was measured longer ago says nothing of now.
const LONGEST: Duration = Duration::from_secs(90);

/// Measures a node; cheap to clone.
#[derive(Clone)]
pub struct FigureReader {
    runtime: Arc<dyn Runtime>,
    pods: Cache<Pod>,
    last: Arc<Mutex<Option<Measurement>>>,
}

/// What a node and its containers take at one moment.
#[derive(Debug, Clone)]
pub struct Figures {
    /// When it was measured.
    pub time: Timestamp,
    /// Over how long the rates were measured.
    pub window: Duration,
    /// What the whole machine takes.
    pub node: Figure,
    /// The containers that run, each with its pod.
    pub containers: Vec<ContainerFigure>,
}

/// What one of them takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figure {
    /// Processor time so far and memory.
    pub usage: Usage,
    /// Processor time per second, in nanoseconds.
    pub nano_cores: u64,
}

/// A container of a pod, and what it takes.
#[derive(Debug, Clone)]
pub struct ContainerFigure {
    /// The pod that the container belongs to.
    pub pod: Arc<Pod>,
    /// Its name in the pod.
    pub name: String,
    /// What the container takes.
    pub figure: Figure,
}

/// The counters of one moment.
#[derive(Clone)]
struct Measurement {
    at: Instant,
    time: Timestamp,
    node: Usage,
    containers: HashMap<ContainerId, Usage>,
}

impl FigureReader {
    pub(crate) fn new(cluster: &Cluster, node: &str, runtime: &Arc<dyn Runtime>) -> Self {
        Self {
            runtime: runtime.clone(),
            pods: cluster.cache_where(&format!("spec.nodeName={node}")),
            last: Arc::default(),
        }
    }

    /// Measures the node and its containers.
    pub async fn read(&self) -> Figures {
        let last = self.last.lock().clone();
        let last = match last.filter(|last| last.at.elapsed() < LONGEST) {
            Some(last) => last,
            None => self.measure().await,
        };
        let wait = SHORTEST.saturating_sub(last.at.elapsed());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        let now = self.measure().await;
        *self.last.lock() = Some(now.clone());
        self.figures(&last, &now)
    }

    async fn measure(&self) -> Measurement {
        let node = blocking(machine).await;
        let containers = self.runtime.usages().await;
        Measurement {
            at: Instant::now(),
            time: Timestamp::now(),
            node,
            containers: containers.into_iter().collect(),
        }
    }

    fn figures(&self, last: &Measurement, now: &Measurement) -> Figures {
        let window = now.at.saturating_duration_since(last.at);
        let figure = |usage: Usage, before: Option<&Usage>| Figure {
            usage,
            // One that was started since then has taken all of it since then.
            nano_cores: rate(usage.cpu.saturating_sub(before.map_or(0, |before| before.cpu)), window),
        };
        let pods: HashMap<String, Arc<Pod>> =
            self.pods.list().into_iter().filter_map(|pod| Some((pod.uid()?, pod))).collect();
        let mut containers: Vec<ContainerFigure> = now
            .containers
            .iter()
            .filter_map(|(id, usage)| {
                let figure = figure(*usage, last.containers.get(id));
                Some(ContainerFigure { pod: pods.get(&id.pod_uid)?.clone(), name: id.name.clone(), figure })
            })
            .collect();
        containers.sort_by_key(|container| (container.pod.uid(), container.name.clone()));
        Figures { time: now.time, window, node: figure(now.node, Some(&last.node)), containers }
    }
}

/// So many nanoseconds of processor time within this window, per second.
fn rate(nanoseconds: u64, window: Duration) -> u64 {
    let window = window.as_nanos().max(1);
    u64::try_from(u128::from(nanoseconds) * 1_000_000_000 / window).unwrap_or(u64::MAX)
}

/// What the whole machine takes.
fn machine() -> Usage {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (cpu, processes) = processor_time(&read("/proc/stat"));
    let (memory, working_set, anonymous) = memory(&read("/proc/meminfo"));
    Usage { cpu, memory, working_set, anonymous, pids: processes }
}

/// The time in which the processors were not idle, and how many processes want to run.
fn processor_time(stat: &str) -> (u64, u64) {
    let fields = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.into_iter().flat_map(str::split_ascii_whitespace).filter_map(|field| field.parse::<u64>().ok())
    };
    // User, nice, system, idle, waiting, interrupts twice, stolen; guests are counted by user and nice.
    let busy: u64 =
        fields("cpu").enumerate().filter(|(at, _)| !matches!(at, 3 | 4 | 8..)).map(|(_, time)| time).sum();
    (busy * TICK, fields("procs_running").sum())
}

/// Memory in use with files, without files that can be dropped, and without any.
fn memory(meminfo: &str) -> (u64, u64, u64) {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    };
    let total = bytes("MemTotal");
    (total.saturating_sub(bytes("MemFree")), total.saturating_sub(bytes("MemAvailable")), bytes("AnonPages"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_of_the_machine_are_read() {
        let stat = "cpu  100 10 50 9999 77 5 5 2 40 4\ncpu0 1 1 1 1\nprocs_running 3\n";
        assert_eq!(processor_time(stat), (1_720_000_000, 3));
        let meminfo = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:   400 kB\nAnonPages:  50 kB\n";
        assert_eq!(memory(meminfo), (900 * 1024, 600 * 1024, 50 * 1024));
        assert_eq!(memory(""), (0, 0, 0));
        let machine = machine();
        assert!(machine.cpu > 0 && machine.working_set > 0, "{machine:?}");
    }

    #[test]
    fn a_rate_is_processor_time_per_second() {
        assert_eq!(rate(500_000_000, Duration::from_millis(500)), 1_000_000_000);
        assert_eq!(rate(1, Duration::ZERO), 1_000_000_000);
    }
}
