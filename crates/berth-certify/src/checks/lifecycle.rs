//! The way of a volume: each call succeeds where it should.

use berth_csi::{ControllerCapability as Controller, NodeCapability as Node, v1};
use tonic::Code;

use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Session, describe, ensure, not_run};

const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);

checks! {
    "lifecycle.create" Must "CreateVolume": "CreateVolume creates a volume of the size that is asked for.";
        "See the request and the driver's log."; [CREATE] create;
    "lifecycle.create-any-size" Must "CreateVolume": "CreateVolume without a capacity_range creates a volume of a size that the driver chooses.";
        "capacity_range is optional: have a default size."; [CREATE] create_any_size;
    "lifecycle.delete" Must "DeleteVolume": "DeleteVolume deletes a volume.";
        "See the request and the driver's log."; [CREATE] delete;
    "lifecycle.validate" Must "ValidateVolumeCapabilities": "ValidateVolumeCapabilities confirms what the volume was created with.";
        "Answer with confirmed, and repeat the capabilities there."; [CREATE] validate;
    "lifecycle.attach" Must "ControllerPublishVolume": "ControllerPublishVolume attaches a volume to the node that NodeGetInfo names.";
        "Accept node_id as NodeGetInfo gives it."; [Need::Volumes, Need::Attach] attach;
    "lifecycle.detach" Must "ControllerUnpublishVolume": "ControllerUnpublishVolume detaches a volume.";
        "See the request and the driver's log."; [Need::Volumes, Need::Attach] detach;
    "lifecycle.detach-everywhere" Must "ControllerUnpublishVolume": "ControllerUnpublishVolume without node_id detaches a volume from all nodes.";
        "An empty node_id means every node; it is no missing field."; [Need::Volumes, Need::Attach] detach_everywhere;
    "lifecycle.stage" Must "NodeStageVolume": "NodeStageVolume stages a volume.";
        "See the request and the driver's log."; [Need::Volumes, Need::Node(Node::StageUnstageVolume)] stage;
    "lifecycle.publish" Must "NodePublishVolume": "NodePublishVolume publishes a volume, also where target_path does not exist yet.";
        "Create target_path: the orchestrator creates its parent only."; [Need::Volumes] publish;
    "lifecycle.unpublish" Must "NodeUnpublishVolume": "NodeUnpublishVolume undoes NodePublishVolume.";
        "See the request and the driver's log."; [Need::Volumes] unpublish;
    "lifecycle.unstage" Must "NodeUnstageVolume": "NodeUnstageVolume undoes NodeStageVolume.";
        "See the request and the driver's log."; [Need::Volumes, Need::Node(Node::StageUnstageVolume)] unstage;
    "lifecycle.stats" Must "NodeGetVolumeStats": "NodeGetVolumeStats answers for a published volume.";
        "Answer for target_path and for staging_target_path."; [Need::Volumes, Need::Node(Node::GetVolumeStats)] stats;
    "lifecycle.snapshot" Must "CreateSnapshot": "CreateSnapshot takes a snapshot, and DeleteSnapshot deletes it.";
        "See the request and the driver's log."; [CREATE, Need::Controller(Controller::CreateDeleteSnapshot)] snapshot;
    "lifecycle.restore" Must "CreateVolume": "CreateVolume creates a volume from a snapshot.";
        "See the request and the driver's log."; [CREATE, Need::Controller(Controller::CreateDeleteSnapshot)] restore;
    "lifecycle.clone" Must "CreateVolume": "CreateVolume creates a volume from a volume.";
        "See the request and the driver's log."; [CREATE, Need::Controller(Controller::CloneVolume)] clone;
    "lifecycle.expand" Must "ControllerExpandVolume": "ControllerExpandVolume makes a volume larger.";
        "See the request and the driver's log."; [CREATE, Need::Controller(Controller::ExpandVolume)] expand;
    "lifecycle.node-expand" Must "NodeExpandVolume": "NodeExpandVolume succeeds for a published volume after ControllerExpandVolume.";
        "Grow the filesystem at volume_path; if there is nothing to grow, answer OK."; [Need::Volumes, Need::Node(Node::ExpandVolume)] node_expand;
    "lifecycle.capacity" Must "GetCapacity": "GetCapacity answers with a capacity that is not negative.";
        "Answer 0 if there is no room, never less."; [Need::Controller(Controller::GetCapacity)] capacity;
    "lifecycle.get-volume" Must "ControllerGetVolume": "ControllerGetVolume answers with the volume that is asked for.";
        "Answer with the volume's id and capacity."; [CREATE, Need::Controller(Controller::GetVolume)] get_volume;
    "lifecycle.get-snapshot" Must "GetSnapshot": "GetSnapshot answers with the snapshot that is asked for.";
        "Answer with the snapshot's id and source."; [CREATE, Need::Controller(Controller::GetSnapshot)] get_snapshot;
}

