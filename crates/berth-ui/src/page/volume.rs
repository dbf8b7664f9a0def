//! One volume in full: the chain from class to pod, its life, calls, events, usage and what was made from it.

use std::collections::{BTreeMap, BTreeSet};

use berth_kube::Key;
use berth_kube::storage::{
    capacity, claim_of_volume, class_of_claim, csi_source, node_of_pod, phase_of_pod, requested, volume_name,
};
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::life::{About, episodes, millis};
use crate::calls::micros;
use crate::diagnose::Observed;
use crate::finding::{Finding, Trouble};
use crate::records::{CallRecord, Step};
use crate::rows::{Row, shown_pod};
use crate::state::{ClusterState, time_of};
use crate::words::{self, gib};

/// How many calls and events are shown.
const SHOWN: usize = 200;

/// The objects of one row.
pub(super) struct Parts<'a> {
    pub(super) claim: Option<&'a PersistentVolumeClaim>,
    pub(super) volume: Option<&'a PersistentVolume>,
    pub(super) pods: &'a [&'a Pod],
    pub(super) attachments: &'a [&'a VolumeAttachment],
}

impl<'a> Parts<'a> {
    /// The objects of a row by its id.
    pub(super) fn of(observed: &'a Observed<'a>, id: &str) -> Option<Self> {
        let state = observed.state;
        let (namespace, name) = id.split_once('/')?;
        let claim = state.claims.get(&Key::new(namespace, name)).filter(|_| !namespace.is_empty());
        let volume = match claim {
            Some(claim) => state.volumes.named(volume_name(claim)),
            None => state.volumes.named(name).filter(|_| namespace.is_empty()),
        };
        if claim.is_none() && volume.is_none() {
            return None;
        }
        let pods = claim.map(|claim| observed.users_of(&Key::of(claim.as_ref()))).unwrap_or_default();
        let named = volume.and_then(|volume| volume.metadata.name.as_deref()).unwrap_or_default();
        Some(Self {
            claim: claim.map(|claim| &**claim),
            volume: volume.map(|volume| &**volume),
            pods,
            attachments: observed.attachments_of(named),
        })
    }

    /// Names that stand in the lines of steps, each in quotes.
    pub(super) fn names(&self) -> BTreeSet<String> {
        let mut names: BTreeSet<String> =
            self.pods.iter().map(|pod| format!("{:?}", Key::of(*pod).to_string())).collect();
        names.extend(self.claim.map(|claim| format!("{:?}", Key::of(claim).to_string())));
        names.extend(self.volume.map(|volume| format!("{:?}", volume.name_any())));
        names
    }

    /// Names that stand in the requests of calls, each in quotes.
    pub(super) fn quoted(&self) -> BTreeSet<String> {
        let uid = self.claim.and_then(|claim| claim.metadata.uid.clone());
        let mut names: BTreeSet<String> = uid.map(|uid| format!("\"pvc-{uid}\"")).into_iter().collect();
        names.extend(self.volume.map(|volume| format!("{:?}", volume.name_any())));
        names.extend(self.volume.and_then(csi_source).map(|csi| format!("{:?}", csi.volume_handle)));
        names
    }

    /// Whether a step is one of this volume's.
    pub(super) fn concerns(&self, step: &Step) -> bool {
        let is = |name: &str, object: Option<String>| !name.is_empty() && object.as_deref() == Some(name);
        is(&step.volume, self.volume.map(kube::ResourceExt::name_any))
            || is(&step.claim, self.claim.map(|claim| Key::of(claim).to_string()))
            || (step.volume.is_empty()
                && step.claim.is_empty()
                && self.pods.iter().any(|pod| step.pod == Key::of(*pod).to_string()))
    }
}

/// What is kept of a volume by `berth up`.
pub(super) struct Kept {
    /// Whether steps and calls can be seen here at all.
    pub(super) known: bool,
    pub(super) steps: Vec<Step>,
    pub(super) calls: Vec<CallRecord>,
}

