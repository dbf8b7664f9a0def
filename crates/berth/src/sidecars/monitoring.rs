//! The flags of the health monitor, and what they come to.

use std::time::Duration;

use berth_sidecars::health_monitor;
use clap::Args;

use super::go;
use super::options::Work;

/// How often volumes' health is asked for, and whether nodes are watched.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Health monitor")]
pub(crate) struct Monitoring {
    /// How often to ask for each volume's health, if the driver cannot list it
    #[arg(long, default_value = "1m", value_parser = go::positive_duration, value_name = "DURATION")]
    monitor_interval: Duration,

    /// How often to ask for all volumes' health, if the driver can list it
    #[arg(long, default_value = "5m", value_parser = go::positive_duration, value_name = "DURATION")]
    list_volumes_interval: Duration,

    /// Tell of nodes that fail on the claims that their pods use
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    enable_node_watcher: bool,
}

impl Monitoring {
    pub(crate) fn options(&self, work: &Work) -> health_monitor::Options {
        let defaults = health_monitor::Options::default();
        health_monitor::Options {
            timeout: work.timeout.unwrap_or(defaults.timeout),
            workers: work.worker_threads.unwrap_or(defaults.workers),
            interval: self.monitor_interval,
            list_interval: self.list_volumes_interval,
            node_watcher: self.enable_node_watcher,
            ..defaults
        }
    }
}
