//! Annotations, labels and taints of nodes.

/// On a node: the attach-detach controller attaches its volumes.
pub const CONTROLLER_ATTACHES: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
/// On a node: what each of its CSI drivers calls it, as JSON.
pub const CSI_NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// The prefix of the labels that every node has: `os`, `arch`, `hostname`.
pub const NODE_LABEL_PREFIX: &str = "kubernetes.io/";
/// The first prefix of `os` and `arch`, which some manifests still ask for.
pub const BETA_NODE_LABEL_PREFIX: &str = "beta.kubernetes.io/";
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
/// The taint of a node whose disk is nearly full.
pub const DISK_PRESSURE: &str = "node.kubernetes.io/disk-pressure";
/// The taint of a node whose memory is nearly used up.
pub const MEMORY_PRESSURE: &str = "node.kubernetes.io/memory-pressure";
/// The taint of a node that has nearly as many processes as it may have.
pub const PID_PRESSURE: &str = "node.kubernetes.io/pid-pressure";
/// The taint of a node without a network.
pub const NETWORK_UNAVAILABLE: &str = "node.kubernetes.io/network-unavailable";
/// On a Node of `berth up`: "off" has it stopped as by a power cut.
pub const NODE_POWER: &str = "berth.dev/power";
/// On a Node of `berth up`: whether it is "on" or "off" now.
pub const NODE_POWERED: &str = "berth.dev/powered";
