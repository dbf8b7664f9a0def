//! Names that the controller, the attacher and the node agree on.

use berth_core::names::{ATTACHED_VOLUME, CSI_VOLUME_PREFIX};
use berth_kube::storage::attachment_name;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;

/// Driver and handle of a volume's name in a node's status.
pub(crate) fn split(unique: &str) -> Option<(&str, &str)> {
    unique.strip_prefix(CSI_VOLUME_PREFIX)?.split_once('^')
}

/// A volume's name in a node's status without what all have in common, as it stands on attachments.
pub(crate) fn short(unique: &str) -> &str {
    unique.strip_prefix(CSI_VOLUME_PREFIX).unwrap_or(unique)
}

/// The name in a node's status of the volume that stands on an attachment, if the attachment's own name agrees.
pub(crate) fn noted(attachment: &VolumeAttachment) -> Option<String> {
    let unique = format!("{CSI_VOLUME_PREFIX}{}", attachment.annotations().get(ATTACHED_VOLUME)?);
    is_of(attachment, &unique).then_some(unique)
}

/// Whether an attachment is named as that of this volume to its node.
pub(crate) fn is_of(of: &VolumeAttachment, unique: &str) -> bool {
    split(unique)
        .is_some_and(|(driver, handle)| of.name_any() == attachment_name(driver, handle, &of.spec.node_name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flex_volume_is_told_from_those_of_other_plugins() {
        let split = berth_kube::storage::split_flex_unique_name;
        assert_eq!(split("k8s/nfs/pv-1"), Some(("k8s/nfs", "pv-1")));
        assert_eq!(split("dummy/pv-1"), Some(("dummy", "pv-1")));
        assert_eq!(split("kubernetes.io/csi/d^h"), None);
    }

    #[test]
    fn a_handle_may_contain_the_separator() {
        assert_eq!(split("kubernetes.io/csi/d.example^a^b"), Some(("d.example", "a^b")));
        assert_eq!(split("kubernetes.io/nfs/x"), None);
    }
}
