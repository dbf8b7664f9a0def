//! The snapshot controller's flags, and its row.

use std::sync::Arc;

use berth_sidecars::snapshot_controller::{self, Metrics};
use clap::{Args, FromArgMatches as _};

use super::flags::{Conversion, Work};
use super::{Scope, Sidecar, go};

pub(super) const SIDECAR: Sidecar = Sidecar {
    name: "snapshot-controller",
    short_name: "snapshot-controller",
    replaces: "snapshot-controller of external-snapshotter",
    about: "Bind VolumeSnapshots to their contents",
    scope: Scope::Cluster,
    lease: "snapshot-controller-leader",
    flags: Flags::augment_args,
    missing: |_| None,
    configure: |matches, _, registry| {
        let options = Flags::from_arg_matches(matches)?.options()?;
        let options = snapshot_controller::Options { metrics: Metrics::register(registry), ..options };
        Ok(Arc::new(move |cluster, _| Box::pin(snapshot_controller::run(cluster, options.clone()))))
    },
};

/// How snapshots are bound.
#[derive(Debug, Args)]
#[command(next_help_heading = "Snapshot controller")]
pub(super) struct Flags {
    /// Label contents with a node of their volume, for snapshotters that run on every node
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    enable_distributed_snapshotting: bool,

    #[command(flatten)]
    work: Work,
    #[command(flatten)]
    conversion: Conversion,
}

impl Flags {
    pub(super) fn options(&self) -> anyhow::Result<snapshot_controller::Options> {
        let defaults = snapshot_controller::Options::default();
        Ok(snapshot_controller::Options {
            workers: self.work.worker_threads.unwrap_or(defaults.workers),
            retry: self.work.retry()?,
            prevent_volume_mode_conversion: self.conversion.prevent_volume_mode_conversion,
            distributed: self.enable_distributed_snapshotting,
            ..defaults
        })
    }
}
