//! Rules that one call is judged by: its request, its answer, and the mounts before and after it.
//!
//! [`judge`] gives every rule that applies to a call, each kept or broken. `berth certify` judges all calls it makes by them,
//! and whoever stands between a caller and a driver can judge calls that others make. Nothing here calls the driver.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use berth_csi::v1::{self, volume_capability::AccessType};
use berth_host::mount::MountInfo;
use prost::Message;
use serde::Serialize;
use tonic::{Code, Status};

/// How binding a rule is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// A driver that breaks it does not conform to CSI, or loses data.
    Must,
    /// Orchestrators expect it, and the specification recommends it.
    Should,
    /// Worth knowing, and no fault.
    Info,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Must => "MUST",
            Self::Should => "SHOULD",
            Self::Info => "INFO",
        })
    }
}

/// What a driver has to do, and what to do if it does not.
#[derive(Debug, Clone, Serialize)]
pub struct Rule {
    /// Its name, as in `call.published`.
    pub id: &'static str,
    /// How binding it is.
    pub level: Level,
    /// The section of the specification that says so.
    pub section: Cow<'static, str>,
    /// The rule in our words.
    pub rule: Cow<'static, str>,
    /// What to do in a driver that breaks it.
    pub advice: Cow<'static, str>,
}

/// A call as it was observed.
#[derive(Debug, Clone, Copy)]
pub struct ObservedCall<'a> {
    /// The path of the method, as in `/csi.v1.Node/NodePublishVolume`.
    pub method: &'a str,
    /// The encoded request, without the frame of gRPC.
    pub request: &'a [u8],
    /// The encoded answer, or the status of a failed call.
    pub answer: Result<&'a [u8], &'a Status>,
    /// The mounts of the driver's namespace before and after the call; `None` if they are not known.
    pub mounts: Option<(&'a [MountInfo], &'a [MountInfo])>,
    /// Where the driver's root directory can be seen, such as `/proc/PID/root`; `None` if it cannot.
    pub root: Option<&'a Path>,
}

/// A rule that applied to a call, and how the call broke it.
#[derive(Debug, Clone)]
pub struct Judgement {
    /// The rule, one of [`RULES`].
    pub rule: &'static Rule,
    /// What was found instead; `None` if the rule was kept.
    pub broken: Option<String>,
}

const fn rule(
    id: &'static str,
    level: Level,
    section: &'static str,
    rule: &'static str,
    advice: &'static str,
) -> Rule {
    Rule {
        id,
        level,
        section: Cow::Borrowed(section),
        rule: Cow::Borrowed(rule),
        advice: Cow::Borrowed(advice),
    }
}

macro_rules! rules {
    ($($name:ident = ($id:literal, $level:ident, $section:literal, $rule:literal, $advice:literal);)*) => {
        $(pub(crate) static $name: Rule = rule($id, Level::$level, $section, $rule, $advice);)*
        /// Every rule for one call.
        pub static RULES: &[&Rule] = &[$(&$name),*];
    };
}

