//! What a killed driver left half done is undone before its successor takes calls.

use std::sync::Arc;

use crate::{
    Driver,
    backend::{Error, Mounts, Result, StagedVolume},
    ledger::{Ledger, Phase, Published, Staged},
    target,
};

impl Driver {
    /// Undoes what is half done, forgets what is gone, and lets the backend repair what is staged.
    ///
    /// What cannot be undone keeps its entry and is left to the calls that come; only the backend's word that it
    /// cannot work at all is an error.
    pub(in crate::services) async fn recover_node(&self) -> Result<()> {
        let (staged, published) = self.ledger.everything();
        for staged in staged.iter().filter(|staged| staged.phase == Phase::Remounting) {
            if let Err(error) = self.recover_remounting(staged).await {
                let path = staged.path.display();
                tracing::warn!(volume.id = %staged.volume, %path, %error, "a volume could not be mounted again");
            }
        }
        for publication in published {
            if let Err(error) = self.recover_published(&publication).await {
                let target = publication.target.display();
                tracing::warn!(volume.id = %publication.volume, %target, %error, "a publication stays half done");
            }
        }
        for staged in staged {
            if let Err(error) = self.recover_staged(&staged).await {
                let path = staged.path.display();
                tracing::warn!(volume.id = %staged.volume, %path, %error, "a staging stays half done");
            }
        }
        let (staged, _) = self.ledger.everything();
        let staged = staged.into_iter().filter(|staged| staged.phase == Phase::Mounted).map(|staged| {
            StagedVolume { id: staged.volume, staging: staged.path, capability: staged.capability }
        });
        self.backend.recover(staged.collect()).await
    }

    /// Takes down all that is published and staged here, as before a machine is switched off; gives how much that was.
    ///
    /// What a pod keeps in a volume of its own stays: the pod may come back.
    pub(in crate::services) async fn take_node_down(&self) -> Result<usize> {
        let (staged, published) = self.ledger.everything();
        let count = staged.len() + published.len();
        for publication in published {
            let (volume, target) = (publication.volume.clone(), publication.target.clone());
            let mounts = Arc::clone(&self.mounts);
            if let Err(error) = self.blocking(move |ledger| undo(ledger, &*mounts, &publication)).await {
                let target = target.display();
                tracing::warn!(volume.id = %volume, %target, %error, "a volume stays published");
            }
        }
        for staged in staged {
            if let Err(error) = self.unstage(&staged.volume, &staged.path).await {
                tracing::warn!(volume.id = %staged.volume, %error, "a volume stays staged");
            }
        }
        // Loop devices that are left go when their last user does.
        self.backend.recover(Vec::new()).await?;
        Ok(count)
    }

    /// Brings up again what was taken down only to grow.
    async fn recover_remounting(&self, staged: &Staged) -> Result<()> {
        match self.backend.volume(&staged.volume).await? {
            Some(volume) => self.bring_up(&volume, staged).await,
            None => Ok(()),
        }
    }

    async fn recover_published(&self, publication: &Published) -> Result<()> {
        let (known, mounts) = (publication.clone(), Arc::clone(&self.mounts));
        let staged = self.ledger.staged(&publication.volume);
        if staged.is_some_and(|staged| staged.phase == Phase::Remounting) {
            // Still to be brought up, by the next call that grows or stages it.
            return Ok(());
        }
        if publication.phase == Phase::Mounted {
            return self.blocking(move |ledger| forget_unless_bound(ledger, &*mounts, &known)).await;
        }
        self.blocking(move |ledger| undo(ledger, &*mounts, &known)).await?;
        match &publication.handle {
            Some(handle) => self.remove_inline(handle).await,
            None => Ok(()),
        }
    }

    async fn recover_staged(&self, staged: &Staged) -> Result<()> {
        let is_gone = self.backend.volume(&staged.volume).await?.is_none();
        let phase = self.ledger.staged(&staged.volume).map(|staged| staged.phase);
        if matches!(phase, Some(Phase::Mounted | Phase::Remounting)) && !is_gone {
            return Ok(());
        }
        if is_gone {
            for publication in self.ledger.published(&staged.volume) {
                let mounts = Arc::clone(&self.mounts);
                self.blocking(move |ledger| undo(ledger, &*mounts, &publication)).await?;
            }
        }
        if let Some(publication) = self.ledger.published(&staged.volume).first() {
            let target = publication.target.display();
            return Err(Error::Precondition(format!("it is still published at {target}")));
        }
        self.unstage(&staged.volume, &staged.path).await
    }
}

fn forget_unless_bound(ledger: &Ledger, mounts: &dyn Mounts, publication: &Published) -> Result<()> {
    if mounts.is_bound(&publication.target)? {
        return Ok(());
    }
    let target = publication.target.display();
    tracing::info!(volume.id = %publication.volume, %target, "the volume is no longer mounted here");
    ledger.forget_published(&publication.target)
}

/// Takes the mount away; whatever else is found at the target stays, and is no longer ours.
fn undo(ledger: &Ledger, mounts: &dyn Mounts, publication: &Published) -> Result<()> {
    match target::remove(mounts, &publication.target) {
        Ok(()) => {}
        Err(Error::Precondition(why)) => tracing::warn!(volume.id = %publication.volume, "{why}"),
        Err(error) => return Err(error),
    }
    ledger.forget_published(&publication.target)
}
