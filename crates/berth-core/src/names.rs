//! Names that Kubernetes, CSI and other people's manifests rely on.

mod api;
pub mod events;
mod flex;
mod nodes;
mod services;
mod sidecars;
pub mod snapshots;
mod volumes;
mod workloads;

pub use api::*;
pub use flex::*;
pub use nodes::*;
pub use services::*;
pub use sidecars::*;
pub use volumes::*;
pub use workloads::*;

/// The local driver's name, as it stands in StorageClass.provisioner.
pub const LOCAL_DRIVER: &str = "local.berth.dev";
/// The NFS driver's name, which is csi-driver-nfs's too.
pub const NFS_DRIVER: &str = "nfs.csi.k8s.io";
/// The topology key of a volume that lives on one node.
pub const TOPOLOGY_NODE: &str = "topology.berth.dev/node";
/// The host-path example driver, which the local driver can stand in for.
pub const HOSTPATH_DRIVER: &str = "hostpath.csi.k8s.io";
/// The driver of DigitalOcean's block storage, as upstream's driver is called.
pub const DIGITALOCEAN_DRIVER: &str = "dobs.csi.digitalocean.com";
/// The driver of Alibaba Cloud's disks, as upstream's driver is called.
pub const ALIYUN_DRIVER: &str = "diskplugin.csi.alibabacloud.com";
/// The prefix of a cloud disk's tags that say for which claim and volume it was made: `pvc/name`, `pvc/namespace`, `pv/name`.
pub const CREATED_FOR_PREFIX: &str = "kubernetes.io/created-for/";
/// The topology key of the host-path example driver.
pub const HOSTPATH_TOPOLOGY_NODE: &str = "topology.hostpath.csi/node";
/// In a publish call's volume context: "true" for an inline ephemeral volume.
pub const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
/// The prefix of parameters and contexts that Kubernetes itself adds; drivers must accept them all.
pub const KUBERNETES_PARAMETER_PREFIX: &str = "csi.storage.k8s.io/";
/// Where a pod finds the namespace that it runs in.
pub const SERVICE_ACCOUNT_NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// In a publish call's volume context or secrets: the tokens of the pod's service account.
pub const SERVICE_ACCOUNT_TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";