rules! {
    ANSWERS = ("call.answers", Must, "Error Scheme",
        "Every call is answered, within the time that its caller waits.",
        "Find out what the call waits for; answer DEADLINE_EXCEEDED or ABORTED while the work goes on, and do not crash.");
    MESSAGE = ("call.message", Must, "Error Scheme",
        "A call that fails says why, in a message for people.",
        "Put a sentence into the status: what was asked for, and what is wrong with it.");
    DETAILS = ("call.details", Must, "Error Scheme",
        "The details of a status are empty; the specification keeps them for later.",
        "Return the code and the message alone.");
    CODE = ("call.code", Should, "Error Scheme",
        "A call that fails has a code that says what to do next, and not UNKNOWN.",
        "Give every error of the storage system its code; Go's plain errors become UNKNOWN.");
    SECRET_IN_ERROR = ("call.secret-in-error", Must, "Secrets Requirements",
        "No secret of a request appears in the message of an error.",
        "Do not print whole requests or command lines into errors.");
    SECRET_IN_ANSWER = ("call.secret-in-answer", Must, "Secrets Requirements",
        "No secret of a request appears in an answer: contexts are stored in objects that many may read.",
        "Leave secrets out of volume_context and publish_context; they come with every call that may need them.");
    LIMITS = ("call.limits", Must, "Size Limits",
        "A string of an answer has at most 128 bytes (a node's id 256), a map of strings at most 4 KiB.",
        "Shorten ids, and keep large things out of contexts.");
    VOLUME_ID = ("call.volume-id", Must, "CreateVolume",
        "CreateVolume answers with the volume and its id.",
        "Set volume.volume_id in every successful answer.");
    CAPACITY = ("call.capacity", Must, "CreateVolume",
        "The capacity of a new volume is 0 (unknown) or within the range that was asked for.",
        "Round up to what the storage system can do, and answer OUT_OF_RANGE if that exceeds limit_bytes.");
    CONTENT_SOURCE = ("call.content-source", Must, "CreateVolume",
        "A volume made from a source says so: content_source is the source that was asked for.",
        "Copy volume_content_source of the request into the answer, also when the volume existed already.");
    SNAPSHOT = ("call.snapshot", Must, "CreateSnapshot",
        "CreateSnapshot answers with an id, the source's id and the time of the snapshot.",
        "Set snapshot_id, source_volume_id and creation_time in every successful answer.");
    EXPANDED = ("call.expanded", Must, "ControllerExpandVolume",
        "The capacity after an expansion is within the range that was asked for.",
        "Answer with the new size, or fail; capacity_bytes is what the orchestrator records.");
    PUBLISHED = ("call.published", Must, "NodePublishVolume",
        "After NodePublishVolume something is mounted at target_path (for a device: the device is there).",
        "Mount or bind the volume at target_path before answering OK.");
    PUBLISHED_ONCE = ("call.published-once", Must, "NodePublishVolume",
        "One mount is made at target_path, also if the call is repeated.",
        "Look whether the volume is mounted at target_path already, and answer OK without mounting again.");
    READ_ONLY = ("call.read-only", Must, "NodePublishVolume",
        "With readonly the mount at target_path is read-only.",
        "Set the read-only attribute of the mount; a bind mount needs a second step for it.");
    PUBLISH_FAILED = ("call.publish-failed", Should, "NodePublishVolume",
        "A NodePublishVolume that fails for good leaves no new mount at target_path.",
        "Undo the mount before answering with an error that nobody repeats the call after.");
    UNPUBLISHED = ("call.unpublished", Must, "NodeUnpublishVolume",
        "After NodeUnpublishVolume nothing is mounted at target_path.",
        "Unmount, as often as something is mounted there, before answering OK.");
    TARGET_REMOVED = ("call.target-removed", Must, "NodeUnpublishVolume",
        "After NodeUnpublishVolume the file or directory at target_path is gone.",
        "Remove what NodePublishVolume created at target_path.");
    STAGED_KEPT = ("call.staged-kept", Must, "NodeUnpublishVolume",
        "NodeUnpublishVolume of one target leaves the volume's staging and other targets mounted.",
        "Undo only the mount at target_path.");
    UNSTAGED = ("call.unstaged", Must, "NodeUnstageVolume",
        "After NodeUnstageVolume nothing is mounted at staging_target_path.",
        "Unmount, and detach loop devices, before answering OK.");
    STAGING_KEPT = ("call.staging-path-kept", Info, "NodeUnstageVolume",
        "NodeUnstageVolume leaves the directory staging_target_path, which the orchestrator made.",
        "Remove only what the driver itself made below it.");
    USAGE = ("call.usage", Must, "NodeGetVolumeStats",
        "Statistics have units, no value is negative, and what is used is at most the total.",
        "Answer with statfs of the volume; leave out what is not known.");
    ENTRIES = ("call.entries", Must, "ListVolumes, ListSnapshots",
        "A page of a list has at most max_entries entries, each with an id, and no id twice.",
        "Cut the page at max_entries and set next_token to what follows.");
    NODE_ID = ("call.node-id", Must, "NodeGetInfo",
        "NodeGetInfo answers with the node's id, and no negative limit of volumes.",
        "Set node_id; max_volumes_per_node is 0 if there is no limit.");
}

