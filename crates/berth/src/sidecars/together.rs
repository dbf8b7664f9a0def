//! The components that one driver needs, chosen and told how to work.

use anyhow::Context as _;
use berth_sidecars::driver::Identity;
use clap::Args;

use super::component::Component;
use super::monitoring::Monitoring;
use super::options::{
    Attaching, Conversion, Filesystem, Metadata, Provisioning, Resizing, Snapshotting, Work,
    snapshot_controller,
};
use super::replica::{self, Group, shared_lease};

/// Which components run together, and how.
#[derive(Debug, Args)]
pub(crate) struct Together {
    /// Which components to run, whether or not they are needed [default: those that the driver needs, without the
    /// snapshot controller, of which a cluster has one]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    controllers: Vec<Which>,

    #[command(flatten)]
    work: Work,
    #[command(flatten)]
    filesystem: Filesystem,
    #[command(flatten)]
    metadata: Metadata,
    #[command(flatten)]
    conversion: Conversion,
    #[command(flatten)]
    provisioning: Provisioning,
    #[command(flatten)]
    attaching: Attaching,
    #[command(flatten)]
    resizing: Resizing,
    #[command(flatten)]
    snapshotting: Snapshotting,
    #[command(flatten)]
    monitoring: Monitoring,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Which {
    #[value(alias = "csi-provisioner")]
    Provisioner,
    #[value(alias = "csi-attacher")]
    Attacher,
    #[value(alias = "csi-resizer")]
    Resizer,
    #[value(alias = "csi-snapshotter")]
    Snapshotter,
    #[value(alias = "csi-external-health-monitor-controller")]
    HealthMonitor,
    SnapshotController,
}

const BY_DEFAULT: [Which; 5] =
    [Which::Provisioner, Which::Attacher, Which::Resizer, Which::Snapshotter, Which::HealthMonitor];

impl Together {
    /// Says what is wrong with the flags.
    pub(crate) fn components(&self) -> anyhow::Result<Vec<Component>> {
        let mut chosen =
            if self.controllers.is_empty() { BY_DEFAULT.to_vec() } else { self.controllers.clone() };
        let mut seen = Vec::new();
        chosen.retain(|which| {
            !seen.contains(which) && {
                seen.push(*which);
                true
            }
        });
        chosen.into_iter().map(|which| self.component(which)).collect()
    }

    fn component(&self, which: Which) -> anyhow::Result<Component> {
        Ok(match which {
            Which::Provisioner => Component::Provisioner(self.provisioning.options(
                &self.work,
                &self.filesystem,
                &self.metadata,
                &self.conversion,
                &replica::host_name()?,
            )?),
            Which::Attacher => Component::Attacher(self.attaching.options(&self.work, &self.filesystem)?),
            Which::Resizer => Component::Resizer(self.resizing.options(&self.work)?),
            Which::Snapshotter => {
                Component::Snapshotter(self.snapshotting.options(&self.work, &self.metadata)?)
            }
            Which::HealthMonitor => Component::HealthMonitor(self.monitoring.options(&self.work)),
            Which::SnapshotController => {
                Component::SnapshotController(snapshot_controller(&self.work, &self.conversion, false)?)
            }
        })
    }

    /// What runs beside this driver, under which Leases.
    pub(crate) fn groups(&self, identity: &Identity) -> anyhow::Result<Vec<Group>> {
        let explicit = !self.controllers.is_empty();
        let components = replica::needed(self.components()?, identity, explicit)
            .context("change --controllers, or the driver")?;
        let (for_all, own): (Vec<_>, Vec<_>) = components
            .into_iter()
            .partition(|component| matches!(component, Component::SnapshotController(_)));
        let mut groups = vec![Group { lease: shared_lease(&identity.name), components: own }];
        groups.extend(
            for_all.into_iter().map(|component| Group {
                lease: component.lease(&identity.name),
                components: vec![component],
            }),
        );
        groups.retain(|group| !group.components.is_empty());
        Ok(groups)
    }
}
