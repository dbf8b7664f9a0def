//! What changed in the objects of a volume's way, and who must have written it: noted as it happens, for the flow.

use std::collections::VecDeque;
use std::sync::Arc;

use berth_core::names::SELECTED_NODE;
use berth_kube::storage::{
    capacity, claim_of_volume, claims_of_pod, class_of_claim, csi_source, node_of_pod, phase_of_pod,
    requested, volume_name,
};
use berth_kube::{Cluster, Key, Kind};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use parking_lot::Mutex;

use crate::state::Unreadable;
use crate::watched::may_read;
use crate::words::gib;

/// How many changes are remembered.
const REMEMBERED: usize = 4096;

/// One change of one object.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(super) time: Timestamp,
    /// The claims that it has to do with.
    pub(super) claims: Vec<Key>,
    /// The volume that it has to do with, where no claim is named.
    pub(super) volume: String,
    /// Who wrote it, by the lane of the flow.
    pub(super) who: &'static str,
    /// The label of what travels in the picture.
    pub(super) token: String,
    pub(super) what: String,
    pub(super) say: String,
    pub(super) diff: Vec<String>,
    /// The object that it changes in the picture, its shape and its word.
    pub(super) set: Option<(&'static str, &'static str, String)>,
    pub(super) bad: bool,
    /// Whether the claim comes into being with it.
    pub(super) begins: bool,
}

/// The last changes, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    all: VecDeque<Change>,
    /// Counts what was ever noted.
    noted: u64,
}

impl Changes {
    pub(crate) fn note(&mut self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            self.noted += 1;
            self.all.push_back(change);
            if self.all.len() > REMEMBERED {
                self.all.pop_front();
            }
        }
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Change> {
        self.all.iter()
    }

    /// Those about a claim or its volume.
    pub(super) fn about(&self, claim: &Key, volume: &str) -> Vec<Change> {
        let is = |change: &&Change| {
            change.claims.contains(claim) || (!volume.is_empty() && change.volume == volume)
        };
        self.all.iter().filter(is).cloned().collect()
    }
}

/// Notes what happens to claims, volumes, attachments and pods from now on, as far as these may be read.
pub(super) fn note_changes(cluster: &Cluster, unreadable: &[Unreadable], noted: &Arc<Mutex<Changes>>) {
    note(cluster, unreadable, noted, of_claim);
    note(cluster, unreadable, noted, of_volume);
    note(cluster, unreadable, noted, of_attachment);
    note(cluster, unreadable, noted, of_pod);
}

fn note<K: Kind>(
    cluster: &Cluster,
    unreadable: &[Unreadable],
    noted: &Arc<Mutex<Changes>>,
    of: fn(Timestamp, Option<&K>, Option<&K>) -> Vec<Change>,
) {
    if !may_read::<K>(unreadable) {
        return;
    }
    let cache = cluster.cache::<K>();
    let noted = noted.clone();
    cache.subscribe(move |before, after| {
        let now = Timestamp::now();
        if is_news(now, before, after) {
            noted.lock().note(of(now, before.map(|object| &**object), after.map(|object| &**object)));
        }
    });
}

fn change(
    time: Timestamp,
    who: &'static str,
    token: impl Into<String>,
    what: impl Into<String>,
    say: impl Into<String>,
) -> Change {
    Change {
        time,
        claims: Vec::new(),
        volume: String::new(),
        who,
        token: token.into(),
        what: what.into(),
        say: say.into(),
        diff: Vec::new(),
        set: None,
        bad: false,
        begins: false,
    }
}

impl Change {
    fn of(mut self, claims: impl IntoIterator<Item = Key>) -> Self {
        self.claims.extend(claims);
        self
    }

    fn sets(mut self, object: &'static str, shape: &'static str, word: impl Into<String>) -> Self {
        self.set = Some((object, shape, word.into()));
        self
    }

    fn diff(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.diff.extend(lines);
        self
    }
}

fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn claim_made(now: Timestamp, claim: &PersistentVolumeClaim) -> Change {
    let name = claim.name_any();
    let class = class_of_claim(claim);
    let created = change(
        now,
        "kubectl",
        format!("PVC {name}"),
        "creates the claim",
        format!("The claim {name} asks for {} of the class {class}.", gib(requested(claim))),
    );
    let created = created.of([Key::of(claim)]).sets("pvc", "wait", "Pending").diff([
        "+kind: PersistentVolumeClaim".to_owned(),
        format!("+  storageClassName: {class}"),
        format!("+  storage: {}", gib(requested(claim))),
    ]);
    Change { begins: true, ..created }
}

/// What a new revision of a claim tells.
pub(crate) fn of_claim(
    now: Timestamp,
    before: Option<&PersistentVolumeClaim>,
    after: Option<&PersistentVolumeClaim>,
) -> Vec<Change> {
    let Some(claim) = after else {
        let Some(claim) = before else { return Vec::new() };
        let gone = change(
            now,
            "pv-controller",
            "gone",
            "the claim is gone",
            "Nothing keeps the claim any more, and it is gone.",
        );
        return vec![gone.of([Key::of(claim)]).sets("pvc", "off", "gone")];
    };
    let (key, name) = (Key::of(claim), claim.name_any());
    let mut all = Vec::new();
    if before.is_none() {
        all.push(claim_made(now, claim));
    }
    let node = |claim: &PersistentVolumeClaim| claim.annotations().get(SELECTED_NODE).cloned();
    if let Some(chosen) = node(claim)
        && before.and_then(node).as_ref() != Some(&chosen)
    {
        let picked = change(
            now,
            "scheduler",
            "selected-node",
            format!("picks {chosen}"),
            format!("The scheduler has chosen {chosen} for the pod, and writes its choice on the claim."),
        );
        all.push(
            picked
                .of([key.clone()])
                .diff([" metadata.annotations:".to_owned(), format!("+  {SELECTED_NODE}: {chosen}")]),
        );
    }
    if phase(claim) == "Bound" && before.map(phase) != Some("Bound") {
        let bound = change(
            now,
            "pv-controller",
            "bind",
            "binds claim and volume",
            "The PV controller has bound claim and volume to each other.",
        );
        all.push(bound.of([key.clone()]).sets("pvc", "ok", "Bound").diff([
            " kind: PersistentVolumeClaim".to_owned(),
            format!("+  volumeName: {}", volume_name(claim)),
            "+  status.phase: Bound".to_owned(),
        ]));
    }
    if let Some(before) = before
        && requested(claim) > requested(before)
    {
        let size = gib(requested(claim));
        let grown = change(
            now,
            "kubectl",
            format!("PVC {name}"),
            format!("asks for {size}"),
            format!("The claim asks for {size} now; the resizer takes that up."),
        );
        all.push(grown.of([key.clone()]).sets("pvc", "busy", "grows").diff([
            " kind: PersistentVolumeClaim".to_owned(),
            format!("-  storage: {}", gib(requested(before))),
            format!("+  storage: {size}"),
        ]));
    }
    if claim.metadata.deletion_timestamp.is_some()
        && before.is_none_or(|before| before.metadata.deletion_timestamp.is_none())
    {
        let going = change(
            now,
            "kubectl",
            "delete",
            "deletes the claim",
            "The claim is being deleted. It stays until no pod uses it.",
        );
        all.push(going.of([key]).sets("pvc", "busy", "Terminating"));
    }
    all
}