/// Judges a call by every rule that applies to it.
///
/// What the transport made of a broken connection is no answer of the driver: do not pass such calls.
pub fn judge(call: &ObservedCall<'_>) -> Vec<Judgement> {
    let mut judged = Vec::new();
    let mut add = |rule: &'static Rule, broken: Option<String>| judged.push(Judgement { rule, broken });
    let method = call.method.rsplit('/').next().unwrap_or_default();
    let secrets = secrets_of(method, call.request);
    match call.answer {
        Err(status) => failed_call(status, &secrets, &mut add),
        Ok(answer) if !secrets.is_empty() => {
            let found = secrets.iter().find(|(_, value)| contains(answer, value.as_bytes()));
            let broken =
                found.map(|(key, _)| format!("the answer of {method} holds the value of the secret {key:?}"));
            add(&SECRET_IN_ANSWER, broken);
        }
        Ok(_) => {}
    }
    match method {
        "CreateVolume" => created(call, &mut add),
        "CreateSnapshot" => snapshot_taken(call, &mut add),
        "ControllerExpandVolume" => expanded(call, &mut add),
        "ListVolumes" | "ListSnapshots" => listed(method, call, &mut add),
        "NodeGetInfo" => node_info(call, &mut add),
        "NodeGetVolumeStats" => usage(call, &mut add),
        "NodePublishVolume" => published(call, &mut add),
        "NodeUnpublishVolume" => unpublished(call, &mut add),
        "NodeUnstageVolume" => unstaged(call, &mut add),
        "ControllerPublishVolume" => {
            if let Ok(answer) = v1::ControllerPublishVolumeResponse::decode(call.answer.unwrap_or_default()) {
                add(&LIMITS, too_large("publish_context", &answer.publish_context));
            }
        }
        _ => {}
    }
    judged
}

type Add<'a> = dyn FnMut(&'static Rule, Option<String>) + 'a;

