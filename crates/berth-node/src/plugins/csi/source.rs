//! What a pod's volume asks of a CSI driver, out of the PersistentVolume or the pod's own words.

use std::collections::BTreeMap;

use berth_csi::kubernetes::{Access, access_mode, capability};
use berth_csi::v1::VolumeCapability;
use k8s_openapi::api::core::v1::{PersistentVolume, SecretReference};

use crate::layout::sha256;
use crate::plugin::{Failed, PodVolume, Source};
use crate::registration::Capabilities;

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

/// A volume in the words of CSI.
#[derive(Debug, Clone)]
pub(super) struct CsiVolume {
    pub(super) driver: String,
    pub(super) handle: String,
    pub(super) mode: Mode,
    pub(super) spec_name: String,
    pub(super) fs_type: String,
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) mount_flags: Vec<String>,
    pub(super) access_modes: Vec<String>,
    pub(super) stage_secret: Option<SecretReference>,
    pub(super) publish_secret: Option<SecretReference>,
    pub(super) expand_secret: Option<SecretReference>,
    pub(super) read_only: bool,
    pub(super) block: bool,
}

impl CsiVolume {
    /// Reads a pod's volume.
    pub(super) fn read(volume: &PodVolume) -> Result<Self, Failed> {
        match &volume.source {
            Source::Persistent { volume: persistent, .. } => Self::persistent(volume, persistent),
            Source::Inline(inline) => {
                let csi = inline.csi.as_ref().ok_or_else(|| not_csi(volume))?;
                let namespace = volume.pod.metadata.namespace.clone();
                Ok(Self {
                    driver: csi.driver.clone(),
                    handle: format!("csi-{}", sha256(&format!("{}{}", volume.pod_uid(), volume.name))),
                    mode: Mode::Ephemeral,
                    spec_name: volume.name.clone(),
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
                    read_only: volume.read_only,
                    block: false,
                })
            }
        }
    }

    fn persistent(volume: &PodVolume, persistent: &PersistentVolume) -> Result<Self, Failed> {
        let spec = persistent.spec.as_ref().ok_or_else(|| not_csi(volume))?;
        let csi = spec.csi.as_ref().ok_or_else(|| not_csi(volume))?;
        Ok(Self {
            driver: csi.driver.clone(),
            handle: csi.volume_handle.clone(),
            mode: Mode::Persistent,
            spec_name: volume.spec_name().to_owned(),
            fs_type: csi.fs_type.clone().unwrap_or_default(),
            attributes: csi.volume_attributes.clone().unwrap_or_default(),
            mount_flags: spec.mount_options.clone().unwrap_or_default(),
            access_modes: spec.access_modes.clone().unwrap_or_default(),
            stage_secret: csi.node_stage_secret_ref.clone(),
            publish_secret: csi.node_publish_secret_ref.clone(),
            expand_secret: csi.node_expand_secret_ref.clone(),
            read_only: volume.read_only,
            block: volume.block,
        })
    }

    /// The unique name of the volume's device.
    pub(super) fn unique_name(&self) -> String {
        super::vol_data::unique_name(&self.driver, &self.handle)
    }

    /// How the volume is used. As with the kubelet the first access mode counts, and without any it is ReadWriteOnce.
    pub(super) fn capability(
        &self,
        driver: Capabilities,
        group: Option<u32>,
    ) -> Result<VolumeCapability, Failed> {
        let once = ["ReadWriteOnce".to_owned()];
        let modes = self.access_modes.get(..1).unwrap_or(&once);
        let mode = access_mode(modes, driver.single_node_multi_writer)
            .map_err(|error| Failed::unchanged(format!("volume {}: {error}", self.spec_name)))?;
        if self.block {
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

fn not_csi(volume: &PodVolume) -> Failed {
    Failed::unchanged(format!("volume {} is not a CSI volume", volume.name))
}
