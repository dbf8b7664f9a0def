//! The error tables of the Node service: one check for each row.

use berth_csi::{NodeCapability as Node, v1};
use tonic::Code;

use super::errors::{MISSING, refused};
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Placed, Session};

const STAGE: Need = Need::Node(Node::StageUnstageVolume);
const STATS: Need = Need::Node(Node::GetVolumeStats);
const EXPAND: Need = Need::Node(Node::ExpandVolume);
const HEALTH: Need = Need::Node(Node::GetVolumeHealth);
const INVALID: &[Code] = &[Code::InvalidArgument];

checks! {
    "errors.stage.no-id" Must "NodeStageVolume": "NodeStageVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STAGE] stage_no_id;
    "errors.stage.no-path" Must "NodeStageVolume": "NodeStageVolume without staging_target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STAGE] stage_no_path;
    "errors.stage.no-capability" Must "NodeStageVolume": "NodeStageVolume without volume_capability is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STAGE] stage_no_capability;
    "errors.stage.missing" Must "NodeStageVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up, or its device, before mounting; it may have been deleted."; [Need::Volumes, STAGE] stage_missing;
    "errors.unstage.no-id" Must "NodeUnstageVolume": "NodeUnstageVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [STAGE] unstage_no_id;
    "errors.unstage.no-path" Must "NodeUnstageVolume": "NodeUnstageVolume without staging_target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [STAGE] unstage_no_path;
    "errors.publish.no-id" Must "NodePublishVolume": "NodePublishVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes] publish_no_id;
    "errors.publish.no-target" Must "NodePublishVolume": "NodePublishVolume without target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes] publish_no_target;
    "errors.publish.no-capability" Must "NodePublishVolume": "NodePublishVolume without volume_capability is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes] publish_no_capability;
    "errors.publish.no-staging" Must "NodePublishVolume": "A driver that stages answers a request without staging_target_path with FAILED_PRECONDITION.";
        "Check staging_target_path if STAGE_UNSTAGE_VOLUME is announced (INVALID_ARGUMENT is taken as well)."; [Need::Volumes, STAGE] publish_no_staging;
    "errors.publish.missing" Must "NodePublishVolume": "A volume that does not exist is answered with NOT_FOUND (or FAILED_PRECONDITION: it is not staged).";
        "Look the volume up before mounting."; [Need::Volumes] publish_missing;
    "errors.publish.other-mode" Must "NodePublishVolume": "A target_path that is published with another readonly is answered with ALREADY_EXISTS.";
        "Compare the mount at target_path with the request."; [Need::Volumes] publish_other_mode;
    "errors.unpublish.no-id" Must "NodeUnpublishVolume": "NodeUnpublishVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes] unpublish_no_id;
    "errors.unpublish.no-target" Must "NodeUnpublishVolume": "NodeUnpublishVolume without target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes] unpublish_no_target;
    "errors.stats.no-id" Must "NodeGetVolumeStats": "NodeGetVolumeStats without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STATS] stats_no_id;
    "errors.stats.no-path" Must "NodeGetVolumeStats": "NodeGetVolumeStats without volume_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STATS] stats_no_path;
    "errors.stats.missing" Must "NodeGetVolumeStats": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up, and do not answer for the disk of the host."; [STATS] stats_missing;
    "errors.stats.other-path" Must "NodeGetVolumeStats": "A path at which the volume is not published is answered with NOT_FOUND.";
        "Compare volume_path with what is mounted; statfs of any path gives the host's disk."; [Need::Volumes, STATS] stats_other_path;
    "errors.node-expand.no-id" Must "NodeExpandVolume": "NodeExpandVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [EXPAND] expand_no_id;
    "errors.node-expand.no-path" Must "NodeExpandVolume": "NodeExpandVolume without volume_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, EXPAND] expand_no_path;
    "errors.node-expand.missing" Must "NodeExpandVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [EXPAND] expand_missing;
    "errors.node-health.no-id" Must "NodeGetVolumeHealth": "NodeGetVolumeHealth without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [HEALTH] health_no_id;
    "errors.node-health.missing" Must "NodeGetVolumeHealth": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [HEALTH] health_missing;
}

fn missing() -> v1::Volume {
    v1::Volume { volume_id: MISSING.to_owned(), ..Default::default() }
}

/// A volume that was deleted: a driver that finds volumes by their context gets one, and not only an unknown id.
async fn deleted(session: &Session) -> Outcome<v1::Volume> {
    let volume = session.volume().await?;
    let request = v1::DeleteVolumeRequest { volume_id: volume.volume_id.clone(), ..Default::default() };
    session.call(request).await.or_not_run("DeleteVolume")?;
    Ok(volume)
}

/// Paths for a volume that is neither attached nor staged.
fn unplaced(session: &Session, volume: v1::Volume) -> Outcome<Placed> {
    session.unplaced(volume)
}

async fn stage_no_id(session: &Session) -> Outcome {
    let placed = session.attach(&session.volume().await?).await?;
    refused(
        session,
        v1::NodeStageVolumeRequest { volume_id: String::new(), ..placed.stage_request() },
        INVALID,
    )
    .await
}

async fn stage_no_path(session: &Session) -> Outcome {
    let placed = session.attach(&session.volume().await?).await?;
    let request = v1::NodeStageVolumeRequest { staging_target_path: String::new(), ..placed.stage_request() };
    refused(session, request, INVALID).await
}

async fn stage_no_capability(session: &Session) -> Outcome {
    let placed = session.attach(&session.volume().await?).await?;
    let request = v1::NodeStageVolumeRequest { volume_capability: None, ..placed.stage_request() };
    refused(session, request, INVALID).await
}

