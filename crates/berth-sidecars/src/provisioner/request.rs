//! What is asked of the driver for a claim, and the PersistentVolume of what it made: pure functions of the claim and its
//! class.

use std::collections::BTreeMap;

use berth_core::ClaimField;
use berth_core::names::{
    DELETION_SECRET_NAME, DELETION_SECRET_NAMESPACE, FS_TYPE_PARAMETER, KUBERNETES_PARAMETER_PREFIX,
    MODIFY_SECRET_NAME, MODIFY_SECRET_NAMESPACE, PROVISIONED_BY, PROVISIONER_FINALIZER, PROVISIONER_IDENTITY,
};
use berth_csi::kubernetes::{self, Access};
use berth_csi::v1::{CapacityRange, CreateVolumeRequest, Volume, VolumeCapability};
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, SecretReference,
};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::sources::Source;
use super::{Options, topology};
use crate::driver::{ControllerCapability, Identity, Service};
use crate::failure::Failure;
use crate::secrets::{self, Purpose};
use crate::{name_from_uid, size};

/// The call for a new volume, and what its PersistentVolume will say besides; the same at every retry, whatever happens to
/// class and nodes meanwhile.
#[derive(Debug, Clone)]
pub(super) struct VolumeRequest {
    /// Without secrets, which are read for each call.
    pub(super) call: CreateVolumeRequest,
    pub(super) secrets: BTreeMap<Purpose, SecretReference>,
    pub(super) class: String,
    attributes_class: Option<String>,
    /// Empty for a block volume.
    fs_type: String,
    read_only: bool,
    reclaim_policy: String,
    mount_options: Option<Vec<String>>,
}

