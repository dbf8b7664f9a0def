//! The health monitor's flags, and its row.

use std::time::Duration;

use berth_sidecars::driver::HealthCalls;
use berth_sidecars::health_monitor;
use clap::{Args, FromArgMatches as _};

use super::flags::Work;
use super::{Scope, Sidecar, go, over_driver};

pub(super) const SIDECAR: Sidecar = Sidecar {
    name: "csi-external-health-monitor-controller",
    short_name: "health-monitor",
    replaces: "external-health-monitor-controller",
    about: "Report abnormal volumes as events",
    scope: Scope::Driver,
    lease: "external-health-monitor-leader-",
    flags: Flags::augment_args,
    missing: |identity| {
        let none =
            "LIST_VOLUME_HEALTH or GET_VOLUME_HEALTH, nor VOLUME_CONDITION with LIST_VOLUMES or GET_VOLUME";
        HealthCalls::of(identity).is_none().then_some(none)
    },
    configure: |matches, _, _| {
        Ok(over_driver(Flags::from_arg_matches(matches)?.options(), health_monitor::run))
    },
};

/// How often volumes' health is asked for, and whether nodes are watched.
#[derive(Debug, Args)]
#[command(next_help_heading = "Health monitor")]
pub(super) struct Flags {
    /// How often to ask for each volume's health, if the driver cannot list it
    #[arg(long, default_value = "1m", value_parser = go::positive_duration, value_name = "DURATION")]
    monitor_interval: Duration,

    /// How often to ask for all volumes' health, if the driver can list it
    #[arg(long, default_value = "5m", value_parser = go::positive_duration, value_name = "DURATION")]
    list_volumes_interval: Duration,

    /// Emit events on the claims of a node's pods when the node fails
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    enable_node_watcher: bool,

    #[command(flatten)]
    work: Work,
}

impl Flags {
    pub(super) fn options(&self) -> health_monitor::Options {
        let defaults = health_monitor::Options::default();
        health_monitor::Options {
            timeout: self.work.timeout.unwrap_or(defaults.timeout),
            workers: self.work.worker_threads.unwrap_or(defaults.workers),
            interval: self.monitor_interval,
            list_interval: self.list_volumes_interval,
            node_watcher: self.enable_node_watcher,
            ..defaults
        }
    }
}