/// Everything about one volume.
pub(super) fn detail(
    observed: &Observed<'_>,
    findings: &[Finding],
    row: &Row,
    parts: &Parts<'_>,
    kept: &Kept,
) -> Value {
    let state = observed.state;
    let driver = state.drivers.named(&row.driver);
    let attaches = driver.is_none_or(|driver| driver.spec.attach_required != Some(false));
    let about = About {
        stuck: row.trouble.as_ref().is_some_and(|verdict| is_about_mounting(verdict.code)),
        attaches,
        created: jiff::Timestamp::from_millisecond(row.created).unwrap_or_default(),
        has_volume: parts.volume.is_some(),
        calls: &kept.calls,
    };
    let class = state.classes.named(&row.cls);
    let csi = parts.volume.and_then(csi_source);
    json!({
        "row": row,
        "known": kept.known,
        "chain": chain(observed, row, parts, attaches),
        "attaches": attaches,
        "episodes": episodes(&kept.steps, &about),
        "calls": kept.calls.iter().rev().take(SHOWN).map(call).collect::<Vec<_>>(),
        "events": events(state, parts),
        "tree": tree(state, parts),
        "more": others(findings, row, state),
        "handle": csi.map(|csi| csi.volume_handle.clone()),
        "server": csi.and_then(|csi| csi.volume_attributes.as_ref()?.get("server").cloned()),
        "binding": class.map(|class| class.volume_binding_mode.clone().unwrap_or_else(|| "Immediate".to_owned())),
        "canExpand": class.is_some_and(|class| class.allow_volume_expansion == Some(true)),
        "canSnapshot": state.snapshot_classes.iter().any(|class| class.driver == row.driver),
        "asked": parts.claim.map(requested),
    })
}

/// Whether a trouble keeps a volume from being created, attached or mounted.
fn is_about_mounting(code: &str) -> bool {
    use Trouble as T;
    const MOUNTING: [Trouble; 19] = [
        T::ClassMissing,
        T::NoClass,
        T::NoVolumeFits,
        T::NamedVolumeUnusable,
        T::NoProvisioner,
        T::ProvisioningFailed,
        T::ProvisioningSilent,
        T::DataSourceUnusable,
        T::PodUnschedulable,
        T::MultiAttach,
        T::AttachFailed,
        T::MountFailed,
        T::DriverNotOnNode,
        T::VolumeNodeGone,
        T::AttachmentNodeGone,
        T::AttachmentFailed,
        T::NoAttacher,
        T::DriverAway,
        T::NodeVolumeLimit,
    ];
    MOUNTING.iter().any(|trouble| trouble.code() == code)
}

fn call(call: &CallRecord) -> Value {
    let who = match call.name() {
        "CreateVolume" | "DeleteVolume" | "GetCapacity" => "provisioner",
        "ControllerPublishVolume" | "ControllerUnpublishVolume" => "attacher",
        "ControllerExpandVolume" | "ControllerModifyVolume" => "resizer",
        name if name.contains("Snapshot") => "snapshotter",
        name if name.starts_with("Node") => "volume-manager",
        _ => "sidecar",
    };
    json!({
        "at": millis(call.time) - micros(call.duration_us),
        "who": who,
        "what": call.name(),
        "code": call.code,
        "took": micros(call.duration_us),
        "err": call.error,
        "request": call.request,
        "response": call.response,
    })
}

/// A box of the chain: kind, name, shape, word, detail.
type Link = (&'static str, String, &'static str, String, String);

/// The chain from class to pod, and where it is broken.
fn chain(observed: &Observed<'_>, row: &Row, parts: &Parts<'_>, attaches: bool) -> Vec<Value> {
    let links = [
        class_link(observed.state, row),
        claim_link(row, parts),
        volume_link(row, parts),
        attachment_link(row, parts, attaches),
        mount_link(row, parts),
        pod_link(parts),
    ];
    let at = row.trouble.as_ref().map(|verdict| broken_at(verdict.code));
    let worst = row.trouble.as_ref().map_or("bad", |verdict| verdict.state);
    links
        .into_iter()
        .enumerate()
        .map(|(number, (kind, name, shape, word, detail))| {
            let here = at == Some(number);
            // What comes after the break waits, unless it is there already.
            let shape = if here { worst } else { shape };
            let full = here.then_some(row.trouble.as_ref()).flatten().filter(|verdict| verdict.code == Trouble::VolumeFull.code());
            let word = full.map_or(word, |verdict| verdict.word.clone());
            let breaks = here && number > 0 && row.trouble.as_ref().is_some_and(|verdict| is_about_mounting(verdict.code));
            json!({ "kind": kind, "name": name, "state": shape, "word": word, "detail": detail, "broken": breaks })
        })
        .collect()
}

