//! Staging: a volume is prepared once per node, and noted before and after.

use std::path::{Path, PathBuf};

use berth_core::VolumeId;

use crate::{
    Context, Error, NodeVolume, Result, Services,
    compose::Node,
    erased::DynStaging,
    ledger::{Phase, Staged},
};

impl Services {
    /// Stages a locked volume.
    pub(super) async fn stage(
        &self,
        ctx: &Context,
        node: &Node,
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

    pub(super) async fn note_staged(&self, staged: &Staged, phase: Phase) -> Result<()> {
        let staged = Staged { phase, ..staged.clone() };
        self.blocking(move |ledger| ledger.note_staged(staged)).await
    }

    /// Unstages a locked volume that is published nowhere.
    pub(super) async fn unstage(
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
}
