//! Lists: what is in them, filters, pages, and pages while things change.

use std::collections::BTreeSet;

use berth_csi::{ControllerCapability as Controller, v1};

use super::errors::MISSING;
use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Session, broken, ensure};

const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);
const LIST: Need = Need::Controller(Controller::ListVolumes);
const SNAPSHOTS: Need = Need::Controller(Controller::CreateDeleteSnapshot);
const LIST_SNAPSHOTS: Need = Need::Controller(Controller::ListSnapshots);

/// No list has more pages than this in a test.
const MOST_PAGES: usize = 10_000;

checks! {
    "list.new" Must "ListVolumes": "A new volume is in the list.";
        "List what exists at the moment of the call."; [CREATE, LIST] new;
    "list.deleted" Must "ListVolumes": "A deleted volume is not in the list.";
        "List what exists at the moment of the call."; [CREATE, LIST] deleted;
    "list.pages" Must "ListVolumes": "Pages of one entry give every volume, each once, and an end.";
        "next_token says where the next page begins; it is empty at the end."; [CREATE, LIST] pages;
    "list.pages-change" Must "ListVolumes": "A volume that is deleted between two pages neither ends the list nor hides others.";
        "Let the token name what came last, not how many came."; [CREATE, LIST] pages_change;
    "list.published-nodes" Must "ListVolumes": "The list says to which node a volume is attached.";
        "Fill status.published_node_ids from what is attached now."; [Need::Volumes, Need::Attach, LIST, Need::Controller(Controller::ListVolumesPublishedNodes)] published_nodes;
    "list.snapshots-new" Must "ListSnapshots": "A new snapshot is in the list.";
        "List what exists at the moment of the call."; [CREATE, SNAPSHOTS, LIST_SNAPSHOTS] snapshots_new;
    "list.snapshots-by-id" Must "ListSnapshots": "With snapshot_id the list has that snapshot alone.";
        "Filter by snapshot_id."; [CREATE, SNAPSHOTS, LIST_SNAPSHOTS] snapshots_by_id;
    "list.snapshots-by-source" Must "ListSnapshots": "With source_volume_id the list has the snapshots of that volume alone.";
        "Filter by source_volume_id."; [CREATE, SNAPSHOTS, LIST_SNAPSHOTS] snapshots_by_source;
    "list.snapshots-missing" Must "ListSnapshots": "With a snapshot_id that does not exist the list is empty, and the call succeeds.";
        "An empty list is an answer, not an error."; [LIST_SNAPSHOTS] snapshots_missing;
    "list.snapshots-of-missing" Must "ListSnapshots": "With a source_volume_id that does not exist the list is empty, and the call succeeds.";
        "An empty list is an answer, not an error."; [LIST_SNAPSHOTS] snapshots_of_missing;
    "list.snapshots-pages" Must "ListSnapshots": "Pages of two entries give every snapshot of a volume, each once, and an end.";
        "next_token says where the next page begins; it is empty at the end."; [CREATE, SNAPSHOTS, LIST_SNAPSHOTS] snapshots_pages;
}

async fn page(session: &Session, max_entries: i32, token: &str) -> Outcome<v1::ListVolumesResponse> {
    let request = v1::ListVolumesRequest { max_entries, starting_token: token.to_owned() };
    session.call(request).await.or_broken("ListVolumes")
}

/// The ids of all volumes, in pages of this size.
async fn listed(session: &Session, max_entries: i32) -> Outcome<Vec<String>> {
    let (mut ids, mut token) = (Vec::new(), String::new());
    for _ in 0..MOST_PAGES {
        let answer = page(session, max_entries, &token).await?;
        ids.extend(answer.entries.into_iter().map(|entry| entry.volume.unwrap_or_default().volume_id));
        if answer.next_token.is_empty() {
            return Ok(ids);
        }
        token = answer.next_token;
    }
    broken(format!("the list has no end after {MOST_PAGES} pages"))
}

async fn new(session: &Session) -> Outcome {
    let id = session.volume().await?.volume_id;
    ensure(listed(session, 0).await?.contains(&id), || format!("the new volume {id:?} is not in the list"))
}

async fn deleted(session: &Session) -> Outcome {
    let id = session.volume().await?.volume_id;
    let request = v1::DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() };
    session.call(request).await.or_not_run("DeleteVolume")?;
    ensure(!listed(session, 0).await?.contains(&id), || format!("the deleted volume {id:?} is in the list"))
}

/// Each of these comes once.
fn each_once(expected: &[String], found: &[String]) -> Outcome {
    for id in expected {
        let times = found.iter().filter(|other| *other == id).count();
        ensure(times == 1, || format!("{id:?} comes {times} times in the pages"))?;
    }
    Ok(())
}

async fn volumes(session: &Session, count: usize) -> Outcome<Vec<String>> {
    let mut ids = Vec::new();
    for _ in 0..count {
        ids.push(session.volume().await?.volume_id);
    }
    Ok(ids)
}

async fn pages(session: &Session) -> Outcome {
    let ids = volumes(session, 3).await?;
    let found = listed(session, 1).await?;
    each_once(&ids, &found)
}

