//! The error tables of the Controller and GroupController services: one check for each row.

use berth_csi::{ControllerCapability as Controller, GroupCapability, v1};
use tonic::Code;

use super::lifecycle::{from_snapshot, from_volume};
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Request, Session, broken, describe, ensure, not_run};

/// A name of a volume, node or snapshot that does not exist.
pub(super) const MISSING: &str = "berth-certify-does-not-exist";

/// The most volumes that are attached to see what happens with one more.
const MOST_ATTACHED: i64 = 32;

const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);
const SNAPSHOTS: Need = Need::Controller(Controller::CreateDeleteSnapshot);
const EXPAND: Need = Need::Controller(Controller::ExpandVolume);
const MODIFY: Need = Need::Controller(Controller::ModifyVolume);
const LIST: Need = Need::Controller(Controller::ListVolumes);
const LIST_SNAPSHOTS: Need = Need::Controller(Controller::ListSnapshots);
const HEALTH: Need = Need::Controller(Controller::GetVolumeHealth);
const GROUP: Need = Need::Group(GroupCapability::CreateDeleteGetVolumeGroupSnapshot);

/// The call is refused with one of these codes.
pub(super) async fn refused<C: Request>(session: &Session, request: C, codes: &[Code]) -> Outcome {
    let method = C::METHOD.rsplit('/').next().unwrap_or_default();
    let expected =
        codes.iter().map(|code| berth_csi::code::grpc_name(*code)).collect::<Vec<_>>().join(" or ");
    match session.call(request).await {
        Ok(_) => broken(format!("{method} answered OK, expected is {expected}")),
        Err(status) if codes.contains(&status.code()) => Ok(()),
        Err(status) => Err(status).or_broken(&format!("{method} should answer {expected}, and")),
    }
}

pub(super) const INVALID: &[Code] = &[Code::InvalidArgument];
pub(super) const NOT_FOUND: &[Code] = &[Code::NotFound];

/// A check that a request is refused: `refuse!(codes, |session| request)`. The request may be prepared by other calls.
macro_rules! refuse {
    ($codes:expr, |$session:ident| $request:expr) => {{
        async fn check($session: &Session) -> Outcome {
            let request = $request;
            refused($session, request, $codes).await
        }
        check
    }};
}
pub(super) use refuse;

