//! Every call again: after its answer, and after its caller went away without one.

use std::time::Duration;

use berth_csi::{ControllerCapability as Controller, NodeCapability as Node, v1};

use super::lifecycle::{expand_request, node_expand_request};
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Request, Session, ensure};

/// After how long callers go away: before, while and after the driver works.
const LEAVE_AFTER: [Duration; 3] =
    [Duration::from_micros(400), Duration::from_millis(3), Duration::from_millis(15)];

const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);
const SNAPSHOTS: Need = Need::Controller(Controller::CreateDeleteSnapshot);
const STAGE: Need = Need::Node(Node::StageUnstageVolume);

checks! {
    "repeat.create" Must "CreateVolume": "The same CreateVolume again answers with the same volume.";
        "Find the volume by its name before creating one."; [CREATE] create;
    "repeat.delete" Must "DeleteVolume": "The same DeleteVolume again is answered with OK.";
        "A volume that is gone is deleted."; [CREATE] delete;
    "repeat.attach" Must "ControllerPublishVolume": "The same ControllerPublishVolume again is answered with OK and the same publish_context.";
        "A volume that is attached as asked for is done."; [Need::Volumes, Need::Attach] attach;
    "repeat.detach" Must "ControllerUnpublishVolume": "The same ControllerUnpublishVolume again is answered with OK.";
        "A volume that is not attached is detached."; [Need::Volumes, Need::Attach] detach;
    "repeat.stage" Must "NodeStageVolume": "The same NodeStageVolume again is answered with OK.";
        "Look whether the volume is staged as asked for."; [Need::Volumes, STAGE] stage;
    "repeat.publish" Must "NodePublishVolume": "The same NodePublishVolume again is answered with OK.";
        "Look whether the volume is mounted at target_path as asked for."; [Need::Volumes] publish;
    "repeat.unpublish" Must "NodeUnpublishVolume": "The same NodeUnpublishVolume again is answered with OK.";
        "A target_path that is gone is unpublished."; [Need::Volumes] unpublish;
    "repeat.unstage" Must "NodeUnstageVolume": "The same NodeUnstageVolume again is answered with OK.";
        "A volume that is not staged is unstaged."; [Need::Volumes, STAGE] unstage;
    "repeat.snapshot" Must "CreateSnapshot": "The same CreateSnapshot again answers with the same snapshot and the same time.";
        "Find the snapshot by its name before taking one; keep its creation time."; [CREATE, SNAPSHOTS] snapshot;
    "repeat.delete-snapshot" Must "DeleteSnapshot": "The same DeleteSnapshot again is answered with OK.";
        "A snapshot that is gone is deleted."; [CREATE, SNAPSHOTS] delete_snapshot;
    "repeat.expand" Must "ControllerExpandVolume": "The same ControllerExpandVolume again is answered with OK and the same size.";
        "A volume that has the size is done."; [CREATE, Need::Controller(Controller::ExpandVolume)] expand;
    "repeat.node-expand" Must "NodeExpandVolume": "The same NodeExpandVolume again is answered with OK.";
        "A filesystem that has the size is done."; [Need::Volumes, Need::Node(Node::ExpandVolume)] node_expand;
    "lost.create" Must "CreateVolume": "After a CreateVolume whose caller went away, the same call succeeds, and there is one volume.";
        "Find what the first call made, and release its locks when it ends."; [CREATE] lost_create;
    "lost.delete" Must "DeleteVolume": "After a DeleteVolume whose caller went away, the same call succeeds.";
        "Release locks when a call is cancelled."; [CREATE] lost_delete;
    "lost.snapshot" Must "CreateSnapshot": "After a CreateSnapshot whose caller went away, the same call succeeds.";
        "Find what the first call made."; [CREATE, SNAPSHOTS] lost_snapshot;
    "lost.stage" Must "NodeStageVolume": "After a NodeStageVolume whose caller went away, the same call succeeds.";
        "Finish or undo what was begun; release locks when a call is cancelled."; [Need::Volumes, STAGE] lost_stage;
    "lost.publish" Must "NodePublishVolume": "After a NodePublishVolume whose caller went away, the same call succeeds, with one mount.";
        "Finish or undo what was begun; release locks when a call is cancelled."; [Need::Volumes] lost_publish;
    "lost.unpublish" Must "NodeUnpublishVolume": "After a NodeUnpublishVolume whose caller went away, the same call succeeds.";
        "Release locks when a call is cancelled."; [Need::Volumes] lost_unpublish;
}

