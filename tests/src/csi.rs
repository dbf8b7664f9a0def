//! The CSI calls a container orchestrator makes, with the fields the tests vary.

use std::fmt::Debug;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use berth_csi::v1::{
    self, controller_client::ControllerClient, group_controller_client::GroupControllerClient,
    identity_client::IdentityClient, node_client::NodeClient,
    snapshot_metadata_client::SnapshotMetadataClient, volume_capability, volume_content_source,
};
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Status, transport::Channel};

/// Clients for the five services of one driver.
#[derive(Debug, Clone)]
pub struct Csi {
    /// Calls the Identity service.
    pub identity: IdentityClient<Bounded>,
    /// Calls the Controller service.
    pub controller: ControllerClient<Bounded>,
    /// Calls the Node service.
    pub node: NodeClient<Bounded>,
    /// Calls the GroupController service.
    pub group: GroupControllerClient<Bounded>,
    /// Calls the SnapshotMetadata service.
    pub metadata: SnapshotMetadataClient<Bounded>,
}

/// How the local driver keeps a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A btrfs subvolume with a quota.
    Btrfs,
    /// An image file on a loop device.
    Image,
    /// A directory without a limit of its size.
    Dir,
}

/// How a volume is seen by its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Mounted; the filesystem may be left to the driver with "".
    Mount(&'static str),
    /// A raw block device.
    Block,
}

/// What kind of volume a test wants.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// How it is kept.
    pub kind: Kind,
    /// How it is seen.
    pub access: Access,
    /// The size in bytes.
    pub bytes: i64,
}

/// A volume as its creation answered.
#[derive(Debug, Clone)]
pub struct Volume {
    /// The id that the driver gave it.
    pub id: String,
    /// What was asked for.
    pub shape: Shape,
    /// The capacity it was given.
    pub bytes: i64,
    /// What every node call must be given.
    pub context: BTreeMap<String, String>,
}

/// Where a volume was staged and published.
#[derive(Debug, Clone)]
pub struct Mounted {
    /// The id of the volume.
    pub id: String,
    /// Where the volume is staged.
    pub staging: PathBuf,
    /// Where the volume is published.
    pub target: PathBuf,
}

impl Kind {
    /// The value of the class parameter `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Image => "image",
            Self::Dir => "dir",
        }
    }
}

impl Shape {
    /// A volume of `mib` MiB.
    pub const fn new(kind: Kind, access: Access, mib: i64) -> Self {
        Self { kind, access, bytes: mib << 20 }
    }

    /// The capability to create, stage and publish it with.
    pub fn capability(&self) -> v1::VolumeCapability {
        let access_type = match self.access {
            Access::Mount(fs_type) => volume_capability::AccessType::Mount(volume_capability::MountVolume {
                fs_type: fs_type.into(),
                ..Default::default()
            }),
            Access::Block => volume_capability::AccessType::Block(volume_capability::BlockVolume {}),
        };
        let mode = volume_capability::access_mode::Mode::SingleNodeWriter;
        v1::VolumeCapability {
            access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
            access_type: Some(access_type),
        }
    }

    /// The request that creates it.
    pub fn request(&self, name: &str) -> v1::CreateVolumeRequest {
        v1::CreateVolumeRequest {
            name: name.into(),
            capacity_range: Some(v1::CapacityRange { required_bytes: self.bytes, limit_bytes: 0 }),
            volume_capabilities: vec![self.capability()],
            parameters: [("kind".to_owned(), self.kind.as_str().to_owned())].into(),
            ..Default::default()
        }
    }
}

