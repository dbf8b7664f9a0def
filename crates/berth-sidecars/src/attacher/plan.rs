//! What an attachment needs, and what its calls say: pure.

use std::collections::BTreeMap;

use berth_core::names::{NODE_ID, PUBLISH_SECRET, VOLUME_HANDLE};
use berth_csi::kubernetes::{self, Access};
use berth_csi::v1::{ControllerPublishVolumeRequest, VolumeCapability};
use berth_kube::{finalizers, storage};
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeSpec, SecretReference,
};
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::ResourceExt as _;

use crate::driver::{ControllerCapability, Identity};
use crate::failure::Failure;

/// The finalizer by which attachments and their volumes are kept until they are detached.
pub(super) fn finalizer(driver: &str) -> String {
    format!("external-attacher/{}", storage::lease_name(driver))
}

/// What is to be done about an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, until something changes.
    Nothing,
    /// The driver attaches nothing: say that it is attached.
    Call,
    /// Attach it by ControllerPublishVolume.
    Attach,
    /// Detach it by ControllerUnpublishVolume.
    Detach,
    /// The driver attaches nothing (any more): let it go.
    Release,
}

/// Where an attachment's volume is described.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Volume {
    /// In the PersistentVolume of this name.
    Named(String),
    /// In the attachment itself.
    Inline(Box<PersistentVolumeSpec>),
}

/// What is needed to detach.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Attached {
    pub(super) handle: String,
    pub(super) node: String,
    pub(super) secret: Option<SecretReference>,
}

/// What to do about an attachment of a driver that attaches, or not; `forced` if the driver contradicts its status.
pub(super) fn plan(attachment: &VolumeAttachment, attaches: bool, finalizer: &str, forced: bool) -> Plan {
    let done = attachment.status.as_ref().is_some_and(|status| status.attached);
    let kept = finalizers::has(attachment, finalizer);
    match (attachment.metadata.deletion_timestamp.is_some(), attaches) {
        (true, true) if kept => Plan::Detach,
        (true, false) if kept => Plan::Release,
        (false, true) if !done || forced => Plan::Attach,
        (false, false) if !done => Plan::Call,
        _ => Plan::Nothing,
    }
}

/// Whether a change needs a reconciliation: errors, written by ourselves, and what we keep there do not.
pub(super) fn matters(before: &VolumeAttachment, after: &VolumeAttachment) -> bool {
    let attached =
        |attachment: &VolumeAttachment| attachment.status.as_ref().is_some_and(|status| status.attached);
    before.spec != after.spec
        || before.metadata.deletion_timestamp != after.metadata.deletion_timestamp
        || attached(before) != attached(after)
}

/// Where the volume of an attachment is described.
pub(super) fn volume_of(attachment: &VolumeAttachment) -> Result<Volume, Failure> {
    let source = &attachment.spec.source;
    match (&source.persistent_volume_name, &source.inline_volume_spec) {
        (Some(_), Some(_)) => Err(Failure::refused(
            "both InlineCSIVolumeSource and PersistentVolumeName specified in VA source",
        )),
        (Some(name), None) => Ok(Volume::Named(name.clone())),
        (None, Some(spec)) => Ok(Volume::Inline(Box::new(spec.clone()))),
        (None, None) => Err(Failure::refused(
            "neither InlineCSIVolumeSource nor PersistentVolumeName specified in VA source",
        )),
    }
}

/// A volume's CSI source, if it is this driver's.
pub(super) fn csi_of<'a>(
    spec: &'a PersistentVolumeSpec,
    driver: &str,
) -> Result<&'a CSIPersistentVolumeSource, Failure> {
    match &spec.csi {
        Some(csi) if csi.driver == driver => Ok(csi),
        Some(csi) => {
            Err(Failure::refused(format!("the volume belongs to driver {:?}, not {driver:?}", csi.driver)))
        }
        None => Err(Failure::refused("only CSI volumes can be attached by a CSI driver")),
    }
}

/// Whether a volume may be attached.
pub(super) fn attachable(
    volume: Option<&PersistentVolume>,
    name: &str,
) -> Result<PersistentVolumeSpec, Failure> {
    let volume =
        volume.ok_or_else(|| Failure::refused(format!("PersistentVolume {name:?} does not exist")))?;
    if volume.metadata.deletion_timestamp.is_some() {
        return Err(Failure::refused(format!("PersistentVolume {name:?} is marked for deletion")));
    }
    Ok(volume.spec.clone().unwrap_or_default())
}

