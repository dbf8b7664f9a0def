//! Berth's own local driver behind its socket: real mounts, real devices.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use berth_backends::local::{Config, Kind, Local};
use berth_backends::services;
use berth_csi::v1::{CapacityRange, ControllerExpandVolumeRequest, CreateVolumeRequest};
use berth_host::mount;

use super::*;

const LOCAL: &str = "local.example";

async fn with_local(kind: Kind) -> (World, RegisteredDriver, Csi) {
    let world = World::new().await;
    let data = world.server.directory().join("data");
    let mut config = Config::new(data.clone(), "n".parse().unwrap());
    config.kind = Some(kind);
    let backend = Local::open(config).await.unwrap();
    let driver = backend.driver(LOCAL, "0", services::Mode::All).open(services::Config::new(data)).unwrap();
    driver.recover().await.unwrap();
    let registered = world.fake(LOCAL, &[]);
    registered.start_as(driver.routes(), &world.registry(), "local.sock").await;
    world.drivers.wait(LOCAL).await;
    driver_object(&world, LOCAL, json!({ "attachRequired": false, "fsGroupPolicy": "File" })).await;
    let csi = csi(&world);
    (world, registered, csi)
}

async fn create(world: &World, volume: &PodVolume, bytes: i64) -> PodVolume {
    let capability =
        volume.csi().unwrap().capability(volume, &world.drivers.get(LOCAL).unwrap(), None).unwrap();
    let request = CreateVolumeRequest {
        name: "v".to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        volume_capabilities: vec![capability],
        ..CreateVolumeRequest::default()
    };
    let made = world.drivers.get(LOCAL).unwrap().call(request).await.unwrap().volume.unwrap();
    let mut volume = volume.clone();
    let Source::Persistent { volume: persistent, .. } = &mut volume.source else { panic!("not persistent") };
    let csi = Arc::make_mut(persistent).spec.as_mut().unwrap().csi.as_mut().unwrap();
    csi.volume_handle = made.volume_id;
    csi.volume_attributes = Some(made.volume_context).filter(|context| !context.is_empty());
    PodVolume::new(volume.pod, volume.name, volume.source, volume.block, volume.read_only)
}

fn unique(volume: &PodVolume) -> String {
    volume.csi().unwrap().unique_name()
}

#[tokio::test]
async fn a_directory_is_mounted_for_its_group_and_keeps_its_data() {
    let (world, _registered, csi) = with_local(Kind::Dir).await;
    let mut volume = create(&world, &persistent(LOCAL, "", json!({})), 1 << 20).await;
    volume.pod = pod("uid", &json!({ "fsGroup": 4321 }));
    for round in 0..2 {
        csi.stage(&volume).await.unwrap();
        let ready = csi.set_up(&volume).await.unwrap();
        assert!(mount::is_mount_point(&ready.path).unwrap());
        assert_eq!(fs::metadata(&ready.path).unwrap().gid(), 4321);
        let file = ready.path.join("file");
        if round == 0 {
            fs::write(&file, "kept").unwrap();
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
        // The default policy is Always: files that came to another group are given back although the root is right.
        assert_eq!(fs::metadata(&file).unwrap().gid(), 4321);
        std::os::unix::fs::chown(&file, None, Some(0)).unwrap();
        csi.tear_down(&placed("pv", false)).await.unwrap();
        csi.unstage(&unique(&volume)).await.unwrap();
        assert_clean(&csi);
    }
}

#[tokio::test]
async fn an_image_grows_while_it_is_in_use() {
    let (world, _registered, csi) = with_local(Kind::Image).await;
    let volume =
        persistent(LOCAL, "", json!({ "csi": { "fsType": "xfs" }, "capacity": { "storage": "400Mi" } }));
    let volume = create(&world, &volume, 320 << 20).await;
    csi.stage(&volume).await.unwrap();
    let ready = csi.set_up(&volume).await.unwrap();
    let before = berth_host::usage::space(&ready.path).unwrap().total;
    let request = ControllerExpandVolumeRequest {
        volume_id: volume.csi().unwrap().handle.clone(),
        capacity_range: Some(CapacityRange { required_bytes: 400 << 20, limit_bytes: 0 }),
        ..ControllerExpandVolumeRequest::default()
    };
    world.drivers.get(LOCAL).unwrap().call(request).await.unwrap();
    assert!(csi.expand(&volume).await.unwrap().unwrap() >= 400 << 20);
    assert!(berth_host::usage::space(&ready.path).unwrap().total > before);
    csi.tear_down(&placed("pv", false)).await.unwrap();
    csi.unstage(&unique(&volume)).await.unwrap();
    assert_clean(&csi);
}

#[tokio::test]
async fn a_block_device_is_published_bound_and_linked() {
    let (world, _registered, csi) = with_local(Kind::Image).await;
    let mut volume = persistent(LOCAL, "", json!({ "volumeMode": "Block" }));
    volume.block = true;
    let volume = create(&world, &volume, 16 << 20).await;
    csi.stage(&volume).await.unwrap();
    for _ in 0..2 {
        let ready = csi.set_up(&volume).await.unwrap();
        assert_eq!(ready.path, csi.layout.pod_device("uid", NAME, "pv"));
        assert!(fs::metadata(&ready.path).unwrap().file_type().is_block_device());
    }
    let global = csi.layout.csi_device("pv").join("dev/uid");
    assert!(fs::metadata(&global).unwrap().file_type().is_block_device());
    assert_eq!(csi.staged().len(), 1);
    assert_eq!(csi.device_of(&placed("pv", true)).unwrap().unique_name, unique(&volume));
    // As a node leaves it that is killed while it takes the volume away.
    fs::remove_file(csi.layout.pod_device("uid", NAME, "pv")).unwrap();
    assert_eq!(csi.placed(), [placed("pv", true)]);
    for _ in 0..2 {
        csi.tear_down(&placed("pv", true)).await.unwrap();
        csi.unstage(&unique(&volume)).await.unwrap();
    }
    assert_clean(&csi);
}
