//! Snapshots with a driver that refuses, hangs, is slow, loses answers and takes one for another.

use std::sync::Arc;
use std::time::Duration;

use berth_core::names::SNAPSHOT_WARNING;
use berth_csi::v1;
use berth_sidecars::snapshots::{VolumeGroupSnapshot, VolumeSnapshot, VolumeSnapshotContent};
use berth_testkit::{FakeDriver, FaultKind, Lie, REFUSED, patch};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Resource as _, ResourceExt as _};
use serde_json::json;
use tonic::Code;

use crate::bench::{DRIVER, Server, connect};
use crate::power::Power;
use crate::snapshot_bench::{gone, start_snapshotting, start_snapshotting_with};

const BEING_CREATED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-created";

pub(crate) const CODES: [Code; 16] = [
    Code::Cancelled,
    Code::Unknown,
    Code::InvalidArgument,
    Code::DeadlineExceeded,
    Code::NotFound,
    Code::AlreadyExists,
    Code::PermissionDenied,
    Code::ResourceExhausted,
    Code::FailedPrecondition,
    Code::Aborted,
    Code::OutOfRange,
    Code::Unimplemented,
    Code::Internal,
    Code::Unavailable,
    Code::DataLoss,
    Code::Unauthenticated,
];

async fn bench() -> (Server, Arc<FakeDriver>) {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.define().await;
    server.snapshot_class("snaps", json!({})).await;
    server.group_class("groups", json!({})).await;
    server.made_claim("data").await;
    (server, fake)
}

fn content_of(snapshot: &VolumeSnapshot) -> String {
    format!("snapcontent-{}", snapshot.uid().unwrap())
}

