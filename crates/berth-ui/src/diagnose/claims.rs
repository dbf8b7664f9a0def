//! What claims wait for: a class, a provisioner, their data's source, a larger size, their deletion.

use berth_core::names;
use berth_kube::storage::{requested, volume_name};
use berth_kube::{Key, storage};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimStatus, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;

use super::{Observed, RETRIED, event_as_evidence, message, on_nodes, pods, span};
use crate::finding::{Finding, Fix, ObjectName, Severity, Trouble};

/// How long a claim that no pod uses goes unmentioned.
const UNUSED: std::time::Duration = std::time::Duration::from_secs(24 * 3600);

/// How long Kubernetes keeps events.
const EVENTS_KEPT: std::time::Duration = std::time::Duration::from_secs(3600);

pub(super) fn diagnose(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    for claim in observed.state.claims.iter() {
        if claim.metadata.deletion_timestamp.is_some() {
            findings.extend(terminating(observed, claim));
            continue;
        }
        match phase(claim) {
            "Bound" => {
                findings.extend(growth(observed, claim).or_else(|| modification(observed, claim)));
                findings.extend(unused(observed, claim));
            }
            "Lost" => findings.push(lost(observed, claim)),
            _ => findings.extend(pending(observed, claim)),
        }
    }
}

pub(super) fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

fn finding(
    severity: Severity,
    trouble: Trouble,
    claim: &PersistentVolumeClaim,
    cause: impl Into<String>,
) -> Finding {
    Finding::new(severity, trouble, ObjectName::of(claim), cause)
}

fn describe(claim: &PersistentVolumeClaim) -> String {
    format!("kubectl describe {}", ObjectName::of(claim).argument())
}

fn terminating(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let key = Key::of(claim);
    let since = span(observed.state.age(claim.metadata.deletion_timestamp.as_ref().map(|time| time.0)));
    let evidence = format!("in deletion for {since}, finalizers: {}", claim.finalizers().join(", "));
    let users: Vec<String> = on_nodes(observed.users_of(&key)).iter().map(|pod| pod.name_any()).collect();
    if !users.is_empty() && has(claim, names::CLAIM_PROTECTION) {
        let cause = format!("the claim is being deleted and still used by {}", users.join(", "));
        return Some(
            finding(Severity::Warning, Trouble::ClaimInUse, claim, cause)
                .evidence([evidence])
                .advise("delete the pods, or whatever makes them; the claim goes when they are gone")
                .command(format!("kubectl delete pod -n {} {}", key.namespace, users.join(" "))),
        );
    }
    if !observed.state.is_late_to_go(claim) {
        return None;
    }
    let waits = |finalizer: &str| {
        finding(
            Severity::Warning,
            Trouble::ClaimFinalizer,
            claim,
            format!("the claim is being deleted and waits for its finalizers: {finalizer}"),
        )
    };
    let finalizers = claim.finalizers();
    let first = finalizers.first()?;
    let found = waits(&finalizers.join(", ")).evidence([evidence]).command(describe(claim));
    if finalizers == [names::CLAIM_PROTECTION.to_owned()] {
        let cause = format!(
            "no pod uses the claim, and the controller that removes its finalizer {} does not run",
            names::CLAIM_PROTECTION
        );
        let found = Finding { cause, ..found };
        let found = found.advise("start kube-controller-manager; or remove the finalizer, which is safe while no pod uses the claim");
        let certain = observed.state.pods.are_known() && observed.users_of(&key).is_empty();
        return Some(if certain {
            let finalizer = names::CLAIM_PROTECTION.to_owned();
            found.safe(Fix::RemoveFinalizer { finalizer }).command("berth doctor --fix")
        } else {
            found
        });
    }
    let who = match first.as_str() {
        names::CLONING_PROTECTION => {
            "a claim that is cloned from this one is not finished: see the pending claims".to_owned()
        }
        names::snapshots::CLAIM => {
            "a snapshot of the claim is being taken: see the snapshots of this namespace that are not ready"
                .to_owned()
        }
        other if other.starts_with("creating.berth.dev/") => {
            "a volume may be coming into being for it: the provisioner of its class must run to finish that"
                .to_owned()
        }
        other => format!(
            "find who owns {other}: that component is not running, or waits itself; removing the finalizer by hand skips its cleanup"
        ),
    };
    Some(found.advise(who))
}

