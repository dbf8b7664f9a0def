//! The volumes of a cluster, one row each: every claim, and every volume that belongs to none.

use std::collections::{HashMap, HashSet};

use berth_kube::Key;
use berth_kube::storage::{
    capacity, claim_of_volume, class_of_claim, class_of_volume, csi_source, node_of_pod, requested,
    volume_name,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;
use serde::Serialize;

use crate::diagnose::Observed;
use crate::finding::{Finding, Trouble};
use crate::state::{ClusterState, time_of};
use crate::words;

/// One row of the table of volumes.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Row {
    /// `namespace/name` of the claim, or `/name` of a volume without one.
    pub(crate) id: String,
    pub(crate) ns: String,
    pub(crate) claim: String,
    pub(crate) pv: String,
    pub(crate) pod: String,
    pub(crate) pods: usize,
    pub(crate) node: String,
    pub(crate) cls: String,
    pub(crate) driver: String,
    pub(crate) size: i128,
    pub(crate) used: Option<u64>,
    pub(crate) cap: Option<u64>,
    #[serde(rename = "inodesUsed")]
    pub(crate) inodes_used: Option<u64>,
    pub(crate) inodes: Option<u64>,
    pub(crate) phase: String,
    /// When it was made, in milliseconds.
    pub(crate) created: i64,
    pub(crate) mode: String,
    pub(crate) reclaim: String,
    /// A shape and a word.
    pub(crate) state: (&'static str, String),
    /// How bad it is among the others; smaller is worse.
    pub(crate) rank: usize,
    pub(crate) trouble: Option<Verdict>,
    /// What it waits for, without being stuck, or why nobody uses it.
    pub(crate) wait: Option<String>,
    pub(crate) unused: bool,
}

/// What is wrong, in the words of the diagnosis.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Verdict {
    pub(crate) state: &'static str,
    pub(crate) word: String,
    pub(crate) code: &'static str,
    pub(crate) why: String,
    pub(crate) todo: String,
    pub(crate) cmd: Vec<String>,
    pub(crate) evidence: String,
    /// Since when, in milliseconds; 0 if nobody knows.
    pub(crate) since: i64,
}

impl Verdict {
    pub(crate) fn of(finding: &Finding, state: &ClusterState) -> Self {
        let full = || {
            let key = Key::new(finding.object.namespace.clone(), finding.object.name.clone());
            let usage = state.usage.get(&key).copied().unwrap_or_default();
            let part = |used: u64, all: u64| (used * 100).checked_div(all).unwrap_or(0);
            let (bytes, inodes) = (part(usage.used, usage.capacity), part(usage.inodes_used, usage.inodes));
            if inodes > bytes { format!("Inodes {inodes} %") } else { format!("{bytes} % full") }
        };
        let word = if finding.trouble == Trouble::VolumeFull {
            full()
        } else {
            words::word(finding.trouble).to_owned()
        };
        Self {
            state: words::state(finding.severity),
            word,
            code: finding.trouble.code(),
            why: words::sentence(&finding.cause),
            todo: words::sentence(&finding.what_to_do),
            cmd: finding.command.iter().cloned().collect(),
            evidence: finding.evidence.iter().map(|fact| words::sentence(fact)).collect::<Vec<_>>().join(" "),
            since: since(finding, state),
        }
    }
}

/// Since when an object has been going, failing or there.
fn begun<K: kube::ResourceExt>(object: Option<&std::sync::Arc<K>>, state: &ClusterState) -> i64 {
    let Some(object) = object else { return 0 };
    let going = object.meta().deletion_timestamp.as_ref();
    let failure =
        state.events.about(object.as_ref()).iter().find(|event| event.type_.as_deref() == Some("Warning"));
    let failure =
        failure.map(|event| event.first_timestamp.as_ref().map_or_else(|| time_of(event), |time| time.0));
    let made = object.meta().creation_timestamp.as_ref();
    going
        .map(|time| time.0)
        .or(failure)
        .or(made.map(|time| time.0))
        .map_or(0, jiff::Timestamp::as_millisecond)
}

/// Since when a finding holds, as far as objects and events tell.
fn since(finding: &Finding, state: &ClusterState) -> i64 {
    let key = Key::new(finding.object.namespace.clone(), finding.object.name.clone());
    match finding.object.kind.as_str() {
        "PersistentVolumeClaim" => begun(state.claims.get(&key), state),
        "PersistentVolume" => begun(state.volumes.get(&key), state),
        "Pod" => begun(state.pods.get(&key), state),
        "VolumeAttachment" => begun(state.attachments.get(&key), state),
        "VolumeSnapshot" => begun(state.snapshots.get(&key), state),
        "VolumeSnapshotContent" => begun(state.contents.get(&key), state),
        "Node" => begun(state.nodes.get(&key), state),
        _ => 0,
    }
}

/// The rows, and for each finding the claims that it is about.
pub(crate) struct Table {
    pub(crate) rows: Vec<Row>,
    /// By finding: the ids of the rows whose verdict it is.
    pub(crate) judged: HashMap<usize, Vec<String>>,
}

