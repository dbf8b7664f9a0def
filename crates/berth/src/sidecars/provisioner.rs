//! The provisioner's flags, and its row.

use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_sidecars::driver::ControllerCapability;
use berth_sidecars::provisioner::{self, Metrics, Owner};
use clap::{Args, FromArgMatches as _};

use super::flags::{Conversion, Filesystem, Metadata, NodeDeployment, Work};
use super::{Scope, Sidecar, go, over_driver};
use crate::launch::{Setting, Surroundings};

pub(super) const SIDECAR: Sidecar = Sidecar {
    name: "csi-provisioner",
    short_name: "provisioner",
    replaces: "external-provisioner",
    about: "Provision and delete volumes for PersistentVolumeClaims",
    scope: Scope::Node,
    lease: "",
    flags: Flags::augment_args,
    missing: |identity| {
        let can = identity.can(ControllerCapability::CreateDeleteVolume);
        (!can).then_some("CREATE_DELETE_VOLUME")
    },
    configure: |matches, setting, registry| {
        let options = Flags::from_arg_matches(matches)?.options(setting)?;
        let options = provisioner::Options { metrics: Metrics::register(registry), ..options };
        Ok(over_driver(options, provisioner::run))
    },
};

/// How volumes are made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Provisioner")]
pub(super) struct Flags {
    /// Require the topology of the selected node itself, and not only the segments that it shares with other nodes
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    strict_topology: bool,

    /// Without a selected node, pass the topology segments of all nodes to CreateVolume
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    immediate_topology: bool,

    /// The prefix of volumes' names
    #[arg(long, default_value = "pvc", value_parser = clap::builder::NonEmptyStringValueParser::new(),
          value_name = "PREFIX")]
    volume_name_prefix: String,

    /// How many characters of the claim's UID follow the prefix; -1 for all
    #[arg(long, default_value = "-1", value_parser = go::uid_length, allow_negative_numbers = true,
          value_name = "LENGTH")]
    volume_name_uuid_length: go::UidLength,

    /// Publish volumes with the sole access mode ReadOnlyMany read-only
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    controller_publish_readonly: bool,

    #[command(flatten)]
    capacity: Capacity,
    #[command(flatten)]
    per_node: PerNode,
    #[command(flatten)]
    work: Work,
    #[command(flatten)]
    filesystem: Filesystem,
    #[command(flatten)]
    metadata: Metadata,
    #[command(flatten)]
    conversion: Conversion,
}

/// How capacity is published in CSIStorageCapacity objects.
#[derive(Debug, Args)]
#[expect(clippy::struct_field_names, reason = "fields are named as the flags are")]
struct Capacity {
    /// Publish storage capacity for the scheduler (CSIStorageCapacity objects); needs the environment variable NAMESPACE
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    enable_capacity: bool,

    /// How often to ask the driver for its capacity when no event gives a reason to
    #[arg(long, default_value = "1m", value_parser = go::positive_duration, value_name = "DURATION")]
    capacity_poll_interval: Duration,

    /// Publish capacity for classes that bind immediately, too
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    capacity_for_immediate_binding: bool,

    /// The owner of these objects: 0 is the pod (its name in the environment variable POD_NAME), 1 its StatefulSet or
    /// DaemonSet, 2 its Deployment, -1 none
    #[arg(long, default_value = "1", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i8).range(-1..=2), value_name = "LEVEL")]
    capacity_ownerref_level: i8,

    /// How many GetCapacity calls are made at a time
    #[arg(long, default_value = "1", value_parser = go::workers, value_name = "COUNT")]
    capacity_threads: usize,

    /// Only while the CSIDriver object says that the scheduler is to read it; for `berth up`
    #[arg(long, hide = true)]
    capacity_only_if_announced: bool,
}

/// One provisioner per node instead of one per cluster.
#[derive(Debug, Args)]
struct PerNode {
    #[command(flatten)]
    _node_deployment: NodeDeployment,

    /// With --node-deployment: provision for classes that bind immediately, too; the nodes select one of them
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    node_deployment_immediate_binding: bool,

    /// How long a node waits at most before it tries to be selected; twice as long after each failed attempt
    #[arg(long, default_value = "20s", value_parser = go::duration, value_name = "DURATION")]
    node_deployment_base_delay: Duration,

    /// The longest that a node waits before it tries to be selected
    #[arg(long, default_value = "60s", value_parser = go::duration, value_name = "DURATION")]
    node_deployment_max_delay: Duration,
}

impl Flags {
    pub(super) fn options(&self, setting: &Setting) -> anyhow::Result<provisioner::Options> {
        let defaults = provisioner::Options::default();
        Ok(provisioner::Options {
            timeout: self.work.timeout.unwrap_or(defaults.timeout),
            workers: self.work.worker_threads.unwrap_or(defaults.workers),
            retry: self.work.retry()?,
            extra_create_metadata: self.metadata.extra_create_metadata,
            default_fs_type: self.filesystem.default_fstype.clone(),
            strict_topology: self.strict_topology,
            immediate_topology: self.immediate_topology,
            volume_name_prefix: self.volume_name_prefix.clone(),
            volume_name_uuid_length: self.volume_name_uuid_length.0,
            controller_publish_readonly: self.controller_publish_readonly,
            prevent_volume_mode_conversion: self.conversion.prevent_volume_mode_conversion,
            cross_namespace_sources: setting.kube.feature_gates.cross_namespace_sources(),
            capacity: self.capacity.options(&setting.surroundings)?,
            per_node: setting.node.as_deref().map(|node| self.per_node.options(node)).transpose()?,
            instance: setting.surroundings.host.clone(),
            ..defaults
        })
    }
}

impl Capacity {
    fn options(&self, surroundings: &Surroundings) -> anyhow::Result<Option<provisioner::Capacity>> {
        if !self.enable_capacity {
            return Ok(None);
        }
        let namespace = surroundings.namespace.as_deref().context(
            "--enable-capacity needs to know where the CSIStorageCapacity objects are to be: \
             set the environment variable NAMESPACE",
        )?;
        let owner = match (u8::try_from(self.capacity_ownerref_level), surroundings.pod.clone()) {
            (Err(_), _) => None,
            (Ok(level), Some(pod)) => Some(Owner { pod, level }),
            (Ok(level), None) => bail!(
                "--capacity-ownerref-level={level} needs this pod's name: set the environment variable POD_NAME, or \
                 give --capacity-ownerref-level=-1 for objects that go with nothing"
            ),
        };
        Ok(Some(provisioner::Capacity {
            owner,
            poll: self.capacity_poll_interval,
            immediate: self.capacity_for_immediate_binding,
            workers: self.capacity_threads,
            only_if_announced: self.capacity_only_if_announced,
            ..provisioner::Capacity::new(namespace)
        }))
    }
}

impl PerNode {
    fn options(&self, node: &str) -> anyhow::Result<provisioner::PerNode> {
        let (base_delay, max_delay) = (self.node_deployment_base_delay, self.node_deployment_max_delay);
        if base_delay > max_delay {
            bail!(
                "--node-deployment-base-delay ({base_delay:?}) is longer than --node-deployment-max-delay ({max_delay:?})"
            );
        }
        let immediate = self.node_deployment_immediate_binding;
        Ok(provisioner::PerNode { immediate, base_delay, max_delay, ..provisioner::PerNode::new(node) })
    }
}
