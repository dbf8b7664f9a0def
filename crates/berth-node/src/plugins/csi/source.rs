//! What a pod's volume asks of a CSI driver, out of the PersistentVolume or the pod's own words.

use std::collections::BTreeMap;

use berth_csi::NodeCapability;
use berth_csi::kubernetes::{Access, access_mode, capability};
use berth_csi::v1::VolumeCapability;
use berth_kube::storage::hashed_name;
use k8s_openapi::api::core::v1::{Pod, SecretReference};

use crate::plugin::{Failed, PodVolume, Source};
use crate::registration::Driver;

/// How long a volume lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// As long as its PersistentVolume.
    Persistent,
    /// As long as its pod.
    Ephemeral,
}

impl Mode {
    /// As Kubernetes writes it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }
}

/// A volume in the words of CSI, as far as its source says.
#[derive(Debug, Clone)]
pub(crate) struct CsiVolume {
    pub(super) driver: String,
    pub(super) handle: String,
    pub(super) mode: Mode,
    pub(super) fs_type: String,
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) mount_flags: Vec<String>,
    pub(super) access_modes: Vec<String>,
    pub(super) stage_secret: Option<SecretReference>,
    pub(super) publish_secret: Option<SecretReference>,
    pub(super) expand_secret: Option<SecretReference>,
}

impl CsiVolume {
    /// Reads a pod's volume of this name; `None` if no CSI driver serves it.
    pub(crate) fn read(pod: &Pod, name: &str, source: &Source) -> Option<Self> {
        match source {
            Source::Persistent { volume, .. } => {
                let spec = volume.spec.as_ref()?;
                let csi = spec.csi.as_ref()?;
                Some(Self {
                    driver: csi.driver.clone(),
                    handle: csi.volume_handle.clone(),
                    mode: Mode::Persistent,
                    fs_type: csi.fs_type.clone().unwrap_or_default(),
                    attributes: csi.volume_attributes.clone().unwrap_or_default(),
                    mount_flags: spec.mount_options.clone().unwrap_or_default(),
                    access_modes: spec.access_modes.clone().unwrap_or_default(),
                    stage_secret: csi.node_stage_secret_ref.clone(),
                    publish_secret: csi.node_publish_secret_ref.clone(),
                    expand_secret: csi.node_expand_secret_ref.clone(),
                })
            }
            Source::Inline(inline) => {
                let csi = inline.csi.as_ref()?;
                let uid = pod.metadata.uid.as_deref().unwrap_or_default();
                let namespace = pod.metadata.namespace.clone();
                Some(Self {
                    driver: csi.driver.clone(),
                    handle: hashed_name("csi", &[uid, name]),
                    mode: Mode::Ephemeral,
                    fs_type: csi.fs_type.clone().unwrap_or_default(),
                    attributes: csi.volume_attributes.clone().unwrap_or_default(),
                    mount_flags: Vec::new(),
                    access_modes: Vec::new(),
                    stage_secret: None,
                    publish_secret: csi
                        .node_publish_secret_ref
                        .as_ref()
                        .map(|secret| SecretReference { name: Some(secret.name.clone()), namespace }),
                    expand_secret: None,
                })
            }
        }
    }

    /// The unique name of the volume's device.
    pub(super) fn unique_name(&self) -> String {
        super::disk::unique_name(&self.driver, &self.handle)
    }

    /// How the volume is used. As with the kubelet the first access mode counts, and without any it is ReadWriteOnce.
    pub(super) fn capability(
        &self,
        volume: &PodVolume,
        driver: &Driver,
        group: Option<u32>,
    ) -> Result<VolumeCapability, Failed> {
        let once = ["ReadWriteOnce".to_owned()];
        let modes = self.access_modes.get(..1).unwrap_or(&once);
        let mode = access_mode(modes, driver.can(NodeCapability::SingleNodeMultiWriter))
            .map_err(|error| Failed::unchanged(format!("volume {}: {error}", volume.spec_name())))?;
        if volume.block {
            return Ok(capability(mode, Access::Block));
        }
        let group = group.map(|group| group.to_string());
        let access =
            Access::Mount { fs_type: &self.fs_type, flags: &self.mount_flags, group: group.as_deref() };
        Ok(capability(mode, access))
    }

    /// Whether only one node may write to it.
    pub(super) fn is_read_write_once(&self) -> bool {
        self.access_modes.iter().any(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteOncePod")
    }
}
