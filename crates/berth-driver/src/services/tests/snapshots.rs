//! Snapshots, groups of them, and what is in them.

use berth_csi::v1::{
    CreateSnapshotRequest, CreateVolumeGroupSnapshotRequest, DeleteSnapshotRequest,
    DeleteVolumeGroupSnapshotRequest, DeleteVolumeRequest, GetMetadataAllocatedRequest,
    GetMetadataDeltaRequest, GetSnapshotRequest, GetVolumeGroupSnapshotRequest, ListSnapshotsRequest,
    controller_server::Controller as _, group_controller_server::GroupController as _,
    snapshot_metadata_server::SnapshotMetadata as _,
};
use tokio_stream::StreamExt as _;
use tonic::Code;

use super::*;
use crate::locks::{Hold, Key};

fn take(name: &str, source: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest { name: name.into(), source_volume_id: source.into(), ..Default::default() }
}

fn delete(id: &str) -> DeleteSnapshotRequest {
    DeleteSnapshotRequest { snapshot_id: id.into(), ..Default::default() }
}

#[tokio::test]
async fn create_snapshot_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let (one, other) = (bench.volume(create("one")).await, bench.volume(create("other")).await);
    let snapshot = |request| bench.driver.create_snapshot(of(request));
    refused("no name", snapshot(take("", &one)).await, Code::InvalidArgument);
    refused("no source", snapshot(take("s", "")).await, Code::InvalidArgument);
    refused("source unknown", snapshot(take("s", "no")).await, Code::NotFound);
    let elsewhere = CreateSnapshotRequest { accessibility_requirements: places("there"), ..take("s", &one) };
    refused("another topology", snapshot(elsewhere).await, Code::ResourceExhausted);
    let first = ok(snapshot(take("s", &one)).await);
    assert_eq!(ok(snapshot(take("s", &one)).await), first);
    let message = refused("of another volume", snapshot(take("s", &other)).await, Code::AlreadyExists);
    assert!(message.contains(&one), "{message}");
    ok(snapshot(take(&"n".repeat(128), &one)).await);
    let _held = bench.driver.lock([(Key::SnapshotName("busy".parse().unwrap()), Hold::Exclusive)]).unwrap();
    refused("pending", snapshot(take("busy", &one)).await, Code::Aborted);
}

#[tokio::test]
async fn a_snapshot_is_answered_with_its_topology_unless_the_caller_named_another() {
    let bench = Bench::new();
    let volume = bench.volume(create("v")).await;
    let mut either = places("here").unwrap();
    either.requisite.extend(places("there").unwrap().requisite);
    for (name, accessibility_requirements, told) in
        [("anywhere", None, 1), ("either", Some(either), 1), ("named", places("here"), 0)]
    {
        let request = CreateSnapshotRequest { accessibility_requirements, ..take(name, &volume) };
        let snapshot = ok(bench.driver.create_snapshot(of(request)).await).snapshot.unwrap();
        assert_eq!(snapshot.accessible_topology.len(), told, "{name}");
        let get = GetSnapshotRequest { snapshot_id: snapshot.snapshot_id, ..Default::default() };
        let snapshot = ok(bench.driver.get_snapshot(of(get)).await).snapshot.unwrap();
        assert_eq!(snapshot.accessible_topology.len(), 1, "{name}");
    }
}

#[tokio::test]
async fn delete_and_get_snapshot_answer_the_rows_of_their_error_tables() {
    let bench = Bench::new();
    let volume = bench.volume(create("v")).await;
    let id = bench.snapshot("s", &volume).await;
    let remove = |id: &str| bench.driver.delete_snapshot(of(delete(id)));
    let get = |id: &str| {
        bench.driver.get_snapshot(of(GetSnapshotRequest { snapshot_id: id.into(), ..Default::default() }))
    };
    refused("no id", remove("").await, Code::InvalidArgument);
    refused("no id", get("").await, Code::InvalidArgument);
    refused("unknown", get("no").await, Code::NotFound);
    assert_eq!(ok(get(&id).await).snapshot.unwrap().snapshot_id, id);
    ok(remove("unknown").await);
    let reader = bench.driver.lock([(Key::Snapshot(id.parse().unwrap()), Hold::Shared)]).unwrap();
    refused("being restored", remove(&id).await, Code::Aborted);
    drop(reader);
    ok(remove(&id).await);
    ok(remove(&id).await);
    // A snapshot outlives its volume.
    let id = bench.snapshot("t", &volume).await;
    ok(bench.driver.delete_volume(of(DeleteVolumeRequest { volume_id: volume, ..Default::default() })).await);
    ok(get(&id).await);
}

