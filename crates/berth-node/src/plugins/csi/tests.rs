//! What a pod gets of a driver, and what is left after everything that can go wrong.

mod local;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::sync::Arc;

use berth_csi::v1::node_service_capability::rpc::Type as Can;
use berth_csi::v1::volume_capability::AccessType;
use berth_testkit::{FakeDriver, FaultKind, RecordedCall, RegisteredDriver, merge};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Secret, Volume};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tonic::Code;

use super::*;
use crate::plugin::Certainty;
use crate::registration::tests::World;
use berth_kube::{Key, storage::attachment_name};

const DRIVER: &str = "a.example";

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn pod(uid: &str, security: &Value) -> Arc<Pod> {
    Arc::new(object(json!({
        "metadata": { "name": "p", "namespace": "default", "uid": uid },
        "spec": { "containers": [], "serviceAccountName": "sa", "securityContext": security },
    })))
}

fn persistent(driver: &str, handle: &str, spec: Value) -> PodVolume {
    let mut volume: PersistentVolume = object(json!({
        "metadata": { "name": "pv" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "64Mi" },
            "csi": { "driver": driver, "volumeHandle": handle },
        },
    }));
    let mut value = serde_json::to_value(volume.spec.unwrap()).unwrap();
    merge(&mut value, spec);
    volume.spec = Some(object(value));
    let claim = Arc::new(PersistentVolumeClaim::default());
    let source = Source::Persistent { volume: Arc::new(volume), claim };
    PodVolume::new(pod("uid", &json!({})), "data", source, false, false)
}

fn inline(driver: &str) -> PodVolume {
    let volume: Volume = object(json!({
        "name": "data",
        "csi": { "driver": driver, "volumeAttributes": { "k": "v" }, "nodePublishSecretRef": { "name": "s" } },
    }));
    let source = Source::Inline(Arc::new(volume));
    PodVolume::new(pod("uid", &json!({})), "data", source, false, false)
}

fn placed(spec_name: &str, block: bool) -> Placed {
    Placed { plugin: NAME.to_owned(), pod_uid: "uid".to_owned(), spec_name: spec_name.to_owned(), block }
}

fn csi(world: &World) -> Csi {
    let layout = Layout::new(world.server.directory().join("kubelet"));
    Csi::new(&world.cluster, &layout, "n", world.drivers.clone(), Tokens::new(&world.cluster))
}

async fn driver_object(world: &World, name: &str, spec: Value) {
    let object: CSIDriver = object(json!({ "metadata": { "name": name }, "spec": spec }));
    world.cluster.create(&object).await.unwrap();
}

/// A node with a registered fake driver that needs no attaching, and the plugin.
async fn with_fake(capabilities: &[Can]) -> (World, RegisteredDriver, Csi) {
    let world = World::new().await;
    let fake = world.fake(DRIVER, capabilities);
    fake.start(&world.registry(), "a.sock").await;
    world.drivers.wait(DRIVER).await;
    let csi = csi(&world);
    (world, fake, csi)
}

async fn without_attach(capabilities: &[Can]) -> (World, RegisteredDriver, Csi) {
    let made = with_fake(capabilities).await;
    driver_object(&made.0, DRIVER, json!({ "attachRequired": false })).await;
    made
}

/// What was asked of the driver about a volume.
#[derive(Debug)]
enum Call {
    Stage(NodeStageVolumeRequest),
    Unstage(NodeUnstageVolumeRequest),
    Publish(NodePublishVolumeRequest),
    Unpublish(NodeUnpublishVolumeRequest),
    Expand(NodeExpandVolumeRequest),
}

/// The calls about volumes since the last time.
fn node_calls(fake: &FakeDriver) -> Vec<Call> {
    let call = |call: &RecordedCall| {
        let staged = call.request().map(Call::Stage).or_else(|| call.request().map(Call::Unstage));
        let published = || call.request().map(Call::Publish).or_else(|| call.request().map(Call::Unpublish));
        staged.or_else(published).or_else(|| call.request().map(Call::Expand))
    };
    fake.take_calls().iter().filter_map(call).collect()
}

