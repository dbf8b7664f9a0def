//! Snapshots with Berth's local driver: taken, restored, deleted; given ones; groups.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use berth_sidecars::snapshots::{VolumeSnapshot, VolumeSnapshotContent};
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::json;

use crate::bench::{Server, local_driver};
use crate::snapshot_bench::{Running, from_snapshot, gone};

/// The data directories of all volumes of the local driver.
fn volumes(place: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(place.join("data/volumes")).unwrap();
    entries.map(|entry| entry.unwrap().path().join("data")).collect()
}

/// How many snapshots the local driver keeps.
fn kept(place: &Path) -> usize {
    std::fs::read_dir(place.join("data/snapshots")).map_or(0, Iterator::count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_a_claim_is_taken_restored_by_content_and_deleted() {
    let (server, place) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(place.path(), false).await;
    server.define().await;
    let running = Running::start(&server.client, &driver);
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({})).await;
    server.bound_claim("data", "fast", json!({})).await;
    let first = volumes(place.path());
    std::fs::write(first.first().unwrap().join("file"), "precious").unwrap();

    let snapshot = server.snapshot("snap", "data").await;
    let ready = server.ready("snap").await;
    let status = ready.status.clone().unwrap();
    let name = format!("snapcontent-{}", snapshot.uid().unwrap());
    assert_eq!(status.bound_volume_snapshot_content_name.as_deref(), Some(name.as_str()));
    assert!(status.creation_time.is_some() && status.error.is_none());
    assert_eq!(status.restore_size.unwrap().0, "16Mi");
    assert_eq!(ready.spec.volume_snapshot_class_name.as_deref(), Some("snaps"));
    let protections: BTreeSet<&str> = ready.finalizers().iter().map(String::as_str).collect();
    let expected = [
        "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection",
        "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection",
    ];
    assert_eq!(protections, BTreeSet::from(expected));
    server
        .event("CreatingSnapshot", "Waiting for a snapshot default/snap to be created by the CSI driver.")
        .await;
    server
        .event("SnapshotCreated", "Snapshot default/snap was successfully created by the CSI driver.")
        .await;
    server.event("SnapshotReady", "Snapshot default/snap is ready to use.").await;
    let content = server.api::<VolumeSnapshotContent>().get(&name).await.unwrap();
    assert_eq!(content.spec.source_volume_mode.as_deref(), Some("Filesystem"));
    assert_eq!(content.spec.volume_snapshot_ref.uid, snapshot.uid());
    assert_eq!(kept(place.path()), 1);
    // The claim is not kept any longer than the snapshot takes.
    let free = |claim: Option<&k8s_openapi::api::core::v1::PersistentVolumeClaim>| {
        claim.is_some_and(|claim| {
            !claim.finalizers().iter().any(|finalizer| finalizer.contains("pvc-as-source"))
        })
    };
    server.wait(server.claims(), "data", "free", free).await;

    let restored = server.claim("copy", "fast", from_snapshot("snap")).await;
    server.provisioned(&restored).await;
    let all = volumes(place.path());
    let copy = all.difference(&first).next().unwrap();
    assert_eq!(std::fs::read_to_string(copy.join("file")).unwrap(), "precious");
    server.bind("copy").await;

    server.snapshots().delete("snap", &DeleteParams::default()).await.unwrap();
    server.wait(server.snapshots(), "snap", "gone", gone::<VolumeSnapshot>).await;
    server.wait(server.api(), &name, "gone", gone::<VolumeSnapshotContent>).await;
    assert_eq!(kept(place.path()), 0);
    running.stop().await;
}
