//! Annotations, labels and taints of nodes.

/// On a node: the attach-detach controller attaches its volumes.
pub const CONTROLLER_ATTACHES: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
/// On a node: volumes of pods that are over stay mounted.
pub const KEEP_TERMINATED_POD_VOLUMES: &str = "volumes.kubernetes.io/keep-terminated-pod-volumes";
/// The taint of a node that was shut down for good.
pub const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// The taint of a node that takes no new pods.
pub const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// The label of a node's zone.
pub const ZONE: &str = "topology.kubernetes.io/zone";
/// The label of a node's region.
pub const REGION: &str = "topology.kubernetes.io/region";
/// A zone's label under its first name.
pub const BETA_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
/// A region's label under its first name.
pub const BETA_REGION: &str = "failure-domain.beta.kubernetes.io/region";
