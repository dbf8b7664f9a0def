//! Annotations, finalizers and parameters of the components beside CSI drivers.

/// On a claim: the node the scheduler chose for it, as it was called before.
pub const ALPHA_SELECTED_NODE: &str = "volume.alpha.kubernetes.io/selected-node";
/// On a volume: the secret that deletes it.
pub const DELETION_SECRET_NAME: &str = "volume.kubernetes.io/provisioner-deletion-secret-name";
/// On a volume: that secret's namespace.
pub const DELETION_SECRET_NAMESPACE: &str = "volume.kubernetes.io/provisioner-deletion-secret-namespace";
/// On a volume: the secret that modifies it.
pub const MODIFY_SECRET_NAME: &str = "volume.kubernetes.io/controller-modify-secret-name";
/// On a volume: that secret's namespace.
pub const MODIFY_SECRET_NAMESPACE: &str = "volume.kubernetes.io/controller-modify-secret-namespace";
/// Keeps a claim while another is being cloned from it.
pub const CLONING_PROTECTION: &str = "provisioner.storage.kubernetes.io/cloning-protection";
/// Keeps a snapshot while a claim is being restored from it.
pub const SNAPSHOT_SOURCE_PROTECTION: &str =
    "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";
/// In a volume's attributes: which provisioner made it.
pub const PROVISIONER_IDENTITY: &str = "storage.kubernetes.io/csiProvisionerIdentity";

/// The finalizer by which a claim remembers that a volume may be coming into being for it.
pub fn creating(driver: &str) -> String {
    format!("creating.berth.dev/{driver}")
}

/// The reason of an event about something a CSI driver warned of although the call succeeded.
pub const DRIVER_WARNING: &str = "DriverWarning";
/// On a snapshot's or group's content: what the driver warned of when it took it.
pub const SNAPSHOT_WARNING: &str = "snapshotter.berth.dev/driver-warning";

/// On an attachment: the node as the driver knows it, kept for when the CSINode is gone.
pub const NODE_ID: &str = "csi.alpha.kubernetes.io/node-id";
/// On an attachment: the volume as the driver knows it, kept for when the PersistentVolume is gone.
pub const VOLUME_HANDLE: &str = "attacher.berth.dev/volume-handle";
/// On an attachment: the secret that detaches, as namespace/name, kept for when the PersistentVolume is gone.
pub const PUBLISH_SECRET: &str = "attacher.berth.dev/publish-secret";

/// On a claim: the last growth needed nothing on the node.
pub const NODE_EXPANSION_NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";
/// On a claim: the resizer that is asked to grow its volume.
pub const STORAGE_RESIZER: &str = "volume.kubernetes.io/storage-resizer";

/// In a class's parameters: the filesystem.
pub const FS_TYPE_PARAMETER: &str = "csi.storage.k8s.io/fstype";
/// In a class's parameters: the secret for every purpose that has none of its own.
pub const SECRET_NAME_PARAMETER: &str = "csi.storage.k8s.io/secret-name";
/// In a class's parameters: that secret's namespace.
pub const SECRET_NAMESPACE_PARAMETER: &str = "csi.storage.k8s.io/secret-namespace";

/// On a CSIStorageCapacity: the driver.
pub const CAPACITY_DRIVER: &str = "csi.storage.k8s.io/drivername";
/// On a CSIStorageCapacity: who keeps it current.
pub const CAPACITY_MANAGED_BY: &str = "csi.storage.k8s.io/managed-by";
