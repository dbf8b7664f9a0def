//! What is asked of the driver for a claim: a pure function of the claim and its class.

use std::collections::BTreeMap;

use berth_core::ClaimField;
use berth_csi::kubernetes::{self, Access};
use berth_csi::v1::{TopologyRequirement, VolumeCapability, VolumeContentSource};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, SecretReference};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::ResourceExt as _;

use super::Options;
use super::source::Source;
use crate::driver::{ControllerCapability, Identity, Service};
use crate::failure::Failure;
use crate::names::RESERVED;
use crate::secrets::{self, Purpose};
use crate::size;

/// A new volume as it is asked for; the same at every retry, whatever happens to class and nodes meanwhile.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) bytes: i64,
    pub(super) capabilities: Vec<VolumeCapability>,
    pub(super) parameters: BTreeMap<String, String>,
    pub(super) mutable_parameters: BTreeMap<String, String>,
    pub(super) attributes_class: Option<String>,
    pub(super) source: Option<VolumeContentSource>,
    pub(super) topology: Option<TopologyRequirement>,
    pub(super) secrets: BTreeMap<Purpose, SecretReference>,
    pub(super) fs_type: String,
    pub(super) block: bool,
    pub(super) read_only: bool,
    pub(super) class: String,
    pub(super) reclaim_policy: String,
    pub(super) mount_options: Option<Vec<String>>,
}

impl Wanted {
    /// The secret for a purpose.
    pub(super) fn secret(&self, purpose: Purpose) -> Option<&SecretReference> {
        self.secrets.get(&purpose)
    }
}

/// The request for a claim, without what has to be looked up: source and topology.
pub(super) fn wanted(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    attributes: Option<&VolumeAttributesClass>,
    identity: &Identity,
    options: &Options,
) -> Result<Wanted, Failure> {
    let spec = claim.spec.clone().unwrap_or_default();
    let source = Source::of(claim, options.cross_namespace_sources)?;
    check_capabilities(identity, source.as_ref(), attributes.is_some())?;
    if spec.selector.is_some() {
        return Err(Failure::refused("claim Selector is not supported"));
    }
    let name = volume_name(claim, options)?;
    let class_parameters = class.parameters.clone().unwrap_or_default();
    let fs_type = fs_type(&class_parameters, options)?;
    let block = spec.volume_mode.as_deref() == Some("Block");
    let modes = spec.access_modes.clone().unwrap_or_default();
    let mount_options = class.mount_options.clone();
    let capabilities =
        capabilities(&modes, block, &fs_type, mount_options.as_deref().unwrap_or_default(), identity)?;
    let mut secrets = BTreeMap::new();
    for purpose in Purpose::ALL {
        if let Some(secret) = secrets::reference(&class_parameters, purpose, &name, Some(claim))? {
            secrets.insert(purpose, secret);
        }
    }
    let mut parameters = stripped(&class_parameters)?;
    if options.extra_create_metadata {
        parameters.insert(format!("{RESERVED}pvc/name"), claim.name_any());
        parameters.insert(format!("{RESERVED}pvc/namespace"), claim.namespace().unwrap_or_default());
        parameters.insert(format!("{RESERVED}pv/name"), name.clone());
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
    Ok(Wanted {
        bytes: requested(claim)?,
        name,
        capabilities,
        parameters,
        mutable_parameters: attributes
            .and_then(|attributes| attributes.parameters.clone())
            .unwrap_or_default(),
        attributes_class: spec.volume_attributes_class_name.filter(|class| !class.is_empty()),
        source: None,
        topology: None,
        secrets,
        fs_type: if block { String::new() } else { fs_type },
        block,
        read_only: options.controller_publish_readonly && modes == ["ReadOnlyMany"],
        class: class.name_any(),
        reclaim_policy: class.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()),
        mount_options,
    })
}

/// The name of a claim's volume.
pub(super) fn volume_name(claim: &PersistentVolumeClaim, options: &Options) -> Result<String, Failure> {
    let uid = claim.uid().unwrap_or_default();
    if options.volume_name_prefix.is_empty() || uid.is_empty() {
        return Err(Failure::refused(
            "a volume's name needs a prefix (--volume-name-prefix) and the claim's UID",
        ));
    }
    let part = match options.volume_name_uuid_length {
        None => uid,
        Some(length) => uid.replace('-', "").chars().take(length).collect(),
    };
    Ok(format!("{}-{part}", options.volume_name_prefix))
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
    match (parameters.get("fstype"), parameters.get("csi.storage.k8s.io/fstype")) {
        (Some(_), Some(_)) => Err(Failure::refused(
            "fstype specified in parameters with both \"fstype\" and \"csi.storage.k8s.io/fstype\" keys; keep the latter",
        )),
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
        if !key.starts_with(RESERVED) {
            own.insert(key.clone(), value.clone());
        } else if key != "csi.storage.k8s.io/fstype" && !secrets::is_key(key) {
            return Err(Failure::refused(format!(
                "found unknown parameter key {key:?} with reserved namespace csi.storage.k8s.io/; correct the StorageClass"
            )));
        }
    }
    Ok(own)
}

/// The labels and annotations of a claim that the driver's parameters ask for; nobody is told any other.
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
