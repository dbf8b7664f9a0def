//! Volumes: made, copied, found again, listed, grown, removed.

use std::{collections::BTreeMap, sync::Arc};

use berth_core::{Capacity, CapacityRange, Topology, VolumeId, names::CREATED_FOR_PREFIX};

use super::{
    account::{Account, By, Progress},
    api::{Disk, NewDisk, NewEcsSnapshot, Tags},
    names::{self, CLONE_TAG, CLUSTER, CREATED_BY, OF_KUBERNETES, VOLUME_NAME},
    parameters::{self, Attempt, Class},
    protocol::{is_code, is_gone},
};
use crate::{
    Attached, AvailableCapacity, CapacityInfo, Cloning, ContentSource, Context, Error, Expanded, Expansion,
    Listing, NewVolume, Page, PageRequest, Parameters, Placement, Result, Supports, TopologyRequirement,
    Volume, Volumes,
    cloud::{Deadline, Failure, GIB, Pace, Refusal, is_final, page_of},
    image,
};

/// How many removed disks of one name are passed over before a creation gives up.
const GENERATIONS: u32 = 8;
/// What in a volume's context says of which category and level its disk is, as upstream's driver writes it.
const TYPE: &str = "type";
const LEVEL: &str = "performanceLevel";

/// A volume to make.
#[derive(Debug)]
pub(super) struct Plan {
    name: String,
    range: CapacityRange,
    class: Class,
    parameters: Arc<Parameters>,
    /// The tags of the claim that it is for.
    tags: Tags,
    zone: Option<String>,
}

/// Where a volume's content comes from.
#[derive(Debug, Clone, Copy)]
struct Origin<'a> {
    snapshot: &'a str,
    /// The disk that is cloned by that snapshot.
    clone_of: Option<&'a str>,
    /// The size of the snapshot in GiB.
    size: u64,
}

impl Volumes for Account {
    type Plan = Plan;

    fn supports(&self) -> Supports {
        Supports::filesystem().and_block().on_many_nodes()
    }

    fn plan(&self, ctx: &Context, new: &NewVolume) -> Result<Plan> {
        let class = Class::parse(&new.parameters, &new.mutable)?;
        image::filesystem_asked(&new.capabilities)?;
        parameters::check_access(&new.capabilities, class.multi_attach)?;
        if let Some(other) = class.region.as_ref().filter(|region| **region != self.region) {
            return Err(Error::Invalid(format!(
                "parameter \"regionId\": {other:?} is not the region of this driver, which is {:?}",
                self.region
            )));
        }
        class.attempts(&new.range, 0)?;
        let mut tags = class.tags.clone();
        if let Some(claim) = ctx.claim() {
            for (key, value) in
                [("pvc/name", &claim.name), ("pvc/namespace", &claim.namespace), ("pv/name", &claim.volume)]
            {
                if !value.is_empty() {
                    tags.insert(format!("{CREATED_FOR_PREFIX}{key}"), value.clone());
                }
            }
        }
        let (name, parameters) = (new.name.to_string(), Arc::new(new.parameters.clone()));
        Ok(Plan { name, range: new.range, class, parameters, tags, zone: None })
    }

    fn agrees(&self, volume: &Volume, _: &Parameters, (key, value): (&str, &str)) -> bool {
        // The disk says of which category it is; of the rest only that it is one of the keys that there are.
        match key {
            TYPE => value == "available" || volume.context.get(TYPE).is_some_and(|own| contains(value, own)),
            LEVEL => volume.context.get(LEVEL).is_none_or(|own| contains(value, own)),
            _ => parameters::is_parameter(key, value),
        }
    }

    async fn find(&self, ctx: &Context, plan: &Plan) -> Result<Option<Volume>> {
        let until = Deadline::of(ctx);
        let Some(found) = self.disk(By::Name(plan.name.clone()), until).await? else { return Ok(None) };
        if let Some(what) = plan.class.difference(&found) {
            let name = &plan.name;
            return Err(Error::Conflict(format!("there is a volume named {name:?} already, but {what}")));
        }
        self.complete(&found, until).await?;
        let mut volume = self.describe(&found)?;
        volume.parameters = plan.parameters.clone();
        Ok(Some(volume))
    }

    async fn create(&self, ctx: &Context, plan: Plan) -> Result<Volume> {
        self.describe(&*self.make(&plan, None, Deadline::of(ctx)).await?)
    }

    async fn get(&self, ctx: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        let found = self.disk(By::Id(id.to_string()), Deadline::of(ctx)).await?;
        found.map(|found| self.describe(&found)).transpose()
    }