async fn create(session: &Session) -> Outcome {
    session.call(session.create_request()).await.or_broken("CreateVolume").map(drop)
}

async fn create_any_size(session: &Session) -> Outcome {
    // A driver that can create no volume fails elsewhere.
    session.volume().await?;
    let request = v1::CreateVolumeRequest { capacity_range: None, ..session.create_request() };
    match session.call(request).await {
        Err(status) if status.code() == Code::ResourceExhausted => {
            not_run(format!("there is no room for a volume of the driver's own size: {}", describe(&status)))
        }
        answer => answer.or_broken("CreateVolume without capacity_range").map(drop),
    }
}

async fn delete(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    session
        .call(v1::DeleteVolumeRequest { volume_id, ..Default::default() })
        .await
        .or_broken("DeleteVolume")
        .map(drop)
}

async fn validate(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let request = v1::ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id,
        volume_context: volume.volume_context,
        volume_capabilities: vec![session.capability()],
        parameters: session.options.parameters.clone(),
        ..Default::default()
    };
    let answer = session.call(request).await.or_broken("ValidateVolumeCapabilities")?;
    let Some(confirmed) = answer.confirmed else {
        return crate::session::broken(format!("nothing is confirmed: {}", answer.message));
    };
    ensure(!confirmed.volume_capabilities.is_empty(), || {
        "confirmed has no volume_capabilities, which means that nothing is supported".to_owned()
    })
}

async fn attach(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    session.call(session.attach_request(&volume)).await.or_broken("ControllerPublishVolume").map(drop)
}

async fn detach(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    session
        .call(session.detach_request(&prepared.volume))
        .await
        .or_broken("ControllerUnpublishVolume")
        .map(drop)
}

async fn detach_everywhere(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    let request = v1::ControllerUnpublishVolumeRequest {
        node_id: String::new(),
        ..session.detach_request(&prepared.volume)
    };
    session.call(request).await.or_broken("ControllerUnpublishVolume without node_id").map(drop)
}

async fn stage(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    session.call(prepared.stage_request()).await.or_broken("NodeStageVolume").map(drop)
}

async fn publish(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    session.call(prepared.publish_request()).await.or_broken("NodePublishVolume").map(drop)
}

async fn unpublish(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    session.call(prepared.unpublish_request()).await.or_broken("NodeUnpublishVolume").map(drop)
}

async fn unstage(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    session.call(prepared.unstage_request()).await.or_broken("NodeUnstageVolume").map(drop)
}

async fn stats(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    session.call(prepared.stats_request()).await.or_broken("NodeGetVolumeStats").map(drop)
}

async fn snapshot(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let answer = session.call(session.snapshot_request(&volume)).await.or_broken("CreateSnapshot")?;
    let snapshot_id = answer.snapshot.unwrap_or_default().snapshot_id;
    let request = v1::DeleteSnapshotRequest { snapshot_id, ..Default::default() };
    session.call(request).await.or_broken("DeleteSnapshot").map(drop)
}