fn failed_call(status: &Status, secrets: &BTreeMap<String, String>, add: &mut Add<'_>) {
    let (code, message) = (berth_csi::code::grpc_name(status.code()), status.message());
    // Go's library answers unknown methods with a sentence, others with the code alone.
    if status.code() != Code::Unimplemented {
        add(&MESSAGE, message.trim().is_empty().then(|| format!("{code} came without a message")));
    }
    add(&DETAILS, (!status.details().is_empty()).then(|| format!("{code} came with details")));
    add(&CODE, (status.code() == Code::Unknown).then(|| format!("the code is UNKNOWN: {message}")));
    if !secrets.is_empty() {
        let found = secrets.iter().find(|(_, value)| message.contains(value.as_str()));
        add(
            &SECRET_IN_ERROR,
            found.map(|(key, _)| format!("the message of {code} holds the value of the secret {key:?}")),
        );
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    !needle.is_empty() && haystack.windows(needle.len()).any(|window| window == needle)
}

/// The secrets of a request that are long enough to be recognised, by the name of its method, such as `CreateVolume`.
pub fn secrets_of(method: &str, request: &[u8]) -> BTreeMap<String, String> {
    macro_rules! secrets {
        ($($message:ident)*) => {
            match method {
                $(name if concat!(stringify!($message)).strip_suffix("Request") == Some(name) =>
                    v1::$message::decode(request).map(|request| request.secrets).unwrap_or_default(),)*
                _ => BTreeMap::new(),
            }
        };
    }
    let all = secrets!(CreateVolumeRequest DeleteVolumeRequest ControllerPublishVolumeRequest ControllerUnpublishVolumeRequest
        ValidateVolumeCapabilitiesRequest ControllerListVolumeHealthRequest ControllerGetVolumeHealthRequest
        ControllerModifyVolumeRequest CreateSnapshotRequest DeleteSnapshotRequest ListSnapshotsRequest GetSnapshotRequest
        ControllerExpandVolumeRequest NodeStageVolumeRequest NodePublishVolumeRequest NodeGetStorageHealthRequest
        NodeExpandVolumeRequest CreateVolumeGroupSnapshotRequest DeleteVolumeGroupSnapshotRequest
        GetVolumeGroupSnapshotRequest GetMetadataAllocatedRequest GetMetadataDeltaRequest);
    all.into_iter().filter(|(_, value)| value.len() >= 6).collect()
}

fn too_long(field: &str, value: &str, limit: usize) -> Option<String> {
    (value.len() > limit).then(|| format!("{field} has {} bytes; {limit} are allowed", value.len()))
}

fn too_large(field: &str, map: &BTreeMap<String, String>) -> Option<String> {
    let size: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    (size > 4096).then(|| format!("{field} has {size} bytes; 4096 are allowed"))
}

fn created(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let (Ok(request), Ok(Ok(answer))) =
        (v1::CreateVolumeRequest::decode(call.request), call.answer.map(v1::CreateVolumeResponse::decode))
    else {
        return;
    };
    let volume = answer.volume.unwrap_or_default();
    add(&VOLUME_ID, volume.volume_id.is_empty().then(|| "the answer has no volume_id".to_owned()));
    add(
        &LIMITS,
        too_long("volume_id", &volume.volume_id, 128)
            .or_else(|| too_large("volume_context", &volume.volume_context)),
    );
    let range = request.capacity_range.unwrap_or_default();
    add(&CAPACITY, outside(volume.capacity_bytes, &range).filter(|_| volume.capacity_bytes != 0));
    if request.volume_content_source.is_some() {
        let same = volume.content_source == request.volume_content_source;
        let found = || format!("content_source is {:?}", volume.content_source);
        add(&CONTENT_SOURCE, (!same).then(found));
    }
}

fn outside(bytes: i64, range: &v1::CapacityRange) -> Option<String> {
    if bytes < range.required_bytes {
        return Some(format!("capacity_bytes is {bytes}, less than required_bytes {}", range.required_bytes));
    }
    (range.limit_bytes > 0 && bytes > range.limit_bytes)
        .then(|| format!("capacity_bytes is {bytes}, more than limit_bytes {}", range.limit_bytes))
}

fn snapshot_taken(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let (Ok(request), Ok(Ok(answer))) = (
        v1::CreateSnapshotRequest::decode(call.request),
        call.answer.map(v1::CreateSnapshotResponse::decode),
    ) else {
        return;
    };
    let snapshot = answer.snapshot.unwrap_or_default();
    let broken = if snapshot.snapshot_id.is_empty() {
        Some("the answer has no snapshot_id".to_owned())
    } else if snapshot.source_volume_id != request.source_volume_id {
        Some(format!(
            "source_volume_id is {:?}, asked was {:?}",
            snapshot.source_volume_id, request.source_volume_id
        ))
    } else if snapshot.creation_time.is_none() {
        Some("the answer has no creation_time".to_owned())
    } else {
        None
    };
    add(&SNAPSHOT, broken);
    add(&LIMITS, too_long("snapshot_id", &snapshot.snapshot_id, 128));
}

fn expanded(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    if let (Ok(request), Ok(Ok(answer))) = (
        v1::ControllerExpandVolumeRequest::decode(call.request),
        call.answer.map(v1::ControllerExpandVolumeResponse::decode),
    ) {
        let range = request.capacity_range.unwrap_or_default();
        // A volume that is larger already stays as it is.
        let small = v1::CapacityRange { limit_bytes: 0, ..range };
        add(&EXPANDED, outside(answer.capacity_bytes, &small));
    }
}

fn listed(method: &str, call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let Ok(answer) = call.answer else { return };
    let (limit, ids): (i32, Vec<String>) = if method == "ListVolumes" {
        let (Ok(request), Ok(answer)) =
            (v1::ListVolumesRequest::decode(call.request), v1::ListVolumesResponse::decode(answer))
        else {
            return;
        };
        let ids = answer.entries.into_iter().map(|entry| entry.volume.unwrap_or_default().volume_id);
        (request.max_entries, ids.collect())
    } else {
        let (Ok(request), Ok(answer)) =
            (v1::ListSnapshotsRequest::decode(call.request), v1::ListSnapshotsResponse::decode(answer))
        else {
            return;
        };
        let ids = answer.entries.into_iter().map(|entry| entry.snapshot.unwrap_or_default().snapshot_id);
        (request.max_entries, ids.collect())
    };
    let unique: BTreeSet<&String> = ids.iter().collect();
    let broken = if limit > 0 && usize::try_from(limit).is_ok_and(|limit| ids.len() > limit) {
        Some(format!("{} entries came, at most {limit} were asked for", ids.len()))
    } else if ids.iter().any(String::is_empty) {
        Some("an entry has no id".to_owned())
    } else if unique.len() < ids.len() {
        Some("an id comes twice".to_owned())
    } else {
        None
    };
    add(&ENTRIES, broken);
}

fn node_info(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let Ok(Ok(answer)) = call.answer.map(v1::NodeGetInfoResponse::decode) else { return };
    let broken = if answer.node_id.is_empty() {
        Some("the answer has no node_id".to_owned())
    } else if answer.max_volumes_per_node < 0 {
        Some(format!("max_volumes_per_node is {}", answer.max_volumes_per_node))
    } else {
        None
    };
    add(&NODE_ID, broken);
    add(&LIMITS, too_long("node_id", &answer.node_id, 256));
}

fn usage(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let Ok(Ok(answer)) = call.answer.map(v1::NodeGetVolumeStatsResponse::decode) else { return };
    let broken = answer.usage.iter().find_map(|usage| {
        let unit = usage.unit().as_str_name();
        if usage.unit() == v1::volume_usage::Unit::Unknown {
            Some("an entry has no unit".to_owned())
        } else if usage.available < 0 || usage.total < 0 || usage.used < 0 {
            Some(format!("{unit}: a value is negative: {usage:?}"))
        } else {
            (usage.total > 0 && usage.used > usage.total)
                .then(|| format!("{unit}: {} used of {}", usage.used, usage.total))
        }
    });
    add(&USAGE, broken.or_else(|| answer.usage.is_empty().then(|| "the answer has no usage".to_owned())));
}

fn at<'a>(mounts: &'a [MountInfo], path: &str) -> Vec<&'a MountInfo> {
    let path = Path::new(path);
    mounts.iter().filter(|mount| mount.target == path).collect()
}

