//! Names that the controller, the attacher and the node agree on.

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use sha2::{Digest as _, Sha256};

const PREFIX: &str = "kubernetes.io/csi/";

/// On an attachment: its volume as `<driver>^<handle>`, which its name does not give away.
pub(crate) const VOLUME: &str = "attach-detach.berth.dev/volume";

/// A volume's name in a node's status: `kubernetes.io/csi/<driver>^<handle>`; `None` for volumes that are not CSI's.
pub(crate) fn unique(volume: &PersistentVolume) -> Option<String> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    Some(format!("{PREFIX}{}^{}", csi.driver, csi.volume_handle))
}

/// Driver and handle of a volume's name in a node's status.
pub(crate) fn split(unique: &str) -> Option<(&str, &str)> {
    unique.strip_prefix(PREFIX)?.split_once('^')
}

/// A volume's name in a node's status without what all have in common, as it stands on attachments.
pub(crate) fn short(unique: &str) -> &str {
    unique.strip_prefix(PREFIX).unwrap_or(unique)
}

/// The name in a node's status of the volume that stands on an attachment, if the attachment's own name agrees.
pub(crate) fn noted(attachment: &VolumeAttachment) -> Option<String> {
    let unique = format!("{PREFIX}{}", attachment.annotations().get(VOLUME)?);
    is_of(attachment, &unique).then_some(unique)
}

/// Whether an attachment is named as that of this volume to its node.
pub(crate) fn is_of(of: &VolumeAttachment, unique: &str) -> bool {
    split(unique)
        .is_some_and(|(driver, handle)| of.name_any() == attachment(driver, handle, &of.spec.node_name))
}

/// The name of the attachment of a volume to a node.
pub(crate) fn attachment(driver: &str, handle: &str, node: &str) -> String {
    let mut hash = Sha256::new();
    for part in [handle, driver, node] {
        hash.update(part.as_bytes());
    }
    let mut name = String::from("csi-");
    for byte in hash.finalize() {
        use std::fmt::Write as _;
        let _ = write!(name, "{byte:02x}");
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_is_named_by_the_hash_of_handle_driver_and_node() {
        // printf vol-1pd.csi.example.comnode-a | sha256sum
        assert_eq!(
            attachment("pd.csi.example.com", "vol-1", "node-a"),
            "csi-c39bcda8a9afd4c6bd5ce0a6e87f9926d2395ee11b8342e9c982161faddb2feb"
        );
    }

    #[test]
    fn a_handle_may_contain_the_separator() {
        assert_eq!(split("kubernetes.io/csi/d.example^a^b"), Some(("d.example", "a^b")));
        assert_eq!(split("kubernetes.io/nfs/x"), None);
    }
}
