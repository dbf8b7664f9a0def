//! One client of the driver: makes calls, and knows what must be true afterwards.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result, bail, ensure};
use berth_csi::v1;
use tonic::Status;

use super::Plan;
use crate::{
    MIB,
    content::{self, Random},
    csi::{Access, Csi, Kind, Mounted, Shape, Volume, from_snapshot, from_volume},
    disk::DiskType,
    machine,
};

/// What a volume holds: places written, and the seed of the bytes in each.
pub(super) type Slots = BTreeMap<u64, u64>;

const SLOTS: u64 = 12;
const MOST_VOLUMES: usize = 3;
const MOST_SNAPSHOTS: usize = 4;

/// A volume whose creation was answered.
#[derive(Debug, Clone)]
pub(super) struct Tracked {
    pub(super) volume: Volume,
    pub(super) slots: Slots,
    /// The size that was promised.
    pub(super) bytes: i64,
    mounted: Option<Mounted>,
}

/// A snapshot whose creation was answered, or may have happened.
#[derive(Debug, Clone)]
pub(super) struct Taken {
    pub(super) id: String,
    group: Option<String>,
    source: String,
    shape: Shape,
    slots: Slots,
}

/// Calls that were cut off and not tried again.
#[derive(Debug, Default)]
pub(super) struct GivenUp {
    creations: usize,
    pub(super) deletions: Vec<Tracked>,
    snapshots: Vec<Taken>,
    snapshot_deletions: Vec<Taken>,
}

/// A call together with what is true when it is answered.
#[derive(Debug, Clone)]
enum Call {
    Create { name: String, shape: Shape, source: Option<v1::VolumeContentSource>, slots: Slots },
    Delete { volume: Tracked },
    Snapshot { name: String, taken: Taken },
    DeleteSnapshot { taken: Taken },
    Group { name: String, members: Vec<Taken> },
    DeleteGroup { id: String, members: Vec<Taken> },
    Publish { id: String },
    Unpublish { id: String },
    Expand { id: String, bytes: i64 },
}

/// One client with its own volumes.
#[derive(Debug)]
pub(super) struct Worker {
    number: u64,
    random: Random,
    shapes: &'static [Shape],
    /// Whether a raw volume in use can be copied at one moment.
    reflinks: bool,
    dir: PathBuf,
    names: u64,
    pub(super) volumes: Vec<Tracked>,
    pub(super) snapshots: Vec<Taken>,
    pub(super) given_up: GivenUp,
    cut_off: Option<Call>,
    pub(super) answered: u64,
    pub(super) in_doubt: u64,
}

impl Worker {
    pub(super) fn new(number: u64, seed: u64, plan: &Plan, dir: &Path) -> Self {
        Self {
            number,
            random: Random::new(seed),
            shapes: plan.shapes,
            reflinks: plan.disk != DiskType::Ext4,
            dir: dir.into(),
            names: 0,
            volumes: Vec::new(),
            snapshots: Vec::new(),
            given_up: GivenUp::default(),
            cut_off: None,
            answered: 0,
            in_doubt: 0,
        }
    }

    /// Makes calls until the driver is killed.
    pub(super) async fn work(mut self, csi: Csi, killed: Arc<AtomicBool>) -> Result<Self> {
        loop {
            let call = match self.cut_off.take() {
                Some(call) => self.reconsider(call),
                None => self.choose()?,
            };
            if killed.load(Ordering::SeqCst) {
                self.cut_off = call;
                return Ok(self);
            }
            let Some(call) = call else { continue };
            if let Err(status) = self.make(&csi, call.clone()).await {
                if !killed.load(Ordering::SeqCst) {
                    bail!("worker {}: {call:?} failed: {status}", self.number);
                }
                self.in_doubt += 1;
                self.cut_off = Some(call);
                return Ok(self);
            }
            self.answered += 1;
        }
    }

    /// Finishes what was cut off and takes every volume down from where it was published.
    pub(super) async fn settle(mut self, csi: Csi) -> Result<Self> {
        if let Some(call) = self.cut_off.take() {
            self.make(&csi, call.clone()).await.with_context(|| format!("{call:?}"))?;
        }
        for index in 0..self.volumes.len() {
            let id = self.volumes[index].volume.id.clone();
            self.make(&csi, Call::Unpublish { id: id.clone() })
                .await
                .with_context(|| format!("take down {id}"))?;
        }
        Ok(self)
    }

