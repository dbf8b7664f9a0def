//! The flags of each component, and what they come to.

use std::time::Duration;

use anyhow::bail;
use berth_kube::Backoff;
use berth_sidecars::{attacher, resizer, snapshot_controller, snapshotter};
use clap::Args;

use super::go;

/// How much is done at a time, and when again.
#[derive(Debug, Clone, Args)]
pub(crate) struct Work {
    /// How long one call of the driver may take [default: 10s; attacher and health monitor 15s; snapshotter 1m]
    #[arg(long, value_parser = go::positive_duration, value_name = "DURATION")]
    pub(crate) timeout: Option<Duration>,

    /// How many objects of a kind are worked on at a time [default: 10; provisioner 100]
    #[arg(long, alias = "workers", value_parser = go::workers, value_name = "COUNT")]
    pub(crate) worker_threads: Option<usize>,

    /// How long to wait after the first failure; twice as long after each further one
    #[arg(long, default_value = "1s", value_parser = go::positive_duration, value_name = "DURATION")]
    retry_interval_start: Duration,

    /// How long to wait at most
    #[arg(long, default_value = "5m", value_parser = go::positive_duration, value_name = "DURATION")]
    retry_interval_max: Duration,
}

impl Work {
    pub(crate) fn retry(&self) -> anyhow::Result<Backoff> {
        let (first, longest) = (self.retry_interval_start, self.retry_interval_max);
        if first > longest {
            bail!("--retry-interval-start ({first:?}) is longer than --retry-interval-max ({longest:?})");
        }
        Ok(Backoff { first, longest })
    }
}

/// The filesystem of volumes.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Filesystem {
    /// The filesystem of volumes that name none
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FSTYPE")]
    pub(crate) default_fstype: String,
}

/// What the driver is told of the objects.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Metadata {
    /// Give the objects' names to the driver as parameters when creating, and the labels and annotations of the claim
    /// that the class's parameters ask for, as `${pvc.metadata.labels['KEY']}`
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) extra_create_metadata: bool,
}

/// What a restore may do.
#[derive(Debug, Clone, Args)]
pub(crate) struct Conversion {
    /// Refuse a restore that changes the volume mode, unless the content allows it
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) prevent_volume_mode_conversion: bool,
}

/// How volumes are attached.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Attacher")]
pub(crate) struct Attaching {
    /// How often to ask the driver what is attached where, if it can tell
    #[arg(long, default_value = "1m", value_parser = go::positive_duration, value_name = "DURATION")]
    reconcile_sync: Duration,

    /// How many volumes a page of that has; as many as the driver likes if 0
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(i32).range(0..), value_name = "COUNT")]
    max_entries: i32,
}

impl Attaching {
    pub(crate) fn options(&self, work: &Work, filesystem: &Filesystem) -> anyhow::Result<attacher::Options> {
        let defaults = attacher::Options::default();
        Ok(attacher::Options {
            timeout: work.timeout.unwrap_or(defaults.timeout),
            workers: work.worker_threads.unwrap_or(defaults.workers),
            retry: work.retry()?,
            reconcile: self.reconcile_sync,
            max_entries: self.max_entries,
            default_fs_type: filesystem.default_fstype.clone(),
        })
    }
}

/// How volumes grow and change.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Resizer")]
pub(crate) struct Resizing {
    /// Do not try again to grow a volume that the driver refused in use while a pod uses it
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    handle_volume_inuse_error: bool,

    /// Give the objects' names to the driver as mutable parameters when modifying
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    extra_modify_metadata: bool,
}

impl Resizing {
    pub(crate) fn options(&self, work: &Work) -> anyhow::Result<resizer::Options> {
        let defaults = resizer::Options::default();
        Ok(resizer::Options {
            timeout: work.timeout.unwrap_or(defaults.timeout),
            workers: work.worker_threads.unwrap_or(defaults.workers),
            retry: work.retry()?,
            handle_volume_in_use_error: self.handle_volume_inuse_error,
            extra_modify_metadata: self.extra_modify_metadata,
            ..defaults
        })
    }
}

/// How snapshots are named.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Snapshotter")]
pub(crate) struct Snapshotting {
    /// What snapshots' names begin with
    #[arg(long, default_value = "snapshot", value_parser = clap::builder::NonEmptyStringValueParser::new(),
          value_name = "PREFIX")]
    snapshot_name_prefix: String,

    /// How much of the snapshot's UID follows; all of it if -1
    #[arg(long, default_value = "-1", value_parser = go::uid_length, allow_negative_numbers = true,
          value_name = "LENGTH")]
    snapshot_name_uuid_length: go::UidLength,

    /// What groups' names begin with
    #[arg(long, default_value = "groupsnapshot", value_parser = clap::builder::NonEmptyStringValueParser::new(),
          value_name = "PREFIX")]
    groupsnapshot_name_prefix: String,

    /// How much of the group's UID follows; all of it if -1
    #[arg(long, default_value = "-1", value_parser = go::uid_length, allow_negative_numbers = true,
          value_name = "LENGTH")]
    groupsnapshot_name_uuid_length: go::UidLength,
}

impl Snapshotting {
    pub(crate) fn options(&self, work: &Work, metadata: &Metadata) -> anyhow::Result<snapshotter::Options> {
        let defaults = snapshotter::Options::default();
        Ok(snapshotter::Options {
            timeout: work.timeout.unwrap_or(defaults.timeout),
            workers: work.worker_threads.unwrap_or(defaults.workers),
            retry: work.retry()?,
            snapshot_name_prefix: self.snapshot_name_prefix.clone(),
            snapshot_name_uuid_length: self.snapshot_name_uuid_length.0,
            group_snapshot_name_prefix: self.groupsnapshot_name_prefix.clone(),
            group_snapshot_name_uuid_length: self.groupsnapshot_name_uuid_length.0,
            extra_create_metadata: metadata.extra_create_metadata,
            ..defaults
        })
    }
}

/// What the snapshot controller is told.
pub(crate) fn snapshot_controller(
    work: &Work,
    conversion: &Conversion,
    distributed: bool,
) -> anyhow::Result<snapshot_controller::Options> {
    let defaults = snapshot_controller::Options::default();
    Ok(snapshot_controller::Options {
        workers: work.worker_threads.unwrap_or(defaults.workers),
        retry: work.retry()?,
        prevent_volume_mode_conversion: conversion.prevent_volume_mode_conversion,
        distributed,
        ..defaults
    })
}
