//! The provisioner's flags, and what they come to.

use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_sidecars::provisioner::{self, Owner};
use clap::Args;

use super::flags::{Election, Kube};
use super::options::{Conversion, Filesystem, Metadata, Work};
use super::{go, replica};

/// How volumes are made.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Provisioner")]
pub(crate) struct Provisioning {
    /// A volume must be reachable from the selected node's place, not just from one like it
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    strict_topology: bool,

    /// Without a selected node, ask for the places that there are in the cluster
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    immediate_topology: bool,

    /// What volumes' names begin with
    #[arg(long, default_value = "pvc", value_parser = clap::builder::NonEmptyStringValueParser::new(),
          value_name = "PREFIX")]
    volume_name_prefix: String,

    /// How much of the claim's UID follows; all of it if -1
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
}

/// CSIStorageCapacity objects.
#[derive(Debug, Clone, Args)]
#[expect(clippy::struct_field_names, reason = "fields are named as the flags are")]
struct Capacity {
    /// Tell the scheduler how much room there is (CSIStorageCapacity); needs the environment variable NAMESPACE
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    enable_capacity: bool,

    /// How often to ask the driver how much room there is although nothing is known to have happened
    #[arg(long, default_value = "1m", value_parser = go::positive_duration, value_name = "DURATION")]
    capacity_poll_interval: Duration,

    /// Also for classes that bind at once
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    capacity_for_immediate_binding: bool,

    /// With what these objects go: 0 is the pod (its name in the environment variable POD_NAME), 1 its StatefulSet or
    /// DaemonSet, 2 its Deployment, -1 nothing
    #[arg(long, default_value = "1", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i8).range(-1..=2), value_name = "LEVEL")]
    capacity_ownerref_level: i8,

    /// How many questions for room are asked at a time
    #[arg(long, default_value = "1", value_parser = go::workers, value_name = "COUNT")]
    capacity_threads: usize,
}

/// One provisioner per node instead of one per cluster.
#[derive(Debug, Clone, Args)]
#[expect(clippy::struct_field_names, reason = "fields are named as the flags are")]
struct PerNode {
    /// Run on every node, and make only volumes that are there; needs the environment variable NODE_NAME
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    node_deployment: bool,

    /// On every node: also for classes that bind at once, for which the nodes select one of them
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    node_deployment_immediate_binding: bool,

    /// How long a node waits at most before it tries to be selected; twice as long after each vain attempt
    #[arg(long, default_value = "20s", value_parser = go::duration, value_name = "DURATION")]
    node_deployment_base_delay: Duration,

    /// How long a node waits at most
    #[arg(long, default_value = "60s", value_parser = go::duration, value_name = "DURATION")]
    node_deployment_max_delay: Duration,
}

/// What a process is told of itself by its environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    /// The host's name, which in a pod is the pod's.
    pub(crate) host: String,
    /// NODE_NAME.
    pub(crate) node: Option<String>,
    /// NAMESPACE, or POD_NAMESPACE.
    pub(crate) namespace: Option<String>,
    /// POD_NAME.
    pub(crate) pod: Option<String>,
}

impl Surroundings {
    /// As they are.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Ok(Self {
            host: replica::host_name()?,
            node: variable("NODE_NAME"),
            namespace: variable("NAMESPACE").or_else(|| variable("POD_NAMESPACE")),
            pod: variable("POD_NAME"),
        })
    }
}

impl Provisioning {
    /// What the flags come to, without what other components have as well.
    pub(crate) fn options(
        &self,
        kube: &Kube,
        election: &Election,
        surroundings: &Surroundings,
    ) -> anyhow::Result<provisioner::Options> {
        Ok(provisioner::Options {
            strict_topology: self.strict_topology,
            immediate_topology: self.immediate_topology,
            volume_name_prefix: self.volume_name_prefix.clone(),
            volume_name_uuid_length: self.volume_name_uuid_length.0,
            controller_publish_readonly: self.controller_publish_readonly,
            cross_namespace_sources: kube.feature_gates.cross_namespace_sources(),
            capacity: self.capacity.options(surroundings)?,
            per_node: self.per_node.options(election, surroundings)?,
            instance: surroundings.host.clone(),
            ..provisioner::Options::default()
        })
    }

    /// Whether every node has a provisioner of its own.
    pub(crate) fn is_per_node(&self) -> bool {
        self.per_node.node_deployment
    }

    /// Whether capacity is to be told.
    pub(crate) fn tells_capacity(&self) -> bool {
        self.capacity.enable_capacity
    }
}

/// The same with what other components have as well.
pub(crate) fn completed(
    options: provisioner::Options,
    work: &Work,
    filesystem: &Filesystem,
    metadata: &Metadata,
    conversion: &Conversion,
) -> anyhow::Result<provisioner::Options> {
    Ok(provisioner::Options {
        timeout: work.timeout.unwrap_or(options.timeout),
        workers: work.worker_threads.unwrap_or(options.workers),
        retry: work.retry()?,
        extra_create_metadata: metadata.extra_create_metadata,
        default_fs_type: filesystem.default_fstype.clone(),
        prevent_volume_mode_conversion: conversion.prevent_volume_mode_conversion,
        ..options
    })
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
            ..provisioner::Capacity::new(namespace)
        }))
    }
}

impl PerNode {
    fn options(
        &self,
        election: &Election,
        surroundings: &Surroundings,
    ) -> anyhow::Result<Option<provisioner::PerNode>> {
        if !self.node_deployment {
            return Ok(None);
        }
        if election.leader_election {
            bail!("--leader-election and --node-deployment exclude each other: every node has its own work");
        }
        let node = surroundings
            .node
            .as_deref()
            .context("--node-deployment needs the node's name in the environment variable NODE_NAME")?;
        let (base_delay, max_delay) = (self.node_deployment_base_delay, self.node_deployment_max_delay);
        if base_delay > max_delay {
            bail!(
                "--node-deployment-base-delay ({base_delay:?}) is longer than --node-deployment-max-delay ({max_delay:?})"
            );
        }
        let immediate = self.node_deployment_immediate_binding;
        Ok(Some(provisioner::PerNode { immediate, base_delay, max_delay, ..provisioner::PerNode::new(node) }))
    }
}