async fn pages_change(session: &Session) -> Outcome {
    let ids = volumes(session, 4).await?;
    let first = page(session, 2, "").await?;
    let on_first: Vec<String> =
        first.entries.iter().map(|entry| entry.volume.clone().unwrap_or_default().volume_id).collect();
    let Some(victim) = on_first.iter().rev().find(|id| ids.contains(id)) else {
        return crate::session::not_run("other volumes fill the first page");
    };
    let request = v1::DeleteVolumeRequest { volume_id: victim.clone(), ..Default::default() };
    session.call(request).await.or_not_run("DeleteVolume")?;
    let (mut found, mut token) = (on_first.clone(), first.next_token);
    for _ in 0..MOST_PAGES {
        if token.is_empty() {
            break;
        }
        let answer = page(session, 2, &token).await?;
        found.extend(answer.entries.into_iter().map(|entry| entry.volume.unwrap_or_default().volume_id));
        token = answer.next_token;
    }
    let others: Vec<String> = ids.into_iter().filter(|id| id != victim).collect();
    each_once(&others, &found)
}

async fn published_nodes(session: &Session) -> Outcome {
    let prepared = session.attach(&session.volume().await?).await?;
    let answer = page(session, 0, "").await?;
    let entry = answer.entries.into_iter().find(|entry| {
        entry.volume.as_ref().is_some_and(|volume| volume.volume_id == prepared.volume.volume_id)
    });
    let nodes = entry.and_then(|entry| entry.status).unwrap_or_default().published_node_ids;
    ensure(nodes.contains(&session.node.node_id), || {
        format!("the volume is attached to {:?}; the list says {nodes:?}", session.node.node_id)
    })
}

async fn snapshots(session: &Session, filter: v1::ListSnapshotsRequest) -> Outcome<Vec<v1::Snapshot>> {
    let (mut all, mut request) = (Vec::new(), filter);
    for _ in 0..MOST_PAGES {
        let answer = session.call(request.clone()).await.or_broken("ListSnapshots")?;
        all.extend(answer.entries.into_iter().map(|entry| entry.snapshot.unwrap_or_default()));
        if answer.next_token.is_empty() {
            return Ok(all);
        }
        request.starting_token = answer.next_token;
    }
    broken(format!("the list has no end after {MOST_PAGES} pages"))
}

async fn snapshots_new(session: &Session) -> Outcome {
    let id = session.snapshot(&session.volume().await?).await?.snapshot_id;
    let found = snapshots(session, v1::ListSnapshotsRequest::default()).await?;
    ensure(found.iter().any(|snapshot| snapshot.snapshot_id == id), || format!("{id:?} is not in the list"))
}

async fn snapshots_by_id(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let id = session.snapshot(&volume).await?.snapshot_id;
    session.snapshot(&volume).await?;
    let filter = v1::ListSnapshotsRequest { snapshot_id: id.clone(), ..Default::default() };
    let found = snapshots(session, filter).await?;
    let ids: Vec<_> = found.iter().map(|snapshot| &snapshot.snapshot_id).collect();
    ensure(ids == [&id], || format!("asked for {id:?}, got {ids:?}"))
}

async fn snapshots_by_source(session: &Session) -> Outcome {
    let (first, second) = (session.volume().await?, session.volume().await?);
    session.snapshot(&first).await?;
    let expected = session.snapshot(&second).await?.snapshot_id;
    let filter =
        v1::ListSnapshotsRequest { source_volume_id: second.volume_id.clone(), ..Default::default() };
    let found = snapshots(session, filter).await?;
    let sources: BTreeSet<_> = found.iter().map(|snapshot| &snapshot.source_volume_id).collect();
    ensure(found.iter().any(|snapshot| snapshot.snapshot_id == expected), || {
        "the volume's snapshot is missing".to_owned()
    })?;
    ensure(sources.iter().all(|source| **source == second.volume_id), || {
        format!("asked for snapshots of {:?}, got those of {sources:?}", second.volume_id)
    })
}

async fn snapshots_missing(session: &Session) -> Outcome {
    let filter = v1::ListSnapshotsRequest { snapshot_id: MISSING.to_owned(), ..Default::default() };
    let found = snapshots(session, filter).await?;
    ensure(found.is_empty(), || format!("{} snapshots came", found.len()))
}

async fn snapshots_of_missing(session: &Session) -> Outcome {
    let filter = v1::ListSnapshotsRequest { source_volume_id: MISSING.to_owned(), ..Default::default() };
    let found = snapshots(session, filter).await?;
    ensure(found.is_empty(), || format!("{} snapshots came", found.len()))
}

async fn snapshots_pages(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(session.snapshot(&volume).await?.snapshot_id);
    }
    let filter =
        v1::ListSnapshotsRequest { source_volume_id: volume.volume_id, max_entries: 2, ..Default::default() };
    let found: Vec<String> =
        snapshots(session, filter).await?.into_iter().map(|snapshot| snapshot.snapshot_id).collect();
    each_once(&ids, &found)?;
    ensure(found.len() == ids.len(), || {
        format!("{} snapshots were taken, {} are listed", ids.len(), found.len())
    })
}