fn has(claim: &PersistentVolumeClaim, finalizer: &str) -> bool {
    claim.finalizers().iter().any(|known| known == finalizer)
}

fn lost(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Finding {
    let volume = volume_name(claim);
    let exists = observed.state.volumes.named(volume).is_some();
    let cause = format!(
        "its volume {volume} is gone or belongs to another claim; the data cannot be reached by this claim"
    );
    finding(Severity::Error, Trouble::ClaimLost, claim, cause)
        .evidence([if exists {
            format!("the volume {volume} exists")
        } else {
            format!("there is no volume {volume}")
        }])
        .advise("create a new claim; if the volume still exists, set its claimRef to it")
        .command(if exists { format!("kubectl get pv {volume} -o yaml") } else { describe(claim) })
}

fn pending(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let users = observed.users_of(&Key::of(claim));
    let failed = ["ProvisioningFailed", "FailedBinding", "VolumeMismatch"];
    if let Some(found) = named_volume(observed, claim).or_else(|| data_source(observed, claim)) {
        return Some(found);
    }
    let class_name = super::class_of(claim);
    let class = observed.state.classes.named(class_name);
    if let Some(event) = observed.last_failure(claim, &failed)
        && class.is_some()
    {
        return Some(
            finding(Severity::Error, Trouble::ProvisioningFailed, claim, message(event))
                .evidence([event_as_evidence(event)])
                .advise(RETRIED)
                .command(describe(claim)),
        );
    }
    let Some(class) = class else { return without_class(observed, claim, class_name) };
    let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
    if waits {
        let selected = claim.annotations().contains_key(names::SELECTED_NODE);
        if users.is_empty() || (!selected && users.iter().any(|pod| pods::unscheduled(pod).is_some())) {
            // The pods' own findings say why no node takes them.
            return None;
        }
    }
    not_provisioned(observed, claim, class)
}

/// A claim that names its volume itself.
fn named_volume(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let name = volume_name(claim);
    if name.is_empty() {
        return None;
    }
    let why = match observed.state.volumes.named(name) {
        None if observed.state.volumes.are_known() => {
            format!("the claim names the volume {name}, and there is none of that name")
        }
        Some(volume) if storage::claim_of_volume(volume).is_some() && !storage::refers_to(volume, claim) => {
            let other = storage::claim_of_volume(volume)?;
            format!("the claim names the volume {name}, which belongs to the claim {other}")
        }
        Some(volume) if storage::class_of_volume(volume) != super::class_of(claim) => format!(
            "the claim names the volume {name}, whose class is {:?} and not {:?}",
            storage::class_of_volume(volume),
            super::class_of(claim)
        ),
        Some(volume) if storage::capacity(volume) < requested(claim) => {
            format!("the claim names the volume {name}, which is smaller than the claim asks for")
        }
        _ => return None,
    };
    Some(
        finding(Severity::Error, Trouble::NamedVolumeUnusable, claim, why)
            .advise("create the volume, or a new claim that names another one or none")
            .command("kubectl get pv"),
    )
}

/// A claim that is to be filled from a snapshot or from another claim.
fn data_source(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let spec = claim.spec.as_ref()?;
    let (kind, name, namespace) = match (&spec.data_source_ref, &spec.data_source) {
        (Some(source), _) => (&source.kind, &source.name, source.namespace.clone()),
        (None, Some(source)) => (&source.kind, &source.name, None),
        (None, None) => return None,
    };
    let key = Key::new(namespace.unwrap_or_else(|| claim.namespace().unwrap_or_default()), name.clone());
    // A namespace that was not read says nothing.
    if observed.state.partial && Some(&key.namespace) != claim.metadata.namespace.as_ref() {
        return None;
    }
    let (why, todo) = match kind.as_str() {
        "VolumeSnapshot" if observed.state.snapshots.lack(&key) => (
            format!("the claim is to be restored from the snapshot {key}, and there is none"),
            "create the snapshot, or a new claim from another one",
        ),
        "VolumeSnapshot" => {
            let snapshot = observed.state.snapshots.get(&key)?;
            let ready = snapshot.status.as_ref().and_then(|status| status.ready_to_use) == Some(true);
            if ready || !observed.state.is_late(claim) {
                return None;
            }
            (
                format!("the claim is to be restored from the snapshot {key}, which is not ready"),
                "see what the snapshot waits for",
            )
        }
        "PersistentVolumeClaim" if observed.state.claims.lack(&key) => (
            format!("the claim is to be a clone of the claim {key}, and there is none"),
            "create a new claim from one that exists",
        ),
        "PersistentVolumeClaim" => {
            let source = observed.state.claims.get(&key)?;
            if phase(source) == "Bound" || !observed.state.is_late(claim) {
                return None;
            }
            (
                format!("the claim is to be a clone of the claim {key}, which is {}", phase(source)),
                "see what that claim waits for",
            )
        }
        _ => return None,
    };
    let command = format!(
        "berth explain {}/{} -n {}",
        if kind == "VolumeSnapshot" { "volumesnapshot" } else { "pvc" },
        key.name,
        key.namespace
    );
    Some(finding(Severity::Error, Trouble::DataSourceUnusable, claim, why).advise(todo).command(command))
}

fn without_class(observed: &Observed<'_>, claim: &PersistentVolumeClaim, name: &str) -> Option<Finding> {
    if !observed.state.classes.are_known() {
        return None;
    }
    let classes: Vec<String> = observed.state.classes.iter().map(|class| class.name_any()).collect();
    let known = if classes.is_empty() { "none".to_owned() } else { classes.join(", ") };
    if !name.is_empty() {
        let event = observed.last_failure(claim, &["ProvisioningFailed"]);
        let cause = event.map_or_else(
            || format!("the claim names the class {name}, and there is none of that name"),
            message,
        );
        return Some(
            finding(Severity::Error, Trouble::ClassMissing, claim, cause)
                .evidence([format!("classes: {known}")])
                .advise(format!("create the class, or use one of: {known}"))
                .command("kubectl get sc"),
        );
    }
    let named = claim.spec.as_ref().is_some_and(|spec| spec.storage_class_name.is_some());
    if !observed.state.is_late(claim) && observed.last_failure(claim, &["FailedBinding"]).is_none() {
        return None;
    }
    if named || observed.state.classes.iter().any(|class| is_default(class)) {
        let cause =
            "the claim wants no class, and no available volume fits it (size, access modes, selector)";
        return Some(
            finding(Severity::Error, Trouble::NoVolumeFits, claim, cause)
                .advise("create a PersistentVolume that fits, or name a class in a new claim")
                .command("kubectl get pv"),
        );
    }
    let cause = "the claim names no class, there is no default class, and no available volume fits it";
    Some(
        finding(Severity::Error, Trouble::NoClass, claim, cause)
            .evidence([format!("classes: {known}")])
            .advise(format!("name a class in a new claim ({known}), or make one the default"))
            .command("kubectl get sc"),
    )
}

/// Whether new claims without a class are of this one.
pub(super) fn is_default(class: &StorageClass) -> bool {
    [names::DEFAULT_CLASS, names::BETA_DEFAULT_CLASS]
        .iter()
        .any(|name| class.annotations().get(*name).is_some_and(|value| value == "true"))
}

fn not_provisioned(
    observed: &Observed<'_>,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
) -> Option<Finding> {
    if !observed.state.is_late(claim) {
        return None;
    }
    let driver = &class.provisioner;
    if driver == names::NO_PROVISIONER {
        let cause = format!(
            "no available volume of the class {} fits the claim, and the class makes none",
            class.name_any()
        );
        return Some(
            finding(Severity::Error, Trouble::NoVolumeFits, claim, cause)
                .advise(
                    "create a PersistentVolume of the class that fits: size, access modes, selector, node",
                )
                .command("kubectl get pv"),
        );
    }
    let events = observed.state.events.about(claim);
    // A provisioner records this event before it calls the driver, and Berth's adds a finalizer: without them, none has taken
    // up the claim.
    let begun = names::creating(driver);
    if events.iter().any(|event| event.reason.as_deref() == Some(names::events::PROVISIONING))
        || claim.finalizers().iter().any(|finalizer| finalizer.starts_with(&begun))
    {
        let cause = format!(
            "the provisioner of {driver} has taken up the claim, and has recorded neither a volume nor a failure"
        );
        return Some(finding(Severity::Error, Trouble::ProvisioningSilent, claim, cause).advise(
            "see the logs of the provisioner and of the driver: CreateVolume is running, or the provisioner has ended",
        ));
    }
    let registered = observed.state.nodes_with(driver);
    let also = if registered.is_empty() { ", and the driver is registered on no node" } else { "" };
    let age = observed.state.age(claim.metadata.creation_timestamp.as_ref().map(|time| time.0));
    if age >= EVENTS_KEPT && !registered.is_empty() {
        // The event may have been there.
        let cause = format!(
            "there is no volume for the claim, and no provisioner of {driver} has said anything about it in the last hour; what \
             was said before is not kept"
        );
        return Some(
            finding(Severity::Error, Trouble::ProvisioningSilent, claim, cause)
                .evidence([format!("pending for {}", span(age))])
                .advise("see whether a provisioner runs for the driver, and the logs of both")
                .command(describe(claim)),
        );
    }
    let cause = format!(
        "no provisioner is running for the driver {driver} of the class {}: none has taken up the claim{also}",
        class.name_any()
    );
    let since = span(age);
    Some(
        finding(Severity::Error, Trouble::NoProvisioner, claim, cause)
            .evidence([format!("pending for {since}"), format!("{driver} is registered on: {}", super::names(registered.iter().copied()))])
            .advise(if registered.is_empty() {
                "start the driver, then its sidecars: berth sidecars --csi-address SOCKET; or use another class"
            } else {
                "start one for the driver: berth sidecars --csi-address SOCKET, or berth up --driver-endpoint unix://SOCKET, which runs all that the driver needs"
            })
            .command(describe(claim)),
    )
}

fn status(claim: &PersistentVolumeClaim) -> Option<&PersistentVolumeClaimStatus> {
    claim.status.as_ref()
}

fn condition(claim: &PersistentVolumeClaim, kind: &str) -> bool {
    let conditions = status(claim).and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True")
}

/// A claim that asks for more than it has.
fn growth(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let capacity = storage::bytes(status(claim)?.capacity.as_ref())?;
    if requested(claim) <= capacity {
        return None;
    }
    let asked = claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?.get("storage")?.0.clone();
    let has = status(claim)?.capacity.as_ref()?.get("storage")?.0.clone();
    let sizes = format!("the claim asks for {asked} and has {has}");
    let resizing = status(claim)?.allocated_resource_statuses.as_ref().and_then(|all| all.get("storage"));
    let infeasible = resizing.is_some_and(|state| state.ends_with("Infeasible"));
    if let Some(event) = observed.last_failure(claim, &["VolumeResizeFailed", "FileSystemResizeFailed"]) {
        return Some(
            finding(Severity::Error, Trouble::ResizeFailed, claim, message(event))
                .evidence([sizes, event_as_evidence(event)])
                .advise("correct what the message names, or ask for less; it is tried again by itself")
                .command(describe(claim)),
        );
    }
    if infeasible {
        let cause = format!("the driver says that the volume cannot be as large as {asked}");
        return Some(
            finding(Severity::Error, Trouble::ResizeFailed, claim, cause)
                .evidence([sizes, format!("allocatedResourceStatuses: {}", resizing?)])
                .advise("ask for less, but not for less than it has")
                .command(describe(claim)),
        );
    }
    let waits_for_node = condition(claim, "FileSystemResizePending")
        || resizing.is_some_and(|state| state.starts_with("NodeResize"));
    let users = on_nodes(observed.users_of(&Key::of(claim)));
    if waits_for_node {
        return waits_for_node_to_grow(observed, claim, &users, sizes);
    }
    if condition(claim, "Resizing") || !observed.state.is_late(claim) {
        return None;
    }
    let class = observed.state.classes.named(super::class_of(claim));
    if class.is_some_and(|class| class.allow_volume_expansion != Some(true)) {
        let cause = "the claim asks for more than its volume has, and its class allows no expansion";
        return Some(
            finding(Severity::Warning, Trouble::NoResizer, claim, cause)
                .evidence([sizes])
                .advise("set allowVolumeExpansion: true in the class if its driver can grow volumes")
                .command(format!("kubectl get sc {} -o yaml", super::class_of(claim))),
        );
    }
    // Whoever takes it up says so by a condition or an event.
    let taken_up = observed.state.events.about(claim).iter().any(|event| {
        matches!(
            event.reason.as_deref(),
            Some("Resizing" | "VolumeResizeSuccessful" | "FileSystemResizeRequired")
        )
    });
    (!taken_up).then(|| {
        finding(
            Severity::Warning,
            Trouble::NoResizer,
            claim,
            "no resizer is running for the claim's driver: none has taken up the new size",
        )
        .evidence([sizes])
        .advise("start csi-resizer beside the driver: berth sidecars --csi-address SOCKET")
        .command(describe(claim))
    })
}

fn waits_for_node_to_grow(
    observed: &Observed<'_>,
    claim: &PersistentVolumeClaim,
    users: &[&Pod],
    sizes: String,
) -> Option<Finding> {
    let Some(pod) = users.first() else {
        let cause = "the volume has grown; its filesystem grows when the next pod uses it";
        return Some(
            finding(Severity::Note, Trouble::ResizeWaitsForNode, claim, cause)
                .evidence([sizes])
                .advise("start a pod that uses the claim"),
        );
    };
    let changed = status(claim)?
        .conditions
        .iter()
        .flatten()
        .filter_map(|condition| condition.last_transition_time.as_ref())
        .max();
    let since = observed.state.age(changed.map(|time| time.0));
    if since < observed.state.patience {
        return None;
    }
    let node = storage::node_of_pod(pod);
    let cause = format!(
        "the volume has grown, and the node {node}, where the pod {} uses it, does not grow the filesystem",
        pod.name_any()
    );
    Some(
        finding(Severity::Warning, Trouble::ResizeWaitsForNode, claim, cause)
            .evidence([sizes, format!("FileSystemResizePending for {}", span(since))])
            .advise("see the log of the kubelet and of the driver on that node; drivers without online expansion need the pod to be restarted")
            .command(format!("kubectl delete pod -n {} {}", pod.namespace().unwrap_or_default(), pod.name_any())),
    )
}

fn modification(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let wanted =
        claim.spec.as_ref()?.volume_attributes_class_name.as_deref().filter(|name| !name.is_empty())?;
    if status(claim)?.current_volume_attributes_class_name.as_deref() == Some(wanted) {
        return None;
    }
    if observed.state.attributes_classes.lack(&Key::cluster(wanted)) {
        let cause =
            format!("the claim names the VolumeAttributesClass {wanted}, and there is none of that name");
        return Some(
            finding(Severity::Warning, Trouble::ModifyFailed, claim, cause)
                .advise("create it, or name one that exists")
                .command("kubectl get volumeattributesclass"),
        );
    }
    let event = observed.last_failure(claim, &["VolumeModifyFailed"])?;
    Some(
        finding(Severity::Warning, Trouble::ModifyFailed, claim, message(event))
            .evidence([event_as_evidence(event)])
            .advise(RETRIED)
            .command(describe(claim)),
    )
}

/// A claim that costs storage and that no pod uses.
fn unused(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Option<Finding> {
    let age = observed.state.age(claim.metadata.creation_timestamp.as_ref().map(|time| time.0));
    let known = observed.state.pods.are_known() && age >= UNUSED.max(observed.state.patience);
    if !known || !observed.users_of(&Key::of(claim)).is_empty() {
        return None;
    }
    let size = status(claim)?.capacity.as_ref()?.get("storage")?.0.clone();
    let cause = "no pod uses the claim now; a workload that is scaled to zero may use it again";
    Some(
        finding(Severity::Note, Trouble::ClaimUnused, claim, cause)
            .evidence([format!("{size}, created {} ago", span(age))])
            .advise("if nobody needs the data, delete the claim")
            .command(describe(claim)),
    )
}