async fn stage_missing(session: &Session) -> Outcome {
    let placed = unplaced(session, deleted(session).await?)?;
    refused(session, placed.stage_request(), &[Code::NotFound]).await
}

async fn unstage_no_id(session: &Session) -> Outcome {
    let placed = unplaced(session, v1::Volume::default())?;
    refused(session, placed.unstage_request(), INVALID).await
}

async fn unstage_no_path(session: &Session) -> Outcome {
    let request = v1::NodeUnstageVolumeRequest { volume_id: MISSING.to_owned(), ..Default::default() };
    refused(session, request, INVALID).await
}

async fn publish_no_id(session: &Session) -> Outcome {
    let placed = session.staged(&session.volume().await?).await?;
    let request = v1::NodePublishVolumeRequest { volume_id: String::new(), ..placed.publish_request() };
    refused(session, request, INVALID).await
}

async fn publish_no_target(session: &Session) -> Outcome {
    let placed = session.staged(&session.volume().await?).await?;
    let request = v1::NodePublishVolumeRequest { target_path: String::new(), ..placed.publish_request() };
    refused(session, request, INVALID).await
}

async fn publish_no_capability(session: &Session) -> Outcome {
    let placed = session.staged(&session.volume().await?).await?;
    let request = v1::NodePublishVolumeRequest { volume_capability: None, ..placed.publish_request() };
    refused(session, request, INVALID).await
}

async fn publish_no_staging(session: &Session) -> Outcome {
    let placed = session.staged(&session.volume().await?).await?;
    let request =
        v1::NodePublishVolumeRequest { staging_target_path: String::new(), ..placed.publish_request() };
    refused(session, request, &[Code::FailedPrecondition, Code::InvalidArgument]).await
}

async fn publish_missing(session: &Session) -> Outcome {
    let request = unplaced(session, deleted(session).await?)?.publish_request();
    refused(session, request, &[Code::NotFound, Code::FailedPrecondition]).await
}

async fn publish_other_mode(session: &Session) -> Outcome {
    let placed = session.published(&session.volume().await?).await?;
    let request = v1::NodePublishVolumeRequest { readonly: true, ..placed.publish_request() };
    // The mount that is there is not what this call is about, so its mode is not judged.
    match session.call_beside_others(request).await {
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        Err(status) => Err(status).or_broken("NodePublishVolume should answer ALREADY_EXISTS, and"),
        Ok(_) => crate::session::broken("NodePublishVolume answered OK, expected is ALREADY_EXISTS"),
    }
}

async fn unpublish_no_id(session: &Session) -> Outcome {
    let placed = unplaced(session, v1::Volume::default())?;
    refused(session, placed.unpublish_request(), INVALID).await
}

async fn unpublish_no_target(session: &Session) -> Outcome {
    let request = v1::NodeUnpublishVolumeRequest { volume_id: MISSING.to_owned(), ..Default::default() };
    refused(session, request, INVALID).await
}

fn stats(placed: &Placed) -> v1::NodeGetVolumeStatsRequest {
    v1::NodeGetVolumeStatsRequest {
        volume_id: placed.volume.volume_id.clone(),
        volume_path: placed.target.clone(),
        staging_target_path: placed.staging.clone(),
    }
}

async fn stats_no_id(session: &Session) -> Outcome {
    let placed = session.published(&session.volume().await?).await?;
    refused(session, v1::NodeGetVolumeStatsRequest { volume_id: String::new(), ..stats(&placed) }, INVALID)
        .await
}

async fn stats_no_path(session: &Session) -> Outcome {
    let placed = session.published(&session.volume().await?).await?;
    refused(session, v1::NodeGetVolumeStatsRequest { volume_path: String::new(), ..stats(&placed) }, INVALID)
        .await
}

async fn stats_missing(session: &Session) -> Outcome {
    refused(session, stats(&unplaced(session, missing())?), &[Code::NotFound]).await
}

async fn stats_other_path(session: &Session) -> Outcome {
    let placed = session.published(&session.volume().await?).await?;
    let volume_path = session.directory().display().to_string();
    refused(session, v1::NodeGetVolumeStatsRequest { volume_path, ..stats(&placed) }, &[Code::NotFound]).await
}

async fn expand_no_id(session: &Session) -> Outcome {
    let placed = unplaced(session, v1::Volume::default())?;
    refused(session, super::lifecycle::node_expand_request(session, &placed), INVALID).await
}

async fn expand_no_path(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let placed = Placed { target: String::new(), ..unplaced(session, volume)? };
    refused(session, super::lifecycle::node_expand_request(session, &placed), INVALID).await
}

async fn expand_missing(session: &Session) -> Outcome {
    let placed = unplaced(session, missing())?;
    refused(session, super::lifecycle::node_expand_request(session, &placed), &[Code::NotFound]).await
}

async fn health_no_id(session: &Session) -> Outcome {
    let placed = unplaced(session, v1::Volume::default())?;
    let volume_publish_path = placed.target;
    let request = v1::NodeGetVolumeHealthRequest { volume_publish_path, ..Default::default() };
    refused(session, request, INVALID).await
}

async fn health_missing(session: &Session) -> Outcome {
    let placed = unplaced(session, missing())?;
    let request = v1::NodeGetVolumeHealthRequest {
        volume_id: placed.volume.volume_id,
        volume_publish_path: placed.target,
        staging_target_path: placed.staging,
    };
    refused(session, request, &[Code::NotFound]).await
}
