//! The keys of the JSON document that a FlexVolume driver gets, and the directories of its volumes.

/// The plugin directory's name in a node's layout, below which FlexVolume drivers mount devices.
pub const FLEX_PLUGIN: &str = "kubernetes.io/flexvolume";
/// How every key begins that Kubernetes adds to the options of a FlexVolume driver.
pub const FLEX_KEY_PREFIX: &str = "kubernetes.io/";
/// The filesystem type that the volume asks for; empty for none.
pub const FLEX_FS_TYPE: &str = "kubernetes.io/fsType";
/// Whether the volume is used read-only: `ro` or `rw`.
pub const FLEX_READ_WRITE: &str = "kubernetes.io/readwrite";
/// The PersistentVolume's name, or the volume's name in its pod.
pub const FLEX_VOLUME_NAME: &str = "kubernetes.io/pvOrVolumeName";
/// The pod's name, with `mount` only.
pub const FLEX_POD_NAME: &str = "kubernetes.io/pod.name";
/// The pod's namespace, with `mount` only.
pub const FLEX_POD_NAMESPACE: &str = "kubernetes.io/pod.namespace";
/// The pod's uid, with `mount` only.
pub const FLEX_POD_UID: &str = "kubernetes.io/pod.uid";
/// The pod's service account, with `mount` only.
pub const FLEX_SERVICE_ACCOUNT: &str = "kubernetes.io/serviceAccount.name";
/// The group that the pod's volumes belong to, with `mount` only.
pub const FLEX_FS_GROUP: &str = "kubernetes.io/mounterArgs.FsGroup";
/// How the key of an entry of the volume's Secret begins; its value is in base64.
pub const FLEX_SECRET_PREFIX: &str = "kubernetes.io/secret/";
/// The domains that the keys of a volume's own options must not be in.
pub const FLEX_RESERVED_DOMAINS: [&str; 2] = ["kubernetes.io", "k8s.io"];
