//! Snapshots of several disks that are taken at one instant: the provider's snapshot-consistent groups.
//!
//! A group says which snapshots it has; their sizes, and whether they can be used, are in their own descriptions. A snapshot says by
//! its name, or its description, which group it belongs to.

use std::collections::BTreeMap;

use berth_core::{GroupSnapshotId, Name};

use super::{
    PROVIDER,
    account::{Account, By, timestamp},
    api::{EcsGroup, NewEcsGroup, Tags},
    names::{self, CREATED_BY},
    parameters::SnapshotClass,
    protocol::is_code,
    snapshots::{GENERATIONS, describe, is_cut, is_for_another},
};
use crate::{
    Context, Error, GroupSnapshot, GroupSnapshots, Parameters, Result, Volume,
    cloud::{Deadline, Pace, Refusal},
};

/// A group that was just taken is described within so many looks; one that is not was removed.
const LAG_LOOKS: u32 = 4;

impl GroupSnapshots for Account {
    async fn find_group(&self, ctx: &Context, name: &Name) -> Result<Option<GroupSnapshot>> {
        let until = Deadline::of(ctx);
        let found = self.api.groups(("Name", &names::api_name(name.as_str())), until).await?;
        // One that failed is passed over when the group is taken.
        let Some(found) = found.into_iter().find(|group| group.status != "failed") else { return Ok(None) };
        let completed = self.wait_for_group(&found.snapshot_group_id, &Tags::new(), until).await?;
        Ok(completed)
    }

    async fn take_group_snapshot(
        &self,
        ctx: &Context,
        name: &Name,
        sources: &[Volume],
        parameters: &Parameters,
    ) -> Result<GroupSnapshot> {
        let until = Deadline::of(ctx);
        let class = SnapshotClass::parse(parameters)?;
        if class.retention_days.is_some() {
            return Err(Error::invalid(
                "parameter \"retentionDays\" is not for groups, which are kept until they are removed",
            ));
        }
        let new = NewEcsGroup {
            disks: sources.iter().map(|source| source.id.to_string()).collect(),
            name: names::api_name(name.as_str()),
            resource_group: class.resource_group,
            tags: self.snapshot_tags(class.tags),
        };
        let mut pace = Pace::new();
        let mut generation = 0;
        while generation < GENERATIONS {
            let id = match self.api.create_group(&new, &names::token(&new.name, generation), until).await {
                Ok(id) => id,
                Err(failure) => {
                    let disks = new.disks.join(", ");
                    // The token may stand for a group of other disks that is gone.
                    generation += u32::from(is_for_another(failure, &disks, &mut pace, until).await?);
                    continue;
                }
            };
            match self.wait_for_group(&id, &new.tags, until).await? {
                Some(group) => return Ok(group),
                None => generation += 1,
            }
        }
        Err(Error::Unavailable(format!("too many groups named {name:?} were taken and failed or removed")))
    }

    async fn group(&self, ctx: &Context, id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        let until = Deadline::of(ctx);
        if !id.as_str().starts_with("ssg-") {
            return Ok(None);
        }
        let Some(found) = self.api.groups(("SnapshotGroupId.1", id.as_str()), until).await?.pop() else {
            return Ok(None);
        };
        let (group, is_complete) = self.members(&found, &Tags::new(), until).await?;
        if !is_complete && found.status == "progressing" {
            return Err(Error::Busy(format!("{PROVIDER} is still about to take group {id:?}")));
        }
        // One that failed has fewer members, and is removed with those.
        Ok(Some(group))
    }

    async fn delete_group(&self, ctx: &Context, id: &GroupSnapshotId) -> Result<()> {
        let until = Deadline::of(ctx);
        let mut pace = Pace::new();
        loop {
            match self.api.delete_group(id.as_str(), until).await {
                // A member is still being copied, or a disk is being made of it.
                Err(failure) if failure.means(Refusal::Busy) => {
                    if !pace.next(0, until).await {
                        return Err(failure.into());
                    }
                }
                deleted => return Ok(deleted?),
            }
        }
    }
}

impl Account {
    /// Waits until the content of all members is fixed, and puts these tags on them; `None` if the group was removed, or failed and
    /// is removed now.
    async fn wait_for_group(&self, id: &str, tags: &Tags, until: Deadline) -> Result<Option<GroupSnapshot>> {
        let mut pace = Pace::new();
        loop {
            match self.api.groups(("SnapshotGroupId.1", id), until).await?.pop() {
                Some(found) if found.status == "failed" => {
                    tracing::warn!(
                        group = id,
                        "{PROVIDER} could not take a group of snapshots; it is removed"
                    );
                    self.api.delete_group(id, until).await?;
                    return Ok(None);
                }
                Some(found) => {
                    let (group, is_complete) = self.members(&found, tags, until).await?;
                    if is_complete {
                        return Ok(Some(group));
                    }
                }
                // Descriptions lag behind.
                None if pace.looks() >= LAG_LOOKS => return Ok(None),
                None => {}
            }
            if !pace.next(0, until).await {
                return Err(Error::Busy(format!("{PROVIDER} is still about to take group {id:?}")));
            }
        }
    }

    /// A group with those of its members whose content is fixed, and whether these are all.
    async fn members(&self, found: &EcsGroup, tags: &Tags, until: Deadline) -> Result<(GroupSnapshot, bool)> {
        let ids = found.members();
        let described = ids.iter().map(|id| self.ecs_snapshot(By::Id((*id).to_owned()), until));
        let described = futures_util::future::try_join_all(described).await?;
        let described: Vec<_> = described.into_iter().flatten().filter(|member| is_cut(member)).collect();
        let mut is_complete = !ids.is_empty() && described.len() == ids.len();
        // Members have no tags of their own, and are listed by one.
        let untagged =
            described.iter().filter(|member| !tags.is_empty() && member.tag(CREATED_BY.0).is_none());
        let untagged: Vec<&str> = untagged.map(|member| member.snapshot_id.as_str()).collect();
        if is_complete && !untagged.is_empty() {
            match self.api.tag("snapshot", &untagged, tags, until).await {
                // A group that fails loses its members. It is described as failed by the next look.
                Err(failure) if is_code(&failure, &["InvalidResourceId.NotFound"]) => is_complete = false,
                tagged => tagged?,
            }
        }
        let id = &found.snapshot_group_id;
        let unreadable = |error| Error::Unavailable(format!("group {id:?} cannot be understood: {error}"));
        let group: GroupSnapshotId = id.parse().map_err(unreadable)?;
        let mut snapshots = BTreeMap::new();
        for member in &described {
            let mut snapshot = describe(member)?;
            snapshot.group = Some(group.clone());
            snapshots.insert(snapshot.id.clone(), snapshot);
        }
        let created = timestamp("group", id, &found.creation_time)?;
        let snapshots = snapshots.into_values().collect();
        Ok((GroupSnapshot { id: group, snapshots, created }, is_complete))
    }
}
