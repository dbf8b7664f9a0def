//! The components as one type: what each is called, which driver needs it, and running it.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use berth_kube::Cluster;
use berth_sidecars::driver::{ControllerCapability, Driver, HealthCalls, Identity, NodeCapability};
use berth_sidecars::{attacher, health_monitor, provisioner, resizer, snapshot_controller, snapshotter};
use futures_util::FutureExt as _;
use prometheus_client::registry::Registry;

/// How long a component that panicked rests before it is started again.
const REST: Duration = Duration::from_secs(1);

/// The metrics that components have of their own.
#[derive(Clone)]
pub(crate) struct Measures {
    provisioner: provisioner::Metrics,
    snapshots: snapshot_controller::Metrics,
}

impl Measures {
    /// Lets a registry see them.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        Self {
            provisioner: provisioner::Metrics::register(registry),
            snapshots: snapshot_controller::Metrics::register(registry),
        }
    }
}

/// A component and how it works.
#[derive(Debug, Clone)]
pub(crate) enum Component {
    Provisioner(provisioner::Options),
    Attacher(attacher::Options),
    Resizer(resizer::Options),
    Snapshotter(snapshotter::Options),
    HealthMonitor(health_monitor::Options),
    SnapshotController(snapshot_controller::Options),
}

impl Component {
    /// The program that it takes the place of.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Provisioner(_) => "csi-provisioner",
            Self::Attacher(_) => "csi-attacher",
            Self::Resizer(_) => "csi-resizer",
            Self::Snapshotter(_) => "csi-snapshotter",
            Self::HealthMonitor(_) => "csi-external-health-monitor-controller",
            Self::SnapshotController(_) => "snapshot-controller",
        }
    }

    /// The Lease under which it runs alone, as upstream names it.
    pub(crate) fn lease(&self, driver: &str) -> String {
        sanitized(&match self {
            Self::Provisioner(_) => driver.to_owned(),
            Self::Attacher(_) => format!("external-attacher-leader-{driver}"),
            Self::Resizer(_) => format!("external-resizer-{driver}"),
            Self::Snapshotter(_) => format!("external-snapshotter-leader-{driver}"),
            Self::HealthMonitor(_) => format!("external-health-monitor-leader-{driver}"),
            Self::SnapshotController(_) => "snapshot-controller-leader".to_owned(),
        })
    }

    /// What a driver lacks for this component to have anything to do.
    pub(crate) fn missing(&self, identity: &Identity) -> Option<&'static str> {
        let can = |capability| identity.can(capability);
        let (enough, missing) = match self {
            Self::Provisioner(_) => (can(ControllerCapability::CreateDeleteVolume), "CREATE_DELETE_VOLUME"),
            Self::Resizer(_) => (
                can(ControllerCapability::ExpandVolume)
                    || can(ControllerCapability::ModifyVolume)
                    || identity.node.contains(&NodeCapability::ExpandVolume),
                "EXPAND_VOLUME and MODIFY_VOLUME",
            ),
            Self::Snapshotter(_) => {
                (can(ControllerCapability::CreateDeleteSnapshot), "CREATE_DELETE_SNAPSHOT")
            }
            Self::HealthMonitor(_) => (
                HealthCalls::of(identity).is_some(),
                "LIST_VOLUME_HEALTH or GET_VOLUME_HEALTH, nor VOLUME_CONDITION with LIST_VOLUMES or GET_VOLUME",
            ),
            // Attachments of a driver that does not attach are called attached, which somebody has to do.
            Self::Attacher(_) | Self::SnapshotController(_) => (true, ""),
        };
        (!enough).then_some(missing)
    }

    /// The same component, measured.
    #[must_use]
    pub(crate) fn measured(self, measures: &Measures) -> Self {
        match self {
            Self::Provisioner(options) => {
                Self::Provisioner(provisioner::Options { metrics: measures.provisioner.clone(), ..options })
            }
            Self::SnapshotController(options) => Self::SnapshotController(snapshot_controller::Options {
                metrics: measures.snapshots.clone(),
                ..options
            }),
            unmeasured => unmeasured,
        }
    }

    /// Runs until the cluster's shutdown; a panic costs this component a pause and the others nothing.
    pub(crate) async fn run(self, cluster: Cluster, driver: Option<Driver>) {
        let name = self.name();
        let once = || self.clone().run_once(cluster.clone(), driver.clone());
        supervised(name, REST, cluster.shutdown(), once).await;
    }

    async fn run_once(self, cluster: Cluster, driver: Option<Driver>) {
        match (self, driver) {
            (Self::SnapshotController(options), _) => snapshot_controller::run(cluster, options).await,
            (Self::Provisioner(options), Some(driver)) => provisioner::run(cluster, driver, options).await,
            (Self::Attacher(options), Some(driver)) => attacher::run(cluster, driver, options).await,
            (Self::Resizer(options), Some(driver)) => resizer::run(cluster, driver, options).await,
            (Self::Snapshotter(options), Some(driver)) => snapshotter::run(cluster, driver, options).await,
            (Self::HealthMonitor(options), Some(driver)) => {
                health_monitor::run(cluster, driver, options).await;
            }
            (_, None) => unreachable!("every component but the snapshot controller is given a driver"),
        }
    }
}

