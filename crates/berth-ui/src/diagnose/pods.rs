//! Why pods wait for their volumes, or keep them.

use berth_core::names::OUT_OF_SERVICE;
use berth_kube::storage::{self, claims_of_pod, csi_source, node_of_pod, phase_of_pod, volume_name};
use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use kube::ResourceExt;

use super::{NodeState, Observed, RETRIED, event_as_evidence, message, span};
use crate::finding::{Finding, ObjectName, Severity, Trouble};

pub(super) fn diagnose(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    for pod in observed.state.pods.iter().filter(|pod| !storage::is_over(pod)) {
        let uses_volumes = storage::volumes_of_pod(pod).iter().any(|volume| {
            volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some() || volume.csi.is_some()
        });
        if pod.metadata.deletion_timestamp.is_some() {
            findings.extend(uses_volumes.then(|| terminating(observed, pod)).flatten());
        } else if matches!(phase_of_pod(pod), "" | "Pending") {
            findings.extend(pending(observed, pod));
        }
    }
}

fn finding(trouble: Trouble, pod: &Pod, cause: impl Into<String>) -> Finding {
    Finding::new(Severity::Error, trouble, ObjectName::of(pod), cause)
}

fn describe(pod: &Pod) -> String {
    format!("kubectl describe {}", ObjectName::of(pod).argument())
}

fn pending(observed: &Observed<'_>, pod: &Pod) -> Option<Finding> {
    if let Some(found) = claims(observed, pod) {
        return Some(found);
    }
    if node_of_pod(pod).is_empty() {
        return no_node(observed, pod);
    }
    if let Some(found) = driver_not_there(observed, pod) {
        return Some(found);
    }
    let event = observed.last_failure(
        pod,
        &["FailedAttachVolume", "FailedMount", "FailedMapVolume", "FailedMountOnFilesystemMismatch"],
    )?;
    let claims: Vec<_> = claims_of_pod(pod).into_iter().map(|claim| claim.key.name).collect();
    let claims = claims.join(", ");
    let about = if claims.is_empty() { String::new() } else { format!(" (claims: {claims})") };
    if let Some(found) = held_elsewhere(observed, pod, &message(event)) {
        return Some(found.evidence([event_as_evidence(event)]));
    }
    let trouble = if event.reason.as_deref() == Some("FailedAttachVolume") {
        Trouble::AttachFailed
    } else {
        Trouble::MountFailed
    };
    Some(
        finding(trouble, pod, format!("pod {}: {}{about}", pod.name_any(), message(event)))
            .evidence([format!("on the node {}", node_of_pod(pod)), event_as_evidence(event)])
            .advise(RETRIED)
            .command(describe(pod)),
    )
}

fn claims(observed: &Observed<'_>, pod: &Pod) -> Option<Finding> {
    for used in claims_of_pod(pod) {
        match observed.state.claims.get(&used.key) {
            None if used.ephemeral && !observed.state.is_late(pod) => {}
            None if observed.state.claims.are_known() => {
                let name = &used.key.name;
                let (cause, advice) = if used.ephemeral {
                    (
                        format!("the claim {name} of the pod's ephemeral volume was not created"),
                        "see whether kube-controller-manager runs: its ephemeral volume controller creates it".to_owned(),
                    )
                } else {
                    (
                        format!("the pod names the claim {name}, and there is none in its namespace"),
                        format!("create the claim {name}, or correct claimName in the pod"),
                    )
                };
                return Some(
                    finding(Trouble::PodClaimMissing, pod, cause)
                        .advise(advice)
                        .command(format!("kubectl get pvc -n {}", used.key.namespace)),
                );
            }
            Some(claim) if used.ephemeral && !storage::owned_by(claim, pod) => {
                let cause = format!(
                    "the claim {} was not made for this pod, whose ephemeral volume needs that name",
                    used.key.name
                );
                return Some(
                    finding(Trouble::PodClaimForeign, pod, cause)
                        .advise("delete that claim if nobody needs it, or rename the pod or its volume")
                        .command(format!("kubectl describe {}", ObjectName::of(claim.as_ref()).argument())),
                );
            }
            _ => {}
        }
    }
    None
}

