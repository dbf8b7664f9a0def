//! The Node service.

mod expand;
mod inline;
mod recovery;

use std::{
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use berth_core::{AccessKind, AccessMode, VolumeId};
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
use tonic::{Request, Response, Status};

use super::{Reply, Services, answer, rules};
use crate::{
    Context, Error, NodeVolume, Result, Source, TargetMounts,
    call::{
        self,
        node::{NodeExpand, NodeHealth, Publish, Stage, Stats, Unpublish, Unstage},
    },
    compose::{Inline, Node as Parts},
    erased::DynStaging,
    ledger::{Ledger, Phase, Published, Staged},
    target::{self, Publication},
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
            let mounts = Arc::clone(&node.mounts);
            self.blocking(move |ledger| unbind(ledger, &*mounts, known, &target)).await?;
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

impl Published {
    /// As what the volume is published.
    fn publication(&self) -> Publication<'_> {
        Publication { capability: &self.capability, read_only: self.read_only }
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

    /// Stages a locked volume.
    async fn stage(
        &self,
        ctx: &Context,
        node: &Parts,
        staging: &dyn DynStaging,
        volume: &NodeVolume,
        path: PathBuf,
    ) -> Result<()> {
        let (id, capability) = (&volume.id, volume.capability.clone());
        let known = self.ledger.staged(id);
        let staged = Staged { volume: id.clone(), path, capability, phase: Phase::Mounted };
        match known {
            Some(known) if known.path != staged.path => {
                let path = known.path.display();
                return Err(Error::Precondition(format!(
                    "volume {id:?} is staged at {path}; unstage it there first"
                )));
            }
            Some(known) if known.phase == Phase::Mounted => {
                if known.capability != staged.capability {
                    return Err(Error::Conflict(format!(
                        "volume {id:?} is staged there with another capability"
                    )));
                }
                // Again, because what was staged may have been taken apart behind our back.
                return staging.stage(ctx, volume, &staged.path).await;
            }
            Some(known) if known.phase == Phase::Remounting => {
                return self.bring_up(ctx, node, staging, &known).await;
            }
            _ => {}
        }
        self.note_staged(&staged, Phase::Mounting).await?;
        if let Err(error) = staging.stage(ctx, volume, &staged.path).await {
            let id = id.clone();
            // An entry that stays is one that a later call or a restart undoes again.
            let _ = self.blocking(move |ledger| ledger.forget_staged(&id)).await;
            return Err(error);
        }
        self.note_staged(&staged, Phase::Mounted).await
    }

    async fn note_staged(&self, staged: &Staged, phase: Phase) -> Result<()> {
        let staged = Staged { phase, ..staged.clone() };
        self.blocking(move |ledger| ledger.note_staged(staged)).await
    }

    /// Unstages a locked volume that is published nowhere.
    async fn unstage(
        &self,
        ctx: &Context,
        staging: &dyn DynStaging,
        id: &VolumeId,
        path: &Path,
    ) -> Result<()> {
        match self.ledger.staged(id) {
            // What the backend has for this volume belongs to the other path.
            Some(staged) if staged.path != path => return Ok(()),
            Some(staged) => {
                // Only speeds up a restart; a full disk must not keep a volume from being unstaged.
                if let Err(error) = self.note_staged(&staged, Phase::Unmounting).await {
                    tracing::warn!(volume.id = %id, %error, "unstaging without a record of it");
                }
            }
            // Staged before a reboot, or by a driver whose records are lost.
            None => {}
        }
        staging.unstage(ctx, id, path).await?;
        let id = id.clone();
        self.blocking(move |ledger| ledger.forget_staged(&id)).await
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
        self.check_target(&wanted)?;
        let source = node.sources.source(ctx, volume).await?;
        volume.check_access(source.kind())?;
        let mounts = Arc::clone(&node.mounts);
        self.blocking(move |ledger| bind(ledger, &*mounts, &source, &wanted)).await
    }

    /// The spec's table of second publications.
    fn check_target(&self, wanted: &Published) -> Result<()> {
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

/// Puts the volume at its target, and notes it before and after.
fn bind(ledger: &Ledger, mounts: &dyn TargetMounts, source: &Source, wanted: &Published) -> Result<()> {
    if let Some(known) = ledger.published_at(&wanted.target) {
        if known.phase == Phase::Mounted && mounts.is_mounted(&wanted.target)? {
            return Ok(());
        }
        // An attempt that did not come to its end, or a mount that somebody took away.
        target::remove(mounts, &wanted.target)?;
        ledger.forget_published(&wanted.target)?;
    }
    target::check(mounts, &wanted.target, wanted.capability.access.kind())?;
    ledger.note_published(Published { phase: Phase::Mounting, ..wanted.clone() })?;
    let bound = target::bind(mounts, source, &wanted.target, wanted.publication());
    if let Err(error) = bound.and_then(|()| ledger.note_published(wanted.clone())) {
        // What cannot be undone now keeps its entry, and is undone by the next call or at the next start.
        let _ = target::remove(mounts, &wanted.target).and_then(|()| ledger.forget_published(&wanted.target));
        return Err(error);
    }
    Ok(())
}

/// Takes the volume away from its target, and notes it before and after.
///
/// A target that is not known is cleared as well: it may be from before a reboot or a loss of records, and an OK for
/// a target that still has something mounted would let the caller delete what is there.
fn unbind(ledger: &Ledger, mounts: &dyn TargetMounts, known: Option<Published>, at: &Path) -> Result<()> {
    if let Some(known) = known
        && let Err(error) = ledger.note_published(Published { phase: Phase::Unmounting, ..known })
    {
        // Only speeds up a restart; a full disk must not keep a pod from ending.
        tracing::warn!(target.path = %at.display(), %error, "unpublishing without a record of it");
    }
    target::remove(mounts, at)?;
    ledger.forget_published(at)
}