    /// How many volumes may be listed beyond those that were answered.
    pub(super) fn doubtful_volumes(&self) -> usize {
        let now = matches!(self.cut_off, Some(Call::Create { .. } | Call::Delete { .. }));
        self.given_up.creations + self.given_up.deletions.len() + usize::from(now)
    }

    /// How many snapshots may be listed beyond those that were answered.
    pub(super) fn doubtful_snapshots(&self) -> usize {
        let now = match &self.cut_off {
            Some(Call::Snapshot { .. } | Call::DeleteSnapshot { .. }) => 1,
            Some(Call::Group { members, .. } | Call::DeleteGroup { members, .. }) => members.len(),
            _ => 0,
        };
        self.given_up.snapshots.len() + self.given_up.snapshot_deletions.len() + now
    }

    /// Checks that what is published still is, with its bytes: a workload does not notice that the driver died.
    pub(super) fn check_published(&self) -> Result<()> {
        for volume in &self.volumes {
            if let Some(mounted) = &volume.mounted {
                let found = machine::mounts_below(&mounted.target)?;
                ensure!(
                    !found.is_empty(),
                    "nothing is mounted for {} any more: {:?}",
                    volume.volume.id,
                    self.cut_off
                );
                check_slots(volume.volume.shape, &mounted.target, &volume.slots).with_context(|| {
                    let (id, cut_off) = (&volume.volume.id, &self.cut_off);
                    format!("{id} is no longer published; cut off was {cut_off:?}")
                })?;
            }
        }
        Ok(())
    }

    /// What a listed snapshot may hold, as far as this worker took it.
    pub(super) fn contents_of(&self, snapshot: &v1::Snapshot) -> impl Iterator<Item = &Slots> {
        self.candidates(snapshot).map(|taken| &taken.slots)
    }

    /// The shape of a listed snapshot's source, if this worker took it.
    pub(super) fn shape_of(&self, snapshot: &v1::Snapshot) -> Option<Shape> {
        self.candidates(snapshot).next().map(|taken| taken.shape)
    }

    fn candidates(&self, snapshot: &v1::Snapshot) -> impl Iterator<Item = &Taken> {
        let answered = self.snapshots.iter().chain(&self.given_up.snapshot_deletions);
        let exact = answered.clone().any(|taken| taken.id == snapshot.snapshot_id);
        let known = answered.filter(|taken| taken.id == snapshot.snapshot_id);
        let (id, source) = (exact, snapshot.source_volume_id.clone());
        known.chain(self.given_up.snapshots.iter().filter(move |taken| !id && taken.source == source))
    }

    /// Most cut-off calls are tried again; some are given up or turned round.
    fn reconsider(&mut self, call: Call) -> Option<Call> {
        if self.random.below(4) > 0 {
            return Some(call);
        }
        match call {
            Call::Create { .. } => self.given_up.creations += 1,
            Call::Delete { volume } => self.given_up.deletions.push(volume),
            Call::Snapshot { taken, .. } => self.given_up.snapshots.push(taken),
            Call::DeleteSnapshot { taken } => self.given_up.snapshot_deletions.push(taken),
            Call::Publish { id } => return Some(Call::Unpublish { id }),
            Call::Unpublish { id } => return Some(Call::Publish { id }),
            Call::Expand { .. } | Call::Group { .. } | Call::DeleteGroup { .. } => return Some(call),
        }
        None
    }

