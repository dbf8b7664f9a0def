//! The error tables of the Node service: one check for each row.

use berth_csi::{NodeCapability as Node, v1};
use tonic::Code;

use super::errors::{INVALID, MISSING, NOT_FOUND, refuse, refused};
use super::lifecycle::node_expand_request;
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, PreparedVolume, Session};

const STAGE: Need = Need::Node(Node::StageUnstageVolume);
const STATS: Need = Need::Node(Node::GetVolumeStats);
const EXPAND: Need = Need::Node(Node::ExpandVolume);
const HEALTH: Need = Need::Node(Node::GetVolumeHealth);

checks! {
    "errors.stage.no-id" Must "NodeStageVolume": "NodeStageVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STAGE]
        (refuse!(INVALID, |s| v1::NodeStageVolumeRequest { volume_id: String::new(), ..attached(s).await?.stage_request() }));
    "errors.stage.no-path" Must "NodeStageVolume": "NodeStageVolume without staging_target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STAGE]
        (refuse!(INVALID, |s| v1::NodeStageVolumeRequest { staging_target_path: String::new(), ..attached(s).await?.stage_request() }));
    "errors.stage.no-capability" Must "NodeStageVolume": "NodeStageVolume without volume_capability is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STAGE]
        (refuse!(INVALID, |s| v1::NodeStageVolumeRequest { volume_capability: None, ..attached(s).await?.stage_request() }));
    "errors.stage.missing" Must "NodeStageVolume": "A volume that does not exist is answered with NOT_FOUND (or INVALID_ARGUMENT, for want of the publish_context of an attachment).";
        "Look the volume up, or its device, before mounting; it may have been deleted."; [Need::Volumes, STAGE] stage_missing;
    "errors.unstage.no-id" Must "NodeUnstageVolume": "NodeUnstageVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [STAGE]
        (refuse!(INVALID, |s| s.prepare(v1::Volume::default())?.unstage_request()));
    "errors.unstage.no-path" Must "NodeUnstageVolume": "NodeUnstageVolume without staging_target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [STAGE]
        (refuse!(INVALID, |_s| v1::NodeUnstageVolumeRequest { volume_id: MISSING.to_owned(), ..Default::default() }));
    "errors.publish.no-id" Must "NodePublishVolume": "NodePublishVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes]
        (refuse!(INVALID, |s| v1::NodePublishVolumeRequest { volume_id: String::new(), ..staged(s).await?.publish_request() }));
    "errors.publish.no-target" Must "NodePublishVolume": "NodePublishVolume without target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes]
        (refuse!(INVALID, |s| v1::NodePublishVolumeRequest { target_path: String::new(), ..staged(s).await?.publish_request() }));
    "errors.publish.no-capability" Must "NodePublishVolume": "NodePublishVolume without volume_capability is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes]
        (refuse!(INVALID, |s| v1::NodePublishVolumeRequest { volume_capability: None, ..staged(s).await?.publish_request() }));
    "errors.publish.no-staging" Must "NodePublishVolume": "A driver that stages answers a request without staging_target_path with FAILED_PRECONDITION.";
        "Check staging_target_path if STAGE_UNSTAGE_VOLUME is announced (INVALID_ARGUMENT is taken as well)."; [Need::Volumes, STAGE]
        (refuse!(&[Code::FailedPrecondition, Code::InvalidArgument], |s| v1::NodePublishVolumeRequest {
            staging_target_path: String::new(),
            ..staged(s).await?.publish_request()
        }));
    "errors.publish.missing" Must "NodePublishVolume": "A volume that does not exist is answered with NOT_FOUND (or FAILED_PRECONDITION: it is not staged).";
        "Look the volume up before mounting."; [Need::Volumes]
        (refuse!(&[Code::NotFound, Code::FailedPrecondition], |s| deleted(s).await?.publish_request()));
    "errors.publish.other-mode" Must "NodePublishVolume": "A target_path that is published with another readonly is answered with ALREADY_EXISTS.";
        "Compare the mount at target_path with the request."; [Need::Volumes] publish_other_mode;
    "errors.unpublish.no-id" Must "NodeUnpublishVolume": "NodeUnpublishVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes]
        (refuse!(INVALID, |s| s.prepare(v1::Volume::default())?.unpublish_request()));
    "errors.unpublish.no-target" Must "NodeUnpublishVolume": "NodeUnpublishVolume without target_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes]
        (refuse!(INVALID, |_s| v1::NodeUnpublishVolumeRequest { volume_id: MISSING.to_owned(), ..Default::default() }));
    "errors.stats.no-id" Must "NodeGetVolumeStats": "NodeGetVolumeStats without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STATS]
        (refuse!(INVALID, |s| v1::NodeGetVolumeStatsRequest { volume_id: String::new(), ..published(s).await?.stats_request() }));
    "errors.stats.no-path" Must "NodeGetVolumeStats": "NodeGetVolumeStats without volume_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, STATS]
        (refuse!(INVALID, |s| v1::NodeGetVolumeStatsRequest { volume_path: String::new(), ..published(s).await?.stats_request() }));
    "errors.stats.missing" Must "NodeGetVolumeStats": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up, and do not answer for the disk of the host."; [STATS]
        (refuse!(NOT_FOUND, |s| missing(s)?.stats_request()));
    "errors.stats.other-path" Must "NodeGetVolumeStats": "A path at which the volume is not published is answered with NOT_FOUND.";
        "Compare volume_path with what is mounted; statfs of any path gives the host's disk."; [Need::Volumes, STATS]
        (refuse!(NOT_FOUND, |s| v1::NodeGetVolumeStatsRequest {
            volume_path: s.directory().display().to_string(),
            ..published(s).await?.stats_request()
        }));
    "errors.node-expand.no-id" Must "NodeExpandVolume": "NodeExpandVolume without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [EXPAND]
        (refuse!(INVALID, |s| node_expand_request(s, &s.prepare(v1::Volume::default())?)));
    "errors.node-expand.no-path" Must "NodeExpandVolume": "NodeExpandVolume without volume_path is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [Need::Volumes, EXPAND]
        (refuse!(INVALID, |s| v1::NodeExpandVolumeRequest { volume_path: String::new(), ..node_expand_request(s, &s.prepare(s.volume().await?)?) }));
    "errors.node-expand.missing" Must "NodeExpandVolume": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [EXPAND]
        (refuse!(NOT_FOUND, |s| node_expand_request(s, &missing(s)?)));
    "errors.node-health.no-id" Must "NodeGetVolumeHealth": "NodeGetVolumeHealth without volume_id is answered with INVALID_ARGUMENT.";
        "Check required fields first."; [HEALTH]
        (refuse!(INVALID, |s| s.prepare(v1::Volume::default())?.health_request()));
    "errors.node-health.missing" Must "NodeGetVolumeHealth": "A volume that does not exist is answered with NOT_FOUND.";
        "Look the volume up."; [HEALTH]
        (refuse!(NOT_FOUND, |s| missing(s)?.health_request()));
}