/// All rows with their verdicts.
pub(crate) fn table(observed: &Observed<'_>, findings: &[Finding]) -> Table {
    let state = observed.state;
    let mut worst: HashMap<String, usize> = HashMap::new();
    for (number, finding) in findings.iter().enumerate() {
        for id in concerned(finding, state) {
            worst.entry(id).or_insert(number);
        }
    }
    let mut judged: HashMap<usize, Vec<String>> = HashMap::new();
    let mut rows: Vec<Row> = state.claims.iter().map(|claim| of_claim(observed, claim)).collect();
    rows.extend(state.volumes.iter().filter_map(|volume| of_volume(state, volume)));
    for row in &mut rows {
        if let Some(number) = worst.get(&row.id) {
            let finding = &findings[*number];
            judged.entry(*number).or_default().push(row.id.clone());
            row.rank = *number;
            if finding.severity.needs_a_person() {
                let verdict = Verdict::of(finding, state);
                row.state = (verdict.state, verdict.word.clone());
                row.trouble = Some(verdict);
                row.wait = None;
                continue;
            }
            row.wait = Some(words::sentence(&finding.cause));
        }
        row.state = quiet(row);
    }
    Table { rows, judged }
}

/// The shape and word of a row that nobody has to look at.
fn quiet(row: &Row) -> (&'static str, String) {
    let (shape, word) = match row.phase.as_str() {
        "Pending" if row.wait.is_some() => ("wait", "Waits for a pod"),
        "Pending" => ("busy", "Being made"),
        "Terminating" => ("busy", "Being deleted"),
        "Released" => ("off", "Released"),
        "Available" => ("off", "Available"),
        "Failed" => ("warn", "Failed"),
        _ if row.unused => ("off", "Unused"),
        _ => ("ok", "Healthy"),
    };
    (shape, word.to_owned())
}

/// The rows that a finding is about.
pub(crate) fn concerned(finding: &Finding, state: &ClusterState) -> Vec<String> {
    let key = Key::new(finding.object.namespace.clone(), finding.object.name.clone());
    let of_volume = |name: &str| {
        let volume = state.volumes.named(name)?;
        let claim = claim_of_volume(volume).filter(|claim| state.claims.get(claim).is_some());
        Some(claim.map_or_else(|| format!("/{name}"), |claim| claim.to_string()))
    };
    match finding.object.kind.as_str() {
        "PersistentVolumeClaim" => vec![key.to_string()],
        "PersistentVolume" => of_volume(&key.name).into_iter().collect(),
        "VolumeAttachment" => {
            let attachment = state.attachments.get(&key);
            let volume = attachment.and_then(|found| found.spec.source.persistent_volume_name.as_deref());
            volume.and_then(of_volume).into_iter().collect()
        }
        "Pod" => {
            let claims = state.pods.get(&key).map(|pod| berth_kube::storage::claims_of_pod(pod));
            let claims: Vec<Key> = claims.into_iter().flatten().map(|used| used.key).collect();
            let text = format!("{} {}", finding.cause, finding.evidence.join(" "));
            // One of several volumes of a pod may be the one that the message names.
            let named = |claim: &&Key| {
                let volume =
                    state.claims.get(claim).map(|found| volume_name(found).to_owned()).unwrap_or_default();
                !volume.is_empty() && text.contains(&volume)
            };
            let chosen: Vec<String> = claims.iter().filter(named).map(ToString::to_string).collect();
            if chosen.is_empty() { claims.iter().map(ToString::to_string).collect() } else { chosen }
        }
        _ => Vec::new(),
    }
}

/// One thing that needs a person: a finding that is somebody's verdict, or about no volume at all.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Attention {
    #[serde(flatten)]
    pub(crate) verdict: Verdict,
    /// What it is about: the id of a row, or an object.
    pub(crate) name: String,
    /// The row that it is about, if it is about one.
    pub(crate) id: Option<String>,
    /// The view of the page that shows the object.
    pub(crate) to: &'static str,
}

/// What needs a person, the worst first.
pub(crate) fn attention(state: &ClusterState, findings: &[Finding], table: &Table) -> Vec<Attention> {
    let told: HashSet<&String> = table.judged.values().flatten().collect();
    let entry = |(number, finding): (usize, &Finding)| {
        let judged = table.judged.get(&number);
        if judged.is_none() {
            // What is wrong with a volume in a second way is told on its own page.
            let ids = concerned(finding, state);
            if !ids.is_empty() && ids.iter().all(|id| told.contains(id)) {
                return None;
            }
        }
        let one = judged.filter(|ids| ids.len() == 1).and_then(|ids| ids.first());
        Some(Attention {
            verdict: Verdict::of(finding, state),
            name: one.cloned().unwrap_or_else(|| finding.object.to_string()),
            id: judged.and_then(|ids| ids.first()).cloned(),
            to: match finding.object.kind.as_str() {
                "Node" | "CSINode" | "CSIDriver" | "CSIStorageCapacity" | "StorageClass" => "nodes",
                _ => "leaks",
            },
        })
    };
    let needing = findings.iter().enumerate().filter(|(_, finding)| finding.severity.needs_a_person());
    needing.filter_map(entry).collect()
}

