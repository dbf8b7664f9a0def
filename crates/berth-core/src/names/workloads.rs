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