#[tokio::test]
async fn snapshots_are_listed_by_id_by_volume_and_in_pages() {
    let bench = Bench::new();
    let (one, other) = (bench.volume(create("one")).await, bench.volume(create("other")).await);
    for number in 0..5 {
        bench.snapshot(&format!("a{number}"), &one).await;
    }
    let single = bench.snapshot("b", &other).await;
    let list = |snapshot: &str, source: &str, max_entries, token: &str| {
        bench.driver.list_snapshots(of(ListSnapshotsRequest {
            max_entries,
            starting_token: token.into(),
            source_volume_id: source.into(),
            snapshot_id: snapshot.into(),
            ..Default::default()
        }))
    };
    let count = |reply: Reply<berth_csi::v1::ListSnapshotsResponse>| ok(reply).entries.len();
    assert_eq!(count(list("", "", 0, "").await), 6);
    assert_eq!(count(list("", &one, 0, "").await), 5);
    assert_eq!(count(list(&single, "", 0, "").await), 1);
    assert_eq!(count(list(&single, &other, 0, "").await), 1);
    assert_eq!(count(list(&single, &one, 0, "").await), 0, "both have to be so");
    assert_eq!(count(list("no", "", 0, "").await), 0);
    assert_eq!(count(list("", "no", 0, "").await), 0);
    let first = ok(list("", &one, 2, "").await);
    assert_eq!(first.entries.len(), 2);
    assert_eq!(count(list("", &one, 0, &first.next_token).await), 3);
    refused("a token never given", list("", "", 0, "nonsense").await, Code::Aborted);
}

#[tokio::test]
async fn group_snapshots_answer_the_rows_of_their_error_tables() {
    let bench = Bench::new();
    let (one, other) = (bench.volume(create("one")).await, bench.volume(create("other")).await);
    let take = |name: &str, sources: &[&str]| {
        bench.driver.create_volume_group_snapshot(of(CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: sources.iter().map(|&id| id.to_owned()).collect(),
            ..Default::default()
        }))
    };
    refused("no name", take("", &[&one]).await, Code::InvalidArgument);
    refused("no sources", take("g", &[]).await, Code::InvalidArgument);
    refused("a source twice", take("g", &[&one, &one]).await, Code::InvalidArgument);
    refused("a source unknown", take("g", &[&one, "no"]).await, Code::NotFound);
    let group = ok(take("g", &[&one, &other]).await).group_snapshot.unwrap();
    assert_eq!(ok(take("g", &[&other, &one]).await).group_snapshot.unwrap(), group);
    refused("of other volumes", take("g", &[&one]).await, Code::AlreadyExists);
    let held = bench.driver.lock([(Key::Volume(other.parse().unwrap()), Hold::Exclusive)]).unwrap();
    refused("a source is busy", take("h", &[&one, &other]).await, Code::Aborted);
    drop(held);

    let member = group.snapshots[0].snapshot_id.clone();
    assert_eq!(group.snapshots[0].group_snapshot_id, group.group_snapshot_id);
    refused(
        "delete a member",
        bench.driver.delete_snapshot(of(delete(&member))).await,
        Code::InvalidArgument,
    );

    let all: Vec<String> = group.snapshots.iter().map(|snapshot| snapshot.snapshot_id.clone()).collect();
    let get = |id: &str, snapshot_ids: Vec<String>| {
        bench.driver.get_volume_group_snapshot(of(GetVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids,
            ..Default::default()
        }))
    };
    let remove = |id: &str, snapshot_ids: Vec<String>| {
        bench.driver.delete_volume_group_snapshot(of(DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids,
            ..Default::default()
        }))
    };
    let id = &group.group_snapshot_id;
    refused("get: no id", get("", vec![]).await, Code::InvalidArgument);
    refused("get: unknown", get("no", vec![]).await, Code::NotFound);
    refused("get: one member of two", get(id, vec![member.clone()]).await, Code::InvalidArgument);
    assert_eq!(ok(get(id, all.iter().rev().cloned().collect()).await).group_snapshot.unwrap(), group);
    refused("delete: no id", remove("", vec![]).await, Code::InvalidArgument);
    refused("delete: one member of two", remove(id, vec![member]).await, Code::InvalidArgument);
    ok(remove("unknown", vec![]).await);
    ok(remove(id, all.clone()).await);
    ok(remove(id, all).await);
    assert!(bench.fake.state().snapshots.is_empty());
}

