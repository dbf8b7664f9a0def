//! Staging and publishing with real mounts.

use std::{fs, os::unix::fs::MetadataExt as _};

use berth_core::names::EPHEMERAL;
use berth_csi::v1::{
    DeleteVolumeRequest, NodeExpandVolumeRequest, NodeGetInfoRequest, NodeGetStorageHealthRequest,
    NodeGetVolumeHealthRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, controller_server::Controller as _,
    node_server::Node as _,
};
use tonic::Code;

use super::{fake::PARAMETER, *};
use crate::Error;

const SNSW: AccessModeNumber = AccessModeNumber::SingleNodeSingleWriter;

impl Bench {
    fn stage_request(&self, id: &str) -> NodeStageVolumeRequest {
        NodeStageVolumeRequest {
            volume_id: id.into(),
            staging_target_path: self.path("staging"),
            volume_capability: Some(mounted(SNW)),
            ..Default::default()
        }
    }

    fn unstage_request(&self, id: &str) -> NodeUnstageVolumeRequest {
        NodeUnstageVolumeRequest { volume_id: id.into(), staging_target_path: self.path("staging") }
    }

    pub(super) fn publish_request(&self, id: &str, target: &str) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: id.into(),
            staging_target_path: self.path("staging"),
            target_path: self.path(target),
            volume_capability: Some(mounted(SNW)),
            ..Default::default()
        }
    }

    fn unpublish_request(&self, id: &str, target: &str) -> NodeUnpublishVolumeRequest {
        NodeUnpublishVolumeRequest { volume_id: id.into(), target_path: self.path(target) }
    }

    fn inline_request(&self, handle: &str, target: &str) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            staging_target_path: String::new(),
            volume_context: pairs(&[(EPHEMERAL, "true"), ("csi.storage.k8s.io/pod.name", "p")]),
            ..self.publish_request(handle, target)
        }
    }

    /// A volume that is staged.
    pub(super) async fn staged(&self, name: &str) -> String {
        let id = self.volume(create(name)).await;
        ok(self.driver.node_stage_volume(of(self.stage_request(&id))).await);
        id
    }

    pub(super) async fn publish(&self, id: &str, target: &str) {
        ok(self.driver.node_publish_volume(of(self.publish_request(id, target))).await);
    }

    pub(super) async fn unpublish(&self, id: &str, target: &str) {
        ok(self.driver.node_unpublish_volume(of(self.unpublish_request(id, target))).await);
    }
}

#[tokio::test]
async fn node_stage_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let right = bench.stage_request(&id);
    let rows: [(&str, Change<NodeStageVolumeRequest>, Code); 6] = [
        ("no volume id", |r| r.volume_id.clear(), Code::InvalidArgument),
        ("no staging path", |r| r.staging_target_path.clear(), Code::InvalidArgument),
        ("a relative staging path", |r| r.staging_target_path = "some/path".into(), Code::InvalidArgument),
        ("no capability", |r| r.volume_capability = None, Code::InvalidArgument),
        ("the other access", |r| r.volume_capability = Some(raw(SNW)), Code::InvalidArgument),
        ("volume unknown", |r| r.volume_id = "no".into(), Code::NotFound),
    ];
    for (row, change, code) in rows {
        let mut request = right.clone();
        change(&mut request);
        refused(row, bench.driver.node_stage_volume(of(request)).await, code);
    }
    ok(bench.driver.node_stage_volume(of(right.clone())).await);
    ok(bench.driver.node_stage_volume(of(right.clone())).await);
    assert_eq!(bench.fake.state().stagings, 2, "the second call may repair");

    let other = NodeStageVolumeRequest { volume_capability: Some(mounted(SNSW)), ..right.clone() };
    refused("another capability", bench.driver.node_stage_volume(of(other)).await, Code::AlreadyExists);
    let other = NodeStageVolumeRequest { staging_target_path: bench.path("other"), ..right };
    let message =
        refused("another path", bench.driver.node_stage_volume(of(other)).await, Code::FailedPrecondition);
    assert!(message.contains(&bench.path("staging")), "{message}");
}

