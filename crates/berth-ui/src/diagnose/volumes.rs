//! What is wrong with volumes: not reclaimed, not deleted, out of reach, full.

use berth_core::names;
use berth_kube::Key;
use berth_kube::selectors;
use berth_kube::storage::{claim_of_volume, csi_source};
use k8s_openapi::api::core::v1::{NodeSelectorTerm, PersistentVolume};
use kube::ResourceExt;

use super::{Observed, event_as_evidence, message, severity_if_used, span};
use crate::finding::{Finding, Fix, ObjectName, Severity, Trouble};

/// How full a volume is when it is worth a warning, and when it is an error, in hundredths.
const FULL: [u64; 2] = [90, 99];

pub(super) fn diagnose(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    for volume in observed.state.volumes.iter() {
        findings.extend(match (volume.metadata.deletion_timestamp.is_some(), phase(volume)) {
            (_, "Released" | "Failed") => released(observed, volume),
            (true, _) => terminating(observed, volume),
            (false, _) => node_gone(observed, volume),
        });
    }
    findings.extend(
        observed
            .by_handle
            .iter()
            .filter(|(_, volumes)| volumes.len() > 1)
            .map(|((driver, handle), volumes)| twice(driver, handle, volumes)),
    );
    for (claim, usage) in &observed.state.usage {
        findings.extend(full(observed, claim, usage));
    }
}

fn phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn finding(
    severity: Severity,
    trouble: Trouble,
    volume: &PersistentVolume,
    cause: impl Into<String>,
) -> Finding {
    Finding::new(severity, trouble, ObjectName::of(volume), cause)
}

fn describe(volume: &PersistentVolume) -> String {
    format!("kubectl describe pv/{}", volume.name_any())
}

/// A volume whose claim is gone.
fn released(observed: &Observed<'_>, volume: &PersistentVolume) -> Option<Finding> {
    let name = volume.name_any();
    let spec = volume.spec.as_ref()?;
    let policy = spec.persistent_volume_reclaim_policy.as_deref().unwrap_or("Retain");
    let size = spec
        .capacity
        .as_ref()
        .and_then(|capacity| capacity.get("storage"))
        .map_or_else(String::new, |size| size.0.clone());
    let of = claim_of_volume(volume).map_or_else(String::new, |claim| format!(", was of the claim {claim}"));
    let facts = format!("{size}, {}{of}, policy {policy}", phase(volume));
    if let Some(event) = observed.last_failure(volume, &["VolumeFailedDelete", "VolumeFailedRecycle"])
        && policy != "Retain"
    {
        return Some(
            finding(Severity::Warning, Trouble::VolumeDeleteFailed, volume, message(event))
                .evidence([facts, event_as_evidence(event)])
                .advise("correct what the message names; deletion is tried again by itself")
                .command(describe(volume)),
        );
    }
    if policy == "Retain" && phase(volume) == "Released" {
        let cause = format!(
            "the claim of {name} is gone and its policy is Retain: the data is kept, and no other claim gets it"
        );
        return Some(
            finding(Severity::Warning, Trouble::VolumeReleased, volume, cause)
                .evidence([facts])
                .advise("to use it again, remove its claimRef; to remove it, set its policy to Delete, or delete the volume and its data by hand")
                .command(format!("kubectl patch pv {name} -p '{{\"spec\":{{\"claimRef\":null}}}}'")),
        );
    }
    if let Some(node) = observed.attachments_of(&name).first() {
        // The provisioner waits for it to be detached; the attachment's own finding says why it is not.
        let cause = format!(
            "the volume {name} is released and is not deleted while it is attached to the node {}",
            node.spec.node_name
        );
        return observed.state.is_late_to_go(volume).then(|| {
            finding(Severity::Warning, Trouble::VolumeInUse, volume, cause)
                .evidence([facts])
                .advise("see why it is not detached")
                .command("kubectl get volumeattachment")
        });
    }
    if !observed.state.is_late(volume) {
        return None;
    }
    let driver = csi_source(volume).map_or_else(String::new, |csi| csi.driver.clone());
    let by = volume.annotations().get(names::PROVISIONED_BY);
    let (cause, advice) = match by {
        _ if !phase_is_old_enough(observed, volume) => return None,
        Some(provisioner) => (
            format!("the volume is to be deleted, and the provisioner of {provisioner} does not do it"),
            "start the driver's provisioner, or see its log".to_owned(),
        ),
        None => (
            format!(
                "the volume is to be deleted, and no provisioner made it{}: none will delete it",
                if driver.is_empty() { String::new() } else { format!(" for {driver}") }
            ),
            format!(
                "set its policy to Retain, or annotate it with {}=DRIVER so that the driver's provisioner deletes it",
                names::PROVISIONED_BY
            ),
        ),
    };
    Some(
        finding(Severity::Warning, Trouble::VolumeNotDeleted, volume, cause)
            .evidence([facts])
            .advise(advice)
            .command(describe(volume)),
    )
}

