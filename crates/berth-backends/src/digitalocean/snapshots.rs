//! Snapshots of volumes, which are ready as soon as they are there.

use std::sync::Arc;

use berth_core::{Capacity, SnapshotId, VolumeId};

use super::{
    account::{Account, By, created},
    api::{DoSnapshot, is_missing},
    names::{self, CLONE_PREFIX, From},
    volumes::Plan,
};
use crate::{
    Context, Error, FromParameters as _, NewSnapshot, Page, PageRequest, Result, Snapshot, Snapshots, Volume,
    cloud::{Deadline, Failure, GIB, page_of},
};

impl Snapshots for Account {
    async fn find_snapshot(&self, ctx: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        <()>::from_parameters(&new.parameters)?;
        let name = names::api_name(new.name.as_str());
        let found = self.do_snapshot(By::Name(name), Deadline::of(ctx)).await?;
        found.map(|found| self.describe_snapshot(&found)).transpose()
    }

    async fn take_snapshot(&self, ctx: &Context, new: NewSnapshot, source: &Volume) -> Result<Snapshot> {
        let name = names::api_name(new.name.as_str());
        let taken = self.snapshot_now(source.id.as_str(), &name, &self.tags, Deadline::of(ctx)).await?;
        self.describe_snapshot(&taken)
    }

    async fn snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        let found = self.do_snapshot(By::Id(id.to_string()), Deadline::of(ctx)).await?;
        found.filter(|found| self.is_ours(found)).map(|found| self.describe_snapshot(&found)).transpose()
    }

    async fn delete_snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<()> {
        Ok(self.api.delete_snapshot(id.as_str(), Deadline::of(ctx)).await?)
    }

    async fn list_snapshots(
        &self,
        ctx: &Context,
        source: Option<&VolumeId>,
        page: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        let all = self.api.snapshots(Deadline::of(ctx)).await?;
        let is_meant = |found: &&DoSnapshot| {
            self.is_ours(found) && source.is_none_or(|source| found.resource_id == source.as_str())
        };
        let all = all.iter().filter(is_meant).map(|found| self.describe_snapshot(found));
        page_of(all.collect::<Result<_>>()?, page, |snapshot| snapshot.id.as_str())
    }

    async fn restore(&self, ctx: &Context, plan: Plan, snapshot: &Snapshot) -> Result<Volume> {
        let until = Deadline::of(ctx);
        let id = snapshot.id.as_str();
        let from = From::Snapshot(id.to_owned());
        let made = self.make_of(&plan, id, snapshot.size.bytes() / GIB, from, until).await?;
        self.describe(&made)
    }
}

impl Account {
    /// Takes a snapshot, and looks for it where it is not clear whether it was taken.
    pub(super) async fn snapshot_now(
        &self,
        volume: &str,
        name: &str,
        tags: &[String],
        until: Deadline,
    ) -> Result<Arc<DoSnapshot>> {
        let failure = match self.api.create_snapshot(volume, name, tags, until).await {
            Ok(taken) => return Ok(Arc::new(taken)),
            Err(failure) if is_missing(&failure) => return Err(Error::not_found("volume", volume)),
            Err(failure) if failure.status() == Some(409) || matches!(failure, Failure::Unclear(_)) => {
                failure
            }
            Err(failure) => return Err(failure.into()),
        };
        let found = self.do_snapshot(By::Name(name.to_owned()), until).await?;
        match found {
            Some(found) if found.resource_id == volume => Ok(found),
            Some(found) => {
                let other = &found.resource_id;
                Err(Error::Conflict(format!("there is a snapshot {name:?} already, of volume {other:?}")))
            }
            None => Err(Error::Unavailable(failure.to_string())),
        }
    }

    /// Whether a snapshot is in this region, and not one that exists only while a volume is cloned.
    fn is_ours(&self, snapshot: &DoSnapshot) -> bool {
        !snapshot.name.starts_with(CLONE_PREFIX) && snapshot.regions.contains(&self.region)
    }

    fn describe_snapshot(&self, snapshot: &DoSnapshot) -> Result<Snapshot> {
        let unreadable =
            |error| Error::Unavailable(format!("DigitalOcean's snapshot {:?}: {error}", snapshot.id));
        Ok(Snapshot {
            id: snapshot.id.parse().map_err(unreadable)?,
            source: snapshot.resource_id.parse().map_err(unreadable)?,
            size: Capacity::gibibytes(snapshot.min_disk_size),
            access: None,
            created: created(snapshot)?,
            ready: true,
            group: None,
            topology: Some(self.topology.clone()),
        })
    }
}