/// Which part of the chain a trouble is about, counted from the class.
fn broken_at(code: &str) -> usize {
    use Trouble as T;
    let is = |troubles: &[Trouble]| troubles.iter().any(|trouble| trouble.code() == code);
    if is(&[T::ClassMissing, T::NoClass]) {
        0
    } else if is(&[
        T::ClaimInUse,
        T::ClaimFinalizer,
        T::ClaimLost,
        T::NamedVolumeUnusable,
        T::DataSourceUnusable,
        T::ModifyFailed,
    ]) {
        1
    } else if is(&[
        T::NoVolumeFits,
        T::NoProvisioner,
        T::ProvisioningFailed,
        T::ProvisioningSilent,
        T::ResizeFailed,
        T::NoResizer,
        T::VolumeReleased,
        T::VolumeDeleteFailed,
        T::VolumeNotDeleted,
        T::VolumeInUse,
        T::VolumeFinalizer,
        T::VolumeTwice,
        T::VolumeNodeGone,
    ]) {
        2
    } else if is(&[
        T::AttachFailed,
        T::MultiAttach,
        T::AttachmentFailed,
        T::NoAttacher,
        T::AttachmentNodeGone,
        T::AttachmentVolumeGone,
        T::DetachmentFailed,
    ]) {
        3
    } else if is(&[T::MountFailed, T::DriverNotOnNode, T::VolumeFull, T::ResizeWaitsForNode]) {
        4
    } else {
        5
    }
}

fn class_link(state: &ClusterState, row: &Row) -> Link {
    let Some(class) = state.classes.named(&row.cls) else {
        let (shape, word) = if row.cls.is_empty() {
            ("off", "No class")
        } else if row.pv.is_empty() {
            ("bad", "Does not exist")
        } else {
            ("off", "Does not exist")
        };
        return (
            "Class",
            if row.cls.is_empty() { "none".to_owned() } else { row.cls.clone() },
            shape,
            word.to_owned(),
            String::new(),
        );
    };
    let default =
        class.annotations().get(berth_core::names::DEFAULT_CLASS).is_some_and(|value| value == "true");
    let mode = class.volume_binding_mode.clone().unwrap_or_else(|| "Immediate".to_owned());
    ("Class", row.cls.clone(), "ok", if default { "Default" } else { "Exists" }.to_owned(), mode)
}

fn claim_link(row: &Row, parts: &Parts<'_>) -> Link {
    let Some(claim) = parts.claim else {
        let named = parts
            .volume
            .and_then(claim_of_volume)
            .map_or_else(|| "none".to_owned(), |claim| claim.to_string());
        return ("Claim", named, "off", "Does not exist".to_owned(), String::new());
    };
    let shape = match row.phase.as_str() {
        "Bound" => "ok",
        "Lost" => "bad",
        "Terminating" => "busy",
        _ => "wait",
    };
    let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.clone()).unwrap_or_default();
    let short = |mode: &String| match mode.as_str() {
        "ReadWriteOnce" => "RWO".to_owned(),
        "ReadWriteMany" => "RWX".to_owned(),
        "ReadOnlyMany" => "ROX".to_owned(),
        "ReadWriteOncePod" => "RWOP".to_owned(),
        other => other.to_owned(),
    };
    let modes: Vec<String> = modes.iter().map(short).collect();
    (
        "Claim",
        row.claim.clone(),
        shape,
        row.phase.clone(),
        format!("{}, {}", gib(requested(claim)), modes.join(" ")),
    )
}

fn volume_link(row: &Row, parts: &Parts<'_>) -> Link {
    let Some(volume) = parts.volume else {
        return ("Volume", "not made".to_owned(), "wait", "Waits".to_owned(), row.driver.clone());
    };
    let phase = volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    let shape = match phase.as_str() {
        "Bound" => "ok",
        "Failed" => "bad",
        _ => "off",
    };
    ("Volume", volume.name_any(), shape, phase, row.driver.clone())
}

fn attachment_link(row: &Row, parts: &Parts<'_>, attaches: bool) -> Link {
    let kind = "Attachment";
    if !attaches {
        return (kind, "none".to_owned(), "off", "Not needed".to_owned(), "attachRequired: false".to_owned());
    }
    let Some(attachment) = parts.attachments.first() else {
        let (word, detail) = if parts.volume.is_none() {
            ("Waits", "for the volume")
        } else if row.pod.is_empty() {
            ("None", "no pod uses it")
        } else {
            ("Waits", "for a node")
        };
        return (kind, "none".to_owned(), "wait", word.to_owned(), detail.to_owned());
    };
    let status = attachment.status.clone().unwrap_or_default();
    let node = attachment.spec.node_name.clone();
    let (shape, word) = if attachment.metadata.deletion_timestamp.is_some() {
        ("busy", "Detaching")
    } else if status.attached {
        ("ok", "Attached")
    } else if status.attach_error.is_some() {
        ("bad", "Attach fails")
    } else {
        ("busy", "Attaching")
    };
    (kind, attachment.name_any(), shape, word.to_owned(), node)
}

