//! One switch per rule, named by the check that it makes fail.
#![expect(clippy::too_many_lines, reason = "tables of switches")]

use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use berth_csi::{Call, v1};
use bytes::Bytes;
use prost::Message;
use tonic::{Code, Status};
use v1::volume_capability::access_mode::Mode;
use v1::*;

use crate::driver::Reference;

type Answering<'a> = Pin<Box<dyn Future<Output = Result<Bytes, Status>> + Send + 'a>>;
type Run = Box<dyn for<'a> Fn(&'a Reference, String, String, Bytes) -> Answering<'a> + Send + Sync>;

/// A way to break one rule.
pub(crate) struct Switch {
    pub(crate) check: &'static str,
    pub(crate) run: Run,
}

/// The sizes that the checks ask for when volumes are to shrink and to grow.
const HALF: i64 = crate::SIZE / 2;
const DOUBLE: i64 = crate::SIZE * 2;
const MISSING: &str = "berth-certify-does-not-exist";

fn encoded(message: &impl Message) -> Bytes {
    message.encode_to_vec().into()
}

/// The general form: for calls of one type, may answer in the place of the driver, and may change the driver's answer.
fn switch<C: Call + Default + 'static>(
    check: &'static str,
    before: impl Fn(&Reference, &mut C) -> Option<Result<C::Answer, Status>> + Send + Sync + 'static,
    after: impl Fn(&Reference, &C, Result<C::Answer, Status>) -> Result<C::Answer, Status> + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    let (before, after) = (std::sync::Arc::new(before), std::sync::Arc::new(after));
    let run: Run = Box::new(move |reference, path, _, message| {
        let (before, after) = (before.clone(), after.clone());
        Box::pin(async move {
            if path != C::METHOD {
                return reference.inner(&path, message).await;
            }
            let mut request = C::decode(message).unwrap();
            if let Some(answer) = before(reference, &mut request) {
                return answer.map(|answer| encoded(&answer));
            }
            let answer = reference.inner(&path, encoded(&request)).await;
            let answer = answer.map(|bytes| C::Answer::decode(bytes).unwrap());
            after(reference, &request, answer).map(|answer| encoded(&answer))
        })
    });
    Switch { check, run }
}

/// Answers with a wrong code where this holds.
fn refuse<C: Call + Default + 'static>(
    check: &'static str,
    code: Code,
    wrong: impl Fn(&Reference, &C) -> bool + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    let before = move |reference: &Reference, request: &mut C| {
        wrong(reference, request).then(|| Err(Status::new(code, "the switch refuses this call")))
    };
    switch(check, before, |_, _: &C, answer| answer)
}

/// Answers INTERNAL where another code is due.
fn internal<C: Call + Default + 'static>(
    check: &'static str,
    wrong: impl Fn(&C) -> bool + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    refuse(check, Code::Internal, move |_, request: &C| wrong(request))
}

/// Turns a code into INTERNAL where this holds.
fn recode<C: Call + Default + 'static>(
    check: &'static str,
    code: Code,
    wrong: impl Fn(&C) -> bool + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    switch(
        check,
        |_, _: &mut C| None,
        move |_, request, answer| match answer {
            Err(status) if status.code() == code && wrong(request) => {
                Err(Status::internal("the switch changed the code"))
            }
            answer => answer,
        },
    )
}

/// A switch that changes the driver's answers.
fn alter<C: Call + Default + 'static>(
    check: &'static str,
    change: impl Fn(&Reference, &C, &mut C::Answer) + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    switch(
        check,
        |_, _: &mut C| None,
        move |reference, request, answer| {
            answer.map(|mut answer| {
                change(reference, request, &mut answer);
                answer
            })
        },
    )
}

/// A switch that changes the requests before the driver gets them.
fn rewrite<C: Call + Default + 'static>(
    check: &'static str,
    change: impl Fn(&mut C) + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    let before = move |_: &Reference, request: &mut C| {
        change(request);
        None
    };
    switch(check, before, |_, _: &C, answer| answer)
}

/// Watches all calls: `seen` hears each request and its answer, and may replace the answer.
fn watch(
    check: &'static str,
    seen: impl Fn(&Reference, &str, &[u8], Result<Bytes, Status>) -> Result<Bytes, Status> + Send + Sync + 'static,
) -> Switch {
    let seen = std::sync::Arc::new(seen);
    let run: Run = Box::new(move |reference, path, method, message| {
        let seen = seen.clone();
        Box::pin(async move {
            let answer = reference.inner(&path, message.clone()).await;
            seen(reference, &method, &message, answer)
        })
    });
    Switch { check, run }
}

/// Refuses a call that an earlier life of the process answered.
fn forgets<C: Call + Default + 'static>(
    check: &'static str,
    key: impl Fn(&C) -> String + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    switch(
        check,
        |_, _: &mut C| None,
        move |reference, request, answer| match answer {
            Ok(_) if reference.noted_in_an_earlier_life(&format!("{} {}", C::METHOD, key(request))) => {
                Err(Status::internal("the switch does not remember this"))
            }
            answer => answer,
        },
    )
}

