//! The external components beside a CSI driver.
//!
//! [`provisioner`], [`attacher`], [`resizer`] and [`snapshotter`] turn Kubernetes objects into calls of the driver's
//! Controller service, and [`health_monitor`] asks it how the volumes are; [`registrar`] makes its Node service known to
//! the kubelet. All share one [`driver::Driver`]: one connection, one answer to what the driver can do, and one operation
//! at a time per volume. [`snapshot_controller`] makes the objects that the snapshotter acts on; it calls no driver.

pub mod attacher;
pub mod driver;
mod failure;
pub mod health_monitor;
pub mod liveness;
mod place;
pub mod provisioner;
pub mod registrar;
pub mod resizer;
mod secrets;
mod size;
pub mod snapshot_controller;
pub mod snapshots;
pub mod snapshotter;

use berth_csi::Endpoint;
use berth_kube::{Cluster, storage};

/// Runs every component that a driver needs beside it, until the cluster's shutdown; the snapshot controller, of which a
/// cluster has one, is not among them. All is as upstream's defaults have it, but that the driver is told the claims'
/// names, and capacity while the CSIDriver says that the scheduler is to read it.
pub async fn run(cluster: Cluster, endpoint: Endpoint) {
    let driver = driver::Driver::connect(&endpoint);
    let capacity =
        provisioner::Capacity { only_if_announced: true, ..provisioner::Capacity::new("kube-system") };
    let provisioning = provisioner::Options {
        capacity: Some(capacity),
        extra_create_metadata: true,
        ..provisioner::Options::default()
    };
    tokio::join!(
        provisioner::run(cluster.clone(), driver.clone(), provisioning),
        attacher::run(cluster.clone(), driver.clone(), attacher::Options::default()),
        resizer::run(cluster.clone(), driver.clone(), resizer::Options::default()),
        snapshotter::run(cluster.clone(), driver.clone(), snapshotter::Options::default()),
        health_monitor::run(cluster, driver, health_monitor::Options::default()),
    );
}

/// The name of what a driver makes for an object: a prefix, and the object's UID or, without its dashes, as much of it as
/// `length` says. `None` if one of them is empty.
fn name_from_uid(prefix: &str, length: Option<usize>, uid: &str) -> Option<String> {
    if prefix.is_empty() || uid.is_empty() {
        return None;
    }
    let part = match length {
        None => uid.to_owned(),
        Some(length) => uid.replace('-', "").chars().take(length).collect(),
    };
    Some(storage::name_of_uid(prefix, &part))
}