    async fn delete(&self, ctx: &Context, id: &VolumeId) -> Result<()> {
        let until = Deadline::of(ctx);
        if !id.as_str().starts_with("d-") {
            return Ok(());
        }
        let seen = self.last_seen(id.as_str());
        let mut pace = Pace::new();
        loop {
            let failure = match self.api.delete_disk(id.as_str(), until).await {
                Err(failure) if failure.means(Refusal::Busy) => failure,
                deleted => break deleted?,
            };
            // It is attached, or it is still being made or filled.
            let Some(disk) = self.disk(By::Id(id.to_string()), until).await? else { break };
            if let Some(instance) = disk.instances().first() {
                return Err(Error::Precondition(format!("volume {id:?} is attached to node {instance:?}")));
            }
            if !pace.next(0, until).await {
                return Err(failure.into());
            }
        }
        if let Some(seen) = seen {
            self.remove_clone_snapshot(&seen, until).await?;
        }
        self.removed(id.as_str());
        Ok(())
    }
}

impl Placement for Account {
    fn canonical(&self, topology: Topology) -> Topology {
        self.keys.canonical(topology, &self.region)
    }

    async fn place(
        &self,
        _: &Context,
        plan: &mut Plan,
        wanted: Option<&TopologyRequirement>,
    ) -> Result<Topology> {
        let region = Topology::single(self.keys.region, &self.region);
        let all = wanted.iter().flat_map(|wanted| wanted.preferred.iter().chain(&wanted.requisite));
        let here: Vec<&Topology> =
            all.filter(|one| one.0.get(self.keys.region) == Some(&self.region)).collect();
        let nowhere = |why: &str| {
            let wanted = wanted.map_or_else(String::new, |wanted| format!(" at {wanted}"));
            Error::Exhausted(format!("no disk can be made{wanted}: {why}"))
        };
        if wanted.is_some() && here.is_empty() {
            return Err(nowhere(&format!("this driver makes disks in the region {:?}", self.region)));
        }
        if plan.class.is_regional() {
            return Ok(region);
        }
        let is_asked = |zone: &&String| plan.class.zones.as_ref().is_none_or(|zones| zones.contains(zone));
        let named = here.iter().filter_map(|one| one.0.get(self.keys.zone)).find(is_asked);
        let is_anywhere = here.iter().all(|one| !one.0.contains_key(self.keys.zone));
        let zone = match (named, &plan.class.zones) {
            (Some(zone), _) => zone.clone(),
            (None, Some(zones)) if is_anywhere => {
                zones.first().cloned().ok_or_else(|| Error::invalid("parameter \"zoneId\" names no zone"))?
            }
            (None, Some(zones)) => {
                return Err(nowhere(&format!("parameter \"zoneId\" allows {}", zones.join(", "))));
            }
            (None, None) => self.zone.clone().ok_or_else(|| {
                nowhere("no zone is asked for; name one by parameter \"zoneId\" or by the topology of a node")
            })?,
        };
        plan.zone = Some(zone.clone());
        Ok(Topology::single(self.keys.zone, zone))
    }
}

impl Listing for Account {
    async fn list(&self, ctx: &Context, page: &PageRequest) -> Result<Page<Volume>> {
        let all = self.api.data_disks(Deadline::of(ctx)).await?;
        let all = all.iter().map(|disk| self.describe(disk)).collect::<Result<Vec<_>>>()?;
        page_of(all, page, |volume| volume.id.as_str())
    }
}

impl CapacityInfo for Account {
    async fn available_capacity(
        &self,
        ctx: &Context,
        parameters: &Parameters,
        topology: Option<&Topology>,
    ) -> Result<AvailableCapacity> {
        let class = Class::parse(parameters, &Parameters::new())?;
        let value = |key: &str| topology.and_then(|topology| topology.0.get(key));
        let of_zone = |zone: &str| {
            zone.is_empty()
                || (value(self.keys.zone).is_none_or(|wanted| wanted == zone)
                    && class.zones.as_ref().is_none_or(|zones| zones.iter().any(|own| own == zone)))
        };
        let is_here = value(self.keys.region).is_none_or(|region| *region == self.region);
        let quotas = if is_here { self.api.quotas(Deadline::of(ctx)).await? } else { Vec::new() };
        let is_unlimited = is_here && quotas.is_empty();
        let meant = quotas.iter().filter(|quota| {
            of_zone(&quota.zone) && class.category_names().any(|name| name == quota.category)
        });
        // Not their sum: a quota may be one for several of them.
        let left = meant.map(|quota| quota.left_gib).max().unwrap_or(0);
        let available = if is_unlimited { Capacity::MAX } else { gibibytes(left) };
        let sizes: Vec<_> = class.category_names().map(|name| parameters::sizes(name, None)).collect();
        let largest = gibibytes(sizes.iter().map(|sizes| sizes.most).max().unwrap_or(0)).min(available);
        let smallest = sizes.iter().map(|sizes| sizes.least).min().unwrap_or(1);
        Ok(AvailableCapacity {
            available,
            largest_volume: Some(largest),
            smallest_volume: Some(gibibytes(smallest)),
        })
    }
}

