//! Volumes on droplets. The provider does one thing at a time to a droplet, so there is a queue for each.

use std::{collections::BTreeMap, time::Duration};

use berth_core::{Backoff, NodeId, VolumeCapability, VolumeId};

use super::{
    account::{Account, By, Goal, ObservedVolume},
    api::{Action, Do, is_missing},
    name_key,
};
use crate::{
    Attachment, Context, Error, Result, Volume,
    cloud::{Deadline, Failure, Outcome, Refusal},
};

/// How many volumes a droplet takes by the provider's own rule, which it checks itself.
const PROVIDERS_LIMIT: usize = 15;
/// How often is asked again while something else is done to the droplet.
const BUSY: Backoff = Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(5) };

impl Attachment for Account {
    fn knows_attachments(&self) -> bool {
        // An attachment that is under way is not listed yet: whoever began it may have been killed.
        false
    }

    async fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        _: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        let until = Deadline::of(ctx);
        let id = volume.id.as_str();
        let no_node = || Error::not_found("node", node);
        let droplet: u64 = node.as_str().parse().map_err(|_| no_node())?;
        let seen = self.seen(id, until).await?;
        let told = BTreeMap::from([(name_key(&self.driver), seen.name)]);
        if volume.attachments.iter().any(|attached| attached.node == *node) {
            return Ok(told);
        }
        for tag in self.tags.iter().filter(|tag| !seen.tags.contains(tag)) {
            self.api.tag(tag, id, until).await?;
        }
        let _turn = self.queues.enter(node.as_str()).await;
        self.check_limit(id, droplet, until).await?;
        let what = Do::Attach { droplet_id: droplet, region: &self.region };
        match self.act(id, &what, until).await {
            Ok(action) => self.settle(id, action, Goal::Attached(droplet), until).await?,
            Err(failure) => self.explain_attach(id, droplet, failure, until).await?,
        }
        Ok(told)
    }

    async fn detach(&self, ctx: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        let until = Deadline::of(ctx);
        let nodes: Vec<u64> = if let Some(node) = node {
            // A node that is none has nothing.
            node.as_str().parse().into_iter().collect()
        } else {
            let volume = self.volume(By::Id(id.to_string()), until).await?;
            volume.map(|volume| volume.droplet_ids.clone()).unwrap_or_default()
        };
        for droplet in nodes {
            self.detach_from(id.as_str(), droplet, until).await?;
        }
        Ok(())
    }
}

impl Account {
    /// What the volume is called, which was seen when it was looked up for this call.
    async fn seen(&self, id: &str, until: Deadline) -> Result<ObservedVolume> {
        if let Some(seen) = self.seen.lock().get(id).cloned() {
            return Ok(seen);
        }
        let volume = self.volume(By::Id(id.to_owned()), until).await?;
        let volume = volume.ok_or_else(|| Error::not_found("volume", id))?;
        Ok(ObservedVolume { name: volume.name.clone(), tags: volume.tags.clone(), cloned_by: None })
    }

    /// Refuses a volume more than a droplet shall have. The provider keeps to its own limit; only for a smaller one the droplet is
    /// asked for.
    async fn check_limit(&self, id: &str, droplet: u64, until: Deadline) -> Result<()> {
        let limit = usize::try_from(self.volume_limit).unwrap_or(usize::MAX);
        if limit == 0 || limit >= PROVIDERS_LIMIT {
            return Ok(());
        }
        let found = self.droplet(droplet, until).await?;
        let found = found.ok_or_else(|| Error::not_found("node", droplet))?;
        let has = found.volume_ids.len();
        if has < limit || found.volume_ids.iter().any(|other| other == id) {
            return Ok(());
        }
        Err(Error::Exhausted(format!(
            "node \"{droplet}\" has {has} volumes, and shall have no more than {limit}"
        )))
    }

    async fn detach_from(&self, id: &str, droplet: u64, until: Deadline) -> Result<()> {
        let _turn = self.queues.enter(&droplet.to_string()).await;
        let what = Do::Detach { droplet_id: droplet, region: &self.region };
        let goal = Goal::Detached(droplet);
        match self.act(id, &what, until).await {
            Ok(action) => self.settle(id, action, goal, until).await,
            Err(failure) if is_missing(&failure) || failure.says("attachment not found") => Ok(()),
            Err(failure) => match self.volume(By::Id(id.to_owned()), until).await? {
                Some(found) if !goal.shows_in(&found) => Err(failure.into()),
                // It was done and the answer was lost, or there was nothing to do.
                _ => Ok(()),
            },
        }
    }

    /// Begins an action, and waits for whatever else is done to the droplet or the volume meanwhile.
    pub(super) async fn act(&self, id: &str, what: &Do<'_>, until: Deadline) -> Outcome<Option<Action>> {
        let mut attempt = 0;
        loop {
            match self.api.act(id, what, until).await {
                Err(failure) if failure.means(Refusal::Busy) => {
                    let pause = BUSY.pause(attempt);
                    if until.left(pause) < pause {
                        return Err(failure);
                    }
                    tokio::time::sleep(pause).await;
                    attempt += 1;
                }
                outcome => return outcome,
            }
        }
    }

    /// Why a volume could not be attached; nothing if it was, and only the answer was lost.
    async fn explain_attach(&self, id: &str, droplet: u64, failure: Failure, until: Deadline) -> Result<()> {
        let is_telling =
            is_missing(&failure) || failure.says("already attached") || failure.status().is_none();
        if !is_telling {
            return Err(failure.into());
        }
        let volume = self.volume(By::Id(id.to_owned()), until).await?;
        let volume = volume.ok_or_else(|| Error::not_found("volume", id))?;
        if volume.droplet_ids.contains(&droplet) {
            return Ok(());
        }
        if let Some(other) = volume.droplet_ids.first() {
            let sentence = format!("volume {id:?} is attached to node \"{other}\"; detach it there first");
            return Err(Error::Precondition(sentence));
        }
        if is_missing(&failure) {
            return Err(Error::not_found("node", droplet));
        }
        Err(failure.into())
    }
}