checks! {
    "errors.create.no-name" Must "CreateVolume": "CreateVolume without a name is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE]
        (refuse!(INVALID, |s| v1::CreateVolumeRequest { name: String::new(), ..s.create_request() }));
    "errors.create.no-capabilities" Must "CreateVolume": "CreateVolume without volume_capabilities is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE]
        (refuse!(INVALID, |s| v1::CreateVolumeRequest { volume_capabilities: Vec::new(), ..s.create_request() }));
    "errors.create.no-access-type" Must "CreateVolume": "A capability that is neither mount nor block is answered with INVALID_ARGUMENT.";
        "Check access_type of every capability."; [CREATE]
        (refuse!(INVALID, |s| with_capability(s, v1::VolumeCapability { access_type: None, ..s.capability() })));
    "errors.create.no-access-mode" Must "CreateVolume": "A capability without an access mode is answered with INVALID_ARGUMENT.";
        "Check access_mode of every capability; UNKNOWN is none."; [CREATE]
        (refuse!(INVALID, |s| with_capability(s, v1::VolumeCapability { access_mode: None, ..s.capability() })));
    "errors.create.negative-size" Must "CreateVolume": "A negative size is refused with INVALID_ARGUMENT or OUT_OF_RANGE.";
        "Values of capacity_range must not be negative."; [CREATE]
        (refuse!(&[Code::InvalidArgument, Code::OutOfRange], |s| with_range(s, -1, 0)));
    "errors.create.limit-below-required" Must "CreateVolume": "A limit_bytes below required_bytes is refused with OUT_OF_RANGE or INVALID_ARGUMENT.";
        "Compare the two; no size fits both."; [CREATE]
        (refuse!(&[Code::OutOfRange, Code::InvalidArgument], |s| with_range(s, s.options.size, s.options.size / 2)));
    "errors.create.impossible-size" Should "CreateVolume": "A size that no storage has is refused with OUT_OF_RANGE or RESOURCE_EXHAUSTED.";
        "Compare the size with what the storage system can do before anything is made."; [CREATE]
        create_impossible;
    "errors.create.snapshot-missing" Must "CreateVolume": "A source snapshot that does not exist is answered with NOT_FOUND.";
        "Look the source up before creating anything."; [CREATE, SNAPSHOTS]
        (refuse!(NOT_FOUND, |s| with_source(s, from_snapshot(&v1::Snapshot { snapshot_id: MISSING.to_owned(), ..Default::default() }))));
    "errors.create.volume-missing" Must "CreateVolume": "A source volume that does not exist is answered with NOT_FOUND.";
        "Look the source up before creating anything."; [CREATE, Need::Controller(Controller::CloneVolume)]
        (refuse!(NOT_FOUND, |s| with_source(s, from_volume(&v1::Volume { volume_id: MISSING.to_owned(), ..Default::default() }))));
    "errors.create.other-size" Must "CreateVolume": "A name that exists with a size outside of the range is answered with ALREADY_EXISTS.";
        "Compare the existing volume with the request; do not hand out a volume that does not fit."; [CREATE] other_size;
    "errors.create.other-source" Must "CreateVolume": "A name that exists with another source is answered with ALREADY_EXISTS.";
        "Record the source of a volume, and compare it."; [CREATE, SNAPSHOTS] other_source;
    "errors.create.smaller-than-source" Must "CreateVolume": "A volume smaller than its source snapshot is refused with OUT_OF_RANGE, or made as large as it.";
        "Compare limit_bytes with the size of the source."; [CREATE, SNAPSHOTS] smaller_than_source;
    "errors.delete.no-id" Must "DeleteVolume": "DeleteVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE] (refuse!(INVALID, |_s| v1::DeleteVolumeRequest::default()));
    "errors.delete.missing" Must "DeleteVolume": "DeleteVolume of a volume that does not exist is answered with OK.";
        "What is gone is deleted; an id that cannot be one of this driver is gone as well."; [CREATE] delete_missing;
    "errors.attach.no-volume" Must "ControllerPublishVolume": "ControllerPublishVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Attach]
        (refuse!(INVALID, |s| v1::ControllerPublishVolumeRequest { volume_id: String::new(), ..missing_attach(s) }));
    "errors.attach.no-node" Must "ControllerPublishVolume": "ControllerPublishVolume without node_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Attach]
        (refuse!(INVALID, |s| v1::ControllerPublishVolumeRequest { node_id: String::new(), ..missing_attach(s) }));
    "errors.attach.no-capability" Must "ControllerPublishVolume": "ControllerPublishVolume without volume_capability is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Attach]
        (refuse!(INVALID, |s| v1::ControllerPublishVolumeRequest { volume_capability: None, ..missing_attach(s) }));
    "errors.attach.missing" Must "ControllerPublishVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up before the node."; [Need::Attach] (refuse!(NOT_FOUND, |s| missing_attach(s)));
    "errors.attach.node-missing" Must "ControllerPublishVolume": "A node that does not exist is answered with NOT_FOUND.";
        "Know which nodes there are."; [Need::Volumes, Need::Attach]
        (refuse!(NOT_FOUND, |s| v1::ControllerPublishVolumeRequest { node_id: MISSING.to_owned(), ..s.attach_request(&s.volume().await?) }));
    "errors.attach.other-mode" Must "ControllerPublishVolume": "A volume that is attached for reading and asked for writing is answered with ALREADY_EXISTS.";
        "Record how a volume is attached, and compare."; [Need::Volumes, Need::Attach, Need::Controller(Controller::PublishReadonly)] attach_other_mode;
    "errors.attach.limit" Must "ControllerPublishVolume": "A volume more than max_volumes_per_node is refused with RESOURCE_EXHAUSTED.";
        "Count what is attached to the node; NodeGetInfo says how many it takes."; [Need::Volumes, Need::Attach] attach_limit;
    "errors.detach.no-id" Must "ControllerUnpublishVolume": "ControllerUnpublishVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Attach] (refuse!(INVALID, |_s| v1::ControllerUnpublishVolumeRequest::default()));
    "errors.validate.no-id" Must "ValidateVolumeCapabilities": "ValidateVolumeCapabilities without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE]
        (refuse!(INVALID, |s| v1::ValidateVolumeCapabilitiesRequest { volume_capabilities: vec![s.capability()], ..Default::default() }));
    "errors.validate.no-capabilities" Must "ValidateVolumeCapabilities": "ValidateVolumeCapabilities without capabilities is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE]
        (refuse!(INVALID, |s| v1::ValidateVolumeCapabilitiesRequest { volume_id: s.volume().await?.volume_id, ..Default::default() }));
    "errors.validate.missing" Must "ValidateVolumeCapabilities": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [CREATE]
        (refuse!(NOT_FOUND, |s| v1::ValidateVolumeCapabilitiesRequest { volume_id: MISSING.to_owned(), volume_capabilities: vec![s.capability()], ..Default::default() }));
    "errors.list.token" Must "ListVolumes": "A starting_token that is not valid is answered with ABORTED.";
        "Parse the token; one that this driver cannot have given is ABORTED."; [LIST]
        (refuse!(&[Code::Aborted], |_s| v1::ListVolumesRequest { starting_token: "no token of any driver".to_owned(), ..Default::default() }));
    "errors.list.negative" Must "ListVolumes": "A negative max_entries is answered with INVALID_ARGUMENT.";
        "Check max_entries."; [LIST]
        (refuse!(INVALID, |_s| v1::ListVolumesRequest { max_entries: -1, ..Default::default() }));
    "errors.snapshot.no-name" Must "CreateSnapshot": "CreateSnapshot without a name is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE, SNAPSHOTS]
        (refuse!(INVALID, |s| v1::CreateSnapshotRequest { name: String::new(), ..s.snapshot_request(&s.volume().await?) }));
    "errors.snapshot.no-source" Must "CreateSnapshot": "CreateSnapshot without source_volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [SNAPSHOTS]
        (refuse!(INVALID, |s| s.snapshot_request(&v1::Volume::default())));
    "errors.snapshot.source-missing" Should "CreateSnapshot": "A source volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [SNAPSHOTS]
        (refuse!(NOT_FOUND, |s| s.snapshot_request(&v1::Volume { volume_id: MISSING.to_owned(), ..Default::default() })));
    "errors.snapshot.other-source" Must "CreateSnapshot": "A name that exists with another source is answered with ALREADY_EXISTS.";
        "Record the source of a snapshot, and compare it."; [CREATE, SNAPSHOTS] snapshot_other_source;
    "errors.delete-snapshot.no-id" Must "DeleteSnapshot": "DeleteSnapshot without snapshot_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [SNAPSHOTS] (refuse!(INVALID, |_s| v1::DeleteSnapshotRequest::default()));
    "errors.delete-snapshot.missing" Must "DeleteSnapshot": "DeleteSnapshot of a snapshot that does not exist is answered with OK.";
        "What is gone is deleted."; [SNAPSHOTS] delete_missing_snapshot;
    "errors.list-snapshots.token" Must "ListSnapshots": "A starting_token that is not valid is answered with ABORTED.";
        "Parse the token; one that this driver cannot have given is ABORTED."; [LIST_SNAPSHOTS]
        (refuse!(&[Code::Aborted], |_s| v1::ListSnapshotsRequest { starting_token: "no token of any driver".to_owned(), ..Default::default() }));
    "errors.list-snapshots.negative" Must "ListSnapshots": "A negative max_entries is answered with INVALID_ARGUMENT.";
        "Check max_entries."; [LIST_SNAPSHOTS]
        (refuse!(INVALID, |_s| v1::ListSnapshotsRequest { max_entries: -1, ..Default::default() }));
    "errors.get-snapshot.no-id" Must "GetSnapshot": "GetSnapshot without snapshot_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Controller(Controller::GetSnapshot)] (refuse!(INVALID, |_s| v1::GetSnapshotRequest::default()));
    "errors.get-snapshot.missing" Must "GetSnapshot": "A snapshot that does not exist is answered with NOT_FOUND.";
        "Look the snapshot up."; [Need::Controller(Controller::GetSnapshot)]
        (refuse!(NOT_FOUND, |_s| v1::GetSnapshotRequest { snapshot_id: MISSING.to_owned(), ..Default::default() }));
    "errors.expand.no-id" Must "ControllerExpandVolume": "ControllerExpandVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [EXPAND]
        (refuse!(INVALID, |s| v1::ControllerExpandVolumeRequest { capacity_range: super::lifecycle::larger(s), ..Default::default() }));
    "errors.expand.no-range" Must "ControllerExpandVolume": "ControllerExpandVolume without capacity_range is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE, EXPAND]
        (refuse!(INVALID, |s| v1::ControllerExpandVolumeRequest { volume_id: s.volume().await?.volume_id, ..Default::default() }));
    "errors.expand.missing" Must "ControllerExpandVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [EXPAND]
        (refuse!(NOT_FOUND, |s| v1::ControllerExpandVolumeRequest { volume_id: MISSING.to_owned(), capacity_range: super::lifecycle::larger(s), ..Default::default() }));
    "errors.expand.smaller" Must "ControllerExpandVolume": "A volume that is large enough already is answered with OK, and keeps its size.";
        "Never shrink; answer with the size that the volume has."; [CREATE, EXPAND] expand_smaller;
    "errors.expand.impossible-size" Should "ControllerExpandVolume": "A size that no storage has is refused with OUT_OF_RANGE or RESOURCE_EXHAUSTED.";
        "Compare the size with what the storage system can do."; [CREATE, EXPAND] expand_impossible;
    "errors.modify.no-id" Must "ControllerModifyVolume": "ControllerModifyVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [MODIFY] (refuse!(INVALID, |s| modify(s, "")));
    "errors.modify.missing" Must "ControllerModifyVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [MODIFY, Need::MutableParameters] (refuse!(NOT_FOUND, |s| modify(s, MISSING)));
    "errors.modify.unknown-parameter" Must "ControllerModifyVolume": "A parameter that the driver does not know is answered with INVALID_ARGUMENT.";
        "Refuse keys that are not yours: a typing error must not look like success."; [CREATE, MODIFY]
        (refuse!(INVALID, |s| v1::ControllerModifyVolumeRequest {
            volume_id: s.volume().await?.volume_id,
            mutable_parameters: [("berth-certify-unknown".to_owned(), "x".to_owned())].into(),
            ..Default::default()
        }));
    "errors.get-volume.no-id" Must "ControllerGetVolume": "ControllerGetVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Controller(Controller::GetVolume)] (refuse!(INVALID, |_s| v1::ControllerGetVolumeRequest::default()));
    "errors.get-volume.missing" Must "ControllerGetVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [Need::Controller(Controller::GetVolume)]
        (refuse!(NOT_FOUND, |_s| v1::ControllerGetVolumeRequest { volume_id: MISSING.to_owned() }));
    "errors.health.no-id" Must "ControllerGetVolumeHealth": "ControllerGetVolumeHealth without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [HEALTH] (refuse!(INVALID, |_s| v1::ControllerGetVolumeHealthRequest::default()));
    "errors.health.missing" Must "ControllerGetVolumeHealth": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [HEALTH]
        (refuse!(NOT_FOUND, |_s| v1::ControllerGetVolumeHealthRequest { volume_id: MISSING.to_owned(), ..Default::default() }));
    "errors.group.no-name" Must "CreateVolumeGroupSnapshot": "CreateVolumeGroupSnapshot without a name is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [CREATE, GROUP]
        (refuse!(INVALID, |s| v1::CreateVolumeGroupSnapshotRequest { source_volume_ids: vec![s.volume().await?.volume_id], ..Default::default() }));
    "errors.group.no-sources" Must "CreateVolumeGroupSnapshot": "CreateVolumeGroupSnapshot without source_volume_ids is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [GROUP]
        (refuse!(INVALID, |s| v1::CreateVolumeGroupSnapshotRequest { name: s.name("group"), ..Default::default() }));
    "errors.group.get-no-id" Must "GetVolumeGroupSnapshot": "GetVolumeGroupSnapshot without an id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [GROUP] (refuse!(INVALID, |_s| v1::GetVolumeGroupSnapshotRequest::default()));
    "errors.group.get-missing" Must "GetVolumeGroupSnapshot": "A group snapshot that does not exist is answered with NOT_FOUND.";
        "Look the group up."; [GROUP]
        (refuse!(NOT_FOUND, |_s| v1::GetVolumeGroupSnapshotRequest { group_snapshot_id: MISSING.to_owned(), ..Default::default() }));
    "errors.group.delete-no-id" Must "DeleteVolumeGroupSnapshot": "DeleteVolumeGroupSnapshot without an id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [GROUP] (refuse!(INVALID, |_s| v1::DeleteVolumeGroupSnapshotRequest::default()));
    "errors.group.delete-missing" Must "DeleteVolumeGroupSnapshot": "DeleteVolumeGroupSnapshot of a group that does not exist is answered with OK.";
        "What is gone is deleted."; [GROUP] delete_missing_group;
}

