//! Annotations of Deployments, ReplicaSets and their pods, and of whatever kubectl applies.

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