/// Refuses a call while this holds of what is under way, itself included; each call takes a while.
fn crowd(
    check: &'static str,
    methods: &'static [&'static str],
    wrong: impl Fn(&[(String, String)], &str) -> bool + Send + Sync + 'static,
) -> Switch {
    let wrong = std::sync::Arc::new(wrong);
    let run: Run = Box::new(move |reference, path, method, message| {
        let wrong = wrong.clone();
        Box::pin(async move {
            if !methods.contains(&method.as_str()) {
                return reference.inner(&path, message).await;
            }
            let about = match method.as_str() {
                "CreateVolume" => CreateVolumeRequest::decode(message.clone()).unwrap().name,
                "DeleteVolume" => DeleteVolumeRequest::decode(message.clone()).unwrap().volume_id,
                "NodePublishVolume" => NodePublishVolumeRequest::decode(message.clone()).unwrap().target_path,
                _ => NodeUnpublishVolumeRequest::decode(message.clone()).unwrap().target_path,
            };
            let entry = (method, about);
            reference.memory.lock().under_way.push(entry.clone());
            // All callers begin at the same time, and are counted at its end.
            tokio::time::sleep(Duration::from_millis(60)).await;
            let refused = wrong(&reference.memory.lock().under_way, &entry.1);
            // Those that came together are all to see each other.
            tokio::time::sleep(Duration::from_millis(20)).await;
            {
                let mut memory = reference.memory.lock();
                let at = memory.under_way.iter().position(|other| *other == entry).unwrap();
                memory.under_way.remove(at);
            }
            if refused {
                return Err(Status::internal("the switch cannot do so much at once"));
            }
            reference.inner(&path, message).await
        })
    });
    Switch { check, run }
}

/// Answers INTERNAL for a volume that was deleted.
fn of_deleted<C: Call + Default + 'static>(
    check: &'static str,
    id: impl Fn(&C) -> String + Send + Sync + 'static,
) -> Switch {
    watch(check, move |reference, method, message, answer| {
        if let ("DeleteVolume", Ok(_)) = (method, &answer) {
            reference.note(format!("deleted {}", DeleteVolumeRequest::decode(message).unwrap().volume_id));
        }
        let is_own = C::METHOD.ends_with(&format!("/{method}"));
        if is_own && reference.knows(&format!("deleted {}", id(&C::decode(message).unwrap()))) {
            return Err(Status::internal("the switch does not say that a volume is gone"));
        }
        answer
    })
}

fn mode(capability: Option<&VolumeCapability>) -> Option<Mode> {
    Some(capability?.access_mode.as_ref()?.mode())
}

fn is_volume(id: &str) -> bool {
    !id.is_empty() && id != MISSING
}

fn source_snapshot(request: &CreateVolumeRequest) -> Option<String> {
    match request.volume_content_source.as_ref()?.r#type.as_ref()? {
        volume_content_source::Type::Snapshot(source) => Some(source.snapshot_id.clone()),
        volume_content_source::Type::Volume(_) => None,
    }
}

fn source_volume(request: &CreateVolumeRequest) -> Option<String> {
    match request.volume_content_source.as_ref()?.r#type.as_ref()? {
        volume_content_source::Type::Volume(source) => Some(source.volume_id.clone()),
        volume_content_source::Type::Snapshot(_) => None,
    }
}

fn has_all(request: &CreateVolumeRequest) -> bool {
    !request.name.is_empty()
        && request
            .volume_capabilities
            .iter()
            .all(|one| one.access_mode.is_some() && one.access_type.is_some())
        && !request.volume_capabilities.is_empty()
}

fn required(range: Option<&CapacityRange>) -> i64 {
    range.map_or(0, |range| range.required_bytes)
}

/// Every switch there is.
pub(crate) fn all() -> Vec<Switch> {
    let mut all = controller_errors();
    all.extend(node_errors());
    all.extend(identity());
    all.extend(behaviour());
    all.extend(data());
    all.extend(lists());
    all.extend(extras());
    all.extend(crashes_and_leaks());
    all.extend(one_call());
    all
}