#[tokio::test]
async fn a_failed_staging_is_no_staging() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    bench.fake.fail("stage", || Error::Exhausted("no loop device".into()));
    let reply = bench.driver.node_stage_volume(of(bench.stage_request(&id))).await;
    refused("stage", reply, Code::ResourceExhausted);
    let reply = bench.driver.node_publish_volume(of(bench.publish_request(&id, "t"))).await;
    refused("publish", reply, Code::FailedPrecondition);
    ok(bench.driver.delete_volume(of(DeleteVolumeRequest { volume_id: id, ..Default::default() })).await);
}

#[tokio::test]
async fn node_unstage_refuses_while_published_and_is_done_when_there_is_nothing() {
    let bench = Bench::new();
    let unstage = |request| bench.driver.node_unstage_volume(of(request));
    let mut nothing = bench.unstage_request("unknown");
    ok(unstage(nothing.clone()).await);
    nothing.volume_id.clear();
    refused("no volume id", unstage(nothing).await, Code::InvalidArgument);
    let nowhere =
        NodeUnstageVolumeRequest { staging_target_path: String::new(), ..bench.unstage_request("v") };
    refused("no staging path", unstage(nowhere).await, Code::InvalidArgument);

    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    let message = refused("published", unstage(bench.unstage_request(&id)).await, Code::FailedPrecondition);
    assert!(message.contains(&bench.path("target")), "{message}");
    bench.unpublish(&id, "target").await;
    let elsewhere =
        NodeUnstageVolumeRequest { staging_target_path: bench.path("other"), ..bench.unstage_request(&id) };
    ok(unstage(elsewhere).await);
    assert!(!bench.fake.state().staged.is_empty(), "it was staged somewhere else");
    bench.fake.fail("unstage", || Error::State("no".into()));
    refused("the backend fails", unstage(bench.unstage_request(&id)).await, Code::Internal);
    let reply = bench.driver.node_publish_volume(of(bench.publish_request(&id, "target"))).await;
    refused("half unstaged", reply, Code::FailedPrecondition);
    bench.fake.heal();
    ok(unstage(bench.unstage_request(&id)).await);
    ok(unstage(bench.unstage_request(&id)).await);
    assert!(bench.fake.state().staged.is_empty());
}

#[tokio::test]
async fn node_publish_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let publish = |request| bench.driver.node_publish_volume(of(request));
    let right = bench.publish_request(&id, "target");
    refused("not staged", publish(right.clone()).await, Code::FailedPrecondition);
    ok(bench.driver.node_stage_volume(of(bench.stage_request(&id))).await);
    let rows: [(&str, Change<NodePublishVolumeRequest>, Code); 10] = [
        ("no volume id", |r| r.volume_id.clear(), Code::InvalidArgument),
        ("no target", |r| r.target_path.clear(), Code::InvalidArgument),
        ("a relative target", |r| r.target_path = "target".into(), Code::InvalidArgument),
        ("a target through ..", |r| r.target_path.push_str("/../x"), Code::InvalidArgument),
        ("a target of 5000 bytes", |r| r.target_path.push_str(&"x".repeat(5000)), Code::InvalidArgument),
        ("no capability", |r| r.volume_capability = None, Code::InvalidArgument),
        ("the other access", |r| r.volume_capability = Some(raw(SNW)), Code::InvalidArgument),
        ("volume unknown", |r| r.volume_id = "no".into(), Code::NotFound),
        ("no staging path", |r| r.staging_target_path.clear(), Code::FailedPrecondition),
        ("staged elsewhere", |r| r.staging_target_path.push('x'), Code::FailedPrecondition),
    ];
    for (row, change, code) in rows {
        let mut request = right.clone();
        change(&mut request);
        refused(row, publish(request).await, code);
    }
    assert!(!fs::exists(bench.path("target")).unwrap());
    ok(publish(right.clone()).await);
    ok(publish(right.clone()).await);
    let reader = NodePublishVolumeRequest { readonly: true, ..right.clone() };
    refused("published, now read-only", publish(reader).await, Code::AlreadyExists);
    let other = NodePublishVolumeRequest { volume_capability: Some(mounted(SNSW)), ..right };
    refused("published, another mode", publish(other).await, Code::AlreadyExists);
}