/// What the scheduler says of a pod that it finds no node for.
pub(super) fn unscheduled(pod: &Pod) -> Option<String> {
    if !node_of_pod(pod).is_empty() {
        return None;
    }
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let scheduled = conditions
        .into_iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    Some(scheduled.message.clone().unwrap_or_default())
}

/// A pod that no node takes because of its volumes; other reasons are not storage's.
fn no_node(observed: &Observed<'_>, pod: &Pod) -> Option<Finding> {
    let message = unscheduled(pod)?;
    let words = ["volume", "persistentvolume", "persistentvolumeclaim", "pvc", "storage", "csi"];
    let lower = message.to_lowercase();
    if claims_of_pod(pod).is_empty() || !words.iter().any(|word| lower.contains(word)) {
        return None;
    }
    let volumes = claims_of_pod(pod).into_iter().filter_map(|used| {
        let claim = observed.state.claims.get(&used.key)?;
        let volume = observed.state.volumes.named(volume_name(claim))?;
        let places = super::volumes::places(volume);
        (!places.is_empty()).then(|| {
            format!(
                "the volume {} of the claim {} can be used from: {places}",
                volume.name_any(),
                used.key.name
            )
        })
    });
    Some(
        finding(Trouble::PodUnschedulable, pod, format!("no node fits the pod {}: {message}", pod.name_any()))
            .evidence(volumes)
            .advise("change what the message names (node, selector, claim, size); the scheduler tries again when something changes")
            .command(describe(pod)),
    )
}

/// The CSI drivers of a pod's volumes, with the volume if it is a PersistentVolume.
fn drivers_of<'a>(observed: &Observed<'a>, pod: &Pod) -> Vec<(String, Option<&'a PersistentVolume>)> {
    let inline = storage::volumes_of_pod(pod)
        .iter()
        .filter_map(|volume| Some((volume.csi.as_ref()?.driver.clone(), None)));
    let claimed = claims_of_pod(pod).into_iter().filter_map(|used| {
        let claim = observed.state.claims.get(&used.key)?;
        let volume = observed.state.volumes.named(volume_name(claim))?;
        Some((csi_source(volume)?.driver.clone(), Some(&**volume)))
    });
    inline.chain(claimed).collect()
}

fn driver_not_there(observed: &Observed<'_>, pod: &Pod) -> Option<Finding> {
    let node = node_of_pod(pod);
    let (driver, _) = drivers_of(observed, pod)
        .into_iter()
        .find(|(driver, _)| observed.state.registered(driver, node) == Some(false))?;
    if !observed.state.is_late(pod)
        && observed.last_failure(pod, &["FailedMount", "FailedAttachVolume", "FailedMapVolume"]).is_none()
    {
        return None;
    }
    let cause = format!(
        "the driver {driver} is not registered on the node {node}, where the pod {} waits for its volume",
        pod.name_any()
    );
    Some(
        finding(Trouble::DriverNotOnNode, pod, cause)
            .evidence([format!("{driver} is registered on: {}", super::names(observed.state.nodes_with(&driver)))])
            .advise("start the driver's node part (its DaemonSet and registrar) on that node, or keep the pod from it")
            .command(format!("kubectl get csinode {node} -o yaml")),
    )
}