/// Lets every call of a method fail so, or none.
fn set_fault(fake: &FakeDriver, method: &'static str, fault: Option<FaultKind>) {
    fake.repair(method, "");
    if let Some(kind) = fault {
        fake.fail(method, "", kind, u32::MAX);
    }
}

/// Nothing of any volume is left on disk.
fn assert_clean(csi: &Csi) {
    assert!(csi.staged().is_empty());
    for top in [csi.layout.plugins().join(NAME), csi.layout.pods()] {
        let mut rest = vec![top];
        while let Some(path) = rest.pop() {
            for entry in disk::entries(&path) {
                assert!(entry.is_dir() && !entry.is_symlink(), "{} is left", entry.display());
                assert!(
                    !entry.ends_with("mount") && !entry.ends_with("globalmount"),
                    "{} is left",
                    entry.display()
                );
                rest.push(entry);
            }
        }
    }
}

#[tokio::test]
async fn a_volume_goes_all_the_way_and_back() {
    let (_world, fake, csi) = without_attach(&[Can::StageUnstageVolume, Can::GetVolumeStats]).await;
    let mut volume = persistent(
        DRIVER,
        "h",
        json!({ "mountOptions": ["noatime"], "csi": { "fsType": "ext4", "volumeAttributes": { "k": "v" } } }),
    );
    volume.read_only = true;
    csi.objects.synced().await;
    let device = csi.device(&volume).unwrap().unwrap();
    let unique_name = "kubernetes.io/csi/a.example^h".to_owned();
    assert_eq!(device, Device { unique_name: unique_name.clone(), attach: false, stage: true });
    csi.stage(&volume).await.unwrap();
    let ready = csi.set_up(&volume).await.unwrap();
    assert_eq!(ready.path, csi.layout.pod("uid").join("volumes/kubernetes.io~csi/pv/mount"));
    let calls = node_calls(&fake);
    let [Call::Stage(stage), Call::Publish(publish)] = calls.as_slice() else { panic!("{calls:?}") };
    let staging = csi.layout.csi_staging(DRIVER, "h").join("globalmount").display().to_string();
    assert_eq!((stage.volume_id.as_str(), stage.staging_target_path.as_str()), ("h", staging.as_str()));
    assert_eq!((publish.staging_target_path.as_str(), publish.readonly), (staging.as_str(), true));
    assert_eq!(publish.target_path, ready.path.display().to_string());
    assert_eq!(publish.volume_context.len(), 1);
    assert_eq!(stage.volume_capability, publish.volume_capability);

    // A new process knows it from what stands on disk.
    assert_eq!(csi.staged(), std::slice::from_ref(&device));
    assert_eq!(csi.device_of(&placed("pv", false)), Some(device));
    for _ in 0..2 {
        csi.tear_down(&placed("pv", false)).await.unwrap();
        csi.unstage(&unique_name).await.unwrap();
    }
    let calls = node_calls(&fake);
    let [Call::Unpublish(unpublish), Call::Unstage(unstage)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(unpublish.target_path, ready.path.display().to_string());
    assert_eq!(unstage.staging_target_path, staging);
    assert_clean(&csi);
}

#[tokio::test]
async fn every_code_says_what_is_known_and_leaves_what_it_must() {
    let (_world, fake, csi) = without_attach(&[Can::StageUnstageVolume]).await;
    let volume = persistent(DRIVER, "h", json!({}));
    for number in 1..=16 {
        let code = Code::from_i32(number);
        let last = berth_csi::code::is_final(code);
        let certainty = if last { Certainty::Final } else { Certainty::Uncertain };
        set_fault(&fake, "NodeStageVolume", Some(FaultKind::Code(code)));
        let error = csi.stage(&volume).await.unwrap_err();
        assert_eq!(error.certainty, certainty, "{code:?}");
        assert!(error.message.contains(berth_csi::code::go_name(code)), "{}", error.message);
        assert_eq!(csi.staged().is_empty(), last, "{code:?}");
        set_fault(&fake, "NodeStageVolume", None);
        csi.stage(&volume).await.unwrap();

        set_fault(&fake, "NodePublishVolume", Some(FaultKind::Code(code)));
        assert_eq!(csi.set_up(&volume).await.unwrap_err().certainty, certainty, "{code:?}");
        assert_eq!(csi.device_of(&placed("pv", false)).is_none(), last, "{code:?}");
        set_fault(&fake, "NodePublishVolume", None);
        csi.set_up(&volume).await.unwrap();
        // A repetition that fails takes nothing away.
        set_fault(&fake, "NodePublishVolume", Some(FaultKind::Code(code)));
        csi.set_up(&volume).await.unwrap_err();
        assert!(csi.device_of(&placed("pv", false)).is_some(), "{code:?}");
        set_fault(&fake, "NodePublishVolume", None);

        for (method, undo) in [("NodeUnpublishVolume", true), ("NodeUnstageVolume", false)] {
            for answer in [Some(FaultKind::Code(code)), None] {
                set_fault(&fake, method, answer);
                let result = if undo {
                    csi.tear_down(&placed("pv", false)).await
                } else {
                    csi.unstage("kubernetes.io/csi/a.example^h").await
                };
                assert_eq!(result.is_err(), answer.is_some(), "{code:?} {method}");
            }
        }
        assert_clean(&csi);
    }
}

#[tokio::test]
async fn a_node_that_dies_during_a_call_knows_the_volume_afterwards() {
    let (world, fake, csi) = without_attach(&[Can::StageUnstageVolume]).await;
    let csi = Arc::new(csi);
    let volume = persistent(DRIVER, "h", json!({}));
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        set_fault(&fake, method, Some(FaultKind::Hang));
        let task = tokio::spawn({
            let (csi, volume) = (csi.clone(), volume.clone());
            async move {
                csi.stage(&volume).await?;
                csi.set_up(&volume).await
            }
        });
        fake.until_called(method, "", 1).await;
        task.abort();
        let _ = task.await;
        set_fault(&fake, method, None);
        node_calls(&fake);
        let next = super::tests::csi(&world);
        assert_eq!(next.staged().len(), 1, "{method}");
        assert_eq!(next.device_of(&placed("pv", false)).is_some(), method == "NodePublishVolume");
        next.tear_down(&placed("pv", false)).await.unwrap();
        next.unstage("kubernetes.io/csi/a.example^h").await.unwrap();
        assert!(node_calls(&fake).iter().any(|call| matches!(call, Call::Unstage(_))));
        assert_clean(&next);
    }
}