#[tokio::test]
async fn a_published_volume_is_there_and_an_unpublished_one_leaves_no_trace() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    fs::write(bench.fake.files(&id).join("data"), "kept").unwrap();
    for target in ["a", "b"] {
        bench.publish(&id, target).await;
        assert_eq!(fs::read_to_string(bench.path(target) + "/data").unwrap(), "kept");
    }
    bench.unpublish(&id, "a").await;
    assert!(!fs::exists(bench.path("a")).unwrap() && is_mounted(&bench.path("b")));
    bench.unpublish(&id, "a").await;
    bench.unpublish(&id, "b").await;
    assert!(!fs::exists(bench.path("b")).unwrap());
    assert!(bench.driver.ledger.published(&id.parse().unwrap()).is_empty());
}

#[tokio::test]
async fn node_unpublish_touches_nothing_that_is_not_this_volumes() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    bench.unpublish("other", "target").await;
    assert!(is_mounted(&bench.path("target")), "it holds another volume");
    bench.unpublish("unknown", "nowhere").await;
    fs::create_dir(bench.path("full")).unwrap();
    fs::write(bench.path("full/data"), "precious").unwrap();
    let reply = bench.driver.node_unpublish_volume(of(bench.unpublish_request("unknown", "full"))).await;
    refused("not empty", reply, Code::FailedPrecondition);
    assert_eq!(fs::read_to_string(bench.path("full/data")).unwrap(), "precious");
    let unpublish = |volume_id: &str, target_path: &str| {
        bench.driver.node_unpublish_volume(of(NodeUnpublishVolumeRequest {
            volume_id: volume_id.into(),
            target_path: target_path.into(),
        }))
    };
    refused("no volume id", unpublish("", "/x").await, Code::InvalidArgument);
    refused("no target", unpublish("v", "").await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_target_where_something_else_is_mounted_is_refused() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    let (other, target) = (bench.path("other"), bench.path("target"));
    fs::create_dir(&other).unwrap();
    fs::create_dir(&target).unwrap();
    let attributes = berth_host::mount::Attributes::default();
    berth_host::mount::bind(&PathBuf::from(other), &PathBuf::from(&target), attributes).unwrap();
    let reply = bench.driver.node_publish_volume(of(bench.publish_request(&id, "target"))).await;
    refused("in the way", reply, Code::FailedPrecondition);
    assert!(is_mounted(&target));
}

#[tokio::test]
async fn a_target_left_from_before_a_reboot_is_removed() {
    let bench = Bench::new();
    fs::create_dir(bench.path("target")).unwrap();
    bench.unpublish("gone", "target").await;
    assert!(!fs::exists(bench.path("target")).unwrap());
}

#[tokio::test]
async fn a_mount_that_somebody_took_away_is_made_again() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    berth_host::mount::unmount(&PathBuf::from(bench.path("target"))).unwrap();
    bench.publish(&id, "target").await;
    assert!(is_mounted(&bench.path("target")));
}

#[tokio::test]
async fn readers_get_a_read_only_mount_however_they_say_it() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    let flagged = || {
        let mount = MountVolume { mount_flags: vec!["ro".into()], ..Default::default() };
        v1::VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..mounted(SNW) }
    };
    for (target, capability, readonly) in [
        ("by-flag", mounted(SNW), true),
        ("by-mode", mounted(AccessModeNumber::SingleNodeReaderOnly), false),
        ("by-option", flagged(), false),
    ] {
        let request = NodePublishVolumeRequest {
            volume_capability: Some(capability),
            readonly,
            ..bench.publish_request(&id, target)
        };
        ok(bench.driver.node_publish_volume(of(request)).await);
        assert!(fs::write(bench.path(target) + "/new", "").is_err(), "{target}");
    }
}

#[tokio::test]
async fn a_raw_volume_is_a_device_at_its_target() {
    use std::os::unix::fs::FileTypeExt as _;
    let bench = Bench::new();
    let id =
        bench.volume(v1::CreateVolumeRequest { volume_capabilities: vec![raw(SNW)], ..create("v") }).await;
    let stage = NodeStageVolumeRequest { volume_capability: Some(raw(SNW)), ..bench.stage_request(&id) };
    ok(bench.driver.node_stage_volume(of(stage)).await);
    let request = NodePublishVolumeRequest {
        volume_capability: Some(raw(SNW)),
        ..bench.publish_request(&id, "pods/device")
    };
    ok(bench.driver.node_publish_volume(of(request)).await);
    assert!(fs::metadata(bench.path("pods/device")).unwrap().file_type().is_char_device());
    bench.unpublish(&id, "pods/device").await;
    assert!(!fs::exists(bench.path("pods/device")).unwrap());
}

