//! What a driver's CSIDriver object asks of the node; without one, Kubernetes' defaults count.

use std::collections::BTreeMap;

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::{CSIDriver, TokenRequest};

use super::source::{CsiVolume, Mode};
use crate::plugin::PodVolume;

/// When files are given to the pod's group by the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GroupRule {
    /// A writable volume of one node, with a filesystem that is named.
    OnceWithType,
    /// Every volume of the driver that is not read-only (`File`).
    File,
    /// No volume: the driver does it, or cannot (`None`).
    None,
}

/// The rules of one driver.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is one field of CSIDriver")]
pub(super) struct Rules {
    /// Volumes are attached before use.
    pub(super) attach: bool,
    /// The driver gets the pod that uses the volume.
    pod_info: bool,
    /// Publishing is repeated while the pod runs.
    pub(super) republish: bool,
    /// Tokens go with the secrets, not with the context.
    pub(super) tokens_are_secrets: bool,
    /// The tokens that the driver wants of the pod's service account.
    pub(super) tokens: Vec<TokenRequest>,
    group: GroupRule,
    /// The modes that it names; `None` without an object.
    modes: Option<Vec<String>>,
}

impl Rules {
    /// The rules that an object says, or those without one.
    pub(super) fn of(object: Option<&CSIDriver>) -> Self {
        let spec = object.map(|object| &object.spec);
        let group = spec.and_then(|spec| spec.fs_group_policy.as_deref());
        Self {
            attach: spec.and_then(|spec| spec.attach_required).unwrap_or(true),
            pod_info: spec.and_then(|spec| spec.pod_info_on_mount).unwrap_or(false),
            republish: spec.and_then(|spec| spec.requires_republish).unwrap_or(false),
            tokens_are_secrets: spec.and_then(|spec| spec.service_account_token_in_secrets).unwrap_or(false),
            tokens: spec.and_then(|spec| spec.token_requests.clone()).unwrap_or_default(),
            group: match group {
                Some("File") => GroupRule::File,
                Some("None") => GroupRule::None,
                _ => GroupRule::OnceWithType,
            },
            modes: spec.map(|spec| {
                spec.volume_lifecycle_modes
                    .clone()
                    .unwrap_or_else(|| vec![Mode::Persistent.as_str().to_owned()])
            }),
        }
    }

    /// Why the driver does not serve volumes of this mode.
    pub(super) fn refuse(&self, driver: &str, mode: Mode) -> Option<String> {
        match &self.modes {
            None if mode == Mode::Persistent => None,
            None => Some(format!(
                "volume mode {:?} not supported by driver {driver} (no CSIDriver object); create a CSIDriver that lists \
                 it in volumeLifecycleModes",
                mode.as_str()
            )),
            Some(modes) if modes.iter().any(|known| known == mode.as_str()) => None,
            Some(modes) => Some(format!(
                "volume mode {:?} not supported by driver {driver} (only supports {modes:?})",
                mode.as_str()
            )),
        }
    }

    /// Whether the node gives the files of a volume to the pod's group.
    pub(super) fn gives_to_group(&self, volume: &PodVolume, csi: &CsiVolume) -> bool {
        if volume.read_only {
            return false;
        }
        match self.group {
            GroupRule::None => false,
            GroupRule::File => true,
            GroupRule::OnceWithType => {
                !csi.fs_type.is_empty() && (csi.mode == Mode::Ephemeral || csi.is_read_write_once())
            }
        }
    }

    /// What the driver gets about the pod.
    pub(super) fn pod_info(&self, pod: &Pod, mode: Mode) -> BTreeMap<String, String> {
        if !self.pod_info {
            return BTreeMap::new();
        }
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
        let ephemeral = (mode == Mode::Ephemeral).to_string();
        [
            ("pod.name", pod.metadata.name.clone().unwrap_or_default()),
            ("pod.namespace", pod.metadata.namespace.clone().unwrap_or_default()),
            ("pod.uid", pod.metadata.uid.clone().unwrap_or_default()),
            ("serviceAccount.name", account.unwrap_or_default()),
            ("ephemeral", ephemeral),
        ]
        .into_iter()
        .map(|(name, value)| (format!("{KUBERNETES_PARAMETER_PREFIX}{name}"), value))
        .collect()
    }
}
