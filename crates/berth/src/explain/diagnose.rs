//! Why a volume is stuck, in one sentence, and what to do: a pure function of what was observed.

use berth_core::names;
use berth_kube::storage::{claims_of_pod, node_of_pod};
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;

use super::observe::Observed;

/// The problem that keeps a volume from being used, or that there is none.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    pub(crate) stuck: bool,
    pub(crate) why: String,
    pub(crate) what_to_do: Option<String>,
}

/// What to do about a failure whose message names the cause.
const RETRIED: &str = "correct what the message names; the component that failed tries again by itself";

fn fine(why: impl Into<String>) -> Diagnosis {
    Diagnosis { stuck: false, why: why.into(), what_to_do: None }
}

fn stuck(why: impl Into<String>, what_to_do: impl Into<String>) -> Diagnosis {
    Diagnosis { stuck: true, why: why.into(), what_to_do: Some(what_to_do.into()) }
}

/// Says what the observed claim, volume or pod waits for.
pub(crate) fn diagnose(observed: &Observed) -> Diagnosis {
    if let Some(name) = &observed.missing_claim {
        return stuck(
            format!("the pod names the claim {name}, and there is none in its namespace"),
            format!("create the claim {name}, or correct claimName in the pod"),
        );
    }
    if let Some(claim) = &observed.claim
        && let Some(found) = terminating_claim(observed, claim).or_else(|| unbound_claim(observed, claim))
    {
        return found;
    }
    if let Some(volume) = &observed.volume
        && let Some(found) = volume_in_trouble(observed, volume)
    {
        return found;
    }
    for pod in observed.pod.iter().chain(&observed.users) {
        if let Some(found) = pod_in_trouble(observed, pod) {
            return found;
        }
    }
    if let Some(found) = waiting_for_growth(observed) {
        return found;
    }
    fine("No problems found.")
}

fn terminating_claim(observed: &Observed, claim: &PersistentVolumeClaim) -> Option<Diagnosis> {
    claim.metadata.deletion_timestamp.as_ref()?;
    let users: Vec<String> =
        observed.users.iter().filter(|pod| !node_of_pod(pod).is_empty()).map(ResourceExt::name_any).collect();
    if !users.is_empty() {
        return Some(stuck(
            format!("the claim is being deleted and still used by {}", users.join(", ")),
            format!("delete the pods: kubectl delete pod {}", users.join(" ")),
        ));
    }
    let finalizers = claim.finalizers().join(", ");
    Some(stuck(
        format!("the claim is being deleted and waits for its finalizers: {finalizers}"),
        "see who owns them; the volume may be the source of a clone or snapshot that is not finished",
    ))
}

fn unbound_claim(observed: &Observed, claim: &PersistentVolumeClaim) -> Option<Diagnosis> {
    let status = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let spec = claim.spec.as_ref()?;
    if status == "Lost" {
        let volume = spec.volume_name.clone().unwrap_or_default();
        return Some(stuck(
            format!(
                "its volume {volume} is gone or belongs to another claim; the data cannot be reached by this claim"
            ),
            "create a new claim; if the volume still exists, set its claimRef to it",
        ));
    }
    if status == "Bound" {
        return None;
    }
    if let Some(event) =
        last_warning(&observed.events, &["ProvisioningFailed", "FailedBinding", "VolumeMismatch"])
    {
        return Some(stuck(message(event), RETRIED));
    }
    let class_name = spec.storage_class_name.clone().unwrap_or_default();
    let Some(class) = observed.classes.iter().find(|class| class.name_any() == class_name) else {
        return Some(no_class(observed, &class_name, spec.storage_class_name.is_some()));
    };
    let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
    if waits && observed.users.is_empty() {
        return Some(Diagnosis {
            stuck: false,
            why: format!(
                "The class {class_name} waits for the first pod that uses the claim: that decides where the volume is made."
            ),
            what_to_do: None,
        });
    }
    if waits && let Some(found) = observed.users.iter().find_map(unscheduled) {
        return Some(found);
    }
    Some(not_provisioned(observed, class))
}

fn no_class(observed: &Observed, name: &str, named: bool) -> Diagnosis {
    let known: Vec<String> = observed.classes.iter().map(ResourceExt::name_any).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    if !name.is_empty() {
        return stuck(
            format!("the claim names the class {name}, and there is none of that name"),
            format!("create the class, or use one of: {known}"),
        );
    }
    let default = observed
        .classes
        .iter()
        .any(|class| class.annotations().get(names::DEFAULT_CLASS).is_some_and(|value| value == "true"));
    if named || default {
        return stuck(
            "the claim wants no class, and no available volume fits it (size, access modes, selector)",
            "create a PersistentVolume that fits, or name a class in a new claim",
        );
    }
    stuck(
        "the claim names no class, there is no default class, and no available volume fits it",
        format!("name a class in a new claim ({known}), or make one the default"),
    )
}

