//! The order of the calls on a node, and several targets of one volume.

use berth_csi::{NodeCapability as Node, v1};
use tonic::Code;
use v1::volume_capability::access_mode::Mode;

use super::errors::refused;
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, PreparedVolume, Session, ensure};

const STAGE: Need = Need::Node(Node::StageUnstageVolume);
const MULTI_WRITER: Need = Need::Node(Node::SingleNodeMultiWriter);

checks! {
    "staging.publish-first" Must "NodePublishVolume": "NodePublishVolume of a volume that is not staged is refused with FAILED_PRECONDITION.";
        "Look whether staging_target_path holds the volume; what lies there without it is the disk of the host."; [Need::Volumes, STAGE] publish_first;
    "staging.both-ways" Must "NodeUnstageVolume": "A volume that was unpublished and unstaged can be staged and published again.";
        "Undo everything that NodeStageVolume did, devices included."; [Need::Volumes, STAGE] both_ways;
    "staging.single-writer" Must "NodePublishVolume": "A second target of a SINGLE_NODE_SINGLE_WRITER volume is refused with FAILED_PRECONDITION.";
        "Count the targets of a volume that only one workload may use."; [Need::Volumes, MULTI_WRITER] single_writer;
    "staging.multi-writer" Must "NodePublishVolume": "A second target of a SINGLE_NODE_MULTI_WRITER volume works, and shows the same data.";
        "Bind the staged volume to every target."; [Need::Volumes, MULTI_WRITER, Need::Filesystem] multi_writer;
    "staging.second-remains" Must "NodeUnpublishVolume": "Unpublishing one of two targets leaves the other one working.";
        "Undo only the mount at target_path."; [Need::Volumes, MULTI_WRITER, Need::Filesystem] second_remains;
}

async fn publish_first(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    refused(session, prepared.publish_request(), &[Code::FailedPrecondition]).await
}

async fn both_ways(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    session.unpublish(&prepared).await?;
    session.unstage(&prepared).await?;
    session.call(prepared.stage_request()).await.or_broken("the second NodeStageVolume")?;
    session.call(prepared.publish_request()).await.or_broken("the second NodePublishVolume").map(drop)
}

/// A volume that is staged for this access mode.
async fn staged_for(session: &Session, mode: Mode) -> Outcome<PreparedVolume> {
    let mut capability = session.capability();
    capability.access_mode = Some(v1::volume_capability::AccessMode { mode: mode.into() });
    let request =
        v1::CreateVolumeRequest { volume_capabilities: vec![capability.clone()], ..session.create_request() };
    let volume = session.volume_from(request).await?;
    let mut prepared = session.prepare(volume.clone())?;
    prepared.capability = capability.clone();
    if session.identity.attaches() {
        let request = v1::ControllerPublishVolumeRequest {
            volume_capability: Some(capability),
            ..session.attach_request(&volume)
        };
        let answer = session.call(request).await.or_not_run("ControllerPublishVolume")?;
        prepared.publish_context = answer.publish_context;
    }
    session.stage(&prepared).await?;
    Ok(prepared)
}

fn second(prepared: &PreparedVolume) -> PreparedVolume {
    PreparedVolume { target: format!("{}-second", prepared.target), ..prepared.clone() }
}

async fn single_writer(session: &Session) -> Outcome {
    let prepared = staged_for(session, Mode::SingleNodeSingleWriter).await?;
    session.publish(&prepared).await?;
    refused(session, second(&prepared).publish_request(), &[Code::FailedPrecondition]).await
}

async fn multi_writer(session: &Session) -> Outcome {
    let prepared = staged_for(session, Mode::SingleNodeMultiWriter).await?;
    session.publish(&prepared).await?;
    let second = second(&prepared);
    session.call(second.publish_request()).await.or_broken("NodePublishVolume of a second target")?;
    session.write(&prepared, "shared", b"seen by both").await.or_not_run("writing")?;
    let found = session.read(&second, "shared", 12).await.or_broken("reading at the second target")?;
    ensure(found == b"seen by both", || "the second target shows other data".to_owned())
}

async fn second_remains(session: &Session) -> Outcome {
    let prepared = staged_for(session, Mode::SingleNodeMultiWriter).await?;
    session.publish(&prepared).await?;
    let second = second(&prepared);
    session.publish(&second).await?;
    session.unpublish(&prepared).await?;
    session
        .write(&second, "kept", b"x")
        .await
        .or_broken("writing at the second target after the first is gone")
}