fn with_capability(session: &Session, capability: v1::VolumeCapability) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest { volume_capabilities: vec![capability], ..session.create_request() }
}

fn with_range(session: &Session, required_bytes: i64, limit_bytes: i64) -> v1::CreateVolumeRequest {
    let capacity_range = Some(v1::CapacityRange { required_bytes, limit_bytes });
    v1::CreateVolumeRequest { capacity_range, ..session.create_request() }
}

fn with_source(session: &Session, source: v1::VolumeContentSource) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest { volume_content_source: Some(source), ..session.create_request() }
}

fn missing_attach(session: &Session) -> v1::ControllerPublishVolumeRequest {
    session.attach_request(&v1::Volume { volume_id: MISSING.to_owned(), ..Default::default() })
}

fn modify(session: &Session, volume_id: &str) -> v1::ControllerModifyVolumeRequest {
    v1::ControllerModifyVolumeRequest {
        volume_id: volume_id.to_owned(),
        mutable_parameters: session.options.mutable_parameters.clone(),
        ..Default::default()
    }
}

async fn other_size(session: &Session) -> Outcome {
    let first = session.create_request();
    let volume = session.volume_from(first.clone()).await?;
    if volume.capacity_bytes == 0 {
        return crate::session::not_run("the driver does not say how large its volumes are");
    }
    let capacity_range = super::lifecycle::larger(session);
    refused(session, v1::CreateVolumeRequest { capacity_range, ..first }, &[Code::AlreadyExists]).await
}