/// The pod that is shown for a claim: one that is on a node, before one that waits.
pub(crate) fn shown_pod<'a>(pods: &[&'a Pod]) -> Option<&'a Pod> {
    pods.iter().copied().min_by_key(|pod| (node_of_pod(pod).is_empty(), pod.name_any()))
}

fn of_claim(observed: &Observed<'_>, claim: &PersistentVolumeClaim) -> Row {
    let state = observed.state;
    let key = Key::of(claim);
    let volume = state.volumes.named(volume_name(claim));
    let pods = observed.users_of(&key);
    let pod = shown_pod(pods);
    let usage = state.usage.get(&key);
    let phase =
        claim.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_else(|| "Pending".into());
    let going = claim.metadata.deletion_timestamp.is_some();
    let class = state.classes.named(class_of_claim(claim));
    let waits = class.and_then(|class| class.volume_binding_mode.as_deref()) == Some("WaitForFirstConsumer");
    let attached = volume.and_then(|volume| {
        let attachments = observed.attachments_of(volume.metadata.name.as_deref().unwrap_or_default());
        attachments.first().map(|attachment| attachment.spec.node_name.clone())
    });
    let wait = (phase == "Pending" && waits && pods.is_empty()).then(|| {
        format!(
            "The class {} waits for the first pod that uses the claim: that decides where the volume is made.",
            class_of_claim(claim)
        )
    });
    let node = pod.map(node_of_pod).filter(|node| !node.is_empty()).map(str::to_owned).or(attached);
    let driver = volume.and_then(|volume| csi_source(volume)).map(|csi| csi.driver.clone());
    Row {
        id: key.to_string(),
        ns: key.namespace,
        claim: key.name,
        pv: volume_name(claim).to_owned(),
        pod: pod.map(kube::ResourceExt::name_any).unwrap_or_default(),
        pods: pods.len(),
        node: node.unwrap_or_default(),
        cls: class_of_claim(claim).to_owned(),
        driver: driver.or_else(|| class.map(|class| class.provisioner.clone())).unwrap_or_default(),
        size: volume.map_or_else(|| requested(claim), |volume| capacity(volume)),
        used: usage.map(|usage| usage.used),
        cap: usage.map(|usage| usage.capacity),
        inodes_used: usage.filter(|usage| usage.inodes > 0).map(|usage| usage.inodes_used),
        inodes: usage.filter(|usage| usage.inodes > 0).map(|usage| usage.inodes),
        unused: phase == "Bound" && pods.is_empty() && state.pods.are_known(),
        phase: if going { "Terminating".to_owned() } else { phase },
        created: made(claim),
        mode: claim
            .spec
            .as_ref()
            .and_then(|spec| spec.access_modes.as_ref())
            .map_or_else(String::new, |modes| modes.join(", ")),
        reclaim: reclaim(
            volume.map(|volume| &**volume),
            class.and_then(|class| class.reclaim_policy.clone()),
        ),
        rank: usize::MAX,
        wait,
        ..Row::default()
    }
}

/// A volume that no claim stands for.
fn of_volume(state: &ClusterState, volume: &PersistentVolume) -> Option<Row> {
    let claim = claim_of_volume(volume);
    if !state.claims.are_known() || claim.as_ref().is_some_and(|claim| state.claims.get(claim).is_some()) {
        return None;
    }
    let phase = volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    let off = match (phase.as_str(), reclaim(Some(volume), None).as_str()) {
        ("Released", "Retain") => Some(
            "The claim is gone and the policy is Retain: the data is kept, and no other claim gets it."
                .to_owned(),
        ),
        ("Available", _) => Some("No claim is bound to the volume.".to_owned()),
        _ => None,
    };
    Some(Row {
        id: format!("/{}", volume.name_any()),
        claim: volume.name_any(),
        pv: volume.name_any(),
        cls: class_of_volume(volume).to_owned(),
        driver: csi_source(volume).map(|csi| csi.driver.clone()).unwrap_or_default(),
        size: capacity(volume),
        phase: if volume.metadata.deletion_timestamp.is_some() { "Terminating".to_owned() } else { phase },
        created: made(volume),
        mode: volume
            .spec
            .as_ref()
            .and_then(|spec| spec.access_modes.as_ref())
            .map_or_else(String::new, |modes| modes.join(", ")),
        reclaim: reclaim(Some(volume), None),
        rank: usize::MAX,
        wait: off,
        ..Row::default()
    })
}

fn made(object: &impl kube::ResourceExt) -> i64 {
    object.meta().creation_timestamp.as_ref().map_or(0, |time| time.0.as_millisecond())
}

fn reclaim(volume: Option<&PersistentVolume>, of_class: Option<String>) -> String {
    let of_volume = volume.and_then(|volume| volume.spec.as_ref()?.persistent_volume_reclaim_policy.clone());
    of_volume.or(of_class).unwrap_or_else(|| "Delete".to_owned())
}