/// A volume for one node that another node still has.
fn held_elsewhere(observed: &Observed<'_>, pod: &Pod, message: &str) -> Option<Finding> {
    let multi = message.contains("Multi-Attach")
        || message.to_lowercase().contains("already exclusively attached")
        || message.contains("already used by pod");
    let here = node_of_pod(pod);
    for used in claims_of_pod(pod) {
        let Some(claim) = observed.state.claims.get(&used.key) else { continue };
        let once = claim
            .status
            .iter()
            .flat_map(|status| status.access_modes.iter().flatten())
            .all(|mode| mode.starts_with("ReadWriteOnce"));
        let elsewhere: Vec<_> = observed
            .attachments_of(volume_name(claim))
            .iter()
            .filter(|attachment| {
                attachment.spec.node_name != here
                    && attachment.status.as_ref().is_some_and(|status| status.attached)
            })
            .map(|attachment| attachment.spec.node_name.clone())
            .collect();
        let Some(node) = elsewhere.first().filter(|_| once && multi) else { continue };
        let holders: Vec<_> = observed
            .users_of(&used.key)
            .iter()
            .filter(|user| node_of_pod(user) == node)
            .map(|user| user.name_any())
            .collect();
        let state = observed.node_state(node);
        let (who, advice, command) = match (holders.first(), state) {
            (_, Some(NodeState::Gone)) => (
                format!("the node {node}, which does not exist any more, still has it attached"),
                "the attach-detach controller detaches it after six minutes; if the machine is off for good, delete the attachment".to_owned(),
                format!("kubectl get volumeattachment | grep {}", volume_name(claim)),
            ),
            (_, Some(NodeState::NotReady)) => (
                format!("the node {node}, which is not ready, still has it attached"),
                format!("bring the node back; or, only if the machine is certainly off, taint it: kubectl taint node {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"),
                format!("kubectl describe node {node}"),
            ),
            (Some(holder), _) => (
                format!("the pod {holder} uses it on the node {node}"),
                "delete that pod, let both run on one node, or use a class whose volumes several nodes may share (ReadWriteMany)".to_owned(),
                format!("kubectl get pod -n {} {holder} -o wide", used.key.namespace),
            ),
            (None, _) => (
                format!("the node {node} still has it attached, and no pod there uses it"),
                "see why it is not detached: berth explain shows the attachment's error".to_owned(),
                format!("kubectl get volumeattachment | grep {}", volume_name(claim)),
            ),
        };
        let cause =
            format!("the volume of the claim {} may be used by one node at a time, and {who}", used.key.name);
        return Some(finding(Trouble::MultiAttach, pod, cause).advise(advice).command(command));
    }
    None
}

/// A pod in deletion whose node cannot say that it is gone.
fn terminating(observed: &Observed<'_>, pod: &Pod) -> Option<Finding> {
    let node = node_of_pod(pod);
    if node.is_empty() || !observed.state.is_late_to_go(pod) {
        return None;
    }
    let name = pod.name_any();
    let since = span(observed.state.age(pod.metadata.deletion_timestamp.as_ref().map(|time| time.0)));
    let state = observed.node_state(node)?;
    let (cause, advice) = match state {
        NodeState::Gone => (
            format!(
                "the pod is being deleted on the node {node}, which does not exist: nobody can say that it has ended, and its volumes stay attached"
            ),
            "if the machine is off for good, delete the pod by force; otherwise bring the node back"
                .to_owned(),
        ),
        NodeState::NotReady => (
            format!(
                "the pod is being deleted on the node {node}, which is not ready: nobody can say that it has ended, and its volumes stay attached"
            ),
            format!(
                "bring the node back; or, only if the machine is certainly off: kubectl taint node {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"
            ),
        ),
        NodeState::Ready => {
            // A volume that cannot be unmounted is the storage's; what else keeps a pod is not.
            let event = observed.last_failure(
                pod,
                &["FailedUnMount", "FailedUnmount", "FailedUnmountDevice", "FailedKillPod"],
            )?;
            (
                format!("the pod is being deleted and its volumes cannot be taken away: {}", message(event)),
                RETRIED.to_owned(),
            )
        }
    };
    let command = if state == NodeState::Gone {
        format!(
            "kubectl delete pod -n {} {name} --force --grace-period=0",
            pod.namespace().unwrap_or_default()
        )
    } else {
        describe(pod)
    };
    Some(
        finding(Trouble::PodStuckOnNode, pod, cause)
            .evidence([format!("in deletion for {since}")])
            .advise(advice)
            .command(command),
    )
}
