//! The snapshotter's flags, and its row.

use berth_sidecars::driver::ControllerCapability;
use berth_sidecars::snapshotter;
use clap::{Args, FromArgMatches as _};

use super::flags::{Metadata, NodeDeployment, Work};
use super::{Scope, Sidecar, go, over_driver};
use crate::launch::Setting;

pub(super) const SIDECAR: Sidecar = Sidecar {
    name: "csi-snapshotter",
    short_name: "snapshotter",
    replaces: "external-snapshotter",
    about: "Create and delete snapshots and group snapshots",
    scope: Scope::Node,
    lease: "external-snapshotter-leader-",
    flags: Flags::augment_args,
    missing: |identity| {
        let can = identity.can(ControllerCapability::CreateDeleteSnapshot);
        (!can).then_some("CREATE_DELETE_SNAPSHOT")
    },
    configure: |matches, setting, _| {
        Ok(over_driver(Flags::from_arg_matches(matches)?.options(setting)?, snapshotter::run))
    },
};

/// How snapshots are named.
#[derive(Debug, Args)]
#[command(next_help_heading = "Snapshotter")]
pub(super) struct Flags {
    /// The prefix of snapshots' names
    #[arg(long, default_value = "snapshot", value_parser = clap::builder::NonEmptyStringValueParser::new(),
          value_name = "PREFIX")]
    snapshot_name_prefix: String,

    /// How many characters of the snapshot's UID follow the prefix; -1 for all
    #[arg(long, default_value = "-1", value_parser = go::uid_length, allow_negative_numbers = true,
          value_name = "LENGTH")]
    snapshot_name_uuid_length: go::UidLength,

    /// The prefix of group snapshots' names
    #[arg(long, default_value = "groupsnapshot", value_parser = clap::builder::NonEmptyStringValueParser::new(),
          value_name = "PREFIX")]
    groupsnapshot_name_prefix: String,

    /// How many characters of the group snapshot's UID follow the prefix; -1 for all
    #[arg(long, default_value = "-1", value_parser = go::uid_length, allow_negative_numbers = true,
          value_name = "LENGTH")]
    groupsnapshot_name_uuid_length: go::UidLength,

    #[command(flatten)]
    work: Work,
    #[command(flatten)]
    metadata: Metadata,
    #[command(flatten)]
    _node_deployment: NodeDeployment,
}

impl Flags {
    pub(super) fn options(&self, setting: &Setting) -> anyhow::Result<snapshotter::Options> {
        let defaults = snapshotter::Options::default();
        Ok(snapshotter::Options {
            timeout: self.work.timeout.unwrap_or(defaults.timeout),
            workers: self.work.worker_threads.unwrap_or(defaults.workers),
            retry: self.work.retry()?,
            snapshot_name_prefix: self.snapshot_name_prefix.clone(),
            snapshot_name_uuid_length: self.snapshot_name_uuid_length.0,
            group_snapshot_name_prefix: self.groupsnapshot_name_prefix.clone(),
            group_snapshot_name_uuid_length: self.groupsnapshot_name_uuid_length.0,
            extra_create_metadata: self.metadata.extra_create_metadata,
            node: setting.node.clone(),
            ..defaults
        })
    }
}
