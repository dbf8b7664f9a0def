//! What checks are made of: volumes, snapshots, the way of a volume to a workload, and the data on it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::time::Instant;

use berth_csi::v1;

use super::{Expected as _, Fault, Outcome, RETRY, RETRY_PAUSE, Session, not_run};

/// A volume on its way to a workload.
#[derive(Debug, Clone)]
pub(crate) struct PreparedVolume {
    pub(crate) volume: v1::Volume,
    pub(crate) capability: v1::VolumeCapability,
    pub(crate) publish_context: BTreeMap<String, String>,
    /// Empty if the driver does not stage.
    pub(crate) staging: String,
    pub(crate) target: String,
}

impl Session {
    /// How this run uses volumes.
    pub(crate) fn capability(&self) -> v1::VolumeCapability {
        use v1::volume_capability::access_mode::Mode;
        use v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
        let access_type = if self.options.block {
            AccessType::Block(BlockVolume {})
        } else {
            AccessType::Mount(MountVolume { fs_type: self.options.fs_type.clone(), ..Default::default() })
        };
        v1::VolumeCapability {
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
            access_type: Some(access_type),
        }
    }

    /// The topology of the node, for requests.
    pub(crate) fn requirements(&self) -> Option<v1::TopologyRequirement> {
        let topology = self.node.accessible_topology.clone().filter(|_| self.identity.has_topology())?;
        Some(v1::TopologyRequirement { requisite: vec![topology.clone()], preferred: vec![topology] })
    }

    /// A request for a new volume.
    pub(crate) fn create_request(&self) -> v1::CreateVolumeRequest {
        v1::CreateVolumeRequest {
            name: self.name("volume"),
            capacity_range: Some(v1::CapacityRange { required_bytes: self.options.size, limit_bytes: 0 }),
            volume_capabilities: vec![self.capability()],
            parameters: self.options.parameters.clone(),
            accessibility_requirements: self.requirements(),
            ..Default::default()
        }
    }

    /// Creates a volume, as a preparation.
    pub(crate) async fn volume(&self) -> Outcome<v1::Volume> {
        self.volume_from(self.create_request()).await
    }

    pub(crate) async fn volume_from(&self, request: v1::CreateVolumeRequest) -> Outcome<v1::Volume> {
        let answer = self.call(request).await.or_not_run("CreateVolume")?;
        answer.volume.ok_or_else(|| Fault::NotRun("CreateVolume answered without a volume".to_owned()))
    }

    pub(crate) fn snapshot_request(&self, volume: &v1::Volume) -> v1::CreateSnapshotRequest {
        v1::CreateSnapshotRequest {
            source_volume_id: volume.volume_id.clone(),
            name: self.name("snapshot"),
            parameters: self.options.snapshot_parameters.clone(),
            ..Default::default()
        }
    }