async fn delete(server: &Server, name: &str) {
    server.snapshots().delete(name, &DeleteParams::default()).await.unwrap();
    server.wait(server.snapshots(), name, "gone", gone::<VolumeSnapshot>).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_code_is_reported_and_overcome_and_only_a_final_one_removes_the_annotation() {
    let (server, fake) = bench().await;
    let name = |code: Code| format!("snap-{}", code as i32);
    for code in CODES {
        let snapshot = server.snapshot(&name(code), "data").await;
        fake.fail("CreateSnapshot", &snapshot.uid().unwrap(), FaultKind::Code(code), 1);
    }
    let first = start_snapshotting_with(&server.client, &connect(&fake, &Power::on()), |taking, _| {
        // It never tries again, so that what a failure leaves can be looked at.
        taking.retry.first = Duration::from_hours(1);
        taking.retry.longest = Duration::from_hours(1);
    });
    for code in CODES {
        let name = name(code);
        let snapshot = server.snapshots().get(&name).await.unwrap();
        let failed = |content: Option<&VolumeSnapshotContent>| {
            content.and_then(|content| content.status.as_ref()?.error.as_ref()).is_some()
        };
        let content = server.wait(server.all(), &content_of(&snapshot), "failed", failed).await.unwrap();
        let message = content.status.clone().unwrap().error.unwrap().message.unwrap();
        let reported = format!("rpc error: code = {} desc = {REFUSED}", berth_csi::code::go_name(code));
        assert!(
            message.starts_with("Failed to create snapshot: failed to take snapshot of the volume id-data: ")
        );
        assert!(message.contains(&reported), "{message}");
        server.event("SnapshotCreationFailed", &reported).await;
        let annotated = content.annotations().contains_key(BEING_CREATED);
        assert_eq!(annotated, !berth_csi::code::is_final(code), "{code:?}");
        let reported = |snapshot: Option<&VolumeSnapshot>| {
            snapshot.and_then(|snapshot| snapshot.status.as_ref()?.error.as_ref()).is_some()
        };
        let snapshot = server.wait(server.snapshots(), &name, "reported", reported).await.unwrap();
        assert_eq!(snapshot.status.unwrap().error.unwrap().message, Some(message));
    }
    assert_eq!(fake.count("CreateSnapshot"), CODES.len());
    first.stop().await;
    let second = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    for code in CODES {
        let ready = server.ready(&name(code)).await;
        assert_eq!(ready.status.clone().unwrap().error, None, "{code:?}");
        let unmarked = |content: Option<&VolumeSnapshotContent>| {
            content.is_some_and(|content| !content.annotations().contains_key(BEING_CREATED))
        };
        server.wait(server.all(), &content_of(&ready), "unmarked", unmarked).await;
    }
    assert_eq!(fake.count("CreateSnapshot"), 2 * CODES.len());
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_that_is_not_ready_is_asked_for_again_and_is_no_failure() {
    let (server, fake) = bench().await;
    *fake.storage.unready.lock() = 4;
    let running = start_snapshotting_with(&server.client, &connect(&fake, &Power::on()), |taking, _| {
        // Were it a failure, the test would take forever.
        taking.retry.first = Duration::from_mins(10);
        taking.retry.longest = Duration::from_mins(10);
    });
    server.snapshot("snap", "data").await;
    let ready = server.ready("snap").await;
    assert_eq!(fake.count("CreateSnapshot"), 5);
    assert!(
        ready.status.unwrap().creation_time.unwrap().0.as_second() > 1_000_000_000,
        "no time means now, not 1970"
    );
    let failures = server.events().await;
    assert!(failures.iter().all(|event| !event.reason.as_ref().unwrap().contains("Failed")), "{failures:?}");
    // The same words again count up the event that is there.
    server.event("SnapshotProgress", "of many").await;
    let reported = server.events_of("VolumeSnapshot", "SnapshotProgress").await;
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert_eq!(reported[0].metadata.namespace.as_deref(), Some("default"));
    running.stop().await;

    // One that is ready at once has no progress.
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    server.snapshot("quick", "data").await;
    server.ready("quick").await;
    server.event("SnapshotReady", "default/quick").await;
    let reported = server.events_of("VolumeSnapshot", "SnapshotProgress").await;
    assert!(
        reported.iter().all(|event| event.involved_object.name.as_deref() == Some("snap")),
        "{reported:?}"
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warning_beside_the_answer_becomes_an_event_and_an_annotation_that_survives_a_crash() {
    let (server, fake) = bench().await;
    *fake.storage.snapshot_warnings.lock() = vec!["the files are of different moments (目录)".to_owned()];
    // The first answer is lost, so that the one that counts is the answer to a repeated call.
    fake.fail("CreateSnapshot", "", FaultKind::DoneBut(Code::DeadlineExceeded), 1);
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    server.snapshot("snap", "data").await;
    let ready = server.ready("snap").await;
    server.event("DriverWarning", "目录").await;
    let annotated = |content: Option<&VolumeSnapshotContent>| {
        let annotations = content.map(|content| content.annotations().clone()).unwrap_or_default();
        annotations.get(SNAPSHOT_WARNING).is_some_and(|text| text.contains("different moments"))
            && !annotations.contains_key(BEING_CREATED)
    };
    server.wait(server.all(), &content_of(&ready), "annotated", annotated).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_settled_is_not_written_again_by_a_successor() {
    let (server, fake) = bench().await;
    let first = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let snapshot = server.snapshot("snap", "data").await;
    server.ready("snap").await;
    first.stop().await;
    let versions = async || {
        let snapshot = server.snapshots().get("snap").await.unwrap();
        let content = server.all::<VolumeSnapshotContent>().get(&content_of(&snapshot)).await.unwrap();
        (snapshot.resource_version(), content.resource_version())
    };
    // The first life may have been stopped before its last write.
    let second = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    server.snapshot("other", "data").await;
    server.ready("other").await;
    second.stop().await;
    let settled = versions().await;
    let calls = fake.count("CreateSnapshot");
    let third = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    server.snapshot("last", "data").await;
    server.ready("last").await;
    third.stop().await;
    assert_eq!(versions().await, settled);
    assert_eq!(fake.count("CreateSnapshot"), calls + 1);
    assert_eq!(snapshot.uid(), server.snapshots().get("snap").await.unwrap().uid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_behind_a_lost_answer_goes_with_its_object() {
    let (server, fake) = bench().await;
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    fake.fail("CreateSnapshot", "", FaultKind::DoneBut(Code::DeadlineExceeded), u32::MAX);
    let snapshot = server.snapshot("snap", "data").await;
    let annotated = |content: Option<&VolumeSnapshotContent>| {
        content.is_some_and(|content| content.annotations().contains_key(BEING_CREATED))
    };
    fake.until_called("CreateSnapshot", &snapshot.uid().unwrap(), 1).await;
    server.wait(server.all(), &content_of(&snapshot), "annotated", annotated).await;
    server.snapshots().delete("snap", &DeleteParams::default()).await.unwrap();
    fake.lift_faults();
    server.wait(server.snapshots(), "snap", "gone", gone::<VolumeSnapshot>).await;
    assert!(fake.storage.snapshots.lock().is_empty());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_content_that_is_still_marked_when_it_is_deleted_loses_the_mark_and_goes() {
    let (server, fake) = bench().await;
    let first = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let snapshot = server.snapshot("snap", "data").await;
    server.ready("snap").await;
    first.stop().await;
    // As a life leaves it that ends between the answer and the removal of the annotation, if the deletion comes before the next.
    let content = content_of(&snapshot);
    let gone_soon = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";
    let annotations = json!({ "metadata": { "annotations": { BEING_CREATED: "yes", gone_soon: "yes" } } });
    patch(&server.all::<VolumeSnapshotContent>(), &content, annotations).await;
    server.snapshots().delete("snap", &DeleteParams::default()).await.unwrap();
    server.all::<VolumeSnapshotContent>().delete(&content, &DeleteParams::default()).await.unwrap();
    let second = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    server.wait(server.snapshots(), "snap", "gone", gone::<VolumeSnapshot>).await;
    assert!(fake.storage.snapshots.lock().is_empty() && server.contents().await.is_empty());
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_snapshot_blocks_no_other_volume() {
    let (server, fake) = bench().await;
    server.made_claim("other").await;
    let running = start_snapshotting_with(&server.client, &connect(&fake, &Power::on()), |taking, _| {
        (taking.workers, taking.timeout) = (2, Duration::from_secs(5));
    });
    fake.fail("CreateSnapshot", "", FaultKind::Hang, 1);
    server.snapshot("stuck", "data").await;
    while fake.count("CreateSnapshot") == 0 {
        tokio::task::yield_now().await;
    }
    for name in ["one", "two", "three"] {
        server.snapshot(name, "other").await;
        server.ready(name).await;
    }
    // After its time the call is repeated, and then it works.
    server.ready("stuck").await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_reaches_the_driver_and_nothing_else_and_its_loss_keeps_no_snapshot() {
    let (server, fake) = bench().await;
    let secrets: Api<Secret> = Api::namespaced(server.client.clone(), "default");
    let secret = json!({ "metadata": { "name": "snap-key" }, "stringData": { "password": "swordfish" } });
    secrets.create(&PostParams::default(), &serde_json::from_value(secret).unwrap()).await.unwrap();
    let parameters = json!({
        "csi.storage.k8s.io/snapshotter-secret-name": "${volumesnapshot.name}-key",
        "csi.storage.k8s.io/snapshotter-secret-namespace": "${volumesnapshot.namespace}",
    });
    server
        .snapshot_class("secret", json!({ "parameters": parameters, "metadata": { "annotations": null } }))
        .await;
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let source =
        json!({ "source": { "persistentVolumeClaimName": "data" }, "volumeSnapshotClassName": "secret" });
    server.snapshot_of("snap", source).await;
    server.ready("snap").await;
    assert_eq!(fake.requests::<v1::CreateSnapshotRequest>()[0].secrets["password"], "swordfish");
    secrets.delete("snap-key", &DeleteParams::default()).await.unwrap();
    fake.fail("DeleteSnapshot", "", FaultKind::Code(Code::Internal), 1);
    delete(&server, "snap").await;
    server.event("SnapshotDeleteError", "Failed to delete snapshot: rpc error: code = Internal").await;
    assert!(fake.storage.snapshots.lock().is_empty());
    let reported = format!("{:?} {:?}", server.events().await, server.contents().await);
    assert!(!reported.contains("swordfish"));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_handle_that_the_driver_does_not_know_is_reported() {
    let (server, fake) = bench().await;
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let back = json!({ "name": "snap", "namespace": "default" });
    let spec = json!({ "source": { "snapshotHandle": "id-late" }, "volumeSnapshotRef": back });
    server.content("given", spec).await;
    server.snapshot_of("snap", json!({ "source": { "volumeSnapshotContentName": "given" } })).await;
    let reported = "can not find snapshot for snapshotID id-late";
    server.event("SnapshotContentCheckandUpdateFailed", reported).await;
    fake.storage.snapshots.lock().insert("late".to_owned(), "id-data".to_owned());
    let ready = server.ready("snap").await;
    assert_eq!(ready.status.unwrap().error, None);
    assert_eq!(fake.count("CreateSnapshot"), 0);

    // A content whose snapshot does not exist stays, and so does its data.
    let back = json!({ "name": "nobody", "namespace": "default", "uid": "of-another-cluster" });
    server
        .content("orphan", json!({ "source": { "snapshotHandle": "id-late" }, "volumeSnapshotRef": back }))
        .await;
    let checked = |content: Option<&VolumeSnapshotContent>| {
        content.is_some_and(|content| {
            content.status.as_ref().is_some_and(|status| status.ready_to_use == Some(true))
                && content.meta().finalizers.is_some()
        })
    };
    server.wait(server.all(), "orphan", "checked and kept", checked).await;
    running.stop().await;
    let orphan = server.all::<VolumeSnapshotContent>().get("orphan").await.unwrap();
    assert_eq!(orphan.metadata.deletion_timestamp, None);
    assert_eq!(fake.count("DeleteSnapshot"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_that_was_not_asked_for_is_not_taken_for_the_one_that_was() {
    let (server, fake) = bench().await;
    for name in ["one", "two"] {
        fake.storage.snapshots.lock().insert(name.to_owned(), "id-data".to_owned());
    }
    fake.fail("ListSnapshots", "id-two", FaultKind::Lie(Lie::Another), u32::MAX);
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let back = json!({ "name": "snap", "namespace": "default" });
    let spec = json!({ "source": { "snapshotHandle": "id-two" }, "volumeSnapshotRef": back });
    server.content("given", spec).await;
    server.snapshot_of("snap", json!({ "source": { "volumeSnapshotContentName": "given" } })).await;
    let reported = "can not find snapshot for snapshotID id-two";
    server.event("SnapshotContentCheckandUpdateFailed", reported).await;
    fake.lift_faults();
    server.ready("snap").await;
    delete(&server, "snap").await;
    let left: Vec<String> = fake.storage.snapshots.lock().keys().cloned().collect();
    assert_eq!(left, ["one"], "the other one's snapshot is nobody's to delete");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_snapshot_goes_with_its_object_though_its_content_was_not_kept_yet() {
    let (server, fake) = bench().await;
    fake.storage.snapshots.lock().insert("given".to_owned(), "id-data".to_owned());
    let first = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let back = json!({ "name": "snap", "namespace": "default" });
    let spec = json!({ "source": { "snapshotHandle": "id-given" }, "volumeSnapshotRef": back });
    server.content("given", spec).await;
    server.snapshot_of("snap", json!({ "source": { "volumeSnapshotContentName": "given" } })).await;
    server.ready("snap").await;
    first.stop().await;
    // As a life leaves it that ends between binding a content and keeping it.
    let contents = server.all::<VolumeSnapshotContent>();
    patch(&contents, "given", json!({ "metadata": { "finalizers": null } })).await;
    server.snapshots().delete("snap", &DeleteParams::default()).await.unwrap();
    let second = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    server.wait(server.snapshots(), "snap", "gone", gone::<VolumeSnapshot>).await;
    assert!(fake.storage.snapshots.lock().is_empty() && server.contents().await.is_empty());
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_goes_on_as_soon_as_the_volume_of_its_claim_is_seen() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    server.define().await;
    server.group_class("groups", json!({})).await;
    let running = start_snapshotting(&server.client, &connect(&fake, &Power::on()));
    let claim = server.made_claim_without_volume("data").await;
    server.group("all", json!({ "source": { "selector": { "matchLabels": { "app": "db" } } } })).await;
    let missing = "the PersistentVolume of the PVC data does not exist";
    let failed = |group: Option<&VolumeGroupSnapshot>| {
        let error = group.and_then(|group| group.status.as_ref()?.error.as_ref()?.message.clone());
        error.is_some_and(|error| error.contains(missing))
    };
    server.wait(server.groups(), "all", missing, failed).await;
    server.made_volume(&claim).await;
    server.group_ready("all").await;
    running.stop().await;
}
