//! What a killed driver left half done is undone before its successor takes calls.

use super::expand::again;
use crate::{
    Context, Error, Result, Services, StagedVolume,
    compose::Node,
    erased::DynStaging,
    ledger::{Phase, Published, Staged},
};

impl Services {
    /// Undoes what is half done, forgets what is gone, and lets the backend repair what is staged.
    ///
    /// What cannot be undone keeps its entry and is left to the calls that come; only the backend's word that it
    /// cannot work at all is an error.
    pub(in crate::services) async fn recover_node(&self, node: &Node) -> Result<()> {
        let ctx = &Context::default();
        let (staged, published) = self.ledger.everything();
        let staging = node.parts.staging.as_deref();
        for staged in staged.iter().filter(|staged| staged.phase == Phase::Remounting) {
            if let Some(staging) = staging
                && let Err(error) = self.recover_remounting(ctx, node, staging, staged).await
            {
                let path = staged.path.display();
                tracing::warn!(volume.id = %staged.volume, %path, %error, "a volume could not be mounted again");
            }
        }
        for publication in published {
            if let Err(error) = self.recover_published(ctx, node, &publication).await {
                let target = publication.target.display();
                tracing::warn!(volume.id = %publication.volume, %target, %error, "a publication stays half done");
            }
        }
        let Some(staging) = staging else { return Ok(()) };
        for staged in staged {
            if let Err(error) = self.recover_staged(ctx, node, staging, &staged).await {
                let path = staged.path.display();
                tracing::warn!(volume.id = %staged.volume, %path, %error, "a staging stays half done");
            }
        }
        let (staged, _) = self.ledger.everything();
        let staged = staged.into_iter().filter(|staged| staged.phase == Phase::Mounted).map(|staged| {
            StagedVolume { id: staged.volume, staging: staged.path, capability: staged.capability }
        });
        staging.recover(staged.collect()).await
    }

    /// Takes down all that is published and staged here, as before a machine is switched off; gives how much that was.
    ///
    /// What a pod keeps in a volume of its own stays: the pod may come back.
    pub(in crate::services) async fn take_node_down(&self, node: &Node) -> Result<usize> {
        let ctx = &Context::default();
        let (staged, published) = self.ledger.everything();
        let count = staged.len() + published.len();
        for publication in published {
            if let Err(error) = self.undo(node, &publication).await {
                let target = publication.target.display();
                tracing::warn!(volume.id = %publication.volume, %target, %error, "a volume stays published");
            }
        }
        let Some(staging) = node.parts.staging.as_deref() else { return Ok(count) };
        for staged in staged {
            if let Err(error) = self.unstage(ctx, staging, &staged.volume, &staged.path).await {
                tracing::warn!(volume.id = %staged.volume, %error, "a volume stays staged");
            }
        }
        // Loop devices that are left go when their last user does.
        staging.recover(Vec::new()).await?;
        Ok(count)
    }

    /// Whether the volume that was staged no longer exists, as far as the node can know.
    async fn is_gone(&self, ctx: &Context, node: &Node, staged: &Staged) -> Result<bool> {
        let volume = again(&staged.volume, &staged.capability, false, Some(staged));
        match node.sources.check(ctx, &volume).await {
            Ok(()) => Ok(false),
            Err(Error::NotFound { .. }) => Ok(true),
            Err(other) => Err(other),
        }
    }

    /// Brings up again what was taken down only to grow.
    async fn recover_remounting(
        &self,
        ctx: &Context,
        node: &Node,
        staging: &dyn DynStaging,
        staged: &Staged,
    ) -> Result<()> {
        if self.is_gone(ctx, node, staged).await? {
            return Ok(());
        }
        self.bring_up(ctx, node, staging, staged).await
    }

    async fn recover_published(&self, ctx: &Context, node: &Node, publication: &Published) -> Result<()> {
        let staged = self.ledger.staged(&publication.volume);
        if staged.is_some_and(|staged| staged.phase == Phase::Remounting) {
            // Still to be brought up, by the next call that grows or stages it.
            return Ok(());
        }
        if publication.phase == Phase::Mounted {
            if node.mounts.is_mounted(&publication.target).await? {
                return Ok(());
            }
            let target = publication.target.display();
            tracing::info!(volume.id = %publication.volume, %target, "the volume is no longer mounted here");
            return self.forget(publication).await;
        }
        self.undo(node, publication).await?;
        match &publication.handle {
            Some(handle) => self.remove_inline(ctx, node, handle).await,
            None => Ok(()),
        }
    }

    async fn recover_staged(
        &self,
        ctx: &Context,
        node: &Node,
        staging: &dyn DynStaging,
        staged: &Staged,
    ) -> Result<()> {
        let is_gone = self.is_gone(ctx, node, staged).await?;
        let phase = self.ledger.staged(&staged.volume).map(|staged| staged.phase);
        if matches!(phase, Some(Phase::Mounted | Phase::Remounting)) && !is_gone {
            return Ok(());
        }
        if is_gone {
            for publication in self.ledger.published(&staged.volume) {
                self.undo(node, &publication).await?;
            }
        }
        if let Some(publication) = self.ledger.published(&staged.volume).first() {
            let target = publication.target.display();
            return Err(Error::Precondition(format!("it is still published at {target}")));
        }
        self.unstage(ctx, staging, &staged.volume, &staged.path).await
    }

    /// Takes the mount away; whatever else is found at the target stays, and is no longer ours.
    async fn undo(&self, node: &Node, publication: &Published) -> Result<()> {
        match self.clear_target(&*node.mounts, &publication.target).await {
            Err(Error::Precondition(why)) => tracing::warn!(volume.id = %publication.volume, "{why}"),
            cleared => return cleared,
        }
        self.forget(publication).await
    }

    async fn forget(&self, publication: &Published) -> Result<()> {
        let target = publication.target.clone();
        self.blocking(move |ledger| ledger.forget_published(&target)).await
    }
}