    /// The next thing to do; what needs no call is done at once.
    fn choose(&mut self) -> Result<Option<Call>> {
        if self.volumes.is_empty() {
            return Ok(Some(self.create(None)));
        }
        let index = usize::try_from(self.random.below(self.volumes.len() as u64))?;
        let volume = self.volumes[index].clone();
        let room = self.snapshots.len() < MOST_SNAPSHOTS;
        Ok(match self.random.below(20) {
            0..3 if self.volumes.len() < MOST_VOLUMES => Some(self.create(None)),
            3..5 if self.volumes.len() < MOST_VOLUMES && self.can_copy(&volume) => {
                Some(self.create(Some(&volume)))
            }
            5..7 if self.volumes.len() < MOST_VOLUMES => self.restore(),
            7 if volume.mounted.is_none() => {
                self.volumes.remove(index);
                Some(Call::Delete { volume })
            }
            8..10 if room && self.can_copy(&volume) => {
                Some(Call::Snapshot { name: self.name(), taken: Taken::of(&volume) })
            }
            10 if !self.snapshots.is_empty() => Some(self.forget_snapshot()),
            11 if room && self.volumes.len() > 1 => self.group(),
            12..15 if volume.mounted.is_none() => Some(Call::Publish { id: volume.volume.id }),
            15 if volume.mounted.is_some() => Some(Call::Unpublish { id: volume.volume.id }),
            16 if volume.bytes < 4 * volume.volume.shape.bytes => {
                Some(Call::Expand { id: volume.volume.id, bytes: volume.bytes + 32 * MIB })
            }
            _ => {
                self.write(index)?;
                None
            }
        })
    }

    fn can_copy(&self, volume: &Tracked) -> bool {
        self.reflinks || volume.mounted.is_none() || volume.volume.shape.access != Access::Block
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("w{}-{}", self.number, self.names)
    }

    fn create(&mut self, source: Option<&Tracked>) -> Call {
        let name = self.name();
        match source {
            None => Call::Create {
                name,
                shape: *self.random.pick(self.shapes),
                source: None,
                slots: Slots::new(),
            },
            Some(from) => Call::Create {
                name,
                shape: Shape { bytes: from.bytes, ..from.volume.shape },
                source: Some(from_volume(&from.volume.id)),
                slots: from.slots.clone(),
            },
        }
    }

    fn restore(&mut self) -> Option<Call> {
        if self.snapshots.is_empty() {
            return None;
        }
        let taken = self.random.pick(&self.snapshots).clone();
        let source = Some(from_snapshot(&taken.id));
        Some(Call::Create { name: self.name(), shape: taken.shape, source, slots: taken.slots })
    }

    fn forget_snapshot(&mut self) -> Call {
        let taken = self.random.pick(&self.snapshots).clone();
        let Some(group) = taken.group.clone() else {
            self.snapshots.retain(|other| other.id != taken.id);
            return Call::DeleteSnapshot { taken };
        };
        let (members, others) = std::mem::take(&mut self.snapshots)
            .into_iter()
            .partition(|other: &Taken| other.group.as_ref() == Some(&group));
        self.snapshots = others;
        Call::DeleteGroup { id: group, members }
    }

    /// Two volumes of one kind that a moment can be had of; directories have none.
    fn group(&mut self) -> Option<Call> {
        let able: Vec<&Tracked> =
            self.volumes.iter().filter(|v| v.volume.shape.kind != Kind::Dir && self.can_copy(v)).collect();
        let first = able.first()?;
        let second = able.iter().skip(1).find(|v| v.volume.shape.kind == first.volume.shape.kind)?;
        let members = vec![Taken::of(first), Taken::of(second)];
        Some(Call::Group { name: self.name(), members })
    }

    /// Writes to a published volume and reads all of it back.
    fn write(&mut self, index: usize) -> Result<()> {
        let (slot, seed) = (self.random.below(SLOTS), self.random.number());
        let volume = &mut self.volumes[index];
        let Some(mounted) = &volume.mounted else { return Ok(()) };
        write_slot(volume.volume.shape, &mounted.target, slot, seed)
            .with_context(|| format!("write to {} {:?}", volume.volume.id, volume.volume.shape))?;
        volume.slots.insert(slot, seed);
        check_slots(volume.volume.shape, &mounted.target, &volume.slots)
            .with_context(|| format!("read {} back", volume.volume.id))
    }