#[tokio::test]
async fn a_volume_for_one_workload_is_published_once() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    let alone = |target: &str| NodePublishVolumeRequest {
        volume_capability: Some(mounted(SNSW)),
        ..bench.publish_request(&id, target)
    };
    ok(bench.driver.node_publish_volume(of(alone("first"))).await);
    ok(bench.driver.node_publish_volume(of(alone("first"))).await);
    let message = refused(
        "second",
        bench.driver.node_publish_volume(of(alone("second"))).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains(&bench.path("first")), "{message}");
    let shared = bench.publish_request(&id, "second");
    refused("beside it", bench.driver.node_publish_volume(of(shared)).await, Code::FailedPrecondition);
    bench.unpublish(&id, "first").await;
    ok(bench.driver.node_publish_volume(of(alone("second"))).await);
}

#[tokio::test]
async fn a_mount_group_that_was_not_announced_is_refused() {
    let bench = Bench::composed(|fake| {
        Driver::new(NAME, "1")
            .controller(controller_part(fake).cloning(fake).placement(fake))
            .node(node_part(fake).staging(fake).topology(here()))
    });
    let mount = MountVolume { volume_mount_group: "4242".into(), ..Default::default() };
    let capability = v1::VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..mounted(SNW) };
    let request = v1::CreateVolumeRequest { volume_capabilities: vec![capability], ..create("v") };
    refused("create", bench.driver.create_volume(of(request)).await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_mount_group_gets_the_files() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    fs::write(bench.fake.files(&id).join("data"), "").unwrap();
    let mount = MountVolume { volume_mount_group: "4242".into(), ..Default::default() };
    let capability = v1::VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..mounted(SNW) };
    let request = NodePublishVolumeRequest {
        volume_capability: Some(capability),
        ..bench.publish_request(&id, "target")
    };
    ok(bench.driver.node_publish_volume(of(request)).await);
    assert_eq!(fs::metadata(bench.path("target/data")).unwrap().gid(), 4242);
    let stays = fs::metadata(bench.fake.files(&id).join("data")).unwrap().gid();
    assert_eq!(stays, 0, "a mount shows the group, and the file keeps its own");
    bench.unpublish(&id, "target").await;
}

#[tokio::test]
async fn a_mount_group_reads_what_is_published_for_reading_and_writes_nothing() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    let closed = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    let data = bench.fake.files(&id).join("data");
    fs::write(&data, "").unwrap();
    fs::set_permissions(&data, closed).unwrap();
    for (target, group, readonly) in [("reader", "4242", true), ("writer", "5353", false)] {
        let mount = MountVolume { volume_mount_group: group.into(), ..Default::default() };
        let capability = v1::VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..mounted(SNW) };
        let request = NodePublishVolumeRequest {
            volume_capability: Some(capability),
            readonly,
            ..bench.publish_request(&id, target)
        };
        ok(bench.driver.node_publish_volume(of(request)).await);
        let shown = fs::metadata(bench.path(&format!("{target}/data"))).unwrap();
        assert_eq!((shown.gid().to_string().as_str(), shown.mode() & 0o777), (group, 0o660), "{target}");
    }
    let written = fs::write(bench.path("reader/new"), "").unwrap_err();
    assert_eq!(written.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    fs::write(bench.path("writer/new"), "").unwrap();
    assert_eq!(fs::metadata(bench.path("reader/new")).unwrap().gid(), 4242);
    for target in ["reader", "writer"] {
        bench.unpublish(&id, target).await;
    }
}