/// What a new revision of a volume tells.
pub(crate) fn of_volume(
    now: Timestamp,
    before: Option<&PersistentVolume>,
    after: Option<&PersistentVolume>,
) -> Vec<Change> {
    let about = |mut change: Change, volume: &PersistentVolume| {
        change.volume = volume.name_any();
        change.of(claim_of_volume(volume))
    };
    let Some(volume) = after else {
        let Some(volume) = before else { return Vec::new() };
        let gone =
            change(now, "provisioner", "gone", "the volume is gone", "The volume and its object are gone.");
        return vec![about(gone, volume).sets("pv", "off", "gone")];
    };
    let phase = |volume: &PersistentVolume| {
        volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default()
    };
    let mut all = Vec::new();
    if before.is_none() {
        let driver = csi_source(volume).map(|csi| csi.driver.clone()).unwrap_or_default();
        let made = change(
            now,
            "provisioner",
            "PV",
            "creates the PV",
            "The provisioner records the new volume as a PersistentVolume for this claim.",
        );
        all.push(about(made, volume).sets("pv", "wait", "Available").diff([
            "+kind: PersistentVolume".to_owned(),
            format!(
                "+  claimRef: {}",
                claim_of_volume(volume).map(|claim| claim.to_string()).unwrap_or_default()
            ),
            format!("+  csi.driver: {driver}"),
            format!("+  storage: {}", gib(capacity(volume))),
        ]));
    }
    let (was, is) = (before.map(phase).unwrap_or_default(), phase(volume));
    if is != was && is == "Bound" {
        all.push(
            about(
                change(
                    now,
                    "pv-controller",
                    "Bound",
                    "marks the volume bound",
                    "The volume belongs to the claim.",
                ),
                volume,
            )
            .sets("pv", "ok", "Bound"),
        );
    } else if is != was && is == "Released" {
        all.push(
            about(
                change(
                    now,
                    "pv-controller",
                    "Released",
                    "releases the volume",
                    "The claim is gone. What becomes of the volume is up to its policy.",
                ),
                volume,
            )
            .sets("pv", "off", "Released"),
        );
    }
    all
}

/// What a new revision of an attachment tells.
pub(crate) fn of_attachment(
    now: Timestamp,
    before: Option<&VolumeAttachment>,
    after: Option<&VolumeAttachment>,
) -> Vec<Change> {
    let about = |mut change: Change, attachment: &VolumeAttachment| {
        change.volume = attachment.spec.source.persistent_volume_name.clone().unwrap_or_default();
        change
    };
    let Some(attachment) = after else {
        let Some(attachment) = before else { return Vec::new() };
        return vec![
            about(
                change(now, "attacher", "gone", "the attachment is gone", "The volume is detached."),
                attachment,
            )
            .sets("va", "off", "detached"),
        ];
    };
    let node = &attachment.spec.node_name;
    let status = |attachment: &VolumeAttachment| attachment.status.clone().unwrap_or_default();
    let mut all = Vec::new();
    if before.is_none() {
        let wanted = change(
            now,
            "attach-detach",
            "VolumeAttachment",
            "wants it attached",
            format!("The attach-detach controller asks for the volume on {node}."),
        );
        all.push(about(wanted, attachment).sets("va", "wait", "wanted").diff([
            "+kind: VolumeAttachment".to_owned(),
            format!("+  nodeName: {node}"),
            "+  attached: false".to_owned(),
        ]));
    }
    if status(attachment).attached && !before.is_some_and(|before| status(before).attached) {
        let done = change(
            now,
            "attacher",
            "attached",
            "reports it attached",
            format!("The attacher reports that {node} can reach the volume."),
        );
        all.push(about(done, attachment).sets("va", "ok", "attached").diff([
            " kind: VolumeAttachment".to_owned(),
            "-  attached: false".to_owned(),
            "+  attached: true".to_owned(),
        ]));
    }
    let message = |attachment: &VolumeAttachment| {
        status(attachment).attach_error.and_then(|error| error.message).unwrap_or_default()
    };
    let error = message(attachment);
    if !error.is_empty() && before.is_none_or(|before| message(before) != error) {
        let failed = change(
            now,
            "attacher",
            "attachError",
            "reports the error",
            "The attacher writes the error down, and tries again.",
        );
        let failed = about(failed, attachment)
            .sets("va", "bad", "error")
            .diff([" kind: VolumeAttachment".to_owned(), format!("+  attachError: {error}")]);
        all.push(Change { bad: true, ..failed });
    }
    all
}

