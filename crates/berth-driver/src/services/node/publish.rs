//! What publishing and unpublishing take.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use berth_core::{AccessMode, VolumeId};

use crate::{
    Driver, Feature,
    backend::{Error, Mounts, Publication, Result, Secrets, Volume},
    call::node::{Publish, Unpublish},
    ledger::{Ledger, Phase, Published},
    services::rules,
    target::{self, Look},
};

impl Published {
    /// How the volume looks at its target.
    pub(super) fn look(&self) -> Look<'_> {
        Look { capability: &self.capability, read_only: self.read_only }
    }
}

impl Driver {
    /// Makes sure that the volume is at the target.
    pub(super) async fn ensure_published(&self, call: Publish) -> Result<()> {
        let _guard = self.lock_volume(&call.id)?;
        rules::check_outside(&self.config.private_dir, "target_path", &call.target)?;
        rules::check_mode(&call.capability, self.features)?;
        if let Some(inline) = call.inline.clone().filter(|_| self.makes_inline()) {
            return self.publish_inline(call, inline).await;
        }
        let volume = self.backend.volume_on_node(&call.id, &call.context).await?;
        let volume = volume.ok_or_else(|| Error::no_volume(&call.id))?;
        rules::check_kind(&volume, call.capability.access.kind())?;
        let staging = self.staging_of(&call.id, call.staging)?;
        let wanted = Published {
            volume: call.id,
            handle: None,
            target: call.target,
            capability: call.capability,
            read_only: call.read_only,
            phase: Phase::Mounted,
        };
        self.publish(&volume, staging.as_deref(), wanted, &call.secrets).await
    }

    /// Whether an inline volume is made when its pod starts, and removed when it ends.
    fn makes_inline(&self) -> bool {
        !self.features.has(Feature::InlineByReference)
    }

    /// Where the volume is staged, which has to be where the caller says it is.
    fn staging_of(&self, id: &VolumeId, given: Option<PathBuf>) -> Result<Option<PathBuf>> {
        if !self.features.has(Feature::Stage) {
            return Ok(None);
        }
        let given = given.ok_or_else(|| {
            Error::Precondition(
                "staging_target_path is missing; the volume has to be staged first".to_owned(),
            )
        })?;
        match self.ledger.staged(id) {
            Some(staged) if staged.phase == Phase::Mounted && staged.path == given => Ok(Some(given)),
            _ => Err(Error::Precondition(format!("volume {id:?} is not staged at {}", given.display()))),
        }
    }

    /// Publishes a locked volume.
    pub(super) async fn publish(
        &self,
        volume: &Volume,
        staging: Option<&Path>,
        wanted: Published,
        secrets: &Secrets,
    ) -> Result<()> {
        self.check_target(&wanted)?;
        let (capability, read_only) = (&wanted.capability, wanted.read_only);
        let how = Publication { staging, capability, read_only, secrets };
        let source = self.backend.publish_source(volume, how).await?;
        let mounts = Arc::clone(&self.mounts);
        self.blocking(move |ledger| {
            let bound = bind(ledger, &*mounts, &source, &wanted);
            if bound.is_err() {
                mounts.let_go(&source);
            }
            bound
        })
        .await
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

    /// Makes sure that the volume is not at the target.
    pub(super) async fn ensure_unpublished(&self, call: Unpublish) -> Result<()> {
        let _guard = self.lock_volume(&call.id)?;
        let known = self.ledger.published_at(&call.target);
        if known.as_ref().is_some_and(|known| !known.is(&call.id)) {
            // Another volume's target: this one is not there.
            return Ok(());
        }
        let may_be_inline = self.makes_inline() && known.as_ref().is_none_or(|known| known.handle.is_some());
        let mounts = Arc::clone(&self.mounts);
        self.blocking(move |ledger| unbind(ledger, &*mounts, known, &call.target)).await?;
        if may_be_inline { self.remove_inline(&call.id).await } else { Ok(()) }
    }
}

/// Puts the volume at its target, and says so before and after.
fn bind(ledger: &Ledger, mounts: &dyn Mounts, source: &Path, wanted: &Published) -> Result<()> {
    if let Some(known) = ledger.published_at(&wanted.target) {
        if known.phase == Phase::Mounted && mounts.is_bound(&wanted.target)? {
            return Ok(());
        }
        // An attempt that did not come to its end, or a mount that somebody took away.
        target::remove(mounts, &wanted.target)?;
        ledger.forget_published(&wanted.target)?;
    }
    target::check(mounts, &wanted.target, wanted.capability.access.kind())?;
    ledger.note_published(Published { phase: Phase::Mounting, ..wanted.clone() })?;
    let bound = target::bind(mounts, source, &wanted.target, wanted.look());
    if let Err(error) = bound.and_then(|()| ledger.note_published(wanted.clone())) {
        // What cannot be undone now keeps its entry, and is undone by the next call or at the next start.
        let _ = target::remove(mounts, &wanted.target).and_then(|()| ledger.forget_published(&wanted.target));
        return Err(error);
    }
    Ok(())
}

/// Takes the volume away from its target, and says so before and after.
///
/// A target that is not known is cleared as well: it may be from before a reboot or a loss of records, and an OK for
/// a target that still has something mounted would let the caller delete what is there.
fn unbind(ledger: &Ledger, mounts: &dyn Mounts, known: Option<Published>, at: &Path) -> Result<()> {
    if let Some(known) = known
        && let Err(error) = ledger.note_published(Published { phase: Phase::Unmounting, ..known })
    {
        // Only speeds up a restart; a full disk must not keep a pod from ending.
        tracing::warn!(target.path = %at.display(), %error, "unpublishing without a record of it");
    }
    target::remove(mounts, at)?;
    ledger.forget_published(at)
}
