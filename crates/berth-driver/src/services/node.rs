//! The Node service: its calls, and how a volume is published: noted, bound at its `target_path`, and removed again.

mod expand;
mod inline;
mod mount_group;
mod recovery;
mod staging;

use std::{
    fs::{self, DirBuilder, FileType, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use berth_core::{Access, AccessKind, AccessMode, VolumeId};
use berth_csi::v1::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetStorageHealthRequest,
    NodeGetStorageHealthResponse, NodeGetVolumeHealthRequest, NodeGetVolumeHealthResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest,
    NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest, NodeStageVolumeResponse,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse,
    node_server::Node,
    node_service_capability::{Rpc, Type},
};
use berth_host::{
    mount::{self, Attributes},
    path::Dir,
};
use tonic::{Request, Response, Status};

pub(super) use self::expand::Held;
use super::{Reply, Services, answer, rules};
use crate::{
    Context, Error, NodeVolume, Result, Source,
    call::{
        self,
        node::{NodeExpand, NodeHealth, Publish, Stage, Stats, Unpublish, Unstage},
    },
    compose::{Inline, Node as Parts},
    erased::DynTargetMounts,
    ledger::{Phase, Published},
    node::blocking,
};

#[tonic::async_trait]
impl Node for Services {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Reply<NodeStageVolumeResponse> {
        let node = self.node()?;
        let staging = self.part(node.parts.staging.as_deref(), "staging")?;
        let (ctx, Stage { volume, staging: path }) = call::read(request)?;
        let _guard = self.lock_volume(&volume.id)?;
        rules::check_outside(&self.config.private_dir, "staging_target_path", &path)?;
        rules::check_group(&volume.capability, node.mount_group)?;
        node.sources.check(&ctx, &volume).await?;
        self.stage(&ctx, node, staging, &volume, path).await?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Reply<NodeUnstageVolumeResponse> {
        let staging = self.part(self.node()?.parts.staging.as_deref(), "staging")?;
        let (ctx, Unstage { id, staging: path }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        if let Some(published) = self.ledger.published(&id).first() {
            let target = published.target.display();
            let sentence = format!("volume {id:?} is still published at {target}");
            return Err(Error::Precondition(sentence).into());
        }
        self.unstage(&ctx, staging, &id, &path).await?;
        self.held.forget(&id);
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Reply<NodePublishVolumeResponse> {
        let node = self.node()?;
        let (ctx, Publish { mut volume, target, inline }) = call::read(request)?;
        let _guard = self.lock_volume(&volume.id)?;
        rules::check_outside(&self.config.private_dir, "target_path", &target)?;
        rules::check_group(&volume.capability, node.mount_group)?;
        match (inline, &node.inline) {
            (Some(_), Inline::Unsupported) => {
                return Err(Error::invalid("inline volumes are not supported by this driver").into());
            }
            (Some(inline), Inline::Made { provisioner, finder }) => {
                self.publish_inline(&ctx, node, (&**provisioner, &**finder), volume, target, inline).await?;
            }
            _ => {
                node.sources.check(&ctx, &volume).await?;
                volume.staging = self.staging_of(node, &volume.id, volume.staging)?;
                self.publish(&ctx, node, &volume, None, target).await?;
            }
        }
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Reply<NodeUnpublishVolumeResponse> {
        let node = self.node()?;
        let (ctx, Unpublish { id, target }) = call::read(request)?;
        let _guard = self.lock_volume(&id)?;
        let known = self.ledger.published_at(&target);
        // At another volume's target this one is not.
        if known.as_ref().is_none_or(|known| known.is(&id)) {
            let may_be_inline = known.as_ref().is_none_or(|known| known.handle.is_some());
            self.unbind(&*node.mounts, known, &target).await?;
            if may_be_inline {
                self.remove_inline(&ctx, node, &id).await?;
            }
        }
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Reply<NodeGetVolumeStatsResponse> {
        let stats = self.part(self.node()?.parts.stats.as_deref(), "statistics")?;
        let (ctx, Stats { id, path }) = call::read(request)?;
        let id = self.volume_at(&id, &path).await?;
        let usage = answer::usage(&stats.usage(&ctx, &id, &path).await?);
        Ok(Response::new(NodeGetVolumeStatsResponse { usage }))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Reply<NodeGetVolumeHealthResponse> {
        let health = self.part(self.node()?.parts.health.as_deref(), "health of volumes")?;
        let (ctx, NodeHealth { id: handle }) = call::read(request)?;
        let id = self.ledger.backend_id(&handle);
        let staging = self.ledger.staged(&id).map(|staged| staged.path);
        let published = self.ledger.published(&id).into_iter();
        let mounted = published.filter(|published| published.phase == Phase::Mounted);
        let targets: Vec<_> = mounted.map(|published| published.target).collect();
        let conditions = health.volume_health(&ctx, &id, staging.as_deref(), &targets).await?;
        let volume_health = Some(answer::volume_health(&handle, conditions));
        Ok(Response::new(NodeGetVolumeHealthResponse { volume_health }))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Reply<NodeGetStorageHealthResponse> {
        let health = self.part(self.node()?.parts.health.as_deref(), "health of the storage")?;
        Ok(Response::new(answer::storage_health(health.storage_health(&Context::default()).await?)))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Reply<NodeExpandVolumeResponse> {
        let node = self.node()?;
        let expansion = self.part(node.parts.expansion.as_deref(), "expansion")?;
        let (ctx, call) = call::read::<_, NodeExpand>(request)?;
        let id = self.volume_at(&call.id, &call.path).await?;
        let capacity_bytes = self.ensure_grown(&ctx, node, expansion, &id, &call).await?.as_i64();
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Reply<NodeGetCapabilitiesResponse> {
        let capabilities = self
            .announced
            .node
            .iter()
            .map(|&rpc| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })) });
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Reply<NodeGetInfoResponse> {
        let node = self.node()?;
        Ok(Response::new(NodeGetInfoResponse {
            node_id: node.id.to_string(),
            max_volumes_per_node: node.max_volumes.map_or(0, i64::from),
            accessible_topology: node.topology.as_ref().map(answer::topology),
        }))
    }
}

impl Services {
    /// The backend's id of the volume that is staged or published at `path` and that the caller calls `id`.
    ///
    /// A raw block volume is also at every other path that leads to its device: the kubelet publishes it at
    /// `volumeDevices/publish/<pv>/<pod>`, binds that to `volumeDevices/<pv>/dev/<pod>`, and asks for its statistics there.
    async fn volume_at(&self, id: &VolumeId, path: &Path) -> std::result::Result<VolumeId, Status> {
        let published = self.ledger.published_at(path).filter(|published| published.is(id));
        if let Some(published) = published.filter(|published| published.phase == Phase::Mounted) {
            return Ok(published.volume);
        }
        let volume = self.ledger.backend_id(id);
        let staged = self.ledger.staged(&volume).filter(|staged| staged.phase == Phase::Mounted);
        if staged.is_some_and(|staged| staged.path == path) {
            return Ok(volume);
        }
        let published = self.ledger.published(&volume).into_iter();
        let devices: Vec<PathBuf> = published
            .filter(|published| published.phase == Phase::Mounted && published.is(id))
            .filter(|published| published.capability.access.kind() == AccessKind::Block)
            .map(|published| published.target)
            .collect();
        let asked = path.to_owned();
        let same = self.blocking(move |_| {
            let wanted = device_number(&asked);
            Ok(wanted.is_some() && devices.iter().any(|device| device_number(device) == wanted))
        });
        if same.await? {
            return Ok(volume);
        }
        Err(Status::not_found(format!("volume {id:?} is not staged or published at {}", path.display())))
    }

    /// Where the volume is staged, which has to be where the caller says it is.
    fn staging_of(&self, node: &Parts, id: &VolumeId, given: Option<PathBuf>) -> Result<Option<PathBuf>> {
        if node.parts.staging.is_none() {
            return Ok(None);
        }
        let given = given.ok_or_else(|| {
            Error::precondition("staging_target_path is missing; the volume has to be staged first")
        })?;
        match self.ledger.staged(id) {
            Some(staged) if staged.phase == Phase::Mounted && staged.path == given => Ok(Some(given)),
            _ => Err(Error::Precondition(format!("volume {id:?} is not staged at {}", given.display()))),
        }
    }

    /// Publishes a locked volume. An inline volume is called `handle` by Kubernetes.
    async fn publish(
        &self,
        ctx: &Context,
        node: &Parts,
        volume: &NodeVolume,
        handle: Option<VolumeId>,
        target: PathBuf,
    ) -> Result<()> {
        let wanted = Published {
            volume: volume.id.clone(),
            handle,
            target,
            capability: volume.capability.clone(),
            read_only: volume.read_only,
            phase: Phase::Mounted,
        };
        self.check_publications(&wanted)?;
        let source = node.sources.source(ctx, volume).await?;
        volume.check_access(source.kind())?;
        self.bind(&*node.mounts, &Arc::new(source), wanted).await
    }

    /// Puts a volume at its target, and notes it before and after.
    async fn bind(
        &self,
        mounts: &dyn DynTargetMounts,
        source: &Arc<Source>,
        wanted: Published,
    ) -> Result<()> {
        let target = wanted.target.clone();
        if let Some(known) = self.ledger.published_at(&target) {
            if known.phase == Phase::Mounted && mounts.is_mounted(&target).await? {
                return Ok(());
            }
            // An attempt that did not come to its end, or a mount that somebody took away.
            self.clear_target(mounts, &target).await?;
        }
        // Before anything else, because what is mounted there may not answer.
        if mounts.is_mounted(&target).await? {
            return Err(in_the_way(&target, "something else is mounted there"));
        }
        let noted = wanted.clone();
        self.blocking(move |ledger| {
            check_target(&noted.target, noted.capability.access.kind())?;
            ledger.note_published(Published { phase: Phase::Mounting, ..noted })
        })
        .await?;
        let bound = async {
            bind_target(mounts, source, &wanted).await?;
            self.blocking(move |ledger| ledger.note_published(wanted)).await
        };
        if let Err(error) = bound.await {
            // What cannot be undone now keeps its entry, and is undone by the next call or at the next start.
            let _ = self.clear_target(mounts, &target).await;
            return Err(error);
        }
        Ok(())
    }

    /// Takes away what [`bind_target`] put at a target, and forgets it.
    async fn clear_target(&self, mounts: &dyn DynTargetMounts, target: &Path) -> Result<()> {
        unbind_target(mounts, target).await?;
        let target = target.to_owned();
        self.blocking(move |ledger| ledger.forget_published(&target)).await
    }

    /// Takes the volume away from its target, and notes it before and after.
    ///
    /// A target that is not known is cleared as well: it may be from before a reboot or a loss of records, and an OK for
    /// a target that still has something mounted would let the caller delete what is there.
    async fn unbind(
        &self,
        mounts: &dyn DynTargetMounts,
        known: Option<Published>,
        target: &Path,
    ) -> Result<()> {
        if let Some(known) = known {
            self.held.forget(&known.volume);
            let noted = Published { phase: Phase::Unmounting, ..known };
            if let Err(error) = self.blocking(move |ledger| ledger.note_published(noted)).await {
                // Only speeds up a restart; a full disk must not keep a pod from ending.
                tracing::warn!(target.path = %target.display(), %error, "unpublishing without a record of it");
            }
        }
        self.clear_target(mounts, target).await
    }

    /// The spec's table of second publications.
    fn check_publications(&self, wanted: &Published) -> Result<()> {
        let target = wanted.target.display();
        match self.ledger.published_at(&wanted.target) {
            Some(known) if known.volume != wanted.volume => {
                return Err(Error::Conflict(format!("volume {:?} is published at {target}", known.volume)));
            }
            Some(known) if known.phase == Phase::Mounted && known != *wanted => {
                return Err(Error::Conflict(format!(
                    "volume {:?} is published at {target} with another capability or read-only flag",
                    known.volume
                )));
            }
            _ => {}
        }
        let is_alone =
            |published: &Published| published.capability.mode == AccessMode::SingleNodeSingleWriter;
        let others = self.ledger.published(&wanted.volume);
        let other = others
            .iter()
            .filter(|other| other.target != wanted.target)
            .find(|other| is_alone(other) || is_alone(wanted));
        match other {
            Some(other) => Err(Error::Precondition(format!(
                "volume {:?} is for one workload at a time and published at {}",
                other.volume,
                other.target.display()
            ))),
            None => Ok(()),
        }
    }
}

/// The number of the block device at a path, where there is one.
fn device_number(path: &Path) -> Option<u64> {
    let metadata = std::fs::metadata(path).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

/// Makes the source appear at a target that [`check_target`] did not refuse.
async fn bind_target(mounts: &dyn DynTargetMounts, source: &Arc<Source>, wanted: &Published) -> Result<()> {
    let made = wanted.clone();
    blocking(move || make_target(&made)).await?;
    let flags = match &wanted.capability.access {
        // The filesystem read its own options when it was mounted; a bind takes only those of a mount.
        Access::Mount { flags, .. } => mount::parse_options(flags).attributes,
        Access::Block => Attributes::default(),
    };
    mounts.bind(source, &wanted.target, Attributes { read_only: wanted.read_only, ..flags }).await?;
    match wanted.capability.access {
        // Who only reads has to be able to do that.
        Access::Mount { group: Some(gid), .. } => {
            let (from, target) = (source.clone(), wanted.target.clone());
            blocking(move || mount_group::show(&from, &target, gid)).await
        }
        _ => Ok(()),
    }
}

/// Takes away whatever is mounted at a target, and the empty directory or file below it.
async fn unbind_target(mounts: &dyn DynTargetMounts, target: &Path) -> Result<()> {
    mounts.unmount(target).await?;
    let target = target.to_owned();
    blocking(move || remove_target(&target)).await
}

/// Refuses a target at which a volume cannot be put; changes nothing.
fn check_target(target: &Path, kind: AccessKind) -> Result<()> {
    let Some(found) = file_type_at(target)? else { return Ok(()) };
    match kind {
        AccessKind::Mount if !found.is_dir() => Err(in_the_way(target, "it is not a directory")),
        AccessKind::Mount if !is_empty_directory(target)? => {
            Err(in_the_way(target, "the directory is not empty"))
        }
        AccessKind::Block if !found.is_file() => Err(in_the_way(target, "it is not a regular file")),
        AccessKind::Block if !is_empty_file(target)? => Err(in_the_way(target, "the file is not empty")),
        AccessKind::Mount | AccessKind::Block => Ok(()),
    }
}

/// Removes the empty directory or file that is a target at which nothing is mounted.
///
/// Nothing else is removed, and nothing is changed where something unexpected is found: a target is chosen by the caller,
/// and what lies there may be somebody's data.
fn remove_target(target: &Path) -> Result<()> {
    let Some(found) = file_type_at(target)? else { return Ok(()) };
    let removed = if found.is_dir() {
        fs::remove_dir(target)
    } else if found.is_file() && is_empty_file(target)? {
        fs::remove_file(target)
    } else {
        return Err(in_the_way(target, "it is not an empty file though nothing is mounted there"));
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            Err(in_the_way(target, "the directory is not empty though nothing is mounted there"))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(host("remove", target, error)),
        _ => Ok(()),
    }
}

/// Makes the empty directory or file at which the source will appear.
fn make_target(wanted: &Published) -> Result<()> {
    let target = &wanted.target;
    if let Some(parent) = target.parent() {
        Dir::ensure(parent, 0o750)?;
    }
    let made = match wanted.capability.access.kind() {
        AccessKind::Mount => DirBuilder::new().mode(0o750).create(target),
        AccessKind::Block => {
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(target).map(drop)
        }
    };
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(host("make the target", target, error))
        }
        _ => Ok(()),
    }
}

/// What is at the target, unless it is a symbolic link, which is never taken for what it leads to.
fn file_type_at(target: &Path) -> Result<Option<FileType>> {
    match fs::symlink_metadata(target) {
        Ok(found) if found.is_symlink() => Err(in_the_way(target, "it is a symbolic link")),
        Ok(found) => Ok(Some(found.file_type())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(host("read the attributes of the target", target, error)),
    }
}

fn is_empty_directory(path: &Path) -> Result<bool> {
    let mut entries = fs::read_dir(path).map_err(|error| host("list the target", path, error))?;
    Ok(entries.next().is_none())
}

fn is_empty_file(path: &Path) -> Result<bool> {
    let found =
        fs::symlink_metadata(path).map_err(|error| host("read the attributes of the target", path, error))?;
    Ok(found.len() == 0)
}

fn in_the_way(target: &Path, why: &str) -> Error {
    Error::Precondition(format!("the target {} cannot be used: {why}", target.display()))
}

fn host(doing: &str, path: &Path, error: io::Error) -> Error {
    berth_host::Error::new(format!("{doing} {}", path.display()), error).into()
}

#[cfg(test)]
mod tests;
