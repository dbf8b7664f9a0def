//! Data that is written stays in its volume, is in no other volume, and shows in the statistics.

use berth_csi::{ControllerCapability as Controller, NodeCapability as Node, v1};

use super::lifecycle::{expand_request, from_snapshot, from_volume, larger, node_expand_request};
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, PreparedVolume, Session, broken, ensure, not_run};

const CONTENT: &[u8] = b"written by the first workload";
const CHANGED: &[u8] = b"changed after it was copied..";
const SNAPSHOTS: Need = Need::Controller(Controller::CreateDeleteSnapshot);
const CLONES: Need = Need::Controller(Controller::CloneVolume);
/// So much is written to see whether the statistics move.
const WRITTEN: usize = 16 << 20;

checks! {
    "data.writable" Must "NodePublishVolume": "A published volume can be written and read.";
        "Publish without readonly must give a mount that is writable by root."; [Need::Volumes, Need::Sight] writable;
    "data.empty" Must "CreateVolume": "A new volume holds no data of others.";
        "Use an empty directory, or make a new filesystem; never reuse what a deleted volume left."; [Need::Volumes, Need::Sight, Need::Filesystem] empty;
    "data.unpublish" Must "NodeUnpublishVolume": "Data survives unpublishing and publishing again.";
        "Publish the same storage; do not format what has data."; [Need::Volumes, Need::Sight] unpublish;
    "data.restage" Must "NodeUnstageVolume": "Data survives unstaging and staging again.";
        "Flush before unmounting; format a device only if a probe finds nothing on it."; [Need::Volumes, Need::Sight, Need::Node(Node::StageUnstageVolume)] restage;
    "data.restart" Must "NodePublishVolume": "A published volume works on while the driver is killed and started again.";
        "Do not unmount at the start or end of the driver; serve mounts by processes that outlive it."; [Need::Volumes, Need::Sight, Need::Program] restart;
    "data.volumes-differ" Must "CreateVolume": "What is written on one volume is not on another.";
        "Give every volume storage of its own."; [Need::Volumes, Need::Sight] volumes_differ;
    "data.deleted" Must "DeleteVolume": "A volume that is created again by the same name is empty.";
        "Remove data with the volume, or give the new one another place."; [Need::Volumes, Need::Sight, Need::Filesystem] deleted;
    "call.read-only" Must "NodePublishVolume": "With readonly nothing can be written at target_path.";
        "Set the read-only attribute of the mount; a bind mount needs a second step for it."; [Need::Volumes, Need::Sight, Need::Filesystem] read_only;
    "data.restore" Must "CreateVolume": "A volume from a snapshot has the data of the moment of the snapshot, whatever the source became.";
        "Copy the data, or share it copy-on-write; flush the source's filesystem before the snapshot."; [Need::Volumes, Need::Sight, SNAPSHOTS] restore;
    "data.restored-apart" Must "CreateVolume": "Writing to a restored volume changes neither the snapshot nor another volume restored from it.";
        "Give every restored volume storage of its own."; [Need::Volumes, Need::Sight, SNAPSHOTS] restored_apart;
    "data.snapshot-outlives" Should "DeleteVolume": "A snapshot can be restored after its volume was deleted, unless DeleteVolume refuses with FAILED_PRECONDITION.";
        "Keep the data of snapshots apart, or refuse to delete the volume."; [Need::Volumes, Need::Sight, SNAPSHOTS] snapshot_outlives;
    "data.clone" Must "CreateVolume": "A clone has the data of its source, and stays as it was while the source changes.";
        "Copy the data, or share it copy-on-write."; [Need::Volumes, Need::Sight, CLONES] clone;
    "data.restore-larger" Must "CreateVolume": "A volume restored into a larger one has the larger size where it is mounted.";
        "Grow the filesystem when the volume is staged."; [Need::Volumes, Need::Sight, SNAPSHOTS] restore_larger;
    "data.grow" Must "ControllerExpandVolume, NodeExpandVolume": "After an expansion the volume is larger where it is mounted, and keeps its data.";
        "Grow the device and the filesystem; answer node_expansion_required if the node has to."; [Need::Volumes, Need::Sight, Need::Controller(Controller::ExpandVolume)] grow;
    "stats.total" Must "NodeGetVolumeStats": "The total of the statistics is that of the filesystem at volume_path, or the volume's capacity.";
        "Ask statfs of volume_path, not of the driver's directory."; [Need::Volumes, Need::Sight, Need::Filesystem, Need::Node(Node::GetVolumeStats)] stats_total;
    "stats.move" Must "NodeGetVolumeStats": "What is used grows by what is written.";
        "Ask statfs of volume_path at every call."; [Need::Volumes, Need::Sight, Need::Filesystem, Need::Node(Node::GetVolumeStats)] stats_move;
}