async fn raw_snapshot(bench: &Bench, name: &str) -> String {
    let mut request = create(&format!("raw-{name}"));
    request.volume_capabilities = vec![raw(SNW)];
    let volume = bench.volume(request).await;
    bench.snapshot(name, &volume).await
}

fn allocated(id: &str, starting_offset: i64, max_results: i32) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest { snapshot_id: id.into(), starting_offset, max_results, ..Default::default() }
}

#[tokio::test]
async fn snapshot_metadata_answers_the_rows_of_its_error_tables() {
    let bench = Bench::new();
    let mount_volume = bench.volume(create("files")).await;
    let (files, block) = (bench.snapshot("f", &mount_volume).await, raw_snapshot(&bench, "a").await);
    let other = raw_snapshot(&bench, "b").await;
    let get = |request| bench.driver.get_metadata_allocated(of(request));
    refused("no id", get(allocated("", 0, 0)).await, Code::InvalidArgument);
    refused("unknown", get(allocated("no", 0, 0)).await, Code::NotFound);
    refused("of a filesystem", get(allocated(&files, 0, 0)).await, Code::InvalidArgument);
    refused("a negative offset", get(allocated(&block, -1, 0)).await, Code::OutOfRange);
    refused("beyond the end", get(allocated(&block, GIB + 1, 0)).await, Code::OutOfRange);
    refused("negative results", get(allocated(&block, 0, -1)).await, Code::InvalidArgument);

    let delta = |base: &str, target: &str| {
        bench.driver.get_metadata_delta(of(GetMetadataDeltaRequest {
            base_snapshot_id: base.into(),
            target_snapshot_id: target.into(),
            ..Default::default()
        }))
    };
    refused("base unknown", delta("no", &block).await, Code::NotFound);
    refused("target unknown", delta(&block, "no").await, Code::NotFound);
    refused("of different volumes", delta(&block, &other).await, Code::InvalidArgument);
    refused("no target", delta(&block, "").await, Code::InvalidArgument);
}

#[tokio::test]
async fn ranges_come_in_messages_of_the_size_asked_for() {
    let bench = Bench::new();
    let id = raw_snapshot(&bench, "s").await;
    for (most, from, expected) in
        [(4, 0, vec![4, 4, 2]), (0, 0, vec![10]), (10, 0, vec![10]), (3, 8 * 4096, vec![2])]
    {
        let stream = ok(bench.driver.get_metadata_allocated(of(allocated(&id, from, most))).await);
        let messages: Vec<_> = stream.map(Result::unwrap).collect().await;
        let sizes: Vec<usize> = messages.iter().map(|message| message.block_metadata.len()).collect();
        assert_eq!(sizes, expected, "at most {most} from {from}");
        assert!(messages.iter().all(|message| message.volume_capacity_bytes == GIB));
        assert_eq!(messages[0].block_metadata[0].byte_offset, from);
    }
}

#[tokio::test]
async fn an_error_ends_the_stream_after_what_was_found() {
    let bench = Bench::new();
    let mut request = create("v");
    request.volume_capabilities = vec![raw(SNW)];
    let volume = bench.volume(request).await;
    let (base, target) = (bench.snapshot("a", &volume).await, bench.snapshot("b", &volume).await);
    let request = GetMetadataDeltaRequest {
        base_snapshot_id: base,
        target_snapshot_id: target,
        max_results: 2,
        ..Default::default()
    };
    let mut stream = ok(bench.driver.get_metadata_delta(of(request)).await);
    assert_eq!(stream.next().await.unwrap().unwrap().block_metadata.len(), 2);
    assert_eq!(stream.next().await.unwrap().unwrap_err().code(), Code::Internal);
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn nothing_is_produced_for_a_caller_that_does_not_take_it_and_the_snapshot_is_held_until_then() {
    let bench = Bench::with(|fake| fake.ranges = u64::MAX / 4096, |_| {});
    let id = raw_snapshot(&bench, "s").await;
    let mut stream = ok(bench.driver.get_metadata_allocated(of(allocated(&id, 0, 1))).await);
    stream.next().await.unwrap().unwrap();
    refused("while it is read", bench.driver.delete_snapshot(of(delete(&id))).await, Code::Aborted);
    drop(stream);
    // The iterator has no end: only a caller that is gone stops it, and then the snapshot is free.
    while bench.driver.delete_snapshot(of(delete(&id))).await.is_err() {
        tokio::task::yield_now().await;
    }
}
