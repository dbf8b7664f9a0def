//! Snapshots with Berth's local driver: taken, restored, deleted; given ones; groups.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use berth_sidecars::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotContent, VolumeSnapshot, VolumeSnapshotContent,
};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::bench::{DRIVER, NODE, Server, local_driver};
use crate::snapshot_bench::{from_snapshot, gone, start_snapshotting, start_snapshotting_with};

const CONTENT_FINALIZER: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";

/// The data directories of all volumes of the local driver.
fn volumes(directory: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(directory.join("data/volumes")).unwrap();
    entries.map(|entry| entry.unwrap().path().join("data")).collect()
}

/// How many snapshots the local driver keeps.
fn kept(directory: &Path) -> usize {
    std::fs::read_dir(directory.join("data/snapshots")).map_or(0, Iterator::count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_a_claim_is_taken_restored_by_content_and_deleted() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let running = start_snapshotting(&server.client, &driver);
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({})).await;
    server.bound_claim("data", "fast", json!({})).await;
    let first = volumes(directory.path());
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
    let content = server.all::<VolumeSnapshotContent>().get(&name).await.unwrap();
    assert_eq!(content.spec.source_volume_mode.as_deref(), Some("Filesystem"));
    assert_eq!(content.spec.volume_snapshot_ref.uid, snapshot.uid());
    assert_eq!(kept(directory.path()), 1);
    // The claim is not kept any longer than the snapshot takes.
    let free = |claim: Option<&k8s_openapi::api::core::v1::PersistentVolumeClaim>| {
        claim.is_some_and(|claim| {
            !claim.finalizers().iter().any(|finalizer| finalizer.contains("pvc-as-source"))
        })
    };
    server.wait(server.claims(), "data", "free", free).await;

    let restored = server.claim("copy", "fast", from_snapshot("snap")).await;
    server.provisioned(&restored).await;
    let all = volumes(directory.path());
    let copy = all.difference(&first).next().unwrap();
    assert_eq!(std::fs::read_to_string(copy.join("file")).unwrap(), "precious");
    server.bind("copy").await;

    server.snapshots().delete("snap", &DeleteParams::default()).await.unwrap();
    server.wait(server.snapshots(), "snap", "gone", gone::<VolumeSnapshot>).await;
    server.wait(server.all(), &name, "gone", gone::<VolumeSnapshotContent>).await;
    assert_eq!(kept(directory.path()), 0);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retained_snapshot_outlives_its_object_and_is_given_to_another() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let running = start_snapshotting(&server.client, &driver);
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({ "deletionPolicy": "Retain" })).await;
    server.bound_claim("data", "fast", json!({})).await;
    std::fs::write(volumes(directory.path()).first().unwrap().join("file"), "kept").unwrap();
    server.snapshot("first", "data").await;
    let first = server.ready("first").await;
    assert!(!first.finalizers().iter().any(|finalizer| finalizer.contains("bound")), "nothing to wait for");
    server.snapshots().delete("first", &DeleteParams::default()).await.unwrap();
    server.wait(server.snapshots(), "first", "gone", gone::<VolumeSnapshot>).await;
    let old = server.contents().await.remove(0);
    assert_eq!(old.annotations()["snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"], "yes");
    assert_eq!(kept(directory.path()), 1);

    // The snapshot comes before its content.
    server.snapshot_of("second", json!({ "source": { "volumeSnapshotContentName": "given" } })).await;
    server.event("SnapshotContentMissing", "VolumeSnapshotContent is missing").await;
    let handle = old.status.unwrap().snapshot_handle;
    let back = json!({ "name": "second", "namespace": "default" });
    let spec = json!({ "source": { "snapshotHandle": handle }, "volumeSnapshotRef": back });
    server.content("given", spec).await;
    let second = server.ready("second").await;
    assert_eq!(second.status.clone().unwrap().error, None);
    let content = server.all::<VolumeSnapshotContent>().get("given").await.unwrap();
    assert_eq!(content.spec.volume_snapshot_ref.uid, second.uid());
    let before = volumes(directory.path());
    let restored = server.claim("copy", "fast", from_snapshot("second")).await;
    server.provisioned(&restored).await;
    let all = volumes(directory.path());
    let copy = all.difference(&before).next().unwrap();
    assert_eq!(std::fs::read_to_string(copy.join("file")).unwrap(), "kept");

    // It is kept while the claim waits for its volume, and then goes with its data.
    server.snapshots().delete("second", &DeleteParams::default()).await.unwrap();
    server.event("SnapshotDeletePending", "Snapshot is being used to restore a PVC").await;
    assert!(server.snapshots().get_opt("second").await.unwrap().is_some());
    server.bind("copy").await;
    server.wait(server.snapshots(), "second", "gone", gone::<VolumeSnapshot>).await;
    server.wait(server.all(), "given", "gone", gone::<VolumeSnapshotContent>).await;
    assert_eq!(kept(directory.path()), 0);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_waits_for_the_kinds_its_claim_and_its_class() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    let running = start_snapshotting(&server.client, &driver);
    server.class("fast", json!({})).await;
    server.define().await;
    server.snapshot("snap", "data").await;
    server.event("SnapshotContentCreationFailed", "the PVC data does not exist").await;
    let claim = server.claim("data", "fast", json!({})).await;
    server.event("SnapshotContentCreationFailed", "the PVC data is not yet bound to a PV").await;
    server.provisioned(&claim).await;
    server.bind("data").await;
    server.event("SetDefaultSnapshotClassFailed", "cannot find default snapshot class").await;
    server.snapshot_class("snaps", json!({})).await;
    let ready = server.ready("snap").await;
    assert_eq!(ready.status.unwrap().error, None);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_taken_at_once_restored_by_member_and_deleted_with_its_members() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let running = start_snapshotting(&server.client, &driver);
    server.class("fast", json!({})).await;
    server.group_class("groups", json!({})).await;
    let labels = json!({ "metadata": { "labels": { "app": "db" } } });
    server.bound_claim("one", "fast", labels.clone()).await;
    let one = volumes(directory.path());
    std::fs::write(one.first().unwrap().join("file"), "one").unwrap();
    server.bound_claim("two", "fast", labels).await;
    server.bound_claim("other", "fast", json!({})).await;

    let in_db = json!([{ "key": "app", "operator": "In", "values": ["db"] }]);
    server.group("all", json!({ "source": { "selector": { "matchExpressions": in_db } } })).await;
    let group = server.group_ready("all").await;
    assert_eq!(group.spec.volume_group_snapshot_class_name.as_deref(), Some("groups"));
    server.event("GroupSnapshotReady", "GroupSnapshot default/all is ready to use.").await;
    let members = server.snapshots().list(&kube::api::ListParams::default()).await.unwrap().items;
    assert_eq!(members.len(), 2);
    let mut first = None;
    for member in members {
        let ready = server.ready(&member.name_any()).await;
        assert_eq!(ready.status.unwrap().volume_group_snapshot_name.as_deref(), Some("all"));
        assert_eq!(member.owner_references()[0].name, "all");
        if member.spec.source.persistent_volume_claim_name.as_deref() == Some("one") {
            first = Some(member.name_any());
        }
    }
    let first = first.unwrap();
    let before = volumes(directory.path());
    let restored = server.claim("copy", "fast", from_snapshot(&first)).await;
    server.provisioned(&restored).await;
    let all = volumes(directory.path());
    let copy = all.difference(&before).next().unwrap();
    assert_eq!(std::fs::read_to_string(copy.join("file")).unwrap(), "one");
    server.bind("copy").await;

    // A member does not go alone.
    server.snapshots().delete(&first, &DeleteParams::default()).await.unwrap();
    server.event("SnapshotDeletePending", "it belongs to group snapshot default/all").await;
    server.groups().delete("all", &DeleteParams::default()).await.unwrap();
    server.wait(server.groups(), "all", "gone", gone::<VolumeGroupSnapshot>).await;
    server.wait(server.snapshots(), &first, "gone", gone::<VolumeSnapshot>).await;
    for content in server.contents().await {
        server.wait(server.all(), &content.name_any(), "gone", gone::<VolumeSnapshotContent>).await;
    }
    assert!(server.group_contents().await.is_empty());
    assert_eq!(kept(directory.path()), 0);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_snapshotter_on_every_node_each_acts_on_the_contents_of_its_node() {
    const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let elsewhere = start_snapshotting_with(&server.client, &driver, |taking, binding| {
        taking.node = Some("node-z".to_owned());
        binding.distributed = true;
    });
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({})).await;
    server.bound_claim("data", "fast", json!({})).await;
    let snapshot = server.snapshot("snap", "data").await;
    let name = format!("snapcontent-{}", snapshot.uid().unwrap());
    let labelled = |content: Option<&VolumeSnapshotContent>| {
        content.is_some_and(|content| content.labels().get(MANAGED_BY).is_some_and(|node| node == NODE))
    };
    server.wait(server.all(), &name, "labelled with its node", labelled).await;
    // The other node's snapshotter works, but not on this.
    let spec = json!({
        "driver": DRIVER,
        "deletionPolicy": "Retain",
        "source": { "snapshotHandle": "unknown" },
        "volumeSnapshotRef": { "name": "s", "namespace": "default" },
    });
    server
        .create::<VolumeSnapshotContent>(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshotContent",
            "metadata": { "name": "elsewhere", "labels": { MANAGED_BY: "node-z" } },
            "spec": spec,
        }))
        .await;
    let is_observed = |content: Option<&VolumeSnapshotContent>| {
        content.and_then(|content| content.status.as_ref()).is_some_and(|status| status.error.is_some())
    };
    server.wait(server.all(), "elsewhere", "looked at", is_observed).await;
    let untouched = server.all::<VolumeSnapshotContent>().get(&name).await.unwrap();
    assert_eq!(untouched.status, None);
    assert!(kept(directory.path()) == 0, "nobody has taken it");
    elsewhere.stop().await;

    let here = start_snapshotting_with(&server.client, &driver, |taking, binding| {
        taking.node = Some(NODE.to_owned());
        binding.distributed = true;
    });
    server.ready("snap").await;
    server.snapshots().delete("snap", &DeleteParams::default()).await.unwrap();
    server.wait(server.snapshots(), "snap", "gone", gone::<VolumeSnapshot>).await;
    assert_eq!(kept(directory.path()), 0);
    here.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshotter_labels_the_contents_of_snapshots_that_its_node_has() {
    const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let running = start_snapshotting_with(&server.client, &driver, |taking, binding| {
        taking.node = Some(NODE.to_owned());
        binding.distributed = true;
    });
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({ "deletionPolicy": "Retain" })).await;
    server.bound_claim("data", "fast", json!({})).await;
    server.snapshot("first", "data").await;
    server.ready("first").await;
    server.snapshots().delete("first", &DeleteParams::default()).await.unwrap();
    server.wait(server.snapshots(), "first", "gone", gone::<VolumeSnapshot>).await;
    let handle = server.contents().await.remove(0).status.unwrap().snapshot_handle;

    let spec = |name: &str, handle: Option<String>| {
        let back = json!({ "name": name, "namespace": "default" });
        json!({ "source": { "snapshotHandle": handle }, "volumeSnapshotRef": back })
    };
    // Nobody here has this one.
    server.content("strange", spec("strange", Some("elsewhere".to_owned()))).await;
    server.content("given", spec("second", handle)).await;
    server.snapshot_of("second", json!({ "source": { "volumeSnapshotContentName": "given" } })).await;
    server.ready("second").await;
    let label = |content: VolumeSnapshotContent| content.labels().get(MANAGED_BY).cloned();
    let contents = server.all::<VolumeSnapshotContent>();
    assert_eq!(label(contents.get("given").await.unwrap()).as_deref(), Some(NODE));
    assert_eq!(label(contents.get("strange").await.unwrap()), None);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshotter_labels_the_contents_of_groups_that_its_node_has() {
    const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let running = start_snapshotting_with(&server.client, &driver, |taking, binding| {
        taking.node = Some(NODE.to_owned());
        binding.distributed = true;
    });
    server.class("fast", json!({})).await;
    server.group_class("groups", json!({ "deletionPolicy": "Retain" })).await;
    for name in ["one", "two"] {
        server.bound_claim(name, "fast", json!({ "metadata": { "labels": { "app": "db" } } })).await;
    }
    let selector = json!({ "source": { "selector": { "matchLabels": { "app": "db" } } } });
    server.group("first", selector).await;
    server.group_ready("first").await;
    let taken = server.group_contents().await.remove(0).status.unwrap();
    let group = taken.volume_group_snapshot_handle.unwrap();
    let members: Vec<String> =
        taken.volume_snapshot_info_list.unwrap().into_iter().map(|member| member.snapshot_handle).collect();
    assert_eq!(members.len(), 2);
    server.groups().delete("first", &DeleteParams::default()).await.unwrap();
    server.wait(server.groups(), "first", "gone", gone::<VolumeGroupSnapshot>).await;

    // Of these the driver has no group, the group with other members, and the group as it is.
    for (name, group, members) in [
        ("strange", "elsewhere", &members[..]),
        ("torn", group.as_str(), &members[..1]),
        ("given", group.as_str(), &members[..]),
    ] {
        server.group_content(name, group, members).await;
        server.group(name, json!({ "source": { "volumeGroupSnapshotContentName": name } })).await;
    }
    server.group_ready("given").await;
    let refused = |content: Option<&VolumeGroupSnapshotContent>| {
        content.and_then(|content| content.status.as_ref()?.error.as_ref()).is_some()
    };
    server.wait(server.all(), "torn", "refused", refused).await;
    let contents = server.all::<VolumeGroupSnapshotContent>();
    for (name, expected) in [("given", Some(NODE)), ("torn", Some(NODE)), ("strange", None)] {
        let label = contents.get(name).await.unwrap().labels().get(MANAGED_BY).cloned();
        assert_eq!(label.as_deref(), expected, "{name}");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_content_is_released_by_its_node_also_when_it_was_deleted_before() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = local_driver(directory.path(), false).await;
    server.define().await;
    let start = || {
        start_snapshotting_with(&server.client, &driver, |taking, binding| {
            taking.node = Some(NODE.to_owned());
            binding.distributed = true;
        })
    };
    let running = start();
    server.class("fast", json!({})).await;
    server.snapshot_class("snaps", json!({ "deletionPolicy": "Retain" })).await;
    server.bound_claim("data", "fast", json!({})).await;
    server.snapshot("first", "data").await;
    server.ready("first").await;
    let handle = server.contents().await.remove(0).status.unwrap().snapshot_handle;
    running.stop().await;

    let back = json!({ "name": "second", "namespace": "default" });
    server
        .content("given", json!({ "source": { "snapshotHandle": handle }, "volumeSnapshotRef": back }))
        .await;
    let contents = server.all::<VolumeSnapshotContent>();
    let protected = json!({ "metadata": { "finalizers": [CONTENT_FINALIZER] } });
    contents.patch("given", &PatchParams::default(), &Patch::Merge(protected)).await.unwrap();
    contents.delete("given", &DeleteParams::default()).await.unwrap();
    let running = start();
    server.wait(contents, "given", "gone", gone::<VolumeSnapshotContent>).await;
    running.stop().await;
}
