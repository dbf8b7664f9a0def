//! Volumes: made, copied, found again, listed, grown, removed.

use std::{collections::BTreeMap, sync::Arc};

use berth_core::{Capacity, CapacityRange, Topology, VolumeId};

use super::{
    account::{Account, By, Goal, ObservedVolume, SIZES},
    api::{Do, DoVolume, NewDoVolume},
    names::{self, CREATED_BY, From, Origin},
};
use crate::{
    Attached, AvailableCapacity, CapacityInfo, Cloning, ContentSource, Context, Error, Expanded, Expansion,
    FromParameters as _, Listing, NewVolume, Page, PageRequest, Parameters, Placement, Result, Supports,
    TopologyRequirement, Volume, Volumes,
    cloud::{Deadline, Failure, GIB, is_final, page_of},
    image,
};

/// A volume to make.
#[derive(Debug)]
pub(super) struct Plan {
    name: String,
    range: CapacityRange,
    size: u64,
}

impl Volumes for Account {
    type Plan = Plan;

    fn supports(&self) -> Supports {
        Supports::filesystem().and_block()
    }

    fn plan(&self, _: &Context, new: &NewVolume) -> Result<Plan> {
        <()>::from_parameters(&new.parameters)?;
        image::filesystem_asked(&new.capabilities)?;
        let size = SIZES.choose(&new.range)?;
        Ok(Plan { name: names::api_name(new.name.as_str()), range: new.range, size })
    }

    fn agrees(&self, _: &Volume, _: &Parameters, (key, _): (&str, &str)) -> bool {
        // All that a volume's context may say is how a node treats it.
        super::NO_FORMAT.contains(&key)
    }

    async fn find(&self, ctx: &Context, plan: &Plan) -> Result<Option<Volume>> {
        let until = Deadline::of(ctx);
        let Some(found) = self.volume(By::Name(plan.name.clone()), until).await? else { return Ok(None) };
        let is_there = |error: Error| error.unfinished(&Error::State("the volume is there".to_owned()));
        let found = self.complete(&found, until).await.map_err(is_there)?;
        Ok(Some(self.describe(&found)?))
    }

    async fn create(&self, ctx: &Context, plan: Plan) -> Result<Volume> {
        let until = Deadline::of(ctx);
        let new = self.new_volume(&plan.name, CREATED_BY, plan.size, None);
        self.describe(&self.make(&new, until).await?)
    }

    async fn get(&self, ctx: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        let found = self.volume(By::Id(id.to_string()), Deadline::of(ctx)).await?;
        found.map(|found| self.describe(&found)).transpose()
    }

    async fn delete(&self, ctx: &Context, id: &VolumeId) -> Result<()> {
        let until = Deadline::of(ctx);
        let cloned_by = self.seen.lock().get(id.as_str()).and_then(|seen| seen.cloned_by.clone());
        match self.api.delete_volume(id.as_str(), until).await {
            Err(failure) if failure.status() == Some(409) => {
                return Err(Error::Precondition(format!("volume {id:?} is attached to a node: {failure}")));
            }
            deleted => deleted?,
        }
        if let Some(snapshot) = cloned_by {
            self.api.delete_snapshot(&snapshot, until).await?;
        }
        self.seen.lock().remove(id.as_str());
        Ok(())
    }
}

impl Placement for Account {
    async fn place(
        &self,
        _: &Context,
        _: &mut Plan,
        wanted: Option<&TopologyRequirement>,
    ) -> Result<Topology> {
        TopologyRequirement::check(wanted, Some(&self.topology))?;
        Ok(Topology::clone(&self.topology))
    }
}

impl Listing for Account {
    async fn list(&self, ctx: &Context, page: &PageRequest) -> Result<Page<Volume>> {
        let all = self.api.volumes(&self.region, Deadline::of(ctx)).await?;
        let all = all.iter().map(|volume| self.describe(volume)).collect::<Result<Vec<_>>>()?;
        page_of(all, page, |volume| volume.id.as_str())
    }
}