#[tokio::test]
async fn what_is_in_use_here_is_not_deleted_whatever_the_lifecycle_check_says() {
    for check in [false, true] {
        let bench = Bench::with(|_| {}, |config| config.check_volume_lifecycle = check);
        let id = bench.staged("v").await;
        let delete = || {
            bench
                .driver
                .delete_volume(of(DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() }))
        };
        let message = refused("staged", delete().await, Code::FailedPrecondition);
        assert!(message.contains(&bench.path("staging")), "{message}");
        bench.publish(&id, "target").await;
        refused("published", delete().await, Code::FailedPrecondition);

        let attach = v1::ControllerPublishVolumeRequest {
            volume_id: id.clone(),
            node_id: "here".into(),
            volume_capability: Some(mounted(SNW)),
            ..Default::default()
        };
        ok(bench.driver.controller_publish_volume(of(attach)).await);
        let detach = v1::ControllerUnpublishVolumeRequest { volume_id: id.clone(), ..Default::default() };
        let reply = bench.driver.controller_unpublish_volume(of(detach)).await;
        assert_eq!(reply.is_err(), check, "detaching is refused only with the check");
    }
}

#[tokio::test]
async fn stats_are_answered_where_the_volume_is_published_and_nowhere_else() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    let stats = |id: &str, path: &str| {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.into(),
            volume_path: path.into(),
            ..Default::default()
        };
        bench.driver.node_get_volume_stats(of(request))
    };
    refused("no volume id", stats("", "some/path").await, Code::InvalidArgument);
    refused("no path", stats(&id, "").await, Code::InvalidArgument);
    refused("volume unknown", stats("no", "some/path").await, Code::NotFound);
    refused("not at this path", stats(&id, "some/path").await, Code::NotFound);
    refused("another's path", stats("no", &bench.path("target")).await, Code::NotFound);
    for path in ["target", "target/", "staging"] {
        let usage = ok(stats(&id, &bench.path(path)).await).usage;
        assert_eq!((usage[0].total, usage[1].total), (100, i64::MAX), "{path}");
    }
}

#[tokio::test]
async fn health_on_the_node_is_answered_for_volumes_that_exist() {
    let bench = Bench::new();
    let id = bench.volume(create("v")).await;
    let health = |id: &str| {
        let request = NodeGetVolumeHealthRequest { volume_id: id.into(), ..Default::default() };
        bench.driver.node_get_volume_health(of(request))
    };
    refused("no id", health("").await, Code::InvalidArgument);
    refused("unknown", health("no").await, Code::NotFound);
    assert_eq!(ok(health(&id).await).volume_health.unwrap().volume_id, id);
    let storage = ok(bench.driver.node_get_storage_health(of(NodeGetStorageHealthRequest::default())).await);
    assert_eq!(storage.backend_health.len(), 1, "one reason is told once");
}

#[tokio::test]
async fn the_node_answers_with_its_id_limit_and_topology() {
    let bench = Bench::with(|fake| fake.max_volumes = Some(7), |_| {});
    let info = ok(bench.driver.node_get_info(of(NodeGetInfoRequest {})).await);
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), ("here", 7));
    assert_eq!(info.accessible_topology.unwrap().segments["topology.test/node"], "here");
}

fn grow(id: &str, path: &str) -> NodeExpandVolumeRequest {
    NodeExpandVolumeRequest { volume_id: id.into(), volume_path: path.into(), ..Default::default() }
}

#[tokio::test]
async fn node_expand_answers_the_rows_of_its_error_table() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    let expand = |request| bench.driver.node_expand_volume(of(request));
    refused("no volume id", expand(grow("", "/x")).await, Code::InvalidArgument);
    refused("no path", expand(grow(&id, "")).await, Code::InvalidArgument);
    refused("volume unknown", expand(grow("no", "some/path")).await, Code::NotFound);
    refused("not at this path", expand(grow(&id, "/some/path")).await, Code::NotFound);
    let device =
        NodeExpandVolumeRequest { volume_capability: Some(raw(SNW)), ..grow(&id, &bench.path("target")) };
    refused("the other access", expand(device).await, Code::InvalidArgument);
    for path in ["target", "staging"] {
        assert_eq!(ok(expand(grow(&id, &bench.path(path))).await).capacity_bytes, GIB);
    }
    bench.fake.fail("expand_on_node", || Error::OutOfRange("no".into()));
    refused("out of range", expand(grow(&id, &bench.path("target"))).await, Code::OutOfRange);
}

#[tokio::test]
async fn what_grows_only_unmounted_is_taken_down_and_up_again() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    for target in ["a", "b"] {
        bench.publish(&id, target).await;
    }
    bench.fake.state().needs_remount = true;
    let before = bench.fake.state().stagings;
    ok(bench.driver.node_expand_volume(of(grow(&id, &bench.path("a")))).await);
    assert_eq!(bench.fake.state().stagings, before + 1);
    assert!(is_mounted(&bench.path("a")) && is_mounted(&bench.path("b")));
}

