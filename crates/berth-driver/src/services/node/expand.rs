//! What growing a volume on its node takes.

use std::{path::PathBuf, sync::Arc};

use berth_core::{Capacity, VolumeId};
use berth_host::mount;
use rustix::io::Errno;

use crate::{
    Driver,
    backend::{Error, NodeExpansion, Publication, Result, Secrets, Volume},
    call::node::NodeExpand,
    ledger::{Phase, Published, Staged},
    services::rules,
    target,
};

impl Driver {
    /// Makes sure that what is on the volume has the volume's size.
    pub(super) async fn ensure_grown(&self, id: &VolumeId, call: &NodeExpand) -> Result<Capacity> {
        let _guard = self.lock_volume(id)?;
        let volume = self.known_here(id).await?;
        if let Some(capability) = &call.capability {
            rules::check_kind(&volume, capability.access.kind())?;
        }
        let staged = self.ledger.staged(id);
        let expansion = match &staged {
            // A remount that failed between unstaging and staging: this call comes to finish it.
            Some(staged) if staged.phase != Phase::Mounted => NodeExpansion::NeedsRemount,
            _ => {
                let at = staged.as_ref().map_or(call.path.as_path(), |staged| &staged.path);
                self.backend.expand_on_node(&volume, at, call.range).await?
            }
        };
        match (expansion, staged) {
            (NodeExpansion::Done(capacity), _) => Ok(capacity),
            (NodeExpansion::NeedsRemount, Some(staged)) => {
                self.remount(&volume, &staged).await?;
                Ok(volume.capacity)
            }
            (NodeExpansion::NeedsRemount, None) => Err(only_unmounted()),
        }
    }

    /// Takes the volume down on this node and brings it up again, which grows it; whoever uses it keeps it.
    async fn remount(&self, volume: &Volume, staged: &Staged) -> Result<()> {
        self.note_staged(staged, Phase::Remounting).await?;
        let published = self.ledger.published(&volume.id);
        let targets: Vec<PathBuf> = published.iter().map(|publication| publication.target.clone()).collect();
        if let Err(error) = self.blocking(move |_| unmount_all(&targets)).await {
            self.bind_all(volume, staged, &published).await?;
            self.note_staged(staged, Phase::Mounted).await?;
            return Err(error);
        }
        let unstaged = self.backend.unstage(&volume.id, &staged.path).await;
        // Whether or not it came down, it has to be up again afterwards.
        self.bring_up(volume, staged).await?;
        unstaged.map_err(in_use)
    }

    /// Stages the volume again and binds it wherever it was published.
    pub(super) async fn bring_up(&self, volume: &Volume, staged: &Staged) -> Result<()> {
        self.backend.stage(volume, &staged.path, &staged.capability).await?;
        self.bind_all(volume, staged, &self.ledger.published(&volume.id)).await?;
        self.note_staged(staged, Phase::Mounted).await
    }

    /// Binds the volume again wherever it was published and is not any more.
    async fn bind_all(&self, volume: &Volume, staged: &Staged, published: &[Published]) -> Result<()> {
        for publication in published.iter().filter(|publication| publication.phase == Phase::Mounted) {
            let (capability, read_only) = (&publication.capability, publication.read_only);
            let (staging, secrets) = (Some(staged.path.as_path()), &Secrets::default());
            let how = Publication { staging, capability, read_only, secrets };
            let source = self.backend.publish_source(volume, how).await?;
            let (publication, mounts) = (publication.clone(), Arc::clone(&self.mounts));
            self.blocking(move |_| {
                if mounts.is_bound(&publication.target)? {
                    return Ok(());
                }
                target::bind(&*mounts, &source, &publication.target, publication.look())
            })
            .await?;
        }
        Ok(())
    }
}

fn unmount_all(targets: &[PathBuf]) -> Result<()> {
    for target in targets {
        mount::unmount(target).map_err(|error| in_use(error.into()))?;
    }
    Ok(())
}

fn in_use(error: Error) -> Error {
    match error {
        Error::Host(host) if host.errno() == Some(Errno::BUSY.raw_os_error()) => only_unmounted(),
        other => other,
    }
}

fn only_unmounted() -> Error {
    Error::Precondition(
        "this machine can grow this filesystem only while it is not mounted, and it is in use; it will be grown when \
         it is staged next"
            .to_owned(),
    )
}