async fn other_source(session: &Session) -> Outcome {
    let first = session.create_request();
    let volume = session.volume_from(first.clone()).await?;
    let source = from_snapshot(&session.snapshot(&volume).await?);
    let request = v1::CreateVolumeRequest { volume_content_source: Some(source), ..first };
    refused(session, request, &[Code::AlreadyExists]).await
}

async fn smaller_than_source(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let snapshot = session.snapshot(&volume).await?;
    if snapshot.size_bytes < 2 {
        return crate::session::not_run("the snapshot does not say how large a volume must be");
    }
    let limit_bytes = snapshot.size_bytes / 2;
    let capacity_range = Some(v1::CapacityRange { required_bytes: limit_bytes, limit_bytes });
    let source = Some(from_snapshot(&snapshot));
    let request =
        v1::CreateVolumeRequest { capacity_range, volume_content_source: source, ..session.create_request() };
    match session.call(request).await {
        Err(status) if matches!(status.code(), Code::OutOfRange | Code::InvalidArgument) => Ok(()),
        Err(status) => {
            broken(format!("CreateVolume answered {}, expected is OUT_OF_RANGE", describe(&status)))
        }
        Ok(_) => broken(format!(
            "a volume of at most {limit_bytes} bytes was made from {} bytes",
            snapshot.size_bytes
        )),
    }
}