/// Whether the volume has been in its phase for so long that somebody should have acted.
fn phase_is_old_enough(observed: &Observed<'_>, volume: &PersistentVolume) -> bool {
    let since = volume.status.as_ref().and_then(|status| status.last_phase_transition_time.as_ref());
    since.is_none_or(|since| observed.state.age(Some(since.0)) >= observed.state.patience)
}

fn terminating(observed: &Observed<'_>, volume: &PersistentVolume) -> Option<Finding> {
    let name = volume.name_any();
    let since = span(observed.state.age(volume.metadata.deletion_timestamp.as_ref().map(|time| time.0)));
    let facts = format!("in deletion for {since}, finalizers: {}", volume.finalizers().join(", "));
    let claim = claim_of_volume(volume).filter(|claim| observed.state.claims.get(claim).is_some());
    if phase(volume) == "Bound"
        && let Some(claim) = claim
    {
        let cause = format!("the volume {name} is being deleted and still bound to the claim {claim}");
        return Some(
            finding(Severity::Warning, Trouble::VolumeInUse, volume, cause)
                .evidence([facts])
                .advise("if it is to go, delete its claim first; a deletion cannot be taken back, so save the data otherwise")
                .command(format!("kubectl delete pvc -n {} {}", claim.namespace, claim.name)),
        );
    }
    if !observed.state.is_late_to_go(volume) {
        return None;
    }
    let nodes: Vec<&str> =
        observed.attachments_of(&name).iter().map(|attachment| attachment.spec.node_name.as_str()).collect();
    if !nodes.is_empty() {
        let cause =
            format!("the volume {name} is being deleted and still attached to {}", super::names(nodes));
        return Some(
            finding(Severity::Warning, Trouble::VolumeInUse, volume, cause)
                .evidence([facts])
                .advise("delete the pods that use it there, or see why it is not detached")
                .command("kubectl get volumeattachment"),
        );
    }
    let cause = format!(
        "the volume {name} is being deleted and waits for its finalizers: {}",
        volume.finalizers().join(", ")
    );
    let found = finding(Severity::Warning, Trouble::VolumeFinalizer, volume, cause)
        .evidence([facts])
        .command(describe(volume));
    if volume.finalizers() == [names::VOLUME_PROTECTION.to_owned()] {
        let cause = format!(
            "the volume is not bound, and the controller that removes its finalizer {} does not run",
            names::VOLUME_PROTECTION
        );
        let found = Finding { cause, ..found };
        let found = found.advise("start kube-controller-manager; or remove the finalizer, which is safe while the volume is not bound");
        let unbound =
            matches!(phase(volume), "Available" | "Pending" | "") && claim_of_volume(volume).is_none();
        return Some(if unbound {
            let finalizer = names::VOLUME_PROTECTION.to_owned();
            found.safe(Fix::RemoveFinalizer { finalizer }).command("berth doctor --fix")
        } else {
            found
        });
    }
    let advice = if volume.finalizers().iter().any(|finalizer| finalizer == names::PROVISIONER_FINALIZER) {
        "start the driver's provisioner, which deletes the storage and then removes the finalizer; removed by hand, the storage is left over".to_owned()
    } else if volume.finalizers().iter().any(|finalizer| finalizer.starts_with("external-attacher/")) {
        "start the driver's attacher, which removes its finalizer when the volume is detached everywhere"
            .to_owned()
    } else {
        "find who owns the finalizers: that component is not running, or waits itself".to_owned()
    };
    Some(found.advise(advice))
}

/// The terms of a volume's node affinity; none if it can be used from every node.
fn terms(volume: &PersistentVolume) -> &[NodeSelectorTerm] {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
    affinity.map_or(&[], |required| &required.node_selector_terms)
}