/// Runs something again when it panics, or ends unasked, until `shutdown`.
async fn supervised<R>(
    name: &str,
    rest: Duration,
    shutdown: &tokio_util::sync::CancellationToken,
    once: impl Fn() -> R,
) where
    R: Future<Output = ()>,
{
    loop {
        let ended = AssertUnwindSafe(once()).catch_unwind().await;
        if shutdown.is_cancelled() {
            return;
        }
        match ended {
            Ok(()) => tracing::error!(component = name, "ended unasked; starting it again in {rest:?}"),
            Err(_panic) => tracing::error!(component = name, "panicked; starting it again in {rest:?}"),
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(rest) => {}
        }
    }
}

/// A name as csi-lib-utils writes it in Leases.
pub(crate) fn sanitized(name: &str) -> String {
    let mut name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect();
    if name.ends_with('-') {
        name.push('X');
    }
    name
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio_util::sync::CancellationToken;

    use super::*;

    fn all() -> [Component; 6] {
        [
            Component::Provisioner(provisioner::Options::default()),
            Component::Attacher(attacher::Options::default()),
            Component::Resizer(resizer::Options::default()),
            Component::Snapshotter(snapshotter::Options::default()),
            Component::HealthMonitor(health_monitor::Options::default()),
            Component::SnapshotController(snapshot_controller::Options::default()),
        ]
    }

    #[test]
    fn leases_are_named_as_upstream_names_them() {
        let leases = all().map(|component| component.lease("ebs.csi.aws.com"));
        assert_eq!(
            leases,
            [
                "ebs-csi-aws-com",
                "external-attacher-leader-ebs-csi-aws-com",
                "external-resizer-ebs-csi-aws-com",
                "external-snapshotter-leader-ebs-csi-aws-com",
                "external-health-monitor-leader-ebs-csi-aws-com",
                "snapshot-controller-leader",
            ]
        );
        assert_eq!(sanitized("driver_"), "driver-X");
    }

    #[test]
    fn a_driver_is_given_the_components_that_it_needs() {
        let needed = |identity: &Identity| -> Vec<_> {
            all()
                .iter()
                .filter(|component| component.missing(identity).is_none())
                .map(Component::name)
                .collect()
        };
        assert_eq!(needed(&Identity::default()), ["csi-attacher", "snapshot-controller"]);
        let node = HashSet::from([NodeCapability::ExpandVolume]);
        let grows_on_the_node = Identity { node, ..Identity::default() };
        assert_eq!(needed(&grows_on_the_node), ["csi-attacher", "csi-resizer", "snapshot-controller"]);
        let controller = [
            ControllerCapability::CreateDeleteVolume,
            ControllerCapability::CreateDeleteSnapshot,
            ControllerCapability::ModifyVolume,
            ControllerCapability::ListVolumes,
        ];
        let almost = Identity { controller: controller.into(), ..Identity::default() };
        assert!(!needed(&almost).contains(&"csi-external-health-monitor-controller"));
        let everything = Identity { tells_condition: true, ..almost };
        assert_eq!(needed(&everything).len(), 6);
    }

    #[tokio::test]
    async fn a_component_that_panics_is_started_again_until_it_is_told_to_stop() {
        let (starts, shutdown) = (AtomicUsize::new(0), CancellationToken::new());
        supervised("test", Duration::from_millis(1), &shutdown, || async {
            match starts.fetch_add(1, Ordering::Relaxed) {
                0 | 2 => panic!("a mistake"),
                1 => {}
                _ => shutdown.cancel(),
            }
        })
        .await;
        assert_eq!(starts.into_inner(), 4);
    }
}