fn is_read_only(mount: &MountInfo) -> bool {
    let has = |options: &str| options.split(',').any(|option| option == "ro");
    has(&mount.options) || has(&mount.super_options)
}

fn published(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let (Ok(request), Some((before, after))) =
        (v1::NodePublishVolumeRequest::decode(call.request), call.mounts)
    else {
        return;
    };
    let target = request.target_path.as_str();
    let (was, is) = (at(before, target), at(after, target));
    let is_block = matches!(
        request.volume_capability.as_ref().and_then(|capability| capability.access_type.as_ref()),
        Some(AccessType::Block(_))
    );
    match call.answer {
        Ok(_) if is_block => {
            if let Some(root) = call.root {
                let there = std::fs::symlink_metadata(below(root, target)).is_ok();
                add(
                    &PUBLISHED,
                    (!there).then(|| format!("NodePublishVolume answered OK, nothing is at {target}")),
                );
            }
        }
        Ok(_) => {
            let missing =
                || format!("NodePublishVolume answered OK, nothing is mounted at target_path {target}");
            add(&PUBLISHED, is.is_empty().then(missing));
            let twice = || format!("{} mounts are stacked at {target}, {} were before", is.len(), was.len());
            add(&PUBLISHED_ONCE, (is.len() > was.len().max(1)).then(twice));
            if request.readonly
                && let Some(mount) = is.last()
            {
                let options = || format!("the mount at {target} is {}", mount.options);
                add(&READ_ONLY, (!is_read_only(mount)).then(options));
            }
        }
        Err(status) if berth_csi::code::is_final(status.code()) => {
            let left = || format!("NodePublishVolume failed, and left a mount at {target}");
            add(&PUBLISH_FAILED, (is.len() > was.len()).then(left));
        }
        Err(_) => {}
    }
}

fn unpublished(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let (Ok(request), Ok(_)) = (v1::NodeUnpublishVolumeRequest::decode(call.request), call.answer) else {
        return;
    };
    let target = request.target_path.as_str();
    if let Some((before, after)) = call.mounts {
        let left = at(after, target);
        let found =
            || format!("NodeUnpublishVolume answered OK, {} is still mounted at {target}", left[0].source);
        add(&UNPUBLISHED, (!left.is_empty()).then(found));
        // Mounts of the same filesystem elsewhere: the staging path, and other targets.
        let here = at(before, target);
        let same =
            |mount: &&MountInfo| here.iter().any(|own| own.device == mount.device && own.root == mount.root);
        let others = before.iter().filter(|mount| mount.target != Path::new(target)).filter(same);
        let gone = others.clone().find(|mount| !after.iter().any(|kept| kept.target == mount.target));
        if others.count() > 0 {
            add(&STAGED_KEPT, gone.map(|mount| format!("{} is unmounted as well", mount.target.display())));
        }
    }
    if let Some(root) = call.root {
        let there = std::fs::symlink_metadata(below(root, target)).is_ok();
        add(
            &TARGET_REMOVED,
            there.then(|| format!("NodeUnpublishVolume answered OK, {target} is still there")),
        );
    }
}

fn unstaged(call: &ObservedCall<'_>, add: &mut Add<'_>) {
    let (Ok(request), Ok(_)) = (v1::NodeUnstageVolumeRequest::decode(call.request), call.answer) else {
        return;
    };
    let staging = request.staging_target_path.as_str();
    if let Some((_, after)) = call.mounts {
        let left = after.iter().find(|mount| mount.target.starts_with(staging));
        add(
            &UNSTAGED,
            left.map(|mount| format!("{} is still mounted at {}", mount.source, mount.target.display())),
        );
    }
    if let Some(root) = call.root {
        let there = below(root, staging).is_dir();
        add(&STAGING_KEPT, (!there).then(|| format!("the directory {staging} is gone")));
    }
}

/// An absolute path of the driver, below where its root can be seen.
pub fn below(root: &Path, path: &str) -> std::path::PathBuf {
    root.join(path.trim_start_matches('/'))
}
