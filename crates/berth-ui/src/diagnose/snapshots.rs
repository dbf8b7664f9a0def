//! What snapshots wait for: their source, a class, a controller, the driver, their deletion.

use berth_core::names::snapshots as names;
use berth_kube::Key;
use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotContent};
use berth_kube::storage::{csi_source, volume_name};
use kube::ResourceExt;

use super::{Observed, RETRIED, span};
use crate::finding::{Finding, ObjectName, Severity, Trouble};

pub(super) fn diagnose(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    for snapshot in observed.state.snapshots.iter() {
        findings.extend(if snapshot.metadata.deletion_timestamp.is_some() {
            terminating(observed, snapshot)
        } else {
            not_ready(observed, snapshot)
        });
    }
    for content in observed.state.contents.iter() {
        findings.extend(leaked(observed, content));
    }
}

fn finding(
    severity: Severity,
    trouble: Trouble,
    snapshot: &VolumeSnapshot,
    cause: impl Into<String>,
) -> Finding {
    let object = ObjectName::of(snapshot);
    let command = format!("kubectl describe {}", object.argument());
    Finding::new(severity, trouble, object, cause).command(command)
}

fn not_ready(observed: &Observed<'_>, snapshot: &VolumeSnapshot) -> Option<Finding> {
    let status = snapshot.status.as_ref();
    if status.and_then(|status| status.ready_to_use) == Some(true) {
        return None;
    }
    if let Some(found) = source_missing(observed, snapshot).or_else(|| class_missing(observed, snapshot)) {
        return Some(found);
    }
    if let Some(error) = status.and_then(|status| status.error.as_ref()?.message.clone()) {
        return Some(finding(Severity::Error, Trouble::SnapshotFailed, snapshot, error).advise(RETRIED));
    }
    if !observed.state.is_late(snapshot) {
        return None;
    }
    let content = status.and_then(|status| status.bound_volume_snapshot_content_name.as_deref());
    let content = content.and_then(|name| observed.state.contents.named(name));
    let Some(content) = content else {
        let cause = "no snapshot controller is running: none has taken up the snapshot";
        return Some(
            finding(Severity::Error, Trouble::NoSnapshotter, snapshot, cause)
                .evidence(["it has no VolumeSnapshotContent".to_owned()])
                .advise("start one snapshot controller in the cluster: berth snapshot-controller"),
        );
    };
    let driver = &content.spec.driver;
    let status = content.status.as_ref();
    let error = status.and_then(|status| status.error.as_ref()?.message.clone());
    if let Some(error) = error {
        return Some(finding(Severity::Error, Trouble::SnapshotFailed, snapshot, error).advise(RETRIED));
    }
    let (cause, advice) = if status.and_then(|status| status.snapshot_handle.as_ref()).is_some() {
        (
            format!(
                "the driver {driver} has taken the snapshot and does not say that it is ready: it is being copied or uploaded"
            ),
            "wait, and see the storage system; some take hours for the first snapshot of a large volume",
        )
    } else if content.annotations().contains_key(names::BEING_CREATED) {
        (
            format!("the snapshotter has asked the driver {driver} for the snapshot, and got no answer yet"),
            "see the logs of csi-snapshotter and of the driver: CreateSnapshot is running, or the snapshotter has ended",
        )
    } else {
        (
            format!(
                "no snapshotter is running for the driver {driver}: none has taken up the content {}",
                content.name_any()
            ),
            "start csi-snapshotter beside the driver: berth sidecars --csi-address SOCKET",
        )
    };
    Some(
        finding(Severity::Error, Trouble::NoSnapshotter, snapshot, cause)
            .evidence([format!("content {}", content.name_any())])
            .advise(advice),
    )
}

fn source_missing(observed: &Observed<'_>, snapshot: &VolumeSnapshot) -> Option<Finding> {
    let source = &snapshot.spec.source;
    let bound =
        snapshot.status.as_ref().is_some_and(|status| status.bound_volume_snapshot_content_name.is_some());
    let cause = if let Some(name) = &source.persistent_volume_claim_name {
        let key = Key::new(snapshot.namespace().unwrap_or_default(), name.clone());
        match observed.state.claims.get(&key) {
            _ if bound => return None,
            None if observed.state.claims.are_known() => {
                format!("the snapshot is of the claim {name}, and there is none in its namespace")
            }
            Some(claim) if super::claims::phase(claim) != "Bound" && observed.state.is_late(snapshot) => {
                format!(
                    "the snapshot is of the claim {name}, which is {} and has no volume",
                    super::claims::phase(claim)
                )
            }
            _ => return None,
        }
    } else {
        let name = source.volume_snapshot_content_name.as_ref()?;
        if !observed.state.contents.lack(&Key::cluster(name.clone())) {
            return None;
        }
        format!("the snapshot stands for the content {name}, and there is none")
    };
    Some(
        finding(Severity::Error, Trouble::SnapshotSourceMissing, snapshot, cause)
            .advise("create what it names, or delete the snapshot and create one of what exists"),
    )
}