/// A volume that does not exist.
fn missing(session: &Session) -> Outcome<PreparedVolume> {
    session.prepare(v1::Volume { volume_id: MISSING.to_owned(), ..Default::default() })
}

/// A volume that was deleted: a driver that finds volumes by their context gets one, and not only an unknown id.
async fn deleted(session: &Session) -> Outcome<PreparedVolume> {
    let volume = session.volume().await?;
    let request = v1::DeleteVolumeRequest { volume_id: volume.volume_id.clone(), ..Default::default() };
    session.call(request).await.or_not_run("DeleteVolume")?;
    session.prepare(volume)
}

async fn stage_missing(session: &Session) -> Outcome {
    // A node that has no credentials cannot look a disk up, and the request has nothing of an attachment.
    let unattached = [Code::NotFound, Code::InvalidArgument];
    let codes = if session.identity.attaches() { &unattached } else { NOT_FOUND };
    refused(session, deleted(session).await?.stage_request(), codes).await
}

async fn attached(session: &Session) -> Outcome<PreparedVolume> {
    session.attach(&session.volume().await?).await
}

async fn staged(session: &Session) -> Outcome<PreparedVolume> {
    session.staged(&session.volume().await?).await
}

async fn published(session: &Session) -> Outcome<PreparedVolume> {
    session.published(&session.volume().await?).await
}

async fn publish_other_mode(session: &Session) -> Outcome {
    let published = published(session).await?;
    let request = v1::NodePublishVolumeRequest { readonly: true, ..published.publish_request() };
    // The mount that is there is not what this call is about, so its mode is not judged.
    match session.call_beside_others(request).await {
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        Err(status) => Err(status).or_broken("NodePublishVolume should answer ALREADY_EXISTS, and"),
        Ok(_) => crate::session::broken("NodePublishVolume answered OK, expected is ALREADY_EXISTS"),
    }
}