impl Cloning for Account {
    async fn clone_volume(&self, ctx: &Context, plan: Plan, source: &Volume) -> Result<Volume> {
        let until = Deadline::of(ctx);
        let of = source.id.as_str();
        let new = NewEcsSnapshot {
            disk: of.to_owned(),
            name: names::clone_name(&plan.name),
            tags: self.snapshot_tags([(CLONE_TAG.to_owned(), of.to_owned())].into()),
            ..NewEcsSnapshot::default()
        };
        // An attempt that was cut off may have taken it.
        let taken = self.ecs_snapshot(By::Name(new.name.clone()), until).await?;
        let taken = match taken.filter(|taken| taken.source_disk_id == of) {
            Some(taken) => taken,
            None => self.snapshot_now(&new, until).await?,
        };
        let snapshot = taken.snapshot_id.as_str();
        let origin = Origin { snapshot, clone_of: Some(of), size: source.capacity.bytes() / GIB };
        let made = async {
            self.wait_for_snapshot(&taken, until).await?;
            self.make(&plan, Some(origin), until).await
        };
        match made.await {
            Err(error) if is_final(&error) => {
                // The caller will not ask again, so nothing may be left.
                self.api.delete_snapshot(snapshot, until).await?;
                Err(error)
            }
            Err(error) => Err(error),
            Ok(made) => {
                self.complete(&made, until).await?;
                self.describe(&made)
            }
        }
    }
}

impl Expansion for Account {
    async fn expand(&self, ctx: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let until = Deadline::of(ctx);
        let id = volume.id.as_str();
        let disk = self.observed(id, until).await?;
        let level = Some(disk.performance_level.as_str()).filter(|level| !level.is_empty());
        let size = parameters::sizes(&disk.category, level).grow(&range, disk.size)?;
        if size > disk.size {
            self.resize(&disk, size, until).await?;
        }
        // What is on it is grown on its node, which has nothing to do for a raw volume.
        Ok(Expanded { capacity: gibibytes(size), node_expansion_required: true })
    }
}

impl Account {
    /// A volume of a snapshot; see [`crate::Snapshots::restore`].
    pub(super) async fn restore_of(
        &self,
        plan: &Plan,
        snapshot: &str,
        size: u64,
        until: Deadline,
    ) -> Result<Volume> {
        let made = self.make(plan, Some(Origin { snapshot, clone_of: None, size }), until).await?;
        self.describe(&made)
    }

    /// Makes a disk, once, however often it is tried: the token of the request finds the disk of an attempt before.
    async fn make(&self, plan: &Plan, origin: Option<Origin<'_>>, until: Deadline) -> Result<Arc<Disk>> {
        for generation in 0..GENERATIONS {
            let token = names::token(&plan.name, generation);
            let Some((id, attempt)) = self.try_all(plan, origin, &token, until).await? else { continue };
            if let Some(disk) = self.confirm(&id, plan, &attempt, origin, until).await? {
                return Ok(disk);
            }
            tracing::debug!(id, "a token stands for a disk that was removed; the next one is taken");
        }
        Err(Error::Unavailable(format!("too many volumes named {:?} were made and removed", plan.name)))
    }

    /// Tries each kind of disk in turn until there is one; `None` if the token stands for another disk that is gone.
    async fn try_all(
        &self,
        plan: &Plan,
        origin: Option<Origin<'_>>,
        token: &str,
        until: Deadline,
    ) -> Result<Option<(String, Attempt)>> {
        let least = origin.map_or(0, |origin| origin.size);
        let mut reasons = Vec::new();
        let mut is_elsewhere = false;
        for attempt in plan.class.attempts(&plan.range, least)? {
            let new = self.new_disk(plan, &attempt, origin);
            let failure = match self.api.create_disk(&new, token, until).await {
                Ok(id) => return Ok(Some((id, attempt))),
                Err(failure) => failure,
            };
            if is_code(&failure, &["IdempotentParameterMismatch"]) {
                return self.mismatch(plan, until).await.map(|()| None);
            }
            if is_code(&failure, &["InvalidSnapshotId.NotFound"]) {
                return Err(Error::not_found("snapshot", origin.map_or("", |origin| origin.snapshot)));
            }
            match is_for_the_next(&failure, &attempt) {
                None => return Err(failure.into()),
                Some(zone) => is_elsewhere |= zone,
            }
            reasons.push(format!("{attempt}: {failure}"));
        }
        let sentence = format!("no type of disk can be had: {}", reasons.join("; "));
        // Another zone may have them, which a scheduler looks for after this code.
        Err(if is_elsewhere { Error::Exhausted(sentence) } else { Error::Invalid(sentence) })
    }

