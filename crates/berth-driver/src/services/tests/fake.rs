//! A backend in memory: volumes are directories, and any method can be told to fail.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    ops::Bound,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use berth_core::{
    AccessKind, Capacity, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology,
    VolumeCapability, VolumeId,
};
use parking_lot::{Mutex, MutexGuard};

use crate::{
    Amounts, Attached, Attachment, AvailableCapacity, BlockRange, Blocks, CapacityInfo, ChangedBlocks,
    Cloning, Condition, ContentSource, Context, Error, Expanded, Expansion, GroupSnapshot, GroupSnapshots,
    Health, InlineVolumes, Listing, Modification, NewSnapshot, NewVolume, NodeExpanded, NodeExpansion,
    NodeHealth, NodeVolume, Page, PageRequest, Parameters, Placement, ReadOnlyAttachment, Readiness, Result,
    Severity, Snapshot, Snapshots, Source, Sources, StagedVolume, Staging, Stats, Supports,
    TopologyRequirement, Usage, Volume, Volumes,
};

/// The only parameter there is; with the value "wrong" it is refused.
pub(super) const PARAMETER: &str = "kind";
pub(super) const MUTABLE: &str = "iops";

type Fault = Box<dyn Fn() -> Error + Send>;

pub(super) struct Fake {
    pub(super) max_volumes: Option<u32>,
    pub(super) ranges: u64,
    root: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) volumes: BTreeMap<VolumeId, (Name, Volume)>,
    pub(super) snapshots: BTreeMap<SnapshotId, (Name, Snapshot)>,
    groups: BTreeMap<GroupSnapshotId, (Name, GroupSnapshot)>,
    pub(super) staged: BTreeMap<VolumeId, PathBuf>,
    pub(super) stagings: usize,
    pub(super) needs_remount: bool,
    /// Staging does not grow a volume, because somebody else has it mounted.
    pub(super) held_elsewhere: bool,
    pub(super) recovered: Option<Vec<StagedVolume>>,
    pub(super) longest_page: usize,
    faults: HashMap<&'static str, Fault>,
}

impl Fake {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { max_volumes: None, ranges: 10, root, state: Mutex::default() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Lets every call of a method fail from now on.
    pub(super) fn fail(&self, method: &'static str, fault: impl Fn() -> Error + Send + 'static) {
        self.state().faults.insert(method, Box::new(fault));
    }

    pub(super) fn heal(&self) {
        self.state().faults.clear();
    }

    /// Where a volume's files are.
    pub(super) fn files(&self, id: &str) -> PathBuf {
        self.root.join(id)
    }

    fn enter(&self, method: &'static str) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        match state.faults.get(method) {
            Some(fault) => Err(fault()),
            None => Ok(state),
        }
    }

    fn existing(&self, id: &VolumeId) -> Result<Volume> {
        let state = self.enter("get")?;
        state.volumes.get(id).map(|(_, volume)| volume.clone()).ok_or_else(|| Error::no_volume(id))
    }

    fn named(&self, name: &Name) -> Result<Option<Volume>> {
        let state = self.enter("find")?;
        Ok(state.volumes.values().find(|(known, _)| known == name).map(|(_, volume)| volume.clone()))
    }

    /// Makes a volume, with the content of a source that is that large.
    fn make(&self, new: NewVolume, source: Option<(ContentSource, Capacity)>) -> Result<Volume> {
        let mut state = self.enter("create")?;
        let (source, least) = source.unzip();
        let id: VolumeId = format!("vol-{}", new.name).parse().unwrap();
        fs::create_dir_all(self.files(id.as_str())).unwrap();
        let volume = Volume {
            id: id.clone(),
            capacity: new
                .range
                .choose(least.unwrap_or(Capacity::gibibytes(1)))
                .max(least.unwrap_or(Capacity::ZERO)),
            access: Some(new.access()),
            parameters: Arc::new(new.parameters),
            mutable: Arc::new(new.mutable),
            context: BTreeMap::from([("made".into(), "here".into())]),
            source,
            topology: Some(Arc::new(here())),
            attachments: Vec::new(),
            ephemeral: new.ephemeral,
        };
        state.volumes.insert(id, (new.name, volume.clone()));
        Ok(volume)
    }