#[tokio::test]
async fn a_failure_to_stage_again_after_a_restart_forgets_nothing() {
    let (world, fake, csi) = without_attach(&[Can::StageUnstageVolume]).await;
    for block in [false, true] {
        let mut volume = persistent(DRIVER, "h", json!({}));
        volume.block = block;
        csi.stage(&volume).await.unwrap();
        let next = super::tests::csi(&world);
        set_fault(&fake, "NodeStageVolume", Some(FaultKind::Code(Code::InvalidArgument)));
        for _ in 0..2 {
            assert_eq!(next.stage(&volume).await.unwrap_err().certainty, Certainty::Uncertain);
            assert_eq!(next.staged().len(), 1, "{block}");
        }
        node_calls(&fake);
        next.unstage("kubernetes.io/csi/a.example^h").await.unwrap();
        assert!(matches!(node_calls(&fake).as_slice(), [Call::Unstage(_)]));
        // What is not staged is known not to be after a failure that is final.
        assert_eq!(next.stage(&volume).await.unwrap_err().certainty, Certainty::Final);
        assert_clean(&next);
        csi.kept().clear();
        set_fault(&fake, "NodeStageVolume", None);
        node_calls(&fake);
    }
}

#[tokio::test]
async fn what_is_still_there_after_a_final_failure_must_be_undone() {
    let (_world, fake, csi) = without_attach(&[Can::StageUnstageVolume]).await;
    let volume = persistent(DRIVER, "h", json!({}));
    let left = csi.layout.csi_staging(DRIVER, "h").join("globalmount/left");
    fs::create_dir_all(&left).unwrap();
    set_fault(&fake, "NodeStageVolume", Some(FaultKind::Code(Code::InvalidArgument)));
    let error = csi.stage(&volume).await.unwrap_err();
    assert!(error.certainty == Certainty::Uncertain && error.message.contains("InvalidArgument"), "{error}");
    assert_eq!(csi.staged().len(), 1);
    fs::remove_dir(&left).unwrap();
    csi.unstage("kubernetes.io/csi/a.example^h").await.unwrap();
    assert_clean(&csi);
}