async fn writable(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    session.write(&prepared, "data", CONTENT).await.or_broken("writing at target_path")?;
    holds(session, &prepared, CONTENT, "what was written").await
}

/// The volume has this content.
async fn holds(session: &Session, prepared: &PreparedVolume, content: &[u8], what: &str) -> Outcome {
    let found = session.read(prepared, "data", content.len()).await.or_broken(&format!("reading {what}"))?;
    ensure(found == content, || format!("{what} is {:?}", String::from_utf8_lossy(&found)))
}

async fn entries(session: &Session, prepared: &PreparedVolume) -> Outcome<Vec<String>> {
    let path = session.seen(&prepared.target);
    let listed = session.on_disk(move || {
        let names =
            std::fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect::<std::io::Result<Vec<_>>>()
    });
    let names = listed.await.or_not_run("listing target_path")?;
    Ok(names.into_iter().filter(|name| name != "lost+found").collect())
}

async fn empty(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    let names = entries(session, &prepared).await?;
    ensure(names.is_empty(), || format!("a new volume holds {names:?}"))
}

/// A published volume with content.
async fn filled(session: &Session) -> Outcome<PreparedVolume> {
    let prepared = session.published(&session.volume().await?).await?;
    session.write(&prepared, "data", CONTENT).await.or_not_run("writing at target_path")?;
    Ok(prepared)
}

async fn unpublish(session: &Session) -> Outcome {
    let prepared = filled(session).await?;
    session.unpublish(&prepared).await?;
    session.publish(&prepared).await?;
    holds(session, &prepared, CONTENT, "the data after unpublishing and publishing").await
}

async fn restage(session: &Session) -> Outcome {
    let prepared = filled(session).await?;
    session.unpublish(&prepared).await?;
    session.unstage(&prepared).await?;
    session.stage(&prepared).await?;
    session.publish(&prepared).await?;
    holds(session, &prepared, CONTENT, "the data after unstaging and staging").await
}

async fn restart(session: &Session) -> Outcome {
    let prepared = filled(session).await?;
    session.kill_and_restart().await?;
    session.call_until_settled(prepared.publish_request()).await.or_not_run("NodePublishVolume")?;
    holds(session, &prepared, CONTENT, "the data after the driver was killed").await?;
    session.write(&prepared, "data", CHANGED).await.or_broken("writing after the driver was killed")
}

async fn volumes_differ(session: &Session) -> Outcome {
    let first = filled(session).await?;
    let second = session.published(&session.volume().await?).await?;
    session.write(&second, "data", CHANGED).await.or_not_run("writing at target_path")?;
    holds(session, &first, CONTENT, "the first volume after the second was written").await
}

async fn deleted(session: &Session) -> Outcome {
    let request = session.create_request();
    let volume = session.volume_from(request.clone()).await?;
    let prepared = session.published(&volume).await?;
    session.write(&prepared, "data", CONTENT).await.or_not_run("writing at target_path")?;
    session.take_down(&prepared).await?;
    let prepared = session.published(&session.volume_from(request).await?).await?;
    let names = entries(session, &prepared).await?;
    ensure(names.is_empty(), || format!("the new volume holds {names:?}"))
}