    fn attach_as(&self, id: &VolumeId, attached: Attached) -> Result<BTreeMap<String, String>> {
        let mut state = self.enter("attach")?;
        let node = &attached.node;
        if !["here", "there"].contains(&node.as_str()) {
            return Err(Error::not_found("node", node));
        }
        let is_there = |volume: &Volume| volume.attachments.iter().any(|known| known.node == *node);
        let repeated = is_there(&state.volumes[id].1);
        let count = state.volumes.values().filter(|(_, volume)| is_there(volume)).count();
        if let Some(limit) = self.max_volumes
            && !repeated
            && count >= usize::try_from(limit).unwrap()
        {
            return Err(Error::Exhausted(format!("node {node:?} has {count} volumes, its limit is {limit}")));
        }
        let attachments = &mut state.volumes.get_mut(id).unwrap().1.attachments;
        attachments.retain(|known| known.node != attached.node);
        attachments.push(attached);
        Ok(BTreeMap::from([("attached".into(), "yes".into())]))
    }
}

pub(super) fn here() -> Topology {
    Topology::single("topology.test/node", "here")
}

fn page<K: Ord + Clone, V>(
    map: &BTreeMap<K, V>,
    request: &PageRequest,
    parse: impl Fn(&str) -> Option<K>,
    keep: impl Fn(&V) -> bool,
) -> Result<(Vec<K>, Option<K>)> {
    let start = match &request.after {
        None => Bound::Unbounded,
        Some(token) => Bound::Excluded(
            token
                .strip_prefix("after ")
                .and_then(parse)
                .ok_or_else(|| Error::Busy("no such token".into()))?,
        ),
    };
    let mut keys =
        map.range((start, Bound::Unbounded)).filter(|(_, value)| keep(value)).map(|(key, _)| key.clone());
    let entries: Vec<K> = keys.by_ref().take(request.limit).collect();
    let next = keys.next().and_then(|_| entries.last().cloned());
    Ok((entries, next))
}

fn check_parameters(parameters: &Parameters, mutable: &Parameters) -> Result<()> {
    for (allowed, map) in [(PARAMETER, parameters), (MUTABLE, mutable)] {
        let wrong = map.iter().find(|(key, value)| {
            !key.starts_with("csi.storage.k8s.io/") && (*key != allowed || *value == "wrong")
        });
        if let Some((key, _)) = wrong {
            return Err(Error::Invalid(format!("parameter {key:?} is wrong")));
        }
    }
    Ok(())
}

impl Readiness for Fake {
    async fn ready(&self) -> Result<()> {
        self.enter("ready").map(drop)
    }
}

impl Volumes for Fake {
    type Plan = NewVolume;

    fn supports(&self) -> Supports {
        Supports::filesystem().and_block().on_many_nodes()
    }

    fn plan(&self, _: &Context, new: &NewVolume) -> Result<NewVolume> {
        drop(self.enter("plan")?);
        check_parameters(&new.parameters, &new.mutable)?;
        Ok(new.clone())
    }

    async fn find(&self, _: &Context, plan: &NewVolume) -> Result<Option<Volume>> {
        self.named(&plan.name)
    }

    async fn create(&self, _: &Context, plan: NewVolume) -> Result<Volume> {
        self.make(plan, None)
    }

    async fn get(&self, _: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        Ok(self.enter("get")?.volumes.get(id).map(|(_, volume)| volume.clone()))
    }

    async fn delete(&self, _: &Context, id: &VolumeId) -> Result<()> {
        if self.enter("delete")?.volumes.remove(id).is_some() {
            fs::remove_dir_all(self.files(id.as_str())).unwrap();
        }
        Ok(())
    }
}

