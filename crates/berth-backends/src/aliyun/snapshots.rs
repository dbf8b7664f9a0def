//! Snapshots of disks: their content is fixed at once, and copied afterwards.

use std::sync::Arc;

use berth_core::{Capacity, SnapshotId, VolumeId};
use tokio::time::Instant;

use super::{
    PROVIDER,
    account::{Account, By, created},
    api::{EcsSnapshot, NewEcsSnapshot, Tags},
    names::{self, CLONE_TAG, CLUSTER, CREATED_BY, FORCED_DELETE},
    parameters::SnapshotClass,
    protocol::{is_code, is_gone},
    volumes::Plan,
};
use crate::{
    Context, Error, NewSnapshot, Page, PageRequest, Result, Snapshot, Snapshots, Volume,
    cloud::{Deadline, Failure, GIB, Pace, Refusal, page_of},
};

/// How many removed snapshots of one name are passed over before one is not taken.
pub(super) const GENERATIONS: u32 = 8;

impl Snapshots for Account {
    async fn find_snapshot(&self, ctx: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        SnapshotClass::parse(&new.parameters)?;
        let name = names::api_name(new.name.as_str());
        let found = self.ecs_snapshot(By::Name(name), Deadline::of(ctx)).await?;
        found.filter(|found| is_cut(found)).map(|found| describe(&found)).transpose()
    }

    async fn take_snapshot(&self, ctx: &Context, new: NewSnapshot, source: &Volume) -> Result<Snapshot> {
        let class = SnapshotClass::parse(&new.parameters)?;
        let new = NewEcsSnapshot {
            disk: source.id.to_string(),
            name: names::api_name(new.name.as_str()),
            retention_days: class.retention_days,
            resource_group: class.resource_group,
            tags: self.snapshot_tags(class.tags),
        };
        describe(&*self.snapshot_now(&new, Deadline::of(ctx)).await?)
    }

    async fn snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        let found = self.ecs_snapshot(By::Id(id.to_string()), Deadline::of(ctx)).await?;
        let found = found.filter(|found| found.tag(CLONE_TAG).is_none() && is_cut(found));
        found.map(|found| describe(&found)).transpose()
    }

    async fn delete_snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<()> {
        let until = Deadline::of(ctx);
        if !id.as_str().starts_with("s-") {
            return Ok(());
        }
        let mut pace = Pace::new();
        loop {
            match self.api.delete_snapshot(id.as_str(), until).await {
                // It is still being copied, or a disk is being made of it.
                Err(failure) if failure.means(Refusal::Busy) => {
                    if !pace.next(0, until).await {
                        return Err(failure.into());
                    }
                }
                deleted => return Ok(deleted?),
            }
        }
    }

    async fn list_snapshots(
        &self,
        ctx: &Context,
        source: Option<&VolumeId>,
        page: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        let wanted = match source {
            Some(source) if source.as_str().starts_with("d-") => ("DiskId", source.as_str()),
            Some(_) => return Ok(Page { entries: Vec::new(), next: None }),
            None => ("Tag.1.Key", CREATED_BY.0),
        };
        let all = self.api.snapshots_with(wanted, Deadline::of(ctx)).await?;
        let of_cluster = |found: &EcsSnapshot| {
            source.is_some() || self.cluster.is_none() || found.tag(CLUSTER) == self.cluster.as_deref()
        };
        let is_meant =
            |found: &&EcsSnapshot| found.tag(CLONE_TAG).is_none() && is_cut(found) && of_cluster(found);
        let all = all.iter().filter(is_meant).map(describe).collect::<Result<_>>()?;
        page_of(all, page, |snapshot| snapshot.id.as_str())
    }

    async fn restore(&self, ctx: &Context, plan: Plan, snapshot: &Snapshot) -> Result<Volume> {
        let size = snapshot.size.bytes() / GIB;
        self.restore_of(&plan, snapshot.id.as_str(), size, Deadline::of(ctx)).await
    }
}

impl Account {
    /// The tags of a snapshot: upstream's, and these.
    pub(super) fn snapshot_tags(&self, mut tags: Tags) -> Tags {
        let cluster = self.cluster.iter().map(|id| (CLUSTER, id.as_str()));
        let own = [CREATED_BY, FORCED_DELETE].into_iter().chain(cluster);
        tags.extend(own.map(|(key, value)| (key.to_owned(), value.to_owned())));
        tags
    }

