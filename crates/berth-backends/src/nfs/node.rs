//! The node's side: a share is mounted once for each set of options, out of sight, and directories of it are bound at the
//! targets. Images are mounted by loop devices, and bound likewise. Whatever may wait for a server has a deadline, and
//! nothing is remembered but what the kernel knows.

mod direct;
mod images;
pub(super) mod mount;
mod shares;
mod usage;
mod worker;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use berth_core::{Access, AccessKind, CapacityRange, VolumeId};
use berth_host::{
    mount::{Attributes, parse_options},
    remote,
};
use futures_util::future::join_all;

pub use self::{direct::DirectMounts, mount::MountMode, worker::IMAGE_WORKER};
use self::{
    images::{ImageInUse, ImageVolume, Images},
    mount::{Mounter, refused_by},
    shares::{Answer, LOOKUP, MountedShares, ShareInUse, UNMOUNT},
    usage::Usages,
};
use super::{
    AllowedServers, Config, NfsController, blocking, claims,
    controller::COPIED,
    id,
    id::VolumeRef,
    parameters,
    parameters::{ShareSubdirectory, VolumeKind, check_secret_options, secret_options},
    parse_share, record, shares as connections,
};
use crate::{
    Condition, Context, Error, Health as _, NodeExpanded, NodeExpansion, NodeHealth, NodeVolume, Result,
    Severity, Source, Sources, TargetMounts,
};

/// The node's side of the NFS backend; cheap to clone.
#[derive(Debug, Clone)]
pub struct NfsNode(Arc<State>);

#[derive(Debug)]
struct State {
    /// The mode that directories get whose volume names none.
    permissions: Option<u32>,
    /// The options of a volume that has none.
    default_options: Vec<String>,
    allowed: AllowedServers,
    shares: Arc<MountedShares>,
    images: Arc<Images>,
    usages: Usages,
    /// Asks servers without a mount.
    controller: NfsController,
}

impl NfsNode {
    /// Takes down what an earlier process left mounted and nobody uses.
    pub(super) async fn start(config: &Config, controller: NfsController) -> Self {
        let shares = Arc::new(MountedShares::new(
            config.mount_dir.clone(),
            Mounter::new(config, controller.metrics().clone()),
        ));
        let images = Arc::new(Images::new(config, shares.clone()));
        release_unused(&shares, &images).await;
        Self(Arc::new(State {
            permissions: config.mount_permissions,
            default_options: config.mount_options.clone(),
            allowed: config.allowed_servers.clone(),
            shares,
            images,
            usages: Usages::new(config.usage_lifetime),
            controller,
        }))
    }

    async fn image(
        &self,
        place: ShareSubdirectory,
        options: &[String],
        volume: &NodeVolume,
    ) -> Result<Source> {
        VolumeKind::Image.check(std::slice::from_ref(&volume.capability))?;
        let Access::Mount { fs_type, .. } = &volume.capability.access else {
            return Err(Error::State("a raw device was checked to be a filesystem".to_owned()));
        };
        let ownership =
            parameters::OwnerAndMode { mode: place.ownership.mode.or(self.0.permissions), ..place.ownership };
        let image = ImageVolume {
            options_without_secret: place.options(volume, &[], &self.0.default_options),
            share: place.share,
            dir: place.dir,
            fs_type: fs_type.clone(),
            read_only: volume.capability.mode.is_read_only(),
            ownership,
        };
        let image = self.0.images.acquire(image, options).await?;
        Ok(Source::directory(image.volume()).guarded_by(InUse::Image(image)))
    }
}

/// What keeps a source mounted until it is bound at a target; what was not bound is released when this is dropped.
enum InUse {
    Share(ShareInUse),
    Image(ImageInUse),
}

impl Sources for NfsNode {
    async fn check(&self, _: &Context, volume: &NodeVolume) -> Result<()> {
        volume.check_access(AccessKind::Mount)
    }

    async fn source(&self, ctx: &Context, volume: &NodeVolume) -> Result<Source> {
        let place = ShareSubdirectory::parse(volume.id.as_str(), &volume.context)?;
        self.0.allowed.check(&place.share.server)?;
        let secret = secret_options(ctx);
        check_secret_options(&secret)?;
        let options = place.options(volume, &secret, &self.0.default_options);
        self.0.allowed.check_options(&options)?;
        if place.kind == VolumeKind::Image {
            return self.image(place, &options, volume).await;
        }
        let share = self.0.shares.acquire(&place.share, &options).await?;
        let below = PathBuf::from(place.dir.as_ref().map_or("", |dir| dir.as_str()));
        if let Some(mode) = place.ownership.mode.or(self.0.permissions).filter(|_| !volume.read_only) {
            let (shares, root, beneath) = (self.0.shares.clone(), share.root().to_owned(), below.clone());
            let changed =
                blocking(move || Ok(shares.remote().ensure_mode(&root, &beneath, mode, LOOKUP))).await?;
            changed.map_err(|error| refused_by(&place.share, &error))?;
        }
        Ok(Source::below(share.root().to_owned(), below).guarded_by(InUse::Share(share)))
    }
}