fn class_missing(observed: &Observed<'_>, snapshot: &VolumeSnapshot) -> Option<Finding> {
    let classes = &observed.state.snapshot_classes;
    let claim = snapshot.spec.source.persistent_volume_claim_name.as_ref()?;
    let bound =
        snapshot.status.as_ref().is_some_and(|status| status.bound_volume_snapshot_content_name.is_some());
    if bound || !classes.are_known() {
        return None;
    }
    let key = Key::new(snapshot.namespace().unwrap_or_default(), claim.clone());
    let volume =
        observed.state.claims.get(&key).and_then(|claim| observed.state.volumes.named(volume_name(claim)));
    let driver = volume.and_then(|volume| csi_source(volume)).map(|csi| csi.driver.as_str());
    let known = super::names(classes.iter().filter_map(|class| class.metadata.name.as_deref()));
    let cause = if let Some(name) = snapshot.spec.volume_snapshot_class_name.as_deref() {
        match (classes.named(name), driver) {
            (None, _) => format!("the snapshot names the class {name}, and there is none of that name"),
            (Some(class), Some(driver)) if class.driver != driver => {
                format!(
                    "the snapshot's class {name} is of the driver {}, and its volume of {driver}",
                    class.driver
                )
            }
            _ => return None,
        }
    } else {
        let driver = driver?;
        let is_default = |class: &std::sync::Arc<berth_kube::snapshots::VolumeSnapshotClass>| {
            class.driver == driver
                && class.annotations().get(names::DEFAULT_CLASS).is_some_and(|value| value == "true")
        };
        match classes.iter().filter(|class| is_default(class)).count() {
            0 => format!(
                "the snapshot names no class, and the driver {driver} has no default VolumeSnapshotClass"
            ),
            1 => return None,
            _ => format!(
                "the snapshot names no class, and the driver {driver} has several default VolumeSnapshotClasses"
            ),
        }
    };
    Some(
        finding(Severity::Error, Trouble::SnapshotClassMissing, snapshot, cause)
            .evidence([format!("classes of snapshots: {known}")])
            .advise("create a VolumeSnapshotClass of the driver, or name one that fits in a new snapshot")
            .command("kubectl get volumesnapshotclass"),
    )
}

fn terminating(observed: &Observed<'_>, snapshot: &VolumeSnapshot) -> Option<Finding> {
    if !observed.state.is_late_to_go(snapshot) {
        return None;
    }
    let since = span(observed.state.age(snapshot.metadata.deletion_timestamp.as_ref().map(|time| time.0)));
    let content =
        snapshot.status.as_ref().and_then(|status| status.bound_volume_snapshot_content_name.as_deref());
    let content = content.and_then(|name| observed.state.contents.named(name));
    let error = content.and_then(|content| content.status.as_ref()?.error.as_ref()?.message.clone());
    let restoring: Vec<String> = observed
        .state
        .claims
        .iter()
        .filter(|claim| {
            super::claims::phase(claim) == "Pending"
                && claim.namespace() == snapshot.namespace()
                && claim.spec.as_ref().and_then(|spec| spec.data_source.as_ref()).is_some_and(|source| {
                    source.kind == "VolumeSnapshot" && Some(&source.name) == snapshot.metadata.name.as_ref()
                })
        })
        .map(|claim| claim.name_any())
        .collect();
    let (cause, advice) = match error {
        _ if !restoring.is_empty() => (
            format!(
                "the snapshot is being deleted, and the claims {} are being restored from it",
                restoring.join(", ")
            ),
            "wait until they are bound, or delete them".to_owned(),
        ),
        Some(error) => {
            (format!("the snapshot is being deleted, and its storage cannot be: {error}"), RETRIED.to_owned())
        }
        None => (
            format!(
                "the snapshot is being deleted and waits for its finalizers: {}",
                snapshot.finalizers().join(", ")
            ),
            "see whether the snapshot controller and the driver's csi-snapshotter run".to_owned(),
        ),
    };
    Some(
        finding(Severity::Warning, Trouble::SnapshotFinalizer, snapshot, cause)
            .evidence([format!("in deletion for {since}")])
            .advise(advice),
    )
}

/// Storage that is kept for a VolumeSnapshot that is gone.
fn leaked(observed: &Observed<'_>, content: &VolumeSnapshotContent) -> Option<Finding> {
    // Another namespace's snapshots were not read.
    if observed.state.partial || !observed.state.is_late(content) {
        return None;
    }
    let reference = &content.spec.volume_snapshot_ref;
    let key = Key::new(reference.namespace.clone()?, reference.name.clone()?);
    let exists = observed
        .state
        .snapshots
        .get(&key)
        .is_some_and(|snapshot| reference.uid.is_none() || snapshot.metadata.uid == reference.uid);
    // A content made by hand waits for a VolumeSnapshot that somebody will create.
    if exists || !observed.state.snapshots.are_known() || reference.uid.is_none() {
        return None;
    }
    let name = content.name_any();
    let object = ObjectName::of(content);
    let error = content.status.as_ref().and_then(|status| status.error.as_ref()?.message.clone());
    let (cause, advice, command) = if content.metadata.deletion_timestamp.is_some()
        || content.spec.deletion_policy == names::DELETE
    {
        (
            format!(
                "the VolumeSnapshot {key} is gone, and the snapshot of {} on the storage is not deleted",
                content.spec.driver
            ),
            "see whether the driver's csi-snapshotter runs, and its log",
            format!("kubectl describe volumesnapshotcontent {name}"),
        )
    } else {
        (
            format!(
                "the VolumeSnapshot {key} is gone and the policy is Retain: the snapshot stays on the storage until somebody removes it"
            ),
            "to remove it, set deletionPolicy: Delete and delete the content; to use it, create a VolumeSnapshot that names the content",
            format!(
                "kubectl patch volumesnapshotcontent {name} --type merge -p '{{\"spec\":{{\"deletionPolicy\":\"Delete\"}}}}'"
            ),
        )
    };
    Some(
        Finding::new(Severity::Warning, Trouble::SnapshotLeaked, object, cause)
            .evidence([error.map_or_else(String::new, |error| format!("deleting failed: {error}"))])
            .advise(advice)
            .command(command),
    )
}
