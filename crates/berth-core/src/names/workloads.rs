//! Labels and annotations of workloads and their pods, and of whatever kubectl applies.

/// On a Deployment or a ReplicaSet: the number of its template.
pub const DEPLOYMENT_REVISION: &str = "deployment.kubernetes.io/revision";
/// On a ReplicaSet: the numbers its template had before.
pub const DEPLOYMENT_REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
/// On a ReplicaSet: how many pods its Deployment wants.
pub const DEPLOYMENT_DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
/// On a ReplicaSet: how many pods its Deployment may have during a rollout.
pub const DEPLOYMENT_MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";
/// On a pod: which of a ReplicaSet's pods go first, the cheapest.
pub const POD_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// On what kubectl applied: as which it was applied last.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// On a pod of a StatefulSet or a DaemonSet: the revision that it was made from.
pub const CONTROLLER_REVISION_HASH: &str = "controller-revision-hash";
/// On a ControllerRevision: the hash of its template.
pub const REVISION_HASH: &str = "controller.kubernetes.io/hash";
/// On a pod of a StatefulSet: its name, so that a Service can choose this one pod.
pub const STATEFUL_SET_POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
/// On a pod of a StatefulSet: its ordinal.
pub const POD_INDEX: &str = "apps.kubernetes.io/pod-index";
/// On a pod of a Job until it is counted: its object stays while the finalizer is there, so that no end of a pod is missed.
pub const JOB_TRACKING: &str = "batch.kubernetes.io/job-tracking";
/// Label of a Job's pods: the Job's uid. The Job selects its pods by it.
pub const JOB_CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";
/// The same, as it was called before.
pub const LEGACY_JOB_CONTROLLER_UID: &str = "controller-uid";
/// Label of a Job's pods: the Job's name.
pub const JOB_NAME: &str = "batch.kubernetes.io/job-name";
/// The same, as it was called before.
pub const LEGACY_JOB_NAME: &str = "job-name";
/// Label and annotation of an indexed Job's pod: its index.
pub const JOB_COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";
/// On a pod of an indexed Job: how many pods of its index failed before it.
pub const JOB_INDEX_FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
/// On a pod of an indexed Job: how many of its index failed in a way that the failure policy ignores.
pub const JOB_INDEX_IGNORED_FAILURES: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
/// The value of a Job's `managedBy` that means Kubernetes' own controller.
pub const JOB_CONTROLLER: &str = "kubernetes.io/job-controller";
/// On a Job that a CronJob made: for which time.
pub const CRON_JOB_SCHEDULED: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