    /// The token was used with other parameters: for a disk that is there, or for one that is gone.
    async fn mismatch(&self, plan: &Plan, until: Deadline) -> Result<()> {
        let mut pace = Pace::new();
        loop {
            if self.disk(By::Name(plan.name.clone()), until).await?.is_some() {
                // Whether it is what is asked for is looked at when the call is repeated.
                return Err(Error::Busy(format!("a volume {:?} was made meanwhile", plan.name)));
            }
            if pace.looks() >= 3 {
                return Ok(());
            }
            if !pace.next(0, until).await {
                return Err(Error::Busy(format!(
                    "it is not clear yet whether there is a volume {:?}",
                    plan.name
                )));
            }
        }
    }

    /// The disk that was just made; `None` if its token gave one that was removed before.
    async fn confirm(
        &self,
        id: &str,
        plan: &Plan,
        attempt: &Attempt,
        origin: Option<Origin<'_>>,
        until: Deadline,
    ) -> Result<Option<Arc<Disk>>> {
        if let Some(disk) = self.disk(By::Id(id.to_owned()), until).await? {
            self.made(&disk);
            return Ok(Some(disk));
        }
        // Descriptions lag behind. A tag can only be put on what is there.
        let tags = Tags::from([(VOLUME_NAME.to_owned(), plan.name.clone())]);
        match self.api.tag("disk", &[id], &tags, until).await {
            Err(failure) if is_gone(&failure) => return Ok(None),
            tagged => tagged?,
        }
        let disk = Arc::new(Disk {
            id: id.to_owned(),
            zone_id: plan.zone.clone().unwrap_or_default(),
            category: attempt.category.name.to_owned(),
            performance_level: attempt.level.clone().unwrap_or_default(),
            size: attempt.size,
            serial_number: id.strip_prefix("d-").unwrap_or_default().to_owned(),
            source_snapshot_id: origin.map(|origin| origin.snapshot.to_owned()).unwrap_or_default(),
            ..Disk::tagged(self.new_disk(plan, attempt, origin).tags)
        });
        self.made(&disk);
        Ok(Some(disk))
    }

    fn new_disk(&self, plan: &Plan, attempt: &Attempt, origin: Option<Origin<'_>>) -> NewDisk {
        let mut tags = plan.tags.clone();
        let clone_of = origin.and_then(|origin| origin.clone_of);
        let own = [OF_KUBERNETES, CREATED_BY, (VOLUME_NAME, plan.name.as_str())];
        let others = self.cluster.iter().map(|id| (CLUSTER, id.as_str()));
        let others = others.chain(clone_of.map(|id| (CLONE_TAG, id)));
        tags.extend(own.into_iter().chain(others).map(|(key, value)| (key.to_owned(), value.to_owned())));
        let class = &plan.class;
        NewDisk {
            zone: plan.zone.clone().filter(|_| !attempt.category.regional),
            name: Some(names::api_name(&plan.name)),
            size: attempt.size,
            category: attempt.category.name.to_owned(),
            performance_level: attempt.level.clone(),
            snapshot: origin.map(|origin| origin.snapshot.to_owned()),
            encrypted: class.encrypted,
            kms_key: class.kms_key.clone(),
            multi_attach: class.multi_attach,
            provisioned_iops: class.iops(attempt.category),
            bursting: class.bursting(attempt.category),
            storage_cluster: class.storage_cluster.clone(),
            resource_group: class.resource_group.clone(),
            tags,
        }
    }

    /// Removes what a volume was cloned by, once the volume has all of it; an attempt before may have been cut off.
    async fn complete(&self, disk: &Disk, until: Deadline) -> Result<()> {
        if disk.tag(CLONE_TAG).is_none() {
            return Ok(());
        }
        if disk.status == "Creating" {
            self.settle(&disk.id, "clone", until, |disk| match disk.status.as_str() {
                "Creating" => Progress::UnderWay,
                _ => Progress::Done,
            })
            .await?;
        }
        self.remove_clone_snapshot(disk, until).await
    }