impl Cloning for Fake {
    async fn clone_volume(&self, _: &Context, plan: NewVolume, source: &Volume) -> Result<Volume> {
        self.make(plan, Some((ContentSource::Volume(source.id.clone()), source.capacity)))
    }
}

impl Listing for Fake {
    async fn list(&self, _: &Context, request: &PageRequest) -> Result<Page<Volume>> {
        let mut state = self.enter("list")?;
        state.longest_page = state.longest_page.max(request.limit);
        let (ids, next) = page(&state.volumes, request, |text| text.parse().ok(), |_| true)?;
        let entries = ids.iter().map(|id| state.volumes[id].1.clone()).collect();
        Ok(Page { entries, next: next.map(|id| format!("after {id}")) })
    }
}

impl Placement for Fake {
    async fn place(
        &self,
        _: &Context,
        _: &mut NewVolume,
        wanted: Option<&TopologyRequirement>,
    ) -> Result<Topology> {
        drop(self.enter("place")?);
        TopologyRequirement::check(wanted, Some(&here()))?;
        Ok(here())
    }
}

impl CapacityInfo for Fake {
    async fn available_capacity(
        &self,
        _: &Context,
        _: &Parameters,
        topology: Option<&Topology>,
    ) -> Result<AvailableCapacity> {
        drop(self.enter("available_capacity")?);
        if topology.is_some_and(|wanted| !here().satisfies(wanted)) {
            let available = Capacity::ZERO;
            return Ok(AvailableCapacity { available, largest_volume: None, smallest_volume: None });
        }
        let [available, largest, smallest] = [9, 5, 1].map(Capacity::gibibytes);
        Ok(AvailableCapacity { available, largest_volume: Some(largest), smallest_volume: Some(smallest) })
    }
}

impl Attachment for Fake {
    async fn attach(
        &self,
        _: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        let attached = Attached { node: node.clone(), read_only: false, mode: Some(capability.mode) };
        self.attach_as(&volume.id, attached)
    }

    async fn detach(&self, _: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        let mut state = self.enter("detach")?;
        let volume = &mut state.volumes.get_mut(id).unwrap().1;
        volume.attachments.retain(|known| node.is_some_and(|node| known.node != *node));
        Ok(())
    }
}

impl ReadOnlyAttachment for Fake {
    async fn attach_read_only(
        &self,
        _: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        let attached = Attached { node: node.clone(), read_only: true, mode: Some(capability.mode) };
        self.attach_as(&volume.id, attached)
    }
}

impl Expansion for Fake {
    async fn expand(&self, _: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let mut state = self.enter("expand")?;
        if range.required() > Some(Capacity::gibibytes(100)) {
            return Err(Error::OutOfRange("more than there is".into()));
        }
        let volume = &mut state.volumes.get_mut(&volume.id).unwrap().1;
        volume.capacity = volume.capacity.max(range.choose(volume.capacity));
        Ok(Expanded {
            capacity: volume.capacity,
            node_expansion_required: volume.access == Some(AccessKind::Mount),
        })
    }
}

impl Modification for Fake {
    async fn modify(&self, _: &Context, volume: &Volume, mutable: Parameters) -> Result<()> {
        check_parameters(&volume.parameters, &mutable)?;
        let mut state = self.enter("modify")?;
        state.volumes.get_mut(&volume.id).unwrap().1.mutable = Arc::new(mutable);
        Ok(())
    }
}

impl Health for Fake {
    async fn health(&self, _: &Context, id: &VolumeId) -> Result<Vec<Condition>> {
        let state = self.enter("health")?;
        if id.as_str() == "damaged" {
            return Ok(vec![sick(), sick()]);
        }
        if state.volumes.contains_key(id) { Ok(Vec::new()) } else { Err(Error::no_volume(id)) }
    }

    async fn list_unhealthy(
        &self,
        _: &Context,
        request: &PageRequest,
    ) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        let state = self.enter("list_unhealthy")?;
        let (ids, next) = page(&state.volumes, request, |text| text.parse().ok(), |_| true)?;
        let entries = ids.into_iter().map(|id| (id, vec![sick()])).collect();
        Ok(Page { entries, next: next.map(|id| format!("after {id}")) })
    }
}