async fn read_only(session: &Session) -> Outcome {
    let prepared = session.staged(&session.volume().await?).await?;
    let request = v1::NodePublishVolumeRequest { readonly: true, ..prepared.publish_request() };
    session.call(request).await.or_not_run("NodePublishVolume with readonly")?;
    let written = session.write(&prepared, "data", CONTENT).await;
    ensure(written.is_err(), || {
        "a file was written at a target_path that was published with readonly".to_owned()
    })
}

/// Publishes a volume that is made from a source.
async fn copied(session: &Session, source: v1::VolumeContentSource) -> Outcome<PreparedVolume> {
    let request = v1::CreateVolumeRequest { volume_content_source: Some(source), ..session.create_request() };
    session.published(&session.volume_from(request).await?).await
}

async fn restore(session: &Session) -> Outcome {
    let source = filled(session).await?;
    let snapshot = session.snapshot(&source.volume).await?;
    session.write(&source, "data", CHANGED).await.or_not_run("writing at target_path")?;
    let restored = copied(session, from_snapshot(&snapshot)).await?;
    holds(session, &restored, CONTENT, "the restored data").await
}

async fn restored_apart(session: &Session) -> Outcome {
    let source = filled(session).await?;
    let snapshot = session.snapshot(&source.volume).await?;
    let first = copied(session, from_snapshot(&snapshot)).await?;
    session.write(&first, "data", CHANGED).await.or_broken("writing on a restored volume")?;
    let second = copied(session, from_snapshot(&snapshot)).await?;
    holds(session, &second, CONTENT, "a second restored volume").await?;
    holds(session, &source, CONTENT, "the source").await
}

async fn snapshot_outlives(session: &Session) -> Outcome {
    let source = filled(session).await?;
    let snapshot = session.snapshot(&source.volume).await?;
    session.unpublish(&source).await?;
    session.unstage(&source).await?;
    if session.identity.attaches() {
        session.call(session.detach_request(&source.volume)).await.or_not_run("ControllerUnpublishVolume")?;
    }
    let request =
        v1::DeleteVolumeRequest { volume_id: source.volume.volume_id.clone(), ..Default::default() };
    match session.call(request).await {
        Err(status) if status.code() == tonic::Code::FailedPrecondition => return Ok(()),
        answer => answer.or_not_run("DeleteVolume").map(drop)?,
    }
    let source = Some(from_snapshot(&snapshot));
    let request = v1::CreateVolumeRequest { volume_content_source: source, ..session.create_request() };
    let answer =
        session.call(request).await.or_broken("CreateVolume from the snapshot of a deleted volume")?;
    let restored = session.published(&answer.volume.unwrap_or_default()).await?;
    holds(session, &restored, CONTENT, "the data of a deleted volume's snapshot").await
}

async fn clone(session: &Session) -> Outcome {
    let source = filled(session).await?;
    let copy = copied(session, from_volume(&source.volume)).await?;
    session.write(&source, "data", CHANGED).await.or_not_run("writing at target_path")?;
    holds(session, &copy, CONTENT, "the clone").await?;
    session.write(&copy, "data", CONTENT).await.or_broken("writing on a clone")?;
    holds(session, &source, CHANGED, "the source").await
}

/// Whether the size of what is mounted is that of the volume at all; a directory has the size of its disk.
fn is_sized(session: &Session, prepared: &PreparedVolume, size: u64) -> bool {
    let capacity =
        u64::try_from(prepared.volume.capacity_bytes.max(session.options.size)).unwrap_or_default();
    size <= capacity.saturating_mul(2)
}

const UNSIZED: &str = "what is mounted has the size of the disk below, so growth cannot be seen";

