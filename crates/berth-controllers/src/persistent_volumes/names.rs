//! The annotations and finalizers of the PV controller, and which plugins of old are served by which CSI driver.

use std::cmp::Reverse;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;

use super::step::Step;

/// On a volume: who made it.
pub(super) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// On a volume or a claim: the CSI driver that stands in for a plugin of old.
pub(super) const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
/// On a claim: the provisioner that is asked to serve it.
pub(super) const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
/// The same under its first name, which some provisioners still read.
pub(super) const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";
/// On a volume: how large it was before an expansion whose filesystem is not grown yet.
pub(super) const PRE_RESIZE_CAPACITY: &str = "volume.alpha.kubernetes.io/pre-resize-capacity";
/// On a class: new claims without a class are of this one.
const DEFAULT_CLASS: [&str; 2] =
    ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];
/// On a volume that a plugin of old made: not gone before its data is.
pub(super) const IN_TREE_FINALIZER: &str = "kubernetes.io/pv-controller";
/// On a volume that a provisioner made: not gone before its data is.
pub(super) const EXTERNAL_FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
/// How the names of Kubernetes' own plugins begin.
pub(super) const IN_TREE: &str = "kubernetes.io/";

/// The CSI driver that serves a plugin of old.
pub(super) fn csi_driver_of(plugin: &str) -> Option<&'static str> {
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

/// Makes a claim's annotation about migration what it must be, if it is not.
pub(super) fn migration_of_claim(claim: &PersistentVolumeClaim) -> Option<Step> {
    let annotations = claim.annotations();
    let provisioner =
        annotations.get(STORAGE_PROVISIONER).or_else(|| annotations.get(BETA_STORAGE_PROVISIONER))?;
    let known = annotations.get(MIGRATED_TO).map(String::as_str).filter(|driver| !driver.is_empty());
    let driver = csi_driver_of(provisioner);
    (driver != known).then_some(Step::MigrateClaim(driver))
}

/// What a volume's annotation about migration and its finalizers must be, if that is not what they are.
pub(super) fn migration_of_volume(volume: &PersistentVolume) -> Option<(Option<&'static str>, Vec<String>)> {
    let annotations = volume.annotations();
    let provisioner = annotations.get(PROVISIONED_BY)?;
    let known = annotations.get(MIGRATED_TO).map(String::as_str).filter(|driver| !driver.is_empty());
    let driver = csi_driver_of(provisioner);
    let finalizers = finalizers_of(volume, provisioner, driver.is_some());
    (driver != known || finalizers != volume.finalizers()).then_some((driver, finalizers))
}

fn finalizers_of(volume: &PersistentVolume, provisioner: &str, migrated: bool) -> Vec<String> {
    let mut finalizers = volume.finalizers().to_vec();
    if migrated {
        finalizers.retain(|finalizer| finalizer != IN_TREE_FINALIZER);
    } else if provisioner.starts_with(IN_TREE) {
        match reclaim_policy(volume) {
            "Delete" if !finalizers.iter().any(|finalizer| finalizer == IN_TREE_FINALIZER) => {
                finalizers.push(IN_TREE_FINALIZER.to_owned());
            }
            "Retain" | "Recycle" => finalizers.retain(|finalizer| finalizer != IN_TREE_FINALIZER),
            _ => {}
        }
        finalizers.retain(|finalizer| finalizer != EXTERNAL_FINALIZER);
    }
    finalizers
}

/// What happens to a volume whose claim is gone.
pub(super) fn reclaim_policy(volume: &PersistentVolume) -> &str {
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    policy.unwrap_or("Retain")
}

/// Whether new claims without a class are of this one.
pub(super) fn is_default(class: &StorageClass) -> bool {
    DEFAULT_CLASS.iter().any(|name| class.annotations().get(*name).is_some_and(|value| value == "true"))
}

/// The default class; of several the newest, and of those the first by name.
pub(super) fn default_of(classes: &[Arc<StorageClass>]) -> Option<String> {
    let defaults = classes.iter().filter(|class| is_default(class));
    let newest = defaults.min_by_key(|class| {
        let created = class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (Reverse(created), class.name_any())
    });
    newest.map(|class| class.name_any())
}