    /// Takes a snapshot, once, however often it is tried, and waits until its content is fixed.
    pub(super) async fn snapshot_now(
        &self,
        new: &NewEcsSnapshot,
        until: Deadline,
    ) -> Result<Arc<EcsSnapshot>> {
        let mut pace = Pace::new();
        let mut generation = 0;
        while generation < GENERATIONS {
            let token = names::token(&new.name, generation);
            let id = match self.api.create_snapshot(new, &token, until).await {
                Ok(id) => id,
                Err(failure) => {
                    if is_for_another(failure, &new.disk, &mut pace, until).await? {
                        let found = self.ecs_snapshot(By::Name(new.name.clone()), until).await?;
                        if found.is_some() {
                            // Whether it is what is asked for is looked at when the call is repeated.
                            return Err(Error::Busy(format!(
                                "a snapshot {:?} was taken meanwhile",
                                new.name
                            )));
                        }
                        generation += 1;
                    }
                    continue;
                }
            };
            match self.wait_until_cut(&id, new, until).await? {
                Some(snapshot) => return Ok(snapshot),
                None => generation += 1,
            }
        }
        Err(Error::Unavailable(format!("too many snapshots named {:?} were taken and removed", new.name)))
    }

    /// Waits until the content of a snapshot is fixed; `None` if its token gave one that was removed before.
    async fn wait_until_cut(
        &self,
        id: &str,
        new: &NewEcsSnapshot,
        until: Deadline,
    ) -> Result<Option<Arc<EcsSnapshot>>> {
        let mut pace = Pace::new();
        loop {
            match self.ecs_snapshot(By::Id(id.to_owned()), until).await? {
                Some(found) if is_cut(&found) => return Ok(Some(found)),
                Some(_) => {}
                // Descriptions lag behind. A tag can only be put on what is there.
                None => match self.api.tag("snapshot", &[id], &new.tags, until).await {
                    Err(failure) if is_gone(&failure) => return Ok(None),
                    tagged => tagged?,
                },
            }
            if !pace.next(0, until).await {
                return Err(Error::Busy(format!("{PROVIDER} is still about to take snapshot {id:?}")));
            }
        }
    }

    /// Waits until a disk can be made of a snapshot that exists only for that.
    pub(super) async fn wait_for_snapshot(&self, taken: &EcsSnapshot, until: Deadline) -> Result<()> {
        let id = taken.snapshot_id.as_str();
        let mut pace = Pace::new();
        let mut now = Arc::new(taken.clone());
        loop {
            self.cloning.lock().insert(id.to_owned(), Instant::now());
            if now.available {
                return Ok(());
            }
            if now.status == "failed" {
                return Err(Error::State(format!("{PROVIDER} could not take snapshot {id:?}")));
            }
            if !pace.next(0, until).await {
                return Err(Error::Busy(format!(
                    "snapshot {id:?}, which the clone is made of, is being copied"
                )));
            }
            let found = self.ecs_snapshot(By::Id(id.to_owned()), until).await?;
            now = found
                .ok_or_else(|| Error::Unavailable(format!("snapshot {id:?} is gone; it is taken anew")))?;
        }
    }
}

/// After a snapshot or group of these disks was not taken: whether its token stands for another one. If not, it can be tried again;
/// what cannot be is an error.
pub(super) async fn is_for_another(
    failure: Failure,
    disks: &str,
    pace: &mut Pace,
    until: Deadline,
) -> Result<bool> {
    if is_code(&failure, &["InvalidDiskId.NotFound"]) {
        return Err(Error::not_found("volume", disks));
    }
    if is_code(&failure, &["IdempotentParameterMismatch"]) {
        return Ok(true);
    }
    // A disk is still being made, or something else is done to it.
    if failure.means(Refusal::Busy) && pace.next(0, until).await {
        return Ok(false);
    }
    Err(failure.into())
}

/// Whether the content of a snapshot is fixed.
pub(super) fn is_cut(snapshot: &EcsSnapshot) -> bool {
    !snapshot.creation_time.is_empty()
}

pub(super) fn describe(snapshot: &EcsSnapshot) -> Result<Snapshot> {
    let unreadable = |error: &dyn std::fmt::Display| {
        Error::Unavailable(format!("snapshot {:?} cannot be understood: {error}", snapshot.snapshot_id))
    };
    if snapshot.status == "failed" {
        return Err(Error::State(format!("{PROVIDER} could not take snapshot {:?}", snapshot.snapshot_id)));
    }
    let size: u64 = snapshot.source_disk_size.parse().map_err(|error| unreadable(&error))?;
    Ok(Snapshot {
        id: snapshot.snapshot_id.parse().map_err(|error| unreadable(&error))?,
        source: snapshot.source_disk_id.parse().map_err(|error| unreadable(&error))?,
        size: Capacity::gibibytes(size),
        access: None,
        created: created(snapshot)?,
        ready: snapshot.available,
        group: snapshot.group().map(str::parse).transpose().map_err(|error| unreadable(&error))?,
        // It can be used in every zone of the region.
        topology: None,
    })
}