async fn restore_larger(session: &Session) -> Outcome {
    let source = filled(session).await?;
    let before = session.size_of(&source).await.or_not_run("statfs of target_path")?;
    if !is_sized(session, &source, before) {
        return not_run(UNSIZED);
    }
    let snapshot = session.snapshot(&source.volume).await?;
    let request = v1::CreateVolumeRequest {
        volume_content_source: Some(from_snapshot(&snapshot)),
        capacity_range: larger(session),
        ..session.create_request()
    };
    let answer = session.call(request).await;
    let answer = match answer {
        // The specification lets a driver say so.
        Err(status) if status.code() == tonic::Code::OutOfRange => {
            return not_run("the driver does not restore into a larger volume (OUT_OF_RANGE)");
        }
        answer => answer.or_not_run("CreateVolume from a snapshot, larger")?,
    };
    let restored = session.published(&answer.volume.unwrap_or_default()).await?;
    let after = session.size_of(&restored).await.or_not_run("statfs of target_path")?;
    ensure(after > before + before / 2, || {
        format!("the source has {before} bytes, the restored volume of twice the size {after}")
    })?;
    holds(session, &restored, CONTENT, "the restored data").await
}

async fn grow(session: &Session) -> Outcome {
    let prepared = filled(session).await?;
    let before = session.size_of(&prepared).await.or_not_run("statfs of target_path")?;
    if !is_sized(session, &prepared, before) {
        return not_run(UNSIZED);
    }
    let answer = match session.call(expand_request(session, &prepared.volume)).await {
        // Only offline: unstage, grow, stage.
        Err(status) if status.code() == tonic::Code::FailedPrecondition => {
            session.unpublish(&prepared).await?;
            session.unstage(&prepared).await?;
            let answer = session.call(expand_request(session, &prepared.volume)).await;
            let answer = answer.or_not_run("ControllerExpandVolume")?;
            session.stage(&prepared).await?;
            session.publish(&prepared).await?;
            answer
        }
        answer => answer.or_not_run("ControllerExpandVolume")?,
    };
    if answer.node_expansion_required {
        session.call(node_expand_request(session, &prepared)).await.or_not_run("NodeExpandVolume")?;
    }
    let after = session.size_of(&prepared).await.or_not_run("statfs of target_path")?;
    ensure(after > before + before / 2, || {
        format!("it had {before} bytes, and has {after} after the expansion")
    })?;
    holds(session, &prepared, CONTENT, "the data after the expansion").await
}

async fn usage(session: &Session, prepared: &PreparedVolume) -> Outcome<v1::VolumeUsage> {
    let answer = session.call(prepared.stats_request()).await.or_not_run("NodeGetVolumeStats")?;
    let bytes = answer.usage.into_iter().find(|usage| usage.unit() == v1::volume_usage::Unit::Bytes);
    bytes.map_or_else(|| not_run("the statistics have no bytes"), Ok)
}

async fn stats_total(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    let total = usage(session, &prepared).await?.total;
    let here = session.size_of(&prepared).await.or_not_run("statfs of target_path")?;
    let capacity = prepared.volume.capacity_bytes;
    let near = |other: i64| other > 0 && (total - other).abs() <= other / 10;
    ensure(near(i64::try_from(here).unwrap_or(i64::MAX)) || near(capacity), || {
        format!("the total is {total}; the filesystem at volume_path has {here} bytes, the volume {capacity}")
    })
}

async fn stats_move(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    let mut moved = 0;
    // On a disk that others use as well, they may remove as much at the same time.
    for attempt in 0..5 {
        let before = usage(session, &prepared).await?.used;
        let content = vec![b'x'; WRITTEN];
        session
            .write(&prepared, &format!("data{attempt}"), &content)
            .await
            .or_not_run("writing at target_path")?;
        moved = usage(session, &prepared).await?.used - before;
        if moved >= i64::try_from(WRITTEN / 2).unwrap_or_default() {
            return Ok(());
        }
    }
    broken(format!("{WRITTEN} bytes were written, and used moved by {moved}"))
}