    /// Takes a snapshot, as a preparation, and waits until it can be used.
    pub(crate) async fn snapshot(&self, volume: &v1::Volume) -> Outcome<v1::Snapshot> {
        let request = self.snapshot_request(volume);
        let begun = Instant::now();
        loop {
            let answer = self.call(request.clone()).await.or_not_run("CreateSnapshot")?;
            let snapshot = answer.snapshot.unwrap_or_default();
            if snapshot.ready_to_use {
                return Ok(snapshot);
            }
            if begun.elapsed() > RETRY {
                return not_run(format!("the snapshot is not ready after {RETRY:?}"));
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Chooses where a volume will be staged and published.
    pub(crate) fn prepare(&self, volume: v1::Volume) -> Outcome<PreparedVolume> {
        let number = self.number();
        let path = |what: &str| self.directory.join(format!("{what}-{number}")).display().to_string();
        let stages = self.identity.node.contains(&berth_csi::NodeCapability::StageUnstageVolume);
        let staging = if stages { path("staging") } else { String::new() };
        if stages {
            fs::create_dir_all(self.seen(&staging)).or_not_run("making the staging directory")?;
        }
        let (capability, publish_context) = (self.capability(), BTreeMap::new());
        Ok(PreparedVolume { volume, capability, publish_context, staging, target: path("target") })
    }

    /// Attaches a volume if the driver attaches, and chooses where it will be mounted.
    pub(crate) async fn attach(&self, volume: &v1::Volume) -> Outcome<PreparedVolume> {
        let mut prepared = self.prepare(volume.clone())?;
        if self.identity.attaches() {
            let answer =
                self.call(self.attach_request(volume)).await.or_not_run("ControllerPublishVolume")?;
            prepared.publish_context = answer.publish_context;
        }
        Ok(prepared)
    }

    pub(crate) fn attach_request(&self, volume: &v1::Volume) -> v1::ControllerPublishVolumeRequest {
        v1::ControllerPublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: self.node.node_id.clone(),
            volume_capability: Some(self.capability()),
            volume_context: volume.volume_context.clone(),
            ..Default::default()
        }
    }

    /// Attaches and stages a volume, as a preparation.
    pub(crate) async fn staged(&self, volume: &v1::Volume) -> Outcome<PreparedVolume> {
        let prepared = self.attach(volume).await?;
        self.stage(&prepared).await?;
        Ok(prepared)
    }

    pub(crate) async fn stage(&self, prepared: &PreparedVolume) -> Outcome {
        if !prepared.staging.is_empty() {
            self.call(prepared.stage_request()).await.or_not_run("NodeStageVolume")?;
        }
        Ok(())
    }

    /// Attaches, stages and publishes a volume, as a preparation.
    pub(crate) async fn published(&self, volume: &v1::Volume) -> Outcome<PreparedVolume> {
        let prepared = self.staged(volume).await?;
        self.publish(&prepared).await?;
        Ok(prepared)
    }

    pub(crate) async fn publish(&self, prepared: &PreparedVolume) -> Outcome {
        self.call(prepared.publish_request()).await.or_not_run("NodePublishVolume").map(drop)
    }

    pub(crate) async fn unpublish(&self, prepared: &PreparedVolume) -> Outcome {
        self.call(prepared.unpublish_request()).await.or_not_run("NodeUnpublishVolume").map(drop)
    }

    pub(crate) async fn unstage(&self, prepared: &PreparedVolume) -> Outcome {
        if !prepared.staging.is_empty() {
            self.call(prepared.unstage_request()).await.or_not_run("NodeUnstageVolume")?;
        }
        Ok(())
    }

    /// Undoes everything that was done for a volume, the volume included.
    pub(crate) async fn take_down(&self, prepared: &PreparedVolume) -> Outcome {
        self.unpublish(prepared).await?;
        self.unstage(prepared).await?;
        let volume_id = prepared.volume.volume_id.clone();
        if self.identity.attaches() {
            self.call(self.detach_request(&prepared.volume)).await.or_not_run("ControllerUnpublishVolume")?;
        }
        let request = v1::DeleteVolumeRequest { volume_id, ..Default::default() };
        self.call(request).await.or_not_run("DeleteVolume").map(drop)
    }

    pub(crate) fn detach_request(&self, volume: &v1::Volume) -> v1::ControllerUnpublishVolumeRequest {
        v1::ControllerUnpublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: self.node.node_id.clone(),
            ..Default::default()
        }
    }

    /// Writes a file on a volume, synced.
    pub(crate) async fn write(
        &self,
        prepared: &PreparedVolume,
        file: &str,
        content: &[u8],
    ) -> io::Result<()> {
        let (path, content, block) = (self.seen(&prepared.target), content.to_vec(), self.options.block);
        let file = file.to_owned();
        self.on_disk(move || {
            use std::io::{Seek as _, SeekFrom, Write as _};
            let mut target = if block {
                let mut device = fs::OpenOptions::new().write(true).open(path)?;
                device.seek(SeekFrom::Start(offset_of(&file)))?;
                device
            } else {
                fs::File::create(path.join(file))?
            };
            target.write_all(&content)?;
            target.sync_all()
        })
        .await
    }

    /// Reads what `write` wrote.
    pub(crate) async fn read(
        &self,
        prepared: &PreparedVolume,
        file: &str,
        length: usize,
    ) -> io::Result<Vec<u8>> {
        let (path, block, file) = (self.seen(&prepared.target), self.options.block, file.to_owned());
        self.on_disk(move || {
            use std::io::{Read as _, Seek as _, SeekFrom};
            let mut content = vec![0; length];
            let mut target = if block {
                let mut device = fs::File::open(path)?;
                device.seek(SeekFrom::Start(offset_of(&file)))?;
                device
            } else {
                fs::File::open(path.join(file))?
            };
            target.read_exact(&mut content)?;
            Ok(content)
        })
        .await
    }

    /// The size of what is published: of the filesystem, or of the device.
    pub(crate) async fn size_of(&self, prepared: &PreparedVolume) -> io::Result<u64> {
        let (path, block) = (self.seen(&prepared.target), self.options.block);
        self.on_disk(move || {
            if block {
                return berth_host::loopdev::size(&path).map_err(io::Error::other);
            }
            let filesystem = rustix::fs::statvfs(&path)?;
            Ok(filesystem.f_blocks.saturating_mul(filesystem.f_frsize))
        })
        .await
    }
}

/// Where a "file" lies on a device: each in a mebibyte of its own.
fn offset_of(file: &str) -> u64 {
    file.bytes().map(u64::from).sum::<u64>() % 16 * (1 << 20)
}

impl PreparedVolume {
    pub(crate) fn stage_request(&self) -> v1::NodeStageVolumeRequest {
        v1::NodeStageVolumeRequest {
            volume_id: self.volume.volume_id.clone(),
            publish_context: self.publish_context.clone(),
            staging_target_path: self.staging.clone(),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.volume.volume_context.clone(),
            ..Default::default()
        }
    }

    pub(crate) fn unstage_request(&self) -> v1::NodeUnstageVolumeRequest {
        v1::NodeUnstageVolumeRequest {
            volume_id: self.volume.volume_id.clone(),
            staging_target_path: self.staging.clone(),
        }
    }

    pub(crate) fn publish_request(&self) -> v1::NodePublishVolumeRequest {
        v1::NodePublishVolumeRequest {
            volume_id: self.volume.volume_id.clone(),
            publish_context: self.publish_context.clone(),
            staging_target_path: self.staging.clone(),
            target_path: self.target.clone(),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.volume.volume_context.clone(),
            ..Default::default()
        }
    }

    pub(crate) fn unpublish_request(&self) -> v1::NodeUnpublishVolumeRequest {
        v1::NodeUnpublishVolumeRequest {
            volume_id: self.volume.volume_id.clone(),
            target_path: self.target.clone(),
        }
    }

    pub(crate) fn stats_request(&self) -> v1::NodeGetVolumeStatsRequest {
        v1::NodeGetVolumeStatsRequest {
            volume_id: self.volume.volume_id.clone(),
            volume_path: self.target.clone(),
            staging_target_path: self.staging.clone(),
        }
    }

    pub(crate) fn health_request(&self) -> v1::NodeGetVolumeHealthRequest {
        v1::NodeGetVolumeHealthRequest {
            volume_id: self.volume.volume_id.clone(),
            volume_publish_path: self.target.clone(),
            staging_target_path: self.staging.clone(),
        }
    }
}
