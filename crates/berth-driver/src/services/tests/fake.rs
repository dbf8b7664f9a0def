//! A backend in memory: volumes are directories, and any method can be told to fail.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    ops::Bound,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use berth_core::{
    AccessKind, Capacity, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology,
    VolumeCapability, VolumeId,
};
use parking_lot::{Mutex, MutexGuard};

use crate::{
    Backend, Features,
    backend::{
        Amounts, Attachment, BlockRange, Blocks, Condition, Error, Expanded, GroupSnapshot, NewVolume,
        NodeExpansion, NodeInfo, Page, PageRequest, Parameters, Publication, Result, Room, Severity,
        Snapshot, StagedVolume, Usage, Volume,
    },
};

/// The only parameter there is; with the value "wrong" it is refused.
pub(super) const PARAMETER: &str = "kind";
pub(super) const MUTABLE: &str = "iops";

type Fault = Box<dyn Fn() -> Error + Send>;

pub(super) struct Fake {
    pub(super) features: Features,
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
    pub(super) recovered: Option<Vec<StagedVolume>>,
    pub(super) longest_page: usize,
    faults: HashMap<&'static str, Fault>,
}

impl Fake {
    pub(super) fn new(root: PathBuf, features: Features) -> Self {
        Self { features, max_volumes: None, ranges: 10, root, state: Mutex::default() }
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
}

fn here() -> Topology {
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

#[async_trait]
impl Backend for Fake {
    fn features(&self) -> Features {
        self.features
    }

    fn node(&self) -> NodeInfo {
        NodeInfo { id: "here".parse().unwrap(), max_volumes: self.max_volumes, topology: Some(here()) }
    }

    async fn ready(&self) -> Result<()> {
        self.enter("ready").map(drop)
    }

    async fn recover(&self, staged: Vec<StagedVolume>) -> Result<()> {
        self.enter("recover")?.recovered = Some(staged);
        Ok(())
    }

    async fn check_parameters(
        &self,
        parameters: &Parameters,
        mutable: &Parameters,
        _: &[VolumeCapability],
    ) -> Result<()> {
        drop(self.enter("check_parameters")?);
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

    async fn find_volume(&self, name: &Name) -> Result<Option<Volume>> {
        let state = self.enter("find_volume")?;
        Ok(state.volumes.values().find(|(known, _)| known == name).map(|(_, volume)| volume.clone()))
    }

    async fn volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        Ok(self.enter("volume")?.volumes.get(id).map(|(_, volume)| volume.clone()))
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume> {
        let mut state = self.enter("create_volume")?;
        let source_size = match &new.source {
            None => Capacity::gibibytes(1),
            Some(crate::backend::ContentSource::Volume(id)) => state.volumes[id].1.capacity,
            Some(crate::backend::ContentSource::Snapshot(id)) => state.snapshots[id].1.size,
        };
        let id: VolumeId = format!("vol-{}", new.name).parse().unwrap();
        fs::create_dir_all(self.files(id.as_str())).unwrap();
        let volume = Volume {
            id: id.clone(),
            capacity: new.range.choose(source_size).max(if new.source.is_some() {
                source_size
            } else {
                Capacity::ZERO
            }),
            access: new.capabilities[0].access.kind(),
            parameters: Arc::new(new.parameters),
            mutable: Arc::new(new.mutable),
            context: BTreeMap::from([("made".into(), "here".into())]),
            source: new.source,
            topology: Some(Arc::new(here())),
            attachments: Vec::new(),
            ephemeral: new.ephemeral,
        };
        state.volumes.insert(id, (new.name, volume.clone()));
        Ok(volume)
    }

    async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.enter("delete_volume")?.volumes.remove(id).ok_or_else(|| Error::no_volume(id))?;
        fs::remove_dir_all(self.files(id.as_str())).unwrap();
        Ok(())
    }

    async fn list_volumes(&self, request: PageRequest) -> Result<Page<Volume>> {
        let mut state = self.enter("list_volumes")?;
        state.longest_page = state.longest_page.max(request.limit);
        let (ids, next) = page(&state.volumes, &request, |text| text.parse().ok(), |_| true)?;
        let entries = ids.iter().map(|id| state.volumes[id].1.clone()).collect();
        Ok(Page { entries, next: next.map(|id| format!("after {id}")) })
    }

    async fn room(&self, _: &Parameters, _: Option<&Topology>) -> Result<Room> {
        drop(self.enter("room")?);
        let [available, largest, smallest] = [9, 5, 1].map(Capacity::gibibytes);
        Ok(Room { available, largest_volume: Some(largest), smallest_volume: Some(smallest) })
    }

    async fn node_exists(&self, node: &NodeId) -> Result<bool> {
        drop(self.enter("node_exists")?);
        Ok(["here", "there"].contains(&node.as_str()))
    }

    async fn attached_count(&self, node: &NodeId) -> Result<usize> {
        let state = self.enter("attached_count")?;
        Ok(state.volumes.values().filter(|(_, v)| v.attachments.iter().any(|a| a.node == *node)).count())
    }

    async fn attach(&self, id: &VolumeId, attachment: Attachment) -> Result<BTreeMap<String, String>> {
        let mut state = self.enter("attach")?;
        let volume = &mut state.volumes.get_mut(id).unwrap().1;
        volume.attachments.retain(|known| known.node != attachment.node);
        volume.attachments.push(attachment);
        Ok(BTreeMap::from([("attached".into(), "yes".into())]))
    }

    async fn detach(&self, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        let mut state = self.enter("detach")?;
        let volume = &mut state.volumes.get_mut(id).unwrap().1;
        volume.attachments.retain(|known| node.is_some_and(|node| known.node != *node));
        Ok(())
    }

    async fn expand_volume(&self, id: &VolumeId, range: CapacityRange) -> Result<Expanded> {
        let mut state = self.enter("expand_volume")?;
        if range.required() > Some(Capacity::gibibytes(100)) {
            return Err(Error::OutOfRange("more than there is".into()));
        }
        let volume = &mut state.volumes.get_mut(id).unwrap().1;
        volume.capacity = volume.capacity.max(range.choose(volume.capacity));
        Ok(Expanded {
            capacity: volume.capacity,
            node_expansion_required: volume.access == AccessKind::Mount,
        })
    }

    async fn modify_volume(&self, id: &VolumeId, mutable: Parameters) -> Result<()> {
        let mut state = self.enter("modify_volume")?;
        state.volumes.get_mut(id).unwrap().1.mutable = Arc::new(mutable);
        Ok(())
    }

    async fn volume_health(&self, id: &VolumeId) -> Result<Vec<Condition>> {
        let state = self.enter("volume_health")?;
        if id.as_str() == "damaged" {
            return Ok(vec![sick(), sick()]);
        }
        if state.volumes.contains_key(id) { Ok(Vec::new()) } else { Err(Error::no_volume(id)) }
    }

    async fn list_unhealthy(&self, request: PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        let state = self.enter("list_unhealthy")?;
        let (ids, next) = page(&state.volumes, &request, |text| text.parse().ok(), |_| true)?;
        let entries = ids.into_iter().map(|id| (id, vec![sick()])).collect();
        Ok(Page { entries, next: next.map(|id| format!("after {id}")) })
    }

    async fn find_snapshot(&self, name: &Name) -> Result<Option<Snapshot>> {
        let state = self.enter("find_snapshot")?;
        Ok(state.snapshots.values().find(|(known, _)| known == name).map(|(_, snapshot)| snapshot.clone()))
    }

    async fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>> {
        Ok(self.enter("snapshot")?.snapshots.get(id).map(|(_, snapshot)| snapshot.clone()))
    }

    async fn create_snapshot(&self, name: Name, source: &VolumeId, _: &Parameters) -> Result<Snapshot> {
        let mut state = self.enter("create_snapshot")?;
        let snapshot = taken(&state, &name, source, None);
        state.snapshots.insert(snapshot.id.clone(), (name, snapshot.clone()));
        Ok(snapshot)
    }

    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.enter("delete_snapshot")?.snapshots.remove(id).map(drop).ok_or_else(|| Error::no_snapshot(id))
    }

    async fn list_snapshots(
        &self,
        source: Option<&VolumeId>,
        request: PageRequest,
    ) -> Result<Page<Snapshot>> {
        let state = self.enter("list_snapshots")?;
        let keep = |(_, snapshot): &(Name, Snapshot)| source.is_none_or(|id| snapshot.source == *id);
        let (ids, next) = page(&state.snapshots, &request, |text| text.parse().ok(), keep)?;
        let entries = ids.iter().map(|id| state.snapshots[id].1.clone()).collect();
        Ok(Page { entries, next: next.map(|id| format!("after {id}")) })
    }

    async fn find_group(&self, name: &Name) -> Result<Option<GroupSnapshot>> {
        let state = self.enter("find_group")?;
        Ok(state.groups.values().find(|(known, _)| known == name).map(|(_, group)| group.clone()))
    }

    async fn group(&self, id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        Ok(self.enter("group")?.groups.get(id).map(|(_, group)| group.clone()))
    }

    async fn create_group(&self, name: Name, sources: &[VolumeId], _: &Parameters) -> Result<GroupSnapshot> {
        let mut state = self.enter("create_group")?;
        let id: GroupSnapshotId = format!("group-{name}").parse().unwrap();
        let mut snapshots = Vec::new();
        for source in sources {
            let member: Name = format!("{name}-{source}").parse().unwrap();
            let snapshot = taken(&state, &member, source, Some(id.clone()));
            state.snapshots.insert(snapshot.id.clone(), (member, snapshot.clone()));
            snapshots.push(snapshot);
        }
        let group = GroupSnapshot { id: id.clone(), snapshots, created: SystemTime::UNIX_EPOCH };
        state.groups.insert(id, (name, group.clone()));
        Ok(group)
    }

    async fn delete_group(&self, id: &GroupSnapshotId) -> Result<()> {
        let mut state = self.enter("delete_group")?;
        let (_, group) = state.groups.remove(id).unwrap();
        for member in group.snapshots {
            state.snapshots.remove(&member.id);
        }
        Ok(())
    }

    async fn allocated_blocks(&self, _: &SnapshotId, from: u64) -> Result<Blocks> {
        drop(self.enter("allocated_blocks")?);
        Ok(Blocks {
            capacity: Capacity::gibibytes(1),
            fixed_length: true,
            ranges: Box::new(
                (from / 4096..self.ranges).map(|n| Ok(BlockRange { offset: n * 4096, length: 4096 })),
            ),
        })
    }

    async fn changed_blocks(&self, _: &SnapshotId, _: &SnapshotId, _: u64) -> Result<Blocks> {
        drop(self.enter("changed_blocks")?);
        let good = (0..3).map(|n| Ok(BlockRange { offset: n * 8192, length: 100 + n }));
        let bad = std::iter::once_with(|| Err(Error::State("the disk is on fire".into())));
        Ok(Blocks {
            capacity: Capacity::gibibytes(1),
            fixed_length: false,
            ranges: Box::new(good.chain(bad)),
        })
    }

    async fn stage(&self, volume: &Volume, staging: &Path, _: &VolumeCapability) -> Result<()> {
        let mut state = self.enter("stage")?;
        state.stagings += 1;
        state.staged.insert(volume.id.clone(), staging.to_owned());
        Ok(())
    }

    async fn unstage(&self, id: &VolumeId, _: &Path) -> Result<()> {
        self.enter("unstage")?.staged.remove(id);
        Ok(())
    }

    async fn publish_source(&self, volume: &Volume, how: Publication<'_>) -> Result<PathBuf> {
        let state = self.enter("publish_source")?;
        if state.staged.get(&volume.id).map(PathBuf::as_path) != how.staging {
            return Err(Error::Precondition("not staged there".into()));
        }
        Ok(match how.capability.access.kind() {
            AccessKind::Mount => self.files(volume.id.as_str()),
            AccessKind::Block => "/dev/zero".into(),
        })
    }

    async fn usage(&self, _: &Volume, path: &Path) -> Result<Usage> {
        drop(self.enter("usage")?);
        assert!(path.is_absolute());
        let amounts = |total| Amounts { total, used: 1, available: total - 1 };
        Ok(Usage { bytes: amounts(100), inodes: Some(amounts(u64::MAX)) })
    }

    async fn expand_on_node(&self, volume: &Volume, _: &Path, _: CapacityRange) -> Result<NodeExpansion> {
        let state = self.enter("expand_on_node")?;
        Ok(if state.needs_remount {
            NodeExpansion::NeedsRemount(volume.capacity)
        } else {
            NodeExpansion::Done(volume.capacity)
        })
    }

    async fn node_health(&self, _: &Volume, _: Option<&Path>, _: &[PathBuf]) -> Result<Vec<Condition>> {
        self.enter("node_health").map(|_| vec![sick()])
    }

    async fn storage_health(&self) -> Result<Vec<Condition>> {
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