#[tokio::test]
async fn what_grows_only_unmounted_stays_where_it_is_while_in_use() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    fs::write(bench.fake.files(&id).join("data"), "").unwrap();
    for target in ["a", "b"] {
        bench.publish(&id, target).await;
    }
    bench.fake.state().needs_remount = true;
    let before = bench.fake.state().stagings;
    let user = fs::File::open(bench.path("b/data")).unwrap();
    let reply = bench.driver.node_expand_volume(of(grow(&id, &bench.path("a")))).await;
    let message = refused("in use", reply, Code::FailedPrecondition);
    assert!(message.contains("not mounted") && message.contains("next time"), "{message}");
    assert!(is_mounted(&bench.path("a")) && is_mounted(&bench.path("b")));
    assert_eq!(bench.fake.state().stagings, before, "it was never taken down");
    drop(user);
    ok(bench.driver.node_expand_volume(of(grow(&id, &bench.path("a")))).await);
}

#[tokio::test]
async fn growth_is_not_confirmed_while_a_mount_elsewhere_prevents_it() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "a").await;
    bench.fake.state().needs_remount = true;
    bench.fake.state().held_elsewhere = true;
    let expand = || bench.driver.node_expand_volume(of(grow(&id, &bench.path("a"))));
    refused("held elsewhere", expand().await, Code::FailedPrecondition);
    assert!(is_mounted(&bench.path("a")), "whoever uses it keeps it");
    // A caller that asks again and again does not have it unmounted each time.
    let before = bench.fake.state().stagings;
    refused("held elsewhere", expand().await, Code::FailedPrecondition);
    assert_eq!(bench.fake.state().stagings, before);
    // Somebody who may have held it is gone.
    bench.publish(&id, "b").await;
    bench.unpublish(&id, "b").await;
    refused("held elsewhere", expand().await, Code::FailedPrecondition);
    assert_eq!(bench.fake.state().stagings, before + 1);
    bench.publish(&id, "b").await;
    bench.unpublish(&id, "b").await;
    bench.fake.state().held_elsewhere = false;
    ok(expand().await);
}

#[tokio::test]
async fn a_remount_that_failed_halfway_is_finished_by_the_next_call() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    bench.fake.state().needs_remount = true;
    bench.fake.fail("stage", || Error::State("no".into()));
    let reply = bench.driver.node_expand_volume(of(grow(&id, &bench.path("target")))).await;
    refused("staging fails", reply, Code::Internal);
    assert!(!is_mounted(&bench.path("target")));
    bench.fake.heal();
    ok(bench.driver.node_expand_volume(of(grow(&id, &bench.path("target")))).await);
    assert!(is_mounted(&bench.path("target")));
}

#[tokio::test]
async fn an_inline_volume_comes_and_goes_with_its_pod() {
    let bench = Bench::new();
    let handle = format!("csi-{}", "f".repeat(64));
    let mut request = bench.inline_request(&handle, "target");
    request.volume_context.extend(pairs(&[("size", "5Gi"), (PARAMETER, "fast")]));
    for _ in 0..2 {
        ok(bench.driver.node_publish_volume(of(request.clone())).await);
    }
    {
        let state = bench.fake.state();
        let (name, volume) = state.volumes.values().next().unwrap();
        assert_eq!((state.volumes.len(), volume.ephemeral), (1, true));
        assert_eq!(name.as_str(), format!("ephemeral-{handle}"));
        assert_eq!((volume.capacity.as_i64(), volume.parameters.len()), (5 * GIB, 1));
    }
    assert!(is_mounted(&bench.path("target")));
    let stats = NodeGetVolumeStatsRequest {
        volume_id: handle.clone(),
        volume_path: bench.path("target"),
        ..Default::default()
    };
    ok(bench.driver.node_get_volume_stats(of(stats)).await);
    let second = NodePublishVolumeRequest { target_path: bench.path("second"), ..request };
    refused("a second pod", bench.driver.node_publish_volume(of(second)).await, Code::FailedPrecondition);
    bench.unpublish(&handle, "second").await;
    assert!(is_mounted(&bench.path("target")), "the second pod never had it");

    for _ in 0..2 {
        bench.unpublish(&handle, "target").await;
    }
    assert!(bench.fake.state().volumes.is_empty() && bench.fake.state().staged.is_empty());
    assert!(fs::read_dir(bench.path("state/ephemeral")).unwrap().next().is_none());
}