/// A source of a new volume.
pub(super) fn from_snapshot(snapshot: &v1::Snapshot) -> v1::VolumeContentSource {
    use v1::volume_content_source::{SnapshotSource, Type};
    let source = SnapshotSource { snapshot_id: snapshot.snapshot_id.clone() };
    v1::VolumeContentSource { r#type: Some(Type::Snapshot(source)) }
}

/// A source of a new volume.
pub(super) fn from_volume(volume: &v1::Volume) -> v1::VolumeContentSource {
    use v1::volume_content_source::{Type, VolumeSource};
    let source = VolumeSource { volume_id: volume.volume_id.clone() };
    v1::VolumeContentSource { r#type: Some(Type::Volume(source)) }
}

async fn restore(session: &Session) -> Outcome {
    let snapshot = session.snapshot(&session.volume().await?).await?;
    let source = Some(from_snapshot(&snapshot));
    let request = v1::CreateVolumeRequest { volume_content_source: source, ..session.create_request() };
    session.call(request).await.or_broken("CreateVolume from a snapshot").map(drop)
}

async fn clone(session: &Session) -> Outcome {
    let source = Some(from_volume(&session.volume().await?));
    let request = v1::CreateVolumeRequest { volume_content_source: source, ..session.create_request() };
    session.call(request).await.or_broken("CreateVolume from a volume").map(drop)
}

/// Twice the size of a volume.
#[expect(clippy::unnecessary_wraps, reason = "requests hold it so")]
pub(super) fn larger(session: &Session) -> Option<v1::CapacityRange> {
    Some(v1::CapacityRange { required_bytes: session.options.size * 2, limit_bytes: 0 })
}

pub(super) fn expand_request(session: &Session, volume: &v1::Volume) -> v1::ControllerExpandVolumeRequest {
    v1::ControllerExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        capacity_range: larger(session),
        volume_capability: Some(session.capability()),
        ..Default::default()
    }
}

async fn expand(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    session.call(expand_request(session, &volume)).await.or_broken("ControllerExpandVolume").map(drop)
}

pub(super) fn node_expand_request(
    session: &Session,
    prepared: &crate::session::PreparedVolume,
) -> v1::NodeExpandVolumeRequest {
    v1::NodeExpandVolumeRequest {
        volume_id: prepared.volume.volume_id.clone(),
        volume_path: prepared.target.clone(),
        staging_target_path: prepared.staging.clone(),
        capacity_range: larger(session),
        volume_capability: Some(session.capability()),
        ..Default::default()
    }
}

async fn node_expand(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    if session.identity.can(Controller::ExpandVolume) {
        session.call(expand_request(session, &prepared.volume)).await.or_not_run("ControllerExpandVolume")?;
    }
    session.call(node_expand_request(session, &prepared)).await.or_broken("NodeExpandVolume").map(drop)
}

async fn capacity(session: &Session) -> Outcome {
    let request =
        v1::GetCapacityRequest { parameters: session.options.parameters.clone(), ..Default::default() };
    let answer = session.call(request).await.or_broken("GetCapacity")?;
    ensure(answer.available_capacity >= 0, || format!("available_capacity is {}", answer.available_capacity))
}

async fn get_volume(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    let answer = session.call(v1::ControllerGetVolumeRequest { volume_id: volume_id.clone() }).await;
    let found = answer.or_broken("ControllerGetVolume")?.volume.unwrap_or_default().volume_id;
    ensure(found == volume_id, || format!("asked for {volume_id:?}, got {found:?}"))
}

async fn get_snapshot(session: &Session) -> Outcome {
    let snapshot_id = session.snapshot(&session.volume().await?).await?.snapshot_id;
    let request = v1::GetSnapshotRequest { snapshot_id: snapshot_id.clone(), ..Default::default() };
    let found =
        session.call(request).await.or_broken("GetSnapshot")?.snapshot.unwrap_or_default().snapshot_id;
    ensure(found == snapshot_id, || format!("asked for {snapshot_id:?}, got {found:?}"))
}