/// Makes a call a first time, as a preparation, and a second and third time, as the check.
async fn again<C: Request>(session: &Session, request: C) -> Outcome<(C::Answer, C::Answer)> {
    let method = C::METHOD.rsplit('/').next().unwrap_or_default();
    let first = session.call(request.clone()).await.or_not_run(method)?;
    session.call(request.clone()).await.or_broken(&format!("the second {method}"))?;
    let third = session.call(request).await.or_broken(&format!("the third {method}"))?;
    Ok((first, third))
}

/// Leaves a call alone at different moments, and then makes it again.
async fn after_leaving<C: Request>(session: &Session, request: C) -> Outcome<C::Answer> {
    let method = C::METHOD.rsplit('/').next().unwrap_or_default();
    for after in LEAVE_AFTER {
        session.call_and_leave(request.clone(), after).await;
    }
    session.call_until_settled(request).await.or_broken(&format!("{method} after its caller went away"))
}

async fn create(session: &Session) -> Outcome {
    let (first, second) = again(session, session.create_request()).await?;
    let (first, second) = (first.volume.unwrap_or_default(), second.volume.unwrap_or_default());
    ensure(first.volume_id == second.volume_id && first.capacity_bytes == second.capacity_bytes, || {
        format!("first {first:?}, then {second:?}")
    })
}

async fn delete(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    again(session, v1::DeleteVolumeRequest { volume_id, ..Default::default() }).await.map(drop)
}

async fn attach(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let (first, second) = again(session, session.attach_request(&volume)).await?;
    ensure(first.publish_context == second.publish_context, || {
        format!("first {:?}, then {:?}", first.publish_context, second.publish_context)
    })
}

async fn detach(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    again(session, session.detach_request(&prepared.volume)).await.map(drop)
}

async fn stage(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    again(session, prepared.stage_request()).await.map(drop)
}

async fn publish(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    again(session, prepared.publish_request()).await.map(drop)
}

async fn unpublish(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    again(session, prepared.unpublish_request()).await.map(drop)
}

async fn unstage(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    again(session, prepared.unstage_request()).await.map(drop)
}

async fn snapshot(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let (first, second) = again(session, session.snapshot_request(&volume)).await?;
    let (first, second) = (first.snapshot.unwrap_or_default(), second.snapshot.unwrap_or_default());
    ensure(first.snapshot_id == second.snapshot_id && first.creation_time == second.creation_time, || {
        format!("first {first:?}, then {second:?}")
    })
}

async fn delete_snapshot(session: &Session) -> Outcome {
    let snapshot_id = session.snapshot(&session.volume().await?).await?.snapshot_id;
    again(session, v1::DeleteSnapshotRequest { snapshot_id, ..Default::default() }).await.map(drop)
}

async fn expand(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let (first, second) = again(session, expand_request(session, &volume)).await?;
    ensure(first.capacity_bytes == second.capacity_bytes, || {
        format!("first {} bytes, then {}", first.capacity_bytes, second.capacity_bytes)
    })
}

async fn node_expand(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    if session.identity.can(Controller::ExpandVolume) {
        session.call(expand_request(session, &prepared.volume)).await.or_not_run("ControllerExpandVolume")?;
    }
    again(session, node_expand_request(session, &prepared)).await.map(drop)
}

async fn lost_create(session: &Session) -> Outcome {
    let request = session.create_request();
    let first = after_leaving(session, request.clone()).await?.volume.unwrap_or_default();
    let second = session.call(request).await.or_not_run("CreateVolume")?.volume.unwrap_or_default();
    ensure(first.volume_id == second.volume_id, || {
        format!("first {:?}, then {:?}", first.volume_id, second.volume_id)
    })
}

async fn lost_delete(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    after_leaving(session, v1::DeleteVolumeRequest { volume_id, ..Default::default() }).await.map(drop)
}

async fn lost_snapshot(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    after_leaving(session, session.snapshot_request(&volume)).await.map(drop)
}

async fn lost_stage(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    after_leaving(session, prepared.stage_request()).await.map(drop)
}

async fn lost_publish(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    after_leaving(session, prepared.publish_request()).await?;
    let mounts = session.driver.mounts().unwrap_or_default();
    let here = mounts.iter().filter(|mount| mount.target == std::path::Path::new(&prepared.target)).count();
    ensure(here <= 1, || format!("{here} mounts are stacked at {}", prepared.target))
}

async fn lost_unpublish(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    after_leaving(session, prepared.unpublish_request()).await.map(drop)
}
