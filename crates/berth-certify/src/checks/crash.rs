//! SIGKILL before, during and after a call; then the same call again, and everything undone.

use std::time::Duration;

use berth_csi::{ControllerCapability as Controller, NodeCapability as Node, v1};

use super::lifecycle::expand_request;
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, PreparedVolume, Request, Session, ensure};

/// How long a call has been under way when the driver is killed.
const DURING: [Duration; 3] =
    [Duration::from_micros(300), Duration::from_millis(2), Duration::from_millis(8)];

const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);
const STAGE: Need = Need::Node(Node::StageUnstageVolume);

checks! {
    "crash.create" Must "CreateVolume": "A driver that is killed around CreateVolume creates the same volume when it is asked again, and deletes it.";
        "Record what exists before answering; remove what no record knows at the start."; [Need::Program, CREATE] create;
    "crash.delete" Must "DeleteVolume": "A driver that is killed around DeleteVolume deletes the volume when it is asked again.";
        "Make deletion repeatable from any point."; [Need::Program, CREATE] delete;
    "crash.attach" Must "ControllerPublishVolume": "A driver that is killed around ControllerPublishVolume attaches when it is asked again, and detaches.";
        "Keep what is attached where a restart finds it."; [Need::Program, Need::Volumes, Need::Attach] attach;
    "crash.stage" Must "NodeStageVolume": "A driver that is killed around NodeStageVolume stages when it is asked again, and unstages.";
        "Look at the mount table, not at memory."; [Need::Program, Need::Volumes, STAGE] stage;
    "crash.publish" Must "NodePublishVolume": "A driver that is killed around NodePublishVolume publishes when it is asked again, once, and unpublishes.";
        "Look at the mount table, not at memory."; [Need::Program, Need::Volumes] publish;
    "crash.unpublish" Must "NodeUnpublishVolume": "A driver that is killed around NodeUnpublishVolume unpublishes when it is asked again.";
        "Look at the mount table, not at memory."; [Need::Program, Need::Volumes] unpublish;
    "crash.unstage" Must "NodeUnstageVolume": "A driver that is killed around NodeUnstageVolume unstages when it is asked again.";
        "Look at the mount table, not at memory."; [Need::Program, Need::Volumes, STAGE] unstage;
    "crash.snapshot" Must "CreateSnapshot": "A driver that is killed around CreateSnapshot takes the same snapshot when it is asked again, and deletes it.";
        "Record what exists before answering."; [Need::Program, CREATE, Need::Controller(Controller::CreateDeleteSnapshot)] snapshot;
    "crash.expand" Must "ControllerExpandVolume": "A driver that is killed around ControllerExpandVolume expands when it is asked again.";
        "Make expansion repeatable from any point."; [Need::Program, CREATE, Need::Controller(Controller::ExpandVolume)] expand;
    "crash.list" Must "ListVolumes": "After a crash the list has the same volumes.";
        "Keep records where a restart finds them."; [Need::Program, CREATE, Need::Controller(Controller::ListVolumes)] list;
}

/// Kills the driver before, during and after a call, which must succeed at the end.
async fn around<C: Request>(session: &Session, request: C) -> Outcome<C::Answer> {
    let method = C::METHOD.rsplit('/').next().unwrap_or_default();
    session.kill_and_restart().await?;
    for after in DURING {
        session.call_and_leave(request.clone(), after).await;
        session.kill_and_restart().await?;
    }
    let repeated = session.call_until_settled(request.clone()).await;
    repeated.or_broken(&format!("{method} after the driver was killed during it"))?;
    session.kill_and_restart().await?;
    let repeated = session.call_until_settled(request).await;
    repeated.or_broken(&format!("{method} after the driver was killed after it"))
}

async fn create(session: &Session) -> Outcome {
    session.volume().await?;
    let request = session.create_request();
    let first = around(session, request.clone()).await?.volume.unwrap_or_default();
    let second =
        session.call_until_settled(request).await.or_broken("CreateVolume")?.volume.unwrap_or_default();
    ensure(first.volume_id == second.volume_id, || {
        format!("first {:?}, then {:?}", first.volume_id, second.volume_id)
    })?;
    let request = v1::DeleteVolumeRequest { volume_id: first.volume_id, ..Default::default() };
    session.call_until_settled(request).await.or_broken("DeleteVolume").map(drop)
}

async fn delete(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    around(session, v1::DeleteVolumeRequest { volume_id, ..Default::default() }).await.map(drop)
}

async fn attach(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    around(session, session.attach_request(&volume)).await?;
    session
        .call_until_settled(session.detach_request(&volume))
        .await
        .or_broken("ControllerUnpublishVolume")
        .map(drop)
}

/// How many mounts are at a path, and that nothing is left after all is undone.
fn mounts_at(session: &Session, target: &str) -> usize {
    let mounts = session.driver.mounts().unwrap_or_default();
    mounts.iter().filter(|mount| mount.target == std::path::Path::new(target)).count()
}

async fn undone(session: &Session, prepared: &PreparedVolume) -> Outcome {
    session.call_until_settled(prepared.unpublish_request()).await.or_broken("NodeUnpublishVolume")?;
    if !prepared.staging.is_empty() {
        session.call_until_settled(prepared.unstage_request()).await.or_broken("NodeUnstageVolume")?;
    }
    for path in [&prepared.target, &prepared.staging] {
        let left = mounts_at(session, path);
        ensure(left == 0, || format!("{left} mounts are left at {path}"))?;
    }
    Ok(())
}

async fn stage(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    around(session, prepared.stage_request()).await?;
    session.call_until_settled(prepared.publish_request()).await.or_broken("NodePublishVolume")?;
    undone(session, &prepared).await
}

async fn publish(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    around(session, prepared.publish_request()).await?;
    let here = mounts_at(session, &prepared.target);
    ensure(here <= 1, || format!("{here} mounts are stacked at {}", prepared.target))?;
    undone(session, &prepared).await
}

async fn unpublish(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    around(session, prepared.unpublish_request()).await?;
    undone(session, &prepared).await
}

async fn unstage(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    around(session, prepared.unstage_request()).await?;
    undone(session, &prepared).await
}

async fn snapshot(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let request = session.snapshot_request(&volume);
    let first = around(session, request.clone()).await?.snapshot.unwrap_or_default();
    let second =
        session.call_until_settled(request).await.or_broken("CreateSnapshot")?.snapshot.unwrap_or_default();
    ensure(first.snapshot_id == second.snapshot_id, || {
        format!("first {:?}, then {:?}", first.snapshot_id, second.snapshot_id)
    })?;
    let request = v1::DeleteSnapshotRequest { snapshot_id: first.snapshot_id, ..Default::default() };
    session.call_until_settled(request).await.or_broken("DeleteSnapshot").map(drop)
}

async fn expand(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    around(session, expand_request(session, &volume)).await.map(drop)
}

async fn list(session: &Session) -> Outcome {
    let id = session.volume().await?.volume_id;
    session.kill_and_restart().await?;
    let answer =
        session.call_until_settled(v1::ListVolumesRequest::default()).await.or_not_run("ListVolumes")?;
    let listed = answer.entries.into_iter().any(|entry| entry.volume.unwrap_or_default().volume_id == id);
    ensure(listed, || format!("the volume {id:?} is not in the list after a crash"))
}