fn controller_errors() -> Vec<Switch> {
    type Attach = ControllerPublishVolumeRequest;
    type Validate = ValidateVolumeCapabilitiesRequest;
    type Expand = ControllerExpandVolumeRequest;
    vec![
        internal("errors.create.no-name", |r: &CreateVolumeRequest| r.name.is_empty()),
        internal("errors.create.no-capabilities", |r: &CreateVolumeRequest| r.volume_capabilities.is_empty()),
        internal("errors.create.no-access-type", |r: &CreateVolumeRequest| {
            r.volume_capabilities.iter().any(|one| one.access_type.is_none())
        }),
        internal("errors.create.no-access-mode", |r: &CreateVolumeRequest| {
            r.volume_capabilities.iter().any(|one| one.access_mode.is_none())
        }),
        internal("errors.create.negative-size", |r: &CreateVolumeRequest| {
            required(r.capacity_range.as_ref()) < 0
        }),
        internal("errors.create.limit-below-required", |r: &CreateVolumeRequest| {
            r.volume_content_source.is_none()
                && r.capacity_range
                    .is_some_and(|range| range.limit_bytes > 0 && range.limit_bytes < range.required_bytes)
        }),
        internal("errors.create.impossible-size", |r: &CreateVolumeRequest| {
            required(r.capacity_range.as_ref()) == i64::MAX
        }),
        internal("errors.create.snapshot-missing", |r| source_snapshot(r).as_deref() == Some(MISSING)),
        internal("errors.create.volume-missing", |r| source_volume(r).as_deref() == Some(MISSING)),
        recode("errors.create.other-size", Code::AlreadyExists, |r: &CreateVolumeRequest| {
            r.volume_content_source.is_none()
        }),
        recode("errors.create.other-source", Code::AlreadyExists, |r: &CreateVolumeRequest| {
            r.volume_content_source.is_some()
        }),
        recode("errors.create.smaller-than-source", Code::OutOfRange, |r: &CreateVolumeRequest| {
            r.volume_content_source.is_some()
        }),
        internal("errors.delete.no-id", |r: &DeleteVolumeRequest| r.volume_id.is_empty()),
        refuse("errors.delete.missing", Code::NotFound, |_, r: &DeleteVolumeRequest| r.volume_id == MISSING),
        internal("errors.attach.no-volume", |r: &Attach| r.volume_id.is_empty()),
        internal("errors.attach.no-node", |r: &Attach| r.node_id.is_empty()),
        internal("errors.attach.no-capability", |r: &Attach| r.volume_capability.is_none()),
        internal("errors.attach.missing", |r: &Attach| {
            r.volume_id == MISSING && !r.node_id.is_empty() && r.volume_capability.is_some()
        }),
        internal("errors.attach.node-missing", |r: &Attach| r.node_id == MISSING),
        recode("errors.attach.other-mode", Code::AlreadyExists, |_: &Attach| true),
        internal("errors.detach.no-id", |r: &ControllerUnpublishVolumeRequest| r.volume_id.is_empty()),
        internal("errors.validate.no-id", |r: &Validate| r.volume_id.is_empty()),
        internal("errors.validate.no-capabilities", |r: &Validate| r.volume_capabilities.is_empty()),
        internal("errors.validate.missing", |r: &Validate| r.volume_id == MISSING),
        internal("errors.list.token", |r: &ListVolumesRequest| r.starting_token.contains("no token")),
        internal("errors.list.negative", |r: &ListVolumesRequest| r.max_entries < 0),
        internal("errors.snapshot.no-name", |r: &CreateSnapshotRequest| r.name.is_empty()),
        internal("errors.snapshot.no-source", |r: &CreateSnapshotRequest| r.source_volume_id.is_empty()),
        internal("errors.snapshot.source-missing", |r: &CreateSnapshotRequest| r.source_volume_id == MISSING),
        recode("errors.snapshot.other-source", Code::AlreadyExists, |_: &CreateSnapshotRequest| true),
        internal("errors.delete-snapshot.no-id", |r: &DeleteSnapshotRequest| r.snapshot_id.is_empty()),
        refuse("errors.delete-snapshot.missing", Code::NotFound, |_, r: &DeleteSnapshotRequest| {
            r.snapshot_id == MISSING
        }),
        internal("errors.list-snapshots.token", |r: &ListSnapshotsRequest| {
            r.starting_token.contains("no token")
        }),
        internal("errors.list-snapshots.negative", |r: &ListSnapshotsRequest| r.max_entries < 0),
        internal("errors.get-snapshot.no-id", |r: &GetSnapshotRequest| r.snapshot_id.is_empty()),
        internal("errors.get-snapshot.missing", |r: &GetSnapshotRequest| r.snapshot_id == MISSING),
        internal("errors.expand.no-id", |r: &Expand| r.volume_id.is_empty()),
        internal("errors.expand.no-range", |r: &Expand| r.capacity_range.is_none()),
        internal("errors.expand.missing", |r: &Expand| r.volume_id == MISSING),
        refuse("errors.expand.smaller", Code::OutOfRange, |_, r: &Expand| {
            required(r.capacity_range.as_ref()) == HALF
        }),
        internal("errors.expand.impossible-size", |r: &Expand| {
            required(r.capacity_range.as_ref()) == i64::MAX
        }),
        internal("errors.modify.no-id", |r: &ControllerModifyVolumeRequest| r.volume_id.is_empty()),
        internal("errors.modify.missing", |r: &ControllerModifyVolumeRequest| r.volume_id == MISSING),
        internal("errors.modify.unknown-parameter", |r: &ControllerModifyVolumeRequest| {
            r.mutable_parameters.contains_key("berth-certify-unknown")
        }),
        internal("errors.get-volume.no-id", |r: &ControllerGetVolumeRequest| r.volume_id.is_empty()),
        internal("errors.get-volume.missing", |r: &ControllerGetVolumeRequest| r.volume_id == MISSING),
        internal("errors.health.no-id", |r: &ControllerGetVolumeHealthRequest| r.volume_id.is_empty()),
        internal("errors.health.missing", |r: &ControllerGetVolumeHealthRequest| r.volume_id == MISSING),
        internal("errors.group.no-name", |r: &CreateVolumeGroupSnapshotRequest| r.name.is_empty()),
        internal("errors.group.no-sources", |r: &CreateVolumeGroupSnapshotRequest| {
            r.source_volume_ids.is_empty()
        }),
        internal("errors.group.get-no-id", |r: &GetVolumeGroupSnapshotRequest| {
            r.group_snapshot_id.is_empty()
        }),
        internal("errors.group.get-missing", |r: &GetVolumeGroupSnapshotRequest| {
            r.group_snapshot_id == MISSING
        }),
        internal("errors.group.delete-no-id", |r: &DeleteVolumeGroupSnapshotRequest| {
            r.group_snapshot_id.is_empty()
        }),
        refuse("errors.group.delete-missing", Code::NotFound, |_, r: &DeleteVolumeGroupSnapshotRequest| {
            r.group_snapshot_id == MISSING
        }),
    ]
}

