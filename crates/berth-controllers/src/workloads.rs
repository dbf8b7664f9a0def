//! Decides which pods exist, and which claims: Deployments make ReplicaSets, CronJobs make Jobs; ReplicaSets, StatefulSets,
//! DaemonSets and Jobs make pods.
//!
//! PodDisruptionBudgets say how many of these pods may be disrupted.
//!
//! Reads: Deployment, ReplicaSet, StatefulSet, DaemonSet, Job, CronJob, ControllerRevision, Pod, PersistentVolumeClaim, Node. Writes:
//! ReplicaSets (created, scaled, deleted) and Deployment status and revision for `deployment-controller`; pods (created,
//! deleted, adopted, released) and ReplicaSet status for `replicaset-controller`; pods, claims (created, and their owners),
//! ControllerRevisions and StatefulSet status for `statefulset-controller`; pods, ControllerRevisions and DaemonSet status
//! for `daemonset-controller`; pods (created, deleted, adopted, released, and the finalizer `job-tracking`), Job status and
//! the deletion of expired Jobs for `job-controller`; Jobs and CronJob status for `cronjob-controller`; PodDisruptionBudget status for `controllermanager`. Events: `ScalingReplicaSet` on Deployments; `SuccessfulCreate`, `FailedCreate`,
//! `SuccessfulDelete`, `FailedDelete` on what makes pods; `SuccessfulUpdate`, `FailedUpdate`, `ClaimSmallerThanTemplate` on
//! StatefulSets; `FailedDaemonPod`, `SucceededDaemonPod` on DaemonSets; `Completed`, `BackoffLimitExceeded`,
//! `DeadlineExceeded`, `PodFailurePolicy`, `FailedIndexes`, `MaxFailedIndexesExceeded`, `TooManySucceededPods`, `Suspended`,
//! `Resumed` on Jobs; `SawCompletedJob`, `UnexpectedJob`, `MissingJob`, `MissSchedule`, `TooManyMissedTimes`,
//! `JobAlreadyActive`, `FailedGet`, `InvalidSchedule`, `UnparseableSchedule`, `UnknownTimeZone` on CronJobs; `NoPods`, `UnmanagedPods`, `CalculateExpectedPodCountFailed` on PodDisruptionBudgets.
//!
//! What was just written is in the caches when the write returns, and pods being deleted are remembered until they are
//! seen to go, so nothing is created or deleted twice.

mod budgets;
mod cron_jobs;
mod daemon_sets;
mod deployments;
mod jobs;
mod ownership;
mod pods;
mod replica_sets;
mod revisions;
mod stateful_sets;
mod workload;

use berth_kube::Cluster;

/// Runs every loop until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    tokio::join!(
        deployments::run(cluster.clone()),
        replica_sets::run(cluster.clone()),
        stateful_sets::run(cluster.clone()),
        daemon_sets::run(cluster.clone()),
        jobs::run(cluster.clone()),
        cron_jobs::run(cluster.clone()),
        budgets::run(cluster)
    );
}
