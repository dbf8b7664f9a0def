//! What the annotations and finalizers of volumes, claims and classes call for.

use std::cmp::Reverse;
use std::sync::Arc;

use berth_core::names::{
    BETA_DEFAULT_CLASS, BETA_STORAGE_PROVISIONER, DEFAULT_CLASS, IN_TREE_PLUGIN_PREFIX,
    IN_TREE_VOLUME_FINALIZER, MIGRATED_TO, PROVISIONED_BY, PROVISIONER_FINALIZER, STORAGE_PROVISIONER,
    csi_driver_of_plugin,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;

use super::step::Step;

const DEFAULT_CLASSES: [&str; 2] = [DEFAULT_CLASS, BETA_DEFAULT_CLASS];

/// Makes a claim's annotation about migration what it must be, if it is not.
pub(super) fn migration_of_claim(claim: &PersistentVolumeClaim) -> Option<Step> {
    let annotations = claim.annotations();
    let provisioner =
        annotations.get(STORAGE_PROVISIONER).or_else(|| annotations.get(BETA_STORAGE_PROVISIONER))?;
    let known = annotations.get(MIGRATED_TO).map(String::as_str).filter(|driver| !driver.is_empty());
    let driver = csi_driver_of_plugin(provisioner);
    (driver != known).then_some(Step::MigrateClaim(driver))
}

/// What a volume's annotation about migration and its finalizers must be, if that is not what they are.
pub(super) fn migration_of_volume(volume: &PersistentVolume) -> Option<(Option<&'static str>, Vec<String>)> {
    let annotations = volume.annotations();
    let provisioner = annotations.get(PROVISIONED_BY)?;
    let known = annotations.get(MIGRATED_TO).map(String::as_str).filter(|driver| !driver.is_empty());
    let driver = csi_driver_of_plugin(provisioner);
    let finalizers = finalizers_of(volume, provisioner, driver.is_some());
    (driver != known || finalizers != volume.finalizers()).then_some((driver, finalizers))
}

fn finalizers_of(volume: &PersistentVolume, provisioner: &str, migrated: bool) -> Vec<String> {
    let mut finalizers = volume.finalizers().to_vec();
    if migrated {
        finalizers.retain(|finalizer| finalizer != IN_TREE_VOLUME_FINALIZER);
    } else if provisioner.starts_with(IN_TREE_PLUGIN_PREFIX) {
        match reclaim_policy(volume) {
            "Delete" if !finalizers.iter().any(|finalizer| finalizer == IN_TREE_VOLUME_FINALIZER) => {
                finalizers.push(IN_TREE_VOLUME_FINALIZER.to_owned());
            }
            "Retain" | "Recycle" => finalizers.retain(|finalizer| finalizer != IN_TREE_VOLUME_FINALIZER),
            _ => {}
        }
        finalizers.retain(|finalizer| finalizer != PROVISIONER_FINALIZER);
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
    DEFAULT_CLASSES.iter().any(|name| class.annotations().get(*name).is_some_and(|value| value == "true"))
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