fn node_errors() -> Vec<Switch> {
    type Stage = NodeStageVolumeRequest;
    type Publish = NodePublishVolumeRequest;
    type Stats = NodeGetVolumeStatsRequest;
    vec![
        internal("errors.stage.no-id", |r: &Stage| r.volume_id.is_empty()),
        internal("errors.stage.no-path", |r: &Stage| r.staging_target_path.is_empty()),
        internal("errors.stage.no-capability", |r: &Stage| r.volume_capability.is_none()),
        of_deleted::<Stage>("errors.stage.missing", |r| r.volume_id.clone()),
        internal("errors.unstage.no-id", |r: &NodeUnstageVolumeRequest| r.volume_id.is_empty()),
        internal("errors.unstage.no-path", |r: &NodeUnstageVolumeRequest| r.staging_target_path.is_empty()),
        internal("errors.publish.no-id", |r: &Publish| r.volume_id.is_empty()),
        internal("errors.publish.no-target", |r: &Publish| r.target_path.is_empty()),
        internal("errors.publish.no-capability", |r: &Publish| r.volume_capability.is_none()),
        internal("errors.publish.no-staging", |r: &Publish| r.staging_target_path.is_empty()),
        of_deleted::<Publish>("errors.publish.missing", |r| r.volume_id.clone()),
        recode("errors.publish.other-mode", Code::AlreadyExists, |_: &Publish| true),
        internal("errors.unpublish.no-id", |r: &NodeUnpublishVolumeRequest| r.volume_id.is_empty()),
        internal("errors.unpublish.no-target", |r: &NodeUnpublishVolumeRequest| r.target_path.is_empty()),
        internal("errors.stats.no-id", |r: &Stats| r.volume_id.is_empty()),
        internal("errors.stats.no-path", |r: &Stats| r.volume_path.is_empty()),
        internal("errors.stats.missing", |r: &Stats| r.volume_id == MISSING),
        internal("errors.stats.other-path", |r: &Stats| {
            is_volume(&r.volume_id) && !r.volume_path.is_empty() && !r.volume_path.contains("target-")
        }),
        internal("errors.node-expand.no-id", |r: &NodeExpandVolumeRequest| r.volume_id.is_empty()),
        internal("errors.node-expand.no-path", |r: &NodeExpandVolumeRequest| r.volume_path.is_empty()),
        internal("errors.node-expand.missing", |r: &NodeExpandVolumeRequest| r.volume_id == MISSING),
        internal("errors.node-health.no-id", |r: &NodeGetVolumeHealthRequest| r.volume_id.is_empty()),
        internal("errors.node-health.missing", |r: &NodeGetVolumeHealthRequest| r.volume_id == MISSING),
    ]
}

fn identity() -> Vec<Switch> {
    let unknown_method: Run = Box::new(|reference, path, method, message| {
        Box::pin(async move {
            if method == "NoSuchMethod" {
                return Ok(Bytes::new());
            }
            reference.inner(&path, message).await
        })
    });
    vec![
        alter("identity.name", |_, _: &GetPluginInfoRequest, answer| {
            "-reference-".clone_into(&mut answer.name);
        }),
        alter("identity.version", |_, _: &GetPluginInfoRequest, answer| answer.vendor_version.clear()),
        alter("identity.stable", |reference, _: &GetPluginCapabilitiesRequest, answer| {
            if reference.count("GetPluginCapabilities").is_multiple_of(2) {
                answer.capabilities.reverse();
            }
        }),
        alter("identity.known", |_, _: &ControllerGetCapabilitiesRequest, answer| {
            let first = answer.capabilities[0];
            answer.capabilities.push(first);
        }),
        refuse("identity.announced", Code::Unimplemented, |_, r: &ControllerListVolumeHealthRequest| {
            r.max_entries == 1
        }),
        Switch { check: "identity.unknown-method", run: unknown_method },
        alter("identity.node-info", |reference, _: &NodeGetInfoRequest, answer| {
            if reference.count("NodeGetInfo") == 2 {
                "another".clone_into(&mut answer.node_id);
            }
        }),
    ]
}