impl CapacityInfo for Account {
    async fn available_capacity(
        &self,
        ctx: &Context,
        _: &Parameters,
        topology: Option<&Topology>,
    ) -> Result<AvailableCapacity> {
        if topology.is_some_and(|wanted| !self.topology.satisfies(wanted)) {
            let available = Capacity::ZERO;
            return Ok(AvailableCapacity { available, largest_volume: None, smallest_volume: None });
        }
        let until = Deadline::of(ctx);
        // What an account may have is counted in volumes, each of any size.
        let available = match self.api.account(until).await?.volume_limit {
            0 => Capacity::MAX,
            limit => {
                let left = limit.saturating_sub(self.api.volume_count(until).await?);
                Capacity::new(left.saturating_mul(SIZES.most * GIB)).min(Capacity::MAX)
            }
        };
        let is_left = available > Capacity::ZERO;
        Ok(AvailableCapacity {
            available,
            largest_volume: Some(if is_left { Capacity::gibibytes(SIZES.most) } else { Capacity::ZERO }),
            smallest_volume: Some(Capacity::gibibytes(SIZES.least)),
        })
    }
}

impl Cloning for Account {
    async fn clone_volume(&self, ctx: &Context, plan: Plan, source: &Volume) -> Result<Volume> {
        let until = Deadline::of(ctx);
        let name = names::clone_name(&plan.name);
        let of = source.id.as_str();
        // An attempt that was cut off may have taken it.
        let taken =
            self.do_snapshot(By::Name(name.clone()), until).await?.filter(|taken| taken.resource_id == of);
        let snapshot = match taken {
            Some(taken) => taken.id.clone(),
            None => self.snapshot_now(of, &name, &[], until).await?.id.clone(),
        };
        let from = From::Volume { id: of.to_owned(), by: snapshot.clone() };
        let size = source.capacity.bytes() / GIB;
        match self.make_of(&plan, &snapshot, size, from, until).await {
            Err(error) if is_final(&error) => {
                // The caller will not ask again, so nothing may be left.
                Err(match self.api.delete_snapshot(&snapshot, until).await {
                    Ok(()) => error,
                    Err(left) => error.unfinished(&left.into()),
                })
            }
            Err(error) => Err(error),
            Ok(made) => self.describe(&made),
        }
    }
}

impl Expansion for Account {
    async fn expand(&self, ctx: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let until = Deadline::of(ctx);
        let now = volume.capacity.bytes() / GIB;
        let size = SIZES.grow(&range, now)?;
        if size > now {
            self.resize(volume.id.as_str(), size, until).await?;
        }
        // What is on it is grown on its node, which has nothing to do for a raw volume.
        Ok(Expanded { capacity: Capacity::gibibytes(size), node_expansion_required: true })
    }
}

