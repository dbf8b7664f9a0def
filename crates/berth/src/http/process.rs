//! What Prometheus sees of the process itself, under the names that every client library has.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// The kernel reports CPU times in hundredths of a second, whatever it counts in itself.
const TICKS: f64 = 100.0;

/// Metrics of this process, read from /proc at each scrape.
#[derive(Debug)]
pub(crate) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let read = |name: &str| fs::read_to_string(format!("/proc/{name}")).unwrap_or_default();
        let state = ProcessState {
            stat: read("self/stat"),
            status: read("self/status"),
            limits: read("self/limits"),
            machine: read("stat"),
            files: fs::read_dir("/proc/self/fd").map_or(0, Iterator::count),
        };
        if let Some(seconds) = state.cpu_seconds() {
            let help = "Processor time used, by the program and by the kernel for it";
            encode_metric(&mut encoder, "process_cpu_seconds", help, &ConstCounter::new(seconds))?;
        }
        for (name, help, value) in state.gauges() {
            if let Some(value) = value {
                encode_metric(&mut encoder, name, help, &ConstGauge::new(value))?;
            }
        }
        Ok(())
    }
}

fn encode_metric(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> Result<(), fmt::Error> {
    metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
}

/// What the kernel says.
#[derive(Default)]
struct ProcessState {
    stat: String,
    status: String,
    limits: String,
    machine: String,
    files: usize,
}

impl ProcessState {
    /// The n-th field of stat, counted as in its manual; those after the program's name, which may hold anything.
    fn field(&self, number: usize) -> Option<f64> {
        let (_, fields) = self.stat.rsplit_once(')')?;
        fields.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
    }

    fn cpu_seconds(&self) -> Option<f64> {
        Some((self.field(14)? + self.field(15)?) / TICKS)
    }

    fn start(&self) -> Option<f64> {
        let boot = self.machine.lines().find_map(|line| line.strip_prefix("btime "))?;
        Some(boot.trim().parse::<f64>().ok()? + self.field(22)? / TICKS)
    }

    fn memory(&self, name: &str) -> Option<f64> {
        let line = self.status.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: f64 = line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes * 1024.0)
    }

    fn limit(&self, name: &str) -> Option<f64> {
        let line = self.limits.lines().find_map(|line| line.strip_prefix(name))?;
        match line.split_whitespace().next()? {
            #[expect(clippy::cast_precision_loss, reason = "no limit is a number as large as it gets")]
            "unlimited" => Some(u64::MAX as f64),
            number => number.parse().ok(),
        }
    }

    fn gauges(&self) -> [(&'static str, &'static str, Option<f64>); 6] {
        #[expect(clippy::cast_precision_loss, reason = "nobody has so many files open")]
        let files = (self.files > 0).then_some(self.files as f64);
        [
            ("process_start_time_seconds", "When the process started, since 1970", self.start()),
            ("process_resident_memory_bytes", "Memory in use", self.memory("VmRSS")),
            ("process_virtual_memory_bytes", "Address space in use", self.memory("VmSize")),
            (
                "process_virtual_memory_max_bytes",
                "Address space that may be used",
                self.limit("Max address space"),
            ),
            ("process_open_fds", "Open files", files),
            ("process_max_fds", "Files that may be open", self.limit("Max open files")),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        let stat =
            "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 4 0 1000 9000 3 18446744073709551615 1";
        let state = ProcessState {
            stat: stat.to_owned(),
            status: "Name:\ta\nVmSize:\t   2048 kB\nVmRSS:\t      12 kB\n".to_owned(),
            limits: "Limit                     Soft Limit           Hard Limit           Units\n\
                     Max open files            1024                 524288               files\n\
                     Max address space         unlimited            unlimited            bytes\n"
                .to_owned(),
            machine: "cpu  1 2 3\nbtime 1700000000\nprocesses 9\n".to_owned(),
            files: 5,
        };
        assert_eq!(state.cpu_seconds(), Some(3.0));
        let values = state.gauges().map(|(_, _, value)| value);
        assert_eq!(
            values,
            [
                Some(1_700_000_010.0),
                Some(12_288.0),
                Some(2_097_152.0),
                Some(18_446_744_073_709_551_615.0),
                Some(5.0),
                Some(1024.0),
            ]
        );
        assert!(ProcessState::default().gauges().iter().all(|(_, _, value)| value.is_none()));
    }

    #[test]
    fn this_process_has_the_usual_names_of_metrics() {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(Process));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for name in [
            "process_cpu_seconds_total ",
            "process_start_time_seconds ",
            "process_resident_memory_bytes ",
            "process_virtual_memory_bytes ",
            "process_virtual_memory_max_bytes ",
            "process_open_fds ",
            "process_max_fds ",
        ] {
            assert!(text.lines().any(|line| line.starts_with(name)), "{name} is not in\n{text}");
        }
    }
}