fn behaviour() -> Vec<Switch> {
    vec![
        internal("lifecycle.create-any-size", |r: &CreateVolumeRequest| {
            has_all(r) && r.capacity_range.is_none()
        }),
        alter("lifecycle.validate", |_, _: &ValidateVolumeCapabilitiesRequest, answer| {
            answer.confirmed = None;
        }),
        refuse(
            "lifecycle.detach-everywhere",
            Code::InvalidArgument,
            |_, r: &ControllerUnpublishVolumeRequest| r.node_id.is_empty() && is_volume(&r.volume_id),
        ),
        internal("lifecycle.stats", |r: &NodeGetVolumeStatsRequest| {
            is_volume(&r.volume_id) && r.volume_path.contains("/target-")
        }),
        internal("lifecycle.clone", |r: &CreateVolumeRequest| {
            source_volume(r).is_some_and(|id| id != MISSING)
        }),
        internal("lifecycle.node-expand", |r: &NodeExpandVolumeRequest| {
            is_volume(&r.volume_id) && !r.volume_path.is_empty()
        }),
        alter("lifecycle.capacity", |_, _: &GetCapacityRequest, answer| answer.available_capacity = -1),
        alter("lifecycle.get-volume", |_, _: &ControllerGetVolumeRequest, answer| {
            answer.volume.as_mut().unwrap().volume_id.push('x');
        }),
        alter("lifecycle.get-snapshot", |_, _: &GetSnapshotRequest, answer| {
            answer.snapshot.as_mut().unwrap().snapshot_id.push('x');
        }),
        internal("limits.long-name", |r: &CreateVolumeRequest| r.name.len() == 128),
        rewrite("limits.long-names-differ", |r: &mut CreateVolumeRequest| {
            if r.name.len() == 128 {
                r.name.pop();
            }
        }),
        refuse("limits.any-letters", Code::InvalidArgument, |_, r: &CreateVolumeRequest| !r.name.is_ascii()),
        internal("limits.long-snapshot-name", |r: &CreateSnapshotRequest| r.name.len() == 128),
        alter("repeat.attach", |reference, _: &ControllerPublishVolumeRequest, answer| {
            let count = reference.count("ControllerPublishVolume");
            answer.publish_context.insert("attached".to_owned(), count.to_string());
        }),
        alter("repeat.snapshot", |reference, _: &CreateSnapshotRequest, answer| {
            let time = answer.snapshot.as_mut().unwrap().creation_time.as_mut().unwrap();
            time.seconds -= i64::from(reference.count("CreateSnapshot"));
        }),
        alter("repeat.expand", |reference, _: &ControllerExpandVolumeRequest, answer| {
            answer.capacity_bytes += i64::from(reference.count("ControllerExpandVolume"));
        }),
        recode("staging.publish-first", Code::FailedPrecondition, |r: &NodePublishVolumeRequest| {
            is_volume(&r.volume_id)
                && !r.staging_target_path.is_empty()
                && mode(r.volume_capability.as_ref()) != Some(Mode::SingleNodeSingleWriter)
        }),
        watch("staging.both-ways", |reference, method, message, answer| {
            match method {
                "NodeUnstageVolume" => {
                    reference.note(format!(
                        "unstaged {}",
                        NodeUnstageVolumeRequest::decode(message).unwrap().volume_id
                    ));
                }
                "NodeStageVolume" => {
                    let id = NodeStageVolumeRequest::decode(message).unwrap().volume_id;
                    if reference.knows(&format!("unstaged {id}")) {
                        return Err(Status::internal("the switch stages once"));
                    }
                }
                _ => {}
            }
            answer
        }),
        recode("staging.single-writer", Code::FailedPrecondition, |r: &NodePublishVolumeRequest| {
            mode(r.volume_capability.as_ref()) == Some(Mode::SingleNodeSingleWriter)
        }),
        refuse("staging.multi-writer", Code::FailedPrecondition, |_, r: &NodePublishVolumeRequest| {
            r.target_path.ends_with("-second")
                && mode(r.volume_capability.as_ref()) == Some(Mode::SingleNodeMultiWriter)
        }),
        crowd("concurrent.create-different", &["CreateVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other != about).count() >= 4
        }),
        crowd("concurrent.create-same", &["CreateVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other == about).count() >= 6
        }),
        crowd("concurrent.delete-same", &["DeleteVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other == about).count() >= 6
        }),
        crowd("concurrent.publish-same", &["NodePublishVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other == about).count() >= 6
        }),
        crowd("concurrent.publish-different", &["NodePublishVolume"], |under_way, about| {
            under_way.iter().filter(|(_, other)| other != about).count() >= 2
        }),
        crowd("concurrent.mixed", &["NodePublishVolume", "NodeUnpublishVolume"], |under_way, about| {
            let of = |method: &str| under_way.iter().any(|(other, path)| other == method && path == about);
            of("NodePublishVolume") && of("NodeUnpublishVolume")
        }),
    ]
}

/// Watches the calls that publish a volume: its id and the target, after the driver answered OK.
fn on_publish(check: &'static str, seen: impl Fn(&Reference, &str, &Path) + Send + Sync + 'static) -> Switch {
    alter(check, move |reference, r: &NodePublishVolumeRequest, _| {
        seen(reference, &r.volume_id, Path::new(&r.target_path));
    })
}

