//! The local backend behind the services of CSI: answers must agree with what is on the machine.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use berth_csi::v1::{
    self, controller_server::Controller as _, node_server::Node as _, volume_capability::AccessMode,
    volume_capability::AccessType, volume_capability::BlockVolume, volume_capability::MountVolume,
};
use berth_host::{mount, usage};
use tonic::{Code, Request};

use super::{Local, MIB, open};
use crate::{
    Services,
    services::{Config, Mode},
};

struct Machine {
    dir: tempfile::TempDir,
    services: Arc<Services>,
    _local: Local,
}

impl Machine {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let local = open(&dir.path().join("data")).await;
        let driver = local.driver("local.test", "1", Mode::All);
        let services = driver.open(Config::new(dir.path().join("driver"))).unwrap();
        Self { dir, services, _local: local }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    async fn create(&self, capability: &v1::VolumeCapability, mebibytes: i64) -> String {
        let request = v1::CreateVolumeRequest {
            name: "v".into(),
            capacity_range: Some(range(mebibytes)),
            volume_capabilities: vec![capability.clone()],
            parameters: [("kind".to_owned(), "image".to_owned())].into(),
            ..Default::default()
        };
        let made = self.services.create_volume(Request::new(request)).await.unwrap().into_inner();
        made.volume.unwrap().volume_id
    }

    async fn stage(&self, volume_id: &str, capability: &v1::VolumeCapability) {
        let request = v1::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: self.text("staging"),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        self.services.node_stage_volume(Request::new(request)).await.unwrap();
    }

    async fn publish(&self, volume_id: &str, capability: &v1::VolumeCapability) {
        let request = v1::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: self.text("staging"),
            target_path: self.text("target"),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        self.services.node_publish_volume(Request::new(request)).await.unwrap();
    }

    async fn take_down(&self, volume_id: &str) {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: self.text("target"),
        };
        self.services.node_unpublish_volume(Request::new(request)).await.unwrap();
        let request = v1::NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: self.text("staging"),
        };
        self.services.node_unstage_volume(Request::new(request)).await.unwrap();
    }

    async fn grow_on_node(&self, volume_id: &str, mebibytes: i64) -> Result<i64, tonic::Status> {
        let request = v1::NodeExpandVolumeRequest {
            volume_id: volume_id.to_owned(),
            volume_path: self.text("target"),
            capacity_range: Some(range(mebibytes)),
            ..Default::default()
        };
        let grown = self.services.node_expand_volume(Request::new(request)).await?;
        Ok(grown.into_inner().capacity_bytes)
    }

    async fn stats(&self, volume_id: &str, path: &str) -> Result<i64, tonic::Status> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: volume_id.to_owned(),
            volume_path: path.to_owned(),
            ..Default::default()
        };
        let found = self.services.node_get_volume_stats(Request::new(request)).await?;
        Ok(found.into_inner().usage[0].total)
    }
}

fn range(mebibytes: i64) -> v1::CapacityRange {
    v1::CapacityRange { required_bytes: mebibytes * MIB, limit_bytes: 0 }
}

fn capability(access: AccessType) -> v1::VolumeCapability {
    let mode = v1::volume_capability::access_mode::Mode::SingleNodeWriter.into();
    v1::VolumeCapability { access_type: Some(access), access_mode: Some(AccessMode { mode }) }
}

/// The bytes of the filesystem at a path, as `df` shows them.
fn filesystem_size(path: &Path) -> i64 {
    usage::space(path).unwrap().total.try_into().unwrap()
}

#[tokio::test]
async fn growth_on_the_node_is_confirmed_only_when_the_filesystem_has_grown() {
    let machine = Machine::new().await;
    let ext4 = capability(AccessType::Mount(MountVolume { fs_type: "ext4".into(), ..Default::default() }));
    let id = machine.create(&ext4, 64).await;
    machine.stage(&id, &ext4).await;
    machine.publish(&id, &ext4).await;
    // As a pod has it in a mount namespace of its own: nobody here can take it away.
    let pod = machine.path("pod");
    std::fs::create_dir(&pod).unwrap();
    mount::bind(&machine.path("target"), &pod, mount::Attributes::default()).unwrap();

    let request = v1::ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(range(256)),
        ..Default::default()
    };
    machine.services.controller_expand_volume(Request::new(request)).await.unwrap();
    let least = 256 * MIB * 8 / 10;
    // With CAP_SYS_RESOURCE it grows at once; without, it must not be said to have grown.
    match machine.grow_on_node(&id, 256).await {
        Ok(_) => assert!(filesystem_size(&pod) > least, "{}", filesystem_size(&pod)),
        Err(status) => {
            assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
            assert!(filesystem_size(&pod) < least);
        }
    }
    assert!(filesystem_size(&machine.path("target")) > 0, "it is still published");

    mount::unmount(&pod).unwrap();
    machine.take_down(&id).await;
    machine.stage(&id, &ext4).await;
    machine.publish(&id, &ext4).await;
    assert_eq!(machine.grow_on_node(&id, 256).await.unwrap(), 256 * MIB);
    let size = filesystem_size(&machine.path("target"));
    assert!(size > least, "{size}");
    machine.take_down(&id).await;
}

#[tokio::test]
async fn statistics_of_a_block_volume_are_had_wherever_its_device_is() {
    let machine = Machine::new().await;
    let block = capability(AccessType::Block(BlockVolume {}));
    let id = machine.create(&block, 8).await;
    machine.stage(&id, &block).await;
    machine.publish(&id, &block).await;
    assert_eq!(machine.stats(&id, &machine.text("target")).await.unwrap(), 8 * MIB);
    // The kubelet binds the published device to volumeDevices/<pv>/dev/<pod>, and asks there.
    let global = machine.path("global");
    std::fs::write(&global, "").unwrap();
    mount::bind(&machine.path("target"), &global, mount::Attributes::default()).unwrap();
    let found = machine.stats(&id, &machine.text("global")).await;
    mount::unmount(&global).unwrap();
    assert_eq!(found.unwrap(), 8 * MIB);
    for elsewhere in ["global", "nowhere"] {
        let refused = machine.stats(&id, &machine.text(elsewhere)).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{elsewhere}");
    }
    machine.take_down(&id).await;
}