fn mount_link(row: &Row, parts: &Parts<'_>) -> Link {
    let kind = "Mount";
    let running = parts.pods.iter().any(|pod| phase_of_pod(pod) == "Running");
    let fs = parts.volume.and_then(csi_source).and_then(|csi| csi.fs_type.clone()).unwrap_or_default();
    if running || row.used.is_some() {
        let detail = row
            .used
            .map_or_else(|| "usage unknown".to_owned(), |used| format!("{} used", gib(i128::from(used))));
        let name = if fs.is_empty() { "mounted".to_owned() } else { fs };
        return (kind, name, "ok", "Published".to_owned(), detail);
    }
    let detail = if parts.volume.is_none() {
        "for the volume"
    } else if row.pod.is_empty() {
        "no pod uses it"
    } else {
        "for the pod's node"
    };
    let word = if row.pod.is_empty() && parts.volume.is_some() { "None" } else { "Waits" };
    (kind, "none".to_owned(), "wait", word.to_owned(), detail.to_owned())
}

fn pod_link(parts: &Parts<'_>) -> Link {
    let Some(pod) = shown_pod(parts.pods) else {
        return ("Pod", "none".to_owned(), "wait", "None".to_owned(), "no pod names the claim".to_owned());
    };
    let (phase, node) = (phase_of_pod(pod), node_of_pod(pod));
    let more =
        if parts.pods.len() > 1 { format!(", and {} more", parts.pods.len() - 1) } else { String::new() };
    let (shape, word) = match phase {
        "Running" => ("ok", "Running"),
        _ if node.is_empty() => ("wait", "No node yet"),
        "" | "Pending" => ("wait", "Starting"),
        other => ("off", other),
    };
    let detail = if node.is_empty() { "waits for a node".to_owned() } else { format!("{node}{more}") };
    ("Pod", pod.name_any(), shape, word.to_owned(), detail)
}

fn events(state: &ClusterState, parts: &Parts<'_>) -> Vec<Value> {
    let about = |events: &[std::sync::Arc<Event>]| -> Vec<Value> {
        events.iter().map(|event| shown_event(event)).collect()
    };
    let mut found = Vec::new();
    found.extend(parts.claim.map(|claim| about(state.events.about(claim))).unwrap_or_default());
    found.extend(parts.volume.map(|volume| about(state.events.about(volume))).unwrap_or_default());
    for pod in parts.pods {
        found.extend(about(state.events.about(*pod)));
    }
    for attachment in parts.attachments {
        found.extend(about(state.events.about(*attachment)));
    }
    found.sort_by_key(|event| std::cmp::Reverse(event["at"].as_i64().unwrap_or(0)));
    found.truncate(SHOWN);
    found
}

fn shown_event(event: &Event) -> Value {
    let object = &event.involved_object;
    let kind = match object.kind.as_deref().unwrap_or_default() {
        "PersistentVolumeClaim" => "claim",
        "PersistentVolume" => "volume",
        "VolumeAttachment" => "attachment",
        _ => "pod",
    };
    let by = event
        .source
        .as_ref()
        .and_then(|source| source.component.clone())
        .or_else(|| event.reporting_component.clone());
    let count = event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1);
    json!({
        "at": time_of(event).as_millisecond(),
        "type": event.type_.as_deref().unwrap_or("Normal"),
        "reason": event.reason,
        "on": format!("{kind} {}", object.name.as_deref().unwrap_or_default()),
        "by": by.unwrap_or_default(),
        "n": count,
        "msg": event.message,
    })
}