impl Snapshots for Fake {
    async fn find_snapshot(&self, _: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        let state = self.enter("find_snapshot")?;
        let found = state.snapshots.values().find(|(known, _)| *known == new.name);
        Ok(found.map(|(_, snapshot)| snapshot.clone()))
    }

    async fn take_snapshot(&self, _: &Context, new: NewSnapshot, _: &Volume) -> Result<Snapshot> {
        let mut state = self.enter("take_snapshot")?;
        let snapshot = taken(&state, &new.name, &new.source, None);
        state.snapshots.insert(snapshot.id.clone(), (new.name, snapshot.clone()));
        Ok(snapshot)
    }

    async fn snapshot(&self, _: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        Ok(self.enter("snapshot")?.snapshots.get(id).map(|(_, snapshot)| snapshot.clone()))
    }

    async fn delete_snapshot(&self, _: &Context, id: &SnapshotId) -> Result<()> {
        self.enter("delete_snapshot")?.snapshots.remove(id).map(drop).ok_or_else(|| Error::no_snapshot(id))
    }

    async fn list_snapshots(
        &self,
        _: &Context,
        source: Option<&VolumeId>,
        request: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        let state = self.enter("list_snapshots")?;
        let keep = |(_, snapshot): &(Name, Snapshot)| source.is_none_or(|id| snapshot.source == *id);
        let (ids, next) = page(&state.snapshots, request, |text| text.parse().ok(), keep)?;
        let entries = ids.iter().map(|id| state.snapshots[id].1.clone()).collect();
        Ok(Page { entries, next: next.map(|id| format!("after {id}")) })
    }

    async fn restore(&self, _: &Context, plan: NewVolume, snapshot: &Snapshot) -> Result<Volume> {
        self.make(plan, Some((ContentSource::Snapshot(snapshot.id.clone()), snapshot.size)))
    }
}

impl GroupSnapshots for Fake {
    async fn find_group(&self, _: &Context, name: &Name) -> Result<Option<GroupSnapshot>> {
        let state = self.enter("find_group")?;
        Ok(state.groups.values().find(|(known, _)| known == name).map(|(_, group)| group.clone()))
    }

    async fn take_group_snapshot(
        &self,
        _: &Context,
        name: &Name,
        sources: &[Volume],
        _: &Parameters,
    ) -> Result<GroupSnapshot> {
        let mut state = self.enter("take_group_snapshot")?;
        let id: GroupSnapshotId = format!("group-{name}").parse().unwrap();
        let mut snapshots = Vec::new();
        for source in sources {
            let member: Name = format!("{name}-{}", source.id).parse().unwrap();
            let snapshot = taken(&state, &member, &source.id, Some(id.clone()));
            state.snapshots.insert(snapshot.id.clone(), (member, snapshot.clone()));
            snapshots.push(snapshot);
        }
        let group = GroupSnapshot { id: id.clone(), snapshots, created: SystemTime::UNIX_EPOCH };
        state.groups.insert(id, (name.clone(), group.clone()));
        Ok(group)
    }

    async fn group(&self, _: &Context, id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        Ok(self.enter("group")?.groups.get(id).map(|(_, group)| group.clone()))
    }

    async fn delete_group(&self, _: &Context, id: &GroupSnapshotId) -> Result<()> {
        let mut state = self.enter("delete_group")?;
        let (_, group) = state.groups.remove(id).unwrap();
        for member in group.snapshots {
            state.snapshots.remove(&member.id);
        }
        Ok(())
    }
}

impl ChangedBlocks for Fake {
    async fn allocated(&self, _: &Context, _: &Snapshot, from: u64) -> Result<Blocks> {
        drop(self.enter("allocated")?);
        Ok(Blocks {
            capacity: Capacity::gibibytes(1),
            fixed_length: true,
            ranges: Box::new(
                (from / 4096..self.ranges).map(|n| Ok(BlockRange { offset: n * 4096, length: 4096 })),
            ),
        })
    }