fn data() -> Vec<Switch> {
    let unpublish = |reference: &Reference, method: &str, message: &[u8]| match method {
        "NodeUnpublishVolume" => {
            let target = NodeUnpublishVolumeRequest::decode(message).unwrap().target_path;
            let target = Path::new(&target);
            let _ = fs::rename(target.join("data"), target.join(".hidden"));
        }
        "NodeStageVolume" => {
            let id = NodeStageVolumeRequest::decode(message).unwrap().volume_id;
            reference.note(format!("fresh {id}"));
        }
        _ => {}
    };
    let unpublishing: Run = Box::new(move |reference, path, method, message| {
        Box::pin(async move {
            unpublish(reference, &method, &message);
            let answer = reference.inner(&path, message.clone()).await;
            if method == "NodePublishVolume" && answer.is_ok() {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                let target = Path::new(&request.target_path);
                if reference.forget(&format!("fresh {}", request.volume_id)) {
                    let _ = fs::rename(target.join(".hidden"), target.join("data"));
                }
            }
            answer
        })
    });
    vec![
        watch("data.empty", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer) {
                let name = CreateVolumeRequest::decode(message).unwrap().name;
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                if reference.note(format!("name {name}")) {
                    reference.note(format!("first {id}"));
                } else {
                    reference.forget(&format!("first {id}"));
                }
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("first {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("foreign"), "x");
                }
            }
            answer
        }),
        watch("data.deleted", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer) {
                let name = CreateVolumeRequest::decode(message).unwrap().name;
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                if !reference.note(format!("name {name}")) {
                    reference.note(format!("again {id}"));
                }
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("again {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("data"), "x");
                }
            }
            answer
        }),
        Switch { check: "data.unpublish", run: unpublishing },
        watch("data.restage", |reference, method, message, answer| {
            if let ("NodeUnstageVolume", Ok(_)) = (method, &answer) {
                reference.note(format!(
                    "unstaged {}",
                    NodeUnstageVolumeRequest::decode(message).unwrap().volume_id
                ));
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.knows(&format!("unstaged {}", request.volume_id)) {
                    let _ = fs::remove_file(Path::new(&request.target_path).join("data"));
                }
            }
            answer
        }),
        on_publish("data.restart", |reference, id, target| {
            if reference.noted_in_an_earlier_life(&format!("published {id}")) {
                let _ = fs::remove_file(target.join("data"));
            }
        }),
        switch(
            "call.read-only",
            |_, _: &mut NodePublishVolumeRequest| None,
            |_, r, answer| {
                if r.readonly && answer.is_ok() {
                    let flags = rustix::mount::MountFlags::BIND;
                    rustix::mount::mount_remount(r.target_path.as_str(), flags, "").unwrap();
                }
                answer
            },
        ),
        watch("data.clone", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer)
                && source_volume(&CreateVolumeRequest::decode(message).unwrap()).is_some()
            {
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("clone {id}"));
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("clone {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("data"), "x".repeat(64));
                }
            }
            answer
        }),
        watch("data.restored-apart", |reference, method, message, answer| {
            if let ("CreateVolume", Ok(created)) = (method, &answer)
                && let Some(snapshot) = source_snapshot(&CreateVolumeRequest::decode(message).unwrap())
                && !reference.note(format!("restored {snapshot}"))
            {
                let id = CreateVolumeResponse::decode(created.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("second {id}"));
            }
            if let ("NodePublishVolume", Ok(_)) = (method, &answer) {
                let request = NodePublishVolumeRequest::decode(message).unwrap();
                if reference.forget(&format!("second {}", request.volume_id)) {
                    let _ = fs::write(Path::new(&request.target_path).join("data"), "x".repeat(64));
                }
            }
            answer
        }),
        watch("data.snapshot-outlives", |reference, method, message, answer| {
            match (method, &answer) {
                ("CreateSnapshot", Ok(made)) => {
                    let snapshot = CreateSnapshotResponse::decode(made.clone()).unwrap().snapshot.unwrap();
                    reference.note(format!("{} of {}", snapshot.snapshot_id, snapshot.source_volume_id));
                }
                ("DeleteVolume", Ok(_)) => {
                    reference
                        .note(format!("deleted {}", DeleteVolumeRequest::decode(message).unwrap().volume_id));
                }
                ("CreateVolume", Ok(_)) => {
                    if let Some(snapshot) = source_snapshot(&CreateVolumeRequest::decode(message).unwrap()) {
                        let memory = reference.memory.lock();
                        let mut facts = memory.facts.iter();
                        let source = facts.find_map(|fact| fact.strip_prefix(&format!("{snapshot} of ")));
                        if source.is_some_and(|source| memory.facts.contains(&format!("deleted {source}"))) {
                            return Err(Status::not_found("the snapshot went with its volume"));
                        }
                    }
                }
                _ => {}
            }
            answer
        }),
        alter("stats.total", |_, _: &NodeGetVolumeStatsRequest, answer| {
            answer.usage.iter_mut().for_each(|usage| usage.total = usage.total.saturating_mul(3));
        }),
        alter("stats.move", |_, _: &NodeGetVolumeStatsRequest, answer| {
            answer.usage.iter_mut().for_each(|usage| usage.used = 4096);
        }),
    ]
}

fn lists() -> Vec<Switch> {
    vec![
        watch("list.new", |reference, method, message, answer| match (method, answer) {
            ("CreateVolume", Ok(made)) => {
                let id = CreateVolumeResponse::decode(made.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("created {id}"));
                Ok(made)
            }
            ("ListVolumes", Ok(list)) if ListVolumesRequest::decode(message).unwrap().max_entries == 0 => {
                let mut list = ListVolumesResponse::decode(list).unwrap();
                list.entries.retain(|entry| {
                    let id = &entry.volume.as_ref().unwrap().volume_id;
                    let is_attached =
                        entry.status.as_ref().is_some_and(|status| !status.published_node_ids.is_empty());
                    is_attached || !reference.knows(&format!("created {id}"))
                });
                Ok(encoded(&list))
            }
            (_, answer) => answer,
        }),
        watch("list.deleted", |reference, method, message, answer| match (method, answer) {
            ("DeleteVolume", Ok(done)) => {
                let id = DeleteVolumeRequest::decode(message).unwrap().volume_id;
                reference.note(format!("deleted {id}"));
                Ok(done)
            }
            ("ListVolumes", Ok(list)) if ListVolumesRequest::decode(message).unwrap().max_entries == 0 => {
                let mut list = ListVolumesResponse::decode(list).unwrap();
                let memory = reference.memory.lock();
                for id in memory.facts.iter().filter_map(|fact| fact.strip_prefix("deleted ")) {
                    let volume = Some(Volume { volume_id: id.to_owned(), ..Default::default() });
                    if !list.entries.iter().any(|entry| entry.volume.as_ref().unwrap().volume_id == id) {
                        list.entries.push(list_volumes_response::Entry { volume, status: None });
                    }
                }
                Ok(encoded(&list))
            }
            (_, answer) => answer,
        }),
        alter("list.pages", |_, r: &ListVolumesRequest, answer| {
            if r.max_entries == 1 && !r.starting_token.is_empty() {
                answer.entries.clear();
            }
        }),
        refuse("list.pages-change", Code::Aborted, |_, r: &ListVolumesRequest| {
            r.max_entries == 2 && !r.starting_token.is_empty()
        }),
        alter("list.published-nodes", |_, _: &ListVolumesRequest, answer| {
            answer.entries.iter_mut().for_each(|entry| entry.status = None);
        }),
        alter("list.snapshots-new", |_, r: &ListSnapshotsRequest, answer| {
            if r.snapshot_id.is_empty() && r.source_volume_id.is_empty() {
                answer.entries.clear();
            }
        }),
        rewrite("list.snapshots-by-id", |r: &mut ListSnapshotsRequest| {
            if r.snapshot_id != MISSING {
                r.snapshot_id.clear();
            }
        }),
        rewrite("list.snapshots-by-source", |r: &mut ListSnapshotsRequest| {
            if r.source_volume_id != MISSING && r.max_entries == 0 {
                r.source_volume_id.clear();
            }
        }),
        refuse("list.snapshots-missing", Code::NotFound, |_, r: &ListSnapshotsRequest| {
            r.snapshot_id == MISSING
        }),
        refuse("list.snapshots-of-missing", Code::NotFound, |_, r: &ListSnapshotsRequest| {
            r.source_volume_id == MISSING
        }),
        alter("list.snapshots-pages", |_, r: &ListSnapshotsRequest, answer| {
            if r.max_entries == 2 && !r.starting_token.is_empty() {
                answer.entries.clear();
            }
        }),
    ]
}

