//! The components that one driver needs, chosen and told how to work.

use anyhow::{Context as _, bail};
use berth_sidecars::driver::Identity;
use berth_sidecars::{resizer, snapshotter};
use clap::Args;

use super::component::Component;
use super::flags::{Election, Kube};
use super::monitoring::Monitoring;
use super::options::{
    Attaching, Conversion, Filesystem, Metadata, Resizing, Snapshotting, Work, snapshot_controller,
};
use super::provisioning::{Provisioning, Surroundings, completed};
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

/// Those that can run on every node.
const PER_NODE: [Which; 3] = [Which::Provisioner, Which::Resizer, Which::Snapshotter];

impl Together {
    /// Says what is wrong with the flags.
    pub(crate) fn components(&self, kube: &Kube, election: &Election) -> anyhow::Result<Vec<Component>> {
        let surroundings = Surroundings::read()?;
        if self.is_per_node() {
            // Whatever runs on every node must know its node, and holds no Lease.
            self.provisioning.options(kube, election, &surroundings)?;
        }
        self.chosen()?.into_iter().map(|which| self.component(which, kube, election, &surroundings)).collect()
    }

    /// Whether every node has these components of its own.
    pub(crate) fn is_per_node(&self) -> bool {
        self.provisioning.is_per_node()
    }

    /// Whether capacity is to be told.
    pub(crate) fn tells_capacity(&self) -> bool {
        self.provisioning.tells_capacity()
    }

    fn chosen(&self) -> anyhow::Result<Vec<Which>> {
        let mut chosen = match (self.controllers.as_slice(), self.is_per_node()) {
            ([], false) => BY_DEFAULT.to_vec(),
            ([], true) => PER_NODE.to_vec(),
            (chosen, _) => chosen.to_vec(),
        };
        if self.is_per_node() && !chosen.iter().all(|which| PER_NODE.contains(which)) {
            bail!(
                "of --controllers only provisioner, resizer and snapshotter can run on every node (--node-deployment); \
                 run the others once for the cluster"
            );
        }
        let mut seen = Vec::new();
        chosen.retain(|which| {
            !seen.contains(which) && {
                seen.push(*which);
                true
            }
        });
        Ok(chosen)
    }

    fn component(
        &self,
        which: Which,
        kube: &Kube,
        election: &Election,
        surroundings: &Surroundings,
    ) -> anyhow::Result<Component> {
        Ok(match which {
            Which::Provisioner => {
                let options = self.provisioning.options(kube, election, surroundings)?;
                Component::Provisioner(completed(
                    options,
                    &self.work,
                    &self.filesystem,
                    &self.metadata,
                    &self.conversion,
                )?)
            }
            Which::Attacher => Component::Attacher(self.attaching.options(&self.work, &self.filesystem)?),
            Which::Resizer => Component::Resizer(resizer::Options {
                per_node: self.is_per_node(),
                ..self.resizing.options(&self.work)?
            }),
            Which::Snapshotter => Component::Snapshotter(snapshotter::Options {
                node: surroundings.node.clone().filter(|_| self.is_per_node()),
                ..self.snapshotting.options(&self.work, &self.metadata)?
            }),
            Which::HealthMonitor => Component::HealthMonitor(self.monitoring.options(&self.work)),
            Which::SnapshotController => {
                Component::SnapshotController(snapshot_controller(&self.work, &self.conversion, false)?)
            }
        })
    }

    /// What runs beside this driver, under which Leases.
    pub(crate) fn groups(
        &self,
        identity: &Identity,
        kube: &Kube,
        election: &Election,
    ) -> anyhow::Result<Vec<Group>> {
        let explicit = !self.controllers.is_empty();
        let components = replica::needed(self.components(kube, election)?, identity, explicit)
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        together: Together,
    }

    fn chosen(words: &[&str]) -> Result<Vec<Which>, String> {
        let line = Line::try_parse_from(["program"].iter().chain(words)).unwrap();
        line.together.chosen().map_err(|refused| refused.to_string())
    }

    #[test]
    fn on_every_node_run_only_those_that_can() {
        assert_eq!(chosen(&[]), Ok(BY_DEFAULT.to_vec()));
        assert_eq!(chosen(&["--node-deployment"]), Ok(PER_NODE.to_vec()));
        let twice = ["--node-deployment", "--controllers=provisioner,csi-provisioner"];
        assert_eq!(chosen(&twice), Ok(vec![Which::Provisioner]));
        let refused = chosen(&["--node-deployment", "--controllers=provisioner,attacher"]).unwrap_err();
        assert!(refused.contains("--controllers") && refused.contains("--node-deployment"), "{refused}");
        assert!(chosen(&["--controllers=provisioner,attacher"]).is_ok());
    }
}
