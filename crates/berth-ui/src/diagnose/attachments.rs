//! What is wrong with attachments: not made, not undone, of a node or a volume that is gone.

use berth_kube::{Key, storage};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;

use super::{NodeState, Observed, RETRIED, span};
use crate::finding::{Finding, Fix, ObjectName, Severity, Trouble};

pub(super) fn diagnose(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    for attachment in observed.state.attachments.iter() {
        findings.extend(orphaned(observed, attachment).or_else(|| failed(observed, attachment)));
    }
}

fn finding(
    severity: Severity,
    trouble: Trouble,
    attachment: &VolumeAttachment,
    cause: impl Into<String>,
) -> Finding {
    Finding::new(severity, trouble, ObjectName::of(attachment), cause)
}

fn describe(attachment: &VolumeAttachment) -> String {
    format!("kubectl describe volumeattachment {}", attachment.name_any())
}

fn facts(attachment: &VolumeAttachment) -> String {
    let volume = attachment.spec.source.persistent_volume_name.as_deref().unwrap_or("an inline volume");
    let attached = if is_attached(attachment) { "attached" } else { "not attached" };
    format!("{volume} to {} by {}, {attached}", attachment.spec.node_name, attachment.spec.attacher)
}

fn is_attached(attachment: &VolumeAttachment) -> bool {
    attachment.status.as_ref().is_some_and(|status| status.attached)
}

/// The attacher never had a hand in it, so no storage is attached and deleting the object calls nobody.
fn untouched(attachment: &VolumeAttachment) -> bool {
    !is_attached(attachment)
        && attachment.finalizers().is_empty()
        && attachment.metadata.deletion_timestamp.is_none()
        && attachment
            .status
            .as_ref()
            .is_none_or(|status| status.attach_error.is_none() && status.detach_error.is_none())
}

fn orphaned(observed: &Observed<'_>, attachment: &VolumeAttachment) -> Option<Finding> {
    let node = &attachment.spec.node_name;
    let name = attachment.name_any();
    let volume = attachment.spec.source.persistent_volume_name.as_deref();
    let node_gone = observed.node_state(node) == Some(NodeState::Gone);
    let volume_gone = volume.is_some_and(|volume| observed.state.volumes.lack(&Key::cluster(volume)));
    if !(node_gone || volume_gone) || !observed.state.is_late(attachment) {
        return None;
    }
    let error = attachment.status.as_ref().and_then(|status| status.detach_error.as_ref()?.message.clone());
    let evidence =
        [facts(attachment), error.map_or_else(String::new, |error| format!("detaching failed: {error}"))];
    let deleting = attachment.metadata.deletion_timestamp.is_some();
    let found = if node_gone {
        let cause = if deleting {
            format!(
                "the node {node} does not exist any more, and the driver {} does not confirm that the volume is detached from it",
                attachment.spec.attacher
            )
        } else {
            format!("the node {node} does not exist any more, and nobody detaches the volume from it")
        };
        finding(Severity::Warning, Trouble::AttachmentNodeGone, attachment, cause).advise(if deleting {
            "see the attacher's log; only if the storage system shows the volume as detached, remove the attachment's finalizer".to_owned()
        } else {
            "see whether kube-controller-manager runs: it detaches after six minutes; or delete the attachment, which makes the attacher detach the volume".to_owned()
        })
    } else {
        let cause = format!(
            "the volume {} does not exist any more, and its attachment to {node} is left",
            volume.unwrap_or_default()
        );
        finding(Severity::Warning, Trouble::AttachmentVolumeGone, attachment, cause).advise(if deleting {
            "the attacher cannot find the volume's handle any more; only if the storage system shows it as detached, remove the attachment's finalizer"
        } else {
            "delete the attachment; if an attacher cannot, see its log"
        })
    };
    let found = found.evidence(evidence);
    Some(if untouched(attachment) {
        found.safe(Fix::Delete).command("berth doctor --fix")
    } else if deleting {
        found.command(describe(attachment))
    } else {
        found.command(format!("kubectl delete volumeattachment {name}"))
    })
}

fn failed(observed: &Observed<'_>, attachment: &VolumeAttachment) -> Option<Finding> {
    let status = attachment.status.as_ref();
    let node = &attachment.spec.node_name;
    let driver = &attachment.spec.attacher;
    if attachment.metadata.deletion_timestamp.is_some() {
        let error = status.and_then(|status| status.detach_error.as_ref()?.message.clone());
        let since =
            span(observed.state.age(attachment.metadata.deletion_timestamp.as_ref().map(|time| time.0)));
        if let Some(error) = error {
            return Some(
                finding(
                    Severity::Error,
                    Trouble::DetachmentFailed,
                    attachment,
                    format!("attaching or detaching failed: {error}"),
                )
                .evidence([facts(attachment), format!("in deletion for {since}")])
                .advise(RETRIED)
                .command(describe(attachment)),
            );
        }
        return observed.state.is_late_to_go(attachment).then(|| {
            let cause = format!(
                "no attacher is running for the driver {driver}: none detaches the volume from {node}"
            );
            finding(Severity::Error, Trouble::NoAttacher, attachment, cause)
                .evidence([facts(attachment), format!("in deletion for {since}")])
                .advise("start csi-attacher beside the driver: berth sidecars --csi-address SOCKET")
                .command(describe(attachment))
        });
    }
    if is_attached(attachment) {
        return None;
    }
    if let Some(error) = status.and_then(|status| status.attach_error.as_ref()?.message.clone()) {
        return Some(
            finding(
                Severity::Error,
                Trouble::AttachmentFailed,
                attachment,
                format!("attaching or detaching failed: {error}"),
            )
            .evidence([facts(attachment)])
            .advise(RETRIED)
            .command(describe(attachment)),
        );
    }
    if !observed.state.is_late(attachment) {
        return None;
    }
    let volume = attachment
        .spec
        .source
        .persistent_volume_name
        .as_deref()
        .and_then(|name| observed.state.volumes.named(name));
    let claim = volume
        .and_then(|volume| storage::claim_of_volume(volume))
        .map_or_else(String::new, |claim| format!("of the claim {claim}"));
    let cause = format!("no attacher is running for the driver {driver}: none attaches the volume to {node}");
    Some(
        finding(Severity::Error, Trouble::NoAttacher, attachment, cause)
            .evidence([facts(attachment), claim])
            .advise("start csi-attacher beside the driver (berth sidecars --csi-address SOCKET); or, if the driver attaches nothing, create its CSIDriver with attachRequired: false")
            .command(describe(attachment)),
    )
}