async fn delete_missing(session: &Session) -> Outcome {
    let request = v1::DeleteVolumeRequest { volume_id: MISSING.to_owned(), ..Default::default() };
    session.call(request).await.or_broken("DeleteVolume").map(drop)
}

async fn attach_other_mode(session: &Session) -> Outcome {
    let request = session.attach_request(&session.volume().await?);
    session.call(request.clone()).await.or_not_run("ControllerPublishVolume")?;
    let request = v1::ControllerPublishVolumeRequest { readonly: true, ..request };
    refused(session, request, &[Code::AlreadyExists]).await
}

async fn attach_limit(session: &Session) -> Outcome {
    let limit = session.node.max_volumes_per_node;
    if limit <= 0 {
        return not_run("NodeGetInfo names no max_volumes_per_node");
    }
    if limit > MOST_ATTACHED {
        return not_run(format!("the node takes {limit} volumes; more than {MOST_ATTACHED} are not tried"));
    }
    for number in 0..limit {
        let request = session.attach_request(&session.volume().await?);
        let what = format!("attaching volume {} of {limit}", number + 1);
        session.call(request).await.or_broken(&what)?;
    }
    refused(session, session.attach_request(&session.volume().await?), &[Code::ResourceExhausted]).await
}

async fn snapshot_other_source(session: &Session) -> Outcome {
    let (first, second) = (session.volume().await?, session.volume().await?);
    let request = session.snapshot_request(&first);
    session.call(request.clone()).await.or_not_run("CreateSnapshot")?;
    let request = v1::CreateSnapshotRequest { source_volume_id: second.volume_id, ..request };
    refused(session, request, &[Code::AlreadyExists]).await
}