    async fn remove_clone_snapshot(&self, disk: &Disk, until: Deadline) -> Result<()> {
        let snapshot = &disk.source_snapshot_id;
        if disk.tag(CLONE_TAG).is_some() && !snapshot.is_empty() {
            self.api.delete_snapshot(snapshot, until).await?;
            self.cloning.lock().remove(snapshot);
        }
        Ok(())
    }

    async fn resize(&self, disk: &Disk, size: u64, until: Deadline) -> Result<()> {
        let (id, is_attached) = (disk.id.as_str(), disk.status == "In_use");
        let mut pace = Pace::new();
        loop {
            match self.api.resize_disk(id, size, is_attached, until).await {
                Ok(()) => break,
                Err(failure) if is_gone(&failure) => return Err(Error::not_found("volume", id)),
                Err(failure) => {
                    // It may have been done although it was not said.
                    let now = self.disk(By::Id(id.to_owned()), until).await?;
                    if now.is_some_and(|now| now.size >= size) {
                        return Ok(());
                    }
                    let is_later = is_code(&failure, &["LastOrderProcessing"]);
                    if !is_later || !pace.next(0, until).await {
                        return Err(failure.into());
                    }
                }
            }
        }
        let progress = |disk: &Disk| if disk.size >= size { Progress::Done } else { Progress::NotBegun };
        self.settle(id, "resize", until, progress).await
    }

    /// A disk in the words of the framework.
    pub(super) fn describe(&self, disk: &Disk) -> Result<Volume> {
        let unreadable = |error: &dyn std::fmt::Display| {
            Error::Unavailable(format!("disk {:?} cannot be understood: {error}", disk.id))
        };
        let id: VolumeId = disk.id.parse().map_err(|error| unreadable(&error))?;
        let source = match (disk.tag(CLONE_TAG), disk.source_snapshot_id.as_str()) {
            (Some(of), _) => Some(ContentSource::Volume(of.parse().map_err(|error| unreadable(&error))?)),
            (None, "") => None,
            (None, of) => Some(ContentSource::Snapshot(of.parse().map_err(|error| unreadable(&error))?)),
        };
        let mut context = BTreeMap::from([(TYPE.to_owned(), disk.category.clone())]);
        if !disk.performance_level.is_empty() {
            context.insert(LEVEL.to_owned(), disk.performance_level.clone());
        }
        let attachments = disk.instances().into_iter().map(|instance| {
            let node = instance.parse().map_err(|error| unreadable(&error))?;
            Ok(Attached { node, read_only: false, mode: None })
        });
        let is_regional = parameters::category(&disk.category).is_ok_and(|category| category.regional);
        let topology = if is_regional {
            Topology::single(self.keys.region, &self.region)
        } else {
            Topology::single(self.keys.zone, &disk.zone_id)
        };
        let shared = disk.is_shared().then(|| ("multiAttach".to_owned(), "true".to_owned()));
        Ok(Volume {
            access: None,
            context,
            // What a check of access needs to know.
            parameters: Arc::new(shared.into_iter().collect()),
            source,
            topology: Some(Arc::new(topology)),
            attachments: attachments.collect::<Result<_>>()?,
            ..Volume::new(id, gibibytes(disk.size))
        })
    }
}

/// Whether a list of words has that word.
fn contains(list: &str, word: &str) -> bool {
    list.split(',').any(|one| one.trim() == word)
}

/// Whether another kind of disk may be had where this one could not, and if so, whether because of the zone.
fn is_for_the_next(failure: &Failure, attempt: &Attempt) -> Option<bool> {
    if is_code(failure, &["InvalidDataDiskCategory", "OperationDenied.NoStock", "NotSupportDiskCategory"])
        || failure.says("is not valid in this region")
    {
        return Some(true);
    }
    let by_size = ["InvalidDiskSize.NotSupported", "InvalidDataDiskSize.ValueNotSupported"];
    let by_level = ["OperationDenied.PerformanceLevelNotMatch", "InvalidPerformanceLevel.Malformed"];
    let is_level = attempt.category.name == "cloud_essd" && is_code(failure, &by_level);
    let is_iops = is_code(failure, &["InvalidProvisionedIops.LimitExceed"]);
    (is_code(failure, &by_size) || is_level || is_iops).then_some(false)
}

fn gibibytes(count: u64) -> Capacity {
    Capacity::new(count.saturating_mul(GIB)).min(Capacity::MAX)
}