    async fn changed(&self, _: &Context, _: &Snapshot, _: &Snapshot, _: u64) -> Result<Blocks> {
        drop(self.enter("changed")?);
        let good = (0..3).map(|n| Ok(BlockRange { offset: n * 8192, length: 100 + n }));
        let bad = std::iter::once_with(|| Err(Error::State("the disk is on fire".into())));
        Ok(Blocks {
            capacity: Capacity::gibibytes(1),
            fixed_length: false,
            ranges: Box::new(good.chain(bad)),
        })
    }
}

impl InlineVolumes for Fake {
    async fn find_inline(&self, _: &Context, name: &Name) -> Result<Option<Volume>> {
        self.named(name)
    }
}

impl Sources for Fake {
    async fn check(&self, _: &Context, volume: &NodeVolume) -> Result<()> {
        volume.check_access(self.existing(&volume.id)?.access.expect("the fake remembers it"))
    }

    async fn source(&self, _: &Context, volume: &NodeVolume) -> Result<Source> {
        self.existing(&volume.id)?;
        if self.enter("source")?.staged.get(&volume.id) != volume.staging.as_ref() {
            return Err(Error::Precondition("not staged there".into()));
        }
        Ok(match volume.capability.access.kind() {
            AccessKind::Mount => Source::directory(self.files(volume.id.as_str())),
            AccessKind::Block => Source::device("/dev/zero"),
        })
    }
}

impl Staging for Fake {
    async fn stage(&self, _: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        self.existing(&volume.id)?;
        let mut state = self.enter("stage")?;
        state.stagings += 1;
        state.needs_remount &= state.held_elsewhere;
        state.staged.insert(volume.id.clone(), staging.to_owned());
        Ok(())
    }

    async fn unstage(&self, _: &Context, id: &VolumeId, _: &Path) -> Result<()> {
        self.enter("unstage")?.staged.remove(id);
        Ok(())
    }

    async fn recover(&self, staged: Vec<StagedVolume>) -> Result<()> {
        self.enter("recover")?.recovered = Some(staged);
        Ok(())
    }
}

impl Stats for Fake {
    async fn usage(&self, _: &Context, id: &VolumeId, path: &Path) -> Result<Usage> {
        self.existing(id)?;
        drop(self.enter("usage")?);
        assert!(path.is_absolute());
        let amounts = |total| Amounts { total, used: 1, available: total - 1 };
        Ok(Usage { bytes: amounts(100), inodes: Some(amounts(u64::MAX)) })
    }
}

impl NodeExpansion for Fake {
    async fn expand_on_node(
        &self,
        _: &Context,
        id: &VolumeId,
        _: &Path,
        _: CapacityRange,
    ) -> Result<NodeExpanded> {
        let volume = self.existing(id)?;
        Ok(if self.enter("expand_on_node")?.needs_remount {
            NodeExpanded::NeedsRemount
        } else {
            NodeExpanded::Done(volume.capacity)
        })
    }
}

impl NodeHealth for Fake {
    async fn volume_health(
        &self,
        _: &Context,
        id: &VolumeId,
        _: Option<&Path>,
        _: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        self.existing(id)?;
        self.enter("volume_health").map(|_| vec![sick()])
    }

    async fn storage_health(&self, _: &Context) -> Result<Vec<Condition>> {
        self.enter("storage_health").map(|_| vec![sick(), sick()])
    }
}

fn sick() -> Condition {
    Condition { severity: Severity::DataLoss, reason: "DiskOnFire", message: "It burns.".into() }
}

fn taken(state: &State, name: &Name, source: &VolumeId, group: Option<GroupSnapshotId>) -> Snapshot {
    let volume = &state.volumes[source].1;
    Snapshot {
        id: format!("snap-{name}").parse().unwrap(),
        source: source.clone(),
        size: volume.capacity,
        access: volume.access,
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(1),
        ready: true,
        group,
        topology: volume.topology.clone(),
    }
}