#[tokio::test]
async fn what_a_crash_left_of_no_volume_is_removed_and_nothing_else() {
    let (_world, _fake, csi) = without_attach(&[]).await;
    let (layout, data) = (&csi.layout, "vol_data.json");
    let (new, emptied) = (layout.csi_staging(DRIVER, "new"), layout.csi_staging(DRIVER, "emptied"));
    let (full, damaged) = (layout.csi_staging(DRIVER, "full"), layout.csi_staging(DRIVER, "damaged"));
    let block = layout.csi_device("block");
    for path in [&new, &emptied.join("globalmount"), &full.join("globalmount/data"), &damaged] {
        fs::create_dir_all(path).unwrap();
    }
    for path in [block.join("data"), block.join("dev"), layout.csi_device_staging("other")] {
        fs::create_dir_all(path).unwrap();
    }
    fs::write(new.join(format!(".{data}.7-0.new")), "{").unwrap();
    fs::write(damaged.join(data), "{").unwrap();
    assert_eq!(csi.staged(), []);
    for gone in [new, emptied, block] {
        assert!(!gone.exists(), "{}", gone.display());
    }
    for left in [full.join("globalmount/data"), damaged.join(data), layout.csi_device_staging("other")] {
        assert!(left.exists(), "{}", left.display());
    }
}

#[tokio::test]
async fn a_block_volume_is_known_without_the_link_to_it() {
    let (_world, _fake, csi) = without_attach(&[]).await;
    let layout = &csi.layout;
    let published = layout.csi_device_publish("pv", "uid");
    fs::create_dir_all(published.parent().unwrap()).unwrap();
    fs::write(&published, "").unwrap();
    let bound = layout.csi_device("pv").join("dev");
    fs::create_dir_all(&bound).unwrap();
    for uid in ["uid", "other"] {
        fs::write(bound.join(uid), "").unwrap();
    }
    let other = Placed { pod_uid: "other".to_owned(), ..placed("pv", true) };
    assert_eq!(csi.placed(), [other, placed("pv", true)]);
    for left in csi.placed() {
        csi.tear_down(&left).await.unwrap();
    }
    assert_eq!(csi.placed(), []);
}

#[tokio::test]
async fn a_damaged_file_is_named_and_disturbs_nothing_else() {
    let (_world, _fake, csi) = without_attach(&[Can::StageUnstageVolume]).await;
    let (good, mut bad) = (persistent(DRIVER, "good", json!({})), persistent(DRIVER, "bad", json!({})));
    bad.pod = pod("other", &json!({}));
    for volume in [&good, &bad] {
        csi.stage(volume).await.unwrap();
        csi.set_up(volume).await.unwrap();
    }
    let file = csi.layout.csi_staging(DRIVER, "bad").join("vol_data.json");
    let pods = csi.layout.pod_volume("other", NAME, "pv").join("vol_data.json");
    for path in [&file, &pods] {
        fs::write(path, "{").unwrap();
    }
    assert_eq!(csi.staged().len(), 1);
    let error = csi.unstage("kubernetes.io/csi/a.example^bad").await.unwrap_err();
    assert!(error.message.contains(&file.display().to_string()), "{error}");
    let error =
        csi.tear_down(&Placed { pod_uid: "other".to_owned(), ..placed("pv", false) }).await.unwrap_err();
    assert!(error.message.contains(&pods.display().to_string()), "{error}");
    csi.tear_down(&placed("pv", false)).await.unwrap();
    csi.unstage("kubernetes.io/csi/a.example^good").await.unwrap();
    assert!(file.exists() && pods.exists());
}

