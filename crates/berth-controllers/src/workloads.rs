//! Decides which pods exist: Deployments make ReplicaSets, ReplicaSets make pods.
//!
//! Reads: Deployment, ReplicaSet, Pod. Writes: ReplicaSets (created, scaled, deleted) and Deployment status and
//! revision for `deployment-controller`; pods (created, deleted, adopted, released) and ReplicaSet status for
//! `replicaset-controller`. Events: `ScalingReplicaSet` on Deployments; `SuccessfulCreate`, `FailedCreate`,
//! `SuccessfulDelete`, `FailedDelete` on ReplicaSets.
//!
//! What was just written is in the caches when the write returns, and pods being deleted are remembered until they are
//! seen to go, so nothing is created or deleted twice.

mod deployments;
mod ownership;
mod replica_sets;

use berth_kube::Cluster;

/// Runs both loops until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    tokio::join!(deployments::run(cluster.clone()), replica_sets::run(cluster));
}