/// The driver's id of a node.
pub(super) fn node_id(node: Option<&CSINode>, driver: &str) -> Option<String> {
    let own = node?.spec.drivers.iter().find(|known| known.name == driver)?;
    (!own.node_id.is_empty()).then(|| own.node_id.clone())
}

/// Everything that detaching needs, put on the attachment before it is attached.
pub(super) fn keep(attachment: &mut VolumeAttachment, finalizer: &str, attached: &Attached) {
    finalizers::add(attachment, finalizer);
    let annotations = attachment.annotations_mut();
    annotations.insert(NODE_ID.to_owned(), attached.node.clone());
    annotations.insert(VOLUME_HANDLE.to_owned(), attached.handle.clone());
    match &attached.secret {
        Some(secret) => {
            let (namespace, name) = (secret.namespace.as_deref(), secret.name.as_deref());
            let text = format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default());
            annotations.insert(PUBLISH_SECRET.to_owned(), text);
        }
        None => {
            annotations.remove(PUBLISH_SECRET);
        }
    }
}

/// What is to be detached: as the volume and the node say, or as was kept for when they are gone.
pub(super) fn detachable(
    attachment: &VolumeAttachment,
    spec: Option<&PersistentVolumeSpec>,
    node: Option<&CSINode>,
    driver: &str,
) -> Result<Attached, Failure> {
    let kept = |key: &str| attachment.annotations().get(key).filter(|value| !value.is_empty()).cloned();
    let csi = spec.and_then(|spec| spec.csi.as_ref()).filter(|csi| csi.driver == driver);
    let handle = csi.map(|csi| csi.volume_handle.clone()).or_else(|| kept(VOLUME_HANDLE));
    let handle = handle.ok_or_else(|| {
        Failure::refused(
            "the PersistentVolume is gone and the attachment does not say which volume it was; detach it by the means of \
             the storage and remove the finalizer",
        )
    })?;
    // The node may have come back under another id: what was attached is what must be detached.
    let node = kept(NODE_ID).or_else(|| node_id(node, driver)).ok_or_else(|| {
        Failure::refused(format!(
            "node {:?} has no id for driver {driver:?} (CSINode), and none was kept; detach the volume by the means of the \
             storage and remove the finalizer",
            attachment.spec.node_name
        ))
    })?;
    let kept_secret = || {
        let (namespace, name) =
            kept(PUBLISH_SECRET)?.split_once('/').map(|(a, b)| (a.to_owned(), b.to_owned()))?;
        Some(SecretReference { name: Some(name), namespace: Some(namespace) })
    };
    let secret = match csi {
        Some(csi) => csi.controller_publish_secret_ref.clone(),
        None => kept_secret(),
    };
    Ok(Attached { handle, node, secret })
}

/// The call that attaches.
pub(super) fn publish(
    spec: &PersistentVolumeSpec,
    attached: &Attached,
    identity: &Identity,
    default_fs_type: &str,
    secrets: BTreeMap<String, String>,
) -> Result<ControllerPublishVolumeRequest, Failure> {
    let csi = csi_of(spec, &identity.name)?;
    let readonly = identity.can(ControllerCapability::PublishReadonly) && csi.read_only == Some(true);
    Ok(ControllerPublishVolumeRequest {
        volume_id: attached.handle.clone(),
        node_id: attached.node.clone(),
        volume_capability: Some(capability(spec, csi, identity, default_fs_type)?),
        readonly,
        secrets,
        volume_context: csi.volume_attributes.clone().unwrap_or_default(),
    })
}

/// How a volume is used, for the driver.
pub(crate) fn capability(
    spec: &PersistentVolumeSpec,
    csi: &CSIPersistentVolumeSource,
    identity: &Identity,
    default_fs_type: &str,
) -> Result<VolumeCapability, Failure> {
    let modes = spec.access_modes.as_deref().unwrap_or_default();
    let fine = identity.can(ControllerCapability::SingleNodeMultiWriter);
    let mode = kubernetes::access_mode(modes, fine).map_err(|wrong| Failure::refused(wrong.to_string()))?;
    let fs_type = csi.fs_type.as_deref().filter(|fs_type| !fs_type.is_empty()).unwrap_or(default_fs_type);
    let flags = spec.mount_options.as_deref().unwrap_or_default();
    let access = match spec.volume_mode.as_deref() {
        Some("Block") => Access::Block,
        _ => Access::Mount { fs_type, flags, group: None },
    };
    Ok(kubernetes::capability(mode, access))
}

#[cfg(test)]
mod tests;