/// Snapshots and clones: from the claim that has no source here, downwards; `None` if there is nothing but the claim itself.
fn tree(state: &ClusterState, parts: &Parts<'_>) -> Option<Value> {
    let claim = parts.claim?;
    let namespace = claim.namespace().unwrap_or_default();
    let mut made_from: BTreeMap<(&'static str, String), Vec<&PersistentVolumeClaim>> = BTreeMap::new();
    for other in state.claims.iter().filter(|other| other.namespace().unwrap_or_default() == namespace) {
        if let Some(source) = source_of(other) {
            made_from.entry(source).or_default().push(other);
        }
    }
    // Upwards, at most as far as there are claims: sources may form a ring in objects that somebody made by hand.
    let mut root = claim.name_any();
    for _ in 0..state.claims.len() {
        let Some(found) = state.claims.get(&Key::new(namespace.clone(), root.clone())) else { break };
        let above = match source_of(found) {
            Some(("claim", name)) => Some(name),
            Some((_, name)) => state
                .snapshots
                .get(&Key::new(namespace.clone(), name))
                .and_then(|snapshot| snapshot.spec.source.persistent_volume_claim_name.clone()),
            None => None,
        };
        match above {
            Some(name) if state.claims.get(&Key::new(namespace.clone(), name.clone())).is_some() => {
                root = name;
            }
            _ => break,
        }
    }
    let node = claim_node(state, &namespace, &root, &made_from, 0)?;
    let alone = node["kids"].as_array().is_none_or(Vec::is_empty);
    (!alone).then_some(node)
}

/// What a claim was filled from.
fn source_of(claim: &PersistentVolumeClaim) -> Option<(&'static str, String)> {
    let spec = claim.spec.as_ref()?;
    let (kind, name) =
        spec.data_source.as_ref().map(|source| (source.kind.clone(), source.name.clone())).or_else(|| {
            spec.data_source_ref.as_ref().map(|source| (source.kind.clone(), source.name.clone()))
        })?;
    match kind.as_str() {
        "PersistentVolumeClaim" => Some(("claim", name)),
        "VolumeSnapshot" => Some(("snapshot", name)),
        _ => None,
    }
}

fn claim_node(
    state: &ClusterState,
    namespace: &str,
    name: &str,
    made_from: &BTreeMap<(&'static str, String), Vec<&PersistentVolumeClaim>>,
    depth: usize,
) -> Option<Value> {
    let claim = state.claims.get(&Key::new(namespace, name))?;
    let phase =
        claim.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_else(|| "Pending".to_owned());
    let below = |source: (&'static str, String)| {
        let claims = made_from.get(&source).map(Vec::as_slice).unwrap_or_default();
        let deep = depth < 16;
        claims
            .iter()
            .filter(move |_| deep)
            .filter_map(move |claim| claim_node(state, namespace, &claim.name_any(), made_from, depth + 1))
            .collect::<Vec<_>>()
    };
    let of = |snapshot: &&std::sync::Arc<berth_kube::snapshots::VolumeSnapshot>| {
        snapshot.namespace().as_deref() == Some(namespace)
            && snapshot.spec.source.persistent_volume_claim_name.as_deref() == Some(name)
    };
    let mut kids: Vec<Value> = state
        .snapshots
        .iter()
        .filter(of)
        .map(|snapshot| {
            let status = snapshot.status.clone().unwrap_or_default();
            let chip = if status.error.is_some() {
                ("bad", "Failed")
            } else if status.ready_to_use == Some(true) {
                ("ok", "Ready")
            } else {
                ("busy", "Being taken")
            };
            let size = status.restore_size.map(|size| size.0).unwrap_or_default();
            json!({ "kind": "snapshot", "name": snapshot.name_any(), "state": chip, "size": size, "kids": below(("snapshot", snapshot.name_any())) })
        })
        .collect();
    kids.extend(below(("claim", name.to_owned())));
    let size =
        state.volumes.named(volume_name(claim)).map_or_else(|| requested(claim), |volume| capacity(volume));
    Some(json!({
        "kind": "claim",
        "name": name,
        "id": format!("{namespace}/{name}"),
        "state": if phase == "Bound" { json!(null) } else { json!(("wait", phase)) },
        "size": gib(size),
        "cls": class_of_claim(claim),
        "kids": kids,
    }))
}

/// What else is known to be wrong with the parts, besides the verdict.
fn others(findings: &[Finding], row: &Row, state: &ClusterState) -> Vec<Value> {
    let verdict = row.trouble.as_ref().map(|verdict| verdict.code);
    let about = |finding: &&Finding| super::rows::concerned(finding, state).contains(&row.id);
    findings
        .iter()
        .filter(about)
        .filter(|finding| Some(finding.trouble.code()) != verdict)
        .map(|finding| json!({ "state": words::state(finding.severity), "why": words::sentence(&finding.cause), "todo": words::sentence(&finding.what_to_do) }))
        .collect()
}
