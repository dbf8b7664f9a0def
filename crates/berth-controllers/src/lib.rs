//! The control loops of Kubernetes storage.

pub mod attach_detach;
pub mod ephemeral;
pub mod expand;
pub mod persistent_volumes;
pub mod protection;
pub mod scheduler;
pub mod workloads;

use berth_kube::Cluster;

/// Runs every loop until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    tokio::join!(
        persistent_volumes::run(cluster.clone()),
        protection::run(cluster.clone()),
        ephemeral::run(cluster.clone()),
        expand::run(cluster.clone()),
        scheduler::run(cluster.clone()),
        attach_detach::run(cluster.clone()),
        workloads::run(cluster),
    );
}
