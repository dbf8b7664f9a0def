//! The PersistentVolume of a volume that was made.

use std::collections::BTreeMap;

use berth_csi::v1;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::request::Wanted;
use super::topology;
use crate::driver::Identity;
use crate::names::{
    DELETION_SECRET_NAME, DELETION_SECRET_NAMESPACE, MODIFY_SECRET_NAME, MODIFY_SECRET_NAMESPACE,
    PROVISIONED_BY, PROVISIONER_FINALIZER, PROVISIONER_IDENTITY,
};
use crate::secrets::Purpose;
use crate::size;

/// The object that tells Kubernetes of a volume; `provisioner` names this process in the volume's attributes.
pub(super) fn saved(
    claim: &PersistentVolumeClaim,
    wanted: &Wanted,
    volume: &v1::Volume,
    identity: &Identity,
    provisioner: &str,
) -> PersistentVolume {
    let spec = claim.spec.clone().unwrap_or_default();
    let bytes = if volume.capacity_bytes == 0 { wanted.bytes } else { volume.capacity_bytes };
    let mut attributes = volume.volume_context.clone();
    attributes.insert(PROVISIONER_IDENTITY.to_owned(), provisioner.to_owned());
    let node_affinity =
        if identity.has_topology() { topology::affinity(&volume.accessible_topology) } else { None };
    let secret = |purpose| wanted.secret(purpose).cloned();
    let csi = CSIPersistentVolumeSource {
        driver: identity.name.clone(),
        volume_handle: volume.volume_id.clone(),
        fs_type: (!wanted.block && !wanted.fs_type.is_empty()).then(|| wanted.fs_type.clone()),
        read_only: wanted.read_only.then_some(true),
        volume_attributes: Some(attributes),
        controller_publish_secret_ref: secret(Purpose::ControllerPublish),
        node_stage_secret_ref: secret(Purpose::NodeStage),
        node_publish_secret_ref: secret(Purpose::NodePublish),
        controller_expand_secret_ref: secret(Purpose::ControllerExpand),
        node_expand_secret_ref: secret(Purpose::NodeExpand),
    };
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(wanted.name.clone()),
            annotations: Some(annotations(wanted, identity)),
            finalizers: (wanted.reclaim_policy == "Delete").then(|| vec![PROVISIONER_FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.access_modes,
            capacity: Some(BTreeMap::from([("storage".to_owned(), size::quantity(bytes))])),
            claim_ref: Some(berth_kube::reference(claim)),
            csi: Some(csi),
            mount_options: wanted.mount_options.clone(),
            node_affinity,
            persistent_volume_reclaim_policy: Some(wanted.reclaim_policy.clone()),
            storage_class_name: Some(wanted.class.clone()),
            volume_attributes_class_name: wanted.attributes_class.clone(),
            volume_mode: spec.volume_mode,
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

fn annotations(wanted: &Wanted, identity: &Identity) -> BTreeMap<String, String> {
    let mut annotations = BTreeMap::from([(PROVISIONED_BY.to_owned(), identity.name.clone())]);
    let deletion = wanted.secret(Purpose::Provisioner).cloned().unwrap_or_default();
    annotations.insert(DELETION_SECRET_NAME.to_owned(), deletion.name.unwrap_or_default());
    annotations.insert(DELETION_SECRET_NAMESPACE.to_owned(), deletion.namespace.unwrap_or_default());
    if let Some(modify) = wanted.secret(Purpose::ControllerModify) {
        annotations.insert(MODIFY_SECRET_NAME.to_owned(), modify.name.clone().unwrap_or_default());
        annotations.insert(MODIFY_SECRET_NAMESPACE.to_owned(), modify.namespace.clone().unwrap_or_default());
    }
    annotations
}