/// What a new revision of a pod tells.
pub(crate) fn of_pod(now: Timestamp, before: Option<&Pod>, after: Option<&Pod>) -> Vec<Change> {
    let claims = |pod: &Pod| claims_of_pod(pod).into_iter().map(|used| used.key).collect::<Vec<_>>();
    let Some(pod) = after else {
        let Some(pod) = before.filter(|pod| !claims(pod).is_empty()) else { return Vec::new() };
        return vec![
            change(now, "node", "gone", "the pod is gone", "The pod has ended, and its object is gone.")
                .of(claims(pod))
                .sets("pod", "off", "gone"),
        ];
    };
    if claims(pod).is_empty() {
        return Vec::new();
    }
    let name = pod.name_any();
    let mut all = Vec::new();
    if before.is_none() {
        let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
        let what = owner
            .map_or_else(|| "creates the pod".to_owned(), |owner| format!("{} creates the pod", owner.kind));
        let made = change(
            now,
            "kubectl",
            format!("Pod {name}"),
            what,
            "A pod that uses the claim is there. The scheduler looks for a node for both.",
        );
        all.push(made.of(claims(pod)).sets("pod", "wait", "Pending").diff([
            "+kind: Pod".to_owned(),
            format!(
                "+  volumes: {}",
                claims(pod).iter().map(|claim| claim.name.clone()).collect::<Vec<_>>().join(", ")
            ),
        ]));
    }
    let node = node_of_pod(pod);
    if !node.is_empty() && before.is_none_or(|before| node_of_pod(before).is_empty()) {
        let bound =
            change(now, "scheduler", "nodeName", "binds the pod", format!("The pod belongs to {node} now."));
        all.push(
            bound
                .of(claims(pod))
                .sets("pod", "busy", node)
                .diff([" kind: Pod".to_owned(), format!("+  nodeName: {node}")]),
        );
    }
    let refused = |pod: &Pod| {
        let conditions =
            pod.status.as_ref().and_then(|status| status.conditions.as_ref()).into_iter().flatten();
        let mut refused =
            conditions.filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
        refused.next().and_then(|condition| condition.message.clone()).unwrap_or_default()
    };
    let why = refused(pod);
    if !why.is_empty() && before.is_none_or(|before| refused(before) != why) {
        let no = change(
            now,
            "scheduler",
            "Unschedulable",
            "finds no node",
            "The scheduler finds no node for the pod and its volume, and looks again when something changes.",
        );
        let no = no
            .of(claims(pod))
            .sets("pod", "bad", "no node")
            .diff([" kind: Pod".to_owned(), format!("+  PodScheduled: {why}")]);
        all.push(Change { bad: true, ..no });
    }
    let (was, is) = (before.map(phase_of_pod).unwrap_or_default(), phase_of_pod(pod));
    if is != was && matches!(is, "Running" | "Succeeded" | "Failed") {
        all.push(phase_changed(now, is).of(claims(pod)));
    }
    all
}

fn phase_changed(now: Timestamp, is: &str) -> Change {
    let what = if is == "Running" { "starts the container" } else { "sees the pod's end" };
    let say = match is {
        "Running" => "The containers run with the volume mounted.",
        "Succeeded" => "The pod has done its work.",
        _ => "The pod has failed.",
    };
    let shape = match is {
        "Running" => "ok",
        "Failed" => "bad",
        _ => "off",
    };
    let phase = change(now, "node", is, what, say).sets("pod", shape, is);
    let phase = phase.diff([" kind: Pod".to_owned(), format!("+  status.phase: {is}")]);
    Change { bad: is == "Failed", ..phase }
}

/// Whether an object is reported because it is new, and not because it is seen for the first time.
pub(crate) fn is_news<K: kube::ResourceExt>(
    now: Timestamp,
    before: Option<&Arc<K>>,
    after: Option<&Arc<K>>,
) -> bool {
    let made =
        after.filter(|_| before.is_none()).and_then(|object| object.meta().creation_timestamp.as_ref());
    made.is_none_or(|made| now.as_second() - made.0.as_second() < 10)
}
