//! The resizer's flags, and its row.

use berth_sidecars::driver::{ControllerCapability, NodeCapability};
use berth_sidecars::resizer;
use clap::{Args, FromArgMatches as _};

use super::flags::Work;
use super::{Scope, Sidecar, go, over_driver};

pub(super) const SIDECAR: Sidecar = Sidecar {
    name: "csi-resizer",
    short_name: "resizer",
    replaces: "external-resizer",
    about: "Expand volumes and modify their attributes",
    scope: Scope::Node,
    lease: "external-resizer-",
    flags: Flags::augment_args,
    missing: |identity| {
        let can = identity.can(ControllerCapability::ExpandVolume)
            || identity.can(ControllerCapability::ModifyVolume)
            || identity.node.contains(&NodeCapability::ExpandVolume);
        (!can).then_some("EXPAND_VOLUME and MODIFY_VOLUME")
    },
    configure: |matches, setting, _| {
        let options = Flags::from_arg_matches(matches)?.options()?;
        Ok(over_driver(resizer::Options { per_node: setting.node.is_some(), ..options }, resizer::run))
    },
};

/// How volumes grow and change.
#[derive(Debug, Args)]
#[command(next_help_heading = "Resizer")]
pub(super) struct Flags {
    /// Do not retry a volume that the driver refused to grow in use, while a pod uses it
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    handle_volume_inuse_error: bool,

    /// Give the objects' names to the driver as mutable parameters when modifying
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    extra_modify_metadata: bool,

    #[command(flatten)]
    work: Work,
}

impl Flags {
    pub(super) fn options(&self) -> anyhow::Result<resizer::Options> {
        let defaults = resizer::Options::default();
        Ok(resizer::Options {
            timeout: self.work.timeout.unwrap_or(defaults.timeout),
            workers: self.work.worker_threads.unwrap_or(defaults.workers),
            retry: self.work.retry()?,
            handle_volume_in_use_error: self.handle_volume_inuse_error,
            extra_modify_metadata: self.extra_modify_metadata,
            ..defaults
        })
    }
}
