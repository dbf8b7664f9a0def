//! Inline volumes: made when their pod starts, removed when it ends, and unknown to the controller.

use std::{
    io,
    path::{Path, PathBuf},
};

use berth_core::VolumeId;
use berth_host::path::Dir;
use sha2::{Digest as _, Sha256};

use crate::{
    Context, Error, NewVolume, NodeVolume, Parameters, Result, Services,
    call::node::{self, inline_name},
    compose::{AnyProvisioner, Inline, Node, Origin},
    erased::DynInlineVolumes,
    locks::{Hold, Key},
    services::rules,
};

impl Services {
    /// Makes sure that the inline volume exists and is at the target; what fails halfway leaves no new volume.
    pub(super) async fn publish_inline(
        &self,
        ctx: &Context,
        node: &Node,
        (provisioner, finder): (&dyn AnyProvisioner, &dyn DynInlineVolumes),
        call: NodeVolume,
        target: PathBuf,
        inline: node::Inline,
    ) -> Result<()> {
        let _name = self.lock([(Key::VolumeName(inline.name.clone()), Hold::Exclusive)])?;
        rules::check_supported(provisioner.supports(), &call.capability)?;
        let existing = finder.find_inline(ctx, &inline.name).await?;
        let is_new = existing.is_none();
        let made = match existing {
            Some(volume) if volume.ephemeral => volume,
            Some(volume) => {
                let (name, id) = (&inline.name, volume.id);
                return Err(Error::Conflict(format!(
                    "{name:?} is the name of volume {id:?}, which is not inline"
                )));
            }
            None => {
                let new = NewVolume {
                    name: inline.name,
                    range: inline.range,
                    capabilities: vec![call.capability.clone()],
                    parameters: inline.parameters,
                    mutable: Parameters::new(),
                    ephemeral: true,
                };
                provisioner.check(ctx, &new)?;
                provisioner.ensure(ctx, &new, None, Box::pin(async { Ok(Origin::Nothing) })).await?.0
            }
        };
        let handle = call.id.clone();
        let volume = NodeVolume { id: made.id, context: made.context, staging: None, ..call };
        let published = self.publish_made(ctx, node, volume, &handle, target).await;
        if is_new && let Err(error) = published {
            if let Err(left) = self.remove_inline(ctx, node, &handle).await {
                tracing::warn!(volume.id = %handle, error = %left, "an inline volume stays until its pod is gone");
            }
            return Err(error);
        }
        published
    }

    async fn publish_made(
        &self,
        ctx: &Context,
        node: &Node,
        mut volume: NodeVolume,
        handle: &VolumeId,
        target: PathBuf,
    ) -> Result<()> {
        let _guard = self.lock_volume(&volume.id)?;
        node.sources.check(ctx, &volume).await?;
        if let Some(other) = self.ledger.published(&volume.id).iter().find(|other| other.target != target) {
            let target = other.target.display();
            return Err(Error::Precondition(format!("inline volume {handle:?} is published at {target}")));
        }
        if let Some(staging) = &node.parts.staging {
            let path = self.private_staging(handle);
            let made = path.clone();
            self.blocking(move |_| Ok(Dir::ensure(&made, 0o700).map(drop)?)).await?;
            volume.staging = Some(path.clone());
            self.stage(ctx, node, &**staging, &volume, path).await?;
        }
        self.publish(ctx, node, &volume, Some(handle.clone()), target).await
    }

    /// Removes the inline volume that Kubernetes calls `handle`, if there is one and no target has it any more.
    pub(super) async fn remove_inline(&self, ctx: &Context, node: &Node, handle: &VolumeId) -> Result<()> {
        let Inline::Made { provisioner, finder } = &node.inline else { return Ok(()) };
        let Some(name) = inline_name(handle) else { return Ok(()) };
        let Some(volume) = finder.find_inline(ctx, &name).await? else { return Ok(()) };
        if !volume.ephemeral || !self.ledger.published(&volume.id).is_empty() {
            return Ok(());
        }
        let _guard = self.lock_volume(&volume.id)?;
        if let Some(staging) = &node.parts.staging {
            let path = self.private_staging(handle);
            self.unstage(ctx, &**staging, &volume.id, &path).await?;
            self.blocking(move |_| remove_directory(&path)).await?;
        }
        match provisioner.delete(ctx, &volume.id).await {
            Err(Error::NotFound { what: "volume", .. }) => Ok(()),
            other => other,
        }
    }

    /// Where an inline volume is staged; its id is no file name, a digest of it is.
    fn private_staging(&self, handle: &VolumeId) -> PathBuf {
        let name = berth_core::hex(&Sha256::digest(handle.as_str())[..16]);
        self.config.state_dir.join("ephemeral").join(name)
    }
}

fn remove_directory(path: &Path) -> Result<()> {
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let doing = format!("remove the staging directory {}", path.display());
            Err(berth_host::Error::new(doing, error).into())
        }
        _ => Ok(()),
    }
}
