//! What staging and unstaging take.

use std::path::{Path, PathBuf};

use berth_core::{VolumeCapability, VolumeId};

use crate::{
    Driver,
    backend::{Error, Result, Volume},
    call::node::{Stage, Unstage},
    ledger::{Phase, Staged},
    services::rules,
};

impl Driver {
    /// Makes sure that the volume is staged at the path.
    pub(super) async fn ensure_staged(&self, call: Stage) -> Result<()> {
        let _guard = self.lock_volume(&call.id)?;
        let volume = self.volume(&call.id).await?;
        rules::check_outside(&self.config.private_dir, "staging_target_path", &call.staging)?;
        rules::check_mode(&call.capability, self.features)?;
        rules::check_kind(&volume, call.capability.access.kind())?;
        self.stage(&volume, call.staging, call.capability).await
    }

    /// Stages a locked volume.
    pub(super) async fn stage(
        &self,
        volume: &Volume,
        path: PathBuf,
        capability: VolumeCapability,
    ) -> Result<()> {
        let known = self.ledger.staged(&volume.id);
        let staged = Staged { volume: volume.id.clone(), path, capability, phase: Phase::Mounted };
        match known {
            Some(known) if known.path != staged.path => {
                let (id, path) = (&volume.id, known.path.display());
                return Err(Error::Precondition(format!(
                    "volume {id:?} is staged at {path}; unstage it there first"
                )));
            }
            Some(known) if known.phase == Phase::Mounted => {
                if known.capability != staged.capability {
                    let id = &volume.id;
                    return Err(Error::Conflict(format!(
                        "volume {id:?} is staged there with another capability"
                    )));
                }
                // Again, because what was staged may have been taken apart behind our back.
                return self.backend.stage(volume, &staged.path, &staged.capability).await;
            }
            Some(known) if known.phase == Phase::Remounting => return self.bring_up(volume, &known).await,
            _ => {}
        }
        self.note_staged(&staged, Phase::Mounting).await?;
        if let Err(error) = self.backend.stage(volume, &staged.path, &staged.capability).await {
            let id = volume.id.clone();
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

    /// Makes sure that the volume is not staged at the path.
    pub(super) async fn ensure_unstaged(&self, call: &Unstage) -> Result<()> {
        let _guard = self.lock_volume(&call.id)?;
        if let Some(published) = self.ledger.published(&call.id).first() {
            let (id, target) = (&call.id, published.target.display());
            return Err(Error::Precondition(format!("volume {id:?} is still published at {target}")));
        }
        self.unstage(&call.id, &call.staging).await
    }

    /// Unstages a locked volume that is published nowhere.
    pub(super) async fn unstage(&self, id: &VolumeId, path: &Path) -> Result<()> {
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
        self.backend.unstage(id, path).await?;
        let id = id.clone();
        self.blocking(move |ledger| ledger.forget_staged(&id)).await
    }
}