impl VolumeRequest {
    /// The request for a claim, without what has to be looked up: the driver's id of the source, and topology.
    pub(super) fn new(
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        source: Option<&Source>,
        attributes: Option<&VolumeAttributesClass>,
        identity: &Identity,
        options: &Options,
    ) -> Result<Self, Failure> {
        let spec = claim.spec.clone().unwrap_or_default();
        check_capabilities(identity, source, attributes.is_some())?;
        if spec.selector.is_some() {
            return Err(Failure::refused("claim Selector is not supported"));
        }
        let name = volume_name(claim, options)?;
        let class_parameters = class.parameters.clone().unwrap_or_default();
        let fs_type = fs_type(&class_parameters, options)?;
        let block = spec.volume_mode.as_deref() == Some("Block");
        let modes = spec.access_modes.unwrap_or_default();
        let mount_options = class.mount_options.clone();
        let volume_capabilities =
            capabilities(&modes, block, &fs_type, mount_options.as_deref().unwrap_or_default(), identity)?;
        let mut secrets = BTreeMap::new();
        for purpose in Purpose::ALL {
            if let Some(secret) = secrets::reference(&class_parameters, purpose, &name, Some(claim))? {
                secrets.insert(purpose, secret);
            }
        }
        let mut parameters = stripped(&class_parameters)?;
        if options.extra_create_metadata {
            parameters.insert(format!("{KUBERNETES_PARAMETER_PREFIX}pvc/name"), claim.name_any());
            parameters.insert(
                format!("{KUBERNETES_PARAMETER_PREFIX}pvc/namespace"),
                claim.namespace().unwrap_or_default(),
            );
            parameters.insert(format!("{KUBERNETES_PARAMETER_PREFIX}pv/name"), name.clone());
            let asked = claim_fields(&parameters, claim);
            parameters.extend(asked);
        }
        if let Some(attributes) = attributes.filter(|attributes| attributes.driver_name != identity.name) {
            return Err(Failure::refused(format!(
                "VolumeAttributesClass {:?} is for driver {:?}, and the claim's StorageClass for {:?}",
                attributes.name_any(),
                attributes.driver_name,
                identity.name
            )));
        }
        let mutable_parameters = attributes.and_then(|attributes| attributes.parameters.clone());
        let call = CreateVolumeRequest {
            name,
            capacity_range: Some(CapacityRange { required_bytes: requested(claim)?, limit_bytes: 0 }),
            volume_capabilities,
            parameters,
            mutable_parameters: mutable_parameters.unwrap_or_default(),
            ..CreateVolumeRequest::default()
        };
        Ok(Self {
            call,
            secrets,
            class: class.name_any(),
            attributes_class: spec.volume_attributes_class_name.filter(|class| !class.is_empty()),
            fs_type: if block { String::new() } else { fs_type },
            read_only: options.controller_publish_readonly && modes == ["ReadOnlyMany"],
            reclaim_policy: class.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()),
            mount_options,
        })
    }

    /// The name of the volume and of its PersistentVolume.
    pub(super) fn name(&self) -> &str {
        &self.call.name
    }

    /// How many bytes are asked for.
    pub(super) fn bytes(&self) -> i64 {
        self.call.capacity_range.map_or(0, |range| range.required_bytes)
    }

    /// What is wrong with a volume that the driver made, if it is not what was asked for.
    pub(super) fn difference(&self, made: &Volume) -> Option<String> {
        let bytes = self.bytes();
        if made.capacity_bytes != 0 && made.capacity_bytes < bytes {
            let capacity = made.capacity_bytes;
            return Some(format!("created volume capacity {capacity} less than requested capacity {bytes}"));
        }
        (self.call.volume_content_source.is_some() && made.content_source.is_none()).then(|| {
            "volume content source missing: the driver made an empty volume instead of a copy".to_owned()
        })
    }

    /// The PersistentVolume of the volume; `provisioner` names this process in the volume's attributes.
    pub(super) fn persistent_volume(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &Volume,
        identity: &Identity,
        provisioner: &str,
    ) -> PersistentVolume {
        let spec = claim.spec.clone().unwrap_or_default();
        let bytes = if volume.capacity_bytes == 0 { self.bytes() } else { volume.capacity_bytes };
        let mut attributes = volume.volume_context.clone();
        attributes.insert(PROVISIONER_IDENTITY.to_owned(), provisioner.to_owned());
        let node_affinity =
            if identity.has_topology() { topology::affinity(&volume.accessible_topology) } else { None };
        let secret = |purpose| self.secrets.get(&purpose).cloned();
        let csi = CSIPersistentVolumeSource {
            driver: identity.name.clone(),
            volume_handle: volume.volume_id.clone(),
            fs_type: Some(self.fs_type.clone()).filter(|fs_type| !fs_type.is_empty()),
            read_only: self.read_only.then_some(true),
            volume_attributes: Some(attributes),
            controller_publish_secret_ref: secret(Purpose::ControllerPublish),
            node_stage_secret_ref: secret(Purpose::NodeStage),
            node_publish_secret_ref: secret(Purpose::NodePublish),
            controller_expand_secret_ref: secret(Purpose::ControllerExpand),
            node_expand_secret_ref: secret(Purpose::NodeExpand),
        };
        let mut annotations = BTreeMap::from([(PROVISIONED_BY.to_owned(), identity.name.clone())]);
        let mut annotate = |secret: &SecretReference, name: &str, namespace: &str| {
            annotations.insert(name.to_owned(), secret.name.clone().unwrap_or_default());
            annotations.insert(namespace.to_owned(), secret.namespace.clone().unwrap_or_default());
        };
        let deletion = secret(Purpose::Provisioner).unwrap_or_default();
        annotate(&deletion, DELETION_SECRET_NAME, DELETION_SECRET_NAMESPACE);
        if let Some(modification) = secret(Purpose::ControllerModify) {
            annotate(&modification, MODIFY_SECRET_NAME, MODIFY_SECRET_NAMESPACE);
        }
        PersistentVolume {
            metadata: ObjectMeta {
                name: Some(self.call.name.clone()),
                annotations: Some(annotations),
                finalizers: (self.reclaim_policy == "Delete").then(|| vec![PROVISIONER_FINALIZER.to_owned()]),
                ..ObjectMeta::default()
            },
            spec: Some(PersistentVolumeSpec {
                access_modes: spec.access_modes,
                capacity: Some(BTreeMap::from([("storage".to_owned(), size::quantity(bytes))])),
                claim_ref: Some(berth_kube::reference(claim)),
                csi: Some(csi),
                mount_options: self.mount_options.clone(),
                node_affinity,
                persistent_volume_reclaim_policy: Some(self.reclaim_policy.clone()),
                storage_class_name: Some(self.class.clone()),
                volume_attributes_class_name: self.attributes_class.clone(),
                volume_mode: spec.volume_mode,
                ..PersistentVolumeSpec::default()
            }),
            status: None,
        }
    }
}

/// The name of a claim's volume.
pub(super) fn volume_name(claim: &PersistentVolumeClaim, options: &Options) -> Result<String, Failure> {
    let uid = claim.uid().unwrap_or_default();
    name_from_uid(&options.volume_name_prefix, options.volume_name_uuid_length, &uid).ok_or_else(|| {
        Failure::refused("a volume's name needs a prefix (--volume-name-prefix) and the claim's UID")
    })
}

