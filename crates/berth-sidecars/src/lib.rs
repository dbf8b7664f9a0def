//! The external components beside a CSI driver.
//!
//! [`provisioner`], [`attacher`] and [`resizer`] turn Kubernetes objects into calls of the driver's Controller service;
//! [`registrar`] makes its Node service known to the kubelet. All share one [`driver::Driver`]: one connection, one
//! answer to what the driver can do, and one operation at a time per volume.

pub mod attacher;
pub mod driver;
mod failure;
mod finalizers;
mod locks;
mod names;
pub mod provisioner;
pub mod registrar;
pub mod resizer;
mod secrets;
mod size;
pub mod snapshots;

use berth_csi::Endpoint;
use berth_kube::Cluster;

/// Runs every component that a driver needs beside it, with upstream's defaults, until the cluster's shutdown.
pub async fn run(cluster: Cluster, endpoint: Endpoint) {
    let driver = driver::Driver::connect(&endpoint);
    tokio::join!(
        provisioner::run(cluster.clone(), driver.clone(), provisioner::Options::default()),
        attacher::run(cluster.clone(), driver.clone(), attacher::Options::default()),
        resizer::run(cluster, driver, resizer::Options::default()),
    );
}
