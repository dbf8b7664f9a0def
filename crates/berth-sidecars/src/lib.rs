//! The external components beside a CSI driver.
//!
//! [`provisioner`], [`attacher`], [`resizer`] and [`snapshotter`] turn Kubernetes objects into calls of the driver's
//! Controller service; [`registrar`] makes its Node service known to the kubelet. All share one [`driver::Driver`]: one
//! connection, one answer to what the driver can do, and one operation at a time per volume. [`snapshot_controller`]
//! makes the objects that the snapshotter acts on; it calls no driver.

pub mod attacher;
pub mod driver;
mod edit;
mod failure;
mod finalizers;
pub mod liveness;
mod locks;
mod names;
pub mod provisioner;
pub mod registrar;
pub mod resizer;
mod secrets;
mod size;
pub mod snapshot_controller;
pub mod snapshots;
pub mod snapshotter;

use berth_csi::Endpoint;
use berth_kube::Cluster;

/// Runs every component that a driver needs beside it, with upstream's defaults, until the cluster's shutdown.
pub async fn run(cluster: Cluster, endpoint: Endpoint) {
    let driver = driver::Driver::connect(&endpoint);
    tokio::join!(
        provisioner::run(cluster.clone(), driver.clone(), provisioner::Options::default()),
        attacher::run(cluster.clone(), driver.clone(), attacher::Options::default()),
        resizer::run(cluster.clone(), driver.clone(), resizer::Options::default()),
        snapshotter::run(cluster.clone(), driver, snapshotter::Options::default()),
        snapshot_controller::run(cluster, snapshot_controller::Options::default()),
    );
}