    /// Makes a call, and when it is answered takes note of what is true now.
    async fn make(&mut self, csi: &Csi, call: Call) -> Result<(), Status> {
        match call {
            Call::Create { name, shape, source, slots } => {
                let request =
                    v1::CreateVolumeRequest { volume_content_source: source, ..shape.request(&name) };
                let volume = csi.create_by(shape, request).await?;
                self.volumes.push(Tracked { bytes: shape.bytes, volume, slots, mounted: None });
            }
            Call::Delete { volume } => csi.delete(&volume.volume.id).await?,
            Call::Snapshot { name, taken } => {
                let id = csi.snapshot(&name, &taken.source).await?.snapshot_id;
                self.snapshots.push(Taken { id, ..taken });
            }
            Call::DeleteSnapshot { taken } => csi.delete_snapshot(&taken.id).await?,
            Call::Group { name, members } => {
                let sources: Vec<&str> = members.iter().map(|member| member.source.as_str()).collect();
                let group = csi.group_snapshot(&name, &sources).await?;
                for snapshot in group.snapshots {
                    let member = members.iter().find(|member| member.source == snapshot.source_volume_id);
                    let member = member.ok_or_else(|| Status::internal("a group with a stranger in it"))?;
                    let group = Some(group.group_snapshot_id.clone());
                    self.snapshots.push(Taken { id: snapshot.snapshot_id, group, ..member.clone() });
                }
            }
            Call::DeleteGroup { id, members } => {
                let members: Vec<String> = members.into_iter().map(|member| member.id).collect();
                csi.delete_group_snapshot(&id, &members).await?;
            }
            Call::Publish { id } => {
                let dir = self.dir.clone();
                let volume = self.tracked(&id)?;
                let mounted = csi.mount(&volume.volume, &dir).await?;
                volume.mounted = Some(mounted);
            }
            Call::Unpublish { id } => {
                let mounted = Mounted::paths(&id, &self.dir)?;
                let volume = self.tracked(&id)?;
                // Not to be written to from now on, whatever becomes of the call.
                volume.mounted = None;
                csi.unmount(&mounted).await?;
            }
            Call::Expand { id, bytes } => {
                let volume = self.tracked(&id)?;
                let answer = csi.expand(&volume.volume, bytes).await?;
                volume.bytes = bytes;
                if let Some(mounted) = volume.mounted.as_ref().filter(|_| answer.node_expansion_required) {
                    csi.node_expand(&volume.volume, mounted, bytes).await?;
                }
            }
        }
        Ok(())
    }

    fn tracked(&mut self, id: &str) -> Result<&mut Tracked, Status> {
        let found = self.volumes.iter_mut().find(|tracked| tracked.volume.id == id);
        found.ok_or_else(|| Status::internal(format!("the worker has lost sight of {id}")))
    }
}

impl Taken {
    fn of(volume: &Tracked) -> Self {
        Self {
            id: String::new(),
            group: None,
            source: volume.volume.id.clone(),
            shape: Shape { bytes: volume.bytes, ..volume.volume.shape },
            slots: volume.slots.clone(),
        }
    }
}

fn write_slot(shape: Shape, target: &Path, slot: u64, seed: u64) -> Result<()> {
    match shape.access {
        Access::Mount(_) => content::write(&target.join(format!("slot-{slot}")), &slot_bytes(shape, seed))?,
        Access::Block => content::write_at(target, &slot_bytes(shape, seed), slot << 20)?,
    }
    Ok(())
}

fn slot_bytes(shape: Shape, seed: u64) -> Vec<u8> {
    // Files of any length; a device in whole blocks, and always the same, so that nothing old shows behind the new.
    let length =
        if shape.access == Access::Block { 16 << 10 } else { usize::try_from(seed % 50_000).unwrap_or(1) };
    content::bytes(seed, length)
}

/// Checks that a published volume holds exactly this.
pub(super) fn check_slots(shape: Shape, target: &Path, slots: &Slots) -> Result<()> {
    for slot in 0..SLOTS {
        let file = target.join(format!("slot-{slot}"));
        let expected = slots.get(&slot).map(|seed| slot_bytes(shape, *seed));
        let found = match shape.access {
            Access::Block => Some(content::read_at(target, 16 << 10, slot << 20)?),
            Access::Mount(_) if file.exists() => Some(fs::read(&file)?),
            Access::Mount(_) => None,
        };
        let expected = expected.or_else(|| (shape.access == Access::Block).then(|| vec![0; 16 << 10]));
        let (has, wants) = (found.as_ref().map(Vec::len), expected.as_ref().map(Vec::len));
        ensure!(found == expected, "slot {slot} holds {has:?} bytes that are not the {wants:?} written");
    }
    Ok(())
}