#[tokio::test]
async fn an_attached_volume_gets_what_attaching_brought_and_its_secrets() {
    let (world, fake, csi) = with_fake(&[Can::StageUnstageVolume]).await;
    let secret = json!({ "nodeStageSecretRef": { "name": "s", "namespace": "default" } });
    let volume = persistent(DRIVER, "h", json!({ "csi": secret }));
    csi.objects.synced().await;
    assert!(csi.device(&volume).unwrap().unwrap().attach, "without a CSIDriver volumes are attached");
    let error = csi.stage(&volume).await.unwrap_err();
    assert_eq!(error.certainty, Certainty::Unchanged);
    let name = attachment_name(DRIVER, "h", "n");
    assert!(error.message.contains(&name), "{error}");
    let attachment: VolumeAttachment = object(json!({
        "metadata": { "name": name },
        "spec": { "attacher": DRIVER, "nodeName": "n", "source": { "persistentVolumeName": "pv" } },
    }));
    let attachment = world.cluster.create(&attachment).await.unwrap();
    assert!(csi.stage(&volume).await.unwrap_err().message.contains("not attached yet"));
    world
        .cluster
        .update_status(&*attachment, |attachment| {
            attachment.status =
                Some(object(json!({ "attached": true, "attachmentMetadata": { "dev": "/dev/x" } })));
        })
        .await
        .unwrap();
    assert!(csi.stage(&volume).await.unwrap_err().message.contains("NodeStageSecretRef default/s"));
    let secret: Secret = object(json!({
        "metadata": { "name": "s", "namespace": "default" }, "stringData": { "password": "hunter2" },
    }));
    world.cluster.create(&secret).await.unwrap();
    set_fault(&fake, "NodeStageVolume", Some(FaultKind::Code(Code::Internal)));
    let error = csi.stage(&volume).await.unwrap_err();
    assert!(!format!("{error:?}").contains("hunter2"));
    let calls = node_calls(&fake);
    let [Call::Stage(stage)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(stage.publish_context["dev"], "/dev/x");
    assert_eq!(stage.secrets["password"], "hunter2");
}

#[tokio::test]
async fn a_full_node_is_known_by_the_attachment_of_a_driver_whose_limit_is_read_again() {
    let (world, _fake, csi) = with_fake(&[]).await;
    let volume = persistent(DRIVER, "h", json!({}));
    csi.objects.synced().await;
    let attachment: VolumeAttachment = object(json!({
        "metadata": { "name": attachment_name(DRIVER, "h", "n") },
        "spec": { "attacher": DRIVER, "nodeName": "n", "source": { "persistentVolumeName": "pv" } },
    }));
    let attachment = world.cluster.create(&attachment).await.unwrap();
    let fail = async |code: i32| {
        let attachment =
            world.cluster.fetch::<VolumeAttachment>(&Key::of(&*attachment)).await.unwrap().unwrap();
        let error = json!({ "message": "no slot is free", "errorCode": code });
        world
            .cluster
            .update_status(&*attachment, |attachment| {
                attachment.status = Some(object(json!({ "attached": false, "attachError": error })));
            })
            .await
            .unwrap();
    };
    fail(Code::ResourceExhausted as i32).await;
    assert_eq!(csi.attach_limit(&volume).await, None, "the driver's limit is not read again");
    let driver: CSIDriver = object(json!({
        "metadata": { "name": DRIVER }, "spec": { "nodeAllocatableUpdatePeriodSeconds": 3600 },
    }));
    world.cluster.create(&driver).await.unwrap();
    let known = async {
        while csi.objects.named(DRIVER).is_none() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), known).await.unwrap();
    assert_eq!(csi.attach_limit(&volume).await.as_deref(), Some("no slot is free"));
    fail(Code::Internal as i32).await;
    assert_eq!(csi.attach_limit(&volume).await, None);
}