/// Where a volume can be used from, as its affinity says it; empty for everywhere.
pub(super) fn places(volume: &PersistentVolume) -> String {
    let term = |term: &NodeSelectorTerm| {
        let expressions = term.match_expressions.iter().flatten().chain(term.match_fields.iter().flatten());
        let expression: Vec<_> = expressions
            .map(|rule| {
                format!(
                    "{} {} {}",
                    rule.key,
                    rule.operator,
                    rule.values.iter().flatten().cloned().collect::<Vec<_>>().join("|")
                )
            })
            .collect();
        expression.join(" and ")
    };
    terms(volume).iter().map(term).collect::<Vec<_>>().join(", or ")
}

fn node_gone(observed: &Observed<'_>, volume: &PersistentVolume) -> Option<Finding> {
    let terms = terms(volume);
    let nodes = &observed.state.nodes;
    if terms.is_empty() || !nodes.are_known() || nodes.is_empty() {
        return None;
    }
    if nodes.iter().any(|node| selectors::volume_on_node(volume, node)) {
        return None;
    }
    let claim = claim_of_volume(volume);
    let used = claim.as_ref().is_some_and(|claim| !observed.users_of(claim).is_empty());
    let cause = format!("the volume can be used only from nodes that do not exist: {}", places(volume));
    let of = claim.map_or_else(String::new, |claim| format!("of the claim {claim}"));
    Some(
        finding(severity_if_used(used), Trouble::VolumeNodeGone, volume, cause)
            .evidence([of])
            .advise("bring the node back under its name and labels; if it is gone for good, so is a local volume's data: restore it into a new claim")
            .command("kubectl get nodes --show-labels"),
    )
}

/// Several volumes that are the same storage.
fn twice(driver: &str, handle: &str, volumes: &[&PersistentVolume]) -> Finding {
    let all: Vec<String> = volumes.iter().map(|volume| volume.name_any()).collect();
    let bound = volumes.iter().filter(|volume| phase(volume) == "Bound").count();
    let deletes = volumes.iter().any(|volume| {
        volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref())
            == Some("Delete")
    });
    let severity = if bound > 1 || deletes { Severity::Error } else { Severity::Warning };
    let cause =
        format!("the volumes {} are the same storage: driver {driver}, handle {handle}", all.join(" and "));
    let danger = if deletes {
        "deleting the claim of one deletes the data of all"
    } else {
        "what one writes the others see"
    };
    finding(severity, Trouble::VolumeTwice, volumes[0], cause)
        .evidence([format!("{bound} of them bound; {danger}")])
        .advise("set the reclaim policy of all to Retain, then keep one of them and delete the other objects")
        .command(format!("kubectl get pv {}", all.join(" ")))
}

fn full(observed: &Observed<'_>, claim: &Key, usage: &crate::state::Usage) -> Option<Finding> {
    let part = |used: u64, all: u64| {
        if all == 0 { 0 } else { u64::try_from(u128::from(used) * 100 / u128::from(all)).unwrap_or(100) }
    };
    let (bytes, inodes) = (part(usage.used, usage.capacity), part(usage.inodes_used, usage.inodes));
    let (what, hundredths, used, all) = if bytes >= inodes {
        ("bytes", bytes, usage.used, usage.capacity)
    } else {
        ("inodes", inodes, usage.inodes_used, usage.inodes)
    };
    if hundredths < FULL[0] {
        return None;
    }
    let object = ObjectName {
        kind: "PersistentVolumeClaim".to_owned(),
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
    };
    let severity = if hundredths >= FULL[1] { Severity::Error } else { Severity::Warning };
    let class = observed
        .state
        .claims
        .get(claim)
        .and_then(|claim| observed.state.classes.named(super::class_of(claim)));
    let grows = class.is_some_and(|class| class.allow_volume_expansion == Some(true));
    let advice = if grows && what == "bytes" {
        "make it larger, or remove what is not needed"
    } else {
        "remove what is not needed, or move to a larger claim"
    };
    let command = format!(
        "kubectl patch pvc -n {} {} -p '{{\"spec\":{{\"resources\":{{\"requests\":{{\"storage\":\"{}Mi\"}}}}}}}}'",
        claim.namespace,
        claim.name,
        usage.capacity.div_ceil(1 << 20).next_multiple_of(16) * 2
    );
    let found = Finding::new(
        severity,
        Trouble::VolumeFull,
        object,
        format!("the volume of the claim is {hundredths} % full ({what})"),
    )
    .evidence([format!("{used} of {all} {what} used")])
    .advise(advice);
    Some(if grows && what == "bytes" { found.command(command) } else { found })
}
