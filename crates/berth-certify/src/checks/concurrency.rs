//! Sixteen calls at once, on different volumes and on the same.

use std::collections::BTreeSet;
use std::path::Path;

use berth_csi::{ControllerCapability as Controller, v1};
use futures_util::future::join_all;
use tonic::Code;

use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Session, broken, describe, ensure, not_run};

const AT_ONCE: usize = 16;
const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);

checks! {
    "concurrent.create-different" Must "Concurrency": "Sixteen volumes that are created at once are sixteen volumes.";
        "Lock by volume, not the driver; protect shared records."; [CREATE] create_different;
    "concurrent.create-same" Must "Concurrency": "The same CreateVolume sixteen times at once makes one volume; a call may be answered with ABORTED and repeated.";
        "Lock by the name of the volume."; [CREATE] create_same;
    "concurrent.delete-same" Must "Concurrency": "The same DeleteVolume sixteen times at once is answered with OK or ABORTED.";
        "Lock by volume; what another call deletes meanwhile is deleted."; [CREATE] delete_same;
    "concurrent.publish-same" Must "Concurrency": "The same NodePublishVolume sixteen times at once makes one mount.";
        "Lock by volume on the node: the check and the mount must be one step."; [Need::Volumes, Need::Sight, Need::Filesystem] publish_same;
    "concurrent.publish-different" Must "Concurrency": "Volumes that are staged and published at once are each mounted at their own target.";
        "Lock by volume; do not share variables between calls."; [Need::Volumes, Need::Sight, Need::Filesystem] publish_different;
    "concurrent.mixed" Must "Concurrency": "NodePublishVolume and NodeUnpublishVolume of one target at once end in one of the two states.";
        "Lock by volume on the node."; [Need::Volumes, Need::Sight, Need::Filesystem] mixed;
}

async fn create_different(session: &Session) -> Outcome {
    session.volume().await?;
    let calls = (0..AT_ONCE).map(|_| session.call_until_settled(session.create_request()));
    let mut ids = BTreeSet::new();
    for answer in join_all(calls).await {
        if let Err(status) = &answer
            && status.code() == Code::ResourceExhausted
        {
            return not_run(format!("there is no room for {AT_ONCE} volumes: {}", describe(status)));
        }
        let volume = answer.or_broken("CreateVolume beside others")?.volume.unwrap_or_default();
        ensure(ids.insert(volume.volume_id.clone()), || {
            format!("two names gave the volume {:?}", volume.volume_id)
        })?;
    }
    Ok(())
}

async fn create_same(session: &Session) -> Outcome {
    session.volume().await?;
    let request = session.create_request();
    let calls = (0..AT_ONCE).map(|_| session.call_until_settled(request.clone()));
    let mut ids = BTreeSet::new();
    for answer in join_all(calls).await {
        ids.insert(answer.or_broken("CreateVolume beside itself")?.volume.unwrap_or_default().volume_id);
    }
    ensure(ids.len() == 1, || format!("one name gave {} volumes: {ids:?}", ids.len()))
}

async fn delete_same(session: &Session) -> Outcome {
    let volume_id = session.volume().await?.volume_id;
    let request = v1::DeleteVolumeRequest { volume_id, ..Default::default() };
    let calls = (0..AT_ONCE).map(|_| session.call_beside_others(request.clone()));
    for answer in join_all(calls).await {
        match answer {
            Err(status) if status.code() != Code::Aborted => {
                return broken(format!("DeleteVolume beside itself answered {}", describe(&status)));
            }
            _ => {}
        }
    }
    Ok(())
}

fn mounts_at(session: &Session, target: &str) -> usize {
    let mounts = session.driver.mounts().unwrap_or_default();
    mounts.iter().filter(|mount| mount.target == Path::new(target)).count()
}

async fn publish_same(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    let calls = (0..AT_ONCE).map(|_| session.call_until_settled(prepared.publish_request()));
    for answer in join_all(calls).await {
        answer.or_broken("NodePublishVolume beside itself")?;
    }
    let here = mounts_at(session, &prepared.target);
    ensure(here == 1, || format!("{here} mounts are at {}", prepared.target))
}

async fn publish_different(session: &Session) -> Outcome {
    let mut all = Vec::new();
    for _ in 0..AT_ONCE / 2 {
        all.push(session.attach(&session.volume().await?).await?);
    }
    let calls = all.iter().map(|prepared| async move {
        if !prepared.staging.is_empty() {
            session
                .call_until_settled(prepared.stage_request())
                .await
                .or_broken("NodeStageVolume beside others")?;
        }
        session
            .call_until_settled(prepared.publish_request())
            .await
            .or_broken("NodePublishVolume beside others")
    });
    for outcome in join_all(calls).await {
        outcome?;
    }
    for (number, prepared) in all.iter().enumerate() {
        let here = mounts_at(session, &prepared.target);
        ensure(here == 1, || format!("{here} mounts are at {}", prepared.target))?;
        session.write(prepared, "number", &number.to_be_bytes()).await.or_broken("writing at target_path")?;
    }
    for (number, prepared) in all.iter().enumerate() {
        let found = session.read(prepared, "number", 8).await.or_broken("reading at target_path")?;
        ensure(found == number.to_be_bytes(), || "two targets show the same volume".to_owned())?;
    }
    Ok(())
}

async fn mixed(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    for _ in 0..4 {
        let publish = session.call_beside_others(prepared.publish_request());
        let unpublish = session.call_beside_others(prepared.unpublish_request());
        let (published, unpublished) = tokio::join!(publish, unpublish);
        for status in published.err().into_iter().chain(unpublished.err()) {
            ensure(status.code() == Code::Aborted, || format!("a call was answered {}", describe(&status)))?;
        }
        let here = mounts_at(session, &prepared.target);
        ensure(here <= 1, || format!("{here} mounts are stacked at {}", prepared.target))?;
    }
    session.call_until_settled(prepared.unpublish_request()).await.or_broken("NodeUnpublishVolume")?;
    let here = mounts_at(session, &prepared.target);
    ensure(here == 0, || format!("{here} mounts are left at {}", prepared.target))
}
