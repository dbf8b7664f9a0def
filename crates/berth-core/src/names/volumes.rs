//! Annotations and finalizers of claims, volumes, classes and attachments, and the volume plugins of old.

/// On a claim: the binding is finished.
pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// On a volume or a claim: a controller made the binding, not a person.
pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// On a claim: the node the scheduler chose for it.
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// The class of a claim or a volume in the old days; still stronger than the field.
pub const BETA_STORAGE_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
/// On a volume: who made it.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// On a volume or a claim: the CSI driver that stands in for a plugin of old.
pub const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
/// On a claim: the provisioner that is asked to serve it.
pub const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
/// The same under its first name, which some provisioners still read.
pub const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";
/// On a volume: how large it was before an expansion whose filesystem is not grown yet.
pub const PRE_RESIZE_CAPACITY: &str = "volume.alpha.kubernetes.io/pre-resize-capacity";
/// On a class: new claims without a class are of this one.
pub const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";
/// The same under its first name.
pub const BETA_DEFAULT_CLASS: &str = "storageclass.beta.kubernetes.io/is-default-class";
/// The provisioner of classes whose volumes are made by hand.
pub const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// The finalizer of a volume that a plugin of old made: not gone before its data is.
pub const IN_TREE_VOLUME_FINALIZER: &str = "kubernetes.io/pv-controller";
/// The finalizer of a volume that a provisioner made: not gone before its data is.
pub const PROVISIONER_FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
/// The finalizer of a claim: not gone while a pod uses it.
pub const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
/// The finalizer of a volume: not gone while it is bound.
pub const VOLUME_PROTECTION: &str = "kubernetes.io/pv-protection";
/// The finalizer of a VolumeAttributesClass: not gone while something names it.
pub const ATTRIBUTES_CLASS_PROTECTION: &str = "kubernetes.io/vac-protection";

/// How the names of Kubernetes' own plugins begin.
pub const IN_TREE_PLUGIN_PREFIX: &str = "kubernetes.io/";
/// How the name of a CSI volume in a node's status begins; `<driver>^<handle>` follows.
pub const CSI_VOLUME_PREFIX: &str = "kubernetes.io/csi/";
/// The plugin for CSI drivers, whose name a node's directories carry.
pub const CSI_PLUGIN: &str = "kubernetes.io/csi";
/// The plugin for `configMap`.
pub const CONFIG_MAP_PLUGIN: &str = "kubernetes.io/configmap";
/// The plugin for `downwardAPI`.
pub const DOWNWARD_API_PLUGIN: &str = "kubernetes.io/downward-api";
/// The plugin for `emptyDir`.
pub const EMPTY_DIR_PLUGIN: &str = "kubernetes.io/empty-dir";
/// The plugin for `hostPath`, which also deletes volumes below a directory of a node.
pub const HOST_PATH_PLUGIN: &str = "kubernetes.io/host-path";
/// The plugin for `image`.
pub const IMAGE_PLUGIN: &str = "kubernetes.io/image";
/// The plugin for `local` PersistentVolumes.
pub const LOCAL_PLUGIN: &str = "kubernetes.io/local-volume";
/// The plugin for `nfs`.
pub const NFS_PLUGIN: &str = "kubernetes.io/nfs";
/// The plugin for `projected`.
pub const PROJECTED_PLUGIN: &str = "kubernetes.io/projected";
/// The plugin for `secret`.
pub const SECRET_PLUGIN: &str = "kubernetes.io/secret";

/// On an attachment: its volume as `<driver>^<handle>`, which its name does not give away.
pub const ATTACHED_VOLUME: &str = "attach-detach.berth.dev/volume";

/// The CSI driver that serves a plugin of old.
pub fn csi_driver_of_plugin(plugin: &str) -> Option<&'static str> {
    Some(match plugin {
        "kubernetes.io/aws-ebs" => "ebs.csi.aws.com",
        "kubernetes.io/azure-disk" => "disk.csi.azure.com",
        "kubernetes.io/azure-file" => "file.csi.azure.com",
        "kubernetes.io/cinder" => "cinder.csi.openstack.org",
        "kubernetes.io/gce-pd" => "pd.csi.storage.gke.io",
        "kubernetes.io/portworx-volume" => "pxd.portworx.com",
        "kubernetes.io/vsphere-volume" => "csi.vsphere.vmware.com",
        _ => return None,
    })
}
/// The image of the pod that empties a volume whose reclaim policy is Recycle: it has a shell, find and ls.
pub const RECYCLER_IMAGE: &str = "registry.k8s.io/build-image/debian-base:bookworm-v1.0.6";
/// In CreateVolume's parameters: the claim's name, where the provisioner hands over metadata (--extra-create-metadata).
pub const CLAIM_NAME_PARAMETER: &str = "csi.storage.k8s.io/pvc/name";
/// In CreateVolume's parameters: the claim's namespace.
pub const CLAIM_NAMESPACE_PARAMETER: &str = "csi.storage.k8s.io/pvc/namespace";