/// How many bytes a claim asks for.
pub(super) fn requested(claim: &PersistentVolumeClaim) -> Result<i64, Failure> {
    let requests =
        claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref()?.get("storage"));
    let quantity = requests
        .ok_or_else(|| Failure::refused("the claim requests no storage (spec.resources.requests)"))?;
    size::bytes(quantity).ok_or_else(|| {
        Failure::refused(format!("the claim's storage request {:?} is no number of bytes", quantity.0))
    })
}

fn check_capabilities(identity: &Identity, source: Option<&Source>, modify: bool) -> Result<(), Failure> {
    let missing = |what: &str, which: &str| {
        Err(Failure::refused(format!(
            "CSI driver does not support {what}: {which} capability is not supported"
        )))
    };
    if !identity.services.contains(&Service::ControllerService) {
        return missing("dynamic provisioning", "plugin CONTROLLER_SERVICE");
    }
    if !identity.can(ControllerCapability::CreateDeleteVolume) {
        return missing("dynamic provisioning", "controller CREATE_DELETE_VOLUME");
    }
    match source {
        Some(Source::Snapshot(_)) if !identity.can(ControllerCapability::CreateDeleteSnapshot) => {
            missing("snapshot restore", "controller CREATE_DELETE_SNAPSHOT")
        }
        Some(Source::Claim(_)) if !identity.can(ControllerCapability::CloneVolume) => {
            missing("clone operations", "controller CLONE_VOLUME")
        }
        _ if modify && !identity.can(ControllerCapability::ModifyVolume) => {
            missing("volume modification", "controller MODIFY_VOLUME")
        }
        _ => Ok(()),
    }
}

fn fs_type(parameters: &BTreeMap<String, String>, options: &Options) -> Result<String, Failure> {
    match (parameters.get("fstype"), parameters.get(FS_TYPE_PARAMETER)) {
        (Some(_), Some(_)) => Err(Failure::refused(format!(
            "fstype specified in parameters with both \"fstype\" and {FS_TYPE_PARAMETER:?} keys; keep the latter"
        ))),
        (Some(fs_type), None) | (None, Some(fs_type)) if !fs_type.is_empty() => Ok(fs_type.clone()),
        _ => Ok(options.default_fs_type.clone()),
    }
}

/// One capability per access mode, as drivers expect it.
fn capabilities(
    modes: &[String],
    block: bool,
    fs_type: &str,
    flags: &[String],
    identity: &Identity,
) -> Result<Vec<VolumeCapability>, Failure> {
    let access = if block { Access::Block } else { Access::Mount { fs_type, flags, group: None } };
    let fine = identity.can(ControllerCapability::SingleNodeMultiWriter);
    if modes.is_empty() {
        return Err(Failure::refused(kubernetes::AccessModes::None.to_string()));
    }
    modes
        .iter()
        .map(|mode| {
            kubernetes::access_mode(std::slice::from_ref(mode), fine)
                .map(|mode| kubernetes::capability(mode, access))
                .map_err(|wrong| Failure::refused(wrong.to_string()))
        })
        .collect()
}

/// The parameters that are the driver's.
fn stripped(parameters: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Failure> {
    let mut own = BTreeMap::new();
    for (key, value) in parameters {
        if !key.starts_with(KUBERNETES_PARAMETER_PREFIX) {
            own.insert(key.clone(), value.clone());
        } else if key != FS_TYPE_PARAMETER && !secrets::is_key(key) {
            return Err(Failure::refused(format!(
                "found unknown parameter key {key:?} with reserved namespace {KUBERNETES_PARAMETER_PREFIX}; correct the StorageClass"
            )));
        }
    }
    Ok(own)
}

/// The labels and annotations of a claim that the driver's parameters ask for; no other is sent.
fn claim_fields(
    parameters: &BTreeMap<String, String>,
    claim: &PersistentVolumeClaim,
) -> BTreeMap<String, String> {
    let asked = parameters.values().flat_map(|template| ClaimField::in_template(template));
    asked
        .filter_map(|field| {
            let value = match field {
                ClaimField::Label(key) => claim.labels().get(key),
                ClaimField::Annotation(key) => claim.annotations().get(key),
            };
            Some((field.parameter(), value?.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests;
