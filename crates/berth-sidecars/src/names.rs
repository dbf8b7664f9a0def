//! Annotations, finalizers and keys that other components, and people, rely on.

/// On a claim: which provisioner is to make its volume.
pub(crate) const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
/// The same, as it was called before.
pub(crate) const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";
/// On objects of in-tree drivers: the CSI driver that took over.
pub(crate) const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
/// On a claim: the node that its first pod was given.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// The same, as it was called before.
pub(crate) const ALPHA_SELECTED_NODE: &str = "volume.alpha.kubernetes.io/selected-node";
/// On a claim: its class, as it was written before there was a field.
pub(crate) const BETA_STORAGE_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
/// On a volume: who made it.
pub(crate) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// On a volume: the secret that deletes it.
pub(crate) const DELETION_SECRET_NAME: &str = "volume.kubernetes.io/provisioner-deletion-secret-name";
/// On a volume: that secret's namespace.
pub(crate) const DELETION_SECRET_NAMESPACE: &str =
    "volume.kubernetes.io/provisioner-deletion-secret-namespace";
/// On a volume: the secret that modifies it.
pub(crate) const MODIFY_SECRET_NAME: &str = "volume.kubernetes.io/controller-modify-secret-name";
/// On a volume: that secret's namespace.
pub(crate) const MODIFY_SECRET_NAMESPACE: &str = "volume.kubernetes.io/controller-modify-secret-namespace";
/// Keeps a volume until its storage is gone.
pub(crate) const PROVISIONER_FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
/// Keeps a claim while another is being cloned from it.
pub(crate) const CLONING_PROTECTION: &str = "provisioner.storage.kubernetes.io/cloning-protection";
/// Keeps a snapshot while a claim is being restored from it.
pub(crate) const SNAPSHOT_SOURCE_PROTECTION: &str =
    "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";
/// In a volume's attributes: which provisioner made it.
pub(crate) const PROVISIONER_IDENTITY: &str = "storage.kubernetes.io/csiProvisionerIdentity";
/// Parameters with this prefix are Kubernetes' own.
pub(crate) const RESERVED: &str = "csi.storage.k8s.io/";

/// The finalizer by which a claim remembers that a volume may be coming into being for it.
pub(crate) fn creating(driver: &str) -> String {
    format!("creating.berth.dev/{driver}")
}

/// On an attachment: the node as the driver knows it, kept for when the CSINode is gone.
pub(crate) const NODE_ID: &str = "csi.alpha.kubernetes.io/node-id";
/// On an attachment: the volume as the driver knows it, kept for when the PersistentVolume is gone.
pub(crate) const VOLUME_HANDLE: &str = "attacher.berth.dev/volume-handle";
/// On an attachment: the secret that detaches, as namespace/name, kept for when the PersistentVolume is gone.
pub(crate) const PUBLISH_SECRET: &str = "attacher.berth.dev/publish-secret";

/// The finalizer by which attachments and their volumes are kept until they are detached.
pub(crate) fn attacher_finalizer(driver: &str) -> String {
    let mut name: String =
        driver.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect();
    if name.ends_with('-') {
        name.push('X');
    }
    format!("external-attacher/{name}")
}

/// On a claim: the last growth needed nothing on the node.
pub(crate) const NODE_EXPANSION_NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";
/// On a volume: its size before a growth that the node has yet to finish.
pub(crate) const PRE_RESIZE_CAPACITY: &str = "volume.alpha.kubernetes.io/pre-resize-capacity";