fn extras() -> Vec<Switch> {
    vec![
        alter("group.create", |_, _: &CreateVolumeGroupSnapshotRequest, answer| {
            let group = answer.group_snapshot.as_mut().unwrap();
            group.snapshots.iter_mut().for_each(|snapshot| snapshot.group_snapshot_id.clear());
        }),
        alter("group.get", |_, _: &GetVolumeGroupSnapshotRequest, answer| {
            answer.group_snapshot.as_mut().unwrap().group_snapshot_id.push('x');
        }),
        recode("group.other-sources", Code::AlreadyExists, |_: &CreateVolumeGroupSnapshotRequest| true),
        recode("group.member", Code::InvalidArgument, |r: &DeleteSnapshotRequest| is_volume(&r.snapshot_id)),
        watch("group.restore", |reference, method, message, answer| {
            if let ("CreateVolumeGroupSnapshot", Ok(made)) = (method, &answer) {
                let group =
                    CreateVolumeGroupSnapshotResponse::decode(made.clone()).unwrap().group_snapshot.unwrap();
                group.snapshots.iter().for_each(|member| {
                    reference.note(format!("member {}", member.snapshot_id));
                });
            }
            if method == "CreateVolume"
                && let Some(snapshot) = source_snapshot(&CreateVolumeRequest::decode(message).unwrap())
                && reference.knows(&format!("member {snapshot}"))
            {
                return Err(Status::internal("the switch does not restore members"));
            }
            answer
        }),
        alter("health.controller", |_, _: &ControllerGetVolumeHealthRequest, answer| {
            answer.volume_health.as_mut().unwrap().volume_id.push('x');
        }),
        internal("health.list", |r: &ControllerListVolumeHealthRequest| r.max_entries == 0),
        internal("health.node", |r: &NodeGetVolumeHealthRequest| is_volume(&r.volume_id)),
        internal("health.storage", |_: &NodeGetStorageHealthRequest| true),
        internal("modify.change", |r: &ControllerModifyVolumeRequest| {
            is_volume(&r.volume_id) && r.mutable_parameters.contains_key("noatime")
        }),
        internal("modify.create", |r: &CreateVolumeRequest| r.mutable_parameters.contains_key("noatime")),
        internal("modify.create-unknown", |r: &CreateVolumeRequest| {
            r.mutable_parameters.contains_key("berth-certify-unknown")
        }),
        alter("topology.node", |reference, _: &NodeGetInfoRequest, answer| {
            if reference.count("NodeGetInfo") > 1 {
                answer.accessible_topology = None;
            }
        }),
        alter("topology.create", |_, _: &CreateVolumeRequest, answer| {
            for topology in &mut answer.volume.as_mut().unwrap().accessible_topology {
                topology.segments.values_mut().for_each(|value| value.push('x'));
            }
        }),
        recode("topology.impossible", Code::ResourceExhausted, |r: &CreateVolumeRequest| {
            required(r.capacity_range.as_ref()) < i64::MAX
        }),
    ]
}

/// Runs a program that ends by itself; nobody waits for it before this time.
fn run_program(words: &[&str], pause: Duration) {
    let log = std::env::temp_dir().join("berth-reference.log");
    let mut child = berth_host::exec::detach(Path::new("/bin/sh"), words, &log).unwrap();
    std::thread::spawn(move || {
        std::thread::sleep(pause);
        child.wait()
    });
}