fn not_provisioned(observed: &Observed, class: &StorageClass) -> Diagnosis {
    let driver = &class.provisioner;
    // A provisioner records this event before it calls the driver: without it, none has taken up the claim.
    if observed.events.iter().any(|event| event.reason.as_deref() == Some("Provisioning")) {
        return stuck(
            format!(
                "the provisioner of {driver} has taken up the claim, and has recorded neither a volume nor a failure"
            ),
            "see the logs of the provisioner and of the driver: CreateVolume is running, or the provisioner has ended",
        );
    }
    let registered =
        observed.nodes.iter().any(|node| node.spec.drivers.iter().any(|known| known.name == *driver));
    let also = if registered { "" } else { ", and the driver is registered on no node" };
    stuck(
        format!(
            "no provisioner is running for the driver {driver} of the class {}: none has taken up the claim{also}",
            class.name_any()
        ),
        if registered {
            "start one for the driver: berth sidecars --csi-address SOCKET"
        } else {
            "start the driver, then its sidecars: berth sidecars --csi-address SOCKET; or use another class"
        },
    )
}

fn volume_in_trouble(observed: &Observed, volume: &PersistentVolume) -> Option<Diagnosis> {
    let name = volume.name_any();
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    if let Some(event) = last_warning(&observed.events, &["VolumeFailedDelete"])
        && (phase == "Released" || phase == "Failed" || volume.metadata.deletion_timestamp.is_some())
    {
        return Some(stuck(
            message(event),
            "correct what the message names; deletion is tried again by itself",
        ));
    }
    if let Some(error) = observed.attachments.iter().find_map(|attachment| {
        let status = attachment.status.as_ref()?;
        status.attach_error.as_ref().or(status.detach_error.as_ref())?.message.clone()
    }) {
        return Some(stuck(format!("attaching or detaching failed: {error}"), RETRIED));
    }
    if volume.metadata.deletion_timestamp.is_some() {
        let nodes: Vec<&str> =
            observed.attachments.iter().map(|attachment| attachment.spec.node_name.as_str()).collect();
        if !nodes.is_empty() {
            return Some(stuck(
                format!("the volume {name} is being deleted and still attached to {}", nodes.join(", ")),
                "delete the pods that use it there",
            ));
        }
        return Some(stuck(
            format!(
                "the volume {name} is being deleted and waits for its finalizers: {}",
                volume.finalizers().join(", ")
            ),
            "if it is bound, delete its claim first",
        ));
    }
    let reclaim = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    if phase == "Released" && reclaim == Some("Retain") {
        return Some(stuck(
            format!(
                "the claim of {name} is gone and its policy is Retain: the data is kept, and no other claim gets it"
            ),
            format!(
                "to use it again: kubectl patch pv {name} -p '{{\"spec\":{{\"claimRef\":null}}}}'; to remove it, delete the volume and its data"
            ),
        ));
    }
    None
}

fn pod_in_trouble(observed: &Observed, pod: &Pod) -> Option<Diagnosis> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    if phase != "Pending" {
        return None;
    }
    if let Some(found) = unscheduled(pod) {
        return Some(found);
    }
    let reasons = ["FailedAttachVolume", "FailedMount", "FailedMapVolume", "Failed"];
    let is_reason = |event: &&Event| {
        event.involved_object.uid == pod.metadata.uid
            && event.reason.as_deref().is_some_and(|reason| reasons.contains(&reason))
    };
    let event = observed.events.iter().rfind(is_reason)?;
    let claims: Vec<_> = claims_of_pod(pod).into_iter().map(|claim| claim.key.name).collect();
    let claims = claims.join(", ");
    let about = if claims.is_empty() { String::new() } else { format!(" (claims: {claims})") };
    Some(stuck(format!("pod {}: {}{about}", pod.name_any(), message(event)), RETRIED))
}

fn unscheduled(pod: &Pod) -> Option<Diagnosis> {
    if !node_of_pod(pod).is_empty() {
        return None;
    }
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let scheduled = conditions
        .into_iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    let message = scheduled.message.clone().unwrap_or_default();
    Some(stuck(
        format!("no node fits the pod {}: {message}", pod.name_any()),
        "change what the message names (node, selector, claim, size); the scheduler tries again when something changes",
    ))
}

fn waiting_for_growth(observed: &Observed) -> Option<Diagnosis> {
    let claim = observed.claim.as_ref()?;
    if let Some(event) = last_warning(&observed.events, &["VolumeResizeFailed", "VolumeModifyFailed"]) {
        return Some(stuck(
            message(event),
            "correct what the message names, or ask for less; it is tried again by itself",
        ));
    }
    let status = claim.status.as_ref()?;
    let pending = status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == "FileSystemResizePending" && condition.status == "True");
    (pending && observed.users.is_empty())
        .then(|| fine("The volume has grown; its filesystem grows when the next pod uses it."))
}

fn last_warning<'a>(events: &'a [Event], reasons: &[&str]) -> Option<&'a Event> {
    let last = events
        .iter()
        .rfind(|event| event.reason.as_deref().is_some_and(|reason| reasons.contains(&reason)))?;
    // A success after the last failure means that it is over.
    let over = |event: &Event| {
        event
            .reason
            .as_deref()
            .is_some_and(|reason| reason.ends_with("Succeeded") || reason.ends_with("Successful"))
    };
    let after = events.iter().rposition(|event| std::ptr::eq(event, last)).map_or(0, |at| at + 1);
    (!events[after..].iter().any(over)).then_some(last)
}

fn message(event: &Event) -> String {
    event.message.clone().unwrap_or_else(|| event.reason.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests;