/// The content source "this snapshot".
pub fn from_snapshot(id: &str) -> v1::VolumeContentSource {
    let source = volume_content_source::SnapshotSource { snapshot_id: id.into() };
    v1::VolumeContentSource { r#type: Some(volume_content_source::Type::Snapshot(source)) }
}

/// The content source "this volume".
pub fn from_volume(id: &str) -> v1::VolumeContentSource {
    let source = volume_content_source::VolumeSource { volume_id: id.into() };
    v1::VolumeContentSource { r#type: Some(volume_content_source::Type::Volume(source)) }
}

/// No call may take longer that does not say how long, also not one that got lost when the driver was killed.
const LONGEST_CALL: Duration = Duration::from_secs(60);

/// A channel on which no call takes for ever.
pub type Bounded = InterceptedService<Channel, fn(Request<()>) -> Result<Request<()>, Status>>;

#[expect(clippy::unnecessary_wraps, reason = "an interceptor may refuse")]
fn bounded(mut request: Request<()>) -> Result<Request<()>, Status> {
    // A call that has a deadline of its own keeps it.
    if !request.metadata().contains_key("grpc-timeout") {
        request.set_timeout(LONGEST_CALL);
    }
    Ok(request)
}

impl Csi {
    /// Connects when the first call is made.
    pub fn connect(endpoint: &str) -> Result<Self> {
        let endpoint: berth_csi::Endpoint = endpoint.parse().context("parse the endpoint")?;
        let bounded: fn(Request<()>) -> Result<Request<()>, Status> = bounded;
        let channel = berth_csi::connect(&endpoint);
        Ok(Self {
            identity: IdentityClient::with_interceptor(channel.clone(), bounded),
            controller: ControllerClient::with_interceptor(channel.clone(), bounded),
            node: NodeClient::with_interceptor(channel.clone(), bounded),
            group: GroupControllerClient::with_interceptor(channel.clone(), bounded),
            metadata: SnapshotMetadataClient::with_interceptor(channel, bounded),
        })
    }

    /// Whether the driver says that it is ready.
    pub async fn probe(&self) -> Result<bool, Status> {
        let answer = self.identity.clone().probe(v1::ProbeRequest {}).await?.into_inner();
        Ok(answer.ready.unwrap_or(true))
    }

    /// Creates an empty volume.
    pub async fn create(&self, name: &str, shape: Shape) -> Result<Volume, Status> {
        self.create_by(shape, shape.request(name)).await
    }

    /// Creates a volume with the content of a snapshot or of another volume.
    pub async fn create_from(
        &self,
        name: &str,
        shape: Shape,
        source: v1::VolumeContentSource,
    ) -> Result<Volume, Status> {
        self.create_by(
            shape,
            v1::CreateVolumeRequest { volume_content_source: Some(source), ..shape.request(name) },
        )
        .await
    }

    /// Creates a volume by a whole request.
    pub async fn create_by(&self, shape: Shape, request: v1::CreateVolumeRequest) -> Result<Volume, Status> {
        let answer = self.controller.clone().create_volume(request).await?.into_inner();
        let volume = answer.volume.ok_or_else(|| Status::internal("the answer has no volume"))?;
        Ok(Volume {
            id: volume.volume_id,
            shape,
            bytes: volume.capacity_bytes,
            context: volume.volume_context,
        })
    }

    /// Deletes a volume, as DeleteVolume does.
    pub async fn delete(&self, id: &str) -> Result<(), Status> {
        let request = v1::DeleteVolumeRequest { volume_id: id.into(), ..Default::default() };
        self.controller.clone().delete_volume(request).await.map(drop)
    }

    /// All volumes, page by page.
    pub async fn volumes(&self) -> Result<Vec<v1::Volume>, Status> {
        let mut found = Vec::new();
        let mut starting_token = String::new();
        loop {
            let request = v1::ListVolumesRequest { max_entries: 0, starting_token };
            let page = self.controller.clone().list_volumes(request).await?.into_inner();
            found.extend(page.entries.into_iter().filter_map(|entry| entry.volume));
            starting_token = page.next_token;
            if starting_token.is_empty() {
                return Ok(found);
            }
        }
    }

    /// Takes a snapshot of a volume.
    pub async fn snapshot(&self, name: &str, source: &str) -> Result<v1::Snapshot, Status> {
        let request = v1::CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: source.into(),
            ..Default::default()
        };
        let answer = self.controller.clone().create_snapshot(request).await?.into_inner();
        answer.snapshot.ok_or_else(|| Status::internal("the answer has no snapshot"))
    }

    /// As [`Self::snapshot`], repeated until it is ready; the driver lets its caller wait a while each time.
    pub async fn ready_snapshot(&self, name: &str, source: &str) -> Result<v1::Snapshot, Status> {
        until_ready(async || self.snapshot(name, source).await, |snapshot| snapshot.ready_to_use).await
    }

    /// As [`Self::group_snapshot`], repeated until it is ready.
    pub async fn ready_group_snapshot(
        &self,
        name: &str,
        sources: &[&str],
    ) -> Result<v1::VolumeGroupSnapshot, Status> {
        until_ready(async || self.group_snapshot(name, sources).await, |group| group.ready_to_use).await
    }

    /// Deletes a snapshot, as DeleteSnapshot does.
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), Status> {
        let request = v1::DeleteSnapshotRequest { snapshot_id: id.into(), ..Default::default() };
        self.controller.clone().delete_snapshot(request).await.map(drop)
    }

    /// All snapshots, page by page.
    pub async fn snapshots(&self) -> Result<Vec<v1::Snapshot>, Status> {
        let mut found = Vec::new();
        let mut starting_token = String::new();
        loop {
            let request = v1::ListSnapshotsRequest { starting_token, ..Default::default() };
            let page = self.controller.clone().list_snapshots(request).await?.into_inner();
            found.extend(page.entries.into_iter().filter_map(|entry| entry.snapshot));
            starting_token = page.next_token;
            if starting_token.is_empty() {
                return Ok(found);
            }
        }
    }

    /// Takes a snapshot of several volumes at one moment.
    pub async fn group_snapshot(
        &self,
        name: &str,
        sources: &[&str],
    ) -> Result<v1::VolumeGroupSnapshot, Status> {
        let request = v1::CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: sources.iter().map(ToString::to_string).collect(),
            ..Default::default()
        };
        let answer = self.group.clone().create_volume_group_snapshot(request).await?.into_inner();
        answer.group_snapshot.ok_or_else(|| Status::internal("the answer has no group snapshot"))
    }

    /// Deletes a group snapshot with its members.
    pub async fn delete_group_snapshot(&self, id: &str, members: &[String]) -> Result<(), Status> {
        let request = v1::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: members.to_vec(),
            ..Default::default()
        };
        self.group.clone().delete_volume_group_snapshot(request).await.map(drop)
    }

    /// Grows a volume on the controller's side; whether the node must follow is in the answer.
    pub async fn expand(
        &self,
        volume: &Volume,
        bytes: i64,
    ) -> Result<v1::ControllerExpandVolumeResponse, Status> {
        let request = v1::ControllerExpandVolumeRequest {
            volume_id: volume.id.clone(),
            capacity_range: Some(v1::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            volume_capability: Some(volume.shape.capability()),
            ..Default::default()
        };
        self.controller.clone().controller_expand_volume(request).await.map(tonic::Response::into_inner)
    }

    /// Grows a published volume on the node.
    pub async fn node_expand(&self, volume: &Volume, mounted: &Mounted, bytes: i64) -> Result<(), Status> {
        let request = v1::NodeExpandVolumeRequest {
            volume_id: volume.id.clone(),
            volume_path: text(&mounted.target),
            staging_target_path: text(&mounted.staging),
            capacity_range: Some(v1::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            volume_capability: Some(volume.shape.capability()),
            ..Default::default()
        };
        self.node.clone().node_expand_volume(request).await.map(drop)
    }

    /// Stages a volume in an existing directory.
    pub async fn stage(&self, volume: &Volume, staging: &Path) -> Result<(), Status> {
        let request = v1::NodeStageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(staging),
            volume_capability: Some(volume.shape.capability()),
            volume_context: volume.context.clone(),
            ..Default::default()
        };
        self.node.clone().node_stage_volume(request).await.map(drop)
    }

    /// Unstages what [`Self::stage`] has staged.
    pub async fn unstage(&self, id: &str, staging: &Path) -> Result<(), Status> {
        let request =
            v1::NodeUnstageVolumeRequest { volume_id: id.into(), staging_target_path: text(staging) };
        self.node.clone().node_unstage_volume(request).await.map(drop)
    }

    /// The request that publishes a staged volume.
    pub fn publish_request(volume: &Volume, staging: &Path, target: &Path) -> v1::NodePublishVolumeRequest {
        v1::NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(staging),
            target_path: text(target),
            volume_capability: Some(volume.shape.capability()),
            volume_context: volume.context.clone(),
            ..Default::default()
        }
    }

    /// Publishes a staged volume.
    pub async fn publish(&self, volume: &Volume, staging: &Path, target: &Path) -> Result<(), Status> {
        self.node.clone().node_publish_volume(Self::publish_request(volume, staging, target)).await.map(drop)
    }

    /// Unpublishes what [`Self::publish`] has published.
    pub async fn unpublish(&self, id: &str, target: &Path) -> Result<(), Status> {
        let request = v1::NodeUnpublishVolumeRequest { volume_id: id.into(), target_path: text(target) };
        self.node.clone().node_unpublish_volume(request).await.map(drop)
    }

    /// Makes the directories an orchestrator makes below `dir`, stages and publishes.
    pub async fn mount(&self, volume: &Volume, dir: &Path) -> Result<Mounted, Status> {
        let mounted = Mounted::paths(&volume.id, dir)?;
        self.stage(volume, &mounted.staging).await?;
        self.publish(volume, &mounted.staging, &mounted.target).await?;
        Ok(mounted)
    }

    /// Unpublishes and unstages a volume.
    pub async fn unmount(&self, mounted: &Mounted) -> Result<(), Status> {
        self.unpublish(&mounted.id, &mounted.target).await?;
        self.unstage(&mounted.id, &mounted.staging).await
    }

    /// How full a published volume is: (bytes, inodes), as far as the driver says.
    pub async fn stats(&self, mounted: &Mounted) -> Result<Vec<v1::VolumeUsage>, Status> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: mounted.id.clone(),
            volume_path: text(&mounted.target),
            staging_target_path: text(&mounted.staging),
        };
        Ok(self.node.clone().node_get_volume_stats(request).await?.into_inner().usage)
    }
}

impl Mounted {
    /// The paths for a volume below `dir`, with the directories that the orchestrator has to make.
    pub fn paths(id: &str, dir: &Path) -> Result<Self, Status> {
        let staging = dir.join("stage").join(id);
        let pod = dir.join("pods").join(id);
        for made in [&staging, &pod] {
            fs::create_dir_all(made)
                .map_err(|error| Status::internal(format!("make {}: {error}", made.display())))?;
        }
        Ok(Self { id: id.into(), staging, target: pod.join("mount") })
    }
}

/// A path as a field of a request.
pub fn text(path: &Path) -> String {
    path.to_str().expect("the tests use paths of plain text").into()
}

/// Repeats a call until what it took is ready to be used.
async fn until_ready<T: Debug>(
    call: impl AsyncFn() -> Result<T, Status>,
    is_ready: impl Fn(&T) -> bool,
) -> Result<T, Status> {
    let deadline = Instant::now() + LONGEST_CALL;
    loop {
        let taken = call().await?;
        if is_ready(&taken) {
            return Ok(taken);
        }
        if Instant::now() > deadline {
            return Err(Status::deadline_exceeded(format!("it does not become ready: {taken:?}")));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