impl ShareSubdirectory {
    /// What the volume, the claim's class and the call's secret say about mounting, without what a bind carries; else the
    /// `default`.
    fn options(&self, volume: &NodeVolume, secret: &[String], default: &[String]) -> Vec<String> {
        let flags = match &volume.capability.access {
            Access::Mount { flags, .. } => flags.as_slice(),
            Access::Block => &[],
        };
        let options = parse_options(&[flags, &self.mount_options, secret].concat()).filesystem;
        if options.is_empty() { parse_options(default).filesystem } else { options }
    }
}

impl TargetMounts for NfsNode {
    async fn is_mounted(&self, target: &Path) -> Result<bool> {
        let (shares, target) = (self.0.shares.clone(), target.to_owned());
        blocking(move || match remote::mounted_at(&target)? {
            None => Ok(false),
            Some(found) => Ok(!matches!(shares.ask(&target, &found), Answer::Stale)),
        })
        .await
    }

    async fn bind(&self, source: &Source, target: &Path, attributes: Attributes) -> Result<()> {
        let (shares, target) = (self.0.shares.clone(), target.to_owned());
        let (root, below) = (source.root().to_owned(), source.relative().to_owned());
        blocking(move || shares.bind(&root, &below, &target, attributes)).await?;
        match source.guard().and_then(|guard| guard.downcast_ref()) {
            Some(InUse::Share(share)) => share.keep(),
            Some(InUse::Image(image)) => image.keep(),
            None => {}
        }
        Ok(())
    }

    /// Unmounts a target, and the share or image that it was the last user of.
    async fn unmount(&self, target: &Path) -> Result<()> {
        let (shares, at) = (self.0.shares.clone(), target.to_owned());
        let taken = blocking(move || {
            let taken = remote::all_mounted_at(&at)?;
            if !taken.is_empty() {
                shares.remote().unmount(&at, UNMOUNT)?;
            }
            Ok(taken)
        })
        .await?;
        if taken.is_empty() {
            // Somebody else may have taken it away, and what it was the last user of is not known any more.
            let (shares, images) = (self.0.shares.clone(), self.0.images.clone());
            self.0.shares.runtime().spawn(async move { release_unused(&shares, &images).await });
        }
        for found in taken {
            let released = match self.0.shares.release(found.device).await {
                Ok(()) => self.0.images.release_mounted(&found).await,
                failed => failed,
            };
            if let Err(error) = released {
                tracing::warn!(%error, "a share stays mounted that nobody uses");
            }
        }
        Ok(())
    }
}

/// Takes down the shares that are at no target, and begins to take down such images.
async fn release_unused(shares: &Arc<MountedShares>, images: &Arc<Images>) {
    if let Err(error) = shares.release_unused().await {
        tracing::warn!(%error, "a share stays mounted that nobody uses");
    }
    if let Err(error) = images.release_unused().await {
        tracing::warn!(%error, "an image stays claimed that nobody uses");
    }
}

impl NfsNode {
    /// What is wrong with a volume at a target, as far as can be seen there.
    async fn condition_at(&self, target: PathBuf) -> Result<Option<Condition>> {
        let shares = self.0.shares.clone();
        blocking(move || {
            let place = target.display();
            let unusable =
                |reason, message| Ok(Some(Condition { severity: Severity::Inaccessible, reason, message }));
            let Some(found) = remote::mounted_at(&target)? else {
                return unusable("NotMounted", format!("nothing is mounted at {place}; start the pod again"));
            };
            let source = &found.source;
            match shares.ask(&target, &found) {
                Answer::Well => Ok(None),
                Answer::None => unusable("ServerUnreachable", format!("{source} does not answer at {place}")),
                Answer::Stale => unusable(
                    "StaleHandle",
                    format!("the server no longer knows what of {source} is at {place}; start the pod again"),
                ),
                Answer::Error(why) => unusable("ShareUnusable", why),
            }
        })
        .await
    }
}

impl NodeHealth for NfsNode {
    async fn volume_health(
        &self,
        ctx: &Context,
        id: &VolumeId,
        _: Option<&Path>,
        targets: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        let seen = join_all(targets.iter().map(|target| self.condition_at(target.clone())));
        // A volume that somebody else named is known by where it is published alone.
        let is_ours = targets.is_empty() || VolumeRef::parse(id.as_str()).is_ok();
        let asked = async { if is_ours { self.0.controller.health(ctx, id).await } else { Ok(Vec::new()) } };
        let (seen, asked) = tokio::join!(seen, asked);
        let mut conditions = Vec::new();
        for condition in seen {
            conditions.extend(condition?);
        }
        conditions.extend(asked?);
        Ok(conditions)
    }

    async fn storage_health(&self, _: &Context) -> Result<Vec<Condition>> {
        self.0.controller.shares_health().await
    }
}

impl NodeExpansion for NfsNode {
    async fn expand_on_node(
        &self,
        _: &Context,
        _: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        self.0.images.grow(path, range).await
    }
}