async fn delete_missing_snapshot(session: &Session) -> Outcome {
    let request = v1::DeleteSnapshotRequest { snapshot_id: MISSING.to_owned(), ..Default::default() };
    session.call(request).await.or_broken("DeleteSnapshot").map(drop)
}

async fn expand_smaller(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let range = v1::CapacityRange { required_bytes: session.options.size / 2, limit_bytes: 0 };
    let request = v1::ControllerExpandVolumeRequest {
        volume_id: volume.volume_id,
        capacity_range: Some(range),
        volume_capability: Some(session.capability()),
        ..Default::default()
    };
    let answer =
        session.call(request).await.or_broken("ControllerExpandVolume to less than the volume has")?;
    ensure(answer.capacity_bytes >= volume.capacity_bytes, || {
        format!("the volume of {} bytes became one of {}", volume.capacity_bytes, answer.capacity_bytes)
    })
}

async fn create_impossible(session: &Session) -> Outcome {
    too_large(session, with_range(session, i64::MAX, 0)).await
}

/// A driver whose volumes have no size of their own may take any.
async fn too_large<C: Request>(session: &Session, request: C) -> Outcome {
    match session.call(request).await {
        Ok(_) => not_run("the driver takes any size"),
        Err(status) if matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted) => Ok(()),
        Err(status) => {
            Err(status).or_broken("the call should answer OUT_OF_RANGE or RESOURCE_EXHAUSTED, and")
        }
    }
}

async fn expand_impossible(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let request = v1::ControllerExpandVolumeRequest {
        volume_id: volume.volume_id,
        capacity_range: Some(v1::CapacityRange { required_bytes: i64::MAX, limit_bytes: 0 }),
        volume_capability: Some(session.capability()),
        ..Default::default()
    };
    too_large(session, request).await
}

async fn delete_missing_group(session: &Session) -> Outcome {
    let request =
        v1::DeleteVolumeGroupSnapshotRequest { group_snapshot_id: MISSING.to_owned(), ..Default::default() };
    session.call(request).await.or_broken("DeleteVolumeGroupSnapshot").map(drop)
}