#[tokio::test]
async fn a_pods_own_volume_needs_a_driver_that_says_it_serves_them() {
    let (world, fake, csi) = with_fake(&[Can::StageUnstageVolume]).await;
    let volume = inline(DRIVER);
    assert_eq!(csi.device(&volume).unwrap(), None);
    let error = csi.set_up(&volume).await.unwrap_err();
    assert!(
        error.message.contains("no CSIDriver object") && error.certainty == Certainty::Unchanged,
        "{error}"
    );
    let spec =
        json!({ "volumeLifecycleModes": ["Ephemeral"], "podInfoOnMount": true, "requiresRepublish": true });
    driver_object(&world, DRIVER, spec).await;
    let secret: Secret =
        object(json!({ "metadata": { "name": "s", "namespace": "default" }, "stringData": { "a": "b" } }));
    world.cluster.create(&secret).await.unwrap();
    csi.set_up(&volume).await.unwrap();
    assert_eq!(csi.refresh_after(&volume), Some(REPUBLISH));
    let calls = node_calls(&fake);
    let [Call::Publish(publish)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(publish.volume_id, format!("csi-{}", crate::layout::sha256("uiddata")));
    assert!(publish.staging_target_path.is_empty() && publish.publish_context.is_empty());
    assert_eq!(publish.secrets["a"], "b");
    for (name, value) in [("pod.uid", "uid"), ("ephemeral", "true"), ("serviceAccount.name", "sa")] {
        assert_eq!(publish.volume_context[&format!("csi.storage.k8s.io/{name}")], value);
    }
    assert_eq!(publish.volume_context["k"], "v");
    assert_eq!(csi.device_of(&placed("data", false)), None);
    let error = csi.set_up(&persistent(DRIVER, "h", json!({}))).await.unwrap_err();
    assert!(error.message.contains("only supports"), "{error}");
    csi.tear_down(&placed("data", false)).await.unwrap();
    assert_clean(&csi);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_container_mounted_in_its_volume_does_not_keep_it() {
    let (_world, fake, csi) = without_attach(&[]).await;
    let volume = persistent(DRIVER, "h", json!({}));
    let target = csi.set_up(&volume).await.unwrap().path;
    fs::create_dir_all(target.join("nested")).unwrap();
    let none = berth_host::mount::Attributes::default();
    berth_host::mount::filesystem("none".as_ref(), &target.join("nested"), "tmpfs", none, &[]).unwrap();
    set_fault(&fake, "NodeUnpublishVolume", Some(FaultKind::Code(Code::Internal)));
    csi.tear_down(&placed("pv", false)).await.unwrap_err();
    assert!(
        !berth_host::mount::is_mount_point(&target.join("nested")).unwrap(),
        "it would be busy for the driver"
    );
    fs::remove_dir_all(&target).unwrap();
    set_fault(&fake, "NodeUnpublishVolume", None);
    csi.tear_down(&placed("pv", false)).await.unwrap();
    assert_clean(&csi);
}

#[tokio::test]
async fn growth_is_refused_for_good_for_now_or_tried_again() {
    let (world, fake, csi) = without_attach(&[]).await;
    let volume = persistent(DRIVER, "h", json!({}));
    assert_eq!(csi.expand(&volume).await.unwrap(), None);
    // What a driver can do is asked when it registers.
    fake.capabilities.lock().node = vec![Can::ExpandVolume];
    let gone = world.drivers.changed();
    fake.stop().await;
    gone.await;
    fake.start(&world.registry(), "a.sock").await;
    world.drivers.wait(DRIVER).await;
    assert_eq!(csi.expand(&volume).await.unwrap(), Some(64 << 20));
    let calls = node_calls(&fake);
    let [Call::Expand(expand)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(expand.capacity_range.unwrap().required_bytes, 64 << 20);
    assert_eq!(
        expand.volume_path,
        csi.layout.pod_volume("uid", NAME, "pv").join("mount").display().to_string()
    );
    for (code, certainty) in [
        (Code::InvalidArgument, Certainty::Final),
        (Code::OutOfRange, Certainty::Final),
        (Code::NotFound, Certainty::Final),
        (Code::FailedPrecondition, Certainty::Unchanged),
        (Code::Internal, Certainty::Uncertain),
        (Code::Unavailable, Certainty::Uncertain),
    ] {
        set_fault(&fake, "NodeExpandVolume", Some(FaultKind::Code(code)));
        assert_eq!(csi.expand(&volume).await.unwrap_err().certainty, certainty, "{code:?}");
    }
}

#[tokio::test]
async fn files_are_given_to_the_pods_group_by_its_policy_or_by_the_driver_alone() {
    const GROUP: u32 = 4321;
    // Driver's policy, driver mounts for a group itself, pod's policy, root given before → a file below is given.
    for (driver_policy, mounts, policy, root_given, given) in [
        ("File", false, "Always", false, true),
        ("File", false, "Always", true, true),
        ("File", false, "OnRootMismatch", false, true),
        ("File", false, "OnRootMismatch", true, false),
        ("File", true, "Always", false, false),
        ("File", true, "OnRootMismatch", false, false),
        ("None", false, "Always", false, false),
        // No filesystem is named.
        ("ReadWriteOnceWithFSType", false, "Always", false, false),
    ] {
        let case = format!("{driver_policy} {mounts} {policy} {root_given}");
        let (world, fake, csi) = with_fake(if mounts { &[Can::VolumeMountGroup] } else { &[] }).await;
        let spec = json!({ "attachRequired": false, "fsGroupPolicy": driver_policy });
        driver_object(&world, DRIVER, spec).await;
        let mut volume = persistent(DRIVER, "h", json!({}));
        volume.pod = pod("uid", &json!({ "fsGroup": GROUP, "fsGroupChangePolicy": policy }));
        let target = csi.layout.pod_volume("uid", NAME, "pv").join("mount");
        fs::create_dir_all(&target).unwrap();
        let file = target.join("file");
        fs::write(&file, "").unwrap();
        if root_given {
            std::os::unix::fs::chown(&target, None, Some(GROUP)).unwrap();
            fs::set_permissions(&target, fs::Permissions::from_mode(0o2770)).unwrap();
        }
        csi.set_up(&volume).await.unwrap();
        assert_eq!(file.metadata().unwrap().gid() == GROUP, given, "{case}");
        let calls = node_calls(&fake);
        let [Call::Publish(publish)] = calls.as_slice() else { panic!("{calls:?}") };
        let access = publish.volume_capability.clone().unwrap().access_type;
        let Some(AccessType::Mount(mount)) = access else { panic!("{access:?}") };
        assert_eq!(
            mount.volume_mount_group,
            if mounts { GROUP.to_string() } else { String::new() },
            "{case}"
        );
    }
}

#[tokio::test]
async fn a_driver_that_is_gone_changes_nothing() {
    let (world, fake, csi) = without_attach(&[Can::StageUnstageVolume]).await;
    let volume = persistent(DRIVER, "h", json!({}));
    csi.stage(&volume).await.unwrap();
    csi.set_up(&volume).await.unwrap();
    let changed = world.drivers.changed();
    fake.stop().await;
    changed.await;
    for error in [
        csi.device(&volume).unwrap_err(),
        csi.set_up(&volume).await.unwrap_err(),
        csi.tear_down(&placed("pv", false)).await.unwrap_err(),
        csi.unstage("kubernetes.io/csi/a.example^h").await.unwrap_err(),
    ] {
        assert!(
            error.certainty == Certainty::Unchanged && error.message.contains("not found in the list"),
            "{error}"
        );
    }
    assert_eq!(csi.staged().len(), 1);
}
