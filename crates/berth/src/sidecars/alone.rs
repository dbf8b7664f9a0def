//! Each component alone, under its upstream name and with its flags.

use anyhow::{Context as _, bail};
use berth_sidecars::driver::Driver;
use berth_sidecars::snapshotter;
use clap::Args;
use prometheus_client::registry::Registry;

use super::component::Component;
use super::flags::{Connection, Election, Http, Klog, Kube};
use super::monitoring::Monitoring;
use super::options::{
    Attaching, Conversion, Filesystem, Metadata, Resizing, Snapshotting, Work, snapshot_controller,
};
use super::provisioning::{Provisioning, Surroundings, completed};
use super::replica::{self, Group, Health, Replica};
use super::{go, stop_on_signal};
use crate::http::Site;

/// What every component takes.
#[derive(Debug, Args)]
pub(crate) struct Common {
    #[command(flatten)]
    kube: Kube,
    #[command(flatten)]
    election: Election,
    #[command(flatten)]
    http: Http,
    #[command(flatten)]
    klog: Klog,
    #[command(flatten)]
    work: Work,
}

/// Makes volumes for claims, in the place of external-provisioner.
#[derive(Debug, Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Provisioner {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    filesystem: Filesystem,
    #[command(flatten)]
    metadata: Metadata,
    #[command(flatten)]
    conversion: Conversion,
    #[command(flatten)]
    provisioning: Provisioning,
}

impl Provisioner {
    fn component(&self, surroundings: &Surroundings) -> anyhow::Result<Component> {
        let common = &self.common;
        let options = self.provisioning.options(&common.kube, &common.election, surroundings)?;
        completed(options, &common.work, &self.filesystem, &self.metadata, &self.conversion)
            .map(Component::Provisioner)
    }

    /// Runs until SIGTERM.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        self.common.klog.start();
        alone(self.component(&Surroundings::read()?)?, Some(&self.connection), &self.common).await
    }
}

/// Attaches volumes to nodes, in the place of external-attacher.
#[derive(Debug, Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Attacher {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    filesystem: Filesystem,
    #[command(flatten)]
    attaching: Attaching,
}

impl Attacher {
    fn component(&self) -> anyhow::Result<Component> {
        Ok(Component::Attacher(self.attaching.options(&self.common.work, &self.filesystem)?))
    }

    /// Runs until SIGTERM.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        self.common.klog.start();
        alone(self.component()?, Some(&self.connection), &self.common).await
    }
}

/// Grows volumes and changes their attributes, in the place of external-resizer.
#[derive(Debug, Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Resizer {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    resizing: Resizing,
}

impl Resizer {
    fn component(&self) -> anyhow::Result<Component> {
        Ok(Component::Resizer(self.resizing.options(&self.common.work)?))
    }

    /// Runs until SIGTERM.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        self.common.klog.start();
        alone(self.component()?, Some(&self.connection), &self.common).await
    }
}

/// Takes and deletes snapshots, in the place of csi-snapshotter.
#[derive(Debug, Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Snapshotter {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    metadata: Metadata,
    #[command(flatten)]
    snapshotting: Snapshotting,

    /// Run on every node, and take only snapshots of volumes that are there; needs the environment variable NODE_NAME
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    node_deployment: bool,
}

impl Snapshotter {
    fn component(&self, node: Option<String>) -> anyhow::Result<Component> {
        let options = self.snapshotting.options(&self.common.work, &self.metadata)?;
        if !self.node_deployment {
            return Ok(Component::Snapshotter(options));
        }
        if self.common.election.leader_election {
            bail!("--leader-election and --node-deployment exclude each other: every node has its own work");
        }
        let Some(node) = node.filter(|node| !node.is_empty()) else {
            bail!("--node-deployment needs the node's name in the environment variable NODE_NAME");
        };
        Ok(Component::Snapshotter(snapshotter::Options { node: Some(node), ..options }))
    }

    /// Runs until SIGTERM.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        self.common.klog.start();
        alone(self.component(std::env::var("NODE_NAME").ok())?, Some(&self.connection), &self.common).await
    }
}

/// Binds snapshots and their contents, in the place of snapshot-controller.
#[derive(Debug, Args)]
#[command(version, args_override_self = true)]
pub(crate) struct SnapshotController {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    conversion: Conversion,

    /// Label contents with a node of their volume, for snapshotters that run on every node
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    enable_distributed_snapshotting: bool,
}

impl SnapshotController {
    fn component(&self) -> anyhow::Result<Component> {
        let distributed = self.enable_distributed_snapshotting;
        let options = snapshot_controller(&self.common.work, &self.conversion, distributed)?;
        Ok(Component::SnapshotController(options))
    }

    /// Runs until SIGTERM.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        self.common.klog.start();
        alone(self.component()?, None, &self.common).await
    }
}

/// Watches over the health of volumes, in the place of external-health-monitor-controller.
#[derive(Debug, Args)]
#[command(version, args_override_self = true)]
pub(crate) struct HealthMonitor {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    monitoring: Monitoring,
}

impl HealthMonitor {
    fn component(&self) -> Component {
        Component::HealthMonitor(self.monitoring.options(&self.common.work))
    }

    /// Runs until SIGTERM.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        self.common.klog.start();
        alone(self.component(), Some(&self.connection), &self.common).await
    }
}

async fn alone(component: Component, connection: Option<&Connection>, common: &Common) -> anyhow::Result<()> {
    let address = common.http.address()?;
    let stop = stop_on_signal()?;
    let mut registry = Registry::default();
    let health = Health::register(&mut registry);
    let driver = connection.map(|connection| Driver::connect(&connection.csi_address));
    if let Some(driver) = &driver {
        driver.measure(&mut registry);
    }
    if let Some(address) = address {
        let told = health.clone();
        Site::new(registry)
            .metrics_at(&common.http.metrics_path)
            .check("/healthz/leader-election", move || told.leader_election())
            .serve(address)
            .await
            .with_context(|| format!("serve HTTP on --http-endpoint={address}"))?;
    }
    let replica = Replica::new(&common.kube, &common.election, health).await?;
    let (components, name) = match &driver {
        None => (vec![component], String::new()),
        Some(driver) => {
            let identity = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                identity = driver.ready() => identity,
            };
            (replica::needed(vec![component], &identity, true)?, identity.name.clone())
        }
    };
    let groups = components
        .into_iter()
        .map(|component| Group { lease: component.lease(&name), components: vec![component] });
    replica.run(groups.collect(), driver, &stop).await
}

#[cfg(test)]
mod tests;
