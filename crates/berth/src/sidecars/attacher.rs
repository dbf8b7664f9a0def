//! The attacher's flags, and its row.

use std::time::Duration;

use berth_sidecars::attacher;
use clap::{Args, FromArgMatches as _};

use super::flags::{Filesystem, Work};
use super::{Scope, Sidecar, go, over_driver};

pub(super) const SIDECAR: Sidecar = Sidecar {
    name: "csi-attacher",
    short_name: "attacher",
    replaces: "external-attacher",
    about: "Attach volumes to nodes and detach them",
    scope: Scope::Driver,
    lease: "external-attacher-leader-",
    flags: Flags::augment_args,
    // Attachments of a driver that does not attach are called attached, which somebody has to do.
    missing: |_| None,
    configure: |matches, _, _| Ok(over_driver(Flags::from_arg_matches(matches)?.options()?, attacher::run)),
};

/// How volumes are attached.
#[derive(Debug, Args)]
#[command(next_help_heading = "Attacher")]
pub(super) struct Flags {
    /// How often to compare VolumeAttachments with ListVolumes, if the driver lists published nodes
    #[arg(long, default_value = "1m", value_parser = go::positive_duration, value_name = "DURATION")]
    reconcile_sync: Duration,

    /// ListVolumes page size (0: the driver's choice)
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(i32).range(0..), value_name = "COUNT")]
    max_entries: i32,

    /// Attach to and detach from this node alone, for a driver that runs on every node with an attacher beside it
    #[arg(long, value_name = "NAME")]
    only_node: Option<String>,

    #[command(flatten)]
    work: Work,
    #[command(flatten)]
    filesystem: Filesystem,
}

impl Flags {
    pub(super) fn options(&self) -> anyhow::Result<attacher::Options> {
        let defaults = attacher::Options::default();
        Ok(attacher::Options {
            timeout: self.work.timeout.unwrap_or(defaults.timeout),
            workers: self.work.worker_threads.unwrap_or(defaults.workers),
            retry: self.work.retry()?,
            reconcile: self.reconcile_sync,
            max_entries: self.max_entries,
            default_fs_type: self.filesystem.default_fstype.clone(),
            only_node: self.only_node.clone(),
        })
    }
}