fn crashes_and_leaks() -> Vec<Switch> {
    vec![
        forgets("crash.create", |r: &CreateVolumeRequest| r.name.clone()),
        forgets("crash.delete", |r: &DeleteVolumeRequest| r.volume_id.clone()),
        forgets("crash.attach", |r: &ControllerPublishVolumeRequest| r.volume_id.clone()),
        forgets("crash.stage", |r: &NodeStageVolumeRequest| r.volume_id.clone()),
        forgets("crash.snapshot", |r: &CreateSnapshotRequest| r.name.clone()),
        forgets("crash.expand", |r: &ControllerExpandVolumeRequest| r.volume_id.clone()),
        forgets("crash.publish", |r: &NodePublishVolumeRequest| r.target_path.clone()),
        watch("crash.list", |reference, method, _, answer| match (method, answer) {
            ("CreateVolume", Ok(made)) => {
                let id = CreateVolumeResponse::decode(made.clone()).unwrap().volume.unwrap().volume_id;
                reference.note(format!("created {id}"));
                Ok(made)
            }
            ("ListVolumes", Ok(list)) => {
                let mut list = ListVolumesResponse::decode(list).unwrap();
                let is_known = |id: &str| reference.knows(&format!("created {id}"));
                list.entries.retain(|entry| is_known(&entry.volume.as_ref().unwrap().volume_id));
                Ok(encoded(&list))
            }
            (_, answer) => answer,
        }),
        on_publish("leak.mounts", |reference, _, target| {
            if reference.count("NodePublishVolume") == 1 {
                let other = target.with_file_name("target-leaked");
                let _ = fs::create_dir(&other);
                rustix::mount::mount_bind(target, &other).unwrap();
            }
        }),
        on_publish("leak.directories", |_, _, target| {
            let _ = fs::write(target.with_file_name("left-by-the-driver"), "x");
        }),
        on_publish("leak.files", |_, _, _| std::mem::forget(fs::File::open("/dev/null").unwrap())),
        on_publish("leak.children", |_, _, _| run_program(&["-c", "sleep 30"], Duration::from_secs(120))),
        alter("secret.log", |_, r: &CreateVolumeRequest, _| println!("{:?}", r.secrets)),
        alter("secret.command-line", |_, r: &NodeStageVolumeRequest, _| {
            let secret = r.secrets.values().next().cloned().unwrap_or_default();
            run_program(&["-c", "sleep 0.3; true", &secret], Duration::ZERO);
        }),
    ]
}

fn one_call() -> Vec<Switch> {
    let no_id = |r: &DeleteVolumeRequest| r.volume_id.is_empty();
    let hang: Run = Box::new(|reference, path, method, message| {
        Box::pin(async move {
            if method == "NodeGetStorageHealth" {
                std::future::pending::<()>().await;
            }
            reference.inner(&path, message).await
        })
    });
    // What it adds to an answer it takes out of the requests that bring it back.
    let large: Run = Box::new(|reference, path, method, message| {
        Box::pin(async move {
            let message = match method.as_str() {
                "NodeStageVolume" => {
                    let mut request = NodeStageVolumeRequest::decode(message).unwrap();
                    request.publish_context.remove("large");
                    encoded(&request)
                }
                "NodePublishVolume" => {
                    let mut request = NodePublishVolumeRequest::decode(message).unwrap();
                    request.publish_context.remove("large");
                    encoded(&request)
                }
                _ => message,
            };
            let answer = reference.inner(&path, message).await?;
            if method != "ControllerPublishVolume" {
                return Ok(answer);
            }
            let mut answer = ControllerPublishVolumeResponse::decode(answer).unwrap();
            answer.publish_context.insert("large".to_owned(), "x".repeat(5000));
            Ok(encoded(&answer))
        })
    });
    vec![
        Switch { check: "call.answers", run: hang },
        switch(
            "call.message",
            move |_, r: &mut DeleteVolumeRequest| no_id(r).then(|| Err(Status::invalid_argument(""))),
            |_, _, answer| answer,
        ),
        switch(
            "call.details",
            move |_, r: &mut DeleteVolumeRequest| {
                let details = Bytes::from_static(b"details");
                no_id(r).then(|| {
                    Err(Status::with_details(Code::InvalidArgument, "volume_id is missing", details))
                })
            },
            |_, _, answer| answer,
        ),
        switch(
            "call.secret-in-error",
            move |_, r: &mut DeleteVolumeRequest| {
                let secrets: Vec<_> = r.secrets.values().cloned().collect();
                no_id(r)
                    .then(|| Err(Status::invalid_argument(format!("volume_id is missing in {secrets:?}"))))
            },
            |_, _, answer| answer,
        ),
        alter("call.secret-in-answer", |_, r: &ControllerPublishVolumeRequest, answer| {
            answer
                .publish_context
                .insert("secret".to_owned(), r.secrets.values().next().cloned().unwrap_or_default());
        }),
        Switch { check: "call.limits", run: large },
        alter("call.capacity", |_, _: &CreateVolumeRequest, answer| {
            answer.volume.as_mut().unwrap().capacity_bytes = 1;
        }),
        alter("call.content-source", |_, _: &CreateVolumeRequest, answer| {
            answer.volume.as_mut().unwrap().content_source = None;
        }),
        alter("call.snapshot", |_, _: &CreateSnapshotRequest, answer| {
            answer.snapshot.as_mut().unwrap().creation_time = None;
        }),
        alter("call.expanded", |_, r: &ControllerExpandVolumeRequest, answer| {
            if required(r.capacity_range.as_ref()) == DOUBLE {
                answer.capacity_bytes = 1;
            }
        }),
        alter("call.target-removed", |_, r: &NodeUnpublishVolumeRequest, _| {
            let _ = fs::create_dir(&r.target_path);
        }),
        alter("call.usage", |_, _: &NodeGetVolumeStatsRequest, answer| {
            answer.usage.iter_mut().for_each(|usage| usage.available = -1);
        }),
        alter("call.entries", |_, r: &ListVolumesRequest, answer| {
            if r.max_entries == 0 && !answer.entries.is_empty() {
                answer.entries.push(answer.entries[0].clone());
            }
        }),
        alter("call.node-id", |_, _: &NodeGetInfoRequest, answer| answer.max_volumes_per_node = -1),
    ]
}