impl Account {
    fn new_volume<'a>(
        &'a self,
        name: &'a str,
        description: &'a str,
        size: u64,
        snapshot: Option<&'a str>,
    ) -> NewDoVolume<'a> {
        NewDoVolume {
            region: &self.region,
            name,
            description,
            size_gigabytes: size,
            snapshot_id: snapshot,
            tags: &self.tags,
        }
    }

    /// Makes a volume, and looks for it where it is not clear whether it was made: names are unique.
    async fn make(&self, new: &NewDoVolume<'_>, until: Deadline) -> Result<DoVolume> {
        let failure = match self.api.create_volume(new, until).await {
            Ok(made) => return Ok(made),
            Err(failure) if failure.status() == Some(409) || matches!(failure, Failure::Unclear(_)) => {
                failure
            }
            Err(failure) => return Err(failure.into()),
        };
        let found = self.api.volumes_named(new.name, new.region, until).await?.pop();
        match (found, failure.status()) {
            // The answer was lost, the volume was not.
            (Some(found), None) if found.description == new.description => Ok(found),
            // Somebody else made it; whether it is what is asked for is looked at when the call is repeated.
            (Some(_), _) => Err(Error::Busy(format!("a volume {:?} was made meanwhile", new.name))),
            (None, _) => Err(Error::Unavailable(failure.to_string())),
        }
    }

    /// Makes a volume of a snapshot of `least` GiB.
    pub(super) async fn make_of(
        &self,
        plan: &Plan,
        snapshot: &str,
        least: u64,
        from: From,
        until: Deadline,
    ) -> Result<Arc<DoVolume>> {
        let size = SIZES.grow(&plan.range, plan.size.max(least))?;
        let description = Origin { from, size }.describe();
        let made = self.make(&self.new_volume(&plan.name, &description, size, Some(snapshot)), until).await?;
        match self.complete(&Arc::new(made.clone()), until).await {
            Err(error) if is_final(&error) => {
                // As in `clone_volume`.
                Err(match self.api.delete_volume(&made.id, until).await {
                    Ok(()) => error,
                    Err(left) => error.unfinished(&left.into()),
                })
            }
            completed => completed,
        }
    }

    /// Brings a volume that was copied to its size, and removes what it was cloned by; an attempt before may have been cut off.
    async fn complete(&self, volume: &Arc<DoVolume>, until: Deadline) -> Result<Arc<DoVolume>> {
        let Some(origin) = Origin::of(&volume.description) else { return Ok(volume.clone()) };
        let mut volume = volume.clone();
        if volume.size_gigabytes < origin.size {
            match self.resize(&volume.id, origin.size, until).await {
                // The volume is there, so nobody may be told that the attempt is over.
                Err(Error::State(why)) => return Err(Error::Unavailable(why)),
                resized => resized?,
            }
            volume = Arc::new(DoVolume { size_gigabytes: origin.size, ..DoVolume::clone(&volume) });
        }
        if let From::Volume { by, .. } = &origin.from {
            self.api.delete_snapshot(by, until).await?;
        }
        Ok(volume)
    }

    async fn resize(&self, id: &str, size: u64, until: Deadline) -> Result<()> {
        let what = Do::Resize { size_gigabytes: size, region: &self.region };
        let goal = Goal::Size(size);
        match self.act(id, &what, until).await {
            Ok(action) => self.settle(id, action, goal, until).await,
            Err(failure) => match self.volume(By::Id(id.to_owned()), until).await? {
                Some(found) if goal.shows_in(&found) => Ok(()),
                Some(_) => Err(failure.into()),
                None => Err(Error::not_found("volume", id)),
            },
        }
    }

    /// A volume in the words of the framework.
    pub(super) fn describe(&self, volume: &DoVolume) -> Result<Volume> {
        let id: VolumeId = volume.id.parse().map_err(|error| {
            Error::Unavailable(format!("DigitalOcean has a volume without an id: {error}"))
        })?;
        let origin = Origin::of(&volume.description).map(|origin| origin.from);
        let unreadable =
            |_| Error::Unavailable(format!("volume {id:?} has a description that cannot be understood"));
        let (source, cloned_by) = match origin {
            None => (None, None),
            Some(From::Snapshot(of)) => {
                (Some(ContentSource::Snapshot(of.parse().map_err(unreadable)?)), None)
            }
            Some(From::Volume { id: of, by }) => {
                (Some(ContentSource::Volume(of.parse().map_err(unreadable)?)), Some(by))
            }
        };
        let seen = ObservedVolume { name: volume.name.clone(), tags: volume.tags.clone(), cloned_by };
        self.seen.lock().insert(volume.id.clone(), seen);
        let attachments = volume.droplet_ids.iter().map(|droplet| {
            let node = droplet.to_string().parse().map_err(unreadable)?;
            Ok(Attached { node, read_only: false, mode: None })
        });
        let attachments = attachments.collect::<Result<_>>()?;
        Ok(Volume {
            access: None,
            context: BTreeMap::new(),
            source,
            topology: Some(self.topology.clone()),
            attachments,
            ..Volume::new(id, Capacity::gibibytes(volume.size_gigabytes))
        })
    }
}