#[tokio::test]
async fn an_inline_volume_that_names_existing_storage_is_neither_made_nor_removed() {
    let bench = Bench::composed(|fake| {
        Driver::new(NAME, "1")
            .controller(controller_part(fake).cloning(fake).placement(fake))
            .node(node_part(fake).mount_group().topology(here()).inline_by_reference())
    });
    let id = bench.volume(create("existing")).await;
    ok(bench.driver.node_publish_volume(of(bench.inline_request(&id, "target"))).await);
    fs::write(bench.directory.path().join("target/file"), "precious").unwrap();
    assert_eq!(bench.fake.state().volumes.len(), 1);
    ok(bench.driver.node_unpublish_volume(of(bench.unpublish_request(&id, "target"))).await);
    assert_eq!(bench.fake.state().volumes.len(), 1);
    assert_eq!(fs::read_to_string(bench.fake.files(&id).join("file")).unwrap(), "precious");
}

#[tokio::test]
async fn an_inline_volume_that_fails_halfway_leaves_nothing() {
    let bench = Bench::new();
    let request = bench.inline_request("h", "target");
    for method in ["plan", "create", "stage", "source"] {
        bench.fake.fail(method, || Error::Exhausted("no".into()));
        refused(method, bench.driver.node_publish_volume(of(request.clone())).await, Code::ResourceExhausted);
        bench.fake.heal();
        assert!(bench.fake.state().volumes.is_empty() && bench.fake.state().staged.is_empty(), "{method}");
        assert!(bench.driver.ledger.everything().0.is_empty(), "{method}");
    }
    fs::create_dir(bench.path("target")).unwrap();
    fs::write(bench.path("target/data"), "precious").unwrap();
    refused("target", bench.driver.node_publish_volume(of(request)).await, Code::FailedPrecondition);
    assert!(bench.fake.state().volumes.is_empty());
}

#[tokio::test]
async fn inline_volumes_with_wrong_attributes_are_refused_by_name() {
    let bench = Bench::new();
    for (key, value) in [("size", "much"), ("size", "0"), ("size", "-1Gi"), ("colour", "red")] {
        let mut request = bench.inline_request("h", "target");
        request.volume_context.insert(key.into(), value.into());
        let message =
            refused(value, bench.driver.node_publish_volume(of(request)).await, Code::InvalidArgument);
        assert!(message.contains(key), "{message}");
    }
    let long = bench.inline_request(&"h".repeat(200), "target");
    refused("a long id", bench.driver.node_publish_volume(of(long)).await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_that_only_has_the_name_of_an_inline_one_is_never_removed() {
    let bench = Bench::new();
    bench.volume(create("ephemeral-h")).await;
    bench.unpublish("h", "target").await;
    assert_eq!(bench.fake.state().volumes.len(), 1);
    let reply = bench.driver.node_publish_volume(of(bench.inline_request("h", "target"))).await;
    refused("the name is taken", reply, Code::AlreadyExists);
    assert_eq!(bench.fake.state().volumes.len(), 1);
}

#[tokio::test]
async fn what_is_being_worked_on_is_aborted_on_the_node_too() {
    let bench = Bench::new();
    let id = bench.staged("v").await;
    let _held = bench.driver.lock_volume(&id.parse().unwrap()).unwrap();
    let driver = &bench.driver;
    refused("stage", driver.node_stage_volume(of(bench.stage_request(&id))).await, Code::Aborted);
    refused("unstage", driver.node_unstage_volume(of(bench.unstage_request(&id))).await, Code::Aborted);
    refused("publish", driver.node_publish_volume(of(bench.publish_request(&id, "t"))).await, Code::Aborted);
    refused(
        "unpublish",
        driver.node_unpublish_volume(of(bench.unpublish_request(&id, "t"))).await,
        Code::Aborted,
    );
    refused("expand", driver.node_expand_volume(of(grow(&id, &bench.path("staging")))).await, Code::Aborted);
}
